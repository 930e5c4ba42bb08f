"""Functions of scores that have every primitive with a CUDA text, and their texts."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_flash import _function, scores
from jax_flash._gpu import emit

ARGUMENTS = {"score": "float32", **dict.fromkeys(("batch", "head", "query", "key"), "int32")}
N, R = 4, 5
TABLE = np.asarray(jax.random.normal(jax.random.key(0), (N, 2 * R + 1)))
INTEGERS = np.asarray(jax.random.randint(jax.random.key(1), (2, 7), -9, 9))


def traced(f):
    return _function.trace("score_mod", f, ARGUMENTS, "float32")


def texts(functions) -> tuple[str, list]:
    """The CUDA of functions, value_i and slope_i, and of each the arrays that it reads."""
    text, arrays = "", []
    for i, f in enumerate(functions):
        function, captured = traced(f)
        assert emit.cannot(function, with_slope=True) == ()
        small = i % 2 == 0
        text += emit.define(function, f"value_{i}", small=small)
        text += emit.define(function, f"slope_{i}", small=small, with_slope=True)
        text += emit.define(function, f"scaled_{i}", small=small, scales=True)
        arrays.append([np.ascontiguousarray(x) for x in captured])
    return emit.with_helpers(text), arrays


def of_floats(f):
    return lambda s, b, h, q, k: f(s)


def of_integers(f):
    """Calls f with integers of both signs and the ends of int32; adds the score for a slope."""

    def function(s, b, h, q, k):
        x, y = q - 11, k - 17
        x = jnp.where(q == 3, -(2**31), jnp.where(q == 4, 2**31 - 1, x))
        result = f(x, y)
        result = result % 1000 if result.dtype != jnp.bool_ else result
        return jnp.where(jnp.isfinite(s), s, 0.0) + result.astype(jnp.float32)

    return function


FLOATS = (
    *(jnp.exp, jnp.exp2, jnp.expm1, jnp.tanh, jnp.sin, jnp.cos, jnp.tan, jnp.arctan, jnp.sinh),
    *(jnp.cosh, jnp.arcsinh, lax.erf, lax.erfc, jnp.abs, jnp.floor, jnp.ceil, jnp.round, jnp.sign),
    *(jnp.cbrt, jax.nn.relu, jax.nn.silu, jax.nn.sigmoid, jax.nn.softplus, jnp.isfinite),
    lambda x: jnp.log(jnp.abs(x) + 0.1),
    lambda x: jnp.log1p(x * x),
    lambda x: jnp.sqrt(jnp.abs(x) + 0.5),
    lambda x: lax.rsqrt(x * x + 0.5),
    lambda x: x**3 + x**-2 + (x * x + 0.3) ** 1.7 + jnp.square(x),
    lambda x: jnp.clip(x, -1.0, 2.0) + jnp.maximum(x, 0.5) * jnp.minimum(-x, x + 1.0),
    lambda x: jnp.arctan2(x, 0.7) + x / (1.0 + x * x) + x / 3.0,
    lambda x: lax.rem(x, 1.5) - lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO),
    lambda x: jnp.where(x > 1, jnp.nan, jnp.where(x < -2, -jnp.inf, 3 * x)),
    lambda x: lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint32) >> 1, jnp.float32),
    lambda x: (x * 1e9).astype(jnp.int32) % 77 + (x * 1e9).astype(jnp.uint32) % 78 + 0.5 * x,
    lambda x: jnp.full((), 2.5),
)
WHOLE = (
    *(jnp.add, jnp.subtract, jnp.multiply, jnp.maximum, jnp.minimum, lax.div, lax.rem),
    *(jnp.floor_divide, jnp.remainder, jnp.less, jnp.greater_equal, jnp.equal),
    *(jnp.bitwise_and, jnp.bitwise_or, jnp.bitwise_xor, lax.shift_left),
    *(lax.shift_right_arithmetic, lax.shift_right_logical),
    lambda x, y: jnp.abs(x) + jnp.sign(y) - (-x) + ~y + x * x,
    lambda x, y: (x < y) & (x > 3) | ~(y == 2) ^ (x != y),
    lambda x, y: x.astype(jnp.uint32) // 7 + (y.astype(jnp.uint32) << 3),
    lambda x, y: lax.select_n(jnp.clip(x, 0, 2), x, y, x + y),
    lambda x, y: jnp.where(x < y, x // 3, x % 5) + jnp.float32(x).astype(jnp.int32),
)
READS = (
    lambda s, b, h, q, k: s + jnp.asarray(TABLE)[h, jnp.clip(k - q, -R, R) + R],
    lambda s, b, h, q, k: s * jnp.asarray(TABLE)[h][k - q],  # wraps, and is brought to the ends
    lambda s, b, h, q, k: s + jnp.take(jnp.asarray(TABLE)[0], k - q),  # NaN beyond
    lambda s, b, h, q, k: s + jnp.asarray(TABLE).at[h, q].get(mode="fill", fill_value=0.25),
    lambda s, b, h, q, k: s + jnp.asarray(TABLE).T.at[q, h].get(mode="clip"),
    lambda s, b, h, q, k: jnp.where(jnp.asarray(INTEGERS)[b, q] == INTEGERS[0, 0], s, -2 * s),
    lambda s, b, h, q, k: s + jnp.exp(jnp.asarray(TABLE))[h, 1] * jnp.float32(TABLE[0, 0]),
    lambda s, b, h, q, k: s + jnp.sum(jnp.asarray(TABLE)[h, :3] * jnp.arange(3.0)),
    lambda s, b, h, q, k: jax.nn.silu(s) + jnp.sum(jnp.asarray(TABLE)[h, :3] * jnp.tanh(s)),
    lambda s, b, h, q, k: jnp.where((jnp.asarray(INTEGERS) > 0)[b, k], s, 0.5),
    lambda s, b, h, q, k: s + jnp.asarray(TABLE)[jnp.array([h, 1]), jnp.array([0, q])].sum(),
    scores.alibi(TABLE[:, 0]),
    scores.relative_position_buckets(jnp.asarray(TABLE), max_distance=9),
    scores.distance_decay(TABLE[:, 0] ** 2, TABLE[:, 1] ** 2),
    scores.compose(scores.alibi(TABLE[:, 0]), scores.softcap(3.0), scores.tanh(2.0)),
    scores.softcap(jnp.float32(3.0)),
)
# Operations that are rounded, which a fused product, a reciprocal or another order would not be;
# of jax.numpy, and of numpy, which does one after the other (XLA multiplies by reciprocals).
ROUNDED = (
    lambda n, s, h, d: (s + 12582912.0) - 12582912.0 + n.float32(0.1) * d,
    lambda n, s, h, d: s + ((n.float32(0.1) * d + 1e8) - 1e8),
    lambda n, s, h, d: 4097.0 * s - (4097.0 * s - s),  # its first twelve bits
    lambda n, s, h, d: s * s - abs(s) * abs(s),
    lambda n, s, h, d: n.floor(41.0 * d / 41.0) + s / 3.0,
    lambda n, s, h, d: n.floor(s / n.asarray(TABLE)[h, 0]) + n.floor(d / 0.3),
    lambda n, s, h, d: n.floor(3.0 * (d * d + 1.0) / (d * d + 1.0)) + 0.0 * s,
    lambda n, s, h, d: s / n.asarray([0.0, n.inf, 3.0, -7.0], n.float32)[h],
)


def rounded(f):
    return lambda s, b, h, q, k: f(jnp, s, h, jnp.float32(k - q))


# Which have numbers of both signs in what both sides of a query know.
LITERALS = (
    lambda s, b, h, q, k: s - jnp.where(k > q, -1.0, 0.5),
    lambda s, b, h, q, k: s + jax.nn.sigmoid(jnp.where(k > q, -4.0, 4.0)),
    lambda s, b, h, q, k: s + jax.nn.log_sigmoid(jnp.where(k > q, -4.0, 4.0)),
    lambda s, b, h, q, k: s + jnp.exp(-jnp.where(k > q, -4.0, 4.0)),
    lambda s, b, h, q, k: s + -(jnp.minimum(k, -1)).astype(jnp.float32),
)


def drawn_line(seed: int):
    """A random function of numbers that the side of the query decides, or its head."""
    near = (
        jnp.negative, jnp.abs, jnp.sign, jax.nn.sigmoid, jax.nn.relu, jnp.tanh, jnp.floor,
        lambda x: jnp.exp(-jnp.abs(x)), lambda x: 1.0 / (x * x + 1.0), lambda x: -x * 0.7,
        lambda x: jnp.where(x < 0.0, -x, x), lambda x: lax.integer_pow(x, 2),
    )  # fmt: skip
    pairs = (jnp.add, jnp.subtract, jnp.maximum, jnp.minimum, lambda x, y: jnp.tanh(x * y))

    def function(s, b, h, q, k):
        choose = random.Random(seed)
        numbers = [-2.5, -1.0, -0.0, 0.5, 3.0, -7e-9]
        floats = [jnp.where(k > q, *choose.sample(numbers, 2)) for _ in range(3)]
        floats.append(jnp.minimum(k, -1).astype(jnp.float32))
        floats.append(jnp.asarray(TABLE)[h, 1])
        for _ in range(6):
            floats.append(choose.choice(near)(choose.choice(floats)))
            floats.append(choose.choice(pairs)(choose.choice(floats), choose.choice(floats)))
        apart = k - q, jnp.float32(k) - jnp.float32(q)
        return s + choose.choice((1.0, *apart)) * jnp.clip(floats[-1], -40.0, 40.0)

    return function


def drawn(seed: int):
    """A random function of the primitives, whose values stay near 1."""
    near = (
        lambda x: jnp.tanh(x), lambda x: jnp.sin(x), lambda x: jnp.exp(-x * x),
        lambda x: 0.5 * x, lambda x: jnp.log1p(jnp.abs(x)), lambda x: jnp.sqrt(x * x + 1.0),
        lambda x: lax.integer_pow(jnp.cos(x), 3), lambda x: jax.nn.sigmoid(x),
    )  # fmt: skip
    pairs = (jnp.add, jnp.subtract, jnp.maximum, jnp.minimum, lambda x, y: jnp.tanh(x * y))
    whole = (
        jnp.add,
        jnp.subtract,
        jnp.minimum,
        lambda x, y: x * 3 - y,
        lambda x, y: x % (y * y + 2),
    )

    def function(s, b, h, q, k):
        choose = random.Random(seed)
        floats, ints = [jnp.where(jnp.isfinite(s), s, 1.0)], [b, h, q, k]
        for _ in range(12):
            kind = choose.randrange(7)
            if kind == 0:
                ints.append(choose.choice(whole)(choose.choice(ints), choose.choice(ints)))
            elif kind == 1:
                floats.append(jnp.tanh(0.05 * choose.choice(ints)))
            elif kind == 2:
                at = choose.choice(ints), choose.choice(ints)
                floats.append(jnp.asarray(TABLE)[at])
            elif kind == 3:
                one, other = choose.choice(floats), choose.choice(floats)
                floats.append(jnp.where(choose.choice(ints) < choose.choice(ints), one, other))
            elif kind == 4:
                ordered = choose.choice(ints) < choose.choice(ints)
                floats.append(-jnp.where(ordered, -1.5, choose.choice((-0.0, 0.25, -3.0))))
            elif kind == 5:
                floats.append(choose.choice(near)(choose.choice(floats)))
            else:
                floats.append(choose.choice(pairs)(choose.choice(floats), choose.choice(floats)))
        return floats[-1] + 0.1 * floats[0]

    return function
