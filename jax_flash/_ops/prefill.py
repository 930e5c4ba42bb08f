"""flash_prefill, attention of requests' tokens to pages, which hold all of their positions.

    q, k, [v], lengths, first, count, page_table, [scales], *terms -> out, lse

The tokens of all requests lie one behind the other in q `[*B, T, N, H]`; a request's are the last
of its positions, and each sees its own and those before it. Kernels over pages compute them all.
Elsewhere they are cut, on the device, into pieces, and each piece is a row of a flash_decode: its
queries are the last of the piece's own length, its pages those of its request. How many pieces
there are depends on shapes alone. It has no derivative.

Operands behind the leading dims: k `[P, S, K, H]`, which may have leading dims as in flash_decode;
page_table `[Q, M]`; lengths, first and count `[R]`: positions, first token and number of tokens of
each of R requests. Requests of the table are in the order of their tokens. Those from Q on are
none: what is said of tokens that have no request. Length 0 gives out 0 and lse −inf, length −1
NaN. Tokens of which nothing is said have any out and lse. Scales are as in flash_decode, sinks
`[N]`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad

from jax_flash import _backends
from jax_flash._call import Call
from jax_flash._gpu import copies
from jax_flash._ops import primitive
from jax_flash._ops.decode import (
    SCALES,
    Decode,
    cache_dims,
    have_own_scales,
    in_one_pool,
    no_derivative,
    of_pages,
)
from jax_flash._ops.requests import Requests, choose, cut, piece_size, running, take
from jax_flash._problem import Shapes
from jax_flash._varying import vary_over

_REQUESTS = ("lengths", "first", "count")
_DIMS = {
    "k": "PSKH",
    "v": "PSKV",
    "lse": "TN",
    "page_table": "QM",
    **dict.fromkeys(SCALES, "PK"),
    **dict.fromkeys(_REQUESTS, "R"),
}
Kernel = Callable[..., tuple[jax.Array, ...]]


@dataclasses.dataclass(frozen=True)
class Prefill(Call):
    """One flash_prefill, operands aside.

    Attributes:
      value_dim, quantized, latent_rows: as of Decode.
    """

    value_dim: int | None = None
    quantized: str | None = None
    latent_rows: bool = False

    target = "prefill"
    function = "ragged_paged_attention"

    @property
    def operands(self) -> tuple[str, ...]:
        v = ("v",) if self.value_dim is None else ()
        scales = SCALES[: 1 + len(v)] if self.quantized else ()
        return ("q", "k", *v, *_REQUESTS, "page_table", *scales, *self.problem.terms)

    @property
    def results(self) -> tuple[str, ...]:
        return ("out", "lse")

    @property
    def cached(self) -> bool:
        return True

    @property
    def cache_dtype(self) -> str:
        return "uint8" if self.latent_rows else self.quantized or self.problem.dtype

    @property
    def own(self) -> tuple[str, ...]:
        return (*_REQUESTS, "page_table")

    def dims(self, name: str) -> str:
        return cache_dims(name, _DIMS.get(name) or super().dims(name), self.latent_rows)

    def shapes(self, operands: Mapping[str, Any]) -> Shapes:
        """Reads the sizes of a call without leading dims: batch counts what lengths does."""
        q, k = operands["q"], operands["k"]
        return Shapes(
            batch=operands["lengths"].shape[-1],
            q_len=q.shape[-3],
            # A table of no pages names none.
            kv_len=operands["page_table"].shape[-1] * k.shape[-3] if k.shape[-4] != 0 else 0,
            q_heads=q.shape[-2],
            kv_heads=k.shape[-2],
            head_dim=q.shape[-1],
            value_dim=self.value_dim or operands["v"].shape[-1],
            page_size=k.shape[-3],
            pages=k.shape[-4],
            scales_of_pages=have_own_scales(operands),
        )

    def result_shapes(self, operands: Mapping[str, Any]) -> list[tuple[int, ...]]:
        q = operands["q"].shape
        return [(*q[:-1], self.shapes(operands).value_dim), q[:-1]]

    # ---- lowering --------------------------------------------------------------------------------

    def blockwise(self, *operands: jax.Array) -> tuple[jax.Array, ...]:
        return self._in_pieces(lambda call, *x: call.blockwise(*x), *operands)

    def run_kernel(self, kernel: Kernel, *operands: jax.Array) -> tuple[jax.Array, ...]:
        given = self.name_operands(operands)
        if "sinks" in given and math.prod(given["sinks"].shape[:-1]) != 1:  # a member's own
            return self.run_instead(kernel, *operands)
        named = _joined(given)
        flat = dict(named)
        if "sinks" in flat:
            flat["sinks"] = flat["sinks"][0]
        copied = self._copied(named) if self.quantized else None
        if copied is not None:
            flat["count"] = jnp.where(copied, named["count"], 0)
            named["count"] = jnp.where(copied, 0, named["count"])
        results = kernel(self, *(flat[name] for name in self.operands))
        if copied is not None:
            results = self._cut(lambda call, *x: call.run_kernel(kernel, *x), named, results)
        shapes = self.result_shapes(given)
        return tuple(x.reshape(shape) for x, shape in zip(results, shapes, strict=True))

    def _copied(self, named: Mapping[str, jax.Array]) -> jax.Array | None:
        """Computes which requests `[R]` have their pages copied ahead; None: all.

        Those of more than a few tokens, the first ones that there is place for.
        """
        shapes, rows, page = self.shapes(named), named["page_table"].shape[0], named["k"].shape[-3]
        size = piece_size(shapes.q_len, rows)
        if copies.hold_all(shapes) and copies.pay(1, size, shapes):
            return None
        lengths, count, left = named["lengths"], named["count"], self.problem.window[0]
        pay = copies.pay(count, size, shapes)
        first = 0 if left is None else jnp.maximum(lengths - count - left, 0) // page
        pages = jnp.where(
            pay & (lengths > 0), -(-lengths // page) - first, 0
        )  # as copy_pages has it
        # Shared pages count for each request, except where all pages lie at their own numbers.
        fits = copies.hold_all(shapes) | (running(jnp.sum, pages) <= copies.places(shapes))
        return (pay & fits) | (jnp.arange(lengths.shape[0]) >= rows)  # those have no pages

    def instead(self, shapes: Shapes) -> tuple[Call, Shapes]:
        size = piece_size(shapes.q_len, shapes.batch)
        return self._decode, dataclasses.replace(shapes, q_len=size)

    def run_instead(self, kernel: Kernel, *operands: jax.Array) -> tuple[jax.Array, ...]:
        return self._in_pieces(lambda call, *x: call.run_kernel(kernel, *x), *operands)

    @property
    def _decode(self) -> Decode:
        return Decode(
            self.problem,
            self.backend,
            value_dim=self.value_dim,
            paged=True,
            quantized=self.quantized,
            latent_rows=self.latent_rows,
        )

    def _in_pieces(self, run: Kernel, *operands: jax.Array) -> tuple[jax.Array, ...]:
        """Computes the results by `run(call, *operands)` of a flash_decode."""
        shapes = self.result_shapes(self.name_operands(operands))
        results = self._cut(run, _joined(self.name_operands(operands)), (0.0, -jnp.inf))
        return tuple(x.reshape(shape) for x, shape in zip(results, shapes, strict=True))

    def _cut(self, run: Kernel, named: dict[str, jax.Array], others: Any) -> tuple[jax.Array, ...]:
        """Computes it of joined operands; `others`: out and lse of tokens that have no request."""
        rows = named["page_table"].shape[0]
        lengths, first, count = (named.pop(name)[:rows] for name in _REQUESTS)
        tokens = named["q"].shape[0]
        wrong = lengths < 0
        requests = Requests.in_order(lengths, first, count, tokens, wrong)
        pieces, places = cut(requests, wrong, piece_size(tokens, rows))
        if "sinks" in named and named["sinks"].shape[0] != 1:
            members = named["sinks"].shape[0]
            named["sinks"] = take(named["sinks"], pieces.request // (rows // members))
        call = self._decode

        def decode(named: dict[str, jax.Array]) -> dict[str, jax.Array]:
            results = run(call, *(named[name] for name in call.operands))
            return dict(zip(call.results, results, strict=True))

        found = pieces.attend(decode, named, self.problem.window[0])
        joined = (x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]) for x in found)
        flat = (take(x, places) for x in joined)
        refused = wrong[requests.request]
        return tuple(
            choose(requests.owned, choose(refused, jnp.nan, x), other).astype(x.dtype)
            for x, other in zip(flat, others, strict=True)
        )


def _joined(named: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Joins leading dims: the tokens of members follow each other, as their requests and pages do.

    sinks become `[members or 1, N]`.
    """
    named = dict(named)
    lead = named["q"].shape[:-3]
    members = math.prod(lead)
    tokens = named["q"].shape[-3]
    rows, columns = named["page_table"].shape[-2:]
    *pools, pages = named["k"].shape[:-3]
    table = named["page_table"].reshape(members * rows, columns)
    named["page_table"] = in_one_pool(table, (*lead, rows), pools, pages)
    if lead:
        begin = tokens * jnp.arange(members, dtype=jnp.int32)[:, None]
        named["first"] = named["first"].reshape(members, -1) + begin
    for name in _REQUESTS:
        x = named[name].reshape(members, -1)
        named[name] = jnp.concatenate([x[:, :rows].ravel(), x[:, rows:].ravel()]) if lead else x[0]
    named["q"] = named["q"].reshape(members * tokens, *named["q"].shape[-2:])
    for name in SCALES:
        if name in named:
            named[name] = of_pages(named[name], (*pools, pages))
    for name in ("k", "v"):
        if name in named:
            x = named[name]
            named[name] = x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])
    if "sinks" in named:
        named["sinks"] = named["sinks"].reshape(-1, named["sinks"].shape[-1])
    return named


def bind(
    to: Primitive, call: Prefill, operands: Mapping[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Computes out and lse by a primitive, of operands by name.

    Raises: as `_backends.require`.
    """
    _backends.require(call, call.shapes(operands))
    given = [operands[name] for name in call.operands]
    out, lse = to.bind(*vary_over(given, given), call=call)
    return out, lse


flash_prefill_p = primitive.define("flash_prefill")
ad.primitive_jvps[flash_prefill_p] = no_derivative


def prefill(call: Prefill, operands: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Computes out and lse, of operands by name.

    Raises: as `_backends.require`.
    """
    return bind(flash_prefill_p, call, operands)
