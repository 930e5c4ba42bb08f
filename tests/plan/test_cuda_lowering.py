"""Lowers every feature for CUDA on a machine without a GPU and reads the program."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_flash
from jax_flash import EXPORT_CHECKS, _backends, _gpu, _native, flash_attention, scores
from jax_flash._gpu.emit import scalars

pytestmark = pytest.mark.skipif(
    _native.available("cuda") is not None, reason=f"{_native.available('cuda')}"
)

B, T, S, N, K, H = 2, 256, 384, 4, 2, 128


def array(*shape: int, dtype="bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


QKV = (array(B, T, N, H), array(B, S, K, H), array(B, S, K, H))
LENGTHS = {"query_seq_lengths": array(B, dtype="int32")}
KEY_LENGTHS = {"key_value_seq_lengths": array(B, dtype="int32")}
SEGMENTS = {
    "query_segment_ids": array(B, T, dtype="int32"),
    "key_value_segment_ids": array(B, S, dtype="int32"),
}
SINKS = {"sinks": array(N, dtype="float32")}


def terms(*names: str) -> str:
    """The operands behind q, k and v in the plan, and the results that follow."""
    rows = {
        "bias": "f32 *{0}.B:B {0}.N:N {0}.T:T {0}.S:S",
        "mask": "pred *{0}.B:B {0}.N:N {0}.T:T {0}.S:S",
        "sinks": "f32 *sinks.B:B N",
        "dropout_state": "u32 *B N 4",
        "score_ids": "s32 *B N 2",
    }
    dims = {"lengths": "*B", "query_segments": "*B T", "key_value_segments": "*B S"}
    told = [f"operand v bf16 *B S K {H}"]
    for name in names:
        row = rows.get(name) or f"s32 {dims[name if name in dims else 'lengths']}"
        told.append(f"operand {name} {row.format(name)}")
    return "\\0A".join([*told, ""])


# Options, and what the custom call must say.
SUPPORTED: dict[str, tuple[dict, list[str]]] = {
    "plain": ({}, [terms() + "result", "kWindowRight = false"]),
    "causal": ({"is_causal": True}, ["kWindowLeft = false", "kWindowRight = true"]),
    "bottom right": (
        {"is_causal": True, "causal_align": "bottom_right"},
        ["kBottomRight = true"],
    ),
    "window": (
        {"local_window_size": (7, 9)},
        ["kWindowLeft = true", "kWindowRight = true"],
    ),
    "softcap": ({"softcap": 30.0}, ["kSoftcap = true"]),
    "query lengths": (LENGTHS, [terms("query_lengths"), "kHasQueryLengths = true"]),
    "key lengths": (KEY_LENGTHS, [terms("key_value_lengths"), "kHasKeyValueLengths = true"]),
    "segments": (SEGMENTS, [terms("query_segments", "key_value_segments"), "kHasSegments = true"]),
    "sinks": (SINKS, [terms("sinks")]),
    "bias": ({"bias": array(N, 1, S, dtype="float32")}, [terms("bias"), "kBiasFloat32 = true"]),
    "mask": ({"mask": array(B, 1, 1, S, dtype="bool")}, [terms("mask"), "kHasMask = true"]),
    "dropout": (
        {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)},
        [terms("dropout_state"), "kHasDropout = true"],
    ),
    "function of scores": (
        {"score_mod": scores.alibi(scores.alibi_slopes(N))},
        [terms("score_ids") + "operand capture0", "kHasScoreFunction = true", "score_value"],
    ),
    "deterministic": ({"deterministic": True}, []),
    "lse": ({"return_lse": True}, []),
}


def lower(function, *arguments, **arrays) -> str:
    traced = jax.jit(function).trace(*arguments, **arrays)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def split(options: dict) -> tuple[dict, dict]:
    """Splits options into arrays to trace and values to close over."""
    arrays = {k: v for k, v in options.items() if isinstance(v, jax.ShapeDtypeStruct)}
    return arrays, {k: v for k, v in options.items() if k not in arrays}


def lower_options(options: dict) -> str:
    arrays, values = split(options)
    return lower(
        lambda q, k, v, **given: flash_attention(q, k, v, **values, **given), *QKV, **arrays
    )


def lower_gradient(options: dict) -> str:
    arrays, values = split(options)

    def loss(q, k, v, **given):
        out = flash_attention(q, k, v, **values, **given)
        return sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(out))

    return lower(jax.grad(loss, argnums=(0, 1, 2)), *QKV, **arrays)


def calls(program: str) -> list[str]:
    return re.findall(r"custom_call @(jax_flash_cuda_\w+)", program)


@pytest.mark.parametrize("name", SUPPORTED)
def test_forward_is_one_custom_call(name: str):
    options, expected = SUPPORTED[name]
    program = lower_options(options)
    assert calls(program) == ["jax_flash_cuda_forward"]
    for text in expected:
        assert text in program


@pytest.mark.parametrize("name", SUPPORTED)
def test_gradient_is_one_custom_call_more(name: str):
    options, _ = SUPPORTED[name]
    program = lower_gradient(options)
    assert calls(program) == ["jax_flash_cuda_forward", "jax_flash_cuda_backward"]
    assert ("operand dlse f32 *B N T" in program) == ("return_lse" in options)
    assert f"kHasDlse = {str('return_lse' in options).lower()}" in program
    if "deterministic" in options:
        assert "kDeterministic = true" in program
    assert f"x{T}x{S}x" not in program  # no array of the size of the scores


def test_programs_compile_beside_each_other(monkeypatch: pytest.MonkeyPatch):
    events = []

    def compile_ahead(source: str, header: str, arch: str) -> None:
        events.append(("ahead", (source, header, arch)))

    def load_kernel(source: str, header: str, arch: str, entry: str) -> None:
        events.append(("load", (source, header, arch)))

    monkeypatch.setattr(_gpu.spec, "present", lambda: _gpu.spec.GPUS["H200"])
    monkeypatch.setattr(_native, "compile_ahead", compile_ahead)
    monkeypatch.setattr(_native, "load_kernel", load_kernel)

    def loss(q, k, v, sinks):
        return flash_attention(q, k, v, sinks=sinks, is_causal=True).astype(jnp.float32).sum()

    lower(jax.grad(loss, argnums=(0, 1, 2, 3)), *QKV, *SINKS.values())
    loaded = list(dict.fromkeys(program for kind, program in events if kind == "load"))
    forward = ["sm90/forward.cuh", "sm90/forward_entries.cuh"]
    backward = ["sm90/backward.cuh", "sm90/backward_entries.cuh"]
    assert [program[0] for program in loaded] == [*forward, *backward]
    # All but the first, before that one is waited for.
    assert events[:4] == [*(("ahead", x) for x in loaded[1:]), ("load", loaded[0])]

    events.clear()
    lower(lambda q, k, v: flash_attention(q, k, v, softcap=3.0), *QKV)
    sources = list(dict.fromkeys((kind, program[0]) for kind, program in events))
    assert sources == [("ahead", forward[1]), ("load", forward[0]), ("load", forward[1])]


def test_function_that_the_compiler_refuses_runs_on_xla(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(scalars._CALLS, "atan2", "no_such_function")
    monkeypatch.setattr(_gpu.spec, "present", lambda: _gpu.spec.GPUS["H200"])
    monkeypatch.setattr(_native, "compile_ahead", lambda **_: None)
    monkeypatch.setattr(_native, "load_kernel", lambda entry, **x: _native.compile_kernel(**x))

    def function(score, batch, head, query, key):
        return score + jnp.arctan2(score, 2.75)

    said = "refused score_mod's primitive atan2 .*no_such_function.* report it with the function"
    attend = functools.partial(flash_attention, score_mod=function)
    with pytest.warns(RuntimeWarning, match=said):
        assert calls(lower(attend, *QKV)) == []
    lower(attend, *QKV)  # which warns no more
    with pytest.raises(NotImplementedError, match=said):
        lower(functools.partial(attend, backend="cuda"), *QKV)
    made = jax_flash.explain(*QKV, score_mod=function, gpu="H200")
    assert made.backend == "xla"
    assert "primitive atan2" in str(made)


def test_refused_head_dim_runs_on_xla_and_says_so_once(recwarn: pytest.WarningsRecorder):
    wide = (array(B, T, N, 640), array(B, S, K, 640), array(B, S, K, 640))
    _backends.warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="without its CUDA kernels.* up to 512, not 640"):
        assert calls(lower(flash_attention, *wide)) == []
    jax.clear_caches()
    recwarn.clear()
    lower(flash_attention, *wide)
    assert not recwarn.list


def test_gradients_that_do_not_fit_run_on_xla_and_say_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_gpu.spec, "for_lowering", lambda: _gpu.spec.GPUS["L4"])

    def loss(q, k, v):
        return jnp.sum(flash_attention(q, k, v))

    forward, backward = (f"jax_flash_cuda_sm80_{which}" for which in ("forward", "backward"))
    operands = [array(*x.shape, dtype="float32") for x in QKV]
    # By float16 copies, and what they do not hold.
    assert calls(lower(jax.grad(loss), *operands)) == [forward, forward, backward, backward]
    wide = [array(*x.shape[:-1], 512, dtype="float32") for x in QKV]
    _backends.warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="CUDA backward kernels .* KB of shared memory"):
        assert calls(lower(jax.grad(loss), *wide)) == [forward, forward]


@pytest.mark.parametrize(
    ("precision", "halves"), [(None, "false"), ("high", "false"), ("float32", "true")]
)
def test_precision_decides_into_which_parts_float32_is_split(precision, halves: str):
    operands = [array(*x.shape, dtype="float32") for x in QKV]
    program = lower(lambda q, k, v: flash_attention(q, k, v, precision=precision), *operands)
    assert f"kHalves = {halves};" in program


@pytest.mark.parametrize(
    ("dim", "options", "target"),
    [
        (64, {}, "jax_flash_cuda_forward"),
        (128, {"is_causal": True}, "jax_flash_cuda_forward"),
        (33, {"local_window_size": (5, 9)}, "jax_flash_cuda_forward"),
        (136, {}, "jax_flash_cuda_sm80_forward"),
        (64, {"softcap": 5.0}, "jax_flash_cuda_sm80_forward"),
    ],
)
def test_hopper_computes_float32_at_highest_by_wgmma_without_terms(dim, options, target: str):
    operands = [array(*x.shape[:-1], dim, dtype="float32") for x in QKV]
    attention = functools.partial(flash_attention, precision="highest", **options)
    assert calls(lower(attention, *operands)) == [target]
    program = lower(lambda *x: jax.vjp(attention, *x)[1](x[0]), *operands)
    assert calls(program) == [target, target.replace("forward", "backward")]


def test_blackwell_is_told_what_is_faster(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_gpu.spec, "for_lowering", lambda: _gpu.spec.GPUS["B200"])
    _backends.warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="'cudnn' is up to four times as fast"):
        lower(flash_attention, *[array(*x.shape[:-1], 90) for x in QKV])  # not of cuDNN


@pytest.mark.parametrize(
    "dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (40, 72), (36, 100)]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_head_dims_and_dtypes(dims: tuple[int, int], dtype: str):
    q, k, v = array(B, T, N, dims[0]), array(B, S, K, dims[0]), array(B, S, K, dims[1])
    program = lower(flash_attention, *[array(*x.shape, dtype=dtype) for x in (q, k, v)])
    assert calls(program) == ["jax_flash_cuda_forward"]
    assert f"kHeadDim = {dims[0]};" in program
    assert f"kValueDim = {dims[1]};" in program
    assert f"kBFloat16 = {str(dtype == 'bfloat16').lower()};" in program
    assert f"kTmaLoads = {str(not any(dim % 8 for dim in dims)).lower()};" in program


def test_leading_dims_are_kept():
    q, k, v = (array(3, 5, *x.shape) for x in QKV)
    program = lower(flash_attention, q, k, v)
    assert calls(program) == ["jax_flash_cuda_forward"]
    assert "stablehlo.reshape" not in program


def test_vmap_and_scan():
    q, k, v = (array(3, *x.shape) for x in QKV)
    assert calls(lower(jax.vmap(flash_attention), q, k, v)) == ["jax_flash_cuda_forward"]

    def scan(q, k, v):
        return jax.lax.scan(lambda q, kv: (flash_attention(q, *kv), None), q, (k, v))[0]

    assert calls(lower(scan, QKV[0], k, v)) == ["jax_flash_cuda_forward"]


def test_vmap_over_no_rows():
    rows = jax.ShapeDtypeStruct((0, 2, 4096, 8, 128), "bfloat16")
    lower(jax.vmap(jax.grad(lambda *x: jnp.sum(flash_attention(*x, is_causal=True)))), *[rows] * 3)


def test_vmap_over_sinks_and_batch():
    """Sinks of some batch dims and not of others reach the kernel in full."""
    q, k, v = (array(3, *x.shape) for x in QKV)

    def attend(q, k, v, sinks):
        return flash_attention(q, k, v, sinks=sinks)

    program = lower(jax.vmap(attend), q, k, v, array(3, N, dtype="float32"))
    assert calls(program) == ["jax_flash_cuda_forward"]
    assert f"tensor<3x{B}x{N}xf32>" in program


@pytest.mark.parametrize("gradient", [False, True])
def test_export(gradient: bool):
    def loss(q, k, v):
        return jnp.sum(flash_attention(q, k, v, is_causal=True).astype(jnp.float32))

    names = ["jax_flash_cuda_forward", "jax_flash_cuda_backward"]
    function = jax.grad(loss, argnums=(0, 1, 2)) if gradient else loss
    exported = jax.export.export(
        jax.jit(function), platforms=["cuda"], disabled_checks=EXPORT_CHECKS
    )(*QKV)
    again = jax.export.deserialize(exported.serialize())
    assert calls(again.mlir_module()) == names[: 1 + gradient]


def test_export_with_symbolic_shapes():
    b, t = jax.export.symbolic_shape("b, t")
    q = jax.ShapeDtypeStruct((b, t, N, H), jnp.bfloat16)
    kv = jax.ShapeDtypeStruct((b, t, K, H), jnp.bfloat16)
    exported = jax.export.export(
        jax.jit(flash_attention), platforms=["cuda"], disabled_checks=EXPORT_CHECKS
    )(q, kv, kv)
    assert calls(exported.mlir_module()) == ["jax_flash_cuda_forward"]


@pytest.mark.parametrize(
    ("batch", "length", "heads", "kv_heads", "options"),
    [
        ("b", "256", "n", "n", {}),
        ("b", "256", "2*n", "n", {}),
        ("1", "2048", "8*n", "n", {"is_causal": True}),  # units of some heads of a group
        ("1", "2048", "8*n", "n", {"is_causal": True, "deterministic": True}),
        ("1", "t", "8", "2", {"is_causal": True}),
    ],
)
def test_gradients_export_with_symbolic_heads(batch, length, heads, kv_heads, options):
    q, kv = (f"{batch}, {length}, {x}, {H}" for x in (heads, kv_heads))
    size = 256 if length == "t" else int(length)
    arguments = jax.export.symbolic_args_specs(
        tuple(jax.ShapeDtypeStruct((1, size, x, H), jnp.bfloat16) for x in (8, 2, 2)), (q, kv, kv)
    )
    names = ["jax_flash_cuda_forward", "jax_flash_cuda_backward"]
    step = jax.grad(
        lambda *x: flash_attention(*x, **options).astype(jnp.float32).sum(), argnums=(0, 1, 2)
    )
    exported = jax.export.export(jax.jit(step), platforms=["cuda"], disabled_checks=EXPORT_CHECKS)
    assert calls(exported(*arguments).mlir_module()) == names


@pytest.mark.parametrize(
    ("batch", "queries", "keys", "heads", "options"),
    [
        (2, 512, 512, "n", {}),
        (2, 512, 512, "n", {"is_causal": True}),
        (2, 512, 512, "n", {"is_causal": True, "deterministic": True}),
        ("b", 512, 512, 4, {}),
        (2, 256, "s", 4, {"bias": True}),
        (2, "t", 256, 4, {"bias": True}),
    ],
)
def test_gradients_export_where_one_size_is_symbolic(batch, queries, keys, heads, options):
    """What tilings are chosen by asks nothing of a size that is not known."""
    symbols: dict[Any, Any] = dict(
        zip("btsn", jax.export.symbolic_shape("b, t, s, n"), strict=True)
    )
    b, t, s, n = (symbols.get(x, x) for x in (batch, queries, keys, heads))
    arguments = [array(b, length, n, 64) for length in (t, s, s)]
    arguments += [array(n, t, s)] if "bias" in options else []

    def loss(q, k, v, bias=None):
        return flash_attention(q, k, v, **options | {"bias": bias}).astype(jnp.float32).sum()

    exported = jax.export.export(
        jax.jit(jax.grad(loss)), platforms=["cuda"], disabled_checks=EXPORT_CHECKS
    )
    names = ["jax_flash_cuda_forward", "jax_flash_cuda_backward"]
    assert calls(exported(*arguments).mlir_module()) == names


@pytest.mark.parametrize("name", SUPPORTED)
def test_before_hopper_the_forward_is_a_custom_call(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_gpu.spec, "for_lowering", lambda: _gpu.spec.GPUS["A100"])
    options, expected = SUPPORTED[name]
    program = lower_options(options)
    assert calls(program) == ["jax_flash_cuda_sm80_forward"]
    for text in expected:
        assert text in program


def test_before_hopper_the_backward_is_a_custom_call(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_gpu.spec, "for_lowering", lambda: _gpu.spec.GPUS["L4"])
    names = ["jax_flash_cuda_sm80_forward", "jax_flash_cuda_sm80_backward"]
    assert calls(lower_gradient({"is_causal": True})) == names


def test_before_hopper_export_with_symbolic_shapes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_gpu.spec, "for_lowering", lambda: _gpu.spec.GPUS["RTX 4090"])
    b, t, n = jax.export.symbolic_shape("b, t, n")
    q = jax.ShapeDtypeStruct((b, t, 2 * n, H), jnp.bfloat16)
    kv = jax.ShapeDtypeStruct((b, t, n, H), jnp.bfloat16)
    exported = jax.export.export(
        jax.jit(flash_attention), platforms=["cuda"], disabled_checks=EXPORT_CHECKS
    )(q, kv, kv)
    assert calls(exported.mlir_module()) == ["jax_flash_cuda_sm80_forward"]
