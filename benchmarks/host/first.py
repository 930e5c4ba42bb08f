"""Measures the first call of a program on a GPU: with no compiled kernel on disk, then with all.

    python benchmarks host first
    python benchmarks host first --head-dims 128 --passes training

Each number is of a process of its own, which has imported everything and drawn the inputs before:
seconds from the call of a jitted function to its result, so tracing, lowering, XLA and the kernels.
`kernels` are NVRTC's seconds, or those of reading the disk cache, which is a temporary folder; the
backward kernel's are taken beside the forward's. The driver's cache, where NVRTC would find what it
compiled before, is another such folder. cuDNN, through jax.nn, keeps nothing on disk.
bfloat16, B 4, T 4096, model dim 2048. Prints a Markdown table; writes
build/benchmarks/<gpu>/first-call-<commit>.json.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from common import machine, runs

import jax_flash

PEERS = ("cold", "warm", "cudnn")  # the first two: jax_flash, twice with one folder
PASSES = ("forward", "training")
PASS_TITLES = {"forward": "forward", "training": "forward + backward"}


@dataclasses.dataclass(frozen=True)
class Case:
    """One program."""

    head_dim: int
    causal: bool
    of: str  # one of PASSES
    batch: int = 4
    length: int = 4096
    model_dim: int = 2048

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.length, self.model_dim // self.head_dim, self.head_dim


def main() -> None:
    """Measures every case in processes of their own, or one as such a process."""
    options = parse()
    if options.answer is not None:
        peer, case = json.loads(options.answer)
        print(json.dumps(measure(peer, Case(**case))))
        return
    records = []
    for head_dim in options.head_dims:
        for causal in (False, True):
            for of in options.passes:
                case = Case(head_dim, causal, of)
                with tempfile.TemporaryDirectory() as folder:
                    found = {peer: ask(peer, case, folder) for peer in PEERS}
                records.append({**dataclasses.asdict(case), **found})
                print(*table(records[-1:])[2:], flush=True)
    print("\n" + "\n".join(table(records)))
    write(options, records)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks host first",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--head-dims", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument("--commit", default=None, help="name of the results; default: git's")
    machine.add_output(parser)
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    return parser.parse_args()


def ask(peer: str, case: Case, folder: str) -> dict[str, Any]:
    """Measures a case in a process of its own, whose kernels are kept in `folder`."""
    answer = json.dumps([peer, dataclasses.asdict(case)])
    driver = str(Path(folder) / f"driver-{peer}")
    environment = os.environ | {"JAX_FLASH_CACHE_DIR": folder, "CUDA_CACHE_PATH": driver}
    # JAX's own cache of programs would hide what a first call costs.
    environment = {k: v for k, v in environment.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    safe = ["-P"] if sys.flags.safe_path else []
    command = [sys.executable, *safe, str(Path(__file__).parents[1]), "host", "first"]
    process = subprocess.run(
        [*command, "--answer", answer], env=environment, stdout=subprocess.PIPE, text=True
    )
    if process.returncode != 0:
        raise SystemExit(f"a process ended with {process.returncode}; its error is above")
    return json.loads(process.stdout.splitlines()[-1])


# ---- a process of its own ------------------------------------------------------------------------


def measure(peer: str, case: Case) -> dict[str, Any]:
    """Measures the first call of a case here: seconds of it and of its parts.

    Returns "call" and of it "lower", "compile" and "run"; "again", the second call; and "kernels",
    for each kernel of ours the seconds until this process had it, and whether it was on disk.
    """
    platform = jax.default_backend()
    if peer == "cudnn":
        attend = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    else:
        backend = "cuda" if platform == "gpu" else None
        attend = functools.partial(jax_flash.flash_attention, backend=backend)
    attend = functools.partial(attend, is_causal=case.causal)

    def training(*inputs: Any) -> Any:
        return jax.grad(lambda *x: attend(*x).astype(jnp.float32).sum(), argnums=(0, 1, 2))(*inputs)

    keys = jax.random.split(jax.random.key(0), 3)
    draw = jax.jit(lambda key: jax.random.normal(key, case.shape, jnp.bfloat16))
    inputs = jax.block_until_ready([draw(key) for key in keys])
    program = jax.jit(training if case.of == "training" else attend)

    marks = [time.perf_counter()]
    lowered = program.lower(*inputs)
    marks.append(time.perf_counter())
    compiled = lowered.compile()
    marks.append(time.perf_counter())
    for _ in range(2):
        jax.block_until_ready(compiled(*inputs))
        marks.append(time.perf_counter())
    lower, compile_, first_run, again = (b - a for a, b in itertools.pairwise(marks))
    kernels = {}
    if peer != "cudnn":
        options = {"is_causal": case.causal, "backend": backend}
        explanation = jax_flash.explain(*inputs, **options)
        reports = {"forward": explanation.forward}
        if case.of == "training":
            reports["backward"] = explanation.backward
        # What the call above had in this process: nothing is compiled anew.
        kernels = {
            name: {"seconds": report.kernel.seconds, "from_disk": report.kernel.from_disk}
            for name, report in reports.items()
            if report.kernel is not None
        }
    return {
        "device": jax.devices()[0].device_kind,
        "call": marks[3] - marks[0],
        "lower": lower,
        "compile": compile_,
        "run": first_run,
        "again": again,
        "kernels": kernels,
    }


# ---- what came of it -----------------------------------------------------------------------------


def table(records: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the lines of the table of records, in Markdown."""
    lines = [
        "| head dim | | first call, s | NVRTC, s | second process, s | kernels from disk, ms "
        "| cuDNN in jax.nn, s |",
        "|---:|---|---:|---|---:|---|---:|",
    ]
    for record in records:
        cold, warm = ([k["seconds"] for k in record[x]["kernels"].values()] for x in PEERS[:2])
        mask = ", causal" if record["causal"] else ""
        cells = [
            str(record["head_dim"]),
            PASS_TITLES[record["of"]] + mask,
            f"{record['cold']['call']:.2f}",
            " and ".join(f"{x:.2f}" for x in cold),
            f"{record['warm']['call']:.2f}",
            " and ".join(f"{1e3 * x:.1f}" for x in warm),
            f"{record['cudnn']['call']:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def write(options: argparse.Namespace, records: list[dict[str, Any]]) -> None:
    """Writes the records and what they were measured with."""
    about, folder = runs.describe(options, "benchmarks host first", [])
    about["cores"] = len(os.sched_getaffinity(0))
    path = folder / f"first-call-{about['commit']}.json"
    path.write_text(runs.in_lines(about, "records", records))
    print(path)
