"""Rows of latent attention in 656 bytes, as FlashMLA keeps them for DeepSeek's models.

A row `[576]` of bfloat16 is 512 float8_e4m3fn, four float32 scales of 128 of these each, and its
last 64 features, which are rotated, as they are. A feature is what is stored times its scale.

DeepSeek-V3.2-Exp (2025), FlashMLA.
"""

from __future__ import annotations

from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

BYTES = 656
DIM, VALUE_DIM = 576, 512
_GROUP = 128  # features that share a scale
_SCALES = VALUE_DIM // _GROUP
_PLAIN_AT = VALUE_DIM + 4 * _SCALES
_LEAST_EXPONENT = -126


def pack_latent(rows: Annotated[ArrayLike, "*B 576"]) -> jax.Array:
    """Packs rows of latent attention into 656 bytes each, as FlashMLA stores them.

    `decode_attention`, `ragged_paged_attention` and `fill_cache` take caches of such rows in place
    of bfloat16's 1152 bytes, and pack new ones themselves.

    The first 512 features become float8_e4m3fn in four groups of 128. A group's scale is the least
    power of two with which its largest finite number is at most 448. So a feature is within 1/16 of
    itself, or within 2^-10 times the scale. NaN stays, infinity becomes NaN, and what
    is rounded up beyond 2^128 unpacks to infinity. The last 64 are rounded to bfloat16.

    Arguments:
      rows: `[*B, 576]`, floating: 512 of the latent, then 64 that are rotated.

    Returns: uint8 `[*B, 656]`: 512 float8_e4m3fn, four float32 scales, 64 bfloat16, in the order of
    bytes of a little-endian machine.

    Raises:
      TypeError, ValueError: a wrong argument, with its shape and what would be right.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_flash import pack_latent, unpack_latent
      >>> packed = pack_latent(jnp.ones((2, 1024, 1, 576), jnp.bfloat16))
      >>> packed.shape, unpack_latent(packed).shape
      ((2, 1024, 1, 656), (2, 1024, 1, 576))

    DeepSeek-V3.2-Exp (2025), FlashMLA.
    """
    rows = jnp.asarray(rows)
    if not jnp.issubdtype(rows.dtype, jnp.floating):
        raise TypeError(f"rows has dtype {rows.dtype} (shape {rows.shape}); expected floating")
    if rows.ndim == 0 or rows.shape[-1] != DIM:
        raise ValueError(f"rows has shape {rows.shape}; expected [*B, {DIM}]")
    lead = rows.shape[:-1]
    groups = rows[..., :VALUE_DIM].astype(jnp.float32).reshape(*lead, _SCALES, _GROUP)
    finite = jnp.isfinite(groups)
    largest = jnp.max(jnp.abs(jnp.where(finite, groups, 0.0)), axis=-1, keepdims=True)
    # 2^exponent: of 448 = 0.875 * 2^9 the least one that is enough. A quotient could be subnormal,
    # which CPUs take as 0.
    mantissa, exponent = jnp.frexp(largest)
    exponent = exponent - jnp.where(mantissa > 0.875, 8, 9)
    scale = jnp.ldexp(jnp.float32(1), jnp.maximum(exponent, _LEAST_EXPONENT))
    scale = jnp.where(largest > 0, scale, 1.0)
    latent = jnp.where(finite, groups / scale, jnp.nan).astype(jnp.float8_e4m3fn)
    return jnp.concatenate(
        [
            lax.bitcast_convert_type(latent, jnp.uint8).reshape(*lead, VALUE_DIM),
            _bytes(scale[..., 0]),
            _bytes(rows[..., VALUE_DIM:].astype(jnp.bfloat16)),
        ],
        axis=-1,
    )


def unpack_latent(packed: Annotated[ArrayLike, "*B 656"]) -> jax.Array:
    """Unpacks what `pack_latent` packs, or FlashMLA: `[*B, 576]` of bfloat16.

    Arguments:
      packed: uint8 `[*B, 656]`, with scales of any value.

    Returns: bfloat16 `[*B, 576]`; the first 512 are what is stored times its scale, rounded.

    Raises:
      TypeError, ValueError: a wrong argument, with its shape and what would be right.

    DeepSeek-V3.2-Exp (2025), FlashMLA.
    """
    packed = jnp.asarray(packed)
    if not is_packed(packed):
        raise (TypeError if packed.dtype != jnp.uint8 else ValueError)(
            f"packed has dtype {packed.dtype} and shape {packed.shape}; expected uint8 "
            f"[*B, {BYTES}]"
        )
    lead = packed.shape[:-1]
    latent = lax.bitcast_convert_type(packed[..., :VALUE_DIM], jnp.float8_e4m3fn)
    groups = latent.astype(jnp.float32).reshape(*lead, _SCALES, _GROUP)
    scales = packed[..., VALUE_DIM:_PLAIN_AT].reshape(*lead, _SCALES, 4)
    scale = lax.bitcast_convert_type(scales, jnp.float32)[..., None]
    plain = packed[..., _PLAIN_AT:].reshape(*lead, DIM - VALUE_DIM, 2)
    return jnp.concatenate(
        [
            (groups * scale).astype(jnp.bfloat16).reshape(*lead, VALUE_DIM),
            lax.bitcast_convert_type(plain, jnp.bfloat16),
        ],
        axis=-1,
    )


def is_packed(rows: Any) -> bool:
    """Whether an array has rows that are packed."""
    return rows.dtype == jnp.uint8 and rows.ndim > 0 and rows.shape[-1] == BYTES


def plain(rows: jax.Array) -> jax.Array:
    """Returns rows of a cache as they are multiplied."""
    return unpack_latent(rows) if rows.dtype == jnp.uint8 else rows


def _bytes(x: jax.Array) -> jax.Array:
    """Lays out the bytes of `[*B, n]` one behind the other."""
    return lax.bitcast_convert_type(x, jnp.uint8).reshape(*x.shape[:-1], -1)
