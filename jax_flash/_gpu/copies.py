"""Owns pages of eight bits that are copied to bfloat16 ahead of Hopper's forward kernel.

Which requests' are is said on the device (`Prefill.run_kernel`): the others run in pieces. What
copies take is bounded, however large the pool is. Read next: cuda/kernels/sm90/forward_copies.cuh.
"""

from __future__ import annotations

from typing import Any

from jax_flash._gpu.fields import Field, Scratch, Struct
from jax_flash._gpu.paged import COLUMNS, PAGE, REQUESTS, UNIT_THREADS, P
from jax_flash._gpu.plan import Kernel, Step, Zero
from jax_flash._gpu.sizes import SMS, K, Size, equal, where
from jax_flash._gpu.traits import group_size
from jax_flash._problem import Shapes

# Query rows of a kv head, those of whole pieces, from which copies take less time than pieces.
FEWEST_ROWS = 256
MOST_BYTES = 1 << 30  # of copies: 262144 positions of 8 kv heads of 128
_THREADS, _CTAS = 256, 4  # of copy_pages, and of a multiprocessor


def places(shapes: Shapes) -> int:
    """Counts the pages that there is place for."""
    return min(*_seen(shapes), MOST_BYTES // _page_bytes(shapes))


def hold_all(shapes: Shapes) -> bool:
    """Whether there is place for the pages of all requests."""
    return places(shapes) == min(_seen(shapes))


def pay(tokens: Any, piece: int, shapes: Shapes) -> Any:
    """Whether copies of a request of so many tokens take less time than its pieces do."""
    return -(-tokens // piece) * piece * group_size(shapes) >= FEWEST_ROWS


def refuse(shapes: Shapes, dtype: str, kernels: str) -> tuple[str, ...]:
    """Lists why no pages are copied for queries of a dtype."""
    sizes = (shapes.batch, shapes.q_len, shapes.pages, shapes.kv_len, shapes.kv_heads)
    if dtype != "bfloat16":
        return (f"{kernels} copy pages of eight bits to bfloat16, not {dtype}",)
    if not all(isinstance(size, int) for size in (*sizes, shapes.q_heads)):
        return (f"{kernels} copy pages of eight bits where sizes are known",)
    if (page := _page_bytes(shapes)) > MOST_BYTES:
        return (f"{kernels} copy pages of eight bits of up to {MOST_BYTES} bytes, not {page}",)
    return ()


def _page_bytes(shapes: Shapes) -> int:
    """Counts the bytes that copies of a page take."""
    return 2 * shapes.kv_heads * (shapes.head_dim + shapes.value_dim) * (shapes.page_size or 1)


def _seen(shapes: Shapes) -> tuple[int, int]:
    """Counts the pages of the pool, and those that all requests may name."""
    columns = shapes.kv_len // max(shapes.page_size or 1, 1)
    return int(shapes.pages or 0), shapes.batch * columns


def fields(shapes: Shapes, count: int) -> tuple[Field, ...]:
    """Returns what pages are copied from and to, where there is place for so many."""

    def copies(dim: int) -> Scratch:
        return Scratch("bf16", (count, PAGE, K, dim))

    def scales(name: str) -> Struct:
        step = where(equal(Size(f"{name}.P"), 1), 0, K)
        return Struct(
            "Scales", (Field("const float*", "data", name), Field("long long", "page", step))
        )

    table = Scratch("s32", (REQUESTS, COLUMNS))
    return (
        Field("const void*", "stored_keys", "k", "[P, kPageSize, K, H] of eight bits"),
        Field("const void*", "stored_values", "v", "[P, kPageSize, K, Hv]"),
        Field("const int*", "stored_table", "page_table", "[table_rows, columns]"),
        Field("Scales", "key_scale", scales("key_scale")),
        Field("Scales", "value_scale", scales("value_scale")),
        Field("void*", "copied_keys", copies(shapes.head_dim), "[copied_pages, kPageSize, K, H]"),
        Field("void*", "copied_values", copies(shapes.value_dim)),
        Field("int*", "copied_table", table, "pages of copies"),
        Field("unsigned*", "claims", Scratch("u32", (P,)), "0 at launch; see claimed_by"),
        Field("int", "copied_pages", count, "place for so many; P: each at its own number"),
        Field("int", "table_rows", Size("rows")),
    )


def steps() -> tuple[Step, ...]:
    """Returns the launches around request_units."""
    copy = Kernel("copy_pages", SMS * _CTAS, _THREADS, beside=True, overlaps=True)
    return Zero("claims", P), Kernel("request_units", 1, UNIT_THREADS, beside=True), copy
