"""How the call is differentiated.

flash_forward has a JVP rule: its linear part is the primitive flash_tangent, whose transpose is
flash_backward. So reverse mode runs the kernels with the residuals (q, k, v, out, lse), and
forward mode works too, in the arithmetic of blockwise.py. flash_backward and flash_tangent are
differentiated through blockwise.py, to any order. flash_forward is linear in v and has a transpose
along it.

Under `jax.checkpoint`, a policy that saves the names `flash_out` and `flash_lse` keeps the
backward pass from running the forward kernel again.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla
from jax.sharding import AxisType, auto_axes, use_abstract_mesh

from jax_flash import _backends, _batching, blockwise
from jax_flash._primitives import (
    Backward,
    Forward,
    flash_backward_p,
    flash_forward_p,
)
from jax_flash._problem import Problem, Shapes
from jax_flash._terms import DIFFERENTIABLE
from jax_flash._varying import vary_over


def attend(
    problem: Problem, backend: str | None, *operands: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes attention, differentiably.

    Arguments:
      problem: what to compute.
      backend: which backend runs it; None: the first that can.
      operands: q, k, v, and problem.terms, as `_validate.prepare` makes them.

    Returns: out `[*B, T, N, Hv]` in the dtype of q, and lse `[*B, N, T]` in problem.sum_dtype.

    Raises: as `_backends.require`.
    """
    q, k, v, *_ = operands
    shapes = Shapes.of(q, k, v)
    call = Forward(problem, backend)
    _backends.require(call, shapes)
    operands = vary_over(operands, operands)
    if shapes.empty:
        return vary_over(_nothing(call, operands), operands)
    out, lse = flash_forward_p.bind(*operands, call=call)
    return out, lse


def _nothing(call: Forward, operands) -> tuple[jax.Array, jax.Array]:
    """Computes the results where no query has a key, sharded as those of a call with keys."""
    avals = call.result_avals(dict(zip(call.operands, map(jax.typeof, operands), strict=True)))
    out, lse = (jnp.zeros(x.shape, x.dtype, out_sharding=x.sharding) for x in avals)
    sinks = call.problem.name_terms(operands[3:]).get("sinks")
    with jax.debug_infs(False):
        if sinks is None:
            return out, lse - jnp.inf
        sharding = avals[1].sharding
        spread = _with_auto_axes(_spread_sinks, sharding.mesh, sharding.spec)
        return out, spread(lse, sinks)


def _spread_sinks(lse, sinks) -> jax.Array:
    return lse + sinks[..., None]


def _forward_jvp(primals, tangents, *, call: Forward):
    out, lse = flash_forward_p.bind(*primals, call=call)
    out, lse = checkpoint_name(out, "flash_out"), checkpoint_name(lse, "flash_lse")
    tangents = dict(zip(call.operands, tangents, strict=True))
    active = tuple(
        name
        for name in ("q", "k", "v", *DIFFERENTIABLE)
        if name in tangents and type(tangents[name]) is not ad.Zero
    )
    if not active:
        return (out, lse), [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in (out, lse)]
    tangents = [tangents[name] for name in active]
    return (out, lse), flash_tangent_p.bind(*primals, out, lse, *tangents, call=call, active=active)


ad.primitive_jvps[flash_forward_p] = _forward_jvp


def _backward_jvp(primals, tangents, *, call: Backward):
    return _jvp_of(call, call.blockwise, primals, _nonzero(tangents))


ad.primitive_jvps[flash_backward_p] = _backward_jvp


def _nonzero(tangents) -> dict[int, Any]:
    return {i: x for i, x in enumerate(tangents) if type(x) is not ad.Zero}


def _jvp_of(call: Forward, function, primals, tangents: dict[int, Any]):
    """Differentiates a function with the call's results along some of its operands, by index."""

    def of_moving(*moving):
        operands = list(primals)
        for i, x in zip(tangents, moving, strict=True):
            operands[i] = x
        avals = dict(zip(call.operands, map(jax.typeof, operands), strict=False))
        specs = tuple(x.sharding.spec for x in call.result_avals(avals))
        return _with_auto_axes(function, avals["q"].sharding.mesh, specs)(*operands)

    return jax.jvp(of_moving, [primals[i] for i in tangents], list(tangents.values()))


@functools.lru_cache(maxsize=256)
def _with_auto_axes(function, mesh, specs):
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


# flash_tangent: *operands of flash_forward, out, lse, tangents of the operands named in `active`
# -> tangents of out and lse. Linear in the tangents; out and lse serve its transpose.


def _tangent(*operands: Any, call: Forward, active: tuple[str, ...]) -> Any:
    count = len(call.operands)
    moving = (call.operands.index(name) for name in active)
    tangents = dict(zip(moving, operands[count + 2 :], strict=True))
    return _jvp_of(call, call.blockwise, operands[:count], tangents)[1]


def _tangent_abstract_eval(*avals, call: Forward, active: tuple[str, ...]):
    del active
    return call.result_avals(dict(zip(call.operands, avals, strict=False)))


def _tangent_jvp(primals, tangents, *, call: Forward, active: tuple[str, ...]):
    function = functools.partial(_tangent, call=call, active=active)
    return _jvp_of(call, function, primals, _nonzero(tangents))


def _tangent_transpose(cotangents, *operands, call: Forward, active: tuple[str, ...]):
    dout, dlse = cotangents
    count = len(call.operands)
    primals, (out, lse) = operands[:count], operands[count : count + 2]
    nothing = [None] * (count + 2)
    with_dlse = type(dlse) is not ad.Zero
    if type(dout) is ad.Zero and not with_dlse:
        return [*nothing, *(None for _ in active)]
    dout = ad.instantiate_zeros(dout)
    wanted = tuple(name for name in active if name != "sinks")
    q, k, v, *terms = primals
    by_name = {}
    if wanted:
        backward = Backward(call.problem, call.backend, with_dlse, wanted)
        cotangents = (dout, dlse) if with_dlse else (dout,)
        gradients = flash_backward_p.bind(q, k, v, out, lse, *cotangents, *terms, call=backward)
        by_name = dict(zip(wanted, gradients, strict=True))
    if "sinks" in active:
        sinks = call.problem.name_terms(terms)["sinks"]
        mesh, spec = jax.typeof(q).sharding.mesh, jax.typeof(sinks).sharding.spec
        gradient = _with_auto_axes(_sinks_gradient, mesh, spec)
        by_name["sinks"] = gradient(sinks, out, lse, dout, dlse if with_dlse else None)
    return [*nothing, *(by_name[name] for name in active)]


def _sinks_gradient(sinks, out, lse, dout, dlse) -> jax.Array:
    """Computes the gradient of sinks `[*B or 1, N]`: -sum over T of its weight times delta."""
    delta = blockwise.row_delta(out, lse, dout, dlse, sinks)  # [*B, N, T]
    # An lse of -inf: the sink is -inf too, and the row sees nothing.
    empty = lse == -jnp.inf
    weight = jnp.exp(jnp.where(empty, -jnp.inf, sinks[..., None] - jnp.where(empty, 0.0, lse)))
    gradient = -jnp.sum(weight * delta, axis=-1)
    shared = [axis for axis, size in enumerate(sinks.shape[:-1]) if size == 1]
    return jnp.sum(gradient, axis=shared, keepdims=True)


def _forward_transpose(cotangents, *operands, call: Forward):
    """Transposes flash_forward along v, in which out is linear; lse does not depend on it."""
    linear = [
        name for name, x in zip(call.operands, operands, strict=True) if ad.is_undefined_primal(x)
    ]
    if linear != ["v"]:
        raise NotImplementedError(
            f"attention is transposed along {', '.join(linear)}; it is linear in value alone"
        )
    q, k, v, *terms = operands
    dout, _ = cotangents
    primals = (q, k, ad.instantiate_zeros(ad.Zero(v.aval)), *terms)
    out, lse = flash_forward_p.bind(*primals, call=call)
    cotangents = (dout, ad.Zero(jax.typeof(lse)))
    *_, dv = _tangent_transpose(cotangents, *primals, out, lse, v, call=call, active=("v",))
    return [dv if name == "v" else None for name in call.operands]


ad.primitive_transposes[flash_forward_p] = _forward_transpose


def _tangent_batch(operands, dims, *, call: Forward, active: tuple[str, ...]):
    names = (*call.operands, "out", "lse", *active)
    return _batching.batch(flash_tangent_p, names, operands, dims, call=call, active=active)


flash_tangent_p = Primitive("flash_tangent")
flash_tangent_p.multiple_results = True
flash_tangent_p.def_abstract_eval(_tangent_abstract_eval)
flash_tangent_p.def_impl(functools.partial(xla.apply_primitive, flash_tangent_p))
ad.primitive_jvps[flash_tangent_p] = _tangent_jvp
ad.primitive_transposes[flash_tangent_p] = _tangent_transpose
batching.primitive_batchers[flash_tangent_p] = _tangent_batch
mlir.register_lowering(flash_tangent_p, mlir.lower_fun(_tangent, multiple_results=True))
