"""Backend "cudnn" on a GPU, which runs wherever cuDNN does."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash import _cudnn, _gpu, flash_attention

from ..cases import Case
from ..compare import compare
from ..conformance_cases import case_id
from ..hopper import draw, exact, near

_GPU = _gpu.spec.present()
_ABSENT = _cudnn.absent(_GPU)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(_ABSENT), reason=f"{_ABSENT}")]

C = functools.partial(Case, dtype="bfloat16")
CASES = (
    C("full", T=300, S=333, N=4, K=2, H=128),
    C("causal", T=300, S=300, N=6, K=2, H=64, causal=True, scale=0.3),
    C("causal, more queries", T=513, S=100, H=128, causal=True),
    C("causal, more keys", T=100, S=513, H=40, causal=True, dtype="float16"),
    C("window", T=500, S=500, N=4, K=1, H=128, causal=True, window=(70, 0)),
    C("small", T=2, S=2, N=1, H=8, batch=(3, 2)),
    C("small, causal", T=3, S=2, N=2, H=64, causal=True),
)
attend = functools.partial(flash_attention, is_causal=True, backend="cudnn")


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_case(case: Case):
    arguments = case.draw()
    compare(arguments, arguments.run("cudnn"))


def test_head_dims_up_to_256():
    assert _GPU is not None
    case = C("wide", T=200, S=200, H=256 if _GPU.arch == "sm_90a" else 96, causal=True)
    arguments = case.draw()
    compare(arguments, arguments.run("cudnn"))


def test_lse_is_the_logarithm_in_float32():
    q, k, v = draw(0)
    out, lse = jax.jit(functools.partial(attend, return_lse=True))(q, k, v)
    truth = exact(q, k, v)
    assert lse.dtype == jnp.float32
    np.testing.assert_allclose(lse, truth.lse, atol=1e-4, rtol=0)
    near(out, truth.out, "out")


def test_hidden_nan_reaches_nothing():
    """NaN of the last 50 positions, in what is given and in the cotangent."""
    q, k, v = draw(1)
    bad_values = ((q, jnp.nan), (k, jnp.inf), (v, jnp.nan))
    given = [x.at[:, 250:].set(bad) for x, bad in bad_values]

    @jax.jit
    def run(q, k, v, cotangent):
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(cotangent)

    cotangent = jnp.ones_like(q).at[:, 250:].set(jnp.nan)
    short = run(*(x[:, :250] for x in (q, k, v)), jnp.ones_like(q[:, :250]))
    found = run(*given, cotangent)
    for i, name in ((0, "out"), (1, "dq")):  # keys have gradients of the queries that are NaN
        near(found[i][:, :250], short[i], name)
    finite = run(*given, jnp.ones_like(q).at[:, 250:].set(0))[0]
    near(finite[:, :250], short[0], "out")


def test_transformations():
    """Members that share keys, rematerialisation in a loop, and a derivative of a derivative."""
    q, k, v = draw(2)
    members = jnp.stack([q, 2 * q, -q])
    mapped = jax.jit(jax.vmap(attend, in_axes=(0, None, None)))(members, k, v)
    for one, x in zip(mapped, members, strict=True):
        near(one, exact(x, k, v).out, "member")

    def model(x, backend):  # keys are not x's: rows that see themselves alone have no curvature
        def layer(x, _):
            out = flash_attention(x, k, v, is_causal=True, backend=backend)
            return x + out, None

        x, _ = jax.lax.scan(jax.checkpoint(layer), x, length=3)
        return jnp.square(x.astype(jnp.float32)).mean()

    def curved(x, backend):
        return jnp.square(jax.grad(model)(x, backend).astype(jnp.float32)).sum()

    for name, function in (("gradient", model), ("of a gradient", curved)):
        ours, theirs = (jax.jit(jax.grad(function), static_argnums=1)(q, b)
                        for b in ("cudnn", "cuda"))  # fmt: skip
        near(ours, theirs, name)
