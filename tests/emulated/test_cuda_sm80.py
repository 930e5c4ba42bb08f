"""The kernels of mma.sync, for every GPU since Ampere; those of decoding on a GPU alone.

Their text runs on the CPU (tests/emulator), and they themselves on any such GPU, Hopper's too.
tests/compiled has them compiled for each architecture.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from jax_flash import _gpu, _native
from jax_flash._gpu.workspaces import blocks, boxes
from jax_flash._problem import Problem, Shapes

from .. import decode_cases, fake_cuda
from ..cases import BOTTOM_RIGHT, Arguments, Case, fit
from ..conformance_cases import CASES as CONFORMANCE
from ..decode_cases import CASES as DECODING
from ..decode_cases import UNALIGNED
from ..decode_cases import Case as DecodeCase
from ..emulator import Emulator
from ..meaning.test_conformance import compare
from ..meaning.test_hidden_values import poisoned
from ..tolerance import check, max_error, tf32
from .test_cuda_emulated import BACKWARDS, IN_ORDER

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
# float32 in parts, and warps that share their rows.
F = functools.partial(C, dtype="float32", T=70, S=90, precision="high")
SPLIT_CASES = (
    F("float32", causal=True),
    F("float32 odd", H=33, Hv=7, precision="highest", dropout=0.2, mask="b1ts", bias="11ts",
      sinks=True, segments="packed", positions="permuted", window=(90, 5), kv_lengths=(80,), N=4,
      K=2),
    F("float32 of 256", H=200, Hv=130, q_lengths=(66,), softcap=3.0, sinks=True, precision="high"),
    C("head dim 512", H=512, T=70, S=100, N=1, causal=True),
    C("head dim 300 value 20", H=300, Hv=20, T=70, S=90, dtype="float16", segments="packed"),
)  # fmt: skip
# Tilings of GPUs with less shared memory.
SMALL_CASES = (
    C("head dim 20 value 500", H=20, Hv=500, T=70, S=50, N=1, dropout=0.2, mask="11ts"),
    F("float32 of 512", H=512, Hv=260, T=40, S=50, N=1, precision="highest", bias="11ts"),
)


# The backward pass: every way through it, on GPUs with the tilings that take it.
GRADIENTS = (
    ("A100", C("head dim 64, sums in dq", T=128, S=140, K=1, causal=True)),
    ("A100", C("head dim 128, lengths", H=128, T=70, batch=(2,), q_lengths=(70, 0), N=2, K=1,
       kv_lengths=(150, 200), window=(90, 10), align=BOTTOM_RIGHT)),
    ("A100", C("head dim 192, everything", H=192, Hv=136, dropout=0.2, mask="b1ts", bias="11ts",
       T=90, S=100, N=1, sinks=True, segments="packed", softcap=3.0)),
    ("A100", C("bias stored", H=128, bias="bnts", S=132, T=90, causal=True, bias_hides=True, K=1)),
    ("A100", C("bias shared", H=128, bias="1nts", batch=(2,), S=132, T=90, window=(50, 9), K=1,
       deterministic=True)),
    ("A100", C("mask and bias of keys", mask="bnts", bias="1n1s", bias_dtype="float32", S=131,
       T=70, batch=(2,), deterministic=True)),
    ("L4", C("head dim 128, segments", H=128, S=300, N=1, segments="returning", softcap=5.0,
       deterministic=True)),
    ("L4", C("head dim 256, positions", H=256, T=130, S=100, N=1, positions="permuted",
       window=(90, 5), deterministic=True)),
    ("L4", C("score gate dropout", score="gate", H=128, T=70, S=90, N=2, K=1, dropout=0.2,
        bias="1nts", causal=True)),
    ("A100", C("score gate wide", score="gate", H=160, Hv=136, T=70, S=90, dropout=0.3, causal=True,
        mask="b1ts", bias="11ts", sinks=True, dtype="float16")),
    ("RTX 5090", C("head dim 33 value 7", H=33, Hv=7, T=70, S=90, N=4, K=2, dropout=0.4,
       mask="b1t1", dtype="float16", bias="1n11")),
    # float32 in parts; four warps that share keys.
    ("H100", F("float32 highest, bias stored", bias="bnts", S=92, causal=True, bias_hides=True,
       precision="highest", N=1)),
    ("H100", F("float32 highest, softcap 30", softcap=30.0, spread=4.0, precision="highest", T=17,
       S=33, N=3, K=3, H=7, bias="bnts", bias_dtype="bfloat16", kv_lengths=(19,))),
    ("H100", F("float32 of 128, everything", H=100, Hv=128, dropout=0.2, mask="b1ts", bias="11ts",
       sinks=True, segments="packed", softcap=3.0, N=1)),
    ("L4", F("float32 odd, highest", H=33, Hv=130, precision="highest", positions="permuted",
       window=(60, 5), T=40, S=50, K=1, bias="1n11", blocks=("1n", 16))),
    ("L4", F("float32 score gate", score="gate", H=72, T=40, dropout=0.3, bias="1n1s", N=1,
       causal=True)),
    ("H100", F("float32 of 500, highest", H=500, Hv=260, T=40, S=30, N=1, precision="highest",
       bias="1n1s", deterministic=True)),
    ("H100", C("head dim 512, gqa", H=512, T=70, S=70, N=2, K=1, causal=True)),
    ("A100", C("head dim 511 value 264", H=511, Hv=264, T=70, S=50, N=1, window=(40, 10),
       positions="permuted", deterministic=True)),
    ("L4", C("value dim 512", H=20, Hv=512, T=70, S=50, N=1, score="gate", dropout=0.2,
       bias="11ts", causal=True)),
)  # fmt: skip
# On a GPU alone: more of both.
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


def compare_parts(
    arguments: Arguments, got: dict[str, np.ndarray], *, gradients: bool = True
) -> None:
    """As `compare`; products of float32 in two parts have to be much more exact than TF32's."""
    case = arguments.case
    if case.dtype != "float32" or case.precision == "highest":
        compare(arguments, got, gradients=gradients)
        return
    arrays = arguments.arrays
    rounded = dataclasses.replace(
        arguments,
        arrays=arrays | {name: tf32(arrays[name]) for name in ("query", "key", "value")},
        dout=tf32(arguments.dout),
    )
    plain, truth = (x.truth(gradients=gradients) for x in (rounded, arguments))
    # Else the case could not tell (one where nothing is seen is all zeros).
    assert max_error(plain.out, truth.out) >= 2**-15 * np.abs(truth.out).max()
    fields = {"out": "out"} | ({"lse": "lse"} if case.with_lse else {})
    for name in arguments.differentiable if gradients else ():
        fields[f"d{name}"] = {"query": "dq", "key": "dk", "value": "dv"}.get(name, f"d{name}")
    for name, field in fields.items():
        # A sum that cancels keeps half a unit of two parts' 16 bits, not of float32's.
        summed = 2**5 * truth.summed.get(field, 0.0) if gradients else 0.0
        want, coarse = getattr(truth, field), getattr(plain, field)
        precision = str(arrays["bias"].dtype) if name == "dbias" else "float32"
        check(name, got[name], want, coarse, precision, 1 / 8, summed)


compare_forward = functools.partial(compare_parts, gradients=False)


@pytest.fixture(scope="module")
def a100(emulator: Emulator):
    """The forward pass of some arguments by the kernels that an A100 would get."""
    return functools.partial(emulator.run, gpu="A100", gradients=False)


@pytest.fixture(scope="module")
def ada(emulator: Emulator):
    """The same that an RTX 4090 would get, with 99 KB of shared memory."""
    return functools.partial(emulator.run, gpu="RTX 4090", gradients=False)


@EMULATED
@pytest.mark.parametrize("case", CASES + SPLIT_CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_case(case: Case, a100):
    check_case(case, a100)


@EMULATED
@pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_case_in_little_shared_memory(case: Case, ada):
    check_case(case, ada)


def check_case(case: Case, run) -> None:
    arguments = case.draw()
    got = run(arguments, seed=IN_ORDER)
    compare_forward(arguments, got)
    again = run(arguments, seed=BACKWARDS)
    for name in got:
        np.testing.assert_array_equal(again[name], got[name], err_msg=name)


@EMULATED
@pytest.mark.parametrize(
    ("dim", "dtype"), [(64, "bfloat16"), (128, "float16"), (264, "bfloat16"), (64, "float32")]
)
def test_weights_that_overflow(dim: int, dtype: str, a100):
    """Rows that are walked again: logits that differ by several hundred."""
    precision = "high" if dtype == "float32" else None
    case = C("overflow", H=dim, T=70, S=200, N=1, spread=150.0, dtype=dtype, precision=precision)
    arguments = case.draw()
    compare_forward(arguments, a100(arguments, seed=2))


@EMULATED
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_poison_reaches_no_result(poison: float, a100):
    """Rows that share blocks with what they may not see are computed again."""
    cases = (
        C("segments", T=90, S=100, segments="shuffled", kv_lengths=(70,), sinks=True),
        C("lengths", T=90, S=100, H=128, N=4, K=2, q_lengths=(64,), kv_lengths=(29,), causal=True),
        C("shared rows", T=40, S=50, H=20, Hv=264, N=1, kv_lengths=(29,), causal=True),
        F("float32", T=40, S=50, N=1, segments="shuffled", kv_lengths=(29,), precision="highest"),
    )
    for case in cases if np.isnan(poison) else cases[:1]:  # one test finds either
        clean = case.draw()
        compare_forward(clean, a100(poisoned(clean, poison)))


@EMULATED
@pytest.mark.parametrize(
    ("case", "column"),
    [
        (C("future", T=90, S=90, causal=True), slice(None)),
        # Which the warp does not have that computes rows again.
        (C("future wide", T=90, S=90, H=20, Hv=264, N=1, causal=True), slice(262, 263)),
    ],
    ids=lambda x: x.name if isinstance(x, Case) else "",
)
def test_poison_stays_with_those_who_see_it(case: Case, column: slice, a100):
    arguments = case.draw()
    want = arguments.truth(gradients=False)
    arguments.arrays["value"][:, 70, :, column] = np.nan
    out = a100(arguments)["out"].astype(np.float64)
    assert np.isnan(out[:, 70:, :, column]).all()
    assert np.abs(out[:, :70] - want.out[:, :70]).max() < 2e-2


@EMULATED
@pytest.mark.parametrize(
    ("gpu", "case"),
    GRADIENTS,
    ids=[f"{gpu} {case.name}".replace(" ", "-") for gpu, case in GRADIENTS],
)
def test_gradients(gpu: str, case: Case, emulator: Emulator):
    arguments = case.draw()
    got = emulator.run(arguments, seed=2, gpu=gpu)
    compare_parts(arguments, got)
    if case.deterministic:
        again = emulator.run(arguments, seed=BACKWARDS, gpu=gpu)
        for name in got:
            np.testing.assert_array_equal(again[name], got[name], err_msg=name)


@EMULATED
def test_poison_reaches_no_gradient(emulator: Emulator):
    """Rows of dq, dk and dv that share blocks with what they may not see are computed again."""
    for case in (
        C("hidden", T=90, S=100, H=128, N=2, K=1, segments="shuffled", q_lengths=(80,),
          kv_lengths=(70,), causal=True),
        F("hidden float32", T=40, S=50, N=1, segments="shuffled", q_lengths=(30,),
          kv_lengths=(40,), causal=True, precision="highest"),
    ):  # fmt: skip
        clean = case.draw()
        compare(clean, emulator.run(poisoned(clean, np.nan), gpu="L4"))


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
    results = sources["sm80/forward_results.cuh"]
    assert "if (nonfinite == 0) return;" in results
    sources["sm80/forward_results.cuh"] = results.replace("if (nonfinite == 0) return;", "return;")
    arguments = _hide(case)
    hidden = slice(128, None) if case.name in ("causal", "window", "lengths") else HIDDEN
    want = arguments.truth(gradients=False).out
    arguments.arrays["value"][:, hidden] = np.nan
    out = a100(arguments, sources=sources)["out"].astype(np.float64)
    assert np.abs(out - want).max() < 2e-2


@pytest.mark.parametrize("arch", _gpu.sm80.Sm80.architectures)
def test_tilings_fit_every_gpu_and_cover_every_column(arch: str):
    """What warps that share rows read and write, by the arithmetic of forward_products.cuh."""
    gpu = _gpu.GpuSpec(arch, arch)
    problems = [
        Problem(dtype, 1.0, precision=precision, terms=terms)
        for dtype, precision in [
            ("bfloat16", "default"),
            ("float32", "default"),
            ("float32", "highest"),
        ]
        for terms in [(), ("sinks",)]
    ]
    sizes = (1, 16, 20, 64, 65, 100, 128, 129, 192, 200, 256, 257, 300, 320, 400, 511, 512)
    for problem, head_dim, value_dim in itertools.product(problems, sizes, sizes):
        shapes = Shapes(1, 512, 512, 2, 2, head_dim, value_dim)
        tiling = _gpu.sm80.choose_forward(problem, shapes, gpu)
        assert tiling.shared_bytes <= gpu.shared_bytes
        assert tiling.threads in (128, 256)
        # Rows are copied by 128 threads with 16 bytes each, rows of boxes side by side.
        assert tiling.block_kv % 16 == tiling.block_q % 16 == 0
        warps = tiling.value_warps
        steps = blocks(blocks(head_dim, 16), warps)
        columns = 16 * blocks(blocks(value_dim, warps), 16)
        for dim, covered in ((head_dim, 16 * steps * warps), (value_dim, columns * warps)):
            assert dim <= covered <= 64 * boxes(dim)  # there are zeros between the two
        # Registers: results and scores of a row tile, of 255 together.
        assert tiling.row_tiles * (columns + tiling.block_kv) // 2 <= 192


def test_a_family_may_be_preferred():
    before = _gpu.families()
    with _gpu.prefer("sm80"):
        assert _gpu.families()[0].name == "sm80"
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(_gpu.families).result() == before
    assert before == _gpu.families()
    unknown = pytest.raises(ValueError, match=r"family must be one of sm90, .*, not 'sm70'")
    with unknown, _gpu.prefer("sm70"):
        pass


# ---- on a GPU ------------------------------------------------------------------------------------

_GPU = _gpu.spec.present()
OF_PARTS = (*SPLIT_CASES, *SMALL_CASES, *(case for _, case in GRADIENTS), *MORE_GRADIENTS)


@pytest.mark.gpu
@pytest.mark.skipif(
    _GPU is None or _GPU.arch not in _gpu.sm80.Sm80.architectures,
    reason="needs a GPU of sm_80 or later",
)
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


@pytest.mark.gpu
@pytest.mark.skipif(
    _GPU is None or _GPU.arch not in _gpu.sm80.Sm80.architectures,
    reason="needs a GPU of sm_80 or later",
)
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


@pytest.mark.gpu
@pytest.mark.skipif(
    _GPU is None or _GPU.arch not in _gpu.sm80.Sm80.architectures,
    reason="needs a GPU of sm_80 or later",
)
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
