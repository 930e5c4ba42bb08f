"""Chosen keys: what queries read of the positions in `indices`, in the three calls that take them.

The truth is the NumPy oracle with a mask made of the indices.
"""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash
from jax_flash import reference

from .. import chosen_cases, numpy_oracle
from ..chosen_cases import CASES
from ..devices import collectives, mesh_of
from ..numpy_oracle import DTYPES
from ..tolerance import FORWARD_FACTOR, check


def of_kernels(**options):
    """A function of (arrays, indices, (dout, dlse)): out, lse and three gradients, under jit."""

    def call(arrays, indices, cotangents):
        moving = [arrays[name] for name in ("query", "key", "value")]
        rest = {name: x for name, x in arrays.items() if name not in ("query", "key", "value")}

        def attend(*moving):
            return jax_flash.flash_attention(
                *moving, **rest, indices=indices, return_lse=True, precision="highest", **options
            )

        results, pull = jax.vjp(attend, *moving)
        return (*results, *pull(cotangents))

    return jax.jit(call)


# ---- flash_attention -----------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_results_and_gradients(case):
    drawn = case.draw()
    got = of_kernels(**case.options)(drawn.arrays, drawn.indices, (drawn.dout, drawn.dlse))
    drawn.compare(*got)


def small(seed=0, lead=(2,), T=6, S=11, N=4, K=2, H=8, n=5):
    rng = np.random.default_rng(seed)
    arrays = [
        jnp.asarray(rng.standard_normal((*lead, *shape)), jnp.float32)
        for shape in ((T, N, H), (S, K, H), (S, K, H))
    ]
    return arrays, jnp.asarray(chosen_cases.draw_indices(rng, (*lead, T), n, S))


def test_derivatives_of_members_that_share_what_they_can():
    """vmap over some arguments, forward mode, gradients and their derivatives: the reference's."""
    (q, k, v), _ = small(lead=(3, 2))
    _, indices = small(lead=(3, 2), seed=1)
    sinks = jnp.arange(-2.0, 2.0)

    def loss(attend, axes, q, k, v, indices, sinks):
        def member(q, k, v, indices):
            options = {"is_causal": True, "softcap": 2.0, "sinks": sinks, "return_lse": True}
            out, lse = attend(q, k, v, indices=indices, **options)
            return jnp.sin(out).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()

        return jax.vmap(member, axes)(q, k, v, indices).sum()

    def ours(*arrays, **options):
        return jax_flash.flash_attention(*arrays, **options, precision="highest")

    for axes in ((0, None, None, 0), (0, 0, 0, None), (None, None, 0, 0)):
        given = [x if axis == 0 else x[0] for x, axis in zip((q, k, v, indices), axes, strict=True)]

        def derivatives(attend, axes=axes, given=given):
            def of(*moving):
                return loss(attend, axes, *moving[:3], given[3], moving[3])

            moving = (*given[:3], sinks)
            first = jax.grad(of, (0, 1, 2, 3))
            tangents = jax.tree.map(jnp.cos, moving)
            _, forward = jax.jvp(of, moving, tangents)
            _, second = jax.jvp(first, moving, tangents)  # forward over reverse
            return first(*moving), forward, second

        got, expected = derivatives(ours), derivatives(reference.attention)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-5)


def test_split_over_batch_and_heads_without_a_collective():
    mesh = mesh_of((4, 2))
    (q, k, v), indices = small(lead=(4,), N=4, K=2)
    call = of_kernels(is_causal=True)
    cotangents = jnp.cos(q), jnp.ones(q.shape[:-1])
    expected = call({"query": q, "key": k, "value": v}, indices, cotangents)
    heads = NamedSharding(mesh, P("data", None, "model"))
    rows = NamedSharding(mesh, P("data"))
    q, k, v, *cotangents = (jax.device_put(x, heads) for x in (q, k, v, *cotangents))
    given = ({"query": q, "key": k, "value": v}, jax.device_put(indices, rows), tuple(cotangents))
    compiled = call.lower(*given).compile()
    assert collectives(compiled) == []
    for x, y in zip(compiled(*given), expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_memory_grows_with_what_is_read():
    """Less than one byte for each of T S, in blocks of queries; gradients too."""
    T = S = 8192
    x = jax.ShapeDtypeStruct((1, T, 1, 8), jnp.float32)
    indices = jax.ShapeDtypeStruct((1, T, 32), jnp.int32)
    given = {"query": x, "key": x, "value": x}
    cotangents = x, jax.ShapeDtypeStruct((1, T, 1), jnp.float32)
    program = of_kernels(is_causal=True).lower(given, indices, cotangents).compile()
    assert program.memory_analysis().temp_size_in_bytes < T * S
    # Of 2048 keys for each query all that is gathered at once would be 2 GB.
    indices = jax.ShapeDtypeStruct((1, T, 2048), jnp.int32)
    program = of_kernels(is_causal=True).lower(given, indices, cotangents).compile()
    gathered = T * 2048 * 16 * 4
    assert program.memory_analysis().temp_size_in_bytes < gathered / 4


def test_key_weights_and_split_sequences():
    (q, k, _), indices = small()
    got = jax_flash.key_weights(q, k, indices=indices)
    mask = jnp.asarray(chosen_cases.read(np.asarray(indices), k.shape[1]))[:, None]
    expected = jax_flash.key_weights(q, k, mask=mask)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
    mesh = mesh_of((1, 2))
    with jax.set_mesh(mesh), pytest.raises(NotImplementedError, match="has no chosen keys"):
        jax_flash.context_parallel.attention(q, q, q, indices=indices, axis_name="model")


# ---- caches --------------------------------------------------------------------------------------


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
def test_caches(case):
    query, held, table, indices, seen, sinks = case.draw()
    arrays, given, options = of_cache(case, query, held, table, indices, sinks)
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
        np.testing.assert_allclose(
            x.astype(jnp.float32), expected.astype(jnp.float32), rtol=1e-6, atol=1e-6
        )
    assert np.asarray(mixed.key_pages).tobytes() == np.asarray(got.key_cache).tobytes()


def test_a_row_that_lacks_a_page_that_it_reads_is_nan_and_writes_where_it_can():
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
    got = jax_flash.decode_attention(*arrays, **given, **options)
    is_nan = np.isnan(np.asarray(got.out)).any(axis=(1, 2, 3))
    assert is_nan.tolist() == [False, True, False, True]  # the last is longer than its table
    np.testing.assert_array_equal(np.isnan(np.asarray(got.lse)).any(axis=(1, 2)), is_nan)
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


def test_caches_of_eight_bits():
    """Scales of pages go with the keys that are gathered."""
    case = Cache("int8", lengths=(29, 12, 5, 17))
    query, held, table, indices, seen, _ = case.draw()
    table = np.arange(table.size).reshape(table.shape)
    rng = np.random.default_rng(0)
    pages = rng.integers(-127, 128, (2, table.size, 4, 2, 16)).astype(np.int8)
    scales = rng.uniform(0.01, 0.03, (2, table.size, 2)).astype(np.float32)
    got = jax_flash.decode_attention(
        jnp.asarray(query), *jnp.asarray(pages), np.array(case.lengths), indices=indices,
        page_table=table, key_scale=scales[0], value_scale=scales[1],
    )  # fmt: skip
    k, v = (x * y[:, :, None, :, None] for x, y in zip(
        pages.reshape(2, 4, 8, 4, 2, 16), scales.reshape(2, 4, 8, 2), strict=True))  # fmt: skip
    held = {"key": k.reshape(4, 32, 2, 16), "value": v.reshape(4, 32, 2, 16)}
    truth = case.truth(query, held, seen, None)
    np.testing.assert_allclose(got.out, truth.out, rtol=0, atol=2e-5)


# ---- faults --------------------------------------------------------------------------------------


def test_wide_integers_do_not_wrap_around():
    (q, k, v), indices = small()
    wide = np.where(np.asarray(indices) < 0, 2**32, np.asarray(indices, np.int64))
    got = jax_flash.flash_attention(q, k, v, indices=wide)
    np.testing.assert_array_equal(got, jax_flash.flash_attention(q, k, v, indices=indices))


FAULTS = {
    "dtype": ({"indices": np.zeros((2, 6, 5), np.float32)}, TypeError, "indices has dtype float32"),
    "a mask": ({"indices": np.zeros((2, 6, 5), bool)}, TypeError, "booleans are mask's"),
    "of heads": ({"indices": np.zeros((2, 4, 6, 5), np.int32)}, ValueError, r"(2, 6, 'n')"),
    "of rows": ({"indices": np.zeros((2, 5), np.int32)}, ValueError, r"(2, 6, 'n')"),
    "bias": ({"bias": np.zeros((6, 11), np.float32)}, ValueError, "bias is given beside indices"),
    "mask": ({"mask": np.ones((6, 11), bool)}, ValueError, "mask is given beside indices"),
    "score_mod": ({"score_mod": lambda s, *_: 2 * s}, ValueError, "score_mod is given beside"),
    "dropout": ({"dropout_rate": 0.5, "dropout_key": jax.random.key(0)}, ValueError,
                "dropout_rate is given beside indices"),
    "deterministic": ({"deterministic": True}, ValueError, "deterministic is given beside"),
    "kernels": ({"backend": "cpu"}, NotImplementedError, "no chosen keys"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults(name):
    change, error, says = FAULTS[name]
    (q, k, v), indices = small()
    with pytest.raises(error, match=re.escape(says)):
        jax_flash.flash_attention(q, k, v, **({"indices": indices} | change))


def test_what_else_is_refused():
    (q, k, v), indices = small()
    half = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    with pytest.raises(ValueError, match="float8 is given beside indices"):
        jax_flash.flash_attention(*half, indices=indices, quantize="fp8")
    mask = jax_flash.block_mask(jax_flash.masks.causal(), q_len=6, kv_len=11)
    with pytest.raises(ValueError, match="block_mask is given beside indices"):
        jax_flash.flash_attention(q, k, v, indices=indices, block_mask=mask)
    pages = jnp.zeros((4, 4, 2, 8))
    step = {"lengths": jnp.array([6]), "page_table": jnp.array([[0, 1]])}
    step |= {"query_starts": jnp.array([0, 2]), "indices": indices[0, :2]}
    for name, x in (("shared_pages", jnp.array([0])), ("ancestors", jnp.ones((2, 2), bool))):
        with pytest.raises(ValueError, match=f"{name} is given beside indices"):
            jax_flash.ragged_paged_attention(q[0, :2], pages, pages, **step, **{name: x})
    with pytest.raises(ValueError, match=r"indices has shape \(6, 5\); expected \(2, 'n'\)"):
        jax_flash.ragged_paged_attention(q[0, :2], pages, pages, **step | {"indices": indices[0]})


def test_explain_says_what_runs_it():
    (q, k, v), indices = small()
    found = jax_flash.explain(q, k, v, indices=indices, gpu="H200")
    for one in (found.forward, found.backward):
        assert one.backend == "xla"
        assert one.refusals["cuda"] == ("the CUDA kernels have no chosen keys",)
    assert "indices" in repr(found)
