"""Memory grows linearly with sequence length, as XLA's own plan of the compiled program says."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

import jax_flash

N, H = 2, 32


def step(backend: str, **options):
    """A function of q, k, v and bias (or None) that computes out and all gradients."""

    def run(q, k, v, bias):
        def call(q, k, v, bias):
            return jax_flash.flash_attention(q, k, v, bias=bias, backend=backend, **options)

        out, pull = jax.vjp(call, q, k, v, bias)
        return out, pull(out)

    return run


def compiled(backend: str, length: int, bias_shape=None, **options):
    x = jax.ShapeDtypeStruct((1, length, N, H), jnp.float32)
    bias = None if bias_shape is None else jax.ShapeDtypeStruct(bias_shape, jnp.float32)
    return jax.jit(step(backend, **options)).lower(x, x, x, bias).compile()


def planned(program) -> int:
    """Bytes of temporaries in a compiled program."""
    return program.memory_analysis().temp_size_in_bytes


def temporary_bytes(*arguments, **options) -> int:
    return planned(compiled(*arguments, **options))


CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window, softcap, dropout": {
        "local_window_size": (700, 5),
        "softcap": 3.0,
        "dropout_rate": 0.1,
        "dropout_key": jax.random.key(0),
    },
}


@pytest.mark.parametrize("name", CALLS)
def test_temporaries_grow_linearly(name, host_backend):
    short, long = (temporary_bytes(host_backend, length, **CALLS[name]) for length in (2048, 8192))
    # Four times the length: quadratic memory would grow by 16, and hold 8192 x 8192 scores.
    assert long <= 4.2 * short
    assert long < N * 8192 * 8192 * 4 / 8


BIAS_SHAPES = {
    "keys": lambda length: (1, 1, 1, length),
    "queries": lambda length: (1, N, length, 1),
    "heads": lambda length: (1, N, 1, 1),
    "none": lambda length: (1, 1, 1, 1),
}


@pytest.mark.parametrize("name", BIAS_SHAPES)
def test_bias_gradient_grows_linearly(name, host_backend):
    shape = BIAS_SHAPES[name]
    short, long = (temporary_bytes(host_backend, length, shape(length)) for length in (2048, 8192))
    assert long <= 4.2 * short
    assert long < N * 8192 * 8192 * 4 / 8


def test_one_bias_for_all_heads_needs_one_score_matrix(host_backend):
    """A bias [1, 1, T, S] of 16 heads: its gradient's temporaries do not hold 16 of them."""
    length, heads = 2048, 16
    x = jax.ShapeDtypeStruct((4, length, heads, H), jnp.float32)
    bias = jax.ShapeDtypeStruct((1, 1, length, length), jnp.float32)
    program = jax.jit(step(host_backend)).lower(x, x, x, bias).compile()
    all_scores = 4 * heads * length * length * 4
    assert planned(program) < all_scores / 2
    scores = re.compile(rf"\[4,(?:{heads}|1,{heads}|{heads},1),{length},{length}\]")
    assert not scores.search(program.as_text() or "")
