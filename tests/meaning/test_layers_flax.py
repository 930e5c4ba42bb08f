"""attention_fn in Flax's own layers: the numbers of Flax's function, or a stated difference."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from jax_flash.layers import linen as flash_linen
from jax_flash.layers import nnx as flash_nnx

from .. import numpy_oracle
from ..small import numpy_normal as normal
from .flax_layers import (
    BATCH,
    FEATURES,
    FLASH,
    HEADS,
    LENGTH,
    STOCK,
    decode_linen,
    decode_nnx,
    linen_variables,
    random_mask,
    run_layer,
)

pytestmark = pytest.mark.quick


def test_masks_of_any_dtype(api):
    x = normal(1, BATCH, LENGTH, FEATURES)
    masks = [
        random_mask(BATCH, HEADS, LENGTH, LENGTH),
        random_mask(BATCH, 1, LENGTH, LENGTH).astype(np.float32) * 0.5,
        random_mask(1, 1, 1, LENGTH).astype(np.int32) * 3,
    ]
    calls = [{"mask": mask} for mask in masks]
    ours, stock = (run_layer(api, fn[api], x, calls=calls) for fn in (FLASH, STOCK))
    np.testing.assert_allclose(ours, stock, atol=2e-6)


@pytest.mark.parametrize("num_kv_heads", [1, 2, HEADS])
def test_causal_and_grouped_heads(num_kv_heads):
    x = normal(1, BATCH, LENGTH, FEATURES)
    mask = random_mask(BATCH, 1, LENGTH, LENGTH)
    ours = [{"is_causal": True}, {"is_causal": True, "mask": mask}]
    stock = [{"is_causal": True}, {"mask": mask & np.tri(LENGTH, dtype=bool)}]
    ours = run_layer("nnx", FLASH["nnx"], x, calls=ours, num_kv_heads=num_kv_heads)
    stock = run_layer("nnx", STOCK["nnx"], x, calls=stock, num_kv_heads=num_kv_heads)
    np.testing.assert_allclose(ours, stock, atol=2e-6)


def test_causal_set_by_partial_in_linen():
    x = normal(1, BATCH, LENGTH, FEATURES)
    causal = nn.make_causal_mask(jnp.ones((BATCH, LENGTH)))
    (ours,) = run_layer("linen", functools.partial(flash_linen.attention_fn, is_causal=True), x)
    (stock,) = run_layer("linen", nn.dot_product_attention, x, calls=[{"mask": causal}])
    np.testing.assert_allclose(ours, stock, atol=2e-6)


@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_gradients_with_bias_and_cross_attention(api, batch):
    query, key, value = (normal(i, *batch, T, HEADS, 8) for i, T in enumerate((5, LENGTH, LENGTH)))
    bias, mask = normal(4, *batch, HEADS, 5, LENGTH), random_mask(*batch, 1, 5, LENGTH)

    def loss(attention_fn, query, key, value, bias):
        # Module-less nnx.dot_product_attention reshapes bias and mask only when both are full.
        out = attention_fn(query, key, value, bias, jnp.broadcast_to(mask, bias.shape))
        return jnp.sum(out * normal(5, *out.shape))

    grad = jax.jit(jax.grad(loss, argnums=(1, 2, 3, 4)), static_argnums=0)
    ours, stock = (grad(fn[api], query, key, value, bias) for fn in (FLASH, STOCK))
    for mine, theirs in zip(ours, stock, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


def test_dtype_sets_the_computation(api):
    x = normal(1, BATCH, LENGTH, FEATURES)
    outs = [run_layer(api, fn[api], x, dtype=jnp.bfloat16)[0] for fn in (FLASH, STOCK)]
    assert outs[0].dtype == outs[1].dtype == jnp.bfloat16
    ours, stock = (out.astype(jnp.float32) for out in outs)
    np.testing.assert_allclose(ours, stock, atol=0.03)


def dropped(api, rate, key, **options):
    """The weights after dropout where all are 1 / S before it: [BATCH, HEADS, 64, 64]."""
    zeros = jnp.zeros((BATCH, 64, HEADS, 8))
    value = jnp.broadcast_to(jnp.eye(64)[:, None], (BATCH, 64, HEADS, 64))
    out = FLASH[api](zeros, zeros, value, dropout_rng=key, dropout_rate=rate, **options)
    return np.asarray(out.swapaxes(1, 2)) * 64


@pytest.mark.parametrize("broadcast_dropout", [False, True])
def test_dropout_statistics(api, broadcast_dropout):
    rate, key = 0.3, jax.random.key(3)
    weights = dropped(api, rate, key, broadcast_dropout=broadcast_dropout)
    kept = weights > 0
    np.testing.assert_allclose(weights[kept], 1 / (1 - rate), rtol=2**-15)  # a rate of 15 bits
    # 4096 draws per head: 4.5 standard deviations of the mean are 0.033.
    np.testing.assert_allclose(kept.mean((-2, -1)), 1 - rate, atol=0.033)
    patterns = kept.reshape(BATCH * HEADS, -1)
    for i in range(1, len(patterns)):
        agreement = (patterns[0] == patterns[i]).mean()
        np.testing.assert_allclose(agreement, rate**2 + (1 - rate) ** 2, atol=0.04)
    np.testing.assert_array_equal(weights, dropped(api, rate, key))
    assert (weights != dropped(api, rate, jax.random.key(4))).any()


def test_deterministic_needs_no_key(api):
    np.testing.assert_allclose(dropped(api, 0.3, None, deterministic=True), 1, rtol=1e-5)
    with pytest.raises(ValueError, match="dropout_key"):
        dropped(api, 0.3, None)


def test_dropout_in_the_layer(api):
    x = normal(1, BATCH, LENGTH, FEATURES)
    if api == "nnx":
        keys = [{"rngs": nnx.Rngs(dropout=seed)} for seed in (0, 0, 1)]
    else:
        keys = [{"dropout_rng": jax.random.key(seed)} for seed in (0, 0, 1)]
    calls = [{"deterministic": True}, *({"deterministic": False, **key} for key in keys)]
    plain, first, same, other = run_layer(api, FLASH[api], x, calls=calls, dropout_rate=0.5)
    np.testing.assert_array_equal(first, same)
    assert not np.allclose(first, other)
    assert not np.allclose(first, plain)


@pytest.mark.parametrize("call", [{}, {"is_causal": True}])
def test_decoding_equals_the_full_forward_in_nnx(call):
    x = normal(1, BATCH, LENGTH, FEATURES)
    full, steps = decode_nnx(flash_nnx.attention_fn, x, **call)
    np.testing.assert_allclose(steps, full, atol=2e-6)


@pytest.mark.parametrize("is_causal", [False, True])
def test_decoding_equals_the_full_forward_in_linen(is_causal):
    x = normal(1, BATCH, LENGTH, FEATURES)
    attention_fn = functools.partial(flash_linen.attention_fn, is_causal=is_causal)
    full, steps = decode_linen(attention_fn, x)
    np.testing.assert_allclose(steps, full, atol=2e-6)


def sown_nnx(attention_fn, x, mask):
    layer = nnx.MultiHeadAttention(
        HEADS, FEATURES, attention_fn=attention_fn, decode=False, rngs=nnx.Rngs(0)
    )
    forward = nnx.capture(layer, nnx.Intermediate)
    out, sown = forward(x, mask=mask, sow_weights=True)
    return out, sown["attention_weights"][0]


def sown_linen(attention_fn, x, mask):
    layer = nn.MultiHeadDotProductAttention(HEADS, attention_fn=attention_fn)
    out, sown = layer.apply(
        linen_variables(), x, mask=mask, sow_weights=True, mutable=["intermediates"]
    )
    return out, sown["intermediates"]["attention_weights"][0]


def sown(api, attention_fn, x, mask):
    """Output and weights of a call that sows them."""
    return {"linen": sown_linen, "nnx": sown_nnx}[api](attention_fn, x, mask)


def weights_of(query, key, **options) -> np.ndarray:
    """The weights [B, N, T, S] in float64: what comes out where values are an identity."""
    query, key = (np.asarray(x, np.float64) for x in (query, key))
    rows, length, heads, _ = key.shape
    identity = np.broadcast_to(np.eye(length)[:, None], (rows, length, heads, length))
    return numpy_oracle.attention(query, key, identity, **options).out.swapaxes(1, 2)


def test_sown_weights_are_those_of_flax(api):
    x = normal(1, BATCH, LENGTH, FEATURES)
    mask = random_mask(BATCH, 1, LENGTH, LENGTH).astype(np.float32)
    ours, stock = (sown(api, fn[api], x, mask) for fn in (FLASH, STOCK))
    for mine, theirs in zip(ours, stock, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)


@pytest.mark.parametrize("wide", [False, True], ids=["own dtype", "float32"])
def test_linen_sows_the_dtype_that_flax_does(wide):
    """With a softmax of float32, bfloat16 arguments give float32 weights, as exact as Flax's."""
    q, k, v = (normal(i, BATCH, LENGTH, HEADS, 8).astype(jnp.bfloat16) for i in range(3))

    class Sowing(nn.Module):
        attention_fn: Any

        @nn.compact
        def __call__(self, q, k, v):
            return self.attention_fn(q, k, v, module=self, force_fp32_for_softmax=wide)

    sown = {}
    for name, function in (("ours", FLASH["linen"]), ("stock", STOCK["linen"])):
        _, made = Sowing(function).apply({}, q, k, v, mutable=["intermediates"])
        (sown[name],) = made["intermediates"]["attention_weights"]
    assert sown["ours"].dtype == sown["stock"].dtype == (jnp.float32 if wide else jnp.bfloat16)
    limit = 1e-6 if wide else 2**-8
    np.testing.assert_allclose(sown["ours"], weights_of(q, k), rtol=0, atol=limit)


def test_sowing_leaves_the_output_as_it_is(api):
    x = normal(1, BATCH, LENGTH, FEATURES)
    mask = random_mask(BATCH, 1, LENGTH, LENGTH)
    mask[:, :, 4] = False  # Flax: the mean of all values
    (plain,) = run_layer(api, FLASH[api], x, calls=[{"mask": mask}])
    out, weights = sown(api, FLASH[api], x, mask)
    np.testing.assert_array_equal(out, plain)
    np.testing.assert_array_equal(weights[:, :, 4], 0)


def test_sown_weights_know_every_option(api):
    ids = np.sort(np.random.default_rng(2).integers(0, 3, (BATCH, LENGTH)))
    lengths, sinks = np.array([9, LENGTH]), normal(3, HEADS)
    settings = {
        "softcap": 0.5,
        "scale": 2.0,
        "sinks": sinks,
        "is_causal": True,
        "local_window_size": (6, None),
        "query_segment_ids": ids,
        "key_value_segment_ids": ids,
        "key_value_seq_lengths": lengths,
    }
    seen = []

    def attention_fn(query, key, value, mask, module=None, **_):
        seen.append((query, key))
        return FLASH[api](query, key, value, mask=mask, module=module, **settings)

    mask = random_mask(BATCH, 1, LENGTH, LENGTH)
    _, weights = sown(api, attention_fn, normal(1, BATCH, LENGTH, FEATURES), mask)
    expected = weights_of(*seen[-1], mask=mask, **settings)
    np.testing.assert_allclose(weights, expected, atol=2e-6)


def test_einsum_of_the_user_goes_to_flax():
    seen = []

    def einsum(subscripts, *operands):
        seen.append(subscripts)
        return jnp.einsum(subscripts, *operands)

    settings = {
        "qk_attn_weights_einsum_cls": lambda: einsum,
        "attn_weights_value_einsum_cls": lambda: einsum,
    }
    run_layer("linen", flash_linen.attention_fn, normal(1, BATCH, LENGTH, FEATURES), **settings)
    assert len(seen) == 2


def test_einsum_of_the_user_knows_causal():
    x = normal(1, BATCH, LENGTH, FEATURES)
    attention_fn = functools.partial(flash_linen.attention_fn, is_causal=True)
    settings = {
        "qk_attn_weights_einsum_cls": lambda: jnp.einsum,
        "attn_weights_value_einsum_cls": lambda: jnp.einsum,
    }
    masks = [random_mask(BATCH, 1, 1, LENGTH), None]
    calls = [{"mask": mask} for mask in masks]
    theirs = run_layer("linen", attention_fn, x, calls=calls, **settings)
    np.testing.assert_allclose(theirs, run_layer("linen", attention_fn, x, calls=calls), atol=2e-6)
    windowed = functools.partial(attention_fn, local_window_size=4)
    with pytest.raises(ValueError, match="local_window_size and an einsum"):
        run_layer("linen", windowed, x, **settings)


@pytest.mark.parametrize("name", ["qk_attn_weights_einsum", "attn_weights_value_einsum"])
def test_half_of_the_einsums_is_an_error_as_in_flax(name):
    x = normal(1, BATCH, LENGTH, FEATURES)
    for attention_fn in (STOCK["linen"], flash_linen.attention_fn):
        with pytest.raises(ValueError, match="specified together"):
            run_layer("linen", attention_fn, x, **{f"{name}_cls": lambda: jnp.einsum})


def test_a_query_without_keys_gives_zeros(api):
    query = normal(1, BATCH, LENGTH, HEADS, 8)
    mask = jnp.ones((BATCH, 1, LENGTH, LENGTH)).at[:, :, 4].set(0.0)
    out = FLASH[api](query, query, query, mask=mask)
    np.testing.assert_array_equal(out[:, 4], 0)
    assert (out[:, 5] != 0).all()
