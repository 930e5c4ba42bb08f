"""Owns the float64 attention that results are compared with: one group of heads, chunk by chunk."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from shapes import Cell

CHUNK = 1024  # queries at a time: [CHUNK, T] in float64 is 128 MB at T = 16384
NAMES = ("out", "dq", "dk", "dv")


def errors(cell: Cell, inputs: tuple[Any, ...], results: tuple[Any, ...]) -> dict[str, float]:
    """Compares results with float64: norm of the difference over norm, by name.

    Args:
      inputs: q, k, v, dout `[B, T, N, H]`.
      results: out, and dq, dk, dv where there are gradients. The first sequence's first kv head
        and the query heads that read it are compared.
    """
    group = cell.heads // cell.kv_heads
    q, k, v, dout = (np.asarray(x[0], np.float64) for x in inputs)
    with jax.enable_x64(True):
        want = prepare(cell)(q[:, :group], k[:, 0], v[:, 0], dout[:, :group])
        want = [np.asarray(x) for x in want]
    got = [np.asarray(x[0, :, : group if i < 2 else 1], np.float64) for i, x in enumerate(results)]
    want[2], want[3] = want[2][:, None], want[3][:, None]
    return {
        name: float(np.linalg.norm(a - b) / np.linalg.norm(b))
        for name, a, b in zip(NAMES, got, want, strict=False)
    }


@functools.cache
def prepare(cell: Cell) -> Callable[..., Any]:
    """Compiles the float64 attention of a cell's first group of heads; may run on any thread."""
    queries = (cell.length, cell.heads // cell.kv_heads, cell.head_dim)
    keys = (cell.length, cell.head_dim)
    with jax.enable_x64(True):
        arguments = [jax.ShapeDtypeStruct(x, np.float64) for x in (queries, keys, keys, queries)]
        return jax.jit(functools.partial(_attention, cell)).lower(*arguments).compile()


def _attention(cell: Cell, q: Any, k: Any, v: Any, dout: Any) -> tuple[jax.Array, ...]:
    """Computes out, dq `[T, G, H]` and dk, dv `[T, H]` in the inputs' precision."""
    length, _, head_dim = q.shape
    chunk = min(CHUNK, length)
    scale = head_dim**-0.5
    keys = jnp.arange(length)

    def step(carry: Any, rows: Any) -> Any:
        dk, dv = carry
        q_rows, dout_rows, positions = rows
        seen = jnp.ones((chunk, length), bool)
        if cell.causal:
            seen &= keys <= positions[:, None]
        if cell.window is not None:
            seen &= keys >= positions[:, None] - cell.window
        if cell.segment is not None:
            seen &= keys // cell.segment == positions[:, None] // cell.segment

        def head(q_head: Any, dout_head: Any) -> Any:
            scores = jnp.where(seen, scale * q_head @ k.T, -jnp.inf)
            p = jax.nn.softmax(scores, axis=-1)
            out = p @ v
            ds = p * (dout_head @ v.T - jnp.sum(out * dout_head, axis=-1, keepdims=True))
            return out, scale * ds @ k, scale * ds.T @ q_head, p.T @ dout_head

        out, dq, dk_rows, dv_rows = jax.lax.map(
            lambda x: head(*x), (q_rows.swapaxes(0, 1), dout_rows.swapaxes(0, 1))
        )
        carry = dk + dk_rows.sum(0), dv + dv_rows.sum(0)
        return carry, (out.swapaxes(0, 1), dq.swapaxes(0, 1))

    def split(x: Any) -> Any:
        return x.reshape(-1, chunk, *x.shape[1:])

    start = jnp.zeros_like(k), jnp.zeros_like(v)
    (dk, dv), (out, dq) = jax.lax.scan(step, start, (split(q), split(dout), split(keys)))
    return out.reshape(q.shape), dq.reshape(q.shape), dk, dv
