"""The weight of each key is what plain softmax gives it, summed over queries."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import flash_attention, key_weights, reference

from ..conftest import with_backends
from ..small import B, K, N, S, T, close, integers, normal, qkv

HALF = {"is_causal": True, "causal_align": "bottom_right"}
LENGTHS = {"query_seq_lengths": jnp.array([7, 0]), "key_value_seq_lengths": jnp.array([14, 5])}
PLAIN: dict[str, dict[str, Any]] = {
    "nothing hidden": {"scale": 0.7},
    "causal": {"is_causal": True, "sinks": jnp.arange(4.0)},
    "window": HALF | LENGTHS | {"local_window_size": (4, 2)},
    "two sides": {"local_window_size": (2, 5), "causal_align": "bottom_right"},
    "one window": {"local_window_size": 3, **LENGTHS},
    "documents": {
        "query_segment_ids": integers(3, (B, T), 0, 3),
        "key_value_segment_ids": integers(4, (B, S), 0, 3),
        "query_positions": integers(5, (B, T), -5, 9),
        "key_value_positions": jnp.where(integers(6, (B, S), 0, 9) < 2, 2**31 - 1, jnp.arange(S)),
        "is_causal": True,
    },
    "masks": {"mask": integers(7, (N, T, S), 0, 2) > 0, "scale": jnp.float32(0.3)},
    "a mask of keys": {"mask": integers(8, (S,), 0, 2) > 0},
}
OTHER: dict[str, dict[str, Any]] = {
    "bias": HALF | {"bias": normal(8, 1, N, T, S), "softcap": 2.0, **LENGTHS},
    "blocks": {"block_mask": jax_flash.block_mask(lambda b, h, q, k: q + k > 9, q_len=T, kv_len=S)},
}
IN_XLA = ("window", "documents", "masks", "bias")  # which compiles each anew


def plain(query, key, **options):
    """Columns of the weights, which are the results for values that are the unit vectors."""
    units = jnp.broadcast_to(jnp.eye(S, dtype=query.dtype)[:, None], (B, S, K, S))
    weights = reference.attention(query, key, units, **options)  # [B, T, N, S]
    return jnp.moveaxis(weights.sum(1).reshape(B, K, N // K, S).sum(2), 1, 2)


@pytest.mark.parametrize(("backend", "name"), with_backends([*PLAIN, *OTHER], IN_XLA.__contains__))
def test_it_is_the_sum_of_softmax_weights(backend, name):
    query, key, value = qkv()
    options = PLAIN.get(name) or OTHER[name]
    expected = plain(query, key, **options)
    options = options | {"backend": backend, "precision": "highest"}
    got = key_weights(query, key, **options)
    assert got.dtype == jnp.float32
    close(got, expected, 1e-6)
    _, lse = flash_attention(query, key, value, return_lse=True, **options)
    close(key_weights(query, key, lse=lse, **options), expected, 1e-6)


def test_bfloat16_many_queries_and_what_is_hidden(host_backend):
    """Sums are float32, and padding that holds NaN weighs nothing and disturbs nobody."""
    query, key, _ = qkv(jnp.bfloat16)
    wide = [x.astype(jnp.float32) for x in (query, key)]
    lengths = {"key_value_seq_lengths": jnp.array([14, 5]), "backend": host_backend}
    expected = plain(*wide, key_value_seq_lengths=lengths["key_value_seq_lengths"])
    key = key.at[1, 5:].set(jnp.nan)
    got = key_weights(query, key, **lengths)
    assert got.dtype == jnp.float32
    close(got, expected, 1e-5)  # products of bfloat16 are exact in float32
    many = jnp.repeat(query, 400, axis=1)
    close(key_weights(many, key, **lengths), 400 * expected, 1e-5)
    np.testing.assert_array_equal(got[1, 5:], 0)


def test_in_linear_memory_with_derivatives_and_vmap():
    query, key, _ = qkv()

    def call(query, key):
        return jnp.sin(key_weights(query, key, is_causal=True, backend="xla")).sum()

    def naive(query, key):
        return jnp.sin(plain(query, key, is_causal=True)).sum()

    close(jax.grad(call, (0, 1))(query, key), jax.grad(naive, (0, 1))(query, key), 1e-5)
    stacked = jnp.stack([key, 2 * key])
    got = jax.vmap(lambda key: key_weights(query, key, backend="xla"))(stacked)
    close(got[1], key_weights(query, 2 * key, backend="xla"), 1e-6)
    long = jax.ShapeDtypeStruct((1, 1 << 17, 1, 64), jnp.float32)
    compiled = jax.jit(lambda q, k: key_weights(q, k, backend="xla")).lower(long, long).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1 << 30  # all scores: 64 GB


def test_wrong_arguments_are_named():
    query, key, _ = qkv()
    for error, words, arguments, options in (
        (TypeError, "dropout_rate", (query, key), {"dropout_rate": 0.1}),
        (
            TypeError,
            "query has dtype float8_e4m3fn; .* float32",
            (query.astype("float8_e4m3fn"), key.astype("float8_e4m3fn")),
            {},
        ),
        (ValueError, "expected equal head dims", (query, key[..., :4]), {"lse": query[..., 0]}),
        (
            ValueError,
            r"lse has shape .* expected \[\*B, T, N\]",
            (query, key),
            {"lse": key[..., 0]},
        ),
        (TypeError, "did you mean softcap", (query, key), {"soft_cap": 3.0}),
    ):
        with pytest.raises(error, match=words):
            key_weights(*arguments, **options)
