"""Sharded over batch and heads: the same numbers, and no collectives where none are needed.

Collectives are counted in the compiled program. Partitioning is the primitives' own, so backend
"cpu" stands for all; "xla" is held against it in one test. Axes in explicit mode have
test_sharding_explicit.py, shard_map has test_shard_map.py.
"""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.export
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash

from .. import numpy_oracle
from ..cases import dropout_words
from ..devices import collectives, mesh_of
from ..processes import with_devices
from ..small import numpy_normal as normal
from .sharding_steps import (
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


# Where an axis has one device, an operand is split by the other as it is on the mesh of both.
@pytest.mark.parametrize(
    ("name", "shape"),
    [(name, (4, 2)) for name in OPERANDS]
    + [(name, x) for name in ("plain", "mask of keys", "lengths") for x in ((8, 1), (1, 8))],
    ids=str,
)
def test_no_collectives(name, shape):
    """GQA 16 : 8 forward and backward, each operand sharded the natural way."""
    mesh = mesh_of(shape)
    arrays = with_qkv(OPERANDS[name])
    compiled, got, expected = sharded_and_single(mesh, arrays, is_causal=True)
    assert collectives(compiled) == []
    close(got, expected)
    out, _, gradients = got
    for x in (out, *gradients.values()):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, SHARDED), x.ndim)


def test_xla_is_partitioned_alike():
    mesh = mesh_of((4, 2))
    arrays = with_qkv(OPERANDS["bias"] | OPERANDS["lengths"] | OPERANDS["positions"])
    compiled, got, expected = sharded_and_single(mesh, arrays, backend="xla", is_causal=True)
    assert collectives(compiled) == []
    close(got, expected)


@pytest.mark.parametrize(
    ("kv_heads", "shape"),
    [(16, (4, 2)), (1, (4, 2)), (2, (4, 2)), (2, (8, 1)), (2, (1, 8))],
    ids=str,
)
def test_kv_heads(kv_heads, shape):
    """Plain heads, and kv heads that the mesh's model axis may not divide."""
    mesh = mesh_of(shape)
    divides = kv_heads % shape[1] == 0
    spec = SHARDED if divides else P("data")
    arrays = with_qkv({}, kv_heads=kv_heads)
    arrays |= {name: (arrays[name][0], spec) for name in ("key", "value")}
    compiled, got, expected = sharded_and_single(mesh, arrays)
    close(got, expected)
    kinds = collectives(compiled)
    if divides:
        assert kinds == []
    else:
        # Replicated key and value serve every shard of the query's heads; dk and dv are summed.
        assert set(kinds) == {"all-reduce"}
        assert len(kinds) <= 2


def test_bias_gradients_that_need_a_sum():
    """A bias shared by the batch or the heads: its gradient is a sum over devices, once."""
    mesh = mesh_of((4, 2))
    for bias_shape, spec in (((1, N, T, S), P(None, "model")), ((B, 1, 1, S), P("data")),
                             ((1, 1, T, S), P())):  # fmt: skip
        arrays = with_qkv({"bias": (normal(3, *bias_shape), spec)})
        compiled, got, expected = sharded_and_single(
            mesh, arrays, wrt=("query", "key", "value", "bias")
        )
        close(got, expected)
        assert set(collectives(compiled)) == {"all-reduce"}
        assert len(collectives(compiled)) <= 2


def test_sinks():
    mesh = mesh_of((4, 2))
    arrays = with_qkv({"sinks": (normal(5, N), P("model"))})
    compiled, got, expected = sharded_and_single(
        mesh, arrays, wrt=("query", "key", "value", "sinks")
    )
    close(got, expected)
    assert set(collectives(compiled)) <= {"all-reduce"}
    assert len(collectives(compiled)) <= 1


@pytest.mark.parametrize("shape", [(4, 2), (1, 8)], ids=str)
def test_dropout_pattern_does_not_depend_on_the_mesh(shape):
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
            **arrays, dropout_rate=0.4, dropout_key=key, backend="cpu"
        )
    )(arrays)
    words = dropout_words(key)
    expected = [
        [numpy_oracle.dropout_keep(words, 0.4, b, n, T, S) for n in range(N)] for b in range(B)
    ]
    np.testing.assert_array_equal(np.asarray(out).swapaxes(1, 2) > 0, expected)


@pytest.mark.parametrize("shape", [(4, 2), (1, 8)], ids=str)
def test_two_batch_dims(shape):
    """Leading dims [2, 4] with the inner one sharded: flattening them would need a gather."""
    mesh = mesh_of(shape)
    spec = P(None, "data" if shape != (1, 8) else None, None, "model", None)
    arrays = {
        name: (x.reshape(2, 4, *x.shape[1:]), spec)
        for name, x in zip(("query", "key", "value"), qkv(), strict=True)
    }
    step = step_of(is_causal=True)
    dout = normal(7, 2, 4, T, N, H)
    placed = place(mesh, arrays)
    placed_dout = jax.device_put(dout, NamedSharding(mesh, spec))
    compiled = jax.jit(step).lower(placed, placed_dout).compile()
    assert collectives(compiled) == []
    close(
        compiled(placed, placed_dout),
        jax.jit(step)({name: x for name, (x, _) in arrays.items()}, dout),
    )


def test_scan_remat_and_vmap():
    """A rematerialised layer under scan, mapped over an unsharded axis: still no collectives."""
    mesh = mesh_of((4, 2))
    q, k, v = qkv()
    arrays = place(mesh, {"q": (np.stack([q, -q]), P(None, *SHARDED)), "k": (k, SHARDED),
                          "v": (v, SHARDED)})  # fmt: skip

    def loss(arrays):
        @jax.checkpoint
        def attend(q):
            return jax_flash.flash_attention(
                q, arrays["k"], arrays["v"], is_causal=True, backend="cpu"
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


@pytest.mark.filterwarnings("ignore:.* of flash_attention arrives:RuntimeWarning")
def test_unsharded_query_stays_correct_on_a_mesh():
    """Sequence-sharded operands: gathers are needed, wrong numbers are not."""
    mesh = mesh_of((4, 2))
    arrays = {
        "query": (qkv()[0], P(None, "data")),
        "key": (qkv()[1], P("data", "model")),
        "value": (qkv()[2], P(None, None, None, "model")),
    }
    step = step_of(is_causal=True)
    dout = normal(7, B, T, N, H)
    got = jax.jit(step)(place(mesh, arrays), dout)
    close(got, jax.jit(step)({name: x for name, (x, _) in arrays.items()}, dout))


def test_mixed_leading_dims_under_vmap():
    """vmap over the query alone, its batch sharded: bias and lengths keep their own sharding."""
    mesh = mesh_of((4, 2))
    q, k, v = qkv()
    bias, lengths = normal(3, B, 1, 1, S), np.arange(B, dtype=np.int32) + 4
    specs = (P(None, *SHARDED), SHARDED, SHARDED, P("data"), P("data"))

    def call(q, k, v, bias, lengths):
        return jax_flash.flash_attention(
            q, k, v, bias=bias, key_value_seq_lengths=lengths, backend="cpu"
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


def test_without_shardy_an_error_says_what_to_do():
    """GSPMD would end the process; what it does not split it may compile."""
    mesh, explicit = mesh_of((4, 2)), mesh_of((4, 2), explicit=True)
    x = normal(0, B, T, N, H)

    @jax.jit
    def call(x):
        return jax_flash.flash_attention(x, x, x, backend="cpu")

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
    done = subprocess.run(
        [sys.executable, "-c", SPLIT_SEQUENCE, kind],
        env=os.environ | with_devices(8), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
