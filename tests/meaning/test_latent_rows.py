"""Caches of packed rows of latent attention: against float64, in programs, and what is named."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash

from ..conftest import BACKENDS
from ..devices import collectives, mesh_of
from ..latent_rows_cases import draw, unpack

EVERY = pytest.mark.parametrize("backend", [x for x in BACKENDS if x.values != ("cpu",)])
CASES: list[dict[str, Any]] = [
    {"lengths": (200, 1, 0, 130), "heads": 80, "appends": True},
    {
        "lengths": (129, 2, 66), "heads": 16, "tokens": 3, "page": 16, "appends": True,
        "odd_scales": True,
    },
    {"lengths": (150, 70), "heads": 8, "tokens": 2, "page": 3, "window": 80},
    {"lengths": (90, 170), "heads": 16, "tokens": 2, "page": 16, "chosen": 70, "appends": True},
]  # fmt: skip
attend = functools.partial(jax_flash.decode_attention, value_cache=None, value_dim=512)


@EVERY
@pytest.mark.parametrize("options", CASES, ids=lambda x: f"{x['lengths']}")
def test_case(options, backend):
    case = draw(**options)
    case.compare(case.run(backend))


def test_a_row_is_within_its_rounding_and_unpacks_as_it_should():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(64, 576)) * np.exp(4 * rng.normal(size=(64, 1)))
    rows = rows.astype(ml_dtypes.bfloat16)
    rows[0, :128] = 0
    rows[1, :128] = 448 * 2.0**-20  # its scale is 2^-20, no larger one
    rows[2, :128] = 450 * 2.0**-20
    rows[3, 130], rows[4, 260] = np.nan, np.inf
    rows[5, :128] = 400 * 2.0**-126  # by 448 it would be subnormal
    packed = np.asarray(jax_flash.pack_latent(rows))
    assert packed.shape == (64, 656)
    assert packed.dtype == np.uint8
    scales = np.ascontiguousarray(packed[:, 512:528]).view(np.float32)
    assert scales[1, 0] == 2.0**-20
    assert scales[2, 0] == 2.0**-19
    assert scales[5, 0] == 2.0**-126
    got, wide = unpack(packed), rows.astype(np.float64)
    np.testing.assert_array_equal(got, np.float64(jax_flash.unpack_latent(packed)))
    assert [np.isnan(x).nonzero()[0].tolist() for x in got[3:5]] == [[130], [260]]
    got, wide, scale = (np.delete(x, (3, 4), 0) for x in (got, wide, np.repeat(scales, 128, -1)))
    np.testing.assert_array_equal(got[:, 512:], wide[:, 512:])
    error = np.abs(got - wide)[:, :512]
    assert (error <= np.maximum(np.abs(wide[:, :512]) / 16, scale * 2.0**-10)).all()
    # Any bytes by any scale.
    row = np.zeros((3, 656), np.uint8)
    row[:, :256] = np.arange(256)
    scales = np.float32([[0.3, -7, 1, 1], [1e-30, 1e30, 1, 1], [1, 0, 1, 1]])
    row[:, 512:528] = scales.view(np.uint8)
    np.testing.assert_array_equal(np.float64(jax_flash.unpack_latent(row)), unpack(row))


@pytest.mark.parametrize("page", [None, 16])
def test_a_prompt_is_written_as_one_token_after_the_other(page):
    case = draw(lengths=(40, 33), heads=16, tokens=3, page=page, appends=True)
    arrays = dict(case.arrays)
    table = {"page_table": arrays["page_table"]} if page else {}
    filled, none = jax_flash.fill_cache(
        arrays["key_cache"], None, arrays["new_key"], None, arrays["lengths"],
        start=arrays["lengths"] - 3, **table,
    )  # fmt: skip
    assert none is None
    np.testing.assert_array_equal(filled, case.run("xla").key_cache)


def test_requests_over_pages_are_those_of_unpacked_rows():
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(12, 16, 1, 576)).astype(ml_dtypes.bfloat16)
    packed = jax_flash.pack_latent(rows)
    arrays = {
        "query": jnp.asarray(rng.normal(size=(9, 8, 576)), "bfloat16"),
        "lengths": jnp.array([70, 7, 45]),
        "page_table": jnp.array([[3, 0, 7, 11, 2], [5, -1, -1, -1, -1], [1, 4, 9, -1, -1]]),
        "query_starts": jnp.array([0, 1, 8, 9]),
    }
    new = jnp.asarray(rng.normal(size=(9, 1, 576)), "bfloat16")
    indices = jnp.asarray(rng.permutation(40)[None, :20].repeat(9, 0), "int32")
    call = functools.partial(
        jax_flash.ragged_paged_attention, value_pages=None, value_dim=512, backend="xla"
    )
    for more in ({}, {"indices": indices}):
        got = call(key_pages=packed, new_key=new, **arrays, **more)
        exact = jax_flash.unpack_latent(jax_flash.pack_latent(new))
        pages = jax_flash.unpack_latent(packed)
        expected = call(key_pages=pages, new_key=exact, **arrays, **more)
        np.testing.assert_array_equal(np.float32(got.out), np.float32(expected.out))
        np.testing.assert_array_equal(
            jax_flash.unpack_latent(got.key_pages).astype("float32"),
            np.float32(expected.key_pages),
        )
    for name, x in (("shared_pages", jnp.array([3])), ("ancestors", jnp.ones((9, 4), bool))):
        with pytest.raises(NotImplementedError, match=f"{name} is given and key_pages has packed"):
            call(key_pages=packed, **arrays, **{name: x})


@EVERY
def test_programs_write_in_place_and_members_are_a_loop(backend):
    case = draw(lengths=(40, 33), heads=16, page=16, appends=True)
    cache, rest = case.arrays["key_cache"], dict(case.arrays)
    del rest["key_cache"]

    def call(cache, rest):
        return attend(key_cache=cache, backend=backend, **rest)

    compiled = jax.jit(call, donate_argnums=0).lower(cache, rest).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= cache.nbytes
    members = jnp.stack([case.arrays["query"], 2 * case.arrays["query"]])
    got = jax.vmap(lambda q: attend(**case.arrays | {"query": q}, backend=backend))(members)
    for i, query in enumerate(members):
        own = attend(**case.arrays | {"query": query}, backend=backend)
        np.testing.assert_allclose(np.float32(got.out[i]), np.float32(own.out), atol=0.02)
        np.testing.assert_array_equal(got.key_cache[i], own.key_cache)


@pytest.mark.parametrize("explicit", [False, True])
def test_rows_and_heads_are_split_without_a_collective(explicit):
    case = draw(lengths=(40, 33, 7, 50), heads=16, appends=True)
    mesh = mesh_of((2, 4), explicit)
    specs = dict.fromkeys(case.arrays, P("data")) | {"query": P("data", None, "model")}
    placed = {
        name: jax.device_put(np.asarray(x), NamedSharding(mesh, specs[name]))
        for name, x in case.arrays.items()
    }
    with jax.set_mesh(mesh):
        call = functools.partial(attend, backend="xla")
        compiled = jax.jit(call).lower(**placed).compile()
        assert collectives(compiled) == []
        case.compare(jax.tree.map(np.asarray, compiled(**placed)))


def test_an_export_gives_the_same():
    case = draw(lengths=(40, 33), heads=16, page=16, appends=True)
    call = jax.jit(functools.partial(attend, backend="xla"))
    made = jax.export.export(call, disabled_checks=jax_flash.EXPORT_CHECKS)(**case.arrays)
    case.compare(jax.export.deserialize(made.serialize()).call(**case.arrays))


def test_wrong_arguments_are_named():
    arrays = draw(lengths=(40, 33), heads=16, appends=True).arrays
    query, cache = arrays["query"], arrays["key_cache"]

    def refused(kind, message, **changes):
        given = {"value_cache": None, "value_dim": 512} | arrays | changes
        with pytest.raises(kind, match=message):
            jax_flash.decode_attention(**given)

    refused(ValueError, r"key_cache has dtype uint8 and shape .*576\); .* 656 bytes each",
            key_cache=cache[..., :576])  # fmt: skip
    refused(ValueError, "key_cache has shape .* one kv head of packed rows",
            key_cache=jnp.concatenate([cache, cache], -2))  # fmt: skip
    refused(ValueError, "value_cache is given and key_cache has packed rows", value_cache=cache)
    refused(ValueError, "value_dim is 256 and key_cache has packed rows; expected 512",
            value_dim=256)  # fmt: skip
    refused(ValueError, "key_scale is given and key_cache has packed rows", key_scale=1.0)
    refused(TypeError, "query has dtype float32 .*; expected bfloat16 of 576",
            query=query.astype("float32"))  # fmt: skip
    refused(ValueError, "query has dtype bfloat16 and shape .*; expected bfloat16 of 576",
            query=query[..., :512])  # fmt: skip
    refused(ValueError, r"new_key has shape .*; expected \(2, 1, 1, 576\)",
            new_key=arrays["new_key"][..., :512])  # fmt: skip
    refused(TypeError, "new_key has dtype uint8; expected query's bfloat16",
            new_key=arrays["new_key"].astype("uint8"))  # fmt: skip
    refused(ValueError, r"new_key .*656\); expected .*576\), .* packed as they are written",
            new_key=jax_flash.pack_latent(arrays["new_key"]))  # fmt: skip
    refused(ValueError, "rotary_base is given without a value_cache", rotary_base=1e4)
    refused(NotImplementedError, "the CPU kernels have no packed rows", backend="cpu")
    with pytest.raises(TypeError, match="rows has dtype int32"):
        jax_flash.pack_latent(jnp.ones(576, int))
    with pytest.raises(ValueError, match=r"rows has shape \(2, 512\); expected \[\*B, 576\]"):
        jax_flash.pack_latent(jnp.ones((2, 512)))
    with pytest.raises(ValueError, match=r"expected uint8 \[\*B, 656\]"):
        jax_flash.unpack_latent(jnp.ones((2, 5), "uint8"))
    with pytest.raises(TypeError, match="packed has dtype bfloat16"):
        jax_flash.unpack_latent(jnp.ones(656, "bfloat16"))
