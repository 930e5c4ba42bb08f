"""Programs of jax.export whose sizes are symbolic, on the CUDA kernels by tests/emulator."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

import jax_flash

from ..cases import Arguments, Case
from ..compare import compare_parts
from ..emulator import Emulator

# Batch rows b, queries t, keys s, two query heads for each of k key/value heads.
DIMS = {
    "query": "b, t, 2*k, h",
    "key": "b, s, k, h",
    "value": "b, s, k, h",
    "bias": "b, 1, t, s",
    "mask": "b, 1, t, s",
    "query_segment_ids": "b, t",
    "key_value_segment_ids": "b, s",
    "query_seq_lengths": "b",
    "key_value_seq_lengths": "b",
    "sinks": "2*k",
}


@dataclasses.dataclass(frozen=True)
class Exported:
    """Arguments whose program is exported for sizes of any kind, and called with their own."""

    arguments: Arguments

    @property
    def case(self) -> Case:
        return self.arguments.case

    def run(self, backend: str, **_: Any) -> dict[str, np.ndarray]:
        given = dict(self.arguments.arrays), self.arguments.cotangent
        dims = {name: DIMS[name].replace("h", str(self.case.H)) for name in given[0]}
        out = dims["query"], "b, t, 2*k"
        specs = jax.export.symbolic_args_specs(given, (dims, out if self.case.with_lse else out[0]))
        step = jax.jit(self.arguments.step(backend))
        checks = jax_flash.EXPORT_CHECKS
        exported = jax.export.export(step, disabled_checks=checks)(*specs)
        result, pulled = jax.export.deserialize(exported.serialize()).call(*given)
        names = ("out", "lse") if self.case.with_lse else ("out",)
        values = dict(zip(names, jax.tree.leaves(result), strict=True))
        values |= {f"d{name}": gradient for name, gradient in pulled.items()}
        return {name: np.asarray(x) for name, x in values.items()}


def case(name: str, **options: Any) -> Case:
    sizes = {"T": 70, "S": 90, "N": 4, "K": 2, "H": 64, "batch": (2,), "dtype": "bfloat16"}
    return Case(name, **(sizes | options))


CASES = (
    case("causal", causal=True, with_lse=True),
    case("terms", segments="packed", q_lengths=(70, 3), sinks=True, window=(30, 5)),
    case("bias and mask", bias="b1ts", mask="b1ts", H=128),
    case("float32", H=32, dtype="float32", precision="highest"),
    case("pairs of CTAs", H=192, causal=True, N=2, K=1),
)


# What of a launch follows from sizes is in the launches' tables: every family's is taken, and each
# case by one of them.
GPUS = {"causal": ("H100", "A100"), "terms": ("H100",), "bias and mask": ("A100",)}


@pytest.mark.parametrize(
    ("case", "gpu"),
    [(case, gpu) for case in CASES for gpu in GPUS.get(case.name, ("H100",))],
    ids=lambda x: x if isinstance(x, str) else x.name,
)
def test_any_size(case: Case, gpu: str, emulator: Emulator):
    arguments = case.draw()
    compare_parts(arguments, emulator.run(Exported(arguments), gpu=gpu))
