"""Sizes and arrays of the tests of sequences that are split over devices."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash
from jax_flash.context_parallel import attention, reorder, restore

from ..small import normal

B, T, N, K, H = 2, 64, 8, 4, 8
SHARDS = 4
SPLIT = P(None, "seq")


def qkv(dtype=jnp.float32):
    shapes = {"query": (B, T, N, H), "key": (B, T, K, H), "value": (B, T, K, H)}
    return {name: normal(i, *x, dtype=dtype) for i, (name, x) in enumerate(shapes.items())}


# ---- meshes of any number of devices -------------------------------------------------------------

LENGTH = 768  # two chunks of whole tokens for each of 2, 3, 4, 6 and 8 devices
# Documents of one token, of a few, and one over most of the devices.
ENDS = (1, 2, 5, 90, 97, 600, 601, 767)
DOCUMENTS = np.searchsorted(ENDS, np.arange(LENGTH), side="right").astype(np.int32)[None]


def bent(score, batch, head, query, key):
    return score - 0.02 * (head + 1) * jnp.sqrt(jnp.abs(query - key) + 1.0)


CALLS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "documents": {
        "is_causal": True,
        "query_segment_ids": DOCUMENTS,
        "key_value_segment_ids": DOCUMENTS,
    },
    "window": {"is_causal": True, "local_window_size": (150, 0)},
    "two sides": {"local_window_size": (90, 60)},
    "score": {"is_causal": True, "score_mod": bent},
}
SPLIT_CALLS = (
    ("full", "ring", "contiguous", 4),
    ("causal", "ring", "zigzag", 4),
    ("documents", "ring", "zigzag", 1),
    ("documents", "ring", "striped", 4),
    ("documents", "all_gather", "contiguous", 4),
    ("window", "ring", "contiguous", 1),
    ("window", "ring", "zigzag", 4),
    ("two sides", "all_gather", "contiguous", 4),
    ("score", "ring", "zigzag", 4),
    ("score", "ring", "striped", 1),
)


def arrays_of(kv_heads: int, head_dim: int, dtype: Any) -> list[jax.Array]:
    """Query, key, value and the cotangent of out."""
    heads = enumerate((N, kv_heads, kv_heads, N))
    return [normal(i, 1, LENGTH, n, head_dim, dtype=dtype) for i, n in heads]


def step_of(attend: Any, options: dict[str, Any]) -> Any:
    """A program of (arrays, segment ids) that makes out and the gradients of three arrays."""
    fixed = {name: x for name, x in options.items() if not name.endswith("_ids")}

    @jax.jit
    def step(arrays, ids):
        *qkv, dout = arrays
        out, pull = jax.vjp(lambda *qkv: attend(*qkv, **fixed, **ids), *qkv)
        return out, *pull(dout.astype(out.dtype))

    return step


def ids_of(options: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in options.items() if name.endswith("_ids")}


def on_one_device(name: str, backend: str, arrays: list[jax.Array]) -> Any:
    attend = functools.partial(jax_flash.flash_attention, backend=backend)
    return step_of(attend, CALLS[name])(arrays, ids_of(CALLS[name]))


def on_a_mesh(
    mesh: Mesh, name: str, strategy: Any, order: Any, backend: str, arrays: list[jax.Array]
) -> list[jax.Array]:
    """The same over all devices of a mesh, in the sequence's own order again."""
    split = NamedSharding(mesh, SPLIT)
    attend = functools.partial(
        attention, axis_name="seq", strategy=strategy, order=order, backend=backend
    )

    def place(x):
        return jax.device_put(reorder(x, order, mesh.size, 1), split)

    with jax.set_mesh(mesh):
        placed = jax.tree.map(place, (arrays, ids_of(CALLS[name])))
        got = step_of(attend, CALLS[name])(*placed)
        assert all(x.sharding.is_equivalent_to(split, x.ndim) for x in got)
    return [restore(np.asarray(x), order, mesh.size, 1) for x in got]
