"""The FlashAttention layers with seeded parameters, and what they should give in float64."""

from typing import Any

import jax
import numpy as np
from flax import nnx

from jax_flash.layers import linen as flash_linen
from jax_flash.layers import nnx as flash_nnx

from .. import numpy_oracle
from ..small import numpy_normal as normal

BATCH, LENGTH, FEATURES, HEADS, KV_HEADS, HEAD_DIM = 2, 13, 32, 4, 2, 8
SOURCE = 9  # positions of the memory
EVERYTHING = {
    "num_kv_heads": KV_HEADS,
    "is_causal": True,
    "local_window_size": (5, None),
    "rotary_base": 100.0,
    "softcap": 2.0,
    "use_sinks": True,
}


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


def normalized(x, norm, scale):
    """A norm over the last axis, as its paper writes it."""
    if norm == "layer":
        x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * scale


def in_float64(params, x, memory=None, *, norm=None, base=None, **options) -> np.ndarray:
    """The layer in float64: its projections, norms and rotation, and between them the oracle."""
    params = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
    x = np.asarray(x, np.float64)
    memory = x if memory is None else np.asarray(memory, np.float64)
    query, key, value = (
        np.einsum("btd,dnh->btnh", source, params[name]["kernel"]) + params[name].get("bias", 0)
        for name, source in (("query", x), ("key", memory), ("value", memory))
    )
    if norm is not None:
        query = normalized(query, norm, params["query_ln"]["scale"])
        key = normalized(key, norm, params["key_ln"]["scale"])
    if base is not None:
        query, key = (numpy_oracle.rotated(a, np.arange(a.shape[1]), base) for a in (query, key))
    out = numpy_oracle.attention(query, key, value, sinks=params.get("sinks"), **options).out
    return np.einsum("btnh,nhd->btd", out, params["out"]["kernel"]) + params["out"].get("bias", 0)


def randomized(params):
    """Parameters of the same shapes, none of them at 0 or 1."""
    leaves, tree = jax.tree.flatten(params)
    return jax.tree.unflatten(tree, [0.4 * normal(i, *p.shape) for i, p in enumerate(leaves)])
