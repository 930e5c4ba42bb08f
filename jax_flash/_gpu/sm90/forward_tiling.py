"""Owns `ForwardTiling`: the sizes by which the forward kernel for Hopper runs a problem.

Read next: forward_schedule.py; cuda/kernels/sm90/forward.cuh.
"""

from __future__ import annotations

import dataclasses
import math

from jax_flash._gpu.workspaces import boxes

_TAIL_KEYS = 64  # of a block of a tail
_MOST_SHARED = 227 * 1024  # of a CTA


@dataclasses.dataclass(frozen=True)
class ForwardTiling:
    """How the forward kernel runs a problem: constants compiled into it and its launch."""

    head_dim: int
    value_dim: int
    block_kv: int  # keys of one block, a multiple of 16
    consumers: int  # warpgroups of 64 query rows, besides the producer's
    tma_loads: bool = True  # TMA loads; it cannot where 8 does not divide a dim
    early: bool = False  # boxes begin up to 14 bytes before a head, and dims are those of tiles
    stages: int = 2  # blocks of keys and values in flight
    query_stages: int = 1
    holds_queries: bool = False  # in registers, so that the next unit's take their buffer at once
    packed_heads: int = 1  # query heads of one kv head that share a block of queries
    dynamic: bool = True  # units from an atomic counter, else in turn
    ping_pong: bool = True  # two warpgroups alternate softmax and matrix products
    drains: bool = False  # a softmax waits for the product with the values before, too
    drains_to_hide: bool = False  # likewise, where elements of a block need tests
    apart: bool = False  # the product with the values ends before the next scores begin
    producer_registers: int = 24  # of a thread, with two consumer warpgroups: 24, 40 or 56
    l2_heads: int = 8  # heads that the schedule walks together, so that their keys stay in L2
    bias_bytes: int = 0  # of an element of a bias that TMA loads beside the keys; 0: it does not
    bias_ahead: int = 2  # blocks between a bias's way to L2 and its load; 0: it has none of its own
    batches_together: bool = False  # the schedule walks a head of all batch rows: they share a bias
    halves: bool = False  # a float32 is two float16, split ahead, in planes of a tile
    float8: bool = False  # operands are float8 with scales, and values come as columns
    product_sums: bool = False  # likewise, and a product with ones adds up the weights of rows
    teams: int = 1  # in a CTA, of a producer and its consumers, with units of their own
    splits: bool = False  # units, of float8 the last wave's, are in parts along their keys
    fades: bool = False  # blocks of keys that a falling line hides are left out
    cut_documents: int = 0  # queries of one from which on units begin where it does; 0: they do not
    cuts_aligned: bool = False  # also where it begins and ends with a warpgroup's rows
    page_size: int = 0  # of pages that keys are in, and units are of requests; 0: there are none
    copied: str | None = None  # dtype of pages that a kernel ahead copies to bfloat16
    copied_pages: int = 0  # so many at most
    in_common: bool = False  # pages that all tokens see whole; batch rows are parts of positions
    tail_rows: int = 0  # query heads that share a tail, pages of a token's own; 0: there are none
    tail_registers: int = 72  # of a thread that computes tails
    clears_values: bool = (
        True  # of a page past a length zeroed, else rows of NaN are computed again
    )

    @property
    def source(self) -> str:
        return f"{self.folder}/forward.cuh"

    @property
    def beside(self) -> str:
        joins = self.splits and not self.float8
        name = "forward_copies" if self.copied else "forward_join" if joins else "forward_entries"
        return f"{self.folder}/{name}.cuh"

    @property
    def folder(self) -> str:
        return "sm90_float8" if self.float8 else "sm90_float32" if self.halves else "sm90"

    @property
    def block_q(self) -> int:
        """Query rows (positions times packed heads) of one block."""
        return 64 * self.consumers

    @property
    def key_rows(self) -> int:
        """Keys that TMA loads at once: those of a block, in one page for sure."""
        return math.gcd(self.page_size, _TAIL_KEYS if self.tail_rows else self.block_kv)

    @property
    def whole_rows(self) -> bool:
        """Whether TMA loads a head's rows of a page at once, and not 64 columns of them."""
        return self.page_size > 0 and self.head_dim % 64 == self.value_dim % 64 == 0

    @property
    def threads(self) -> int:
        return 128 * (self.teams * self.consumers + 1 + (self.tail_rows > 0))

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA: queries, the stages of keys and values, barriers."""
        head_boxes, value_boxes = boxes(self.head_dim), boxes(self.value_dim)
        if self.float8:
            head_boxes = boxes(self.head_dim // 2)
            rows = self.consumers * 64 * self.query_stages * head_boxes
            columns = self.value_dim + 8 * self.product_sums
            rows += self.stages * (self.block_kv * head_boxes + columns)
            return 128 * rows + 2048
        queries = self.query_stages * self.consumers * 64 * head_boxes
        keys_values = self.stages * self.block_kv * (head_boxes + value_boxes)
        biases = self.stages * self.block_q * self.block_kv * self.bias_bytes
        tiles = 128 * self.parts * (queries + keys_values) + biases
        return self.teams * tiles + 1024 * max(self.teams, 2) + self._tail_bytes(self.tail_stages)

    def _tail_bytes(self, stages: int) -> int:
        if not self.tail_rows:
            return 0
        head_boxes, value_boxes = boxes(self.head_dim), boxes(self.value_dim)
        rows = stages * _TAIL_KEYS * max(head_boxes, value_boxes)
        return 128 * (rows + -(-self.tail_rows // 8) * 8 * (head_boxes + 1)) + 1024

    @property
    def tail_stages(self) -> int:
        """Blocks of keys or values of tails in flight: three at head dim 128."""
        if not self.tail_rows:
            return 1
        room = _MOST_SHARED - dataclasses.replace(self, tail_rows=0).shared_bytes
        return max(n for n in range(1, 7) if n == 1 or self._tail_bytes(n) <= room)

    @property
    def outputs(self) -> int:
        """Parts of a block's output of float8, which take the place of its scores."""
        columns = -(-self.value_dim // 16) * 16
        return 2 if self.float8 and columns > 128 else 1

    @property
    def parts(self) -> int:
        """Planes of a tile."""
        return 2 if self.halves else 1

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a producer's and a consumer's thread; a CTA shares out 64k of them."""
        if self.tail_rows:
            return 40, 200  # 512 with tail_registers
        if self.teams * self.consumers == 4:
            return 32, 112
        if self.teams * self.consumers == 3:
            return 32, 160
        return self.producer_registers, {24: 240, 40: 232, 56: 224}[self.producer_registers]
