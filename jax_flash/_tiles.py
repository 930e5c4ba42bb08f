"""Owns the tiles of backend "xla": which the window can reach, and the scores of one.

`Sweep` has the operands in the layout of the tiles, `Tile` the scores of a stretch of queries
against a stretch of keys: what is visible, the logits, dropout. Terms meet the scores here, once
for both passes. Read next: `blockwise.py`, which walks over the tiles.
"""

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_flash._block_arrays import EMPTY, FULL, WORD, words_at
from jax_flash._philox import keep_mask
from jax_flash._problem import Problem
from jax_flash._products import product_of_pairs
from jax_flash._seen import Seen, both

_BLOCK = 512  # queries and keys of one tile, less when there are many heads
_MIN_BLOCK = 128
_TILE_ELEMENTS = 2**24  # scores of one tile over all batch rows and heads: 64 MiB in float32


@dataclasses.dataclass(frozen=True)
class Span:
    """One tile's stretch of queries or keys.

    The last stretch is moved back to end with the sequence; positions before `first` were visited
    by the stretch before it.
    """

    start: jax.Array | np.int32
    first: jax.Array | np.int32
    size: int


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A block mask."""

    numbers: jax.Array  # [*B, K, G, blocks, blocks], any of *B, and of K and G, 1
    bits: jax.Array  # [*B, C, block, words], any of *B 1

    def seen(self, rows: Span, keys: Span) -> jax.Array:
        """Reads what it lets see: bool, broadcasting to `[*B, K, t, G, s]`."""
        *_, block, words = self.bits.shape
        query = rows.start + jnp.arange(rows.size, dtype=jnp.int32)[:, None]
        first = keys.start // WORD
        word = first + jnp.arange(keys.size // WORD + 2, dtype=jnp.int32)[None, :]
        number = self._numbers(query // block, word // words)
        read = words_at(self.bits, number, query % block, word % words)
        read = jnp.where(number == FULL, -1, jnp.where(number == EMPTY, 0, read))
        places = jnp.arange(WORD, dtype=jnp.int32).reshape(*(1 for _ in read.shape), WORD)
        seen = ((read[..., None] >> places) & 1) == 1
        seen = seen.reshape(*read.shape[:-1], -1)
        seen = lax.dynamic_slice_in_dim(seen, keys.start - first * WORD, keys.size, -1)
        return jnp.swapaxes(seen, -3, -2)

    def shown(self, rows: Span, keys: Span) -> jax.Array:
        """Tells whether it shows any of a tile."""
        block = self.bits.shape[-2]
        at = [
            span.start // block + jnp.arange((span.size - 2) // block + 2, dtype=jnp.int32)
            for span in (rows, keys)
        ]
        return jnp.any(self._numbers(at[0][:, None], at[1][None, :]) != EMPTY)

    def _numbers(self, i: jax.Array, j: jax.Array) -> jax.Array:
        """Reads numbers of blocks; of those past the end, the last ones."""
        sizes = self.numbers.shape[-2:]
        i, j = (jnp.minimum(x, n - 1) for x, n in zip((i, j), sizes, strict=True))
        return self.numbers[..., i, j]


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The operands in the layout of the tiles (G = N // K query heads read one kv head).

    G is behind T, as in q: where there is one kv head nothing has to be moved.
    """

    problem: Problem
    q: jax.Array  # [*B, K, T, G, H]
    k: jax.Array  # [*B, K, S, H], any of *B 1, as of v and of all below
    v: jax.Array  # [*B, K, S, Hv]
    bias: jax.Array | None  # [*B, K, T, G, S], any of them 1
    mask: jax.Array | None  # [*B, K, T, G, S], any of them 1
    blocks: Blocks | None
    query_lengths: jax.Array | None  # [*B, 1, 1, 1, 1]
    key_value_lengths: jax.Array | None  # [*B, 1, 1, 1, 1]
    query_segments: jax.Array | None  # [*B, 1, T, 1, 1]
    key_value_segments: jax.Array | None  # [*B, 1, 1, 1, S]
    query_positions: jax.Array | None  # [*B, 1, T, 1, 1]
    key_value_positions: jax.Array | None  # [*B, 1, 1, 1, S]
    sinks: jax.Array | None  # [*B, K, 1, G], any of *B 1
    dropout_state: jax.Array | None  # [*B, K, G, 4 or 6]
    score_ids: jax.Array | None  # [*B, K, G, 2]
    captures: dict[str, jax.Array]  # [*B, elements], any of *B 1
    block_q: int
    block_kv: int
    starts: np.ndarray  # [tiles, 4]: start and first of the queries, start and first of the keys

    @classmethod
    def of(cls, problem: Problem, q, k, v, *rest) -> "Sweep":
        terms = problem.name_terms(rest)
        q_heads, kv_heads = q.shape[-2], k.shape[-2]

        def split_heads(x, axis):
            heads = x.shape[axis]
            split = (1, 1) if heads == 1 else (kv_heads, q_heads // kv_heads)
            axis = axis % x.ndim
            return x.reshape(*x.shape[:axis], *split, *x.shape[axis + 1 :])

        def split_scores(x):
            return jnp.swapaxes(split_heads(x, -3), -3, -2)

        def by_query(x):
            return x[..., None, :, None, None]

        def by_key(x):
            return x[..., None, None, None, :]

        def optional(name, layout):
            return layout(terms[name]) if name in terms else None

        block_q, block_kv = _block_sizes(
            math.prod(q.shape[:-3]) * q_heads, q.shape[-3], k.shape[-3]
        )
        return cls(
            problem=problem,
            q=jnp.swapaxes(split_heads(q, -2), -4, -3),
            k=jnp.moveaxis(k, -2, -3),
            v=jnp.moveaxis(v, -2, -3),
            bias=optional("bias", split_scores),
            mask=optional("mask", split_scores),
            blocks=optional(
                "block_numbers", lambda x: Blocks(split_heads(x, -3), terms["block_bits"])
            ),
            query_lengths=optional("query_lengths", lambda x: x[..., None, None, None, None]),
            key_value_lengths=optional(
                "key_value_lengths", lambda x: x[..., None, None, None, None]
            ),
            query_segments=optional("query_segments", by_query),
            key_value_segments=optional("key_value_segments", by_key),
            query_positions=optional("query_positions", by_query),
            key_value_positions=optional("key_value_positions", by_key),
            sinks=optional("sinks", lambda x: split_heads(x, -1)[..., None, :]),
            # Word by word: XLA takes a slice of what was stacked, not of its reshape, for a word.
            dropout_state=optional(
                "dropout_state",
                lambda x: jnp.stack(
                    [split_heads(x[..., i], -1) for i in range(x.shape[-1])], axis=-1
                ),
            ),
            score_ids=optional("score_ids", lambda x: split_heads(x, -2)),
            captures={name: terms[name] for name in problem.captures},
            block_q=block_q,
            block_kv=block_kv,
            starts=_tile_starts(problem, q.shape[-3], k.shape[-3], block_q, block_kv),
        )

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self.q.shape[:-1]

    def split_query_heads(self, x: jax.Array) -> jax.Array:
        """Brings `[*B, T, N, H]` to `[*B, K, T, G, H]`."""
        *batch, kv_heads, q_len, group = self.row_shape
        return jnp.swapaxes(x.reshape(*batch, q_len, kv_heads, group, x.shape[-1]), -4, -3)

    def join_query_heads(self, x: jax.Array) -> jax.Array:
        """Brings `[*B, K, T, G, H]` to `[*B, T, N, H]`."""
        *batch, kv_heads, q_len, group = self.row_shape
        return jnp.swapaxes(x, -4, -3).reshape(*batch, q_len, kv_heads * group, x.shape[-1])

    def split_rows(self, x: jax.Array) -> jax.Array:
        """Brings `[*B, N, T]` to `[*B, K, T, G]`."""
        *batch, kv_heads, q_len, group = self.row_shape
        return jnp.swapaxes(x.reshape(*batch, kv_heads, group, q_len), -2, -1)

    def join_rows(self, x: jax.Array) -> jax.Array:
        """Brings `[*B, K, T, G]` to `[*B, N, T]`."""
        *batch, kv_heads, q_len, group = self.row_shape
        return jnp.swapaxes(x, -2, -1).reshape(*batch, kv_heads * group, q_len)

    @property
    def windowed(self) -> bool:
        """Tells whether the window can hide a key from a query."""
        left, right = self.problem.window
        if left is None and right is None:
            return False
        offset = self.offset
        if self.query_positions is not None or not isinstance(offset, int):
            return True
        q_len, kv_len = self.q.shape[-3], self.k.shape[-2]
        return (left is not None and left < q_len - 1 + offset) or (
            right is not None and right < kv_len - 1 - offset
        )

    @property
    def offset(self) -> jax.Array | int:
        """The key index at which query 0 stands."""
        if not self.problem.bottom_right:
            return 0
        q_len = self.q.shape[-3] if self.query_lengths is None else self.query_lengths
        kv_len = self.k.shape[-2] if self.key_value_lengths is None else self.key_value_lengths
        return kv_len - q_len

    @property
    def only_tile(self) -> "Tile | None":
        """The one tile that has all queries and keys, if there is one."""
        sizes = self.q.shape[-3], self.k.shape[-2]
        is_one = (self.block_q, self.block_kv) == sizes and len(self.starts) == 1
        return self.tile(self.starts[0]) if is_one else None

    def carry(self, step, state):
        """Carries a state through `step(state, start)` of each tile that may show anything."""
        blocks = self.blocks

        def shown(state, start):
            if blocks is None:
                return step(state, start)
            seen = blocks.shown(*self.spans(start))
            return lax.cond(seen, lambda: step(state, start), lambda: state)

        return lax.scan(lambda state, start: (shown(state, start), None), state, self.starts)[0]

    def spans(self, start: jax.Array | np.ndarray) -> tuple[Span, Span]:
        """The queries and the keys of a tile."""
        return (
            Span(start[0], start[1], self.block_q),
            Span(start[2], start[3], self.block_kv),
        )

    def tile(self, start: jax.Array | np.ndarray) -> "Tile":
        rows, keys = self.spans(start)
        return Tile(
            sweep=self,
            rows=rows,
            keys=keys,
            q=read(self.q, rows, -3),
            k=read(self.k, keys, -2),
            v=read(self.v, keys, -2),
        )


@dataclasses.dataclass(frozen=True)
class Tile:
    """The scores of one stretch of queries against one stretch of keys."""

    sweep: Sweep
    rows: Span
    keys: Span
    q: jax.Array  # [*B, K, t, G, H]
    k: jax.Array  # [*B, K, s, H]
    v: jax.Array  # [*B, K, s, Hv]

    def scores(self) -> jax.Array:
        """Computes the scaled scores with bias `[*B, K, t, G, s]`, those of hidden pairs too."""
        problem, bias = self.sweep.problem, self.sweep.bias
        scores = problem.scale * product_of_pairs(
            problem, "...ktgh,...ksh->...ktgs", self.q, self.k
        )
        return scores if bias is None else scores + self._scores_of(bias).astype(problem.sum_dtype)

    def logits(
        self, scores: jax.Array, seen: Seen, captures: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, Seen]:
        """Computes the logits of `scores`, -inf where not seen, and what is seen then."""
        problem = self.sweep.problem
        logits = scores
        if problem.softcap is not None:
            # The slope of tanh at a hidden NaN would be NaN, and so would zero times it.
            logits = seen.keep(logits, 0.0)
            logits = problem.softcap * jnp.tanh(logits / problem.softcap)
        if problem.score is not None:
            ids = self.sweep.score_ids
            ids = jnp.zeros((*[1] * (scores.ndim - 2), 2), jnp.int32) if ids is None else ids
            batch, head = (ids[..., None, :, i, None] for i in range(2))
            visible = jnp.ones([1] * scores.ndim, bool) if seen.pair is None else seen.pair
            arguments = (scores, batch, head, *self._indices())
            logits = problem.score.of_tile(visible, arguments, [*captures.values()])
        if self.sweep.bias is not None or problem.score is not None:
            seen = self._seen(seen.queries, seen.keys, both(seen.pairs, logits != -jnp.inf))
        return seen.keep(logits, -jnp.inf), seen

    def drop(self, weights: jax.Array) -> jax.Array:
        """Applies dropout, where the problem has any."""
        state, rate = self.sweep.dropout_state, self.sweep.problem.dropout_rate
        if state is None:
            return weights
        keep = keep_mask(
            state, rate, self.rows.start, self.keys.start, self.rows.size, self.keys.size
        )
        return jnp.where(jnp.swapaxes(keep, -3, -2), weights * (1.0 / (1.0 - rate)), 0.0)

    def add_to_bias(self, dbias: jax.Array, dlogits: jax.Array) -> jax.Array:
        """Adds the tile's `[*B, K, t, G, s]` to dbias, summed over the dims that are 1 there."""
        update = _sum_broadcast(dlogits, dbias)
        return self._write_scores(dbias, self._scores_of(dbias) + update)

    def seen(self) -> Seen:
        """Computes what indices and terms let see."""
        sweep, rows, keys = self.sweep, self.rows, self.keys
        query, key = self._indices()
        by_query = [
            query >= rows.first if sweep.q.shape[-3] % rows.size else None,
            None if sweep.query_lengths is None else query < sweep.query_lengths,
        ]
        by_key = [
            key >= keys.first if sweep.k.shape[-2] % keys.size else None,
            None if sweep.key_value_lengths is None else key < sweep.key_value_lengths,
        ]
        by_pair = []
        if sweep.windowed:
            query, key = query + sweep.offset, key
            if sweep.query_positions is not None and sweep.key_value_positions is not None:
                query = read(sweep.query_positions, rows, -3)
                key = read(sweep.key_value_positions, keys, -1)
            by_pair.append(self._within_window(query, key))
        if sweep.query_segments is not None and sweep.key_value_segments is not None:
            segments = read(sweep.query_segments, rows, -3)
            by_pair.append(segments == read(sweep.key_value_segments, keys, -1))
        if sweep.mask is not None:
            by_pair.append(self._scores_of(sweep.mask))
        if sweep.blocks is not None:
            by_pair.append(sweep.blocks.seen(rows, keys))
        return self._seen(both(*by_query), both(*by_key), both(*by_pair))

    def _seen(
        self, queries: jax.Array | None, keys: jax.Array | None, pairs: jax.Array | None
    ) -> Seen:
        """Takes what hides pairs for what hides queries or keys, if it varies along these alone."""
        if pairs is not None and pairs.shape[-3:-1] == (1, 1):
            keys, pairs = both(keys, pairs), None
        elif pairs is not None and pairs.shape[-1] == 1:
            queries, pairs = both(queries, pairs), None
        leading = () if keys is None else zip(keys.shape[:-4], self.k.shape[:-3], strict=True)
        if any(size not in (1, own) for size, own in leading):
            # Members that share keys hide others of them, each its own.
            keys, pairs = None, both(keys, pairs)
        return Seen(queries, keys, pairs)

    def _indices(self) -> tuple[jax.Array, jax.Array]:
        """Computes the indices of queries and keys, each of rank and place as in the scores."""
        lead = (1,) * (self.sweep.q.ndim - 3)  # all of one rank, for jax_numpy_rank_promotion
        query = jnp.arange(self.rows.size, dtype=jnp.int32).reshape(*lead, -1, 1, 1)
        key = jnp.arange(self.keys.size, dtype=jnp.int32).reshape(*lead, 1, 1, -1)
        return self.rows.start + query, self.keys.start + key

    def _within_window(self, query: jax.Array, key: jax.Array) -> jax.Array:
        """Tells which queries see which keys by where both stand, anywhere in int32."""
        left, right = self.sweep.problem.window
        # Differences wrap around; those that are not negative are exact as uint32.
        seen = jnp.bool_(True)
        if left is not None:
            seen &= (key >= query) | ((query - key).astype(jnp.uint32) <= jnp.uint32(left))
        if right is not None:
            seen &= (key <= query) | ((key - query).astype(jnp.uint32) <= jnp.uint32(right))
        return seen

    def _scores_of(self, x: jax.Array) -> jax.Array:
        """Reads the tile's part of `[*B, K, T, G, S]`, any of them 1."""
        return read(read(x, self.rows, -3), self.keys, -1)

    def _write_scores(self, x: jax.Array, update: jax.Array) -> jax.Array:
        zero = np.int32(0)  # as the other starts, in x64 mode too
        row = zero if x.shape[-3] == 1 else self.rows.start
        key = zero if x.shape[-1] == 1 else self.keys.start
        start = [*(zero for _ in x.shape[:-3]), row, zero, key]
        return lax.dynamic_update_slice(x, update, start, allow_negative_indices=False)


def _block_sizes(rows_at_once: int, q_len: int, kv_len: int) -> tuple[int, int]:
    """Chooses how many queries and keys a tile has: all of both where the scores are few."""
    block = _BLOCK
    if not isinstance(rows_at_once, int):  # a symbolic dim, under jax.export
        rows_at_once = _TILE_ELEMENTS // block**2
    while block > _MIN_BLOCK and rows_at_once * block * block > _TILE_ELEMENTS:
        block //= 2
    if not (isinstance(q_len, int) and isinstance(kv_len, int)):
        raise NotImplementedError(
            f"backend 'xla' needs known lengths; T is {q_len} and S is {kv_len} in this export"
        )
    if min(q_len, kv_len) <= block and rows_at_once * q_len * kv_len <= _TILE_ELEMENTS:
        return q_len, kv_len
    return min(block, q_len), min(block, kv_len)


def _tile_starts(
    problem: Problem, q_len: int, kv_len: int, block_q: int, block_kv: int
) -> np.ndarray:
    """Lists the tiles that the window can reach, as rows of int32 (see `Sweep.starts`)."""
    first_query = np.arange(0, q_len, block_q)[:, None]
    first_key = np.arange(0, kv_len, block_kv)
    reached = np.ones((first_query.size, first_key.size), bool)
    lengths_move_it = {"query_lengths", "key_value_lengths"} & set(problem.terms)
    by_index = "query_positions" not in problem.terms
    if by_index and not (problem.bottom_right and lengths_move_it):
        offset = kv_len - q_len if problem.bottom_right else 0
        left, right = problem.window
        if left is not None:
            reached &= first_key + block_kv - 1 - first_query - offset >= -left
        if right is not None:
            reached &= first_key - (first_query + block_q - 1) - offset <= right
    i, j = np.nonzero(reached)
    first_query, first_key = i * block_q, j * block_kv
    starts = (
        np.minimum(first_query, q_len - block_q),
        first_query,
        np.minimum(first_key, kv_len - block_kv),
        first_key,
    )
    return np.stack(starts, axis=-1).astype(np.int32)


def read(x: jax.Array, span: Span, axis: int) -> jax.Array:
    """Reads the span along one axis; an axis of size 1 is read whole."""
    if x.shape[axis] in (1, span.size):
        return x
    # Starts count from the front: what else jax adds for negative ones takes a quarter of tracing.
    return lax.dynamic_slice_in_dim(
        x, span.start, span.size, axis % x.ndim, allow_negative_indices=False
    )


def write(x: jax.Array, update: jax.Array, span: Span, axis: int) -> jax.Array:
    if x.shape[axis] == span.size:
        return update
    return lax.dynamic_update_slice_in_dim(
        x, update, span.start, axis % x.ndim, allow_negative_indices=False
    )


def add(x: jax.Array, update: jax.Array, span: Span, axis: int) -> jax.Array:
    return write(x, read(x, span, axis) + _sum_broadcast(update, x), span, axis)


def _sum_broadcast(update: jax.Array, x: jax.Array) -> jax.Array:
    """Sums an update over the dims that are 1 in what it is added to."""
    sizes = zip(x.shape, update.shape, strict=True)
    ones = [axis for axis, (own, full) in enumerate(sizes) if own == 1 and full != 1]
    return jnp.sum(update, axis=ones, keepdims=True)
