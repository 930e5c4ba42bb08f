"""Owns what the backward kernels of every family do alike: each flag, and why it is set.

A kernel reads the flag `skips_masked` as kSkipsMasked. Read next: cuda/kernels/backward_common.cuh,
and sm90/backward_schedule.py or sm80/backward.py for what a family does of its own.
"""

import dataclasses

from jax_flash._gpu.meaning import Meaning
from jax_flash._gpu.plan import Number
from jax_flash._gpu.traits import is_block_mask, is_one, is_wide, shows_whole_tiles


@dataclasses.dataclass(frozen=True)
class CommonSchedule(Meaning):
    """How a unit, a block of keys, walks the blocks of queries, and what other kernels do."""

    block_q: int
    block_kv: int

    def flags(self) -> dict[str, Number]:
        """Returns all that the kernels read, by name."""
        return {
            "kShowsWords": self.shows_words,
            "kShowsLayout": self.shows_layout,
            "kTurnsShown": self.turns_shown,
            "kSkipsMasked": self.skips_masked,
            "kDirection": self.direction,
            "kPrepareUnroll": self.prepare_unroll,
            "kMaskResident": self.mask_resident,
            "kFinishResident": self.finish_resident,
            "kSumBeginsAhead": self.sum_begins_ahead,
            "kSumHoldsBias": self.sum_holds_bias,
        }

    # The walk.

    @property
    def shows_words(self) -> bool:
        """A block mask alone says in a word which of 32 query blocks a unit sees."""
        return is_block_mask(self.shapes) and not self.has("query_positions")

    @property
    def shows_layout(self) -> bool:
        """The blocks of a layout hold the kernel's: a block that is seen is seen whole."""
        whole = shows_whole_tiles(self.problem, self.shapes, self.block_q, self.block_kv)
        return self.shows_words and whole

    @property
    def turns_shown(self) -> bool:
        """A block mask's words say whose turn it is, beside what window and lengths leave."""
        return self.problem.deterministic and self.shows_words and not self.has("query_segments")

    @property
    def skips_masked(self) -> bool:
        """Query blocks that mask or positions hide from a unit are left out of its walk.

        In deterministic mode only where whose turn it is says so too.
        """
        hides = self.problem.masked or self.has("query_positions")
        return hides and (not self.problem.deterministic or self.turns_shown)

    @property
    def direction(self) -> int:
        """From the last query block to the first (-1) where a right window cuts early ones off.

        Units of one head then start at the same block and share it in L2, and the partial blocks
        come last.
        """
        return -1 if self.has_right else 1

    # Other kernels than the main one.

    @property
    def prepare_unroll(self) -> int:
        """Rows that a thread of the preparing kernel reads at once, as its registers allow."""
        return 2 if is_wide(self.problem) or self.shapes.value_dim > 256 else 4

    @property
    def mask_resident(self) -> int:
        """CTAs of mask_plan on a multiprocessor, with both masks; 0: ptxas chooses.

        Left to itself it takes 32 registers there and spills 8 bytes.
        """
        return 4 if self.shapes.mask is not None and self.shapes.block_mask is not None else 0

    @property
    def finish_resident(self) -> int:
        """CTAs of flash_backward_finish on a multiprocessor: of three each has 168 registers.

        What computes rows again needs them, and more where results are float32.
        """
        return 2 if is_wide(self.problem) else 3

    @property
    def sum_begins_ahead(self) -> bool:
        """In the sum of a bias's gradient a part's products run beside the arithmetic before it.

        Both need registers, which some terms do not leave.
        """
        held = self.has("query_segments", "query_positions", "dropout_state")
        return not (held or self.hides_any or self.is_mapped)

    @property
    def sum_holds_bias(self) -> bool:
        """The bias of the block whose gradient a CTA sums stays in registers.

        One of all queries and keys is the same for all that it sums: of 16 bits, without dropout
        and positions, there is room.
        """
        bias = self.shapes.bias
        if bias is None or is_one(bias.queries) or is_one(bias.keys):
            return False
        return bias.dtype != "float32" and not self.has("dropout_state", "query_positions")
