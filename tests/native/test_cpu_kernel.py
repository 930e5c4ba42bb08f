"""The CPU kernels through the public calls: accuracy, memory, threads, and what poison may not do.

Features are covered for every backend by the conformance suite, and for every instruction set by
cpu/tests/kernels_test.cc; here is what only this backend promises.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import _native, reference

from .. import numpy_oracle

pytestmark = pytest.mark.skipif(
    _native.available("cpu") is not None, reason="the native module is missing"
)


def draw(shape, dtype=jnp.float32, seed=0):
    """Draws a standard normal array."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def exact(q, k, v, causal=False):
    """Out and lse in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    result = numpy_oracle.attention(q, k, v, is_causal=causal)
    return result.out, result.lse


def attend(q, k, v, **options):
    """Calls the CPU kernel."""
    return jax_flash.flash_attention(q, k, v, backend="cpu", **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [1, 63, 1030])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_error_is_that_of_plain_attention(dtype, length, causal):
    q, k, v = (draw((1, length, 2, 64), dtype, seed) for seed in range(3))
    out, lse = attend(q, k, v, is_causal=causal, return_lse=True)
    expected, expected_lse = exact(q, k, v, causal)
    xla = jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="xla")
    error = np.abs(np.asarray(out, np.float64) - expected).max()
    plain_error = np.abs(np.asarray(xla, np.float64) - expected).max()
    assert out.dtype == jnp.dtype(dtype)
    assert error <= 2 * plain_error + 4 * np.finfo(np.float32).eps
    np.testing.assert_allclose(np.asarray(lse), expected_lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("heads", [(1, 1), (8, 8), (3, 1)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_with_few_and_many_heads(dtype, heads):
    # One head splits its keys among tasks, many heads are tasks of their own.
    n, kv = heads
    q = draw((2, 700, n, 40), dtype, 0)
    k, v = draw((2, 650, kv, 40), dtype, 1), draw((2, 650, kv, 24), dtype, 2)
    weight = draw((2, 700, n, 24), jnp.float32, 3)

    def loss(call, *x):
        return (call(*x).astype(jnp.float32) * weight).sum()

    def exact(q, k, v):
        return jax_flash.flash_attention(q, k, v, is_causal=True, backend="xla")

    grads = jax.grad(lambda *x: loss(lambda *y: attend(*y, is_causal=True), *x), (0, 1, 2))(q, k, v)
    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    expected = jax.grad(lambda *x: loss(exact, *x), (0, 1, 2))(*wide)
    bound = 2e-5 if dtype == "float32" else 0.03
    for got, want in zip(grads, expected, strict=True):
        scale = float(jnp.abs(want).max())
        assert float(jnp.abs(got.astype(jnp.float32) - want).max()) <= bound * scale


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_visible_still_poisons(dtype):
    # Care for nan in hidden keys may not hide a nan that a row does see.
    q, k, v = (draw((1, 130, 1, 64), dtype, seed) for seed in range(3))
    v = v.at[0, 100, 0, 3].set(jnp.nan).at[0, 70, 0, 5].set(jnp.inf)
    out = np.asarray(attend(q, k, v, is_causal=True), np.float32)[0, :, 0]
    assert np.isfinite(out[:, 4]).all()
    assert np.isfinite(out[:100, 3]).all()
    assert np.isnan(out[100:, 3]).all()
    assert np.isfinite(out[:70, 5]).all()
    assert (out[70:, 5] == np.inf).all()


def test_one_query_over_a_long_cache():
    q = draw((3, 1, 4, 64), "bfloat16", 0)
    k, v = (draw((3, 2000, 2, 64), "bfloat16", seed) for seed in (1, 2))
    lengths = jnp.array([2000, 1, 777], jnp.int32)
    past = np.arange(2000)[None, :, None, None] >= np.asarray(lengths)[:, None, None, None]
    dirty = [jnp.where(past, jnp.nan, x) for x in (k, v)]
    got = attend(q, *dirty, key_value_seq_lengths=lengths)
    for b, length in enumerate(lengths):
        expected, _ = exact(q[b : b + 1], *(x[b : b + 1, :length] for x in (k, v)))
        np.testing.assert_allclose(np.asarray(got[b : b + 1], np.float32), expected, atol=0.01)


def test_calls_from_many_threads_at_once():
    from concurrent.futures import ThreadPoolExecutor

    q, k, v = (draw((1, 300, 4, 32), seed=seed) for seed in range(3))
    step = jax.jit(jax.value_and_grad(lambda q: attend(q, k, v, is_causal=True).sum()))
    expected = jax.tree.map(np.asarray, step(q))
    with ThreadPoolExecutor(8) as pool:
        for got in pool.map(lambda _: jax.tree.map(np.asarray, step(q)), range(64)):
            assert all(map(np.array_equal, got, expected))


THREADS = """
import hashlib
import jax, jax.numpy as jnp
import jax_flash

def step(q, k, v, bias, **options):
    def call(*x):
        return jax_flash.flash_attention(
            *x[:3], bias=x[3], return_lse=True, deterministic=True, backend="cpu", **options)
    result, pull = jax.vjp(call, q, k, v, bias)
    return result, pull(jax.tree.map(jnp.sin, result))

for batch, heads, kv_heads, window in [(1, 1, 1, None), (2, 3, 3, (100, 0)), (1, 4, 2, (300, 50))]:
    q, k, v = (
        jax.random.normal(jax.random.key(i), (batch, 1000, n, 40))
        for i, n in enumerate((heads, kv_heads, kv_heads))
    )
    bias = jax.random.normal(jax.random.key(3), (heads, 1, 1000))
    for dtype in ("float32", "bfloat16"):
        results = jax.jit(lambda *x: step(*x, local_window_size=window))(
            *(x.astype(dtype) for x in (q, k, v)), bias)
        text = b"".join(x.tobytes() for x in map(jax.device_get, jax.tree.leaves(results)))
        print(hashlib.sha256(text).hexdigest())
        few = jax_flash.decode_attention(
            q[:, :3].astype(dtype), *(x.astype(dtype) for x in (k, v)),
            jnp.arange(900, 900 + batch), backend="cpu")
        print(hashlib.sha256(few.out.tobytes() + few.lse.tobytes()).hexdigest())
"""


def test_deterministic_gradients_do_not_depend_on_the_number_of_threads(tmp_path):
    package = Path(jax_flash.__file__).parent.parent
    seen = set()
    for threads in (1, 3):  # of XLA's pool, by the variable that it reads
        environment = dict(os.environ, PYTHONPATH=str(package), JAX_PLATFORMS="cpu")
        environment["XLA_FLAGS"] += " --xla_force_host_platform_device_count=1"
        done = subprocess.run(
            [sys.executable, "-c", THREADS],
            cwd=tmp_path,
            env=environment | {"NPROC": str(threads)},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        seen.add(done.stdout)
    assert len(seen) == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradient_of_the_bias_at_a_peaked_softmax(dtype):
    # From the output, rounded to 16 bits, delta would be off by 1e-2 in bfloat16.
    q, k, v, dout = (draw((1, 64, 2, 64), dtype, seed) for seed in range(4))
    bias = 20 * draw((1, 2, 64, 64), seed=4)

    def exact(bias):
        wide = (x.astype(jnp.float32) for x in (q, k, v))
        out = reference.attention(*wide, bias=bias, softcap=30.0)
        return jnp.sum(out * dout.astype(jnp.float32))

    def ours(bias):
        out = attend(q, k, v, bias=bias, softcap=30.0)
        return jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32))

    want, got = jax.grad(exact)(bias), jax.grad(ours)(bias)
    assert jnp.abs(want).max() > 0.1
    assert jnp.abs(got - want).max() < 1e-4


def test_float16_gradients_beyond_its_weights_range():
    """The "cpu" kernels keep float16's weights in float32: none is lost below 6e-8."""
    q, k = (jnp.zeros((1, n, 1, 16), "float16") for n in (1, 3))
    v = draw((1, 3, 1, 16), "float16", 0)
    bias = jnp.array([0.0, -18.0, -18.0])
    dv = jax.grad(lambda v: attend(q, k, v, bias=bias).astype(jnp.float32).sum() * 2.0**14)(v)
    np.testing.assert_allclose(dv[0, 1:], np.exp(-18.0) * 2.0**14, rtol=1e-3)


MEMORY = """
import json, resource, sys
import jax, jax.numpy as jnp, numpy as np
import jax_flash

def step(q, k, v, dout):
    out, pull = jax.vjp(
        lambda *x: jax_flash.flash_attention(*x, is_causal=True, backend="cpu"), q, k, v)
    return out, pull(dout)

def peak():
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

def run(length):
    shape = jax.ShapeDtypeStruct((1, length, 1, 64), jnp.float32)
    compiled = jax.jit(step).lower(*[shape] * 4).compile()
    inputs = [jnp.asarray(np.full(shape.shape, 0.1, np.float32)) for _ in range(4)]
    return jax.block_until_ready(compiled(*inputs))

run(256)
before = peak()
results = run(16384)
size = 16384 * 64 * 4
print(json.dumps({"extra": peak() - before - (4 + len(jax.tree.leaves(results))) * size}))
"""


@pytest.mark.slow
def test_memory_stays_linear(tmp_path):
    # Peak of a fresh process over inputs and outputs, 4 MB each; [T, S] scores would take 1 GB.
    package = Path(jax_flash.__file__).parent.parent
    environment = dict(os.environ, PYTHONPATH=str(package), JAX_PLATFORMS="cpu")
    done = subprocess.run(
        [sys.executable, "-c", MEMORY],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["extra"] <= 60e6
