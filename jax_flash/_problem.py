"""What to compute, as two frozen values that every backend reads.

`Problem` holds the meaning of one attention call and knows neither shapes nor backends, but for
what plans of kernels add (`split`, `lines`); `Shapes` holds the sizes. Both are hashable, hold
Python scalars only, and can serve as parameters of a primitive. `_validate/` makes them from a
user's arguments.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jax_flash._function import Function
from jax_flash._philox import WORDS_OF_PART
from jax_flash._terms import TERMS, capture, is_capture, sum_dtype

if TYPE_CHECKING:
    from jax_flash._gpu.distances import Lines

# The parts of a call of float32 that two programs share on GPUs. "carried": q,
# k, v and dout are float16 copies (dtype is "float16"), results float32; "rest": what such copies
# do not hold, else the results of the other are left as they are.
SPLITS = ("", "carried", "rest")
# A softcap c: beyond these, x / c would be 0 or infinite in float32 for common logits x.
SOFTCAPS = (1e-30, 1e30)


@dataclasses.dataclass(frozen=True)
class Problem:
    """The meaning of one attention call, sizes aside.

    Key j is visible to query i when `-left <= j - (i + offset) <= right` and every term present
    agrees. The offset is 0, or with `bottom_right` the number of keys less the number of queries of
    that batch row. Positions, which come in pairs and never with `bottom_right`, stand in place of
    j and i + offset; their difference is exact, beyond int32 too.
    """

    # q, k, v, their gradients and out have it: "float32", "bfloat16", "float16" or "float64".
    dtype: str
    scale: float
    window: tuple[int | None, int | None] = (None, None)  # (left, right); None: unbounded
    bottom_right: bool = False
    softcap: float | None = None
    dropout_rate: float = 0.0
    deterministic: bool = False
    # How products of float32 are made, as jax.lax.Precision has it: "default", "high" or "highest";
    # for other dtypes always the first, and without meaning.
    precision: str = "default"
    terms: tuple[str, ...] = ()  # optional operands present, in the order of TERMS
    whole_blocks: bool = False  # the block mask is known to have no partial blocks
    score: Function | None = None  # of (score, batch, head, query, key), where softcap would be
    split: str = ""  # of SPLITS: the part of a call that is split, as _gpu/carrier.py does
    as_written: bool = False  # _simplify.py rewrites nothing of it
    lines: "Lines | None" = None  # of the distance, that score adds: where a kernel is planned

    @property
    def sum_dtype(self) -> str:
        """The dtype of sums, of the softmax, and of lse and sinks."""
        return sum_dtype(self.dtype)

    @property
    def captures(self) -> tuple[str, ...]:
        """The names of the arrays that `score` reads, operands behind the terms."""
        return () if self.score is None else tuple(map(capture, range(len(self.score.captures))))

    @property
    def optional(self) -> tuple[str, ...]:
        """The names of all operands that a call may have or not."""
        return (*self.terms, *self.captures)

    @property
    def masked(self) -> bool:
        """Whether single pairs may be hidden by a mask of either kind."""
        return "mask" in self.terms or "block_numbers" in self.terms

    def attribute(self) -> dict[str, bool | int | float]:
        """Returns the attribute `problem` of a custom call, as ffi/operands.h reads it."""
        left, right = self.window
        return {
            "scale": self.scale,
            "window_left": -1 if left is None else left,
            "window_right": -1 if right is None else right,
            "bottom_right": self.bottom_right,
            "softcap": 0.0 if self.softcap is None else self.softcap,
            "dropout_rate": self.dropout_rate,
            "deterministic": self.deterministic,
            "terms": sum(1 << list(TERMS).index(name) for name in self.terms),
            "captures": -1 if self.score is None else len(self.score.captures),
        }

    def name_terms(self, operands: Sequence[Any]) -> dict[str, Any]:
        """Returns the optional operands by name."""
        return dict(zip(self.optional, operands, strict=True))


@dataclasses.dataclass(frozen=True)
class TermShape:
    """The sizes of a term `[*B, N, T, S]` of which any dim may be 1, and its dtype.

    `batch` is 1, or that of the call where any leading dim is more.
    """

    dtype: str
    batch: int
    heads: int
    queries: int
    keys: int


@dataclasses.dataclass(frozen=True)
class BlockMaskShape:
    """The sizes of a block mask: its batch as in TermShape, heads or 1, queries of a block."""

    batch: int
    heads: int
    block: int


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The sizes of one attention call; `batch` is the product of the leading dims."""

    batch: int
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    bias: TermShape | None = None
    mask: TermShape | None = None
    block_mask: BlockMaskShape | None = None
    page_size: int | None = None  # positions in a page of the cache; None: there are no pages
    pages: int | None = None  # of the pool, where a plan asks for them
    scales_of_pages: bool = False  # pages of eight bits have scales of their own
    own_captures: tuple[bool, ...] = ()  # which captured arrays differ between batch rows
    chosen: int | None = None  # keys that each query is given to read; None: all
    drops_part: bool = False  # the state of dropout says which part of a sequence this is

    @property
    def own_bias(self) -> TermShape:
        """The sizes of the bias, of a call that has one."""
        if self.bias is None:
            raise ValueError("the call has no bias; expected one of what is planned for a bias")
        return self.bias

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute: no result, or no key."""
        return 0 in (self.batch, self.q_len, self.kv_len, self.q_heads)

    @classmethod
    def of(cls, q: Any, k: Any, v: Any, terms: Mapping[str, Any] | None = None) -> "Shapes":
        """Reads the sizes from q `[*B, T, N, H]`, k `[*B, S, K, H]`, v `[*B, S, K, Hv]`, terms."""
        *batch, q_len, q_heads, head_dim = q.shape
        broadcast: dict[str, Any] = {}
        if terms and "block_bits" in terms:
            *leading, heads, _, _ = terms["block_numbers"].shape
            broadcast["block_mask"] = BlockMaskShape(
                batch=_rows(leading, batch), heads=heads, block=terms["block_bits"].shape[-2]
            )
        for name in ("bias", "mask"):
            if terms and name in terms:
                *leading, heads, queries, keys = terms[name].shape
                broadcast[name] = TermShape(
                    dtype=str(terms[name].dtype),
                    batch=_rows(leading, batch),
                    heads=heads,
                    queries=queries,
                    keys=keys,
                )
        state = (terms or {}).get("dropout_state")
        captured = [x for name, x in (terms or {}).items() if is_capture(name)]
        return cls(
            batch=math.prod(batch),
            q_len=q_len,
            kv_len=k.shape[-3],
            q_heads=q_heads,
            kv_heads=k.shape[-2],
            head_dim=head_dim,
            value_dim=v.shape[-1],
            chosen=terms["indices"].shape[-1] if terms and "indices" in terms else None,
            drops_part=state is not None and state.shape[-1] == WORDS_OF_PART,
            own_captures=tuple(any(n != 1 for n in x.shape[:-1]) for x in captured),
            **broadcast,
        )


def _rows(leading: Sequence[Any], batch: Sequence[Any]) -> Any:
    """Counts the batch rows of a term with these leading dims: one, or those of the call."""
    shared = all(isinstance(size, int) and size == 1 for size in leading)
    return 1 if shared else math.prod(batch)


def order_terms(terms: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the operands that are present (not None), in the order of TERMS."""
    return {name: terms[name] for name in TERMS if terms.get(name) is not None}
