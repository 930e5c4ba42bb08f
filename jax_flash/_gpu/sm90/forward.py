"""Owns which tiling the forward kernel for Hopper takes: that of a table's first row that holds.

The table is measured, and cuda/decisions.md tells how. What it asks stands in forward_rows.py,
forward_keys.py and forward_order.py. Read next: forward_tiling.py, what a tiling is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jax_flash._gpu.sm90.facts import Facts
from jax_flash._gpu.sm90.forward_keys import (
    block_kv,
    fades,
    has_one_block,
    is_block_of_documents,
    producer_registers,
)
from jax_flash._gpu.sm90.forward_order import batches_together, dynamic, l2_heads
from jax_flash._gpu.sm90.forward_parts import splits_units
from jax_flash._gpu.sm90.forward_rows import (
    CUT_DOCUMENTS,
    THREE,
    THREE_DRAIN,
    THREE_HIDE,
    cuts_documents,
    fits_one_warpgroup,
    has_heavy_function,
    has_short_units,
    holds_queries,
    is_roomy_layout,
    leaves_teams_room,
    one_if_few,
    one_if_uneven,
    packed_heads,
    pair_if_few,
    tests_few,
    three_if_few,
    three_if_grouped,
    three_if_long,
    three_if_middle,
    three_if_narrow,
    two_if_few,
)
from jax_flash._gpu.sm90.forward_tiling import ForwardTiling
from jax_flash._gpu.sm90.hopper import early_tiles
from jax_flash._gpu.spec import GpuSpec
from jax_flash._gpu.traits import is_layout, is_plane
from jax_flash._problem import Problem, Shapes


def choose_forward(problem: Problem, shapes: Shapes, gpu: GpuSpec) -> ForwardTiling:
    """Chooses the forward kernel's tiling for a problem that the family does not refuse."""
    if (of_tiles := early_tiles(problem, shapes)) is not None:
        tiling = choose_forward(problem, of_tiles, gpu)
        return dataclasses.replace(tiling, early=True, holds_queries=False, splits=False)
    facts = Facts(problem, shapes, gpu)
    tiling = _of_table(facts)
    if not tiling.tma_loads:
        return tiling
    if fades(facts):
        # Heads differ in length: 4 to 10 % over 1, 12 or 32 together, where units of one do not.
        together = tiling.l2_heads if facts.has_right else 4
        return dataclasses.replace(tiling, fades=True, l2_heads=together)
    if cuts_documents(facts):
        # Units of three warpgroups of wide heads were timed so.
        aligned = tiling.consumers == 3 and facts.widest > 64
        return dataclasses.replace(tiling, cut_documents=CUT_DOCUMENTS, cuts_aligned=aligned)
    return _with_bias(facts, tiling)


def _with_bias(facts: Facts, tiling: ForwardTiling) -> ForwardTiling:
    """Has a bias come by TMA, in as many stages as there is room for, if there are two."""
    bytes_ = facts.bytes_of_bias
    if not is_plane(facts.shapes) or tiling.block_kv * bytes_ % 128 != 0:
        return tiling
    for stages in range(tiling.stages, 1, -1):
        tiled = dataclasses.replace(tiling, stages=stages, bias_bytes=bytes_)
        if tiled.shared_bytes <= facts.gpu.shared_bytes:
            return tiled
    return tiling


def _of_table(facts: Facts) -> ForwardTiling:
    """Takes the table's first row that holds; what it does not name is chosen by itself."""
    common: dict[str, Any] = {
        "consumers": 2,
        "block_kv": block_kv(facts),
        "packed_heads": packed_heads(facts),
        "dynamic": dynamic(facts),
        "l2_heads": l2_heads(facts),
        "producer_registers": producer_registers(facts),
        "tma_loads": facts.tma_loads,
        "halves": facts.halves,
        "batches_together": batches_together(facts),
    }
    named = next(tiling for holds, tiling in _FORWARD if holds(facts))
    return ForwardTiling(facts.shapes.head_dim, facts.shapes.value_dim, **{**common, **named})


def _row(holds: Callable[[Facts], bool], **tiling: Any) -> Any:
    return holds, tiling


def _has_blocks_of_80(facts: Facts) -> bool:
    """Three warpgroups' units from a counter, in blocks of 80 keys: full ones of few have 64."""
    return three_if_middle(facts) or (three_if_grouped(facts) and facts.shapes.value_dim > 96)


def _has_larger_units(facts: Facts) -> bool:
    return three_if_long(facts) or three_if_few(facts)


_OF_ONE = {"consumers": 1, "ping_pong": False}
_OF_THREE = {"block_kv": 128, "consumers": 3, "stages": 4, "query_stages": 2, "ping_pong": False}
_OF_THREE_64 = {**_OF_THREE, "block_kv": 64}
_OF_TEAMS = {"block_kv": 64, "teams": 2, "stages": 5, "query_stages": 2, "ping_pong": False}
_FORWARD = (
    # float32 in halves: a tile has two planes.
    _row(lambda x: x.halves and x.widest <= 64, producer_registers=24, **_OF_THREE_64),
    # A window beside 24: 8 bytes spilled.
    _row(lambda x: x.halves, block_kv=64, producer_registers=40),
    # Four warps load, since TMA cannot.
    _row(lambda x: not x.tma_loads and x.widest <= 128, query_stages=2),
    _row(lambda x: not x.tma_loads),
    # Few units.
    _row(splits_units, splits=True, **_OF_ONE),
    _row(lambda x: one_if_few(x) and max(x.widest, x.keys) <= 64, block_kv=64, **_OF_ONE),
    _row(one_if_few, **_OF_ONE),
    _row(one_if_uneven, dynamic=True, **_OF_ONE),
    _row(two_if_few),
    _row(pair_if_few, block_kv=64, teams=2, dynamic=False, **_OF_ONE),
    _row(lambda x: x.widest <= 64 and three_if_few(x), **_OF_THREE),
    # Head dims up to 64.
    _row(
        fits_one_warpgroup,
        **{**_OF_TEAMS, "consumers": 1, "teams": 3, "stages": 2, "batches_together": False},
    ),
    _row(leaves_teams_room, **{**_OF_TEAMS, "stages": 2}),
    # A row of blocks of a layout is none of its neighbours': of three warpgroups' 192 rows most
    # units would walk the blocks of two rows of 128.
    _row(lambda x: x.widest <= 64 and (has_short_units(x) or is_roomy_layout(x)), **_OF_TEAMS),
    _row(
        lambda x: x.widest <= 64 and is_layout(x.problem),
        block_kv=128,
        stages=6,
        query_stages=2,
        producer_registers=40,
    ),
    # Three warpgroups, of 160 registers a thread, are 5 to 18 % faster than two, of 240. Where they
    # drain, a softmax has the registers that the weights had before.
    _row(
        lambda x: three_if_narrow(x) and not has_heavy_function(x) and not x.spills(THREE),
        **_OF_THREE,
    ),
    # 8 bytes are spilled of float16 when causal; two warpgroups take a fifth longer (bfloat16).
    _row(lambda x: three_if_narrow(x) and x.has_bias_alone, drains=True, **_OF_THREE),
    _row(
        lambda x: tests_few(x) and is_block_of_documents(x) and not x.spills(THREE_HIDE),
        drains_to_hide=True,
        **_OF_THREE_64,
    ),
    _row(lambda x: tests_few(x) and not x.spills(THREE_HIDE), drains_to_hide=True, **_OF_THREE),
    _row(lambda x: three_if_narrow(x) and not x.spills(THREE_DRAIN), drains=True, **_OF_THREE),
    _row(lambda x: x.widest <= 64, stages=4, query_stages=2),
    # Head dims up to 128.
    _row(
        lambda x: _has_blocks_of_80(x) and not x.is_uneven and x.keys < 1024,
        dynamic=True,
        **_OF_THREE_64,
    ),
    _row(_has_blocks_of_80, dynamic=True, **{**_OF_THREE, "block_kv": 80, "stages": 3}),
    _row(three_if_grouped, consumers=3, stages=3, ping_pong=False, dynamic=True),
    _row(lambda x: three_if_few(x) and x.keys < 1024, **_OF_THREE_64),
    _row(
        lambda x: _has_larger_units(x) and block_kv(x) == 80,
        consumers=3,
        stages=4,
        ping_pong=False,
    ),
    _row(_has_larger_units, consumers=3, stages=3, ping_pong=False),
    # 3 to 11 % by the producer's registers.
    _row(lambda x: x.widest <= 128 and is_layout(x.problem), stages=3, producer_registers=40),
    _row(lambda x: x.widest <= 128 and has_one_block(x), stages=3, query_stages=2, ping_pong=False),
    _row(holds_queries, stages=3, holds_queries=True),
    _row(lambda x: x.widest <= 128, stages=3),
    _row(lambda x: True),
)
