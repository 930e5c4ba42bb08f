"""deterministic=True: the same call gives the same bits, however threads are scheduled."""

from __future__ import annotations

import numpy as np
import pytest

from .cases import Case
from .test_conformance import refuses

REPEATED = (
    Case("plain", T=200, S=330, deterministic=True, with_lse=True),
    Case("gqa causal", T=300, S=300, N=8, K=2, causal=True, deterministic=True),
    Case("bias summed", T=150, S=200, N=4, bias="111s", deterministic=True),
    Case("dropout sinks", T=150, S=200, dropout=0.3, sinks=True, deterministic=True),
    Case("bfloat16 mqa", T=300, S=200, N=4, K=1, dtype="bfloat16", deterministic=True),
)


@pytest.mark.parametrize("case", REPEATED, ids=lambda case: case.name.replace(" ", "-"))
def test_bitwise_repeat(case, backend):
    if refuses(case, backend):
        return
    arguments = case.draw()
    first = arguments.run(backend)
    for _ in range(20):
        for name, value in arguments.run(backend).items():
            np.testing.assert_array_equal(value, first[name], err_msg=name)
