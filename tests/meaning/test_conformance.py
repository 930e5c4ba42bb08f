"""Every backend computes what the call means: the table of cases against float64."""

from __future__ import annotations

import dataclasses

import pytest

from ..cases import fit
from ..compare import compare, refuses
from ..conformance_cases import BY_NAME, CASES, VALUED, case_id, covering
from ..conftest import with_backends

# XLA makes its own code for each case, which is most of the suite's time. It gets so many that they
# cover the features, several tiles among them.
COVERING = covering(CASES, ignored={"H", "mask_density"}, valued=VALUED, tile=128)


@pytest.mark.parametrize(
    ("backend", "case"),
    with_backends(CASES, xla=lambda case: case in COVERING),
    ids=case_id,
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
