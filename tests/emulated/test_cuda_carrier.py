"""float32 at default precision on "cuda": float16 copies of operands, and what they do not hold.

The copies' kernels and the others are run by tests/emulator; the same cases run on a GPU.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash import _gpu, explain
from jax_flash._ops import passes
from jax_flash._problem import Problem, Shapes

from ..cases import BOTTOM_RIGHT, Arguments, Case
from ..compare import compare_copies
from ..conformance_cases import case_id
from ..emulator import Emulator
from ..other_kernels import AsIfLong
from ..tolerance import max_error

H200 = _gpu.spec.GPUS["H200"]

C = functools.partial(Case, T=150, S=200, N=2, H=64, batch=(1,), dtype="float32", with_lse=True)
CASES = (
    C("grouped", K=1, causal=True),
    C("head dim 128", H=128, T=260, S=300, causal=True, align=BOTTOM_RIGHT),
    C("head dim 192 value 128", H=192, Hv=128, T=70, S=130),
    C("head dim 256", H=256, T=70, S=100, N=1, deterministic=True),
    C("head dim 33 value 7", H=33, Hv=7, T=70, S=100, K=1, sinks=True),
    C("heads packed, lengths", N=8, K=2, T=40, q_lengths=(33,), kv_lengths=(180,), causal=True),
    C("lengths", batch=(3,), q_lengths=(150, 0, 77), kv_lengths=(200, 50, 0), sinks=True),
    C("softcap", H=128, softcap=5.0, window=(70, 20), T=200),
    C("segments deterministic", segments="returning", T=200, deterministic=True),
    C("positions", positions="striped", H=128, N=1, causal=True),
    C("mask bias dropout", mask="b1ts", bias="11ts", dropout=0.2),
    C("bias of each score", bias="bnts", S=136, H=128, causal=True),
    C("bias of 16 bits", bias="bnts", bias_dtype="float16", S=136, N=1),
    C("blocks, bias of keys", blocks=("1n", 64), bias="b11s", batch=(2,), N=2, K=1, T=100,
      kv_lengths=(190, 200)),
    C("score gate", score="gate", causal=True),
    C("few rows", T=3, S=5, N=4, K=1, H=24),
)  # fmt: skip


def scaled(arguments: Arguments, dout: float = 1.0, **factors: float) -> Arguments:
    """The same with arrays times factors."""
    arrays = dict(arguments.arrays)
    for name, factor in factors.items():
        arrays[name] = arrays[name] * np.float32(factor)
    return dataclasses.replace(arguments, arrays=arrays, dout=arguments.dout * np.float32(dout))


# Kernels of 16 bits have the same text: test_cuda_{emulated,sm80}.py take their paths.
OF_16_BITS = {
    "head dim 128", "head dim 192 value 128", "head dim 256", "head dim 264", "lengths",
    "positions", "softcap", "segments deterministic", "blocks, bias of keys", "score gate",
}  # fmt: skip


def of_float32(cases: tuple[Case, ...]) -> list[Case]:
    return [case for case in cases if case.name not in OF_16_BITS]


@pytest.mark.parametrize("case", of_float32(CASES), ids=case_id)
def test_case(case: Case, emulator: Emulator):
    arguments = case.draw()
    got = emulator.run(arguments)
    compare_copies(arguments, got)


SHARED = (
    ("shares", True, C("few keys", T=300, S=5, N=1, H=128)),
    ("shares", True, C("wide, lengths", T=200, S=64, N=1, H=208, kv_lengths=(50,))),
    ("unit_heads", 1, C("wide units", T=130, S=70, N=4, K=1, H=224, Hv=192)),
    ("unit_heads", 1, C("units", T=130, S=70, N=4, K=1, causal=True)),
    ("unit_heads", 1, C("wider values", T=70, S=100, N=4, K=1, H=32, Hv=64)),
    ("shares", True, C("wider values, few rows", T=70, S=20, N=1, H=16, Hv=200)),
)


@pytest.mark.parametrize(("field", "value", "case"), SHARED, ids=lambda x: getattr(x, "name", ""))
def test_units_that_add_to_the_same_keys(field: str, value: int, case: Case, emulator: Emulator):
    """They are parts of a unit's queries, or of a group's heads; the rest adds to nothing."""
    arguments = case.draw()
    compare_copies(arguments, emulator.run(AsIfLong(arguments, field, value)))
    small = scaled(arguments, key=1e-12)
    check_rest(small, lambda arguments: emulator.run(AsIfLong(arguments, field, value)))


def test_poison_beside_units_of_few_rows(emulator: Emulator):
    """Keys that do not see a query which is not finite have the right dk and dv."""
    sizes = {"T": 130, "S": 70, "N": 2, "K": 1, "H": 16, "Hv": 200, "batch": (1,)}
    arguments = C("past", **sizes, causal=True).draw()
    truth = arguments.truth()
    arguments.arrays["query"][:, 20, 1] = np.nan
    got = emulator.run(AsIfLong(arguments, "unit_heads", 1))
    for name, want in (("dkey", truth.dk), ("dvalue", truth.dv)):
        assert np.isnan(got[name][:, :21]).all()
        assert np.abs(got[name][:, 21:] - want[:, 21:]).max() < 2e-2


SINCE_AMPERE = (
    C("grouped", K=1, T=70, S=90, causal=True),
    C("head dim 128", H=128, T=70, S=90, dropout=0.2, bias="11ts"),
    C("head dim 33 value 130", H=33, Hv=130, T=40, S=50, N=1, segments="packed", sinks=True),
    C("head dim 264", H=264, T=40, S=50, N=1, deterministic=True),
    C("few rows", T=3, S=5, N=4, K=1, H=24),
)


@pytest.mark.parametrize("case", of_float32(SINCE_AMPERE), ids=case_id)
def test_case_since_ampere(case: Case, emulator: Emulator):
    arguments = case.draw()
    compare_copies(arguments, emulator.run(arguments, gpu="A100"))


def check_rest(arguments: Arguments, run) -> None:
    """Results of operands that float16 does not hold are far more exact than copies allow."""
    got, truth = run(arguments), arguments.truth()
    for name, field in (("out", "out"), ("dquery", "dq"), ("dkey", "dk"), ("dvalue", "dv")):
        want = getattr(truth, field)
        assert max_error(got[name], want) <= 1e-4 * np.abs(want).max(), name


RESTS = {
    "small keys": {"key": 1e-12},
    "small values": {"value": 1e-12},
    "large values": {"value": 1e12},
}


@pytest.mark.parametrize("factors", RESTS.values(), ids=RESTS)
def test_what_float16_does_not_hold(factors: dict[str, float], emulator: Emulator):
    check_rest(scaled(C("grouped", K=1, T=70, S=90).draw(), **factors), emulator.run)


def test_one_row_that_float16_does_not_hold(emulator: Emulator):
    arguments = C("grouped", K=1, T=70, S=90).draw()
    arguments.arrays["value"][:, 5] *= np.float32(1e-9)
    check_rest(arguments, emulator.run)


def test_gradients_of_any_size(emulator: Emulator):
    arguments = C("grouped", K=1, T=70, S=90, with_lse=False).draw()
    want = emulator.run(arguments)
    compare_copies(arguments, want)
    for size in (1e-30, 1e-8, 1e8, 1e30):
        got = emulator.run(scaled(arguments, dout=size))
        for name in ("dquery", "dkey", "dvalue"):
            largest = np.abs(want[name]).max()
            np.testing.assert_allclose(
                got[name] / size, want[name], atol=2**-9 * largest, err_msg=f"{name} {size}"
            )


def test_hidden_values_reach_nothing(emulator: Emulator):
    case = C("hidden", batch=(2,), T=70, S=90, kv_lengths=(40, 90), q_lengths=(33, 70))
    arguments = case.draw()
    want = emulator.run(arguments)
    for poison in (np.nan, np.inf, 1e30):
        for name, hidden in (("key", slice(40, None)), ("value", slice(40, None))):
            arguments.arrays[name][0, hidden] = poison
        arguments.arrays["query"][0, 33:] = poison
        arguments.dout[0, 33:] = poison
        got = emulator.run(arguments)
        for name in ("out", "dquery", "dkey", "dvalue"):
            # What is finite and hidden is not known to be: the other kernels compute.
            limit = 2**-8 * np.abs(want[name]).max() if poison == 1e30 else 0
            np.testing.assert_allclose(
                got[name], want[name], atol=limit, rtol=0, err_msg=f"{name} {poison}"
            )


def test_which_calls_are_split():
    shapes = Shapes(1, 256, 256, 2, 2, 64, 64)
    problem = Problem("float32", 1.0)
    for call in passes(problem).values():
        carried, rest = _gpu.calls(call, shapes, H200)
        assert _gpu.choose(carried, shapes, H200).name == "sm90"
        assert _gpu.choose(rest, shapes, H200).name == "sm80"
        wide = dataclasses.replace(shapes, head_dim=512)
        for sizes, gpu in ((shapes, "A100"), (shapes, "RTX 4090"), (wide, "H200")):
            carried, rest = _gpu.calls(call, sizes, _gpu.spec.GPUS[gpu])
            for part in (carried, rest):
                assert _gpu.choose(part, sizes, _gpu.spec.GPUS[gpu]).name == "sm80"
    for other in ({"precision": "highest"}, {"precision": "high"}, {"dtype": "bfloat16"}):
        call = passes(dataclasses.replace(problem, **other))["forward"]
        assert _gpu.calls(call, shapes, H200) == (call,)


@pytest.mark.usefixtures("uncompiled")
def test_explanation_names_both_programs():
    q = jax.ShapeDtypeStruct((1, 256, 2, 64), "float32")
    report = explain(q, q, q, gpu="H200", backend="cuda")
    for one in (report.forward, report.backward):
        assert one.kernel is not None
        assert one.rest is not None
        assert one.kernel.plan.family == "sm90"
        assert one.rest.plan.family == "sm80"
    assert "float16 copies" in repr(report)
    assert explain(q, q, q, gpu="H200", backend="cuda", precision="highest").forward.rest is None


@pytest.mark.parametrize("name", ["query", "key", "value", "dout"])
@pytest.mark.parametrize(
    ("row", "held"),
    [([0, 0], True), ([2.0**-14, 1e-9], True), ([65504, 1], True), ([np.nan, 1], True),
     ([np.inf, 1], True), ([2.0**-15, 0], False), ([65520, 1], False), ([1e30, np.nan], False)],
    ids=str,
)  # fmt: skip
def test_which_rows_a_copy_holds(name: str, row: list[float], held: bool):
    if name == "dout" and max(map(abs, row)) in (2.0**-15, 65520, 1e30):
        pytest.skip("it is scaled")
    shapes = Shapes(1, 4, 4, 1, 1, 2, 2)
    arrays = {x: jnp.ones((1, 4, 1, 2)) for x in ("query", "key", "value", "out", "dout")}
    arrays[name] = arrays[name].at[0, 1, 0].set(jnp.array(row))
    call = passes(Problem("float32", 1e-4))["backward"]
    named = {"q": arrays["query"], "k": arrays["key"], "v": arrays["value"]}
    named |= {"out": arrays["out"], "lse": jnp.zeros((1, 1, 4)), "dout": arrays["dout"]}
    copies, scale = _gpu.carrier.copies(call, shapes, named)
    assert (float(scale) != 0) == held
    assert copies["q"].dtype == copies["dout"].dtype == "float16"
    assert copies["out"].dtype == "float32"


_GPU = _gpu.spec.present()


@pytest.mark.gpu
@pytest.mark.skipif(_GPU is None or _GPU.arch != "sm_90a", reason="needs a Hopper GPU")
@pytest.mark.parametrize("family", ["sm90", "sm80"])
@pytest.mark.parametrize("case", [*CASES, *SINCE_AMPERE], ids=case_id)
def test_case_on_a_gpu(case: Case, family: str):
    arguments = case.draw()
    with _gpu.prefer(family):
        got = arguments.run("cuda")
        again = arguments.run("cuda") if case.deterministic else got
    compare_copies(arguments, got)
    for name in got:
        np.testing.assert_array_equal(again[name], got[name], err_msg=name)


@pytest.mark.gpu
@pytest.mark.skipif(_GPU is None or _GPU.arch != "sm_90a", reason="needs a Hopper GPU")
@pytest.mark.parametrize("factors", RESTS.values(), ids=RESTS)
def test_what_float16_does_not_hold_on_a_gpu(factors: dict[str, float]):
    arguments = scaled(C("grouped", K=1, T=70, S=90).draw(), **factors)
    check_rest(arguments, lambda x: x.run("cuda"))
