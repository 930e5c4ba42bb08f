"""Wrong calls of jax_flash.context_parallel: what is named, and what would be right."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash
from jax_flash.context_parallel import attention, shard

from ..devices import mesh_with
from .split_sequences import SHARDS, H, K, N, T


def long(length=T, heads=N, kv_heads=K):
    return [jnp.ones((1, length, n, H)) for n in (heads, kv_heads, kv_heads)]


DROPS = {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}
FAULTS = {
    "T": (long(66), {}, ValueError, r"T of query is 66 \(shape .*multiple of 4, the devices"),
    "S": ([long()[0], *long(65)[1:]], {}, ValueError, "S of key is 65 .*multiple of 4"),
    "chunks": (long(68), {"order": "zigzag"}, ValueError, "68 .*of 8, two chunks for each of 4"),
    "heads": (
        long(heads=6, kv_heads=6),
        {"strategy": "all_to_all"},
        ValueError,
        "query has 6 heads, which 4 devices do not divide.*'ring'",
    ),
    "kv heads": (long(kv_heads=2), {"strategy": "all_to_all"}, ValueError, "key has 2 heads.* 4 "),
    "order": (long(), {"order": "zig"}, ValueError, "order is 'zig'; expected one of 'contiguous'"),
    "strategy": (long(), {"strategy": "best"}, ValueError, "strategy is 'best'; expected one of"),
    "axis": (
        long(),
        {"axis_name": "sequence"},
        ValueError,
        r"'sequence', and query has .*\('seq',",
    ),
    "axes": (long(), {"axis_name": ("seq", "seq")}, ValueError, "expected the name of a mesh axis"),
    "dropout": (
        long(),
        {"strategy": "ring", "order": "zigzag", **DROPS},
        NotImplementedError,
        "dropout's pattern is made of squares of 16 .* runs of 8 tokens, no multiple;.*all_to_all",
    ),
    "striped dropout": (
        long(heads=6, kv_heads=6),
        {"order": "striped", **DROPS},
        NotImplementedError,
        "which order 'striped' spreads over .*'all_to_all': query has 6 heads",
    ),
    "blocks": (
        long(192),
        {"strategy": "all_gather", "block_mask": jax_flash.block_mask_of(jnp.ones((2, 2), bool))},
        NotImplementedError,
        "block_mask is made of squares of 128 .* runs of 48 tokens",
    ),
    "bias": (
        long(),
        {"bias": jnp.ones((T, 16))},
        ValueError,
        r"bias has shape \(64, 16\); expected",
    ),
    "keyword": (long(), {"causal": True}, TypeError, "unexpected keyword argument 'causal'"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults(name):
    arrays, options, error, message = FAULTS[name]
    with jax.set_mesh(mesh_with(seq=SHARDS)), pytest.raises(error, match=message):
        attention(*arrays, **({"axis_name": "seq"} | options))


def test_faults_of_how_arrays_are_split():
    q, k, v = long()
    with pytest.raises(ValueError, match="query has no mesh"):
        attention(q, k, v, axis_name="seq")
    mesh = mesh_with(data=2, seq=SHARDS)
    whole = jax.shard_map(
        functools.partial(attention, axis_name="seq"), mesh=mesh, in_specs=P(), out_specs=P()
    )
    with pytest.raises(ValueError, match="query is the same on all devices of axis 'seq'"):
        whole(q, k, v)
    explicit = mesh_with(explicit=True, data=2, seq=SHARDS)
    with jax.set_mesh(explicit):
        placed = [jax.device_put(x, NamedSharding(explicit, P(None, "data"))) for x in (q, k, v)]
        with pytest.raises(ValueError, match=r"query is split over \('data',\) along T"):
            attention(*placed, axis_name="seq")
    heads = mesh_with(explicit=True, seq=2, model=SHARDS)
    with jax.set_mesh(heads):
        q = jax.device_put(q, NamedSharding(heads, P(None, None, "model")))
        with pytest.raises(ValueError, match="key has 2 heads, which the 4 devices of"):
            attention(q, k[:, :, :2], v[:, :, :2], axis_name="seq")


def test_a_term_that_no_strategy_knows(monkeypatch):
    known = tuple(name for name in shard._SPLIT if name != "sinks")
    monkeypatch.setattr(shard, "_SPLIT", known)
    with (
        jax.set_mesh(mesh_with(seq=SHARDS)),
        pytest.raises(NotImplementedError, match="over a split sequence has no sinks; expected"),
    ):
        attention(*long(), axis_name="seq", sinks=jnp.zeros(N))
