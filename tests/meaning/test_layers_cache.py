"""The FlashAttention layers' cache against no cache: in rows and in pages."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_flash
from jax_flash import _gpu
from jax_flash.layers import linen as flash_linen
from jax_flash.layers import nnx as flash_nnx

from ..small import numpy_normal as normal
from .own_layers import BATCH, EVERYTHING, FEATURES, HEADS, LENGTH


def decode_nnx(layer, x, chunks, max_length):
    layer.init_cache(x.shape[:-2], max_length)
    step = nnx.jit(lambda layer, x: layer(x, decode=True))
    return jnp.concatenate([step(layer, chunk) for chunk in chunks], axis=-2)


def decode_linen(layer, variables, x, chunks, max_length):
    layer = layer.clone(decode=True)
    cache = layer.init(jax.random.key(0), jnp.zeros((*x.shape[:-2], max_length, FEATURES)))["cache"]
    step = jax.jit(lambda variables, x: layer.apply(variables, x, mutable=["cache"]))
    outs = []
    for chunk in chunks:
        out, updated = step({**variables, "cache": cache}, chunk)
        outs.append(out)
        cache = updated["cache"]
    return jnp.concatenate(outs, axis=-2)


def decode(api, x, splits, max_length, **settings) -> Any:
    """The full forward, and the same by a cache that takes `x` in chunks."""
    chunks = jnp.split(x, splits, axis=-2)
    if api == "nnx":
        layer = flash_nnx.FlashAttention(HEADS, FEATURES, rngs=nnx.Rngs(0), **settings)
        return layer(x), decode_nnx(layer, x, chunks, max_length)
    layer = flash_linen.FlashAttention(HEADS, **settings)
    variables = layer.init(jax.random.key(0), x)
    return layer.apply(variables, x), decode_linen(layer, variables, x, chunks, max_length)


@pytest.mark.parametrize(
    "settings", [{"is_causal": True}, {**EVERYTHING, "normalize_qk": True}], ids=["plain", "all"]
)
@pytest.mark.parametrize("splits", [list(range(1, LENGTH)), [6, 8, 11]])
def test_cache_equals_the_full_forward(api, settings, splits):
    x = normal(1, BATCH, LENGTH, FEATURES)
    full, chunked = decode(api, x, splits, LENGTH + 3, **settings)
    np.testing.assert_allclose(chunked, full, atol=5e-6)


def test_cache_without_batch_axis(api):
    full, chunked = decode(api, normal(1, LENGTH, FEATURES), [6], LENGTH, is_causal=True)
    np.testing.assert_allclose(chunked, full, atol=5e-6)


def test_past_the_end_of_the_cache_is_nan(api):
    x = normal(1, BATCH, LENGTH, FEATURES)
    full, chunked = decode(api, x, list(range(1, LENGTH)), LENGTH - 1, is_causal=True)
    np.testing.assert_allclose(chunked[:, :-1], full[:, :-1], atol=5e-6)
    assert np.isnan(chunked[:, -1]).all()


def cached(api, batch, max_length=None, pages=None, features=FEATURES, **settings) -> Any:
    """The full forward of a layer, a step from a cache to (out, cache), and an empty cache."""
    if api == "nnx":
        layer = flash_nnx.FlashAttention(HEADS, features, rngs=nnx.Rngs(0), **settings)
        layer.init_cache(batch, max_length, pages=pages)
        graph, cache, parameters = nnx.split(layer, nnx.Cache, ...)

        def step(cache, x, lengths=None, table=None):
            layer = nnx.merge(graph, nnx.State(cache), parameters)
            out = layer(x, seq_lengths=lengths, decode=True, page_table=table)
            return out, nnx.to_pure_dict(nnx.state(layer, nnx.Cache))

        return layer, step, nnx.to_pure_dict(cache)
    layer = flash_linen.FlashAttention(HEADS, decode=True, pages=pages, **settings)
    x = jnp.zeros((batch, max_length or 1, features), settings.get("dtype"))
    variables = layer.init(jax.random.key(0), x)
    cache = variables.pop("cache")

    def step(cache, x, lengths=None, table=None):
        out, updated = layer.apply(
            {**variables, "cache": cache},
            x,
            seq_lengths=lengths,
            page_table=table,
            mutable=["cache"],
        )
        return out, updated["cache"]

    return functools.partial(layer.clone(decode=False).apply, variables), step, cache


def chunk_of(x, seen, new, size):
    """What follows `seen` positions of each row: `new` of them, then NaN up to `size`."""
    chunk = np.full((len(x), size, x.shape[-1]), np.nan, np.float32)
    for b, n in enumerate(new):
        chunk[b, :n] = x[b, seen[b] : seen[b] + n]
    return jnp.asarray(chunk)


@pytest.mark.parametrize("backend", [None, "xla"])
def test_prompts_of_different_lengths_share_a_cache(api, backend):
    """Padded to the right; then a token a row, then rows that have some new ones or none."""
    attention_fn = functools.partial(jax_flash.flash_attention, backend=backend)
    settings = {**EVERYTHING, "attention_fn": attention_fn}
    lengths = [LENGTH - 4, 1, 5]
    x = normal(1, 3, LENGTH + 2, FEATURES)
    forward, step, cache = cached(api, 3, LENGTH, **settings)
    full, step = forward(x), jax.jit(step, donate_argnums=0)
    seen = [0, 0, 0]
    for counts, size in [(lengths, LENGTH - 4), (None, 1), (None, 1), ([2, 0, 1], 2), (None, 1)]:
        new = [1, 1, 1] if counts is None else counts
        chunk = chunk_of(x, seen, new, size)
        out, cache = step(cache, chunk, None if counts is None else jnp.array(counts))
        for b, n in enumerate(new):
            expected = full[b, seen[b] : seen[b] + n]
            seen[b] += n
            if seen[b] > LENGTH:  # beyond the cache, in this row alone
                assert np.isnan(out[b, :n]).all()
            else:
                np.testing.assert_allclose(out[b, :n], expected, atol=5e-6)
    assert max(seen) == LENGTH + 1


def test_pages_give_the_bits_of_rows(api, backend):
    """Prompts of different lengths, steps of some tokens or one, and another row in one's place."""
    if (api, backend) == ("linen", "xla"):
        pytest.skip("the programs are those of nnx: XLA takes seconds for them")
    settings = EVERYTHING | {
        "attention_fn": functools.partial(jax_flash.flash_attention, backend=backend),
        "dtype": jnp.bfloat16 if backend == "cuda" else jnp.float32,
    }
    room, size = 80, 8
    x = normal(1, 3, room, FEATURES)
    table = np.random.default_rng(0).permutation(36)[:30].reshape(3, 10).astype(np.int32)
    seen = np.zeros(3, int)
    caches, steps = {}, {}
    for kind, settings["pages"] in (("rows", None), ("pages", (36, size))):
        length = room if kind == "rows" else None
        forward, step, cache = cached(api, 3, length, **settings)
        steps[kind] = jax.jit(step)
        # What nobody has written may hold anything.
        caches[kind] = jax.tree.map(lambda a: a if a.ndim == 1 else a * jnp.nan, cache)

    def run(new, count, table=table):
        ends = seen + new
        needed = np.where(np.arange(10) * size < ends[:, None], table, -1)
        chunk = chunk_of(x, seen, new, count)
        lengths = None if set(new) == {count} else jnp.array(new)
        outs = []
        for kind in caches:
            given = needed if kind == "pages" else None
            out, caches[kind] = steps[kind](caches[kind], chunk, lengths, given)
            outs.append(np.asarray(out, np.float32))
        seen[:] = ends
        return outs

    outs = []
    for new, count in [([70, 3, 20], 70), ([1, 4, 0], 4), ([1, 1, 1], 1), ([3, 3, 3], 3)]:
        in_rows, in_pages = run(new, count)
        np.testing.assert_array_equal(in_pages, in_rows)
        outs.append([row[:n] for row, n in zip(in_pages, new, strict=True)])
    full = np.asarray(forward(x), np.float32)
    for b, n in enumerate(seen):
        got = np.concatenate([out[b] for out in outs])
        np.testing.assert_allclose(got, full[b, :n], atol=0.03 if backend == "cuda" else 5e-6)

    other = np.array(table)
    other[1, 1] = 36  # where its next position goes there is no page
    in_rows, in_pages = run([1, 1, 1], 1, other)
    assert np.isnan(in_pages[1]).all()
    np.testing.assert_array_equal(in_pages[[0, 2]], in_rows[[0, 2]])

    for cache in caches.values():
        cache["cache_index"] = cache["cache_index"].at[1].set(0)
    seen[1] = 0
    in_rows, in_pages = run([0, 9, 0], 70, other[:, ::-1])
    np.testing.assert_array_equal(in_pages, in_rows)
    np.testing.assert_allclose(
        in_pages[1, :9], full[1, :9], atol=0.03 if backend == "cuda" else 5e-6
    )


@pytest.mark.parametrize("count", [6, 70])
def test_rows_with_padding_need_the_pages_of_what_they_have_alone(api, backend, count):
    """Six positions are decoded in one call, 70 read rows; pages behind the window are gone."""
    if (api, backend) == ("linen", "xla"):
        pytest.skip("the programs are those of nnx: XLA takes seconds for them")
    settings = EVERYTHING | {
        "local_window_size": 5,
        "attention_fn": functools.partial(jax_flash.flash_attention, backend=backend),
        "dtype": jnp.bfloat16 if backend == "cuda" else jnp.float32,
    }
    size, columns, seen = 4, 32, np.array([41, 14, 0])
    x = normal(1, 3, 80, FEATURES)
    table = np.random.default_rng(0).permutation(3 * columns).reshape(3, columns).astype(np.int32)
    forward, step, cache = cached(api, 3, None, (3 * columns, size), **settings)
    cache = jax.tree.map(lambda a: a if a.ndim == 1 else a * jnp.nan, cache)
    step, full = jax.jit(step), np.asarray(forward(x), np.float32)
    _, cache = step(cache, chunk_of(x, [0, 0, 0], seen, 41), jnp.array(seen), table)
    new = np.array([2, 0, count])
    # The window of a row's first new position begins in this column.
    first = np.maximum(seen - 5, 0) // size
    needed = (np.arange(columns) >= first[:, None]) & (
        np.arange(columns) * size < (seen + new)[:, None]
    )
    chunk = chunk_of(x, seen, new, count)
    out, _ = step(cache, chunk, jnp.array(new), np.where(needed, table, -1))
    for b, n in enumerate(new):
        want = full[b, seen[b] : seen[b] + n]
        atol = 0.03 if backend == "cuda" else 5e-6
        np.testing.assert_allclose(np.asarray(out[b, :n], np.float32), want, atol=atol)
    assert np.isfinite(out).all()
    assert (out[0, 2:] == out[1, 0]).all()  # padding
    needed[0, first[0]] = False
    out, _ = step(cache, chunk, jnp.array(new), np.where(needed, table, -1))
    assert np.isnan(out[0, 0]).all()
    assert not np.isnan(out[1:]).any()


@pytest.mark.parametrize("count", [3, 70])
def test_debug_values_names_what_a_row_lacks(count):
    """In a step that decode_attention takes, and in one of more positions than that."""
    layer = flash_nnx.FlashAttention(1, 8, is_causal=True, rngs=nnx.Rngs(0))
    layer.init_cache((2,), pages=(16, 8))
    table = np.arange(16, dtype=np.int32)[None].repeat(2, 0)
    x = jnp.ones((2, count, 8))
    with jax_flash.debug_values():
        layer(x, decode=True, seq_lengths=jnp.array([1, 3]), page_table=table)
        with pytest.raises(ValueError, match=rf"seq_lengths\[0\] is 80; expected 0 to T = {count}"):
            layer(x, decode=True, seq_lengths=jnp.array([80, 3]), page_table=table)
        table[1, 0] = 16
        with pytest.raises(ValueError, match=r"page_table\[1, 0\] is 16, .* needs [03] to 3"):
            layer(x, decode=True, seq_lengths=jnp.array([1, 1]), page_table=table)


@pytest.mark.parametrize("pages", [None, (512, 16)])
@pytest.mark.parametrize("lengths", [None, (3, 1)])
def test_a_step_copies_no_cache(api, pages, lengths):
    settings = {"num_kv_heads": 2, "is_causal": True, "rotary_base": 100.0, "features": 64}
    _, step, cache = cached(api, 2, None if pages else 4096, pages, **settings)
    x = jnp.ones((2, 1 if lengths is None else 3, 64))
    rest = (
        None if lengths is None else jnp.array(lengths),
        None if pages is None else jnp.arange(512).reshape(2, 256),
    )
    program = jax.jit(step, donate_argnums=0).lower(cache, x, *rest).compile()
    plan, size = program.memory_analysis(), cache["cached_key"].nbytes
    assert plan.temp_size_in_bytes < size / 8
    assert plan.alias_size_in_bytes >= 2 * size


@pytest.mark.gpu
@pytest.mark.skipif(_gpu.spec.present() is None, reason="needs an NVIDIA GPU")
def test_steps_on_a_gpu_decode(api):
    settings = {"is_causal": True, "dtype": jnp.bfloat16}
    _, step, cache = cached(api, 2, None, (8192, 16), **settings)
    x, table = jnp.ones((2, 3, FEATURES), jnp.bfloat16), jnp.arange(8192).reshape(2, 4096)
    for lengths in (None, jnp.array([3, 1])):
        lowered = jax.jit(step, donate_argnums=0).lower(cache, x, lengths, table)
        assert "jax_flash_cuda_decode" in lowered.as_text()
        assert "jax_flash_cuda_forward" not in lowered.as_text()
        plan, size = lowered.compile().memory_analysis(), cache["cached_key"].nbytes
        assert plan.temp_size_in_bytes < size / 2  # of 8 MB; the kernels' sums take 0.6 MB
        assert plan.alias_size_in_bytes >= 2 * size


def test_wrong_pages_are_refused(api):
    x = jnp.ones((2, 3, FEATURES))
    table = jnp.zeros((2, 4), jnp.int32)
    in_pages, in_rows = (
        cached(api, 2, length, pages, is_causal=True)
        for length, pages in ((None, (8, 1)), (9, None))
    )
    with pytest.raises(ValueError, match=r"cache is of pages \(8, 1\); expected a page_table"):
        in_pages[1](in_pages[2], x)
    with pytest.raises(ValueError, match="page_table is given for a cache without pages"):
        in_rows[1](in_rows[2], x, None, table)
    for forward in (in_pages[0], in_rows[0]):
        with pytest.raises(ValueError, match="page_table is given without decode=True"):
            forward(x, page_table=table)
    with pytest.raises(ValueError, match=r"page_table has shape \(3, 4\); expected \[\*B, "):
        in_pages[1](in_pages[2], x, None, jnp.zeros((3, 4), jnp.int32))
    with pytest.raises(ValueError, match="room for 2 positions"):
        in_pages[1](in_pages[2], x, None, table[:, :2])
    with pytest.raises(TypeError, match="page_table has dtype float32"):
        in_pages[1](in_pages[2], x, None, table.astype(float))
    for pages, message in [
        ((8,), r"pages is \(8,\); expected \(how many, positions in each\)"),
        ((8, 0), "1 position or more"),
        ((-1, 8), "pages must not be negative"),
        ((8, 2.0), "pages must be an int"),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            cached(api, 2, None, pages, is_causal=True)
    layer = flash_nnx.FlashAttention(HEADS, FEATURES, is_causal=True, rngs=nnx.Rngs(0))
    for sizes in ((2,), (2, 16, None, (8, 16))):
        with pytest.raises(ValueError, match="expected one of them"):
            layer.init_cache(*sizes[:3], pages=sizes[-1] if len(sizes) > 3 else None)


def test_wrong_decoding_is_refused(api):
    x = normal(1, BATCH, LENGTH, FEATURES)
    with pytest.raises(ValueError, match="room for 4 positions"):
        decode(api, x, [], 4, is_causal=True)
    with pytest.raises(ValueError, match="is_causal=True"):
        decode(api, x, [], LENGTH)
    layer = flash_nnx.FlashAttention(HEADS, FEATURES, is_causal=True, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="init_cache"):
        layer(x, decode=True)
    for sizes, name in [((BATCH, -1), "max_length"), ((2.0, LENGTH), "batch"), ((2, None), "max")]:
        with pytest.raises((TypeError, ValueError), match=name):
            layer.init_cache(*sizes)
    layer.init_cache(np.int64(BATCH), LENGTH)
    for name, given in (
        ("segment_ids", jnp.zeros((BATCH, LENGTH), jnp.int32)),
        ("positions", jnp.zeros((BATCH, LENGTH), jnp.int32)),
        ("memory", x),
        ("score_mod", lambda score, b, h, q, k: score),
        ("block_mask", jax_flash.block_mask_of(np.ones((1, 1), bool))),
    ):
        with pytest.raises(ValueError, match=f"decoding takes no {name}"):
            layer(x, decode=True, **{name: given})
