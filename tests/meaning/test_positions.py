"""Positions in place of the index: what they mean, at the ends of int32 and in users' programs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import reference

from ..small import normal

B, T, S, N, K, H = 2, 70, 90, 4, 2, 16
LEAST, MOST = -(2**31), 2**31 - 1


def qkv(q_len=T, kv_len=S):
    return normal(0, B, q_len, N, H), normal(1, B, kv_len, K, H), normal(2, B, kv_len, K, H)


def step(backend, **options):
    """A function of q, k, v and positions: out, lse and gradients."""

    def run(q, k, v, **positions):
        def call(q, k, v):
            return jax_flash.flash_attention(
                q, k, v, **positions, **options, return_lse=True, backend=backend
            )

        (out, lse), pull = jax.vjp(call, q, k, v)
        return out, lse, pull((jnp.sin(out), jnp.where(lse > -1e30, lse, 0.0)))

    return jax.jit(run)


def same(got, expected, limit=0.0):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=limit)


def rows(*starts: int, length: int) -> np.ndarray:
    return (np.array(starts)[:, None] + np.arange(length)).astype(np.int32)


@pytest.mark.parametrize(
    "options",
    [{"is_causal": True}, {"local_window_size": (9, 4)}, {"local_window_size": (None, 30)}],
    ids=str,
)
def test_the_index_as_positions_is_the_index(options, host_backend):
    arrays = qkv()
    index = {"query_positions": rows(0, 0, length=T), "key_value_positions": rows(0, 0, length=S)}
    expected = step(host_backend, **options)(*arrays)
    for given in (index, dict([*index.items()][:1]), dict([*index.items()][1:])):
        same(step(host_backend, **options)(*arrays, **given), expected, 2e-6)


@pytest.mark.parametrize("name", ["query_positions", "key_value_positions"])
def test_one_alone_leaves_the_other_at_its_index(name, host_backend):
    arrays = qkv()
    positions = {
        "query_positions": rows(3, -8, length=T), "key_value_positions": rows(20, 5, length=S)
    }  # fmt: skip
    index = {
        "query_positions": rows(0, 0, length=T), "key_value_positions": rows(0, 0, length=S)
    }  # fmt: skip
    run = step(host_backend, is_causal=True, local_window_size=(40, None))
    got = run(*arrays, **{name: positions[name]})
    same(got, run(*arrays, **(index | {name: positions[name]})))


def test_bottom_right_is_positions_by_lengths(host_backend):
    """What a cache's length says of a chunk, its positions say as well."""
    q, k, v = qkv(q_len=12)
    written = np.array([60, 33], np.int32)
    by_length = step(host_backend, is_causal=True, causal_align="bottom_right",
                     key_value_seq_lengths=written)(q, k, v)  # fmt: skip
    positions = rows(*(written - 12), length=12)
    same(step(host_backend, is_causal=True)(q, k, v, query_positions=positions), by_length, 2e-6)


def test_left_padding_is_the_shorter_sequence(host_backend):
    padding = 30
    q, k, v = qkv(kv_len=T)
    # What padding holds reaches no one.
    q, k, v = (x.at[1, :padding].set(jnp.nan) for x in (q, k, v))
    positions = rows(0, -padding, length=T)
    keys = np.where(positions < 0, MOST, positions)
    run = step(host_backend, is_causal=True, local_window_size=(25, None))
    out, lse, gradients = run(q, k, v, query_positions=positions, key_value_positions=keys)
    assert (np.asarray(out[1, :padding]) == 0).all()
    assert np.isneginf(lse[1, :padding]).all()
    tail = [x[1:, padding:] for x in (q, k, v)]
    expected = run(*tail)
    same([x[1:, padding:] for x in (out, lse, *gradients)], expected, 2e-6)
    same([x[1:, :padding] for x in gradients], [np.zeros_like(x[1:, :padding]) for x in gradients])


@pytest.mark.parametrize("shards", [2, 4])
def test_striped_shards_merge_to_the_whole(shards, host_backend):
    """Each device has every n-th token: partial results by positions are those of the sequence."""
    q, k, v = (x[:, :64] for x in qkv(kv_len=T))
    options = {"is_causal": True, "local_window_size": (37, None)}
    expected, *_ = step(host_backend, **options)(q, k, v)
    at = np.broadcast_to(np.arange(64, dtype=np.int32), (B, 64))
    run = step(host_backend, **options)
    for mine in range(shards):
        own = slice(mine, None, shards)
        outs, lses = [], []
        for theirs in range(shards):
            keys = slice(theirs, None, shards)
            out, lse, _ = run(
                q[:, own], k[:, keys], v[:, keys],
                query_positions=at[:, own], key_value_positions=at[:, keys],
            )  # fmt: skip
            outs.append(out)
            lses.append(lse)
        weights = jax.nn.softmax(jnp.stack(lses), axis=0)[..., None]
        same(jnp.sum(weights * jnp.stack(outs), axis=0), expected[:, own], 2e-6)


FAR = [
    (LEAST, MOST), (MOST, LEAST), (LEAST, LEAST), (MOST, MOST), (0, MOST), (0, LEAST), (-1, MOST),
    (LEAST, -1), (1, LEAST), (MOST, 0), (LEAST, 0), (5, 7),
]  # fmt: skip
SIDES = [0, 1, 2, 2**31 - 2, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1, 2**32, 2**40, None]


@pytest.mark.parametrize("which", ["left", "right"])
def test_differences_of_any_two_positions_are_exact(which, host_backend):
    """One query and one key for a batch row: seen, or not, as in integers without bounds."""
    queries, keys = (np.array(x, np.int32)[:, None] for x in zip(*FAR, strict=True))
    q = jnp.ones((len(FAR), 1, 1, 8))
    for side in SIDES:
        window = (side, None) if which == "left" else (None, side)
        lses = [
            call(q, q, q, local_window_size=window, query_positions=queries,
                 key_value_positions=keys, return_lse=True, **backend)[1]
            for call, backend in (
                (jax_flash.flash_attention, {"backend": host_backend}), (reference.attention, {})
            )
        ]  # fmt: skip
        ahead = [(b - a) if which == "right" else (a - b) for a, b in FAR]
        expected = [side is None or x <= side for x in ahead]
        for lse in lses:
            np.testing.assert_array_equal(np.isfinite(lse[:, 0, 0]), expected, err_msg=f"{side}")


def test_positions_without_causality_or_a_window_mean_nothing(host_backend):
    arrays = qkv()
    positions = {"query_positions": rows(5, 0, length=T)}
    expected = step(host_backend)(*arrays)
    same(step(host_backend)(*arrays, **positions), expected)
    # Nor does a window that no distance exceeds.
    wide = step(host_backend, local_window_size=(2**32 - 1 + 1, 2**40))
    same(wide(*arrays, **positions), expected)


@pytest.mark.parametrize("dtype", ["uint32", "int64", "uint64", "int8", "uint16"])
def test_integers_of_any_dtype(dtype):
    """A number of a jax.Array that int32 cannot hold counts as the nearest that it can."""
    arrays = qkv()
    numbers = np.linspace(0, min(np.iinfo(dtype).max, 2**40), S).astype(dtype)
    with jax.enable_x64(True):
        keys = jnp.broadcast_to(jnp.asarray(numbers), (B, S))
        assert keys.dtype == dtype
        out = jax_flash.flash_attention(*arrays, is_causal=True, key_value_positions=keys)
    nearest = np.broadcast_to(numbers.astype(np.uint64).clip(0, MOST).astype(np.int32), (B, S))
    want = jax_flash.flash_attention(*arrays, is_causal=True, key_value_positions=nearest)
    np.testing.assert_array_equal(out, want)


def test_lists_are_taken():
    q, k, v = qkv(q_len=2, kv_len=3)
    got = jax_flash.flash_attention(
        q, k, v, is_causal=True, query_positions=[[0, 1], [5, -1]],
        key_value_positions=[[0, 1, 2]] * 2,
    )  # fmt: skip
    want = reference.attention(
        q, k, v, is_causal=True, query_positions=np.array([[0, 1], [5, -1]]),
        key_value_positions=np.array([[0, 1, 2]] * 2),
    )  # fmt: skip
    np.testing.assert_allclose(got, want, atol=2e-6)


def test_scan_remat_and_second_derivatives(host_backend):
    """A prompt that is read in chunks, the positions carried by a scan."""
    q, k, v = qkv(q_len=60)
    chunks = jnp.moveaxis(q.reshape(B, 4, 15, N, H), 1, 0)

    def by_chunks(k):
        @jax.checkpoint
        def attend(start, chunk):
            positions = jnp.broadcast_to(start + jnp.arange(15, dtype=jnp.int32), (B, 15))
            out = jax_flash.flash_attention(
                chunk, k, v, is_causal=True, query_positions=positions, backend=host_backend
            )
            return start + 15, out

        _, outs = jax.lax.scan(attend, jnp.int32(0), chunks)
        return jnp.sum(jnp.sin(outs))

    def whole(k):
        return jnp.sum(jnp.sin(jax_flash.flash_attention(q, k, v, is_causal=True, backend="xla")))

    direction = normal(5, *k.shape)
    got, expected = (
        jax.jit(lambda k, f=f: jax.jvp(jax.value_and_grad(f), (k,), (direction,)))(k)
        for f in (by_chunks, whole)
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)


def test_the_cuda_kernels_take_them(uncompiled):
    q = jax.ShapeDtypeStruct((B, T, N, 64), "bfloat16")
    positions = jax.ShapeDtypeStruct((B, T), "int32")
    told = jax_flash.explain(q, q, q, is_causal=True, query_positions=positions, gpu="H200")
    assert not any("positions" in x for x in told.forward.refusals.get("cuda", ()))
    assert "query_positions" in str(told)
    # Where they mean nothing, no backend hears of them.
    told = jax_flash.explain(q, q, q, query_positions=positions, gpu="H200")
    assert "query_positions" not in str(told)
