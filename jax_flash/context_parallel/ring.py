"""Strategy "ring": keys and values travel from device to device while each computes.

A device attends to its own keys, then to those that arrive, and merges what it gets by lse. Keys
travel both ways at once, so that the farthest makes half of the way around; with a window only as
far as some query sees. Each hop is sent before the kernels of the hop before it run, and hops are
unrolled, so that XLA overlaps the two. What a device cannot see of the keys that arrive, by where
they stand, it does not compute: whole shards, or halves of them in order "zigzag".

The derivative is a ring of its own: keys and values travel the same way, and the gradients of each
step go straight home, those of the last step beside a part of the device's own step. Each step's
kernels get out and lse over all keys, so that its weights are those of the whole softmax: no step
keeps anything for the backward pass.

Sums of several steps are in float32. Results of one step have the dtype that the kernels gave them,
so that fewer bytes travel, and are read and written between steps.

Liu, Zaharia and Abbeel, Ring Attention with Blockwise Transformers (arXiv:2310.01889).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_flash import _ops
from jax_flash._merge import combine
from jax_flash._problem import Problem
from jax_flash._terms import is_capture, sum_dtype
from jax_flash._varying import vary_over
from jax_flash.context_parallel.orders import Layout
from jax_flash.context_parallel.reach import Reach
from jax_flash.context_parallel.shard import ALL, Operands, Shard, cut

_TRAVELLING = ("k", "v", "key_value_segments", "key_value_positions")
_FLOATS = ("q", "k", "v", "bias", "sinks")


def attend(shard: Shard) -> tuple[jax.Array, jax.Array]:
    """Computes a shard's out `[*B, T, N, Hv]` and lse `[*B, N, T]`."""
    shard = shard.vary()
    floats = {name: x for name, x in shard.operands.items() if _is_float(name, x)}
    rest = {name: x for name, x in shard.operands.items() if name not in floats}
    return _attend(_Ring.of(shard), floats, rest)


def _is_float(name: str, x: jax.Array) -> bool:
    """Tells what may have a gradient."""
    return name in _FLOATS or (is_capture(name) and jnp.issubdtype(x.dtype, jnp.floating))


# ---- what is known, and what a step reads --------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Ring:
    """What is known of a ring when it is traced: a shard without its arrays.

    Attributes:
      own_by_index: a shard's own keys stand to its queries as their indices do.
      rest_whole: of what arrives, the pieces to compute are visible as a whole.
      own_halves: the own step's keys are computed by halves, backward.
    """

    problem: Problem
    backend: str | None
    axis: Any
    layout: Layout
    reach: Reach
    own_by_index: bool
    rest_whole: bool
    own_halves: bool

    @classmethod
    def of(cls, shard: Shard) -> "_Ring":
        layout, window = shard.layout, shard.problem.window
        offset = None if shard.positioned else shard.offset
        same = offset == 0 and shard.q_len == shard.kv_len
        causal, half = window == (None, 0), shard.kv_len // 2
        by_index, full = same and (causal or layout.order == "contiguous"), window == (None, None)
        units = (layout.block, *shard.units().values())
        cuts = half > 0 and not any(half % unit for unit in units)
        return cls(
            shard.problem,
            shard.backend,
            shard.axis,
            layout,
            Reach(layout, shard.q_len, shard.kv_len, window, offset),
            own_by_index=by_index,
            rest_whole=same and causal and layout.order != "striped",
            own_halves=cuts and (full or (causal and by_index)),
        )

    @property
    def own_parts(self) -> list[tuple[slice, slice]]:
        """Rows and keys of the own step's parts, backward: one ahead of the others, one after them.

        The gradients of the last step travel home beside the latter. Causal, that is a quarter of
        the own step.
        """
        if not self.own_halves or self.reach.hops() == (0, 0):
            return [(ALL, ALL)]
        half = self.reach.kv_len // 2
        rest = slice(half, self.reach.kv_len)
        return [(ALL, slice(0, half)), (ALL if self.is_full else rest, rest)]

    @property
    def is_full(self) -> bool:
        """Whether each query sees all keys, by where they stand."""
        return self.problem.window == (None, None)

    def shard(self, operands: Operands) -> Shard:
        return Shard(self.problem, self.backend, operands, self.axis, self.layout)


class _Step:
    """One device's queries, rows of them, and keys of one source: the operands of one call."""

    def __init__(self, ring: _Ring, operands: Operands):
        self.ring = ring
        self.shard = ring.shard(operands)
        self.operands, self.mine = operands, self.shard.query_terms()
        self.rank = self.shard.rank

    def calls(self, rows: slice, keys: slice, own: bool = False) -> list[tuple[slice, slice]]:
        """Lists the calls, of rows and keys, that a piece takes; own: of the device's own keys."""
        shard = self.shard
        return [
            (row, key)
            for row in shard.runs(rows, shard.q_len)
            for key in shard.runs(keys, shard.kv_len)
            if not own or self.ring.reach.own(row, key)
        ]

    def call(
        self,
        held: Operands,
        source: Any,
        own: bool,
        rows: slice,
        keys: slice,
        **terms: jax.Array,
    ) -> tuple[Problem, list[jax.Array], Operands]:
        """Returns the problem of a step, its q, k and v, and what else it reads, these among it."""
        ring, shard = self.ring, self.shard
        aligned = ring.is_full or (rows.start or 0) == (keys.start or 0)
        by_index = own and ring.own_by_index and aligned
        whole = not own and ring.rest_whole
        terms |= self.mine
        for name in ("bias", "mask"):
            if name in self.operands:
                x = self.operands[name]
                if x.shape[-1] > 1:
                    x = lax.dynamic_slice_in_dim(x, source * shard.kv_len, shard.kv_len, x.ndim - 1)
                terms[name] = x
        if "block_numbers" in terms:
            terms["block_numbers"] = shard.layout.part(terms["block_numbers"], source, -1)
        if "key_value_lengths" in self.operands:
            lengths = self.operands["key_value_lengths"]
            terms["key_value_lengths"] = shard.layout.count(lengths, source, shard.kv_len)
        if "key_value_segments" in held:
            terms["key_value_segments"] = held["key_value_segments"]
        if by_index or whole:
            terms.pop("query_positions", None)
        elif "query_positions" in terms:
            if shard.positioned:
                standing = held["key_value_positions"]
            else:
                indices = shard.layout.indices(source, shard.kv_len)
                standing = jnp.broadcast_to(indices, (*held["k"].shape[:-3], shard.kv_len))
            terms["key_value_positions"] = standing
        problem, given = shard.call(
            shard.tokens(self.rank, shard.q_len, rows),
            shard.tokens(source, shard.kv_len, keys),
            **shard.cut_terms(terms, rows, keys),
        )
        if whole:
            problem = dataclasses.replace(problem, window=(None, None))
        q = cut(self.operands["q"], rows, -3)
        return problem, [q, *(cut(held[name], keys, -3) for name in ("k", "v"))], given


def _travel(ring: _Ring, held: Operands, state: Any, step: Callable[..., Any]) -> Any:
    """Sends keys around, and returns the state after `step(state, by, last, keys, source)` of each.

    Keys came `by` ranks from the device `source`. They go on while a step computes with them.
    """
    rank, n = lax.axis_index(ring.axis), ring.layout.shards
    ways = {way: hops for way, hops in zip((1, -1), ring.reach.hops(), strict=True) if hops}
    arriving = {way: send(held, ring.axis, n, way) for way in ways}
    order = [(hop, way) for hop in range(1, n) for way in ways if hop <= ways[way]]
    for hop, way in order:
        # Else XLA sends all hops ahead of the first kernel, and devices hold the keys of all.
        arriving, state = lax.optimization_barrier((arriving, state))
        keys = arriving.pop(way)
        if hop < ways[way]:
            arriving[way] = send(keys, ring.axis, n, way)
        last = (hop, way) == order[-1]
        state = step(state, way * hop, last, keys, (rank - way * hop) % n)
    return state


def send(tree: Any, axis: Any, shards: int, by: int) -> Any:
    """Sends arrays to the device `by` ranks on, around."""
    pairs = [(i, (i + by) % shards) for i in range(shards)]
    return jax.tree.map(lambda x: lax.ppermute(x, axis, pairs), tree)


# ---- forward -------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring: _Ring, floats: Operands, rest: Operands):
    return _forward(ring, floats | rest)


def _forward(ring: _Ring, operands: Operands) -> tuple[jax.Array, jax.Array]:
    step = _Step(ring, operands)
    dtype = jnp.dtype(ring.problem.sum_dtype)
    held = {name: operands[name] for name in _TRAVELLING if name in operands}

    def compute(held, source, own, rows, keys):
        problem, qkv, terms = step.call(held, source, own, rows, keys)
        out, lse = _ops.attend(problem, ring.backend, *qkv, *terms.values())
        return out, jnp.swapaxes(lse, -1, -2)

    def merged(calls, own, kind, result, held, source):
        for rows, keys in calls:
            part, part_lse = compute(held, source, own, rows, keys)
            out, lse = result
            before = cut(out, rows, -3).astype(dtype), cut(lse, rows, -2)
            new = combine(before, (part.astype(dtype), part_lse))
            result = _put(out, new[0], rows, -3), _put(lse, new[1], rows, -2)
        return result[0].astype(kind), result[1]

    pieces = [step.calls(*piece) for piece in ring.reach.pieces]
    if step.shard.by_runs:
        *lead, heads, _ = operands["q"].shape
        out = jnp.zeros((*lead, heads, operands["v"].shape[-1]), dtype)
        nothing = vary_over((out, jnp.full(out.shape[:-1], -jnp.inf, dtype)), operands)
        result = merged(step.calls(ALL, ALL, own=True), True, dtype, nothing, held, step.rank)
    else:
        result = compute(held, step.rank, True, ALL, ALL)

    def next_step(result, by, last, keys, source):
        # Wide between steps alone: the first reads, and the last writes, half of the bytes.
        kind = ring.problem.dtype if last and "sinks" not in operands else dtype
        steps = [functools.partial(merged, calls, False, kind) for calls in ([], *pieces)]
        return _switch(ring.reach.choose(step.rank, source), steps, result, keys, source)

    result = _travel(ring, held, result, next_step)
    out, lse = result
    if "sinks" in operands:
        sink = jnp.broadcast_to(operands["sinks"][..., None, :], lse.shape)
        out, lse = combine((out, lse), (jnp.zeros_like(out), sink))
    return out.astype(ring.problem.dtype), jnp.swapaxes(lse, -1, -2)


def _switch(chosen: Any, steps: list[Callable[..., Any]], state: Any, *operands: Any) -> Any:
    """Does one of the steps to the state, by its number."""
    if isinstance(chosen, int):
        return steps[chosen](state, *operands)
    return lax.switch(chosen, steps, state, *operands)


# ---- backward ------------------------------------------------------------------------------------


def _attend_forward(ring: _Ring, floats: dict[str, Any], rest: dict[str, Any]):
    wanted = tuple(name for name, x in floats.items() if x.perturbed)
    floats = {name: x.value for name, x in floats.items()}
    rest = {name: x.value for name, x in rest.items()}
    out, lse = _forward(ring, floats | rest)
    out, lse = checkpoint_name(out, "flash_out"), checkpoint_name(lse, "flash_lse")
    # The names are kept as the structure of a tree: residuals are arrays.
    return (out, lse), (floats, rest, out, lse, dict.fromkeys(wanted))


def _attend_backward(ring: _Ring, residuals, cotangents):
    floats, rest, out, lse, wanted = residuals
    dout, dlse = (
        None if isinstance(x, jax.custom_derivatives.SymbolicZero) else x for x in cotangents
    )
    if dout is None and dlse is None:
        return dict.fromkeys(floats), None
    dout = jnp.zeros_like(out) if dout is None else dout
    gradients = _backward(ring, floats | rest, out, lse, dout, dlse, tuple(wanted))
    return {name: gradients.get(name) for name in floats}, None


def _backward(ring: _Ring, operands: Operands, out, lse, dout, dlse, wanted) -> Operands:
    step = _Step(ring, operands)
    made = ("q", "k", "v", "bias", *ring.problem.captures)
    made = tuple(name for name in made if name in wanted)
    gradients = {}
    if "sinks" in wanted:
        gradients["sinks"] = _ops.sinks_gradient(operands["sinks"], out, lse, dout, dlse)
    if not made:
        return gradients

    def compute(held, source, own, rows, keys):
        # A sink is no part of what a step sees, but its row may see nothing else.
        sinks = {name: x for name, x in operands.items() if name == "sinks"}
        problem, qkv, terms = step.call(held, source, own, rows, keys, **sinks)
        call = _ops.Backward(problem, ring.backend, dlse is not None, made)
        given = [cut(out, rows, -3), cut(lse, rows, -1), cut(dout, rows, -3)]
        given += [] if dlse is None else [cut(dlse, rows, -1)]
        inputs = (*qkv, *given, *terms.values())
        results = _ops.flash_backward_p.bind(*vary_over(inputs, inputs), call=call)
        return dict(zip(made, results, strict=True))

    def nothing(name, dtype):
        return vary_over(jnp.zeros(operands[name].shape, dtype), operands)

    def add(name, total, part, rows, keys, source):
        """Adds a part to some rows or keys of a total, which is None before the first."""
        wide = sum_dtype(part.dtype)
        if is_capture(name):
            return part if total is None else total.astype(wide) + part.astype(wide)
        if name == "bias" and operands[name].shape[-1] > 1:
            # It has rows of all queries, and the keys of the source.
            total = nothing(name, wide) if total is None else total.astype(wide)
            first = source * step.shard.kv_len + (keys.start or 0)
            size = _size(keys, step.shard.kv_len)
            strip = lax.dynamic_slice_in_dim(total, first, size, total.ndim - 1)
            strip = _put(strip, cut(strip, rows, -2) + part.astype(wide), rows, -2)
            return lax.dynamic_update_slice_in_dim(total, strip, first, total.ndim - 1)
        where, axis = (keys, -3) if name in ("k", "v") else (rows, -2 if name == "bias" else -3)
        if total is None:
            return _put(nothing(name, part.dtype), part, where, axis)
        total = total.astype(wide)
        return _put(total, cut(total, where, axis) + part.astype(wide), where, axis)

    def added(calls, own, totals, held, source):
        for rows, keys in calls:
            parts = compute(held, source, own, rows, keys)
            totals = {
                name: add(name, totals.get(name), x, rows, keys, source)
                for name, x in parts.items()
            }
        return totals

    def stepped(calls, dtypes, totals, keys, source):
        totals = added(calls, False, totals, keys, source)
        return {
            name: totals[name].astype(dtype) if name in totals else nothing(name, dtype)
            for name, dtype in dtypes.items()
        }

    # Else XLA takes what travelled in the forward pass, and all devices keep all keys until now, or
    # it sends these keys ahead of the forward kernels.
    held = {name: operands[name] for name in _TRAVELLING if name in operands}
    held, lse, dout = lax.optimization_barrier((held, lse, dout))
    homes = tuple(name for name in made if name in ("k", "v"))
    own: list[tuple[slice, slice, Operands]] = []  # rows, keys, and the gradients of these

    def own_step(part, held, staying):
        for rows, keys in step.calls(*part, own=True):
            parts = compute(held, step.rank, True, rows, keys)
            own.append((rows, keys, {name: parts.pop(name) for name in homes}))
            staying = staying | {
                name: add(name, staying.get(name), x, rows, keys, step.rank)
                for name, x in parts.items()
            }
        return staying

    first, *after = ring.own_parts
    staying = own_step(first, held, {})
    # What one call made needs no more than its own dtype, and what is complete neither.
    narrow = () if step.shard.by_runs else homes
    pieces = [[], *(step.calls(*piece) for piece in ring.reach.pieces)]
    under_way: list[Operands] = []
    latest: Operands = {}

    def whole(back):
        return [(ALL, ALL, x) for x in back]

    def summed(home, back):
        for rows, keys, x in back:
            home = {name: add(name, home.get(name), x[name], rows, keys, None) for name in homes}
        return home

    def next_step(state, by, last, keys, source):
        nonlocal under_way, latest
        staying, home, back = state
        if len(back) > 1:  # two at once: the sum is read and written half as often
            home, back = summed(home, whole(back)), []
        dtypes = {name: sum_dtype(operands[name].dtype) for name in made}
        dtypes |= {name: operands[name].dtype for name in (*narrow, *(staying if last else ()))}
        steps = [functools.partial(stepped, calls, dtypes) for calls in pieces]
        totals = _switch(ring.reach.choose(step.rank, source), steps, staying, keys, source)
        # What the step before has sent travels beside this one, and is there at its end.
        parts = {name: totals[name] for name in homes}
        latest, arrived = lax.optimization_barrier((parts, under_way))
        under_way = [send(latest, ring.axis, ring.layout.shards, -by)]
        return {name: totals[name] for name in staying}, home, back + arrived

    staying, home, back = _travel(ring, held, (staying, {}, []), next_step)
    for part in after:
        held, staying, _ = lax.optimization_barrier((held, staying, latest))
        staying = own_step(part, held, staying)
    totals = staying | summed(home, [*whole(back + under_way), *own])
    return gradients | {name: x.astype(operands[name].dtype) for name, x in totals.items()}


_attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)


# ---- rows of arrays ------------------------------------------------------------------------------


def _size(part: slice, length: int) -> int:
    return length if part == ALL else part.stop - part.start


def _put(x: jax.Array, new: jax.Array, part: slice, axis: int) -> jax.Array:
    """Replaces what `cut` takes."""
    axis %= x.ndim
    if part == ALL or x.shape[axis] == 1:
        return new
    x = x.astype(new.dtype)
    parts = [lax.slice_in_dim(x, 0, part.start, axis=axis)] if part.start else []
    parts.append(new)
    if part.stop < x.shape[axis]:
        parts.append(lax.slice_in_dim(x, part.stop, x.shape[axis], axis=axis))
    return jnp.concatenate(parts, axis=axis)
