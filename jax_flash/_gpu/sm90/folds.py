"""Owns whether Hopper's kernels take rows of a batch, or query heads, as one longer row or head.

Read next: folding.py, which folds them.
"""

from __future__ import annotations

import dataclasses

from jax_flash._call import Call
from jax_flash._gpu import folding
from jax_flash._gpu.sm90.facts import Facts
from jax_flash._gpu.sm90.forward_rows import packed_heads
from jax_flash._gpu.spec import GpuSpec
from jax_flash._gpu.traits import is_bare, is_highest, is_plain_window
from jax_flash._gpu.workspaces import blocks
from jax_flash._problem import Shapes

_BLOCK = 128  # positions of a block
_CUTS = 0.7  # of the pairs of blocks where none cuts a row, at most
_LONGEST = 8192  # positions of a row of such rows
_ROUNDS = 2  # of units, of which folding spares some
# Copies of queries and results in another order of heads are two kernels of 2 us at least; of 16
# queries of 128 columns they take what half of the units of a block of keys do, by their bytes.
_HEADS_ROUNDS, _COPIED_QUERIES = 8, 4
_WINDOW_QUERIES = 8  # 17 x 3 and 64 keys, 12/1 heads of 256, gradients 54 to 33 us (H200)


def fold_rows(call: Call, shapes: Shapes, gpu: GpuSpec) -> int:
    """Counts the batch rows that are documents of one, where there are more than run at once.

    Queries of heads that a unit of the forward pass has together fill blocks as they are.
    """
    if not _may_fold_rows(call, shapes):
        return 1
    facts, forward = Facts(call.problem, shapes, gpu), call.target == "forward"
    heads = shapes.q_heads if forward else shapes.kv_heads
    together = packed_heads(facts) if forward else 1
    if facts.longest > _BLOCK or shapes.batch * heads / together <= _ROUNDS * facts.sms:
        return 1
    rows = _fullest(facts, heads)
    least = 2 if facts.widest <= 64 and not forward else 4
    return rows if least * together * _pairs(facts, rows) <= 1 else 1


def _may_fold_rows(call: Call, shapes: Shapes) -> bool:
    """Tells whether rows may be documents of a longer one, and were timed so."""
    problem, forward = call.problem, call.target == "forward"
    if not is_bare(dataclasses.replace(problem, terms=())) or not folding.hides_keys(call, shapes):
        return False
    if is_highest(problem) or problem.as_written:
        return False
    sizes = (shapes.batch, shapes.q_len, shapes.kv_len, shapes.q_heads)
    if not all(isinstance(x, int) for x in sizes):
        return False
    if not folding.has_window(problem):
        return True
    # It may count from where lengths end, which a longer row does not have. By positions the
    # forward pass is two launches more: -30 %, where gradients gain a third. Wide heads were not
    # timed.
    if problem.bottom_right and problem.terms:
        return False
    narrow = max(shapes.head_dim, shapes.value_dim) <= 128
    by_positions = not forward and is_plain_window(problem) and narrow
    return shapes.q_len == shapes.kv_len or by_positions


def _pairs(facts: Facts, rows: int) -> float:
    """Counts pairs of blocks for each of so many rows."""
    met = 2 if facts.problem.window[1] == 0 else 3  # blocks of keys that documents of one meet
    return (met * blocks(rows * facts.longest, _BLOCK) - (met - 1)) / rows


def _fullest(facts: Facts, heads: int) -> int:
    """Chooses the rows that have the fewest pairs of blocks: those of a block, or blocks cut some.

    Rows divide the batch. Where blocks cut rows enough units have to be left.
    """
    batch, length = facts.shapes.batch, facts.longest
    may_cut = facts.queries == facts.keys and facts.widest <= 64  # wider heads were not timed
    most = min(batch, (_LONGEST if may_cut else _BLOCK) // length)
    divisors = [rows for rows in range(1, most + 1) if batch % rows == 0]
    whole = max(rows for rows in divisors if rows * length <= _BLOCK)

    def pays(rows: int) -> bool:
        units = batch // rows * heads * blocks(rows * length, _BLOCK)
        fewer = _pairs(facts, rows) <= _CUTS * _pairs(facts, whole)
        return rows * length > _BLOCK and units >= facts.sms / 2 and fewer

    cut = [rows for rows in divisors if pays(rows)]
    best = min((_pairs(facts, rows) for rows in cut), default=0)
    return next((rows for rows in cut if _pairs(facts, rows) <= 1.05 * best), whole)


def fold_heads(call: Call, shapes: Shapes, gpu: GpuSpec) -> bool:
    """Tells whether heads that share keys are one head of more queries.

    Not in a forward pass that packs a power of two of heads, without rows of their own. Nor in one
    whose positions would be read, which takes as long either way.
    """
    if call.target == "forward" and folding.has_window(call.problem):
        return False
    if call.target == "forward" and packed_heads(Facts(call.problem, shapes, gpu)) > 1:
        return False
    return fill_together(call, shapes, gpu)


def fill_together(call: Call, shapes: Shapes, gpu: GpuSpec) -> bool:
    """Tells whether heads that share keys fill half as many blocks of queries together.

    Each head's own block reads the keys, and most of its queries are empty.
    """
    facts = Facts(call.problem, shapes, gpu)
    if not folding.may_fold_heads(call, shapes) or not facts.are_known("batch", "kv_len"):
        return False
    group, block = facts.group, _BLOCK // 2
    fewer = group * blocks(facts.queries, block) >= 2 * blocks(group * facts.queries, block)
    units = shapes.batch * shapes.q_heads * blocks(facts.keys, _BLOCK)
    if folding.has_window(call.problem):  # units of wide heads take a kv head's one by one
        wide = facts.widest > 128  # others were not timed
        return wide and fewer and facts.queries <= _WINDOW_QUERIES
    many = units >= _HEADS_ROUNDS * facts.sms
    return fewer and many and facts.queries <= _COPIED_QUERIES * blocks(facts.keys, _BLOCK)
