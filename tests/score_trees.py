"""Functions of scores as hypothesis draws them: trees of what has a text, and what they compute.

A leaf is a name, another node a name and its operands. Values stay near 1, what decides a `where`
is an integer, and denominators are above 1, so that an error of float32 stays one.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from hypothesis import strategies as st
from jax import lax

REACH = 4
# Integers: bounded ones, of both signs, divided and not.
WHOLE = {
    "query": lambda b, h, q, k: q,
    "key": lambda b, h, q, k: k,
    "distance": lambda b, h, q, k: q - k,
    "apart": lambda b, h, q, k: abs(k - q),
    "quotient": lambda b, h, q, k: q // 3,
    "back": lambda b, h, q, k: (k - q) // 4,
    "remainder": lambda b, h, q, k: k % 5 + h,
    "checker": lambda b, h, q, k: (q // 4 + k // 4) % 2,
    "odd": lambda b, h, q, k: lax.rem(q - 2 * k, 3) + b,
    "bits": lambda b, h, q, k: (q ^ k) & 7,
}
LEAVES = ("score", "row", "column", "diagonal", "near", "head", "number", *WHOLE)
ONE = {
    "tanh": jnp.tanh,
    "sin": jnp.sin,
    "cos": jnp.cos,
    "bell": lambda x: jnp.exp(-x * x),
    "exp2": lambda x: jnp.exp2(-jnp.abs(x)),
    "log1p": lambda x: jnp.log1p(jnp.abs(x)),
    "log": lambda x: jnp.log(1.5 + x * x),
    "root": lambda x: jnp.sqrt(x * x + 0.5),
    "rsqrt": lambda x: lax.rsqrt(x * x + 0.5),
    "sigmoid": jax.nn.sigmoid,
    "softplus": jax.nn.softplus,
    "silu": jax.nn.silu,
    "erf": lax.erf,
    "cube": lambda x: lax.integer_pow(jnp.tanh(x), 3),
    "power": lambda x: (1.0 + jnp.abs(x)) ** -0.7,
    "half": lambda x: 0.5 * x - 1.0,
    "clip": lambda x: jnp.clip(x, -0.83, 0.71),
    "thirds": lambda x: x / 3.0,
}
TWO = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": lambda x, y: jnp.tanh(x) * jnp.tanh(y),
    "div": lambda x, y: x / (1.0 + y * y),
    "max": lambda x, y: jnp.maximum(x, y + 0.137),
    "min": lambda x, y: jnp.minimum(x, y - 0.171),
    "atan2": lambda x, y: jnp.arctan2(x, 1.1 + y * y),
}
COMPARES = {"lt": jnp.less, "ge": jnp.greater_equal, "ne": jnp.not_equal}


def trees() -> st.SearchStrategy:
    """Trees of up to a dozen nodes."""
    which = st.tuples(
        st.sampled_from(sorted(COMPARES)),
        st.sampled_from(sorted(WHOLE)),
        st.one_of(st.sampled_from(sorted(WHOLE)), st.integers(-3, 9)),
    )

    def larger(of):
        return st.one_of(
            st.tuples(st.sampled_from(sorted(ONE)), of),
            st.tuples(st.sampled_from(sorted(TWO)), of, of),
            st.tuples(st.just("where"), which, of, of),
        )

    return st.recursive(st.sampled_from(LEAVES), larger, max_leaves=12)


def function_of(tree, rows, table):
    """Returns the function; `rows` is [B, L] for L positions, `table` [N, 2 REACH + 1]."""

    def function(score, batch, head, query, key):
        def whole(x):
            return WHOLE[x](batch, head, query, key) if isinstance(x, str) else x

        def value(x) -> Any:
            match x:
                case "score":
                    return score
                case "row":
                    return rows[batch, query]
                case "column":
                    return rows[batch, key]
                case "diagonal":
                    return table[head, jnp.clip(key - query, -REACH, REACH) + REACH]
                case "near":
                    return table[head, jnp.minimum(jnp.abs(key - query), REACH)]
                case "head":
                    return table[head, 1]
                case "number":
                    return jnp.float32(0.37)
                case str():
                    return 0.05 * jnp.float32(whole(x))
                case "where", (compare, one, other), yes, no:
                    chosen = COMPARES[compare](whole(one), whole(other))
                    return jnp.where(chosen, value(yes), value(no))
                case name, one:
                    return ONE[name](value(one))
                case name, one, other:
                    return TWO[name](value(one), value(other))

        return 0.5 * score + 2.0 * jnp.tanh(value(tree))

    return function
