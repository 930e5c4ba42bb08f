"""Measures attention on a GPU, peer beside peer in one run, and draws the charts.

    python benchmarks/run.py            # every cell of shapes.py, forward and training
    python benchmarks/run.py --quick    # three lengths, jax_flash beside cuDNN
    python benchmarks/run.py --grouped  # grouped heads, as nearly every model has them
    python benchmarks/run.py --shape 8,2048,32,8,128    # a shape of yours: B,T,N,K,H

Times are device times: calls are queued faster than the device runs them, and a round ends when the
last result is there. The peers of a cell take turns, round by round; a time is the median of the
rounds. Writes build/benchmarks/<gpu>/<commit>.json with GPU, driver, versions and command, and
beside it the charts (PNG) and a Markdown table, after each pass. The extra `bench` brings PyTorch.
"""

import argparse
import datetime
import functools
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

import charts
import exact
import jax
import jax.numpy as jnp
import machine
import ml_dtypes
import numpy as np
import peers
import shapes
from shapes import Cell, Pass
from tqdm import tqdm

ROUNDS = 5
ROUND_SECONDS = 0.02  # long beside the 50 µs that waiting for the last result costs
COMPILE_THREADS = 8
PRODUCT = 8192  # side of the matrix product that gives the ceiling
WITH_ERROR = ("jax_flash", "jax_cudnn")
PEAKED = 8  # factor of q and k for a peaked softmax: errors at PEAKED_LENGTH
PEAKED_LENGTH = 4096


def main() -> None:
    options = parse()
    machine.say_what_is_missing()
    chosen = [peer for peer in peers.all_peers() if peer.name in options.peers]
    scale = (options.tokens, options.model_dim, tuple(options.lengths))
    main_cells = shapes.main_cells(*scale)
    cells = main_cells if options.quick else main_cells + shapes.feature_cells(*scale)
    if options.grouped or options.shape:
        cells = shapes.grouped_cells() if options.grouped else []
        cells += [
            Cell(batch, length, heads, kv_heads, head_dim, causal)
            for batch, length, heads, kv_heads, head_dim in options.shape
            for causal in (False, True)
        ]
        main_cells = []
    flat = draw_inputs(max(x.batch * x.length * x.heads * x.head_dim for x in cells))
    ceiling = [measure_product()]
    records = []
    peaked = {}
    for of in options.passes:
        programs = build_all(of, cells, chosen, exact.prepare if options.errors else None)
        for cell in (progress := tqdm(cells)):
            progress.set_description(f"{of}: {cell.name}")
            found = {peer: programs[cell, peer.name] for peer in chosen}
            runnable = {peer: one for peer, one in found.items() if not isinstance(one, str)}
            refused = {peer.name: one for peer, one in found.items() if peer not in runnable}
            inputs = inputs_of(cell, flat)
            check = functools.partial(check_cell, cell, inputs) if options.errors else None
            record = measure_cell(cell, of, runnable, inputs, check)
            records.append(record | {"no": refused})
        ceiling.append(measure_product())
        if options.errors and of == "forward":
            for cell in main_cells:
                if cell.length == PEAKED_LENGTH:
                    both = {n: programs[cell, n] for n in WITH_ERROR if n in options.peers}
                    peaked[cell.name] = measure_peaked(cell, both, flat)
        write(options, chosen, records, ceiling, main_cells, peaked)  # a later pass may be cut off


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


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [peer.name for peer in peers.all_peers()]
    parser.add_argument("--quick", action="store_true", help="three lengths, us and cuDNN")
    parser.add_argument("--grouped", action="store_true", help="grouped heads alone")
    parser.add_argument(
        "--shape", type=read_shape, action="append", default=[], help="B,T,N,K,H, full and causal"
    )
    machine.add_peers(parser, names)
    parser.add_argument("--passes", nargs="+", choices=shapes.PASSES, default=list(shapes.PASSES))
    parser.add_argument("--lengths", nargs="+", type=int, default=None)
    parser.add_argument("--tokens", type=int, default=shapes.TOKENS)
    parser.add_argument("--model-dim", type=int, default=shapes.MODEL_DIM)
    parser.add_argument("--no-errors", dest="errors", action="store_false")
    parser.add_argument("--commit", default=None, help="name of the results; default: git's")
    machine.add_output(parser)
    options = parser.parse_args()
    if options.lengths is None:
        options.lengths = (1024, 4096, 16384) if options.quick else shapes.LENGTHS
    if options.peers is None:
        options.peers = ["jax_flash", "jax_cudnn"] if options.quick else names
    return options


def read_shape(text: str) -> tuple[int, ...]:
    """Reads "B,T,N,K,H"."""
    sizes = tuple(int(size) for size in text.split(","))
    if len(sizes) != 5 or min(sizes) < 1 or sizes[2] % sizes[3]:
        raise argparse.ArgumentTypeError("want B,T,N,K,H with N a multiple of K")
    return sizes


def draw_inputs(size: int) -> np.ndarray:
    """Draws four flat arrays from a normal distribution, from which every cell takes its inputs."""
    rng = np.random.default_rng(0)
    return rng.standard_normal((4, size), np.float32).astype(ml_dtypes.bfloat16)


def inputs_of(cell: Cell, flat: np.ndarray) -> tuple[np.ndarray, ...]:
    """Returns q, k, v, dout `[B, T, N, H]`."""
    heads = (cell.heads, cell.kv_heads, cell.kv_heads, cell.heads)
    found = [(cell.batch, cell.length, n, cell.head_dim) for n in heads]
    return tuple(
        values[: math.prod(shape)].reshape(shape) for values, shape in zip(flat, found, strict=True)
    )


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


def check_cell(
    cell: Cell, inputs: tuple[np.ndarray, ...], name: str, results: tuple[Any, ...]
) -> dict[str, float]:
    """Returns the errors of the peers that are compared; nothing of the others."""
    return exact.errors(cell, inputs, results) if name in WITH_ERROR else {}


def measure_peaked(cell: Cell, programs: dict[str, Any], flat: np.ndarray) -> dict[str, float]:
    """Returns the error of each peer's result where q and k are PEAKED times as large."""
    q, k, v, dout = inputs_of(cell, flat)
    factor = np.asarray(PEAKED, q.dtype)
    inputs = (q * factor, k * factor, v, dout)
    found = {}
    for name, program in programs.items():
        if not isinstance(program, str):
            found[name] = exact.errors(cell, inputs, program.load(inputs)())["out"]
    return found


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


def write(
    options: argparse.Namespace,
    chosen: list[peers.Peer],
    records: list[dict[str, Any]],
    ceiling: list[float],
    main_cells: Sequence[Cell],
    peaked: dict[str, dict[str, float]],
) -> None:
    """Writes the numbers, the charts and the table."""
    about, folder = describe(options, "benchmarks/run.py", ceiling)
    about["peaked_error"] = peaked
    gpu, commit = about["gpu"], about["commit"]
    path = folder / f"{commit}.json"
    path.write_text(in_lines(about, "cells", records))

    looks = {peer.name: (peer.label, peer.color) for peer in chosen}
    tables, main_speeds = [], {}
    for of in dict.fromkeys(record["pass"] for record in records):
        speeds = [
            (Cell(**{k: v for k, v in record["cell"].items() if k != "name"}), record["tflops"])
            for record in records
            if record["pass"] == of
        ]
        tables.append(charts.table(speeds, of, looks, "jax_flash", "jax_cudnn"))
        if in_blocks := charts.blocks(speeds, "jax_flash"):
            tables.append(in_blocks)
        main_speeds[of] = [(cell, found) for cell, found in speeds if cell in set(main_cells)]
        if main_cells:
            charts.draw(main_speeds[of], of, looks, gpu, folder / f"{commit}-{of}.png")
        if of == "training":
            labels = {name: label for name, (label, _) in looks.items()}
            tables.append(charts.scratch(records, of, labels))
    if main_cells and {"jax_flash", "jax_cudnn"} <= set(looks):
        tables.insert(0, charts.summary(main_speeds, looks, "jax_flash", "jax_cudnn"))
    both = "jax_flash_deterministic", "jax_flash"
    if main_cells and "training" in main_speeds and set(both) <= set(looks):
        tables.append(charts.compare(main_speeds["training"], looks, *both))
    if peaked:
        found = "; ".join(
            f"{cell} " + " / ".join(f"{error:.2e}" for error in errors.values())
            for cell, errors in peaked.items()
        )
        names = " / ".join(looks[name][0] for name in WITH_ERROR if name in looks)
        tables.append(f"Relative error, q and k times {PEAKED} ({names}): {found}.")
    text = "\n\n".join([introduce(about), *tables]) + "\n"
    (folder / f"{commit}.md").write_text(text)
    print(text)
    print(path)


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
        if word in ("--commit", "--output"):
            next(words)
        else:
            kept.append(word)
    return shlex.join(["python", script, *kept])


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


if __name__ == "__main__":
    machine.require_gpu()
    main()
