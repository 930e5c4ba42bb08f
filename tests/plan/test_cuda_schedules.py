"""What kernels are told of their schedule: each flag where it holds and where it does not."""

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

from jax_flash import _function, _gpu, _native, scores
from jax_flash._gpu import constants, shared_fields
from jax_flash._gpu.backward_schedule import CommonSchedule
from jax_flash._gpu.sm90 import forward_schedule
from jax_flash._gpu.sm90.backward_schedule import BackwardSchedule
from jax_flash._gpu.sm90.forward_schedule import ForwardSchedule
from jax_flash._ops import passes
from jax_flash._ops.decode import Decode
from jax_flash._problem import TERMS, BlockMaskShape, Problem, Shapes, TermShape

pytestmark = pytest.mark.quick

# By name, fields of Problem and of Shapes.
CHANGES: dict[str, dict[str, Any]] = {
    "causal": {"window": (None, 0)},
    "left": {"window": (100, None)},
    "softcap": {"softcap": 30.0},
    "float16": {"dtype": "float16"},
    "float32": {"dtype": "float32"},
    "highest": {"precision": "highest"},
    "carried": {"dtype": "float16", "split": "carried"},
    "deterministic": {"deterministic": True},
    "grouped": {"kv_heads": 4, "window": (None, 0)},
    "many": {"batch": 32},
    "short": {"q_len": 512, "kv_len": 512},
    "long": {"q_len": 8192, "kv_len": 8192},
    "longer": {"q_len": 32768, "kv_len": 32768},
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
    "sloped": scores.softcap(30.0),
}


def call_of(words: str) -> tuple[Problem, Shapes]:
    """A plain call with these changes and dims, 128 if none are named."""
    problem = Problem(dtype="bfloat16", scale=0.125)
    shapes = Shapes(2, 4096, 4096, 16, 16, 128, 128)
    terms: set[str] = set()
    for word in words.split():
        change = dict(CHANGES.get(word, {}))
        if word[0].isdigit():
            head_dim, _, value_dim = word.partition("/")
            change = {"head_dim": int(head_dim), "value_dim": int(value_dim or head_dim)}
            if int(head_dim) % 8:  # 8 divides no row of these heads either
                change |= {"q_heads": 15, "kv_heads": 15}
        elif word in FUNCTIONS:
            names = dict.fromkeys(("batch", "head", "query", "key"), "int32")
            arguments = {"score": "float32", **names}
            function, _ = _function.trace("score_mod", FUNCTIONS[word], arguments, "float32")
            used = ("score_ids",) if "head" in function.used else ()
            own = (False,) * len(function.captures)
            change = {"score": function, "terms": used, "own_captures": own}
        terms |= {*change.pop("terms", ())}
        sizes = {x.name for x in dataclasses.fields(Shapes)} & {*change}
        shapes = dataclasses.replace(shapes, **{name: change.pop(name) for name in sizes})
        problem = dataclasses.replace(problem, **change)
    return dataclasses.replace(problem, terms=tuple(x for x in TERMS if x in terms)), shapes


def plan_of(which: str, family: str, words: str) -> _gpu.Plan:
    problem, shapes = call_of(words)
    gpu = _gpu.spec.GPUS["L4" if "L4" in words else "H200"]
    with _gpu.prefer(family):
        return _gpu.plan(passes(problem)[which], shapes, gpu)


# For each flag: a value, calls in which it has that value, another value, and calls with that one.
Flags = dict[str, tuple[int, list[str], int, list[str]]]
FORWARD: Flags = {
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
    "kHoldsFull": (True, ["128"], False, ["segments", "positions", "left lengths 64"]),
    "kAsksLate": (True, ["causal", "mask"], False, ["128", "causal segments"]),
    "kQueriesLate": (True, ["blocks whole"], False, ["blocks", "blocks whole 64"]),
    "kQueriesInTurn": (True, ["blocks"], False, ["mask", "blocks 64"]),
    "kEarlyOutput": (True, ["128", "256/128"], False, ["128/256"]),
    "kAsksRow": (True, ["64", "alibi"], False, ["alibi 64"]),
    "kLeavesCap": (True, ["softcap"], False, ["128", "softcap bias"]),
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
    "kCutDocuments": (
        *(256, ["segments long", "segments long causal 64"]),
        *(0, ["segments", "long", "segments long left", "segments long sinks"]),
    ),
    "kCutsAligned": (
        *(True, ["segments long"]),
        *(False, ["segments", "segments long 64", "segments long causal", "segments long 96"]),
    ),
    "kConsumers": (
        *(3, ["segments long", "64"]),
        *(2, ["segments", "segments long causal", "segments long sinks", "segments long 96"]),
    ),
    "kDrawsAmong": (
        *(True, ["dropout", "dropout 60"]),
        *(False, ["128", "dropout 256", "dropout 100", "dropout mask"]),
    ),
    "kDrawsByParts": (True, ["dropout 64"], False, ["64", "dropout"]),
    "kHoldsDraws": (True, ["dropout"], False, ["128", "dropout softcap", "dropout sinks"]),
}

# Flags of every family's backward pass.
COMMON: Flags = {
    "kShowsWords": (True, ["blocks"], False, ["128", "blocks mask", "blocks positions"]),
    "kShowsLayout": (True, ["blocks whole"], False, ["blocks"]),
    "kTurnsShown": (
        *(True, ["blocks deterministic"]),
        *(False, ["blocks", "mask deterministic", "blocks segments deterministic"]),
    ),
    "kSkipsMasked": (
        *(True, ["mask", "positions", "blocks deterministic"]),
        *(False, ["128", "segments", "mask deterministic"]),
    ),
    "kDirection": (-1, ["causal", "causal positions"], 1, ["128", "left"]),
    "kPrepareUnroll": (2, ["float32"], 4, ["128", "256"]),
    "kMaskResident": (4, ["mask blocks"], 0, ["mask", "blocks"]),
    "kFinishResident": (2, ["float32"], 3, ["128", "256"]),
    "kSumBeginsAhead": (True, ["bias"], False, ["bias causal", "bias dropout"]),
    "kSumHoldsBias": (True, ["bias"], False, ["bias_of_keys", "bias dropout"]),
}
BACKWARD: Flags = {
    "kLoadRegisters": (24, ["128"], 40, ["100"]),
    "kQueryRegisters": (64, ["256 softcap"], 72, ["256"]),
    "kScoreRegisters": (240, ["128"], 208, ["256"]),
    "kAddsBoxes": (True, ["192"], False, ["256", "192 softcap"]),
    "kKeysHeld": (7, ["192"], 0, ["128", "192 softcap"]),
    "kValuesHeld": (7, ["192"], 0, ["128", "192 softcap"]),
    "kRowColumns": (64, ["float32 highest"], 128, ["128"]),
    "kLoadWarps": (2, ["100"], 1, ["128", "100 deterministic"]),
    "kFillsBeside": (True, ["256"], False, ["256 mask", "100"]),
    "kTmaStores": (True, ["128"], False, ["100", "carried"]),
    "kInOrder": (True, ["deterministic", "many causal"], False, ["segments"]),
    "kPartsApart": (True, ["grouped deterministic"], False, ["grouped", "deterministic"]),
    "kFromDiagonals": (
        *(True, ["causal deterministic", "256 causal deterministic"]),
        *(
            False,
            ["causal", "deterministic", "longer causal deterministic", "grouped deterministic"],
        ),
    ),
    "kLastStores": (
        *(True, ["deterministic", "64 causal deterministic", "long causal deterministic"]),
        *(False, ["128", "256 deterministic", "80 deterministic", "long deterministic"]),
    ),
    "kDeterministic": (
        *(True, ["deterministic", "short many", "64 causal short many", "256 causal short many"]),
        *(False, ["128", "short", "80 short many", "short many grouped", "short many segments"]),
    ),
    "kSharesUnits": (True, ["float32 highest"], False, ["128", "float32 highest causal"]),
    "kTurnsLeft": (True, ["segments", "blocks deterministic"], False, ["128", "blocks"]),
    "kSkipsHidden": (True, ["causal"], False, ["128", "causal 64", "causal positions"]),
    "kHoldsShown": (True, ["blocks"], False, ["128", "blocks deterministic"]),
    "kHoldsBlock": (True, ["128", "blocks"], False, ["blocks deterministic"]),
    "kFollowsShown": (True, ["mask"], False, ["128", "mask dropout"]),
    "kGivesBackEarly": (True, ["blocks whole"], False, ["blocks", "blocks whole 256"]),
    "kBiasParts": (1, ["bias"], 2, ["bias 256"]),
    "kMarksDropped": (
        *(True, ["dropout 64", "sloped 256"]),
        *(False, ["dropout", "sloped"]),
    ),
    "kSumResident": (2, ["bias"], 1, ["bias mask", "100"]),
}
FORWARD_80: Flags = {
    "kListsBlocks": (True, ["segments", "mask"], False, ["128", "lengths"]),
    "kParksSoftmax": (True, ["float32 highest 64"], False, ["64", "float32 highest"]),
    "kSumsOf32": (True, ["float32 highest 64"], False, ["64", "float32 highest"]),
    "kStepsAtOnce": (8, ["128", "segments"], 2, ["float32", "float32 mask"]),
}
BACKWARD_80: Flags = {
    "kListsBlocks": (True, ["segments", "mask"], False, ["128", "mask deterministic"]),
    "kKeepsAddresses": (True, ["128", "lengths"], False, ["mask", "softcap"]),
    "kKeepsGroup": (True, ["64", "causal"], False, ["mask", "causal 64"]),
    "kKeepsRows": (True, ["64 L4"], False, ["64", "L4", "64 mask L4"]),
    "kStepsInPieces": (True, ["128", "float32 highest"], False, ["mask", "float32"]),
    "kSumsWholeTiles": (True, ["256"], False, ["512", "float32"]),
}


def cases() -> list[Any]:
    tables = [("forward", "sm90", FORWARD), ("backward", "sm90", COMMON | BACKWARD)]
    tables += [("forward", "sm80", FORWARD_80), ("backward", "sm80", BACKWARD_80)]
    return [
        pytest.param(which, family, name, *row, id=f"{family} {which} {name}")
        for which, family, table in tables
        for name, row in table.items()
    ]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("kSplitsColumns", {(128, 128): False, (576, 512): True}),
        ("kScoreSums", {(128, 128): 2, (64, 64): 1, (256, 256): 1}),
        ("kFiniteApart", {(128, 128): True, (256, 256): False}),
    ],
)
def test_flag_of_decoding(name, values):
    problem = Problem(dtype="bfloat16", scale=0.125, bottom_right=True)
    for (head_dim, value_dim), value in values.items():
        shapes = Shapes(1, 1, 512, 8, 8, head_dim, value_dim)
        plan = _gpu.plan(Decode(problem, None), shapes, _gpu.spec.GPUS["H200"])
        assert plan.constants[name] == value, (head_dim, value_dim)


@pytest.mark.parametrize(
    ("which", "family", "name", "value", "holding", "other", "others"), cases()
)
def test_flag(which, family, name, value, holding, other, others):
    calls = [*holding, *others]
    found = {words: plan_of(which, family, words).constants[name] for words in calls}
    assert found == {**dict.fromkeys(holding, value), **dict.fromkeys(others, other)}


def test_one_answer_says_that_scores_are_scaled_where_a_term_is_added(monkeypatch):
    for module in (constants, forward_schedule, shared_fields):
        monkeypatch.setattr(module, "adds_to_scores", lambda _: True)
    capped = plan_of("forward", "sm90", "softcap")
    values = {name: field.value for _, name, field in capped.launch.params.leaves()}
    assert values["softcap_bias"] == 1 / 30.0
    assert capped.constants["kAddsToScores"]
    assert not capped.constants["kLeavesCap"]
    for which in ("forward", "backward"):
        made = plan_of(which, "sm90", "128").launch.params
        values = {name: field.value for _, name, field in made.leaves()}
        assert values["scale_log2"] == shared_fields.LOG2E
    asks = re.compile(r"kHasBias[^;]*p\.(scale|softcap)")
    texts = _native.kernel_sources()
    assert not [name for name, text in texts.items() if asks.search(text)]


# Constants of device text that join others all the same: no choice of a schedule.
DERIVED = {
    "kHasSlope": "a logit has a slope",
    "kZeroesHidden": "hidden pairs need a dS of zero",
    "kLeavesHalves": "of latent decoding: parts' sums are left in float16",
    "kHidesQueries": "there may be queries that see no key",
    "kIsMatrix": "a bias of all queries and keys",
    "kWholePieces": "rows start at multiples of 16 bytes",
    "kFits": "a dim that is copied by 16 bytes",
    "kInPieces": "of decoding, rows that start inside 4 bytes",
    "kSumsApart": "where sums of dq lie",
    "kFewAtOnce": "of decoding in float32: steps of a score at once leave registers to few keys",
    "kAhead": "of decoding, queries of one item a thread, which it can ask for ahead",
    "kStraight": "of a template: elements without a test, along a line",
    "kLoad": "elements of a tile of the mask that a thread loads",
    "kCount": "rows of a tile that a thread loads at once",
    "kAtOnce": "elements of a row of dq that are added at once",
    "kPartsAlone": "of which type the main kernel's results are",
    "kLanesTogether": "of float8, ptxas is told that a warp's lanes walk together",
    "kLeavesFactor": "a row's factor of scores is the exponential's",
    "kPart": "columns between two calls of what goes beside exponentials",
}


def test_schedules_decide_and_device_text_does_not():
    definition = r"constexpr (?:bool|int) (k\w+) =([^;]*);"
    joined = {
        name
        for text in _native.kernel_sources().values()
        for name, value in re.findall(definition, text)
        if "&&" in value or "||" in value
    }
    assert joined == {*DERIVED}


SCHEDULES: dict[str, list[type]] = {
    "sm90/forward.cuh": [ForwardSchedule],
    "sm90/backward.cuh": [BackwardSchedule, CommonSchedule],
    "sm80/forward.cuh": [],
    "sm80/backward.cuh": [CommonSchedule],
}
LISTS = {
    "sm90/forward.cuh": ["sm90/forward.cuh", "terms.cuh"],
    "sm90/backward.cuh": ["sm90/backward.cuh", "backward_common.cuh", "terms.cuh"],
    "sm80/forward.cuh": ["sm80/forward.cuh", "terms.cuh"],
    "sm80/backward.cuh": ["sm80/backward.cuh", "backward_common.cuh", "terms.cuh"],
}


@pytest.mark.parametrize("source", LISTS)
def test_each_constant_is_explained_once(source):
    """In a list at the head of the device text, or where a schedule decides the flag."""
    family, which = source.removesuffix(".cuh").split("/")
    texts = _native.kernel_sources()
    heads = "".join(texts[name].split("#pragma once")[0] for name in LISTS[source])
    listed = {*re.findall(r"^// +(?:bool|int) (k\w+)", heads, re.M)}
    flags = {
        "k" + "".join(word.capitalize() for word in name.split("_"))
        for schedule in SCHEDULES[source]
        for name, flag in vars(schedule).items()
        if isinstance(flag, property) and flag.__doc__
    }
    constants = {*plan_of(which, family, "128").constants}
    assert not constants - {*re.findall(r"\bk\w+", heads)} - flags
    assert not listed & flags


def test_device_text_is_in_pieces():
    """No file of more than 500 lines, no struct of more than 250."""
    struct = re.compile(r"^(?:struct|class) (\w+)[^;{]*\{\n.*?^\};", re.M | re.S)
    texts = _native.kernel_sources()
    structs = [
        (file, match[1], match[0].count("\n") + 1)
        for file, text in texts.items()
        for match in struct.finditer(text)
    ]
    assert len(structs) > 100
    assert not [file for file, text in texts.items() if text.count("\n") > 500]
    assert not [struct for struct in structs if struct[2] > 250]


def test_float32_in_halves_is_another_kernel():
    """Hopper's files for 16 bits name it nowhere but in their lists of constants."""
    texts = _native.kernel_sources()
    bodies = {name: texts[name].split("#pragma once")[1] for name in texts if "sm90/" in name}
    assert len(bodies) > 30
    assert not [name for name, body in bodies.items() if re.search(r"\b(kHalves|halves)\b", body)]
    for which in ("forward", "backward"):
        plan = plan_of(which, "sm90", "float32 highest")
        assert {plan.source, plan.beside} == {
            f"sm90_float32/{which}.cuh", f"sm90_float32/{which}_entries.cuh"
        }  # fmt: skip
