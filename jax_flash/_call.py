"""What a pass of a call is, as data: its operands and results by name, their dims and avals.

A pass is a subclass of `Call` in `_ops/`; backends, families of kernels, batching and partitioning
know no more of it than stands here.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jax_flash._problem import Problem, Shapes
from jax_flash._terms import TERMS, is_capture

# Dims after the leading ones. Capitals name the sizes: T queries, S keys, N query heads, K kv
# heads, H and V features, W words, U ids, P pages, M pages of a row, Q and R requests, A elements
# of an array that a function of the scores reads, F, G and L blocks of positions that share a scale
# of q, k and v, Y positions of columns of values,
# Z bytes of a packed row; I, J, C, D, E, X: see _terms.py.
_DIMS = {
    "q": "TNH",
    "k": "SKH",
    "v": "SKV",
    "out": "TNV",
    "lse": "NT",
    "lengths": "",
    "page_table": "M",
    "new_k": "TKH",
    "new_v": "TKV",
    "key_scale": "K",
    "value_scale": "K",
    "q_scale": "FN",
    "k_scale": "GK",
    "v_scale": "LK",
    "v_columns": "KVY",
    **{name: term.dims for name, term in TERMS.items()},
}


def dims(name: str) -> str:
    """Returns the letters of an operand's or result's dims after the leading ones."""
    name = name if name in _DIMS else name.removeprefix("d")
    return "A" if is_capture(name) else _DIMS[name]


@dataclasses.dataclass(frozen=True)
class Call(abc.ABC):
    """One pass of one call, operands aside; a parameter of its primitive.

    Attributes:
      problem: what to compute.
      backend: which backend runs it, as the user named it; None: the first that can.
      target: the name of the pass, which ends those of its custom calls.
      function: the public call that it belongs to.
    """

    problem: Problem
    backend: str | None

    target = ""
    function = "flash_attention"

    @property
    @abc.abstractmethod
    def operands(self) -> tuple[str, ...]:
        """The names of what goes in, the problem's optional ones last."""

    @property
    @abc.abstractmethod
    def results(self) -> tuple[str, ...]:
        """The names of what comes out; the gradient of x is "dx", x written in place is "x"."""

    @property
    def own(self) -> tuple[str, ...]:
        """The operands that every member of a vmap needs for itself."""
        return ()

    @property
    def whole(self) -> Self:
        """The same with all results that the kernels compute."""
        return self

    @property
    def next(self) -> "Call | None":
        """The pass that follows with the same sizes, if one does: both are compiled at once."""
        return None

    @property
    def prepares(self) -> bool:
        """Whether it prepares operands of another call: "xla" runs it where no kernel does.

        Nothing is said then, whatever backend is named.
        """
        return False

    @property
    def sequences(self) -> tuple[tuple[str, str, str], ...]:
        """The operands that a device needs whole sequences of: the user's names, and their dims."""
        return (("q", "query", "T"), ("k", "key", "S"), ("v", "value", "S"))

    @property
    def cached(self) -> bool:
        """Whether k and v are a cache, of which no device may make a copy."""
        return False

    @property
    def packs(self) -> bool:
        """Whether the rows of its page table are packed first (`packed`)."""
        return False

    @property
    def cache_dtype(self) -> str:
        """The dtype of k and v."""
        return self.problem.dtype

    @property
    def aliases(self) -> dict[int, int]:
        """The operands that are written in place, by index, and the results that they become."""
        names = (name for name in self.results if name in self.operands)
        return {self.operands.index(name): self.results.index(name) for name in names}

    def dims(self, name: str) -> str:
        """Returns the letters of an operand's or result's dims after the leading ones."""
        return dims(name)

    def shapes(self, operands: Mapping[str, Any]) -> Shapes:
        """Reads the sizes of the call from its operands by name."""
        return Shapes.of(operands["q"], operands["k"], operands["v"], terms=operands)

    def attributes(self) -> dict[str, Any]:
        """Returns the attributes of the custom call."""
        return {"problem": self.problem.attribute()}

    @abc.abstractmethod
    def blockwise(self, *operands: jax.Array) -> tuple[jax.Array, ...]:
        """Computes the results in JAX, as backend "xla" does."""

    @abc.abstractmethod
    def run_kernel(
        self, kernel: Callable[..., tuple[jax.Array, ...]], *operands: jax.Array
    ) -> tuple[jax.Array, ...]:
        """Computes the results by `kernel(call, *operands)`, which takes the form kernels know."""

    def instead(self, shapes: Shapes) -> "tuple[Call, Shapes] | None":
        """The call whose kernels compute this one where its own do not, and its sizes, if any."""
        return None

    @property
    def without_indices(self) -> str:
        """What of indices no kernels have, where there is no call `instead`."""
        return "no gradients of chosen keys" if self.target == "backward" else "no chosen keys"

    def run_instead(
        self, kernel: Callable[..., tuple[jax.Array, ...]], *operands: jax.Array
    ) -> tuple[jax.Array, ...]:
        """Computes the results by kernels of the call `instead`."""
        raise NotImplementedError

    def decoding(self, shapes: Shapes) -> "Call | None":
        """The flash_decode that computes the same, whose kernels may take less time, if any."""
        return None

    def rotated(self, *operands: jax.Array) -> tuple[Self, tuple[jax.Array, ...]]:
        """Does what only some kernels do themselves: the call that is left, and its operands."""
        return self, operands

    def packed(self, *operands: jax.Array) -> tuple[Self, tuple[jax.Array, ...]]:
        """Packs a page table, for kernels that do not: the call that is left, and its operands."""
        return self, operands

    @property
    def result_dtype(self) -> str:
        """The dtype of out."""
        return self.problem.dtype

    @property
    def fallback(self) -> "Call | None":
        """The call of dequantised operands that kernels may run where none run this one."""
        return None

    def dequantised(
        self, call: "Call", *operands: jax.Array
    ) -> "tuple[Call, tuple[jax.Array, ...]]":
        """Makes the operands of `fallback`: returns it and them."""
        raise NotImplementedError

    def result_shapes(self, operands: Mapping[str, Any]) -> list[tuple[int, ...]]:
        """Lists the shapes of the results from the operands by name."""
        q, v = operands["q"].shape, operands["v"].shape
        made = {"out": (*q[:-1], v[-1]), "lse": (*q[:-3], q[-2], q[-3])}
        return [made[x] if x in made else _of(x, operands).shape for x in self.results]

    def result_avals(self, operands: Mapping[str, Any]) -> tuple[Any, ...]:
        """Returns the abstract values of the results from those of the operands by name.

        Out and lse are split as the query is, a gradient as what it is the gradient of.
        """
        q = operands["q"]
        spec = tuple(q.sharding.spec)
        *batch, _, heads, _ = spec + (None,) * (q.ndim - len(spec))
        made = {
            "out": (q.dtype, PartitionSpec(*batch, None, heads, None)),
            "lse": (
                jnp.dtype(self.problem.sum_dtype),
                PartitionSpec(*batch, *(heads if x == "N" else None for x in self.dims("lse"))),
            ),
        }

        def aval(name, shape):
            if name not in made:
                return _of(name, operands).update(weak_type=False)
            dtype, spec = made[name]
            sharding = NamedSharding(q.sharding.mesh, spec)
            return q.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)

        return tuple(map(aval, self.results, self.result_shapes(operands)))

    def name_operands(self, operands: Sequence[Any]) -> dict[str, Any]:
        """Returns the operands by name."""
        return dict(zip(self.operands, operands, strict=True))


def _of(result: str, operands: Mapping[str, Any]) -> Any:
    """Returns the operand that a result is the gradient of, or is itself."""
    return operands[result] if result in operands else operands[result.removeprefix("d")]
