"""flash_backward: q, k, v, out, lse, dout, [dlse], *terms -> those asked for of dq, dk, dv, dbias
and of the gradients to the arrays that a function of the scores reads.

Shapes and meaning are those of `blockwise.backward`. Kernels leave the gradients to captured arrays
to blockwise.py.
"""

import dataclasses
from typing import Any

import jax
from jax.interpreters import ad

from jax_flash import _batching, blockwise
from jax_flash._call import Call
from jax_flash._ops import primitive
from jax_flash._ops.arithmetic import jvp_of
from jax_flash._terms import is_capture


@dataclasses.dataclass(frozen=True)
class Backward(Call):
    """One flash_backward, operands aside."""

    with_dlse: bool
    gradients: tuple[str, ...]  # to what they are, in the order of q, k, v, bias, captured arrays
    of_forward: bool = False  # lse is flash_forward's of these operands, not of more keys

    target = "backward"

    @property
    def operands(self) -> tuple[str, ...]:
        dlse = ("dlse",) if self.with_dlse else ()
        return ("q", "k", "v", "out", "lse", "dout", *dlse, *self.problem.optional)

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

    @property
    def captures(self) -> tuple[str, ...]:
        """The captured arrays to which there are gradients."""
        return tuple(filter(is_capture, self.gradients))

    def attributes(self) -> dict[str, Any]:
        flags = {"with_dlse": self.with_dlse, "with_dbias": self.with_dbias}
        return super().attributes() | flags

    def blockwise(self, *operands: jax.Array) -> tuple[jax.Array, ...]:
        results = blockwise.backward(
            self.problem,
            *operands,
            with_dlse=self.with_dlse,
            with_dbias=self.with_dbias,
            captures=self.captures,
            of_forward=self.of_forward,
        )
        whole = (*self.whole.results, *(f"d{name}" for name in self.captures))
        named = zip(whole, results, strict=True)
        return tuple(x for name, x in named if name in self.results)

    def run_kernel(self, kernel, *operands: jax.Array) -> tuple[jax.Array, ...]:
        taken = tuple(name for name in self.gradients if name not in self.captures)
        # The kernels multiply float32 more exactly than TF32, XLA's default on GPUs: a sum over all
        # scores that cancels was 5 % off by it.
        exact = dataclasses.replace(self.problem, precision="highest")
        rest = dataclasses.replace(self, problem=exact, gradients=self.captures)
        rest_results = rest.blockwise(*operands) if self.captures else ()
        if not taken:
            return rest_results
        call = dataclasses.replace(self, gradients=taken)
        return (*_batching.run_kernel(kernel, call, *operands), *rest_results)


flash_backward_p = primitive.define("flash_backward")


# ---- derivative ----------------------------------------------------------------------------------


def _jvp(primals, tangents, *, call: Backward):
    return jvp_of(call, call.blockwise, primals, dict(enumerate(tangents)))


ad.primitive_jvps[flash_backward_p] = _jvp
