"""Owns what the backward kernels for Hopper do with a tiling: each flag, and why it is set.

A kernel reads the flag `skips_hidden` as kSkipsHidden. Read next: cuda/kernels/sm90/backward.cuh.
"""

import dataclasses

from jax_flash._gpu.backward_schedule import CommonSchedule
from jax_flash._gpu.constants import problem_constants
from jax_flash._gpu.meaning import Meaning
from jax_flash._gpu.plan import Number
from jax_flash._gpu.sm90.backward_tiling import BackwardTiling
from jax_flash._gpu.traits import is_plain_call
from jax_flash._gpu.workspaces import boxes
from jax_flash._problem import Problem, Shapes


def backward_constants(
    tiling: BackwardTiling, problem: Problem, shapes: Shapes
) -> dict[str, Number]:
    """Returns the constants that the kernels are compiled with, but for kHasDlse and kHasDbias."""
    return {
        **problem_constants(problem, shapes),
        "kHeadDim": shapes.head_dim,
        "kValueDim": shapes.value_dim,
        "kEarly": tiling.early,
        "kTmaLoads": tiling.tma_loads,
        "kHalves": tiling.halves,
        "kParts": tiling.parts,
        "kBlockQ": tiling.block_q,
        "kBlockKV": tiling.block_kv,
        "kStages": tiling.stages,
        "kDoutStages": tiling.dout_stages,
        "kScoreStages": tiling.score_stages,
        "kDqRowBytes": tiling.dq_row_bytes,
        "kStoresDq": tiling.stores_dq,
        "kLastStores": tiling.last_stores,
        "kMarksRows": tiling.marks_rows,
        "kCompact": tiling.compact,
        "kRing": tiling.ring_sets > 0,
        "kPairs": tiling.pairs,
        "kScoreWarpgroups": tiling.score_warpgroups,
        "kResident": tiling.resident,
        "kUnitHeads": tiling.unit_heads,
        "kPrepareParts": tiling.prepare_parts,
        "kOutputs": tiling.outputs,
        "kReadsAhead": tiling.reads_ahead,
        "kHoldsDraws": tiling.holds_draws,
        "kStoresDbias": tiling.stores_dbias,
        "kDbiasByHeads": tiling.dbias_heads > 0,
        "kDbiasByRows": tiling.dbias_rows,
        "kDbiasCleared": tiling.clears_dbias,
        "kSumStages": tiling.sum_stages,
        "kBiasTiles": tiling.bias_bytes > 0,
        "kDeterministic": problem.deterministic,
        "kTurnParts": tiling.turn_parts,
        "kAddsFour": True,
        **BackwardSchedule(problem, shapes, tiling).flags(),
    }


@dataclasses.dataclass(frozen=True)
class BackwardSchedule(Meaning):
    """What the kernels do for a problem by a tiling; bytes are what ptxas would spill."""

    tiling: BackwardTiling

    def flags(self) -> dict[str, Number]:
        """Returns all that the kernels read, by name."""
        load, query, score = self.registers
        return {
            **self._common.flags(),
            "kLoadRegisters": load,
            "kQueryRegisters": query,
            "kScoreRegisters": score,
            "kRowColumns": self.row_columns,
            "kAddsBoxes": self.adds_boxes,
            "kKeysHeld": self.keys_held,
            "kValuesHeld": self.values_held,
            "kLoadWarps": self.load_warps,
            "kFillsBeside": self.fills_beside,
            "kTmaStores": self.tma_stores,
            "kInOrder": self.in_order,
            "kPartsApart": self.parts_apart,
            "kFromDiagonals": self.from_diagonals,
            "kSharesUnits": self.shares_units,
            "kTurnsLeft": self.turns_left,
            "kFirstByPredicate": self.first_by_predicate,
            "kSkipsHidden": self.skips_hidden,
            "kHoldsShown": self.holds_shown,
            "kHoldsBlock": self.holds_block,
            "kFollowsShown": self.follows_shown,
            "kGivesBackEarly": self.gives_back_early,
            "kBiasParts": self.bias_parts,
            "kMarksDropped": self.marks_dropped,
            "kSumResident": self.sum_resident,
        }

    @property
    def _common(self) -> CommonSchedule:
        return CommonSchedule(self.problem, self.shapes, self.tiling.block_q, self.tiling.block_kv)

    # Registers and roles.

    @property
    def registers(self) -> tuple[int, int, int]:
        """Registers of a thread that loads, of the wide kernel's query role, and of a score role.

        Narrow: 128 * (24 + 2 * 240) = 384 * 168. A score role holds half of both dims as
        accumulators of dK and dV, and half of a step's queries each for S and dP; ptxas asks for 32
        beside them. Loads without TMA compute addresses.
        Wide: 128 * (32 + 64 + 208 + 208) = 512 * 128. 128 accumulators of dV or dK, 32 of S or dP
        and 16 of P or dS; 32 of dQ; and 32 beside them. Pairs have 32 or 48 of dQ,
        and address two CTAs.
        """
        if self.tiling.pairs:
            return (24, 88, 200) if self.adds_boxes else (24, 72, 208)
        if self.tiling.wide:
            return (24, 72, 208) if self.tiling.stores_dq else (32, 64, 208)
        if self.tiling.resident > 1:  # of 64k registers each of two CTAs has 32k
            return (24, 0, 232)
        return (24, 0, 240) if self.tiling.tma_loads else (40, 0, 232)

    @property
    def adds_boxes(self) -> bool:
        """The query role of pairs has a box and a half of dQ at a time, else twice a half.

        5 % at head dim 192 (H100). It takes registers that the score roles need for more columns.
        """
        head_boxes, value_boxes = boxes(self.shapes.head_dim), boxes(self.shapes.value_dim)
        return self.tiling.pairs and head_boxes == 3 and value_boxes <= 3

    @property
    def keys_held(self) -> int:
        """Pieces of 16 columns of a unit's keys that a role holds in registers, pairs.

        Products of 64 x 64 read both of their operands from shared memory, whose bandwidth they
        need whole.
        """
        return self._held(self.shapes.head_dim, beside=self.shapes.value_dim)

    @property
    def values_held(self) -> int:
        """Likewise of its values."""
        return self._held(self.shapes.value_dim, beside=self.shapes.head_dim)

    def _held(self, columns: int, beside: int) -> int:
        """What the accumulators of dK or dV and 76 registers leave: four of a thread for each."""
        if not self.tiling.pairs:
            return 0
        left = self.registers[2] - 76 - -(-beside // 16) * 8
        return max(0, min(-(-columns // 16), 10, left // 4))

    @property
    def row_columns(self) -> int:
        """Columns of dK or dV that a product of the wide kernel adds to at once.

        With more than 128 wgmma would ask for more registers than 512 threads start with. Halves
        have 64: a step's sums start at zero, in registers of their own.
        """
        return 64 if self.tiling.halves else 128

    @property
    def load_warps(self) -> int:
        """Warps that load: without TMA two, of which the turns of the deterministic mode take one.

        Each arrives at the barrier of a tile.
        """
        return 1 if self.tiling.tma_loads or self.problem.deterministic else 2

    @property
    def fills_beside(self) -> bool:
        """With kCompact the warp that loads fills the numbers past those that it loads.

        Where it has few registers left all threads do: the other way round 16 to 156 bytes.
        """
        return self.tiling.tma_loads and not self._common.skips_masked

    @property
    def tma_stores(self) -> bool:
        """dK and dV of the narrow kernel leave by TMA, from buffers of 16 bits."""
        whole = self.tiling.tma_loads and not self.tiling.early
        return whole and self.problem.split != "carried"

    # Units and turns.

    @property
    def in_order(self) -> bool:
        """The counter hands out the first units too.

        Then units go to CTAs in the order in which these start: one that does not run has no unit
        that others wait for. Elsewhere nobody waits for another CTA, and the first unit comes
        without the counter's latency.
        """
        return self.problem.deterministic or self.tiling.ring_sets > 0

    @property
    def parts_apart(self) -> bool:
        """Units that add to one block of keys come one after the other, not side by side.

        They add in turns: side by side each would wait for the others.
        """
        return self.tiling.unit_heads > 0 and self.problem.deterministic

    @property
    def from_diagonals(self) -> bool:
        """Walks of most heads begin at their diagonals, and the last blocks of keys come first.

        A unit then comes to a block of queries two steps of 64 after the one whose keys follow: in
        deterministic mode it waits no more for its turn, whatever heads are walked together.
        """
        return self.tiling.falling_heads > 0

    @property
    def shares_units(self) -> bool:
        """The last units may be shared, as they may leave most CTAs without one.

        All units have one length, and those of halves are long, those of many queries beside few
        keys longer. A share is a part of the walk, whose dK and dV are added to zeros.
        """
        halves = self.tiling.halves and not self.problem.deterministic and not self.hides_any
        return halves or self.tiling.shares

    @property
    def turns_left(self) -> bool:
        """Some units take no part at a query block between others that do: turns are looked for."""
        return self.has("query_segments") or self._common.turns_shown

    @property
    def first_by_predicate(self) -> bool:
        """The unit that adds first to a sum of dq stores without a branch.

        1 % of plain calls with gradients from T 2048 on; others were not measured.
        """
        alone = is_plain_call(self.problem) and not (self.problem.split or self.tiling.compact)
        return self.problem.deterministic and alone

    # Steps.

    @property
    def skips_hidden(self) -> bool:
        """A step that the window hides from a warpgroup's 64 keys takes dQ's products alone.

        Causal, it saves half of one step of 64 queries of each unit. Beside turns that are looked
        for 28 bytes.
        """
        few = self.tiling.block_q == 64 and not self._common.turns_shown
        return self.hides_any and few

    @property
    def holds_shown(self) -> bool:
        """The blocks of 32 that are still to come stay in a register.

        Beside turns that are looked for there is none.
        """
        return self._common.skips_masked and not self._common.turns_shown

    @property
    def holds_block(self) -> bool:
        """The number of a walk's block of queries stays in a register.

        Beside turns that are looked for there is none.
        """
        return not self._common.turns_shown

    @property
    def follows_shown(self) -> bool:
        """The loader tells a score warpgroup how far the next block is that is shown.

        Dropout's draws look further ahead.
        """
        return self._common.skips_masked and not self.drops

    @property
    def gives_back_early(self) -> bool:
        """V and then K are given back where they have been read last, and loaded in that order.

        Units of a layout may be short.
        """
        return self._common.shows_layout and not self.tiling.wide

    @property
    def bias_parts(self) -> int:
        """Parts of a step's queries whose bias is loaded at a time, where it is added.

        The wide kernel has four to eight registers for it; the narrow one loads all before the
        scores are computed.
        """
        if not self.tiling.wide:
            return 1
        bias = self.shapes.bias
        return 8 if bias is not None and bias.dtype == "float32" else 2

    @property
    def marks_dropped(self) -> bool:
        """Dropped weights get a mark.

        With a function of the scores, and P and dP in one warpgroup, they need none, and with them
        up to five registers were spilled. Nor do they where a step reads ahead.
        """
        reads_ahead = self.tiling.reads_ahead and self.drops
        return (not self.is_sloped or self.tiling.wide) and not reads_ahead

    @property
    def sum_resident(self) -> int:
        """CTAs of the kernel that sums a bias's gradient, on a multiprocessor."""
        return 2 if self.tiling.tma_loads and not self.problem.masked else 1
