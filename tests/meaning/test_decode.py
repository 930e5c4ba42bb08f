"""decode_attention and fill_cache against float64, in every layout; what they may not touch."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import _backends
from jax_flash._gpu import decode as tilings

from ..decode_cases import (
    CASES,
    RINGS,
    Tiled,
    check_newest_values,
    compare,
    decode,
    fit,
    rotated,
)
from ..hopper import NEEDS_HOPPER
from ..processes import run_two_processes
from .test_sharding import collectives, mesh_of

P = jax.sharding.PartitionSpec


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
    turned = [jnp.asarray(np.stack([rotated(np.asarray(x[b], np.float64), positions, 1e4)
              for b in range(rows)]), dtype) for x in (query, key)]  # fmt: skip
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


TWO_PROCESSES = """
import sys
import jax
address, rank = sys.argv[1], int(sys.argv[2])
jax.distributed.initialize(address, 2, rank)
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from tests.meaning import test_decode as t
assert (jax.process_count(), jax.local_device_count()) == (2, 2)
mesh = jax.make_mesh((2, 2), ("data", "model"))
arrays = t.small("cpu", rows=4, N=8, K=2)
specs = t.specs_of(arrays, "data", "model")
def place(x, spec):
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda i: x[i])
placed = {name: place(x, specs[name]) for name, x in arrays.items()}
got = t.decode({"backend": "cpu"}, placed)
np.savez(f"rank{rank}.npz", *(np.asarray(x.data) for x in got.out.addressable_shards))
np.savez(f"keys{rank}.npz", *(np.asarray(x.data) for x in got.key_cache.addressable_shards))
"""


def test_two_processes_decode_as_one_does(tmp_path):
    """Rows are split over the processes, heads over each one's devices."""
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    run_two_processes(TWO_PROCESSES, tmp_path, **flags)
    expected = decode({"backend": "cpu"}, small("cpu", rows=4, N=8, K=2))
    for name, whole, heads in (("rank", expected.out, 4), ("keys", expected.key_cache, 1)):
        for rank in range(2):
            with np.load(tmp_path / f"{name}{rank}.npz") as shards:
                for i, x in enumerate(shards.values()):
                    own = whole[2 * rank : 2 * rank + 2, :, heads * i : heads * (i + 1)]
                    np.testing.assert_allclose(x, own, atol=2e-6)


def copies(text: str, shape: str) -> list[str]:
    """The instructions of a compiled program that copy an array of the cache's shape."""
    return re.findall(rf"= \(?\w+\[{shape}\].*? (copy(?:-start)?)\(", text)


@pytest.mark.parametrize("pages", [None, 16])
def test_caches_are_donated_and_written_in_place(pages, backend):
    arrays = small(backend, pages=pages, length=4096)
    cache = arrays["key_cache"]
    names, results = ("key_cache", "value_cache"), {}

    def step(caches, rest):
        got = jax_flash.decode_attention(
            **rest | dict(zip(names, caches, strict=True)), backend=backend
        )
        return (got.key_cache, got.value_cache), got.out

    def at(i):
        return rest | {"lengths": rest["lengths"] - 5 + i}

    def scan(caches):
        return jax.lax.scan(lambda caches, i: step(caches, at(i)), caches, jnp.arange(5))[0]

    def while_loop(caches):
        def body(carry):
            i, caches = carry
            return i + 1, step(caches, at(i))[0]

        return jax.lax.while_loop(lambda carry: carry[0] < 5, body, (0, caches))[1]

    rest = {name: x for name, x in arrays.items() if name not in names}
    caches = tuple(arrays[name] for name in names)
    for function in (lambda caches: step(caches, rest), scan, while_loop):
        compiled = jax.jit(function, donate_argnums=0).lower(caches).compile()
        text = compiled.as_text()
        assert text.count("may-alias") + text.count("must-alias") >= 2
        plan = compiled.memory_analysis()
        assert plan.alias_size_in_bytes >= 2 * cache.nbytes
        assert plan.temp_size_in_bytes < cache.nbytes
        assert copies(text, ",".join(map(str, cache.shape))) == []
        results[function] = compiled(tuple(map(jnp.copy, caches)))
    for i in range(5):
        got = decode({"backend": backend}, at(i) | dict(zip(names, caches, strict=True)))
        caches = got.key_cache, got.value_cache
    equal(results[scan], caches)
    equal(results[while_loop], caches)


def test_temporaries_do_not_grow_with_the_cache(backend):
    """At most one block of the cache is anywhere else, paged or not."""
    # Before jax 0.11 XLA slices bfloat16 on CPUs in float32, all of the cache ahead of the loop.
    widened = backend == "xla" and jax.__version_info__ < (0, 11)
    dtype = jnp.dtype("float32" if widened else "bfloat16")

    def planned(length, page):
        cache = (1, length, 2, 64) if page is None else (length // page, page, 2, 64)
        shapes = {
            "query": (1, 1, 8, 64), "key_cache": cache, "value_cache": cache, "lengths": (1,),
            "new_key": (1, 1, 2, 64), "new_value": (1, 1, 2, 64),
        }  # fmt: skip
        if page is not None:
            shapes["page_table"] = (1, length // page)
        integers = ("lengths", "page_table")
        x = {
            name: jax.ShapeDtypeStruct(shape, "int32" if name in integers else dtype)
            for name, shape in shapes.items()
        }

        def call(caches, rest):
            return jax_flash.decode_attention(**rest, **caches, backend=backend)

        caches = {name: x.pop(name) for name in ("key_cache", "value_cache")}
        program = jax.jit(call, donate_argnums=0).lower(caches, x).compile()
        return program.memory_analysis().temp_size_in_bytes

    for page in (None, 16):
        short, long = planned(4096, page), planned(32768, page)
        # The page table and what is computed from it; of kernels, sums of as many parts.
        assert long <= short + 32768 * 8
        assert long < 32768 * 2 * 64 * dtype.itemsize / 2


def specs_of(arrays, batch, heads, pool=None) -> dict:
    """How a call's arrays are split: its rows over `batch`, heads over `heads`, pages over `pool`.

    Without a page table a cache is split as its rows are.
    """
    pool = pool if "page_table" in arrays else batch
    specs = {"lengths": P(batch), "page_table": P(batch), "sinks": P(heads)}
    for name in ("key_cache", "value_cache"):
        specs[name] = P(pool, None, heads if arrays[name].shape[-2] > 1 else None)
    for name in ("query", "new_key", "new_value"):
        specs[name] = P(batch, None, heads)
    if arrays["key_cache"].shape[-2] == 1:
        specs["new_key"] = specs["new_value"] = P(batch)
    return {name: specs[name] for name in arrays}


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize(
    ("shape", "batch", "options"),
    [
        ((4, 2), "data", {}),
        ((1, 8), "data", {"K": 1}),
        ((1, 8), None, {"pages": 16, "K": 8}),
    ],
    ids=["batch-and-heads", "one-kv-head", "pages"],
)
def test_sharded_without_a_collective(shape, batch, options, explicit, host_backend):
    arrays = small(host_backend, rows=4, N=16, **options) | {"sinks": jnp.arange(16.0)}
    mesh = mesh_of(shape, explicit)
    specs = specs_of(arrays, batch, "model")
    placed = {  # by way of NumPy: else what is replicated lies where the array does, and is donated
        name: jax.device_put(np.asarray(x), jax.sharding.NamedSharding(mesh, specs[name]))
        for name, x in arrays.items()
    }

    def call(caches, rest):
        return jax_flash.decode_attention(
            **caches, **rest, local_window_size=20, rotary_base=1e4, backend=host_backend
        )

    caches = {name: placed.pop(name) for name in ("key_cache", "value_cache")}
    cache = caches["key_cache"]
    with jax.set_mesh(mesh):
        compiled = jax.jit(call, donate_argnums=0).lower(caches, placed).compile()
        assert collectives(compiled) == []
        shard = cache.addressable_shards[0].data
        assert compiled.memory_analysis().alias_size_in_bytes >= 2 * shard.nbytes
        assert copies(compiled.as_text(), ",".join(map(str, shard.shape))) == []
        got = compiled(caches, placed)
    assert got.key_cache.sharding.is_equivalent_to(cache.sharding, cache.ndim)
    options = {"local_window_size": 20, "rotary_base": 1e4, "backend": host_backend}
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=2e-6), got, decode(options, arrays)
    )


def test_pages_that_rows_append_to_are_written_alike_on_every_device():
    """Rows split over devices, the pool not: what one device writes, all need."""
    arrays = small("xla", rows=4, pages=16)
    mesh = mesh_of((4, 2))
    specs = specs_of(arrays, "data", "model")
    placed = {
        name: jax.device_put(x, jax.sharding.NamedSharding(mesh, specs[name]))
        for name, x in arrays.items()
    }
    expected = decode({"backend": "xla"}, arrays)
    got = decode({"backend": "xla"}, placed)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-6), got, expected)
    for shard in got.key_cache.addressable_shards:
        equal(shard.data, expected.key_cache[shard.index])


@pytest.mark.parametrize("pages", [None, 16])
def test_shard_map_gives_each_device_its_own_pool(pages, host_backend):
    members = [small(host_backend, rows=2, pages=pages, seed=seed) for seed in range(4)]
    arrays = {name: jnp.concatenate([m[name] for m in members]) for name in members[0]}
    specs = specs_of(arrays, "data", "model", pool="data")
    mesh = mesh_of((4, 2))

    def call(arrays):
        return decode({"backend": host_backend}, arrays)

    heads, cache = P("data", None, "model"), P("data", None, "model")
    run = jax.jit(
        jax.shard_map(
            call,
            mesh=mesh,
            in_specs=(specs,),
            out_specs=jax_flash.Decoded(heads, heads, cache, cache),
        )
    )
    assert collectives(run.lower(arrays).compile()) == []
    expected = [decode({"backend": host_backend}, member) for member in members]
    jax.tree.map(
        lambda x, *y: np.testing.assert_allclose(x, jnp.concatenate(y), atol=2e-6),
        run(arrays),
        *expected,
    )


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


def test_programs_for_a_gpu_say_why_they_run_in_xla():
    _backends.warn_once.cache_clear()
    wide = {
        name: x if x.ndim < 4 else jnp.tile(x, 17) for name, x in small("xla", pages=16).items()
    }
    lowered = jax.jit(jax_flash.decode_attention).trace(**wide)
    with pytest.warns(RuntimeWarning, match="without its CUDA kernels: .*up to 256 in float32"):
        text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.while" in text
    assert "jax_flash_" not in text


@pytest.mark.parametrize("pages", [None, 16])
def test_programs_for_a_gpu_are_one_call_that_writes_in_place(pages):
    arrays = small("cuda", pages=pages)
    caches = {name: arrays.pop(name) for name in ("key_cache", "value_cache")}

    def call(caches, rest):
        return jax_flash.decode_attention(**caches, **rest, rotary_base=1e4)

    text = jax.jit(call, donate_argnums=0).trace(caches, arrays).lower(lowering_platforms=("cuda",))
    (custom_call,) = re.findall(r"custom_call @jax_flash_cuda_decode.*", text.as_text())
    assert custom_call.count("#stablehlo.output_operand_alias") == 2
    assert "cosine" not in text.as_text()


def test_an_export_gives_the_same(backend):
    arrays = small(backend, pages=16)
    call = jax.jit(functools.partial(jax_flash.decode_attention, backend=backend))
    made = jax.export.export(call, disabled_checks=jax_flash.EXPORT_CHECKS)(**arrays)
    loaded = jax.export.deserialize(made.serialize())
    equal(loaded.call(**arrays), decode({"backend": backend}, arrays))


def test_an_export_takes_any_number_of_rows_and_tokens(backend):
    arrays = small(backend, rows=2, T=1, N=16, K=1)
    rows, count = jax.export.symbolic_shape("b, t", constraints=["t >= 1", "t <= 64"])
    shapes = {
        name: jax.ShapeDtypeStruct(
            (rows, count, *x.shape[2:]) if name in ("query", "new_key", "new_value")
            else (rows, *x.shape[1:]),
            x.dtype,
        )
        for name, x in arrays.items()
    }  # fmt: skip
    call = jax.jit(functools.partial(jax_flash.decode_attention, backend=backend))
    made = jax.export.export(call, disabled_checks=jax_flash.EXPORT_CHECKS)(**shapes)
    for rows, count in ((2, 1), (3, 40)):
        arrays = small(backend, rows=rows, T=count, N=16, K=1)
        alike(made.call(**arrays), decode({"backend": backend}, arrays), backend, atol=2e-6)


@pytest.mark.parametrize("positions", [None, [[3, 0, 70000]], [[1, 5, 9], [0, 0, 2]]])
def test_rotate_turns_pairs_by_their_positions(positions):
    x = np.random.default_rng(0).standard_normal((2, 3, 2, 8), np.float32)
    where = np.arange(3)[None] if positions is None else np.asarray(positions)
    angles = where[..., None, None] * 100.0 ** (-np.arange(4) / 4)
    exact = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * angles)
    out = jax_flash.rotate(x, 100.0, None if positions is None else where)
    # An angle of 70000 is rounded to 2^-8 in float32.
    np.testing.assert_allclose(out[..., :4] + 1j * out[..., 4:], exact, atol=2.0**-7)
    near = np.broadcast_to(where < 100, (2, 3))
    np.testing.assert_allclose(out[near], np.concatenate([exact.real, exact.imag], -1)[near], 1e-5)
    half = jax_flash.rotate(jnp.asarray(x, jnp.bfloat16), 100.0, where)
    assert half.dtype == jnp.bfloat16


def test_rotate_names_wrong_arguments():
    x = jnp.ones((2, 3, 2, 8))
    for message, *arguments in (
        (r"positions has shape \(3, 2\); expected .*\(2, 3\)", x, 1e4, jnp.zeros((3, 2), int)),
        ("positions has dtype float32", x, 1e4, jnp.zeros((2, 3))),
        ("rotary_base is 0", x, 0),
        ("rotary_base is None; expected a number above 0$", x, None),
        ("head dim 7; expected an even one", x[..., :7], 1e4),
        (r"x has shape \(2, 8\)", x[0, 0], 1e4),
        ("x has dtype int32", x.astype(int), 1e4),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            jax_flash.rotate(*arguments)


@pytest.mark.parametrize("pages", [None, 16])
@pytest.mark.parametrize("start", [None, [0, 3, 40]])
def test_fill_cache_writes_what_has_a_place(pages, start):
    arrays = small("xla", T=20, pages=pages)
    keys, values = arrays["new_key"], arrays["new_value"]
    lengths = jnp.array([20, 7, 60] if start is None else [0, 22, 60], jnp.int32)
    table = arrays.get("page_table")
    first = None if start is None else jnp.array(start, jnp.int32)
    caches = arrays["key_cache"], arrays["value_cache"]
    compiled = (
        jax.jit(
            lambda caches, *x: jax_flash.fill_cache(*caches, *x, start=first, page_table=table),
            donate_argnums=0,
        )
        .lower(caches, keys, values, lengths)
        .compile()
    )
    assert compiled.memory_analysis().alias_size_in_bytes == 2 * caches[0].nbytes
    got = compiled(tuple(map(jnp.copy, caches)), keys, values, lengths)
    for x, cache, new in zip(got, caches, (keys, values), strict=True):
        expected = np.array(cache)
        for b in range(3):
            begin = 0 if start is None else start[b]
            for t in range(20):
                p = begin + t
                if p < min(int(lengths[b]), 48):
                    page = b if table is None else int(table[b, p // 16])
                    expected[page, p if table is None else p % 16] = new[b, t]
        equal(x, expected)


def test_fill_cache_is_sharded_without_a_collective():
    arrays = small("xla", T=20, rows=4)
    sharding = jax.sharding.NamedSharding(mesh_of((4, 2)), P("data", None, "model"))
    caches, new = (
        [jax.device_put(arrays[name], sharding) for name in names]
        for names in (("key_cache", "value_cache"), ("new_key", "new_value"))
    )
    fill = jax.jit(lambda caches, new: jax_flash.fill_cache(*caches, *new, arrays["lengths"]))
    assert collectives(fill.lower(caches, new).compile()) == []
    equal(fill(caches, new)[0].sharding, sharding)
