"""What is checked of terms, the optional arrays of a call, and what they become: operands.

Block masks and the arrays that functions read are in `masks.py`. Read next: `_terms.py`, which says
what each term is.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_flash import _debug
from jax_flash._validate.arrays import (
    MAX_INT32,
    WIDE_INTEGERS,
    array,
    broadcastable,
    check_int32,
    in_full,
    integers,
    typed,
)
from jax_flash._validate.scalars import describe


def bias_of(bias, scores, query_dtype) -> jax.Array | None:
    if bias is None:
        return None
    bias = array("bias", bias)
    is_bool = bias.dtype == jnp.bool_
    hint = ": pass booleans as mask" if is_bool else ": for example bias.astype('float32')"
    return broadcastable("bias", typed("bias", "bias", bias, query_dtype, hint), scores)


def lengths_of(
    term: str, name: str, lengths, batch: tuple[int, ...], limit: int
) -> jax.Array | None:
    if lengths is None:
        return None
    lengths = given = in_full(lengths)
    if isinstance(lengths, jax.Array | np.ndarray) and lengths.dtype.name in WIDE_INTEGERS:
        lengths = lengths.clip(0, MAX_INT32)  # else 2**32 would come out as 0
    hint = ", one length for each batch row"
    if getattr(lengths, "ndim", 0) == 1:
        hint += (
            ". If these are the cumulative lengths (cu_seqlens) of "
            f"packed sequences, pass {name.replace('lengths', 'ids').replace('seq', 'segment')} "
            f"instead: jnp.searchsorted(cu_seqlens, jnp.arange({limit}), side='right'), with the "
            "leading dims of query"
        )
    lengths = integers(term, name, lengths, batch, hint)
    _debug.check_lengths(name, given, limit, "T = " if name.startswith("query") else "S = ")
    return jnp.clip(lengths, 0, limit)


def segments_of(query_ids, key_value_ids, shapes: dict[str, tuple[int, ...]]):
    query_shape, key_value_shape = shapes["query_segments"], shapes["key_value_segments"]
    if query_ids is None and key_value_ids is None:
        return None, None
    query_ids, key_value_ids = in_full(query_ids), in_full(key_value_ids)
    for name, ids, other in (
        ("query_segment_ids", query_ids, "key_value_segment_ids"),
        ("key_value_segment_ids", key_value_ids, "query_segment_ids"),
    ):
        if ids is None:
            raise ValueError(
                f"{other} is given without {name}; expected both, [*B, T] = {query_shape} and "
                f"[*B, S] = {key_value_shape} (the same array twice for self-attention)"
            )
        if getattr(ids, "dtype", None) != "uint32":  # whose ids are as different in 32 bits
            check_int32(name, "ids", ids)  # else 1 and 2**32 + 1 would be equal
    checked = (
        integers("query_segments", "query_segment_ids", query_ids, query_shape),
        integers("key_value_segments", "key_value_segment_ids", key_value_ids, key_value_shape),
    )
    if {getattr(ids, "dtype", None) for ids in (query_ids, key_value_ids)} != {np.dtype("uint32")}:
        _debug.check_int32("query_segment_ids", "ids", query_ids)
        _debug.check_int32("key_value_segment_ids", "ids", key_value_ids)
    return checked


def positions_of(
    query_positions, key_value_positions, align: str, shapes: dict[str, tuple[int, ...]]
) -> tuple[jax.Array, jax.Array] | None:
    """Computes where queries and keys stand, by index where they are not told; None without any."""
    given = {"query_positions": query_positions, "key_value_positions": key_value_positions}
    for name, positions in given.items():
        if positions is not None and align != "top_left":
            raise ValueError(
                f"{name} is given with causal_align={align!r}; expected 'top_left': positions "
                "say themselves which key stands at a query's own"
            )
    if query_positions is None and key_value_positions is None:
        return None

    def standing(name):
        shape, x = shapes[name], in_full(given[name])
        if x is None:
            return lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
        check_int32(name, "positions", x)
        told = x
        if isinstance(x, jax.Array) and x.dtype.name in WIDE_INTEGERS:
            x = x.clip(max(jnp.iinfo(x.dtype).min, -MAX_INT32 - 1), MAX_INT32)
        checked = integers(name, name, x, shape)
        _debug.check_int32(name, "positions", told)
        return checked

    return standing("query_positions"), standing("key_value_positions")


def indices_of(indices, queries: tuple[int, ...]) -> jax.Array | None:
    """Checks positions int32 `[*B, T, n]` that queries `[*B, T]` read."""
    if indices is None:
        return None
    x = in_full(indices)
    if isinstance(x, jax.Array | np.ndarray) and x.dtype.name in WIDE_INTEGERS:
        x = x.clip(None if x.dtype.kind == "u" else -1, MAX_INT32)  # else 2**32 would be key 0
    hint = ""
    if str(getattr(x, "dtype", "")) == "bool":
        hint = ": the positions that each query reads, not which; booleans are mask's"
    x = typed("indices", "indices", array("indices", x), hint=hint)
    if x.ndim != len(queries) + 1 or x.shape[:-1] != queries:
        expected = ", ".join(map(str, (*queries, "n")))
        raise ValueError(
            f"indices has shape {x.shape}; expected ({expected}): the n positions that each "
            "query reads, all of its heads alike, and -1 in the place of those that it does not"
        )
    return x


_BESIDE_INDICES = {
    "bias": "it is added to all scores of T and S",
    "mask": "a position that a query does not read is -1 in indices, or not there",
    "block_mask": "a position that a query does not read is -1 in indices, or not there",
    "score_mod": "functions of the scores are computed in tiles of T and S",
    "dropout_rate": "its pattern is one of T and S",
    "deterministic": "gradients of keys are sums in the order in which a GPU comes to them",
    "float8": "blocks of neighbouring keys share their scales",
}


def indices_alone(given: dict[str, bool]) -> None:
    """Refuses what is not computed beside indices, with the reason."""
    for name, is_given in given.items():
        if is_given:
            raise ValueError(
                f"{name} is given beside indices: {_BESIDE_INDICES[name]}. Expected one of the two"
            )


def sinks_of(sinks, batch, q_heads: int, query_dtype) -> jax.Array | None:
    if sinks is None:
        return None
    hint = ", for example sinks.astype('float32')"
    sinks = typed("sinks", "sinks", array("sinks", sinks), query_dtype, hint)
    if sinks.shape != (q_heads,):
        raise ValueError(
            f"sinks has shape {sinks.shape}; expected [N] = ({q_heads},), one logit per query head"
        )
    return jnp.reshape(sinks, (1,) * len(batch) + (q_heads,))


def dropout_state_of(key, batch: tuple[int, ...], q_heads: int) -> jax.Array:
    """Computes uint32 `[*B, N, 4]`: (key word 0, key word 1, head id, batch id).

    The ids count heads and batch rows over the whole call, however it is later sharded. Philox
    mixes its key, so a key of two words, threefry's, is taken as it is: few scores would wait for
    another generator.
    """
    try:
        words = jax.random.key_data(key)
        if words.shape != (2,):
            words = jax.random.bits(key, (2,), jnp.uint32)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"dropout_key is {describe(key)}; expected one key, such as jax.random.key(0) or "
            "jax.random.PRNGKey(0)"
        ) from error
    batch_ids, head_ids = ids_of(batch, q_heads, jnp.uint32)
    return jnp.stack(jnp.broadcast_arrays(words[0], words[1], head_ids, batch_ids), axis=-1)


def ids_of(batch: tuple[int, ...], q_heads: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Counts batch rows and heads over the whole call, however it is later sharded: `[*B, N]`."""
    batch_ids = jnp.arange(math.prod(batch), dtype=dtype).reshape(*batch, 1)
    batch_ids, head_ids = jnp.broadcast_arrays(batch_ids, jnp.arange(q_heads, dtype=dtype))
    return batch_ids, head_ids
