"""One rule for attention over keys in parts: the merge of results over disjoint keys.

Whatever computes parts apart, such as splits of one long sequence of keys or the devices of a ring,
gets the whole from it, forward and backward. blockwise.py does not use it: there the weighted
values of a row stay unnormalised from tile to tile, which spares every tile a division and a pass
over them.

Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv:1805.02867).
"""

import functools
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jax_flash import _validate
from jax_flash._terms import FLOATS, sum_dtype

Result = tuple[jax.Array, jax.Array]
_Part = tuple[Annotated[ArrayLike, "*B T N Hv"], Annotated[ArrayLike, "*B T N"]]


def merge(
    *parts: _Part,
) -> tuple[Annotated[jax.Array, "*B T N Hv"], Annotated[jax.Array, "*B T N"]]:
    """Computes attention over all keys from attention over parts of them.

    A part that saw nothing (lse −inf) leaves the others as they are, to the bit, and what its out
    holds is not read; of such parts alone out is 0 and lse −inf. A sink belongs to one of the
    parts. The order of parts changes roundings alone. Its gradient is that of attention over the
    whole, where the parts are differentiated through their lse too.

    Arguments:
      parts: one or more pairs of out `[*B, T, N, Hv]`, float32, bfloat16, float16 or float64, and
        lse `[*B, T, N]`, float32 or float64, as from `flash_attention(..., return_lse=True)` or
        `decode_attention` over the keys of one part. All have the same shapes; dims before N may
        be any.

    Returns:
      Out and lse over the keys of all parts, each in the widest dtype that it has in a part. They
      are computed in lse's dtype, and out is rounded once: merge many parts by one call.

    Raises:
      TypeError, ValueError: a wrong argument, with its shape or value and what would be right.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from jax_flash import flash_attention, merge
      >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 32, 4, 16))
      >>> old, new = (
      ...     flash_attention(query, key[:, part], value[:, part], return_lse=True)
      ...     for part in (slice(0, 24), slice(24, 32))
      ... )
      >>> out, lse = merge(old, new)
      >>> bool(jnp.allclose(out, flash_attention(query, key, value), atol=1e-5))
      True

    Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv:1805.02867).
    """
    if not parts:
        raise ValueError("merge has no part; expected one or more pairs (out, lse)")
    checked = [_check(i, part) for i, part in enumerate(parts)]
    (first, first_lse), *others = checked
    for i, (out, lse) in enumerate(others, 1):
        for name, x, shape in (("out", out, first.shape), ("lse", lse, first_lse.shape)):
            if x.shape != shape:
                raise ValueError(
                    f"{name} of parts[{i}] has shape {x.shape} and that of parts[0] {shape}; "
                    "expected one shape: the parts are of the same queries"
                )
    out, lse = combine(*checked)
    return out.astype(functools.reduce(jnp.promote_types, (x.dtype for x, _ in checked))), lse


def _check(i: int, part: Any) -> Result:
    """Checks one part; its lse is of the dtype that sums have."""
    if not isinstance(part, tuple | list) or len(part) != 2:
        of = f" of length {len(part)}" if isinstance(part, tuple | list) else ""
        raise TypeError(
            f"parts[{i}] is {type(part).__name__}{of}; expected a pair (out, lse), as of "
            "merge((out, lse), (other_out, other_lse))"
        )
    out, lse = (
        _validate.array(f"{x} of parts[{i}]", y) for x, y in zip(("out", "lse"), part, strict=True)
    )
    if out.dtype.name not in FLOATS:
        raise TypeError(
            f"out of parts[{i}] has dtype {out.dtype}; expected one of {', '.join(FLOATS)}"
        )
    if lse.dtype != sum_dtype(lse.dtype):
        raise TypeError(f"lse of parts[{i}] has dtype {lse.dtype}; expected float32 or float64")
    if out.ndim < 2 or out.shape[:-1] != lse.shape:
        raise ValueError(
            f"lse of parts[{i}] has shape {lse.shape} and out {out.shape}; expected out "
            "[*B, T, N, Hv] and lse [*B, T, N]"
        )
    return out, lse


def combine(*parts: Result) -> Result:
    """Does as `merge`, unchecked, and does not round: out is in the dtype of lse.

    It is associative and commutative but for rounding.
    """
    outs, lses = zip(*parts, strict=True)
    largest = lax.stop_gradient(functools.reduce(jnp.maximum, lses))
    empty = largest == -jnp.inf
    # exp(-inf - 0) is the 0 that an empty part weighs, and -inf - -inf would be NaN.
    shift = jnp.where(empty, 0.0, largest)
    weights = [jnp.exp(lse - shift) for lse in lses]
    total = jnp.where(empty, 1.0, sum(weights[1:], start=weights[0]))
    terms = [_weigh(out, weight / total) for out, weight in zip(outs, weights, strict=True)]
    merged = sum(terms[1:], start=terms[0])
    return merged, jnp.where(empty, -jnp.inf, shift + jnp.log(total))


def _weigh(out: jax.Array, weight: jax.Array) -> jax.Array:
    """Multiplies out `[*B, T, N, Hv]` by `[*B, T, N]`; of weight 0 it may hold anything."""
    weight = weight[..., None]
    return weight * jnp.where(weight == 0.0, 0.0, out)
