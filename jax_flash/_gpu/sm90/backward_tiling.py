"""Owns `BackwardTiling`: the sizes by which the backward kernels for Hopper run a problem.

Read next: backward_schedule.py; cuda/kernels/sm90/backward.cuh, backward_wide.cuh for wide heads.
"""

from __future__ import annotations

import dataclasses

from jax_flash._gpu.fields import Scratch
from jax_flash._gpu.sm90.backward_launch import backward_params
from jax_flash._gpu.workspaces import boxes
from jax_flash._problem import Problem, Shapes


@dataclasses.dataclass(frozen=True)
class BackwardTiling:
    """How the backward kernels run a problem: constants compiled into them, launches."""

    head_dim: int
    value_dim: int
    block_q: int  # queries of one block, a step of the walk
    wide: bool  # the kernel for head dims beyond 128: two warpgroups share a block's products
    tma_loads: bool = True  # as for the forward
    early: bool = False  # likewise
    stages: int = 2  # blocks of queries and of output gradients in flight
    score_stages: int = 2  # buffers of score gradients
    dq_row_bytes: int = 0  # from row to row of dq, where it holds half of its float32 sum; else 0
    stores_dq: bool = False  # keys are one block: the main kernel has all of dq, and stores it
    last_stores: bool = False  # deterministic: the unit that adds last makes dq of its sum
    compact: bool = False  # scratch arrays have the rows and columns that there are, no padding
    outputs: int = 1  # buffers by which a warpgroup's dv and dk leave, narrow kernel: 1 or 2
    reads_ahead: bool = False  # what a step needs is read in the one before, narrow kernel
    holds_draws: bool = False  # what dropout draws takes of keys alone is found once a unit
    l2_heads: int = 1  # units of a block of keys that the schedule walks together
    falling_heads: int = 0  # the last heads of a causal, deterministic problem, whose walks fall;
    # those of the others rise from their diagonals; 0: none does
    unit_heads: int = 0  # query heads of a unit, where a kv head has more: dk and dv are sums of
    # several units'; 0: all
    shares: bool = False  # CTAs share the walks of units, where these are few
    stores_dbias: bool = False  # the main kernel stores dS: no other score shares its bias
    clears_dbias: bool = False  # and it may leave blocks out
    dbias_rows: bool = False  # a CTA adds the dS of batch rows that share their bias
    sum_ctas: int = 0  # that sum the gradient of a bias, where dS is not stored
    dbias_heads: int = 0  # kv heads whose dS is stored at a time, as batch rows share their bias
    bias_bytes: int = 0  # of an element of a bias that TMA loads beside the queries; 0: it does not
    halves: bool = False  # as for the forward, wide kernel
    ring_sets: int = 0  # sets of l2_heads whose sums of dq have a place at a time; 0: all at once
    ring_lag: int = 0  # sets between the one that is added to and the one that is finished
    resident: int = 1  # CTAs of a multiprocessor; two have one score warpgroup each, narrow kernel
    prepare_parts: int = 1  # CTAs of flash_backward_prepare for 64 rows of a head
    pairs: bool = False  # two CTAs of a cluster make half of the columns of dq: backward_pairs.cuh

    @property
    def block_kv(self) -> int:
        """Keys of one block."""
        return 64 if self.wide else 64 * self.score_warpgroups

    @property
    def score_warpgroups(self) -> int:
        """Warpgroups that compute scores, each of 64 keys in the narrow kernel."""
        return 1 if self.resident > 1 else 2

    @property
    def source(self) -> str:
        return f"{self.folder}/backward{'_wide' if self.wide and not self.halves else ''}.cuh"

    @property
    def beside(self) -> str:
        return f"{self.folder}/backward_entries.cuh"

    @property
    def folder(self) -> str:
        return "sm90_float32" if self.halves else "sm90"

    @property
    def marks_rows(self) -> bool:
        """The main kernel stores dq, and marks rows that are not finite."""
        return self.stores_dq or self.last_stores

    @property
    def dout_stages(self) -> int:
        """Blocks of output gradients in flight: pairs of the widest have room for one."""
        crowded = self.pairs and max(self.head_dim, self.value_dim) > 192
        return 1 if crowded else self.stages

    @property
    def turn_parts(self) -> int:
        """Parts of a query block's sum of dq that take turns of their own, deterministic mode."""
        return 1 if self.wide and not self.pairs else 2

    @property
    def threads(self) -> int:
        return 512 if self.wide else 128 * (1 + self.score_warpgroups)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA of the main kernel."""
        head_boxes, value_boxes = boxes(self.head_dim), boxes(self.value_dim)
        both = 128 * (head_boxes + value_boxes)
        rows = -(-2 * self.stages * self.block_q * 4 // 1024) * 1024
        scores = self.parts * self.score_stages * self.block_kv * self.block_q * 2
        sums = 16384 if self.wide else 8192 * self.score_warpgroups * max(head_boxes, value_boxes)
        sums *= self.outputs
        biases = self.stages * self.block_q * self.block_kv * self.bias_bytes
        tiles = self.parts * both * (self.block_kv + self.stages * self.block_q) + biases
        ring = 33 * 1024 if self.ring_sets else 0
        fixed = 2048 if self.halves else 1024
        if self.pairs:
            others = 8192 * (-(-head_boxes // 2) + self.score_stages)
            spared = 128 * value_boxes * self.block_q * (self.stages - self.dout_stages)
            return fixed + tiles + rows + scores + sums + others - spared
        return fixed + tiles + rows + scores + sums + ring

    @property
    def parts(self) -> int:
        """Planes of a tile."""
        return 2 if self.halves else 1

    @property
    def sum_stages(self) -> int:
        """Pairs of blocks in flight where that gradient is summed: two CTAs share the memory."""
        return 2 if self.tma_loads and max(self.head_dim, self.value_dim) <= 64 else 1

    @property
    def bias_shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA that sums the gradient of a bias."""
        both = boxes(self.head_dim) + boxes(self.value_dim)
        return self.sum_stages * 128 * both * (self.block_kv + self.block_q) + 1024

    @property
    def without_dbias(self) -> BackwardTiling:
        """The tiling of a pass that leaves the gradient of a bias out."""
        off = {"stores_dbias": False, "clears_dbias": False, "dbias_rows": False, "dbias_heads": 0}
        return dataclasses.replace(self, **off)

    def scratch(self, problem: Problem, shapes: Shapes) -> dict[str, Scratch]:
        """Returns the scratch arrays of a pass without the gradient of a bias."""
        return backward_params(problem, shapes, self).scratch()
