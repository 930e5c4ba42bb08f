"""Varying axes: which manual mesh axes of a shard_map the values of an array differ over.

Operands of one primitive, and the carry of one scan, must agree in them.
"""

from typing import Any

import jax
from jax import lax


def vary_over(tree: Any, like: Any) -> Any:
    """Casts every array of a tree to vary over all the axes that any array of `like` varies over.

    The transpose of the cast is the sum over those axes, which is the gradient that an operand
    shared by several devices needs. Outside of shard_map it does nothing.
    """
    axes = frozenset().union(*(varying_axes(x) for x in jax.tree.leaves(like)))

    def cast(x):
        missing = tuple(sorted(axes - varying_axes(x), key=str))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree) if axes else tree


def varying_axes(x: Any) -> frozenset:
    aval = jax.typeof(x)
    # jax before 0.10 keeps the axes in `vma`, later ones in `manual_axis_type`.
    kind = getattr(aval, "manual_axis_type", None)
    return aval.vma if kind is None else kind.varying
