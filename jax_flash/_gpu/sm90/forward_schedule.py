"""Owns what the forward kernel for Hopper does with a tiling: each flag, and why it is set.

A kernel reads the flag `lists_words` as kListsWords. Read next: cuda/kernels/sm90/forward.cuh.
"""

import dataclasses

from jax_flash._gpu.constants import problem_constants
from jax_flash._gpu.meaning import Meaning
from jax_flash._gpu.plan import Number
from jax_flash._gpu.sm90.forward_tiling import ForwardTiling
from jax_flash._gpu.traits import (
    adds_to_scores,
    is_block_mask,
    leaves_gaps,
    shows_whole_tiles,
)
from jax_flash._problem import Problem, Shapes


def forward_constants(tiling: ForwardTiling, problem: Problem, shapes: Shapes) -> dict[str, Number]:
    """Returns the constants that the kernel is compiled with, by name."""
    schedule = ForwardSchedule(problem, shapes, tiling)
    producer_registers, consumer_registers = tiling.registers
    of_copies = {"kCopiesFloat8": tiling.copied == "float8_e4m3fn"} if tiling.copied else {}
    return {
        **problem_constants(problem, shapes),
        "kHeadDim": shapes.head_dim,
        "kValueDim": shapes.value_dim,
        "kEarly": tiling.early,
        "kTmaLoads": tiling.tma_loads,
        "kHalves": tiling.halves,
        "kFloat8": tiling.float8,
        "kParts": tiling.parts,
        "kBlockKV": tiling.block_kv,
        "kConsumers": tiling.consumers,
        "kStages": tiling.stages,
        "kQueryStages": tiling.query_stages,
        "kHoldsQueries": tiling.holds_queries,
        "kPackedHeads": tiling.packed_heads,
        "kPreScale": problem.scale <= 0,
        "kBatchesTogether": tiling.batches_together,
        "kDynamic": tiling.dynamic,
        "kTeams": tiling.teams,
        "kSplits": tiling.splits,
        "kFades": tiling.fades,
        "kCutDocuments": tiling.cut_documents,
        "kCutsAligned": tiling.cuts_aligned,
        "kFromPages": tiling.page_size > 0,
        "kInCommon": tiling.in_common,
        "kTailRows": tiling.tail_rows,
        "kTailStages": tiling.tail_stages,
        "kTailRegisters": tiling.tail_registers,
        "kPageSize": max(tiling.page_size, 1),
        "kWholeRows": tiling.whole_rows,
        "kPingPong": tiling.ping_pong,
        "kDrains": tiling.drains,
        "kDrainsToHide": tiling.drains_to_hide,
        "kApart": tiling.apart,
        "kOutputs": tiling.outputs,
        "kSumsByProduct": tiling.product_sums,
        "kBiasTiles": tiling.bias_bytes > 0,
        "kProducerRegisters": producer_registers,
        "kConsumerRegisters": consumer_registers,
        **of_copies,
        **schedule.flags(),
    }


@dataclasses.dataclass(frozen=True)
class ForwardSchedule(Meaning):
    """What the kernel does for a problem by a tiling; bytes are what ptxas would spill."""

    tiling: ForwardTiling

    def flags(self) -> dict[str, Number]:
        """Returns all that the kernel reads, by name."""
        return {
            "kLoadWarps": self.load_warps,
            "kRepeats": self.repeats,
            "kListsBlocks": self.lists_blocks,
            "kListsWhole": self.lists_whole,
            "kListsWords": self.lists_words,
            "kListsLayout": self.lists_layout,
            "kListsOwn": self.lists_own,
            "kBoundedBegin": self.bounded_begin,
            "kBeginsNear": self.begins_near,
            "kLateSeeMost": self.late_see_most,
            "kWholeIsFull": self.whole_is_full,
            "kLaterAreFull": self.later_are_full,
            "kHoldsFull": self.holds_full,
            "kAsksLate": self.asks_late,
            "kQueriesLate": self.queries_late,
            "kOutputFirst": self.output_first,
            "kQueriesInTurn": self.queries_in_turn,
            "kEarlyOutput": self.early_output,
            "kClearsValues": self.clears_values,
            "kAsksRow": self.asks_row,
            "kLeavesCap": self.leaves_cap,
            "kTakesLine": self.takes_line,
            "kSharesLine": self.shares_line,
            "kLineAhead": self.line_ahead,
            "kBitsAhead": self.bits_ahead,
            "kHoldsBits": self.holds_bits,
            "kBiasAheadInL2": self.bias_ahead_in_l2,
            "kBiasBeside": self.bias_beside,
            "kBiasAhead": self.bias_ahead,
            "kDrawsAmong": self.draws_among,
            "kDrawsByParts": self.draws_by_parts,
            "kHoldsDraws": self.holds_draws,
        }

    @property
    def _value_columns(self) -> int:
        return -(-self.tiling.value_dim // 16) * 16

    # Who loads.

    @property
    def load_warps(self) -> int:
        """Warps of the producer that load: TMA takes one."""
        return 1 if self.tiling.tma_loads else 4

    @property
    def repeats(self) -> bool:
        """A unit with rows that overflow is walked again, with a maximum in every block.

        Not where four warps load: they would have to agree on it.
        """
        return self.tiling.tma_loads

    # Which blocks a unit walks, and what is told of each.

    @property
    def lists_blocks(self) -> bool:
        """The producer tells the consumers which block is in each buffer: there may be gaps."""
        return leaves_gaps(self.problem)

    @property
    def lists_whole(self) -> bool:
        """It tells of each which warpgroups' rows see all of it by mask and positions."""
        return self.problem.masked or self.has("query_positions")

    @property
    def lists_words(self) -> bool:
        """A block mask alone tells it, of 1024 blocks at once, a word of 32 a lane."""
        others = self.has("query_positions", "query_segments")
        return is_block_mask(self.shapes) and self.tiling.tma_loads and not others

    @property
    def lists_layout(self) -> bool:
        """The mask is a layout, whose blocks hold a unit's rows and the kernel's blocks of keys.

        All rows of a unit see the same of a block: all of it but what is past the last key.
        """
        rows, keys = self.tiling.block_q, self.tiling.block_kv
        whole = shows_whole_tiles(self.problem, self.shapes, rows, keys)
        return self.lists_words and whole

    @property
    def lists_own(self) -> bool:
        """Each warpgroup walks from the first to the last block that its own rows see.

        With segments all walk what any of them sees. Beyond 128 columns 8 bytes, without TMA 136.
        """
        room = self.tiling.tma_loads and self.tiling.value_dim <= 128
        return self.lists_whole and room and not self.has("query_segments")

    @property
    def bounded_begin(self) -> bool:
        """A warpgroup's blocks may begin after the first one of its unit."""
        return self.hides_left or self.lists_blocks

    @property
    def begins_near(self) -> bool:
        """A unit's walk begins with its last query's block.

        A function that bends at the query has its largest and smallest values there: towards it
        from the last block, maxima would rise block by block.
        """
        bends = self.problem.lines is not None and self.problem.lines.bend
        cut = self.lists_blocks or self.hides_any
        return bends and self.takes_line and not cut

    @property
    def late_see_most(self) -> bool:
        """Late queries see most keys, causal and of most block masks: the longest units first.

        Before parts come those that have fewer rows than others.
        """
        return self.has_right or self.shapes.block_mask is not None or self.tiling.splits

    @property
    def _list_is_all(self) -> bool:
        """Neither window nor lengths hide a part of what the words of a block mask show."""
        others = self.hides_any or self.has("key_value_lengths")
        return self.lists_words and not others

    @property
    def whole_is_full(self) -> bool:
        """A block that is listed as whole needs no test of its elements."""
        return self._list_is_all

    @property
    def later_are_full(self) -> bool:
        """Only the first block of a layout's units may reach past the last key."""
        return self._list_is_all and self.lists_layout

    @property
    def holds_full(self) -> bool:
        """Consumers hold the range of blocks that need no test, else they read it of the unit.

        With segments at wide heads, with positions, halves, or where weights drain, there are no
        registers for it.
        """
        crowded = self.has("query_segments", "query_positions")
        return not (crowded or self.tiling.drains or self.tiling.halves or self.tiling.apart)

    # The order of what is loaded.

    @property
    def asks_late(self) -> bool:
        """The counter is asked for the next unit beside the load of the last block.

        Units differ in length: the CTA that is done first then takes the next one. Elsewhere it is
        asked beside the first block, so that the answer is there when it is needed; with segments
        the next unit's plan is fetched meanwhile.
        """
        uneven = self.hides_right or self.lists_whole or self.tiling.fades
        return uneven and not self.has("query_segments")

    @property
    def queries_late(self) -> bool:
        """Q comes behind the second block's keys.

        There the unit before gives its buffer back last, and Q is there when that unit has its last
        output.
        """
        return self.lists_layout and self.tiling.query_stages == 1

    @property
    def output_first(self) -> bool:
        """The last output of a unit ends before the next unit is looked at.

        Q of that unit comes late, or its scores take the registers of the output.
        """
        return self.queries_late or self.tiling.apart

    @property
    def queries_in_turn(self) -> bool:
        """One lane after the other loads a warpgroup's Q.

        Together, the first would wait for the last one's buffer.
        """
        return self.lists_words and self.tiling.query_stages == 1

    @property
    def early_output(self) -> bool:
        """The last output of a unit starts before the next unit is looked at.

        4 % at T 512 for narrow values; wide ones lack the registers for it (12 % slower).
        """
        return self.tiling.value_dim <= 128

    @property
    def clears_values(self) -> bool:
        """Values past a length, which may be NaN, are zeroed where they were loaded.

        Columns of float8 have zeros there.
        """
        paged = self.tiling.page_size > 0 and self.tiling.clears_values
        return (self.has("key_value_lengths") or paged) and not self.tiling.float8

    # Weights.

    @property
    def asks_row(self) -> bool:
        """Whether a weight decides is asked of all threads of its row (SoftmaxState).

        Functions at head dim 64 have no registers for it: 16 bytes.
        """
        widest = max(self.tiling.head_dim, self.tiling.value_dim)
        return not self.is_mapped or widest > 64

    @property
    def leaves_cap(self) -> bool:
        """The softcap's last multiplication is left to the exponentials, where scores are small.

        Where nothing comes behind the cap, and scores have no scales of their own.
        """
        alone = not (self.is_mapped or adds_to_scores(self.problem) or self.tiling.float8)
        return self.is_capped and alone

    @property
    def takes_line(self) -> bool:
        """The line that a function adds goes into the exponent.

        Not beside dropout at wide heads: 156 bytes.
        """
        room = not self.drops or self.tiling.value_dim <= 64
        return self.problem.lines is not None and room

    @property
    def shares_line(self) -> bool:
        """A thread's two rows may have bases as far apart as the line: it adds the same to both.

        Weights of bfloat16 may be large by far. Not by two warpgroups, whose exponentials lie under
        each other's products: at head dim 128 it is no faster, at 64 2.5 %.
        """
        level = self.problem.lines is not None and self.problem.lines.are_level
        large = self.problem.dtype == "bfloat16"
        return self.takes_line and not level and self.tiling.consumers == 3 and large

    @property
    def line_ahead(self) -> bool:
        """A block's line is found before the turn at the tensor cores, if its number is known."""
        return self.tiling.ping_pong and not self.lists_blocks

    @property
    def bits_ahead(self) -> bool:
        """A mask's bits are fetched beside the product that they are for.

        With segments, positions or a bias, or a block mask for three warpgroups, there is no
        register for that. Most blocks of a block mask need none: of it alone they are fetched where
        they are tested.
        """
        others = self.has("query_segments", "query_positions", "bias")
        room = self.tiling.consumers == 2 or self.shapes.block_mask is None
        return self.problem.masked and not self.lists_words and not others and room

    @property
    def holds_bits(self) -> bool:
        """Where the boolean mask's bits of a warpgroup's rows begin is found once a unit."""
        return self.bits_ahead and self.shapes.block_mask is None and self.tiling.value_dim <= 128

    @property
    def bias_ahead_in_l2(self) -> int:
        """Blocks between a bias's way to L2 and its load: of a list the next is not known."""
        loads = self.tiling.bias_bytes > 0 and not self.lists_blocks
        return self.tiling.bias_ahead if loads else 0

    @property
    def bias_beside(self) -> bool:
        """A bias that TMA has loaded is read beside the product that it is for.

        Two warpgroups have registers for a block's; three read it where they add it.
        """
        narrow = self.tiling.consumers == 2 and self.tiling.value_dim <= 128
        return self.tiling.bias_bytes > 0 and narrow

    @property
    def bias_ahead(self) -> bool:
        """A block's bias is loaded when that of the block before has been used.

        That is half a block before its own product starts, if its number is known. Narrow heads
        have registers for it, but not beside terms that hold some through the walk.
        """
        loads = self.has("bias") and self.tiling.bias_bytes == 0
        held = self.has("dropout_state", "query_lengths", "key_value_lengths")
        held = held or self.hides_left or self.is_capped or self.is_mapped
        return loads and not held and not self.lists_blocks and self._value_columns <= 64

    @property
    def draws_among(self) -> bool:
        """Dropout's draws go among the exponentials of a block.

        Where there are no registers for that, of wide heads, and beyond 64 with terms fetched by
        blocks or loads without TMA, they come when bases have risen.
        """
        roomy = self.tiling.tma_loads and not self.lists_blocks
        return self.drops and self._value_columns <= (128 if roomy else 64)

    @property
    def draws_by_parts(self) -> bool:
        """Draws are of 32 keys at a time, among their own exponentials; else a block's at once."""
        return self.draws_among and self._value_columns <= 64

    @property
    def holds_draws(self) -> bool:
        """Draws are a block's at once, with what was read once a unit.

        Where no other term takes registers: beside a function of the scores 120 bytes.
        """
        others = self.has("query_lengths", "key_value_lengths", "sinks", "bias")
        others = others or self.is_capped or self.is_mapped or self.hides_left
        roomy = self.tiling.tma_loads and not self.lists_blocks
        return self.draws_among and roomy and not others
