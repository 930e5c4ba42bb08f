"""Owns how an operation of scalars is text: sums, comparisons, conversions, functions."""

from __future__ import annotations

import dataclasses
import itertools
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jax_flash._gpu.emit.values import (
    EXACT,
    HIGH,
    LOW,
    SMALL,
    Real,
    Scalar,
    UnsupportedError,
    integer,
    literal,
    of_number,
    type_of,
)

_CALLS = {
    **{name: f"{name}f" for name in ("exp", "exp2", "expm1", "log", "log1p", "sqrt", "cbrt")},
    **{name: f"{name}f" for name in ("sin", "cos", "tan", "asin", "acos", "atan", "atan2")},
    **{name: f"{name}f" for name in ("sinh", "cosh", "asinh", "acosh", "atanh")},
    **{name: f"{name}f" for name in ("erf", "erfc", "floor", "ceil", "pow")},
    "tanh": "branchless_tanh",
}
# Functions, by some units.
INEXACT = {*_CALLS.values(), "quick_log", "quick_log1p", "quick_exp", "ptx::exp2_approx"} - {
    *("floorf", "ceilf", "sqrtf")
}
_COMPARES = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_SUMS = {"add": "+", "add_any": "+", "sub": "-", "mul": "*"}
_PLACES = ("query", "key")
_BITS = {"and": "&", "or": "|", "xor": "^"}


def words(*texts: object) -> set[str]:
    return set(itertools.chain(*(re.findall(r"\w+", str(text)) for text in texts)))


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of text that defines a name, or sets one of an argument."""

    kind: str  # its type; "": of an argument
    name: str
    text: str
    primitive: str = ""  # JAX's, that it is of

    def __str__(self) -> str:
        return f"{self.kind} {self.name} = {self.text};".lstrip()

    @property
    def explained(self) -> str:
        """The line and what it is of, which the compiler's complaints are traced to."""
        return f"{self}  // {self.primitive}" if self.primitive else str(self)


class ScalarWriter:
    """Lines of a function, each of which defines a name.

    Each operation of float32 is rounded by itself, as JAX's are: a product that is added to is no
    fused multiplication, which is why it is `__fmul_rn`.
    """

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.names: dict[str, str] = {}
        self.primitive = ""  # whose lines are being written
        self.varying = {"score", *_PLACES}  # names that differ between scores of a head
        # By name: the bool that chooses between two numbers.
        self.chosen: dict[str, tuple[str, tuple[Scalar, Scalar]]] = {}
        # Names of: signs of what is not negative, whether something is 0, and whether it has a
        # remainder, which it has not if it is 0.
        self.signs: dict[str, str] = {}
        self.zeros: dict[str, str] = {}
        self.rests: dict[str, str] = {}

    def needed(self, results: Sequence[str], with_slope: bool) -> tuple[Line, ...]:
        """Lists the lines on which the results depend, and what sets the slope."""
        needed = words(*results)
        kept: list[Line] = []
        for line in reversed(self.lines):
            if line.name in needed:
                needed |= words(line.text)
                kept.insert(0, line)
        return (*kept, *([Line("", "slope", results[1])] if with_slope else []))

    def let(self, dtype: str, text: str) -> str:
        """Names a value; what was written before keeps its name."""
        kind = type_of(dtype)
        key = f"{kind} {text}"
        if key not in self.names:
            name = f"v{len(self.names)}"
            self.names[key] = name
            self.lines.append(Line(kind, name, text, self.primitive))
            if not self.is_of_head(text):
                self.varying.add(name)
        return self.names[key]

    def is_of_head(self, text: str) -> bool:
        """Tells whether a text is the same for all scores of a batch row and head."""
        return self.varying.isdisjoint(words(text))

    def value(self, dtype: str, text: str, **known: Any) -> Scalar:
        return Scalar(self.let(dtype, text), dtype, **known)

    def compute(
        self, name: str, params: Mapping[str, Any], x: Sequence[Scalar], dtype: str
    ) -> Scalar:
        """Writes an operation of scalars; `dtype` is the result's."""
        kinds = {type_of(one.dtype) for one in x}
        texts = [one.text for one in x]
        match name:
            case "convert_element_type":
                return self.convert(x[0], dtype)
            case "stop_gradient":  # of jax 0.12, as the next; earlier ones leave nothing of it
                return x[0]
            case "polynomial":  # of x, then coefficients from the constant one on
                variable, *lower, total = x
                for one in reversed(lower):
                    product = self.compute("mul", {}, [total, variable], dtype)
                    total = self.compute("add", {}, [product, one], dtype)
                return total
            case "bitcast_convert_type":
                return self.value(dtype, f"__builtin_bit_cast({type_of(dtype)}, {texts[0]})")
            case "div" if kinds == {"float"} and x[1].number is not None:
                # A division takes a dozen instructions and a call for its rare cases.
                if _has_reciprocal(x[1]):
                    reciprocal = literal(np.float32(1) / np.float32(x[1].number))
                    if abs(np.frexp(x[1].number)[0]) == 0.5:  # a power of two
                        return self.value(dtype, _product(texts[0], reciprocal))
                    return self.value(dtype, f"divided({texts[0]}, {texts[1]}, {reciprocal})")
            case "div" if kinds == {"float"} and self.is_of_head(texts[1]):
                if not self.is_of_head(texts[0]):
                    reciprocal = self.let(dtype, f"1.0f / {texts[1]}")
                    return self.value(dtype, f"divided({texts[0]}, {texts[1]}, {reciprocal})")
            case "select_n":
                return self.select(x[0], x[1:], dtype)
            case "clamp":
                low, middle, high = x
                return self.extreme("min", self.extreme("max", middle, low), high)
            case "max" | "min":
                return self.extreme(name, *x)
            case "add" | "add_any" | "sub" | "mul" if kinds == {"int"}:
                op = _SUMS[name]
                return self.multiply(x[0], x[1]) if op == "*" else self.add(x[0], x[1], op)
            case "mul" if dtype == "float32" and any(_is_one(one) for one in x):
                return x[1] if _is_one(x[0]) else x[0]
            case "mul" if kinds == {"float"}:
                return self.value(dtype, _product(*texts))
            case "add" | "add_any" if (total := self.sum_of_chosen(texts[0], texts[1])) is not None:
                return total
            case "add" | "add_any" | "sub" | "mul" if "bool" not in kinds:
                return self.value(dtype, f"{texts[0]} {_SUMS[name]} {texts[1]}")
            case _ if name in _COMPARES:
                return self.compare(name, *x)
            case "and" | "or" | "xor" if kinds == {"bool"}:
                return self.logic(name, *x)
            case "and" | "or" | "xor" if kinds <= {"int", "unsigned"}:
                return self.value(dtype, f"{texts[0]} {_BITS[name]} {texts[1]}")
            case "not":
                return self.value(dtype, f"{'!' if kinds == {'bool'} else '~'}{texts[0]}")
        if kinds == {"float"}:
            return self.compute_float(name, params, texts, dtype)
        if kinds <= {"int", "unsigned"}:
            return self.compute_integer(name, params, x, dtype)
        if name == "pow":  # to an integer
            return self.value(dtype, f"powf({texts[0]}, {self.convert(x[1], 'float32').text})")
        raise unknown(name)

    def sum_of_chosen(self, a: str, b: str) -> Scalar | None:
        """Adds numbers that one bool chooses: slopes of a `where` are 0 + 1 and 1 + 0."""
        if a not in self.chosen or b not in self.chosen or self.chosen[a][0] != self.chosen[b][0]:
            return None
        which, first = self.chosen[a]
        cases = [
            of_number(np.float32(one.number) + np.float32(other.number))
            for one, other in zip(first, self.chosen[b][1], strict=True)
        ]
        return self.select(Scalar(which, "bool"), cases, "float32")

    def compute_float(
        self, name: str, params: Mapping[str, Any], x: Sequence[str], dtype: str
    ) -> Scalar:
        match name:
            case _ if name in _CALLS:
                return self.value(dtype, f"{_CALLS[name]}({', '.join(x)})")
            case "div":
                text = f"{x[0]} / {x[1]}"
            case "rem":
                text = f"fmodf({x[0]}, {x[1]})"
            case "neg":
                text = f"-{x[0]}"
            case "abs":
                text = f"fabsf({x[0]})"
            case "sign":  # of zero and NaN themselves
                text = f"{x[0]} > 0.0f ? 1.0f : {x[0]} < 0.0f ? -1.0f : {x[0]}"
            case "round":
                text = f"{('roundf', 'rintf')[int(params['rounding_method'])]}({x[0]})"
            case "rsqrt":
                text = f"1.0f / {self.let('float32', f'sqrtf({x[0]})')}"
            case "logistic":
                text = f"1.0f / (1.0f + {self.let('float32', f'expf(-{x[0]})')})"
            case "square":
                text = _product(x[0], x[0])
            case "one_minus_square":
                text = f"1.0f - {self.let('float32', _product(x[0], x[0]))}"
            case "is_finite":
                text = f"fabsf({x[0]}) < {literal(np.float32(np.inf))}"
            case "integer_pow":
                return self.integer_power(x[0], params["y"])
            case _:
                raise unknown(name)
        return self.value(dtype, text)

    def integer_power(self, x: str, y: int) -> Scalar:
        power, square, left = None, x, abs(y)
        while left:
            if left & 1:
                power = square if power is None else self.let("float32", _product(power, square))
            left >>= 1
            square = self.let("float32", _product(square, square)) if left else square
        text = "1.0f" if power is None else power
        return self.value("float32", f"1.0f / {text}" if y < 0 else text)

    def compute_integer(
        self, name: str, params: Mapping[str, Any], x: Sequence[Scalar], dtype: str
    ) -> Scalar:
        a, b = x[0].text, x[-1].text
        signed = dtype == "int32"
        divisor = x[-1].number
        plain = divisor is not None and int(divisor) not in (0, -1)
        if signed and x[0].low >= 0 and divisor is not None and int(divisor) > 0:
            # As unsigned, of which a power of two is a shift.
            if name == "rem":
                bounds = (0, min(int(divisor) - 1, x[0].high))
                result = self.value(dtype, f"int(unsigned({a}) % {b}u)", bounds=bounds)
                self.rests[result.text] = a
                return result
            if name == "div":
                bounds = (x[0].low // int(divisor), x[0].high // int(divisor))
                return self.value(dtype, f"int(unsigned({a}) / {b}u)", bounds=bounds)
        match name:
            case "div":
                text = f"{a} / {b}"
                if signed and not plain:
                    text = f"{b} == 0 ? -1 : {b} == -1 ? int(0u - unsigned({a})) : {text}"
                elif not plain:
                    text = f"{b} == 0u ? 4294967295u : {text}"
            case "rem":
                text = f"{a} % {b}"
                if signed and not plain:
                    text = f"{b} == 0 ? {a} : {b} == -1 ? 0 : {text}"
                elif not plain:
                    text = f"{b} == 0u ? {a} : {text}"
            case "neg":
                zero = integer(0) if signed else Scalar("0u", dtype)
                return self.add(zero, x[0], "-") if signed else self.value(dtype, f"0u - {a}")
            case "abs" if signed:
                if x[0].low >= 0:
                    return x[0]
                bounds, real = None, None
                if x[0].low > LOW:
                    bounds = (0, max(-x[0].low, x[0].high))
                    real = self.real(bounds, x[:1], "fabsf({})")
                text = f"{a} < 0 ? int(0u - unsigned({a})) : {a}"
                return self.value(dtype, text, bounds=bounds, real=real)
            case "sign" if signed and x[0].low >= 0:
                result = self.value(dtype, f"{a} > 0 ? 1 : 0", bounds=(0, 1))
                self.signs[result.text] = a
                return result
            case "sign":
                text = f"{a} > 0 ? 1 : {a} < 0 ? -1 : 0" if signed else f"{a} > 0u ? 1u : 0u"
            case "integer_pow" if params["y"] > 0:
                power = x[0]
                for _ in range(params["y"] - 1):
                    power = self.compute("mul", {}, [power, x[0]], dtype)
                return power
            case "square":
                return self.compute("mul", {}, [x[0], x[0]], dtype)
            case "shift_left":
                text = f"unsigned({b}) < 32u ? {type_of(dtype)}(unsigned({a}) << {b}) : 0"
            case "shift_right_logical":
                text = f"unsigned({b}) < 32u ? {type_of(dtype)}(unsigned({a}) >> {b}) : 0"
            case "shift_right_arithmetic":
                text = f"int({a}) >> (unsigned({b}) < 32u ? int({b}) : 31)"
                text = text if signed else f"unsigned({text})"
            case _:
                raise unknown(name)
        return self.value(dtype, text)

    def add(self, a: Scalar, b: Scalar, op: str) -> Scalar:
        if a.number is not None and b.number is not None:
            total = operator.add(a.number, b.number) if op == "+" else a.number - b.number
            return integer((total - LOW) % 2**32 + LOW)
        if b.number == 0 or (a.number == 0 and op == "+"):
            return a if b.number == 0 else b
        low = a.low + b.low if op == "+" else a.low - b.high
        high = a.high + b.high if op == "+" else a.high - b.low
        return self.bounded((low, high), (a, b), op)

    def multiply(self, a: Scalar, b: Scalar) -> Scalar:
        if a.number is not None and b.number is not None:
            return integer((a.number * b.number - LOW) % 2**32 + LOW)
        if 1 in (a.number, b.number):
            return b if a.number == 1 else a
        if 0 in (a.number, b.number):
            return integer(0)
        ends = [x * y for x in (a.low, a.high) for y in (b.low, b.high)]
        return self.bounded((min(ends), max(ends)), (a, b), "*")

    def bounded(self, bounds: tuple[int, int], x: Sequence[Scalar], op: str) -> Scalar:
        """Writes a sum or product of int32, as unsigned where it may wrap."""
        a, b = (one.text for one in x)
        if bounds[0] < LOW or bounds[1] > HIGH:
            return self.value("int32", f"int(unsigned({a}) {op} unsigned({b}))")
        real = self.real_sum(bounds, x, op) or self.real(bounds, x, f"{{}} {op} {{}}")
        return self.value("int32", f"{a} {op} {b}", bounds=bounds, real=real)

    def named(self, x: Real) -> str:
        return self.let("float32", x.text) if x.offset else x.base

    def real_sum(self, bounds: tuple[int, int], x: Sequence[Scalar], op: str) -> Real | None:
        """Writes a sum as a float whose offset stays apart: room is left to add it last."""
        a, b = (one.real for one in x)
        if op == "*" or max(-bounds[0], bounds[1]) > SMALL or not (a and b):
            return None
        base = self.let("float32", f"{a.base} {op} {b.base}")
        if not b.offset:
            return Real(base, a.offset)
        offset = f"{a.offset} {op} {b.offset}" if a.offset or op == "-" else b.offset
        return Real(base, f"({offset.strip()})")

    def real(self, bounds: tuple[int, int], x: Sequence[Scalar], form: str) -> Real | None:
        """Writes an integer as a float, of operands that are."""
        if max(-bounds[0], bounds[1]) > EXACT:
            return None
        texts = [self.named(one.real) for one in x if one.real]
        return Real(self.let("float32", form.format(*texts))) if len(texts) == len(x) else None

    def extreme(self, name: str, a: Scalar, b: Scalar) -> Scalar:
        sign = ">" if name == "max" else "<"
        if a.dtype == "float32":  # NaN wins
            if b.number is not None and not np.isnan(b.number):
                a, b = b, a
            if a.number is not None and not np.isnan(a.number):
                return self.value(a.dtype, f"{a.text} {sign} {b.text} ? {a.text} : {b.text}")
            either = f"{a.text} {sign} {b.text} || {a.text} != {a.text}"
            return self.value(a.dtype, f"{either} ? {a.text} : {b.text}")
        if a.dtype == "bool":
            return self.logic("or" if name == "max" else "and", a, b)
        text = f"{a.text} {sign} {b.text} ? {a.text} : {b.text}"
        if a.dtype != "int32":
            return self.value(a.dtype, text)
        upper, lower = (a, b) if name == "max" else (b, a)
        if upper.low >= lower.high:
            return a
        if lower.low >= upper.high:
            return b
        pick = max if name == "max" else min
        bounds = pick(a.low, b.low), pick(a.high, b.high)
        real = self.real(bounds, (a, b), f"f{name}f({{}}, {{}})")
        return self.value(a.dtype, text, bounds=bounds, real=real)

    def clamp(self, x: Scalar, low: int, high: int) -> Scalar:
        return self.extreme("max", self.extreme("min", x, integer(high)), integer(low))

    def signed(self, x: Scalar) -> Scalar:
        """Brings an index to int32, large unsigned ones to its end."""
        if x.dtype == "int32":
            return x
        if x.dtype != "uint32":
            raise UnsupportedError(f"it indexes an array by {x.dtype}")
        return self.value("int32", f"{x.text} > 2147483647u ? 2147483647 : int({x.text})")

    def compare(self, name: str, a: Scalar, b: Scalar) -> Scalar:
        if a.dtype == b.dtype == "int32":
            decided = {
                "lt": (a.high < b.low, a.low >= b.high),
                "le": (a.high <= b.low, a.low > b.high),
                "gt": (a.low > b.high, a.high <= b.low),
                "ge": (a.low >= b.high, a.high < b.low),
            }.get(name, (False, False))
            if any(decided):
                return of_number(np.bool_(decided[0]))
        if a.dtype == b.dtype == "bool" and None not in (a.number, b.number) and name == "ne":
            return of_number(np.bool_(bool(a.number) != bool(b.number)))
        result = self.value("bool", f"{a.text} {_COMPARES[name]} {b.text}")
        if name == "ne" and b.number == 1 and a.text in self.signs:
            self.zeros[result.text] = self.signs[a.text]
        if name == "ne" and b.number == 0 and a.text in self.rests:
            self.rests[result.text] = self.rests[a.text]
        return result

    def logic(self, name: str, a: Scalar, b: Scalar) -> Scalar:
        for one, other in ((a, b), (b, a)):
            if one.number is not None and name != "xor":
                return other if bool(one.number) == (name == "and") else one
            if name == "and" and self.zeros.get(one.text, "") == self.rests.get(other.text):
                return of_number(np.bool_(False))
        op = {"and": "&&", "or": "||", "xor": "!="}[name]
        return self.value("bool", f"{a.text} {op} {b.text}")

    def select(self, which: Scalar, cases: Sequence[Scalar], dtype: str) -> Scalar:
        if which.number is not None:
            return cases[min(max(int(which.number), 0), len(cases) - 1)]
        if all(case.text == cases[0].text for case in cases):
            return cases[0]
        bounds = None
        if dtype == "int32":
            bounds = min(x.low for x in cases), max(x.high for x in cases)
        if which.dtype == "bool":
            text = f"{which.text} ? {cases[1].text} : {cases[0].text}"
        else:
            *first, last = cases
            chosen = [f"{which.text} <= {i} ? {x.text} : " for i, x in enumerate(first)]
            text = "".join(chosen) + last.text
        real = None
        if bounds and which.dtype == "bool":
            condition = f"{which.text} ? {{}} : {{}}"
            real = self.real(bounds, [cases[1], cases[0]], condition)
        result = self.value(dtype, text, bounds=bounds, real=real)
        if {which.dtype, dtype} == {"bool", "float32"} and None not in [x.number for x in cases]:
            self.chosen[result.text] = which.text, (cases[0], cases[1])
        return result

    def convert(self, x: Scalar, dtype: str) -> Scalar:
        if x.dtype == dtype:
            return x
        number = x.number
        if number is not None and (dtype == "float32" or x.dtype != "float32"):
            return of_number(np.asarray(number).astype(dtype)[()])
        match type_of(x.dtype), type_of(dtype):
            case "int", "float" if x.real is not None:
                return Scalar(self.named(x.real), dtype)
            case "float", "bool":
                text = f"{x.text} != 0.0f"
            case _, "bool":
                text = f"{x.text} != 0"
            case "bool", kind:
                bounds = (0, 1) if dtype == "int32" else None
                return self.value(dtype, f"{x.text} ? {kind}(1) : {kind}(0)", bounds=bounds)
            case "float", "int":  # to the nearest end, NaN to 0
                text = (
                    f"{x.text} >= 2147483648.0f ? 2147483647 : {x.text} <= -2147483648.0f ? "
                    f"(-2147483647 - 1) : {x.text} != {x.text} ? 0 : int({x.text})"
                )
            case "float", "unsigned":
                text = (
                    f"{x.text} >= 4294967296.0f ? 4294967295u : !({x.text} > 0.0f) ? 0u : "
                    f"unsigned({x.text})"
                )
            case _, kind:
                text = f"{kind}({x.text})"
        return self.value(dtype, text)


def unknown(name: str) -> UnsupportedError:
    return UnsupportedError(f"kernels have nothing for its primitive '{name}'")


def _product(a: str, b: str) -> str:
    return f"__fmul_rn({a}, {b})"


def _is_one(x: Scalar) -> bool:
    return x.number is not None and x.dtype == "float32" and float(x.number) == 1.0


def _has_reciprocal(x: Scalar) -> bool:
    return x.number is not None and 2.0**-100 < abs(float(x.number)) < 2.0**100
