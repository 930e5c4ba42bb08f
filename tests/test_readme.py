"""README's Python examples run as they stand; its support table is what backends declare."""

import re
from pathlib import Path

import pytest

from jax_flash import _support_table
from jax_flash._terms import TERMS

pytestmark = pytest.mark.quick

README = Path(__file__).parent.parent / "README.md"


def test_the_examples_run():
    examples = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    assert examples
    for example in examples:
        exec(compile(example, str(README), "exec"), {})


def test_support_table_is_what_the_backends_declare(tmp_path: Path):
    copy = tmp_path / "README.md"
    copy.write_text(README.read_text())
    _support_table.write(copy)
    assert copy.read_text() == README.read_text()
    rows = [line for line in _support_table.table().splitlines() if line.startswith("| float32 |")]
    assert rows == ["| float32 | yes | yes | yes | yes |"]


def test_support_table_shows_every_term():
    changes = [change for row in _support_table._PROBLEMS.values() for change in row]
    shown = {name for change in changes for name in change.get("terms", ())}
    assert shown == set(TERMS)
