"""Follows the values of a traced function back to what they were made of, and computes some."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend import core

LARGEST = 1 << 26  # elements of what is computed: 8192 queries and keys
FURTHEST = 2000  # equations that `first_widened` looks at

# What only an array's contents would tell, or what takes as long as the function itself.
_COSTLY = (
    "dot_general", "conv_general_dilated", "scan", "while", "cond", "shard_map", "pallas_call",
    "ffi_call", "sort", "fft", "cholesky", "custom_partitioning",
)  # fmt: skip
_PACKAGES = (Path(jax.__file__).parent, Path(__file__).parents[1])
_LIBRARIES = ("/flax/", "/jaxlib/", "/equinox/", "/haiku/")


class Unknown(Exception):  # noqa: N818
    """Says why a value is not known."""


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """A value of the program: made by an equation, given from outside, or a number in its text.

    Attributes:
      aval: its shape and dtype.
      scope, equation, index: the result that it is, if an equation made it.
      given: the array that it is, if it is known without computing; else None.
    """

    aval: Any
    scope: Scope | None = None
    equation: Any = None
    index: int = 0
    given: Any = None

    @property
    def name(self) -> str:
        """The primitive's name; "" of what no equation made."""
        return "" if self.equation is None else self.equation.primitive.name

    @property
    def place(self) -> str:
        """Where in a user's source the equation stands: "file.py:12 (function)", or ""."""
        return "" if self.equation is None else _place(self.equation)


class Scope:
    """One use of a jaxpr: what its variables are."""

    def __init__(self, jaxpr: Any, inputs: Sequence[Node], consts: Sequence[Any] = ()):
        self.jaxpr = jaxpr
        self.values: dict[Any, Node] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, const in zip(jaxpr.constvars, consts, strict=False):
            self.values[var] = Node(var.aval, given=const)
        for var in jaxpr.constvars:
            self.values.setdefault(var, Node(var.aval))
        self.makers = {var: (e, i) for e in jaxpr.eqns for i, var in enumerate(e.outvars)}
        self.inner: dict[int, list[Scope]] = {}

    def node(self, atom: Any) -> Node:
        """Returns what an atom is, through the calls that only pass it on."""
        if isinstance(atom, core.Literal):
            return Node(atom.aval, given=atom.val)
        if atom not in self.values:
            equation, index = self.makers[atom]
            scopes = self.scopes(equation)
            if len(scopes) == 1 and _is_call(equation, scopes[0].jaxpr):
                self.values[atom] = scopes[0].node(scopes[0].jaxpr.outvars[index])
            else:
                self.values[atom] = Node(atom.aval, self, equation, index)
        return self.values[atom]

    def scopes(self, equation: Any) -> list[Scope]:
        """Lists the jaxprs within an equation, with what is known of their inputs."""
        if id(equation) not in self.inner:
            self.inner[id(equation)] = [
                Scope(jaxpr, self._inputs(equation, jaxpr), consts)
                for jaxpr, consts in _jaxprs(equation)
            ]
        return self.inner[id(equation)]

    def _inputs(self, equation: Any, jaxpr: Any) -> list[Node]:
        outer = [self.node(atom) for atom in equation.invars]
        unknown = [Node(var.aval) for var in jaxpr.invars]
        if _is_call(equation, jaxpr):
            return outer
        if equation.primitive.name == "scan":
            kept = _kept_by_scan(equation, jaxpr)
            return [outer[i] if i in kept else x for i, x in enumerate(unknown)]
        if equation.primitive.name == "cond":
            return outer[1:]
        return unknown


class Graph:
    """A traced function."""

    def __init__(self, closed: Any, arguments: Sequence[Any]):
        inputs = [
            Node(var.aval, given=None if isinstance(x, jax.ShapeDtypeStruct) else x)
            for var, x in zip(closed.jaxpr.invars, arguments, strict=True)
        ]
        self.scope = Scope(closed.jaxpr, inputs, closed.consts)
        self.computed: dict[tuple[int, int], list[Any]] = {}

    @classmethod
    def of(cls, f: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Graph:
        """Traces f(*args, **kwargs): arrays and shapes are traced, all else is taken as it is."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        traced = [
            i
            for i, x in enumerate(leaves)
            if hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, np.generic)
        ]

        def flat(*arrays: Any) -> Any:
            given = [*leaves]
            for i, x in zip(traced, arrays, strict=True):
                given[i] = x
            own, keywords = jax.tree.unflatten(tree, given)
            return f(*own, **keywords)

        arrays = [leaves[i] for i in traced]
        return cls(jax.make_jaxpr(flat)(*arrays), arrays)

    def equations(self, prefix: str) -> Iterator[Node]:
        """Lists the equations of primitives whose name begins so, those of inner programs too."""

        def walk(scope: Scope) -> Iterator[Node]:
            for equation in scope.jaxpr.eqns:
                if equation.primitive.name.startswith(prefix):
                    yield Node(equation.outvars[0].aval, scope, equation)
                else:
                    for inner in scope.scopes(equation):
                        yield from walk(inner)

        return walk(self.scope)

    def inputs(self, node: Node) -> list[Node]:
        """Lists what an equation reads."""
        if node.scope is None:
            return []
        return [node.scope.node(atom) for atom in node.equation.invars]

    def origin(self, node: Node) -> Node:
        """Follows a value back through what only gives an array another shape."""
        while node.name in ("reshape", "squeeze", "expand_dims", "copy"):
            node = self.inputs(node)[0]
        return node

    def value(self, node: Node) -> np.ndarray:
        """Computes a value.

        Raises: Unknown, where it needs an array of which only the shape is given, or much work.
        """
        with jax.default_device(jax.devices("cpu")[0]), jax.ensure_compile_time_eval():
            return np.asarray(self._value(node))

    def _value(self, node: Node) -> Any:
        if node.given is not None:
            if isinstance(node.given, Tracer):
                raise Unknown("it depends on an array that is traced outside of the function")
            return node.given
        if node.equation is None:
            raise Unknown("it depends on an array that is known by its shape alone")
        if node.name in _COSTLY or node.name.startswith(("flash_", "random_")):
            raise Unknown(f"it depends on {node.name}, which is not computed")
        key = (id(node.scope), id(node.equation))
        if key not in self.computed:
            if max(math.prod(x.aval.shape) for x in node.equation.outvars) > LARGEST:
                raise Unknown("it is too large to be computed")
            values = [self._value(x) for x in self.inputs(node)]
            primitive = node.equation.primitive
            try:
                out = primitive.bind(*values, **node.equation.params)
            except Exception as error:  # advice ends no program that runs
                raise Unknown(f"{node.name} was not computed ({type(error).__name__})") from error
            self.computed[key] = [*out] if primitive.multiple_results else [out]
        return self.computed[key][node.index]

    def first_widened(self, nodes: Sequence[Node]) -> tuple[str, str] | None:
        """Finds the nearest conversion of 16 bits to float32 that values were made of.

        Returns: its place and the dtype that it converts, or None.
        """
        waiting, seen = [*nodes], set()
        for _ in range(FURTHEST):
            if not waiting:
                break
            node = waiting.pop(0)
            if node.equation is None or (key := (id(node.scope), id(node.equation))) in seen:
                continue
            seen.add(key)
            inputs = self.inputs(node)
            if node.aval.dtype == np.float32:
                for x in inputs:
                    if str(x.aval.dtype) in ("bfloat16", "float16"):
                        return node.place, str(x.aval.dtype)
            waiting += inputs
        return None


def _is_call(equation: Any, jaxpr: Any) -> bool:
    """Tells whether an equation does what its one jaxpr does, once."""
    return (
        equation.primitive.name not in ("scan", "while", "cond", "shard_map", "pallas_call")
        and [x.aval.shape for x in jaxpr.invars] == [x.aval.shape for x in equation.invars]
        and len(jaxpr.outvars) == len(equation.outvars)
    )


def _kept_by_scan(equation: Any, jaxpr: Any) -> set[int]:
    """Lists the inputs of a loop that are the same in each turn, by index."""
    parameters = equation.params
    if "num_consts" in parameters:
        consts, carried = parameters["num_consts"], parameters["num_carry"]
        ins = [*range(consts)], [*range(consts, consts + carried)]
        out = [*range(carried)]
    else:  # jax 0.11 and later
        try:
            numbers = parameters["ft_in"].update([*range(len(jaxpr.invars))]).unpack()
            ins = [*numbers[0]], [*numbers[1]]
            out = [*parameters["ft_out"].update([*range(len(jaxpr.outvars))]).unpack()[0]]
        except (AttributeError, KeyError, IndexError, TypeError, ValueError):
            return set()
    through = {i for i, o in zip(ins[1], out, strict=True) if jaxpr.invars[i] is jaxpr.outvars[o]}
    return {*ins[0]} | through


def _jaxprs(equation: Any) -> Iterator[tuple[Any, Sequence[Any]]]:
    """Lists the jaxprs among an equation's parameters, with their constants."""
    if equation.primitive.name == "pallas_call":
        return
    for parameter in equation.params.values():
        for x in parameter if isinstance(parameter, tuple | list) else (parameter,):
            if hasattr(x, "jaxpr") and hasattr(x, "consts"):
                yield x.jaxpr, x.consts
            elif hasattr(x, "eqns") and hasattr(x, "constvars"):
                yield x, ()


def _place(equation: Any) -> str:
    with contextlib.suppress(AttributeError):
        for frame in equation.source_info.traceback.frames:
            if not _of_a_library(frame.file_name):
                function = frame.function_name.rsplit(".", 1)[-1]
                return f"{Path(frame.file_name).name}:{frame.line_num} ({function})"
    return ""


@functools.cache
def _of_a_library(file: str) -> bool:
    path = Path(file)
    return any(folder in path.parents for folder in _PACKAGES) or any(
        name in file for name in _LIBRARIES
    )
