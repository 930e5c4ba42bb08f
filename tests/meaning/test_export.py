"""Exported programs: the same results, what may be symbolic, which process may load them."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash

from ..small import B, H, N, S, T, close, normal, qkv


@pytest.mark.parametrize("with_gradient", [False, True], ids=["forward", "vjp"])
def test_export_round_trip(with_gradient, host_backend):
    q, k, v = qkv()
    bias = normal(3, N, T, S)

    def call(q, k, v, bias):
        return jax_flash.flash_attention(
            q, k, v, bias=bias, is_causal=True, softcap=4.0, backend=host_backend
        )

    def function(*arguments):
        if not with_gradient:
            return call(*arguments)
        out, pull = jax.vjp(call, *arguments)
        return out, pull(jnp.cos(out))

    checks = jax_flash.EXPORT_CHECKS
    exported = jax.export.export(jax.jit(function), platforms=["cpu"], disabled_checks=checks)(
        q, k, v, bias
    )
    again = jax.export.deserialize(exported.serialize())
    close(again.call(q, k, v, bias), jax.jit(function)(q, k, v, bias), rtol=1e-6)


LOAD = """
import sys, jax, jax.export, numpy as np
if sys.argv[1] == "with":
    import jax_flash
exported = jax.export.deserialize(bytearray(open("program", "rb").read()))
arguments = np.load("arrays.npz")
np.testing.assert_array_equal(exported.call(*(arguments[n] for n in "qkv")), arguments["out"])
"""


def test_the_process_that_loads_an_export_imports_the_package(tmp_path):
    if jax_flash.explain(*qkv()).backend != "cpu":
        pytest.skip("the CPU kernels are not built")
    step = jax.jit(jax_flash.flash_attention)
    export = jax.export.export(step, platforms=["cpu"], disabled_checks=jax_flash.EXPORT_CHECKS)
    (tmp_path / "program").write_bytes(export(*qkv()).serialize())
    q, k, v = qkv()
    np.savez(tmp_path / "arrays.npz", q=q, k=k, v=v, out=step(q, k, v))

    def load(how):
        package = str(Path(jax_flash.__file__).parents[1])  # PYTHONPATH may be relative
        return subprocess.run(
            [sys.executable, "-c", LOAD, how], cwd=tmp_path, capture_output=True, text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": package},
        )  # fmt: skip

    without, given = load("without"), load("with")
    assert given.returncode == 0, given.stderr
    assert without.returncode != 0
    assert "jax_flash_cpu_forward" in without.stderr


def test_an_export_with_a_symbolic_head_dim_says_what_may_be_symbolic():
    (h,) = jax.export.symbolic_shape("h")
    known, unknown = (jax.ShapeDtypeStruct((B, T, N, x), jnp.float32) for x in (H, h))
    lengths = jax.ShapeDtypeStruct((B,), jnp.int32)
    attend, decode = jax.jit(jax_flash.flash_attention), jax.jit(jax_flash.decode_attention)
    for name, call, shapes in (
        ("query", attend, (unknown, unknown, known)),
        ("value", attend, (known, known, unknown)),
        ("query", decode, (unknown, unknown, known, lengths)),
        ("value_cache", decode, (known, known, unknown, lengths)),
    ):
        with pytest.raises(ValueError, match=rf"{name} has shape .*h\); expected a head dim"):
            jax.export.export(call, disabled_checks=jax_flash.EXPORT_CHECKS)(*shapes)


@pytest.mark.parametrize("symbol", ["p", "s"])
def test_an_export_of_pages_knows_their_size(symbol):
    (x,) = jax.export.symbolic_shape(symbol)
    pages, size = (x, 4) if symbol == "p" else (6, x)
    cache = jax.ShapeDtypeStruct((pages, size, N, H), jnp.float32)
    table, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((B, 3), (B,)))
    query = jax.ShapeDtypeStruct((B, 1, N, H), jnp.float32)

    @jax.jit
    def call(q, k, table, lengths):
        return jax_flash.decode_attention(q, k, k, lengths, page_table=table)

    export = jax.export.export(call, disabled_checks=jax_flash.EXPORT_CHECKS)
    if symbol == "p":
        assert export(query, cache, table, lengths).out_avals[0].shape == (B, 1, N, H)
        return
    with pytest.raises(ValueError, match=r"key_cache has shape \(6, s, .*positions of a page"):
        export(query, cache, table, lengths)


def test_an_export_says_which_sizes_of_caches_it_has_to_know():
    """Where a constraint would do, the error asks for it."""
    b, c, t, m = jax.export.symbolic_shape("b, c, t, m")
    (few,) = jax.export.symbolic_shape("few", constraints=["few <= 64"])
    integer = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    number = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)

    def decode(q_len, kv_len, backend):
        call = jax.jit(functools.partial(jax_flash.decode_attention, backend=backend))
        cache = number((2, kv_len, N, H))
        export = jax.export.export(call, disabled_checks=jax_flash.EXPORT_CHECKS)
        return export(number((2, q_len, N, H)), cache, cache, integer((2,)))

    assert decode(few, S, "xla").out_avals[0].shape == (2, few, N, H)
    with pytest.raises(ValueError, match=r"query has shape \(2, t, .*by constraints of its scope"):
        decode(t, S, "xla")
    with pytest.raises(NotImplementedError, match=r"'xla' needs known lengths; a row .* c pos"):
        decode(1, c, "xla")

    pages, starts = number((6, 4, N, H)), integer((b + 1,))
    call = jax.jit(jax_flash.ragged_paged_attention)
    with pytest.raises(ValueError, match=r"shared_pages has shape \(3,\) and page_table \(b, m\)"):
        jax.export.export(call, disabled_checks=jax_flash.EXPORT_CHECKS)(
            number((5, N, H)), pages, pages, integer((b,)), integer((b, m)), starts,
            shared_pages=integer((3,)),
        )  # fmt: skip


def test_an_export_for_another_platform_than_the_backends_names_it():
    call = jax.jit(functools.partial(jax_flash.flash_attention, backend="cpu"))
    export = jax.export.export(call, platforms=["cpu", "tpu"])
    with pytest.raises(NotImplementedError, match=r"'cpu' cannot run .* platform 'tpu'.*'xla'"):
        export(*qkv())


def test_export_with_a_symbolic_batch(host_backend):
    (b,) = jax.export.symbolic_shape("b")

    def arguments(size):
        return *qkv(batch=(size,)), jnp.full((size, T), 7) + jnp.arange(T)

    shapes = [jax.ShapeDtypeStruct((b, *x.shape[1:]), x.dtype) for x in arguments(1)]
    checks = jax_flash.EXPORT_CHECKS

    def call(q, k, v, positions):
        return jax_flash.flash_attention(
            q, k, v, is_causal=True, query_positions=positions, backend=host_backend
        )

    exported = jax.export.export(jax.jit(call), platforms=["cpu"], disabled_checks=checks)(*shapes)
    for size in (1, 5):
        close(exported.call(*arguments(size)), call(*arguments(size)), rtol=1e-6)


def test_xla_for_gpus_exports_with_a_symbolic_batch():
    """What chooses by sizes there, sums of products and marks of keys, takes them for many."""
    (b,) = jax.export.symbolic_shape("b")
    shapes = [jax.ShapeDtypeStruct((b, *x.shape[1:]), jnp.bfloat16) for x in qkv()]

    def loss(*arrays):
        out = jax_flash.flash_attention(*arrays, is_causal=True, backend="xla")
        return jnp.sum(out.astype(jnp.float32))

    jax.export.export(
        jax.jit(jax.grad(loss, argnums=(0, 1, 2))),
        platforms=["cuda"],
        disabled_checks=jax_flash.EXPORT_CHECKS,
    )(*shapes)


@pytest.mark.parametrize("window", [(3, 5), (2**40, 0)], ids=str)
def test_export_with_a_symbolic_length(window):
    (t,) = jax.export.symbolic_shape("t")
    shape = jax.ShapeDtypeStruct((2, t, N, H), jnp.float32)
    checks = jax_flash.EXPORT_CHECKS

    def export(backend):
        def call(q):
            return jax_flash.flash_attention(q, q, q, local_window_size=window, backend=backend)

        jitted = jax.jit(call)
        return jitted, jax.export.export(jitted, platforms=["cpu"], disabled_checks=checks)(shape)

    with pytest.raises(NotImplementedError, match="'xla' needs known lengths; T is t"):
        export("xla")
    if jax_flash.explain(*qkv()).backend != "cpu":
        pytest.skip("the CPU kernels are not built")
    jitted, exported = export("cpu")
    for length in (2, 40):
        x = normal(length, 2, length, N, H)
        close(exported.call(x), jitted(x), rtol=1e-6)
