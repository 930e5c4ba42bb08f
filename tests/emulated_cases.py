"""Cases that the emulator runs in seconds, and the orders of threads that it runs them in."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from .cases import Arguments, Case
from .compare import compare

IN_ORDER, BACKWARDS = 0, 1  # seeds

C = functools.partial(Case, T=150, S=200, N=2, H=64, batch=(1,), dtype="bfloat16", with_lse=True)
H = functools.partial(C, dtype="float32", precision="highest")


def check_orders(arguments: Arguments, run: Callable[..., dict[str, np.ndarray]]) -> None:
    """Checks the results of threads and copies in order, and that other orders give the same."""
    case = arguments.case
    got = run(arguments, seed=IN_ORDER)
    compare(arguments, got)
    # Nothing depends on the order of threads and copies, but sums of dq on that of units, and of
    # grouped heads those of dk and dv.
    by_units = set() if case.deterministic else {"dquery"}
    if by_units and case.kv_heads != case.N:
        by_units |= {"dkey", "dvalue"}
    for seed in (BACKWARDS, 2) if case.deterministic else (2,):
        again = run(arguments, seed=seed)
        for name in got:
            if name not in by_units:
                np.testing.assert_array_equal(again[name], got[name], err_msg=name)
            else:
                first, second = (x[name].astype(np.float32) for x in (got, again))
                np.testing.assert_allclose(second, first, atol=2**-6 * np.abs(first).max())
