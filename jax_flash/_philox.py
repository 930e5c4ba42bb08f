"""Philox4x32-7, the counter-based generator that dropout draws from, and the pattern drawn.

The same key and counter give the same word on every backend, so a dropout pattern depends neither
on tile sizes nor on sharding. One counter serves sixteen weights, 15 bits each: those of the
queries q, q + 4, q + 8, q + 12 and the keys k, k + 1, k + 8, k + 9, where q % 16 < 4 and k % 16 is
0, 2, 4 or 6. In the fragments of tensor cores two threads of a warp hold them, eight each, and the
warp's other threads those of the cell of 16 x 16 weights beside it: one draws for both, and they
exchange. In the transposed scores of the backward pass they are the same 8 x 8 matrices transposed.

    counter  (head id, q // 16 * 4 + q % 4, batch id, k // 16 * 4 + k % 8 // 2): a round multiplies
             words 0 and 2, so that queries and keys meet in the third round, and what the first
             three make of either serves all counters that have it
    words    a, b: 0 and 1 of the counter's where q // 16 + k // 16 + q // 4 is even, else 2 and 3
    number   a, b, a * 0x93D765DD + b or b * 0xD2511F53 + a, 32 bits: that of place
             2 * (k // 8 % 2) + q // 8 % 2
    bits     0 to 14 of it where k is even, 16 to 30 where it is odd
    kept     where these are at least rate * 2^15

Eight weights so share 64 random bits, which leaves any two of them independent (but for 2^-30, the
parity of the last two numbers) and gives three a correlation of at most 2e-4 at rates of 1 to 95 %:
the low 15 bits of three numbers are the lattice of a good multiplier, whose shortest wave vector is
180 (194 at best).

Before jax 0.11 64-bit products are built from 16-bit halves, because uint64 exists in JAX only in
x64 mode.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011: 7 rounds are the fewest that
pass BigCrush.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9  # golden ratio
_WEYL_1 = 0xBB67AE85  # sqrt(3) - 1
_ROUNDS = 7
_STEPS = 2**15  # values of one draw
_FEW = 1 << 16  # weights, of 200 operations each: 1 us of an H100, where a kernel begins in 2
_WIDENING = 0x93D765DD, _MULTIPLIER_0
WORDS_OF_PART = 6  # of the state of a part of a sequence


def _multiply_wide(a: int, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the high and low 32 bits of `a * b` for uint32 b."""
    low = jnp.uint32(a) * b
    mulhi = getattr(jax.lax, "mulhi", None)
    if mulhi is not None:
        return mulhi(jnp.full_like(b, a), b), low
    a_high, a_low = jnp.uint32(a >> 16), jnp.uint32(a & 0xFFFF)
    b_high, b_low = b >> 16, b & jnp.uint32(0xFFFF)
    low_low = a_low * b_low
    middle = a_high * b_low + (low_low >> 16)  # at most (2^16-1)^2 + 2^16-1 < 2^32
    middle_low = a_low * b_high + (middle & jnp.uint32(0xFFFF))
    return a_high * b_high + (middle >> 16) + (middle_low >> 16), low


def philox(key: tuple[jax.Array, ...], counter: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Computes four random words per counter.

    Arguments:
      key: two uint32 arrays that broadcast against the counter.
      counter: four uint32 arrays that broadcast against each other.

    Returns: four uint32 arrays of the broadcast shape.
    """
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(_ROUNDS):
        high0, low0 = _multiply_wide(_MULTIPLIER_0, c0)
        high1, low1 = _multiply_wide(_MULTIPLIER_1, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + jnp.uint32(_WEYL_0), k1 + jnp.uint32(_WEYL_1)
    shape = jnp.broadcast_shapes(c0.shape, c1.shape, c2.shape, c3.shape)
    return tuple(jnp.broadcast_to(word, shape) for word in (c0, c1, c2, c3))


def round_rate(rate: float) -> float:
    """Returns the rate that is drawn: the nearest multiple of 2^-15, below 1."""
    return min(round(rate * _STEPS), _STEPS - 1) / _STEPS


def of_part(state: jax.Array, query: jax.Array, key: jax.Array) -> jax.Array:
    """Computes the state of a part of the queries and keys that a pattern counts.

    Arguments:
      state: uint32 `[..., 4]`, of all.
      query, key: int32, the indices of the first ones, multiples of 16.

    Returns: uint32 `[..., 6]`: also the counters of query 0 and key 0.
    """
    first = jnp.stack([query // 16 * 4, key // 16 * 4]).astype(jnp.uint32)
    first = jnp.broadcast_to(first, (*state.shape[:-1], 2))
    return jnp.concatenate([state, first], axis=-1)


def keep_mask(
    state: jax.Array, rate: float, query_start: Any, key_start: Any, q_len: int, kv_len: int
) -> jax.Array:
    """Computes which weights dropout keeps in one tile.

    Arguments:
      state: uint32 `[..., 4]`: key word 0, key word 1, head id, batch id; or `[..., 6]`, as
        `of_part` makes it.
      rate: probability of dropping, of `round_rate`.
      query_start, key_start: indices of the tile's first query and key.
      q_len, kv_len: size of the tile.

    Returns: bool `[..., q_len, kv_len]`.
    """
    k0, k1, head, batch, *first = (state[..., i, None, None] for i in range(state.shape[-1]))
    first_row, first_column = first or (jnp.uint32(0),) * 2
    lead = (1,) * (state.ndim - 1)  # all of one rank, for jax_numpy_rank_promotion

    def counters(start: Any, length: int) -> tuple[int, jax.Array]:
        # Sixteen positions share four counters; one that starts between needs sixteen more.
        between = 0 if _is_multiple(start) else 1
        sixteens = (length + 15) // 16 + between
        count = jnp.arange(sixteens * 4, dtype=jnp.uint32)
        return sixteens, jnp.asarray(start, jnp.uint32) // 16 * 4 + count

    sizes = (*state.shape[:-1], q_len, kv_len)
    counted = 16 * -(-q_len // 16) * -(-kv_len // 16)
    known = all(isinstance(size, int) for size in sizes)
    if q_len * kv_len <= counted or (known and math.prod(sizes) <= _FEW):
        # Each weight draws its own words: no more of them, or few, and nothing is copied.
        query, key = (
            jnp.asarray(start, jnp.uint32) + jnp.arange(length, dtype=jnp.uint32)
            for start, length in ((query_start, q_len), (key_start, kv_len))
        )
        query, key = query.reshape(*lead, -1, 1), key.reshape(*lead, 1, -1)
        rows = query // 16 * 4 + query % 4 + first_row
        columns = key // 16 * 4 + key % 8 // 2 + first_column
        words = philox((k0, k1), (head, rows, batch, columns))
        even = (rows // 4 + columns // 4) % 2 == 0
        return _keep(words, even, query // 4 % 2, query // 8 % 2, key // 8 % 2, key % 2, rate)

    q_groups, rows = counters(query_start, q_len)
    k_groups, columns = counters(key_start, kv_len)
    rows = rows.reshape(*lead, -1, 1) + first_row
    columns = columns.reshape(*lead, 1, -1) + first_column
    words = philox((k0, k1), (head, rows, batch, columns))
    even = (rows // 4 + columns // 4) % 2 == 0
    # The bits of a position: q // 16, q // 8 % 2, q // 4 % 2, q % 4, and k // 16, k // 8 % 2,
    # k % 8 // 2, k % 2. What follows repeats words along the bits that they lack, and moves none.
    cell = (q_groups, 1, 1, 4, k_groups, 1, 4, 1)
    *words, even = (
        x.reshape(*x.shape[:-2], *cell) for x in (*words, jnp.broadcast_to(even, words[0].shape))
    )
    q8, q4, k8, k1 = (
        jnp.arange(2, dtype=jnp.uint32).reshape(*lead, *(2 if i == axis else 1 for i in range(8)))
        for axis in (1, 2, 5, 7)
    )
    keep = _keep(words, even, q4, q8, k8, k1, rate)
    keep = keep.reshape(*keep.shape[:-8], 16 * q_groups, 16 * k_groups)
    for axis, start, length in ((-2, query_start, q_len), (-1, key_start, kv_len)):
        if _is_multiple(start):
            keep = jax.lax.slice_in_dim(keep, 0, length, axis=axis)
        else:
            first = (jnp.asarray(start, jnp.uint32) % 16).astype(jnp.int32)
            keep = jax.lax.dynamic_slice_in_dim(keep, first, length, axis)
    return keep


def _keep(words, even, q4, q8, k8, k1, rate: float) -> jax.Array:
    """Tells which weights are kept, by the words of their counters and the bits of their places."""
    drawn = even == (q4 == 0)
    a, b = (jnp.where(drawn, words[i], words[2 + i]) for i in range(2))
    a, b = jnp.where(q8 == 0, a, b), jnp.where(q8 == 0, b, a)
    factor = jnp.where(q8 == 0, jnp.uint32(_WIDENING[0]), jnp.uint32(_WIDENING[1]))
    number = jnp.where(k8 == 0, a, a * factor + b)
    return ((number >> (16 * k1)) & jnp.uint32(_STEPS - 1)) >= jnp.uint32(round(rate * _STEPS))


def _is_multiple(start: Any) -> bool:
    """Tells whether a position is known to be the first of sixteen."""
    return isinstance(start, int | np.integer) and start % 16 == 0
