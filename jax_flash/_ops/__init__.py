"""The primitives, a file each; what they share is in `primitive.py` and `arithmetic.py`.

    forward.py    flash_forward:  q, k, v, *terms -> out, lse
    backward.py   flash_backward: q, k, v, out, lse, dout, [dlse], *terms -> dq, dk, dv, dbias, ...
    tangent.py    flash_tangent:  the derivative of flash_forward, whose transpose is flash_backward
    quantise.py   flash_quantise: 16 bits -> float8 and scales, ahead of flash_float8
    float8.py     flash_float8:   q, k, v in float8, scales, *terms -> out, lse
    decode.py     flash_decode:   q, k, v, lengths, ... -> out, lse, and k and v written in place
    prefill.py    flash_prefill:  q, k, v, lengths, ... -> out, lse, of requests' tokens over pages
    common.py     flash_common:   q, k, v, lengths, ... -> out, lse, of all tokens over common pages

Each has its sections in one order: what goes in and comes out, batching, derivative, lowering.
flash_forward's derivative binds flash_tangent, whose transpose binds flash_backward, and so these
files import one another in that order.
"""

from jax_flash._call import Call
from jax_flash._ops.backward import Backward, flash_backward_p
from jax_flash._ops.float8 import Form
from jax_flash._ops.forward import Forward, attend
from jax_flash._ops.tangent import sinks_gradient
from jax_flash._problem import Problem

__all__ = ["Backward", "Form", "Forward", "attend", "flash_backward_p", "passes", "sinks_gradient"]


def passes(
    problem: Problem,
    backend: str | None = None,
    *,
    with_dlse: bool = False,
    value_dim: int | None = None,
) -> dict[str, Call]:
    """Returns the passes of a call that is differentiated in all that has a gradient, by name."""
    bias = ("bias",) if "bias" in problem.terms else ()
    return {
        "forward": Forward(problem, backend, value_dim=value_dim),
        "backward": Backward(problem, backend, with_dlse, ("q", "k", "v", *bias)),
    }
