"""Owns how the forward kernel of mma.sync computes requests whose keys lie in pages: flash_prefill.

It is the kernel of dense calls: units are made of requests on the device, and rows of keys come
from pages of any size. Read next: forward.py; cuda/kernels/request_units.cuh.
"""

from __future__ import annotations

import dataclasses

from jax_flash._call import Call
from jax_flash._gpu import paged
from jax_flash._gpu.family import Family
from jax_flash._gpu.plan import Plan
from jax_flash._gpu.sm80 import Sm80
from jax_flash._gpu.sm80.forward import ForwardTiling, choose_forward
from jax_flash._gpu.sm80.forward_launch import forward_launch
from jax_flash._gpu.spec import GpuSpec
from jax_flash._problem import Problem, Shapes


class Pages80(Family):
    """The forward kernel of cuda/kernels/sm80, with keys from pages."""

    name = "pages_sm80"
    architectures = Sm80.architectures
    passes = ("prefill",)
    measured = ()

    def refuse(self, call: Call, shapes: Shapes, gpu: GpuSpec) -> tuple[str, ...]:
        kernels = "the CUDA forward kernels over pages"
        reasons = paged.refuse(call, shapes, gpu, kernels)
        if gpu.arch not in self.architectures:
            reasons.append(f"{kernels} run on sm_80 and later; {gpu.name} is {gpu.arch}")
        return tuple(reasons)

    def plan(
        self, call: Call, shapes: Shapes, gpu: GpuSpec, tiling: ForwardTiling | None = None
    ) -> Plan:
        tiling = tiling or choose_pages(call.problem, shapes, gpu)
        call, dense = paged.dense_call(call, shapes)
        return paged.plan(
            self,
            call,
            shapes,
            gpu,
            target="jax_flash_cuda_sm80_forward",
            source=tiling.source,
            tiling=tiling,
            constants=tiling.constants(call.problem, dense),
            launch=forward_launch(call, dense, tiling),
            notes=self.untried(gpu),
        )


def choose_pages(problem: Problem, shapes: Shapes, gpu: GpuSpec) -> ForwardTiling:
    """Chooses that of the dense call of as many rows: query heads of a kv head share units."""
    packed = paged.packed_heads(shapes)
    rows = dataclasses.replace(
        shapes, batch=1, q_len=shapes.q_len * packed, q_heads=shapes.q_heads // packed
    )
    tiling = choose_forward(dataclasses.replace(problem, bottom_right=False), rows, gpu)
    return dataclasses.replace(tiling, packed_heads=packed, page_size=shapes.page_size or 0)
