"""What the schedules of all families ask of a problem: where blocks are hidden, and by what."""

from jax_flash._problem import Problem, Shapes


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


def late_see_most(problem: Problem, shapes: Shapes) -> bool:
    """Tells whether late queries see most keys: causal, and of most block masks."""
    return problem.window[1] is not None or shapes.block_mask is not None


def is_block_mask(shapes: Shapes) -> bool:
    """Tells whether the mask is one of blocks and no other beside it."""
    return shapes.block_mask is not None and shapes.mask is None


def shows_whole_tiles(problem: Problem, shapes: Shapes, queries: int, keys: int) -> bool:
    """Tells whether a block mask shows all of such tiles, as far as there are keys, or nothing."""
    block = shapes.block_mask
    if block is None or not is_block_mask(shapes) or not problem.whole_blocks:
        return False
    return block.block % queries == 0 and block.block % keys == 0
