"""What is checked of query, key and value, and of any argument that is an array.

Errors name the argument, its shape or dtype, and what would be right. Read next: `terms.py`.
"""

import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash._backends import warn_once
from jax_flash._float8 import DTYPE
from jax_flash._terms import FLOATS, TERMS, sum_dtype

try:
    from jax.errors import InconclusiveDimensionOperation
except ImportError:  # before jax 0.10
    from jax.core import InconclusiveDimensionOperation

_FLOATS_TEXT = ", ".join(FLOATS)
WIDE_INTEGERS = ("uint32", "int64", "uint64")
MAX_INT32 = 2**31 - 1
_MOST_HEADS = 128  # of a model's layer
_LETTERS = "query [*B, T, N, H], key [*B, S, K, H] and value [*B, S, K, Hv]"


def query_key_value(query, key, value, *others: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Checks the arrays that every call has; `others` are dtypes that it takes beside FLOATS."""
    arrays = {
        name: array(name, x) for name, x in (("query", query), ("key", key), ("value", value))
    }
    for name, x in arrays.items():
        if x.ndim < 3:
            raise ValueError(
                f"{name} has shape {x.shape}, rank {x.ndim}; expected rank 3 or more: {_LETTERS}"
            )
    for name, x in arrays.items():
        if x.dtype.name not in (*FLOATS, *others):
            raise TypeError(
                f"{name} has dtype {x.dtype} (shape {x.shape}); expected one of "
                f"{', '.join((*FLOATS, *others))}, for example {name}.astype('float32')"
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


def value_within(key: Any, value: Any, value_dim: Any) -> tuple[Any, int | None]:
    """Returns the values, taken from the keys where there are none of their own, and of how many
    features they are then."""
    if value is not None:
        if value_dim is not None:
            raise ValueError(
                f"value_dim is {value_dim!r} beside a value; expected None, since the value has "
                "its own last dim"
            )
        return value, None
    if hasattr(key, "qvalue") or getattr(key, "dtype", None) == DTYPE:
        raise TypeError(
            "value is None and key in float8; expected a value, which has scales of its own"
        )
    k = array("key", key)
    if k.ndim < 3:
        return k, None  # which is refused by its rank
    check_head_dim("key", k)
    value_dim = value_dim_of(value_dim, "value", k.shape[-1])
    return k[..., :value_dim], value_dim


def value_dim_of(value_dim: Any, value: str, head_dim: int) -> int:
    """Checks how many of the keys' features are the values, where the argument of them is None."""
    if isinstance(value_dim, bool) or not isinstance(value_dim, numbers.Integral):
        raise TypeError(
            f"value_dim is {value_dim!r} and {value} None; expected a {value}, or an int: how "
            "many of the first features of the keys are the values"
        )
    found = int(value_dim)
    if not 1 <= found <= head_dim:
        raise ValueError(f"value_dim is {found}; expected 1 to {head_dim}, the head dim")
    return found


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


def is_sure(compare: Callable[[], Any]) -> bool:
    """Tells whether a comparison of sizes holds, of symbolic ones whatever they stand for."""
    try:
        return bool(compare())
    except InconclusiveDimensionOperation:
        return False


def array(name: str, x: Any) -> jax.Array:
    """Converts an argument, or names it in a TypeError."""
    try:
        return jnp.asarray(x)
    except OverflowError as error:
        raise TypeError(f"{name}: {error}") from error
    except (TypeError, ValueError) as error:
        dtype = f" of dtype {x.dtype}" if hasattr(x, "dtype") else ""
        raise TypeError(f"{name} is {type(x).__name__}{dtype}; expected an array") from error


def broadcastable(name: str, x: jax.Array, scores: tuple[int, ...]) -> jax.Array:
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


def typed(term: str, name: str, x: jax.Array, query_dtype: Any = None, hint: str = "") -> Any:
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


def integers(term: str, name: str, x: Any, shape: tuple[int, ...], hint: str = "") -> jax.Array:
    """Converts an argument of integers that has the term's own shape."""
    x = typed(term, name, array(name, x))
    if x.shape != shape:
        letters = ", ".join(("*B", *TERMS[term].dims))
        if x.shape[-1:] == shape[-1:] and all(size == 1 for size in x.shape[:-1]):
            hint = f". If all batch rows share them, pass jnp.broadcast_to({name}, {shape})"
        raise ValueError(f"{name} has shape {x.shape}; expected [{letters}] = {shape}{hint}")
    return x


def check_int32(name: str, what: str, x: Any) -> None:
    if isinstance(x, np.ndarray) and x.dtype.name in WIDE_INTEGERS and x.size:
        low, high = x.min(), x.max()
        if low < -MAX_INT32 - 1 or high > MAX_INT32:
            raise ValueError(f"{name} holds {what} from {low} to {high}; expected those of int32")


def in_full(x: Any) -> Any:
    """Keeps integers that are no jax.Array at 64 bits, of which jnp.asarray would drop half."""
    if x is None or isinstance(x, jax.Array) or hasattr(x, "__jax_array__"):
        return x
    try:
        return np.asarray(x)
    except (TypeError, ValueError):  # holds tracers, or is no array: for `array` to say
        return x
