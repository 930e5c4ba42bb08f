"""Merging results over parts of the keys is attention over all of them, and its gradients."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash import flash_attention, merge

from ..cases import widest_dtype
from ..small import normal

B, T, S, N, K, H = 2, 9, 30, 4, 2, 8
EPS = np.finfo(np.float32).eps


def parts(seed: int, empty: float = 0.0) -> tuple[jax.Array, jax.Array]:
    """A result of some rows, of which a share sees no key."""
    out, lse = normal(seed, B, T, N, H), 3 * normal(seed + 100, B, T, N)
    hidden = jax.random.bernoulli(jax.random.key(seed + 200), empty, lse.shape)
    return jnp.where(hidden[..., None], 0, out), jnp.where(hidden, -jnp.inf, lse)


def assert_close(got, expected, ulps: float):
    """Equal to so many roundings of the largest value; -inf where it is."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape
        np.testing.assert_array_equal(np.isneginf(a), np.isneginf(b))
        a, b = (np.where(np.isneginf(x), 0, x) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=0, atol=ulps * EPS * max(1, np.abs(b).max()))


def in_float64(*results):
    """The merge of all, as sums of weights and of weighted values."""
    outs, lses = zip(*results, strict=True)
    lse = np.logaddexp.reduce(np.asarray(lses, np.float64), axis=0)
    weights = [np.exp(np.asarray(x, np.float64) - np.where(np.isneginf(lse), 0, lse)) for x in lses]
    return sum(
        w[..., None] * np.asarray(x, np.float64) for w, x in zip(weights, outs, strict=True)
    ), lse


@pytest.mark.parametrize("empty", [0.0, 0.5])
def test_it_is_associative_and_commutative(empty: float):
    a, b, c = parts(0, empty), parts(1, empty), parts(2, empty)
    assert_close(merge(a, b), merge(b, a), 0)
    left, right = merge(merge(a, b), c), merge(a, merge(b, c))
    assert_close(left, right, 8)
    assert_close(left, in_float64(a, b, c), 8)
    assert_close(merge(a, b, c), left, 8)


def test_an_empty_part_changes_nothing():
    some = parts(0, 0.3)
    garbage = jnp.full_like(some[0], jnp.nan), jnp.full_like(some[1], -jnp.inf)
    for one, other in ((some, garbage), (garbage, some)):
        out, lse = merge(one, other)
        np.testing.assert_array_equal(out, some[0])
        np.testing.assert_array_equal(lse, some[1])
    for alone in ((garbage,), (garbage, garbage, garbage)):
        out, lse = merge(*alone)
        assert not out.any()
        assert (lse == -jnp.inf).all()


@pytest.mark.parametrize("distance", [0.0, 60.0, 200.0, 1e30])
def test_lse_of_any_size(distance: float):
    (a, x), (b, y) = parts(0), parts(1)
    one, other = (a, x + distance), (b, y - distance)
    assert_close(merge(one, other), in_float64(one, other), 8)


@pytest.mark.parametrize("with_nan", [False, True])
def test_gradients_of_rows_with_empty_parts_hold_no_nan(with_nan: bool):
    a, b = parts(0, 0.5), parts(1, 0.5)
    if with_nan:
        b = jnp.where((b[1] == -jnp.inf)[..., None], jnp.nan, b[0]), b[1]

    def loss(a, b):
        out, lse = merge(a, b)
        return jnp.sum(out**2) + jnp.sum(jnp.where(lse == -jnp.inf, 0.0, jnp.sin(lse)))

    for (dout, dlse), (_, lse) in zip(jax.grad(loss, (0, 1))(a, b), (a, b), strict=True):
        assert np.isfinite(dout).all()
        assert np.isfinite(dlse).all()
        hidden = lse == -jnp.inf
        assert not dlse[hidden].any()
        assert not dout[hidden].any()
        assert dlse[~hidden].all()


def split(q, k, v, cuts: tuple[int, ...], backend: str | None, first: dict[str, Any], **options):
    """Attention in parts of the keys; the first of them has `first` among its options."""
    edges = [0, *cuts, k.shape[-3]]
    results = []
    for i, (low, high) in enumerate(itertools.pairwise(edges)):
        own = {
            name: x[..., low:high] if name in ("mask", "bias", "key_value_segment_ids") else x
            for name, x in options.items()
        }
        if "key_value_seq_lengths" in own:
            own["key_value_seq_lengths"] = own["key_value_seq_lengths"] - low
        own |= first if i == 0 else {}
        keys, values = k[..., low:high, :, :], v[..., low:high, :, :]
        results.append(flash_attention(q, keys, values, return_lse=True, backend=backend, **own))
    return merge(*results)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "lengths": {"key_value_seq_lengths": np.array([30, 11]), "query_seq_lengths": np.array([9, 4])},
    "no keys": {"key_value_seq_lengths": np.array([0, 12])},
    "segments": {
        "query_segment_ids": np.arange(B * T).reshape(B, T) % 3,
        "key_value_segment_ids": np.sort(np.arange(B * S).reshape(B, S) % 4),
    },
    "sparse mask": {
        "mask": np.random.default_rng(0).random((B, 1, T, S)) < 0.05,
    },
    "bias": {"bias": np.random.default_rng(1).standard_normal((B, N, T, S)).astype(np.float32)},
}


@pytest.mark.parametrize(
    ("name", "cuts", "sink", "backend"),
    [
        *((name, (0, 10, 20), None, "cpu") for name in OPTIONS),
        ("plain", (13,), None, "xla"),
        ("plain", (13,), 0.5, "xla"),
        ("no keys", (0, 10, 20), 0.5, "cpu"),  # rows that see the sink alone
        ("sparse mask", (0, 10, 20), -np.inf, "cpu"),
        ("bias", (10, 20), 0.5, "cpu"),
    ],
)
def test_keys_in_parts_are_the_whole(
    name: str, cuts: tuple[int, ...], sink: float | None, backend: str
):
    options = {option: jnp.asarray(x) for option, x in OPTIONS[name].items() if option != "softcap"}
    static = {option: x for option, x in OPTIONS[name].items() if option == "softcap"}
    floats = {"query": normal(0, B, T, N, H), "key": normal(1, B, S, K, H)}
    floats["value"] = normal(2, B, S, K, H)
    floats |= {"bias": options.pop("bias")} if "bias" in options else {}
    floats |= {} if sink is None else {"sinks": jnp.full((N,), sink)}
    dout, dlse = normal(3, B, T, N, H), normal(4, B, T, N)

    def loss(attend, floats):
        out, lse = attend(**floats)
        finite = jnp.where(lse == -jnp.inf, 0.0, lse)
        return jnp.sum(out * dout) + jnp.sum(finite * dlse), (out, lse)

    def whole(query, key, value, **terms):
        return flash_attention(
            query, key, value, return_lse=True, backend=backend, **terms, **options, **static
        )

    def in_parts(query, key, value, sinks=None, **terms):
        return split(
            query, key, value, cuts, backend, {"sinks": sinks}, **terms, **options, **static
        )

    step = functools.partial(jax.grad, argnums=1, has_aux=True)
    expected = jax.jit(functools.partial(step(loss), whole))(floats)
    got = jax.jit(functools.partial(step(loss), in_parts))(floats)
    assert_close(got, expected, 64)


def test_results_of_half_precision_are_merged_in_float32():
    """Out is rounded once, however many parts there are."""
    narrow = [(x.astype(jnp.bfloat16), lse) for x, lse in map(parts, range(5))]
    wide = [(x.astype(jnp.float32), lse) for x, lse in narrow]
    out, lse = merge(*narrow)
    assert out.dtype == jnp.bfloat16
    assert lse.dtype == jnp.float32
    np.testing.assert_array_equal(out, merge(*wide)[0].astype(jnp.bfloat16))
    truth, true_lse = in_float64(*narrow)
    np.testing.assert_allclose(out.astype(jnp.float32), truth, atol=2**-8 * np.abs(truth).max())
    np.testing.assert_allclose(lse, true_lse, atol=1e-5)


def test_wrong_parts_are_named():
    out, lse = parts(0)
    calls: Any = (
        ("merge has no part",),
        (r"parts\[1\] is tuple of length 3; expected a pair", (out, lse), (out, lse, lse)),
        (r"parts\[0\] is ArrayImpl", out, lse),
        (r"out of parts\[0\] has dtype int32", (out.astype(int), lse)),
        (r"lse of parts\[0\] has dtype bfloat16", (out, lse.astype(jnp.bfloat16))),
        (r"lse of parts\[0\] has shape \(2, 4, 9\)", (out, jnp.swapaxes(lse, 1, 2))),
        (r"out of parts\[1\] has shape \(1, 9, 4, 8\)", (out, lse), (out[:1], lse[:1])),
    )
    for message, *wrong in calls:
        with pytest.raises((TypeError, ValueError), match=message):
            merge(*wrong)


@pytest.mark.parametrize("keys", [0, 3])
def test_partial_results_merge_with_a_sink(keys, backend):
    """Softmax over two sets of keys, by out and lse of each: also where one set is empty."""
    dtype = widest_dtype(backend)
    q, k, v = (normal(i, 1, 5, 2, 16).astype(dtype) for i in range(3))
    sinks = jnp.array([0.3, -2.0])

    def merged(sinks, k):
        call = functools.partial(
            flash_attention, return_lse=True, backend=backend if keys else None
        )
        out, lse = call(q, k[:, :keys], v[:, :keys], sinks=sinks)
        other, other_lse = flash_attention(
            q, k[:, keys:], v[:, keys:], return_lse=True, backend=backend
        )
        total = jnp.logaddexp(lse, other_lse)
        out = out * jnp.exp(lse - total)[..., None] + other * jnp.exp(other_lse - total)[..., None]
        return jnp.sum(jnp.sin(out)) + jnp.sum(total), out

    def whole(sinks, k):
        out, lse = flash_attention(q, k, v, sinks=sinks, return_lse=True, backend=backend)
        out = out.astype(jnp.float32)
        return jnp.sum(jnp.sin(out)) + jnp.sum(lse), out

    limit = 1e-5 if dtype == "float32" else 3e-2
    got, want = (
        jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))(sinks, k) for f in (merged, whole)
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=limit, atol=limit
        )
