"""The kernels of float8 on a Hopper GPU, beside backend "xla"."""

from __future__ import annotations

import pytest

from ..float8_cases import CALLS, LSE, QUANTISED, Float8Call, agree, agree_in_bits
from ..hopper import NEEDS_HOPPER

pytestmark = NEEDS_HOPPER

CAUSAL = {"is_causal": True}
LARGE = {  # more units than a GPU runs at once, and more blocks than are in flight
    "many units, 128": Float8Call(513, 513, 128, heads=(32, 8), batch=8, options=CAUSAL),
    "many units, 64": Float8Call(2049, 2049, 64, heads=(16, 4), batch=2),
    "quantised, causal, 128": Float8Call(1500, 1500, 128, quantize=True, options=CAUSAL),
}


@pytest.mark.parametrize("name", [*CALLS, *LARGE])
def test_it_is_attention_of_values_times_scales(name: str):
    call = (CALLS | LARGE)[name]
    agree(call.run("cuda"), call.run("xla"), lse=LSE)


@pytest.mark.parametrize("name", QUANTISED)
def test_bits_that_it_quantises_to_are_those_of_xla(name: str):
    agree_in_bits(QUANTISED[name].run("cuda"), QUANTISED[name].run("xla"))
