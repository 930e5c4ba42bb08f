"""Every backend computes what the call means: the table of cases against float64."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ..cases import Arguments, Case, fit
from ..conformance_cases import BY_NAME, CASES, covering
from ..conftest import with_backends
from ..tolerance import FORWARD_FACTOR, GRADIENT_FACTOR, check

# Features that a backend's documentation refuses, by the word its refusal must contain.
REFUSED = {
    "cpu": {"score functions"},
}


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
    fields = {"query": "dq", "key": "dk", "value": "dv", "bias": "dbias", "sinks": "dsinks"}
    fields["table"] = "dtable"
    for name in arguments.differentiable if gradients else ():
        gradient, field = got[f"d{name}"], fields[name]
        given = arguments.arrays[name]
        assert gradient.dtype == given.dtype, f"d{name} is {gradient.dtype}"
        # The probabilities that make a gradient are rounded to the query's type where that is
        # narrower than the argument's own.
        precision = case.dtype
        if name == "bias" and precision == "float32":
            precision = str(given.dtype)
        summed = truth.summed.get(field, 0.0)
        check(
            f"d{name}",
            gradient,
            getattr(truth, field),
            getattr(plain, field),
            precision,
            GRADIENT_FACTOR,
            summed,
            # A head's sink is one number, of which plain attention's error may be little by chance.
            truth.summed["dsinks by rounding"] ** 0.5 if name == "sinks" else 0.0,
        )


def refuses(case: Case, backend: str) -> bool:
    """Whether the backend documents that it cannot run the case; checks that it says so by name."""
    refused = case.features() & REFUSED.get(backend, set())
    if refused:
        with pytest.raises(NotImplementedError, match="|".join(sorted(refused))):
            case.draw().run(backend)
    return bool(refused)


# XLA makes its own code for each case, which is most of the suite's time. It gets those of several
# tiles, and of the others so many that they cover the features.
VALUED = {
    "align", "batch", "bias", "bias_dtype", "dtype", "mask", "positions", "score", "segments",
    "window",
}  # fmt: skip
COVERING = covering(CASES, ignored={"H", "mask_density"}, valued=VALUED)


@pytest.mark.parametrize(
    ("backend", "case"),
    with_backends(CASES, xla=lambda case: case in COVERING or max(case.T, case.S) > 128),
    ids=lambda value: value if isinstance(value, str) else value.name.replace(" ", "-"),
)
def test_case(case, backend):
    case = fit(case, backend)
    if refuses(case, backend):
        return
    arguments = case.draw()
    compare(arguments, arguments.run(backend))


def test_float32(backend):
    case = dataclasses.replace(BY_NAME["plain"], precision="highest")
    compare(case.draw(), case.draw().run(backend))
