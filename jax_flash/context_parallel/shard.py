"""One device's part of a call whose sequence is split: its operands, and where its tokens stand."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_flash._problem import Problem, order_terms
from jax_flash._varying import vary_over
from jax_flash.context_parallel.orders import Layout

Operands = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Shard:
    """What one device holds of a call.

    Attributes:
      problem: that of the whole call, as one device would get it.
      backend: as the user named it.
      operands: q, k, v and problem.terms by name. Tokens are this shard's; lengths are of the
        whole, and so are the keys of bias and mask, shard after shard.
      axis: the mesh axis, or axes, that the shards are spread over.
      layout: which tokens are whose.
    """

    problem: Problem
    backend: str | None
    operands: Operands
    axis: Any
    layout: Layout

    @property
    def rank(self) -> jax.Array:
        return lax.axis_index(self.axis)

    @property
    def q_len(self) -> int:
        return self.operands["q"].shape[-3]

    @property
    def kv_len(self) -> int:
        return self.operands["k"].shape[-3]

    @property
    def positioned(self) -> bool:
        """Whether the user says where tokens stand; otherwise their index does."""
        return "query_positions" in self.operands

    @property
    def offset(self) -> int | None:
        """By how much a query stands behind its index; None where each batch row has its own."""
        if not self.problem.bottom_right:
            return 0
        if "query_lengths" in self.operands or "key_value_lengths" in self.operands:
            return None
        return self.layout.shards * (self.kv_len - self.q_len)

    def query_terms(self) -> Operands:
        """Makes the terms of this shard's queries, in the form that kernels know."""
        terms = {name: self.operands[name] for name in ("query_segments",) if name in self.operands}
        if "query_lengths" in self.operands:
            lengths = self.operands["query_lengths"]
            terms["query_lengths"] = self.layout.count(lengths, self.rank, self.q_len)
        if self.positioned:
            terms["query_positions"] = self.operands["query_positions"]
        elif self.problem.window != (None, None):
            indices = self.layout.indices(self.rank, self.q_len) + self._offsets()
            shape = (*self.operands["q"].shape[:-3], self.q_len)
            terms["query_positions"] = jnp.broadcast_to(indices, shape)
        return terms

    def _offsets(self) -> Any:
        """Computes by how much queries stand behind their index: a number, or `[*B, 1]`."""
        if self.offset is not None:
            return self.offset
        shards = self.layout.shards
        queries: Any = self.operands.get("query_lengths", shards * self.q_len)
        keys: Any = self.operands.get("key_value_lengths", shards * self.kv_len)
        return (keys - queries)[..., None]

    def call(self, **terms: jax.Array | None) -> tuple[Problem, Operands]:
        """Returns the problem with these terms alone, and them in their order."""
        ordered = order_terms(terms)
        problem = dataclasses.replace(self.problem, bottom_right=False, terms=tuple(ordered))
        return problem, ordered

    def replace(self, **operands: jax.Array) -> "Shard":
        return dataclasses.replace(self, operands=self.operands | operands)

    def vary(self) -> "Shard":
        """Lets all operands vary over the axes that any does, where gradients are then summed."""
        return dataclasses.replace(self, operands=vary_over(self.operands, self.operands))


def sort_keys(x: jax.Array, layout: Layout, groups: int = 1) -> jax.Array:
    """Brings the keys, the last dim, of a bias or mask to where the exchange of keys leaves them.

    They come shard after shard; those of each of `groups` times layout.shards shards are sorted.
    """
    if x.shape[-1] == 1:
        return x
    grouped = x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
    return layout.sort(grouped, -1).reshape(x.shape)
