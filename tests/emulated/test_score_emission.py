"""Score functions as CUDA: the text that kernels are compiled with, run on the host beside JAX.

The text is plain C++ but for a few names, so a C++ compiler's functions take the place of CUDA's.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import random
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_flash
from jax_flash import _function, _gpu, _native, scores
from jax_flash._gpu import distances, emit
from jax_flash._ops import passes

from ..compiled.compile_cases import H200, PLAIN, SHAPES, compile_within
from ..fake_cuda import COMPILER

ARGUMENTS = {"score": "float32", **dict.fromkeys(("batch", "head", "query", "key"), "int32")}
N, R = 4, 5
TABLE = np.asarray(jax.random.normal(jax.random.key(0), (N, 2 * R + 1)))
INTEGERS = np.asarray(jax.random.randint(jax.random.key(1), (2, 7), -9, 9))

HOST = """\
#include <cmath>
#define __device__
#define __forceinline__ inline
#define __noinline__
template <class T> T __ldg(const T* x) { return *x; }
inline float __expf(float x) { return expf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fmul_rn(float x, float y) { return x * y; }
struct Params { struct { const void* data; long long batch; } captures[8]; };
struct Indexed { int index; float real, offset; };
"""
LOOP = """
extern "C" void run_%(i)d(Params* p, long n, const float* s, const int* b, const int* h,
                          const int* q, const int* k, float* value, float* slope) {
  for (long i = 0; i < n; ++i) {
    const Indexed query = {q[i], float(q[i] - 3), 3.0f}, key = {k[i], float(k[i] - 9), 9.0f};
    value[i] = value_%(i)d(value_%(i)d_of_head(*p, 0, b[i], h[i]), s[i], query, key);
    slope[i] = 0.0f;
    float same;
    same = slope_%(i)d(slope_%(i)d_of_head(*p, 0, b[i], h[i]), s[i], query, key, slope[i]);
    if (!(same == value[i]) && (same == same || value[i] == value[i])) value[i] = 12345.0f;
  }
}
"""

LINE = """
extern "C" void lines_%(i)d(Params* p, long n, const float* s, const int* b, const int* h,
                            const int* q, const int* k, float* value, float* slope) {
  for (long i = 0; i < n; ++i) {
    const auto lines = of_%(i)d::lines_of_head(*p, 0, b[i], h[i]);
    const auto& line = k[i] >= q[i] ? lines.after : lines.before;
    value[i] = s[i] + (line.slope * float(k[i] - q[i]) + line.constant);
    slope[i] = fmaxf(fabsf(line.slope * float(k[i] - q[i])), fabsf(line.constant));
  }
}
"""


def traced(f):
    return _function.trace("score_mod", f, ARGUMENTS, "float32")


def texts(functions) -> tuple[str, list]:
    """The CUDA of functions, value_i and slope_i, and of each the arrays that it reads."""
    text, arrays = "", []
    for i, f in enumerate(functions):
        function, captured = traced(f)
        assert emit.cannot(function, with_slope=True) == ()
        small = i % 2 == 0
        text += emit.define(function, f"value_{i}", small=small)
        text += emit.define(function, f"slope_{i}", small=small, with_slope=True)
        arrays.append([np.ascontiguousarray(x) for x in captured])
    return emit.with_helpers(text), arrays


def draw(count: int = 400) -> list[np.ndarray]:
    """Scores, with zeros and infinities among them, and indices, some beyond the arrays."""
    rng = np.random.default_rng(3)
    score = (rng.standard_normal(count) * 4).astype(np.float32)
    score[:4] = 0.0, -0.0, np.inf, -np.inf
    indices = [rng.integers(0, size, count).astype(np.int32) for size in (2, N + 2, 30, 30)]
    return [score, *indices]


def run(text, name, captured, folder) -> list[tuple[np.ndarray, np.ndarray]]:
    """What the functions name_i of a text give at drawn arguments, of their arrays."""
    (folder / "host.cc").write_text(HOST + text)
    command = [COMPILER, "-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC"]
    subprocess.run([*command, folder / "host.cc", "-o", folder / "host.so"], check=True)
    library = ctypes.CDLL(str(folder / "host.so"))
    given, results = draw(), []
    pointers = [ctypes.c_void_p(x.ctypes.data) for x in given]
    for i, arrays in enumerate(captured):
        params = np.zeros((8, 2), np.uint64)
        params[: len(arrays), 0] = [x.ctypes.data for x in arrays]
        got = [np.empty_like(given[0]) for _ in range(2)]
        address = ctypes.c_void_p(params.ctypes.data)
        to = [ctypes.c_void_p(x.ctypes.data) for x in got]
        getattr(library, f"{name}_{i}")(address, ctypes.c_long(len(given[0])), *pointers, *to)
        results.append((got[0], got[1]))
    return results


def expected(functions) -> list[tuple[np.ndarray, np.ndarray]]:
    def all_of_them(*arguments):
        return [jax.vmap(jax.value_and_grad(f))(*arguments) for f in functions]

    return jax.tree.map(np.asarray, jax.jit(all_of_them)(*map(jnp.asarray, draw())))


def check(got, wanted, ulp: float) -> None:
    for name, x, want in zip(("value", "slope"), got, wanted, strict=True):
        # Sums cancel: units of 1 at least.
        np.testing.assert_allclose(x, want, rtol=ulp * 2**-23, atol=ulp * 2**-23, err_msg=name)


def of_floats(f):
    return lambda s, b, h, q, k: f(s)


def of_integers(f):
    """Calls f with integers of both signs and the ends of int32; adds the score for a slope."""

    def function(s, b, h, q, k):
        x, y = q - 11, k - 17
        x = jnp.where(q == 3, -(2**31), jnp.where(q == 4, 2**31 - 1, x))
        result = f(x, y)
        result = result % 1000 if result.dtype != jnp.bool_ else result
        return jnp.where(jnp.isfinite(s), s, 0.0) + result.astype(jnp.float32)

    return function


FLOATS = (
    *(jnp.exp, jnp.exp2, jnp.expm1, jnp.tanh, jnp.sin, jnp.cos, jnp.tan, jnp.arctan, jnp.sinh),
    *(jnp.cosh, jnp.arcsinh, lax.erf, lax.erfc, jnp.abs, jnp.floor, jnp.ceil, jnp.round, jnp.sign),
    *(jnp.cbrt, jax.nn.relu, jax.nn.silu, jax.nn.sigmoid, jax.nn.softplus, jnp.isfinite),
    lambda x: jnp.log(jnp.abs(x) + 0.1),
    lambda x: jnp.log1p(x * x),
    lambda x: jnp.sqrt(jnp.abs(x) + 0.5),
    lambda x: lax.rsqrt(x * x + 0.5),
    lambda x: x**3 + x**-2 + (x * x + 0.3) ** 1.7 + jnp.square(x),
    lambda x: jnp.clip(x, -1.0, 2.0) + jnp.maximum(x, 0.5) * jnp.minimum(-x, x + 1.0),
    lambda x: jnp.arctan2(x, 0.7) + x / (1.0 + x * x) + x / 3.0,
    lambda x: lax.rem(x, 1.5) - lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO),
    lambda x: jnp.where(x > 1, jnp.nan, jnp.where(x < -2, -jnp.inf, 3 * x)),
    lambda x: lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint32) >> 1, jnp.float32),
    lambda x: (x * 1e9).astype(jnp.int32) % 77 + (x * 1e9).astype(jnp.uint32) % 78 + 0.5 * x,
    lambda x: jnp.full((), 2.5),
)
WHOLE = (
    *(jnp.add, jnp.subtract, jnp.multiply, jnp.maximum, jnp.minimum, lax.div, lax.rem),
    *(jnp.floor_divide, jnp.remainder, jnp.less, jnp.greater_equal, jnp.equal),
    *(jnp.bitwise_and, jnp.bitwise_or, jnp.bitwise_xor, lax.shift_left),
    *(lax.shift_right_arithmetic, lax.shift_right_logical),
    lambda x, y: jnp.abs(x) + jnp.sign(y) - (-x) + ~y + x * x,
    lambda x, y: (x < y) & (x > 3) | ~(y == 2) ^ (x != y),
    lambda x, y: x.astype(jnp.uint32) // 7 + (y.astype(jnp.uint32) << 3),
    lambda x, y: lax.select_n(jnp.clip(x, 0, 2), x, y, x + y),
    lambda x, y: jnp.where(x < y, x // 3, x % 5) + jnp.float32(x).astype(jnp.int32),
)
READS = (
    lambda s, b, h, q, k: s + jnp.asarray(TABLE)[h, jnp.clip(k - q, -R, R) + R],
    lambda s, b, h, q, k: s * jnp.asarray(TABLE)[h][k - q],  # wraps, and is brought to the ends
    lambda s, b, h, q, k: s + jnp.take(jnp.asarray(TABLE)[0], k - q),  # NaN beyond
    lambda s, b, h, q, k: s + jnp.asarray(TABLE).at[h, q].get(mode="fill", fill_value=0.25),
    lambda s, b, h, q, k: s + jnp.asarray(TABLE).T.at[q, h].get(mode="clip"),
    lambda s, b, h, q, k: jnp.where(jnp.asarray(INTEGERS)[b, q] == INTEGERS[0, 0], s, -2 * s),
    lambda s, b, h, q, k: s + jnp.exp(jnp.asarray(TABLE))[h, 1] * jnp.float32(TABLE[0, 0]),
    lambda s, b, h, q, k: s + jnp.sum(jnp.asarray(TABLE)[h, :3] * jnp.arange(3.0)),
    lambda s, b, h, q, k: jax.nn.silu(s) + jnp.sum(jnp.asarray(TABLE)[h, :3] * jnp.tanh(s)),
    lambda s, b, h, q, k: jnp.where((jnp.asarray(INTEGERS) > 0)[b, k], s, 0.5),
    lambda s, b, h, q, k: s + jnp.asarray(TABLE)[jnp.array([h, 1]), jnp.array([0, q])].sum(),
    scores.alibi(TABLE[:, 0]),
    scores.relative_position_buckets(jnp.asarray(TABLE), max_distance=9),
    scores.distance_decay(TABLE[:, 0] ** 2, TABLE[:, 1] ** 2),
    scores.compose(scores.alibi(TABLE[:, 0]), scores.softcap(3.0), scores.tanh(2.0)),
    scores.softcap(jnp.float32(3.0)),
)
# Operations that are rounded, which a fused product, a reciprocal or another order would not be;
# of jax.numpy, and of numpy, which does one after the other (XLA multiplies by reciprocals).
ROUNDED = (
    lambda n, s, h, d: (s + 12582912.0) - 12582912.0 + n.float32(0.1) * d,
    lambda n, s, h, d: s + ((n.float32(0.1) * d + 1e8) - 1e8),
    lambda n, s, h, d: 4097.0 * s - (4097.0 * s - s),  # its first twelve bits
    lambda n, s, h, d: s * s - abs(s) * abs(s),
    lambda n, s, h, d: n.floor(41.0 * d / 41.0) + s / 3.0,
    lambda n, s, h, d: n.floor(s / n.asarray(TABLE)[h, 0]) + n.floor(d / 0.3),
    lambda n, s, h, d: s / n.asarray([0.0, n.inf, 3.0, -7.0], n.float32)[h],
)


def rounded(f):
    return lambda s, b, h, q, k: f(jnp, s, h, jnp.float32(k - q))


def step_by_step(f) -> np.ndarray:
    score, _, head, query, key = draw()
    with np.errstate(all="ignore"):
        return f(np, score, np.minimum(head, N - 1), np.float32(key - query))


# Which have numbers of both signs in what both sides of a query know.
LITERALS = (
    lambda s, b, h, q, k: s - jnp.where(k > q, -1.0, 0.5),
    lambda s, b, h, q, k: s + jax.nn.sigmoid(jnp.where(k > q, -4.0, 4.0)),
    lambda s, b, h, q, k: s + jax.nn.log_sigmoid(jnp.where(k > q, -4.0, 4.0)),
    lambda s, b, h, q, k: s + jnp.exp(-jnp.where(k > q, -4.0, 4.0)),
    lambda s, b, h, q, k: s + -(jnp.minimum(k, -1)).astype(jnp.float32),
)


def drawn_line(seed: int):
    """A random function of numbers that the side of the query decides, or its head."""
    near = (
        jnp.negative, jnp.abs, jnp.sign, jax.nn.sigmoid, jax.nn.relu, jnp.tanh, jnp.floor,
        lambda x: jnp.exp(-jnp.abs(x)), lambda x: 1.0 / (x * x + 1.0), lambda x: -x * 0.7,
        lambda x: jnp.where(x < 0.0, -x, x), lambda x: lax.integer_pow(x, 2),
    )  # fmt: skip
    pairs = (jnp.add, jnp.subtract, jnp.maximum, jnp.minimum, lambda x, y: jnp.tanh(x * y))

    def function(s, b, h, q, k):
        choose = random.Random(seed)
        numbers = [-2.5, -1.0, -0.0, 0.5, 3.0, -7e-9]
        floats = [jnp.where(k > q, *choose.sample(numbers, 2)) for _ in range(3)]
        floats.append(jnp.minimum(k, -1).astype(jnp.float32))
        floats.append(jnp.asarray(TABLE)[h, 1])
        for _ in range(6):
            floats.append(choose.choice(near)(choose.choice(floats)))
            floats.append(choose.choice(pairs)(choose.choice(floats), choose.choice(floats)))
        return s + choose.choice((1.0, k - q)) * jnp.clip(floats[-1], -40.0, 40.0)

    return function


def drawn(seed: int):
    """A random function of the primitives, whose values stay near 1."""
    near = (
        lambda x: jnp.tanh(x), lambda x: jnp.sin(x), lambda x: jnp.exp(-x * x),
        lambda x: 0.5 * x, lambda x: jnp.log1p(jnp.abs(x)), lambda x: jnp.sqrt(x * x + 1.0),
        lambda x: lax.integer_pow(jnp.cos(x), 3), lambda x: jax.nn.sigmoid(x),
    )  # fmt: skip
    pairs = (jnp.add, jnp.subtract, jnp.maximum, jnp.minimum, lambda x, y: jnp.tanh(x * y))
    whole = (
        jnp.add,
        jnp.subtract,
        jnp.minimum,
        lambda x, y: x * 3 - y,
        lambda x, y: x % (y * y + 2),
    )

    def function(s, b, h, q, k):
        choose = random.Random(seed)
        floats, ints = [jnp.where(jnp.isfinite(s), s, 1.0)], [b, h, q, k]
        for _ in range(12):
            kind = choose.randrange(7)
            if kind == 0:
                ints.append(choose.choice(whole)(choose.choice(ints), choose.choice(ints)))
            elif kind == 1:
                floats.append(jnp.tanh(0.05 * choose.choice(ints)))
            elif kind == 2:
                at = choose.choice(ints), choose.choice(ints)
                floats.append(jnp.asarray(TABLE)[at])
            elif kind == 3:
                one, other = choose.choice(floats), choose.choice(floats)
                floats.append(jnp.where(choose.choice(ints) < choose.choice(ints), one, other))
            elif kind == 4:
                ordered = choose.choice(ints) < choose.choice(ints)
                floats.append(-jnp.where(ordered, -1.5, choose.choice((-0.0, 0.25, -3.0))))
            elif kind == 5:
                floats.append(choose.choice(near)(choose.choice(floats)))
            else:
                floats.append(choose.choice(pairs)(choose.choice(floats), choose.choice(floats)))
        return floats[-1] + 0.1 * floats[0]

    return function


def test_text_computes_what_jax_does(tmp_path):
    """Elementary functions to 8 units in the last place, integers and reads of arrays exactly."""
    functions = (
        *((of_floats(lambda x, f=f: jnp.asarray(f(x), jnp.float32)), 8) for f in FLOATS),
        *((of_integers(f), 0) for f in WHOLE),
        *((f, 8) for f in READS),
        *((drawn(seed), 64) for seed in range(10)),
    )
    given = [f for f, _ in functions]
    text, captured = texts([*given, *map(rounded, ROUNDED)])
    text += "".join(LOOP % {"i": i} for i in range(len(captured)))
    results = run(text, "run", captured, tmp_path)
    wrong = []
    cases = zip(functions, results[: len(given)], expected(given), strict=True)
    for i, ((_, ulp), got, want) in enumerate(cases):
        try:
            check(got, want, ulp)
        except AssertionError as error:
            wrong.append(f"function {i}: {error}")
    for i, f in enumerate(ROUNDED):
        try:
            np.testing.assert_array_equal(results[len(given) + i][0], step_by_step(f))
        except AssertionError as error:
            wrong.append(f"rounded function {i}: {error}")
    assert not wrong, "\n".join(wrong)


def test_lines_compute_what_their_functions_do(tmp_path):
    """To a few units in the last place of the largest of their terms."""
    functions = [(f, 4) for f in (*LITERALS, scores.alibi(TABLE[:, 0]))]
    functions += [(drawn_line(seed), 64) for seed in range(60)]
    text, captured, having = "", [], []
    for f, ulp in functions:
        function, arrays = traced(f)
        lines = distances.lines_of(function, (False,) * len(arrays))
        if lines is not None and lines.reach <= 1:
            i = len(having)
            text += f"namespace of_{i} {{\n{emit.with_helpers(lines.define('lines_of_head'))}}}\n"
            text += LINE % {"i": i}
            captured.append([np.ascontiguousarray(x) for x in arrays])
            having.append((f, ulp))
    assert len(having) > 30
    score, _, _, query, key = draw()
    beyond = np.isfinite(score) & (key != query)
    wanted = [value for value, _ in expected([f for f, _ in having])]
    results = zip(having, run(text, "lines", captured, tmp_path), wanted, strict=True)
    for (f, ulp), (got, term), want in results:
        largest = np.maximum(np.maximum(abs(score), term), abs(key - query) if ulp > 4 else 0)
        right = abs(got[beyond] - want[beyond]) <= (ulp * 2.0**-23 * largest)[beyond]
        assert right.all(), jax.make_jaxpr(f)(0.0, 0, 0, 0, 0)


def test_text_compiles():
    """All of it in one program, without a GPU."""
    if _native.available("cuda"):
        pytest.skip(str(_native.available("cuda")))
    functions = [
        *(of_floats(lambda x, f=f: jnp.asarray(f(x), jnp.float32)) for f in FLOATS),
        *(of_integers(f) for f in WHOLE),
        *READS,
        *map(rounded, ROUNDED),
        *LITERALS,
        *(drawn(seed) for seed in range(8)),
        *(drawn_line(seed) for seed in range(8)),
    ]
    text, _ = texts(functions)
    calls = "".join(
        f"  sum += value_{i}(value_{i}_of_head(p, 0, b, h), x, q, k);\n"
        f"  sum += slope_{i}(slope_{i}_of_head(p, 0, b, h), x, q, k, x);\n"
        for i in range(len(functions))
    )
    lines = [
        distances.lines_of(one, (False,) * len(one.captures)) for one, _ in map(traced, functions)
    ]
    for i, line in enumerate(lines):
        if line is not None:
            text += f"namespace of_{i} {{\n{line.define('lines_of_head')}}}\n"
            calls += f"  sum += of_{i}::lines_of_head(p, 0, b, h).after.constant;\n"
    program = f"""{text}
struct Params {{ struct {{ const void* data; long long batch; }} captures[8]; }};
struct Indexed {{ int index; float real, offset; }};
extern "C" __global__ void all(Params p, float x, int b, int h, Indexed q, Indexed k, float* to) {{
  float sum = 0.0f;
{calls}  *to = sum;
}}
"""
    compiled = _native.compile_kernel("numbers.cuh", program, "sm_90a")
    assert compiled.cubin


def sines(count: int):
    return of_floats(lambda x: functools.reduce(lambda x, _: jnp.sin(x), range(count), x))


LONG = {  # of 32 primitives at most
    "called": (sines(32), "backward"),
    "of many arguments": (
        lambda s, b, h, q, k: s + jnp.sum(jnp.sin(jnp.asarray(TABLE)[h] * s)),
        "forward",
    ),
    "written out": (of_floats(jax.nn.silu), "forward"),
}


@pytest.mark.parametrize(("f", "name"), LONG.values(), ids=LONG)
def test_functions_add_at_most_four_seconds_to_compiling(f, name):
    if _native.available("cuda"):
        pytest.skip(str(_native.available("cuda")))

    function = traced(f)[0]
    terms = ("score_ids",) if "head" in function.used else ()
    problem = dataclasses.replace(PLAIN, score=function, terms=terms)
    shapes = dataclasses.replace(SHAPES, own_captures=(False,) * len(function.captures))
    plan = _gpu.plan(passes(problem)[name], shapes, H200)
    compile_within(plan, 2 + 4)  # 2 s without a function


# ---- what has no text ----------------------------------------------------------------------------


def refusals(f, dtype=jnp.bfloat16, gpu="H200") -> str:
    q = jax.ShapeDtypeStruct((1, 8, 2, 8), dtype)
    made = jax_flash.explain(q, q, q, score_mod=f, gpu=gpu)
    assert made.forward.backend == "xla"
    return "; ".join(made.forward.refusals["cuda"])


def test_what_has_no_text_runs_on_xla_and_is_named():
    def loops(s, b, h, q, k):
        return lax.while_loop(lambda x: x < 3, lambda x: x + 1, s)

    arrays = [jnp.full(3, float(i)) for i in range(9)]
    assert "nothing for its primitive 'while'" in refusals(loops)
    assert "primitive 'cumsum'" in refusals(lambda s, b, h, q, k: s + jnp.cumsum(arrays[0] * s)[h])
    assert "reads 9 arrays, and kernels take up to 8" in refusals(
        lambda s, b, h, q, k: s + sum(x[h] for x in arrays)
    )
    assert "computes in float16" in refusals(
        lambda s, b, h, q, k: (s.astype(jnp.float16) * 2).astype(jnp.float32)
    )
    wide = jnp.ones((2, 60))
    assert "instructions for each score, and kernels up to 8000" in refusals(
        lambda s, b, h, q, k: (
            s + jnp.sum(functools.reduce(lambda x, _: jnp.tan(x), range(12), wide[h] * s))
        )
    )
    assert "70 elements of an array at once" in refusals(
        lambda s, b, h, q, k: s + jnp.sum(jnp.ones((2, 70))[h])
    )


def test_explain_has_the_text_and_prints_what_matters(uncompiled):
    if _native.available("cuda"):
        pytest.skip(str(_native.available("cuda")))
    q = jax.ShapeDtypeStruct((1, 128, 4, 64), jnp.bfloat16)
    made = jax_flash.explain(q, q, q, score_mod=scores.alibi(TABLE[:, 0]), gpu="H200")
    assert made.backend == "cuda"
    assert "score_value(const ScoreValueOfHead& of, float score, const Place& query" in made.source
    assert "score_value_and_slope" in made.source
    assert "lines of CUDA: explanation.source" in str(made)
    assert "score_value(" not in str(made)
    assert len(str(made).splitlines()) < 30
    assert jax_flash.explain(q, q, q, gpu="H200").source == ""
    # A distance of positions takes no conversion.
    assert "float(" not in made.forward.kernel.plan.functions


def test_lines_of_the_distance_are_found(uncompiled):
    if _native.available("cuda"):
        pytest.skip(str(_native.available("cuda")))
    slopes = jnp.asarray(TABLE[:, 0])
    buckets = scores.relative_position_buckets(jnp.zeros((4, 16)), max_distance=99)
    reaches = {  # -1: one line for all distances
        scores.alibi(slopes): 0,
        lambda s, b, h, q, k: s + slopes[h] * (k - q): -1,
        lambda s, b, h, q, k: s + slopes[h]: -1,
        lambda s, b, h, q, k: 2.0 + s - jnp.abs((q - k).astype(jnp.float32)) / 7: 0,
        lambda s, b, h, q, k: s + jnp.abs(q - k + 1): 1,
        lambda s, b, h, q, k: jnp.where(k > q, s + slopes[h], s): 1,
        lambda s, b, h, q, k: s - slopes[h] * jnp.minimum(jnp.abs(q - k), 50): 50,
        lambda s, b, h, q, k: jnp.where((q - k < 7) & (k - q <= 9), 2 * s, s - (q - k)): 10,
        lambda s, b, h, q, k: s + jnp.where(q == k, slopes[0], slopes[h]): 1,
        scores.relative_position_table(TABLE): TABLE.shape[1] // 2,
        scores.relative_position_table(jnp.zeros((4, 255))): 127,
        buckets: 99,
    }
    others = (
        lambda s, b, h, q, k: s,
        lambda s, b, h, q, k: s + slopes[h] * k,
        lambda s, b, h, q, k: 2 * s + slopes[h] * (k - q),
        lambda s, b, h, q, k: s + slopes[k % 2] * (k - q),
        lambda s, b, h, q, k: s + jnp.sin(jnp.float32(k - q)),
        lambda s, b, h, q, k: jnp.where(k > q, s, -jnp.inf),
        # Sums that round the score, or may, which a line does not.
        lambda s, b, h, q, k: (s + 12582912.0) - 12582912.0 + 0.1 * (k - q),
        lambda s, b, h, q, k: s + ((0.1 * (k - q) + 1e8) - 1e8),
        lambda s, b, h, q, k: s + 1e8,
        lambda s, b, h, q, k: s + slopes[h] * (k - q) + slopes[b],
        lambda s, b, h, q, k: s + slopes[h] - slopes[b],
        lambda s, b, h, q, k: s - jnp.abs(q - k) / 8 - slopes[b] * (q - k),
        lambda s, b, h, q, k: s + 1e30 * (slopes[h] * (k - q)),
        scores.distance_decay(slopes, slopes),
        scores.relative_position_table(jnp.zeros((4, 257))),  # no key is so far away
    )
    q = jax.ShapeDtypeStruct((1, 128, 4, 64), jnp.bfloat16)
    for f in (*reaches, *others):
        made = jax_flash.explain(q, q, q, score_mod=f, gpu="H200")
        assert made.backend == "cuda"
        assert ("score_line_of_head" in made.source) == (f in reaches)
        assert made.forward.kernel.plan.constants["kScoreReach"] == reaches.get(f, -1)
