"""Owns the problems of cliffs.py: those that are drawn, the named lists, and what they read.

Problem `index` of seed `seed` is drawn from a generator of its own, so it is the same call whatever
else is drawn.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from .peers import XLA_SCORES
from .shapes import Pass

CALLS = 16  # attentions of a program's turn
FEW_CALLS = 4  # of one whose attentions take longer than HOST_SECONDS
HOST_SECONDS = 2e-4  # more than any host takes for a call
LEAST_SECONDS = 5e-6  # near what the shortest attention takes
PROGRAM_SECONDS = 1e-3  # of a program: long beside what the host takes for one
RATES = (4e14, 2.5e12)  # operations and bytes a second
HEADS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 64)
USUAL_DIMS = (32, 48, 64, 64, 64, 72, 80, 96, 112, 128, 128, 128, 160, 192, 224, 256)
ROUND_DIMS = (16, 32, 64, 96, 128, 160, 192, 224, 256)


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a drawn problem stays below."""

    longest: int  # T and S
    scores: int  # B N T S
    elements: int  # of the largest of q, k, v
    bias: int  # elements
    heads: int
    head_dim: int


GPU = Limits(8192, XLA_SCORES // 4, 1 << 25, 1 << 27, 64, 256)
TINY = Limits(48, 1 << 13, 1 << 13, 1 << 13, 4, 48)  # a CPU's: seconds


@dataclasses.dataclass(frozen=True)
class Drawn:
    """One call of attention: q `[B, T, N, H]`, k and v `[B, S, K, H]`, and its features."""

    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    causal: bool = False
    bottom_right: bool = False  # the last query at the last key
    window: tuple[int, int] | None = None  # keys to the left and right
    lengths: str = ""  # "both", queries' and keys' alike, or "keys"
    documents: int = 0  # of each row, by segment ids; T = S
    bias: str = ""  # its dims, each the letter of [B, N, T, S] or 1
    bias_gradient: bool = False
    mask: bool = False  # [B, 1, 1, S], nine of ten keys
    dropout: float = 0.0
    score: str = ""  # a function of drawn_peers.SCORES
    contents: int = 0  # seed of lengths and documents

    @property
    def name(self) -> str:
        short = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}[self.dtype]
        kind = f"{short} B{self.batch} T{self.q_len}"
        kind += f" S{self.kv_len}" * (self.kv_len != self.q_len)
        kind += f" {self.heads}/{self.kv_heads} d{self.head_dim}"
        kind += " causal" * self.causal + " bottom-right" * self.bottom_right
        if self.window is not None:
            kind += f" window {self.window[0]},{self.window[1]}"
        kind += f" lengths of {self.lengths}" * bool(self.lengths)
        kind += f" {self.documents} documents" * bool(self.documents)
        kind += f" bias {self.bias}" * bool(self.bias)
        kind += " with gradient" * self.bias_gradient
        kind += " mask" * self.mask
        kind += f" dropout {self.dropout:g}" * bool(self.dropout)
        return kind + f" {self.score}" * bool(self.score)

    @property
    def scores(self) -> int:
        """Elements of `[B, N, T, S]`."""
        return self.batch * self.heads * self.q_len * self.kv_len

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of q, k, v and dout."""
        q = (self.batch, self.q_len, self.heads, self.head_dim)
        k = (self.batch, self.kv_len, self.kv_heads, self.head_dim)
        return {"q": q, "k": k, "v": k, "dout": q}

    @property
    def seconds(self) -> float:
        """What kernels take at least, near enough to tell many from few."""
        moved = 2 * sum(map(math.prod, self.sizes.values()))
        work = (4 * self.scores * self.head_dim, moved)
        return max(amount / rate for amount, rate in zip(work, RATES, strict=True))

    @property
    def calls(self) -> int:
        """Attentions of a turn of a program."""
        return CALLS if self.seconds < HOST_SECONDS else FEW_CALLS

    def turns(self, of: Pass) -> int:
        """Turns of a program: two at least, for XLA makes no loop of one."""
        passes = 1.0 if of == "forward" else 3.5  # products: 2 and 7
        turn = self.calls * max(passes * self.seconds, LEAST_SECONDS)
        return max(2, math.ceil(PROGRAM_SECONDS / turn))

    @property
    def operands(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of each array, by name; peers take of them what they need."""
        found = {name: (shape, self.dtype) for name, shape in self.sizes.items()}
        if self.bias:
            sizes = (self.batch, self.heads, self.q_len, self.kv_len)
            dims = zip(self.bias, sizes, strict=True)
            found["bias"] = tuple(1 if dim == "1" else size for dim, size in dims), self.dtype
        if self.mask:
            found["mask"] = (self.batch, 1, 1, self.kv_len), "bool"
        if self.lengths:
            found["lengths"] = (self.batch,), "int32"
        if self.documents:
            found["segments"] = (self.batch, self.q_len), "int32"
            found["offsets"] = (self.batch, self.documents + 1), "int32"
        if self.dropout:
            found["dropout_key"] = (2,), "uint32"
        if self.score:
            found["slopes"] = (self.heads,), "float32"
            found["rows"] = (self.batch, self.q_len), "float32"
            found["columns"] = (self.batch, self.kv_len), "float32"
        return found

    @property
    def gradients(self) -> tuple[str, ...]:
        """Names of the operands that get a gradient."""
        return ("q", "k", "v", "bias") if self.bias_gradient else ("q", "k", "v")

    def results(self, of: Pass) -> tuple[str, ...]:
        """Names of what a call of a pass returns."""
        return ("out",) if of == "forward" else ("out", *self.gradients)

    @property
    def neighbour(self) -> "Drawn | None":
        """The call at the next round sizes, which is no less work; None where all are round.

        A head dim that 8 does not divide goes to the next that it does, another to one of
        ROUND_DIMS; lengths go to the next power of two below 128, then to the next multiple of it.
        """
        change = {
            "q_len": _round_length(self.q_len),
            "kv_len": _round_length(self.kv_len),
            "head_dim": _round_dim(self.head_dim),
        }
        found = dataclasses.replace(self, **change)
        return None if found == self else found


def _round_length(length: int) -> int:
    return 1 << (length - 1).bit_length() if length < 128 else -(-length // 128) * 128


def _round_dim(head_dim: int) -> int:
    if head_dim % 8:
        return -(-head_dim // 8) * 8
    return next((dim for dim in ROUND_DIMS if dim >= head_dim), head_dim)


# ---- drawing -------------------------------------------------------------------------------------


def draw(seed: int, index: int, limits: Limits) -> Drawn:
    """Draws problem `index` of a seed, below the limits."""
    rng = np.random.default_rng((seed, index))

    def chance(part: float) -> bool:
        return bool(rng.random() < part)

    def pick(*of: Any) -> Any:
        return of[int(rng.integers(len(of)))]

    dtype = pick(*["bfloat16"] * 6, "float16", "float16", "float32", "float32")
    kind = rng.random()  # of the head dim: usual, any that 8 divides, any
    usual, eighth, any_dim = pick(*USUAL_DIMS), 8 * int(rng.integers(2, 33)), rng.integers(16, 257)
    head_dim = usual if kind < 0.5 else eighth if kind < 0.9 else int(any_dim)
    head_dim = min(head_dim, limits.head_dim)
    heads = min(pick(*HEADS), limits.heads)
    groups = [n for n in range(2, heads) if heads % n == 0]  # kv heads of GQA
    kind, grouped = rng.random(), pick(*groups) if groups else 1
    kv_heads = heads if kind < 0.5 else grouped if kind < 0.85 else 1
    q_len, other = _draw_length(rng, limits), _draw_length(rng, limits)
    kv_len = q_len if chance(0.65) else other
    batch = int(2 ** rng.uniform(0, 10))
    while True:
        of = Drawn(batch, q_len, kv_len, heads, kv_heads, head_dim, dtype)
        largest = max(math.prod(shape) for shape in of.sizes.values())
        if of.scores <= limits.scores and largest <= limits.elements:
            break
        # Fewer rows first, as a user's memory asks for, then heads, then shorter ones.
        if batch > 1:
            batch //= 2
        elif heads > 1:
            kv_heads = max(1, kv_heads // 2)
            heads = kv_heads * max(1, heads // kv_heads // 2) if heads > kv_heads else kv_heads
        else:
            q_len, kv_len = max(1, q_len // 2), max(1, kv_len // 2)

    own = q_len == kv_len
    causal = chance(0.55) if own else kv_len > q_len and chance(0.3)
    reach = max(1, int(q_len * 2 ** -rng.uniform(1, 5)))
    windowed = chance(0.2) and own and q_len >= 32
    window = None if not windowed else (reach, 0 if causal else pick(0, reach))
    hidden = rng.random()  # what hides keys beside that
    documents, lengths = 0, ""
    if hidden < 0.15:
        lengths = "both" if own else "keys" if not causal else ""
    elif hidden < 0.27 and own and q_len >= 32 and window is None:
        documents = max(2, int(q_len // 2 ** rng.uniform(4, 11)))
    dims = pick("1NTS", "1NTS", "BNTS", "B11S", "11TS")
    bias = dims if chance(0.14) and not documents else ""
    if bias and _bias_elements(of, bias) > limits.bias:
        bias = "B11S"
    return dataclasses.replace(
        of,
        causal=causal,
        bottom_right=causal and not own,
        window=window,
        lengths=lengths,
        documents=documents,
        bias=bias,
        bias_gradient=chance(0.7) and bias in ("1NTS", "BNTS", "11TS"),
        mask=chance(0.06) and not (causal or window or lengths or documents or bias),
        dropout=0.1 * chance(0.08),
        contents=int(rng.integers(1 << 31)),
    )


def _draw_length(rng: np.random.Generator, limits: Limits) -> int:
    """Draws T: log-uniform, a power of two, a multiple of what a model has, or any."""
    length, kind = 2 ** rng.uniform(0, math.log2(limits.longest)), rng.random()
    step = 1 if length < 16 else int(2 ** rng.integers(2, 7))
    if kind < 0.35:
        length = 2 ** round(math.log2(length))
    elif kind < 0.65:
        length = round(length / step) * step
    return int(min(max(length, 1), limits.longest))


def _bias_elements(of: Drawn, dims: str) -> int:
    return math.prod(dataclasses.replace(of, bias=dims).operands["bias"][0])


# ---- named lists ---------------------------------------------------------------------------------

MODELS = ((16, 64), (8, 128))  # heads and head dim


def _short() -> Iterator[Drawn]:
    rows = ((1024, 16), (256, 64), (8, 128), (1, 128), (64, 77), (32, 197), (1, 512), (4, 512))
    for batch, length in (*rows, (1, 1024)):
        for heads, dim in MODELS:
            for causal in (False, True):
                yield Drawn(batch, length, length, heads, heads, dim, causal=causal)


def _cross() -> Iterator[Drawn]:
    for batch, many, few in ((8, 2048, 64), (4, 4096, 16), (4, 4096, 77), (2, 8192, 256)):
        for heads, dim in MODELS:
            yield Drawn(batch, many, few, heads, heads, dim)
            yield Drawn(batch, few, many, heads, heads, dim)


def _few() -> Iterator[Drawn]:
    for causal in (True, False):
        yield Drawn(8, 128, 128, 8, 1, 40, causal=causal)
        yield Drawn(32, 64, 64, 8, 1, 256, causal=causal)
        yield Drawn(1, 4096, 4096, 1, 1, 128, causal=causal)
        yield Drawn(1, 2048, 2048, 4, 2, 64, causal=causal)
        yield Drawn(2, 512, 512, 2, 1, 96, causal=causal)
        yield Drawn(4, 256, 256, 4, 1, 80, causal=causal)


def _odd() -> Iterator[Drawn]:
    for dim in (20, 36, 50, 60, 75, 90, 100, 110, 125, 150, 180, 220, 250):
        for causal in (True, False):
            yield Drawn(4, 4096, 4096, 1024 // dim, 1024 // dim, dim, causal=causal)


def _triangle() -> Iterator[Drawn]:
    rows = ((1024, 64, 8, 32), (64, 64, 4, 16), (128, 128, 4, 32), (256, 256, 4, 32))
    rows += ((256, 256, 4, 64), (384, 384, 4, 32), (512, 512, 4, 16), (768, 768, 4, 32))
    rows += ((64, 1024, 4, 64), (1024, 1024, 4, 32), (1024, 128, 4, 32), (256, 64, 4, 64))
    rows += tuple(
        (*of, 4, dim) for of in ((64, 256), (256, 128), (1024, 64)) for dim in (16, 32, 64)
    )
    for batch, length, heads, dim in rows:
        plain = Drawn(batch, length, length, heads, heads, dim)
        yield dataclasses.replace(plain, bias="1NTS", bias_gradient=True, mask=True)


def _scores() -> Iterator[Drawn]:
    from .drawn_peers import SCORES  # which reads this module

    for name in SCORES:
        for heads, dim in ((12, 64), (16, 128)):
            yield Drawn(4, 4096, 4096, heads, heads, dim, score=name)
        yield Drawn(8, 1024, 1024, 16, 16, 64, causal=True, score=name)


SETS = {
    "short": _short,
    "cross": _cross,
    "few": _few,
    "odd": _odd,
    "triangle": _triangle,
    "scores": _scores,
}


def named(name: str, limits: Limits) -> list[Drawn]:
    """Lists a named set; below the limits of a CPU its calls shrink until they fit."""
    found = list(SETS[name]())
    if limits is GPU:
        return found
    return list(dict.fromkeys(_shrink(of, limits) for of in found))


def _shrink(of: Drawn, limits: Limits) -> Drawn:
    longest = limits.longest
    cross = of.q_len != of.kv_len  # remains so
    small = {
        "heads": min(of.heads, 2),
        "kv_heads": min(of.kv_heads, 2),
        "batch": min(of.batch, 2),
        "q_len": min(of.q_len, longest // 2 if cross and of.q_len < of.kv_len else longest),
        "kv_len": min(of.kv_len, longest // 2 if cross and of.kv_len < of.q_len else longest),
        "head_dim": min(of.head_dim, limits.head_dim + of.head_dim % 8),
    }
    return dataclasses.replace(of, **small)


# ---- what they read ------------------------------------------------------------------------------


def offsets(of: Drawn) -> np.ndarray:
    """Draws where documents begin in each row, and the end: int32 `[B, M + 1]`."""
    rng = np.random.default_rng((of.contents, 1))
    found = np.zeros((of.batch, of.documents + 1), np.int32)
    found[:, -1] = of.q_len
    for row in found:
        inner = rng.choice(of.q_len - 1, of.documents - 1, replace=False)
        row[1:-1] = np.sort(inner) + 1
    return found


def lengths(of: Drawn) -> np.ndarray:
    """Draws lengths of the rows: int32 `[B]`, a quarter of S at least."""
    part = np.random.default_rng((of.contents, 2)).uniform(0.25, 1.0, of.batch)
    return np.ceil(part * of.kv_len).astype(np.int32)


@functools.cache
def _normals() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(1 << 22, np.float32)


@functools.cache
def _normals_of(dtype: str) -> np.ndarray:
    known = {"bfloat16": ml_dtypes.bfloat16}
    return _normals().astype(known.get(dtype, dtype))


def arrays(of: Drawn) -> dict[str, np.ndarray]:
    """Makes the operands: normal numbers, but for what names positions."""
    found: dict[str, np.ndarray] = {}
    for i, (name, (shape, dtype)) in enumerate(of.operands.items()):
        if name == "lengths":
            found[name] = lengths(of)
        elif name == "offsets":
            found[name] = offsets(of)
        elif name == "segments":
            ends = offsets(of)[:, 1:]
            rows = np.arange(of.q_len)
            found[name] = np.stack([np.searchsorted(x, rows, "right") for x in ends]).astype(dtype)
        elif name == "dropout_key":
            found[name] = np.array([7, of.contents], dtype)
        elif name == "mask":
            keep = np.random.default_rng((of.contents, 3)).random(shape) < 0.9
            keep[..., 0] = True  # each query sees a key
            found[name] = keep
        elif name == "slopes":
            found[name] = 2.0 ** -np.linspace(1, 8, of.heads, dtype=dtype)
        else:
            # Each array begins elsewhere: at a prime, which no head dim divides.
            flat = np.roll(_normals_of(dtype), -9973 * i)
            found[name] = np.resize(flat, shape)
    if of.lengths == "both":  # nothing comes from padding, so that no peer's values there matter
        found["dout"] = found["dout"] * valid(of, found)["q"][..., None, None].astype(of.dtype)
    return found


def valid(of: Drawn, given: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Says which positions are compared: bool `[B, T]` for out and q, `[B, S]` for k and v."""
    found = {
        "q": np.ones((of.batch, of.q_len), bool),
        "k": np.ones((of.batch, of.kv_len), bool),
    }
    if of.lengths:
        rows = np.asarray(given["lengths"])[:, None]
        found["k"] = np.arange(of.kv_len) < rows
        if of.lengths == "both":
            found["q"] = np.arange(of.q_len) < rows
    return found | {"out": found["q"], "v": found["k"]}
