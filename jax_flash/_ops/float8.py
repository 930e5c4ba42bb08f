"""flash_float8: q, k, v of float8 with scales, *terms -> out, lse; and `attend`, which binds it.

It is attention of the products of values and scales (`_float8.py`), exact but for rounding: kernels
may round weights to float8 too. Quantised arguments have no derivative. Those that `attend`
quantises have one, straight through: that of 16-bit attention at the values that flash_float8 saw,
as if these were the arguments. It is flash_tangent's, whose transpose is flash_backward.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad

from jax_flash import _backends, _batching, _float8, blockwise
from jax_flash._call import Call
from jax_flash._ops import primitive, tangent
from jax_flash._ops.backward import Backward
from jax_flash._ops.forward import Forward, nothing
from jax_flash._ops.quantise import quantise
from jax_flash._problem import Problem, Shapes
from jax_flash._terms import DIFFERENTIABLE
from jax_flash._varying import vary_over

_ARRAYS = ("q", "k", "v")
# In the place of 0: scores of it are 0 in float32, and its product with another is not 0, if the
# other scale is between 2^-60 and 2^20.
_LEAST_SCALE = 2.0**-60


@dataclasses.dataclass(frozen=True)
class Float8(Call):
    """One flash_float8, operands aside.

    Attributes:
      out_dtype: of out.
      in_16_bits: where there are no kernels of float8, those of 16 bits take dequantised operands.
      fine: scales of keys or values are of 64 positions.
      columns: an operand has the columns of values (`_float8.columns`).
      with_lse: lse is read, by a caller or for a derivative; else it may be that of rounded
        weights, off by up to 0.06.
    """

    out_dtype: str = "bfloat16"
    in_16_bits: bool = False
    fine: bool = False
    columns: bool = False
    with_lse: bool = False

    target = "forward_float8"

    @property
    def operands(self) -> tuple[str, ...]:
        columns = ("v_columns",) if self.columns else ()
        return (*_ARRAYS, *(f"{name}_scale" for name in _ARRAYS), *columns, *self.problem.optional)

    @property
    def results(self) -> tuple[str, ...]:
        return ("out", "lse")

    def result_avals(self, operands: Mapping[str, Any]) -> tuple[Any, ...]:
        out, lse = super().result_avals(operands)
        return out.update(dtype=jnp.dtype(self.out_dtype)), lse

    # ---- lowering --------------------------------------------------------------------------------

    @property
    def result_dtype(self) -> str:
        return self.out_dtype

    @property
    def fallback(self) -> Forward | None:
        if not self.in_16_bits:
            return None
        dtype = "float16" if self.out_dtype == "float16" else "bfloat16"
        return self._forward(dtype)

    def dequantised(self, call: Call, *operands: jax.Array) -> tuple[Call, tuple[jax.Array, ...]]:
        named = self.name_operands(operands)
        arrays = [
            _float8.dequantise(named[name], named[f"{name}_scale"], call.problem.dtype)
            for name in _ARRAYS
        ]
        batch = jnp.broadcast_shapes(*(x.shape[:-3] for x in arrays[1:]))  # k and v share it
        arrays[1:] = (jnp.broadcast_to(x, (*batch, *x.shape[-3:])) for x in arrays[1:])
        return call, (*arrays, *(named[name] for name in self.problem.optional))

    def rotated(self, *operands: jax.Array) -> tuple[Any, tuple[jax.Array, ...]]:
        """Dequantises the operands, for kernels that do not take float8."""
        return self.dequantised(self._forward("float32"), *operands)

    def blockwise(self, *operands: jax.Array) -> tuple[jax.Array, ...]:
        call, operands = self.rotated(*operands)
        out, lse = blockwise.forward(call.problem, *operands)
        return out.astype(self.out_dtype), lse

    def run_kernel(self, kernel, *operands: jax.Array) -> tuple[jax.Array, ...]:
        named = self.name_operands(operands)
        for name, positions in zip(_ARRAYS, (64, 128, 128), strict=True):
            x, scale = named[name], named[f"{name}_scale"]
            scale = _float8.in_full(scale, x, positions)
            if name != "v" and not self.columns:
                # A hidden score, −inf, times 0 would be NaN. Scales that are made here are not 0.
                scale = jnp.where(scale == 0, _LEAST_SCALE, scale)
            named[f"{name}_scale"] = scale
        out, lse = _batching.run_kernel(kernel, self, *named.values())
        return out.astype(self.out_dtype), lse

    def _forward(self, dtype: str) -> Forward:
        return Forward(dataclasses.replace(self.problem, dtype=dtype), self.backend)


flash_float8_p = primitive.define("flash_float8")


# ---- derivative ----------------------------------------------------------------------------------


def _jvp(primals, tangents, *, call: Float8):
    raise NotImplementedError(
        "flash_attention of float8_e4m3fn has no derivative; expected bfloat16 or float16 with "
        "quantize='fp8', whose gradients pass straight through the rounding, or jax.lax."
        "stop_gradient around query, key, value, their scales and sinks"
    )


ad.primitive_jvps[flash_float8_p] = _jvp


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _straight(turns: bool, x: jax.Array, seen: jax.Array) -> jax.Array:
    """Returns what was seen of x, with the derivative of x, or of x turned."""
    return seen


@_straight.defjvp
def _straight_jvp(turns, primals, tangents):
    moved = _float8.turn_derivative(tangents[0]) if turns else tangents[0]
    return _straight(turns, *primals), moved


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attend(call: Float8, quantised, seen, terms):
    """Binds flash_float8, with the derivative of 16-bit attention of `seen`, its operands' values.

    Arguments:
      quantised: q, k, v, their scales, and the columns of v.
      seen: q, k, v in 16 bits.
      terms: the rest.
    """
    out, lse = flash_float8_p.bind(*quantised, *terms, call=call)
    return out, lse


@functools.partial(_attend.defjvp, symbolic_zeros=True)
def _attend_jvp(call, primals, tangents):
    quantised, seen, terms = primals
    out, lse = _attend(dataclasses.replace(call, with_lse=True), quantised, seen, terms)
    out, lse = checkpoint_name(out, "flash_out"), checkpoint_name(lse, "flash_lse")
    forward = derived(call, seen[0].dtype.name)
    _, moving, moving_terms = tangents
    moving = forward.name_operands((*moving, *moving_terms))
    active = tuple(
        name
        for name in (*_ARRAYS, *DIFFERENTIABLE)
        if name in moving and not isinstance(moving[name], SymbolicZero)
    )
    if not active:
        return (out, lse), (jnp.zeros_like(out), jnp.zeros_like(lse))
    moved, moved_lse = tangent.flash_tangent_p.bind(
        *seen,
        *terms,
        out.astype(seen[0].dtype),
        lse,
        *(moving[name] for name in active),
        call=forward,
        active=active,
    )
    return (out, lse), (moved.astype(out.dtype), moved_lse)


def derived(call: Float8, dtype: str) -> Forward:
    """Returns the 16-bit call whose derivative a call of quantised arguments has."""
    return Forward(dataclasses.replace(call.problem, dtype=dtype), call.backend)


# ---- the call ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Form:
    """How a call of `flash_attention` is in float8.

    Attributes:
      scales: of query, key and value, which are float8; None: they are 16-bit, to be quantised.
      out_dtype: of out.
      in_16_bits: 16-bit kernels may run it where there are none of float8.
      with_amax: the largest magnitudes of what is quantised are wanted.
    """

    scales: tuple[jax.Array, jax.Array, jax.Array] | None
    out_dtype: str
    in_16_bits: bool
    fine: bool = False  # scales of keys or values are of 64 positions
    with_amax: bool = False

    def call(self, problem: Problem, backend: str | None, head_dim: int) -> Float8:
        """Returns the call, of a problem whose dtype is that of the arguments."""
        scale = problem.scale
        if self.scales is None:
            scale *= _float8.turned_scale(head_dim)
        problem = dataclasses.replace(problem, dtype=_float8.DTYPE, scale=scale)
        columns = self.scales is None
        return Float8(problem, backend, self.out_dtype, self.in_16_bits, self.fine, columns)

    def passes(self, problem: Problem, backend: str | None, head_dim: int) -> dict[str, Call]:
        """Returns the passes of a call that is differentiated, if it can be, by name."""
        call = self.call(problem, backend, head_dim)
        if self.scales is not None:
            return {"forward": call}
        backward = derived(call, problem.dtype).problem
        call = dataclasses.replace(call, with_lse=True)
        return {"forward": call, "backward": Backward(backward, backend, False, _ARRAYS)}


def attend(
    form: Form, problem: Problem, backend: str | None, *operands: jax.Array, with_lse: bool
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Computes attention in float8.

    Arguments:
      form: how.
      problem: what to compute; its dtype is that of q, k and v.
      backend: which backend runs it; None: the first that can.
      operands: q, k, v, and problem.optional, as `_validate.prepare` makes them.
      with_lse: lse is wanted.

    Returns:
      out `[*B, T, N, Hv]` in form.out_dtype, lse `[*B, N, T]`, float32, and the largest finite
      magnitudes of q, k and v, float32 `[3]`, if form.with_amax, else None.

    Raises: as `_backends.require`.
    """
    arrays, terms = operands[:3], operands[3:]
    call = form.call(problem, backend, arrays[0].shape[-1])
    call = dataclasses.replace(call, with_lse=with_lse)
    shapes = Shapes.of(arrays[0], arrays[1], arrays[2])
    _backends.require(call, shapes)
    if shapes.empty:
        out, lse = nothing(Forward(problem, backend), vary_over(operands, operands))
        amax = _float8.largest_of_all(arrays) if form.with_amax else None
        return out.astype(form.out_dtype), lse, amax
    if form.scales is not None:
        bound = vary_over((*arrays, *form.scales, *terms), (*arrays, *form.scales, *terms))
        out, lse = flash_float8_p.bind(*bound, call=call)
        return out, lse, None
    made = [
        quantise(name, lax.stop_gradient(x), backend, with_amax=form.with_amax)
        for name, x in zip(("query", "key", "value"), arrays, strict=True)
    ]
    quantised = (*(x["values"] for x in made), *(x["scale"] for x in made), made[2]["columns"])
    bound = (*quantised, *map(_seen, _ARRAYS, arrays, made), *terms)
    bound = vary_over(bound, bound)
    out, lse = _attend(call, tuple(bound[:7]), tuple(bound[7:10]), tuple(bound[10:]))
    amax = jnp.stack([jnp.max(x["amax"]) for x in made]) if form.with_amax else None
    return out, lse, amax


def _seen(name: str, x: jax.Array, quantised: Mapping[str, jax.Array]) -> jax.Array:
    """Returns x as what was quantised of it has it, in its own dtype."""
    seen = _float8.dequantise(quantised["values"], quantised["scale"], x.dtype.name)
    return _straight(name != "v" and _float8.turns(x.shape[-1]), x, seen)
