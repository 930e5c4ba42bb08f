"""Parts of papers.py: what they count, and what they say beside each claim, of made results."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from common import launch_bytes, paper
from common.paper import Part, Record
from paper_parts import block_sparse, io, lean, memory, scissorhands

FULL = paper.Settings()


def said(part: Part, records: list[Record]) -> list[str]:
    """What stands beside each claim; table and chart are made too."""
    assert part.table(records)
    assert all(panel.lines for panel in part.panels(records))
    found = [claim.here(records) for claim in part.claims]
    assert None not in found
    return [str(x) for x in found]


def records_of(part: Part, measured: Any) -> list[Record]:
    """The cells of a whole run, with what `measured` makes of each."""
    return [cell | measured(cell) for cell in part.cells(FULL)]


def test_claims_of_memory():
    def measured(cell: Record) -> Record:
        if cell["kind"] == "longest":
            fits = 1 << (20 if cell["way"] == "jax_flash" else 15)
            return {"fits_at": fits, "ran_at": fits, "too_long": 2 * fits, "mb": 7.0}
        mb = cell["length"] / 5 if cell["way"] == "jax_flash" else cell["length"] ** 2 / 1000
        return {"mb": mb, "fits": cell["length"] < 8192}

    ratio, longest, growth, beyond = said(memory.PART, records_of(memory.PART, measured))
    assert ratio == "20.5 × less (16,777 / 819 MB)"
    assert longest == "13,107 MB"
    assert growth == "64 ×"
    assert beyond == "32 ×: T 1,048,576 as XLA plans it (run: 1,048,576) beside 32,768"


def test_claims_of_bytes():
    def measured(cell: Record) -> Record:
        if cell["kind"] == "counters":
            return {"gb": [0.5, 5.0, 0.5, 20.0]}
        if cell["kind"] == "blocks":
            blocks = [{"block": n, "requests_gb": 1.0, "ms": 256 / n} for n in (64, 128, 256)]
            return {"blocks": blocks}
        found = {"jax_flash_gb": 0.4, "xla_gb": 7.0, "bytes_by": "counted"}
        return found | {"jax_flash_ms": 0.5, "xla_ms": 4.0, "jax_flash_requests_gb": 2.0}

    gb, ms, growth, fall = said(io.PART, records_of(io.PART, measured))
    assert gb == f"10 × (5 / 0.5 GB; {io.READ})"
    assert ms == "8 × (4 / 0.5 ms)"
    assert growth == f"4 × and 1 × ({io.READ})"
    assert fall == "4.00 ms at 64; 2.00 ms at 128; 1.00 ms at 256"


def test_claims_of_block_sparse_attention():
    def measured(cell: Record) -> Record:
        length = cell["length"]
        if cell["kind"] == "density":
            points = [("random", x, 1 + 9 * x) for x in (0.1, 0.5, 1.0)]
            points.insert(0, ("dense", 1.0, 10.0))
        else:
            points = [("dense", 1.0, length**2 / 1e6), ("butterfly", 0.1, length / 1e2)]
            points.append(("stride", 0.05, length / 1e3))
        return {"ways": [dict(zip(("layout", "density", "ms"), x, strict=True)) for x in points]}

    part = block_sparse.PART
    line, short, long, growth = said(part, records_of(part, measured))
    assert line == "a line from 10% of dense at no block; no layout is 0% of dense off"
    assert short == "4.1 × (16.78 / 4.1 ms, three blocks a row); whole butterfly 0.41 ×"
    assert long.startswith("65.5 × (4295 / 65.5 ms, three blocks a row)")
    assert growth == "64 × and 4.1e+03 ×"


def test_claims_of_equal_parts():
    def measured(cell: Record) -> Record:
        us = {"chosen": 9.0, "stream": 10.0}
        if cell["kind"] == "ragged":
            us |= {"clusters 2": 30.0, "clusters 4": 20.0, "clusters 8": 15.0}
        else:
            us |= {"rule": 20.0 if cell["length"] == 4096 else 10.0}
            us |= {} if cell["kind"] == "batch" else {"whole": 80.0, "fixed": 20.0}
        return {"us": us, "splits": {"rule": 15}, "no": {"whole": "why"}, "bytes": 10**9}

    found = said(lean.PART, records_of(lean.PART, measured))
    rule, whole, fixed, batches, ragged = found
    assert rule == "1.10 ×, up to 2.00 × (1 x 4096)"
    assert (whole[:6], fixed[:6], batches[:6]) == ("8.00 ×", "2.00 ×", "1.00 ×")
    assert ragged.startswith("beside 2: 3.00 ×, up to 3.00 × (8 x 65536); beside 4: 2.00 ×")


def test_splits_by_the_rule_of_flash_decoding():
    assert lean.splits_by_rule(110, 132, 100) == 1  # pairs of a row and a head are enough
    assert lean.splits_by_rule(8, 132, 1000) == 15  # 14: 112 of 132 CTAs, under 85 %
    assert lean.splits_by_rule(8, 132, 4) == 4  # no more than there are blocks
    assert lean.splits_by_rule(48, 132, 1000) == 5  # 3: two rounds, of which the second has 12


@pytest.mark.parametrize(("rows", "length"), [(1, 524288), (3, 16384)])
def test_a_fixed_number_of_splits_is_parts_of_rows(rows: int, length: int):
    """As many parts for each row, of the same blocks; what was there before is put back."""
    before = lean.tilings.choose, lean.tilings._cluster
    cell = lean.Cell("", rows, 32, 8, length)
    stream, fixed = lean.tiling_of(cell, "stream"), lean.tiling_of(cell, "rule", 5)
    assert (fixed.parts, fixed.block_kv, fixed.cluster) == (5 * rows, stream.block_kv, 1)
    assert stream.parts == 132 // 8
    assert lean.tiling_of(cell, "clusters 4").cluster == 4
    assert (lean.tilings.choose, lean.tilings._cluster) == before


def test_bytes_of_a_launch_follow_its_blocks():
    """All keys pass by each block of queries: the requests are halved where blocks are twice."""
    small, large = (
        launch_bytes.forward(io.plan("forward", 4, 4096, 16, changes, "sm80"), "bfloat16")
        for changes in io.BLOCKS["sm80"][:2]
    )
    query, rows = 4 * 4096 * 16 * 64 * 2, 4 * 4096 * 16 * 4
    assert small["arrays"] == large["arrays"] == 4 * query + rows
    assert small["requests"] == 2 * query + rows + 4096 // 64 * 2 * query
    assert small["requests"] - 2 * query - rows == 2 * (large["requests"] - 2 * query - rows)
    # As many tokens in rows twice as long: each block of keys has twice as many queries pass by.
    short, long = (
        launch_bytes.backward(io.plan("backward", 32768 // n, n, 16), "bfloat16")
        for n in (2048, 4096)
    )
    assert 1.7 < long["requests"] / short["requests"] < 2
    assert long["arrays"] == pytest.approx(short["arrays"], rel=0.1)
    with pytest.raises(NotImplementedError, match="is not counted"):
        launch_bytes.backward(io.plan("backward", 256, 128, 16), "bfloat16")


def test_counters_are_read_from_the_table_of_ncu():
    text = (
        "==PROF== Connected to process 7\n"
        '"ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum"\n'
        '"","","byte","byte"\n'
        '"0","wrapped_sine","9","9"\n'
        '"1","flash_forward","1,000,000,000","500000000"\n'
        '"2","flash_backward","250000000","0"\n'
        '"3","wrapped_sine","9","9"\n'
        '"4","gemm","0","2,000,000,000"\n'
    )
    assert io.read_counters(text, 2) == [1.75, 2.0]
    for wrong, count in ((text, 3), (text + '"5","wrapped_sine","9","9"\n', 3)):
        with pytest.raises(RuntimeError, match="kernels of 2 calls, not of 3"):
            io.read_counters(wrong, count)
    with pytest.raises(RuntimeError, match="not in bytes"):
        io.read_counters(text.replace('"byte"', '"Mbyte"'), 2)
    with pytest.raises(RuntimeError, match=r"no table.*ERR_NVGPUCTRPERM"):
        io.read_counters("==ERROR== ERR_NVGPUCTRPERM", 2)


def test_ncu_that_does_not_end_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """And what it started: the cell says so, and other cells are there."""
    begun = tmp_path / "begun"
    ncu = tmp_path / "ncu"
    ncu.write_text(f"#!/bin/sh\nsleep 600 & echo $! > {begun}\nwait\n")
    ncu.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(io, "SECONDS", 1)
    found = io.measure(FULL, {"name": "counters of ncu", "kind": "counters"})
    assert found == {"no_counters": "ncu took more than 1 s"}
    status = Path(f"/proc/{int(begun.read_text())}/status")
    left = time.monotonic() + 5
    while status.exists() and "Z (zombie)" not in status.read_text():
        assert time.monotonic() < left
        time.sleep(0.02)


def test_claims_of_a_budget():
    def measured(cell: Record) -> Record:
        loss = 2.0 + (1 - cell["keep"]) / 10
        asked = {} if cell["kind"] == "text" else {"before": loss - 1, "first": loss}
        return {"loss": loss, "cached": cell["keep"], "error": 0.01} | asked

    part = scissorhands.PART
    fifth, half, tenth, before, *_, last = said(part, records_of(part, measured))
    assert fifth == "+0.080 nats (2.080 beside 2.000; 20% of the positions)"
    assert half == "+0.050 nats (2.050 beside 2.000; 50% of the positions)"
    assert tenth == "+0.090 nats (2.090 beside 2.000; 10% of the positions)"
    assert before == "+0.050 nats (1.050 beside 1.000; 50% of the positions)"
    assert last == fifth


def test_needles_follow_the_marks_of_their_kinds():
    """One of each kind anywhere in the prompts of what is served, each asked for behind them."""
    rng = np.random.default_rng(0)
    served = np.stack([scissorhands.needles(rng, 512, asked_late=True) for _ in range(100)])
    to_train = scissorhands.needles(rng, 513, asked_late=False)
    kinds = len(scissorhands.MARKS)
    for text in [*served, to_train]:
        values = {int(x) for x in text[text >= 128]}
        assert sorted((x - 128) // scissorhands.VALUES for x in values) == [*range(kinds)]
        for at in np.flatnonzero(np.isin(text, scissorhands.MARKS)):
            kind = int(np.flatnonzero(text[at] == scissorhands.MARKS)[0])
            assert (int(text[at + 1]) - 128) // scissorhands.VALUES == kind
            assert text[at + 1] in text[:at]
    marks = np.isin(served, scissorhands.MARKS)
    # What no mark is ahead of is found: of each kind as likely in each quarter of the places.
    found = (served[:, 1:] >= 128) & ~marks[:, :-1]
    assert (found.sum(-1) == kinds).all()
    asked_before = scissorhands.ASKED_BEFORE * scissorhands.TIMES
    places = (256 - 1) // scissorhands.ITEM - asked_before
    for kind in range(kinds):
        of_kind = found & ((served[:, 1:] - 128) // scissorhands.VALUES == kind)
        at = np.argwhere(of_kind)[:, 1] // scissorhands.ITEM
        quarters = np.bincount(4 * at // places, minlength=4)
        assert (np.abs(quarters - 25) < 18).all(), quarters  # 4 times the spread of 100 draws
        assert len(quarters) == 4
    assert (marks[:, :256].sum(-1) == asked_before).all()
    assert (marks[:, 256:].sum(-1) == kinds).all()
    assert (scissorhands.is_asked("needles", served).sum(-1) == kinds).all()
