"""Philox4x32-10, the counter-based generator that dropout draws from.

The same key and counter give the same word on every backend, so a dropout pattern depends neither
on tile sizes nor on sharding. 64-bit products are built from 16-bit halves, because uint64 exists
in JAX only in x64 mode.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import jax
import jax.numpy as jnp

_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9  # golden ratio
_WEYL_1 = 0xBB67AE85  # sqrt(3) - 1
_ROUNDS = 10


def _multiply_wide(a: int, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the high and low 32 bits of `a * b` for uint32 b."""
    a_high, a_low = jnp.uint32(a >> 16), jnp.uint32(a & 0xFFFF)
    b_high, b_low = b >> 16, b & jnp.uint32(0xFFFF)
    low_low = a_low * b_low
    middle = a_high * b_low + (low_low >> 16)  # at most (2^16-1)^2 + 2^16-1 < 2^32
    middle_low = a_low * b_high + (middle & jnp.uint32(0xFFFF))
    return a_high * b_high + (middle >> 16) + (middle_low >> 16), jnp.uint32(a) * b


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


def keep_mask(
    state: jax.Array,
    rate: float,
    query_start: jax.Array | int,
    key_start: jax.Array | int,
    q_len: int,
    kv_len: int,
) -> jax.Array:
    """Computes which probabilities dropout keeps in one tile.

    Arguments:
      state: uint32 `[..., 4]`: key word 0, key word 1, head id, batch id.
      rate: probability of dropping, in [0, 1).
      query_start, key_start: indices of the tile's first query and key.
      q_len, kv_len: size of the tile.

    Returns: bool `[..., q_len, kv_len]`.
    """
    k0, k1, head, batch = (state[..., i, None, None] for i in range(4))
    lead = (1,) * (state.ndim - 1)  # all of one rank, for jax_numpy_rank_promotion
    query = jnp.arange(q_len, dtype=jnp.uint32).reshape(*lead, -1, 1)
    query = jnp.asarray(query_start, jnp.uint32) + query
    # One counter serves four neighbouring keys; a tile that starts between two groups needs one
    # group more.
    key_start = jnp.asarray(key_start, jnp.uint32)
    groups = (kv_len + 3) // 4 + 1
    group = key_start // 4 + jnp.arange(groups, dtype=jnp.uint32).reshape(*lead, 1, -1)
    words = jnp.stack(philox((k0, k1), (group, query, head, batch)), axis=-1)
    words = words.reshape(*words.shape[:-2], groups * 4)
    words = jax.lax.dynamic_slice_in_dim(words, (key_start % 4).astype(jnp.int32), kv_len, axis=-1)
    return words >= jnp.uint32(int(rate * 2**32))
