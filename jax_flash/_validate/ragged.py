"""From the arguments of `ragged_paged_attention`, of either form, to arrays, or an error."""

import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_flash import _debug
from jax_flash._cache import QUANTIZED
from jax_flash._ops.decode import MOST_QUERIES
from jax_flash._ops.ragged import Ragged
from jax_flash._terms import FLOATS
from jax_flash._validate.arrays import array, check_head_dim, in_full, is_sure
from jax_flash._validate.decode import Caches, integers, problem_of
from jax_flash._validate.scalars import real

_NAMES = ("key_pages", "value_pages")
_MASK_VALUE = -1e6  # far below any score


def prepare(
    query: Any,
    key_pages: Any,
    value_pages: Any,
    lengths: Any,
    page_table: Any,
    query_starts: Any,
    rows: Any,
    *,
    new_key: Any,
    new_value: Any,
    key_scale: Any,
    value_scale: Any,
    shared_pages: Any,
    ancestors: Any,
    rotary_base: Any,
    value_dim: Any,
    backend: str | None,
    **options: Any,
) -> tuple[Ragged, dict[str, jax.Array]]:
    """Checks the arguments; options are those of `problem_of`.

    Returns: the call, and its operands by name, as `_ops.ragged.attend` has them.

    Raises: TypeError or ValueError with the argument's name, what it is and what would be right.
    """
    q = array("query", query)
    if q.ndim != 3:
        raise ValueError(
            f"query has shape {q.shape}; expected [tokens, N, H], the tokens of all requests one "
            "behind the other"
        )
    check_head_dim("query", q)
    given = in_full(lengths), in_full(query_starts)
    lengths = integers("lengths", lengths, 0)
    if lengths.ndim != 1 or lengths.shape[0] == 0:
        raise ValueError(
            f"lengths has shape {lengths.shape}; expected [B], one for each of one or more requests"
        )
    (requests,) = lengths.shape
    starts = integers("query_starts", query_starts, -1)
    if starts.shape != (requests + 1,):
        raise ValueError(
            f"query_starts has shape {starts.shape} and lengths {lengths.shape}; expected [B + 1] "
            "= one more: where the tokens of each request begin, and where those of the last end"
        )
    rows = jnp.int32(requests) if rows is None else integers("rows", rows, 0)
    if rows.shape != ():
        raise ValueError(
            f"rows has shape {rows.shape}; expected one number, how many requests are live"
        )
    if page_table is None:
        raise TypeError(
            f"page_table is None; expected int32 [B, pages of a request] of B {requests}"
        )
    scales = {"key_scale": key_scale, "value_scale": value_scale}
    caches = Caches.of(key_pages, value_pages, page_table, (requests,), _NAMES, **scales)
    caches.check_query(q)
    appends, new = caches.new_of(new_key, new_value, q.shape[:1], q.dtype)
    q, problem, terms = problem_of(q, caches, (1,), MOST_QUERIES, **options)
    call = Ragged(
        problem,
        backend,
        rotary_base=caches.rotary_base_of(rotary_base),
        value_dim=caches.value_dim_of(value_dim),
        paged=True,
        appends=appends,
        quantized=caches.quantized,
        latent_rows=caches.latent_rows,
    )
    _look(call, caches, *given, rows, q.shape[0])
    for name, x in (("shared_pages", shared_pages), ("ancestors", ancestors)):
        if x is not None and call.latent_rows:
            raise NotImplementedError(
                f"{name} is given and key_pages has packed rows of latent attention; expected "
                "key_pages of bfloat16 there"
            )
        if x is not None and "indices" in terms:
            raise ValueError(
                f"{name} is given beside indices, which say what each token reads; expected one of "
                "the two"
            )
    shared = None if shared_pages is None else _shared_pages(shared_pages, call, caches.page_table)
    trees = None if ancestors is None else _ancestors(ancestors, call, q)
    operands = {
        "q": q,
        "k": caches.key,
        "v": caches.value,
        "lengths": lengths,
        "page_table": caches.page_table,
        "starts": starts,
        "rows": rows,
        "shared_pages": shared,
        "ancestors": trees,
        **caches.scales,
        **new,
        **terms,
    }
    return call, {name: x for name, x in operands.items() if x is not None}


def _shared_pages(pages: Any, call: Ragged, table: Any) -> jax.Array:
    pages = integers("shared_pages", pages, -1)
    if pages.ndim != 1 or not is_sure(lambda: pages.shape[0] <= table.shape[1]):
        raise ValueError(
            f"shared_pages has shape {pages.shape} and page_table {table.shape}; expected [C], C "
            "at most M, of symbolic ones by a constraint of their scope: the pages that requests "
            "begin with"
        )
    _without_window("shared_pages", call)
    return pages


def _ancestors(ancestors: Any, call: Ragged, q: jax.Array) -> jax.Array:
    ancestors = array("ancestors", ancestors)
    if ancestors.dtype != bool:
        raise TypeError(f"ancestors has dtype {ancestors.dtype}; expected bool")
    if ancestors.ndim != 2 or ancestors.shape[0] != q.shape[0]:
        raise ValueError(
            f"ancestors has shape {ancestors.shape} and query {q.shape}; expected [tokens, A], A "
            "the most tokens of a tree"
        )
    _without_window("ancestors", call)
    return ancestors


def _without_window(name: str, call: Ragged) -> None:
    if call.problem.window[0] is not None:
        raise ValueError(f"{name} is given beside a local_window_size; expected one of the two")


def _look(call: Ragged, caches: Caches, lengths: Any, starts: Any, rows: Any, tokens: int) -> None:
    """Has `debug_values` look at what live requests have."""
    if not _debug.is_on():
        return
    _debug.check_requests(lengths, starts, rows, tokens)
    lengths, starts = (integers(x, y, -1) for x, y in (("lengths", lengths), ("starts", starts)))
    count = starts[1:] - starts[:-1]
    used = (jnp.arange(lengths.shape[0], dtype=jnp.int32) < rows) & (count > 0)
    left = call.problem.window[0]
    first = jnp.zeros_like(lengths)
    if left is not None:
        first = jnp.maximum(lengths - count - left, 0)
    caches.look(jnp.where(used, lengths, 0), lambda: first, lambda: jnp.where(used, lengths, 0))


class Interleaved(NamedTuple):
    """Arguments of `paged_tpu.ragged_paged_attention`, checked.

    Attributes:
      q, kv_pages: as they were given.
      requests: lengths, page_table, query_starts and rows.
      scale: of the products of q and what the pages hold.
      key_scale: 1 of pages of eight bits, whose scales are in the others; None of others.
      window: positions to the left of a token's own, or None.
      softcap, v_scale: as given.
    """

    q: jax.Array
    kv_pages: jax.Array
    requests: tuple[jax.Array, jax.Array, jax.Array, jax.Array]
    scale: float
    key_scale: float | None
    window: int | None
    softcap: float | None
    v_scale: float | None


def prepare_interleaved(
    q: Any,
    kv_pages: Any,
    kv_lens: Any,
    page_indices: Any,
    cu_q_lens: Any,
    num_seqs: Any,
    *,
    sm_scale: Any,
    sliding_window: Any,
    soft_cap: Any,
    mask_value: Any,
    k_scale: Any,
    v_scale: Any,
) -> Interleaved:
    """Checks the arguments by the names that they have there.

    Raises: TypeError or ValueError with the argument's name, what it is and what would be right.
    """
    q, kv_pages = array("q", q), array("kv_pages", kv_pages)
    if q.ndim != 3:
        raise ValueError(f"q has shape {q.shape}; expected [tokens, N, H]")
    if kv_pages.ndim != 4 or kv_pages.shape[2] % 2:
        raise ValueError(
            f"kv_pages has shape {kv_pages.shape}; expected [P, S, 2 * K, H], keys and values by "
            "turns"
        )
    quantized = kv_pages.dtype.name in QUANTIZED
    if q.dtype.name not in FLOATS or (q.dtype != kv_pages.dtype and not quantized):
        raise TypeError(
            f"q has dtype {q.dtype} and kv_pages {kv_pages.dtype}; expected one dtype of "
            f"{', '.join(FLOATS)}, or kv_pages of {' or '.join(QUANTIZED)}"
        )
    check_head_dim("q", q)
    if q.shape[2] != kv_pages.shape[3]:
        raise ValueError(
            f"kv_pages has shape {kv_pages.shape} and q {q.shape}; expected equal head dims (the "
            "last)"
        )
    q_heads, kv_heads = q.shape[1], kv_pages.shape[2] // 2
    if q_heads % kv_heads or not q_heads if kv_heads else q_heads:
        raise ValueError(
            f"q has {q_heads} heads (shape {q.shape}) and kv_pages keys of {kv_heads} (shape "
            f"{kv_pages.shape}); expected a multiple of them"
        )
    names = ("kv_lens", "page_indices", "cu_q_lens", "num_seqs")
    given = (kv_lens, page_indices, cu_q_lens, num_seqs)
    lens, table, starts, count = (integers(*x, -1) for x in zip(names, given, strict=True))
    if table.ndim != 2 or table.shape[0] == 0:
        raise ValueError(
            f"page_indices has shape {table.shape}; expected [B, M], M pages for each of B requests"
        )
    requests = table.shape[0]
    for name, x, expected in (
        ("kv_lens", lens, (requests,)),
        ("cu_q_lens", starts, (requests + 1,)),
        ("num_seqs", count, (1,)),
    ):
        if x.shape != expected:
            raise ValueError(
                f"{name} has shape {x.shape}; expected {expected}, as page_indices is {table.shape}"
            )
    if sliding_window is not None and (
        isinstance(sliding_window, bool)
        or not isinstance(sliding_window, numbers.Integral)
        or sliding_window < 1
    ):
        raise ValueError(f"sliding_window is {sliding_window!r}; expected an int from 1, or None")
    if soft_cap is not None and real("soft_cap", soft_cap) <= 0:
        raise ValueError(f"soft_cap is {soft_cap}; expected a number above 0, or None")
    if mask_value is not None and real("mask_value", mask_value) > _MASK_VALUE:
        raise ValueError(
            f"mask_value is {mask_value}; expected None or at most {_MASK_VALUE}: hidden keys have "
            "no weight here"
        )
    scale = real("sm_scale", sm_scale)
    if k_scale is not None:
        scale = real("sm_scale * k_scale", scale * real("k_scale", k_scale))
    return Interleaved(
        q,
        kv_pages,
        (lens, table, starts, count[0]),
        scale,
        1.0 if quantized else None,
        None if sliding_window is None else int(sliding_window) - 1,
        soft_cap,
        None if v_scale is None else real("v_scale", v_scale),
    )
