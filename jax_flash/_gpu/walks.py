"""Owns which blocks of scores a unit of any family's kernels walks, and in which order.

The kernels read it as constants. Read next: cuda/kernels/walk.cuh, backward_common.cuh.
"""

import dataclasses

from jax_flash._gpu.family import Number
from jax_flash._problem import Problem, Shapes


def hides_sides(problem: Problem) -> tuple[bool, bool]:
    """Tells whether the window hides keys left and right of a query by their indices.

    By positions it hides them as a mask does: anywhere.
    """
    left, right = problem.window
    by_index = "query_positions" not in problem.terms
    return left is not None and by_index, right is not None and by_index


def has_lengths(problem: Problem) -> bool:
    return bool({"query_lengths", "key_value_lengths"} & {*problem.terms})


def leaves_gaps(problem: Problem) -> bool:
    """Tells whether a term may hide blocks between those that a unit walks."""
    return problem.masked or bool({"query_segments", "query_positions"} & {*problem.terms})


def late_see_most(problem: Problem, shapes: Shapes) -> bool:
    """Tells whether late queries see most keys: causal, and of most block masks."""
    return problem.window[1] is not None or shapes.block_mask is not None


def is_block_mask(shapes: Shapes) -> bool:
    """Tells whether the mask is one of blocks and no other beside it."""
    return shapes.block_mask is not None and shapes.mask is None


def shows_whole_tiles(problem: Problem, shapes: Shapes, queries: int, keys: int) -> bool:
    """Tells whether a block mask shows all of such tiles, as far as there are keys, or nothing."""
    block = shapes.block_mask
    if block is None or not is_block_mask(shapes) or not problem.whole_blocks:
        return False
    return block.block % queries == 0 and block.block % keys == 0


@dataclasses.dataclass(frozen=True)
class BackwardWalk:
    """How a unit, a block of keys, walks the blocks of queries in the backward pass."""

    problem: Problem
    shapes: Shapes
    block_q: int
    block_kv: int

    @property
    def shows_words(self) -> bool:
        """A block mask alone says of 32 query blocks in a word which of them a unit sees."""
        return is_block_mask(self.shapes) and "query_positions" not in self.problem.terms

    @property
    def shows_layout(self) -> bool:
        """Of a layout whose blocks hold the kernel's: a block that is seen is seen whole."""
        whole = shows_whole_tiles(self.problem, self.shapes, self.block_q, self.block_kv)
        return self.shows_words and whole

    @property
    def turns_shown(self) -> bool:
        """A block mask's words say whose turn it is, beside what window and lengths leave."""
        segments = "query_segments" in self.problem.terms
        return self.problem.deterministic and self.shows_words and not segments

    @property
    def skips_masked(self) -> bool:
        """Query blocks that mask or positions hide from a unit are left out of its walk.

        In deterministic mode only where whose turn it is says so too.
        """
        hides = self.problem.masked or "query_positions" in self.problem.terms
        return hides and (not self.problem.deterministic or self.turns_shown)

    @property
    def lists_blocks(self) -> bool:
        """There may be gaps between the blocks of a walk."""
        return "query_segments" in self.problem.terms or self.skips_masked

    @property
    def direction(self) -> int:
        """From the last query block to the first where a right window cuts the early ones off.

        Units of one head then start at the same block and share it in L2, and the partial blocks
        come last.
        """
        return 1 if self.problem.window[1] is None else -1

    def constants(self) -> dict[str, Number]:
        return {
            "kShowsWords": self.shows_words,
            "kShowsLayout": self.shows_layout,
            "kTurnsShown": self.turns_shown,
            "kSkipsMasked": self.skips_masked,
            "kDirection": self.direction,
        }
