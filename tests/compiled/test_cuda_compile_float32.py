"""Compiles the CUDA kernels that run float32 by float16: see test_cuda_compile.py."""

import dataclasses
import itertools
from typing import Any

import pytest

from jax_flash import _gpu
from jax_flash._ops import passes

from .compile_cases import EVERYTHING, H200, PLAIN, SHAPES, check

pytestmark = pytest.mark.usefixtures("asserted_shared_memory")


def carried(name: str) -> list[Any]:
    """Programs of float32 by float16 copies, and one of mma.sync."""
    found = []
    causal = {"window": (None, 0)}
    terms = ("query_segments", "key_value_segments")
    changes: dict[str, dict[str, Any]] = {
        "causal": causal,
        "window deterministic": {"window": (100, 20), "deterministic": True},
        "segments": causal | {"terms": terms},
        "dropout": {"terms": ("dropout_state",), "dropout_rate": 0.1},
    }
    changes["dropout deterministic"] = causal | changes["dropout"] | {"deterministic": True}
    dims = {64: ("causal", "dropout"), 100: ("causal",), 128: tuple(changes), 256: tuple(changes)}
    if not EVERYTHING:  # each change and each dim: what meets is compiled of 16 bits
        dims |= {64: ("dropout",), 128: ("dropout deterministic",), 256: ("segments",)}
    for dim, names in dims.items():
        for change in names:
            problem = dataclasses.replace(PLAIN, dtype="float32", **changes[change])
            shapes = dataclasses.replace(SHAPES, head_dim=dim, value_dim=dim)
            call, _ = _gpu.calls(passes(problem)[name], shapes, H200)
            found.append(pytest.param(_gpu.plan(call, shapes, H200), H200, id=f"{dim} {change}"))
    a100 = _gpu.spec.GPUS["A100"]
    problem = dataclasses.replace(PLAIN, dtype="float32", **causal)
    for dim in (64, 128) if EVERYTHING else (128,):
        shapes = dataclasses.replace(SHAPES, head_dim=dim, value_dim=dim)
        call, _ = _gpu.calls(passes(problem)[name], shapes, a100)
        found.append(pytest.param(_gpu.plan(call, shapes, a100), a100, id=f"{dim} on an A100"))
    return found


@pytest.mark.parametrize(("plan", "gpu"), carried("forward"))
def test_forward_by_float16_copies_compiles_without_spills(plan: _gpu.Plan, gpu: _gpu.GpuSpec):
    check(plan, seconds=10, gpu=gpu)


@pytest.mark.parametrize(("plan", "gpu"), carried("backward"))
def test_backward_by_float16_copies_compiles_without_spills(plan: _gpu.Plan, gpu: _gpu.GpuSpec):
    check(plan, seconds=15, gpu=gpu)


def halves() -> list[Any]:
    """float32 in two float16 on Hopper."""
    windows = {"full": (None, None), "causal": (None, 0), "window": (100, 20)}
    found = []
    cases = [(64, "causal"), (112, "full"), (128, "window")]
    if EVERYTHING:
        cases = itertools.product((64, 112, 128), windows)
    for dim, name in cases:
        window = windows[name]
        shapes = dataclasses.replace(SHAPES, head_dim=dim, value_dim=dim)
        problem = dataclasses.replace(
            PLAIN,
            dtype="float32",
            precision="highest",
            window=window,
            bottom_right=name == "window",
        )
        found += [
            pytest.param(_gpu.plan(call, shapes, H200), id=f"{target} {dim} {name}")
            for target, call in passes(problem).items()
        ]
    return found


@pytest.mark.parametrize("plan", halves())
def test_float32_in_halves_compiles_without_spills(plan: _gpu.Plan):
    assert plan.constants["kHalves"]
    check(plan, seconds=10)
