"""Attention with block masks: as windows and as arrays, edited, stacked, transformed, sharded."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash
from jax_flash import masks, reference

from ..devices import collectives, mesh_of
from ..small import close, normal
from .masked_calls import DOCUMENTS, N, S, T, gradients, lattice, qkv

WITH_A_WINDOW: tuple[dict[str, Any], ...] = (
    {},
    {"is_causal": True},
    {"local_window_size": (3, None)},
    {"local_window_size": (12, 2)},
    {"is_causal": True, "causal_align": "bottom_right"},
    {"key_value_seq_lengths": np.array([50, 7])},
    {"is_causal": True, "query_positions": 2 * DOCUMENTS},
    {"query_positions": 2 * DOCUMENTS},  # without causality or a window they mean nothing
)


def test_a_window_is_read_in_place_of_the_arrays(host_backend):
    q, k, v = qkv()
    m = jax_flash.block_mask(masks.sliding_window(9, 4), q_len=T, kv_len=S, block=16)
    arrays = m.as_blocks()
    every = 1 if host_backend == "cpu" else 2  # XLA compiles three programs each
    for options in WITH_A_WINDOW[::every]:
        attention = functools.partial(jax_flash.flash_attention, backend=host_backend, **options)
        for one, other, want in zip(
            gradients(attention, q, k, v, block_mask=m),
            gradients(attention, q, k, v, block_mask=arrays),
            gradients(reference.attention, q, k, v, block_mask=m, **options),
            strict=True,
        ):
            close(one, want)
            close(other, want)
    text = str(jax.make_jaxpr(functools.partial(jax_flash.flash_attention, block_mask=m))(q, k, v))
    assert "block_numbers" not in text
    with pytest.raises(ValueError, match="block_mask has q_len 40"):
        jax_flash.flash_attention(q[:, :30], k, v, block_mask=m)


def edited(mask: jax_flash.BlockMask) -> jax_flash.BlockMask:
    """Hides the first row of blocks."""
    return jax.tree.map(lambda x: x.at[..., 0, :].set(-2) if x.dtype == jnp.int32 else x, mask)


def test_arrays_that_are_edited_are_read(host_backend):
    q, k, v = qkv(kv_len=T)
    attend = functools.partial(jax_flash.flash_attention, q, k, v, backend=host_backend)
    documents = masks.documents(np.arange(48) // 16)
    for mask_mod, size in ((masks.causal(), T), (lattice, T), (documents, 48)):
        m = jax_flash.block_mask(mask_mod, q_len=size, kv_len=size, block=16)
        assert len(jax.tree.leaves(m)) == (2 if mask_mod is lattice else 0)
        blocks = m.as_blocks()
        want = np.asarray(m.dense()).copy()
        np.testing.assert_array_equal(blocks.dense(), want)
        want[:, :16] = False
        # A form has no leaves; arrays that are put in its place count.
        replaced = dataclasses.replace(m, numbers=edited(blocks).numbers, bits=blocks.bits)
        for changed in (edited(blocks), jax.jit(edited)(blocks), replaced):
            np.testing.assert_array_equal(changed.dense(), want)
            if size == T:
                close(
                    attend(block_mask=changed), reference.attention(q, k, v, mask=changed.dense())
                )
        np.testing.assert_array_equal(m.numbers, blocks.numbers)
        np.testing.assert_array_equal(m.bits, blocks.bits)
        for part in ({"window": None, "chunk": None}, {"numbers": edited(blocks).numbers}):
            arrays = dataclasses.replace(m, **part)
            assert arrays.window is None
            assert arrays.chunk is None
            np.testing.assert_array_equal(arrays.dense(), want if "numbers" in part else m.dense())
    with pytest.raises(ValueError, match="lacks numbers or bits; expected both, or a window"):
        dataclasses.replace(m, numbers=None, bits=None, window=None, chunk=None).dense()
    with pytest.raises(ValueError, match="lacks q_len or kv_len; expected both"):
        dataclasses.replace(m, numbers=None, bits=None, q_len=None).dense()


LAYERS = {
    "causal": (masks.causal(), {}),
    "window": (masks.sliding_window(9), {}),
    "prefix": (masks.prefix_lm(5), {}),
    "documents": (masks.documents(DOCUMENTS), {"batch": 2}),
    "heads": (lattice, {"heads": N}),
}


def test_masks_of_layers_are_stacked(host_backend):
    """Whatever was found of each: for scan, and to choose one by a traced number."""
    q, k, v = qkv(kv_len=T)
    attend = functools.partial(jax_flash.flash_attention, backend=host_backend)
    layers = [
        jax_flash.block_mask(mask_mod, q_len=T, kv_len=T, block=16, **options)
        for mask_mod, options in LAYERS.values()
    ]
    stacked = jax_flash.stack_block_masks(layers)

    @jax.jit
    def run(q, stacked):
        return jax.lax.scan(lambda x, m: (x + attend(x, k, v, block_mask=m),) * 2, q, stacked)[1]

    @jax.jit
    def one(i, stacked):
        return attend(q, k, v, block_mask=jax.tree.map(lambda x: x[i], stacked))

    x = q
    for i, (m, got) in enumerate(zip(layers, run(q, stacked), strict=True)):
        x = x + reference.attention(x, k, v, mask=m.dense())
        close(got, x)
        close(one(i, stacked), reference.attention(q, k, v, mask=m.dense()))
    same = jax_flash.stack_block_masks([layers[0]] * 3)
    assert same.window == (None, 0)
    with jax.numpy_rank_promotion("raise"):
        traced = jax.jit(lambda: jax_flash.stack_block_masks(layers[1:4]))()
    np.testing.assert_array_equal(traced.numbers, stacked.numbers[1:4, :, :1])
    for wrong, error, message in (
        ([], ValueError, "masks is empty"),
        ([layers[0], masks.causal()], TypeError, r"masks\[1\] is Mask; expected a BlockMask"),
        (
            [layers[0], jax_flash.block_mask(lattice, q_len=T, kv_len=S, block=16)],
            ValueError,
            r"masks\[1\] has q_len 40, kv_len 50 and block 16; expected .*: 40, 40 and 16",
        ),
    ):
        with pytest.raises(error, match=message):
            jax_flash.stack_block_masks(wrong)


def test_vmap_over_what_the_mask_closes_over(host_backend):
    """Members have masks of their own, made under vmap and under jit."""
    q, k, v = qkv(kv_len=T)

    def attend(ids, q, k, v):
        m = jax_flash.block_mask(masks.causal() & masks.documents(ids), q_len=T, kv_len=T, block=16)
        return jax_flash.flash_attention(q, k, v, block_mask=m, backend=host_backend)

    ids = jnp.asarray(DOCUMENTS)
    together = jax.jit(jax.vmap(lambda ids, *x: gradients(functools.partial(attend, ids), *x)))
    mask = (DOCUMENTS[:, :, None] == DOCUMENTS[:, None]) & np.tri(T, dtype=bool)
    want = gradients(reference.attention, q, k, v, mask=jnp.asarray(mask)[:, None])
    close(together(ids, q, k, v), want)


def test_vmap_over_the_query_alone(host_backend):
    """Key, value and mask are shared by the members."""
    q, k, v = qkv()
    q = jnp.stack([q, q + 1, q * 2])
    for batch, heads in ((None, None), (2, N)):
        m = jax_flash.block_mask(lattice, q_len=T, kv_len=S, batch=batch, heads=heads, block=32)
        attend = functools.partial(
            jax_flash.flash_attention, key=k, value=v, block_mask=m, backend=host_backend
        )
        want = [reference.attention(one, k, v, block_mask=m) for one in q]
        close(jax.jit(jax.vmap(attend))(q), jnp.stack(want))


def test_scan_and_remat(host_backend):
    """One mask, an argument of the program, for all layers; made once."""
    q, k, v = qkv()
    m = jax_flash.block_mask(lattice, q_len=T, kv_len=S, heads=N, block=16)

    def layers(q, k, v, m, attention, wrap):
        @wrap
        def layer(x, m):
            return x + attention(x, k, v, block_mask=m)

        return jax.lax.scan(lambda x, _: (layer(x, m), None), q, length=2)[0]

    ours = functools.partial(jax_flash.flash_attention, backend=host_backend)
    got = jax.jit(
        lambda q, k, v, m: gradients(
            functools.partial(layers, m=m, attention=ours, wrap=jax.checkpoint), q, k, v
        )
    )(q, k, v, m)
    plain = functools.partial(layers, m=m, attention=reference.attention, wrap=lambda layer: layer)
    close(got, gradients(plain, q, k, v), rtol=1e-4)


def test_an_export_takes_a_mask():
    def attend(q, k, v, mask):
        return jax_flash.flash_attention(q, k, v, block_mask=mask, backend="xla"), mask

    of_function = jax_flash.block_mask(lattice, q_len=T, kv_len=np.int64(S), block=16)
    layout = jax_flash.block_mask_of(np.eye(3, 4, dtype=bool), block=16, q_len=np.int64(T))
    for mask in (of_function, layout):
        made = jax.export.export(jax.jit(attend))(*qkv(), mask)
        out, returned = jax.export.deserialize(made.serialize()).call(*qkv(), mask)
        close(out, attend(*qkv(), mask)[0])
        assert str(returned) == str(mask)


@pytest.mark.parametrize("few", [1, 3])
def test_few_queries_see_what_the_mask_shows(few, host_backend):
    """Kernels have a way of their own for so few rows."""
    q, k, v = qkv()
    mask = jax_flash.block_mask(lattice, q_len=few, kv_len=S, batch=2, heads=N, block=16)
    got = gradients(
        jax_flash.flash_attention, q[:, :few], k, v, block_mask=mask, backend=host_backend
    )
    close(got, gradients(reference.attention, q[:, :few], k, v, mask=mask.dense()))


def test_second_derivatives():
    q, k, v = qkv(1)
    m = jax_flash.block_mask(lattice, q_len=T, kv_len=S, block=16)

    def curvature(attention):
        def along(t):
            return jnp.sum(jnp.sin(attention(q * t, k, v * t, block_mask=m)))

        return jax.jit(jax.grad(jax.grad(along)))(1.0)

    ours = functools.partial(jax_flash.flash_attention, backend="xla")
    np.testing.assert_allclose(curvature(ours), curvature(reference.attention), rtol=1e-4)


def test_chunks_are_sharded_over_batch_and_heads():
    mesh = mesh_of((2, 4))
    m = jax_flash.block_mask(masks.documents(np.arange(64) // 32), q_len=64, kv_len=64, block=16)
    assert m.chunk == 32
    q, k, v = (normal(i, 4, 64, 8, 16) for i in range(3))

    def step(q, k, v):
        return gradients(jax_flash.flash_attention, q, k, v, block_mask=m, backend="cpu")

    placed = jax.device_put((q, k, v), NamedSharding(mesh, P("data", None, "model", None)))
    compiled = jax.jit(step).lower(*placed).compile()
    assert collectives(compiled) == []
    close(compiled(*placed), gradients(reference.attention, q, k, v, mask=m.dense()))


@pytest.mark.filterwarnings("ignore:.*is gathered")
@pytest.mark.parametrize("chunks", [3, 4])
def test_sequences_split_by_type_may_part_chunks(chunks: int):
    mesh, length = mesh_of((4, 2), explicit=True), 32 * chunks
    m = jax_flash.block_mask(
        masks.documents(np.arange(length) // 32), q_len=length, kv_len=length, block=16
    )
    assert m.chunk == 32
    arrays = [normal(i, 2, length, 2, 16) for i in range(3)]
    with jax.set_mesh(mesh):
        placed = jax.device_put(arrays, NamedSharding(mesh, P(None, "data")))
        out = jax.jit(functools.partial(jax_flash.flash_attention, block_mask=m))(*placed)
    close(out, reference.attention(*arrays, mask=m.dense()))


@pytest.mark.parametrize("how", ["jit", "shard_map"])
def test_sharded_over_batch_and_heads(how):
    mesh = mesh_of((2, 4))
    q, k, v = (jnp.concatenate([x, x + 1], axis=-2) for x in qkv(4))
    m = jax_flash.block_mask(lattice, q_len=T, kv_len=S, batch=4, heads=2 * N, block=16)
    heads = P("data", None, "model", None)
    split = dataclasses.replace(m, numbers=P("data", "model"), bits=P("data"))
    specs = (heads, heads, heads, split)

    def step(q, k, v, m):
        return gradients(jax_flash.flash_attention, q, k, v, block_mask=m, backend="cpu")

    if how == "shard_map":
        step = jax.shard_map(
            step, mesh=mesh, in_specs=specs, out_specs=((heads,) * 3, heads), check_vma=False
        )
        form = jax_flash.block_mask(masks.causal(), q_len=T, kv_len=S, block=16)
        of_form = dataclasses.replace(form, numbers=P("data", "model"), bits=P("data"))
        call = functools.partial(jax_flash.flash_attention, backend="cpu")
        mapped = jax.shard_map(
            lambda q, k, v, m: call(q, k, v, block_mask=m),
            mesh=mesh, in_specs=(*specs[:3], of_form), out_specs=heads,
        )  # fmt: skip
        assert jax.eval_shape(mapped, q, k, v, form).shape == q.shape
    want = gradients(reference.attention, q, k, v, block_mask=m)
    placed = jax.tree.map(
        lambda spec, x: jax.device_put(x, NamedSharding(mesh, spec)),
        specs,
        (q, k, v, m),
        is_leaf=lambda x: isinstance(x, P),
    )
    compiled = jax.jit(step).lower(*placed).compile()
    assert collectives(compiled) == []
    close(compiled(*placed), want)


def test_what_is_hidden_reaches_nothing(host_backend):
    """NaN in keys and queries of empty blocks, and in hidden pairs of partial ones."""
    q, k, v = qkv()
    m = jax_flash.block_mask(
        lambda b, h, q, k: (k < 37) & (k != 5) & (q >= 20), q_len=T, kv_len=S, block=16
    )
    got, want = (
        jax.jit(
            lambda k, v: gradients(
                jax_flash.flash_attention, q, k, v, block_mask=m, backend=host_backend
            )
        )(k.at[:, hidden].set(x), v.at[:, hidden].set(x))
        for hidden in [np.r_[5, 37:S]]
        for x in (jnp.nan, 0.0)
    )
    close(got, want)
    assert not np.any(np.asarray(got[1][:, :20]))
