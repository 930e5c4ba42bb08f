"""Measures attention on a GPU, peer beside peer in one run, and draws the charts.

    python benchmarks/run.py            # every cell of shapes.py, forward and training
    python benchmarks/run.py --grouped  # grouped heads, as nearly every model has them
    python benchmarks/run.py --others   # documents, windows, other head dims

Shapes of a user's: `python -m jax_flash --shape`.

Times are device times: calls are queued faster than the device runs them, and a round ends when the
last result is there. The peers of a cell take turns, round by round; a time is the median of the
rounds. Writes build/benchmarks/<gpu>/<commit>.json with GPU, driver, versions and command, and
beside it the charts (PNG) and a Markdown table, after each pass. The extra `bench` brings PyTorch.
"""

import argparse
import functools
import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from common import charts, exact, machine, peers, runs, shapes
from common.shapes import Cell
from tqdm import tqdm

WITH_ERROR = ("jax_flash", "jax_cudnn")
PEAKED = 8  # factor of q and k for a peaked softmax: errors at PEAKED_LENGTH
PEAKED_LENGTH = 4096


def main() -> None:
    options = parse()
    machine.say_what_is_missing()
    chosen = [peer for peer in peers.all_peers() if peer.name in options.peers]
    scale = (options.tokens, options.model_dim, tuple(options.lengths))
    main_cells = shapes.main_cells(*scale)
    cells = main_cells + shapes.feature_cells(*scale)
    if options.grouped or options.others:
        cells, main_cells = [], []
        if options.grouped:
            cells += shapes.grouped_cells()
        if options.others:
            cells += shapes.other_cells()
    flat = draw_inputs(max(x.batch * x.length * x.heads * x.head_dim for x in cells))
    ceiling = [runs.measure_product()]
    records = []
    peaked = {}
    for of in options.passes:
        programs = runs.build_all(of, cells, chosen, exact.prepare if options.errors else None)
        for cell in (progress := tqdm(cells)):
            progress.set_description(f"{of}: {cell.name}")
            found = {peer: programs[cell, peer.name] for peer in chosen}
            runnable = {peer: one for peer, one in found.items() if not isinstance(one, str)}
            refused = {peer.name: one for peer, one in found.items() if peer not in runnable}
            inputs = inputs_of(cell, flat)
            check = functools.partial(check_cell, cell, inputs) if options.errors else None
            record = runs.measure_cell(cell, of, runnable, inputs, check)
            records.append(record | {"no": refused})
        ceiling.append(runs.measure_product())
        if options.errors and of == "forward":
            for cell in main_cells:
                if cell.length == PEAKED_LENGTH:
                    both = {n: programs[cell, n] for n in WITH_ERROR if n in options.peers}
                    peaked[cell.name] = measure_peaked(cell, both, flat)
        write(options, chosen, records, ceiling, main_cells, peaked)  # a later pass may be cut off


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [peer.name for peer in peers.all_peers()]
    parser.add_argument("--grouped", action="store_true", help="grouped heads alone")
    text = "documents, windows and other head dims alone"
    parser.add_argument("--others", action="store_true", help=text)
    machine.add_peers(parser, names, names)
    parser.add_argument("--passes", nargs="+", choices=shapes.PASSES, default=list(shapes.PASSES))
    parser.add_argument("--lengths", nargs="+", type=int, default=shapes.LENGTHS)
    parser.add_argument("--tokens", type=int, default=shapes.TOKENS)
    parser.add_argument("--model-dim", type=int, default=shapes.MODEL_DIM)
    parser.add_argument("--no-errors", dest="errors", action="store_false")
    parser.add_argument("--commit", default=None, help="name of the results; default: git's")
    machine.add_output(parser)
    return parser.parse_args()


def draw_inputs(size: int) -> np.ndarray:
    """Draws four flat arrays from a normal distribution, from which every cell takes its inputs."""
    rng = np.random.default_rng(0)
    return rng.standard_normal((4, size), np.float32).astype(ml_dtypes.bfloat16)


def inputs_of(cell: Cell, flat: np.ndarray) -> tuple[np.ndarray, ...]:
    """Returns q, k, v, dout `[B, T, N, H]`, of v and dout its own H."""
    heads = (cell.heads, cell.kv_heads, cell.kv_heads, cell.heads)
    dims = (cell.head_dim, cell.head_dim, cell.columns, cell.columns)
    found = [(cell.batch, cell.length, n, dim) for n, dim in zip(heads, dims, strict=True)]
    return tuple(
        values[: math.prod(shape)].reshape(shape) for values, shape in zip(flat, found, strict=True)
    )


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


def write(
    options: argparse.Namespace,
    chosen: list[peers.Peer],
    records: list[dict[str, Any]],
    ceiling: list[float],
    main_cells: Sequence[Cell],
    peaked: dict[str, dict[str, float]],
) -> None:
    """Writes the numbers, the charts and the table."""
    about, folder = runs.describe(options, "benchmarks/run.py", ceiling)
    about["peaked_error"] = peaked
    gpu, commit = about["gpu"], about["commit"]
    path = folder / f"{commit}.json"
    path.write_text(runs.in_lines(about, "cells", records))

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
    text = "\n\n".join([runs.introduce(about), *tables]) + "\n"
    (folder / f"{commit}.md").write_text(text)
    print(text)
    print(path)


if __name__ == "__main__":
    machine.require_gpu()
    main()
