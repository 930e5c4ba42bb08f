"""A user's function of scalars, traced once: a frozen value that any backend evaluates or emits.

`trace` makes a `Function` of it and lists the arrays that it reads, which become operands of the
primitives. Two Functions are equal where they compute the same and have the same derivatives; the
values of the arrays are not part of them. Read next: `_program.py`, what it computes;
`_diagonals.py` and `_visible.py`, how it is evaluated for a tile of scores; `_gpu/emit`, which
writes one as CUDA.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import get_abstract_mesh, use_abstract_mesh

from jax_flash import _diagonals
from jax_flash._program import NO_MESH, Aval, Builder, Program, derivative_keys


@dataclasses.dataclass(frozen=True, eq=False)
class Function:
    """A function of scalars, and of arrays that are operands of the call.

    Attributes:
      arguments: the names of the scalars.
      program: its inputs are the scalars, then the arrays; its result is one scalar.
      key: what it computes and its derivatives; two Functions of one key are equal.
    """

    arguments: tuple[str, ...]
    program: Program
    key: Hashable = dataclasses.field(repr=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Function) and self.key == other.key

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self.key)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        arrays = [f"{aval.dtype}{list(aval.shape)}" for aval in self.captures]
        names = [name for name in self.arguments if name in self.used]
        return f"Function({', '.join([*names, *arrays])})"

    @property
    def captures(self) -> tuple[Aval, ...]:
        """The arrays that it reads."""
        return self.program.inputs[len(self.arguments) :]

    @functools.cached_property
    def used(self) -> frozenset[str]:
        """The scalars on which its result depends."""
        read = {x for step in self.program.steps for x in step.inputs if isinstance(x, int)}
        read |= {x for x in self.program.results if isinstance(x, int)}
        return frozenset(name for i, name in enumerate(self.arguments) if i in read)

    def with_numbers(self) -> tuple[Function, list[np.ndarray]]:
        """Makes its numbers arrays that it reads: functions that differ in them alone are one."""
        program, numbers = self.program.with_numbers()
        return Function(self.arguments, program, key=(self.arguments, program.key)), numbers

    @functools.cached_property
    def ruled(self) -> Function:
        """What it is where it is differentiated: with values as its custom_jvp rules write them."""
        if self.program.custom != {"custom_jvp_call"}:
            return self
        program = self.program.ruled
        if program.key == self.program.key:  # the rules call what they are of
            return self
        return Function(self.arguments, program, key=(self.arguments, derivative_keys(program)))

    def after(self, change: Callable[..., Mapping[str, Any]], reads: Sequence[Aval]) -> Function:
        """Composes it with a change of its scalars.

        Arguments:
          change: gets the scalars by name and arrays of `reads`; returns those that change.
          reads: what follows the arrays of this function.
        """
        count, arrays = len(self.arguments), len(self.program.inputs)

        def changed(inputs):
            scalars = dict(zip(self.arguments, inputs[:count], strict=True))
            scalars |= change(scalars, *inputs[arrays:])
            return self.program.apply([*scalars.values(), *inputs[count:arrays]])

        program = self.program.retrace(changed, [*self.program.inputs, *reads])
        return Function(self.arguments, program, key=(self.arguments, derivative_keys(program)))

    def of_tile(
        self, visible: jax.Array, arguments: Sequence[jax.Array], captures: Sequence[jax.Array]
    ) -> jax.Array:
        """Computes it for all scores of a tile; where not visible the result means nothing.

        No derivative of a score that is not visible reaches an argument or a captured array.

        Arguments:
          visible: bool, broadcasts to the tile.
          arguments: the scalars, each of which broadcasts to the tile; the first has its shape.
          captures: `[*B, elements]`, any of *B 1; *B are the first dims of the tile.
        """
        moving = self.arguments.index("query"), self.arguments.index("key")
        return _diagonals.of_tile(self.program, moving, visible, arguments, captures)


@dataclasses.dataclass(frozen=True, eq=False)
class OfHeads:
    """A function of scores with arrays that have an element, or a row, for each query head.

    Reads beyond an array give its last element, as in JAX: only this tells that it is too short.
    """

    function: Callable[..., Any]
    heads: int

    def __call__(self, score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
        return self.function(score, batch, head, query, key)


def trace(
    name: str,
    function: Any,
    arguments: Mapping[str, str],
    result: str,
    differentiable: bool = True,
) -> tuple[Function, list[Any]]:
    """Traces a user's function, anew in each call: what it reads may have changed.

    Arguments:
      name: of the argument of the public call, for errors.
      function: takes scalars, returns one.
      arguments: the names of the scalars and their dtypes.
      result: "bool", or the dtype of floats that the result is converted to.
      differentiable: it may have derivatives of its own. If not, it may read random keys, and what
        it computes of arrays alone is part of it.

    Returns: the Function, and the arrays that it reads, one for each of its captures.

    Raises: TypeError where it is not such a function.
    """
    signature = f"f({', '.join(arguments)}) -> a scalar"
    if not callable(function):
        raise TypeError(f"{name} is {type(function).__name__}; expected a function {signature}")
    check_takes(name, function, arguments)

    def converted(*scalars):
        x: Any = function(*scalars)
        if isinstance(x, tuple | list | dict):
            raise TypeError(f"{name} returns a {type(x).__name__}; expected a function {signature}")
        shape, dtype = jnp.shape(x), getattr(x, "dtype", type(x))
        kind = jnp.bool_ if result == "bool" else jnp.floating
        if shape != () or not jnp.issubdtype(dtype, kind):
            what = getattr(dtype, "__name__", dtype)
            raise TypeError(
                f"{name} returns {what} of shape {shape}; expected a function {signature} of "
                f"shape () that is {'bool' if result == 'bool' else 'floating point'}"
            )
        return jnp.asarray(x, result)

    structs = [jax.ShapeDtypeStruct((), dtype) for dtype in arguments.values()]
    mesh = get_abstract_mesh()
    with use_abstract_mesh(mesh if mesh.manual_axes else NO_MESH), traced_by_jax(name):
        closed = jax.make_jaxpr(converted)(*structs)
    builder = Builder(
        [Aval(dtype) for dtype in arguments.values()],
        opens_custom=not differentiable,
        computes_arrays=differentiable,
    )
    program, captured = builder.build(closed, closed.consts)
    for x in captured if differentiable else ():
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):
            raise TypeError(f"{name} reads an array of dtype {x.dtype}; expected numbers or bools")
    traced = Function(tuple(arguments), program, key=())
    key = (tuple(arguments), derivative_keys(program))
    return dataclasses.replace(traced, key=key), [jnp.asarray(x) for x in captured]


@contextlib.contextmanager
def traced_by_jax(name: str) -> Iterator[None]:
    """Names a user's function in the error of one that gives Python or NumPy its arguments."""
    try:
        yield
    except jax.errors.TracerBoolConversionError as error:
        raise TypeError(
            f"{name} asks Python whether a traced scalar is true, by if, and, or, not or min; "
            "expected jnp.where, &, |, ~ or jnp.minimum"
        ) from error
    except jax.errors.TracerIntegerConversionError as error:
        raise TypeError(
            f"{name} gives Python a traced scalar for an int, to index a list for instance; "
            "expected an array, x = jnp.asarray(x) outside of the function"
        ) from error
    except jax.errors.TracerArrayConversionError as error:
        raise TypeError(
            f"{name} gives NumPy a traced scalar, to index an array or compute with; expected "
            "jax.numpy, and of an array x = jnp.asarray(x) outside of the function"
        ) from error


def check_takes(name: str, function: Callable[..., Any], arguments: Iterable[str]) -> None:
    """Raises TypeError where a user's function does not take these arguments, by position."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a builtin nothing is known ahead
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        said = f"{name} takes {signature}; expected a function f({', '.join(arguments)}): {error}"
        module = getattr(function, "__module__", "")
        if module in ("jax_flash.masks", "jax_flash.scores"):
            said += f"; {module}.{getattr(function, '__name__', '')}(...) returns one"
        raise TypeError(said) from None
