"""vmap over the query alone: its members share key and value, which are not copied for each."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_flash
from jax_flash import _native

from ..cases import BOTTOM_RIGHT
from ..small import close, integers, normal

P = PartitionSpec
# M and S appear in no other size of a program: an array with both is a copy for every member.
M, B, T, S, N, K, H = 7, 2, 5, 22, 4, 2, 8
ARRAYS = ("query", "key", "value")


def qkv(dtype=jnp.float32, heads=(N, K)) -> tuple[jax.Array, jax.Array, jax.Array]:
    return (
        normal(0, M, B, T, heads[0], H, dtype=dtype),
        normal(1, B, S, heads[1], H, dtype=dtype),
        normal(2, B, S, heads[1], H, dtype=dtype),
    )


def segments(seed: int, *shape: int) -> jax.Array:
    return integers(seed, shape, 0, 2)


# Optional operands, and which of them every member has for itself.
TERMS = {
    "plain": ({}, ()),
    "bias of rows": ({"bias": normal(3, B, 1, T, S)}, ()),
    "bias of heads": ({"bias": normal(3, 1, N, 1, S)}, ()),
    "own bias": ({"bias": normal(3, M, B, N, T, S)}, ("bias",)),
    "own bias of keys": ({"bias": normal(3, M, B, 1, 1, S)}, ("bias",)),
    "mask": ({"mask": normal(4, B, 1, T, S) > -0.5}, ()),
    "own mask": ({"mask": normal(4, M, B, 1, 1, S) > -0.5}, ("mask",)),
    "lengths": (
        {
            "query_seq_lengths": jnp.array([T, 2]),
            "key_value_seq_lengths": jnp.array([S, 0]),
        },
        (),
    ),
    "own lengths": (
        {"key_value_seq_lengths": segments(5, M, B) * 9 + 4},
        ("key_value_seq_lengths",),
    ),
    "segments": (
        {"query_segment_ids": segments(6, B, T), "key_value_segment_ids": segments(7, B, S)},
        (),
    ),
    "own segments": (
        {"query_segment_ids": segments(6, M, B, T), "key_value_segment_ids": segments(7, B, S)},
        ("query_segment_ids",),
    ),
    "positions": (
        {"query_positions": segments(6, B, T) * 9, "key_value_positions": segments(7, B, S) * 5},
        (),
    ),
    "own positions": ({"query_positions": segments(6, M, B, T) * 9}, ("query_positions",)),
    "sinks": ({"sinks": normal(8, N)}, ()),
    "own sinks": ({"sinks": normal(8, M, N)}, ("sinks",)),
    "dropout": ({"dropout_key": jax.random.key(9)}, ()),
    "own dropout": ({"dropout_key": jax.random.split(jax.random.key(9), M)}, ("dropout_key",)),
}
KERNELS_COPY = {
    "own lengths",
    "own segments",
    "own positions",
}  # a kernel has these for a batch row


def call_of(backend, **options):
    """A function of a dict of arrays: a loss, and out with lse."""

    def call(arrays):
        rate = 0.3 if "dropout_key" in arrays else 0.0
        placed = {}
        if "query_positions" in arrays:
            placed = {"causal_align": "top_left", "local_window_size": (12, 6)}
        out, lse = jax_flash.flash_attention(
            **arrays, **(options | placed), dropout_rate=rate, return_lse=True, backend=backend
        )
        seen = jnp.where(lse > -1e30, lse, 0.0)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))) + jnp.sum(seen**2), (out, lse)

    return call


def arrays_of(name: str, mapped=("query",), dtype=jnp.float32):
    """The arrays of a case, and the in_axes of vmap."""
    terms, own = TERMS[name]
    arrays = dict(zip(ARRAYS, qkv(dtype), strict=True)) | terms
    return arrays, {name: 0 if name in (*mapped, *own) else None for name in arrays}


def moving_of(arrays) -> list[str]:
    return [name for name in (*ARRAYS, "bias", "sinks") if name in arrays]


def member(arrays, axes, i: int):
    def of(x):  # by NumPy, where it can: jax.Array's index compiles programs
        own = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return x[i] if own else jax.device_put(np.asarray(x)[i])

    return {name: x if axes[name] is None else of(x) for name, x in arrays.items()}


def gradients_of(call, wrt):
    """A function of a dict of arrays: the gradients to those of `wrt`, and out with lse."""

    def gradients(arrays):
        fixed = {name: x for name, x in arrays.items() if name not in wrt}
        moving = {name: arrays[name] for name in wrt}
        return jax.grad(lambda moving: call(fixed | moving), has_aux=True)(moving)

    return gradients


def summed(call, axes):
    """The loss of all members together."""

    def total(arrays):
        losses, results = jax.vmap(call, in_axes=(axes,))(arrays)
        return jnp.sum(losses), results

    return total


def shapes_in(program: str) -> list[tuple[int, ...]]:
    """The shape of every array in a program, in StableHLO or optimized HLO."""
    found = re.findall(r"tensor<((?:\d+x)+)\w+>|\b[a-z]+\d+\[([\d,]+)\]", program)
    return [tuple(map(int, re.split("[x,]", (a or b).strip("x,")))) for a, b in found]


def copies(program: str) -> list[tuple[int, ...]]:
    """The arrays as large as a key for every member; with one number of each member and key."""
    shapes = shapes_in(program)
    assert (B, S, K, H) in shapes
    return [x for x in shapes if S in x and H in x and np.prod(x) >= M * B * S * K * H]


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


# ---- no copies ---------------------------------------------------------------------------------

ORDERS = {
    "forward": lambda call, axes: jax.vmap(call, in_axes=(axes,)),
    "gradients of the sum": lambda call, axes: gradients_of(summed(call, axes), ARRAYS),
    "own gradients to the query": lambda call, axes: jax.vmap(
        gradients_of(call, ("query",)), in_axes=(axes,)
    ),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", sorted(TERMS.keys() - KERNELS_COPY))
def test_keys_and_values_are_not_copied(name, order):
    arrays, axes = arrays_of(name)
    compiled = jax.jit(ORDERS[order](call_of("cpu"), axes)).lower(arrays).compile()
    assert copies(compiled.as_text()) == []


@pytest.mark.parametrize("name", TERMS)
def test_blockwise_copies_nothing_for_any_operand(name):
    arrays, axes = arrays_of(name)
    compiled = jax.jit(ORDERS["forward"](call_of("xla"), axes)).lower(arrays).compile()
    assert copies(compiled.as_text()) == []


@pytest.mark.parametrize("name", sorted(KERNELS_COPY))
def test_what_a_kernel_knows_of_a_batch_row_alone_costs_the_copy(name):
    """That `copies` sees one; and docs/derivatives.md says so."""
    arrays, axes = arrays_of(name)
    compiled = jax.jit(ORDERS["forward"](call_of("cpu"), axes)).lower(arrays).compile()
    assert copies(compiled.as_text()) != []


def test_a_large_bias_is_not_copied_either():
    """A bias with several heads, one for all members, cannot join the heads without a copy."""
    q, k, _ = (x[..., :1, :, :, :] for x in qkv())
    bias = normal(3, N, T, S)  # 4 * 5 * 22 numbers; key and value have 2 * 22 * 2 * 8

    def attend(q, k, bias):
        return jax_flash.flash_attention(q, k, k, bias=bias, backend="cpu")

    mapped = jax.jit(jax.vmap(attend, in_axes=(0, None, None)))
    small = mapped.lower(q, k, bias).compile().as_text()
    assert (1, S, K, H) in shapes_in(small)
    q, bias = normal(0, M, 1, 10 * T, N, H), normal(3, N, 10 * T, S)
    large = mapped.lower(q, k, bias).compile().as_text()
    assert not [x for x in shapes_in(large) if 10 * T in x and S in x and np.prod(x) > bias.size]


@pytest.mark.skipif(_native.available("cuda") is not None, reason=f"{_native.available('cuda')}")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["plain", "lengths", "segments", "sinks", "own sinks"])
def test_cuda_kernels_share_them(name, order):
    arrays, axes = arrays_of(name, dtype=jnp.bfloat16)
    traced = jax.jit(ORDERS[order](call_of(None), axes)).trace(arrays)
    program = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "jax_flash_cuda_forward" in program
    assert ("jax_flash_cuda_backward" in program) == (order != "forward")
    assert copies(program) == []
    assert (B, T, N * M, H) in shapes_in(program)


@pytest.mark.skipif(_native.available("cuda") is not None, reason=f"{_native.available('cuda')}")
@pytest.mark.parametrize(("members", "packed"), [(1, 2), (3, 1), (8, 16), (32, 64), (64, 1)])
def test_members_share_a_tile_as_heads_do(members, packed):
    """A step of decoding for several beams: 64 rows of a tile hold heads times members."""
    arrays = [normal(0, members, B, 1, N, H), *qkv()[1:]]
    q, k, v = (x.astype(jnp.bfloat16) for x in arrays)
    call = jax_flash.flash_attention
    traced = jax.jit(jax.vmap(call, in_axes=(0, None, None))).trace(q, k, v)
    program = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert f"kPackedHeads = {packed};" in program


# ---- sharding ----------------------------------------------------------------------------------

COLLECTIVE = re.compile(
    r"= .*? (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


def mesh_of(shape, explicit=False):
    devices = jax.devices("cpu")
    if len(devices) < 8:
        pytest.skip("needs eight CPU devices (XLA_FLAGS was set without them)")
    kind = AxisType.Explicit if explicit else AxisType.Auto
    return jax.make_mesh(shape, ("data", "model"), (kind,) * 2, devices=devices[:8])


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize(
    ("shape", "query", "key", "heads", "reduces"),
    [
        ((4, 2), P(None, "data", None, "model"), P("data", None, "model"), (8, 4), False),
        ((1, 8), P(None, None, None, "model"), P(None, None, "model"), (16, 8), False),
        ((4, 2), P("data", None, None, "model"), P(None, None, "model"), (8, 4), True),
        ((8, 1), P("data"), P(), (4, 2), True),
        ((1, 8), P(None, None, None, "model"), P(), (16, 2), True),
        ((2, 4), P("data", None, None, "model"), P(), (8, 2), True),
    ],
    ids=[
        "batch and heads",
        "heads",
        "members and heads",
        "members",
        "heads alone",
        "kv heads less",
    ],
)
def test_members_and_heads_over_devices(shape, query, key, heads, reduces, explicit):
    """Nothing is gathered; only devices that share keys and values reduce their gradients."""
    mesh = mesh_of(shape, explicit)
    q, k, v = normal(0, 8, 4, T, heads[0], H), *(normal(i, 4, S, heads[1], H) for i in (1, 2))
    arrays = {"query": q, "key": k, "value": v}
    specs = {"query": query, "key": key, "value": key}
    axes = {"query": 0, "key": None, "value": None}
    call = call_of("cpu", is_causal=True)
    placed = {
        name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in arrays.items()
    }

    def results(arrays):
        return jax.vmap(lambda arrays: call(arrays)[1], in_axes=(axes,))(arrays)

    def gradients(arrays, dout):
        return jax.vjp(lambda x: results(x)[0], arrays)[1](dout)[0]

    dout = normal(5, *q.shape)
    placed_dout = jax.device_put(dout, NamedSharding(mesh, query))
    with jax.set_mesh(mesh):
        forward = jax.jit(results).lower(placed).compile()
        backward = jax.jit(gradients).lower(placed, placed_dout).compile()
        got = forward(placed), backward(placed, placed_dout)
    assert COLLECTIVE.findall(forward.as_text()) == []
    assert set(COLLECTIVE.findall(backward.as_text())) == ({"all-reduce"} if reduces else set())
    close(got, (jax.jit(results)(arrays), jax.jit(gradients)(arrays, dout)))


def test_inside_of_shard_map():
    mesh = mesh_of((4, 2))
    q, k, v = normal(0, 8, 4, T, 8, H), *(normal(i, 4, S, 4, H) for i in (1, 2))

    def loss(q, k, v):
        call = functools.partial(jax_flash.flash_attention, backend="cpu")
        return jnp.sin(jax.vmap(call, in_axes=(0, None, None))(q, k, v)).sum((0, 1, 2, 3, 4))

    def local(q, k, v):
        return jax.grad(lambda *x: jax.lax.psum(loss(*x), ("data", "model")), argnums=(0, 1, 2))(
            q, k, v
        )

    specs = (P("data", None, None, "model"), P(None, None, "model"), P(None, None, "model"))
    mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs))
    close(mapped(q, k, v), jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v))


def test_spmd_axis_name():
    mesh = mesh_of((8, 1))
    q, k, v = normal(0, 8, B, T, N, H), *qkv()[1:]

    def call(q, k, v):
        out = jax_flash.flash_attention(q, k, v, backend="cpu")
        return jax.lax.with_sharding_constraint(out, NamedSharding(mesh, P()))

    mapped = jax.jit(jax.vmap(call, in_axes=(0, None, None), spmd_axis_name="data"))
    placed = jax.device_put(q, NamedSharding(mesh, P("data")))
    got = mapped(placed, k, v)
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), got.ndim)
    close(got, jnp.stack([jax_flash.flash_attention(x, k, v, backend="cpu") for x in q]))


# ---- export ------------------------------------------------------------------------------------


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_export_with_any_number_of_members(platform):
    if platform == "cuda" and _native.available("cuda") is not None:
        pytest.skip(f"{_native.available('cuda')}")
    (members,) = jax.export.symbolic_shape("m")
    dtype = jnp.float32 if platform == "cpu" else jnp.bfloat16
    q, k, v = qkv(dtype)

    def gradients(q, k, v, bias):
        def loss(k):
            call = functools.partial(jax_flash.flash_attention, bias=bias, is_causal=True)
            return jnp.sum(jax.vmap(call, in_axes=(0, None, None))(q, k, v).astype(jnp.float32))

        return jax.grad(loss)(k)

    bias = normal(3, N, T, S) if platform == "cpu" else None
    names = [f"jax_flash_{platform}_{x}" for x in ("forward", "backward")]
    exported = jax.export.export(
        jax.jit(gradients),
        platforms=[platform],
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(name) for name in names],
    )(jax.ShapeDtypeStruct((members, *q.shape[1:]), dtype), k, v, bias)
    assert all(name in exported.mlir_module() for name in names)
    if platform == "cpu":
        close(exported.call(q, k, v, bias), jax.jit(gradients)(q, k, v, bias))
