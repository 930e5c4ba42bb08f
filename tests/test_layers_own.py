"""The FlashAttention layers: every option against a plain formula, the cache against no cache."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_flash
from jax_flash.layers import linen as flash_linen
from jax_flash.layers import nnx as flash_nnx

BATCH, LENGTH, FEATURES, HEADS, KV_HEADS, HEAD_DIM = 2, 13, 32, 4, 2, 8
EVERYTHING = {
    "num_kv_heads": KV_HEADS,
    "is_causal": True,
    "local_window_size": (5, None),
    "rotary_base": 100.0,
    "softcap": 2.0,
    "use_sinks": True,
}


def normal(seed, *shape) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def make(api, x, **settings) -> Any:
    """A layer with seeded parameters as (forward(params, x, **call), params: dict)."""
    if api == "linen":
        layer = flash_linen.FlashAttention(HEADS, **settings)
        params = layer.init(jax.random.key(0), x)["params"]
        return jax.jit(lambda params, x, **call: layer.apply({"params": params}, x, **call)), params
    layer = flash_nnx.FlashAttention(HEADS, x.shape[-1], rngs=nnx.Rngs(0), **settings)
    graph, params = nnx.split(layer)
    return (
        jax.jit(lambda params, x, **call: nnx.merge(graph, nnx.State(params))(x, **call)),
        nnx.to_pure_dict(params),
    )


@pytest.fixture(params=["linen", "nnx"])
def api(request):
    return request.param


def turn(x, base):
    """Rotary embedding by complex numbers: x [*B, T, N, H]."""
    length, half = x.shape[-3], x.shape[-1] // 2
    angles = np.outer(np.arange(length), base ** (-np.arange(half) / half))
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def formula(params, x, *, rotary_base, window, softcap, segment_ids):
    """The layer of EVERYTHING with sinks, in plain float64 numpy."""
    params = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
    x = np.asarray(x, np.float64)
    query, key, value = (
        np.einsum("btd,dnh->btnh", x, params[name]["kernel"]) for name in ("query", "key", "value")
    )
    query, key = turn(query, rotary_base), turn(key, rotary_base)
    key, value = (np.repeat(a, HEADS // KV_HEADS, axis=2) for a in (key, value))
    scores = np.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(HEAD_DIM)
    scores = softcap * np.tanh(scores / softcap)
    past = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    visible = (past >= 0) & (past <= window)
    visible = visible & (segment_ids[:, None, :, None] == segment_ids[:, None, None, :])
    weights = np.where(visible, np.exp(scores), 0)
    sinks = np.exp(params["sinks"])[:, None, None]
    out = np.einsum("bnts,bsnh->btnh", weights / (weights.sum(-1, keepdims=True) + sinks), value)
    return np.einsum("btnh,nhd->btd", out, params["out"]["kernel"])


def test_layer_is_the_formula(api):
    x = normal(1, BATCH, LENGTH, FEATURES)
    segment_ids = jnp.asarray([[0] * 4 + [1] * 9, [7] * 13])
    forward, params = make(api, x, **EVERYTHING)
    params = {**params, "sinks": normal(2, HEADS)}
    out = forward(params, x, segment_ids=segment_ids)
    expected = formula(
        params, x, rotary_base=100.0, window=5, softcap=2.0, segment_ids=np.asarray(segment_ids)
    )
    np.testing.assert_allclose(out, expected, atol=5e-6)


def test_gradients_agree_with_the_xla_backend(api):
    x = normal(1, BATCH, LENGTH, FEATURES)
    grads = []
    for attention_fn in (
        jax_flash.flash_attention,
        functools.partial(jax_flash.flash_attention, backend="xla"),
    ):
        forward, params = make(api, x, attention_fn=attention_fn, **EVERYTHING)

        def loss(params, x, forward=forward):
            return jnp.sum(forward(params, x) * normal(3, *x.shape))

        grads.append(jax.jit(jax.grad(loss, argnums=(0, 1)))(params, x))
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(grads))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5), *grads)


def test_linen_and_nnx_are_one_layer():
    x = normal(1, BATCH, LENGTH, FEATURES)
    (linen, params), (in_nnx, nnx_params) = (make(api, x, **EVERYTHING) for api in ("linen", "nnx"))
    assert jax.tree.structure(params) == jax.tree.structure(nnx_params)
    np.testing.assert_array_equal(linen(params, x), in_nnx(params, x))


def test_packed_documents_equal_separate_ones(api):
    x = normal(1, 1, LENGTH, FEATURES)
    forward, params = make(api, x, is_causal=True, rotary_base=100.0)
    packed = forward(params, x, segment_ids=jnp.asarray([[3] * 5 + [4] * 8]))
    separate = [forward(params, x[:, :5]), forward(params, x[:, 5:])]
    np.testing.assert_allclose(packed, jnp.concatenate(separate, axis=1), atol=2e-6)


@pytest.mark.parametrize("window", [2, (3, None), (None, 0), (2, 1)])
def test_window_equals_its_mask(api, window):
    x = normal(1, BATCH, LENGTH, FEATURES)
    left, right = (window, window) if isinstance(window, int) else window
    left, right = (LENGTH if bound is None else bound for bound in (left, right))
    ahead = jnp.arange(LENGTH) - jnp.arange(LENGTH)[:, None]
    mask = (ahead >= -left) & (ahead <= right)
    forward, params = make(api, x, local_window_size=window)
    masked, _ = make(api, x)
    np.testing.assert_allclose(forward(params, x), masked(params, x, mask=mask), atol=2e-6)


def test_window_is_refused_by_its_name(api):
    def run(x):
        forward, params = make(api, x, local_window_size=-1)
        return forward(params, x)

    with pytest.raises(ValueError, match="local_window_size is -1; expected 0 or more"):
        run(normal(1, BATCH, LENGTH, FEATURES))


def test_bias_is_added_to_the_scores(api):
    x = normal(1, BATCH, LENGTH, FEATURES)
    forward, params = make(api, x)
    bias = jnp.where(np.tri(LENGTH, dtype=bool), 0.0, -1e9)
    causal, _ = make(api, x, is_causal=True)
    np.testing.assert_allclose(forward(params, x, bias=bias), causal(params, x), atol=2e-6)


def decode_nnx(layer, x, chunks, max_length):
    layer.init_cache(x.shape[:-2], max_length)
    step = nnx.jit(lambda layer, x: layer(x, decode=True))
    return jnp.concatenate([step(layer, chunk) for chunk in chunks], axis=-2)


def decode_linen(layer, variables, x, chunks, max_length):
    layer = layer.clone(decode=True)
    cache = layer.init(jax.random.key(0), jnp.zeros((*x.shape[:-2], max_length, FEATURES)))["cache"]
    step = jax.jit(lambda variables, x: layer.apply(variables, x, mutable=["cache"]))
    outs = []
    for chunk in chunks:
        out, updated = step({**variables, "cache": cache}, chunk)
        outs.append(out)
        cache = updated["cache"]
    return jnp.concatenate(outs, axis=-2)


def decode(api, x, splits, max_length, **settings) -> Any:
    """The full forward, and the same by a cache that takes `x` in chunks."""
    chunks = jnp.split(x, splits, axis=-2)
    if api == "nnx":
        layer = flash_nnx.FlashAttention(HEADS, FEATURES, rngs=nnx.Rngs(0), **settings)
        return layer(x), decode_nnx(layer, x, chunks, max_length)
    layer = flash_linen.FlashAttention(HEADS, **settings)
    variables = layer.init(jax.random.key(0), x)
    return layer.apply(variables, x), decode_linen(layer, variables, x, chunks, max_length)


@pytest.mark.parametrize("settings", [{"is_causal": True}, EVERYTHING])
@pytest.mark.parametrize("splits", [list(range(1, LENGTH)), [6, 8, 11]])
def test_cache_equals_the_full_forward(api, settings, splits):
    x = normal(1, BATCH, LENGTH, FEATURES)
    full, chunked = decode(api, x, splits, LENGTH + 3, **settings)
    np.testing.assert_allclose(chunked, full, atol=5e-6)


def test_cache_without_batch_axis(api):
    full, chunked = decode(api, normal(1, LENGTH, FEATURES), [6], LENGTH, is_causal=True)
    np.testing.assert_allclose(chunked, full, atol=5e-6)


def test_past_the_end_of_the_cache_is_nan(api):
    x = normal(1, BATCH, LENGTH, FEATURES)
    full, chunked = decode(api, x, list(range(1, LENGTH)), LENGTH - 1, is_causal=True)
    np.testing.assert_allclose(chunked[:, :-1], full[:, :-1], atol=5e-6)
    assert np.isnan(chunked[:, -1]).all()


def test_wrong_decoding_is_refused(api):
    x = normal(1, BATCH, LENGTH, FEATURES)
    with pytest.raises(ValueError, match="room for 4 positions"):
        decode(api, x, [], 4, is_causal=True)
    with pytest.raises(ValueError, match="is_causal=True"):
        decode(api, x, [], LENGTH)
    layer = flash_nnx.FlashAttention(HEADS, FEATURES, is_causal=True, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="init_cache"):
        layer(x, decode=True)
    for sizes, name in [((BATCH, -1), "max_length"), ((2.0, LENGTH), "batch"), ((2, None), "max")]:
        with pytest.raises((TypeError, ValueError), match=name):
            layer.init_cache(*sizes)
    layer.init_cache(np.int64(BATCH), LENGTH)
    with pytest.raises(ValueError, match="segment_ids"):
        layer(x, decode=True, segment_ids=jnp.zeros((BATCH, LENGTH), jnp.int32))


def test_dropout_follows_its_switch(api):
    x = normal(1, BATCH, LENGTH, FEATURES)
    if api == "nnx":
        layer = flash_nnx.FlashAttention(HEADS, FEATURES, dropout_rate=0.5, rngs=nnx.Rngs(0))
        first, second = layer(x), layer(x)
        plain, same = nnx.view(layer, deterministic=True)(x), nnx.view(layer, deterministic=True)(x)
        layer.eval()
        np.testing.assert_array_equal(layer(x), plain)
    else:
        layer = flash_linen.FlashAttention(HEADS, dropout_rate=0.5)
        variables = layer.init(jax.random.key(0), x, deterministic=True)
        first, second = (
            layer.apply(variables, x, deterministic=False, rngs={"dropout": jax.random.key(seed)})
            for seed in (1, 2)
        )
        plain, same = (layer.apply(variables, x, deterministic=True) for _ in range(2))
    np.testing.assert_array_equal(plain, same)
    assert not np.allclose(first, second)
    assert not np.allclose(first, plain)


def test_dtypes(api):
    x = normal(1, BATCH, LENGTH, FEATURES)
    forward, params = make(api, x, dtype=jnp.bfloat16, **EVERYTHING)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}
    out = forward(params, x)
    assert out.dtype == jnp.bfloat16
    exact, _ = make(api, x, **EVERYTHING)
    np.testing.assert_allclose(out.astype(jnp.float32), exact(params, x), atol=0.03)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"num_kv_heads": 0}, "num_kv_heads"),
        ({"head_dim": 0}, "head_dim"),
        ({"head_dim": 7, "rotary_base": 100.0}, "even head_dim"),
        ({"head_dim": 8.0}, "head_dim"),
        ({"num_kv_heads": "2"}, "num_kv_heads"),
        ({"rotary_base": 0.0}, "rotary_base"),
        ({"rotary_base": -100.0}, "rotary_base"),
    ],
)
def test_wrong_settings_are_refused(api, settings, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make(api, normal(1, BATCH, LENGTH, FEATURES), **settings)


def test_negative_dropout_rate_is_refused(api):
    x = normal(1, BATCH, LENGTH, FEATURES)

    def call():
        forward, params = make(api, x, dropout_rate=-0.1, deterministic=False)
        return forward(params, x)

    with pytest.raises(ValueError, match=r"dropout_rate is -0\.1"):
        call()


def test_heads_must_divide_the_features(api):
    with pytest.raises(ValueError, match="give head_dim"):
        make(api, normal(1, BATCH, LENGTH, FEATURES + 1))


def test_attention_fn_sees_what_the_layer_uses(api):
    seen = []

    def spy(query, key, value, **options):
        seen.append(sorted(options))
        return jax_flash.flash_attention(query, key, value, **options)

    x = normal(1, BATCH, LENGTH, FEATURES)
    forward, params = make(api, x, attention_fn=spy, is_causal=True)
    seen.clear()
    forward(params, x, segment_ids=jnp.zeros((BATCH, LENGTH), jnp.int32))
    assert seen == [["is_causal", "key_value_segment_ids", "query_segment_ids"]]
