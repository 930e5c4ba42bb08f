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

import jax_flash
from jax_flash import _native
from jax_flash.layers import linen as flash_linen
from jax_flash.layers import nnx as flash_nnx

pytestmark = pytest.mark.quick

BATCH, LENGTH, FEATURES, HEADS = 2, 13, 32, 4
FLASH = {"linen": flash_linen.attention_fn, "nnx": flash_nnx.attention_fn}
STOCK = {"linen": nn.dot_product_attention, "nnx": nnx.dot_product_attention}


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
    with jax.ensure_compile_time_eval():  # the first call may be within a trace
        layer = nn.MultiHeadDotProductAttention(HEADS)
        return layer.init(jax.random.key(0), normal(1, 1, 1, FEATURES))


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


def sown(api, attention_fn, x, mask):
    """Output and weights of a call that sows them."""
    return {"linen": sown_linen, "nnx": sown_nnx}[api](attention_fn, x, mask)


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
    exact = np.einsum("btnh,bsnh->bnts", *(np.asarray(x, np.float64) for x in (q, k))) / 8**0.5
    exact = np.exp(exact - exact.max(-1, keepdims=True))
    exact /= exact.sum(-1, keepdims=True)
    np.testing.assert_allclose(sown["ours"], exact, rtol=0, atol=1e-6 if wide else 2**-8)


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
    query, key = (np.asarray(x, np.float64) for x in seen[-1])
    scores = 0.5 * np.tanh(2.0 * np.einsum("btnh,bsnh->bnts", query, key) / 0.5)
    behind = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    visible = mask & (behind >= 0) & (behind <= 6)
    visible &= ids[:, None, :, None] == ids[:, None, None, :]
    visible &= np.arange(LENGTH) < lengths[:, None, None, None]
    expected = np.where(visible, np.exp(scores), 0)
    expected /= expected.sum(-1, keepdims=True) + np.exp(sinks)[:, None, None]
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


OPTIONS = {
    "scale": 0.3,
    "softcap": 2.0,
    "sinks": normal(6, HEADS),
    "causal_align": "bottom_right",
    "local_window_size": (4, 1),
    "query_seq_lengths": np.array([LENGTH, 8]),
    "key_value_seq_lengths": np.array([7, LENGTH]),
    "query_segment_ids": np.array([[0] * 6 + [1] * 7] * BATCH),
    "key_value_segment_ids": np.array([[0] * 5 + [1] * 8] * BATCH),
    "backend": "xla",
}
# These instead of an alignment.
POSITIONS = {
    "local_window_size": (4, 1),
    "query_positions": np.array([np.arange(LENGTH), LENGTH - np.arange(LENGTH)]),
    "key_value_positions": np.array([np.arange(LENGTH) + 3, LENGTH - np.arange(LENGTH)]),
}
# These instead of a softcap.
FUNCTIONS = {
    "score_mod": lambda score, batch, head, query, key: score * (1 + head),
    "block_mask": jax_flash.block_mask_of(np.arange(HEADS).reshape(-1, 1, 1) % 2 == 0, block=16),
    "backend": "xla",
}


@pytest.mark.parametrize(
    "options", [OPTIONS, POSITIONS, FUNCTIONS], ids=["all", "positions", "functions"]
)
def test_options_of_flash_attention_are_set_by_partial(api, options):
    seen = {}

    def spy(query, key, value, **_):
        seen["out"] = jax_flash.flash_attention(query, key, value, **options)
        return seen["out"]

    x = normal(1, BATCH, LENGTH, FEATURES)
    (ours,) = run_layer(api, functools.partial(FLASH[api], **options), x)
    (expected,) = run_layer(api, spy, x)
    np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize("name", sorted({*OPTIONS, *POSITIONS, *FUNCTIONS} - {"backend"}))
def test_every_option_has_an_effect(api, name):
    query = normal(1, BATCH, LENGTH, HEADS, 8)
    given = next(options for options in (OPTIONS, POSITIONS, FUNCTIONS) if name in options)
    without = dict(given)
    del without[name]
    if name.endswith("segment_ids"):
        without = {k: o for k, o in without.items() if not k.endswith("segment_ids")}
    outs = [FLASH[api](query, query, query, **options) for options in (given, without)]
    assert np.abs(outs[0] - outs[1]).max() > 1e-3


def test_the_backend_is_the_one_that_is_named(api):
    query = normal(1, BATCH, LENGTH, HEADS, 8)
    with pytest.raises(NotImplementedError, match="cuda"):
        FLASH[api](query, query, query, backend="cuda")


def test_options_are_those_of_flash_attention(api):
    everything = inspect.signature(jax_flash.flash_attention).parameters.keys()
    # Flax's own words say dropout_rng, and by deterministic that there is no dropout.
    refused = {"dropout_key", "return_lse"}
    query = normal(1, BATCH, LENGTH, HEADS, 8)
    taken = {*inspect.signature(FLASH[api]).parameters, *OPTIONS, *POSITIONS, *FUNCTIONS}
    assert everything - refused <= taken
    for name in (*refused, "softcaps"):
        with pytest.raises(TypeError, match=f"'{name}'.*softcap"):
            FLASH[api](query, query, query, **{name: None})


@pytest.mark.parametrize("window", [4, (4, 0)])
def test_a_window_is_refused_where_a_cache_hides_the_position(api, window):
    x = normal(1, BATCH, LENGTH, FEATURES)
    attention_fn = functools.partial(FLASH[api], local_window_size=window)
    with pytest.raises(ValueError, match="local_window_size needs the position"):
        (decode_nnx if api == "nnx" else decode_linen)(attention_fn, x)


def test_a_window_in_decoding_with_the_written_length(api):
    query, key, value = (normal(i, BATCH, T, HEADS, 8) for i, T in enumerate((1, LENGTH, LENGTH)))
    written = np.array([9, 4])
    mask = (np.arange(LENGTH) < written[:, None])[:, None, None]
    seen = mask & (np.arange(LENGTH) >= written[:, None, None, None] - 3)
    windowed = FLASH[api](
        query,
        key,
        value,
        mask=mask,
        local_window_size=(2, 0),
        causal_align="bottom_right",
        key_value_seq_lengths=written,
    )
    np.testing.assert_allclose(windowed, FLASH[api](query, key, value, mask=seen), atol=2e-6)
    # The same by where the query stands, and without a word on what is written.
    for options in ({"mask": mask, "local_window_size": (2, 0)}, {"local_window_size": (2, 0)},
                    {"mask": mask, "local_window_size": (2, None), "is_causal": True}):  # fmt: skip
        placed = FLASH[api](query, key, value, query_positions=written[:, None] - 1, **options)
        np.testing.assert_allclose(placed, windowed, atol=2e-6)


@pytest.mark.skipif(_native.available("cuda") is not None, reason=f"{_native.available('cuda')}")
@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True, "local_window_size": (127, None), "softcap": 50.0},
        {"key_value_seq_lengths": np.array([LENGTH, 7])},
        {"mask": random_mask(BATCH, 1, LENGTH, LENGTH)},
    ],
    ids=["window", "lengths", "mask"],
)
def test_calls_from_flax_run_in_the_cuda_kernels(api, options):
    query = jnp.zeros((BATCH, LENGTH, HEADS, 64), jnp.bfloat16)
    traced = jax.jit(lambda query: FLASH[api](query, query, query, **options)).trace(query)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "jax_flash_cuda_forward" in text


def test_partials_run_under_jit_and_grad(api):
    x = normal(1, BATCH, LENGTH, FEATURES)
    attention_fn = functools.partial(FLASH[api], local_window_size=(4, 0), softcap=3.0)

    def loss(x):
        return jnp.sum(run_layer(api, attention_fn, x)[0] ** 2)

    np.testing.assert_allclose(jax.jit(jax.grad(loss))(x), jax.grad(loss)(x), atol=1e-4)


def test_signature_has_all_that_flax_passes(api):
    ours, stock = (set(inspect.signature(fn[api]).parameters) for fn in (FLASH, STOCK))
    assert stock <= ours


def test_input_positions_are_refused():
    query = normal(1, BATCH, LENGTH, HEADS, 8)
    with pytest.raises(ValueError, match="rotary_base"):
        flash_nnx.attention_fn(query, query, query, input_positions=jnp.arange(LENGTH))
