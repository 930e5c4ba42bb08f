"""Meshes of three and six devices, heads that they do not divide, uneven documents.

The same calls over real GPUs are in tests/gpu/test_cuda_context_parallel.py.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

import jax_flash
from jax_flash.context_parallel import attention

from ..devices import collectives, mesh_with
from ..small import close, normal
from .split_sequences import CALLS, SPLIT_CALLS, H, arrays_of, on_a_mesh, on_one_device

# One number of devices for each call: compiling a program takes seconds.
COUNTS = (6, 3, 6, 6, 3, 6, 3, 6, 3, 3)
RUNS = [(count, *call) for count, call in zip(COUNTS, SPLIT_CALLS, strict=True)]


@functools.cache
def one_device(name, backend, kv_heads):
    return on_one_device(name, backend, arrays_of(kv_heads, H, jnp.float32))


@pytest.mark.parametrize(("count", "name", "strategy", "order", "kv_heads"), RUNS)
def test_three_and_six_devices(count, name, strategy, order, kv_heads):
    backend = "xla" if "score_mod" in CALLS[name] else "cpu"
    arrays = arrays_of(kv_heads, H, jnp.float32)
    got = on_a_mesh(mesh_with(seq=count), name, strategy, order, backend, arrays)
    close(tuple(got), one_device(name, backend, kv_heads))


def test_dropout_over_three_devices_is_one_devices():
    q, k, v, _ = arrays_of(2, H, jnp.float32)
    options = {"dropout_rate": 0.3, "dropout_key": jax.random.key(1), "is_causal": True}
    one = jax.jit(functools.partial(jax_flash.flash_attention, **options))(q, k, v)
    with jax.set_mesh(mesh_with(seq=3)):
        ring = functools.partial(attention, axis_name="seq", strategy="ring", **options)
        close(jax.jit(ring)(q, k, v), one)


@pytest.mark.parametrize(("count", "kv_heads"), [(3, 4), (6, 2), (8, 2)])
def test_heads_that_the_devices_do_not_divide(count, kv_heads):
    """Strategy "all_to_all" says so; None takes another, with one device's result."""
    heads = {3: 8, 6: 6, 8: 8}[count]
    mesh = mesh_with(seq=count)
    q, k, v = (normal(i, 1, 1056, n, H) for i, n in enumerate((heads, kv_heads, kv_heads)))
    name = "query" if heads % count else "key"
    message = f"{name} has {heads if name == 'query' else kv_heads} heads, which {count} devices"
    with jax.set_mesh(mesh):
        with pytest.raises(ValueError, match=message):
            attention(q, k, v, axis_name="seq", strategy="all_to_all", is_causal=True)
        chosen = functools.partial(attention, axis_name="seq", is_causal=True)
        program = jax.jit(chosen).lower(q, k, v).compile()
        assert set(collectives(program)) == {"all-gather"}  # fewer than 1024 keys a device
        close(
            program(q, k, v),
            jax.jit(functools.partial(jax_flash.flash_attention, is_causal=True))(q, k, v),
        )
