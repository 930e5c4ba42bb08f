"""Owns the shapes that are measured: how one is written, and those that nobody has to write."""

import argparse
import dataclasses
import re

DTYPES = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True)
class Cell:
    """Self-attention of one shape."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    dtype: str

    @property
    def name(self) -> str:
        """Says it as `--shape` reads it."""
        heads = str(self.heads) if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        words = [str(self.batch), str(self.length), heads, str(self.head_dim)]
        return ",".join([*words, *["causal"] * self.causal, self.dtype])

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Lists the shapes of query, key, value and the output's gradient."""
        return tuple(
            (self.batch, self.length, heads, self.head_dim)
            for heads in (self.heads, self.kv_heads, self.kv_heads, self.heads)
        )

    def flops(self, backward: bool) -> float:
        """Counts products as the papers do: half of them if causal, 3.5 times with gradients."""
        count = 4.0 * self.batch * self.heads * self.length**2 * self.head_dim
        return count * (0.5 if self.causal else 1.0) * (3.5 if backward else 1.0)


MOST_FLOPS = 1e18  # half an hour of an H100; XLA ends the process where a size is beyond int64


def read(text: str) -> Cell:
    """Reads "B,T,N,H" or "B,T,N/K,H", with "causal" or a dtype behind it."""

    def wrong(what: str) -> argparse.ArgumentTypeError:
        example = "4,4096,32/8,128,causal"
        return argparse.ArgumentTypeError(
            f"{text!r}: {what}; expected B,T,N,H or B,T,N/K,H, then causal or a dtype: {example}"
        )

    sizes, words = text.split(",")[:4], text.split(",")[4:]
    heads, slash, kv_heads = sizes[2].partition("/") if len(sizes) > 2 else ("", "", "")
    numbers = [*sizes[:2], heads, kv_heads if slash else heads, *sizes[3:]]
    if len(numbers) != 5 or not all(re.fullmatch(r"[1-9]\d*", x) for x in numbers):
        raise wrong("four numbers above 0 come first")
    batch, length, n, k, head_dim = map(int, numbers)
    if n % k:
        raise wrong(f"{k} heads of key and value do not divide {n} of query")
    if unknown := {*words} - {"causal", *DTYPES}:
        raise wrong(f"{sorted(unknown)[0]!r} is none of causal, {', '.join(DTYPES)}")
    dtypes = [word for word in words if word in DTYPES] or ["bfloat16"]
    if len(dtypes) > 1:
        raise wrong(f"{' and '.join(dtypes)} exclude each other")
    cell = Cell(batch, length, n, k, head_dim, "causal" in words, dtypes[0])
    if cell.flops(backward=True) > MOST_FLOPS:
        raise wrong(f"its gradients take {cell.flops(backward=True):.0e} operations, above 1e18")
    return cell


# What models have, those first that most readers ask for: a short run ends before the last.
_GPU = (
    "4,4096,16,128,causal", "4,4096,32/8,128,causal", "16,1024,12,64,causal", "4,4096,16,128",
    "1,16384,16,128,causal", "4,4096,12,64", "2,8192,64/8,128,causal", "64,197,16,64",
    "4,4096,8,256,causal", "32,512,16,64", "1024,16,16,64", "4,2048,12,64,float32",
)  # fmt: skip
_CPU = (
    "1,1024,8,64,causal", "1,1024,8,64,causal,float32", "1,1024,8,64", "1,1024,8,64,float32",
    "1,1024,16/4,64,causal", "4,256,8,64,causal", "1,2048,8,64,causal", "8,197,6,64",
    "1,1024,4,128,causal", "32,32,8,64", "1,512,4,256,causal", "1,4096,4,64,causal",
)  # fmt: skip


def defaults(platform: str) -> list[Cell]:
    """Lists the shapes that are measured where none is named, on "gpu", or on "cpu" and others."""
    return [read(text) for text in (_GPU if platform == "gpu" else _CPU)]
