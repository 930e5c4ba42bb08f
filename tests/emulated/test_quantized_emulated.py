"""The CUDA kernels of decoding from caches of eight bits, run by tests/emulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ..decode_cases import Case, Tiled
from ..emulator import Emulator
from ..quantized_cases import CASES, FLOAT8, INT8, check, quantize

SHORT = {"dtype": "bfloat16", "H": 64}  # of heads
# A case, its dtype, whether pages have scales of their own, the tiling, and the GPU.
RUN: list[tuple[Case, str, bool, dict[str, Any], str]] = [
    *((*case, {}, "H200") for case in CASES),
    (Case("parts of a line", T=2, N=8, H=128, page=16, dtype="bfloat16"), FLOAT8, True,
     {"resident": 2, "block_kv": 128}, "H200"),
    (Case("two heads", T=5, N=8, K=4, page=16, **SHORT), FLOAT8, True,
     {"heads": 2, "box_rows": 8}, "H200"),
    (Case("small boxes", T=2, N=8, K=4, H=128, dtype="bfloat16"), FLOAT8, False,
     {"heads": 2, "block_kv": 64, "box_rows": 32}, "H200"),
    (Case("four tiles of rows", T=8, N=16, K=2, page=16, softcap=3.0, **SHORT), FLOAT8, True,
     {"row_tiles": 4, "resident": 1}, "H200"),
    (Case("rows of a cluster", T=2, H=32, dtype="float16"), FLOAT8, True, {"cluster": 2}, "H200"),
    (Case("cluster", T=5, N=4, page=16, rotary=100.0, **SHORT), FLOAT8, False,
     {"cluster": 2}, "H200"),
    (Case("teams", T=2, N=4, K=1, page=16, window=150, **SHORT), FLOAT8, True,
     {"cluster": 2, "stages": 3}, "H200"),
    (Case("ampere", T=5, N=8, K=4, page=5, sinks=True, **SHORT), INT8, True, {}, "A100"),
    (Case("ada", T=3, H=72, Hv=40, dtype="float16", window=70), FLOAT8, True, {}, "RTX 4090"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "dtype", "varied", "tiling", "gpu"),
    RUN,
    ids=[x[0].name.replace(" ", "-") for x in RUN],
)
def test_case(case, dtype, varied, tiling, gpu, emulator: Emulator):
    arguments = quantize(case, dtype, varied=varied)
    got = emulator.run(Tiled(arguments, tiling), seed=2, gpu=gpu)  # type: ignore[arg-type]
    check(arguments, got)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_queries_of_any_size(dtype: str, emulator: Emulator):
    """Rows of bfloat16 beyond float16, some with NaN, which others do not see."""
    arguments = quantize(Case("sizes", N=8, K=1, H=32, lengths=(70, 9), dtype=dtype, appends=False))
    factors = 2.0 ** np.array([0, 100, -100, 40, -126, 14, -14, 0]) if dtype == "bfloat16" else 1.0
    arguments.query = (arguments.query * np.reshape(factors, (-1, 1))).astype(dtype)
    arguments.query[0, 0, 7, 3] = np.nan
    got = emulator.run(Tiled(arguments, {}))  # type: ignore[arg-type]
    out, lse = arguments.truth()
    seen = np.isfinite(out).all(-1)
    assert seen.sum() == 15
    np.testing.assert_allclose(np.asarray(got.out, float)[seen], out[seen], rtol=0.01, atol=0.01)
    np.testing.assert_allclose(got.lse[seen], lse[seen], rtol=1e-5, atol=1e-5)
    assert np.isnan(np.asarray(got.out, float)[~seen]).all()


def test_nan_reaches_the_queries_that_see_it_alone(emulator: Emulator):
    arguments = quantize(Case("newest", T=6, N=8, window=9, lengths=(150, 6), **SHORT))
    clean = emulator.run(Tiled(arguments, {}))  # type: ignore[arg-type]
    arguments.new["value"][:, 3, 0, 5] = np.nan
    got = emulator.run(Tiled(arguments, {}))  # type: ignore[arg-type]
    seeing = np.zeros(got.out.shape, bool)
    seeing[:, 3:, :4, 5] = True
    finite = np.isfinite(np.asarray(got.out, np.float32))
    np.testing.assert_array_equal(finite, ~seeing)
    np.testing.assert_array_equal(np.asarray(got.out)[finite], np.asarray(clean.out)[finite])
