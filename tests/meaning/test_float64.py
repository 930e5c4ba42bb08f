"""float64 inputs, in x64 mode: computed in float64 throughout, on the backend "xla"."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jax_flash
from jax_flash import _backends, reference

from ..cases import Case
from ..conformance_cases import BY_NAME

WIDE = [
    dataclasses.replace(case, dtype="float64")
    for case in (
        BY_NAME["plain"], BY_NAME["peaked"], BY_NAME["mask"],
        Case("bias, softcap, sinks, window, lse", S=80, N=4, K=2, bias="1nts", softcap=3.0,
             sinks=True, window=(20, 10), align="bottom_right", with_lse=True),
        Case("lengths, segments, dropout", T=700, S=600, batch=(1,), causal=True, dropout=0.2,
             kv_lengths=(570,), segments="packed", with_lse=True),
        BY_NAME["positions extreme window"],
    )
]  # fmt: skip


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("case", WIDE, ids=lambda case: case.name.replace(" ", "-"))
def test_out_lse_and_gradients_are_float64(case):
    """Far closer to the truth than float32 could be."""
    arguments = case.draw()
    if arguments.dlse is not None:
        arguments.dlse = arguments.dlse.astype(np.float64)
    if "sinks" in arguments.arrays:
        arguments.arrays["sinks"] = arguments.arrays["sinks"].astype(np.float64)
    got, truth = arguments.run("xla"), arguments.truth()
    fields = {"query": "dq", "key": "dk", "value": "dv", "bias": "dbias", "sinks": "dsinks"}
    wanted = {f"d{name}": fields[name] for name in arguments.differentiable} | {"out": "out"}
    if case.with_lse:
        wanted["lse"] = "lse"
    assert got.keys() == wanted.keys()
    for name, field in wanted.items():
        assert got[name].dtype == np.float64, name
        np.testing.assert_allclose(
            got[name], getattr(truth, field), rtol=1e-11, atol=1e-11, err_msg=name
        )


def qkv(dtype=np.float64):
    rng = np.random.default_rng(0)
    return (rng.standard_normal((2, 12, 4, 8)).astype(dtype) for _ in range(3))


def test_other_backends_refuse_it_with_the_reason():
    with pytest.raises(NotImplementedError, match=r"CPU kernels take .* not float64"):
        jax_flash.flash_attention(*qkv(), backend="cpu")
    shape = jax.ShapeDtypeStruct((2, 12, 4, 8), "float64")
    explanation = jax_flash.explain(shape, shape, shape, gpu="H200")
    assert explanation.backend == "xla"
    for name in ("cuda", "cpu"):
        assert any("not float64" in x for x in explanation.forward.refusals[name])


def test_without_a_named_backend_it_runs():
    """Without a warning, which is of GPUs' kernels alone."""
    _backends.warn_once.cache_clear()
    out = jax.jit(jax_flash.flash_attention)(*qkv())
    assert out.dtype == np.float64
    np.testing.assert_allclose(out, reference.attention(*qkv()), rtol=1e-12)


def test_derivatives_of_every_kind():
    q, k, v = qkv()

    def ours(q):
        return jax_flash.flash_attention(q, k, v, is_causal=True, backend="xla")

    def plain(q):
        return reference.attention(q, k, v, is_causal=True)

    for got, want in (
        (jax.jvp(ours, (q,), (q,)), jax.jvp(plain, (q,), (q,))),
        (hvp(ours, q), hvp(plain, q)),
    ):
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert a.dtype == np.float64
            np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11)


def hvp(function, x):
    return jax.jvp(jax.grad(lambda x: jnp.sin(function(x)).sum()), (x,), (x,))


def test_sums_over_devices_are_float64():
    """Kv heads that devices share, and the gradient of a bias that they all read."""
    devices = jax.devices("cpu")
    if len(devices) < 4:
        pytest.skip("needs four CPU devices (XLA_FLAGS was set without them)")
    q, k, v = qkv()
    bias = np.random.default_rng(1).standard_normal((1, 4, 12, 12))
    wrt = q, k[:, :, :1], v[:, :, :1], bias

    def step(*wrt):
        def call(q, k, v, bias):
            return jax_flash.flash_attention(q, k, v, bias=bias, backend="xla")

        out, pull = jax.vjp(call, *wrt)
        return out, pull(jnp.cos(out))

    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=devices[:4])
    P = PartitionSpec
    specs = P("data", None, "model"), P("data"), P("data"), P(None, "model")
    placed = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(wrt, specs, strict=True)]
    got, want = jax.jit(step)(*placed), jax.jit(step)(*wrt)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_bias_and_sinks_of_python_numbers_meet_narrower_queries(dtype, host_backend):
    """In x64 mode Python's floats, and numpy's, are float64 arrays; the results stay narrow."""
    q, k, v = qkv(dtype)
    row = [0.5 * i for i in range(12)]

    def call(bias, sinks):
        return jax_flash.flash_attention(
            q, k, v, bias=bias, sinks=sinks, return_lse=True, backend=host_backend
        )

    want = call(np.array(row, np.float32), np.array([0.1, 0.2, 0.3, 0.4], np.float32))
    for bias, sinks in (
        (row, [0.1, 0.2, 0.3, 0.4]),
        (np.array(row), np.array([0.1, 0.2, 0.3, 0.4])),
        (jnp.array(row), jnp.array([0.1, 0.2, 0.3, 0.4])),
    ):
        got = call(bias, sinks)
        assert [x.dtype for x in got] == [dtype, jnp.float32]
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)
    shifted = call(0.25, None)
    np.testing.assert_allclose(shifted[1] - 0.25, call(None, None)[1], atol=1e-6)
    wide = jnp.array(row), jnp.array([0.1, 0.2, 0.3, 0.4])
    gradients = jax.grad(lambda *x: call(*x)[1].sum(), argnums=(0, 1))(*wide)
    assert [x.dtype for x in gradients] == [jnp.float64, jnp.float64]
    assert np.abs(gradients[0]).max() > 0
    assert np.abs(gradients[1]).max() > 0
