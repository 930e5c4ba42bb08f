"""Functions of scores that read arrays by the distance of query and key, which are read once for a
diagonal, beside those that only look so, and those whose arrays have copies.

Derivatives are compared with reference.attention, which evaluates each pair.
"""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash import _platform, flash_attention, reference, scores

from ..small import close, integers, normal

B, T, S, N, K, H = 2, 21, 17, 4, 2, 8
attend = functools.partial(flash_attention, backend="xla")


@pytest.fixture(scope="module")
def qkv():
    return normal(0, B, T, N, H), normal(1, B, S, K, H), normal(2, B, S, K, H)


STARTS = jnp.array([3, -2])


def of_rows_and_heads(table):
    flat = jnp.stack([table, 2 * table])

    def function(score, batch, head, query, key):
        near = flat[batch, head, jnp.minimum(jnp.abs(query - key), 8)]
        return score * jnp.exp(0.1 * near) + jax.nn.relu(near - jnp.where(key > query, 0.2, 0.1))

    return function


def of_started_rows(table):
    def function(score, batch, head, query, key):
        behind = query + STARTS[batch] - (key - 1)
        return score + table[head, jnp.clip(behind // 2, 0, 8)]

    return function


def of_sums(table):
    """A network of one hidden layer of the distance."""

    def function(score, batch, head, query, key):
        hidden = jnp.tanh(0.3 * table[head] * (key - query) + table[0])
        return score + jnp.dot(hidden, table[1]) + jnp.sum(hidden * score)

    return function


def of_distance_alone(table):
    return lambda score, batch, head, query, key: table[head, jnp.clip(3 * (key - query), 0, 8)]


def of_bent_distances(table):
    """None of which is one number along a diagonal."""

    def function(score, batch, head, query, key):
        ends = jnp.maximum(query, 3) - key, 2 * query - key, query * 2 - key * 3, query ^ key
        bent = sum(table[head, jnp.clip(end, 0, 8)] for end in ends)
        return score + bent + table[head, key % 9] * table[head, jnp.int32(score) & 7]

    return function


FUNCTIONS = {
    "table": scores.relative_position_table,
    "buckets": lambda table: scores.compose(
        scores.relative_position_buckets(table[:, :8], max_distance=9), scores.softcap(1.5)
    ),
    "rows and heads": of_rows_and_heads,
    "started rows": of_started_rows,
    "sums": of_sums,
    "distance alone": of_distance_alone,
    "bent": of_bent_distances,
}
OPTIONS = {
    "all": {},
    "causal": {"is_causal": True},
    "lengths": {"key_value_seq_lengths": jnp.array([5, S]), "local_window_size": (3, 6)},
    "segments": {
        "query_segment_ids": jnp.sort(integers(3, (B, T), 0, 3)),
        "key_value_segment_ids": jnp.sort(integers(4, (B, S), 0, 3)),
    },
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_and_their_own(name, qkv):
    table, by = normal(5, N, 9), normal(6, N, 9)

    @functools.partial(jax.jit, static_argnums=0)
    def derivatives(attention, table, by):
        def of(options):
            def loss(q, table):
                out = attention(q, *qkv[1:], score_mod=FUNCTIONS[name](table), **options)
                return jnp.sum(out * jnp.cos(jnp.arange(out.size).reshape(out.shape)))

            gradient = jax.grad(loss, argnums=(0, 1))
            arguments = qkv[0], table
            return jax.value_and_grad(loss, argnums=(0, 1))(*arguments), jax.jvp(
                gradient, arguments, (jnp.ones_like(qkv[0]), by)
            )[1]

        return {kind: of(options) for kind, options in OPTIONS.items()}

    close(derivatives(attend, table, by), derivatives(reference.attention, table, by), rtol=2e-5)


def test_values_are_the_elements_that_are_read():
    """Over several tiles: a query that sees one key has its logit for lse, to the bit."""
    t, s, reach = 700, 650, 600
    table, place = normal(3, 2, 2 * reach + 1), integers(4, (t,), 0, s)
    nothing, value = jnp.zeros((1, t, 2, H)), normal(5, 1, s, 2, H)
    _, lse = attend(
        nothing,
        jnp.zeros((1, s, 2, H)),
        value,
        mask=jnp.arange(s) == place[:, None],
        score_mod=scores.relative_position_table(table),
        return_lse=True,
    )
    distance = np.clip(place - np.arange(t), -reach, reach)
    np.testing.assert_array_equal(lse[0], table[:, distance + reach].T)


def test_gradients_over_several_tiles():
    """The tiles overlap, as 512 divides neither length."""
    q, table = normal(0, 1, 700, 2, H), normal(3, 2, 9)
    k, v = normal(1, 1, 650, 1, H), normal(2, 1, 650, 1, H)

    def loss(attention, table):
        score_mod = scores.relative_position_table(table)
        return jnp.sum(jnp.sin(attention(q, k, v, score_mod=score_mod, is_causal=True)))

    step = jax.jit(jax.grad(loss, argnums=1), static_argnums=0)
    close(step(attend, table), step(reference.attention, table), rtol=1e-4)


def test_members_of_vmap_have_tables_of_their_own(qkv):
    tables = normal(3, 3, N, 9)

    def step(table):
        def loss(table):
            out = attend(*qkv, score_mod=scores.relative_position_table(table), is_causal=True)
            return jnp.sum(out**2)

        return jax.grad(loss)(table)

    close(jax.jit(jax.vmap(step))(tables), jnp.stack([jax.jit(step)(x) for x in tables]))


def test_hidden_diagonals_reach_no_array(qkv):
    """The logarithm of what is 0 or less for the keys after a query: -inf, then NaN."""
    rates = normal(3, N, 5) ** 2 + 0.5

    def loss(attention, clipped, rates):
        def score_mod(score, batch, head, query, key):
            behind = query - key + 1
            behind = jnp.maximum(behind, 1) if clipped else behind
            return score + 0.1 * score * jnp.sum(jnp.log(rates[head] * behind) * rates[0])

        out = attention(*qkv, score_mod=score_mod, is_causal=True)
        return jnp.sum(jnp.sin(out))

    def derivatives(attention, clipped):
        gradient = jax.grad(functools.partial(loss, attention, clipped))
        return gradient(rates), jax.jvp(gradient, (rates,), (rates,))[1]

    got = jax.jit(lambda: derivatives(attend, False))()
    close(got, jax.jit(lambda: derivatives(reference.attention, True))(), rtol=2e-5)


def of_positions(table):
    places = jnp.stack([(5 * jnp.arange(700)) % 13, (3 * jnp.arange(700)) % 7])

    def function(score, batch, head, query, key):
        apart = places[batch, key] - places[batch, query]
        return score * (1 + 0.1 * table[head, jnp.clip(apart, -4, 4) + 4])

    return function


@pytest.mark.parametrize("make", [of_positions, of_bent_distances])
def test_each_key_has_a_copy_on_a_gpu(make, qkv, monkeypatch):
    table, by = normal(5, N, 9), normal(6, N, 9)

    def derivatives(attention):
        def loss(table):
            out = attention(*qkv, score_mod=make(table), **OPTIONS["segments"])
            return jnp.sum(jnp.sin(out))

        return jax.value_and_grad(loss)(table), jax.jvp(jax.grad(loss), (table,), (by,))[1]

    want = jax.jit(lambda: derivatives(reference.attention))()
    monkeypatch.setattr(_platform, "is_gpu", lambda: True)
    close(jax.jit(lambda: derivatives(attend))(), want, rtol=2e-5)


@pytest.mark.parametrize("name", ["table", "bent", "positions"])
def test_what_gradients_of_arrays_add_on_a_gpu(name):
    """The most updates at once, and the elements that they are added to."""
    t = 512
    q = jax.ShapeDtypeStruct((1, t, 2, H), jnp.float32)
    make = (FUNCTIONS | {"positions": of_positions})[name]

    def loss(q, table):
        return jnp.sum(attend(q, q, q, score_mod=make(table)))

    traced = jax.jit(jax.grad(loss, argnums=1)).trace(q, jnp.zeros((2, 9)))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    operands = re.findall(r"stablehlo\.scatter.*?\}\) : \((.*?)\) ->", text, re.DOTALL)
    sizes = []
    for types in operands:
        into, _, updates = re.findall(r"tensor<([\dx]+)x[a-z]", types)
        sizes.append(tuple(math.prod(map(int, x.split("x"))) for x in (updates, into)))
    assert (
        max(sizes)
        == {
            "table": (2 * (t + t), 2 * 9),
            "bent": (2 * t * t, t * 2 * 9),
            "positions": (2 * t * t, t * 2 * 9),
        }[name]
    )
