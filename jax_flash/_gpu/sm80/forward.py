"""Owns how the forward kernel of mma.sync runs a problem: its tilings, and which one is taken.

`choose_forward` is the heuristic; what was measured, was on an H200. Read next:
cuda/kernels/sm80/forward.cuh.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax_flash._gpu.constants import problem_constants
from jax_flash._gpu.plan import Number
from jax_flash._gpu.sm80.ampere import ANY_L2_BYTES, parts_of
from jax_flash._gpu.spec import GpuSpec
from jax_flash._gpu.traits import group_size, is_bare, is_highest, known, leaves_gaps
from jax_flash._gpu.workspaces import blocks, boxes
from jax_flash._problem import Problem, Shapes


@dataclasses.dataclass(frozen=True)
class ForwardTiling:
    """How the forward kernel runs a problem: constants compiled into it and its launch."""

    head_dim: int
    value_dim: int
    block_kv: int  # keys of one block: 16, 32 or 64
    parts: int = 1  # that a float32 is split into: 2
    halves: bool = False  # they are float16, split ahead, else bfloat16
    row_tiles: int = 1  # of 16 query rows, of a warp
    row_warps: int = 4  # that have rows of their own
    value_warps: int = 1  # that share rows, each with its part of the head and the value dim
    stages: int = 1  # buffers each of keys and of values; 0: one for both
    query_steps: int = 0  # of 16 columns, that a warp keeps of its queries in registers
    l2_heads: int = 1  # heads that the schedule walks together, so that their keys stay in L2
    packed_heads: int = 1  # query heads that share keys and a unit, of requests over pages
    page_size: int = 0  # of pages that keys are in, and units are of requests; 0: there are none

    source = "sm80/forward.cuh"
    beside = ""  # all kernels are of one program

    @property
    def threads(self) -> int:
        """Threads of a CTA: 128 or 256."""
        return 32 * self.row_warps * self.value_warps

    @property
    def block_q(self) -> int:
        """Query rows of a CTA."""
        return 16 * self.row_warps * self.row_tiles

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA: queries, the stages of keys and values."""
        row_bytes, value_bytes = (
            128 * self.parts * boxes(dim) for dim in (self.head_dim, self.value_dim)
        )
        # Warps that share rows exchange their scores where the keys were.
        exchanged = 4 * self.block_q * self.value_warps if self.value_warps > 1 else 0
        key_bytes = max(row_bytes, exchanged)
        both = self.stages * (key_bytes + value_bytes) or max(key_bytes, value_bytes)
        parked = 16 * self.row_tiles * self.threads
        parked *= self.halves and self.row_tiles == 2
        return self.block_q * row_bytes + self.block_kv * both + parked

    # What registers allow.

    @property
    def parks_softmax(self) -> bool:
        """A thread's bases and sums wait in shared memory beside products of halves.

        Two tiles leave no registers for them.
        """
        return self.sums_of_32

    @property
    def sums_of_32(self) -> bool:
        """A sum of tensor cores is of 32 products of halves, not 16: half as many additions.

        For more registers: two tiles of narrow values have them.
        """
        return self.halves and self.row_tiles == 2 and self.value_dim <= 64

    @property
    def steps_at_once(self) -> int:
        """Steps of 16 columns of the scores' products: all; of elements in parts more spill."""
        if self.parts == 1:
            return blocks(blocks(self.head_dim, 16), self.value_warps)
        return 1 if self.row_tiles == 2 else 2

    def constants(self, problem: Problem, shapes: Shapes) -> dict[str, Number]:
        """Returns the constants that the kernel is compiled with, by name."""
        return {
            **problem_constants(problem, shapes),
            "kHeadDim": self.head_dim,
            "kValueDim": self.value_dim,
            "kBlockKV": self.block_kv,
            "kParts": self.parts,
            "kHalves": self.halves,
            "kRowTiles": self.row_tiles,
            "kRowWarps": self.row_warps,
            "kValueWarps": self.value_warps,
            "kStages": self.stages,
            "kQuerySteps": self.query_steps,
            "kPreScale": problem.scale <= 0,
            "kListsBlocks": leaves_gaps(problem),
            "kParksSoftmax": self.parks_softmax,
            "kSumsOf32": self.sums_of_32,
            "kStepsAtOnce": self.steps_at_once,
            "kPackedHeads": self.packed_heads,
            "kFromPages": self.page_size > 0,
            "kPageSize": max(self.page_size, 1),
        }


def choose_forward(problem: Problem, shapes: Shapes, gpu: GpuSpec) -> ForwardTiling:
    """Chooses the forward kernel's tiling for a problem that the family does not refuse."""
    # A multiprocessor has 1 KB for each CTA beside what one may take: room for two of them.
    room = (gpu.shared_bytes - 1024) // 2
    tilings = forward_tilings(problem, shapes, gpu)
    two = [x for x in tilings if x.threads == 128 and x.block_q >= 64 and x.shared_bytes <= room]
    one = [x for x in tilings if x.shared_bytes <= gpu.shared_bytes]
    return (two or one)[0]


def forward_tilings(problem: Problem, shapes: Shapes, gpu: GpuSpec) -> list[ForwardTiling]:
    """Lists the tilings for a problem, those that read keys and values less often first."""
    widest = max(shapes.head_dim, shapes.value_dim)
    parts = parts_of(problem)
    # Two tiles of rows read keys and values from shared memory half as often; beside the terms of
    # a score they leave too few registers, and so do blocks of 64 keys beside wide rows.
    halves = is_highest(problem)
    bare = is_bare(problem)
    plain = bare and parts == 1
    sizes: list[dict[str, Any]] = []
    query_steps = min(8, -(-shapes.head_dim // 16))
    if plain and widest <= 128 and known(shapes.q_len, 4096) > 64:
        # Results and scores of 64 keys and 128 columns are 192 registers: what a left side of the
        # window or rows that are not pieces of 16 bytes take beside them was spilled, 8 bytes.
        spills = problem.window[0] is not None or shapes.head_dim % 8 or shapes.value_dim % 8
        if widest <= 64 or not spills:
            sizes += [{"block_kv": 64, "row_tiles": 2, "stages": 2 if widest <= 64 else 1}]
        sizes += [{"block_kv": 32, "row_tiles": 2, "stages": stages} for stages in (2, 1)]
        if widest <= 64:
            sizes = [size | {"query_steps": query_steps} for size in sizes]
    if bare and halves and widest <= 128 and known(shapes.q_len, 4096) > 64:
        sizes += [{"block_kv": 32, "row_tiles": 2}]
    narrow = widest <= (128 if parts == 1 else 64)
    most = 64 if narrow or plain else 32
    if parts == 2 and widest > 128 and problem.terms:
        most = 16
    block_sizes = [size for size in (64, 32, 16) if size <= most]
    # A warp has registers for the results of 16 rows and 256 columns; fewer if sums are in parts.
    columns = 256 if parts == 1 else 128
    least = min(-(-shapes.value_dim // columns), 4)
    sizes += [
        {"block_kv": block_kv, "row_warps": row_warps, "value_warps": value_warps, "stages": stages}
        for stages, row_warps in [(1, 4), (1, 2), (0, 2), (0, 1)]
        for value_warps in [next(x for x in (1, 2, 4) if x >= least and x * row_warps >= 4)]
        for block_kv in (block_sizes if stages else [16])
        if row_warps * value_warps <= 8
    ]
    if plain and 128 < widest <= 256:
        keeps = {"query_steps": query_steps}
        sizes = [size | keeps if size["value_warps"] == 1 else size for size in sizes]
    l2_heads = _l2_heads(problem.dtype, shapes, gpu)
    dims = shapes.head_dim, shapes.value_dim
    common = {"parts": parts, "halves": halves, "l2_heads": l2_heads}
    return [ForwardTiling(*dims, **common, **size) for size in sizes]


def _l2_heads(dtype: str, shapes: Shapes, gpu: GpuSpec) -> int:
    """Counts the query heads whose keys and values fit half of the L2 together."""
    share = (gpu.l2_bytes or ANY_L2_BYTES) // 2
    element = 4 if dtype == "float32" else 2
    bytes_per_head = element * known(shapes.kv_len, 4096) * (shapes.head_dim + shapes.value_dim)
    fitting = max(1, share // max(bytes_per_head, 1))
    kv_heads = min(fitting, known(shapes.batch, fitting) * known(shapes.kv_heads, fitting))
    return max(1, kv_heads) * group_size(shapes)
