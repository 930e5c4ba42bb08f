"""A scale that is an array: traced, mapped and differentiated, like any other argument."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import reference

B, T, S, N, K, H = 2, 12, 20, 4, 2, 8
OPTIONS = {"is_causal": True, "causal_align": "bottom_right", "softcap": 6.0, "return_lse": True}


def qkv(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, H)
    return tuple(jax.random.normal(key, s, dtype) for key, s in zip(keys, shapes, strict=True))


def step_of(function, **options):
    """out, lse and the gradients of query, key, value, scale."""

    def step(*wrt):
        def call(q, k, v, scale):
            return function(q, k, v, scale=scale, **OPTIONS, **options)

        (out, lse), pull = jax.vjp(call, *wrt)
        return out, lse, *pull((jnp.cos(out), lse))

    return step


def close(got, want, rtol=1e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape
        b = np.asarray(b, np.float64)
        np.testing.assert_allclose(
            np.asarray(a, np.float64), b, rtol=0, atol=rtol * max(1.0, np.abs(b).max())
        )


def test_traced(host_backend):
    """One program for every scale: results and all four gradients, that of scale = 0 too."""
    traced = []

    @jax.jit
    def ours(*wrt):
        traced.append(wrt)
        return step_of(jax_flash.flash_attention, backend=host_backend)(*wrt)

    plain = jax.jit(step_of(reference.attention))
    for scale in (0.7, -0.4, 0.0, 3.0, 100.0):
        got = ours(*qkv(), jnp.float32(scale))
        # Scores of 1000, those of scale = 100, are known to 6e-5, and with them the weights.
        close(got, plain(*qkv(), jnp.float32(scale)), rtol=max(1e-5, 6e-7 * scale))
        assert got[-1].dtype == jnp.float32
        assert got[-1].shape == ()
    assert len(traced) == 1


@pytest.mark.parametrize("scale", [jnp.bfloat16(0.5), jnp.int32(3), 0.5], ids=str)
def test_kinds(scale):
    """Any real dtype, and outside of jit too."""
    want = jax_flash.flash_attention(*qkv(), scale=float(scale))
    close(jax_flash.flash_attention(*qkv(), scale=jnp.asarray(scale)), want)
    close(jax.jit(lambda s: jax_flash.flash_attention(*qkv(), scale=s))(scale), want)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_half_precision_is_rounded_once(dtype, host_backend):
    """As the same query, multiplied in float32 and rounded, with the default scale."""
    q, k, v = qkv(dtype)
    scale = jnp.float32(0.3)
    got = jax.jit(
        lambda s: jax_flash.flash_attention(q, k, v, scale=s, **OPTIONS, backend=host_backend)
    )(scale)
    scaled = (np.asarray(q, np.float64) * (0.3 * H**0.5)).astype(dtype)
    want = jax_flash.flash_attention(scaled, k, v, **OPTIONS, backend=host_backend)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
    close(got, want, rtol=float(jnp.finfo(dtype).eps))


def test_default_scale_as_an_array_changes_no_bit_of_half_precision(host_backend):
    q, k, v = qkv(jnp.bfloat16)
    got = jax_flash.flash_attention(
        q, k, v, scale=jnp.float32(H**-0.5), **OPTIONS, backend=host_backend
    )
    want = jax_flash.flash_attention(q, k, v, **OPTIONS, backend=host_backend)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_float16_keeps_its_range(host_backend):
    """Queries of 3e4 at a scale of 1e-5: alone, their product would be denormal or worse."""
    q, k, v = qkv(jnp.float16)
    q = (q * 1e4).astype(jnp.float16)

    def call(scale):
        return jax_flash.flash_attention(q, k, v, scale=scale, backend=host_backend)

    close(jax.jit(call)(jnp.float32(1e-5)), call(1e-5), rtol=2e-3)


def test_vmap_over_scale(host_backend):
    q, k, v = qkv()
    scales = jnp.array([0.1, 0.0, -0.5])
    ours = step_of(jax_flash.flash_attention, backend=host_backend)
    got = jax.jit(jax.vmap(ours, (None, None, None, 0)))(q, k, v, scales)
    plain = jax.jit(step_of(reference.attention))
    want = [plain(q, k, v, scale) for scale in scales]
    close(got, jax.tree.map(lambda *x: jnp.stack(x), *want))


def test_derivatives_to_any_order(host_backend):
    q, k, v = qkv()

    def ours(s):
        out = jax_flash.flash_attention(q, k, v, scale=s, is_causal=True, backend=host_backend)
        return jnp.sin(out).sum()

    def plain(s):
        return jnp.sin(reference.attention(q, k, v, scale=s, is_causal=True)).sum()

    for derive, rtol in ((jax.jacfwd, 1e-5), (jax.hessian, 1e-4)):
        s = jnp.float32(0.6)
        close(jax.jit(derive(ours))(s), jax.jit(derive(plain))(s), rtol)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_padding_does_not_reach_the_gradient(bad, host_backend):
    q, k, v = qkv()
    lengths = {"query_seq_lengths": np.array([T - 3, T]), "backend": host_backend}

    @jax.jit
    def step(q, s):
        def call(q, s):
            return jax_flash.flash_attention(q, k, v, scale=s, **lengths)

        out, pull = jax.vjp(call, q, s)
        return out, *pull(out)

    s = jnp.float32(0.6)
    want = step(q.at[0, T - 3 :].set(0.0), s)
    got = step(q.at[0, T - 3 :].set(bad), s)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    out, _, ds = step(q.at[1, 0].set(bad), s)  # that is no padding
    assert not np.isfinite(out[1, 0]).any()
    assert not np.isfinite(ds)


def test_beside_other_shardings():
    """In shard_map a scale that is the same everywhere has the sum of all devices' gradients."""
    devices = jax.devices("cpu")
    if len(devices) < 2:
        pytest.skip("needs two CPU devices (XLA_FLAGS was set without them)")
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("data",), auto, devices=devices[:2])
    P = jax.sharding.PartitionSpec

    def loss(q, k, v, s):
        return jnp.sin(jax_flash.flash_attention(q, k, v, scale=s)).sum()

    def local(q, k, v, s):
        return jax.grad(lambda s: jax.lax.psum(loss(q, k, v, s), "data"))(s)

    sharded = jax.shard_map(
        local, mesh=mesh, in_specs=(P("data"), P("data"), P("data"), P()), out_specs=P()
    )
    s = jnp.float32(0.6)
    close(jax.jit(sharded)(*qkv(), s), jax.grad(loss, argnums=3)(*qkv(), s))


@pytest.mark.parametrize("scale", [np.float32(0.3), np.float64(0.3), np.array(0.3), 0.3])
def test_numbers_are_part_of_the_program(scale):
    q, k, v = qkv()
    program = jax.make_jaxpr(lambda q: jax_flash.flash_attention(q, k, v, scale=scale))(q)
    assert " mul " not in str(program)
    assert f"scale={float(scale)}" in str(program)
