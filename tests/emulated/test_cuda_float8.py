"""The kernels of float8 for Hopper, run by tests/emulator, beside backend "xla"."""

from __future__ import annotations

import numpy as np
import pytest

from jax_flash import _native

from ..emulator import Emulator
from ..float8_cases import CALLS, QUANTISED, agree, agree_in_bits


@pytest.mark.parametrize("name", CALLS)
def test_it_is_attention_of_values_times_scales(name: str, emulator: Emulator):
    call = CALLS[name]
    want, got = call.run("xla"), emulator.run(call)
    assert np.isnan(want["out"]).any() == ("segments" in name or call.bad_value is not None)
    agree(got, want)
    again = emulator.run(call, seed=2)  # another order of threads and copies
    for part in got:
        assert again[part].tobytes() == got[part].tobytes(), part


@pytest.mark.parametrize("name", QUANTISED)
def test_bits_that_it_quantises_to_are_those_of_xla(name: str, emulator: Emulator):
    call = QUANTISED[name]
    want, got = call.run("xla"), emulator.run(call, seed=2)
    agree_in_bits(got, want)
    assert ("no rows" in name) == (want["values"].size == 0)


def test_keys_of_a_column_lie_as_weights_do(emulator: Emulator):
    """In their own order most weights would meet the value of another key."""
    sources, file = _native.kernel_sources(), "sm90_float8/slots.cuh"
    slots = "return slot / 16 * 16 + slot % 4 / 2 * 8 + slot % 16 / 4 * 2 + slot % 2;"
    assert slots in sources[file]
    sources[file] = sources[file].replace(slots, "return slot;")
    call = CALLS["quantised, 64"]
    with pytest.raises(AssertionError):
        agree(emulator.run(call, sources=sources), call.run("xla"))


def test_parts_of_a_unit_count_by_their_sums(emulator: Emulator):
    sources, file = _native.kernel_sources(), "sm90/forward_join.cuh"
    weight = "ptx::exp2_approx((own_lse - base) * kLog2E)"
    assert weight in sources[file]
    sources[file] = sources[file].replace(weight, "1.0f")
    call = CALLS["parts, 64"]
    with pytest.raises(AssertionError):
        agree(emulator.run(call, sources=sources), call.run("xla"))
