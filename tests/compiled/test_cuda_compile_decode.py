"""Compiles the CUDA kernels of decoding: see test_cuda_compile.py."""

import dataclasses
from typing import Any

import pytest

from jax_flash import _gpu
from jax_flash._ops.decode import Decode

from .compile_cases import EVERYTHING, PLAIN, SHAPES, check

pytestmark = pytest.mark.usefixtures("asserted_shared_memory")


# With all terms a kernel has the fewest registers to spare: plain ones are compiled where they are
# another program, of the architecture, the dtype or the way in which CTAs share rows.
ALWAYS: list[tuple[tuple[int, int], tuple[int, int], dict[str, Any]]] = [
    ((128, 128), (32, 8), {"gpu": "A100"}),
    ((256, 256), (16, 4), {"dtype": "float32", "q_len": 4, "everything": True}),
    ((128, 128), (32, 8), {"gpu": "RTX 4090", "dtype": "float32", "q_len": 4}),
    ((36, 33), (32, 8), {"gpu": "B200", "dtype": "float16", "everything": True}),
    ((128, 128), (16, 4), {"gpu": "RTX 4090", "q_len": 16, "everything": True}),
    ((576, 512), (128, 1), {"gpu": "A100", "latent": True}),
    ((128, 128), (64, 1), {"gpu": "RTX 5090", "dtype": "float16"}),
    ((64, 64), (16, 4), {"q_len": 16, "everything": True}),
    ((128, 128), (32, 8), {}),
    ((112, 112), (32, 8), {"everything": True}),
    ((128, 128), (32, 8), {"batch": 1, "everything": True}),
    ((256, 256), (16, 4), {"q_len": 16, "everything": True}),
    ((576, 512), (16, 1), {"batch": 8, "kv_len": 2048, "latent": True, "packs": True}),
    ((576, 512), (128, 1), {"latent": True, "q_len": 2, "everything": True}),
    ((576, 512), (128, 1), {"latent": True, "latent_rows": True, "everything": True}),
    ((576, 512), (16, 1), {"latent": True, "latent_rows": True}),
    ((576, 512), (16, 1), {"latent": True, "latent_rows": True, "q_len": 2, "everything": True}),
    ((576, 512), (128, 2), {"latent": True}),
    ((512, 512), (8, 8), {"q_len": 4, "everything": True}),
    ((192, 128), (64, 1), {"q_len": 16, "page": 1, "everything": True}),
    ((256, 256), (16, 4), {"cache": "float8_e4m3fn", "everything": True}),
    ((128, 128), (16, 4), {"cache": "float8_e4m3fn", "q_len": 16, "everything": True}),
    ((128, 128), (32, 8), {"cache": "float8_e4m3fn", "batch": 1, "everything": True}),
    ((128, 128), (32, 8), {"cache": "float8_e4m3fn", "everything": True, "varied": False}),
    ((576, 512), (128, 1), {"cache": "float8_e4m3fn", "latent": True}),
    ((128, 128), (16, 4), {"cache": "int8", "gpu": "A100", "q_len": 4, "everything": True}),
]
OTHERS: list[tuple[tuple[int, int], tuple[int, int], dict[str, Any]]] = [
    ((128, 128), (32, 8), {"dtype": "float32"}),
    ((128, 128), (32, 8), {"gpu": "B200", "q_len": 8, "everything": True}),
    ((128, 128), (32, 8), {"batch": 1}),
    ((128, 128), (32, 8), {"batch": 1, "kv_len": 16384}),
    ((576, 512), (128, 1), {"latent": True}),
    ((128, 128), (64, 8), {"cache": "float8_e4m3fn"}),
    ((256, 256), (16, 8), {"batch": 1, "everything": True}),
    ((576, 256), (16, 1), {"batch": 1}),
    ((128, 128), (64, 1), {"dtype": "float16"}),
    ((128, 128), (32, 8), {"q_len": 8, "everything": True}),
    ((256, 256), (8, 8), {}),
    ((128, 128), (32, 8), {"cache": "float8_e4m3fn", "dtype": "float16"}),
    ((64, 64), (16, 4), {"cache": "float8_e4m3fn", "q_len": 8, "everything": True}),
    ((256, 256), (16, 8), {"cache": "float8_e4m3fn", "batch": 1, "everything": True}),
    ((128, 128), (16, 4), {"cache": "float8_e4m3fn", "gpu": "RTX 4090", "everything": True}),
    ((128, 128), (16, 4), {"cache": "int8", "everything": True}),
]


@pytest.mark.parametrize(
    ("dims", "heads", "change"), ALWAYS + OTHERS if EVERYTHING else ALWAYS, ids=str
)
def test_decode_compiles_without_spills(dims, heads, change):
    gpu = _gpu.spec.GPUS[change.get("gpu", "H200")]
    page = 16 if change.get("everything") else 1 if change.get("packs") else None
    page = change.get("page", page)
    shapes = dataclasses.replace(
        SHAPES,
        batch=change.get("batch", 64),
        q_len=change.get("q_len", 1),
        kv_len=change.get("kv_len", 4096),
        q_heads=heads[0],
        kv_heads=heads[1],
        head_dim=dims[0],
        value_dim=dims[1],
        page_size=page,
        scales_of_pages=page is not None and "cache" in change and change.get("varied", True),
    )
    dtype = change.get("dtype", "bfloat16")
    precision = "highest" if dtype == "float32" else "default"
    causal: dict[str, Any] = {"window": (None, 0), "bottom_right": True}
    problem = dataclasses.replace(PLAIN, dtype=dtype, precision=precision, **causal)
    if change.get("everything"):
        problem = dataclasses.replace(
            problem, window=(1024, 0), softcap=30.0, terms=("sinks",), scale=-1.0
        )
    value_dim = dims[1] if change.get("latent") else None
    packed_rows = change.get("latent_rows", False)  # new ones are written ahead of these kernels
    flags: dict[str, Any] = {"paged": True, "appends": not packed_rows} if page else {}
    if change.get("packs"):
        flags = {"paged": True, "packs": True}
    rotary_base = 1e4 if change.get("everything") and dims[0] <= 256 and dims[0] % 16 == 0 else None
    flags |= {"quantized": change.get("cache"), "latent_rows": packed_rows}
    call = Decode(problem, None, value_dim=value_dim, rotary_base=rotary_base, **flags)
    plan = _gpu.plan(call, shapes, gpu)
    check(plan, seconds=15, gpu=gpu)
