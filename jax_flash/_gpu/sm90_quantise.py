"""The kernel that quantises 16-bit arrays for Hopper's kernels of float8, and its plan.

Read next: cuda/kernels/sm90_float8/quantise.cuh.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax_flash import _float8
from jax_flash._gpu.buffers import dims_of
from jax_flash._gpu.fields import Field, Struct, name_of
from jax_flash._gpu.plan import Buffer, Kernel, Launch, Number, Plan
from jax_flash._gpu.shared_fields import MAX_INT
from jax_flash._gpu.sizes import B, N, Size, T, at_most, ceil_div, equal, product
from jax_flash._gpu.spec import GpuSpec
from jax_flash._problem import Shapes

_STEP, _WIDEST = 16, 256  # head dims
_NUMBERS = 32  # of a thread
_BLOCKS = Size("blocks")


@dataclasses.dataclass(frozen=True)
class QuantiseTiling:
    """What the kernel is compiled for; `shared_bytes`: it has none but those it declares."""

    head_dim: int
    turn: bool
    scaled: int
    columns: bool
    amax: bool
    shared_bytes: int = 0

    @property
    def threads(self) -> int:
        return _float8.BLOCK * self.head_dim // _NUMBERS

    def constants(self, dtype: str) -> dict[str, Number]:
        return {
            "kBFloat16": dtype == "bfloat16",
            **dict.fromkeys(("kFloat32", "kFloat8", "kCarried", "kRest"), False),
            "kHeadDim": self.head_dim,
            "kTurns": self.turn,
            "kTurnShift": _float8.turn_shift(self.head_dim) if self.turn else 0,
            "kScaled": self.scaled,
            "kColumns": self.columns,
            "kAmax": self.amax,
        }


def refuse(call: Any, shapes: Shapes) -> tuple[str, ...]:
    """Lists why the kernel does not run a call on a GPU that has it."""
    dim, dtype = shapes.head_dim, call.problem.dtype
    reasons = []
    if dtype not in ("bfloat16", "float16"):
        reasons.append(f"the CUDA kernel quantises bfloat16 and float16, not {dtype}")
    if dim % _STEP or dim > _WIDEST:
        text = f"head dims up to {_WIDEST} that {_STEP} divides, not {dim}"
        reasons.append(f"the CUDA kernel quantises {text}")
    return tuple(reasons)


def plan(call: Any, shapes: Shapes, gpu: GpuSpec, family: str, notes: tuple[str, ...]) -> Plan:
    """Makes the plan of a call that `refuse` lets through."""
    dim = shapes.head_dim
    tiling = QuantiseTiling(dim, call.turn, call.scaled, call.columns, call.amax)
    words = ("*B", "T", "N", str(dim))
    by_block = ("*B", "blocks", "N")
    results = {
        "values": (name_of(_float8.DTYPE), words),
        "scale": ("f32", ("*B", "scales", "N")),
        "amax": ("f32", by_block),
        "columns": ("u8", ("*B", "N", str(dim), "columns")),
    }

    def pointer(name: str) -> str | None:
        return name if name in call.results else None

    params = Struct(
        "QuantiseParams",
        (
            Field("const void*", "source", "q", "[B, T, N, H]"),
            Field("void*", "values", "values", "[B, T, N, H] float8"),
            Field("float*", "scales", "scale", "[B, ceil(T / kScaled), N]"),
            Field("float*", "amax", pointer("amax"), "[B, ceil(T / 128), N], kAmax"),
            Field("void*", "columns", pointer("columns"), "[B, N, H, T up to 128], kColumns"),
            Field("int", "length", T),
            Field("int", "heads", N),
        ),
    )
    blocks = ceil_div(T, _float8.BLOCK)
    checks = [
        (at_most(T, MAX_INT // 2), "the sequence is too long"),
        (equal(Size("scales"), ceil_div(T, call.scaled)), "the scales do not fit the sequence"),
    ]
    if call.amax:
        checks.append((equal(_BLOCKS, blocks), "the largest magnitudes do not fit the sequence"))
    if call.columns:
        text = "the columns do not fit the sequence"
        checks.append((equal(Size("columns"), blocks * _float8.BLOCK), text))
    ctas = product(B, blocks, N)
    checks.append((at_most(ctas, MAX_INT), "the array is too large"))
    dims = dims_of(shapes)
    return Plan(
        family=family,
        arch=gpu.arch,
        target="jax_flash_cuda_forward",
        source="sm90_float8/quantise.cuh",
        tiling=tiling,
        constants=tiling.constants(call.problem.dtype),
        operands=(Buffer("q", (name_of(call.problem.dtype),), words),),
        results=tuple(Buffer(name, (results[name][0],), results[name][1]) for name in call.results),
        same=(),
        launch=Launch(
            params,
            (Kernel("flash_quantise", ctas, tiling.threads),),
            names={},
            checks=tuple(checks),
            none=product(B, T, N),
        ),
        dims={letter: dims[letter] for letter in "BTN"},
        notes=notes,
    )
