"""Attention of a mixed batch to pages: requests of any number of tokens.

The tokens of all requests lie one behind the other. A request of one token, which decodes, is a row
of one flash_decode; those of the others are computed by one flash_prefill. A batch that has no more
tokens than requests, or whose tokens read chosen keys, is a flash_decode alone. New keys and values
of all tokens are written before, since a token sees those of the tokens ahead of it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jax_flash import _cache, _latent_rows
from jax_flash._ops import decode as _decode
from jax_flash._ops.decode import SCALES, Decode
from jax_flash._ops.prefill import Prefill, prefill
from jax_flash._ops.requests import Requests, alone, choose, each, piece_size
from jax_flash._rotary import rotate
from jax_flash._varying import vary_over
from jax_flash.blockwise_decode import sees


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


def append(
    call: Ragged, named: dict[str, jax.Array], requests: Requests, refused: jax.Array
) -> dict[str, jax.Array]:
    """Returns the caches with the new keys and values of requests that are not refused."""
    caches = {name: named[name] for name in ("k", "v") if name in named}
    if not call.appends:
        return caches
    writes = requests.owned & ~refused[requests.request]
    places = jnp.where(writes, requests.position, -1)
    for name, cache in caches.items():
        new = named[f"new_{name}"]
        if name == "k" and call.rotary_base is not None:
            new = rotate(new, requests.position, call.rotary_base)
        if call.latent_rows:
            new = _latent_rows.pack_latent(new)
        scale = named.get("key_scale" if name == "k" else "value_scale")
        table = named["page_table"]
        caches[name] = _cache.write(cache, new, places, table, requests.request, scale)
    return caches


@functools.partial(jax.jit, static_argnums=0)
def _attend(call: Ragged, named: dict[str, jax.Array]) -> dict[str, jax.Array]:
    q, table = named["q"], named["page_table"]
    tokens, (pages, page_size) = q.shape[0], named["k"].shape[:2]
    requests = Requests.of(named["lengths"], named["starts"], named["rows"], tokens)
    left = call.problem.window[0]
    chosen = named.get("indices")
    if chosen is None:
        refused = requests.refused(table, pages, page_size, left)
    else:
        first = requests.lengths - (requests.count if call.appends else 0)
        refused = requests.faults(table, pages, page_size, first)
        seen = sees(call.problem, chosen, requests.position) & requests.owned[:, None]
        of = jnp.broadcast_to(requests.request[:, None], chosen.shape)
        page, _ = _cache.locate(chosen, table, pages, page_size, of)
        lacks = jnp.any(seen & (page == pages), axis=1)
        refused = refused.at[requests.request].max(lacks)
        named = named | {"indices": chosen[:, None]}
    if call.rotary_base is not None:
        q = rotate(q, requests.position, call.rotary_base)
    caches = append(call, named, requests, refused)
    inner = dataclasses.replace(call, rotary_base=None, appends=False)
    shared = (*SCALES, *call.problem.terms)
    terms = {name: named[name] for name in shared if name in named}
    operands = {"q": q, "page_table": table, **caches, **terms}

    def decode(named: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return _decode.decode(inner, *(named[name] for name in inner.operands))

    if chosen is not None or piece_size(tokens, table.shape[0]) == 1:
        wrong = refused[requests.request]
        out, lse = (
            choose(requests.owned, choose(wrong, jnp.nan, x[:, 0]), nothing)
            for x, nothing in zip(
                each(requests, refused).attend(decode, operands, left), (0.0, -jnp.inf), strict=True
            )
        )
        return {"out": out, "lse": lse, **caches}

    decodes = (requests.count == 1) & ~refused
    rows = alone(requests, refused).attend(decode, operands, left)
    # Tokens ahead of all requests and behind them have none.
    stop = requests.first[-1:] + requests.count[-1:]
    none = jnp.zeros(1, jnp.int32)
    found = prefill(
        Prefill(
            call.problem,
            call.backend,
            value_dim=call.value_dim,
            quantized=call.quantized,
            latent_rows=call.latent_rows,
        ),
        {
            **operands,
            "lengths": jnp.concatenate([jnp.where(refused, -1, requests.lengths), none, none]),
            "first": jnp.concatenate([requests.first, none, stop]),
            "count": jnp.concatenate(
                [jnp.where(decodes, 0, requests.count), requests.first[:1], tokens - stop]
            ),
            **{name: named[name][0] for name in call.problem.terms},
        },
    )
    places = jnp.where(decodes, requests.first, tokens)
    out, lse = (
        x.at[places].set(of_rows[:, 0], mode="drop") for x, of_rows in zip(found, rows, strict=True)
    )
    return {"out": out, "lse": lse, **caches}
