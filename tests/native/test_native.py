"""The compiled module: it fits what is installed, and without it the xla backend still works."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import jax
import jax.numpy as jnp
import jaxlib.version
import pytest

import jax_flash
from jax_flash import _native, _terms, _version
from jax_flash._problem import Problem

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

TERMS = _terms.rows()
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


@pytest.mark.quick
def test_kernels_of_this_build_are_available():
    assert _native.available("cpu") is None
    if sys.platform == "linux":
        assert _native.available("cuda") is None


@pytest.mark.quick
def test_the_version_is_that_of_the_build():
    place = str(Path(_version.__file__).parents[1])
    built = [d.version for d in importlib.metadata.distributions(name="jax_flash", path=[place])]
    assert built in ([], [jax_flash.__version__])
    assert built or jax_flash.__version__ == "0.0"  # of a checkout


@pytest.mark.quick
def test_a_missing_module_leaves_xla(tmp_path: Path):
    reason = run_without_kernels('sys.modules["jax_flash._ext"] = None', tmp_path)
    assert "jax_flash._ext is missing" in reason
    assert "pip install" in reason or "cmake --build" in reason  # the latter in a checkout


# As one built before the table said that sinks are the same for all batch rows.
OTHERWISE = [row.replace("sinks sum [N] 1:[B]", "sinks sum [N] 1:[]") for row in TERMS]
RUNNING = jax_flash.__version__


@pytest.mark.parametrize(
    ("version", "ffi_version", "terms", "reason"),
    [
        pytest.param(
            "0.0.0", (0, 1), TERMS, ["version 0.0.0", RUNNING, "pip install"],
            marks=pytest.mark.quick, id="another version",
        ),
        pytest.param(
            RUNNING, (0, 99), TERMS, ["XLA FFI 0.99", jaxlib.version.__version__, "Update jaxlib"],
            id="for a newer jaxlib",
        ),
        pytest.param(
            RUNNING, (0, 1), TERMS[::-1],
            [f"knows the terms {', '.join(TERMS[::-1])}", "pip install"], id="of other terms",
        ),
        pytest.param(
            RUNNING, (0, 1), OTHERWISE, ["sinks sum [N] 1:[]", "pip install"],
            id="reads a term otherwise",
        ),
    ],
)  # fmt: skip
def test_a_module_that_does_not_fit_leaves_xla(version, ffi_version, terms, reason, tmp_path: Path):
    """What jax makes of none is the same for each reason: on other jaxes CI asks for one."""
    assert (version, ffi_version, terms) != (RUNNING, (0, 1), TERMS)
    setup = STALE.format(version=version, ffi_version=ffi_version, terms=terms)
    told = run_without_kernels(setup, tmp_path)
    assert [part for part in reason if part not in told] == []


@pytest.mark.quick
def test_a_module_that_does_not_load_says_why(monkeypatch: pytest.MonkeyPatch):
    def refuse(name: str) -> ModuleType:
        raise ImportError(f"{name}: undefined symbol: spam")

    monkeypatch.setattr(_native.importlib, "import_module", refuse)
    ext, reasons = _native._load.__wrapped__()
    assert ext is None
    assert "undefined symbol: spam" in reasons["cpu"]
    assert "pip install" in reasons["cuda"]


@pytest.mark.quick
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


@pytest.mark.quick
def test_the_ffi_version_of_jaxlib_is_read():
    version = _native._installed_ffi_version()
    assert version is not None
    assert (0, 3) <= version < (1, 0)


@pytest.mark.quick
def test_the_kernels_travel_with_the_package():
    sources = _native.kernel_sources()
    included = {name for text in sources.values() for name in re.findall('#include "(.*)"', text)}
    assert included
    assert included <= set(sources)


@pytest.mark.quick
def test_a_build_without_cuda_reads_the_kernels_too(monkeypatch: pytest.MonkeyPatch):
    built = (SimpleNamespace(), {"cuda": "this build of jax_flash has no cuda kernels"})
    monkeypatch.setattr(_native, "_load", lambda: built)  # as on macOS
    assert "sm90/forward.cuh" in _native.kernel_sources()


OPERANDS = {
    "bias": ((2, 4, 3, 5), "float32"),
    "mask": ((2, 4, 3, 5), "bool"),
    "query_lengths": ((2,), "int32"),
    "query_segments": ((2, 3), "int32"),
    "key_value_segments": ((2, 5), "int32"),
    "query_positions": ((2, 3), "int32"),
    "key_value_positions": ((2, 5), "int32"),
    "sinks": ((2, 4), "float32"),
    "dropout_state": ((2, 4, 4), "uint32"),
    "score_ids": ((2, 4, 2), "int32"),
}


def run_handler(
    *, without: tuple[str, ...] = (), bottom_right: bool = False, **changes: tuple
) -> None:
    """Calls the CPU handler itself on terms of these shapes and dtypes."""
    absent = ("query_lengths", *without)
    shapes = {name: shape for name, shape in OPERANDS.items() if name not in absent} | changes
    names = [name for name in _terms.TERMS if name in shapes]
    terms = [jnp.ones(*shapes[name]) for name in names]
    problem = Problem("float32", 1.0, (None, 0), bottom_right, terms=tuple(names))
    attribute = problem.attribute()
    results = [jax.ShapeDtypeStruct(x, jnp.float32) for x in ((2, 3, 4, 8), (2, 4, 3))]
    q, k = jnp.ones((2, 3, 4, 8)), jnp.ones((2, 5, 2, 8))
    call = jax.ffi.ffi_call("jax_flash_cpu_forward", results)
    with jax.default_device(jax.devices("cpu")[0]):
        jax.block_until_ready(call(q, k, k, *terms, problem=attribute))


@pytest.mark.quick
def test_the_handler_takes_ones_where_the_table_says():
    run_handler()
    run_handler(bias=((1, 1, 1, 1), "bfloat16"), mask=((1, 4, 1, 5), "bool"))
    run_handler(sinks=((1, 4), "float32"))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "shape", "dtype", "error"),
    [
        (
            "bias",
            (2, 4, 3, 4),
            "float32",
            r"bias has shape \[2, 4, 3, 4\], expected \[2, 4, 3, 5\]",
        ),
        ("bias", (4, 3, 5), "float32", "bias has shape"),
        ("bias", (2, 4, 3, 5), "int32", "bias is not floating point"),
        ("mask", (2, 4, 3, 5), "int32", "mask has XLA element type"),
        ("query_lengths", (1,), "int32", r"query_lengths has shape \[1\], expected \[2\]"),
        ("query_segments", (2, 1), "int32", "query_segments has shape"),
        ("key_value_segments", (2, 5), "uint32", "key_value_segments has XLA element type"),
        ("query_positions", (2, 5), "int32", "query_positions has shape"),
        ("key_value_positions", (2, 5), "float32", "key_value_positions has XLA element type"),
        ("sinks", (2, 1), "float32", r"sinks has shape \[2, 1\].*BN, 1 in place of any of B"),
        ("sinks", (2, 4), "bfloat16", "sinks has XLA element type"),
        ("dropout_state", (2, 4, 5), "uint32", "dropout_state has shape"),
        ("dropout_state", (2, 1, 4), "uint32", "dropout_state has shape"),
        ("score_ids", (2, 4, 4), "int32", "score_ids has shape"),
    ],
)
def test_the_handler_refuses_terms_that_are_not_those_of_the_table(name, shape, dtype, error):
    with pytest.raises(jax.errors.JaxRuntimeError, match=error):
        run_handler(**{name: (shape, dtype)})


@pytest.mark.quick
@pytest.mark.parametrize("name", ["query_segments", "key_value_positions"])
def test_the_handler_refuses_one_of_a_pair(name):
    with pytest.raises(jax.errors.JaxRuntimeError, match="come together"):
        run_handler(without=(name,))


@pytest.mark.quick
def test_the_handler_refuses_positions_that_are_aligned():
    with pytest.raises(jax.errors.JaxRuntimeError, match="bottom_right with positions"):
        run_handler(bottom_right=True)
    run_handler(bottom_right=True, without=("query_positions", "key_value_positions"))
