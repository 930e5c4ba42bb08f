"""Owns how a function of scores is found to add lines of the distance from query to key.

A score + slope * (key - query) + constant, of which the head decides both, wherever the key stands
`reach` or more after the query, and another such line where it stands as much before: ALiBi (reach
0), tables of clipped distances, T5's buckets (reach: their largest distance). Kernels take such a
line along a row of scores for one fused multiplication of each, or none where it has no slope; the
function itself is three or more.

A line has the function's values to a few units in the last place of its largest term: it has the
terms of the function, the score, one product of the distance and one constant, and no others. What
would be left out where terms cancel, an addition that rounds the score say, is no line; nor is a
number beyond _LARGEST, beside which the score is rounded to be seen.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jax_flash._function import Function
from jax_flash._gpu import emit
from jax_flash._gpu.traits import are_small
from jax_flash._problem import Shapes


@dataclasses.dataclass(frozen=True)
class Line:
    """What a score + slope * (key - query) + constant has.

    Attributes:
      lines: what computes what follows, of p, row, batch and head.
      slope, constant: names or numbers in the text.
    """

    lines: tuple[emit.Line, ...]
    slope: str
    constant: str

    @property
    def is_level(self) -> bool:
        return self.slope == _ZERO

    def compute(self, name: str) -> str:
        """Writes what sets `name`."""
        text = [line.explained for line in self.lines]
        text.append(f"{name} = {{{self.slope}, {self.constant}}};")
        return "  {\n" + "".join(f"    {line}\n" for line in text) + "  }\n"


@dataclasses.dataclass(frozen=True)
class Lines:
    """The lines of keys that stand `reach` or more before and after a query."""

    reach: int
    before: Line
    after: Line

    @property
    def is_one(self) -> bool:
        """Tells whether there is one line, for all keys."""
        return self.reach == 0 and self.before == self.after

    @property
    def add_nothing(self) -> bool:
        return self.are_level and self.before.constant == self.after.constant == _ZERO

    @property
    def bend(self) -> bool:
        """Tells whether the slopes differ."""
        before, after = self.before, self.after
        return before.slope != after.slope or (before.lines != after.lines and not self.are_level)

    @property
    def are_level(self) -> bool:
        """Tells whether none has a slope."""
        return self.before.is_level and self.after.is_level

    def define(self, name: str) -> str:
        """Writes a function `name` of (p, row, batch, head) that returns both."""
        qualifiers = emit.inlined((*self.before.lines, *self.after.lines))
        return (
            "struct LineOfHead {\n  float slope, constant;\n};\n"
            "struct LinesOfHead {\n  LineOfHead before, after;\n};\n"
            f"template <class Params>\n{qualifiers} LinesOfHead "
            f"{name}(const Params& p, int row, int batch, int head) {{\n  LinesOfHead lines;\n"
            f"{self.before.compute('lines.before')}{self.after.compute('lines.after')}"
            "  return lines;\n}\n"
        )


def find(function: Function, shapes: Shapes) -> Lines | None:
    """Finds the lines that a function adds in a call of these sizes, if some key is beyond them."""
    if not are_small(shapes):
        return None
    lines = lines_of(function, tuple(shapes.own_captures))
    return lines if lines and lines.reach < max(shapes.q_len, shapes.kv_len) else None


@functools.lru_cache(maxsize=256)
def lines_of(function: Function, rows: tuple[bool, ...]) -> Lines | None:
    """Finds the lines that a function adds, if it does that and nothing else from a reach on.

    The reach is the first that will do of those distances where it compares one with a number.

    Arguments:
      function: of score, batch, head, query and key, whose indices are less than emit.SMALL.
      rows: which captured arrays differ between batch rows.
    """
    tried: set[int] = set()
    reaches = {0}
    while reaches - tried and len(tried) < _MOST_REACHES:
        reach = min(reaches - tried)
        tried.add(reach)
        found = []
        for side in (-1, 1):
            finder = _Finder(side, reach)
            found.append(finder.line_of(function, rows))
            reaches |= finder.reaches
        before, after = found
        if before is not None and after is not None:
            lines = Lines(reach, before, after)
            return None if lines.add_nothing else lines
    return None


_ZERO = "0.0f"
_LARGEST = 64.0  # of a constant: scores are rounded by 2^-19 beside it
_MOST_REACHES = 16


@dataclasses.dataclass(frozen=True)
class _Sum:
    """A float: score + slope * d + constant, d = key - query, of which the head decides factors."""

    score: bool = False
    slope: emit.Scalar | None = None
    constant: emit.Scalar | None = None

    @property
    def is_constant(self) -> bool:
        return not self.score and self.slope is None

    @property
    def is_small(self) -> bool:
        """Tells whether the score is rounded no more than by one addition beside a slope."""
        if self.constant is None:
            return True
        if self.constant.number is None:
            return self.slope is None
        return abs(float(self.constant.number)) <= _LARGEST


@dataclasses.dataclass(frozen=True)
class _Whole:
    """A whole number: key * `key` + query * `query` + constant."""

    key: int = 0
    query: int = 0
    constant: int = 0

    @property
    def is_distance(self) -> bool:
        """Tells whether it is a multiple of key - query and a constant."""
        return self.key == -self.query != 0

    @property
    def is_exact(self) -> bool:
        """Tells whether float32 holds it: up to 2^24, where indices are less than emit.SMALL."""
        indices = abs(self.key) if self.key == -self.query else abs(self.key) + abs(self.query)
        return indices * emit.SMALL + abs(self.constant) <= 2 * emit.SMALL

    def plus(self, other: _Whole, sign: int) -> _Whole:
        return _Whole(
            self.key + sign * other.key,
            self.query + sign * other.query,
            self.constant + sign * other.constant,
        )


class _Finder(emit.Writer):
    """Follows which scalars are such sums. What it cannot tell is none.

    Arguments:
      side: 1: keys stand `reach` or more after the query; -1: before it.
    """

    def __init__(self, side: int, reach: int) -> None:
        super().__init__()
        self.side, self.reach = side, reach
        self.reaches: set[int] = set()  # from which on comparisons are decided
        self.sums: dict[str, _Sum] = {"score": _Sum(score=True)}
        self.wholes: dict[str, _Whole] = {
            "key.index": _Whole(key=1),
            "query.index": _Whole(query=1),
        }
        self.floats: dict[str, _Whole] = {}  # float32 that are such numbers

    def line_of(self, function: Function, rows: tuple[bool, ...]) -> Line | None:
        try:
            result = emit.run(self, function, rows)
        except emit.UnsupportedError:
            return None
        found = self.sum_of(result)
        if found is None or not found.score or not found.is_small:
            return None
        texts = [_ZERO if x is None else x.text for x in (found.slope, found.constant)]
        return Line(self.needed(texts, False), *texts)

    def sum_of(self, x: emit.Scalar) -> _Sum | None:
        if x.text in self.sums:
            return self.sums[x.text]
        return _Sum(constant=x) if self.is_of_head(x.text) else None

    def whole_of(self, x: emit.Scalar) -> _Whole | None:
        if x.text in self.wholes:
            return self.wholes[x.text]
        return None if x.number is None else _Whole(constant=int(x.number))

    def bounds_of(self, whole: _Whole) -> tuple[int, int]:
        """Returns the ends of a multiple of the distance and a constant."""
        factor = whole.key * self.side
        ends = [factor * d + whole.constant for d in (self.reach, emit.SMALL)]
        return min(ends), max(ends)

    def compute(
        self, name: str, params: Mapping[str, Any], x: Sequence[emit.Scalar], dtype: str
    ) -> emit.Scalar:
        result = super().compute(name, params, x, dtype)
        kinds = {one.dtype for one in x}
        if kinds == {dtype} == {"int32"}:
            whole = self._whole(name, x)
            if whole is not None and max(-result.low, result.high) <= 2 * emit.SMALL:  # float32s
                whole = self.wholes.setdefault(result.text, whole)
                if whole.is_distance:
                    low, high = self.bounds_of(whole)
                    bounds = max(low, result.low), min(high, result.high)
                    result = dataclasses.replace(result, bounds=bounds)
        elif dtype == "float32":
            whole = found = None
            if name == "convert_element_type" and kinds == {"int32"}:
                whole = self.whole_of(x[0])
            elif kinds == {"float32"}:
                found, whole = self._sum(name, x), self._whole_of_floats(name, x)
            if whole is not None:
                self.floats[result.text] = whole
                found = found or self._of_whole(whole)
            if found is not None:
                self.sums.setdefault(result.text, found)
        return result

    def extreme(self, name: str, a: emit.Scalar, b: emit.Scalar) -> emit.Scalar:
        self._apart(a, b)
        return super().extreme(name, a, b)

    def compare(self, name: str, a: emit.Scalar, b: emit.Scalar) -> emit.Scalar:
        apart = self._apart(a, b)
        if apart is not None:
            low, high = self.bounds_of(apart)
            if name in ("eq", "ne") and (low > 0 or high < 0):
                return emit.of_number(np.bool_(name == "ne"))
            a = dataclasses.replace(a, bounds=(low, high))
            decided = super().compare(name, a, emit.of_number(np.int32(0)))
            if decided.number is not None:
                return decided
        return super().compare(name, a, b)

    def _apart(self, a: emit.Scalar, b: emit.Scalar) -> _Whole | None:
        """Returns a - b if the distance decides it; notes where its sign changes."""
        one, other = (self.whole_of(x) if x.dtype == "int32" else None for x in (a, b))
        if one is None or other is None:
            return None
        apart = one.plus(other, -1)
        if not apart.is_distance:
            return None
        change = abs(apart.constant) // abs(apart.key)
        self.reaches |= {change, change + 1}
        return apart

    def _whole(self, name: str, x: Sequence[emit.Scalar]) -> _Whole | None:
        a, b = self.whole_of(x[0]), self.whole_of(x[-1])
        if a is None or b is None:
            return None
        match name:
            case "add":
                return a.plus(b, 1)
            case "sub":
                return a.plus(b, -1)
            case "neg":
                return _Whole().plus(a, -1)
            case "abs" if a.is_distance:
                self._apart(x[0], emit.of_number(np.int32(0)))
                if x[0].high <= 0:
                    return _Whole().plus(a, -1)
        return None

    def _whole_of_floats(self, name: str, x: Sequence[emit.Scalar]) -> _Whole | None:
        """Returns the sum or difference of two float32 that are whole numbers, if it is exact."""
        a, b = (self.floats.get(one.text) for one in (x[0], x[-1]))
        if name not in ("add", "sub") or a is None or b is None:
            return None
        whole = a.plus(b, 1 if name == "add" else -1)
        return whole if whole.is_exact else None

    def _of_whole(self, whole: _Whole) -> _Sum | None:
        if whole.key != -whole.query:
            return None
        parts = (whole.key, whole.constant)
        return _Sum(False, *(_number(one) if one else None for one in parts))

    def _sum(self, name: str, x: Sequence[emit.Scalar]) -> _Sum | None:
        a, b = self.sum_of(x[0]), self.sum_of(x[-1])
        if a is None or b is None or (a.is_constant and b.is_constant):
            return None  # or the head decides it
        match name:
            case "add" | "add_any":
                return self._added(a, b)
            case "sub" if not b.score:
                negative = self._times(b, _number(-1))
                return negative and self._added(a, negative)
            case "neg" if not a.score:
                return self._times(a, _number(-1))
            case "mul" if a.is_constant and a.constant and not b.score:
                return self._times(b, a.constant)
            case "mul" if b.is_constant and b.constant and not a.score:
                return self._times(a, b.constant)
            case "div" if b.is_constant and b.constant and not a.score:
                number = b.constant.number
                return self._times(a, _number(1 / number)) if number else None
            case "abs" if a in (_Sum(slope=_number(1)), _Sum(slope=_number(-1))):
                return _Sum(slope=_number(self.side))
        return None

    def _added(self, a: _Sum, b: _Sum) -> _Sum | None:
        if (a.score and b.score) or not (a.is_small and b.is_small):
            return None
        sums = []
        for one, other in ((a.slope, b.slope), (a.constant, b.constant)):
            if one is not None and other is not None:
                numbers = one.number, other.number
                if None in numbers or numbers[0] * numbers[1] < 0:
                    return None  # they may cancel
                sums.append(_number(numbers[0] + numbers[1]))
            else:
                sums.append(other if one is None else one)
        return _Sum(a.score or b.score, *sums)

    def _times(self, a: _Sum, factor: emit.Scalar) -> _Sum | None:
        exact = factor.number is not None and abs(np.frexp(factor.number)[0]) == 0.5
        if a.slope is not None and a.constant is not None and not exact:
            return None  # its product is rounded once, not by parts
        parts = []
        for x in (a.slope, a.constant):
            made = None if x is None else self._product(x, factor)
            if x is not None and made is None:
                return None
            parts.append(made)
        return _Sum(False, *parts)

    def _product(self, a: emit.Scalar, b: emit.Scalar) -> emit.Scalar | None:
        if a.number is not None and b.number is not None:
            made = np.float32(a.number) * np.float32(b.number)
            return _number(float(made)) if 2.0**-100 < abs(made) < 2.0**100 else None
        for one, other in ((a, b), (b, a)):
            if one.number is not None and abs(one.number) == 1:
                return other if one.number > 0 else self.value("float32", f"-{other.text}")
        return None


def _number(x: float) -> emit.Scalar:
    return emit.of_number(np.float32(x))
