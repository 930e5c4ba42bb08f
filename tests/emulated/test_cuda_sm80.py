"""The kernels of mma.sync, for every GPU since Ampere: their text, run by tests/emulator.

On a GPU tests/gpu/test_cuda_sm80_device.py runs them; tests/compiled has them compiled for each
architecture.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest

from jax_flash import _native

from ..cases import Case
from ..compare import compare, compare_parts
from ..conformance_cases import case_id
from ..emulated_cases import BACKWARDS, IN_ORDER, C
from ..emulator import Emulator
from ..poison import poisoned
from ..sm80_cases import CASES, GRADIENTS, SMALL_CASES, SPLIT_CASES, F

compare_forward = functools.partial(compare_parts, gradients=False)


@pytest.fixture(scope="module")
def a100(emulator: Emulator):
    """The forward pass of some arguments by the kernels that an A100 would get."""
    return functools.partial(emulator.run, gpu="A100", gradients=False)


@pytest.fixture(scope="module")
def ada(emulator: Emulator):
    """The same that an RTX 4090 would get, with 99 KB of shared memory."""
    return functools.partial(emulator.run, gpu="RTX 4090", gradients=False)


@pytest.mark.parametrize("case", CASES + SPLIT_CASES, ids=case_id)
def test_case(case: Case, a100):
    check_case(case, a100)


@pytest.mark.parametrize("case", SMALL_CASES, ids=case_id)
def test_case_in_little_shared_memory(case: Case, ada):
    check_case(case, ada)


def check_case(case: Case, run) -> None:
    arguments = case.draw()
    got = run(arguments, seed=IN_ORDER)
    compare_forward(arguments, got)
    again = run(arguments, seed=BACKWARDS)
    for name in got:
        np.testing.assert_array_equal(again[name], got[name], err_msg=name)


@pytest.mark.parametrize(
    ("dim", "dtype"), [(64, "bfloat16"), (128, "float16"), (264, "bfloat16"), (64, "float32")]
)
def test_weights_that_overflow(dim: int, dtype: str, a100):
    """Rows that are walked again: logits that differ by several hundred."""
    precision = "high" if dtype == "float32" else None
    case = C("overflow", H=dim, T=70, S=200, N=1, spread=150.0, dtype=dtype, precision=precision)
    arguments = case.draw()
    compare_forward(arguments, a100(arguments, seed=2))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_poison_reaches_no_result(poison: float, a100):
    """Rows that share blocks with what they may not see are computed again."""
    cases = (
        C("segments", T=90, S=100, segments="shuffled", kv_lengths=(70,), sinks=True),
        C("lengths", T=90, S=100, H=128, N=4, K=2, q_lengths=(64,), kv_lengths=(29,), causal=True),
        C("shared rows", T=40, S=50, H=20, Hv=264, N=1, kv_lengths=(29,), causal=True),
        F("float32", T=40, S=50, N=1, segments="shuffled", kv_lengths=(29,), precision="highest"),
    )
    for case in cases if np.isnan(poison) else cases[:1]:  # one test finds either
        clean = case.draw()
        compare_forward(clean, a100(poisoned(clean, poison)))


@pytest.mark.parametrize(
    ("case", "column"),
    [
        (C("future", T=90, S=90, causal=True), slice(None)),
        # Which the warp does not have that computes rows again.
        (C("future wide", T=90, S=90, H=20, Hv=264, N=1, causal=True), slice(262, 263)),
    ],
    ids=lambda x: x.name if isinstance(x, Case) else "",
)
def test_poison_stays_with_those_who_see_it(case: Case, column: slice, a100):
    arguments = case.draw()
    want = arguments.truth(gradients=False)
    arguments.arrays["value"][:, 70, :, column] = np.nan
    out = a100(arguments)["out"].astype(np.float64)
    assert np.isnan(out[:, 70:, :, column]).all()
    assert np.abs(out[:, :70] - want.out[:, :70]).max() < 2e-2


@pytest.mark.parametrize(
    ("gpu", "case"),
    GRADIENTS,
    ids=[f"{gpu} {case.name}".replace(" ", "-") for gpu, case in GRADIENTS],
)
def test_gradients(gpu: str, case: Case, emulator: Emulator):
    arguments = case.draw()
    got = emulator.run(arguments, seed=2, gpu=gpu)
    compare_parts(arguments, got)
    if case.deterministic:
        again = emulator.run(arguments, seed=BACKWARDS, gpu=gpu)
        for name in got:
            np.testing.assert_array_equal(again[name], got[name], err_msg=name)


def test_poison_reaches_no_gradient(emulator: Emulator):
    """Rows of dq, dk and dv that share blocks with what they may not see are computed again."""
    for case in (
        C("hidden", T=90, S=100, H=128, N=2, K=1, segments="shuffled", q_lengths=(80,),
          kv_lengths=(70,), causal=True),
        F("hidden float32", T=40, S=50, N=1, segments="shuffled", q_lengths=(30,),
          kv_lengths=(40,), causal=True, precision="highest"),
    ):  # fmt: skip
        clean = case.draw()
        compare(clean, emulator.run(poisoned(clean, np.nan), gpu="L4"))


HIDDEN = slice(128, 256)  # two or more whole blocks of keys


def _hide(case: Case):
    """Arguments of which no query sees the keys HIDDEN."""
    arguments = case.draw()
    arrays = arguments.arrays
    if case.mask:
        arrays["mask"][..., HIDDEN] = False
    if case.segments:
        arrays["query_segment_ids"][:] = 1
        arrays["key_value_segment_ids"][:] = 1
        arrays["key_value_segment_ids"][:, HIDDEN] = 2
    if case.positions:
        arrays["query_positions"][:] = 1000
        arrays["key_value_positions"][:] = 1000
        arrays["key_value_positions"][:, HIDDEN] = 1001
    return arguments


@pytest.mark.parametrize(
    "case",
    [
        C("causal", T=128, S=256, causal=True),
        C("window", T=64, S=300, window=(None, 50)),
        C("lengths", S=300, kv_lengths=(128,)),
        C("mask", S=300, mask="b1ts"),
        C("segments", S=300, segments="packed"),
        C("positions", S=300, positions="offset", causal=True),
    ],
    ids=lambda case: case.name,
)
def test_hidden_blocks_are_skipped(case: Case, a100):
    """NaN in them would reach every row, since none is computed again here."""
    sources = _native.kernel_sources()
    rows = sources["sm80/forward_rows.cuh"]
    assert "if (nonfinite == 0) return;" in rows
    sources["sm80/forward_rows.cuh"] = rows.replace("if (nonfinite == 0) return;", "return;")
    arguments = _hide(case)
    hidden = slice(128, None) if case.name in ("causal", "window", "lengths") else HIDDEN
    want = arguments.truth(gradients=False).out
    arguments.arrays["value"][:, hidden] = np.nan
    out = a100(arguments, sources=sources)["out"].astype(np.float64)
    assert np.abs(out - want).max() < 2e-2
