"""The scratch arrays that families of kernels have in common, and counts of blocks."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_flash._gpu.traits import is_one, is_ragged, is_wide, known
from jax_flash._problem import Problem, Shapes


def boxes(dim: int) -> int:
    """Counts the boxes of 64 columns, 128 bytes of shared memory, that hold a row."""
    return -(-dim // 64)


def mask_by_query(shapes: Shapes, block_q: int, block_kv: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the scratch arrays of mask_plan in the forward pass (cuda/kernels/mask.cuh)."""
    mask, flags = shapes.mask, block_flags(shapes, block_q, block_kv)
    if mask is None:
        return {
            "mask_words": int32(0, 0, 0, 0),
            "mask_flags": uint8(0, 0, 0),
            "block_flags": flags,
        }
    parts, words = mask.batch * mask.heads, mask_words(mask.keys, block_kv)
    query_blocks, key_blocks = blocks(mask.queries, block_q), blocks(mask.keys, block_kv)
    return {
        "mask_words": int32(parts, query_blocks, key_blocks, block_q * words),
        "mask_flags": uint8(parts, query_blocks, key_blocks),
        "block_flags": flags,
    }


def backward_arrays(
    problem: Problem,
    shapes: Shapes,
    *,
    block_q: int,
    block_kv: int,
    turn_parts: int,
    dq_row_bytes: int,
    sums_dbias: bool,
    dbias_heads: int,
    ctas: int,
    compact: bool,
    sum_heads: int | None = None,
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the scratch arrays of the backward pass (cuda/runtime/families/backward.h).

    Args:
      turn_parts: parts of a block of queries whose sums of dq have turns of their own, in the
        deterministic mode.
      dq_row_bytes: of the function of this name.
      sums_dbias: a kernel of its own sums the gradient of a bias, if there is one,
      ctas: in about so many CTAs.
      dbias_heads: of the function of this name.
      compact: rows and columns that there are, not those of whole blocks.
      sum_heads: query heads that have a place in the sum of dq at a time; None: all.
    """
    heads = shapes.batch * shapes.q_heads
    kv_heads = shapes.batch * shapes.kv_heads
    query_blocks = blocks(shapes.q_len, block_q)
    key_blocks = blocks(shapes.kv_len, block_kv)
    rows = shapes.q_len if compact else query_blocks * block_q
    numbers = stored_rows(shapes, block_q, compact)
    marks = blocks(shapes.kv_len, 16) if compact else key_blocks * (block_kv // 16)
    columns = shapes.head_dim if compact else 64 * boxes(shapes.head_dim)
    if is_wide(problem):
        columns *= not (compact or dq_row_bytes)  # a dq of float32 holds its sum
    elif dq_row_bytes:
        columns = shapes.head_dim // 2
    segments = "query_segments" in problem.terms
    positions = "query_positions" in problem.terms
    return {
        "turns": int32(heads, query_blocks, turn_parts if problem.deterministic else 0),
        "lse_log2": float32(heads, numbers),
        "minus_delta": float32(heads, numbers),  # dlse - rowsum(out * dout)
        "dq_sum": float32(heads if sum_heads is None else sum_heads, rows, columns),
        "next_unit": int32(1),
        "query_segment_ranges": int32(shapes.batch, query_blocks, 2 * segments),
        "key_segment_ranges": int32(shapes.batch, key_blocks, 2 * segments),
        "query_position_ranges": int32(shapes.batch, query_blocks, 2 * positions),
        "key_position_ranges": int32(shapes.batch, key_blocks, 2 * positions),
        # Where rows of dk and dv are not finite.
        "marks": int32(kv_heads, marks, 2),
        **mask_by_key(shapes, block_q, block_kv),
        "dbias_sum": (
            # dS in 16 bits.
            float32(dbias_heads, heads // shapes.kv_heads * shapes.q_len * shapes.kv_len // 2)
            if dbias_heads
            else _dbias_sum(shapes, block_q, block_kv, ctas)
            if sums_dbias
            else float32(0, 0)
        ),
    }


def stored_rows(shapes: Shapes, block_q: int, compact: bool) -> Any:
    """Counts a head's rows in arrays of a number for each query: whole blocks.

    Of a compact tiling's only block what fills pieces of 16 bytes.
    """
    if compact and shapes.q_len <= block_q:
        return 4 * blocks(shapes.q_len, 4)
    return block_q * blocks(shapes.q_len, block_q)


_OF_TERMS = ("mask_words", "mask_flags", "block_flags", "dbias_sum")


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


def spare(problem: Problem, shapes: Shapes, tiling: Any) -> Any:
    """Returns a backward tiling whose scratch arrays take no more than most_scratch.

    Whole blocks of few rows or columns would take many times the memory of the arrays. Keeps what
    it gets where that does: additions to dq move four numbers at once.
    """
    if not isinstance(shapes.q_len, int):  # symbolic, under jax.export
        return tiling
    known_shapes, most = sized(shapes), most_scratch(problem, shapes)

    def fits(tiling: Any) -> bool:
        return scratch_bytes(tiling.workspaces(problem, known_shapes)) <= most

    if fits(tiling):
        return tiling
    if is_wide(problem):
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


def _dbias_sum(shapes: Shapes, block_q: int, block_kv: int, ctas: int) -> jax.ShapeDtypeStruct:
    """Returns the parts of a bias's gradient, of CTAs that share one of its blocks.

    The first dim counts them; with one there is nothing to keep.
    """
    bias = shapes.bias
    if bias is None:
        return float32(0, 0)
    sizes = (bias.batch, bias.heads, bias.queries, bias.keys)
    query_blocks = blocks(known(shapes.q_len, 1), block_q)
    key_blocks = blocks(known(shapes.kv_len, 1), block_kv)
    own = math.prod(
        1 if is_one(size) else count
        for size, count in zip(
            sizes,
            (known(shapes.batch, 1), known(shapes.q_heads, 1), query_blocks, key_blocks),
            strict=True,
        )
    )
    pairs = known(shapes.batch, 1) * known(shapes.q_heads, 1) * query_blocks * key_blocks
    # Of more blocks than half as many as there are CTAs, one each.
    parts = 1 if 2 * own > ctas else max(1, min(pairs // own, -(-ctas // own)))
    return float32(parts, math.prod(sizes) if parts > 1 else 0)


def mask_by_key(shapes: Shapes, block_q: int, block_kv: int) -> dict[str, jax.ShapeDtypeStruct]:
    """As mask_by_query, in the backward pass."""
    mask = shapes.mask
    parts, query_blocks, key_blocks = mask_by_query(shapes, block_q, block_kv)["mask_flags"].shape
    words = int32(0, 0, 0, 0)
    if mask is not None:
        parts, key_words = mask.batch * mask.heads, mask_words(mask.queries, block_q)
        words = int32(parts, mask.keys, blocks(mask.queries, block_q), key_words)
    return {
        "mask_words": words,
        "mask_flags": uint8(parts, key_blocks, query_blocks),
        "block_flags": block_flags(shapes, block_q, block_kv, by_key=True),
    }


def halves_of(
    shapes: Shapes, halves: bool, *, of_dout: bool = False
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the scratch arrays of split_float32: two float16 for each number, factors."""
    batch, queries = shapes.batch, (shapes.q_len, shapes.q_heads)
    keys = shapes.kv_len, shapes.kv_heads
    arrays = {
        "query": (*queries, shapes.head_dim),
        "key": (*keys, shapes.head_dim),
        "value": (*keys, shapes.value_dim),
    }
    if of_dout:
        arrays["dout"] = (*queries, shapes.value_dim)
    taken = {}
    for name, (length, heads, dim) in arrays.items():
        taken[f"{name}_halves"] = int32(batch, length, heads, 8 * blocks(dim, 8) * halves)
        taken[f"{name}_factors"] = float32(batch * heads, blocks(length, 64) * halves)
    return taken


def block_flags(
    shapes: Shapes, block_q: int, block_kv: int, *, by_key: bool = False
) -> jax.ShapeDtypeStruct:
    """Returns the scratch array of what a block mask shows: of 32 blocks in a row four words."""
    if shapes.block_mask is None:
        return int32(0, 0, 0, 4)
    rows, columns = blocks(shapes.q_len, block_q), blocks(shapes.kv_len, block_kv)
    if by_key:
        rows, columns = columns, rows
    parts = shapes.block_mask.batch * shapes.block_mask.heads
    return int32(parts, rows, blocks(columns, 32), 4)


def mask_words(length: Any, block: int) -> int:
    """Counts the 32-bit words for the columns of a block that one thread loads at once."""
    return 1 if is_one(length) or block <= 32 else 2 if block <= 64 else 4


def blocks(length: Any, block: int) -> Any:
    """Counts the blocks of some rows in a length, which may be symbolic."""
    return -(-length // block)


def int32(*shape: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def uint8(*shape: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.uint8)


def float32(*shape: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)
