"""float32 at default precision through kernels of 16 bits: float16 copies in, float32 results out.

TF32, in which XLA multiplies float32 on a GPU, has 11 bits; so has float16, of fewer exponents. So
a call of float32 is split. One program, "carried", computes it from float16 copies of q, k, v and
dout, and stores what its accumulators hold. dout is multiplied by a power of two, and through their
lse so are the probabilities of the backward pass, which would be small: results get the inverse. A
program of mma.sync, "rest", computes it in parts where copies do not hold the operands. Which of
the two does is known to the device alone: a scalar, `result_scale`, is 0 for the rest, and the
other program leaves at once. Both write the same buffers.

A copy holds a row if its largest element lies among float16's normal numbers, or is 0: rounding
then moves no element by more than 2^-11 times the largest one, as TF32's does. NaN and infinity are
what they were.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jax_flash._call import Call
from jax_flash._gpu.traits import known
from jax_flash._problem import Problem, Shapes

_SMALLEST = 2.0**-14  # normal number of float16
_LARGEST = 65504.0
# dS and what it is a sum of stay below it; what lies between it and _LARGEST is for rounding.
_LIMIT = 2.0**15
# Logits that float32 has to within 2^-4: P of a row, from a base of its own, stays as small.
_LARGEST_LOGIT = 2.0**20
_COPIED = ("q", "k", "v", "dout")

COPIED = "float32 by float16 copies of operands, results in float32"  # a plan's note


def carried(call: Call) -> Call:
    """Returns the part of a call that runs on copies."""
    problem = dataclasses.replace(call.problem, dtype="float16", split="carried")
    return dataclasses.replace(call, problem=problem)


def rest(call: Call) -> Call:
    """Returns the part that computes what copies do not hold."""
    return dataclasses.replace(call, problem=dataclasses.replace(call.problem, split="rest"))


def takes(problem: Problem) -> bool:
    """Tells whether a call may be split, as far as its meaning goes."""
    return problem.dtype == "float32" and problem.precision == "default"


def copies(
    call: Call, shapes: Shapes, named: Mapping[str, jax.Array]
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Returns the operands of `carried(call)` by name, and result_scale: float32 [], or 0.

    Args:
      call: a pass of float32.
      shapes: its sizes.
      named: its operands.
    """
    largest = {name: _Largest.of(named[name]) for name in _COPIED if name in named}
    q, k, v = (largest[name] for name in "qkv")
    held = q.fits() & k.fits() & v.fits()
    held &= q.norm * k.norm * abs(call.problem.scale) <= _LARGEST_LOGIT
    made = {**named, **{name: named[name].astype(jnp.float16) for name in "qkv"}}
    scale = jnp.float32(1)
    if "dout" in named:
        # P is about 1 / S: 2^-6 of that is a normal number too.
        shift = min(max(known(shapes.kv_len, 4096).bit_length() - 9, 0), 8)
        dout = largest["dout"]
        bound = 2 * dout.norm * v.norm
        if "dlse" in named:
            bound += jnp.max(_finite(named["dlse"]))
        # The bounds of dS, as P is 2^shift at most, and of dout.
        power = _power_below(
            jnp.minimum(_LIMIT / 2.0**shift / bound, _LIMIT / jnp.maximum(dout.most, 2.0**-126))
        )
        held &= dout.fits(power)
        made["dout"] = (named["dout"] * power).astype(jnp.float16)
        made["lse"] = named["lse"] - jnp.float32(shift * math.log(2))
        if "dlse" in named:
            made["dlse"] = named["dlse"] * power
        scale = 2.0**-shift / power
    return made, jnp.where(held, scale, jnp.float32(0))


@dataclasses.dataclass(frozen=True)
class _Largest:
    """What an operand's rows hold, NaN and infinity aside.

    Attributes:
      most, least: the largest element of any row, and the smallest of rows' largest elements, rows
        of zeros aside.
      norm: a bound on the rows' norms.
    """

    most: jax.Array
    least: jax.Array
    norm: jax.Array

    @classmethod
    def of(cls, x: jax.Array) -> _Largest:
        x = _finite(x)
        # The barrier: XLA would take the maximum of maxima from x, in another pass.
        rows, squares = jax.lax.optimization_barrier((jnp.max(x, -1), jnp.sum(x * x, -1)))
        found = rows, jnp.where(rows == 0, jnp.inf, rows), squares
        # Together, for XLA makes a kernel or two of each reduction by itself.
        most, least, square = jax.lax.reduce(
            found,
            tuple(jnp.float32(x) for x in (0, math.inf, 0)),
            lambda a, b: (
                jnp.maximum(a[0], b[0]),
                jnp.minimum(a[1], b[1]),
                jnp.maximum(a[2], b[2]),
            ),
            range(rows.ndim),
        )
        # Where squares leave float32's range, what the elements allow.
        exact = (square > 1e-30) & (square < 1e30)
        norm = jnp.where(exact, 1.001 * jnp.sqrt(square), most * math.sqrt(x.shape[-1]))
        return cls(most, least, norm)

    def fits(self, power: jax.Array | float = 1.0) -> jax.Array:
        """Tells whether float16 holds the rows times a power of two."""
        return (self.least * power >= _SMALLEST) & (self.most * power <= _LARGEST)


def _finite(x: jax.Array) -> jax.Array:
    """Returns magnitudes, 0 for NaN and infinity."""
    x = jnp.abs(x)
    return jnp.where(x < jnp.inf, x, 0)


def _power_below(x: jax.Array) -> jax.Array:
    """Returns the largest power of two that x, positive, is not less than, 2^-100 to 2^100."""
    bits = jax.lax.bitcast_convert_type(jnp.clip(x, 2.0**-100, 2.0**100), jnp.int32)
    return jax.lax.bitcast_convert_type(bits & jnp.int32(0x7F800000), jnp.float32)
