"""flash_tangent: the derivative of flash_forward along some of its operands.

    *operands of flash_forward, out, lse, tangents of the operands named in `active`
    -> tangents of out and lse

Linear in the tangents; out and lse serve its transpose, which is flash_backward. It is computed in
the arithmetic of blockwise.py.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from jax_flash import _batching, blockwise
from jax_flash._call import Call
from jax_flash._ops.arithmetic import jvp_of, with_auto_axes
from jax_flash._ops.backward import Backward, flash_backward_p

flash_tangent_p = Primitive("flash_tangent")
flash_tangent_p.multiple_results = True


# ---- abstract eval -------------------------------------------------------------------------------


def _abstract_eval(*avals, call: Call, active: tuple[str, ...]):
    del active
    return call.result_avals(call.name_operands(avals[: len(call.operands)]))


flash_tangent_p.def_abstract_eval(_abstract_eval)


# ---- batching ------------------------------------------------------------------------------------


def _batch(operands, dims, *, call: Call, active: tuple[str, ...]):
    names = (*call.operands, "out", "lse", *active)
    return _batching.batch(flash_tangent_p, names, operands, dims, call=call, active=active)


batching.primitive_batchers[flash_tangent_p] = _batch


# ---- derivative ----------------------------------------------------------------------------------


def _jvp(primals, tangents, *, call: Call, active: tuple[str, ...]):
    function = functools.partial(_tangent, call=call, active=active)
    return jvp_of(call, function, primals, dict(enumerate(tangents)))


def of_kernels(active: tuple[str, ...]) -> tuple[str, ...]:
    """Names those of the operands whose gradients are flash_backward's."""
    return tuple(name for name in active if name != "sinks")


def transpose(cotangents, *operands, call: Call, active: tuple[str, ...]):
    """Computes the gradients to the tangents by flash_backward; to the sinks by themselves."""
    dout, dlse = cotangents
    count = len(call.operands)
    primals, (out, lse) = operands[:count], operands[count : count + 2]
    nothing = [None] * (count + 2)
    with_dlse = type(dlse) is not ad.Zero
    if type(dout) is ad.Zero and not with_dlse:
        return [*nothing, *(None for _ in active)]
    dout = ad.instantiate_zeros(dout)
    wanted = of_kernels(active)
    q, k, v, *terms = primals
    by_name = {}
    if wanted:
        backward = Backward(call.problem, call.backend, with_dlse, wanted, of_forward=True)
        cotangents = (dout, dlse) if with_dlse else (dout,)
        gradients = flash_backward_p.bind(q, k, v, out, lse, *cotangents, *terms, call=backward)
        by_name = dict(zip(wanted, gradients, strict=True))
    if "sinks" in active:
        sinks = call.problem.name_terms(terms)["sinks"]
        mesh, spec = jax.typeof(q).sharding.mesh, jax.typeof(sinks).sharding.spec
        gradient = with_auto_axes(sinks_gradient, mesh, spec)
        by_name["sinks"] = gradient(sinks, out, lse, dout, dlse if with_dlse else None)
    return [*nothing, *(by_name[name] for name in active)]


def sinks_gradient(sinks, out, lse, dout, dlse) -> jax.Array:
    """Computes the gradient of sinks `[*B or 1, N]`: -sum over T of its weight times delta."""
    delta = blockwise.row_delta(out, lse, dout, dlse, sinks)  # [*B, N, T]
    # An lse of -inf: the sink is -inf too, and the row sees nothing.
    empty = lse == -jnp.inf
    weight = jnp.exp(jnp.where(empty, -jnp.inf, sinks[..., None] - jnp.where(empty, 0.0, lse)))
    gradient = -jnp.sum(weight * delta, axis=-1)
    shared = [axis for axis, size in enumerate(sinks.shape[:-1]) if size == 1]
    return jnp.sum(gradient, axis=shared, keepdims=True)


ad.primitive_jvps[flash_tangent_p] = _jvp
ad.primitive_transposes[flash_tangent_p] = transpose


# ---- lowering ------------------------------------------------------------------------------------


def _tangent(*operands: Any, call: Call, active: tuple[str, ...]) -> Any:
    count = len(call.operands)
    moving = (call.operands.index(name) for name in active)
    tangents = dict(zip(moving, operands[count + 2 :], strict=True))
    return jvp_of(call, call.blockwise, operands[:count], tangents)[1]


flash_tangent_p.def_impl(functools.partial(xla.apply_primitive, flash_tangent_p))
mlir.register_lowering(flash_tangent_p, mlir.lower_fun(_tangent, multiple_results=True))
