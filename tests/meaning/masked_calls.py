"""Arrays of calls with block masks, and their gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ..small import normal

T, S, N, K, H = 40, 50, 4, 2, 8
DOCUMENTS = np.sort(np.random.default_rng(0).integers(0, 4, (2, T)), axis=1)


def lattice(batch, head, query, key):
    return (7 * query + 3 * key + head + 2 * batch) % 5 < 2


def qkv(batch: int = 2, kv_len: int = S):
    shapes = ((batch, T, N, H), (batch, kv_len, K, H), (batch, kv_len, K, H))
    return tuple(normal(seed, *shape) for seed, shape in enumerate(shapes))


def gradients(attention, q, k, v, **options):
    """out, and the gradients of a loss of it."""

    def loss(q, k, v):
        out = attention(q, k, v, **options)
        return jnp.sum(jnp.sin(out)), out

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(q, k, v)
