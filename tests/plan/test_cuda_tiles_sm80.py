"""How GPUs since Ampere run a problem by mma.sync: pure choices, tested without a GPU."""

from __future__ import annotations

import dataclasses
import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest

from jax_flash import _gpu
from jax_flash._gpu import spec
from jax_flash._gpu.workspaces import blocks, boxes
from jax_flash._ops import passes
from jax_flash._problem import Problem, Shapes, TermShape

from .plain_calls import DIMS, H200, PLAIN, SHAPES, replace_dims


@pytest.mark.parametrize("arch", _gpu.sm80.Sm80.architectures)
def test_tilings_fit_every_gpu_and_cover_every_column(arch: str):
    """What warps that share rows read and write, by the arithmetic of forward_products.cuh."""
    gpu = _gpu.GpuSpec(arch, arch)
    problems = [
        Problem(dtype, 1.0, precision=precision, terms=terms)
        for dtype, precision in [
            ("bfloat16", "default"),
            ("float32", "default"),
            ("float32", "highest"),
        ]
        for terms in [(), ("sinks",)]
    ]
    sizes = (1, 16, 20, 64, 65, 100, 128, 129, 192, 200, 256, 257, 300, 320, 400, 511, 512)
    for problem, head_dim, value_dim in itertools.product(problems, sizes, sizes):
        shapes = Shapes(1, 512, 512, 2, 2, head_dim, value_dim)
        tiling = _gpu.sm80.choose_forward(problem, shapes, gpu)
        assert tiling.shared_bytes <= gpu.shared_bytes
        assert tiling.threads in (128, 256)
        # Rows are copied by 128 threads with 16 bytes each, rows of boxes side by side.
        assert tiling.block_kv % 16 == tiling.block_q % 16 == 0
        warps = tiling.value_warps
        steps = blocks(blocks(head_dim, 16), warps)
        columns = 16 * blocks(blocks(value_dim, warps), 16)
        for dim, covered in ((head_dim, 16 * steps * warps), (value_dim, columns * warps)):
            assert dim <= covered <= 64 * boxes(dim)  # there are zeros between the two
        # Registers: results and scores of a row tile, of 255 together.
        assert tiling.row_tiles * (columns + tiling.block_kv) // 2 <= 192


def test_a_family_may_be_preferred():
    before = _gpu.families()
    with _gpu.prefer("sm80"):
        assert _gpu.families()[0].name == "sm80"
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(_gpu.families).result() == before
    assert before == _gpu.families()
    unknown = pytest.raises(ValueError, match=r"family must be one of sm90, .*, not 'sm70'")
    with unknown, _gpu.prefer("sm70"):
        pass


@pytest.mark.parametrize("arch", _gpu.sm80.Sm80.architectures)
def test_backward_tilings_since_ampere_fit(arch: str):
    gpu = dataclasses.replace(H200, name=arch, arch=arch)
    family = _gpu.sm80.Sm80()
    bias = TermShape("float32", batch=1, heads=1, queries=4096, keys=4096)
    problems = [PLAIN] + [
        dataclasses.replace(PLAIN, dtype="float32", precision=precision)
        for precision in ("default", "highest")
    ]
    dims = (*DIMS[::4], 64, 128, 256, 257, 320, 511, 512)
    for problem, head_dim, value_dim in itertools.product(problems, dims, dims):
        shapes = replace_dims(head_dim, value_dim)
        if family.refuse(passes(problem)["backward"], shapes, gpu):
            # 16 rows each of queries, keys, values and output gradients do not fit.
            columns = 64 * (-(-head_dim // 64) + -(-value_dim // 64))
            assert problem.dtype == "float32"
            assert 2 * 16 * columns * 2 * 2 > gpu.shared_bytes - 4096
            continue
        tiling = _gpu.sm80.choose_backward(problem, shapes, gpu)
        assert tiling.shared_bytes <= gpu.shared_bytes
        biased = dataclasses.replace(problem, terms=("bias",))
        of_bias = _gpu.sm80.choose_backward(biased, dataclasses.replace(shapes, bias=bias), gpu)
        assert max(of_bias.shared_bytes, of_bias.bias_shared_bytes) <= gpu.shared_bytes
        assert tiling.threads <= 256  # of 255 registers each
        # A warp's keys by its columns of dk and dv, 32 threads.
        columns = sum(-(-dim // (16 * tiling.column_warps)) * 16 for dim in (head_dim, value_dim))
        assert columns * tiling.row_tiles // 2 <= 128
        # All warps have rows of dq, as many as of keys.
        assert tiling.warps % (tiling.step_queries // (16 * tiling.row_tiles)) == 0


@pytest.mark.quick
def test_backward_tilings_take_the_keys_that_fit():
    """Every block of keys adds to the sum of dq once."""

    def keys(gpu: str, dim: int) -> tuple[int, int]:
        shapes = replace_dims(dim, dim)
        tiling = _gpu.sm80.choose_backward(PLAIN, shapes, spec.GPUS[gpu])
        return tiling.block_kv, tiling.step_queries

    assert [keys("A100", dim) for dim in (64, 128, 192, 256)] == [
        *((128, 64), (128, 64), (64, 64), (64, 64))
    ]
    assert [keys("L4", dim) for dim in (64, 128, 192, 256)] == [
        *((128, 64), (128, 32), (64, 32), (32, 32))
    ]


@pytest.mark.quick
def test_deterministic_units_of_a_head_are_apart():
    """As many heads are walked together as there are CTAs: units of one wait for each other."""
    shapes = dataclasses.replace(SHAPES, batch=16)
    problem = dataclasses.replace(PLAIN, deterministic=True)
    tiling = _gpu.sm80.choose_backward(problem, shapes, spec.GPUS["A100"])
    assert tiling.l2_heads >= 108
