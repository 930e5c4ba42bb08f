"""Owns how Hopper's forward kernel computes requests whose keys lie in pages: flash_prefill.

It is the kernel of dense calls: units are made of requests on the device, and blocks of keys come
from pages. Read next: forward.py; cuda/kernels/sm90/forward_pages.cuh.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

from jax_flash._cache import QUANTIZED
from jax_flash._call import Call
from jax_flash._gpu import copies, paged
from jax_flash._gpu.family import Family
from jax_flash._gpu.plan import Plan
from jax_flash._gpu.sm90.forward import choose_forward
from jax_flash._gpu.sm90.forward_launch import forward_launch
from jax_flash._gpu.sm90.forward_schedule import forward_constants
from jax_flash._gpu.sm90.forward_tiling import ForwardTiling
from jax_flash._gpu.sm90.hopper import L2_SHARE, multiprocessors
from jax_flash._gpu.spec import GpuSpec
from jax_flash._gpu.traits import group_size, known
from jax_flash._problem import Problem, Shapes

_BOX_ROWS = 8  # of a swizzle: what TMA loads at once is a multiple
_ONE_PAGE = 64  # keys of a block that lie in one page
FEWEST_IN_COMMON = 256  # rows of queries of a kv head
_SHORT_QUERIES = 1024  # of which no tiling has three warpgroups: a third one has tails
_MOST_TAIL_ROWS = 16  # columns of a product


class Pages(Family):
    """The forward kernel of cuda/kernels/sm90, with keys from pages."""

    name = "pages"
    architectures = ("sm_90a",)
    passes = ("prefill", "common")
    measured = ("H100",)

    def refuse(self, call: Call, shapes: Shapes, gpu: GpuSpec) -> tuple[str, ...]:
        kernels, size = "the CUDA forward kernels over pages", shapes.page_size
        of_prompts = call.target == "prefill"
        reasons = paged.refuse(call, shapes, gpu, kernels, tuple(QUANTIZED) if of_prompts else ())
        if gpu.arch not in self.architectures:
            reasons.append(f"{kernels} run on sm_90 (H100, H200); {gpu.name} is {gpu.arch}")
        if isinstance(size, int) and size % _BOX_ROWS:
            reasons.append(f"{kernels} by TMA take a multiple of {_BOX_ROWS} positions, not {size}")
        if call.target == "common" and shapes.kv_len != 0 and not reasons:
            reasons += _few_in_common(shapes) or _without_tails(cast(Any, call), shapes)
        if call.cache_dtype in QUANTIZED and of_prompts and not reasons:
            reasons += copies.refuse(shapes, call.problem.dtype, kernels)
        return tuple(reasons)

    def plan(
        self, call: Call, shapes: Shapes, gpu: GpuSpec, tiling: ForwardTiling | None = None
    ) -> Plan:
        batch, of_parts = 1, cast(Any, call)  # of flash_common
        if call.target == "common":
            batch = shapes.batch * of_parts.count
            tiling = tiling or choose_in_common(
                call.problem, shapes, gpu, of_parts.count, tails=of_parts.tails
            )
        tiling = tiling or choose_pages(call.problem, shapes, gpu)
        notes = self.untried(gpu)
        if call.cache_dtype in QUANTIZED:
            count = copies.places(shapes)
            tiling = dataclasses.replace(tiling, copied=call.cache_dtype, copied_pages=count)
            notes = (f"up to {count} pages of {call.cache_dtype} are copied to bfloat16", *notes)
        call, dense = paged.dense_call(call, shapes, batch)
        return paged.plan(
            self,
            call,
            shapes,
            gpu,
            batch=batch,
            target="jax_flash_cuda_forward",
            source=tiling.source,
            beside=tiling.beside,
            tiling=tiling,
            constants=forward_constants(tiling, call.problem, dense),
            launch=forward_launch(call, dense, tiling),
            notes=notes,
        )


def choose_pages(problem: Problem, shapes: Shapes, gpu: GpuSpec) -> ForwardTiling:
    """Chooses the tiling of the dense call of as many tokens, with units that fit requests.

    Query heads that share keys share units, too.
    """
    dense = dataclasses.replace(shapes, batch=1)
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
    group, packed = group_size(shapes), paged.packed_heads(shapes)
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


def choose_in_common(
    problem: Problem, shapes: Shapes, gpu: GpuSpec, parts: int, *, tails: bool = False
) -> ForwardTiling:
    """Chooses the tiling where all tokens see all positions, which are cut into parts.

    Tokens are dense queries, and each part is a batch row.
    """
    in_common = max(parts - tails, 1)
    tokens, keys = shapes.q_len * in_common, -(-shapes.kv_len // in_common)
    if tails:
        tokens = min(tokens, _SHORT_QUERIES)
    of_parts = dataclasses.replace(shapes, q_len=tokens, kv_len=keys)
    tiling = choose_pages(problem, of_parts, gpu)
    blocks = -(-shapes.q_len * tiling.packed_heads // tiling.block_q)
    units = in_common * shapes.batch * blocks * shapes.q_heads // tiling.packed_heads
    # A counter is for more units than run at once.
    dynamic = units > multiprocessors(gpu)
    # What stands behind whole pages, or a tail, is seen by nobody: where its values are not finite,
    # rows of queries are computed again. To clear them takes 5 us of 31.
    made: dict[str, Any] = {"dynamic": dynamic, "in_common": True, "clears_values": False}
    if tails:
        group = group_size(shapes)
        made["stages"] = min(tiling.stages, 2)
        made["tail_rows"] = max(n for n in range(1, _MOST_TAIL_ROWS + 1) if group % n == 0)
    return dataclasses.replace(tiling, **made)


def _few_in_common(shapes: Shapes) -> tuple[str, ...]:
    """Says why rows of decoding take less time than units of a dense problem, if they do."""
    sizes = (shapes.batch, shapes.q_len, shapes.q_heads, shapes.kv_heads, shapes.kv_len)
    if not all(isinstance(size, int) for size in sizes):
        return ("how many parts positions are cut into depends on sizes that are not known",)
    rows = shapes.q_len * group_size(shapes)
    if rows < FEWEST_IN_COMMON:
        return (f"{rows} rows of queries of a kv head are few: decoding kernels take less time",)
    return ()


def _without_tails(call: Any, shapes: Shapes) -> tuple[str, ...]:
    """Says why units have no tails beside them, if they do not."""
    if not call.tails or call.tails_fit(shapes.head_dim, shapes.value_dim):
        return ()
    return ("tails beside pages in common have head dims 72 to 128, and no softcap",)


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
