"""Sizes and arrays of the tests of sequences that are split over devices."""

from __future__ import annotations

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ..small import normal

B, T, N, K, H = 2, 64, 8, 4, 8
SHARDS = 4
SPLIT = P(None, "seq")


def qkv(dtype=jnp.float32):
    shapes = {"query": (B, T, N, H), "key": (B, T, K, H), "value": (B, T, K, H)}
    return {name: normal(i, *x, dtype=dtype) for i, (name, x) in enumerate(shapes.items())}
