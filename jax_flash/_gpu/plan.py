"""Owns `Plan`: how a GPU runs a pass, whole, and the text by which the handler is told.

The text names the buffers that the call gets and what is asked of them, the parameters of the
kernels (`fields.py`), the launches one after the other, and what to compile. Numbers that follow
from the dims are expressions over them (`sizes.py`), true where jax.export leaves sizes symbolic.
cuda/runtime/plan.cc reads it, cuda/runtime/run_plan.cc does it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax

from jax_flash._gpu.fields import Field, Map, Struct, array_of, bits_of
from jax_flash._gpu.sizes import AnySize, evaluate, text_of

Number = bool | int | float

VERSION = 1  # of the text, kPlanVersion in cuda/runtime/plan.h


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An operand or a result of the custom call.

    Attributes:
      name: as `Call` has it.
      dtypes: those it may have, names of fields.DTYPES.
      dims: a word each. "T" is the dim of that name: the first buffer that has it says how much,
        the others have as much. "64" is so much. "bias.T:T" is 1 or T, and named bias.T. "*" in
        front: the product of all leading dims.
    """

    name: str
    dtypes: tuple[str, ...]
    dims: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A launch.

    Attributes:
      entry: the entry point.
      grid: CTAs; none: it is not launched.
      threads: of a CTA.
      shared_bytes: dynamic shared memory of a CTA.
      beside: the entry point is of the program beside the main one.
      overlaps: it may start before the kernel ahead has ended, for which it waits.
      cluster: CTAs that see each other's shared memory, 1 to 8.
    """

    entry: str
    grid: AnySize
    threads: int
    shared_bytes: int = 0
    beside: bool = False
    overlaps: bool = False
    cluster: int = 1

    def lines(self, buffers: Mapping[str, int], offsets: Mapping[str, int]) -> list[str]:
        numbers = (self.beside, self.threads, self.shared_bytes, self.cluster, self.overlaps)
        words = " ".join(str(int(x)) for x in numbers)
        return [f"launch {self.entry} {words} {text_of(self.grid)}"]


@dataclasses.dataclass(frozen=True)
class Zero:
    """A memset: so many 32-bit words of a buffer, from its start."""

    buffer: str
    words: AnySize

    def lines(self, buffers: Mapping[str, int], offsets: Mapping[str, int]) -> list[str]:
        return [f"zero {buffers[self.buffer]} {text_of(self.words)}"]


@dataclasses.dataclass(frozen=True)
class Set:
    """Another value of an int among the parameters, for the launches that follow."""

    field: str
    value: AnySize

    def lines(self, buffers: Mapping[str, int], offsets: Mapping[str, int]) -> list[str]:
        return [f"int {offsets[self.field]} {text_of(self.value)}"]


Step = Kernel | Zero | Set


@dataclasses.dataclass(frozen=True)
class Launch:
    """What the handler does with the buffers of a call.

    Attributes:
      params: of all its kernels.
      steps: in order.
      names: numbers that others are made of, by name.
      checks: what has to hold, other than 0, and what is said where it does not.
      none: the call has no results where this is 0, and nothing is launched.
    """

    params: Struct
    steps: tuple[Step, ...]
    names: Mapping[str, AnySize]
    checks: tuple[tuple[AnySize, str], ...]
    none: AnySize


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one GPU runs one pass of a call: all that lowering, compiling and a reader need.

    Attributes:
      family: that made it.
      arch: what its programs are compiled for.
      target: the custom call, "jax_flash_cuda_forward".
      source: the file of the kernels, relative to cuda/kernels.
      beside: the file of further kernels, compiled at the same time as a program of its own with
        the same constants; "": there is none.
      tiling: the sizes that were chosen, a frozen dataclass of the family's own.
      constants: what the programs are specialised by, as constexpr definitions in front of them.
      functions: CUDA text of the user's functions, behind them.
      operands, results: of the custom call; scratch arrays follow the results.
      same: operands and results, by name, that are one array.
      launch: what is done with them.
      dims: of the call that it was made for, by name; symbolic ones are those of jax.export.
      notes: for a reader, what the numbers do not say.
    """

    family: str
    arch: str
    target: str
    source: str
    tiling: Any
    constants: Mapping[str, Number]
    operands: tuple[Buffer, ...]
    results: tuple[Buffer, ...]
    same: tuple[tuple[str, str], ...]
    launch: Launch
    dims: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    functions: str = ""
    beside: str = ""

    @property
    def entries(self) -> tuple[str, ...]:
        """The entry points that the call launches, of the main program."""
        return self._entries(beside=False)

    @property
    def beside_entries(self) -> tuple[str, ...]:
        return self._entries(beside=True)

    def _entries(self, *, beside: bool) -> tuple[str, ...]:
        kernels = (x for x in self.launch.steps if isinstance(x, Kernel))
        return tuple(dict.fromkeys(x.entry for x in kernels if x.beside == beside))

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA of the tiling's kernel."""
        return self.tiling.shared_bytes

    @functools.cached_property
    def header(self) -> str:
        """What is compiled in front of the source: constants, functions, the parameters' struct."""
        constants = "".join(_definition(name, value) for name, value in self.constants.items())
        return f'{constants}{self.functions}#include "params.cuh"\n{self.launch.params.text}'

    @property
    def program(self) -> dict[str, str]:
        """What to compile."""
        return {"source": self.source, "header": self.header, "arch": self.arch}

    @property
    def programs(self) -> tuple[tuple[dict[str, str], tuple[str, ...]], ...]:
        """That and what to compile beside it, with the entry points that the call launches."""
        main = (self.program, self.entries)
        if not self.beside:
            return (main,)
        return main, ({**self.program, "source": self.beside}, self.beside_entries)

    @functools.cached_property
    def workspaces(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The scratch arrays by name, in the order in which they follow the results."""
        scratch = self.launch.params.scratch()
        dims = dict(self.dims)
        for name, size in self.launch.names.items():
            if any(name in text_of(x).split() for own in scratch.values() for x in own.shape):
                dims[name] = evaluate(size, dims)
        return {name: array_of(own, dims) for name, own in scratch.items()}

    @functools.cached_property
    def text(self) -> str:
        """All that the handler is told."""
        launch, struct = self.launch, self.launch.params
        scratch = struct.scratch()
        names = [x.name for x in self.operands] + [f"={x.name}" for x in self.results]
        buffers = {name: i for i, name in enumerate([*names, *scratch])}
        for name in [x.name for x in self.results]:  # a field's buffer, by the name alone
            buffers.setdefault(name, buffers[f"={name}"])
        lines = [f"jax_flash plan {VERSION}"]
        for kind, rows in (("operand", self.operands), ("result", self.results)):
            lines += [f"{kind} {x.name} {'|'.join(x.dtypes)} {' '.join(x.dims)}" for x in rows]
        lines += [f"same {buffers[a]} {buffers[f'={b}']}" for a, b in self.same]
        lines += [f"let {name} {text_of(size)}" for name, size in launch.names.items()]
        lines += [f"none {text_of(launch.none)}"]
        lines += [f"check {text_of(holds)} : {text}" for holds, text in launch.checks]
        for name, own in scratch.items():
            lines.append(f"scratch {name} {own.dtype} {_list(own.shape)}")
        lines += [f"params {struct.bytes}"]
        offsets = {}
        for offset, name, field in struct.leaves():
            offsets[name] = offset
            lines += _write(offset, field, buffers)
        for step in launch.steps:
            lines += step.lines(buffers, offsets)
        lines += [
            f"program {source} {self.arch}" for source in (self.source, self.beside) if source
        ]
        return "\n".join([*lines, f"header\n{self.header}"])

    def __str__(self) -> str:
        sizes = dataclasses.asdict(self.tiling)
        lines = [self.source, "  " + ", ".join(f"{key} {value}" for key, value in sizes.items())]
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


def _write(offset: int, field: Field, buffers: Mapping[str, int]) -> list[str]:
    """Writes the line of a field that is not 0."""
    value = bits_of(field.value) if isinstance(field.value, float) else field.value
    if value in (None, 0):
        return []
    if isinstance(value, Map):
        box = f"{value.box_rows} {value.box_heads} {value.box_batches}"
        words = f"{buffers[value.buffer]} {value.dtype} {box}"
        return [f"map {offset} {words} {_list(value.shape)}"]
    if isinstance(value, str):
        return [f"pointer {offset} {buffers[value]}"]
    kind = "long" if field.type == "long long" else "int"
    return [f"{kind} {offset} {text_of(value)}"]


def _list(sizes: tuple[AnySize, ...]) -> str:
    return ", ".join(map(text_of, sizes))


def _definition(name: str, value: Number) -> str:
    if isinstance(value, bool):
        return f"constexpr bool {name} = {str(value).lower()};\n"
    if isinstance(value, float):
        return f"constexpr float {name} = {value!r}f;\n"
    return f"constexpr int {name} = {value};\n"
