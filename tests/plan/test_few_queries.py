"""Forward passes of a few queries of each row run on the kernels of decoding."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_flash
from jax_flash import _backends, _gpu
from jax_flash._ops import passes
from jax_flash._problem import Problem, Shapes

from ..conftest import needs_module

H200 = _gpu.spec.GPUS["H200"]
SHAPES = Shapes(20, 1, 2048, 16, 4, 64, 64)


def is_decoded(sizes: dict[str, Any], which: str = "forward", gpu: str = "H200", **of: Any) -> bool:
    problem = Problem(**{"dtype": "bfloat16", "scale": 0.1, **of})
    call, shapes = passes(problem)[which], dataclasses.replace(SHAPES, **sizes)
    taken, folded = _gpu.folded(call, shapes, _gpu.spec.GPUS[gpu])
    assert taken.target != "decode" or folded == shapes
    return taken.target == "decode"


@pytest.mark.parametrize(
    ("sizes", "decoded"),
    [
        ({}, True),
        ({"q_len": 2}, True),
        ({"q_len": 3}, False),  # 12 queries share keys, in more units than run as clusters
        ({"q_len": 4, "batch": 16}, True),
        ({"q_len": 5, "batch": 16}, False),
        ({"q_len": 8, "kv_heads": 16}, True),
        ({"kv_len": 100}, True),
        ({"kv_len": 99}, False),
        ({"head_dim": 40}, True),
        ({"value_dim": 44}, False),
        ({"head_dim": 512, "value_dim": 512}, True),
        ({"head_dim": 512, "value_dim": 264}, False),
        ({"batch": 23}, True),
        ({"batch": 24}, False),  # one round of forward units
        ({"batch": 33}, False),
        ({"batch": 34}, True),
        ({"batch": 0}, False),
    ],
)
def test_which(sizes: dict[str, Any], decoded: bool):
    assert is_decoded(sizes) == decoded
    assert not is_decoded(sizes, "backward")
    assert not is_decoded(sizes, gpu="A100")


def test_terms_that_decoding_has():
    assert is_decoded({}, terms=("key_value_lengths", "sinks"), softcap=30.0)
    for terms in (("mask",), ("query_lengths",), ("query_segments", "key_value_segments")):
        assert not is_decoded({}, terms=terms)
    assert not is_decoded({}, as_written=True)
    with _gpu.prefer("sm90"):
        assert not is_decoded({})


def test_where_queries_stand():
    causal = {"window": (None, 0), "bottom_right": True}
    assert is_decoded({"q_len": 2}, **causal)
    assert is_decoded({"q_len": 2}, **(causal | {"window": (99, 0)}))
    assert is_decoded({}, window=(99, None), bottom_right=True)
    assert not is_decoded({}, window=(None, 0))  # sees the first key alone
    assert not is_decoded({"q_len": 2}, window=(99, None), bottom_right=True)
    assert not is_decoded({"q_len": 2}, **(causal | {"window": (None, 1)}))


@pytest.mark.parametrize("gradients", [(), ("q",)])
@pytest.mark.parametrize("precision", ["default", "high", "highest"])
def test_float32_without_gradients(precision: str, gradients: tuple[str, ...]):
    call = passes(Problem("float32", 0.1, precision=precision))["forward"]
    call = dataclasses.replace(call, gradients=gradients)
    decoded = precision != "highest" and not gradients
    assert (_gpu.few_queries.decoding(call, SHAPES, H200) is not None) == decoded
    assert _backends.pick(call, SHAPES, H200)[0] == ("cuda" if decoded else "xla")


@pytest.mark.parametrize(
    ("dtype", "sizes", "backend"),
    [
        ("bfloat16", {"batch": 1}, "cuda"),
        ("bfloat16", {"batch": 1, "kv_len": 257}, "cuda"),  # more than 2^18 multiplications
        ("bfloat16", {"batch": 1, "kv_len": 256}, "xla"),
        ("bfloat16", {"batch": 1, "kv_heads": 16, "kv_len": 1025}, "cuda"),
        ("bfloat16", {"batch": 1, "kv_heads": 16, "kv_len": 1024}, "xla"),
        ("bfloat16", {"kv_heads": 16, "kv_len": 128, "batch": 500}, "xla"),  # are read once
        ("bfloat16", {"kv_heads": 16, "kv_len": 129, "batch": 500}, "cuda"),
        ("bfloat16", {"kv_heads": 8, "kv_len": 99, "batch": 500}, "xla"),
        ("bfloat16", {"kv_heads": 16, "kv_len": 99, "q_len": 2, "batch": 500}, "cuda"),
        ("float32", {"kv_len": 1000}, "cuda"),
        ("float32", {"kv_len": 999}, "xla"),
    ],
)
def test_products_of_few_scores_come_first(dtype: str, sizes: dict[str, Any], backend: str):
    call, shapes = passes(Problem(dtype, 0.1))["forward"], dataclasses.replace(SHAPES, **sizes)
    assert _backends.pick(call, shapes, H200)[0] == backend


@needs_module
def test_explanation_says_so(uncompiled: None):
    query = jax.ShapeDtypeStruct((8, 1, 32, 128), jnp.bfloat16)
    keys = jax.ShapeDtypeStruct((8, 1024, 8, 128), jnp.bfloat16)
    made = jax_flash.explain(query, keys, keys, gpu="H200")
    text = str(made)
    assert text.count("a few queries of each row, as decoding takes them") == 1
    assert "forward: sm90/decode.cuh" in text
    assert "backward: sm90/backward.cuh" in text
    assert "lengths" not in [x.name for x in made.forward.kernel.plan.operands]
    lengths = jax.ShapeDtypeStruct((8,), jnp.int32)
    made = jax_flash.explain(query, keys, keys, key_value_seq_lengths=lengths, gpu="H200")
    assert "lengths" in [x.name for x in made.forward.kernel.plan.operands]


def test_sizes_that_an_export_leaves_open_are_not_decoded():
    call = passes(Problem("bfloat16", 0.1))["forward"]
    (batch,) = jax.export.symbolic_shape("b")
    shapes = dataclasses.replace(SHAPES, batch=batch)
    assert _gpu.few_queries.decoding(call, shapes, H200) is None
