"""Heads whose rows TMA cannot load are padded by copies where each row is read often."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import _backends, _gpu
from jax_flash._ops import passes
from jax_flash._problem import Problem, Shapes

from ..conftest import needs_module

SHAPES = Shapes(2, 1024, 1024, 4, 2, 100, 36)
PADDED = dataclasses.replace(SHAPES, head_dim=104, value_dim=40)


def padded(shapes: Shapes, *, gpu: str = "H200", which: str = "backward", **of: str) -> Shapes:
    problem = Problem(**{"dtype": "bfloat16", "scale": 0.1, **of})
    call = passes(problem)[which]
    return _gpu.padded(call, shapes, _gpu.spec.GPUS[gpu])


def test_sizes():
    assert padded(SHAPES) == PADDED
    assert padded(PADDED) == PADDED
    assert padded(SHAPES, which="forward") == SHAPES
    long = {"q_len": 4096, "kv_len": 4096}
    of_long = padded(dataclasses.replace(SHAPES, **long), which="forward")
    assert of_long == dataclasses.replace(PADDED, **long)
    for which in ("forward", "backward"):  # float16 copies
        assert padded(SHAPES, which=which, dtype="float32") == PADDED
    few = dataclasses.replace(SHAPES, q_len=256)
    assert padded(few) == few
    heads = dataclasses.replace(few, q_heads=8)  # a key is read by all queries of its heads
    assert padded(heads) == dataclasses.replace(PADDED, q_len=256, q_heads=8)
    short = dataclasses.replace(SHAPES, kv_len=1000)
    assert padded(short) == short


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_words_of_few_bytes(which: str):
    """Warps load odd dims by elements, and other dims that 4 does not divide by pairs."""
    odd = dataclasses.replace(SHAPES, q_len=1, kv_len=8, head_dim=99)
    assert padded(odd, which=which) == dataclasses.replace(PADDED, q_len=1, kv_len=8)
    even = dataclasses.replace(SHAPES, q_len=512, kv_len=8, head_dim=98)
    assert padded(even, which=which) == dataclasses.replace(PADDED, q_len=512, kv_len=8)
    fewer = dataclasses.replace(even, q_len=511)
    assert padded(fewer, which=which) == fewer


def test_boxes_begin_early_where_rows_of_all_heads_are_aligned():
    """Heads of their own keys, and rows of 8 n elements: plain gradients up to 128 columns."""
    own = dataclasses.replace(SHAPES, kv_heads=4, q_len=4096, kv_len=4096)
    for which in ("forward", "backward"):
        assert padded(own, which=which) == own
    wide = dataclasses.replace(own, head_dim=196, value_dim=196)
    assert padded(wide, which="forward") == wide
    assert padded(wide) == dataclasses.replace(wide, head_dim=200, value_dim=200)
    unaligned = dataclasses.replace(own, q_heads=5, kv_heads=5)
    assert padded(unaligned) == dataclasses.replace(unaligned, head_dim=104, value_dim=40)
    few = dataclasses.replace(own, batch=1, q_heads=2, kv_heads=2)  # CTAs share backward units
    assert padded(few) == dataclasses.replace(few, head_dim=104, value_dim=40)
    assert padded(few, which="forward") == few


@pytest.mark.parametrize("window", [(None, None), (None, 0)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_boxes_that_begin_early_stand_alone(window, deterministic):
    """What else the backward kernels do with columns of a head would not compile beside them."""
    problem = Problem("bfloat16", 0.1, window=window, deterministic=deterministic)
    call, plain = passes(problem)["backward"], window == (None, None) and not deterministic
    for batch, length, heads, dim in itertools.product((1, 16), (1024, 4096), (2, 8), (36, 116)):
        shapes = Shapes(batch, length, length, heads, heads, dim, dim)
        (made,) = _gpu.plans(call, shapes, _gpu.spec.GPUS["H200"])
        others = ("shares", "compact", "pairs", "ring_sets", "dq_row_bytes")
        few = plain and (batch, length, heads) == (1, 4096, 2)
        assert made.tiling.early != few, shapes
        assert few or not any(getattr(made.tiling, name) for name in others), shapes


def test_other_kernels_load_any_rows():
    assert padded(SHAPES, gpu="A100") == SHAPES
    assert padded(SHAPES, dtype="float32", precision="high") == SHAPES


@needs_module
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_program(dtype: str):
    """The kernels take and give the wider arrays, the caller's have their sizes."""
    q, k, v = (
        jax.ShapeDtypeStruct((2, 1024, heads, dim), dtype)
        for heads, dim in ((4, 100), (2, 100), (2, 36))
    )

    def loss(q, k, v):
        return jnp.sum(jax_flash.flash_attention(q, k, v, is_causal=True))

    traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(q, k, v)
    lowered = traced.lower(lowering_platforms=("cuda",))
    assert [x.shape for x in jax.tree.leaves(lowered.out_info)] == [q.shape, k.shape, v.shape]
    calls = [line for line in lowered.as_text().splitlines() if "@jax_flash_cuda" in line]
    assert len(calls) == (2 if dtype == "bfloat16" else 4)
    for line in calls[dtype == "bfloat16" :]:  # of the backward pass
        types = line.rsplit(" : ", 1)[1]
        assert {"x104x", "x40x"} <= {*re.findall(r"x(?:104|40)x", types)}
        assert not re.search(r"x(100|36)x", types)


@needs_module
def test_explanation_says_so(uncompiled):
    q, k = (jax.ShapeDtypeStruct((2, 1024, heads, 100), jnp.bfloat16) for heads in (4, 2))
    text = str(jax_flash.explain(q, k, k, gpu="H200"))
    assert text.count("head dims padded from 100/100 to 104/104") == 1
    assert text.count("rows loaded by warps") == 1
    alone = str(jax_flash.explain(q, q, q, gpu="H200"))
    assert "padded" not in alone
    assert alone.count("early True") == 2


def test_columns_of_zeros_change_nothing():
    """What `_padded` makes of operands, by float64 of "xla"."""
    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(0), 4)
        dims = ((3, 4, 5), (6, 2, 5), (6, 2, 3), (3, 4, 3))  # rows, heads, columns
        names = ("q", "k", "v", "dout")
        arrays = {
            name: jax.random.normal(key, (2, *shape), jnp.float64)
            for name, key, shape in zip(names, keys, dims, strict=True)
        }
        wider = _backends._padded(arrays, Shapes(2, 3, 6, 4, 2, 8, 8))

        def run(q, k, v, dout):
            def attend(*operands):
                return jax_flash.flash_attention(*operands, scale=0.3, backend="xla")

            out, pull = jax.vjp(attend, q, k, v)
            return out, *pull(dout)

        results, expected = run(**wider), run(**arrays)
        for got, want in zip(results, expected, strict=True):
            assert got.shape[-1] == 8
            np.testing.assert_allclose(got[..., : want.shape[-1]], want, rtol=1e-12, atol=1e-12)
            assert not got[..., want.shape[-1] :].any()
