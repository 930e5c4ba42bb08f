"""Calls with each operand under vmap over the query alone, and the same of one member."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import jax_flash

from ..small import integers, normal

# M and S appear in no other size of a program: an array with both is a copy for every member.
M, B, T, S, N, K, H = 7, 2, 5, 22, 4, 2, 8
ARRAYS = ("query", "key", "value")


def qkv(dtype=jnp.float32, heads=(N, K)) -> tuple[jax.Array, jax.Array, jax.Array]:
    return (
        normal(0, M, B, T, heads[0], H, dtype=dtype),
        normal(1, B, S, heads[1], H, dtype=dtype),
        normal(2, B, S, heads[1], H, dtype=dtype),
    )


def segments(seed: int, *shape: int) -> jax.Array:
    return integers(seed, shape, 0, 2)


# Optional operands, and which of them every member has for itself.
TERMS = {
    "plain": ({}, ()),
    "bias of rows": ({"bias": normal(3, B, 1, T, S)}, ()),
    "bias of heads": ({"bias": normal(3, 1, N, 1, S)}, ()),
    "own bias": ({"bias": normal(3, M, B, N, T, S)}, ("bias",)),
    "own bias of keys": ({"bias": normal(3, M, B, 1, 1, S)}, ("bias",)),
    "mask": ({"mask": normal(4, B, 1, T, S) > -0.5}, ()),
    "own mask": ({"mask": normal(4, M, B, 1, 1, S) > -0.5}, ("mask",)),
    "lengths": (
        {
            "query_seq_lengths": jnp.array([T, 2]),
            "key_value_seq_lengths": jnp.array([S, 0]),
        },
        (),
    ),
    "own lengths": (
        {"key_value_seq_lengths": segments(5, M, B) * 9 + 4},
        ("key_value_seq_lengths",),
    ),
    "segments": (
        {"query_segment_ids": segments(6, B, T), "key_value_segment_ids": segments(7, B, S)},
        (),
    ),
    "own segments": (
        {"query_segment_ids": segments(6, M, B, T), "key_value_segment_ids": segments(7, B, S)},
        ("query_segment_ids",),
    ),
    "positions": (
        {"query_positions": segments(6, B, T) * 9, "key_value_positions": segments(7, B, S) * 5},
        (),
    ),
    "own positions": ({"query_positions": segments(6, M, B, T) * 9}, ("query_positions",)),
    "sinks": ({"sinks": normal(8, N)}, ()),
    "own sinks": ({"sinks": normal(8, M, N)}, ("sinks",)),
    "dropout": ({"dropout_key": jax.random.key(9)}, ()),
    "own dropout": ({"dropout_key": jax.random.split(jax.random.key(9), M)}, ("dropout_key",)),
}
KERNELS_COPY = {
    "own lengths",
    "own segments",
    "own positions",
}  # a kernel has these for a batch row


def call_of(backend, **options):
    """A function of a dict of arrays: a loss, and out with lse."""

    def call(arrays):
        rate = 0.3 if "dropout_key" in arrays else 0.0
        placed = {}
        if "query_positions" in arrays:
            placed = {"causal_align": "top_left", "local_window_size": (12, 6)}
        out, lse = jax_flash.flash_attention(
            **arrays, **(options | placed), dropout_rate=rate, return_lse=True, backend=backend
        )
        seen = jnp.where(lse > -1e30, lse, 0.0)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))) + jnp.sum(seen**2), (out, lse)

    return call


def arrays_of(name: str, mapped=("query",), dtype=jnp.float32):
    """The arrays of a case, and the in_axes of vmap."""
    terms, own = TERMS[name]
    arrays = dict(zip(ARRAYS, qkv(dtype), strict=True)) | terms
    return arrays, {name: 0 if name in (*mapped, *own) else None for name in arrays}


def moving_of(arrays) -> list[str]:
    return [name for name in (*ARRAYS, "bias", "sinks") if name in arrays]


def member(arrays, axes, i: int):
    def of(x):  # by NumPy, where it can: jax.Array's index compiles programs
        own = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return x[i] if own else jax.device_put(np.asarray(x)[i])

    return {name: x if axes[name] is None else of(x) for name, x in arrays.items()}


def gradients_of(call, wrt):
    """A function of a dict of arrays: the gradients to those of `wrt`, and out with lse."""

    def gradients(arrays):
        fixed = {name: x for name, x in arrays.items() if name not in wrt}
        moving = {name: arrays[name] for name in wrt}
        return jax.grad(lambda moving: call(fixed | moving), has_aux=True)(moving)

    return gradients


def summed(call, axes):
    """The loss of all members together."""

    def total(arrays):
        losses, results = jax.vmap(call, in_axes=(axes,))(arrays)
        return jnp.sum(losses), results

    return total
