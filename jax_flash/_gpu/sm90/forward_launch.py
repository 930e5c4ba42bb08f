"""What the forward kernels for Hopper take, and how they are launched.

`ForwardParams` is the struct of flash_forward and of the kernels beside it. Read next:
cuda/kernels/sm90/forward.cuh.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from jax_flash._call import Call
from jax_flash._gpu import copies, paged
from jax_flash._gpu.fields import Field, Map, Scratch, Struct, name_of
from jax_flash._gpu.plan import Kernel, Launch, Step
from jax_flash._gpu.shared_fields import (
    Masks,
    forward_scale_log2,
    half_columns,
    halves,
    limits,
    masks,
    shared,
    split,
    take,
    term_sizes,
)
from jax_flash._gpu.sizes import (
    SMS,
    AnySize,
    B,
    K,
    N,
    S,
    Size,
    T,
    at_most,
    ceil_div,
    equal,
    maximum,
    minimum,
    product,
)
from jax_flash._gpu.sm90.forward_parts import PART_BLOCKS
from jax_flash._problem import Shapes

if TYPE_CHECKING:
    from jax_flash._gpu.sm90.forward_tiling import ForwardTiling

# With pages: requests, pages of a request, pages, and positions of each.
_GROUP, _BOX_COLUMNS = 8, 64  # rows of a swizzle, columns of a box
_PAGES = (
    "with kFromPages [P, kPageSize, K, %s]; with kWholeRows [P * kPageSize / 8, 8, K * %s / 64, 64]"
    ", whole rows of a head: box (64, 8, H / 64, kPageRows / 8)"
)
_RANGE_WARPS = 8  # of a CTA of segment_ranges, segment_plan, position_ranges and row_norms
_NORM_ROWS = 64  # of a warp of row_norms
_EXACT_THREADS = 256  # of flash_forward_exact and flash_forward_merge
_MERGED_ROWS = 16  # of a CTA of flash_forward_merge
_MOST_PARTS = 144  # at once: multiprocessors of the largest Hopper
_STARTS_OF_WARP = 256  # queries among which a warp of segment_ranges looks for documents' starts


def forward_launch(call: Call, shapes: Shapes, tiling: ForwardTiling) -> Launch:
    """Returns what the forward pass launches by a tiling."""
    found = masks(call.problem, shapes, 64, tiling.block_kv, by_key=False, beside=True)
    checks = ((at_most(1, S), "the CUDA kernels take no empty keys"), *limits(), *found.checks)
    if _has_columns(call):
        fits = equal(Size("v_columns.Y"), ceil_div(S, 128) * 128)
        checks += ((fits, "v_columns does not fit the keys"),)
    if tiling.packed_heads > 1:
        checks += ((equal(N // K % tiling.packed_heads, 0), "heads that share a block"),)
    if tiling.bias_bytes:
        checks += bias_is_plane()
    names: dict[str, AnySize] = {}
    if tiling.page_size:
        names = paged.names(tiling.in_common)
        if tiling.tail_rows:  # results are of members, and parts a workspace
            names["B"] = paged.REQUESTS * cast(Any, call).count
        checks += paged.checks(tiling.packed_heads, tiling.page_size)
    return Launch(
        forward_params(call, shapes, tiling, found),
        _steps(call, tiling, found),
        names=names,
        checks=checks,
        none=product(paged.REQUESTS if tiling.in_common else 1 if tiling.page_size else B, T, N),
    )


def units_of_head(tiling: ForwardTiling) -> AnySize:
    """Counts the units of a head, at most.

    Each end of a document that is long enough makes one more.
    """
    if tiling.page_size and not tiling.in_common:
        return paged.units_of_head(tiling.packed_heads, tiling.block_q)
    blocks = ceil_div(T * tiling.packed_heads, tiling.block_q)
    return blocks + 2 * (T // tiling.cut_documents) if tiling.cut_documents else blocks


def bias_is_plane() -> tuple:
    """Returns the checks of a bias that TMA loads."""
    _, _, queries, keys = term_sizes("bias")
    text = "this tiling is for a bias of all queries and keys"
    return ((equal(queries, T), text), (equal(keys, S), text))


def bias_map(shapes: Shapes, rows: int) -> Map:
    """Returns the map of a bias that TMA loads: of all queries and keys, boxes of 128 bytes."""
    batch, heads, _, _ = term_sizes("bias")
    # Queries lie where heads of the others do.
    return Map("bias", name_of(shapes.own_bias.dtype), (batch, heads, T, S), 1, rows)


def forward_params(call: Call, shapes: Shapes, tiling: ForwardTiling, found: Masks) -> Struct:
    """Returns the parameters of the forward kernels."""
    problem = call.problem
    fields = shared(problem)
    segments, positions = (f"query_{x}" in problem.terms for x in ("segments", "positions"))
    packed, warpgroups = tiling.packed_heads, tiling.block_q // 64
    heads = N // packed
    query_blocks = units_of_head(tiling)
    key_blocks = ceil_div(S, tiling.block_kv)
    plans = warpgroups + (tiling.cut_documents > 0)  # of a unit
    of_requests = tiling.page_size > 0 and not tiling.in_common

    def array(name: str, length, count, dim: int, box_rows: int, box_heads: int = 1) -> Map | None:
        if not tiling.tma_loads:
            return None
        if tiling.halves:
            planes = (B, length, 2 * count, half_columns(dim))
            return Map(f"{name}_halves", "f16", planes, box_rows, box_heads)
        if tiling.float8:  # pairs of numbers
            return Map(name[0], "bf16", (B, length, count, dim // 2), box_rows)
        dtype = name_of(problem.dtype)
        if tiling.early:  # rows of all heads
            return Map(name[0], dtype, (B, length, 1, product(count, dim)), box_rows)
        source, pages = name[0], paged.P
        if tiling.copied and name != "query":
            source, pages = f"copied_{name}s", tiling.copied_pages
        if not tiling.page_size or name == "query":
            batch = paged.REQUESTS if tiling.in_common else B
            return Map(name[0], dtype, (batch, length, count, dim), box_rows, box_heads)
        if not tiling.whole_rows:
            return Map(source, dtype, (pages, paged.PAGE, count, dim), box_rows)
        groups = product(pages, tiling.page_size // _GROUP)  # of a swizzle's rows
        parts = dim // _BOX_COLUMNS
        shape = (groups, _GROUP, product(count, parts), _BOX_COLUMNS)
        return Map(source, dtype, shape, _GROUP, parts, box_rows // _GROUP)

    def norms(length, count) -> Scratch | None:
        return Scratch("s32", (B * count, ceil_div(length, _NORM_ROWS))) if tiling.fades else None

    out: str | Scratch = "out"
    lse: str | Scratch = "lse"
    if tiling.tail_rows:
        out = Scratch(name_of(problem.dtype), (B, T, N, shapes.value_dim))
        lse = Scratch("f32", (B, T, N))

    def ranges(*shape) -> Scratch | None:
        return Scratch("s32", (B, *shape, 2)) if positions else None

    return Struct(
        "ForwardParams",
        (
            # Rank-4 maps over row-major arrays [B, rows, heads, dim]; sizes (dim, heads, rows, B),
            # strides in bytes (dim*2, heads*dim*2, rows*heads*dim*2), SWIZZLE_128B, L2 promotion
            # 128 B, zero fill. Empty without kTmaLoads; with kHalves of the halves; with kEarly
            # [B, rows, 1, heads * dim].
            Field(
                "TensorMap",
                "query",
                array("query", T, N, shapes.head_dim, 64 // packed, packed),
                "[B, T, N, H], box (64, kPackedHeads, 64 / kPackedHeads, 1)",
            ),
            Field(
                "TensorMap",
                "key",
                array("key", S, K, shapes.head_dim, tiling.key_rows),
                f"[B, S, K, H], box (64, 1, kPageRows, 1); {_PAGES % ('H', 'H')}",
            ),
            Field(
                "TensorMap",
                "value",
                _columns_map(call, shapes)
                if tiling.float8
                else array("value", S, K, shapes.value_dim, tiling.key_rows),
                f"[B, S, K, Hv], box (64, 1, kPageRows, 1); {_PAGES % ('Hv', 'Hv')}; "
                "with kFloat8 value_columns, box (64, 1, Hv, 1)",
            ),
            # The same arrays, for loads without TMA and for rows that are computed again because
            # values hidden from them are not finite.
            Field("const void*", "query_data", "q", "[B, T, N, H]"),
            Field(
                "const void*", "key_data", "copied_keys" if tiling.copied else "k", "[B, S, K, H]"
            ),
            Field(
                "const void*",
                "value_data",
                "copied_values" if tiling.copied else "v",
                "[B, S, K, Hv]",
            ),
            Field("void*", "out", out, "[B, T, N, Hv] element type of the query"),
            Field("float*", "lse", lse, "[B, N, T] natural logarithm"),
            *take(fields, "query_lengths key_value_lengths query_segments key_value_segments"),
            *take(fields, "bias"),
            found.mask,
            *take(fields, "sinks sinks_batch_stride dropout_state"),
            Field(
                "unsigned*",
                "marks",
                None
                if tiling.tail_rows
                else Scratch(
                    "s32",
                    (_units(tiling) + _most_parts(tiling), 4 * warpgroups)
                    if tiling.splits
                    else (B, heads, query_blocks, 4 * warpgroups),
                ),
                "of the 16 rows of each warp those that came out with NaN or infinity, for "
                "flash_forward_exact; bit 4 * r is row r, bit 4 * r + 1 row r + 8",
            ),
            Field(
                "int*",
                "unit_counter",
                Scratch("s32", (1,)),
                "zero at launch, with kDynamic: with kHasSegments segment_ranges zeroes it",
            ),
            Field(
                "int*",
                "segment_ranges",
                Scratch("s32", (B, key_blocks, 2)) if segments else None,
                "smallest and largest id of a block of keys, by segment_ranges, kHasSegments",
            ),
            Field(
                "int*",
                "segment_plan",
                Scratch("s32", (B, query_blocks, plans, 4)) if segments else None,
                "the walk of a warpgroup, by segment_plan, kHasSegments; with kCutsUnits the rows "
                "and the document of a unit behind those of its warpgroups",
            ),
            *take(fields, "batch query_len kv_len query_heads kv_heads"),
            Field(
                "int",
                "query_blocks",
                query_blocks,
                "ceil(T * kPackedHeads / (64 * kConsumers)); with kCutsUnits as many as there may "
                "be",
            ),
            Field(
                "int",
                "l2_heads",
                minimum(tiling.l2_heads, B * heads),
                "heads (of B * N / kPackedHeads) that the schedule walks together, >= 1",
            ),
            *take(fields, "window_left window_right scale"),
            forward_scale_log2(problem),
            *take(fields, "softcap_inner softcap_bias dropout_threshold dropout_scale"),
            *take(fields, "query_positions key_value_positions"),
            Field(
                "int*",
                "key_position_ranges",
                ranges(key_blocks),
                "smallest and largest position of a block of keys, by position_ranges, "
                "kHasPositions",
            ),
            Field(
                "int*",
                "query_position_ranges",
                ranges(query_blocks, warpgroups),
                "the same of a warpgroup's rows",
            ),
            *take(fields, "score_ids captures"),
            found.block_mask,
            # At the end, so that other fields lie where they do without.
            Field(
                "TensorMap",
                "bias_map",
                bias_map(shapes, tiling.block_q) if tiling.bias_bytes else None,
                "sizes (S, T, heads, batch rows) of the bias; box (128 bytes, 64 * kConsumers, 1, "
                "1), kBiasTiles",
            ),
            *take(fields, "result_scale"),
            *halves(shapes, "query key value", present=tiling.halves),
            Field("int*", "query_norms", norms(T, N), "of 64 rows the largest norm, bits; kFades"),
            Field("int*", "key_norms", norms(S, K), "the same, by row_norms"),
            Field(
                "unsigned*",
                "segment_starts",
                Scratch("s32", (B, ceil_div(T, 32))) if tiling.cut_documents else None,
                "a bit for each query whose id is not that of the one before, by segment_ranges; "
                "kCutsUnits",
            ),
            Field(
                "int*",
                "unit_count",
                Scratch("s32", (1,)) if tiling.cut_documents or of_requests else None,
                "of a head, in the batch row that has most, by segment_plan; kCutsUnits. With "
                "kFromPages those of all requests, by request_units",
            ),
            *paged.fields(
                query_blocks if tiling.page_size else None,
                tiling.in_common,
                tiling.tail_rows > 0,
                tiling.copied is not None,
            ),
            *(copies.fields(shapes, tiling.copied_pages) if tiling.copied else ()),
            *(_float8_fields(call, shapes) if tiling.float8 else ()),
            *(_part_fields(call, shapes, tiling) if tiling.splits else ()),
        ),
    )


def _has_columns(call: Call) -> bool:
    """Tells whether columns of float8 values are an operand; else they are made ahead."""
    return "v_columns" in call.operands


def _columns_map(call: Call, shapes: Shapes) -> Map:
    """Returns the map of columns of float8 values, of two keys each: a box has all of a head."""
    columns = (B, K * shapes.value_dim, 1, ceil_div(S, 128) * 64)
    name = "v_columns" if _has_columns(call) else "value_columns"
    return Map(name, "bf16", columns, shapes.value_dim)


def _units(tiling: ForwardTiling) -> AnySize:
    return product(units_of_head(tiling), B, N // tiling.packed_heads)


def _most_parts(tiling: ForwardTiling) -> AnySize:
    """Counts the parts of units, of float8 of those of the last wave, at most."""
    blocks = ceil_div(S, tiling.block_kv) // PART_BLOCKS
    return minimum(_MOST_PARTS, product(_units(tiling), blocks))


def _parts(tiling: ForwardTiling) -> tuple[AnySize, AnySize]:
    """Returns the number of the first unit that is in parts, and the parts of each.

    All of them fit the multiprocessors at once: longer last waves would gain less than parts cost.
    Units of 16 bits are all in parts, of one if a GPU has fewer multiprocessors than a plan knows.
    """
    units, sms = _units(tiling), minimum(SMS, _MOST_PARTS)
    rest = units % sms if tiling.float8 else units
    blocks = ceil_div(S, tiling.block_kv) // PART_BLOCKS
    parts = minimum(sms // maximum(rest, 1), blocks)
    first = units - rest * at_most(2, parts) if tiling.float8 else 0
    return first, maximum(parts, 1)


def _float8_fields(call: Call, shapes: Shapes) -> tuple[Field, ...]:
    columns = Scratch("u8", (B, K, shapes.value_dim, ceil_div(S, 128) * 128))
    made = None if _has_columns(call) else columns
    return (
        Field("void*", "value_columns", made, "[B, K, Hv, S up to 128], kFloat8, if made ahead"),
        Field("const float*", "query_scales", "q_scale", "[B, ceil(T / 64), N]"),
        Field("const float*", "key_scales", "k_scale", "[B, ceil(S / 128), K]"),
        Field("const float*", "value_scales", "v_scale", "[B, ceil(S / 128), K]"),
    )


def _part_fields(call: Call, shapes: Shapes, tiling: ForwardTiling) -> tuple[Field, ...]:
    first, parts = _parts(tiling)
    rows = _most_parts(tiling), tiling.block_q
    dtype = name_of(call.problem.dtype) if tiling.float8 else "f32"
    out = Scratch(dtype, (*rows, shapes.value_dim))
    return (
        Field("void*", "parts", out, "results of parts, [part, 64 * kConsumers, Hv], kSplits"),
        Field("float*", "part_lse", Scratch("f32", rows), "[part, 64 * kConsumers]"),
        Field("int", "first_split", first, "units before it are whole"),
        Field("int", "split_parts", parts, "of a unit, >= 1"),
    )


def _steps(call: Call, tiling: ForwardTiling, found: Masks) -> tuple[Step, ...]:
    segments, positions = (f"query_{x}" in call.problem.terms for x in ("segments", "positions"))
    warpgroups = tiling.block_q // 64
    query_blocks = units_of_head(tiling)
    key_blocks = ceil_div(S, tiling.block_kv)
    units = _units(tiling)
    if tiling.splits:
        first, parts = _parts(tiling)
        join = Kernel(
            "flash_forward_join",
            (units - first) * 4 * warpgroups,
            _EXACT_THREADS,
            beside=True,
            overlaps=True,
        )
        units = first + (units - first) * parts
    steps: list[Step] = [split(1, beside=True)] if tiling.halves else []
    makes_columns = tiling.float8 and not _has_columns(call)
    if makes_columns:
        steps.append(
            Kernel("flash_forward_columns", product(B, K, ceil_div(S, 128)), 256, beside=True)
        )
    steps += found.plan
    of_requests = tiling.page_size > 0 and not tiling.in_common
    if tiling.copied:
        steps += copies.steps()
    elif of_requests:
        steps.append(Kernel("request_units", 1, paged.UNIT_THREADS, beside=True))

    def of_warps(entry: str, warps, *, overlaps: bool = False) -> Kernel:
        grid = ceil_div(warps, _RANGE_WARPS)
        return Kernel(entry, grid, 32 * _RANGE_WARPS, beside=True, overlaps=overlaps)

    if positions:
        warps = B * (key_blocks + query_blocks * warpgroups)
        steps.append(of_warps("position_ranges", warps))
    if segments:
        parts = ceil_div(T, _STARTS_OF_WARP) if tiling.cut_documents else 0
        steps.append(of_warps("segment_ranges", B * (key_blocks + parts)))
        if tiling.cut_documents:  # a CTA's warps plan whole units of a batch row
            walks = product(B, ceil_div(query_blocks, _RANGE_WARPS // warpgroups), _RANGE_WARPS)
        else:
            walks = product(B, query_blocks, warpgroups)
        steps.append(of_warps("segment_plan", walks, overlaps=True))
    elif tiling.fades:
        parts = N * ceil_div(T, _NORM_ROWS) + K * ceil_div(S, _NORM_ROWS)
        steps.append(of_warps("row_norms", B * parts))
    elif (
        tiling.dynamic and not (of_requests or makes_columns) and (not found.plan or positions)
    ):  # else mask_plan does it
        steps.append(Kernel("flash_forward_begin", 1, 32, beside=True))
    main = Kernel(
        "flash_forward",
        SMS if tiling.tail_rows else minimum(SMS, units),  # tails are dealt out to all
        tiling.threads,
        tiling.shared_bytes,
        overlaps=tiling.dynamic or segments or of_requests,
    )
    if tiling.tail_rows:
        rows = ceil_div(product(paged.REQUESTS, T, N), _MERGED_ROWS)
        merge = Kernel("flash_forward_merge", rows, _EXACT_THREADS, beside=True, overlaps=True)
        return *steps, main, merge
    exact = Kernel(
        "flash_forward_exact",
        minimum(SMS, units * 4 * warpgroups),
        _EXACT_THREADS,
        beside=True,
        overlaps=True,
    )
    if tiling.splits:
        return *steps, main, join, exact
    return *steps, main, exact
