"""Owns the tables of what kernels take: each parameter stands once, in a `Field`.

From a `Struct` of them come the text that NVRTC compiles in front of the kernels, the scratch
arrays of a call, and the lines by which the handler fills the struct (`plan.py`). A kernel's own
struct is in `sm90/forward_launch.py` and its neighbours. What those are made of is in
cuda/kernels/params.cuh, and NVRTC refuses a layout that differs from the one here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash._gpu.sizes import AnySize, evaluate


@dataclasses.dataclass(frozen=True)
class Scratch:
    """A scratch array, a further result of the custom call: its dtype and shape."""

    dtype: str  # as in DTYPES
    shape: tuple[AnySize, ...]


@dataclasses.dataclass(frozen=True)
class Map:
    """A tensor map of TMA: a dense array [batch, rows, heads, columns] and a box of 128 bytes.

    With `box_batches` a box has so many batches, and a head's rows follow each other in it.
    An array with an empty dim has a map of zeros, of which no kernel may load.
    """

    buffer: str
    dtype: str
    shape: tuple[AnySize, AnySize, AnySize, AnySize]
    box_rows: int
    box_heads: int = 1
    box_batches: int = 0  # 0: one, and a row's heads follow each other


@dataclasses.dataclass(frozen=True)
class Field:
    """A parameter of a kernel.

    Attributes:
      type: in C++.
      name: of the struct's member, and of the scratch array if it is one.
      value: what the handler writes there. None: 0 or null. A str: the address of an operand, a
        result or a scratch array, by name. A Size, an int or a float: itself. A Scratch: the
        address of a scratch array of the field's name. A Map, a Struct, a list of Structs or
        floats: those.
      meaning: for a reader of the kernel: the shape, the unit, when it is there.
    """

    type: str
    name: str
    value: Any = None
    meaning: str = ""


@dataclasses.dataclass(frozen=True)
class Struct:
    """A struct of a kernel's parameters, passed by value."""

    name: str
    fields: tuple[Field, ...]

    @functools.cached_property
    def bytes(self) -> int:
        last, offset = self._places[-1]
        return _round(offset + _size(last)[0], self.alignment)

    @functools.cached_property
    def alignment(self) -> int:
        return max(_size(field)[1] for field in self.fields)

    @property
    def text(self) -> str:
        """The struct in C++, and what makes NVRTC refuse another layout than this one."""
        lines = [f"struct {self.name} {{"]
        for field in self.fields:
            count = f"[{len(field.value)}]" if isinstance(field.value, list) else ""
            lines.append(f"  {field.type} {field.name}{count};")
        lines.append("};")
        nested = {x.name: x for field in self.fields for x in _structs(field.value)}
        for struct in (self, *nested.values()):
            # What is generated has the order of these fields, what is in params.cuh may not.
            told = struct._places[-1:] if struct is self else struct._places
            holds = [f"JF_OFFSET_OF({struct.name}, {x.name}) == {at}" for x, at in told]
            holds.append(f"sizeof({struct.name}) == {struct.bytes}")
            lines.append(f"static_assert({' && '.join(holds)});")
        return "\n".join(lines) + "\n"

    def leaves(self, start: int = 0, within: str = "") -> Iterator[tuple[int, str, Field]]:
        """Lists what the handler writes: offsets, names and fields that are no structs.

        A field of a struct within has both names, "mask_words". A scratch array is its name.
        """
        for field, offset in self._places:
            name = f"{within}{field.name}"
            values = field.value if isinstance(field.value, list) else [field.value]
            step = _size(field)[0] // len(values)
            for i, value in enumerate(values):
                at = start + offset + i * step
                if isinstance(value, Struct):
                    yield from value.leaves(at, f"{name}_")
                else:
                    own = name if isinstance(value, Scratch) else value
                    yield at, name, Field(field.type, field.name, own)

    def scratch(self, within: str = "") -> dict[str, Scratch]:
        """Lists the scratch arrays by name, in their order."""
        found = {}
        for field in self.fields:
            if isinstance(field.value, Scratch):
                found[f"{within}{field.name}"] = field.value
            elif isinstance(field.value, Struct):
                found |= field.value.scratch(f"{within}{field.name}_")
        return found

    @functools.cached_property
    def _places(self) -> tuple[tuple[Field, int], ...]:
        end, places = 0, []
        for field in self.fields:
            size, alignment = _size(field)
            end = _round(end, alignment)
            places.append((field, end))
            end += size
        return tuple(places)


# XLA's element types by the names that plans have for them, and what JAX calls them.
DTYPES: Mapping[str, Any] = {
    "f32": jnp.float32,
    "f16": jnp.float16,
    "bf16": jnp.bfloat16,
    "f8e4m3fn": jnp.float8_e4m3fn,
    "s8": jnp.int8,
    "s32": jnp.int32,
    "u32": jnp.uint32,
    "u16": jnp.uint16,
    "u8": jnp.uint8,
    "pred": jnp.bool_,
}
_NAMES = {jnp.dtype(dtype): name for name, dtype in DTYPES.items()}


def name_of(dtype: Any) -> str:
    """Returns the name that plans have for a dtype."""
    return _NAMES[jnp.dtype(dtype)]


def array_of(scratch: Scratch, dims: Mapping[str, Any]) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of a scratch array for given dims."""
    shape = tuple(evaluate(size, dims) for size in scratch.shape)
    return jax.ShapeDtypeStruct(shape, DTYPES[scratch.dtype])


def bits_of(value: float) -> int:
    """Returns the bits of a float32."""
    return int(np.float32(value).view(np.uint32))


_SIZES = {"int": 4, "unsigned": 4, "float": 4, "long long": 8}


def _size(field: Field) -> tuple[int, int]:
    """Returns the bytes of a field and its alignment."""
    count, value = 1, field.value
    if isinstance(value, list):
        count, value = len(value), value[0]
    if isinstance(value, Struct):
        return count * value.bytes, value.alignment
    if field.type == "TensorMap":
        return 128, 64
    size = 8 if field.type.endswith("*") else _SIZES[field.type]
    return count * size, size


def _round(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _structs(value: Any) -> list[Struct]:
    if isinstance(value, Struct):
        inner = [x for field in value.fields for x in _structs(field.value)]
        return [value, *inner]
    return _structs(value[0]) if isinstance(value, list) else []
