"""Owns what the benchmarks ask of the machine: a GPU, PyTorch, its name, a folder for results."""

import argparse
import importlib.util
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from jax_flash._compare.machine import processor

from . import BENCH

RESULTS = Path(__file__).resolve().parents[2] / "build" / "benchmarks"  # ignored by git


def require_gpu(*, apart: bool = False) -> None:
    """Ends the process with a sentence where JAX has no GPU, and more than help is asked for.

    Arguments:
      apart: asks in a process of its own, so that this one takes none of the GPU's memory.
    """
    if {"-h", "--help"} & {*sys.argv[1:]}:
        return
    if apart:
        ask = [sys.executable, "-c", "import jax; print(jax.default_backend())"]
        done = subprocess.run(ask, stdout=subprocess.PIPE, text=True, check=True)
        found = done.stdout.split()[-1]
    else:
        import jax  # one that asks apart does not load it

        found = jax.default_backend()
    if found != "gpu":
        raise SystemExit(
            f"{Path(sys.argv[0]).name} measures on an NVIDIA GPU, and JAX's platform here is "
            f"{found!r}; on a CPU `python -m jax_flash` and benchmarks/decode.py measure"
        )


def has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def say_what_is_missing() -> None:
    """Says on stderr that PyTorch is not measured, where it is not installed."""
    if not has_torch():
        print(f"without PyTorch, which is not installed ({BENCH})", file=sys.stderr)


def add_peers(
    parser: argparse.ArgumentParser, known: Sequence[str], default: Sequence[str] | None = None
) -> None:
    """Adds --peers, of those that are known here."""
    parser.add_argument(
        "--peers",
        nargs="+",
        choices=known,
        default=default,
        help=f"of these; more with the extra `bench`: {BENCH}" if not has_torch() else None,
    )


def add_output(parser: argparse.ArgumentParser) -> None:
    """Adds --output."""
    parser.add_argument(
        "--output",
        type=Path,
        default=RESULTS,
        help="folder of results, build/benchmarks; benchmarks/results is the published ones'",
    )


def processor_slug() -> str:
    """Names the result file."""
    return re.sub(r"[^a-z0-9]+", "-", processor().lower()).strip("-")
