"""Float8 (e4m3): how arrays are quantised and read back, the same bits on every backend.

Quantised values are float8_e4m3fn beside float32 scales `[*B, blocks, heads]`, any of these dims 1;
a value is their product. Scales that are made here are powers of two: float8's own exponent makes
others no more exact, and these products are exact in bfloat16 too.

Queries and keys are turned first, where the head dim is a power of two: by a Hadamard matrix, which
spreads an outlier over all features and leaves their dot products as they are, but for a power of
two (`turned_scale`). Ashkboos et al., QuaRot (arXiv:2404.00456); Shah et al., FlashAttention-3
(arXiv:2407.08608).
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

DTYPE = "float8_e4m3fn"
BLOCKS = (64, 128)  # positions that may share a scale
BLOCK = 128  # positions that share one that is made here
_LARGEST = 448.0  # of e4m3
_LEAST_EXPONENT = -117  # of a scale, whose product with the least e4m3, 2^-9, is normal in float32


def turns(head_dim: int) -> bool:
    """Tells whether queries and keys of a head dim are turned."""
    return head_dim & (head_dim - 1) == 0


def turn_shift(head_dim: int) -> int:
    """Returns s of the entries ±2^-s of the matrix that turns."""
    return (head_dim.bit_length() - 1) // 2


def turned_scale(head_dim: int) -> float:
    """Returns q kᵀ over its value after both were turned: 1, or 1/2 where log2(head_dim) is odd."""
    bits = head_dim.bit_length() - 1
    return 2.0 ** (2 * turn_shift(head_dim) - bits) if turns(head_dim) else 1.0


def turn(x: jax.Array) -> jax.Array:
    """Multiplies the last dim by a symmetric Hadamard matrix of entries ±2^-turn_shift.

    Sums are made of pairs in one order, so that their bits are the same everywhere.

    Returns: float32, of the shape of x.
    """
    *lead, dim = x.shape
    bits = dim.bit_length() - 1
    x = x.astype(jnp.float32)
    for bit in range(bits):
        pairs = x.reshape(*lead, dim >> (bit + 1), 2, 1 << bit)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        x = jnp.stack([low + high, low - high], axis=-2).reshape(*lead, dim)
    return x * 2.0 ** -turn_shift(dim)


def turn_derivative(x: jax.Array) -> jax.Array:
    """Returns `turn` of a derivative in its own dtype, by a product: sums in the device's order."""
    return x @ jnp.asarray(_matrix(x.shape[-1]), x.dtype)


@functools.cache
def _matrix(dim: int) -> np.ndarray:
    matrix = np.ones((1, 1))
    while len(matrix) < dim:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix * 2.0 ** -turn_shift(dim)


def quantise(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rounds to float8, by a scale for each head of a block of positions.

    The scale is the least power of two by which all finite values are at most 448. NaN and infinity
    become NaN.

    Arguments:
      x: `[*B, T, heads, H]`.

    Returns: the values, in x's shape, and scales `[*B, ceil(T / 128), heads]`, float32.
    """
    x = x.astype(jnp.float32)
    largest = largest_of_blocks(x)
    fraction, exponent = jnp.frexp(largest)  # fraction in [1/2, 1); 448 is 7/8 of 2^9
    exponent = exponent - 9 + (fraction > _LARGEST / 512).astype(exponent.dtype)
    exponent = jnp.where(largest > 0, jnp.maximum(exponent, _LEAST_EXPONENT), 0)
    inverse = _spread(_power(-exponent), x)
    values = _rounded(jnp.where(jnp.isfinite(x), x * inverse, jnp.nan)).astype(DTYPE)
    return values, _power(exponent)


def _rounded(x: jax.Array) -> jax.Array:
    """Rounds float32 of up to 448 to numbers of e4m3, ties to even.

    A conversion does the same, but on GPUs XLA takes one to float8 and back for none, unless
    `xla_allow_excess_precision` is off.
    """
    least = 2.0**-6  # of normal numbers, whose last bit is 2^-9 below it
    small = jnp.round(x * 2.0**9) * 2.0**-9
    return jnp.where(jnp.abs(x) < least, small, lax.reduce_precision(x, 8, 3))


def dequantise(values: jax.Array, scale: jax.Array, dtype: str) -> jax.Array:
    """Returns values times scale, rounded to a dtype.

    Arguments:
      values: `[*B, T, heads, H]`, float8.
      scale: float32 `[*B, blocks, heads]`, any dim 1; blocks is 1 or of 64 or 128 positions.
    """
    return (values.astype(jnp.float32) * _spread(scale, values)).astype(dtype)


def in_full(scale: jax.Array, x: jax.Array, positions: int) -> jax.Array:
    """Returns scales of each head of x `[*B, T, heads, H]` and of so many positions, or of 64."""
    *batch, length, heads, _ = x.shape
    blocks, wanted = scale.shape[-2], -(-length // positions)
    if 1 < blocks < wanted:  # of 128 to 64
        scale = lax.slice_in_dim(jnp.repeat(scale, 2, axis=-2), 0, wanted, axis=scale.ndim - 2)
    lead = jnp.broadcast_shapes(scale.shape[:-2], tuple(batch))
    return jnp.broadcast_to(scale, (*lead, max(blocks, wanted), heads))


def largest(x: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Returns the largest finite magnitude of an array, with its scale if it has one: float32."""
    wide = x.astype(jnp.float32) if scale is None else dequantise(x, scale, "float32")
    return jnp.max(jnp.where(jnp.isfinite(wide), jnp.abs(wide), 0.0), initial=0.0)


def largest_of_blocks(x: jax.Array) -> jax.Array:
    """Returns the largest finite magnitudes of 128 positions of a head each: float32.

    Arguments:
      x: `[*B, T, heads, H]`; the result is `[*B, ceil(T / 128), heads]`.
    """
    x = x.astype(jnp.float32)
    rows = jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0.0), axis=-1)  # [*B, T, heads]
    return jnp.max(_blocks(rows), axis=-2)


def columns(values: jax.Array) -> jax.Array:
    """Returns float8 values as Hopper's tensor cores take them: the bits of each feature's keys.

    Positions past the last have zeros. The order within 16 keys, 8c + 2b + d at 4b + 2c + d, is
    that of cuda/kernels/sm90_float8/slots.cuh.

    Arguments:
      values: `[*B, S, K, H]`; the result is uint8 `[*B, K, H, S up to a multiple of 128]`.
    """
    *batch, length, heads, dim = values.shape
    count = -(-length // BLOCK) * BLOCK
    bits = lax.bitcast_convert_type(values, jnp.uint8)
    bits = jnp.pad(bits, [(0, 0)] * len(batch) + [(0, count - length), (0, 0), (0, 0)])
    bits = bits.reshape(*batch, count // 16, 2, 4, 2, heads, dim)  # a, c, b, d
    first = len(batch)
    order = (*range(first), *(first + i for i in (4, 5, 0, 2, 1, 3)))
    return bits.transpose(order).reshape(*batch, heads, dim, count)


def largest_of_all(
    arrays: Sequence[jax.Array], scales: Sequence[jax.Array | None] = (None, None, None)
) -> jax.Array:
    """Returns the largest finite magnitude of each array: float32 [arrays], without a gradient."""
    return lax.stop_gradient(jnp.stack([*map(largest, arrays, scales)]))


def _blocks(x: jax.Array) -> jax.Array:
    """Brings `[*B, T, heads]` to `[*B, blocks, 128, heads]`, with zeros past the end."""
    *batch, length, heads = x.shape
    count = -(-length // BLOCK)
    padded = jnp.pad(x, [(0, 0)] * len(batch) + [(0, count * BLOCK - length), (0, 0)])
    return padded.reshape(*batch, count, BLOCK, heads)


def _spread(scale: jax.Array, x: jax.Array) -> jax.Array:
    """Repeats scales `[*B, blocks, heads]` for the positions of x: `[*B, T or 1, heads, 1]`."""
    blocks, length = scale.shape[-2], x.shape[-3]
    if blocks > 1:
        size = next(size for size in BLOCKS if blocks == -(-length // size))
        scale = lax.slice_in_dim(jnp.repeat(scale, size, axis=-2), 0, length, axis=scale.ndim - 2)
    return scale[..., None]


def _power(exponent: jax.Array) -> jax.Array:
    """Returns 2^exponent of int32 from -126 to 127, exactly."""
    return lax.bitcast_convert_type((exponent.astype(jnp.int32) + 127) << 23, jnp.float32)
