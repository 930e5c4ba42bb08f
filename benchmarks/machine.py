"""Owns what the benchmarks ask of the machine: packages, a GPU, a folder for results.

Imported ahead of matplotlib and tqdm, it ends the process with a sentence where they are missing.
"""

import argparse
import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_BENCH = "pip install 'jax_flash[bench]' installs what all benchmarks need"
RESULTS = Path(__file__).resolve().parents[1] / "build" / "benchmarks"  # ignored by git

if _missing := [x for x in ("matplotlib", "tqdm") if importlib.util.find_spec(x) is None]:
    raise SystemExit(f"benchmarks need {' and '.join(_missing)}: {_BENCH}")


def require_gpu(*, apart: bool = False) -> None:
    """Ends the process with a sentence where JAX has no GPU.

    Arguments:
      apart: asks in a process of its own, so that this one takes none of the GPU's memory.
    """
    if apart:
        ask = [sys.executable, "-c", "import jax; print(jax.default_backend())"]
        done = subprocess.run(ask, stdout=subprocess.PIPE, text=True, check=True)
        platform = done.stdout.split()[-1]
    else:
        import jax  # one that asks apart does not load it

        platform = jax.default_backend()
    if platform != "gpu":
        raise SystemExit(
            f"{Path(sys.argv[0]).name} measures on an NVIDIA GPU, and JAX's platform here is "
            f"{platform!r}; on a CPU benchmarks/cpu.py and benchmarks/decode.py measure"
        )


def has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def say_what_is_missing() -> None:
    """Says on stderr that PyTorch is not measured, where it is not installed."""
    if not has_torch():
        print(f"without PyTorch, which is not installed ({_BENCH})", file=sys.stderr)


def add_peers(
    parser: argparse.ArgumentParser, known: Sequence[str], default: Sequence[str] | None = None
) -> None:
    """Adds --peers, of those that are known here."""
    parser.add_argument(
        "--peers",
        nargs="+",
        choices=known,
        default=default,
        help=f"of these; more with the extra `bench`: {_BENCH}" if not has_torch() else None,
    )


def add_output(parser: argparse.ArgumentParser) -> None:
    """Adds --output."""
    parser.add_argument(
        "--output",
        type=Path,
        default=RESULTS,
        help="folder of results, build/benchmarks; benchmarks/results is the published ones'",
    )
