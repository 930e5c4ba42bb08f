"""Owns how the kernels of mma.sync, for GPUs since Ampere, run a problem: refusals, tilings, plans.

`choose_forward` and `choose_backward` are the heuristics; what was measured, was on an H200.
Read next: cuda/kernels/sm80/forward.cuh and backward.cuh; sm80_launch.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from jax_flash._call import Call
from jax_flash._gpu import emit
from jax_flash._gpu.backward_schedule import CommonSchedule
from jax_flash._gpu.buffers import dims_of, operands_of, results_of, same_of
from jax_flash._gpu.carrier import COPIED
from jax_flash._gpu.constants import functions, problem_constants, refuse_functions
from jax_flash._gpu.family import Family
from jax_flash._gpu.fields import Scratch
from jax_flash._gpu.plan import Number, Plan
from jax_flash._gpu.sm80_launch import backward_launch, backward_params, forward_launch
from jax_flash._gpu.spec import GpuSpec
from jax_flash._gpu.traits import (
    group_size,
    hides_sides,
    is_bare,
    is_highest,
    is_own,
    is_wide,
    known,
    leaves_gaps,
)
from jax_flash._gpu.workspaces import (
    blocks,
    boxes,
    dbias_heads,
    dq_row_bytes,
    spare,
)
from jax_flash._problem import Problem, Shapes
from jax_flash._terms import TERMS

# The terms that the kernels compute.
_COMPUTED = (
    *("query_lengths", "key_value_lengths", "query_segments", "key_value_segments"),
    *("query_positions", "key_value_positions", "sinks", "mask", "bias", "dropout_state"),
    "score_ids",
    *("block_numbers", "block_bits"),
)


_BIAS_CTAS = 256  # that sum a bias's gradient at once
_DTYPES = ("float32", "bfloat16", "float16")
_WIDEST = 512  # head dim


class Sm80(Family):
    """The kernels of cuda/kernels/sm80."""

    name = "sm80"
    architectures = (
        *("sm_80", "sm_86", "sm_87", "sm_89", "sm_90a"),
        *("sm_100", "sm_103", "sm_110", "sm_120", "sm_121"),
    )
    passes = ("forward", "backward")
    measured = ()

    def refuse(self, call: Call, shapes: Shapes, gpu: GpuSpec) -> tuple[str, ...]:
        reasons = []
        if gpu.arch not in self.architectures:
            reasons.append(
                "the CUDA kernels run on sm_80 and later, which have cp.async, bfloat16 and "
                f"products of 16 columns; {gpu.name} is {gpu.arch}"
            )
        kernels = f"the CUDA {call.target} kernels"
        dtype = call.problem.dtype
        if dtype not in _DTYPES:
            reasons.append(f"{kernels} take float32, bfloat16 and float16, not {dtype}")
        wide = [dim for dim in (shapes.head_dim, shapes.value_dim) if dim > _WIDEST]
        reasons += [f"{kernels} take head dims up to {_WIDEST}, not {dim}" for dim in wide]
        if not reasons and call.target == "backward":
            reasons += _refuse_size(call.problem, shapes, gpu)
        absent = [term for term in call.problem.terms if term not in _COMPUTED]
        reasons += [f"the CUDA kernels have no {TERMS[term].feature}" for term in absent]
        reasons += refuse_functions(call)
        return tuple(dict.fromkeys(reasons))

    def outrun(self, call: Call, gpu: GpuSpec) -> tuple[str, ...]:
        if (
            call.problem.dtype == "float32"
            or call.problem.split
            or gpu.arch not in ("sm_100", "sm_103")
        ):
            return ()
        return (
            f"mma.sync, by which these kernels multiply, has about a quarter of the speed of "
            f"{gpu.name}'s tensor cores: cuDNN, by jax.nn.dot_product_attention(implementation="
            "'cudnn'), is up to four times as fast where it takes the call",
        )

    def plan(self, call: Call, shapes: Shapes, gpu: GpuSpec, tiling: Any = None) -> Plan:
        if "dout" in call.operands:
            tiling = tiling or choose_backward(call.problem, shapes, gpu)
            constants = tiling.constants(call.problem, shapes) | {
                "kHasDlse": "dlse" in call.operands,
                "kHasDbias": "dbias" in call.results,
            }
            launch = backward_launch(call, shapes, tiling)
        else:
            tiling = tiling or choose_forward(call.problem, shapes, gpu)
            constants = tiling.constants(call.problem, shapes)
            launch = forward_launch(call, shapes, tiling)
        copied = (COPIED,) if call.problem.split == "carried" else ()
        return Plan(
            family=self.name,
            arch=gpu.arch,
            target=f"jax_flash_cuda_{self.name}_{call.target}",
            source=tiling.source,
            tiling=tiling,
            constants=constants,
            operands=operands_of(call, shapes),
            results=results_of(call, shapes),
            same=same_of(call),
            launch=launch,
            dims=dims_of(shapes),
            notes=(*copied, *self.untried(gpu), *self.outrun(call, gpu)),
            functions=functions(call, shapes),
        )


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

    source = "sm80/forward.cuh"

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
        }


@dataclasses.dataclass(frozen=True)
class BackwardTiling:
    """How the backward kernels run a problem: constants compiled into them, launches."""

    head_dim: int
    value_dim: int
    block_kv: int  # keys of a CTA: 16, 32, 64 or 128
    parts: int = 1  # that a float32 is split into: 2
    halves: bool = False  # they are float16, split ahead, else bfloat16
    row_tiles: int = 1  # of 16 keys, of a warp
    most_queries: int = 32  # of a step that a warp takes at once: 16 or 32
    column_warps: int = 1  # that share them, each with its part of the columns: 1, 2 or 4
    step_queries: int = 64  # queries that it takes at a time: 16, 32 or 64
    stages: int = 2  # buffers of queries
    dout_stages: int = 2  # buffers of output gradients
    dq_row_bytes: int = 0  # from row to row of dq, where it holds half of its float32 sum; else 0
    compact: bool = False  # scratch arrays have the rows and columns that there are, no padding
    defers_dq: bool = False  # that of a step is added in the next one
    adds_four: bool = False  # one instruction adds four elements to the sum of dq
    l2_heads: int = 1  # kv heads that the schedule walks together
    stores_dbias: bool = False  # the main kernel stores dS: no other score shares its bias
    clears_dbias: bool = False  # and it may leave blocks out
    dbias_heads: int = 0  # kv heads whose dS is stored at a time, as batch rows share their bias

    source = "sm80/backward.cuh"
    block_q = 64  # queries of a block, one or two steps
    turn_parts = 1
    sum_ctas = _BIAS_CTAS
    ring_sets = ring_lag = unit_heads = 0  # there is no ring, and units have all heads of a group

    @property
    def warps(self) -> int:
        return self.block_kv // (16 * self.row_tiles) * self.column_warps

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA of the main kernel."""
        head_boxes, value_boxes = boxes(self.head_dim), boxes(self.value_dim)
        rows = self.block_kv * (head_boxes + value_boxes) + self.step_queries * (
            self.stages * head_boxes + self.dout_stages * value_boxes
        )
        scores = (2 if self.column_warps > 1 else 1) + self.defers_dq
        scores *= self.block_kv * self.step_queries * 2
        numbers = 4 * self.step_queries * (self.stages + self.dout_stages)
        numbers += 4 * (self.block_kv // 16 * 2 + 1)  # flaws and the unit
        pairs = self.block_kv * self.step_queries // 256 if self.halves else 0
        numbers = -(-numbers // 128) * 128 + -(-8 * pairs // 128) * 128  # factors of scores
        return self.parts * (128 * rows + scores) + numbers

    @property
    def sums_whole_tiles(self) -> bool:
        """Shared memory holds whole rows where the gradient of a bias is summed."""
        return self.parts == 1 and max(self.head_dim, self.value_dim) <= 256

    @property
    def bias_shared_bytes(self) -> int:
        """The same of the kernel that sums the gradient of a bias."""
        both = boxes(self.head_dim) + boxes(self.value_dim)
        if self.sums_whole_tiles:
            return 128 * both * (self.block_kv + self.block_q)
        # 64 columns at a time, of 32 queries; then the sum.
        return max(128 * self.parts * (self.block_kv + 32), 4 * self.block_q * (self.block_kv + 1))

    def scratch(self, problem: Problem, shapes: Shapes) -> dict[str, Scratch]:
        """Returns the scratch arrays of a pass without the gradient of a bias."""
        return backward_params(problem, shapes, self).scratch()

    def constants(self, problem: Problem, shapes: Shapes) -> dict[str, Number]:
        """Returns the constants that the kernels are compiled with, but for two of `plan`."""
        return {
            **problem_constants(problem, shapes),
            "kHeadDim": self.head_dim,
            "kValueDim": self.value_dim,
            "kBlockQ": self.block_q,
            "kStepQueries": self.step_queries,
            "kBlockKV": self.block_kv,
            "kParts": self.parts,
            "kHalves": self.halves,
            "kRowTiles": self.row_tiles,
            "kMostQueries": self.most_queries,
            "kWarps": self.warps,
            "kStages": self.stages,
            "kDoutStages": self.dout_stages,
            "kDqRowBytes": self.dq_row_bytes,
            "kCompact": self.compact,
            "kRing": False,
            "kUnitHeads": 0,
            "kPartsApart": False,
            "kAddsFour": self.adds_four,
            "kDefersDq": self.defers_dq,
            "kStoresDbias": self.stores_dbias,
            "kDbiasByHeads": self.dbias_heads > 0,
            "kDbiasByRows": False,
            "kDbiasCleared": self.clears_dbias,
            "kDeterministic": problem.deterministic,
            "kTurnParts": self.turn_parts,
            **self._flags(problem, shapes),
        }

    def _flags(self, problem: Problem, shapes: Shapes) -> dict[str, Number]:
        """Returns what the kernels do with the tiling."""
        common = CommonSchedule(problem, shapes, self.block_q, self.block_kv)
        narrow = max(self.head_dim, self.value_dim) <= 64
        few_rows = self.row_tiles == 1 or self.column_warps > 1
        sides = any(hides_sides(problem))
        plain = _is_plain(problem)
        return {
            **common.flags(),
            # There may be gaps between the blocks of a walk.
            "kListsBlocks": common.skips_masked or "query_segments" in problem.terms,
            # Parts of addresses are kept from step to step.
            "kKeepsAddresses": plain,
            # So is the size of a group, a quotient: 35 instructions of each step. Not where a
            # register more was spilled: warps of all columns, with a window.
            "kKeepsGroup": plain and not (self.row_tiles == 2 and self.column_warps == 1 and sides),
            # So are a warp's rows of keys or values, operands of all steps, where few columns leave
            # registers for them: of one tile a quarter of what a fragment reads of shared memory,
            # of two a half.
            "kKeepsRows": plain and self.parts == 1 and narrow and few_rows,
            # A thread copies a piece of 16 bytes of each box, of every (threads / 8)-th row of a
            # step, where 8 divides the dim.
            "kStepsInPieces": (
                plain
                and (self.parts == 1 or self.halves)
                and self.threads // 8 <= self.step_queries
            ),
            "kSumsWholeTiles": self.sums_whole_tiles,
            # CTAs on a multiprocessor: 80 registers of six, which the recomputation needs; of wide
            # rows 128.
            "kFinishResident": 4 if max(self.head_dim, self.value_dim) > 256 else 6,
        }


Tiling = ForwardTiling | BackwardTiling


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
    parts = _parts_of(problem)
    # Two tiles of rows read keys and values from shared memory half as often; beside the terms of
    # a score they leave too few registers, and so do blocks of 64 keys beside wide rows.
    halves = is_highest(problem)
    bare = is_bare(problem)
    plain = bare and parts == 1
    sizes: list[dict[str, Any]] = []
    query_steps = min(8, -(-shapes.head_dim // 16))
    if plain and widest <= 128 and known(shapes.q_len, 4096) > 64:
        # Of 64 keys and 128 columns 192 registers are results and scores: what a left side of the
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


def choose_backward(problem: Problem, shapes: Shapes, gpu: GpuSpec) -> BackwardTiling:
    """Chooses the backward kernels' tiling for a problem that the family does not refuse."""
    tiling = next(x for x in _backward_sizes(problem, shapes) if _fits(x, shapes, gpu))
    # Warps that share 16 keys would exchange dS before it is stored; dropout's is scaled later.
    stores = (
        (tiling.column_warps == 1 or tiling.row_tiles == 2)
        and "dropout_state" not in problem.terms
        and not problem.split
        and not tiling.halves  # of which what is NaN is computed again
    )
    own = stores and is_own(problem, shapes)
    by_heads = 0
    if stores and tiling.parts == 1 and tiling.block_kv >= 64:
        by_heads = dbias_heads(problem, shapes, tiling.block_kv, _BIAS_CTAS // 2)
    # Two tiles of 16 keys with 128 columns of dk and dv leave few registers; before sm_90, where
    # four additions to dq take four addresses, and beside other terms fewer yet: of 32 queries up
    # to 100 bytes were spilled.
    wide = max(shapes.head_dim, shapes.value_dim) * tiling.row_tiles // tiling.column_warps > 64
    adds_four = gpu.arch not in _ADDS_ONE
    odd = shapes.head_dim % 8 or shapes.value_dim % 8
    plain = _is_plain(problem) and problem.score is None
    few = tiling.row_tiles == 2 and wide and not (plain and adds_four and not odd)
    hides = problem.window != (None, None) or set(problem.terms) - {"bias", "sinks"}
    # Beside the scores of the next step, where shared memory holds dS of both; not of 128 columns.
    defers_dq = tiling.parts == 1 and tiling.column_warps == 4 and tiling.row_tiles == 2
    defers_dq = defers_dq and tiling.stages == tiling.dout_stages == 2 and plain and not odd
    defers_dq = defers_dq and _fits(dataclasses.replace(tiling, defers_dq=True), shapes, gpu)
    tiling = dataclasses.replace(
        tiling,
        defers_dq=defers_dq,
        dq_row_bytes=0 if is_wide(problem) else dq_row_bytes(problem, shapes, tiling.block_q),
        most_queries=16 if few or (tiling.halves and tiling.row_tiles == 2) else 32,
        adds_four=adds_four,
        l2_heads=_backward_l2_heads(problem, shapes, gpu),
        stores_dbias=own or by_heads > 0,
        clears_dbias=own and bool(hides),
        dbias_heads=by_heads,
    )
    return spare(problem, shapes, tiling)


def _is_plain(problem: Problem) -> bool:
    """Tells whether no term takes registers that addresses need: beside some 48 bytes spilled."""
    free = {"query_lengths", "key_value_lengths", "sinks", "score_ids"}
    slope = problem.score is not None and emit.has_slope(problem.score)
    return not (set(problem.terms) - free or problem.softcap or slope or problem.deterministic)


def _backward_sizes(problem: Problem, shapes: Shapes) -> list[BackwardTiling]:
    """Lists what a CTA may have for a problem, the first best; tilings but for the rest."""
    widest = max(shapes.head_dim, shapes.value_dim)
    parts = _parts_of(problem)
    columns = next(x for x in (64, 128, 256, 512) if widest <= x)
    halves = is_highest(problem)
    sizes = list(_SIZES[parts, columns])
    odd = shapes.head_dim % 8 or shapes.value_dim % 8
    if halves and columns == 512:  # of other sizes up to 428 bytes are spilled, 163 KB hold no more
        sizes = [_Size(16, 32, 1, 1, 4), _Size(16, 16, 1, 1, 4)]
    # At 128 columns what a window takes was spilled, 36 bytes.
    if (
        halves
        and _is_plain(problem)
        and not odd
        and (columns == 64 or problem.window == (None, None))
    ):
        sizes = _HALVES_SIZES.get(columns, []) + sizes
    softly_drops = problem.softcap is not None and "dropout_state" in problem.terms
    if parts == 1 and widest <= 128 and "block_bits" in problem.terms:
        # Beside two tiles of keys and 128 columns up to 88 bytes were spilled.
        sizes = [size for size in sizes if size.row_tiles == 1 or widest // size.column_warps < 64]
    if parts == 1 and 96 < widest <= 128 and (shapes.mask is not None or softly_drops):
        sizes = [size for size in sizes if size.step_queries < 64]  # up to 36 bytes, likewise
    dims = shapes.head_dim, shapes.value_dim
    return [BackwardTiling(*dims, parts=parts, halves=halves, **size._asdict()) for size in sizes]


class _Size(NamedTuple):
    """Of a backward tiling what shared memory and registers have to hold; fields of that name."""

    block_kv: int
    step_queries: int
    stages: int
    dout_stages: int
    column_warps: int
    row_tiles: int = 1


# By the parts of an element and the columns that the wider dim does not pass. Two tiles first,
# which read shared memory less often, then keys: every block of them adds to the sum of dq. Then
# what is under way beside a step. A warp has registers for dk and dv of 16 keys and 128 columns
# each; of elements in parts for 64, with 128 other terms spilled up to 300 bytes, but for 512
# columns, where four warps share keys.
_SIZES = {
    (1, 64): [
        _Size(128, 64, 2, 2, 1, 2),
        _Size(128, 64, 2, 1, 1, 2),
        _Size(128, 64, 2, 2, 2, 2),
        _Size(128, 64, 2, 2, 1),
        _Size(128, 64, 2, 1, 1),
        _Size(128, 32, 2, 2, 1),
        _Size(128, 32, 2, 1, 1),
    ],
    (1, 128): [
        _Size(128, 64, 2, 2, 2, 2),
        _Size(128, 64, 2, 2, 1),
        _Size(128, 64, 2, 1, 1),
        _Size(128, 32, 2, 2, 1),
        _Size(128, 32, 2, 1, 1),
    ],
    (1, 256): [
        _Size(64, 64, 2, 2, 4, 2),
        _Size(64, 64, 1, 1, 4, 2),
        _Size(64, 32, 2, 2, 2),
        _Size(64, 32, 2, 1, 2),
        _Size(64, 32, 1, 1, 2),
        _Size(32, 32, 2, 1, 2),
    ],
    (1, 512): [
        _Size(32, 64, 2, 2, 4),
        _Size(32, 64, 1, 1, 4),
        _Size(32, 32, 1, 1, 4),
        _Size(16, 32, 1, 1, 4),
    ],
    (2, 64): [_Size(128, 64, 2, 2, 1), _Size(128, 32, 2, 2, 1), _Size(128, 32, 1, 1, 1)],
    (2, 128): [_Size(64, 32, 2, 2, 2), _Size(32, 32, 2, 1, 2)],
    (2, 256): [_Size(32, 64, 1, 1, 4), _Size(32, 32, 1, 1, 4), _Size(16, 16, 1, 1, 4)],
    (2, 512): [_Size(32, 16, 1, 1, 4), _Size(16, 16, 1, 1, 4)],
}


# Ahead of these, for halves without terms.
_HALVES_SIZES = {64: [_Size(128, 32, 2, 2, 1, 2)], 128: [_Size(128, 32, 2, 2, 2, 2)]}


def _parts_of(problem: Problem) -> int:
    """Returns into how many parts numbers are split."""
    return 2 if problem.dtype == "float32" else 1


def _fits(tiling: BackwardTiling, shapes: Shapes, gpu: GpuSpec) -> bool:
    of_bias = 0 if shapes.bias is None else tiling.bias_shared_bytes
    # Four warps leave room for four of another CTA; a multiprocessor has 1 KB for each beside.
    two = tiling.row_tiles == 2 and tiling.warps == 4
    room = (gpu.shared_bytes - 1024) // 2 if two else gpu.shared_bytes
    return tiling.shared_bytes <= room and of_bias <= gpu.shared_bytes


def _refuse_size(problem: Problem, shapes: Shapes, gpu: GpuSpec) -> list[str]:
    tilings = _backward_sizes(problem, shapes)
    if any(_fits(tiling, shapes, gpu) for tiling in tilings):
        return []
    least = -(-min(tiling.shared_bytes for tiling in tilings) // 1024)
    exactly = " at precision 'highest'" if problem.precision == "highest" else ""
    return [
        f"the CUDA backward kernels take {least} KB of shared memory for head dim "
        f"{shapes.head_dim} and value dim {shapes.value_dim} in {problem.dtype}{exactly}; "
        f"{gpu.name} has {gpu.shared_bytes // 1024}"
    ]


# Without red.global.add.v4.f32: PTX ISA, "red".
_ADDS_ONE = ("sm_80", "sm_86", "sm_87", "sm_89")


def _backward_l2_heads(problem: Problem, shapes: Shapes, gpu: GpuSpec) -> int:
    """Counts the kv heads that the backward kernel walks together.

    As many as leave queries, output gradients and float32 sums of dq in half of the L2; in the
    deterministic mode as many as there are CTAs, so that units of one head, which wait for each
    other, do not run together.
    """
    rows = known(shapes.q_len, 4096) * group_size(shapes)
    element = 4 if problem.dtype == "float32" else 2
    head_bytes = rows * ((element + 4) * shapes.head_dim + element * shapes.value_dim)
    heads = max(1, (gpu.l2_bytes or _ANY_L2_BYTES) // 2 // max(head_bytes, 1))
    if problem.deterministic:
        heads = max(heads, gpu.sms or _ANY_SMS)
    return max(1, min(heads, known(shapes.batch, heads) * known(shapes.kv_heads, heads)))


_ANY_SMS = 64  # of a GPU that is not known
_ANY_L2_BYTES = 4 << 20  # of a GPU that is not known


def _l2_heads(dtype: str, shapes: Shapes, gpu: GpuSpec) -> int:
    """Counts the query heads whose keys and values fit half of the L2 together."""
    share = (gpu.l2_bytes or _ANY_L2_BYTES) // 2
    element = 4 if dtype == "float32" else 2
    bytes_per_head = element * known(shapes.kv_len, 4096) * (shapes.head_dim + shapes.value_dim)
    fitting = max(1, share // max(bytes_per_head, 1))
    kv_heads = min(fitting, known(shapes.batch, fitting) * known(shapes.kv_heads, fitting))
    return max(1, kv_heads) * group_size(shapes)
