"""jax_flash.reference computes what the call means: cases of the table that cover it, in float64.

It and the numpy attention share no line; only the order of their sums may differ.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jax_flash import reference

from ..cases import DROPOUT_SEED
from ..conformance_cases import CASES, covering
from ..score_functions import SCORES

# What float64 leaves without a meaning, or what one size shows as well as another; all cases run
# on the other backends.
SIZES = {"H", "Hv", "dtype", "precision", "spread", "bias_dtype", "mask_density", "deterministic"}
VALUED = {"align", "batch", "bias", "mask", "positions", "score", "segments", "window"}


@pytest.mark.parametrize(
    "case", covering(CASES, SIZES, VALUED), ids=lambda case: case.name.replace(" ", "-")
)
def test_case(case):
    arguments = case.draw()
    options = dict(arguments.options, block_mask=case.block_mask)
    fixed, moving = {}, {}
    for name, array in arguments.arrays.items():
        if name in arguments.differentiable:
            moving[name] = array.astype(np.float64)
        else:
            fixed[name] = array

    # Most of the time goes into compiling: a third of it less without optimisation.
    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def step(moving, dout, dlse):
        if case.dropout:
            options["dropout_key"] = jax.random.key(DROPOUT_SEED)

        def attend(moving):
            arrays = {**moving, **fixed}
            if case.score:
                options["score_mod"] = SCORES[case.score].traced(arrays.pop("table"))
            return reference.attention(**arrays, **options, return_lse=True)

        results, pull = jax.vjp(attend, moving)
        return *results, *pull((dout, dlse))

    arguments = dataclasses.replace(arguments, arrays={**moving, **fixed})
    truth = arguments.truth()
    dlse = np.zeros(truth.lse.shape) if arguments.dlse is None else arguments.dlse
    with jax.enable_x64(True):
        out, lse, gradients = step(moving, *(np.float64(x) for x in (arguments.dout, dlse)))
        assert out.dtype == lse.dtype == np.float64
    fields = {"query": "dq", "key": "dk", "value": "dv", "bias": "dbias", "sinks": "dsinks"}
    fields["table"] = "dtable"
    got = {fields[name]: gradient for name, gradient in gradients.items()}
    if case.score == "gate":  # NaN by what it reads for hidden pairs, which the oracle leaves in
        assert np.isnan(got.pop("dtable")).any()
    for name, array in {"out": out, "lse": lse, **got}.items():
        np.testing.assert_allclose(
            array, getattr(truth, name), rtol=1e-10, atol=1e-10, err_msg=name
        )
