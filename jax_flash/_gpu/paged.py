"""What families whose forward kernels compute requests over pages have in common: flash_prefill.

Their units are made of requests on the device (cuda/kernels/request_units.cuh).
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

from jax_flash._call import Call
from jax_flash._gpu.buffers import dims_of
from jax_flash._gpu.family import Family
from jax_flash._gpu.fields import Field, Scratch, name_of
from jax_flash._gpu.plan import Buffer, Plan
from jax_flash._gpu.shared_fields import MAX_INT
from jax_flash._gpu.sizes import AnySize, B, Size, T, at_most, ceil_div, equal
from jax_flash._gpu.spec import GpuSpec
from jax_flash._gpu.traits import group_size, known
from jax_flash._problem import Shapes

REQUESTS, COLUMNS, P, PAGE = map(Size, ("requests", "columns", "P", "page"))
UNIT_THREADS = 512  # of request_units
_MOST_POSITIONS = 2**30 - 1  # that a request has place for: as much again overflows
_MOST_PACKED = 64  # query heads of a kv head that share a unit
FEWEST = 0.5  # units that tokens fill, of a multiprocessor
_MULTIPROCESSORS = 132  # of a GPU that is not known


def refuse(
    call: Call, shapes: Shapes, gpu: GpuSpec, kernels: str, copied: tuple[str, ...] = ()
) -> list[str]:
    """Lists why such kernels do not run a call, whatever the family.

    copied: dtypes of pages that are copied ahead.
    """
    reasons = []
    if call.problem.dtype not in ("bfloat16", "float16"):
        reasons.append(f"{kernels} take bfloat16 and float16, not {call.problem.dtype}")
    if call.cache_dtype not in (call.problem.dtype, *copied):
        reasons.append(f"{kernels} have no caches of {call.cache_dtype}")
    dims = shapes.head_dim, shapes.value_dim
    if max(dims) > 256 or dims[0] % 8 or dims[1] % 8:
        reasons.append(
            f"{kernels} take head dims up to 256 that 8 divides, not {dims[0]} and {dims[1]}"
        )
    if "v" not in call.operands:
        reasons.append(f"{kernels} take values of their own, none within keys")
    if isinstance(shapes.kv_len, int) and shapes.kv_len > _MOST_POSITIONS:
        reasons.append(
            f"{kernels} take requests of up to {_MOST_POSITIONS} positions, not {shapes.kv_len}"
        )
    if not isinstance(shapes.page_size, int):
        reasons.append(f"{kernels} take pages of a known size, not {shapes.page_size}")
    if 0 in (shapes.q_len, shapes.q_heads, shapes.kv_heads, shapes.kv_len, shapes.page_size):
        reasons.append("there are no tokens, heads or pages")
        return reasons
    rows = known(shapes.q_len, 4096) * known(shapes.q_heads, 1)
    # A window without an end is that of a part of flash_common.
    few = call.target == "prefill" and call.problem.window[1] is not None
    if few and rows < FEWEST * (gpu.sms or _MULTIPROCESSORS) * 128:
        reasons.append(
            f"{rows} rows of queries leave most multiprocessors idle: decoding kernels share "
            "a request's keys out"
        )
    return reasons


def packed_heads(shapes: Shapes) -> int:
    """Counts the query heads that share a unit: a request's tokens, however few, fill it then."""
    group = group_size(shapes)
    return min(group & -group, _MOST_PACKED)


def units_of_head(packed: int, rows: int) -> AnySize:
    """Counts the units of so many rows, packed query heads, at most: each request may end one."""
    return ceil_div(T * packed, rows) + REQUESTS


def names(in_common: bool = False) -> dict[str, AnySize]:
    """Returns the sizes of a launch that mean another thing than in dense calls.

    in_common: batch rows are parts of positions, as many of each request.
    """
    rows: dict[str, AnySize] = {} if in_common else {"B": 1, "sinks.B": 1}
    return {**rows, "S": COLUMNS * PAGE}


def checks(packed: int, page_size: int) -> tuple[tuple[AnySize, str], ...]:
    """Returns what a launch for pages of a size checks."""
    return (
        (equal(PAGE, page_size), "this tiling is for other pages"),
        (at_most(T * packed, MAX_INT // 2), "too many query rows"),
    )


def fields(
    units: AnySize | None, in_common: bool = False, tails: bool = False, copied: bool = False
) -> tuple[Field, ...]:
    """Returns what says where requests have their tokens and keys; None: there are none.

    in_common: their keys are in parts, each of which all of a request's tokens see.
    tails: and each token sees keys of its own.
    copied: pages are copies, those of copies.fields.
    """
    table = "copied_table" if copied else "page_table"
    plan = None if units is None or in_common else Scratch("s32", (units, 4))
    first, count = (None, None) if in_common else ("first", "count")
    parts = B // REQUESTS - int(tails)
    made = (
        Field("const int*", "page_table", table, "[requests or fewer, columns]"),
        Field("const int*", "request_lengths", "lengths", "[requests] positions; see RequestUnit"),
        Field("const int*", "request_firsts", first, "[requests] first tokens"),
        Field("const int*", "request_counts", count, "[requests] tokens"),
        Field("int*", "request_plan", plan, "a RequestUnit for each unit, by request_units"),
        Field("int", "requests", REQUESTS),
        Field("int", "pages", P),
        Field("int", "table_columns", COLUMNS),
        Field("int", "parts_in_common", parts if in_common else None, "kInCommon"),
        Field("const int*", "own_table", "own_table" if tails else None, "kTails"),
        Field("int", "own_columns", Size("own_columns") if tails else None, "likewise"),
        Field("const int*", "tails", "tails" if tails else None, "[requests, T] Tail, likewise"),
        Field("void*", "merged", "merged" if tails else None, "likewise: [requests, T, N, Hv]"),
        Field("float*", "merged_lse", "merged_lse" if tails else None, "[requests, T, N]"),
    )
    if units is not None:
        return made
    return tuple(dataclasses.replace(field, value=None) for field in made)


def buffer(call: Call, shapes: Shapes, name: str) -> Buffer:
    """Returns an operand or result, by name."""
    key, value = str(shapes.head_dim), str(shapes.value_dim)
    in_common = call.target == "common"
    merges = in_common and cast(Any, call).tails
    parts = ("requests" if merges else "B",) * in_common
    dims: dict[str, tuple[str, ...]] = {
        "q": (*("requests",) * in_common, "T", "N", key),
        "k": ("P", "page", "K", key),
        "v": ("P", "page", "K", value),
        **dict.fromkeys(("lengths", "first", "count"), ("requests",)),
        "page_table": ("rows", "columns"),
        "own_table": ("own_rows", "own_columns"),
        "tails": ("requests", "T", "4"),
        "key_scale": ("key_scale.P:P", "K"),
        "value_scale": ("value_scale.P:P", "K"),
        "sinks": ("N",),
        "out": (*parts, "T", "N", value),
        "lse": (*parts, "T", "N"),
    }
    integers = ("lengths", "first", "count", "page_table", "own_table", "tails")
    dtypes: dict[str, Any] = dict.fromkeys(integers, "int32")
    dtypes |= dict.fromkeys(("sinks", "lse", "key_scale", "value_scale"), "float32")
    dtypes |= dict.fromkeys("kv", call.cache_dtype)
    dtype = name_of(dtypes.get(name, call.problem.dtype))
    if merges and name in call.results:  # parts of them, workspaces, are out and lse
        return Buffer({"out": "merged", "lse": "merged_lse"}[name], (dtype,), dims[name])
    return Buffer(name, (dtype,), dims[name])


def plan(
    family: Family, call: Call, shapes: Shapes, gpu: GpuSpec, *, batch: Any = 1, **made: Any
) -> Plan:
    """Makes a family's plan of a call; `made`: of `Plan`, what its kernels say.

    batch: rows of the dense call whose kernel runs.
    """
    return Plan(
        family=family.name,
        arch=gpu.arch,
        operands=tuple(buffer(call, shapes, name) for name in call.operands),
        results=tuple(buffer(call, shapes, name) for name in call.results),
        same=(),
        dims=dims_of(dataclasses.replace(shapes, batch=batch))
        | {"requests": shapes.batch, "P": shapes.pages, "page": shapes.page_size}
        | {"columns": shapes.kv_len // (shapes.page_size or 1)},
        **made,
    )


def dense_call(call: Call, shapes: Shapes, batch: Any = 1) -> tuple[Call, Shapes]:
    """Returns the dense call whose kernel runs, and its sizes: shapes.batch counts requests.

    A unit's request says where its queries stand among keys.
    """
    problem = dataclasses.replace(call.problem, bottom_right=False)
    return dataclasses.replace(call, problem=problem), dataclasses.replace(shapes, batch=batch)
