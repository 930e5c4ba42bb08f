"""Strategy "all_gather": every device gets all keys and values, or those that its window reaches.

One collective each way and one call of the kernels; memory for the keys and values of the whole
sequence. Their gradients are summed over the devices in float32. A window that reaches no further
than the neighbours' tokens gets those of its keys alone, by a permutation each side.

Llama 3 is trained so (arXiv:2407.21783, 3.3.2).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_flash import _ops
from jax_flash._block_arrays import EMPTY
from jax_flash._terms import sum_dtype
from jax_flash.context_parallel.shard import ALL, Operands, Shard, Tokens, cut, sort_keys

_HIDDEN = -(2**31)  # where no window that has a left side reaches


def attend(shard: Shard) -> tuple[jax.Array, jax.Array]:
    """Computes a shard's out `[*B, T, N, Hv]` and lse `[*B, N, T]`."""
    shard = shard.vary()
    first, keys = _neighbours(shard) if reaches_neighbours(shard) else _all(shard)
    names = ("k", "v")
    terms = {name: x for name, x in shard.operands.items() if name == "sinks"}
    terms |= shard.query_terms() | {name: x for name, x in keys.items() if name not in names}
    if shard.block:
        terms["block_numbers"] = _columns(terms["block_numbers"], first, keys["k"], shard.block)
    parts = []
    for rows in shard.runs(ALL, shard.q_len):
        tokens = shard.tokens(shard.rank, shard.q_len, rows)
        problem, given = shard.call(tokens, Tokens.run(first), **shard.cut_terms(terms, rows))
        operands = (cut(shard.operands["q"], rows, -3), *(keys[name] for name in names))
        parts.append(_ops.attend(problem, shard.backend, *operands, *given.values()))
    if len(parts) == 1:
        return parts[0]
    out, lse = zip(*parts, strict=True)
    return jnp.concatenate(out, axis=-3), jnp.concatenate(lse, axis=-1)


# ---- all keys ------------------------------------------------------------------------------------


def _all(shard: Shard) -> tuple[int, Operands]:
    """Collects the keys of all shards, and what belongs to them, sorted by index from 0 on."""
    layout = shard.layout

    def whole(name, axis):
        return layout.sort(gather(shard.operands[name], shard.axis, axis), axis)

    keys = {"k": whole("k", -3), "v": whole("v", -3)}
    for name in ("key_value_segments", "key_value_positions"):
        if name in shard.operands:
            keys[name] = whole(name, -1)
    for name in ("bias", "mask"):
        if name in shard.operands:
            keys[name] = sort_keys(shard.operands[name], layout)
    if "key_value_lengths" in shard.operands:
        keys["key_value_lengths"] = shard.operands["key_value_lengths"]
    if not shard.positioned and shard.problem.window != (None, None):
        kv_len = keys["k"].shape[-3]
        shape = (*keys["k"].shape[:-3], kv_len)
        keys["key_value_positions"] = jnp.broadcast_to(jnp.arange(kv_len, dtype=jnp.int32), shape)
    return 0, keys


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """Puts the arrays of all devices end to end; the gradient is summed in float32."""
    return lax.all_gather(x, axis, axis=dim % x.ndim, tiled=True)


def _gather_forward(x, axis, dim):
    return gather(x, axis, dim), None


def _gather_backward(axis, dim, _, cotangent):
    if not jnp.issubdtype(cotangent.dtype, jnp.floating):
        return (None,)
    wide = cotangent.astype(sum_dtype(cotangent.dtype))
    total = lax.psum_scatter(wide, axis, scatter_dimension=dim % wide.ndim, tiled=True)
    return (total.astype(cotangent.dtype),)


gather.defvjp(_gather_forward, _gather_backward)


# ---- the neighbours' keys ------------------------------------------------------------------------


def reaches_neighbours(shard: Shard) -> bool:
    """Whether the window of a shard's queries lies within its own and its neighbours' keys."""
    left, right = shard.problem.window
    return (
        shard.layout.order == "contiguous"
        and shard.layout.shards > 1
        and not shard.positioned
        and shard.offset == 0
        and shard.q_len == shard.kv_len
        and left is not None
        and right is not None
        and max(left, right) <= shard.kv_len
    )


def _neighbours(shard: Shard) -> tuple[jax.Array, Operands]:
    """Collects a shard's own keys, the last ones of the device before and the first of the next.

    Returns: the index of the first, and the keys with what belongs to them.
    """
    unit = max(shard.units().values(), default=1)
    # `reaches_neighbours`: neither is None. In whole blocks, and as dropout counts.
    left, right = (-(-(side or 0) // unit) * unit for side in shard.problem.window)
    shards, kv_len, rank = shard.layout.shards, shard.kv_len, shard.rank
    first = rank * kv_len - left
    size = left + kv_len + right

    def joined(name, dim):
        x = shard.operands[name]
        dim %= x.ndim
        parts = [x]
        if left:
            last = lax.slice_in_dim(x, kv_len - left, kv_len, axis=dim)
            parts.insert(0, _shift(last, shard.axis, shards, 1))
        if right:
            parts.append(_shift(lax.slice_in_dim(x, 0, right, axis=dim), shard.axis, shards, -1))
        return jnp.concatenate(parts, axis=dim) if len(parts) > 1 else x

    indices = first + jnp.arange(size, dtype=jnp.int32)
    inside = (indices >= 0) & (indices < shards * kv_len)  # the ends have one neighbour
    positions = jnp.where(inside, indices, _HIDDEN)
    keys = {"k": joined("k", -3), "v": joined("v", -3)}
    keys["key_value_positions"] = jnp.broadcast_to(positions, (*keys["k"].shape[:-3], size))
    if "key_value_segments" in shard.operands:
        keys["key_value_segments"] = joined("key_value_segments", -1)
    if "key_value_lengths" in shard.operands:
        lengths = shard.operands["key_value_lengths"]
        keys["key_value_lengths"] = jnp.clip(lengths - first, 0, size)
    for name in ("bias", "mask"):
        if name in shard.operands:
            x = shard.operands[name]
            if x.shape[-1] > 1:
                x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(left, right)])
                x = lax.dynamic_slice_in_dim(x, rank * kv_len, size, axis=-1)
            keys[name] = x
    return first, keys


def _columns(numbers: jax.Array, first: Any, k: jax.Array, block: int) -> jax.Array:
    """Takes the columns of keys from `first` on of a block mask, nothing outside of it."""
    count = -(-k.shape[-3] // block)
    if count == numbers.shape[-1]:
        return numbers
    around = [(0, 0)] * (numbers.ndim - 1) + [(count, count)]
    numbers = jnp.pad(numbers, around, constant_values=EMPTY)
    return lax.dynamic_slice_in_dim(numbers, first // block + count, count, axis=-1)


def _shift(x: jax.Array, axis: str, shards: int, by: int) -> jax.Array:
    """Takes the array of the device `by` before; those that have none get zeros."""
    pairs = [(i, i + by) for i in range(shards) if 0 <= i + by < shards]
    return lax.ppermute(x, axis, pairs)
