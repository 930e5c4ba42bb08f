"""What the Linen and NNX layers share: Flax's arguments in flash_attention's terms, rotary, cache.

The attention itself is `jax_flash.flash_attention`; nothing here computes a score or a softmax.
"""

import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


def flax_mask(
    mask: jax.Array | None, is_causal: bool, query: jax.Array, key: jax.Array
) -> tuple[jax.Array | None, bool]:
    """A mask as Flax passes it, as booleans, and whether a causal mask is to join it.

    Flax's masks may be numbers, where nonzero means True. One query with a mask over several keys
    is a decoding step: the mask marks the written part of the cache, while causal starts at key 0
    and would leave that key alone. Flax before 0.12.12 asks for causal there nonetheless.

    Args:
      mask: bool or numbers, broadcastable to [*B, N, T, S].
      is_causal: what Flax asked for.
      query: [*B, T, N, H].
      key: [*B, S, K, H].

    Returns:
      The mask in bool, and False for a decoding step or else `is_causal`.
    """
    if mask is None:
        return None, is_causal
    mask = jnp.asarray(mask)
    decoding = query.shape[-3] == 1 and key.shape[-3] > 1
    return mask if mask.dtype == jnp.bool_ else mask != 0, is_causal and not decoding


def with_causal(mask: jax.Array | None, query: jax.Array, key: jax.Array) -> jax.Array:
    """`mask` and query i seeing keys 0..i, as one [..., T, S] mask for functions that need it."""
    causal = jnp.tri(query.shape[-3], key.shape[-3], dtype=jnp.bool_)
    if mask is None:
        return causal
    rank = max(mask.ndim, 2)  # the same for both, for jax_numpy_rank_promotion
    return jnp.expand_dims(mask, tuple(range(rank - mask.ndim))) & jnp.expand_dims(
        causal, tuple(range(rank - 2))
    )


class Cache(NamedTuple):
    """Keys and values of the positions seen so far."""

    key: jax.Array  # [*B, L, K, H]
    value: jax.Array  # [*B, L, K, H]
    index: jax.Array  # int32 scalar: positions written, the same in every row

    def append(self, key: jax.Array, value: jax.Array) -> "Cache":
        """The cache with T more positions, `key` and `value` [*B, T, K, H]."""
        *batch, length, _, _ = self.key.shape
        *new_batch, new_length, _, _ = key.shape
        if new_batch != batch or new_length > length:
            raise ValueError(
                f"the cache has batch {batch} and room for {length} positions, "
                f"but the input has batch {new_batch} and {new_length} positions"
            )

        def write(old: jax.Array, new: jax.Array) -> jax.Array:
            new = new.astype(old.dtype)
            return jax.lax.dynamic_update_slice_in_dim(old, new, self.index, axis=old.ndim - 3)

        return Cache(write(self.key, key), write(self.value, value), self.index + new_length)


def self_attention(
    attention_fn: Callable[..., jax.Array],
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: Cache | None,
    *,
    rotary_base: float | None,
    segment_ids: jax.Array | None,
    **options: Any,
) -> tuple[jax.Array, Cache | None]:
    """Attention among T positions, or of T new positions to themselves and all those in a cache.

    Args:
      attention_fn: flash_attention, or a function with those of its arguments that are used.
      query: [*B, T, N, H].
      key: [*B, T, K, H].
      value: [*B, T, K, H].
      cache: what came before; None when decoding nothing.
      rotary_base: as in `rotate`; None for no rotary embedding.
      segment_ids: int [*B, T], for queries and keys alike; None with a cache.
      **options: further arguments of flash_attention; None and False are left out.

    Returns:
      [*B, T, N, H] and the cache with the new positions. The output is NaN once more has been
      written than the cache can hold: at run time there is no other way to refuse.
    """
    start = jnp.zeros((), jnp.int32) if cache is None else cache.index
    if rotary_base is not None:
        positions = start + jnp.arange(query.shape[-3], dtype=jnp.int32)
        query = rotate(query, positions, rotary_base)
        key = rotate(key, positions, rotary_base)
    if segment_ids is not None:
        options.update(query_segment_ids=segment_ids, key_value_segment_ids=segment_ids)
    if cache is not None:
        cache = cache.append(key, value)
        key, value = cache.key.astype(query.dtype), cache.value.astype(query.dtype)
        lengths = jnp.broadcast_to(cache.index, query.shape[:-3])
        options.update(key_value_seq_lengths=lengths, causal_align="bottom_right")
    used = {name: o for name, o in options.items() if o is not None and o is not False}
    out = attention_fn(query, key, value, **used)
    if cache is not None:
        out = jnp.where(cache.index <= cache.key.shape[-3], out, jnp.nan)
    return out, cache


def rotate(x: jax.Array, positions: jax.Array, base: float) -> jax.Array:
    """Rotary position embedding: (x[h], x[h + H/2]) turns by the angle position * base**(-2h / H).

    A score depends on the difference of two positions alone, so packed sequences need no
    positions of their own.

    Args:
      x: queries or keys [*B, T, N, H], H even.
      positions: int [T].
      base: the longest wavelength is nearly 2 pi base positions.

    Returns:
      [*B, T, N, H] in the dtype of `x`, computed in float32.

    Paper: Su et al., RoFormer, https://arxiv.org/abs/2104.09864, paired by halves as in GPT-NeoX.
    """
    half = x.shape[-1] // 2
    frequencies = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    positions = positions.astype(jnp.float32).reshape(*(1,) * (x.ndim - 3), -1, 1, 1)
    angles = positions * frequencies.reshape(*(1,) * (x.ndim - 1), -1)  # [*1, T, 1, H/2]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def head_sizes(
    features: int,
    num_heads: int,
    num_kv_heads: int | None,
    head_dim: int | None,
    rotary_base: float | None,
) -> tuple[int, int]:
    """A layer's key heads and head size, with None replaced by num_heads and features / num_heads.

    Raises:
      TypeError: a size is no int.
      ValueError: the numbers do not fit together.
    """
    for name, size in (
        ("num_heads", num_heads),
        ("num_kv_heads", num_kv_heads),
        ("head_dim", head_dim),
    ):
        if not isinstance(size, numbers.Integral) and (size is not None or name == "num_heads"):
            raise TypeError(f"{name} must be an int, got {size!r}")
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            "num_heads must be a positive multiple of num_kv_heads, "
            f"got {num_heads} and {num_kv_heads}"
        )
    if head_dim is None:
        head_dim, rest = divmod(features, num_heads)
        if rest:
            raise ValueError(
                f"{features} features do not divide among {num_heads} heads; give head_dim"
            )
    if head_dim < 1:
        raise ValueError(f"head_dim must be positive, got {head_dim}")
    if rotary_base is not None and not (
        isinstance(rotary_base, numbers.Real) and 0 < rotary_base < math.inf
    ):
        raise ValueError(f"rotary_base must be a positive number, got {rotary_base!r}")
    if rotary_base is not None and head_dim % 2:
        raise ValueError(f"rotary embedding needs an even head_dim, got {head_dim}")
    return num_kv_heads, head_dim


def check_decode(is_causal: bool, segment_ids: jax.Array | None) -> None:
    """Raises ValueError for a decoding call that a cache cannot answer."""
    if not is_causal:
        raise ValueError("decoding needs a layer with is_causal=True")
    if segment_ids is not None:
        raise ValueError("decoding takes no segment_ids: the cache holds one sequence per row")
