"""`python -m jax_flash`: what runs here, and how fast it is beside what else is installed.

Read next: `_compare/`.
"""

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# JAX and PyTorch share the GPU: JAX may not take most of its memory when it starts.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax

from jax_flash._compare import cells, machine, measure, report, rivals

EPILOG = """\
A shape is B,T,N,H: batch, length, heads, head dim. N may be N/K, query heads and those of key and
value. The words causal, float32, bfloat16 and float16 may follow it.

  python -m jax_flash --shape 4,4096,32/8,128,causal 16,1024,12,64,float32

A time is the fastest of up to five rounds, in which the implementations take turns. Memory is what
a call needs beside arguments and results: of JAX's as XLA plans it, of PyTorch's on a GPU as
measured. The error is that of the first batch row and the first head of key beside float64: the
norm of the difference over the norm (over 1 where that is 0), of the result or the gradient where
it is largest. A result with an error above 0.05 is called wrong and has no time.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints what is here, measures for a minute, prints tables, writes what options ask for."""
    options = parse(arguments)
    print("\n".join(machine.describe()), flush=True)
    if options.about:
        return
    known = rivals.installed()
    chosen = options.shape or cells.defaults(jax.default_backend())
    others = ", ".join(name for name in known if name != rivals.OURS)
    print(f"\nmeasured for up to {options.seconds:g} s beside {others}", flush=True)
    records: list[measure.Record] = []
    status = 0
    try:
        measure.run(chosen, known, time.monotonic() + options.seconds, records)
    except KeyboardInterrupt:
        status = 130
    print("\n" + report.text(records, chosen, [*known]), flush=True)
    if options.json is not None:
        found = {"about": machine.facts(), "seconds": options.seconds, "results": records}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.plot is not None and records:
        report.draw(records, [*known], options.plot)
    if status:
        raise SystemExit(status)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jax_flash",
        description="Tells what runs here, and how fast it is beside what else is installed.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--shape",
        type=cells.read,
        nargs="+",
        action="extend",
        help="B,T,N,H or B,T,N/K,H, then causal or a dtype; without: a dozen common ones",
    )
    parser.add_argument(
        "--seconds", type=_seconds, default=60.0, help="spent at most, about; default: 60"
    )
    parser.add_argument("--about", action="store_true", help="measure nothing")
    parser.add_argument("--json", type=_file, metavar="FILE", help="write all numbers there")
    parser.add_argument(
        "--plot", type=_picture, metavar="FILE", help="draw speeds there: .png, .svg or .pdf"
    )
    return parser.parse_args(arguments)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}; expected a number above 0")
    return seconds


def _file(text: str) -> Path:
    """Reads the name of a file to write, before there is something to lose."""
    path = Path(text)
    if not path.absolute().parent.is_dir() or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}; expected a file in a folder that there is")
    return path


def _picture(text: str) -> Path:
    path = _file(text)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text!r}; expected a name that ends in .png, .svg, .pdf")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("needs matplotlib, which is not installed")
    return path


if __name__ == "__main__":
    sys.exit(main())
