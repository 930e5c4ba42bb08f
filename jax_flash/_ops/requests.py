"""Requests of a mixed batch, and rows of flash_decode made of their tokens.

Sizes are named as in `_call.py`; `[tokens]` is one for each token, `[B]` for each request, `[R]`
for each row of a flash_decode.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_flash import _cache
from jax_flash._ops.decode import MOST_QUERIES


@dataclasses.dataclass(frozen=True)
class Requests:
    """Which tokens each request has, and which request each token is of.

    Attributes:
      lengths, first, count: int32 `[B]`: positions in the cache, the first token, and how many;
        a request that is not live has none.
      faulty: bool `[B]`, starts that fall or lie beyond the tokens: it has what is left of them.
      owned: bool `[tokens]`, whether it is of a request.
      request, position: int32 `[tokens]`, anything valid where it is of none.
    """

    lengths: jax.Array
    first: jax.Array
    count: jax.Array
    faulty: jax.Array
    owned: jax.Array
    request: jax.Array
    position: jax.Array

    @classmethod
    def of(cls, lengths: jax.Array, starts: jax.Array, rows: jax.Array, tokens: Any) -> Requests:
        live = jnp.arange(lengths.shape[0] + 1, dtype=jnp.int32) <= rows
        # Those of requests that are not live have their tokens at the end, none.
        ordered = running(jnp.max, jnp.clip(jnp.where(live, starts, 0), 0, tokens))
        faulty = live & (starts != ordered)
        first, stop = ordered[:-1], ordered[1:]
        return cls.in_order(lengths, first, stop - first, tokens, faulty[:-1] | faulty[1:])

    @classmethod
    def in_order(
        cls, lengths: jax.Array, first: jax.Array, count: jax.Array, tokens: Any, faulty: jax.Array
    ) -> Requests:
        """Finds the tokens of requests that follow each other, with gaps or without."""
        requests, stop = lengths.shape[0], first + count
        token = jnp.arange(tokens, dtype=jnp.int32)
        ahead = _count_up_to(stop, token)
        request = jnp.minimum(ahead, requests - 1)
        owned = (ahead < requests) & (token >= first[request])
        position = (lengths - stop)[request] + token
        return cls(lengths, first, count, faulty, owned, request, position)

    def refused(self, table: jax.Array, pages: int, page_size: int, left: int | None) -> jax.Array:
        """Computes which requests `[B]` have a wrong length, start or page.

        One without tokens is of no account, nor one that is not live, which has none.
        """
        seen = self.lengths - self.count
        first = jnp.zeros_like(seen) if left is None else jnp.maximum(seen - left, 0)
        return self.faults(table, pages, page_size, first)

    def faults(self, table: jax.Array, pages: int, page_size: int, first: jax.Array) -> jax.Array:
        """Computes it where positions are needed from `first` `[B]` on."""
        wrong = self.faulty | (self.lengths < self.count)
        wrong |= self.lengths > _cache.capacity(table.shape[1], page_size)
        return wrong | _cache.lacks_pages(table, first, self.lengths, pages, page_size)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of a flash_decode.

    Attributes:
      request: int32 `[R]`, of which request each row is.
      lengths: int32 `[R]`, positions up to its last token; 0 of a row that is not needed.
      first: int32 `[R]`, the position of its first token, where it has one.
      tokens: int32 `[R, T]`, the token of each of its queries, the last of them its own; None:
        row r has token r.
    """

    request: jax.Array
    lengths: jax.Array
    first: jax.Array
    tokens: jax.Array | None

    def attend(
        self,
        decode: Callable[[dict[str, jax.Array]], Mapping[str, jax.Array]],
        operands: Mapping[str, jax.Array],
        left: int | None,
    ) -> tuple[jax.Array, jax.Array]:
        """Computes out `[R, T, N, Hv]` and lse `[R, T, N]`.

        Arguments:
          decode: computes the results of a flash_decode by name.
          operands: q `[tokens, N, H]`, page_table `[B, M]`, the caches, and terms.
          left: of the window.
        """
        q, page_size = operands["q"], operands["k"].shape[1]
        results = decode(
            {
                **operands,
                "q": q[:, None] if self.tokens is None else take(q, self.tokens),
                "lengths": self.lengths,
                "page_table": self._tables(operands["page_table"], page_size, left),
            }
        )
        return results["out"], jnp.swapaxes(results["lse"], -1, -2)

    def _tables(self, table: jax.Array, page_size: int, left: int | None) -> jax.Array:
        """Gives each row the pages `[R, M]` of its request.

        A row of fewer tokens than others has queries ahead of its first token, whose windows reach
        further back than its own, to where its request may have no page: there it gets any.
        """
        found = table[self.request]
        if left is None or self.tokens is None or self.tokens.shape[1] == 1:
            return found
        begins = page_size * jnp.arange(table.shape[1], dtype=jnp.int32)[None]
        return jnp.where(begins <= (self.first - left - page_size)[:, None], 0, found)


def each(requests: Requests, refused: jax.Array) -> Rows:
    """Makes each token a row."""
    computed = requests.owned & ~refused[requests.request]
    return Rows(
        request=requests.request,
        lengths=jnp.where(computed, requests.position + 1, 0),
        first=requests.position,
        tokens=None,
    )


def alone(requests: Requests, refused: jax.Array) -> Rows:
    """Makes each request a row, with the one token of those that have one."""
    computed = (requests.count == 1) & ~refused
    return Rows(
        request=jnp.arange(computed.shape[0], dtype=jnp.int32),
        lengths=jnp.where(computed, requests.lengths, 0),
        first=requests.lengths - 1,
        tokens=requests.first[:, None],
    )


def cut(requests: Requests, refused: jax.Array, size: int) -> tuple[Rows, jax.Array]:
    """Cuts requests into rows of `size` tokens, but for the last of each.

    Returns: the rows, and int32 `[tokens]`, which query of all rows each token is, where it is one.
    """
    tokens = requests.owned.shape[0]
    most = _most_cut(tokens, requests.count.shape[0])
    needed = jnp.where(refused, 0, -(-requests.count // size))
    end = running(jnp.sum, needed)
    begin = end - needed
    # The most that there can be: each request has one token more than whole rows.
    row = jnp.arange(most + (tokens - most) // size, dtype=jnp.int32)
    ahead = _count_up_to(end, row)
    request = jnp.minimum(ahead, end.shape[0] - 1)
    start = requests.first[request] + size * (row - begin[request])
    last_of_all = requests.first + requests.count
    stop = jnp.minimum(start + size, last_of_all[request])
    offset = (requests.lengths - last_of_all)[request]  # from a token to its position

    token = jnp.arange(tokens, dtype=jnp.int32)
    own = requests.request
    index = (token - requests.first[own]) // size
    stop_of_token = jnp.minimum(requests.first[own] + size * (index + 1), last_of_all[own])
    rows = Rows(
        request=request,
        lengths=jnp.where(ahead < end.shape[0], offset + stop, 0),
        first=offset + start,
        tokens=stop[:, None] - jnp.arange(size, 0, -1, dtype=jnp.int32)[None],
    )
    return rows, size * (begin[own] + index) + size + token - stop_of_token


def piece_size(tokens: Any, requests: Any) -> int:
    """Chooses how many tokens a row of `cut` has, a power of two.

    So many that rows have at most four times the tokens, were each request to need one. A batch of
    no more tokens than requests has rows of 1: it only decodes.
    """
    if not (isinstance(tokens, int) and isinstance(requests, int)):
        return 16  # sizes that jax.export left symbolic
    if tokens <= requests:
        return 1
    largest = 3 * tokens // _most_cut(tokens, requests)
    return min(MOST_QUERIES, 1 << (largest.bit_length() - 1))


def _most_cut(tokens: Any, requests: Any) -> Any:
    """Computes how many requests of more than one token there may be."""
    known = isinstance(tokens, int) and isinstance(requests, int)
    return min(requests, tokens // 2) if known else requests


def choose(condition: jax.Array, x: Any, y: Any) -> jax.Array:
    """Takes x or y `[n, ...]` by a condition `[n]`."""
    rank = max(jnp.ndim(x), jnp.ndim(y))
    return jnp.where(condition.reshape(-1, *(1,) * (rank - 1)), x, y)


def take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Takes rows of x; an index of none takes any."""
    return jnp.take(x, index, axis=0, mode="clip")


def running(reduce: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
    """Reduces x `[n]`, 0 or more, up to each of its elements.

    A reduction of n * n is one kernel; XLA's scans of more than 16 elements are several.
    """
    index = jnp.arange(x.shape[0], dtype=jnp.int32)
    return reduce(jnp.where(index[None] <= index[:, None], x[None], 0), axis=1).astype(x.dtype)


def _count_up_to(ends: jax.Array, at: jax.Array) -> jax.Array:
    """Counts how many of ends `[B]` are at most each of `[n]`: which of B parts it lies in."""
    return jnp.sum(ends[None] <= at[:, None], axis=1, dtype=jnp.int32)
