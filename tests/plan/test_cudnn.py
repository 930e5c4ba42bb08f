"""Backend "cudnn": which calls it takes, what it asks of XLA, and what a program has beside."""

import dataclasses
import json
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_flash
from jax_flash import _backends, _cudnn, _gpu
from jax_flash._ops import passes
from jax_flash._ops.decode import Decode
from jax_flash._problem import Problem, Shapes

from ..conftest import needs_module

B200, H200, A100 = (_gpu.spec.GPUS[name] for name in ("B200", "H200", "A100"))
PLAIN = Problem("bfloat16", 0.1)
SHAPES = Shapes(2, 512, 512, 8, 2, 128, 128)
Q = jax.ShapeDtypeStruct((2, 512, 8, 128), jnp.bfloat16)
KV = jax.ShapeDtypeStruct((2, 512, 2, 128), jnp.bfloat16)


def loss(q, k, v, **options):
    return jax_flash.flash_attention(q, k, v, **options).astype(jnp.float32).sum()


def lower(function, *arguments) -> str:
    traced = jax.jit(function).trace(*arguments)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.fixture
def on_b200(monkeypatch: pytest.MonkeyPatch):
    """Lowers for a B200, and makes a warning of what runs there an error."""
    monkeypatch.setattr(_gpu.spec, "for_lowering", lambda: B200)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize(
    ("changes", "sizes", "reason"),
    [
        ({}, {}, ""),
        ({"dtype": "float16", "window": (None, 0)}, {"q_len": 300}, ""),
        ({"window": (63, 0), "bottom_right": True}, {}, ""),
        ({"dtype": "float32"}, {}, "not float32"),
        ({"terms": ("mask", "sinks")}, {}, "functions: mask, sinks"),
        ({"terms": ("query_lengths",)}, {}, "query_lengths"),
        ({"softcap": 30.0}, {}, "softcap"),
        ({"dropout_rate": 0.1, "terms": ("dropout_state",)}, {}, "dropout_state"),
        ({"deterministic": True}, {}, "same bits"),
        ({"scale": -0.1}, {}, "scale above 0"),
        ({"window": (7, 9)}, {}, "no window"),
        ({"window": (7, None)}, {}, "no window"),
        ({"window": (None, 0), "bottom_right": True}, {"q_len": 300}, "top left"),
        ({"window": (7, 0)}, {"kv_len": 300}, "as many keys"),
        ({}, {"kv_len": 1}, "two queries and keys"),
        ({}, {"batch": 1 << 12}, r"2\^31"),
        ({}, {"value_dim": 64}, "value dim"),
        ({}, {"head_dim": 100, "value_dim": 100}, "8 divides"),
        ({}, {"head_dim": 256, "value_dim": 256}, "up to 128 on B200"),
    ],
)
def test_takes_what_means_the_same(changes: dict[str, Any], sizes: dict[str, Any], reason: str):
    """The rest runs on our kernels, and is refused by name where "cudnn" is named."""
    shapes = dataclasses.replace(SHAPES, **sizes)
    for call in passes(dataclasses.replace(PLAIN, **changes)).values():
        named = dataclasses.replace(call, backend="cudnn")
        name, refusals = _backends.pick(call, shapes, B200)
        assert (name == "cudnn") == (not reason)
        if not reason:
            assert "cudnn" not in refusals
            assert _backends.pick(named, shapes, B200)[0] == "cudnn"
            continue
        with pytest.raises(NotImplementedError, match=f"backend 'cudnn' cannot.*{reason}"):
            _backends.pick(named, shapes, B200)


def test_runs_where_it_is_faster():
    call, named = (passes(PLAIN, backend)["forward"] for backend in (None, "cudnn"))
    for gpu, faster in ((B200, True), (H200, False), (A100, False), (None, False)):
        assert (_backends.pick(call, SHAPES, gpu)[0] == "cudnn") == faster
        if gpu is not None:
            assert _backends.pick(named, SHAPES, gpu)[0] == "cudnn"
    short = dataclasses.replace(SHAPES, q_len=64)
    assert _backends.pick(call, short, B200)[0] != "cudnn"
    assert _backends.pick(named, short, B200)[0] == "cudnn"
    wide = dataclasses.replace(SHAPES, head_dim=256, value_dim=256)
    assert _backends.pick(named, wide, H200)[0] == "cudnn"
    of_lse = passes(PLAIN, with_dlse=True)["backward"]
    assert "gradient of lse" in str(_backends.pick(of_lse, SHAPES, B200)[1]["cudnn"])
    assert "decode_attention" in str(_cudnn.decline(Decode(PLAIN, None), SHAPES, B200))


def test_an_old_or_missing_cudnn_is_named(monkeypatch: pytest.MonkeyPatch):
    assert _cudnn.absent(None) == ("no CUDA device is present",)
    assert _cudnn.absent(B200) == ()  # of another machine
    monkeypatch.setattr(_gpu.spec, "present", lambda: B200)
    for version, said in ((None, "not installed"), (90800, "9.11 or later is needed, not 9.8")):
        monkeypatch.setattr(_cudnn, "version", lambda version=version: version)
        assert said in str(_cudnn.absent(B200))
        assert _backends.pick(passes(PLAIN)["forward"], SHAPES, B200)[0] != "cudnn"
    monkeypatch.setattr(_cudnn, "version", lambda: 92800)
    assert _cudnn.absent(B200) == ()


@needs_module
def test_explain_says_who_runs(uncompiled):
    said = jax_flash.explain(Q, KV, KV, is_causal=True, gpu="B200")
    assert said.forward.backend == said.backward.backend == "cudnn"
    assert said.forward.kernel is None
    said = jax_flash.explain(Q, KV, KV, softcap=30.0, gpu="B200")
    assert said.backend == "cuda"
    assert "not cudnn: cuDNN is asked for no optional arrays" in repr(said)
    assert "cudnn" not in repr(jax_flash.explain(Q, KV, KV, is_causal=True, gpu="H200"))
    named = jax_flash.explain(Q, KV, KV, backend="cudnn", gpu="H200")
    assert named.backward.backend == "cudnn"


def calls(program: str) -> dict[str, tuple[Any, ...]]:
    """What a program's calls of cuDNN say: by target, what XLA reads of them, layouts and types."""
    found = {}
    for line in program.splitlines():
        if "__cudnn$" not in line:
            continue
        (text,) = re.findall(r'backend_config = "((?:[^"\\]|\\.)*)"', line)
        (target,) = re.findall(r"__cudnn\$\w+", line)
        config = json.loads(re.sub(r"\\([0-9A-F]{2})", lambda x: chr(int(x[1], 16)), text))
        layouts = re.findall(r"(?:operand|result)_layouts = \[.*?\]", line)
        found[target] = (config, sorted(layouts), line.split(" : ")[-1])
    return found


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"is_causal": True, "local_window_size": (63, 0)}], ids=str
)
def test_asks_what_jax_nn_asks(on_b200, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]):
    from jax._src.cudnn import fused_attention_stablehlo as theirs

    monkeypatch.setattr(theirs, "check_cudnn_version", lambda: 92800)
    monkeypatch.setattr(theirs, "check_compute_capability", lambda _: True)

    def of_jax(q, k, v):
        out = jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **options)
        return out.astype(jnp.float32).sum()

    expected = calls(lower(jax.grad(of_jax, argnums=(0, 1, 2)), Q, KV, KV))
    ours = lower(jax.grad(lambda *x: loss(*x, **options), argnums=(0, 1, 2)), Q, KV, KV)
    assert calls(ours) == expected
    assert [*expected] == [*_cudnn.TARGETS.values()]


@needs_module
def test_what_causality_hides_stays_hidden(on_b200):
    """Where cuDNN's results are not finite, ours are computed; a full call hides nothing."""
    gradient = jax.grad(lambda *x: loss(*x, is_causal=True), argnums=(0, 1, 2))
    program = lower(gradient, Q, KV, KV)
    assert program.count("stablehlo.is_finite") == 1 + 3
    assert program.count("stablehlo.case") == 2
    targets = re.findall(r"custom_call @(jax_flash_cuda_\w+)", program)
    assert targets == ["jax_flash_cuda_sm80_forward", "jax_flash_cuda_sm80_backward"]
    program = lower(jax.grad(loss, argnums=(0, 1, 2)), Q, KV, KV)
    assert "jax_flash_cuda" not in program
    assert "is_finite" not in program


@needs_module
def test_is_mapped_split_and_exported_as_other_backends_are(on_b200):
    function = jax.jit(jax.vmap(lambda q, k: loss(q, k, k, is_causal=True), in_axes=(0, None)))
    members = jax.ShapeDtypeStruct((3, *Q.shape), Q.dtype)
    exported = jax.export.export(
        function, platforms=["cuda"], disabled_checks=jax_flash.EXPORT_CHECKS
    )(members, KV)
    ((config, _, _),) = calls(exported.mlir_module()).values()
    sizes = config["cudnn_fmha_backend_config"]["intermediate_tensor_shape"]["dimensions"]
    assert sizes == ["2", "24", "512", "512"]  # members that share keys are heads

    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    split = jax.shard_map(
        jax.grad(lambda *x: loss(*x, is_causal=True)), mesh=mesh, in_specs=spec, out_specs=spec
    )
    assert [*calls(lower(split, Q, KV, KV))] == [*_cudnn.TARGETS.values()]
