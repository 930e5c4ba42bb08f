"""Runs pytest on the files that a Bazel py_test names in its arguments."""

import os
import sys
from pathlib import Path

import pytest

# Tests run side by side, each in the folder that Bazel gives it: pytest's own, which they would
# share, is cleared by whoever ends first.
folder = Path(os.environ["TEST_TMPDIR"]) / "pytest"
sys.exit(pytest.main([f"--basetemp={folder}", *sys.argv[1:]]))
