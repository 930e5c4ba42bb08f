"""paged_tpu.ragged_paged_attention beside JAX's reference of its kernel and our own call."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import (
    ref_ragged_paged_attention as theirs,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash
from jax_flash.paged_tpu import ragged_paged_attention

from ..devices import collectives, mesh_of
from ..ragged_cases import Batch


def drawn(**changes) -> tuple[dict, dict]:
    """The arguments of both forms, without NaN; the second is ours."""
    batch = Batch("pairs", **{"N": 8, "K": 4, "tokens": 28, "appends": False, **changes})
    ours = {
        name: jnp.asarray(np.nan_to_num(x) if x.dtype.kind == "f" else x)
        for name, x in batch.draw().arrays.items()
    }
    pages = jnp.stack([ours["key_pages"], ours["value_pages"]], axis=3)
    names = ("kv_lens", "page_indices", "cu_q_lens")
    values = (ours["lengths"], ours["page_table"], ours["query_starts"])
    return {
        "q": ours["query"],
        "kv_pages": pages.reshape(*pages.shape[:2], -1, pages.shape[-1]),
        **dict(zip(names, values, strict=True)),
        "num_seqs": ours["rows"][None],
    }, ours


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, "float32"),
        ({"sm_scale": 0.3, "soft_cap": 2.0, "sliding_window": 7, "mask_value": -1e30}, "float32"),
        ({"sm_scale": 0.2, "k_scale": 0.5, "v_scale": 3.0, "mask_value": None}, "float32"),
        ({"sm_scale": 0.25, "sliding_window": 1, "v_scale": 0.3}, "bfloat16"),
    ],
    ids=["plain", "window", "scales", "bfloat16"],
)
def test_it_is_what_jax_has_for_tpus(options, dtype, backend):
    arrays, _ = drawn(dtype=dtype)
    got = jax.jit(functools.partial(ragged_paged_attention, **options, backend=backend))(**arrays)
    q, pages, *requests = arrays.values()
    with jax.default_matmul_precision("highest"):  # a GPU multiplies in TF32 otherwise
        plain = theirs(q, pages, *requests, **options)
    first, last = (int(arrays["cu_q_lens"][i]) for i in (0, arrays["num_seqs"][0]))
    assert got.dtype == dtype
    # On "cuda" products of float32 have 16 bits by default.
    share = 2.0**-14 if backend == "cuda" else 2e-6
    atol = share * float(jnp.abs(plain).max()) if dtype == "float32" else 0.03
    np.testing.assert_allclose(
        got[first:last].astype("float32"), plain.astype("float32"), rtol=0, atol=atol
    )
    assert not got[:first].any()
    assert not got[last:].any()


@pytest.mark.parametrize("explicit", [False, True])
def test_pages_are_neither_copied_nor_gathered(explicit):
    arrays, ours = drawn(columns=600)
    mesh = mesh_of((1, 4), explicit)
    specs = {"q": P(None, "model"), "kv_pages": P(None, None, "model")}
    placed = {
        name: jax.device_put(np.asarray(x), NamedSharding(mesh, specs.get(name, P())))
        for name, x in arrays.items()
    }
    call = functools.partial(ragged_paged_attention, sm_scale=0.25, backend="cpu")
    with jax.set_mesh(mesh):
        compiled = jax.jit(call).lower(**placed).compile()
        assert collectives(compiled) == []
        assert compiled.memory_analysis().temp_size_in_bytes < arrays["kv_pages"].nbytes / 16
        got = compiled(**placed)
    expected = jax_flash.ragged_paged_attention(**ours, backend="cpu").out
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-6)


def test_shard_map_over_heads_and_a_wrong_request():
    """As engines call it; a page that is none gives NaN in its request alone."""
    arrays, _ = drawn()
    call = functools.partial(ragged_paged_attention, sm_scale=0.25, backend="cpu")
    specs = {"q": P(None, "model"), "kv_pages": P(None, None, "model")}
    mapped = jax.shard_map(
        lambda arrays: call(**arrays),
        mesh=mesh_of((1, 4)),
        in_specs=({name: specs.get(name, P()) for name in arrays},),
        out_specs=P(None, "model"),
    )
    expected = call(**arrays)
    wrong = arrays | {"page_indices": arrays["page_indices"].at[4, 0].set(10**6)}
    got, (first, last) = jax.jit(mapped)(wrong), np.asarray(arrays["cu_q_lens"][4:6])
    assert np.isnan(got[first:last]).all()
    rest = np.delete(np.arange(len(got)), np.arange(first, last))
    np.testing.assert_allclose(got[rest], expected[rest], rtol=0, atol=2e-6)


def test_wrong_arguments_are_named():
    arrays, _ = drawn()
    q, pages = arrays["q"], arrays["kv_pages"]
    for message, change in (
        (r"q has shape .*\[tokens, N, H\]", {"q": q[0]}),
        (r"kv_pages has shape .*\[P, S, 2 \* K, H\]", {"kv_pages": pages[:, :, :3]}),
        ("q has dtype float32 and kv_pages int16", {"kv_pages": pages.astype("int16")}),
        ("equal head dims", {"q": q[..., :8]}),
        ("q has 6 heads .* of 4", {"q": q[:, :6]}),
        ("kv_lens has dtype float32", {"kv_lens": arrays["kv_lens"].astype("float32")}),
        (r"page_indices has shape \(6,\)", {"page_indices": arrays["page_indices"][:, 0]}),
        (r"cu_q_lens has shape \(6,\); expected \(7,\)", {"cu_q_lens": arrays["cu_q_lens"][1:]}),
        (r"num_seqs has shape \(\); expected \(1,\)", {"num_seqs": 3}),
        ("sliding_window is 0", {"sliding_window": 0}),
        ("soft_cap is 0", {"soft_cap": 0.0}),
        ("mask_value is -10", {"mask_value": -10.0}),
        ("mask_value is 'low'", {"mask_value": "low"}),
        ("k_scale is 'one'", {"k_scale": "one"}),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            ragged_paged_attention(**arrays | change)
