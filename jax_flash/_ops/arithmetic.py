"""Arithmetic in JAX beside the primitives: how it is differentiated, and that XLA places it."""

import functools
from typing import Any

import jax
from jax.interpreters import ad
from jax.sharding import AxisType, auto_axes, use_abstract_mesh

from jax_flash._call import Call


def jvp_of(call: Call, function, primals, tangents):
    """Differentiates a function with the call's results along some of its operands.

    Arguments:
      call: says what the first operands are and how the results are sharded.
      function: of the primals.
      primals: its operands.
      tangents: theirs by index; those that are missing or an `ad.Zero` are zero.

    Returns: the function's results, and their tangents.
    """
    tangents = {i: x for i, x in tangents.items() if type(x) is not ad.Zero}

    def of_moving(*moving):
        operands = list(primals)
        for i, x in zip(tangents, moving, strict=True):
            operands[i] = x
        avals: dict[str, Any] = dict(
            zip(call.operands, map(jax.typeof, operands), strict=False)  # more may follow
        )
        specs = tuple(x.sharding.spec for x in call.result_avals(avals))
        return with_auto_axes(function, avals["q"].sharding.mesh, specs)(*operands)

    return jax.jvp(of_moving, [primals[i] for i in tangents], list(tangents.values()))


@functools.lru_cache(maxsize=256)
def with_auto_axes(function, mesh, specs):
    """Lets XLA place the arithmetic of a function, also where the mesh has explicit axes.

    There its results are sharded by `specs`.
    """
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = tuple(name for name, kind in types if kind == AxisType.Explicit)
    if not explicit:
        return function

    # Where some axes are manual, auto_axes serves traced operands only.
    placed = jax.jit(auto_axes(function, axes=explicit, out_sharding=specs))

    def wrapped(*operands):
        with use_abstract_mesh(mesh):
            return placed(*operands)

    return wrapped
