"""Tests of what benchmarks measure of the host: the first call of a program, and each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from common.shapes import Cell
from host import each, first

from ..processes import child_environment
from .conftest import FOLDER

# ---- the first call ------------------------------------------------------------------------------


def test_a_first_call_is_the_sum_of_its_parts():
    case = first.Case(32, True, "training", batch=1, length=32, model_dim=32)
    found = first.measure("cold", case)
    assert found["call"] == pytest.approx(found["lower"] + found["compile"] + found["run"])
    assert 0 < found["again"] < found["compile"]
    assert {*found["kernels"]} == ({"forward", "backward"} if found["device"] != "cpu" else set())


def test_the_table_of_first_calls_sets_both_processes_beside_cudnn():
    def answer(call: float, **kernels: float) -> dict:
        return {"call": call, "kernels": {name: {"seconds": x} for name, x in kernels.items()}}

    record = {
        "head_dim": 128,
        "causal": True,
        "of": "training",
        "cold": answer(2.5, forward=2.25, backward=1.75),
        "warm": answer(0.25, forward=0.001, backward=0.0005),
        "cudnn": answer(1.5),
    }
    row = "| 128 | forward + backward, causal | 2.50 | 2.25 and 1.75 | 0.25 | 1.0 and 0.5 | 1.50 |"
    head, rule, *rows = first.table([record])
    assert rows == [row]
    assert head.count("|") == rule.count("|") == row.count("|")


# ---- each call -----------------------------------------------------------------------------------


def test_each_measure_has_its_number_for_every_peer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(each, "FEW", 1)
    monkeypatch.setattr(each, "MANY", 2)
    attends = {name: each.in_jax()[name] for name in ("jax_flash", "jax_xla")}
    found = each.measure(Cell(1, 8, 1, 1, 8, True), attends, rounds=1)
    assert {*found} == {"jax_flash", "jax_xla"}
    wanted = [f"{of}, {x}" for x in each.MEASURES for of in ("forward", "backward")]
    assert all(sorted(one) == sorted(wanted) for one in found.values())
    assert all(one["forward, from Python"] > 0 for one in found.values())
    head, _, *rows = each.table(found)
    assert head == "| µs | jax_flash | jax_xla |"
    assert len(rows) == len(wanted)


def test_one_more_attention_is_a_share_of_what_many_take_more_than_few():
    medians = {("x", "forward", "a launch", each.FEW): 10.0}
    medians["x", "forward", "a launch", each.MANY] = 10.0 + 8 * (each.MANY - each.FEW)
    medians["x", "forward", "from Python", 1] = 30.0
    assert each._one_more(medians, "x", "forward", "a launch") == 8
    assert each._one_more(medians, "x", "forward", "from Python") == 30


def test_queries_of_a_chain_are_the_results_before():
    def attend(cell: Cell, q, k, v):
        return q * k + v

    program = each.chain(Cell(1, 8, 1, 1, 8, True), attend, "training", 3)
    out, dq, dk, dv = program(2.0, 3.0, 1.0)
    assert out == ((2 * 3 + 1) * 3 + 1) * 3 + 1
    assert (dq, dv) == (27 * out, (9 + 3 + 1) * out)
    assert dk == pytest.approx((3 * 9 * 2 + 2 * 3 + 1) * out)


def test_the_host_is_measured_by_name_and_beside_a_gpu(tmp_path: Path):
    """`first` asks processes of its own, `each` measures in its own: both say what is missing."""
    for name, error in (("first", "measures on an NVIDIA GPU"), ("last", "host measures first or")):
        process = subprocess.run(
            [sys.executable, "-P", FOLDER, "host", name],
            env=child_environment(tmp_path, JAX_PLATFORMS="cpu"),
            capture_output=True,
            text=True,
        )
        assert process.returncode == 1
        assert error in process.stderr
