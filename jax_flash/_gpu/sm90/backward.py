"""Owns which tiling the backward kernels for Hopper run a problem by.

Numbers without a reason are the fastest that were measured: cuda/decisions.md tells how. Read next:
backward_tiling.py, backward_ring.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from jax_flash._gpu import emit
from jax_flash._gpu.sm90.backward_ring import with_ring
from jax_flash._gpu.sm90.backward_tiling import BackwardTiling
from jax_flash._gpu.sm90.hopper import L2_SHARE, early_tiles, multiprocessors, tma_loads_of
from jax_flash._gpu.spec import GpuSpec
from jax_flash._gpu.traits import (
    bytes_of_bias,
    group_size,
    is_bare,
    is_highest,
    is_layout,
    is_own,
    is_plain_call,
    is_plain_window,
    is_plane,
    is_wide,
    known,
)
from jax_flash._gpu.workspaces import (
    adds_rows,
    blocks,
    boxes,
    dbias_heads,
    dq_row_bytes,
    is_spare,
    spare,
)
from jax_flash._problem import Problem, Shapes


def choose_backward(problem: Problem, shapes: Shapes, gpu: GpuSpec) -> BackwardTiling:
    """Chooses the backward kernels' tiling for a problem that the family does not refuse."""
    if (early := early_backward(problem, shapes, gpu)) is not None:
        return dataclasses.replace(_tiling(early), early=True)
    asked = _Backward(problem, shapes, gpu)
    if is_highest(problem):
        tiling = BackwardTiling(
            shapes.head_dim,
            shapes.value_dim,
            block_q=64,
            wide=True,
            score_stages=1 if asked.widest > 64 else 2,
            l2_heads=_l2_heads(problem, shapes),
            halves=True,
        )
        return spare(problem, shapes, tiling)
    tiling = _tiling(asked)
    if tiling.compact and tiling.unit_heads:  # whose sums take the room
        tiling = _tiling(dataclasses.replace(asked, splits=False))
    if tiling.compact:
        asked = dataclasses.replace(asked, few=True)
        adding = _tiling(dataclasses.replace(asked, adds=True, splits=False))
        return adding if is_spare(problem, shapes, adding) else _tiling(asked)
    return tiling


def early_backward(problem: Problem, shapes: Shapes, gpu: GpuSpec) -> _Backward | None:
    """Returns what a call asks of its tiling whose boxes begin before a head, or None.

    The narrow kernel takes them, but where units share what they add to dk and dv.
    """
    of_tiles = early_tiles(problem, shapes)
    shortest = min(known(shapes.q_len, 0), known(shapes.kv_len, 0))
    narrowest = min(shapes.head_dim, shapes.value_dim)
    if of_tiles is None or narrowest < _EARLY_DIM or shortest < _EARLY_SHORTEST:
        return None
    asked = _Backward(problem, of_tiles, gpu, early=True)
    return None if asked.wide or asked.shares else asked


def takes_turns(problem: Problem, shapes: Shapes, gpu: GpuSpec) -> bool:
    """Tells whether units of a plain call that asks for no order add to dq in turns all the same.

    The first one stores then, and mostly the last one makes dq of the sum: in short walks turns
    take less than sums that are zeroed, added to and read.
    """
    asked = _Backward(problem, shapes, gpu)
    sizes = (shapes.batch, shapes.q_heads, shapes.q_len, shapes.kv_len)
    if not all(isinstance(size, int) for size in sizes) or shapes.q_len != shapes.kv_len:
        return False
    if not (is_plain_call(problem) and asked.tma_loads):
        return False
    if problem.split or is_highest(problem):
        return False
    if group_size(shapes) > 1 or shapes.head_dim != shapes.value_dim:
        return False
    longest, rounds = _TURNS[problem.window[1] is not None].get(shapes.head_dim, (0, 0))
    many = asked._units(1) >= rounds * multiprocessors(gpu)
    return _TURNS_SHORTEST <= shapes.q_len <= longest and many


def _tiling(asked: _Backward) -> BackwardTiling:
    """Chooses the tiling of another problem than float32 at highest precision."""
    if asked.stores_dq:
        asked = asked.unordered
    problem, shapes, gpu, block_q = asked.problem, asked.shapes, asked.gpu, asked.block_q
    by_rows, by_heads = asked.adds_rows, asked.dbias_heads
    unit_heads = asked.unit_heads
    tiling = BackwardTiling(
        shapes.head_dim,
        shapes.value_dim,
        block_q=block_q,
        wide=asked.wide,
        tma_loads=asked.tma_loads,
        outputs=2 if is_layout(problem) and not asked.wide and asked.tma_loads else 1,
        dq_row_bytes=dq_row_bytes(problem, shapes, block_q) if asked.sums_in_dq else 0,
        stores_dq=asked.stores_dq,
        last_stores=asked.last_stores,
        reads_ahead=asked.reads_ahead,
        # 7 %; at head dim 64 +-2 %, and with copies of float32 8 bytes spilled.
        holds_draws=asked.drops and asked.reads_ahead and (unit_heads or group_size(shapes)) == 1,
        l2_heads=asked.rising_heads or _l2_heads(problem, shapes, unit_heads),
        falling_heads=asked.falling_heads,
        unit_heads=unit_heads,
        shares=asked.shares,
        stores_dbias=asked.is_own or by_rows or by_heads > 0,
        clears_dbias=(asked.is_own or by_rows) and asked.hides,
        dbias_rows=by_rows,
        dbias_heads=by_heads,
        sum_ctas=2 * multiprocessors(gpu),
    )
    if asked.is_tile and (tiling.stores_dbias or not shapes.bias):
        tiling = dataclasses.replace(tiling, block_q=64, resident=2)
    tiled = dataclasses.replace(tiling, bias_bytes=bytes_of_bias(shapes.bias))
    if asked.may_load_bias and tiled.shared_bytes <= gpu.shared_bytes:
        return spare(problem, shapes, tiled)
    if asked.pairs:
        tiling = dataclasses.replace(tiling, pairs=True)
    ring = tiling if asked.few or asked.early else with_ring(problem, shapes, gpu, tiling)
    return spare(problem, shapes, ring)


@dataclasses.dataclass(frozen=True)
class _Backward:
    """A backward problem, and what its tiling asks of it, each with its reason."""

    problem: Problem
    shapes: Shapes
    gpu: GpuSpec
    few: bool = False  # rows or columns: scratch is scarce
    adds: bool = False  # few all the same, several units to a block of keys
    splits: bool = True  # few short units into ones of fewer heads
    early: bool = False  # boxes begin before a head: sums of dq lie apart, all at once
    in_order: bool = False  # of a deterministic problem, whose dk and dv have one unit each

    @property
    def widest(self) -> int:
        return max(self.shapes.head_dim, self.shapes.value_dim)

    @property
    def tma_loads(self) -> bool:
        return tma_loads_of(self.shapes)

    @property
    def wide(self) -> bool:
        # Loads without TMA leave the narrow kernel registers for 240 columns of dk and dv, not for
        # 256.
        narrowest = min(self.shapes.head_dim, self.shapes.value_dim)
        # In the narrow one sums of few rows spill up to 164 bytes.
        few = self.few and self.widest > 64 and not self._has_all_keys(128)
        return few or self.widest > 128 or (not self.tma_loads and narrowest > 112)

    @property
    def stores_dq(self) -> bool:
        """Keys are one block, or two of a pair, so that a unit's part of dq is all of it.

        Units of a part of a group add to dk and dv; in deterministic mode they do it in turns.
        """
        # Of 256 columns beside terms 24 bytes, loaded by warps 112.
        if self.wide and not (self.tma_loads and is_bare(self.problem)):
            return False
        in_turns = self.problem.deterministic and self.unordered.unit_heads > 0
        of_unit = 64 if self.wide and not self.unordered.pairs else 128
        return self._has_all_keys(of_unit) and not in_turns

    @property
    def is_tile(self) -> bool:
        """A row of a head is one warpgroup's tile, of many: the other would have nothing to do.

        Two CTAs of one score warpgroup hide each other's loads.
        """
        terms = {*self.problem.terms}
        timed = set() < terms <= {"bias", "mask"} and self.problem.window == (None, None)
        timed = timed and self.problem.softcap is None and self.problem.score is None
        timed = timed and not (self.wide or self.few or self.problem.split) and self.tma_loads
        lengths = known(self.shapes.q_len, 4096), known(self.shapes.kv_len, 4096)
        plane = self.shapes.bias is None or self.may_load_bias
        return timed and plane and max(lengths) <= 64 and self.widest <= 64 and self.stores_dq

    @property
    def unordered(self) -> _Backward:
        """The same without an order of additions."""
        problem = dataclasses.replace(self.problem, deterministic=False)
        in_order = self.problem.deterministic or self.in_order
        return dataclasses.replace(self, problem=problem, in_order=in_order)

    def _has_all_keys(self, block_kv: int) -> bool:
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
        if not (self.wide and self.tma_loads) or self.few or self.problem.split:
            return False
        if boxes(self.shapes.head_dim) < 3:
            return False
        count = blocks(known(self.shapes.kv_len, 1024), 64)
        if count % 2 and count < 9:  # the last pair has one block for two CTAs
            return False
        return is_plain_call(self.problem)

    @property
    def drops(self) -> bool:
        return "dropout_state" in self.problem.terms

    @property
    def has_left(self) -> bool:
        return self.problem.window[0] is not None

    # Registers.

    @property
    def is_roomy(self) -> bool:
        """Beside its terms 128 queries leave registers for all else."""
        problem, terms = self.problem, {*self.problem.terms}
        sloped = problem.score is not None and emit.has_slope(problem.score)
        if problem.softcap is not None or sloped or self.shapes.bias is not None:
            return False
        if self.drops and (len(terms) > 1 or self.has_left):
            return False
        if problem.masked and "query_segments" in terms:
            return False
        return not (terms & {"query_positions", "block_numbers"} and len(terms) > 2)

    @property
    def block_q(self) -> int:
        return 128 if self.widest <= 64 and self.is_roomy else 64

    @property
    def reads_ahead(self) -> bool:
        """5 % at T >= 4096 without a mask, 1 to 4 % when causal.

        2 to 7 % of the deterministic mode when causal, 1 to 4 % of plain full calls from T 1024 on;
        elsewhere nothing or a loss, with segments up to 5 % of long documents.
        """
        problem = self.problem
        if self.has_left or problem.softcap or problem.score is not None:
            return False
        terms = {*problem.terms}
        segments = terms == {"query_segments", "key_value_segments"}
        if not (segments or terms <= {"dropout_state"}):
            return False
        plain = is_bare(problem) and known(self.shapes.q_len, 4096) >= 1024
        full = problem.window[1] is None
        if problem.deterministic and (segments or (full and not plain)):
            return False
        # 84 to 172 bytes would be spilled.
        spills = self.drops and problem.deterministic and problem.split
        fits = not spills and not self.few
        return self.shapes.head_dim == self.shapes.value_dim == 128 and fits

    @property
    def sums_in_dq(self) -> bool:
        """Half of the sum of dq lies in dq itself.

        With segments it lies apart: 2 to 6 % for as much memory as dq takes.
        """
        apart = is_wide(self.problem) or "query_segments" in self.problem.terms
        return not (apart or self.stores_dq or self.early)

    @property
    def last_stores(self) -> bool:
        """The unit that adds last makes dq of its sum: no kernel reads the sum behind it.

        With gradients 4 to 14 % at T 512, 2 to 8 % at 1024; long full calls lose 1 to 3 %.
        """
        problem, shapes = self.problem, self.shapes
        if not problem.deterministic or not is_plain_call(problem):
            return False
        if self.wide or self.few or problem.split or self.stores_dq or not self.sums_in_dq:
            return False
        if problem.window[1] is not None:
            if shapes.q_len != shapes.kv_len:
                return False
        elif known(shapes.kv_len, _LAST_STORES_LONGEST + 1) > _LAST_STORES_LONGEST:
            return False
        # A warpgroup adds whole tiles.
        tiles = self.block_q // 64 * boxes(shapes.head_dim)
        return tiles == 2 and dq_row_bytes(problem, shapes, self.block_q) > 0

    @property
    def unit_heads(self) -> int:
        """Query heads of a unit, where a kv head has more; 0: all of them.

        Units of few heads are many, and what they read and add to of these heads stays in L2:
        64/8 heads of 128 at T 8192 take 0.65 of the time of units of all heads on an H100. Causal
        units of two heads take 2 to 7 % less than those of one, where they leave ten rounds of
        units; full ones take 1 % more, with a window of 1024 a fifth.
        """
        problem, group = self.problem, group_size(self.shapes)
        if self.shares:
            return 1
        if group == 1 or not self.may_add or not self.tma_loads:
            return 0
        sizes = (self.shapes.batch, self.shapes.q_heads)
        if not all(isinstance(size, int) for size in sizes) or self.adds_rows or self.dbias_heads:
            return 0
        alone = problem.deterministic or self.in_order
        block_kv = 64 if self.wide else 128
        if self.wide:
            # 76, 36 and 32 bytes would be spilled.
            spills = problem.score is not None or problem.softcap is not None
            narrow = boxes(self.shapes.head_dim) == 3 and boxes(self.shapes.value_dim) < 3
            alone |= spills or (self.pairs and narrow)
        if group * self._steps < _UNIT_STEPS:
            idle = self._units(group, block_kv) < multiprocessors(self.gpu)
            # Short wide ones took 0.76 to 1.3 times as long in two runs.
            splits = self.splits and idle and not (alone or self.wide)
            return self._heads_of_rounds(block_kv, max(self._steps, 1)) if splits else 0
        if self.wide:
            # Units of a window are short: 2 rows of 1904, 24/1 heads of 174, a window of 823,
            # gradients 664 us by units of one head, 817 by those of twelve (H200).
            ends = 0 if problem.window[0] is not None else _WIDE_ENDS
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
        many = self._units(2) >= 10 * multiprocessors(self.gpu)
        pairs = problem.window == (None, 0) and group % 2 == 0 and many and not holds_draws
        return self._grown(
            2 if pairs else 1,
            lambda heads: (
                heads * self._steps < _UNIT_STEPS
                and self._units(2 * heads) >= 2 * multiprocessors(self.gpu)
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
        problem, shapes = self.problem, self.shapes
        sizes = (shapes.batch, shapes.q_heads)
        if self.widest > 64 or self._has_all_keys(128) or not is_bare(problem):
            return False
        if problem.deterministic or self.in_order or not all(isinstance(x, int) for x in sizes):
            return False
        return 2 * self._units(group_size(shapes)) <= multiprocessors(self.gpu)

    @property
    def shares(self) -> bool:
        """Units of one head leave half of the multiprocessors without one, and walk far.

        Those of few keys beside many queries. CTAs then share a unit's queries, and add to sums of
        dk and dv. Units of a window differ in length.
        """
        problem, shapes = self.problem, self.shapes
        shared = {"query_lengths", "key_value_lengths", "dropout_state", "bias"}
        if problem.window != (None, None) or not shared.issuperset(problem.terms):
            return False
        if problem.deterministic or problem.score is not None:
            return False
        if not self.may_add:
            return False
        if self.pairs or not self.tma_loads or self.adds_rows or self.dbias_heads:
            return False
        if self.in_order or (self.wide and problem.softcap is not None):  # the second would spill
            return False
        if not all(isinstance(size, int) for size in (shapes.batch, shapes.q_heads)):
            return False
        block_kv = 64 if self.wide else 128
        units = shapes.batch * shapes.q_heads * blocks(known(shapes.kv_len, 4096), block_kv)
        may_begin_early = self.early or not tma_loads_of(shapes)  # which was timed without
        least = _SHARED_STEPS_OF_ODD if may_begin_early else _SHARED_STEPS
        return 2 * units <= multiprocessors(self.gpu) and self._steps >= least

    def _heads_of_rounds(self, block_kv: int, ends: int) -> int:
        """Heads of a unit with which units take the fewest steps; 0, all, where that spares little.

        `ends`: steps in whose time a unit of fewer heads adds to dk and dv. Causal units even out,
        but for a quarter of the longest: 2 rows of 4096, 2/1 heads of 200 1.5 times as fast with
        units of one head, 24/1 heads of 184 at T 6382 0.8 times with eight, as with two of one
        (H200).
        """
        group, sms = group_size(self.shapes), multiprocessors(self.gpu)
        row = blocks(known(self.shapes.kv_len, 4096), block_kv)
        steps = blocks(known(self.shapes.q_len, 4096), 64)
        uneven = self.problem.window == (None, 0) and row > 1

        def taken(heads: int) -> float:
            units, end = self._units(heads, block_kv), ends if heads < group else 1
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
        group = group_size(self.shapes)
        while heads < group and group % (2 * heads) == 0 and grows(heads):
            heads *= 2
        return 0 if heads == group else heads

    def _units(self, heads: int, block_kv: int = 128) -> int:
        shapes = self.shapes
        return shapes.batch * shapes.q_heads // heads * blocks(known(shapes.kv_len, 4096), block_kv)

    def _fill_rounds(self, heads: int) -> bool:
        """Units of so many heads leave a tenth of the multiprocessors' time at most.

        Unequal ones even out, if there are two rounds.
        """
        sms, units = multiprocessors(self.gpu), self._units(heads)
        uneven = self.problem.window[1] is not None and units >= 2 * sms
        return uneven or units >= 0.9 * sms * -(-units // sms)

    @property
    def rises(self) -> bool:
        """Walks of causal units in turns begin at their diagonals: none waits for its turn.

        Those of a head are apart then, and its queries and sums have to stay in L2.
        """
        problem, shapes = self.problem, self.shapes
        if not problem.deterministic or problem.window != (None, 0) or not is_bare(problem):
            return False
        sizes = (shapes.batch, shapes.kv_heads, shapes.q_len)
        if not all(isinstance(size, int) for size in sizes) or self.unit_heads:
            return False
        if problem.split or self.few:
            return False
        return shapes.q_len == shapes.kv_len <= _RISING_LONGEST

    @property
    def rising_heads(self) -> int:
        """Heads that are walked together where walks rise: no CTA waits, so they are few."""
        if not self.rises:
            return 0
        heads = _l2_heads(self.unordered.problem, self.shapes)
        if self.widest > 128 and self.shapes.q_len > 4096:
            return 1
        return max(1, heads // 2) if self.widest > 64 else heads

    @property
    def falling_heads(self) -> int:
        """The last heads fall, longest units first: CTAs end together."""
        if not self.rises:
            return 0
        heads = self.shapes.batch * self.shapes.kv_heads
        return max(1, heads // 16, min(8, heads // 8))

    @property
    def _steps(self) -> int:
        """Steps that a unit takes of a head, about."""
        left, right = self.problem.window
        queries = known(self.shapes.q_len, 4096)
        if left is not None and right is not None:
            queries = min(queries, left + right + 128)
        elif left is not None or right is not None:
            queries //= 2
        return queries // 64

    # The gradient of a bias, and the bias.

    @property
    def stores(self) -> bool:
        """The main kernel has dS as it is to be stored."""
        return not (self.wide or self.drops or self.problem.split)

    @property
    def is_own(self) -> bool:
        return self.stores and is_own(self.problem, self.shapes, cleared=self.hides)

    @property
    def adds_rows(self) -> bool:
        sms = multiprocessors(self.gpu)
        return self.stores and adds_rows(self.problem, self.shapes, 128, sms)

    @property
    def dbias_heads(self) -> int:
        if not self.stores or self.adds_rows:
            return 0
        return dbias_heads(self.problem, self.shapes, 128, multiprocessors(self.gpu))

    @property
    def hides(self) -> bool:
        """Blocks may be left out, of which dS is zero."""
        others = {*self.problem.terms} - {"bias", "sinks"}
        return self.problem.window != (None, None) or bool(others)

    @property
    def may_load_bias(self) -> bool:
        """By TMA, beside the queries."""
        # Beside positions and lengths wide heads would spill 16 bytes.
        crowded = self.widest > 64 and "query_positions" in self.problem.terms
        return self.tma_loads and not self.wide and not crowded and is_plane(self.shapes)


_EARLY_DIM, _EARLY_SHORTEST = 32, 1024  # heads of 36 and T 1024 are the least that were timed
_RISING_LONGEST = 16384
_LAST_STORES_LONGEST = 4096  # keys, full attention
# Plain calls that take turns unasked: full or causal, by head dim, up to how many queries, and
# from how many rounds of units of 128 keys: what was measured.
_TURNS = {
    False: {64: (512, 15), 128: (512, 7), 256: (1024, 7)},
    True: {64: (1024, 15), 128: (1024, 7), 256: (2048, 7)},
}
_TURNS_SHORTEST = 512
_FEWER_STEPS = 0.85  # of the steps of units of all heads, at most
# Steps of a unit that CTAs share: T 1024 and more were timed, where 8 divides the dims.
_SHARED_STEPS, _SHARED_STEPS_OF_ODD = 16, 32
_WIDE_ENDS = 6  # steps; ends of other short units are as long as one head: both assumed
_UNIT_STEPS = 16  # of 64 queries: shorter units spend a tenth on their sums of dk and dv


def _l2_heads(problem: Problem, shapes: Shapes, unit_heads: int = 0) -> int:
    """Counts the heads that the backward kernel walks together: units of a block of keys.

    Few heads keep queries, output gradients and float32 sums of dq in L2. Many even out units of
    unequal length (causal) and spread those that wait for each other (deterministic). The factors
    are the fastest of 0.125 to 8 on an H200, 16k tokens, model dim 2048 (cuda/decisions.md).
    """
    queries = known(shapes.q_len, 4096)
    uneven = problem.window[1] is not None or "block_numbers" in problem.terms
    widest = max(shapes.head_dim, shapes.value_dim)
    group = unit_heads or group_size(shapes)
    # Bytes of one query head: the units of a group walk its heads side by side.
    bytes_ = 4 if is_highest(problem) else 2
    head_bytes = queries * ((bytes_ + 4) * shapes.head_dim + bytes_ * shapes.value_dim)
    fitting = max(1, L2_SHARE // head_bytes)
    grouped = is_plain_window(problem) and group_size(shapes) > 1
    if problem.deterministic and grouped and widest <= 128 and bytes_ == 2:
        # Units that trail each other by a step share what they read: longer heads need no more L2.
        heads = 8 if unit_heads or widest <= 64 else 4
    elif problem.deterministic and unit_heads:
        heads = fitting if uneven else fitting // 2
    elif problem.deterministic:
        steps = queries // (64 if widest > 64 else 128)  # of the longest unit
        level = min(max(steps.bit_length() - 4, 0), 5)  # under 16, 32, 64, 128, 256 steps; more
        if uneven:
            factor = ((1, 2, 2, 3, 4, 8) if widest > 128 else (1, 2, 2, 4, 8, 8))[level]
            heads = fitting * factor // min(group, 2)
        else:
            factor = ((1, 1, 1, 1, 2, 2) if widest > 128 else (1, 1, 2, 2, 4, 4))[level]
            heads = fitting * factor // 2
    elif unit_heads > 1:
        heads = max(2, fitting // 2)
    elif uneven:  # units of a group are as many times longer, and fewer: more of them to even out
        # The units of a layout are mostly of one length.
        heads = max(fitting * min(group, 2) // 2, 0 if is_layout(problem) else 4 // group)
    else:
        heads = fitting // 4
    heads = max(1, heads)
    parts = shapes.q_heads // unit_heads if unit_heads else shapes.kv_heads
    return min(heads, known(shapes.batch, heads) * known(parts, heads))
