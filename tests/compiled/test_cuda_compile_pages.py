"""Compiles the forward kernels over pages: see test_cuda_compile.py."""

import dataclasses

import pytest

from jax_flash import _gpu
from jax_flash._gpu.sm80.pages import Pages80
from jax_flash._gpu.spec import GPUS
from jax_flash._ops.common import Common
from jax_flash._ops.prefill import Prefill
from jax_flash._problem import Shapes

from .compile_cases import EVERYTHING, FEATURES, H200, PLAIN, SHAPES, check

pytestmark = pytest.mark.usefixtures("asserted_shared_memory")

# Head dim, page, features: of each schedule that keys come to.
ALWAYS = [
    (64, 16, ""),
    (128, 64, ""),
    (128, 8, "window softcap sinks"),
    (256, 128, ""),
]
OTHERS = [
    (dim, page, features)
    for dim in (64, 72, 96, 128, 160, 192, 224, 256)
    for page, features in ((16, "sinks"), (128, "softcap"), (8, "window"), (64, "float16"))
]


@pytest.mark.parametrize(
    ("dim", "page", "features"), ALWAYS + OTHERS if EVERYTHING else ALWAYS, ids=str
)
def test_forward_over_pages_compiles_without_spills(dim, page, features):
    problem = dataclasses.replace(PLAIN, window=(None, 0), bottom_right=True)
    for feature in features.split():
        problem = dataclasses.replace(problem, **FEATURES[feature])
    shapes = dataclasses.replace(
        SHAPES, batch=18, q_len=8192, kv_heads=4, head_dim=dim, value_dim=dim, page_size=page
    )
    plan = _gpu.plan(Prefill(problem, None), shapes, H200)
    check(plan, seconds=20, gpu=H200)


# Pages that are copied to bfloat16 ahead.
EIGHT_BITS = [(128, 16, "", "float8_e4m3fn"), (64, 8, "window", "int8")]
OTHERS_OF_EIGHT_BITS = [
    (dim, page, features, dtype)
    for dim in (64, 72, 128, 256)
    for page, features in ((16, "window softcap sinks"), (64, ""))
    for dtype in ("float8_e4m3fn", "int8")
]


@pytest.mark.parametrize(
    ("dim", "page", "features", "dtype"),
    EIGHT_BITS + OTHERS_OF_EIGHT_BITS if EVERYTHING else EIGHT_BITS,
    ids=str,
)
def test_pages_of_eight_bits_compile_without_spills(dim, page, features, dtype):
    problem = dataclasses.replace(PLAIN, window=(None, 0), bottom_right=True)
    for feature in features.split():
        problem = dataclasses.replace(problem, **FEATURES[feature])
    shapes = Shapes(18, 8192, 16384, 32, 8, dim, dim, page_size=page, pages=10**6)
    plan = _gpu.plan(Prefill(problem, None, quantized=dtype), shapes, H200)
    assert plan.family == "pages"
    check(plan, seconds=20, gpu=H200)


# By mma.sync: on each GPU the kernel with the fewest registers to spare.
ALWAYS_80 = [("A100", 128, 16, ""), ("H200", 128, 16, ""), ("RTX 5090", 256, 1, "window sinks")]
OTHERS_80 = [
    (gpu, dim, page, features)
    for gpu in ("A100", "L4", "H200", "B200", "RTX 5090")
    for dim in (64, 72, 96, 128, 192, 256)
    for page, features in (
        (16, "sinks"),
        (12, "softcap"),
        (8, "window"),
        (128, "float16"),
        (16, ""),
    )
]


@pytest.mark.parametrize(
    ("gpu", "dim", "page", "features"), ALWAYS_80 + OTHERS_80 if EVERYTHING else ALWAYS_80, ids=str
)
def test_mma_sync_over_pages_compiles_without_spills(gpu, dim, page, features):
    problem = dataclasses.replace(PLAIN, window=(None, 0), bottom_right=True)
    for feature in features.split():
        problem = dataclasses.replace(problem, **FEATURES[feature])
    shapes = dataclasses.replace(
        SHAPES, batch=18, q_len=8192, kv_heads=4, head_dim=dim, value_dim=dim, page_size=page
    )
    plan = Pages80().plan(Prefill(problem, None), shapes, GPUS[gpu])
    check(plan, seconds=15, gpu=GPUS[gpu])


# The same, of parts of pages that all tokens see whole, and of tails besides.
IN_COMMON = [(128, 64, "softcap", 2), (128, 64, "", 8)]
OTHERS_IN_COMMON = [
    (dim, page, features, heads)
    for dim in (64, 96, 128, 192, 256)
    for page, features in ((16, ""), (64, "float16"), (64, ""), (16, "softcap"))
    for heads in (2, 4, 8)
    if heads == 2 or (dim in (96, 128) and "softcap" not in features)  # which have tails
]


@pytest.mark.parametrize(
    ("dim", "page", "features", "packed"),
    IN_COMMON + OTHERS_IN_COMMON if EVERYTHING else IN_COMMON,
    ids=str,
)
def test_pages_in_common_compile_without_spills(dim, page, features, packed):
    problem = dataclasses.replace(PLAIN, bottom_right=True)
    for feature in features.split():
        problem = dataclasses.replace(problem, **FEATURES[feature])
    shapes = Shapes(1, 128, 4096, 8 * packed, 8, dim, dim, page_size=page)
    plan = _gpu.plan(Common(problem, None, count=2, tails=packed > 2), shapes, H200)
    check(plan, seconds=20, gpu=H200)
