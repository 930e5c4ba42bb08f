"""Finds out which axes of an array were repeated, by the shapes of what it was made of alone.

An axis is a list of factors, the outermost first. A factor is repeated if the array does not change
along it: `jnp.repeat(key, 4, axis=2)` makes of an axis of 8 the factors 8 and 4, the second
repeated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jax_flash._advise.graph import Graph, Node

Factor = tuple[int, bool]  # size, repeated
Axes = list[list[Factor]]

# The value at a place is a function of the operands' values there.
_ELEMENTWISE = {
    "add", "add_any", "sub", "mul", "div", "neg", "max", "min", "exp", "exp2", "log", "tanh", "sin",
    "cos", "sqrt", "rsqrt", "square", "integer_pow", "pow", "logistic", "abs", "sign", "select_n",
    "convert_element_type", "reduce_precision", "copy", "copy_p", "name", "sharding_constraint",
    "stop_gradient", "mesh_cast", "reshard", "pvary", "optimization_barrier",
}  # fmt: skip


def repeats(graph: Graph, node: Node, axis: int) -> int:
    """Returns how often each entry along an axis is repeated, one behind the other."""
    times = 1
    for size, repeated in reversed(_axes(graph, node, {})[axis]):
        if not repeated:
            return times
        times *= size
    return times


def _axes(graph: Graph, node: Node, known: dict[tuple[int, int, int], Axes]) -> Axes:
    shape = node.aval.shape
    if node.equation is None:
        return [[(size, not shape)] for size in shape]
    key = (id(node.scope), id(node.equation), node.index)
    if key not in known:
        known[key] = [[(size, False)] for size in shape]  # of a node that is too deep
        known[key] = _of_equation(graph, node, known)
    return known[key]


def _of_equation(graph: Graph, node: Node, known: dict[tuple[int, int, int], Axes]) -> Axes:
    shape, parameters = node.aval.shape, node.equation.params
    plain: Axes = [[(size, False)] for size in shape]
    inputs = graph.inputs(node)
    if node.name == "optimization_barrier":
        inputs = [inputs[node.index]]
    if node.name in _ELEMENTWISE:
        return _common(plain, [_spread(graph, x, shape, known) for x in inputs])
    if node.name in ("reshape", "squeeze", "expand_dims"):
        factors = [x for axis in _axes(graph, inputs[0], known) for x in axis]
        return _regroup(factors, shape) or plain
    if node.name == "transpose":
        axes = _axes(graph, inputs[0], known)
        return [axes[i] for i in parameters["permutation"]]
    if node.name == "broadcast_in_dim":
        axes = _axes(graph, inputs[0], known)
        made: Axes = [[(size, True)] for size in shape]
        for own, to in enumerate(parameters["broadcast_dimensions"]):
            if inputs[0].aval.shape[own] == shape[to]:
                made[to] = axes[own]
        return made
    if node.name in ("slice", "concatenate", "rev", "pad", "dynamic_slice", "split"):
        inputs = inputs[:1] if node.name == "dynamic_slice" else inputs
        arrays = [x for x in inputs if len(x.aval.shape) == len(shape)]
        kept: Axes = plain
        for i, size in enumerate(shape):
            of_axis = [_axes(graph, x, known)[i] for x in arrays]
            if all(x.aval.shape[i] == size for x in arrays) and parameters.get("dimension") != i:
                kept[i] = _common([plain[i]], [[axis] for axis in of_axis])[0]
        return kept
    return plain


def _spread(
    graph: Graph, node: Node, shape: Sequence[int], known: dict[tuple[int, int, int], Axes]
) -> Axes:
    if node.aval.shape == tuple(shape):
        return _axes(graph, node, known)
    return [[(size, True)] for size in shape]  # a scalar


def _common(plain: Axes, several: Sequence[Axes]) -> Axes:
    """Combines arrays of one shape: along what all are repeated, their function is."""
    found = plain
    for i in range(len(plain)):
        factors = several[0][i]
        for other in several[1:]:
            factors = _meet(factors, other[i])
        found[i] = factors or plain[i]
    return found


def _meet(a: Sequence[Factor], b: Sequence[Factor]) -> list[Factor]:
    """Refines two ways to write an axis to one; [] where there is none."""
    fine = _regroup(a, [size for size, _ in b])
    if fine is None:
        return []
    return [
        (size, repeated and other)
        for group, (_, other) in zip(fine, b, strict=True)
        for size, repeated in group
    ]


def _regroup(factors: Sequence[Factor], shape: Sequence[int]) -> Axes | None:
    """Groups factors to axes of other sizes, and splits those that are of two axes."""
    waiting = [x for x in factors if x[0] != 1]
    found: Axes = []
    for size in shape:
        group: list[Factor] = []
        while (left := size // math.prod(n for n, _ in group)) != 1:
            if not waiting:
                return None
            n, repeated = waiting.pop(0)
            shared = math.gcd(n, left)
            if shared not in (n, left):
                return None
            group.append((shared, repeated))
            if n != shared:
                waiting.insert(0, (n // shared, repeated))
        found.append(group or [(1, False)])
    return found
