"""flash_backward: q, k, v, out, lse, dout, [dlse], *terms -> those asked for of dq, dk, dv, dbias.

Shapes and meaning are those of `blockwise.backward`.
"""

import dataclasses
from typing import Any

import jax
from jax.interpreters import ad

from jax_flash import _batching, blockwise
from jax_flash._call import Call
from jax_flash._ops import primitive
from jax_flash._ops.arithmetic import jvp_of


@dataclasses.dataclass(frozen=True)
class Backward(Call):
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

    # ---- batching --------------------------------------------------------------------------------

    @property
    def own(self) -> tuple[str, ...]:
        return self.gradients  # each member has gradients to itself

    # ---- lowering --------------------------------------------------------------------------------

    @property
    def with_dbias(self) -> bool:
        return "bias" in self.gradients

    @property
    def whole(self) -> "Backward":
        bias = ("bias",) if self.with_dbias else ()
        return dataclasses.replace(self, gradients=("q", "k", "v", *bias))

    def attributes(self) -> dict[str, Any]:
        flags = {"with_dlse": self.with_dlse, "with_dbias": self.with_dbias}
        return super().attributes() | flags

    def blockwise(self, *operands: jax.Array) -> tuple[jax.Array, ...]:
        results = blockwise.backward(
            self.problem, *operands, with_dlse=self.with_dlse, with_dbias=self.with_dbias
        )
        named = zip(self.whole.results, results, strict=True)
        return tuple(x for name, x in named if name in self.results)

    def run_kernel(self, kernel, *operands: jax.Array) -> tuple[jax.Array, ...]:
        return _batching.run_kernel(kernel, self, *operands)


flash_backward_p = primitive.define("flash_backward")


# ---- derivative ----------------------------------------------------------------------------------


def _jvp(primals, tangents, *, call: Backward):
    return jvp_of(call, call.blockwise, primals, dict(enumerate(tangents)))


ad.primitive_jvps[flash_backward_p] = _jvp
