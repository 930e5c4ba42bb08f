"""The transformations of JAX: vmap, scan, remat, higher derivatives, export, donation."""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash

from ..cases import BOTTOM_RIGHT
from ..small import (
    KEY,
    B,
    H,
    N,
    S,
    T,
    close,
    integers,
    loss_of,
    normal,
    ours_and_plain,
    plain,
    qkv,
    small_arguments,
)

# ---- vmap --------------------------------------------------------------------------------------

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


def test_vmap_over_an_axis_of_size_zero_and_one(host_backend):
    q, k, v = qkv()
    for size in (0, 1):
        got = jax.vmap(lambda q: jax_flash.flash_attention(q, k, v, backend=host_backend))(
            jnp.stack([q])[:size]
        )
        assert got.shape == (size, B, T, N, H)


# ---- derivatives -------------------------------------------------------------------------------


@pytest.fixture
def both(host_backend):
    return ours_and_plain(host_backend)


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
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) / 3**0.5
        return jax.nn.logsumexp(scores, axis=-1).sum()

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
    theirs = functools.partial(plain, causal=True)
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


# ---- export, donation, devices ------------------------------------------------------------


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
    close(call(q, k, v)[0], plain(q, k, v))


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
        expected = jax.jit(functools.partial(plain, causal=True))(q, q, q)
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
