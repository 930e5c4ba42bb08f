"""Owns a transformer encoder of plain functions, whose attention is an argument.

Layers are scanned, so that a model of 24 compiles as fast as one of one. Parameters are float32,
the computation has the dtype of the sizes. A layer keeps the results of matrix products and of the
attention's forward for the backward (remat by names).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

Attention = Callable[
    ..., jax.Array
]  # (query, key, value, dropout_key) [B, T, N, H] -> [B, T, N, H]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of an encoder."""

    layers: int
    width: int
    heads: int
    hidden: int  # of the network behind attention
    head_dim: int = 64
    dropout: float = 0.0  # of what attention and network add; attention has its own
    norm_first: bool = True  # False: behind each sum, as in BERT
    dtype: str = "bfloat16"


def initial(key: jax.Array, sizes: Sizes) -> dict[str, jax.Array]:
    """Draws the parameters of all layers, [layers, ...]."""
    inner = sizes.heads * sizes.head_dim
    shapes = {
        "query": (sizes.width, inner),
        "key": (sizes.width, inner),
        "value": (sizes.width, inner),
        "out": (inner, sizes.width),
        "up": (sizes.width, sizes.hidden),
        "down": (sizes.hidden, sizes.width),
    }
    keys = jax.random.split(key, len(shapes))
    found = {
        name: jax.random.normal(k, (sizes.layers, *shape)) * shape[0] ** -0.5
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    found |= {f"{name}_bias": jnp.zeros((sizes.layers, x.shape[-1])) for name, x in found.items()}
    for norm in ("norm1", "norm2"):
        found[norm] = jnp.ones((sizes.layers, sizes.width))
        found[f"{norm}_bias"] = jnp.zeros((sizes.layers, sizes.width))
    return found


def normed(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """LayerNorm over the last axis, in float32."""
    wide = x.astype(jnp.float32)
    wide -= wide.mean(axis=-1, keepdims=True)
    wide *= jax.lax.rsqrt(jnp.square(wide).mean(axis=-1, keepdims=True) + 1e-6)
    return (wide * scale + bias).astype(x.dtype)


def linear(x: jax.Array, parameters: dict[str, jax.Array], name: str) -> jax.Array:
    """x @ matrix + bias, in the dtype of x."""
    return x @ parameters[name].astype(x.dtype) + parameters[f"{name}_bias"].astype(x.dtype)


def dropped(x: jax.Array, rate: float, seed: jax.Array | None) -> jax.Array:
    """Dropout, by XLA's own generator, which is the fastest."""
    if seed is None or not rate:
        return x
    kept = jax.random.bernoulli(jax.random.key(seed, impl="rbg"), 1 - rate, x.shape)
    return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)


def encode(
    parameters: dict[str, jax.Array],
    x: jax.Array,
    sizes: Sizes,
    attend: Attention,
    seed: jax.Array | None = None,
    keep: Callable[..., Any] | None = None,
) -> jax.Array:
    """Runs all layers.

    Args:
      parameters: as `initial` makes them.
      x: [B, T, width].
      sizes: of the encoder.
      attend: attention of (query, key, value, dropout_key); the key is None without a seed.
      seed: an int32 number from which dropout is drawn; None: no dropout.
      keep: a policy of jax.checkpoint; None: a layer keeps all.

    Returns:
      [B, T, width] in the dtype of the sizes.
    """

    def layer(x: jax.Array, of_layer: Any) -> tuple[jax.Array, None]:
        p, number = of_layer
        seeds: list[jax.Array | None] = [None, None]
        key = None
        if seed is not None:
            own = (seed * sizes.layers + number) * 2
            seeds, key = [own, own + 1], jax.random.key(own)

        def attention(x: jax.Array) -> jax.Array:
            shape = (*x.shape[:-1], sizes.heads, sizes.head_dim)
            names = ("query", "key", "value")
            heads = (linear(x, p, name).reshape(shape) for name in names)
            qkv = [
                checkpoint_name(x, f"flash_{name}") for x, name in zip(heads, names, strict=True)
            ]
            return linear(attend(*qkv, key).reshape(*x.shape[:-1], -1), p, "out")

        def network(x: jax.Array) -> jax.Array:
            wide = checkpoint_name(linear(x, p, "up"), "wide")
            return linear(jax.nn.gelu(wide), p, "down")

        for number_of, (part, norm) in enumerate(((attention, "norm1"), (network, "norm2"))):
            of_norm = p[norm], p[f"{norm}_bias"]
            before = normed(x, *of_norm) if sizes.norm_first else x
            x = x + dropped(part(before), sizes.dropout, seeds[number_of])
            x = checkpoint_name(x, "attended")
            x = x if sizes.norm_first else normed(x, *of_norm)
        return x, None

    body = layer if keep is None else jax.checkpoint(layer, policy=keep)
    numbers = jnp.arange(sizes.layers, dtype=jnp.int32)
    return jax.lax.scan(body, x.astype(sizes.dtype), (parameters, numbers))[0]
