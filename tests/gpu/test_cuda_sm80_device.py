"""The kernels of mma.sync on a GPU since Ampere, Hopper's too: every conformance case, and more."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jax_flash import _gpu

from .. import decode_cases
from ..cases import BOTTOM_RIGHT, Case, fit
from ..compare import compare, compare_parts
from ..conformance_cases import CASES as CONFORMANCE
from ..decode_cases import CASES as DECODING
from ..decode_cases import UNALIGNED
from ..decode_cases import Case as DecodeCase
from ..emulated_cases import C
from ..sm80_cases import GRADIENTS, SMALL_CASES, SPLIT_CASES, F

_GPU = _gpu.spec.present()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        _GPU is None or _GPU.arch not in _gpu.sm80.Sm80.architectures,
        reason="needs a GPU of sm_80 or later",
    ),
]

# More of both passes, of sizes that take the emulator too long.
MORE_GRADIENTS = (
    F("float32 grouped", causal=True, N=4, K=2, T=300, S=400),
    F("float32 of 256 lengths", H=256, Hv=136, q_lengths=(266,), T=300, N=1, kv_lengths=(80,),
      window=(60, 5), deterministic=True),
    F("float32 of 512 causal", H=512, Hv=20, T=140, S=150, N=1, causal=True),
    C("head dim 512 long", H=512, T=700, S=900, N=2, causal=True, align=BOTTOM_RIGHT),
    C("head dim 300, everything", H=300, Hv=20, T=170, S=270, N=1, dropout=0.2, mask="b1ts",
      bias="11ts", sinks=True, segments="packed", softcap=3.0, dtype="float16"),
    C("head dim 512 segments", H=512, T=270, S=250, N=1, segments="returning",
      deterministic=True),
)  # fmt: skip

OF_PARTS = (*SPLIT_CASES, *SMALL_CASES, *(case for _, case in GRADIENTS), *MORE_GRADIENTS)


@pytest.mark.parametrize(
    "case",
    [*CONFORMANCE, *(x for x in OF_PARTS if x.dtype != "float32")],
    ids=lambda case: case.name.replace(" ", "-"),
)
def test_conformance(case: Case):
    case = fit(case, "cuda")
    with _gpu.prefer("sm80"):
        arguments = case.draw()
        got = arguments.run("cuda")
        again = arguments.run("cuda") if case.deterministic else got
    compare(arguments, got)
    for name in got:
        np.testing.assert_array_equal(again[name], got[name], err_msg=name)


@pytest.mark.parametrize("precision", ["high", "highest"])
@pytest.mark.parametrize(
    "case",
    [x for x in (*CONFORMANCE, *OF_PARTS) if x.dtype == "float32"],
    ids=lambda case: case.name.replace(" ", "-"),
)
def test_conformance_of_float32(case: Case, precision: str):
    arguments = dataclasses.replace(case, precision=precision).draw()
    # Which wide dims the backward takes depends on the GPU's shared memory.
    small = _GPU is not None and _GPU.shared_bytes < 227 << 10
    gradients = not small or max(case.H, case.value_dim) <= 128
    got = arguments.run("cuda", gradients=gradients)
    compare_parts(arguments, got, gradients=gradients)


DECODING_IN_16_BITS = [
    dataclasses.replace(fitted, name=f"{case.name}, in 16 bits")
    for case in DECODING
    if (fitted := decode_cases.fit(case, "cuda")) != case
]


@pytest.mark.parametrize(
    "case",
    [*DECODING, *UNALIGNED, *DECODING_IN_16_BITS],
    ids=lambda case: case.name.replace(" ", "-"),
)
def test_decoding(case: DecodeCase, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_gpu.decode, "_MOST_IN_CLUSTER", 0)  # clusters are Hopper's
    arguments = case.draw()
    with _gpu.prefer("decode_sm80"):
        got = arguments.run("cuda")
    decode_cases.compare(arguments, got)
