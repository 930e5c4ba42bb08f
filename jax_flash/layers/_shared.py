"""What the Linen and NNX layers share: Flax's arguments in flash_attention's terms.

The attention itself is `jax_flash.flash_attention`; nothing here computes a score or a softmax.
Read next: `_decoding.py`, for attention beside a cache.
"""

import math
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_flash import _keywords
from jax_flash.attention import LayerOptions, flash_attention
from jax_flash.attention import Options as AttentionOptions

# The keywords of flash_attention that both `attention_fn` take besides Flax's own.
Options = LayerOptions[ArrayLike]


def flax_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    options: Options,
    sow: Callable[[jax.Array], Any] | None,
    *,
    bias: jax.Array | None,
    mask: jax.Array | None,
    is_causal: bool,
    dropout_rng: jax.Array | None,
    dropout_rate: float,
    deterministic: bool,
    precision: str | jax.lax.Precision | None,
    sown_dtype: Any = None,
) -> jax.Array:
    """flash_attention from what Flax passes to an attention function.

    Args:
      query: [*B, T, N, H].
      key: [*B, S, K, H].
      value: [*B, S, K, Hv].
      options: flash_attention's own keywords.
      sow: takes the weights [*B, N, T, S] before dropout; None where nobody asks for them.
      bias: float, broadcastable to [*B, N, T, S].
      mask: bool or numbers (nonzero means True), broadcastable to [*B, N, T, S].
      is_causal: query i sees keys 0..i.
      dropout_rng: key for dropout.
      dropout_rate: share of the weights that dropout removes.
      deterministic: no dropout.
      precision: as in flash_attention.
      sown_dtype: of the weights that are sown, and what they are computed in; None: query's.

    Returns:
      [*B, T, N, Hv].

    Raises:
      TypeError: an option that is none.
      ValueError: a window in a decoding step, without what tells where its query stands.
    """
    check_options(options)
    mask = boolean(mask)
    decoding = is_decoding(mask, query, key)
    has_position = options.get("query_positions") is not None
    placed = has_position or (
        options.get("causal_align") == "bottom_right"
        and options.get("key_value_seq_lengths") is not None
    )
    if decoding and options.get("local_window_size") is not None and not placed:
        raise ValueError(
            "local_window_size needs the position of a query, which one query with a mask over "
            f"{key.shape[-3]} keys (a decoding step of Flax's layer) does not tell; expected also "
            "query_positions, or key_value_seq_lengths and causal_align='bottom_right', or "
            "jax_flash.layers' FlashAttention, whose cache knows it"
        )
    scores: AttentionOptions[ArrayLike] = {
        **options,
        "bias": bias,
        "mask": mask,
        "is_causal": is_causal and (has_position or not decoding),
        "precision": precision,
    }
    if sow is not None:
        # Attention to the unit vectors is the weights themselves.
        length, dtype = key.shape[-3], sown_dtype or query.dtype
        units = jnp.broadcast_to(jnp.eye(length, dtype=dtype)[:, None], (*key.shape[:-1], length))
        wide_query, wide_key = query.astype(dtype), key.astype(dtype)
        weights = flash_attention(wide_query, wide_key, units, **(scores | {"backend": "xla"}))
        sow(jnp.swapaxes(weights, -2, -3))
    if dropout_rate and not deterministic:
        scores |= {"dropout_rate": dropout_rate, "dropout_key": dropout_rng}
    return flash_attention(query, key, value, **scores)


def is_decoding(mask: jax.Array | None, query: jax.Array, key: jax.Array) -> bool:
    """Whether a call is a decoding step of Flax's layers: one query, a mask over several keys.

    The mask marks the written part of the cache, while causal starts at key 0 and would leave that
    key alone. Flax before 0.12.12 asks for causal there nonetheless.
    """
    return mask is not None and query.shape[-3] == 1 and key.shape[-3] > 1


def check_options(options: Options) -> None:
    """Raises TypeError for a keyword that attention_fn does not take."""
    taken = tuple(LayerOptions.__annotations__)
    for name in options:
        if name not in taken:
            hint = _keywords.hint(name, (*taken, "bias", "mask", "is_causal", "dropout_rate"))
            raise TypeError(
                f"attention_fn got an unexpected keyword argument {name!r}{hint}; besides those of "
                f"Flax's dot_product_attention it takes {', '.join(taken)}"
            )


def boolean(mask: ArrayLike | None) -> jax.Array | None:
    """A mask as Flax makes them, bool or numbers (float32 as a rule): nonzero means True."""
    if mask is None:
        return None
    mask = jnp.asarray(mask)
    return mask if mask.dtype == jnp.bool_ else mask != 0


def rows(
    x: jax.Array,
    memory: jax.Array | None,
    *,
    seq_lengths: ArrayLike | None,
    segment_ids: ArrayLike | None,
    positions: ArrayLike | None,
    memory_seq_lengths: ArrayLike | None,
    memory_segment_ids: ArrayLike | None,
    memory_positions: ArrayLike | None,
) -> dict[str, Any]:
    """What the call of a layer says of the rows of its input, in flash_attention's keywords.

    Args:
      x: [*B, T, features], where the queries come from.
      memory: [*B, S, features], where keys and values come from; None for x.
      seq_lengths: int [*B], of x.
      segment_ids: int [*B, T], of x.
      positions: int [*B, T], of x.
      memory_seq_lengths: int [*B].
      memory_segment_ids: int [*B, S].
      memory_positions: int [*B, S].

    Raises:
      TypeError: for ids, positions or lengths that are no integers.
      ValueError: for shapes that do not fit together, and for ids, positions or lengths of a memory
        that is not given, or not given ids where x has some.
    """
    if memory is not None and memory.shape[:-2] != x.shape[:-2]:
        raise ValueError(
            f"memory has shape {memory.shape} and x {x.shape}; expected equal leading dims: "
            "[*B, S, features] and [*B, T, features]"
        )
    for name, array, letters, of in (
        ("seq_lengths", seq_lengths, "[*B]", x),
        ("segment_ids", segment_ids, "[*B, T]", x),
        ("positions", positions, "[*B, T]", x),
        ("memory_seq_lengths", memory_seq_lengths, "[*B]", memory),
        ("memory_segment_ids", memory_segment_ids, "[*B, S]", memory),
        ("memory_positions", memory_positions, "[*B, S]", memory),
    ):
        if array is None:
            continue
        if of is None:
            raise ValueError(f"{name} is given without a memory")
        shape = of.shape[:-2] if letters == "[*B]" else of.shape[:-1]
        if jnp.shape(array) != shape:
            raise ValueError(f"{name} has shape {jnp.shape(array)}; expected {letters} = {shape}")
        dtype = getattr(array, "dtype", None)
        if dtype is not None and not jnp.issubdtype(dtype, jnp.integer):
            raise TypeError(f"{name} has dtype {dtype} (shape {shape}); expected int32")
    if memory is None:
        memory_seq_lengths, memory_segment_ids = seq_lengths, segment_ids
        memory_positions = positions
    elif (segment_ids is None) != (memory_segment_ids is None):
        raise ValueError(
            "a call with a memory takes both segment_ids [*B, T] and memory_segment_ids [*B, S], "
            "or neither"
        )
    return {
        "query_seq_lengths": seq_lengths,
        "key_value_seq_lengths": memory_seq_lengths,
        "query_segment_ids": segment_ids,
        "key_value_segment_ids": memory_segment_ids,
        "query_positions": positions,
        "key_value_positions": memory_positions,
    }


def head_sizes(
    features: int,
    num_heads: int,
    num_kv_heads: int | None,
    head_dim: int | None,
    rotary_base: float | None,
) -> tuple[int, int]:
    """A layer's key heads and head size, with None replaced by num_heads and features / num_heads.

    Raises:
      TypeError: a size is no int.
      ValueError: the numbers do not fit together.
    """
    for name, size in (
        ("num_heads", num_heads),
        ("num_kv_heads", num_kv_heads),
        ("head_dim", head_dim),
    ):
        if not isinstance(size, numbers.Integral) and (size is not None or name == "num_heads"):
            raise TypeError(f"{name} must be an int, got {size!r}")
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            "num_heads must be a positive multiple of num_kv_heads, "
            f"got {num_heads} and {num_kv_heads}"
        )
    if head_dim is None:
        head_dim, rest = divmod(features, num_heads)
        if rest:
            raise ValueError(
                f"{features} features do not divide among {num_heads} heads; give head_dim"
            )
    if head_dim < 1:
        raise ValueError(f"head_dim must be positive, got {head_dim}")
    if rotary_base is not None and not (
        isinstance(rotary_base, numbers.Real) and 0 < rotary_base < math.inf
    ):
        raise ValueError(f"rotary_base must be a positive number, got {rotary_base!r}")
    if rotary_base is not None and head_dim % 2:
        raise ValueError(f"rotary embedding needs an even head_dim, got {head_dim}")
    return num_kv_heads, head_dim


def norm_class(
    normalize_qk: bool | Callable[..., Any], default: Callable[..., Any]
) -> Callable[..., Any] | None:
    """The class of norms that a layer's normalize_qk asks for: `default` for True.

    Raises:
      TypeError: it is neither a bool nor a class.
    """
    if isinstance(normalize_qk, bool):
        return default if normalize_qk else None
    if callable(normalize_qk):
        return normalize_qk
    raise TypeError(
        "normalize_qk must be True, False or a class of norms such as RMSNorm, "
        f"got {normalize_qk!r}"
    )
