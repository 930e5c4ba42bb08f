"""Strategy "all_to_all": the sequence whole and the heads split, for as long as attention takes.

Each of the devices computes its share of the heads over all tokens: four exchanges forward (query,
key, value, out) and four backward, of arrays that shrink with the number of devices. The devices
must divide the heads of query and of key. `exchange` serves two levels too: then the devices that
exchange stand together, and another strategy splits the sequence over the rest.

Jacobs et al., DeepSpeed Ulysses (arXiv:2309.14509).
"""

import dataclasses
from typing import Any

import jax
from jax import lax

from jax_flash import _ops
from jax_flash.context_parallel.all_gather import gather
from jax_flash.context_parallel.orders import Layout, reorder
from jax_flash.context_parallel.shard import Shard, sort_keys


def attend(shard: Shard) -> tuple[jax.Array, jax.Array]:
    """Computes a shard's out `[*B, T, N, Hv]` and lse `[*B, N, T]`."""
    whole = exchange(shard, shard.axis, None)
    operands = (whole.operands[name] for name in ("q", "k", "v", *whole.problem.optional))
    out, lse = _ops.attend(whole.problem, whole.backend, *operands)
    return give_back(shard.layout, shard.axis, out, lse)


def refuse(q_heads: int, kv_heads: int, devices: int) -> str | None:
    """Says why the heads cannot be split over so many devices, or None."""
    for name, heads in (("query", q_heads), ("key", kv_heads)):
        if heads % devices:
            return (
                f"{name} has {heads} heads, which {devices} devices do not divide; expected a "
                f"multiple of {devices} for strategy 'all_to_all'"
            )
    return None


def exchange(shard: Shard, inner: Any, outer: Any) -> Shard:
    """Brings the tokens of the devices along an axis together, each with a share of the heads.

    Arguments:
      shard: over both axes, the inner one the faster.
      inner: the axis, or axes, of the exchange.
      outer: the axis over which the sequence stays split; None: over none.
    """
    shard = shard.vary()
    devices = lax.axis_size(inner)
    order, groups = shard.layout.order, shard.layout.shards // devices
    layout = Layout(order, devices)
    made = {}
    for name, x in shard.operands.items():
        match name:
            case "q" | "k" | "v":
                x = lax.all_to_all(x, inner, x.ndim - 2, x.ndim - 3, tiled=True)
                made[name] = layout.sort(x, -3)
            case (
                "query_segments" | "key_value_segments" | "query_positions" | "key_value_positions"
            ):
                made[name] = layout.sort(gather(x, inner, -1), -1)
            case "bias" | "mask":
                made[name] = sort_keys(_exchange_scores(x, inner, layout), layout, groups)
            case "sinks":
                made[name] = _own_heads(x, inner, -1)
            case "dropout_state" | "score_ids":
                made[name] = _own_heads(x, inner, -2)
            case "block_numbers" if x.shape[-3] > 1:
                made[name] = _own_heads(x, inner, -3)
            case _:
                made[name] = x
    return dataclasses.replace(
        shard, operands=made, axis=outer, layout=Layout(order, groups, devices)
    )


def give_back(layout: Layout, inner: Any, out: jax.Array, lse: jax.Array) -> Any:
    """Brings results `[*B, T, N, Hv]` and `[*B, N, T]` of `exchange`'s operands back."""
    devices = lax.axis_size(inner)
    out = reorder(out, layout.order, devices, -3)
    lse = reorder(lse, layout.order, devices, -1)
    out = lax.all_to_all(out, inner, out.ndim - 3, out.ndim - 2, tiled=True)
    return out, lax.all_to_all(lse, inner, lse.ndim - 1, lse.ndim - 2, tiled=True)


def _exchange_scores(x: jax.Array, inner: Any, layout: Layout) -> jax.Array:
    """Brings `[*B, N, T, S]`, any dim of it 1, to all queries and a share of the heads."""
    heads, queries = x.shape[-3:-1]
    if queries == 1:
        return x if heads == 1 else _own_heads(x, inner, -3)
    if heads == 1:
        x = gather(x, inner, -2)
    else:
        x = lax.all_to_all(x, inner, x.ndim - 3, x.ndim - 2, tiled=True)
    return layout.sort(x, -2)


def _own_heads(x: jax.Array, inner: Any, axis: int) -> jax.Array:
    size = x.shape[axis] // lax.axis_size(inner)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(inner) * size, size, axis=axis % x.ndim)
