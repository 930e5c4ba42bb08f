"""Requests over pages on a GPU, by each family of forward kernels that has them."""

from __future__ import annotations

import jax
import pytest

from jax_flash import _gpu
from jax_flash._gpu import paged

from ..quantized_cases import COPIED, Copied
from ..ragged_cases import OVER_PAGES, OVER_PAGES_80, Batch

_GPU = _gpu.spec.present()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        _GPU is None or _GPU.arch not in _gpu.sm80.Sm80.architectures,
        reason="needs a GPU of sm_80 or later",
    ),
]

CASES = [
    *(("pages", batch) for batch, _ in OVER_PAGES if _GPU is not None and _GPU.arch == "sm_90a"),
    *(("pages_sm80", batch) for batch in OVER_PAGES_80),
]


@pytest.mark.parametrize(("family", "batch"), CASES, ids=lambda x: getattr(x, "name", x))
def test_batch(family: str, batch: Batch, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(paged, "FEWEST", 0)
    jax.clear_caches()
    drawn = batch.draw(7)
    with _gpu.prefer(family):
        drawn.compare(drawn.run("cuda"))


@pytest.mark.skipif(_GPU is None or _GPU.arch != "sm_90a", reason="needs a Hopper GPU")
@pytest.mark.parametrize("case", COPIED, ids=lambda case: case.name)
def test_pages_of_eight_bits(case: Copied, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(paged, "FEWEST", 0)
    jax.clear_caches()
    drawn = case.draw(7)
    with case.chosen():
        drawn.compare(drawn.run("cuda"))
