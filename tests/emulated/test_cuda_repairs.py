"""Rows that are computed again, in the emulator: forward_exact.cuh and backward_exact.cuh.

What a row may not see and is not finite, and sums beyond a type's range, make them not finite.
"""

from __future__ import annotations

import numpy as np
import pytest

from ..compare import compare
from ..emulated_cases import C, H
from ..emulator import Emulator
from ..other_kernels import AsIfLong
from ..poison import poisoned


def test_float16_gradients_of_scores_beyond_its_range(emulator: Emulator):
    """Elements of dS pass 65504, most of dq and dk do not: only what exceeds it is inf."""
    arguments = C("large", T=40, S=50, N=1, dtype="float16").draw()
    value = arguments.arrays["value"].astype(np.float32)
    arguments.arrays["value"] = (value * 2000).astype(np.float16)
    arguments.dout = (arguments.dout.astype(np.float32) * 50).astype(np.float16)
    truth, got = arguments.truth(), emulator.run(arguments)
    for name, want in (("dquery", truth.dq), ("dkey", truth.dk)):
        assert np.abs(want).max() > 65504
        fits = np.abs(want) < 60000
        error = np.abs(got[name].astype(np.float64) - want)[fits]
        assert error.max() < 2**-10 * 65504


@pytest.mark.parametrize("in_turns", [False, True])
def test_poison_in_sums_of_dq(in_turns: bool, emulator: Emulator):
    """Rows of dq that meet a NaN which they may not see are right, of all sets of heads."""
    sizes = {"T": 192, "S": 192, "N": 2} if in_turns else {"T": 90, "S": 140, "N": 4, "batch": (4,)}
    arguments = C("future", **sizes, H=128, causal=True, deterministic=in_turns).draw()
    truth = arguments.truth()
    arguments.arrays["value"][:, 70] = np.nan
    run = arguments if in_turns else AsIfLong(arguments, "ring_sets", 8)
    got = emulator.run(run)["dquery"]
    assert np.isnan(got[:, 70:].astype(np.float32)).all()
    assert np.abs(got[:, :70].astype(np.float64) - truth.dq[:, :70]).max() < 2e-2


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_poison_reaches_no_result(poison: float, emulator: Emulator):
    """Rows that share blocks with what they may not see are computed again."""
    cases = (
        C("segments", T=90, S=100, segments="shuffled", kv_lengths=(70,)),
        C("positions", T=90, S=300, positions="offset", causal=True),
        C("lengths", T=90, S=100, H=128, N=4, K=2, q_lengths=(64,), kv_lengths=(29,), causal=True),
    )
    for case in cases if np.isnan(poison) else cases[:1]:  # one test finds either
        clean = case.draw()
        compare(clean, emulator.run(poisoned(clean, poison)))


@pytest.mark.parametrize(("of", "largest"), [(C, 2e-2), (H, 2e-6)], ids=["bfloat16", "halves"])
def test_poison_stays_with_those_who_see_it(of, largest: float, emulator: Emulator):
    arguments = of("future", T=90, S=90, causal=True).draw()
    truth = arguments.truth()
    arguments.arrays["value"][:, 70] = np.nan
    got = emulator.run(arguments)
    for name, want in (("out", truth.out), ("dquery", truth.dq)):
        assert np.isnan(got[name][:, 70:].astype(np.float32)).all()
        before = got[name][:, :70].astype(np.float64)
        assert np.abs(before - want[:, :70]).max() < largest
