"""What the primitives of passes that have kernels share: a `Call` says all that differs.

Each primitive is a pair: the outer one is what a program holds, and is batched and differentiated;
it lowers through `_sharding.py` to the inner one, which sees one device's shard and lowers to what
`_backends.py` picks.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import dispatch
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir, xla
from jax.sharding import NamedSharding, PartitionSpec, use_abstract_mesh

from jax_flash import _backends, _batching, _platform, _sharding
from jax_flash._call import Call


def define(name: str) -> Primitive:
    """Makes the pair of primitives and returns the outer one.

    Its parameter `call` is a Call; its operands and results are those that it names. It has no
    derivative yet.
    """
    kernel = _primitive(f"{name}_kernel")
    for platform in ("cpu", "cuda", "default"):
        rule = functools.partial(_lower_kernel, platform)
        mlir.register_lowering(kernel, rule, None if platform == "default" else platform)

    def run_kernel(call, *operands):
        return tuple(kernel.bind(*operands, call=call))

    def lower(ctx, *operands, call):
        partitioned = _sharding.partitioned(run_kernel, call, _devices(ctx))
        return mlir.lower_fun(partitioned, multiple_results=True)(ctx, *operands)

    outer = _primitive(name)
    outer.def_impl(functools.partial(_evaluate, outer))
    batching.primitive_batchers[outer] = functools.partial(_batch, outer)
    mlir.register_lowering(outer, lower)
    # custom_partitioning is inside of the lowering, where jit does not look for it.
    dispatch.prim_requires_devices_during_lowering.add(outer)
    return outer


def _primitive(name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(_abstract_eval)
    return primitive


# ---- abstract eval -------------------------------------------------------------------------------


def _abstract_eval(*avals: Any, call: Call) -> tuple[Any, ...]:
    return call.result_avals(call.name_operands(avals))


# ---- batching ------------------------------------------------------------------------------------


def _batch(primitive: Primitive, operands, dims, *, call: Call):
    return _batching.batch(primitive, call.operands, operands, dims, call.own, call=call)


# ---- evaluation and lowering ---------------------------------------------------------------------


def _evaluate(primitive: Primitive, *operands: Any, call: Call) -> Any:
    """Evaluates a primitive outside of jit; to jax_debug_infs an lse of -inf is no fault."""
    if "lse" not in call.results or not jax.debug_infs.value:
        return xla.apply_primitive(primitive, *operands, call=call)
    with jax.debug_infs(False):
        results = xla.apply_primitive(primitive, *operands, call=call)
    if jnp.isinf(results[call.results.index("out")]).any():
        raise FloatingPointError(f"invalid value (inf) encountered in {primitive.name}")
    return results


def _devices(ctx: Any) -> int:
    """Counts the devices that a program is lowered for; inside of shard_map those of its mesh."""
    context = ctx.module_context.axis_context
    return context.mesh.size if hasattr(context, "mesh") else getattr(context, "num_devices", 1)


def _lower_kernel(platform: str, ctx: Any, *operands: Any, call: Call) -> Any:
    shapes = call.shapes(call.name_operands(ctx.avals_in))
    if platform == "default":
        platform = next(x for x in ctx.module_context.platforms if x not in ("cpu", "cuda"))
    backend = _backends.choose(platform, call, shapes)
    function = functools.partial(_backends.BACKENDS[backend].run, call)
    with _platform.traced_for(platform):
        return _lower_function(function, ctx, *operands)


def _lower_function(function: Callable[..., Any], ctx: Any, *operands: Any) -> Any:
    """Lowers a function of one device's operands by tracing it."""
    mesh = ctx.avals_in[0].sharding.mesh
    if not mesh.manual_axes:
        # One device's shard: a mesh with explicit axes around it says nothing about these arrays.
        mesh = _sharding.NO_MESH
        avals = [
            x.update(sharding=NamedSharding(mesh, PartitionSpec(*[None] * x.ndim)))
            for x in ctx.avals_in
        ]
        ctx = ctx.replace(avals_in=avals)
    with use_abstract_mesh(mesh), _sharding.x64_of(ctx.avals_in):
        return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)
