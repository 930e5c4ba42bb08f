"""How the run under NVIDIA's sanitizers tells what failed; it runs on a GPU itself."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .. import sanitize

# Stands for compute-sanitizer: says that it ran what `--run` names, as BEHAVIOUR has it by case.
TOOL = """#!{python}
import json, os, pathlib, signal, sys
names = sys.argv[sys.argv.index("--run") + 1 :]
behaviour = json.loads(os.environ["BEHAVIOUR"])
been = pathlib.Path(os.environ["FOLDER"])
code = 0
for name in names:
    does = behaviour.get(name, "right")
    if does == "segfault" or does == "once" and not (been / name).exists():
        (been / name).touch()
        print("Fatal Python error: somewhere", flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if does == "report":
        print("========= Error: Race reported")
    does = "right" if does in ("once", "report") else does
    code = code or (does == "wrong")
    print(f"{{does}}: {{name}} (0.1 s)", flush=True)
errors = sum(x == "report" for x in behaviour.values())
print(f"========= ERROR SUMMARY: {{errors}} errors")
sys.exit(9 if errors else code)
"""


def run(folder: Path, **behaviour: str) -> tuple[int, str]:
    """The exit status and the output of `python -m tests.sanitize memcheck` on four cases."""
    tool = folder / "compute-sanitizer"
    tool.write_text(TOOL.format(python=sys.executable))
    tool.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        # The installed package in front of the checkout, which has the tests.
        "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parents[2])]),
        "FOLDER": str(folder),
        "BEHAVIOUR": str({k.replace("_", " "): v for k, v in behaviour.items()}).replace("'", '"'),
    }
    command = [sys.executable, "-P", "-m", "tests.sanitize", "memcheck", "--jobs", "1"]
    child = subprocess.run(
        [*command, "--case", "few rows"], env=environment, capture_output=True, text=True
    )
    return child.returncode, child.stdout + child.stderr


CASES = ("few rows", "few rows deterministic", "few rows in halves", "float32 few rows",
         "mma.sync few rows")  # fmt: skip


def test_a_wrong_case_takes_no_other_along(tmp_path: Path):
    status, output = run(tmp_path, few_rows_deterministic="wrong", float32_few_rows="once")
    assert status == 1
    for name in CASES:
        outcome = "wrong" if name == "few rows deterministic" else "right"
        assert f"memcheck: {outcome}: {name} (" in output
    assert "signal SIGSEGV in float32 few rows, which runs again" in output
    assert "Fatal Python error: somewhere" in output
    assert "memcheck: 4 of 5 cases right, 0 reports, 1 restarts" in output
    last = output.split("==== failures: 1\n")[1]  # behind all else
    assert last.startswith("==== memcheck, signal SIGSEGV: few rows deterministic is wrong\n")


def test_what_ends_by_a_signal_each_time_fails(tmp_path: Path):
    status, output = run(tmp_path, few_rows_in_halves="segfault", few_rows="report")
    assert status == 1
    assert "2 of 5 cases right" in output
    failure = "==== memcheck, signal SIGSEGV: few rows in halves did not end, float32 few rows"
    assert failure in output.split("==== failures: ")[1]


def test_all_right(tmp_path: Path):
    status, output = run(tmp_path)
    assert status == 0
    assert output.endswith("==== failures: 0\n")


def test_a_case_that_raises(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    @dataclasses.dataclass
    class Stub:
        error: str = ""

        def run(self) -> None:
            assert not self.error, self.error

    monkeypatch.setattr(sanitize, "CHECKS", {"a": Stub("off by 3"), "b": Stub()})
    monkeypatch.setattr(sanitize, "prepare", lambda with_every_lane: None)
    assert not sanitize.run_cases(["a", "b"], with_every_lane=True)
    printed = capsys.readouterr().out
    assert "AssertionError: off by 3" in printed
    assert "wrong: a (" in printed
    assert "right: b (" in printed
