"""Owns how Hopper's forward kernel computes requests whose keys lie in pages: flash_prefill.

It is the kernel of dense calls: units are made of requests on the device, and blocks of keys come
from pages. Read next: forward.py; cuda/kernels/sm90/forward_pages.cuh.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax_flash._call import Call
from jax_flash._gpu.buffers import dims_of
from jax_flash._gpu.family import Family
from jax_flash._gpu.fields import name_of
from jax_flash._gpu.plan import Buffer, Plan
from jax_flash._gpu.sm90.forward import choose_forward
from jax_flash._gpu.sm90.forward_launch import forward_launch
from jax_flash._gpu.sm90.forward_schedule import forward_constants
from jax_flash._gpu.sm90.forward_tiling import ForwardTiling
from jax_flash._gpu.sm90.hopper import L2_SHARE, multiprocessors, tma_loads_of
from jax_flash._gpu.spec import GpuSpec
from jax_flash._gpu.traits import group_size, known
from jax_flash._problem import Problem, Shapes

_MOST_POSITIONS = 2**30 - 1  # that a request has place for: as much again overflows
_BOX_ROWS = 8  # of a swizzle: what TMA loads at once is a multiple
_MOST_PACKED = 64  # query heads of a kv head that share a unit, as many as a warpgroup has rows
_ONE_PAGE = 64  # keys of a block that lie in one page
_FEWEST = 0.5  # units that tokens fill, of a multiprocessor
FEWEST_IN_COMMON = 256  # rows of queries of a kv head


class Pages(Family):
    """The forward kernel of cuda/kernels/sm90, with keys from pages."""

    name = "pages"
    architectures = ("sm_90a",)
    passes = ("prefill", "common")
    measured = ("H100",)

    def refuse(self, call: Call, shapes: Shapes, gpu: GpuSpec) -> tuple[str, ...]:
        kernels, size = "the CUDA forward kernels over pages", shapes.page_size
        reasons = []
        if gpu.arch not in self.architectures:
            reasons.append(f"{kernels} run on sm_90 (H100, H200); {gpu.name} is {gpu.arch}")
        if call.problem.dtype not in ("bfloat16", "float16"):
            reasons.append(f"{kernels} take bfloat16 and float16, not {call.problem.dtype}")
        if call.cache_dtype != call.problem.dtype:
            reasons.append(f"{kernels} have no caches of {call.cache_dtype}")
        dims = shapes.head_dim, shapes.value_dim
        if max(dims) > 256 or not tma_loads_of(shapes):
            reasons.append(
                f"{kernels} take head dims up to 256 that 8 divides, not {dims[0]} and {dims[1]}"
            )
        if "v" not in call.operands:
            reasons.append(f"{kernels} take values of their own, none within keys")
        if not isinstance(size, int) or size == 0 or size % _BOX_ROWS:
            text = f"{kernels} take pages of a multiple of {_BOX_ROWS} positions, not {size}"
            reasons.append(text)
        if 0 in (shapes.q_len, shapes.q_heads, shapes.kv_heads, shapes.kv_len):
            return (*reasons, "there are no tokens, heads or pages")
        if isinstance(shapes.kv_len, int) and shapes.kv_len > _MOST_POSITIONS:
            reasons.append(
                f"{kernels} take requests of up to {_MOST_POSITIONS} positions, not {shapes.kv_len}"
            )
        if call.target == "common":
            return (*reasons, *_few_in_common(shapes))
        rows = known(shapes.q_len, 4096) * known(shapes.q_heads, 1)
        # A window without an end is that of a part of flash_common.
        if call.problem.window[1] is not None and rows < _FEWEST * multiprocessors(gpu) * 128:
            reasons.append(
                f"{rows} rows of queries leave most multiprocessors idle: decoding kernels share "
                "a request's keys out"
            )
        return tuple(reasons)

    def plan(
        self, call: Call, shapes: Shapes, gpu: GpuSpec, tiling: ForwardTiling | None = None
    ) -> Plan:
        tiling = tiling or choose_pages(call.problem, shapes, gpu)
        # A unit's request says where its queries stand among keys.
        problem = dataclasses.replace(call.problem, bottom_right=False)
        call = dataclasses.replace(call, problem=problem)
        dense = dataclasses.replace(shapes, batch=1)  # shapes.batch counts requests
        return Plan(
            family=self.name,
            arch=gpu.arch,
            target="jax_flash_cuda_forward",
            source=tiling.source,
            beside=tiling.beside,
            tiling=tiling,
            constants=forward_constants(tiling, problem, dense),
            operands=tuple(_buffer(call, shapes, name) for name in call.operands),
            results=tuple(_buffer(call, shapes, name) for name in call.results),
            same=(),
            launch=forward_launch(call, dense, tiling),
            dims=dims_of(dense) | {"requests": shapes.batch},
            notes=self.untried(gpu),
        )


def choose_pages(problem: Problem, shapes: Shapes, gpu: GpuSpec) -> ForwardTiling:
    """Chooses the tiling of the dense call of as many tokens, with units that fit requests.

    Query heads that share keys share units, too: a request's tokens, however few, fill them then.
    """
    dense = dataclasses.replace(shapes, batch=1, page_size=None)
    terms = ("query_lengths", "key_value_lengths", *problem.terms)
    lengths = dataclasses.replace(problem, bottom_right=False, terms=terms)
    tiling = choose_forward(lengths, dense, gpu)
    # Beside a softcap tokens that see all positions have no registers for as many keys: 32 bytes.
    crowded = problem.window[1] is None and problem.softcap is not None
    if max(shapes.head_dim, shapes.value_dim) > 128 and not crowded:
        plain = choose_forward(problem, dense, gpu)
        tiling = dataclasses.replace(tiling, block_kv=plain.block_kv)
    if tiling.consumers == 3 and max(shapes.head_dim, shapes.value_dim) <= 128:
        tiling = dataclasses.replace(tiling, **_of_three(tiling, shapes.page_size or 0))
    group = group_size(shapes)
    packed = min(group & -group, _MOST_PACKED)
    bytes_of_head = 2 * known(shapes.kv_len, 4096) * (shapes.head_dim + shapes.value_dim)
    kv_heads = known(shapes.kv_heads, 1)
    sets = -(-kv_heads // max(1, min(L2_SHARE // bytes_of_head, kv_heads)))
    together = -(-kv_heads // sets)  # a last set of one head is 3 to 4 % by a model of the units
    return dataclasses.replace(
        tiling,
        dynamic=True,
        packed_heads=packed,
        l2_heads=together * group // packed,
        page_size=shapes.page_size or 0,
    )


def _few_in_common(shapes: Shapes) -> tuple[str, ...]:
    """Says why rows of decoding take less time than units of a dense problem, if they do."""
    sizes = (shapes.batch, shapes.q_len, shapes.q_heads, shapes.kv_heads, shapes.kv_len)
    if not all(isinstance(size, int) for size in sizes):
        return ("how many parts positions are cut into depends on sizes that are not known",)
    rows = shapes.q_len * group_size(shapes)
    if rows < FEWEST_IN_COMMON:
        return (f"{rows} rows of queries of a kv head are few: decoding kernels take less time",)
    return ()


def _of_three(tiling: ForwardTiling, page_size: int) -> dict[str, Any]:
    """Returns what differs in a tiling of three warpgroups, at head dims up to 128.

    Values are not cleared, which takes 4 to 10 %, and up to 64 a softmax waits for nothing. Above
    64 blocks are of one page where pages have 64 keys: 5 % less than five boxes of 16 keys take.
    Head dims 72 to 120 by analogy.
    """
    if max(tiling.head_dim, tiling.value_dim) <= 64:
        return {"clears_values": False, "drains": False, "drains_to_hide": False}
    if page_size % _ONE_PAGE == 0:
        return {"clears_values": False, "block_kv": _ONE_PAGE, "stages": 5}
    return {"clears_values": False}


def _buffer(call: Call, shapes: Shapes, name: str) -> Buffer:
    key, value = str(shapes.head_dim), str(shapes.value_dim)
    dims: dict[str, tuple[str, ...]] = {
        "q": ("T", "N", key),
        "k": ("P", "page", "K", key),
        "v": ("P", "page", "K", value),
        **dict.fromkeys(("lengths", "first", "count"), ("requests",)),
        "page_table": ("rows", "columns"),
        "sinks": ("N",),
        "out": ("T", "N", value),
        "lse": ("T", "N"),
    }
    dtypes: dict[str, Any] = dict.fromkeys(("lengths", "first", "count", "page_table"), "int32")
    dtypes |= dict.fromkeys(("sinks", "lse"), "float32")
    return Buffer(name, (name_of(dtypes.get(name, call.problem.dtype)),), dims[name])
