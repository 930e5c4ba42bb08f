"""Batches of requests that begin with pages in common, have trees, or pages of eight bits."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

import jax_flash
from jax_flash._gpu.sm90 import pages
from jax_flash._ops import common, shared

from .numpy_oracle import DTYPES
from .quantized_cases import quantize_batch
from .ragged_cases import MIXED, Batch, Drawn, run


@dataclasses.dataclass(frozen=True)
class InCommon:
    """Requests that begin with pages in common, which one kernel computes for all of them.

    The fourth begins otherwise, the fifth lacks a page; what nobody may see is NaN.
    """

    name: str
    N: int
    K: int
    H: int
    page: int
    parts: int  # that the positions in common are cut into
    leading: int  # pages in common
    counts: tuple[int, ...]  # tokens of each request
    tails: tuple[int, ...]  # positions of each between the pages in common and its tokens
    tokens: int
    softcap: float | None = None

    @property
    def options(self) -> dict[str, float | None]:
        return {"softcap": self.softcap}

    def draw(self) -> dict[str, np.ndarray]:
        """The arrays of the call without `shared_pages`."""
        rng, requests = np.random.default_rng(self.N), len(self.counts)
        lengths = self.leading * self.page + np.add(self.counts, self.tails)
        columns = -(-lengths.max() // self.page)
        shape = (requests * columns + 1, self.page, self.K, self.H)
        table = rng.permutation(shape[0])[:-1].reshape(-1, columns)
        ahead = table[:, : self.leading]
        ahead[:] = np.where(np.arange(requests)[:, None] == 3, ahead, ahead[0])
        keys, values = (np.full(shape, np.nan, np.float32) for _ in range(2))
        for b, length in enumerate(lengths):
            places = table[b, np.arange(length) // self.page], np.arange(length) % self.page
            for x in (keys, values):
                drawn = rng.standard_normal((length, self.K, self.H))
                x[places] = np.where(np.isnan(x[places]), drawn, x[places])
        own = sum(self.counts)
        query = np.full((self.tokens, self.N, self.H), np.nan, np.float32)
        query[:own] = rng.standard_normal((own, self.N, self.H))
        table[4, (lengths[4] - 1) // self.page] = 10**6
        return {
            **{
                name: x.astype(DTYPES["bfloat16"])
                for name, x in (("query", query), ("key_pages", keys), ("value_pages", values))
            },
            "lengths": lengths,
            "page_table": table,
            "rows": np.int32(requests),
            "query_starts": np.concatenate([[0], np.cumsum(self.counts)]),
            "sinks": rng.standard_normal(self.N).astype(np.float32),
        }

    def run(self, backend: str) -> jax_flash.Attended:
        """Calls it with `shared_pages`, by the kernel of pages in common."""
        made, arrays = [], self.draw()
        arrays["shared_pages"] = np.append(arrays["page_table"][0, : self.leading], [-1, 0])

        def parts_of(shapes: object, *_: int) -> int:
            made.append(shapes)
            return self.parts

        before = shared.LEAST_SPARED, common.parts_of, pages.FEWEST_IN_COMMON
        shared.LEAST_SPARED, common.parts_of, pages.FEWEST_IN_COMMON = 0, parts_of, 0
        jax.clear_caches()
        try:
            got = jax.tree.map(np.asarray, run(arrays, backend=backend, **self.options))
        finally:
            shared.LEAST_SPARED, common.parts_of, pages.FEWEST_IN_COMMON = before
        assert made, "another kernel has run"
        return got

    def compare(self, got: jax_flash.Attended) -> None:
        """Checks results against those of backend "xla", which reads the pages for each request."""
        # On the host: a sanitizer looks at each kernel that XLA would run on a GPU.
        with jax.default_device(jax.devices("cpu")[0]):
            expected = run(self.draw(), backend="xla", **self.options)
        for x, y in zip(got[:2], expected[:2], strict=True):
            x, y = (np.asarray(z, np.float32) for z in (x, y))
            np.testing.assert_array_equal(np.isnan(x), np.isnan(y))
            np.testing.assert_allclose(x, y, rtol=0, atol=0.03)
        assert np.isnan(got.out).any()

    def check(self) -> None:
        self.compare(self.run("cuda"))


def _with_tails(N: int, K: int, H: int, page: int, parts: int, leading: int) -> InCommon:
    """Tokens are rows: of a tail over several blocks, of none; 6 to 16 heads share its keys."""
    rng = np.random.default_rng(page)
    counts = np.ones(19, int)
    counts[[7, 9, 11, 12, 13]] = 3, 0, 0, 0, 0  # two tokens are of no request
    tails = rng.integers(0, 300, 19) * (rng.random(19) < 0.8)
    name = f"tails, {N}/{K} heads of {H}"
    return InCommon(
        name, N, K, H, page, parts, leading, tuple(counts.tolist()), tuple(tails.tolist()), 19
    )


def _with_prompts(N: int, K: int, H: int, page: int, parts: int) -> InCommon:
    """Decoding, and requests of more tokens; a part of no page."""
    name, counts = f"pages in common, {N}/{K} heads of {H}", (1, 1, 5, 1, 1, 1, 4)
    tails = (0, 3, page, 9, 5, 2 * page - 9, 1)
    return InCommon(name, N, K, H, page, parts, 4, counts, tails, 21, softcap=8.0)


IN_COMMON = [
    _with_prompts(16, 2, 128, 16, 3),
    _with_prompts(4, 4, 64, 64, 1),
    _with_prompts(6, 2, 72, 8, 2),
]
WITH_TAILS = [
    _with_tails(16, 2, 128, 64, 3, 5),
    _with_tails(12, 2, 72, 16, 2, 4),
    _with_tails(16, 1, 128, 128, 1, 1),
]


@dataclasses.dataclass(frozen=True)
class EightBitPages:
    """A batch over pages of float8_e4m3fn; `varied`: each page has its scales."""

    name: str
    batch: Batch
    varied: bool

    def draw(self) -> Drawn:
        return quantize_batch(self.batch, varied=self.varied)


_EIGHT = dataclasses.replace(MIXED, rotary=None)
EIGHT_BITS = [
    EightBitPages("eight bits", _EIGHT, False),
    EightBitPages("eight bits, scales of pages", _EIGHT, True),
    EightBitPages("eight bits, decoding", Batch(
        "decoding", counts=(1, 1, 0, 1, 1), before=(40, 0, 11, 70, 23), tokens=6, page=16,
        columns=6, N=8, K=2, H=128, dtype="bfloat16"), True),
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Tree:
    """A batch whose new tokens have a tree mask, by which each sees those ahead of it."""

    name: str
    batch: Batch

    def draw(self, seed: int = 0) -> Drawn:
        drawn, columns = self.batch.draw(seed), max(self.batch.counts)
        starts = drawn.arrays["query_starts"]
        ancestors = np.zeros((self.batch.tokens, columns), bool)
        for first, count in zip(starts, self.batch.counts, strict=False):
            ancestors[first : first + count, :count] = np.tri(count, dtype=bool)
        return dataclasses.replace(drawn, arrays=drawn.arrays | {"ancestors": ancestors})


TREES = [
    Tree("trees", Batch("trees", (6, 1, 4), (40, 23, 3), 14, 4, page=16, columns=4, N=8, K=2,
                        H=128, dtype="bfloat16")),
]  # fmt: skip
LATENT = [
    Batch("latent, heads of 576", counts=(2, 7, 1), before=(120, 0, 70), tokens=16, requests=3,
          latent=True, N=16, K=1, H=576, Hv=512, page=64, columns=3, dtype="bfloat16"),
]  # fmt: skip
