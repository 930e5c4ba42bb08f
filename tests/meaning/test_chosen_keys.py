"""Chosen keys in `flash_attention`: what queries read of the positions in `indices`.

The truth is the NumPy oracle with a mask made of the indices. Caches have test_chosen_caches.py.
"""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash
from jax_flash import reference

from .. import chosen_cases
from ..chosen_cases import CASES
from ..devices import collectives, mesh_of


def of_kernels(**options):
    """A function of (arrays, indices, (dout, dlse)): out, lse and three gradients, under jit."""

    def call(arrays, indices, cotangents):
        moving = [arrays[name] for name in ("query", "key", "value")]
        rest = {name: x for name, x in arrays.items() if name not in ("query", "key", "value")}

        def attend(*moving):
            return jax_flash.flash_attention(
                *moving, **rest, indices=indices, return_lse=True, precision="highest", **options
            )

        results, pull = jax.vjp(attend, *moving)
        return (*results, *pull(cotangents))

    return jax.jit(call)


# ---- flash_attention -----------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_results_and_gradients(case, backend):
    """Gradients are those of "xla" whichever backend computed the results."""
    drawn = chosen_cases.fit(case, backend).draw()
    if backend != "xla":
        drawn.compare(*drawn.run(backend))
        return
    given = drawn.arrays, drawn.indices, (drawn.dout, drawn.dlse)
    drawn.compare(*of_kernels(**case.options, backend=backend)(*given))


def small(seed=0, lead=(2,), T=6, S=11, N=4, K=2, H=8, n=5):
    rng = np.random.default_rng(seed)
    arrays = [
        jnp.asarray(rng.standard_normal((*lead, *shape)), jnp.float32)
        for shape in ((T, N, H), (S, K, H), (S, K, H))
    ]
    return arrays, jnp.asarray(chosen_cases.draw_indices(rng, (*lead, T), n, S))


def test_derivatives_of_members_that_share_what_they_can():
    """vmap over some arguments, forward mode, gradients and their derivatives: the reference's."""
    (q, k, v), _ = small(lead=(3, 2))
    _, indices = small(lead=(3, 2), seed=1)
    sinks = jnp.arange(-2.0, 2.0)

    def loss(attend, axes, q, k, v, indices, sinks):
        def member(q, k, v, indices):
            options = {"is_causal": True, "softcap": 2.0, "sinks": sinks, "return_lse": True}
            out, lse = attend(q, k, v, indices=indices, **options)
            return jnp.sin(out).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()

        return jax.vmap(member, axes)(q, k, v, indices).sum()

    def ours(*arrays, **options):
        return jax_flash.flash_attention(*arrays, **options, precision="highest")

    for axes in ((0, None, None, 0), (0, 0, 0, None), (None, None, 0, 0)):
        given = [x if axis == 0 else x[0] for x, axis in zip((q, k, v, indices), axes, strict=True)]

        @functools.partial(jax.jit, static_argnums=0)
        def derivatives(attend, moving, chosen, axes=axes):
            def of(*moving):
                return loss(attend, axes, *moving[:3], chosen, moving[3])

            first = jax.grad(of, (0, 1, 2, 3))
            tangents = jax.tree.map(jnp.cos, moving)
            _, forward = jax.jvp(of, moving, tangents)
            _, second = jax.jvp(first, moving, tangents)  # forward over reverse
            return first(*moving), forward, second

        of_given = (*given[:3], sinks), given[3]
        got, expected = derivatives(ours, *of_given), derivatives(reference.attention, *of_given)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("chosen", [True, False])
def test_values_that_are_features_of_keys(chosen):
    """As those features given: results, gradients, forward mode and members that share keys."""
    (q, k, _), indices = small(lead=(2,), N=4, K=1, H=24)
    options = {"indices": indices} if chosen else {}

    def derivatives(**values):
        def attend(q, k):
            given = {"value": k[..., :16]} if not values else {"value": None} | values
            return jax_flash.flash_attention(q, k, **given, **options, is_causal=True)

        results, pull = jax.vjp(attend, q, k)
        _, forward = jax.jvp(attend, (q, k), (jnp.cos(q), jnp.sin(k)))
        members = jax.vmap(attend, (0, None))(jnp.stack([q, 2 * q]), k)
        return results, pull(jnp.sin(results)), forward, members

    got, expected = derivatives(value_dim=np.int64(16)), derivatives()
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("within", [False, True])
def test_an_export_leaves_the_batch_open(within):
    if jax_flash.explain(*small()[0]).backend != "cpu":
        pytest.skip("the CPU kernels are not built")

    def call(q, k, v, indices):
        values = {"value": None, "value_dim": 8} if within else {"value": v}
        return jax_flash.flash_attention(q, k, **values, indices=indices, is_causal=True)

    def arguments(batch):
        arrays, indices = small(lead=(batch,))
        return *arrays, indices

    (b,) = jax.export.symbolic_shape("b")
    shapes = [jax.ShapeDtypeStruct((b, *x.shape[1:]), x.dtype) for x in arguments(1)]
    checks = jax_flash.EXPORT_CHECKS
    made = jax.export.export(jax.jit(call), platforms=["cpu"], disabled_checks=checks)(*shapes)
    for batch in (1, 3):
        given = arguments(batch)
        np.testing.assert_allclose(made.call(*given), call(*given), rtol=1e-6)


def test_split_over_batch_and_heads_without_a_collective():
    mesh = mesh_of((4, 2))
    (q, k, v), indices = small(lead=(4,), N=4, K=2)
    call = of_kernels(is_causal=True)
    cotangents = jnp.cos(q), jnp.ones(q.shape[:-1])
    expected = call({"query": q, "key": k, "value": v}, indices, cotangents)
    heads = NamedSharding(mesh, P("data", None, "model"))
    rows = NamedSharding(mesh, P("data"))
    q, k, v, *cotangents = (jax.device_put(x, heads) for x in (q, k, v, *cotangents))
    given = ({"query": q, "key": k, "value": v}, jax.device_put(indices, rows), tuple(cotangents))
    compiled = call.lower(*given).compile()
    assert collectives(compiled) == []
    for x, y in zip(compiled(*given), expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_memory_grows_with_what_is_read():
    """Less than one byte for each of T S, in blocks of queries; gradients too."""
    T = S = 8192
    x = jax.ShapeDtypeStruct((1, T, 1, 8), jnp.float32)
    indices = jax.ShapeDtypeStruct((1, T, 32), jnp.int32)
    given = {"query": x, "key": x, "value": x}
    cotangents = x, jax.ShapeDtypeStruct((1, T, 1), jnp.float32)
    program = of_kernels(is_causal=True).lower(given, indices, cotangents).compile()
    assert program.memory_analysis().temp_size_in_bytes < T * S
    # Of 2048 keys for each query all that is gathered at once would be 2 GB.
    indices = jax.ShapeDtypeStruct((1, T, 2048), jnp.int32)
    program = of_kernels(is_causal=True).lower(given, indices, cotangents).compile()
    gathered = T * 2048 * 16 * 4
    assert program.memory_analysis().temp_size_in_bytes < gathered / 2


def test_key_weights_and_split_sequences():
    (q, k, _), indices = small()
    got = jax_flash.key_weights(q, k, indices=indices)
    mask = jnp.asarray(chosen_cases.read(np.asarray(indices), k.shape[1]))[:, None]
    expected = jax_flash.key_weights(q, k, mask=mask)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
    mesh = mesh_of((1, 2))
    with jax.set_mesh(mesh), pytest.raises(NotImplementedError, match="has no chosen keys"):
        jax_flash.context_parallel.attention(q, q, q, indices=indices, axis_name="model")


# ---- faults --------------------------------------------------------------------------------------


def test_wide_integers_do_not_wrap_around():
    (q, k, v), indices = small()
    wide = np.where(np.asarray(indices) < 0, 2**32, np.asarray(indices, np.int64))
    got = jax_flash.flash_attention(q, k, v, indices=wide)
    np.testing.assert_array_equal(got, jax_flash.flash_attention(q, k, v, indices=indices))


FAULTS = {
    "dtype": ({"indices": np.zeros((2, 6, 5), np.float32)}, TypeError, "indices has dtype float32"),
    "a mask": ({"indices": np.zeros((2, 6, 5), bool)}, TypeError, "booleans are mask's"),
    "of heads": ({"indices": np.zeros((2, 4, 6, 5), np.int32)}, ValueError, "expected (2, 6, n)"),
    "of rows": ({"indices": np.zeros((2, 5), np.int32)}, ValueError, "expected (2, 6, n)"),
    "bias": ({"bias": np.zeros((6, 11), np.float32)}, ValueError, "bias is given beside indices"),
    "mask": ({"mask": np.ones((6, 11), bool)}, ValueError, "mask is given beside indices"),
    "score_mod": ({"score_mod": lambda s, *_: 2 * s}, ValueError, "score_mod is given beside"),
    "dropout": ({"dropout_rate": 0.5, "dropout_key": jax.random.key(0)}, ValueError,
                "dropout_rate is given beside indices"),
    "no value": ({"value": None}, TypeError, "value_dim is None and value None; expected a value"),
    "wide values": ({"value": None, "value_dim": 9}, ValueError, "expected 1 to 8, the head dim"),
    "both": ({"value_dim": 8}, ValueError, "value_dim is 8 beside a value; expected None"),
    "float8": ({"value": None, "value_dim": 8, "key": np.ones((2, 11, 2, 8), "float8_e4m3fn")},
               TypeError, "value is None and key in float8; expected a value"),
    "deterministic": ({"deterministic": True}, ValueError, "deterministic is given beside"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults(name):
    change, error, says = FAULTS[name]
    (q, k, v), indices = small()
    given = {"query": q, "key": k, "value": v, "indices": indices} | change
    with pytest.raises(error, match=re.escape(says)):
        jax_flash.flash_attention(**given)


def test_what_else_is_refused():
    (q, k, v), indices = small()
    with pytest.raises(NotImplementedError, match="no gradients of chosen keys"):
        jax.grad(
            lambda q: jax_flash.flash_attention(q, k, v, indices=indices, backend="cpu").sum()
        )(q)
    half = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    with pytest.raises(ValueError, match="float8 is given beside indices"):
        jax_flash.flash_attention(*half, indices=indices, quantize="fp8")
    mask = jax_flash.block_mask(jax_flash.masks.causal(), q_len=6, kv_len=11)
    with pytest.raises(ValueError, match="block_mask is given beside indices"):
        jax_flash.flash_attention(q, k, v, indices=indices, block_mask=mask)
    pages = jnp.zeros((4, 4, 2, 8))
    step = {"lengths": jnp.array([6]), "page_table": jnp.array([[0, 1]])}
    step |= {"query_starts": jnp.array([0, 2]), "indices": indices[0, :2]}
    for name, x in (("shared_pages", jnp.array([0])), ("ancestors", jnp.ones((2, 2), bool))):
        with pytest.raises(ValueError, match=f"{name} is given beside indices"):
            jax_flash.ragged_paged_attention(q[0, :2], pages, pages, **step, **{name: x})
    with pytest.raises(ValueError, match=r"indices has shape \(6, 5\); expected \(2, n\)"):
        jax_flash.ragged_paged_attention(q[0, :2], pages, pages, **step | {"indices": indices[0]})


def test_explain_says_what_runs_it(uncompiled):
    (q, k, v), indices = small()
    found = jax_flash.explain(q, k, v, indices=indices, gpu="H200")
    assert (found.forward.backend, found.backward.backend) == ("cuda", "xla")
    assert found.backward.refusals["cuda"] == ("the CUDA kernels have no gradients of chosen keys",)
    assert found.forward.kernel.plan.target.endswith("decode")
    assert "indices" in repr(found)
    query = jax.ShapeDtypeStruct((1, 64, 16, 576), jnp.bfloat16)
    latent = jax.ShapeDtypeStruct((1, 256, 1, 576), jnp.bfloat16)
    options = {"indices": jax.ShapeDtypeStruct((1, 64, 32), jnp.int32), "gpu": "H200"}
    found = jax_flash.explain(query, latent, None, value_dim=512, **options)
    assert found.forward.kernel.plan.source == "sm90_latent/decode.cuh"
    apart = jax.ShapeDtypeStruct((1, 256, 1, 512), jnp.bfloat16)
    found = jax_flash.explain(query, latent, apart, **options)
    assert found.forward.kernel.plan.source == "sm80/decode.cuh"
