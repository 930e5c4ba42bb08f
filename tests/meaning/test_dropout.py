"""Dropout's pattern is the same everywhere: Philox at (batch, head, query, key), to the bit."""

from __future__ import annotations

import ctypes
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import _ops, _philox
from jax_flash._problem import Problem

from .. import fake_warp, numpy_oracle
from ..cases import dropout_words
from ..conftest import with_backends


def pattern(key, *, backend, rate=0.3, batch=(2,), T=37, S=71, N=3, dtype=jnp.float32, **options):
    """Which probabilities survive, read off the output: bool [*B, N, T, S].

    Equal scores make every probability 1/S, and an identity as value lays them open.
    """
    q, k = jnp.zeros((*batch, T, N, 4), dtype), jnp.zeros((*batch, S, N, 4), dtype)
    v = jnp.broadcast_to(jnp.eye(S, dtype=dtype)[:, None], (*batch, S, N, S))
    out = jax_flash.flash_attention(
        q, k, v, dropout_rate=rate, dropout_key=key, backend=backend, **options
    )
    return jnp.swapaxes(out, -3, -2) > 0


def expected(key, *, rate=0.3, batch=(2,), T=37, S=71, N=3):
    words = dropout_words(key)
    rows = [
        [numpy_oracle.dropout_keep(words, rate, b, n, T, S) for n in range(N)]
        for b in range(int(np.prod(batch)))
    ]
    return np.array(rows).reshape(*batch, N, T, S)


@pytest.mark.parametrize("rate", [0.01, 0.3, 0.5, 0.999])
def test_pattern_is_philox(rate, host_backend):
    key = jax.random.key(42)
    got = jax.jit(lambda key: pattern(key, rate=rate, backend=host_backend))(key)
    np.testing.assert_array_equal(got, expected(key, rate=rate))


def test_pattern_over_many_tiles(host_backend):
    key = jax.random.key(2**31 + 5)
    shape = {"batch": (1,), "T": 300, "S": 530, "N": 1}
    np.testing.assert_array_equal(
        pattern(key, backend=host_backend, **shape), expected(key, **shape)
    )


def test_pattern_with_two_batch_dims_in_bfloat16(host_backend):
    key, batch = jax.random.key(3), (2, 3)
    got = pattern(key, batch=batch, T=9, S=14, dtype=jnp.bfloat16, backend=host_backend)
    np.testing.assert_array_equal(got, expected(key, batch=batch, T=9, S=14))


@pytest.mark.parametrize("rate", [0.1, 0.97, 1 - 2**-9])
@pytest.mark.parametrize(
    ("backend", "dims"),
    with_backends([(64, 64), (128, 128), (256, 256), (36, 33)], xla=lambda dims: dims[0] == 36),
)
def test_pattern_and_gradient_s_pattern_in_16_bits(rate, dims, backend):
    """Each column of the value shows the weights of one key, each of dout those of one query."""
    key, T, S, N = jax.random.key(23), 300, 410, 2
    keep = expected(key, rate=rate, batch=(2,), T=T, S=S, N=N)
    dtype = jnp.bfloat16 if dims[0] != 128 else jnp.float16
    q, k = jnp.zeros((2, T, N, dims[0]), dtype), jnp.zeros((2, S, 1, dims[0]), dtype)

    def out(v):
        return jax_flash.flash_attention(
            q, k, v, dropout_rate=rate, dropout_key=key, backend=backend
        )

    @jax.jit
    def both(first):  # of the columns
        eye = jnp.eye(max(S, T) + dims[1], dims[1], k=-first, dtype=dtype)[:, None]
        v = jnp.broadcast_to(eye[:S], (2, S, 1, dims[1]))
        dout = jnp.broadcast_to(eye[:T], (2, T, N, dims[1]))
        got, pull = jax.vjp(out, v)
        return got, pull(dout)[0]

    for first in (0, 160, 300):
        columns = slice(first, first + dims[1])
        got, dv = both(first)
        want = keep[..., columns]  # [B, N, T, keys]
        got = np.swapaxes(np.asarray(got) > 0, 1, 2)[..., : want.shape[-1]]
        np.testing.assert_array_equal(got, want)
        # dv sums over the heads that share a key: the count of those that keep it.
        want = keep[:, :, columns].sum(1).swapaxes(1, 2) / (1 - round(rate * 2**15) / 2**15) / S
        np.testing.assert_allclose(
            np.asarray(dv[:, :, 0, : want.shape[-1]], np.float64), want, rtol=2**-7
        )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_part_of_a_sequence_has_its_part_of_the_pattern(dtype, backend):
    """As strategies of context parallelism ask for: the state says where queries and keys stand."""
    key, rate, N, T, S, query, key_from = jax.random.key(4), 0.4, 3, 70, 64, 48, 80
    keep = expected(key, rate=rate, batch=(2,), T=query + T, S=key_from + S, N=N)
    keep = keep[:, :, query:, key_from:]
    ids = np.indices((2, N)).astype(np.uint32)
    words = np.broadcast_to(np.array(dropout_words(key), np.uint32)[:, None, None], (2, 2, N))
    state = jnp.asarray(np.stack([*words, ids[1], ids[0]], axis=-1))
    state = _philox.of_part(state, jnp.int32(query), jnp.int32(key_from))
    zeros = jnp.zeros((2, T, N, 64), dtype), jnp.zeros((2, S, N, 64), dtype)
    problem = Problem(
        dtype=jnp.dtype(dtype).name, scale=1.0, dropout_rate=rate, terms=("dropout_state",)
    )

    def out(v):
        return _ops.attend(problem, backend, *zeros, v, state)[0]

    v = jnp.broadcast_to(jnp.eye(S, dtype=dtype)[:, None], (2, S, N, 64))
    if backend == "cuda" and dtype == jnp.float32:  # which has no gradient there
        got = jax.jit(out)(v)
    else:
        got, pull = jax.vjp(jax.jit(out), v)
        dout = jnp.broadcast_to(jnp.eye(T, 64, dtype=dtype)[:, None], (2, T, N, 64))
        dv = np.swapaxes(np.asarray(pull(dout)[0]) > 0, 1, 2)  # [B, N, S, queries]
        np.testing.assert_array_equal(dv, keep[:, :, :64].swapaxes(2, 3))
    np.testing.assert_array_equal(np.swapaxes(np.asarray(got) > 0, 1, 2), keep)


def test_raw_key_gives_the_typed_key_s_pattern(host_backend):
    got = pattern(jax.random.PRNGKey(11), backend=host_backend)
    np.testing.assert_array_equal(got, expected(jax.random.key(11)))


def test_vmap_over_the_key_and_over_the_arrays(host_backend):
    keys = jax.random.split(jax.random.key(5), 3)
    got = jax.vmap(lambda key: pattern(key, backend=host_backend))(keys)
    for i in range(3):
        np.testing.assert_array_equal(got[i], expected(keys[i]))
    # A batch that vmap adds is not part of the meaning: each element has its own call's pattern.
    v = jnp.broadcast_to(jnp.eye(31)[:, None], (4, 2, 31, 3, 31))
    zeros = jnp.zeros((2, 31, 3, 4))
    out = jax.vmap(
        lambda v: jax_flash.flash_attention(
            zeros, zeros, v, dropout_rate=0.3, dropout_key=keys[0], backend=host_backend
        )
    )(v)
    for i in range(4):
        np.testing.assert_array_equal(
            jnp.swapaxes(out[i], -3, -2) > 0, expected(keys[0], T=31, S=31)
        )


def test_gradient_uses_the_forward_s_pattern(host_backend):
    """With equal scores out is linear in value, so dv is the transposed pattern exactly."""
    key, T, S = jax.random.key(8), 70, 150
    zeros_q, zeros_k = jnp.zeros((1, T, 2, 4)), jnp.zeros((1, S, 2, 4))

    def out(v):
        return jax_flash.flash_attention(
            zeros_q, zeros_k, v, dropout_rate=0.4, dropout_key=key, backend=host_backend
        )

    v = jnp.ones((1, S, 2, T))
    cotangent = jnp.broadcast_to(jnp.eye(T)[:, None], (1, T, 2, T))
    (dv,) = jax.vjp(out, v)[1](cotangent)
    np.testing.assert_array_equal(
        np.asarray(dv[0]).transpose(1, 2, 0) > 0,
        expected(key, rate=0.4, batch=(1,), T=T, S=S, N=2)[0],
    )


def test_rate_zero_is_no_dropout(host_backend):
    q = jax.random.normal(jax.random.key(0), (1, 20, 2, 8))
    plain = jax_flash.flash_attention(q, q, q, backend=host_backend)
    for key in (None, jax.random.key(1)):
        again = jax_flash.flash_attention(
            q, q, q, dropout_rate=0.0, dropout_key=key, backend=host_backend
        )
        np.testing.assert_array_equal(again, plain)


def test_different_keys_differ(host_backend):
    a = pattern(jax.random.key(0), backend=host_backend)
    b = pattern(jax.random.key(1), backend=host_backend)
    assert 0.4 < (a == b).mean() < 0.75  # independent patterns agree on 0.58 of the places


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_pattern_looks_independent(rate):
    """Mean and pair correlations of 1.5M draws within five standard deviations of chance."""
    keep = expected(jax.random.key(17), rate=rate, batch=(2,), T=512, S=512, N=3)
    exact = round(rate * 2**15) / 2**15
    z = (keep - (1 - exact)) / np.sqrt(exact * (1 - exact))  # mean 0 and variance 1
    pairs = {"mean": z}
    for lag in (*range(1, 34), 64, 128, 256):
        pairs[f"queries {lag} apart"] = z[:, :, lag:] * z[:, :, :-lag]
        pairs[f"keys {lag} apart"] = z[..., lag:] * z[..., :-lag]
        pairs[f"queries and keys {lag} apart"] = z[:, :, lag:, lag:] * z[:, :, :-lag, :-lag]
    pairs["heads"] = z[:, 1:] * z[:, :-1]
    pairs["batch rows"] = z[1:] * z[:-1]
    pairs["transposed"] = z * z.swapaxes(-1, -2) * ~np.eye(512, dtype=bool)
    for name, products in pairs.items():
        deviations = products.sum() / np.sqrt(products.size)
        assert abs(deviations) < 5 * (2**0.5 if name == "transposed" else 1), name


def test_weights_of_one_counter_look_independent():
    """Means, pairs and triples of the sixteen, over 98 304 counters."""
    rate = round(0.2 * 2**15) / 2**15
    keep = expected(jax.random.key(19), rate=rate, batch=(2,), T=512, S=512, N=3)
    z = (keep - (1 - rate)) / np.sqrt(rate * (1 - rate))
    # Heads, q // 16, q // 4 % 4, q % 4, k // 16, k // 8 % 2, k % 8 // 2, k % 2.
    z = z.reshape(6, 32, 4, 4, 32, 2, 4, 2).transpose(2, 5, 7, 0, 1, 3, 4, 6).reshape(16, -1)
    for count in (1, 2, 3):
        for some in itertools.combinations(range(16), count):
            deviations = z[list(some)].prod(axis=0).sum() / np.sqrt(z.shape[1])
            assert abs(deviations) < 5.5, some


def test_rate_is_rounded_to_what_is_drawn(host_backend):
    """The kept weights are scaled by the inverse of the chance that they really have."""
    key, rate = jax.random.key(4), 1.4 / 2**15
    q, v = jnp.zeros((1, 1, 1, 8)), jnp.ones((1, 1, 1, 8))
    out = jax_flash.flash_attention(
        q, q, v, dropout_rate=rate, dropout_key=key, backend=host_backend
    )
    np.testing.assert_allclose(out, 1 / (1 - 2**-15), rtol=1e-7)
    assert not jax_flash.explain(q, q, v, dropout_rate=2.0**-17, dropout_key=key).problem.terms


@pytest.mark.skipif(fake_warp.COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("drops_most", [False, True])
def test_cuda_kernels_draw_the_pattern(drops_most: bool, tmp_path):
    """Their text, run on the host: rows that are queries, rows that are keys, single pairs."""
    library = fake_warp.build(tmp_path, drops_most=drops_most)
    state = np.array([[[5, 6, n, b, 8, 16] for n in range(3)] for b in range(2)], np.uint32)
    batch, head, query, key = 1, 2, 16 * 3, 16 * 5
    few, most = (2**-15, 0.1, 0.5, 0.96875), (31745 / 2**15, 0.99, 1 - 2**-15)
    for rate in most if drops_most else few:
        assert drops_most == (rate > 31 / 32)
        got = np.ones((3, 64, 64), np.float32)
        pointers = [array.ctypes.data_as(ctypes.c_void_p) for array in (state, *got)]
        threshold = round(rate * 2**15) * 0x10001
        library.RunDropout(
            pointers[0], 3, ctypes.c_uint32(threshold), batch, head, query, key, *pointers[1:]
        )
        rows, columns = 32 + query, 64 + key
        keep = numpy_oracle.dropout_keep((5, 6), rate, batch, head, rows + 64, columns + 64)
        keep = keep[rows:, columns:]
        by_query, by_key, by_pair = got
        np.testing.assert_array_equal(by_query[:16], keep[:16], err_msg=str(rate))
        want = np.where(keep[:, :16], 1, -1)
        np.testing.assert_array_equal(by_key[:, :16], want, err_msg=str(rate))
        np.testing.assert_array_equal(by_pair, keep, err_msg=str(rate))


@pytest.mark.parametrize(("start", "words"), [((0, 0), 4), ((32, 48), 6), ((5, 27), 4)])
def test_words_are_drawn_alike_by_weight_and_by_counter(start, words, monkeypatch):
    state = jax.random.bits(jax.random.key(3), (2, 3, words), jnp.uint32)
    state = state.at[..., 4:].set(state[..., 4:] // 4 * 4)  # counters of multiples of 16
    by_weight = _philox.keep_mask(state, 0.3, *start, 37, 71)
    monkeypatch.setattr(_philox, "_FEW", 0)
    by_counter = _philox.keep_mask(state, 0.3, *start, 37, 71)
    np.testing.assert_array_equal(by_weight, by_counter)
    assert 0.6 < np.mean(by_weight) < 0.8
