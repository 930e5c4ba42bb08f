"""Owns where the sum of dq lies in a ring, backward kernels for Hopper, and how large that is.

Numbers without a reason are the fastest that were measured: cuda/decisions.md tells how. Read next:
cuda/kernels/sm90/backward_ring.cuh.
"""

from __future__ import annotations

import dataclasses

from jax_flash._gpu.sm90.backward_tiling import BackwardTiling
from jax_flash._gpu.sm90.hopper import multiprocessors
from jax_flash._gpu.spec import GpuSpec
from jax_flash._gpu.traits import group_size, is_bare, is_layout
from jax_flash._gpu.workspaces import blocks, boxes
from jax_flash._problem import Problem, Shapes

_RING_BYTES = 40 << 20  # of a layout's, of an H200's L2 (60 MB)
_RING_SHORTEST = 512  # queries, and keys
_RING_WINDOW = 512


def with_ring(
    problem: Problem, shapes: Shapes, gpu: GpuSpec, tiling: BackwardTiling
) -> BackwardTiling:
    """Returns the tiling with the sum of dq in a ring, where that was measured to be faster.

    What it saves are the kernels that zero the sum ahead and read it at the end, 3 to 6 % of a
    causal pass and 2 to 3 % of a full one; what it takes is hidden beside units of 8 us or more.
    """
    sizes = (shapes.batch, shapes.q_heads, shapes.kv_heads, shapes.q_len, shapes.kv_len)
    if not all(isinstance(size, int) for size in sizes) or problem.deterministic or problem.split:
        return tiling
    if tiling.wide or not tiling.tma_loads or tiling.stores_dq:
        return tiling
    head_boxes, causal = boxes(shapes.head_dim), problem.window == (None, 0)
    left, right = problem.window
    shortest = _RING_SHORTEST
    if is_layout(problem) and problem.window == (None, None):
        shortest *= 32  # of a thirtieth of the blocks a unit is as long
    elif not is_bare(problem):
        return tiling
    elif left is not None and right is not None:
        # Grouped heads, one by one in a set, add to the same queries side by side: 8 % slower.
        if left + right < _RING_WINDOW or tiling.unit_heads:
            return tiling
    elif left is not None or right not in (None, 0):
        return tiling
    elif causal or head_boxes == 1:
        shortest *= 2
    if min(sizes[3:]) < shortest:
        return tiling
    unit_heads = tiling.unit_heads or group_size(shapes)
    heads, sets, lag = _ring_sets(problem, shapes, gpu, tiling)
    rows = blocks(shapes.q_len, tiling.block_q) * tiling.block_q
    ring = sets * heads * unit_heads * rows * 256 * head_boxes
    if is_layout(problem) and ring > _RING_BYTES:
        return tiling
    if shapes.batch * shapes.q_heads // unit_heads < 2 * sets * heads:
        return tiling
    # The kernel has 32 bits for bytes of the ring, 31 for a set's units x pieces of 16 queries.
    pieces = heads * unit_heads * rows // 16 * head_boxes
    units = heads * blocks(shapes.kv_len, tiling.block_kv)
    if ring > 1 << 32 or units * pieces >= 1 << 31:
        return tiling
    return dataclasses.replace(
        tiling, dq_row_bytes=0, outputs=1, l2_heads=heads, ring_sets=sets, ring_lag=lag
    )


def _ring_sets(
    problem: Problem, shapes: Shapes, gpu: GpuSpec, tiling: BackwardTiling
) -> tuple[int, int, int]:
    """Returns heads of a set, sets with a place, and the lag between adding and finishing.

    Sets are half a round of units, or a round where their sums take half as much or where units are
    unequal and long. A sum has two rounds and a half from its first unit until it is clear, or four
    if units are unequal.
    """
    causal = problem.window == (None, 0)
    short = max(shapes.q_len, shapes.kv_len) <= 2048
    round_ = max(1, multiprocessors(gpu) // blocks(shapes.kv_len, tiling.block_kv))
    if is_layout(problem):
        heads = round_ // boxes(shapes.head_dim)
    elif not short:
        heads = round_ if causal else round_ // 2
    elif tiling.unit_heads or boxes(shapes.head_dim) == 2:
        heads = round_ // 2
    else:
        heads = round_
    sets, lag = (8, 5) if causal and short else (5, 3)
    return max(1, heads), sets, lag
