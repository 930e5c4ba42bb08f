"""Runs pytest on the files that a Bazel py_test names in its arguments."""

import sys

import pytest

sys.exit(pytest.main(sys.argv[1:]))
