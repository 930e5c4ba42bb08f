"""The FlashAttention layers: every option against a plain formula; test_layers_cache.py goes on."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
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


def make(api, x, memory=None, bound=None, **settings) -> Any:
    """A layer with seeded parameters as (forward(params, x, ...), params: dict).

    `bound`: arguments of every call that jit does not take.
    """
    bound = bound or {}
    if api == "linen":
        layer = flash_linen.FlashAttention(HEADS, **settings)
        params = layer.init(jax.random.key(0), x, memory)["params"]
        return (
            jax.jit(
                lambda params, x, *args, **call: layer.apply(
                    {"params": params}, x, *args, **call, **bound
                )
            ),
            params,
        )
    if memory is not None:
        settings["in_kv_features"] = memory.shape[-1]
    layer = flash_nnx.FlashAttention(HEADS, x.shape[-1], rngs=nnx.Rngs(0), **settings)
    graph, params = nnx.split(layer)
    return (
        jax.jit(
            lambda params, x, *args, **call: nnx.merge(graph, nnx.State(params))(
                x, *args, **call, **bound
            )
        ),
        nnx.to_pure_dict(params),
    )


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


def normalized(x, norm, scale):
    """A norm over the last axis, as its paper writes it."""
    if norm == "layer":
        x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * scale


def attention(params, x, memory, visible, *, norm=None, base=None):
    """The layer with a visible set [B, 1, T, S], biases and norms, in plain float64 numpy."""
    params = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
    x, memory = np.asarray(x, np.float64), np.asarray(memory, np.float64)
    query, key, value = (
        np.einsum("btd,dnh->btnh", source, params[name]["kernel"]) + params[name].get("bias", 0)
        for name, source in (("query", x), ("key", memory), ("value", memory))
    )
    if norm is not None:
        query = normalized(query, norm, params["query_ln"]["scale"])
        key = normalized(key, norm, params["key_ln"]["scale"])
    if base is not None:
        query, key = turn(query, base), turn(key, base)
    key, value = (np.repeat(a, HEADS // a.shape[2], axis=2) for a in (key, value))
    scores = np.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(query.shape[-1])
    weights = np.where(visible, np.exp(scores), 0)
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-30)
    out = np.einsum("bnts,bsnh->btnh", weights, value)
    return np.einsum("btnh,nhd->btd", out, params["out"]["kernel"]) + params["out"].get("bias", 0)


def randomized(params):
    """Parameters of the same shapes, none of them at 0 or 1."""
    leaves, tree = jax.tree.flatten(params)
    return jax.tree.unflatten(tree, [0.4 * normal(i, *p.shape) for i, p in enumerate(leaves)])


SOURCE = 9  # positions of the memory
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
    visible = (mask != 0) & (ids[:, None, :, None] == memory_ids[:, None, None, :])
    visible &= np.arange(LENGTH)[:, None] < lengths[:, None, None, None]
    visible &= np.arange(SOURCE) < memory_lengths[:, None, None, None]
    np.testing.assert_allclose(out, attention(params, x, memory, visible), atol=1e-5)


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_norms_of_query_and_key(api, norm):
    x = normal(1, BATCH, LENGTH, FEATURES)
    settings = {"num_kv_heads": KV_HEADS, "rotary_base": 100.0, "is_causal": True}
    forward, params = make(api, x, normalize_qk=NORMS[norm][api], **settings)
    assert params["query_ln"].keys() == params["key_ln"].keys() == {"scale"}
    params = randomized(params)
    expected = attention(params, x, x, np.tri(LENGTH) > 0, norm=norm, base=100.0)
    np.testing.assert_allclose(forward(params, x), expected, atol=1e-5)


def test_norms_with_settings_of_their_own(api):
    x = normal(1, BATCH, LENGTH, FEATURES)
    rms = functools.partial(NORMS["rms"][api], epsilon=0.5)
    (wide, params), (narrow, _) = (make(api, x, normalize_qk=n) for n in (rms, rms.func))
    assert np.abs(wide(params, x) - narrow(params, x)).max() > 1e-3


@pytest.mark.parametrize("normalize_qk", [False, True])
def test_parameters_are_those_of_flax(api, normalize_qk):
    x, memory = normal(1, BATCH, LENGTH, FEATURES), normal(2, BATCH, SOURCE, 24)
    forward, params = make(api, x, memory, normalize_qk=normalize_qk)
    params = randomized(params)
    if api == "linen":
        stock = nn.MultiHeadDotProductAttention(HEADS, normalize_qk=normalize_qk)
        expected = stock.apply({"params": params}, x, memory)
    else:
        stock = nnx.MultiHeadAttention(
            HEADS,
            FEATURES,
            in_kv_features=24,
            normalize_qk=normalize_qk,
            decode=False,
            rngs=nnx.Rngs(0),
        )
        nnx.update(stock, nnx.State(params))
        expected = stock(x, memory)
    np.testing.assert_allclose(forward(params, x, memory), expected, atol=1e-5)


@pytest.mark.parametrize("more", ["use_bias", "normalize_qk", "use_sinks"])
def test_parameters_that_are_left_over_are_refused(api, more):
    """A checkpoint may be one of a layer with more parameters, such as biases."""
    x, less = normal(1, BATCH, LENGTH, FEATURES), {"use_bias": False}
    _, params = make(api, x, **{**less, more: True})
    if api == "linen":
        layer = flash_linen.FlashAttention(HEADS, use_bias=False)
        name = {"use_bias": "key/bias", "normalize_qk": "key_ln", "use_sinks": "sinks"}[more]
        with pytest.raises(ValueError, match=f"parameters .*{name}.* given .*{more}=False"):
            jax.eval_shape(layer.apply, {"params": params}, x)
    else:
        layer = flash_nnx.FlashAttention(HEADS, FEATURES, rngs=nnx.Rngs(0), use_bias=False)
        with pytest.raises(ValueError, match=r"Expected a subgraph|Cannot set key"):
            nnx.update(layer, nnx.State(params))


def test_a_shared_scope_in_linen_has_parameters_of_others():
    class Scaled(nn.Module):
        def setup(self):
            self.attention = flash_linen.FlashAttention(HEADS)
            nn.share_scope(self, self.attention)

        @nn.compact
        def __call__(self, x):
            return self.param("scale", nn.initializers.ones, ()) * self.attention(x)

    x, layer = jnp.ones((BATCH, LENGTH, FEATURES)), Scaled()
    variables = jax.eval_shape(layer.init, jax.random.key(0), x)
    assert {"query", "scale"} < variables["params"].keys()
    jax.eval_shape(layer.apply, variables, x)


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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"segment_ids": np.zeros((BATCH, 3), int)}, r"segment_ids has shape \(2, 3\); expected"),
        ({"seq_lengths": np.zeros(3, int)}, r"seq_lengths has shape \(3,\); expected \[\*B\]"),
        ({"memory_seq_lengths": np.zeros(BATCH, int)}, "memory_seq_lengths is given without"),
        ({"memory_segment_ids": np.zeros((BATCH, 3), int)}, "memory_segment_ids is given without"),
        ({"memory": normal(2, 3, 5, FEATURES)}, r"memory has shape \(3, 5, 32\)"),
        ({"positions": np.arange(LENGTH)}, r"positions has shape \(13,\); expected \[\*B, T\]"),
        ({"memory_positions": np.zeros((BATCH, 3), int)}, "memory_positions is given without"),
        (
            {
                "memory": normal(2, BATCH, 5, FEATURES),
                "segment_ids": np.zeros((BATCH, LENGTH), int),
            },
            "both segment_ids",
        ),
        (
            {"memory": normal(2, BATCH, 5, FEATURES), "memory_seq_lengths": np.zeros((BATCH, 1))},
            "memory_seq_lengths has shape",
        ),
    ],
)
def test_wrong_calls_are_refused(api, call, message):
    x = normal(1, BATCH, LENGTH, FEATURES)
    forward, params = make(api, x)
    with pytest.raises(ValueError, match=message):
        forward(params, x, **call)


def test_features_of_the_memory_are_checked():
    x = normal(1, BATCH, LENGTH, FEATURES)
    layer = flash_nnx.FlashAttention(HEADS, FEATURES, in_kv_features=24, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"memory has shape .*in_kv_features = 24"):
        layer(x, x)
    with pytest.raises(ValueError, match=r"memory is None; .* in_kv_features = 24"):
        layer(x)


def test_features_of_self_attention_are_those_of_the_layer():
    layer = flash_nnx.FlashAttention(HEADS, FEATURES, rngs=nnx.Rngs(0))
    wrong = normal(1, BATCH, LENGTH, FEATURES + 1)
    says = rf"x has shape {re.escape(str(wrong.shape))}; expected in_features = {FEATURES} features"
    with pytest.raises(ValueError, match=says):
        layer(wrong)


def constant(number):
    return nn.initializers.constant(number)


def test_every_initializer_has_its_parameter(api):
    x = normal(1, BATCH, LENGTH, FEATURES)
    numbers = {"kernel_init": 1.0, "out_kernel_init": 2.0, "bias_init": 3.0, "out_bias_init": 4.0}
    inits = {name: constant(number) for name, number in numbers.items()}
    _, params = make(api, x, use_bias=True, **inits)
    means = jax.tree.map(lambda p: float(p.mean()), params)
    inner = {"kernel": 1.0, "bias": 3.0}
    assert means == {
        "query": inner,
        "key": inner,
        "value": inner,
        "out": {"kernel": 2.0, "bias": 4.0},
    }
    del inits["out_kernel_init"], inits["out_bias_init"]
    _, params = make(api, x, use_bias=True, **inits)
    assert jax.tree.map(lambda p: float(p.mean()), params["out"]) == inner


AXES = {
    "kernel_init": (None, "heads", None),
    "out_kernel_init": ("heads", None, None),
    "bias_init": ("heads", None),
    "out_bias_init": (None,),
}


def sharded(api, x, mesh):
    """Parameters [8 heads], placed as the metadata of their initializers says, and the layer."""
    init = {"kernel_init": nn.initializers.lecun_normal(), "bias_init": nn.initializers.normal()}
    with_axes = nn.with_partitioning if api == "linen" else nnx.with_partitioning
    settings = {
        name: with_axes(init[name.removeprefix("out_")], axes) for name, axes in AXES.items()
    }
    settings |= {"use_bias": True, "head_dim": HEAD_DIM, "normalize_qk": True}
    if api == "linen":
        layer = flash_linen.FlashAttention(8, **settings)
        shapes = jax.eval_shape(layer.init, jax.random.key(0), x)
        places = nn.get_sharding(shapes, mesh)
        params = jax.jit(layer.init, out_shardings=places)(jax.random.key(0), x)
        params = nn.unbox(params)
        return layer.apply, params, params["params"]

    @nnx.jit
    def create():
        layer = flash_nnx.FlashAttention(8, FEATURES, rngs=nnx.Rngs(0), **settings)
        state = nnx.state(layer)
        nnx.update(layer, jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))
        return layer

    with jax.set_mesh(mesh):
        graph, params = nnx.split(create())
    return lambda params, x: nnx.merge(graph, params)(x), params, nnx.to_pure_dict(params)


def test_partitioning_metadata_shards_the_four_kernels(api):
    mesh = jax.make_mesh((8,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    x = normal(1, BATCH, LENGTH, FEATURES)
    apply, variables, params = sharded(api, x, mesh)
    for name in ("query", "key", "value", "out"):
        kernel, bias = params[name]["kernel"], params[name]["bias"]
        axis = 0 if name == "out" else 1
        expected = list(kernel.shape)
        expected[axis] = 1
        assert {shard.data.shape for shard in kernel.addressable_shards} == {tuple(expected)}
        local = bias.shape if name == "out" else (1, HEAD_DIM)
        assert {shard.data.shape for shard in bias.addressable_shards} == {local}
    compiled = jax.jit(apply).lower(variables, x).compile()
    assert "all-gather" not in compiled.as_text()
    one = jax.tree.map(np.asarray, variables)
    np.testing.assert_allclose(compiled(variables, x), jax.jit(apply)(one, x), atol=5e-6)


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
        ({"normalize_qk": "rms"}, "normalize_qk must be True, False or a class"),
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
