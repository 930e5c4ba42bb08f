"""What a family of kernels is: what it refuses, and the plan by which it runs one pass of a call.

A family owns its kernels' folder, this side's choices and the handlers of its custom calls:
`_gpu/sm90/`, `cuda/kernels/sm90/`, `cuda/runtime/families/sm90.cc`.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from jax_flash._call import Call
from jax_flash._gpu.spec import GpuSpec
from jax_flash._problem import Shapes

Number = bool | int | float


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one GPU runs one pass of a call: all that lowering, compiling and a reader need.

    Attributes:
      family: that made it.
      arch: what its program is compiled for.
      target: the custom call, "jax_flash_cuda_forward".
      source: the file of the kernels, relative to cuda/kernels.
      entries: the program's entry points that every call launches; the first is the main one.
      beside: the file of further kernels, compiled at the same time as a program of its own with
        the same constants; "": there is none.
      beside_entries: that every call launches of them.
      tiling: the sizes that were chosen, a frozen dataclass of the family's own.
      constants: what the program is specialised by, as constexpr definitions in front of it.
      functions: CUDA text of the user's functions, behind them.
      launch: the numbers that the handler gets.
      workspaces: scratch arrays by name, in the order in which the handler takes them. It reads
        counts of blocks from their shapes, which stay true where jax.export leaves sizes symbolic.
      notes: for a reader, what the numbers do not say.
    """

    family: str
    arch: str
    target: str
    source: str
    entries: tuple[str, ...]
    tiling: Any
    constants: Mapping[str, Number]
    launch: Mapping[str, Number]
    workspaces: Mapping[str, jax.ShapeDtypeStruct]
    notes: tuple[str, ...] = ()
    functions: str = ""
    beside: str = ""
    beside_entries: tuple[str, ...] = ()

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA of the main entry."""
        return int(self.launch["shared_bytes"])

    @property
    def header(self) -> str:
        """The constexpr definitions and functions compiled in front of the source."""
        constants = "".join(_definition(name, value) for name, value in self.constants.items())
        return constants + self.functions

    @property
    def program(self) -> dict[str, str]:
        """What to compile."""
        return {"source": self.source, "header": self.header, "arch": self.arch}

    @property
    def programs(self) -> tuple[tuple[dict[str, str], tuple[str, ...]], ...]:
        """That and what to compile beside it, with the entry points that every call launches."""
        main = (self.program, self.entries)
        if not self.beside:
            return (main,)
        return main, ({**self.program, "source": self.beside}, self.beside_entries)

    @property
    def attributes(self) -> dict[str, Mapping[str, Any]]:
        """What the custom call gets beside the attributes of the call itself."""
        return {"program": {**self.program, "beside": self.beside}, "launch": self.launch}

    def __str__(self) -> str:
        sizes = dataclasses.asdict(self.tiling)
        lines = [self.source, "  " + ", ".join(f"{key} {value}" for key, value in sizes.items())]
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


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


def _definition(name: str, value: Number) -> str:
    if isinstance(value, bool):
        return f"constexpr bool {name} = {str(value).lower()};\n"
    if isinstance(value, float):
        return f"constexpr float {name} = {value!r}f;\n"
    return f"constexpr int {name} = {value};\n"
