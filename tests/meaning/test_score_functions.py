"""flash_attention(..., score_mod=f): what f may read, its derivatives, which functions are one.

Conformance beside float64 is in the table of cases (conformance_cases.py); the CUDA text has
test_score_emission.py, the ready-made functions test_scores.py.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_flash import explain, flash_attention, reference, scores

from .. import small
from ..devices import mesh_of
from ..small import normal

P = PartitionSpec
B, T, S, N, K, H = 2, 13, 19, 4, 2, 8
attend = functools.partial(flash_attention, backend="xla")


@pytest.fixture(scope="module")
def qkv():
    return normal(0, B, T, N, H), normal(1, B, S, K, H), normal(2, B, S, K, H)


def gate(table):
    """Reads the batch row and the head, with a derivative that is JAX's own, not the formula's."""

    def function(score, batch, head, query, key):
        return jax.nn.relu(score - table[head, batch]) + table[head, 2] * jnp.sin(query - key)

    return function


def close(got, want, atol=2e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol, rtol=1e-4), got, want)


def test_derivatives_of_both_modes_and_their_own(qkv):
    table = normal(3, N, 3)
    moved = (*qkv, table)
    by = tuple(normal(4 + i, *x.shape) for i, x in enumerate(moved))

    def loss(attention, q, k, v, table):
        out = attention(q, k, v, score_mod=gate(table), is_causal=True)
        return jnp.sum(out * jnp.cos(jnp.arange(out.size).reshape(out.shape)))

    def derivatives(attention):
        f = functools.partial(loss, attention)
        gradient = jax.grad(f, argnums=(0, 1, 2, 3))

        def along(*x):
            return sum(jnp.vdot(g, d) for g, d in zip(gradient(*x), by, strict=True))

        return gradient(*moved), jax.jvp(f, moved, by), jax.grad(along, argnums=(0, 3))(*moved)

    close(
        jax.jit(lambda: derivatives(attend))(), jax.jit(lambda: derivatives(reference.attention))()
    )


def test_derivatives_of_sums_over_an_array(qkv):
    """Whose derivative by the score reads arrays that it makes: of ones."""
    q, k, v = qkv

    def loss(attention, q, rates):
        def polynomial(s, b, h, i, j):
            return jax.nn.silu(s) + jnp.sum(rates * s ** jnp.arange(3))

        return jnp.sum(attention(q, k, v, score_mod=polynomial) ** 2)

    def plain(q, rates):
        def polynomial(s, b, h, i, j):
            return s / (1 + jnp.exp(-s)) + rates[0] + s * (rates[1] + s * rates[2])

        return jnp.sum(reference.attention(q, k, v, score_mod=polynomial) ** 2)

    def step(f):
        return jax.value_and_grad(f, argnums=(0, 1))(q, jnp.array([1.0, -0.3, 0.1]))

    close(jax.jit(lambda: step(functools.partial(loss, attend)))(), jax.jit(lambda: step(plain))())


@pytest.mark.parametrize("written_out", [True, False])
def test_second_derivatives_through_a_rule_of_the_users(written_out, qkv):
    """What a rule says of the value has derivatives of its own, those of f if it calls f."""

    @jax.custom_jvp
    def f(x):
        return jnp.sin(x)

    @f.defjvp
    def _(primals, tangents):
        (x,), (t,) = primals, tangents
        return jnp.sin(x) if written_out else f(x), 2.0 * jnp.cos(x) * t

    def hessian_product(attention, *arguments):
        def loss(q, k, rate):
            def score_mod(s, b, h, i, j):
                return f(rate * s) + f(rate)

            return jnp.sum(jnp.sin(attention(q, k, qkv[2], score_mod=score_mod)))

        return jax.jvp(jax.grad(loss, argnums=(0, 1, 2)), arguments, arguments)

    arguments = *qkv[:2], jnp.float32(0.7)
    got, want = (
        jax.jit(functools.partial(hessian_product, attention))(*arguments)
        for attention in (attend, reference.attention)
    )
    close(got, want)


def test_members_of_vmap_have_queries_and_arrays_of_their_own(qkv):
    q, k, v = qkv
    tables, queries = normal(3, 3, N, 3), normal(4, 3, B, T, N, H)

    @jax.jit
    def step(q, table):
        def f(q, table):
            return jnp.sum(attend(q, k, v, score_mod=gate(table)) ** 2)

        return jax.grad(f, argnums=(0, 1))(q, table)

    for axes in ((0, 0), (0, None), (None, 0)):
        given = (queries if axes[0] == 0 else q, tables if axes[1] == 0 else tables[0])
        want = [
            step(*(x[i] if axis == 0 else x for x, axis in zip(given, axes, strict=True)))
            for i in range(3)
        ]
        got = jax.jit(jax.vmap(step, in_axes=axes))(*given)
        close(got, jax.tree.map(lambda *x: jnp.stack(x), *want), atol=1e-4)


def test_arrays_may_be_narrow_integers_or_computed_within(qkv):
    q, k, v = qkv
    table, rows = normal(3, N, 3).astype(jnp.bfloat16), jnp.arange(B * S).reshape(B, S) % 3

    def narrow(score, batch, head, query, key):
        return score * jnp.exp(table)[head, 1] + table[head, rows[batch, key]]

    wide = table.astype(jnp.float32)

    def plain(score, batch, head, query, key):
        return score * jnp.exp(table)[head, 1] + wide[head, rows[batch, key]]

    got = jax.jit(lambda: attend(q, k, v, score_mod=narrow))()
    close(got, jax.jit(lambda: reference.attention(q, k, v, score_mod=plain))())

    # Many scores share an element: their gradients are summed in float32, then rounded once.
    def f(table):
        return jnp.sum(
            attend(q, k, v, score_mod=lambda s, b, h, i, j: s + table[h, rows[b, j]]) ** 2
        )

    got, want = (jax.jit(jax.grad(f))(x) for x in (table, wide))
    np.testing.assert_array_equal(got, want.astype(jnp.bfloat16))


def test_nothing_hidden_reaches_a_gradient(qkv):
    """log of a distance that is negative for hidden pairs: NaN, in every derivative."""
    q, k, v = qkv
    key = jnp.arange(S)

    def loss(attention, q, rate, bias, **arguments):
        out = attention(q, k, v, bias=bias, is_causal=True, **arguments)
        return jnp.sum(out[:, 1:] ** 2)

    def with_function(q, rate):
        def f(score, batch, head, query, key):
            return score - rate * jnp.log1p(1.0 * query - key)

        return loss(attend, q, rate, None, score_mod=f)

    def with_bias(q, rate):
        distance = jnp.maximum(jnp.arange(T)[:, None] - key, 0)
        return loss(reference.attention, q, rate, -rate * jnp.log1p(distance))

    got, want = (jax.jit(jax.grad(f, argnums=(0, 1)))(q, 0.7) for f in (with_function, with_bias))
    close(got, want)


@pytest.mark.parametrize("hides", ["lengths", "causality"])
def test_nothing_hidden_reaches_an_array_that_is_read_by_rows(hides, qkv):
    """NaN in what keys have, and rows of zeros, whose logarithm and norm have no derivative."""
    q, k, v = qkv
    u, rows, own = normal(3, 5), normal(4, S, 5), 2.0 + 0.3 * normal(5, B, S, 5)
    last = S - 3 if hides == "lengths" else T
    options = {
        "lengths": {"key_value_seq_lengths": jnp.full(B, last)},
        "causality": {"is_causal": True},
    }[hides]

    def loss(attention, spoilt, u, rows, own, q):
        rows = rows.at[last:].set(jnp.nan if spoilt else 1.0)
        own = own.at[:, last:].set(0.0 if spoilt else 1.0)

        def score_mod(s, b, h, i, j):
            unit = own[b, j] / jnp.sqrt(jnp.sum(own[b, j] ** 2))
            near = jnp.sum(jnp.log(own[b, j] ** 2) * u) + jnp.dot(unit, rows[i])
            return s + jnp.dot(rows[j], u) + jnp.sum(rows[j] * u) + near + jnp.sum(u * s)

        return jnp.sum(attention(q, k, v, score_mod=score_mod, **options) ** 2)

    def derivatives(attention, spoilt):
        arguments = u, rows, own, q
        gradient = jax.grad(functools.partial(loss, attention, spoilt), argnums=(0, 1, 2, 3))
        return gradient(*arguments), jax.jvp(gradient, arguments, arguments)[1]

    got = jax.jit(lambda: derivatives(attend, True))()
    want = jax.jit(lambda: derivatives(reference.attention, False))()
    small.close(got, want, rtol=1e-4)


def test_a_score_of_minus_infinity_hides_a_key_and_its_nan(qkv):
    q, k, v = qkv

    def f(score, batch, head, query, key):
        return jnp.where(key == 3, -jnp.inf, score)

    step = jax.value_and_grad(lambda v: jnp.sum(attend(q, k, v, score_mod=f) ** 2))
    mask = jnp.arange(S) != 3
    want = jax.value_and_grad(lambda v: jnp.sum(reference.attention(q, k, v, mask=mask) ** 2))(v)
    close(step(v.at[:, 3].set(jnp.nan)), want)


# ---- which functions are one ---------------------------------------------------------------------


def problem_of(f):
    q = jax.ShapeDtypeStruct((B, T, N, H), jnp.float32)
    return explain(q, q, q, score_mod=f).problem


def test_functions_are_one_where_they_compute_the_same():
    def scaled(by):
        return lambda score, batch, head, query, key: score * by + 0.5

    def cap(slope):
        @jax.custom_jvp
        def f(x):
            return jnp.minimum(x, 3.0)

        f.defjvps(lambda t, ans, x: slope * t)
        return lambda score, batch, head, query, key: f(score)

    assert problem_of(scaled(2.0)) == problem_of(scaled(2.0))
    assert hash(problem_of(scaled(2.0))) == hash(problem_of(scaled(2.0)))
    assert problem_of(scaled(2.0)) != problem_of(scaled(np.nextafter(np.float32(2), 3)))
    assert problem_of(scaled(2.0)) != problem_of(None)
    # The values of arrays are operands, so that a step of training compiles nothing.
    slopes = scores.alibi_slopes(N)
    assert problem_of(scores.alibi(slopes)) == problem_of(scores.alibi(2 * slopes))
    assert problem_of(cap(1.0)) == problem_of(cap(1.0))
    assert problem_of(cap(1.0)) != problem_of(cap(0.5))  # in their derivative alone


def test_functions_that_differ_in_a_constant_share_no_program(qkv):
    q, k, v = qkv
    programs = [
        jax.jit(lambda q, c=c: attend(q, k, v, score_mod=scores.softcap(c))) for c in (1, 4)
    ]
    for program, cap in zip(programs, (1, 4), strict=True):
        close(program(q), reference.attention(q, k, v, softcap=cap))


# ---- transformations -----------------------------------------------------------------------------


def step_of(q, k, v, table):
    def f(*x):
        return jnp.sum(attend(*x[:3], score_mod=gate(x[3]), is_causal=True) ** 2)

    return jax.value_and_grad(f, argnums=(0, 1, 2, 3))(q, k, v, table)


@pytest.fixture(scope="module")
def of_one_device():
    given = normal(5, 8, 12, 4, 8), normal(6, 8, 16, 2, 8), normal(7, 8, 16, 2, 8), normal(8, 4, 9)
    return given, jax.jit(step_of)(*given)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("shape", [(8, 1), (2, 4)])
def test_devices_see_their_own_rows_and_heads(shape, kind, of_one_device):
    given, want = of_one_device
    mesh = mesh_of(shape, kind is AxisType.Explicit)
    spec = P("data", None, "model", None)
    specs = (spec, *[P("data", None, "model" if shape[1] == 1 else None)] * 2, P())
    with jax.set_mesh(mesh):
        arrays = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(given, specs, strict=True)
        ]
        got = jax.jit(step_of)(*arrays)
    close(jax.tree.map(np.asarray, got), want, atol=1e-4)


def test_devices_of_shard_map_count_their_own(of_one_device):
    (q, k, v, table), _ = of_one_device
    mesh = mesh_of((2, 4))
    spec = P("data")

    def loss(table, attention):
        @jax.shard_map(mesh=mesh, in_specs=(spec, spec, spec, P()), out_specs=spec)
        def sharded(q, k, v, table):
            return attention(q, k, v, table)

        return jnp.sum(sharded(q, k, v, table) ** 2)

    def by_rows(q, k, v, table):
        halves = [attend(*(x[i : i + 4] for x in (q, k, v)), score_mod=gate(table)) for i in (0, 4)]
        return jnp.concatenate(halves)

    got = jax.jit(jax.grad(loss), static_argnums=1)(
        table, lambda q, k, v, table: attend(q, k, v, score_mod=gate(table))
    )
    want = jax.jit(jax.grad(lambda table: jnp.sum(by_rows(q, k, v, table) ** 2)))(table)
    close(got, want, atol=1e-4)


def test_under_remat_and_scan(qkv):
    q, k, v = qkv
    tables = normal(3, 3, N, 3)

    def layer(x, table):
        return x + attend(x, k, v, score_mod=gate(table)), None

    def loss(wrap, tables):
        return jnp.sum(jax.lax.scan(wrap(layer), q, tables)[0] ** 2)

    def unrolled(tables):
        x = q
        for table in tables:
            x, _ = layer(x, table)
        return jnp.sum(x**2)

    want = jax.jit(jax.grad(unrolled))(tables)
    for wrap in (jax.checkpoint, lambda x: x):
        close(jax.jit(jax.grad(functools.partial(loss, wrap)))(tables), want, atol=1e-4)
