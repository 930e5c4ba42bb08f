"""jax's modes, debugging and x64; test_switches.py turns on all at once, in 16 bits."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash

from ..cases import Case
from ..compare import compare
from ..small import KEY, N, S, T, close, loss_of, normal, ours_and_reference, qkv, small_arguments


@pytest.fixture
def both(host_backend):
    return ours_and_reference(host_backend)


# ---- x64 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_x64_mode_changes_nothing(dtype, host_backend):
    q, k, v = (np.asarray(x) for x in qkv(dtype))
    lengths = np.array([S, 5], np.int32)

    def step(q, k, v):
        def call(q, k, v):
            return jax_flash.flash_attention(
                q, k, v, is_causal=True, key_value_seq_lengths=lengths, dropout_rate=0.2,
                dropout_key=jax.random.wrap_key_data(jnp.array([1, 2], jnp.uint32)),
                local_window_size=(3, None), scale=0.3, softcap=2.0, return_lse=True,
                backend=host_backend,
            )  # fmt: skip

        (out, lse), pull = jax.vjp(call, q, k, v)
        return out, lse, pull((out, lse))

    expected = jax.tree.map(np.asarray, jax.jit(step)(q, k, v))
    with jax.enable_x64(True):
        got = jax.tree.map(np.asarray, jax.jit(step)(q, k, v))
    assert [x.dtype for x in jax.tree.leaves(got)] == [x.dtype for x in jax.tree.leaves(expected)]
    close(got, expected, rtol=1e-6)


def test_x64_mode_takes_int64_lengths_and_ids(host_backend):
    """Under x64 integers are 64 bits wide unless told otherwise."""
    case = Case("x64", T=T, S=S, kv_lengths=(S, 5), segments="packed", positions="extreme",
                window=(2**32 - 10, 3))  # fmt: skip
    arguments = case.draw()
    for name in ("key_value_seq_lengths", "query_segment_ids", "key_value_segment_ids",
                 "query_positions", "key_value_positions"):  # fmt: skip
        arguments.arrays[name] = arguments.arrays[name].astype(np.int64)
    with jax.enable_x64(True):
        compare(arguments, arguments.run(host_backend))


# ---- debugging modes ---------------------------------------------------------------------------

MODES = {
    "disable_jit": jax.disable_jit,
    "debug_nans": lambda: jax.debug_nans(True),
    "debug_infs": lambda: jax.debug_infs(True),
}


def ways(both, q, k, v, bias):
    """The forward pass, the gradients and the directional derivative, each as a function."""
    loss = loss_of(both)
    return {
        "forward": lambda: both(q, k, v, bias),
        "gradient": lambda: jax.grad(loss, argnums=(0, 1, 2, 3))(q, k, v, bias),
        "jvp": lambda: jax.jvp(loss, (q, k, v, bias), (q, k, v, bias)),
        "vmap": lambda: jax.vmap(both)(*(x[None] for x in (q, k, v, bias))),
        "second": lambda: jax.jvp(jax.grad(loss), (q, k, v, bias), (q, k, v, bias)),
    }


@functools.cache
def expected(way):
    _, plain = ours_and_reference("xla")
    return jax.jit(ways(plain, *small_arguments())[way])()


@pytest.mark.parametrize("way", ["forward", "gradient", "jvp", "vmap", "second"])
@pytest.mark.parametrize(
    ("mode", "jitted"),
    [
        ("disable_jit", False),
        ("debug_nans", False),
        ("debug_nans", True),
        ("debug_infs", False),
        ("debug_infs", True),
    ],
)
def test_modes(mode, jitted, way, both, host_backend):
    if (mode, host_backend) == ("disable_jit", "xla") and way not in ("forward", "gradient"):
        pytest.skip("for each operation a program, 8 s: of kernels' calls all ways are tested")
    if mode == "debug_infs" and way == "second" and not jitted:
        pytest.skip("its arithmetic is plain JAX, which writes -inf for keys out of sight")
    ours, want = ways(both[0], *small_arguments())[way], expected(way)
    with MODES[mode]():
        got = (jax.jit(ours) if jitted else ours)()
    close(got, want)


@pytest.mark.parametrize("way", ["forward", "gradient", "jvp"])
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_debug_nans_finds_one(jitted, way, both):
    q, *rest = small_arguments()
    call = ways(both[0], q.at[0, 0, 0, 0].set(jnp.nan), *rest)[way]
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        (jax.jit(call) if jitted else call)()


@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_debugging_modes_name_the_primitive(kind, host_backend):
    q = jnp.ones((1, 16, 1, 8), jnp.float16)
    k = v = q[:, :1]
    options: dict[str, Any] = {"backend": host_backend}
    if kind == "nan":
        v = v * jnp.nan
    else:  # dropout doubles what it keeps of the one value, beyond float16
        v = v * 60000
        options |= {"dropout_rate": 0.5, "dropout_key": KEY(0)}
    call = functools.partial(jax_flash.flash_attention, **options)
    for function in (call, jax.jit(call)):
        with (
            jax.debug_nans(kind == "nan"),
            jax.debug_infs(kind == "inf"),
            pytest.raises(FloatingPointError, match=rf"\({kind}\) encountered in flash_forward"),
        ):
            function(q, k, v)


def test_a_sink_of_minus_infinity_beside_rows_without_keys(host_backend):
    q, k, v = qkv()

    def loss(sinks):
        options = {"query_seq_lengths": jnp.array([3, 0]), "backend": host_backend}
        return jnp.sum(jnp.sin(jax_flash.flash_attention(q, k, v, sinks=sinks, **options)))

    sinks = normal(3, N).at[0].set(-jnp.inf)
    with jax.debug_nans(True):
        assert jax.grad(loss)(sinks)[0] == 0
    hessian = jax.hessian(loss)(sinks)
    assert np.isfinite(hessian).all()
    assert not np.any(hessian[0])


def test_debug_infs_takes_rows_without_keys(host_backend):
    """Their lse is -inf, which is no fault as long as nobody asks for it."""
    q, k, v = qkv()
    lengths = jnp.array([T, 3], jnp.int32)

    def loss(q, k, v, sinks):
        options = {"query_seq_lengths": lengths, "sinks": sinks, "backend": host_backend}
        return jnp.sum(jnp.sin(jax_flash.flash_attention(q, k, v, **options)))

    gradient = jax.grad(loss, argnums=(0, 1, 2, 3))
    arguments = (q, k, v, 100 * normal(3, N))
    expected = gradient(*arguments)
    empty = k[:, :0]
    with jax.debug_infs(True):
        close(gradient(*arguments), expected)
        jax_flash.dot_product_attention(q, k, v, query_seq_lengths=lengths)
        close(jax_flash.flash_attention(q, empty, empty, backend=host_backend), q * 0)
        with pytest.raises(FloatingPointError):
            jax_flash.dot_product_attention(
                q, k, v, query_seq_lengths=lengths, return_residual=True
            )
