"""Score functions as CUDA: their text compiles, and adds little time to a kernel's."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from jax_flash import _gpu, _native
from jax_flash._gpu import distances
from jax_flash._ops import passes

from ..score_texts import (
    FLOATS,
    LITERALS,
    READS,
    ROUNDED,
    TABLE,
    WHOLE,
    drawn,
    drawn_line,
    of_floats,
    of_integers,
    rounded,
    texts,
    traced,
)
from .compile_cases import H200, PLAIN, SHAPES, compile_within


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
        f"  const auto scaled_{i}_of = scaled_{i}_of_head(p, 0, b, h);\n"
        f"  const auto row_{i} = scaled_{i}_of_query(scaled_{i}_of, q);\n"
        f"  sum += row_{i}.factor * scaled_{i}(scaled_{i}_of, row_{i}, x, q, k);\n"
        for i in range(len(functions))
    )
    lines = [
        distances.lines_of(one, (False,) * len(one.captures)) for one, _ in map(traced, functions)
    ]
    for i, line in enumerate(lines):
        if line is not None:
            text += f"namespace of_{i} {{\n{line.define('lines_of_head')}}}\n"
            calls += f"  sum += of_{i}::lines_of_head(p, 0, b, h).after.constant;\n"
    program = f"""#include "ptx.cuh"
constexpr bool kAddsToScores = false;
{text}
struct Params {{ struct {{ const void* data; long long batch; }} captures[8]; float scale; }};
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
