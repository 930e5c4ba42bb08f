"""Owns the arrays of a block mask: what numbers and bits mean, how they are read and packed.

A form (a window, chunks) has none: `states_of` and `write_out` make them of it. Read next:
`_block_grid.py`, which makes them of a function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_flash._windows import Window

if TYPE_CHECKING:
    from jax_flash.block_masks import BlockMask

# What `BlockMask.numbers` has of a block that is not partial; 0 and more number partial ones.
EMPTY, FULL = -2, -1
WORD = 16  # keys of a word of bits: tiles of kernels start at any multiple of it
_FAR = 2**30  # farther apart than any query and key of a window
_PICTURE = 64  # rows and columns of the largest picture


def words_at(bits: jax.Array, number: jax.Array, row: jax.Array, word: jax.Array) -> jax.Array:
    """Reads words of bits.

    Arguments:
      bits: uint16 `[*B, C, block, words]`, any of *B 1.
      number: int32 `[*B, ..., t, w]`, any of *B 1; below 0: any word.
      row, word: int32, which broadcast to `[t, w]`.

    Returns: int32 of number's shape, its *B those of both.
    """
    *leading, stored, _, _ = bits.shape
    if stored == 0:
        return jnp.zeros(jnp.broadcast_shapes(number.shape, row.shape, word.shape), jnp.int32)
    rank = number.ndim
    own = [
        jnp.arange(size, dtype=jnp.int32).reshape(
            *(size if axis == i else 1 for i in range(len(leading))),
            *(1 for _ in range(rank - len(leading))),
        )
        for axis, size in enumerate(leading)
    ]
    ones = (1,) * (rank - 2)
    row, word = (x.astype(jnp.int32).reshape(*ones, *x.shape) for x in (row, word))
    index = (*own, jnp.maximum(number, 0), row, word)
    # A leading dim that is 1 in bits is 0 in the index of all: broadcast by indexing.
    return bits[index].astype(jnp.int32)


def window_ends(window: Window | None) -> np.ndarray:
    """Returns the least and the largest distance that a window shows."""
    left, right = window or (None, None)
    return np.array([-_FAR if left is None else -left, _FAR if right is None else right], np.int32)


def _lengths(form: BlockMask) -> tuple[int, int]:
    """Returns T and S of a form, which has both."""
    if form.q_len is None or form.kv_len is None:
        raise ValueError("a BlockMask of a window or chunks lacks q_len or kv_len; expected both")
    return form.q_len, form.kv_len


def states_of(form: BlockMask) -> np.ndarray:
    """Writes a form out: which blocks `[1, blocks, blocks]` are empty, full or else 0."""
    lengths = _lengths(form)
    first_query, first_key = (np.arange(0, n, form.block) for n in lengths)
    last_query = np.minimum(first_query + form.block, lengths[0]) - 1
    last_key = np.minimum(first_key + form.block, lengths[1]) - 1
    if form.chunk is not None:
        own = first_query[:, None] // form.chunk == first_key // form.chunk
        return np.where(own, FULL, EMPTY)[None]
    low, high = window_ends(form.window)
    least, most = first_key - last_query[:, None], last_key - first_query[:, None]
    shown, whole = (least <= high) & (most >= low), (least >= low) & (most <= high)
    return np.where(whole, FULL, np.where(shown, 0, EMPTY))[None]


def write_out(form: BlockMask) -> tuple[np.ndarray, np.ndarray]:
    """Writes a form out as numbers and bits."""
    if not form.is_form:
        raise ValueError("a BlockMask lacks numbers or bits; expected both, or a window or a chunk")
    numbers, block = states_of(form).astype(np.int32), form.block
    q_len, kv_len = _lengths(form)
    low, high = window_ends(form.window)
    index = np.arange(block)
    kept: dict[bytes, int] = {}
    for at in map(tuple, np.argwhere(numbers == 0)):
        query, key = at[1] * block + index[:, None], at[2] * block + index
        seen = (key - query >= low) & (key - query <= high)
        seen &= (query < q_len) & (key < kv_len)
        packed = np.packbits(seen, axis=-1, bitorder="little").tobytes()
        numbers[at] = kept.setdefault(packed, len(kept))
    bits = np.frombuffer(b"".join(kept), np.dtype("<u2")).astype(np.uint16)
    return numbers, bits.reshape(-1, block, block // WORD)


def pack(seen: jax.Array) -> jax.Array:
    """Packs bool `[..., keys]` into uint16 `[..., keys / 16]`."""
    parts = seen.reshape(*seen.shape[:-1], -1, WORD).astype(jnp.uint16)
    bit = lax.broadcasted_iota(jnp.uint16, parts.shape, parts.ndim - 1)
    return jnp.sum(parts << bit, axis=-1, dtype=jnp.uint16)


def picture(numbers: np.ndarray) -> str:
    """Draws the blocks of the first batch row and head, several as one where there are many."""
    *leading, rows, columns = numbers.shape
    plane = numbers.reshape(-1, rows, columns)[0]
    step = -(-max(rows, columns) // _PICTURE)
    lines = []
    for i in range(0, rows, step):
        line = ""
        for j in range(0, columns, step):
            part = plane[i : i + step, j : j + step]
            line += "█" if (part == FULL).all() else "·" if (part == EMPTY).all() else "▒"
        lines.append(line)
    notes = [f"one sign for {step} x {step} blocks"] if step > 1 else []
    count = int(np.prod(leading))
    notes += [f"the first of {count} planes of blocks"] if count > 1 else []
    return "\n".join([*lines, *(f"({note})" for note in notes)])
