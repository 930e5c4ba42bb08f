"""The CUDA run time on a GPU: kernels, threads, devices, export, other processes, caches."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash import _gpu
from jax_flash._ops import passes
from jax_flash._problem import Problem, Shapes

from ..hopper import NEEDS_HOPPER, assert_right, assert_same_bits, attend, draw, exact, gradients
from ..processes import finish, start_python

pytestmark = NEEDS_HOPPER


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_runs_the_kernel(dim):
    inputs = draw(0, dim=dim)
    lowered = jax.jit(attend).lower(*inputs).as_text()
    assert "jax_flash_cuda_forward" in lowered
    assert_right(jax.jit(attend)(*inputs), *inputs)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_gradients_run_the_kernel(dim):
    assert "jax_flash_cuda_backward" in jax.jit(gradients).lower(*draw(0, dim=dim)).as_text()


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_gradient_of_lse(dim):
    """A loss of lse alone: no gradient of the values, and for q and k that of log-sum-exp."""
    q, k, v = draw(1, dim=dim, q_len=333, kv_len=333)
    weight = np.random.default_rng(0).standard_normal((2, 333, 4)).astype(np.float32)

    @functools.partial(jax.jit, static_argnums=3)
    def slopes(q, k, v, deterministic):
        def loss(q, k, v):
            lse = attend(q, k, v, return_lse=True, deterministic=deterministic)[1]
            return jnp.sum(lse * weight)

        return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)

    want = exact(q, k, v, dout=np.zeros(q.shape), dlse=weight)
    for deterministic in (False, True):
        dq, dk, dv = slopes(q, k, v, deterministic)
        assert (np.asarray(dv) == 0).all()
        for got, right in ((dq, want.dq), (dk, want.dk)):
            error = np.abs(np.asarray(got, np.float64) - right).max()
            assert error < 2**-7 * np.abs(right).max()


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_lse_against_finite_differences(dim):
    """The gradient along a direction is the slope of lse between two points beside."""
    rng = np.random.default_rng(2)
    # Multiples of 1/8 up to 4, and steps of 1/8 from them: exact in bfloat16.
    step = 1 / 8
    shapes = [(2, 70, 4, dim), (2, 70, 2, dim)]
    q, k = (np.clip(np.round(8 * rng.standard_normal(s)) / 8, -3, 3) for s in shapes)
    towards = [rng.integers(-1, 2, s).astype(np.float64) for s in shapes]
    low = functools.partial(jnp.asarray, dtype=jnp.bfloat16)
    v = low(rng.standard_normal(shapes[1]))
    weight = rng.standard_normal((2, 70, 4))

    @jax.jit
    def value(q, k):
        return attend(q, k, v, return_lse=True, scale=0.02)[1]

    def at(distance):
        moved = (low(x + distance * d) for x, d in zip((q, k), towards, strict=True))
        return np.asarray(value(*moved), np.float64)

    slopes = jax.jit(
        jax.grad(lambda q, k: jnp.sum(value(q, k) * weight.astype(np.float32)), argnums=(0, 1))
    )(low(q), low(k))
    got = sum(
        float(np.sum(np.asarray(g, np.float64) * d)) for g, d in zip(slopes, towards, strict=True)
    )
    # Richardson: the error of the central difference is of fourth order in the step.
    narrow, wide = ((at(h) - at(-h)) / (2 * h) for h in (step, 2 * step))
    difference = np.sum((4 * narrow - wide) / 3 * weight)
    # Rounding of each element of the gradients to bfloat16, added up as if at random.
    scatter = 2**-8 * np.sqrt(sum(np.sum(np.square(np.asarray(g, np.float64))) for g in slopes))
    assert abs(got - difference) < 4 * scatter + 1e-3 * abs(difference)


def test_threads_share_kernels_and_stream():
    inputs = [draw(seed, q_len=100 + 16 * seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for out, arrays in zip(pool.map(lambda x: attend(*x), inputs), inputs, strict=True):
            assert_right(out, *arrays)


def test_independent_calls_in_one_program():
    """XLA may run these on several streams."""
    inputs = [draw(seed, batch=1) for seed in range(6)]
    for out, arrays in zip(
        jax.jit(lambda xs: [attend(*x) for x in xs])(inputs), inputs, strict=True
    ):
        assert_right(out, *arrays)


def test_every_device():
    devices = jax.local_devices()
    if len(devices) == 1:
        pytest.skip("one GPU")
    inputs = [jax.device_put(draw(i), device) for i, device in enumerate(devices)]
    step = jax.jit(lambda *x: (attend(*x), gradients(*x)))
    results = [step(*arrays) for arrays in inputs]  # on all devices at the same time
    elsewhere = [step(*jax.device_put(x, devices[i - 1])) for i, x in enumerate(inputs)]
    for (out, slopes), arrays, device in zip(results, inputs, devices, strict=True):
        assert {device} == out.devices() == slopes[0].devices()
        assert_right(out, *arrays)
    assert_same_bits(results, elsewhere)


def test_scan_and_donation():
    q, k, v = draw(3)

    def scan(q, k, v):
        return jax.lax.scan(lambda q, _: (attend(q, k, v), None), q, length=5)[0]

    want = q
    for _ in range(5):
        want = attend(want, k, v)
    np.testing.assert_array_equal(jax.jit(scan, donate_argnums=0)(q.copy(), k, v), want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("key", r"k has shape \[2, 300, 4, 64\], expected \[\*2, S, K, 128\]"),
        ("workspace", "2 results, expected 4"),
        ("launch", "this plan is malformed: a number is missing or out of range in the line"),
        ("kernel", "failed on sm90/forward.cuh for sm_90a"),
    ],
)
def test_handler_checks_again(change: str, message: str):
    """A program from elsewhere (jax.export) meets errors, not crashes."""
    q, k, v = draw(0, kv_heads=4)
    problem = Problem(dtype="bfloat16", scale=0.1)
    forward = passes(problem)["forward"]
    plan = _gpu.plan(forward, Shapes.of(q, k, v), _gpu.spec.for_lowering())
    text = plan.text
    results = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    results.append(jax.ShapeDtypeStruct((2, 4, 300), jnp.float32))
    results += plan.workspaces.values()
    match change:
        case "key":
            k = k[..., :64]
        case "workspace":
            results = results[:2]
        case "launch":
            text = text.replace("launch flash_forward 0 ", "launch flash_forward 0 0 ")
        case "kernel":
            text += "#error not this one\n"
    call = jax.ffi.ffi_call(plan.target, results)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(call(q, k, v, plan=text))


SHAPES = """
import jax, jax.numpy as jnp, jax_flash, numpy as np
shape = jax.ShapeDtypeStruct((2, 300, 4, 128), jnp.bfloat16)
q, k, v = np.random.default_rng(0).standard_normal((3, 2, 300, 4, 128)).astype(jnp.bfloat16)
def attend(q, k, v):
    return jax_flash.flash_attention(q, k, v, is_causal=True, deterministic=True)
def step(q, k, v):
    out, pull = jax.vjp(attend, q, k, v)
    return out, pull(jnp.sin(out))
"""
EXPORT = (
    SHAPES
    + """
checks = jax_flash.EXPORT_CHECKS
export = jax.export.export(jax.jit(step), platforms=["cuda"], disabled_checks=checks)
open("program", "wb").write(export(shape, shape, shape).serialize())
"""
)
CALL_EXPORTED = (
    SHAPES
    + """
program = jax.jit(jax.export.deserialize(bytearray(open("program", "rb").read())).call)
for _ in range(4):  # the first call compiles the kernels, the later ones may replay a graph
    got = program(q, k, v)
jax.tree.map(np.testing.assert_array_equal, got, jax.jit(step)(q, k, v))
"""
)
FIRST_STEP = (
    SHAPES
    + """
from jax_flash import _native
program = jax.jit(step).lower(shape, shape, shape)
files = sorted(x.name for x in _native.cache_folder().iterdir())
report = jax_flash.explain(shape, shape, shape, is_causal=True, deterministic=True)
print(len(files), report.forward.kernel.from_disk, report.backward.kernel.from_disk)
out, (dq, dk, dv) = program.compile()(q, k, v)
print(files, *(hash(np.asarray(x).tobytes()) for x in (out, dq, dk, dv)))
"""
)


def test_export_on_a_cpu_runs_here(tmp_path: Path):
    finish(start_python(EXPORT, tmp_path, JAX_PLATFORMS="cpu"))
    finish(start_python(CALL_EXPORTED, tmp_path))


def test_next_process_finds_the_kernels(tmp_path: Path):
    """Compiled when lowered: for each pass two files; JAX's own cache."""
    variables = {
        "PYTHONHASHSEED": "0",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    cold, warm = (finish(start_python(FIRST_STEP, tmp_path, **variables)) for _ in range(2))
    assert cold.splitlines()[0] == "4 False False"
    assert warm.splitlines()[0] == "4 True True"
    assert cold.splitlines()[1] == warm.splitlines()[1]


GRIDS = """
import jax, jax.numpy as jnp, numpy as np
from jax_flash import _native, flash_attention
sms = jax.local_devices()[0].core_count
T = 4 * sms * (64 if DIM > 128 else 128)  # four blocks of keys for each multiprocessor, of one head
x = np.random.default_rng(0).standard_normal((4, 1, T, 1, DIM), np.float32).astype(jnp.bfloat16)
ids = np.arange(T)[None] * 5 // T // 2 if SEGMENTS else None
def loss(q, k, v, dout):
    out = flash_attention(q, k, v, is_causal=CAUSAL, deterministic=True, backend="cuda",
                          query_segment_ids=ids, key_value_segment_ids=ids)
    return jnp.sum(out.astype(jnp.float32) * dout)
step = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
want = jax.block_until_ready(step(*x))
for blocks in (2 * sms, sms // 2, 5):
    _native.pretend_multiprocessors(blocks)
    jax.tree.map(np.testing.assert_array_equal, step(*x), want)
    print(blocks, "blocks", flush=True)
"""


@pytest.mark.parametrize(
    ("dim", "causal", "segments"),
    [(64, False, False), (128, True, False), (64, True, True), (256, False, False)],
)
def test_deterministic_gradients_on_any_grid(dim, causal, segments, tmp_path: Path):
    """Half of twice as many blocks as run at once never start before others end: none waits for
    them. No graphs, which would be replayed with the first run's grid."""
    given = f"DIM, CAUSAL, SEGMENTS = {dim}, {causal}, {segments}\n"
    flags = "--xla_gpu_enable_command_buffer="
    process = start_python(given + GRIDS, tmp_path, XLA_FLAGS=flags)
    assert finish(process).count("blocks") == 3


def test_many_processes_start_at_once(tmp_path: Path):
    """With an empty cache that all fill: the same kernels, the same bits, no unfinished file."""
    processes = [start_python(FIRST_STEP, tmp_path, PYTHONHASHSEED="0") for _ in range(4)]
    outputs = [finish(process).splitlines()[1] for process in processes]
    assert len(set(outputs)) == 1
    files = list((tmp_path / "cache").iterdir())
    assert len(files) == 4  # two of each pass
    assert all(file.suffix == ".kernel" for file in files)
