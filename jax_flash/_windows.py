"""Windows, keys near a query by their distance: how a function of indices is found to be one.

`window_of` follows the integers of a traced function. Kernels compare the ends of a window with
each row's own, where bits of a mask are read from memory.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from jax_flash._function import Function
from jax_flash._program import Aval, Value

Window = tuple[int | None, int | None]

_LARGEST = 2**29  # lengths and numbers up to here: the sums below do not wrap


@dataclasses.dataclass(frozen=True)
class _Sum:
    """key * `key` + query * `query` + constant, or the magnitude of that."""

    key: int = 0
    query: int = 0
    constant: int = 0
    magnitude: bool = False

    @property
    def is_constant(self) -> bool:
        return self.key == self.query == 0

    def plus(self, other: _Sum, sign: int) -> _Sum | None:
        key, query = self.key + sign * other.key, self.query + sign * other.query
        constant = self.constant + sign * other.constant
        if self.magnitude or other.magnitude or max(abs(key), abs(query)) > 1:
            return None
        return _Sum(key, query, constant) if abs(constant) <= _LARGEST else None


@dataclasses.dataclass(frozen=True)
class _Between:
    """True where low <= key - query <= high."""

    low: float = -math.inf
    high: float = math.inf

    def both(self, other: _Between) -> _Between:
        return _Between(max(self.low, other.low), min(self.high, other.high))

    def either(self, other: _Between) -> _Between | None:
        first, last = sorted((self, other), key=lambda x: x.low)
        if self.empty or other.empty or last.low > first.high + 1:
            return None
        return _Between(first.low, max(first.high, last.high))

    @property
    def empty(self) -> bool:
        return self.low > self.high


def window_of(function: Function, q_len: int, kv_len: int) -> Window | None:
    """Finds the window that a function of (batch, head, query, key) is.

    Returns:
      how many keys a query sees before and after its own index, None: all; or None if the function
      is no window, or none that holds the query's own index.
    """
    if max(q_len, kv_len) > _LARGEST:
        return None
    arrays = [None] * len(function.captures)
    values: dict[int, Any] = dict(enumerate([None, None, _Sum(query=1), _Sum(key=1), *arrays]))

    def read(x: Value) -> Any:
        return values[x] if isinstance(x, int) else _constant(x.value)

    for step in function.program.steps:
        operands = [read(x) for x in step.inputs]
        known = len(step.outputs) == 1 and all(x is not None for x in operands)
        found = _compute(step.primitive.name, operands, step.avals[0]) if known else None
        values.update(dict.fromkeys(step.outputs, found))
    (found,) = map(read, function.program.results)
    if not isinstance(found, _Between) or not found.low <= 0 <= found.high:
        return None
    left, right = (None if math.isinf(x) else int(x) for x in (-found.low, found.high))
    return left, right


def within(window: Window, reach: Any) -> Window:
    """Returns a window whose sides are None from `reach` on, where no key is.

    Where jax.export left that symbolic, a side of 2^30 counts as that wide.
    """
    reach = reach if isinstance(reach, int) else 1 << 30
    left, right = (None if side is None or side >= reach else side for side in window)
    return left, right


def narrower(one: Window, other: Window) -> Window:
    """Computes the window of what both show."""
    sides = [[x for x in sides if x is not None] for sides in zip(one, other, strict=True)]
    left, right = (min(sides) if sides else None for sides in sides)
    return left, right


def _constant(value: np.ndarray) -> _Sum | None:
    if value.shape != () or not np.issubdtype(value.dtype, np.integer):
        return None
    number = int(value)
    return _Sum(constant=number) if abs(number) <= _LARGEST else None


def _compute(name: str, x: list[Any], aval: Aval) -> _Sum | _Between | None:
    if aval.shape != ():
        return None
    a, b = x[0], x[-1]
    if isinstance(a, _Sum) and isinstance(b, _Sum):
        match name:
            case "add" | "sub":
                return a.plus(b, 1 if name == "add" else -1)
            case "neg":
                return _Sum().plus(a, -1)
            case "abs":
                return dataclasses.replace(a, magnitude=True)
            case "convert_element_type" if np.issubdtype(aval.dtype, np.signedinteger):
                return a if np.iinfo(aval.dtype).bits >= 32 else None
            case "le" | "lt":
                return _at_most(a, b, int(name == "lt"))
            case "ge" | "gt":
                return _at_most(b, a, int(name == "gt"))
    elif isinstance(a, _Between) and isinstance(b, _Between):
        match name:
            case "and":
                return a.both(b)
            case "or":
                return a.either(b)
            case "not" if math.isinf(a.low) and not math.isinf(a.high):
                return _Between(low=a.high + 1)
            case "not" if math.isinf(a.high) and not math.isinf(a.low):
                return _Between(high=a.low - 1)
            case "convert_element_type" if aval.dtype == "bool":
                return a
    return None


def _at_most(a: _Sum, b: _Sum, gap: int) -> _Between | None:
    """Where a + gap <= b."""
    if a.magnitude and b.is_constant and not b.magnitude:
        signed = dataclasses.replace(a, magnitude=False)
        below = _at_most(signed, b, gap)
        above = _at_most(dataclasses.replace(b, constant=-b.constant), signed, gap)
        return below.both(above) if below and above else None
    apart = a.plus(b, -1)
    if apart is None or (apart.key, apart.query) not in ((1, -1), (-1, 1)):
        return None
    if apart.key > 0:  # d + constant + gap <= 0
        return _Between(high=-apart.constant - gap)
    return _Between(low=apart.constant + gap)
