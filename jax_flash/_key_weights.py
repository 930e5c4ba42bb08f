"""The weight that each key got: sums of the columns of softmax weights, in linear memory.

Key s has weight exp(score − lse of t) from query t. Summed over queries it is exp(lse of s), where
keys attend to queries, −lse of each query is its bias, and what hides a key from a query hides the
query from the key. So a second forward pass computes it. The gradient of value would take a
backward pass, with gradients of query and key that nobody asked for; it is taken where scores are
more than products.
"""

from __future__ import annotations

from typing import Annotated, Any, Unpack

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_flash import _keywords, _validate
from jax_flash._terms import FLOATS, sum_dtype
from jax_flash.attention import Options, flash_attention

# What means the same where queries and keys change places, by the name that it has then.
_TURNED = {
    "query_seq_lengths": "key_value_seq_lengths",
    "query_segment_ids": "key_value_segment_ids",
    "query_positions": "key_value_positions",
}
_TURNED |= {other: name for name, other in _TURNED.items()}
_TURNED |= {name: name for name in ("scale", "causal_align", "precision", "backend")}
_IN_LSE = ("sinks", "deterministic")
_CHANGED = ("is_causal", "local_window_size", "mask")
_NOT_TAKEN = ("dropout_rate", "dropout_key")


def key_weights(
    query: Annotated[ArrayLike, "*B T N H"],
    key: Annotated[ArrayLike, "*B S K H"],
    *,
    lse: Annotated[ArrayLike, "*B T N"] | None = None,
    **options: Unpack[Options[ArrayLike]],
) -> Annotated[jax.Array, "*B S K"]:
    """Computes the weight that each key got in attention, summed over the queries that read it.

    A cache with room for a part of its keys keeps those of most weight (Scissorhands). Memory is
    linear in T and S, and the time about that of one forward pass, or of two without lse: keys
    attend to queries, with −lse as bias. With bias, softcap, score_mod, a block_mask or indices it
    is the gradient of value, rounded to query's dtype, which takes a forward and a backward pass.

    All weights of a query sum to 1, less its sink's, and to 0 where it sees nothing. What NaN or
    infinity reaches is as in `flash_attention`.

    Arguments:
      query: `[*B, T, N, H]`, float32, bfloat16, float16, or in x64 mode float64.
      key: `[*B, S, K, H]`, in query's dtype; K divides N.
      lse: `[*B, T, N]`, float32 or float64, what `flash_attention` (`return_lse=True`),
        `decode_attention` or `ragged_paged_attention` gave for these options; None: it is computed.
      **options: those of `flash_attention`, but for dropout_rate and dropout_key.

    Returns:
      `[*B, S, K]`, float32, or float64 if query is: of each key head, over all T queries and the
      N // K query heads that read it.

    Raises:
      TypeError, ValueError: a wrong argument, with its shape or value and what would be right.
      NotImplementedError: a named backend that cannot run the problem, with the reason.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from jax_flash import key_weights
      >>> query = jax.random.normal(jax.random.key(0), (1, 100, 8, 64))
      >>> key = jax.random.normal(jax.random.key(1), (1, 100, 2, 64))
      >>> weights = key_weights(query, key, is_causal=True)
      >>> weights.shape, round(float(weights.sum()))  # each of 100 * 8 queries gives 1
      ((1, 100, 2), 800)
      >>> _, kept = jax.lax.top_k(weights.sum(-1), 20)

    Paper: Liu et al., Scissorhands (arXiv:2305.17118).
    """
    others = ("bias", "softcap", "score_mod", "block_mask", "indices")
    known = (*_TURNED, *_IN_LSE, *_CHANGED, *others)
    _keywords.check("key_weights", options, ("query", "key", "lse", *known))
    given: dict[str, Any] = {name: x for name, x in options.items() if x is not None}
    q, k = _validate.array("query", query), _validate.array("key", key)
    if q.dtype.name not in FLOATS:
        raise TypeError(f"query has dtype {q.dtype}; expected one of {', '.join(FLOATS)}")

    def attend(value: jax.Array) -> tuple[jax.Array, jax.Array]:
        return flash_attention(q, k, value, return_lse=True, **given)

    value = jnp.zeros((*k.shape[:-1], 8), k.dtype)  # the least that all kernels run without padding
    turned = given.keys() <= {*_TURNED, *_IN_LSE, *_CHANGED}
    if lse is not None or not turned:
        out, expected = jax.eval_shape(attend, value)  # refuses what is wrong by its name
    if lse is not None:
        lse = _validate.array("lse", lse)
        if lse.shape != expected.shape or lse.dtype != sum_dtype(lse.dtype):
            raise ValueError(
                f"lse has shape {lse.shape} and dtype {lse.dtype}; expected [*B, T, N] = "
                f"{expected.shape}, float32 or float64, as of flash_attention(..., return_lse=True)"
            )
    if not turned:
        _, pull = jax.vjp(lambda value: attend(value)[0], value)
        (weights,) = pull(jnp.ones(out.shape, out.dtype))
        return weights[..., 0].astype(sum_dtype(q.dtype))
    if lse is None:
        _, lse = attend(value)
    return _of_lse(q, k, lse, given)


def _of_lse(q: jax.Array, k: jax.Array, lse: jax.Array, given: dict[str, Any]) -> jax.Array:
    """Computes what `key_weights` returns from the lse of a call without terms of another kind."""
    *batch, kv_len, kv_heads, _ = k.shape
    q_heads = q.shape[-2]
    turned = {_TURNED[name]: x for name, x in given.items() if name in _TURNED}
    window = given.get("local_window_size")
    left, right = window if isinstance(window, tuple | list) else (window, window)
    right = 0 if given.get("is_causal") else right
    if (left, right) != (None, None):
        turned["local_window_size"] = right, left
    if (mask := given.get("mask")) is not None:
        turned["mask"] = jnp.swapaxes(jnp.atleast_2d(jnp.asarray(mask)), -1, -2)
    # A query that sees nothing has lse −inf.
    bias = jnp.where(lse == -jnp.inf, -jnp.inf, -lse)
    bias = jnp.swapaxes(bias, -1, -2)[..., None, :]  # [*B, N, 1, T]
    group = q_heads // kv_heads if kv_heads else 1
    keys = k if group == 1 else jnp.repeat(k, group, axis=-2)
    value = jnp.zeros((*q.shape[:-1], 8), q.dtype)
    _, turned_lse = flash_attention(keys, q, value, bias=bias, return_lse=True, **turned)
    return jnp.exp(turned_lse).reshape(*batch, kv_len, kv_heads, group).sum(-1)
