"""A checkout in front of the installed package, whose module it takes if both have the same source.

Else what happened is said, and what to do.

Not under Bazel, where the package is a tree of links into a checkout.
"""

import shutil
from pathlib import Path

import pytest

from ..native.test_native import PACKAGE, run_python, run_without_kernels


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout without a compiled module, and with one test."""
    root = tmp_path / "checkout"
    shutil.copytree(PACKAGE, root / "jax_flash", ignore=shutil.ignore_patterns("_ext.*", "_cuda"))
    (root / "CMakeLists.txt").touch()
    sources = Path(__file__).parents[2]
    shutil.copy(sources / "pyproject.toml", root)
    (root / "tests").mkdir()
    shutil.copy(sources / "tests" / "conftest.py", root / "tests")
    (root / "tests" / "test_one.py").write_text("def test_one():\n    pass\n")
    return root


@pytest.fixture
def edited(checkout: Path) -> Path:
    """One whose Python files are not those of the installed package."""
    with (checkout / "jax_flash" / "masks.py").open("a") as file:
        file.write("# edited")
    return checkout


def test_the_same_source_takes_the_installed_module(checkout: Path):
    (checkout / "jax_flash" / "_version.py").write_text('__version__ = "0.0.1"\n')
    result = run_python(checkout, "-m", "pytest", "tests/test_one.py::test_one")
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"jax_flash: {checkout}" in result.stdout


def test_another_source_in_front_of_the_installed_package_is_named(edited: Path):
    reason = run_without_kernels("", edited)
    assert f"source folder {edited / 'jax_flash'}, which has none" in reason
    assert f"installed package, {PACKAGE}, has another masks.py" in reason
    assert "python -P" in reason
    assert f"pip install {edited}" in reason
    assert f"cmake --build {edited / 'build'}" in reason
    assert run_without_kernels("", edited, "-P") == ""


def test_source_files_without_an_installed_package_say_how_to_install(checkout: Path):
    # Where jax_flash is installed, everything beside it is linked from another folder.
    site = checkout.parent / "site"
    site.mkdir()
    for path in PACKAGE.parent.iterdir():
        if path != PACKAGE:
            (site / path.name).symlink_to(path)
    setup = f"sys.path = [{str(site)!r} if p == {str(PACKAGE.parent)!r} else p for p in sys.path]"
    reason = run_without_kernels(setup, checkout)
    assert f"source folder {checkout / 'jax_flash'}, which has none" in reason
    assert f"pip install {checkout}" in reason
    assert f"cmake --build {checkout / 'build'}" in reason


def test_the_suite_without_a_compiled_module_says_so_once(edited: Path):
    result = run_python(edited, "-m", "pytest")
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert (result.stdout + result.stderr).count("which has none") == 1
    assert "python -P -m pytest" in result.stderr
    result = run_python(edited, "-P", "-m", "pytest", "tests/test_one.py::test_one")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 passed" in result.stdout
    assert str(PACKAGE) in result.stdout
