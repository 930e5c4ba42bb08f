"""flash_decode, attention of the last T positions to a cache.

    q, k, [v], lengths, [page_table], [new_k, [new_v]], [scales], *terms -> out, lse, [k, [v]]

Attention of the last T positions to a cache that holds all of them, appended to it first, in place:
k and v of the results are those of the operands. Shapes and meaning are those of
`blockwise_decode.decode`, with leading dims: k is `[*B, S, K, H]`, or with a page table
`[*C, P, S, K, H]` with pages for all rows of each pool; C are the first of B, and any of them may
be 1. Scales, key_scale and value_scale, are `[*B, K]`, or with a page table `[*C, P, K]`, of which
P too may be 1. It has no derivative.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad

from jax_flash import _backends, _cache, _chosen, _latent_rows, blockwise_decode
from jax_flash._call import Call
from jax_flash._ops import primitive
from jax_flash._problem import Problem, Shapes
from jax_flash._rotary import rotate
from jax_flash._varying import vary_over

MOST_QUERIES = 64  # of a row
_CACHES = ("k", "v")
SCALES = ("key_scale", "value_scale")


@dataclasses.dataclass(frozen=True)
class Decode(Call):
    """One flash_decode, operands aside.

    Attributes:
      rotary_base: of the embedding of q and new_k, by their positions; None: without.
      value_dim: the values are the first so many features of k, and there is no v; None: v.
      paged: there is a page table.
      appends: there are new keys, and values unless k holds them.
      quantized: the dtype of k and v, one of `_cache.QUANTIZED`, which have scales then; None: q's.
      latent_rows: k is uint8, rows of latent attention that are packed (`_latent_rows.py`).
      packs: the page table has pages below 0, which are left out (`_chosen.pack`), and says which
        rows are refused; there are no lengths.
      full_rows: every position of k holds a key; there are no lengths.
    """

    rotary_base: float | None = None
    value_dim: int | None = None
    paged: bool = False
    appends: bool = False
    quantized: str | None = None
    latent_rows: bool = False
    packs: bool = False
    full_rows: bool = False

    target = "decode"
    function = "decode_attention"

    @property
    def operands(self) -> tuple[str, ...]:
        v = ("v",) if self.value_dim is None else ()
        table = ("page_table",) if self.paged else ()
        new = (f"new_{name}" for name in ("k", *v)) if self.appends else ()
        scales = SCALES[: 1 + len(v)] if self.quantized else ()
        lengths = () if self.packs or self.full_rows else ("lengths",)
        return ("q", "k", *v, *lengths, *table, *new, *scales, *self.problem.terms)

    @property
    def results(self) -> tuple[str, ...]:
        v = ("v",) if self.value_dim is None else ()
        return ("out", "lse", *(("k", *v) if self.appends else ()))

    @property
    def cached(self) -> bool:
        return True

    @property
    def cache_dtype(self) -> str:
        return "uint8" if self.latent_rows else self.quantized or self.problem.dtype

    def dims(self, name: str) -> str:
        pages = "P" if self.paged and name in (*_CACHES, *SCALES) else ""
        return pages + cache_dims(name, super().dims(name), self.latent_rows)

    def shapes(self, operands: Mapping[str, Any]) -> Shapes:
        q, k = operands["q"], operands["k"]
        columns = operands["page_table"].shape[-1] if self.paged else 1
        return Shapes(
            batch=math.prod(q.shape[:-3]),
            q_len=q.shape[-3],
            kv_len=columns * k.shape[-3],
            q_heads=q.shape[-2],
            kv_heads=k.shape[-2],
            head_dim=q.shape[-1],
            value_dim=self.value_dim or operands["v"].shape[-1],
            page_size=k.shape[-3] if self.paged else None,
            scales_of_pages=self.paged and have_own_scales(operands),
            chosen=operands["indices"].shape[-1] if "indices" in operands else None,
        )

    def result_shapes(self, operands: Mapping[str, Any]) -> list[tuple[int, ...]]:
        q, out_dim = operands["q"].shape, self.shapes(operands).value_dim
        made = {"out": (*q[:-1], out_dim), "lse": (*q[:-3], q[-2], q[-3])}
        return [made[name] if name in made else operands[name].shape for name in self.results]

    # ---- batching --------------------------------------------------------------------------------

    @property
    def own(self) -> tuple[str, ...]:
        cache = _CACHES if self.appends else ()  # else members may share it
        return ("lengths", "page_table", "new_k", "new_v", *cache)

    # ---- lowering --------------------------------------------------------------------------------

    def attributes(self) -> dict[str, Any]:
        flags = {"paged": self.paged, "appends": self.appends}
        return super().attributes() | flags | {"value_dim": self.value_dim or 0}

    def blockwise(self, *operands: jax.Array) -> tuple[jax.Array, ...]:
        return self.run_kernel(_blockwise, *operands)

    def run_kernel(self, kernel, *operands: jax.Array) -> tuple[jax.Array, ...]:
        """Computes the results by `kernel(call, *operands)`, in the form of kernels.

        There is one leading dim. The pages of k and v, or without a page table the rows, are as
        many as all their leading dims make: a reshape of what is written in place would have XLA
        copy it.
        """
        named = self.name_operands(operands)
        shapes = self.result_shapes(named)
        lead = named["q"].shape[:-3]
        rows = math.prod(lead)
        call = self
        if self.paged:
            *pools, pages = named["k"].shape[:-3]
            table = named["page_table"]
            table = table.reshape(rows, table.shape[-1])
            named["page_table"] = in_one_pool(table, lead, pools, pages)
        elif named["k"].shape[:-3] != lead:  # members that share a cache
            call = dataclasses.replace(call, paged=True)
            table = jnp.zeros((rows, 1), jnp.int32)
            named["page_table"] = in_one_pool(table, lead, named["k"].shape[:-3], 1)

        def flatten(name: str) -> jax.Array:
            x = named[name]
            if name in (*_CACHES, "page_table"):
                return x
            if name in SCALES:
                return of_pages(x, named["k"].shape[:-3])
            if name in self.problem.terms and set(x.shape[: len(lead)]) <= {1}:
                return x.reshape(1, *x.shape[len(lead) :])
            return jnp.broadcast_to(x, (*lead, *x.shape[len(lead) :])).reshape(
                rows, *x.shape[len(lead) :]
            )

        results = kernel(call, *map(flatten, call.operands))
        return tuple(x.reshape(shape) for x, shape in zip(results, shapes, strict=True))

    def instead(self, shapes: Shapes) -> tuple["Decode", Shapes] | None:
        # Scales of rows or pages would be those of positions.
        own_scales = self.quantized and (shapes.scales_of_pages or not self.paged)
        if "indices" not in self.problem.terms or own_scales:
            return None
        return self._of_rows, sizes_of_rows(shapes)

    @property
    def without_indices(self) -> str:
        own = " of caches with scales of rows or pages" if self.quantized else ""
        return super().without_indices + own

    def run_instead(self, kernel, *operands: jax.Array) -> tuple[jax.Array, ...]:
        def run(call: Decode, *operands: jax.Array) -> tuple[jax.Array, ...]:
            return call._run_rows(kernel, *operands)

        return self.run_kernel(run, *operands)

    @property
    def _of_rows(self) -> "Decode":
        return Decode(
            of_rows(self.problem),
            self.backend,
            value_dim=self.value_dim,
            paged=True,
            quantized=self.quantized,
            latent_rows=self.latent_rows,
            packs=True,
        )

    def _run_rows(self, kernel, *operands: jax.Array) -> tuple[jax.Array, ...]:
        """Computes the results of chosen keys: each query is a row, each position a page."""
        call, operands = self.rotated(*operands)
        named = _with_one_pool(call.name_operands(operands))
        q, lengths, table = named["q"], named["lengths"], named.get("page_table")
        batch, q_len, q_heads, _ = q.shape
        positions = blockwise_decode.query_positions(lengths, q_len)
        k, v, written = blockwise_decode.append(
            named["k"],
            named.get("v"),
            named.get("new_k"),
            named.get("new_v"),
            lengths,
            positions,
            table,
            (named.get("key_scale"), named.get("value_scale")),
        )
        slots, refused = blockwise_decode.chosen_slots(
            call.problem, named["indices"], lengths, positions, k, table, call.appends
        )
        # A row that is longer than its cache gives NaN.
        refused = refused[:, None, None]
        if slots.shape[-1]:
            slots = jnp.where(refused, _chosen.LACKS, slots)
        else:
            slots = jnp.broadcast_to(jnp.where(refused, _chosen.LACKS, -1), (batch, q_len, 1))
        slots = slots.reshape(batch * q_len, slots.shape[-1])
        rows = call._of_rows
        given = named | {
            "q": q.reshape(batch * q_len, 1, *q.shape[-2:]),
            "k": k.reshape(-1, 1, *k.shape[-2:]),
            "v": None if v is None else v.reshape(-1, 1, *v.shape[-2:]),
            "page_table": slots,
        }
        if "sinks" in given and given["sinks"].shape[0] != 1:
            given["sinks"] = jnp.repeat(given["sinks"], q_len, axis=0)
        out, lse = kernel(rows, *(given[name] for name in rows.operands))
        out = out.reshape(batch, q_len, q_heads, out.shape[-1])
        lse = jnp.swapaxes(lse.reshape(batch, q_len, q_heads), 1, 2)
        return out, lse, *written

    def packed(self, *operands: jax.Array) -> tuple["Decode", tuple[jax.Array, ...]]:
        if not self.packs:
            return self, operands
        named = self.name_operands(operands)
        named["page_table"], named["lengths"] = _chosen.pack(named["page_table"])
        call = dataclasses.replace(self, packs=False)
        return call, tuple(named[name] for name in call.operands)

    def rotated(self, *operands: jax.Array) -> tuple["Decode", tuple[jax.Array, ...]]:
        """Rotates q and new_k, for kernels that do not: returns the call that is left to do."""
        if self.rotary_base is None:
            return self, operands
        named = self.name_operands(operands)
        positions = blockwise_decode.query_positions(named["lengths"], named["q"].shape[-3])
        for name in ("q", "new_k"):
            if name in named:
                named[name] = rotate(named[name], positions, self.rotary_base)
        return dataclasses.replace(self, rotary_base=None), tuple(named.values())


def cache_dims(name: str, letters: str, latent_rows: bool) -> str:
    """Returns the letters of the dims of an operand, of k where rows are packed: Z their bytes."""
    return letters.replace("H", "Z") if latent_rows and name == "k" else letters


def of_rows(problem: Problem) -> Problem:
    """The problem of one query that sees all positions of its row, of those that it was given."""
    return Problem(
        dtype=problem.dtype,
        scale=problem.scale,
        window=(None, 0),
        bottom_right=True,
        softcap=problem.softcap,
        precision=problem.precision,
        terms=tuple(name for name in problem.terms if name == "sinks"),
        as_written=problem.as_written,
    )


def sizes_of_rows(shapes: Shapes) -> Shapes:
    """The sizes of a call with chosen keys as rows of one query, of pages of one position."""
    return Shapes(
        batch=shapes.batch * shapes.q_len,
        q_len=1,
        kv_len=shapes.chosen or 0,
        q_heads=shapes.q_heads,
        kv_heads=shapes.kv_heads,
        head_dim=shapes.head_dim,
        value_dim=shapes.value_dim,
        page_size=1,
    )


def have_own_scales(operands: Mapping[str, Any]) -> bool:
    """Tells whether pages have scales of their own, or those of their pool (see `of_pages`)."""
    return any(dim != 1 for name in SCALES if name in operands for dim in operands[name].shape[:-1])


def of_pages(scale: jax.Array, pages: Sequence[int]) -> jax.Array:
    """Brings scales to `[P, K]` of as many pages as these leading dims of a cache make, or one."""
    *own, heads = scale.shape
    if set(own) <= {1}:
        return scale.reshape(1, heads)
    return jnp.broadcast_to(scale, (*pages, heads)).reshape(math.prod(pages), heads)


def in_one_pool(
    table: jax.Array, lead: Sequence[int], pools: Sequence[int], pages: int
) -> jax.Array:
    """Renumbers the pages `[B, M]` of rows that have theirs in several pools, laid end to end."""
    count = math.prod(pools)
    if count == 1:
        return table
    pool = np.arange(count, dtype=np.int32).reshape(*pools, *(1,) * (len(lead) - len(pools)))
    pool = np.broadcast_to(pool, lead).reshape(-1, 1)
    there = (table >= 0) & (table < pages)
    return jnp.where(there, table + pages * pool, -1)


def _with_one_pool(named: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Joins the leading dims of caches, to pages, or rows, one behind the other."""
    named = dict(named)
    for name in (x for x in _CACHES if x in named):
        *pages, size, heads, dim = named[name].shape
        named[name] = named[name].reshape(math.prod(pages), size, heads, dim)
    return named


def _blockwise(call: Decode, *operands: jax.Array) -> tuple[jax.Array, ...]:
    call, operands = call.rotated(*operands)
    named = _with_one_pool(call.name_operands(operands))
    results = blockwise_decode.decode(
        call.problem,
        named["q"],
        named["k"],
        named.get("v"),
        named["lengths"],
        *(named.get(x) for x in ("page_table", "new_k", "new_v", "sinks", *SCALES, "indices")),
        value_dim=call.shapes(named).value_dim,
    )
    shapes = call.result_shapes(named)
    return tuple(x.reshape(shape) for x, shape in zip(results, shapes, strict=True))


flash_decode_p = primitive.define("flash_decode")


# ---- derivative ----------------------------------------------------------------------------------


def no_derivative(primals, tangents, *, call: Call):
    """Refuses to differentiate a call over caches, by name."""
    raise NotImplementedError(
        f"{call.function} has no derivative; differentiate flash_attention(query, key, value, "
        "is_causal=True, causal_align='bottom_right', key_value_seq_lengths=lengths)"
    )


ad.primitive_jvps[flash_decode_p] = no_derivative


# ---- the call ------------------------------------------------------------------------------------


def decode(call: Decode, *operands: jax.Array) -> dict[str, jax.Array]:
    """Computes a call's results by name, of operands as `_validate.decode.prepare` makes them.

    Raises: as `_backends.require`.
    """
    _backends.require(call, call.shapes(call.name_operands(operands)))
    if call.latent_rows and call.appends:
        return _append_packed(call, call.name_operands(operands))
    results = flash_decode_p.bind(*vary_over(operands, operands), call=call)
    return dict(zip(call.results, results, strict=True))


def _append_packed(call: Decode, named: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Writes new rows, packed, before the call that reads them."""
    lengths, table, cache = named["lengths"], named.get("page_table"), named["k"]
    q_len, size = named["q"].shape[-3], cache.shape[-3]
    columns = 1 if table is None else table.shape[-1]
    positions = blockwise_decode.query_positions(lengths, q_len)
    has_place = (lengths <= _cache.capacity(columns, size))[..., None]
    new = _latent_rows.pack_latent(named["new_k"])
    cache = _cache.write(cache, new, jnp.where(has_place, positions, -1), table)
    reads = dataclasses.replace(call, appends=False)
    return decode(reads, *((named | {"k": cache})[name] for name in reads.operands)) | {"k": cache}
