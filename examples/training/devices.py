"""Owns how a model, its optimizer and its rows are spread over several devices."""

import dataclasses
from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_flash import context_parallel


def make_mesh(text: str) -> jax.sharding.Mesh:
    """The mesh for "data=2,model=2,seq=2".

    Rows are spread over `data`, heads and widths over `model`, the bytes of each row over `seq`.
    """
    sizes = {"data": 1, "model": 1, "seq": 1}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in sizes or not size.isdecimal():
            raise SystemExit(f"--mesh takes data=N,model=M,seq=L, got {text!r}")
        sizes[name] = int(size)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * 3)


@dataclasses.dataclass(frozen=True)
class Split:
    """Rows whose bytes are split over `seq`, in an order that gives each device as much to do."""

    mesh: jax.sharding.Mesh

    def place(self, x: jax.Array) -> jax.Array:
        """Brings the bytes of rows [B, T], or what belongs to them, to their devices."""
        return self.keep(context_parallel.reorder(x, "zigzag", self.mesh.shape["seq"], axis=1))

    def keep(self, x: jax.Array) -> jax.Array:
        """Keeps [B, T, ...] where `place` brings it: else XLA may move it, and not parameters."""
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P("data", "seq")))

    def attend(self, query, key, value, *, query_segment_ids, **options):
        """Attends across devices; positions, of the rotary embedding, are those of the order."""
        spec, ids = P("data", "seq", "model"), P("data", "seq")

        @jax.shard_map(mesh=self.mesh, in_specs=(spec, spec, spec, ids), out_specs=spec)
        def on_each_device(query, key, value, segment_ids):
            return context_parallel.attention(
                query,
                key,
                value,
                axis_name="seq",
                order="zigzag",
                is_causal=options["is_causal"],
                query_segment_ids=segment_ids,
                key_value_segment_ids=segment_ids,
            )

        return on_each_device(query, key, value, query_segment_ids)


def shard(node: nnx.Module | nnx.Optimizer, mesh: jax.sharding.Mesh, fsdp: bool = False) -> None:
    """Spreads a model, or its optimizer, over the mesh; XLA lets the computation follow."""

    def place(path, array):
        return jax.device_put(array, NamedSharding(mesh, spec_of(path, array.shape, mesh, fsdp)))

    arrays = nnx.to_pure_dict(nnx.state(node))
    nnx.update(node, jax.tree_util.tree_map_with_path(place, arrays))


def spec_of(path: Any, shape: tuple[int, ...], mesh: jax.sharding.Mesh, fsdp: bool) -> P:
    """Where the array of a parameter, or of its optimizer, is split.

    With `fsdp` matrices are split over `data` and `seq` too. XLA gathers them before each use, and
    leaves each device its part of the gradients' sum.
    """
    split_axis = {"query": 1, "key": 1, "value": 1, "out": 0, "up": 1, "down": 0}
    heads = next((split_axis[part.key] for part in path if part.key in split_axis), None)
    spec: list[Any] = [None] * len(shape)
    # What does not divide, two key heads over four devices say, is whole on each of them.
    if heads is not None and mesh.shape["model"] > 1 and shape[heads] % mesh.shape["model"] == 0:
        spec[heads] = "model"
    devices = mesh.shape["data"] * mesh.shape["seq"]
    free = (i for i, size in enumerate(shape) if spec[i] is None and size % devices == 0)
    if fsdp and len(shape) > 1 and (axis := next(free, None)) is not None:
        spec[axis] = ("data", "seq")
    return P(*spec)
