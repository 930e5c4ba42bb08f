"""Owns the order in which the forward kernel for Hopper takes units, and whether from a counter.

Read next: forward.py, which chooses a tiling by all of this.
"""

from __future__ import annotations

from jax_flash._gpu.sm90.facts import Facts
from jax_flash._gpu.sm90.forward_rows import (
    cuts_documents,
    has_short_units,
    packed_heads,
    three_if_few,
    three_if_grouped,
    three_if_long,
    three_if_middle,
    units_of,
)
from jax_flash._gpu.sm90.hopper import L2_SHARE
from jax_flash._gpu.traits import is_one, known


def dynamic(facts: Facts) -> bool:
    """Tells whether units come from a counter, else in turn."""
    if not facts.tma_loads or is_one_round(facts):
        return False
    if three_if_long(facts):
        return facts.is_uneven or not facts.is_plain  # without 3 to 11 %
    short = has_short_units(facts)
    if facts.widest <= 64 and not (facts.halves or short):
        return True
    # Units of one length need no counter: without its memset 4% faster at T 512; in long calls the
    # counter evens out multiprocessors of different speed, 3 to 6%, of two teams 2% at T 2048.
    even = facts.is_plain and not facts.has_right
    return not even or facts.queries > (1024 if short else 2048)


def is_one_round(facts: Facts) -> bool:
    """Each team has one unit at most, of 128 rows or more: there is no other to ask for."""
    if facts.widest <= 64 and three_if_few(facts):
        return True
    units, teams = units_of(facts, 128), 2 if facts.widest <= 64 and has_short_units(facts) else 1
    return units is not None and units <= teams * facts.sms


def l2_heads(facts: Facts) -> int:
    """Counts the heads that a schedule walks together."""
    packed = packed_heads(facts)
    # Groups by 24 or 128: T 1024 1 to 9 % slower.
    if (three_if_middle(facts) or three_if_grouped(facts)) and not facts.is_uneven:
        few = 22 if facts.keys >= 1024 else 44
        return few if facts.group == 1 else 64 // packed
    # Heads together even out units of unequal length; more of short sequences: 3 to 8 % slower.
    if not facts.is_uneven:
        return 1
    most = max(1, min(_heads_in_l2(facts), 64 if facts.widest <= 64 else 16) // packed)
    group = facts.group // packed
    if most < group or not facts.are_known("batch", "kv_heads"):
        return most
    # Sets of one size: the last of 10, 10, 10 and 2 heads has too few units to even out, 13 %.
    heads = max(facts.shapes.batch * facts.shapes.kv_heads, 1)  # none where vmap maps no rows
    sets = -(-heads // (most // group))
    return -(-heads // sets) * group


def _heads_in_l2(facts: Facts) -> int:
    """Counts the query heads whose keys and values in use fit in L2 together."""
    keys, shapes = facts.keys, facts.shapes
    if cuts_documents(facts):  # of a document: heads side by side end together, 2 to 5 %
        keys = min(keys, 4096)
    element = 4 if facts.halves else 2
    fitting = max(1, L2_SHARE // (element * keys * (shapes.head_dim + shapes.value_dim)))
    kv_heads = min(fitting, known(shapes.batch, fitting) * known(shapes.kv_heads, fitting))
    return kv_heads * facts.group


def batches_together(facts: Facts) -> bool:
    """Batch rows have one bias, whose blocks come from L2 if they follow each other."""
    shared = facts.shapes.bias is not None and is_one(facts.shapes.bias.batch)
    return shared and facts.widest <= 64 and facts.has_bias_alone
