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

from ..small import normal

B, T, S, N, K, H = 2, 24, 40, 4, 2, 16


def arrays(dtype=jnp.float32, *, kv_heads=N, batch=(B,)):
    return (
        normal(0, *batch, T, N, H, dtype=dtype),
        normal(1, *batch, S, kv_heads, H, dtype=dtype),
        normal(2, *batch, S, kv_heads, H, dtype=dtype),
        normal(3, B, N, T, S),
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
    cotangent = normal(9, *q.shape[:-1], v.shape[-1], dtype=q.dtype)

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
    bias = normal(2, *shape)
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
    compare(q, k, v, normal(2, N, T, S))


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


# What jax's own tests ask of jax.nn.dot_product_attention.

LENGTH = 128


def halves(seed, *shape, dtype=jnp.bfloat16):
    return normal(seed, *shape, dtype=dtype)


def both_ways(call, wrt, cotangent, rtol):
    """Our results and gradients on the arrays as they are, against jax.nn's in float32."""

    def step(function, wrt, cotangent):
        out, pull = jax.vjp(lambda *wrt: call(function, *wrt), *wrt)
        return (out, *pull(cotangent))

    got = jax.jit(lambda *x: step(jax_flash.dot_product_attention, x[:-1], x[-1]))(*wrt, cotangent)
    wide = [x.astype(jnp.float32) for x in (*wrt, cotangent)]
    want = jax.jit(lambda *x: step(jax.nn.dot_product_attention, x[:-1], x[-1]))(*wide)
    for a, b, x in zip(got, want, (cotangent, *wrt), strict=True):
        assert a.shape == x.shape
        assert a.dtype == x.dtype
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * np.abs(b).max())


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("mapped", [False, True], ids=["whole", "vmap"])
def test_upstream_groups(dtype, group, mapped):
    """Groups of heads; whole, and mapped over the batch with bias and mask that are None."""
    q = halves(0, 2, LENGTH, 4, 32, dtype=dtype)
    k, v = (halves(seed, 2, LENGTH, 4 // group, 32, dtype=dtype) for seed in (1, 2))

    def call(function, q, k, v):
        if mapped:
            function = jax.vmap(function, in_axes=(0, 0, 0, None, None))
        return function(q, k, v, None, None)

    both_ways(call, (q, k, v), halves(3, *q.shape, dtype=dtype), rtol=0.02)


UPSTREAM_MASKS = {
    "bias": {},
    "causal": {"is_causal": True},
    "padding": {},
    "custom": {"mask": np.tril(np.ones((1, 1, LENGTH, LENGTH), bool))},
    "sliding": {"local_window_size": (3, 2)},
}


@pytest.mark.parametrize(
    "names",
    ["bias", "causal", "padding", "custom", "causal padding", "custom padding", "bias causal",
     "causal sliding", "sliding"],
)  # fmt: skip
def test_upstream_masks(names):
    q, k, v = (halves(seed, 2, LENGTH, 4, 32) for seed in range(3))
    options = {}
    for name in names.split():
        options |= UPSTREAM_MASKS[name]
    if "padding" in names:
        options |= {
            "query_seq_lengths": jnp.array([LENGTH // 2, LENGTH // 4], jnp.int32),
            "key_value_seq_lengths": jnp.array([LENGTH // 4, LENGTH // 2], jnp.int32),
        }
    bias = (halves(5, 1, 4, LENGTH, LENGTH),) if "bias" in names else ()

    def call(function, q, k, v, *bias):
        return function(q, k, v, *bias, **options)

    both_ways(call, (q, k, v, *bias), halves(3, *q.shape), rtol=0.02)


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("mapped", [False, True], ids=["whole", "vmap"])
def test_upstream_bias_gradient(batch, mapped):
    """Self-attention with a bias in full and a mask of rank 3; mapped, the mask is shared."""
    x, bias = halves(0, batch, 32, 4, 32), halves(1, batch, 4, 32, 32)
    mask = jnp.ones((1, 1, 32), bool)

    def call(function, x, bias):
        def attend(x, bias, mask):
            return function(x, x, x, bias, mask)

        return (jax.vmap(attend, in_axes=(0, 0, None)) if mapped else attend)(x, bias, mask)

    both_ways(call, (x, bias), halves(3, *x.shape), rtol=0.02)


def test_upstream_scale_is_an_argument_of_jit():
    q, k, v, _ = arrays()

    def call(function, q, k, v, scale):
        return function(q, k, v, scale=scale)

    wrt = q, k, v, jnp.float32(0.3)
    both_ways(call, wrt, normal(9, *q.shape), rtol=2e-5)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_upstream_masks_in_x64_mode_with_debugging(dtype):
    """No infinity of a mask is a fault; float64 is as close as jax.nn's softmax of float32."""
    with jax.enable_x64(True), jax.debug_infs(True), jax.debug_nans(True):
        q, k, v = (np.asarray(x, dtype) for x in arrays()[:3])
        options = {"is_causal": True, "implementation": "xla"}
        ours = jax_flash.dot_product_attention(q, k, v, **options)
        theirs = jax.nn.dot_product_attention(q, k, v, **options)
    assert ours.dtype == theirs.dtype == dtype
    np.testing.assert_allclose(ours, theirs, atol=2e-6)


# The differences that the docstring lists, each beside what jax.nn does.


def test_differences_where_nothing_is_seen():
    q, k, v, _ = arrays()
    lengths = {"key_value_seq_lengths": jnp.array([0, S], jnp.int32), "return_residual": True}
    ours = jax_flash.dot_product_attention(q, k, v, **lengths)
    theirs = jax.nn.dot_product_attention(q, k, v, **lengths)
    assert (np.asarray(ours[0][0]) == 0).all()
    assert np.isneginf(ours[1][0]).all()
    np.testing.assert_allclose(theirs[0][0], np.broadcast_to(v[0].mean(0), q[0].shape), atol=1e-5)
    assert (np.asarray(theirs[1][0]) < -1e38).all()
    bias = np.full((1, 1, 1, S), -np.inf, np.float32)
    assert (np.asarray(jax_flash.dot_product_attention(q, k, v, bias)) == 0).all()
    assert np.isnan(jax.nn.dot_product_attention(q, k, v, bias)).all()


def test_differences_of_hidden_values():
    q, k, v, _ = arrays()
    v = v.at[:, -1].set(jnp.nan)
    assert np.isfinite(jax_flash.dot_product_attention(q, k, v, is_causal=True)).all()
    assert np.isnan(jax.nn.dot_product_attention(q, k, v, is_causal=True)).all()


REFUSED_HERE: dict[str, dict[str, Any]] = {
    "query": {x: np.ones((B, T, N, H), np.int32) for x in ("query", "key", "value")},
    "bias": {"bias": np.ones((1, 1, T, T), np.int32)},
    "scale": {"scale": np.full((T,), 0.3)},
    "scale is nan": {"scale": float("nan")},
    "local_window_size": {"local_window_size": (2.5, 3)},
    "local_window_size is": {"local_window_size": (-1, 3)},
    "is_causal": {"is_causal": "yes"},
}
TAKEN_HERE: dict[str, dict[str, Any]] = {
    "value dim": {"value": np.ones((B, T, N, 5), np.float32)},
    "rank 5": {x: np.ones((1, B, T, N, H), np.float32) for x in ("query", "key", "value")},
    "lengths of int8": {"key_value_seq_lengths": np.array([3, 5], np.int8)},
    "window without a side": {"local_window_size": (3, None)},
    "window of a numpy integer": {"local_window_size": np.int64(3)},
    "no heads": {x: np.ones((B, T, 0, H), np.float32) for x in ("query", "key", "value")},
}


@pytest.mark.parametrize("name", [*REFUSED_HERE, *TAKEN_HERE])
def test_differences_of_arguments(name):
    call = {x: np.ones((B, T, N, H), np.float32) for x in ("query", "key", "value")}
    if name in REFUSED_HERE:
        call |= REFUSED_HERE[name]
        jax.nn.dot_product_attention(**call)
        with pytest.raises((TypeError, ValueError), match=name):
            jax_flash.dot_product_attention(**call)
    else:
        call |= TAKEN_HERE[name]
        jax_flash.dot_product_attention(**call)
        with pytest.raises((TypeError, ValueError, ZeroDivisionError)):
            jax.nn.dot_product_attention(**call)


@pytest.mark.parametrize(
    ("given", "same"),
    [([3, 5], (3, 5)), (np.array([3, 5]), (3, 5)), (np.int64(4), 4), (np.array(4), 4),
     ((np.int8(3), np.uint32(5)), (3, 5))],
    ids=str,
)  # fmt: skip
def test_windows_of_any_integers(given, same):
    q, k, v, _ = arrays()
    got = jax_flash.dot_product_attention(q, k, v, local_window_size=given)
    want = jax_flash.dot_product_attention(q, k, v, local_window_size=same)
    np.testing.assert_array_equal(got, want)
    plain = jax_flash.reference.attention(q, k, v, local_window_size=given)
    np.testing.assert_allclose(got, plain, atol=2e-5)
