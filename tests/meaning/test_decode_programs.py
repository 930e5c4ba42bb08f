"""Programs of decode_attention: caches written in place, split over devices, lowered, exported."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_flash
from jax_flash import _backends

from ..decode_cases import alike, decode, equal, small
from ..devices import collectives, mesh_of
from ..processes import run_two_processes, with_devices

TWO_PROCESSES = """
import sys
import jax
address, rank = sys.argv[1], int(sys.argv[2])
jax.distributed.initialize(address, 2, rank)
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from tests.meaning import test_decode_programs as t
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
    run_two_processes(TWO_PROCESSES, tmp_path, **with_devices(2))
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
