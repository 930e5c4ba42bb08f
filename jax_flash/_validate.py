"""From a user's arguments to a Problem and its operands, or an error that says what to change.

Everything here runs at trace time and looks at ranks, shapes, dtypes and Python values, never at
array contents.
"""

import math
import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_flash import _debug, _function, _simplify, _windows
from jax_flash._backends import warn_once
from jax_flash._function import Function
from jax_flash._philox import round_rate
from jax_flash._problem import SOFTCAPS, Problem, order_terms
from jax_flash._terms import FLOATS, TERMS, capture, sum_dtype
from jax_flash.block_masks import BlockMask

_FLOATS_TEXT = ", ".join(FLOATS)
_WIDE_INTEGERS = ("uint32", "int64", "uint64")
_MAX_INT32 = 2**31 - 1
_MOST_HEADS = 128  # of a model's layer
_POSITIONS = 2**32  # no two are so far apart
_MAX_FLOAT32 = float(np.finfo(np.float32).max)
_ALIGNMENTS = ("top_left", "bottom_right")
_LETTERS = "query [*B, T, N, H], key [*B, S, K, H] and value [*B, S, K, Hv]"


class Prepared(NamedTuple):
    """A call in the form of the primitives.

    Attributes:
      problem: what to compute.
      operands: (q, k, v, *problem.optional), of which the results may have other rows than query.
      rows: query's shape but for the head dim.
      rewrites: the names of those of `_simplify.py` that were taken.
    """

    problem: Problem
    operands: tuple[jax.Array, ...]
    rows: tuple[int, ...]
    rewrites: tuple[str, ...]


def prepare(
    query: Any,
    key: Any,
    value: Any,
    *,
    scale: Any,
    bias: Any,
    mask: Any,
    block_mask: Any,
    is_causal: Any,
    causal_align: Any,
    local_window_size: Any,
    query_seq_lengths: Any,
    key_value_seq_lengths: Any,
    query_segment_ids: Any,
    key_value_segment_ids: Any,
    query_positions: Any,
    key_value_positions: Any,
    softcap: Any,
    score_mod: Any,
    sinks: Any,
    dropout_rate: Any,
    dropout_key: Any,
    deterministic: Any,
    precision: Any,
    shards: int | None = None,
) -> Prepared:
    """Checks the arguments of `flash_attention` and brings them to the form of the primitives.

    Where the sequence is split over devices, `shards` says over how many the arguments are already:
    then they are one device's, but for lengths and windows, and the keys of bias and mask, which
    are of the whole sequence.

    Raises: TypeError or ValueError with the argument's name, what it is and what would be right.
    """
    q, k, v = _arrays(query, key, value)
    *batch, q_len, q_heads, _ = q.shape
    batch, kv_len = tuple(batch), k.shape[-3]
    sizes = {"T": q_len, "S": kv_len, "N": q_heads, "W": 4, "U": 2}
    shapes = {
        name: (*batch, *(sizes[d] for d in x.dims))
        for name, x in TERMS.items()
        if set(x.dims) <= set(sizes)
    }
    q_len, kv_len = (shards or 1) * q_len, (shards or 1) * kv_len
    scores = (*shapes["bias"][:-1], kv_len)
    q, static_scale = _scale(scale, q)

    align = _choice("causal_align", causal_align, _ALIGNMENTS)
    rate = _dropout_rate(dropout_rate, dropout_key)
    query_segments, key_value_segments = _segments(query_segment_ids, key_value_segment_ids, shapes)
    positions = _positions(query_positions, key_value_positions, align, shapes)
    _check_sizes(block_mask, q_len, kv_len)
    reach = q_len + kv_len if positions is None else _POSITIONS
    window = _window(flag("is_causal", is_causal), local_window_size, reach)
    if positions is None or window == (None, None):  # there positions mean nothing
        positions = None, None
    score, captured = _score_function(score_mod, softcap, q_heads, q.dtype)
    has_ids = score is not None and not score.used.isdisjoint(("batch", "head"))
    terms = order_terms(
        {
            "bias": _bias(bias, scores, q.dtype),
            "mask": _mask(mask, scores),
            "block_numbers": block_mask,  # for `_blocks` to replace
            "block_bits": block_mask,
            "query_lengths": _lengths(
                "query_lengths", "query_seq_lengths", query_seq_lengths, batch, q_len
            ),
            "key_value_lengths": _lengths(
                "key_value_lengths", "key_value_seq_lengths", key_value_seq_lengths, batch, kv_len
            ),
            "query_segments": query_segments,
            "key_value_segments": key_value_segments,
            "query_positions": positions[0],
            "key_value_positions": positions[1],
            "sinks": _sinks(sinks, batch, q_heads, q.dtype),
            "dropout_state": _dropout_state(dropout_key, batch, q_heads) if rate > 0.0 else None,
            "score_ids": jnp.stack(_ids(batch, q_heads, jnp.int32), axis=-1) if has_ids else None,
        }
    )
    problem = Problem(
        dtype=q.dtype.name,
        scale=static_scale,
        window=window,
        bottom_right=align == "bottom_right",
        softcap=_softcap(softcap),
        dropout_rate=rate,
        deterministic=flag("deterministic", deterministic),
        precision=_precision(precision, q.dtype),
        terms=tuple(terms),
        score=score,
        as_written=_simplify.is_as_written(),
    )
    given = _simplify.Arguments(problem, q, k, v, block_mask, q_len, kv_len, whole=shards is None)
    made, rewrites = _simplify.simplify(given)
    if made.block_mask is not None:
        terms |= _blocks(made.block_mask, batch, q_heads)
    named = terms | {capture(i): _whole(x, len(batch)) for i, x in enumerate(captured)}
    optional = (named[name] for name in made.problem.optional)
    operands = (made.query, made.key, made.value, *optional)
    return Prepared(made.problem, operands, q.shape[:-1], rewrites)


def _arrays(query, key, value) -> tuple[jax.Array, jax.Array, jax.Array]:
    arrays = {
        name: array(name, x) for name, x in (("query", query), ("key", key), ("value", value))
    }
    for name, x in arrays.items():
        if x.ndim < 3:
            raise ValueError(
                f"{name} has shape {x.shape}, rank {x.ndim}; expected rank 3 or more: {_LETTERS}"
            )
    for name, x in arrays.items():
        if x.dtype.name not in FLOATS:
            raise TypeError(
                f"{name} has dtype {x.dtype} (shape {x.shape}); expected one of "
                f"{_FLOATS_TEXT}, for example {name}.astype('float32')"
            )
    q, k, v = arrays["query"], arrays["key"], arrays["value"]
    for name, x in arrays.items():
        check_head_dim(name, x)
    for name, x in (("key", k), ("value", v)):
        if x.dtype != q.dtype:
            raise TypeError(
                f"{name} has dtype {x.dtype} but query has {q.dtype}; query, key and value need "
                f"one dtype, for example {name}.astype(query.dtype)"
            )
        if x.shape[:-3] != q.shape[:-3]:
            raise ValueError(
                f"{name} has shape {x.shape} and query {q.shape}; expected equal leading (batch) "
                f"dims {q.shape[:-3]}: {_LETTERS}"
            )
    if k.shape[-3:-1] != v.shape[-3:-1]:
        raise ValueError(
            f"value has shape {v.shape} and key {k.shape}; expected {v.shape[-1]} features for "
            f"each of key's {k.shape[-3]} positions and {k.shape[-2]} heads: {_LETTERS}"
        )
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"key has shape {k.shape} and query {q.shape}; expected equal head dims (the last), "
            f"got {k.shape[-1]} and {q.shape[-1]}"
        )
    q_heads, kv_heads = q.shape[-2], k.shape[-2]
    order = _heads_before_positions(q, k)
    if q_heads % kv_heads if kv_heads else q_heads:
        raise ValueError(
            f"query has {q_heads} heads (shape {q.shape}) and key {kv_heads} (shape {k.shape}); "
            f"expected the first to be a multiple of the second{order}"
        )
    if order:
        warn_once(
            f"query has {q_heads} heads of {q.shape[-3]} positions (shape {q.shape}) and key "
            f"{kv_heads} of {k.shape[-3]} (shape {k.shape}){order}"
        )
    return q, k, v


def _heads_before_positions(q: jax.Array, k: jax.Array) -> str:
    """Says what to do if arrays are in another order than ours, where their shapes look like it.

    Then a small number of positions is a multiple of the key's, as heads are, and of what counts as
    heads the key has more than positions, and more than the query or the query more than models.
    """
    (q_len, q_heads), (kv_len, kv_heads) = q.shape[-3:-1], k.shape[-3:-1]
    if not all(isinstance(n, int) and n > 0 for n in (q_len, q_heads, kv_len, kv_heads)):
        return ""
    many = kv_heads > q_heads or q_heads > _MOST_HEADS
    if q_len > _MOST_HEADS or q_len % kv_len or kv_heads <= kv_len or not many:
        return ""
    return ". If these are [*B, N, T, H], pass each as jnp.swapaxes(x, -3, -2)"


def check_head_dim(name: str, x: jax.Array) -> None:
    if not isinstance(x.shape[-1], int):
        raise ValueError(
            f"{name} has shape {x.shape}; expected a head dim (the last) that is known where the "
            "call is exported: kernels are compiled for it. Batch, lengths and heads may be "
            "symbolic"
        )
    if x.shape[-1] == 0:
        raise ValueError(
            f"{name} has shape {x.shape}; expected a head dim (the last) of at least 1"
        )


def array(name: str, x: Any) -> jax.Array:
    """Converts an argument, or names it in a TypeError."""
    try:
        return jnp.asarray(x)
    except OverflowError as error:
        raise TypeError(f"{name}: {error}") from error
    except (TypeError, ValueError) as error:
        dtype = f" of dtype {x.dtype}" if hasattr(x, "dtype") else ""
        raise TypeError(f"{name} is {type(x).__name__}{dtype}; expected an array") from error


def _broadcastable(name: str, x: jax.Array, scores: tuple[int, ...]) -> jax.Array:
    """Gives x the rank of `[*B, N, T, S]`, or says why it does not broadcast to it."""
    full = (1,) * (len(scores) - x.ndim) + x.shape
    if len(full) != len(scores) or any(
        have not in (1, want) for have, want in zip(full, scores, strict=True)
    ):
        raise ValueError(
            f"{name} has shape {x.shape}; expected a shape that broadcasts to [*B, N, T, S] = "
            f"{scores}: every dim 1 or equal{_missing_axes(name, x.shape, scores)}"
        )
    return jnp.reshape(x, full)


def _missing_axes(name: str, shape: tuple[int, ...], scores: tuple[int, ...]) -> str:
    """Says which axes to add to one of the shapes that other libraries take, or nothing."""
    *batch, _, q_len, kv_len = scores
    for letters, lengths, axes, padding in (
        ("T, S", (q_len, kv_len), "..., None, :, :", ""),
        ("S", (kv_len,), "..., None, None, :", "key_value_seq_lengths"),
        ("T", (q_len,), "..., None, :, None", "query_seq_lengths"),
    ):
        if batch and shape == (*batch, *lengths):
            hint = f". If it is [*B, {letters}], pass {name}[{axes}]"
            if name == "mask" and padding:
                hint += f", or {padding} where it hides padding at the end"
            return hint
    return ""


def _bias(bias, scores, query_dtype) -> jax.Array | None:
    if bias is None:
        return None
    bias = array("bias", bias)
    is_bool = bias.dtype == jnp.bool_
    hint = ": pass booleans as mask" if is_bool else ": for example bias.astype('float32')"
    return _broadcastable("bias", _typed("bias", "bias", bias, query_dtype, hint), scores)


def _typed(term: str, name: str, x: jax.Array, query_dtype: Any = None, hint: str = "") -> Any:
    """Checks the dtype of the argument that a term is made of, and brings it to that of the term.

    query_dtype says what float64 meets, to which x64 mode widens Python's numbers, and which sums.
    """
    kind = TERMS[term].dtype
    match kind:
        case "float" | "sum":
            fits, expected = x.dtype.name in FLOATS, f"one of {_FLOATS_TEXT}"
        case "int32":
            fits, expected = jnp.issubdtype(x.dtype, jnp.integer), "int32"
        case _:
            fits, expected = x.dtype.name == kind, kind
    if not fits:
        raise TypeError(f"{name} has dtype {x.dtype} (shape {x.shape}); expected {expected}{hint}")
    match kind:
        case "float":
            return x.astype(jnp.float32) if x.dtype == "float64" != query_dtype else x
        case "sum":
            return x.astype(sum_dtype(query_dtype))
        case _:
            return x.astype(kind)


def _mask(mask, scores) -> jax.Array | None:
    if mask is None:
        return None
    if isinstance(mask, BlockMask) or callable(mask):
        raise TypeError(
            f"mask is {type(mask).__name__}; expected an array of bool: what jax_flash.block_mask "
            "makes of a function is block_mask="
        )
    hint = ", True where a key is visible: mask != 0, or pass an additive mask as bias"
    return _broadcastable("mask", _typed("mask", "mask", array("mask", mask), hint=hint), scores)


def _check_sizes(mask: Any, q_len: int, kv_len: int) -> None:
    """Says why a block mask does not fit the lengths."""
    if mask is None:
        return
    if not isinstance(mask, BlockMask):
        raise TypeError(
            f"block_mask is {type(mask).__name__}; expected what jax_flash.block_mask makes of a "
            "function, or jax_flash.block_mask_of of a layout"
        )
    counts = tuple(-(-size // mask.block) for size in (q_len, kv_len))
    own = counts if mask.is_form else mask.numbers.shape[-2:]
    lengths = ((mask.q_len, q_len), (mask.kv_len, kv_len))
    if own != counts or any(x not in (None, size) for x, size in lengths):
        blocks = "" if mask.is_form else f" and {own[0]} x {own[1]} blocks of {mask.block}"
        raise ValueError(
            f"block_mask has q_len {mask.q_len}, kv_len {mask.kv_len}{blocks}; expected one for T "
            f"= {q_len} and S = {kv_len}: {counts[0]} x {counts[1]} blocks of {mask.block}"
        )


def _blocks(mask: BlockMask, batch: tuple[int, ...], q_heads: int) -> dict[str, jax.Array]:
    """Gives the arrays of a block mask their leading dims, or says why they do not fit."""
    mask = mask.as_blocks()
    numbers, bits = mask.numbers, mask.bits
    for own, want in ((numbers.shape[:-2], (*batch, q_heads)), (bits.shape[:-3], batch)):
        full = (1,) * (len(want) - len(own)) + own
        if len(full) != len(want) or any(
            have not in (1, size) for have, size in zip(full, want, strict=True)
        ):
            raise ValueError(
                f"block_mask has {numbers.shape[-3]} heads, batch {numbers.shape[:-3]} and bits of "
                f"batch {bits.shape[:-3]}; expected what broadcasts to query's {q_heads} heads and "
                f"batch {batch}: heads=None and batch=None make one for all"
            )
    numbers = jnp.reshape(numbers, (1,) * (len(batch) + 3 - numbers.ndim) + numbers.shape)
    *_, stored, block, words = bits.shape
    if stored == 0:  # kernels read some word of every block
        bits = jnp.zeros((1, block, words), bits.dtype)
    bits = jnp.reshape(bits, (1,) * (len(batch) + 3 - bits.ndim) + bits.shape)
    return {"block_numbers": numbers, "block_bits": bits}


def _integers(term: str, name: str, x: Any, shape: tuple[int, ...], hint: str = "") -> jax.Array:
    """Converts an argument of integers that has the term's own shape."""
    x = _typed(term, name, array(name, x))
    if x.shape != shape:
        letters = ", ".join(("*B", *TERMS[term].dims))
        raise ValueError(f"{name} has shape {x.shape}; expected [{letters}] = {shape}{hint}")
    return x


def _check_int32(name: str, what: str, x: Any) -> None:
    if isinstance(x, np.ndarray) and x.dtype.name in _WIDE_INTEGERS and x.size:
        low, high = x.min(), x.max()
        if low < -_MAX_INT32 - 1 or high > _MAX_INT32:
            raise ValueError(f"{name} holds {what} from {low} to {high}; expected those of int32")


def _in_full(x: Any) -> Any:
    """Keeps integers that are no jax.Array at 64 bits, of which jnp.asarray would drop half."""
    if x is None or isinstance(x, jax.Array) or hasattr(x, "__jax_array__"):
        return x
    try:
        return np.asarray(x)
    except (TypeError, ValueError):  # holds tracers, or is no array: for `array` to say
        return x


def _lengths(term: str, name: str, lengths, batch: tuple[int, ...], limit: int) -> jax.Array | None:
    if lengths is None:
        return None
    lengths = given = _in_full(lengths)
    if isinstance(lengths, jax.Array | np.ndarray) and lengths.dtype.name in _WIDE_INTEGERS:
        lengths = lengths.clip(0, _MAX_INT32)  # else 2**32 would come out as 0
    hint = ", one length for each batch row"
    if getattr(lengths, "ndim", 0) == 1:
        hint += (
            ". If these are the cumulative lengths (cu_seqlens) of "
            f"packed sequences, pass {name.replace('lengths', 'ids').replace('seq', 'segment')} "
            f"instead: jnp.searchsorted(cu_seqlens, jnp.arange({limit}), side='right'), with the "
            "leading dims of query"
        )
    lengths = _integers(term, name, lengths, batch, hint)
    _debug.check_lengths(name, given, limit, "T = " if name.startswith("query") else "S = ")
    return jnp.clip(lengths, 0, limit)


def _segments(query_ids, key_value_ids, shapes: dict[str, tuple[int, ...]]):
    query_shape, key_value_shape = shapes["query_segments"], shapes["key_value_segments"]
    if query_ids is None and key_value_ids is None:
        return None, None
    query_ids, key_value_ids = _in_full(query_ids), _in_full(key_value_ids)
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
            _check_int32(name, "ids", ids)  # else 1 and 2**32 + 1 would be equal
    checked = (
        _integers("query_segments", "query_segment_ids", query_ids, query_shape),
        _integers("key_value_segments", "key_value_segment_ids", key_value_ids, key_value_shape),
    )
    if {getattr(ids, "dtype", None) for ids in (query_ids, key_value_ids)} != {np.dtype("uint32")}:
        _debug.check_int32("query_segment_ids", "ids", query_ids)
        _debug.check_int32("key_value_segment_ids", "ids", key_value_ids)
    return checked


def _positions(
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
        shape, x = shapes[name], _in_full(given[name])
        if x is None:
            return lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
        _check_int32(name, "positions", x)
        told = x
        if isinstance(x, jax.Array) and x.dtype.name in _WIDE_INTEGERS:
            x = x.clip(max(jnp.iinfo(x.dtype).min, -_MAX_INT32 - 1), _MAX_INT32)
        own, hint = getattr(x, "shape", ()), ""
        if own and own[-1] == shape[-1] and all(size == 1 for size in own[:-1]):
            hint = f". If all batch rows share them, pass jnp.broadcast_to({name}, {shape})"
        checked = _integers(name, name, x, shape, hint)
        _debug.check_int32(name, "positions", told)
        return checked

    return standing("query_positions"), standing("key_value_positions")


def _sinks(sinks, batch, q_heads: int, query_dtype) -> jax.Array | None:
    if sinks is None:
        return None
    hint = ", for example sinks.astype('float32')"
    sinks = _typed("sinks", "sinks", array("sinks", sinks), query_dtype, hint)
    if sinks.shape != (q_heads,):
        raise ValueError(
            f"sinks has shape {sinks.shape}; expected [N] = ({q_heads},), one logit per query head"
        )
    return jnp.reshape(sinks, (1,) * len(batch) + (q_heads,))


def _dropout_rate(rate, key) -> float:
    rate = real("dropout_rate", rate)
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout_rate is {rate}; expected 0 <= dropout_rate < 1")
    if rate > 0.0 and key is None:
        raise ValueError(
            f"dropout_rate is {rate} but dropout_key is None; expected a key such as "
            "jax.random.key(0)"
        )
    return round_rate(rate)


def _dropout_state(key, batch: tuple[int, ...], q_heads: int) -> jax.Array:
    """Computes uint32 `[*B, N, 4]`: (key word 0, key word 1, head id, batch id).

    The ids count heads and batch rows over the whole call, however it is later sharded.
    """
    try:
        words = jax.random.bits(key, (2,), jnp.uint32)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"dropout_key is {_describe(key)}; expected one key, such as jax.random.key(0) or "
            "jax.random.PRNGKey(0)"
        ) from error
    batch_ids, head_ids = _ids(batch, q_heads, jnp.uint32)
    return jnp.stack(jnp.broadcast_arrays(words[0], words[1], head_ids, batch_ids), axis=-1)


def _ids(batch: tuple[int, ...], q_heads: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Counts batch rows and heads over the whole call, however it is later sharded: `[*B, N]`."""
    batch_ids = jnp.arange(math.prod(batch), dtype=dtype).reshape(*batch, 1)
    batch_ids, head_ids = jnp.broadcast_arrays(batch_ids, jnp.arange(q_heads, dtype=dtype))
    return batch_ids, head_ids


def _score_function(
    score_mod: Any, softcap: Any, q_heads: int, query_dtype: Any
) -> tuple[Function | None, list[jax.Array]]:
    """Traces the function of the scores; returns also the arrays that it reads."""
    if score_mod is None:
        return None, []
    if softcap is not None:
        raise ValueError(
            "score_mod and softcap are both given; expected one of them: let the function cap what "
            f"it returns, as jax_flash.scores.compose(score_mod, jax_flash.scores.softcap({softcap}"
            ")) does"
        )
    if isinstance(score_mod, _function.OfHeads) and score_mod.heads != q_heads:
        raise ValueError(
            f"score_mod reads an array of {score_mod.heads} heads; expected one of query's N = "
            f"{q_heads}"
        )
    sums = sum_dtype(query_dtype)
    arguments = {"score": sums, **dict.fromkeys(("batch", "head", "query", "key"), "int32")}
    return _function.trace("score_mod", score_mod, arguments, sums)


def _whole(x: jax.Array, leading: int) -> jax.Array:
    """Brings an array that a function reads to `[1s, elements]`, whole on every device."""
    if any(axis is not None for axis in jax.typeof(x).sharding.spec):
        x = jax.sharding.reshard(x, jax.sharding.PartitionSpec())
    return jnp.reshape(x, (*[1] * leading, -1))


def _window(
    is_causal: bool, size: int | Sequence[int | None] | np.ndarray | None, reach: Any
) -> tuple[int | None, int | None]:
    """Computes how many keys to the left and right of its own position a query sees (None: all).

    No key is as far as `reach` from a query, so a side that wide is None: T + S, whose others are
    small enough for the backends' int32, or with positions 2^32.
    """
    if isinstance(size, np.ndarray):
        size = size.tolist()
    if size is None or isinstance(size, numbers.Integral):
        left = right = size
    elif isinstance(size, Sequence) and len(size) == 2:
        left, right = size
    else:
        raise TypeError(
            f"local_window_size is {size!r}; expected an int, a pair (left, right), or None"
        )
    for side in (left, right):
        if side is not None and (isinstance(side, bool) or not isinstance(side, numbers.Integral)):
            raise TypeError(
                f"local_window_size is {size!r}; expected ints, or None for a side without a limit"
            )
        if side is not None and side < 0:
            raise ValueError(
                f"local_window_size is {size!r}; expected 0 or more on each side, or None for no "
                "limit"
            )
    sides = (None if left is None else int(left)), (None if right is None else int(right))
    left, right = _windows.within(sides, reach)
    return left, 0 if is_causal else right


def _scale(scale, q: jax.Array) -> tuple[jax.Array, float]:
    """Computes the query and the number that its products are multiplied by.

    A scale that is an array multiplies the query, so that it may be traced, mapped and
    differentiated. The number stays 1 / sqrt(H) then, so that at common scales the query keeps its
    magnitude, and float16 its range.
    """
    root = math.sqrt(q.shape[-1])
    if scale is None:
        return q, 1.0 / root
    if not (isinstance(scale, jax.Array) or hasattr(scale, "__jax_array__")):
        return q, real("scale", scale)
    scale = array("scale", scale)
    if scale.shape or not (
        jnp.issubdtype(scale.dtype, jnp.floating) or jnp.issubdtype(scale.dtype, jnp.integer)
    ):
        raise TypeError(
            f"scale is {_describe(scale)}; expected a number, or an array of one of shape ()"
        )
    wide = sum_dtype(q.dtype)
    factor = scale.astype(wide) * root
    x, finite = q.astype(wide), jnp.isfinite(q)
    # The gradient of scale is the sum of dx * x: NaN in padding must not reach it.
    x = jnp.where(finite, x, 0.0) * factor + jnp.where(finite, 0.0, x) * lax.stop_gradient(factor)
    return x.astype(q.dtype), 1.0 / root


def _softcap(softcap) -> float | None:
    if softcap is None:
        return None
    softcap = real("softcap", softcap)
    smallest, largest = SOFTCAPS
    if not smallest <= softcap <= largest:
        raise ValueError(
            f"softcap is {softcap}; expected a number above 0, from {smallest} to {largest}, or "
            "None for no cap"
        )
    return softcap


# Algorithms of products, which jax_default_matmul_precision may name too: these are more exact than
# TF32, the others at most as exact.
_EXACT_ALGORITHMS = (
    *("TF32_TF32_F32_X3", "BF16_BF16_F32_X6", "BF16_BF16_F32_X9"),
    *("F32_F32_F32", "F64_F64_F64"),
)


def _precision(precision, dtype) -> str:
    """Returns what Problem has as precision; None is that of jax_default_matmul_precision."""
    if precision is None:
        asked = jax.default_matmul_precision.value
        try:
            found = lax.Precision("default" if asked is None else asked)
        except ValueError:
            exact = asked in _EXACT_ALGORITHMS
            found = lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT
    else:
        try:
            found = lax.Precision(precision)
        except (TypeError, ValueError) as error:  # a traced value has no truth to compare by
            raise ValueError(
                f"precision is {precision!r}; expected None or one of jax.lax.Precision or its "
                "names: 'default', 'high' or 'tensorfloat32', 'highest' or 'float32'"
            ) from error
    return found.name.lower() if dtype == "float32" else "default"


def real(name: str, x: Any) -> float:
    """Checks a finite number that is known when the call is traced, or names it in an error."""
    if isinstance(x, jax.core.Tracer):
        raise TypeError(
            f"{name} is a traced array; expected a Python number, known when the call is traced"
        )
    if isinstance(x, str | bytes):
        raise TypeError(f"{name} is {x!r}; expected a Python number")
    try:
        number = float(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} is {_describe(x)}; expected a Python number") from error
    except OverflowError:
        number = math.inf
    if not abs(number) <= _MAX_FLOAT32:
        raise ValueError(f"{name} is {number}; expected a finite number that float32 can hold")
    return number


def flag(name: str, x: Any) -> bool:
    """Checks a switch, or names it in a TypeError."""
    if isinstance(x, jax.core.Tracer) or getattr(x, "ndim", 0) != 0 or x not in (True, False):
        raise TypeError(
            f"{name} is {_describe(x)}; expected True or False, known when the call is traced"
        )
    return bool(x)


def _choice(name: str, x: Any, choices: tuple[str, ...]) -> str:
    if not isinstance(x, str) or x not in choices:
        raise ValueError(f"{name} is {x!r}; expected one of {', '.join(map(repr, choices))}")
    return x


def _describe(x: Any) -> str:
    shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
    return repr(x) if shape is None else f"an array of shape {shape} and dtype {dtype}"
