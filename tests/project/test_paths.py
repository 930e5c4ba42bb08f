"""Tests and files that pages, CI, build files and kernels name are where they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jax_flash import _gpu
from jax_flash._ops import passes
from jax_flash._problem import Problem, Shapes

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
TEXTS = (
    "*.md", "docs/*.md", "benchmarks/*.md", "cuda/**/*.md", "tests/**/*.md", "BUILD",
    "pyproject.toml", ".ci/*", ".github/workflows/*", "cuda/kernels/**/*.cuh", "tests/**/*.cc",
    "tests/**/*.h",
)  # fmt: skip


@pytest.mark.parametrize("texts", TEXTS)
def test_named_tests_are_there(texts):
    """A test that is moved or renamed takes along what says how to run it."""
    found = [path for path in ROOT.glob(texts) if path.is_file() and path.name != "CHANGELOG.md"]
    missing = [
        f"{path.relative_to(ROOT)}: {named}"
        for path in found
        for named in re.findall(r"(?<!cpu/)\btests/[\w/*]+\.(?:py|cc|h|md)\b", path.read_text())
        if not any(ROOT.glob(named))
    ]
    assert missing == []


PAGES = ("README.md", "docs/*.md", "benchmarks/*.md", "cuda/*.md", "tests/**/*.md")
FOLDERS = ("jax_flash", "cuda", "cpu", "ffi", "tests", "benchmarks", "examples", "docs")


def test_named_files_are_there():
    """A page names a file by the end of its path; `*` stands for some of a name."""
    files = [x for folder in FOLDERS for x in (ROOT / folder).rglob("*.*")]
    files += [*ROOT.glob("*.*"), *(ROOT / ".ci").glob("*")]
    missing = [
        f"{page.relative_to(ROOT)}: {named}"
        for pages in PAGES
        for page in ROOT.glob(pages)
        for named in re.findall(r"`(?:\.\./)*([\w/*]+\.(?:cuh|py|cc|h|md))`", page.read_text())
        if not any(path.match(named) for path in files)
    ]
    assert missing == []


def test_the_plan_that_is_shown_is_made():
    """The lines of a plan in cuda/README.md."""
    text = (ROOT / "cuda/README.md").read_text()
    shown = re.search(r"\n```\n(operand .*?)```", text, re.DOTALL)
    assert shown is not None
    lines = [re.split(r" {3,}", line)[0] for line in shown[1].splitlines()]
    problem = Problem(dtype="bfloat16", scale=0.125, window=(None, 0))
    shapes = Shapes(2, 4096, 4096, 16, 16, 128, 128)
    plan = _gpu.plan(passes(problem)["forward"], shapes, _gpu.spec.GPUS["H200"])
    assert {*lines} <= {*plan.text.splitlines()}


def test_each_test_file_has_a_name_of_its_own():
    """Bazel names a test by its file alone (BUILD)."""
    names = [path.name for path in (ROOT / "tests").glob("*/test_*.py")]
    assert sorted(names) == sorted({*names})
