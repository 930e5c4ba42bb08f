"""Owns folding: short rows of a batch, one behind the other, are documents of one longer row.

A block has 64 or more queries; of rows that have few most of it would be empty. Read next:
_backends.py, which folds the arrays.
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

SEGMENTS = ("query_segments", "key_value_segments")


def fold(call: Call, shapes: Shapes, rows: int) -> tuple[Call, Shapes]:
    """Returns a call of which each batch row is `rows` ones of a call of plain rows."""
    terms = tuple(name for name in TERMS if name in (*call.problem.terms, *SEGMENTS))
    problem = dataclasses.replace(call.problem, terms=terms)
    sizes = (shapes.batch // rows, rows * shapes.q_len, rows * shapes.kv_len)
    return (
        dataclasses.replace(call, problem=problem),
        dataclasses.replace(shapes, **dict(zip(("batch", "q_len", "kv_len"), sizes, strict=True))),
    )


def fold_operands(call: Call, named: Mapping[str, jax.Array], shapes: Shapes) -> dict[str, Any]:
    """Returns the operands of a folded call of these sizes from those of the call that it was."""
    batch = shapes.batch
    ids = jnp.arange(shapes.q_len, dtype=jnp.int32) // named["q"].shape[-3]

    def folded(name: str) -> jax.Array:
        if name in SEGMENTS:
            return jnp.broadcast_to(ids, (batch, shapes.q_len))
        x = named[name]
        if call.dims(name) != "NT":
            return x.reshape(batch, shapes.q_len, *x.shape[-2:])
        *_, heads, length = x.shape
        return x.reshape(batch, -1, heads, length).swapaxes(1, 2).reshape(batch, heads, -1)

    return {name: folded(name) for name in call.operands}


def unfold(call: Call, name: str, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns a result of a folded call as the call that it was has it, of that shape."""
    if call.dims(name) == "NT":
        heads, length = shape[-2:]
        x = x.reshape(x.shape[0], heads, -1, length).swapaxes(1, 2)
    return x.reshape(shape)
