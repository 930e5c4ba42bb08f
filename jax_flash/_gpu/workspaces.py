"""The scratch arrays that families of kernels have in common, and counts of blocks."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax

from jax_flash._gpu.buffers import dims_of
from jax_flash._gpu.fields import array_of
from jax_flash._gpu.traits import is_one, is_ragged, is_wide, known
from jax_flash._problem import Problem, Shapes


def boxes(dim: int) -> int:
    """Counts the boxes of 64 columns, 128 bytes of shared memory, that hold a row."""
    return -(-dim // 64)


_OF_TERMS = ("mask_words", "mask_flags", "block_mask_flags", "dbias_sum")


def most_scratch(problem: Problem, shapes: Shapes) -> int:
    """Returns the bytes that scratch arrays may take, those of a mask or a bias aside.

    That is twice what query, key and value would take in float32, less the float16 copies that
    a split call makes (carrier.py).
    """
    shapes = sized(shapes)
    queries = shapes.batch * shapes.q_len * shapes.q_heads
    keys = shapes.batch * shapes.kv_len * shapes.kv_heads
    dims = shapes.head_dim + shapes.value_dim
    copied = 2 * (queries + keys) * dims if problem.split else 0
    return 8 * (queries * shapes.head_dim + keys * dims) - copied


def scratch_bytes(arrays: Mapping[str, jax.ShapeDtypeStruct]) -> int:
    """Returns the bytes of scratch arrays, those of a mask or a bias aside."""
    return sum(
        math.prod(array.shape) * array.dtype.itemsize
        for name, array in arrays.items()
        if name not in _OF_TERMS
    )


def is_spare(problem: Problem, shapes: Shapes, tiling: Any) -> bool:
    """Tells whether a backward tiling's scratch arrays take no more than most_scratch."""
    known_shapes = sized(shapes)
    dims, own = dims_of(known_shapes), tiling.scratch(problem, known_shapes)
    taken = scratch_bytes({name: array_of(x, dims) for name, x in own.items()})
    return taken <= most_scratch(problem, shapes)


def spare(problem: Problem, shapes: Shapes, tiling: Any) -> Any:
    """Returns a backward tiling whose scratch arrays take no more than most_scratch.

    Whole blocks of few rows or columns would take many times the memory of the arrays. Keeps what
    it gets where that does: additions to dq move four numbers at once.
    """
    if not isinstance(shapes.q_len, int):  # symbolic, under jax.export
        return tiling

    def fits(tiling: Any) -> bool:
        return is_spare(problem, shapes, tiling)

    if fits(tiling):
        return tiling
    if is_wide(problem) and not tiling.stores_dq:
        in_dq = dq_row_bytes(problem, shapes, tiling.block_q)
        whole = dataclasses.replace(tiling, dq_row_bytes=in_dq)
        if in_dq and fits(whole):
            return whole
    return dataclasses.replace(tiling, dq_row_bytes=0, compact=True)


def sized(shapes: Shapes) -> Shapes:
    """Returns the shapes with a typical size where jax.export left one symbolic."""
    return dataclasses.replace(
        shapes,
        batch=known(shapes.batch, 1),
        q_len=known(shapes.q_len, 4096),
        kv_len=known(shapes.kv_len, 4096),
        q_heads=known(shapes.q_heads, 1),
        kv_heads=known(shapes.kv_heads, 1),
    )


_MOST_SCORES = 64 << 20  # bytes of dS that are stored whatever the bias takes
_MOST_ROWS = 8  # batch rows that are added in 16 bits: twice the rounding of one


def adds_rows(problem: Problem, shapes: Shapes, block_kv: int, ctas: int) -> bool:
    """Tells whether a CTA adds the dS of the batch rows of a block of keys, one after the other.

    That is for a bias [1, N, T, S] as wide as the queries, in rows of whole fours, of few batch
    rows, if their blocks of keys keep two thirds of `ctas` busy.
    """
    if not _is_shared_by_rows(problem, shapes) or shapes.batch > _MOST_ROWS:
        return False
    return _is_busy(shapes.kv_heads * blocks(shapes.kv_len, block_kv), ctas)


def dbias_heads(problem: Problem, shapes: Shapes, block_kv: int, ctas: int) -> int:
    """Counts the kv heads whose dS is stored at a time, to be summed over the batch rows.

    That is for such a bias of any number of rows: dS of these heads takes no more than all of the
    bias, or 64 MB. 0: it is of another shape, or heads so few would leave a third of `ctas` idle:
    then computing dS again, two products of five, takes less.
    """
    if not _is_shared_by_rows(problem, shapes):
        return 0
    of_bias = 2 * shapes.q_heads * shapes.q_len * shapes.kv_len
    most = max(of_bias, _MOST_SCORES) * shapes.kv_heads // (shapes.batch * of_bias)
    if most == 0:
        return 0
    launches = blocks(shapes.kv_heads, most)
    heads = blocks(shapes.kv_heads, launches)
    units = shapes.batch * heads * blocks(shapes.kv_len, block_kv)
    return heads if launches == 1 or _is_busy(units, ctas) else 0


def _is_busy(units: int, ctas: int) -> bool:
    """Tells whether units of one length keep two thirds of `ctas` busy."""
    return 3 * units >= 2 * ctas * blocks(units, ctas)


def _is_shared_by_rows(problem: Problem, shapes: Shapes) -> bool:
    """Tells whether batch rows share a 16-bit bias of all else, in rows of whole fours."""
    bias = shapes.bias
    sizes = (shapes.batch, shapes.q_heads, shapes.q_len, shapes.kv_len)
    if bias is None or not all(isinstance(size, int) for size in sizes) or shapes.batch == 1:
        return False
    shared = (bias.batch, bias.heads, bias.queries, bias.keys) == (1, *sizes[1:])
    narrow = bias.dtype == problem.dtype != "float32"
    # Rows in pieces of 2 or 4 bytes took 1.1 to 1.4 times as long as dS computed again.
    return shared and narrow and not is_ragged(bias)


def dq_row_bytes(problem: Problem, shapes: Shapes, block_q: int) -> int:
    """Returns what there is from row to row of dq where it can hold half of its sum, else 0.

    That of float32 holds all of it.
    """
    q_len, q_heads = shapes.q_len, shapes.q_heads
    if not (isinstance(q_len, int) and isinstance(q_heads, int)):  # symbolic, under jax.export
        return 0
    row_bytes = (4 if is_wide(problem) else 2) * q_heads * shapes.head_dim
    # Whole blocks only; offsets within a block of 128 rows are of 32 bits.
    whole = q_len % block_q == 0 and shapes.head_dim % 64 == 0 and row_bytes < 1 << 24
    return row_bytes if whole else 0


def mask_words(length: Any, block: int) -> int:
    """Counts the 32-bit words for the columns of a block that one thread loads at once."""
    return 1 if is_one(length) or block <= 32 else 2 if block <= 64 else 4


def blocks(length: Any, block: int) -> Any:
    """Counts the blocks of some rows in a length, which may be symbolic."""
    return -(-length // block)
