"""Attention of a mixed batch to pages: requests of any number of tokens, as rows of flash_decode.

The tokens of all requests lie one behind the other. A request of one token, which decodes, is a row
of one flash_decode. The tokens of the others are cut, on the device, into pieces of at most T
tokens of one request, and each piece is a row of a second flash_decode: its queries are the last T
positions of the piece's own length, its pages those of its request. How many rows there are depends
on shapes alone, so that nothing is compiled anew when requests come, go and grow; a row that is not
needed has length 0. New keys and values of all tokens are written before, since a piece sees those
of the pieces ahead of it.

Sizes are named as in `_call.py`; `[tokens]` is one for each token, `[B]` for each request, `[R]`
for each row of a flash_decode.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_flash import _cache
from jax_flash._ops import decode as _decode
from jax_flash._ops.decode import MOST_QUERIES, Decode
from jax_flash._rotary import rotate
from jax_flash._varying import vary_over


@dataclasses.dataclass(frozen=True)
class Ragged(Decode):
    """One `ragged_paged_attention`, operands aside: what Decode says, of requests."""

    function = "ragged_paged_attention"


def attend(call: Ragged, operands: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Computes a call's results by name, of operands as `_validate.ragged.prepare` makes them.

    Returns: out `[tokens, N, Hv]`, lse `[tokens, N]`, and k and v as they are then.

    Raises: as `_backends.require`.
    """
    return _attend(call, vary_over(operands, operands))


@functools.partial(jax.jit, static_argnums=0)
def _attend(call: Ragged, named: dict[str, jax.Array]) -> dict[str, jax.Array]:
    q, table = named["q"], named["page_table"]
    pages, page_size = named["k"].shape[:2]
    requests = Requests.of(named["lengths"], named["starts"], named["rows"], q.shape[0])
    left = call.problem.window[0]
    refused = requests.refused(table, pages, page_size, left)
    if call.rotary_base is not None:
        q = rotate(q, requests.position, call.rotary_base)
    caches = {name: named[name] for name in ("k", "v") if name in named}
    if call.appends:
        writes = requests.owned & ~refused[requests.request]
        places = jnp.where(writes, requests.position, -1)
        for name, cache in caches.items():
            new = named[f"new_{name}"]
            if name == "k" and call.rotary_base is not None:
                new = rotate(new, requests.position, call.rotary_base)
            scale = named.get("key_scale" if name == "k" else "value_scale")
            caches[name] = _cache.write(cache, new, places, table, requests.request, scale)

    inner = dataclasses.replace(call, rotary_base=None, appends=False)
    shared = ("key_scale", "value_scale", *call.problem.terms)
    terms = {name: named[name] for name in shared if name in named}

    def decode(rows: _Rows) -> list[jax.Array]:
        """Computes out `[tokens, N, Hv]` and lse `[tokens, N]` of the tokens that rows have."""
        operands = {
            "q": q[:, None] if rows.places is None else _take(q, rows.tokens),
            **caches,
            "lengths": rows.lengths,
            "page_table": _tables(table, rows, page_size, left),
            **terms,
        }
        results = _decode.decode(inner, *(operands[name] for name in inner.operands))
        found = results["out"], jnp.swapaxes(results["lse"], -1, -2)
        flat = (x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]) for x in found)
        return [x if rows.places is None else _take(x, rows.places) for x in flat]

    def choose(condition: jax.Array, x: Any, y: Any) -> jax.Array:
        """Takes x or y `[tokens, ...]` by a condition `[tokens]`."""
        rank = max(jnp.ndim(x), jnp.ndim(y))
        return jnp.where(condition.reshape(-1, *(1,) * (rank - 1)), x, y)

    size = piece_size(q.shape[0], requests.count.shape[0])
    if size == 1:
        found = decode(_each(requests, refused))
    else:
        alone = (requests.count == 1)[requests.request]
        pairs = zip(
            decode(_alone(requests, refused)), decode(_cut(requests, refused, size)), strict=True
        )
        found = [choose(alone, x, y) for x, y in pairs]
    wrong = refused[requests.request]
    out, lse = (
        choose(requests.owned, choose(wrong, jnp.nan, x), nothing)
        for x, nothing in zip(found, (0.0, -jnp.inf), strict=True)
    )
    return {"out": out, "lse": lse, **caches}


def piece_size(tokens: Any, requests: Any) -> int:
    """Chooses how many tokens a piece has, a power of two.

    So many that rows have at most four times the tokens, were each request to need one. A batch of
    no more tokens than requests has pieces of 1: it only decodes.
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
    def of(cls, lengths: jax.Array, starts: jax.Array, rows: jax.Array, tokens: int):
        requests = lengths.shape[0]
        live = jnp.arange(requests + 1, dtype=jnp.int32) <= rows
        # Those of requests that are not live have their tokens at the end, none.
        ordered = lax.cummax(jnp.clip(jnp.where(live, starts, 0), 0, tokens))
        faulty = live & (starts != ordered)
        first, stop = ordered[:-1], ordered[1:]
        token = jnp.arange(tokens, dtype=jnp.int32)
        ahead = _count_up_to(stop, token)
        request = jnp.minimum(ahead, requests - 1)
        owned = (ahead < requests) & (token >= first[request])
        return cls(
            lengths=lengths,
            first=first,
            count=stop - first,
            faulty=faulty[:-1] | faulty[1:],
            owned=owned,
            request=request,
            position=(lengths - stop)[request] + token,
        )

    def refused(self, table: jax.Array, pages: int, page_size: int, left: int | None) -> jax.Array:
        """Computes which requests `[B]` have a wrong length, start or page.

        One without tokens is of no account, nor one that is not live, which has none.
        """
        seen = self.lengths - self.count
        first = jnp.zeros_like(seen) if left is None else jnp.maximum(seen - left, 0)
        wrong = self.faulty | (seen < 0)
        wrong |= self.lengths > _cache.capacity(table.shape[1], page_size)
        return wrong | _cache.lacks_pages(table, first, self.lengths, pages, page_size)


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Rows of a flash_decode.

    Attributes:
      request: int32 `[R]`, of which request each row is.
      lengths: int32 `[R]`, positions up to its last token; 0 of a row that is not needed.
      first: int32 `[R]`, the position of its first token, where it has one.
      tokens: int32 `[R, T]`, the token of each of its queries, the last of them its own.
      places: int32 `[tokens]`, which query of all rows each token is, where it is one; None: each
        token is a row.
    """

    request: jax.Array
    lengths: jax.Array
    first: jax.Array
    tokens: jax.Array
    places: jax.Array | None


def _each(requests: Requests, refused: jax.Array) -> _Rows:
    """Makes each token a row."""
    computed = requests.owned & ~refused[requests.request]
    token = jnp.arange(computed.shape[0], dtype=jnp.int32)
    return _Rows(
        request=requests.request,
        lengths=jnp.where(computed, requests.position + 1, 0),
        first=requests.position,
        tokens=token[:, None],
        places=None,
    )


def _alone(requests: Requests, refused: jax.Array) -> _Rows:
    """Makes each request a row, with the one token of those that have one."""
    computed = (requests.count == 1) & ~refused
    return _Rows(
        request=jnp.arange(computed.shape[0], dtype=jnp.int32),
        lengths=jnp.where(computed, requests.lengths, 0),
        first=requests.lengths - 1,
        tokens=requests.first[:, None],
        places=requests.request,
    )


def _cut(requests: Requests, refused: jax.Array, size: int) -> _Rows:
    """Cuts requests of more than one token into rows of `size` tokens, but for the last of each."""
    tokens = requests.owned.shape[0]
    most = _most_cut(tokens, requests.count.shape[0])
    needed = jnp.where(refused | (requests.count == 1), 0, -(-requests.count // size))
    end = jnp.cumsum(needed, dtype=jnp.int32)
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
    return _Rows(
        request=request,
        lengths=jnp.where(ahead < end.shape[0], offset + stop, 0),
        first=offset + start,
        tokens=stop[:, None] - jnp.arange(size, 0, -1, dtype=jnp.int32)[None],
        places=size * (begin[own] + index) + size + token - stop_of_token,
    )


def _tables(table: jax.Array, rows: _Rows, page_size: int, left: int | None) -> jax.Array:
    """Gives each row the pages `[R, M]` of its request.

    A row of fewer tokens than others has queries ahead of its first token, whose windows reach
    further back than its own, to where its request may have no page: there it gets any.
    """
    found = table[rows.request]
    if left is None or rows.tokens.shape[1] == 1:
        return found
    begins = page_size * jnp.arange(table.shape[1], dtype=jnp.int32)[None]
    return jnp.where(begins <= (rows.first - left - page_size)[:, None], 0, found)


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Takes rows of x; an index of none takes any."""
    return jnp.take(x, index, axis=0, mode="clip")


def _count_up_to(ends: jax.Array, at: jax.Array) -> jax.Array:
    """Counts how many of ends `[B]` are at most each of `[n]`: which of B parts it lies in."""
    return jnp.sum(ends[None] <= at[:, None], axis=1, dtype=jnp.int32)
