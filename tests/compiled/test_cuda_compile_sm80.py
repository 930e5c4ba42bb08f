"""Compiles the CUDA kernels of mma.sync, for each architecture: see test_cuda_compile.py."""

import dataclasses
import re
from typing import Any

import pytest

from jax_flash import _gpu, _native
from jax_flash._ops import passes

from .compile_cases import EVERYTHING, H200, PLAIN, SHAPES, biases, check, masks, split
from .compile_lists import close, others, tuned

pytestmark = pytest.mark.usefixtures("asserted_shared_memory")


def plans_since_ampere() -> list[Any]:
    """Returns each generation's kernel with the fewest registers to spare; one with many terms."""
    family, causal = _gpu.sm80.Sm80(), dataclasses.replace(PLAIN, window=(None, 0))
    found: dict[tuple[str, str], Any] = {}
    for arch in family.architectures:
        gpu = dataclasses.replace(H200, name=arch, arch=arch)
        configurations = [("128 causal", causal, SHAPES)]
        if EVERYTHING:
            configurations += [*tuned("forward"), *close(), *split()]
            configurations += others("forward") if arch in ("sm_80", "sm_120") else ()
        elif arch == "sm_90a":
            configurations += (x for x in split() if x[0] == "128 float32 default causal")
        elif arch == "sm_120":
            names = ("512 bfloat16 default causal", "512 float32 highest dropout")
            configurations += (x for x in split() if x[0] in names)
        elif arch == "sm_80":
            small = dataclasses.replace(SHAPES, head_dim=64, value_dim=64)
            many = next(x for x in masks() if x[0] == "128 mask and more")
            configurations += [("64 causal", causal, small), many]
        for name, problem, shapes in configurations:
            plan = family.plan(passes(problem)["forward"], shapes, gpu)
            generation = arch if EVERYTHING else re.sub("[0-9]a?$", "", arch)
            found.setdefault(
                (generation, plan.header), pytest.param(plan, gpu, id=f"{arch} {name}")
            )
    return list(found.values())


@pytest.mark.parametrize(("plan", "gpu"), plans_since_ampere())
def test_forward_since_ampere_compiles_without_spills(plan: _gpu.Plan, gpu: _gpu.GpuSpec):
    check(plan, seconds=15, gpu=gpu)


@pytest.mark.parametrize("arch", _gpu.sm80.Sm80.architectures)
def test_the_compiler_knows_each_architecture(arch: str):
    empty = 'extern "C" __global__ void empty() {}'
    assert _native.compile_kernel("numbers.cuh", empty, arch).cubin


def backward_plans_since_ampere() -> list[Any]:
    """Returns each tiling's kernel with the fewest registers to spare; some with more terms."""
    family, causal = _gpu.sm80.Sm80(), dataclasses.replace(PLAIN, window=(None, 0))
    found: dict[tuple[str, str], Any] = {}
    for arch in family.architectures:
        gpu = dataclasses.replace(H200, name=arch, arch=arch)
        dims = {"sm_80": (64, 128, 256), "sm_86": (128, 256), "sm_120": (128,), "sm_103": (192,)}
        parts = {
            "sm_80": ("128 float32 default causal",),
            "sm_86": ("512 bfloat16 default dropout", "256 float32 default causal"),
            "sm_90a": ("512 bfloat16 default causal", "64 float32 highest causal"),
            "sm_100": ("256 float32 default dropout", "512 float32 highest causal"),
        }
        configurations = [
            (f"{dim} causal", causal, dataclasses.replace(SHAPES, head_dim=dim, value_dim=dim))
            for dim in (dims.get(arch, ()) if not EVERYTHING else (64, 128, 192, 256))
        ]
        if EVERYTHING:
            configurations += [
                *tuned("backward"),
                *close(),
                *(others("backward") if arch in ("sm_80", "sm_120") else ()),
            ]
        elif arch == "sm_80":
            configurations += [x for x in masks() if x[0] == "128 mask and more"]
            configurations += [x for x in biases() if x[0] == "128 bias dropout"]
        configurations += [x for x in split() if EVERYTHING or x[0] in parts.get(arch, ())]
        for name, problem, shapes in configurations:
            call = passes(problem)["backward"]
            if EVERYTHING and family.refuse(call, shapes, gpu):  # of wide float32, shared memory
                continue
            plan = family.plan(call, shapes, gpu)
            found.setdefault((arch, plan.header), pytest.param(plan, gpu, id=f"{arch} {name}"))
    return list(found.values())


@pytest.mark.parametrize(("plan", "gpu"), backward_plans_since_ampere())
def test_backward_since_ampere_compiles_without_spills(plan: _gpu.Plan, gpu: _gpu.GpuSpec):
    check(plan, seconds=15, gpu=gpu)
