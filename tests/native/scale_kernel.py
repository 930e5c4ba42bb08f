"""A small kernel, for tests of the compiler and its caches."""

from pathlib import Path

from jax_flash import _native

ARCH = "sm_90a"
SOURCES = {
    "scale.cuh": '#include "factor.h"\n'
    'extern "C" __global__ void scale(float* x) { x[threadIdx.x] *= kFactor; }\n',
    "factor.h": "constexpr float kFactor = 3.0f;\n",
}
MEGABYTE = 1 << 20


def configure(cache: Path | None, size: int = MEGABYTE, sources: dict[str, str] = SOURCES) -> None:
    """Starts over as a new process would: nothing compiled is remembered outside `cache`."""
    _native.configure_cuda(cache, size, sources)


def compile_scale(header: str = "") -> _native.CompiledKernel:
    return _native.compile_kernel("scale.cuh", header, ARCH)
