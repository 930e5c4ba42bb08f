"""Rewrites of a call (`_simplify.py`): each is taken, changes no value, and may be turned off."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import _gpu, _simplify, context_parallel, masks, scores
from jax_flash._call import Call
from jax_flash._ops import passes
from jax_flash._problem import Shapes

from ..compare import compare
from ..conftest import needs_module
from ..devices import mesh_with
from ..emulated_cases import C
from ..emulator import Emulator
from ..other_kernels import AsWritten
from ..small import close, integers, normal

B, T, N, K, H = 2, 64, 4, 2, 16
CHUNKS = masks.documents(np.arange(T) // 32)
SLOPES = np.float32([0.5, 0.1, -0.2, 1.0])
FAR = np.float32(1e31)


def qkv() -> tuple[jax.Array, jax.Array, jax.Array]:
    return normal(0, B, T, N, H), normal(1, B, T, K, H), normal(2, B, T, K, H)


def mask_of(function: Callable[..., Any], **options: Any) -> jax_flash.BlockMask:
    return jax_flash.block_mask(function, q_len=T, kv_len=T, block=16, **options)


def layout() -> jax_flash.BlockMask:
    return jax_flash.block_mask_of(masks.butterfly(T // 16), block=16)


def attend(backend: str | None, **options: Any) -> Any:
    """out and lse, and gradients of both, in one jit."""
    q, k, v = qkv()
    dout, dlse = normal(3, *q.shape), normal(4, *q.shape[:-1])

    @jax.jit
    def both(q, k, v):
        call = functools.partial(
            jax_flash.flash_attention, return_lse=True, backend=backend, **options
        )
        results, pull = jax.vjp(call, q, k, v)
        return results, pull((dout, dlse))

    return both(q, k, v)


def rewrites(**options: Any) -> tuple[str, ...]:
    return jax_flash.explain(*qkv(), backend="xla", **options).rewrites


TAKEN: dict[str, tuple[tuple[str, ...], Callable[[], dict[str, Any]]]] = {
    "softcap": (("softcap",), lambda: {"score_mod": scores.softcap(2.0)}),
    "window": (("window",), lambda: {"block_mask": mask_of(masks.sliding_window(20, 3))}),
    "window in another": (
        ("window",),
        lambda: {"block_mask": mask_of(masks.causal()), "local_window_size": (30, 9)},
    ),
    "window beside terms": (
        ("window",),
        lambda: {
            "block_mask": mask_of(masks.causal(2)),
            "bias": normal(5, N, T, T),
            "query_seq_lengths": integers(6, (B,), 0, T),
            "query_positions": integers(7, (B, T), 0, T),  # of which nothing is counted
        },
    ),
    "chunks": (("chunks",), lambda: {"block_mask": mask_of(CHUNKS)}),
    "chunks, causal": (
        ("softcap", "chunks"),
        lambda: {
            "block_mask": mask_of(CHUNKS),
            "is_causal": True,
            "causal_align": "bottom_right",
            "local_window_size": (20, None),
            "score_mod": scores.softcap(2.0),
        },
    ),
    "layout": (("layout",), lambda: {"block_mask": layout()}),
}


@pytest.mark.parametrize(
    ("backend", "name"),
    [*(("cpu", name) for name in TAKEN), *(("xla", name) for name in TAKEN if name.isalpha())],
)
def test_values_are_those_of_the_call_as_written(backend: str, name: str):
    taken, make = TAKEN[name]
    options = make()
    assert rewrites(**options) == taken
    got = attend(backend, **options)
    if "score_mod" in options:  # of which the CPU kernels have none
        backend = "xla"
    with _simplify.as_written():
        written = make()  # a block mask finds no form
        for given in (written, options) if name in ("window", "chunks") else (written,):
            assert rewrites(**given) == ()
            close(got, attend(backend, **given), rtol=2e-6)


@pytest.mark.parametrize("window", [None, (3, None)])
def test_one_query_at_the_last_key_has_no_causality(window: tuple[int, None] | None):
    q, k, v = normal(0, B, 1, N, H), normal(1, B, 9, K, H), normal(2, B, 9, K, H)
    lengths = jnp.array([4, 9], jnp.int32)
    aligned = {"is_causal": True, "causal_align": "bottom_right", "local_window_size": window}

    def attend(**options: Any) -> jax.Array:
        return jax_flash.flash_attention(
            q, k, v, key_value_seq_lengths=lengths, return_lse=True, backend="xla", **options
        )

    assert jax_flash.explain(q, k, v, backend="xla", **aligned).rewrites == ("last",)
    for other in ({"causal_align": "top_left"}, {"is_causal": False}):
        assert jax_flash.explain(q, k, v, backend="xla", **aligned | other).rewrites == ()
    got = attend(**aligned)
    with _simplify.as_written():
        close(got, attend(**aligned), rtol=2e-6)


@pytest.mark.parametrize(
    ("f", "cap"),
    [
        (scores.softcap(30.0), 30.0),
        (lambda s, b, h, i, j: jnp.tanh(s * 0.25) * 4.0, 4.0),
        (scores.compose(scores.softcap(30.0), lambda s, b, h, i, j: s), 30.0),
        (scores.tanh(3.0), None),
        (scores.softcap(jnp.float32(30.0)), None),
        (lambda s, b, h, i, j: -4.0 * jnp.tanh(s / -4.0), None),
        (lambda s, b, h, i, j: 4.0 * jnp.tanh(s * 0.2499), None),
        (lambda s, b, h, i, j: 4.0 * jnp.tanh(4.0 / s), None),
        (lambda s, b, h, i, j: 4.0 * jnp.tanh(h / 4.0), None),
        (lambda s, b, h, i, j: 4.0 * jnp.tanh(s / 4.0) + s, None),
        (lambda s, b, h, i, j: FAR * jnp.tanh(s / FAR), None),  # softcap= refuses it
        (scores.compose(scores.softcap(30.0), scores.softcap(5.0)), None),
    ],
)
def test_a_function_that_is_softcap_becomes_it(f, cap):
    made = jax_flash.explain(*qkv(), score_mod=f, backend="xla")
    assert made.rewrites == (() if cap is None else ("softcap",))
    assert (f"softcap {cap or 0:g}" in str(made)) == (cap is not None)
    assert ("score_mod" in str(made)) == (cap is None)


OTHERS: dict[str, Callable[[], dict[str, Any]]] = {
    "a prefix": lambda: {"block_mask": mask_of(masks.prefix_lm(9))},
    "a window, aligned": lambda: {
        "block_mask": mask_of(masks.causal()),
        "causal_align": "bottom_right",
    },
    "a window beside positions": lambda: {
        "block_mask": mask_of(masks.causal()),
        "query_positions": integers(7, (B, T), 0, T),
        "is_causal": True,
    },
    "documents, traced": lambda: {"block_mask": jax.jit(lambda: mask_of(CHUNKS))()},
    "documents of other lengths": lambda: {
        "block_mask": mask_of(masks.documents(np.minimum(np.arange(T) // 24, 1)))
    },
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_masks_stay(name: str):
    assert rewrites(**OTHERS[name]()) == ()


@pytest.mark.parametrize(
    "options",
    [
        {"bias": np.zeros((N, T, T), np.float32)},
        {"key_value_seq_lengths": np.array([T, 40])},
        {
            "query_segment_ids": np.zeros((B, T), int),
            "key_value_segment_ids": np.zeros((B, T), int),
        },
        {"is_causal": True, "query_positions": np.zeros((B, T), int)},
        {"sinks": np.zeros(N, np.float32)},
        {"dropout_rate": 0.5, "dropout_key": jax.random.PRNGKey(0)},
        {"score_mod": lambda s, b, h, q, k: s - 0.01 * k},
    ],
    ids=lambda options: [*options][-1],
)
def test_chunks_beside_what_counts_rows_or_positions_stay(options: dict[str, Any]):
    assert rewrites(block_mask=mask_of(CHUNKS), **options) == ("layout",)


@pytest.mark.parametrize("devices", [1, 2])
def test_chunks_of_a_split_sequence_stay(devices: int):
    q, k, v = qkv()
    call = functools.partial(
        context_parallel.attention, axis_name="sequence", block_mask=mask_of(CHUNKS)
    )
    want = jax_flash.flash_attention(q, k, v, block_mask=mask_of(CHUNKS))
    with jax.set_mesh(mesh_with(sequence=devices)):
        close(jax.jit(call)(q, k, v), want, rtol=2e-6)


LAYOUT = "kListsLayout kShowsLayout"  # of the forward pass, and of the backward

# ---- what kernels are told -----------------------------------------------------------------------


@needs_module
def test_explain_tells_lines_and_layouts_of_kernels(uncompiled):
    q = jax.ShapeDtypeStruct((1, 256, 4, 64), jnp.bfloat16)
    m = jax_flash.block_mask_of(np.eye(2, dtype=bool), block=128)
    explain = functools.partial(jax_flash.explain, q, q, q, gpu="H200")
    near = jnp.zeros((4, 513))  # no key is farther away
    for options, name, constant in (
        ({"score_mod": scores.alibi(SLOPES)}, "lines", "kScoreIsLine"),
        ({"score_mod": scores.relative_position_table(near)}, None, "kScoreIsLine"),
        ({"block_mask": m}, "layout", LAYOUT),
    ):
        for on in (True, False):
            with _simplify.as_written(not on):
                made = explain(**options)
            taken = on and name is not None
            assert made.rewrites == ((name,) if taken else ())
            assert (f"rewritten: {name}" in str(made)) == taken
            assert ("as written" in str(made)) == (not on)
            for report in (made.forward, made.backward):
                assert report.kernel is not None
                constants = report.kernel.plan.constants
                assert any(constants.get(name) for name in constant.split()) == taken


CASES = {
    "kScoreIsLine": C("score distance, as written", score="distance", T=200, S=300),
    LAYOUT: C("layout, as written", T=400, S=520, N=2, K=1, blocks=("1n", 128), is_layout=True),
}


@pytest.mark.parametrize("constant", CASES)
def test_kernels_compute_the_call_as_written(constant: str, emulator: Emulator):
    arguments = CASES[constant].draw()
    for on in (False, True):  # of one jitted function, in one process
        compare(arguments, emulator.run(AsWritten(arguments, on, constant)))


# ---- the switch ----------------------------------------------------------------------------------


def problem_of(traced: Any) -> Any:
    (call,) = (
        eqn.params["call"] for eqn in traced.jaxpr.eqns if isinstance(eqn.params.get("call"), Call)
    )
    return call.problem


@pytest.mark.quick
def test_jit_traces_anew_where_it_changes_and_a_trace_keeps_it():
    q, k, v = (x.astype(jnp.bfloat16) for x in qkv())

    @jax.jit
    def capped(q, k, v):
        return jax_flash.flash_attention(q, k, v, score_mod=scores.softcap(3.0))

    @jax.jit
    def falling(q, k, v):
        return jax_flash.flash_attention(q, k, v, score_mod=scores.alibi(SLOPES))

    shapes = Shapes(B, T, T, N, K, H, H, own_captures=(False,))
    for on in (True, False, True):
        with _simplify.as_written(not on):
            problem = problem_of(capped.trace(q, k, v))
            line = problem_of(falling.trace(q, k, v))
        assert (problem.softcap, problem.score is None) == ((3.0, True) if on else (None, False))
        # Planned outside, as what is lowered later.
        for name, call in passes(line).items():
            plan = _gpu.plan(call, shapes, _gpu.spec.GPUS["H200"])
            assert plan.constants["kScoreIsLine"] == on, name


def test_block_masks_made_under_it_are_blocks():
    for function in (masks.causal(), CHUNKS):
        with _simplify.as_written():
            written, traced = mask_of(function), jax.jit(lambda f=function: mask_of(f))()
            with _simplify.as_written(False):
                assert mask_of(function).is_form
        assert not written.is_form
        assert not traced.is_form
        assert written.is_layout == (function is CHUNKS)
        found = mask_of(function)
        assert found.is_form
        assert found.is_layout == written.is_layout
        np.testing.assert_array_equal(found.dense(), written.dense())


def test_the_environment_turns_them_off():
    done = subprocess.run(
        [sys.executable, "-c", "from jax_flash import _simplify; print(_simplify.is_as_written())"],
        env=os.environ | {"JAX_FLASH_AS_WRITTEN": "1", "JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.strip() == "True", done.stderr
