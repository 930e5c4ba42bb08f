"""The public call: what it checks, which strategy it chooses, and shard_map around itself."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, Unpack, get_args, get_type_hints, overload

import jax
import jax.core
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jax_flash import _keywords, _validate
from jax_flash._call import dims
from jax_flash._problem import Problem
from jax_flash._sharding import axes_of_xla
from jax_flash._varying import varying_axes
from jax_flash.attention import Options, flash_attention
from jax_flash.context_parallel import all_gather, all_to_all, orders, ring
from jax_flash.context_parallel.orders import Layout
from jax_flash.context_parallel.shard import Operands, Shard, check_terms

Strategy = Literal["ring", "all_to_all", "all_gather"]
Order = Literal["contiguous", "zigzag", "striped"]
Axis = str | Sequence[str]

_STRATEGIES = {"ring": ring, "all_to_all": all_to_all, "all_gather": all_gather}
_SHORT = 1024  # keys of a device, for which a hop of a ring takes longer than it computes
_DEFAULTS: dict[str, Any] = {
    name: parameter.default
    for name, parameter in inspect.signature(flash_attention).parameters.items()
    if name in get_type_hints(Options) and name != "backend"
}


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


@overload
def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    axis_name: Axis,
    strategy: Strategy | None = None,
    order: Order = "contiguous",
    return_lse: bool,
    **options: Unpack[Options[ArrayLike]],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


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
    - None: "all_to_all" for dropout or a block mask that the order takes apart; "all_gather" where
      a window reaches neighbours alone, or a device has fewer than 1024 keys; "all_to_all" where
      is_causal meets order "contiguous", of which a ring's last device has all to do, and n divides
      N and K; else "ring".

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
        and sinks are the same on all devices of the axis, and so is block_mask, of the whole
        sequence before `reorder`. score_mod gets the indices of that sequence, and dropout has one
        device's pattern over it. But with "all_to_all", the tokens of dropout (of a block mask)
        stand in runs of a multiple of 16 (of its block): T / n in order "contiguous", half of it in
        "zigzag", none in "striped".

    Returns: out `[*B, T, N, Hv]`, split as query is; with return_lse also lse `[*B, T, N]`.

    Raises:
      TypeError, ValueError: as `flash_attention`; an axis that does not exist, or does not divide
        T, S or heads, with both numbers; another strategy or order; a query that is not split.
      NotImplementedError: as `flash_attention`; dropout or a block mask that another strategy than
        "all_to_all" cannot split.

    Examples:
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
    _keywords.check("attention", options, _DEFAULTS)
    arguments: dict[str, Any] = {**_DEFAULTS, **options}
    arguments |= {"query": query, "key": key, "value": value}
    for name in ("query", "key", "value"):
        arguments[name] = _validate.array(name, arguments[name])
    mesh = _mesh(arguments["query"], axes)
    split = set(axes) <= set(mesh.manual_axes)
    if split:
        _check_varying(arguments["query"], axes)
    problem, operands = _prepare(arguments, mesh, axes, order, split)

    def local(operands: Operands) -> tuple[jax.Array, jax.Array]:
        axis: Any = axes[0] if len(axes) == 1 else axes
        shard = Shard(problem, backend, operands, axis, Layout(order, _devices(mesh, axes)))
        out, lse = _attend(shard, axes, strategy)
        return out, jnp.swapaxes(lse, -1, -2)

    out, lse = _mapped(local, mesh, axes, split)(operands)
    return (out, lse) if with_lse else out


# ---- arguments -----------------------------------------------------------------------------------


def _axes(axis_name: Any) -> tuple[str, ...]:
    axes: tuple[str, ...] = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    if len(set(axes)) != len(axes) or len(axes) not in (1, 2):
        raise ValueError(
            f"axis_name is {axis_name!r}; expected the name of a mesh axis, or two: (outer, inner)"
        )
    return axes


def _mesh(query: jax.Array, axes: tuple[str, ...]) -> AbstractMesh:
    """Finds the mesh of the enclosing shard_map, or that which is set, or else of an array."""
    around = jax.sharding.get_abstract_mesh()
    mesh = jax.typeof(query).sharding.mesh if around.empty else around
    for axis in axes:
        if axis not in mesh.axis_names:
            names = f"mesh axes {mesh.axis_names}" if mesh.axis_names else "no mesh"
            raise ValueError(
                f"axis_name names {axis!r}, and query has {names}; expected an axis of the mesh of "
                "the enclosing shard_map, of jax.set_mesh(mesh), or that query is placed on"
            )
    if len({axis in mesh.manual_axes for axis in axes}) > 1:
        raise ValueError(
            f"axis_name is {axes} inside of a shard_map over {mesh.manual_axes} alone; expected "
            "both axes in it, or none"
        )
    return mesh


def _devices(mesh: AbstractMesh, axes: Sequence[str]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _check_varying(query: jax.Array, axes: tuple[str, ...]) -> None:
    if not varying_axes(lax.axis_index(axes)):  # shard_map without check_vma does not tell
        return
    for axis in axes:
        if axis not in varying_axes(query):
            raise ValueError(
                f"query is the same on all devices of axis {axis!r}; expected it split along T, "
                f"dim {query.ndim - 3}, for example by in_specs of shard_map"
            )


def _prepare(
    arguments: dict[str, Any], mesh: AbstractMesh, axes: tuple[str, ...], order: str, split: bool
) -> tuple[Problem, Operands]:
    """Checks the arguments and brings them to the form of the primitives, by name.

    They are one device's where they are split already.
    """
    shards = _devices(mesh, axes)
    layout = Layout(order, shards)
    given = dict(arguments)
    for name, letter in (("query", "T"), ("key", "S")):
        x = arguments[name]
        if x.ndim < 3:
            continue  # for `prepare` to say
        size = x.shape[-3]
        orders.check_divides(
            order, shards, f"{letter} of {name}", size * shards if split else size, x.shape
        )
    names = {"query_positions": "query", "key_value_positions": "key"}
    if any(given[name] is not None for name in names):
        for name, of in names.items():
            if given[name] is None:
                *batch, length = arguments[of].shape[:-2]
                if split:
                    indices = layout.indices(lax.axis_index(axes), length)
                else:
                    indices = orders.reorder(jnp.arange(length, dtype=jnp.int32), order, shards, 0)
                given[name] = jnp.broadcast_to(indices, (*batch, length))
    problem, operands, *_ = _validate.prepare(**given, shards=shards if split else 1)
    check_terms(problem)
    return problem, dict(zip(("q", "k", "v", *problem.optional), operands, strict=True))


# ---- under jit -----------------------------------------------------------------------------------


def _mapped(
    local: Callable[..., Any], mesh: AbstractMesh, axes: tuple[str, ...], split: bool
) -> Callable[..., Any]:
    """Maps a function of operands over the axes, unless it is already, and over explicit ones.

    The axes in Auto mode stay with XLA, which alone knows what is split over them.
    """
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = {name for name, kind in kinds if kind == AxisType.Explicit}
    names = explicit if split else explicit | set(axes)
    if not names:
        return local

    def mapped(operands):
        specs = _specs(operands, mesh, () if split else axes)
        placed = {name: _reshard(x, specs[name], mesh, explicit) for name, x in operands.items()}
        function = jax.shard_map(
            local,
            mesh=_concrete(operands["q"], mesh, names),
            axis_names=names,
            in_specs=(specs,),
            out_specs=(specs["q"], PartitionSpec(*specs["q"][:-1])),
        )
        # Outside of jit shard_map takes no arrays that its other axes split.
        return jax.jit(function)(placed)

    return mapped


def _concrete(query: jax.Array, mesh: AbstractMesh, names: set[str]) -> Mesh | AbstractMesh | None:
    """Finds what shard_map takes for a mesh: None for the one around it."""
    if not jax.sharding.get_abstract_mesh().empty:
        return None
    if not isinstance(query, jax.core.Tracer):
        own = query.sharding.mesh if isinstance(query.sharding, NamedSharding) else mesh
        if isinstance(own, Mesh):
            return own
    if names != set(mesh.axis_names):
        raise ValueError(
            f"attention under jit with the mesh axes {mesh.axis_names} needs to know their devices "
            "to leave some to XLA; expected `with jax.set_mesh(mesh):` around the program"
        )
    return mesh


def _specs(
    operands: Operands, mesh: AbstractMesh, axes: tuple[str, ...]
) -> dict[str, PartitionSpec]:
    """Chooses how operands are split: sequences over `axes`, all else as query's type says."""
    q = operands["q"]
    own = [_names(x) for x in jax.typeof(q).sharding.spec]
    own += [()] * (q.ndim - len(own))
    *batch, sequence, heads, _ = own
    if sequence not in ((), axes):
        raise ValueError(
            f"query is split over {sequence} along T, dim {q.ndim - 3}; expected axis_name, {axes}"
        )
    devices, kv_heads = _devices(mesh, heads), operands["k"].shape[-2]
    if kv_heads % devices:
        raise ValueError(
            f"key has {kv_heads} heads, which the {devices} devices of {heads} that split query's "
            f"do not divide; expected a multiple of {devices}"
        )

    def spec(name: str, x: jax.Array) -> PartitionSpec:
        letters = dims(name)
        leading = x.ndim - len(letters)
        split = {"T": axes, "S": () if name in ("bias", "mask") else axes, "N": heads, "K": heads}
        parts = [*batch[:leading], *(split.get(letter, ()) for letter in letters)]
        parts = [() if size == 1 else part for size, part in zip(x.shape, parts, strict=True)]
        return PartitionSpec(*(part[0] if len(part) == 1 else part or None for part in parts))

    return {name: spec(name, x) for name, x in operands.items()}


def _names(part: Any) -> tuple[str, ...]:
    return (part,) if isinstance(part, str) else tuple(part or ())


def _reshard(
    x: jax.Array, spec: PartitionSpec, mesh: AbstractMesh, explicit: set[str]
) -> jax.Array:
    """Brings an array to a spec as far as its axes are explicit: shard_map takes none else."""
    if not explicit:
        return x
    kept = ([name for name in _names(part) if name in explicit] for part in spec)
    wanted = PartitionSpec(*(tuple(names) or None for names in kept))
    return jax.sharding.reshard(x, NamedSharding(mesh, wanted))


# ---- on one device -------------------------------------------------------------------------------


def _attend(shard: Shard, axes: tuple[str, ...], strategy: str | None):
    sizes = [lax.axis_size(axis) for axis in axes]
    q_heads, kv_heads = (shard.operands[name].shape[-2] for name in ("q", "k"))
    refused = all_to_all.refuse(q_heads, kv_heads, math.prod(sizes))
    indivisible = shard.refuse(together=1 if len(axes) == 1 else sizes[1])
    if indivisible and strategy != "all_to_all" and (strategy or refused):
        raise NotImplementedError(
            f"{indivisible}; expected another order, longer or padded sequences, or strategy "
            f"'all_to_all'{f': {refused}' if refused else ''}"
        )
    if strategy == "all_to_all" or indivisible:
        if refused:
            raise ValueError(f"{refused}; 'ring' and 'all_gather' take any number of heads")
        return all_to_all.attend(shard)
    if len(axes) == 1:
        return _STRATEGIES[strategy or _choose(shard, refused)].attend(shard)
    outer, inner = axes
    refused_inside = all_to_all.refuse(q_heads, kv_heads, sizes[1])
    if refused_inside:
        raise ValueError(f"{refused_inside}, which axis {inner!r}, the inner of two, always does")
    exchanged = all_to_all.exchange(shard, inner, outer)
    chosen = strategy or _choose(exchanged, "its heads are split already")
    results = _STRATEGIES[chosen].attend(exchanged)
    return all_to_all.give_back(shard.layout, inner, *results)


def _choose(shard: Shard, refused: str | None) -> str:
    """Chooses a strategy, as `attention` documents; `refused`: why it is not "all_to_all"."""
    if all_gather.reaches_neighbours(shard):
        return "all_gather"
    if axes_of_xla(jax.sharding.get_abstract_mesh()):
        return "ring"  # XLA gathers over other axes for any collective but a permutation
    if shard.kv_len < _SHORT:
        return "all_gather"
    causal = shard.problem.window[1] == 0
    if causal and shard.layout.order == "contiguous" and not refused:
        return "all_to_all"
    return "ring"
