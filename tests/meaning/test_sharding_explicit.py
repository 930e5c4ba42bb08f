"""Axes in explicit mode: the same numbers, the types of the arguments, exports, JAX's cache."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash

from ..devices import collectives, mesh_of
from ..processes import with_devices
from ..small import numpy_normal as normal
from .sharding_steps import (
    MESHES,
    OPERANDS,
    SHARDED,
    B,
    H,
    N,
    S,
    T,
    close,
    place,
    qkv,
    sharded_and_single,
    step_of,
    with_qkv,
)


@pytest.mark.parametrize("name", ["lengths", "query positions"])
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_explicit_mode(shape, name):
    mesh = mesh_of(shape, explicit=True)
    with jax.set_mesh(mesh):
        arrays = with_qkv(OPERANDS[name])
        compiled, got, expected = sharded_and_single(mesh, arrays, is_causal=True)
        assert collectives(compiled) == []
    close(got, expected)
    assert got[0].sharding.spec == SHARDED


@pytest.mark.parametrize("sinks_spec", [P(), P("data"), P("model")], ids=str)
@pytest.mark.parametrize("spec", [P(None, None, "model"), P("data"), SHARDED], ids=str)
def test_explicit_mode_with_sinks_in_a_sharding_of_their_own(spec, sinks_spec):
    q, sinks = normal(0, B, T, N, H), normal(5, N)
    lengths = np.arange(B, dtype=np.int32) + 3  # rows without keys too

    @jax.grad
    def gradient(sinks, q):
        options = {"sinks": sinks, "query_seq_lengths": lengths, "backend": "cpu"}
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
@pytest.mark.parametrize(
    ("spec", "kv_spec"), [(P("data"), P()), (P(), P("data")), (P(None, None, "data"), P())], ids=str
)
def test_gradients_have_their_arguments_type_beside_auto_axes(spec, kv_spec, jitted):
    """One axis of the mesh is Explicit, one is Auto, about which XLA asks our plan."""
    names = ("query", "key", "value", "bias", "sinks")
    arrays = dict(zip(names, (*qkv(), normal(3, 1, N, T, S), normal(5, N)), strict=True))

    def call(arrays):
        return jax_flash.flash_attention(**arrays, backend="cpu")

    def step(arrays):
        out = call(arrays)
        types.append((out, jax.grad(lambda arrays: jnp.sum(jnp.sin(call(arrays))))(arrays)))
        return types[-1]

    types = []
    expected = jax.jit(step)(arrays)
    mesh = mesh_of((4, 2), explicit=(True, False))
    specs = {"query": spec, "key": kv_spec, "value": kv_spec}
    with jax.set_mesh(mesh):
        placed = place(mesh, {n: (x, specs.get(n, P())) for n, x in arrays.items()})
        got = (jax.jit(step) if jitted else step)(placed)
        types = jax.tree.map(jax.typeof, [types[-1], got, (placed["query"], placed)])
    assert types[0] == types[1] == types[2]
    close(got, expected)


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_explicit_mode_without_keys(jitted):
    """The results of an empty problem have the types of those of any other."""
    mesh = mesh_of((4, 2), explicit=True)
    types = []

    def call(q, k, v):
        results = jax_flash.flash_attention(q, k, v, return_lse=True, backend="cpu")
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


def test_programs_with_explicit_axes_are_exported():
    """With their gradients, for several devices; in Auto mode XLA asks a callback how to split."""
    mesh = mesh_of((4, 2), explicit=True)
    arrays = with_qkv(OPERANDS["lengths"], kv_heads=1)  # gradients of key and value are summed
    arrays |= {name: (arrays[name][0], P("data")) for name in ("key", "value")}
    step = jax.jit(step_of(is_causal=True))
    with jax.set_mesh(mesh):
        placed = place(mesh, arrays)
        dout = jax.device_put(normal(7, B, T, N, H), NamedSharding(mesh, SHARDED))
        checks = jax_flash.EXPORT_CHECKS
        exported = jax.export.export(step, disabled_checks=checks)(placed, dout)
        again = jax.export.deserialize(exported.serialize())
        assert again.nr_devices == 8
        close(jax.jit(again.call)(placed, dout), step(placed, dout))


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
    done = subprocess.run(
        [sys.executable, "-P", "-c", CACHED, str(tmp_path)],
        env=os.environ | with_devices(4), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
