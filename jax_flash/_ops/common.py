"""flash_common, attention of all tokens to pages that they have in common, whole.

    q, k, [v], lengths, page_table, [own_table, tails], [scales] -> out, lse

Each token of q `[*B, T, N, H]` sees all of the first `lengths` positions of the pages that
page_table `[*B, M]` names: it is one dense problem of T * N // K query rows for each kv head, which
reads keys and values once. Kernels over pages compute it, of the parts that `parts_of` cuts the
positions into. Elsewhere the tokens are more heads of one row of a flash_decode. It has no
derivative. k, v and scales are those of flash_prefill; length 0 gives out 0 and lse −inf.

With tails int32 `[*B, T, 4]` a token sees positions of its own besides: from tails[1] up to
tails[2], where pages begin, in the pages of row tails[0] of own_table `[*B, Q, M]`. tails[3] is
SEES_COMMON where it sees the pages in common, plus NEEDED, or WRONG where NaN comes out. What is
neither gives 0 and −inf.
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
from jax_flash._ops.decode import SCALES, in_one_pool, no_derivative
from jax_flash._ops.prefill import Kernel, Prefill, bind
from jax_flash._problem import Shapes

SEES_COMMON, NEEDED, WRONG = 1, 2, 4  # of tails
_UNIT_ROWS = 128  # of queries, that a multiprocessor computes together
_MULTIPROCESSORS = 132  # of an H100 or H200
_FEWEST_KEYS = 256  # of a part
# Keys that a unit computes in the time that 64 * _UNIT_ROWS rows more take to be copied and merged.
_KEYS_OF_MERGE = 128


@dataclasses.dataclass(frozen=True)
class Common(Prefill):
    """One flash_common, operands aside: what Prefill says, of tokens that see all positions.

    Attributes:
      count: parts that positions are cut into: results are those of each part of the first member,
        then of the next. With tails they are one more, and results are merged. 1 of the primitive.
      tails: tokens see positions of their own besides.
    """

    count: int = 1
    tails: bool = False

    target = "common"

    @property
    def operands(self) -> tuple[str, ...]:
        v = ("v",) if self.value_dim is None else ()
        scales = SCALES[: 1 + len(v)] if self.quantized else ()
        tails = ("own_table", "tails") if self.tails else ()
        return ("q", "k", *v, "lengths", "page_table", *tails, *scales)

    @property
    def own(self) -> tuple[str, ...]:
        return ("lengths", "page_table", *(("own_table", "tails") if self.tails else ()))

    def dims(self, name: str) -> str:
        if name in ("own_table", "tails"):
            return {"own_table": "QO", "tails": "TI"}[name]
        return dims(name) if name in self.own else super().dims(name)

    def shapes(self, operands: Mapping[str, Any]) -> Shapes:
        sizes = super().shapes({**operands, "lengths": operands["page_table"]})
        return dataclasses.replace(sizes, batch=math.prod(operands["q"].shape[:-3]))

    def result_shapes(self, operands: Mapping[str, Any]) -> list[tuple[int, ...]]:
        shapes = super().result_shapes(operands)
        if self.count == 1 or self.tails:
            return shapes
        return [(self.count * batch, *rest) for batch, *rest in shapes]

    def tails_fit(self, head_dim: int, value_dim: int) -> bool:
        """Whether one kernel computes pages in common and tails; else they are two calls.

        Wider dims leave it no shared memory; narrower ones and a softcap have units of their own.
        """
        narrow = min(head_dim, value_dim) > 64 and max(head_dim, value_dim) <= 128
        return narrow and self.problem.softcap is None

    # ---- lowering --------------------------------------------------------------------------------

    def blockwise(self, *operands: jax.Array) -> tuple[jax.Array, ...]:
        return self._apart(lambda call, *x: call.blockwise(*x), *operands)

    def instead(self, shapes: Shapes) -> tuple[Call, Shapes]:
        heads = shapes.q_len * shapes.q_heads
        return self._decode, dataclasses.replace(shapes, q_len=1, q_heads=heads)

    def run_instead(self, kernel: Kernel, *operands: jax.Array) -> tuple[jax.Array, ...]:
        return self._apart(lambda call, *x: call.run_kernel(kernel, *x), *operands)

    def _apart(self, run: Kernel, *operands: jax.Array) -> tuple[jax.Array, ...]:
        """Computes the results by flash_decode: pages in common as one row, each tail as a row."""
        if not self.tails:
            return self._as_row(run, *operands)
        named, call = self.name_operands(operands), self._decode
        whole = dataclasses.replace(self, tails=False)
        out, lse = whole._as_row(run, *(named[name] for name in whole.operands))
        request, first, end, flags = jnp.moveaxis(named["tails"], -1, 0)
        table = jnp.take_along_axis(named["own_table"], request[..., None], axis=-2)
        column = jnp.arange(table.shape[-1]) + first[..., None] // named["k"].shape[-3]
        rows = named | {
            "q": named["q"][..., None, :, :],
            "lengths": jnp.maximum(end - first, 0),
            "page_table": jnp.take_along_axis(table, column, -1, mode="fill", fill_value=-1),
        }
        own, own_lse = run(call, *(rows[name] for name in call.operands))
        lse = jnp.where((flags & SEES_COMMON != 0)[..., None], lse, -jnp.inf)
        both, lse = combine((out, lse), (own[..., 0, :, :], own_lse[..., 0]))
        needed, wrong = ((flags & bit != 0)[..., None] for bit in (NEEDED, WRONG))
        lse = jnp.where(needed, lse, jnp.where(wrong, jnp.nan, -jnp.inf))
        both = jnp.where(needed[..., None], both, jnp.where(wrong, jnp.nan, 0.0)[..., None])
        return both.astype(self.problem.dtype), lse

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
        shapes = self.result_shapes(named)
        lead, sizes = named["q"].shape[:-3], self.shapes(named)
        count = parts_of(sizes) + self.tails
        *pools, pages = named["k"].shape[:-3]
        for name in ("k", "v"):
            named[name] = named[name].reshape(-1, *named[name].shape[-3:])
        named["q"] = named["q"].reshape(math.prod(lead), *named["q"].shape[-3:])
        named["lengths"] = named["lengths"].reshape(-1)
        table = named["page_table"].reshape(-1, named["page_table"].shape[-1])
        named["page_table"] = in_one_pool(table, lead, pools, pages)
        if self.tails:
            rows, columns = named["own_table"].shape[-2:]
            table = named["own_table"].reshape(-1, columns)
            named["own_table"] = in_one_pool(table, (*lead, rows), pools, pages)
            tails = named["tails"].reshape(-1, *named["tails"].shape[-2:])
            begin = rows * jnp.arange(len(tails), dtype=jnp.int32)[:, None]
            named["tails"] = tails.at[..., 0].add(begin)
        call = dataclasses.replace(self, count=count)
        results = kernel(call, *(named[name] for name in call.operands))
        if not self.tails:
            out, lse = (x.reshape(math.prod(lead), count, *x.shape[1:]) for x in results)
            results = combine(*((out[:, i], lse[:, i]) for i in range(count)))
        out, lse = results
        return out.astype(self.problem.dtype).reshape(shapes[0]), lse.reshape(shapes[1])


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
