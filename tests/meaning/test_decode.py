"""decode_attention against float64, in every layout; lengths and pages of any size; what is named.

What its programs copy, send and export is in test_decode_programs.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash._gpu import decode as tilings

from ..decode_cases import (
    CASES,
    RINGS,
    Tiled,
    alike,
    check_newest_values,
    compare,
    decode,
    equal,
    fit,
    small,
)
from ..hopper import NEEDS_HOPPER
from ..numpy_oracle import rotated


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_case(case, backend):
    arguments = fit(case, backend).draw()
    compare(arguments, arguments.run(backend))


@pytest.mark.parametrize(
    "case", [pytest.param(x, marks=NEEDS_HOPPER, id=x.name.replace(" ", "-")) for x in CASES]
)
def test_case_by_parts_of_a_line(case, monkeypatch):
    """As for long caches: rows as short as these have a cluster of CTAs each."""
    monkeypatch.setattr(tilings, "_MOST_IN_CLUSTER", 0)
    jax.clear_caches()
    arguments = fit(case, "cuda").draw()
    compare(arguments, arguments.run("cuda"))


@pytest.mark.parametrize(
    ("case", "tiling"), [pytest.param(*x, marks=NEEDS_HOPPER, id=x[0].name) for x in RINGS]
)
def test_teams_take_turns(case, tiling):
    arguments = case.draw()
    for _ in range(4):  # what comes first is chance
        compare(arguments, Tiled(arguments, tiling).run("cuda"))


def test_values_reach_the_queries_that_see_them_alone(backend):
    check_newest_values(lambda arguments: arguments.run(backend), backend)


@pytest.mark.parametrize("pages", [None, 16])
def test_a_row_without_its_pages_is_nan_and_touches_nothing(pages, backend):
    arrays = small(backend, pages=pages) | {"lengths": jnp.array([30, 40, 48], jnp.int32)}
    options = {"backend": backend}
    whole = decode(options, arrays)
    wrong = [{"lengths": arrays["lengths"].at[1].set(n)} for n in (49, 2**31 - 1)]
    if pages:
        table = arrays["page_table"]
        wrong += [{"page_table": table.at[1, c].set(x)} for c, x in ((0, -1), (2, 10), (1, 2**30))]
    for change in wrong:
        got = decode(options, arrays | change)
        for x, y in ((got.out, whole.out), (got.lse, whole.lse)):
            assert np.isnan(x[1]).all()
            alike(x[0::2], y[0::2], backend)
        own = np.array(1) if pages is None else np.asarray(arrays["page_table"][1])
        for name in ("key_cache", "value_cache"):
            others = (np.delete(getattr(x, name), own, axis=0) for x in (got, whole))
            equal(*others)
            if "lengths" in change:  # one of the two new positions would have a place
                equal(getattr(got, name)[own], arrays[name][own])


@pytest.mark.parametrize("pages", [None, 16])
def test_vmap_is_a_loop(pages, backend):
    options = {"backend": backend}
    members = [small(backend, pages=pages, seed=seed) for seed in range(2)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *members)
    got = jax.vmap(lambda x: decode(options, x))(stacked)
    for i, member in enumerate(members):
        alike(jax.tree.map(lambda x, i=i: x[i], got), decode(options, member), backend)
    # Members that append to one cache get each a copy; those that only read it share it.
    for names in (("query", "new_key"), ("query", "page_table" if pages else "lengths")):
        if "new_key" not in names:
            stacked = {k: x for k, x in stacked.items() if not k.startswith("new")}
            members = [{k: m[k] for k in stacked} for m in members]
        axes = {name: 0 if name in names else None for name in stacked}
        mixed = {name: x if name in names else x[0] for name, x in stacked.items()}
        got = jax.vmap(lambda x: decode(options, x), in_axes=(axes,))(mixed)
        for i, member in enumerate(members):
            own = {name: member[name] if name in names else mixed[name] for name in mixed}
            expected = decode(options, own)
            alike(got.out[i], expected.out, backend)
            if "new_key" in names:
                equal(got.key_cache[i], expected.key_cache)


@pytest.mark.parametrize("shape", [(2, 0, 24), (2, 2, 0), (0, 2, 24)])
def test_no_heads_no_slots_no_rows(shape, backend):
    rows, kv_heads, length = shape
    arrays = small(backend, rows=rows, N=2 * kv_heads, K=kv_heads, length=24)
    arrays["lengths"] = jnp.full(rows, 5, jnp.int32)
    for name in ("key_cache", "value_cache"):
        arrays[name] = arrays[name][:, :length]
    got = decode({"backend": backend}, arrays)
    assert got.out.shape == (rows, 2, 2 * kv_heads, 16)
    assert got.lse.shape == (rows, 2, 2 * kv_heads)
    assert got.key_cache.shape == arrays["key_cache"].shape
    assert np.isnan(got.out.astype("float32")).all()  # rows without a place, or no element


@pytest.mark.parametrize("shape", [(0, 16, 3), (5, 0, 3), (5, 16, 0)])
def test_no_pages_no_slots_no_columns(shape, backend):
    pages, size, columns = shape
    arrays = small(backend, rows=2, pages=16) | {"lengths": jnp.array([0, 5], jnp.int32)}
    for name in ("key_cache", "value_cache"):
        arrays[name] = arrays[name][:pages, :size]
    arrays["page_table"] = jnp.zeros((2, columns), jnp.int32)
    got = decode({"backend": backend}, arrays)
    assert (got.out[0] == 0).all()
    assert (got.lse[0] == -np.inf).all()
    assert np.isnan(got.out[1].astype("float32")).all()
    assert np.isnan(got.lse[1]).all()
    equal(got.key_cache, arrays["key_cache"])


@pytest.mark.parametrize("chosen", [None, 0, 3])
def test_no_rows_over_pages(chosen, backend):
    arrays = small(backend, pages=16)
    for name in ("query", "lengths", "new_key", "new_value", "page_table"):
        arrays[name] = arrays[name][:0]
    if chosen is not None:
        arrays["indices"] = jnp.zeros((0, 2, chosen), jnp.int32)
    got = decode({"backend": backend}, arrays)
    assert got.out.shape == (0, 2, 4, 16)
    assert got.lse.shape == (0, 2, 4)
    equal(got.key_cache, arrays["key_cache"])


@pytest.mark.parametrize("columns", [2**15, 2**15 + 5])
def test_a_table_of_more_positions_than_a_length_can_have(columns, host_backend):
    """The last position of an int32 length, in pages of 65536: sums of positions overflow."""
    size, rng = 2**16, np.random.default_rng(0)
    pages = jnp.asarray(rng.standard_normal((2, size, 1, 4)), "float32")
    table = jnp.full((1, columns), -1, jnp.int32).at[0, 2**15 - 1].set(1)
    query = jnp.asarray(rng.standard_normal((1, 2, 2, 4)), "float32")
    options = {"local_window_size": 5, "backend": host_backend}
    arrays = {"query": query, "lengths": jnp.array([2**31 - 1], jnp.int32), "page_table": table}
    got = decode(options, arrays | {"key_cache": pages, "value_cache": pages})
    near = pages[1:, size - 33 : size - 1]
    rest = {"key_cache": near, "value_cache": near, "lengths": jnp.array([32], jnp.int32)}
    expected = decode(options, {"query": query} | rest)
    np.testing.assert_allclose(got.out, expected.out, atol=1e-6)
    lacking = decode(options, arrays | {"page_table": jnp.full_like(table, -1),
                                        "key_cache": pages, "value_cache": pages})  # fmt: skip
    assert np.isnan(lacking.out).all()


def test_lengths_of_any_integer_type(backend):
    """Those below 0 count as 0, those beyond int32 are beyond the cache."""
    arrays = small(backend)
    options = {"backend": backend}
    for lengths, alike_ in (
        ([-1, 20, -(2**31)], [0, 20, 0]),
        (np.array([20, 2**31, 2**32 - 1], np.uint32), [20, 99, 99]),
        (np.array([2**40, -(2**40), 20]), [99, 0, 20]),
    ):
        got = jax_flash.decode_attention(**arrays | {"lengths": lengths}, **options)
        alike(got, decode(options, arrays | {"lengths": jnp.array(alike_, jnp.int32)}), backend)


def test_far_positions_are_rotated_alike_by_all_backends(backend):
    """Frequencies that differ by their last bit are apart by a hundredth after 10^5 positions."""
    arrays = small(backend, rows=1, pages=16)
    columns = 2**17 // 16
    table = jnp.full((1, columns), -1, jnp.int32).at[0, -1].set(0)
    new = jnp.ones((1, 2, 2, 112), arrays["query"].dtype)
    arrays |= {"page_table": table, "lengths": jnp.array([2**17], jnp.int32)}
    arrays |= {"new_key": new, "new_value": new, "query": jnp.ones((1, 2, 4, 112), new.dtype)}
    for name in ("key_cache", "value_cache"):
        arrays[name] = jnp.zeros((1, 16, 2, 112), new.dtype)
    options = {"rotary_base": 1e4, "local_window_size": 0}
    got, expected = (
        decode(options | {"backend": name}, arrays).key_cache.astype("float32")
        for name in (backend, "xla")
    )
    frequencies = (1e4 ** (-np.arange(56) / 56)).astype(np.float32)
    angles = frequencies * np.float32(2**17 - 1)
    truth = np.cos(angles.astype(float)) - np.sin(angles.astype(float))
    atol = 0.01 if backend == "cuda" else 1e-6
    np.testing.assert_allclose(got[0, -1, 0, :56], truth, 0, atol)
    assert np.mean(got == expected) > 0.99


def test_other_leading_dims(backend):
    options = {"backend": backend}
    arrays = small(backend, rows=4)
    expected = decode(options, arrays)
    folded = {name: x.reshape(2, 2, *x.shape[1:]) for name, x in arrays.items()}
    got = decode(options, folded)
    alike(jax.tree.map(lambda x: x.reshape(4, *x.shape[2:]), got), expected, backend)
    one = jax.tree.map(lambda x: x[1], arrays)
    alike(decode(options, one), jax.tree.map(lambda x: x[1], expected), backend)


@pytest.mark.parametrize("pages", [None, 7])
def test_two_hundred_tokens_are_the_full_forward(pages, backend):
    """From prompts of different lengths on, written by fill_cache, one token at a time."""
    lengths, count, rows, size = [30, 1, 0], 200, 3, 7 * 33
    rng = np.random.default_rng(0)
    dtype = "bfloat16" if backend == "cuda" else "float32"
    query, key, value = (
        jnp.asarray(rng.standard_normal((rows, size, n, 16)), dtype) for n in (4, 2, 2)
    )
    options = {"local_window_size": (90, 0), "softcap": 5.0, "sinks": jnp.arange(4.0)}
    positions = jnp.arange(size)
    turned = [
        jnp.asarray(rotated(np.asarray(x, np.float64), positions, 1e4), dtype) for x in (query, key)
    ]
    full = jax_flash.flash_attention(*turned, value, is_causal=True, backend="xla", **options)

    shape = (rows, size) if pages is None else (rows * size // pages, pages)
    caches = [jnp.full((*shape, 2, 16), jnp.nan, dtype) for _ in range(2)]
    table = None
    if pages is not None:
        table = jnp.asarray(rng.permutation(shape[0]).reshape(rows, -1), jnp.int32)
    start = jnp.array(lengths, jnp.int32)
    prompts = turned[1][:, : max(lengths)], value[:, : max(lengths)]
    caches = jax_flash.fill_cache(*caches, *prompts, start, page_table=table)

    def step(caches, i):
        at = (start + i)[:, None, None, None]
        query_i, key_i, value_i = (jnp.take_along_axis(x, at, axis=1) for x in (query, key, value))
        got = jax_flash.decode_attention(
            query_i,
            *caches,
            start + i + 1,
            new_key=key_i,
            new_value=value_i,
            page_table=table,
            rotary_base=1e4,
            backend=backend,
            **options,
        )
        return (got.key_cache, got.value_cache), got.out[:, 0]

    _, outs = jax.jit(lambda caches: jax.lax.scan(step, caches, jnp.arange(count)))(caches)
    for b, n in enumerate(lengths):
        alike(outs[:, b], full[b, n : n + count], backend, atol=1e-5)


@pytest.mark.parametrize("rows", [3, 40], ids=["few-rows", "many-rows"])
@pytest.mark.parametrize("pages", [None, 16])
def test_the_same_bits_from_run_to_run(rows, pages, backend):
    """Few rows have a cluster of CTAs each on Hopper, many are parts of a line."""
    arrays = small(backend, rows=rows, N=8, K=2, pages=pages, length=1008)
    first = decode({"backend": backend}, arrays)
    for _ in range(20):
        equal(decode({"backend": backend}, arrays), first)


def test_wrong_arguments_are_named():
    plain, paged = small("xla"), small("xla", pages=16)

    def refused(message, arrays=plain, **changes):
        with pytest.raises((TypeError, ValueError), match=message):
            jax_flash.decode_attention(**arrays | changes)

    cache, query, new = plain["key_cache"], plain["query"], plain["new_key"]
    refused("query has shape .*T from 1 to 64", query=jnp.zeros((3, 65, 4, 16)))
    refused("a multiple of key_cache's heads, and 0 only of 0", query=query[:, :, :0])
    refused(r"lengths has shape \(3,\).*pass query\[..., None, :, :\]", query=query[:, 0])
    refused(r"lengths is None; expected int32 \[\*B\] = \(3,\)", lengths=None)
    refused("query has dtype bfloat16 and key_cache float32", query=query.astype("bfloat16"))
    refused("query has 3 heads .* key_cache 2", query=query[:, :, :3])
    refused("equal head dims", query=query[..., :8])
    refused(r"key_cache has shape .*\[\*B, L, K, H\]", key_cache=cache[0])
    refused("key_cache has shape .*leading dims", key_cache=cache[:2])
    refused("value_cache has shape .*the same but for the last dim", value_cache=cache[:, :4])
    refused(r"lengths has shape \(2,\)", lengths=plain["lengths"][:2])
    refused("lengths has dtype float32", lengths=plain["lengths"].astype("float32"))
    refused(r"page_table has shape \(2, 3\)", paged, page_table=paged["page_table"][:2])
    refused(r"pages \[P, S, K, H\]", paged, key_cache=cache[0])
    refused("new_key has shape", new_key=new[:, :1])
    refused("new_value has dtype float16", new_value=new.astype("float16"))
    refused("new_key is given with no new_value for a value_cache", new_value=None)
    refused("new_value is given without new_key", new_key=None)
    refused("rotary_base is -1", rotary_base=-1)
    refused("rotary_base is inf", rotary_base=10**400)
    refused("value_dim is 3 beside a value_cache", value_dim=3)
    latent = plain | {"value_cache": None, "new_value": None}
    refused("value_dim is None and value_cache None", latent)
    refused("value_dim is 17; expected 1 to 16", latent, value_dim=17)
    refused("rotary_base is given without a value_cache", latent, value_dim=8, rotary_base=1e4)
    refused("backend is 'tpu'", backend="tpu")
    with pytest.raises(ValueError, match="key_cache has shape"):
        jax_flash.fill_cache(cache, cache, cache[:2], cache[:2], plain["lengths"][:2])
    with pytest.raises(ValueError, match="value has shape"):
        jax_flash.fill_cache(cache, cache, cache, cache[..., :3], plain["lengths"])


def test_it_has_no_derivative():
    arrays = small("xla")
    query = arrays.pop("query")

    def loss(query):
        return jax_flash.decode_attention(query, **arrays).out.sum()

    with pytest.raises(NotImplementedError, match="differentiate flash_attention"):
        jax.grad(loss)(query)
