"""Backend "xla" of decoding: a loop over blocks of the cache, in JAX alone, on any platform.

Only the blocks that some row's queries see are visited, each is read from the cache for one step of
the loop, and the running maximum, sum and weighted values of every query are kept (online softmax),
as in `blockwise.py`.

Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv:1805.02867).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jax_flash import _cache, _chosen, _latent_rows
from jax_flash._problem import Problem
from jax_flash._products import dot
from jax_flash._seen import split_bad
from jax_flash._varying import vary_over

_BLOCK = 512  # positions of the cache in one step


def decode(
    problem: Problem,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    lengths: jax.Array,
    page_table: jax.Array | None,
    new_k: jax.Array | None,
    new_v: jax.Array | None,
    sinks: jax.Array | None,
    key_scale: jax.Array | None,
    value_scale: jax.Array | None,
    indices: jax.Array | None,
    value_dim: int,
) -> tuple[jax.Array, ...]:
    """Computes attention to a cache, appending to it first.

    Arguments:
      problem: what to compute; its window counts from each query's position.
      q: `[B, T, N, H]`.
      k: `[P, S, K, H]`; without a page table row b has page b alone.
      v: `[P, S, K, Hv]`, or None: the values are the first Hv features of k.
      lengths: int32 `[B]`.
      page_table: int32 `[B, M]`, or None.
      new_k, new_v: `[B, T, K, H]` and `[B, T, K, Hv]`, or None.
      sinks: `[B, N]`, or B 1, or None.
      key_scale, value_scale: `[P, K]`, or P 1: keys and values are k and v times these; or None.
      indices: int32 `[B, T, n]`, or B 1: the positions that each query reads; None: all.
      value_dim: Hv.

    Returns: out `[B, T, N, Hv]`, lse `[B, N, T]`, and k and v where there is a new_k, a new_v.
    """
    positions = query_positions(lengths, q.shape[1])
    scales = (key_scale, value_scale)
    k, v, written = append(k, v, new_k, new_v, lengths, positions, page_table, scales)
    pass_ = _Pass(problem, q, k, v, lengths, positions, page_table, value_dim, scales)
    if indices is not None:
        return (*pass_.attend_to(indices, sinks, appends=new_k is not None), *written)
    return (*pass_.attend(sinks), *written)


def append(
    k: jax.Array,
    v: jax.Array | None,
    new_k: jax.Array | None,
    new_v: jax.Array | None,
    lengths: jax.Array,
    positions: jax.Array,
    page_table: jax.Array | None,
    scales: tuple[jax.Array | None, jax.Array | None],
) -> tuple[jax.Array, jax.Array | None, list[jax.Array]]:
    """Writes new keys and values, if there are any, to positions `[B, T]`, as `decode` does.

    Returns: k and v as they are then, and those of the two that were written.
    """
    places = jnp.where((lengths > _capacity(k, page_table))[:, None], -1, positions)
    written = []
    if new_k is not None:
        k = _cache.write(k, new_k, places, page_table, scale=scales[0])
        written.append(k)
    if new_v is not None and v is not None:
        v = _cache.write(v, new_v, places, page_table, scale=scales[1])
        written.append(v)
    return k, v, written


def _capacity(k: jax.Array, page_table: jax.Array | None) -> int:
    return _cache.capacity(1 if page_table is None else page_table.shape[1], k.shape[1])


def query_positions(lengths: jax.Array, count: int) -> jax.Array:
    """Computes the positions `[*B, T]` of the last `count` of each row."""
    ahead = jnp.arange(-count, 0, dtype=lengths.dtype).reshape(*(1,) * lengths.ndim, -1)
    return lengths[..., None] + ahead


def chosen_slots(
    problem: Problem,
    indices: jax.Array,
    lengths: jax.Array,
    positions: jax.Array,
    k: jax.Array,
    page_table: jax.Array | None,
    appends: bool,
) -> tuple[jax.Array, jax.Array]:
    """Finds the slots, counted over all pages, of the positions at indices.

    Arguments:
      indices: int32 `[B, T, n]`, or B 1.
      lengths: int32 `[B]`.
      positions: int32 `[B, T]`, where queries stand.
      k, page_table: as in `decode`.
      appends: positions are written too.

    Returns:
      int32 `[B, T, n]`, -1 where a query does not see the position, `_chosen.LACKS` where it does
      and there is no page; and bool `[B]`, the rows that are longer than the cache or lack a page
      that is written to.
    """
    (batch, q_len), (pages, size) = positions.shape, k.shape[:2]
    indices = jnp.broadcast_to(indices, (batch, *indices.shape[1:]))
    seen = sees(problem, indices, positions)
    refused = lengths > _capacity(k, page_table)
    if page_table is None:
        page = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
        slots = page * size + indices
    else:
        flat = indices.reshape(batch, q_len * indices.shape[-1])
        page, slot = _cache.locate(flat, page_table, pages, size)
        page, slot = page.reshape(indices.shape), slot.reshape(indices.shape)
        slots = page * size + slot
        slots = jnp.where(page == pages, _chosen.LACKS, slots)
        if appends:
            first = jnp.maximum(lengths - q_len, 0)
            refused |= _cache.lacks_pages(page_table, first, lengths, pages, size)
    return jnp.where(seen, slots, -1), refused


def sees(problem: Problem, indices: jax.Array, positions: jax.Array) -> jax.Array:
    """Tells which of indices `[*B, n]` queries at positions `[*B]` see."""
    position = positions[..., None]
    seen = (indices >= 0) & (indices <= position)
    left = problem.window[0]
    return seen if left is None else seen & (indices >= position - left)


@dataclasses.dataclass(frozen=True)
class _Pass:
    """The operands of `decode`, new keys and values in place; G = N // K, as in blockwise.py."""

    problem: Problem
    q: jax.Array
    k: jax.Array
    v: jax.Array | None
    lengths: jax.Array
    positions: jax.Array  # [B, T]
    page_table: jax.Array | None
    value_dim: int
    scales: tuple[jax.Array | None, jax.Array | None]  # of k and v

    @property
    def products(self) -> Problem:
        """How products are made: keys and values with scales are of the sums' dtype."""
        if self.scales[0] is None:
            return self.problem
        dtype = self.problem.sum_dtype
        return dataclasses.replace(self.problem, dtype=dtype, precision="highest")

    def attend(self, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        problem, (batch, q_len, q_heads, head_dim) = self.problem, self.q.shape
        kv_heads = self.k.shape[2]
        group = q_heads // kv_heads if kv_heads else 0
        q = self.q.reshape(batch, q_len, kv_heads, group, head_dim)
        rows = (batch, kv_heads, group, q_len)
        state = (
            jnp.full(rows, -jnp.inf, problem.sum_dtype),
            jnp.zeros(rows, problem.sum_dtype),
            jnp.zeros((*rows, self.value_dim), problem.sum_dtype),
        )
        first, refused = self._first_seen(), self._refused()
        lengths = jnp.where(refused, 0, self.lengths)
        seen = lengths > 0
        if not isinstance(self._capacity, int):
            raise NotImplementedError(
                f"backend 'xla' needs known lengths; a row of the cache has {self._capacity} "
                "positions in this export"
            )
        block = min(_BLOCK, self._capacity)
        if block and batch and q_heads and self.k.shape[0]:  # without pages rows are refused
            start = jnp.min(jnp.where(seen, first, self._capacity)) // block
            stop = (jnp.max(lengths) - 1) // block + 1
            operands = (self.q, self.k, self.v, self.lengths, self.page_table)

            def step(i, state):
                return self._step(i, block, q, lengths, state)

            state = lax.fori_loop(start, stop, step, vary_over(state, operands))
        largest, total, weighted = state
        if sinks is not None:
            sinks = sinks.reshape(-1, kv_heads, group, 1)
            joined = jnp.maximum(largest, sinks)
            shift = jnp.where(joined == -jnp.inf, 0.0, joined)
            rescale = jnp.exp(largest - shift)
            total = rescale * total + jnp.exp(sinks - shift)
            weighted, largest = rescale[..., None] * weighted, joined
        empty = largest == -jnp.inf
        total = jnp.where(empty, 1.0, total)
        refused = refused[:, None, None, None]
        out = jnp.where(refused[..., None], jnp.nan, weighted / total[..., None])
        lse = jnp.where(empty, -jnp.inf, largest + jnp.log(total))
        lse = jnp.where(refused, jnp.nan, lse).reshape(batch, q_heads, q_len)
        out = out.reshape(batch, q_heads, q_len, self.value_dim)
        return jnp.swapaxes(out, 1, 2).astype(problem.dtype), lse

    def attend_to(
        self, indices: jax.Array, sinks: jax.Array | None, appends: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Computes attention to the positions at indices alone."""
        (batch, q_len, q_heads, head_dim), kv_heads = self.q.shape, self.k.shape[2]
        slots, refused = chosen_slots(
            self.problem, indices, self.lengths, self.positions, self.k, self.page_table, appends
        )

        def of_rows(x: jax.Array) -> jax.Array:
            return x.reshape(batch * q_len, *x.shape[2:])

        if sinks is not None:
            sinks = of_rows(jnp.broadcast_to(sinks[:, None], (batch, q_len, q_heads)))
        slots = of_rows(slots)
        sizes = _chosen.Sizes.of(slots, kv_heads, head_dim, self.value_dim)
        found = _chosen.attend(self.products, of_rows(self.q), self._read_at, slots, sinks, sizes)
        out, lse = (x.reshape(batch, q_len, *x.shape[1:]) for x in found)
        lacks = jnp.any(slots == _chosen.LACKS, axis=1).reshape(batch, q_len)
        refused = (refused[:, None] | lacks)[..., None]
        out = jnp.where(refused[..., None], jnp.nan, out).astype(self.problem.dtype)
        return out, jnp.swapaxes(jnp.where(refused, jnp.nan, lse), 1, 2)

    def _read_at(self, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Reads keys `[R, n, K, H]` and values `[R, n, K, Hv]` at slots of all pages."""
        size = self.k.shape[1]
        page, slot = slots // size, slots % size

        def read(x: jax.Array, scale: jax.Array | None) -> jax.Array:
            stored = _latent_rows.plain(_chosen.gather(x, page, slot))
            if scale is None:
                return stored
            return stored.astype(self.problem.sum_dtype) * _cache.of_pages(scale, page)[..., None]

        k = read(self.k, self.scales[0])
        return k, k[..., : self.value_dim] if self.v is None else read(self.v, self.scales[1])

    def _step(self, i, block, q, lengths, state):
        """Adds block i of every row's keys to the state."""
        largest, total, weighted = state
        # The last block is moved back to end with the cache; keys before `first` were seen.
        first = i * block
        start = jnp.minimum(first, self._capacity - block)
        keys = (start + jnp.arange(block, dtype=jnp.int32))[None]  # [1, s]
        query = self.positions[:, :, None]  # [B, t, 1]
        visible = (keys >= first)[..., None, :] & (keys < lengths[:, None])[:, None]
        visible &= keys[:, None] <= query
        if self.problem.window[0] is not None:
            visible &= keys[:, None] >= query - self.problem.window[0]
        visible = visible[:, None, None]  # [B, 1, 1, t, s]

        k = self._read(self.k, self.scales[0], start, keys, block)
        if self.v is None:
            v = k[..., : self.value_dim]
        else:
            v = self._read(self.v, self.scales[1], start, keys, block)
        (clean_q, q_bad), (k, k_bad), (v, v_bad) = split_bad(q), split_bad(k), split_bad(v)
        logits = self.problem.scale * dot(self.products, "btkgh,bskh->bkgts", clean_q, k)
        bad = jnp.moveaxis(q_bad, 1, -1)[..., None] + jnp.moveaxis(k_bad, 1, -1)[:, :, None, None]
        logits = logits + bad
        if self.problem.softcap is not None:
            logits = self.problem.softcap * jnp.tanh(logits / self.problem.softcap)
        logits = jnp.where(visible, logits, -jnp.inf)
        new_largest = jnp.maximum(largest, jnp.max(logits, axis=-1))
        shift = jnp.where(new_largest == -jnp.inf, 0.0, new_largest)
        rescale = jnp.exp(largest - shift)
        weights = jnp.exp(logits - shift[..., None])
        total = rescale * total + jnp.sum(weights, axis=-1)
        weights = jnp.where(visible, weights + jnp.moveaxis(v_bad, 1, -1)[:, :, None, None], 0.0)
        added = dot(self.products, "bkgts,bskh->bkgth", weights, v)
        return new_largest, total, rescale[..., None] * weighted + added

    def _read(
        self,
        x: jax.Array,
        scale: jax.Array | None,
        start: jax.Array,
        keys: jax.Array,
        block: int,
    ) -> jax.Array:
        """Reads one block of every row, `[B, s, K, H]`; what has no page may hold anything."""

        def scaled(stored: jax.Array, scale: jax.Array | None) -> jax.Array:
            stored = _latent_rows.plain(stored)
            return stored if scale is None else stored.astype(self.problem.sum_dtype) * scale

        if self.page_table is None:
            of_rows = None if scale is None else scale[:, None, :, None]
            return scaled(lax.dynamic_slice_in_dim(x, start, block, 1), of_rows)
        keys = jnp.broadcast_to(keys, (self.q.shape[0], block))
        pages, size = x.shape[:2]
        page, slot = _cache.locate(keys, self.page_table, pages, size)
        of_pages = None if scale is None else _cache.of_pages(scale, page)[..., None]
        return scaled(x.at[page, slot].get(mode="clip"), of_pages)

    @property
    def _capacity(self) -> int:
        return _capacity(self.k, self.page_table)

    def _first_seen(self) -> jax.Array:
        """Computes the first position `[B]` that a row's queries see or that is written."""
        first = jnp.maximum(self.lengths - self.q.shape[1], 0)
        left = self.problem.window[0]
        return jnp.zeros_like(first) if left is None else jnp.maximum(first - left, 0)

    def _refused(self) -> jax.Array:
        """Computes which rows `[B]` are longer than the cache or lack a page that they need."""
        refused = self.lengths > self._capacity
        if self.page_table is None:
            return refused
        pages, size = self.k.shape[:2]
        first = self._first_seen()
        return refused | _cache.lacks_pages(self.page_table, first, self.lengths, pages, size)
