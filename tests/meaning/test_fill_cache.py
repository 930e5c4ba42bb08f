"""rotate and fill_cache, by which keys come into a cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_flash

from ..decode_cases import equal, small
from ..devices import collectives, mesh_of
from ..numpy_oracle import rotated


@pytest.mark.parametrize("positions", [None, [[3, 0, 70000]], [[1, 5, 9], [0, 0, 2]]])
def test_rotate_turns_pairs_by_their_positions(positions):
    x = np.random.default_rng(0).standard_normal((2, 3, 2, 8), np.float32)
    where = np.arange(3)[None] if positions is None else np.asarray(positions)
    exact = rotated(x.astype(np.float64), where, 100.0)
    out = jax_flash.rotate(x, 100.0, None if positions is None else where)
    # An angle of 70000 is rounded to 2^-8 in float32.
    np.testing.assert_allclose(out, exact, atol=2.0**-7)
    near = np.broadcast_to(where < 100, (2, 3))
    np.testing.assert_allclose(out[near], exact[near], 1e-5)
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
