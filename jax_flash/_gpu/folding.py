"""Owns folding: short rows of a batch, one behind the other, are documents of one longer row.

A block has 64 or more queries; of rows that have few most of it would be empty. What lengths hide
of a row is of documents of its own, of queries or keys alone. Read next: _backends.py, which folds
the arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_flash._call import Call
from jax_flash._problem import Shapes
from jax_flash._terms import TERMS

LENGTHS = ("query_lengths", "key_value_lengths")
SEGMENTS = ("query_segments", "key_value_segments")


def fold(call: Call, shapes: Shapes, rows: int) -> tuple[Call, Shapes]:
    """Returns a call of which each batch row is `rows` ones of a call with lengths at most."""
    terms = tuple(x for x in TERMS if x in (*call.problem.terms, *SEGMENTS) and x not in LENGTHS)
    problem = dataclasses.replace(call.problem, terms=terms)
    sizes = (shapes.batch // rows, rows * shapes.q_len, rows * shapes.kv_len)
    return (
        dataclasses.replace(call, problem=problem),
        dataclasses.replace(shapes, **dict(zip(("batch", "q_len", "kv_len"), sizes, strict=True))),
    )


def fold_operands(call: Call, named: Mapping[str, jax.Array], shapes: Shapes) -> dict[str, Any]:
    """Returns the operands of a folded call of these sizes from those of the call that it was."""
    batch = shapes.batch

    def segments(i: int) -> jax.Array:
        """Numbers the documents: 3 r those of row r, 3 r + 1 its hidden queries, 3 r + 2 keys."""
        length, whole = named["qk"[i]].shape[-3], (shapes.q_len, shapes.kv_len)[i]
        at = jnp.arange(whole, dtype=jnp.int32)
        ids = jnp.broadcast_to(3 * (at // length), (batch, whole))
        if LENGTHS[i] not in named:
            return ids
        valid = jnp.repeat(named[LENGTHS[i]].reshape(batch, -1), length, axis=1)
        return ids + jnp.where(at % length < valid, 0, i + 1)

    def folded(name: str) -> jax.Array:
        if name in SEGMENTS:
            return segments(SEGMENTS.index(name))
        x = named[name]
        if call.dims(name) != "NT":
            return x.reshape(batch, -1, *x.shape[-2:])
        *_, heads, length = x.shape
        return x.reshape(batch, -1, heads, length).swapaxes(1, 2).reshape(batch, heads, -1)

    return {name: folded(name) for name in call.operands}


def unfold(call: Call, name: str, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns a result of a folded call as the call that it was has it, of that shape."""
    if call.dims(name) == "NT":
        heads, length = shape[-2:]
        x = x.reshape(x.shape[0], heads, -1, length).swapaxes(1, 2)
    return x.reshape(shape)
