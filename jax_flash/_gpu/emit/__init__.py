"""Owns what a user's function of scalars is as CUDA: text of float, int, unsigned and bool.

`define` writes one; `cannot` says why there is no text. What depends on the batch row and the head
alone is apart from what is computed for each score. Integers wrap as JAX's do. Where their
bounds are known, nothing that the bounds decide is written, and float32 of an integer below 2^24 is
computed from the arguments as floats, which kernels have at hand: a conversion takes as long as an
exponential. Functions are CUDA's own, of one or two ulp, but tanh, of four. What is computed for
each score has quotients, roots, exponentials, log and log1p with a relative error of 2e-6 at most
(exponentials beyond e^44, 4e-6), unless they are to be exact or decide a step, as a floor does. The
texts go through `with_helpers`.

Kernels write a short function out for each score. A longer one is written for four at a time, and
what is longer still is a function that is called for each: `costs.py` counts.

A traced function's steps on arrays are written by `arrays.py`, which knows where elements are; on
each element by `scalars.py`; what is known of one is in `values.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Sequence

from jax_flash._function import Function
from jax_flash._gpu.emit import costs
from jax_flash._gpu.emit.arrays import Writer
from jax_flash._gpu.emit.rows import Rows, part_rows, structured
from jax_flash._gpu.emit.scalars import INEXACT, Line, words
from jax_flash._gpu.emit.scale import SCALE, scale_scores
from jax_flash._gpu.emit.values import (
    HIGH,
    SMALL,
    Operand,
    Real,
    Scalar,
    UnsupportedError,
    View,
    integer,
    of_constant,
    of_number,
    single,
    strides_of,
    type_of,
)
from jax_flash._program import Program, Value

__all__ = [
    "MAX_CAPTURES",
    "SMALL",
    "Line",
    "Scalar",
    "UnsupportedError",
    "Writer",
    "cannot",
    "define",
    "has_remainders",
    "has_slope",
    "inlined",
    "is_light",
    "of_number",
    "refused",
    "run",
    "with_helpers",
    "words",
]

MAX_CAPTURES = 8  # for which kernels' parameters have room
_LIGHT = 16  # lines
_LIGHT_CALLS = {"fabsf", "fminf", "fmaxf", "__fmul_rn", "divided"}


# What a text calls beside CUDA's functions.
_HELPERS = {
    # tanh within 4 ulp, without a branch, which would keep products in flight waiting, and in fewer
    # registers than CUDA's own: with that one the backward of head dim 256 spilled 52 bytes. The
    # near part is the polynomial of least largest relative error, 1e-7.
    "branchless_tanh": """\
__device__ __forceinline__ float branchless_tanh(float x) {
  const float square = x * x;
  float y = fmaf(0.0164375398f, square, -0.0526717901f);
  y = fmaf(y, square, 0.133207247f);
  y = fmaf(y, square, -0.333329469f);
  const float near = fmaf(x * square, y, x);
  const float far = 1.0f - __fdividef(2.0f, 1.0f + __expf(2.0f * fabsf(x)));
  return fabsf(x) < 0.55f ? near : copysignf(far, x);
}
""",
    # x / by, rounded as a division is, by fused multiplications of the reciprocal and of the rest,
    # which infinity and NaN have not.
    "divided": """\
__device__ __forceinline__ float divided(float x, float by, float reciprocal) {
  const float near = x * reciprocal;
  const float exact = fmaf(fmaf(-near, by, x), reciprocal, near);
  return exact == exact ? exact : near;
}
""",
    # x / by within 2 ulp, without the branch of the division that is exact. A denominator below
    # 2^-126 is 0, one beyond 2^126 infinity.
    "quotient": """\
__device__ __forceinline__ float quotient(float x, float by) {
  return x * ptx::reciprocal_approx(by);
}
""",
    # log within a relative error of 2e-6. The approximate one has an absolute error of 2^-21.4
    # around 1: there it is the polynomial of least largest relative error, 2e-7.
    "log_near": """\
__device__ __forceinline__ float log_near(float u, float log2) {
  float y = fmaf(0.157346254f, u, -0.181193593f);
  y = fmaf(y, u, 0.19945268f);
  y = fmaf(y, u, -0.249540558f);
  y = fmaf(y, u, 0.333339255f);
  y = fmaf(y, u, -0.500003544f);
  return fabsf(u) < 0.25f ? fmaf(u * u, y, u) : 0.693147182f * log2;
}
""",
    # e^x: x log2(e) is rounded once, by up to 2^-18, and the constant is: 4e-6; 2e-6 up to e^44.
    "quick_exp": """\
__device__ __forceinline__ float quick_exp(float x) {
  return ptx::exp2_approx(1.44269504f * x);
}
""",
    "quick_log": """\
__device__ __forceinline__ float quick_log(float x) {
  return log_near(x - 1.0f, ptx::log2_approx(x));
}
""",
    "quick_log1p": """\
__device__ __forceinline__ float quick_log1p(float x) {
  return log_near(x, ptx::log2_approx(1.0f + x));
}
""",
}
_QUICK = {
    "logf": "quick_log",
    "log1pf": "quick_log1p",
    "expf": "quick_exp",
    "exp2f": "ptx::exp2_approx",
    "sqrtf": "ptx::sqrt_approx",
}
_QUICKER = re.compile(rf"\b({'|'.join(_QUICK)})\(")
for _name in costs.HEAVY:
    _takes = "float x, float y" if _name in ("powf", "fmodf", "atan2f") else "float x"
    _HELPERS[f"called_{_name}"] = (
        f"__device__ __noinline__ float called_{_name}({_takes}) "
        f"{{ return {_name}({_takes.replace('float ', '')}); }}\n"
    )


def with_helpers(text: str) -> str:
    """Puts the functions in front of a text that it calls, but for those of ptx.cuh."""
    used = words(text)
    used |= {"log_near"} if not used.isdisjoint(("quick_log", "quick_log1p")) else set()
    return "".join(helper for name, helper in _HELPERS.items() if name in used) + text


def cannot(function: Function, with_slope: bool) -> tuple[str, ...]:
    """Lists why a function, and its slope, have no text; empty if they have."""
    try:
        rows = (False,) * len(function.captures)
        lines, _ = _body(function, with_slope, rows, small=True)
    except UnsupportedError as error:
        return (str(error),)
    length = costs.count(lines, calls_heavy=True)
    if length <= costs.MOST:
        return ()
    return (f"it takes some {length} instructions for each score, and kernels up to {costs.MOST}",)


def refused(function: Function, log: str) -> str:
    """Says which primitive of a function the compiler refused, as far as its log tells.

    Lines of the texts end in the primitive that they are of, and the log shows those it means.
    """
    found = re.search(r"error.*\n.*//\s*(\w+)\s*\n", log)
    names = [found[1]] if found else sorted({x.primitive.name for x in function.program.steps})
    message = re.search(r"error:? *(.*)", log)
    return (
        f"the compiler refused score_mod's primitive{'s' * (len(names) > 1)} {', '.join(names)} "
        f"({message[1] if message else log.strip()}), which is a fault of jax_flash: please report "
        "it with the function"
    )


def is_light(function: Function) -> bool:
    """Tells whether a score takes a few sums, products and comparisons alone."""
    text = _text_of_each(function)
    called = set(re.findall(r"(\w+)\(", text)) - _LIGHT_CALLS
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
    exact: bool = False,
    scales: bool = False,
    lengths: tuple[int, int] = (0, 0),
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
      exact: quotients are rounded as float32's are, and functions as CUDA's.
      scales: it is given `product`, which times the scale of the parameters p is the score.
      lengths: how many queries and keys there are; 0: not known.
    """
    rows = (False,) * len(function.captures) if rows is None else tuple(rows)
    lines, value = _body(function, with_slope, rows, small, exact, scales, lengths)
    types = [type_of(aval.dtype) for aval in function.program.inputs]
    arguments = [
        f"const {x.capitalize()}& {x}"
        if x in _PLACES
        else f"{t} {'product' if scales and x == 'score' else x}"
        for t, x in zip(types, function.arguments, strict=False)
        if x not in _OF_HEAD
    ]
    arguments += ["float& slope"] if with_slope else []
    once, each = _split(lines)
    used = words(value, *each)
    kept = [x for x in (*_IDS, *once) if x.name in used]
    kind = "".join(part.capitalize() for part in (*name.split("_"), "of", "head"))
    names = ", ".join(x.name for x in kept)
    opened = structured(kept, "of")
    length = costs.count(each)
    short = costs.WRITTEN_OUT_WITH_SLOPE if with_slope else costs.WRITTEN_OUT
    shared = costs.count_shared(each)
    together = 0 if shared <= short else 4 if length <= costs.LOOPED else 1
    qualifiers = _CALLED if together == 1 else _INLINED
    if together == 1:
        each = [dataclasses.replace(x, text=_call_heavy(x.text)) for x in each]
    members = [f"static constexpr int kTogether = {together};"]
    members += [f"{x.kind} {x.name};" for x in kept]
    of_query = row = ""
    if scales and not with_slope:
        whole = together > 0 or exact
        parts = Rows(others=tuple(each), value=value) if whole else part_rows(each, value)
        row = f"const {kind.replace('OfHead', 'OfQuery')}& of_query, "
        of_query = parts.define(kind, name, opened, qualifiers)
        opened = [*opened, *structured(parts.held, "of_query.held")]
        each, value = list(parts.others), parts.value
    return (
        f"struct {kind} {{\n{_indented(members)}}};\n"
        f"template <class Params>\n"
        f"{inlined(once)} {kind} {name}_of_head(const Params& p, int row, int batch, int head) {{\n"
        f"{_indented([*(x.explained for x in once), f'return {{{names}}};'])}}}\n"
        f"{of_query}template <class Query, class Key>\n"
        f"{qualifiers} {result} {name}(const {kind}& of, {row}{', '.join(arguments)}) {{\n"
        f"{_indented([*opened, *(x.explained for x in each), f'return {value};'])}}}\n"
    )


def inlined(lines: Sequence[Line]) -> str:
    """Says of a device function of such lines whether it is one that is called."""
    return _CALLED if costs.count(lines) > costs.WRITTEN_OUT else _INLINED


def _call_heavy(text: str) -> str:
    return re.sub(rf"\b({'|'.join(costs.HEAVY)})\(", r"called_\1(", text)


def _indented(lines: Iterable[str]) -> str:
    return "".join(f"  {line}\n" for line in lines)


_INLINED, _CALLED = "__device__ __forceinline__", "__device__ __noinline__"
_PLACES = ("query", "key")
_OF_HEAD = ("batch", "head")
_IDS = tuple(Line("int", name, "") for name in _OF_HEAD)


def _split(lines: Sequence[Line]) -> tuple[list[Line], list[Line]]:
    """Parts lines that depend on the batch row and the head alone from the others."""
    once, each = [], []
    own = {"score", "product", "slope", *_PLACES}
    for line in lines:
        if line.name in own or not own.isdisjoint(words(line.text)):
            own.add(line.name)
            each.append(line)
        else:
            once.append(line)
    return once, each


@functools.lru_cache(maxsize=256)
def _body(
    function: Function,
    with_slope: bool,
    rows: tuple[bool, ...],
    small: bool,
    exact: bool = True,
    scales: bool = False,
    lengths: tuple[int, int] = (0, 0),
) -> tuple[tuple[Line, ...], str]:
    if len(function.captures) > MAX_CAPTURES:
        count = len(function.captures)
        raise UnsupportedError(f"it reads {count} arrays, and kernels take up to {MAX_CAPTURES}")
    value_program = function.program.opened
    if with_slope:  # says what has no text before it is differentiated
        _body(function, False, rows, small)
    writer = Writer({x: n for x, n in zip(_PLACES, lengths, strict=True) if n})
    inputs = _inputs(writer, function, rows, small)
    program = function.program.with_slope if with_slope else value_program
    results = [writer.scalar(x).text for x in _run(writer, program, inputs)]
    lines = writer.needed(results, with_slope)
    of_value = {line.name for line in writer.needed(results[:1], False)}
    if not exact:
        lines = _quickened(lines, of_value)
    lines = tuple(_loosened(line, lines, of_value) for line in lines)
    if scales:
        sharp = of_value | {"score"} if exact else _sharp(lines, of_value)
        lines = (SCALE, *scale_scores(lines, results, sharp))
    return lines, results[0]


def _quickened(lines: Sequence[Line], of_value: set[str]) -> tuple[Line, ...]:
    """Takes quicker forms of what is computed for each score, but where they decide a step.

    A quotient that is a whole number may be a little less, which a floor would make one less. The
    value has the same form with a slope beside it as without.
    """
    sharp = _sharp(lines, of_value)
    each = {line.name for line in _split(lines)[1]}

    def quick(line: Line) -> Line:
        if line.kind != "float" or line.name not in each or line.name in sharp & of_value:
            return line
        text = re.sub(r"^(\S+) / (\S+|\(.+\))$", r"quotient(\1, \2)", line.text)
        text = _QUICKER.sub(lambda of: f"{_QUICK[of[1]]}(", text)
        return dataclasses.replace(line, text=text)

    return tuple(map(quick, lines))


def _sharp(lines: Sequence[Line], of_value: set[str]) -> set[str]:
    """Lists the names that decide a step of the value."""
    sharp: set[str] = set()
    for line in reversed([x for x in lines if x.name in of_value]):
        sharp |= _deciding(line.text)
        sharp |= words(line.text) if line.name in sharp else set()
    return sharp


def _deciding(text: str) -> set[str]:
    """Lists the names of a text of which a small change may make a large one of its value."""
    if chosen := re.fullmatch(r"(\w+) \? .+ : .+", text):
        return {chosen[1]}
    if re.fullmatch(r"(\S+) [<>] (\S+) (\|\| \1 != \1 )?\? \1 : \2", text):  # the larger, the less
        return set()
    return words(text) if _STEP.search(text) else set()


_STEP = re.compile(
    r"[<>=!?%&|^~]|\b(floorf|ceilf|roundf|rintf|fmodf|int|unsigned|__builtin_bit_cast)\b"
)


def _loosened(line: Line, lines: Sequence[Line], of_value: set[str]) -> Line:
    """Rounds a line less exactly where nobody sees it, for fewer instructions and registers.

    That is in a slope; and of a quotient that goes nowhere but into a function which is not exact.
    """
    text = line.text
    if line.name not in of_value:
        text = re.sub(r"__fmul_rn\((.+), (.+)\)", r"\1 * \2", text)
        text = re.sub(r"divided\((.+), .+, (.+)\)", r"\1 * \2", text)
    elif text.startswith("divided("):
        uses = [x.text for x in lines if x.name in of_value and line.name in words(x.text)]
        if uses and all(use in (f"{f}({line.name})" for f in INEXACT) for use in uses):
            text = re.sub(r"divided\((.+), .+, (.+)\)", r"__fmul_rn(\1, \2)", text)
    return dataclasses.replace(line, text=text)


def _inputs(
    writer: Writer, function: Function, rows: tuple[bool, ...], small: bool
) -> list[Operand]:
    inputs: list[Operand] = []
    for argument, aval in zip(function.arguments, function.program.inputs, strict=False):
        type_of(aval.dtype)
        text, bounds, real = argument, None, None
        if aval.dtype == "int32":
            placed = argument in _PLACES
            bounds = (0, SMALL if placed and small else HIGH)
            if placed:
                text, real = f"{argument}.index", Real(f"{argument}.real", f"{argument}.offset")
        inputs.append(single(Scalar(text, aval.dtype, bounds=bounds, real=real)))
    for i, aval in enumerate(function.captures):
        strides, even = strides_of(aval.shape), aval.size % 2 == 0
        inputs.append(View(i, aval.dtype, integer(0), aval.shape, strides, even=even))
        if aval.size > HIGH:
            raise UnsupportedError(
                f"it reads an array of {aval.size} elements, more than int32 counts"
            )
        pointer = f"const {'unsigned char' if aval.dtype == 'bool' else type_of(aval.dtype)}*"
        row = f" + row * p.captures[{i}].batch" if rows[i] else ""
        text = f"static_cast<{pointer}>(p.captures[{i}].data){row}"
        writer.lines.append(Line(pointer, f"a{i}", text))
    return inputs


def _run(writer: Writer, program: Program, inputs: Sequence[Operand]) -> list[Operand]:
    values: dict[int, Operand] = dict(enumerate(inputs))

    def read(x: Value) -> Operand:
        return values[x] if isinstance(x, int) else of_constant(x)

    for step in program.steps:
        results = writer.write(step, [read(x) for x in step.inputs])
        values.update(zip(step.outputs, results, strict=True))
    return [read(x) for x in program.results]
