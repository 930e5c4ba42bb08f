"""Owns which tiling the backward kernels for Hopper run a problem by.

Numbers without a reason are the fastest that were measured: cuda/decisions.md tells how. Read next:
backward_units.py, what units are; backward_order.py, in which order; backward_ring.py;
backward_tiling.py, what a tiling is.
"""

from __future__ import annotations

import dataclasses

from jax_flash._gpu.sm90.backward_order import falling_heads, l2_heads, rising_heads
from jax_flash._gpu.sm90.backward_ring import with_ring
from jax_flash._gpu.sm90.backward_tiling import BackwardTiling
from jax_flash._gpu.sm90.backward_units import UnitFacts
from jax_flash._gpu.sm90.hopper import early_tiles, multiprocessors
from jax_flash._gpu.spec import GpuSpec
from jax_flash._gpu.traits import (
    bytes_of_bias,
    group_size,
    is_bare,
    is_highest,
    is_layout,
    is_own,
    is_plain_call,
    is_plane,
    is_wide,
    known,
)
from jax_flash._gpu.workspaces import (
    blocks,
    boxes,
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
            l2_heads=l2_heads(problem, shapes),
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
    many = asked.units(1) >= rounds * multiprocessors(gpu)
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
        l2_heads=rising_heads(asked) or l2_heads(problem, shapes, unit_heads),
        falling_heads=falling_heads(asked),
        unit_heads=unit_heads,
        shares=asked.shares,
        stores_dbias=asked.is_own or by_rows or by_heads > 0,
        clears_dbias=(asked.is_own or by_rows) and asked.hides,
        dbias_rows=by_rows,
        dbias_heads=by_heads,
        sum_ctas=2 * multiprocessors(gpu),
        prepare_parts=4 if asked.prepares_in_parts else 1,
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
class _Backward(UnitFacts):
    """What the tiling of a backward problem asks beside its units, each with its reason."""

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
        return self.has_all_keys(of_unit) and not in_turns

    @property
    def is_tile(self) -> bool:
        """A row of a head is one warpgroup's tile, of many: the other would have nothing to do.

        Two CTAs of one score warpgroup hide each other's loads.
        """
        terms = {*self.problem.terms}
        timed = set() < terms <= {"bias", "mask"} and self.problem.window == (None, None)
        timed = timed and self.problem.softcap is None and self.problem.score is None
        timed = timed and not (self.wide or self.few or self.problem.split) and self.tma_loads
        lengths = self.queries, self.keys
        plane = self.shapes.bias is None or self.may_load_bias
        return timed and plane and max(lengths) <= 64 and self.widest <= 64 and self.stores_dq

    @property
    def is_roomy(self) -> bool:
        """Beside its terms 128 queries leave registers for all else."""
        problem, terms = self.problem, {*self.problem.terms}
        if self.is_capped or self.is_sloped or self.shapes.bias is not None:
            return False
        if self.drops and (len(terms) > 1 or self.has_left):
            return False
        if problem.masked and "query_segments" in terms:
            return False
        return not (terms & {"query_positions", "block_numbers"} and len(terms) > 2)

    @property
    def block_q(self) -> int:
        return 128 if self.widest <= 64 and self.is_roomy and not self.wide else 64

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
    def is_own(self) -> bool:
        return self.stores and is_own(self.problem, self.shapes, cleared=self.hides)

    @property
    def hides(self) -> bool:
        """Blocks may be left out, of which dS is zero."""
        others = {*self.problem.terms} - {"bias", "sinks"}
        return self.problem.window != (None, None) or bool(others)

    @property
    def prepares_in_parts(self) -> bool:
        """CTAs of 64 rows would wait for memory several times each, and be few beside that.

        H200: 0.5 to 1 us of 20 at head dim 64, 3 of 30 at 192. The kernels behind start early too,
        which is another 0.3 to 1.2 us. More rounds were not timed, nor copies of float32.
        """
        if self.problem.split or not self.are_known("batch", "q_heads", "q_len"):
            return False
        tiles = self.shapes.batch * self.shapes.q_heads * blocks(self.queries, 64)
        return tiles <= _PARTS_ROUNDS * self.sms

    @property
    def may_load_bias(self) -> bool:
        """By TMA, beside the queries."""
        # Beside positions and lengths wide heads would spill 16 bytes.
        crowded = self.widest > 64 and "query_positions" in self.problem.terms
        return self.tma_loads and not self.wide and not crowded and is_plane(self.shapes)


_EARLY_DIM, _EARLY_SHORTEST = 32, 1024  # heads of 36 and T 1024 are the least that were timed
_PARTS_ROUNDS = 8  # blocks of 64 rows for a multiprocessor, at most, that are prepared in parts
_LAST_STORES_LONGEST = 4096  # keys, full attention
# Plain calls that take turns unasked: full or causal, by head dim, up to how many queries, and
# from how many rounds of units of 128 keys: what was measured.
_TURNS = {
    False: {64: (512, 15), 128: (512, 7), 256: (1024, 7)},
    True: {64: (1024, 15), 128: (1024, 7), 256: (2048, 7)},
}
_TURNS_SHORTEST = 512
