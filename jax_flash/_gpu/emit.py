"""Owns what a user's function of scalars is as CUDA: text of float, int, unsigned and bool.

`define` writes one; `cannot` says why there is no text. What depends on the batch row and the head
alone is apart from what is computed for each score. Integers wrap as JAX's do. Where their
bounds are known, nothing that the bounds decide is written, and float32 of an integer below 2^24 is
computed from the arguments as floats, which kernels have at hand: a conversion takes as long as an
exponential. Functions are CUDA's own, of one or two ulp, but tanh; none is fast and inexact. The
texts need `PRELUDE` in front of them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jax_flash._function import Function
from jax_flash._program import Aval, Constant, Program, Step, Value

MAX_CAPTURES = 8  # kMaxCaptures of ffi/operands.h
_MOST = 64  # elements of an array of scalars
_TYPES = {"float32": "float", "int32": "int", "uint32": "unsigned", "bool": "bool"}
_LOW, _HIGH = -(2**31), 2**31 - 1
_EXACT = 2**24  # integers up to here are float32s
_LIGHT = 16  # lines
SMALL = 2**23  # lengths up to here keep positions, their sums and differences below _EXACT


# tanh within 4 ulp, without a branch, which would keep products in flight waiting, and in fewer
# registers than CUDA's own: with that one the backward of head dim 256 spilled 52 bytes. The near
# part is the polynomial of least largest relative error, 1e-7.
PRELUDE = """\
__device__ __forceinline__ float branchless_tanh(float x) {
  const float square = x * x;
  float y = fmaf(0.0164375398f, square, -0.0526717901f);
  y = fmaf(y, square, 0.133207247f);
  y = fmaf(y, square, -0.333329469f);
  const float near = fmaf(x * square, y, x);
  const float far = 1.0f - __fdividef(2.0f, 1.0f + __expf(2.0f * fabsf(x)));
  return fabsf(x) < 0.55f ? near : copysignf(far, x);
}
"""


class UnsupportedError(Exception):
    """There is no text for a function; says why."""


def cannot(function: Function, with_slope: bool) -> tuple[str, ...]:
    """Lists why a function, and its slope, have no text; empty if they have."""
    try:
        rows = (False,) * len(function.captures)
        _body(function, with_slope, rows, small=True)
    except UnsupportedError as error:
        return (str(error),)
    return ()


def is_light(function: Function) -> bool:
    """Tells whether a score takes a few sums, products and comparisons alone."""
    text = _text_of_each(function)
    called = set(re.findall(r"(\w+)\(", text)) - {"fabsf", "fminf", "fmaxf"}
    return text.count(";") <= _LIGHT and not called and not re.search("[/%]", text)


def has_remainders(function: Function) -> bool:
    """Tells whether a score takes remainders of integers."""
    return "%" in _text_of_each(function)


def _text_of_each(function: Function) -> str:
    lines, _ = _body(function, False, (False,) * len(function.captures), True)
    return " ".join(map(str, _split(lines)[1]))


def has_slope(function: Function) -> bool:
    """Tells whether the derivative by the score is anything but 1, as far as its text says."""
    try:
        lines, _ = _body(function, True, (False,) * len(function.captures), True)
    except UnsupportedError:
        return True
    return lines[-1].text != "1.0f"


def run(writer: Writer, function: Function, rows: tuple[bool, ...]) -> Scalar:
    """Writes all lines of a function of queries and keys less than SMALL; returns its value."""
    inputs = _inputs(writer, function, rows, small=True)
    return writer.scalar(_run(writer, function.program.opened, inputs)[0])


def define(
    function: Function,
    name: str,
    *,
    result: str = "float",
    with_slope: bool = False,
    rows: Sequence[bool] | None = None,
    small: bool = False,
) -> str:
    """Writes a function `name` of (of, *arguments), and what makes `of`.

    That is what depends on the batch row and the head alone: `<name>_of_head(p, row, batch, head)`
    computes it, once for many scores. The parameters p have `captures`, of which each is read at
    the batch row `row`. The other arguments follow; query and key are a Place. With slope a last
    argument `float& slope` follows.

    Arguments:
      function: what to write.
      name: of the function in CUDA.
      result: its type.
      with_slope: also give the derivative by the first argument.
      rows: which captured arrays differ between batch rows.
      small: queries and keys are less than SMALL.
    """
    rows = (False,) * len(function.captures) if rows is None else tuple(rows)
    lines, value = _body(function, with_slope, rows, small)
    types = [_type(aval.dtype) for aval in function.program.inputs]
    arguments = [
        f"const Place& {x}" if x in _PLACES else f"{t} {x}"
        for t, x in zip(types, function.arguments, strict=False)
        if x not in _OF_HEAD
    ]
    arguments += ["float& slope"] if with_slope else []
    once, each = _split(lines)
    used = words(value, *each)
    kept = [x for x in (*_IDS, *once) if x.name in used]
    kind = "".join(part.capitalize() for part in (*name.split("_"), "of", "head"))
    names = ", ".join(x.name for x in kept)
    opened = [f"const auto& [{names}] = of;"] if kept else []
    head = "__device__ __forceinline__"
    return (
        f"struct {kind} {{\n{_indented(f'{x.kind} {x.name};' for x in kept)}}};\n"
        f"template <class Params>\n"
        f"{head} {kind} {name}_of_head(const Params& p, int row, int batch, int head) {{\n"
        f"{_indented([*map(str, once), f'return {{{names}}};'])}}}\n"
        f"template <class Place>\n"
        f"{head} {result} {name}(const {kind}& of, {', '.join(arguments)}) {{\n"
        f"{_indented([*opened, *map(str, each), f'return {value};'])}}}\n"
    )


def _indented(lines: Iterable[str]) -> str:
    return "".join(f"  {line}\n" for line in lines)


def words(*texts: object) -> set[str]:
    return set(itertools.chain(*(re.findall(r"\w+", str(text)) for text in texts)))


@dataclasses.dataclass(frozen=True)
class _Line:
    """A line of text that defines a name, or sets one of an argument."""

    kind: str  # its type; "": of an argument
    name: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name} = {self.text};".lstrip()


_PLACES = ("query", "key")
_OF_HEAD = ("batch", "head")
_IDS = tuple(_Line("int", name, "") for name in _OF_HEAD)


def _split(lines: Sequence[_Line]) -> tuple[list[_Line], list[_Line]]:
    """Parts lines that depend on the batch row and the head alone from the others."""
    once, each = [], []
    own = {"score", "slope", *_PLACES}
    for line in lines:
        if line.name in own or not own.isdisjoint(words(line.text)):
            own.add(line.name)
            each.append(line)
        else:
            once.append(line)
    return once, each


@functools.lru_cache(maxsize=256)
def _body(
    function: Function, with_slope: bool, rows: tuple[bool, ...], small: bool
) -> tuple[tuple[_Line, ...], str]:
    if len(function.captures) > MAX_CAPTURES:
        count = len(function.captures)
        raise UnsupportedError(f"it reads {count} arrays, and kernels take up to {MAX_CAPTURES}")
    value_program = function.program.opened
    if with_slope:  # says what has no text before it is differentiated
        _body(function, False, rows, small)
    writer = Writer()
    inputs = _inputs(writer, function, rows, small)
    program = function.program.with_slope if with_slope else value_program
    results = [writer.scalar(x).text for x in _run(writer, program, inputs)]
    return writer.needed(results, with_slope), results[0]


def _inputs(
    writer: Writer, function: Function, rows: tuple[bool, ...], small: bool
) -> list[_Operand]:
    inputs: list[_Operand] = []
    for argument, aval in zip(function.arguments, function.program.inputs, strict=False):
        _type(aval.dtype)
        text, bounds, real = argument, None, None
        if aval.dtype == "int32":
            placed = argument in _PLACES
            bounds = (0, SMALL if placed and small else _HIGH)
            if placed:
                text, real = f"{argument}.index", _Real(f"{argument}.real", f"{argument}.offset")
        inputs.append(_single(Scalar(text, aval.dtype, bounds=bounds, real=real)))
    for i, aval in enumerate(function.captures):
        inputs.append(_View(i, aval.dtype, _integer(0), aval.shape, _strides(aval.shape)))
        if aval.size > _HIGH:
            raise UnsupportedError(
                f"it reads an array of {aval.size} elements, more than int32 counts"
            )
        pointer = f"const {'unsigned char' if aval.dtype == 'bool' else _type(aval.dtype)}*"
        row = f" + row * p.captures[{i}].batch" if rows[i] else ""
        text = f"static_cast<{pointer}>(p.captures[{i}].data){row}"
        writer.lines.append(_Line(pointer, f"a{i}", text))
    return inputs


def _run(writer: Writer, program: Program, inputs: Sequence[_Operand]) -> list[_Operand]:
    values: dict[int, _Operand] = dict(enumerate(inputs))

    def read(x: Value) -> _Operand:
        return values[x] if isinstance(x, int) else _of_constant(x)

    for step in program.steps:
        results = writer.write(step, [read(x) for x in step.inputs])
        values.update(zip(step.outputs, results, strict=True))
    return [read(x) for x in program.results]


# ---- values --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Real:
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
    real: _Real | None = None

    @property
    def low(self) -> int:
        return self.bounds[0] if self.bounds else _LOW

    @property
    def high(self) -> int:
        return self.bounds[1] if self.bounds else _HIGH


@dataclasses.dataclass(frozen=True)
class _View:
    """Elements of a captured array, not read yet: at offset + sum of index times stride."""

    capture: int
    dtype: str
    offset: Scalar
    shape: tuple[int, ...]
    strides: tuple[int, ...]


_Operand = np.ndarray | _View  # the first of Scalar


def _single(x: Scalar) -> np.ndarray:
    array = np.empty((), object)
    array[()] = x
    return array


def _only(x: Any) -> Scalar:
    """Returns the element of an array of one, or what is one already."""
    return x.item() if isinstance(x, np.ndarray) else x


def _of_constant(x: Constant) -> np.ndarray:
    if x.value.size > _MOST:
        raise UnsupportedError(f"it computes with {x.value.size} elements of an array at once")
    array = np.empty(x.value.shape, object)
    for at in np.ndindex(array.shape):
        array[at] = of_number(x.value[at])
    return array


def of_number(x: Any) -> Scalar:
    dtype = str(x.dtype)
    if dtype == "int32":
        return _integer(int(x))
    return Scalar(_literal(x), dtype, number=x)


def _integer(x: int) -> Scalar:
    real = _Real(_literal(np.float32(x))) if abs(x) <= _EXACT else None
    return Scalar(_literal(np.int32(x)), "int32", number=x, bounds=(x, x), real=real)


def _literal(x: Any) -> str:
    match _type(str(x.dtype)):
        case "float":
            if not np.isfinite(x):
                return f"__builtin_bit_cast(float, 0x{int(x.view(np.uint32)):08x}u)"
            text = str(x)
            return f"{text}f" if re.search("[.e]", text) else f"{text}.0f"
        case "int":
            return "(-2147483647 - 1)" if x == _LOW else str(int(x))
        case "unsigned":
            return f"{int(x)}u"
        case _:
            return "true" if x else "false"


def _type(dtype: str) -> str:
    if dtype not in _TYPES:
        raise UnsupportedError(f"it computes in {dtype}, and kernels in {', '.join(_TYPES)}")
    return _TYPES[dtype]


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


# ---- steps ---------------------------------------------------------------------------------------

_CALLS = {
    **{name: f"{name}f" for name in ("exp", "exp2", "expm1", "log", "log1p", "sqrt", "cbrt")},
    **{name: f"{name}f" for name in ("sin", "cos", "tan", "asin", "acos", "atan", "atan2")},
    **{name: f"{name}f" for name in ("sinh", "cosh", "asinh", "acosh", "atanh")},
    **{name: f"{name}f" for name in ("erf", "erfc", "floor", "ceil", "pow")},
    "tanh": "branchless_tanh",
}
_COMPARES = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_SUMS = {"add": "+", "add_any": "+", "sub": "-", "mul": "*"}
_BITS = {"and": "&", "or": "|", "xor": "^"}
_REDUCTIONS = {
    **{f"reduce_{name}": name for name in ("max", "min", "and", "or", "xor")},
    "reduce_sum": "add",
    "reduce_prod": "mul",
}


class Writer:
    """Lines of a function, each of which defines a name."""

    def __init__(self) -> None:
        self.lines: list[_Line] = []
        self.names: dict[str, str] = {}

    def needed(self, results: Sequence[str], with_slope: bool) -> tuple[_Line, ...]:
        """Lists the lines on which the results depend, and what sets the slope."""
        needed = words(*results)
        kept: list[_Line] = []
        for line in reversed(self.lines):
            if line.name in needed:
                needed |= words(line.text)
                kept.insert(0, line)
        return (*kept, *([_Line("", "slope", results[1])] if with_slope else []))

    def let(self, dtype: str, text: str) -> str:
        """Names a value; what was written before keeps its name."""
        kind = _type(dtype)
        key = f"{kind} {text}"
        if key not in self.names:
            name = f"v{len(self.names)}"
            self.names[key] = name
            self.lines.append(_Line(kind, name, text))
        return self.names[key]

    def value(self, dtype: str, text: str, **known: Any) -> Scalar:
        return Scalar(self.let(dtype, text), dtype, **known)

    # -- arrays --

    def elements(self, x: _Operand) -> np.ndarray:
        """Reads the elements of a view."""
        if not isinstance(x, _View):
            return x
        if math.prod(x.shape) > _MOST:
            raise UnsupportedError(
                f"it computes with {math.prod(x.shape)} elements of an array at once"
            )
        array = np.empty(x.shape, object)
        for at in np.ndindex(x.shape):
            step = sum(i * stride for i, stride in zip(at, x.strides, strict=True))
            index = self.add(x.offset, _integer(step), "+").text
            element = f"__ldg(a{x.capture} + {index})" if index != "0" else f"__ldg(a{x.capture})"
            array[at] = self.value(x.dtype, f"{element} != 0" if x.dtype == "bool" else element)
        return array

    def scalar(self, x: _Operand) -> Scalar:
        return _only(self.elements(x))

    def write(self, step: Step, operands: list[_Operand]) -> list[_Operand]:
        name, params = step.primitive.name, step.params
        if name == "optimization_barrier":
            return operands
        aval = step.avals[0]
        if aval.size > _MOST and not isinstance(operands[0], _View):
            raise UnsupportedError(f"it computes with {aval.size} elements of an array at once")
        if name == "gather":
            return [self.gather(operands[0], operands[1], params, aval)]
        if name == "dynamic_slice":
            starts = [self.scalar(x) for x in operands[1:]]
            return [self.slice_at(operands[0], starts, params["slice_sizes"])]
        moved = _move(name, params, operands, aval)
        if moved is not None:
            return [moved]
        arrays = [self.elements(x) for x in operands]
        if name in ("broadcast_in_dim", "concatenate", "stack", "rev", "transpose", "slice"):
            return [_arrange(name, params, arrays, aval)]
        if name in _REDUCTIONS:
            return [self.reduce(_REDUCTIONS[name], arrays[0], params["axes"])]
        if any(x.shape not in ((), aval.shape) for x in arrays) or len(step.avals) > 1:
            raise _unknown(name)
        result = np.empty(aval.shape, object)
        for at in np.ndindex(aval.shape):
            scalars = [_only(x[at]) if x.shape else _only(x) for x in arrays]
            result[at] = self.compute(name, params, scalars, aval.dtype)
        return [result]

    def slice_at(self, x: _Operand, starts: Sequence[Scalar], sizes: Sequence[int]) -> _Operand:
        """Takes elements from each start on, which is brought to where all of them exist."""
        if not isinstance(x, _View):
            if any(start.number is None for start in starts):
                raise UnsupportedError("it indexes an array that it computes")
            at = [
                min(max(int(start.number), 0), dim - size)
                for start, dim, size in zip(starts, x.shape, sizes, strict=True)
            ]
            return x[tuple(slice(i, i + size) for i, size in zip(at, sizes, strict=True))]
        offset = x.offset
        for start, dim, size, stride in zip(starts, x.shape, sizes, x.strides, strict=True):
            first = self.clamp(self.signed(start), 0, dim - size)
            offset = self.add(offset, self.multiply(first, _integer(stride)), "+")
        return dataclasses.replace(x, offset=offset, shape=tuple(sizes))

    def gather(
        self, x: _Operand, indices: _Operand, params: Mapping[str, Any], aval: Aval
    ) -> _Operand:
        dims, sizes = params["dimension_numbers"], params["slice_sizes"]
        indices = self.elements(indices)
        if dims.operand_batching_dims or dims.start_indices_batching_dims:
            raise UnsupportedError("it gathers with batching dims")
        rank = len(sizes)

        def at(row):
            starts = [_integer(0)] * rank
            for dim, start in zip(dims.start_index_map, row, strict=True):
                starts[dim] = self.signed(start)
            part = self.slice_at(x, starts, sizes)
            kept = [i for i in range(rank) if i not in dims.collapsed_slice_dims]
            shape = tuple(sizes[i] for i in kept)
            if isinstance(part, _View):
                strides = tuple(part.strides[i] for i in kept)
                part = dataclasses.replace(part, shape=shape, strides=strides)
            else:
                part = part.reshape(shape)
            if params["mode"].name != "FILL_OR_DROP":  # else indices are clamped
                return part
            inside = Scalar("true", "bool", number=True)
            for start, dim, size in zip(starts, x.shape, sizes, strict=True):
                for bound in (("ge", _integer(0)), ("le", _integer(dim - size))):
                    this = self.compare(bound[0], start, bound[1])
                    inside = self.compute("and", {}, [inside, this], "bool")
            if inside.number is True or (inside.number is not None and bool(inside.number)):
                return part
            fill = _fill(params["fill_value"], aval.dtype)
            part = self.elements(part)
            filled = np.empty(part.shape, object)
            for i in np.ndindex(part.shape):
                filled[i] = self.select(inside, [fill, _only(part[i])], aval.dtype)
            return filled

        if indices.ndim == 1:
            return at(indices)
        if dims.offset_dims:
            raise UnsupportedError("it gathers several slices of an array")
        result = np.empty(indices.shape[:-1], object)
        for i in np.ndindex(result.shape):
            result[i] = self.scalar(at(indices[i]))
        return result

    def reduce(self, name: str, x: np.ndarray, axes: Sequence[int]) -> np.ndarray:
        kept = [i for i in range(x.ndim) if i not in axes]
        rows = np.transpose(x, (*kept, *axes)).reshape([x.shape[i] for i in kept] + [-1])
        result = np.empty(rows.shape[:-1], object)
        for at in np.ndindex(result.shape):
            first, *rest = rows[at]
            for other in rest:
                first = self.compute(name, {}, [first, other], first.dtype)
            result[at] = first
        return result

    # -- scalars --

    def compute(
        self, name: str, params: Mapping[str, Any], x: Sequence[Scalar], dtype: str
    ) -> Scalar:
        """Writes an operation of scalars; `dtype` is the result's."""
        kinds = {_type(one.dtype) for one in x}
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
                return self.value(dtype, f"__builtin_bit_cast({_type(dtype)}, {texts[0]})")
            case "div" if kinds == {"float"} and _has_reciprocal(x[1]):
                # A division takes a dozen instructions and a call for its rare cases.
                reciprocal = _literal(np.float32(1) / np.float32(x[1].number))
                return self.value(dtype, f"{texts[0]} * {reciprocal}")
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
        raise _unknown(name)

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
                text = f"{x[0]} * {x[0]}"
            case "one_minus_square":
                text = f"1.0f - {self.let('float32', f'{x[0]} * {x[0]}')}"
            case "is_finite":
                text = f"fabsf({x[0]}) < {_literal(np.float32(np.inf))}"
            case "integer_pow":
                return self.integer_power(x[0], params["y"])
            case _:
                raise _unknown(name)
        return self.value(dtype, text)

    def integer_power(self, x: str, y: int) -> Scalar:
        power, square, left = None, x, abs(y)
        while left:
            if left & 1:
                power = square if power is None else self.let("float32", f"{power} * {square}")
            left >>= 1
            square = self.let("float32", f"{square} * {square}") if left else square
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
            if name == "rem":
                return self.value(dtype, f"{a} % {b}", bounds=(0, min(int(divisor) - 1, x[0].high)))
            if name == "div":
                bounds = (x[0].low // int(divisor), x[0].high // int(divisor))
                return self.value(dtype, f"{a} / {b}", bounds=bounds)
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
                zero = _integer(0) if signed else Scalar("0u", dtype)
                return self.add(zero, x[0], "-") if signed else self.value(dtype, f"0u - {a}")
            case "abs" if signed:
                if x[0].low >= 0:
                    return x[0]
                bounds, real = None, None
                if x[0].low > _LOW:
                    bounds = (0, max(-x[0].low, x[0].high))
                    real = self.real(bounds, x[:1], "fabsf({})")
                text = f"{a} < 0 ? int(0u - unsigned({a})) : {a}"
                return self.value(dtype, text, bounds=bounds, real=real)
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
                text = f"unsigned({b}) < 32u ? {_type(dtype)}(unsigned({a}) << {b}) : 0"
            case "shift_right_logical":
                text = f"unsigned({b}) < 32u ? {_type(dtype)}(unsigned({a}) >> {b}) : 0"
            case "shift_right_arithmetic":
                text = f"int({a}) >> (unsigned({b}) < 32u ? int({b}) : 31)"
                text = text if signed else f"unsigned({text})"
            case _:
                raise _unknown(name)
        return self.value(dtype, text)

    def add(self, a: Scalar, b: Scalar, op: str) -> Scalar:
        if a.number is not None and b.number is not None:
            total = operator.add(a.number, b.number) if op == "+" else a.number - b.number
            return _integer((total - _LOW) % 2**32 + _LOW)
        if b.number == 0 or (a.number == 0 and op == "+"):
            return a if b.number == 0 else b
        low = a.low + b.low if op == "+" else a.low - b.high
        high = a.high + b.high if op == "+" else a.high - b.low
        return self.bounded((low, high), (a, b), op)

    def multiply(self, a: Scalar, b: Scalar) -> Scalar:
        if a.number is not None and b.number is not None:
            return _integer((a.number * b.number - _LOW) % 2**32 + _LOW)
        if 1 in (a.number, b.number):
            return b if a.number == 1 else a
        if 0 in (a.number, b.number):
            return _integer(0)
        ends = [x * y for x in (a.low, a.high) for y in (b.low, b.high)]
        return self.bounded((min(ends), max(ends)), (a, b), "*")

    def bounded(self, bounds: tuple[int, int], x: Sequence[Scalar], op: str) -> Scalar:
        """Writes a sum or product of int32, as unsigned where it may wrap."""
        a, b = (one.text for one in x)
        if bounds[0] < _LOW or bounds[1] > _HIGH:
            return self.value("int32", f"int(unsigned({a}) {op} unsigned({b}))")
        real = self.real_sum(bounds, x, op) or self.real(bounds, x, f"{{}} {op} {{}}")
        return self.value("int32", f"{a} {op} {b}", bounds=bounds, real=real)

    def named(self, x: _Real) -> str:
        return self.let("float32", x.text) if x.offset else x.base

    def real_sum(self, bounds: tuple[int, int], x: Sequence[Scalar], op: str) -> _Real | None:
        """Writes a sum as a float whose offset stays apart: room is left to add it last."""
        a, b = (one.real for one in x)
        if op == "*" or max(-bounds[0], bounds[1]) > SMALL or not (a and b):
            return None
        base = self.let("float32", f"{a.base} {op} {b.base}")
        if not b.offset:
            return _Real(base, a.offset)
        offset = f"{a.offset} {op} {b.offset}" if a.offset or op == "-" else b.offset
        return _Real(base, f"({offset.strip()})")

    def real(self, bounds: tuple[int, int], x: Sequence[Scalar], form: str) -> _Real | None:
        """Writes an integer as a float, of operands that are."""
        if max(-bounds[0], bounds[1]) > _EXACT:
            return None
        texts = [self.named(one.real) for one in x if one.real]
        return _Real(self.let("float32", form.format(*texts))) if len(texts) == len(x) else None

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
        return self.extreme("max", self.extreme("min", x, _integer(high)), _integer(low))

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
        return self.value("bool", f"{a.text} {_COMPARES[name]} {b.text}")

    def logic(self, name: str, a: Scalar, b: Scalar) -> Scalar:
        for one, other in ((a, b), (b, a)):
            if one.number is not None and name != "xor":
                return other if bool(one.number) == (name == "and") else one
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
        return self.value(dtype, text, bounds=bounds, real=real)

    def convert(self, x: Scalar, dtype: str) -> Scalar:
        if x.dtype == dtype:
            return x
        number = x.number
        if number is not None and (dtype == "float32" or x.dtype != "float32"):
            return of_number(np.asarray(number).astype(dtype)[()])
        match _type(x.dtype), _type(dtype):
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


def _unknown(name: str) -> UnsupportedError:
    return UnsupportedError(f"kernels have nothing for its primitive '{name}'")


def _is_one(x: Scalar) -> bool:
    return x.number is not None and x.dtype == "float32" and float(x.number) == 1.0


def _has_reciprocal(x: Scalar) -> bool:
    return x.number is not None and 2.0**-100 < abs(float(x.number)) < 2.0**100


def _fill(value: Any, dtype: str) -> Scalar:
    """Returns what a gather beyond an array gives."""
    if value is None:
        none = {"float32": np.nan, "int32": _LOW, "uint32": 2**32 - 1, "bool": True}
        value = none[dtype]
    return of_number(np.asarray(value).astype(dtype)[()])


def _move(
    name: str, params: Mapping[str, Any], operands: Sequence[_Operand], aval: Aval
) -> _Operand | None:
    """Moves the elements of one operand without reading them, or returns None."""
    x = operands[0] if operands else None
    if name in ("squeeze", "reshape", "expand_dims") and not isinstance(x, _View):
        return None if x is None else x.reshape(aval.shape)
    if not isinstance(x, _View):
        return None
    match name:
        case "squeeze":
            kept = [i for i in range(len(x.shape)) if i not in params["dimensions"]]
        case "transpose":
            kept = list(params["permutation"])
        case "reshape":
            sizes = [size for size in x.shape if size != 1]
            if x.strides == _strides(x.shape):
                return dataclasses.replace(x, shape=aval.shape, strides=_strides(aval.shape))
            if sizes != [size for size in aval.shape if size != 1]:
                return None
            strides = iter([s for size, s in zip(x.shape, x.strides, strict=True) if size != 1])
            by_dim = tuple(0 if size == 1 else next(strides) for size in aval.shape)
            return dataclasses.replace(x, shape=aval.shape, strides=by_dim)
        case "broadcast_in_dim":
            strides = [0] * len(aval.shape)
            for dim, size, stride in zip(
                params["broadcast_dimensions"], x.shape, x.strides, strict=True
            ):
                strides[dim] = 0 if size == 1 else stride
            return dataclasses.replace(x, shape=aval.shape, strides=tuple(strides))
        case _:
            return None
    shape = tuple(x.shape[i] for i in kept)
    return dataclasses.replace(x, shape=shape, strides=tuple(x.strides[i] for i in kept))


def _arrange(
    name: str, params: Mapping[str, Any], arrays: Sequence[np.ndarray], aval: Aval
) -> np.ndarray:
    x = arrays[0]
    match name:
        case "broadcast_in_dim":
            shape = [1] * len(aval.shape)
            for dim, size in zip(params["broadcast_dimensions"], x.shape, strict=True):
                shape[dim] = size
            return np.broadcast_to(x.reshape(shape), aval.shape)
        case "concatenate":
            return np.concatenate(arrays, params["dimension"])
        case "stack":
            return np.stack(arrays, params["axis"])
        case "rev":
            return np.flip(x, params["dimensions"])
        case "transpose":
            return np.transpose(x, params["permutation"])
        case _:
            steps = params["strides"] or [1] * x.ndim
            ends = zip(params["start_indices"], params["limit_indices"], steps, strict=True)
            return x[tuple(slice(*end) for end in ends)]
