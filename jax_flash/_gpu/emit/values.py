"""Owns what a function's text is made of: numbers and names, with what is known of them."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_flash._program import Constant

MOST = 64  # elements of an array of scalars
LOW, HIGH = -(2**31), 2**31 - 1
EXACT = 2**24  # integers up to here are float32s
SMALL = 2**23  # lengths up to here keep positions, their sums and differences below EXACT
_TYPES = {"float32": "float", "int32": "int", "uint32": "unsigned", "bool": "bool"}


class UnsupportedError(Exception):
    """There is no text for a function; says why."""


@dataclasses.dataclass(frozen=True)
class Real:
    """An integer as a float: base + offset, which is constant in an element of a fragment or "".

    Sums keep the two apart, so that a fragment's elements share the base and have an immediate.
    """

    base: str
    offset: str = ""

    @property
    def text(self) -> str:
        return f"{self.base} + {self.offset}" if self.offset else self.base


@dataclasses.dataclass(frozen=True)
class Scalar:
    """A name or a number in the text.

    Attributes:
      text: of it.
      dtype: JAX's.
      number: its value, where that is known.
      bounds: of an int32.
      real: what it is as a float, where that is exact.
    """

    text: str
    dtype: str
    number: Any = None
    bounds: tuple[int, int] | None = None
    real: Real | None = None

    @property
    def low(self) -> int:
        return self.bounds[0] if self.bounds else LOW

    @property
    def high(self) -> int:
        return self.bounds[1] if self.bounds else HIGH


@dataclasses.dataclass(frozen=True)
class View:
    """Elements of a captured array, not read yet: at offset + sum of index times stride.

    Where it is read along the queries or keys, `along` says the place, its dim, and what the
    offset is without it, from where on kernels read pairs if that is `even` in every batch row.
    """

    capture: int
    dtype: str
    offset: Scalar
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    along: tuple[str, int, Scalar] | None = None
    even: bool = True


Operand = np.ndarray | View  # the first of Scalar


def single(x: Scalar) -> np.ndarray:
    array = np.empty((), object)
    array[()] = x
    return array


def only(x: Any) -> Scalar:
    """Returns the element of an array of one, or what is one already."""
    return x.item() if isinstance(x, np.ndarray) else x


def of_constant(x: Constant) -> np.ndarray:
    if x.value.size > MOST:
        raise UnsupportedError(f"it computes with {x.value.size} elements of an array at once")
    array = np.empty(x.value.shape, object)
    for at in np.ndindex(array.shape):
        array[at] = of_number(x.value[at])
    return array


def of_number(x: Any) -> Scalar:
    dtype = str(x.dtype)
    if dtype == "int32":
        return integer(int(x))
    return Scalar(literal(x), dtype, number=x)


def integer(x: int) -> Scalar:
    real = Real(literal(np.float32(x))) if abs(x) <= EXACT else None
    return Scalar(literal(np.int32(x)), "int32", number=x, bounds=(x, x), real=real)


def literal(x: Any) -> str:
    """Writes a number that any operator may stand in front of."""
    match type_of(str(x.dtype)):
        case "float":
            if not np.isfinite(x):
                return f"__builtin_bit_cast(float, 0x{int(x.view(np.uint32)):08x}u)"
            text = str(x)
            text = f"{text}f" if re.search("[.e]", text) else f"{text}.0f"
        case "int":
            text = "-2147483647 - 1" if x == LOW else str(int(x))
        case "unsigned":
            return f"{int(x)}u"
        case _:
            return "true" if x else "false"
    return f"({text})" if text.startswith("-") else text  # after another minus there is no --


def type_of(dtype: str) -> str:
    if dtype not in _TYPES:
        raise UnsupportedError(f"it computes in {dtype}, and kernels in {', '.join(_TYPES)}")
    return _TYPES[dtype]


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
