"""Backend "xla": exact attention in linear memory, in JAX alone, on any platform.

The score matrix is cut into tiles and only the tiles that the window can reach are visited, one
`lax.scan` step each; a tile lives for one step. `forward` keeps the running maximum, sum and
weighted values of every query (online softmax), `backward` recomputes the weights from lse. Both
are ordinary differentiable JAX, which is what higher derivatives of the primitives use.

Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv:1805.02867);
Rabe and Staats (arXiv:2112.05682); Dao, FlashAttention-2 (arXiv:2307.08691).
"""

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_flash._philox import keep_mask
from jax_flash._problem import Problem
from jax_flash._terms import sum_dtype
from jax_flash._varying import vary_over
from jax_flash.block_masks import EMPTY, FULL, WORD, words_at

_BLOCK = 512  # queries and keys of one tile, less when there are many heads
_MIN_BLOCK = 128
_TILE_ELEMENTS = 2**24  # scores of one tile over all batch rows and heads: 64 MiB in float32


def forward(problem: Problem, *operands: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes attention.

    Arguments:
      problem: what to compute.
      operands: q `[*B, T, N, H]`, k `[*B, S, K, H]`, v `[*B, S, K, Hv]`, and problem.optional; any
        of *B may be 1 but in q.

    Returns: out `[*B, T, N, Hv]` in the dtype of q, and lse `[*B, N, T]` in problem.sum_dtype.
    """
    sweep = _Sweep.of(problem, *operands)
    empty_rows = sweep.row_shape  # [*B, K, G, T]
    state = (
        jnp.full(empty_rows, -jnp.inf, problem.sum_dtype),
        jnp.zeros(empty_rows, problem.sum_dtype),
        jnp.zeros((*empty_rows, sweep.v.shape[-1]), problem.sum_dtype),
    )

    def step(state, start):
        tile = sweep.tile(start)
        largest, total, weighted = (
            _read(x, tile.rows, axis) for x, axis in zip(state, _STATE_AXES, strict=True)
        )
        scores, visible = tile.scores()
        logits, visible = tile.logits(scores, visible, sweep.captures)
        new_largest = jnp.maximum(largest, lax.stop_gradient(jnp.max(logits, axis=-1)))
        # A row that has seen no key yet has a maximum of -inf; exp(-inf - 0) is the 0 it needs.
        shift = jnp.where(new_largest == -jnp.inf, 0.0, new_largest)
        rescale = jnp.exp(largest - shift)
        weights = jnp.exp(logits - shift[..., None])
        total = rescale * total + jnp.sum(weights, axis=-1)
        v, v_bad = split_bad(tile.v)
        weights = jnp.where(visible, tile.drop(weights) + v_bad[..., None, None, :], 0.0)
        weighted = rescale[..., None] * weighted + product(
            sweep.problem, "...kgts,...ksh->...kgth", weights, v
        )
        new = (new_largest, total, weighted)
        return tuple(
            _write(x, y, tile.rows, axis)
            for x, y, axis in zip(state, new, _STATE_AXES, strict=True)
        ), None

    state = vary_over(state, operands)
    (largest, total, weighted), _ = lax.scan(sweep.where_shown(step), state, sweep.starts)

    if sweep.sinks is not None:
        joined = jnp.maximum(largest, lax.stop_gradient(sweep.sinks))
        shift = jnp.where(joined == -jnp.inf, 0.0, joined)
        rescale = jnp.exp(largest - shift)
        total = rescale * total + jnp.exp(sweep.sinks - shift)
        weighted = rescale[..., None] * weighted
        largest = joined
    empty = largest == -jnp.inf
    total = jnp.where(empty, 1.0, total)
    out = weighted / total[..., None]
    lse = jnp.where(empty, -jnp.inf, largest + jnp.log(total))
    return sweep.join_query_heads(out).astype(problem.dtype), lse.reshape(sweep.lse_shape)


def backward(
    problem: Problem,
    *operands: jax.Array,
    with_dlse: bool,
    with_dbias: bool,
    captures: tuple[str, ...] = (),
) -> tuple[jax.Array, ...]:
    """Computes the gradients of `forward`.

    Arguments:
      problem: what was computed.
      operands: q, k, v, out, lse, dout `[*B, T, N, Hv]`, with_dlse also dlse `[*B, N, T]`,
        and problem.optional.
      with_dlse: dlse is among the operands; otherwise it is zero.
      with_dbias: also compute the gradient of bias.
      captures: the arrays of problem.score to which gradients are computed as well.

    Returns:
      dq, dk, dv in the shapes and dtypes of q, k, v; with_dbias also dbias in those of bias; then
      those of `captures`.
      Where a dim is 1 because it is broadcast, the gradient is summed along it.
    """
    q, k, v, out, lse, dout, *rest = operands
    dlse = rest.pop(0) if with_dlse else None
    sweep = _Sweep.of(problem, q, k, v, *rest)
    delta = row_delta(out, lse, dout, dlse, problem.name_terms(rest).get("sinks"))
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)  # makes exp(logits - lse) of these rows 0
    lse, delta = (x.reshape(sweep.row_shape) for x in (lse, delta))
    dout = sweep.split_query_heads(dout)
    bias = sweep.bias if with_dbias else None
    state = tuple(
        None if x is None else jnp.zeros(x.shape, problem.sum_dtype)
        for x in (sweep.q, sweep.k, sweep.v, bias)
    )
    moving = {name: problem.name_terms(rest)[name] for name in captures}
    state = (*state, [jnp.zeros_like(x) for x in moving.values()])

    def step(state, start):
        dq, dk, dv, dbias, dcaptures = state
        tile = sweep.tile(start)
        (q, _), (k, _), (v, v_bad) = (split_bad(x) for x in (tile.q, tile.k, tile.v))
        do, do_bad = split_bad(_read(dout, tile.rows, -2))
        row_lse, row_delta = (_read(x, tile.rows, -1) for x in (lse, delta))

        scores, visible = tile.scores()

        def logits_of(scores, *moving_now):
            arrays = {**sweep.captures, **dict(zip(moving, moving_now, strict=True))}
            return tile.logits(scores, visible, arrays)

        logits, pull, visible = jax.vjp(logits_of, scores, *moving.values(), has_aux=True)
        weights = jnp.exp(logits - row_lse[..., None])
        dropped = jnp.where(visible, tile.drop(weights) + do_bad[..., None], 0.0)
        dv = _add(dv, product(sweep.problem, "...kgts,...kgth->...ksh", dropped, do), tile.keys, -2)
        dweights = product(sweep.problem, "...kgth,...ksh->...kgts", do, v)
        dweights = tile.drop(dweights + do_bad[..., None] + v_bad[..., None, None, :])
        # What this is differentiated by must not meet NaN of hidden values times 0.
        dweights = jnp.where(visible, dweights, 0.0)
        # A row that met NaN has it in lse and delta.
        dlogits = jnp.where(visible, weights * (dweights - row_delta[..., None]), 0.0)
        dlogits, *of_captures = pull(dlogits)
        # A logit of -inf has no gradient, whatever its slope.
        dlogits = jnp.where(visible, dlogits, 0.0)
        dcaptures = [x + y for x, y in zip(dcaptures, of_captures, strict=True)]
        if dbias is not None:
            dbias = tile.add_to_bias(dbias, dlogits)
        dlogits = problem.scale * dlogits
        dq = _add(dq, product(sweep.problem, "...kgts,...ksh->...kgth", dlogits, k), tile.rows, -2)
        dk = _add(dk, product(sweep.problem, "...kgts,...kgth->...ksh", dlogits, q), tile.keys, -2)
        return (dq, dk, dv, dbias, dcaptures), None

    state = vary_over(state, operands)
    (dq, dk, dv, dbias, dcaptures), _ = lax.scan(sweep.where_shown(step), state, sweep.starts)
    gradients = [
        sweep.join_query_heads(dq),
        jnp.moveaxis(dk, -3, -2),
        jnp.moveaxis(dv, -3, -2),
    ]
    gradients = [x.astype(problem.dtype) for x in gradients]
    if dbias is not None:
        own = problem.name_terms(rest)["bias"]
        gradients.append(dbias.reshape(own.shape).astype(own.dtype))
    return (*gradients, *dcaptures)


def row_delta(out, lse, dout, dlse, sinks) -> jax.Array:
    """Computes what every weight of a row has in its gradient: rowsum(out * dout) - dlse.

    Arguments:
      out, dout: `[*B, T, N, Hv]`.
      lse: `[*B, N, T]`, in the dtype of sums, as all that follow.
      dlse: `[*B, N, T]` or None, which is zero.
      sinks: `[*B, N]`, any of *B 1, or None.

    Returns: `[*B, N, T]`. Whatever dout holds in a row that sees no key, it is -dlse there
    where lse is the sink, and 0 where it is -inf.
    """
    delta = jnp.sum(out.astype(lse.dtype) * dout.astype(lse.dtype), axis=-1)
    delta = jnp.swapaxes(delta, -1, -2)
    nothing = -jnp.inf if sinks is None else sinks[..., None]
    # A row may also see keys of no weight beside its sink; it counts in full unless out is 0.
    unseen = (lse == nothing) & jnp.swapaxes(jnp.all(out == 0, axis=-1), -1, -2)
    delta = jnp.where(unseen, 0.0, delta)
    if dlse is not None:
        delta = delta - dlse
    return jnp.where(lse == -jnp.inf, 0.0, delta)


@dataclasses.dataclass(frozen=True)
class _Span:
    """One tile's stretch of queries or keys.

    The last stretch is moved back to end with the sequence; positions before `first` were visited
    by the stretch before it.
    """

    start: jax.Array
    first: jax.Array
    size: int


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """A block mask."""

    numbers: jax.Array  # [*B, K, G, blocks, blocks], any of *B, and of K and G, 1
    bits: jax.Array  # [*B, C, block, words], any of *B 1

    def seen(self, rows: _Span, keys: _Span) -> jax.Array:
        """Reads what it lets see: bool, broadcasting to `[*B, K, G, t, s]`."""
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
        return lax.dynamic_slice_in_dim(seen, keys.start - first * WORD, keys.size, -1)

    def shown(self, rows: _Span, keys: _Span) -> jax.Array:
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
class _Sweep:
    """The operands in the layout of the tiles (G = N // K query heads read one kv head)."""

    problem: Problem
    q: jax.Array  # [*B, K, G, T, H]
    k: jax.Array  # [*B, K, S, H], any of *B 1, as of v and of all below
    v: jax.Array  # [*B, K, S, Hv]
    bias: jax.Array | None  # [*B, K, G, T, S], any of them 1
    mask: jax.Array | None  # [*B, K, G, T, S], any of them 1
    blocks: _Blocks | None
    query_lengths: jax.Array | None  # [*B, 1, 1, 1, 1]
    key_value_lengths: jax.Array | None  # [*B, 1, 1, 1, 1]
    query_segments: jax.Array | None  # [*B, 1, 1, T, 1]
    key_value_segments: jax.Array | None  # [*B, 1, 1, 1, S]
    query_positions: jax.Array | None  # [*B, 1, 1, T, 1]
    key_value_positions: jax.Array | None  # [*B, 1, 1, 1, S]
    sinks: jax.Array | None  # [*B, K, G, 1], any of *B 1
    dropout_state: jax.Array | None  # [*B, K, G, 4 or 6]
    score_ids: jax.Array | None  # [*B, K, G, 2]
    captures: dict[str, jax.Array]  # [*B, elements], any of *B 1
    block_q: int
    block_kv: int
    starts: np.ndarray  # [tiles, 4]: start and first of the queries, start and first of the keys

    @classmethod
    def of(cls, problem: Problem, q, k, v, *rest) -> "_Sweep":
        terms = problem.name_terms(rest)
        q_heads, kv_heads = q.shape[-2], k.shape[-2]

        def split_heads(x, axis):
            heads = x.shape[axis]
            split = (1, 1) if heads == 1 else (kv_heads, q_heads // kv_heads)
            axis = axis % x.ndim
            return x.reshape(*x.shape[:axis], *split, *x.shape[axis + 1 :])

        def by_query(x):
            return x[..., None, None, :, None]

        def by_key(x):
            return x[..., None, None, None, :]

        def optional(name, layout):
            return layout(terms[name]) if name in terms else None

        block_q, block_kv = _block_sizes(
            math.prod(q.shape[:-3]) * q_heads, q.shape[-3], k.shape[-3]
        )
        return cls(
            problem=problem,
            q=split_heads(jnp.moveaxis(q, -2, -3), -3),
            k=jnp.moveaxis(k, -2, -3),
            v=jnp.moveaxis(v, -2, -3),
            bias=optional("bias", lambda x: split_heads(x, -3)),
            mask=optional("mask", lambda x: split_heads(x, -3)),
            blocks=optional(
                "block_numbers", lambda x: _Blocks(split_heads(x, -3), terms["block_bits"])
            ),
            query_lengths=optional("query_lengths", lambda x: x[..., None, None, None, None]),
            key_value_lengths=optional(
                "key_value_lengths", lambda x: x[..., None, None, None, None]
            ),
            query_segments=optional("query_segments", by_query),
            key_value_segments=optional("key_value_segments", by_key),
            query_positions=optional("query_positions", by_query),
            key_value_positions=optional("key_value_positions", by_key),
            sinks=optional("sinks", lambda x: split_heads(x, -1)[..., None]),
            dropout_state=optional("dropout_state", lambda x: split_heads(x, -2)),
            score_ids=optional("score_ids", lambda x: split_heads(x, -2)),
            captures={name: terms[name] for name in problem.captures},
            block_q=block_q,
            block_kv=block_kv,
            starts=_tile_starts(problem, q.shape[-3], k.shape[-3], block_q, block_kv),
        )

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self.q.shape[:-1]

    @property
    def lse_shape(self) -> tuple[int, ...]:
        *batch, kv_heads, group, q_len = self.row_shape
        return (*batch, kv_heads * group, q_len)

    def split_query_heads(self, x: jax.Array) -> jax.Array:
        """Brings `[*B, T, N, H]` to `[*B, K, G, T, H]`."""
        *batch, kv_heads, group, q_len = self.row_shape
        return jnp.moveaxis(x, -2, -3).reshape(*batch, kv_heads, group, q_len, x.shape[-1])

    def join_query_heads(self, x: jax.Array) -> jax.Array:
        """Brings `[*B, K, G, T, H]` to `[*B, T, N, H]`."""
        return jnp.moveaxis(x.reshape(*self.lse_shape, x.shape[-1]), -3, -2)

    def where_shown(self, step):
        """Leaves a step of a scan out where the block mask hides its whole tile."""
        blocks = self.blocks
        if blocks is None:
            return step

        def either(state, start):
            shown = blocks.shown(*self.spans(start))
            return lax.cond(shown, lambda: step(state, start)[0], lambda: state), None

        return either

    def spans(self, start: jax.Array) -> tuple[_Span, _Span]:
        """The queries and the keys of a tile."""
        return (
            _Span(start[0], start[1], self.block_q),
            _Span(start[2], start[3], self.block_kv),
        )

    def tile(self, start: jax.Array) -> "_Tile":
        rows, keys = self.spans(start)
        return _Tile(
            sweep=self,
            rows=rows,
            keys=keys,
            q=_read(self.q, rows, -2),
            k=_read(self.k, keys, -2),
            v=_read(self.v, keys, -2),
        )


@dataclasses.dataclass(frozen=True)
class _Tile:
    """The scores of one stretch of queries against one stretch of keys."""

    sweep: _Sweep
    rows: _Span
    keys: _Span
    q: jax.Array  # [*B, K, G, t, H]
    k: jax.Array  # [*B, K, s, H]
    v: jax.Array  # [*B, K, s, Hv]

    def scores(self) -> tuple[jax.Array, jax.Array]:
        """Computes the scaled scores with bias `[*B, K, G, t, s]`, and what is visible."""
        sweep = self.sweep
        (q, q_bad), (k, k_bad) = split_bad(self.q), split_bad(self.k)
        logits = sweep.problem.scale * product(sweep.problem, "...kgth,...ksh->...kgts", q, k)
        logits = logits + q_bad[..., None] + k_bad[..., None, None, :]
        if sweep.bias is not None:
            logits = logits + self._scores_of(sweep.bias).astype(sweep.problem.sum_dtype)
        return logits, self._visible()

    def logits(
        self, scores: jax.Array, visible: jax.Array, captures: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """Computes the logits of `scores`, -inf where not visible, and what is visible then."""
        problem = self.sweep.problem
        logits = scores
        if problem.softcap is not None:
            # The slope of tanh at a hidden NaN would be NaN, and so would zero times it.
            logits = jnp.where(visible, logits, 0.0)
            logits = problem.softcap * jnp.tanh(logits / problem.softcap)
        if problem.score is not None:
            ids = self.sweep.score_ids
            ids = jnp.zeros((*[1] * (scores.ndim - 2), 2), jnp.int32) if ids is None else ids
            batch, head = (ids[..., i, None, None] for i in range(2))
            arguments = (scores, batch, head, *self._indices())
            logits = problem.score.of_tile(visible, arguments, [*captures.values()])
        if self.sweep.bias is not None or problem.score is not None:
            visible &= logits != -jnp.inf
        return jnp.where(visible, logits, -jnp.inf), visible

    def drop(self, weights: jax.Array) -> jax.Array:
        """Applies dropout, where the problem has any."""
        state, rate = self.sweep.dropout_state, self.sweep.problem.dropout_rate
        if state is None:
            return weights
        keep = keep_mask(
            state, rate, self.rows.start, self.keys.start, self.rows.size, self.keys.size
        )
        return jnp.where(keep, weights * (1.0 / (1.0 - rate)), 0.0)

    def add_to_bias(self, dbias: jax.Array, dlogits: jax.Array) -> jax.Array:
        """Adds the tile's `[*B, K, G, t, s]` to dbias, summed over the dims that are 1 there."""
        update = _sum_broadcast(dlogits, dbias)
        return self._write_scores(dbias, self._scores_of(dbias) + update)

    def _visible(self) -> jax.Array:
        """Computes bool, broadcasting to `[*B, K, G, t, s]`."""
        sweep, rows, keys = self.sweep, self.rows, self.keys
        query, key = self._indices()
        visible = (query >= rows.first) & (key >= keys.first)
        if sweep.query_lengths is not None:
            visible &= query < sweep.query_lengths
        if sweep.key_value_lengths is not None:
            visible &= key < sweep.key_value_lengths
        if any(side is not None for side in sweep.problem.window):
            if sweep.query_positions is None or sweep.key_value_positions is None:
                visible &= self._within_window(query + self._offset(), key)
            else:
                visible &= self._within_window(
                    _read(sweep.query_positions, rows, -2),
                    _read(sweep.key_value_positions, keys, -1),
                )
        if sweep.query_segments is not None and sweep.key_value_segments is not None:
            visible &= _read(sweep.query_segments, rows, -2) == _read(
                sweep.key_value_segments, keys, -1
            )
        if sweep.mask is not None:
            visible &= self._scores_of(sweep.mask)
        if sweep.blocks is not None:
            visible &= sweep.blocks.seen(rows, keys)
        return visible

    def _indices(self) -> tuple[jax.Array, jax.Array]:
        """Computes the indices of queries and keys, each of rank and place as in the scores."""
        lead = (1,) * (self.sweep.q.ndim - 2)  # all of one rank, for jax_numpy_rank_promotion
        query = jnp.arange(self.rows.size, dtype=jnp.int32).reshape(*lead, -1, 1)
        key = jnp.arange(self.keys.size, dtype=jnp.int32).reshape(*lead, 1, -1)
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

    def _offset(self) -> jax.Array | int:
        """Computes the key index at which query 0 stands."""
        sweep = self.sweep
        if not sweep.problem.bottom_right:
            return 0
        q_len = sweep.q.shape[-2] if sweep.query_lengths is None else sweep.query_lengths
        kv_len = sweep.k.shape[-2] if sweep.key_value_lengths is None else sweep.key_value_lengths
        return kv_len - q_len

    def _scores_of(self, x: jax.Array) -> jax.Array:
        """Reads the tile's part of `[*B, K, G, T, S]`, any of them 1."""
        return _read(_read(x, self.rows, -2), self.keys, -1)

    def _write_scores(self, x: jax.Array, update: jax.Array) -> jax.Array:
        zero = np.int32(0)  # as the other starts, in x64 mode too
        row = zero if x.shape[-2] == 1 else self.rows.start
        key = zero if x.shape[-1] == 1 else self.keys.start
        start = [*(zero for _ in x.shape[:-2]), row, key]
        return lax.dynamic_update_slice(x, update, start, allow_negative_indices=False)


_STATE_AXES = (-1, -1, -2)  # of T, in the maximum, the sum and the weighted values


def _block_sizes(rows_at_once: int, q_len: int, kv_len: int) -> tuple[int, int]:
    block = _BLOCK
    if not isinstance(rows_at_once, int):  # a symbolic dim, under jax.export
        rows_at_once = _TILE_ELEMENTS // block**2
    while block > _MIN_BLOCK and rows_at_once * block * block > _TILE_ELEMENTS:
        block //= 2
    if not (isinstance(q_len, int) and isinstance(kv_len, int)):
        raise NotImplementedError(
            f"backend 'xla' needs known lengths; T is {q_len} and S is {kv_len} in this export"
        )
    return min(block, q_len), min(block, kv_len)


def _tile_starts(
    problem: Problem, q_len: int, kv_len: int, block_q: int, block_kv: int
) -> np.ndarray:
    """Lists the tiles that the window can reach, as rows of int32 (see `_Sweep.starts`)."""
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


def product(problem: Problem, subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Multiplies in the problem's dtype and precision, and sums in its sum_dtype.

    Leading dims of x `[*B, K, G, ...]` that are 1 in y `[*B, K, ...]`, those of members that share
    it, join G: to XLA's CPU batch dims [1, 2] of one operand and [0, 1] of the other are no product
    of bfloat16.
    """
    leading = range(x.ndim - 4)
    shared = [axis for axis in leading if y.shape[axis] == 1 != x.shape[axis]]
    before_group = [x.ndim - 3 - len(shared) + i for i in range(len(shared))]
    if shared:
        x, y = jnp.moveaxis(x, shared, before_group), jnp.squeeze(y, shared)
        group = x.shape[before_group[0] : -2]
        x = x.reshape(*x.shape[: before_group[0]], math.prod(group), *x.shape[-2:])
    exact = problem.dtype == "float64"
    made = jnp.einsum(
        subscripts,
        x.astype(problem.dtype),
        y.astype(problem.dtype),
        precision=lax.Precision("highest" if exact else problem.precision),
        preferred_element_type=problem.sum_dtype,
    )
    if not shared:
        return made
    made = made.reshape(*made.shape[:-3], *group, *made.shape[-2:])
    return jnp.moveaxis(made, before_group, shared)


def split_bad(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Splits `[..., L, H]` into x with 0 for NaN and inf, and `[..., L]`: NaN where x had any.

    Elsewhere the second, float32 or wider, is 0. A product then cannot spread NaN through a weight
    of 0, and adding the second to the weights brings it back where it is seen.
    """
    finite = jnp.isfinite(x)
    bad = jnp.where(jnp.all(finite, axis=-1), 0.0, jnp.nan)
    bad = bad.astype(sum_dtype(x.dtype))
    return jnp.where(finite, x, 0), bad


def _read(x: jax.Array, span: _Span, axis: int) -> jax.Array:
    """Reads the span along one axis; an axis of size 1 is read whole."""
    if x.shape[axis] == 1:
        return x
    # Starts count from the front: what else jax adds for negative ones takes a quarter of tracing.
    return lax.dynamic_slice_in_dim(
        x, span.start, span.size, axis % x.ndim, allow_negative_indices=False
    )


def _write(x: jax.Array, update: jax.Array, span: _Span, axis: int) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(
        x, update, span.start, axis % x.ndim, allow_negative_indices=False
    )


def _add(x: jax.Array, update: jax.Array, span: _Span, axis: int) -> jax.Array:
    return _write(x, _read(x, span, axis) + _sum_broadcast(update, x), span, axis)


def _sum_broadcast(update: jax.Array, x: jax.Array) -> jax.Array:
    """Sums an update over the dims that are 1 in what it is added to."""
    sizes = zip(x.shape, update.shape, strict=True)
    ones = [axis for axis, (own, full) in enumerate(sizes) if own == 1 and full != 1]
    return jnp.sum(update, axis=ones, keepdims=True)
