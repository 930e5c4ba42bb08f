"""Owns what is measured on a GPU: one list of cells, the same for every peer.

The main cells are those of the FlashAttention papers: 16k tokens in a batch, model dim 2048, head
dim 64, 128 and 256, causal or not, T from 512 to 16384.
"""

import dataclasses
from typing import Literal

Pass = Literal["forward", "training"]  # training: forward and backward
PASSES: tuple[Pass, ...] = ("forward", "training")
TOKENS = 16384
MODEL_DIM = 2048
HEAD_DIMS = (64, 128, 256)
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
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

    @property
    def name(self) -> str:
        kind = "causal" if self.causal else "full"
        if self.window is not None:
            kind += f" window {self.window}"
        if self.segment is not None:
            kind += f" segments {self.segment}"
        if self.kv_heads != self.heads or self.heads * self.head_dim != MODEL_DIM:
            kind += f" heads {self.heads}/{self.kv_heads}"
        return f"d{self.head_dim} {kind} T{self.length}"

    @property
    def pairs(self) -> float:
        """Pairs of a query and a key it sees, by head and sequence; causal counts T²/2."""
        length, copies = self.length, 1
        if self.segment is not None:
            length, copies = self.segment, self.length // self.segment
        if self.window is not None and self.window < length:
            # Every query sees window + 1 keys, less the triangle that the start cuts off.
            return copies * (length * (self.window + 1) - self.window * (self.window + 1) / 2)
        return copies * length * length * (0.5 if self.causal else 1.0)

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
        return dataclasses.replace(self, window=None, segment=None)

    def flops(self, of: Pass) -> float:
        """Floating-point operations: two products forward, five more backward."""
        products = 2 if of == "forward" else 7
        return 2 * products * self.batch * self.heads * self.head_dim * self.pairs


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
