"""Runs the text of the CUDA kernels on the host, threads, barriers and tensor cores included.

tests/fake_cuda.cc with a machine in it: NVRTC is the host's C++ compiler (translate.py), and a
launch runs the kernel to its end (machine.cc) on the true buffers of XLA's CPU platform.
README.md says what is modelled, what is not, and how to add an instruction.
"""

from __future__ import annotations

import ctypes
import dataclasses
import fcntl
import hashlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_flash import _backends, _gpu, _native

from .. import fake_cuda
from ..cases import Arguments
from ..other_kernels import AsIfLong
from . import translate

HERE = Path(__file__).parent
_KEPT = "JAX_FLASH_EMULATOR_CACHE"  # the folder of libraries
MULTIPROCESSORS = 3  # as many CTAs as machine.cc runs at a time
GARBAGE = 0x44444444  # finite as a number of any type


def build(shared: Path) -> Path:
    """The library, made once for all processes that share a folder.

    The machine, most of it, knows no jaxlib: those of all jaxes have one.
    """
    texts, headers = sorted(HERE.glob("*.cc")), sorted(HERE.glob("*.h"))
    fakes = sorted(HERE.parent.glob("fake_*.[ch]*"))
    machine = b"".join(path.read_bytes() for path in (*texts, *headers, *fakes))
    jaxlib = jax.lib.__version__.encode()  # whose headers fake_cuda.cc takes

    def make_object(made: Path) -> None:
        unit = made / "emulator.cc"  # one: half the time, since headers are read once
        unit.write_text("".join(f'#include "{path}"\n' for path in texts))
        flags = ["-std=c++17", "-fPIC", "-O3", "-march=native", "-I", str(HERE.parents[1])]
        compiler = [*translate.COMPILER, *flags, "-c", str(unit), "-o", str(made / "machine.o")]
        subprocess.run(compiler, check=True)

    def make_library(made: Path) -> None:
        fake_cuda.build(made, _made(shared, "object", machine, make_object) / "machine.o")

    shared.mkdir(parents=True, exist_ok=True)
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _made(shared, "machine", jaxlib + machine, make_library) / "libcuda.so.1"


def _made(shared: Path, name: str, content: bytes, make: Callable[[Path], None]) -> Path:
    """The folder that `make` fills for this content, unless it is there."""
    folder = shared / f"{name}-{hashlib.sha256(content).hexdigest()[:16]}"
    if not folder.exists():
        made = Path(tempfile.mkdtemp(dir=shared))
        make(made)
        made.rename(folder)
    return folder


@ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_char_p)
def _compile(folder: bytes) -> bool:
    return translate.compile_folder(Path(os.fsdecode(folder)))


def whole(plan: _gpu.Plan) -> _gpu.Plan:
    """The plan with one program: a host's compiler takes three quarters of the time of two."""
    if not plan.beside.endswith("_entries.cuh"):
        return plan
    steps = tuple(
        dataclasses.replace(step, beside=False) if getattr(step, "beside", False) else step
        for step in plan.launch.steps
    )
    launch = dataclasses.replace(plan.launch, steps=steps)
    source = plan.source.replace(".cuh", "_whole.cuh")
    return dataclasses.replace(plan, source=source, beside="", launch=launch)


def with_whole(sources: dict[str, str] | None) -> dict[str, str]:
    """The sources and those of `whole`."""
    sources = dict(sources or _native.kernel_sources())
    for beside in [name for name in sources if name.endswith("_entries.cuh")]:
        for main in (beside.replace("_entries", x) for x in ("", "_wide")):
            if main in sources:
                text = f'#include "{main}"\n#include "{beside}"\n'
                sources[main.replace(".cuh", "_whole.cuh")] = text
    return sources


def connect(sources: dict[str, str] | None = None) -> ctypes.CDLL:
    """Emulates backend "cuda" in this process from here on: calls that name it, on CPU arrays."""
    fake = fake_cuda.connect()
    fake.EmulatorSetSeed.argtypes = (ctypes.c_uint64,)
    fake.EmulatorSetGarbage.argtypes = (ctypes.c_uint32,)
    fake.EmulatorSetCompiler(_compile)  # a name of the module: it stays alive
    _native.configure_cuda(None, 0, with_whole(sources))
    _native.compile_ahead = lambda **_: None  # of what is guessed a third is not asked for
    plan = _gpu.plan
    _gpu.plan = lambda *call: whole(plan(*call))
    _native.pretend_multiprocessors(MULTIPROCESSORS)
    gpu = dataclasses.replace(_gpu.spec.GPUS["H100"], sms=MULTIPROCESSORS)
    _gpu.spec.present = lambda: gpu
    choose = _backends.choose
    _backends.choose = lambda platform, call, shapes: choose(
        "cuda" if call.backend == "cuda" else platform, call, shapes
    )
    return fake


def install(seed: int) -> None:
    """Emulates backend "cuda" for all tests of this process; libraries are kept for the user."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    shared = cache / "jax_flash-emulated"
    os.environ |= {_KEPT: str(shared), "JAX_FLASH_NVRTC": str(build(shared))}
    connect().EmulatorSetSeed(seed)


class Emulator:
    """A process in which backend "cuda" is emulated.

    Args:
      folder: its own.
      shared: libraries that were built, for other processes too.
    """

    def __init__(self, folder: Path, shared: Path) -> None:
        environment = fake_cuda.environment(folder, build(shared)) | {_KEPT: str(shared)}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", "from tests import emulator; emulator.main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            cwd=folder,
        )

    def run(
        self,
        arguments: Arguments | AsIfLong,
        *,
        seed: int = 0,
        sources: dict[str, str] | None = None,
        gpu: str = "H100",
        gradients: bool = True,
        garbage: int = GARBAGE,
    ) -> dict[str, np.ndarray]:
        """`arguments.run("cuda")`, with kernels of the given text instead of the package's.

        Args:
          gpu: whose kernels run.
          gradients: as for `arguments.run`, which need not know them if they are wanted.
          seed: of the order of threads and asynchronous work; 0: in order and late, 1: backwards
            and early, others: drawn; of those 5, 9 and so on late.
          garbage: the words of dynamic shared memory where a CTA starts.

        Raises:
          RuntimeError: the custom call failed, with its message.
        """
        assert self._process.stdin is not None
        request = arguments, seed, sources, gpu, gradients, garbage
        pickle.dump(request, self._process.stdin)
        return self._answer()

    def run_kernel(
        self, text: str, memory: np.ndarray, *, threads: int = 32, shared_bytes: int = 0
    ) -> np.ndarray:
        """What one CTA of the text's only kernel makes of memory, a pointer to which it takes."""
        assert self._process.stdin is not None
        pickle.dump((text, threads, shared_bytes, memory), self._process.stdin)
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.flush()
        values, error = pickle.load(self._process.stdout)
        if error:
            raise RuntimeError(error)
        return values

    def close(self) -> None:
        self._process.communicate(timeout=60)  # closes its pipes: it ends at the end of its input


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer

    def answer(given: tuple[Any, str]) -> None:
        pickle.dump(given, answers)
        answers.flush()

    own = text = _native.kernel_sources()
    fake = connect(text)
    last = ""
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        if isinstance(request[0], str):
            answer(run_kernel(fake, *request))
            continue
        arguments, seed, sources, gpu, gradients, garbage = request
        if gpu != last:
            jax.clear_caches()  # a traced call has its kernels
            last, spec = gpu, dataclasses.replace(_gpu.spec.GPUS[gpu], sms=MULTIPROCESSORS)
            _gpu.spec.present = lambda spec=spec: spec
        if (sources or text) != own:
            own = sources or text
            _native.configure_cuda(None, 0, with_whole(own))
        fake.EmulatorSetSeed(seed)
        fake.EmulatorSetGarbage(garbage)
        values, error = {}, ""
        try:
            values = arguments.run("cuda", **({} if gradients else {"gradients": False}))
        except (jax.errors.JaxRuntimeError, ValueError) as failure:
            error = str(failure)
        answer((values, error))


def run_kernel(
    fake: ctypes.CDLL, text: str, threads: int, shared_bytes: int, memory: np.ndarray
) -> tuple[np.ndarray, str]:
    memory = np.array(memory)
    fake.EmulatorRunKernel.restype = ctypes.c_char_p
    pointer, size = ctypes.c_void_p(memory.ctypes.data), ctypes.c_uint64(memory.nbytes)
    trouble = fake.EmulatorRunKernel(text.encode(), threads, shared_bytes, pointer, size)
    return memory, trouble.decode()
