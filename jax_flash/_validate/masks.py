"""What is checked of masks, block masks and functions of scores, and what they become: operands.

Read next: `block_masks.py`; `_function.py`, which traces the functions.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jax_flash import _function
from jax_flash._function import Function
from jax_flash._terms import sum_dtype
from jax_flash._validate.arrays import array, broadcastable, typed
from jax_flash.block_masks import BlockMask


def mask_of(mask, scores) -> jax.Array | None:
    if mask is None:
        return None
    if isinstance(mask, BlockMask) or callable(mask):
        raise TypeError(
            f"mask is {type(mask).__name__}; expected an array of bool: what jax_flash.block_mask "
            "makes of a function is block_mask="
        )
    hint = ", True where a key is visible: mask != 0, or pass an additive mask as bias"
    return broadcastable("mask", typed("mask", "mask", array("mask", mask), hint=hint), scores)


def check_sizes(mask: Any, q_len: int, kv_len: int) -> None:
    """Says why a block mask does not fit the lengths."""
    if mask is None:
        return
    if not isinstance(mask, BlockMask):
        raise TypeError(
            f"block_mask is {type(mask).__name__}; expected what jax_flash.block_mask makes of a "
            "function, or jax_flash.block_mask_of of a layout"
        )
    counts = tuple(-(-size // mask.block) for size in (q_len, kv_len))
    own = counts if mask.is_form else mask.numbers.shape[-2:]
    lengths = ((mask.q_len, q_len), (mask.kv_len, kv_len))
    if own != counts or any(x not in (None, size) for x, size in lengths):
        blocks = "" if mask.is_form else f" and {own[0]} x {own[1]} blocks of {mask.block}"
        raise ValueError(
            f"block_mask has q_len {mask.q_len}, kv_len {mask.kv_len}{blocks}; expected one for T "
            f"= {q_len} and S = {kv_len}: {counts[0]} x {counts[1]} blocks of {mask.block}"
        )


def blocks_of(mask: BlockMask, batch: tuple[int, ...], q_heads: int) -> dict[str, jax.Array]:
    """Gives the arrays of a block mask their leading dims, or says why they do not fit."""
    mask = mask.as_blocks()
    numbers, bits = mask.numbers, mask.bits
    for own, want in ((numbers.shape[:-2], (*batch, q_heads)), (bits.shape[:-3], batch)):
        full = (1,) * (len(want) - len(own)) + own
        if len(full) != len(want) or any(
            have not in (1, size) for have, size in zip(full, want, strict=True)
        ):
            raise ValueError(
                f"block_mask has {numbers.shape[-3]} heads, batch {numbers.shape[:-3]} and bits of "
                f"batch {bits.shape[:-3]}; expected what broadcasts to query's {q_heads} heads and "
                f"batch {batch}: heads=None and batch=None make one for all"
            )
    numbers = jnp.reshape(numbers, (1,) * (len(batch) + 3 - numbers.ndim) + numbers.shape)
    *_, stored, block, words = bits.shape
    if stored == 0:  # kernels read some word of every block
        bits = jnp.zeros((1, block, words), bits.dtype)
    bits = jnp.reshape(bits, (1,) * (len(batch) + 3 - bits.ndim) + bits.shape)
    return {"block_numbers": numbers, "block_bits": bits}


def score_function(
    score_mod: Any, softcap: Any, q_heads: int, query_dtype: Any
) -> tuple[Function | None, list[jax.Array]]:
    """Traces the function of the scores; returns also the arrays that it reads."""
    if score_mod is None:
        return None, []
    if softcap is not None:
        raise ValueError(
            "score_mod and softcap are both given; expected one of them: let the function cap what "
            f"it returns, as jax_flash.scores.compose(score_mod, jax_flash.scores.softcap({softcap}"
            ")) does"
        )
    if isinstance(score_mod, _function.OfHeads) and score_mod.heads != q_heads:
        raise ValueError(
            f"score_mod reads an array of {score_mod.heads} heads; expected one of query's N = "
            f"{q_heads}"
        )
    sums = sum_dtype(query_dtype)
    arguments = {"score": sums, **dict.fromkeys(("batch", "head", "query", "key"), "int32")}
    return _function.trace("score_mod", score_mod, arguments, sums)


def whole(x: jax.Array, leading: int) -> jax.Array:
    """Brings an array that a function reads to `[1s, elements]`, whole on every device."""
    if any(axis is not None for axis in jax.typeof(x).sharding.spec):
        x = jax.sharding.reshard(x, jax.sharding.PartitionSpec())
    return jnp.reshape(x, (*[1] * leading, -1))
