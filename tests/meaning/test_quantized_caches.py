"""Caches of float8_e4m3fn and int8 with scales: against float64, in programs, and what is named."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash
from jax_flash import paged_tpu

from ..conftest import BACKENDS
from ..decode_cases import alike, decode, equal, small
from ..devices import collectives, mesh_of
from ..quantized_cases import CASES, FLOAT8, INT8, check, quantize, quantize_batch
from ..ragged_cases import BATCHES

EVERY = pytest.mark.parametrize("backend", BACKENDS)


def arrays_of(backend: str = "xla", scales: tuple[int, ...] | None = None, **options) -> dict:
    """Those of `small` with caches of float8_e4m3fn, and scales of a shape (None: `[K]`)."""
    arrays = small(backend, **options)
    for i, name in enumerate(("key", "value")):
        cache = arrays[f"{name}_cache"]
        shape = cache.shape[-2:-1] if scales is None else scales
        rng = np.random.default_rng(i)
        arrays[f"{name}_scale"] = jnp.asarray(rng.uniform(0.01, 0.02, shape), "float32")
        arrays[f"{name}_cache"] = (64 * cache.astype("float32")).astype(FLOAT8)
    return arrays


@EVERY
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].name.replace(" ", "-"))
def test_case(case, backend):
    case, dtype, varied = case
    arguments = quantize(case, dtype, varied=varied)
    check(arguments, arguments.run(backend))


@EVERY
@pytest.mark.parametrize(("batch", "varied"), [(0, True), (2, False), (4, True)])
def test_batch(batch, varied, backend):
    batch = dataclasses.replace(BATCHES[batch], rotary=None, dtype="bfloat16")
    drawn = quantize_batch(batch, varied=varied)
    drawn.compare(drawn.run(backend))


@pytest.mark.parametrize("dtype", [FLOAT8, INT8])
def test_every_number_is_rounded_to_nearest_even_and_saturated(dtype):
    """Those halfway between two, and their neighbours in float32."""
    if dtype == FLOAT8:
        numbers = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    else:
        numbers = np.arange(128, dtype=np.float32)
    middle = (numbers[1:] + numbers[:-1]) / 2
    near = [np.nextafter(middle, np.float32(x)) for x in (0, 1e9)]
    x = np.concatenate([numbers, middle, *near, [465, 1e30, np.inf, np.nan]])
    x = np.concatenate([x, -x]).astype(np.float32)
    cache = jnp.zeros((1, 1, 1, x.size), dtype)
    filled, _ = jax_flash.fill_cache(
        cache, cache, x.reshape(1, 1, 1, -1), jnp.zeros(cache.shape, "bfloat16"), jnp.array([1]),
        key_scale=1.0, value_scale=1.0,
    )  # fmt: skip
    if dtype == FLOAT8:
        expected = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    else:
        expected = np.nan_to_num(np.clip(np.rint(x), -127, 127)).astype(np.int8)
    got = np.asarray(filled).ravel()
    np.testing.assert_array_equal(got.astype("float32"), expected.astype("float32"))


@EVERY
def test_new_numbers_below_the_normal_range_of_float16(backend):
    """All of them: threads of XLA's take float32 below its normal range for 0."""
    x = np.arange(1024, dtype=np.uint16).view(np.float16).reshape(1, 1, 8, 128)
    cache, scale = jnp.zeros(x.shape, FLOAT8), 2.0**-20
    got = jax_flash.decode_attention(
        x, cache, cache, jnp.array([1]), new_key=x, new_value=x,
        key_scale=scale, value_scale=scale, backend=backend,
    )  # fmt: skip
    expected = (x.astype(np.float32) / scale).astype(FLOAT8)
    for found in (got.key_cache, got.value_cache):
        np.testing.assert_array_equal(found.astype("float32"), expected.astype("float32"))


@pytest.mark.parametrize("pages", [None, 16])
def test_a_prompt_is_written_as_one_token_after_the_other(pages):
    arrays = arrays_of(pages=pages, rows=2)
    table = arrays.get("page_table")
    scales = {name: arrays[name] for name in ("key_scale", "value_scale")}
    prompt = 3 * jax.random.normal(jax.random.key(0), (2, 2, 20, 2, 16))
    lengths, caches = jnp.array([20, 7]), (arrays["key_cache"], arrays["value_cache"])
    filled = jax_flash.fill_cache(*caches, *prompt, lengths, page_table=table, **scales)
    for i in range(20):
        new = prompt[:, :, i : i + 1]
        at = jnp.where(i < lengths, i + 1, 0)
        step = {"new_key": new[0], "new_value": new[1], "lengths": at} | scales
        step |= {"query": new[0], "key_cache": caches[0], "value_cache": caches[1]}
        got = decode({"backend": "xla"}, step | ({} if table is None else {"page_table": table}))
        caches = got.key_cache, got.value_cache
    equal(filled, caches)


@EVERY
@pytest.mark.parametrize("pages", [None, 16])
def test_vmap_is_a_loop(pages, backend):
    options = {"backend": backend}
    whole = (10, 2) if pages else (3, 2)
    members = [arrays_of(backend, whole, pages=pages, seed=seed) for seed in range(2)]
    members[1]["key_scale"] = 2 * members[1]["key_scale"]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *members)
    every = set(stacked)
    reads = {name for name in stacked if not name.startswith("new")}
    for names, mapped in (
        (every, every),
        (every, {"query", "new_value"}),
        (reads, {"query", "key_scale"}),  # each a copy of the cache
        (reads, {"query", "key_cache", "value_cache"}),
    ):
        axes = {name: 0 if name in mapped else None for name in names}
        mixed = {name: stacked[name] if name in mapped else stacked[name][0] for name in names}
        got = jax.vmap(lambda x: decode(options, x), in_axes=(axes,))(mixed)
        for i in range(2):
            own = {name: x[i] if name in mapped else x for name, x in mixed.items()}
            expected = decode(options, own)
            alike(got.out[i], expected.out, backend, 2e-6)
            if "new_key" in names:
                equal(got.key_cache[i], expected.key_cache)


@EVERY
@pytest.mark.parametrize("scales", [None, (25, 8)])
def test_pages_are_donated_and_written_in_place(scales, backend):
    arrays = arrays_of(backend, scales, pages=16, length=128, K=8, N=8)
    caches = {name: arrays.pop(name) for name in ("key_cache", "value_cache")}

    def call(caches, rest):
        return jax_flash.decode_attention(**caches, **rest, rotary_base=1e4, backend=backend)

    compiled = jax.jit(call, donate_argnums=0).lower(caches, arrays).compile()
    text, plan = compiled.as_text(), compiled.memory_analysis()
    assert text.count("may-alias") + text.count("must-alias") >= 2
    assert plan.alias_size_in_bytes >= 2 * caches["key_cache"].nbytes


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("pages", [None, 16])
def test_heads_are_split_without_a_collective(pages, explicit):
    shape = (13, 8) if pages else (4, 8)
    arrays = arrays_of("xla", shape, pages=pages, rows=4, N=16, K=8)
    mesh, batch = mesh_of((2, 4), explicit), None if pages else "data"
    heads, cache = P(batch, None, "model"), P(batch, None, "model")
    specs = {"lengths": P(batch), "page_table": P(batch)}
    specs |= dict.fromkeys(("query", "new_key", "new_value"), heads)
    specs |= dict.fromkeys(("key_cache", "value_cache"), cache)
    specs |= {name: P(batch, "model") for name in ("key_scale", "value_scale")}
    placed = {
        name: jax.device_put(np.asarray(x), NamedSharding(mesh, specs[name]))
        for name, x in arrays.items()
    }
    expected = decode({"backend": "xla"}, arrays)
    call = functools.partial(jax_flash.decode_attention, backend="xla")
    with jax.set_mesh(mesh):
        compiled = jax.jit(call).lower(**placed).compile()
        assert collectives(compiled) == []
        got = compiled(**placed)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(
        x.astype("float32"), y.astype("float32"), atol=2e-6), got, expected)  # fmt: skip
    mapped = jax.shard_map(
        lambda arrays: decode({"backend": "xla"}, arrays),
        mesh=mesh,
        in_specs=({name: specs[name] for name in arrays},),
        out_specs=jax_flash.Decoded(heads, heads, cache, cache),
    )
    equal(jax.jit(mapped)(placed).key_cache, expected.key_cache)


@EVERY
def test_an_export_gives_the_same(backend):
    arrays = arrays_of(backend, pages=16)
    call = jax.jit(functools.partial(jax_flash.decode_attention, backend=backend))
    made = jax.export.export(call, disabled_checks=jax_flash.EXPORT_CHECKS)(**arrays)
    loaded = jax.export.deserialize(made.serialize())
    equal(loaded.call(**arrays), decode({"backend": backend}, arrays))


@EVERY
def test_interleaved_pages(backend):
    """As JAX's kernel for TPUs has them; its scales are numbers."""
    rng = np.random.default_rng(0)
    dtype = "bfloat16" if backend == "cuda" else "float32"
    q = jnp.asarray(rng.standard_normal((9, 8, 16)), dtype)
    pages = jnp.asarray(rng.integers(-100, 100, (7, 8, 4, 16)), FLOAT8)
    requests = {
        "kv_lens": jnp.array([20, 9]),
        "page_indices": jnp.array([[4, 1, 6], [0, 3, 0]]),
        "cu_q_lens": jnp.array([0, 1, 8]),
        "num_seqs": jnp.array([2]),
    }
    options = {"sm_scale": 0.25, "k_scale": 0.02, "v_scale": 0.5, "backend": backend}
    got = paged_tpu.ragged_paged_attention(q, pages, **requests, **options)
    wide = paged_tpu.ragged_paged_attention(q, pages.astype(dtype), **requests, **options)
    limit = 2 * float(jnp.finfo(dtype).eps) * 50
    np.testing.assert_allclose(got.astype("float32"), wide.astype("float32"), 0, limit)


@EVERY
def test_a_page_without_a_number_is_nan_in_the_queries_that_see_it_alone(backend):
    arrays = arrays_of(backend, (10, 2), pages=16) | {"lengths": jnp.array([30, 33, 48])}
    whole = decode({"backend": backend}, arrays)
    for name, table in (("key_scale", 1), ("value_scale", 1)):
        page = arrays["page_table"][table, 2]
        got = decode({"backend": backend}, arrays | {name: arrays[name].at[page, 1].set(jnp.nan)})
        seeing = np.zeros(got.out.shape, bool)
        seeing[1, 1, 2:] = True
        np.testing.assert_array_equal(np.isnan(got.out.astype("float32")), seeing)
        alike(got.out[0::2], whole.out[0::2], backend)


def test_wrong_arguments_are_named():
    plain, eight = small("xla"), arrays_of()
    paged = arrays_of(pages=16)

    def refused(message, arrays=eight, **changes):
        with pytest.raises((TypeError, ValueError), match=message):
            jax_flash.decode_attention(**arrays | changes)

    scale, cache = eight["key_scale"], eight["key_cache"]
    refused(r"key_cache has dtype float8_e4m3fn and key_scale is None; .*\[K\] = \(2,\) or "
            r"\[\*B, K\] = \(3, 2\)", key_scale=None)  # fmt: skip
    refused("value_cache has dtype float8_e4m3fn and value_scale is None", value_scale=None)
    refused(r"key_scale has shape \(3,\); .*\[P, K\] = \(10, 2\)", paged, key_scale=jnp.ones(3))
    refused("key_scale has dtype int32", key_scale=jnp.ones(2, int))
    refused("key_scale is given and key_cache is of float32", plain, key_scale=scale)
    refused("value_scale is given and value_cache is None", value_cache=None, value_dim=3)
    refused("key_cache has dtype float8_e5m2 .*with scales float8_e4m3fn or int8",
            key_cache=cache.astype("float8_e5m2"))  # fmt: skip
    refused("value_cache has shape .* and dtype int8", value_cache=cache.astype("int8"))
    refused("query has dtype float8_e4m3fn", query=eight["query"].astype(FLOAT8))
    refused("new_key has dtype float8_e4m3fn; expected query's float32",
            new_key=eight["new_key"].astype(FLOAT8))  # fmt: skip
    with pytest.raises(TypeError, match="key has dtype int8; expected one of float32"):
        jax_flash.fill_cache(cache, cache, cache.astype("int8"), cache.astype("int8"),
                             eight["lengths"], key_scale=1.0, value_scale=1.0)  # fmt: skip


def test_a_backend_that_is_not_named_runs_it():
    arrays = arrays_of()
    got, expected = (decode({"backend": backend}, arrays) for backend in (None, "xla"))
    equal(got[2:], expected[2:])
    alike(got.out, expected.out, "xla", 2e-6)
