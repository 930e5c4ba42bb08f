"""What kernels are told of their schedule: each flag where it holds and where it does not."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from jax_flash import _function, _gpu, scores
from jax_flash._ops import passes
from jax_flash._problem import TERMS, BlockMaskShape, Problem, Shapes, TermShape

pytestmark = pytest.mark.quick

H200 = _gpu.spec.GPUS["H200"]
# By name, fields of Problem and of Shapes.
CHANGES: dict[str, dict[str, Any]] = {
    "causal": {"window": (None, 0)},
    "left": {"window": (100, None)},
    "softcap": {"softcap": 30.0},
    "float16": {"dtype": "float16"},
    "segments": {"terms": ("query_segments", "key_value_segments")},
    "positions": {"terms": ("query_positions", "key_value_positions")},
    "lengths": {"terms": ("key_value_lengths",)},
    "sinks": {"terms": ("sinks",)},
    "dropout": {"terms": ("dropout_state",), "dropout_rate": 0.1},
    "bias": {"terms": ("bias",), "bias": TermShape("bfloat16", 1, 16, 4096, 4096)},
    "bias_of_keys": {"terms": ("bias",), "bias": TermShape("bfloat16", 1, 1, 1, 4096)},
    "mask": {"terms": ("mask",), "mask": TermShape("bool", 2, 1, 4096, 4096)},
    "blocks": {
        "terms": ("block_numbers", "block_bits"),
        "block_mask": BlockMaskShape(batch=1, heads=1, block=128),
    },
    "smaller": {"block_mask": BlockMaskShape(batch=1, heads=1, block=64)},
    "whole": {"whole_blocks": True},
}
FUNCTIONS = {
    "alibi": scores.alibi(np.ones(16, np.float32)),
    "table": scores.relative_position_table(np.ones((16, 65), np.float32)),
}


def plan_of(which: str, words: str) -> _gpu.Plan:
    """The plan of a plain call with these changes and a head dim, 128 if none is named."""
    problem = Problem(dtype="bfloat16", scale=0.125)
    shapes = Shapes(2, 4096, 4096, 16, 16, 128, 128)
    terms: set[str] = set()
    for word in words.split():
        change = dict(CHANGES.get(word, {}))
        if word[0].isdigit():
            head_dim, _, value_dim = word.partition("/")
            change = {"head_dim": int(head_dim), "value_dim": int(value_dim or head_dim)}
        elif word in FUNCTIONS:
            names = dict.fromkeys(("batch", "head", "query", "key"), "int32")
            arguments = {"score": "float32", **names}
            function, _ = _function.trace("score_mod", FUNCTIONS[word], arguments, "float32")
            change = {"score": function, "terms": ("score_ids",), "own_captures": (False,)}
        terms |= {*change.pop("terms", ())}
        sizes = {x.name for x in dataclasses.fields(Shapes)} & {*change}
        shapes = dataclasses.replace(shapes, **{name: change.pop(name) for name in sizes})
        problem = dataclasses.replace(problem, **change)
    problem = dataclasses.replace(problem, terms=tuple(x for x in TERMS if x in terms))
    return _gpu.plan(passes(problem)[which], shapes, H200)


# Of each flag: its value, calls in which it has that, another value, and calls with that.
FORWARD: dict[str, tuple[int, list[str], int, list[str]]] = {
    "kLoadWarps": (1, ["128"], 4, ["100"]),
    "kRepeats": (True, ["128"], False, ["100"]),
    "kListsBlocks": (
        *(True, ["segments", "positions", "mask", "blocks"]),
        *(False, ["128", "causal", "lengths"]),
    ),
    "kListsWhole": (True, ["positions", "mask", "blocks"], False, ["128", "segments"]),
    "kListsWords": (True, ["blocks"], False, ["mask", "blocks mask", "blocks 100"]),
    "kListsLayout": (True, ["blocks whole"], False, ["blocks", "blocks smaller whole"]),
    "kListsOwn": (True, ["mask", "blocks"], False, ["mask segments", "mask 256", "mask 100"]),
    "kBoundedBegin": (True, ["left", "mask"], False, ["128", "causal"]),
    "kBeginsNear": (True, ["alibi"], False, ["128", "alibi causal", "alibi mask"]),
    "kLateSeeMost": (True, ["causal", "causal positions", "blocks"], False, ["128", "mask"]),
    "kWholeIsFull": (True, ["blocks"], False, ["mask", "blocks causal", "blocks lengths"]),
    "kLaterAreFull": (True, ["blocks whole"], False, ["blocks", "blocks whole causal"]),
    "kHoldsFull": (True, ["128"], False, ["segments", "positions", "lengths 64"]),
    "kAsksLate": (True, ["causal", "mask"], False, ["128", "causal segments"]),
    "kQueriesLate": (True, ["blocks whole"], False, ["blocks", "blocks whole 64"]),
    "kQueriesInTurn": (True, ["blocks"], False, ["mask", "blocks 64"]),
    "kEarlyOutput": (True, ["128", "256/128"], False, ["128/256"]),
    "kAsksRow": (True, ["64", "alibi"], False, ["alibi 64"]),
    "kTakesLine": (True, ["alibi", "alibi dropout 64"], False, ["128", "alibi dropout"]),
    "kSharesLine": (True, ["alibi 64"], False, ["alibi", "alibi 64 float16"]),
    "kLineAhead": (True, ["128"], False, ["64", "mask"]),
    "kBitsAhead": (True, ["mask", "blocks 100"], False, ["128", "blocks", "mask bias"]),
    "kHoldsBits": (True, ["mask"], False, ["128", "mask 256", "blocks 100"]),
    "kBiasAheadInL2": (2, ["bias"], 0, ["128", "bias mask"]),
    "kBiasBeside": (True, ["bias"], False, ["128", "bias 64", "bias 256"]),
    "kBiasAhead": (
        *(True, ["bias_of_keys 64"]),
        *(False, ["64", "bias 64", "bias_of_keys", "bias_of_keys softcap 64"]),
    ),
    "kDrawsAmong": (
        *(True, ["dropout", "dropout 60"]),
        *(False, ["128", "dropout 256", "dropout 100", "dropout mask"]),
    ),
    "kDrawsByParts": (True, ["dropout 64"], False, ["64", "dropout"]),
    "kHoldsDraws": (True, ["dropout"], False, ["128", "dropout softcap", "dropout sinks"]),
}


@pytest.mark.parametrize("name", FORWARD)
def test_forward_flag(name):
    value, holding, another, others = FORWARD[name]
    found = {words: plan_of("forward", words).constants[name] for words in holding + others}
    assert found == {**dict.fromkeys(holding, value), **dict.fromkeys(others, another)}
