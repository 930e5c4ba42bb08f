"""Score functions as CUDA: the text that kernels are compiled with, run on the host beside JAX.

The text is plain C++ but for a few names, so a C++ compiler's functions take the place of CUDA's.
"""

from __future__ import annotations

import ctypes
import random
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_flash
from jax_flash import _function, _native, scores
from jax_flash._gpu import emit

from .fake_cuda import COMPILER

ARGUMENTS = {"score": "float32", **dict.fromkeys(("batch", "head", "query", "key"), "int32")}
N, R = 4, 5
TABLE = np.asarray(jax.random.normal(jax.random.key(0), (N, 2 * R + 1)))
INTEGERS = np.asarray(jax.random.randint(jax.random.key(1), (2, 7), -9, 9))

HOST = """\
#include <cmath>
#define __device__
#define __forceinline__ inline
template <class T> T __ldg(const T* x) { return *x; }
inline float __expf(float x) { return expf(x); }
inline float __fdividef(float x, float y) { return x / y; }
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


def texts(functions) -> tuple[str, list]:
    """The CUDA of functions, value_i and slope_i, and of each the arrays that it reads."""
    text, arrays = emit.PRELUDE, []
    for i, f in enumerate(functions):
        function, captured = _function.trace("score_mod", f, ARGUMENTS, "float32")
        assert emit.cannot(function, with_slope=True) == ()
        small = i % 2 == 0
        text += emit.define(function, f"value_{i}", small=small)
        text += emit.define(function, f"slope_{i}", small=small, with_slope=True)
        arrays.append([np.ascontiguousarray(x) for x in captured])
    return text, arrays


def draw(count: int = 400) -> list[np.ndarray]:
    """Scores, with zeros and infinities among them, and indices, some beyond the arrays."""
    rng = np.random.default_rng(3)
    score = (rng.standard_normal(count) * 4).astype(np.float32)
    score[:4] = 0.0, -0.0, np.inf, -np.inf
    indices = [rng.integers(0, size, count).astype(np.int32) for size in (2, N + 2, 30, 30)]
    return [score, *indices]


def run(functions, folder) -> list[tuple[np.ndarray, np.ndarray]]:
    """Values and slopes of functions at drawn arguments, computed by their CUDA."""
    text, captured = texts(functions)
    loops = "".join(LOOP % {"i": i} for i in range(len(captured)))
    (folder / "host.cc").write_text(HOST + text + loops)
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
        getattr(library, f"run_{i}")(address, ctypes.c_long(len(given[0])), *pointers, *to)
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
    """Of integers of both signs, and the ends of int32; the score is added for a slope."""

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
            kind = choose.randrange(6)
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
    results = zip(functions, run(given, tmp_path), expected(given), strict=True)
    wrong = []
    for i, ((_, ulp), got, want) in enumerate(results):
        try:
            check(got, want, ulp)
        except AssertionError as error:
            wrong.append(f"function {i}: {error}")
    assert not wrong, "\n".join(wrong)


def test_text_compiles():
    """All of it in one program, without a GPU."""
    if _native.available("cuda"):
        pytest.skip(str(_native.available("cuda")))
    functions = [
        *(of_floats(lambda x, f=f: jnp.asarray(f(x), jnp.float32)) for f in FLOATS),
        *(of_integers(f) for f in WHOLE),
        *READS,
        *(drawn(seed) for seed in range(8)),
    ]
    text, _ = texts(functions)
    calls = "".join(
        f"  sum += value_{i}(value_{i}_of_head(p, 0, b, h), x, q, k);\n"
        f"  sum += slope_{i}(slope_{i}_of_head(p, 0, b, h), x, q, k, x);\n"
        for i in range(len(functions))
    )
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
    assert "70 elements of an array at once" in refusals(
        lambda s, b, h, q, k: s + jnp.sum(jnp.ones((2, 70))[h])
    )


def test_explain_prints_the_text(uncompiled):
    if _native.available("cuda"):
        pytest.skip(str(_native.available("cuda")))
    q = jax.ShapeDtypeStruct((1, 128, 4, 64), jnp.bfloat16)
    made = jax_flash.explain(q, q, q, score_mod=scores.alibi(TABLE[:, 0]), gpu="H200")
    assert made.backend == "cuda"
    assert "score_value(const ScoreValueOfHead& of, float score, const Place& query" in str(made)
    assert "score_value_and_slope" in str(made)
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
        lambda s, b, h, q, k: (
            2.0 + s - jnp.abs((q - k).astype(jnp.float32)) / 8 - slopes[b] * (q - k)
        ): 0,
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
        scores.distance_decay(slopes, slopes),
        scores.relative_position_table(jnp.zeros((4, 257))),  # no key is so far away
    )
    q = jax.ShapeDtypeStruct((1, 128, 4, 64), jnp.bfloat16)
    for f in (*reaches, *others):
        made = jax_flash.explain(q, q, q, score_mod=f, gpu="H200")
        assert made.backend == "cuda"
        assert ("score_line_of_head" in str(made)) == (f in reaches)
        assert made.forward.kernel.plan.constants["kScoreReach"] == reaches.get(f, -1)
