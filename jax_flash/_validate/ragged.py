"""From the arguments of `ragged_paged_attention` to arrays, or an error."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_flash import _debug
from jax_flash._ops.decode import MOST_QUERIES
from jax_flash._ops.ragged import Ragged
from jax_flash._validate.arrays import array, check_head_dim, in_full
from jax_flash._validate.decode import Caches, integers, problem_of

_NAMES = ("key_pages", "value_pages")


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
    caches = Caches.of(key_pages, value_pages, page_table, (requests,), _NAMES)
    caches.check_query(q)
    appends, new = caches.new_of(new_key, new_value, q.shape[:1])
    q, problem, terms = problem_of(q, caches, (1,), MOST_QUERIES, **options)
    call = Ragged(
        problem,
        backend,
        rotary_base=caches.rotary_base_of(rotary_base),
        value_dim=caches.value_dim_of(value_dim),
        paged=True,
        appends=appends,
    )
    _look(call, caches, *given, rows, q.shape[0])
    operands = {
        "q": q,
        "k": caches.key,
        "v": caches.value,
        "lengths": lengths,
        "page_table": caches.page_table,
        "starts": starts,
        "rows": rows,
        **new,
        **terms,
    }
    return call, {name: x for name, x in operands.items() if x is not None}


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
