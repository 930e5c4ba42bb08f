"""What the GPU benchmark measures and shows; its numbers need a GPU."""

import argparse
import collections
import dataclasses
import functools
import itertools
import json
import os
import re
import runpy
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"

if not FOLDER.is_dir():
    pytest.skip("needs the checkout's benchmarks/", allow_module_level=True)
sys.path.insert(0, str(FOLDER))

import compare  # noqa: E402
import decode  # noqa: E402
import features  # noqa: E402
import scaling  # noqa: E402
import sparse  # noqa: E402
import train_step  # noqa: E402
import tune  # noqa: E402
from common import charts, exact, feature_peers, machine, peers, runs, shapes  # noqa: E402
from common.shapes import Cell  # noqa: E402
from figures import canvas, drawings, measured  # noqa: E402

import cpu  # noqa: E402
import jax_flash  # noqa: E402
from jax_flash import _gpu  # noqa: E402
from jax_flash._ops import passes  # noqa: E402
from jax_flash._problem import Problem, Shapes  # noqa: E402


def test_the_front_door_says_what_there_is():
    door = functools.partial(subprocess.run, capture_output=True, text=True, cwd=FOLDER.parent)
    listed = door([sys.executable, "benchmarks"], check=True).stdout.splitlines()[2:]
    names = [line.split()[0] for line in listed]
    scripts = {x.stem for x in FOLDER.glob("*.py")}
    assert len(names) <= 12
    assert {*names} == scripts - {"__main__"} | {"figures", "host"}
    assert all(re.fullmatch(r"  \w+ +[A-Z][^.]+.*[.]", line) for line in listed)
    for start in (["benchmarks"], ["-m", "benchmarks"]):
        there = door([sys.executable, *start, "tune", "--help"], check=True).stdout
        assert there.startswith("usage: tune.py ")
    refused = door([sys.executable, "benchmarks", "tunes"], check=False)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith("no benchmark is called 'tunes': there are compare, cpu, ")


def test_documents_name_benchmarks_that_there_are():
    """Scripts, and results; CHANGELOG.md may name older ones."""
    root = FOLDER.parent
    pages = [root / "README.md", root / "CONTRIBUTING.md", FOLDER / "README.md"]
    pages += [*root.glob("docs/*.md"), *root.glob("cuda/*.md"), root / ".ci" / "gpu"]
    texts = "\n".join(page.read_text() for page in pages if page.is_file())
    named = {*re.findall(r"(?<!build/)benchmarks/[\w./*-]*\w", texts)}
    assert len(named) > 15
    assert {x for x in named if not [*root.glob(x)]} == set()
    scripts = {x.stem for x in FOLDER.glob("*.py")} | {"figures", "host"}
    doors = {*re.findall(r"python benchmarks (\w+)", texts)}
    assert "figures" in doors
    assert doors <= scripts
    decisions = (root / "docs" / "decisions.md").read_text()
    tables = re.findall(r"\| Commit \| By \|\n\|[-|]+\|\n((?:\|.*\n)+)", decisions)
    by = {*re.findall(r"\| *([^|]*?) *\|$", "".join(tables), re.MULTILINE)}
    by = {name for several in by for name in several.split(", ") if name}
    assert "functions" in by
    assert by <= scripts | {"functions", "errors", "ncu", "spills"}


def test_results_have_one_set_of_each_kind():
    kinds = collections.Counter(
        (path.parent.name, re.sub(r"-?[0-9a-f]{7,10}", "", path.name))
        for path in (FOLDER / "results").glob("*/*")
    )
    assert kinds["nvidia-h200", "features.json"] == kinds["nvidia-h200", ".json"] == 1
    assert {kind for kind, count in kinds.items() if count > 1} == set()


@pytest.mark.parametrize(
    "script",
    ["run", "features", "tune", "train_step", "compare", "sparse"],
)
def test_what_measures_a_gpu_says_so_elsewhere(script: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jax.default_backend", lambda: "cpu")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # of processes that are asked
    errors = ["--errors", str(Path(jax_flash.__file__).parents[1])] * (script == "compare")
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *errors])
    with pytest.raises(SystemExit, match=rf"{script}.py measures on an NVIDIA GPU.*'cpu'"):
        runpy.run_path(str(FOLDER / f"{script}.py"), run_name="__main__")


@pytest.mark.parametrize("torch", [False, True])
def test_a_cpu_is_measured_without_pytorch(
    torch: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    monkeypatch.setattr(machine, "has_torch", lambda: torch)
    monkeypatch.setattr(cpu, "LENGTHS", (16,))
    peers = ["--peers", "jax_flash", "xla"] if torch else []
    words = ["cpu.py", "--seconds", "0", "--only", "full float32", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*words, *peers])
    cpu.main()
    printed = capsys.readouterr()
    assert ("pip install 'jax_flash[bench]'" in printed.err) != torch
    assert "| 16 | full | float32 | forward+backward | " in printed.out
    (path,) = tmp_path.glob("cpu/*.json")
    cells = json.loads(path.read_text())["seconds"].values()
    assert all(cell.keys() == {"jax_flash", "xla"} for cell in cells)


def test_results_go_where_git_does_not_look():
    root = FOLDER.parent
    assert machine.RESULTS.parts[: len(root.parts) + 1] == (*root.parts, "build")
    assert "/build/" in (root / ".gitignore").read_text().splitlines()


def visible(cell: Cell) -> np.ndarray:
    queries, keys = np.arange(cell.length)[:, None], np.arange(cell.length)
    seen = np.ones((cell.length, cell.length), bool)
    if cell.causal:
        seen &= keys <= queries
    if cell.window is not None:
        seen &= keys >= queries - cell.window
    if cell.segment is not None:
        seen &= keys // cell.segment == queries // cell.segment
    return seen


def test_main_cells_are_the_papers():
    cells = shapes.main_cells()
    assert len(cells) == len(set(cells)) == 36
    for cell in cells:
        assert cell.batch * cell.length == 16384
        assert cell.heads * cell.head_dim == 2048
    assert len({cell.name for cell in cells + shapes.feature_cells()}) == 36 + 7


@pytest.mark.parametrize("cell", shapes.feature_cells(128, 256, (128,)), ids=lambda cell: cell.name)
def test_operations_are_those_of_visible_pairs(cell: Cell):
    pairs = np.count_nonzero(visible(cell))
    diagonal = cell.length / 2 if cell.causal and cell.window is None else 0
    assert cell.pairs == pairs - diagonal
    assert cell.flops("forward") == 4 * cell.batch * cell.heads * cell.head_dim * cell.pairs
    assert cell.flops("training") == 3.5 * cell.flops("forward")


@pytest.mark.parametrize("cell", shapes.feature_cells(64, 256, (64,))[:3], ids=lambda c: c.name)
def test_errors_are_against_exact_attention(cell: Cell):
    rng = np.random.default_rng(0)
    shape = (cell.batch, cell.length, cell.heads, cell.head_dim)
    q, k, v, dout = rng.standard_normal((4, *shape))
    scores = np.einsum("bthd,bshd->bhts", q, k) * cell.head_dim**-0.5
    p = np.exp(np.where(visible(cell), scores, -np.inf))
    p /= p.sum(-1, keepdims=True)
    out = np.einsum("bhts,bshd->bthd", p, v)
    found = exact.errors(cell, (q, k, v, dout), (out,))
    assert found["out"] < 1e-12
    assert exact.errors(cell, (q, k, v, dout), (1.01 * out,))["out"] == pytest.approx(0.01)


def test_chart_and_table(tmp_path: Path):
    results = [(cell, {"ours": 500.0, "other": 400.0}) for cell in shapes.main_cells()]
    looks = {"ours": ("Ours", "red"), "other": ("Other", "blue"), "absent": ("Absent", "grey")}
    charts.draw(results, "forward", looks, "H200", tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 10_000
    table = charts.table(results, "forward", looks, "ours", "other")
    assert "| d64 full T512 | 500 | 400 | 1.25 |" in table
    assert table.splitlines()[-1] == "| geometric mean | | | 1.250 |"
    summary = charts.summary({"forward": results, "training": results}, looks, "ours", "other")
    assert "| head dim 64, causal | 500 | 400 | 1.25 × | 500 | 400 | 1.25 × |" in summary
    assert summary.splitlines()[-1] == "| all |  |  | 1.25 × |  |  | 1.25 × |"
    curves = {("ours", seed): [3.0, 2.0, 1.5] for seed in (0, 1)}
    charts.draw_losses(curves, looks, "H200", tmp_path / "losses.png")
    assert (tmp_path / "losses.png").stat().st_size > 10_000
    sentence = charts.compare(results, looks, "other", "ours")
    assert sentence.startswith(
        "Other beside Ours, 36 cells: 0.80 × in the geometric mean, 0.80 (d64"
    )


def test_training_tables():
    cell = {"kind": "step", "length": 4096, "batch": 8, "remat": True}
    found = {"tokens_per_second": 400_000, "mfu": 0.4, "program_gb": 23.7502, "peak_gb": 23.8}
    plans = {65536: 7.0, 131072: 150.0, 98304: "out of memory"}
    records = [
        cell | {"attention": "none", "ms": 60.0},
        cell | {"attention": "jax_flash", "ms": 80.0} | found,
        cell | {"attention": "xla", "error": "out of memory"},
        {"kind": "longest", "attention": "jax_flash", "limit_gb": 140.0, "plans": plans},
    ]
    steps, longest = train_step.tables(records)
    assert "| 4096 | 8 | yes | jax_flash | 80.0 | 400,000 | 40.0% | 23.750 | 23.8 | 25% |" in steps
    assert "| 4096 | 8 | yes | xla | out of memory |" in steps
    assert "| jax_flash | 65536 | 7.0 | 98304 | out of memory |" in longest


def test_distance_of_loss_curves():
    def curve(attention: str, seed: int, shift: float) -> dict[str, object]:
        losses = [3.0 + shift] * 40
        record = {"kind": "loss", "attention": attention, "seed": seed}
        return record | {"losses": losses, "validation": 2.0 + shift}

    shifts = [("jax_flash", 0, 0.0), ("xla", 0, 0.1), ("jax_flash", 1, 0.5), ("xla", 1, 0.5)]
    found = train_step.compare_curves([curve(*shift) for shift in shifts])
    assert found is not None
    assert found["curves_apart_by_attentions"] == pytest.approx([0.1, 0.0])
    assert found["curves_apart_by_seeds"] == pytest.approx([0.5, 0.4])
    assert train_step.compare_curves([curve(*shifts[0])]) is None


@pytest.mark.parametrize("length", [512, 640])
def test_blocks_are_those_with_a_visible_pair(length: int):
    for cell in shapes.feature_cells(length, 256, (length,)):
        seen = np.zeros((640, 640), bool)
        seen[: cell.length, : cell.length] = visible(cell)
        blocks = seen.reshape(5, 128, 5, 128).any((1, 3))
        assert cell.block_pairs == np.count_nonzero(blocks) * 128**2, cell.name


def test_block_table():
    plain = Cell(1, 512, 1, 1, 64, causal=True)
    window = Cell(1, 512, 1, 1, 64, causal=True, window=127)
    table = charts.blocks([(plain, {"ours": 400.0}), (window, {"ours": 200.0})], "ours")
    # Ten blocks for 8 blocks' worth of pairs; seven for 512 * 128 - 127 * 64 pairs.
    assert (
        table.splitlines()[-1] == "| d64 causal window 127 heads 1/1 T512 | 200 | 400 | 500 | 80% |"
    )
    assert charts.blocks([(plain, {"ours": 400.0})], "ours") == ""


def test_tuned_variants_fit_the_gpu():
    sizes = Shapes(
        batch=4, q_len=4096, kv_len=4096, q_heads=16, kv_heads=16, head_dim=128, value_dim=128
    )
    problem, h200 = Problem(dtype="bfloat16", scale=0.1), _gpu.spec.GPUS["H200"]
    forward, backward = passes(problem).values()

    def tune_tiling(which, call, changes):
        return tune.plan_changed(_gpu.plan, which, changes, call, sizes, h200).tiling

    changes = dict(tune.read(word) for word in ["stages=2", "query_stages=2", "dynamic=False"])
    tiling = tune_tiling("forward", forward, changes)
    assert (tiling.stages, tiling.query_stages, tiling.dynamic) == (2, 2, False)
    assert tune_tiling("backward", forward, changes) == _gpu.plan(forward, sizes, h200).tiling
    with pytest.raises(ValueError, match="needs 264192 of 232448 bytes"):
        tune_tiling("forward", forward, {"query_stages": 2})
    tiling = tune_tiling("backward", backward, {"reads_ahead": False, "l2_heads": 3})
    assert (tiling.reads_ahead, tiling.l2_heads) == (False, 3)
    with pytest.raises(ValueError, match="needs 281600 of 232448 bytes"):
        tune_tiling("backward", backward, {"score_stages": 5})


def test_installed_versions_are_compared():
    folder = str(Path(jax_flash.__file__).parents[1])
    options = "--head-dim 32 --length 64 --tokens 128 --model-dim 64 --segment 32 --seconds 0.001"
    command = [sys.executable, FOLDER / "compare.py", folder, folder, *options.split()]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    run = functools.partial(subprocess.run, capture_output=True, text=True, env=environment)
    found = run([*command, "--pass", "forward", "backward", "deterministic"], check=True)
    table = [line.split() for line in found.stdout.splitlines()[1:]]
    assert [words[1] for words in table] == ["full"] * 3 + ["causal"] * 3
    assert [words[-6] for words in table] == ["forward", "backward", "deterministic"] * 2
    assert all(words[-3] == "1.000" and float(words[-2]) > 0 for words in table)
    refused = run([sys.executable, FOLDER / "compare.py", str(FOLDER)], check=False)
    assert refused.returncode == 2
    assert "holds no installed jax_flash" in refused.stderr


def test_errors_of_backends_are_shown(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(compare, "CELL", Cell(1, 64, 2, 2, 16, causal=True))
    monkeypatch.setattr(compare, "DTYPES", ("float32",))
    monkeypatch.setattr(sys, "argv", ["compare.py", "--errors"])
    compare.main()
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head == "| dtype | scale | | out | dq | dk | dv |"
    assert [row.split(" | ")[1:3] for row in rows] == [
        [scale, name] for scale in "14" for name in ("cpu", "xla", "jax.nn, xla")
    ]
    assert all(0 < float(x) < 1e-5 for row in rows for x in row.strip(" |").split(" | ")[3:])


@pytest.mark.parametrize("which", tune.PASSES)
def test_tuned_passes_are_checked(which: str, monkeypatch: pytest.MonkeyPatch, capsys):
    def attend(*arrays, backend, deterministic, **options):
        assert (backend, deterministic) == ("cuda", True)
        return jax_flash.flash_attention(*arrays, backend="xla", **options)

    monkeypatch.setattr(peers, "jax_flash", types.SimpleNamespace(flash_attention=attend))
    monkeypatch.setattr(tune, "SECONDS", 0)
    monkeypatch.setattr(shapes, "TOKENS", 64)
    monkeypatch.setattr(shapes, "MODEL_DIM", 32)
    arguments = ["--pass", which, "--head-dim", "16", "--length", "32", "--causal"]
    arguments += ["--segment", "8", "--deterministic"]
    monkeypatch.setattr(sys, "argv", ["tune.py", *arguments, "--set", "stages=3"])
    plan = _gpu.plan
    tune.main()
    assert _gpu.plan is plan
    rows = capsys.readouterr().out.splitlines()[1:]
    assert ["as chosen" in rows[0], "stages=3" in rows[1], len(rows)] == [True, True, 2]
    assert all(0 < float(row.split()[-1]) < 1e-2 for row in rows)


TINY = (2, 64, 2, 16)  # batch, length, heads, head dim


def tiny(feature: str) -> shapes.Case:
    batch, length, heads, head_dim = TINY
    plain = shapes.Case(batch, length, heads, heads, head_dim, False, feature=feature)
    return dataclasses.replace(plain, **shapes.FEATURES[feature])


def test_cases_are_the_problems():
    for name, (batch, length, heads, head_dim, wanted) in shapes.PROBLEMS.items():
        cases = shapes.cases(name)
        assert [case.feature for case in cases] == list(wanted)
        assert len({case.name for case in cases}) == len(cases)
        for case in cases:
            assert case.operands["q"][0] == (batch, length, heads, head_dim)
            # As the plain or causal attention that the feature is compared with.
            plain = dataclasses.replace(case, window=None, segment=None)
            assert case.flops("training") == Cell.flops(plain, "training")
    bias = {c.feature: c.operands["bias"][0] for c in shapes.cases("A") if c.bias is not None}
    assert bias["bias_1NTS"] == (1, 12, 4096, 4096)
    assert bias["bias_B11S"] == (4, 1, 1, 4096)
    assert {f for problem in shapes.PROBLEMS.values() for f in problem[-1]} == set(shapes.FEATURES)


@pytest.mark.parametrize(
    "feature", ["bias_B11S", "bias_1N11", "sinks", "lengths", "mask_documents", "softcap"]
)
def test_cases_are_checked_against_exact_attention(feature: str):
    case = dataclasses.replace(tiny(feature), dtype="float32")
    inputs = features.draw(case)
    truth = exact.truth_of(case, inputs)
    program = feature_peers.all_peers()[0].compile(case, "training")
    results = program.load(inputs)()
    errors = exact.errors_of_case(case, inputs, truth, results)
    assert list(errors) == ["out", *case.gradients]
    assert max(errors.values()) < 3e-6
    for i, name in enumerate(errors):
        wrong = tuple(x + 1e-3 if i == j else x for j, x in enumerate(results))
        with pytest.raises(ArithmeticError, match=rf"of plain attention\): {name} [^,]*$"):
            exact.errors_of_case(case, inputs, truth, wrong)


@pytest.mark.parametrize("feature", ["dropout", "dropout_causal"])
def test_dropout_is_checked_by_its_noise(feature: str):
    case = tiny(feature)
    inputs = features.draw(case)
    truth = exact.truth_of(case, inputs)

    def results(case: shapes.Case, key: int) -> tuple[np.ndarray, ...]:
        program = feature_peers.all_peers()[0].compile(case, "training")
        return program.load(inputs | {"dropout_key": np.array([0, key], np.uint32)})()

    right = results(case, 1)
    assert exact.errors_of_case(case, inputs, truth, right)["pattern"] < 0.02
    with pytest.raises(ArithmeticError, match="pattern"):  # the backward dropped other weights
        exact.errors_of_case(case, inputs, truth, (right[0], *results(case, 2)[1:]))
    twice = results(dataclasses.replace(case, dropout=0.2), 1)
    with pytest.raises(ArithmeticError, match="out"):
        exact.errors_of_case(case, inputs, truth, twice)


def test_features_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    def attend(*arrays, bias=None, softcap=None, **options):  # forgets its softcap
        return jax_flash.flash_attention(*arrays, bias=bias, **options)

    broken = types.SimpleNamespace(flash_attention=attend, explain=jax_flash.explain)
    monkeypatch.setattr(feature_peers, "jax_flash", broken)
    monkeypatch.setattr(runs, "ROUNDS", 1)
    monkeypatch.setattr(runs, "ROUND_SECONDS", 0)
    sizes = dict.fromkeys(("A", "B"), (*TINY, ("plain", "bias_1NTS", "softcap", "sinks")))
    monkeypatch.setattr(shapes, "PROBLEMS", sizes)
    monkeypatch.setitem(shapes.FEATURES, "softcap", {"softcap": 1.0})
    arguments = ["--problems", "A", "--cases", "plain", "bias_1NTS", "softcap"]
    arguments += ["--peers", "jax_flash", "jax_xla", "--commit", "abc", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["features.py", *arguments])
    features.main()
    (path,) = tmp_path.glob("*/features-abc.json")
    found = json.loads(path.read_text())["cases"]
    assert len(path.read_text().splitlines()) > len(found) == 6
    by_case = {(x["cell"]["name"], x["pass"]): x for x in found}
    for of in shapes.PASSES:
        biased, capped = by_case["A bias_1NTS", of], by_case["A softcap", of]
        assert set(biased["ms"]) == set(biased["error"]) == {"jax_flash", "jax_xla"}
        assert biased["ours"]["backend"] in ("cpu", "xla")
        assert capped["ms"] == {}
        assert capped["failed"]["jax_flash"].startswith("ArithmeticError: wrong result")
        assert capped["no"] == {"jax_xla": "NotImplementedError: no softcap"}
    assert "bias" in by_case["A bias_1NTS", "training"]["error"]["jax_flash"]
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == str(path)
    assert any(line.startswith("| A bias_1NTS | ") for line in printed)
    text = path.with_suffix(".md").read_text()
    assert "- jax.nn, XLA: NotImplementedError: no softcap (A softcap)" in text


def test_functions_of_scores_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(runs, "ROUNDS", 1)
    monkeypatch.setattr(runs, "ROUND_SECONDS", 0)
    monkeypatch.setattr(shapes, "PROBLEMS", {"A": (*TINY, ())})
    names = ["plain", "alibi_causal", "table", "softcap"]
    arguments = ["--problems", "A", "--cases", *names, "--peers", "jax_flash"]
    arguments += ["--commit", "abc", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["features.py", "--functions", *arguments])
    features.main()
    (path,) = tmp_path.glob("*/functions-abc.json")
    record = json.loads(path.read_text())
    assert record["command"].startswith("python benchmarks/features.py --functions --problems A")
    found = record["cases"]
    assert {(x["cell"]["name"], x["pass"]) for x in found} == {
        (f"A {name}", of) for name in names for of in shapes.PASSES
    }
    assert all(set(x["ms"]) == {"jax_flash"} and not x["failed"] for x in found)
    assert any(line.startswith("| A table | ") for line in capsys.readouterr().out.splitlines())


def test_feature_table():
    def record(feature: str, of: str, ms: dict[str, float]) -> dict[str, object]:
        case = tiny(feature)
        return {
            "cell": vars(case) | {"name": f"A {feature}", "problem": "A"},
            "pass": of,
            "ms": ms,
            "tflops": dict.fromkeys(ms, 400.0),
            "error": {"ours": {"out": 2e-3, "q": 3e-3}, "b": {"out": 2e-3, "q": 2e-3}},
            "ours": {"backend": "cuda", "not": {}},
            "no": {"c": "refused"},
            "failed": {},
        }

    records = [
        record("plain", "forward", {"ours": 1.0, "b": 2.0}),
        record("plain", "training", {"ours": 4.0, "b": 6.0}),
        record("sinks", "forward", {"ours": 1.5, "b": 3.0, "a": 1.8}),
        record("sinks", "training", {"ours": 5.0}),
    ]
    labels = {"ours": "Ours", "a": "A", "b": "B", "c": "C"}
    rows = charts.features(records, labels, "ours", "b").splitlines()
    assert rows[2].startswith("| case | ran on | Ours | A | B | best other / ours | ours / plain |")
    assert rows[-1] == (
        "| A sinks | cuda | 1.50 / 5.00 | 1.80 /  | 3.00 /  | 1.20 /  | 1.50 / 1.25 | 400 / 400 "
        "| 1.50 / 1.50 |"
    )
    assert charts.not_measured(records, labels) == "- C: refused (A plain, A sinks)"


def measure_decoding(cell: decode.Cell, **makes: decode.Make) -> dict[str, Any]:
    programs = {name: decode.build(cell, make) for name, make in makes.items()}
    return decode.measure(cell, programs, argparse.Namespace(seconds=0.0))


def test_decoding_is_checked_before_it_is_timed(monkeypatch: pytest.MonkeyPatch):
    cell = decode.Cell("tiny", 2, 4, 2, 64, page=16, shortest=8, head_dim=16)
    found = measure_decoding(
        cell,
        right=decode.ours("xla"),
        tiled=decode.tiled("heads=2 rounds=2"),
        sum=decode.plain_sum,
    )
    assert set(found["us"]) == {"right", "sum"}
    assert found["tb_s"]["sum"] == pytest.approx(cell.bytes / found["us"]["sum"] / 1e6, rel=1e-2)
    assert "backend 'cuda'" in found["no"]["tiled"]

    attend = jax_flash.decode_attention

    def shifted(*arguments, backend, **options):
        decoded = attend(*arguments, backend="xla", **options)
        return decoded if backend == "xla" else decoded._replace(out=decoded.out + 0.1)

    monkeypatch.setattr(jax_flash, "decode_attention", shifted)
    assert "off by 0.1" in measure_decoding(cell, wrong=decode.ours("cpu"))["no"]["wrong"]


def test_decoding_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decode, "CPU_CELLS", (decode.Cell("tiny", 1, 4, 2, 64, head_dim=16),))
    words = ["decode.py", "--seconds", "0", "--peers", "jax_flash", "sum"]
    names = ["--output", str(tmp_path), "--commit", "abc"]
    monkeypatch.setattr(sys, "argv", words + names)
    decode.main()
    (path,) = tmp_path.glob("cpu/decode-*.json")
    record = json.loads(path.read_text())
    assert record["command"] == "python benchmarks/decode.py --seconds 0 --peers jax_flash sum"
    assert record["commit"] == "abc"
    (cell,) = record["cells"]
    assert set(cell["us"]) == {"jax_flash", "sum"}
    assert "| tiny | " in path.with_suffix(".md").read_text()


def test_table_of_decoding():
    def record(cell: decode.Cell, **us: float) -> dict[str, Any]:
        rates = {name: cell.bytes / x / 1e6 for name, x in us.items()}
        return {"cell": {"name": cell.name}, "us": us, "tb_s": rates, "no": {"torch": "none"}}

    first, second = decode.SHAPES[:2]
    records = [
        record(first, jax_flash=100.0, jax_cudnn=120.0, sum=90.0),
        record(second, jax_flash=100.0, jax_cudnn=150.0, torch_cudnn=50.0),
        record(decode.Cell("short", 1, 4, 2, 64), jax_flash=7.0, jax_cudnn=70.0),
    ]
    parts = decode.table(records, ["jax_flash", "jax_cudnn", "torch_cudnn", "sum"])
    rows = parts[0].splitlines()
    assert rows[2] == "| long 128k | 100 (5.37) | 120 (4.47) |  | 90.0 (5.97) | 1.20 | 0.90 |"
    assert rows[4].startswith("| short | 7.0 (0.01) | 70.0 (0.00) |")
    assert "2 shapes of equal lengths: 0.775 × in the geometric mean, from 0.50 to 1.20" in parts[1]
    assert parts[2] == "- torch: none (long 128k; long 64k, no groups; short)"
    in_gb = decode.table(records[2:], ["jax_flash"], "GB/s")[0].splitlines()
    assert in_gb[0] == "| cell | jax_flash: µs (GB/s) | × the best other | × a sum |"
    assert in_gb[2].startswith("| short | 7.0 (9.4) |")


def test_block_masks_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sparse, "HEADS", 1)
    monkeypatch.setattr(sparse, "LONG", 300)
    monkeypatch.setattr(runs, "ROUND_SECONDS", 0.0)
    words = ["sparse.py", "--lengths", "256", "--long", "512", "--head-dims", "16"]
    words += ["--layouts", "random", "banded", "--densities", "0.5", "1", "--passes", "forward"]
    names = ["--output", str(tmp_path), "--commit", "abc"]
    monkeypatch.setattr(sys, "argv", words + names)
    sparse.main()
    record = json.loads((tmp_path / "cpu" / "sparse-abc.json").read_text())
    cells = {(x["length"], x["layout"], x["density"]): x for x in record["cells"]}
    layouts = [("random", 0.5), ("random", 1.0), ("banded", 0.5), ("banded", 1.0), ("dense", 1.0)]
    long = [("dense", 1.0), ("butterfly", 0.75), ("stride-4", 0.75)]
    assert set(cells) == {(256, *x) for x in layouts} | {(512, *x) for x in long}
    full = [cells[256, name, 1.0]["milliseconds"] for name in ("random", "banded")]
    assert full[0] == full[1]  # equal layouts are timed once


def test_figures_are_drawn_from_the_results(tmp_path: Path):
    record = measured.newest(measured.RESULTS)
    found = measured.speeds(record, "training")
    assert [length for length, _ in found["jax_flash"]] == [512, 1024, 2048, 4096, 8192, 16384]
    for theme, color in measured.THEMES.items():
        drawn = tmp_path / f"speed-{theme}.svg"
        measured.draw_speed(record, color, drawn)
        kept = FOLDER.parent / "docs" / "figures" / drawn.name
        texts = [re.findall(r">([^<>]+)</text>", x.read_text()) for x in (drawn, kept)]
        assert "724" in texts[0]
        assert texts[0] == texts[1]


def test_block_masks_are_drawn_from_the_results(tmp_path: Path):
    record = measured.newest(measured.RESULTS, measured.SPARSE_COMMAND)
    for theme, color in measured.THEMES.items():
        drawn = tmp_path / f"sparse-{theme}.svg"
        measured.draw_sparse(record, color, drawn)
        kept = FOLDER.parent / "docs" / "figures" / drawn.name
        texts = [re.findall(r">([^<>]+)</text>", x.read_text()) for x in (drawn, kept)]
        assert "butterfly" in texts[0]
        assert texts[0] == texts[1]


@pytest.mark.parametrize("name", drawings.DRAWINGS)
def test_drawings_are_of_todays_plans(name: str):
    """If not: python benchmarks measured."""
    for theme in canvas.THEMES:
        kept = FOLDER.parent / "docs" / "figures" / f"{name}-{theme}.svg"
        assert drawings.draw(name, theme) == kept.read_text()


@pytest.mark.parametrize("of", ["forward", "backward"])
def test_documented_explanation_is_of_todays_plan(of: str):
    page = (FOLDER.parent / "docs" / "performance.md").read_text()
    shown = re.search(rf"^{of}: (\S+)\n(.*), \.\.\.$", page, re.MULTILINE)
    assert shown is not None
    source, tiling, *_ = str(drawings._plan(of, head_dim=128, is_causal=True)).splitlines()
    assert shown[1] == source
    assert tiling.startswith(shown[2] + ",")


def test_drawn_softmax_is_the_rows():
    scores = np.array(drawings._SCORES)
    base, _, total = drawings.online_softmax(drawings._SCORES, 4)[-1]
    assert base + np.log(total) == pytest.approx(np.log(np.exp(scores).sum()))


@pytest.mark.parametrize("of", ["forward", "backward"])
def test_drawn_products_follow_each_other(of: str):
    tile = drawings._plan(of, head_dim=128).tiling
    spans = getattr(drawings, f"{of}_schedule")(tile, 4)
    tensor = sorted((x.begin, x.end) for x in spans if x.lane in drawings.PRODUCTS)
    assert all(one[1] <= two[0] for one, two in itertools.pairwise(tensor))
    # docs/how-it-works.md: never idle.
    assert sum(end - begin for begin, end in tensor) == tensor[-1][1] - tensor[0][0]


def test_drawn_ring_computes_what_causality_leaves():
    steps = drawings.ring_steps(4, "zigzag")
    work = [0.0] * 4
    for _, devices in steps:
        for rank, (_, halves) in enumerate(devices):
            work[rank] += sum({"own": 0.5, "whole": 1, "none": 0}[x] for row in halves for x in row)
    assert work == [8 * 8 / 2 / 4] * 4


def test_scaling_times_a_ring_its_kernels_and_its_link():
    command = [sys.executable, str(FOLDER / "scaling.py"), "--platform=cpu", "--tokens=32"]
    ways = ("ring:zigzag", "all_to_all:contiguous", "all_gather:zigzag")
    environment = os.environ | {"PYTHONPATH": str(Path(jax_flash.__file__).parents[1])}
    environment["XLA_FLAGS"] = ""
    done = subprocess.run(
        [*command, "--heads=2:1", "--rounds=1", "--ways", *ways],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows = {
        row.split(" | ")[2]: row.split(" | ") for row in done.stdout.splitlines() if "| 32 |" in row
    }
    ring = rows["ring, zigzag"]
    assert all(float(x.replace(",", "")) > 0 for x in (ring[3], ring[6], ring[7]))
    assert "all_to_all, contiguous" not in rows  # one kv head, two devices
    assert {"one device", "all_gather, zigzag", "model, 8 devices"} <= set(rows)
    assert "ring, striped" not in rows  # not asked for


def test_a_profile_tells_how_much_of_the_link_is_hidden():
    def event(name, begin, end, pid=1):
        return {"ph": "X", "pid": pid, "name": name, "ts": begin, "dur": end - begin}

    gpu = {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/device:GPU:0"}}
    host = {"ph": "M", "pid": 2, "name": "process_name", "args": {"name": "/host:CPU"}}
    computes = [event("flash_forward", 0, 10), event("convert", 8, 12), event("main", 0, 99, pid=2)]
    sends = [event("ncclDevKernel_SendRecv", 5, 15), event("ncclDevKernel_SendRecv", 20, 30)]
    assert scaling.hidden_of([gpu, host, *computes, *sends]) == 7 / 20
    assert scaling.hidden_of([gpu, host, *computes]) is None


def test_the_model_of_a_ring_takes_the_longer_of_compute_and_link():
    cell = scaling.Cell(tokens=1000, heads=4, kv_heads=2, head_dim=10, item=2)
    fast, slow = scaling.Model(1e9, 1e30, 0.0), scaling.Model(1e30, 1e9, 0.0)
    for devices in (1, 2, 3, 8):
        operations = 3.5 * 4 * 4 * 10 * (devices * 1000) ** 2 / 2 / devices
        assert fast.seconds(cell, devices) == pytest.approx(operations / 1e9)
        # Keys twice and float32 gradients once for each hop, keys and values of 2 heads of 10.
        sent = (devices - 1) * (2 * 2 + 4) * 2 * 1000 * 2 * 10
        assert slow.seconds(cell, devices) == pytest.approx(sent / 1e9)
        assert slow.sent(cell, devices) == sent
    both = scaling.Model(1e9, 1e9, 1.0).seconds(cell, 2)
    assert both > max(fast.seconds(cell, 2), slow.seconds(cell, 2))
