"""A sequence split over two GPUs and more: each strategy, documents, windows, score functions."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from jax_flash.context_parallel import attention

from ..hopper import NEEDS_HOPPER
from ..meaning.split_sequences import SPLIT_CALLS, N, arrays_of, on_a_mesh, on_one_device

BACKEND, HEAD_DIM = "cuda", 64
pytestmark = NEEDS_HOPPER


def mesh_over(count: int) -> jax.sharding.Mesh:
    devices = jax.local_devices()
    if len(devices) < count:
        pytest.skip(f"needs {count} devices, and there are {len(devices)}")
    return jax.make_mesh((count,), ("seq",), (AxisType.Auto,), devices=devices[:count])


@functools.cache
def errors_of_one(name, kv_heads):
    """Results in float32, and how far those of one GPU are from them, in the norm."""
    exact = on_one_device(name, "xla", arrays_of(kv_heads, HEAD_DIM, "float32"))
    alone = on_one_device(name, BACKEND, arrays_of(kv_heads, HEAD_DIM, "bfloat16"))
    return exact, errors(alone, exact)


def errors(got, exact):
    return [np.linalg.norm(np.asarray(a, "f4") - b) for a, b in zip(got, exact, strict=True)]


EXCHANGES = [("causal", "all_to_all", "zigzag", 4), ("documents", "all_to_all", "contiguous", 4)]
RUNS = [(count, *call) for count in (2, 3, 4, 6, 8) for call in SPLIT_CALLS]
RUNS += [(count, *call) for count in (2, 4) for call in EXCHANGES]


@pytest.mark.parametrize(("count", "name", "strategy", "order", "kv_heads"), RUNS)
def test_a_split_sequence(count, name, strategy, order, kv_heads):
    """Errors are at most twice those of one GPU, against float32."""
    mesh = mesh_over(count)
    exact, alone = errors_of_one(name, kv_heads)
    arrays = arrays_of(kv_heads, HEAD_DIM, "bfloat16")
    got = on_a_mesh(mesh, name, strategy, order, BACKEND, arrays)
    for ours, theirs in zip(errors(got, exact), alone, strict=True):
        assert ours <= 2 * theirs


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_fewer_kv_heads_than_devices(count):
    mesh = mesh_over(count)
    q, k, v, _ = arrays_of(1, HEAD_DIM, "bfloat16")
    name, heads = ("query", N) if N % count else ("key", 1)
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match=f"{name} has {heads} heads, which {count} devices"),
    ):
        attention(q, k, v, axis_name="seq", strategy="all_to_all", backend=BACKEND)
