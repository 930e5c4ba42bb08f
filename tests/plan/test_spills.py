"""The table of what ptxas spills: that it is whole, and that schedules do what it says."""

import itertools

import pytest

from jax_flash import _gpu
from jax_flash._gpu import spills
from jax_flash._gpu.spills_table import NVRTC, SPILLED
from jax_flash._ops import passes
from jax_flash._problem import TERMS

from ..spills import CANDIDATES, H200, TABLE, call_with, plan_of, text_of

pytestmark = pytest.mark.quick

SETS = [(name, frozenset(found.split())) for name, sets in SPILLED.items() for found in sets]


def test_the_table_is_as_the_script_writes_it():
    assert TABLE.read_text() == text_of(SPILLED, NVRTC)
    assert [*SPILLED] == [*CANDIDATES]


@pytest.mark.parametrize("name", CANDIDATES)
def test_sets_are_of_the_traits_that_are_tried_and_the_smallest(name):
    sets = [found for of, found in SETS if of == name]
    assert len({*sets}) == len(sets)
    assert frozenset().union(*sets) <= {*CANDIDATES[name].traits.split()}
    assert not [pair for pair in itertools.permutations(sets, 2) if pair[0] < pair[1]]


@pytest.mark.parametrize("name", CANDIDATES)
def test_traits_are_those_of_the_call(name):
    candidate = CANDIDATES[name]
    for trait in candidate.traits.split():
        assert spills.traits_of(*call_with({trait}, candidate)) == {trait}


@pytest.mark.parametrize("name", CANDIDATES)
def test_schedules_ask_of_no_term_that_was_not_tried(name):
    for term in {name for name, x in TERMS.items() if x.native} - spills.TOLD:
        assert term in CANDIDATES[name].traits.split() or plan_of(name, {term}) is None, term


def test_a_candidate_spills_with_a_set_and_more_but_not_with_less():
    for name, found in SETS:
        candidate = CANDIDATES[name]
        assert spills.spills(name, *call_with(found, candidate)), found
        for trait in found:
            assert not spills.spills(name, *call_with(found - {trait}, candidate)), (found, trait)
        for trait in candidate.traits.split():
            call = call_with(found | {trait}, candidate)
            more = spills.traits_of(*call) == found | {trait}  # not one in the place of another
            assert not more or spills.spills(name, *call), (found, trait)


def test_schedules_ask_of_every_set_and_take_another_candidate():
    for name, found in SETS:
        tried = plan_of(name, found)
        assert tried is not None, (name, found)
        candidate = CANDIDATES[name]
        problem, shapes = call_with(found, candidate)
        chosen = _gpu.plan(passes(problem)[candidate.which], shapes, H200)
        assert chosen.constants != tried.constants, (name, found)
