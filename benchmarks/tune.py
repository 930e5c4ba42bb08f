"""Builds, checks and times variants of the forward kernel's tiles on the GPU that is present.

Every variant goes through the package: the sources of cuda/kernels, the run-time compiler, the
custom call. A result is compared with float64 attention on a few rows; times are medians, taken in
turns so that a clock that drifts hits all variants alike. The table comes last.

    python benchmarks/tune.py --head-dim 128 --length 512 1024 --causal \\
        --set tile_kv=112 --set "stages=3 query_stages=1" --set dynamic=False
"""

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import shapes

import jax_flash
from jax_flash import _tiles

ROUNDS = 5  # turns of every variant
SECONDS = 0.02  # of one turn
ROWS = 64  # queries that are checked


def main() -> None:
    """Times the variants of every cell and prints one table."""
    options = parse()
    chosen = _tiles.choose_tiles
    rows = []
    for length in options.length:
        cell = shapes.Cell(
            max(1, shapes.TOKENS // length),
            length,
            shapes.MODEL_DIM // options.head_dim,
            shapes.MODEL_DIM // options.head_dim,
            options.head_dim,
            options.causal,
        )
        rng = np.random.default_rng(length)
        shape = (cell.batch, cell.length, cell.heads, cell.head_dim)
        q, k, v = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for _ in range(3))
        calls = {}
        for text in ["", *options.set]:
            changes = dict(read(word) for word in text.split())
            _tiles.choose_tiles = functools.partial(choose_changed, chosen, changes)
            # A function of its own per variant: jit would take the first one's compilation.
            attend = jax.jit(
                functools.partial(
                    jax_flash.flash_attention, is_causal=options.causal, backend="cuda"
                )
            )
            try:
                calls[text or "as chosen"] = attend.lower(q, k, v).compile()
            except ValueError as error:
                rows.append(f"{cell.name:24s} {text:40s} {error}")
        _tiles.choose_tiles = chosen
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(ROUNDS):
            for name, call in calls.items():
                times[name].append(seconds(call, q, k, v))
        for name, call in calls.items():
            median = statistics.median(times[name])
            error = error_of(np.asarray(call(q, k, v)[0], np.float64), q, k, v, cell.causal)
            rate = cell.flops("forward") / median / 1e12
            rows.append(
                f"{cell.name:24s} {name:40s} {1e3 * median:8.3f} ms {rate:5.0f} {error:.1e}"
            )
    print("\n".join(["cell, variant, time, TFLOP/s, relative error", *rows]))


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--length", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--set", action="append", default=[], help="fields of ForwardTiles")
    return parser.parse_args()


def choose_changed(
    choose: Callable[..., _tiles.ForwardTiles], changes: dict[str, Any], *arguments: Any
) -> _tiles.ForwardTiles:
    """Chooses tiles for (problem, shapes, gpu) and changes some fields.

    Raises:
      ValueError: the GPU's shared memory does not hold the result.
    """
    tiles = dataclasses.replace(choose(*arguments), **changes)
    if tiles.shared_bytes > arguments[2].smem:
        raise ValueError(f"needs {tiles.shared_bytes} of {arguments[2].smem} bytes")
    return tiles


def read(word: str) -> tuple[str, Any]:
    """Reads "field=value" with the type that the field of ForwardTiles has."""
    name, value = word.split("=")
    return name, value == "True" if value in ("True", "False") else int(value)


def seconds(call: Any, *arrays: jax.Array) -> float:
    """Returns the time of one call, over as many as fill SECONDS."""
    jax.block_until_ready(call(*arrays))
    start = time.perf_counter()
    jax.block_until_ready(call(*arrays))
    count = max(3, int(SECONDS / (time.perf_counter() - start)))
    start = time.perf_counter()
    jax.block_until_ready([call(*arrays) for _ in range(count)][-1])
    return (time.perf_counter() - start) / count


def error_of(out: np.ndarray, q: Any, k: Any, v: Any, causal: bool) -> float:
    """Relative error of ROWS rows of the first head of `out` [T, N, Hv] against float64."""
    length = out.shape[0]
    rows = np.linspace(0, length - 1, min(ROWS, length)).astype(int)
    q64, k64, v64 = (np.asarray(x[0, :, 0], np.float64) for x in (q, k, v))
    logits = q64[rows] @ k64.T / np.sqrt(q64.shape[-1])
    if causal:
        logits[np.arange(length)[None] > rows[:, None]] = -np.inf
    weights = np.exp(logits - logits.max(1, keepdims=True))
    exact = weights @ v64 / weights.sum(1, keepdims=True)
    return float(np.linalg.norm(out[rows, 0] - exact) / np.linalg.norm(exact))


if __name__ == "__main__":
    main()
