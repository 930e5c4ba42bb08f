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
    driver.cuProfilerStart()
    jax.block_until_ready(compiled(*operands))
    driver.cuProfilerStop()


if __name__ == "__main__":
    main()
