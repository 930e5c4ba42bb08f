"""Owns how the backward kernels of mma.sync run a problem: their tilings, and which one is taken.

`choose_backward` is the heuristic; what was measured, was on an H200. Read next:
cuda/kernels/sm80/backward.cuh.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jax_flash._gpu import emit
from jax_flash._gpu.backward_schedule import CommonSchedule
from jax_flash._gpu.constants import problem_constants
from jax_flash._gpu.fields import Scratch
from jax_flash._gpu.plan import Number
from jax_flash._gpu.sm80.ampere import ANY_L2_BYTES, parts_of
from jax_flash._gpu.sm80.backward_launch import backward_params
from jax_flash._gpu.spec import GpuSpec
from jax_flash._gpu.traits import group_size, hides_sides, is_highest, is_own, is_wide, known
from jax_flash._gpu.workspaces import boxes, dbias_heads, dq_row_bytes, spare
from jax_flash._problem import Problem, Shapes

_BIAS_CTAS = 256  # that sum a bias's gradient at once


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
    beside = "sm80/backward_entries.cuh"
    block_q = 64  # queries of a block, one or two steps
    turn_parts = 1
    sum_ctas = _BIAS_CTAS
    pairs = False
    ring_sets = ring_lag = unit_heads = 0  # there is no ring, and units have all heads of a group
    stores_dq = marks_rows = False

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
        """Dynamic shared memory of a CTA that sums the gradient of a bias."""
        both = boxes(self.head_dim) + boxes(self.value_dim)
        if self.sums_whole_tiles:
            return 128 * both * (self.block_kv + self.block_q)
        # 64 columns at a time, of 32 queries; then the sum.
        return max(128 * self.parts * (self.block_kv + 32), 4 * self.block_q * (self.block_kv + 1))

    @property
    def without_dbias(self) -> BackwardTiling:
        """The tiling of a pass that leaves the gradient of a bias out."""
        return dataclasses.replace(self, stores_dbias=False, clears_dbias=False, dbias_heads=0)

    def scratch(self, problem: Problem, shapes: Shapes) -> dict[str, Scratch]:
        """Returns the scratch arrays of a pass without the gradient of a bias."""
        return backward_params(problem, shapes, self).scratch()

    def constants(self, problem: Problem, shapes: Shapes) -> dict[str, Number]:
        """Returns the constants that the kernels are compiled with, but for two of `plan`."""
        return {
            **problem_constants(problem, shapes),
            "kEarly": False,
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
            "kStoresDq": False,
            "kLastStores": False,
            "kMarksRows": False,
            "kFromDiagonals": False,
            "kPairs": False,
            "kUnitHeads": 0,
            "kPartsApart": False,
            "kAddsFour": self.adds_four,
            "kPrepareParts": 1,
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
        }


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
    hides = problem.window != (None, None) or bool(set(problem.terms) - {"bias", "sinks"})
    own = stores and is_own(problem, shapes, cleared=hides)
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
        clears_dbias=own and hides,
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
    parts = parts_of(problem)
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
    """The fields of a backward tiling that shared memory and registers have to hold."""

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


def _fits(tiling: BackwardTiling, shapes: Shapes, gpu: GpuSpec) -> bool:
    of_bias = 0 if shapes.bias is None else tiling.bias_shared_bytes
    # Four warps leave room for four of another CTA; a multiprocessor has 1 KB for each beside.
    two = tiling.row_tiles == 2 and tiling.warps == 4
    room = (gpu.shared_bytes - 1024) // 2 if two else gpu.shared_bytes
    return tiling.shared_bytes <= room and of_bias <= gpu.shared_bytes


def refuse_size(problem: Problem, shapes: Shapes, gpu: GpuSpec) -> list[str]:
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
    heads = max(1, (gpu.l2_bytes or ANY_L2_BYTES) // 2 // max(head_bytes, 1))
    if problem.deterministic:
        heads = max(heads, gpu.sms or _ANY_SMS)
    return max(1, min(heads, known(shapes.batch, heads) * known(shapes.kv_heads, heads)))


_ANY_SMS = 64  # of a GPU that is not known
