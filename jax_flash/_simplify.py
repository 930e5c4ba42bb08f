"""Rewrites of a call into one that means the same and costs less: one list, a function for each.

    softcap  a function of the scores that is a softcap is the term softcap
    window   a block mask that is a window is a window
    chunks   chunks of a block mask, of one length, are batch rows
    last     one query that stands at the last key has no causality
    layout   a block mask of whole blocks says that no block has bits ("cuda")
    lines    a function of the scores says which lines of the distance it adds ("cuda")

Each returns what takes the place of its argument, or None; its docstring says why values are the
same, but for rounding, and what it assumes. All but the last are tried in this order where the
arguments of a call are taken (`simplify`). The last depends on the sizes of one device and on the
function as vmap and context_parallel leave it: it is tried where kernels are planned (`_gpu.plan`).

`as_written` turns them off, those of block masks where a mask is made, too: for tests, which
compare, and for who suspects one of them. `explain` tells which were taken.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from jax_flash import _windows
from jax_flash._function import Function
from jax_flash._problem import SOFTCAPS, Problem, Shapes
from jax_flash._program import Constant, Step

if TYPE_CHECKING:
    from jax_flash._gpu.distances import Lines
    from jax_flash.block_masks import BlockMask

# Part of what jit and JAX's other caches remember programs by.
_as_written = jax.make_user_context(
    default_value=os.environ.get("JAX_FLASH_AS_WRITTEN", "") not in ("", "0")
)


def as_written(on: bool = True) -> contextlib.AbstractContextManager[Any]:
    """Turns all rewrites off, for calls that are traced and block masks that are made within.

    jit traces anew where it changes. What was traced keeps it (`Problem.as_written`), wherever it
    is lowered. The environment variable JAX_FLASH_AS_WRITTEN=1 turns them off for a process.

    Arguments:
      on: False turns them on inside.
    """
    return _as_written(bool(on))


def is_as_written() -> bool:
    return _as_written.value


# ---- where arguments are taken -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Arguments:
    """A call whose arguments were checked, before operands are made of its block mask.

    Attributes:
      problem: what to compute, with all terms that were given.
      query, key, value: arrays.
      block_mask: what the terms block_numbers and block_bits are made of, if problem has them.
      q_len, kv_len: T and S, of the whole sequence.
      whole: no other device has a part of the sequence, and the caller brings results that come in
        other batch rows back to query's.
    """

    problem: Problem
    query: jax.Array
    key: jax.Array
    value: jax.Array
    block_mask: BlockMask | None
    q_len: Any
    kv_len: Any
    whole: bool

    def changed(self, **fields: Any) -> Arguments:
        """Replaces fields of the problem."""
        return dataclasses.replace(self, problem=dataclasses.replace(self.problem, **fields))

    def without_block_mask(self) -> Arguments:
        terms = tuple(x for x in self.problem.terms if x not in _OF_BLOCK_MASK)
        return dataclasses.replace(self.changed(terms=terms), block_mask=None)


_OF_BLOCK_MASK = ("block_numbers", "block_bits")


def simplify(given: Arguments) -> tuple[Arguments, tuple[str, ...]]:
    """Tries the rewrites in their order; returns also the names of those that were taken."""
    taken = []
    for rewrite in () if given.problem.as_written else (softcap, window, chunks, last, layout):
        made = rewrite(given)
        if made is not None:
            given = made
            taken.append(rewrite.__name__)
    return given, tuple(taken)


def softcap(given: Arguments) -> Arguments | None:
    """A function that is c * tanh(score / c) is the term softcap.

    Values: that is how the term is defined, and where: behind scale and bias, before masks. It is
    computed for whole tiles, its derivative from its value.
    Assumes: the function is division by c, or multiplication by the nearest number to 1 / c, tanh
    and multiplication by c, and nothing else; c is a number, as large as `softcap=` may be.
    """
    score = given.problem.score
    cap = None if score is None else _cap(score)
    if cap is None or not SOFTCAPS[0] <= cap <= SOFTCAPS[1]:
        return None
    return given.changed(score=None, softcap=cap)


def _cap(function: Function) -> float | None:
    """The number c above 0 where it is c * tanh(score / c), or c * tanh(score * (1 / c))."""
    steps = function.program.steps
    if len(steps) != 3 or function.program.results != steps[2].outputs:
        return None
    names = [step.primitive.name for step in steps]
    inside = _factor(steps[0], 0)
    outside = _factor(steps[2], steps[1].outputs[0])
    if names[1:] != ["tanh", "mul"] or steps[1].inputs != steps[0].outputs:
        return None
    if inside is None or outside is None or steps[1].params.get("accuracy") is not None:
        return None
    same = inside == outside if names[0] == "div" else inside == 1 / outside
    return float(outside) if names[0] in ("div", "mul") and same and outside > 0 else None


def _factor(step: Step, of: int) -> Any:
    """Returns the number by which a step multiplies or divides a value, if it does."""
    first, *others = step.inputs
    if step.primitive.name == "mul" and isinstance(first, Constant):
        first, others = others[0], [first]
    if first != of or len(others) != 1 or not isinstance(others[0], Constant):
        return None
    number = others[0].value
    return number[()] if number.shape == () and number != 0 else None


def window(given: Arguments) -> Arguments | None:
    """A block mask that is a window narrows the call's own.

    Values: the same pairs are visible, those within both windows; kernels compare the ends of a row
    in place of reading bits.
    Assumes: `_windows.py` found the function of indices to be this window, which outside of jit was
    compared with all its values; the call's window counts by index as well, from query 0 and key 0.
    """
    mask, problem = given.block_mask, given.problem
    by_index = not (problem.bottom_right or "query_positions" in problem.terms)
    if mask is None or mask.window is None or not by_index:
        return None
    both = _windows.within(
        _windows.narrower(problem.window, mask.window), given.q_len + given.kv_len
    )
    return given.without_block_mask().changed(window=both)


def chunks(given: Arguments) -> Arguments | None:
    """Chunks of one length, whose queries see the keys of their own and no others, are batch rows.

    Values: a query meets the same keys, at the same distances, of which alone causality, windows
    and their alignment know (T is S in the call and in each chunk).
    Assumes: all blocks of the mask were compared with those of such chunks; no other term, no
    function and no device counts batch rows or positions; types split the sequence into whole
    chunks, else XLA would gather it.
    """
    mask, problem = given.block_mask, given.problem
    alone = problem.terms == _OF_BLOCK_MASK and problem.score is None
    if mask is None or mask.chunk is None or not (alone and given.whole):
        return None
    arrays = given.query, given.key, given.value
    count = given.q_len // mask.chunk
    if any(count % _parts(x) for x in arrays):
        return None
    query, key, value = (x.reshape(*x.shape[:-3], count, mask.chunk, *x.shape[-2:]) for x in arrays)
    return dataclasses.replace(given.without_block_mask(), query=query, key=key, value=value)


def last(given: Arguments) -> Arguments | None:
    """One query aligned with the last key, as a step of decoding is, sees as many keys without.

    Values: no key of its row has a later position; lengths hide what is beyond.
    Assumes: nothing.
    """
    left, right = given.problem.window
    if not given.problem.bottom_right or right is None or right < 0 or given.q_len != 1:
        return None
    return given.changed(window=(left, None), bottom_right=left is not None)


def _parts(x: jax.Array) -> int:
    """Counts the parts into which a type splits the sequence, over explicit axes of a mesh."""
    sharding = jax.typeof(x).sharding
    names = sharding.spec[-3] or ()
    names = (names,) if isinstance(names, str) else names
    return math.prod(sharding.mesh.shape[name] for name in names)


def layout(given: Arguments) -> Arguments | None:
    """A block mask without partial blocks is known to be one.

    Values: no block has bits that a kernel could read; it walks a list of blocks without a test.
    Assumes: nothing, the shape of the bits tells it.
    """
    mask = given.block_mask
    if mask is None or not mask.is_layout:
        return None
    return given.changed(whole_blocks=True)


# ---- where kernels are planned -------------------------------------------------------------------


def lines(
    problem: Problem, shapes: Shapes, find: Callable[[Function, Shapes], Lines | None]
) -> Problem | None:
    """A function that adds lines of the distance says which, to kernels that can take them.

    Values: from its reach on the function is score + slope * (key - query) + constant, to a few
    units in the last place of the largest term; nearer pairs are computed as the function is.
    Assumes: `_gpu/distances.py` followed all steps of the function; queries and keys are so few
    that float32 holds their differences, and some are beyond the reach.

    Arguments:
      find: of _gpu/distances.py, which this file is not to know.
    """
    found = None
    if problem.score is not None and not problem.as_written:
        found = find(problem.score, shapes)
    return None if found is None else dataclasses.replace(problem, lines=found)
