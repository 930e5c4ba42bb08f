"""Builds fake_warp.cc, which runs the text of the CUDA kernels' arithmetic on the host."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

from jax_flash import _native

COMPILER = shutil.which(os.environ.get("CXX", "c++"))
TEXTS = ("numbers.cuh", "element.cuh", "fragment.cuh", "softmax.cuh", "dropout.cuh")


def build(folder: Path, *, drops_most: bool = False) -> ctypes.CDLL:
    for name in TEXTS:
        (folder / name).write_text(_native.kernel_sources()[name])
    (folder / "ptx.cuh").touch()  # fake_warp.cc has its functions
    built = folder / "warp.so"
    source = Path(__file__).with_name("fake_warp.cc")
    assert COMPILER is not None
    command = [COMPILER, "-std=c++17", "-O1", "-shared", "-fPIC", "-pthread", "-I", str(folder)]
    command += [f"-DDROPS_MOST={str(drops_most).lower()}", str(source), "-o", str(built)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(built))
