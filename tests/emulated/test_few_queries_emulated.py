"""Forward passes of few queries on the kernels of decoding, run by tests/emulator."""

from __future__ import annotations

import numpy as np
import pytest

from ..cases import BOTTOM_RIGHT, Case
from ..compare import compare_parts
from ..conformance_cases import case_id
from ..emulated_cases import C, check_orders
from ..emulator import Emulator

CASES = (
    C("one query", T=1, N=4, K=2, batch=(3,), S=300),
    C("one query, lengths, sinks", T=1, N=8, K=1, H=128, batch=(4,), kv_lengths=(200, 0, 7, 130),
      sinks=True, softcap=3.0, dtype="float16"),
    C("one query, a window", T=1, window=(70, 0), align=BOTTOM_RIGHT, batch=(2,),
      kv_lengths=(200, 60)),
    C("one query, many rows", T=1, N=3, K=1, batch=(70,), S=130, H=72, Hv=24),
    C("a cluster of one row", T=1, N=12, K=1, S=700, H=40, Hv=24),
    C("two queries", T=2, N=6, K=2, batch=(2,), S=200, kv_lengths=(200, 3)),
    C("two queries, causal", T=2, N=6, K=2, batch=(2,), causal=True, align=BOTTOM_RIGHT,
      kv_lengths=(200, 3)),
    C("three queries, a window", T=3, N=2, H=128, window=(50, 0), align=BOTTOM_RIGHT, sinks=True),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_case(case: Case, emulator: Emulator):
    check_orders(case.draw(), emulator.run)


def test_float32(emulator: Emulator):
    case = C("float32", T=3, N=4, K=2, H=72, Hv=36, kv_lengths=(170,), dtype="float32",
             precision="high")  # fmt: skip
    arguments = case.draw()
    compare_parts(arguments, emulator.run(arguments, gradients=False), gradients=False)


@pytest.mark.parametrize(("N", "lengths"), [(2, (300, 1)), (12, (300,))])
def test_sums_of_the_largest_values_stay_in_range(N, lengths, emulator: Emulator):
    """As those of the forward kernels do: weights of bfloat16 are 2^-32 at most."""
    rows = (len(lengths),)
    arguments = C("largest", T=1, N=N, K=1, batch=rows, S=300, kv_lengths=lengths).draw()
    value = arguments.arrays["value"]
    arguments.arrays["value"] = np.full_like(value, 3e38)
    got = emulator.run(arguments, gradients=False)
    np.testing.assert_allclose(got["out"].astype(np.float32), 3e38, rtol=2**-7)
    np.testing.assert_allclose(got["lse"], arguments.truth(gradients=False).lse, atol=1e-5)
