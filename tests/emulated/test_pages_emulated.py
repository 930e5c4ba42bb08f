"""Requests over pages by the forward kernels, in the emulator."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import Any

import jax
import numpy as np
import pytest

import jax_flash
from jax_flash import _gpu
from jax_flash._gpu import pages, pages_sm80

from ..emulator import Emulator
from ..quantized_cases import COPIED, FLOAT8, Copied
from ..ragged_cases import MIXED, OVER_PAGES, OVER_PAGES_80, Batch, Drawn, run
from ..serving_cases import IN_COMMON, WITH_TAILS, InCommon


@dataclasses.dataclass
class Paged:
    """A batch whose requests of more tokens than one a family computes, by a tiling."""

    drawn: Drawn
    tiling: dict[str, Any] = dataclasses.field(default_factory=dict)
    family: str = "pages"
    copies: Copied | None = None

    def run(self, backend: str) -> jax_flash.Attended:
        made = []

        def choose(*call):
            made.append(dataclasses.replace(chosen(*call), **self.tiling))
            return made[-1]

        module: Any = {"pages": pages, "pages_sm80": pages_sm80}[self.family]
        chosen, module.choose_pages = module.choose_pages, choose
        jax.clear_caches()
        try:
            with _gpu.prefer(self.family), self.copies.chosen() if self.copies else nullcontext():
                got = jax.tree.map(np.asarray, self.drawn.run(backend))
        finally:
            module.choose_pages = chosen
        assert made, "another kernel has run"
        return got


@pytest.mark.parametrize(("batch", "tiling"), OVER_PAGES, ids=[x.name for x, _ in OVER_PAGES])
def test_batch(batch: Batch, tiling: dict[str, Any], emulator: Emulator):
    drawn = batch.draw(3)
    drawn.compare(emulator.run(Paged(drawn, tiling), seed=3))  # type: ignore[arg-type]


@pytest.mark.parametrize("batch", OVER_PAGES_80, ids=lambda batch: batch.name)
def test_batch_by_mma_sync(batch: Batch, emulator: Emulator):
    drawn = batch.draw(5)
    drawn.compare(emulator.run(Paged(drawn, family="pages_sm80"), seed=5))  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["pages", "pages_sm80"])
def test_wrong_requests_are_nan(family: str, emulator: Emulator):
    """Too long for their pages, and without a page in front: nothing is read of either."""
    drawn = dataclasses.replace(MIXED, rotary=None).draw(4)
    arrays, (out, lse) = drawn.arrays, drawn.truth()
    starts, wrong = arrays["query_starts"], (1, 3)
    arrays["lengths"][1], arrays["page_table"][3, 0] = 14 * 16 + 1, 10**6
    got: Any = emulator.run(Paged(drawn, family=family), seed=2)  # type: ignore[arg-type]
    told = np.concatenate([np.arange(starts[b], starts[b + 1]) for b in wrong])
    for x, truth in ((got.out, out), (got.lse, lse)):
        assert np.isnan(x[told].astype(np.float32)).all()
        others = np.delete(np.arange(len(x)), told)
        seen = np.isfinite(truth[others])
        np.testing.assert_allclose(
            x[others].astype(np.float32)[seen], truth[others][seen], atol=0.05
        )
        np.testing.assert_array_equal(x[others][~seen], truth[others][~seen])


@pytest.mark.parametrize("case", COPIED, ids=lambda case: case.name)
def test_pages_of_eight_bits(case: Copied, emulator: Emulator):
    drawn = case.draw(3)
    drawn.compare(emulator.run(Paged(drawn, copies=case), seed=3))  # type: ignore[arg-type]


@pytest.mark.parametrize("place", [None, 12])
def test_pages_of_eight_bits_that_requests_share(place: int | None, emulator: Emulator):
    """Copied once, to their own numbers or others; wrong requests are NaN, alone."""
    batch = Batch("shared", counts=(20, 9, 30), before=(64, 64, 64), tokens=60, requests=4,
                  page=16, columns=8, H=64, dtype="bfloat16", appends=False)  # fmt: skip
    case = Copied(batch, FLOAT8, True, (0, 2), place)
    drawn = case.draw(0)
    arrays, held = drawn.arrays, drawn.held
    table = arrays["page_table"]
    for b in (1, 2):
        table[b, :4] = table[0, :4]
        for name in ("key", "value"):
            held[b][name][:64] = held[0][name][:64]
    out, lse = drawn.truth()
    table[1, 2] = -1
    used = np.unique(table[:3][(table[:3] >= 0) & (table[:3] < 34)])
    for name in ("key", "value"):  # a pool of these alone
        for kind in ("pages", "scale"):
            arrays[f"{name}_{kind}"] = arrays[f"{name}_{kind}"][used]
    there = np.isin(table, used)
    table[there] = np.searchsorted(used, table[there])
    got: Any = emulator.run(Paged(drawn, copies=case), seed=2)  # type: ignore[arg-type]
    starts = arrays["query_starts"]
    told = np.arange(starts[1], starts[2])
    owned = np.setdiff1d(np.arange(starts[0], starts[3]), told)
    for x, truth in ((got.out, out), (got.lse, lse)):
        x = x.astype(np.float32)
        assert np.isnan(x[told]).all()
        np.testing.assert_allclose(x[owned], truth[owned], atol=0.05)


@pytest.mark.parametrize("copies", [None, COPIED[0]], ids=["bfloat16", "float8"])
def test_members_of_a_vmap_are_requests_of_one_batch(copies: Copied | None, emulator: Emulator):
    batch = dataclasses.replace(MIXED, rotary=None, appends=False)
    case: Any = copies and dataclasses.replace(copies, batch=batch)
    drawn = [(case or batch).draw(seed) for seed in range(2)]
    mapped: Any = Mapped(drawn[0], copies=case, other=drawn[1])
    got = emulator.run(mapped, seed=2)
    for i, of in enumerate(drawn):
        of.compare(jax.tree.map(lambda x, i=i: x[i], got))


@dataclasses.dataclass
class Mapped(Paged):
    """Two batches under vmap, each with pages of its own."""

    other: Any = None

    def run(self, backend: str) -> jax_flash.Attended:
        first = self.drawn
        stacked = {
            name: np.stack([x, self.other.arrays[name]])
            for name, x in first.arrays.items()
            if x is not None
        }

        def call(arrays: dict) -> jax_flash.Attended:
            return jax_flash.ragged_paged_attention(
                **arrays, backend=backend, **first.batch.options
            )

        jax.clear_caches()
        with self.copies.chosen() if self.copies else nullcontext():
            return jax.tree.map(np.asarray, jax.jit(jax.vmap(call))(stacked))


@pytest.mark.parametrize("case", [*IN_COMMON, *WITH_TAILS], ids=lambda case: case.name)
def test_pages_in_common(case: InCommon, emulator: Emulator):
    case.compare(emulator.run(case, seed=case.N))  # type: ignore[arg-type]


@dataclasses.dataclass
class Tree:
    """Two requests of six tokens behind 24 and 14 positions, each of which sees those before it."""

    arrays: dict[str, np.ndarray]

    def run(self, backend: str) -> jax_flash.Attended:
        return jax.tree.map(np.asarray, run(self.arrays, backend=backend))


def test_trees_of_float32_have_the_bits_of_decoding(emulator: Emulator):
    """Without a precision: 16, of new tokens as of those before; float16 copies would have 11."""
    drawn = Batch("tree", (6, 6), (24, 14), 12, 2, page=4, columns=8, H=72, appends=False).draw(1)
    ancestors = np.tile(np.tri(6, dtype=bool), (2, 1))
    got = emulator.run(Tree(drawn.arrays | {"ancestors": ancestors}))  # type: ignore[arg-type]
    for x, y in zip((got.out, got.lse), drawn.truth(), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=5e-5)
