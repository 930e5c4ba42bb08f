"""Owns what a function of scores has in common along a diagonal: what it reads there is read once.

Along a diagonal of the scores key - query is one number, and so is what is computed of it, of the
batch row and of the head: an element of a table of relative positions for instance. `cut` makes
two programs of one. The first is evaluated once for each of the t + s - 1 diagonals of a tile; the
other for each of the t * s pairs, and gets what the first gave, spread along the diagonals.

The gradient of a table is then a sum along diagonals, one pass over the tile, of which t + s - 1
sums are added to the table. Pair by pair a tile has t * s additions to few addresses, which a GPU
makes one after another.

`_gpu/distances.py` finds something else: functions that add lines of the distance.
Read next: `_visible.py`, which evaluates both programs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Container, Sequence

import jax
import jax.numpy as jnp

from jax_flash import _visible
from jax_flash._program import Aval, Constant, Program, Step, Value


def of_tile(
    program: Program,
    moving: tuple[int, int],
    visible: jax.Array,
    arguments: Sequence[jax.Array],
    captures: Sequence[jax.Array],
) -> jax.Array:
    """Computes the first result of `_visible.of_tile`: the same values and derivatives.

    Arguments:
      program: its inputs are scalars, the score first, then arrays.
      moving: which of the scalars are the query's and the key's index. They count up by one along
        dims -3 and -1 of the tile, and are the same along the others.
      visible, arguments, captures: as there; the first argument has the tile's shape.
    """
    tile = arguments[0].shape
    parts = cut(program, len(arguments), moving)
    if parts is None:
        return _visible.of_tile(program, tile, visible, arguments, captures)[0]
    edge = list(arguments)
    edge[moving[0]], edge[moving[1]] = _edge(*(arguments[i] for i in moving))
    scalars, arrays = parts.diagonal.take(edge, captures)
    leading = [(*x.shape[:-1], 1, 1, 1, 1) for x in arrays]
    shape = jnp.broadcast_shapes(*(x.shape for x in scalars), *leading)
    seen = _seen(visible, shape, tile)
    found = _visible.of_tile(parts.diagonal.program, shape, seen, scalars, arrays)
    # The sums of a diagonal are made before they are added to an array: else XLA may let one thread
    # sum each.
    found = jax.lax.optimization_barrier(found)
    spread = [_spread(x, tile) for x in found]
    scalars, arrays = parts.pair.take([*arguments, *spread], captures)
    return _visible.of_tile(parts.pair.program, tile, visible, scalars, arrays)[0]


# ---- a program in two ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """A program of some scalars and arrays out of more: which, in order, and what it computes."""

    scalars: tuple[int, ...]
    arrays: tuple[int, ...]
    program: Program

    def take(
        self, scalars: Sequence[jax.Array], arrays: Sequence[jax.Array]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        return [scalars[i] for i in self.scalars], [arrays[i] for i in self.arrays]


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
    """What is computed for each diagonal; and for each pair, of the same and of these results.

    The results are scalars, and follow the scalars of the program that was cut.
    """

    diagonal: Part
    pair: Part


@functools.lru_cache(maxsize=256)  # programs are equal to themselves alone
def cut(program: Program, scalars: int, moving: tuple[int, int]) -> Parts | None:
    """Cuts a program, where key - query decides what is read of an array, or computed with one.

    Operations of numbers alone are left to the pairs: they cost less than to spread their results.

    Arguments:
      program: its first input is the score.
      scalars: how many of the inputs are scalars; arrays follow.
      moving: which inputs are the query's and the key's index.
    """
    avals = [*program.inputs, *(aval for step in program.steps for aval in step.avals)]
    moves = _moves(program, moving)
    of_tokens, of_arrays = set(moving), set()  # the values that depend on either index
    for step in program.steps:
        read = [x for x in step.inputs if isinstance(x, int)]
        if of_tokens.isdisjoint(read):
            continue
        of_tokens.update(step.outputs)
        given = [avals[x].shape if isinstance(x, int) else x.value.shape for x in step.inputs]
        has_arrays = any(given) or any(aval.shape for aval in step.avals)
        if has_arrays or not of_arrays.isdisjoint(read):
            of_arrays.update(step.outputs)
    shared = {x for x in of_arrays if moves[x] == 0 and not avals[x].shape}
    inputs = range(len(program.inputs))
    _, read = _steps_of(program, program.results, {*inputs, *shared})
    found = sorted(shared & read)
    if not found:
        return None
    given = [*inputs[:scalars], *found, *inputs[scalars:]]
    return Parts(
        diagonal=_part(program, avals, inputs, scalars, found),
        pair=_part(program, avals, given, scalars + len(found), program.results),
    )


def _moves(program: Program, moving: tuple[int, int]) -> dict[int, int | None]:
    """Tells by how much each value grows where query and key both do by 1; None: not known.

    What depends on integers that grow is known for their sums and multiples alone, which keep it
    modulo 2^bits. Floats of the two indices are none: from 2^24 on they would be rounded.
    """
    moves: dict[int, int | None] = dict.fromkeys(range(len(program.inputs)), 0)
    moves |= {0: None} | dict.fromkeys(moving, 1)  # the score is another one at each pair
    for step in program.steps:
        read = [moves[x] if isinstance(x, int) else 0 for x in step.inputs]
        known = [x for x in read if x is not None]
        move = _move(step, known) if len(known) == len(read) else None
        moves.update(dict.fromkeys(step.outputs, move))
    return moves


def _move(step: Step, read: Sequence[int]) -> int | None:
    if not any(read):
        return 0
    match step.primitive.name:
        case "add":
            return read[0] + read[1]
        case "sub":
            return read[0] - read[1]
        case "neg":
            return -read[0]
        case "mul":
            for x, move in zip(step.inputs, reversed(read), strict=True):
                if isinstance(x, Constant) and not x.value.shape:
                    return int(x.value) * move
    return None


def _steps_of(
    program: Program, results: Sequence[Value], given: Container[int]
) -> tuple[list[Step], set[int]]:
    """Lists the steps that compute results of what is given, and all that is read or returned."""
    read = {x for x in results if isinstance(x, int)}
    steps: list[Step] = []
    for step in reversed(program.steps):
        if any(x in read and x not in given for x in step.outputs):
            read.update(x for x in step.inputs if isinstance(x, int))
            steps.insert(0, step)
    return steps, read


def _part(
    program: Program,
    avals: Sequence[Aval],
    given: Sequence[int],
    scalars: int,
    results: Sequence[Value],
) -> Part:
    """Makes a program of the steps from what is given, of which `scalars` are no arrays."""
    steps, read = _steps_of(program, results, set(given))
    taken = [i for i, x in enumerate(given) if x in read]
    index = {given[i]: place for place, i in enumerate(taken)}
    inputs = tuple(avals[given[i]] for i in taken)

    def renamed(values: Sequence[Value]) -> tuple[Value, ...]:
        return tuple(index[x] if isinstance(x, int) else x for x in values)

    made, count = [], len(inputs)
    for step in steps:
        own = renamed(step.inputs)
        outputs = tuple(range(count, count + len(step.outputs)))
        count += len(outputs)
        index = dict(zip(step.outputs, outputs, strict=True)) | index  # what is given comes first
        made.append(dataclasses.replace(step, inputs=own, outputs=outputs))
    return Part(
        scalars=tuple(i for i in taken if i < scalars),
        arrays=tuple(i - scalars for i in taken if i >= scalars),
        program=Program(inputs, tuple(made), renamed(results)),
    )


# ---- diagonals of a tile -------------------------------------------------------------------------
#
# They are counted from that of the last query and the first key. Rows of t + s have one more than
# there are, so that one row of them after another is one element ahead: a row of t + s - 1 then
# begins one diagonal earlier than the row before.


def _edge(query: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Lists a pair of each diagonal, from the tile's first column and row, and the last again.

    Arguments:
      query: `[..., t, 1, 1]`.
      key: `[..., 1, 1, s]`.

    Returns: both `[..., 1, 1, t + s]`.
    """
    query = jnp.swapaxes(query, -3, -1)
    t, s = query.shape[-1], key.shape[-1]
    rows = jnp.broadcast_to(query[..., :1], (*query.shape[:-1], s))
    columns = jnp.broadcast_to(key[..., :1], (*key.shape[:-1], t - 1))
    queries = jnp.concatenate([jnp.flip(query, -1), rows], axis=-1)
    return queries, jnp.concatenate([columns, key, key[..., -1:]], axis=-1)


def _spread(x: jax.Array, tile: Sequence[int]) -> jax.Array:
    """Gives each pair what its diagonal has.

    Arguments:
      x: `[*B, K, 1, G, t + s]`, any of *B, and of K and G, 1.
      tile: `[*B, K, t, G, s]`.

    Returns: `[*B, K, t, G, s]`, with 1 where x has it.
    """
    *_, t, _, s = tile
    x = jnp.swapaxes(x, -3, -2)
    lead = x.shape[:-2]
    rows = jnp.broadcast_to(x, (*lead, t, t + s)).reshape(*lead, t * (t + s))
    rows = rows[..., t - 1 : t - 1 + t * (t + s - 1)].reshape(*lead, t, t + s - 1)
    return jnp.swapaxes(rows[..., :s], -3, -2)


def _seen(visible: jax.Array, shape: Sequence[int], tile: Sequence[int]) -> jax.Array:
    """Tells of which diagonals any pair is visible, for all that share what `shape` says.

    Arguments:
      visible: bool, broadcasts to the tile.
      shape: `[*B, K, 1, G, t + s]`, any of *B, and of K and G, 1.
      tile: `[*B, K, t, G, s]`.

    Returns: bool, broadcasts to `shape`.
    """
    *_, t, _, s = tile
    others = [i for i, n in enumerate(shape) if n == 1 and i != len(shape) - 3]
    visible = jnp.any(visible, axis=others, keepdims=True)
    if visible.shape[-3] == visible.shape[-1] == 1:
        return visible
    x = jnp.swapaxes(visible, -3, -2)
    *lead, _, _ = x.shape
    nothing = [(0, 0)] * len(lead)
    rows = jnp.broadcast_to(x, (*lead, t, s))
    rows = jnp.pad(rows, [*nothing, (0, 0), (0, t - 1)]).reshape(*lead, t * (t + s - 1))
    rows = jnp.pad(rows, [*nothing, (t - 1, 1)]).reshape(*lead, t, t + s)
    return jnp.swapaxes(jnp.any(rows, axis=-2, keepdims=True), -3, -2)
