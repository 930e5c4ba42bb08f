"""What is checked of calls in float8: of their scales and options, and what they cannot have.

Read next: `_float8.py`; `_ops/float8.py`.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash import _debug, _float8
from jax_flash._float8 import BLOCKS, DTYPE
from jax_flash._ops.float8 import Form
from jax_flash._problem import Problem
from jax_flash._terms import TERMS
from jax_flash._validate.arrays import array
from jax_flash._validate.scalars import choice, describe, number_or_array

_NAMES = ("query", "key", "value")
_OUT_DTYPES = ("bfloat16", "float16", "float32")
_16_BITS = ("bfloat16", "float16")
# Others would have an operand of their own in the kernels, or products that float8 has none of.
_REFUSED = ("bias", "mask", "dropout_state", "score_ids")
_LEAST_DIM, _LARGEST_DIM, _STEP = 64, 256, 16


class QArray(Protocol):
    """What qwix's QArray has, the values and scales of an array: qwix is not imported."""

    @property
    def qvalue(self) -> Any: ...
    @property
    def scale(self) -> Any: ...
    @property
    def zero_point(self) -> Any: ...


def without_qarrays(
    arrays: Sequence[Any], scales: Sequence[Any]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Takes qwix's QArrays apart, to values and scales; what is none stays as it is.

    They are known by their attributes.
    """
    parted = [_parts(*item) for item in zip(_NAMES, arrays, scales, strict=True)]
    values, scales = zip(*parted, strict=True)
    return values, scales


def _parts(name: str, x: Any, scale: Any) -> tuple[Any, Any]:
    if not all(hasattr(x, part) for part in ("qvalue", "scale", "zero_point")):
        return x, scale
    if scale is not None:
        raise ValueError(f"{name}_scale is given and {name} is a QArray, which has its own scale")
    values, scale = array(name, x.qvalue), array(f"the scale of {name}", x.scale)
    _check_signs(f"the scale of {name}", x.scale, scale)
    if values.dtype != DTYPE:
        raise TypeError(f"{name} is a QArray of {values.dtype}; expected {DTYPE}")
    if x.zero_point is not None:
        raise ValueError(f"{name} is a QArray with a zero_point; expected one without")
    if values.ndim < 3:
        return values, None  # which is refused by its rank
    *batch, length, heads, _ = values.shape
    *lead, blocks, of_heads, features = scale.shape if scale.ndim == values.ndim else (0,) * 4
    size = length // blocks if blocks else 0
    dims = zip((*lead, of_heads), (*batch, heads), strict=False)
    if (
        features != 1
        or not all(have in (1, want) for have, want in dims)
        or (blocks > 1 and (size % BLOCKS[0] or size * blocks != length))
    ):
        raise ValueError(
            f"the scale of {name} has shape {scale.shape} and its qvalue {values.shape}; expected "
            f"one for all features of a head, and all positions or a multiple of {BLOCKS[0]}, as "
            "qwix.quantize(..., channelwise_axes=(0, 2), tiled_axes={1: 128}) makes of [B, T, N, H]"
        )
    if blocks > 1:
        block = max(n for n in BLOCKS if size % n == 0)
        scale = jnp.repeat(scale, size // block, axis=-3)
    return values, jnp.broadcast_to(scale[..., 0], (*batch, scale.shape[-3], heads))


def form_of(
    arrays: Sequence[jax.Array], scales: Sequence[Any], out_dtype: Any, quantize: Any, fallback: Any
) -> Form | None:
    """Reads how a call is in float8, if it is."""
    dtype = arrays[0].dtype.name
    if quantize is not None:
        choice("quantize", quantize, ("fp8",))
        if dtype not in _16_BITS:
            raise TypeError(
                f"quantize is 'fp8' and query has dtype {dtype}; expected one of "
                f"{', '.join(_16_BITS)}" + (": it is quantised already" if dtype == DTYPE else "")
            )
    options = {f"{name}_scale": x for name, x in zip(_NAMES, scales, strict=True)}
    if dtype != DTYPE:
        _refuse_of(options, f"query has dtype {dtype}; expected {DTYPE} where scales are given")
    if dtype != DTYPE and quantize is None:
        others = {"out_dtype": out_dtype, "fallback": fallback}
        _refuse_of(others, f"expected query of {DTYPE}, or quantize='fp8', with it")
        return None
    if fallback is not None:
        choice("fallback", fallback, ("16bit",))
    taken = None
    if dtype == DTYPE:
        made = (_scale(*item) for item in zip(options, scales, _NAMES, arrays, strict=True))
        taken = tuple(made)
    own = "bfloat16" if dtype == DTYPE else dtype
    keys = -(-arrays[1].shape[-3] // BLOCKS[1])  # blocks of them
    fine = taken is not None and any(x.shape[-2] > keys for x in taken[1:])
    return Form(taken, _out_dtype(out_dtype, own), fallback is not None, fine)  # pyright: ignore


def check_amax(form: Form | None, arrays: Sequence[jax.Array]) -> None:
    """Refuses return_amax for a call that is not in float8."""
    if form is None:
        raise ValueError(
            f"return_amax is True and query has dtype {arrays[0].dtype}; expected it with query of "
            f"{DTYPE}, or with quantize='fp8'"
        )


def amax_of(
    form: Form | None,
    scales: tuple[jax.Array, ...] | None,
    given: Sequence[jax.Array],
    arrays: Sequence[jax.Array],
) -> tuple[Form | None, jax.Array | None]:
    """Computes the largest magnitudes of query, key and value, unless quantising them finds these.

    Arguments:
      form: of the call; None: it is computed in 16 bits.
      scales: of query, key and value, if they have any.
      given: query, key and value.
      arrays: what is quantised.

    Returns: the form, and float32 [3], or a form that finds them and None.
    """
    same = all(x is own for x, own in zip(arrays, given, strict=True))
    if form is not None and form.scales is None and same:
        return dataclasses.replace(form, with_amax=True), None
    return form, _float8.largest_of_all(given, scales or (None, None, None))


def scale_of(scale: Any, form: Form | None, q: jax.Array) -> tuple[Form, jax.Array, float]:
    """Computes the form, q, and the number that scores are multiplied by.

    An array joins q's scale, and its sign q: scales are not below 0.
    """
    root = math.sqrt(q.shape[-1])
    if form is None or form.scales is None:
        raise AssertionError("float8 without scales")
    if scale is None:
        return form, q, 1.0 / root
    scale = number_or_array(scale)
    if not isinstance(scale, jax.Array):
        return form, q, scale
    of_query, *others = form.scales
    scales = (of_query * (jnp.abs(scale.astype(jnp.float32)) * root), *others)
    return dataclasses.replace(form, scales=scales), jnp.where(scale < 0, -q, q), 1.0 / root


def falls_back(form: Form, problem: Problem, arrays: Sequence[jax.Array]) -> bool:
    """Tells whether a call is one of 16 bits because float8 does not have what it asks for.

    Raises: NotImplementedError with all reasons, where it may not be.
    """
    reasons = [f"no {TERMS[name].feature}" for name in problem.terms if name in _REFUSED]
    if problem.score is not None:
        reasons.append("no score function")
    for name, x in zip(_NAMES[1:], arrays[1:], strict=True):
        dim = x.shape[-1]
        if dim % _STEP or not _LEAST_DIM <= dim <= _LARGEST_DIM:
            wanted = f"head dims from {_LEAST_DIM} to {_LARGEST_DIM} that {_STEP} divides"
            reasons.append(f"{wanted}, not {dim} ({name} has shape {x.shape})")
    if reasons and not form.in_16_bits:
        raise NotImplementedError(
            f"attention in float8 has {', '.join(dict.fromkeys(reasons))}; expected a call without "
            "that, or fallback='16bit', by which it is computed in 16 bits"
        )
    return bool(reasons)


def in_16_bits(form: Form, arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Returns query, key and value as 16-bit kernels take them."""
    if form.scales is None:
        return tuple(arrays)
    dtype = form.out_dtype if form.out_dtype in _16_BITS else "bfloat16"
    return tuple(
        _float8.dequantise(x, scale, dtype) for x, scale in zip(arrays, form.scales, strict=True)
    )


def _refuse_of(options: dict[str, Any], text: str) -> None:
    for name, x in options.items():
        if x is not None:
            raise ValueError(f"{name} is {describe(x)}: {text}")


def _out_dtype(given: Any, own: str) -> str:
    if given is None:
        return own
    try:
        name = jnp.dtype(given).name
    except TypeError:
        name = repr(given)
    if name not in _OUT_DTYPES:
        raise TypeError(f"out_dtype is {name}; expected one of {', '.join(_OUT_DTYPES)}")
    return name


def _scale(name: str, scale: Any, of: str, x: jax.Array) -> jax.Array:
    """Brings a scale to `[*B, blocks, heads]`, any of which dims may be 1."""
    *batch, length, heads, _ = x.shape
    if scale is None:
        scale = jnp.float32(1)
    given, scale = scale, array(name, scale)
    if not jnp.issubdtype(scale.dtype, jnp.floating) or scale.dtype.itemsize < 2:
        raise TypeError(f"{name} has dtype {scale.dtype} (shape {scale.shape}); expected float32")
    _check_signs(name, given, scale)
    scale = scale.astype(jnp.float32)
    counts = [-(-length // size) for size in BLOCKS]
    if scale.ndim == 0:
        return scale.reshape((1,) * (len(batch) + 2))
    if scale.shape == (*batch, heads):
        return scale[..., None, :]
    if scale.shape in [(*batch, count, heads) for count in (1, *counts)]:
        return scale
    letters = "T" if of == "query" else "S"
    raise ValueError(
        f"{name} has shape {scale.shape} and {of} {x.shape}; expected (), [*B, heads] = "
        f"{(*batch, heads)}, or [*B, blocks, heads] = {(*batch, counts[0], heads)} or "
        f"{(*batch, counts[1], heads)}, of {BLOCKS[0]} or {BLOCKS[1]} of {letters} = {length} "
        "positions each"
    )


def _check_signs(name: str, given: Any, scale: jax.Array) -> None:
    """Refuses scales below 0, by which kernels take a row's least score for its largest.

    What NumPy or Python holds is looked at always, the rest under `debug_values`.
    """
    if not isinstance(given, np.ndarray | np.generic | int | float):
        _debug.check(functools.partial(_debug.negative, name), scale)
    elif (message := _debug.negative(name, np.asarray(given))) is not None:
        raise ValueError(message)
