"""Owns functions of the scores that have no name, each written once for JAX and for PyTorch.

A maker takes the library's module and float32 slopes `[N]`, rows `[B, T]` and columns `[B, S]`. The
function takes a score, its batch row, head, query and key, scalars or arrays that broadcast.
"""

from collections.abc import Callable
from typing import Any

OPERANDS = ("slopes", "rows", "columns")


def _distance(query: Any, key: Any) -> Any:
    return abs(query - key) * 1.0


UNNAMED: dict[str, Callable[..., Callable[..., Any]]] = {
    "products": lambda xp, slopes, rows, columns: (
        lambda x, b, h, q, k: x * slopes[h] * rows[b, q] * columns[b, k]
    ),
    "tables": lambda xp, slopes, rows, columns: (
        lambda x, b, h, q, k: x + rows[b, q] * slopes[h] + columns[b, k]
    ),
    "root": lambda xp, slopes, rows, columns: (
        lambda x, b, h, q, k: x - xp.sqrt(slopes[h] * _distance(q, k))
    ),
    "reciprocal": lambda xp, slopes, rows, columns: (
        lambda x, b, h, q, k: x / (1 + slopes[h] * _distance(q, k))
    ),
    "where": lambda xp, slopes, rows, columns: (
        lambda x, b, h, q, k: xp.where(k > q, x * slopes[h], x - slopes[h] * _distance(q, k))
    ),
    "gate": lambda xp, slopes, rows, columns: (
        lambda x, b, h, q, k: x / (1 + xp.exp(-rows[b, q] * columns[b, k]))
    ),
}
