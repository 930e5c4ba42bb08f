"""Owns what is known of a GPU: a table of models by name, and the one that is present."""

import dataclasses
import functools
from typing import Any

import jax

# Bytes of shared memory that one CTA may have, by architecture: CUDA C++ Programming Guide,
# "Technical Specifications per Compute Capability".
_SHARED_BYTES = {
    "sm_80": 163 << 10,
    "sm_86": 99 << 10,
    "sm_87": 163 << 10,
    "sm_89": 99 << 10,
    "sm_90a": 227 << 10,
    "sm_100": 227 << 10,
    "sm_103": 227 << 10,
    "sm_110": 227 << 10,
    "sm_120": 99 << 10,
    "sm_121": 99 << 10,
}
_ANY_SHARED_BYTES = 48 << 10  # of any other: what every CTA may have without asking


@dataclasses.dataclass(frozen=True)
class GpuSpec:
    """What the choice of a kernel and its tiling needs to know of a GPU."""

    name: str  # a model of GPUS, or of another what the driver reports
    arch: str  # what NVRTC compiles for: "sm_90a"
    sms: int | None = None  # multiprocessors; None: not known
    l2_bytes: int | None = None

    @property
    def shared_bytes(self) -> int:
        """Shared memory that one CTA may have."""
        return _SHARED_BYTES.get(self.arch, _ANY_SHARED_BYTES)


_MODELS = (
    # Multiprocessors and L2: NVIDIA's architecture whitepapers (Ampere GA100 and GA102, Ada,
    # Hopper, RTX Blackwell) and data sheets; H200, GH200, B200 and GB200 as their drivers report.
    GpuSpec("A100", "sm_80", 108, 40 << 20),
    GpuSpec("A10", "sm_86", 72, 6 << 20),
    GpuSpec("L4", "sm_89", 58, 48 << 20),
    GpuSpec("L40S", "sm_89", 142, 96 << 20),
    GpuSpec("RTX 3090", "sm_86", 82, 6 << 20),
    GpuSpec("RTX 4090", "sm_89", 128, 72 << 20),
    GpuSpec("RTX 5090", "sm_120", 170, 96 << 20),
    GpuSpec("H100", "sm_90a", 132, 50 << 20),
    GpuSpec("H100 PCIe", "sm_90a", 114, 50 << 20),
    GpuSpec("H200", "sm_90a", 132, 60 << 20),
    GpuSpec("H20", "sm_90a", 78, 60 << 20),
    GpuSpec("GH200", "sm_90a", 132, 60 << 20),
    GpuSpec("B200", "sm_100", 148, 126 << 20),
    GpuSpec("GB200", "sm_100", 152, 126 << 20),
)
GPUS = {gpu.name: gpu for gpu in _MODELS}

# What the driver reports -> the model. Whatever has "NVIDIA " or "NVIDIA GeForce " in front of a
# model's name needs no row.
_DRIVER_NAMES = {
    "A100-SXM4-40GB": "A100",
    "A100-SXM4-80GB": "A100",
    "A100-SXM-64GB": "A100",
    "A100-PCIE-40GB": "A100",
    "A100 80GB PCIe": "A100",
    "H100 80GB HBM3": "H100",
    "H100 NVL": "H100",
    "H200 NVL": "H200",
    "H20-3e": "H20",
    "GH200 120GB": "GH200",
    "GH200 144G HBM3e": "GH200",
    "GH200 480GB": "GH200",
}


def named(name: str) -> GpuSpec:
    """Returns the spec of a GPU by its model, such as "H200", or by what its driver reports.

    Raises:
      ValueError: the name is not known.
    """
    found = _model(name) if isinstance(name, str) else None
    if found is None:
        raise ValueError(f"gpu must be one of {', '.join(GPUS)}, not {name!r}.")
    return found


def of_device(device: Any) -> GpuSpec:
    """Reads the spec of a CUDA device of `jax.devices()`."""
    capability = device.compute_capability
    digits = capability.replace(".", "")
    # sm_90a: wgmma and setmaxnreg belong to the architecture-specific feature set.
    arch = f"sm_{digits}a" if capability == "9.0" else f"sm_{digits}"
    known = _model(device.device_kind)
    if known is not None and known.arch == arch:
        return known
    return GpuSpec(device.device_kind, arch, getattr(device, "core_count", None))


@functools.cache
def present() -> GpuSpec | None:
    """Returns the spec of this process's first CUDA device, or None without one."""
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:
        return None
    return of_device(devices[0])


def for_lowering() -> GpuSpec:
    """Returns the GPU that a call is lowered for: on a machine without one, the most common."""
    return present() or GPUS["H100"]


def _model(name: str) -> GpuSpec | None:
    for prefix in ("NVIDIA GeForce ", "NVIDIA "):
        name = name.removeprefix(prefix)
    return GPUS.get(_DRIVER_NAMES.get(name, name))
