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
)


# Elements and the largest head dim that the kernels of a pass take.
_LIMITS = {
    "forward": ("float32, bfloat16 and float16", 512),
    "backward": ("bfloat16 and float16", 256),
}


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
            reasons.append(
                "the CUDA kernels run on sm_80 and later, which have cp.async, bfloat16 and "
                f"products of 16 columns; {gpu.name} is {gpu.arch}"
            )
        kernels = f"the CUDA {call.target} kernels"
        dtype, (dtypes, widest) = call.problem.dtype, _LIMITS[call.target]
        if dtype not in dtypes.replace(",", "").split():
            reasons.append(f"{kernels} take {dtypes}, not {dtype}")
        wide = [dim for dim in (shapes.head_dim, shapes.value_dim) if dim > widest]
        reasons += [f"{kernels} take head dims up to {widest}, not {dim}" for dim in wide]
        absent = [term for term in call.problem.terms if term not in _COMPUTED]
        reasons += [f"the CUDA kernels have no {TERMS[term].feature}" for term in absent]
        return tuple(dict.fromkeys(reasons))

    def outrun(self, call: Call, gpu: GpuSpec) -> tuple[str, ...]:
        if call.problem.dtype == "float32" or gpu.arch not in ("sm_100", "sm_103"):
            return ()
        return (
            f"mma.sync, by which these kernels multiply, has about a quarter of the speed of "
            f"{gpu.name}'s tensor cores: cuDNN, by jax.nn.dot_product_attention(implementation="
            "'cudnn'), is up to four times as fast where it takes the call",
        )

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
            notes=(*self.untried(gpu), *self.outrun(call, gpu)),
        )


@dataclasses.dataclass(frozen=True)
class ForwardTiling:
    """How the forward kernel runs a problem: constants compiled into it and its launch."""

    head_dim: int
    value_dim: int
    block_kv: int  # keys of one block: 16, 32 or 64
    parts: int = 1  # bfloat16 that a float32 is split into: 2 or 3
    row_tiles: int = 1  # of 16 query rows, of a warp
    row_warps: int = 4  # that have rows of their own
    value_warps: int = 1  # that share rows, each with its part of the head and the value dim
    stages: int = 1  # buffers each of keys and of values; 0: one for both
    l2_heads: int = 1  # heads that the schedule walks together, so that their keys stay in L2

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
        return self.block_q * row_bytes + self.block_kv * both

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
            "kParts": self.parts,
            "kRowTiles": self.row_tiles,
            "kRowWarps": self.row_warps,
            "kValueWarps": self.value_warps,
            "kStages": self.stages,
            "kPreScale": problem.scale <= 0,
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
    parts = 1 if problem.dtype != "float32" else 3 if problem.precision == "highest" else 2
    # Two tiles of rows read keys and values from shared memory half as often; beside the terms of
    # a score they leave too few registers, and so do blocks of 64 keys beside wide rows.
    plain = not problem.terms and problem.softcap is None and parts == 1
    sizes: list[dict[str, int]] = []
    if plain and widest <= 128 and known(shapes.q_len, 4096) > 64:
        sizes += [{"block_kv": 64 if widest <= 64 else 32, "row_tiles": 2, "stages": 2}]
        sizes += [{"block_kv": 32, "row_tiles": 2}]
    narrow = widest <= (128 if parts == 1 else 64)
    most = 32 if parts == 3 else 64
    if not (narrow or plain):
        most = 32 if parts == 1 or (parts == 2 and (widest <= 128 or not problem.terms)) else 16
    block_sizes = [size for size in (64, 32, 16) if size <= most]
    # A warp has registers for the results of 16 rows and 256 columns; fewer if sums are in parts.
    columns = 256 if parts == 1 else 128
    if parts == 3 and "dropout_state" in problem.terms:  # on sm_90 32 bytes were spilled
        columns = 64
    least = min(-(-shapes.value_dim // columns), 4)
    sizes += [
        {"block_kv": block_kv, "row_warps": row_warps, "value_warps": value_warps, "stages": stages}
        for stages, row_warps in [(1, 4), (1, 2), (0, 2), (0, 1)]
        for value_warps in [next(x for x in (1, 2, 4) if x >= least and x * row_warps >= 4)]
        for block_kv in (block_sizes if stages else [16])
        if row_warps * value_warps <= 8
    ]
    l2_heads = _l2_heads(problem.dtype, shapes, gpu)
    dims = shapes.head_dim, shapes.value_dim
    return [ForwardTiling(*dims, parts=parts, l2_heads=l2_heads, **size) for size in sizes]


_ANY_L2_BYTES = 4 << 20  # of a GPU that is not known


def _l2_heads(dtype: str, shapes: Shapes, gpu: GpuSpec) -> int:
    """Counts the query heads whose keys and values fit half of the L2 together."""
    share = (gpu.l2_bytes or _ANY_L2_BYTES) // 2
    element = 4 if dtype == "float32" else 2
    bytes_per_head = element * known(shapes.kv_len, 4096) * (shapes.head_dim + shapes.value_dim)
    fitting = max(1, share // max(bytes_per_head, 1))
    kv_heads = min(fitting, known(shapes.batch, fitting) * known(shapes.kv_heads, fitting))
    return max(1, kv_heads) * known(shapes.q_heads // shapes.kv_heads, 1)
