"""Attention for other libraries' places, where it takes more than a line: tokamax, Equinox.

Neither library is imported: what they pass is read by its attributes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_flash.attention import flash_attention

__all__ = ["equinox_attention", "tokamax_attention"]


def tokamax_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    mask: Any = None,
    logits_scale: Any = None,
    precision: Any = None,
    logits_soft_cap: float | None = None,
    q_sharding: Any = None,
) -> jax.Array:
    """Runs `flash_attention` as an implementation of `tokamax.dot_product_attention`.

    `implementation=(jax_flash.interop.tokamax_attention, "xla")` takes it where it can, and XLA
    elsewhere.

    Arguments:
      query, key, value: `[*B, T, N, H]`, `[*B, S, K, H]`, `[*B, S, K, Hv]`.
      bias: as in `flash_attention`.
      mask: tokamax's Mask. Its causality, its window, its lengths (q_end and k_end of one number a
        row) and its boolean mask are options here; ranges of each query or key become a mask.
      logits_scale: a number; anything else, as tokamax's AUTO: 1 / sqrt(H).
      precision, logits_soft_cap: precision and softcap of `flash_attention`.
      q_sharding: nothing: attention stays split as query is.

    Returns: `[*B, T, N, Hv]`.

    Raises:
      NotImplementedError: for quantized arrays, and a precision of several algorithms, so that
        tokamax takes the next implementation.
      TypeError, ValueError: as `flash_attention`.
    """
    if any(hasattr(x, "qvalue") for x in (query, key, value)):
        raise NotImplementedError("jax_flash takes arrays, not quantized ones")
    if not isinstance(precision, str | jax.lax.Precision | None):
        raise NotImplementedError(f"jax_flash has no precision {precision!r}")
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    number = isinstance(logits_scale, float | int) or hasattr(logits_scale, "dtype")
    options = {}
    if mask is not None:
        options = _of_mask(mask, query.shape[:-3], query.shape[-3], key.shape[-3])
    return flash_attention(
        query,
        key,
        value,
        bias=bias,
        scale=logits_scale if number else None,
        softcap=logits_soft_cap,
        precision=precision,
        **options,
    )


def _of_mask(mask: Any, batch: tuple[int, ...], q_len: int, kv_len: int) -> dict[str, Any]:
    """Reads tokamax's Mask as options of flash_attention."""
    options: dict[str, Any] = {}
    rest = {"bool_mask": mask.bool_mask}
    for name, end in (("query", mask.q_end), ("key_value", mask.k_end)):
        if end is not None and end.shape[-2:] == (1, 1):
            lengths = jnp.broadcast_to(end[..., 0, 0], batch)
            options[f"{name}_seq_lengths"] = lengths.astype(jnp.int32)
        elif end is not None:
            rest["q_end" if name == "query" else "k_end"] = end
    rest |= {name: getattr(mask, name) for name in ("q_start", "k_start")}
    causal = mask.causal_mask
    if causal is not None and _is_band(causal):
        # A query at q sees keys from q + offset - window + 1 to q + offset.
        window = causal.window_size
        left = None if window is None else window - causal.offset - 1
        if left is not None and left < 0:
            raise NotImplementedError("jax_flash has no window that begins after its query")
        options["is_causal"] = causal.offset == 0
        options["local_window_size"] = (left, causal.offset)
    elif causal is not None:
        rest["causal_mask"] = causal
    rest = {name: x for name, x in rest.items() if x is not None}
    if [*rest] == ["bool_mask"]:
        options["mask"] = rest["bool_mask"]
    elif rest:
        options["mask"] = type(mask)(**rest).as_array(q_len, kv_len)
    return options


def _is_band(causal: Any) -> bool:
    """Tells whether tokamax's CausalMask is of numbers, and begins at no key before the query's."""
    offset, window = causal.offset, causal.window_size
    return isinstance(offset, int) and offset >= 0 and (window is None or isinstance(window, int))


def equinox_attention(
    layer: Any,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: ArrayLike | None = None,
    **options: Any,
) -> jax.Array:
    """Runs an `equinox.nn.MultiheadAttention`'s projections around `flash_attention`.

    Equinox's layer has no place for another attention, and vmaps a plain softmax over its heads.

    Arguments:
      layer: the MultiheadAttention, with its parameters as they are. Its dropout is not applied.
      query, key, value: `[T, features]`, `[S, features]`, `[S, features]`; jax.vmap adds a batch.
      mask: bool `[T, S]` or `[heads, T, S]`.
      options: of `flash_attention`, is_causal=True for instance, which costs less than a mask.

    Returns: `[T, output_size]`.

    Raises: TypeError where `layer` has not such projections.

    Examples:
      >>> import equinox as eqx, jax, jax.numpy as jnp  # doctest: +SKIP
      >>> from jax_flash.interop import equinox_attention  # doctest: +SKIP
      >>> layer = eqx.nn.MultiheadAttention(4, 64, key=jax.random.key(0))  # doctest: +SKIP
      >>> x = jnp.ones((128, 64))  # doctest: +SKIP
      >>> equinox_attention(layer, x, x, x, is_causal=True).shape  # doctest: +SKIP
      (128, 64)
    """
    names = ("query_proj", "key_proj", "value_proj", "output_proj", "num_heads")
    if not all(hasattr(layer, name) for name in names):
        kind = type(layer).__name__
        raise TypeError(f"layer is {kind}; expected an equinox.nn.MultiheadAttention")
    q, k, v = (
        jax.vmap(project)(x).reshape(x.shape[0], layer.num_heads, -1)
        for project, x in (
            (layer.query_proj, query),
            (layer.key_proj, key),
            (layer.value_proj, value),
        )
    )
    out = flash_attention(q, k, v, mask=mask, **options)
    return jax.vmap(layer.output_proj)(out.reshape(out.shape[0], -1))
