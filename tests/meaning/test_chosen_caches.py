"""Chosen keys of caches: `decode_attention`, and the same tokens in `ragged_paged_attention`.

The truth is the NumPy oracle with a mask made of the indices.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash

from .. import chosen_cases, numpy_oracle
from ..numpy_oracle import DTYPES
from ..tolerance import FORWARD_FACTOR, check


@dataclasses.dataclass(frozen=True)
class Cache:
    """One `decode_attention`, or `ragged_paged_attention` of the same tokens."""

    name: str
    T: int = 3
    lengths: tuple[int, ...] = (29, 2, 0, 17)
    N: int = 4
    K: int = 2
    H: int = 16
    Hv: int = 16
    n: int = 9
    page: int | None = 4
    dtype: str = "float32"
    latent: bool = False
    options: dict = dataclasses.field(default_factory=dict)
    sinks: bool = False
    most = 32

    def draw(self):
        rng = np.random.default_rng(len(self.name))
        rows, dtype = len(self.lengths), DTYPES[self.dtype]

        def normal(*shape):
            return rng.standard_normal(shape).astype(dtype)

        size = self.page or self.most
        columns = self.most // size
        table = rng.permutation(rows * columns + 2)[: rows * columns].reshape(rows, columns)
        if self.page is None:
            table = np.arange(rows)[:, None]
        held = {"key": normal(rows, self.most, self.K, self.H)}
        held["value"] = normal(rows, self.most, self.K, self.Hv)
        if self.latent:
            held["value"] = held["key"][..., : self.Hv]
        query = normal(rows, self.T, self.N, self.H)
        positions = np.array(self.lengths)[:, None] - self.T + np.arange(self.T)  # [B, T]
        indices = chosen_cases.draw_indices(rng, (rows, self.T), self.n, self.most)
        window = self.options.get("local_window_size", self.most)
        behind = positions[..., None] - np.arange(self.most)
        seen = chosen_cases.read(indices, self.most) & (behind >= 0) & (behind <= window)
        query[~seen.any(-1)] = np.nan
        unread = ~seen.any(1)  # [B, positions]
        for x in held.values():
            x[unread] = np.nan
        if self.page:  # pages that nothing is read from, nor written to
            needed = ~unread | (np.arange(self.most) >= positions[:, :1])
            needed &= np.arange(self.most) < np.array(self.lengths)[:, None]
            table[~needed.reshape(rows, columns, size).any(-1)] = -1
        sinks = rng.standard_normal(self.N).astype(np.float32) if self.sinks else None
        return query, held, table, indices, seen, sinks

    def truth(self, query, held, seen, sinks, precision="float64"):
        return numpy_oracle.attention(
            query,
            held["key"],
            held["value"],
            mask=seen[:, None],
            softcap=self.options.get("softcap"),
            sinks=sinks,
            precision=precision,
        )


CACHES = (
    Cache("pages"),
    Cache("rows, one token, all chosen", T=1, page=None, n=32, sinks=True),
    Cache("latent with a window", K=1, N=8, H=40, Hv=32, latent=True, dtype="bfloat16",
          options={"local_window_size": 11, "softcap": 3.0}),
)  # fmt: skip


def of_cache(case: Cache, query, held, table, indices, sinks):
    """Calls it as new keys are appended; returns what it gives and the arrays of its pages."""
    rows, size, T = len(case.lengths), case.page or case.most, case.T
    lengths = np.array(case.lengths, np.int32)
    stored, new = {}, {}
    for name, x in held.items():
        pages = np.full((rows * (case.most // size) + 2, size, *x.shape[2:]), np.nan, x.dtype)
        for b, p in np.ndindex(rows, case.most):
            if 0 <= table[b, p // size] < len(pages) and p < lengths[b] - T:
                pages[table[b, p // size], p % size] = x[b, p]
        at = np.clip(lengths[:, None] - T + np.arange(T), 0, case.most - 1)
        new[name] = np.take_along_axis(x, at[..., None, None], axis=1)
        stored[name] = pages if case.page else pages[:rows]
    if case.latent:
        stored["value"], new["value"] = None, None
    given = {"lengths": lengths, "indices": indices, "sinks": sinks, "new_key": new["key"]}
    given |= {"new_value": new["value"], "page_table": table.astype(np.int32)}
    options = case.options | {"value_dim": case.Hv if case.latent else None}
    return (query, stored["key"], stored["value"]), given, options | {"precision": "highest"}


@pytest.mark.parametrize("case", CACHES, ids=lambda case: case.name)
def test_caches(case, backend):
    case = chosen_cases.fit(case, backend)
    query, held, table, indices, seen, sinks = case.draw()
    arrays, given, options = of_cache(case, query, held, table, indices, sinks)
    options["backend"] = backend
    if case.page is None:
        del given["page_table"]
    decode = jax.jit(jax_flash.decode_attention, static_argnames=[*options])
    got = decode(*arrays, **given, **options)
    truth = case.truth(query, held, seen, sinks)
    plain = case.truth(query, held, seen, sinks, case.dtype)
    exact = case.truth(query, held, seen, sinks, "float32")
    check("out", got.out, truth.out, plain.out, case.dtype, FORWARD_FACTOR)
    check("lse", got.lse, truth.lse, exact.lse, "float32", FORWARD_FACTOR)
    # What is written does not depend on what is read.
    full = dict(given, indices=None)
    caches = [decode(*arrays, **x, **options).key_cache for x in (given, full)]
    assert np.asarray(caches[0]).tobytes() == np.asarray(caches[1]).tobytes()
    if case.page is None:
        return
    # The same tokens as requests, one of them not live and one without any; a token of none.
    count = np.minimum(case.T, case.lengths)
    starts = np.concatenate([[1], 1 + np.cumsum(count), [-5]]).astype(np.int32)
    own = [(b, t) for b in range(len(count)) for t in range(case.T - count[b], case.T)]

    def tokens(x):
        flat = np.concatenate([x[:1, 0], *(x[b, t][None] for b, t in own), x[:1, 0]])
        return jnp.asarray(flat)

    rows = len(case.lengths)
    ragged = {name: tokens(given[name]) for name in ("indices", "new_key", "new_value")
              if given[name] is not None}  # fmt: skip
    ragged |= {"sinks": sinks, "rows": np.int32(rows), "query_starts": starts}
    ragged["lengths"] = np.append(given["lengths"], 2**31 - 1)
    ragged["page_table"] = np.append(given["page_table"], given["page_table"][:1], axis=0)
    call = jax.jit(jax_flash.ragged_paged_attention, static_argnames=[*options])
    mixed = call(tokens(query), *arrays[1:], **ragged, **options)
    for x, y, nothing in ((mixed.out, got.out, 0), (mixed.lse, got.lse, -np.inf)):
        expected = tokens(np.asarray(y)).at[jnp.array([0, -1])].set(nothing)
        tolerance = 1e-6 if x.dtype == "float32" else 0.01  # another split of the work
        np.testing.assert_allclose(
            x.astype(jnp.float32), expected.astype(jnp.float32), rtol=tolerance, atol=tolerance
        )
    assert np.asarray(mixed.key_pages).tobytes() == np.asarray(got.key_cache).tobytes()


def test_a_row_that_lacks_a_page_that_it_reads_is_nan(backend):
    """In pages: a chosen position needs its page, one that is not chosen does not."""
    case = Cache("faults", T=1, lengths=(29, 30, 31, 40))
    query, held, table, indices, *_ = case.draw()
    query = np.nan_to_num(query)
    held = {name: np.nan_to_num(x) for name, x in held.items()}
    table = np.arange(table.size).reshape(table.shape)
    indices[:] = -1
    indices[..., :3] = 0, 9, 2**20
    table[0, 1] = -1  # positions 4 to 7, which nothing reads
    table[1, 2] = 10**6  # positions 8 to 11
    arrays, given, options = of_cache(case, query, held, table, indices, None)
    options["backend"] = backend
    got = jax_flash.decode_attention(*arrays, **given, **options)
    is_nan = np.isnan(np.asarray(got.out)).any(axis=(1, 2, 3))
    assert is_nan.tolist() == [False, True, False, True]  # the last is longer than its table
    np.testing.assert_array_equal(np.isnan(np.asarray(got.lse)).any(axis=(1, 2)), is_nan)
    nothing = given | {"indices": indices[..., :0]}
    lse = np.asarray(jax_flash.decode_attention(*arrays, **nothing, **options).lse)
    assert np.isnan(lse).any(axis=(1, 2)).tolist() == [False, False, False, True]
    ragged = {name: x[:, 0] for name, x in given.items() if name in ("new_key", "new_value")}
    ragged |= {name: given[name] for name in ("lengths", "page_table")}
    mixed = jax_flash.ragged_paged_attention(
        query[:, 0], *arrays[1:], **ragged, **options, indices=indices[:, 0],
        query_starts=np.arange(5),
    )  # fmt: skip
    np.testing.assert_allclose(mixed.out, got.out[:, 0], rtol=1e-6)
    # A request that is refused writes nothing.
    written = np.asarray(mixed.key_pages)[table[1, 29 // 4], 29 % 4]
    assert np.isnan(written).all()


@pytest.mark.parametrize("of_pages", [True, False])
def test_caches_of_eight_bits(of_pages, backend):
    """Scales go with the keys that are gathered; those of pages "xla" alone knows."""
    case = Cache("int8", lengths=(29, 12, 5, 17))
    query, _, _, indices, seen, _ = case.draw()
    query = query.astype(DTYPES["bfloat16"])
    rng = np.random.default_rng(0)
    table = rng.permutation(32).reshape(4, 8)
    pages = rng.integers(-127, 128, (2, 32, 4, 2, 16)).astype(np.int8)
    scales = rng.uniform(0.01, 0.03, (2, 32 if of_pages else 1, 2)).astype(np.float32)
    given = dict(
        zip(("key_scale", "value_scale"), scales if of_pages else scales[:, 0], strict=True)
    )

    def call():
        return jax_flash.decode_attention(
            query, *pages, np.array(case.lengths), indices=indices, page_table=table, **given,
            backend=backend,
        )  # fmt: skip

    if of_pages and backend in ("cpu", "cuda"):
        with pytest.raises(NotImplementedError, match="no chosen keys of caches with scales of r"):
            call()
        return
    k, v = (pages * scales[:, :, None, :, None])[:, table].reshape(2, 4, 32, 2, 16)
    held = {"key": k, "value": v}
    truth, plain = (case.truth(query, held, seen, None, x) for x in ("float64", "bfloat16"))
    check("out", call().out, truth.out, plain.out, "bfloat16", FORWARD_FACTOR)


def test_members_have_scales_of_their_own():
    """Under vmap a pool's scale is that of its pages, which "xla" alone knows."""
    rng = np.random.default_rng(0)
    pages = jnp.asarray(rng.integers(-127, 128, (2, 3, 4, 1, 16)), jnp.int8)
    query, scale = rng.standard_normal((2, 1, 1, 2, 16)), np.array([0.01, 0.03])
    table, indices, lengths = np.array([[0, 2]]), np.array([[[5, 0, 2]]]), np.array([7])

    @jax.jit
    def call(query, pages, scale):
        return jax_flash.decode_attention(
            query, pages, pages, lengths, page_table=table, indices=indices,
            key_scale=scale, value_scale=scale,
        ).out  # fmt: skip

    members = jnp.float32(query), pages, jnp.float32(scale)
    expected = [call(*(x[i] for x in members)) for i in range(2)]
    np.testing.assert_allclose(jax.vmap(call)(*members), jnp.stack(expected), atol=1e-6)
