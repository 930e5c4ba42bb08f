"""Scratch arrays of the CUDA kernels: how much memory they take, and those of few rows at work."""

from __future__ import annotations

import functools
import itertools

import pytest

from jax_flash import _gpu
from jax_flash._gpu.workspaces import scratch_bytes
from jax_flash._ops import passes
from jax_flash._problem import Problem, Shapes

from ..cases import Case
from ..compare import compare_parts
from ..emulated_cases import BACKWARDS
from ..emulator import Emulator

# Queries and keys, heads, head dims.
LENGTHS = itertools.product((1, 16, 65, 4096), (1, 16, 4096))
HEADS = ((128, 128), (8, 1), (128, 1))
DIMS = ((8, 8), (16, 16), (20, 20), (65, 33), (72, 72), (128, 128), (192, 128), (512, 512))
SHAPES = [
    Shapes(3, *lengths, *heads, *dims)
    for lengths, heads, dims in itertools.product(LENGTHS, HEADS, DIMS)
]
PROBLEMS = {
    "bfloat16": Problem("bfloat16", 0.1),
    "bfloat16 deterministic": Problem("bfloat16", 0.1, deterministic=True),
    "float32": Problem("float32", 0.1),
    "float32 highest": Problem("float32", 0.1, precision="highest"),
}


@pytest.mark.parametrize("gpu", ["H200", "A100"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_scratch_takes_twice_the_arrays_at_most(name: str, gpu: str):
    """In float32, whatever of query and output is wider; float16 copies of float32 count too.

    The turns of the deterministic mode take 8 bytes a query and head beside it. Precision "highest"
    keeps query and output gradient in two float16: all of that where keys are few, in rows of whole
    eights. What it keeps of each row comes on top, up to 56 bytes of the only row of a head.
    """
    problem, spec = PROBLEMS[name], _gpu.spec.GPUS[gpu]
    highest = problem.precision == "highest"
    beside, most = 8 * problem.deterministic + 56 * highest, {}
    for shapes in SHAPES:
        dims = [shapes.head_dim, shapes.value_dim]
        if highest:
            dims = [-(-dim // 8) * 8 for dim in dims]
        queries = shapes.batch * shapes.q_len * shapes.q_heads
        keys = shapes.batch * shapes.kv_len * shapes.kv_heads
        limit = 8 * (queries * max(dims) + keys * sum(dims)) + beside * queries
        for which, call in passes(problem).items():
            if _gpu.refuse(call, shapes, spec):
                continue
            parts = _gpu.calls(call, shapes, spec)
            taken = max(scratch_bytes(_gpu.plan(x, shapes, spec).workspaces) for x in parts)
            if len(parts) > 1:
                of_queries = sum(dims) if which == "backward" else dims[0]
                taken += 2 * (queries * of_queries + keys * sum(dims))
            if taken > limit:
                most[shapes, which] = taken / limit
    assert not most


C = functools.partial(Case, N=4, K=1, H=64, batch=(2,), dtype="bfloat16", with_lse=True)
H = functools.partial(C, dtype="float32", precision="highest")
COMPACT = (
    C("one of 16", T=1, S=1, K=4, H=16),
    C("one", T=1, S=170, N=16, deterministic=True, kv_lengths=(170, 3)),
    C("few columns", T=150, S=130, H=16, N=16, causal=True),
    C("odd", T=5, S=130, H=33, Hv=7, softcap=3.0, sinks=True, dropout=0.3),
    C("wide", T=5, S=130, H=200, N=16, segments="packed"),
    C("128", T=9, S=130, N=16, H=128, window=(3, 2), deterministic=True, dtype="float16"),
    C("bias", T=3, S=12, H=16, N=8, bias="11ts", mask="b1ts"),
    C("bias stored", T=3, S=12, H=16, N=8, bias="bnts"),
    H("halves few", T=3, S=5, H=24),
    H("halves few keys", T=70, S=2, H=24, causal=True),
    H("halves in dq", T=64, S=16, N=8, deterministic=True),
)  # fmt: skip
SINCE_AMPERE = (
    C("few keys", T=70, S=3, H=72, causal=True, deterministic=True),
    C("odd", T=5, S=7, H=33, Hv=7, softcap=3.0, sinks=True, dropout=0.3, bias="11ts"),
    H("halves in dq", T=64, S=16, N=8),
    C("in parts", T=3, S=5, H=24, dtype="float32", precision="high"),
)


def is_compact(case: Case, gpu: str) -> bool:
    """Tells whether less than whole blocks are kept."""
    problem = Problem(case.dtype, 1.0, precision=case.precision or "default",
                      deterministic=case.deterministic)  # fmt: skip
    shapes = Shapes(case.batch[0], case.T, case.S, case.N, case.kv_heads, case.H, case.value_dim)
    tiling = _gpu.plan(passes(problem)["backward"], shapes, _gpu.spec.GPUS[gpu]).tiling
    return tiling.compact or (case.dtype == "float32" and tiling.dq_row_bytes > 0)


@pytest.mark.parametrize(
    ("gpu", "case"),
    [("H100", case) for case in COMPACT] + [("A100", case) for case in SINCE_AMPERE],
    ids=lambda x: x if isinstance(x, str) else x.name.replace(" ", "-"),
)
def test_gradients_of_few_rows(gpu: str, case: Case, emulator: Emulator):
    assert is_compact(case, gpu)
    arguments = case.draw()
    for seed in (BACKWARDS, 2)[: 1 + case.deterministic]:
        compare_parts(arguments, emulator.run(arguments, seed=seed, gpu=gpu))
