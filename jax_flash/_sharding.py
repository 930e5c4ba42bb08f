"""Partitioning: how XLA splits the primitives over the devices of a mesh.

Leading dims and heads are split, each the way the query is; sequences and features are whole on
every device. Attention is independent over what is split, so the forward and backward passes need
no collective, with three exceptions that the arithmetic asks for:

- Fewer kv heads than devices that share the query heads (K not divisible): each of these devices
  reads the kv heads its query heads need from whole keys and values, and the gradients of key and
  value are summed over them, one all-reduce each. The forward pass still needs none.
- The gradient of a bias, and of keys and values that the members of a vmap share, is summed over
  the devices along its dims of size 1.
- Arguments that arrive in another sharding are brought to this one first; a query, key or value
  that arrives split along its sequence is gathered whole on every device, with a warning.

Inside of shard_map the operands are one device's own, and nothing here applies.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from jax_flash._backends import warn_once
from jax_flash._call import Call

_WHOLE = tuple("TSHVWPMIJCDE")  # dims of `_call.dims` that are not split
NO_MESH = AbstractMesh((), ())


def partitioned(run: Callable[..., tuple[Any, ...]], call: Call) -> Callable[..., tuple[Any, ...]]:
    """Lets XLA split `run(call, *operands)`."""
    # Not by static_argnums: custom_partitioning would hold on to tracers of the operands.
    wrapped = custom_partitioning(functools.partial(run, call))
    wrapped.def_partition(
        partition=functools.partial(_partition, run, call),
        sharding_rule=functools.partial(_sharding_rule, call),
    )
    return wrapped


def x64_of(operands: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """Keeps 64 bits of operands that have them while a function of them is traced.

    Before jax 0.11 XLA partitions in a thread of its own, where `with jax.enable_x64(True)` around
    the caller's program does not hold.
    """
    if any(x.dtype.itemsize == 8 for x in operands):
        return jax.enable_x64(True)
    return contextlib.nullcontext()


def _sharding_rule(call, mesh, operand_types, result_types) -> tuple[str, dict[str, Any]]:
    """Describes which dims correspond, for Shardy to propagate shardings along them."""
    del mesh
    shapes = [tuple(x.shape) for x in (*operand_types, *result_types)]
    names = (*call.operands, *call.results)
    by_name = dict(zip(names, shapes, strict=True))
    q, k = by_name["q"], by_name["k"]

    def factors(name, shape):
        leading = len(shape) - len(call.dims(name))
        for axis, size in enumerate(shape):
            letter = f"b{axis}" if axis < leading else call.dims(name)[axis - leading].lower()
            if letter == "k" and k[-2] == q[-2]:
                letter = "n"
            # A dim of size 1 may be broadcast: it corresponds to nothing.
            yield f"{name}{axis}" if size == 1 else letter

    mappings = [" ".join(factors(*item)) for item in zip(names, shapes, strict=True)]
    count = len(call.operands)
    rule = ", ".join(mappings[:count]) + " -> " + ", ".join(mappings[count:])
    letters = dict.fromkeys(" ".join(mappings).split())  # in order of first appearance
    whole = tuple(letter for letter in letters if letter.upper() in _WHOLE)
    return rule, {"need_replication_factors": whole}


def _partition(run, call, mesh: Mesh, operands, results):
    """Chooses the shardings of operands and results, and what each device computes."""
    del results
    infos = call.name_operands(operands)
    _warn_of_split_sequences(mesh, call, infos)
    plan = _Plan(mesh, call, infos)
    operand_shardings = tuple(plan.sharding(name, infos[name].shape) for name in call.operands)
    result_shardings = tuple(
        plan.sharding(name, shape)
        for name, shape in zip(call.results, call.result_shapes(infos), strict=True)
    )

    def compute(*local):
        # These are one device's arrays: a mesh with explicit axes around them does not apply.
        with use_abstract_mesh(NO_MESH), x64_of(local):
            return compute_local(*local)

    def compute_local(*local):
        local = call.name_operands(local)
        for name in ("k", "v"):
            if name in local:
                local[name] = plan.local_kv_heads(local[name])
        outputs = dict(zip(call.results, run(call, *local.values()), strict=True))
        # In this order on every process: these are collectives.
        for name in call.results:
            if name in ("dk", "dv", "dbias"):
                outputs[name] = plan.sum_gradient(name, outputs[name], infos[name[1:]].shape)
        return tuple(outputs.values())

    return mesh, compute, result_shardings, operand_shardings


def _warn_of_split_sequences(mesh: Mesh, call: Call, infos: dict[str, Any]) -> None:
    for name, argument, letter in (("q", "query", "T"), ("k", "key", "S"), ("v", "value", "S")):
        if name not in infos:
            continue
        axes = tuple(axis for axis in _spec(infos[name])[-3] if mesh.shape[axis] > 1)
        if axes:
            warn_once(
                f"{argument} of {call.function} arrives with {letter} split over mesh axes {axes}: "
                "it is gathered, so every device along them holds whole sequences and computes the "
                "same. Split a leading dim or the heads over these axes instead, for example by "
                "jax.lax.with_sharding_constraint on query, key and value before the call"
            )


class _Plan:
    """Which mesh axes split the leading dims and the heads of one call."""

    def __init__(self, mesh: Mesh, call: Call, infos: dict[str, Any]):
        self.mesh, self.call = mesh, call
        q, k = infos["q"].shape, infos["k"].shape
        self.q_heads, self.kv_heads = q[-2], k[-2]
        # The query decides; a dim that it leaves whole follows the keys.
        specs = [
            (_spec(infos[name]), len(infos[name].shape) - len(call.dims(name)))
            for name in ("q", "k", "v")
            if name in infos
        ]
        used: set[str] = set()

        def axes_of(axis: int, size: int, others: bool) -> tuple[str, ...]:
            for spec, leading in specs if others else specs[:1]:
                if axis >= leading:  # pages have fewer leading dims
                    continue
                axes = tuple(a for a in spec[axis] if a not in used)
                if axes and size % self._devices(axes) == 0:
                    used.update(axes)
                    return axes
            return ()

        # What all batch rows write to, every device must write alike.
        written = [
            infos[name].shape[: -len(call.dims(name))] for name in call.results if name in infos
        ]
        self.batch = [
            axes_of(axis, q[axis], others=True)
            if all(x[axis : axis + 1] == (q[axis],) for x in written)
            else ()
            for axis in range(len(q) - 3)
        ]
        self.heads = axes_of(-2, q[-2], others=False) or axes_of(
            -2, math.gcd(q[-2], k[-2]), others=True
        )
        # The kv heads are split by as many of the axes as divide them.
        count = len(self.heads)
        while self.kv_heads % self._devices(self.heads[:count]):
            count -= 1
        self.kv_split, self.kv_shared = self.heads[:count], self.heads[count:]
        if call.cached and self.kv_heads != self._devices(self.kv_split):
            # Devices that share several kv heads would each copy those that they read.
            self.heads, self.kv_shared = self.kv_split, ()

    def _devices(self, axes: Sequence[str]) -> int:
        return math.prod(self.mesh.shape[a] for a in axes)

    def axes(self, name: str, shape: Sequence[int]) -> list[tuple[str, ...]]:
        """Lists the mesh axes that split each dim of an operand or result."""
        # A dim of size 1 is either broadcast, or whole on every device anyway.
        full = self._full_axes(name, shape)
        return [() if n == 1 else a for n, a in zip(shape, full, strict=True)]

    def _full_axes(self, name: str, shape: Sequence[int]) -> list[tuple[str, ...]]:
        leading = len(shape) - len(self.call.dims(name))
        split = {"N": self.heads, "K": self.kv_split}
        rest = (split.get(letter, ()) for letter in self.call.dims(name))
        return [*self.batch[:leading], *rest]

    def sharding(self, name: str, shape: Sequence[int]) -> NamedSharding:
        spec = PartitionSpec(*(axes or None for axes in self.axes(name, shape)))
        return NamedSharding(self.mesh, spec)

    def local_kv_heads(self, x):
        """Takes the kv heads that this device's query heads read from `[*B, S, K, H]`."""
        if not self.kv_shared or x.shape[-2] == 1:
            return x
        return jnp.take(x, self._kv_heads_read(), axis=-2)

    def sum_gradient(self, name: str, x, shape: Sequence[int]):
        """Sums the gradient of k, v or bias over the devices that share it.

        They share it along its dims of size 1; kv_shared share kv heads, and their gradients
        `[*B, S, heads read, H]` are added up to `[*B, S, K, H]`.
        """
        axes = zip(self._full_axes(name, shape), self.axes(name, shape), strict=True)
        shared = [a for full, own in axes for a in full if a not in own]
        total = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        if self.kv_shared and name in ("dk", "dv"):
            kv_heads = self.kv_heads // self._devices(self.kv_split)
            whole = jnp.zeros((*x.shape[:-2], kv_heads, x.shape[-1]), total.dtype)
            total = whole.at[..., self._kv_heads_read(), :].add(total)
            shared += self.kv_shared
        return lax.psum(total, tuple(shared)).astype(x.dtype) if shared else x

    def _kv_heads_read(self):
        """Computes which kv heads this device reads, counted in its share of the split heads."""
        group = self.q_heads // self.kv_heads
        local = self.q_heads // self._devices(self.heads)
        first = lax.axis_index(self.kv_shared) * local
        if group % local == 0:  # all of its query heads read one kv head
            return first // group + jnp.arange(1)
        return (first + jnp.arange(local)) // group


def _spec(info: Any) -> list[tuple[str, ...]]:
    """Reads the mesh axes that split each dim."""
    # An array of one device under an explicit mesh arrives with XLA's own sharding, without a spec.
    spec = tuple(getattr(info.sharding, "spec", ()))
    spec += (None,) * (len(info.shape) - len(spec))
    return [(x,) if isinstance(x, str) else tuple(x or ()) for x in spec]
