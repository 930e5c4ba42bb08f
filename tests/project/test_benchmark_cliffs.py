"""The benchmark of drawn calls: what is drawn, how peers compute it, what is told of it."""

import dataclasses
import itertools
import json
import math
import sys
import time
import types
from pathlib import Path
from typing import Any

import cliffs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import ahead, drawn, drawn_peers, drawn_programs, drawn_tables, shapes
from common.drawn import Drawn

TINY = Drawn(2, 24, 24, 4, 2, 16, "float32", contents=5)


def asked(monkeypatch: pytest.MonkeyPatch, *words: str) -> list[drawn_programs.Problem]:
    monkeypatch.setattr(sys, "argv", ["cliffs.py", *words])
    return cliffs.problems(cliffs.parse(), drawn.GPU)


def test_a_problem_is_the_same_call_whatever_else_is_drawn(monkeypatch: pytest.MonkeyPatch):
    many = asked(monkeypatch, "--seeds", "3", "4", "--problems", "20")
    assert [(x.source, x.index) for x in many[:3]] == [("seed 3", 0), ("seed 4", 0), ("seed 3", 1)]
    one = asked(monkeypatch, "--seeds", "4", "--only", "17", "0")
    assert [x.index for x in one] == [17, 0]
    assert set(one) < set(many)
    assert asked(monkeypatch, "--seeds", "3", "4", "--problems", "20", "--from", "5") == many[10:]
    # As it was when figures were published: another order of draws is another benchmark.
    assert [drawn.draw(0, i, drawn.GPU).name for i in range(3)] == [
        "f32 B1 T3732 S720 1/1 d128",
        "bf16 B1 T8 3/3 d88 causal bias 11TS with gradient dropout 0.1",
        "f32 B416 T16 40/40 d48",
    ]
    assert set(asked(monkeypatch, "--set", "few", "--only", "1")) == {
        drawn_programs.Problem("few", 1, Drawn(32, 64, 64, 8, 1, 256, causal=True))
    }


@pytest.mark.parametrize("limits", [drawn.GPU, drawn.TINY])
def test_what_is_drawn(limits: drawn.Limits):
    calls = [drawn.draw(seed, i, limits) for seed in range(3) for i in range(300)]
    assert len(set(calls)) == len(calls)
    for call in calls:
        assert call.heads % call.kv_heads == 0
        assert max(call.q_len, call.kv_len) <= limits.longest
        assert 16 <= call.head_dim <= limits.head_dim
        assert call.scores <= limits.scores
        assert max(np.prod(shape) for shape in call.sizes.values()) <= limits.elements
        assert np.prod(call.operands["bias"][0] if call.bias else 0) <= limits.bias
        # Each query sees a key: peers differ in what one that sees none returns.
        assert call.bottom_right == (call.causal and call.q_len != call.kv_len)
        assert not call.bottom_right or call.q_len < call.kv_len
        assert call.q_len == call.kv_len or not (call.window or call.documents)
        if (other := call.neighbour) is not None:
            assert other.neighbour is None or other.head_dim % 8 == 0 != call.head_dim % 8
            assert other.scores * other.head_dim > call.scores * call.head_dim
    fields = ("causal", "window", "bottom_right", "documents", "bias", "bias_gradient", "mask")
    for field in (*fields, "dropout"):
        assert any(getattr(call, field) for call in calls), field
    assert {call.lengths for call in calls} == {"", "both", "keys"}
    assert {call.dtype for call in calls} == {"bfloat16", "float16", "float32"}
    kinds = {(x.kv_heads == x.heads, x.kv_heads == 1) for x in calls if x.heads > 2}
    assert len(kinds) == 3
    assert any(call.head_dim % 8 for call in calls)


def test_sizes_beside_a_call():
    def beside(*sizes: int) -> tuple[int, ...] | None:
        found = Drawn(1, sizes[0], sizes[1], 1, 1, sizes[2]).neighbour
        return None if found is None else (found.q_len, found.kv_len, found.head_dim)

    assert beside(1000, 77, 72) == (1024, 128, 96)
    assert beside(4096, 4096, 100) == (4096, 4096, 104)
    assert beside(1, 129, 64) == (1, 256, 64)
    assert beside(128, 384, 128) is None


FEATURES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "bottom-right": {"causal": True, "bottom_right": True, "q_len": 9},
    "window": {"window": (5, 3)},
    "lengths": {"lengths": "both", "causal": True},
    "keys": {"lengths": "keys", "q_len": 7},
    "documents": {"documents": 4, "causal": True},
    "bias": {"bias": "1NTS", "bias_gradient": True},
    "mask": {"mask": True, "bias": "B11S"},
} | {name: {"score": name} for name in drawn_peers.SCORES}


def compare_with_ours(call: Drawn, attend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares out and gradients, as the script does before it times."""
    monkeypatch.setattr(drawn, "CALLS", 1)
    chosen = {"jax_flash": drawn_peers.attend_flash, "jax_xla": attend}
    problem = drawn_programs.Problem("test", 0, call)
    programs = drawn_programs.compile_problem(problem, chosen, neighbours=False)
    given = drawn.arrays(call)
    found, wrong = cliffs.check(problem, programs, given, jax.tree.map(jnp.asarray, given))
    assert (programs.no, wrong) == ({}, {})
    assert max(found["jax_flash"]["training"].values()) < 1e-4


@pytest.mark.parametrize("feature", FEATURES)
def test_the_plain_program_computes_the_call(feature: str, monkeypatch: pytest.MonkeyPatch):
    call = dataclasses.replace(TINY, **FEATURES[feature])
    compare_with_ours(call, drawn_peers.attend_xla, monkeypatch)


@pytest.mark.parametrize("feature", list(FEATURES)[:6])
def test_flash_attention_3_is_asked_for_the_call(feature: str, monkeypatch: pytest.MonkeyPatch):
    """By its conventions: causality and windows stand at the last key of each sequence."""

    def flash_mha(q, k, v, is_causal, window_size):  # in NumPy: each sequence has another shape
        left, right = (math.inf if side < 0 else side for side in window_size)
        q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
        k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        (T, S), H = (q.shape[1], k.shape[1]), q.shape[3]
        behind = np.arange(T)[:, None] + S - T - np.arange(S)
        seen = (behind <= left) & (behind >= (0 if is_causal else -right))
        weights = np.exp(np.einsum("btnh,bsnh->bnts", q, k) / math.sqrt(H)) * seen
        sums = np.maximum(weights.sum(-1, keepdims=True), 1e-300)
        return np.einsum("bnts,bsnh->btnh", weights / sums, v).astype(np.float32)

    def flash_mha_varlen(q, k, v, starts, longest, key_cu_seqlens, key_max_seqlen, **options):
        queries, keys = (np.asarray(x) for x in (starts, key_cu_seqlens))
        assert np.diff(queries).max() <= longest
        assert np.diff(keys).max() <= key_max_seqlen
        assert (queries[-1], keys[-1]) == (len(q), len(k))
        parts = [
            flash_mha(q[None, a:b], k[None, c:d], v[None, c:d], **options)[0]
            for (a, b), (c, d) in zip(
                itertools.pairwise(queries), itertools.pairwise(keys), strict=True
            )
        ]
        return np.concatenate(parts)

    module = types.SimpleNamespace(flash_mha=flash_mha, flash_mha_varlen=flash_mha_varlen)
    monkeypatch.setitem(sys.modules, "dew_flash_attn", module)
    call = dataclasses.replace(TINY, **FEATURES[feature])
    given = {name: jnp.asarray(x) for name, x in drawn.arrays(call).items()}
    got = drawn_peers.attend_fa3(call, given)
    want = drawn_peers.attend_xla(call, given)
    seen = drawn.valid(call, given)["out"][..., None, None]
    assert np.abs(np.where(seen, got - want, 0)).max() < 1e-5
    with pytest.raises(NotImplementedError, match="no bias"):
        drawn_peers.attend_fa3(dataclasses.replace(call, bias="1NTS"), given)


def test_dropout_is_compared_by_its_noise():
    call = dataclasses.replace(TINY, batch=4, dropout=0.1)
    right = {"out": 0.33, "q": 0.4, "k": 0.4, "v": 0.34}
    assert not cliffs.is_wrong(call, right, drops=True)
    assert cliffs.is_wrong(call, right | {"out": 0.0}, drops=True)  # drops nothing
    assert cliffs.is_wrong(call, right | {"v": 0.7}, drops=True)
    assert cliffs.is_wrong(call, right | {"q": float("nan")}, drops=True)
    assert cliffs.is_wrong(call, {"out": 0.02}, drops=False)


def test_drawn_calls_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    def shifted(call: Drawn, given: dict[str, Any]) -> Any:
        return drawn_peers.attend_xla(call, given) + jnp.asarray(0.5, call.dtype)

    def refused(call: Drawn, given: dict[str, Any]) -> Any:
        raise NotImplementedError("nothing")

    peers = {
        "jax_flash": drawn_peers.attend_flash,
        "jax_xla": drawn_peers.attend_xla,
        "jax_cudnn": refused,
        "fa3": shifted,
    }
    monkeypatch.setattr(drawn_peers, "all_peers", lambda: peers)
    monkeypatch.setattr(drawn, "CALLS", 2)
    monkeypatch.setattr(drawn, "PROGRAM_SECONDS", 0)
    monkeypatch.setattr(cliffs, "WINDOW", 0.0)
    monkeypatch.setattr(cliffs, "NEAR", math.inf)
    words = ["cliffs.py", "--platform", "cpu", "--seeds", "0", "--only", "2"]
    words += ["--processes", "0"]
    monkeypatch.setattr(sys, "argv", [*words, "--output", str(tmp_path), "--commit", "abc"])
    cliffs.main()
    path = tmp_path / "cpu" / "cliffs-abc.json"
    record = json.loads(path.read_text())
    assert (record["asked"], record["measured"]) == (1, 1)
    assert record["command"] == f"python benchmarks/{' '.join(words)}"
    for one in record["problems"]:
        cell = one["cell"] | {"window": one["cell"]["window"] and tuple(one["cell"]["window"])}
        assert Drawn(**cell) == drawn.draw(0, one["problem"]["index"], drawn.TINY)
        for way, ms in one["ms"].items():
            beside = {"neighbour"} if way.startswith("program") else set()
            assert set(ms) == {"jax_flash", "jax_xla"} | beside
            assert (min(ms.values()) > 0, one["spread"][way].keys()) == (True, ms.keys())
        assert set(one["wrong"]) == {"fa3, forward", "fa3, forward + backward"}
        assert set(one["no"].values()) == {"NotImplementedError: nothing"}
        ways = [f"{kind} {of}" for kind, of in drawn_tables.WAYS]
        names = {*peers, "neighbour"} - {"jax_cudnn"}
        compiled = {f"{name}, {way}" for name in names for way in ways}
        compiled -= {f"neighbour, single {of}" for of in shapes.PASSES}
        refused = {f"jax_cudnn, single {of}" for of in shapes.PASSES}
        assert (set(one["compiling"]), one["untuned"]) == (compiled | refused, False)
    printed = capsys.readouterr().out
    assert printed.endswith(f"{path.with_suffix('.md').read_text()}\n{path}\n")
    assert "1 of 1 problems were measured, 0 with XLA's products as cuBLAS chooses" in printed
    assert "- jax_cudnn: NotImplementedError: nothing (2 passes)" in printed
    assert "Seconds of processes that compiled: " in printed


def test_a_run_goes_on_with_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The rest at first; with --tune, what XLA's program could lead in."""
    peers = {"jax_flash": drawn_peers.attend_flash, "jax_xla": drawn_peers.attend_xla}
    monkeypatch.setattr(drawn_peers, "all_peers", lambda: peers)
    monkeypatch.setattr(drawn, "CALLS", 2)
    monkeypatch.setattr(drawn, "PROGRAM_SECONDS", 0)
    monkeypatch.setattr(cliffs, "WINDOW", 0.0)
    path = tmp_path / "cpu" / "cliffs-abc.json"

    def run(*words: str) -> dict[int, dict[str, Any]]:
        words = ("cliffs.py", "--platform", "cpu", "--seeds", "0", "--processes", "0", *words)
        words += ("--no-neighbours", "--seconds", "1000", "--output", str(tmp_path))
        monkeypatch.setattr(sys, "argv", [*words, "--commit", "abc"])
        cliffs.main()
        return {one["problem"]["index"]: one for one in json.loads(path.read_text())["problems"]}

    first = run("--only", "0")
    both = run("--problems", "2", "--resume", str(path))
    assert (set(first), set(both), both[0]) == ({0}, {0, 1}, first[0])
    monkeypatch.setattr(cliffs, "is_near", lambda record: record["problem"]["index"] == 1)
    tuned = run("--problems", "2", "--resume", str(path), "--tune")
    assert [tuned[i]["untuned"] for i in (0, 1)] == [True, False]
    capsys.readouterr()


def test_processes_compile_ahead():
    """They end with the block, or when their time is over."""
    with ahead.Processes("cpu", 1) as processes:
        assert dict(processes.each(math.sqrt, [1.0, 4.0])) == {1.0: 1.0, 4.0: 2.0}
        assert list(processes.each(time.sleep, [600], time.perf_counter() + 0.1)) == []


@pytest.mark.parametrize("far", [False, True])
def test_what_cannot_lead_is_called_singly_alone(far: bool, monkeypatch: pytest.MonkeyPatch):
    """Programs are measured as another process hands them on."""
    monkeypatch.setattr(drawn, "CALLS", 1)
    monkeypatch.setattr(drawn, "PROGRAM_SECONDS", 0)
    monkeypatch.setattr(cliffs, "WINDOW", 0.0)
    monkeypatch.setattr(drawn_programs, "cannot_lead", lambda call, chosen: far)
    peers = {
        "jax_flash": drawn_peers.attend_flash,
        "jax_xla": drawn_peers.attend_xla,
        "fa3": drawn_peers.attend_xla,
    }
    problem = drawn_programs.Problem("test", 0, TINY)
    programs = drawn_programs.compile_problem(problem, peers, neighbours=False).packed()
    record, loaded = cliffs.measure_or_say(problem, programs)
    cliffs.measure_singly(problem, loaded, record)
    assert (record["untuned"], record["wrong"], record["no"]) == (True, {}, {})
    for kind, of in drawn_tables.WAYS:
        alone = {"jax_flash", "fa3"} if far and kind == "program" else set(peers)
        assert set(record["ms"][f"{kind} {of}"]) == alone


def test_xla_cannot_lead_where_its_scores_are_many():
    """Beside a peer whose kernels run the call."""
    many = Drawn(4, 4096, 4096, 8, 8, 128)
    chosen = dict.fromkeys(["jax_flash", "jax_xla", "fa3"])
    assert drawn_programs.cannot_lead(many, chosen)
    assert not drawn_programs.cannot_lead(many, dict.fromkeys(["jax_flash", "jax_xla"]))
    for few in ({"dtype": "float32"}, {"score": "exp"}, {"q_len": 16}, {"kv_len": 16}):
        assert not drawn_programs.cannot_lead(dataclasses.replace(many, **few), chosen)


def test_the_worst_are_told():
    def record(index: int, **ms: float) -> dict[str, Any]:
        ways = {f"{kind} {of}": ms for kind, of in drawn_tables.WAYS}
        return {
            "problem": {"source": "seed 0", "index": index, "name": f"call {index}"},
            "neighbour": "beside",
            "ms": ways,
            "wrong": {},
            "no": {},
            "ran": dict.fromkeys(shapes.PASSES, "by"),
        }

    records = [
        record(0, jax_flash=1.0, jax_xla=4.0, fa3=2.0, neighbour=1.5),
        record(1, jax_flash=1.0, jax_cudnn=0.5),
        record(2, jax_xla=1.0),
    ]
    for i, x in enumerate((0.02, 0.09, 0.03)):
        records[i]["spread"] = {"program forward": {"jax_flash": x, "fa3": 0.0}}
    rows = drawn_tables.summary(records).splitlines()
    assert rows[2] == "| program, forward | 2 | 1.000 | 0.500 | 1 | 1.500 | 1.500 | 3.0, 9.0 |"
    first, second = drawn_tables.worst(records).split("\n\n")
    assert first.splitlines()[2].startswith(
        "| 0.500 | seed 0 #1 | call 1 | program, forward | 1000 | 500 | jax.nn, cuDNN |"
    )
    assert len(first.splitlines()) == 2 + 8
    assert second.splitlines()[2].split(" | ")[-3:] == ["1500", "beside", "by |"]
    records[2]["no"] = {"jax_flash, forward": "RuntimeError: none"}
    records[1]["wrong"] = {"fa3, forward": "out 0.5"}
    assert drawn_tables.missing(records).splitlines() == [
        "- Wrong: fa3, forward: out 0.5 (seed 0 #1, call 1)",
        "- No result: jax_flash, forward: RuntimeError: none (seed 0 #2, call 2)",
    ]


def test_a_budget_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    clock = itertools.count(0.0, 4.0)  # a problem takes some seconds
    monkeypatch.setattr(cliffs, "time", types.SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(cliffs, "compile_packed", lambda *_: None)
    ways = {f"{kind} {of}": {"jax_flash": 1.0} for kind, of in drawn_tables.WAYS}
    record = {"ms": ways, "wrong": {}, "no": {}, "compiling": {}, "untuned": True}
    record["ran"] = dict.fromkeys(shapes.PASSES, "by")

    def measure(problem: drawn_programs.Problem, _: Any) -> Any:
        where = {"source": problem.source, "index": problem.index, "name": "call"}
        return record | {"problem": where}, None

    monkeypatch.setattr(cliffs, "measure_or_say", measure)
    monkeypatch.setattr(cliffs, "measure_singly", lambda *_: None)
    words = ["cliffs.py", "--platform", "cpu", "--seconds", "100", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*words, "--processes", "0"])
    cliffs.main()
    told = capsys.readouterr().out
    count = int(told.split(" of 300 problems were measured")[0].split()[-1])
    assert 12 < count < 26
