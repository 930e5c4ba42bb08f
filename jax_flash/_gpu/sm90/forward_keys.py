"""Owns which keys the forward kernel for Hopper takes at once, and whose registers that leaves.

Read next: forward_order.py, which has the order of units.
"""

from __future__ import annotations

from jax_flash._gpu.sm90.facts import Facts
from jax_flash._gpu.sm90.forward_rows import (
    has_many_rounds,
    three_if_few,
    three_if_grouped,
    three_if_long,
)
from jax_flash._gpu.traits import is_plane, is_ragged
from jax_flash._gpu.workspaces import boxes

# What takes registers.


def needs_few_registers(facts: Facts) -> bool:
    """Takes no registers of the producer, and of wide heads' consumers few."""
    few = facts.has_only("bias") if facts.widest <= 64 else not facts.problem.terms
    return facts.is_plain or (few and not facts.is_mapped and not facts.has_left)


def _ids_beside_bias(facts: Facts) -> bool:
    """Wide heads, and what a row keeps beside a block's ids, bits or bias."""
    beside = facts.bytes_of_bias > 0 or facts.problem.masked or facts.has("query_segments")
    placed = facts.has("query_positions") and beside
    both = facts.bytes_of_bias > 0 and facts.has("query_segments")
    return facts.widest > 64 and (placed or both)


def bias_waits(facts: Facts) -> bool:
    """A block's bias waits in registers for its scores: up to 32 of a thread."""
    others = facts.problem.masked or facts.has("dropout_state") or facts.is_mapped
    beside = facts.bytes_of_bias > 0 and others
    ragged = facts.bytes_of_bias == 4 or is_ragged(facts.shapes.bias)
    return ragged or beside or _ids_beside_bias(facts)


def _columns(facts: Facts) -> int:
    """Those of a block of keys and values."""
    return facts.shapes.head_dim + facts.shapes.value_dim


def producer_registers(facts: Facts) -> int:
    """Registers of a producer's thread: 24, 40 or 56; consumers have the others."""
    if not facts.tma_loads:
        # Four warps that load keep addresses, most of them where they load 2 bytes at once or a
        # block mask's words too.
        by_element = facts.shapes.head_dim % 2 == 1 and facts.shapes.value_dim % 2 == 1
        most = facts.widest > 128 or by_element or facts.has("block_numbers")
        return 56 if most else 40
    # Lengths and segments take registers of the producer; wide heads, dropout and positions of the
    # consumers, and so do a softcap and the bias of narrow heads.
    if needs_few_registers(facts) and not 256 < _columns(facts) <= 320:
        return 24
    # At head dim 128 consumers take up to 92 bytes more than 224 registers: a softcap, or a bias
    # beside another term; up to 158 one beside float16 queries. Sinks and dropout take none of the
    # producer's, and with 40 consumers spill 8 to 144 bytes.
    is_float16 = facts.problem.dtype == "float16"
    crowd = facts.bytes_of_bias > 0 and (len(facts.problem.terms) > 1 or is_float16)
    crowd = crowd or facts.is_capped
    tight = 64 < facts.widest <= 128 and crowd and not facts.has("query_segments")
    if tight and facts.has_only("sinks", "dropout_state"):
        return 24
    # Beside segments a mask takes 44 bytes more than 40 registers of the producer.
    wide = facts.widest > 128 and not (facts.problem.masked and facts.has("query_segments"))
    return 40 if wide or tight or facts.has("dropout_state", "query_positions") else 56


# Keys of a block.


def block_kv(facts: Facts) -> int:
    """Keys of a block, of which the table names no other number."""
    if three_if_long(facts) or three_if_grouped(facts) or three_if_few(facts):
        # With its columns of the result a row has registers for no more.
        columns = facts.shapes.value_dim
        return 112 if columns <= 80 else 96 if columns <= 96 else 80
    if facts.widest <= 128:
        addresses = not facts.tma_loads and facts.has("block_numbers")
        return 64 if bias_waits(facts) or addresses else _block_of_few(facts, 128)
    if not facts.tma_loads:
        even = facts.shapes.head_dim % 2 == 0 and facts.shapes.value_dim % 2 == 0
        if facts.is_plain and even:
            return 64
        return 32 if facts.bytes_of_bias == 4 else 48
    narrow = _columns(facts) <= 320 or facts.widest <= 192
    most = 112 if narrow else 96 if _columns(facts) <= 384 else 80
    most = min(most, _keys_with_room(facts))
    # With 512 keys the last block of 80 is more than half past the end: 3 to 5 %.
    if needs_few_registers(facts):
        return _block_of_few(facts, most)
    if facts.bytes_of_bias == 4:
        return 32
    if facts.bytes_of_bias == 2:
        return 64 if is_plane(facts.shapes) else 48  # by TMA: no registers
    full = _ids_beside_bias(facts) or (facts.is_mapped and facts.problem.masked)
    return min(most, 48 if full else 64)


def _keys_with_room(facts: Facts) -> int:
    """Counts the keys of a block of which two fit in shared memory beside 128 queries."""
    queries, values = boxes(facts.shapes.head_dim), boxes(facts.shapes.value_dim)
    rows = (facts.gpu.shared_bytes - 2048) // 128 - 128 * queries
    return rows // (2 * (queries + values)) // 16 * 16


def has_one_block(facts: Facts) -> bool:
    """A unit has one block of up to 96 keys: nothing to take turns for, and room for two Q.

    H200, in turns: T 92, 3 heads of 96, causal 1 to 5 %, S 77, 16 of 128 6, S 64, 16 of 96 3, T 80,
    8 of 128, causal 10. Fewer than 10 rounds -2 to -5, blocks of 128 in two stages -2 %.
    """
    few = facts.keys <= block_kv(facts) <= 96
    return few and facts.is_plain and has_many_rounds(facts) and _chooses_block(facts)


def _chooses_block(facts: Facts) -> bool:
    few = facts.keys <= 512 and facts.widest > 64
    return few and needs_few_registers(facts) and facts.tma_loads


def _block_of_few(facts: Facts, most: int) -> int:
    """Keys of a block of up to so many: of up to 512 keys those with the fewest past the end.

    A block takes as long as 8 keys beside its own, by a model. H200, B 6, T 1390, S 138, 12 heads
    of 224: 80 for 112 keys are 1.24 times as fast.
    """
    if not _chooses_block(facts):
        return most
    keys = facts.keys
    sizes = {min(most, max(32, -(-keys // 16) * 16)), *range(64, most + 1, 16)}
    return min(sizes, key=lambda size: (-(-keys // size) * (size + 8), -size))


def is_block_of_documents(facts: Facts) -> bool:
    """Rows of one block, as of short rows that are folded: those of 64 keys are 13 % faster."""
    return facts.has("query_segments") and facts.keys <= 128


# From so many queries and keys on the norms of all rows, read ahead, take less than they save.
_FADING_QUERIES, _FADING_KEYS = 1024, 2048


def fades(facts: Facts) -> bool:
    """Tells whether a function adds lines of the distance that may hide the keys far away.

    There are keys of the queries' own indices, they are visible, and no line grows without end.
    """
    problem, shapes = facts.problem, facts.shapes
    left, right = problem.window
    lines = problem.lines
    if lines is None or lines.reach > 0 or lines.are_level or not facts.has_only("score_ids"):
        return False
    sees_own = left is None and not problem.bottom_right and shapes.q_len <= shapes.kv_len
    both = lines.bend if right is None else right >= 0
    long = shapes.q_len >= _FADING_QUERIES and shapes.kv_len >= _FADING_KEYS
    return sees_own and both and long and not problem.split
