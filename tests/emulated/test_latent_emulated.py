"""Latent decoding by Hopper's kernels of their own, in the emulator."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash._gpu import sm90_latent

from ..decode_cases import Arguments, Case, compare
from ..emulator import Emulator
from ..ragged_cases import Batch, Drawn


@dataclasses.dataclass
class Latent:
    """A case by these kernels, by a tiling of its own."""

    arguments: Arguments | Drawn | Call
    tiling: dict[str, Any]

    def run(self, backend: str) -> jax_flash.Decoded | jax_flash.Attended:
        made = []

        def choose(*call):
            made.append(dataclasses.replace(chosen(*call), **self.tiling))
            return made[-1]

        chosen, sm90_latent.choose = sm90_latent.choose, choose
        jax.clear_caches()
        try:
            got = jax.tree.map(np.asarray, self.arguments.run(backend))
        finally:
            sm90_latent.choose = chosen
        assert made, "another kernel has run"
        return got


def latent(name: str, **changes) -> Case:
    options = {"K": 1, "H": 576, "Hv": 512, "latent": True, "dtype": "bfloat16", "appends": False}
    return Case(name, **{**options, **changes})


CASES: list[tuple[Case, dict[str, Any]]] = [
    # Two tiles of rows; parts that end within units, of which one is an odd number of blocks.
    (latent("two tiles", N=128, lengths=(200, 1, 0, 130), most=200), {"parts": 3}),
    # Several tokens in a tile: what some rows see and others do not; new keys over two blocks.
    (latent("tokens", N=16, T=4, lengths=(129, 2, 66), appends=True), {"parts": 2}),
    # Rows of 33, 8, 15 and 4 blocks, and as many parts but one: each way to merge them.
    (latent("many parts", N=16, lengths=(2100, 500, 900, 250), most=2112), {"parts": 59}),
    (latent("pages of 64", N=64, T=1, page=64, lengths=(200, 64, 0, 65), sinks=True), {"parts": 5}),
    # A box is a position: two of a block for each lane.
    (latent("pages of 3", N=16, T=2, page=3, lengths=(150, 40), appends=True), {"parts": 3}),
    (latent("pages of 16", N=33, T=3, page=16, lengths=(150, 40), softcap=3.0, window=70,
            dtype="float16", appends=True), {"parts": 3}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "tiling"), CASES, ids=[case.name.replace(" ", "-") for case, _ in CASES]
)
def test_case(case: Case, tiling: dict[str, Any], emulator: Emulator):
    arguments = case.draw()
    compare(arguments, emulator.run(Latent(arguments, tiling), seed=2))  # type: ignore[arg-type]


def test_requests_over_pages(emulator: Emulator):
    batch = Batch("latent", counts=(1, 5, 0, 1), before=(70, 0, 3, 130), tokens=9, requests=5,
                  page=16, columns=10, N=16, K=1, H=576, Hv=512, latent=True,
                  dtype="bfloat16")  # fmt: skip
    drawn = batch.draw(2)
    drawn.compare(emulator.run(Latent(drawn, {}), seed=2))  # type: ignore[arg-type]


@dataclasses.dataclass
class Call:
    """A call of decode_attention with these arrays."""

    arrays: dict[str, Any]

    def run(self, backend: str) -> jax_flash.Decoded:
        return jax_flash.decode_attention(
            value_cache=None, value_dim=512, backend=backend, **self.arrays
        )


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "pages of 64"])
@pytest.mark.parametrize(
    ("tiling", "count"),
    [
        ({"takes_places": False, "cluster": 1}, 100),
        ({"takes_places": True, "cluster": 1}, 100),
        ({"takes_places": True, "cluster": 2}, 140),
        ({"takes_places": True, "cluster": 2}, 60),  # a CTA has no block
    ],
    ids=["packed", "as they are", "in clusters", "in clusters, one block"],
)
def test_chosen_keys(tiling: dict[str, Any], count: int, paged: bool, emulator: Emulator):
    """Three rows that read chosen keys, of which a tenth are none; the last one has no page."""
    rng = np.random.default_rng(5)
    lengths, shape = (300, 170, 301), (15, 64) if paged else (3, 300)
    indices = [[rng.permutation(n)[:count] for _ in range(2)] for n in lengths]
    arrays = {
        "query": rng.normal(size=(3, 2, 16, 576)).astype(jnp.bfloat16),
        "key_cache": rng.normal(size=(*shape, 1, 576)).astype(jnp.bfloat16),
        "lengths": np.array(lengths, np.int32),
        "indices": np.where(rng.random((3, 2, count)) < 0.1, -1, indices).astype(np.int32),
    }
    arrays["indices"][0, 1] = -1  # a query that reads nothing
    if paged:
        arrays["page_table"] = rng.permutation(15).reshape(3, 5).astype(np.int32)
        arrays["page_table"][2, arrays["indices"][2, 0, 7] // 64] = -1
    call = Call({name: jnp.asarray(x) for name, x in arrays.items()})
    got = emulator.run(Latent(call, tiling), seed=3)  # type: ignore[arg-type]
    expected = call.run("xla")
    assert np.isnan(expected.lse[2]).all()
    np.testing.assert_allclose(np.float32(got.out), np.float32(expected.out), atol=0.02)
    np.testing.assert_allclose(got.lse, expected.lse, atol=1e-3)


def test_weights_that_decide_are_exact(emulator: Emulator):
    """A head's base is the maximum of block 0; in block 2 or 3 it meets 20 to 120 times the weight.

    A weight that was rounded beside a sum that was not would bring all columns 0.2 % too far.
    """
    heads, length = np.arange(16), 250
    at = heads * 7 + 130
    logits = np.arange(3.0, 4.8, 1 / 64)
    rounded = np.float64(np.exp(logits).astype(jnp.bfloat16)) / np.exp(logits) - 1
    logits = logits[np.abs(rounded) > 1.3e-3][heads]
    # Features behind the values: a head's own key, all keys, a logit.
    query, keys = np.zeros((1, 1, 16, 576)), np.zeros((1, length, 1, 576))
    query[0, 0, heads, 512 + heads] = query[..., 528:530] = 24.0
    keys[0, at, 0, 512 + heads], keys[0, 1:, 0, 528] = 60.0, -60.0
    keys[0, at, 0, 529] = logits
    values = np.random.default_rng(7).normal(size=(16, 512)).astype(jnp.bfloat16)
    keys[0, at, 0, :512] = values
    call = Call(
        {
            "query": jnp.asarray(query, "bfloat16"),
            "key_cache": jnp.asarray(keys, "bfloat16"),
            "lengths": jnp.full(1, length, "int32"),
        }
    )
    got = np.float64(emulator.run(Latent(call, {"parts": 1}), seed=2).out[0, 0])  # type: ignore[arg-type]
    factor = (got * np.float64(values)).sum(-1) / (np.float64(values) ** 2).sum(-1)
    np.testing.assert_allclose(factor, 1 / (1 + np.exp(-logits)), rtol=5e-4)


@pytest.mark.parametrize(
    ("batch", "most", "parts"),
    [(128, 66, 64), (32, 66, 64), (32, 33, 32), (128, 33, 33), (48, 66, 66), (1, 66, 64),
     (1, 132, 128), (2, 66, 64), (3, 66, 66)],
)  # fmt: skip
def test_parts_end_with_rows_where_that_costs_little(batch: int, most: int, parts: int):
    assert sm90_latent._parts(batch, most) == parts
