"""A user's function of scalars, traced once: a frozen value that any backend evaluates or emits.

`trace` makes a `Function` of it and lists the arrays that it reads, which become operands of the
primitives. Two Functions are equal where they compute the same and have the same derivatives; the
values of the arrays are not part of them. Read next: `_gpu/emit.py`, which writes one as CUDA.
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
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive
from jax.sharding import AbstractMesh, get_abstract_mesh, use_abstract_mesh

from jax_flash._varying import vary_over

_NO_MESH = AbstractMesh((), ())


@dataclasses.dataclass(frozen=True)
class Aval:
    """The dtype and the shape of a value."""

    dtype: str
    shape: tuple[int, ...] = ()

    @classmethod
    def of(cls, x: Any) -> Aval:
        return cls(str(x.dtype), tuple(x.shape))

    @property
    def is_float(self) -> bool:
        return jnp.issubdtype(self.dtype, jnp.floating)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """A number in the program, or an array of some; equal bits are one constant, NaN too."""

    value: np.ndarray

    @property
    def key(self) -> Hashable:
        return str(self.value.dtype), self.value.shape, self.value.tobytes()


Value = int | Constant  # the index of a value: inputs first, then what steps give


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One operation of JAX's."""

    primitive: Primitive
    params: Mapping[str, Any]
    inputs: tuple[Value, ...]
    outputs: tuple[int, ...]
    avals: tuple[Aval, ...]  # of the outputs


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """Steps in order, without calls: what `jax.jit` wraps stands in its place."""

    inputs: tuple[Aval, ...]
    steps: tuple[Step, ...]
    results: tuple[Value, ...]

    @functools.cached_property
    def key(self) -> Hashable:
        """What it computes, derivatives that are custom aside."""
        steps = tuple(
            (step.primitive.name, _freeze_params(step), _keys(step.inputs), step.avals)
            for step in self.steps
        )
        return self.inputs, steps, _keys(self.results)

    @functools.cached_property
    def custom(self) -> set[str]:
        """The primitives of its steps that have derivatives of a user's."""
        return {x.primitive.name for x in self.steps if x.primitive.name.startswith("custom_")}

    def evaluate(self, inputs: Sequence[Any], visible: Any = True) -> list[Any]:
        """Computes the results in JAX.

        Arguments:
          inputs: arrays of the inputs' shapes.
          visible: a bool; where it is False the results mean nothing, and have no derivative.
        """
        if visible is not True:
            inputs = [
                _guard(x, visible) if aval.is_float and not aval.shape else x
                for x, aval in zip(inputs, self.inputs, strict=True)
            ]
        if self.custom == {"custom_jvp_call"}:
            return _evaluate_by_rule(self, inputs, visible)
        return self.apply(inputs, visible)

    def apply(self, inputs: Sequence[Any], visible: Any = True) -> list[Any]:
        """Does the steps one by one, those with derivatives of a user's as they were traced."""
        values: dict[int, Any] = dict(enumerate(inputs))

        def read(x: Value) -> Any:
            return values[x] if isinstance(x, int) else vary_over(x.value, inputs)

        for step in self.steps:
            arrays = [read(x) for x in step.inputs]
            results = _bind(step.primitive, arrays, step.params)
            reads = any(jnp.ndim(x) for x in arrays)
            for at, aval, x in zip(step.outputs, step.avals, results, strict=True):
                guards = visible is not True and reads and aval.is_float and not aval.shape
                values[at] = _guard(x, visible) if guards else x
        return [read(x) for x in self.results]

    @functools.cached_property
    def opened(self) -> Program:
        """The same with custom derivatives left out."""
        return self._retrace(self.apply, self.inputs, opens_custom=True)

    @functools.cached_property
    def moved(self) -> Program:
        """Of inputs and the tangents of those that are floats: the results, and their tangents."""

        def moved(*operands):
            inputs, moving = operands[: len(self.inputs)], list(operands[len(self.inputs) :])
            tangents = [
                moving.pop(0) if aval.is_float else np.zeros(aval.shape, jax.dtypes.float0)
                for aval in self.inputs
            ]
            results = jax.jvp(lambda *x: self.apply(x), tuple(inputs), tuple(tangents))
            return [*results[0], *results[1]]

        floats = [aval for aval in self.inputs if aval.is_float]
        return self._retrace(lambda x: moved(*x), [*self.inputs, *floats])

    @functools.cached_property
    def with_slope(self) -> Program:
        """Of the inputs: the first result, and its derivative by the first input."""

        def both(inputs):
            first, *rest = inputs
            y, pull = jax.vjp(lambda first: self.apply([first, *rest])[0], first)
            return [y, *pull(jnp.ones_like(y))]

        return self._retrace(both, self.inputs, opens_custom=True)

    def _retrace(
        self, function: Callable[..., Any], inputs: Sequence[Aval], opens_custom: bool = False
    ) -> Program:
        with use_abstract_mesh(_NO_MESH):  # nothing of the caller's matters
            structs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in inputs]
            closed = jax.make_jaxpr(lambda *x: function(x))(*structs)
        return _Builder(inputs, opens_custom, inlines=True).build(closed, closed.consts)[0]


def _guard(x: Any, visible: Any) -> Any:
    """Keeps derivatives, NaN too, of what is not visible from x."""
    return jnp.where(visible, x, jnp.zeros_like(x))


def _evaluate_by_rule(program: Program, inputs: Sequence[Any], visible: Any) -> list[Any]:
    """Evaluates a program with custom_jvp by programs of its derivatives, to any order.

    The jaxprs of custom_jvp say of their results how they vary over devices, from where they were
    traced, and a tile is elsewhere. With custom_vjp there is no such program.
    """

    @jax.custom_jvp
    def value(visible, *inputs):
        return program.opened.evaluate(inputs, visible)

    @value.defjvp
    def _(primals, tangents):
        visible, *inputs = primals
        moving = zip(program.inputs, tangents[1:], strict=True)
        moving = [x for aval, x in moving if aval.is_float]
        results = program.moved.evaluate([*inputs, *moving], visible)
        # By themselves: what is computed with tangents does not count as known to jax 0.12.
        return program.evaluate(inputs, visible), results[len(program.results) :]

    return value(visible, *inputs)


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

    @functools.cached_property
    def cap(self) -> float | None:
        """The number c above 0 where it is c * tanh(score / c), or c * tanh(score * (1 / c))."""
        steps = self.program.steps
        if len(steps) != 3 or self.program.results != steps[2].outputs:
            return None
        names = [step.primitive.name for step in steps]
        inside = _factor(steps[0], 0)
        outside = _factor(steps[2], steps[1].outputs[0])
        if names[1:] != ["tanh", "mul"] or steps[1].inputs != steps[0].outputs:
            return None
        if inside is None or outside is None or steps[1].params.get("accuracy") is not None:
            return None
        same = inside == outside if names[0] == "div" else inside == 1 / outside
        return float(outside) if names[0] in ("div", "mul") and same and outside > 0 else None

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

        program = self.program._retrace(changed, [*self.program.inputs, *reads])
        return Function(self.arguments, program, key=(self.arguments, _derivative_keys(program)))

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
        tile = arguments[0].shape
        operands = [visible, *arguments, *captures]
        operands = vary_over(operands, operands)
        captured = len(operands) - len(captures)
        # Of each operand which dims of the tile it varies along; the others are dropped.
        mapped, reduced = [], []
        for i, x in enumerate(operands):
            dims = x.shape if i < captured else x.shape[:-1]
            varies = [size != 1 for size in dims] + [False] * (len(tile) - len(dims))
            mapped.append(varies)
            kept = [size for size, keeps in zip(dims, varies, strict=False) if keeps]
            reduced.append(x.reshape(*kept, *x.shape[len(dims) :]))

        def of_pair(visible, *inputs):
            shapes = [aval.shape for aval in self.program.inputs]
            inputs = [x.reshape(shape) for x, shape in zip(inputs, shapes, strict=True)]
            return self.program.evaluate(inputs, visible)[0]

        function = of_pair
        for axis in reversed(range(len(tile))):
            axes = [0 if varies[axis] else None for varies in mapped]
            if any(x is not None for x in axes):
                function = jax.vmap(function, in_axes=axes)
        return jnp.broadcast_to(function(*reduced), [n for n in tile if n != 1]).reshape(tile)


def _factor(step: Step, of: int) -> Any:
    """Returns the number by which a step multiplies or divides a value, if it does."""
    first, *others = step.inputs
    if step.primitive.name == "mul" and isinstance(first, Constant):
        first, others = others[0], [first]
    if first != of or len(others) != 1 or not isinstance(others[0], Constant):
        return None
    number = others[0].value
    return number[()] if number.shape == () and number != 0 else None


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
    name: str, function: Any, arguments: Mapping[str, str], result: str
) -> tuple[Function, list[Any]]:
    """Traces a user's function.

    Arguments:
      name: of the argument of the public call, for errors.
      function: takes scalars, returns one.
      arguments: the names of the scalars and their dtypes.
      result: "bool", or the dtype of floats that the result is converted to.

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
    with use_abstract_mesh(mesh if mesh.manual_axes else _NO_MESH), without_numpy(name):
        closed = jax.make_jaxpr(converted)(*structs)
    builder = _Builder([Aval(dtype) for dtype in arguments.values()])
    program, captured = builder.build(closed, closed.consts)
    for x in captured:
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):
            raise TypeError(f"{name} reads an array of dtype {x.dtype}; expected numbers or bools")
    traced = Function(tuple(arguments), program, key=())
    key = (tuple(arguments), _derivative_keys(program))
    return dataclasses.replace(traced, key=key), [jnp.asarray(x) for x in captured]


@contextlib.contextmanager
def without_numpy(name: str) -> Iterator[None]:
    """Names a user's function in the error of one that gives NumPy its arguments."""
    try:
        yield
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
        raise TypeError(
            f"{name} takes {signature}; expected a function f({', '.join(arguments)}): {error}"
        ) from None


def _derivative_keys(program: Program, depth: int = 2) -> Hashable:
    """Returns the key of a program and, where it has custom ones, those of its derivatives."""
    if depth == 0 or not program.custom:
        return program.key
    rules = [
        _Identity(x)
        for step in program.steps
        for x in step.params.values()
        if step.primitive.name.startswith("custom_vjp") and _is_rule(x)
    ]
    if rules:  # there is no forward mode: the rules are compared as the objects that they are
        return program.key, tuple(rules)
    return program.key, _derivative_keys(program.moved, depth - 1)


# ---- from a jaxpr to a program -------------------------------------------------------------------

_CALLS = ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2")
_CUSTOM_CALLS = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
_CASTS = ("pvary", "pcast", "copy", "copy_p", "mesh_cast", "sharding_constraint", "reshard")
# Those that move elements of their first input and compute nothing.
_MOVES = ("dynamic_slice", "gather", "squeeze", "reshape", "slice", "broadcast_in_dim", "transpose")


@dataclasses.dataclass(frozen=True, eq=False)
class _Known:
    """What does not depend on the scalars: computed once, outside of the function."""

    value: Any


@dataclasses.dataclass(frozen=True, eq=False)
class _Computed:
    """What a step gives, or an argument."""

    aval: Aval
    narrow: str | None = None  # the dtype that it has in the jaxpr, where its bits are float32's
    same: _Computed | None = None  # as this value, which it stands for


@dataclasses.dataclass(frozen=True, eq=False)
class _Pending:
    primitive: Primitive
    params: Mapping[str, Any]
    inputs: tuple[_Known | _Computed, ...]
    outputs: tuple[_Computed, ...]


class _Builder:
    """Collects the steps that depend on a program's inputs; the rest is evaluated.

    Captured arrays of bfloat16 and float16 are read as float32, so that their gradients are summed
    in it; single elements are rounded back where more than a conversion reads them.

    Arguments:
      inputs: of the program.
      opens_custom: leaves custom derivatives out.
      inlines: arrays that are no inputs are constants of the program, not captured. They are those
        that a derivative makes, ones for instance: whose values are known.
    """

    def __init__(
        self, inputs: Sequence[Aval], opens_custom: bool = False, inlines: bool = False
    ) -> None:
        self.inputs = [_Computed(aval) for aval in inputs]
        self.inlines = inlines
        self.opens = (*_CALLS, *_CUSTOM_CALLS) if opens_custom else _CALLS
        self.steps: list[_Pending] = []
        self.widened: dict[int, tuple[Any, _Computed]] = {}  # by id of an array, which is kept

    def build(self, closed: ClosedJaxpr, consts: Sequence[Any]) -> tuple[Program, list[Any]]:
        """Returns the program and the arrays that follow its inputs."""
        results = self._run(closed.jaxpr, [_Known(x) for x in consts], self.inputs)
        results = [_root(self._narrowed(x)) for x in results]
        needed: set[int] = {id(x) for x in results}
        steps = []
        for step in reversed(self.steps):
            if any(id(x) in needed for x in step.outputs):
                needed.update(id(x) for x in step.inputs)
                steps.insert(0, step)

        index = {id(x): i for i, x in enumerate(self.inputs)}
        arrays: list[Any] = []
        by_array: dict[int, int] = {}
        wide = {id(computed): array for array, computed in self.widened.values()}

        def capture(array: Any) -> int:
            if id(array) not in by_array:
                by_array[id(array)] = len(self.inputs) + len(arrays)
                arrays.append(array)
            return by_array[id(array)]

        for x in (*(x for step in steps for x in step.inputs), *results):
            if id(x) in wide:
                index[id(x)] = capture(wide[id(x)])
            elif isinstance(x, _Known) and not _is_number(x.value) and not self.inlines:
                index[id(x)] = capture(x.value)

        def value(x: _Known | _Computed) -> Value:
            if id(x) in index or isinstance(x, _Computed):
                return index[id(x)]
            return Constant(np.asarray(x.value))

        count = len(self.inputs) + len(arrays)
        made = []
        for step in steps:
            inputs = tuple(map(value, step.inputs))
            outputs = tuple(range(count, count + len(step.outputs)))
            count += len(step.outputs)
            index.update((id(x), i) for x, i in zip(step.outputs, outputs, strict=True))
            avals = tuple(x.aval for x in step.outputs)
            made.append(Step(step.primitive, step.params, inputs, outputs, avals))
        avals = (*(x.aval for x in self.inputs), *map(Aval.of, arrays))
        return Program(avals, tuple(made), tuple(map(value, results))), arrays

    def _run(self, jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        values: dict[Any, _Known | _Computed] = {}
        values.update(zip(jaxpr.constvars, consts, strict=True))
        values.update(zip(jaxpr.invars, inputs, strict=True))

        def read(x: Any) -> _Known | _Computed:
            if isinstance(x, Literal):
                return _Known(_literal(x))
            return values[x]

        for eqn in jaxpr.eqns:
            operands = [read(x) for x in eqn.invars]
            name = eqn.primitive.name
            if name in self.opens:
                inner = next(
                    eqn.params[key]
                    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr")
                    if key in eqn.params
                )
                inner_consts = [_Known(x) for x in getattr(inner, "consts", ())]
                results = self._run(getattr(inner, "jaxpr", inner), inner_consts, operands)
            elif name in _CASTS:
                results = operands
            elif len(known := [x.value for x in operands if isinstance(x, _Known)]) == len(
                operands
            ):
                results = [_Known(x) for x in _compute(eqn, known, self.inlines)]
            else:
                results = self._record(eqn, operands)
            values.update(zip(eqn.outvars, results, strict=True))
        return [read(x) for x in jaxpr.outvars]

    def _record(self, eqn: Any, operands: list[Any]) -> list[_Computed]:
        name = eqn.primitive.name
        operands = [self._widened(x) for x in operands]
        first = operands[0]
        narrow = getattr(first, "narrow", None)
        if narrow and name == "convert_element_type" and eqn.params["new_dtype"] == jnp.float32:
            return [_Computed(first.aval, same=first)]
        moves = narrow is not None and name in _MOVES
        operands = [x if moves and i == 0 else self._narrowed(x) for i, x in enumerate(operands)]
        outputs = [
            _Computed(Aval("float32", tuple(x.aval.shape)), narrow)
            if moves
            else _Computed(Aval.of(x.aval))
            for x in eqn.outvars
        ]
        inputs = tuple(map(_root, operands))
        # Where the tile is, no mesh applies.
        self.steps.append(
            _Pending(eqn.primitive, _without_mesh(eqn.params), inputs, tuple(outputs))
        )
        return outputs

    def _widened(self, x: Any) -> Any:
        if not isinstance(x, _Known) or _is_number(x.value) or self.inlines:
            return x
        dtype = str(x.value.dtype)
        if dtype not in ("bfloat16", "float16"):
            return x
        if id(x.value) not in self.widened:
            wide = jnp.asarray(x.value, jnp.float32)
            self.widened[id(x.value)] = wide, _Computed(Aval.of(wide), dtype)
        return self.widened[id(x.value)][1]

    def _narrowed(self, x: Any) -> Any:
        narrow = getattr(x, "narrow", None)
        if narrow is None:
            return x
        output = _Computed(Aval(narrow, x.aval.shape))
        params = {"new_dtype": np.dtype(narrow), "weak_type": False, "sharding": None}
        self.steps.append(_Pending(jax.lax.convert_element_type_p, params, (_root(x),), (output,)))
        return output


def _root(x: _Known | _Computed) -> _Known | _Computed:
    while isinstance(x, _Computed) and x.same is not None:
        x = x.same
    return x


def _literal(x: Any) -> np.ndarray:
    return np.asarray(x.val, x.aval.dtype)


def _is_number(x: Any) -> bool:
    return isinstance(x, np.ndarray | np.generic) and x.shape == ()


def _without_mesh(params: Mapping[str, Any]) -> dict[str, Any]:
    return {name: None if "sharding" in name else x for name, x in params.items()}


def _compute(eqn: Any, operands: Sequence[Any], now: bool) -> list[Any]:
    """Evaluates what does not depend on scalars; of numbers alone now, at any place."""
    if now or all(_is_number(x) for x in operands):
        with jax.ensure_compile_time_eval(), use_abstract_mesh(_NO_MESH):
            arrays = [jnp.asarray(x) for x in operands]
            results = _bind(eqn.primitive, arrays, _without_mesh(eqn.params))
            keys = jax.dtypes.extended
            return [x if jnp.issubdtype(x.dtype, keys) else np.asarray(x) for x in results]
    arrays = [jnp.asarray(x) for x in operands]
    return _bind(eqn.primitive, vary_over(arrays, arrays), eqn.params)


def _bind(primitive: Primitive, operands: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    made: Any = primitive.get_bind_params(dict(params))
    # jax before 0.10 returns the functions apart, later ones among the parameters.
    functions, params = made if isinstance(made, tuple) else ((), made)
    results = primitive.bind(*functions, *operands, **params)
    return list(results) if primitive.multiple_results else [results]


# ---- what programs are compared by ---------------------------------------------------------------


def _keys(values: Sequence[Value]) -> Hashable:
    return tuple(x if isinstance(x, int) else x.key for x in values)


def _freeze_params(step: Step) -> Hashable:
    """Freezes a step's parameters, but for the rules of custom derivatives."""
    custom = step.primitive.name in _CUSTOM_CALLS
    return tuple(
        (name, _freeze(x))
        for name, x in sorted(step.params.items())
        if not (custom and _is_rule(x))
    )


def _is_rule(x: Any) -> bool:
    """Tells a function among the parameters of a custom derivative from what it is applied to."""
    return not isinstance(x, ClosedJaxpr | Jaxpr | bool | int | str | tuple)


def _freeze(x: Any) -> Hashable:
    if isinstance(x, ClosedJaxpr | Jaxpr):  # one class in later jax
        consts = tuple(_freeze(const) for const in getattr(x, "consts", ()))
        inner: Any = getattr(x, "jaxpr", x)
        return _freeze_jaxpr(inner), consts
    if isinstance(x, dict):
        return tuple((key, _freeze(value)) for key, value in sorted(x.items()))
    if isinstance(x, list | tuple):
        return type(x).__name__, tuple(map(_freeze, x))
    if isinstance(x, np.ndarray | np.generic | float):
        return Constant(np.asarray(x)).key
    try:
        hash(x)
    except TypeError:
        return _Identity(x)
    return x


@dataclasses.dataclass(frozen=True, eq=False)
class _Identity:
    """Equal to itself; holds on to what it stands for."""

    of: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.of is self.of

    def __hash__(self) -> int:
        return id(self.of)


def _freeze_jaxpr(jaxpr: Jaxpr) -> Hashable:
    index: dict[Any, int] = {}

    def read(x: Any) -> Hashable:
        if isinstance(x, Literal):
            return Constant(_literal(x)).key
        return index.setdefault(x, len(index)), Aval.of(x.aval)

    inputs = tuple(map(read, (*jaxpr.constvars, *jaxpr.invars)))
    steps = tuple(
        (
            eqn.primitive.name,
            _freeze(dict(eqn.params)),
            tuple(map(read, eqn.invars)),
            tuple(map(read, eqn.outvars)),
        )
        for eqn in jaxpr.eqns
    )
    return inputs, steps, tuple(map(read, jaxpr.outvars))
