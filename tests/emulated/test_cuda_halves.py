"""float32 at precision "highest" on Hopper: products of two float16, and what they do not hold."""

from __future__ import annotations

import numpy as np
import pytest

from jax_flash import _native

from ..cases import Case
from ..compare import compare
from ..conformance_cases import case_id
from ..emulated_cases import IN_ORDER, H, check_orders
from ..emulator import Emulator

# float32 in two float16.
HALVES = (
    H("halves 64", T=260, S=330, causal=True),
    H("halves 128", H=128, T=140, S=270, N=4, K=2, window=(90, 20)),
    H("halves odd", H=33, Hv=7, T=70, S=200, batch=(2,)),
    H("halves 100 value 72", H=100, Hv=72, T=130, S=140, N=1, scale=-0.3),
    H("halves deterministic", H=72, T=140, S=200, N=2, K=1, window=(70, 20), deterministic=True),
)


@pytest.mark.parametrize("case", HALVES, ids=case_id)
def test_float32_in_halves(case: Case, emulator: Emulator):
    check_orders(case.draw(), emulator.run)


@pytest.mark.parametrize("dim", [64, 100])
def test_last_units_that_ctas_share(dim: int, emulator: Emulator):
    """Four units on three processors: they add to dk and dv of the last one, in any order."""
    arguments = H("shared", H=dim, Hv=72, T=140, S=200, N=2, K=1).draw()
    for seed in (IN_ORDER, 2):
        compare(arguments, emulator.run(arguments, seed=seed))
    arguments.arrays["key"][:, 195] *= 2.0**-20  # what meets the last block is computed again
    compare(arguments, emulator.run(arguments))


def test_numbers_that_halves_do_not_hold(emulator: Emulator):
    """A column of 2^-32 of the largest keeps 7 bits: its rows are computed again."""
    arguments = H("far apart", T=70, S=140, N=1).draw()
    arguments.arrays["value"][..., 5] *= 2.0**-32
    arguments.arrays["key"][:, 33] *= 2.0**-20
    arguments.arrays["query"][:, 3] *= 2.0**-20
    got, truth = emulator.run(arguments), arguments.truth()
    wanted = {"out": truth.out, "dquery": truth.dq, "dkey": truth.dk, "dvalue": truth.dv}
    for name, want in wanted.items():
        error = np.abs(got[name] - want)
        assert (error.max((0, 1, 2)) < 4e-6 * np.abs(want).max((0, 1, 2))).all(), name


@pytest.mark.parametrize("dim", [64, 128])
def test_output_gradients_far_apart_take_tensor_cores(dim: int, emulator: Emulator):
    """Rows of the output's gradient may be as small as they like: nothing is computed again."""
    sources = _native.kernel_sources()
    repair = "  exact_suspects(p, suspects);\n"
    assert repair in sources["backward_finish.cuh"]
    sources["backward_finish.cuh"] = sources["backward_finish.cuh"].replace(repair, "")
    for case in (
        H("far apart", H=dim, T=140, S=140, N=2, K=1, causal=True),
        H("far apart", H=dim, T=70, S=70, N=1, scale=-0.3, with_lse=True, deterministic=True),
    ):
        arguments = case.draw()
        exponents = np.random.default_rng(0).integers(-60, 20, arguments.dout.shape[:-1])
        for x in (arguments.dout, *([] if arguments.dlse is None else [arguments.dlse[..., None]])):
            x *= (2.0**exponents)[..., None].astype(x.dtype)
        arguments.dout[:, 5] = 0.0
        largest = np.abs(arguments.dout).max((2, 3))
        if arguments.dlse is not None:
            largest = np.maximum(largest, np.abs(arguments.dlse).max(2))
        seen = np.maximum.accumulate(largest[:, ::-1], 1)[:, ::-1]  # by later queries
        seen = seen if case.causal else seen[:, :1]
        got, truth = emulator.run(arguments, sources=sources, seed=2), arguments.truth()
        of_rows = {
            "dquery": (truth.dq, largest),
            "dkey": (truth.dk, seen),
            "dvalue": (truth.dv, seen),
        }
        for name, (want, scale) in of_rows.items():
            error = np.abs(got[name] - want).max((2, 3))
            assert (error <= 1e-5 * scale + 1e-30).all(), name
