"""Query heads that share keys run as one head's queries, where each has few."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import _backends, _gpu, _native
from jax_flash._gpu import folding
from jax_flash._ops import passes
from jax_flash._problem import Problem, Shapes

from ..conftest import needs_module

SHAPES = Shapes(64, 1, 2048, 40, 2, 112, 112)


def group(which: str, sizes: dict[str, Any], *, gpu: str = "H200", **of: Any) -> int:
    problem = Problem(**{"dtype": "bfloat16", "scale": 0.1, **of})
    call, shapes = passes(problem)[which], dataclasses.replace(SHAPES, **sizes)
    taken, folded = _gpu.folded(call, shapes, _gpu.spec.GPUS[gpu])
    assert taken == call or ("query_positions" in taken.problem.terms) == (folded != shapes)
    assert folded.q_heads * folded.q_len == shapes.q_heads * shapes.q_len
    return shapes.q_heads // folded.q_heads


@pytest.mark.parametrize(
    ("sizes", "forward", "backward"),
    [
        ({}, 20, 20),
        ({"kv_heads": 20}, 1, 2),  # the forward pass packs two heads itself
        ({"kv_heads": 40}, 1, 1),
        ({"q_len": 32}, 20, 20),
        ({"q_len": 64}, 1, 1),  # a head fills blocks
        ({"q_len": 16, "kv_len": 128}, 1, 1),  # the copies take as long
        ({"batch": 1}, 1, 1),  # each multiprocessor has few units as it is
    ],
)
def test_how_many(sizes: dict[str, Any], forward: int, backward: int):
    assert group("forward", sizes) == forward
    assert group("backward", sizes) == backward


def test_gradients_of_a_window_are_by_positions():
    window = {"window": (None, 0), "bottom_right": True}
    for sizes in ({"q_len": 4}, {"q_len": 4, "batch": 2, "kv_len": 92}, {"q_len": 8}):
        assert group("forward", sizes | {"head_dim": 136}, **window) == 1
        assert group("backward", sizes | {"head_dim": 136}, **window) == 20
        assert group("backward", sizes, **window) == 1
    assert group("backward", {"q_len": 9, "head_dim": 136}, **window) == 1
    assert group("backward", {"q_len": 4, "head_dim": 136}, dtype="float32", **window) == 1


def test_positions_hide_nothing():
    changes: list[dict[str, Any]] = [
        {"window": (None, 0)}, {"terms": ("sinks",)}, {"terms": ("dropout_state",)},
        {"as_written": True},
    ]  # fmt: skip
    for change in changes:
        assert group("forward", {}, **change) == 1
    lengths = ("query_lengths", "key_value_lengths")
    assert group("backward", {"q_len": 8}, terms=lengths, softcap=30.0) == 20
    assert group("forward", {}, gpu="A100") == 1


@pytest.mark.parametrize("precision", ["default", "highest"])
def test_float32(precision: str):
    """Its copies, and what they do not hold, are those of folded heads."""
    assert group("forward", {}, dtype="float32", precision=precision) == 20
    assert group("backward", {}, dtype="float32", precision=precision) == 20
    call = passes(Problem("float32", 0.1, precision=precision))["backward"]
    made = _gpu.plans(call, SHAPES, _gpu.spec.GPUS["H200"])
    assert len(made) == (2 if precision == "default" else 1)
    assert {plan.dims["N"] for plan in made} == {2}


def test_rows_come_first():
    """Their arrays need no copies."""
    shapes = Shapes(60, 2, 16, 40, 8, 200, 200)
    gpu = _gpu.spec.GPUS["H100"]
    call = passes(Problem("bfloat16", 0.1))["forward"]
    taken, sizes = _gpu.folded(call, shapes, gpu)
    assert (sizes.batch, sizes.q_heads, sizes.q_len) == (10, 40, 12)
    (made,) = _gpu.plans_of_folded(taken, sizes, gpu)
    assert made.operands == _gpu.plans(call, shapes, gpu)[0].operands


@needs_module
def test_next_pass_that_is_compiled_ahead_is_folded_in_its_way(monkeypatch: pytest.MonkeyPatch):
    """Forward heads are folded; backward rows are, whose heads are grouped still."""
    ahead, loaded = set(), set()

    def compile_ahead(source: str, header: str, arch: str) -> None:
        ahead.add((source, header, arch))

    def load_kernel(source: str, header: str, arch: str, entry: str) -> None:
        loaded.add((source, header, arch))

    monkeypatch.setattr(_gpu.spec, "present", lambda: _gpu.spec.GPUS["H100"])
    monkeypatch.setattr(_native, "compile_ahead", compile_ahead)
    monkeypatch.setattr(_native, "load_kernel", load_kernel)

    def loss(q, k, v):
        return jnp.sum(jax_flash.flash_attention(q, k, v).astype(jnp.float32))

    q = jax.ShapeDtypeStruct((1000, 3, 60, 200), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1000, 16, 5, 200), jnp.bfloat16)
    traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(q, k, k)
    traced.lower(lowering_platforms=("cuda",))
    assert "sm90/backward_wide.cuh" in {source for source, *_ in loaded}
    assert ahead < loaded  # all but the first


@needs_module
def test_kernels_run_what_xla_would_copy_the_keys_for(uncompiled):
    q = jax.ShapeDtypeStruct((66, 1, 40, 112), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((66, 2048, 2, 112), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((1, 40, 1, 2048), jnp.bfloat16)
    told = jax_flash.explain(q, k, k, bias=bias, gpu="H200")
    assert str(told).count("20 query heads that share keys are queries of one head") == 2
    call, shapes = passes(Problem("bfloat16", 0.1))["forward"], SHAPES
    for change, backend in (
        ({}, "cuda"),
        ({"kv_heads": 1, "batch": 63}, "xla"),
        ({"kv_heads": 1}, "cuda"),
    ):
        sizes = dataclasses.replace(shapes, **change)
        assert _backends.pick(call, sizes, _gpu.spec.GPUS["H200"])[0] == backend

    def loss(q, k, v, bias):
        out, lse = jax_flash.flash_attention(q, k, v, bias=bias, return_lse=True)
        return jnp.sum(out) + jnp.sum(lse)

    traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).trace(q, k, k, bias)
    lowered = traced.lower(lowering_platforms=("cuda",))
    assert [x.shape for x in jax.tree.leaves(lowered.out_info)] == [
        x.shape for x in (q, k, k, bias)
    ]
    calls = [line for line in lowered.as_text().splitlines() if "@jax_flash_cuda" in line]
    assert len(calls) == 2
    for line in calls:
        assert "tensor<66x20x2x112xbf16>" in line
        assert "tensor<1x2x20x2048xbf16>" in line


@pytest.mark.parametrize(
    ("q_len", "terms"),
    [
        (1, {"bias": (1, 1, 6, 1, 9), "mask": (2, 3, 6, 1, 9)}),
        (1, {"bias": (2, 3, 1, 1, 9), "key_value_lengths": (2, 3)}),
        (4, {}),  # a window, by positions
        (4, {"mask": (2, 3, 1, 1, 9), "query_lengths": (2, 3), "key_value_lengths": (2, 3)}),
    ],
)
def test_values_are_the_same(q_len: int, terms: dict[str, tuple[int, ...]]):
    """What folding makes of operands and results, by float64 of "xla"."""
    with jax.enable_x64(True):
        keys = iter(jax.random.split(jax.random.key(0), 9))
        q, dout = (jax.random.normal(next(keys), (2, 3, q_len, 6, 8)) for _ in range(2))
        k, v = (jax.random.normal(next(keys), (2, 3, 9, 2, 8)) for _ in range(2))
        dlse = jax.random.normal(next(keys), (2, 3, 6, q_len))
        named = {"q": q, "k": k, "v": v}
        for name, shape in terms.items():
            if name == "mask":
                named[name] = jax.random.bernoulli(next(keys), 0.6, shape)
            elif name == "bias":
                named[name] = jax.random.normal(next(keys), shape)
            else:
                most = q_len if name == "query_lengths" else 9
                named[name] = jax.random.randint(next(keys), shape, 0, most + 1, jnp.int32)
        window = {} if terms else {"window": (None, 0), "bottom_right": True}
        problem = Problem("float64", scale=0.3, terms=tuple(terms), **window)
        for which, call in passes(problem, backend="xla", with_dlse=True).items():
            shapes = call.shapes(named)
            assert folding.may_fold_heads(call, shapes)
            taken, sizes = folding.fold_heads(call, shapes)
            operands = folding.fold_operands(taken, problem, named, sizes)
            assert operands["q"].shape == (2, 3, 3 * q_len, 2, 8)
            assert taken.shapes(operands) == sizes
            wanted = jax.jit(call.blockwise)(*(named[name] for name in call.operands))
            found = jax.jit(taken.blockwise)(*operands.values())
            for name, got, want in zip(call.results, found, wanted, strict=True):
                got = folding.unfold(taken, name, got, want.shape)
                np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12, err_msg=name)
            if which == "forward":
                named |= dict(zip(call.results, wanted, strict=True)) | {"dout": dout, "dlse": dlse}


def test_terms_with_rows_of_their_own():
    own = {"bias": jnp.zeros((1, 6, 4, 9)), "mask": jnp.ones((1, 6, 1, 9), bool)}
    q, k = jnp.zeros((2, 4, 6, 8)), jnp.zeros((2, 9, 2, 8))
    for name, x in own.items():
        call = passes(Problem("bfloat16", 0.3, terms=(name,)))["forward"]
        assert not folding.may_fold_heads(call, Shapes.of(q, k, k, {name: x}))
