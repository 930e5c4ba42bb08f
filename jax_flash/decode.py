"""The public calls of decoding: `decode_attention` to a cache, `fill_cache` and `rotate` before it.

Read next: `_validate/decode.py` for what the arguments may be, `_ops/decode.py` for how the call
is batched, split over devices and lowered.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import export
from jax.typing import ArrayLike

from jax_flash import _cache, _latent_rows, _rotary, _validate
from jax_flash._keywords import hinted
from jax_flash._ops import decode as _op
from jax_flash._validate import decode as _validate_decode
from jax_flash.attention import Window


class Decoded(NamedTuple):
    """What `decode_attention` returns.

    Attributes:
      out: `[*B, T, N, Hv]`, in query's dtype.
      lse: `[*B, T, N]`, float32, or float64 if query is.
      key_cache, value_cache: as they are then; value_cache is None where there is none.
    """

    out: Annotated[jax.Array, "*B T N Hv"]
    lse: Annotated[jax.Array, "*B T N"]
    key_cache: jax.Array
    value_cache: Any  # a jax.Array, or None where there is none


export.register_namedtuple_serialization(Decoded, serialized_name="jax_flash.Decoded")


@hinted
def decode_attention(
    query: Annotated[ArrayLike, "*B T N H"],
    key_cache: Annotated[ArrayLike, "*B L K H"],
    value_cache: Annotated[ArrayLike, "*B L K Hv"] | None,
    lengths: Annotated[ArrayLike, "*B"],
    *,
    new_key: Annotated[ArrayLike, "*B T K H"] | None = None,
    new_value: Annotated[ArrayLike, "*B T K Hv"] | None = None,
    page_table: Annotated[ArrayLike, "*B M"] | None = None,
    key_scale: Annotated[ArrayLike, "*B K"] | None = None,
    value_scale: Annotated[ArrayLike, "*B K"] | None = None,
    rotary_base: float | None = None,
    value_dim: int | None = None,
    scale: Annotated[ArrayLike, ""] | None = None,
    local_window_size: Window | None = None,
    softcap: float | None = None,
    sinks: Annotated[ArrayLike, "N"] | None = None,
    indices: Annotated[ArrayLike, "*B T n"] | None = None,
    precision: str | jax.lax.Precision | None = None,
    backend: str | None = None,
) -> Decoded:
    """Computes attention of the newest positions to a cache of all, appending them to it first.

    The T queries are the last T of a row's `lengths` positions: query t stands at position
    lengths − T + t and sees positions 0 to its own. One that stands before position 0 sees nothing
    and gives out 0, lse −inf, or its sink.

    The cache is read where it lies, in parts that are merged, and never copied, but by "xla" on
    CPUs if it is float8_e4m3fn, or before jax 0.11 bfloat16. New keys and values are written into
    it: in place under jit where the caches are donated, or are the carry of a `lax.scan` or
    `while_loop`; else XLA copies the caches first.

    A row that is longer than its cache, or whose table has no page of the pool for a position that
    its queries see or that is written, gives NaN in out and lse. Nothing is written of a row that
    is longer, nor what has no page. No other row is touched. NaN or inf in slots past the length,
    behind the window or in pages that a row does not have reaches nothing. Under
    `jax_flash.debug_values()` such lengths and pages are errors that name the row.

    It has no derivative. Under vmap members that append have each a cache, others may share one.
    Under jit, leading dims and heads stay split over a mesh as query's are, without a collective;
    query heads no further than kv heads unless a device has one alone; rows that append to pages
    are whole on every device. (Under shard_map each device may have a pool of its own.)

    Arguments:
      query: `[*B, T, N, H]`, T from 1 to 64, float32, bfloat16, float16, or in x64 mode float64.
      key_cache: `[*B, L, K, H]`, or with a page table pages `[P, S, K, H]` of S positions each, in
        query's dtype, or float8_e4m3fn or int8 with scales; K divides N, and query head n reads
        head n // (N // K). Or uint8 `[..., 1, 656]`, rows as `pack_latent` packs them, for queries
        of bfloat16 and 576 features, value_dim 512.
      value_cache: `[*B, L, K, Hv]` or `[P, S, K, Hv]`; None: the values are the first `value_dim`
        features of the keys, as in latent attention (there K 1, H 576, value_dim 512).
      lengths: int32 `[*B]`, positions in the cache when the call returns, the new ones included.
      new_key, new_value: `[*B, T, K, H]` and `[*B, T, K, Hv]`, written to the queries' positions;
        those before position 0 are not. Without a value_cache new_key alone. None: the cache holds
        these positions already.
      page_table: int32 `[*B, M]`; position p of a row is in slot p % S of page page_table[p // S].
        Rows may have pages in common where none of them writes. Columns that a row does not need
        may hold anything, −1 for instance.
      key_scale, value_scale: of caches of eight bits, float32 above 0, one number, `[K]` or
        `[*B, K]`, of pages `[K]` or `[P, K]`: a key or value is what is stored times its scale. New
        ones are divided by it, rounded to nearest, ties to even, and saturated; NaN is 0 in int8,
        which has none. Without a value_cache key_scale alone.
      rotary_base: rotates query and new_key by their positions, paired by halves as in GPT-NeoX;
        None: not. Keys in the cache are rotated already.
      value_dim: see value_cache.
      scale: of the dot products; None: 1 / sqrt(H). As in `flash_attention`.
      local_window_size: positions visible to the (left, right) of a query's own, which is the last;
        None: all; an int counts to the left.
      softcap: c in c * tanh(logits / c), above 0.
      sinks: float `[N]`, one more logit for each head that joins the denominator and no value.
      indices: int32 `[*B, T, n]`, positions that each query reads, all of its heads alike, in any
        order: -1, or what is no position that it sees, reads nothing, and each stands there once.
        Positions, not slots, where there are pages. Pages that none of them lies in are not needed;
        one that is missing gives NaN in the queries that read there.
      precision: of float32 products, as in `flash_attention`; "default" is "high" on "cuda".
      backend: "cuda", "cpu" or "xla"; None: the first of them that runs the problem where the
        arrays are.

    Returns:
      `Decoded`, with out `[*B, T, N, Hv]` in query's dtype; lse `[*B, T, N]`, float32, or float64
      if query is; key_cache and value_cache as they are then.

    Raises:
      TypeError, ValueError: a wrong argument, with its shape or value and what would be right.
      NotImplementedError: a named backend that cannot run the problem, with the reason.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from jax_flash import decode_attention
      >>> cache = jnp.zeros((2, 1024, 2, 64))
      >>> query, new = jnp.ones((2, 1, 8, 64)), jnp.ones((2, 1, 2, 64))
      >>> lengths = jnp.array([1000, 17])
      >>> step = decode_attention(query, cache, cache, lengths, new_key=new, new_value=new)
      >>> step.out.shape
      (2, 1, 8, 64)

    Papers: Sanovar et al., LeanAttention (arXiv:2405.10480); Dao et al., Flash-Decoding (2023);
    Kwon et al., PagedAttention (arXiv:2309.06180); Su et al., RoFormer (arXiv:2104.09864).
    """
    call, operands = _validate_decode.prepare(
        query,
        key_cache,
        value_cache,
        lengths,
        new_key=new_key,
        new_value=new_value,
        page_table=page_table,
        key_scale=key_scale,
        value_scale=value_scale,
        rotary_base=rotary_base,
        value_dim=value_dim,
        scale=scale,
        local_window_size=local_window_size,
        softcap=softcap,
        sinks=sinks,
        indices=indices,
        precision=precision,
        backend=backend,
    )
    named = call.name_operands(operands) | _op.decode(call, *operands)

    lse = jnp.swapaxes(named["lse"], -1, -2)
    return Decoded(named["out"], lse, named["k"], named.get("v"))


@hinted
def fill_cache(
    key_cache: Annotated[ArrayLike, "*B L K H"],
    value_cache: Annotated[ArrayLike, "*B L K Hv"] | None,
    key: Annotated[ArrayLike, "*B T K H"],
    value: Annotated[ArrayLike, "*B T K Hv"] | None,
    lengths: Annotated[ArrayLike, "*B"],
    *,
    start: Annotated[ArrayLike, "*B"] | None = None,
    page_table: Annotated[ArrayLike, "*B M"] | None = None,
    key_scale: Annotated[ArrayLike, "*B K"] | None = None,
    value_scale: Annotated[ArrayLike, "*B K"] | None = None,
) -> tuple[jax.Array, Any]:
    """Writes the keys and values of a prompt, or of a part of it, into a cache or pages.

    Key t of a row goes to position start + t while that is below the row's length: the prompts of a
    batch may be of different lengths, padded to the right. What has no place in the cache or no
    page is not written. In place where the caches are donated, as in `decode_attention`, for which
    the keys are rotated already; on CPUs XLA copies one of float8_e4m3fn.

    Arguments:
      key_cache, value_cache, page_table, key_scale, value_scale: as in `decode_attention`.
      key: `[*B, T, K, H]`, in the caches' dtype, or in any floating one if they have eight bits.
      value: `[*B, T, K, Hv]`; None where value_cache is.
      lengths: int32 `[*B]`, positions in the cache when the call returns.
      start: int32 `[*B]`, those that were there before; None: 0.

    Returns: key_cache and value_cache as they are then, None where there is none.

    Raises:
      TypeError, ValueError: a wrong argument, with its shape or value and what would be right.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_flash import fill_cache
      >>> cache, prompts = jnp.zeros((2, 1024, 2, 64)), jnp.ones((2, 100, 2, 64))
      >>> keys, values = fill_cache(cache, cache, prompts, prompts, jnp.array([100, 7]))
    """
    new = _validate.array("key", key)
    if new.ndim < 3:
        raise ValueError(f"key has shape {new.shape}; expected [*B, T, K, H]")
    batch = new.shape[:-3]
    caches = _validate_decode.Caches.of(
        key_cache, value_cache, page_table, batch, key_scale=key_scale, value_scale=value_scale
    )
    arrays = caches.check_new(("key", "value"), key, value, new.shape[:-2])
    stop = _validate_decode.row_lengths("lengths", lengths, batch, "key", new.shape)
    first = jnp.int32(0)
    positions = jnp.arange(new.shape[-3], dtype=jnp.int32).reshape(*(1,) * len(batch), -1)
    if start is not None:
        first = _validate_decode.row_lengths("start", start, batch, "key", new.shape)
        positions = first[..., None] + positions
    caches.look(lengths, lambda: first, lambda: jnp.minimum(stop, first + new.shape[-3]))
    positions = jnp.where(positions < stop[..., None], positions, -1)
    if caches.latent_rows:
        arrays = [_latent_rows.pack_latent(x) for x in arrays]
    filled = [
        _cache.write(cache, x, positions, caches.page_table, scale=caches.scales.get(scale))
        for cache, x, scale in zip(
            (caches.key, caches.value), arrays, ("key_scale", "value_scale"), strict=False
        )
        if cache is not None
    ]
    return filled[0], filled[1] if len(filled) > 1 else None


def rotate(
    x: Annotated[ArrayLike, "*B T N H"],
    rotary_base: float,
    positions: Annotated[ArrayLike, "*B T"] | None = None,
) -> jax.Array:
    """Rotates queries or keys by their positions, as `decode_attention` with `rotary_base` does.

    (x[h], x[h + H/2]) is turned by the angle position · rotary_base^(−2h / H), in float32, or in
    float64 if x is. A prompt's queries and keys are rotated before `flash_attention` and
    `fill_cache`, which do not rotate.

    Arguments:
      x: `[*B, T, N, H]`, H even.
      rotary_base: 10000.0 in RoFormer.
      positions: int32 `[*B, T]`, or what broadcasts to it; None: 0 to T − 1.

    Returns: `[*B, T, N, H]` in x's dtype.

    Raises:
      TypeError, ValueError: a wrong argument, with its shape or value and what would be right.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_flash import rotate
      >>> rotate(jnp.ones((2, 100, 8, 64)), 1e4).shape
      (2, 100, 8, 64)

    Su et al., RoFormer (arXiv:2104.09864), paired by halves as in GPT-NeoX.
    """
    x, positions, base = _validate_decode.prepare_rotation(x, rotary_base, positions)
    return _rotary.rotate(x, positions, base)
