"""Owns how a step on arrays of scalars is text: what is read, moved, reduced or computed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jax_flash._gpu.emit.scalars import ScalarWriter, unknown
from jax_flash._gpu.emit.values import (
    LOW,
    MOST,
    Operand,
    Scalar,
    UnsupportedError,
    View,
    integer,
    of_number,
    only,
    single,
    strides_of,
)
from jax_flash._program import Aval, Step

_REDUCTIONS = {
    **{f"reduce_{name}": name for name in ("max", "min", "and", "or", "xor")},
    "reduce_sum": "add",
    "reduce_prod": "mul",
}


class Writer(ScalarWriter):
    """Lines of a function of scalars and arrays.

    Arguments:
      lengths: how many queries and keys there are, by place, where that is known.
    """

    def __init__(self, lengths: Mapping[str, int] | None = None) -> None:
        super().__init__()
        self.lengths = lengths or {}

    def elements(self, x: Operand) -> np.ndarray:
        """Reads the elements of a view."""
        if not isinstance(x, View):
            return x
        if math.prod(x.shape) > MOST:
            raise UnsupportedError(
                f"it computes with {math.prod(x.shape)} elements of an array at once"
            )
        array = np.empty(x.shape, object)
        in_pairs = x.even and x.dtype != "bool" and math.prod(x.shape) == 1
        if in_pairs and x.along is not None:
            place, dim, rest = x.along
            row = f"a{x.capture}" if rest.number == 0 else f"a{x.capture} + {rest.text}"
            text = f"element_along({row}, {place}, {self.lengths[place]}, {dim})"
            array[...] = single(self.value(x.dtype, text))
            return array
        for at in np.ndindex(x.shape):
            step = sum(i * stride for i, stride in zip(at, x.strides, strict=True))
            index = self.add(x.offset, integer(step), "+").text
            element = f"__ldg(a{x.capture} + {index})" if index != "0" else f"__ldg(a{x.capture})"
            array[at] = self.value(x.dtype, f"{element} != 0" if x.dtype == "bool" else element)
        return array

    def scalar(self, x: Operand) -> Scalar:
        return only(self.elements(x))

    def write(self, step: Step, operands: list[Operand]) -> list[Operand]:
        name, params = step.primitive.name, step.params
        self.primitive = name
        if name == "optimization_barrier":
            return operands
        aval = step.avals[0]
        if aval.size > MOST and not isinstance(operands[0], View):
            raise UnsupportedError(f"it computes with {aval.size} elements of an array at once")
        if name == "gather":
            return [self.gather(operands[0], operands[1], params, aval)]
        if name == "dynamic_slice":
            starts = [self.scalar(x) for x in operands[1:]]
            return [self.slice_at(operands[0], starts, params["slice_sizes"])]
        moved = _move(name, params, operands, aval)
        if moved is not None:
            return [moved]
        arrays = [self.elements(x) for x in operands]
        if name in ("broadcast_in_dim", "concatenate", "stack", "rev", "transpose", "slice"):
            return [_arrange(name, params, arrays, aval)]
        if name in _REDUCTIONS:
            return [self.reduce(_REDUCTIONS[name], arrays[0], params["axes"])]
        if any(x.shape not in ((), aval.shape) for x in arrays) or len(step.avals) > 1:
            raise unknown(name)
        result = np.empty(aval.shape, object)
        for at in np.ndindex(aval.shape):
            scalars = [only(x[at]) if x.shape else only(x) for x in arrays]
            result[at] = self.compute(name, params, scalars, aval.dtype)
        return [result]

    def slice_at(self, x: Operand, starts: Sequence[Scalar], sizes: Sequence[int]) -> Operand:
        """Takes elements from each start on, which is brought to where all of them exist."""
        if not isinstance(x, View):
            if any(start.number is None for start in starts):
                raise UnsupportedError("it indexes an array that it computes")
            at = [
                min(max(int(start.number), 0), dim - size)
                for start, dim, size in zip(starts, x.shape, sizes, strict=True)
            ]
            return x[tuple(slice(i, i + size) for i, size in zip(at, sizes, strict=True))]
        offset, along, even = x.offset, x.along, x.even
        for start, dim, size, stride in zip(starts, x.shape, sizes, x.strides, strict=True):
            place = start.text.removesuffix(".index")
            here = (along, stride, size, dim % 2) == (None, 1, 1, 0)
            here = (
                here and start.text == f"{place}.index" and dim >= self.lengths.get(place, dim + 1)
            )
            before = offset
            first = self.clamp(self.signed(start), 0, dim - size)
            step = self.multiply(first, integer(stride))
            offset = self.add(offset, step, "+")
            if here:
                along = place, dim, before
                continue
            known = first.number is not None and first.number % 2 == 0
            even = even and (stride % 2 == 0 or known)
            if along is not None:
                along = *along[:2], self.add(along[2], step, "+")
        return dataclasses.replace(x, offset=offset, shape=tuple(sizes), along=along, even=even)

    def gather(
        self, x: Operand, indices: Operand, params: Mapping[str, Any], aval: Aval
    ) -> Operand:
        dims, sizes = params["dimension_numbers"], params["slice_sizes"]
        indices = self.elements(indices)
        if dims.operand_batching_dims or dims.start_indices_batching_dims:
            raise UnsupportedError("it gathers with batching dims")
        rank = len(sizes)

        def at(row):
            starts = [integer(0)] * rank
            for dim, start in zip(dims.start_index_map, row, strict=True):
                starts[dim] = self.signed(start)
            part = self.slice_at(x, starts, sizes)
            kept = [i for i in range(rank) if i not in dims.collapsed_slice_dims]
            shape = tuple(sizes[i] for i in kept)
            if isinstance(part, View):
                strides = tuple(part.strides[i] for i in kept)
                part = dataclasses.replace(part, shape=shape, strides=strides)
            else:
                part = part.reshape(shape)
            if params["mode"].name != "FILL_OR_DROP":  # else indices are clamped
                return part
            inside = Scalar("true", "bool", number=True)
            for start, dim, size in zip(starts, x.shape, sizes, strict=True):
                for bound in (("ge", integer(0)), ("le", integer(dim - size))):
                    this = self.compare(bound[0], start, bound[1])
                    inside = self.compute("and", {}, [inside, this], "bool")
            if inside.number is True or (inside.number is not None and bool(inside.number)):
                return part
            fill = _fill(params["fill_value"], aval.dtype)
            part = self.elements(part)
            filled = np.empty(part.shape, object)
            for i in np.ndindex(part.shape):
                filled[i] = self.select(inside, [fill, only(part[i])], aval.dtype)
            return filled

        if indices.ndim == 1:
            return at(indices)
        if dims.offset_dims:
            raise UnsupportedError("it gathers several slices of an array")
        result = np.empty(indices.shape[:-1], object)
        for i in np.ndindex(result.shape):
            result[i] = self.scalar(at(indices[i]))
        return result

    def reduce(self, name: str, x: np.ndarray, axes: Sequence[int]) -> np.ndarray:
        kept = [i for i in range(x.ndim) if i not in axes]
        rows = np.transpose(x, (*kept, *axes)).reshape([x.shape[i] for i in kept] + [-1])
        result = np.empty(rows.shape[:-1], object)
        for at in np.ndindex(result.shape):
            first, *rest = rows[at]
            for other in rest:
                first = self.compute(name, {}, [first, other], first.dtype)
            result[at] = first
        return result


def _fill(value: Any, dtype: str) -> Scalar:
    """Returns what a gather beyond an array gives."""
    if value is None:
        none = {"float32": np.nan, "int32": LOW, "uint32": 2**32 - 1, "bool": True}
        value = none[dtype]
    return of_number(np.asarray(value).astype(dtype)[()])


def _move(
    name: str, params: Mapping[str, Any], operands: Sequence[Operand], aval: Aval
) -> Operand | None:
    """Moves the elements of one operand without reading them, or returns None."""
    x = operands[0] if operands else None
    if name in ("squeeze", "reshape", "expand_dims") and not isinstance(x, View):
        return None if x is None else x.reshape(aval.shape)
    if not isinstance(x, View):
        return None
    match name:
        case "squeeze":
            kept = [i for i in range(len(x.shape)) if i not in params["dimensions"]]
        case "transpose":
            kept = list(params["permutation"])
        case "reshape":
            sizes = [size for size in x.shape if size != 1]
            if x.strides == strides_of(x.shape):
                return dataclasses.replace(x, shape=aval.shape, strides=strides_of(aval.shape))
            if sizes != [size for size in aval.shape if size != 1]:
                return None
            strides = iter([s for size, s in zip(x.shape, x.strides, strict=True) if size != 1])
            by_dim = tuple(0 if size == 1 else next(strides) for size in aval.shape)
            return dataclasses.replace(x, shape=aval.shape, strides=by_dim)
        case "broadcast_in_dim":
            strides = [0] * len(aval.shape)
            for dim, size, stride in zip(
                params["broadcast_dimensions"], x.shape, x.strides, strict=True
            ):
                strides[dim] = 0 if size == 1 else stride
            return dataclasses.replace(x, shape=aval.shape, strides=tuple(strides))
        case _:
            return None
    shape = tuple(x.shape[i] for i in kept)
    return dataclasses.replace(x, shape=shape, strides=tuple(x.strides[i] for i in kept))


def _arrange(
    name: str, params: Mapping[str, Any], arrays: Sequence[np.ndarray], aval: Aval
) -> np.ndarray:
    x = arrays[0]
    match name:
        case "broadcast_in_dim":
            shape = [1] * len(aval.shape)
            for dim, size in zip(params["broadcast_dimensions"], x.shape, strict=True):
                shape[dim] = size
            return np.broadcast_to(x.reshape(shape), aval.shape)
        case "concatenate":
            return np.concatenate(arrays, params["dimension"])
        case "stack":
            return np.stack(arrays, params["axis"])
        case "rev":
            return np.flip(x, params["dimensions"])
        case "transpose":
            return np.transpose(x, params["permutation"])
        case _:
            steps = params["strides"] or [1] * x.ndim
            ends = zip(params["start_indices"], params["limit_indices"], steps, strict=True)
            return x[tuple(slice(*end) for end in ends)]
