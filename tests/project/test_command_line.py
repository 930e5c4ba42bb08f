"""`python -m jax_flash`: what it says of a machine, what it measures, and what it calls wrong."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import jax_flash
from jax_flash import __main__ as front
from jax_flash._compare import cells, measure, rivals


def test_shapes_are_measured_beside_what_is_installed(tmp_path: Path, capsys):
    numbers, picture = tmp_path / "found.json", tmp_path / "found.svg"
    words = ["--shape", "1,64,4/2,16,causal", "2,40,3,24,float32", "--seconds", "200"]
    front.main([*words, "--json", str(numbers), "--plot", str(picture)])
    out = capsys.readouterr().out
    assert f"jax_flash {jax_flash.__version__}, Python 3." in out
    assert "backend xla: runs here" in out
    assert re.search(r"^\| 1,64,4/2,16,causal,bfloat16 +\| +[\d.]+ \| .* x \| +\w+ \|$", out, re.M)
    found = json.loads(numbers.read_text())
    assert [(x["shape"], x["backward"]) for x in found["results"]] == [
        (shape, backward)
        for shape in ("1,64,4/2,16,causal,bfloat16", "2,40,3,24,float32")
        for backward in (False, True)
    ]
    names = {"jax_flash", "jax.nn, XLA"}
    for record in found["results"]:
        assert names <= record["seconds"].keys()
        assert record["missing"].keys() <= {"jax.nn, cuDNN"}  # on a GPU: it has no float32
        assert record["tflops"]["jax_flash"] > 0
        limit = 1e-2 if "bfloat16" in record["shape"] else 1e-5
        assert all(0 < error < limit for error in record["error"].values()), record
    assert "2,40,3,24,float32" in picture.read_text()


def test_what_is_wrong_or_fails_has_no_time():
    cell = cells.read("1,64,2,16,float32")
    ours = rivals.installed()[rivals.OURS]

    def halved(cell: cells.Cell, backward: bool) -> rivals.Program:
        program = ours(cell, backward)

        def load(inputs: list) -> rivals.Loaded:
            loaded = program(inputs)
            return loaded._replace(read=lambda results: [x / 2 for x in loaded.read(results)])

        return load

    def large(cell: cells.Cell, backward: bool) -> rivals.Program:
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 byte.")

    records: list[measure.Record] = []
    known = {rivals.OURS: ours, "halved": halved, "large": large}
    measure.run([cell, cells.read("1,65,2,16")], known, time.monotonic(), records)
    assert [record["shape"] for record in records] == [cell.name] * 2  # late: the first alone
    for record in records:
        assert record["seconds"].keys() == {rivals.OURS}
        assert record["error"]["halved"] == pytest.approx(0.5, rel=1e-3)  # TF32
        assert record["missing"] == {"halved": "wrong: an error of 0.5", "large": "out of memory"}


def test_one_key_and_no_memory(monkeypatch):
    """Gradients of one key's scores are 0; what has no room for its arrays says so."""
    cell, records = cells.read("2,1,3,8,float32"), []
    known = {rivals.OURS: rivals.installed()[rivals.OURS]}
    measure.run([cell], known, time.monotonic(), records)
    assert [[*x["error"], *x["missing"]] for x in records] == [[rivals.OURS]] * 2
    assert all(x["error"][rivals.OURS] < 1e-5 for x in records)

    def draw(cell: cells.Cell) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 byte.")

    monkeypatch.setattr(measure, "draw", draw)
    records.clear()
    measure.run([cell], known, time.monotonic(), records)
    assert [x["missing"] for x in records] == [{rivals.OURS: "out of memory"}] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--shape 4,4096,32", "four numbers above 0 come first; expected B,T,N,H or B,T,N/K,H"),
        ("--shape 4,4096,32/5,128", "5 heads of key and value do not divide 32 of query"),
        ("--shape 4,64,2,8,casual", "'casual' is none of causal, bfloat16, float16, float32"),
        ("--shape 4,64,2,8,float16,float32", "float16 and float32 exclude each other"),
        ("--shape 99999,99999,999,999", "its gradients take 1e+22 operations, above 1e18"),
        ("--seconds nan", "'nan'; expected a number above 0"),
        ("--json /no/where.json", "expected a file in a folder that there is"),
        ("--plot found.jpg", "expected a name that ends in .png, .svg, .pdf"),
    ],
)
def test_an_error_says_what_would_be_right(arguments: str, message: str, capsys):
    with pytest.raises(SystemExit) as stopped:
        front.main(arguments.split())
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.quick
def test_a_process_says_what_is_there_and_measures_nothing():
    package = Path(jax_flash.__file__).parents[1]
    command = [sys.executable, "-m", "jax_flash", "--about"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=package, check=True)
    lines = done.stdout.splitlines()
    assert [x.split(":")[0] for x in lines[1:7]] == [
        "devices", *(f"backend {name}" for name in ("cuda", "cudnn", "cpu", "xla")),
        "compiled kernels",
    ]  # fmt: skip
    assert "forward" not in done.stdout


def test_common_shapes_are_a_dozen():
    for platform in ("gpu", "cpu"):
        found = cells.defaults(platform)
        assert len({*found}) == 12
        assert any(x.kv_heads < x.heads for x in found)
        assert {x.causal for x in found} == {True, False}
        assert [cells.read(x.name) for x in found] == found
