"""Owns `Size`: a whole number that follows from the dims of a call's arrays.

Grids, the shapes of scratch arrays and many parameters of kernels are such numbers. Where
jax.export leaves a batch or a length symbolic they are known when the program runs, so a plan has
them as expressions, which cuda/runtime/plan.cc evaluates.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Size:
    """An expression over dims, in reverse Polish notation: "T 64 +" is T + 64."""

    text: str

    def __add__(self, other: AnySize) -> Size:
        return self if other == 0 else _join(self, other, "+")

    def __radd__(self, other: int) -> Size:
        return _join(other, self, "+")

    def __sub__(self, other: AnySize) -> Size:
        return _join(self, other, "-")

    def __rsub__(self, other: int) -> Size:
        return _join(other, self, "-")

    def __mul__(self, other: AnySize) -> AnySize:
        return self if other == 1 else _join(self, other, "*")

    def __rmul__(self, other: int) -> AnySize:
        return self if other == 1 else _join(other, self, "*")

    def __floordiv__(self, other: AnySize) -> AnySize:
        return self if other == 1 else _join(self, other, "/")

    def __rfloordiv__(self, other: int) -> Size:
        return _join(other, self, "/")

    def __mod__(self, other: AnySize) -> Size:
        return _join(self, other, "%")

    def __rmod__(self, other: int) -> Size:
        return _join(other, self, "%")

    def __bool__(self) -> bool:
        raise TypeError(f"whether {self.text!r} is 0 is known when the program runs")


AnySize = Size | int

# Batch rows, queries, keys, query heads, kv heads; and the GPU's multiprocessors.
B, T, S, N, K = map(Size, "BTSNK")
SMS = Size("sms")


def ceil_div(a: AnySize, b: AnySize) -> AnySize:
    """Counts the blocks of b in a."""
    return -(-a // b) if isinstance(a, int) and isinstance(b, int) else _join(a, b, "ceil")


def minimum(a: AnySize, b: AnySize) -> AnySize:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else _join(a, b, "min")


def maximum(a: AnySize, b: AnySize) -> AnySize:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else _join(a, b, "max")


def equal(a: AnySize, b: AnySize) -> AnySize:
    """Returns 1 or 0."""
    return int(a == b) if isinstance(a, int) and isinstance(b, int) else _join(a, b, "==")


def at_most(a: AnySize, b: AnySize) -> AnySize:
    """Returns 1 or 0."""
    return int(a <= b) if isinstance(a, int) and isinstance(b, int) else _join(a, b, "<=")


def where(condition: AnySize, a: AnySize, b: AnySize) -> AnySize:
    """Returns a, or b where the condition is 0."""
    if isinstance(condition, int):
        return a if condition else b
    return Size(f"{condition.text} {text_of(a)} {text_of(b)} ?")


def product(*sizes: AnySize) -> AnySize:
    result: AnySize = 1
    for size in sizes:
        result = result * size
    return result


def evaluate(size: AnySize, dims: Mapping[str, Any]) -> Any:
    """Returns the number for given dims, which may be symbolic dims of jax.export."""
    if isinstance(size, int):
        return size
    stack: list[Any] = []
    for token in size.text.split():
        if token == "?":
            condition, a, b = stack[-3:]
            stack[-3:] = [a if condition else b]
        elif token in _OPERATORS:
            stack[-2:] = [_OPERATORS[token](*stack[-2:])]
        else:
            stack.append(dims[token] if token in dims else int(token))
    (result,) = stack
    return result


# As cuda/runtime/plan.cc has them.
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
    "%": operator.mod,
    "ceil": lambda a, b: -(-a // b),
    "min": min,
    "max": max,
    "==": lambda a, b: int(a == b),
    "<=": lambda a, b: int(a <= b),
}


def text_of(size: AnySize) -> str:
    """Writes a size as a plan has it."""
    return str(size) if isinstance(size, int) else size.text


def _join(a: AnySize, b: AnySize, operator_: str) -> Size:
    return Size(f"{text_of(a)} {text_of(b)} {operator_}")
