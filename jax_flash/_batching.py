"""Batching: what vmap does to the primitives, and how its members share keys and values.

A mapped axis becomes the first leading dim. Operands that are the same for all members have size 1
there, as a bias has that is the same for all batch rows, and their gradients are sums over the
members. The kernels know no such keys and values: for them the dim joins the query heads that read
one kv head, which GQA has them load once. `run_kernel` does so on one device's shard, where it is
known which members are whole.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

from jax_flash._call import Call, dims
from jax_flash._terms import BROADCAST_HEADS, shares_rows

_OF_QUERIES = ("q", "out", "lse", "dout", "dlse")  # in full, always


def batch(
    primitive: Primitive,
    names: Sequence[str],
    operands: Sequence[Any],
    dims: Sequence[int | None],
    own: Sequence[str] = (),
    **params: Any,
) -> tuple[Sequence[Any], list[int]]:
    """Binds a primitive to the operands of all members.

    Arguments:
      primitive: what to bind.
      names: what each operand is; a tangent goes by the name of what it moves.
      operands: the operands.
      dims: which dim of each operand counts the members; None: it is the same for all.
      own: names that every member needs for itself, because each has its own gradient to them.
      params: those of the primitive.

    Returns: the results, and that their first dims count the members.
    """
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    full = {*_OF_QUERIES, *own}
    full.update(name for name, dim in zip(names, dims, strict=True) if dim is not None)
    if full & {"k", "v", "key_scale", "value_scale"}:  # a cache goes with its scales
        full |= {"k", "v"}

    def lead(name, x, dim):
        if dim is not None:
            return jnp.moveaxis(x, dim, 0)
        return jnp.broadcast_to(x[None], (size if name in full else 1, *x.shape))

    operands = [lead(*item) for item in zip(names, operands, dims, strict=True)]
    results = primitive.bind(*operands, **params)
    return results, [0] * len(results)


def run_kernel(kernel: Callable[..., Any], call: Call, *operands: jax.Array) -> tuple[Any, ...]:
    """Runs a native kernel on operands of which members may share some.

    Keys and values are shared without a copy, unless

    - lengths, segment ids or positions differ among the members: a kernel has them for a batch row,
      or
    - a bias or mask would have to be copied for it, to more bytes than theirs: one of several heads
      that is the same for all members, or one of a single head that is not.

    Arguments:
      kernel: `kernel(call.whole, *operands)` returns its results of operands without shared keys.
      call: which pass of which call.
      operands: call.operands.

    Returns: call.results.
    """
    named = call.name_operands(operands)
    members = _Members.of(named)
    joined = [members.join(name, x) for name, x in named.items()]
    whole = call.whole
    shapes = whole.result_shapes(named)
    results = zip(whole.results, kernel(whole, *joined), shapes, strict=True)
    return tuple(members.part(*item) for item in results if item[0] in call.results)


@dataclasses.dataclass(frozen=True)
class _Members:
    """The leading dims of one call, and which of them join the heads.

    Query head n of member m becomes head n * M + m, which reads the kv head that n read.
    """

    leading: tuple[int, ...]
    axes: tuple[int, ...]
    heads: int

    @classmethod
    def of(cls, named: dict[str, Any]) -> "_Members":
        q, k = named["q"], named["k"]
        leading = q.shape[:-3]
        shared = [
            axis
            for axis, size in enumerate(leading)
            if k.shape[axis] == 1 and size != 1 and size != 0
        ]
        axes = tuple(axis for axis in shared if _joins(named, axis))
        return cls(leading=leading, axes=axes, heads=q.shape[-2])

    def join(self, name: str, x: jax.Array) -> jax.Array:
        """Brings an operand to the form without shared keys."""
        shape = list(x.shape)
        for axis, size in enumerate(self.leading):
            if axis not in self.axes and not shares_rows(name):
                shape[axis] = size
        if not self.axes or self._alike(name, x):
            return jnp.squeeze(jnp.broadcast_to(x, shape), self.axes)
        for axis in self.axes:
            shape[axis] = self.leading[axis]
        heads = self._heads_axis(name)
        shape[heads] = self.heads
        x = jnp.transpose(jnp.broadcast_to(x, shape), self._order(name))
        before, after = heads - len(self.axes), heads + 1
        return x.reshape(*x.shape[:before], math.prod(x.shape[before:after]), *x.shape[after:])

    def part(self, name: str, x: jax.Array, shape: Sequence[int]) -> jax.Array:
        """Brings a result back to a shape; a gradient is summed along the dims that are 1 there."""
        heads = self._heads_axis(name) - len(self.axes)
        if "N" not in dims(name) or x.shape[heads] == 1:
            x = jnp.expand_dims(x, self.axes)
        elif self.axes:
            members = [self.leading[axis] for axis in self.axes]
            x = x.reshape(*x.shape[:heads], self.heads, *members, *x.shape[heads + 1 :])
            x = jnp.transpose(x, np.argsort(self._order(name)).tolist())
        sizes = zip(shape, x.shape, strict=True)
        missing = tuple(axis for axis, (own, full) in enumerate(sizes) if own == 1 and full != 1)
        if not missing:
            return x
        return jnp.sum(x, missing, dtype=jnp.float32, keepdims=True).astype(x.dtype)

    def _alike(self, name: str, x: jax.Array) -> bool:
        """Tells whether an operand is one for all members as the kernels read it."""
        if "N" not in dims(name):
            return True
        heads = x.shape[self._heads_axis(name)]
        members = [x.shape[axis] for axis in self.axes]
        return name in BROADCAST_HEADS and all(size == 1 for size in (heads, *members))

    def _heads_axis(self, name: str) -> int:
        return len(self.leading) + dims(name).find("N")

    def _order(self, name: str) -> list[int]:
        """Lists all dims, those of the members behind that of the heads."""
        rank, heads = len(self.leading) + len(dims(name)), self._heads_axis(name)
        rest = [axis for axis in range(rank) if axis not in self.axes]
        after = rest.index(heads) + 1
        return [*rest[:after], *self.axes, *rest[after:]]


def _joins(named: dict[str, Any], axis: int) -> bool:
    """Tells whether the members along one leading dim can and should join the heads."""
    members, heads = named["q"].shape[axis], named["q"].shape[-2]
    leading = named["q"].ndim - 3
    copied = 0  # bytes of bias and mask
    for name, x in named.items():
        if name in ("k", "v"):
            continue
        if "N" not in dims(name):
            if x.shape[axis] != 1:
                return False
        elif name in BROADCAST_HEADS:
            alike, broadcast = x.shape[axis] == 1, x.shape[leading + dims(name).find("N")] == 1
            if alike != broadcast:
                copied += _bytes(x.shape, x.dtype) * _known(members if alike else heads)
    spared = sum(_bytes(named[name].shape, named[name].dtype) for name in ("k", "v"))
    return copied <= spared * _known(members)


def _bytes(shape: Sequence[Any], dtype: Any) -> int:
    return math.prod(map(_known, shape)) * np.dtype(dtype).itemsize


def _known(size: Any) -> int:
    """Returns a size, or 1 in its place where jax.export left it symbolic."""
    return size if isinstance(size, int) else 1
