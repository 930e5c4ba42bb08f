"""Owns what tilings and schedules ask of a call alone: its terms, window and dims.

Nothing here is measured, and the GPU is not asked. Read next: sm90/facts.py, which adds it.
"""

from __future__ import annotations

import dataclasses

from jax_flash._gpu import emit
from jax_flash._gpu.traits import hides_sides
from jax_flash._problem import Problem, Shapes


@dataclasses.dataclass(frozen=True)
class Meaning:
    """A problem and its sizes, which `Facts` and the schedules of all families extend."""

    problem: Problem
    shapes: Shapes

    @property
    def widest(self) -> int:
        return max(self.shapes.head_dim, self.shapes.value_dim)

    def has(self, *terms: str) -> bool:
        return any(term in self.problem.terms for term in terms)

    def has_only(self, *terms: str) -> bool:
        """Tells whether there is no other term than these, if any."""
        return {*terms}.issuperset(self.problem.terms)

    @property
    def drops(self) -> bool:
        return self.has("dropout_state")

    @property
    def is_mapped(self) -> bool:
        return self.problem.score is not None

    @property
    def is_sloped(self) -> bool:
        """A function's gradient is another than that of the score."""
        return self.problem.score is not None and emit.has_slope(self.problem.score)

    @property
    def is_capped(self) -> bool:
        return self.problem.softcap is not None

    # The window, by positions where there are some.

    @property
    def has_left(self) -> bool:
        return self.problem.window[0] is not None

    @property
    def has_right(self) -> bool:
        return self.problem.window[1] is not None

    # The window where it counts by indices: what it hides is a block's begin or end.

    @property
    def hides_left(self) -> bool:
        return hides_sides(self.problem)[0]

    @property
    def hides_right(self) -> bool:
        return hides_sides(self.problem)[1]

    @property
    def hides_any(self) -> bool:
        return self.hides_left or self.hides_right
