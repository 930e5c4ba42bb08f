"""A layer's attention, beside a cache of what came before or without one.

`Cache` holds keys and values in rows or in pages; `attend` appends to it and attends to all of it,
by `jax_flash.decode_attention` where that can do it. Read next: `_shared.py`, for what else the
Linen and NNX layers share.
"""

import functools
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from jax_flash import _cache, _debug
from jax_flash._rotary import rotate
from jax_flash._validate.decode import MOST_QUERIES
from jax_flash._validate.scalars import window_sides
from jax_flash.attention import flash_attention
from jax_flash.decode import decode_attention, fill_cache
from jax_flash.layers._shared import boolean


class Cache(NamedTuple):
    """Keys and values of the positions seen so far, in rows or in pages."""

    key: jax.Array  # [*B, L, K, H], or with a page table [P, S, K, H]
    value: jax.Array  # as key
    index: jax.Array  # int32 [*B]: positions written, of each row
    page_table: jax.Array | None = None  # int32 [*B, M]

    @property
    def room(self) -> int:
        """Positions that a row may have: L, or M * S."""
        size = self.key.shape[-3]
        return size if self.page_table is None else self.page_table.shape[-1] * size

    def check(self, key: jax.Array) -> None:
        """Raises ValueError where `key` [*B, T, K, H] does not fit beside what is cached."""
        batch, (*new_batch, new_length, _, _) = [*self.index.shape], key.shape
        if new_batch != batch or new_length > self.room:
            raise ValueError(
                f"the cache has batch {batch} and room for {self.room} positions, "
                f"but the input has batch {new_batch} and {new_length} positions"
            )

    def append(self, key: jax.Array, value: jax.Array, lengths: jax.Array) -> "Cache":
        """Writes [*B, T, K, H] after what is there, up to `lengths` [*B] of each row."""
        dtype = self.key.dtype
        keys, values = fill_cache(
            self.key,
            self.value,
            key.astype(dtype),
            value.astype(dtype),
            lengths,
            start=self.index,
            page_table=self.page_table,
        )
        return Cache(keys, values, lengths, self.page_table)

    def rows(self) -> tuple[jax.Array, jax.Array]:
        """Keys and values [*B, room, K, H]: a copy where they are in pages."""
        if self.page_table is None:
            return self.key, self.value
        table = self.page_table
        return _cache.gather(self.key, table), _cache.gather(self.value, table)


def check_page_table(
    pages: tuple[int, int] | None, table: ArrayLike | None, batch: tuple[int, ...]
) -> jax.Array | None:
    """The page table of a call, checked beside the layer's cache.

    Args:
      pages: how many pages the cache has, and positions in each; None where it is none of pages.
      table: int [*B, M], or None.
      batch: *B.

    Raises:
      ValueError: a table where there are no pages, none where there are, or one of another shape.
    """
    if pages is None:
        if table is not None:
            raise ValueError(
                "page_table is given for a cache without pages; expected None, or a cache made "
                "with pages=(how many, positions in each)"
            )
        return None
    if table is None:
        raise ValueError(
            f"the cache is of pages {pages}; expected a page_table int32 [*B, pages of a row]"
        )
    table = jnp.asarray(table)
    if table.shape[:-1] != batch or table.ndim != len(batch) + 1:
        raise ValueError(
            f"page_table has shape {table.shape}; expected [*B, pages of a row], *B = {batch}"
        )
    return table


def cache_shape(
    batch: tuple[int, ...], length: Any, pages: tuple[int, int] | None
) -> tuple[int, ...]:
    """Leading dims of keys and values in a cache: [*B, L], or [P, S] where it is of pages.

    Raises:
      TypeError: a size is no int.
      ValueError: a size is negative, a page has no position, or pages is no pair.
    """
    if pages is None:
        sizes = [*(("batch", size) for size in batch), ("max_length", length)]
    elif isinstance(pages, tuple) and len(pages) == 2:
        sizes = [*(("batch", size) for size in batch), *(("pages", size) for size in pages)]
    else:
        raise ValueError(f"pages is {pages!r}; expected (how many, positions in each)")
    for name, size in sizes:
        if not isinstance(size, numbers.Integral):
            raise TypeError(f"{name} must be an int, got {size!r}")
        if size < 0:
            raise ValueError(f"{name} must not be negative, got {size}")
    if pages is not None and pages[1] == 0:
        raise ValueError(f"pages is {pages}; expected 1 position or more in each")
    return (*batch, length) if pages is None else pages


def attend(
    attention_fn: Callable[..., jax.Array],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: Cache | None,
    *,
    rotary_base: float | None,
    mask: ArrayLike | None,
    **options: Any,
) -> tuple[jax.Array, Cache | None]:
    """Attention of T positions to S, or of T new ones to themselves and all those in a cache.

    Args:
      attention_fn: flash_attention, or a function with those of its arguments that are used.
      query: [*B, T, N, H].
      key: [*B, S, K, H].
      value: [*B, S, K, H].
      cache: what came before, S = T new positions to append; None when decoding nothing. A step of
        up to 64 copies none of it where `decode_attention` knows the options and all have one
        dtype; else flash_attention reads the rows, and pages are lined up for it first.
      rotary_base: as in `rotate`; None for no rotary embedding.
      mask: bool or numbers (nonzero means True), broadcastable to [*B, N, T, S].
      **options: further arguments of flash_attention; None and False are left out. Positions, which
        never come with a cache, are those of the rotary embedding too. With a cache
        query_seq_lengths say how many of the T positions of each row are new, the rest padding.

    Returns:
      [*B, T, N, H] and the cache with the new positions. The output is NaN in rows of which more
      has been written than the cache can hold, or that lack a page: at run time there is no other
      way to refuse.
    """
    options["mask"] = boolean(mask)
    used = {name: o for name, o in options.items() if o is not None and o is not False}
    if cache is not None:
        cache.check(key)
        return _attend_to_cache(attention_fn, query, key, value, cache, rotary_base, used)
    if rotary_base is not None:

        def turned(x: jax.Array, positions: ArrayLike | None) -> jax.Array:
            if positions is None:
                positions = jnp.arange(x.shape[-3], dtype=jnp.int32)
            return rotate(x, jnp.asarray(positions), rotary_base)

        query = turned(query, options.get("query_positions"))
        key = turned(key, options.get("key_value_positions"))
    # Whoever keeps these under jax.checkpoint computes neither projections nor rotary again.
    query = checkpoint_name(query, "flash_query")
    key = checkpoint_name(key, "flash_key")
    value = checkpoint_name(value, "flash_value")
    return attention_fn(query, key, value, **used), None


def _attend_to_cache(
    attention_fn: Callable[..., jax.Array],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: Cache,
    rotary_base: float | None,
    options: dict[str, Any],
) -> tuple[jax.Array, Cache]:
    """The part of `attend` with a cache, by `decode_attention` where that can do it."""
    count = query.shape[-3]
    valid = options.get("query_seq_lengths")  # and of keys the same
    scores = {name: x for name, x in options.items() if not name.endswith("seq_lengths")}
    settings = _decode_settings(attention_fn, scores)
    one_dtype = query.dtype == key.dtype == value.dtype == cache.key.dtype
    decode = left = None
    if settings is not None:
        left = window_sides(True, settings.get("local_window_size"), count + cache.room)[0]
        if one_dtype and count <= MOST_QUERIES:
            decode = functools.partial(decode_attention, page_table=cache.page_table, **settings)
    if decode is not None and valid is None:
        lengths = cache.index + count
        step = decode(
            query,
            cache.key,
            cache.value,
            lengths,
            new_key=key,
            new_value=value,
            rotary_base=rotary_base,
        )
        return step.out, Cache(step.key_cache, step.value_cache, lengths, cache.page_table)
    if rotary_base is not None:
        positions = cache.index[..., None] + _indices(count, cache.index)
        query, key = (rotate(x, positions, rotary_base) for x in (query, key))
    if valid is not None:
        _debug.check_lengths("seq_lengths", valid, count, "T = ")
    valid = jnp.clip(jnp.asarray(count if valid is None else valid), 0, count).astype(jnp.int32)
    lengths = cache.index + valid
    cache = cache.append(key, value, lengths)
    if decode is not None:
        # The queries of decode_attention are the newest positions: each row's own go to its end.
        padding = (count - valid)[..., None]
        if left is not None and cache.page_table is not None:
            # Before them is padding, whose window may reach to pages that the row has given back.
            first = jnp.maximum(lengths - valid - left, 0) // cache.key.shape[-3]
            decode = functools.partial(decode, page_table=_from_page(first, cache.page_table))
        out = decode(_roll(query, padding), cache.key, cache.value, lengths).out
        is_valid = _indices(count, valid) < valid[..., None]
        return jnp.where(is_valid[..., None, None], _roll(out, -padding), 0), cache
    if settings is not None and cache.page_table is not None and _debug.is_on():
        first = 0 * lengths if left is None else jnp.maximum(lengths - valid - left, 0)
        _debug.check_pages(cache.page_table, first, lengths, *cache.key.shape[:2])
    options |= {"key_value_seq_lengths": lengths, "causal_align": "bottom_right"}
    out = attention_fn(query, *(x.astype(query.dtype) for x in cache.rows()), **options)
    fits = (lengths <= cache.room)[..., None, None, None]
    return jnp.where(fits, out, jnp.nan), cache


def _indices(count: int, rows: jax.Array) -> jax.Array:
    """0 to before count, `[*1, count]`, of one rank with what else rows [*B] have."""
    return jnp.arange(count, dtype=jnp.int32).reshape(*(1,) * rows.ndim, -1)


def _from_page(first: jax.Array, table: jax.Array) -> jax.Array:
    """A page table [*B, M] with columns before `first` [*B] replaced by that column's page."""
    columns = jnp.maximum(_indices(table.shape[-1], first), first[..., None])
    return jnp.take_along_axis(table, columns, axis=-1, mode="clip")


def _roll(x: jax.Array, by: jax.Array) -> jax.Array:
    """Moves what each row has at t in x [*B, T, N, H] to t + by, modulo T; `by` is int [*B, 1]."""
    count = x.shape[-3]
    from_where = jnp.remainder(_indices(count, by[..., 0]) - by, count)
    return jnp.take_along_axis(x, from_where[..., None, None], axis=-3)


def _decode_settings(
    attention_fn: Callable[..., Any], options: dict[str, Any]
) -> dict[str, Any] | None:
    """What decode_attention is called with in place of attention_fn; None where it cannot be."""
    settings = dict(options)
    while isinstance(attention_fn, functools.partial) and not attention_fn.args:
        settings = attention_fn.keywords | settings
        attention_fn = attention_fn.func
    if settings.pop("is_causal", False) is not True or attention_fn is not flash_attention:
        return None
    known = {"scale", "local_window_size", "softcap", "sinks", "precision", "backend"}
    return settings if settings.keys() <= known else None


def check_decode(is_causal: bool, **given: Any) -> None:
    """Raises ValueError for a decoding call that a cache cannot answer, with `given` arguments."""
    if not is_causal:
        raise ValueError("decoding needs a layer with is_causal=True")
    for name, x in given.items():
        if x is not None:
            raise ValueError(
                f"decoding takes no {name}: the cache holds one sequence of x per row, whose new "
                "positions follow those that are there"
            )
