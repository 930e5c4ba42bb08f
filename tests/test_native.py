"""The compiled module: it fits what is installed, and without it the xla backend still works."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import jaxlib.version
import pytest

import jax_flash
from jax_flash import _native, _terms

pytestmark = pytest.mark.quick

PRELUDE = """
import sys, types
import numpy as np
{setup}
import jax, jax_flash

x = np.ones((1, 4, 2, 8), np.float32)
for backend in (None, "xla"):
    loss = lambda x: jax_flash.flash_attention(x, x, x, backend=backend).sum()
    value, gradient = jax.value_and_grad(loss)(x)
    assert np.allclose(value, x.size), value
    assert np.allclose(gradient, 1), gradient
try:
    jax_flash.flash_attention(x, x, x, backend="cpu")
except NotImplementedError as error:
    print(error)
"""

TERMS = list(_terms.TERMS)
STALE = """
module = sys.modules["jax_flash._ext"] = types.ModuleType("jax_flash._ext")
module.version, module.ffi_version = {version!r}, {ffi_version!r}
module.terms = lambda: {terms!r}
"""


PACKAGE = Path(jax_flash.__file__).resolve().parent


def run_python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in `folder`, with the package under test on its path."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": str(PACKAGE.parent)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )


def run_without_kernels(setup: str, folder: Path, *options: str) -> str:
    """Calls jax_flash in a process of its own after `setup`; returns why backend "cpu" refused."""
    result = run_python(folder, *options, "-c", PRELUDE.format(setup=setup))
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_kernels_of_this_build_are_available():
    assert _native.available("cpu") is None
    if sys.platform == "linux":
        assert _native.available("cuda") is None


def test_a_missing_module_leaves_xla(tmp_path: Path):
    reason = run_without_kernels('sys.modules["jax_flash._ext"] = None', tmp_path)
    assert "jax_flash._ext is missing" in reason
    assert "pip install" in reason or "cmake --build" in reason  # the latter in a checkout


def test_a_module_of_another_version_leaves_xla(tmp_path: Path):
    reason = run_without_kernels(
        STALE.format(version="0.0.0", ffi_version=(0, 1), terms=TERMS), tmp_path
    )
    assert "version 0.0.0" in reason
    assert jax_flash.__version__ in reason
    assert "pip install" in reason


def test_a_module_for_a_newer_jaxlib_leaves_xla(tmp_path: Path):
    setup = STALE.format(version=jax_flash.__version__, ffi_version=(0, 99), terms=TERMS)
    reason = run_without_kernels(setup, tmp_path)
    assert "XLA FFI 0.99" in reason
    assert jaxlib.version.__version__ in reason
    assert "Update jaxlib" in reason


def test_a_module_of_other_terms_leaves_xla(tmp_path: Path):
    setup = STALE.format(version=jax_flash.__version__, ffi_version=(0, 1), terms=TERMS[::-1])
    reason = run_without_kernels(setup, tmp_path)
    assert f"knows the terms {', '.join(TERMS[::-1])}" in reason
    assert "pip install" in reason


def test_a_module_that_does_not_load_says_why(monkeypatch: pytest.MonkeyPatch):
    def refuse(name: str) -> ModuleType:
        raise ImportError(f"{name}: undefined symbol: spam")

    monkeypatch.setattr(_native.importlib, "import_module", refuse)
    ext, reasons = _native._load.__wrapped__()
    assert ext is None
    assert "undefined symbol: spam" in reasons["cpu"]
    assert "pip install" in reasons["cuda"]


@pytest.mark.parametrize(
    ("built", "installed", "fits"),
    [
        ((0, 3), (0, 3), True),
        ((0, 3), (0, 5), True),
        ((0, 3), None, True),
        ((0, 4), (0, 3), False),
        ((0, 3), (1, 0), False),
    ],
)
def test_an_older_ffi_version_fits(built, installed, fits):
    module = SimpleNamespace(version=jax_flash.__version__, ffi_version=built, terms=lambda: TERMS)
    assert (_native.misfit(module, installed) is None) == fits


def test_the_ffi_version_of_jaxlib_is_read():
    version = _native._installed_ffi_version()
    assert version is not None
    assert (0, 3) <= version < (1, 0)


def test_the_kernels_travel_with_the_package():
    root = _native.kernel_root()
    assert (root / "runtime" / "params.h").is_file()
    assert list((root / "kernels").glob("**/*.cuh"))
