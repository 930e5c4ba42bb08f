"""What a pass of a call is, as data: its operands and results by name, their dims and avals.

A pass is a subclass of `Call` in `_ops/`; backends, families of kernels, batching and partitioning
know no more of it than stands here.
"""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jax_flash._problem import Problem
from jax_flash._terms import TERMS

# Dims after the leading ones. Capitals name the sizes: T queries, S keys, N query heads, K kv
# heads, H and V features, W words.
_DIMS = {
    "q": "TNH",
    "k": "SKH",
    "v": "SKV",
    "out": "TNV",
    "lse": "NT",
    **{name: term.dims for name, term in TERMS.items()},
}


def dims(name: str) -> str:
    """Returns the letters of an operand's or result's dims after the leading ones."""
    return _DIMS[name] if name in _DIMS else _DIMS[name.removeprefix("d")]


@dataclasses.dataclass(frozen=True)
class Call(abc.ABC):
    """One pass of one call, operands aside; a parameter of its primitive.

    Attributes:
      problem: what to compute.
      backend: which backend runs it, as the user named it; None: the first that can.
      target: the name of the pass, which ends those of its custom calls.
    """

    problem: Problem
    backend: str | None

    target = ""

    @property
    @abc.abstractmethod
    def operands(self) -> tuple[str, ...]:
        """The names of what goes in, the problem's terms last."""

    @property
    @abc.abstractmethod
    def results(self) -> tuple[str, ...]:
        """The names of what comes out; the gradient of x is "dx"."""

    @property
    def own(self) -> tuple[str, ...]:
        """The operands that every member of a vmap needs for itself."""
        return ()

    @property
    def whole(self) -> Self:
        """The same with all results that the kernels compute."""
        return self

    def attributes(self) -> dict[str, Any]:
        """Returns the attributes of the custom call."""
        return {"problem": self.problem.attribute()}

    @abc.abstractmethod
    def blockwise(self, *operands: jax.Array) -> tuple[jax.Array, ...]:
        """Computes the results in JAX, as backend "xla" does."""

    def result_shapes(self, operands: Mapping[str, Any]) -> list[tuple[int, ...]]:
        """Lists the shapes of the results from the operands by name."""
        q, v = operands["q"].shape, operands["v"].shape
        made = {"out": (*q[:-1], v[-1]), "lse": (*q[:-3], q[-2], q[-3])}
        return [made[x] if x in made else operands[x[1:]].shape for x in self.results]

    def result_avals(self, operands: Mapping[str, Any]) -> tuple[Any, ...]:
        """Returns the abstract values of the results from those of the operands by name.

        Out and lse are split as the query is and a gradient as what it is the gradient of.
        """
        q = operands["q"]
        spec = tuple(q.sharding.spec)
        *batch, _, heads, _ = spec + (None,) * (q.ndim - len(spec))
        made = {
            "out": (q.dtype, PartitionSpec(*batch, None, heads, None)),
            "lse": (jnp.dtype(self.problem.sum_dtype), PartitionSpec(*batch, heads, None)),
        }

        def aval(name, shape):
            if name not in made:
                return operands[name[1:]].update(weak_type=False)
            dtype, spec = made[name]
            sharding = NamedSharding(q.sharding.mesh, spec)
            return q.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)

        return tuple(map(aval, self.results, self.result_shapes(operands)))

    def name_operands(self, operands: Sequence[Any]) -> dict[str, Any]:
        """Returns the operands by name."""
        return dict(zip(self.operands, operands, strict=True))
