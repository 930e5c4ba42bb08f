"""Owns what is measured on a GPU: one list of cells, the same for every peer.

The main cells are those of the FlashAttention papers: 16k tokens in a batch, model dim 2048, head
dim 64, 128 and 256, causal or not, T from 512 to 16384. The cases, of features.py, are problems of
a batch and a length with one feature each.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from .score_functions import UNNAMED

Pass = Literal["forward", "training"]  # training: forward and backward
PASSES: tuple[Pass, ...] = ("forward", "training")
TOKENS = 16384
MODEL_DIM = 2048
HEAD_DIMS = (64, 128, 256)
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
ARRAYS = ("q", "k", "v", "dout")  # [B, T, N, H], in the order that cells take them
BLOCK = 128  # queries and keys of a block, where work is counted by blocks


@dataclasses.dataclass(frozen=True)
class Cell:
    """One problem: self-attention of `batch` sequences of `length` tokens, in bfloat16."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    window: int | None = None  # keys visible to the left of a query's own position; causal
    segment: int | None = None  # length of the packed documents
    shortest: int | None = None  # documents of lengths from this to `segment`, log-uniform
    value_dim: int | None = None  # if it is not head_dim

    @property
    def name(self) -> str:
        value = "" if self.value_dim is None else f"/{self.value_dim}"
        kind = "causal" if self.causal else "full"
        if self.window is not None:
            kind += f" window {self.window}"
        if self.segment is not None:
            least = "" if self.shortest is None else f"{self.shortest} to "
            kind += f" segments {least}{self.segment}"
        if self.kv_heads != self.heads or self.heads * self.head_dim != MODEL_DIM:
            kind += f" heads {self.heads}/{self.kv_heads}"
        return f"d{self.head_dim}{value} {kind} T{self.length}"

    @property
    def columns(self) -> int:
        """Head dim of values and results."""
        return self.value_dim or self.head_dim

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """Where the documents of a row begin, and its end."""
        longest = self.segment or self.length
        if self.shortest is None:
            return np.append(np.arange(0, self.length, longest), self.length).astype(np.int32)
        draw = np.random.default_rng(0).uniform
        found = [0]
        while found[-1] < self.length:
            length = int(np.exp(draw(np.log(self.shortest), np.log(longest))))
            found.append(min(found[-1] + length, self.length))
        return np.asarray(found, np.int32)

    @property
    def ids(self) -> np.ndarray:
        """The document of each position of a row."""
        return np.repeat(np.arange(len(self.starts) - 1, dtype=np.int32), np.diff(self.starts))

    @property
    def pairs(self) -> float:
        """Pairs of a query and a key it sees, by head and sequence; causal counts T²/2."""
        lengths = np.diff(self.starts).astype(float)
        if self.window is not None:
            # Every query sees window + 1 keys, less the triangle that the start cuts off.
            seen = np.minimum(lengths, self.window + 1)
            return float(np.sum(lengths * seen - seen * (seen - 1) / 2))
        return float(np.sum(lengths**2)) * (0.5 if self.causal else 1.0)

    @property
    def block_pairs(self) -> int:
        """Pairs in the blocks of BLOCK queries and keys that hold a visible one, as `pairs`."""
        count, segment = 0, self.segment or self.length
        for first in range(0, self.length, BLOCK):
            last = min(first + BLOCK, self.length) - 1
            begin = first // segment * segment
            if self.window is not None:
                begin = max(begin, first - self.window)
            end = last if self.causal else min((last // segment + 1) * segment, self.length) - 1
            count += end // BLOCK - begin // BLOCK + 1
        return count * BLOCK**2

    @property
    def plain(self) -> "Cell":
        """The same cell without window and segments."""
        return dataclasses.replace(self, window=None, segment=None, shortest=None)

    def flops(self, of: Pass) -> float:
        """Floating-point operations: two products forward, five more backward."""
        columns = self.head_dim + self.columns
        if of == "training":
            columns += 3 * self.head_dim + 2 * self.columns
        return 2 * columns * self.batch * self.heads * self.pairs


def main_cells(
    tokens: int = TOKENS, model_dim: int = MODEL_DIM, lengths: tuple[int, ...] = LENGTHS
) -> list[Cell]:
    """Lists the cells of the papers' charts: 36 of them by default."""
    return [
        Cell(
            batch=tokens // length,
            length=length,
            heads=model_dim // head_dim,
            kv_heads=model_dim // head_dim,
            head_dim=head_dim,
            causal=causal,
        )
        for head_dim in HEAD_DIMS
        for causal in (False, True)
        for length in lengths
    ]


def feature_cells(
    tokens: int = TOKENS, model_dim: int = MODEL_DIM, lengths: tuple[int, ...] = LENGTHS
) -> list[Cell]:
    """Lists cells beside those: a window, packed documents, grouped heads, at the longest T."""
    length = max(lengths)
    short = max(length // 16, 1)
    plain = Cell(
        batch=tokens // length,
        length=length,
        heads=model_dim // 128,
        kv_heads=model_dim // 128,
        head_dim=128,
        causal=True,
    )
    grouped = [
        dataclasses.replace(
            plain, batch=max(tokens // n, 1), length=n, heads=32, kv_heads=kv, causal=causal
        )
        for n in (max(length // 4, 1),)
        for causal in (False, True)
        for kv in (32, 8)
    ]
    return [
        dataclasses.replace(plain, window=short),
        dataclasses.replace(plain, causal=False, segment=short),
        dataclasses.replace(plain, segment=short),
        *grouped,
    ]


# Query and kv heads of models with grouped heads, and T beside B.
GROUPS = ((32, 8), (16, 2), (64, 8), (128, 8), (32, 1))
GROUPED_LENGTHS = ((2048, 8), (4096, 4), (8192, 2))


def grouped_cells(head_dims: Sequence[int] = (64, 128)) -> list[Cell]:
    """Lists cells of grouped heads: of 16k tokens, whatever the model dim."""
    return [
        Cell(batch, length, heads, kv_heads, head_dim, causal)
        for head_dim in head_dims
        for causal in (True, False)
        for heads, kv_heads in GROUPS
        for length, batch in GROUPED_LENGTHS
    ]


# Documents of a row, windows beside T, other head dims.
DOCUMENTS = (512, 1024, 2048, 8192)
DOCUMENTS_LENGTH = 32768
WINDOWS = ((4096, 512), (4096, 1024), (16384, 512), (16384, 1024), (16384, 4096))
OTHER_DIMS = ((72, None), (80, None), (96, None), (100, None), (160, None), (192, None), (192, 128))


def other_cells() -> list[Cell]:
    """Lists cells of documents, of windows and of other head dims: of about model dim 2048."""

    def cell(length: int, tokens: int, head_dim: int, causal: bool, **others: Any) -> Cell:
        heads = MODEL_DIM // head_dim
        return Cell(tokens // length, length, heads, heads, head_dim, causal, **others)

    either = (True, False)
    documents = [{"segment": n} for n in DOCUMENTS] + [{"segment": 8192, "shortest": 64}]
    length = DOCUMENTS_LENGTH
    dims = HEAD_DIMS[:2]
    return [
        *(cell(length, length, d, c, **x) for d in dims for c in either for x in documents),
        *(cell(t, TOKENS, d, True, window=window) for d in dims for t, window in WINDOWS),
        *(cell(4096, TOKENS, d, c, value_dim=v) for d, v in OTHER_DIMS for c in either),
    ]


REACH = 128  # of a table of relative positions


@dataclasses.dataclass(frozen=True)
class Case(Cell):
    """A cell with a feature, of a problem; as many heads of keys and values as of queries."""

    problem: str = ""
    feature: str = ""
    dtype: str = "bfloat16"
    precision: str | None = None  # of products, where it is not jax's default
    bias: str | None = None  # its dims, each the letter of [B, N, T, S] or 1; in dtype
    mask: str | None = None  # [B, 1, T, S]: "half" of the pairs at random, or "documents" of T / 8
    dropout: float = 0.0
    softcap: float | None = None
    # A function of the scores: "alibi", "table", "softcap" of `softcap`, or "learned", a table with
    # a gradient, float32 [N, 2 REACH + 1]; or one of UNNAMED.
    score: str | None = None
    blocks: bool = False  # causal, window and segment by a block mask made of a function
    sinks: bool = False  # float32 [N]
    lengths: bool = False  # of queries and keys: T and T / 2 by turns
    positions: bool = False  # in the order of the index, which peers without them count by

    @property
    def name(self) -> str:
        return f"{self.problem} {self.feature}"

    @property
    def pairs(self) -> float:
        """As of full or causal attention, whatever else is hidden."""
        return self.length**2 * (0.5 if self.causal else 1.0)

    @property
    def operands(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of each array, by name: q, k, v, dout, and what the feature takes."""
        row = (self.batch, self.length)
        array = (*row, self.heads, self.head_dim), self.dtype
        found: dict[str, tuple[tuple[int, ...], str]] = dict.fromkeys(ARRAYS, array)
        if self.bias is not None:
            sizes = (self.batch, self.heads, self.length, self.length)
            dims = zip(self.bias, sizes, strict=True)
            found["bias"] = tuple(1 if dim == "1" else size for dim, size in dims), self.dtype
        if self.sinks:
            found["sinks"] = (self.heads,), "float32"
        if self.score == "learned":
            found["table"] = (self.heads, 2 * REACH + 1), "float32"
        if self.score in UNNAMED:
            found |= {"slopes": ((self.heads,), "float32")}
            found |= dict.fromkeys(("rows", "columns"), (row, "float32"))
        if self.mask is not None:
            found["mask"] = (self.batch, 1, self.length, self.length), "bool"
        if self.lengths:
            found["lengths"] = (self.batch,), "int32"
        if self.segment is not None:
            found["segments"] = row, "int32"
        if self.positions:
            found["positions"] = row, "int32"
        if self.dropout:
            found["dropout_key"] = (2,), "uint32"
        return found

    @property
    def gradients(self) -> tuple[str, ...]:
        """Names of the operands that get a gradient."""
        some = ("q", "k", "v", "bias", "sinks", "table")
        return tuple(name for name in some if name in self.operands)


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "bias_1NTS": {"bias": "1NTS"},
    "bias_BNTS": {"bias": "BNTS"},
    "bias_B11S": {"bias": "B11S"},
    "bias_1N11": {"bias": "1N11"},
    "mask_half": {"mask": "half"},
    "mask_documents": {"mask": "documents"},
    "dropout": {"dropout": 0.1},
    "dropout_causal": {"dropout": 0.1, "causal": True},
    "positions_causal": {"positions": True, "causal": True},
    "float32": {"dtype": "float32"},
    "float32_highest": {"dtype": "float32", "precision": "highest"},
    "softcap": {"softcap": 30.0},
    "sinks": {"sinks": True},
    "lengths": {"lengths": True},
    "documents": {"segment": 512},
    "window": {"causal": True, "window": 1024},
    "documents_short": {"segment": 128},
    "window_short": {"causal": True, "window": 256},
    "softcap_causal": {"softcap": 30.0, "causal": True},
    "sinks_causal": {"sinks": True, "causal": True},
    "lengths_causal": {"lengths": True, "causal": True},
    "documents_causal": {"segment": 2048, "causal": True},
}

_MOST = tuple(FEATURES)[: tuple(FEATURES).index("documents")]
_CAUSAL = (
    "causal",
    "softcap_causal",
    "sinks_causal",
    "lengths_causal",
    "documents_causal",
    "window",
)

# batch, length, heads, head dim, features
PROBLEMS: dict[str, tuple[int, int, int, int, tuple[str, ...]]] = {
    "A": (4, 4096, 12, 64, (*_MOST, "documents", "window")),
    "B": (4, 4096, 16, 128, (*_MOST, "documents", "window")),
    "C": (16, 1024, 16, 128, (*_MOST, "documents_short", "window_short")),
    **{f"D{dim}": (2, 8192, MODEL_DIM // dim, dim, _CAUSAL) for dim in HEAD_DIMS},
}

# Cells of features.py --functions: each function beside the built-in term that means the same, or
# alone.
FUNCTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "causal_function": {"causal": True, "blocks": True},
    "documents": {"segment": 512},
    "documents_function": {"segment": 512, "blocks": True},
    "window": {"causal": True, "window": 1024},
    "window_function": {"causal": True, "window": 1024, "blocks": True},
} | {
    f"{name}{'_causal' * causal}": change | {"causal": causal}
    for causal in (False, True)
    for name, change in {
        "alibi": {"score": "alibi"},
        "table": {"score": "table"},
        "table_gradient": {"score": "learned"},
        "softcap": {"softcap": 30.0},
        "softcap_function": {"softcap": 30.0, "score": "softcap"},
        **{name: {"score": name} for name in UNNAMED},
    }.items()
}


def cases(problem: str, chosen: Sequence[str] | None = None) -> list[Case]:
    """Lists the cases of a problem: of all its features, or of the chosen ones among them."""
    features = {name: FEATURES[name] for name in PROBLEMS[problem][-1]}
    return _cases(problem, features, chosen)


def function_cases(problem: str, chosen: Sequence[str] | None = None) -> list[Case]:
    """Lists the cases of FUNCTIONS with a problem's sizes, or the chosen ones among them."""
    return _cases(problem, FUNCTIONS, chosen)


def _cases(
    problem: str, features: dict[str, dict[str, Any]], chosen: Sequence[str] | None
) -> list[Case]:
    batch, length, heads, head_dim, _ = PROBLEMS[problem]
    return [
        Case(
            **{
                "batch": batch,
                "length": length,
                "heads": heads,
                "kv_heads": heads,
                "head_dim": head_dim,
                "causal": False,
                "problem": problem,
                "feature": feature,
            }
            | change
        )
        for feature, change in features.items()
        if chosen is None or feature in chosen
    ]
