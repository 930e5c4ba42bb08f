"""Owns in which order the backward kernels for Hopper take units: which heads are walked together.

Numbers without a reason are the fastest that were measured: cuda/decisions.md tells how. Read next:
backward.py, which chooses by it.
"""

from __future__ import annotations

from jax_flash._gpu.sm90.backward_units import UnitFacts
from jax_flash._gpu.sm90.hopper import L2_SHARE
from jax_flash._gpu.traits import (
    group_size,
    is_bare,
    is_highest,
    is_layout,
    is_plain_window,
    known,
)
from jax_flash._problem import Problem, Shapes

_RISING_LONGEST = 16384


def rises(facts: UnitFacts) -> bool:
    """Walks of causal units in turns begin at their diagonals: none waits for its turn.

    Those of a head are apart then, and its queries and sums have to stay in L2.
    """
    problem, shapes = facts.problem, facts.shapes
    if not problem.deterministic or problem.window != (None, 0) or not is_bare(problem):
        return False
    if not facts.are_known("batch", "kv_heads", "q_len") or facts.unit_heads:
        return False
    if problem.split or facts.few:
        return False
    return shapes.q_len == shapes.kv_len <= _RISING_LONGEST


def rising_heads(facts: UnitFacts) -> int:
    """Heads that are walked together where walks rise: no CTA waits, so they are few."""
    if not rises(facts):
        return 0
    heads = l2_heads(facts.unordered.problem, facts.shapes)
    if facts.widest > 128 and facts.shapes.q_len > 4096:
        return 1
    return max(1, heads // 2) if facts.widest > 64 else heads


def falling_heads(facts: UnitFacts) -> int:
    """The last heads fall, longest units first: CTAs end together."""
    if not rises(facts):
        return 0
    heads = facts.shapes.batch * facts.shapes.kv_heads
    return max(1, heads // 16, min(8, heads // 8))


def l2_heads(problem: Problem, shapes: Shapes, unit_heads: int = 0) -> int:
    """Counts the heads that the backward kernel walks together: units of a block of keys.

    Few heads keep queries, output gradients and float32 sums of dq in L2. Many even out units of
    unequal length (causal) and spread those that wait for each other (deterministic). The factors
    are the fastest of 0.125 to 8 on an H200, 16k tokens, model dim 2048 (cuda/decisions.md).
    """
    queries = known(shapes.q_len, 4096)
    uneven = problem.window[1] is not None or "block_numbers" in problem.terms
    widest = max(shapes.head_dim, shapes.value_dim)
    group = unit_heads or group_size(shapes)
    # Bytes of one query head: the units of a group walk its heads side by side.
    bytes_ = 4 if is_highest(problem) else 2
    head_bytes = queries * ((bytes_ + 4) * shapes.head_dim + bytes_ * shapes.value_dim)
    fitting = max(1, L2_SHARE // head_bytes)
    grouped = is_plain_window(problem) and group_size(shapes) > 1
    if problem.deterministic and grouped and widest <= 128 and bytes_ == 2:
        # Units that trail each other by a step share what they read: longer heads need no more L2.
        heads = 8 if unit_heads or widest <= 64 else 4
    elif problem.deterministic and unit_heads:
        heads = fitting if uneven else fitting // 2
    elif problem.deterministic:
        steps = queries // (64 if widest > 64 else 128)  # of the longest unit
        level = min(max(steps.bit_length() - 4, 0), 5)  # under 16, 32, 64, 128, 256 steps; more
        if uneven:
            factor = ((1, 2, 2, 3, 4, 8) if widest > 128 else (1, 2, 2, 4, 8, 8))[level]
            heads = fitting * factor // min(group, 2)
        else:
            factor = ((1, 1, 1, 1, 2, 2) if widest > 128 else (1, 1, 2, 2, 4, 4))[level]
            heads = fitting * factor // 2
    elif unit_heads > 1:
        heads = max(2, fitting // 2)
    elif uneven:  # units of a group are as many times longer, and fewer: more of them to even out
        # The units of a layout are mostly of one length.
        heads = max(fitting * min(group, 2) // 2, 0 if is_layout(problem) else 4 // group)
    else:
        heads = fitting // 4
    heads = max(1, heads)
    parts = shapes.q_heads // unit_heads if unit_heads else shapes.kv_heads
    return min(heads, known(shapes.batch, heads) * known(parts, heads))
