"""Compiles candidates that the table of spills has: with a set of its traits and with less."""

import dataclasses

import pytest

from jax_flash import _explain, _gpu
from jax_flash._gpu.sm90 import forward_rows
from jax_flash._gpu.spills_table import NVRTC
from jax_flash._ops import passes

from ..spills import CANDIDATES, H200, call_with, nvrtc_version, plan_of
from .compile_cases import check

pytestmark = pytest.mark.usefixtures("asserted_shared_memory")

# A set of each candidate, of those that spill most.
SETS = {
    forward_rows.TWO_TEAMS: "blocks_of_128 left",
    forward_rows.THREE: "query_segments",
    forward_rows.THREE_HIDE: "query_segments softcap",
    forward_rows.THREE_DRAIN: "key_value_lengths left softcap",
}


@pytest.mark.parametrize("name", SETS)
def test_a_candidate_spills_where_the_table_says_so(name: str):
    if nvrtc_version() not in NVRTC:
        pytest.skip(f"the table is of NVRTC {', '.join(NVRTC)}")
    found = frozenset(SETS[name].split())
    tried = plan_of(name, found)
    assert tried is not None
    report = _explain.compile_plan(tried)
    assert sum(entry.spill_bytes for entry in report.entries) > 0
    parts = [plan_of(name, found - {trait}) for trait in sorted(found)]
    check(next(part for part in parts if part is not None), seconds=15)
    candidate = CANDIDATES[name]
    problem, shapes = call_with(found, candidate)
    chosen = _gpu.plan(passes(problem)[candidate.which], shapes, H200)
    assert dataclasses.replace(chosen, beside="").program != tried.program
