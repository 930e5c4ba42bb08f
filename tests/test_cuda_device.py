"""The CUDA run time on a GPU: streams, devices, command buffers, export, a warm second process."""

import functools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import _tiles, flash_attention, reference
from jax_flash._primitives import Forward
from jax_flash._problem import Problem, Shapes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        _tiles.present_gpu() is None or _tiles.present_gpu().arch != "sm_90a",  # pyright: ignore
        reason="needs a Hopper GPU",
    ),
]

Arrays = tuple[jax.Array, jax.Array, jax.Array]


def draw(seed: int, batch=2, q_len=300, kv_len=300, heads=4, kv_heads=2, dim=128) -> Arrays:
    shapes = [(batch, q_len, heads, dim), *[(batch, kv_len, kv_heads, dim)] * 2]
    keys = jax.random.split(jax.random.key(seed), 3)
    q, k, v = (jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True))
    return q, k, v


def attend(q, k, v, **options):
    return flash_attention(q, k, v, is_causal=True, backend="cuda", **options)


def exact(q, k, v) -> np.ndarray:
    """Causal attention in NumPy: nothing to compile for every new shape."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    scores = np.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
    hidden = np.arange(k.shape[1]) > np.arange(q.shape[1])[:, None]
    p = np.exp(np.where(hidden, -np.inf, scores))
    return np.einsum("bnts,bsnh->btnh", p / p.sum(-1, keepdims=True), v)


def assert_right(out, q, k, v) -> None:
    np.testing.assert_allclose(np.asarray(out, np.float64), exact(q, k, v), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_runs_the_kernel(dim):
    inputs = draw(0, dim=dim)
    lowered = jax.jit(attend).lower(*inputs).as_text()
    assert "jax_flash_cuda_forward" in lowered
    assert_right(jax.jit(attend)(*inputs), *inputs)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_gradients(dim):
    inputs = draw(0, dim=dim)

    def loss(attention, *arrays):
        return jnp.sum(jnp.sin(attention(*arrays).astype(jnp.float32)))

    gradient = jax.jit(jax.grad(functools.partial(loss, attend), argnums=(0, 1, 2)))
    assert "jax_flash_cuda_backward" in gradient.lower(*inputs).as_text()
    plain = functools.partial(reference.attention, is_causal=True)
    wide = [x.astype(jnp.float32) for x in inputs]
    want = jax.jit(jax.grad(functools.partial(loss, plain), argnums=(0, 1, 2)))(*wide)
    for got, right in zip(gradient(*inputs), want, strict=True):
        np.testing.assert_allclose(got.astype(jnp.float32), right, atol=3e-2, rtol=3e-2)


def test_training_step_replays():
    """As for the forward; the workspaces of the backward are reused from step to step."""

    @jax.jit
    def step(q, k, v):
        gradients = jax.grad(lambda *x: jnp.sum(attend(*x, deterministic=True) ** 2), (0, 1, 2))
        return gradients(q, k, v)

    inputs = [draw(seed) for seed in range(3)]
    first = [jax.tree.map(np.asarray, step(*arrays)) for arrays in inputs]
    for _ in range(10):
        for arrays, want in zip(inputs, first, strict=True):
            jax.tree.map(np.testing.assert_array_equal, step(*arrays), want)


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
    results = [jax.jit(attend)(*arrays) for arrays in inputs]
    for out, arrays, device in zip(results, inputs, devices, strict=True):
        assert out.devices() == {device}
        assert_right(out, *arrays)


def test_sharded_over_devices():
    devices = jax.local_devices()
    if len(devices) == 1:
        pytest.skip("one GPU")
    mesh = jax.make_mesh((len(devices),), ("data",), devices=devices)
    sharding = jax.NamedSharding(mesh, jax.P("data"))
    inputs = draw(0, batch=2 * len(devices))
    sharded = jax.device_put(inputs, sharding)
    program = jax.jit(attend).lower(*sharded).compile()
    assert "all-gather" not in str(program.as_text())
    assert_right(program(*sharded), *inputs)


def test_steps_replay_with_new_inputs():
    """A program run often is replayed from a CUDA graph: each run must read its own arrays."""

    @jax.jit
    def step(q, k, v):
        for _ in range(4):
            q = attend(q, k, v) + q
        return q

    inputs = [draw(seed) for seed in range(3)]
    first = [np.asarray(step(*arrays)) for arrays in inputs]
    for _ in range(10):
        for arrays, want in zip(inputs, first, strict=True):
            np.testing.assert_array_equal(step(*arrays), want)


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
        ("key", r"k has shape \[2, 300, 4, 64\], expected \[2, 300, 4, 128\]"),
        ("workspace", "the workspace tile_counter is missing"),
        ("tiles", "a number of `tiles` is out of range"),
        ("kernel", "failed on sm90/forward.cuh for sm_90a"),
    ],
)
def test_handler_checks_again(change: str, message: str):
    """A program from elsewhere (jax.export) meets errors, not crashes."""
    q, k, v = draw(0, kv_heads=4)
    problem = Problem(dtype="bfloat16", scale=0.1)
    gpu = _tiles.lowering_gpu()
    tiles = _tiles.choose_tiles(problem, Shapes.of(q, k, v), gpu)
    launch, header = tiles.launch(gpu), tiles.header(problem)
    results = [jax.ShapeDtypeStruct(q.shape, q.dtype)]
    results.append(jax.ShapeDtypeStruct((2, 4, 300), jnp.float32))
    results += tiles.workspaces(problem, Shapes.of(q, k, v))
    match change:
        case "key":
            k = k[..., :64]
        case "workspace":
            results = results[:2]
        case "tiles":
            launch["threads"] = 0
        case "kernel":
            header += "#error not this one\n"
    call = jax.ffi.ffi_call("jax_flash_cuda_forward", results)
    program = {"source": tiles.source, "header": header, "arch": gpu.arch}
    attributes = Forward(problem, None).attributes()
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(call(q, k, v, **attributes, program=program, tiles=launch))


def run_python(script: str, folder: Path, **variables: str) -> str:
    """Runs a script in a process of its own and returns what it prints."""
    package = str(Path(jax_flash.__file__).parent.parent)
    environment = os.environ | {
        "JAX_FLASH_CACHE_DIR": str(folder / "cache"),
        "PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")])),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        **variables,
    }
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=240,
    )
    return done.stdout


SHAPES = """
import jax, jax.numpy as jnp, jax_flash
shape = jax.ShapeDtypeStruct((2, 300, 4, 128), jnp.bfloat16)
def attend(q, k, v):
    return jax_flash.flash_attention(q, k, v, is_causal=True)
"""
EXPORT = (
    SHAPES
    + """
checks = [jax.export.DisabledSafetyCheck.custom_call("jax_flash_cuda_forward")]
export = jax.export.export(jax.jit(attend), platforms=["cuda"], disabled_checks=checks)
open("program", "wb").write(export(shape, shape, shape).serialize())
"""
)
CALL_EXPORTED = """
import jax, jax.numpy as jnp, jax_flash, numpy as np
program = jax.export.deserialize(bytearray(open("program", "rb").read()))
q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 300, 4, 128), jnp.bfloat16)
want = jax_flash.flash_attention(q, k, v, is_causal=True)
np.testing.assert_array_equal(program.call(q, k, v), want)
"""
FIRST_STEP = (
    SHAPES
    + """
from jax_flash import _native
jax.jit(attend).lower(shape, shape, shape)
print(len(list(_native.cache_folder().iterdir())))
report = jax_flash.explain(shape, shape, shape, is_causal=True).kernels["forward"]
print(report.from_disk)
"""
)


def test_export_on_a_cpu_runs_here(tmp_path: Path):
    run_python(EXPORT, tmp_path, JAX_PLATFORMS="cpu")
    run_python(CALL_EXPORTED, tmp_path)


def test_compiles_when_lowered_and_keeps_it_for_the_next_process(tmp_path: Path):
    assert run_python(FIRST_STEP, tmp_path).split() == ["1", "False"]
    assert run_python(FIRST_STEP, tmp_path).split()[1] == "True"
