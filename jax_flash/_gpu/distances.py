"""Owns how a function of scores is found to add a line of the distance from query to key, or two.

A score + slope * (key - query) + bend * |key - query| + constant, of which the head decides slope,
bend and constant: ALiBi and what resembles it. Kernels take such a line along a row of scores for
one fused multiplication of each, where the function itself is three or more.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jax_flash._function import Function
from jax_flash._gpu import emit


@dataclasses.dataclass(frozen=True)
class Line:
    """What a score + slope * d + bend * |d| + constant has, d = key - query.

    Attributes:
      lines: text that computes what follows, of p, row, batch and head.
      slope, bend, constant: names or numbers in the text.
    """

    lines: tuple[str, ...]
    slope: str
    bend: str
    constant: str

    @property
    def bends(self) -> bool:
        """Tells whether it is another line on either side of the query."""
        return self.bend != _ZERO

    def define(self, name: str) -> str:
        """Writes a function `name` of (p, row, batch, head) that returns the three."""
        body = "".join(f"  {line}\n" for line in self.lines)
        return (
            f"struct LineOfHead {{\n  float slope, bend, constant;\n}};\n"
            f"template <class Params>\n__device__ __forceinline__ LineOfHead "
            f"{name}(const Params& p, int row, int batch, int head) {{\n"
            f"{body}  return {{{self.slope}, {self.bend}, {self.constant}}};\n}}\n"
        )


@functools.lru_cache(maxsize=256)
def line_of(function: Function, rows: tuple[bool, ...]) -> Line | None:
    """Finds the line that a function adds, if it does that and nothing else.

    Arguments:
      function: of score, batch, head, query and key, whose indices are less than emit.SMALL.
      rows: which captured arrays differ between batch rows.
    """
    finder = _Finder()
    try:
        result = emit.run(finder, function, rows)
    except emit.UnsupportedError:
        return None
    found = finder.sum_of(result)
    if found is None or not found.score or (found.slope is None and found.bend is None):
        return None
    texts = [_ZERO if x is None else x.text for x in (found.slope, found.bend, found.constant)]
    return Line(tuple(map(str, finder.needed(texts, False))), *texts)


_ZERO = "0.0f"


@dataclasses.dataclass(frozen=True)
class _Sum:
    """A float: score + slope * d + bend * |d| + constant, of which the head decides the factors."""

    score: bool = False
    slope: emit.Scalar | None = None
    bend: emit.Scalar | None = None
    constant: emit.Scalar | None = None

    @property
    def is_constant(self) -> bool:
        return not self.score and self.slope is None and self.bend is None


@dataclasses.dataclass(frozen=True)
class _Whole:
    """An int32: key * `key` + query * `query` + constant, or |key - query| * `distance`."""

    key: int = 0
    query: int = 0
    constant: int = 0
    distance: int = 0


class _Finder(emit.Writer):
    """Follows which scalars are such sums. What it cannot tell is none."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, _Sum] = {"score": _Sum(score=True)}
        self.wholes: dict[str, _Whole] = {
            "key.index": _Whole(key=1),
            "query.index": _Whole(query=1),
        }
        self.varying = {"score", "query", "key"}

    def let(self, dtype: str, text: str) -> str:
        name = super().let(dtype, text)
        if not self.varying.isdisjoint(emit.words(text)):
            self.varying.add(name)
        return name

    def sum_of(self, x: emit.Scalar) -> _Sum | None:
        if x.text in self.sums:
            return self.sums[x.text]
        return _Sum(constant=x) if self.varying.isdisjoint(emit.words(x.text)) else None

    def whole_of(self, x: emit.Scalar) -> _Whole | None:
        if x.text in self.wholes:
            return self.wholes[x.text]
        return None if x.number is None else _Whole(constant=int(x.number))

    def compute(
        self, name: str, params: Mapping[str, Any], x: Sequence[emit.Scalar], dtype: str
    ) -> emit.Scalar:
        result = super().compute(name, params, x, dtype)
        kinds = {one.dtype for one in x}
        if kinds == {dtype} == {"int32"}:
            whole = self._whole(name, x)
            if whole is not None and max(-result.low, result.high) <= emit.SMALL:
                self.wholes.setdefault(result.text, whole)
        elif dtype == "float32":
            converts = name == "convert_element_type" and kinds == {"int32"}
            found = self._of_whole(x[0]) if converts else None
            if kinds == {"float32"}:
                found = self._sum(name, x)
            if found is not None:
                self.sums.setdefault(result.text, found)
        return result

    def _whole(self, name: str, x: Sequence[emit.Scalar]) -> _Whole | None:
        a, b = self.whole_of(x[0]), self.whole_of(x[-1])
        if a is None or b is None:
            return None
        pairs = zip(dataclasses.astuple(a), dataclasses.astuple(b), strict=True)
        match name:
            case "add":
                return _Whole(*(one + other for one, other in pairs))
            case "sub":
                return _Whole(*(one - other for one, other in pairs))
            case "neg":
                return _Whole(*(-one for one in dataclasses.astuple(a)))
            case "abs" if a in (_Whole(1, -1), _Whole(-1, 1)):
                return _Whole(distance=1)
        return None

    def _of_whole(self, x: emit.Scalar) -> _Sum | None:
        whole = self.whole_of(x)
        if whole is None or whole.key != -whole.query:
            return None
        parts = (whole.key, whole.distance, whole.constant)
        return _Sum(False, *(_number(one) if one else None for one in parts))

    def _sum(self, name: str, x: Sequence[emit.Scalar]) -> _Sum | None:
        a, b = self.sum_of(x[0]), self.sum_of(x[-1])
        if a is None or b is None or (a.is_constant and b.is_constant):
            return None  # or the head decides it
        match name:
            case "add" | "add_any":
                return self._added(a, b)
            case "sub" if not b.score:
                return self._added(a, self._times(b, _number(-1)))
            case "neg" if not a.score:
                return self._times(a, _number(-1))
            case "mul" if a.is_constant and a.constant and not b.score:
                return self._times(b, a.constant)
            case "mul" if b.is_constant and b.constant and not a.score:
                return self._times(a, b.constant)
            case "div" if b.constant and b.constant.number and b.is_constant and not a.score:
                return self._times(a, _number(1 / b.constant.number))
            case "abs" if a in (_Sum(slope=_number(1)), _Sum(slope=_number(-1))):
                return _Sum(bend=_number(1))
        return None

    def _added(self, a: _Sum, b: _Sum) -> _Sum | None:
        if a.score and b.score:
            return None
        parts = ((a.slope, b.slope), (a.bend, b.bend), (a.constant, b.constant))
        return _Sum(a.score or b.score, *(self._plus(*part) for part in parts))

    def _plus(self, a: emit.Scalar | None, b: emit.Scalar | None) -> emit.Scalar | None:
        if a is None or b is None:
            return a or b
        if a.number is not None and b.number is not None:
            return _number(a.number + b.number)
        return self.value("float32", f"{a.text} + {b.text}")

    def _times(self, a: _Sum, factor: emit.Scalar) -> _Sum:
        return _Sum(False, *(self._product(x, factor) for x in (a.slope, a.bend, a.constant)))

    def _product(self, a: emit.Scalar | None, b: emit.Scalar) -> emit.Scalar | None:
        if a is None:
            return None
        if a.number is not None and b.number is not None:
            return _number(a.number * b.number)
        for one, other in ((a, b), (b, a)):
            if one.number is not None and abs(one.number) == 1:
                return other if one.number > 0 else self.value("float32", f"-{other.text}")
        return self.value("float32", f"{a.text} * {b.text}")


def _number(x: float) -> emit.Scalar:
    return emit.of_number(np.float32(x))
