"""Flax's own layers with seeded weights and any attention_fn, for one call and for decoding."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

from jax_flash.layers import linen as flash_linen
from jax_flash.layers import nnx as flash_nnx

from ..small import numpy_normal as normal

BATCH, LENGTH, FEATURES, HEADS = 2, 13, 32, 4
FLASH = {"linen": flash_linen.attention_fn, "nnx": flash_nnx.attention_fn}
STOCK = {"linen": nn.dot_product_attention, "nnx": nnx.dot_product_attention}


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
