"""The kernels for Hopper (wgmma, TMA): what they refuse, and their plans.

A file for each pass chooses its tiling. Read next: forward_launch.py.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jax_flash._call import Call
from jax_flash._gpu.buffers import dims_of, operands_of, results_of, same_of
from jax_flash._gpu.carrier import COPIED
from jax_flash._gpu.constants import functions, refuse_functions
from jax_flash._gpu.family import Family
from jax_flash._gpu.plan import Number, Plan
from jax_flash._gpu.sm90 import folds
from jax_flash._gpu.sm90.backward import choose_backward, early_backward, takes_turns
from jax_flash._gpu.sm90.backward_launch import backward_launch
from jax_flash._gpu.sm90.backward_schedule import backward_constants
from jax_flash._gpu.sm90.backward_tiling import BackwardTiling
from jax_flash._gpu.sm90.forward import choose_forward
from jax_flash._gpu.sm90.forward_launch import forward_launch
from jax_flash._gpu.sm90.forward_schedule import forward_constants
from jax_flash._gpu.sm90.forward_tiling import ForwardTiling
from jax_flash._gpu.sm90.hopper import early_tiles, tma_loads_of
from jax_flash._gpu.spec import GpuSpec
from jax_flash._gpu.traits import group_size, is_bare, is_highest, known
from jax_flash._problem import Problem, Shapes
from jax_flash._terms import TERMS

# The terms that the kernels compute.
_COMPUTED = (
    *("query_lengths", "key_value_lengths", "query_segments", "key_value_segments"),
    *("query_positions", "key_value_positions", "sinks", "mask", "bias", "dropout_state"),
    "score_ids",
    *("block_numbers", "block_bits"),
)


class Sm90(Family):
    """The kernels of cuda/kernels/sm90 and sm90_float32."""

    name = "sm90"
    architectures = ("sm_90a",)
    passes = ("forward", "backward")
    measured = ("H200",)

    def refuse(self, call: Call, shapes: Shapes, gpu: GpuSpec) -> tuple[str, ...]:
        problem = call.problem
        reasons = []
        kernels = f"the CUDA {call.target} kernels"
        if gpu.arch not in self.architectures:
            reasons.append(f"the CUDA kernels run on sm_90 (H100, H200); {gpu.name} is {gpu.arch}")
        halves = is_highest(problem)
        if problem.dtype not in ("bfloat16", "float16") and not halves:
            reasons.append(f"{kernels} take bfloat16 and float16, not {problem.dtype}")
        widest = 128 if halves else 256
        wide = [dim for dim in (shapes.head_dim, shapes.value_dim) if dim > widest]
        reasons += [f"{kernels} take head dims up to {widest}, not {dim}" for dim in wide]
        if halves and not is_bare(problem):
            reasons.append(f"{kernels} take float32 without terms, softcap or function of scores")
        absent = [term for term in problem.terms if term not in _COMPUTED]
        reasons += [f"the CUDA kernels have no {TERMS[term].feature}" for term in absent]
        reasons += refuse_functions(call)
        return tuple(dict.fromkeys(reasons))

    def folds(self, call: Call, shapes: Shapes, gpu: GpuSpec) -> int:
        return folds.fold_rows(call, shapes, gpu)

    def folds_heads(self, call: Call, shapes: Shapes, gpu: GpuSpec) -> bool:
        return folds.fold_heads(call, shapes, gpu)

    def padded(self, call: Call, shapes: Shapes, gpu: GpuSpec) -> Shapes:
        """Pads heads to rows that TMA loads, where copies take less than warps that load rows."""
        if tma_loads_of(shapes) or not _copies_pay(call, shapes):
            return shapes
        if call.target == "forward":
            early = early_tiles(call.problem, shapes)
        else:
            early = early_backward(call.problem, shapes, gpu)
        if early is not None:
            return shapes
        head_dim, value_dim = (-(-dim // 8) * 8 for dim in (shapes.head_dim, shapes.value_dim))
        return dataclasses.replace(shapes, head_dim=head_dim, value_dim=value_dim)

    def plan(
        self,
        call: Call,
        shapes: Shapes,
        gpu: GpuSpec,
        tiling: Any = None,
    ) -> Plan:
        problem = call.problem
        if "dout" in call.operands:
            if tiling is None and takes_turns(problem, shapes, gpu):
                problem = dataclasses.replace(problem, deterministic=True)
            tiling = tiling or choose_backward(problem, shapes, gpu)
            if "dbias" not in call.results:
                tiling = tiling.without_dbias
            if tiling.stores_dq:  # nothing is added in an order
                problem = dataclasses.replace(problem, deterministic=False)
            call = dataclasses.replace(call, problem=problem)
            constants = _constants(tiling, problem, shapes) | {
                "kHasDlse": "dlse" in call.operands,
                "kHasDbias": "dbias" in call.results,
            }
            launch = backward_launch(call, shapes, tiling)
        else:
            tiling = tiling or choose_forward(problem, shapes, gpu)
            constants = _constants(tiling, problem, shapes)
            launch = forward_launch(call, shapes, tiling)
        loads = () if tiling.tma_loads else (_LOADED_BY_WARPS,)
        copied = (COPIED,) if problem.split else ()
        return Plan(
            family=self.name,
            arch=gpu.arch,
            target=f"jax_flash_cuda_{call.target}",
            source=tiling.source,
            beside=tiling.beside,
            tiling=tiling,
            constants=constants,
            operands=operands_of(call, shapes),
            results=results_of(call, shapes),
            same=same_of(call),
            launch=launch,
            dims=dims_of(shapes),
            notes=(*copied, *loads, *self.untried(gpu)),
            functions=functions(call, shapes),
        )


def _copies_pay(call: Call, shapes: Shapes) -> bool:
    """Tells whether rows are read so often, or in words so short, that their copies pay."""
    readers = known(shapes.q_len, 0) * group_size(shapes), known(shapes.kv_len, 0)
    word = math.gcd(shapes.head_dim, shapes.value_dim, 4)  # elements, that warps load at once
    if word == 1 or (word == 2 and max(readers) >= _PADDED_EVEN_FROM):
        return True
    # Halves of float32 are copies anyhow.
    forward = call.target == "forward" and not call.problem.split
    return min(readers) >= (_PADDED_FROM_FORWARD if forward else _PADDED_FROM)


def _constants(
    tiling: ForwardTiling | BackwardTiling, problem: Problem, shapes: Shapes
) -> dict[str, Number]:
    if isinstance(tiling, BackwardTiling):
        return backward_constants(tiling, problem, shapes)
    return forward_constants(tiling, problem, shapes)


_PADDED_FROM, _PADDED_FROM_FORWARD = 1024, 1536  # rows that read a row
# Where 4 does not divide the dims, rows that read a key. H200, us, forward and with gradients:
# 19 x 752 x 8, 40/2 heads of 42 250 to 152, 1019 to 437; 32 x 128, 10/2 of 90 42 to 43, 119 to 122.
# Odd ones: 119 x 32, 20 heads of 243 261 to 184, 1032 to 464; 40 x 64, 6/3 of 187 45 to 36, 151 to
# 102; 16 x 512, 6 of 75 111 to 60, 437 to 210.
_PADDED_EVEN_FROM = 1024
_LOADED_BY_WARPS = "rows loaded by warps: 8 does not divide both dims, as TMA needs"
