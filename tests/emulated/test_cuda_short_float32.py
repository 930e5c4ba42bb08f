"""Short rows of float32 in parts of bfloat16, several of them documents of one."""

from typing import Any

import pytest

from ..cases import Case
from ..compare import compare_copies
from ..emulator import Emulator
from ..other_kernels import AsIfManyRows


@pytest.mark.parametrize(
    "of",
    [{"causal": True}, {"q_lengths": (3, 12, 0, 7), "kv_lengths": (12, 5, 9, 0)}],
    ids=("causal", "lengths"),
)
def test_case(of: dict[str, Any], emulator: Emulator):
    case = Case("short", T=12, S=12, N=2, H=32, batch=(4,), dtype="float32", **of)
    arguments = case.draw()
    compare_copies(arguments, emulator.run(AsIfManyRows(arguments, 4)))
