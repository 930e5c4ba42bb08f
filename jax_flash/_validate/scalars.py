"""What is checked of numbers, switches and choices, and the fields of a Problem that they become.

Read next: `_problem.py`.
"""

import math
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_flash import _windows
from jax_flash._philox import round_rate
from jax_flash._problem import SOFTCAPS
from jax_flash._terms import sum_dtype
from jax_flash._validate.arrays import array

_MAX_FLOAT32 = float(np.finfo(np.float32).max)


def dropout_rate_of(rate, key) -> float:
    rate = real("dropout_rate", rate)
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout_rate is {rate}; expected 0 <= dropout_rate < 1")
    if rate > 0.0 and key is None:
        raise ValueError(
            f"dropout_rate is {rate} but dropout_key is None; expected a key such as "
            "jax.random.key(0)"
        )
    return round_rate(rate)


def window_sides(
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


def number_or_array(scale: Any) -> float | jax.Array:
    """Checks a scale: a number of Python, or an array of one, which may be traced."""
    if not (isinstance(scale, jax.Array) or hasattr(scale, "__jax_array__")):
        return real("scale", scale)
    scale = array("scale", scale)
    if scale.shape or not (
        jnp.issubdtype(scale.dtype, jnp.floating) or jnp.issubdtype(scale.dtype, jnp.integer)
    ):
        raise TypeError(
            f"scale is {describe(scale)}; expected a number, or an array of one of shape ()"
        )
    return scale


def scale_of(scale, q: jax.Array) -> tuple[jax.Array, float]:
    """Computes the query and the number that its products are multiplied by.

    A scale that is an array multiplies the query, so that it may be traced, mapped and
    differentiated. The number stays 1 / sqrt(H) then, so that at common scales the query keeps its
    magnitude, and float16 its range.
    """
    root = math.sqrt(q.shape[-1])
    if scale is None:
        return q, 1.0 / root
    scale = number_or_array(scale)
    if not isinstance(scale, jax.Array):
        return q, scale
    wide = sum_dtype(q.dtype)
    factor = scale.astype(wide) * root
    x, finite = q.astype(wide), jnp.isfinite(q)
    # The gradient of scale is the sum of dx * x: NaN in padding must not reach it.
    x = jnp.where(finite, x, 0.0) * factor + jnp.where(finite, 0.0, x) * lax.stop_gradient(factor)
    return x.astype(q.dtype), 1.0 / root


def softcap_of(softcap) -> float | None:
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


def precision_of(precision, dtype) -> str:
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
        raise TypeError(f"{name} is {describe(x)}; expected a Python number") from error
    except OverflowError:
        number = math.inf
    if not abs(number) <= _MAX_FLOAT32:
        raise ValueError(f"{name} is {number}; expected a finite number that float32 can hold")
    return number


def flag(name: str, x: Any) -> bool:
    """Checks a switch, or names it in a TypeError."""
    refused = isinstance(x, jax.core.Tracer) or getattr(x, "ndim", 0) != 0
    if isinstance(x, jax.Array) and not refused:
        refused = jnp.issubdtype(x.dtype, jax.dtypes.extended)  # a key
        x = x if refused else x.item()  # by jnp it would be compared in the caller's program
    if refused or x not in (True, False):
        raise TypeError(
            f"{name} is {describe(x)}; expected True or False, known when the call is traced"
        )
    return bool(x)


def choice(name: str, x: Any, choices: tuple[str, ...]) -> str:
    if not isinstance(x, str) or x not in choices:
        raise ValueError(f"{name} is {x!r}; expected one of {', '.join(map(repr, choices))}")
    return x


def describe(x: Any) -> str:
    shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
    return repr(x) if shape is None else f"an array of shape {shape} and dtype {dtype}"
