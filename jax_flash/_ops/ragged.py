"""Attention of a mixed batch to pages: requests of any number of tokens, as rows of flash_decode.

The tokens of all requests lie one behind the other. They are cut, on the device, into pieces of at
most T tokens of one request, and each piece is a row of one flash_decode: its queries are the last
T positions of the piece's own length, its pages those of its request. How many pieces there are
depends on shapes alone, so that nothing is compiled anew when requests come, go and grow. New keys
and values of all pieces are written before, since a piece sees those of the pieces ahead of it.

Sizes are named as in `_call.py`; `[tokens]` is one for each token, `[B]` for each request, `[P]`
for each piece.
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
    requests = _Requests.of(named["lengths"], named["starts"], named["rows"], q.shape[0])
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
            caches[name] = _cache.write(cache, new, places, table, requests.request)

    size = piece_size(q.shape[0], requests.count.shape[0])
    cut = _single(requests, refused) if size == 1 else _cut(requests, refused, size)
    rows = {
        "q": q[:, None] if size == 1 else jnp.take(q, cut.tokens, axis=0, mode="clip"),
        **caches,
        "lengths": cut.lengths,
        "page_table": _tables(table, cut, page_size, left),
        **{name: named[name] for name in call.problem.terms},
    }
    inner = dataclasses.replace(call, rotary_base=None, appends=False)
    results = _decode.decode(inner, *(rows[name] for name in inner.operands))
    out, lse = results["out"], jnp.swapaxes(results["lse"], -1, -2)
    out, lse = (x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]) for x in (out, lse))
    if size != 1:
        out, lse = (jnp.take(x, cut.places, axis=0, mode="clip") for x in (out, lse))
    wrong = refused[requests.request]

    def of_tokens(x: jax.Array, nothing: float) -> jax.Array:
        owned, nan = (y.reshape(-1, *(1,) * (x.ndim - 1)) for y in (requests.owned, wrong))
        return jnp.where(owned, jnp.where(nan, jnp.nan, x), nothing)

    return {"out": of_tokens(out, 0.0), "lse": of_tokens(lse, -jnp.inf), **caches}


def piece_size(tokens: Any, requests: Any) -> int:
    """Chooses how many tokens a piece has: the mean of a request's, down to a power of two.

    Then the rows of all pieces are at most twice the tokens, and a batch that only decodes, of as
    many tokens as requests, is one row for each token.
    """
    if not (isinstance(tokens, int) and isinstance(requests, int)):
        return 16  # sizes that jax.export left symbolic
    return min(MOST_QUERIES, 1 << max((tokens // requests).bit_length() - 1, 0))


@dataclasses.dataclass(frozen=True)
class _Requests:
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
class _Pieces:
    """How tokens are cut.

    Attributes:
      request: int32 `[P]`, of which request each piece is.
      lengths: int32 `[P]`, positions up to its last token; 0 of a piece that is not needed.
      first: int32 `[P]`, the position of its first token, where it has one.
      tokens: int32 `[P, T]`, the token of each of its queries, the last of them its own.
      places: int32 `[tokens]`, which query of all pieces each token is.
    """

    request: jax.Array
    lengths: jax.Array
    first: jax.Array
    tokens: jax.Array
    places: jax.Array


def _single(requests: _Requests, refused: jax.Array) -> _Pieces:
    """Makes each token a piece."""
    computed = requests.owned & ~refused[requests.request]
    token = jnp.arange(computed.shape[0], dtype=jnp.int32)
    return _Pieces(
        request=requests.request,
        lengths=jnp.where(computed, requests.position + 1, 0),
        first=requests.position,
        tokens=token[:, None],
        places=token,
    )


def _cut(requests: _Requests, refused: jax.Array, size: int) -> _Pieces:
    """Cuts the tokens of each request into pieces of `size`, but for its last."""
    tokens, most = requests.owned.shape[0], requests.count.shape[0]
    needed = jnp.where(refused, 0, -(-requests.count // size))
    end = jnp.cumsum(needed, dtype=jnp.int32)
    begin = end - needed
    # The most that there can be: each request has one token more than whole pieces.
    piece = jnp.arange(most + (tokens - most) // size, dtype=jnp.int32)
    ahead = _count_up_to(end, piece)
    request = jnp.minimum(ahead, most - 1)
    start = requests.first[request] + size * (piece - begin[request])
    last_of_all = requests.first + requests.count
    stop = jnp.minimum(start + size, last_of_all[request])
    offset = (requests.lengths - last_of_all)[request]  # from a token to its position

    token = jnp.arange(tokens, dtype=jnp.int32)
    own = requests.request
    index = (token - requests.first[own]) // size
    stop_of_token = jnp.minimum(requests.first[own] + size * (index + 1), last_of_all[own])
    return _Pieces(
        request=request,
        lengths=jnp.where(ahead < most, offset + stop, 0),
        first=offset + start,
        tokens=stop[:, None] - jnp.arange(size, 0, -1, dtype=jnp.int32)[None],
        places=size * (begin[own] + index) + size + token - stop_of_token,
    )


def _tables(table: jax.Array, cut: _Pieces, page_size: int, left: int | None) -> jax.Array:
    """Gives each piece the pages `[P, M]` of its request.

    A piece that is shorter than others has queries ahead of its first token, whose windows reach
    further back than its own, to where its request may have no page: there it gets any.
    """
    rows = table[cut.request]
    if left is None or cut.tokens.shape[1] == 1:
        return rows
    ends = page_size * jnp.arange(1, table.shape[1] + 1, dtype=jnp.int32)[None]
    return jnp.where(ends <= cut.first[:, None] - left, 0, rows)


def _count_up_to(ends: jax.Array, at: jax.Array) -> jax.Array:
    """Counts how many of ends `[B]` are at most each of `[n]`: which of B parts it lies in."""
    return jnp.sum(ends[None] <= at[:, None], axis=1, dtype=jnp.int32)
