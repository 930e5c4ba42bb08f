"""Compiles a few kernels by CUDA 12's NVRTC, for jax[cuda12]; other tests take the newest.

JAX_FLASH_NVRTC_12 names its libnvrtc.so.12 (`pip install --target X nvidia-cuda-nvrtc-cu12`).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..processes import child_environment

NVRTC_12 = os.environ.get("JAX_FLASH_NVRTC_12", "")

COMPILE = """
import sys
import jax
import jax.numpy as jnp
import jax_flash

def report(explanation):
    for found in (explanation.forward, explanation.backward):
        if found is not None:
            assert found.backend == "cuda" and found.kernel.error is None, found
            assert found.kernel.entries, found

_, gpu, head_dim = sys.argv
q = jax.ShapeDtypeStruct((2, 256, 4, int(head_dim)), jnp.bfloat16)
lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
report(jax_flash.explain(q, q, q, is_causal=True, key_value_seq_lengths=lengths, gpu=gpu))
"""


@pytest.mark.skipif(not NVRTC_12, reason="JAX_FLASH_NVRTC_12 names no NVRTC of CUDA 12")
@pytest.mark.parametrize(("gpu", "head_dim"), [("H100", 128), ("H100", 256), ("A100", 64)])
def test_kernels_compile(gpu: str, head_dim: int, tmp_path: Path):
    """Both passes with terms; `child_environment` has a cache of its own."""
    environment = child_environment(tmp_path, JAX_FLASH_NVRTC=NVRTC_12, JAX_PLATFORMS="cpu")
    subprocess.run(
        [sys.executable, "-P", "-c", COMPILE, gpu, str(head_dim)],
        env=environment,
        cwd=tmp_path,
        check=True,
    )
