"""The kernels of mma.sync, for every GPU since Ampere; those of decoding on a GPU alone.

Their text runs on the CPU (tests/emulator), and they themselves on any such GPU, Hopper's too.
tests/test_cuda_compile.py compiles them for each architecture.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest

from jax_flash import _gpu, _native

from . import decode_cases, fake_cuda
from .cases import BOTTOM_RIGHT, Case, fit
from .cases import CASES as CONFORMANCE
from .decode_cases import CASES as DECODING
from .decode_cases import Case as DecodeCase
from .emulator import Emulator
from .test_conformance import compare, refuses
from .test_cuda_emulated import BACKWARDS, IN_ORDER
from .test_hidden_values import poisoned

EMULATED = pytest.mark.skipif(
    _native.available("cuda") is not None or _native._has_driver() or fake_cuda.COMPILER is None,
    reason="needs the CUDA half of the module, a C++ compiler, and no true driver",
)

C = functools.partial(Case, T=150, S=200, N=2, H=64, batch=(1,), dtype="bfloat16", with_lse=True)
CASES = (
    # Tilings.
    C("head dim 64"),
    C("head dim 72 value 16", H=72, Hv=16, causal=True),
    C("head dim 128", H=128, T=260, S=300, N=4, K=2, causal=True),
    C("head dim 192 value 128", H=192, Hv=128, S=300, T=70, align=BOTTOM_RIGHT, causal=True),
    C("head dim 256", H=256, S=130, T=70, N=1),
    C("head dim 33 value 7", H=33, Hv=7, N=4, K=2),
    C("head dim 100 value 250", H=100, Hv=250, T=70, causal=True),
    C("head dim 1", H=1, Hv=1, T=9),
    C("float16", dtype="float16", H=128, N=4, K=1, causal=True),
    # Which pairs there are.
    C("window", window=(70, 20), T=300, S=300, softcap=5.0),
    C("negative scale", softcap=0.5, scale=-0.3),
    C("lengths", batch=(3,), q_lengths=(150, 0, 77), kv_lengths=(200, 50, 0), sinks=True),
    C("segments", segments="returning", T=97, S=500, N=1, causal=True),
    C("positions", positions="striped", T=200, S=300, causal=True),
    C("positions extreme", positions="extreme", H=128, window=(50, 2**31 - 3), T=140, N=1),
    # Masks, biases, dropout.
    C("mask", mask="bnts", T=130, S=260),
    C("mask of keys", mask="b11s", mask_density=0.4, causal=True),
    C("blocks", T=130, S=260, N=4, K=2, blocks=("1n", 48), causal=True),
    C("bias", bias="bnts", H=128, batch=(2,), T=130),
    C("bias odd float32", bias="1n1s", bias_dtype="float32", batch=(2,), T=70, S=131, softcap=2.0),
    C("everything", dropout=0.2, mask="b1ts", bias="11ts", sinks=True, segments="packed",
      positions="permuted", window=(90, 5), kv_lengths=(180,), N=4, K=2),
)  # fmt: skip


compare_forward = functools.partial(compare, gradients=False)


@pytest.fixture(scope="module")
def a100(emulator: Emulator):
    """The forward pass of some arguments by the kernels that an A100 would get."""
    return functools.partial(emulator.run, gpu="A100", gradients=False)


@EMULATED
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_case(case: Case, a100):
    arguments = case.draw()
    got = a100(arguments, seed=IN_ORDER)
    compare_forward(arguments, got)
    again = a100(arguments, seed=BACKWARDS)
    for name in got:
        np.testing.assert_array_equal(again[name], got[name], err_msg=name)


@EMULATED
@pytest.mark.parametrize(("dim", "dtype"), [(64, "bfloat16"), (128, "float16")])
def test_weights_that_overflow(dim: int, dtype: str, a100):
    """Rows that are walked again: logits that differ by several hundred."""
    arguments = C("overflow", H=dim, T=100, S=400, N=1, spread=150.0, dtype=dtype).draw()
    compare_forward(arguments, a100(arguments, seed=2))


@EMULATED
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_poison_reaches_no_result(poison: float, a100):
    """Rows that share blocks with what they may not see are computed again."""
    for case in (
        C("segments", T=90, S=100, segments="shuffled", kv_lengths=(70,), sinks=True),
        C("lengths", T=90, S=100, H=128, N=4, K=2, q_lengths=(64,), kv_lengths=(29,), causal=True),
    ):
        clean = case.draw()
        compare_forward(clean, a100(poisoned(clean, poison)))


@EMULATED
def test_poison_stays_with_those_who_see_it(a100):
    arguments = C("future", T=90, S=90, causal=True).draw()
    want = arguments.truth(gradients=False)
    arguments.arrays["value"][:, 70] = np.nan
    out = a100(arguments)["out"].astype(np.float64)
    assert np.isnan(out[:, 70:]).all()
    assert np.abs(out[:, :70] - want.out[:, :70]).max() < 2e-2


HIDDEN = slice(128, 256)  # two or more whole blocks of keys


def _hide(case: Case):
    """Arguments of which no query sees the keys HIDDEN."""
    arguments = case.draw()
    arrays = arguments.arrays
    if case.mask:
        arrays["mask"][..., HIDDEN] = False
    if case.segments:
        arrays["query_segment_ids"][:] = 1
        arrays["key_value_segment_ids"][:] = 1
        arrays["key_value_segment_ids"][:, HIDDEN] = 2
    if case.positions:
        arrays["query_positions"][:] = 1000
        arrays["key_value_positions"][:] = 1000
        arrays["key_value_positions"][:, HIDDEN] = 1001
    return arguments


@EMULATED
@pytest.mark.parametrize(
    "case",
    [
        C("causal", T=128, S=256, causal=True),
        C("window", T=64, S=300, window=(None, 50)),
        C("lengths", S=300, kv_lengths=(128,)),
        C("mask", S=300, mask="b1ts"),
        C("segments", S=300, segments="packed"),
        C("positions", S=300, positions="offset", causal=True),
    ],
    ids=lambda case: case.name,
)
def test_hidden_blocks_are_skipped(case: Case, a100):
    """NaN in them would reach every row, since none is computed again here."""
    sources = _native.kernel_sources()
    rows = sources["sm80/forward_rows.cuh"]
    assert "if (nonfinite == 0) return;" in rows
    sources["sm80/forward_rows.cuh"] = rows.replace("if (nonfinite == 0) return;", "return;")
    arguments = _hide(case)
    hidden = slice(128, None) if case.name in ("causal", "window", "lengths") else HIDDEN
    want = arguments.truth(gradients=False).out
    arguments.arrays["value"][:, hidden] = np.nan
    out = a100(arguments, sources=sources)["out"].astype(np.float64)
    assert np.abs(out - want).max() < 2e-2


def test_a_family_may_be_preferred():
    before = _gpu.FAMILIES
    with _gpu.prefer("sm80"):
        assert next(family.name for family in _gpu.FAMILIES) == "sm80"
    assert before == _gpu.FAMILIES
    unknown = pytest.raises(ValueError, match=r"family must be one of sm90, .*, not 'sm70'")
    with unknown, _gpu.prefer("sm70"):
        pass


# ---- on a GPU ------------------------------------------------------------------------------------

_GPU = _gpu.spec.present()


@pytest.mark.gpu
@pytest.mark.skipif(
    _GPU is None or _GPU.arch not in _gpu.sm80.Sm80.architectures,
    reason="needs a GPU of sm_80 or later",
)
@pytest.mark.parametrize("case", CONFORMANCE, ids=lambda case: case.name.replace(" ", "-"))
def test_conformance(case: Case):
    case = fit(case, "cuda")
    if refuses(case, "cuda"):
        return
    arguments = case.draw()
    with _gpu.prefer("sm80"):
        got = arguments.run("cuda", gradients=False)
    compare_forward(arguments, got)


@pytest.mark.gpu
@pytest.mark.skipif(
    _GPU is None or _GPU.arch not in _gpu.sm80.Sm80.architectures,
    reason="needs a GPU of sm_80 or later",
)
@pytest.mark.parametrize("case", DECODING, ids=lambda case: case.name.replace(" ", "-"))
def test_decoding(case: DecodeCase):
    arguments = decode_cases.fit(case, "cuda").draw()
    with _gpu.prefer("decode_sm80"):
        got = arguments.run("cuda")
    decode_cases.compare(arguments, got)
