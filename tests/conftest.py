"""What all tests share: eight virtual CPU devices, hypothesis profiles, which backends run."""

from __future__ import annotations

import gc
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# Read when NumPy is imported: threads of one worker's small products (numpy_oracle.py) would wait
# for the cores that others compile on.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Read when jax is imported: programs would have each operation's whole stack, with pytest's frames,
# for 17 % of the time that they take to be traced and lowered.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

import hypothesis
import jax
import pytest

import jax_flash
from jax_flash import _native
from jax_flash._gpu.sm90 import forward_rows
from jax_flash._ops import shared

# Read when jax first looks for devices: the sharding tests need several, and one CPU can play
# them all. On a GPU, XLA's search for the fastest matrix products takes longer than the tests (40 s
# for one small second derivative). For CPUs XLA's older emitter, with one module for LLVM, compiles
# in a third of the time (jaxlib 0.12 has none): as LLVM's optimisations (below), that is not what
# tests are about.
_SETTINGS = {"xla_force_host_platform_device_count": 8, "xla_gpu_autotune_level": 0}
if "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ:
    _SETTINGS["xla_backend_extra_options"] = "xla_cpu_disable_new_fusion_emitters"
    _SETTINGS["xla_cpu_parallel_codegen_split_count"] = 1
_FLAGS = os.environ.get("XLA_FLAGS", "")
for _name, _value in _SETTINGS.items():
    if _name not in _FLAGS:
        _FLAGS += f" --{_name}={_value}"
os.environ["XLA_FLAGS"] = _FLAGS.strip()
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # workers share the GPU

if _EMULATED := int(os.environ.get("JAX_FLASH_EMULATE", 0)):
    from . import emulator

    emulator.install(seed=_EMULATED - 1)

hypothesis.settings.register_profile(
    "ci",
    deadline=None,  # the first call of a shape compiles
    derandomize=True,
    max_examples=15,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
    "search",
    parent=hypothesis.settings.get_profile("ci"),
    derandomize=False,
    max_examples=1000,
)
# What is found is told at once: the time of the night may end while it is made smaller.
hypothesis.settings.register_profile(
    "nightly",
    parent=hypothesis.settings.get_profile("search"),
    phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Workers of `-n auto`, pytest's default here: none where one process is what is meant."""
    option = config.option
    if option.trace or option.capture == "no" or all("::" in argument for argument in config.args):
        return 0
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None  # xdist reads it
    # xdist would count the cores of the machine: without hyperthreads, and those of others too.
    own = (
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    return min(len(own), 16)  # a worker takes about 1 GB


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--once",
        action="store_true",
        help="each test function once for each of Flax's APIs: of the kernels, if XLA has others",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.option.once:
        return
    chosen: dict[tuple[str, str], pytest.Item] = {}
    for item in items:
        function = item.nodeid.partition("[")[0], _parameters(item).get("api", "")
        if function not in chosen or _takes_xla(chosen[function]) > _takes_xla(item):
            chosen[function] = item
    kept = {*chosen.values()}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def _parameters(item: pytest.Item) -> dict[str, Any]:
    has = isinstance(item, pytest.Function) and hasattr(item, "callspec")
    return item.callspec.params if has else {}


def _takes_xla(item: pytest.Item) -> int:
    """2 for backend "xla", 1 where a GPU is needed, 0 otherwise."""
    names = {x for x in _parameters(item).values() if isinstance(x, str)}
    return 2 if "xla" in names else int("cuda" in names)


def pytest_configure() -> None:
    """Without the compiled module most tests fail: the reason is said once, before the first."""
    reason = _native.available("cpu")
    if reason is not None:
        raise pytest.UsageError(reason)


def pytest_report_header() -> str:
    return f"jax_flash: {jax_flash.__file__}"


def _gpu_present() -> bool:
    try:
        return bool(jax.devices("gpu"))
    except RuntimeError:
        return False


# Most of the suite's time is compiling small programs for the CPU, and half of that would be LLVM's
# optimisations, which are below what tests are about; XLA's own passes stay. `.ci/run` has tests
# with JAX_DISABLE_MOST_OPTIMIZATIONS=0 too: neither this nor the compiler's flags above.
if "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ and not _gpu_present():
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # in the processes that tests start
    jax.config.update("jax_disable_most_optimizations", True)

# Tracing makes many small objects that end by themselves: to look for cycles among them at Python's
# thresholds takes a twentieth of the time. They are looked for when a module ends.
gc.freeze()
gc.set_threshold(100_000, 50, 50)

BACKENDS = (
    pytest.param("xla"),
    pytest.param("cpu"),
    pytest.param(
        "cuda",
        marks=(
            pytest.mark.gpu,
            pytest.mark.skipif(not (_gpu_present() or _EMULATED), reason="needs an NVIDIA GPU"),
        ),
    ),
)


needs_module = pytest.mark.skipif(
    _native.available("cuda") is not None, reason=f"{_native.available('cuda')}"
)


def with_backends(values: Sequence[Any], xla: Callable[[Any], bool]) -> list[Any]:
    """For parametrize of "backend" and a value: XLA, which compiles each anew, gets some alone."""
    return [
        pytest.param(*backend.values, value, marks=backend.marks)
        for backend in BACKENDS
        for value in values
        if backend.values != ("xla",) or xla(value)
    ]


@pytest.fixture(params=["xla", "cpu"])
def host_backend(request: pytest.FixtureRequest) -> str:
    """The backends that run everywhere, for tests whose float32 inputs a GPU kernel may refuse."""
    return request.param


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend by name; with a GPU present the arrays of a "cpu" test are placed on the CPU."""
    return request.param


@pytest.fixture(scope="module", autouse=True)
def _forgotten():
    """Programs end with their module, for half the memory; not on a GPU, where they take longer."""
    yield
    if not _gpu_present():
        jax.clear_caches()
        gc.collect()


@pytest.fixture(params=["linen", "nnx"])
def api(request: pytest.FixtureRequest) -> str:
    """Flax's two APIs, for tests of the layers."""
    return request.param


@pytest.fixture(autouse=True)
def _placed(request: pytest.FixtureRequest):
    """Runs the test on the devices of its backend: the CPU unless the backend is "cuda"."""
    name = request.node.callspec.params.get("backend") if hasattr(request.node, "callspec") else ""
    if name == "cuda" or request.node.get_closest_marker("gpu"):
        with pytest.MonkeyPatch.context() as patch:
            # Cases are small: half of them have the kernels of many units.
            if zlib.crc32(request.node.nodeid.encode()) % 2:
                patch.setattr(forward_rows, "is_round", lambda *_: False)
            yield
    else:
        with jax.default_device(jax.devices("cpu")[0]):
            yield


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch):
    """For what `explain` says of plans: compiling takes 2 s for each."""

    def fail(**_: str) -> None:
        raise RuntimeError("libnvrtc was not found")

    monkeypatch.setattr(_native, "compile_kernel", fail)


@pytest.fixture
def few_are_shared(monkeypatch: pytest.MonkeyPatch):
    """Shared pages are read once for all requests, however few they are."""
    jax.clear_caches()
    monkeypatch.setattr(shared, "LEAST_SPARED", 0)
    yield
    jax.clear_caches()


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of all workers of this run."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if folder.name.startswith("popen-") else folder  # pytest-xdist's


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory, shared_folder: Path):
    """A process in which the CUDA kernels run on the host: see tests/emulator."""
    from . import emulator, fake_cuda  # where nothing is emulated, nothing of it is needed

    reason = _native.available("cuda")
    if reason is not None:
        pytest.skip(reason)
    if _native._has_driver():
        pytest.skip("a true driver is present")
    if fake_cuda.COMPILER is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("emulator")
    kept = os.environ.get("JAX_FLASH_EMULATOR_CACHE")  # from run to run
    shared = Path(kept) if kept else shared_folder / "emulated"
    process = emulator.Emulator(folder, shared)
    yield process
    process.close()
