"""JAX's transformations but vmap: derivatives of any order, scan, remat, control flow, donation.

vmap has test_vmap.py, jax.export test_export.py.
"""

from __future__ import annotations

import concurrent.futures
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import reference

from ..small import B, H, N, T, close, loss_of, normal, ours_and_reference, qkv, small_arguments

# ---- derivatives -------------------------------------------------------------------------------


@pytest.fixture
def both(host_backend):
    return ours_and_reference(host_backend)


def test_jacrev(both):
    arguments = small_arguments()
    got, expected = (jax.jit(jax.jacrev(f, argnums=(0, 1, 2, 3)))(*arguments) for f in both)
    close(got, expected)


def test_grad_of_grad(both):
    arguments = small_arguments()

    def curvature(attention):
        def first(*arguments):
            gradients = jax.grad(loss_of(attention), argnums=(0, 1, 2, 3))(*arguments)
            return sum(jnp.sum(jnp.cos(x)) for x in gradients)

        return jax.jit(jax.grad(first, argnums=(0, 1, 2, 3)))(*arguments)

    close(curvature(both[0]), curvature(both[1]), rtol=2e-5)


def test_forward_over_reverse_hvp(both):
    arguments = small_arguments()
    tangents = tuple(normal(20 + i, *x.shape) for i, x in enumerate(arguments))

    def hvp(attention):
        gradient = jax.grad(loss_of(attention), argnums=(0, 1, 2, 3))
        return jax.jit(lambda a, t: jax.jvp(gradient, a, t))(arguments, tangents)

    close(hvp(both[0]), hvp(both[1]), rtol=2e-5)


def test_jvp_and_jacfwd(both):
    arguments = small_arguments()
    tangents = tuple(normal(20 + i, *x.shape) for i, x in enumerate(arguments))
    got, expected = (jax.jit(lambda a, t, f=f: jax.jvp(f, a, t))(arguments, tangents) for f in both)
    close(got, expected)
    one = [jax.jacfwd(f, argnums=1)(*(x[:, :2, :] if i < 3 else x[..., :2, :2]
           for i, x in enumerate(arguments))) for f in both]  # fmt: skip
    close(*one)


def test_hessian_of_lse(host_backend):
    q, k, v = (x[:1, :3, :2, :3] for x in qkv())

    def ours(q):
        return jax_flash.flash_attention(
            q, k, v, return_lse=True, backend=host_backend
        )[1].sum()  # fmt: skip

    def theirs(q):
        return reference.attention(q, k, v, return_lse=True)[1].sum()

    close(*(jax.jit(jax.hessian(f))(q) for f in (ours, theirs)), rtol=2e-5)


def test_unused_outputs_have_zero_gradients(host_backend):
    """Only lse used: no gradient to value. Only some arguments differentiated: no others needed."""
    q, k, v = qkv()

    def lse(q, k, v):
        return jax_flash.flash_attention(
            q, k, v, return_lse=True, backend=host_backend
        )[1].sum()  # fmt: skip

    dq, dv = jax.grad(lse, argnums=(0, 2))(q, k, v)
    assert (np.asarray(dv) == 0).all()
    assert (np.asarray(dq) != 0).any()


def test_integer_operands_have_float0_gradients(host_backend):
    """Lengths, ids and positions are data: a vjp with respect to them is well-formed and empty."""
    q, k, v = qkv()
    lengths = jnp.array([T, 3], jnp.int32)
    positions = jnp.zeros((B, T), jnp.int32) + 5

    def call(q, lengths, positions):
        return jax_flash.flash_attention(
            q, k, v, query_seq_lengths=lengths, query_positions=positions, is_causal=True,
            backend=host_backend,
        )  # fmt: skip

    out, pull = jax.vjp(call, q, lengths, positions)
    _, *empty = pull(out)
    assert [x.dtype for x in empty] == [jax.dtypes.float0] * 2


# ---- scan, remat, control flow -----------------------------------------------------------------


def test_scan_over_layers(host_backend):
    q = normal(0, B, T, N, H)
    weights = normal(1, 3, H, H) / H**0.5

    def model(attention, weights, x):
        def layer(x, w):
            return x + attention(x @ w, x, x), None

        return jnp.sum(jnp.sin(jax.lax.scan(layer, x, weights)[0]))

    ours = functools.partial(jax_flash.flash_attention, is_causal=True, backend=host_backend)
    theirs = functools.partial(reference.attention, is_causal=True)
    got, expected = (
        jax.jit(jax.value_and_grad(functools.partial(model, f)))(weights, q) for f in (ours, theirs)
    )
    close(got, expected, rtol=1e-4)


def test_cond_and_while():
    q, k, v = qkv()

    def call(flag, q):
        return jax.lax.cond(
            flag,
            lambda q: jax_flash.flash_attention(q, k, v, backend="cpu"),
            lambda q: q,
            q,
        )

    once = jax_flash.flash_attention(q, k, v, backend="cpu")
    close(jax.jit(call)(True, q), once)
    close(jax.jit(call)(False, q), q)
    twice = jax.lax.fori_loop(
        0, 2, lambda _, x: jax_flash.flash_attention(x, k, v, backend="cpu"), q
    )
    close(twice, jax_flash.flash_attention(once, k, v, backend="cpu"))


def kernel_calls(policy) -> tuple[int, int]:
    """How often the gradient of a rematerialised call binds the kernels' primitives."""
    q, k, v = qkv()

    def loss(q, k, v):
        call = functools.partial(jax_flash.flash_attention, is_causal=True, backend="cpu")
        if policy != "none":
            call = jax.checkpoint(call, policy=policy)
        return jnp.sum(jnp.sin(call(jnp.sin(q), k, v)))

    # Not the compiled program: jaxlib 0.10 merges the two forward calls that the control has.
    jaxpr = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v))
    return jaxpr.count(" flash_forward["), jaxpr.count(" flash_backward[")


def test_remat_runs_the_forward_once_with_the_checkpoint_names():
    policies = jax.checkpoint_policies
    both_names = policies.save_only_these_names("flash_out", "flash_lse")
    assert kernel_calls("none") == (1, 1)
    assert kernel_calls(both_names) == (1, 1)
    assert kernel_calls(policies.everything_saveable) == (1, 1)
    assert kernel_calls(policies.nothing_saveable) == (2, 1)


def test_remat_gradients(host_backend):
    q, k, v = qkv()

    def gradients(policy):
        call = functools.partial(jax_flash.flash_attention, is_causal=True, backend=host_backend)
        if policy is not None:
            call = jax.checkpoint(call, policy=policy)
        loss = lambda q, k, v: jnp.sum(jnp.sin(call(q, k, v)))  # noqa: E731
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)

    policies = jax.checkpoint_policies
    expected = gradients(None)
    close(gradients(policies.nothing_saveable), expected)
    close(gradients(policies.save_only_these_names("flash_out", "flash_lse")), expected)


# ---- donation, arguments, threads ----------------------------------------------------------------


def test_donation(host_backend):
    expected_step = jax.jit(lambda *a: jax.vjp(call, *a)[1](a[0]))

    def call(q, k, v):
        return jax_flash.flash_attention(q, k, v, is_causal=True, backend=host_backend)

    expected = expected_step(*qkv())
    donated = jax.jit(lambda *a: jax.vjp(call, *a)[1](a[0]), donate_argnums=(0, 1, 2))
    arguments = qkv()
    close(donated(*arguments), expected, rtol=1e-6)
    assert all(x.is_deleted() for x in arguments)


def test_numpy_arguments_and_eval_shape(host_backend):
    q, k, v = (np.asarray(x) for x in qkv())
    call = functools.partial(jax_flash.flash_attention, return_lse=True, backend=host_backend)
    shapes = jax.eval_shape(call, q, k, v)
    assert [x.shape for x in shapes] == [(B, T, N, H), (B, T, N)]
    assert [x.dtype for x in shapes] == [jnp.float32, jnp.float32]
    close(call(q, k, v)[0], reference.attention(q, k, v))


def test_default_backend_matches_a_named_one():
    q, k, v = qkv()
    close(jax_flash.flash_attention(q, k, v), jax_flash.flash_attention(q, k, v, backend="xla"))


def test_many_threads_at_once(host_backend):
    """Two Python threads compile and run different shapes at the same time."""

    def work(length):
        q = normal(length, 1, length, 2, 16)
        got = jax.jit(
            lambda q: jax_flash.flash_attention(q, q, q, is_causal=True, backend=host_backend)
        )
        results = [np.asarray(got(q)) for _ in range(20)]
        expected = jax.jit(functools.partial(reference.attention, is_causal=True))(q, q, q)
        np.testing.assert_allclose(results[0], expected, atol=1e-5)
        return all(np.array_equal(results[0], x) for x in results)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, (65, 130, 200, 257)))


def test_linear_transpose(both):
    """out is linear in value; the transpose of that is the gradient."""
    q, k, v, bias = small_arguments()
    ours = functools.partial(both[0], q, k, bias=bias)
    dout = normal(4, *v.shape[:-2], N, H)
    for transform in (lambda f: f, jax.jit):
        got = transform(jax.linear_transpose(ours, v))(dout)
        close(got, jax.vjp(functools.partial(both[1], q, k, bias=bias), v)[1](dout))
    with pytest.raises(NotImplementedError, match="linear in value alone"):
        jax.linear_transpose(lambda k, v: both[0](q, k, v, bias), k, v)(dout)
