"""The run-time compiler: what it compiles, once; what it says. Needs NVRTC, no GPU."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jax_flash import _gpu, _native
from jax_flash._ops import passes
from jax_flash._problem import Problem, Shapes

from ..fake_cuda import COMPILER
from ..processes import child_environment
from ..sanitize import every_lane
from .scale_kernel import compile_scale, configure

pytestmark = [
    pytest.mark.skipif(
        _native.available("cuda") is not None, reason=f"{_native.available('cuda')}"
    ),
    pytest.mark.usefixtures("restore_configuration"),
]


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


def test_compile_error_carries_the_log(tmp_path: Path):
    configure(tmp_path)
    for _ in range(2):  # the second time from memory
        with pytest.raises(
            RuntimeError, match=r'scale\.cuh for sm_90a(.|\n)*"kWrong" is undefined'
        ):
            compile_scale("int x = kWrong;\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("kernel", "tma_loads"), [("forward", True), ("backward", False)])
def test_kernels_compile_as_racecheck_runs_them(kernel: str, tma_loads: bool):
    problem = Problem(dtype="bfloat16", scale=0.125)
    dim = 64 if tma_loads else 63
    shapes = Shapes(
        batch=1, q_len=300, kv_len=300, q_heads=2, kv_heads=2, head_dim=dim, value_dim=dim
    )
    plan = _gpu.plan(passes(problem)[kernel], shapes, _gpu.spec.GPUS["H200"])
    sources = every_lane(_native.kernel_sources())
    configure(_native.cache_folder(), _native.CACHE_BYTES, sources)
    assert _native.compile_kernel(**plan.program).cubin.startswith(b"\x7fELF")
    # The kernel includes the file that was changed.
    (changed,) = (name for name in sources if sources[name] != _native.kernel_sources()[name])
    configure(None, sources=sources | {changed: "#error changed"})
    with pytest.raises(RuntimeError, match="#error directive: changed"):
        _native.compile_kernel(**plan.program)


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


def test_nvrtc_that_is_no_name_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAX_FLASH_NVRTC", os.fsdecode(b"/tmp/libnvrtc\xff.so"))
    configure(None)
    with pytest.raises(RuntimeError, match="JAX_FLASH_NVRTC is no name of a file"):
        compile_scale()


# NVRTC that takes a minute.
SLOW_NVRTC = """
#include <unistd.h>
extern "C" {
int nvrtcVersion(int* major, int* minor) { *major = 13; *minor = 0; return 0; }
const char* nvrtcGetErrorString(int) { return ""; }
int nvrtcCreateProgram(void**, ...) { return 0; }
int nvrtcDestroyProgram(void**) { return 0; }
int nvrtcCompileProgram(void*, ...) { sleep(200); return 1; }
int nvrtcGetProgramLogSize(void*, size_t*) { return 1; }
int nvrtcGetProgramLog(void*, char*) { return 1; }
int nvrtcGetCUBINSize(void*, size_t*) { return 1; }
int nvrtcGetCUBIN(void*, char*) { return 1; }
}
"""
INTERRUPTED = """
import signal, sys
from jax_flash import _native
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
_native.configure_cuda(None, 1 << 20, {"scale.cuh": ""})
_native.compile_ahead("scale.cuh", "int beside;", "sm_90a")
try:
    _native.compile_kernel("scale.cuh", "", "sm_90a")
except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    raise
"""


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_long_compilation_says_so_once_and_is_interrupted(tmp_path: Path):
    assert COMPILER is not None
    library = tmp_path / "libnvrtc.so"
    command = [COMPILER, "-shared", "-fPIC", "-x", "c++", "-", "-o", library]
    subprocess.run(command, input=SLOW_NVRTC, text=True, check=True)
    environment = child_environment(
        tmp_path, JAX_PLATFORMS="cpu", JAX_FLASH_NVRTC=str(library), PYTHONUNBUFFERED="1"
    )
    with subprocess.Popen(
        [sys.executable, "-P", "-c", INTERRUPTED],
        env=environment,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "jax_flash: scale.cuh is being compiled for sm_90a.\n"
        process.send_signal(signal.SIGINT)
        begun = time.monotonic()
        assert process.stderr.readline() == "interrupted\n"
        assert time.monotonic() - begun < 60  # 0.4 where nothing else runs
        assert "KeyboardInterrupt" in process.stderr.read()
        process.wait(timeout=60)  # a second where nothing else runs
    assert process.returncode == -signal.SIGINT
