"""jax_flash.dot_product_attention stands in for the function of that name in jax.nn."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash

B, T, S, N, K, H = 2, 24, 40, 4, 2, 16


def arrays(dtype=jnp.float32, *, kv_heads=N, batch=(B,)):
    keys = jax.random.split(jax.random.key(0), 4)
    return (
        jax.random.normal(keys[0], (*batch, T, N, H), dtype),
        jax.random.normal(keys[1], (*batch, S, kv_heads, H), dtype),
        jax.random.normal(keys[2], (*batch, S, kv_heads, H), dtype),
        jax.random.normal(keys[3], (B, N, T, S), jnp.float32),
    )


def test_signature_is_jax_nn_s():
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    ours = inspect.signature(jax_flash.dot_product_attention).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        assert ours[name].kind == parameter.kind, name
        assert ours[name].default == parameter.default, name
    for name in list(ours)[len(theirs) :]:
        assert ours[name].kind == inspect.Parameter.KEYWORD_ONLY, name


def compare(q, k, v, bias=None, mask=None, *, rtol=2e-5, **options):
    """Both functions on the same call: out and the gradients of q, k, v and bias."""
    wrt = (q, k, v) if bias is None else (q, k, v, bias)
    cotangent = jax.random.normal(jax.random.key(9), q.shape[:-1] + v.shape[-1:], q.dtype)

    def run(function, wrt, cotangent):
        def call(*wrt):
            return function(*wrt, **({} if mask is None else {"mask": mask}), **options)

        out, pull = jax.vjp(call, *wrt)
        return (out, *pull(cotangent))

    ours = jax.jit(lambda: run(jax_flash.dot_product_attention, wrt, cotangent))()
    # Theirs in float32: XLA on CPU has no product of float16 that accumulates in float32.
    wide = [x.astype(jnp.float32) for x in wrt]
    theirs = jax.jit(
        lambda: run(jax.nn.dot_product_attention, wide, cotangent.astype(jnp.float32))
    )()
    for a, b, x in zip(ours, theirs, (q, *wrt), strict=True):
        assert a.shape == b.shape
        assert a.dtype == x.dtype
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, atol=rtol * np.abs(b).max(), rtol=0)


def some_mask(*shape, density=0.6):
    mask = np.random.default_rng(1).random(shape) < density
    mask[..., 0] = True  # jax.nn answers a row without keys with the mean of value, ours with 0
    return jnp.asarray(mask)


CALLS = {
    "plain": {},
    "scale": {"scale": 0.7},
    "causal": {"is_causal": True},
    "window tuple": {"local_window_size": (30, 12)},
    "window int": {"local_window_size": 30},
    "window causal": {"local_window_size": (5, 0), "is_causal": True},
    "key lengths": {"key_value_seq_lengths": jnp.array([40, 7], jnp.int32)},
    "query lengths": {"query_seq_lengths": jnp.array([3, 24], jnp.int32)},
    "lengths causal": {
        "query_seq_lengths": jnp.array([20, 24], jnp.int32),
        "key_value_seq_lengths": jnp.array([40, 30], jnp.int32),
        "is_causal": True,
    },
    "implementation xla": {"implementation": "xla"},
}


@pytest.mark.parametrize("name", CALLS)
def test_options(name):
    q, k, v, _ = arrays()
    compare(q, k, v, **CALLS[name])


SCORE_SHAPES = (
    (B, N, T, S),
    (1, N, T, S),
    (B, 1, T, S),
    (1, 1, T, S),
    (B, N, 1, S),
    (1, 1, 1, S),
    (N, T, S),
    (T, S),
)


@pytest.mark.parametrize("shape", SCORE_SHAPES, ids=str)
def test_bias_and_mask_shapes(shape):
    q, k, v, _ = arrays()
    bias = jax.random.normal(jax.random.key(2), shape)
    compare(q, k, v, bias)
    compare(q, k, v, None, some_mask(*shape))
    compare(q, k, v, bias, some_mask(*shape), is_causal=True)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_heads(kv_heads):
    q, k, v, bias = arrays(kv_heads=kv_heads)
    compare(q, k, v, bias, some_mask(B, N, T, S), is_causal=True)


def test_no_batch_dim():
    q, k, v, _ = arrays(batch=())
    compare(q, k, v, is_causal=True)
    compare(q, k, v, jax.random.normal(jax.random.key(2), (N, T, S)))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_half_precision(dtype):
    q, k, v, _ = arrays(dtype)
    compare(q, k, v, is_causal=True, rtol=0.02)


def test_positional_bias_and_mask():
    q, k, v, bias = arrays()
    mask = some_mask(B, N, T, S)
    ours = jax_flash.dot_product_attention(q, k, v, bias, mask)
    theirs = jax.nn.dot_product_attention(q, k, v, bias, mask)
    np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.mark.parametrize("batch", [(B,), ()], ids=str)
def test_residual(batch):
    q, k, v, _ = arrays(batch=batch)
    ours = jax_flash.dot_product_attention(q, k, v, return_residual=True)
    theirs = jax.nn.dot_product_attention(q, k, v, return_residual=True)
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_residual_is_float32_for_half_inputs():
    q, k, v, _ = arrays(jnp.bfloat16)
    out, residual = jax_flash.dot_product_attention(q, k, v, return_residual=True)
    assert out.dtype == jnp.bfloat16
    assert residual.dtype == jnp.float32


def test_numpy_arguments():
    q, k, v, _ = (np.asarray(x) for x in arrays())
    ours = jax_flash.dot_product_attention(q, k, v)
    np.testing.assert_allclose(ours, jax.nn.dot_product_attention(q, k, v), atol=2e-5)


def test_fully_masked_row_is_zero():
    q, k, v, _ = arrays()
    mask = jnp.ones((B, N, T, S), bool).at[:, :, 3].set(False)
    out = jax_flash.dot_product_attention(q, k, v, mask=mask)
    assert (np.asarray(out[:, 3]) == 0).all()
    assert (np.asarray(out[:, 4]) != 0).any()


def test_unknown_implementation_is_an_error():
    q, k, v, _ = arrays()
    wrong: dict[str, Any] = {"implementation": "nonsense"}
    with pytest.raises(ValueError, match=r"implementation.*nonsense"):
        jax_flash.dot_product_attention(q, k, v, **wrong)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": None}, "query"),
        ({"key": "nonsense"}, "key"),
        ({"bias": "nonsense"}, "bias"),
        ({"mask": np.ones((5, 7), np.int32)}, r"mask.*\(5, 7\)"),
        ({"implementation": ["xla"]}, "implementation"),
        ({"return_residual": "no"}, "return_residual"),
    ],
)
def test_error_names_the_argument(change, message):
    q, k = np.ones((2, 5, 4, 8), np.float32), np.ones((2, 7, 4, 8), np.float32)
    with pytest.raises((TypeError, ValueError), match=message):
        jax_flash.dot_product_attention(**({"query": q, "key": k, "value": k} | change))


def test_wrong_shapes_are_errors_here_and_there():
    q, k, v, _ = arrays()
    wrong = {
        "head dim": (q, k[..., :3], v),
        "batch": (q, k[:1], v[:1]),
        "heads": (q, k[:, :, :3], v[:, :, :3]),
        "length": (q, k, v[:, :-1]),
    }
    for function, name in itertools.product(
        (jax.nn.dot_product_attention, jax_flash.dot_product_attention), wrong
    ):
        with pytest.raises(ValueError, match=r"\d"):
            function(*wrong[name])
