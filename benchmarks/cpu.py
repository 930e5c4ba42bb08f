"""Measures attention on a CPU beside PyTorch's flash attention and jax.nn's (XLA), in one process.

    python benchmarks/cpu.py                        # all cells, about 3 minutes on 2 cores
    python benchmarks/cpu.py --only "1024 causal"   # those with these words in their name

B 1, N 8, H 64; T = S; forward, and forward with backward. Every library uses all cores. The
libraries of a cell take turns, round by round, and a time is the best of the rounds: on a machine
with other work every slower one measures that work. Rates count 4 B N T S H operations for the
forward pass, half of that if causal, and 3.5 times as many with the backward pass.

Prints a Markdown table; writes build/benchmarks/cpu/<processor>.json, where cells measured before
by the same command stay unless they are measured again. The extra `bench` brings PyTorch.
"""

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import machine
from tqdm import tqdm

import jax_flash

BATCH, HEADS, HEAD_DIM = 1, 8, 64
LENGTHS = (1024, 4096)
PEERS = ("jax_flash", "torch", "xla")
PAUSE = 0.02  # seconds in which the threads of the library before go to sleep
Run = Callable[[], Any]


def main() -> None:
    """Measures the chosen cells and prints all that are known."""
    options = parse()
    machine.say_what_is_missing()
    path = options.output / "cpu" / f"{machine.processor_slug()}.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    described = describe_machine()
    cells: dict[str, dict[str, float]] = results.get("seconds", {})
    if results.get("machine") != described:
        cells = {}
    chosen = [
        cell
        for length in LENGTHS
        for causal in (False, True)
        for dtype in ("float32", "bfloat16")
        for backward in (False, True)
        if options.only in cell_name(*(cell := (length, causal, dtype, backward)))
    ]
    progress = tqdm(chosen, disable=None)
    for length, causal, dtype, backward in progress:
        name = cell_name(length, causal, dtype, backward)
        progress.set_description(name)
        cells[name] = measure(length, causal, dtype, backward, options)
        path.parent.mkdir(parents=True, exist_ok=True)
        results = {
            "machine": described,
            "command": "python benchmarks/cpu.py",
            "seconds": dict(sorted(cells.items())),
        }
        path.write_text(json.dumps(results, indent=2) + "\n")
    print(table(cells))
    print(", ".join(f"{key} {value}" for key, value in described.items()))


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help="words in the name of a cell")
    known = [peer for peer in PEERS if peer != "torch" or machine.has_torch()]
    machine.add_peers(parser, known, known)
    machine.add_output(parser)
    parser.add_argument("--seconds", type=float, default=0.8, help="spent on a library in a cell")
    return parser.parse_args()


def cell_name(length: int, causal: bool, dtype: str, backward: bool) -> str:
    """Names a cell in the result file."""
    passes = "forward+backward" if backward else "forward"
    return f"{length} {'causal' if causal else 'full'} {dtype} {passes}"


def operations(name: str) -> float:
    """Counts the floating-point operations of a cell."""
    length, mask, _, passes = name.split()
    count = 4.0 * BATCH * HEADS * HEAD_DIM * int(length) ** 2
    return count * (0.5 if mask == "causal" else 1.0) * (3.5 if "+" in passes else 1.0)


def measure(
    length: int, causal: bool, dtype: str, backward: bool, options: argparse.Namespace
) -> dict[str, float]:
    """Times one cell.

    Returns: seconds of the best round, by library.
    """
    random = np.random.default_rng(0)
    arrays = [
        random.standard_normal((BATCH, length, HEADS, HEAD_DIM), np.float32) for _ in range(4)
    ]
    runs: dict[str, Run] = {}
    for peer in options.peers:
        make = torch_run if peer == "torch" else jax_run
        runs[peer] = make(peer, arrays, causal, dtype, backward)
    times: dict[str, list[float]] = {peer: [] for peer in runs}
    while unfinished := [
        peer
        for peer, known in times.items()
        if len(known) < 2 or (sum(known) < options.seconds and len(known) < 20)
    ]:
        for peer in unfinished:
            time.sleep(PAUSE)
            start = time.perf_counter()
            runs[peer]()
            times[peer].append(time.perf_counter() - start)
    return {peer: min(known) for peer, known in times.items()}


def jax_run(peer: str, arrays: list[np.ndarray], causal: bool, dtype: str, backward: bool) -> Run:
    """Compiles our attention, or XLA's, on arrays `[B, T, N, H]`."""
    q, k, v, dout = (jnp.asarray(x, dtype) for x in arrays)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        if peer == "jax_flash":
            return jax_flash.flash_attention(q, k, v, is_causal=causal, backend="cpu")
        return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="xla")

    def step(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> Any:
        if not backward:
            return attend(q, k, v)
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(dout)

    compiled = jax.jit(step).lower(q, k, v, dout).compile()
    return lambda: jax.block_until_ready(compiled(q, k, v, dout))


def torch_run(_: str, arrays: list[np.ndarray], causal: bool, dtype: str, backward: bool) -> Run:
    """Prepares PyTorch's flash attention, in its own layout `[B, N, T, H]`."""
    torch = importlib.import_module("torch")
    attention = importlib.import_module("torch.nn.attention")
    torch.set_num_threads(os.cpu_count() or 1)
    q, k, v, dout = (
        torch.from_numpy(x).transpose(1, 2).contiguous().to(getattr(torch, dtype)) for x in arrays
    )
    inputs = [x.requires_grad_(backward) for x in (q, k, v)]

    def run() -> Any:
        with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=causal)
        return (out, torch.autograd.grad(out, inputs, dout)) if backward else out

    return run


def table(cells: dict[str, dict[str, float]]) -> str:
    """Writes the rates in GFLOP/s and their ratios as Markdown."""
    lines = [
        "| T = S | mask | dtype | pass | jax_flash | torch | XLA | vs torch | vs XLA |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    ratios: dict[str, list[float]] = {"torch": [], "xla": []}
    for name, seconds in sorted(cells.items(), key=lambda item: (int(item[0].split()[0]), item[0])):
        rates = {peer: operations(name) / seconds[peer] / 1e9 for peer in seconds}
        cols = name.split() + [f"{rates[peer]:.0f}" if peer in rates else "" for peer in PEERS]
        for peer in ("torch", "xla"):
            known = peer in rates and "jax_flash" in rates
            ratio = rates["jax_flash"] / rates[peer] if known else math.nan
            cols.append(f"{ratio:.2f}" if known else "")
            if known:
                ratios[peer].append(ratio)
        lines.append("| " + " | ".join(cols) + " |")
    means = [
        f"{math.exp(sum(map(math.log, known)) / len(known)):.2f}" if known else ""
        for known in ratios.values()
    ]
    lines.append(f"| geometric mean | | | | | | | {means[0]} | {means[1]} |")
    return "\n".join(lines)


def describe_machine() -> dict[str, str]:
    """Collects the processor and the versions."""
    versions = {
        name: importlib.metadata.version(name)
        for name in ("jax", "torch")
        if importlib.util.find_spec(name)
    }
    return {
        "processor": machine.processor_name(),
        "cores": str(os.cpu_count()),
        "python": ".".join(map(str, sys.version_info[:2])),
        **versions,
    }


if __name__ == "__main__":
    main()
