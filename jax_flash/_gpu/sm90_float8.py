"""The kernels of float8 for Hopper: what they refuse, and their plans.

They are those of 16 bits (sm90/) but for their operands, and one that makes these
(sm90_quantise.py). Read next: sm90/forward_launch.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax_flash._call import Call
from jax_flash._gpu import sm90_quantise
from jax_flash._gpu.buffers import dims_of, operands_of, results_of
from jax_flash._gpu.family import Family
from jax_flash._gpu.plan import Plan
from jax_flash._gpu.sm90.facts import Facts
from jax_flash._gpu.sm90.forward_launch import forward_launch
from jax_flash._gpu.sm90.forward_order import l2_heads
from jax_flash._gpu.sm90.forward_parts import splits_last_wave
from jax_flash._gpu.sm90.forward_schedule import forward_constants
from jax_flash._gpu.sm90.forward_tiling import ForwardTiling
from jax_flash._gpu.spec import GpuSpec
from jax_flash._gpu.traits import known
from jax_flash._problem import Problem, Shapes
from jax_flash._terms import TERMS

_COMPUTED = (
    *("query_lengths", "key_value_lengths", "query_segments", "key_value_segments"),
    *("query_positions", "key_value_positions", "sinks", "block_numbers", "block_bits"),
)
_NARROW, _WIDE = 128, (192, 256)  # head dims: up to this one, and these


class Sm90Float8(Family):
    """The kernels of cuda/kernels/sm90_float8."""

    name = "sm90_float8"
    architectures = ("sm_90a",)
    passes = ("forward_float8", "quantise")
    measured = ("H100",)

    def refuse(self, call: Call, shapes: Shapes, gpu: GpuSpec) -> tuple[str, ...]:
        problem = call.problem
        kernels = "the CUDA kernels of float8"
        reasons = []
        if gpu.arch not in self.architectures:
            reasons.append(f"{kernels} run on sm_90 (H100, H200); {gpu.name} is {gpu.arch}")
        if call.target == "quantise":
            return (*reasons, *sm90_quantise.refuse(call, shapes))  # pyright: ignore
        dims = shapes.head_dim, shapes.value_dim
        others = [dim for dim in dims if dim > _NARROW and dim not in _WIDE]
        wide = f"{_WIDE[0]} or {_WIDE[1]}"
        reasons += [
            f"{kernels} take head dims up to {_NARROW}, {wide}, not {dim}" for dim in others
        ]
        if max(dims) > _NARROW and is_crowded(problem):  # up to 200 bytes were spilled
            text = "no left window, softcap, segment ids, positions or block mask"
            reasons.append(f"{kernels} take {text} at head dims above {_NARROW}")
        absent = [term for term in problem.terms if term not in _COMPUTED]
        reasons += [f"{kernels} have no {TERMS[term].feature}" for term in absent]
        if call.fine:  # pyright: ignore[reportAttributeAccessIssue]
            reasons.append(f"{kernels} take scales of 128 keys, not of 64")
        if reasons and call.fallback is None:
            reasons.append("fallback='16bit' runs the call in kernels of 16 bits")
        return tuple(dict.fromkeys(reasons))

    def rotates(self, shapes: Shapes) -> bool:
        return True  # operands are not dequantised

    def plan(self, call: Call, shapes: Shapes, gpu: GpuSpec, tiling: Any = None) -> Plan:
        if call.target == "quantise":
            return sm90_quantise.plan(call, shapes, gpu, self.name, self.untried(gpu))  # pyright: ignore
        # What is written and not what is multiplied decides a kernel's constants.
        problem = dataclasses.replace(call.problem, dtype=call.result_dtype)
        exact = call.with_lse  # pyright: ignore[reportAttributeAccessIssue]
        tiling = tiling or choose(problem, shapes, gpu, exact_sums=exact)
        return Plan(
            family=self.name,
            arch=gpu.arch,
            target="jax_flash_cuda_forward",
            source=tiling.source,
            beside=tiling.beside,
            tiling=tiling,
            constants=forward_constants(tiling, problem, shapes),
            operands=operands_of(call, shapes),
            results=results_of(call, shapes),
            same=(),
            launch=forward_launch(dataclasses.replace(call, problem=problem), shapes, tiling),
            dims=dims_of(shapes),
            notes=self.untried(gpu),
            functions="",
        )


def choose(problem: Problem, shapes: Shapes, gpu: GpuSpec, *, exact_sums: bool) -> ForwardTiling:
    """Chooses the tiling: blocks are 128 keys, of which a row of shared memory has one column.

    `exact_sums`: somebody reads lse, which that of rounded weights is not near enough for.
    """
    widest = max(shapes.head_dim, shapes.value_dim)
    uneven = problem.window[1] is not None or bool(problem.terms)
    segments, crowded = "query_segments" in problem.terms, is_crowded(problem)
    fits = not (segments or "query_positions" in problem.terms or problem.masked)
    # Three warpgroups hide one another's waits. Each has registers for its output and for scores,
    # which a block's output takes the place of.
    three = fits if widest <= 64 else widest <= _NARROW and not crowded
    consumers = 3 if three else 2
    # A product with ones saves 64 of 320 instructions of a block. Its sums are in registers that
    # the output leaves of the scores': head dim 128 has none, and with sinks ptxas finds too few.
    sums = not exact_sums and shapes.value_dim < _NARROW and not crowded
    sums = sums and "sinks" not in problem.terms
    return ForwardTiling(
        shapes.head_dim,
        shapes.value_dim,
        block_kv=128,
        consumers=consumers,
        stages=4 if widest <= _NARROW else 3,
        ping_pong=crowded,  # else 1 to 4 % slower
        float8=True,
        apart=True,
        product_sums=sums,
        # Keys of a part count from its first, those of a window do not.
        splits=not uneven
        and problem.window[0] is None
        and splits_last_wave(shapes, gpu, 64 * consumers),
        dynamic=uneven or known(shapes.q_len, 4096) > 2048,
        l2_heads=l2_heads(Facts(problem, shapes, gpu)),
        # Ids of segments take the producer's; of two warpgroups 24 are too few for scales.
        producer_registers=56 if segments and widest > 64 else 40,
    )


def is_crowded(problem: Problem) -> bool:
    """Tells of terms that need registers of a consumer's in every block."""
    ids = "query_segments" in problem.terms or "query_positions" in problem.terms
    limits = problem.window[0], problem.softcap
    return ids or problem.masked or limits != (None, None)
