"""The FlashAttention layers: what they compute, by every option, beside float64.

Their parameters and settings are in test_layers_settings.py, their cache in test_layers_cache.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jax_flash
from jax_flash.layers import linen as flash_linen
from jax_flash.layers import nnx as flash_nnx

from ..small import numpy_normal as normal
from .own_layers import (
    BATCH,
    EVERYTHING,
    FEATURES,
    HEADS,
    KV_HEADS,
    LENGTH,
    SOURCE,
    in_float64,
    make,
    randomized,
)


def test_layer_is_the_formula(api):
    x = normal(1, BATCH, LENGTH, FEATURES)
    segment_ids = np.array([[0] * 4 + [1] * 9, [7] * 13])
    forward, params = make(api, x, **EVERYTHING)
    params = {**params, "sinks": normal(2, HEADS)}
    out = forward(params, x, segment_ids=segment_ids)
    want = in_float64(
        params, x, base=100.0, softcap=2.0, is_causal=True, local_window_size=(5, None),
        query_segment_ids=segment_ids, key_value_segment_ids=segment_ids,
    )  # fmt: skip
    np.testing.assert_allclose(out, want, atol=5e-6)


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


@pytest.mark.parametrize("start", [0, 40])
def test_the_order_of_a_sequence_does_not_matter_with_its_positions(api, start):
    """Rotary embedding, causality and window go by positions alone."""
    x = normal(1, BATCH, LENGTH, FEATURES)
    forward, params = make(api, x, **EVERYTHING)
    order = np.random.default_rng(2).permuted(np.tile(np.arange(LENGTH), (BATCH, 1)), axis=1)
    permuted = forward(params, np.take_along_axis(x, order[..., None], 1), positions=start + order)
    expected = np.take_along_axis(np.asarray(forward(params, x)), order[..., None], 1)
    np.testing.assert_allclose(permuted, expected, atol=2e-5)


def test_a_memory_has_positions_of_its_own(api):
    """A chunk of a sequence against all of it: the rows that the whole gives."""
    x = normal(1, BATCH, LENGTH, FEATURES)
    settings = {"is_causal": True, "rotary_base": 100.0}
    forward, params = make(api, x, x, **settings)
    whole = forward(params, x, x)
    chunk = functools.partial(
        forward, params, x[:, 6:9], positions=np.tile(np.arange(6, 9), (2, 1))
    )
    np.testing.assert_allclose(chunk(x), whole[:, 6:9], atol=5e-6)  # by index
    turned = np.tile(np.arange(LENGTH)[::-1], (2, 1))
    np.testing.assert_allclose(chunk(x[:, ::-1], memory_positions=turned), whole[:, 6:9], atol=5e-6)


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


NORMS = {
    "layer": dict.fromkeys(("linen", "nnx"), True),
    "rms": {"linen": nn.RMSNorm, "nnx": nnx.RMSNorm},
}


def test_cross_attention_is_the_formula(api):
    x, memory = normal(1, BATCH, LENGTH, FEATURES), normal(2, BATCH, SOURCE, 24)
    lengths, memory_lengths = np.array([11, LENGTH]), np.array([SOURCE, 4])
    ids = np.array([[0] * 6 + [1] * 7, [5] * LENGTH])
    memory_ids = np.array([[1] * 4 + [0] * 5, [5] * SOURCE])
    mask = (np.random.default_rng(3).random((BATCH, 1, LENGTH, SOURCE)) < 0.8).astype(np.float32)
    forward, params = make(api, x, memory, num_kv_heads=KV_HEADS)
    params = randomized(params)
    out = forward(
        params,
        x,
        memory,
        seq_lengths=lengths,
        memory_seq_lengths=memory_lengths,
        segment_ids=ids,
        memory_segment_ids=memory_ids,
        mask=mask,
    )
    want = in_float64(
        params, x, memory, mask=mask != 0, query_seq_lengths=lengths,
        key_value_seq_lengths=memory_lengths, query_segment_ids=ids,
        key_value_segment_ids=memory_ids,
    )  # fmt: skip
    np.testing.assert_allclose(out, want, atol=1e-5)


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_norms_of_query_and_key(api, norm):
    x = normal(1, BATCH, LENGTH, FEATURES)
    settings = {"num_kv_heads": KV_HEADS, "rotary_base": 100.0, "is_causal": True}
    forward, params = make(api, x, normalize_qk=NORMS[norm][api], **settings)
    assert params["query_ln"].keys() == params["key_ln"].keys() == {"scale"}
    params = randomized(params)
    want = in_float64(params, x, norm=norm, base=100.0, is_causal=True)
    np.testing.assert_allclose(forward(params, x), want, atol=1e-5)


def test_norms_with_settings_of_their_own(api):
    x = normal(1, BATCH, LENGTH, FEATURES)
    rms = functools.partial(NORMS["rms"][api], epsilon=0.5)
    (wide, params), (narrow, _) = (make(api, x, normalize_qk=n) for n in (rms, rms.func))
    assert np.abs(wide(params, x) - narrow(params, x)).max() > 1e-3


def test_lengths_equal_shorter_inputs(api):
    x = normal(1, BATCH, LENGTH, FEATURES)
    forward, params = make(api, x, rotary_base=100.0)
    padded = x.copy()
    padded[0, 8:] = np.nan
    out = forward(params, padded, seq_lengths=np.array([8, LENGTH]))
    np.testing.assert_allclose(out[:1, :8], forward(params, x[:1, :8]), atol=2e-6)
    np.testing.assert_allclose(out[1:], forward(params, x[1:]), atol=2e-6)
    np.testing.assert_array_equal(out[0, 8:], 0)


def test_masks_of_any_dtype(api):
    x = normal(1, BATCH, LENGTH, FEATURES)
    forward, params = make(api, x)
    mask = np.random.default_rng(3).random((BATCH, 1, LENGTH, LENGTH)) < 0.5
    out = forward(params, x, mask=mask)
    for same in (mask.astype(np.float32) * 0.5, mask.astype(np.int32) * 2):
        np.testing.assert_array_equal(forward(params, x, mask=same), out)


def test_bias_is_added_to_the_scores(api):
    x = normal(1, BATCH, LENGTH, FEATURES)
    forward, params = make(api, x)
    bias = jnp.where(np.tri(LENGTH, dtype=bool), 0.0, -1e9)
    causal, _ = make(api, x, is_causal=True)
    np.testing.assert_allclose(forward(params, x, bias=bias), causal(params, x), atol=2e-6)


def test_score_functions_and_block_masks(api):
    """Beside the bias and the mask that they stand for; a block mask is also an argument of jit."""
    x, memory, slopes = normal(1, BATCH, LENGTH, FEATURES), normal(2, BATCH, 9, FEATURES), 0.3
    query, key = np.arange(LENGTH)[:, None], np.arange(9)
    mask, bias = (query + 2 * key) % 5 != 0, -slopes * np.abs(query - key)
    blocks = jax_flash.block_mask(
        lambda b, h, q, k: (q + 2 * k) % 5 != 0, q_len=LENGTH, kv_len=9, block=16
    )
    xla = functools.partial(jax_flash.flash_attention, backend="xla")
    bound = {"score_mod": lambda score, b, h, q, k: score - slopes * jnp.abs(q - k)}
    forward, params = make(api, x, memory, bound, attention_fn=xla)
    spelt, _ = make(api, x, memory)
    np.testing.assert_allclose(
        forward(params, x, memory, block_mask=blocks),
        spelt(params, x, memory, bias=bias, mask=mask),
        atol=2e-6,
    )


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
