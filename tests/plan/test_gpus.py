"""Which GPU a name or a device is."""

import dataclasses

import pytest

from jax_flash._gpu import spec

from .plain_calls import H200

pytestmark = pytest.mark.quick


def test_unknown_gpu_name():
    with pytest.raises(ValueError, match=r"gpu must be one of A100, .*H200.*, not 'H300'"):
        spec.named("H300")


@pytest.mark.parametrize(
    ("reported", "model"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
    ],
)
def test_gpus_by_what_their_driver_reports(reported, model):
    assert spec.named(reported) is spec.named(model) is spec.GPUS[model]


@dataclasses.dataclass
class Device:
    device_kind: str
    compute_capability: str
    core_count: int = 100


@pytest.mark.parametrize("other", ["NVIDIA GeForce RTX 3090 Ti", "NVIDIA A10G", "NVIDIA L40"])
def test_gpus_of_similar_names_are_others(other):
    with pytest.raises(ValueError, match="gpu must be one of"):
        spec.named(other)
    assert spec.of_device(Device(other, "8.6")) == spec.GpuSpec(other, "sm_86", 100)


@pytest.mark.parametrize(
    ("capability", "arch", "shared_kb"),
    [("8.0", "sm_80", 163), ("8.9", "sm_89", 99), ("9.0", "sm_90a", 227), ("10.0", "sm_100", 227),
     ("7.5", "sm_75", 48)],
)  # fmt: skip
def test_spec_of_a_device(capability, arch, shared_kb):
    found = spec.of_device(Device("NVIDIA X", capability))
    assert (found.name, found.arch, found.shared_bytes) == ("NVIDIA X", arch, shared_kb << 10)


def test_spec_of_a_known_device():
    assert spec.of_device(Device("NVIDIA H200", "9.0", 132)) is H200
