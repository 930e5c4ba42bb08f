"""Small arrays, functions and a comparison, for the tests of JAX's transformations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import jax_flash
from jax_flash import reference

B, T, S, N, K, H = 2, 10, 14, 4, 2, 8
KEY = jax.random.key


def numpy_normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def normal(seed: int, *shape: int, dtype=jnp.float32) -> jax.Array:
    """Random numbers, by NumPy: jax.random compiles a program for each shape, of 0.1 s."""
    return jax.device_put(numpy_normal(seed, *shape).astype(dtype))


def integers(seed: int, shape: tuple[int, ...], low: int, high: int) -> jax.Array:
    """Random int32 from low to before high, by NumPy likewise."""
    return jax.device_put(np.random.default_rng(seed).integers(low, high, shape, np.int32))


def qkv(dtype=jnp.float32, batch=(B,)) -> tuple[jax.Array, jax.Array, jax.Array]:
    return (
        normal(0, *batch, T, N, H, dtype=dtype),
        normal(1, *batch, S, K, H, dtype=dtype),
        normal(2, *batch, S, K, H, dtype=dtype),
    )


def close(got, expected, rtol=1e-5):
    """Same structure, and equal to rtol of the largest value."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b))
        a, b = (np.where(np.isfinite(x), x, 0) for x in (a, b))
        np.testing.assert_allclose(a, b, atol=rtol * max(1.0, np.abs(b).max(initial=0)), rtol=0)


def loss_of(attention):
    def loss(q, k, v, bias):
        return jnp.sum(jnp.sin(attention(q, k, v, bias)))

    return loss


def small_arguments():
    return (*(x[:1, :5] for x in qkv()), normal(3, 1, N, 5, 5))


def ours_and_reference(backend: str):
    """Causal attention of q, k, v, bias, by the backend and as plainly as possible."""

    def of(attention, **options):
        return lambda q, k, v, bias: attention(q, k, v, bias=bias, is_causal=True, **options)

    return of(jax_flash.flash_attention, backend=backend), of(reference.attention)
