"""ragged_paged_attention against float64, its programs, and what is named."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash

from ..devices import collectives, mesh_of
from ..quantized_cases import quantize_batch
from ..ragged_cases import BATCHES, Batch, run

HEADS = {
    **dict.fromkeys(("query", "new_key", "new_value"), P(None, "model")),
    **dict.fromkeys(("key_pages", "value_pages"), P(None, None, "model")),
}


def small(**changes) -> dict[str, jax.Array]:
    """Arrays without NaN where nothing is hidden."""
    arrays = Batch("small", **{"N": 8, "K": 4, **changes}).draw().arrays
    return {
        name: jnp.asarray(np.nan_to_num(x) if x.dtype.kind == "f" else x)
        for name, x in arrays.items()
    }


def of_kind(kind: str, **changes) -> dict[str, jax.Array]:
    """`small`; or with shared pages and a tree; or over pages of eight bits with scales each."""
    if kind != "eight bits":
        arrays = small(**changes)
        if kind == "plain":
            return arrays
        tree = jnp.zeros((30, 20), bool).at[3:20, 0].set(True)
        return arrays | {"shared_pages": arrays["page_table"][0, :2], "ancestors": tree}
    batch = Batch("small", **{"N": 8, "K": 4, "dtype": "bfloat16", **changes})
    return {
        name: jnp.asarray(x if x.dtype.kind == "i" else np.where(x == x, x, x.dtype.type(0.01)))
        for name, x in quantize_batch(batch, varied=True).arrays.items()
    }


EVERY_KIND = pytest.mark.parametrize("kind", ["plain", "shared tree", "eight bits"])


def parted(arrays: dict) -> tuple[dict, dict]:
    """The pages, which are donated, and the rest."""
    pages = {name: arrays[name] for name in ("key_pages", "value_pages")}
    return pages, {name: x for name, x in arrays.items() if name not in pages}


def equal(got, expected) -> None:
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def close(got, expected, atol: float = 2e-6) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=atol), got, expected)


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: batch.name.replace(" ", "-"))
def test_batch(batch, backend):
    drawn = batch.draw()
    drawn.compare(drawn.run(backend))


def test_one_program_serves_any_mixture(host_backend):
    """Requests come, go and grow; shapes stay."""
    program = jax.jit(
        functools.partial(
            jax_flash.ragged_paged_attention, local_window_size=21, backend=host_backend
        )
    )
    rng = np.random.default_rng(0)
    for seed in range(12):
        rows = int(rng.integers(0, 7))
        counts = rng.multinomial(rng.integers(0, 31), np.ones(rows) / rows) if rows else ()
        counts = tuple(np.where(rng.random(rows) < 0.2, 0, counts).tolist() if rows else ())
        before = tuple(int(rng.integers(0, 48 - n + 1)) for n in counts)
        drawn = Batch("any", counts, before, window=21).draw(seed)
        drawn.compare(program(**drawn.arrays))
    assert program._cache_size() == 1


def test_a_wrong_request_is_nan_and_touches_nothing(backend):
    drawn = Batch("wrong", window=30, tokens=28).draw()
    arrays, batch = drawn.arrays, drawn.batch
    whole, lengths, table = drawn.run(backend), arrays["lengths"], arrays["page_table"]

    def changed(x, *at_and_value):
        *at, value = at_and_value
        x = x.copy()
        x[tuple(at)] = value
        return x

    b, starts = 4, arrays["query_starts"]
    own, pages = slice(starts[b], starts[b + 1]), table[b, : -(-lengths[b] // batch.page)]
    for change in (
        {"lengths": changed(lengths, b, 49)},  # beyond its table
        {"lengths": changed(lengths, b, 2**31 - 1)},
        {"lengths": changed(lengths, b, 8)},  # fewer than its tokens
        {"page_table": changed(table, b, 0, -1)},
        {"page_table": changed(table, b, 3, table.size + 2)},
        {"query_starts": changed(starts, b + 1, 29)},  # beyond the tokens
    ):
        got = run(arrays | change, backend=backend, **batch.options)
        assert np.isnan(got.out[own]).all()
        assert np.isnan(got.lse[own]).all()
        rest = np.delete(np.arange(batch.tokens), own)
        atol = 1e-4 if backend == "cuda" else 0.0  # there work is cut elsewhere
        for x, y in ((got.out, whole.out), (got.lse, whole.lse)):
            close(x[rest], y[rest], atol)
        for name in ("key_pages", "value_pages"):
            equal(
                np.delete(getattr(got, name), pages, 0), np.delete(getattr(whole, name), pages, 0)
            )
            equal(getattr(got, name)[pages], arrays[name][pages])

    falling = changed(starts, 4, starts[1])  # of two requests, of which one has no token left
    got = run(arrays | {"query_starts": falling}, backend=backend, **batch.options)
    close(got.out[: starts[2]], whole.out[: starts[2]], atol)
    assert np.isnan(got.out[starts[2] :]).all()


@pytest.mark.parametrize("empty", ["tokens", "pages", "slots", "columns", "heads"])
def test_none_of_something(empty, host_backend):
    arrays, tokens = small(), 30
    for name, x in arrays.items():
        if empty == "tokens" and name in ("query", "new_key", "new_value"):
            arrays[name], tokens = x[:0], 0
        if empty == "heads" and x.ndim > 2:
            arrays[name] = x[..., :0, :]
        if empty in ("pages", "slots") and name.endswith("_pages"):
            arrays[name] = x[:0] if empty == "pages" else x[:, :0]
    if empty == "columns":
        arrays["page_table"] = arrays["page_table"][:, :0]
    got = run(arrays, backend=host_backend)
    assert got.out.shape == (tokens, *arrays["query"].shape[1:])
    assert got.lse.shape == got.out.shape[:2]
    equal(parted(arrays)[0], {"key_pages": got.key_pages, "value_pages": got.value_pages})
    starts = arrays["query_starts"]
    assert np.isnan(got.out[starts[0] : starts[5]]).all()
    assert (got.out[starts[5] :] == 0).all()


def test_the_last_position_of_an_int32_length():
    """In pages of 65536 positions, where the end of a page is beyond int32."""
    size, rng = 2**16, np.random.default_rng(0)
    pages = jnp.asarray(rng.standard_normal((2, size, 1, 4)), "float32")
    table = jnp.full((1, 2**15 + 5), -1, jnp.int32).at[0, 2**15 - 1].set(1)
    query = jnp.asarray(rng.standard_normal((3, 2, 4)), "float32")
    options = {"local_window_size": 5, "backend": "cpu"}
    lengths, starts = jnp.array([2**31 - 1]), jnp.array([0, 2])  # two of a piece's tokens
    arrays = {"lengths": lengths, "page_table": table, "query_starts": starts}
    got = run({"query": query, "key_pages": pages, "value_pages": pages, **arrays}, **options)
    near = pages[1:, size - 33 : size - 1]
    expected = jax_flash.decode_attention(query[None, :2], near, near, jnp.array([32]), **options)
    close(got.out[:2], expected.out[0])


@EVERY_KIND
def test_pages_are_donated_and_written_in_place(kind, backend, few_are_shared):
    pages, rest = parted(of_kind(kind, columns=600))
    base = None if kind == "eight bits" else 1e4
    call = functools.partial(jax_flash.ragged_paged_attention, rotary_base=base, backend=backend)
    program = jax.jit(lambda pages, rest: call(**pages, **rest), donate_argnums=0)
    compiled = program.lower(pages, rest).compile()
    text, plan, shape = compiled.as_text(), compiled.memory_analysis(), pages["key_pages"].shape
    assert text.count("may-alias") + text.count("must-alias") >= 2
    assert plan.alias_size_in_bytes >= 2 * pages["key_pages"].nbytes
    if kind == "eight bits" and backend != "cuda":
        return  # XLA copies them on CPUs, as the docstring says
    assert plan.temp_size_in_bytes < pages["key_pages"].nbytes
    dims = ",".join(map(str, shape))
    assert re.findall(rf"= \(?\w+\[{dims}\].*? (?:copy(?:-start)?|convert)\(", text) == []


@pytest.mark.parametrize("explicit", [False, True])
def test_heads_are_split_without_a_collective(explicit):
    arrays = small() | {"sinks": jnp.arange(8.0)}
    mesh = mesh_of((1, 4), explicit)
    specs = {name: HEADS.get(name, P("model") if name == "sinks" else P()) for name in arrays}
    placed = {
        name: jax.device_put(np.asarray(x), NamedSharding(mesh, specs[name]))
        for name, x in arrays.items()
    }
    call = functools.partial(
        jax_flash.ragged_paged_attention, local_window_size=9, rotary_base=1e4, backend="cpu"
    )
    expected = jax.jit(call)(**arrays)
    with jax.set_mesh(mesh):
        compiled = jax.jit(call).lower(**placed).compile()
        assert collectives(compiled) == []
        got = compiled(**placed)
    close(got, expected)
    sharding = placed["key_pages"].sharding
    assert got.key_pages.sharding.is_equivalent_to(sharding, 4)


@EVERY_KIND
def test_shard_map_over_heads(kind, few_are_shared):
    arrays = of_kind(kind)
    specs = {name: HEADS.get(name, P()) for name in arrays}
    specs |= {name: P(None, "model") for name in arrays if name.endswith("scale")}
    heads, pages = HEADS["query"], HEADS["key_pages"]
    options = {"backend": "cpu"}
    if kind == "plain":
        options |= {"local_window_size": 9, "rotary_base": 1e4}

    def call(arrays):
        return jax_flash.ragged_paged_attention(**arrays, **options)

    mapped = jax.shard_map(
        call,
        mesh=mesh_of((1, 4)),
        in_specs=(specs,),
        out_specs=jax_flash.Attended(heads, heads, pages, pages),
    )
    got, expected = jax.jit(mapped)(arrays), jax.jit(call)(arrays)
    close(got[:2], expected[:2])
    equal(*(jax.tree.map(lambda x: x.astype("float32"), x[2:]) for x in (got, expected)))


def test_vmap_is_a_loop():
    """Over layers, say: queries and pages are mapped, requests are the same."""
    members = [Batch("member", window=9).draw(seed).arrays for seed in range(2)]
    mapped = {name for name, x in members[0].items() if x.dtype.kind == "f"}
    shared = {name: x for name, x in members[0].items() if name not in mapped}
    stacked = {name: jnp.stack([x[name] for x in members]) for name in mapped}

    def call(arrays):
        return run({**arrays, **shared}, local_window_size=9, backend="cpu")

    # Pages are found by the first member's table: the second's are as good as any.
    stacked = {name: jnp.nan_to_num(x) for name, x in stacked.items()}
    got = jax.vmap(call)(stacked)
    for i in range(2):
        expected = call({name: x[i] for name, x in stacked.items()})
        close(jax.tree.map(lambda x, i=i: x[i], got), expected)


@pytest.mark.parametrize("calls", [1, 2])
def test_programs_for_a_gpu(calls):
    """A batch that only decodes is one call; else those of one token are apart from the rest."""
    arrays = small(dtype="bfloat16", requests=30 if calls == 1 else 6)
    traced = jax.jit(jax_flash.ragged_paged_attention).trace(**arrays)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert re.findall(r"custom_call @(jax_flash\w+)", text) == calls * ["jax_flash_cuda_decode"]


def test_an_export_takes_any_number_of_tokens():
    (tokens,) = jax.export.symbolic_shape("t", constraints=["t >= 6"])
    arrays = small()
    shapes = {
        name: jax.ShapeDtypeStruct(
            (tokens, *x.shape[1:]) if name in ("query", "new_key", "new_value") else x.shape,
            x.dtype,
        )
        for name, x in arrays.items()
    }
    call = jax.jit(functools.partial(jax_flash.ragged_paged_attention, backend="cpu"))
    made = jax.export.export(call, disabled_checks=jax_flash.EXPORT_CHECKS)(**shapes)
    for count in (28, 70):
        arrays = small(tokens=count)
        close(made.call(**arrays), call(**arrays))


def test_wrong_arguments_are_named():
    arrays = small()
    query, pages, new = arrays["query"], arrays["key_pages"], arrays["new_key"]

    def refused(message, **changes):
        with pytest.raises((TypeError, ValueError), match=message):
            jax_flash.ragged_paged_attention(**arrays | changes)

    refused(r"query has shape .*\[tokens, N, H\]", query=query[None])
    refused(r"lengths has shape \(0,\); expected \[B\]", lengths=arrays["lengths"][:0])
    refused(r"query_starts has shape \(6,\) and lengths \(6,\)", query_starts=jnp.zeros(6, int))
    refused(r"rows has shape \(1,\)", rows=jnp.ones(1, int))
    refused("rows has dtype float32", rows=jnp.float32(1))
    refused("page_table is None", page_table=None)
    refused(r"page_table has shape \(5, 6\)", page_table=arrays["page_table"][:5])
    refused(
        r"key_pages has .* pages \[P, S, K, H\], P pages of S positions each$", key_pages=pages[0]
    )
    refused("value_pages has shape .*the same but for the last dim", value_pages=pages[:2])
    refused("query has dtype bfloat16 and key_pages float32", query=query.astype("bfloat16"))
    refused("a multiple of key_pages's heads", query=query[:, :3])
    refused(r"new_key has shape .*expected \(30, 4, 16\)", new_key=new[:2])
    refused("new_key is given with no new_value for a value_pages", new_value=None)
    refused("value_dim is 3 beside a value_pages", value_dim=3)
    refused("backend is 'tpu'", backend="tpu")
    refused("did you mean query_starts", cu_q_lens=arrays["query_starts"])
    with pytest.raises(NotImplementedError, match="ragged_paged_attention has no derivative"):
        jax.grad(lambda x: jax_flash.ragged_paged_attention(**arrays | {"query": x}).out.sum())(
            query
        )


def test_debug_values_name_what_is_wrong():
    arrays = small(window=9)
    lengths, starts, table = (arrays[x] for x in ("lengths", "query_starts", "page_table"))

    def refused(message, **changes):
        with jax_flash.debug_values(), pytest.raises(ValueError, match=message):
            jax_flash.ragged_paged_attention(**arrays | changes, local_window_size=9)

    with jax_flash.debug_values():
        jax_flash.ragged_paged_attention(**arrays, local_window_size=9)
    refused("rows is 7; expected 0 to B = 6", rows=7)
    refused(r"query_starts\[2\] is 0; expected", query_starts=starts.at[2].set(0))
    refused(r"query_starts\[5\] is 31.* to tokens = 30", query_starts=starts.at[5].set(31))
    refused(r"lengths\[4\] is 8; expected at least the request's 9", lengths=lengths.at[4].set(8))
    refused(r"lengths\[0\] is 49; expected 0 to M \* S = 48", lengths=lengths.at[0].set(49))
    refused(r"page_table\[1, 1\] is 99", page_table=table.at[1, 1].set(99))
