"""What both passes know of the GPU."""

import dataclasses
import math

from jax_flash._gpu.spec import GpuSpec
from jax_flash._gpu.traits import is_plain_call
from jax_flash._problem import Problem, Shapes

# Bytes of what the heads walked together share, that stay in an H200's L2 (60 MB, halved by its two
# partitions). Taken on every GPU: shares of smaller caches were not measured.
L2_SHARE = 32 << 20


def multiprocessors(gpu: GpuSpec) -> int:
    """Counts them; of a GPU that is not known as many as an H200 has."""
    return gpu.sms or 132


def early_tiles(problem: Problem, shapes: Shapes) -> Shapes | None:
    """Returns the sizes of tiles whose boxes begin before a head, at a multiple of 16 bytes.

    8 does not divide a dim, but a row of all heads; the heads of keys are those of queries, so that
    a head has the same columns before it in both. None where it is not so, and beside terms or a
    window to the left, which were not timed; nor were wider tiles, of which some spill.
    """
    dims, heads = (shapes.head_dim, shapes.value_dim), shapes.q_heads
    if tma_loads_of(shapes) or problem.dtype == "float32" or problem.split:
        return None
    if not is_plain_call(problem):
        return None
    if not isinstance(heads, int) or heads != shapes.kv_heads or min(dims) < 16:
        return None
    if any(heads * x % 8 for x in dims):
        return None
    before = [(8 - math.gcd(dim, 8)) % 8 for dim in dims]  # columns of a tile, at most
    head_dim, value_dim = (-(-sum(x) // 8) * 8 for x in zip(dims, before, strict=True))
    if max(head_dim, value_dim) > (_EARLY_WIDEST if dims[0] == dims[1] else _WIDEST_UNEQUAL):
        return None
    return dataclasses.replace(shapes, head_dim=head_dim, value_dim=value_dim)


# Columns. Heads of 196, the widest that were timed, have 200; where dims differ, those spill 16 to
# 36 bytes.
_EARLY_WIDEST, _WIDEST_UNEQUAL = 200, 192


def tma_loads_of(shapes: Shapes) -> bool:
    """Tells whether TMA can load the rows: they are multiples of 16 bytes apart."""
    return shapes.head_dim % 8 == 0 and shapes.value_dim % 8 == 0
