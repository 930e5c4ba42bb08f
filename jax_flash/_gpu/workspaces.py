"""The scratch arrays that families of kernels have in common, and counts of blocks."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_flash._gpu.constants import is_one
from jax_flash._problem import Shapes


def boxes(dim: int) -> int:
    """Counts the boxes of 64 columns, 128 bytes of shared memory, that hold a row."""
    return -(-dim // 64)


def mask_by_query(shapes: Shapes, block_q: int, block_kv: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the scratch arrays of mask_plan in the forward pass (cuda/kernels/mask.cuh)."""
    mask, flags = shapes.mask, uint8(0, 0, 0)
    if shapes.block_mask is not None:
        parts = shapes.block_mask.batch * shapes.block_mask.heads
        flags = uint8(parts, blocks(shapes.q_len, block_q), blocks(shapes.kv_len, block_kv))
    if mask is None:
        return {
            "mask_words": int32(0, 0, 0, 0),
            "mask_flags": uint8(0, 0, 0),
            "block_flags": flags,
        }
    parts, words = mask.batch * mask.heads, mask_words(mask.keys, block_kv)
    query_blocks, key_blocks = blocks(mask.queries, block_q), blocks(mask.keys, block_kv)
    return {
        "mask_words": int32(parts, mask.queries, key_blocks, words),
        "mask_flags": uint8(parts, query_blocks, key_blocks),
        "block_flags": flags,
    }


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
