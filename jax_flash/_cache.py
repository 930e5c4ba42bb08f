"""Where a cache keeps a position, for rows of a contiguous cache and for pages alike.

A contiguous cache `[*B, L, K, H]` has position p of a row at p. In pages `[P, S, K, H]` it is at
p % S of the page that the row's table `[*B, M]` names in column p // S.

A cache of eight bits has scales: a key or value is what is stored times the scale of its kv head,
or of its head and its row, or page.
"""

import jax
import jax.numpy as jnp

QUANTIZED = {"float8_e4m3fn": 448.0, "int8": 127.0}  # dtypes of eight bits, their largest numbers


def quantize(x: jax.Array, scale: jax.Array, dtype: str) -> jax.Array:
    """Rounds x / scale, of float32, to the nearest number of a dtype of QUANTIZED, ties to even.

    What is beyond its range becomes its largest. NaN stays NaN in float8_e4m3fn and is 0 in int8.
    """
    x = jnp.clip(x.astype(scale.dtype) / scale, -QUANTIZED[dtype], QUANTIZED[dtype])
    if dtype == "int8":
        x = jnp.where(jnp.isnan(x), 0, jnp.round(x))
    return x.astype(dtype)


def write(
    cache: jax.Array,
    new: jax.Array,
    positions: jax.Array,
    page_table: jax.Array | None,
    rows: jax.Array | None = None,
    scale: jax.Array | None = None,
) -> jax.Array:
    """Writes keys or values to their positions, in place where XLA may.

    Arguments:
      cache: `[*B, L, K, H]`, or with a page table `[P, S, K, H]`.
      new: `[*B, T, K, H]`, in the dtype of cache, or with a scale in any floating one.
      positions: int32 `[*B, T]`; what has no place in the cache is not written: a position below
        0, past the end, or in a page that is none.
      page_table: int32 `[*B, M]`, or None.
      rows: as in `locate`.
      scale: `[*B, K]`, or with a page table `[P, K]`, any dim but K maybe 1: what is stored is new
        by its scale, as `quantize` rounds it. None: new.

    Returns: the cache with `new` in it.
    """
    if page_table is not None:
        pages, size = cache.shape[:2]
        page, slot = locate(positions, page_table, pages, size, rows)
        if scale is not None:
            new = quantize(new, of_pages(scale, page)[..., None], cache.dtype.name)
        return cache.at[page, slot].set(new, mode="drop")
    if scale is not None:
        new = quantize(new, scale[..., None, :, None], cache.dtype.name)

    def write_row(cache, new, positions):
        # To jnp a negative index counts from the end.
        index = jnp.where(positions < 0, cache.shape[0], positions)
        return cache.at[index].set(new, mode="drop")

    for _ in range(positions.ndim - 1):  # as batch dims of the scatter, along which it is sharded
        write_row = jax.vmap(write_row)
    return write_row(cache, new, positions)


def of_pages(scale: jax.Array, page: jax.Array) -> jax.Array:
    """Finds the scales of pages `[*B, T]`, `[*B, T, K]` or dims of 1; any for what is none.

    scale: `[P, K]`, or `[1, K]` of all pages.
    """
    if isinstance(scale.shape[0], int) and scale.shape[0] <= 1:
        return jnp.sum(scale, 0).reshape(*(1,) * page.ndim, -1)
    return scale.at[page].get(mode="clip")


def gather(cache: jax.Array, page_table: jax.Array) -> jax.Array:
    """Copies each row's pages to where a contiguous cache has them.

    Arguments:
      cache: `[P, S, K, H]`.
      page_table: int32 `[*B, M]`.

    Returns: `[*B, M * S, K, H]`, NaN for pages that are none.
    """
    pages, size, *rest = cache.shape
    page = jnp.where(page_table < 0, pages, page_table)  # below 0 jnp would count from the end
    rows = cache.at[page].get(mode="fill", fill_value=jnp.nan)
    return rows.reshape(*page_table.shape[:-1], page_table.shape[-1] * size, *rest)


def locate(
    positions: jax.Array,
    page_table: jax.Array,
    pages: int,
    page_size: int,
    rows: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Finds the page and the slot in it of each position.

    Arguments:
      positions: int32 `[*B, T]`.
      page_table: int32 `[*B, M]`.
      pages: P, how many there are.
      page_size: S, positions in each.
      rows: which row of the table each position is of, in the shape of positions, where they are
        `[tokens]` and the table is `[B, M]`; None: position and table have *B in common.

    Returns: int32 in the shape of positions, twice; the page is P where the position has none.
    """
    most = page_table.shape[-1]
    if most == 0 or page_size == 0:
        return jnp.full_like(positions, pages), jnp.zeros_like(positions)
    column = jnp.floor_divide(positions, page_size)
    within = jnp.clip(column, 0, most - 1)
    if rows is None:
        page = jnp.take_along_axis(page_table, within, axis=-1)
    else:
        page = page_table[rows, within]
    there = (column >= 0) & (column < most) & (page >= 0) & (page < pages)
    return jnp.where(there, page, pages), jnp.remainder(positions, page_size)


def capacity(columns: int, size: int) -> int:
    """Computes how many positions a row may have: its length is an int32, however many columns."""
    most = columns * size
    return min(most, 2**31 - 1) if isinstance(most, int) else most


def lacks_pages(
    page_table: jax.Array, first: jax.Array, stop: jax.Array, pages: int, page_size: int
) -> jax.Array:
    """Computes which rows lack a page for a position that they need.

    Arguments:
      page_table: int32 `[B, M]`.
      first, stop: int32 `[B]`, the positions that each row needs, to before stop.
      pages: P, how many there are.
      page_size: S, positions in each.

    Returns: bool `[B]`; of positions beyond the table it says nothing.
    """
    most = capacity(page_table.shape[1], page_size)
    if most == 0:
        return jnp.zeros(first.shape, bool)
    table = page_table[:, : -(-most // page_size)]
    begins = page_size * jnp.arange(table.shape[1], dtype=jnp.int32)[None]
    needed = (begins < stop[:, None]) & (begins > first[:, None] - page_size)
    there = (table >= 0) & (table < pages)
    return jnp.any(needed & ~there, axis=1)
