"""What the backward kernels for Hopper take, and how they are launched.

flash_backward_prepare, flash_backward and flash_backward_finish run in this order on one stream,
each with these parameters. Read next: cuda/kernels/sm90/backward.cuh.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from jax_flash._call import Call
from jax_flash._gpu.backward_launch import Backward, stored_marks
from jax_flash._gpu.fields import Field, Map, Scratch, Struct, name_of
from jax_flash._gpu.plan import Launch
from jax_flash._gpu.shared_fields import half_columns, halves, split, take
from jax_flash._gpu.sizes import (
    SMS,
    AnySize,
    B,
    K,
    N,
    S,
    Size,
    T,
    ceil_div,
    equal,
    maximum,
    minimum,
    product,
    where,
)
from jax_flash._gpu.sm90.forward_launch import bias_is_plane, bias_map
from jax_flash._gpu.workspaces import boxes
from jax_flash._problem import Problem, Shapes

if TYPE_CHECKING:
    from jax_flash._gpu.sm90.backward_tiling import BackwardTiling


_SHARE = 256  # queries at least: each share adds to sums of dk and dv


def backward_launch(call: Call, shapes: Shapes, tiling: BackwardTiling) -> Launch:
    """Returns what the backward pass launches by a tiling."""
    problem = call.problem
    pass_ = _backward(
        problem,
        shapes,
        tiling,
        with_dlse="dlse" in call.operands,
        with_dbias="dbias" in call.results,
    )
    names: dict[str, AnySize] = {}
    shared_units: AnySize = 0
    more: AnySize = 0
    if _shares(problem, tiling):
        # Units of one length: the last ones would be of few CTAs.
        rest = pass_.block_units * pass_.key_blocks % (SMS * tiling.resident)
        shortest = pass_.query_blocks if tiling.halves else ceil_div(T, _SHARE)
        each = minimum(SMS * tiling.resident // maximum(Size("rest_units"), 1), shortest)
        names = {
            "rest_units": rest,
            "shares": where(equal(Size("rest_units"), 0), 0, each),
            "shared_units": where(minimum(Size("shares") // 2, 1), Size("rest_units"), 0),
        }
        shared_units = Size("shared_units")
        more = shared_units * (Size("shares") - 1)
    ahead = (split(2, shared_units, beside=True),) if tiling.halves else ()
    checks = pass_.checks()
    if tiling.bias_bytes:
        checks += bias_is_plane()
    return Launch(
        _params(pass_, shapes, shares=bool(names)),
        pass_.steps(ahead, more),
        names,
        checks,
        none=product(B, N),
    )


def backward_params(problem: Problem, shapes: Shapes, tiling: BackwardTiling) -> Struct:
    """Returns the parameters of the backward kernels, without the gradient of a bias."""
    pass_ = _backward(problem, shapes, tiling)
    return _params(pass_, shapes, shares=_shares(problem, tiling))


def _backward(problem: Problem, shapes: Shapes, tiling: BackwardTiling, **with_: bool) -> Backward:
    if tiling.early:  # sizes of scratch arrays are those of tiles
        dims = {"head_dim": tiling.head_dim, "value_dim": tiling.value_dim}
        shapes = dataclasses.replace(shapes, **dims)
    return Backward(problem, shapes, tiling, "flash_backward", persistent=True, **with_)


def _shares(problem: Problem, tiling: BackwardTiling) -> bool:
    """Tells whether several CTAs may share a unit: without a window."""
    halves = tiling.halves and problem.window == (None, None) and not problem.deterministic
    return halves or tiling.shares


def _params(pass_: Backward, of_arrays: Shapes, *, shares: bool) -> Struct:
    problem, shapes, tiling = pass_.problem, pass_.shapes, pass_.tiling
    fields = pass_.fields()
    rings = tiling.ring_sets > 0
    units = tiling.unit_heads > 0
    head_dim, value_dim = of_arrays.head_dim, of_arrays.value_dim
    dims = {"q": head_dim, "k": head_dim, "v": value_dim, "dout": value_dim}
    dims |= {"dq": head_dim, "dk": head_dim, "dv": value_dim}

    def array(buffer: str, box_rows: int) -> Map | None:
        if not tiling.tma_loads:
            return None
        of_keys = buffer in ("k", "v", "dk", "dv")
        length, heads = (S, K) if of_keys else (T, N)
        dim, dtype = dims[buffer], name_of(problem.dtype)
        if tiling.halves:
            name = {"q": "query", "k": "key", "v": "value", "dout": "dout"}.get(buffer)
            planes = (B, length, 2 * heads, half_columns(dim))
            return Map(f"{name}_halves", "f16", planes, box_rows) if name else None
        if tiling.early:  # rows of all heads
            heads, dim = 1, product(heads, dim)
        return Map(buffer, dtype, (B, length, heads, dim), box_rows)

    # Results of a call that is split are float32: the kernels store them themselves.
    written = not problem.split
    tiles = pass_.query_blocks * (tiling.block_q // 64)
    slabs = product(B * K, pass_.key_blocks, tiling.block_kv // 64)
    both = boxes(shapes.head_dim) + boxes(shapes.value_dim)
    counts = (B * N // (tiling.unit_heads or N // K), 2)

    dq_marks = product(B * N, tiles, boxes(shapes.head_dim))
    if tiling.marks_rows:
        dq_marks = stored_marks()

    def only(condition: bool, dtype: str, *shape: AnySize) -> Scratch | None:
        return Scratch(dtype, shape) if condition else None

    return Struct(
        "BackwardParams",
        (
            # Rank-4 maps as for the forward.
            Field("TensorMap", "query", array("q", tiling.block_q), "box (64, 1, kBlockQ, 1)"),
            Field("TensorMap", "key", array("k", tiling.block_kv), "box (64, 1, kBlockKV, 1)"),
            Field("TensorMap", "value", array("v", tiling.block_kv), "box (64, 1, kBlockKV, 1)"),
            Field("TensorMap", "dout", array("dout", tiling.block_q), "box (64, 1, kBlockQ, 1)"),
            Field(
                "TensorMap",
                "dkey",
                array("dk", 64) if written else None,
                "box (64, 1, 64, 1), written by the kernel for heads up to 128",
            ),
            Field("TensorMap", "dvalue", array("dv", 64) if written else None, "likewise"),
            *take(fields, "query_data key_data value_data out_data dout_data lse dlse dquery"),
            *take(fields, "dkey_data dvalue_data dbias"),
            *take(fields, "query_lengths key_value_lengths query_segments key_value_segments"),
            *take(fields, "bias mask dropout_state"),
            *take(fields, "lse_log2 minus_delta dq_sum next_unit turns"),
            *take(fields, "query_segment_ranges key_segment_ranges dbias_sum marks"),
            *take(fields, "bias_elements bias_batches bias_heads dbias_ctas"),
            *take(fields, "batch query_len kv_len query_heads kv_heads l2_heads"),
            *take(fields, "window_left window_right scale scale_log2 softcap_inner softcap_bias"),
            *take(fields, "dropout_threshold dropout_scale query_positions key_value_positions"),
            *take(fields, "key_position_ranges query_position_ranges score_ids captures"),
            *take(fields, "block_mask"),
            Field(
                "TensorMap",
                "bias_map",
                bias_map(shapes, tiling.block_q) if tiling.bias_bytes else None,
                "as for the forward; box (128 bytes, kBlockQ, 1, 1)",
            ),
            *take(fields, "result_scale first_kv_head launched_kv_heads"),
            *halves(shapes, "query key value dout", present=tiling.halves),
            Field(
                "float*",
                "dout_row_factors",
                only(tiling.halves, "f32", B * N, pass_.numbers),
                "[B, N, 64 * ceil(T / 64)], kHalves",
            ),
            Field(
                "int",
                "shared_units",
                Size("shared_units") if shares else 0,
                "the last units, each of which so many CTAs share; 0: none",
            ),
            Field(
                "int",
                "shares",
                where(Size("shared_units"), Size("shares"), 0) if shares else 0,
                "so many; not with kDeterministic or a window",
            ),
            # Only with kRing: kernels/sm90/backward_ring.cuh; marks with kMarksRows too.
            Field(
                "TensorMap",
                "dquery_map",
                array("dq", 16) if rings else None,
                "[B, T, N, H] box (64, 1, 16, 1), written",
            ),
            Field(
                "int*",
                "ring_counts",
                only(rings, "s32", *counts),
                "[B * N / unit's heads, 2] of each set of l2_heads: units added, finished",
            ),
            Field(
                "int*",
                "dq_marks",
                only(rings or tiling.marks_rows, "s32", dq_marks),
                "[B, N, Q, kBlockQ / 64 * ceil(H / 64)]: is a tile of dq not all finite? With "
                "kMarksRows [ceil(B * T * N / 64)]: are 64 rows in memory?",
            ),
            Field(
                "int",
                "ring_heads",
                tiling.ring_sets * pass_.set_heads if rings else 0,
                "query heads that have a place in dq_sum at a time: of ring_sets sets",
            ),
            Field("int", "ring_sets", tiling.ring_sets),
            Field(
                "int",
                "ring_lag",
                tiling.ring_lag,
                "sets between a unit's and the one whose dq it finishes",
            ),
            Field(
                "int",
                "falling_heads",
                tiling.falling_heads,
                "key/value heads of all batch rows, the last, whose walks fall, kFromDiagonals",
            ),
            # Only with kUnitHeads: several units add to dk and dv of a block of keys.
            Field(
                "float*",
                "key_sums",
                only(units, "f32", slabs, both, 64 * 64),
                "[B, K, ceil(S / kBlockKV), kBlockKV / 64, ceil(H / 64) + ceil(Hv / 64), 64, 64] "
                "in the order of fragments; with kDeterministic the first unit writes it",
            ),
            Field(
                "int*",
                "key_turns",
                only(units and problem.deterministic, "s32", slabs),
                "[B, K, ceil(S / kBlockKV), kBlockKV / 64] units that have added, kDeterministic",
            ),
        ),
    )
