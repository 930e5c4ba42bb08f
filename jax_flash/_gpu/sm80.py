"""Owns how the kernels of mma.sync, for GPUs since Ampere, run a problem: refusals, tilings, plans.

`choose_forward` is the heuristic, by rules alone: nothing of it has been measured. Read next:
cuda/kernels/sm80/forward.cuh, cuda/runtime/families/sm80.cc.
"""

from __future__ import annotations

import dataclasses

import jax

from jax_flash._call import Call
from jax_flash._gpu.constants import known, problem_constants
from jax_flash._gpu.family import Family, Number, Plan
from jax_flash._gpu.spec import GpuSpec
from jax_flash._gpu.workspaces import blocks, boxes, int32, mask_by_query
from jax_flash._problem import Problem, Shapes
from jax_flash._terms import TERMS

# The terms that the kernels compute.
_COMPUTED = (
    *("query_lengths", "key_value_lengths", "query_segments", "key_value_segments"),
    *("query_positions", "key_value_positions", "sinks", "mask", "bias", "dropout_state"),
    *("block_numbers", "block_bits"),
)


class Sm80(Family):
    """The kernels of cuda/kernels/sm80."""

    name = "sm80"
    architectures = (
        *("sm_80", "sm_86", "sm_87", "sm_89", "sm_90a"),
        *("sm_100", "sm_103", "sm_110", "sm_120", "sm_121"),
    )
    passes = ("forward",)
    measured = ()

    def refuse(self, call: Call, shapes: Shapes, gpu: GpuSpec) -> tuple[str, ...]:
        reasons = []
        if gpu.arch not in self.architectures:
            reasons.append(f"the CUDA kernels run on sm_80 and later; {gpu.name} is {gpu.arch}")
        if call.problem.dtype not in ("bfloat16", "float16"):
            reasons.append(f"the CUDA kernels take bfloat16 and float16, not {call.problem.dtype}")
        wide = [dim for dim in (shapes.head_dim, shapes.value_dim) if dim > 256]
        reasons += [f"the CUDA kernels take head dims up to 256, not {dim}" for dim in wide]
        absent = [term for term in call.problem.terms if term not in _COMPUTED]
        reasons += [f"the CUDA kernels have no {TERMS[term].feature}" for term in absent]
        return tuple(dict.fromkeys(reasons))

    def plan(
        self, call: Call, shapes: Shapes, gpu: GpuSpec, tiling: ForwardTiling | None = None
    ) -> Plan:
        tiling = tiling or choose_forward(call.problem, shapes, gpu)
        return Plan(
            family=self.name,
            arch=gpu.arch,
            target=f"jax_flash_cuda_{self.name}_{call.target}",
            source="sm80/forward.cuh",
            entries=("flash_forward_sm80",),
            tiling=tiling,
            constants=tiling.constants(call.problem, shapes),
            launch=tiling.launch(),
            workspaces=tiling.workspaces(call.problem, shapes),
            notes=self.untried(gpu),
        )


@dataclasses.dataclass(frozen=True)
class ForwardTiling:
    """How the forward kernel runs a problem: constants compiled into it and its launch."""

    head_dim: int
    value_dim: int
    block_kv: int  # keys of one block: 32 or 64
    row_tiles: int = 1  # of 16 query rows, of a warp
    stages: int = 1  # buffers each of keys and of values
    l2_heads: int = 1  # heads that the schedule walks together, so that their keys stay in L2

    threads = 128

    @property
    def block_q(self) -> int:
        """Query rows of a CTA."""
        return 64 * self.row_tiles

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA: queries, the stages of keys and values."""
        head_boxes, value_boxes = boxes(self.head_dim), boxes(self.value_dim)
        keys_values = self.stages * self.block_kv * (head_boxes + value_boxes)
        return 128 * (self.block_q * head_boxes + keys_values)

    def launch(self) -> dict[str, bool | int]:
        """Returns the numbers that the handler needs (Sm80ForwardLaunch in families/sm80.cc)."""
        return {
            "threads": self.threads,
            "shared_bytes": self.shared_bytes,
            "block_q": self.block_q,
            "block_kv": self.block_kv,
            "l2_heads": self.l2_heads,
        }

    def workspaces(self, problem: Problem, shapes: Shapes) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the scratch arrays that the handler takes as further results."""
        segments = "query_segments" in problem.terms
        positions = "query_positions" in problem.terms
        key_blocks = blocks(shapes.kv_len, self.block_kv)
        return {
            # Smallest and largest id, or position, in each block of keys.
            "key_segment_ranges": int32(shapes.batch, key_blocks, 2 * segments),
            "key_position_ranges": int32(shapes.batch, key_blocks, 2 * positions),
            **mask_by_query(shapes, self.block_q, self.block_kv),
        }

    def constants(self, problem: Problem, shapes: Shapes) -> dict[str, Number]:
        """Returns the constants that the kernel is compiled with, by name."""
        return {
            **problem_constants(problem, shapes),
            "kHeadDim": self.head_dim,
            "kValueDim": self.value_dim,
            "kBlockKV": self.block_kv,
            "kRowTiles": self.row_tiles,
            "kStages": self.stages,
            "kPreScale": problem.scale <= 0,
        }


def choose_forward(problem: Problem, shapes: Shapes, gpu: GpuSpec) -> ForwardTiling:
    """Chooses the forward kernel's tiling for a problem that the family does not refuse."""
    widest = max(shapes.head_dim, shapes.value_dim)
    # Two tiles of rows read keys and values from shared memory half as often; beside the terms of
    # a score they leave too few registers, and so do blocks of 64 keys beside wide rows.
    plain = not problem.terms and problem.softcap is None
    doubles = plain and widest <= 128 and known(shapes.q_len, 4096) > 64
    sizes = [(1, 64, 1), (1, 32, 1)]  # row_tiles, block_kv, stages
    if doubles:
        sizes = [(2, 64, 2) if widest <= 64 else (2, 32, 2), (2, 32, 1), *sizes]
    tilings = [
        ForwardTiling(
            shapes.head_dim,
            shapes.value_dim,
            block_kv=block_kv,
            row_tiles=row_tiles,
            stages=stages,
            l2_heads=_l2_heads(shapes, gpu),
        )
        for row_tiles, block_kv, stages in sizes
    ]
    # A multiprocessor has 1 KB for each CTA beside what one may take: room for two of them.
    room = (gpu.shared_bytes - 1024) // 2
    return next((x for x in tilings if x.shared_bytes <= room), tilings[-1])


_ANY_L2_BYTES = 4 << 20  # of a GPU that is not known


def _l2_heads(shapes: Shapes, gpu: GpuSpec) -> int:
    """Counts the query heads whose keys and values fit half of the L2 together."""
    share = (gpu.l2_bytes or _ANY_L2_BYTES) // 2
    bytes_per_head = 2 * known(shapes.kv_len, 4096) * (shapes.head_dim + shapes.value_dim)
    fitting = max(1, share // max(bytes_per_head, 1))
    kv_heads = min(fitting, known(shapes.batch, fitting) * known(shapes.kv_heads, fitting))
    return max(1, kv_heads) * known(shapes.q_heads // shapes.kv_heads, 1)
