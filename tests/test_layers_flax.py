"""attention_fn in Flax's own layers: the numbers of Flax's function, or a stated difference."""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from jax_flash.layers import linen as flash_linen
from jax_flash.layers import nnx as flash_nnx

BATCH, LENGTH, FEATURES, HEADS = 2, 13, 32, 4
FLASH = {"linen": flash_linen.attention_fn, "nnx": flash_nnx.attention_fn}
STOCK = {"linen": nn.dot_product_attention, "nnx": nnx.dot_product_attention}


@pytest.fixture(params=["linen", "nnx"])
def api(request):
    return request.param


def normal(seed, *shape) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def run_layer(api, attention_fn, x, *, calls=({},), **settings) -> list[Any]:
    """Flax's multi-head layer with seeded weights: outputs of one call per dict in `calls`."""
    if api == "nnx":
        layer = nnx.MultiHeadAttention(
            HEADS, FEATURES, attention_fn=attention_fn, decode=False, rngs=nnx.Rngs(0), **settings
        )
        return [layer(x, **call) for call in calls]
    layer = nn.MultiHeadDotProductAttention(HEADS, attention_fn=attention_fn, **settings)
    return [layer.apply(linen_variables(), x, **call) for call in calls]


@functools.cache
def linen_variables():
    """Seeded parameters for every Linen layer here: attention_fn and dtype have no say in them."""
    return nn.MultiHeadDotProductAttention(HEADS).init(jax.random.key(0), normal(1, 1, 1, FEATURES))


def random_mask(*shape):
    """A random mask that leaves every query at least the first key."""
    mask = np.random.default_rng(9).random(shape) < 0.5
    mask[..., 0] = True
    return mask


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
    np.testing.assert_allclose(weights[kept], 1 / (1 - rate), rtol=1e-5)
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


def decode_nnx(attention_fn, x, **call):
    layer = nnx.MultiHeadAttention(
        HEADS, FEATURES, num_kv_heads=2, attention_fn=attention_fn, decode=True, rngs=nnx.Rngs(0)
    )
    full = layer(x, decode=False, is_causal=True)
    layer.init_cache(x.shape)
    step = nnx.jit(lambda layer, x: layer(x, **call))
    return full, jnp.concatenate([step(layer, x[:, i : i + 1]) for i in range(LENGTH)], axis=1)


def decode_linen(attention_fn, x) -> Any:
    layer = nn.MultiHeadDotProductAttention(HEADS, attention_fn=attention_fn)
    causal = nn.make_causal_mask(jnp.ones((BATCH, LENGTH)))
    variables = linen_variables()
    full = layer.apply(variables, x, mask=causal)
    cache = nn.MultiHeadDotProductAttention(HEADS, decode=True).init(jax.random.key(0), x)["cache"]
    layer = layer.clone(decode=True)
    step = jax.jit(lambda variables, x: layer.apply(variables, x, mutable=["cache"]))
    outs = []
    for i in range(LENGTH):
        out, updated = step({**variables, "cache": cache}, x[:, i : i + 1])
        outs.append(out)
        cache = updated["cache"]
    return full, jnp.concatenate(outs, axis=1)


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


def test_sown_weights_come_from_flax(api):
    x = normal(1, BATCH, LENGTH, FEATURES)
    mask = random_mask(BATCH, 1, LENGTH, LENGTH).astype(np.float32)
    sown = {"linen": sown_linen, "nnx": sown_nnx}[api]
    for ours, stock in zip(sown(FLASH[api], x, mask), sown(STOCK[api], x, mask), strict=True):
        np.testing.assert_array_equal(ours, stock)


def test_sown_weights_know_causal(api):
    def attention_fn(query, key, value, mask, module=None, **_):
        return FLASH[api](query, key, value, mask=mask, module=module, is_causal=True)

    x = normal(1, BATCH, LENGTH, FEATURES)
    sown = {"linen": sown_linen, "nnx": sown_nnx}[api]
    _, weights = sown(attention_fn, x, random_mask(BATCH, 1, 1, LENGTH))
    np.testing.assert_array_equal(np.triu(weights, 1), 0)


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


def test_signature_has_all_that_flax_passes(api):
    ours, stock = (set(inspect.signature(fn[api]).parameters) for fn in (FLASH, STOCK))
    assert stock <= ours


def test_input_positions_are_refused():
    query = normal(1, BATCH, LENGTH, HEADS, 8)
    with pytest.raises(ValueError, match="rotary_base"):
        flash_nnx.attention_fn(query, query, query, input_positions=jnp.arange(LENGTH))
