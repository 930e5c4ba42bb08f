"""What a family of kernels is: what it refuses, and the plan by which it runs one pass of a call.

A family owns its kernels' folder and this side's choices: `_gpu/sm90/`, `cuda/kernels/sm90/`.
"""

from __future__ import annotations

import abc
from contextvars import ContextVar
from typing import Any

from jax_flash._call import Call
from jax_flash._gpu.plan import Plan
from jax_flash._gpu.spec import GpuSpec
from jax_flash._problem import Shapes

# The name of the family that comes first in a thread, if one does: see `prefer`.
preferred: ContextVar[str | None] = ContextVar("preferred", default=None)


class Family(abc.ABC):
    """Kernels for some architectures, and the choices that go with them.

    Attributes:
      name: of the folder of kernels.
      architectures: those it runs on, as GpuSpec.arch has them.
      passes: those it has kernels for, as Call.target names them.
      measured: the models of GPUs on which its tilings were measured.
    """

    name: str
    architectures: tuple[str, ...]
    passes: tuple[str, ...]
    measured: tuple[str, ...]

    @abc.abstractmethod
    def refuse(self, call: Call, shapes: Shapes, gpu: GpuSpec) -> tuple[str, ...]:
        """Lists all reasons why this family does not run a pass on a GPU; empty if it does."""

    @abc.abstractmethod
    def plan(self, call: Call, shapes: Shapes, gpu: GpuSpec, tiling: Any = None) -> Plan:
        """Makes the plan of a pass that `refuse` lets through, by a tiling (None: the chosen)."""

    def folds(self, call: Call, shapes: Shapes, gpu: GpuSpec) -> int:
        """Counts the batch rows that its kernels take as one (folding.py)."""
        return 1

    def folds_heads(self, call: Call, shapes: Shapes, gpu: GpuSpec) -> bool:
        """Tells whether its kernels take query heads that share keys as one head's queries."""
        return False

    def padded(self, call: Call, shapes: Shapes, gpu: GpuSpec) -> Shapes:
        """Returns the sizes of the arrays that its kernels take, wider where a copy pays."""
        return shapes

    def rotates(self, shapes: Shapes) -> bool:
        """Tells whether its kernels rotate queries and new keys themselves."""
        return False

    def outrun(self, call: Call, gpu: GpuSpec) -> tuple[str, ...]:
        """Names what is much faster than its kernels on a GPU that they were not made for."""
        return ()

    def untried(self, gpu: GpuSpec) -> tuple[str, ...]:
        """Says of a GPU on which the tilings were never measured that they were not."""
        if gpu.name in self.measured:
            return ()
        if not self.measured:
            return ("tilings were never measured",)
        return (f"tilings were measured on {', '.join(self.measured)}, never on {gpu.name}",)
