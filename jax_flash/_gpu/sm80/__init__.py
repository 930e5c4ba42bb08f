"""The kernels of mma.sync, for GPUs since Ampere: what they refuse, and their plans.

A file for each pass chooses its tiling; what was measured, was on an H200. Read next:
forward_launch.py.
"""

from __future__ import annotations

from typing import Any

from jax_flash._call import Call
from jax_flash._gpu import short_float32
from jax_flash._gpu.buffers import dims_of, operands_of, results_of, same_of
from jax_flash._gpu.carrier import COPIED
from jax_flash._gpu.constants import functions, refuse_functions
from jax_flash._gpu.family import Family
from jax_flash._gpu.plan import Plan
from jax_flash._gpu.sm80.backward import choose_backward, refuse_size
from jax_flash._gpu.sm80.backward_launch import backward_launch
from jax_flash._gpu.sm80.forward import choose_forward
from jax_flash._gpu.sm80.forward_launch import forward_launch
from jax_flash._gpu.spec import GpuSpec
from jax_flash._problem import Shapes
from jax_flash._terms import TERMS

# The terms that the kernels compute.
_COMPUTED = (
    *("query_lengths", "key_value_lengths", "query_segments", "key_value_segments"),
    *("query_positions", "key_value_positions", "sinks", "mask", "bias", "dropout_state"),
    "score_ids",
    *("block_numbers", "block_bits"),
)
_DTYPES = ("float32", "bfloat16", "float16")
_WIDEST = 512  # head dim


class Sm80(Family):
    """The kernels of cuda/kernels/sm80."""

    name = "sm80"
    architectures = (
        *("sm_80", "sm_86", "sm_87", "sm_89", "sm_90a"),
        *("sm_100", "sm_103", "sm_110", "sm_120", "sm_121"),
    )
    passes = ("forward", "backward")
    measured = ()

    def refuse(self, call: Call, shapes: Shapes, gpu: GpuSpec) -> tuple[str, ...]:
        reasons = []
        if gpu.arch not in self.architectures:
            reasons.append(
                "the CUDA kernels run on sm_80 and later, which have cp.async, bfloat16 and "
                f"products of 16 columns; {gpu.name} is {gpu.arch}"
            )
        kernels = f"the CUDA {call.target} kernels"
        dtype = call.problem.dtype
        if dtype not in _DTYPES:
            reasons.append(f"{kernels} take float32, bfloat16 and float16, not {dtype}")
        wide = [dim for dim in (shapes.head_dim, shapes.value_dim) if dim > _WIDEST]
        reasons += [f"{kernels} take head dims up to {_WIDEST}, not {dim}" for dim in wide]
        if not reasons and call.target == "backward":
            reasons += refuse_size(call.problem, shapes, gpu)
        absent = [term for term in call.problem.terms if term not in _COMPUTED]
        reasons += [f"the CUDA kernels have no {TERMS[term].feature}" for term in absent]
        reasons += refuse_functions(call)
        return tuple(dict.fromkeys(reasons))

    def folds(self, call: Call, shapes: Shapes, gpu: GpuSpec) -> int:
        taken = short_float32.takes(call, shapes, gpu)
        return short_float32.folds(call, shapes) if taken else 1

    def outrun(self, call: Call, gpu: GpuSpec) -> tuple[str, ...]:
        if (
            call.problem.dtype == "float32"
            or call.problem.split
            or gpu.arch not in ("sm_100", "sm_103")
        ):
            return ()
        return (
            f"mma.sync, by which these kernels multiply, has about a quarter of the speed of "
            f"{gpu.name}'s tensor cores: backend 'cudnn' is up to four times as fast where it "
            "takes the call",
        )

    def plan(self, call: Call, shapes: Shapes, gpu: GpuSpec, tiling: Any = None) -> Plan:
        if "dout" in call.operands:
            tiling = tiling or choose_backward(call.problem, shapes, gpu)
            if "dbias" not in call.results:
                tiling = tiling.without_dbias
            constants = tiling.constants(call.problem, shapes) | {
                "kHasDlse": "dlse" in call.operands,
                "kHasDbias": "dbias" in call.results,
            }
            launch = backward_launch(call, shapes, tiling)
        else:
            tiling = tiling or choose_forward(call.problem, shapes, gpu)
            constants = tiling.constants(call.problem, shapes)
            launch = forward_launch(call, shapes, tiling)
        copied = (COPIED,) if call.problem.split == "carried" else ()
        if short_float32.takes(call, shapes, gpu):
            copied = (short_float32.NOTE,)
        return Plan(
            family=self.name,
            arch=gpu.arch,
            target=f"jax_flash_cuda_{self.name}_{call.target}",
            source=tiling.source,
            beside=tiling.beside,
            tiling=tiling,
            constants=constants,
            operands=operands_of(call, shapes),
            results=results_of(call, shapes),
            same=same_of(call),
            launch=launch,
            dims=dims_of(shapes),
            notes=(*copied, *self.untried(gpu), *self.outrun(call, gpu)),
            functions=functions(call, shapes),
        )
