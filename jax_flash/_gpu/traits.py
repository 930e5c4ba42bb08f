"""What tilings and schedules ask of a problem and its shapes."""

import math
from typing import Any

from jax_flash._gpu import emit
from jax_flash._problem import Problem, Shapes, TermShape


def is_highest(problem: Problem) -> bool:
    """Tells whether float32 is to be exact: of two float16, 22 bits; decoding has other parts."""
    return problem.dtype == "float32" and problem.precision == "highest"


def is_wide(problem: Problem) -> bool:
    """Tells whether results are float32."""
    return problem.dtype == "float32" or bool(problem.split)


def is_bare(problem: Problem) -> bool:
    """Tells whether there is nothing between scores and weights but a window."""
    return not problem.terms and problem.softcap is None and problem.score is None


def is_plain_window(problem: Problem) -> bool:
    """Tells whether a query sees all keys, or those up to its own position."""
    return problem.window in ((None, None), (None, 0))


def is_plain_call(problem: Problem) -> bool:
    """Tells whether there is nothing but causality, if that."""
    return is_bare(problem) and is_plain_window(problem)


def adds_to_scores(problem: Problem) -> bool:
    """Tells whether a term is added to scores, which with_bias (logit.cuh) scales for it."""
    return "bias" in problem.terms


def is_layout(problem: Problem) -> bool:
    """Tells whether there is a layout of whole blocks and no other term."""
    alone = problem.whole_blocks and problem.terms == ("block_numbers", "block_bits")
    return alone and problem.softcap is None and problem.score is None


def group_size(shapes: Shapes) -> int:
    """Counts the query heads that read one kv head."""
    return known(shapes.q_heads // shapes.kv_heads, 1)


def are_small(shapes: Shapes) -> bool:
    """Tells whether queries and keys are less than emit.SMALL; blocks reach beyond the lengths."""
    lengths = (shapes.q_len, shapes.kv_len)
    return all(isinstance(n, int) and n <= emit.SMALL - 1024 for n in lengths)


def known(size: Any, otherwise: int) -> int:
    """Returns a size, or a typical one in its place where jax.export left it symbolic."""
    return size if isinstance(size, int) else otherwise


def bytes_of_bias(bias: TermShape | None) -> int:
    """Returns the bytes of an element, 0 without a bias."""
    return 0 if bias is None else 4 if bias.dtype == "float32" else 2


def is_one(size: Any) -> bool:
    """Tells whether a term does not vary along a dim; a symbolic size may be any."""
    return isinstance(size, int) and size == 1


def alignment(length: Any, size: int) -> int:
    """Returns the bytes, 16 at most, to which all rows of items of `size` bytes are aligned."""
    return math.gcd(length * size, 16) if isinstance(length, int) else size


def is_own(problem: Problem, shapes: Shapes, *, cleared: bool) -> bool:
    """Tells whether each score has a bias of its own, as wide as it.

    `cleared`: its gradient is zeroed ahead, by words of 32 bits.
    """
    bias = shapes.bias
    sizes = (shapes.batch, shapes.q_heads, shapes.q_len, shapes.kv_len)
    if bias is None or (bias.batch, bias.heads, bias.queries, bias.keys) != sizes:
        return False
    known_sizes = [size for size in sizes if isinstance(size, int)]
    whole = bytes_of_bias(bias) == 4 or any(size % 2 == 0 for size in known_sizes)
    return bias.dtype == problem.dtype and (whole or not cleared)


def is_plane(shapes: Shapes) -> bool:
    """Tells whether TMA can load a bias: of all queries and keys, rows multiples of 16 bytes."""
    bias = shapes.bias
    return (
        bias is not None
        and isinstance(bias.queries, int)
        and isinstance(bias.keys, int)
        and (bias.queries, bias.keys) == (shapes.q_len, shapes.kv_len)
        and bias.queries > 1
        and bias.keys > 1
        and alignment(bias.keys, bytes_of_bias(bias)) == 16
    )


def is_ragged(bias: TermShape | None) -> bool:
    """Tells whether four elements of a bias take more than one load: rows are not so aligned."""
    return bias is not None and alignment(bias.keys, bytes_of_bias(bias)) < 4 * bytes_of_bias(bias)


def hides_sides(problem: Problem) -> tuple[bool, bool]:
    """Tells whether the window hides keys left and right of a query by their indices.

    By positions it hides them as a mask does: anywhere.
    """
    left, right = problem.window
    by_index = "query_positions" not in problem.terms
    return left is not None and by_index, right is not None and by_index


def leaves_gaps(problem: Problem) -> bool:
    """Tells whether a term may hide blocks between those that a unit walks."""
    return problem.masked or bool({"query_segments", "query_positions"} & {*problem.terms})


def is_block_mask(shapes: Shapes) -> bool:
    """Tells whether the mask is one of blocks and no other beside it."""
    return shapes.block_mask is not None and shapes.mask is None


def shows_whole_tiles(problem: Problem, shapes: Shapes, queries: int, keys: int) -> bool:
    """Tells whether a block mask shows all of such tiles, as far as there are keys, or nothing."""
    block = shapes.block_mask
    if block is None or not is_block_mask(shapes) or not problem.whole_blocks:
        return False
    return block.block % queries == 0 and block.block % keys == 0
