"""Random batches over pages of eight bits, of which some requests' are copied, beside "xla"."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from jax_flash import _gpu
from jax_flash._gpu import copies

from ..emulator import Emulator
from ..numpy_oracle import DTYPES
from ..quantized_cases import FLOAT8, INT8, rounded
from ..ragged_cases import run

TOKENS, ROWS, PAGE, COLUMNS, N, K, H = 96, 7, 16, 10, 8, 2, 64
PAGE_BYTES = 2 * PAGE * K * 2 * H


def draw(rng: np.random.Generator, dtype: str, window: int | None) -> dict[str, np.ndarray]:
    """Pages that requests share or have twice, wrong ones, and anything where none is needed."""
    rows, pages = int(rng.integers(2, ROWS + 1)), int(rng.choice([24, 75]))
    counts = rng.choice([0, 1, 2, 5, 17, 30, 60], rows)
    counts[np.cumsum(counts) > TOKENS - 6] = 0
    lengths = np.full(ROWS, 2**31 - 1, np.int32)
    lengths[:rows] = counts + rng.integers(0, COLUMNS * PAGE - counts + 1)
    starts = np.full(ROWS + 1, -5, np.int32)
    starts[: rows + 1] = rng.integers(0, 7) + np.concatenate([[0], np.cumsum(counts)])
    table = rng.integers(-5, 10**6, (ROWS, COLUMNS)).astype(np.int32)
    prefix, seen = rng.integers(0, pages, COLUMNS), np.zeros(pages, bool)
    for b in range(rows):
        end = -(-lengths[b] // PAGE)
        hidden = 0 if window is None else max(lengths[b] - counts[b] - window, 0) // PAGE
        table[b, hidden:end] = (prefix, rng.integers(0, pages, COLUMNS))[b % 2][hidden:end]
        if counts[b]:
            seen[table[b, hidden:end]] = True
            if rng.random() < 0.15:
                table[b, rng.integers(hidden, end)] = rng.choice([-1, pages, 10**9])
    arrays: dict[str, Any] = {"query": np.full((TOKENS, N, H), np.nan, DTYPES["bfloat16"])}
    own = slice(starts[0], starts[rows])
    arrays["query"][own] = rng.standard_normal(arrays["query"][own].shape)
    for name in ("key", "value"):
        scale = 0.02 * np.exp(rng.uniform(-1, 1, (pages, K))).astype(np.float32)
        x = rng.standard_normal((pages, PAGE, K, H))
        x[~seen] = np.nan
        arrays[f"{name}_pages"] = rounded(x, scale[:, None, :, None], dtype)
        scale[~seen] = np.nan
        arrays[f"{name}_scale"] = scale
    given = {"lengths": lengths, "page_table": table, "query_starts": starts}
    sinks = rng.standard_normal(N).astype(np.float32)
    return arrays | given | {"rows": np.int32(rows), "sinks": sinks}


@dataclasses.dataclass
class Call:
    """A call with place for so many pages, of requests of so many query rows."""

    arrays: dict[str, np.ndarray]
    options: dict[str, Any]
    place: int
    fewest: int

    def run(self, backend: str) -> Any:
        with contextlib.ExitStack() as stack:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(copies, "MOST_BYTES", self.place * PAGE_BYTES)
            patch.setattr(copies, "FEWEST_ROWS", self.fewest)
            stack.enter_context(_gpu.prefer("pages"))
            jax.clear_caches()
            return jax.tree.map(np.asarray, run(self.arrays, backend=backend, **self.options))


@pytest.mark.parametrize(("dtype", "window"), [(INT8, 37), (FLOAT8, None)])
def test_random_batches(dtype: str, window: int | None, emulator: Emulator):
    rng = np.random.default_rng(window or 0)
    options = {"local_window_size": window, "softcap": 5.0}
    for place, fewest in ((99, 1), (99, 256), (12, 1), (9, 129), (24, 1)):
        call = Call(draw(rng, dtype, window), options, place, fewest)
        got: Any = emulator.run(call, seed=place)  # type: ignore[arg-type]
        expected = run(call.arrays, backend="xla", **options)
        for x, y in zip(got[:2], expected[:2], strict=True):
            np.testing.assert_allclose(
                x.astype(np.float32), np.asarray(y, np.float32), rtol=0.02, atol=0.04
            )
