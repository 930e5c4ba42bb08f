"""What the backward kernels of every family take, and the launches around the main kernel.

A family's BackwardTiling has the numbers; that of `sm90/backward_tiling.py` says what they mean.
Read next: cuda/kernels/backward_common.cuh.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from jax_flash._gpu.fields import Field, Scratch
from jax_flash._gpu.plan import Kernel, Set, Step, Zero
from jax_flash._gpu.shared_fields import (
    MAX_INT,
    Masks,
    backward_scale_log2,
    limits,
    masks,
    shared,
    term_sizes,
)
from jax_flash._gpu.sizes import (
    SMS,
    AnySize,
    B,
    K,
    N,
    S,
    T,
    at_most,
    ceil_div,
    equal,
    maximum,
    minimum,
    product,
    where,
)
from jax_flash._gpu.traits import is_one, is_wide, known
from jax_flash._gpu.workspaces import boxes
from jax_flash._problem import Problem, Shapes

_FINISH_CTAS = 4  # of a multiprocessor, that look at marks
_SUMMED = 32  # elements of a bias's gradient of a CTA of flash_backward_bias_sum
_BATCH_ROWS, _BATCH_KEYS = 2, 64  # of a CTA that sums over batch rows: backward_bias_sum.cuh


@dataclasses.dataclass(frozen=True)
class Backward:
    """A backward pass by a tiling: its fields by name, and counts of blocks."""

    problem: Problem
    shapes: Shapes
    tiling: Any
    main: str  # the entry point of the main kernel
    persistent: bool  # the main kernel has as many CTAs as run at once
    with_dlse: bool = False
    with_dbias: bool = False

    @property
    def query_blocks(self) -> AnySize:
        return ceil_div(T, self.tiling.block_q)

    @property
    def key_blocks(self) -> AnySize:
        return ceil_div(S, self.tiling.block_kv)

    @property
    def unit_heads(self) -> AnySize:
        """Query heads that a unit walks: all of a key/value head, or so many of them."""
        return self.tiling.unit_heads or N // K

    @property
    def head_units(self) -> AnySize:
        """Units of a head: of pairs one more than blocks of keys where their number is odd."""
        if self.tiling.pairs:
            return ceil_div(self.key_blocks, 2) * 2
        return self.key_blocks

    @property
    def block_units(self) -> AnySize:
        """Units of a block of keys, of all batch rows and heads."""
        return B * N // self.tiling.unit_heads if self.tiling.unit_heads else B * K

    @property
    def l2_heads(self) -> AnySize:
        # Where the batch was symbolic a tiling may name more heads than there are.
        return minimum(self.tiling.l2_heads, self.block_units)

    @property
    def set_heads(self) -> AnySize:
        """Query heads of a set of the ring."""
        return self.l2_heads * self.unit_heads

    @property
    def numbers(self) -> AnySize:
        """A head's rows in arrays of a number for each query."""
        return stored_rows(self.shapes, self.tiling)

    @functools.cached_property
    def masks(self) -> Masks:
        problem, tiling = self.problem, self.tiling
        blocks = tiling.block_q, tiling.block_kv
        return masks(problem, self.shapes, *blocks, by_key=True, beside=True)

    def fields(self) -> dict[str, Field]:
        """Returns the fields that families share, by name."""
        problem, tiling = self.problem, self.tiling
        heads, found = B * N, self.masks
        sums_in_dq = tiling.dq_row_bytes != 0
        head_dim = self.shapes.head_dim
        columns = head_dim if tiling.compact else 64 * boxes(head_dim)
        if sums_in_dq:
            columns = head_dim // 2
        rows = T if tiling.compact else self.query_blocks * tiling.block_q
        sum_heads = heads
        if tiling.ring_sets:
            sum_heads = minimum(heads, tiling.ring_sets * self.set_heads)
        sum_: Scratch | str | None = Scratch("f32", (sum_heads, rows, columns))
        if tiling.stores_dq:
            sum_ = None
        elif is_wide(problem) and (sums_in_dq or tiling.compact):
            sum_ = "dq"  # of float32: it holds its sum
        marks = ceil_div(S, 16) if tiling.compact else self.key_blocks * (tiling.block_kv // 16)

        def ranges(of: str, blocks: AnySize) -> Scratch | None:
            return Scratch("s32", (B, blocks, 2)) if f"query_{of}" in problem.terms else None

        turns = (heads, self.query_blocks, tiling.turn_parts)
        fields = (
            Field("const void*", "query_data", "q", "[B, T, N, H]"),
            Field("const void*", "key_data", "k", "[B, S, K, H]"),
            Field("const void*", "value_data", "v", "[B, S, K, Hv]"),
            Field("const void*", "out_data", "out", "[B, T, N, Hv]"),
            Field("const void*", "dout_data", "dout", "[B, T, N, Hv]"),
            Field("const float*", "lse", "lse", "[B, N, T] natural logarithm"),
            Field(
                "const float*",
                "dlse",
                "dlse" if self.with_dlse else None,
                "[B, N, T], kHasDlse",
            ),
            Field("void*", "dquery", "dq", "[B, T, N, H]"),
            Field("void*", "dkey_data", "dk", "[B, S, K, H]"),
            Field("void*", "dvalue_data", "dv", "[B, S, K, Hv]"),
            Field(
                "void*",
                "dbias",
                "dbias" if self.with_dbias else None,
                "of the bias's shape and type, kHasDbias",
            ),
            found.mask,
            found.block_mask,
            backward_scale_log2(problem),
            # Scratch arrays, all but `marks` and `dbias_sum` written by flash_backward_prepare; Q
            # is the number of blocks of queries.
            Field(
                "float*",
                "lse_log2",
                Scratch("f32", (heads, self.numbers)),
                "[B, N, Q * kBlockQ]: -lse * log2(e), -inf on rows that see nothing",
            ),
            Field(
                "float*",
                "minus_delta",
                Scratch("f32", (heads, self.numbers)),
                "[B, N, Q * kBlockQ]: dlse - rowsum(out * dout)",
            ),
            Field(
                "float*",
                "dq_sum",
                sum_,
                "[B, N, Q * kBlockQ, 64 * ceil(H / 64)] in the order of fragments, or with "
                "kDqRowBytes [B, T, N, H / 2], the other half in `dquery`; with kDeterministic the "
                "first unit writes it; none with kStoresDq",
            ),
            Field("int*", "next_unit", Scratch("s32", (1,)), "zero when the main kernel starts"),
            Field(
                "int*",
                "turns",
                Scratch("s32", turns) if problem.deterministic else None,
                "[B, N, Q, kTurnParts]: the last block of keys that added, plus one; "
                "kDeterministic",
            ),
            Field(
                "int*",
                "query_segment_ranges",
                ranges("segments", self.query_blocks),
                "[B, Q, 2] smallest and largest id, kHasSegments",
            ),
            Field(
                "int*",
                "key_segment_ranges",
                ranges("segments", self.key_blocks),
                "[B, ceil(S / kBlockKV), 2], likewise",
            ),
            Field(
                "int*",
                "query_position_ranges",
                ranges("positions", self.query_blocks),
                "[B, Q, 2] the same of positions, kHasPositions",
            ),
            Field(
                "int*",
                "key_position_ranges",
                ranges("positions", self.key_blocks),
                "[B, ceil(S / kBlockKV), 2], likewise",
            ),
            Field(
                "int*",
                "marks",
                Scratch("s32", (B * K, marks, 2)),
                "[B, K, ceil(S / kBlockKV), kBlockKV / 16, 2]: are 16 rows not all finite?",
            ),
            *self._of_dbias(),
            Field(
                "int",
                "l2_heads",
                self.l2_heads,
                "units of a block of keys that the schedule walks together, >= 1",
            ),
        )
        return shared(problem) | {field.name: field for field in fields}

    # The gradient of a bias.

    @property
    def _dbias_ctas(self) -> int:
        """CTAs that share the sums of one of the bias's blocks; 0: dS is stored."""
        if not self.with_dbias or self.tiling.stores_dbias:
            return 0
        return dbias_ctas(self.shapes, self.tiling)

    def _of_dbias(self) -> tuple[Field, ...]:
        batch, heads, queries, keys = term_sizes("bias")
        elements, ctas, kept = product(batch, heads, queries, keys), self._dbias_ctas, None
        if self.with_dbias and self.tiling.dbias_heads:
            kept = Scratch("f32", (self.tiling.dbias_heads, N // K * B * T * S // 2))
        elif ctas > 1:
            kept = Scratch("f32", (ctas, elements))
        names = ("bias_elements", "bias_batches", "bias_heads", "dbias_ctas")
        values = (elements, batch, heads, ctas) if self.with_dbias else (0, 0, 0, 0)
        meanings = (
            "of the bias: batch rows * heads * queries * keys that it has",
            "batch rows that it has: B or 1",
            "N or 1",
            "CTAs that share the sums of one of its blocks",
        )
        launched = self.tiling.dbias_heads if self.with_dbias else 0
        return (
            Field(
                "float*",
                "dbias_sum",
                kept,
                "[dbias_ctas, bias_elements], of several CTAs; or with kDbiasByHeads dS in 16 "
                "bits [B, heads of a launch, T, S]",
            ),
            *(
                Field("int" if i else "long long", *row)
                for i, row in enumerate(zip(names, values, meanings, strict=True))
            ),
            Field("int", "first_kv_head", 0, "of those whose units a launch takes, kDbiasByHeads"),
            Field("int", "launched_kv_heads", launched, "and how many"),
        )

    def checks(self) -> tuple[tuple[AnySize, str], ...]:
        """Returns what has to hold of the sizes."""
        tiling, shapes = self.tiling, self.shapes
        empty = "the CUDA kernels take no empty sequences"
        checks = [(at_most(1, T), empty), (at_most(1, S), empty), *limits(), *self.masks.checks]
        other = "this tiling is for another shape of dq"
        if tiling.dq_row_bytes:
            item = 4 if is_wide(self.problem) else 2
            row = N * (shapes.head_dim * item)
            checks += [(equal(row, tiling.dq_row_bytes), other)]
            checks += [(equal(T % tiling.block_q, 0), other)]
        if tiling.stores_dq:
            keys = tiling.block_kv * (2 if tiling.pairs else 1)
            checks.append((at_most(S, keys), f"this tiling is for at most {keys} keys"))
        if tiling.dq_row_bytes or tiling.compact or tiling.stores_dq:
            rows = product(B, T, N)
            checks.append((at_most(rows, MAX_INT), "this tiling is for fewer rows of dq"))
        if tiling.unit_heads:
            fits = equal(N // K % tiling.unit_heads, 0)
            checks.append((fits, "this tiling is for groups of other heads"))
        if self.with_dbias and tiling.stores_dbias:
            batch, heads, queries, keys = term_sizes("bias")
            pairs = product(B, N, T, S)
            of_all = product(batch, heads, queries, keys) * where(equal(batch, 1), B, 1)
            checks.append((equal(of_all, pairs), "this tiling is for a bias of another shape"))
            if tiling.dbias_heads or getattr(tiling, "dbias_rows", False):
                checks.append((equal(S % 4, 0), "dS is added up in rows of whole fours"))
            if tiling.clears_dbias and self.problem.dtype != "float32":
                words = equal(product(batch, heads, queries, keys) % 2, 0)
                checks.append((words, "the gradient of the bias is zeroed by words"))
        return tuple(checks)

    # Launches.

    def kernel(
        self,
        entry: str,
        grid: AnySize,
        threads: int,
        shared_bytes: int = 0,
        *,
        overlaps: bool = False,
    ) -> Kernel:
        return Kernel(entry, grid, threads, shared_bytes, beside=True, overlaps=overlaps)

    @property
    def _parts(self) -> int:
        """CTAs of flash_backward_prepare for 64 rows; of several the kernels behind start early."""
        return getattr(self.tiling, "prepare_parts", 1)

    def _main(self, units: AnySize) -> Kernel:
        tiling, cluster = self.tiling, 1
        grid = minimum(SMS * tiling.resident, units) if self.persistent else units
        if tiling.pairs:
            cluster, grid = 2, grid // 2 * 2
        return Kernel(
            self.main,
            grid,
            tiling.threads,
            tiling.shared_bytes,
            overlaps=self._parts > 1,
            cluster=cluster,
        )

    def steps(self, ahead: tuple[Step, ...] = (), more_units: AnySize = 0) -> tuple[Step, ...]:
        """Returns all launches.

        `ahead`: a family's own, first. `more_units`: beside those of all blocks.
        """
        tiling = self.tiling
        pieces = product(B * N, self.query_blocks, tiling.block_q // 64)
        steps: list[Step] = [*ahead, *self.masks.plan]
        batch, heads, queries, keys = term_sizes("bias")
        if self.with_dbias and tiling.clears_dbias:
            wide = self.problem.dtype == "float32"
            elements = product(batch, heads, queries, keys)
            steps.append(Zero("dbias", elements if wide else elements // 2))
        if not tiling.halves:  # else split_float32 does it
            steps.append(self.kernel("flash_backward_prepare", pieces * self._parts, 128))
        if self.with_dbias and tiling.dbias_heads:
            steps += self._by_heads()
        else:
            steps.append(self._main(self.block_units * self.head_units + more_units))
        heads_left = B * N
        if tiling.ring_sets:
            done = maximum(ceil_div(B * N, self.set_heads) - tiling.ring_lag, 0)
            heads_left = heads_left - done * self.set_heads
        tiles = self.query_blocks * (tiling.block_q // 64)
        finish = product(heads_left, tiles, boxes(self.shapes.head_dim))
        if tiling.marks_rows:  # they alone are looked at
            finish = minimum(_FINISH_CTAS * SMS, stored_marks())
        if tiling.unit_heads:
            finish = finish + product(B * K, self.key_blocks, tiling.block_kv // 64)
        steps.append(self.kernel("flash_backward_finish", finish, 128, overlaps=self._parts > 1))
        if self._dbias_ctas:
            grid = product(
                batch * heads,
                where(equal(queries, 1), 1, self.query_blocks),
                where(equal(keys, 1), 1, self.key_blocks),
                self._dbias_ctas,
            )
            shared_bytes = tiling.bias_shared_bytes
            entry = "flash_backward_bias"
            steps.append(self.kernel(entry, grid, 2 * tiling.block_kv, shared_bytes))
        if self._dbias_ctas > 1:
            elements = product(batch, heads, queries, keys)
            steps.append(self.kernel("flash_backward_bias_sum", ceil_div(elements, _SUMMED), 256))
        return tuple(steps)

    def _by_heads(self) -> list[Step]:
        """Launches for some key/value heads at a time, whose dS is summed over the batch rows."""
        tiling, steps = self.tiling, []
        of_head = product(N // K, ceil_div(T, _BATCH_ROWS), ceil_div(S, _BATCH_KEYS))
        for first in range(0, self.shapes.kv_heads, tiling.dbias_heads):
            count = min(tiling.dbias_heads, self.shapes.kv_heads - first)
            steps += [Set("first_kv_head", first), Set("launched_kv_heads", count)]
            steps.append(self._main(product(B, self.key_blocks, count)))
            steps.append(self.kernel("flash_backward_bias", of_head * count, 2 * tiling.block_kv))
        return steps


def stored_rows(shapes: Shapes, tiling: Any) -> AnySize:
    """Counts a head's rows in arrays of a number for each query: whole blocks.

    A compact tiling whose queries are one block has what fills pieces of 16 bytes.
    """
    if tiling.compact and shapes.q_len <= tiling.block_q:
        return 4 * ceil_div(T, 4)
    return tiling.block_q * ceil_div(T, tiling.block_q)


def stored_marks() -> AnySize:
    """Counts the marks of a dq that the main kernel stores: one for 64 rows."""
    return ceil_div(product(B, T, N), 64)


def dbias_ctas(shapes: Shapes, tiling: Any) -> int:
    """Counts the CTAs that share the gradient of one of a bias's blocks."""
    bias = shapes.own_bias
    query_blocks = -(-known(shapes.q_len, 1) // tiling.block_q)
    key_blocks = -(-known(shapes.kv_len, 1) // tiling.block_kv)
    of_call = (known(shapes.batch, 1), known(shapes.q_heads, 1), query_blocks, key_blocks)
    own = pairs = 1
    sizes = (bias.batch, bias.heads, bias.queries, bias.keys)
    for size, count in zip(sizes, of_call, strict=True):
        own *= 1 if is_one(size) else count
        pairs *= count
    # One CTA a block where blocks are more than half as many as CTAs.
    return 1 if 2 * own > tiling.sum_ctas else max(1, min(pairs // own, -(-tiling.sum_ctas // own)))
