"""Products of float32: what `precision` and jax_default_matmul_precision ask of each backend."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jax_flash import decode_attention, flash_attention

Q = jax.ShapeDtypeStruct((1, 8, 2, 4), "float32")
DEFAULT, HIGH, HIGHEST = {"DEFAULT"}, {"HIGH"}, {"HIGHEST"}


def asked(dtype="float32", **options) -> set[str]:
    """The precisions that XLA reads in the program of the gradients by backend "xla"."""

    def total(q, k, v):
        return flash_attention(q, k, v, backend="xla", **options).astype(jnp.float32).sum()

    q = jax.ShapeDtypeStruct(Q.shape, dtype)
    program = jax.jit(jax.grad(total, (0, 1, 2))).lower(q, q, q).as_text()
    products = re.findall(r"stablehlo\.dot_general .*", program)
    assert products
    found = [re.search(r"precision = \[(\w+), (\w+)\]", line) for line in products]
    return {name for match in found if match for name in match.groups()} or DEFAULT


@pytest.mark.parametrize(
    ("precision", "want"),
    [
        (None, DEFAULT),
        ("default", DEFAULT),
        (lax.Precision.HIGH, HIGH),
        ("tensorfloat32", HIGH),
        ("highest", HIGHEST),
        ("float32", HIGHEST),
    ],
    ids=str,
)
def test_xla_multiplies_as_asked(precision, want):
    assert asked(precision=precision) == want


@pytest.mark.parametrize(
    ("configured", "want"),
    [("high", HIGH), ("float32", HIGHEST), ("BF16_BF16_F32_X6", HIGHEST), ("F16_F16_F32", DEFAULT)],
)
def test_configured_precision_counts_where_none_is_given(configured, want):
    with jax.default_matmul_precision(configured):
        assert asked() == want
        assert asked(precision="default") == DEFAULT


def test_only_float32_has_a_precision():
    assert asked("bfloat16", precision="highest") == DEFAULT


@pytest.mark.parametrize(("precision", "want"), [(None, "DEFAULT"), ("float32", "HIGHEST")])
def test_decoding_multiplies_as_asked(precision, want):
    cache = jax.ShapeDtypeStruct((1, 16, 2, 4), "float32")
    lengths = jax.ShapeDtypeStruct((1,), "int32")
    step = functools.partial(decode_attention, backend="xla", precision=precision)
    program = jax.jit(step).lower(Q, cache, cache, lengths).as_text()
    found = re.findall(r"stablehlo\.dot_general .*precision = \[(\w+), (\w+)\]", program)
    assert set(found) == {(want, want)}


@pytest.mark.parametrize("precision", ["exact", "TF32_TF32_F32_X3", 3, ("highest", "highest")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_precisions_are_refused(precision, dtype):
    q = jnp.zeros(Q.shape, dtype)
    with pytest.raises(ValueError, match=r"precision is .*; expected None or one of jax\.lax"):
        flash_attention(q, q, q, precision=precision)


@pytest.mark.parametrize("flavour", ["linen", "nnx"])
def test_flax_layers_pass_theirs_on(flavour):
    module = pytest.importorskip(f"jax_flash.layers.{flavour}")
    attend = functools.partial(module.attention_fn, backend="xla", precision="high")
    program = jax.jit(attend).lower(Q, Q, Q).as_text()
    assert "precision = [HIGH, HIGH]" in program
