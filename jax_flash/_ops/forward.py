"""flash_forward: q, k, v, *terms -> out, lse; and `attend`, which binds it.

Shapes and meaning are those of `blockwise.forward`. Its JVP rule's linear part is flash_tangent,
whose transpose is flash_backward. So reverse mode runs the kernels with the residuals (q, k, v,
out, lse), and forward mode works too, in the arithmetic of blockwise.py. flash_backward and
flash_tangent are differentiated through blockwise.py, to any order. flash_forward is linear in v
and has a transpose along it.

Under `jax.checkpoint`, a policy that saves the names `flash_out` and `flash_lse` keeps the
backward pass from running the forward kernel again.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad

from jax_flash import _backends, _batching, _chosen, blockwise
from jax_flash._call import Call
from jax_flash._ops import primitive, tangent
from jax_flash._ops.arithmetic import with_auto_axes
from jax_flash._ops.backward import Backward
from jax_flash._ops.decode import Decode, of_rows, sizes_of_rows
from jax_flash._problem import Problem, Shapes
from jax_flash._terms import DIFFERENTIABLE, is_capture
from jax_flash._varying import vary_over


@dataclasses.dataclass(frozen=True)
class Forward(Call):
    """One flash_forward, operands aside."""

    gradients: tuple[str, ...] = ()  # that a backward pass may ask for, in its order
    value_dim: int | None = None  # v is the first so many features of k; None: an array of its own

    target = "forward"

    @property
    def operands(self) -> tuple[str, ...]:
        return ("q", "k", "v", *self.problem.optional)

    @property
    def results(self) -> tuple[str, ...]:
        return ("out", "lse")

    # ---- lowering --------------------------------------------------------------------------------

    @property
    def next(self) -> Backward | None:
        if not self.gradients:
            return None
        return Backward(self.problem, self.backend, with_dlse=False, gradients=self.gradients)

    def blockwise(self, *operands: jax.Array) -> tuple[jax.Array, ...]:
        return blockwise.forward(self.problem, *operands)

    def run_kernel(self, kernel, *operands: jax.Array) -> tuple[jax.Array, ...]:
        return _batching.run_kernel(kernel, self, *operands)

    def instead(self, shapes: Shapes) -> tuple[Decode, Shapes] | None:
        if "indices" not in self.problem.terms:
            return None
        return self._of_rows, sizes_of_rows(shapes)

    @property
    def _of_rows(self) -> Decode:
        rows, within = of_rows(self.problem), self.value_dim
        return Decode(rows, self.backend, value_dim=within, paged=True, packs=True)

    def run_instead(self, kernel, *operands: jax.Array) -> tuple[jax.Array, ...]:
        call = self._of_rows
        given = _chosen.as_decoding(self.problem, *operands)
        results = call.run_kernel(kernel, *(given.operands[name] for name in call.operands))
        return given.results(*results)

    def decoding(self, shapes: Shapes) -> Decode | None:
        problem, (left, right) = self.problem, self.problem.window
        if not {"key_value_lengths", "sinks"}.issuperset(problem.terms) or problem.as_written:
            return None
        if problem.score is not None or problem.split or self.value_dim is not None:
            return None
        # Queries that all see what the last one does, or of which each sees one key more.
        stand_last = right is None and (left is None or shapes.q_len == 1)
        if not stand_last and not (problem.bottom_right and right == 0):
            return None
        left = left if problem.bottom_right else None
        rows = dataclasses.replace(of_rows(problem), window=(left, None if stand_last else 0))
        full = "key_value_lengths" not in problem.terms
        return Decode(rows, self.backend, full_rows=full)


flash_forward_p = primitive.define("flash_forward")


# ---- derivative ----------------------------------------------------------------------------------


def _jvp(primals, tangents, *, call: Forward):
    tangents = call.name_operands(tangents)
    active = tuple(
        name
        for name in ("q", "k", "v", *DIFFERENTIABLE, *call.problem.captures)
        if name in tangents and type(tangents[name]) is not ad.Zero
    )
    of_kernels = tuple(name for name in tangent.of_kernels(active) if not is_capture(name))
    expecting = dataclasses.replace(call, gradients=of_kernels)
    score = call.problem.score
    if score is not None and score.ruled is not score:
        problem = dataclasses.replace(call.problem, score=score.ruled)
        expecting = dataclasses.replace(call, problem=problem)  # the kernels of `next` are others
    out, lse = flash_forward_p.bind(*primals, call=expecting)
    out, lse = checkpoint_name(out, "flash_out"), checkpoint_name(lse, "flash_lse")
    if not active:
        return (out, lse), [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in (out, lse)]
    moving = [tangents[name] for name in active]
    moved = tangent.flash_tangent_p.bind(*primals, out, lse, *moving, call=call, active=active)
    return (out, lse), moved


def _transpose(cotangents, *operands, call: Forward):
    """Transposes flash_forward along v, in which out is linear; lse does not depend on it."""
    linear = [name for name, x in call.name_operands(operands).items() if ad.is_undefined_primal(x)]
    if linear != ["v"]:
        raise NotImplementedError(
            f"attention is transposed along {', '.join(linear)}; it is linear in value alone"
        )
    q, k, v, *terms = operands
    dout, _ = cotangents
    primals = (q, k, ad.instantiate_zeros(ad.Zero(v.aval)), *terms)
    call = dataclasses.replace(call, value_dim=None)
    out, lse = flash_forward_p.bind(*primals, call=call)
    cotangents = (dout, ad.Zero(jax.typeof(lse)))
    *_, dv = tangent.transpose(cotangents, *primals, out, lse, v, call=call, active=("v",))
    return [dv if name == "v" else None for name in call.operands]


ad.primitive_jvps[flash_forward_p] = _jvp
ad.primitive_transposes[flash_forward_p] = _transpose


# ---- the call ------------------------------------------------------------------------------------


def attend(
    problem: Problem, backend: str | None, *operands: jax.Array, value_dim: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Computes attention, differentiably.

    Arguments:
      problem: what to compute.
      backend: which backend runs it; None: the first that can.
      operands: q, k, v, and problem.optional, as `_validate.prepare` makes them.
      value_dim: v is the first so many features of k; None: it may be another array.

    Returns: out `[*B, T, N, Hv]` in the dtype of q, and lse `[*B, N, T]` in problem.sum_dtype.

    Raises: as `_backends.require`.
    """
    q, k, v, *_ = operands
    shapes = Shapes.of(q, k, v)
    call = Forward(problem, backend, value_dim=value_dim)
    _backends.require(call, shapes)
    operands = vary_over(operands, operands)
    if shapes.empty:
        return vary_over(nothing(call, operands), operands)
    out, lse = flash_forward_p.bind(*operands, call=call)
    return out, lse


def nothing(call: Forward, operands) -> tuple[jax.Array, jax.Array]:
    """Computes the results where no query has a key, sharded as those of a call with keys."""
    avals = call.result_avals(call.name_operands([*map(jax.typeof, operands)]))
    out, lse = (jnp.zeros(x.shape, x.dtype, out_sharding=x.sharding) for x in avals)
    sinks = call.problem.name_terms(operands[3:]).get("sinks")
    with jax.debug_infs(False):
        if sinks is None:
            return out, lse - jnp.inf
        sharding = avals[1].sharding
        spread = with_auto_axes(_spread_sinks, sharding.mesh, sharding.spec)
        return out, spread(lse, sinks)


def _spread_sinks(lse, sinks) -> jax.Array:
    return lse + sinks[..., None]
