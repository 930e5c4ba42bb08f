"""vmap over the query alone: key and value are not copied for each member, nor sent."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash
from jax_flash import _gpu, _native

from ..conftest import needs_module
from ..devices import collectives, mesh_of
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
    qkv,
    summed,
)


def shapes_in(program: str) -> list[tuple[int, ...]]:
    """The shape of every array in a program, in StableHLO or optimized HLO."""
    found = re.findall(r"tensor<((?:\d+x)+)\w+>|\b[a-z]+\d+\[([\d,]+)\]", program)
    return [tuple(map(int, re.split("[x,]", (a or b).strip("x,")))) for a, b in found]


def copies(program: str) -> list[tuple[int, ...]]:
    """The arrays as large as a key for every member; with one number of each member and key."""
    shapes = shapes_in(program)
    assert (B, S, K, H) in shapes
    return [x for x in shapes if S in x and H in x and np.prod(x) >= M * B * S * K * H]


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


@needs_module
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["plain", "lengths", "segments", "sinks", "own sinks"])
def test_cuda_kernels_share_them(name, order, monkeypatch):
    monkeypatch.setattr(_gpu.few_scores, "takes", lambda call, shapes, gpu: False)
    arrays, axes = arrays_of(name, dtype=jnp.bfloat16)
    traced = jax.jit(ORDERS[order](call_of(None), axes)).trace(arrays)
    program = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "jax_flash_cuda_forward" in program
    assert ("jax_flash_cuda_backward" in program) == (order != "forward")
    assert copies(program) == []
    assert (B, T, N * M, H) in shapes_in(program)


@needs_module
@pytest.mark.parametrize(("members", "packed"), [(1, 2), (3, 1), (8, 16), (32, 64), (64, 1)])
def test_members_share_a_tile_as_heads_do(members, packed, monkeypatch):
    """A step of decoding for several beams: 64 rows of a tile hold heads times members."""
    monkeypatch.setattr(_gpu.few_scores, "takes", lambda call, shapes, gpu: False)
    arrays = [normal(0, members, B, 1, N, H), *qkv()[1:]]
    q, k, v = (x.astype(jnp.bfloat16) for x in arrays)
    call = jax_flash.flash_attention
    traced = jax.jit(jax.vmap(call, in_axes=(0, None, None))).trace(q, k, v)
    program = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert f"kPackedHeads = {packed};" in program


# ---- sharding ----------------------------------------------------------------------------------


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
    assert collectives(forward) == []
    assert set(collectives(backward)) == ({"all-reduce"} if reduces else set())
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
