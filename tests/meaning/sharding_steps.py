"""Calls on meshes (data, model) and the same on one device, for tests of sharding."""

from __future__ import annotations

import jax
import jax.export
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash

from ..small import numpy_normal as normal

B, T, S, N, K, H = 8, 12, 20, 16, 8, 8
MESHES = ((8, 1), (4, 2), (1, 8))
SHARDED = P("data", None, "model", None)  # of query, key, value


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


def step_of(wrt=("query", "key", "value"), *, backend="cpu", **options):
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


def close(got, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=3e-5),
        got,
        expected,
    )


def sharded_and_single(mesh, arrays, **options):
    """(compiled, got, expected): the step on the mesh, and the same on one device."""
    step = step_of(**options)
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
