"""What the kernels of decoding take, and how they are launched.

flash_decode and flash_decode_merge run one after the other on one stream, or flash_decode alone in
clusters. Read next: cuda/kernels/decode_cta.cuh.
"""

from __future__ import annotations

from typing import Any

from jax_flash import _latent_rows
from jax_flash._gpu.decode_tiling import DecodeTiling
from jax_flash._gpu.fields import Field, Map, Scratch, Struct, name_of
from jax_flash._gpu.plan import Buffer, Kernel, Launch
from jax_flash._gpu.shared_fields import LOG2E, MAX_INT, window_side
from jax_flash._gpu.sizes import (
    AnySize,
    B,
    K,
    N,
    Size,
    T,
    at_most,
    ceil_div,
    equal,
    minimum,
    product,
    where,
)
from jax_flash._problem import Shapes

MOST_ROTATED = 256  # features that the kernels rotate
P, PAGE = Size("P"), Size("page")  # pages, or batch rows without a page table; positions in each


def operands_of(call: Any, shapes: Shapes) -> tuple[Buffer, ...]:
    """Lists the operands of decoding."""
    return tuple(_buffer(call, shapes, name) for name in call.operands)


def results_of(call: Any, shapes: Shapes) -> tuple[Buffer, ...]:
    """Lists its results, scratch arrays aside."""
    return tuple(_buffer(call, shapes, name) for name in call.results)


def same_of(call: Any) -> tuple[tuple[str, str], ...]:
    """Lists the caches, which are operands and results."""
    return tuple((name, name) for name in call.results if name in call.operands)


def _buffer(call: Any, shapes: Shapes, name: str) -> Buffer:
    key, value = str(shapes.head_dim), str(shapes.value_dim)
    pages = "*P" if call.paged else "*B"
    dims = {
        "q": ("*B", "T", "N", key),
        "k": (pages, "page", "K", str(_latent_rows.BYTES) if call.latent_rows else key),
        "v": (pages, "page", "K", value),
        "lengths": ("*B",),
        "page_table": ("*B", "columns"),
        "new_k": ("*B", "T", "K", key),
        "new_v": ("*B", "T", "K", value),
        "key_scale": (f"*key_scale.P:{pages[1:]}", "K"),
        "value_scale": (f"*value_scale.P:{pages[1:]}", "K"),
        "sinks": ("*sinks.B:B", "N"),
        "out": ("*B", "T", "N", value),
        "lse": ("*B", "N", "T"),
    }[name]
    dtypes = {
        **dict.fromkeys(("lengths", "page_table"), "int32"),
        **dict.fromkeys(("sinks", "lse", "key_scale", "value_scale"), "float32"),
        **dict.fromkeys(("k", "v"), call.cache_dtype),
    }
    return Buffer(name, (name_of(dtypes.get(name, call.problem.dtype)),), dims)


def decode_launch(call: Any, shapes: Shapes, tiling: DecodeTiling, *, tma: bool) -> Launch:
    """Returns what decoding launches by a tiling.

    `tma`: blocks come by it, and the second kernel may start before the first has ended.
    """
    shares = Size("shares")
    columns, pages = _columns(call), _pages(call)
    names = {
        # CTAs that share the keys of a kv head; CTAs of a part of all blocks; parts, at most.
        "row_groups": ceil_div(T * (N // K), tiling.head_rows),
        "shares": K // tiling.heads * Size("row_groups"),
        "parts": minimum(tiling.parts * tiling.shares // shares, MAX_INT // shares),
    }
    clusters = product(B, shares, tiling.cluster)
    grid = clusters if tiling.cluster > 1 else Size("parts") * shares
    main = Kernel("flash_decode", grid, tiling.threads, tiling.shared_bytes, cluster=tiling.cluster)
    merge = Kernel("flash_decode_merge", grid, tiling.merge_threads, overlaps=tma)
    positions = columns * PAGE
    checks = [
        (equal(N % K, 0), "the heads of k do not divide those of q"),
        (equal(K % tiling.heads, 0), "this tiling is for other kv heads"),
        (at_most(positions // tiling.block_kv + 3, MAX_INT // B), "batch x cache is too large"),
        (at_most(1, Size("parts")), "this tiling is for fewer heads"),
    ]
    if call.paged:
        checks.append((equal(PAGE % tiling.box_rows, 0), "this tiling is for other pages"))
    # Elements of q in a row; positions, with a block beyond the end.
    row = T * shapes.head_dim
    most, text = MAX_INT // 2, f"a dim is beyond {MAX_INT // 2}"
    checks += [(at_most(x, most), text) for x in (B, positions, pages, row * N, row * K)]
    if tiling.cluster > 1:
        checks.append((at_most(clusters, MAX_INT), "too many clusters"))
    return Launch(
        decode_params(call, shapes, tiling, tma=tma),
        (main,) if tiling.cluster > 1 else (main, merge),
        names,
        tuple(checks),
        none=product(B, T, N),
    )


def _columns(call: Any) -> AnySize:
    return Size("columns") if call.paged else 1


def _pages(call: Any) -> AnySize:
    return P if call.paged else B


def decode_params(call: Any, shapes: Shapes, tiling: DecodeTiling, *, tma: bool) -> Struct:
    """Returns the parameters of flash_decode and flash_decode_merge."""
    problem = call.problem
    dtype, pages = name_of(call.cache_dtype), _pages(call)
    value = None if tiling.values_in_keys else "v"
    rows = (tiling.parts * tiling.shares, 2, tiling.heads * tiling.head_rows)  # see partial_row

    def blocks(buffer: str | None, dim: int) -> Map | None:
        if not tma or buffer is None or call.latent_rows:
            return None
        return Map(buffer, dtype, (pages, PAGE, K, dim), tiling.box_rows)

    def present(name: str) -> str | None:
        return name if name in call.operands else None

    def partial(columns: int) -> Scratch | None:
        return None if tiling.cluster > 1 else Scratch("f32", (*rows, columns))

    def written(name: str) -> str | None:
        return name if name in call.results else None

    def scales(name: str) -> Struct:
        step: AnySize = 0
        if present(name):
            step = where(equal(Size(f"{name}.P"), 1), 0, K)
        data = Field("const float*", "data", present(name))
        return Struct("Scales", (data, Field("long long", "page", step)))

    half = shapes.head_dim // 2
    base = call.rotary_base
    turns = [0.0 if base is None or h >= half else base ** -(h / half) for h in _FREQUENCIES]
    cap = problem.softcap
    return Struct(
        "DecodeParams",
        (
            # Rank-4 maps as for the forward, over [P, page, K, dim]; box (64, 1, kBoxRows, 1). On
            # sm_90 alone.
            Field("TensorMap", "key", blocks("k", shapes.head_dim)),
            Field("TensorMap", "value", blocks(value, shapes.value_dim), "not kValuesInKeys"),
            Field("const void*", "key_data", "k", "[P, page, K, H], the same without maps"),
            Field("const void*", "value_data", value, "[P, page, K, Hv]"),
            Field("const void*", "query", "q", "[B, T, N, H]"),
            Field("const int*", "lengths", present("lengths"), "[B], null with kFullRows"),
            Field(
                "const int*",
                "page_table",
                present("page_table"),
                "[B, columns], kPaged; else row b has page b alone",
            ),
            Field("const void*", "new_key", present("new_k"), "[B, T, K, H], kAppends"),
            Field("const void*", "new_value", present("new_v"), "[B, T, K, Hv], likewise"),
            Field("const float*", "sinks", present("sinks"), "[B or 1, N], kHasSinks"),
            Field("void*", "key_cache", written("k"), "[P, page, K, H], written with kAppends"),
            Field("void*", "value_cache", written("v"), "[P, page, K, Hv]"),
            Field("void*", "out", "out", "[B, T, N, Hv] element type of the query"),
            Field("float*", "lse", "lse", "[B, N, T] natural logarithm"),
            # What CTAs that share a unit leave for flash_decode_merge: weighted values, and each
            # row's base and sum.
            Field(
                "float*",
                "partial_out",
                partial(-(-shapes.value_dim // 16) * 16),
                "[ctas, 2, share rows, 16 * ceil(Hv / 16)]",
            ),
            Field("float*", "partial_rows", partial(2), "[ctas, 2, share rows, 2]"),
            Field(
                "long long",
                "sinks_batch_stride",
                where(equal(Size("sinks.B"), 1), 0, N) if "sinks" in problem.terms else 0,
                "elements from one batch row to the next: N, or 0 when shared",
            ),
            Field("int", "batch", B, "B"),
            Field("int", "query_len", T, "T"),
            Field("int", "query_heads", N, "N"),
            Field("int", "kv_heads", K, "K"),
            Field("int", "group", N // K, "N / K"),
            Field("int", "pages", pages, "P"),
            Field("int", "page_size", PAGE, "positions in each"),
            Field("int", "columns", _columns(call), "of the page table; 1 without"),
            Field(
                "int",
                "row_groups",
                Size("row_groups"),
                "CTAs that share the keys of a kv head: ceil(T * N / K / rows)",
            ),
            Field(
                "int",
                "shares",
                Size("shares"),
                "CTAs of a part of all blocks: K / kHeads * row_groups",
            ),
            Field("int", "parts", 0 if tiling.cluster > 1 else Size("parts"), "at most"),
            Field(
                "int",
                "window_left",
                window_side(problem.window[0]),
                "positions visible before a query's own, kWindowLeft",
            ),
            Field(
                "float",
                "scale_log2",
                LOG2E * (cap or problem.scale),
                "log2(e) * (scale, or the cap with kSoftcap)",
            ),
            Field("float", "softcap_inner", problem.scale / cap if cap else 0.0, "scale / cap"),
            Field(
                "float",
                "frequencies",
                turns,
                "radians from one position to the next, of features h and h + H / 2, kRotates",
            ),
            Field("Scales", "key_scale", scales("key_scale"), "kQuantized"),
            Field(
                "Scales",
                "value_scale",
                scales("key_scale" if tiling.values_in_keys else "value_scale"),
                "likewise",
            ),
        ),
    )


_FREQUENCIES = range(MOST_ROTATED // 2)
