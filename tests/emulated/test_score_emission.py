"""Score functions as CUDA: the text that kernels are compiled with, run on the host beside JAX.

The text is plain C++ but for a few names, so a C++ compiler's functions take the place of CUDA's.
"""

from __future__ import annotations

import ctypes
import subprocess

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from jax_flash import scores
from jax_flash._gpu import distances, emit

from ..fake_cuda import COMPILER
from ..score_texts import (
    FLOATS,
    LITERALS,
    READS,
    ROUNDED,
    TABLE,
    WHOLE,
    N,
    drawn,
    drawn_line,
    of_floats,
    of_integers,
    rounded,
    texts,
    traced,
)
from ..score_trees import function_of, trees

HOST = """\
#include <cmath>
#define __device__
#define __forceinline__ inline
#define __noinline__
template <class T> T __ldg(const T* x) { return *x; }
inline float __expf(float x) { return expf(x); }
inline float __fdividef(float x, float y) { return x / y; }
namespace ptx {
inline float exp2_approx(float x) { return exp2f(x); }
inline float log2_approx(float x) { return log2f(x); }
inline float sqrt_approx(float x) { return sqrtf(x); }
inline float reciprocal_approx(float x) { return 1.0f / x; }
}
inline float __fmul_rn(float x, float y) { return x * y; }
struct Params { struct { const void* data; long long batch; } captures[8]; float scale; };
constexpr bool kAddsToScores = false;
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
    const auto scaled = scaled_%(i)d_of_head(*p, 0, b[i], h[i]);
    const auto row = scaled_%(i)d_of_query(scaled, query);
    const float product = row.factor * scaled_%(i)d(scaled, row, 8.0f * s[i], query, key);
    const float apart = fabsf(product - same), most = 2e-5f * fmaxf(1.0f, fabsf(same));
    if (apart > most && std::isfinite(apart)) value[i] = 54321.0f;
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
        params = np.zeros(17, np.uint64)
        params[: 2 * len(arrays) : 2] = [x.ctypes.data for x in arrays]
        params[16:].view(np.float32)[0] = 0.125  # the scale, whose products are exact
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


def step_by_step(f) -> np.ndarray:
    score, _, head, query, key = draw()
    with np.errstate(all="ignore"):
        return f(np, score, np.minimum(head, N - 1), np.float32(key - query))


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


@hypothesis.settings(max_examples=hypothesis.settings().max_examples // 7)
@hypothesis.given(st.lists(trees(), min_size=16, max_size=16))
def test_text_of_drawn_trees(tmp_path_factory, drawn_trees):
    """Value and slope; a thousandth is what cancels, of quick forms too."""
    rows = jax.random.normal(jax.random.key(2), (2, 30))
    functions = [function_of(tree, rows, jnp.asarray(TABLE)) for tree in drawn_trees]
    text, captured = texts(functions)
    text += "".join(LOOP % {"i": i} for i in range(len(captured)))
    results = run(text, "run", captured, tmp_path_factory.mktemp("trees"))
    for tree, got, want in zip(drawn_trees, results, expected(functions), strict=True):
        finite = np.isfinite(draw()[0])
        for x, of in zip(got, want, strict=True):
            np.testing.assert_allclose(x[finite], of[finite], atol=1e-4, rtol=1e-4, err_msg=tree)


def test_quick_forms_where_no_step_follows():
    """Quotients, logarithms, exponentials and roots of single scores, but where a floor or a
    comparison follows."""
    exact = {"logf", "log1pf", "expf", "exp2f", "sqrtf"}
    quick = {"quotient", "quick_log", "quick_log1p", "quick_exp", "exp2_approx", "sqrt_approx"}

    def called(f, **options) -> set[str]:
        function, _ = traced(f)
        return emit.words(emit.define(function, "value", **options)) & (exact | quick)

    def distance(s, b, h, q, k):
        return s / (1.0 + jnp.abs(q - k) * jnp.exp(s)) + jnp.log1p(s * s)

    def steps(s, b, h, q, k):
        return s + jnp.floor(jnp.log(s) / jnp.exp(s)) + jnp.where(s / (k - q) > 0.3, 1.0, 0.0)

    def selected(s, b, h, q, k):
        return jnp.where(q > k, jnp.log(s), jnp.maximum(s / jnp.exp(s), 0.5))

    def roots(s, b, h, q, k):
        return jnp.sqrt(jnp.abs(s)) + jnp.exp2(s) + jnp.exp(jnp.sqrt(jnp.float32(h)))

    assert called(distance) == {"quotient", "quick_log1p", "quick_exp"}
    assert called(distance, with_slope=True) == {"quotient", "quick_log1p", "quick_exp"}
    assert called(distance, exact=True) == {"log1pf", "expf"}
    assert called(steps) == {"logf", "expf"}
    assert called(selected) == {"quotient", "quick_log", "quick_exp"}
    assert called(roots) == {"sqrt_approx", "exp2_approx", "expf", "sqrtf"}  # exact once a head
    assert called(lambda s, b, h, q, k: s / jnp.exp(jnp.float32(h))) == {"expf"}  # once a head


def test_scale_and_factors_are_where_they_cost_least():
    """A sum has the scale in a fused multiplication, unless it rounds to be seen; the factor of a
    product that head and query decide is left to the exponential; columns are read in pairs."""
    slopes, rows = jnp.ones(N), jnp.ones((2, 30))

    def text_of(f):
        function, _ = traced(f)
        text = emit.define(function, "value", small=True, scales=True, lengths=(30, 30))
        return text[text.rindex("{") :]

    def factors(s, b, h, q, k):
        return s * slopes[h] * rows[b, q] * rows[b, k]

    def added(s, b, h, q, k):
        return rows[b, q] + s + jnp.exp(rows[b, k])

    assert "fmaf(product, scale, " in text_of(added)
    assert "element_along" in text_of(added)
    odd = jnp.ones((2, 31))  # from an odd element on, which no pair begins at
    assert "element_along" not in text_of(lambda s, b, h, q, k: s + odd[b, 1:][k])
    cut = jnp.ones(31)  # of which each batch row may have another, in turn from an odd element on
    text = text_of(lambda s, b, h, q, k: s + jax.lax.dynamic_slice(cut, (0 * b,), (30,))[k])
    assert "element_along" not in text
    assert "exp" not in text_of(lambda s, b, h, q, k: s + jnp.exp(rows[b, q]))
    assert text_of(factors).count("__fmul_rn") == 1
    rounds = text_of(lambda s, b, h, q, k: (s + 12582912.0) - 12582912.0)
    assert "__fmul_rn(product, scale)" in rounds
    assert "__fmul_rn(product, scale)" in text_of(lambda s, b, h, q, k: jnp.floor(s + slopes[h]))


def test_division_of_positions_and_slopes_of_a_choice_are_short():
    """A floor division of what is not negative is one of unsigned; 0 + 1 and 1 + 0 are 1."""

    def checker(s, b, h, q, k):
        return jnp.where((q // 64 + k // 64 + q % 8) % 2 == 0, s, s - 1.5)

    function, _ = traced(checker)
    text = emit.define(function, "value", with_slope=True, small=True)
    assert text.count("?") == 1
    assert "kTogether = 0;" in text
    assert not emit.has_slope(function)


def test_logarithms_near_one_and_far(tmp_path):
    def function(f):
        return lambda s, b, h, q, k: f(s)

    # From 2^-40 on, and to both sides of where the polynomial ends.
    scales = (1e-12, 1e-4, 0.02, 0.06, 1.0, 1e6)
    functions = [
        function(lambda x, scale=scale, f=f: f(scale * jnp.abs(x)))
        for scale in scales
        for f in (jnp.log1p, lambda x: jnp.log(1.0 + x), lambda x: jnp.log(jnp.abs(1.0 - x)))
    ]
    text, captured = texts(functions)
    assert {"quick_log", "quick_log1p"} <= emit.words(text)
    text += "".join(LOOP % {"i": i} for i in range(len(captured)))
    results = run(text, "run", captured, tmp_path)
    for i, (got, _) in enumerate(results):
        x = np.abs(np.float32(scales[i // 3]) * draw()[0])
        x = (x, np.float32(1) + x, np.abs(np.float32(1) - x))[i % 3].astype(np.float64)
        with np.errstate(divide="ignore"):
            want = np.log1p(x) if i % 3 == 0 else np.log(x)
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=0, err_msg=f"{i}")


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
