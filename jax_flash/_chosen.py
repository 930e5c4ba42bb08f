"""Backend "xla" of chosen keys: a query reads those at the positions that it is given, and no more.

A query of one batch row is a row here. Its positions become slots of the keys, -1 where it does not
see them, so a hidden key is not read at all. Rows are taken in blocks: the keys and values of a
block are gathered, and its gradients of keys and values added to where they came from. Memory grows
with the positions that are given, never with T S.

The arithmetic serves `flash_attention` (`forward`, `backward`) and caches (`attend`, which
`blockwise_decode.py` calls with slots of its own).

DeepSeek-V3.2-Exp (2025): sparse attention to the keys that an indexer chooses for each query.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_flash._problem import Problem
from jax_flash._products import dot
from jax_flash._varying import vary_over

LACKS = -2  # in the place of a slot: it is seen, and there is none
_BLOCK_ELEMENTS = 2**24  # of the keys and values that a block gathers: 64 MiB in float32

# Takes slots `[R, n]` from 0 on: keys `[R, n, K, H]` and values `[R, n, K, Hv]`.
Read = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


def forward(problem: Problem, q, k, v, *terms: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes what `blockwise.forward` does, of operands with indices."""
    call = _Call.of(problem, q, k, v, problem.name_terms(terms))
    sizes = Sizes.of(call.slots, k.shape[-2], k.shape[-1], v.shape[-1])
    out, lse = attend(problem, call.q, call.read, call.slots, call.sinks, sizes)
    return call.of_queries(out).astype(problem.dtype), call.of_heads(lse)


def as_decoding(problem: Problem, q, k, v, *terms: jax.Array) -> _Decoding:
    """Makes of the operands of `forward` those of a flash_decode that packs pages of a position."""
    call = _Call.of(problem, q, k, v, problem.name_terms(terms))
    operands = {
        "q": call.q[:, None],
        "k": call.k.reshape(-1, 1, *k.shape[-2:]),
        "v": call.v.reshape(-1, 1, *v.shape[-2:]),
        "page_table": call.slots,
    }
    if call.sinks is not None:
        operands["sinks"] = call.sinks
    return _Decoding(operands, call)


@dataclasses.dataclass(frozen=True)
class _Decoding:
    """The operands of a flash_decode by name, and whose results they give."""

    operands: dict[str, jax.Array]
    call: _Call

    def results(self, out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Brings out `[R, 1, N, Hv]` and lse `[R, N, 1]` to those of `forward`."""
        return self.call.of_queries(out[:, 0]), self.call.of_heads(lse[..., 0])


def backward(
    problem: Problem, q, k, v, out, lse, dout, dlse, *terms: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes what `blockwise.backward` does, of operands with indices: dq, dk and dv."""
    call = _Call.of(problem, q, k, v, problem.name_terms(terms))
    sizes = Sizes.of(call.slots, k.shape[-2], k.shape[-1], v.shape[-1])
    pages = call.k.shape[0]
    rows_lse = call.rows_of_heads(lse)
    do = call.rows_of(dout)
    delta = jnp.sum(call.rows_of(out).astype(lse.dtype) * do.astype(lse.dtype), axis=-1)
    if dlse is not None:
        delta = delta - call.rows_of_heads(dlse)

    def step(state, block):
        dk, dv = state
        q, slots, do, lse, delta = block
        found = _Block.of(problem, q, slots, call.read, sizes.kv_heads)
        do = found.split(_where(found.sees[:, None, None], do))
        lse, delta = (x.reshape(*found.q.shape[:-1], 1) for x in (lse, delta))
        logits, pull = jax.vjp(found.logits, found.scores())
        # An lse of -inf: the row sees nothing.
        weights = jnp.exp(logits - jnp.where(lse == -jnp.inf, jnp.inf, lse))
        dweights = dot(problem, "rkgh,rknh->rkgn", do, found.v)
        (dscores,) = pull(found.keep(weights * (dweights - delta)))
        dscores = problem.scale * dscores
        dq = dot(problem, "rkgn,rknh->rkgh", dscores, found.k)
        of_k = dot(problem, "rkgn,rkgh->rknh", dscores, found.q)
        of_v = dot(problem, "rkgn,rkgh->rknh", weights, do)
        # What is hidden has no slot, and adds nothing.
        page, slot = call.place(jnp.where(found.seen, slots, pages * call.size))
        dk, dv = (
            x.at[page, slot].add(jnp.swapaxes(y, 1, 2), mode="drop")
            for x, y in ((dk, of_k), (dv, of_v))
        )
        return (dk, dv), dq.reshape(q.shape)

    sums = tuple(jnp.zeros(x.shape, problem.sum_dtype) for x in (call.k, call.v))
    blocks = (call.q, call.slots, do, rows_lse, delta)
    (dk, dv), dq = _over_rows(step, sums, blocks, sizes.rows, (q, k, v, dout))
    return (
        call.of_queries(dq).astype(problem.dtype),
        dk.reshape(k.shape).astype(problem.dtype),
        dv.reshape(v.shape).astype(problem.dtype),
    )


def attend(
    problem: Problem,
    q: jax.Array,
    read: Read,
    slots: jax.Array,
    sinks: jax.Array | None,
    sizes: Sizes,
) -> tuple[jax.Array, jax.Array]:
    """Computes attention of rows to the keys and values at their slots.

    Arguments:
      problem: dtype, scale, softcap and precision; what is hidden, slots say.
      q: `[R, N, H]`.
      read: reads keys and values.
      slots: int32 `[R, n]`, below 0 where there is nothing to read.
      sinks: `[R, N]`, or None.
      sizes: what is read.

    Returns: out `[R, N, Hv]` and lse `[R, N]` in problem.sum_dtype.
    """

    def step(state, block):
        q, slots, *rest = block
        found = _Block.of(problem, q, slots, read, sizes.kv_heads)
        logits = found.logits(found.scores())
        largest = jnp.max(logits, axis=-1, initial=-jnp.inf)
        sinks = None
        if rest:
            sinks = rest[0].reshape(largest.shape)
            largest = jnp.maximum(largest, sinks)
        shift = lax.stop_gradient(jnp.where(largest == -jnp.inf, 0.0, largest))
        weights = jnp.exp(logits - shift[..., None])
        total = jnp.sum(weights, axis=-1)
        total = total if sinks is None else total + jnp.exp(sinks - shift)
        empty = largest == -jnp.inf
        some = jnp.where(empty, 1.0, total)
        out = dot(problem, "rkgn,rknh->rkgh", weights, found.v) / some[..., None]
        lse = jnp.where(empty, -jnp.inf, shift + jnp.log(some))
        return state, (out.reshape(*q.shape[:-1], sizes.value_dim), lse.reshape(q.shape[:-1]))

    blocks = (q, slots) if sinks is None else (q, slots, sinks)
    return _over_rows(step, (), blocks, sizes.rows, blocks)[1]


def pack(slots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Brings what is seen of slots `[R, n]` to the front of each row, in their order.

    Returns:
      int32 `[R, n]`, -1 behind them; and int32 `[R]`, how many there are, more than n where one is
      `LACKS`.
    """
    seen = slots >= 0
    place = jnp.cumsum(seen, axis=1, dtype=jnp.int32)
    count, chosen = slots.shape
    if 0 in (count, chosen):
        return slots, jnp.zeros(count, jnp.int32)
    row = jnp.arange(count, dtype=jnp.int32)[:, None]
    at = jnp.where(seen, place - 1, chosen)
    packed = jnp.full_like(slots, -1).at[row, at].set(slots, mode="drop", unique_indices=True)
    return packed, jnp.where(jnp.any(slots == LACKS, axis=1), chosen + 1, place[:, -1])


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What rows read: `[K, Hv]` values, and how many rows are a block."""

    kv_heads: int
    value_dim: int
    rows: int

    @classmethod
    def of(cls, slots: jax.Array, kv_heads: int, head_dim: int, value_dim: int) -> Sizes:
        rows = _rows_at_once(slots.shape, kv_heads * (head_dim + value_dim))
        return cls(kv_heads, value_dim, rows)


def _rows_at_once(slots: tuple[Any, ...], features: int) -> int:
    """Chooses how many rows of slots `[R, n]` are a block, by what they gather for each."""
    count, chosen = slots
    if not (isinstance(count, int) and isinstance(chosen, int)):
        raise NotImplementedError(
            f"backend 'xla' needs known lengths; {count} queries read {chosen} keys each in this "
            "export"
        )
    return max(1, min(count, _BLOCK_ELEMENTS // max(1, chosen * features)))


def gather(x: jax.Array, page: jax.Array, slot: jax.Array) -> jax.Array:
    """Reads `[P, S, K, H]` at pages and slots `[R, n]`: `[R, n, K, H]`, 0 where there are none."""
    if 0 in x.shape[:2]:
        return jnp.zeros((*page.shape, *x.shape[2:]), x.dtype)
    return x.at[page, slot].get(mode="clip")


def _over_rows(step, state, arrays, rows: int, operands) -> tuple[Any, Any]:
    """Carries a state through `step(state, arrays of a block)`; joins what each block gives."""
    count = arrays[0].shape[0]
    if count <= rows:
        return step(state, arrays)
    blocks = -(-count // rows)
    padding = blocks * rows - count

    def cut(x):
        # Rows that fill the last block see nothing: their slots are -1.
        fill = -1 if jnp.issubdtype(x.dtype, jnp.integer) else 0
        x = jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1), constant_values=fill)
        return x.reshape(blocks, rows, *x.shape[1:])

    state, results = lax.scan(step, vary_over(state, operands), jax.tree.map(cut, arrays))
    return state, jax.tree.map(lambda x: x.reshape(blocks * rows, *x.shape[2:])[:count], results)


@dataclasses.dataclass(frozen=True)
class _Block:
    """Rows with the keys and values that they read; 0 in the place of those that they do not."""

    problem: Problem
    seen: jax.Array  # bool [R, n]
    q: jax.Array  # [R, K, G, H]
    k: jax.Array  # [R, K, n, H]
    v: jax.Array  # [R, K, n, Hv]

    @classmethod
    def of(cls, problem: Problem, q, slots, read: Read, kv_heads: int) -> _Block:
        group = q.shape[1] // kv_heads if kv_heads else 0
        seen = slots >= 0
        k, v = read(jnp.maximum(slots, 0))
        k, v = (jnp.swapaxes(_where(seen[..., None, None], x), 1, 2) for x in (k, v))
        # NaN of a row that sees nothing would reach gradients, as 0 * NaN.
        q = _where(jnp.any(seen, axis=-1)[:, None, None], q)
        return cls(problem, seen, q.reshape(q.shape[0], kv_heads, group, q.shape[-1]), k, v)

    @property
    def sees(self) -> jax.Array:
        """Whether a row sees anything, bool [R]."""
        return jnp.any(self.seen, axis=-1)

    def split(self, x: jax.Array) -> jax.Array:
        """Brings `[R, N, Hv]` to `[R, K, G, Hv]`."""
        return x.reshape(*self.q.shape[:-1], x.shape[-1])

    def keep(self, x: jax.Array) -> jax.Array:
        """Makes `[R, K, G, n]` 0 where a key is hidden."""
        return _where(self.seen[:, None, None], x)

    def scores(self) -> jax.Array:
        return self.problem.scale * dot(self.problem, "rkgh,rknh->rkgn", self.q, self.k)

    def logits(self, scores: jax.Array) -> jax.Array:
        if self.problem.softcap is not None:
            scores = self.problem.softcap * jnp.tanh(scores / self.problem.softcap)
        return jnp.where(self.seen[:, None, None], scores, -jnp.inf)


def _where(seen: jax.Array, x: jax.Array) -> jax.Array:
    """Puts 0 where nothing is seen, NaN or not."""
    return jnp.where(seen, x, jnp.zeros((), x.dtype))


@dataclasses.dataclass(frozen=True)
class _Call:
    """The operands of a flash_forward as rows and slots: slot b S + s is key s of batch row b."""

    batch: tuple[int, ...]
    q_len: int
    q: jax.Array  # [R, N, H], R = B T
    k: jax.Array  # [B or fewer, S, K, H]
    v: jax.Array
    slots: jax.Array  # int32 [R, n], -1 where a key is hidden
    sinks: jax.Array | None  # [R, N]

    @classmethod
    def of(cls, problem: Problem, q, k, v, terms: dict[str, jax.Array]) -> _Call:
        *batch, q_len, q_heads, _ = q.shape
        batch, total = tuple(batch), math.prod(batch)

        def of_batch(name: str) -> jax.Array:  # [B, ...]
            x = terms[name]
            rest = x.shape[len(batch) :]
            return jnp.broadcast_to(x, (*batch, *rest)).reshape(total, *rest)

        named = {name: of_batch(name) for name in terms}
        seen = _visible(problem, q_len, k.shape[-3], named)
        owners = k.shape[:-3]  # members may share their keys
        owner = jnp.arange(math.prod(owners), dtype=jnp.int32).reshape(owners)
        first = jnp.broadcast_to(owner, batch).reshape(total, 1, 1) * k.shape[-3]
        slots = jnp.where(seen, first + named["indices"], -1)
        slots = slots.reshape(total * q_len, slots.shape[-1])
        sinks = None
        if "sinks" in named:
            sinks = jnp.broadcast_to(named["sinks"][:, None], (total, q_len, q_heads))
            sinks = sinks.reshape(total * q_len, q_heads)
        return cls(
            batch=batch,
            q_len=q_len,
            q=q.reshape(total * q_len, *q.shape[-2:]),
            k=k.reshape(math.prod(owners), *k.shape[-3:]),
            v=v.reshape(math.prod(owners), *v.shape[-3:]),
            slots=slots,
            sinks=sinks,
        )

    @property
    def size(self) -> int:
        """S."""
        return self.k.shape[1]

    def place(self, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
        return slots // self.size, slots % self.size

    def read(self, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
        page, slot = self.place(slots)
        return gather(self.k, page, slot), gather(self.v, page, slot)

    def rows_of(self, x: jax.Array) -> jax.Array:
        """Brings `[*B, T, N, H]` to `[R, N, H]`."""
        return x.reshape(self.q.shape[0], *x.shape[-2:])

    def rows_of_heads(self, x: jax.Array) -> jax.Array:
        """Brings `[*B, N, T]` to `[R, N]`."""
        return jnp.swapaxes(x, -1, -2).reshape(self.q.shape[0], x.shape[-2])

    def of_queries(self, x: jax.Array) -> jax.Array:
        """Brings `[R, N, H]` to `[*B, T, N, H]`."""
        return x.reshape(*self.batch, self.q_len, *x.shape[-2:])

    def of_heads(self, x: jax.Array) -> jax.Array:
        """Brings `[R, N]` to `[*B, N, T]`."""
        return jnp.swapaxes(x.reshape(*self.batch, self.q_len, x.shape[-1]), -1, -2)


def _visible(problem: Problem, q_len: int, kv_len: int, terms: dict[str, jax.Array]) -> jax.Array:
    """Computes which of indices `[B, T, n]` their queries see, of terms with one leading dim."""
    indices = terms["indices"]
    query = jnp.arange(q_len, dtype=jnp.int32)[None, :, None]
    key = indices
    seen = (key >= 0) & (key < kv_len)
    lengths = {
        name: terms[name][:, None, None] for name in terms if name.endswith("_lengths")
    }  # [B, 1, 1]
    if "query_lengths" in lengths:
        seen &= query < lengths["query_lengths"]
    if "key_value_lengths" in lengths:
        seen &= key < lengths["key_value_lengths"]

    def of_keys(name: str) -> jax.Array:
        """Reads `[B, S]` at the indices; any where these are none."""
        x = terms[name]
        batch = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None, None]
        return x.at[batch, jnp.clip(indices, 0, kv_len - 1)].get(mode="clip")

    if "query_segments" in terms:
        seen &= terms["query_segments"][..., None] == of_keys("key_value_segments")
    if "query_positions" in terms:
        query, key = terms["query_positions"][..., None], of_keys("key_value_positions")
    elif problem.bottom_right:
        keys = lengths.get("key_value_lengths", kv_len)
        query = query + (keys - lengths.get("query_lengths", q_len))
    left, right = problem.window
    # Differences wrap around; those that are not negative are exact as uint32.
    if left is not None:
        seen &= (key >= query) | ((query - key).astype(jnp.uint32) <= jnp.uint32(left))
    if right is not None:
        seen &= (key <= query) | ((key - query).astype(jnp.uint32) <= jnp.uint32(right))
    return seen
