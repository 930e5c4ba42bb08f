"""Tests that pages, CI, build files and kernels name are where they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
TEXTS = (
    "*.md", "docs/*.md", "benchmarks/*.md", "cuda/**/*.md", "tests/**/*.md", "BUILD",
    "pyproject.toml", ".ci/*", ".github/workflows/*", "cuda/kernels/**/*.cuh", "tests/**/*.[ch]*",
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
