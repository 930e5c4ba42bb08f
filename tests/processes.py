"""Processes that tests start, with the same package."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax_flash


def child_environment(folder: Path, *, with_tests: bool = False, **variables: str):
    """The environment of a process with the same package and a cache of kernels in `folder`."""
    paths = [str(Path(jax_flash.__file__).parents[1])]  # not the checkout that pytest runs in
    paths += [str(Path(__file__).parents[1])] if with_tests else []
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    return os.environ | {
        "JAX_FLASH_CACHE_DIR": str(folder / "cache"),
        "PYTHONPATH": os.pathsep.join(paths),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        **variables,
    }


def run_two_processes(script: str, folder: Path, **variables: str) -> None:
    """Runs a script in two processes, by a coordinator's address and the process's rank."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", script, address, str(rank)],
            env=child_environment(folder, with_tests=True, **variables),
            cwd=folder,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors


def with_devices(count: int) -> dict[str, str]:
    """The variables of a process with so many CPU devices, which compiles as fast as this one."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={count}"
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}


def start_python(script: str, folder: Path, **variables: str) -> subprocess.Popen[str]:
    """Starts a script in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-P", "-c", script],
        env=child_environment(folder, **variables),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """Waits for a process and returns what it printed."""
    try:
        output, errors = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == 0, errors
    return output
