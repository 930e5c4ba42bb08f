"""The README's Python examples run as they stand."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

README = Path(__file__).parent.parent / "README.md"


def test_the_examples_run():
    examples = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    assert examples
    for example in examples:
        exec(compile(example, str(README), "exec"), {})
