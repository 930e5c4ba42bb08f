"""Inside of shard_map, over all axes of a mesh or some: the same numbers, and what is sent."""

from __future__ import annotations

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash

from ..devices import collectives, mesh_of, mesh_with
from ..small import numpy_normal as normal
from .sharding_steps import SHARDED, B, H, K, N, S, T, close, place, qkv


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_shard_map_over_one_axis_of_an_explicit_mesh(jitted):
    """The other axis stays explicit inside."""
    q, sinks = normal(0, B, T, N, H), normal(5, N)

    def call(sinks, q):
        return jax_flash.flash_attention(q, q, q, sinks=sinks, backend="cpu")

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
def test_shard_map_without_keys(jitted):
    """As the carry of a scan, the results must vary over the devices as the operands do."""
    mesh = mesh_of((8, 1))

    def layers(q, k):
        def layer(carry, _):
            q, _ = carry
            return jax_flash.flash_attention(q, k, k, return_lse=True, backend="cpu"), None

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
def test_shard_map_over_one_axis_leaves_the_others_split(name, explicit):
    """Inside, the call follows the query over the other axes of the mesh."""
    spec, kv_heads, still = OTHER_AXES[name]
    mesh = mesh_with(explicit, data=2, other=2, model=2)
    arrays = dict(zip(("query", "key", "value"), qkv(kv_heads), strict=True))
    specs = {n: spec if n == "query" or kv_heads > 1 else P("data") for n in arrays}
    if "bias" in name:
        arrays["bias"], specs["bias"] = normal(3, 1, N, T, S), P()
    inside = {n: P() if n == "bias" else P("data") for n in arrays}

    def call(arrays):
        return jax_flash.flash_attention(**arrays, is_causal=True, backend="cpu")

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
def test_shard_map_beside_an_axis_of_one_device(kind):
    mesh = mesh_of((8, 1), explicit=(False, kind == "Explicit"))
    q, k, _ = qkv()
    lengths = np.arange(B, dtype=np.int32) + 3

    def step(q, k, lengths):
        def call(q):
            return jax_flash.flash_attention(q, k, k, is_causal=True, backend="cpu")

        decoded = jax_flash.decode_attention(
            q[:, :1], k, k, lengths, new_key=k[:, :1], new_value=k[:, :1], backend="cpu"
        )
        return jax.grad(lambda q: jnp.sum(jnp.sin(call(q))))(q), decoded

    with jax.set_mesh(mesh):
        mapped = jax.shard_map(step, axis_names={"data"}, in_specs=P("data"), out_specs=P("data"))
        got = jax.jit(mapped)(q, k, lengths)
    close(got, jax.jit(step)(q, k, lengths))


@pytest.mark.parametrize("kv_heads", [16, 8, 1])
def test_shard_map(kv_heads):
    """Inside shard_map, with one kv head replicated over the model axis: dk and dv are summed."""
    mesh = mesh_of((4, 2))
    q, k, v = qkv(kv_heads)
    kv_spec = SHARDED if kv_heads > 1 else P("data")
    call = functools.partial(jax_flash.flash_attention, is_causal=True, backend="cpu")
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


def test_shard_map_over_batch_only_with_replicated_bias():
    """A bias that every device holds whole, its gradient summed by the transpose of replication."""
    mesh = mesh_of((8, 1))
    q, k, v = qkv()
    bias = normal(3, N, T, S)

    def call(q, k, v, bias):
        return jax_flash.flash_attention(q, k, v, bias=bias, backend="cpu")

    mapped = jax.shard_map(
        call, mesh=mesh, in_specs=(P("data"), P("data"), P("data"), P()), out_specs=P("data")
    )

    def gradient(call, bias):
        return jax.grad(lambda bias: jnp.sum(jnp.sin(call(q, k, v, bias))))(bias)

    close(
        jax.jit(functools.partial(gradient, mapped))(bias),
        jax.jit(functools.partial(gradient, call))(bias),
    )
