"""Batches of ragged_paged_attention that a seed draws, with their arrays and the truth."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_flash

from . import numpy_oracle
from .numpy_oracle import DTYPES, rotated
from .tolerance import FORWARD_FACTOR, check


@dataclasses.dataclass(frozen=True)
class Batch:
    """One call. Whatever no token may see is NaN: slots, pages and tokens of no request."""

    name: str
    counts: tuple[int, ...] = (1, 17, 0, 1, 9)  # tokens of each live request
    before: tuple[int, ...] = (40, 0, 11, 0, 23)  # positions that it had
    tokens: int = 30
    requests: int = 6
    page: int = 8
    columns: int = 6
    N: int = 4
    K: int = 2
    H: int = 16
    Hv: int | None = None
    dtype: str = "float32"
    appends: bool = True
    latent: bool = False
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    rotary: float | None = None
    precision: str = "highest"

    @property
    def value_dim(self) -> int:
        return self.H if self.Hv is None else self.Hv

    @property
    def options(self) -> dict:
        return {
            "local_window_size": self.window,
            "softcap": self.softcap,
            "rotary_base": self.rotary,
            "precision": self.precision,
            "value_dim": self.Hv if self.latent else None,
        }

    def draw(self, seed: int = 0) -> Drawn:
        rng = np.random.default_rng(seed)
        dtype, rows = DTYPES[self.dtype], len(self.counts)

        def normal(*shape):
            return rng.standard_normal(shape).astype(dtype)

        pages = self.requests * self.columns + 2
        table = rng.permutation(pages)[:-2].reshape(self.requests, self.columns).astype(np.int32)
        table[rows:] = 10**9
        lengths = np.full(self.requests, 2**31 - 1, np.int32)
        starts = np.full(self.requests + 1, -5, np.int32)
        first = rng.integers(0, self.tokens - sum(self.counts) + 1)  # tokens of none ahead, too
        starts[: rows + 1] = first + np.concatenate([[0], np.cumsum(self.counts)])
        dims = {"key": self.H, "value": self.value_dim}
        after = {x: np.full((pages, self.page, self.K, n), np.nan, dtype) for x, n in dims.items()}
        new = {x: np.full((self.tokens, self.K, n), np.nan, dtype) for x, n in dims.items()}
        before = {x: y.copy() for x, y in after.items()}
        query = np.full((self.tokens, self.N, self.H), np.nan, dtype)
        held = []
        for b, (count, old) in enumerate(zip(self.counts, self.before, strict=True)):
            lengths[b], own = old + count, slice(starts[b], starts[b + 1])
            query[own] = normal(count, self.N, self.H)
            row = {x: normal(old + count, self.K, n) for x, n in dims.items()}
            held.append(row)
            hidden = 0 if self.window is None or count == 0 else max(0, old - self.window)
            at = np.arange(old + count)
            place = table[b, at // self.page], at % self.page
            for name in dims:
                row[name][:hidden] = np.nan
                after[name][place] = row[name]
                seen = place if not self.appends else tuple(x[:old] for x in place)
                before[name][seen] = row[name][: len(seen[0])]
                new[name][own] = row[name][old:]
            table[b, : hidden // self.page] = -1
            table[b, -(-(old + count) // self.page) :] = (-1, 10**6)[b % 2]
        arrays = {
            "query": query,
            "key_pages": before["key"],
            "value_pages": None if self.latent else before["value"],
            "lengths": lengths,
            "page_table": table,
            "query_starts": starts,
            "rows": np.int32(rows),
        }
        if self.appends:
            arrays |= {"new_key": new["key"]}
            arrays |= {} if self.latent else {"new_value": new["value"]}
        if self.sinks:
            arrays["sinks"] = rng.standard_normal(self.N).astype(np.float32)
        return Drawn(self, arrays, held, after)


@dataclasses.dataclass
class Drawn:
    """The arrays of a batch, for the call and for the oracle."""

    batch: Batch
    arrays: dict
    held: list[dict[str, np.ndarray]]  # keys and values of each request, by position
    after: dict[str, np.ndarray]  # the pages when the call has returned

    def truth(self, precision="float64") -> tuple[np.ndarray, np.ndarray]:
        batch, starts = self.batch, self.arrays["query_starts"]
        out = np.zeros((batch.tokens, batch.N, batch.value_dim))
        lse = np.full(out.shape[:-1], -np.inf)
        for b, (count, old) in enumerate(zip(batch.counts, batch.before, strict=True)):
            own = slice(starts[b], starts[b + 1])
            query, keys = self.arrays["query"][own], self.held[b]["key"]
            values = keys[..., : batch.value_dim] if batch.latent else self.held[b]["value"]
            if count == 0:
                continue
            if batch.rotary is not None:
                query = rotated(query, np.arange(old, old + count), batch.rotary)
                first = old if batch.appends else old + count
                turned = rotated(keys[first:], np.arange(first, old + count), batch.rotary)
                keys = np.concatenate([keys[:first], turned])
            result = numpy_oracle.attention(
                query[None],
                keys[None],
                values[None],
                is_causal=True,
                causal_align="bottom_right",
                local_window_size=None if batch.window is None else (batch.window, 0),
                softcap=batch.softcap,
                sinks=self.arrays.get("sinks"),
                precision=precision,
            )
            out[own], lse[own] = result.out[0], result.lse[0]
        return out, lse

    def run(self, backend: str | None) -> jax_flash.Attended:
        return run(self.arrays, backend=backend, **self.batch.options)

    def compare(self, got: jax_flash.Attended) -> None:
        """Checks results against the truth, and what is in the pages to the bit."""
        batch = self.batch
        (out, lse), (plain, _) = self.truth(), self.truth(batch.dtype)
        assert got.out.dtype == batch.dtype
        assert got.lse.dtype == np.float32
        check("out", got.out, out, plain, batch.dtype, FORWARD_FACTOR)
        exact = "float32" if batch.rotary is None else batch.dtype
        check("lse", got.lse, lse, self.truth(exact)[1], exact, FORWARD_FACTOR)
        for name, pages in (("key", got.key_pages), ("value", got.value_pages)):
            if name == "value" and batch.latent:
                assert pages is None
            elif name == "key" and batch.rotary is not None:
                np.testing.assert_array_equal(np.isnan(pages), np.isnan(self.after[name]))
            else:
                assert np.asarray(pages).tobytes() == self.after[name].tobytes()


@functools.lru_cache
def jitted(options):
    def call(arrays):
        value_pages = arrays.pop("value_pages", None)
        return jax_flash.ragged_paged_attention(value_pages=value_pages, **arrays, **dict(options))

    return jax.jit(call)


def run(arrays: dict, **options) -> jax_flash.Attended:
    """Calls it under jit."""
    given = {name: jnp.asarray(x) for name, x in arrays.items() if x is not None}
    return jitted(tuple(sorted(options.items())))(given)


BATCHES = [
    Batch("mixed"),
    Batch("short windows", window=5, page=3, columns=22, softcap=3.0, sinks=True),
    Batch("decoding", counts=(1, 1, 0, 1, 1), tokens=6, window=9, rotary=100.0, dtype="bfloat16"),
    Batch("one prompt", counts=(150,), before=(70,), tokens=150, requests=2, page=16, columns=14,
          N=6, K=1, rotary=1e4, sinks=True, window=100),
    Batch("as many pieces as can be", counts=(65, 65), before=(0, 7), tokens=130, requests=2,
          page=1, columns=72, window=3, dtype="float16", appends=False),
    Batch("whole pieces", counts=(64, 128), before=(3, 0), tokens=192, requests=2, page=32,
          columns=4, N=8, K=8),
    Batch("latent", counts=(2, 7, 1), before=(20, 0, 9), tokens=16, requests=3, latent=True, N=4,
          K=1, H=40, Hv=32, dtype="bfloat16"),
    Batch("no live request", counts=(), before=(), tokens=9, requests=2),
]  # fmt: skip

# Three warpgroups that compute rows of NaN again; every kind of request, tokens of none, pages that
# are none behind the lengths.
MIXED = Batch("mixed", counts=(1, 130, 0, 1, 40, 3), before=(40, 70, 11, 0, 23, 90), tokens=200,
              requests=8, page=16, columns=14, H=64, dtype="bfloat16", rotary=1e4)  # fmt: skip
# Batches whose requests of more tokens than one are computed by forward kernels, with fields of the
# tiling: by Hopper's,
OVER_PAGES: list[tuple[Batch, dict[str, Any]]] = [
    (MIXED, {}),
    # Two; pages behind a window are none, in blocks that others of its pages are part of.
    (Batch("window", counts=(150, 20), before=(70, 133), tokens=190, requests=3, page=8,
           columns=28, N=4, K=2, H=128, dtype="float16", window=50, softcap=4.0, sinks=True), {}),
    # Blocks of 80 keys, of up to three pages of 64; eight heads of a kv head share a unit.
    (Batch("long", counts=(100, 1, 97), before=(0, 9, 300), tokens=198, requests=3, page=64,
           columns=7, N=8, K=1, H=128, dtype="bfloat16", appends=False),
     {"block_kv": 80, "consumers": 3, "ping_pong": False, "producer_registers": 24}),
    # Blocks of one page each.
    (Batch("wide", counts=(70, 1, 33), before=(0, 9, 200), tokens=104, requests=3, page=64,
           columns=4, N=4, K=2, H=128, dtype="bfloat16"), {}),
    # Three heads read a kv head, each by itself; requests beyond those that one round of
    # request_units takes; values past a length, NaN, in rows that are computed again.
    (Batch("many", counts=(0, 0) * 257 + (80, 9), before=(0, 0) * 257 + (30, 20), tokens=620,
           requests=516, page=24, columns=6, N=3, K=1, H=72, Hv=40, dtype="bfloat16", sinks=True),
     {"clears_values": False}),
]  # fmt: skip
# and by those of mma.sync: two tiles of rows and one, two query heads of a unit, eight and one.
OVER_PAGES_80 = [
    MIXED,
    dataclasses.replace(OVER_PAGES[1][0], name="window, pages of 5", page=5, columns=45),
    # Blocks of keys in one page each; values wider than keys, of 256 columns.
    Batch(
        "one page",
        counts=(100, 1, 97),
        before=(0, 9, 300),
        tokens=198,
        requests=3,
        page=64,
        columns=7,
        N=8,
        K=1,
        H=64,
        Hv=256,
        dtype="bfloat16",
        appends=False,
        softcap=9.0,
    ),
    # A page for each position; requests beyond those that one round of request_units takes.
    dataclasses.replace(OVER_PAGES[4][0], name="many, pages of 1", page=1, columns=112),
]
