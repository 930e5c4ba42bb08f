"""Runs calls on the CUDA handlers without a GPU and reads what they asked of the driver.

`record` starts a process in which fake_cuda.cc plays libcuda, NVRTC and XLA's GPU: the custom calls
that a GPU would get are lowered for XLA's CPU platform and executed there. So operands, results
and attributes are what Python makes of a user's arguments, and launches what C++ makes of those.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash import _backends, _gpu, _native
from jax_flash._ops import passes
from jax_flash._problem import Problem, Shapes

from .cases import Case
from .processes import child_environment

COMPILER = shutil.which(os.environ.get("CXX", "c++"))


TERMS = ("query_segments", "key_value_segments", "sinks")


@dataclasses.dataclass(frozen=True)
class Direct:
    """A custom call by itself, such as `flash_attention` would not make."""

    target: str
    B: int = 2
    T: int = 200
    S: int = 200
    N: int = 2
    K: int | None = None  # kv heads, N unless given
    H: int = 64
    short: int | None = None  # the workspace that lacks an element, or has one too many
    planned: int | None = None  # T and S that the workspaces are for, if others
    l2_heads: int = 1
    dq_row_bytes: int = 0  # backward
    device: int = 0
    devices: int = 1  # that the process sees
    times: int = 1  # more: with the same addresses
    pretended: int = 0  # multiprocessors
    gpu: str = "H100"
    edits: tuple[tuple[str, str], ...] = ()  # of the plan's text: what stands there, and instead

    def run(self) -> dict[str, Any]:
        def array(*shape, dtype: Any = jnp.bfloat16):
            return jax.ShapeDtypeStruct((self.B, *shape), dtype)

        kv_heads = self.N if self.K is None else self.K
        q, k = array(self.T, self.N, self.H), array(self.S, kv_heads, self.H)
        lse = array(self.N, self.T, dtype=jnp.float32)
        terms = [array(length, dtype=jnp.int32) for length in (self.T, self.S)]
        terms.append(array(self.N, dtype=jnp.float32))
        if self.target == "forward":
            operands, results = [q, k, k, *terms], [q, lse]
        else:
            operands, results = [q, k, k, q, lse, q, *terms], [q, k, k]
        plan = self.plan()
        workspaces = list(plan.workspaces.values())
        if self.planned is not None:
            workspaces = list(self.plan(self.planned).workspaces.values())
        if self.short is not None:
            of = workspaces[self.short]
            workspaces[self.short] = jax.ShapeDtypeStruct((abs(of.size - 1),), of.dtype)
        custom_call = jax.ffi.ffi_call(
            plan.target,
            [*results, *workspaces],
            has_side_effect=True,  # else XLA drops what has empty results
        )
        text = plan.text
        for old, new in self.edits:
            assert old in text
            text = text.replace(old, new, 1)
        inputs = [_zeros(x.shape, x.dtype) for x in operands]
        for _ in range(self.times):
            outputs = jax.block_until_ready(custom_call(*inputs, plan=text))
        return dict(zip(self.call.results, outputs, strict=False))

    @property
    def call(self) -> Any:
        return passes(Problem("bfloat16", 1.0, deterministic=True, terms=TERMS))[self.target]

    def plan(self, length: int | None = None) -> _gpu.Plan:
        """The plan of the call, or of one with other lengths, by the tiling of a common one."""
        names = ("target", "B", "T", "S", "N", "K", "H", "l2_heads", "dq_row_bytes", "gpu")
        return _plan(Direct(**{name: getattr(self, name) for name in names}), length)


@functools.cache  # most calls of a test differ by what is edited
def _plan(direct: Direct, length: int | None) -> _gpu.Plan:
    gpu = _gpu.spec.GPUS[direct.gpu]
    heads = direct.N, direct.N if direct.K is None else direct.K
    some = Shapes(2, 200, 200, 2, 2, direct.H, direct.H)
    lengths = (direct.T, direct.S) if length is None else (length, length)
    of = Shapes(direct.B, *lengths, *heads, direct.H, direct.H)
    changes = {"l2_heads": direct.l2_heads}
    if direct.target == "backward":
        changes["dq_row_bytes"] = direct.dq_row_bytes
    tiling = _gpu.plan(direct.call, some, gpu).tiling
    return _gpu.plan(direct.call, of, gpu, dataclasses.replace(tiling, **changes))


@functools.cache
def _zeros(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jnp.zeros(shape, dtype)


@dataclasses.dataclass
class Recording:
    """What one case led to: values that were returned, or an error, and notes by custom call."""

    values: dict[str, np.ndarray]
    error: str
    calls: list[Call]


@dataclasses.dataclass
class Call:
    """A custom call: its buffers (dtype, dims, bytes, sum of the bytes) and what it launched."""

    number: int
    operands: list[dict[str, Any]]
    results: list[dict[str, Any]]
    launches: list[Launch] = dataclasses.field(default_factory=list)
    replayed: bool = False  # what was recorded

    def find(self, pointer: Pointer) -> int | None:
        """The index, results after operands, of the buffer that begins there; None for null."""
        if pointer == 0:
            return None
        call, index, offset = pointer >> 40, (pointer >> 32 & 0xFF) - 1, pointer & 0xFFFFFFFF
        assert (call, offset) == (self.number, 0)
        assert index in range(len(self.operands) + len(self.results))
        return index


class Pointer(int):
    """An address as tests/fake_cuda.cc makes them up."""


@dataclasses.dataclass
class Launch:
    """A launch, or with the entry "fill" a memset of 32-bit words (target, value, words)."""

    entry: str
    program: str = ""  # what NVRTC was given
    grid: list[int] = dataclasses.field(default_factory=list)
    block: list[int] = dataclasses.field(default_factory=list)
    shared: int = 0
    cluster: int = 1
    overlaps: bool = False
    params: bytes | dict[str, Any] = b""  # as they lie; of a memset by name

    def constants(self) -> dict[str, int]:
        """The integer and boolean constants that the kernel was compiled with."""
        found = re.findall(r"constexpr (?:bool|int) (k\w+) = (\w+);", self.program)
        return {name: json.loads(value) for name, value in found}


@dataclasses.dataclass(frozen=True)
class On:
    """A case on another GPU than an H100."""

    gpu: str
    case: Case


def record(cases: list[Case | Direct | On], folder: Path) -> list[Recording]:
    """Runs cases in a process of its own: those of the conformance suite with their gradients."""
    process = subprocess.run(
        [sys.executable, "-P", "-c", "from tests import fake_cuda; fake_cuda.main()"],
        input=pickle.dumps(cases),
        env=environment(folder, build(folder)),
        cwd=folder,
        capture_output=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr.decode()
    return pickle.loads(process.stdout)


def build(folder: Path, *sources: Path, flags: Sequence[str] = ()) -> Path:
    """Makes the library, with more sources than its own, in a folder."""
    library = folder / "libcuda.so.1"
    own = Path(__file__).with_suffix(".cc")
    include = ["-I", str(own.parents[1]), "-isystem", jax.ffi.include_dir()]
    assert COMPILER is not None
    compiler = [COMPILER, "-std=c++17", "-shared", "-fPIC", f"-Wl,-soname,{library.name}"]
    texts = map(str, (own, *sources))
    subprocess.run([*compiler, *include, *flags, *texts, "-o", str(library)], check=True)
    return library


def environment(folder: Path, library: Path) -> dict[str, str]:
    """The environment of a process, run in `folder`, that takes the library for a GPU's."""
    return child_environment(
        folder, with_tests=True, JAX_FLASH_NVRTC=str(library), JAX_PLATFORMS="cpu"
    )


def connect() -> ctypes.CDLL:
    """Calls that a GPU would get go to the library JAX_FLASH_NVRTC from here on."""
    # Who asks for libcuda.so.1 later gets this one, and emulated kernels find its functions.
    fake = ctypes.CDLL(os.environ["JAX_FLASH_NVRTC"], mode=ctypes.RTLD_GLOBAL)
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    for name, handler in _native._cuda().targets()["CUDA"].items():  # one handler for all
        fake.FakeSetHandler(ctypes.c_void_p(pointer_of(handler, None)))
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(fake.FakeCall), platform="cpu")
    return fake


def main() -> None:
    fake = connect()
    _backends.choose = lambda *_: "cuda"
    fake.FakeTakeNotes.restype = ctypes.c_char_p
    recordings = []
    for case in pickle.load(sys.stdin.buffer):
        values, error = {}, ""
        try:
            direct = isinstance(case, Direct)
            _gpu.spec.present = _present(case.gpu if isinstance(case, On) else None)
            case = case.case if isinstance(case, On) else case
            fake.FakeSetDevice(case.device if direct else 0)
            fake.FakeSetDevices(case.devices if direct else 1)
            fake.FakeKeepAddresses(direct and case.times > 1)
            _native.pretend_multiprocessors(case.pretended if direct else 0)
            values = case.run() if direct else case.draw().run(None)
            values = {name: np.asarray(value) for name, value in values.items()}
        except jax.errors.JaxRuntimeError as failure:
            error = str(failure)
        recordings.append(Recording(values, error, read_notes(fake.FakeTakeNotes().decode())))
    pickle.dump(recordings, sys.stdout.buffer)


def _present(gpu: str | None) -> Callable[[], _gpu.GpuSpec | None]:
    return lambda: _gpu.spec.GPUS[gpu] if gpu else None


# ---- notes of fake_cuda.cc ---------------------------------------------------------------------


def read_notes(notes: str) -> list[Call]:
    calls: list[Call] = []
    for line in notes.splitlines():
        note = json.loads(line, object_hook=_read_object)
        match note.pop("event"):
            case "call":
                calls.append(Call(**note))
            case "graph":
                calls[-1].replayed = True
            case "fill":
                note["target"] = Pointer(note["target"])
                calls[-1].launches.append(Launch("fill", params=note))
            case _:
                note["program"] = bytes.fromhex(note["program"]).decode()
                note["params"] = bytes.fromhex(note["params"])
                calls[-1].launches.append(Launch(**note))
    return calls


def _read_object(found: dict[str, Any]) -> Any:
    return Pointer(found["pointer"]) if found.keys() == {"pointer"} else found
