"""Evaluates a program at the pairs of a tile, of which some are hidden and have no derivative.

The slope of a hidden pair may be NaN, and so is zero times it: `jnp.where` keeps each operand from
it. Where a tile is evaluated, values vary along the dims of what they depend on, and no further: a
row `table[key]` along the keys. A row is kept where all of its pairs are hidden, which leaves it
that small; scalars are kept pair by pair. So a scalar may have two forms, of rows, for steps that
read or give arrays, and of pairs. What is kept is 1 among rows, whose logarithm and inverse exist.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_flash import _platform
from jax_flash._program import Program, Value, bind
from jax_flash._varying import vary_over

Dims = frozenset[int]  # of a tile


@dataclasses.dataclass(frozen=True, eq=False)
class Visible:
    """Which pairs count.

    Attributes:
      of_inputs: the dims along which each input of a program varies.
      masks: bools by dims, those of the whole tile first: is any pair along the other dims visible?
    """

    of_inputs: tuple[Dims, ...]
    masks: Mapping[Dims, Any]

    @property
    def pair(self) -> Any:
        return next(iter(self.masks.values()))

    def dims(self, inputs: Iterable[int]) -> Dims:
        """Returns the dims along which a value varies that depends on these inputs."""
        return frozenset().union(*(self.of_inputs[i] for i in inputs))

    def row(self, inputs: Iterable[int]) -> Any:
        """Tells it of such a value; as for pairs where `masks` do not."""
        return self.masks.get(self.dims(inputs), self.pair)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is known of a program.

    Attributes:
      arrays: of each step, whether it reads or gives arrays.
      two: of each value, whether it has two forms.
      needed: values with the forms that are read: True for that of rows.
      rows: what is kept as a row, with the inputs that it depends on.
      reads: of float arrays among the inputs, what the indices of each read depend on.
    """

    arrays: tuple[bool, ...]
    two: tuple[bool, ...]
    needed: frozenset[tuple[int, bool]]
    rows: Mapping[int, frozenset[int]]
    reads: Mapping[int, tuple[frozenset[int], ...]]


@functools.lru_cache(maxsize=256)  # programs are equal to themselves alone
def _plan(program: Program) -> _Plan:
    avals = list(program.inputs)
    depends = [frozenset([i]) for i in range(len(avals))]
    two = [aval.is_float and not aval.shape for aval in avals]
    arrays, made = [], {i for i, aval in enumerate(avals) if not aval.shape}
    for step in program.steps:
        read = [x for x in step.inputs if isinstance(x, int)]
        shapes = [avals[x].shape if isinstance(x, int) else x.value.shape for x in step.inputs]
        arrays.append(any(shapes) or any(aval.shape for aval in step.avals))
        avals += step.avals
        for aval in step.avals:
            depends.append(frozenset().union(*(depends[x] for x in read)))
            scalar = aval.is_float and not aval.shape
            two.append(scalar if arrays[-1] else any(two[x] for x in read))
        if arrays[-1]:
            made.update(step.outputs)
    needed = {(x, False) for x in program.results if isinstance(x, int)}
    for step, of_arrays in zip(reversed(program.steps), reversed(arrays), strict=True):
        read = [x for x in step.inputs if isinstance(x, int)]
        for form in {form for at, form in needed if at in step.outputs}:
            needed |= {(x, two[x] and (form or of_arrays)) for x in read}
    rows = {
        at: depends[at]
        for at in sorted(made)
        if avals[at].is_float and (avals[at].shape or (at, True) in needed)
    }
    return _Plan(tuple(arrays), tuple(two), frozenset(needed), rows, _reads(program, depends))


def _reads(
    program: Program, depends: Sequence[frozenset[int]]
) -> Mapping[int, tuple[frozenset[int], ...]]:
    found: dict[int, tuple[frozenset[int], ...]] = {}
    for step in program.steps:
        array, *indices = step.inputs
        if step.primitive.name in ("dynamic_slice", "gather") and isinstance(array, int):
            of = frozenset().union(*(depends[x] for x in indices if isinstance(x, int)))
            found[array] = (*found.get(array, ()), of)
    return {i: found[i] for i, aval in enumerate(program.inputs) if aval.is_float and i in found}


def rows(program: Program) -> Iterable[frozenset[int]]:
    """Lists what the rows depend on of which `evaluate` asks whether they are visible."""
    by_rule = program.custom == {"custom_jvp_call"}
    return _plan(program.opened if by_rule else program).rows.values()


def evaluate(program: Program, inputs: Sequence[Any], visible: Visible) -> list[Any]:
    """Computes the results of a pair; where it is hidden they mean nothing, and have no derivative.

    Arguments:
      inputs: arrays of the program's shapes.
      visible: of this pair.
    """
    if program.custom == {"custom_jvp_call"}:
        return _evaluate_by_rule(program, inputs, visible)
    plan = _plan(program)
    values: dict[tuple[int, bool], Any] = {}

    def put(at: int, x: Any) -> None:
        """Stores a value that has been read, or computed from arrays."""
        if plan.two[at] and (at, False) in plan.needed:
            values[at, False] = jnp.where(visible.pair, x, jnp.zeros_like(x))
        if at in plan.rows:
            x = jnp.where(visible.row(plan.rows[at]), x, jnp.ones_like(x))
        values[at, plan.two[at]] = x

    def read(x: Value, form: bool) -> Any:
        return values[x, plan.two[x] and form] if isinstance(x, int) else vary_over(x.value, inputs)

    for i, x in enumerate(inputs):
        put(i, x)
    for step, arrays in zip(program.steps, plan.arrays, strict=True):
        forms = [x for x in (False, True) if any((at, x) in plan.needed for at in step.outputs)]
        for form in forms[:1] if arrays else forms:
            operands = [read(x, form or arrays) for x in step.inputs]
            results = bind(step.primitive, operands, step.params)
            for at, x in zip(step.outputs, results, strict=True):
                if arrays:
                    put(at, x)
                else:
                    values[at, form] = x
    return [read(x, False) for x in program.results]


def _evaluate_by_rule(program: Program, inputs: Sequence[Any], visible: Visible) -> list[Any]:
    """Evaluates a program with custom_jvp by programs of its derivatives, to any order.

    The jaxprs of custom_jvp say of their results how they vary over devices, from where they were
    traced, and a tile is elsewhere. With custom_vjp there is no such program.
    """
    dims = visible.of_inputs
    floats = [i for i, aval in enumerate(program.inputs) if aval.is_float]

    def of(masks: Sequence[Any], *more: Dims) -> Visible:
        return Visible((*dims, *more), dict(zip(visible.masks, masks, strict=True)))

    @jax.custom_jvp
    def value(masks, *inputs):
        return evaluate(program.opened, inputs, of(masks))

    @value.defjvp
    def _(primals, tangents):
        masks, *inputs = primals
        moving = [tangents[1 + i] for i in floats]
        both = of(masks, *(dims[i] for i in floats))
        results = evaluate(program.moved, [*inputs, *moving], both)
        return evaluate(program.ruled, inputs, of(masks)), results[len(program.results) :]

    return value(tuple(visible.masks.values()), *inputs)


def of_tile(
    program: Program,
    tile: Sequence[int],
    visible: jax.Array,
    arguments: Sequence[jax.Array],
    captures: Sequence[jax.Array],
) -> list[jax.Array]:
    """Computes results, all scalars, for the pairs of a tile; where hidden they mean nothing.

    No derivative of a hidden pair reaches an argument or a captured array.

    Arguments:
      program: its inputs are the arguments, then the arrays.
      tile: `[*B, K, t, G, s]`.
      visible: bool, broadcasts to the tile.
      arguments: the scalars, each of which broadcasts to the tile.
      captures: `[*B, elements]`, any of *B 1.

    Returns: each of the tile's shape.
    """

    def varies(shape: Sequence[int]) -> Dims:
        return frozenset(axis for axis, size in enumerate(shape) if size != 1)

    def inputs_of(captures: Sequence[jax.Array]) -> tuple[Dims, ...]:
        shapes = (*(x.shape for x in arguments), *(x.shape[:-1] for x in captures))
        return tuple(map(varies, shapes))

    seen = {varies(tile): visible}
    captures = _copies(program, tile, Visible(inputs_of(captures), seen), captures)
    where = Visible(inputs_of(captures), seen)
    for dims in map(where.dims, rows(program)):
        if dims not in seen:
            others = [axis for axis in range(len(tile)) if axis not in dims]
            seen[dims] = jnp.any(visible, axis=others, keepdims=True)
    operands = [*seen.values(), *arguments, *captures]
    operands = vary_over(operands, operands)
    masks, captured = len(seen), len(operands) - len(captures)
    # The dims of the tile along which each operand varies; the others are dropped.
    mapped, reduced = [], []
    for i, x in enumerate(operands):
        dims = x.shape if i < captured else x.shape[:-1]
        mapped.append(varies(dims))
        reduced.append(x.reshape(*(n for n in dims if n != 1), *x.shape[len(dims) :]))

    def of_pair(*operands):
        inputs = [x.reshape(y.shape) for x, y in zip(operands[masks:], program.inputs, strict=True)]
        own = dict(zip(seen, operands[:masks], strict=True))
        return evaluate(program, inputs, Visible(where.of_inputs, own))

    function = of_pair
    for axis in reversed(range(len(tile))):
        axes = [0 if axis in dims else None for dims in mapped]
        if any(x is not None for x in axes):
            function = jax.vmap(function, in_axes=axes)
    sizes = [n for n in tile if n != 1]
    return [jnp.broadcast_to(x, sizes).reshape(tile) for x in function(*reduced)]


def _copies(
    program: Program, tile: Sequence[int], where: Visible, captures: Sequence[jax.Array]
) -> Sequence[jax.Array]:
    """Gives each key of a tile its own copy of an array that is read for each pair.

    The gradient of an array then is a sum of those of its copies. Without them it is as many
    additions as pairs to few addresses, which a GPU makes one after another.

    Returns: captures, some of them `[*B, 1, 1, 1, s, elements]`, no more than the tile has scores.
    """
    if not _platform.is_gpu():
        return captures
    by_pair = {len(tile) - 3, len(tile) - 1}
    copied = list(captures)
    first = len(program.inputs) - len(captures)
    for i, reads in _plan(program).reads.items():
        x = captures[i - first]
        few = _count(x.shape) <= _count(tile[:-1])
        if few and any(by_pair <= where.dims(of) for of in reads):
            shape = *x.shape[:-1], 1, 1, 1, tile[-1], x.shape[-1]
            copied[i - first] = jnp.broadcast_to(x[..., None, None, None, None, :], shape)
    return copied


def _count(shape: Sequence[Any]) -> int:
    """Multiplies the sizes that are known under jax.export."""
    return math.prod(n for n in shape if isinstance(n, int))
