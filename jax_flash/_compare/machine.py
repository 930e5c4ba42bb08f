"""Owns what is said of the machine: versions, devices, the cache, and which backends run here."""

import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any

import jax

from jax_flash import _backends, _gpu, _native
from jax_flash._version import __version__

# What decides speed, by the names of their distributions; those that are missing are not said.
_DISTRIBUTIONS = (
    "jax", "jaxlib", "flax", "torch", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12",
    "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12", "dew-flash-attn-cu13", "dew-flash-attn-cu12",
)  # fmt: skip


def describe() -> list[str]:
    """Says where this runs, a line each."""
    found = facts()
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    lines = [versions, f"devices: {found['devices']}"]
    for name, reasons in found["backends"].items():
        lines.append(f"backend {name}: {'; '.join(reasons) or 'runs here'}")
    lines.append(f"compiled kernels: {found['cache']}")
    if jax.default_backend() == "cpu" and Path("/proc/driver/nvidia/version").exists():
        lines.append(
            "an NVIDIA driver is here, but JAX has no GPU: pip install 'jax[cuda13]', or "
            "'jax[cuda12]' for a driver below 580"
        )
    return lines


def facts() -> dict[str, Any]:
    """Collects the same as data."""
    versions = {"jax_flash": __version__, "Python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    gpu = _gpu.spec.present()
    return {
        "versions": versions,
        "devices": _devices(gpu),
        "backends": {
            name: [*backend.absent(gpu if name != "xla" else None)]
            for name, backend in _backends.BACKENDS.items()
        },
        "cache": _cache(),
    }


def _devices(gpu: _gpu.GpuSpec | None) -> str:
    devices = jax.devices()
    kind = devices[0].device_kind
    if gpu is not None:
        system = devices[0].client.platform_version.splitlines()[0]
        return f"{len(devices)} x {kind} ({gpu.arch}; {system})"
    if jax.default_backend() != "cpu":
        return f"{len(devices)} x {kind}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{processor()}, {cores} threads; JAX has no GPU"


def processor() -> str:
    """Reads the processor's name, with what matters of its instruction set."""
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    model = re.search(r"model name\s*: (.*)", info)
    flags = re.search(r"flags\s*: (.*)", info)
    known = flags[1].split() if flags else []
    best = [flag for flag in ("avx512_bf16", "avx512f", "avx2") if flag in known][:1]
    return " ".join([model[1].strip() if model else platform.machine(), *best])


def _cache() -> str:
    folder = _native.cache_folder()
    if folder is None:
        return "kept by no folder: each process compiles anew"
    try:
        sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    except OSError as error:
        return f"{folder} cannot be read: {error.strerror}"
    return f"{folder}, {len(sizes)} files, {sum(sizes) / 1e6:.1f} MB"
