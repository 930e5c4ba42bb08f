"""The benchmarks of decoding and of block masks: checked before they are timed, and published."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import decode
import pytest
import sparse
from common import runs

import jax_flash


def measure_decoding(cell: decode.Cell, **makes: decode.Make) -> dict[str, Any]:
    programs = {name: decode.build(cell, make) for name, make in makes.items()}
    return decode.measure(cell, programs, argparse.Namespace(seconds=0.0))


def test_decoding_is_checked_before_it_is_timed(monkeypatch: pytest.MonkeyPatch):
    cell = decode.Cell("tiny", 2, 4, 2, 64, page=16, shortest=8, head_dim=16)
    found = measure_decoding(
        cell,
        right=decode.ours("xla"),
        tiled=decode.tiled("heads=2 rounds=2"),
        sum=decode.plain_sum,
    )
    assert set(found["us"]) == {"right", "sum"}
    assert found["tb_s"]["sum"] == pytest.approx(cell.bytes / found["us"]["sum"] / 1e6, rel=1e-2)
    assert "backend 'cuda'" in found["no"]["tiled"]

    attend = jax_flash.decode_attention

    def shifted(*arguments, backend, **options):
        decoded = attend(*arguments, backend="xla", **options)
        return decoded if backend == "xla" else decoded._replace(out=decoded.out + 0.1)

    monkeypatch.setattr(jax_flash, "decode_attention", shifted)
    assert "off by 0.1" in measure_decoding(cell, wrong=decode.ours("cpu"))["no"]["wrong"]


def test_decoding_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decode, "CPU_CELLS", (decode.Cell("tiny", 1, 4, 2, 64, head_dim=16),))
    words = ["decode.py", "--seconds", "0", "--peers", "jax_flash", "sum"]
    names = ["--output", str(tmp_path), "--commit", "abc"]
    monkeypatch.setattr(sys, "argv", words + names)
    decode.main()
    (path,) = tmp_path.glob("cpu/decode-*.json")
    record = json.loads(path.read_text())
    assert record["command"] == "python benchmarks/decode.py --seconds 0 --peers jax_flash sum"
    assert record["commit"] == "abc"
    (cell,) = record["cells"]
    assert set(cell["us"]) == {"jax_flash", "sum"}
    assert "| tiny | " in path.with_suffix(".md").read_text()


def test_table_of_decoding():
    def record(cell: decode.Cell, **us: float) -> dict[str, Any]:
        rates = {name: cell.bytes / x / 1e6 for name, x in us.items()}
        return {"cell": {"name": cell.name}, "us": us, "tb_s": rates, "no": {"torch": "none"}}

    first, second = decode.SHAPES[:2]
    records = [
        record(first, jax_flash=100.0, jax_cudnn=120.0, sum=90.0),
        record(second, jax_flash=100.0, jax_cudnn=150.0, torch_cudnn=50.0),
        record(decode.Cell("short", 1, 4, 2, 64), jax_flash=7.0, jax_cudnn=70.0),
    ]
    parts = decode.table(records, ["jax_flash", "jax_cudnn", "torch_cudnn", "sum"])
    rows = parts[0].splitlines()
    assert rows[2] == "| long 128k | 100 (5.37) | 120 (4.47) |  | 90.0 (5.97) | 1.20 | 0.90 |"
    assert rows[4].startswith("| short | 7.0 (0.01) | 70.0 (0.00) |")
    assert "2 shapes of equal lengths: 0.775 × in the geometric mean, from 0.50 to 1.20" in parts[1]
    assert parts[2] == "- torch: none (long 128k; long 64k, no groups; short)"
    in_gb = decode.table(records[2:], ["jax_flash"], "GB/s")[0].splitlines()
    assert in_gb[0] == "| cell | jax_flash: µs (GB/s) | × the best other | × a sum |"
    assert in_gb[2].startswith("| short | 7.0 (9.4) |")


def test_block_masks_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sparse, "HEADS", 1)
    monkeypatch.setattr(sparse, "LONG", 300)
    monkeypatch.setattr(runs, "ROUND_SECONDS", 0.0)
    words = ["sparse.py", "--lengths", "256", "--long", "512", "--head-dims", "16"]
    words += ["--layouts", "random", "banded", "--densities", "0.5", "1", "--passes", "forward"]
    names = ["--output", str(tmp_path), "--commit", "abc"]
    monkeypatch.setattr(sys, "argv", words + names)
    sparse.main()
    record = json.loads((tmp_path / "cpu" / "sparse-abc.json").read_text())
    cells = {(x["length"], x["layout"], x["density"]): x for x in record["cells"]}
    layouts = [("random", 0.5), ("random", 1.0), ("banded", 0.5), ("banded", 1.0), ("dense", 1.0)]
    long = [("dense", 1.0), ("butterfly", 0.75), ("stride-4", 0.75)]
    assert set(cells) == {(256, *x) for x in layouts} | {(512, *x) for x in long}
    full = [cells[256, name, 1.0]["milliseconds"] for name in ("random", "banded")]
    assert full[0] == full[1]  # equal layouts are timed once
