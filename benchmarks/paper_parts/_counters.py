"""One call of attention between cuProfilerStart and -Stop, for ncu; io.py starts it.

ncu --profile-from-start off ... python benchmarks/paper_parts/_counters.py WAY LENGTH
"""

import ctypes
import importlib
import os
import sys
from pathlib import Path


def main() -> None:
    """Compiles, calls once, then once more while ncu looks."""
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # not this folder: it has an io.py
    # Kernels one by one: no graph of several.
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="
    jax = importlib.import_module("jax")
    io = importlib.import_module("paper_parts.io")
    way, length = sys.argv[1], int(sys.argv[2])
    batch = io.TOKENS // length
    compiled = io.compile_step(way, batch, length, io.HEADS)
    operands = io.draw(batch, length, io.HEADS, seed=0)
    jax.block_until_ready(compiled(*operands))
    driver = ctypes.CDLL("libcuda.so.1")
    context = ctypes.c_void_p()  # JAX's, which this thread may not have
    check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
    check(driver.cuCtxSetCurrent(context))
    check(driver.cuProfilerStart())
    jax.block_until_ready(compiled(*operands))
    check(driver.cuProfilerStop())


def check(status: int) -> None:
    """Ends where the driver reports an error."""
    if status:
        raise SystemExit(f"the driver reports error {status}")


if __name__ == "__main__":
    main()
