"""Owns which tiling the forward kernel for Hopper takes.

The table is measured, and cuda/decisions.md tells how. Read next: forward_tiling.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jax_flash._gpu import emit
from jax_flash._gpu.sm90.forward_tiling import ForwardTiling
from jax_flash._gpu.sm90.hopper import L2_SHARE, early_tiles, multiprocessors, tma_loads_of
from jax_flash._gpu.spec import GpuSpec
from jax_flash._gpu.spills import spills
from jax_flash._gpu.traits import (
    bytes_of_bias,
    group_size,
    is_bare,
    is_highest,
    is_layout,
    is_one,
    is_plane,
    is_ragged,
    known,
)
from jax_flash._gpu.workspaces import boxes
from jax_flash._problem import Problem, Shapes

# Candidates that some terms make spill, as spills_table.py has them.
TWO_TEAMS = "sm90 forward: two teams"
THREE = "sm90 forward: three warpgroups"
THREE_HIDE = "sm90 forward: three warpgroups that drain to hide"
THREE_DRAIN = "sm90 forward: three warpgroups that drain"
THREE_WIDE = "sm90 forward: three warpgroups, heads above 64"
_LONG = 1536  # queries, and keys, from where they are faster
_PACKED = (2, 4, 8, 16, 32, 64)  # query heads of a group whose rows a unit may have


def choose_forward(problem: Problem, shapes: Shapes, gpu: GpuSpec) -> ForwardTiling:
    """Chooses the forward kernel's tiling for a problem that the family does not refuse."""
    if (of_tiles := early_tiles(problem, shapes)) is not None:
        tiling = choose_forward(problem, of_tiles, gpu)
        return dataclasses.replace(tiling, early=True, holds_queries=False)
    tiling = _choose_forward(problem, shapes, gpu)
    if tiling.tma_loads and _fades(problem, shapes):
        # Heads differ in length: 4 to 10 % over 1, 12 or 32 together, where units of one do not.
        l2_heads = 4 if problem.window[1] is None else tiling.l2_heads
        return dataclasses.replace(tiling, fades=True, l2_heads=l2_heads)
    if tiling.tma_loads and _cuts_units(problem, shapes):
        # Units of three warpgroups of wide heads were timed so.
        aligned = tiling.consumers == 3 and max(shapes.head_dim, shapes.value_dim) > 64
        return dataclasses.replace(tiling, cut_documents=_CUT_DOCUMENTS, cuts_aligned=aligned)
    bytes_ = bytes_of_bias(shapes.bias)
    if not tiling.tma_loads or not is_plane(shapes) or tiling.block_kv * bytes_ % 128 != 0:
        return tiling
    # As many stages as there is room for.
    for stages in range(tiling.stages, 1, -1):
        tiled = dataclasses.replace(tiling, stages=stages, bias_bytes=bytes_)
        if tiled.shared_bytes <= gpu.shared_bytes:
            return tiled
    return tiling


def packs_heads(problem: Problem, shapes: Shapes, gpu: GpuSpec) -> bool:
    """Tells whether a unit has the queries of several heads, which share its keys."""
    return _Forward(problem, shapes, gpu).packed_heads > 1


def l2_heads_of(problem: Problem, shapes: Shapes, gpu: GpuSpec) -> int:
    """Counts the heads that a schedule walks together."""
    return _Forward(problem, shapes, gpu).l2_heads


@dataclasses.dataclass(frozen=True)
class _Forward:
    """A forward problem, and what the table of tilings (below) asks of it, each with its reason."""

    problem: Problem
    shapes: Shapes
    gpu: GpuSpec

    @property
    def widest(self) -> int:
        return max(self.shapes.head_dim, self.shapes.value_dim)

    @property
    def dims(self) -> int:
        """Both dims: columns of a block of keys and values."""
        return self.shapes.head_dim + self.shapes.value_dim

    @property
    def halves(self) -> bool:
        return is_highest(self.problem)

    @property
    def is_float16(self) -> bool:
        return self.problem.dtype == "float16"

    @property
    def tma_loads(self) -> bool:
        return self.halves or tma_loads_of(self.shapes)  # planes of halves are padded

    @property
    def bytes_of_bias(self) -> int:
        return bytes_of_bias(self.shapes.bias)

    def spills(self, candidate: str) -> bool:
        return spills(candidate, self.problem, self.shapes)

    def has(self, *terms: str) -> bool:
        return any(term in self.problem.terms for term in terms)

    @property
    def is_mapped(self) -> bool:
        return self.problem.score is not None

    @property
    def is_capped(self) -> bool:
        return self.problem.softcap is not None

    @property
    def has_left(self) -> bool:
        return self.problem.window[0] is not None

    @property
    def is_plain(self) -> bool:
        """Nothing between scores and weights but causality."""
        return is_bare(self.problem) and not self.has_left

    @property
    def is_uneven(self) -> bool:
        """Units differ in length."""
        return self.problem.window[1] is not None or self.has("block_numbers")

    # The schedule.

    @property
    def dynamic(self) -> bool:
        if not self.tma_loads or self.is_one_round:
            return False
        if self.is_three_wide:
            return self.is_uneven or not self.is_plain  # without 3 to 11 %
        if self.widest <= 64 and not (self.halves or self.is_short):
            return True
        # Units of one length need no counter: without its memset 4% faster at T 512; in long calls
        # the counter evens out multiprocessors of different speed, 3 to 6%, of two
        # teams 2% at T 2048.
        even = self.is_plain and self.problem.window[1] is None
        return not even or known(self.shapes.q_len, 4096) > (1024 if self.is_short else 2048)

    @property
    def is_one_round(self) -> bool:
        """Each team has one unit at most, of 128 rows or more: there is no other to ask for."""
        units, teams = self.units_of(128), 2 if self.widest <= 64 and self.is_short else 1
        return units is not None and units <= teams * multiprocessors(self.gpu)

    def units_of(self, rows: int) -> int | None:
        """Counts units of so many rows; None where a size is known when the program runs."""
        sizes = (self.shapes.batch, self.shapes.q_heads, self.shapes.q_len)
        if not all(isinstance(size, int) for size in sizes):
            return None
        batch, heads, queries = sizes
        return batch * heads * -(-queries // rows)

    @property
    def is_short(self) -> bool:
        """Units of few blocks: two teams hide each other's ends.

        3 to 13 % at T 512, 2 to 3 % at T 2048. Units of a group in many rounds (H200, d64): causal
        T 1024 1 to 3 % over three warpgroups, T 2048 0 to -2, full T 512 and 1024 -2 to -4.
        """
        lengths = known(self.shapes.q_len, 4096), known(self.shapes.kv_len, 4096)
        longest = 2048
        many = self.packed_heads > 1 and self.has_many_rounds
        if many and self.widest <= 64 and min(lengths) >= 512:
            longest = _LONG - 1 if self.is_uneven else 0
        short = self.is_plain and max(lengths) <= longest and not self.packs_few
        # Copies of float32 were not timed.
        return short and not self.problem.split and not self.spills(TWO_TEAMS)

    @property
    def is_three_wide(self) -> bool:
        """Head dims above 64: three warpgroups and blocks of fewer keys.

        2 to 20 % in long calls. A mask is no faster, a softcap 1 % slower, segments 3 to 15 %, but
        where units begin with documents 5 % faster, when causal 6 % slower; those were timed at
        head dim 128, other terms not at all.
        """
        timed = {*self.problem.terms} <= {"sinks", "query_lengths", "key_value_lengths"}
        cuts = self.dims == 2 * 128 and _cuts_units(self.problem, self.shapes)
        timed = timed or (cuts and not self.is_uneven)
        timed = timed and not (self.is_capped or self.is_mapped or self.problem.split)
        long = known(self.shapes.q_len, 4096) >= _LONG and known(self.shapes.kv_len, 4096) >= _LONG
        if not (timed and long and 64 < self.widest <= 128 and self.tma_loads and not self.halves):
            return False
        return self.fills_larger_units and not self.spills(THREE_WIDE)

    @property
    def is_three_middle(self) -> bool:
        """Full attention over fewer keys: units of 192 rows from a counter.

        T 1024 2 % on an H200, none on an H100; T 1280, 896, 768 5, 5, 4 % (H100). Groups of 4 or 8
        heads: T 1024 2 to 5 %, T 1280 8, T 768 8 (H200). Where a row's last unit is short, T 640 is
        2 % slower. Fewer rounds were not timed.
        """
        queries, keys = known(self.shapes.q_len, 0), known(self.shapes.kv_len, 0)
        few, most = min(queries, keys), max(queries, keys)
        filled = 12 * queries >= 11 * 192 * -(-queries // 192)
        middle = 1024 <= few <= most < _LONG or (704 <= few <= most < 1024 and filled)
        alone = self.is_plain_16 and self.is_square_128 and not self.is_uneven
        return middle and self.has_many_rounds and alone and not self.spills(THREE_WIDE)

    @property
    def holds_queries(self) -> bool:
        """Two warpgroups have registers for a unit's queries, where nothing else takes them.

        T 1024: causal 1 to 3 %, full 1 %. T 512: -1 to 2 %, full -1 % (H100). Where a scale
        is below 0, 12 bytes were spilled: float16, causal at the bottom right (NVRTC 13.0).
        """
        alone = self.is_plain and self.packed_heads == 1 and self.tma_loads and not self.halves
        long = known(self.shapes.kv_len, 4096) > 512
        return self.is_square_128 and alone and long and self.problem.scale > 0

    @property
    def is_tile(self) -> bool:
        """A row of a head is one warpgroup's tile, of many: a second would have nothing to do.

        Three teams of one warpgroup hide each other's loads, and their keys are one block: H100,
        1024 rows of 64, 8 heads of 32, a bias and a mask 156 to 72 us.
        """
        lengths = known(self.shapes.q_len, 4096), known(self.shapes.kv_len, 4096)
        return self.is_masked_by_plane and max(lengths) <= 64

    @property
    def is_narrow(self) -> bool:
        """Of 32 columns two teams have registers for a bias and a mask of keys alone.

        H100: T 256 24 %, T 512 34 %, T 1024 33 %. Masks of queries spill up to 150 bytes.
        """
        mask = self.shapes.mask
        lengths = known(self.shapes.q_len, 4096), known(self.shapes.kv_len, 4096)
        of_keys = mask is not None and is_one(mask.queries) and not is_one(mask.keys)
        both = self.has("bias") and of_keys and self.widest <= 32
        return both and self.is_masked_by_plane and max(lengths) <= 1024

    @property
    def is_masked_by_plane(self) -> bool:
        """A mask, or a bias of 16 bits that TMA loads, or both, and nothing else."""
        terms = {*self.problem.terms}
        plane = self.bytes_of_bias == 2 and is_plane(self.shapes)
        alone = set() < terms <= {"bias", "mask"} and (plane or "bias" not in terms)
        alone = alone and self.problem.window == (None, None) and self.tma_loads
        alone = alone and not (self.is_capped or self.is_mapped or self.problem.split)
        return alone and self.widest <= 64 and self.packed_heads == 1

    @property
    def fills_larger_units(self) -> bool:
        """Units of 192 rows, 1.4 times as long as those of 128, take no more time in rounds."""
        units, larger = self.units_of(128), self.units_of(192)
        if units is None or larger is None:
            return True
        sms = multiprocessors(self.gpu)
        if self.is_uneven:  # those of two rounds even out
            return larger >= 2 * sms
        return 1.4 * -(-larger // sms) <= -(-units // sms)

    @property
    def packed_heads(self) -> int:
        # Each head has a mask and a bias of its own; what dropout keeps, a thread draws for two
        # queries that are 8 apart; of float32 in halves 64 queries of a head share a factor.
        own_rows = self.problem.masked or self.is_mapped or self.halves
        own_rows = own_rows or self.has("bias", "dropout_state")
        group = group_size(self.shapes)
        if own_rows or group not in _PACKED:
            return 1
        return group if self.has_few_queries or self.packs_rows(group) else 1

    @property
    def has_few_queries(self) -> bool:
        return known(self.shapes.q_len, 4096) < 128

    @property
    def packs_few(self) -> bool:
        return self.packed_heads > 1 and self.has_few_queries

    def packs_rows(self, group: int) -> bool:
        """Units of all heads of a group are no more than those of one, and closer to the diagonal.

        A head's last one has few rows, and takes nearly as long as a whole one. H200, 16k tokens,
        32/8 heads: d64 1 to 14 %, T 200 causal 19, d80 to d112 4 to 17, d192 and d256 causal 1 to
        7, full where they are fewer 1 to 3, at T 4096 -1, d128 causal 2 to 18, full where they are
        fewer 3 to 8, at T 1536 -2 to 0. Fewer than 10 rounds: -4 to 1 %, T 337 15.
        """
        queries, keys = known(self.shapes.q_len, 4096), known(self.shapes.kv_len, 4096)
        if not self.is_plain_16:
            return False
        if self.has_many_rounds:
            of_192 = self.is_three_middle or self.is_three_wide
            rows = 192 if of_192 else 128
            fewer = -(-group * queries // rows) <= 0.98 * group * -(-queries // rows)
            middle = 512 <= keys < (_LONG if self.widest > 64 else keys + 1) and not of_192
            return self.is_uneven or fewer or middle

        def walked(rows: int) -> int:
            ends = (min(keys, first + rows) for first in range(0, queries, rows))
            return sum(-(-(end if self.is_uneven else keys) // 128) for end in ends)

        timed = self.widest > 64 and queries == keys <= 1024
        return timed and walked(128 // group) <= 0.9 * group * walked(128)

    @property
    def is_three_grouped(self) -> bool:
        """Units of 192 rows of all heads of a group, of calls that have two warpgroups without.

        H200, 32/8 heads: d128 causal T 512 to 1024 8 to 18 %, full T 512 7, T 640 5; d96 T 512 to
        1024 5 to 17. Fewer rounds were not timed.
        """
        lengths = known(self.shapes.q_len, 0), known(self.shapes.kv_len, 0)
        timed = 512 <= min(lengths) <= max(lengths) < _LONG and group_size(self.shapes) in _PACKED
        timed = timed and 64 < self.widest == self.shapes.head_dim == self.shapes.value_dim <= 128
        timed = timed and self.is_plain_16 and self.has_many_rounds
        return timed and not self.spills(THREE_WIDE)

    @property
    def is_middle(self) -> bool:
        return self.is_three_middle or (self.is_three_grouped and self.block_kv == 80)

    @property
    def has_many_rounds(self) -> bool:
        return (self.units_of(192) or 0) >= 10 * multiprocessors(self.gpu)

    @property
    def is_square_128(self) -> bool:
        return self.shapes.head_dim == self.shapes.value_dim == 128

    @property
    def is_plain_16(self) -> bool:
        return self.is_plain and self.tma_loads and not (self.problem.split or self.halves)

    @property
    def l2_heads(self) -> int:
        # Groups by 24 or 128: T 1024 1 to 9 % slower.
        if (self.is_three_middle or self.is_three_grouped) and not self.is_uneven:
            few = 22 if known(self.shapes.kv_len, 0) >= 1024 else 44
            return few if group_size(self.shapes) == 1 else 64 // self.packed_heads
        # Heads together even out units of unequal length; more of short sequences: 3 to 8 % slower.
        if not self.is_uneven:
            return 1
        most = 64 if self.widest <= 64 else 16
        most = max(1, min(_l2_heads(self.shapes, self.problem), most) // self.packed_heads)
        batch, kv_heads = self.shapes.batch, self.shapes.kv_heads
        group = group_size(self.shapes) // self.packed_heads
        if most < group or not (isinstance(batch, int) and isinstance(kv_heads, int)):
            return most
        # Sets of one size: the last of 10, 10, 10 and 2 heads has too few units to even out, 13 %.
        heads = max(batch * kv_heads, 1)  # none where vmap maps no rows
        sets = -(-heads // (most // group))
        return -(-heads // sets) * group

    # Registers of the consumers.

    @property
    def ends_beside_keys(self) -> bool:
        """Wide heads, and what a row keeps beside a block's ids, bits or bias."""
        beside = self.bytes_of_bias > 0 or self.problem.masked or self.has("query_segments")
        placed = self.has("query_positions") and beside
        return self.widest > 64 and (
            placed or (self.bytes_of_bias > 0 and self.has("query_segments"))
        )

    @property
    def is_crowded(self) -> bool:
        """A block's bias waits in registers for its scores: up to 32 of a thread."""
        others = self.problem.masked or self.has("dropout_state") or self.is_mapped
        beside = self.bytes_of_bias > 0 and others
        ragged = self.bytes_of_bias == 4 or is_ragged(self.shapes.bias)
        return ragged or beside or self.ends_beside_keys

    @property
    def has_bias_alone(self) -> bool:
        """One of 16 bits that TMA loads: read where it is added it takes no registers."""
        alone = self.problem.terms == ("bias",) and not (self.is_capped or self.is_mapped)
        plane = is_plane(self.shapes) and self.bytes_of_bias == 2
        return alone and plane and not self.has_left

    @property
    def batches_together(self) -> bool:
        """Batch rows have one bias, whose blocks come from L2 if they follow each other."""
        shared = self.shapes.bias is not None and is_one(self.shapes.bias.batch)
        return shared and self.widest <= 64 and self.has_bias_alone

    @property
    def may_be_three(self) -> bool:
        """Three warpgroups are faster than two, but for heads that share a block: of few rows.

        Rows of whole blocks of 128 are none of their neighbours': three would walk the blocks of
        two, with sinks 1.9 times as long where every other block is seen. Not timed are positions,
        dropout, pieces of 16 keys of a block mask, and a bias that TMA does not load or beside
        anything but causality. What a function of scores takes of their registers no table knows:
        up to 328 bytes spilled beside terms, 64 alone with remainders.
        """
        score, block = self.problem.score, self.shapes.block_mask
        timed = not self.has("query_positions", "dropout_state")
        timed = timed and (block is None or block.block % 32 == 0)
        apart = block is not None and self.problem.whole_blocks and block.block % 128 == 0
        timed = timed and (self.has_bias_alone or not self.has("bias"))
        beside = {*self.problem.terms} - {"sinks", "score_ids"}
        alone = not (beside or self.is_capped or self.has_left)
        fits = score is None or (alone and not emit.has_remainders(score))
        return self.widest <= 64 and not self.packs_few and timed and fits and not apart

    @property
    def tests_few(self) -> bool:
        """Most blocks need no test of an element, which is known when their products start."""
        return self.may_be_three and not (self.problem.masked or self.is_mapped)

    @property
    def is_block_of_documents(self) -> bool:
        """Rows of one block, as of short rows that are folded: those of 64 keys are 13 % faster."""
        return self.has("query_segments") and known(self.shapes.kv_len, 4096) <= 128

    @property
    def is_long_function(self) -> bool:
        score = self.problem.score
        return score is not None and not emit.is_light(score)

    # Block masks.

    @property
    def is_layout(self) -> bool:
        return is_layout(self.problem)

    @property
    def is_roomy_layout(self) -> bool:
        return self.is_layout and not self.spills(TWO_TEAMS)

    # Registers of the producer.

    @property
    def is_light(self) -> bool:
        """Takes no registers of the producer, and of wide heads' consumers few."""
        terms = ((), () if self.widest > 64 else ("bias",))
        capped = self.problem.terms in terms and not self.is_mapped and not self.has_left
        return self.is_plain or capped

    @property
    def producer_registers(self) -> int:
        if not self.tma_loads:
            # Four warps that load keep addresses, most of them where they load 2 bytes at once or
            # a block mask's words too.
            by_element = self.shapes.head_dim % 2 == 1 and self.shapes.value_dim % 2 == 1
            most = self.widest > 128 or by_element or self.has("block_numbers")
            return 56 if most else 40
        # Lengths and segments take registers of the producer; wide heads, dropout and positions of
        # the consumers, and so do a softcap and the bias of narrow heads.
        if self.is_light and not 256 < self.dims <= 320:
            return 24
        # At head dim 128 consumers take up to 92 bytes more than 224 registers: a softcap, or a
        # bias beside another term; up to 158 one beside float16 queries. Sinks and dropout take
        # none of the producer's, and with 40 consumers spill 8 to 144 bytes.
        crowd = self.bytes_of_bias > 0 and (len(self.problem.terms) > 1 or self.is_float16)
        crowd = crowd or self.is_capped
        tight = 64 < self.widest <= 128 and crowd and not self.has("query_segments")
        if tight and {*self.problem.terms} <= {"sinks", "dropout_state"}:
            return 24
        # Beside segments a mask takes 44 bytes more than 40 registers of the producer.
        wide = self.widest > 128 and not (self.problem.masked and self.has("query_segments"))
        return 40 if wide or tight or self.has("dropout_state", "query_positions") else 56

    @property
    def block_kv(self) -> int:
        if self.is_three_wide or self.is_three_grouped:
            # With its columns of the result a row has registers for no more.
            columns = self.shapes.value_dim
            return 112 if columns <= 80 else 96 if columns <= 96 else 80
        if self.widest <= 128:
            addresses = not self.tma_loads and self.has("block_numbers")
            return 64 if self.is_crowded or addresses else self._block_of_few(128)
        if not self.tma_loads:
            even = self.shapes.head_dim % 2 == 0 and self.shapes.value_dim % 2 == 0
            if self.is_plain and even:
                return 64
            return 32 if self.bytes_of_bias == 4 else 48
        narrow = self.dims <= 320 or self.widest <= 192
        most = 112 if narrow else 96 if self.dims <= 384 else 80
        most = min(most, self.keys_with_room)
        # With 512 keys the last block of 80 is more than half past the end: 3 to 5 %.
        if self.is_light:
            return self._block_of_few(most)
        if self.bytes_of_bias == 4:
            return 32
        if self.bytes_of_bias == 2:
            return 64 if is_plane(self.shapes) else 48  # by TMA: no registers
        full = self.ends_beside_keys or (self.is_mapped and self.problem.masked)
        return min(most, 48 if full else 64)

    @property
    def keys_with_room(self) -> int:
        """Counts the keys of a block of which two fit in shared memory beside 128 queries."""
        queries, values = boxes(self.shapes.head_dim), boxes(self.shapes.value_dim)
        rows = (self.gpu.shared_bytes - 2048) // 128 - 128 * queries
        return rows // (2 * (queries + values)) // 16 * 16

    @property
    def has_one_block(self) -> bool:
        """A unit has one block of up to 96 keys: nothing to take turns for, and room for two Q.

        H200, in turns: T 92, 3 heads of 96, causal 1 to 5 %, S 77, 16 of 128 6, S 64, 16 of 96 3, T
        80, 8 of 128, causal 10. Fewer than 10 rounds -2 to -5, blocks of 128 in two stages -2 %.
        """
        few = known(self.shapes.kv_len, 4096) <= self.block_kv <= 96
        return few and self.is_plain and self.has_many_rounds and self._chooses_block

    @property
    def _chooses_block(self) -> bool:
        few = known(self.shapes.kv_len, 4096) <= 512 and self.widest > 64
        return few and self.is_light and self.tma_loads

    def _block_of_few(self, most: int) -> int:
        """Keys of a block of up to so many: of up to 512 keys those with the fewest past the end.

        A block takes as long as 8 keys beside its own, by a model. H200, B 6, T 1390, S 138, 12
        heads of 224: 80 for 112 keys are 1.24 times as fast.
        """
        keys = known(self.shapes.kv_len, 4096)
        if not self._chooses_block:
            return most
        sizes = {min(most, max(32, -(-keys // 16) * 16)), *range(64, most + 1, 16)}
        return min(sizes, key=lambda size: (-(-keys // size) * (size + 8), -size))


def _row(when: Callable[[_Forward], bool], spills: str = "", **tiling: Any) -> Any:
    return when, spills, tiling


# The forward's tilings: of the first row that holds and, where it is a candidate by name, does not
# spill. What a row does not name is _Forward's answer of that name (_COMMON), two consumers, or
# ForwardTiling's default.
_COMMON = ("block_kv", "packed_heads", "dynamic", "l2_heads", "producer_registers")
_COMMON += ("tma_loads", "halves", "batches_together")
_OF_THREE = {"block_kv": 128, "consumers": 3, "stages": 4, "query_stages": 2, "ping_pong": False}
_OF_THREE_64 = {**_OF_THREE, "block_kv": 64}
_OF_TEAMS = {"block_kv": 64, "teams": 2, "stages": 5, "query_stages": 2, "ping_pong": False}
_OF_NARROW = {**_OF_TEAMS, "stages": 2}
_OF_TILES = {**_OF_TEAMS, "consumers": 1, "teams": 3, "stages": 2, "batches_together": False}
_OF_MIDDLE = {**_OF_THREE, "block_kv": 80, "stages": 3, "dynamic": True}
_FORWARD = (
    # float32 in halves: a tile has two planes.
    _row(lambda x: x.halves and x.widest <= 64, producer_registers=24, **_OF_THREE_64),
    # A window beside 24: 8 bytes spilled.
    _row(lambda x: x.halves, block_kv=64, producer_registers=40),
    # Four warps load, since TMA cannot.
    _row(lambda x: not x.tma_loads and x.widest <= 128, query_stages=2),
    _row(lambda x: not x.tma_loads),
    # Head dims up to 64.
    _row(lambda x: x.is_tile, **_OF_TILES),
    _row(lambda x: x.is_narrow, **_OF_NARROW),
    # A row of blocks of a layout is none of its neighbours': of three warpgroups' 192 rows most
    # units would walk the blocks of two rows of 128.
    _row(lambda x: x.widest <= 64 and (x.is_short or x.is_roomy_layout), **_OF_TEAMS),
    _row(
        lambda x: x.widest <= 64 and x.is_layout,
        block_kv=128,
        stages=6,
        query_stages=2,
        producer_registers=40,
    ),
    # Three warpgroups, of 160 registers a thread, are 5 to 18 % faster than two, of 240. Where they
    # drain, a softmax has the registers that the weights had before.
    _row(lambda x: x.may_be_three and not x.is_long_function, spills=THREE, **_OF_THREE),
    # 8 bytes are spilled of float16 when causal; two warpgroups take a fifth longer (bfloat16).
    _row(lambda x: x.may_be_three and x.has_bias_alone, drains=True, **_OF_THREE),
    _row(
        lambda x: x.tests_few and x.is_block_of_documents,
        spills=THREE_HIDE,
        drains_to_hide=True,
        **_OF_THREE_64,
    ),
    _row(lambda x: x.tests_few, spills=THREE_HIDE, drains_to_hide=True, **_OF_THREE),
    _row(lambda x: x.may_be_three, spills=THREE_DRAIN, drains=True, **_OF_THREE),
    _row(lambda x: x.widest <= 64, stages=4, query_stages=2),
    _row(
        lambda x: x.is_middle and not x.is_uneven and x.shapes.kv_len < 1024,
        dynamic=True,
        **_OF_THREE_64,
    ),
    _row(lambda x: x.is_middle, **_OF_MIDDLE),
    _row(lambda x: x.is_three_grouped, consumers=3, stages=3, ping_pong=False, dynamic=True),
    _row(lambda x: x.is_three_wide and x.block_kv == 80, consumers=3, stages=4, ping_pong=False),
    _row(lambda x: x.is_three_wide, consumers=3, stages=3, ping_pong=False),
    # 3 to 11 % by the producer's registers.
    _row(lambda x: x.widest <= 128 and x.is_layout, stages=3, producer_registers=40),
    _row(lambda x: x.widest <= 128 and x.has_one_block, stages=3, query_stages=2, ping_pong=False),
    _row(lambda x: x.holds_queries, stages=3, holds_queries=True),
    _row(lambda x: x.widest <= 128, stages=3),
    _row(lambda x: True),
)


def _choose_forward(problem: Problem, shapes: Shapes, gpu: GpuSpec) -> ForwardTiling:
    """The same, but for how a bias is loaded."""
    asked = _Forward(problem, shapes, gpu)
    chosen = next(
        tiling
        for holds, candidate, tiling in _FORWARD
        if holds(asked) and not (candidate and asked.spills(candidate))
    )
    common: dict[str, Any] = {name: getattr(asked, name) for name in _COMMON}
    return ForwardTiling(shapes.head_dim, shapes.value_dim, **{"consumers": 2, **common, **chosen})


# From so many queries and keys on the norms of all rows, read ahead, take less than they save.
_FADING_QUERIES, _FADING_KEYS = 1024, 2048


def _fades(problem: Problem, shapes: Shapes) -> bool:
    """Tells whether a function adds lines of the distance that may hide the keys far away.

    There are keys of the queries' own indices, they are visible, and no line grows without end.
    """
    left, right = problem.window
    lines = problem.lines
    if lines is None or lines.reach > 0 or lines.are_level or not {*problem.terms} <= {"score_ids"}:
        return False
    sees_own = left is None and not problem.bottom_right and shapes.q_len <= shapes.kv_len
    both = lines.bend if right is None else right >= 0
    long = shapes.q_len >= _FADING_QUERIES and shapes.kv_len >= _FADING_KEYS
    return sees_own and both and long and not problem.split


# From so many queries, and rows of them, on finding documents of random lengths takes less than it
# saves: 2 to 28 % at T 2048 and 4096, where those of one length lose 1 to 7. Twice for wide heads
# that are causal.
_CUT_QUERIES, _CUT_ROWS = 2048, 1 << 18
# By a model: shorter documents are faster together, up to 3.4 times of 33.
_CUT_DOCUMENTS = 256


def _cuts_units(problem: Problem, shapes: Shapes) -> bool:
    """Tells whether units begin where documents do.

    By segments and causality alone: other terms were not timed. An offset of queries among keys
    takes 8 bytes more than the producer has at head dim 64.
    """
    alone = {*problem.terms} == {"query_segments", "key_value_segments"}
    others = problem.window[0] is not None or problem.softcap is not None or problem.split
    others = others or problem.bottom_right
    narrow = max(shapes.head_dim, shapes.value_dim) <= 128 and problem.dtype != "float32"
    queries = known(shapes.q_len, 4096)
    rows = queries * known(shapes.batch, 1) * known(shapes.q_heads, 1)
    causal_wide = problem.window[1] is not None and max(shapes.head_dim, shapes.value_dim) > 64
    long = queries >= _CUT_QUERIES * (1 + causal_wide) and rows >= _CUT_ROWS
    return alone and narrow and long and not (others or problem.score is not None)


def _l2_heads(shapes: Shapes, problem: Problem) -> int:
    """Counts the query heads whose keys and values in use fit in L2 together."""
    keys = known(shapes.kv_len, 4096)
    if _cuts_units(problem, shapes):  # of a document: heads side by side end together, 2 to 5 %
        keys = min(keys, 4096)
    element = 4 if is_highest(problem) else 2
    bytes_per_head = element * keys * (shapes.head_dim + shapes.value_dim)
    fitting = max(1, L2_SHARE // bytes_per_head)
    kv_heads = min(fitting, known(shapes.batch, fitting) * known(shapes.kv_heads, fitting))
    return kv_heads * group_size(shapes)
