"""What the forward kernel of mma.sync takes, and how it is launched.

Read next: cuda/kernels/sm80/forward.cuh.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jax_flash._call import Call
from jax_flash._gpu import paged
from jax_flash._gpu.fields import Field, Scratch, Struct
from jax_flash._gpu.plan import Kernel, Launch, Step
from jax_flash._gpu.shared_fields import (
    Masks,
    forward_scale_log2,
    halves,
    limits,
    masks,
    shared,
    split,
    take,
)
from jax_flash._gpu.sizes import (
    AnySize,
    B,
    K,
    N,
    S,
    T,
    at_most,
    ceil_div,
    equal,
    minimum,
    product,
)
from jax_flash._problem import Shapes

if TYPE_CHECKING:
    from jax_flash._gpu.sm80.forward import ForwardTiling

_RANGE_WARPS = 8  # of a CTA of key_ranges


def forward_launch(call: Call, shapes: Shapes, tiling: ForwardTiling) -> Launch:
    """Returns what the forward pass launches by a tiling."""
    problem = call.problem
    found = masks(problem, shapes, tiling.block_q, tiling.block_kv, by_key=False, beside=False)
    steps: list[Step] = [*found.plan]
    if tiling.page_size:
        steps.append(Kernel("request_units", 1, paged.UNIT_THREADS))
    if {"query_segments", "query_positions"} & {*problem.terms}:
        blocks = B * ceil_div(S, tiling.block_kv)
        steps.append(Kernel("key_ranges", ceil_div(blocks, _RANGE_WARPS), 32 * _RANGE_WARPS))
    if tiling.halves:
        steps.append(split(1, beside=False))
    grid = product(units_of_head(tiling), B, N // tiling.packed_heads)
    steps.append(Kernel("flash_forward_sm80", grid, tiling.threads, tiling.shared_bytes))
    checks = ((at_most(1, S), "the CUDA kernels take no empty keys"), *limits(), *found.checks)
    names: dict[str, AnySize] = {}
    if tiling.page_size:
        names = paged.names()
        checks += paged.checks(tiling.packed_heads, tiling.page_size)
        checks += ((equal(N // K % tiling.packed_heads, 0), "heads that share a block"),)
    return Launch(
        forward_params(call, shapes, tiling, found),
        tuple(steps),
        names=names,
        checks=checks,
        none=product(T, N) if tiling.page_size else product(B, T, N),
    )


def units_of_head(tiling: ForwardTiling) -> AnySize:
    """Counts the units of a head, or of heads that share them; of requests at most."""
    if tiling.page_size:
        return paged.units_of_head(tiling.packed_heads, tiling.block_q)
    return ceil_div(T, tiling.block_q)


def forward_params(call: Call, shapes: Shapes, tiling: ForwardTiling, found: Masks) -> Struct:
    """Returns the parameters of flash_forward_sm80 and of the kernels ahead of it."""
    problem = call.problem
    fields = shared(problem)

    def ranges(of: str) -> Scratch | None:
        shape = (B, ceil_div(S, tiling.block_kv), 2)
        return Scratch("s32", shape) if f"query_{of}" in problem.terms else None

    return Struct(
        "Sm80ForwardParams",
        (
            Field("const void*", "query_data", "q", "[B, T, N, H]"),
            Field("const void*", "key_data", "k", "[B, S, K, H]"),
            Field("const void*", "value_data", "v", "[B, S, K, Hv]"),
            Field("void*", "out", "out", "[B, T, N, Hv] element type of the query"),
            Field("float*", "lse", "lse", "[B, N, T] natural logarithm"),
            *take(fields, "query_lengths key_value_lengths query_segments key_value_segments"),
            *take(fields, "query_positions key_value_positions bias"),
            found.mask,
            *take(fields, "sinks sinks_batch_stride dropout_state"),
            Field(
                "int*",
                "key_segment_ranges",
                ranges("segments"),
                "[B, ceil(S / kBlockKV), 2] smallest and largest id of each block of keys, by "
                "key_ranges, kHasSegments",
            ),
            Field("int*", "key_position_ranges", ranges("positions"), "likewise, kHasPositions"),
            *take(fields, "batch query_len kv_len query_heads kv_heads"),
            Field("int", "query_blocks", units_of_head(tiling), "ceil(T / rows of a CTA)"),
            Field(
                "int",
                "l2_heads",
                minimum(tiling.l2_heads, B * (N // tiling.packed_heads)),
                "heads (of B * N / kPackedHeads) that the schedule walks together, >= 1",
            ),
            *take(fields, "window_left window_right scale"),
            forward_scale_log2(problem),
            *take(fields, "softcap_inner softcap_bias dropout_threshold dropout_scale"),
            *take(fields, "score_ids captures"),
            found.block_mask,
            *take(fields, "result_scale"),
            *halves(shapes, "query key value", present=tiling.halves),
            *paged.fields(units_of_head(tiling) if tiling.page_size else None),
            Field(
                "int*",
                "unit_count",
                Scratch("s32", (1,)) if tiling.page_size else None,
                "of all requests, by request_units; kFromPages",
            ),
        ),
    )
