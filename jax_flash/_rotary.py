"""Rotary position embedding, one rule for layers and caches.

Su et al., RoFormer (arXiv:2104.09864), paired by halves as in GPT-NeoX.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash._terms import sum_dtype


def rotate(x: jax.Array, positions: jax.Array, base: float) -> jax.Array:
    """Turns (x[h], x[h + H/2]) by the angle position * base**(-2h / H).

    A score depends on the difference of two positions alone, so packed sequences need no
    positions of their own.

    Arguments:
      x: queries or keys `[*B, T, N, H]`, H even.
      positions: int `[*B, T]`, any of *B 1 or absent.
      base: the longest wavelength is nearly 2 pi base positions.

    Returns: `[*B, T, N, H]` in the dtype of x, computed in float32, or float64 if x is.
    """
    half = x.shape[-1] // 2
    dtype = sum_dtype(x.dtype)
    # In float64, rounded once: all backends have the same bits.
    frequencies = jnp.asarray(base ** (-np.arange(half) / half), dtype)
    missing = x.ndim - 2 - positions.ndim  # all of one rank, for jax_numpy_rank_promotion
    positions = positions.astype(dtype).reshape((1,) * missing + positions.shape + (1, 1))
    angles = positions * frequencies.reshape(*(1,) * (x.ndim - 1), -1)  # [*B, T, 1, H/2]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(dtype), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
