"""Sharded over batch and heads: the same numbers, and no collectives where none are needed.

Eight virtual CPU devices (conftest.py) as meshes (data, model); collectives are counted in the
compiled program. Partitioning is the primitives' own, so one backend stands for all; "xla" is held
against it in one test.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_flash

from .. import numpy_oracle, small
from ..cases import dropout_words

P = PartitionSpec
B, T, S, N, K, H = 8, 12, 20, 16, 8, 8
MESHES = ((8, 1), (4, 2), (1, 8))
COLLECTIVE = re.compile(
    r"= .*? (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)
SHARDED = P("data", None, "model", None)  # of query, key, value


@pytest.fixture
def backend() -> str:
    return "cpu"


def mesh_of(shape, explicit=False):
    axis_type = AxisType.Explicit if explicit else AxisType.Auto
    devices = jax.devices("cpu")
    if len(devices) < 8:
        pytest.skip("needs eight CPU devices (XLA_FLAGS was set without them)")
    return jax.make_mesh(shape, ("data", "model"), (axis_type,) * 2, devices=devices[:8])


def normal(seed, *shape):
    return np.asarray(small.normal(seed, *shape))


def qkv(kv_heads=K, heads=N):
    return normal(0, B, T, heads, H), normal(1, B, S, kv_heads, H), normal(2, B, S, kv_heads, H)


# Optional operands with their shardings. With these no gradient needs a sum over devices.
OPERANDS = {
    "plain": {},
    "bias": {"bias": (normal(3, B, N, T, S), P("data", "model"))},
    "bias of keys": {"bias": (normal(3, B, 1, 1, S), P("data"))},
    "mask": {"mask": (normal(4, B, N, T, S) > -0.5, P("data", "model"))},
    "mask of keys": {"mask": (normal(4, B, 1, 1, S) > -0.5, P("data"))},
    "mask replicated": {"mask": (normal(4, 1, 1, T, S) > -0.5, P())},
    "lengths": {
        "query_seq_lengths": (np.arange(B, dtype=np.int32) + 3, P("data")),
        "key_value_seq_lengths": (2 * np.arange(B, dtype=np.int32) + 1, P("data")),
    },
    "segments": {
        "query_segment_ids": (np.arange(B * T, dtype=np.int32).reshape(B, T) % 3, P("data")),
        "key_value_segment_ids": (np.arange(B * S, dtype=np.int32).reshape(B, S) % 3, P("data")),
    },
    "positions": {
        "query_positions": (np.arange(B * T, dtype=np.int32).reshape(B, T) % 25, P("data")),
        "key_value_positions": (np.arange(B * S, dtype=np.int32).reshape(B, S) % 19, P("data")),
    },
    "query positions": {
        "query_positions": (np.arange(B * T, dtype=np.int32).reshape(B, T) % 25, P("data")),
    },
}


def step_of(backend, wrt=("query", "key", "value"), **options):
    """A function of a dict of arrays and a cotangent: (out, lse) and the gradients of `wrt`."""

    def step(arrays, dout):
        fixed = {name: x for name, x in arrays.items() if name not in wrt}

        def call(moving):
            return jax_flash.flash_attention(
                **moving, **fixed, **options, return_lse=True, backend=backend
            )

        (out, lse), pull = jax.vjp(call, {name: arrays[name] for name in wrt})
        return out, lse, pull((dout, lse * 0 + 1))[0]

    return step


def place(mesh, arrays):
    """The arrays of {name: (array, spec)} on the mesh."""
    return {
        name: jax.device_put(x, NamedSharding(mesh, spec)) for name, (x, spec) in arrays.items()
    }


def collectives(compiled) -> list[str]:
    return COLLECTIVE.findall(compiled.as_text())


def close(got, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=3e-5),
        got,
        expected,
    )


def sharded_and_single(mesh, backend, arrays, **options):
    """(compiled, got, expected): the step on the mesh, and the same on one device."""
    options.setdefault("wrt", ("query", "key", "value"))
    step = step_of(backend, **options)
    dout = normal(7, *arrays["query"][0].shape[:-1], H)
    placed = place(mesh, arrays)
    placed_dout = jax.device_put(dout, NamedSharding(mesh, SHARDED))
    compiled = jax.jit(step).lower(placed, placed_dout).compile()
    got = compiled(placed, placed_dout)
    expected = jax.jit(step)({name: x for name, (x, _) in arrays.items()}, dout)
    return compiled, got, expected


def with_qkv(operands, **heads):
    named = zip(("query", "key", "value"), qkv(**heads), strict=True)
    return {name: (x, SHARDED) for name, x in named} | operands


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("name", OPERANDS)
def test_no_collectives(name, shape, backend):
    """GQA 16 : 8 forward and backward, each operand sharded the natural way."""
    mesh = mesh_of(shape)
    arrays = with_qkv(OPERANDS[name])
    compiled, got, expected = sharded_and_single(mesh, backend, arrays, is_causal=True)
    assert collectives(compiled) == []
    close(got, expected)
    out, _, gradients = got
    for x in (out, *gradients.values()):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, SHARDED), x.ndim)


def test_xla_is_partitioned_alike():
    mesh = mesh_of((4, 2))
    arrays = with_qkv(OPERANDS["bias"] | OPERANDS["lengths"] | OPERANDS["positions"])
    compiled, got, expected = sharded_and_single(mesh, "xla", arrays, is_causal=True)
    assert collectives(compiled) == []
    close(got, expected)


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("kv_heads", [16, 1, 2])
def test_kv_heads(kv_heads, shape, backend):
    """Plain heads, and kv heads that the mesh's model axis may not divide."""
    mesh = mesh_of(shape)
    divides = kv_heads % shape[1] == 0
    spec = SHARDED if divides else P("data")
    arrays = with_qkv({}, kv_heads=kv_heads)
    arrays |= {name: (arrays[name][0], spec) for name in ("key", "value")}
    compiled, got, expected = sharded_and_single(mesh, backend, arrays)
    close(got, expected)
    kinds = collectives(compiled)
    if divides:
        assert kinds == []
    else:
        # Replicated key and value serve every shard of the query's heads; dk and dv are summed.
        assert set(kinds) == {"all-reduce"}
        assert len(kinds) <= 2


def test_bias_gradients_that_need_a_sum(backend):
    """A bias shared by the batch or the heads: its gradient is a sum over devices, once."""
    mesh = mesh_of((4, 2))
    for bias_shape, spec in (((1, N, T, S), P(None, "model")), ((B, 1, 1, S), P("data")),
                             ((1, 1, T, S), P())):  # fmt: skip
        arrays = with_qkv({"bias": (normal(3, *bias_shape), spec)})
        compiled, got, expected = sharded_and_single(
            mesh, backend, arrays, wrt=("query", "key", "value", "bias")
        )
        close(got, expected)
        assert set(collectives(compiled)) == {"all-reduce"}
        assert len(collectives(compiled)) <= 2


def test_sinks(backend):
    mesh = mesh_of((4, 2))
    arrays = with_qkv({"sinks": (normal(5, N), P("model"))})
    compiled, got, expected = sharded_and_single(
        mesh, backend, arrays, wrt=("query", "key", "value", "sinks")
    )
    close(got, expected)
    assert set(collectives(compiled)) <= {"all-reduce"}
    assert len(collectives(compiled)) <= 1


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_dropout_pattern_does_not_depend_on_the_mesh(shape, backend):
    mesh = mesh_of(shape)
    key = jax.random.key(3)
    zeros_q, zeros_k = np.zeros((B, T, N, H), np.float32), np.zeros((B, S, N, H), np.float32)
    identity = np.broadcast_to(np.eye(S, dtype=np.float32)[:, None], (B, S, N, S))
    arrays = place(
        mesh,
        {"query": (zeros_q, SHARDED), "key": (zeros_k, SHARDED), "value": (identity, SHARDED)},
    )
    out = jax.jit(
        lambda arrays: jax_flash.flash_attention(
            **arrays, dropout_rate=0.4, dropout_key=key, backend=backend
        )
    )(arrays)
    words = dropout_words(key)
    expected = [
        [numpy_oracle.dropout_keep(words, 0.4, b, n, T, S) for n in range(N)] for b in range(B)
    ]
    np.testing.assert_array_equal(np.asarray(out).swapaxes(1, 2) > 0, expected)


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_two_batch_dims(shape, backend):
    """Leading dims [2, 4] with the inner one sharded: flattening them would need a gather."""
    mesh = mesh_of((2, 4) if shape == (8, 1) else shape)
    spec = P(None, "data" if shape != (1, 8) else None, None, "model", None)
    arrays = {
        name: (x.reshape(2, 4, *x.shape[1:]), spec)
        for name, x in zip(("query", "key", "value"), qkv(), strict=True)
    }
    step = step_of(backend, is_causal=True)
    dout = normal(7, 2, 4, T, N, H)
    placed = place(mesh, arrays)
    placed_dout = jax.device_put(dout, NamedSharding(mesh, spec))
    compiled = jax.jit(step).lower(placed, placed_dout).compile()
    assert collectives(compiled) == []
    close(
        compiled(placed, placed_dout),
        jax.jit(step)({name: x for name, (x, _) in arrays.items()}, dout),
    )


def test_scan_remat_and_vmap(backend):
    """A rematerialised layer under scan, mapped over an unsharded axis: still no collectives."""
    mesh = mesh_of((4, 2))
    q, k, v = qkv()
    arrays = place(mesh, {"q": (np.stack([q, -q]), P(None, *SHARDED)), "k": (k, SHARDED),
                          "v": (v, SHARDED)})  # fmt: skip

    def loss(arrays):
        @jax.checkpoint
        def attend(q):
            return jax_flash.flash_attention(
                q, arrays["k"], arrays["v"], is_causal=True, backend=backend
            )

        def layer(x, _):
            return x + jax.vmap(attend)(x), None

        return jax.lax.scan(layer, arrays["q"], length=2)[0]

    def gradients(arrays, cotangent):
        return jax.vjp(loss, arrays)[1](cotangent)

    compiled = jax.jit(gradients).lower(arrays, arrays["q"]).compile()
    assert collectives(compiled) == []
    single = {"q": np.stack([q, -q]), "k": k, "v": v}
    close(compiled(arrays, arrays["q"]), jax.jit(gradients)(single, single["q"]))


@pytest.mark.parametrize("name", ["lengths", "query positions"])
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_explicit_mode(shape, name, backend):
    mesh = mesh_of(shape, explicit=True)
    with jax.set_mesh(mesh):
        arrays = with_qkv(OPERANDS[name])
        compiled, got, expected = sharded_and_single(mesh, backend, arrays, is_causal=True)
        assert collectives(compiled) == []
    close(got, expected)
    assert got[0].sharding.spec == SHARDED


@pytest.mark.parametrize("sinks_spec", [P(), P("data"), P("model")], ids=str)
@pytest.mark.parametrize("spec", [P(None, None, "model"), P("data"), SHARDED], ids=str)
def test_explicit_mode_with_sinks_in_a_sharding_of_their_own(spec, sinks_spec, backend):
    q, sinks = normal(0, B, T, N, H), normal(5, N)
    lengths = np.arange(B, dtype=np.int32) + 3  # rows without keys too

    @jax.grad
    def gradient(sinks, q):
        options = {"sinks": sinks, "query_seq_lengths": lengths, "backend": backend}
        out = jax_flash.flash_attention(q, q, q, **options)
        return jnp.sum(jnp.sin(out))

    expected = gradient(sinks, q)
    mesh = mesh_of((4, 2), explicit=True)
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, s)) for x, s in ((sinks, sinks_spec), (q, spec))
        ]
        for got in (gradient(*placed), jax.jit(gradient)(*placed)):
            close(got, expected)
            assert jax.typeof(got) == jax.typeof(placed[0])


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_shard_map_over_one_axis_of_an_explicit_mesh(jitted, backend):
    """The other axis stays explicit inside."""
    q, sinks = normal(0, B, T, N, H), normal(5, N)

    def call(sinks, q):
        return jax_flash.flash_attention(q, q, q, sinks=sinks, backend=backend)

    def derivatives(call, sinks, q):
        gradient = jax.grad(lambda *x: jnp.sum(jnp.sin(call(*x))), argnums=(0, 1))
        return gradient(sinks, q), jax.jvp(functools.partial(call, sinks), (q,), (q,))

    expected = derivatives(call, sinks, q)
    mesh = mesh_of((4, 2), explicit=True)
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(
            call, axis_names={"data"}, in_specs=(P(), P("data")), out_specs=P("data")
        )
        function = functools.partial(derivatives, mapped)
        placed = [
            jax.device_put(x, NamedSharding(mesh, s)) for x, s in ((sinks, P()), (q, SHARDED))
        ]
        got = (jax.jit(function) if jitted else function)(*placed)
        assert jax.tree.map(jax.typeof, got[0]) == tuple(map(jax.typeof, placed))
    close(got, expected)


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("spec", "kv_spec"), [(P("data"), P()), (P(), P("data")), (P(None, None, "data"), P())], ids=str
)
def test_gradients_have_their_arguments_type_beside_auto_axes(spec, kv_spec, jitted, backend):
    """One axis of the mesh is Explicit, one is Auto, about which XLA asks our plan."""
    names = ("query", "key", "value", "bias", "sinks")
    arrays = dict(zip(names, (*qkv(), normal(3, 1, N, T, S), normal(5, N)), strict=True))

    def call(arrays):
        return jax_flash.flash_attention(**arrays, backend=backend)

    def step(arrays):
        out = call(arrays)
        types.append((out, jax.grad(lambda arrays: jnp.sum(jnp.sin(call(arrays))))(arrays)))
        return types[-1]

    types = []
    expected = jax.jit(step)(arrays)
    mesh_of((4, 2))  # skips without eight devices
    kinds = (AxisType.Explicit, AxisType.Auto)
    mesh = jax.make_mesh((4, 2), ("data", "model"), kinds, devices=jax.devices("cpu")[:8])
    specs = {"query": spec, "key": kv_spec, "value": kv_spec}
    with jax.set_mesh(mesh):
        placed = place(mesh, {n: (x, specs.get(n, P())) for n, x in arrays.items()})
        got = (jax.jit(step) if jitted else step)(placed)
        types = jax.tree.map(jax.typeof, [types[-1], got, (placed["query"], placed)])
    assert types[0] == types[1] == types[2]
    close(got, expected)


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_explicit_mode_without_keys(jitted, backend):
    """The results of an empty problem have the types of those of any other."""
    mesh = mesh_of((4, 2), explicit=True)
    types = []

    def call(q, k, v):
        results = jax_flash.flash_attention(q, k, v, return_lse=True, backend=backend)
        types.append([jax.typeof(x) for x in results])
        return results

    with jax.set_mesh(mesh):
        q, k, v = (jax.device_put(x, NamedSharding(mesh, SHARDED)) for x in qkv())
        transformed = jax.jit(call) if jitted else call
        transformed(q, k, v)
        out, lse = transformed(q, k[:, :0], v[:, :0])
        gradient = jax.grad(lambda q: jnp.sum(call(q, k[:, :0], v[:, :0])[0]))(q)
    assert types[0] == types[1]
    assert jax.typeof(gradient) == jax.typeof(q)
    close((out, lse), (np.zeros((B, T, N, H)), np.full((B, T, N), -np.inf)))


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_shard_map_without_keys(jitted, backend):
    """As the carry of a scan, the results must vary over the devices as the operands do."""
    mesh = mesh_of((8, 1))

    def layers(q, k):
        def layer(carry, _):
            q, _ = carry
            return jax_flash.flash_attention(q, k, k, return_lse=True, backend=backend), None

        return jax.lax.scan(layer, (q, jnp.sum(q, axis=-1)), length=2)[0]

    q = qkv()[0]
    expected = np.zeros((B, T, N, H)), np.full((B, T, N), -np.inf)
    for keys, spec in ((B, P("data")), (1, P())):
        mapped = jax.shard_map(layers, mesh=mesh, in_specs=(P("data"), spec), out_specs=P("data"))
        close((jax.jit(mapped) if jitted else mapped)(q, q[:keys, :0]), expected)


OTHER_AXES = {  # how query is placed, kv heads, whether nothing moves
    "heads": (P("data", None, "model"), K, True),
    "batch": (P(("data", "model")), K, True),
    "both": (P(("data", "other"), None, "model"), K, True),
    "crossed": (P(("data", "model"), None, "other"), K, True),
    "twice": (P(("data", "other", "model")), K, True),
    "fewer kv heads": (P("data", None, "model"), 1, False),
    "bias of all rows": (P(("data", "model")), K, False),
}


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize("name", OTHER_AXES)
def test_shard_map_over_one_axis_leaves_the_others_split(name, explicit, backend):
    """Inside, the call follows the query over the other axes of the mesh."""
    spec, kv_heads, still = OTHER_AXES[name]
    mesh_of((8, 1))  # skips without eight devices
    kind = AxisType.Explicit if explicit else AxisType.Auto
    names = ("data", "other", "model")
    mesh = jax.make_mesh((2, 2, 2), names, (kind,) * 3, devices=jax.devices("cpu")[:8])
    arrays = dict(zip(("query", "key", "value"), qkv(kv_heads), strict=True))
    specs = {n: spec if n == "query" or kv_heads > 1 else P("data") for n in arrays}
    if "bias" in name:
        arrays["bias"], specs["bias"] = normal(3, 1, N, T, S), P()
    inside = {n: P() if n == "bias" else P("data") for n in arrays}

    def call(arrays):
        return jax_flash.flash_attention(**arrays, is_causal=True, backend=backend)

    def gradients(call, arrays):
        return jax.grad(lambda arrays: jnp.sum(jnp.sin(call(arrays))))(arrays)

    expected = jax.jit(functools.partial(gradients, call))(arrays)
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(call, axis_names={"data"}, in_specs=(inside,), out_specs=P("data"))
        placed = place(mesh, {n: (x, specs[n]) for n, x in arrays.items()})
        compiled = jax.jit(functools.partial(gradients, mapped)).lower(placed).compile()
        close(compiled(placed), expected)
    # Before 0.11 jax itself gathers explicit axes where shard_map begins.
    if still and not (explicit and jax.__version_info__ < (0, 11)):
        assert collectives(compiled) == []


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_shard_map_beside_an_axis_of_one_device(kind, backend):
    mesh_of((8, 1))  # skips without eight devices
    kinds = (AxisType.Auto, getattr(AxisType, kind))
    mesh = jax.make_mesh((8, 1), ("data", "model"), kinds, devices=jax.devices("cpu")[:8])
    q, k, _ = qkv()
    lengths = np.arange(B, dtype=np.int32) + 3

    def step(q, k, lengths):
        def call(q):
            return jax_flash.flash_attention(q, k, k, is_causal=True, backend=backend)

        decoded = jax_flash.decode_attention(
            q[:, :1], k, k, lengths, new_key=k[:, :1], new_value=k[:, :1], backend=backend
        )
        return jax.grad(lambda q: jnp.sum(jnp.sin(call(q))))(q), decoded

    with jax.set_mesh(mesh):
        mapped = jax.shard_map(step, axis_names={"data"}, in_specs=P("data"), out_specs=P("data"))
        got = jax.jit(mapped)(q, k, lengths)
    close(got, jax.jit(step)(q, k, lengths))


@pytest.mark.parametrize("kv_heads", [16, 8, 1])
def test_shard_map(kv_heads, backend):
    """Inside shard_map, with one kv head replicated over the model axis: dk and dv are summed."""
    mesh = mesh_of((4, 2))
    q, k, v = qkv(kv_heads)
    kv_spec = SHARDED if kv_heads > 1 else P("data")
    call = functools.partial(jax_flash.flash_attention, is_causal=True, backend=backend)
    mapped = jax.shard_map(call, mesh=mesh, in_specs=(SHARDED, kv_spec, kv_spec), out_specs=SHARDED)

    def step(call, q, k, v, dout):
        out, pull = jax.vjp(call, q, k, v)
        return out, pull(dout)

    placed = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in ((q, SHARDED), (k, kv_spec), (v, kv_spec), (q, SHARDED))
    ]
    compiled = jax.jit(functools.partial(step, mapped)).lower(*placed).compile()
    assert set(collectives(compiled)) == (set() if kv_heads > 1 else {"all-reduce"})
    close(compiled(*placed), jax.jit(functools.partial(step, call))(q, k, v, q))


def test_shard_map_over_batch_only_with_replicated_bias(backend):
    """A bias that every device holds whole, its gradient summed by the transpose of replication."""
    mesh = mesh_of((8, 1))
    q, k, v = qkv()
    bias = normal(3, N, T, S)

    def call(q, k, v, bias):
        return jax_flash.flash_attention(q, k, v, bias=bias, backend=backend)

    mapped = jax.shard_map(
        call, mesh=mesh, in_specs=(P("data"), P("data"), P("data"), P()), out_specs=P("data")
    )

    def gradient(call, bias):
        return jax.grad(lambda bias: jnp.sum(jnp.sin(call(q, k, v, bias))))(bias)

    close(
        jax.jit(functools.partial(gradient, mapped))(bias),
        jax.jit(functools.partial(gradient, call))(bias),
    )


@pytest.mark.filterwarnings("ignore:.* of flash_attention arrives:RuntimeWarning")
def test_unsharded_query_stays_correct_on_a_mesh(backend):
    """Sequence-sharded operands: gathers are needed, wrong numbers are not."""
    mesh = mesh_of((4, 2))
    arrays = {
        "query": (qkv()[0], P(None, "data")),
        "key": (qkv()[1], P("data", "model")),
        "value": (qkv()[2], P(None, None, None, "model")),
    }
    step = step_of(backend, is_causal=True)
    dout = normal(7, B, T, N, H)
    got = jax.jit(step)(place(mesh, arrays), dout)
    close(got, jax.jit(step)({name: x for name, (x, _) in arrays.items()}, dout))


def test_mixed_leading_dims_under_vmap(backend):
    """vmap over the query alone, its batch sharded: bias and lengths keep their own sharding."""
    mesh = mesh_of((4, 2))
    q, k, v = qkv()
    bias, lengths = normal(3, B, 1, 1, S), np.arange(B, dtype=np.int32) + 4
    specs = (P(None, *SHARDED), SHARDED, SHARDED, P("data"), P("data"))

    def call(q, k, v, bias, lengths):
        return jax_flash.flash_attention(
            q, k, v, bias=bias, key_value_seq_lengths=lengths, backend=backend
        )

    mapped = jax.vmap(call, in_axes=(0, None, None, None, None))
    arguments = (np.stack([q, 2 * q, -q]), k, v, bias, lengths)
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(arguments, specs, strict=True)
    ]
    compiled = jax.jit(mapped).lower(*placed).compile()
    assert collectives(compiled) == []
    close(compiled(*placed), jax.jit(mapped)(*arguments))


def test_programs_with_explicit_axes_are_exported(backend):
    """With their gradients, for several devices; in Auto mode XLA asks a callback how to split."""
    mesh = mesh_of((4, 2), explicit=True)
    arrays = with_qkv(OPERANDS["lengths"], kv_heads=1)  # gradients of key and value are summed
    arrays |= {name: (arrays[name][0], P("data")) for name in ("key", "value")}
    step = jax.jit(step_of(backend, is_causal=True))
    with jax.set_mesh(mesh):
        placed = place(mesh, arrays)
        dout = jax.device_put(normal(7, B, T, N, H), NamedSharding(mesh, SHARDED))
        checks = jax_flash.EXPORT_CHECKS
        exported = jax.export.export(step, disabled_checks=checks)(placed, dout)
        again = jax.export.deserialize(exported.serialize())
        assert again.nr_devices == 8
        close(jax.jit(again.call)(placed, dout), step(placed, dout))


def test_without_shardy_an_error_says_what_to_do(backend):
    """GSPMD would end the process; what it does not split it may compile."""
    mesh, explicit = mesh_of((4, 2)), mesh_of((4, 2), explicit=True)
    x = normal(0, B, T, N, H)

    @jax.jit
    def call(x):
        return jax_flash.flash_attention(x, x, x, backend=backend)

    kept = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        for function in (call, call.__wrapped__):
            with pytest.raises(
                NotImplementedError, match="flash_attention is compiled for 8 devices"
            ):
                function(jax.device_put(x, NamedSharding(mesh, SHARDED)))
        expected = call(x)
        mapped = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=SHARDED, out_specs=SHARDED))
        close(mapped(x), expected)
        with jax.set_mesh(explicit):
            close(call(jax.device_put(x, NamedSharding(explicit, SHARDED))), expected)
    finally:
        jax.config.update("jax_use_shardy_partitioner", kept)


CACHED = """
import sys
import jax
import jax.export
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import jax_flash

hits = []
jax.monitoring.register_event_listener(
    lambda event, **_: hits.append(event) if event.endswith("cache_hits") else None
)
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
mesh = jax.make_mesh((2, 2), ("data", "model"), (AxisType.Explicit,) * 2)
with jax.set_mesh(mesh):
    split = NamedSharding(mesh, P("data", None, "model"))
    x = jax.ShapeDtypeStruct((4, 16, 4, 8), "float32", sharding=split)
    for count in range(2):
        jax.jit(lambda x: jax_flash.flash_attention(x, x, x, backend="cpu")).lower(x).compile()
        assert len(hits) == count, hits
        jax.clear_caches()
"""


def test_programs_with_explicit_axes_hit_the_compilation_cache(tmp_path):
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", CACHED, str(tmp_path)],
        env=os.environ | flags, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


SPLIT_SEQUENCE = """
import sys, warnings
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import jax_flash

mesh = jax.make_mesh((2, 4), ("data", "sequence"), (getattr(AxisType, sys.argv[1]),) * 2)
x = jnp.ones((2, 16, 4, 8))
split = jax.device_put(x, NamedSharding(mesh, P("data", "sequence")))
whole = jax.device_put(x, NamedSharding(mesh, P("data")))


def warned(function, *arguments):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.block_until_ready(jax.jit(function)(*arguments))
    return [str(w.message) for w in caught if "mesh axes" in str(w.message)]


def attend(q, k, v):
    return jax_flash.flash_attention(q, k, v, backend="xla")


def gradients(q, k, v):
    return jax.grad(lambda *x: attend(*x).sum(), argnums=(0, 1, 2))(q, k, v)


inside = jax.shard_map(attend, mesh=mesh, in_specs=(P("data", "sequence"),) * 3,
                       out_specs=P("data", "sequence"))
assert warned(gradients, whole, whole, whole) == []
assert warned(inside, split, split, split) == []
(message,) = warned(attend, whole, split, whole)
assert "key of flash_attention arrives with S split over mesh axes ('sequence',)" in message
assert "the heads" in message and "with_sharding_constraint" in message
first, second = warned(gradients, split, split, split)
assert "query of flash_attention arrives with T split" in first
assert "value of flash_attention arrives with S split" in second
assert warned(lambda *x: attend(*x) + 1, split, split, split) == []
"""


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_sequence_that_is_gathered_is_told_once(kind):
    """In a process of its own, which has warned of nothing yet."""
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run(
        [sys.executable, "-c", SPLIT_SEQUENCE, kind],
        env=os.environ | flags, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
