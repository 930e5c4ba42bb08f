"""vmap over every subset of operands is a loop: results and gradients."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_flash

from ..cases import BOTTOM_RIGHT
from ..small import KEY, B, N, S, T, close, integers, normal, qkv

# Batching is the primitives' own, so "cpu" stands for all; "xla" joins where operands meet.
M = 3  # size of the mapped axis


def optional_operands(names: tuple[str, ...]) -> dict[str, Any]:
    """Each optional operand [M, ...], different for each element."""
    every = {
        "bias": normal(3, M, 1, N, T, S),
        "mask": jax.random.bernoulli(KEY(4), 0.7, (M, B, 1, T, S)),
        "query_seq_lengths": integers(5, (M, B), 0, T + 1),
        "key_value_seq_lengths": integers(6, (M, B), 0, S + 1),
        "query_segment_ids": integers(7, (M, B, T), 0, 2),
        "key_value_segment_ids": integers(8, (M, B, S), 0, 2),
        "query_positions": integers(11, (M, B, T), -3, S),
        "key_value_positions": integers(12, (M, B, S), -3, S),
        "sinks": normal(9, M, N),
        "dropout_key": jax.random.split(KEY(10), M),
    }
    return {name: every[name] for name in names}


MAPPED_OPERANDS = (
    ("bias",),
    ("mask",),
    ("query_seq_lengths", "key_value_seq_lengths"),
    ("query_segment_ids", "key_value_segment_ids"),
    ("query_positions", "key_value_positions"),
    ("query_positions",),
    ("sinks", "dropout_key"),
)


def subsets(names):
    return [c for size in range(1, len(names) + 1) for c in itertools.combinations(names, size)]


@functools.cache  # what is mapped makes no difference to one element's program
def step_of(names, backend, **options):
    """A function of the operands that computes out, lse and gradients, and the same under jit."""
    if "dropout_key" in names:
        options = {**options, "dropout_rate": 0.3}

    def step(operands):
        moving = {
            n: operands[n] for n in ("query", "key", "value", "bias", "sinks") if n in operands
        }
        fixed = {name: x for name, x in operands.items() if name not in moving}

        def loss(values):
            out, lse = jax_flash.flash_attention(
                **values, **fixed, **options, return_lse=True, backend=backend
            )
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(lse > -1e30, lse, 0.0) ** 2), (
                out, lse,
            )  # fmt: skip

        (_, results), gradients = jax.value_and_grad(loss, has_aux=True)(moving)
        return results, gradients

    return step, jax.jit(step)


def vmap_and_loop(names, mapped, backend, **options):
    """out, lse and gradients under vmap over `mapped`, and the same by a Python loop."""
    arrays = dict(zip(("query", "key", "value"), qkv(), strict=True))
    stacked = {
        name: jnp.stack([x * (0.5 + i) for i in range(M)]) for name, x in arrays.items()
    } | optional_operands(names)
    operands = {name: x if name in mapped else x[1] for name, x in stacked.items()}
    step, one = step_of(names, backend, **options)
    axes = {name: 0 if name in mapped else None for name in operands}
    got = jax.jit(jax.vmap(step, in_axes=(axes,)))(operands)
    rows = [
        one({name: x[i] if name in mapped else x for name, x in operands.items()}) for i in range(M)
    ]
    return got, jax.tree.map(lambda *x: jnp.stack(x), *rows)


@pytest.mark.parametrize("mapped", subsets(("query", "key", "value", "bias")), ids="-".join)
def test_vmap_over_arrays(mapped):
    close(*vmap_and_loop(("bias",), mapped, "cpu"))


@pytest.mark.parametrize("names", MAPPED_OPERANDS, ids="-".join)
def test_vmap_over_operands(names):
    for mapped in subsets(names):
        close(*vmap_and_loop(names, mapped, "cpu", is_causal=True))


@pytest.mark.parametrize("names", MAPPED_OPERANDS, ids="-".join)
def test_vmap_over_query_beside_operands_that_are_not_mapped(names):
    align = "top_left" if "query_positions" in names else BOTTOM_RIGHT
    close(*vmap_and_loop(names, ("query",), "cpu", causal_align=align, is_causal=True))


def test_vmap_over_everything_at_once(host_backend):
    names = tuple(dict.fromkeys(itertools.chain.from_iterable(MAPPED_OPERANDS)))
    close(*vmap_and_loop(names, ("query", "key", "value", *names), host_backend, softcap=3.0,
                         local_window_size=(7, 2)))  # fmt: skip


@pytest.mark.parametrize("in_axis", [1, -1])
def test_vmap_over_other_axes(in_axis):
    q, k, v = (jnp.stack([x, 2 * x]) for x in qkv())
    call = functools.partial(jax_flash.flash_attention, is_causal=True, backend="cpu")
    expected = jnp.stack([call(*(x[i] for x in (q, k, v))) for i in range(2)])
    moved = (jnp.moveaxis(x, 0, in_axis) for x in (q, k, v))
    got = jax.vmap(call, in_axes=in_axis, out_axes=in_axis)(*moved)
    close(jnp.moveaxis(got, in_axis, 0), expected)


def test_nested_vmap_with_different_subsets(host_backend):
    """The outer vmap maps query and bias, the inner key, value and mask."""
    q, k, v = qkv()
    q, k, v = jnp.stack([q, 2 * q]), jnp.stack([k, 2 * k, -k]), jnp.stack([v, 2 * v, 3 * v])
    bias = normal(3, 2, N, 1, S)
    mask = jax.random.bernoulli(KEY(4), 0.7, (3, B, 1, T, S))

    def call(q, k, v, bias, mask):
        return jax_flash.flash_attention(q, k, v, bias=bias, mask=mask, backend=host_backend)

    inner = jax.vmap(call, in_axes=(None, 0, 0, None, 0))
    got = jax.vmap(inner, in_axes=(0, None, None, 0, None))(q, k, v, bias, mask)
    rows = [[call(q[i], k[j], v[j], bias[i], mask[j]) for j in range(3)] for i in range(2)]
    close(got, jnp.array(rows))


def test_vmap_of_grad_of_an_unmapped_bias(host_backend):
    """Per-example gradients: the bias is shared, its gradient is not."""
    q, k, v = (jnp.stack([x, 2 * x, -x]) for x in qkv())
    bias = normal(3, N, T, 1)

    def gradient(q, k, v):
        return jax.grad(
            lambda bias: jnp.sum(
                jax_flash.flash_attention(q, k, v, bias=bias, backend=host_backend) ** 2
            )
        )(bias)

    got = jax.vmap(gradient)(q, k, v)
    assert got.shape == (3, N, T, 1)
    close(got, jnp.stack([gradient(q[i], k[i], v[i]) for i in range(3)]), rtol=1e-4)
