"""One device's part of a call whose sequence is split: its operands, and where its tokens stand."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_flash import _philox
from jax_flash._function import Function
from jax_flash._problem import Problem, order_terms
from jax_flash._program import Aval
from jax_flash._terms import TERMS
from jax_flash._varying import vary_over
from jax_flash.context_parallel.orders import Layout

Operands = dict[str, jax.Array]
ALL = slice(None)
# The terms that strategies bring to a device's tokens. They take them by name, and would leave
# another one out of their calls.
_SPLIT = (
    *("bias", "mask", "block_numbers", "block_bits", "query_lengths", "key_value_lengths"),
    *("query_segments", "key_value_segments", "query_positions", "key_value_positions"),
    *("sinks", "dropout_state", "score_ids"),
)
_CELL = 16  # neighbouring queries, and keys, that share counters of dropout (_philox.py)


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Queries or keys of one call of the kernels, by where they stand in the whole sequence.

    Attributes:
      layout: whose `index` reads `place`.
      place: int32 `[3]`.
    """

    layout: Layout
    place: jax.Array

    @classmethod
    def run(cls, first: Any) -> "Tokens":
        """Tokens one after another from `first` on."""
        return cls(Layout("contiguous", 1), jnp.stack([jnp.asarray(first, jnp.int32)] * 3))

    @property
    def first(self) -> jax.Array:
        return self.layout.index(self.place, 0)


@dataclasses.dataclass(frozen=True)
class Shard:
    """What one device holds of a call.

    Attributes:
      problem: that of the whole call, as one device would get it.
      backend: as the user named it.
      operands: q, k, v and problem.optional by name. Tokens are this shard's; lengths and block
        masks are of the whole, and so are the keys of bias and mask, shard after shard.
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

    @property
    def block(self) -> int | None:
        """Queries of a block of the block mask; None without one."""
        return self.operands["block_bits"].shape[-2] if "block_bits" in self.operands else None

    def units(self) -> dict[str, int]:
        """Lists how many neighbouring tokens dropout and a block mask take together, if there."""
        units = {"dropout's pattern": _CELL} if "dropout_state" in self.operands else {}
        return units if self.block is None else units | {"block_mask": self.block}

    @property
    def by_runs(self) -> bool:
        """Whether the tokens of a call have to stand one after another, as dropout counts them."""
        return "dropout_state" in self.operands and self.layout.shards > 1

    def refuse(self, together: int = 1) -> str | None:
        """Says why dropout or a block mask cannot be split over shards, or None.

        together: how many shards are exchanged for one first.
        """
        if self.layout.shards == together:
            return None
        for name, unit in self.units().items():
            squares = f"{name} is made of squares of {unit} neighbouring queries and keys"
            if self.layout.order == "striped":
                return f"{squares}, which order 'striped' spreads over the devices"
            for length in (self.q_len, self.kv_len):
                run = together * (length // 2 if self.layout.order == "zigzag" else length)
                if run % unit:
                    return f"{squares}, and a device holds runs of {run} tokens, no multiple"
        return None

    def tokens(self, rank: Any, length: int, part: slice = ALL) -> Tokens:
        """Says where those of a shard, or of a part of it, stand.

        A part of order "striped" starts at a multiple of `layout.block`.
        """
        place = self.layout.place(rank, length)
        first = part.start or 0
        ahead = first * self.layout.shards if self.layout.order == "striped" else first
        return Tokens(self.layout, place + jnp.array([ahead, -first, 0], jnp.int32))

    def runs(self, part: slice, length: int) -> list[slice]:
        """Cuts a part of a shard of `length` tokens to what one call takes."""
        if not self.by_runs or self.layout.order != "zigzag" or part != ALL:
            return [part]
        return [slice(0, length // 2), slice(length // 2, length)]

    def whole_terms(self) -> Operands:
        """Returns the terms that a call has as they are."""
        names = ("dropout_state", "score_ids", "block_bits")
        return {name: self.operands[name] for name in names if name in self.operands}

    def query_terms(self) -> Operands:
        """Makes the terms of this shard's queries, in the form that kernels know."""
        terms = self.whole_terms()
        if "query_segments" in self.operands:
            terms["query_segments"] = self.operands["query_segments"]
        if "block_numbers" in self.operands:
            numbers = self.operands["block_numbers"]
            terms["block_numbers"] = self.layout.part(numbers, self.rank, -2)
        if "query_lengths" in self.operands:
            lengths = self.operands["query_lengths"]
            terms["query_lengths"] = self.layout.count(lengths, self.rank, self.q_len)
        if self.positioned:
            terms["query_positions"] = self.operands["query_positions"]
        elif self.problem.window != (None, None):
            indices = self.layout.indices(self.rank, self.q_len)
            shape = (*self.operands["q"].shape[:-3], self.q_len)
            terms["query_positions"] = jnp.broadcast_to(indices, shape) + self._offsets()
        return terms

    def _offsets(self) -> Any:
        """Computes by how much queries stand behind their index: a number, or `[*B, 1]`."""
        if self.offset is not None:
            return self.offset
        shards = self.layout.shards
        queries: Any = self.operands.get("query_lengths", shards * self.q_len)
        keys: Any = self.operands.get("key_value_lengths", shards * self.kv_len)
        return (keys - queries)[..., None]

    def call(self, queries: Tokens, keys: Tokens, **terms: jax.Array) -> tuple[Problem, Operands]:
        """Returns the problem of these tokens, with these terms alone, and what it reads in order.

        Arguments:
          queries, keys: those of the call; with `by_runs` they stand one after another.
          terms: cut to them.
        """
        if "dropout_state" in terms:
            state = terms["dropout_state"]
            terms["dropout_state"] = _philox.of_part(state, queries.first, keys.first)
        terms = order_terms(terms)
        score = self.problem.score
        captured = [self.operands[name] for name in self.problem.captures]
        if score is not None and not score.used.isdisjoint(("query", "key")):
            score = _of_whole(score, queries.layout, keys.layout)
            places = jnp.concatenate([queries.place, keys.place])
            captured.append(places.reshape(*(1 for _ in self.operands["q"].shape[:-3]), -1))
        problem = dataclasses.replace(
            self.problem, bottom_right=False, terms=tuple(terms), score=score
        )
        return problem, terms | dict(zip(problem.captures, captured, strict=True))

    def cut_terms(self, terms: Operands, rows: slice, keys: slice = ALL) -> Operands:
        """Cuts the terms of this shard's queries, and of keys, to some of either."""
        made = {}
        for name, x in terms.items():
            letters = TERMS[name].dims
            for axis, letter in enumerate(letters, -len(letters)):
                if letter in "TS":
                    x = cut(x, rows if letter == "T" else keys, axis)
                elif letter in "IJ":
                    x = cut(x, self._blocks(rows if letter == "I" else keys), axis)
            part = {"query_lengths": rows, "key_value_lengths": keys}.get(name, ALL)
            if part != ALL:
                x = jnp.clip(x - part.start, 0, part.stop - part.start)
            made[name] = x
        return made

    def _blocks(self, part: slice) -> slice:
        block = self.block
        return part if part == ALL or not block else slice(part.start // block, part.stop // block)

    def replace(self, **operands: jax.Array) -> "Shard":
        return dataclasses.replace(self, operands=self.operands | operands)

    def vary(self) -> "Shard":
        """Lets all operands vary over the axes that any does, where gradients are then summed."""
        return dataclasses.replace(self, operands=vary_over(self.operands, self.operands))


def check_terms(problem: Problem) -> None:
    """Raises NotImplementedError for a term that no strategy knows."""
    absent = [TERMS[name].feature for name in problem.terms if name not in _SPLIT]
    if absent:
        raise NotImplementedError(
            f"attention over a split sequence has no {', '.join(absent)}; expected a call without, "
            "or flash_attention of whole sequences"
        )


def cut(x: jax.Array, part: slice, axis: int) -> jax.Array:
    """Takes a part of an axis; one of size 1 is the same for all."""
    axis %= x.ndim
    if part == ALL or x.shape[axis] == 1:
        return x
    return lax.slice_in_dim(x, part.start, part.stop, axis=axis)


@functools.lru_cache(maxsize=64)
def _of_whole(score: Function, queries: Layout, keys: Layout) -> Function:
    """Lets a function of the scores count tokens as the whole sequence does."""

    def change(scalars, places):
        return {
            "query": queries.index(places[:3], scalars["query"]),
            "key": keys.index(places[3:], scalars["key"]),
        }

    return score.after(change, [Aval("int32", (6,))])


def sort_keys(x: jax.Array, layout: Layout, groups: int = 1) -> jax.Array:
    """Brings the keys, the last dim, of a bias or mask to where the exchange of keys leaves them.

    They come shard after shard; those of each of `groups` times layout.shards shards are sorted.
    """
    if x.shape[-1] == 1:
        return x
    grouped = x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
    return layout.sort(grouped, -1).reshape(x.shape)
