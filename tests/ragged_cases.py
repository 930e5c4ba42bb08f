"""Batches of ragged_paged_attention that a seed draws, with their arrays and the truth."""

from __future__ import annotations

import dataclasses
import functools

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
