"""Attention written as plainly as possible, with the meaning of `flash_attention`.

No tiles, no tuning, no native code; memory grows with T x S. It computes in float32, or in float64
when the inputs are float64, and JAX differentiates it. Tests hold it against plain NumPy, and what
JAX makes of a backend against it.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash._philox import keep_mask, round_rate
from jax_flash.block_masks import BlockMask


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    scale: float | jax.Array | None = None,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    block_mask: BlockMask | None = None,
    is_causal: bool = False,
    causal_align: str = "top_left",
    local_window_size: int | Sequence[int | None] | None = None,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    query_segment_ids: jax.Array | None = None,
    key_value_segment_ids: jax.Array | None = None,
    query_positions: jax.Array | None = None,
    key_value_positions: jax.Array | None = None,
    indices: jax.Array | None = None,
    softcap: float | None = None,
    score_mod: Callable[..., jax.Array] | None = None,
    sinks: jax.Array | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    return_lse: bool = False,
):
    """Computes softmax(softcap(scale * query keyᵀ + bias)) value over the visible keys.

    Arguments are those of `jax_flash.flash_attention`, unchecked.

    Returns: out `[*B, T, N, Hv]` in float32, or in float64 if an input is float64; with
    `return_lse` also the log-sum-exp `[*B, T, N]`.

    Raises: nothing of its own; wrong shapes fail where JAX meets them.

    Examples:
      >>> import jax
      >>> from jax_flash import reference
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 16, 4, 32))
      >>> reference.attention(q, k, v, is_causal=True).shape
      (2, 16, 4, 32)

    Paper: Vaswani et al. (arXiv:1706.03762).
    """
    wide = any(jnp.result_type(x) == jnp.float64 for x in (query, key, value))
    dtype = jnp.float64 if wide else jnp.float32
    q, k, v = (jnp.asarray(x, dtype) for x in (query, key, value))
    *batch, q_len, q_heads, head_dim = q.shape
    kv_len, kv_heads = k.shape[-3], k.shape[-2]
    k, v = (jnp.repeat(x, q_heads // kv_heads, axis=-2) for x in (k, v)) if kv_heads else (k, v)
    scale = jnp.asarray(1.0 / math.sqrt(head_dim) if scale is None else scale, dtype)

    visible = _visible(
        (*batch, q_heads, q_len, kv_len),
        mask=mask,
        block_mask=block_mask,
        window=_window(is_causal, local_window_size),
        bottom_right=causal_align == "bottom_right",
        query_lengths=query_seq_lengths,
        key_value_lengths=key_value_seq_lengths,
        query_segments=query_segment_ids,
        key_value_segments=key_value_segment_ids,
        query_positions=query_positions,
        key_value_positions=key_value_positions,
        indices=indices,
    )

    # NaN and inf leave the matrix products, where 0 * NaN would spread them, and return as NaN
    # where they are seen.
    (q, q_bad), (k, k_bad), (v, v_bad) = (_split_bad(x) for x in (q, k, v))
    logits = scale * jnp.einsum("...tnh,...snh->...nts", q, k, precision="highest")
    logits = logits + q_bad[..., :, None] + k_bad[..., None, :]
    if bias is not None:
        logits = logits + jnp.broadcast_to(jnp.asarray(bias, dtype), logits.shape)
    if softcap is not None:
        # The slope of tanh at a hidden NaN would be NaN, and so would zero times it.
        logits = jnp.where(visible, logits, 0.0)
        logits = softcap * jnp.tanh(logits / softcap)
    if score_mod is not None:
        # So would the slope at a hidden score; what the function reads there is its own matter.
        logits = _map_scores(score_mod, jnp.where(visible, logits, 0.0))
    visible &= logits != -jnp.inf
    logits = jnp.where(visible, logits, -jnp.inf)

    largest = jnp.max(logits, axis=-1, initial=-jnp.inf)
    if sinks is not None:
        sinks = jnp.asarray(sinks, dtype).reshape(*(1 for _ in batch), -1, 1)
        largest = jnp.maximum(largest, sinks)
    empty = largest == -jnp.inf
    largest = jax.lax.stop_gradient(jnp.where(empty, 0.0, largest))
    weights = jnp.exp(logits - largest[..., None])
    total = jnp.sum(weights, axis=-1)
    if sinks is not None:
        total = total + jnp.exp(sinks - largest)
    total = jnp.where(empty, 1.0, total)
    lse = jnp.where(empty, -jnp.inf, largest + jnp.log(total))
    weights = weights / total[..., None]

    dropout_rate = round_rate(dropout_rate)
    if dropout_rate > 0.0:
        keep = _dropout_mask(dropout_key, dropout_rate, weights.shape)
        weights = jnp.where(keep, weights / (1.0 - dropout_rate), 0.0)
    weights = weights + jnp.where(visible, v_bad[..., None, :], 0.0)
    out = jnp.einsum("...nts,...snh->...tnh", weights, v, precision="highest")
    # No step above differentiates a row that sees nothing: its cotangent may be anything.
    sees = jnp.swapaxes(jnp.any(visible, axis=-1), -1, -2)[..., None]
    out = jnp.where(sees, out, 0.0)
    return (out, jnp.swapaxes(lse, -1, -2)) if return_lse else out


def _window(is_causal, local_window_size) -> tuple[int | None, int | None]:
    if local_window_size is None or np.ndim(local_window_size) == 0:
        local_window_size = (local_window_size, local_window_size)
    left, right = local_window_size
    return left, 0 if is_causal else right


def _visible(
    shape,
    *,
    mask,
    block_mask,
    window,
    bottom_right,
    query_lengths,
    key_value_lengths,
    query_segments,
    key_value_segments,
    query_positions,
    key_value_positions,
    indices,
) -> jax.Array:
    """Computes bool `[*B, N, T, S]`: which keys each query attends to."""
    *batch, _, q_len, kv_len = shape
    one = (1,) * len(batch)  # all of one rank, for jax_numpy_rank_promotion
    query = jnp.arange(q_len, dtype=jnp.int32).reshape(*one, 1, -1, 1)
    key = jnp.arange(kv_len, dtype=jnp.int32).reshape(*one, 1, 1, -1)

    def of_rows(lengths, limit):  # [*B, 1, 1, 1]
        lengths = jnp.full(batch, limit) if lengths is None else jnp.clip(lengths, 0, limit)
        return lengths.astype(jnp.int32)[..., None, None, None]

    q_lengths, kv_lengths = of_rows(query_lengths, q_len), of_rows(key_value_lengths, kv_len)

    visible = (query < q_lengths) & (key < kv_lengths)
    if bottom_right:
        query = query + kv_lengths - q_lengths
    if query_positions is not None:
        query = jnp.asarray(query_positions, jnp.int32)[..., None, :, None]
    if key_value_positions is not None:
        key = jnp.asarray(key_value_positions, jnp.int32)[..., None, None, :]
    # A difference of two int32, if not negative, is exact as uint32.
    before = jnp.where(key < query, (query - key).astype(jnp.uint32), 0)
    after = jnp.where(key > query, (key - query).astype(jnp.uint32), 0)
    for distance, side in zip((before, after), window, strict=True):
        if side is not None:
            visible &= distance <= jnp.uint32(min(side, 2**32 - 1))
    if query_segments is not None:
        visible &= query_segments[..., None, :, None] == key_value_segments[..., None, None, :]
    if mask is not None:
        visible &= jnp.broadcast_to(mask, shape)
    if block_mask is not None:
        visible &= jnp.broadcast_to(block_mask.dense()[..., :q_len, :kv_len], shape)
    if indices is not None:
        keys = jnp.arange(kv_len, dtype=jnp.int32)
        visible &= jnp.any(indices[..., None] == keys, axis=-2)[..., None, :, :]
    return jnp.broadcast_to(visible, shape)


def _split_bad(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Splits `[*B, T, N, H]` into x with 0 for NaN and inf, and `[*B, N, T]`: NaN where x had any.

    Elsewhere the second array is 0.
    """
    finite = jnp.isfinite(x)
    bad = jnp.where(jnp.all(finite, axis=-1), 0.0, jnp.nan).astype(x.dtype)
    return jnp.where(finite, x, 0.0), jnp.swapaxes(bad, -1, -2)


def _map_scores(function, scores: jax.Array) -> jax.Array:
    """Applies a function of (score, batch, head, query, key) to `[*B, N, T, S]`."""
    *batch, heads, q_len, kv_len = scores.shape
    rows = scores.reshape(math.prod(batch), heads, q_len, kv_len)
    indices = [jnp.arange(size, dtype=jnp.int32) for size in rows.shape]
    for axis in reversed(range(4)):
        axes = [0, *(0 if other == axis else None for other in range(4))]
        function = jax.vmap(function, in_axes=axes)
    return function(rows, *indices).astype(scores.dtype).reshape(scores.shape)


def _dropout_mask(key, rate: float, shape) -> jax.Array:
    """Computes bool `[*B, N, T, S]`: which weights dropout keeps."""
    *batch, heads, q_len, kv_len = shape
    word = jax.random.key_data(key)
    word = word if word.shape == (2,) else jax.random.bits(key, (2,), jnp.uint32)
    batch_id = jnp.arange(math.prod(batch), dtype=jnp.uint32).reshape(*batch, 1)
    head_id = jnp.arange(heads, dtype=jnp.uint32)
    state = jnp.stack(jnp.broadcast_arrays(word[0], word[1], head_id, batch_id), axis=-1)
    return keep_mask(state, rate, 0, 0, q_len, kv_len)
