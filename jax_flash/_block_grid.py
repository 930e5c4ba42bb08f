"""Owns how a function of indices becomes numbers and bits: evaluated by a device, block by block.

Read next: `_block_arrays.py`, which says what numbers and bits mean; `block_masks.py`, whose
`block_mask` traces the function.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_flash._block_arrays import EMPTY, FULL, WORD, pack, window_ends
from jax_flash._function import Function
from jax_flash._varying import vary_over

_MOST_PAIRS = 2**20  # that are evaluated at once where partial blocks are


@dataclasses.dataclass(frozen=True)
class Grid:
    """The blocks of a mask that is to be made, and how to evaluate them.

    Arrays are those that the function reads.
    """

    function: Function
    q_len: int
    kv_len: int
    block: int
    batch: int
    heads: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        rows, columns = (-(-size // self.block) for size in (self.q_len, self.kv_len))
        return self.batch, self.heads, rows, columns

    def pairs(self, query_block, first_key, keys: int) -> tuple[jax.Array, jax.Array]:
        """Lists the queries of a block, [block, 1], and `keys` keys, [1, keys]."""
        query = query_block * self.block + jnp.arange(self.block, dtype=jnp.int32)
        key = first_key + jnp.arange(keys, dtype=jnp.int32)
        return query[:, None], key[None, :]

    def there(self, query: jax.Array, key: jax.Array) -> jax.Array:
        return (query < self.q_len) & (key < self.kv_len)

    def seen(self, batch, head, query: jax.Array, key: jax.Array, arrays) -> jax.Array:
        """Evaluates all pairs of queries [block, 1] and keys [1, keys]."""
        query, key = jnp.minimum(query, self.q_len - 1), jnp.minimum(key, self.kv_len - 1)

        def of_pair(query, key):
            scalars = vary_over([batch, head, query, key, *arrays], [batch, *arrays])
            return self.function.program.apply(scalars)[0]

        by_pair = jax.vmap(jax.vmap(of_pair, in_axes=(None, 0)), in_axes=(0, None))
        return jnp.broadcast_to(by_pair(query[:, 0], key[0]), (query.size, key.size))

    def row(self, number, ends, arrays) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Evaluates a row of blocks.

        Returns:
          whether they are empty, full or else 0; whether they are the window of these ends; their
          bits.
        """
        *outer, count = self.shape
        batch, head, query_block = jnp.unravel_index(number, outer)
        query, key = self.pairs(query_block, jnp.int32(0), count * self.block)
        seen, there = self.seen(batch, head, query, key, arrays), self.there(query, key)
        low, high = ends
        near = (key - query >= low) & (key - query <= high)

        def by_block(x):
            return x.reshape(self.block, count, self.block)

        shown = jnp.any(by_block(seen & there), axis=(0, 2))
        whole = jnp.all(by_block(seen | ~there), axis=(0, 2))
        states = jnp.where(whole, FULL, jnp.where(shown, 0, EMPTY)).astype(jnp.int32)
        bits = jnp.moveaxis(pack(by_block(seen & there)), 1, 0)
        return states, jnp.all((seen == near) | ~there), bits

    def rows(self, function: Callable[[jax.Array], Any]) -> Any:
        """Maps a function over the rows of blocks, one at a time."""
        return lax.map(function, jnp.arange(math.prod(self.shape[:3]), dtype=jnp.int32))

    def states(self, ends, *arrays) -> tuple[jax.Array, jax.Array]:
        """Tells which blocks are empty, full or partial, and whether the mask is the window."""
        states, is_window = self.rows(lambda i: self.row(i, ends, arrays)[:2])
        return states.reshape(self.shape), jnp.all(is_window)

    def with_all_bits(self, *arrays) -> tuple[jax.Array, jax.Array]:
        """Computes numbers and bits with room for all blocks."""
        states, _, bits = self.rows(lambda i: self.row(i, window_ends(None), arrays))
        batch, *counts = self.shape
        own = jnp.arange(math.prod(counts), dtype=jnp.int32).reshape(1, *counts)
        states = states.reshape(self.shape)
        numbers = jnp.where(states < 0, states, jnp.broadcast_to(own, self.shape))
        return numbers, bits.reshape(batch, -1, *bits.shape[-2:])

    def some_bits(self, at: jax.Array, *arrays) -> jax.Array:
        """Computes the bits of blocks at [number, 4]."""

        def of_block(at):
            batch, head, query_block, key_block = at
            query, key = self.pairs(query_block, key_block * self.block, self.block)
            seen = self.seen(batch, head, query, key, arrays)
            return pack(seen & self.there(query, key))

        return jax.vmap(of_block)(at)

    def with_bits(self, states: np.ndarray, arrays) -> tuple[np.ndarray, np.ndarray]:
        """Computes numbers and bits of the partial blocks, those of a batch row that differ."""
        partial = np.argwhere(states == 0).astype(np.int32)
        at_once = min(max(1, _MOST_PAIRS // self.block**2), states.size)
        numbers, kept = states.copy(), [{} for _ in range(self.batch)]
        for first in range(0, len(partial), at_once):
            # As many blocks in each call, whatever their number: one program for all masks.
            some = np.resize(partial[first : first + at_once], (at_once, 4))
            bits = np.asarray(program(Grid.some_bits, self)(some, *arrays))
            for at, own in zip(map(tuple, partial[first : first + at_once]), bits, strict=False):
                numbers[at] = kept[at[0]].setdefault(own.tobytes(), len(kept[at[0]]))
        most = max(map(len, kept))  # 0: a layout, which kernels have a walk of their own for
        size = self.block, self.block // WORD
        stored = np.zeros((self.batch, most, *size), np.uint16)
        for row, blocks in enumerate(kept):
            for number, own in enumerate(blocks):
                stored[row, number] = np.frombuffer(own, np.uint16).reshape(size)
        return numbers, stored


@functools.lru_cache(maxsize=16)  # of some 2 MB; JAX would keep thousands
def program(method: Callable[..., Any], grid: Grid) -> Callable[..., Any]:
    """Compiles a method of a grid. Grids are equal where their functions compute the same."""
    return jax.jit(functools.partial(method, grid))
