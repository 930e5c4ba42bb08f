"""Gradients that are computed again, in the emulator: see cuda/kernels/backward_exact.cuh."""

from __future__ import annotations

import numpy as np

from ..emulated_cases import C
from ..emulator import Emulator


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
