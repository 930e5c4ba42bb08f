"""flash_quantise: an array of 16 bits -> float8 values, their scales, what kernels take besides.

It goes ahead of flash_float8, an array at a time: a vmap that shares keys quantises them once. It
has no derivative; `float8.py` says what passes through it.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jax_flash import _float8
from jax_flash._call import Call
from jax_flash._ops import primitive
from jax_flash._problem import Problem, Shapes

# Letters of dims, as in _call.py.
_DIMS = {"q": "TNH", "values": "TNH", "scale": "FN", "amax": "FN", "columns": "NHY"}
_DTYPES = {"values": _float8.DTYPE, "scale": "float32", "amax": "float32", "columns": "uint8"}


@dataclasses.dataclass(frozen=True)
class Quantise(Call):
    """One flash_quantise, operands aside.

    Attributes:
      argument: what the array is to the user: "query", "key" or "value".
      turn: it is multiplied by a Hadamard matrix first.
      columns: values come as columns too.
      amax: so do the largest finite magnitudes of blocks before the turn.
    """

    argument: str
    turn: bool
    columns: bool
    amax: bool

    target = "quantise"

    @property
    def prepares(self) -> bool:
        return True

    @property
    def scaled(self) -> int:
        """Positions of a scale of the result: as many as kernels of float8 take them of."""
        return 64 if self.argument == "query" else _float8.BLOCK

    @property
    def operands(self) -> tuple[str, ...]:
        return ("q",)

    @property
    def results(self) -> tuple[str, ...]:
        extra = {"amax": self.amax, "columns": self.columns}
        return ("values", "scale", *(name for name, made in extra.items() if made))

    @property
    def sequences(self) -> tuple[tuple[str, str, str], ...]:
        return (("q", self.argument, "T" if self.argument == "query" else "S"),)

    def dims(self, name: str) -> str:
        return _DIMS[name]

    def shapes(self, operands: Mapping[str, Any]) -> Shapes:
        return Shapes.of(*[operands["q"]] * 3)

    def result_shapes(self, operands: Mapping[str, Any]) -> list[tuple[int, ...]]:
        *batch, length, heads, dim = operands["q"].shape
        blocks = -(-length // _float8.BLOCK)
        made = {
            "values": (*batch, length, heads, dim),
            "scale": (*batch, -(-length // self.scaled), heads),
            "amax": (*batch, blocks, heads),
            "columns": (*batch, heads, dim, blocks * _float8.BLOCK),
        }
        return [made[name] for name in self.results]

    def result_avals(self, operands: Mapping[str, Any]) -> tuple[Any, ...]:
        """Returns the abstract values of the results, which are split as the operand is."""
        q = operands["q"]
        spec = tuple(q.sharding.spec)
        *batch, _, heads, _ = spec + (None,) * (q.ndim - len(spec))

        def aval(name, shape):
            split = (heads if letter == "N" else None for letter in self.dims(name))
            sharding = NamedSharding(q.sharding.mesh, PartitionSpec(*batch, *split))
            dtype = jnp.dtype(_DTYPES[name])
            return q.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)

        return tuple(map(aval, self.results, self.result_shapes(operands)))

    # ---- lowering --------------------------------------------------------------------------------

    def blockwise(self, *operands: jax.Array) -> tuple[jax.Array, ...]:
        (x,) = operands
        values, scale = _float8.quantise(_float8.turn(x) if self.turn else x)
        made = [values, _float8.in_full(scale, x, self.scaled)]
        if self.amax:
            made.append(_float8.largest_of_blocks(x))
        if self.columns:
            made.append(_float8.columns(values))
        return tuple(made)

    def run_kernel(
        self, kernel: Callable[..., tuple[jax.Array, ...]], *operands: jax.Array
    ) -> tuple[jax.Array, ...]:
        return kernel(self, *operands)


flash_quantise_p = primitive.define("flash_quantise")


def quantise(
    argument: str, x: jax.Array, backend: str | None, *, with_amax: bool
) -> dict[str, jax.Array]:
    """Binds flash_quantise to a query, key or value `[*B, T, heads, H]`.

    Arguments:
      argument: which of them it is; of a value there are columns.
      backend: the user's for the call that follows. Where it has no kernel for this, "xla" runs it.
      with_amax: whether largest magnitudes are wanted.

    Returns: the results by name.
    """
    call = Quantise(
        Problem(dtype=x.dtype.name, scale=1.0),
        backend,
        argument=argument,
        turn=argument != "value" and _float8.turns(x.shape[-1]),
        columns=argument == "value",
        amax=with_amax,
    )
    return dict(zip(call.results, flash_quantise_p.bind(x, call=call), strict=True))
