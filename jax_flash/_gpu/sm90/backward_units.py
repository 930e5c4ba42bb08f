"""Owns what units the backward kernels for Hopper have: which kernel, how many heads, who adds.

Numbers without a reason are the fastest that were measured: cuda/decisions.md tells how. Read next:
backward.py, which chooses by it; backward_order.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Self

from jax_flash._gpu.sm90.facts import Facts
from jax_flash._gpu.sm90.hopper import tma_loads_of
from jax_flash._gpu.traits import is_bare, is_highest, is_plain_call, is_plain_window, known
from jax_flash._gpu.workspaces import adds_rows, blocks, boxes, dbias_heads


@dataclasses.dataclass(frozen=True)
class UnitFacts(Facts):
    """A backward problem, and what its units are, each with its reason."""

    few: bool = False  # rows or columns: scratch is scarce
    adds: bool = False  # few all the same, several units to a block of keys
    splits: bool = True  # few short units into ones of fewer heads
    early: bool = False  # boxes begin before a head: sums of dq lie apart, all at once
    in_order: bool = False  # of a deterministic problem, whose dk and dv have one unit each

    @property
    def wide(self) -> bool:
        # Loads without TMA leave the narrow kernel registers for 240 columns of dk and dv, not for
        # 256.
        narrowest = min(self.shapes.head_dim, self.shapes.value_dim)
        # In the narrow one sums of few rows spill up to 164 bytes.
        few = self.few and self.widest > 64 and not self.has_all_keys(128)
        few |= self.widest > 128 or (not self.tma_loads and narrowest > 112)
        return few or self.is_one_round

    @property
    def is_one_round(self) -> bool:
        """Blocks of 64 keys are no more than multiprocessors, and walks are short.

        In the wide kernel three warpgroups share a step: 0.82 to 0.90 of the time of two with 128
        keys (H200, T 128 to 512; T 1024 1.0 to 1.18).
        """
        problem, shapes = self.problem, self.shapes
        if self.few or self.early or self.in_order or not self.tma_loads:
            return False
        if not is_plain_call(problem) or problem.deterministic or problem.split:
            return False
        if not self.are_known("batch", "q_heads", "q_len") or shapes.q_len != shapes.kv_len:
            return False
        if self.group > 1 and self.group * self.steps < _UNIT_STEPS:
            return False
        units = shapes.batch * shapes.q_heads * blocks(shapes.kv_len, 64)
        return 64 < shapes.q_len <= _ONE_ROUND_LONGEST and units <= self.sms

    def has_all_keys(self, block_kv: int) -> bool:
        """Tells whether a block has all keys, and registers are left to store dq."""
        bias, dtype = self.shapes.bias, self.problem.dtype
        # At head dim 128 beside a layout 8 bytes, beside a float16 bias of bfloat16 16.
        spills = self.shapes.block_mask is not None
        spills |= bias is not None and bias.dtype not in (dtype, "float32")
        one = known(self.shapes.kv_len, block_kv + 1) <= block_kv
        return one and not (spills or is_highest(self.problem))

    @property
    def pairs(self) -> bool:
        """L2 limits wide heads by its additions to dq: two CTAs that share columns halve them."""
        return self._may_pair and not self.shares

    @property
    def _may_pair(self) -> bool:
        if not (self.wide and self.tma_loads) or self.few or self.problem.split:
            return False
        if boxes(self.shapes.head_dim) < 3:
            return False
        count = blocks(known(self.shapes.kv_len, 1024), 64)
        if count % 2 and count < 9:  # the last pair has one block for two CTAs
            return False
        return is_plain_call(self.problem)

    @property
    def unordered(self) -> Self:
        """The same without an order of additions."""
        problem = dataclasses.replace(self.problem, deterministic=False)
        in_order = self.problem.deterministic or self.in_order
        return dataclasses.replace(self, problem=problem, in_order=in_order)

    @property
    def reads_ahead(self) -> bool:
        """5 % at T >= 4096 without a mask, 1 to 4 % when causal.

        2 to 7 % of the deterministic mode when causal, 1 to 4 % of plain full calls from T 1024 on;
        elsewhere nothing or a loss, with segments up to 5 % of long documents.
        """
        problem = self.problem
        if self.has_left or self.is_capped or self.is_mapped:
            return False
        terms = {*problem.terms}
        segments = terms == {"query_segments", "key_value_segments"}
        if not (segments or terms <= {"dropout_state"}):
            return False
        plain = is_bare(problem) and self.queries >= 1024
        full = problem.window[1] is None
        if problem.deterministic and (segments or (full and not plain)):
            return False
        # 84 to 172 bytes would be spilled.
        spills = self.drops and problem.deterministic and problem.split
        fits = not spills and not self.few
        return self.is_square_128 and fits and not self.wide

    @property
    def unit_heads(self) -> int:
        """Query heads of a unit, where a kv head has more; 0: all of them.

        Units of few heads are many, and what they read and add to of these heads stays in L2:
        64/8 heads of 128 at T 8192 take 0.65 of the time of units of all heads on an H100. Causal
        units of two heads take 2 to 7 % less than those of one, where they leave ten rounds of
        units; full ones take 1 % more, with a window of 1024 a fifth.
        """
        problem, group = self.problem, self.group
        if self.shares:
            return 1
        if group == 1 or not self.may_add or not self.tma_loads:
            return 0
        known_heads = self.are_known("batch", "q_heads")
        if not known_heads or self.adds_rows or self.dbias_heads:
            return 0
        alone = problem.deterministic or self.in_order
        block_kv = 64 if self.wide else 128
        if self.wide:
            # 76, 36 and 32 bytes would be spilled.
            spills = self.is_mapped or self.is_capped
            narrow = boxes(self.shapes.head_dim) == 3 and boxes(self.shapes.value_dim) < 3
            alone |= spills or (self.pairs and narrow)
        if group * self.steps < _UNIT_STEPS:
            idle = self.units(group, block_kv) < self.sms
            # Short wide ones took 0.76 to 1.3 times as long in two runs.
            splits = self.splits and idle and not (alone or self.wide)
            return self._heads_of_rounds(block_kv, max(self.steps, 1)) if splits else 0
        if self.wide:
            # Units of a window are short: 2 rows of 1904, 24/1 heads of 174, a window of 823,
            # gradients 664 us by units of one head, 817 by those of twelve (H200).
            ends = 0 if self.has_left else _WIDE_ENDS
            return 0 if alone else self._heads_of_rounds(block_kv, ends)
        holds_draws = self.drops and self.reads_ahead  # of one head
        if problem.deterministic and is_plain_window(problem) and not holds_draws:
            # Their turns take what L2 gives, and a unit of more heads trails the one before by less
            # of its walk.
            causal = problem.window[1] is not None
            most = 4 if self.widest <= 64 else 2 if causal else group
            divisors = (heads for heads in range(most, 1, -1) if group % heads == 0)
            heads = next((heads for heads in divisors if self._fill_rounds(heads)), 1)
            return 0 if heads == group else heads
        many = self.units(2) >= 10 * self.sms
        pairs = problem.window == (None, 0) and group % 2 == 0 and many and not holds_draws
        return self._grown(
            2 if pairs else 1,
            lambda heads: (
                heads * self.steps < _UNIT_STEPS and self.units(2 * heads) >= 2 * self.sms
            ),
        )

    @property
    def may_add(self) -> bool:
        """Several units may add to dk and dv: of copies of float32 beside what spills nothing.

        Where scratch is scarce, wide ones of copies alone, which have the sum of dq in dq.
        """
        problem = self.problem
        if not problem.split:
            return not self.few or (self.adds and self.adds_narrow)
        simple = {"query_lengths", "key_value_lengths", "dropout_state"}.issuperset(problem.terms)
        simple &= problem.softcap is None and problem.score is None and not problem.deterministic
        return simple and not self.in_order and (self.wide or not self.few)

    @property
    def adds_narrow(self) -> bool:
        """Beside a compact sum of dq: narrow heads, whose units would leave half the SMs idle.

        T 4096, 16/2 heads of 32, with the forward pass: full 1.44, causal 2.2 times as fast (H200).
        Turns, and other terms than a window, were not timed.
        """
        problem = self.problem
        if self.widest > 64 or self.has_all_keys(128) or not is_bare(problem):
            return False
        if problem.deterministic or self.in_order or not self.are_known("batch", "q_heads"):
            return False
        return 2 * self.units(self.group) <= self.sms

    @property
    def shares(self) -> bool:
        """Units of one head leave half of the multiprocessors without one, and walk far.

        Those of few keys beside many queries, or of few heads. CTAs then share a unit's queries,
        and add to sums of dk and dv. Pairs of CTAs do not: T 1376, one head of 192 takes 0.62 of
        their time, T 1024, 4 heads of 256 0.93 (H200).
        """
        problem, shapes = self.problem, self.shapes
        shared = {"query_lengths", "key_value_lengths", "dropout_state", "bias"}
        causal = problem.window == (None, 0)
        if problem.window != (None, None) and not (causal and self._may_share_causal):
            return False
        if not shared.issuperset(problem.terms):
            return False
        if problem.deterministic or self.is_mapped:
            return False
        if not self.may_add:
            return False
        if not self.tma_loads or self.adds_rows or self.dbias_heads:
            return False
        if self._may_pair and shapes.q_len != shapes.kv_len:  # not timed
            return False
        if self.in_order or (self.wide and self.is_capped):  # the second would spill
            return False
        if not self.are_known("batch", "q_heads"):
            return False
        block_kv = 64 if self.wide else 128
        units = shapes.batch * shapes.q_heads * blocks(self.keys, block_kv)
        may_begin_early = self.early or not tma_loads_of(shapes)  # which was timed without
        least = _SHARED_STEPS_OF_ODD if may_begin_early else _SHARED_STEPS
        return 2 * units <= self.sms and (causal or self.steps >= least)

    @property
    def _may_share_causal(self) -> bool:
        """Long causal walks, or of several wide heads, whose units differ in length.

        H200: one head of 128 at T 4096 0.39 of the time of whole units, T 2048, 4 heads 0.74, 3 of
        64 0.66, T 1024, 8 heads 0.88; of pairs of CTAs, T 1376, one of 192 0.58, T 2048, 2 of 256
        0.77, T 512, 3 rows, 2/1 heads of 184 0.67.
        """
        shapes = self.shapes
        if not (is_bare(self.problem) and self.tma_loads) or self.early or self.problem.split:
            return False
        if not self.are_known("q_len", "kv_len") or shapes.q_len != shapes.kv_len:
            return False
        grouped = self.widest > 128 and self.group > 1
        return shapes.q_len >= (_ONE_ROUND_LONGEST if grouped else _SHARED_CAUSAL)

    def _heads_of_rounds(self, block_kv: int, ends: int) -> int:
        """Heads of a unit with which units take the fewest steps; 0, all, where that spares little.

        `ends`: steps in whose time a unit of fewer heads adds to dk and dv. Causal units even out,
        but for a quarter of the longest: 2 rows of 4096, 2/1 heads of 200 1.5 times as fast with
        units of one head, 24/1 heads of 184 at T 6382 0.8 times with eight, as with two of one
        (H200).
        """
        group, sms = self.group, self.sms
        row = blocks(self.keys, block_kv)
        steps = blocks(self.queries, 64)
        uneven = self.problem.window == (None, 0) and row > 1

        def taken(heads: int) -> float:
            units, end = self.units(heads, block_kv), ends if heads < group else 1
            longest = heads * steps + end
            if units <= sms or not uneven:
                return longest * -(-units // sms)
            mean = heads * steps * (row + 1) / (2 * row) + end
            return max(longest, units * mean / sms + longest / 4)

        # The first of equal ones, of most heads.
        best = min((x for x in range(group, 0, -1) if group % x == 0), key=taken)
        return 0 if best == group or taken(best) > _FEWER_STEPS * taken(group) else best

    def _grown(self, heads: int, grows: Callable[[int], bool]) -> int:
        """Doubles heads while a condition holds and they divide the group; 0: all of it."""
        group = self.group
        while heads < group and group % (2 * heads) == 0 and grows(heads):
            heads *= 2
        return 0 if heads == group else heads

    def units(self, heads: int, block_kv: int = 128) -> int:
        shapes = self.shapes
        return shapes.batch * shapes.q_heads // heads * blocks(self.keys, block_kv)

    def _fill_rounds(self, heads: int) -> bool:
        """Units of so many heads leave a tenth of the multiprocessors' time at most.

        Unequal ones even out, if there are two rounds.
        """
        sms, units = self.sms, self.units(heads)
        uneven = self.problem.window[1] is not None and units >= 2 * sms
        return uneven or units >= 0.9 * sms * -(-units // sms)

    @property
    def steps(self) -> int:
        """Steps that a unit takes of a head, about."""
        left, right = self.problem.window
        queries = self.queries
        if left is not None and right is not None:
            queries = min(queries, left + right + 128)
        elif left is not None or right is not None:
            queries //= 2
        return queries // 64

    @property
    def stores(self) -> bool:
        """The main kernel has dS as it is to be stored."""
        return not (self.wide or self.drops or self.problem.split)

    @property
    def adds_rows(self) -> bool:
        sms = self.sms
        return self.stores and adds_rows(self.problem, self.shapes, 128, sms)

    @property
    def dbias_heads(self) -> int:
        if not self.stores or self.adds_rows:
            return 0
        return dbias_heads(self.problem, self.shapes, 128, self.sms)


_ONE_ROUND_LONGEST = 512  # queries, and keys
# Steps of a unit that CTAs share: T 1024 and more were timed, where 8 divides the dims.
_SHARED_STEPS, _SHARED_STEPS_OF_ODD = 16, 32
_SHARED_CAUSAL = 1024  # queries, and keys
_FEWER_STEPS = 0.85  # of the steps of units of all heads, at most
_WIDE_ENDS = 6  # steps; ends of other short units are as long as one head: both assumed
_UNIT_STEPS = 16  # of 64 queries: shorter units spend a tenth on their sums of dk and dv
