"""Owns the problems of decode.py: the cells of a CPU and of a GPU, and the arrays of one.

Read next: decode.py, which has the peers that compute them.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Cell:
    """One problem: `batch` rows of `length` positions, or of lengths from `shortest` to it."""

    name: str
    batch: int
    heads: int
    kv_heads: int
    length: int
    dtype: str = "bfloat16"
    shortest: int | None = None  # log-uniform lengths from this
    page: int | None = None  # positions in a page, pages in any order; None: contiguous
    appends: bool = False  # keys and values are rotated and written in the call
    head_dim: int = 128

    def lengths(self) -> np.ndarray:
        """Draws the rows' lengths."""
        if self.shortest is None:
            return np.full(self.batch, self.length, np.int32)
        low, high = np.log(self.shortest), np.log(self.length)
        return np.exp(np.random.default_rng(0).uniform(low, high, self.batch)).astype(np.int32)

    @property
    def bytes(self) -> int:
        """Bytes of the keys and values that are visible."""
        size = self.kv_heads * self.head_dim * jnp.dtype(self.dtype).itemsize
        return 2 * size * int(self.lengths().sum())


CPU_CELLS = (
    Cell("16k bfloat16", 1, 32, 8, 16384),
    Cell("16k float32", 1, 32, 8, 16384, dtype="float32"),
    Cell("16k bfloat16 pages of 16", 1, 32, 8, 16384, page=16),
    Cell("16k bfloat16 with new keys, rotary", 1, 32, 8, 16384, appends=True),
    Cell("1k bfloat16", 1, 32, 8, 1024),
    Cell("8 rows of 2k bfloat16", 8, 32, 8, 2048),
    Cell("16 rows of 256 to 8k, ragged, bfloat16", 16, 32, 8, 8192, shortest=256),
)
SHAPES = (  # those of which there is a mean
    Cell("long 128k", 1, 32, 8, 131072),
    Cell("long 64k, no groups", 1, 32, 32, 65536),
    Cell("8 rows of 32k", 8, 32, 8, 32768),
    Cell("64 rows of 8k", 64, 32, 8, 8192),
    Cell("128 rows of 2k", 128, 64, 8, 2048),
    Cell("4 rows of 8k", 4, 32, 8, 8192),
    Cell("long 512k", 1, 64, 8, 524288),
)
GPU_CELLS = (
    *SHAPES,
    Cell("ragged 64 rows of 1k to 64k", 64, 32, 8, 65536, shortest=1024),
    *(Cell(f"64 rows of 8k, pages of {n}", 64, 32, 8, 8192, page=n) for n in (16, 64, 128)),
    Cell("short 1k", 1, 32, 8, 1024),
    Cell("short 16k", 1, 32, 8, 16384),
    Cell("short 8 rows of 4k", 8, 32, 8, 4096),
    Cell("short 1k with new keys, rotary", 1, 32, 8, 1024, appends=True),
    Cell("long 128k float32", 1, 32, 8, 131072, dtype="float32"),
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Arrays:
    """A cell's arrays: those of decode_attention, and the rows' keys and values one by one."""

    query: jax.Array  # [B, 1, N, H]
    caches: tuple[jax.Array, jax.Array]
    lengths: jax.Array
    options: dict[str, Any]  # further ones of decode_attention

    @classmethod
    def of(cls, cell: Cell) -> "Arrays":
        """Draws them on the device."""
        keys = jax.random.split(jax.random.key(0), 4)
        rows, new = (cell.batch, cell.length), (cell.batch, 1, cell.kv_heads, cell.head_dim)
        options: dict[str, Any] = {}
        if cell.page is not None:
            pages = cell.batch * cell.length // cell.page
            order = np.random.default_rng(0).permutation(pages).astype(np.int32)
            options["page_table"] = jnp.asarray(order.reshape(cell.batch, -1))
            rows = (pages, cell.page)
        if cell.appends:
            options |= {name: jnp.ones(new, cell.dtype) for name in ("new_key", "new_value")}
        query = jax.random.normal(keys[0], (cell.batch, 1, cell.heads, cell.head_dim), cell.dtype)
        shape = (*rows, cell.kv_heads, cell.head_dim)
        caches = tuple(jax.random.normal(key, shape, cell.dtype) for key in keys[1:3])
        return cls(query, (caches[0], caches[1]), jnp.asarray(cell.lengths()), options)
