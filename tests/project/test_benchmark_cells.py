"""What the benchmarks measure: cells and cases, their operations, exact results and tables."""

import dataclasses
import json
import sys
import types
from pathlib import Path

import features
import numpy as np
import pytest
from common import charts, exact, feature_peers, runs, shapes
from common.shapes import Cell

import jax_flash

from ..numpy_oracle import attention


def visible(cell: Cell) -> np.ndarray:
    queries, keys = np.arange(cell.length)[:, None], np.arange(cell.length)
    seen = np.ones((cell.length, cell.length), bool)
    if cell.causal:
        seen &= keys <= queries
    if cell.window is not None:
        seen &= keys >= queries - cell.window
    if cell.segment is not None:
        seen &= cell.ids == cell.ids[:, None]
    return seen


def test_main_cells_are_the_papers():
    cells = shapes.main_cells()
    assert len(cells) == len(set(cells)) == 36
    for cell in cells:
        assert cell.batch * cell.length == 16384
        assert cell.heads * cell.head_dim == 2048
    assert len({cell.name for cell in cells + shapes.feature_cells()}) == 36 + 7


def test_other_cells_are_of_one_size():
    for cell in shapes.other_cells():
        assert 1900 < cell.heads * cell.head_dim <= 2048
        assert cell.batch * cell.length == (16384 if cell.segment is None else 32768)
    lengths = np.diff(shapes.Cell(1, 512, 1, 1, 64, False, segment=128, shortest=8).starts)
    assert lengths.sum() == 512
    assert len({*lengths}) > 4
    assert max(lengths) <= 128


@pytest.mark.parametrize("cell", shapes.feature_cells(128, 256, (128,)), ids=lambda cell: cell.name)
def test_operations_are_those_of_visible_pairs(cell: Cell):
    pairs = np.count_nonzero(visible(cell))
    diagonal = cell.length / 2 if cell.causal and cell.window is None else 0
    assert cell.pairs == pairs - diagonal
    assert cell.flops("forward") == 4 * cell.batch * cell.heads * cell.head_dim * cell.pairs
    assert cell.flops("training") == 3.5 * cell.flops("forward")


APART = Cell(1, 64, 2, 2, 24, True, segment=32, shortest=4, value_dim=16)


@pytest.mark.parametrize(
    "cell", [*shapes.feature_cells(64, 256, (64,))[:3], APART], ids=lambda c: c.name
)
def test_errors_are_against_exact_attention(cell: Cell):
    rng = np.random.default_rng(0)
    shape = (cell.batch, cell.length, cell.heads)
    q, k = rng.standard_normal((2, *shape, cell.head_dim))
    v, dout = rng.standard_normal((2, *shape, cell.columns))
    out = attention(q, k, v, mask=visible(cell)).out
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
    "feature",
    ["bias_B11S", "bias_1N11", "sinks", "lengths", "mask_documents", "softcap", "learned"],
)
def test_cases_are_checked_against_exact_attention(feature: str):
    if feature == "learned":
        case = dataclasses.replace(tiny("plain"), score="learned", dtype="float32")
    else:
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
    names = ["plain", "alibi_causal", "table", "table_gradient", "softcap"]
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
