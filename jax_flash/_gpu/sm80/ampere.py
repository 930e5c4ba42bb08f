"""What both passes know of a problem and of the GPU."""

from __future__ import annotations

from jax_flash._problem import Problem

ANY_L2_BYTES = 4 << 20  # of a GPU that is not known


def parts_of(problem: Problem) -> int:
    """Returns into how many parts numbers are split."""
    return 2 if problem.dtype == "float32" else 1
