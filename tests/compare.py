"""Results of a case beside float64, by the tolerance of the precision that it is computed in."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from .cases import Arguments, Case
from .tolerance import FORWARD_FACTOR, GRADIENT_FACTOR, check, max_error, tf32

# Features that a backend's documentation refuses, by the word its refusal must contain.
REFUSED = {
    "cpu": {"score functions"},
}


def refuses(case: Case, backend: str) -> bool:
    """Whether the backend documents that it cannot run the case; checks that it says so by name."""
    refused = case.features() & REFUSED.get(backend, set())
    if refused:
        with pytest.raises(NotImplementedError, match="|".join(sorted(refused))):
            case.draw().run(backend)
    return bool(refused)


def gradient_fields(arguments: Arguments) -> dict[str, str]:
    """The field of the truth for each gradient in what `Arguments.run` returns."""
    short = {"query": "dq", "key": "dk", "value": "dv"}
    return {f"d{name}": short.get(name, f"d{name}") for name in arguments.differentiable}


def compare(arguments: Arguments, got: dict[str, np.ndarray], *, gradients: bool = True) -> None:
    """Checks out, lse and all gradients in `got` by the tolerance of the case's precision."""
    case = arguments.case
    truth = arguments.truth(gradients=gradients)
    plain = arguments.truth(precision=case.dtype, gradients=gradients)
    assert str(got["out"].dtype) == case.dtype
    check("out", got["out"], truth.out, plain.out, case.dtype, FORWARD_FACTOR)
    if "lse" in got:
        # Scores are accumulated in float32 whatever the input's type, so lse is held to float32.
        assert got["lse"].dtype == np.float32
        plain_lse = arguments.truth(precision="float32", gradients=False).lse
        # Kernels for 16 bits count exponents from a base up to 80 away from the largest score.
        base = 0 if case.dtype == "float32" else 80
        check("lse", got["lse"], truth.lse, plain_lse, "float32", FORWARD_FACTOR, base)
    for name, field in gradient_fields(arguments).items() if gradients else ():
        given = arguments.arrays[name[1:]].dtype
        assert got[name].dtype == given, f"{name} is {got[name].dtype}"
        # The probabilities that make a gradient are rounded to the query's type where that is
        # narrower than the argument's own.
        precision = case.dtype
        if name == "dbias" and precision == "float32":
            precision = str(given)
        check(
            name,
            got[name],
            getattr(truth, field),
            getattr(plain, field),
            precision,
            GRADIENT_FACTOR,
            truth.summed.get(field, 0.0),
            # A head's sink is one number, of which plain attention's error may be little by chance.
            truth.summed["dsinks by rounding"] ** 0.5 if name == "dsinks" else 0.0,
        )


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
    for name, field in (fields | (gradient_fields(arguments) if gradients else {})).items():
        # A sum that cancels keeps half a unit of two parts' 16 bits, not of float32's.
        summed = 2**5 * truth.summed.get(field, 0.0) if gradients else 0.0
        want, coarse = getattr(truth, field), getattr(plain, field)
        precision = str(arrays["bias"].dtype) if name == "dbias" else "float32"
        check(name, got[name], want, coarse, precision, 1 / 8, summed)


def compare_copies(arguments: Arguments, got: dict[str, np.ndarray]) -> None:
    """As `compare`, of float32 by copies in float16: with the rounding of their products."""
    case = arguments.case
    truth, plain = arguments.truth(), arguments.truth(precision="float16")
    fields = {"out": "out"} | ({"lse": "lse"} if case.with_lse else {})
    for name, field in (fields | gradient_fields(arguments)).items():
        factor = FORWARD_FACTOR if name in ("out", "lse") else GRADIENT_FACTOR
        want, rounded = getattr(truth, field), getattr(plain, field)
        assert got[name].dtype == (arguments.arrays["bias"].dtype if name == "dbias" else "float32")
        summed = truth.summed.get(field, 0.0)
        of_sinks = truth.summed["dsinks by rounding"] ** 0.5 if name == "dsinks" else 0.0
        check(name, got[name], want, rounded, "float16", factor, summed, of_sinks)
