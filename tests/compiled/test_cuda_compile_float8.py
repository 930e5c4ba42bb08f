"""Compiles the CUDA kernels of float8: see test_cuda_compile.py."""

import dataclasses
from typing import Any

import pytest

from jax_flash import _gpu
from jax_flash._float8 import DTYPE, turns
from jax_flash._ops.float8 import Float8
from jax_flash._ops.quantise import Quantise
from jax_flash._problem import BlockMaskShape

from .compile_cases import (
    EVERYTHING,
    FEATURES,
    H200,
    LENGTHS,
    PLAIN,
    POSITIONS,
    SEGMENTS,
    SHAPES,
    check,
)

pytestmark = pytest.mark.usefixtures("asserted_shared_memory")

CAUSAL = {"window": (None, 0)}
BLOCKS = {"terms": ("block_numbers", "block_bits")}
CALLS: dict[int, dict[str, dict[str, Any]]] = {
    64: {"full": {}, "causal": CAUSAL, "everything": FEATURES["everything"]},
    96: {"everything": FEATURES["everything"]},
    128: {
        "full": {},
        "causal": CAUSAL,
        "segments": CAUSAL | {"terms": SEGMENTS},
        "lengths, sinks": CAUSAL | {"terms": (*LENGTHS, "sinks")},
        "positions, softcap": CAUSAL | {"terms": POSITIONS, "softcap": 30.0},
        "window, lengths, sinks": {"window": (100, 0), "terms": (*LENGTHS, "sinks")},
        "block mask": BLOCKS,
    },
    192: {"causal": CAUSAL, "of 128, lengths, sinks": CAUSAL | {"terms": (*LENGTHS, "sinks")}},
    256: {"causal": CAUSAL},
}
# Each term and each schedule meets a head dim above: these have fewer terms in the same registers,
# or the terms of another dim.
OTHERS: dict[int, dict[str, dict[str, Any]]] = {
    64: {
        "positions": {"terms": POSITIONS},
        "segments": CAUSAL | {"terms": SEGMENTS},
        "block mask": BLOCKS,
    },
    96: {"segments": CAUSAL | {"terms": SEGMENTS}},
    128: {"window": {"window": (100, 20)}},
    256: {"full": {}},
}
LISTS = (CALLS, OTHERS) if EVERYTHING else (CALLS,)
DTYPES = ("bfloat16", "float16", "float32")


@pytest.mark.parametrize("out_dtype", DTYPES if EVERYTHING else DTYPES[:1])
@pytest.mark.parametrize(
    ("dim", "name", "change"),
    [
        pytest.param(dim, name, change, id=f"{dim}-{name}")
        for calls in LISTS
        for dim, changes in calls.items()
        for name, change in changes.items()
    ],
)
def test_forward_of_float8_compiles_without_spills(
    dim: int, name: str, change: dict[str, Any], out_dtype: str
):
    problem = dataclasses.replace(PLAIN, dtype=DTYPE, **change)
    shapes = dataclasses.replace(SHAPES, head_dim=dim, value_dim=128 if "of 128" in name else dim)
    if "block" in name:
        shapes = dataclasses.replace(shapes, block_mask=BlockMaskShape(1, 1, 128))
    call = Float8(problem, None, out_dtype)
    assert not _gpu.refuse(call, shapes, H200)
    plan = _gpu.plan(call, shapes, H200)
    # The kernels beside know terms and dims, not schedules: others have those of these.
    if not EVERYTHING and dim <= 128 and name in ("full", "causal"):
        plan = dataclasses.replace(plan, beside="")
    check(plan, seconds=15)


@pytest.mark.parametrize("amax", [False, True])
@pytest.mark.parametrize("argument", ["query", "value"])
@pytest.mark.parametrize("dim", range(64, 257, 16) if EVERYTHING else (64, 112, 128, 256))
def test_quantising_compiles_without_spills(dim: int, argument: str, amax: bool):
    of_value = argument == "value"
    call = Quantise(
        *(PLAIN, None),
        argument=argument,
        turn=not of_value and turns(dim),
        columns=of_value,
        amax=amax,
    )
    shapes = dataclasses.replace(SHAPES, head_dim=dim, value_dim=dim)
    assert not _gpu.refuse(call, shapes, H200)
    report = check(_gpu.plan(call, shapes, H200), seconds=5)
    # Numbers that a thread indexes by more than constants lie in memory: 180 µs instead of 41.
    assert all(entry.stack_bytes == 0 for entry in report.entries)
