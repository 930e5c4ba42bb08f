"""What a user's function computes: its steps, as a frozen value that evaluates and compares itself.

A program is built of a jaxpr. What does not depend on its inputs is computed beforehand, and arrays
among that become inputs. Its derivatives are programs again. `_function.py` makes one of a function
and says where its inputs come from.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive
from jax.sharding import AbstractMesh, use_abstract_mesh

from jax_flash._varying import vary_over

NO_MESH = AbstractMesh((), ())


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

    def apply(self, inputs: Sequence[Any]) -> list[Any]:
        """Does the steps one by one in JAX; inputs: arrays of their shapes.

        Those with derivatives of a user's are done as they were traced.
        """
        values: dict[int, Any] = dict(enumerate(inputs))

        def read(x: Value) -> Any:
            return values[x] if isinstance(x, int) else vary_over(x.value, inputs)

        for step in self.steps:
            results = bind(step.primitive, [read(x) for x in step.inputs], step.params)
            values.update(zip(step.outputs, results, strict=True))
        return [read(x) for x in self.results]

    def with_numbers(self) -> tuple[Program, list[np.ndarray]]:
        """Makes its constants inputs behind the others, and lists what they were."""
        first = len(self.inputs)
        values = (*(x for step in self.steps for x in step.inputs), *self.results)
        constants = [x for x in values if isinstance(x, Constant)]
        places = iter(range(first, first + len(constants)))

        def moved(values: Sequence[Value]) -> tuple[int, ...]:
            return tuple(
                next(places) if isinstance(x, Constant) else x + len(constants) * (x >= first)
                for x in values
            )

        steps = tuple(
            dataclasses.replace(step, inputs=moved(step.inputs), outputs=moved(step.outputs))
            for step in self.steps
        )
        inputs = (*self.inputs, *(Aval.of(x.value) for x in constants))
        return Program(inputs, steps, moved(self.results)), [x.value for x in constants]

    @functools.cached_property
    def opened(self) -> Program:
        """The same with custom derivatives left out."""
        return self.retrace(self.apply, self.inputs, opens_custom=True)

    @functools.cached_property
    def moved(self) -> Program:
        """The results and their tangents, of the inputs and the tangents of floats among them."""

        def moved(*operands):
            inputs, moving = operands[: len(self.inputs)], list(operands[len(self.inputs) :])
            tangents = [
                moving.pop(0) if aval.is_float else np.zeros(aval.shape, jax.dtypes.float0)
                for aval in self.inputs
            ]
            results = jax.jvp(lambda *x: self.apply(x), tuple(inputs), tuple(tangents))
            return [*results[0], *results[1]]

        floats = [aval for aval in self.inputs if aval.is_float]
        return self.retrace(lambda x: moved(*x), [*self.inputs, *floats])

    @functools.cached_property
    def ruled(self) -> Program:
        """The results as the rules of custom derivatives write them, whose derivatives these have.

        They are part of `moved`, but what is computed with tangents does not count as known to
        jax 0.12.
        """

        def ruled(inputs):
            tangents = [np.zeros(aval.shape, aval.dtype) for aval in self.inputs if aval.is_float]
            return self.moved.apply([*inputs, *tangents])[: len(self.results)]

        return self.retrace(ruled, self.inputs)

    @functools.cached_property
    def with_slope(self) -> Program:
        """The first result, and its derivative by the first input."""

        def both(inputs):
            first, *rest = inputs
            y, pull = jax.vjp(lambda first: self.apply([first, *rest])[0], first)
            return [y, *pull(jnp.ones_like(y))]

        return self.retrace(both, self.inputs, opens_custom=True)

    def retrace(
        self, function: Callable[..., Any], inputs: Sequence[Aval], opens_custom: bool = False
    ) -> Program:
        with use_abstract_mesh(NO_MESH):  # nothing of the caller's matters
            structs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in inputs]
            closed = jax.make_jaxpr(lambda *x: function(x))(*structs)
        return Builder(inputs, opens_custom, inlines=True).build(closed, closed.consts)[0]


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


class Builder:
    """Collects the steps that depend on a program's inputs; the rest is evaluated.

    Captured arrays of bfloat16 and float16 are read as float32, so that their gradients are summed
    in it; single elements are rounded back where more than a conversion reads them.

    Arguments:
      inputs: of the program.
      opens_custom: leaves custom derivatives out.
      inlines: arrays that are no inputs are constants of the program, not captured. They are those
        that a derivative makes, ones for instance: whose values are known.
      computes_arrays: evaluates what depends on captured arrays alone; else of numbers alone.
    """

    def __init__(
        self,
        inputs: Sequence[Aval],
        opens_custom: bool = False,
        inlines: bool = False,
        computes_arrays: bool = True,
    ) -> None:
        self.inputs = [_Computed(aval) for aval in inputs]
        self.inlines = inlines
        self.computes_arrays = computes_arrays
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
            elif (known := self._known(operands)) is not None:
                results = [_Known(x) for x in _compute(eqn, known, self.inlines)]
            else:
                results = self._record(eqn, operands)
            values.update(zip(eqn.outvars, results, strict=True))
        return [read(x) for x in jaxpr.outvars]

    def _known(self, operands: Sequence[_Known | _Computed]) -> list[Any] | None:
        """Returns the values of what is evaluated beforehand."""
        values = [x.value for x in operands if isinstance(x, _Known)]
        early = self.computes_arrays or all(map(_is_number, values))
        return values if early and len(values) == len(operands) else None

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
    here = eqn.primitive.name == "axis_index"  # of a device, or a member of vmap
    if now or (all(_is_number(x) for x in operands) and not here):
        with jax.ensure_compile_time_eval(), use_abstract_mesh(NO_MESH):
            arrays = [jnp.asarray(x) for x in operands]
            results = bind(eqn.primitive, arrays, _without_mesh(eqn.params))
            keys = jax.dtypes.extended
            return [x if jnp.issubdtype(x.dtype, keys) else np.asarray(x) for x in results]
    arrays = [jnp.asarray(x) for x in operands]
    return bind(eqn.primitive, vary_over(arrays, arrays), eqn.params)


def bind(primitive: Primitive, operands: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    made: Any = primitive.get_bind_params(dict(params))
    # jax before 0.10 returns the functions apart, later ones among the parameters.
    functions, params = made if isinstance(made, tuple) else ((), made)
    results = primitive.bind(*functions, *operands, **params)
    return list(results) if primitive.multiple_results else [results]


# ---- what programs are compared by ---------------------------------------------------------------


def derivative_keys(program: Program, depth: int = 2) -> Hashable:
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
    return program.key, derivative_keys(program.moved, depth - 1)


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
