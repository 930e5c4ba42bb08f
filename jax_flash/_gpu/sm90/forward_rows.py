"""Owns which rows a unit of the forward kernel for Hopper has: how many warpgroups, of which heads.

A warpgroup has 64 rows. Read next: forward_keys.py, which has the blocks of keys that they meet.
"""

from __future__ import annotations

from jax_flash._gpu import emit
from jax_flash._gpu.sm90.facts import Facts
from jax_flash._gpu.traits import is_layout, is_one, known

# Candidates that some terms make spill, as spills_table.py has them.
TWO_TEAMS = "sm90 forward: two teams"
THREE = "sm90 forward: three warpgroups"
THREE_HIDE = "sm90 forward: three warpgroups that drain to hide"
THREE_DRAIN = "sm90 forward: three warpgroups that drain"
THREE_WIDE = "sm90 forward: three warpgroups, heads above 64"
_LONG = 1536  # queries, and keys, from where wide heads have three warpgroups
_PACKED = (2, 4, 8, 16, 32, 64)  # query heads of a group whose rows a unit may have


def units_of(facts: Facts, rows: int) -> int | None:
    """Counts units of so many rows of a head; None where a size is known when the program runs."""
    if not facts.are_known("batch", "q_heads", "q_len"):
        return None
    return facts.shapes.batch * facts.shapes.q_heads * -(-facts.queries // rows)


def has_many_rounds(facts: Facts) -> bool:
    return (units_of(facts, 192) or 0) >= 10 * facts.sms


# Few units: one round of smaller or larger ones.


def is_round(facts: Facts, rows: int, rounds: float = 1) -> bool:
    """Tells whether units of so many rows, of packed heads too, are one round at most.

    Pages, positions, block masks and parts of float32 were not timed in few units. Functions take
    up to 12 bytes of one warpgroup at head dim 128, a mask beside dropout 6.
    """
    if not facts.are_known("batch", "q_heads", "q_len"):
        return False
    others = facts.has("block_numbers", "query_positions") or facts.is_mapped
    others = others or (facts.problem.masked and facts.has("dropout_state"))
    others = others or facts.problem.split or facts.halves or facts.shapes.page_size is not None
    packed = packed_heads(facts)
    units = -(-facts.queries * packed // rows) * (facts.shapes.q_heads // packed)
    return facts.tma_loads and not others and facts.shapes.batch * units <= rounds * facts.sms


def one_if_few(facts: Facts) -> bool:
    """One warpgroup: what two take in turns, more multiprocessors take at once.

    H200, of the time before: d64 0.64 to 0.92, d128 0.77 to 0.97, d192 0.79 to 0.85, d256 0.76 to
    0.86, with terms too. In two rounds of 64 rows, or two at once, d128 1.1 to 1.4.
    """
    return is_round(facts, 64)


def one_if_uneven(facts: Facts) -> bool:
    """The same of causal units, which even out: T 1024 0.88 to 0.95, two rounds 0.98 to 1.1."""
    causal = facts.is_plain_16 and facts.has_right and facts.queries == facts.keys >= 1024
    return causal and is_round(facts, 64, 1.5) and not one_if_few(facts)


def two_if_few(facts: Facts) -> bool:
    """Two warpgroups in turns, up to head dim 64: 0.80 to 0.97 of two teams' time, or of three.

    Segments beside a softcap and more terms take 16 bytes.
    """
    fits = facts.widest <= 64 and not (facts.is_capped and facts.has("query_segments"))
    others = one_if_few(facts) or one_if_uneven(facts)
    return fits and is_round(facts, 128) and not others


def pair_if_few(facts: Facts) -> bool:
    """Two teams of one warpgroup, where a last unit of 128 rows has no more than 64.

    H200, one round for two: T 192 and 320 of 128 0.71 to 0.75, T 64 of 96 and 128 0.85.
    """
    full = facts.is_plain_16 and not facts.is_uneven and 64 < facts.widest <= 128
    more = full and packed_heads(facts) == 1 and (units_of(facts, 128) or 0) > facts.sms
    return more and is_round(facts, 64, 2) and not three_if_few(facts)


def three_if_few(facts: Facts) -> bool:
    """Three warpgroups where fewer rounds take less time, in at most two.

    H200: one for two d128 0.76 to 0.80, d96 0.75, causal 1.18, d64 0.87 to 0.94, causal 0.91; two
    for three d128 0.94, d64 0.92.
    """
    units, larger = units_of(facts, 128), units_of(facts, 192)
    timed = facts.is_plain_16 and 384 <= facts.shortest <= facts.longest <= 2048
    if units is None or larger is None or not timed or packed_heads(facts) > 1:
        return False
    if facts.widest <= 64:
        rounds = -(-larger // facts.sms)
        most = 1 if facts.is_uneven else 2
        return rounds <= most and -(-units // facts.sms) > rounds
    even = facts.widest <= 128 and facts.longest < _LONG and not facts.is_uneven
    fills = even and larger <= 2 * facts.sms and fills_larger_units(facts)
    return fills and not facts.spills(THREE_WIDE)


# Rows of several heads.


def packed_heads(facts: Facts) -> int:
    """Counts the query heads whose queries a unit has together, which share its keys."""
    # Each head has a mask and a bias of its own; what dropout keeps, a thread draws for two queries
    # that are 8 apart; of float32 in halves 64 queries of a head share a factor.
    own_rows = facts.problem.masked or facts.is_mapped or facts.halves
    own_rows = own_rows or facts.has("bias", "dropout_state")
    if own_rows or facts.group not in _PACKED:
        return 1
    return facts.group if _has_few_queries(facts) or packs_rows(facts) else 1


def _has_few_queries(facts: Facts) -> bool:
    return facts.queries < 128


def packs_few(facts: Facts) -> bool:
    return packed_heads(facts) > 1 and _has_few_queries(facts)


def packs_rows(facts: Facts) -> bool:
    """Units of all heads of a group are no more than those of one, and closer to the diagonal.

    A head's last one has few rows, and takes nearly as long as a whole one. H200, 16k tokens, 32/8
    heads: d64 1 to 14 %, T 200 causal 19, d80 to d112 4 to 17, d192 and d256 causal 1 to 7, full
    where they are fewer 1 to 3, at T 4096 -1, d128 causal 2 to 18, full where they are fewer 3 to
    8, at T 1536 -2 to 0. Fewer than 10 rounds: -4 to 1 %, T 337 15.
    """
    queries, keys, group = facts.queries, facts.keys, facts.group
    if not facts.is_plain_16:
        return False
    if has_many_rounds(facts):
        of_192 = three_if_middle(facts) or three_if_long(facts)
        rows = 192 if of_192 else 128
        fewer = -(-group * queries // rows) <= 0.98 * group * -(-queries // rows)
        middle = 512 <= keys < (_LONG if facts.widest > 64 else keys + 1) and not of_192
        return facts.is_uneven or fewer or middle

    def walked(rows: int) -> int:
        ends = (min(keys, first + rows) for first in range(0, queries, rows))
        return sum(-(-(end if facts.is_uneven else keys) // 128) for end in ends)

    timed = facts.widest > 64 and queries == keys <= 1024
    return timed and walked(128 // group) <= 0.9 * group * walked(128)


# Three warpgroups of wide heads: 192 rows.


def three_if_long(facts: Facts) -> bool:
    """Long calls, in blocks of fewer keys.

    2 to 20 %. A mask is no faster, a softcap 1 % slower, segments 3 to 15 %, but where units begin
    with documents 5 % faster, when causal 6 % slower; those were timed at head dim 128, other terms
    not at all.
    """
    cuts = facts.is_square_128 and cuts_documents(facts) and not facts.is_uneven
    timed = cuts or facts.has_only("sinks", "query_lengths", "key_value_lengths")
    timed = timed and not (facts.is_capped or facts.is_mapped or facts.problem.split)
    wide = 64 < facts.widest <= 128 and facts.tma_loads and not facts.halves
    if not (timed and wide and facts.shortest >= _LONG):
        return False
    return fills_larger_units(facts) and not facts.spills(THREE_WIDE)


def fills_larger_units(facts: Facts) -> bool:
    """Units of 192 rows, 1.4 times as long as those of 128, take no more time in rounds."""
    units, larger = units_of(facts, 128), units_of(facts, 192)
    if units is None or larger is None:
        return True
    if facts.is_uneven:  # those of two rounds even out
        return larger >= 2 * facts.sms
    return 1.4 * -(-larger // facts.sms) <= -(-units // facts.sms)


def three_if_middle(facts: Facts) -> bool:
    """Full attention over fewer keys at head dim 128, with units from a counter.

    T 1024 2 % on an H200, none on an H100; T 1280, 896, 768 5, 5, 4 % (H100). Groups of 4 or 8
    heads: T 1024 2 to 5 %, T 1280 8, T 768 8 (H200). Where a row's last unit is short, T 640 is 2 %
    slower. Fewer rounds were not timed.
    """
    few, most = facts.shortest, facts.longest
    filled = 12 * facts.queries >= 11 * 192 * -(-facts.queries // 192)
    middle = 1024 <= few <= most < _LONG or (704 <= few <= most < 1024 and filled)
    alone = facts.is_plain_16 and facts.is_square_128 and not facts.is_uneven
    return middle and has_many_rounds(facts) and alone and not facts.spills(THREE_WIDE)


def three_if_grouped(facts: Facts) -> bool:
    """Rows of all heads of a group, of calls that have two warpgroups without.

    H200, 32/8 heads: d128 causal T 512 to 1024 8 to 18 %, full T 512 7, T 640 5; d96 T 512 to 1024
    5 to 17. Fewer rounds were not timed.
    """
    timed = 512 <= facts.shortest <= facts.longest < _LONG and facts.group in _PACKED
    timed = timed and 64 < facts.widest <= 128 and facts.shapes.head_dim == facts.shapes.value_dim
    timed = timed and facts.is_plain_16 and has_many_rounds(facts)
    return timed and not facts.spills(THREE_WIDE)


# Three warpgroups of heads up to 64.


def three_if_narrow(facts: Facts) -> bool:
    """Three warpgroups are faster than two, but for heads that share a block: of few rows.

    Rows of whole blocks of 128 are none of their neighbours': three would walk the blocks of two,
    with sinks 1.9 times as long where every other block is seen. Not timed are positions, dropout,
    pieces of 16 keys of a block mask, and a bias that TMA does not load or beside anything but
    causality. What a function of scores takes of their registers no table knows: up to 328 bytes
    spilled beside terms, 64 alone with remainders.
    """
    score, block = facts.problem.score, facts.shapes.block_mask
    timed = not facts.has("query_positions", "dropout_state")
    timed = timed and (block is None or block.block % 32 == 0)
    apart = block is not None and facts.problem.whole_blocks and block.block % 128 == 0
    timed = timed and (facts.has_bias_alone or not facts.has("bias"))
    alone = facts.has_only("sinks", "score_ids") and not (facts.is_capped or facts.has_left)
    fits = score is None or (alone and not emit.has_remainders(score))
    return facts.widest <= 64 and not packs_few(facts) and timed and fits and not apart


def tests_few(facts: Facts) -> bool:
    """Most blocks need no test of an element, which is known when their products start."""
    return three_if_narrow(facts) and not (facts.problem.masked or facts.is_mapped)


def has_heavy_function(facts: Facts) -> bool:
    score = facts.problem.score
    return score is not None and not emit.is_light(score)


# Teams: a CTA has several units at once.


def has_short_units(facts: Facts) -> bool:
    """Units meet few blocks: two teams hide each other's ends.

    3 to 13 % at T 512, 2 to 3 % at T 2048. Units of a group in many rounds (H200, d64): causal T
    1024 1 to 3 % over three warpgroups, T 2048 0 to -2, full T 512 and 1024 -2 to -4.
    """
    most = 2048
    many = packed_heads(facts) > 1 and has_many_rounds(facts)
    if many and facts.widest <= 64 and facts.shortest >= 512:
        most = _LONG - 1 if facts.is_uneven else 0
    short = facts.is_plain and facts.longest <= most and not packs_few(facts)
    short = short and not (is_round(facts, 128) or three_if_few(facts))
    # Copies of float32 were not timed.
    return short and not facts.problem.split and not facts.spills(TWO_TEAMS)


def is_roomy_layout(facts: Facts) -> bool:
    return is_layout(facts.problem) and not facts.spills(TWO_TEAMS)


def fits_one_warpgroup(facts: Facts) -> bool:
    """All queries of a head are 64 rows, of many heads: a second would have nothing to do.

    Three teams of one warpgroup hide each other's loads, and their keys are one block: H100, 1024
    rows of 64, 8 heads of 32, a bias and a mask 156 to 72 us.
    """
    return _is_masked_by_plane(facts) and facts.longest <= 64


def leaves_teams_room(facts: Facts) -> bool:
    """Beside 32 columns two teams have registers for a bias and a mask of keys alone.

    H100: T 256 24 %, T 512 34 %, T 1024 33 %. Masks of queries spill up to 150 bytes.
    """
    mask = facts.shapes.mask
    of_keys = mask is not None and is_one(mask.queries) and not is_one(mask.keys)
    both = facts.has("bias") and of_keys and facts.widest <= 32
    return both and _is_masked_by_plane(facts) and facts.longest <= 1024


def _is_masked_by_plane(facts: Facts) -> bool:
    """A mask, or a bias of 16 bits that TMA loads, or both, and nothing else."""
    alone = facts.has("bias", "mask") and facts.has_only("bias", "mask")
    alone = alone and (facts.loads_bias_of_16 or not facts.has("bias"))
    alone = alone and facts.problem.window == (None, None) and facts.tma_loads
    alone = alone and not (facts.is_capped or facts.is_mapped or facts.problem.split)
    return alone and facts.widest <= 64 and packed_heads(facts) == 1


def holds_queries(facts: Facts) -> bool:
    """Two warpgroups have registers for a unit's queries, where nothing else takes them.

    T 1024: causal 1 to 3 %, full 1 %. T 512: -1 to 2 %, full -1 % (H100). Where a scale is below 0,
    12 bytes were spilled: float16, causal at the bottom right (NVRTC 13.0).
    """
    alone = facts.is_plain and packed_heads(facts) == 1 and facts.tma_loads and not facts.halves
    return facts.is_square_128 and alone and facts.keys > 512 and facts.problem.scale > 0


# Where units begin.

# From so many queries, and rows of them, on finding documents of random lengths takes less than it
# saves: 2 to 28 % at T 2048 and 4096, where those of one length lose 1 to 7. Twice for wide heads
# that are causal.
_CUT_QUERIES, _CUT_ROWS = 2048, 1 << 18
# By a model: shorter documents are faster together, up to 3.4 times of 33.
CUT_DOCUMENTS = 256


def cuts_documents(facts: Facts) -> bool:
    """Tells whether units begin where documents do.

    By segments and causality alone: other terms were not timed. An offset of queries among keys
    takes 8 bytes more than the producer has at head dim 64.
    """
    problem, shapes = facts.problem, facts.shapes
    alone = {*problem.terms} == {"query_segments", "key_value_segments"}
    others = facts.has_left or facts.is_capped or facts.is_mapped
    others = others or problem.split or problem.bottom_right
    narrow = facts.widest <= 128 and problem.dtype != "float32"
    rows = facts.queries * known(shapes.batch, 1) * known(shapes.q_heads, 1)
    causal_wide = facts.has_right and facts.widest > 64
    long = facts.queries >= _CUT_QUERIES * (1 + causal_wide) and rows >= _CUT_ROWS
    return alone and narrow and long and not others
