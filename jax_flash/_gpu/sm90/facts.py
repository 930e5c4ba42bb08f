"""Owns what a call is, as the choices of both passes for Hopper ask it: nothing here is measured.

Read next: ../meaning.py, which it extends; forward.py, backward.py, which choose tilings.
"""

from __future__ import annotations

import dataclasses

from jax_flash._gpu.meaning import Meaning
from jax_flash._gpu.sm90.hopper import multiprocessors, tma_loads_of
from jax_flash._gpu.spec import GpuSpec
from jax_flash._gpu.spills import spills
from jax_flash._gpu.traits import bytes_of_bias, group_size, is_bare, is_highest, is_plane, known


@dataclasses.dataclass(frozen=True)
class Facts(Meaning):
    """A call on a GPU; sizes that jax.export left open are typical ones."""

    gpu: GpuSpec

    # Sizes.

    @property
    def queries(self) -> int:
        return known(self.shapes.q_len, 4096)

    @property
    def keys(self) -> int:
        return known(self.shapes.kv_len, 4096)

    @property
    def longest(self) -> int:
        return max(self.queries, self.keys)

    @property
    def shortest(self) -> int:
        return min(self.queries, self.keys)

    @property
    def group(self) -> int:
        return group_size(self.shapes)

    @property
    def is_square_128(self) -> bool:
        return self.shapes.head_dim == self.shapes.value_dim == 128

    @property
    def sms(self) -> int:
        return multiprocessors(self.gpu)

    def are_known(self, *sizes: str) -> bool:
        return all(isinstance(getattr(self.shapes, size), int) for size in sizes)

    # Operands.

    @property
    def halves(self) -> bool:
        return is_highest(self.problem)

    @property
    def tma_loads(self) -> bool:
        return self.halves or tma_loads_of(self.shapes)  # planes of halves are padded

    @property
    def bytes_of_bias(self) -> int:
        return bytes_of_bias(self.shapes.bias)

    @property
    def loads_bias_of_16(self) -> bool:
        """A bias of 16 bits that TMA can load."""
        return self.bytes_of_bias == 2 and is_plane(self.shapes)

    # What is between scores and weights.

    @property
    def is_plain(self) -> bool:
        """Nothing but causality."""
        return is_bare(self.problem) and not self.has_left

    @property
    def is_plain_16(self) -> bool:
        return self.is_plain and self.tma_loads and not (self.problem.split or self.halves)

    @property
    def is_uneven(self) -> bool:
        """Units differ in length."""
        return self.has_right or self.has("block_numbers")

    @property
    def has_bias_alone(self) -> bool:
        """One of 16 bits that TMA loads: read where it is added it takes no registers."""
        alone = self.problem.terms == ("bias",) and not (self.is_capped or self.is_mapped)
        return alone and self.loads_bias_of_16 and not self.has_left

    def spills(self, candidate: str) -> bool:
        return spills(candidate, self.problem, self.shapes)
