"""Tree masks of speculation in a mixed batch: which of its request's new tokens a token sees.

Attention of such a token is the merge of two parts: all positions that its request had before, to
which the tokens of a request attend as more heads of one row of flash_decode; and the request's new
tokens, a small flash_attention with a mask. Requests of more tokens than the mask has columns are
computed as ever. So every backend runs it that runs these.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jax_flash import _cache
from jax_flash._merge import combine
from jax_flash._ops import ragged, shared
from jax_flash._ops.decode import Decode, decode
from jax_flash._ops.ragged import Ragged
from jax_flash._ops.requests import Requests
from jax_flash._rotary import rotate
from jax_flash._terms import sum_dtype
from jax_flash._varying import vary_over
from jax_flash.attention import flash_attention

_Named = dict[str, jax.Array]


def attend(call: Ragged, operands: _Named) -> _Named:
    """Computes what `ragged.attend` does, of operands with ancestors, bool `[tokens, A]`.

    Raises: as `_backends.require`.
    """
    named = dict(operands)
    if call.rotary_base is not None:
        requests = _requests(named)
        _, sees = _trees(requests, named["ancestors"])
        before = requests.lengths - requests.count
        depth = before[requests.request] + jnp.sum(sees, axis=1, dtype=jnp.int32) - 1
        in_tree = (requests.count <= sees.shape[1])[requests.request]
        position = jnp.where(in_tree, depth, requests.position)
        for name in ("q", *(("new_k",) if call.appends else ())):
            named[name] = rotate(named[name], position, call.rotary_base)
        call = dataclasses.replace(call, rotary_base=None)
    if "shared_pages" in named:
        return shared.attend(call, named, _rest)
    return _rest(call, named)


def _requests(named: _Named) -> Requests:
    return Requests.of(named["lengths"], named["starts"], named["rows"], named["q"].shape[0])


def _trees(requests: Requests, ancestors: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes which requests have a tree `[B]`, and what their tokens see, `[tokens, A]`."""
    column = jnp.arange(ancestors.shape[1], dtype=jnp.int32)
    own = jnp.arange(ancestors.shape[0], dtype=jnp.int32) - requests.first[requests.request]
    sees = ancestors | (column == own[:, None])
    sees &= column < requests.count[requests.request][:, None]
    return (requests.count > 0) & (requests.count <= ancestors.shape[1]), sees


def _rest(call: Ragged, operands: _Named) -> _Named:
    return _attend(call, vary_over(operands, operands))


@functools.partial(jax.jit, static_argnums=0)
def _attend(call: Ragged, named: _Named) -> _Named:
    named = dict(named)
    ancestors, table = named.pop("ancestors"), named["page_table"]
    if 0 in (ancestors.size, table.size, named["k"].size, named["q"].size):
        return ragged.attend(call, named)
    requests = _requests(named)
    in_tree, sees = _trees(requests, ancestors)
    pages, page_size = named["k"].shape[:2]
    refused = requests.refused(table, pages, page_size, None)
    if call.appends:
        writes = requests.owned & ~refused[requests.request]
        places = jnp.where(writes, requests.position, -1)
        for name in (x for x in ("k", "v") if x in named):
            new = named.pop(f"new_{name}")
            scale = named.get("key_scale" if name == "k" else "value_scale")
            named[name] = _cache.write(named[name], new, places, table, requests.request, scale)
        call = dataclasses.replace(call, appends=False)

    # Others; a tree's tokens read no further than there are tokens, and what they get is not used.
    lengths = jnp.where(in_tree & ~refused, requests.count, named["lengths"])
    others = ragged.attend(call, named | {"lengths": lengths})

    tokens = requests.first[:, None] + jnp.arange(ancestors.shape[1], dtype=jnp.int32)  # [B, A]
    before = jnp.where(in_tree & ~refused, requests.lengths - requests.count, 0)
    q = jnp.take(named["q"], tokens, axis=0, mode="clip")
    old = _of_old(call, named, q, before)
    mask = jnp.take(sees, tokens, axis=0, mode="clip")[:, None]
    new = _of_new(call, named, q, before, mask)

    own = jnp.arange(named["q"].shape[0], dtype=jnp.int32) - requests.first[requests.request]
    at = requests.request, own.clip(0, ancestors.shape[1] - 1)
    chosen = (in_tree & ~refused)[requests.request] & requests.owned
    out, lse = (x[at] for x in combine(old, new))
    return others | {
        "out": jnp.where(chosen[:, None, None], out.astype(others["out"].dtype), others["out"]),
        "lse": jnp.where(chosen[:, None], lse, others["lse"]),
        **{name: named[name] for name in ("k", "v") if name in named},
    }


def _of_old(
    call: Ragged, named: _Named, q: jax.Array, before: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes out `[B, A, N, Hv]`, lse `[B, A, N]` of q over the first `before` positions."""
    batch, count, q_heads, head_dim = q.shape
    kv_heads = named["k"].shape[2]
    group = q_heads // kv_heads
    one = Decode(
        dataclasses.replace(call.problem, terms=()),
        call.backend,
        value_dim=call.value_dim,
        paged=True,
        quantized=call.quantized,
    )
    in_groups = jnp.swapaxes(q.reshape(batch, count, kv_heads, group, head_dim), 1, 2)
    operands = named | {"q": in_groups.reshape(batch, 1, -1, head_dim), "lengths": before}
    results = decode(one, *(operands[name] for name in one.operands))

    def of_tokens(x: jax.Array) -> jax.Array:
        parts = jnp.swapaxes(x.reshape(batch, kv_heads, count, group, -1), 1, 2)
        return parts.reshape(batch, count, q_heads, -1)

    return of_tokens(results["out"]), of_tokens(results["lse"])[..., 0]


def _of_new(
    call: Ragged, named: _Named, q: jax.Array, before: jax.Array, mask: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes the same over the A positions from `before` on, as mask `[B, 1, A, A]` says."""
    positions = before[:, None] + jnp.arange(q.shape[1], dtype=jnp.int32)
    pages, page_size = named["k"].shape[:2]
    page, slot = _cache.locate(positions, named["page_table"], pages, page_size)

    def read(name: str, scale: str) -> jax.Array:
        stored = named[name].at[page, slot].get(mode="clip")
        if not call.quantized:
            return stored
        return stored.astype(wide) * _cache.of_pages(named[scale], page)[..., None]

    wide = sum_dtype(q.dtype)
    k = read("k", "key_scale")
    v = read("v", "value_scale") if "v" in named else k[..., : call.value_dim]
    problem = call.problem
    # float32 has 16 bits by default, as for the positions before: flash_attention's has 11 on GPUs.
    default = problem.dtype == "float32" and problem.precision == "default"
    return flash_attention(
        q.astype(k.dtype),
        k,
        v,
        scale=problem.scale,
        mask=mask,
        softcap=problem.softcap,
        sinks=named["sinks"][0] if "sinks" in named else None,
        precision="high" if default else problem.precision,
        return_lse=True,
        backend=call.backend,
    )
