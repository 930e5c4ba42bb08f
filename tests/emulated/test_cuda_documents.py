"""Units of the forward pass that begin where documents do, in the emulator."""

from __future__ import annotations

import numpy as np
import pytest

from jax_flash import _native

from ..cases import Arguments, Case
from ..compare import compare
from ..emulated_cases import IN_ORDER, C
from ..emulator import Emulator
from ..other_kernels import AsIfLong


def runs_of(*runs: tuple[int, int]) -> np.ndarray:
    """Ids of queries or keys in a row: so many of each."""
    return np.repeat([x for x, _ in runs], [count for _, count in runs]).astype(np.int32)


def with_ids(case: Case, *rows: tuple[np.ndarray, np.ndarray]) -> Arguments:
    """The case's arrays with these ids of the queries and keys of each batch row."""
    arguments = case.draw()
    queries, keys = (np.stack(ids) for ids in zip(*rows, strict=True))
    arguments.arrays |= {"query_segment_ids": queries, "key_value_segment_ids": keys}
    return arguments


SORTED = runs_of((1, 270), (2, 45), (3, 261), (4, 20), (5, 64))
BACK_AGAIN = runs_of((1, 320), (2, 64), (1, 257), (3, 19))  # keys of 1 lie apart


@pytest.mark.parametrize("dim", [64, 128])
def test_units_that_begin_where_documents_do(dim: int, emulator: Emulator):
    """Keys count from a document's first; batch rows have unequally many units.

    Three threads find the documents of the wider heads, of seven words each, as of long rows.
    """
    sources = _native.kernel_sources()
    share = "share = ceil_div(count, kThreads)"
    assert share in sources["sm90/forward_documents.cuh"]
    if dim == 128:
        text = sources["sm90/forward_documents.cuh"].replace(share, "share = ceil_div(count, 3)")
        sources["sm90/forward_documents.cuh"] = text
    case = C("documents", H=dim, T=660, S=660, N=1, batch=(2,), segments="packed", causal=dim < 128)
    other = SORTED if dim == 64 else np.roll(SORTED, 50)
    arguments = with_ids(case, (SORTED, other), (BACK_AGAIN, BACK_AGAIN))
    field, value = ("cut_documents", 256) if dim == 64 else ("cuts_aligned", True)
    for seed in (IN_ORDER, 2):
        long = AsIfLong(arguments, field, value)
        got = emulator.run(long, seed=seed, gradients=False, sources=sources)
        compare(arguments, got, gradients=False)


def test_units_of_one_document_need_no_tests(emulator: Emulator):
    """Nothing but where units and their keys begin and end keeps documents apart here."""
    sources = _native.kernel_sources()
    test = "const bool one_segment = block >= t.one.begin && block < t.one.end;"
    assert test in sources["sm90/forward_warpgroup.cuh"]
    text = sources["sm90/forward_warpgroup.cuh"].replace(test, "const bool one_segment = true;")
    sources["sm90/forward_warpgroup.cuh"] = text
    case = C("one document", T=660, S=660, N=1, segments="packed", causal=True)

    def check(queries: np.ndarray, keys: np.ndarray) -> None:
        arguments = with_ids(case, (queries, keys))
        long = AsIfLong(arguments, "cut_documents", 256)
        compare(arguments, emulator.run(long, gradients=False, sources=sources), gradients=False)

    apart = runs_of((7, 259), (2, 300), (9, 101))
    check(apart, apart)
    check(np.flip(apart), apart)
    with pytest.raises(AssertionError, match="beyond it"):
        check(BACK_AGAIN, BACK_AGAIN)


def test_poison_in_another_document(emulator: Emulator):
    """Values behind a document, in its last block, and keys of others reach none of its rows."""
    arguments = with_ids(
        C("poison", T=660, S=660, N=1, segments="packed", causal=True), (SORTED, SORTED)
    )
    truth = arguments.truth(gradients=False)
    arguments.arrays["value"][:, 272] = np.nan  # of document 2, of 270 to 314
    arguments.arrays["key"][:, 580] = np.inf  # of document 4, of 576 to 595
    out = emulator.run(AsIfLong(arguments, "cut_documents", 256), gradients=False)["out"]
    told = np.r_[272:315, 580:596]
    assert not np.isfinite(out[:, told].astype(np.float32)).all(axis=(0, 2, 3)).any()
    others = np.delete(np.arange(660), told)
    assert np.abs(out.astype(np.float64) - truth.out)[:, others].max() < 4e-2
