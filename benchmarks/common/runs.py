"""Owns a run: programs compiled side by side and timed in turns, and the files that say of what.

Times are device times: calls are queued faster than the device runs them, and a round ends when the
last result is there.
"""

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# JAX and PyTorch share the GPU: JAX may not take most of its memory at its start.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
from tqdm import tqdm

from . import peers
from .shapes import Cell, Pass

ROUNDS = 5
ROUND_SECONDS = 0.02  # long beside the 50 µs that waiting for the last result costs
COMPILE_THREADS = 8
PRODUCT = 8192  # side of the matrix product that gives the ceiling


def build_all(
    of: Pass,
    cells: Sequence[Cell],
    chosen: Sequence[peers.Peer],
    prepare: Callable[[Any], Any] | None = None,
) -> dict[tuple[Cell, str], Any]:
    """Compiles the programs of one pass: by cell and peer, what `build` returns.

    `prepare` compiles beside them what a cell's results will be checked with.
    """
    jobs = [(cell, of, peer) for cell in cells for peer in chosen]
    with ThreadPoolExecutor(COMPILE_THREADS) as pool:
        if prepare is not None:
            pool.map(prepare, cells)
        built = pool.map(lambda job: build(*job), jobs)
        found = list(tqdm(built, desc=f"{of}: compiling", total=len(jobs)))
    return {(cell, peer.name): one for (cell, _, peer), one in zip(jobs, found, strict=True)}


def build(cell: Cell, of: Pass, peer: peers.Peer) -> Any:
    """Compiles one program, or returns why there is none."""
    try:
        return peer.compile(cell, of)
    except Exception as error:  # a peer's failure is a result of the comparison
        return f"{type(error).__name__}: {error}".split("\n")[0][:200]


def measure_cell(
    cell: Cell,
    of: Pass,
    programs: dict[peers.Peer, peers.Program],
    inputs: Any,
    check: Callable[[str, tuple[Any, ...]], dict[str, Any]] | None,
) -> dict[str, Any]:
    """Times the peers of a cell in turns; returns milliseconds, TFLOP/s and errors by peer.

    `check` takes a peer's name and results and returns the errors; a peer is not timed where it
    raises.
    """
    calls, failed, errors = {}, {}, {}
    for peer, program in programs.items():
        try:
            call = program.load(inputs)
            results = call()
            peer.wait(results)
            if check is not None:
                errors[peer.name] = check(peer.name, program.read(results))
        except Exception as error:  # as in build
            failed[peer.name] = f"{type(error).__name__}: {error}".split("\n")[0][:200]
            continue
        del results
        calls[peer.name] = (call, peer.wait)
    seconds = time_in_turns(calls)
    return {
        "cell": vars(cell) | {"name": cell.name},
        "pass": of,
        "ms": {name: round(1e3 * statistics.median(t), 5) for name, t in seconds.items()},
        "spread": {
            name: round((max(t) - min(t)) / statistics.median(t), 4) for name, t in seconds.items()
        },
        "tflops": {
            name: float(f"{cell.flops(of) / statistics.median(t) / 1e12:.4g}")
            for name, t in seconds.items()
        },
        "scratch_mb": {
            peer.name: one.scratch_mb
            for peer, one in programs.items()
            if one.scratch_mb is not None
        },
        "error": {name: found for name, found in errors.items() if found},
        "failed": failed,
    }


def time_in_turns(
    calls: dict[str, tuple[peers.Call, Callable[[Any], Any]]], rounds: int = ROUNDS, least: int = 3
) -> dict[str, list]:
    """Returns seconds per call, a value for each round of `least` calls or more, by name."""
    repeats = {}
    for name, (call, wait) in calls.items():
        once = queue(call, wait, least)
        repeats[name] = max(least, math.ceil(ROUND_SECONDS / once))
    seconds = {name: [] for name in calls}
    for _ in range(rounds):
        for name, (call, wait) in calls.items():
            seconds[name].append(queue(call, wait, repeats[name]))
    return seconds


def queue(call: peers.Call, wait: Callable[[Any], Any], repeats: int) -> float:
    """Queues some calls on an idle device; returns seconds per call."""
    start = time.perf_counter()
    results = None
    for _ in range(repeats):
        results = call()
    wait(results)
    return (time.perf_counter() - start) / repeats


def measure_product() -> float:
    """Measures TFLOP/s of a bfloat16 matrix product: the ceiling, in this run."""
    side = PRODUCT if jax.default_backend() == "gpu" else 256
    a, b = jax.random.normal(jax.random.key(1), (2, side, side), jnp.bfloat16)
    product = jax.jit(jnp.matmul)
    seconds = time_in_turns({"product": (lambda: product(a, b), jax.block_until_ready)})
    return round(2 * side**3 / statistics.median(seconds["product"]) / 1e12, 1)


def describe(
    options: argparse.Namespace, script: str, ceiling: list[float]
) -> tuple[dict[str, Any], Path]:
    """Returns what is about a whole run, and the folder for its results."""
    gpu = jax.devices()[0].device_kind
    folder = options.output / gpu.lower().replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    about = {
        "gpu": gpu,
        "driver": first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "commit": options.commit or first_line("git", "rev-parse", "--short=10", "HEAD"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command(script),
        "versions": versions(),
        "product_tflops": ceiling,
    }
    return about, folder


def introduce(about: dict[str, Any]) -> str:
    """Writes the sentence that opens a run's tables."""
    text = f"{about['gpu']}, driver {about['driver']}, {about['date']}, commit {about['commit']}, "
    text += f"`{about['command']}`"
    if ceiling := about["product_tflops"]:
        text += f"; {PRODUCT}³ bfloat16 product before, between and after: "
        text += f"{', '.join(map(str, ceiling))} TFLOP/s"
    return f"{text}."


def command(script: str) -> str:
    """Returns the command line, less what only names the results."""
    words = iter(sys.argv[1:])
    kept = []
    for word in words:
        if word in ("--commit", "--output", "--out"):
            next(words)
        else:
            kept.append(word)
    return shlex.join(["python", *script.split(), *kept])


def versions() -> dict[str, str]:
    found = {}
    for name in (
        "jax_flash",
        "jax",
        "jaxlib",
        "torch",
        "nvidia-cudnn-cu13",
        "nvidia-cudnn-cu12",
        "dew-flash-attn-cu13",
        "dew-flash-attn-cu12",
    ):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def in_lines(about: dict[str, Any], name: str, records: list[dict[str, Any]]) -> str:
    """Writes results as JSON: what is about all of them, then under `name` one record a line."""
    head = json.dumps(about, indent=1).removesuffix("\n}")
    lines = ",\n  ".join(json.dumps(record) for record in records)
    return f'{head},\n "{name}": [\n  {lines}\n ]\n}}\n'


def first_line(*command: str) -> str:
    """Returns the first line that a command prints; "unknown" where it does not run."""
    here = Path(__file__).resolve().parent
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=here)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return run.stdout.split("\n")[0].strip()
