"""Owns how one GPU runs a Problem: which kernel, which tile sizes.

`choose_tiles(problem, shapes, gpu)` is pure: it runs at lowering, knows no arrays and needs no GPU.
What it decides reaches the compiler as constexpr definitions (`header`) and the handler as
attributes. The tuned tables are measured; docs/tuning.md tells how.
Read next: cuda/kernels/sm90/forward.cuh, cuda/runtime/handlers.cc.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_flash._problem import Problem, Shapes


@dataclasses.dataclass(frozen=True)
class GpuSpec:
    """What the choice of tiles needs to know of a GPU."""

    name: str
    arch: str  # what NVRTC compiles for: "sm_90a"


# Bytes of shared memory that one block may have on sm_90 (CUDA C++ programming guide, technical
# specifications per compute capability).
SMEM = 227 * 1024

GPUS = {
    "A100": GpuSpec("A100", "sm_80"),
    "H100": GpuSpec("H100", "sm_90a"),
    "H200": GpuSpec("H200", "sm_90a"),
}


def gpu_named(name: str) -> GpuSpec:
    """Returns the spec of a GPU by name, such as "H200".

    Raises:
      ValueError: the name is not known.
    """
    if not isinstance(name, str) or name not in GPUS:
        raise ValueError(f"gpu must be one of {', '.join(GPUS)}, not {name!r}.")
    return GPUS[name]


def gpu_of(device: Any) -> GpuSpec:
    """Reads the spec of a CUDA device of `jax.devices()`."""
    capability = device.compute_capability
    digits = capability.replace(".", "")
    # sm_90a: wgmma and setmaxnreg belong to the architecture-specific feature set.
    arch = f"sm_{digits}a" if capability == "9.0" else f"sm_{digits}"
    return GpuSpec(device.device_kind, arch)


@functools.cache
def present_gpu() -> GpuSpec | None:
    """Returns the spec of this process's first CUDA device, or None without one."""
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:
        return None
    return gpu_of(devices[0])


def lowering_gpu() -> GpuSpec:
    """Returns the GPU that a call is lowered for: on a machine without one, the most common."""
    return present_gpu() or GPUS["H100"]


@dataclasses.dataclass(frozen=True)
class ForwardTiles:
    """How the sm_90a forward kernel runs a problem: constants compiled into it and its launch."""

    head_dim: int
    value_dim: int
    tile_kv: int  # keys of one step, a multiple of 16
    consumers: int  # warpgroups of 64 query rows, besides the producer's
    tma_loads: bool = True  # TMA loads; it cannot where 8 does not divide a dim
    stages: int = 2  # blocks of keys and values in flight
    query_stages: int = 1
    packed_heads: int = 1  # query heads of one kv head that share a tile
    dynamic: bool = True  # tiles from an atomic counter, else in turn
    ping_pong: bool = True  # two warpgroups alternate softmax and matrix products
    producer_registers: int = 24  # of a thread, with two consumer warpgroups: 24, 40 or 56
    head_group: int = 8  # heads that the schedule walks together, so that their keys stay in L2

    source = "sm90/forward.cuh"
    entries = ("flash_forward",)

    @property
    def tile_q(self) -> int:
        """Query rows (positions times packed heads) of one tile."""
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + 1)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: queries, the stages of keys and values, barriers."""
        head_boxes, value_boxes = _boxes(self.head_dim), _boxes(self.value_dim)
        queries = self.query_stages * self.consumers * 64 * head_boxes
        keys_values = self.stages * self.tile_kv * (head_boxes + value_boxes)
        return 128 * (queries + keys_values) + 2048

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a producer's and a consumer's thread; a block shares out 64k of them."""
        if self.consumers == 3:
            return 32, 160
        return self.producer_registers, {24: 240, 40: 232, 56: 224}[self.producer_registers]

    def launch(self) -> dict[str, bool | int]:
        """Returns the numbers that the handler needs (ForwardTilesAttribute in handlers.cc)."""
        return {
            "threads": self.threads,
            "shared_bytes": self.shared_bytes,
            "tile_q": self.tile_q,
            "tile_kv": self.tile_kv,
            "packed_heads": self.packed_heads,
            "head_group": self.head_group,
            "dynamic": self.dynamic,
            "tma_loads": self.tma_loads,
        }

    def workspaces(self, problem: Problem, shapes: Shapes) -> list[jax.ShapeDtypeStruct]:
        """Returns the scratch arrays that the handler takes as further results."""
        segments = "query_segments" in problem.terms
        blocks = -(-shapes.kv_len // self.tile_kv) if segments else 0
        tiles = -(-shapes.q_len * self.packed_heads // self.tile_q) if segments else 0
        groups = tiles * (self.tile_q // 64)
        return [
            jax.ShapeDtypeStruct((1,), jnp.int32),  # counter of tiles
            jax.ShapeDtypeStruct((shapes.batch, blocks, 2), jnp.int32),  # ids in each key block
            jax.ShapeDtypeStruct((shapes.batch, groups, 4), jnp.int32),  # plan of each warpgroup
        ]

    def constants(self, problem: Problem) -> dict[str, bool | int | float]:
        """Returns the constants that the kernel is compiled with, by name."""
        producer_registers, consumer_registers = self.registers
        return {
            **_problem_constants(problem),
            "kHeadDim": self.head_dim,
            "kValueDim": self.value_dim,
            "kTmaLoads": self.tma_loads,
            "kBlockKV": self.tile_kv,
            "kConsumers": self.consumers,
            "kStages": self.stages,
            "kQueryStages": self.query_stages,
            "kPackedHeads": self.packed_heads,
            "kPreScale": problem.scale <= 0,
            "kDynamic": self.dynamic,
            "kPingPong": self.ping_pong,
            "kProducerRegisters": producer_registers,
            "kConsumerRegisters": consumer_registers,
        }

    def header(self, problem: Problem) -> str:
        """Returns the constexpr definitions compiled in front of the kernel."""
        return _header(self.constants(problem))


@dataclasses.dataclass(frozen=True)
class BackwardTiles:
    """How the sm_90a backward kernels run a problem: constants compiled into them, launches."""

    head_dim: int
    value_dim: int
    tile_q: int  # queries of one step
    tile_kv: int  # keys of one block
    tma_loads: bool = True  # as for the forward
    stages: int = 2  # blocks of queries and of output gradients in flight
    score_stages: int = 2  # buffers of score gradients
    dq_row_bytes: int = 0  # from row to row of dq, where it holds half of its float32 sum; else 0
    reads_ahead: bool = False  # what a step needs is read in the one before, narrow kernel
    head_group: int = 1  # kv heads that the schedule walks together

    entries = ("flash_backward", "flash_backward_prepare", "flash_backward_finish")

    @property
    def wide(self) -> bool:
        """Whether the kernel for head dims beyond 128 runs."""
        return self.tile_kv == 64

    @property
    def source(self) -> str:
        return "sm90/backward_wide.cuh" if self.wide else "sm90/backward.cuh"

    @property
    def turn_parts(self) -> int:
        """Parts of a query block's sum of dq that take turns of their own, deterministic mode."""
        return 1 if self.wide else 2

    @property
    def threads(self) -> int:
        return 512 if self.wide else 384

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block of the main kernel."""
        head_boxes, value_boxes = _boxes(self.head_dim), _boxes(self.value_dim)
        both = 128 * (head_boxes + value_boxes)
        rows = -(-2 * self.stages * self.tile_q * 4 // 1024) * 1024
        scores = self.score_stages * self.tile_kv * self.tile_q * 2
        sums = 16384 if self.wide else 16384 * max(head_boxes, value_boxes)
        return 1024 + both * (self.tile_kv + self.stages * self.tile_q) + rows + scores + sums

    def launch(self) -> dict[str, bool | int]:
        """Returns the numbers that the handler needs (BackwardTilesAttribute in handlers.cc)."""
        return {
            "threads": self.threads,
            "shared_bytes": self.shared_bytes,
            "tile_q": self.tile_q,
            "tile_kv": self.tile_kv,
            "turn_parts": self.turn_parts,
            "head_group": self.head_group,
            "tma_loads": self.tma_loads,
            "dq_row_bytes": self.dq_row_bytes,
        }

    def workspaces(self, problem: Problem, shapes: Shapes) -> list[jax.ShapeDtypeStruct]:
        """Returns the scratch arrays that the handler takes as further results."""
        heads = shapes.batch * shapes.q_heads
        sum_columns = self.head_dim // 2 if self.dq_row_bytes else 64 * _boxes(self.head_dim)
        blocks = -(-shapes.q_len // self.tile_q)
        rows = heads * blocks * self.tile_q
        segments = "query_segments" in problem.terms
        key_blocks = -(-shapes.kv_len // self.tile_kv)
        marks = shapes.batch * shapes.kv_heads * key_blocks * (self.tile_kv // 16)
        return [
            jax.ShapeDtypeStruct((rows,), jnp.float32),  # lse in log2
            jax.ShapeDtypeStruct((rows,), jnp.float32),  # dlse - rowsum(out * dout)
            jax.ShapeDtypeStruct((rows, sum_columns), jnp.float32),  # sum of dq
            jax.ShapeDtypeStruct((1,), jnp.int32),  # counter of key blocks
            jax.ShapeDtypeStruct(
                (heads, blocks if problem.deterministic else 0, self.turn_parts), jnp.int32
            ),
            jax.ShapeDtypeStruct((shapes.batch, blocks if segments else 0, 2), jnp.int32),
            jax.ShapeDtypeStruct((shapes.batch, key_blocks if segments else 0, 2), jnp.int32),
            jax.ShapeDtypeStruct((marks, 2), jnp.int32),  # rows of dk, dv that are not finite
        ]

    def constants(self, problem: Problem, *, with_dlse: bool) -> dict[str, bool | int | float]:
        """Returns the constants that the kernels are compiled with, by name."""
        return {
            **_problem_constants(problem),
            "kHeadDim": self.head_dim,
            "kValueDim": self.value_dim,
            "kTmaLoads": self.tma_loads,
            "kBlockQ": self.tile_q,
            "kBlockKV": self.tile_kv,
            "kStages": self.stages,
            "kScoreStages": self.score_stages,
            "kDqRowBytes": self.dq_row_bytes,
            "kReadsAhead": self.reads_ahead,
            "kDeterministic": problem.deterministic,
            "kHasDlse": with_dlse,
        }

    def header(self, problem: Problem, *, with_dlse: bool) -> str:
        """Returns the constexpr definitions compiled in front of the kernels."""
        return _header(self.constants(problem, with_dlse=with_dlse))


Tiles = ForwardTiles | BackwardTiles


def supports(problem: Problem, shapes: Shapes, gpu: GpuSpec) -> str | None:
    """Tells whether the CUDA kernels, forward and backward, run a problem: None, or why not."""
    if gpu.arch != "sm_90a":
        return f"the CUDA kernels run on sm_90 (H100, H200); {gpu.name} is {gpu.arch}"
    if problem.dtype not in ("bfloat16", "float16"):
        return f"the CUDA kernels take bfloat16 and float16, not {problem.dtype}"
    for dim in (shapes.head_dim, shapes.value_dim):
        if dim > 256:
            return f"the CUDA kernels take head dims up to 256, not {dim}"
    absent = {"bias": "bias", "mask": "boolean mask", "dropout_state": "dropout"}
    for term in problem.terms:
        if term in absent:
            return f"the CUDA kernels have no {absent[term]}"
    return None


def choose_tiles(problem: Problem, shapes: Shapes, gpu: GpuSpec) -> ForwardTiles:
    """Chooses the forward kernel's tiles for a problem that `supports` accepts."""
    dims = (shapes.head_dim, shapes.value_dim)
    widest = max(dims)
    length = _known(shapes.q_len, 4096)
    causal = problem.window[1] is not None
    plain = not problem.terms and problem.softcap is None and problem.window[0] is None
    # Tiles of one length need no counter: without its memset 4% faster at T 512; in long calls
    # the counter evens out multiprocessors of different speed, 3 to 6%.
    dynamic = causal or not plain or length > 2048
    group = _group(shapes)
    packed = group if group in (2, 4, 8, 16, 32, 64) and length < 128 else 1
    # 64 heads even out tiles of unequal length; more, of short sequences, are 3 % slower.
    head_group = max(1, min(_head_group(shapes), 64) // packed) if causal else 1
    if not _tma_loads(shapes):  # four warps that load: registers for addresses, no counter
        return ForwardTiles(
            *dims,
            tile_kv=128 if widest <= 128 else 64 if plain and not any(x % 2 for x in dims) else 48,
            consumers=2,
            tma_loads=False,
            query_stages=2 if widest <= 128 else 1,
            packed_heads=packed,
            dynamic=False,
            producer_registers=40 if widest <= 128 else 56,
            head_group=head_group,
        )
    # Lengths and segments take registers of the producer, wide heads of the consumers.
    producer = 24
    if not plain or 256 < sum(dims) <= 320:
        producer = 56 if widest <= 128 else 40
    tiles = functools.partial(
        ForwardTiles,
        *dims,
        packed_heads=packed,
        head_group=head_group,
        producer_registers=producer,
    )
    if widest <= 64:
        # More than segments or lengths alone takes registers that three warpgroups do not have;
        # heads that share a tile are of few rows.
        if len(problem.terms) > 2 or packed > 1:
            return tiles(tile_kv=128, consumers=2, stages=4, query_stages=2)
        return tiles(tile_kv=128, consumers=3, stages=4, query_stages=2, ping_pong=False)
    if widest <= 128:
        return tiles(tile_kv=128, consumers=2, stages=3, dynamic=dynamic)
    tile_kv = 112 if sum(dims) <= 320 else 96 if sum(dims) <= 384 else 80
    # Of up to 512 keys blocks of 80 leave a ninth of the last ones' work to nobody: 3 to 5 %.
    if not plain or _known(shapes.kv_len, 4096) <= 512:
        tile_kv = min(tile_kv, 64)
    return tiles(tile_kv=tile_kv, consumers=2, dynamic=dynamic)


def choose_backward_tiles(problem: Problem, shapes: Shapes, gpu: GpuSpec) -> BackwardTiles:
    """Chooses the backward kernels' tiles for a problem that `supports` accepts."""
    widest = max(shapes.head_dim, shapes.value_dim)
    tma_loads = _tma_loads(shapes)
    causal = problem.window[1] is not None
    plain = problem.window[0] is None and not (problem.terms or problem.softcap)
    # Loads without TMA leave the narrow kernel registers for 240 columns of dk and dv, not for 256.
    wide = widest > 128 or (not tma_loads and min(shapes.head_dim, shapes.value_dim) > 112)
    tile_q = 128 if widest <= 64 and problem.softcap is None else 64
    return BackwardTiles(
        shapes.head_dim,
        shapes.value_dim,
        tile_q=tile_q,
        tile_kv=64 if wide else 128,
        tma_loads=tma_loads,
        dq_row_bytes=_dq_row_bytes(shapes, tile_q),
        # 5 % at T >= 4096 without a mask, 1 to 4 % when causal, 2 to 7 % of the deterministic mode
        # when causal; elsewhere nothing or a loss.
        reads_ahead=plain
        and shapes.head_dim == shapes.value_dim == 128
        and (causal or not problem.deterministic),
        head_group=_backward_head_group(problem, shapes),
    )


def _dq_row_bytes(shapes: Shapes, tile_q: int) -> int:
    """Returns what there is from row to row of dq where it can hold half of its sum, else 0."""
    q_len, q_heads = shapes.q_len, shapes.q_heads
    if not (isinstance(q_len, int) and isinstance(q_heads, int)):  # symbolic, under jax.export
        return 0
    row_bytes = 2 * q_heads * shapes.head_dim
    # Whole tiles only; offsets within a tile of 128 rows are of 32 bits.
    whole = q_len % tile_q == 0 and shapes.head_dim % 64 == 0 and row_bytes < 1 << 24
    return row_bytes if whole else 0


# Bytes of what the heads walked together share, that stay in an H200's L2 (60 MB, halved
# by its two partitions).
_L2_SHARE = 32 << 20


def _backward_head_group(problem: Problem, shapes: Shapes) -> int:
    """Counts the kv heads that the backward kernel walks together.

    Few heads keep queries, output gradients and float32 sums of dq in L2. Many even out units of
    unequal length (causal) and spread those that wait for each other (deterministic). The factors
    are the fastest of 0.125 to 8 on an H200, 16k tokens, model dim 2048 (docs/tuning.md).
    """
    queries = _known(shapes.q_len, 4096)
    causal = problem.window[1] is not None
    widest = max(shapes.head_dim, shapes.value_dim)
    group = _group(shapes)
    # Of one query head: the units of a group walk its heads side by side.
    head_bytes = queries * (6 * shapes.head_dim + 2 * shapes.value_dim)
    fitting = max(1, _L2_SHARE // head_bytes)
    if problem.deterministic:
        steps = queries // (64 if widest > 64 else 128)  # of the longest unit
        level = min(max(steps.bit_length() - 4, 0), 5)  # under 16, 32, 64, 128, 256 steps; more
        if causal:
            factor = ((1, 2, 2, 3, 4, 8) if widest > 128 else (1, 2, 2, 4, 8, 8))[level]
            heads = fitting * factor // min(group, 2)
        else:
            heads = fitting * (1, 2, 2, 2, 4, 4)[level] // 2
    elif causal:  # units of a group are as many times longer, and fewer: more of them to even out
        heads = max(fitting * min(group, 2) // 2, 4 // group)
    else:
        heads = fitting // 4
    heads = max(1, heads)
    return min(heads, _known(shapes.batch, heads) * shapes.kv_heads)


def _head_group(shapes: Shapes) -> int:
    """Counts the query heads whose keys and values fit in L2 together."""
    bytes_per_head = 2 * _known(shapes.kv_len, 4096) * (shapes.head_dim + shapes.value_dim)
    fitting = max(1, _L2_SHARE // bytes_per_head)
    kv_heads = min(fitting, _known(shapes.batch, fitting) * shapes.kv_heads)
    return kv_heads * _group(shapes)


def _group(shapes: Shapes) -> int:
    """Counts the query heads that read one kv head."""
    return _known(shapes.q_heads // shapes.kv_heads, 1)


def _tma_loads(shapes: Shapes) -> bool:
    """Tells whether TMA can load the rows: they are multiples of 16 bytes apart."""
    return shapes.head_dim % 8 == 0 and shapes.value_dim % 8 == 0


def _known(size: Any, otherwise: int) -> int:
    """Returns a size, or a typical one in its place where jax.export left it symbolic."""
    return size if isinstance(size, int) else otherwise


def _boxes(dim: int) -> int:
    """Counts the boxes of 64 columns, 128 bytes of shared memory, that hold a row."""
    return -(-dim // 64)


def _problem_constants(problem: Problem) -> dict[str, bool]:
    left, right = problem.window
    return {
        "kBFloat16": problem.dtype == "bfloat16",
        "kWindowLeft": left is not None,
        "kWindowRight": right is not None,
        "kBottomRight": problem.bottom_right,
        "kHasQueryLengths": "query_lengths" in problem.terms,
        "kHasKeyValueLengths": "key_value_lengths" in problem.terms,
        "kHasSegments": "query_segments" in problem.terms,
        "kHasSinks": "sinks" in problem.terms,
        "kSoftcap": problem.softcap is not None,
    }


def _header(constants: dict[str, bool | int | float]) -> str:
    return "".join(_definition(name, value) for name, value in constants.items())


def _definition(name: str, value: bool | int | float) -> str:
    if isinstance(value, bool):
        return f"constexpr bool {name} = {str(value).lower()};\n"
    if isinstance(value, float):
        return f"constexpr float {name} = {value!r}f;\n"
    return f"constexpr int {name} = {value};\n"
