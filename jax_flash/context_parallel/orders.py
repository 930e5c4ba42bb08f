"""Orders: which tokens of a sequence stand on which device, and where.

A sequence is split over `shards` devices, the same number of tokens on each. In order

    contiguous   device r holds the r-th stretch
    zigzag       of 2 x shards chunks device r holds the r-th from the front and the r-th from the
                 back, so that under a causal mask all have as much to do
    striped      device r holds the tokens r, r + shards, r + 2 shards, ...

Within a device tokens stand by rising index in each order: what lengths of the whole leave of a
device is a prefix, and a device that holds the tokens of several sorts them by `restore`.

Zigzag: as in ring-flash-attention and Llama 3 (arXiv:2407.21783, 3.3.2); striped: Brandon et al.,
Striped Attention (arXiv:2311.09431).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jax_flash import _validate
from jax_flash._ops.arithmetic import with_auto_axes

ORDERS = ("contiguous", "zigzag", "striped")


def reorder(x: ArrayLike, order: str, shards: int, axis: int) -> jax.Array:
    """Brings a sequence into an order: split over devices, it then stands as the order says.

    Arguments:
      x: any array of which one axis is the sequence: tokens, labels, positions, segment ids.
      order: "contiguous", which leaves it as it is, "zigzag" or "striped".
      shards: devices that the sequence is split over.
      axis: of the sequence; shards divides its size, for "zigzag" 2 * shards does.

    Returns: x with that axis permuted; `restore` brings it back.

    Raises: ValueError: another order; an axis that does not divide, with both numbers.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_flash.context_parallel import reorder
      >>> reorder(jnp.arange(8), "zigzag", 2, axis=0).tolist()
      [0, 1, 6, 7, 2, 3, 4, 5]
      >>> reorder(jnp.arange(8), "striped", 2, axis=0).tolist()
      [0, 2, 4, 6, 1, 3, 5, 7]
    """
    return _permuted("reorder", x, order, shards, axis, back=False)


def restore(x: ArrayLike, order: str, shards: int, axis: int) -> jax.Array:
    """Brings a sequence that `reorder` brought into an order back, as outputs of a model are.

    Arguments, returns and errors are those of `reorder`.
    """
    return _permuted("restore", x, order, shards, axis, back=True)


def _permuted(name: str, x: Any, order: str, shards: int, axis: int, back: bool) -> jax.Array:
    x = _validate.array("x", x)
    check(order)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"axis of {name} is {axis}; expected one of x's {x.ndim} (shape {x.shape})"
        )
    axis %= x.ndim
    size = x.shape[axis]
    check_divides(order, shards, f"axis {axis} of x", size, x.shape)
    if order == "contiguous" or shards == 1:
        return x
    # On a mesh with explicit axes it stays split as it is.
    own = jax.typeof(x).sharding
    return with_auto_axes(_permutation(order, shards, axis, back), own.mesh, own.spec)(x)


@functools.lru_cache(maxsize=256)  # one function is compiled once
def _permutation(order: str, shards: int, axis: int, back: bool) -> Callable[..., jax.Array]:
    return functools.partial(_permute, order, shards, axis, back)


def _permute(order: str, shards: int, axis: int, back: bool, x: jax.Array) -> jax.Array:
    size = x.shape[axis]
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    if order == "striped":
        split = (shards, size // shards) if back else (size // shards, shards)
        return jnp.swapaxes(x.reshape(*before, *split, *after), axis, axis + 1).reshape(x.shape)
    chunks = np.arange(2 * shards).reshape(2, shards)
    moved = np.stack([chunks[0], chunks[1, ::-1]], axis=1).ravel()  # 0, 2n - 1, 1, 2n - 2, ...
    moved = np.argsort(moved) if back else moved
    pieces = x.reshape(*before, 2 * shards, size // (2 * shards), *after)
    return jnp.take(pieces, moved, axis=axis, unique_indices=True).reshape(x.shape)


def check(order: Any) -> None:
    if order not in ORDERS:
        raise ValueError(f"order is {order!r}; expected one of {', '.join(map(repr, ORDERS))}")


def check_divides(order: str, shards: int, what: str, size: int, shape: Any) -> None:
    """Raises where a sequence cannot be split, with both numbers."""
    parts = 2 * shards if order == "zigzag" else shards
    if size % parts:
        what_for = f"two chunks for each of {shards} devices" if parts > shards else "the devices"
        raise ValueError(
            f"{what} is {size} (shape {tuple(shape)}); expected a multiple of {parts}, {what_for}: "
            "pad it, and hide the padding by lengths or segment ids"
        )


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where tokens stand: an order over shards x block devices, of which `block` stand together.

    Each device has the tokens of all that stand with it, sorted: a shard.
    """

    order: str
    shards: int
    block: int = 1

    def place(self, rank: Any, length: int) -> jax.Array:
        """Computes where a shard of `length` tokens stands, as `index` reads it: int32 `[3]`."""
        start, half, jump = rank * length, length, 0
        if self.order == "striped":
            start = rank * self.block
        elif self.order == "zigzag":
            half = length // 2
            start = rank * half
            jump = (2 * self.shards - 2 - 2 * rank) * half  # from the front chunk to the back
        return jnp.stack([jnp.asarray(x, jnp.int32) for x in (start, half, jump)])

    def index(self, place: jax.Array, j: Any) -> Any:
        """Computes the index in the whole sequence of the j-th token of a shard at `place`."""
        match self.order:
            case "striped":
                if self.block == 1:
                    return place[0] + j * self.shards
                step = self.shards * self.block
                return place[0] + j // self.block * step + j % self.block
            case "zigzag":
                return place[0] + j + jnp.where(j < place[1], 0, place[2])
            case _:
                return place[0] + j

    def indices(self, rank: Any, length: int) -> jax.Array:
        """Computes the indices in the whole sequence of a shard's tokens: int32 `[length]`."""
        return self.index(self.place(rank, length), jnp.arange(length, dtype=jnp.int32))

    def part(self, x: jax.Array, rank: Any, axis: int) -> jax.Array:
        """Takes a shard's part of an axis on which the whole sequence, or its blocks, stand.

        In order "striped" there is none.
        """
        if self.shards == 1:
            return x
        parts = 2 * self.shards if self.order == "zigzag" else self.shards
        size, axis = x.shape[axis] // parts, axis % x.ndim
        chunks = (rank, parts - 1 - rank) if self.order == "zigzag" else (rank,)
        taken = [lax.dynamic_slice_in_dim(x, i * size, size, axis) for i in chunks]
        return taken[0] if len(taken) == 1 else jnp.concatenate(taken, axis=axis)

    def sort(self, x: jax.Array, axis: int) -> jax.Array:
        """Sorts an axis on which the tokens of all shards stand end to end by their index."""
        if self.order != "striped" or self.block == 1:
            return restore(x, self.order, self.shards, axis)
        axis %= x.ndim
        rows = x.shape[axis] // (self.shards * self.block)
        split = x.reshape(*x.shape[:axis], self.shards, rows, self.block, *x.shape[axis + 1 :])
        return jnp.swapaxes(split, axis, axis + 1).reshape(x.shape)

    def runs(self, rank: Any, length: int) -> list[tuple[Any, Any]]:
        """Lists the first and last index of each half of a zigzag shard, or of the one whole."""
        match self.order:
            case "striped":
                step = self.shards * self.block
                rows = length // self.block - 1
                return [(rank * self.block, (rank + 1) * self.block - 1 + rows * step)]
            case "zigzag":
                half = length // 2
                back = 2 * self.shards - 1 - rank
                return [(i * half, i * half + half - 1) for i in (rank, back)]
            case _:
                return [(rank * length, rank * length + length - 1)]

    def count(self, lengths: Any, rank: Any, length: int) -> jax.Array:
        """Computes how many of a shard's tokens lie within lengths of the whole, for each."""
        indices = self.indices(rank, length).reshape(*(1,) * lengths.ndim, -1)
        within = indices < lengths[..., None]
        return jnp.sum(within, axis=-1, dtype=jnp.int32)
