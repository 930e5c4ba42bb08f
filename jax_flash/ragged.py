"""The public call of serving: `ragged_paged_attention`, a mixed batch of requests over pages.

Read next: `_validate/ragged.py` for what the arguments may be, `_ops/ragged.py` for how requests
become rows of `decode_attention`.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import jax
from jax import export
from jax.typing import ArrayLike

from jax_flash import _tree
from jax_flash._keywords import hinted
from jax_flash._ops import ragged as _op
from jax_flash._ops import shared as _op_shared
from jax_flash._validate import ragged as _validate_ragged
from jax_flash.attention import Window


class Attended(NamedTuple):
    """What `ragged_paged_attention` returns.

    Attributes:
      out: `[tokens, N, Hv]`, in query's dtype.
      lse: `[tokens, N]`, float32, or float64 if query is.
      key_pages, value_pages: as they are then; value_pages is None where there is none.
    """

    out: Annotated[jax.Array, "tokens N Hv"]
    lse: Annotated[jax.Array, "tokens N"]
    key_pages: jax.Array
    value_pages: Any  # a jax.Array, or None where there is none


export.register_namedtuple_serialization(Attended, serialized_name="jax_flash.Attended")


@hinted
def ragged_paged_attention(
    query: Annotated[ArrayLike, "tokens N H"],
    key_pages: Annotated[ArrayLike, "P S K H"],
    value_pages: Annotated[ArrayLike, "P S K Hv"] | None,
    lengths: Annotated[ArrayLike, "B"],
    page_table: Annotated[ArrayLike, "B M"],
    query_starts: Annotated[ArrayLike, "B+1"],
    rows: Annotated[ArrayLike, ""] | None = None,
    *,
    new_key: Annotated[ArrayLike, "tokens K H"] | None = None,
    new_value: Annotated[ArrayLike, "tokens K Hv"] | None = None,
    key_scale: Annotated[ArrayLike, "P K"] | None = None,
    value_scale: Annotated[ArrayLike, "P K"] | None = None,
    shared_pages: Annotated[ArrayLike, "C"] | None = None,
    ancestors: Annotated[ArrayLike, "tokens A"] | None = None,
    indices: Annotated[ArrayLike, "tokens n"] | None = None,
    rotary_base: float | None = None,
    value_dim: int | None = None,
    scale: Annotated[ArrayLike, ""] | None = None,
    local_window_size: Window | None = None,
    softcap: float | None = None,
    sinks: Annotated[ArrayLike, "N"] | None = None,
    precision: str | jax.lax.Precision | None = None,
    backend: str | None = None,
) -> Attended:
    """Computes attention of a mixed batch to pages: prefill, chunks of it, and decoding in one.

    The tokens of all requests lie one behind the other: those of request b are query_starts[b] to
    before query_starts[b + 1], any number of them, and are the last of its lengths[b] positions.
    Each sees its own position and those before it, or what `ancestors` say. New keys and values of
    all tokens are written to the pages first: in place under jit where the pages are donated, as in
    `decode_attention`.
    (On CPUs XLA copies pages of float8_e4m3fn to write to them, before jax 0.11 those of bfloat16.)

    Shapes say how much is compiled, contents how much is computed: one program serves any mixture
    of requests of at most so many tokens, B requests and M pages each. A request of one token is a
    row of `decode_attention`. On GPUs the tokens of others are computed by the kernel of dense
    calls, with keys from pages: bfloat16 and float16, head dims up to 256 that 8 divides, values
    of their own, and place for 64 tokens times query heads for each multiprocessor (an H100 or
    H200: 8448; in pages of a multiple of 8 positions its own kernel, else that of other GPUs).
    There bfloat16 queries have pages of eight bits copied to bfloat16 ahead of it, where a request
    has so many tokens that this takes less time, and while copies take at most 1 GiB.
    Otherwise they are cut on the device into pieces, each a row: of up to 64 tokens, and of fewer
    where B is more than 3/64 of the tokens. So choose B and the place for tokens near what there
    is.

    A token that belongs to no request gives out 0 and lse −inf. Length, table and start of requests
    from `rows` on are not read. NaN or inf in pages that a request does not have, in slots past
    its length or behind its window, and in other requests' tokens reaches nothing.

    A request gives NaN in out and lse of all its tokens, and writes nothing, if its length is
    beyond its table or less than its tokens, if its table has no page of the pool for a position
    that its tokens see or are written to, or if its start is beyond its end or the tokens. No
    other request is touched. Under `jax_flash.debug_values()` these are errors that name it.

    It has no derivative. Under vmap members that append have each their pages, others may share
    them. Under jit heads stay split over a mesh as query's are, without a collective, kv heads as
    in `decode_attention`. (Under shard_map each device may have a pool of its own.)

    Arguments:
      query: `[tokens, N, H]`, float32, bfloat16, float16, or in x64 mode float64.
      key_pages: `[P, S, K, H]`, P pages of S positions each, in query's dtype, or float8_e4m3fn or
        int8 with scales; K divides N, and query head n reads head n // (N // K). Or uint8
        `[P, S, 1, 656]`, packed rows as in `decode_attention`, without shared_pages and ancestors.
      value_pages: `[P, S, K, Hv]`; None: the values are the first `value_dim` features of the keys.
      lengths: int32 `[B]`, positions of each request when the call returns, the new ones included.
      page_table: int32 `[B, M]`; position p of request b is in slot p % S of page
        page_table[b, p // S]. Requests may have pages in common where none of them writes. Columns
        that a request does not need may hold anything, −1 for instance.
      query_starts: int32 `[B + 1]`, in ascending order, equal where a request has no token.
      rows: int32 `[]`, how many requests are live, the first ones; None: all.
      new_key, new_value: `[tokens, K, H]` and `[tokens, K, Hv]`, written to the tokens' positions.
        Without value_pages new_key alone. None: the pages hold these positions already.
      key_scale, value_scale: of pages of eight bits, float32 above 0, one number, `[K]` or
        `[P, K]`, as in `decode_attention`.
      shared_pages: int32 `[C]`, C at most M: pages that requests begin with, −1 behind them. They
        are read once for all requests whose table begins with all of them and whose tokens are
        behind them; others are computed as ever, and all of them where B requests would read less
        than 134 MB of C pages, or 537 MB where two kernels compute it: head dims up to 64 and
        beyond 128, pages of eight bits, softcap, more tokens than requests, or fewer than 256
        query rows of a kv head; on CPUs 34 MB. Without a window. None: each reads its own.
      ancestors: bool `[tokens, A]`, for trees of speculation: which of its request's tokens in this
        call a token sees, its own always, beside all positions before them. With rotary_base it
        stands behind those that it sees, so branches of a tree begin at one position; keys lie in
        the pages in the order of tokens. Those of a request of more than A tokens see what came
        before, as without. Without a window.
      indices: int32 `[tokens, n]`, positions of its request that each token reads, as in
        `decode_attention`. Without shared_pages and ancestors.
      rotary_base, value_dim, scale, local_window_size, softcap, sinks, precision, backend: as
        there.

    Returns:
      `Attended`, with out `[tokens, N, Hv]` in query's dtype; lse `[tokens, N]`, float32, or
      float64 if query is; key_pages and value_pages as they are then.

    Raises:
      TypeError, ValueError: a wrong argument, with its shape or value and what would be right.
      NotImplementedError: a named backend that cannot run the problem, with the reason.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_flash import ragged_paged_attention
      >>> pages = jnp.zeros((16, 16, 2, 64))
      >>> query, new = jnp.ones((8, 8, 64)), jnp.ones((8, 2, 64))
      >>> lengths = jnp.array([40, 6, 0])  # one token after 39, a prompt of 6, and none
      >>> table = jnp.array([[3, 0, 7], [5, -1, -1], [-1, -1, -1]])
      >>> starts = jnp.array([0, 1, 7, 7])
      >>> step = ragged_paged_attention(
      ...     query, pages, pages, lengths, table, starts, 2, new_key=new, new_value=new
      ... )
      >>> step.out.shape
      (8, 8, 64)

    Papers: Kwon et al., PagedAttention (arXiv:2309.06180); Agrawal et al., Sarathi-Serve
    (arXiv:2403.02310); Sanovar et al., LeanAttention (arXiv:2405.10480); Juravsky et al., Hydragen
    (arXiv:2402.05099).
    """
    call, operands = _validate_ragged.prepare(
        query,
        key_pages,
        value_pages,
        lengths,
        page_table,
        query_starts,
        rows,
        new_key=new_key,
        new_value=new_value,
        key_scale=key_scale,
        value_scale=value_scale,
        shared_pages=shared_pages,
        ancestors=ancestors,
        indices=indices,
        rotary_base=rotary_base,
        value_dim=value_dim,
        scale=scale,
        local_window_size=local_window_size,
        softcap=softcap,
        sinks=sinks,
        precision=precision,
        backend=backend,
    )
    op = _tree if ancestors is not None else _op if shared_pages is None else _op_shared
    named = op.attend(call, operands)
    return Attended(named["out"], named["lse"], named["k"], named.get("v"))
