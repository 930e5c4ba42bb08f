"""flash_common, attention of all tokens to pages that they have in common, whole.

    q, k, [v], lengths, page_table, [scales] -> out, lse

Each token of q `[*B, T, N, H]` sees all of the first `lengths` positions of the pages that
page_table `[*B, M]` names: it is one dense problem of T * N // K query rows for each kv head, which
reads keys and values once. Kernels over pages compute it, of the parts that `parts_of` cuts the
positions into. Elsewhere the tokens are more heads of one row of a flash_decode. It has no
derivative. k, v and scales are those of flash_prefill; length 0 gives out 0 and lse −inf.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jax_flash._call import Call, dims
from jax_flash._merge import combine
from jax_flash._ops import primitive
from jax_flash._ops.decode import SCALES, no_derivative
from jax_flash._ops.prefill import Kernel, Prefill, bind
from jax_flash._problem import Shapes

_UNIT_ROWS = 128  # of queries, that a multiprocessor computes together
_MULTIPROCESSORS = 132  # of an H100 or H200
_FEWEST_KEYS = 256  # of a part
# Keys that a unit computes in the time that 64 * _UNIT_ROWS rows more take to be copied and merged.
_KEYS_OF_MERGE = 128


@dataclasses.dataclass(frozen=True)
class Common(Prefill):
    """One flash_common, operands aside: what Prefill says, of tokens that see all positions."""

    target = "common"

    @property
    def operands(self) -> tuple[str, ...]:
        v = ("v",) if self.value_dim is None else ()
        scales = SCALES[: 1 + len(v)] if self.quantized else ()
        return ("q", "k", *v, "lengths", "page_table", *scales)

    @property
    def own(self) -> tuple[str, ...]:
        return ("lengths", "page_table")

    def dims(self, name: str) -> str:
        return dims(name) if name in self.own else super().dims(name)

    def shapes(self, operands: Mapping[str, Any]) -> Shapes:
        sizes = super().shapes({**operands, "lengths": operands["page_table"]})
        return dataclasses.replace(sizes, batch=math.prod(operands["q"].shape[:-3]))

    # ---- lowering --------------------------------------------------------------------------------

    def blockwise(self, *operands: jax.Array) -> tuple[jax.Array, ...]:
        return self._as_row(lambda call, *x: call.blockwise(*x), *operands)

    def instead(self, shapes: Shapes) -> tuple[Call, Shapes]:
        heads = shapes.q_len * shapes.q_heads
        return self._decode, dataclasses.replace(shapes, q_len=1, q_heads=heads)

    def run_instead(self, kernel: Kernel, *operands: jax.Array) -> tuple[jax.Array, ...]:
        return self._as_row(lambda call, *x: call.run_kernel(kernel, *x), *operands)

    def _as_row(self, run: Kernel, *operands: jax.Array) -> tuple[jax.Array, ...]:
        """Computes the results by `run(call, *operands)` of a flash_decode of one row."""
        named, call = self.name_operands(operands), self._decode
        *lead, tokens, q_heads, head_dim = named["q"].shape
        kv_heads = named["k"].shape[-2]
        group = q_heads // kv_heads
        in_groups = named["q"].reshape(*lead, tokens, kv_heads, group, head_dim)
        row = jnp.swapaxes(in_groups, -4, -3).reshape(*lead, 1, tokens * q_heads, head_dim)
        results = run(call, *((named | {"q": row})[name] for name in call.operands))

        def of_tokens(x: jax.Array) -> jax.Array:
            parts = x.reshape(*lead, kv_heads, tokens, group, -1)
            return jnp.swapaxes(parts, -4, -3).reshape(*lead, tokens, q_heads, -1)

        out, lse = map(of_tokens, results)
        return out, lse[..., 0]

    def run_kernel(self, kernel: Kernel, *operands: jax.Array) -> tuple[jax.Array, ...]:
        named = self.name_operands(operands)
        *lead, tokens, q_heads, head_dim = named["q"].shape
        count = parts_of(self.shapes(named))
        size = named["k"].shape[-3]
        columns = -(-named["page_table"].shape[-1] // count)
        part = jnp.arange(count, dtype=jnp.int32)
        # Equal parts of the pages that there are, not of those that the table has place for.
        length = named["lengths"][..., None]
        each = -(-length // (count * size))
        first = part * each
        column = first[..., None] + jnp.arange(columns, dtype=jnp.int32)
        flat = column.reshape(*lead, count * columns)
        table = jnp.take_along_axis(named["page_table"], flat, -1, mode="fill", fill_value=-1)
        q = named["q"][..., None, :, :, :]
        q = jnp.broadcast_to(q, (*lead, count, tokens, q_heads, head_dim))
        call = Prefill(
            self.problem, self.backend, value_dim=self.value_dim, quantized=self.quantized
        )
        of_parts = named | {
            "q": q.reshape(*lead, count * tokens, q_heads, head_dim),
            "lengths": jnp.clip(length - first * size, 0, each * size),
            "first": jnp.broadcast_to(tokens * part, (*lead, count)),
            "count": jnp.full((*lead, count), tokens, jnp.int32),
            "page_table": table.reshape(*lead, count, columns),
        }
        out, lse = call.run_kernel(kernel, *(of_parts[name] for name in call.operands))
        out = out.reshape(*lead, count, tokens, q_heads, -1)
        lse = lse.reshape(*lead, count, tokens, q_heads)
        out, lse = combine(*((out[..., i, :, :, :], lse[..., i, :, :]) for i in range(count)))
        return out.astype(self.problem.dtype), lse


def parts_of(shapes: Shapes) -> int:
    """Chooses how many parts positions are cut into, each of which all tokens attend to.

    So many that units fill whole rounds of the multiprocessors: rounds in keys, and a merge that
    takes as long as so many.
    """
    keys, units = shapes.kv_len, units_of(shapes)
    merge = _KEYS_OF_MERGE * shapes.q_len * shapes.q_heads / (64 * _UNIT_ROWS)

    def cost(count: int) -> float:
        return keys / count * -(-units * count // _MULTIPROCESSORS) + merge * count

    return min(range(1, max(1, keys // _FEWEST_KEYS) + 1), key=cost)


def units_of(shapes: Shapes) -> int:
    """Counts the units of query rows, whose tokens are those of all kv heads."""
    group = shapes.q_heads // max(shapes.kv_heads, 1)
    return shapes.kv_heads * -(-shapes.q_len * group // _UNIT_ROWS)


flash_common_p = primitive.define("flash_common")
ad.primitive_jvps[flash_common_p] = no_derivative


def common(call: Common, operands: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Computes out and lse, of operands by name.

    Raises: as `_backends.require`.
    """
    return bind(flash_common_p, call, operands)
