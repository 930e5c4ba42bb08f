"""Owns the float64 attention that results are compared with.

A cell is checked by one group of heads, chunk by chunk. A case is checked by the heads that `cut`
takes, at once, beside plain attention in the case's own precision, whose error says what rounding
costs.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_flash

from .score_functions import OPERANDS, UNNAMED
from .shapes import REACH, Case, Cell

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
    queries = (cell.length, cell.heads // cell.kv_heads)
    shapes = [(*queries, cell.head_dim), (cell.length, cell.head_dim)]
    shapes += [(cell.length, cell.columns), (*queries, cell.columns)]
    with jax.enable_x64(True):
        arguments = [jax.ShapeDtypeStruct(x, np.float64) for x in shapes]
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
            ids = jnp.asarray(cell.ids)
            seen &= ids == ids[positions][:, None]

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
    return out.reshape(dout.shape), dq.reshape(q.shape), dk, dv


LIMIT = 4.0  # times the error of plain attention in the same precision
NOISE = 1.25  # the same, either way, where dropout's noise is the error: of the median row
PATTERN = 0.05  # of two norms that differ by 0.3 where the passes drop different weights


def relative_table(heads: int) -> np.ndarray:
    """Returns a table of relative positions, float32 `[heads, 2 REACH + 1]`."""
    columns = np.arange(2 * REACH + 1)
    return np.cos(columns * (1 + np.arange(heads)[:, None]) / 10).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Truth:
    """What results of a case are checked against: float64 attention without dropout.

    Attributes:
      results: by name, out `[b, n, T, H]` and each gradient, of the slice that `cut` takes.
      scales: by name, the size of what an error is a share of. For a bias, sinks or a table it is
        the norm of the gradient before it is summed over what reads an element: the sum may be 0.
      rounded: errors of plain attention in the case's precision, with the case's dropout.
    """

    results: dict[str, jax.Array]
    scales: dict[str, float]
    rounded: dict[str, float]


def cut(case: Case, name: str, x: Any) -> Any:
    """Takes the first head of every sequence from an operand or its gradient.

    Where the heads share a bias all heads are taken; where each sequence has a bias of its own, the
    first sequence. So a gradient needs nothing beyond the slice. Heads come before positions:
    `[b, n, T, H]`.
    """
    rows = slice(0, 1) if case.bias is not None and case.bias[0] == "B" else slice(None)
    heads = slice(None) if case.bias is not None and case.bias[1] == "1" else slice(0, 1)
    if name in ("q", "k", "v", "out", "dout"):
        return x[rows, :, heads].swapaxes(1, 2)
    if name in ("bias", "mask"):
        return x[rows, heads]
    return x[heads] if name in ("sinks", "table", "slopes") else x[rows]


def errors_of_case(
    case: Case, inputs: Mapping[str, Any], truth: Truth, results: tuple[Any, ...]
) -> dict[str, float]:
    """Compares out and the gradients, if there are any, with the truth.

    Returns: the size of the difference over its scale, by name. With dropout and gradients also
      "pattern": Σ out · dout over queries is Σ v · dv over keys in each channel, where forward and
      backward dropped the same weights; their distance.

    Raises:
      ArithmeticError: an error is beyond what rounding, or dropout, explains.
    """
    names = ("out", *case.gradients)
    with jax.enable_x64(True):
        got = {
            n: jnp.asarray(cut(case, n, x), jnp.float64)
            for n, x in zip(names, results, strict=False)
        }
        if case.lengths:  # what a peer leaves in padding does not count
            valid = _valid(case, inputs)
            got = {n: jnp.where(valid, x, 0) for n, x in got.items()}
        errors = {
            n: float(_size(case, x - truth.results[n])) / truth.scales[n] for n, x in got.items()
        }
        if case.dropout and "v" in got:
            v, dout = (jnp.asarray(cut(case, n, inputs[n]), jnp.float64) for n in ("v", "dout"))
            a, b = (got["out"] * dout).sum(2), (got["v"] * v).sum(2)
            errors["pattern"] = float(jnp.linalg.norm(a - b) / jnp.linalg.norm(a))
    wrong = []
    for name, error in errors.items():
        if name == "pattern":
            good = error <= PATTERN
        elif case.dropout:
            good = 1 / NOISE <= error / truth.rounded[name] <= NOISE
        else:
            good = error <= LIMIT * max(truth.rounded[name], truth.rounded["out"])
        if not good:  # NaN is not
            wrong.append(f"{name} {error:.1e} ({truth.rounded.get(name, PATTERN):.1e})")
    if wrong:
        raise ArithmeticError(f"wrong result, error (of plain attention): {', '.join(wrong)}")
    return errors


@functools.cache
def prepare_case(case: Case) -> Callable[..., Any]:
    """Compiles a case's float64 attention and the one to compare it with; may run on any thread."""
    operands = {
        name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in case.operands.items()
    }

    def both(inputs: dict[str, Any]) -> Any:
        given = {name: cut(case, name, x) for name, x in inputs.items()}
        given["valid"] = _valid(case, inputs)
        exact, raw = _plain(case, given, jnp.float64, 0.0)
        rounded, _ = _plain(case, given, jnp.dtype(case.dtype), case.dropout)
        scales = {n: _size(case, raw.get(n, x)) for n, x in exact.items()}
        return exact, scales, {n: _size(case, rounded[n] - x) / scales[n] for n, x in exact.items()}

    with jax.enable_x64(True), jax.default_matmul_precision(case.precision):
        return jax.jit(both).lower(operands).compile()


def truth_of(case: Case, inputs: Mapping[str, Any]) -> Truth:
    """Computes what results from these inputs are checked against."""
    with jax.enable_x64(True):
        results, scales, rounded = prepare_case(case)(dict(inputs))
        return Truth(
            results,
            {n: float(x) for n, x in scales.items()},
            {n: float(x) for n, x in rounded.items()},
        )


def _size(case: Case, x: jax.Array) -> jax.Array:
    """Returns the norm; with dropout the median row's: the first causal rows are all noise."""
    rows = jnp.linalg.norm(x, axis=-1)
    return jnp.median(rows) if case.dropout else jnp.linalg.norm(rows.ravel())


def _valid(case: Case, inputs: Mapping[str, Any]) -> Any:
    """Tells `[b, 1, T, 1]` which queries are no padding."""
    if not case.lengths:
        return True
    lengths = cut(case, "lengths", inputs["lengths"])
    return (jnp.arange(case.length) < lengths[:, None])[:, None, :, None]


def _plain(case: Case, given: Mapping[str, Any], dtype: Any, dropout: float) -> Any:
    """Computes out and gradients in a precision, by the definition: all scores at once.

    Returns: results by name in float64; gradients to bias, sinks and table before they are summed.
    """
    wide = jnp.promote_types(dtype, jnp.float32)
    queries, keys = jnp.arange(case.length)[:, None], jnp.arange(case.length)
    seen = jnp.ones((1, 1, case.length, case.length), bool)
    if case.causal:
        seen &= keys <= queries
    if case.window is not None:
        seen &= keys >= queries - case.window
    if "mask" in given:
        seen &= given["mask"]
    if "segments" in given:
        ids = given["segments"]
        seen &= (ids[:, :, None] == ids[:, None])[:, None]
    if "lengths" in given:
        seen &= given["valid"] & given["valid"].swapaxes(2, 3)

    columns = jnp.clip(keys - queries, -REACH, REACH) + REACH

    def attend(q: Any, k: Any, v: Any, bias: Any, sinks: Any, table: Any) -> Any:
        logits = jnp.einsum("bnth,bnsh->bnts", q, k, preferred_element_type=wide)
        logits *= 1 / math.sqrt(case.head_dim)
        for added in (bias, table):
            if added is not None:
                logits += added
        if case.score == "alibi":
            slopes = jax_flash.scores.alibi_slopes(case.heads)[: logits.shape[1]]
            logits -= slopes[:, None, None] * abs(keys - queries)
        if case.score == "table":
            logits += jnp.asarray(relative_table(case.heads))[: logits.shape[1], columns]
        if case.score in UNNAMED:
            arrays = (given[name] for name in OPERANDS)
            at = jnp.ogrid[tuple(slice(0, size) for size in logits.shape)]
            logits = UNNAMED[case.score](jnp, *arrays)(logits, *at)
        if case.softcap is not None:
            logits = case.softcap * jnp.tanh(logits / case.softcap)
        logits = jnp.where(seen, logits, -1e30)  # finite: a row may see nothing
        top = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
        p = jnp.where(seen, jnp.exp(logits - top), 0)
        total = p.sum(-1, keepdims=True)
        if sinks is not None:
            total += jnp.exp(sinks - top)
        p /= jnp.where(total == 0, 1, total)
        if dropout:
            keep = jax.random.bernoulli(jax.random.key(1), 1 - dropout, p.shape)
            p = jnp.where(keep, p / (1 - dropout), 0)
        out = jnp.einsum("bnts,bnsh->bnth", p.astype(dtype), v, preferred_element_type=wide)
        return out.astype(dtype)

    arguments = {name: given[name].astype(dtype) for name in ("q", "k", "v")}
    rows, heads = arguments["q"].shape[:2]
    raw_shapes = {
        "bias": (rows, heads, case.length, case.length),
        "sinks": (rows, heads, case.length, 1),
        "table": (rows, heads, case.length, case.length),
    }
    for name, shape in raw_shapes.items():
        arguments[name] = None
        if name in given:
            x = given[name]
            x = x.reshape(1, -1, 1, 1) if name == "sinks" else x
            x = x[:, columns] if name == "table" else x
            arguments[name] = jnp.broadcast_to(x, shape).astype(wide)
    out, backward = jax.vjp(attend, *arguments.values())
    gradients = dict(zip(arguments, backward(given["dout"].astype(dtype)), strict=True))
    raw = {n: gradients[n].astype(jnp.float64) for n in raw_shapes if gradients[n] is not None}
    results = {n: gradients[n] for n in ("q", "k", "v")}
    results["out"] = jnp.where(given["valid"], out, 0)
    if "bias" in raw:
        assert case.bias is not None
        shared = tuple(axis for axis, letter in enumerate(case.bias) if letter == "1")
        results["bias"] = raw["bias"].sum(shared, keepdims=True)
    if "sinks" in raw:
        results["sinks"] = raw["sinks"].sum((0, 2, 3))
    if "table" in raw:
        by_column = jax.vmap(lambda x: jnp.zeros(2 * REACH + 1, x.dtype).at[columns].add(x))
        results["table"] = by_column(raw["table"].sum(0))
    return {name: x.astype(jnp.float64) for name, x in results.items()}, raw
