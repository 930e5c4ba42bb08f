"""Which kernels compute requests over pages on a GPU, and by which tiling; runs without one."""

from __future__ import annotations

import dataclasses
import re

import jax
import pytest

import jax_flash
from jax_flash import _gpu
from jax_flash._gpu.spec import GPUS
from jax_flash._ops.prefill import Prefill
from jax_flash._problem import Problem, Shapes

pytestmark = pytest.mark.quick

CALL = Prefill(Problem("bfloat16", 0.125, window=(None, 0), bottom_right=True), None)
SHAPES = Shapes(18, 8192, 16384, 32, 8, 128, 128, page_size=16)


def refused(gpu: str = "H200", call: Prefill = CALL, **changes) -> str:
    with _gpu.prefer("pages"):
        shapes = dataclasses.replace(SHAPES, **changes)
        return "; ".join(_gpu.refuse(call, shapes, GPUS[gpu]))


def test_what_the_kernels_do_not_take_is_named():
    assert refused() == ""
    assert "were not run on a GPU" in "; ".join(_gpu.refuse(CALL, SHAPES, GPUS["H200"]))
    assert "run on sm_90 (H100, H200); A100 is sm_80" in refused("A100")
    assert "pages of a multiple of 8 positions, not 12" in refused(page_size=12)
    assert "up to 256 that 8 divides, not 100 and 100" in refused(head_dim=100, value_dim=100)
    assert "not 576 and 512" in refused(head_dim=576, value_dim=512)
    assert "up to 1073741823 positions" in refused(kv_len=1 << 30)
    assert "2048 rows of queries leave most multiprocessors idle" in refused(q_len=64)
    assert "none within keys" in refused(call=dataclasses.replace(CALL, value_dim=64))
    float32 = dataclasses.replace(CALL.problem, dtype="float32")
    assert "not float32" in refused(call=dataclasses.replace(CALL, problem=float32))
    eight_bits = dataclasses.replace(CALL, quantized="float8_e4m3fn")
    assert "no caches of float8_e4m3fn" in refused(call=eight_bits)
    for name in ("q_len", "q_heads", "kv_heads", "kv_len"):
        assert "no tokens, heads or pages" in refused(**{name: 0})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("heads", "packed"), [((32, 8), 4), ((12, 2), 2), ((6, 2), 1), ((8, 8), 1)]
)
def test_heads_that_share_a_unit(heads, packed):
    """A power of two that divides those of a kv head; boxes lie in one page each."""
    with _gpu.prefer("pages"):
        shapes = dataclasses.replace(SHAPES, q_heads=heads[0], kv_heads=heads[1])
        plan = _gpu.plan(CALL, shapes, GPUS["H200"])
    assert plan.tiling.packed_heads == packed
    assert 16 % plan.tiling.key_rows == plan.tiling.block_kv % plan.tiling.key_rows == 0
    assert plan.workspaces["request_plan"].shape[0] == -(-8192 * packed // plan.tiling.block_q) + 18


@pytest.mark.parametrize("preferred", [True, False])
def test_programs(preferred):
    """Requests of one token are decoded, the others computed by either kernel."""
    shaped = jax.ShapeDtypeStruct
    pages = shaped((64, 16, 2, 64), "bfloat16")
    arrays = [shaped((4096, 8, 64), "bfloat16"), pages, pages]
    arrays += [shaped(n, "int32") for n in ((5,), (5, 12), (6,), ())]
    jax.clear_caches()
    with _gpu.prefer("pages" if preferred else "sm90"):
        traced = jax.jit(jax_flash.ragged_paged_attention).trace(*arrays)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    others = "jax_flash_cuda_forward" if preferred else "jax_flash_cuda_decode"
    called = re.findall(r"custom_call @(jax_flash\w+)", text)
    assert called == ["jax_flash_cuda_decode", others]
