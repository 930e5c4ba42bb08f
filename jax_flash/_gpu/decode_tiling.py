"""Owns `DecodeTiling`: the sizes by which kernels decode, and what registers allow beside them.

Read next: decode.py, which chooses one; decode_launch.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax_flash._gpu.constants import problem_constants
from jax_flash._gpu.plan import Number
from jax_flash._problem import Problem, Shapes

TEAM_WARPS = 4  # that share a block, kTeamWarps in cuda/kernels/decode_schedule.cuh


@dataclasses.dataclass(frozen=True)
class DecodeTiling:
    """How the kernels decode: constants compiled into them and their launch."""

    head_dim: int
    value_dim: int
    values_in_keys: bool
    heads: int  # kv heads of a CTA
    row_tiles: int  # of 16 query rows, of each; heads * row_tiles: 1, 2 or 4
    block_kv: int  # positions of a block
    stages: int  # blocks in flight
    box_rows: int  # positions that TMA loads at once: in one page for sure
    parts: int  # equal ones, that all blocks of the batch are cut into
    shares: int  # CTAs of a part: kv heads, times groups of query rows
    resident: int  # CTAs of a multiprocessor
    cluster: int = 1  # CTAs that share a batch row's keys in a cluster; 1: parts of all blocks
    teams: int = 1  # of four warps that compute, which take blocks in turn
    parts_of_number: int = 1  # bfloat16 that a float32 is split into: 2 or 3
    cache_bytes: int = 2  # of a key's or value's element; 1: with scales
    scales_of_pages: bool = False  # pages have their own
    new_tokens: int = 0  # whose keys and values are prepared beside queries, in a cluster

    merge_threads = 128

    @property
    def threads(self) -> int:
        """Threads of a CTA: the warps that compute, and the one that loads."""
        return 32 * (self._warps + 1)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA: blocks, queries, the warps' sums, barriers."""
        columns = 128 // self.cache_bytes  # of a box
        value_dim = 0 if self.values_in_keys else self.value_dim
        boxes = -(-self.head_dim // columns) + -(-value_dim // columns)
        blocks = self.stages * self.block_kv * 128 * boxes * self.heads
        plane = self.heads * self.head_rows * 128 * -(-self.head_dim // 64)
        queries = self.parts_of_number * plane
        row_sums = 16 * 4 * 2 * self._warps
        sums = 16 * 4 * self.heads * self.row_tiles * (self._columns + 8) + row_sums
        exchange = 16 + 16 * 4
        if self.splits_columns:
            exchange = -(-self.block_kv // 64) * self.heads * self.head_rows * 128
            exchange += 16 * 4 * self._warps
        note = 4
        if self.cache_bytes == 1:
            exchange += 4 * self.heads * self.head_rows
        new_value = 16 if self.values_in_keys else self.value_dim * self.cache_bytes
        exchange += self.new_tokens * (self.head_dim * self.cache_bytes + new_value)
        if self.scales_of_pages:
            note += 8 * self.heads * (self.block_kv // self.box_rows)
        barriers = -(-(16 + note) * self.stages // 8) * 8
        if self.joins:
            return blocks + -(-max(queries, sums, exchange) // 8) * 8 + barriers
        if self.cluster > 1:
            found = 16 * 4 * self._warps * (self._columns + 8) + row_sums
            runs = -(-self.head_rows * self._columns // (16 * self.cluster))
            gathered = self.cluster * (64 * runs + 8 * self.head_rows) + 16
            return max(blocks, found) + queries + gathered + exchange + -(-barriers // 16) * 16
        return blocks + queries + sums + exchange + barriers

    @property
    def _warps(self) -> int:
        return TEAM_WARPS * self.teams

    @property
    def head_rows(self) -> int:
        """Query rows of each of a CTA's kv heads."""
        return 16 * self.row_tiles

    @property
    def _columns(self) -> int:
        return -(-self.value_dim // 16) * 16

    # What registers allow.

    @property
    def splits_columns(self) -> bool:
        """Warps that share a block exchange their weights, and each has a part of the columns.

        A row of weighted values is then more than a warp has registers for.
        """
        return self._columns > 256

    @property
    def joins(self) -> bool:
        """Sums lie where the queries did: of float32 these are wide, three CTAs have less room.

        Queries of caches of eight bits have factors that are read for longer.
        """
        return self.parts_of_number > 1 or (self.resident > 2 and self.cache_bytes > 1)

    @property
    def asks_ahead(self) -> bool:
        """The next batch row's length and queries come while one is walked.

        Short rows wait for little else. More query rows or columns, three CTAs of a multiprocessor
        and float32 have no registers for it.
        """
        is_narrow = max(self.head_dim, self._columns) <= 128 and self.heads * self.row_tiles == 1
        is_roomy = self.resident <= 2 and self.parts_of_number == 1
        return is_narrow and is_roomy and self.cluster == 1

    @property
    def score_sums(self) -> int:
        """Sums of a warp's scores, to which products go in turn.

        With few keys each product would wait for the one before. Wide values leave no registers for
        two.
        """
        part_keys = self.block_kv * self.heads * self.row_tiles // TEAM_WARPS
        return 2 if self.teams > 1 and part_keys == 16 and self._columns <= 128 else 1

    @property
    def finite_apart(self) -> bool:
        """Blocks of values that are all finite have products of their own, in float32.

        With more than 128 columns twice the code spills.
        """
        return self._columns <= 128

    def constants(self, call: Any, shapes: Shapes) -> dict[str, Number]:
        """Returns the constants that the kernels are compiled with, by name."""
        problem: Problem = call.problem
        # A query is the last of what it sees: the right side of a window hides nothing.
        one_sided = dataclasses.replace(problem, window=(problem.window[0], None))
        return {
            **problem_constants(one_sided, shapes),
            "kQuantized": self.cache_bytes == 1,
            "kFloat8": call.quantized == "float8_e4m3fn",
            "kScalesOfPages": self.scales_of_pages,
            "kParts": self.parts_of_number,
            "kJoins": self.joins,
            "kHalves": False,
            "kHeadDim": self.head_dim,
            "kValueDim": self.value_dim,
            "kValuesInKeys": self.values_in_keys,
            "kHeads": self.heads,
            "kRowTiles": self.row_tiles,
            "kBlockKV": self.block_kv,
            "kStages": self.stages,
            "kResident": self.resident,
            "kCluster": self.cluster,
            "kTeams": self.teams,
            "kAsksAhead": self.asks_ahead,
            "kTakesPlaces": False,
            "kFullRows": call.full_rows,
            "kAllStandLast": problem.window[1] is None,
            "kMergeThreads": self.merge_threads,
            "kSplitsColumns": self.splits_columns,
            "kScoreSums": self.score_sums,
            "kFiniteApart": self.finite_apart,
            "kPaged": call.paged,
            "kBoxRows": self.box_rows,
            "kAppends": call.appends,
            "kNewTokens": self.new_tokens,
            "kRotates": call.rotary_base is not None,
        }
