"""shared_pages changes what is read, and nothing of what is computed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash
from jax_flash import _gpu
from jax_flash._ops import shared as op

from ..devices import mesh_of
from ..ragged_cases import run

pytestmark = pytest.mark.usefixtures("few_are_shared")

PAGE, COLUMNS, TOKENS = 4, 6, 20
# The first five of six requests are live. The first two pages are those of 0, 1, 3 and 4; 4 has but
# the first of them behind it, and computes the second.
COUNTS, LENGTHS = (1, 3, 5, 1, 4), (9, 20, 12, 11, 8)
SHARED = jnp.array([7, 3, -1, 9])


def draw(
    dtype="float32", N=4, K=2, H=16, latent=False, new=True, seed=0, counts=COUNTS, tokens=TOKENS
) -> dict:
    """What no token may see is NaN, in pages and among the tokens."""
    rng = np.random.default_rng(seed)
    table = rng.permutation(np.delete(np.arange(40), [3, 7]))[: 6 * COLUMNS].reshape(6, COLUMNS)
    table[[0, 1, 3, 4], 0], table[[0, 1, 3, 4], 1] = 7, 3
    ahead = 2 if tokens > len(table) else 1  # tokens of none
    starts = np.concatenate([[ahead], ahead + np.cumsum(counts), [-5]])
    pages = np.full((2, 40, PAGE, K, H), np.nan)
    for b, length in enumerate(LENGTHS):
        for p in range(length - (counts[b] if new else 0)):
            page = (slice(None), table[b, p // PAGE], p % PAGE)
            if np.isnan(pages[page]).all():
                pages[page] = rng.standard_normal((2, K, H))
        table[b, -(-length // PAGE) :] = -1
    drawn = np.full((3, tokens, N, H), np.nan)
    drawn[:, ahead : starts[5]] = rng.standard_normal((3, starts[5] - ahead, N, H))
    arrays = {
        "query": drawn[0],
        "key_pages": pages[0],
        "value_pages": None if latent else pages[1],
        "new_key": drawn[1, :, :K] if new else None,
        "new_value": drawn[2, :, :K] if new and not latent else None,
    }
    arrays = {name: None if x is None else jnp.asarray(x, dtype) for name, x in arrays.items()}
    sizes = {"lengths": [*LENGTHS, 2**31 - 1], "page_table": table, "query_starts": starts}
    return arrays | {name: jnp.asarray(x) for name, x in sizes.items()} | {"rows": jnp.int32(5)}


def assert_same(got, expected, atol):
    for x, y in zip(got[:2], expected[:2], strict=True):
        x, y = (np.asarray(z, np.float32) for z in (x, y))
        np.testing.assert_allclose(x, y, rtol=0, atol=atol)
    assert not np.isnan(got.out).any()
    for x, y in zip(jax.tree.leaves(got[2:]), jax.tree.leaves(expected[2:]), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


# A batch that only decodes: one flash_common has the pages in common and what is behind them.
ROWS = {"N": 8, "K": 1, "H": 72, "counts": (1, 1, 1, 0, 1), "tokens": 6}
CASES = {
    "rows, new keys": (draw(**ROWS), {"rotary_base": 100.0}, 2e-6),
    "rows, sinks": (draw(**ROWS, new=False) | {"sinks": jnp.arange(-2.0, 6.0)}, {}, 2e-6),
    "new keys, a rotary base": (draw(), {"rotary_base": 100.0}, 2e-6),
    "sinks and a softcap": (
        draw(N=6, K=1, H=8, new=False) | {"sinks": jnp.arange(-2.0, 4.0)},
        {"softcap": 2.0, "scale": 0.7},
        2e-6,
    ),
    "latent, in bfloat16": (draw("bfloat16", K=1, H=40, latent=True), {"value_dim": 32}, 0.04),
}


@pytest.mark.parametrize("name", CASES)
def test_it_changes_nothing(name, backend):
    arrays, options, atol = CASES[name]
    options = options | {"precision": "highest", "backend": backend}
    expected = run(arrays, **options)
    shared = arrays | {"shared_pages": SHARED}
    assert_same(run(shared, **options), expected, atol)
    text = str(jax.make_jaxpr(lambda x: run(x, **options))(shared))
    assert ("tails=True" in text) == name.startswith("rows")


def test_in_eight_bits():
    arrays = draw()
    for name in ("key_pages", "value_pages"):
        arrays[name] = jnp.nan_to_num(arrays[name]).astype(jnp.float8_e4m3fn)
    arrays |= {"key_scale": jnp.linspace(0.5, 2.0, 80).reshape(40, 2), "value_scale": 0.3}
    assert_same(run(arrays | {"shared_pages": SHARED}), run(arrays), 2e-6)


def test_who_reads_them_is_found_in_the_table():
    """One program, whatever they are: none, other pages, more than there are, all of a request."""
    arrays = draw()
    expected = run(arrays, backend="cpu")
    for shared in (
        [-1, -1],
        [3, 7],
        [7, 5],
        [7, 40],
        [40, 7],
        [7, -1],
        arrays["page_table"][1, :2],
    ):
        got = run(arrays | {"shared_pages": jnp.asarray(shared)}, backend="cpu")
        assert_same(got, expected, 2e-6)
    for rows in (0, 1, 4):
        some = arrays | {"rows": jnp.int32(rows)}
        got = run(some | {"shared_pages": SHARED}, backend="cpu")
        assert_same(got, run(some, backend="cpu"), 2e-6)


@pytest.mark.parametrize("at", ["length", "page", "shared page"])
def test_a_wrong_request_is_nan(at):
    arrays, shared = draw(), SHARED
    arrays = {name: None if x is None else jnp.nan_to_num(x) for name, x in arrays.items()}
    whole = run(arrays, backend="cpu")
    if at == "length":
        arrays["lengths"] = arrays["lengths"].at[1].set(COLUMNS * PAGE + 1)
    elif at == "page":
        arrays["page_table"] = arrays["page_table"].at[1, 4].set(40)
    else:
        arrays["page_table"] = arrays["page_table"].at[1, 1].set(-1)
        shared = jnp.array([7, -1])
    got = run(arrays | {"shared_pages": shared}, backend="cpu")
    own = slice(3, 6)
    assert np.isnan(got.out[own]).all()
    assert np.isnan(got.lse[own]).all()
    rest = np.delete(np.arange(TOKENS), own)
    np.testing.assert_allclose(got.out[rest], whole.out[rest], rtol=0, atol=2e-6)
    pages = arrays["page_table"][1, 3:5]
    np.testing.assert_array_equal(got.key_pages[pages[:1]], arrays["key_pages"][pages[:1]])


def test_vmap_and_heads_split_over_a_mesh():
    arrays = {name: x for name, x in draw(K=4, N=8).items() if x is not None}
    arrays["shared_pages"] = SHARED
    arrays["ancestors"] = jnp.zeros((TOKENS, 4), bool).at[4, 0].set(True)  # a tree of the second
    expected = run(arrays)
    stacked = {name: jnp.stack([x, x]) for name, x in arrays.items()}
    got = jax.vmap(lambda x: jax_flash.ragged_paged_attention(**x))(stacked)
    assert_same(jax.tree.map(lambda x: x[1], got), expected, 2e-6)
    if len(jax.devices()) < 4:
        pytest.skip("needs 4 devices")
    mesh = mesh_of((1, 4))
    split = dict.fromkeys(("query", "new_key", "new_value"), P(None, "model"))
    split |= dict.fromkeys(("key_pages", "value_pages"), P(None, None, "model"))
    placed = {
        name: jax.device_put(x, NamedSharding(mesh, split.get(name, P())))
        for name, x in arrays.items()
    }
    got = run(placed)
    assert_same(got, expected, 2e-6)
    assert got.out.sharding.spec == P(None, "model")


def test_wrong_arguments_are_named():
    arrays = {name: x for name, x in draw().items() if x is not None}
    for words, changes in (
        (r"shared_pages has shape \(7,\) and page_table \(6, 6\)", {"shared_pages": jnp.arange(7)}),
        (r"shared_pages has shape \(\)", {"shared_pages": 2}),
        ("beside a local_window_size", {"shared_pages": SHARED, "local_window_size": 3}),
    ):
        with pytest.raises(ValueError, match=words):
            jax_flash.ragged_paged_attention(**arrays | changes)


def test_few_bytes_are_read_by_each_request(monkeypatch):
    """Two parts and their merge take longer: the program is that without shared pages."""
    arrays = draw()
    spared = 2 * 6 * SHARED.size * arrays["key_pages"][0].nbytes

    def shares(least: int, **options) -> bool:
        monkeypatch.setattr(op, "LEAST_SPARED", least)
        jax.clear_caches()
        call = jax.make_jaxpr(lambda arrays: run(arrays, **options))
        return "flash_common" in str(call(arrays | {"shared_pages": SHARED}))

    of_cpu = op.PART_OF_CPUS * spared
    assert shares(of_cpu, backend="cpu")
    assert not shares(of_cpu + op.PART_OF_CPUS, backend="cpu")
    monkeypatch.setattr(_gpu.spec, "present", lambda: _gpu.spec.GPUS["H200"])
    assert shares(of_cpu, backend="cpu")
    assert shares(spared // op.BY_TWO_KERNELS)
    assert not shares(spared // op.BY_TWO_KERNELS + 1)


def test_an_export_takes_any_number_of_pages_and_requests(monkeypatch):
    """A table and pages in common of any size: read once for all where their number is open."""
    monkeypatch.setattr(op, "LEAST_SPARED", 1 << 40)
    arrays = {name: x for name, x in draw().items() if x is not None} | {"shared_pages": SHARED}
    b, m, c = jax.export.symbolic_shape("b, m, c", constraints=["m >= c", "c >= 1"])
    open_dims = {"lengths": (b,), "page_table": (b, m), "query_starts": (b + 1,)}
    open_dims |= {"shared_pages": (c,)}
    shapes = {
        name: jax.ShapeDtypeStruct(open_dims.get(name, x.shape), x.dtype)
        for name, x in arrays.items()
    }
    call = jax.jit(lambda **x: jax_flash.ragged_paged_attention(**x, backend="cpu"))
    made = jax.export.export(call, disabled_checks=jax_flash.EXPORT_CHECKS)(**shapes)
    assert_same(made.call(**arrays), call(**arrays), 2e-6)
    wide = {"page_table": jnp.pad(arrays["page_table"], ((0, 1), (0, 2)), constant_values=-1)}
    wide |= {"lengths": jnp.append(arrays["lengths"], 7), "shared_pages": SHARED[:2]}
    wide |= {"query_starts": jnp.append(arrays["query_starts"], 9)}
    assert_same(made.call(**arrays | wide), call(**arrays | wide), 2e-6)


def test_an_export_leaves_the_number_of_kv_heads_open():
    arrays = {name: x for name, x in draw().items() if x is not None} | {"shared_pages": SHARED}
    (k,) = jax.export.symbolic_shape("k")
    heads = dict.fromkeys(("key_pages", "value_pages", "new_key", "new_value"), k)
    heads["query"] = 2 * k
    shapes = {
        name: jax.ShapeDtypeStruct(
            (*x.shape[:-2], heads[name], x.shape[-1]) if name in heads else x.shape, x.dtype
        )
        for name, x in arrays.items()
    }
    call = jax.jit(lambda **x: jax_flash.ragged_paged_attention(**x, backend="cpu"))
    made = jax.export.export(call, disabled_checks=jax_flash.EXPORT_CHECKS)(**shapes)
    assert_same(made.call(**arrays), call(**arrays), 2e-6)
