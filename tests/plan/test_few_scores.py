"""Passes of few scores run on XLA's own products, where a GPU's kernels would be mostly empty."""

import dataclasses
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_flash
from jax_flash import _backends, _gpu, _products
from jax_flash._ops import passes
from jax_flash._problem import Problem, Shapes, TermShape

from ..conftest import needs_module

H200 = _gpu.spec.GPUS["H200"]
SHAPES = Shapes(40, 4, 2048, 8, 1, 128, 128)


@pytest.mark.parametrize(
    ("dtype", "sizes", "taken"),
    [
        ("bfloat16", {}, True),  # eight heads share their keys
        ("bfloat16", {"kv_heads": 4}, False),
        ("bfloat16", {"q_len": 17}, False),
        ("bfloat16", {"batch": 2}, False),  # less than two rounds of units
        ("bfloat16", {"batch": 64}, False),  # kernels read the keys of so many rows once
        ("bfloat16", {"batch": 1024}, False),  # more scores than are computed at once
        ("bfloat16", {"kv_len": 1, "kv_heads": 8, "q_len": 999}, True),
        ("bfloat16", {"kv_len": 4, "kv_heads": 8, "batch": 4096}, True),
        ("bfloat16", {"kv_len": 4, "kv_heads": 8, "batch": 4097}, False),
        ("bfloat16", {"kv_len": 5, "kv_heads": 8, "batch": 3000}, False),
        ("bfloat16", {"kv_len": 4, "kv_heads": 4, "batch": 2048, "q_len": 8}, True),
        ("bfloat16", {"kv_len": 4, "kv_heads": 8, "batch": 1200, "q_len": 12}, True),
        ("bfloat16", {"kv_len": 4, "kv_heads": 8, "batch": 1200, "q_len": 13}, False),
        ("bfloat16", {"kv_len": 2, "batch": 4, "q_len": 512, "kv_heads": 8}, True),
        ("bfloat16", {"kv_len": 2, "batch": 4, "q_len": 513, "kv_heads": 8}, False),
        ("bfloat16", {"kv_heads": 8, "batch": 1, "q_len": 20, "kv_len": 100}, False),
        ("bfloat16", {"kv_heads": 8, "batch": 1, "q_len": 20, "kv_len": 50}, True),
        ("bfloat16", {"kv_heads": 8, "batch": 1, "q_len": 32, "kv_len": 32}, True),
        ("bfloat16", {"kv_heads": 8, "batch": 1, "q_len": 33, "kv_len": 33}, False),
        ("bfloat16", {"kv_heads": 4, "batch": 4, "q_len": 17, "kv_len": 17}, False),
        (
            "bfloat16",
            {"kv_len": 16, "kv_heads": 8, "head_dim": 177, "q_len": 300},
            True,
        ),  # warps load rows
        ("bfloat16", {"kv_len": 16, "kv_heads": 8, "head_dim": 177, "q_len": 500}, False),
        ("bfloat16", {"kv_len": 16, "kv_heads": 8, "head_dim": 176, "q_len": 300}, False),
        ("float16", {"kv_heads": 2, "q_len": 1, "kv_len": 16, "batch": 512}, True),
        ("float16", {"kv_heads": 2, "q_len": 1, "kv_len": 16, "batch": 513}, False),
        ("float16", {"kv_heads": 2, "q_len": 1, "kv_len": 17, "batch": 400}, False),
        ("bfloat16", {"kv_heads": 2}, False),  # XLA would copy the keys of two heads
        ("float32", {"kv_heads": 8, "q_len": 32, "batch": 16}, True),
        ("float32", {"kv_heads": 8, "q_len": 33, "kv_len": 100}, False),
        ("float32", {"batch": 1, "q_len": 200, "kv_len": 200}, True),
        ("float32", {"batch": 127}, True),
        ("float32", {"batch": 128}, False),  # heads that kernels read keys for once
        ("float32", {"batch": 60, "kv_heads": 8, "q_len": 17}, True),
    ],
)
def test_which(dtype: str, sizes: dict[str, Any], taken: bool):
    shapes = dataclasses.replace(SHAPES, **sizes)
    for call in passes(Problem(dtype=dtype, scale=0.1)).values():
        name, refusals = _backends.pick(call, shapes, H200)
        assert (name, "cuda" in refusals) == (("xla", True) if taken else ("cuda", False))
        written = dataclasses.replace(call, problem=Problem(dtype, 0.1, as_written=True))
        for other in (dataclasses.replace(call, backend="cuda"), written):
            assert _backends.pick(other, shapes, H200)[0] == "cuda"


@pytest.mark.parametrize(
    ("sizes", "taken"),
    [
        ((1, 512, 512, 1, 1, 169), True),  # words of 2 bytes
        ((1, 512, 513, 1, 1, 169), False),
        ((2, 32, 32, 3, 1, 170), True),  # of 4
        ((11, 32, 32, 3, 1, 170), True),
        ((43, 32, 32, 3, 1, 170), False),  # more than 2^17 scores
        ((11, 32, 32, 3, 3, 254), False),  # keys of more than 2^18 elements
        ((1, 8, 178, 32, 32, 215), True),
        ((3, 8, 178, 32, 32, 215), False),  # keys of more than 2^21
        ((128, 8, 8, 4, 2, 100), True),  # of 8: many units of few scores
        ((127, 8, 8, 4, 2, 100), False),
        ((256, 8, 9, 4, 2, 100), False),
        ((256, 8, 8, 4, 2, 104), False),  # by TMA
        ((1, 2, 512, 20, 1, 232), True),  # a long walk
        ((1, 2, 511, 20, 1, 232), False),
        ((1, 2, 512, 20, 1, 128), False),
        ((1, 16, 512, 4, 2, 160), True),
        ((1, 17, 1024, 2, 2, 160), False),
    ],
)
def test_which_where_kernels_load_or_walk_long(sizes: tuple[int, ...], taken: bool):
    shapes = Shapes(*sizes, sizes[-1])
    for call in passes(Problem(dtype="bfloat16", scale=0.1)).values():
        assert _gpu.few_scores.takes(call, shapes, H200) == taken


@pytest.mark.parametrize(
    ("sizes", "forward", "backward"),
    [
        ((3, 256, 2, 12, 3, 80), False, True),  # XLA copies queries of heads that share keys
        ((3, 64, 2, 12, 3, 80), True, True),
        ((604, 4, 4, 4, 2, 64), True, True),
        ((922, 5, 5, 4, 2, 40), False, False),  # more than 3 x 2^20
        ((604, 4, 4, 4, 4, 64), True, True),  # few keys
        ((430, 5, 5, 2, 2, 104), False, False),  # heads of their own
        ((1, 5, 92, 24, 24, 160), False, False),  # more than 2^20, and long
        ((1, 5, 92, 12, 12, 160), True, True),
        ((1, 64, 64, 2, 2, 64), True, False),  # 2^19 forward alone beside causality
        ((1, 45, 45, 5, 5, 96), False, False),
        ((1, 129, 129, 1, 1, 32), False, False),
        ((11, 12, 42, 6, 3, 48), False, False),
        ((304, 17, 17, 20, 4, 198), False, True),  # loaded by warps
        ((304, 17, 17, 20, 4, 200), False, False),
        ((304, 17, 17, 20, 20, 198), False, False),
        ((438, 29, 29, 30, 6, 195), False, False),
        ((1015, 10, 10, 3, 1, 256), True, True),  # few keys of one head
        ((100, 10, 33, 3, 1, 256), False, False),
    ],
)
def test_which_of_one_pass(sizes: tuple[int, ...], forward: bool, backward: bool):
    shapes = Shapes(*sizes, sizes[-1])
    calls = passes(Problem(dtype="bfloat16", scale=0.1, window=(None, 0)))
    taken = {name: _gpu.few_scores.takes(call, shapes, H200) for name, call in calls.items()}
    assert taken == {"forward": forward, "backward": backward}
    both = dataclasses.replace(calls["forward"], gradients=("q", "k", "v"))
    assert _gpu.few_scores.takes(both, shapes, H200) == backward  # where its gradients run


def test_which_beside_a_mask_of_long_keys():
    problem = Problem(dtype="bfloat16", scale=0.1, terms=("mask",))
    calls = passes(problem)
    for keys, heads, taken in ((614, 1, True), (512, 1, False), (614, 14, False)):
        shapes = Shapes(10, 99, keys, heads, 1, 168, 168)
        assert _gpu.few_scores.takes(calls["forward"], shapes, H200) == taken
        assert not _gpu.few_scores.takes(calls["backward"], shapes, H200)
    shapes = Shapes(1, 32, 4096, 1, 1, 160, 160)  # the forward pass takes five times the backward
    for call in calls.values():
        assert _gpu.few_scores.takes(call, shapes, H200)


@pytest.mark.parametrize(
    ("change", "dtype", "taken"),
    [
        ({}, "bfloat16", True),
        ({}, "float16", False),  # not tuned
        ({"q_len": 5}, "bfloat16", False),
        ({"head_dim": 128, "value_dim": 128}, "bfloat16", False),
        ({"bias": TermShape("bfloat16", 27, 12, 4, 1024)}, "bfloat16", False),
    ],
)
def test_gradient_of_a_bias_that_rows_share(change: dict[str, Any], dtype: str, taken: bool):
    bias = TermShape("bfloat16", 1, 12, 4, 1024)
    shapes = dataclasses.replace(Shapes(27, 4, 1024, 12, 4, 248, 248, bias=bias), **change)
    call = passes(Problem(dtype=dtype, scale=0.1, terms=("bias",)))["backward"]
    assert "dbias" in call.results
    assert _gpu.few_scores.takes(call, shapes, H200) == taken


def test_gradient_of_a_bias_that_rows_and_heads_share():
    for rows, length, heads, taken in ((130, 16, 1, True), (130, 17, 1, False), (100, 16, 1, False),
                                       (130, 16, 4, False)):  # fmt: skip
        bias = TermShape("bfloat16", 1, heads, length, length)
        shapes = Shapes(rows, length, length, 4, 4, 96, 96, bias=bias)
        call = passes(Problem(dtype="bfloat16", scale=0.1, terms=("bias",)))["backward"]
        assert _gpu.few_scores.takes(call, shapes, H200) == taken


@pytest.mark.parametrize(
    ("sizes", "taken"),
    [
        ((150, 24, 24, 2, 1, 160), True),
        ((149, 24, 24, 2, 1, 160), False),
        ((401, 24, 24, 2, 1, 160), False),
        ((150, 25, 24, 2, 1, 160), False),
        ((150, 24, 25, 2, 1, 160), False),
        ((150, 24, 24, 1, 1, 136), True),
        ((150, 24, 24, 1, 1, 128), False),
        ((150, 24, 24, 2, 2, 160), False),  # keys of two heads
        ((150, 24, 24, 3, 1, 160), False),
    ],
)
def test_gradient_of_a_bias_that_rows_of_one_head_share(sizes: tuple[int, ...], taken: bool):
    bias = TermShape("bfloat16", 1, *(sizes[i] for i in (3, 1, 2)))
    shapes = Shapes(*sizes, sizes[-1], bias=bias)
    for dtype, window in (("bfloat16", (None, None)), ("bfloat16", (None, 0)), ("float16", None)):
        call = passes(Problem(dtype, 0.1, terms=("bias",), window=window or (None, None)))
        wanted = taken and dtype == "bfloat16" and window == (None, None)
        assert _gpu.few_scores.takes(call["backward"], shapes, H200) == wanted


@pytest.mark.parametrize(
    ("sizes", "kernels"),
    [
        ((2, 9, 3001, 4, 4, 96), True),
        ((9, 12, 1518, 1, 1, 64), True),
        ((2, 9, 3000, 4, 4, 96), False),  # which 4 divides
        ((2, 9, 1399, 4, 4, 96), False),
        ((2, 9, 6001, 4, 4, 96), False),
        ((2, 7, 3001, 4, 4, 96), False),
        ((2, 25, 3001, 4, 4, 96), False),
        ((3, 9, 3001, 6, 6, 96), False),  # more than 16 units
        ((2, 9, 3001, 4, 2, 96), False),
        ((2, 9, 3001, 4, 4, 136), False),
        ((2, 9, 3001, 4, 4, 92), False),
    ],
)
def test_float32_gradients_beside_keys_that_4_does_not_divide(sizes, kernels: bool):
    shapes, calls = Shapes(*sizes, sizes[-1]), passes(Problem("float32", 0.1))
    followed = dataclasses.replace(calls["forward"], gradients=("q", "k", "v"))
    for call in (calls["backward"], followed):
        assert _gpu.few_scores.takes(call, shapes, H200) != kernels
    assert _gpu.few_scores.takes(calls["backward"], shapes, _gpu.spec.GPUS["A100"])
    exact = passes(Problem("float32", 0.1, precision="highest"))["backward"]  # without copies
    assert _gpu.few_scores.takes(exact, shapes, H200)


def test_boxes_that_begin_early_load_fast_enough():
    shapes = Shapes(1, 200, 200, 8, 8, 36, 36)  # 8 divides a row of all heads
    calls = passes(Problem(dtype="bfloat16", scale=0.1))
    small = dataclasses.replace(shapes, head_dim=38, value_dim=38, q_len=60, kv_len=60)
    taken = {name: _gpu.few_scores.takes(call, small, H200) for name, call in calls.items()}
    assert taken == {"forward": False, "backward": True}


@pytest.mark.parametrize(
    ("sizes", "change", "taken"),
    [
        ({}, {}, True),
        ({"batch": 511}, {}, False),  # fewer than 4096 units
        ({"batch": 128, "value_dim": 136}, {}, True),
        ({"kv_len": 15}, {}, False),  # more than 14 x 14 scores of a unit
        ({"batch": 4096}, {}, False),  # more than 2^22
        ({"kv_heads": 2}, {"terms": ("bias", "key_value_lengths", "dropout_state")}, True),
        ({}, {"terms": ("mask",)}, False),
        ({}, {"terms": ("bias", "sinks")}, False),
        ({}, {"softcap": 9.0}, False),
    ],
)
def test_which_beside_a_bias_or_dropout(sizes, change, taken: bool):
    small = {"batch": 512, "q_len": 14, "kv_len": 14, "kv_heads": 8} | sizes
    shapes = dataclasses.replace(SHAPES, **small)
    problem = Problem(**{"dtype": "bfloat16", "scale": 0.1, "terms": ("bias",)} | change)
    for call in passes(problem).values():
        assert _gpu.few_scores.takes(call, shapes, H200) == taken


def test_explain_says_so():
    q, k = (jax.ShapeDtypeStruct((40, n, h, 128), jnp.bfloat16) for n, h in ((4, 8), (2048, 1)))
    said = jax_flash.explain(q, k, k, gpu="H100")
    assert said.backend == "xla"
    assert _gpu.few_scores.REASON in repr(said)


@needs_module
def test_program_has_no_kernel_and_no_warning():
    q = jax.ShapeDtypeStruct((512, 6, 8, 64), jnp.float32)
    traced = jax.jit(jax.grad(lambda x: jax_flash.flash_attention(x, x, x).sum())).trace(q)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "jax_flash_cuda" not in text
    assert "dot_general" in text


def test_both_passes_share_products_and_softmax():
    """XLA finds both passes' scores and weights to be the same: nothing is computed twice."""
    q = jax.ShapeDtypeStruct((3, 12, 4, 16), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((3, 20, 2, 16), jnp.bfloat16)

    def loss(q, k, v, key):
        out = jax_flash.flash_attention(
            q, k, v, is_causal=True, dropout_rate=0.1, dropout_key=key, backend="xla"
        )
        return jnp.sum(jnp.square(out.astype(jnp.float32)))

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    text = step.lower(q, k, k, jax.eval_shape(lambda: jax.random.key(0))).compile().as_text()
    count = {name: len(re.findall(rf" {name}\(", text)) for name in ("dot", "exponential", "log")}
    assert count == {"dot": 6, "exponential": 1, "log": 0}


@pytest.mark.parametrize(
    ("subscripts", "x", "y", "summed"),
    [
        ("...ktgs,...ksh->...ktgh", (231, 1, 16, 1, 16), (231, 1, 16, 128), True),  # 16 terms
        ("...ktgs,...ksh->...ktgh", (231, 1, 16, 1, 17), (231, 1, 17, 128), False),
        ("...ktgs,...ksh->...ktgh", (300, 1, 16, 1, 16), (300, 1, 16, 128), False),  # 2^23 at most
        ("...ktgs,...ktgh->...ksh", (60, 1, 8, 2, 16), (60, 1, 8, 2, 128), True),
        ("...ktgs,...ktgh->...ksh", (60, 1, 16, 2, 16), (60, 1, 16, 2, 128), False),
        ("...ktgh,...ksh->...ktgs", (231, 1, 16, 1, 16), (231, 1, 16, 16), True),
        ("...ktgh,...ksh->...ktgs", (231, 1, 128, 1, 16), (231, 1, 16, 16), False),
        ("...ktgs,...ktgh->...ksh", (4, 1, 2, 64, 16), (4, 1, 2, 64, 80), True),
        ("...ktgs,...ksh->...ktgh", (4, 1, 2, 64, 16), (4, 1, 16, 80), True),
        ("...ktgs,...ksh->...ktgh", (3, 20, 1, 2, 1576), (3, 20, 1576, 64), True),  # met twice
        ("...ktgs,...ksh->...ktgh", (3, 20, 1, 5, 1576), (3, 20, 1576, 64), False),
        ("...ktgs,...ktgh->...ksh", (3, 20, 1, 2, 1576), (3, 20, 1, 2, 64), True),
    ],
)
def test_which_products_are_summed(subscripts, x, y, summed: bool):
    """Up to 2^21, or 2^23 of a few positions, or of elements that are met four times."""
    x, y = (jax.ShapeDtypeStruct(shape, "float32") for shape in (x, y))
    assert _products._is_summed(subscripts, x, y) == summed


@pytest.mark.parametrize(
    ("sizes", "of", "taken"),
    [
        ((3000, 1, 128, 8, 8), {}, True),
        ((3000, 1, 129, 8, 8), {}, False),
        ((3000, 1, 99, 8, 4), {}, True),
        ((3000, 1, 99, 8, 4), {"dtype": "float16"}, True),
        ((3000, 1, 100, 8, 4), {}, False),
        ((3000, 2, 99, 4, 4), {"dtype": "float16"}, False),
        ((3000, 1, 99, 6, 2), {}, False),
        ((3000, 1, 99, 8, 8), {"terms": ("key_value_lengths",)}, False),
        ((3000, 1, 99, 8, 8), {"softcap": 30.0}, False),
    ],
)
def test_one_query_reads_few_keys_once(sizes: tuple[int, ...], of: dict[str, Any], taken: bool):
    """Forward alone: with gradients both passes are by kernels."""
    shapes, problem = Shapes(*sizes, 64, 64), Problem(**{"dtype": "bfloat16", "scale": 0.1} | of)
    call = passes(problem)["forward"]
    assert _gpu.few_scores.takes(call, shapes, H200) == taken
    followed = dataclasses.replace(call, gradients=("q", "k", "v"))
    assert not _gpu.few_scores.takes(followed, shapes, H200)
