"""Owns float32 passes of short rows on Hopper: which run by mma.sync, in parts of bfloat16.

That is one launch, of more exact products, where float16 copies (carrier.py) and what they hold are
six or more, and XLA's products seven, most of which transpose.
"""

from __future__ import annotations

import math

from jax_flash._call import Call
from jax_flash._gpu import carrier, folding
from jax_flash._gpu.spec import GpuSpec
from jax_flash._problem import Shapes

_TIMED = {"bias", "mask", "dropout_state", *folding.LENGTHS, *folding.SEGMENTS}
# H200, us, XLA's products to these: 16 x 64, 16 heads of 64, causal 26 to 11; 32 x 48, 8 of 128 28
# to 14; 4 x 128, 8 of 64 19 to 10; 64 x 25, 24 of 96 78 to 45; 7 x 104 and 16 keys, 40 of 80 30 to
# 20. 29 x 65 and 116, 40 of 144 take 330, copies 160; 114 x 32, 40/1 of 64 117, XLA 55.
# 73 x 109 and 102, 6 of 128, 876 units of two blocks, 77, copies 72.
_LENGTH, _WIDE_LENGTH, _BLOCK, _BLOCKS, _LONG_BLOCKS = 128, 64, 64, 2048, 1024
_SUMMED, _MET = 1 << 21, 4  # multiplications, and times that an element is met: XLA's sums
_FILLED, _UNFILLED_UNITS = 20, 512  # 162 x 14, 16 of 56 66 for 59; 64 x 12, 8 of 64 14 both
# Rows are folded from here on: 64 x 12, 8 of 64 14 to 10; 6 x 32, 2 of 232 11 to 21.
_FOLDED = 512
# With gradients, where copies wait for each other: 14 x 32, 6 of 72 45 to 27, 8 x 21, 8 of 112 38
# to 27; 113 x 16, 3 of 64 43 to 56, 8 x 80, 3/1 of 56 40 to 63. Longer rows of several heads, which
# XLA transposes: 5 x 67, 12 of 56, causal 60 to 33, 10 x 40, 8 of 80, causal 46 to 28, 3 x 90, 8 of
# 64 39 to 32; 40 x 36, 4 of 96 43 to 44, 2 x 100, 6 of 200 40 to 59; 19 x 80, one of 112 34 to 44.
_FEW_BLOCKS, _FEW_LENGTH, _FEW_SHORT, _FEW_WIDTH = 132, 16, 32, 80
# More blocks that rows of several heads fill, copies to parts (XLA): 60 x 64, 4 of 64, causal 66 to
# 48 (65), 30 x 60, 8 of 40 63 to 35 (44), 100 x 64, 2 of 64, a window 63 to 39 (59); 40 x 100, 4 of
# 48, a window, two blocks a row 67 to 62 (79); 150 x 90, one of 64, a window 66 to 67 (93).
_MORE_BLOCKS, _MORE_LENGTH, _MORE_WIDTHS = 240, 48, range(24, 65)

NOTE = "float32 of short rows in parts of bfloat16; with gradients copies or XLA may run it"


def takes(call: Call, shapes: Shapes, gpu: GpuSpec) -> bool:
    """Tells whether a pass that names no backend runs in parts.

    A forward pass that gradients follow shares copies with these, or XLA's products.
    """
    problem = call.problem
    if call.target not in ("forward", "backward") or call.backend is not None:
        return False
    if gpu.arch != "sm_90a" or not carrier.takes(problem) or not _TIMED.issuperset(problem.terms):
        return False
    if problem.as_written or problem.score is not None or problem.softcap is not None:
        return False
    sizes = (shapes.batch, shapes.q_heads, shapes.q_len, shapes.kv_len)
    if not all(isinstance(size, int) for size in sizes):
        return False
    batch, heads, queries, keys = sizes
    units, least, most = batch * heads, min(queries, keys), max(queries, keys)
    widest = max(shapes.head_dim, shapes.value_dim)
    if least <= _MET or math.prod(sizes) * widest <= _SUMMED:
        return False
    following = call.next if call.target == "forward" else call
    if following is not None:
        longer = heads > 1 and most <= _LENGTH and widest <= _FEW_WIDTH
        few = least >= _FEW_LENGTH and units * -(-most // _BLOCK) <= _FEW_BLOCKS
        few &= most <= _FEW_SHORT or longer
        more = least >= _MORE_LENGTH and most <= _BLOCK and units <= _MORE_BLOCKS
        more &= heads > 1 and widest in _MORE_WIDTHS and not problem.terms
        own = shapes.kv_heads == heads and "dbias" not in following.results
        return own and (few or more)
    if most > (_LENGTH if widest <= 128 else _WIDE_LENGTH) or shapes.kv_heads == 1 < heads:
        return False
    rows = folds(call, shapes)
    filled = rows * queries >= _FILLED or units <= _UNFILLED_UNITS
    blocks = units // rows * -(-rows * queries // _BLOCK)
    return filled and blocks <= (_BLOCKS if most <= _BLOCK else _LONG_BLOCKS)


def folds(call: Call, shapes: Shapes) -> int:
    """Counts the batch rows of a forward pass that `takes` which fill a block together."""
    problem, longest = call.problem, max(shapes.q_len, shapes.kv_len)
    # In a document of a longer row a window counts from where the row begins.
    moves = shapes.q_len != shapes.kv_len or (problem.bottom_right and problem.terms)
    if moves and problem.window != (None, None):
        return 1
    if call.target != "forward" or not folding.hides_keys(call, shapes):
        return 1
    if shapes.batch * shapes.q_heads < _FOLDED:
        return 1
    most = max(1, _BLOCK // longest)
    return next(rows for rows in range(most, 0, -1) if shapes.batch % rows == 0)
