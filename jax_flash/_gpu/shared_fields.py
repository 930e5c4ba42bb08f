"""The parameters that the kernels of every family share by name, and what goes with them.

`shared` has the fields by name: a family's struct lists those that it takes, in its own order. The
shared headers of cuda/kernels read them by these names.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jax_flash._gpu.buffers import RESULT_SCALE
from jax_flash._gpu.emit import MAX_CAPTURES
from jax_flash._gpu.fields import Field, Scratch, Struct
from jax_flash._gpu.plan import Kernel
from jax_flash._gpu.sizes import (
    AnySize,
    B,
    K,
    N,
    S,
    Size,
    T,
    at_most,
    ceil_div,
    equal,
    maximum,
    product,
    where,
)
from jax_flash._gpu.traits import adds_to_scores
from jax_flash._gpu.workspaces import mask_words
from jax_flash._problem import Problem, Shapes

LOG2E = math.log2(math.e)
MAX_INT = 2**31 - 1
MASK_THREADS = 128  # of a CTA of mask_plan
_MOST_WINDOW = 2**30 - 1  # sums of a window and a position stay below 2^31
_SPLIT_THREADS, _SPLIT_ROWS = 256, 64  # of a CTA of split_float32


def shared(problem: Problem) -> dict[str, Field]:
    """Returns the fields of the terms, the sizes and the scalars of a problem, by name."""
    rate, cap = problem.dropout_rate, problem.softcap

    def term(type_: str, name: str, shape: str) -> Field:
        return Field(f"const {type_}*", name, name if name in problem.terms else None, shape)

    window = _distance if "query_positions" in problem.terms else window_side
    fields = (
        Field("int", "batch", B, "B"),
        Field("int", "query_len", T, "T"),
        Field("int", "kv_len", S, "S"),
        Field("int", "query_heads", N, "N"),
        Field("int", "kv_heads", K, "K"),
        term("int", "query_lengths", "[B]"),
        term("int", "key_value_lengths", "[B]"),
        term("int", "query_segments", "[B, T]"),
        term("int", "key_value_segments", "[B, S]"),
        term("int", "query_positions", "[B, T]; with positions a window's sides are uint32"),
        term("int", "key_value_positions", "[B, S]"),
        Field("Broadcast", "bias", _broadcast(problem, "bias")),
        term("float", "sinks", "[B or 1, N]"),
        Field(
            "long long",
            "sinks_batch_stride",
            where(equal(Size("sinks.B"), 1), 0, N) if "sinks" in problem.terms else 0,
            "elements from one batch row to the next: N, or 0 when shared",
        ),
        term(
            "unsigned",
            "dropout_state",
            "[B, N, 4] key word 0, key word 1, head id, batch id; [B, N, 6] and the first counters",
        ),
        Field("int", "window_left", window(problem.window[0]), "keys visible before; kWindowLeft"),
        Field("int", "window_right", window(problem.window[1]), "after, causal: 0; kWindowRight"),
        Field("float", "scale", float(problem.scale), "of the logits, before the softcap"),
        Field("float", "softcap_inner", problem.scale / cap if cap else 0.0, "scale / cap"),
        Field(
            "float",
            "softcap_bias",
            1 / cap if cap and adds_to_scores(problem) else 0.0,
            "1 / cap, kAddsToScores",
        ),
        Field(
            "unsigned",
            "dropout_threshold",
            math.floor(rate * 2**15 + 0.5) * 0x10001,
            "rate * 2^15, in both halves; below it a weight is dropped",
        ),
        Field("float", "dropout_scale", 1 / (1 - rate), "1 / (1 - rate)"),
        term("int", "score_ids", "[B, N, 2] batch row, head, as a function of scores has them"),
        Field("Capture", "captures", _captures(problem), "arrays that a function of scores reads"),
        Field(
            "const float*",
            "result_scale",
            RESULT_SCALE if problem.split else None,
            "[] a factor of results, 0 where the other program computes them: carrier.py",
        ),
    )
    return {field.name: field for field in fields}


def take(fields: dict[str, Field], names: str) -> tuple[Field, ...]:
    """Returns the fields of some names."""
    return tuple(fields[name] for name in names.split())


# The same numbers for all kernels of a pass: the unit of scores, in which an exponential is exp2.


def forward_scale_log2(problem: Problem) -> Field:
    return _scale_log2(problem, first=problem.scale <= 0)


def backward_scale_log2(problem: Problem) -> Field:
    return _scale_log2(problem)


def _scale_log2(problem: Problem, *, first: bool = False) -> Field:
    """`first`: scores are scaled ahead, as where something is added to them or made of them."""
    first = first or adds_to_scores(problem) or problem.score is not None
    unit = problem.softcap or (1.0 if first else problem.scale)
    return Field(
        "float",
        "scale_log2",
        LOG2E * unit,
        "log2(e) * (scale, the cap with kSoftcap, or 1 where scores are scaled ahead)",
    )


@dataclasses.dataclass(frozen=True)
class Masks:
    """What kernels take of masks of both kinds, and the launch that plans them.

    Attributes:
      mask, block_mask: fields of those names.
      plan: the launch of mask_plan, none without a mask.
      checks: of `Launch`.
    """

    mask: Field
    block_mask: Field
    plan: tuple[Kernel, ...]
    checks: tuple[tuple[AnySize, str], ...]


def masks(
    problem: Problem, shapes: Shapes, block_q: int, block_kv: int, *, by_key: bool, beside: bool
) -> Masks:
    """Returns what the kernels of a pass take of its masks, by blocks of pairs.

    `by_key`: the backward's order, keys before queries. `beside`: of `Kernel`.
    """
    mask, block, checks = shapes.mask, shapes.block_mask, []
    ctas: AnySize = 0
    words = flags = batch = head = None
    if mask is not None:
        rows, heads, queries, keys = (Size(f"mask.{letter}") for letter in "BNTS")
        query_blocks, key_blocks = ceil_div(queries, block_q), ceil_div(keys, block_kv)
        lines, columns = (key_blocks, query_blocks) if by_key else (query_blocks, key_blocks)
        if by_key:
            bits = (keys, columns, mask_words(mask.queries, block_q))
        else:
            bits = (lines, columns, block_q * mask_words(mask.keys, block_kv))
        words = Scratch("s32", (rows * heads, *bits))
        flags = Scratch("u8", (rows * heads, lines, columns))
        batch, head = where(equal(rows, 1), 0, heads), where(equal(heads, 1), 0, 1)
        ctas = product(rows, heads, query_blocks, key_blocks)
    of_bytes = Field(
        "Mask",
        "mask",
        Struct(
            "Mask",
            (
                Field("Broadcast", "bytes", _broadcast(problem, "mask")),
                Field("unsigned*", "words", words),
                Field("unsigned char*", "flags", flags),
                Field("int", "batch", batch),
                Field("int", "head", head),
            ),
        ),
        "kHasMaskBytes",
    )
    values: dict[str, Any] = {}
    if block is not None:
        rows, heads, stored = map(Size, ("block_numbers.B", "block_numbers.N", "block_bits.C"))
        query_blocks, key_blocks = ceil_div(T, block_q), ceil_div(S, block_kv)
        lines, columns = (key_blocks, query_blocks) if by_key else (query_blocks, key_blocks)
        groups = ceil_div(columns, 32)
        count = product(rows, heads, lines, groups, 32)  # threads that make a flag each
        words_of_one = block.block * (block.block // 16)
        values = {
            "numbers": "block_numbers",
            "bits": "block_bits",
            "flags": Scratch("s32", (rows * heads, lines, groups, 4)),
            "bits_batch": where(equal(Size("block_bits.B"), 1), 0, stored * words_of_one),
            "batch": where(equal(rows, 1), 0, heads),
            "head": where(equal(heads, 1), 0, 1),
            "stored": stored,
            "flag_count": count,
        }
        ctas = ctas + ceil_div(count, MASK_THREADS)
        checks = [(at_most(count, MAX_INT), "the block mask is too large")]
        for length, name in ((T, "I"), (S, "J")):
            fits = equal(Size(f"block_numbers.{name}"), ceil_div(length, block.block))
            checks.append((fits, "block_numbers does not fit the sequences"))
    names = {
        "numbers": "const int*",
        "bits": "const unsigned short*",
        "flags": "unsigned*",
        "bits_batch": "long long",
        **dict.fromkeys(("batch", "head", "stored", "flag_count"), "int"),
    }
    fields = tuple(Field(type_, name, values.get(name)) for name, type_ in names.items())
    of_blocks = Field("BlockMask", "block_mask", Struct("BlockMask", fields), "kMaskBlock")
    made = mask is not None or block is not None
    plan = (Kernel("mask_plan", ctas, MASK_THREADS, beside=beside),) if made else ()
    return Masks(of_bytes, of_blocks, plan, tuple(checks))


def term_sizes(name: str) -> tuple[Size, Size, Size, Size]:
    """Returns the sizes of a bias or mask: each 1, or that of the call."""
    batch, heads, queries, keys = (Size(f"{name}.{letter}") for letter in "BNTS")
    return batch, heads, queries, keys


def _broadcast(problem: Problem, term: str) -> Struct:
    """Returns the distances in elements."""
    steps: list[AnySize] = [0, 0, 0, 0]
    if term in problem.terms:
        batch, heads, queries, keys = term_sizes(term)
        rests = (product(heads, queries, keys), queries * keys, keys, 1)
        sizes = zip((batch, heads, queries, keys), rests, strict=True)
        steps = [where(equal(size, 1), 0, rest) for size, rest in sizes]
    names = ("batch", "head", "query", "key")
    data = Field("const void*", "data", term if term in problem.terms else None)
    own = (Field("long long", *pair) for pair in zip(names, steps, strict=True))
    return Struct("Broadcast", (data, *own))


def _captures(problem: Problem) -> list[Struct]:
    made = []
    for i in range(MAX_CAPTURES):
        name = f"capture{i}" if i < len(problem.captures) else None
        batch = 0 if name is None else where(equal(Size(f"{name}.B"), 1), 0, Size(f"{name}.A"))
        fields = Field("const void*", "data", name), Field("long long", "batch", batch)
        made.append(Struct("Capture", fields))
    return made


def window_side(side: int | None) -> int:
    """Returns how far a side of a window reaches, 0 where all is seen and no kernel asks."""
    return min(side or 0, _MOST_WINDOW)


def _distance(side: int | None) -> int:
    """Returns a side in the bits of a uint32: no two positions are farther apart."""
    return min(side or 0, 2**32 - 1)


# ---- float32 as two float16, which split_float32 writes ahead: cuda/kernels/halves.cuh ----------


def half_columns(dim: int) -> int:
    """Columns of each of the two planes of a row: whole pieces of 16 bytes."""
    return 8 * -(-dim // 8)


def halves(shapes: Shapes, names: str, *, present: bool) -> tuple[Field, ...]:
    """Returns where split_float32 writes arrays and a factor for 64 rows of each, kHalves."""
    of = {
        "query": (T, N, shapes.head_dim),
        "key": (S, K, shapes.head_dim),
        "value": (S, K, shapes.value_dim),
        "dout": (T, N, shapes.value_dim),
    }
    rows, factors = [], []
    for name in names.split():
        length, heads, dim = of[name]
        planes = Scratch("s32", (B, length, heads, half_columns(dim)))
        rows.append(Field("void*", f"{name}_halves", planes if present else None))
        each = Scratch("f32", (B * heads, ceil_div(length, _SPLIT_ROWS)))
        factors.append(Field("float*", f"{name}_factors", each if present else None))
    return *rows, *factors


def split(like_queries: int, besides: AnySize = 0, *, beside: bool) -> Kernel:
    """Returns the launch of split_float32: for so many arrays like the queries, keys and values.

    `besides`: CTAs for something else. `beside`: of `Kernel`.
    """
    queries, keys = N * ceil_div(T, _SPLIT_ROWS), K * ceil_div(S, _SPLIT_ROWS)
    ctas = B * (like_queries * queries + 2 * keys) + besides
    return Kernel("split_float32", ctas, _SPLIT_THREADS, beside=beside)


# ---- what all kernels refuse ---------------------------------------------------------------------


def limits() -> tuple[tuple[AnySize, str], ...]:
    """Returns the checks of sizes beyond 32-bit indices (offsets into arrays are 64-bit)."""
    most = MAX_INT // 2
    checks = [(equal(N % K, 0), "the heads of k and v do not divide those of q")]
    for name, size in (("B", B), ("T", T), ("S", S), ("N", N), ("K", K)):
        checks.append((at_most(size, most), f"dim {name} is beyond {most}"))
    # Marks of 16 rows, in blocks of up to 192 of a head, have numbers of 32 bits: one row takes 12,
    # in the backward 16.
    rows = ceil_div(maximum(T, S), 64) + 2
    few = at_most(B * N, MAX_INT // 8 // rows)
    return *checks, (few, "batch x heads x (sequence length / 64 + 2) is beyond 2^28")
