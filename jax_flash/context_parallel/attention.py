"""The public call: what it checks, which strategy it chooses, and shard_map around itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, Unpack, get_args, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from jax_flash import _validate
from jax_flash._varying import varying_axes
from jax_flash.attention import Options
from jax_flash.context_parallel import all_gather, all_to_all, orders, ring
from jax_flash.context_parallel.orders import Layout
from jax_flash.context_parallel.shard import Shard

Strategy = Literal["ring", "all_to_all", "all_gather"]
Order = Literal["contiguous", "zigzag", "striped"]
Axis = str | Sequence[str]

_STRATEGIES = {"ring": ring, "all_to_all": all_to_all, "all_gather": all_gather}
_SHORT = 1024  # keys of a device, for which a hop of a ring takes longer than it computes
_DEFAULTS: dict[str, Any] = {
    "scale": None,
    "bias": None,
    "mask": None,
    "is_causal": False,
    "causal_align": "top_left",
    "local_window_size": None,
    "query_seq_lengths": None,
    "key_value_seq_lengths": None,
    "query_segment_ids": None,
    "key_value_segment_ids": None,
    "query_positions": None,
    "key_value_positions": None,
    "softcap": None,
    "sinks": None,
    "dropout_rate": 0.0,
    "dropout_key": None,
    "deterministic": False,
}
# Which dim, from the last, is the sequence of an argument that is split with it.
_SEQUENCE_DIMS = {
    "query": -3,
    "key": -3,
    "value": -3,
    "bias": -2,
    "mask": -2,
    "query_segment_ids": -1,
    "key_value_segment_ids": -1,
    "query_positions": -1,
    "key_value_positions": -1,
}
_ARRAYS = (
    *_SEQUENCE_DIMS,
    "query_seq_lengths",
    "key_value_seq_lengths",
    "sinks",
    "dropout_key",
)


@overload
def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    axis_name: Axis,
    strategy: Strategy | None = None,
    order: Order = "contiguous",
    return_lse: Literal[False] = False,
    **options: Unpack[Options[ArrayLike]],
) -> jax.Array: ...


@overload
def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    axis_name: Axis,
    strategy: Strategy | None = None,
    order: Order = "contiguous",
    return_lse: Literal[True],
    **options: Unpack[Options[ArrayLike]],
) -> tuple[jax.Array, jax.Array]: ...


def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    axis_name: Axis,
    strategy: Strategy | None = None,
    order: Order = "contiguous",
    return_lse: bool = False,
    **options: Unpack[Options[ArrayLike]],
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes `flash_attention` of sequences that are split over the devices of a mesh axis.

    Results and gradients are those of one device but for rounding: a ring merges partial results
    in float32, and gradients of key and value are summed over devices in float32.

    Inside a `shard_map` over the axis, arguments are one device's. Elsewhere, under jit or not,
    they are whole arrays of any sharding on a mesh with that axis (their own, or that of
    `jax.set_mesh`), and the call maps itself over it; the mesh's other axes stay as they are. In
    shapes below T and S are of the whole sequence; a device has T / n and S / n, n the devices of
    the axis.

    Strategies (docs/context_parallel.md has what each costs):

    - "ring": keys and values travel around, overlapped with compute. Any number of heads.
    - "all_to_all": the sequence whole and the heads split, in between; n divides N and K.
    - "all_gather": keys and values of all devices on each; where a window (both sides) in order
      "contiguous" reaches no further than the neighbours, only the keys that it reaches.
    - None: "all_to_all" with dropout; "all_gather" where a window reaches neighbours alone, or a
      device has fewer than 1024 keys; "all_to_all" where is_causal meets order "contiguous", of
      which a ring's last device has all to do, and n divides N and K; else "ring".

    Arguments:
      query, key, value: `[*B, T, N, H]`, `[*B, S, K, H]`, `[*B, S, K, Hv]`, split along T and S.
      axis_name: the mesh axis that splits the sequence; or two, (outer, inner), of an axis of
        each, for sequences split over both, the outer one the slower: the inner one always
        exchanges by all-to-all (heads), and `strategy` is that of the outer one.
      strategy: "ring", "all_to_all", "all_gather" or None. With two axes "all_to_all" exchanges
        over both at once.
      order: how the tokens, of queries and keys alike, were brought to the devices by `reorder`:
        "contiguous", "zigzag" or "striped". With the latter two each device has as much to do
        under a causal mask. All arguments and results with a T or S stand in this order.
      return_lse: also return lse `[*B, T, N]`.
      options: those of `flash_attention`. Causality, windows and lengths count tokens by their
        index in the sequence before `reorder`, unless positions say otherwise. Segment ids and
        positions are split as tokens are. bias and mask, which broadcast to `[*B, N, T, S]`, are
        split along T; S is whole on every device, in the order of the keys. Lengths, of the whole,
        and sinks are the same on all devices of the axis. dropout needs strategy "all_to_all":
        the pattern is that of one device over the tokens before `reorder`.

    Returns: out `[*B, T, N, Hv]`, split as query is; with return_lse also lse `[*B, T, N]`.

    Raises:
      TypeError, ValueError: as `flash_attention`; an axis that does not exist, or does not divide
        T, S or heads, with both numbers; another strategy or order; a query that is not split.
      NotImplementedError: as `flash_attention`; dropout with another strategy.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import NamedSharding, PartitionSpec
      >>> from jax_flash.context_parallel import attention, reorder
      >>> mesh = jax.make_mesh((len(jax.devices()),), ("seq",))
      >>> x = jax.random.normal(jax.random.key(0), (2, 128, 8, 64))
      >>> x = reorder(x, "zigzag", mesh.size, axis=1)
      >>> x = jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, "seq")))
      >>> attention(x, x, x, axis_name="seq", order="zigzag", is_causal=True).shape
      (2, 128, 8, 64)

    Papers: Liu et al., Ring Attention (arXiv:2310.01889); Brandon et al., Striped Attention
    (arXiv:2311.09431); Jacobs et al., DeepSpeed Ulysses (arXiv:2309.14509).
    """
    axes = _axes(axis_name)
    if strategy is not None and strategy not in get_args(Strategy):
        expected = ", ".join(map(repr, get_args(Strategy)))
        raise ValueError(f"strategy is {strategy!r}; expected one of {expected}, or None")
    orders.check(order)
    with_lse = _validate.flag("return_lse", return_lse)
    backend = options.pop("backend", None)
    unknown = [name for name in options if name not in _DEFAULTS]
    if unknown:
        raise TypeError(f"attention got an unexpected keyword argument {unknown[0]!r}")
    arguments = {"query": query, "key": key, "value": value, **options}
    for name in ("query", "key", "value"):
        arguments[name] = _validate.array(name, arguments[name])

    def local(arguments):
        shard = _shard(arguments, backend, axes, order)
        out, lse = _attend(shard, axes, strategy)
        return (out, jnp.swapaxes(lse, -1, -2)) if with_lse else out

    manual = jax.sharding.get_abstract_mesh().manual_axes
    if set(axes) <= set(manual):
        return local(arguments)
    return _mapped(local, arguments, axes, order, with_lse)


# ---- on one device -------------------------------------------------------------------------------


def _axes(axis_name: Any) -> tuple[str, ...]:
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    if len(set(axes)) != len(axes) or len(axes) not in (1, 2):
        raise ValueError(
            f"axis_name is {axis_name!r}; expected the name of a mesh axis, or two: (outer, inner)"
        )
    return axes


def _shard(arguments: dict[str, Any], backend: str | None, axes, order: str) -> Shard:
    """Checks one device's arguments and brings them to the form of the primitives."""
    shards = lax.axis_size(axes)
    given = _DEFAULTS | arguments
    query, key = given["query"], given["key"]
    for name, x, letter in (("query", query, "T"), ("key", key, "S")):
        if x.ndim >= 3 and order == "zigzag" and x.shape[-3] % 2:
            raise ValueError(
                f"{name} has {letter} = {x.shape[-3]} on each of {shards} devices (shape "
                f"{x.shape}); expected an even number for the two chunks of order 'zigzag'"
            )
    missing = [axis for axis in axes if axis not in varying_axes(query)]
    if missing and varying_axes(lax.axis_index(axes)):  # where shard_map tells, check_vma
        raise ValueError(
            f"query is the same on all devices of axis {missing[0]!r}; expected it split along T, "
            f"dim {query.ndim - 3}, for example by in_specs of shard_map"
        )
    layout = Layout(order, shards)
    names = ("query_positions", "key_value_positions")
    if any(given[name] is not None for name in names) and query.ndim >= 3 and key.ndim >= 3:
        for name, x in zip(names, (query, key), strict=True):
            if given[name] is None:
                indices = layout.indices(lax.axis_index(axes), x.shape[-3])
                given[name] = jnp.broadcast_to(indices, (*x.shape[:-3], x.shape[-3]))
    problem, operands = _validate.prepare(**given, shards=shards)
    named = dict(zip(("q", "k", "v", *problem.terms), operands, strict=True))
    return Shard(problem, backend, named, axes if len(axes) > 1 else axes[0], layout)


def _attend(shard: Shard, axes: tuple[str, ...], strategy: str | None):
    sizes = [lax.axis_size(axis) for axis in axes]
    heads = [shard.operands[name].shape[-2] for name in ("q", "k")]
    refused = all_to_all.refuse(*heads, math.prod(sizes))
    drops = "dropout_state" in shard.problem.terms
    if drops and strategy is None:
        strategy = "all_to_all"
    if drops and strategy != "all_to_all":
        raise NotImplementedError(
            f"strategy {strategy!r} has no dropout, whose pattern counts queries and keys of the "
            "whole sequence; expected strategy='all_to_all'"
        )
    if strategy == "all_to_all":
        if refused:
            raise ValueError(f"{refused}; 'ring' and 'all_gather' take any number of heads")
        return all_to_all.attend(shard)
    if len(axes) == 1:
        return _STRATEGIES[strategy or _choose(shard, refused)].attend(shard)
    outer, inner = axes
    refused_inside = all_to_all.refuse(*heads, sizes[1])
    if refused_inside:
        raise ValueError(f"{refused_inside}, which axis {inner!r}, the inner of two, always does")
    exchanged = all_to_all.exchange(shard, inner, outer)
    # Heads are split already, so that no exchange is left to choose.
    chosen = strategy or _choose(exchanged, "heads are split")
    results = _STRATEGIES[chosen].attend(exchanged)
    return all_to_all.give_back(shard.layout, inner, *results)


def _choose(shard: Shard, refused: str | None) -> str:
    """Chooses a strategy, as `attention` documents."""
    if all_gather.reaches_neighbours(shard) or shard.kv_len < _SHORT:
        return "all_gather"
    causal = shard.problem.window[1] == 0
    if causal and shard.layout.order == "contiguous" and not refused:
        return "all_to_all"
    return "ring"


# ---- under jit -----------------------------------------------------------------------------------


def _mapped(local, arguments, axes, order, with_lse):
    """Maps the call over the axes of the arrays' mesh."""
    query, key = arguments["query"], arguments["key"]
    mesh = _mesh(query)
    missing = [axis for axis in axes if axis not in mesh.axis_names]
    if missing:
        names = f"axes {mesh.axis_names}" if mesh.axis_names else "no mesh"
        raise ValueError(
            f"axis_name names {missing[0]!r}, but query's arrays have {names}; expected an axis of "
            "the enclosing shard_map, of jax.set_mesh(mesh), or of the mesh that query is placed on"
        )
    shards = math.prod(mesh.shape[axis] for axis in axes)
    for name, x, letter in (("query", query, "T"), ("key", key, "S")):
        if x.ndim >= 3:
            orders.check_divides(order, shards, f"{letter} of {name}", x.shape[-3], x.shape)
    split = axes if len(axes) > 1 else axes[0]
    names = [
        name
        for name, x in arguments.items()
        if x is not None and (name in _ARRAYS or isinstance(x, jax.Array))
    ]
    arrays = {
        name: x if name == "dropout_key" else _validate.array(name, x)
        for name, x in arguments.items()
        if name in names
    }
    static = {name: x for name, x in arguments.items() if name not in names}

    def spec(name):
        x, dim = arrays[name], _SEQUENCE_DIMS.get(name)
        whole = dim is None or x.ndim < -dim or (name in ("bias", "mask") and x.shape[dim] == 1)
        return PartitionSpec() if whole else PartitionSpec(*[None] * (x.ndim + dim), split)

    out = PartitionSpec(*[None] * (query.ndim - 3), split)
    mapped = jax.shard_map(
        lambda arrays: local(static | arrays),
        mesh=mesh,
        axis_names=set(axes),
        in_specs=({name: spec(name) for name in names},),
        out_specs=(out, out) if with_lse else out,
    )
    # Outside of jit shard_map takes no arrays that its other axes split.
    return jax.jit(mapped)(arrays)


def _mesh(query: jax.Array):
    """Finds the mesh of an array, or that which is set."""
    around = jax.sharding.get_abstract_mesh()
    return jax.typeof(query).sharding.mesh if around.empty else around
