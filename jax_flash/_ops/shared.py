"""Pages that requests of a mixed batch begin with in common, read once for all of them.

Attention of a request that has them is the merge of two parts: the tokens of all requests attend to
the shared pages, by one flash_common; and each request attends to the rest of its own pages, as if
it began behind the shared ones. Which requests have them the table says, on the device.

Juravsky et al., Hydragen (arXiv:2402.05099); Ye et al., Cascade Inference (2024).
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_flash._merge import combine
from jax_flash._ops import ragged
from jax_flash._ops.common import Common, common
from jax_flash._ops.ragged import Ragged
from jax_flash._ops.requests import Requests, choose
from jax_flash._rotary import rotate
from jax_flash._varying import vary_over

# Shared positions up to which each request reads them: two parts and their merge take longer. An
# H200, 128 requests of 64/8 heads: 512 are 0.97 times as fast together, 1024 1.34, 4096 3.03.
MOST_APART = 512

_Attend = Callable[[Ragged, dict[str, jax.Array]], dict[str, jax.Array]]


def attend(
    call: Ragged, operands: dict[str, jax.Array], rest: _Attend = ragged.attend
) -> dict[str, jax.Array]:
    """Computes what `rest` does, of operands with shared_pages, int32 `[C]`.

    Raises: as `_backends.require`.
    """
    return _attend(call, rest, vary_over(operands, operands))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _attend(
    call: Ragged, attend_rest: _Attend, named: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    named = dict(named)
    shared, table, k = named.pop("shared_pages"), named["page_table"], named["k"]
    if 0 in (shared.size, table.size, k.size, named["q"].size):
        return attend_rest(call, named)
    positions = shared.size * k.shape[1]
    if isinstance(positions, int) and positions <= MOST_APART:  # others are symbolic, in exports
        return attend_rest(call, named)
    requests = Requests.of(named["lengths"], named["starts"], named["rows"], named["q"].shape[0])
    if call.rotary_base is not None:  # by positions of the whole, which the rest does not know
        for name in ("q", *(("new_k",) if call.appends else ())):
            named[name] = rotate(named[name], requests.position, call.rotary_base)
        call = dataclasses.replace(call, rotary_base=None)
    pages, page_size = k.shape[:2]
    count = _leading((shared >= 0) & (shared < pages))
    behind = (requests.lengths - requests.count) // page_size >= count
    member = (_leading(table[:, : shared.size] == shared) >= count) & behind & (requests.count > 0)

    cut = jnp.where(member, count, 0)
    column = jnp.arange(table.shape[1], dtype=jnp.int32) + cut[:, None]
    rest_table = jnp.take_along_axis(table, column, axis=1, mode="fill", fill_value=-1)
    rest_lengths = named["lengths"] - cut * page_size
    rest = attend_rest(call, named | {"lengths": rest_lengths, "page_table": rest_table})

    length = jnp.where(member.any(), count * page_size, 0)
    caches = [name for name in ("k", "v") if name in named]
    sees = member[requests.request] & requests.owned
    q = choose(sees, named["q"], 0)  # rows of NaN are computed again
    whole = named | {"q": q} | {name: rest[name] for name in caches}
    out, lse = _of_all(call, whole, shared, length)
    lse = jnp.where(sees[:, None], lse, -jnp.inf)
    out, lse = combine((rest["out"], rest["lse"]), (out, lse))
    return rest | {"out": out.astype(call.problem.dtype), "lse": lse}


def _leading(x: jax.Array) -> jax.Array:
    """Counts the leading True of bool `[..., C]`: int32 `[...]`."""
    column = jnp.arange(x.shape[-1], dtype=jnp.int32)
    return jnp.min(jnp.where(x, x.shape[-1], column), axis=-1)


def _of_all(
    call: Ragged, named: dict[str, jax.Array], shared: jax.Array, length: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes out `[tokens, N, Hv]` and lse `[tokens, N]` of all tokens over the shared pages.

    A sink, which counts once, is of the rest.
    """
    whole = dataclasses.replace(call.problem, terms=(), window=(None, None))
    one = Common(whole, call.backend, value_dim=call.value_dim, quantized=call.quantized)
    return common(one, named | {"lengths": length, "page_table": shared})
