"""Forward passes of 16 bits whose units are in parts along their keys, run by tests/emulator."""

from __future__ import annotations

import numpy as np
import pytest

from jax_flash import _native

from ..cases import BOTTOM_RIGHT, Case
from ..compare import compare
from ..emulated_cases import IN_ORDER, C
from ..emulator import Emulator
from ..other_kernels import AsInParts

# A call, and multiprocessors. The last part is shorter; of causal units most rows see one alone.
CASES = (
    (C("full", T=70, S=1500), 12),
    (C("causal", T=1088, S=1088, N=1, causal=True, dtype="float16"), 34),
    (C("causal at the end 128", T=100, S=1100, H=128, K=1, causal=True, align=BOTTOM_RIGHT), 8),
    (C("heads packed", T=20, S=1030, N=8, K=2, H=96, Hv=72, causal=True, align=BOTTOM_RIGHT), 9),
    (C("rows that see nothing", T=1060, S=1024, N=1, causal=True, align=BOTTOM_RIGHT), 34),
    (C("a part walked again", T=60, S=1100, H=128, N=1, spread=150.0), 2),
    (C("more parts than lanes of a row", T=20, S=8800, N=1, H=8), 17),
)  # fmt: skip


@pytest.mark.parametrize(("case", "multiprocessors"), CASES, ids=lambda x: getattr(x, "name", ""))
def test_case(case: Case, multiprocessors: int, emulator: Emulator):
    """Gradients too, which start from the lse of whole units. In another order the same bits."""
    arguments = case.draw()
    in_parts = AsInParts(arguments, multiprocessors)
    got = emulator.run(in_parts, seed=IN_ORDER)
    compare(arguments, got)
    again = emulator.run(in_parts, seed=2, gradients=False)
    for name in again:
        np.testing.assert_array_equal(again[name], got[name], err_msg=name)


def test_fewer_multiprocessors_than_planned(emulator: Emulator):
    """All units are parts, of one each."""
    arguments = C("one part", T=70, S=1030, causal=True, align=BOTTOM_RIGHT).draw()
    got = emulator.run(AsInParts(arguments, 8, there=3), gradients=False)
    compare(arguments, got, gradients=False)


def test_parts_that_see_nothing_are_not_read(emulator: Emulator):
    """What they store, or would, is NaN here."""
    sources, file = _native.kernel_sources(), "sm90/forward_units.cuh"
    for zero, poison in (
        ("empty ? 0.0f", "empty ? kNan"),
        ("typename Piece::Type piece{};", "typename Piece::Type piece = Piece::filled(kNan);"),
    ):
        assert zero in sources[file]
        sources[file] = sources[file].replace(zero, poison)
    case, multiprocessors = CASES[1]
    arguments = case.draw()
    got = emulator.run(AsInParts(arguments, multiprocessors), sources=sources, gradients=False)
    compare(arguments, got, gradients=False)


def test_parts_count_by_their_sums(emulator: Emulator):
    sources, file = _native.kernel_sources(), "sm90/forward_join.cuh"
    weight = "ptx::exp2_approx((own_lse - base) * kLog2E)"
    assert weight in sources[file]
    sources[file] = sources[file].replace(weight, "1.0f")
    case, multiprocessors = CASES[0]
    arguments = case.draw()
    got = emulator.run(AsInParts(arguments, multiprocessors), sources=sources, gradients=False)
    with pytest.raises(AssertionError):
        compare(arguments, got, gradients=False)


def test_a_value_of_no_weight_that_is_not_finite(emulator: Emulator):
    """A part counts though its weight is 0."""
    arguments = C("no weight", T=40, S=1100, N=1, scale=20.0).draw()
    arguments.arrays["value"][:, 1090, 0, 5] = np.nan
    got = emulator.run(AsInParts(arguments, 2), gradients=False)["out"].astype(np.float64)
    assert (np.isnan(got) == (np.arange(64) == 5)).all()


def test_hidden_values_that_are_not_finite(emulator: Emulator):
    """Rows of a part that met them are computed again, whole, behind what joins parts."""
    case = C("hidden", T=64, S=1100, H=128, N=1, causal=True, align=BOTTOM_RIGHT)
    arguments = case.draw()
    truth = arguments.truth(gradients=False)
    arguments.arrays["value"][:, 1070, 0, 5] = np.nan
    arguments.arrays["value"][:, 40, 0, 7] = 3e38
    got = emulator.run(AsInParts(arguments, 2), gradients=False)["out"].astype(np.float64)
    seen = np.arange(64) + 1100 - 64 >= 1070
    assert (np.isnan(got).any((0, 2, 3)) == seen).all()
    others = [i for i in range(128) if i not in (5, 7)]
    assert np.abs(got - truth.out)[:, ~seen][..., others].max() < 2e-2
    assert (got[:, ~seen, 0, 7] > 1e30).all()
