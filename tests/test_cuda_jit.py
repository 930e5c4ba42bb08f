"""The run-time compiler and its caches: needs NVRTC, no GPU."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import jax_flash
from jax_flash import _native, _tiles
from jax_flash._problem import Problem, Shapes

from .sanitize import every_lane

ARCH = "sm_90a"
SOURCES = {
    "scale.cuh": '#include "factor.h"\n'
    'extern "C" __global__ void scale(float* x) { x[threadIdx.x] *= kFactor; }\n',
    "factor.h": "constexpr float kFactor = 3.0f;\n",
}
MEGABYTE = 1 << 20

pytestmark = pytest.mark.skipif(
    _native.available("cuda") is not None, reason=f"{_native.available('cuda')}"
)


@pytest.fixture(autouse=True)
def restore_configuration():
    yield
    _native.configure_cuda(_native.cache_folder(), _native.CACHE_BYTES)


def configure(cache: Path | None, size: int = MEGABYTE, sources: dict[str, str] = SOURCES) -> None:
    """Starts over as a new process would: nothing compiled is remembered outside `cache`."""
    _native.configure_cuda(cache, size, sources)


def compile_scale(header: str = "") -> _native.CompiledKernel:
    return _native.compile_kernel("scale.cuh", header, ARCH)


def test_compiles_and_reports_resources():
    configure(None)
    kernel = compile_scale()
    assert kernel.cubin.startswith(b"\x7fELF")
    assert "Compiling entry function 'scale'" in kernel.log
    assert "0 bytes spill stores" in kernel.log
    assert not kernel.from_disk


def test_compiles_once_in_a_process():
    configure(None)
    start = threading.Barrier(8)

    def compile_together(_: int) -> _native.CompiledKernel:
        start.wait()
        return compile_scale()

    with ThreadPoolExecutor(8) as pool:
        kernels = list(pool.map(compile_together, range(8)))
    assert len({kernel.seconds for kernel in kernels}) == 1


def test_finds_the_kernel_on_disk(tmp_path: Path):
    configure(tmp_path)
    cold = compile_scale()
    configure(tmp_path)
    warm = compile_scale()
    assert not cold.from_disk
    assert warm.from_disk
    assert (warm.cubin, warm.log) == (cold.cubin, cold.log)


def test_key_covers_source_header_and_arch(tmp_path: Path):
    configure(tmp_path)
    compile_scale()
    assert not compile_scale("constexpr int kUnused = 1;\n").from_disk
    assert not _native.compile_kernel("scale.cuh", "", "sm_80").from_disk
    configure(tmp_path, sources=SOURCES | {"factor.h": "constexpr float kFactor = 4.0f;\n"})
    assert not compile_scale().from_disk
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "foreign"])
def test_recompiles_a_damaged_entry(tmp_path: Path, damage: str):
    configure(tmp_path)
    cold = compile_scale()
    [entry] = tmp_path.iterdir()
    content = bytearray(entry.read_bytes())
    if damage == "truncate":
        content = content[: len(content) // 2]
    elif damage == "flip":
        content[-100] ^= 1
    elif damage == "empty":
        content = bytearray()
    else:
        content = bytearray(b"something else\n" * 10)
    entry.write_bytes(content)

    configure(tmp_path)
    repaired = compile_scale()
    assert not repaired.from_disk
    assert repaired.cubin == cold.cubin
    configure(tmp_path)
    assert compile_scale().from_disk


def test_bound_removes_the_least_recently_used(tmp_path: Path):
    configure(tmp_path)
    compile_scale()
    [oldest] = tmp_path.iterdir()
    size = oldest.stat().st_size
    compile_scale("constexpr int kSecond = 2;\n")
    [second] = set(tmp_path.iterdir()) - {oldest}
    os.utime(second, (1, 1))
    os.utime(oldest, (2, 2))
    configure(tmp_path, size=3 * size - size // 2)
    assert compile_scale().from_disk  # a use makes the oldest the newest
    compile_scale("constexpr int kThird = 3;\n")
    assert oldest.exists()
    assert not second.exists()
    assert sum(entry.stat().st_size for entry in tmp_path.iterdir()) <= 3 * size


def test_abandoned_files_are_removed(tmp_path: Path):
    abandoned = tmp_path / "key.kernel.1.2.tmp"
    abandoned.write_bytes(b"half")
    os.utime(abandoned, (1, 1))
    fresh = tmp_path / "key.kernel.3.4.tmp"
    fresh.write_bytes(b"half")
    configure(tmp_path)
    compile_scale()
    assert not abandoned.exists()
    assert fresh.exists()


def test_cache_that_cannot_be_written_is_no_error(tmp_path: Path):
    file = tmp_path / "file"
    file.write_text("not a folder")
    configure(file / "cache")
    assert not compile_scale().from_disk


PROCESS = """
import sys
from pathlib import Path
from jax_flash import _native
sources = {"scale.cuh": Path(sys.argv[2]).read_text()}
_native.configure_cuda(Path(sys.argv[1]), 1 << 20, sources)
print("ready", flush=True)
sys.stdin.readline()
for i in range(4):
    kernel = _native.compile_kernel("scale.cuh", f"constexpr int kVariant = {i};\\n", "sm_90a")
    print(kernel.from_disk, flush=True)
"""


def test_processes_starting_at_once(tmp_path: Path):
    cache = tmp_path / "cache"
    source = tmp_path / "scale.cuh"
    source.write_text('extern "C" __global__ void scale(float* x) { x[threadIdx.x] *= kVariant; }')
    command = [sys.executable, "-c", PROCESS, str(cache), str(source)]
    package = str(Path(jax_flash.__file__).parents[1])  # not the checkout that pytest runs in
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    processes = [start() for _ in range(3)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:  # all compile from here on
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert len(list(cache.iterdir())) == 4  # no unfinished file is left

    later = start()
    output, errors = later.communicate("go\n", timeout=120)
    assert output.split() == ["ready", "True", "True", "True", "True"], errors


def test_compile_error_carries_the_log(tmp_path: Path):
    configure(tmp_path)
    for _ in range(2):  # the second time from memory
        with pytest.raises(
            RuntimeError, match=r'scale\.cuh for sm_90a(.|\n)*"kWrong" is undefined'
        ):
            compile_scale("int x = kWrong;\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kernel", ["forward", "backward"])
def test_kernels_compile_as_racecheck_runs_them(kernel: str):
    configure(None, sources=every_lane(_native.kernel_sources()))
    problem, h200 = Problem(dtype="bfloat16", scale=0.125), _tiles.GPUS["H200"]
    shapes = Shapes(
        batch=1, q_len=300, kv_len=300, q_heads=2, kv_heads=2, head_dim=64, value_dim=64
    )
    if kernel == "forward":
        tiles = _tiles.choose_tiles(problem, shapes, h200)
        header = tiles.header(problem)
    else:
        tiles = _tiles.choose_backward_tiles(problem, shapes, h200)
        header = tiles.header(problem, with_dlse=False)
    assert _native.compile_kernel(tiles.source, header, ARCH).cubin


def test_missing_nvrtc_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_native, "_find_nvrtc", lambda: ("", "libnvrtc was not found. Install it."))
    configure(None)
    with pytest.raises(RuntimeError, match=r"libnvrtc was not found\. Install it"):
        compile_scale()


def test_wrong_nvrtc_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("JAX_FLASH_NVRTC", str(tmp_path / "libnvrtc.so.13"))
    configure(None)
    with pytest.raises(RuntimeError, match="NVRTC does not open"):
        compile_scale()


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("JAX_FLASH_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _native.cache_folder() == tmp_path / "jax_flash"
    monkeypatch.setenv("JAX_FLASH_CACHE_DIR", str(tmp_path / "mine"))
    assert _native.cache_folder() == tmp_path / "mine"
    monkeypatch.setenv("JAX_FLASH_CACHE_DIR", "")
    assert _native.cache_folder() is None
