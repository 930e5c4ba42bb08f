"""Owns folding: what fills blocks of queries where a row of one head has few.

A block has 64 or more. Short rows of a batch, one behind the other, are documents of one longer row
(`fold`); what lengths or a mask of keys hide of a row is of documents of its own, of queries or
keys alone. Query heads that share keys are queries of one head (`fold_heads`). What a position
hides is by positions that are read, where the index is no longer the call's.
Read next: _backends.py, which folds the arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash._call import Call
from jax_flash._gpu.traits import is_one, is_plain_call
from jax_flash._problem import Problem, Shapes, TermShape
from jax_flash._terms import TERMS

LENGTHS = ("query_lengths", "key_value_lengths")
SEGMENTS = ("query_segments", "key_value_segments")
POSITIONS = ("query_positions", "key_value_positions")
_OF_PAIRS = ("bias", "mask")
_WRITTEN_OUT = 1 << 14  # ids: 64 KB of a program; a launch is little beside a longer call


def fold(call: Call, shapes: Shapes, rows: int) -> tuple[Call, Shapes]:
    """Returns a call of which each batch row is `rows` ones of a call that `hides_keys` at most."""
    moved = POSITIONS if shapes.q_len != shapes.kv_len and has_window(call.problem) else ()
    kept = {*call.problem.terms, *SEGMENTS, *moved}.difference(LENGTHS, ("mask",))
    problem = _with_terms(call.problem, kept)
    sizes = (shapes.batch // rows, rows * shapes.q_len, rows * shapes.kv_len)
    names = ("batch", "q_len", "kv_len")
    return (
        dataclasses.replace(call, problem=problem),
        dataclasses.replace(shapes, mask=None, **dict(zip(names, sizes, strict=True))),
    )


def has_window(problem: Problem) -> bool:
    """Tells whether a position hides keys."""
    return problem.window != (None, None)


def _with_terms(problem: Problem, kept: Collection[str]) -> Problem:
    """Returns a problem with these terms; what positions align needs no aligning."""
    aligned = problem.bottom_right and POSITIONS[0] not in kept
    terms = tuple(x for x in TERMS if x in kept)
    return dataclasses.replace(problem, terms=terms, bottom_right=aligned)


def hides_keys(call: Call, shapes: Shapes) -> bool:
    """Tells whether terms hide nothing but queries or keys, by lengths or a mask `[…, 1, 1, S]`."""
    mask = shapes.mask
    if mask is not None and not (is_one(mask.heads) and is_one(mask.queries) and mask.keys != 1):
        return False
    return {*LENGTHS, "mask"}.issuperset(call.problem.terms)


def may_fold_heads(call: Call, shapes: Shapes) -> bool:
    """Tells whether query heads that share keys may be queries of one head: position t of the
    g-th of G heads is query t G + g.

    A bias or mask is one row for all, or the only query's of each head. Beside causality nothing
    else was timed; a window to the left spills 8 bytes.
    """
    problem = call.problem
    if problem.score is not None or problem.as_written:
        return False
    copied = problem.split or problem.dtype == "float32"
    if has_window(problem) and (copied or not is_plain_call(problem)):
        return False
    sizes = (shapes.q_len, shapes.q_heads, shapes.kv_heads)
    if not {*LENGTHS, *_OF_PAIRS}.issuperset(problem.terms):
        return False
    if not all(isinstance(x, int) for x in sizes) or shapes.q_heads == shapes.kv_heads:
        return False
    rows = [x for x in (shapes.bias, shapes.mask) if x is not None]
    return shapes.q_len == 1 or all(is_one(x.heads) and is_one(x.queries) for x in rows)


def fold_heads(call: Call, shapes: Shapes) -> tuple[Call, Shapes]:
    """Returns a call of which each head is the query heads that share keys in this one."""
    group = shapes.q_heads // shapes.kv_heads
    if has_window(call.problem):
        problem = _with_terms(call.problem, {*call.problem.terms, *POSITIONS})
        call = dataclasses.replace(call, problem=problem)

    def folded(x: TermShape | None) -> TermShape | None:
        if x is None or is_one(x.heads):
            return x
        return dataclasses.replace(x, heads=shapes.kv_heads, queries=group)

    sizes = {"q_len": group * shapes.q_len, "q_heads": shapes.kv_heads}
    terms = {name: folded(getattr(shapes, name)) for name in _OF_PAIRS}
    return call, dataclasses.replace(shapes, **sizes, **terms)


def _positions(was: Problem, named: Mapping[str, jax.Array], i: int, at: Any) -> Any:
    """Returns where queries (0) or keys (1) `at` these indices of a row stand for its window."""
    lengths = [named[name].shape[-3] for name in "qk"]
    return at + (lengths[1] - lengths[0] if was.bottom_right and i == 0 else 0)


def _fold_heads_of(
    call: Call, was: Problem, named: Mapping[str, jax.Array], shapes: Shapes
) -> dict[str, Any]:
    """Returns the operands of a call by `fold_heads`."""
    heads, group = shapes.kv_heads, named["q"].shape[-2] // shapes.kv_heads

    def folded(name: str) -> jax.Array:
        if name in POSITIONS:
            i = POSITIONS.index(name)
            at = np.arange((shapes.q_len, shapes.kv_len)[i], dtype=np.int32) // (1 if i else group)
            at = _positions(was, named, i, at)
            return jnp.broadcast_to(at, (*named["q"].shape[:-3], at.size))
        x = named[name]
        if name == LENGTHS[0]:
            return group * x
        match call.dims(name):
            case "TNH" | "TNV":
                *rows, length, _, columns = x.shape
                x = x.reshape(*rows, length, heads, group, columns).swapaxes(-3, -2)
                return x.reshape(*rows, length * group, heads, columns)
            case "NT":
                *rows, _, length = x.shape
                x = x.reshape(*rows, heads, group, length).swapaxes(-2, -1)
                return x.reshape(*rows, heads, length * group)
            case "NTS" if x.shape[-3] != 1:
                return x.reshape(*x.shape[:-3], heads, group, x.shape[-1])
        return x

    return {name: folded(name) for name in call.operands}


def fold_operands(
    call: Call, was: Problem, named: Mapping[str, jax.Array], shapes: Shapes
) -> dict[str, Any]:
    """Returns the operands of a folded call of these sizes from those of the call that it was."""
    batch = shapes.batch
    if named["q"].shape[-2] != shapes.q_heads:
        return _fold_heads_of(call, was, named, shapes)

    def indices(i: int) -> tuple[int, np.ndarray]:
        """Returns the length of a row, and the indices in a longer one."""
        whole = (shapes.q_len, shapes.kv_len)[i]
        return named["qk"[i]].shape[-3], np.arange(whole, dtype=np.int32)

    def positions(i: int) -> Any:
        length, at = indices(i)
        at = _positions(was, named, i, at % length)
        return jnp.broadcast_to(at, (batch, at.size))

    def segments(i: int) -> Any:
        """Numbers the documents: 3 r those of row r, 3 r + 1 its hidden queries, 3 r + 2 keys."""
        length, at = indices(i)
        whole = at.size
        ids: Any = np.broadcast_to(3 * (at // length), (batch, whole))
        masked = i == 1 and "mask" in named
        if LENGTHS[i] not in named and not masked and ids.size <= _WRITTEN_OUT:
            return np.array(ids)  # a constant that is written out is no kernel of each call
        ids = jnp.broadcast_to(ids[0], ids.shape)
        if LENGTHS[i] in named:
            valid = jnp.repeat(named[LENGTHS[i]].reshape(batch, -1), length, axis=1)
            ids = jnp.where(at % length < valid, ids, ids // 3 * 3 + i + 1)
        if masked:
            seen = named["mask"][..., 0, 0, :]
            seen = jnp.broadcast_to(seen, (*named["q"].shape[:-3], length)).reshape(batch, -1)
            ids = jnp.where(seen, ids, ids // 3 * 3 + 2)
        return ids

    def folded(name: str) -> jax.Array:
        if name in SEGMENTS:
            return segments(SEGMENTS.index(name))
        if name in POSITIONS:
            return positions(POSITIONS.index(name))
        x = named[name]
        if call.dims(name) != "NT":
            return x.reshape(batch, -1, *x.shape[-2:])
        *_, heads, length = x.shape
        return x.reshape(batch, -1, heads, length).swapaxes(1, 2).reshape(batch, heads, -1)

    return {name: folded(name) for name in call.operands}


def unfold(call: Call, name: str, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns a result of a folded call as the call that it was has it, of that shape."""
    dims = call.dims(name)
    if dims in ("TNH", "TNV") and x.shape[-2] != shape[-2]:
        *rows, length, heads, columns = shape
        x = x.reshape(*rows, length, -1, x.shape[-2], columns).swapaxes(-3, -2)
    elif dims == "NT" and x.shape[-2] != shape[-2]:
        *rows, heads, length = shape
        x = x.reshape(*rows, x.shape[-2], length, -1).swapaxes(-2, -1)
    elif dims == "NT":
        heads, length = shape[-2:]
        x = x.reshape(x.shape[0], heads, -1, length).swapaxes(1, 2)
    return x.reshape(shape)
