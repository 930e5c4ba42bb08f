"""Partitioning: how XLA splits the primitives over the devices of a mesh.

Leading dims and heads are split, each the way the query is; sequences and features are whole on
every device. Attention is independent over what is split, so the forward and backward passes need
no collective, with three exceptions that the arithmetic asks for:

- Fewer kv heads than devices that share the query heads (K not divisible): each of these devices
  reads the kv heads its query heads need from whole keys and values, and the gradients of key and
  value are summed over them, one all-reduce each. The forward pass still needs none.
- The gradient of a bias, of an array that a score function reads, and of keys and values that the
  members of a vmap share, is summed over the devices along its dims of size 1.
- Arguments that arrive in another sharding are brought to this one first; a query, key or value
  that arrives split along its sequence is gathered whole on every device, with a warning.

Where all axes of a mesh are explicit, types say how operands are split, and the call is mapped over
the mesh by the same plan when it is lowered. Otherwise XLA asks for the plan when it partitions.

Inside of shard_map the operands are one device's own, and nothing here applies. Inside of one over
some axes of a mesh, XLA splits a call over the others for each group of devices by itself, and does
not say by which axes: there the query's split of leading dims and heads alone is followed, and
where that would need a sum over devices, or kv heads do not divide, the group computes the whole.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    use_abstract_mesh,
)

from jax_flash._backends import warn_once
from jax_flash._call import Call
from jax_flash._terms import is_capture, sum_dtype

_WHOLE = tuple("TSHVWUPMQRIJCDEAFGLXYZ")  # dims of `_call.dims` that are not split
NO_MESH = AbstractMesh((), ())
_SHARDY = "jax_use_shardy_partitioner"


def partitioned(
    run: Callable[..., tuple[Any, ...]], call: Call, devices: int
) -> Callable[..., tuple[Any, ...]]:
    """Splits `run(call, *operands)` as its operands' types say, or lets XLA where they do not.

    The program that it is a part of is lowered for so many devices.
    """
    # Not by static_argnums: custom_partitioning would hold on to tracers of the operands.
    wrapped = custom_partitioning(functools.partial(run, call))
    wrapped.def_partition(
        partition=functools.partial(_partition, run, call),
        sharding_rule=functools.partial(_sharding_rule, call),
    )

    def split(*operands):
        mesh = jax.typeof(operands[0]).sharding.mesh
        if mesh.manual_axes and not axes_of_xla(mesh):
            return run(call, *operands)
        if not mesh.empty and set(mesh.axis_types) == {AxisType.Explicit}:
            return _mapped(run, call, mesh, operands)
        if devices > 1 and not getattr(jax.config, _SHARDY):
            # Before jax 0.11 the process would be aborted: GSPMD asks for rules that are not there.
            raise NotImplementedError(
                f"{call.function} is compiled for {devices} devices without XLA's partitioner "
                f"Shardy; expected {_SHARDY}=True, JAX's default, or a mesh of "
                "explicit axes alone, or the call inside of a jax.shard_map over all axes"
            )
        results = wrapped(*operands)
        if AxisType.Explicit not in mesh.axis_types:
            return results
        # XLA leaves results as the plan has them; along explicit axes they are as their types say.
        return tuple(jax.sharding.reshard(x, jax.typeof(x).sharding) for x in results)

    return split


def axes_of_xla(mesh: AbstractMesh) -> list[str]:
    """Lists the axes that a shard_map leaves to XLA, but for those of one device."""
    return [x for x in mesh.axis_names if x not in mesh.manual_axes and mesh.shape[x] > 1]


def _mapped(run, call: Call, mesh: AbstractMesh, operands: Sequence[jax.Array]):
    """Maps a call over a mesh of explicit axes, where nothing is left for XLA to find.

    Unlike a partitioning by callback it can be exported, and kept in JAX's compilation cache.
    """
    avals = [jax.typeof(x) for x in operands]
    _, compute, results, shardings = _partition(run, call, mesh, avals, None)
    placed = [jax.sharding.reshard(x, s) for x, s in zip(operands, shardings, strict=True)]
    mapped = jax.shard_map(
        compute,
        mesh=mesh,
        in_specs=tuple(x.spec for x in shardings),
        out_specs=tuple(x.spec for x in results),
        check_vma=False,
    )
    return mapped(*placed)


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
    q, k = by_name["q"], by_name.get("k", by_name["q"])

    def factors(name, shape):
        leading = len(shape) - len(call.dims(name))
        for axis, size in enumerate(shape):
            letter = f"b{axis}" if axis < leading else call.dims(name)[axis - leading].lower()
            if letter == "k" and k[-2] == q[-2]:
                letter = "n"
            # A dim of size 1 may be broadcast: it corresponds to nothing. Nor do the elements of a
            # captured array, but to those of its gradient.
            alone = f"{name}{axis}" if size == 1 else letter
            yield f"{name.removeprefix('d')}e" if letter == "e" else alone

    mappings = [" ".join(factors(*item)) for item in zip(names, shapes, strict=True)]
    count = len(call.operands)
    rule = ", ".join(mappings[:count]) + " -> " + ", ".join(mappings[count:])
    letters = dict.fromkeys(" ".join(mappings).split())  # in order of first appearance
    whole = tuple(x for x in letters if x.upper() in _WHOLE or (is_capture(x) and x[-1] == "e"))
    return rule, {"need_replication_factors": whole}


def _partition(run, call, mesh: Mesh | AbstractMesh, operands, results):
    """Chooses the shardings of operands and results, and what each device computes."""
    del results
    infos = call.name_operands(operands)
    if mesh.empty:  # inside of a shard_map over other axes
        group, infos = _group(infos)
        plan = _Plan(group, call, infos, apart=True)
    else:
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
        for name in ("k", "v", "k_scale", "v_scale", "v_columns"):
            if name in local:
                axis = call.dims(name).index("K") - len(call.dims(name))
                local[name] = plan.local_kv_heads(local[name], axis)
        outputs = dict(zip(call.results, run(call, *local.values()), strict=True))
        # In this order on every process: these are collectives.
        for name in call.results:
            if name in ("dk", "dv", "dbias") or is_capture(name[1:]):
                outputs[name] = plan.sum_gradient(name, outputs[name], infos[name[1:]].shape)
        return tuple(outputs.values())

    return mesh, compute, result_shardings, operand_shardings


def _warn_of_split_sequences(mesh: Mesh | AbstractMesh, call: Call, infos: dict[str, Any]) -> None:
    for name, argument, letter in call.sequences:
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


def _group(infos: dict[str, Any]) -> tuple[AbstractMesh, dict[str, Any]]:
    """Finds how the query is split within a group of devices: a mesh of its own, with its specs.

    XLA names no axes there, but numbers the devices of the group and says which tile is whose.
    """
    q = infos["q"]
    tiles = q.sharding._to_xla_hlo_sharding(q.ndim)
    if tiles.is_replicated():
        return _placed(AbstractMesh((), ()), infos, PartitionSpec())
    sizes = dict(enumerate(tiles.tile_assignment_dimensions()))  # those that share a tile last
    devices = np.reshape(tiles.tile_assignment_devices(), list(sizes.values()))
    # A dim's distance is that from the device of a tile to that of the next along it.
    distances = {
        dim: int(np.take(devices, 1, dim).flat[0]) for dim, size in sizes.items() if size > 1
    }
    order = sorted(distances, key=lambda dim: -distances[dim])
    mesh = AbstractMesh(tuple(sizes[dim] for dim in order), tuple(f"dim{dim}" for dim in order))
    grid = np.arange(devices.size).reshape([sizes[dim] for dim in order])
    spec = PartitionSpec()
    if np.array_equal(grid.transpose(np.argsort(order)).ravel(), devices.ravel()):
        spec = PartitionSpec(*(f"dim{dim}" if dim in distances else None for dim in range(q.ndim)))
    return _placed(mesh, infos, spec)


def _placed(mesh: AbstractMesh, infos: dict[str, Any], spec: PartitionSpec) -> Any:
    """Says of a call's operands that the query is split over a mesh, and nothing else."""
    shardings = {
        name: NamedSharding(mesh, spec if name == "q" else PartitionSpec()) for name in infos
    }
    return mesh, {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shardings[name])
        for name, x in infos.items()
    }


class _Plan:
    """Which mesh axes split the leading dims and the heads of one call."""

    def __init__(
        self, mesh: Mesh | AbstractMesh, call: Call, infos: dict[str, Any], apart: bool = False
    ):
        """Chooses them; `apart`: so that no device needs to know of another."""
        self.mesh, self.call = mesh, call
        q, k = infos["q"].shape, infos.get("k", infos["q"]).shape
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
        if apart or (call.cached and self.kv_heads != self._devices(self.kv_split)):
            # Devices that share several kv heads would each copy those that they read.
            self.heads, self.kv_shared = self.kv_split, ()
        if apart and any(
            is_capture(name) or self._sharing(f"d{name}", x.shape)
            for name, x in infos.items()
            if f"d{name}" in call.results
        ):
            self.batch, self.heads, self.kv_split = [() for _ in self.batch], (), ()

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

    def _sharing(self, name: str, shape: Sequence[int]) -> list[str]:
        """Lists the mesh axes whose devices share an operand because a dim of it is 1."""
        axes = zip(self._full_axes(name, shape), self.axes(name, shape), strict=True)
        return [a for full, own in axes for a in full if a not in own]

    def sharding(self, name: str, shape: Sequence[int]) -> NamedSharding:
        spec = PartitionSpec(*(axes or None for axes in self.axes(name, shape)))
        return NamedSharding(self.mesh, spec)

    def local_kv_heads(self, x, axis: int):
        """Takes the kv heads that this device's query heads read, which lie along an axis."""
        if not self.kv_shared or x.shape[axis] == 1:
            return x
        return jnp.take(x, self._kv_heads_read(), axis=axis)

    def sum_gradient(self, name: str, x, shape: Sequence[int]):
        """Sums the gradient of k, v, bias or a captured array over the devices that share it.

        They share it along its dims of size 1, a captured array along the heads too; kv_shared
        share kv heads, and their gradients `[*B, S, heads read, H]` are added up to
        `[*B, S, K, H]`.
        """
        shared = self._sharing(name, shape)
        if is_capture(name[1:]):
            shared += self.heads
        total = x.astype(sum_dtype(x.dtype))
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
            return first // group + jnp.arange(1, dtype=jnp.int32)
        return (first + jnp.arange(local, dtype=jnp.int32)) // group


def _spec(info: Any) -> list[tuple[str, ...]]:
    """Reads the mesh axes that split each dim."""
    # An array of one device under an explicit mesh arrives with XLA's own sharding, without a spec.
    spec = tuple(getattr(info.sharding, "spec", ()))
    spec += (None,) * (len(info.shape) - len(spec))
    return [(x,) if isinstance(x, str) else tuple(x or ()) for x in spec]
