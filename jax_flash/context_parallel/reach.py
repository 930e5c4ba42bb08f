"""Which keys the queries of a device can see, by where shards stand: how far keys travel in a ring.

What a device cannot see of the keys that arrive it does not compute: whole shards, or halves of
them in order "zigzag". Read next: ring.py.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jax_flash.context_parallel.orders import Layout
from jax_flash.context_parallel.shard import ALL


@dataclasses.dataclass(frozen=True)
class Reach:
    """Which keys queries can see, by where shards stand.

    Attributes:
      layout: of queries and keys.
      q_len, kv_len: tokens of a shard.
      window: (left, right), from a query's position to a key's.
      offset: from a query's index to its position; None: it is not known, all may be visible.
    """

    layout: Layout
    q_len: int
    kv_len: int
    window: tuple[int | None, int | None]
    offset: int | None

    def visible(self, rank: Any, source: Any) -> list[list[Any]]:
        """Says of each run of the rank's queries, and of the source's keys, if some pair meets."""
        queries = self.layout.runs(rank, self.q_len)
        keys = self.layout.runs(source, self.kv_len)
        if self.offset is None:
            return [[True for _ in keys] for _ in queries]
        return [
            [self._meet((low + self.offset, high + self.offset), key) for key in keys]
            for low, high in queries
        ]

    def _meet(self, queries: tuple[Any, Any], keys: tuple[Any, Any]) -> Any:
        left, right = self.window
        met = True if right is None else keys[0] <= queries[1] + right
        return met if left is None else met & (keys[1] >= queries[0] - left)

    @property
    def pieces(self) -> list[tuple[slice, slice]]:
        """The parts of a shard's queries and of arriving keys that a step may compute."""
        if self.layout.order != "zigzag":
            return [(ALL, ALL)]
        return [
            (ALL, ALL),
            (ALL, slice(0, self.kv_len // 2)),
            (slice(self.q_len // 2, self.q_len), ALL),
        ]

    def own(self, rows: slice, keys: slice) -> bool:
        """Says if some device's own keys are visible to its queries, of halves of either or all."""
        if ALL in (rows, keys) or self.layout.order != "zigzag":
            return True
        at = bool(rows.start), bool(keys.start)
        return any(self.visible(rank, rank)[at[0]][at[1]] for rank in range(self.layout.shards))

    def choose(self, rank: Any, source: Any) -> Any:
        """Computes which step is to be done: 0 none, else 1 + the index of one of `pieces`."""
        seen = self.visible(rank, source)
        if self.offset is None or self.window == (None, None):
            return 1
        if len(seen) == 1:
            return jnp.where(seen[0][0], 1, 0)
        (a, b), (c, d) = seen
        rows_first, keys_second = a | b, b | d
        some = rows_first | c | d
        chosen = jnp.where(keys_second, jnp.where(rows_first, 1, 3), 2)
        return jnp.where(some, chosen, 0)

    def hops(self) -> tuple[int, int]:
        """Computes how far keys travel: to higher ranks, and to lower ones."""
        n = self.layout.shards

        def needed(distance):
            return any(
                any(map(any, self.visible(rank, (rank - distance) % n))) for rank in range(n)
            )

        distances = [d for d in range(1, n) if needed(d)]
        splits = [
            (
                max((d for d in distances if d <= cut), default=0),
                max((n - d for d in distances if d > cut), default=0),
            )
            for cut in range(n - 1, -1, -1)
        ]
        return min(splits, key=lambda split: (max(split), sum(split)))
