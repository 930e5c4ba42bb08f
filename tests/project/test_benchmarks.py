"""The benchmarks' scripts: where they run, what they compare and tell; their numbers need a GPU."""

import collections
import dataclasses
import functools
import json
import math
import os
import re
import runpy
import subprocess
import sys
import types
from pathlib import Path

import compare
import pytest
import scaling
import train_step
import tune
from common import machine, peers, ring_model, shapes
from common.shapes import Cell

import jax_flash
from jax_flash import _gpu
from jax_flash._ops import passes
from jax_flash._problem import Problem, Shapes

from ..devices import mesh_with
from .conftest import FOLDER


def test_the_front_door_says_what_there_is():
    door = functools.partial(subprocess.run, capture_output=True, text=True, cwd=FOLDER.parent)
    listed = door([sys.executable, "benchmarks"], check=True).stdout.splitlines()[2:]
    names = [line.split()[0] for line in listed]
    scripts = {x.stem for x in FOLDER.glob("*.py")}
    assert len(names) <= 12
    assert {*names} == scripts - {"__main__"} | {"figures", "host"}
    assert all(re.fullmatch(r"  \w+ +[A-Z][^.]+.*[.]", line) for line in listed)
    for start in (["benchmarks"], ["-m", "benchmarks"]):
        there = door([sys.executable, *start, "tune", "--help"], check=True).stdout
        assert there.startswith("usage: tune.py ")
    refused = door([sys.executable, "benchmarks", "tunes"], check=False)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith("no benchmark is called 'tunes': there are cliffs, compare, ")


def test_documents_name_benchmarks_that_there_are():
    """Scripts, and results; CHANGELOG.md may name older ones."""
    root = FOLDER.parent
    pages = [root / "README.md", root / "CONTRIBUTING.md", FOLDER / "README.md"]
    pages += [*root.glob("docs/*.md"), *root.glob("cuda/*.md"), root / ".ci" / "gpu"]
    texts = "\n".join(page.read_text() for page in pages if page.is_file())
    named = {*re.findall(r"(?<!build/)benchmarks/[\w./*-]*\w", texts)}
    assert len(named) > 15
    assert {x for x in named if not [*root.glob(x)]} == set()
    scripts = {x.stem for x in FOLDER.glob("*.py")} | {"figures", "host"}
    doors = {*re.findall(r"python benchmarks (\w+)", texts)}
    assert "figures" in doors
    assert doors <= scripts
    decisions = (root / "cuda" / "decisions.md").read_text()
    tables = re.findall(r"\| Commit \| By \|\n\|[-|]+\|\n((?:\|.*\n)+)", decisions)
    by = {*re.findall(r"\| *([^|]*?) *\|$", "".join(tables), re.MULTILINE)}
    by = {name for several in by for name in several.split(", ") if name}
    assert "functions" in by
    assert by <= scripts | {"functions", "errors", "ncu", "spills"}


def test_results_have_one_set_of_each_kind():
    kinds = collections.Counter(
        (path.parent.name, re.sub(r"-?[0-9a-f]{7,10}", "", path.name))
        for path in (FOLDER / "results").glob("*/*")
    )
    assert kinds["nvidia-h200", "features.json"] == kinds["nvidia-h200", ".json"] == 1
    assert {kind for kind, count in kinds.items() if count > 1} == set()


@pytest.mark.parametrize(
    "script",
    ["run", "features", "tune", "train_step", "compare", "sparse", "cliffs", "papers"],
)
def test_what_measures_a_gpu_says_so_elsewhere(script: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jax.default_backend", lambda: "cpu")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # of processes that are asked
    errors = ["--errors", str(Path(jax_flash.__file__).parents[1])] * (script == "compare")
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *errors])
    with pytest.raises(SystemExit, match=rf"{script}.py measures on an NVIDIA GPU.*'cpu'"):
        runpy.run_path(str(FOLDER / f"{script}.py"), run_name="__main__")


def test_results_go_where_git_does_not_look():
    root = FOLDER.parent
    assert machine.RESULTS.parts[: len(root.parts) + 1] == (*root.parts, "build")
    assert "/build/" in (root / ".gitignore").read_text().splitlines()


def test_training_tables():
    cell = {"kind": "step", "length": 4096, "batch": 8, "remat": "attention"}
    found = {"tokens_per_second": 400_000, "mfu": 0.4, "program_gb": 23.7502, "peak_gb": 23.8}
    plans = {65536: 7.0, 131072: 150.0, 98304: "out of memory"}
    records = [
        cell | {"attention": "none", "ms": 60.0},
        cell | {"attention": "jax_flash", "ms": 80.0} | found,
        cell | {"attention": "xla", "error": "out of memory"},
        {"kind": "longest", "attention": "jax_flash", "limit_gb": 140.0, "plans": plans},
    ]
    steps, longest = train_step.tables(records)
    assert (
        "| 4096 | 8 | attention | jax_flash | 80.0 | 400,000 | 40.0% | 23.750 | 23.8 | 25% |"
        in steps
    )
    assert "| 4096 | 8 | attention | xla | out of memory |" in steps
    assert "| jax_flash | 65536 | 7.0 | 98304 | out of memory |" in longest


def test_distance_of_loss_curves():
    def curve(attention: str, seed: int, shift: float) -> dict[str, object]:
        losses = [3.0 + shift] * 40
        record = {"kind": "loss", "attention": attention, "seed": seed}
        return record | {"losses": losses, "validation": 2.0 + shift}

    shifts = [("jax_flash", 0, 0.0), ("xla", 0, 0.1), ("jax_flash", 1, 0.5), ("xla", 1, 0.5)]
    found = train_step.compare_curves([curve(*shift) for shift in shifts])
    assert found is not None
    assert found["curves_apart_by_attentions"] == pytest.approx([0.1, 0.0])
    assert found["curves_apart_by_seeds"] == pytest.approx([0.5, 0.4])
    assert train_step.compare_curves([curve(*shifts[0])]) is None


def test_tuned_variants_fit_the_gpu():
    sizes = Shapes(
        batch=4, q_len=4096, kv_len=4096, q_heads=16, kv_heads=16, head_dim=128, value_dim=128
    )
    problem, h200 = Problem(dtype="bfloat16", scale=0.1), _gpu.spec.GPUS["H200"]
    forward, backward = passes(problem).values()

    def tune_tiling(which, call, changes):
        return tune.plan_changed(_gpu.plan, which, changes, call, sizes, h200).tiling

    changes = dict(tune.read(word) for word in ["stages=2", "query_stages=2", "dynamic=False"])
    tiling = tune_tiling("forward", forward, changes)
    assert (tiling.stages, tiling.query_stages, tiling.dynamic) == (2, 2, False)
    assert tune_tiling("backward", forward, changes) == _gpu.plan(forward, sizes, h200).tiling
    with pytest.raises(ValueError, match="needs 264192 of 232448 bytes"):
        tune_tiling("forward", forward, {"query_stages": 2})
    tiling = tune_tiling("backward", backward, {"reads_ahead": False, "l2_heads": 3})
    assert (tiling.reads_ahead, tiling.l2_heads) == (False, 3)
    with pytest.raises(ValueError, match="needs 281600 of 232448 bytes"):
        tune_tiling("backward", backward, {"score_stages": 5})


def test_installed_versions_are_compared():
    folder = str(Path(jax_flash.__file__).parents[1])
    options = "--head-dim 32 --length 64 --tokens 128 --model-dim 64 --segment 32 --seconds 0.001"
    command = [sys.executable, FOLDER / "compare.py", folder, folder, *options.split()]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    run = functools.partial(subprocess.run, capture_output=True, text=True, env=environment)
    found = run([*command, "--pass", "forward", "backward", "deterministic"], check=True)
    table = [line.split() for line in found.stdout.splitlines()[1:]]
    assert [words[1] for words in table] == ["full"] * 3 + ["causal"] * 3
    assert [words[-6] for words in table] == ["forward", "backward", "deterministic"] * 2
    assert all(words[-3] == "1.000" and float(words[-2]) > 0 for words in table)
    refused = run([sys.executable, FOLDER / "compare.py", str(FOLDER)], check=False)
    assert refused.returncode == 2
    assert "holds no installed jax_flash" in refused.stderr
    alone = run([sys.executable, FOLDER / "compare.py", "--code", str(FOLDER)], check=False)
    assert alone.returncode == 2
    assert "name two versions" in alone.stderr


def test_errors_of_backends_are_shown(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(compare, "CELL", Cell(1, 64, 2, 2, 16, causal=True))
    monkeypatch.setattr(compare, "DTYPES", ("float32",))
    monkeypatch.setattr(sys, "argv", ["compare.py", "--errors"])
    compare.main()
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head == "| dtype | scale | | out | dq | dk | dv |"
    assert [row.split(" | ")[1:3] for row in rows] == [
        [scale, name] for scale in "14" for name in ("cpu", "xla", "jax.nn, xla")
    ]
    assert all(0 < float(x) < 1e-5 for row in rows for x in row.strip(" |").split(" | ")[3:])


@pytest.mark.parametrize("which", tune.PASSES)
def test_tuned_passes_are_checked(which: str, monkeypatch: pytest.MonkeyPatch, capsys):
    def attend(*arrays, backend, deterministic, **options):
        assert (backend, deterministic) == ("cuda", True)
        return jax_flash.flash_attention(*arrays, backend="xla", **options)

    monkeypatch.setattr(peers, "jax_flash", types.SimpleNamespace(flash_attention=attend))
    monkeypatch.setattr(tune, "SECONDS", 0)
    monkeypatch.setattr(shapes, "TOKENS", 64)
    monkeypatch.setattr(shapes, "MODEL_DIM", 32)
    arguments = ["--pass", which, "--head-dim", "16", "--length", "32", "--causal"]
    arguments += ["--segment", "8", "--deterministic"]
    monkeypatch.setattr(sys, "argv", ["tune.py", *arguments, "--set", "stages=3"])
    plan = _gpu.plan
    tune.main()
    assert _gpu.plan is plan
    rows = capsys.readouterr().out.splitlines()[1:]
    assert ["as chosen" in rows[0], "stages=3" in rows[1], len(rows)] == [True, True, 2]
    assert all(0 < float(row.split()[-1]) < 1e-2 for row in rows)


def test_tuned_terms(monkeypatch: pytest.MonkeyPatch, capsys):
    """Each of them reaches the call, beside a cell's own options."""
    asked = []

    def attend(*arrays, backend, deterministic, **options):
        asked.append(options)
        return jax_flash.flash_attention(*arrays, backend="xla", **options)

    monkeypatch.setattr(peers, "jax_flash", types.SimpleNamespace(flash_attention=attend))
    monkeypatch.setattr(tune, "SECONDS", 0)
    monkeypatch.setattr(shapes, "TOKENS", 256)
    monkeypatch.setattr(shapes, "MODEL_DIM", 16)
    for name in tune.TERMS:
        arguments = ["--head-dim", "16", "--length", "128", "--segment", "64", "--terms", name]
        monkeypatch.setattr(sys, "argv", ["tune.py", *arguments, "--set", "stages=3"])
        tune.main()
        rows = capsys.readouterr().out.splitlines()[1:]
        assert [float(row.split()[-1]) for row in rows] == [0, 0]
    own = {"is_causal", "local_window_size", "query_segment_ids", "key_value_segment_ids"}
    new = {name for options in asked for name, value in options.items() if value is not None} - own
    assert new == {
        "softcap", "sinks", "mask", "query_seq_lengths", "key_value_seq_lengths", "block_mask",
    }  # fmt: skip
    assert (64, 128) in [options["local_window_size"] for options in asked]


def run_scaling(*arguments):
    command = [sys.executable, str(FOLDER / "scaling.py"), "--platform=cpu", *arguments]
    environment = os.environ | {"PYTHONPATH": str(Path(jax_flash.__file__).parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [row.strip("| ").split(" | ") for row in done.stdout.splitlines()]


def test_scaling_times_a_ring_its_kernels_and_its_link():
    ways = ("ring:zigzag", "all_to_all:contiguous", "all_gather:zigzag")
    out = run_scaling("--total=64", "--heads=2:1", "--rounds=1", "--ways", *ways)
    rows = {row[2]: ["", *row] for row in out if row[0] == "32"}
    ring = rows["ring, zigzag"]
    assert all(float(x.replace(",", "")) > 0 for x in (ring[4], ring[7], ring[8]))
    assert "all_to_all, contiguous" not in rows  # one kv head, two devices
    expected = {"one device", "all_gather, zigzag", "model, 2 devices", "model, 8 devices"}
    assert expected <= set(rows)
    assert "ring, striped" not in rows  # not asked for


@pytest.mark.slow
def test_a_training_step_has_one_devices_losses():
    """The script compares them itself, and fails where they differ."""
    size = ("--layers=1", "--width=64", "--length=64", "--rounds=2")
    rows = {tuple(row[:2]): row for row in run_scaling("--step=1b3", *size)}
    one, same = rows["1", "1 x 64"], rows["2", "1 x 64"]
    assert float(same[-1]) == pytest.approx(float(one[-1]), abs=2e-4)  # as printed
    assert float(rows["2", "2 x 64"][3].replace(",", "")) > 0


def test_a_training_step_gathers_parameters_and_no_rows():
    """Four rows over four devices, 1024 keys on each, of which a ring gathers none."""
    sizes = {"heads": 2, "kv_heads": 2, "width": 32, "layers": 1, "vocabulary": 256}
    config = dataclasses.replace(
        scaling.training().PRESETS["1b3"], length=4096, batch=4, dtype="float32", **sizes
    )
    mesh = mesh_with(data=1, model=1, seq=4)
    text = scaling.training_step(config, mesh)[0].compile().as_text()
    gathered = re.findall(r"= \w+\[([\d,]+)\]\S* all-gather\(", text)
    numbers = [math.prod(map(int, shape.split(","))) for shape in gathered]
    assert 0 < max(numbers) <= config.vocabulary * config.width < 4 * config.length * config.width


def test_a_profile_tells_how_much_of_the_link_is_hidden():
    def event(name, begin, end, pid=1):
        return {"ph": "X", "pid": pid, "name": name, "ts": begin, "dur": end - begin}

    gpu = {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/device:GPU:0"}}
    host = {"ph": "M", "pid": 2, "name": "process_name", "args": {"name": "/host:CPU"}}
    computes = [event("flash_forward", 0, 10), event("convert", 8, 12), event("main", 0, 99, pid=2)]
    sends = [event("ncclDevKernel_SendRecv", 5, 15), event("ncclDevKernel_SendRecv", 20, 30)]
    assert scaling.hidden_of([gpu, host, *computes, *sends]) == 7 / 20
    assert scaling.hidden_of([gpu, host, *computes]) is None


def test_the_model_of_a_ring_takes_the_longer_of_compute_and_link():
    cell = ring_model.Cell(tokens=1000, heads=4, kv_heads=2, head_dim=10, item=2)
    fast, slow = ring_model.Model(1e9, 1e30, 0.0), ring_model.Model(1e30, 1e9, 0.0)
    for devices in (1, 2, 3, 8):
        operations = 3.5 * 4 * 4 * 10 * (devices * 1000) ** 2 / 2 / devices
        assert fast.seconds(cell, devices) == pytest.approx(operations / 1e9)
        # Keys twice and gradients once for each hop; keys and values of 2 heads of 10.
        sent = (devices - 1) * 3 * 2 * 2 * 1000 * 2 * 10
        assert slow.seconds(cell, devices) == pytest.approx(sent / 1e9)
        assert slow.sent(cell, devices) == sent
    both = ring_model.Model(1e9, 1e9, 1.0).seconds(cell, 2)
    assert both > max(fast.seconds(cell, 2), slow.seconds(cell, 2))


def test_exported_programs_of_checkouts_run_in_one_process(tmp_path: Path):
    """Also their kernels' text: each checkout's includes are of its own name."""
    cases = tmp_path / "some.py"
    cases.write_text(
        "import jax, jax.numpy as jnp\n"
        "def cases(jax_flash):\n"
        "    x = jax.ShapeDtypeStruct((1, 160, 2, 32), jnp.bfloat16)\n"
        "    for causal in (False, True):\n"
        "        def call(q, k, v, causal=causal):\n"
        "            return jax_flash.flash_attention(q, k, v, is_causal=causal)\n"
        "        yield ('causal' if causal else 'full'), call, (x, x, x)\n"
    )
    folder = str(Path(jax_flash.__file__).parents[1])
    command = [sys.executable, FOLDER / "compare.py", f"old={folder}", f"new={folder}"]
    command += ["--cases", cases, "--export"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_FLASH_CACHE_DIR": str(tmp_path / "k")}
    run = functools.partial(
        subprocess.run, capture_output=True, text=True, check=True, env=environment
    )
    said = run([*command, tmp_path / "cuda"]).stdout.splitlines()
    assert said == ["old: 2 cases, 4 programs of kernels", "new: 2 cases, 4 programs of kernels"]
    record = json.loads((tmp_path / "cuda" / "new.json").read_text())
    included = {
        x for text in record["sources"].values() for x in re.findall('#include "(.*)"', text)
    }
    included |= {x for _, header, _ in record["programs"] for x in re.findall('e "(.*)"', header)}
    assert included | {source for source, _, _ in record["programs"]} <= record["sources"].keys()
    run([*command, tmp_path / "cpu", "--platform", "cpu"])
    timed = run(
        [sys.executable, FOLDER / "compare.py", "--exported", tmp_path / "cpu", "--only", "c"]
    )
    (line,) = timed.stdout.splitlines()[1:]
    assert line.split()[0] == "causal"
    assert line.split()[-1] == "0.0e+00"
