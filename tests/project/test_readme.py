"""README's Python examples run as they stand; its support table is what backends declare."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

from jax_flash import _support_table
from jax_flash._terms import TERMS

pytestmark = pytest.mark.quick

README = Path(__file__).parents[2] / "README.md"


def test_it_is_short_and_opens_with_code_and_a_figure():
    lines = README.read_text().splitlines()
    assert len(lines) <= 130
    first = "\n".join(lines[:30])
    assert first.index("```python") < first.index("figures/gain-light.svg")


def test_the_examples_run():
    examples = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    assert examples
    for example in examples:
        exec(compile(example, str(README), "exec"), {})


def test_one_command_installs_what_examples_and_tests_need():
    """Another `pip install` of the checkout would build it again."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    install, *others = (block for block in blocks if "pip install" in block or "python" in block)
    extras = [set(re.findall(r"\w+", x)) for x in re.findall(r"pip install '\.\[(.*)\]'", install)]
    assert extras == [{"test"}, {"test", "cuda12"}, {"test", "cuda13"}]
    assert not any("pip install" in block for block in others)

    project = tomllib.loads((README.parent / "pyproject.toml").read_text())["project"]
    listed = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    brought = {re.split(r"\W", x.replace("-", "_"))[0] for x in listed}
    brought |= {"jaxlib", "ml_dtypes", "numpy"}  # by jax
    sources = [*README.parent.glob("examples/**/*.py")]
    brought |= {"jax_flash", *(x.stem for x in README.parent.glob("examples/*"))}
    used = set()
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Import):
                used |= {x.name.split(".")[0] for x in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                used.add(node.module.split(".")[0])
    assert used - sys.stdlib_module_names - brought == set()


def test_support_table_is_what_the_backends_declare(tmp_path: Path):
    copy = tmp_path / "README.md"
    copy.write_text(README.read_text())
    _support_table.write(copy)
    assert copy.read_text() == README.read_text()
    rows = [line for line in _support_table.table().splitlines() if line.startswith("| float32 |")]
    assert rows == ["| float32 | yes | yes | no | yes | yes |"]


def test_support_table_shows_every_term():
    changes = [change for row in _support_table._PROBLEMS.values() for change in row]
    shown = {name for change in changes for name in change.get("terms", ())}
    assert shown == set(TERMS)
