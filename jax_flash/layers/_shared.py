"""What the Linen and NNX layers share: Flax's arguments in flash_attention's terms, rotary, cache.

The attention itself is `jax_flash.flash_attention`; nothing here computes a score or a softmax.
"""

import functools
import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_flash import _cache, _debug, _keywords, _validate
from jax_flash._rotary import rotate
from jax_flash._validate_decode import MOST_QUERIES
from jax_flash.attention import LayerOptions, flash_attention
from jax_flash.attention import Options as AttentionOptions
from jax_flash.decode import decode_attention, fill_cache

# The keywords of flash_attention that both `attention_fn` take besides Flax's own.
Options = LayerOptions[ArrayLike]


def flax_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    options: Options,
    sow: Callable[[jax.Array], Any] | None,
    *,
    bias: jax.Array | None,
    mask: jax.Array | None,
    is_causal: bool,
    dropout_rng: jax.Array | None,
    dropout_rate: float,
    deterministic: bool,
    precision: str | jax.lax.Precision | None,
    sown_dtype: Any = None,
) -> jax.Array:
    """flash_attention from what Flax passes to an attention function.

    Args:
      query: [*B, T, N, H].
      key: [*B, S, K, H].
      value: [*B, S, K, Hv].
      options: flash_attention's own keywords.
      sow: takes the weights [*B, N, T, S] before dropout; None where nobody asks for them.
      bias: float, broadcastable to [*B, N, T, S].
      mask: bool or numbers (nonzero means True), broadcastable to [*B, N, T, S].
      is_causal: query i sees keys 0..i.
      dropout_rng: key for dropout.
      dropout_rate: share of the weights that dropout removes.
      deterministic: no dropout.
      precision: as in flash_attention.
      sown_dtype: of the weights that are sown, and what they are computed in; None: query's.

    Returns:
      [*B, T, N, Hv].

    Raises:
      TypeError: an option that is none.
      ValueError: a window in a decoding step, without what tells where its query stands.
    """
    check_options(options)
    mask = boolean(mask)
    decoding = is_decoding(mask, query, key)
    has_position = options.get("query_positions") is not None
    placed = has_position or (
        options.get("causal_align") == "bottom_right"
        and options.get("key_value_seq_lengths") is not None
    )
    if decoding and options.get("local_window_size") is not None and not placed:
        raise ValueError(
            "local_window_size needs the position of a query, which one query with a mask over "
            f"{key.shape[-3]} keys (a decoding step of Flax's layer) does not tell; expected also "
            "query_positions, or key_value_seq_lengths and causal_align='bottom_right', or "
            "jax_flash.layers' FlashAttention, whose cache knows it"
        )
    scores: AttentionOptions[ArrayLike] = {
        **options,
        "bias": bias,
        "mask": mask,
        "is_causal": is_causal and (has_position or not decoding),
        "precision": precision,
    }
    if sow is not None:
        # Attention to the unit vectors is the weights themselves.
        length, dtype = key.shape[-3], sown_dtype or query.dtype
        units = jnp.broadcast_to(jnp.eye(length, dtype=dtype)[:, None], (*key.shape[:-1], length))
        wide_query, wide_key = query.astype(dtype), key.astype(dtype)
        weights = flash_attention(wide_query, wide_key, units, **(scores | {"backend": "xla"}))
        sow(jnp.swapaxes(weights, -2, -3))
    if dropout_rate and not deterministic:
        scores |= {"dropout_rate": dropout_rate, "dropout_key": dropout_rng}
    return flash_attention(query, key, value, **scores)


def is_decoding(mask: jax.Array | None, query: jax.Array, key: jax.Array) -> bool:
    """Whether a call is a decoding step of Flax's layers: one query, a mask over several keys.

    The mask marks the written part of the cache, while causal starts at key 0 and would leave that
    key alone. Flax before 0.12.12 asks for causal there nonetheless.
    """
    return mask is not None and query.shape[-3] == 1 and key.shape[-3] > 1


def check_options(options: Options) -> None:
    """Raises TypeError for a keyword that attention_fn does not take."""
    taken = tuple(LayerOptions.__annotations__)
    for name in options:
        if name not in taken:
            hint = _keywords.hint(name, (*taken, "bias", "mask", "is_causal", "dropout_rate"))
            raise TypeError(
                f"attention_fn got an unexpected keyword argument {name!r}{hint}; besides those of "
                f"Flax's dot_product_attention it takes {', '.join(taken)}"
            )


def boolean(mask: ArrayLike | None) -> jax.Array | None:
    """A mask as Flax makes them, bool or numbers (float32 as a rule): nonzero means True."""
    if mask is None:
        return None
    mask = jnp.asarray(mask)
    return mask if mask.dtype == jnp.bool_ else mask != 0


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
        left = _validate._window(True, settings.get("local_window_size"), count + cache.room)[0]
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


def rows(
    x: jax.Array,
    memory: jax.Array | None,
    *,
    seq_lengths: ArrayLike | None,
    segment_ids: ArrayLike | None,
    positions: ArrayLike | None,
    memory_seq_lengths: ArrayLike | None,
    memory_segment_ids: ArrayLike | None,
    memory_positions: ArrayLike | None,
) -> dict[str, Any]:
    """What the call of a layer says of the rows of its input, in flash_attention's keywords.

    Args:
      x: [*B, T, features], where the queries come from.
      memory: [*B, S, features], where keys and values come from; None for x.
      seq_lengths: int [*B], of x.
      segment_ids: int [*B, T], of x.
      positions: int [*B, T], of x.
      memory_seq_lengths: int [*B].
      memory_segment_ids: int [*B, S].
      memory_positions: int [*B, S].

    Raises:
      ValueError: for shapes that do not fit together, and for ids, positions or lengths of a memory
        that is not given, or not given ids where x has some.
    """
    if memory is not None and memory.shape[:-2] != x.shape[:-2]:
        raise ValueError(
            f"memory has shape {memory.shape} and x {x.shape}; expected equal leading dims: "
            "[*B, S, features] and [*B, T, features]"
        )
    for name, array, letters, of in (
        ("seq_lengths", seq_lengths, "[*B]", x),
        ("segment_ids", segment_ids, "[*B, T]", x),
        ("positions", positions, "[*B, T]", x),
        ("memory_seq_lengths", memory_seq_lengths, "[*B]", memory),
        ("memory_segment_ids", memory_segment_ids, "[*B, S]", memory),
        ("memory_positions", memory_positions, "[*B, S]", memory),
    ):
        if array is None:
            continue
        if of is None:
            raise ValueError(f"{name} is given without a memory")
        shape = of.shape[:-2] if letters == "[*B]" else of.shape[:-1]
        if jnp.shape(array) != shape:
            raise ValueError(f"{name} has shape {jnp.shape(array)}; expected {letters} = {shape}")
    if memory is None:
        memory_seq_lengths, memory_segment_ids = seq_lengths, segment_ids
        memory_positions = positions
    elif (segment_ids is None) != (memory_segment_ids is None):
        raise ValueError(
            "a call with a memory takes both segment_ids [*B, T] and memory_segment_ids [*B, S], "
            "or neither"
        )
    return {
        "query_seq_lengths": seq_lengths,
        "key_value_seq_lengths": memory_seq_lengths,
        "query_segment_ids": segment_ids,
        "key_value_segment_ids": memory_segment_ids,
        "query_positions": positions,
        "key_value_positions": memory_positions,
    }


def head_sizes(
    features: int,
    num_heads: int,
    num_kv_heads: int | None,
    head_dim: int | None,
    rotary_base: float | None,
) -> tuple[int, int]:
    """A layer's key heads and head size, with None replaced by num_heads and features / num_heads.

    Raises:
      TypeError: a size is no int.
      ValueError: the numbers do not fit together.
    """
    for name, size in (
        ("num_heads", num_heads),
        ("num_kv_heads", num_kv_heads),
        ("head_dim", head_dim),
    ):
        if not isinstance(size, numbers.Integral) and (size is not None or name == "num_heads"):
            raise TypeError(f"{name} must be an int, got {size!r}")
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            "num_heads must be a positive multiple of num_kv_heads, "
            f"got {num_heads} and {num_kv_heads}"
        )
    if head_dim is None:
        head_dim, rest = divmod(features, num_heads)
        if rest:
            raise ValueError(
                f"{features} features do not divide among {num_heads} heads; give head_dim"
            )
    if head_dim < 1:
        raise ValueError(f"head_dim must be positive, got {head_dim}")
    if rotary_base is not None and not (
        isinstance(rotary_base, numbers.Real) and 0 < rotary_base < math.inf
    ):
        raise ValueError(f"rotary_base must be a positive number, got {rotary_base!r}")
    if rotary_base is not None and head_dim % 2:
        raise ValueError(f"rotary embedding needs an even head_dim, got {head_dim}")
    return num_kv_heads, head_dim


def norm_class(
    normalize_qk: bool | Callable[..., Any], default: Callable[..., Any]
) -> Callable[..., Any] | None:
    """The class of norms that a layer's normalize_qk asks for: `default` for True.

    Raises:
      TypeError: it is neither a bool nor a class.
    """
    if isinstance(normalize_qk, bool):
        return default if normalize_qk else None
    if callable(normalize_qk):
        return normalize_qk
    raise TypeError(
        "normalize_qk must be True, False or a class of norms such as RMSNorm, "
        f"got {normalize_qk!r}"
    )


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
