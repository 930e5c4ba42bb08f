"""jax_flash.scores: the ready-made functions are their formulas, and name wrong arguments."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash import flash_attention, reference, scores

from ..small import N, S, T, close, normal, qkv


def test_ready_made_functions_name_wrong_arguments():
    t5 = functools.partial(scores.relative_position_buckets, np.ones((2, 32)))
    for make, kind, error in (
        (lambda: scores.alibi(np.ones((2, 3))), ValueError, r"slopes has shape \(2, 3\)"),
        (lambda: scores.alibi(np.ones(3, int)), TypeError, "slopes has dtype int"),
        (lambda: scores.relative_position_table(np.ones((2, 4))), ValueError, "an odd last dim"),
        (lambda: scores.relative_position_buckets(np.ones((2, 2))), ValueError, "4 buckets"),
        (lambda: scores.softcap(0.0), ValueError, "cap is 0.0; expected a finite number above 0"),
        (lambda: scores.tanh(jnp.ones(2)), TypeError, r"clip has shape \(2,\)"),
        (lambda: scores.softcap("30"), TypeError, "cap is '30'; expected a Python number"),
        (lambda: scores.tanh(np.ones(3)), TypeError, "clip is an array.*expected a Python number"),
        (lambda: scores.alibi_slopes(0), ValueError, "num_heads is 0"),
        (lambda: scores.alibi_slopes(4.0), TypeError, "num_heads is 4.0; expected an int"),
        (lambda: scores.alibi_slopes(True), TypeError, "num_heads is True; expected an int"),
        (lambda: t5(max_distance=64.0), TypeError, "max_distance is 64.0; expected an int"),
        (lambda: t5(bidirectional=None), TypeError, "bidirectional is None; expected True or "),
        (lambda: scores.distance_decay(np.ones(2), np.ones(3)), ValueError, "expected both"),
        (lambda: scores.compose(3.0), TypeError, "float is composed; expected functions"),
        (
            lambda: scores.compose(scores.alibi(np.ones(2)), scores.alibi(np.ones(3))),
            ValueError,
            "functions of 2 and 3 heads are composed",
        ),
    ):
        with pytest.raises(kind, match=error):
            make()


def test_ready_made_functions_are_their_formulas():
    q, k, v = qkv()
    attend = functools.partial(flash_attention, backend="xla")
    distance = jnp.arange(S) - jnp.arange(T)[:, None]
    slopes, rates, table = scores.alibi_slopes(N), normal(3, N) ** 2, normal(4, N, 7)
    near = table[:, jnp.clip(distance, -3, 3) + 3]

    def by_head(x):
        return jnp.asarray(x)[:, None, None]

    decay = -by_head(rates) * jnp.log1p(2 * by_head(rates) * abs(distance))
    both = scores.compose(scores.relative_position_table(table), scores.softcap(1.5))
    formulas = (
        (scores.alibi(slopes), {"bias": -by_head(slopes) * abs(distance)}),
        (scores.relative_position_table(table), {"bias": near}),
        (scores.distance_decay(rates, 2 * rates), {"bias": decay}),
        (both, {"bias": near, "softcap": 1.5}),
        (scores.tanh(jnp.float32(3)), {"score_mod": lambda s, b, h, i, j: 3 * jnp.tanh(s)}),
    )
    got = jax.jit(lambda: [attend(q, k, v, score_mod=f) for f, _ in formulas])()
    close(got, jax.jit(lambda: [reference.attention(q, k, v, **x) for _, x in formulas])())


def test_buckets_are_those_of_t5():
    """Distances below 8 alone, then by logarithms up to 128; later keys have 16 to 31."""
    f = scores.relative_position_buckets(jnp.arange(32.0)[None])

    def bucket(distance):
        return f(jnp.float32(0), 0, 0, jnp.int32(1000), jnp.int32(1000) + distance)

    got = [int(bucket(d)) for d in (0, -1, -7, -8, -12, -16, -32, -64, -127, -128, -900, 1, 8, 900)]
    assert got == [0, 1, 7, 8, 9, 10, 12, 14, 15, 15, 15, 17, 24, 31]
    f = scores.relative_position_buckets(jnp.arange(32.0)[None], bidirectional=False)

    def bucket(distance):
        return f(jnp.float32(0), 0, 0, jnp.int32(1000), jnp.int32(1000) + distance)

    assert [int(bucket(d)) for d in (5, 0, -15, -16, -127, -900)] == [0, 0, 15, 16, 31, 31]
