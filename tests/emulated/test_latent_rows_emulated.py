"""Latent decoding of packed rows by Hopper's kernels, in the emulator."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash

from ..emulator import Emulator
from ..latent_rows_cases import Packed, draw
from .test_latent_emulated import Latent

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # Two tiles of rows; parts that end within units.
    "contiguous": ({"lengths": (200, 1, 0, 130), "heads": 80}, {"parts": 3}),
    # New rows over two blocks; scales that are no powers of two, and some that are extreme.
    "pages of 16": (
        {
            "lengths": (129, 2, 66), "heads": 16, "tokens": 3, "page": 16, "appends": True,
            "odd_scales": True,
        },
        {"parts": 2},
    ),
    "pages of 3": (
        {"lengths": (150, 70), "heads": 8, "tokens": 2, "page": 3, "window": 80},
        {"parts": 3},
    ),
    # Few query rows: parts that end within units, scales of which some are extreme.
    "few": (
        {"lengths": (300, 1, 0, 130), "heads": 16, "odd_scales": True}, {"parts": 3}
    ),
    "chosen": ({"lengths": (90, 170), "heads": 16, "tokens": 2, "page": 16, "chosen": 70}, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_case(name: str, emulator: Emulator):
    options, tiling = CASES[name]
    case = draw(**options)
    got = emulator.run(Latent(case, tiling), seed=2)  # type: ignore[arg-type]
    case.compare(got)


def test_numbers_that_are_none_reach_what_sees_them(emulator: Emulator):
    case = draw(lengths=(40, 40), heads=16, tokens=2)
    cache = np.asarray(case.arrays["key_cache"]).copy()
    cache[0, 38, 0, 3] = 0x7F  # a NaN of float8: its scale is finite
    cache[1, 39, 0, 512 + 3] = 0xFF  # a scale that is not
    arrays = case.arrays | {"key_cache": jnp.asarray(cache)}
    got = emulator.run(Latent(Packed(arrays), {}), seed=2)  # type: ignore[arg-type]
    assert isinstance(got, jax_flash.Decoded)
    assert np.isnan(np.float32(got.out[0])).all(axis=(1, 2)).tolist() == [True, True]
    assert np.isnan(np.float32(got.out[1])).any(axis=(1, 2)).tolist() == [False, True]


@pytest.mark.parametrize("heads", [128, 16])
def test_a_page_that_is_none_gives_nan(heads: int, emulator: Emulator):
    """Two tiles of rows, whose CTAs convert half of a block's rows each, or few rows."""
    case = draw(lengths=(70, 70, 70), heads=heads, page=16, odd_scales=True)
    table = np.asarray(case.arrays["page_table"]).copy()
    table[0, 1], table[2, 3] = -1, 1 << 20  # of either half
    arrays = case.arrays | {"page_table": jnp.asarray(table)}
    got = emulator.run(Latent(Packed(arrays), {}), seed=2)  # type: ignore[arg-type]
    assert isinstance(got, jax_flash.Decoded)
    assert np.isnan(np.float32(got.out)).all(axis=(1, 2, 3)).tolist() == [True, False, True]
    assert case.expected is not None
    off = np.abs(np.float64(got.out[1]) - case.expected[1])
    assert (off < 0.06 * np.sqrt(np.mean(case.expected[1] ** 2))).all()
