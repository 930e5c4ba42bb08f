"""Tilings of the forward kernel for Hopper where units are at most as many as multiprocessors."""

import dataclasses
from typing import Any

import jax
import pytest

from jax_flash import _gpu
from jax_flash._ops import passes
from jax_flash._problem import Shapes, TermShape

from .plain_calls import H200, PLAIN

pytestmark = pytest.mark.quick


def tiling_of(sizes: tuple[int, int, int, int], **change: Any):
    """Makes what a call of a batch, length, heads and head dim is."""
    batch, length, heads, dim = sizes
    of_shapes = {x.name for x in dataclasses.fields(Shapes)} & {*change}
    shapes = Shapes(batch, length, length, heads, heads, dim, dim)
    shapes = dataclasses.replace(shapes, **{name: change.pop(name) for name in of_shapes})
    problem = dataclasses.replace(PLAIN, **change)
    made = _gpu.plan(passes(problem)["forward"], shapes, H200)
    assert made.shared_bytes <= H200.shared_bytes
    return made.tiling


CAUSAL: dict[str, Any] = {"window": (None, 0)}
BIAS = {"terms": ("bias",), "bias": TermShape("bfloat16", 1, 8, 1024, 1024)}
(BATCH,) = jax.export.symbolic_shape("b")
MASK = TermShape("bool", 1, 1, 1024, 1024)


@pytest.mark.parametrize(
    ("sizes", "change", "expected"),
    [
        ((1, 1024, 8, 64), {}, (1, 1, 128, 2)), ((1, 1024, 8, 64), CAUSAL, (1, 1, 128, 2)),
        ((1, 1024, 8, 32), {"terms": ("key_value_lengths",)}, (1, 1, 128, 2)),
        ((1, 1024, 8, 64), BIAS, (1, 1, 128, 2)), ((1, 64, 64, 64), {}, (1, 1, 64, 2)),
        ((1, 1024, 8, 128), {}, (1, 1, 128, 2)), ((1, 1024, 8, 128), BIAS, (1, 1, 128, 2)),
        ((1, 1024, 8, 128), {"dtype": "float16", "window": (200, 0)}, (1, 1, 128, 2)),
        ((7, 512, 1, 192), CAUSAL, (1, 1, 64, 2)), ((1, 1024, 8, 256), {}, (1, 1, 80, 2)),
        ((2, 64, 64, 128), {"kv_heads": 8, "q_len": 32}, (1, 1, 64, 2)),  # of two heads: 64
        ((1, 4096, 2, 64), {}, (1, 1, 128, 2)), ((1, 8512, 1, 128), {}, (2, 1, 128, 3)),
        ((1, 1024, 9, 128), CAUSAL, (1, 1, 128, 2)), ((1, 1024, 9, 256), {}, (2, 1, 80, 2)),
        ((1, 1024, 9, 64), {}, (2, 1, 128, 2)), ((1, 1024, 16, 64), CAUSAL, (2, 1, 128, 2)),
        ((1, 4096, 4, 64), {}, (2, 1, 128, 2)), ((1, 1024, 17, 64), {}, (3, 1, 128, 4)),
        ((1, 1024, 22, 64), CAUSAL, (3, 1, 128, 4)), ((1, 1024, 23, 64), {}, (2, 2, 64, 5)),
        ((1, 1024, 12, 256), CAUSAL, (1, 1, 80, 2)), ((1, 1024, 13, 128), CAUSAL, (2, 1, 128, 3)),
        ((1, 512, 20, 128), CAUSAL, (2, 1, 128, 3)), ((1, 1024, 16, 64), BIAS, (2, 1, 128, 2)),
        ((70, 192, 1, 128), {}, (1, 2, 64, 2)), ((16, 64, 16, 96), {}, (1, 2, 64, 2)),
        ((90, 192, 1, 128), {}, (2, 1, 96, 3)), ((1, 1024, 34, 64), {}, (3, 1, 128, 4)),
        ((1, 1024, 34, 64), CAUSAL, (2, 2, 64, 5)), ((1, 1024, 32, 64), {}, (2, 2, 64, 5)),
        ((1, 300, 40, 64), {}, (2, 1, 128, 2)), ((1, 320, 50, 64), {}, (2, 2, 64, 5)),
    ],
)  # fmt: skip
def test_units_are_one_round(sizes, change, expected):
    """Of 64 rows; up to head dim 64 of 128 rows, or of 192 where those of 128 are more."""
    made = tiling_of(sizes, **change)
    assert (made.consumers, made.teams, made.block_kv, made.stages) == expected
    assert made.ping_pong == (made.consumers == 2 and made.teams == 1)
    assert not made.dynamic or made.consumers * made.teams > 3 or sizes[3] > 64


@pytest.mark.parametrize(
    ("sizes", "window", "expected"),
    [
        ((1, 1024, 17, 128), None, (3, 80, 4)), ((1, 1024, 22, 96), None, (3, 96, 3)),
        ((1, 1024, 22, 72), None, (3, 112, 3)), ((2, 512, 20, 128), None, (3, 64, 4)),
        ((3, 384, 20, 128), None, (3, 64, 4)), ((1, 1024, 40, 128), None, (3, 80, 4)),
        ((1, 1024, 20, 128), 0, (2, 128, 3)), ((1, 1024, 23, 128), None, (2, 128, 3)),
        ((1, 1024, 66, 128), None, (2, 128, 3)), ((1, 1024, 20, 192), None, (2, 112, 2)),
        ((1, 300, 54, 128), None, (2, 80, 3)),
    ],
)  # fmt: skip
def test_larger_units_take_fewer_rounds(sizes, window, expected):
    """Full ones of head dims 72 to 128, from 384 keys on, in at most two rounds of 192 rows."""
    made = tiling_of(sizes, window=(None, window))
    assert (made.consumers, made.block_kv, made.stages) == expected
    assert made.dynamic == (window == 0)


@pytest.mark.parametrize(
    "change",
    [
        {"split": "carried", "dtype": "float16"}, {"batch": BATCH},
        {"terms": ("query_positions", "key_value_positions")},
        {"terms": ("mask", "dropout_state"), "dropout_rate": 0.1, "mask": MASK},
    ],
)  # fmt: skip
def test_what_was_not_timed_has_two_warpgroups(change):
    assert tiling_of((1, 1024, 8, 128), **change).consumers == 2
