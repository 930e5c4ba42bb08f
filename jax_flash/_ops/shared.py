"""Pages that requests of a mixed batch begin with in common, read once for all of them.

Attention of a request that has them is the merge of two parts: the tokens of all requests attend to
the shared pages, by one flash_common; and each request attends to the rest of its own pages, as if
it began behind the shared ones. Which requests have them the table says, on the device. Where each
token is a row, the same flash_common may compute both.

Juravsky et al., Hydragen (arXiv:2402.05099); Ye et al., Cascade Inference (2024).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_flash import _gpu
from jax_flash._merge import combine
from jax_flash._ops import ragged
from jax_flash._ops.common import NEEDED, SEES_COMMON, WRONG, Common, common
from jax_flash._ops.ragged import Ragged
from jax_flash._ops.requests import Requests, piece_size
from jax_flash._rotary import rotate
from jax_flash._varying import vary_over

# Bytes of keys and values that all requests would read of shared pages, from which together takes
# less time: by one kernel, and so many times as many by two. An H200, 128 requests, 64 positions
# behind them: 134 MB 1.07 (32/8 heads, 256 positions) to 1.46, 67 MB 0.86 to 1.09; by two
# kernels 537 MB 1.43 (8/8 heads), 268 MB 0.81 to 0.94. CPUs gain from a quarter on: two cores, 4 to
# 64 requests, 34 MB 1.03 to 1.22, 67 MB 1.03 to 1.79, 134 MB 1.9 to 2.8.
LEAST_SPARED, BY_TWO_KERNELS, PART_OF_CPUS = 1 << 27, 4, 4
_FEWEST_ROWS = 256  # of queries of a kv head, of one kernel: FEWEST_IN_COMMON of _gpu/sm90/pages.py

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
    is_one_kernel = attend_rest is ragged.attend and _is_one_kernel(call, named)
    if not _spares_much(call, named, positions, is_one_kernel):
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
    if is_one_kernel:
        return _at_once(call, named | {"shared": shared}, requests, count, member)

    cut = jnp.where(member, count, 0)
    column = jnp.arange(table.shape[1], dtype=jnp.int32) + cut[:, None]
    rest_table = jnp.take_along_axis(table, column, axis=1, mode="fill", fill_value=-1)
    rest_lengths = named["lengths"] - cut * page_size
    rest = attend_rest(call, named | {"lengths": rest_lengths, "page_table": rest_table})

    caches = {name: rest[name] for name in ("k", "v") if name in named}
    out, lse = _of_all(call, named | caches, shared, count * page_size)
    sees = member[requests.request] & requests.owned
    lse = jnp.where(sees[:, None], lse, -jnp.inf)
    out, lse = combine((rest["out"], rest["lse"]), (out, lse))
    return rest | {"out": out.astype(call.problem.dtype), "lse": lse}


def _spares_much(
    call: Ragged, named: dict[str, jax.Array], positions: Any, is_one_kernel: bool
) -> bool:
    """Whether to read shared pages once gains; where sizes are symbolic, in exports, it may."""
    (tokens, heads, _), kv_heads = named["q"].shape, named["k"].shape[2]
    sizes = (tokens, heads, kv_heads, positions, named["page_table"].shape[0])
    if not all(isinstance(size, int) for size in sizes):
        return True
    row = sum(named[name][0, 0].size * named[name].dtype.itemsize for name in "kv" if name in named)
    is_one_kernel = is_one_kernel and tokens * heads // kv_heads >= _FEWEST_ROWS
    # Which platform it is is not known yet: without a GPU a CPU, also where one exports for GPUs.
    if call.backend == "cpu" or (call.backend != "cuda" and _gpu.spec.present() is None):
        least = LEAST_SPARED // PART_OF_CPUS
    else:
        least = LEAST_SPARED * (1 if is_one_kernel else BY_TWO_KERNELS)
    return named["page_table"].shape[0] * positions * row >= least


def _one_kernel(call: Ragged) -> Common:
    whole = dataclasses.replace(call.problem, terms=(), window=(None, None))
    return Common(whole, call.backend, tails=True)


def _is_one_kernel(call: Ragged, named: dict[str, jax.Array]) -> bool:
    """Whether one flash_common may compute both parts: tokens are rows of 16 bits."""
    plain = call.value_dim is None and call.quantized is None and "indices" not in named
    if not plain or piece_size(named["q"].shape[0], named["page_table"].shape[0]) > 1:
        return False
    return _one_kernel(call).tails_fit(named["k"].shape[-1], named["v"].shape[-1])


def _at_once(
    call: Ragged,
    named: dict[str, jax.Array],
    requests: Requests,
    count: jax.Array,
    member: jax.Array,
) -> dict[str, jax.Array]:
    """Computes both parts by one flash_common, of which tokens see the rest by themselves."""
    table = named["page_table"]
    pages, page_size = named["k"].shape[:2]
    refused = requests.refused(table, pages, page_size, None)
    caches = ragged.append(call, named, requests, refused)
    length, wrong = count * page_size, refused[requests.request]
    needed = requests.owned & ~wrong
    sees = member[requests.request]
    first = jnp.where(needed & ~sees, 0, length)
    end = jnp.where(needed, requests.position + 1, length)
    flags = jnp.where(needed, SEES_COMMON * sees + NEEDED, WRONG * (requests.owned & wrong))
    found = common(
        _one_kernel(call),
        {
            "q": named["q"],
            **caches,
            "lengths": length,
            "page_table": named["shared"],
            "own_table": table,
            "tails": jnp.stack([requests.request, first, end, flags], axis=-1),
        },
    )
    out, lse = found
    if "sinks" in named:  # a sink counts once
        sinks = jnp.where(requests.owned[:, None], named["sinks"], -jnp.inf)
        out, lse = combine(found, (jnp.zeros_like(out), sinks))
    return {"out": out.astype(call.problem.dtype), "lse": lse, **caches}


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
