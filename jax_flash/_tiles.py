"""Owns how one GPU runs a Problem: which kernel, which tile sizes, what grid.

`choose_tiles(problem, shapes, gpu)` is pure: it runs at lowering, knows no arrays and needs no GPU.
What it decides reaches the compiler as constexpr definitions (`header`) and the handler as
attributes. The tuned tables are measured; cuda/README.md tells how.
Read next: cuda/kernels/sm90/forward.cuh, cuda/runtime/handlers.cc.
"""

import dataclasses
import functools
from typing import Any

import jax

from jax_flash._problem import Problem, Shapes


@dataclasses.dataclass(frozen=True)
class GpuSpec:
    """What the choice of tiles needs to know of a GPU."""

    name: str
    arch: str  # what NVRTC compiles for: "sm_90a"
    sms: int
    smem: int  # bytes of shared memory one block may have


# Bytes of shared memory per block, by compute capability (CUDA C++ programming guide, table 30).
_SMEM = {"8.0": 163 * 1024, "8.6": 99 * 1024, "8.9": 99 * 1024, "9.0": 227 * 1024}
_SMEM_BLACKWELL = 227 * 1024

GPUS = {
    "A100": GpuSpec("A100", "sm_80", 108, _SMEM["8.0"]),
    "H100": GpuSpec("H100", "sm_90a", 132, _SMEM["9.0"]),
    "H200": GpuSpec("H200", "sm_90a", 132, _SMEM["9.0"]),
}


def gpu_named(name: str) -> GpuSpec:
    """Returns the spec of a GPU by name, such as "H200".

    Raises:
      ValueError: the name is not known.
    """
    if name not in GPUS:
        raise ValueError(f"gpu must be one of {', '.join(GPUS)}, not {name!r}.")
    return GPUS[name]


def gpu_of(device: Any) -> GpuSpec:
    """Reads the spec of a CUDA device of `jax.devices()`."""
    capability = device.compute_capability
    digits = capability.replace(".", "")
    # sm_90a: wgmma and setmaxnreg belong to the architecture-specific feature set.
    arch = f"sm_{digits}a" if capability == "9.0" else f"sm_{digits}"
    smem = _SMEM.get(capability, _SMEM_BLACKWELL)
    return GpuSpec(device.device_kind, arch, device.core_count, smem)


@functools.cache
def present_gpu() -> GpuSpec | None:
    """Returns the spec of this process's first CUDA device, or None without one."""
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:
        return None
    return gpu_of(devices[0])


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel launch, as the handler reads it: the attribute is these four numbers."""

    grid: int
    threads: int
    smem: int  # bytes of dynamic shared memory
    cluster: int = 1


@dataclasses.dataclass(frozen=True)
class ForwardTiles:
    """The tile sizes of the sm_90a forward kernel; every field is a constexpr of the kernel."""

    head_dim: int  # of the tile in shared memory, 64 to 256; the arrays may have less
    value_dim: int
    block_q: int  # queries of one block: 64 a consumer warpgroup
    block_kv: int  # keys of one step
    stages: int = 2  # key and value blocks in flight
    cluster: int = 1

    source = "sm90/forward.cuh"
    entries = ("flash_forward",)

    @property
    def consumers(self) -> int:
        return self.block_q // 64

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + 1)

    @property
    def smem(self) -> int:
        """Bytes of dynamic shared memory: Q, the stages of K and V, barriers."""
        keys = self.stages * self.block_kv * (self.head_dim + self.value_dim)
        return 2 * (self.block_q * self.head_dim + keys) + 1024 + 256

    def header(self, problem: Problem) -> str:
        """Returns the constexpr definitions compiled in front of the kernel."""
        return _header(self, problem)


def supports(problem: Problem, shapes: Shapes, gpu: GpuSpec) -> str | None:
    """Tells whether the CUDA kernels can run a problem: None, or the reason why not."""
    if gpu.arch != "sm_90a":
        return f"the CUDA kernels run on sm_90 (H100, H200); {gpu.name} is {gpu.arch}"
    if problem.dtype not in ("bfloat16", "float16"):
        return f"the CUDA kernels take bfloat16 and float16, not {problem.dtype}"
    if max(shapes.head_dim, shapes.value_dim) > 256:
        widest = max(shapes.head_dim, shapes.value_dim)
        return f"the CUDA kernels take head dims up to 256, not {widest}"
    if shapes.head_dim % 8 or shapes.value_dim % 8:
        # The copy engine moves rows whose stride is a multiple of 16 bytes.
        odd = shapes.head_dim if shapes.head_dim % 8 else shapes.value_dim
        return f"the CUDA kernels take head dims that 8 divides, not {odd}"
    for term in problem.terms:
        if term in _ABSENT_TERMS:
            return f"the CUDA kernels have no {_ABSENT_TERMS[term]} yet"
    return None


# Terms that the kernels do not take, as a user calls them.
_ABSENT_TERMS = {
    "bias": "bias",
    "mask": "boolean mask",
    "sinks": "sinks",
    "dropout_state": "dropout",
}


def choose_tiles(problem: Problem, shapes: Shapes, gpu: GpuSpec) -> ForwardTiles:
    """Chooses the forward kernel's tiles for a problem that `supports` accepts."""
    causal = problem.window[1] == 0
    head_dim = next(dim for dim in (64, 96, 128, 192, 256) if dim >= shapes.head_dim)
    value_dim = next(dim for dim in (64, 96, 128, 192, 256) if dim >= shapes.value_dim)
    widest = max(head_dim, value_dim)
    if widest == 64:
        return ForwardTiles(head_dim, value_dim, block_q=192, block_kv=128)
    if widest <= 128:
        return ForwardTiles(head_dim, value_dim, block_q=128, block_kv=128 if causal else 176)
    return ForwardTiles(head_dim, value_dim, block_q=128, block_kv=80)


def _header(tiles: Any, problem: Problem) -> str:
    left, right = problem.window
    values: dict[str, bool | int] = {
        "bfloat16": problem.dtype == "bfloat16",
        "window_left": left is not None,
        "window_right": right is not None,
        "causal": right == 0,
        "bottom_right": problem.bottom_right,
        "softcap": problem.softcap is not None,
        "query_lengths": "query_lengths" in problem.terms,
        "key_value_lengths": "key_value_lengths" in problem.terms,
        "segments": "query_segments" in problem.terms,
        "bias": "bias" in problem.terms,
        "mask": "mask" in problem.terms,
        "sinks": "sinks" in problem.terms,
        "dropout": problem.dropout_rate > 0,
        "deterministic": problem.deterministic,
        "consumers": tiles.consumers,
        **dataclasses.asdict(tiles),
    }
    lines = [_definition(name, value) for name, value in values.items()]
    return "\n".join(["namespace config {", *lines, "}  // namespace config", ""])


def _definition(name: str, value: bool | int) -> str:
    constant = "k" + "".join(part.capitalize() for part in name.split("_"))
    if isinstance(value, bool):
        return f"constexpr bool {constant} = {str(value).lower()};"
    return f"constexpr int {constant} = {value};"
