"""Owns the question whether ptxas spills a candidate of a tiling: the answers are its own.

A schedule asks `spills` of a candidate by name, behind all else that it asks of it. The answers
stand in spills_table.py, which `python -m tests.spills` writes: under each name the smallest
sets of a problem's traits with which the candidate spills.
"""

from __future__ import annotations

from jax_flash._gpu.spills_table import SPILLED
from jax_flash._gpu.traits import bytes_of_bias, is_plane
from jax_flash._problem import Problem, Shapes

# Terms that others tell of: the first of a pair, or traits of their own (below).
TOLD = {"key_value_segments", "key_value_positions", "block_numbers", "block_bits"}
TOLD |= {"bias", "score_ids"}


def spills(candidate: str, problem: Problem, shapes: Shapes) -> bool:
    """Tells whether ptxas spills a candidate for a problem.

    What a user's function takes no table knows: schedules say what they leave for one.
    """
    traits = traits_of(problem, shapes)
    return any(traits.issuperset(found.split()) for found in SPILLED[candidate])


def traits_of(problem: Problem, shapes: Shapes) -> frozenset[str]:
    """Returns what a problem has that takes registers: its terms by name, and more."""
    left, right = problem.window
    bias, block = shapes.bias, shapes.block_mask
    by_tma = is_plane(shapes) and bytes_of_bias(bias) == 2
    keys = 0 if block is None else next(x for x in (128, 32, 16) if block.block % x == 0)
    others = {
        "left": left is not None,
        "right": right is not None,
        "softcap": problem.softcap is not None,
        "float16": problem.dtype == "float16",
        "negative_scale": problem.scale <= 0,
        "narrow_values": shapes.value_dim <= 16,
        "plane_of_bias": by_tma,  # of 16 bits
        "bias": bias is not None and not by_tma,
        f"blocks_of_{keys}": block is not None,  # that divides those of the block mask
    }
    terms = {*problem.terms} - TOLD
    return frozenset(terms | {name for name, has in others.items() if has})
