"""Short rows of a batch run as documents of longer ones, where most of a block would be empty."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import _gpu
from jax_flash._gpu import folding
from jax_flash._ops import passes
from jax_flash._problem import Problem, Shapes, TermShape

from ..conftest import needs_module

SHAPES = Shapes(1024, 16, 16, 16, 16, 64, 64)


def rows(which: str, sizes: dict[str, Any], *, gpu: str = "H200", **of: Any) -> int:
    problem = Problem(**{"dtype": "bfloat16", "scale": 0.1, **of})
    call, shapes = passes(problem)[which], dataclasses.replace(SHAPES, **sizes)
    taken, folded = _gpu.folded(call, shapes, _gpu.spec.GPUS[gpu])
    assert (folded == shapes) == (taken == call)
    assert folded.batch * folded.q_len == shapes.batch * shapes.q_len
    return shapes.batch // folded.batch


@pytest.mark.parametrize(
    ("sizes", "forward", "backward"),
    [
        ({}, 8, 8),
        ({"q_len": 32, "kv_len": 32}, 4, 4),
        ({"q_len": 49, "kv_len": 49}, 1, 2),
        ({"q_len": 49, "kv_len": 49, "head_dim": 128}, 1, 1),
        ({"q_len": 65, "kv_len": 65}, 1, 1),
        ({"q_len": 1, "kv_len": 1}, 128, 128),
        ({"batch": 1021}, 1, 1),  # no rows divide it
        ({"batch": 1022}, 7, 7),
        ({"batch": 16}, 1, 1),  # each multiprocessor has few units as it is
        ({"kv_len": 32}, 4, 4),
        ({"q_len": 5}, 8, 8),
        ({"kv_len": 40}, 1, 2),  # 128 positions have three, which do not divide the batch
        ({"kv_heads": 4}, 1, 8),  # queries of four heads fill a block
        ({"kv_heads": 4, "batch": 64}, 1, 1),  # backward units are those of kv heads
        ({"kv_heads": 4, "q_len": 4, "kv_len": 4}, 32, 32),  # 16 of 128 queries
        ({"q_heads": 20, "kv_heads": 4}, 8, 8),  # five heads are not packed
    ],
)
def test_how_many(sizes: dict[str, Any], forward: int, backward: int):
    assert rows("forward", sizes) == forward
    assert rows("backward", sizes) == backward


def test_blocks_cut_rows_where_few_divide_the_batch():
    """Documents of a block meet two blocks of keys, or without causality three."""
    causal, short = {"window": (None, 0)}, {"batch": 922, "q_len": 5, "kv_len": 5}
    assert rows("backward", short, **causal) == 461
    assert rows("forward", short | {"q_heads": 4, "kv_heads": 2}, **causal) == 461
    assert rows("backward", {"batch": 1021, "q_len": 5, "kv_len": 5}) == 1021
    assert rows("backward", {"batch": 1021, "q_len": 5, "kv_len": 6}) == 1
    assert rows("backward", {"batch": 1021, "q_len": 5, "kv_len": 5, "head_dim": 72}) == 1
    assert rows("backward", {"batch": 149, "q_len": 5, "kv_len": 5, "kv_heads": 2}) == 1  # few


def test_lengths_too_but_where_a_window_counts_otherwise():
    lengths = ("query_lengths", "key_value_lengths")
    for of, window in (((), (None, None)), (lengths, (None, None)), (lengths[1:], (None, 0))):
        assert rows("forward", {}, terms=of, window=window) == 8
    aligned = {"window": (None, 0), "bottom_right": True}
    assert rows("backward", {}, **aligned) == 8
    assert rows("backward", {}, terms=lengths[:1], **aligned) == 1
    assert rows("forward", {"kv_len": 32}, window=(None, 0)) == 1  # positions take two launches
    assert rows("backward", {"kv_len": 32}, window=(None, 0)) == 4
    assert rows("backward", {"kv_len": 32, "head_dim": 136}, window=(None, 0)) == 1
    assert rows("backward", {"kv_len": 32}, terms=lengths, bottom_right=True) == 4


@pytest.mark.parametrize(
    ("sizes", "folded"),
    [((1024, 1, 1, 16), 8), ((1, 1, 1, 16), 8), ((1024, 16, 1, 16), 1), ((1024, 1, 16, 16), 1),
     ((1024, 1, 1, 1), 1)],
)  # fmt: skip
def test_a_mask_of_keys_too(sizes: tuple[int, ...], folded: int):
    for terms in (("mask",), ("key_value_lengths", "mask")):
        of = {"terms": terms, "window": (None, 0)}
        assert rows("forward", {"mask": TermShape("bool", *sizes)}, **of) == folded
        assert rows("backward", {"mask": TermShape("bool", *sizes)}, **of) == folded


def test_plain_calls_alone():
    exact = {"dtype": "float32", "precision": "highest"}
    for change in ({"softcap": 30.0}, {"terms": ("sinks",)}, exact, {"as_written": True}):
        assert rows("forward", {}, **change) == 1
    assert rows("backward", {}, dtype="float32") == 8
    assert rows("backward", {}, window=(3, 0), deterministic=True, dtype="float16") == 8
    assert rows("forward", {}, gpu="A100") == 1


@needs_module
def test_program():
    q = jax.ShapeDtypeStruct((4, 256, 16, 16, 64), jnp.bfloat16)

    def loss(q, k, v):
        out, lse = jax_flash.flash_attention(q, k, v, is_causal=True, return_lse=True)
        return jnp.sum(out) + jnp.sum(lse)

    traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(q, q, q)
    lowered = traced.lower(lowering_platforms=("cuda",))
    assert [x.shape for x in jax.tree.leaves(lowered.out_info)] == [q.shape] * 3
    calls = [line for line in lowered.as_text().splitlines() if "@jax_flash_cuda" in line]
    assert len(calls) == 2
    for line in calls:
        assert "tensor<128x128x16x64xbf16>" in line
        assert "tensor<128x16x128xf32>" in line
        assert "tensor<128x128xi32>" in line


@needs_module
@pytest.mark.parametrize(("batch", "written"), [(1024, True), (2048, False)])
def test_ids_of_short_calls_are_written_out(batch: int, written: bool):
    q = jax.ShapeDtypeStruct((batch, 16, 16, 64), jnp.bfloat16)
    lowered = jax.jit(jax_flash.flash_attention).trace(q, q, q).lower(lowering_platforms=("cuda",))
    assert ("broadcast_in_dim" not in lowered.as_text()) == written


@needs_module
def test_explanation_says_so(uncompiled):
    q = jax.ShapeDtypeStruct((1024, 16, 16, 64), jnp.bfloat16)
    text = str(jax_flash.explain(q, q, q, gpu="H200"))
    assert text.count("8 batch rows of 16 positions are documents of one") == 2


@pytest.mark.parametrize(
    ("kv_len", "window", "lengths", "masked"),
    [
        (5, (None, 0), (), ()),
        (7, (None, 0), (), ()),  # by positions
        (7, (2, 1), (1,), (2, 3)),
        (7, (1, 0), "bottom right", ()),
        (7, (None, None), (1,), (2, 3)),
        (5, (2, 1), (0, 1), (1, 1)),
        (5, (None, 0), (), (2, 3)),
    ],
)
def test_values_are_the_same(kv_len: int, window: Any, lengths: Any, masked: tuple[int, ...]):
    """What folding makes of operands and results, by float64 of "xla"."""
    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(0), 5)
        q, dout = (jax.random.normal(x, (2, 3, 5, 4, 8), jnp.float64) for x in keys[:2])
        k, v = (jax.random.normal(x, (2, 3, kv_len, 2, 8), jnp.float64) for x in keys[2:4])
        dlse = jax.random.normal(keys[4], (2, 3, 4, 5), jnp.float64)
        terms = {
            folding.LENGTHS[i]: jnp.array([[3, 5, 0], [kv_len, 1, 2]], jnp.int32) - i
            for i in lengths
            if isinstance(i, int)
        }
        terms = {name: jnp.maximum(x, 0) for name, x in terms.items()}
        if masked:
            mask = jax.random.bernoulli(keys[4], 0.7, (*masked, 1, 1, kv_len))
            terms["mask"] = mask.at[-1, -1].set(False)
        aligned = {"window": window, "bottom_right": lengths == "bottom right"}
        problem = Problem("float64", scale=0.3, terms=tuple(terms), **aligned)
        shapes = Shapes.of(q, k, v, terms)
        assert shapes.batch == 6
        named = {"q": q, "k": k, "v": v, **terms}
        for which, call in passes(problem, backend="xla", with_dlse=True).items():
            taken, sizes = folding.fold(call, shapes, 3)
            operands = folding.fold_operands(taken, problem, named, sizes)
            assert operands["q"].shape == (2, 15, 4, 8)
            wanted = jax.jit(call.blockwise)(*(named[name] for name in call.operands))
            found = jax.jit(taken.blockwise)(*operands.values())
            for name, got, want in zip(call.results, found, wanted, strict=True):
                got = folding.unfold(taken, name, got, want.shape)
                np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12, err_msg=name)
            if which == "forward":
                named |= dict(zip(call.results, wanted, strict=True)) | {"dout": dout, "dlse": dlse}
