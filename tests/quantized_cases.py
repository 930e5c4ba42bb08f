"""Caches of eight bits: the cases of decode_cases.py and ragged_cases.py, stored with scales."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import ml_dtypes
import numpy as np

import jax_flash
from jax_flash._gpu import copies

from .decode_cases import Arguments, Case, L, compare
from .numpy_oracle import rotated
from .ragged_cases import MIXED, OVER_PAGES, Batch, Drawn

FLOAT8, INT8 = "float8_e4m3fn", "int8"
_DTYPES = {FLOAT8: np.dtype(ml_dtypes.float8_e4m3fn), INT8: np.dtype(np.int8)}


def rounded(x: np.ndarray, scale: np.ndarray, dtype: str) -> np.ndarray:
    """x / scale in eight bits; NaN, which marks what is hidden, is the largest number of int8."""
    x = x.astype(np.float32) / scale
    if dtype == INT8:
        return np.nan_to_num(np.clip(np.rint(x), -127, 127), nan=127).astype(np.int8)
    return np.clip(x, -448, 448).astype(_DTYPES[FLOAT8])


def draw_scales(count: int, heads: int, varied: bool, seen: np.ndarray) -> dict[str, np.ndarray]:
    """Scales `[K]`, or `[count, K]` that differ by powers of ten, NaN of pages that none sees."""
    rng = np.random.default_rng(0)
    scales = {}
    for name, typical in (("key_scale", 0.01), ("value_scale", 0.02)):
        shape = (count, heads) if varied else (heads,)
        x = typical * np.exp(rng.uniform(-2, 2, shape)).astype(np.float32)
        if varied:
            x[~seen] = np.nan
        scales[name] = x
    return scales


def stored(caches: dict, scales: dict, dtype: str) -> dict:
    """Caches `[pages, S, K, H]` by "key" and "value" as they are stored."""
    made = {}
    for name, cache in caches.items():
        scale = np.broadcast_to(scales[f"{name}_scale"], cache.shape[::2][:1] + cache.shape[2:3])
        made[name] = rounded(cache, scale[:, None, :, None], dtype)
    return made


def quantize(case: Case, dtype: str = FLOAT8, *, varied: bool = False) -> Arguments:
    """Draws a case and stores its caches so; `varied`: each page, or row, has its scales."""
    drawn = case.draw()
    count, size, heads, _ = drawn.cache["key"].shape
    pages = np.arange(count)[:, None] if drawn.table is None else drawn.table
    seen = ~np.isnan(drawn.expected["key"].astype(np.float32)).all((1, 2, 3))
    scales = draw_scales(count, heads, varied, seen)
    held = {}
    for name in ("key", "value"):
        scale = np.broadcast_to(scales[f"{name}_scale"], (count, heads))
        held[name] = []
        for b, x in enumerate(getattr(drawn, f"{name}s")):
            page = pages[b, np.arange(len(x)) // size].clip(0, count - 1)
            own = scale[page][..., None]
            whole = rounded(x, own, dtype).astype(np.float64) * own
            held[name].append(np.where(np.isnan(x.astype(np.float32)), np.nan, whole))
    if case.latent:
        scales.pop("value_scale")
    names = {"key": "key_scale"} if case.latent else {"key": "key_scale", "value": "value_scale"}
    return dataclasses.replace(
        drawn,
        keys=held["key"],
        values=held["value"],
        cache=stored({x: drawn.cache[x] for x in names}, scales, dtype),
        expected=stored({x: drawn.expected[x] for x in names}, scales, dtype),
        scales=scales,
    )


def check(arguments: Arguments, got: jax_flash.Decoded) -> None:
    """Checks results: of rotated keys, which may be rounded to a neighbour, those in the cache."""
    case = arguments.case
    if case.rotary is None:
        return compare(arguments, got)
    table, scale = arguments.table, arguments.scales["key_scale"]
    whole = np.asarray(got.key_cache).astype(np.float64) * scale[..., None]
    keys = []
    for b, n in enumerate(case.lengths):
        row = whole[b] if table is None else np.concatenate(whole[table[b].clip(0, len(whole) - 1)])
        first, unturned = max(0, n - case.T), np.asarray(case.draw().keys[b], np.float64)
        turned = rotated(unturned[first:], np.arange(first, n), case.rotary)
        turned = turned.clip(-448 * scale[:, None], 448 * scale[:, None])
        assert (abs(row[first:n] - turned) <= abs(turned) / 15 + scale[:, None] / 256).all()
        keys.append(np.concatenate([arguments.keys[b][:first], row[first:n]]))
    arguments = dataclasses.replace(
        arguments,
        case=dataclasses.replace(case, appends=False, name=case.name),
        keys=keys,
        expected=arguments.expected | {"key": np.asarray(got.key_cache)},
    )
    return compare(arguments, got)


def quantize_batch(
    batch: Batch, dtype: str = FLOAT8, *, varied: bool = False, seed: int = 0
) -> Drawn:
    """Draws a batch whose pages have eight bits."""
    drawn = batch.draw(seed)
    count, size, heads, _ = drawn.after["key"].shape
    seen = ~np.isnan(drawn.after["key"].astype(np.float32)).all((1, 2, 3))
    scales = draw_scales(count, heads, varied, seen)
    arrays, table = drawn.arrays | scales, drawn.arrays["page_table"]
    before = {name: drawn.arrays[f"{name}_pages"] for name in ("key", "value")}
    arrays |= {f"{name}_pages": x for name, x in stored(before, scales, dtype).items()}
    held = []
    for b, row in enumerate(drawn.held):
        held.append({})
        for name, x in row.items():
            page = table[b, np.arange(len(x)) // size].clip(0, count - 1)
            own = np.broadcast_to(scales[f"{name}_scale"], (count, heads))[page][..., None]
            held[b][name] = rounded(x, own, dtype).astype(np.float64) * own
    return Drawn(batch, arrays, held, stored(drawn.after, scales, dtype))


_PAGED = {"page": 16, "dtype": "bfloat16", "lengths": (L, 33, 0, 50)}
_LATENT = {"K": 1, "H": 576, "Hv": 512, "latent": True, "page": 64, "dtype": "bfloat16"}
# A case, its dtype, and whether pages or rows have scales of their own.
CASES: list[tuple[Case, str, bool]] = [
    (Case("heads", T=3, N=16, H=64, Hv=48, dtype="bfloat16", window=40, sinks=True), FLOAT8, False),
    (Case("rows", T=2, N=4, H=32, dtype="float16"), FLOAT8, True),
    (Case("pages", T=5, N=8, K=4, H=64, softcap=3.0, **_PAGED), FLOAT8, True),
    (Case("windows of pages", T=2, N=4, H=128, page=3, window=30, dtype="float16"), FLOAT8, True),
    (Case("rotary", T=5, N=8, K=4, H=64, rotary=100.0, **_PAGED), FLOAT8, False),
    (Case("nothing new", N=16, K=1, H=64, appends=False, dtype="bfloat16"), FLOAT8, False),
    (Case("latent", N=16, **_LATENT), FLOAT8, True),
    (Case("integers", T=3, N=8, H=64, page=16, window=70, dtype="bfloat16"), INT8, True),
]


@dataclasses.dataclass(frozen=True)
class Copied:
    """A batch of which pages of some requests are copied to bfloat16; others run in pieces.

    Attributes:
      requests: those that are.
      place: pages that there is place for; None: as many as there would be.
      fewest: query rows of a request from which its pages are copied.
      more: pages of the pool beyond those that requests have.
    """

    batch: Batch
    dtype: str
    varied: bool
    requests: tuple[int, ...]
    place: int | None = None
    fewest: int = 1
    more: int = 0

    @property
    def name(self) -> str:
        return f"{self.batch.name} {self.dtype} {self.requests}"

    def draw(self, seed: int) -> Drawn:
        drawn = quantize_batch(self.batch, self.dtype, varied=self.varied, seed=seed)
        for b in self.requests:
            for name, x in drawn.held[b].items():
                drawn.held[b][name] = x.astype(ml_dtypes.bfloat16).astype(np.float64)
        for arrays, name in ((drawn.arrays, "{}_pages"), (drawn.after, "{}")):
            for x in map(name.format, ("key", "value")):
                more = np.zeros_like(arrays[x][: self.more])
                arrays[x] = np.concatenate([arrays[x], more])
        return drawn

    @contextlib.contextmanager
    def chosen(self) -> Iterator[None]:
        """Has these requests copied."""
        batch, before = self.batch, (copies.FEWEST_ROWS, copies.MOST_BYTES)
        page = 2 * batch.page * batch.K * (batch.H + batch.value_dim)
        copies.FEWEST_ROWS = self.fewest
        copies.MOST_BYTES = before[1] if self.place is None else self.place * page
        try:
            yield
        finally:
            copies.FEWEST_ROWS, copies.MOST_BYTES = before


_EIGHT = dataclasses.replace(MIXED, rotary=None)
COPIED = [
    Copied(_EIGHT, FLOAT8, True, (1,), fewest=copies.FEWEST_ROWS),
    Copied(_EIGHT, FLOAT8, True, (1, 4), place=17),  # 13 pages and 4; 6 more of the next
    # 26 pages, of those that its window sees, and 10: each copied to where it stands among them.
    Copied(
        dataclasses.replace(OVER_PAGES[1][0], dtype="bfloat16"), INT8, False, (0, 1), 36, more=9
    ),
    Copied(dataclasses.replace(OVER_PAGES[3][0], Hv=72), INT8, True, (0, 2)),
]
