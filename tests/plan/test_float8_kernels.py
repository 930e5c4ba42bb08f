"""Which calls of float8 Hopper's kernels take, and the reasons for others."""

from __future__ import annotations

from typing import Any

import jax
import pytest

import jax_flash
from jax_flash import _backends, _gpu
from jax_flash._float8 import DTYPE
from jax_flash._gpu.sm90.forward_parts import splits_last_wave
from jax_flash._gpu.sm90_float8 import choose
from jax_flash._ops.float8 import Float8
from jax_flash._problem import Problem, Shapes

CROWDED = "no left window, softcap, segment ids, positions or block mask at head dims above 128"
SEGMENTS = {"terms": ("query_segments", "key_value_segments")}
POSITIONS = {"terms": ("query_positions", "key_value_positions"), "window": (None, 0)}


@pytest.mark.parametrize(
    ("dim", "changes", "reason"),
    [
        (64, {"softcap": 3.0, "window": (100, 100)}, None),
        (128, SEGMENTS, None),
        (192, {"window": (None, 0)}, None),
        (256, {"terms": ("key_value_lengths",)}, None),
        (192, {"window": (100, 0)}, CROWDED),
        (256, {"softcap": 3.0}, CROWDED),
        (256, SEGMENTS, CROWDED),
        (256, POSITIONS, CROWDED),
        (160, {}, "take head dims up to 128, 192 or 256, not 160"),
    ],
)
def test_which(dim: int, changes: dict[str, Any], reason: str | None):
    call = Float8(Problem(dtype=DTYPE, scale=0.1, **changes), None)
    shapes = Shapes(2, 512, 512, 4, 4, dim, dim)
    reasons = _backends.BACKENDS["cuda"].decline(call, shapes, _gpu.spec.GPUS["H100"])
    assert bool(reasons) == (reason is not None)
    assert reason is None or any(reason in said for said in reasons)


def test_rounded_weights_are_added_up_where_nobody_reads_lse():
    problem, gpu = Problem(dtype=DTYPE, scale=0.1), _gpu.spec.GPUS["H100"]
    shapes = Shapes(2, 512, 512, 4, 4, 64, 64)
    for with_lse in (False, True):
        (plan,) = _gpu.plans(Float8(problem, None, with_lse=with_lse), shapes, gpu)
        assert plan.constants["kSumsByProduct"] != with_lse

    def attend(x, **options):
        return jax_flash.flash_attention(x, x, x, quantize="fp8", **options)

    def read(f) -> bool:
        calls = jax.make_jaxpr(f)(jax.ShapeDtypeStruct((1, 128, 2, 64), "bfloat16"))
        text = str(calls)
        assert ("with_lse=True" in text) != ("with_lse=False" in text)
        return "with_lse=True" in text

    assert not read(attend)
    assert read(lambda x: attend(x, return_lse=True))
    assert read(jax.grad(lambda x: attend(x).astype("float32").sum()))


@pytest.mark.parametrize(
    ("batch", "heads", "length", "rows", "splits"),
    [(1, 16, 16384, 192, True), (2, 16, 8192, 192, True), (4, 16, 4096, 192, False),
     (1, 8, 16384, 128, False), (1, 1, 8192, 192, True), (1, 1, 700, 192, False)],
)  # fmt: skip
def test_units_of_the_last_wave_are_in_parts_where_that_is_faster(
    batch: int, heads: int, length: int, rows: int, splits: bool
):
    shapes = Shapes(batch, length, length, heads, heads, 128, 128)
    assert splits_last_wave(shapes, _gpu.spec.GPUS["H100"], rows) == splits


@pytest.mark.parametrize(
    ("dim", "length", "exact", "by_product"),
    [(64, 16384, False, True), (64, 2048, True, False), (128, 2048, False, False)],
)
def test_a_product_adds_weights_up_where_nobody_reads_lse(
    dim: int, length: int, exact: bool, by_product: bool
):
    shapes = Shapes(1, length, length, 2, 2, dim, dim)
    problem = Problem(dtype="bfloat16", scale=0.1)
    tiling = choose(problem, shapes, _gpu.spec.GPUS["H100"], exact_sums=exact)
    assert tiling.product_sums == by_product


def test_a_window_is_not_in_parts():
    shapes = Shapes(1, 16384, 16384, 16, 16, 128, 128)
    for window in ((None, None), (8192, None), (None, 0), (8192, 0)):
        problem = Problem(dtype="bfloat16", scale=0.1, window=window)
        tiling = choose(problem, shapes, _gpu.spec.GPUS["H100"], exact_sums=True)
        assert tiling.splits == (window == (None, None))
