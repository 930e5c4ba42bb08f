"""Owns which units of the forward kernels for Hopper are in parts along their keys.

All parts run at once. Read next: forward_launch.py, which counts them.
"""

from __future__ import annotations

from jax_flash._gpu.sm90.facts import Facts
from jax_flash._gpu.sm90.forward_keys import block_kv
from jax_flash._gpu.sm90.forward_rows import is_round, packed_heads
from jax_flash._gpu.sm90.hopper import multiprocessors
from jax_flash._gpu.spec import GpuSpec
from jax_flash._problem import Shapes

PART_BLOCKS = 4  # of a part, at least
_GAIN, _LEAST = 1.3, 15.0  # predicted: of a unit's time, and us of a unit, at least
_BYTES = 3e6  # of keys and values that come from memory in a us


def splits_units(facts: Facts) -> bool:
    """Tells whether few units of many keys are in parts: by a model of microseconds.

    H200, head dims 64 and 128: a unit of 64 rows takes 5.2 and 6.7, and 0.84 and 1.05 of each 128
    keys; what joins parts 3.5, 0.25 of each part of a unit and 0.035 of each unit: within 8 % of 11
    calls, but T 200, S 2000, 16 heads of 128 took 27 for 21. Wider ones spill 8 to 36 bytes.

    Causality at either corner alone. Segments, masks, biases, positions, dropout and functions of
    scores read what belongs to a key's number, which in a part counts from its first; a window sees
    few parts, and a sink is of no part. Lengths were not timed.
    """
    shapes, right = facts.shapes, facts.problem.window[1]
    timed = facts.is_plain_16 and facts.are_known("kv_len") and facts.widest <= 128
    if not (timed and is_round(facts, 64, 0.5)):
        return False
    last = facts.keys if facts.problem.bottom_right else facts.queries
    if right is not None and last + right < facts.keys:  # keys that no query sees
        return False
    packed, size = packed_heads(facts), block_kv(facts)
    units = shapes.batch * shapes.q_heads // packed * -(-facts.queries * packed // 64)
    blocks = -(-facts.keys // size)
    parts = min(facts.sms // max(units, 1), blocks // PART_BLOCKS)
    if parts < 2:
        return False
    ends, key = 3.8 + 0.023 * facts.widest, (0.64 + 0.0032 * facts.widest) / 128
    whole = ends + key * facts.keys
    row = 2 * (shapes.head_dim + shapes.value_dim)
    read = shapes.batch * shapes.kv_heads * facts.keys * row / _BYTES
    joins = 3.5 + 0.25 * parts + 0.035 * units
    in_parts = ends + max(key * size * -(-blocks // parts), read) + joins
    return whole >= max(_LEAST, _GAIN * in_parts)


def splits_last_wave(shapes: Shapes, gpu: GpuSpec, rows: int) -> bool:
    """Tells whether units of the last wave are in parts along their keys.

    By a count of blocks of keys: a unit's ends take as long as three, what joins parts as four.
    Kernels that may have parts, and have none, took 0 to 3 % more time (H200, 2026-11-28).
    """
    batch, heads, queries, keys = shapes.batch, shapes.q_heads, shapes.q_len, shapes.kv_len
    if not all(isinstance(size, int) for size in (batch, heads, queries, keys)):
        return False
    sms, blocks = multiprocessors(gpu), -(-keys // 128)
    waves, rest = divmod(batch * heads * -(-queries // rows), sms)
    parts = min(sms // max(rest, 1), blocks // PART_BLOCKS)
    whole = (waves + 1) * (blocks + 3)
    in_parts = waves * (blocks + 3) + blocks / max(parts, 1) + 3 + 4
    return rest > 0 and parts > 1 and in_parts < 0.97 * whole
