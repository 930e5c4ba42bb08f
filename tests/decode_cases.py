"""The cases of decode_attention, with their arrays and the truth: test_decode.py runs them."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jax_flash
from jax_flash._gpu import decode as family

from . import numpy_oracle
from .numpy_oracle import DTYPES, rotated
from .tolerance import FORWARD_FACTOR, check, tf32

L = 200  # positions that a row may have, but where a case says otherwise


@dataclasses.dataclass(frozen=True)
class Case:
    """One call. Whatever no query may see is NaN: slots past the length, pages of no row."""

    name: str
    lengths: tuple[int, ...] = (L, 1, 0, 77)
    T: int = 1
    N: int = 4
    K: int = 2
    H: int = 32
    Hv: int | None = None  # H unless given
    dtype: str = "float32"
    page: int | None = None  # positions in a page; None: a contiguous cache
    shared: int = 0  # pages that the first two rows have in common
    appends: bool = True
    latent: bool = False  # values are the first Hv features of the keys
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    scale: float | None = None
    rotary: float | None = None
    precision: str = "highest"
    most: int = L

    @property
    def value_dim(self) -> int:
        return self.H if self.Hv is None else self.Hv

    @property
    def pages_of_a_row(self) -> int:
        return -(-self.most // self.page) if self.page else 1

    def draw(self) -> Arguments:
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        dtype = DTYPES[self.dtype]
        rows = len(self.lengths)

        def normal(*shape):
            return rng.standard_normal(shape).astype(dtype)

        # What each row holds once the call has returned, by position.
        keys = [normal(n, self.K, self.H) for n in self.lengths]
        values = [normal(n, self.K, self.value_dim) for n in self.lengths]
        size, columns = self.page or self.most, self.pages_of_a_row
        table = None
        if self.page:
            count = rows * columns + 3  # three belong to nobody
            table = rng.permutation(count)[: rows * columns].reshape(rows, columns)
            table[1, : self.shared] = table[0, : self.shared]
            prefix = self.shared * size
            keys[1][:prefix], values[1][:prefix] = keys[0][:prefix], values[0][:prefix]
        else:
            count = rows
        key_cache = np.full((count, size, self.K, self.H), np.nan, dtype)
        value_cache = np.full((count, size, self.K, self.value_dim), np.nan, dtype)
        shape = (rows, self.T, self.K)
        new_key, new_value = normal(*shape, self.H), normal(*shape, self.value_dim)
        new_key[:], new_value[:] = np.nan, np.nan  # where a query stands before position 0
        expected_key, expected_value = key_cache.copy(), value_cache.copy()
        for b, n in enumerate(self.lengths):
            first = max(0, n - self.T) if self.appends else n
            # Behind the window of the first query nothing is seen: NaN, and no page.
            hidden = 0 if self.window is None else max(0, n - self.T - self.window)
            keys[b][:hidden], values[b][:hidden] = np.nan, np.nan
            if table is not None:
                table[b, : hidden // size] = -1
                table[b, -(-n // size) :] = (-1, 10**6)[b % 2]
            for p in range(n):
                page = b if table is None else table[b, p // size]
                if page < 0:
                    continue
                at = page, p % size
                expected_key[at], expected_value[at] = keys[b][p], values[b][p]
                if p < first:
                    key_cache[at], value_cache[at] = keys[b][p], values[b][p]
            new_key[b, self.T - (n - first) :] = keys[b][first:]
            new_value[b, self.T - (n - first) :] = values[b][first:]
        query = normal(rows, self.T, self.N, self.H)
        for b, n in enumerate(self.lengths):
            query[b, : max(0, self.T - n)] = np.nan
        return Arguments(
            self,
            query,
            keys,
            values,
            {"key": key_cache, "value": value_cache},
            {"key": expected_key, "value": expected_value},
            {"key": new_key, "value": new_value},
            table,
            rng.standard_normal(self.N).astype(np.float32) if self.sinks else None,
        )


@dataclasses.dataclass
class Arguments:
    """The arrays of a case, for the call and for the oracle."""

    case: Case
    query: np.ndarray
    keys: list[np.ndarray]  # of each row, by position
    values: list[np.ndarray]
    cache: dict[str, np.ndarray]
    expected: dict[str, np.ndarray]  # the caches when the call has returned
    new: dict[str, np.ndarray]
    table: np.ndarray | None
    sinks: np.ndarray | None
    scales: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)  # of eight bits

    def run(self, backend: str | None, **changes) -> jax_flash.Decoded:
        case = self.case
        arrays = {
            "query": self.query,
            "key_cache": self.cache["key"],
            "value_cache": None if case.latent else self.cache["value"],
            "lengths": np.array(case.lengths, np.int32),
            "page_table": None if self.table is None else self.table.astype(np.int32),
            "sinks": self.sinks,
            **self.scales,
        }
        if case.appends:
            arrays["new_key"] = self.new["key"]
            arrays["new_value"] = None if case.latent else self.new["value"]
        options = {
            "scale": case.scale,
            "local_window_size": case.window,
            "softcap": case.softcap,
            "rotary_base": case.rotary,
            "precision": case.precision,
            "value_dim": case.value_dim if case.latent else None,
            "backend": backend,
        }
        return decode(options | changes, {k: v for k, v in arrays.items() if v is not None})

    def in_tf32(self) -> Arguments:
        """The same but for roundings, for the truth of it."""
        keys, values = ([tf32(x) for x in rows] for rows in (self.keys, self.values))
        return dataclasses.replace(self, query=tf32(self.query), keys=keys, values=values)

    def truth(self, precision="float64") -> tuple[np.ndarray, np.ndarray]:
        """Out and lse, row by row on what each holds; of queries before position 0 nothing."""
        case = self.case
        out = np.zeros((len(case.lengths), case.T, case.N, case.value_dim))
        lse = np.full(out.shape[:-1], -np.inf if self.sinks is None else 0.0)
        if self.sinks is not None:
            lse += self.sinks
        for b, n in enumerate(case.lengths):
            count = min(case.T, n)
            if count == 0:
                continue
            query, keys = self.query[b, case.T - count :], self.keys[b]
            values = keys[..., : case.value_dim] if case.latent else self.values[b]
            if case.rotary is not None:
                query = rotated(query, np.arange(n - count, n), case.rotary)
                first = n - count if case.appends else n
                keys = np.concatenate(
                    [keys[:first], rotated(keys[first:], np.arange(first, n), case.rotary)]
                )
            result = numpy_oracle.attention(
                query[None],
                keys[None],
                values[None],
                scale=case.scale,
                is_causal=True,
                causal_align="bottom_right",
                local_window_size=None if case.window is None else (case.window, 0),
                softcap=case.softcap,
                sinks=self.sinks,
                precision=precision,
            )
            out[b, case.T - count :], lse[b, case.T - count :] = result.out[0], result.lse[0]
        return out, lse


@functools.lru_cache
def jitted(options):
    def call(arrays):
        value_cache = arrays.pop("value_cache", None)
        return jax_flash.decode_attention(value_cache=value_cache, **arrays, **dict(options))

    return jax.jit(call)


def decode(options, arrays) -> jax_flash.Decoded:
    return jitted(tuple(sorted(options.items())))(arrays)


CASES = [
    Case("one token"),
    Case("heads without groups, nothing new", N=2, appends=False, dtype="bfloat16"),
    Case("group of 16", N=16, K=1, H=64, dtype="bfloat16"),
    Case("half a pair of keys at both ends", N=16, H=80, T=3, window=36, softcap=4.0,
         lengths=(199, 3, 65, 78), dtype="bfloat16"),
    Case("group of 3, odd dims", N=6, H=33, Hv=17, dtype="float16"),
    Case("group of 7, several tokens", N=7, K=1, T=5, dtype="bfloat16", lengths=(L, 3, 0, 130)),
    Case("64 tokens", T=64, lengths=(L, 64, 0, 10)),
    Case("64 tokens of 16 heads, window, 16 bits", T=64, N=16, K=1, window=20, dtype="bfloat16"),
    Case("window", T=4, window=30, lengths=(L, 1, 0, 77)),
    Case("softcap and sinks", T=3, softcap=2.0, sinks=True, scale=0.5),
    Case("softcap of 1e8", T=3, softcap=1e8),
    Case("sinks and a window of one", window=0, sinks=True, dtype="bfloat16"),
    Case("scores of 2^37, rounded by 2^14", T=2, H=64, scale=1e10, dtype="bfloat16"),
    Case("a scale below float32", T=2, H=64, scale=1e-50),
    Case("rotary", T=5, rotary=100.0, lengths=(L, 3, 0, 77)),
    Case("pages", page=16, T=5, lengths=(L, 33, 0, 50)),
    Case("pages, shared prefix", page=16, shared=2, N=8, K=8, dtype="bfloat16", lengths=(L, 40, 7)),
    Case("pages of three, window", page=3, window=20, T=7, dtype="float16", lengths=(L, 2, 0, 99)),
    Case("pages of one, nothing new", page=1, appends=False, lengths=(50, 0, 7)),
    Case("pages of 128 and all", page=128, T=3, N=8, window=60, softcap=3.0, sinks=True,
         rotary=1e4, dtype="bfloat16", lengths=(L, 2, 129, 130)),
    Case("latent", N=16, K=1, H=576, Hv=512, latent=True, page=64, dtype="bfloat16"),
    Case("latent, scores of 2^31", K=1, H=320, Hv=320, latent=True, scale=1e8, dtype="bfloat16"),
    Case("latent, several tokens", N=4, K=1, H=72, Hv=64, latent=True, T=2, lengths=(L, 1, 64)),
]  # fmt: skip


def fit(case: Case, backend: str) -> Case:
    """The case, or for "cuda" the nearest in 16 bits and dims that 8 divides, as TMA takes them."""
    if backend != "cuda":
        return case
    dims = {"H": -(-case.H // 8) * 8, "Hv": -(-case.value_dim // 8) * 8}
    dtype = "bfloat16" if case.dtype == "float32" else case.dtype
    return dataclasses.replace(case, dtype=dtype, **dims)


# For kernels that split float32, or copy rows in words of 16, 8, 4 or 2 bytes.
UNALIGNED = [
    Case("float32 in two parts", T=5, N=8, K=4, H=64, softcap=3.0, rotary=100.0,
         precision="default"),
    Case("float32 in three parts", T=20, N=4, K=1, H=128, window=70, rotary=100.0),
    Case("float32 of 36 and 18, pages of 5", T=3, H=36, Hv=18, page=5, sinks=True,
         lengths=(L, 3, 0, 77)),
    Case("float32 of 33 and 7", T=2, N=2, H=33, Hv=7, window=30, precision="default"),
    Case("16 bits of 36 and 18", T=2, H=36, Hv=18, page=16, dtype="bfloat16"),
]  # fmt: skip


# With their tilings: teams of a cluster take turns in rings that they do not divide, several times
# round.
_LONG = Case("long", T=2, N=4, K=1, H=64, window=900, lengths=(1000, 0, 650, 129), most=1000,
             dtype="bfloat16")  # fmt: skip
RINGS = (
    (_LONG, {"cluster": 2, "stages": 3}),
    (dataclasses.replace(_LONG, name="pages", page=16), {"cluster": 2, "stages": 5}),
    (
        dataclasses.replace(_LONG, name="wide blocks"),
        {"cluster": 2, "stages": 3, "block_kv": 128},
    ),
)


@dataclasses.dataclass
class Tiled:
    """A case by a tiling of its own: arguments of `make` in jax_flash/_gpu/decode.py."""

    arguments: Arguments
    tiling: dict[str, int]

    def run(self, backend: str) -> jax_flash.Decoded:
        chosen = family.choose
        if self.tiling:
            family.choose = lambda *call: family.make(*call, **self.tiling)
        jax.clear_caches()
        try:
            return jax.tree.map(np.asarray, self.arguments.run(backend))
        finally:
            family.choose = chosen


def compare(arguments: Arguments, got: jax_flash.Decoded) -> None:
    """Checks results against the truth, and what is in the caches to the bit."""
    case = arguments.case
    (out, lse), (plain, _) = arguments.truth(), arguments.truth(case.dtype)
    assert got.out.dtype == case.dtype
    assert got.lse.dtype == np.float32
    if case.dtype == "float32" and case.precision != "highest":  # much more exact than TF32
        coarse, coarse_lse = arguments.in_tf32().truth()
        check("out", got.out, out, coarse, case.dtype, 1 / 8)
        check("lse", got.lse, lse, coarse_lse, case.dtype, 1 / 8)
    else:
        check("out", got.out, out, plain, case.dtype, FORWARD_FACTOR)
        # With rotary, of query and keys that were rounded once more.
        exact = "float32" if case.rotary is None else case.dtype
        check("lse", got.lse, lse, arguments.truth(exact)[1], exact, FORWARD_FACTOR)
    caches = {"key": got.key_cache, "value": got.value_cache}
    if case.latent:
        assert caches.pop("value") is None
    for name, cache in caches.items():
        expected = arguments.expected[name]
        if name == "key" and case.rotary is not None:
            np.testing.assert_array_equal(np.isnan(cache), np.isnan(expected))
        else:
            assert np.asarray(cache).tobytes() == expected.tobytes()


def check_newest_values(run: Callable[[Arguments], jax_flash.Decoded], backend: str) -> None:
    """NaN and inf at the newest positions, of which earlier queries see none or some."""
    arguments = fit(Case("newest", T=6, N=8, window=9, lengths=(150, 6)), backend).draw()
    clean = run(arguments)
    arguments.new["value"][:, 3, 0] = np.nan
    arguments.new["value"][:, 5, 1] = np.inf
    got = run(arguments)
    seeing = np.zeros(got.out.shape, bool)
    seeing[:, 3:, :4] = seeing[:, 5:, 4:] = True
    finite = np.isfinite(np.asarray(got.out, np.float32))
    np.testing.assert_array_equal(finite, ~seeing)
    np.testing.assert_array_equal(np.asarray(got.out)[finite], np.asarray(clean.out)[finite])
    np.testing.assert_array_equal(got.lse, clean.lse)


# ---- calls of other things than arithmetic -------------------------------------------------------


def small(backend, T=2, pages=None, rows=3, N=4, K=2, seed=0, length=48) -> dict:
    """Arrays of a call with new keys and values, for tests of other things than arithmetic."""
    dtype = "bfloat16" if backend == "cuda" else "float32"
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    cache = (rows, length) if pages is None else (rows * length // pages + 1, pages)
    arrays = {
        "query": normal(rows, T, N, 16),
        "key_cache": normal(*cache, K, 16),
        "value_cache": normal(*cache, K, 16),
        "lengths": jnp.asarray(rng.integers(T, length + 1, rows), jnp.int32),
        "new_key": normal(rows, T, K, 16),
        "new_value": normal(rows, T, K, 16),
    }
    if pages is not None:
        table = rng.permutation(rows * length // pages).reshape(rows, -1)
        arrays["page_table"] = jnp.asarray(table, jnp.int32)
    return arrays


def equal(got, expected):
    """Checks that two trees are the same to the bit."""
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def alike(got, expected, backend, atol=0.0):
    """Checks that two trees are the same, on "cuda" but for rounding: work is cut elsewhere."""
    atol = 0.02 if backend == "cuda" else atol
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(*(z.astype("float32") for z in (x, y)), 0, atol),
        got,
        expected,
    )
