"""Times installed versions of jax_flash beside each other on the device that is present.

    pip install --no-deps --target old jax_flash-OLD.whl
    pip install --no-deps --target new jax_flash-NEW.whl
    python benchmarks/compare.py old new --head-dim 64 128 --length 512 16384

A process for each folder; all compile at once, then they take turns, forth and back, so that a
clock that drifts hits all alike. Prints the TFLOP/s of each, its ratio to the first, and those of
run.py's matrix product, which comes after the turns, so that no version runs in its wake.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import shapes

ROUNDS = 6  # turns of every version: as often before the others as after them
SECONDS = 0.25  # of one turn: long beside the time that the clock takes to settle
MASKS = {"full": False, "causal": True}
PASSES = ("forward", "backward", "deterministic")  # the last: the backward, deterministic


def main() -> None:
    """Times every cell and prints one table, or answers as one of the processes."""
    options = parse()
    if options.answer:
        answer()
        return
    jobs = [
        (read_cell(options, head_dim, mask, length), of)
        for head_dim in options.head_dim
        for mask in options.mask
        for length in options.length
        for of in options.passes
    ]
    versions = [Version(folder) for folder in options.folder]
    for one in versions:
        for cell, of in jobs:
            one.ask(cell, of, 0.0)  # all compile side by side
    for one in versions:
        for _ in jobs:
            one.answer()
    print("cell, TFLOP/s of each folder, ratios to the first, product")
    for cell, of in jobs:
        speeds: list[list[float]] = [[] for _ in versions]
        for turn in range(ROUNDS):
            order = list(zip(versions, speeds, strict=True))
            for one, found in order if turn % 2 == 0 else order[::-1]:
                found.append(one.measure(cell, of, options.seconds))
        medians = [statistics.median(found) for found in speeds]
        print(
            f"{cell.name:24s} {of:13s}",
            " ".join(f"{median:6.1f}" for median in medians),
            " ".join(f"{median / medians[0]:6.3f}" for median in medians),
            f"{versions[0].measure(None, of, options.seconds):6.0f}",
            flush=True,
        )


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="*", help="of an installed version")
    parser.add_argument("--head-dim", type=int, nargs="+", default=list(shapes.HEAD_DIMS))
    parser.add_argument("--length", type=int, nargs="+", default=[512, 4096, 16384])
    parser.add_argument("--mask", nargs="+", choices=MASKS, default=list(MASKS))
    parser.add_argument("--pass", nargs="+", choices=PASSES, default=["forward"], dest="passes")
    parser.add_argument("--tokens", type=int, default=shapes.TOKENS)
    parser.add_argument("--model-dim", type=int, default=shapes.MODEL_DIM)
    parser.add_argument("--segment", type=int, help="length of packed documents")
    parser.add_argument("--window", type=int, help="keys to the left; causal alone")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of one turn")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.folder and not options.answer:
        parser.error("name the folders of the versions to compare")
    for folder in options.folder:
        if not (Path(folder) / "jax_flash").is_dir():
            parser.error(f"{folder} holds no installed jax_flash")
    return options


def read_cell(options: argparse.Namespace, head_dim: int, mask: str, length: int) -> shapes.Cell:
    heads = options.model_dim // head_dim
    batch = max(1, options.tokens // length)
    return shapes.Cell(
        batch,
        length,
        heads,
        heads,
        head_dim,
        MASKS[mask],
        window=options.window,
        segment=options.segment,
    )


class Version:
    """A process that measures with the jax_flash of one folder."""

    def __init__(self, folder: str) -> None:
        here = Path(__file__).resolve()
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(Path(folder).resolve()), str(here.parent)]),
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }
        command = [sys.executable, "-P", str(here), "--answer"]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, cell: shapes.Cell | None, of: str, seconds: float) -> None:
        """Sends a question: TFLOP/s of a cell's pass over some seconds; None: the product's."""
        assert self.process.stdin is not None
        question = [None if cell is None else vars(cell), of, seconds]
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()

    def answer(self) -> float:
        """Waits for the answer to the oldest open question."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the process ended with {self.process.wait()}; its error is above")
        return json.loads(line)

    def measure(self, cell: shapes.Cell | None, of: str, seconds: float) -> float:
        self.ask(cell, of, seconds)
        return self.answer()


def answer() -> None:
    """Answers the questions on standard input, a line for each."""
    import jax
    import run
    import tune

    known: dict[tuple[Any, ...], tuple[Any, float]] = {}
    for line in sys.stdin:
        fields, of, seconds = json.loads(line)
        if fields is None:
            print(json.dumps(run.measure_product()), flush=True)
            continue
        key = (of, *fields.values())
        if key not in known:
            known[key] = build(shapes.Cell(**fields), of)
        call, operations = known[key]
        jax.block_until_ready(call())
        rate = operations / tune.seconds(call, seconds) / 1e12 if seconds else 0.0
        print(json.dumps(rate), flush=True)


def build(cell: shapes.Cell, of: str) -> tuple[Any, float]:
    """Compiles one pass of a cell: a call, and the operations in it."""
    import jax
    import jax.numpy as jnp
    import tune

    shape = (cell.batch, cell.length, cell.heads, cell.head_dim)
    inputs = jax.random.normal(jax.random.key(cell.length), (4, *shape), jnp.bfloat16)
    which = "forward" if of == "forward" else "backward"
    call = tune.build(which, cell, list(inputs), deterministic=of == "deterministic", backend=None)
    return call, tune.operations(which, cell)


if __name__ == "__main__":
    main()
