"""Compiles the tuned CUDA kernels for Hopper and reads the compiler's report: no GPU.

Compiled are the plain kernels of each head dim, each schedule of theirs, and of all others so many
that any two terms that meet in one of them meet in one that is compiled, and each meets each head
dim; each way in which a term is read or a plan has its warps work is in one. What spills is in
spills_table.py, by the compiler (test_cuda_compile_spills.py). After a change of kernels or tilings
JAX_FLASH_COMPILE_ALL=1 compiles all: five hundred, 2 to 3 s each.

The cache of compiled kernels holds the reports too: what it has, by the text of all sources, the
constants and the compiler's version, is not compiled again, on another jax or Python say.

Kernels of float32 are in test_cuda_compile_float32.py, those by mma.sync in _sm80.py, those of
decoding in _decode.py.
"""

import dataclasses
import itertools
from typing import Any

import pytest

from jax_flash import _gpu
from jax_flash._gpu.constants import problem_constants
from jax_flash._ops import passes

from .compile_cases import EVERYTHING, H200, PLAIN, SHAPES, Configurations, check
from .compile_lists import others, tuned

pytestmark = pytest.mark.usefixtures("asserted_shared_memory")


# What a term's loads are written for, what it is made of in a kernel that has it, and what a plan
# chooses beside its tiles: not terms. Each is in a program; terms meet each other, and head dims.
WAYS = {
    "kBFloat16", "kBiasFloat32", "kBiasBFloat16", "kBiasKeys", "kBiasQueries", "kBiasAlignment",
    "kHasMaskBytes", "kMaskKeys", "kMaskQueries", "kMaskAlignment", "kByteKeys", "kByteQueries",
    "kPackedHeads", "kDropsMost", "kReachLeft", "kReachRight", "kDrains", "kPingPong", "kDynamic",
    "kReadsAhead", "kAddsFour", "kTmaLoads", "kBiasTiles", "kBatchesTogether", "kDropsPart",
    "kBottomRight", "kHasScoreIds", "kScoreIsLine", "kScoreReach", "kBeginsNear", "kScoreIsLevel",
    "kScoreHasSlope", "kFades", "kHoldsDraws", "kListsLayout", "kShowsLayout",
}  # fmt: skip
# Flags of a tiling or a call. Those of a schedule follow from these and from the terms.
OF_PLAN = {
    "kHalves", "kPreScale", "kCompact", "kRing", "kPartsApart", "kStoresDbias",
    "kDbiasByHeads", "kDbiasByRows", "kDbiasCleared", "kDeterministic", "kHasDlse", "kHasDbias",
}  # fmt: skip
FLAGS = {*problem_constants(PLAIN, SHAPES), *OF_PLAN, *WAYS}


def features(plan: _gpu.Plan) -> set:
    """What a program is compiled with beside the plain one's, and its head dim."""
    plain = {"kBFloat16": True, "kTmaLoads": True}
    chosen = {
        (name, value)
        for name, value in plan.constants.items()
        if (name in FLAGS and isinstance(value, bool) and value != plain.get(name, False))
        or name in WAYS
    }
    return chosen | {("head dim", -(-plan.constants["kHeadDim"] // 64))}


def plans(name: str) -> list[Any]:
    """What is compiled for a pass, each program once: the tuned ones, others for pairs."""

    def programs(configurations: Configurations) -> dict[Any, tuple[str, _gpu.Plan]]:
        found = {}
        for configuration, problem, shapes in configurations:
            plan = _gpu.plan(passes(problem)[name], shapes, H200)
            program = plan.source, plan.entries, plan.header, plan.shared_bytes
            found.setdefault(program, (configuration, plan))
        return found

    def pairs(plan: _gpu.Plan) -> set:
        found = features(plan)
        alone = {(name, value) for name, value in found if name in WAYS}
        return alone | set(itertools.combinations(sorted(found - alone), 2))

    def gain(program: Any) -> float:
        wide = rest[program][1].constants["kHeadDim"] > 128  # takes twice as long
        return len(pairs_of[program] & missing) / (1 + wide)

    def trim(programs: list[Any], always: set) -> list[Any]:
        """Leaves out those whose pairs others have."""
        kept = programs.copy()
        for program in programs:
            if pairs_of[program] <= always.union(*(pairs_of[x] for x in kept if x != program)):
                kept.remove(program)
        return kept

    chosen, rest = programs(tuned(name)), programs(others(name))
    if EVERYTHING:
        chosen = rest | chosen
    pairs_of = {program: pairs(plan) for program, (_, plan) in (rest | chosen).items()}
    always = set().union(*(pairs_of[program] for program in chosen))
    missing = set().union(*(pairs_of[program] for program in rest)) - always
    added = []
    while missing:
        added.append(max(rest, key=gain))  # the first of several
        missing -= pairs_of[added[-1]]
    chosen |= {program: rest[program] for program in trim(added, always)}
    # The kernels beside do not know the tilings for which most of these were chosen.
    beside = [*chosen] if EVERYTHING else trim([*chosen], set())
    return [
        pytest.param(
            plan if program in beside else dataclasses.replace(plan, beside=""), id=configuration
        )
        for program, (configuration, plan) in chosen.items()
    ]


@pytest.mark.parametrize("plan", plans("forward"))
def test_forward_compiles_without_spills(plan: _gpu.Plan):
    check(plan, seconds=15)


@pytest.mark.parametrize("plan", plans("backward"))
def test_backward_compiles_without_spills(plan: _gpu.Plan):
    check(plan, seconds=20)


def test_backward_with_lse_gradient_compiles_without_spills():
    check(_gpu.plan(passes(PLAIN, with_dlse=True)["backward"], SHAPES, H200), seconds=20)


FEW_ROWS = {
    "64": (64, {}),
    "128 segments deterministic": (
        128,
        {"terms": ("query_segments", "key_value_segments"), "deterministic": True},
    ),
    "100/36 causal dropout": (
        100,
        {"window": (None, 0), "terms": ("dropout_state",), "dropout_rate": 0.1},
    ),
    "256 positions": (
        256,
        {"window": (90, 5), "terms": ("query_positions", "key_value_positions")},
    ),
    "256 causal segments dropout": (
        256,
        {
            "window": (None, 0),
            "terms": ("query_segments", "key_value_segments", "dropout_state"),
            "dropout_rate": 0.1,
        },
    ),
    "64 highest": (64, {"dtype": "float32", "precision": "highest"}),
}
# Every head dim on either; terms and rows that there are not meet in the same text.
FEW_ON_AN_A100 = ("64", "128 segments deterministic", "256 causal segments dropout")


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        (name, gpu)
        for name in FEW_ROWS
        for gpu in ("H200", "A100")
        if EVERYTHING or gpu == ("A100" if name in FEW_ON_AN_A100 else "H200")
    ],
)
def test_backward_of_few_rows_compiles_without_spills(name: str, gpu: str):
    """Scratch arrays of the rows and columns that there are, not of whole blocks."""
    dim, change = FEW_ROWS[name]
    shapes = dataclasses.replace(
        SHAPES, q_len=3, kv_len=130, kv_heads=1, head_dim=dim, value_dim=36 if dim == 100 else dim
    )
    call = passes(dataclasses.replace(PLAIN, **change))["backward"]
    spec = _gpu.spec.GPUS[gpu]
    plan = _gpu.plan(call, shapes, spec)
    assert plan.tiling.compact
    check(plan, seconds=20, gpu=spec)


NARROW_GROUPS = {
    "16": (16, {}),
    "32 causal": (32, {"window": (None, 0)}),
    "24 window float16": (24, {"window": (90, 5), "dtype": "float16"}),
    "32 window": (32, {"window": (None, 5)}),
    "32 shares": (32, {}),
}


@pytest.mark.parametrize(
    "name", [x for x in NARROW_GROUPS if EVERYTHING or x in ("32 causal", "32 shares")]
)
def test_backward_of_narrow_groups_compiles_without_spills(name: str):
    """Several units add to dk and dv beside a compact sum of dq."""
    dim, change = NARROW_GROUPS[name]
    shares = "shares" in name
    sizes = {"q_len": 8192 if shares else 1500, "kv_len": 512 if shares else 192, "batch": 1}
    shapes = dataclasses.replace(SHAPES, **sizes, kv_heads=1, head_dim=dim, value_dim=dim)
    plan = _gpu.plan(passes(dataclasses.replace(PLAIN, **change))["backward"], shapes, H200)
    assert plan.tiling.compact
    assert plan.tiling.unit_heads == 1
    assert plan.tiling.shares == shares
    check(plan, seconds=20)
