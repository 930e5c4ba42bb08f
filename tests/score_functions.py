"""Functions of scores for the table of cases: as a user writes them, and in numpy with derivatives.

Each reads a table that is drawn for the case and has a gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

REACH = 8


@dataclasses.dataclass(frozen=True)
class ScoreCase:
    """One function.

    Attributes:
      shape: of the table, from the batch rows and the heads.
      traced: from the table, the function of (score, batch, head, query, key).
      plain: of (table, score [T, S], batch row, head, query [T, 1], key [1, S]): the value, the
        slope, the index of the table's element that each pair reads and the derivative by it.
    """

    shape: Callable[[int, int], tuple[int, ...]]
    traced: Callable[[Any], Callable[..., Any]]
    plain: Callable[..., tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]


def _alibi(table):
    return lambda score, batch, head, query, key: score + table[head] * (key - query)


def _plain_alibi(table, score, batch, head, query, key):
    distance = np.broadcast_to(key - query, score.shape).astype(score.dtype)
    return score + table[head] * distance, np.ones_like(score), np.full(score.shape, head), distance


def _distance(table):
    """Slopes that differ on either side of the query, of both signs, and a constant."""

    def function(score, batch, head, query, key):
        slope = jnp.where(key > query, table[head], -0.125)
        return 0.5 + score + slope * (key - query)

    return function


def _plain_distance(table, score, batch, head, query, key):
    distance = np.broadcast_to(key - query, score.shape).astype(score.dtype)
    added = 0.5 + np.where(distance > 0, table[head], -0.125) * distance
    return score + added, np.ones_like(score), np.full(score.shape, head), np.maximum(distance, 0)


def _fall(table):
    """As much on either side of the query: a line from each, of no reach."""

    def function(score, batch, head, query, key):
        return 0.5 + score - table[head] * jnp.abs(key - query)

    return function


def _plain_fall(table, score, batch, head, query, key):
    distance = np.broadcast_to(np.abs(key - query), score.shape).astype(score.dtype)
    added = 0.5 - table[head] * distance
    return score + added, np.ones_like(score), np.full(score.shape, head), -distance


def _relative(table):
    def function(score, batch, head, query, key):
        return score + table[head, jnp.clip(key - query, -REACH, REACH) + REACH]

    return function


def _plain_relative(table, score, batch, head, query, key):
    column = np.clip(key - query, -REACH, REACH) + REACH
    index = np.broadcast_to(head * table.shape[1] + column, score.shape)
    one = np.ones_like(score)
    return score + table.reshape(-1)[index], one, index, one


def _cap(cap):
    return lambda score, batch, head, query, key: cap * jnp.tanh(score / cap)


def _plain_cap(cap, score, batch, head, query, key):
    tanh = np.tanh(score / cap)
    slope = 1 - tanh * tanh
    return cap * tanh, slope, np.zeros(score.shape, int), tanh - score / cap * slope


def _gate(table):
    """Slopes of both signs, a quotient, keys hidden by -inf, and NaN for keys after the query."""

    def function(score, batch, head, query, key):
        damped = score / (1.0 + jnp.log1p(score * score))
        gated = damped * table[batch, head] * jnp.where(key > query, jnp.nan, 1.0)
        return jnp.where((query + key) % 3 == 1, -jnp.inf, gated)

    return function


def _plain_gate(table, score, batch, head, query, key):
    hides = (query + key) % 3 == 1
    index = np.full(score.shape, batch * table.shape[1] + head)
    by = 1 + np.log1p(score * score)
    damped = score / by
    slope = table[batch, head] * (1 - damped * 2 * score / (1 + score * score)) / by
    value = np.where(hides, -np.inf, damped * table[batch, head])
    return value, np.where(hides, 0, slope), index, damped * ~hides


ROWS = 0.5 - np.arange(512, dtype=np.float32) % 7 / 3  # of both signs


def _factors(table):
    """A factor of the query and one that is read along the keys, of both signs."""
    rows = jnp.asarray(ROWS)
    return lambda score, batch, head, query, key: score * rows[query] * table[head, key]


def _plain_factors(table, score, batch, head, query, key):
    index = head * table.shape[1] + np.broadcast_to(key, score.shape)
    slope = ROWS[query] * table[head, key]
    return score * slope, slope, index, score * ROWS[query]


def _sines(count):
    """As many sines, one of the other: kernels have one in a loop, several as a function."""

    def made(table):
        def function(score, batch, head, query, key):
            x = score
            for _ in range(count):
                x = jnp.sin(x)
            return score + table[head] * x + 0.01 * (key - 3 * query)

        return function

    def plain(table, score, batch, head, query, key):
        x, slope = score, np.ones_like(score)
        for _ in range(count):
            x, slope = np.sin(x), slope * np.cos(x)
        value = score + table[head] * x + 0.01 * (key - 3 * query)
        return value, 1 + table[head] * slope, np.full(score.shape, head), x

    return ScoreCase(lambda rows, heads: (heads,), made, plain)


SCORES = {
    "alibi": ScoreCase(lambda rows, heads: (heads,), _alibi, _plain_alibi),
    "distance": ScoreCase(lambda rows, heads: (heads,), _distance, _plain_distance),
    "fall": ScoreCase(lambda rows, heads: (heads,), _fall, _plain_fall),
    "relative": ScoreCase(lambda rows, heads: (heads, 2 * REACH + 1), _relative, _plain_relative),
    "cap": ScoreCase(lambda rows, heads: (), _cap, _plain_cap),
    "sine": _sines(1),
    "sines": _sines(3),
    "factors": ScoreCase(lambda rows, heads: (heads, 384), _factors, _plain_factors),
    "gate": ScoreCase(lambda rows, heads: (rows, heads), _gate, _plain_gate),
}
