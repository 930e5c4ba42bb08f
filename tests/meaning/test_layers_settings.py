"""The FlashAttention layers' parameters and settings: whose, how placed, what is refused."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from jax_flash.layers import linen as flash_linen
from jax_flash.layers import nnx as flash_nnx

from ..small import numpy_normal as normal
from .own_layers import BATCH, FEATURES, HEAD_DIM, HEADS, LENGTH, SOURCE, make, randomized


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
        ({"seq_lengths": np.ones(BATCH)}, r"^seq_lengths has dtype float32 \(shape .*int32"),
    ],
)
def test_wrong_calls_are_refused(api, call, message):
    x = normal(1, BATCH, LENGTH, FEATURES)
    forward, params = make(api, x)
    with pytest.raises((TypeError, ValueError), match=message):
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
