"""Which kernels compute requests over pages on a GPU, and by which tiling; runs without one."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import _gpu
from jax_flash._gpu import copies
from jax_flash._gpu.plan import Kernel
from jax_flash._gpu.sizes import SMS, evaluate, minimum
from jax_flash._gpu.spec import GPUS
from jax_flash._ops.common import Common, parts_of
from jax_flash._ops.prefill import Prefill
from jax_flash._problem import Problem, Shapes

pytestmark = pytest.mark.quick

CALL = Prefill(Problem("bfloat16", 0.125, window=(None, 0), bottom_right=True), None)
SHAPES = Shapes(18, 8192, 16384, 32, 8, 128, 128, page_size=16)


def refused(gpu: str = "H200", call: Prefill = CALL, **changes) -> str:
    return "; ".join(_gpu.refuse(call, dataclasses.replace(SHAPES, **changes), GPUS[gpu]))


def tiling(call: Prefill = CALL, **changes):
    return _gpu.plan(call, dataclasses.replace(SHAPES, **changes), GPUS["H200"]).tiling


def test_what_the_kernels_do_not_take_is_named():
    assert refused() == ""
    turing = dataclasses.replace(GPUS["A100"], name="T4", arch="sm_75")
    reasons = _gpu.refuse(CALL, SHAPES, turing)
    assert any("run on sm_80 and later; T4 is sm_75" in reason for reason in reasons)
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
    ("gpu", "page", "family"),
    [("H200", 16, "pages"), ("H200", 12, "pages_sm80"), ("A100", 16, "pages_sm80"),
     ("RTX 5090", 1, "pages_sm80"), ("B200", 128, "pages_sm80")],
)  # fmt: skip
def test_families(gpu, page, family):
    """By TMA pages are multiples of 8 positions; by cp.async, on any GPU, they are of any size."""
    plan = _gpu.plan(CALL, dataclasses.replace(SHAPES, page_size=page), GPUS[gpu])
    assert plan.family == family
    assert plan.tiling.packed_heads == 4
    assert plan.constants["kPageSize"] == page


@pytest.mark.parametrize(
    ("heads", "packed"), [((32, 8), 4), ((12, 2), 2), ((6, 2), 1), ((8, 8), 1)]
)
def test_heads_that_share_a_unit(heads, packed):
    """A power of two that divides those of a kv head; boxes lie in one page each."""
    shapes = dataclasses.replace(SHAPES, q_heads=heads[0], kv_heads=heads[1])
    plan = _gpu.plan(CALL, shapes, GPUS["H200"])
    assert plan.tiling.packed_heads == packed
    assert 16 % plan.tiling.key_rows == plan.tiling.block_kv % plan.tiling.key_rows == 0
    assert plan.workspaces["request_plan"].shape[0] == -(-8192 * packed // plan.tiling.block_q) + 18


@pytest.mark.parametrize(
    ("dim", "page", "block", "consumers"),
    [(64, 16, 128, 3), (64, 128, 128, 3), (128, 16, 80, 3), (128, 32, 80, 3), (128, 80, 80, 3),
     (128, 64, 64, 3), (128, 192, 64, 3), (96, 128, 64, 3), (256, 64, 80, 2)],
)  # fmt: skip
def test_tilings(dim, page, block, consumers):
    """Blocks of one page where pages have 64 keys, at head dims 72 to 128."""
    made = tiling(head_dim=dim, value_dim=dim, page_size=page)
    assert (made.block_kv, made.consumers) == (block, consumers)
    assert made.clears_values == (dim > 128)
    assert (made.drains, made.drains_to_hide) == (False, False)


def test_values_are_cleared_where_their_rows_cannot_be_computed_again_without_spills():
    window = dataclasses.replace(CALL.problem, window=(500, 0), softcap=30.0)
    made = tiling(dataclasses.replace(CALL, problem=window), head_dim=64, value_dim=64)
    assert (made.consumers, made.clears_values) == (2, True)


@pytest.mark.parametrize(
    ("positions", "together"), [(16384, 4), (9000, 4), (2064, 8), (1 << 20, 1)]
)
def test_sets_of_kv_heads_are_of_one_size(positions, together):
    """Seven fit in L2 at 9000 positions: four and four, not seven and one."""
    assert tiling(kv_len=positions).l2_heads == together


def arguments(dtype="bfloat16", cache=None, T=4096, B=5, P=64, M=12, S=16, lead=()) -> dict:
    def array(*shape, dtype: str = "int32"):
        return jax.ShapeDtypeStruct((*lead, *shape), dtype)

    pages = array(P, S, 2, 64, dtype=cache or dtype)
    arrays = {"query": array(T, 8, 64, dtype=dtype), "key_pages": pages, "value_pages": pages}
    arrays |= {"lengths": array(B), "page_table": array(B, M), "query_starts": array(B + 1)}
    return arrays | {"rows": array()}


def called(text: str) -> list[str]:
    return re.findall(r"custom_call @jax_flash_cuda_(\w+)", text)


def program(arrays: dict, **options) -> list[str]:
    def call(arrays):
        return jax_flash.ragged_paged_attention(**arrays, **options)

    call = jax.vmap(call) if arrays["rows"].ndim else call
    return called(jax.jit(call).trace(arrays).lower(lowering_platforms=("cuda",)).as_text())


SCALES = {"key_scale": 1.0, "value_scale": 1.0}
KERNEL, PIECES = ["decode", "forward"], ["decode", "decode"]
BOTH = [*KERNEL, "decode"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, KERNEL), ({"B": 4000}, KERNEL), ({"lead": (3,)}, KERNEL), ({"S": 1024}, KERNEL),
     ({"T": 64}, PIECES), ({"S": 12}, ["decode", "sm80_forward"]), ({"dtype": "float32"}, PIECES),
     ({"P": 0}, PIECES), ({"S": 0}, PIECES), ({"M": 0}, PIECES), ({"T": 0}, [])],
    ids=str,
)  # fmt: skip
def test_programs(changes, expected):
    """Requests of one token are decoded, the others computed by either kernel."""
    assert program(arguments(**changes)) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, KERNEL), ({"cache": "int8"}, KERNEL), ({"lead": (3,)}, KERNEL), ({"B": 170}, KERNEL),
     ({"B": 200}, BOTH), ({"P": 200000, "M": 18000}, KERNEL), ({"P": 200000, "M": 20000}, BOTH),
     ({"P": 100000, "M": 20000}, KERNEL), ({"dtype": "float16"}, PIECES), ({"S": 12}, PIECES),
     ({"T": 64}, PIECES), ({"P": 0}, PIECES)],
    ids=str,
)  # fmt: skip
def test_programs_over_pages_of_eight_bits(changes, expected):
    """Where a request may have few rows, or not all pages fit, it is asked on the device."""
    given = {"cache": "float8_e4m3fn"} | changes
    lead = given.get("lead", ())
    scales = {name: jax.ShapeDtypeStruct(lead, "float32") for name in SCALES}
    assert program(arguments(**given) | scales) == expected


def test_place_for_copies():
    """A gigabyte at most: 262144 positions of eight heads of 128."""
    of = dataclasses.replace(SHAPES, batch=10, kv_len=4096, pages=5000)
    assert [copies.places(dataclasses.replace(of, pages=n)) for n in (500, 10**7)] == [500, 2560]
    assert copies.places(dataclasses.replace(of, kv_len=1 << 20, pages=10**7)) == 262144 // 16
    call = dataclasses.replace(CALL, quantized="int8")
    plan = _gpu.plan(call, dataclasses.replace(of, kv_len=1 << 20, pages=10**7), GPUS["H200"])
    assert plan.workspaces["copied_keys"].shape == (262144 // 16, 16, 8, 128)
    assert plan.workspaces["claims"].shape == (10**7,)
    # A page for each request's whole text: in its place copies of one may take more.
    whole = {"kv_len": 1 << 18, "page_size": 1 << 18, "pages": 16}
    assert refused(call=call, **whole) == ""
    whole |= {"kv_len": 1 << 19, "page_size": 1 << 19}
    assert refused(call=call, **whole)
    (reason,) = copies.refuse(dataclasses.replace(SHAPES, **whole), "bfloat16", "kernels")
    assert "of up to 1073741824 bytes, not 2147483648" in reason


def test_pages_that_requests_have_in_common_are_copied_once():
    """Where all pages have place each request of many tokens is copied, as often as it names them.

    Else there is place for the first one's 32 pages, and not for the second's.
    """
    lengths, count = np.full(202, 500), np.full(202, 1)
    count[:4], lengths[200:] = 64, 0
    named = {"q": (800, 32, 64), "page_table": (200, 32), "lengths": lengths, "count": count}
    call = dataclasses.replace(CALL, quantized="int8")
    for pages, copied in ((40, 4), (1 << 17, 1)):
        named |= {"k": (pages, 16, 8, 64), "v": (pages, 16, 8, 64)}
        arrays: Any = {
            name: jax.ShapeDtypeStruct(x, "int8") if isinstance(x, tuple) else jnp.asarray(x)
            for name, x in named.items()
        }
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(copies, "MOST_BYTES", 40 * 2 * 16 * 8 * 128)
            found = call._copied(arrays)
        assert found is not None
        np.testing.assert_array_equal(found[:200], np.arange(200) < copied)


def test_programs_of_ancestors_and_shared_pages(few_are_shared):
    arrays = arguments()
    ancestors = {"ancestors": jax.ShapeDtypeStruct((4096, 8), "bool")}
    shared = {"shared_pages": jax.ShapeDtypeStruct((3,), "int32")}
    # The eight tokens of each request among themselves are few enough for XLA's products.
    assert program(arrays | ancestors) == ["decode", "decode", "forward"]
    assert program(arrays | shared) == ["forward", *KERNEL]
    assert program(arguments(T=60, B=60) | shared) == ["decode", "decode"]
    assert program(arguments(T=64, B=64) | shared) == ["forward", "decode"]
    # Units have the tails of tokens, too.
    pages = jax.ShapeDtypeStruct((64, 16, 2, 128), "bfloat16")
    wide = arguments(T=64, B=64) | {"key_pages": pages, "value_pages": pages} | shared
    wide |= {"query": jax.ShapeDtypeStruct((64, 8, 128), "bfloat16")}
    assert program(wide) == ["forward"]
    assert program(wide, softcap=9.0) == ["forward", "decode"]
    assert program(arguments(T=64, B=64, cache="float8_e4m3fn") | shared | SCALES) == PIECES


@pytest.mark.parametrize(
    ("tokens", "heads", "positions", "parts"),
    [(128, (64, 8), 4096, 2), (128, (64, 8), 300, 1), (32, (64, 8), 4096, 8),
     (128, (32, 4), 4096, 4), (300, (8, 8), 2048, 5), (1024, (64, 8), 4096, 1)],
)  # fmt: skip
def test_parts_of_pages_in_common_fill_rounds(tokens, heads, positions, parts):
    """64 units of 128 rows in two parts are a round of 132 multiprocessors."""
    shapes = dataclasses.replace(
        SHAPES, q_len=tokens, q_heads=heads[0], kv_heads=heads[1], kv_len=positions
    )
    assert parts_of(shapes) == parts


@pytest.mark.parametrize("tokens", [64, 700, 4096])
@pytest.mark.parametrize(
    ("heads", "rows"), [((8, 2), 4), ((64, 8), 8), ((48, 2), 12), ((64, 1), 16)]
)
def test_tails_have_a_warpgroup_of_their_own(tokens, heads, rows):
    """As many query heads of a kv head as a product has columns for; all registers are shared out.

    Many tokens of many parts, too: as many without tails have units of 192 rows.
    """
    changes = {"q_len": tokens, "q_heads": heads[0], "kv_heads": heads[1]}
    problem = Problem("bfloat16", 0.125, bottom_right=True)
    for positions in (512, 8192, 1 << 17):
        for parts in (1, 3, 33):
            call = Common(problem, None, count=parts + 1, tails=True)
            made = tiling(call, kv_len=positions, **changes)
            assert (made.consumers, made.tail_rows) == (2, rows)
            assert made.tail_stages >= 3
            assert made.shared_bytes <= 227 * 1024
            producer, consumer = made.registers
            assert producer + made.tail_registers + 2 * consumer == 512
    wide = tiling(Common(problem, None, count=3), kv_len=8192, **changes)
    assert (wide.consumers, wide.tail_rows) == (3 if tokens > 700 else wide.consumers, 0)


def test_tails_are_dealt_out_to_all_multiprocessors():
    """However few units pages in common make; what merges repairs rows, too."""
    problem = Problem("bfloat16", 0.125, bottom_right=True)
    shapes = dataclasses.replace(SHAPES, batch=1, q_len=128, kv_len=128)
    for tails, grid, last in ((True, SMS, "merge"), (False, minimum(SMS, 32), "exact")):
        plan = _gpu.plan(Common(problem, None, count=1 + tails, tails=tails), shapes, GPUS["H200"])
        steps = [step for step in plan.launch.steps if isinstance(step, Kernel)]
        assert [step.entry for step in steps] == ["flash_forward", f"flash_forward_{last}"]
        numbers = dict(plan.dims) | {"sms": 132}
        assert evaluate(steps[0].grid, numbers) == evaluate(grid, numbers)


@pytest.mark.parametrize(
    "changes", [{"head_dim": 64}, {"value_dim": 192}, {"head_dim": 256, "value_dim": 256}], ids=str
)
def test_where_tails_are_calls_of_their_own(changes):
    problem = Problem("bfloat16", 0.125, bottom_right=True)
    words = "tails beside pages in common have head dims 72 to 128, and no softcap"
    assert words in refused(call=Common(problem, None, tails=True), **changes)
    assert refused(call=Common(problem, None), **changes) == ""
    capped = dataclasses.replace(problem, softcap=9.0)
    assert words in refused(call=Common(capped, None, tails=True))
    assert refused(call=Common(problem, None, tails=True)) == ""


def test_sinks_of_each_member_take_pieces():
    arrays, sinks = arguments(), jax.ShapeDtypeStruct((2, 8), "float32")

    def call(sinks, arrays):
        return jax_flash.ragged_paged_attention(**arrays, sinks=sinks)

    traced = jax.jit(jax.vmap(call, in_axes=(0, None))).trace(sinks, arrays)
    assert called(traced.lower(lowering_platforms=("cuda",)).as_text()) == PIECES


def test_an_export_with_symbolic_sizes():
    sizes = dict(zip("TBPM", jax.export.symbolic_shape("t, b, p, m"), strict=True))
    exported = jax.export.export(
        jax.jit(lambda arrays: jax_flash.ragged_paged_attention(**arrays)),
        platforms=["cuda"],
        disabled_checks=jax_flash.EXPORT_CHECKS,
    )(arguments(**sizes))
    assert called(exported.mlir_module()) == KERNEL


def test_pages_of_eight_bits_of_symbolic_sizes_take_pieces():
    sizes = dict(zip("TB", jax.export.symbolic_shape("t, b"), strict=True))
    exported = jax.export.export(
        jax.jit(lambda arrays: jax_flash.ragged_paged_attention(**arrays, **SCALES)),
        platforms=["cuda"],
        disabled_checks=jax_flash.EXPORT_CHECKS,
    )(arguments(cache="int8", **sizes))
    assert called(exported.mlir_module()) == PIECES


def test_new_keys_are_written_in_place():
    arrays = arguments()
    new = jax.ShapeDtypeStruct((4096, 2, 64), "bfloat16")
    pages = [arrays.pop(name) for name in ("key_pages", "value_pages")]

    def call(keys, values, arrays):
        return jax_flash.ragged_paged_attention(key_pages=keys, value_pages=values, **arrays)

    traced = jax.jit(call, donate_argnums=(0, 1)).trace(
        *pages, arrays | {"new_key": new, "new_value": new}
    )
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert called(text) == KERNEL
    assert re.findall(r"tf.aliasing_output = (\d)", text) == ["2", "3"]
