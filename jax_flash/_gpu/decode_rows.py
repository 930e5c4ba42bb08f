"""Owns what decoding's tilings are chosen from: rows of sizes, and which calls each is for.

Measured on Hopper alone (cuda/decisions.md). Read next: `choose` in decode.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from jax_flash._gpu.meaning import Meaning
from jax_flash._gpu.spec import GpuSpec
from jax_flash._gpu.traits import known
from jax_flash._problem import Shapes

# Positions of a page. In pages of 1 64 rows of 4096 take 594 us by cp.async and 1284 by TMA, of 2
# 542 and 672, of 4 494 and 391 (H100).
FEWEST_TOGETHER = 4
# Positions of rows between which warps wait for each other: two CTAs, one block each, take turns.
# 256 rows of 128, 256, 512 and 1024 take 8, 3, 1 and 1 % less than by one CTA of three blocks.
SHORT = 1024
# Batch rows from which two kv heads of eight bits share a CTA: one row of 128k takes 12 % longer.
_ROWS_OF_PAIRS = 32


def fits_tma(call: Any, shapes: Shapes) -> bool:
    """Whether blocks may come by TMA: 16 or eight bits, rows of which 16 bytes are a part."""
    whole = 16 if call.quantized else 8
    dims = (shapes.head_dim, shapes.value_dim)
    return call.problem.dtype != "float32" and not any(dim % whole for dim in dims)


def lie_apart(call: Any, shapes: Shapes) -> bool:
    """Whether so few positions lie together that their blocks come faster by cp.async.

    TMA takes some 60 cycles of a warp for each box, and a box has positions of one page.
    """
    together = math.gcd(shapes.page_size or 0, 64)
    return call.paged and call.quantized is None and together < FEWEST_TOGETHER


def has_tma(call: Any, shapes: Shapes, gpu: GpuSpec) -> bool:
    return gpu.arch == "sm_90a" and fits_tma(call, shapes) and not lie_apart(call, shapes)


def rows_of(shapes: Shapes) -> int:
    """Counts the query rows of a kv head; one where there are no heads."""
    group = shapes.q_heads // max(shapes.kv_heads, 1)
    return max(known(shapes.q_len, 1) * known(group, 1), 1)


@dataclasses.dataclass(frozen=True)
class Asked(Meaning):
    """What the rows ask of a call."""

    call: Any
    gpu: GpuSpec

    @property
    def rows(self) -> int:
        return rows_of(self.shapes)

    @property
    def is_whole(self) -> bool:
        """Not float32 in parts, which asks more of the warps: two CTAs have twice as many."""
        return self.problem.dtype != "float32"

    @property
    def is_by_tma(self) -> bool:
        """One tile of 16 query rows, blocks by TMA."""
        few = self.rows <= 16 and self.shapes.value_dim <= 256
        return few and has_tma(self.call, self.shapes, self.gpu)

    @property
    def may_be_two(self) -> bool:
        """Two CTAs of one tile have the registers."""
        return self.is_whole or self.shapes.value_dim <= 128

    @property
    def may_be_two_of_tiles(self) -> bool:
        """Two CTAs of several: elsewhere than on Hopper too few registers for all terms."""
        hopper = self.gpu.arch == "sm_90a" and not self.shapes.scales_of_pages
        return self.may_be_two and hopper

    def has_rows(self, more_than: int) -> bool:
        """Whether there are rows for several tiles, and registers for their values."""
        return self.rows > more_than and self.shapes.value_dim <= 256


@dataclasses.dataclass(frozen=True)
class _Row:
    """A tiling that is tried: for which calls, its stages at least, its sizes as `make` has them.

    `sizes`: heads of a CTA, its tiles of 16 query rows, CTAs of a multiprocessor (`resident`),
    positions of a block.
    """

    holds: Callable[[Asked], bool]
    stages: int
    sizes: dict[str, int]


# What the rows are of. Eight bits: a block of as many bytes has twice the products of 16. More CTAs
# help only where a block is small or comes in many boxes.


def _bytes(asked: Asked) -> bool:
    return asked.is_by_tma and bool(asked.call.quantized)


def _wide_bytes(asked: Asked) -> bool:
    """Two CTAs have too few registers."""
    return _bytes(asked) and asked.shapes.value_dim > 128


def _narrow_bytes(asked: Asked) -> bool:
    return _bytes(asked) and (asked.widest <= 64 or asked.shapes.scales_of_pages)


def _paired_bytes(asked: Asked) -> bool:
    """Two heads are 256 bytes side by side, not 128; two stages of wider ones have no room."""
    even = known(asked.shapes.kv_heads, 1) % 2 == 0 and asked.shapes.head_dim <= 128
    return _bytes(asked) and even and known(asked.shapes.batch, 1) >= _ROWS_OF_PAIRS


def _bytes_in_small_pages(asked: Asked) -> bool:
    return _bytes(asked) and asked.call.paged and (asked.shapes.page_size or 0) % 64 > 0


def _numbers(asked: Asked) -> bool:
    """16 bits that lie in rows."""
    return asked.is_by_tma and not (asked.call.quantized or asked.call.paged)


def _short_numbers(asked: Asked) -> bool:
    short = known(asked.shapes.kv_len, SHORT + 1) <= SHORT
    return _numbers(asked) and short and asked.widest <= 128


def _has_four_tiles(asked: Asked) -> bool:
    return asked.has_rows(32) and (asked.may_be_two or asked.gpu.arch == "sm_90a")


def _alone(asked: Asked) -> bool:
    """Pages want two warps that load; a row alone is merged from half as many parts by one."""
    return asked.is_whole and not asked.call.paged


def _always(asked: Asked) -> bool:
    return True


# Up to 16 query rows. The last row of a kind of eight bits is taken with any stages.
FEW_ROWS_BY_TMA = (
    _Row(_wide_bytes, 3, {"block_kv": 128}),
    _Row(_wide_bytes, 0, {"block_kv": 64}),
    _Row(_narrow_bytes, 3, {"resident": 2, "block_kv": 128}),
    _Row(_narrow_bytes, 0, {"resident": 2, "block_kv": 64}),
    _Row(_paired_bytes, 0, {"heads": 2, "resident": 2, "block_kv": 64}),
    _Row(_bytes_in_small_pages, 3, {"resident": 3, "block_kv": 64}),
    _Row(_bytes_in_small_pages, 0, {"resident": 2, "block_kv": 64}),
    _Row(_bytes, 3, {"block_kv": 128}),
    _Row(_bytes, 0, {"resident": 2, "block_kv": 64}),
    _Row(_short_numbers, 1, {"resident": 2, "block_kv": 128}),
    _Row(_numbers, 3, {"block_kv": 128}),
)
# All else: pages of 16 bits, more query rows, float32, wide values, other GPUs. While a block is
# multiplied others have to be on their way: two stages.
OTHERS = (
    _Row(lambda x: x.has_rows(32) and x.may_be_two_of_tiles, 2, {"row_tiles": 4, "resident": 2}),
    _Row(_has_four_tiles, 2, {"row_tiles": 4}),
    _Row(lambda x: x.has_rows(16) and x.may_be_two_of_tiles, 2, {"row_tiles": 2, "resident": 2}),
    _Row(lambda x: x.has_rows(16), 2, {"row_tiles": 2}),
    _Row(_alone, 2, {}),
    _Row(lambda x: x.may_be_two, 2, {"resident": 2}),
    _Row(_always, 2, {}),
)
