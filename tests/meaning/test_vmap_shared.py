"""vmap over the query alone: the same as a loop over the members, with every derivative."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

import jax_flash

from ..cases import BOTTOM_RIGHT
from ..small import close, normal
from .vmap_members import (
    ARRAYS,
    KERNELS_COPY,
    TERMS,
    B,
    H,
    K,
    M,
    N,
    S,
    T,
    arrays_of,
    call_of,
    gradients_of,
    member,
    moving_of,
    qkv,
    summed,
)

# ---- the same as a loop ------------------------------------------------------------------------


@pytest.mark.parametrize("name", TERMS)
def test_each_member_has_its_own_gradients(name):
    arrays, axes = arrays_of(name)
    call = call_of("cpu", is_causal=True, causal_align=BOTTOM_RIGHT)
    step = gradients_of(call, moving_of(arrays))
    got = jax.jit(jax.vmap(step, in_axes=(axes,)))(arrays)
    one = jax.jit(step)
    rows = [one(member(arrays, axes, i)) for i in range(M)]
    close(got, jax.tree.map(lambda *x: jnp.stack(x), *rows))


# Members become heads for every backend alike. On backend "xla" what each member has of its own may
# stay beside them, as may calls for which kernels would copy the keys.
OWN_WITH_XLA = ("own bias of keys", "own mask", "own sinks", "own dropout", *sorted(KERNELS_COPY))


@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, "cpu") for name in TERMS] + [(name, "xla") for name in OWN_WITH_XLA],
)
def test_gradients_of_the_sum_over_the_members(name, backend):
    arrays, axes = arrays_of(name)
    call = call_of(backend, softcap=5.0)
    got, _ = jax.jit(gradients_of(summed(call, axes), moving_of(arrays)))(arrays)
    one = jax.jit(gradients_of(call_of("cpu", softcap=5.0), moving_of(arrays)))
    rows = [one(member(arrays, axes, i))[0] for i in range(M)]
    for name in got:
        x = jnp.stack([row[name] for row in rows])
        close(got[name], x.sum(0) if axes[name] is None else x)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_members_of_16_bits(dtype, host_backend):
    """Out, gradients of the sum and tangents, as those of float32 from the same numbers."""
    arrays, axes = arrays_of("plain", dtype=dtype)

    def every(backend, arrays):
        call = call_of(backend, is_causal=True)

        def attend(arrays):
            return jax.vmap(call, in_axes=(axes,))(arrays)[1]

        gradients, (out, _) = gradients_of(summed(call, axes), ARRAYS)(arrays)
        return gradients, out, jax.jvp(attend, (arrays,), (arrays,))[1]

    got = jax.jit(functools.partial(every, host_backend))(arrays)
    wide = {name: x.astype(jnp.float32) for name, x in arrays.items()}
    # Weights, out and dout are rounded: each by half a unit in the last place.
    close(got, jax.jit(functools.partial(every, "cpu"))(wide), rtol=2 * jnp.finfo(dtype).eps)


@pytest.mark.parametrize(
    ("mapped", "backend"),
    [
        *((mapped, "cpu") for mapped in (("key",), ("value",), ("query", "key"))),
        *((mapped, "xla") for mapped in (("key",), ("query", "value"))),
    ],
    ids=str,
)
def test_what_is_not_mapped_has_the_sum_of_the_gradients(mapped, backend):
    arrays, _ = arrays_of("plain")
    arrays["query"] = arrays["query"][0]
    arrays = {
        name: jnp.stack([x * (1 + 0.1 * i) for i in range(M)]) if name in mapped else x
        for name, x in arrays.items()
    }
    axes = {name: 0 if name in mapped else None for name in arrays}
    call = call_of(backend)
    got, _ = jax.jit(gradients_of(summed(call, axes), ARRAYS))(arrays)
    one = jax.jit(gradients_of(call_of("cpu"), ARRAYS))
    rows = [one(member(arrays, axes, i))[0] for i in range(M)]
    for name in ARRAYS:
        x = jnp.stack([row[name] for row in rows])
        close(got[name], x.sum(0) if axes[name] is None else x)


@pytest.mark.parametrize(
    ("heads", "backend"),
    [((1, 1), "cpu"), ((6, 6), "cpu"), ((6, 3), "cpu"), ((6, 3), "xla")],
    ids=str,
)
def test_heads(heads, backend):
    q, k, v = qkv(heads=heads)
    bias = normal(3, heads[0], T, S)
    axes = {"query": 0, "key": None, "value": None, "bias": None}
    arrays = {"query": q, "key": k, "value": v, "bias": bias}
    call = call_of(backend, is_causal=True)
    got, _ = jax.jit(gradients_of(summed(call, axes), tuple(arrays)))(arrays)
    one = jax.jit(gradients_of(call_of("cpu", is_causal=True), tuple(arrays)))
    rows = [one(member(arrays, axes, i))[0] for i in range(M)]
    close(got["query"], jnp.stack([row["query"] for row in rows]))
    for name in ("key", "value", "bias"):
        close(got[name], sum(row[name] for row in rows))


@pytest.mark.parametrize(
    ("size", "backend"), [(0, "cpu"), (1, "cpu"), (3, "cpu"), (0, "xla"), (3, "xla")]
)
@pytest.mark.parametrize("in_axis", [0, 2, -1])
def test_axes_and_sizes(size, in_axis, backend):
    q, k, v = qkv()
    call = functools.partial(jax_flash.flash_attention, is_causal=True, backend=backend)
    moved = jnp.moveaxis(q[:size], 0, in_axis)
    got = jax.vmap(call, in_axes=(in_axis, None, None), out_axes=in_axis)(moved, k, v)
    expected = [call(x, k, v) for x in q[:size]]
    assert got.shape == moved.shape
    close(jnp.moveaxis(got, in_axis, 0), jnp.stack(expected) if size else jnp.zeros_like(q[:0]))

    def loss(k):
        return jnp.sum(jax.vmap(call, in_axes=(0, None, None))(q[:size], k, v))

    def by_rows(k):
        return sum((jnp.sum(call(x, k, v)) for x in q[:size]), jnp.zeros(()))

    close(jax.grad(loss)(k), jax.grad(by_rows)(k))


@pytest.mark.parametrize("outer_first", [True, False])
def test_nested(outer_first, host_backend):
    """One axis of the query alone, and one of the query with key, value and lengths."""
    q, k, v = qkv()
    q = jnp.stack([q, 2 * q, -q])  # [3, M, ...]
    k, v = (jnp.stack([x, 2 * x, -x]) for x in (k, v))
    lengths = jnp.array([[S, 3], [4, 5], [0, 9]])

    def call(q, k, v, lengths):
        return jax_flash.flash_attention(
            q, k, v, key_value_seq_lengths=lengths, backend=host_backend
        )

    shared, mapped = (0, None, None, None), (0, 0, 0, 0)
    if outer_first:
        got = jax.vmap(jax.vmap(call, shared), mapped)(q, k, v, lengths)
    else:
        q = jnp.swapaxes(q, 0, 1)
        got = jax.vmap(jax.vmap(call, mapped), shared)(q, k, v, lengths)
        got, q = (jnp.swapaxes(x, 0, 1) for x in (got, q))
    expected = [[call(x, k[i], v[i], lengths[i]) for x in q[i]] for i in range(3)]
    close(got, jnp.array(expected))


def test_nested_over_the_query_twice(host_backend):
    q, k, v = qkv()
    q = jnp.stack([q, 2 * q, -q])
    mask = normal(4, 3, B, N, T, S) > -0.5

    def call(q, k, mask):
        return jax_flash.flash_attention(q, k, v, mask=mask, backend=host_backend)

    def loss(attention):
        return lambda k: jnp.sum(jnp.sin(attention(k)))

    both = jax.vmap(jax.vmap(call, (0, None, None)), (0, None, 0))

    def rows(k):  # a loop over one program: 3 M of them would be compiled
        return jax.lax.map(
            lambda of: jax.lax.map(lambda q: call(q, k, of["mask"]), of["q"]),
            {"q": q, "mask": mask},
        )

    close(both(q, k, mask), rows(k))
    got, want = (jax.jit(jax.grad(loss(f)))(k) for f in (lambda k: both(q, k, mask), rows))
    close(got, want)


# ---- derivatives -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("moving", "backend"),
    [
        (("query",), "cpu"),
        (("query", "key", "value"), "cpu"),
        (("query", "key", "value"), "xla"),
    ],
    ids=str,
)
def test_forward_mode(moving, backend):
    """jvp of vmap and vmap of jvp, with tangents that are the members' own and that are not."""
    arrays, axes = arrays_of("plain")
    call = call_of(backend, is_causal=True)
    fixed = {name: x for name, x in arrays.items() if name not in moving}
    primals = {name: arrays[name] for name in moving}
    tangents = {name: normal(10 + i, *primals[name].shape) for i, name in enumerate(moving)}

    def along(arrays, primals, tangents):
        return jax.jvp(lambda x: call(arrays | x), (primals,), (tangents,))

    one = jax.jit(along)
    rows = [
        one(*(member(x, axes, i) for x in (fixed, primals, tangents))) for i in range(M)
    ]  # fmt: skip
    expected = jax.tree.map(lambda *x: jnp.stack(x), *rows)
    got = jax.jit(along_members(call, axes))(fixed, primals, tangents)
    close(got, expected)
    of = {name: axes[name] for name in fixed}, {name: axes[name] for name in moving}
    got = jax.jit(jax.vmap(along, in_axes=(*of, of[1])))(fixed, primals, tangents)
    close(got, expected)
    # Tangents of the members' own, at primals that are one for all.
    first = member(arrays, {"query": 0, "key": None, "value": None}, 0)
    own = {name: normal(20 + i, M, *first[name].shape) for i, name in enumerate(moving)}
    at = {name: first[name] for name in fixed}, {name: first[name] for name in moving}
    got = jax.jit(jax.vmap(along, in_axes=(None, None, 0)))(*at, own)
    rows = [one(*at, {name: x[i] for name, x in own.items()}) for i in range(M)]
    close(got, jax.tree.map(lambda *x: jnp.stack(x), *rows))


def along_members(call, axes):
    def along(arrays, primals, tangents):
        mapped = jax.vmap(call, in_axes=(axes,))
        return jax.jvp(lambda x: mapped(arrays | x), (primals,), (tangents,))

    return along


@pytest.mark.parametrize(
    ("over_reverse", "backend"), [("forward", "cpu"), ("forward", "xla"), ("reverse", "cpu")]
)
def test_second_derivatives(over_reverse, backend):
    """By the key that all members share, along one direction: forward and reverse over reverse."""
    arrays, axes = arrays_of("sinks")
    call = call_of(backend)
    direction = normal(11, B, S, K, H)

    def members(k):
        return summed(call, axes)(arrays | {"key": k})[0]

    def rows(k):  # a loop over one program: M of them would be compiled
        moved = arrays | {"key": k}
        return jnp.sum(jax.lax.map(lambda q: call(moved | {"query": q})[0], moved["query"]))

    def way(loss):
        if over_reverse == "forward":
            return jax.jit(lambda k: jax.jvp(jax.grad(loss), (k,), (direction,))[1])
        return jax.jit(jax.grad(lambda k: jnp.vdot(jax.grad(loss)(k), direction)))

    close(way(members)(arrays["key"]), way(rows)(arrays["key"]), rtol=1e-4)


@pytest.mark.parametrize("length", [1, 5])
def test_gradient_of_a_plain_sum(length, host_backend):
    """Its cotangent is a constant, which XLA may join with the sum over the members."""
    q, k, v = normal(0, 3, 2, length, 4, 64), normal(1, 2, 130, 2, 64), normal(2, 2, 130, 2, 64)

    def total(q, k, v):
        attend = functools.partial(jax_flash.flash_attention, key=k, value=v, backend=host_backend)
        return jnp.sum(jax.vmap(attend)(q))

    dv = jax.jit(jax.grad(total, 2))(q, k, v)
    # Each key's weights, of all queries that read it: as many as there are, in each column.
    close(jnp.sum(dv, 1), jnp.full((2, 2, 64), 6.0 * length))
