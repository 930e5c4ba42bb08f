"""`debug_values`: contents that are clipped or NaN otherwise are errors that name the row."""

from __future__ import annotations

import doctest
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash
from jax_flash import _debug, decode_attention, fill_cache, flash_attention

B, T, S, N, K, H = 2, 8, 16, 4, 2, 16
TABLE = np.array([[0, 1, -1], [3, 2, 9]], np.int32)  # of four pages of 8; none is missing before 16


def ones(*shape: int) -> jax.Array:
    return jnp.ones(shape, jnp.bfloat16)


QUERY, KEY, STEP, POOL = ones(B, T, N, H), ones(B, S, K, H), ones(B, 1, N, H), ones(4, 8, K, H)


def attend(backend, **arrays):
    return flash_attention(QUERY, KEY, KEY, is_causal=True, backend=backend, **arrays)


def decode(backend, lengths, **options):
    return decode_attention(STEP, KEY, KEY, lengths, backend=backend, **options).out


def decode_pages(backend, lengths, page_table, **options):
    arrays = STEP, POOL, POOL, lengths
    return decode_attention(*arrays, page_table=page_table, backend=backend, **options).out


def fill_pages(_, lengths, page_table, **options):
    return fill_cache(POOL, POOL, KEY, KEY, lengths, page_table=page_table, **options)


def attend_float8(backend, **scales):
    x = jnp.ones((1, T, N, 64), jnp.float8_e4m3fn)
    return flash_attention(x, x, x, backend=backend, **scales)


class Fault(NamedTuple):
    call: Callable[..., Any]
    right: dict[str, Any]  # contents that are taken; other keywords are the same in both
    wrong: dict[str, Any]
    says: str
    options: Mapping[str, Any] = MappingProxyType({})


def ids(shape, wrong=None, dtype=np.int64):
    x = np.zeros(shape, dtype)
    if wrong is not None:
        x[1, 3] = wrong
    return x


KEY_IDS = {"key_value_segment_ids": ids((B, S))}
FAULTS = {
    "query lengths": Fault(
        attend,
        {"query_seq_lengths": [0, T]},
        {"query_seq_lengths": [T, -1]},
        r"query_seq_lengths\[1\] is -1; expected 0 to T = 8",
    ),
    "key lengths": Fault(
        attend,
        {"key_value_seq_lengths": [S, 3]},
        {"key_value_seq_lengths": [S + 1, 40]},
        r"key_value_seq_lengths\[0\] is 17 \(and 1 more\); expected 0 to S = 16",
    ),
    "segment ids": Fault(
        attend,
        {"query_segment_ids": ids((B, T), 7)} | KEY_IDS,
        {"query_segment_ids": ids((B, T), 2**32)} | KEY_IDS,
        r"query_segment_ids\[1, 3\] is 4294967296; expected ids of int32",
    ),
    "segment ids of two dtypes": Fault(
        attend,
        {"query_segment_ids": ids((B, T), 7, np.uint32)} | KEY_IDS,
        {"query_segment_ids": ids((B, T), 2**32 - 1, np.uint32)} | KEY_IDS,
        r"query_segment_ids\[1, 3\] is 4294967295; expected ids of int32",
    ),
    "positions": Fault(
        attend,
        {"key_value_positions": ids((B, S), -5)},
        {"key_value_positions": ids((B, S), -(2**31) - 1)},
        r"key_value_positions\[1, 3\] is -2147483649; expected positions of int32",
    ),
    "scales": Fault(
        attend_float8,
        {"key_scale": np.ones((1, 1, N), np.float32), "value_scale": np.float32(0)},
        {"key_scale": np.float32([[1, 0, -2, -1]])},
        r"key_scale\[0, 2\] is -2\.0 \(and 1 more\); expected 0 or above",
    ),
    "cache": Fault(
        decode,
        {"lengths": [S, 0]},
        {"lengths": [S, S + 1]},
        r"lengths\[1\] is 17; expected 0 to L = 16",
    ),
    "pages": Fault(
        decode_pages,
        {"lengths": [16, 16], "page_table": TABLE},
        {"lengths": [16, 17], "page_table": TABLE},
        r"page_table\[1, 2\] is 9, the page of positions 16 to 23 of a row that needs 0 to 16; "
        "expected 0 to P - 1 = 3",
    ),
    "pages behind a window": Fault(
        decode_pages,
        {"lengths": [16, 24], "page_table": [[-1, 1, -1], [-1, -1, 2]]},
        {"lengths": [16, 23], "page_table": [[-1, 1, -1], [-1, -1, 2]]},
        r"page_table\[1, 1\] is -1, .* that needs 15 to 22",
        {"local_window_size": 7},
    ),
    "more than all pages": Fault(
        decode_pages,
        {"lengths": [16, 16], "page_table": TABLE},
        {"lengths": [25, 16], "page_table": TABLE},
        r"lengths\[0\] is 25; expected 0 to M \* S = 24",
    ),
    "filled pages": Fault(
        fill_pages,
        {"lengths": [16, 16], "page_table": TABLE, "start": [0, 15]},
        {"lengths": [17, 16], "page_table": TABLE, "start": [1, 15]},
        r"page_table\[0, 2\] is -1, .* that needs 1 to 16",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_contents_are_errors_that_name_the_row(name, backend):
    """Before the program where they are known, under jit while it runs; and nothing without it."""
    fault = FAULTS[name]

    def call(arrays):
        return fault.call(backend, **arrays, **fault.options)

    jitted = jax.jit(call)
    with jax.enable_x64(True):
        right, wrong = jax.tree.map(jnp.asarray, (fault.right, fault.wrong), is_leaf=_is_array)
        with jax_flash.debug_values():
            with pytest.raises(ValueError, match=fault.says):
                call(wrong)
            with pytest.raises(jax.errors.JaxRuntimeError, match=fault.says):
                jax.block_until_ready(jitted(wrong))
            jax.block_until_ready(jitted(right))
        jax.block_until_ready(jitted(wrong))
    jax.effects_barrier()


def _is_array(x: Any) -> bool:
    return isinstance(x, list | np.ndarray)


def test_transformations_and_lists():
    lengths = jnp.array([[S, 3], [S, S + 1]])
    says = r"key_value_seq_lengths\[1\] is 17; expected 0 to S = 16"

    def loss(lengths, scale):
        return jnp.sum(attend(None, key_value_seq_lengths=lengths, scale=scale))

    def both(lengths, right):
        calls = (
            jax.vmap(loss, in_axes=(0, None)),
            lambda lengths, x: jax.grad(jax.checkpoint(loss), 1)(lengths[1], x),
            lambda lengths, x: jax.lax.map(lambda one: loss(one, x), lengths),
            lambda lengths, x: loss([lengths[0, 0], lengths[1, 1]], x),
        )
        for call in calls:
            with pytest.raises(jax.errors.JaxRuntimeError, match=says):
                jax.block_until_ready(jax.jit(call)(lengths, 0.3))
            jax.block_until_ready(jax.jit(call)(right, 0.3))

    with jax_flash.debug_values():
        both(lengths, lengths - 1)
        with jax_flash.debug_values(False):
            jax.block_until_ready(loss(lengths[1], 0.3))
    jax.effects_barrier()


@pytest.mark.parametrize("kinds", [(AxisType.Auto,) * 2, (AxisType.Explicit,) * 2], ids=str)
@pytest.mark.parametrize("axes", [(), ("data",), ("data", "model")], ids="-".join)
def test_meshes(kinds, axes):
    """The row is that of the whole under jit, of the device's own under shard_map."""
    devices = jax.devices("cpu")
    if len(devices) < 4:
        pytest.skip("needs four CPU devices")
    mesh = jax.make_mesh((2, 2), ("data", "model"), kinds, devices=devices[:4])

    def call(x, lengths):
        return flash_attention(x, x, x, key_value_seq_lengths=lengths)

    mapped = call
    if axes:
        mapped = jax.shard_map(
            call, axis_names={*axes}, in_specs=(P("data"), P("data")), out_specs=P("data")
        )
    with jax.set_mesh(mesh), jax_flash.debug_values():
        split = NamedSharding(mesh, P("data"))
        x = jax.device_put(ones(4, T, N, H), split)
        row = 1 if axes else 3
        with pytest.raises(
            jax.errors.JaxRuntimeError, match=rf"lengths\[{row}\] is 9; expected 0 to S = 8"
        ):
            jax.block_until_ready(
                jax.jit(mapped)(x, jax.device_put(np.array([1, 2, 3, 9], np.int32), split))
            )
        jax.block_until_ready(
            jax.jit(mapped)(x, jax.device_put(np.array([1, 2, 3, 8], np.int32), split))
        )
        jax.effects_barrier()


def test_the_docstrings_example():
    failed, tried = doctest.testmod(_debug)
    assert tried
    assert not failed


PROGRAM = """
import jax.numpy as jnp
import jax_flash

x = jnp.ones((2, 4, 1, 8))
try:
    jax_flash.flash_attention(x, x, x, query_seq_lengths=jnp.array([4, 5]), backend="xla")
except ValueError as error:
    print(error)
"""


def test_the_environment_turns_it_on():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"JAX_FLASH_DEBUG_VALUES": "1", "JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.strip() == "query_seq_lengths[1] is 5; expected 0 to T = 4", done.stderr
