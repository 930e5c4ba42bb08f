"""`jax_flash.explain`: what would run and why, on a machine without a GPU too."""

import dataclasses
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import _explain, _gpu
from jax_flash._gpu.spec import GPUS
from jax_flash._ops import passes
from jax_flash._problem import Problem, Shapes

from ..conftest import needs_module

pytestmark = pytest.mark.quick


Q = jax.ShapeDtypeStruct((2, 512, 8, 128), jnp.bfloat16)
KV = jax.ShapeDtypeStruct((2, 512, 2, 128), jnp.bfloat16)


@needs_module
def test_names_backend_kernel_tiles_and_resources():
    explanation = jax_flash.explain(Q, KV, KV, is_causal=True, gpu="H200")
    assert explanation.backend == "cuda"
    assert explanation.shapes.kv_heads == 2
    forward, backward = explanation.forward.kernel, explanation.backward.kernel
    assert forward is not None
    assert backward is not None
    assert {entry.name for entry in forward.entries} >= {"flash_forward"}
    assert {entry.name for entry in backward.entries} >= {"flash_backward"}
    text = str(explanation)
    assert "backend: cuda on H200 (sm_90a)" in text
    assert "causal" in text
    assert f"block_kv {forward.plan.tiling.block_kv}" in text
    for kernel in (forward, backward):
        for entry in kernel.entries:
            launched = entry.name in kernel.plan.entries + kernel.plan.beside_entries
            assert (f"{entry.name}: {entry.registers} registers" in text) == launched, entry.name
    assert "mask_plan" not in text


@needs_module
@pytest.mark.parametrize("size", ["T", "S", "N"])
def test_says_that_nothing_is_computed(size: str):
    sizes = {"T": 512, "S": 512, "N": 8} | {size: 0}
    q = jax.ShapeDtypeStruct((2, sizes["T"], sizes["N"], 128), jnp.bfloat16)
    kv = jax.ShapeDtypeStruct((2, sizes["S"], sizes["N"], 128), jnp.bfloat16)
    explanation = jax_flash.explain(q, kv, kv, is_causal=True, gpu="H200")
    assert explanation.forward.kernel is explanation.backward.kernel is None
    assert "nothing to compute" in str(explanation)


def test_names_what_is_wrong():
    with pytest.raises(ValueError, match="backend is 'tpu'"):
        jax_flash.explain(Q, KV, KV, backend="tpu")
    for gpu in ("h200", ["H200"]):
        with pytest.raises(ValueError, match="gpu must be one of"):
            jax_flash.explain(Q, KV, KV, gpu=gpu)


@needs_module
@pytest.mark.parametrize("head_dim", [96, 100])
def test_says_who_loads_the_rows(head_dim, uncompiled):
    q = jax.ShapeDtypeStruct((2, 512, 8, head_dim), jnp.bfloat16)
    explanation = jax_flash.explain(q, q, q, gpu="H200")
    assert explanation.backend == "cuda"
    assert str(explanation).count("rows loaded by warps") == (1 if head_dim % 8 else 0)


@needs_module
@pytest.mark.parametrize(
    ("gpu", "dtype", "head_dim", "precision", "kilobytes"),
    [
        ("L4", "float32", 512, None, 131),
        ("RTX 4090", "float32", 512, "highest", 131),
    ],
)
def test_says_why_only_the_backward_pass_is_not_cuda(
    gpu, dtype, head_dim, precision, kilobytes, uncompiled
):
    q = jax.ShapeDtypeStruct((2, 512, 8, head_dim), dtype)
    explanation = jax_flash.explain(q, q, q, gpu=gpu, precision=precision)
    assert (explanation.backend, explanation.backward.backend) == ("cuda", "xla")
    (given,) = explanation.backward.refusals["cuda"]
    assert given.startswith(f"the CUDA backward kernels take {kilobytes} KB of shared memory")
    assert f"not cuda: {given}" in str(explanation)
    assert explanation.backward.kernel is None
    assert "tilings were never measured" in str(explanation)


@needs_module
@pytest.mark.parametrize(
    ("gpu", "dtype", "head_dim", "precision"),
    [
        ("H200", "float32", 512, "highest"),
        ("A100", "float32", 512, "highest"),
        ("A100", "float32", 512, None),
        ("L4", "float32", 256, None),
        ("L4", "bfloat16", 512, None),
    ],
)
def test_float32_and_wide_dims_run_where_they_fit(gpu, dtype, head_dim, precision, uncompiled):
    q = jax.ShapeDtypeStruct((2, 512, 8, head_dim), dtype)
    explanation = jax_flash.explain(q, q, q, gpu=gpu, precision=precision)
    assert (explanation.backend, explanation.backward.backend) == ("cuda", "cuda")


@needs_module
def test_says_why_not_cuda():
    q = jax.ShapeDtypeStruct((2, 512, 8, 640), jnp.bfloat16)
    explanation = jax_flash.explain(q, q, q, gpu="H200")
    assert explanation.backend == "xla"
    (given,) = explanation.forward.refusals["cuda"]
    assert given == "the CUDA forward kernels take head dims up to 512, not 640"


@needs_module
@pytest.mark.parametrize("gpu", ["B200", "GB200", "H200", "A100"])
def test_says_what_is_faster_on_blackwell(gpu, uncompiled):
    noted = "up to four times as fast" in str(jax_flash.explain(Q, KV, KV, softcap=9.0, gpu=gpu))
    assert noted == (gpu in ("B200", "GB200"))


@needs_module
def test_says_why_a_kernel_was_not_compiled(uncompiled):
    explanation = jax_flash.explain(Q, KV, KV, gpu="H200")
    assert "not compiled: libnvrtc was not found" in str(explanation)


def test_a_scale_that_is_an_array_is_one_by_its_shape_too(uncompiled):
    scale = jax.ShapeDtypeStruct((), jnp.float32)
    of_shape = jax_flash.explain(Q, KV, KV, scale=scale, gpu="H200")
    of_array = jax_flash.explain(Q, KV, KV, scale=jnp.float32(0.3), gpu="H200")
    assert of_shape.problem == of_array.problem
    assert of_shape.problem.scale == pytest.approx(128**-0.5)  # the array multiplies the query
    assert jax_flash.explain(Q, KV, KV, scale=np.float32(0.25), gpu="H200").problem.scale == 0.25
    with pytest.raises(
        TypeError, match=r"scale is .*\(2,\).*; expected a number, or an array of one"
    ):
        jax_flash.explain(Q, KV, KV, scale=jax.ShapeDtypeStruct((2,), jnp.float32), gpu="H200")


def test_takes_arrays_and_checks_them_like_the_call():
    q = jnp.ones((1, 8, 4, 16))
    explanation = jax_flash.explain(q, q, q, softcap=20.0, deterministic=True)
    assert explanation.problem.dtype == "float32"
    assert "softcap 20, deterministic" in str(explanation)
    scalars = {"scale": 1 / np.sqrt(64), "is_causal": np.True_, "softcap": np.float32(3),
               "local_window_size": np.int64(3), "dropout_rate": np.float64(0.1),
               "dropout_key": jax.random.key(0)}  # fmt: skip
    assert "scale 0.125, causal, window (3, 0), softcap 3, dropout 0.1" in str(
        jax_flash.explain(q, q, q, **scalars)
    )
    with pytest.raises(TypeError, match="return_lse is 'x'"):
        jax_flash.explain(q, q, q, return_lse="x")
    with pytest.raises(ValueError, match="softcap is -1"):
        jax_flash.explain(q, q, q, softcap=-1.0)
    with pytest.raises(TypeError, match="colour"):
        jax_flash.explain(q, q, q, colour="red")
    with pytest.raises(ValueError, match="gpu must be one of A100, A10, "):
        jax_flash.explain(q, q, q, gpu="abacus")


@needs_module
@pytest.mark.parametrize("gpu", [name for name, x in GPUS.items() if x.arch != "sm_90a"])
def test_other_gpus_have_kernels_of_mma_sync(gpu, uncompiled):
    explanation = jax_flash.explain(Q, KV, KV, gpu=gpu, backend="cuda")
    text = str(explanation)
    assert "sm80/forward.cuh" in text
    assert "sm80/backward.cuh" in text
    assert text.count("tilings were never measured") == 2


@needs_module
def test_gpus_before_ampere_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(GPUS, "T4", dataclasses.replace(GPUS["A100"], name="T4", arch="sm_75"))
    explanation = jax_flash.explain(Q, KV, KV, gpu="T4")
    assert explanation.backend == explanation.backward.backend == "xla"
    text = str(explanation)
    assert "sm_80 and later, which have cp.async, bfloat16" in text
    assert "T4 is sm_75" in text


def test_lists_all_reasons_of_all_backends():
    q = jax.ShapeDtypeStruct((2, 512, 8, 640), jnp.float32)
    text = str(jax_flash.explain(q, q, q, gpu="A100"))
    for which in ("forward", "backward"):
        assert f"the CUDA {which} kernels take head dims up to 512, not 640\n" in text
    assert "not cpu: the arrays are on platform 'cuda'" in text
    with pytest.raises(NotImplementedError, match=r"up to 512, not 640"):
        jax_flash.explain(q, q, q, gpu="H200", backend="cuda")


@needs_module
def test_says_which_gpus_were_measured(uncompiled):
    assert "never" not in str(jax_flash.explain(Q, KV, KV, gpu="H200"))
    text = str(jax_flash.explain(Q, KV, KV, gpu="NVIDIA H20"))
    assert text.count("tilings were measured on H200, never on H20") == 2


def test_options_are_those_of_the_call():
    call = inspect.signature(jax_flash.flash_attention).parameters.values()
    keywords = [x.name for x in call if x.kind is inspect.Parameter.KEYWORD_ONLY]
    assert sorted(_explain.ExplainOptions.__annotations__) == sorted(keywords)
    assert isinstance(jax_flash.explain(Q, KV, KV), jax_flash.Explanation)


LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized
ptxas info    : (C7519) warpgroup.arrive is injected in around line 3389
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for first
    16 bytes stack frame, 24 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 16 bytes cumulative stack size, 1024 bytes smem
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Function properties for second
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers
"""


def test_reads_the_compiler_log():
    first, second = _explain.read_entries(LOG)
    assert first == _explain.EntryReport("first", 168, 1024, 16, 32)
    assert second == _explain.EntryReport("second", 32, 0, 0, 0)
    warnings = _explain.read_warnings(LOG)
    assert [warning.split()[3] for warning in warnings] == ["(C7510)", "(C7515)"]


def test_each_kernel_that_is_launched_has_its_own_memory():
    """The main kernel of this backward pass is not the first that is launched."""
    problem = Problem(dtype="bfloat16", scale=0.1)
    shapes = Shapes(2, 512, 512, 8, 8, 128, 128)
    plan = _gpu.plan(passes(problem)["backward"], shapes, GPUS["A100"])
    names = (*plan.entries, *plan.beside_entries, "of_another_call")
    entries = tuple(_explain.EntryReport(name, 1, 1024, 0, 0) for name in names)
    report = _explain.KernelReport(plan, entries, (), 0.0, True)
    lines = _explain._describe_kernel("backward", report)
    shared = dict(re.findall(r"(\w+): 1 registers, ([\d.]+) KB", "\n".join(lines)))
    assert shared.pop("flash_backward_sm80") == f"{plan.shared_bytes / 1024 + 1:.1f}"
    assert set(shared) == {"flash_backward_prepare", "flash_backward_finish"}
    assert shared["flash_backward_prepare"] == "1.0"
