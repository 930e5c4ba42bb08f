"""The primitives flash_forward and flash_backward: abstract eval, batching, lowering per platform.

    flash_forward:  q, k, v, *terms                          -> out, lse
    flash_backward: q, k, v, out, lse, dout, [dlse], *terms  -> those asked for of dq, dk, dv, dbias

Shapes and meaning are those of `blockwise.forward` and `blockwise.backward`. Each primitive is a
pair: the outer one is what a program holds, and is batched and differentiated; it lowers through
`_sharding.py` to the inner one, which sees one device's shard and lowers to a kernel.
Read next: `_batching.py`; `_sharding.py`; `ffi/operands.h` for the other end of the custom call.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import dispatch
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir, xla
from jax.sharding import NamedSharding, PartitionSpec, use_abstract_mesh

from jax_flash import _backends, _batching, _gpu, _native, _sharding, blockwise
from jax_flash._problem import Problem, Shapes
from jax_flash._terms import BROADCAST


@dataclasses.dataclass(frozen=True)
class Forward:
    """One flash_forward, operands aside."""

    problem: Problem
    backend: str | None  # as the user named it

    target = "forward"

    @property
    def operands(self) -> tuple[str, ...]:
        return ("q", "k", "v", *self.problem.terms)

    @property
    def results(self) -> tuple[str, ...]:
        return ("out", "lse")

    def result_avals(self, operands: dict[str, Any]) -> tuple[Any, ...]:
        q, v = operands["q"], operands["v"]
        *batch, q_len, q_heads, _ = q.shape
        *batch_spec, _, heads_spec, _ = _spec(q)
        return (
            _update(
                q, (*q.shape[:-1], v.shape[-1]), q.dtype, (*batch_spec, None, heads_spec, None)
            ),
            _update(
                q,
                (*batch, q_heads, q_len),
                self.problem.sum_dtype,
                (*batch_spec, heads_spec, None),
            ),
        )

    def attributes(self) -> dict[str, Any]:
        """Returns the attributes of the custom call."""
        return {"problem": self.problem.attribute()}

    @property
    def whole(self) -> "Forward":
        """The same with all results that the kernels compute."""
        return self

    def blockwise(self, *operands: jax.Array) -> tuple[jax.Array, ...]:
        return blockwise.forward(self.problem, *operands)


@dataclasses.dataclass(frozen=True)
class Backward(Forward):
    """One flash_backward, operands aside."""

    with_dlse: bool
    gradients: tuple[str, ...]  # to what they are, in the order of q, k, v, bias

    target = "backward"

    @property
    def operands(self) -> tuple[str, ...]:
        dlse = ("dlse",) if self.with_dlse else ()
        return ("q", "k", "v", "out", "lse", "dout", *dlse, *self.problem.terms)

    @property
    def results(self) -> tuple[str, ...]:
        return tuple(f"d{name}" for name in self.gradients)

    def result_avals(self, operands: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(operands[name[1:]].update(weak_type=False) for name in self.results)

    def attributes(self) -> dict[str, Any]:
        flags = {"with_dlse": self.with_dlse, "with_dbias": self.with_dbias}
        return super().attributes() | flags

    @property
    def with_dbias(self) -> bool:
        return "bias" in self.gradients

    @property
    def whole(self) -> "Backward":
        bias = ("bias",) if self.with_dbias else ()
        return dataclasses.replace(self, gradients=("q", "k", "v", *bias))

    def blockwise(self, *operands: jax.Array) -> tuple[jax.Array, ...]:
        results = blockwise.backward(
            self.problem, *operands, with_dlse=self.with_dlse, with_dbias=self.with_dbias
        )
        named = zip(self.whole.results, results, strict=True)
        return tuple(x for name, x in named if name in self.results)


def passes(
    problem: Problem, backend: str | None = None, *, with_dlse: bool = False
) -> dict[str, Forward]:
    """Returns the passes of a call that is differentiated in all that has a gradient, by name."""
    bias = ("bias",) if "bias" in problem.terms else ()
    return {
        "forward": Forward(problem, backend),
        "backward": Backward(problem, backend, with_dlse, ("q", "k", "v", *bias)),
    }


def _spec(aval: Any) -> tuple[Any, ...]:
    spec = tuple(aval.sharding.spec)
    return spec + (None,) * (aval.ndim - len(spec))


def _update(aval: Any, shape: tuple[int, ...], dtype: Any, spec: tuple[Any, ...]) -> Any:
    """Derives an abstract value that varies over the same manual axes."""
    sharding = NamedSharding(aval.sharding.mesh, PartitionSpec(*spec))
    return aval.update(shape=shape, dtype=jnp.dtype(dtype), weak_type=False, sharding=sharding)


def _abstract_eval(*avals: Any, call: Forward) -> tuple[Any, ...]:
    return call.result_avals(dict(zip(call.operands, avals, strict=True)))


def _primitive(name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(_abstract_eval)
    return primitive


def _batch(primitive: Primitive, operands, dims, *, call: Forward):
    # Every member of the batch has gradients to itself.
    own = call.gradients if isinstance(call, Backward) else ()
    return _batching.batch(primitive, call.operands, operands, dims, own, call=call)


# Lowering.


def _lower_kernel(platform: str, ctx: Any, *operands: Any, call: Forward) -> Any:
    q, k, v, *_ = ctx.avals_in
    shapes = Shapes.of(q, k, v)
    backend = _backends.choose(platform, call, shapes)
    match backend:
        case "cpu":
            function = functools.partial(_batching.run_kernel, _call_cpu, call)
        case "cuda":
            function = functools.partial(_batching.run_kernel, _call_cuda, call)
        case _:
            function = call.blockwise
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
    with use_abstract_mesh(mesh):
        return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)


def _call_cpu(call: Forward, *operands: jax.Array) -> tuple[jax.Array, ...]:
    custom_call = jax.ffi.ffi_call(f"jax_flash_cpu_{call.target}", _results(call, operands))
    return tuple(custom_call(*operands, **call.attributes()))


def _results(call: Forward, operands: Sequence[jax.Array]) -> list[jax.ShapeDtypeStruct]:
    avals = call.result_avals(dict(zip(call.operands, map(jax.typeof, operands), strict=True)))
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]


def _call_cuda(call: Forward, *operands: jax.Array) -> tuple[jax.Array, ...]:
    named = dict(zip(call.operands, operands, strict=True))
    batch = named["q"].shape[:-3]
    for name in set(BROADCAST) & set(named):
        leading = named[name].shape[: len(batch)]
        if leading not in (batch, (1,) * len(batch)):
            # The kernels read a term of one batch row, or of every one.
            rest = named[name].shape[len(batch) :]
            named[name] = jnp.broadcast_to(named[name], (*batch, *rest))
    shapes = Shapes.of(named["q"], named["k"], named["v"], named)
    plan = _gpu.plan(call, shapes, _gpu.spec.for_lowering())
    if _gpu.spec.present() is not None:
        # Compiling belongs to the compilation of the caller's program, not to its first step.
        for entry in plan.entries:
            _native.load_kernel(**plan.program, entry=entry)

    results = _results(call, tuple(named.values()))
    custom_call = jax.ffi.ffi_call(plan.target, [*results, *plan.workspaces.values()])
    outputs = custom_call(*named.values(), **call.attributes(), **plan.attributes)
    wanted = _results(call, operands)  # of a bias that was broadcast here the gradient is summed
    return tuple(_sum_to(x, to.shape) for x, to in zip(outputs, wanted, strict=False))


def _sum_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Sums along the dims that are 1 in a shape."""
    axes = tuple(i for i, (own, to) in enumerate(zip(x.shape, shape, strict=True)) if own != to)
    return jnp.sum(x, axes, dtype=jnp.float32, keepdims=True).astype(x.dtype) if axes else x


def _define(name: str) -> Primitive:
    """Makes the pair of primitives and returns the outer one."""
    kernel = _primitive(f"{name}_kernel")
    for platform in ("cpu", "cuda"):
        mlir.register_lowering(kernel, functools.partial(_lower_kernel, platform), platform)
    mlir.register_lowering(kernel, functools.partial(_lower_kernel, "default"))

    def run_kernel(call, *operands):
        return tuple(kernel.bind(*operands, call=call))

    def partitioned(*operands, call):
        return _sharding.partitioned(run_kernel, call)(*operands)

    outer = _primitive(name)
    outer.def_impl(functools.partial(_evaluate, outer))
    batching.primitive_batchers[outer] = functools.partial(_batch, outer)
    mlir.register_lowering(outer, mlir.lower_fun(partitioned, multiple_results=True))
    # custom_partitioning is inside of the lowering, where jit does not look for it.
    dispatch.prim_requires_devices_during_lowering.add(outer)
    return outer


def _evaluate(primitive: Primitive, *operands: Any, call: Forward) -> Any:
    """Evaluates a primitive outside of jit; to jax_debug_infs an lse of -inf is no fault."""
    if "lse" not in call.results or not jax.debug_infs.value:
        return xla.apply_primitive(primitive, *operands, call=call)
    with jax.debug_infs(False):
        out, lse = xla.apply_primitive(primitive, *operands, call=call)
    if jnp.isinf(out).any():
        raise FloatingPointError(f"invalid value (inf) encountered in {primitive.name}")
    return out, lse


flash_forward_p = _define("flash_forward")
flash_backward_p = _define("flash_backward")
