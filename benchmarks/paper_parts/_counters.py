"""Calls of attention between cuProfilerStart and -Stop, for ncu; io.py starts it.

ncu --profile-from-start off ... python benchmarks/paper_parts/_counters.py
"""

import concurrent.futures
import ctypes
import importlib
import os
import sys
from pathlib import Path
from typing import Any

# Kernels one by one: no graph of several. Tuning would time kernels, each stopped by ncu.
FLAGS = (
    "--xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
)


def main() -> None:
    """Compiles all calls, makes each once, then once more while ncu looks, behind a sine."""
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # not this folder: it has an io.py
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"
    jax = importlib.import_module("jax")
    io = importlib.import_module("paper_parts.io")
    wanted = io.calls()

    def compile_call(call: tuple[str, int]) -> Any:
        way, length = call
        return io.compile_step(way, io.TOKENS // length, length, io.HEADS)

    with concurrent.futures.ThreadPoolExecutor(len(wanted)) as pool:
        programs = list(pool.map(compile_call, wanted))
    drawn = {length: io.draw(io.TOKENS // length, length, io.HEADS, 0) for _, length in wanted}
    ones = jax.numpy.ones(8)
    mark = jax.jit(jax.numpy.sin)

    def run() -> None:
        for (_, length), program in zip(wanted, programs, strict=True):
            jax.block_until_ready(mark(ones))
            jax.block_until_ready(program(*drawn[length]))

    run()
    driver = ctypes.CDLL("libcuda.so.1")
    context = ctypes.c_void_p()  # JAX's, which this thread may not have
    check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
    check(driver.cuCtxSetCurrent(context))
    check(driver.cuProfilerStart())
    run()
    check(driver.cuProfilerStop())


def check(status: int) -> None:
    """Ends where the driver reports an error."""
    if status:
        raise SystemExit(f"the driver reports error {status}")


if __name__ == "__main__":
    main()
