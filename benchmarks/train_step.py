"""Trains one model with our attention, cuDNN's and XLA's on a GPU, and compares the steps.

    python benchmarks/train_step.py                          # everything, some minutes
    python benchmarks/train_step.py --only steps             # no longest sequence, no loss curves
    python benchmarks/train_step.py --only steps --lengths 4096 --xla-defaults

The model is examples/train_gpt.py's GPT-2 (124M parameters, bfloat16, AdamW), with as many tokens
in every step, without packing: jax.nn's cuDNN attention takes no segment ids. `none` adds query,
key and value in place of attention, so its step is what all the rest takes. Where blocks are
recomputed (remat), what is kept is named: the results of matrix products, or of the forward kernel
alone, cuDNN's as well as ours.

Every measurement has a process of its own, which alone uses the GPU while it runs: a peak of memory
belongs to one program. The next ones compile meanwhile, which needs no GPU, because nothing is
tuned: matrix products are cuBLAS's. --xla-defaults compiles as XLA does without a word from us, one
after another. Writes build/benchmarks/<gpu>/train-<commit>.json, and beside it a Markdown table and
a chart, after the steps and again after each longer part. Needs the extra `bench`, for Flax.

What a program needs is XLA's plan, to the byte. The peak that was measured is up to 128 MB more:
XLA's allocator hands out a free piece whole if it is no more than that larger than what was asked.
"""

import argparse
import dataclasses
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from common import charts, machine, peers, runs
from common.train_jobs import ATTENTIONS, COMPARED, Job, work
from tqdm import tqdm

CELLS = (
    (1024, "none"),
    (4096, "none"),
    (4096, "products"),
    (16384, "none"),
    (16384, "products"),
    (16384, "attention"),
)
SEARCH_FROM = 65536  # the first length that is tried, of those that may be too long for the memory
AHEAD = 4  # processes that compile for later
JOB_SECONDS = 120  # after which a process is ended


def main() -> None:
    options = parse()
    if options.job is not None:
        work(Job(**json.loads(options.job)))
        return

    steps, longest, losses = [], [], []
    if "steps" in options.only:
        steps = [
            Job("step", name, length, options.tokens // length, remat, options.layers)
            for length, remat in CELLS
            if length in options.lengths
            for name in options.attentions
        ]
    if "longest" in options.only:
        longest = [
            Job(
                "longest",
                name,
                SEARCH_FROM,
                1,
                "attention",
                options.layers,
                run_up_to=options.longest,
            )
            for name in COMPARED
            if name in options.attentions
        ]
    if "loss" in options.only:
        losses = [
            Job("loss", name, batch=8, preset="small", seed=seed, steps=options.loss_steps)
            for seed in (0, 1)
            for name in ("jax_flash", "xla")
        ]

    with tempfile.TemporaryDirectory() as cache:
        flags = "" if options.xla_defaults else NOTHING_TUNED
        ceiling = [measure(Job("product"), cache, flags)]
        ahead = 0 if options.xla_defaults else AHEAD
        records = []
        for record in measure_in_turns(steps, longest, cache, flags, ahead):
            records.append(record)
            if len(steps) <= len(records) < len(steps) + len(longest):
                write(options, records, ceiling)
        ceiling += [measure(Job("product"), cache, flags)]
        write(options, records, ceiling)
        with ThreadPoolExecutor() as pool:  # not timed, so they may share the GPU
            records += pool.map(lambda job: measure(job, cache, flags), losses)
    print(write(options, records, ceiling))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("steps", "longest", "loss")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    lengths = sorted({length for length, _ in CELLS})
    parser.add_argument("--lengths", nargs="+", type=int, choices=lengths, default=lengths)
    names = list(ATTENTIONS)
    parser.add_argument("--attentions", nargs="+", choices=names, default=names)
    parser.add_argument("--longest", type=int, default=262144, help="longest that is also run")
    parser.add_argument("--tokens", type=int, default=32768, help="in one step")
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--loss-steps", type=int, default=400)
    parser.add_argument("--xla-defaults", action="store_true", help="leave XLA's flags alone")
    parser.add_argument("--commit", default=None, help="name of the results; default: git's")
    machine.add_output(parser)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    return parser.parse_args()


# --- The processes ------------------------------------------------------------------------------


# Compiling must not use the GPU while another process measures, so nothing may be tried there. By
# default XLA tries which of Triton's and cuBLAS's products is the fastest.
NOTHING_TUNED = "--xla_gpu_enable_triton_gemm=false --xla_gpu_autotune_level=0"


def start(job: Job, cache: str, flags: str) -> subprocess.Popen[str]:
    """Starts the process of a job, which compiles, and waits for a line before it measures."""
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95",
    }
    return subprocess.Popen(
        [sys.executable, __file__, "--job", json.dumps(dataclasses.asdict(job))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
    )


def finish(job: Job, process: subprocess.Popen[str]) -> dict[str, Any]:
    """Lets a process measure; returns what it found, or its error."""
    try:
        out, err = process.communicate("go\n", timeout=JOB_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return dataclasses.asdict(job) | {"error": f"not done in {JOB_SECONDS} s"}
    if process.returncode != 0:
        last = ([line for line in err.split("\n") if line.strip()] or ["died"])[-1]
        return dataclasses.asdict(job) | {"error": last[:300]}
    return dataclasses.asdict(job) | json.loads(out.strip().split("\n")[-1])


def measure(job: Job, cache: str, flags: str) -> dict[str, Any]:
    """Runs one job."""
    return finish(job, start(job, cache, flags))


def measure_in_turns(
    jobs: list[Job], last: list[Job], cache: str, flags: str, ahead: int
) -> Iterator[dict[str, Any]]:
    """Runs jobs one after another; the next ones, `ahead` of them, compile while one measures.

    The jobs of `last` compile for long: they start with the first and measure after all others.
    """
    waiting = {job: start(job, cache, flags) for job in (last if ahead else [])}
    order = jobs + last
    for i, job in enumerate(tqdm(order)):
        for later in order[i : i + 1 + ahead]:
            if later not in waiting:
                waiting[later] = start(later, cache, flags)
        record = finish(job, waiting[job])
        tqdm.write(json.dumps(record))
        yield record


# --- Results ------------------------------------------------------------------------------------


def compare_curves(records: list[dict[str, Any]]) -> dict[str, Any] | None:
    """How far two attentions' curves are apart with one seed, and two seeds' with one attention.

    Curves are means over 20 steps; a distance is the mean over the second half of the curve, where
    the order of the text and not the fall of the loss sets the noise.
    """
    curves, validation = {}, {}
    for record in records:
        if record["kind"] == "loss" and "losses" in record:
            key = record["attention"], record["seed"]
            window = min(20, len(record["losses"]))
            curves[key] = np.convolve(record["losses"], np.ones(window) / window, "valid")
            validation[key] = record["validation"]
    if len(curves) < 4:
        return None

    def apart(a: tuple[str, int], b: tuple[str, int]) -> float:
        half = len(curves[a]) // 2
        return float(np.abs(curves[a] - curves[b])[half:].mean())

    pairs = {
        "attentions": [(("jax_flash", seed), ("xla", seed)) for seed in (0, 1)],
        "seeds": [((name, 0), (name, 1)) for name in ("jax_flash", "xla")],
    }
    found: dict[str, Any] = {}
    for name, both in pairs.items():
        found[f"curves_apart_by_{name}"] = [round(apart(a, b), 4) for a, b in both]
        found[f"validation_apart_by_{name}"] = [
            round(abs(validation[a] - validation[b]), 4) for a, b in both
        ]
    found["validation"] = {f"{name} seed {seed}": x for (name, seed), x in validation.items()}
    return found


def write(
    options: argparse.Namespace, records: list[dict[str, Any]], ceiling: list[dict[str, Any]]
) -> str:
    """Writes the numbers and the tables; returns the tables."""
    gpu = ceiling[0].get("gpu", "unknown")
    commit = options.commit or runs.first_line("git", "rev-parse", "--short=10", "HEAD")
    folder = options.output / gpu.lower().replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    products = [found.get("tflops") for found in ceiling]
    driver = runs.first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    about = {
        "gpu": gpu,
        "driver": driver,
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": runs.command("benchmarks/train_step.py"),
        "versions": runs.versions(),
        "product_tflops": products,
        "loss_curves": compare_curves(records),
    }
    path = folder / f"train-{commit}.json"
    path.write_text(runs.in_lines(about, "records", records))
    intro = (
        f"{gpu}, driver {driver}, {about['date']}, commit {commit}, `{about['command']}`; "
        f"{runs.PRODUCT}³ bfloat16 product before and after the steps: "
        f"{', '.join(map(str, products))} TFLOP/s."
    )
    text = "\n\n".join([intro, *tables(records)]) + "\n"
    path.with_suffix(".md").write_text(text)
    curves = {
        (x["attention"], x["seed"]): x["losses"]
        for x in records
        if x["kind"] == "loss" and "losses" in x
    }
    if curves:
        charts.draw_losses(curves, looks(), gpu, folder / f"train-{commit}-loss.png")
    return text


def looks() -> dict[str, tuple[str, str]]:
    """Returns label and color of each attention, those of the other benchmarks."""
    names = {"jax_flash": "jax_flash", "cudnn": "jax_cudnn", "xla": "jax_xla"}
    known = {peer.name: (peer.label, peer.color) for peer in peers.all_peers()}
    return {name: known[peer] for name, peer in names.items()}


def tables(records: list[dict[str, Any]]) -> list[str]:
    """Returns the Markdown tables of what was measured."""
    texts = []
    steps = [record for record in records if record["kind"] == "step"]
    steps.sort(key=lambda x: (x["length"], x["remat"], list(ATTENTIONS).index(x["attention"])))
    if steps:
        lines = [
            "| T | batch | remat | attention | step ms | tokens/s | MFU | planned GB | peak GB"
            " | its share |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        for record in steps:
            if record["attention"] == "none":
                continue
            cell = (record["length"], record["remat"])
            rest = [
                other["ms"]
                for other in steps
                if other["attention"] == "none"
                and (other["length"], other["remat"]) == cell
                and "ms" in other
            ]
            head = [record["length"], record["batch"], record["remat"]]
            head.append(record["attention"])
            if "error" in record:
                values = [record["error"], "", "", "", "", ""]
            else:
                share = f"{1 - rest[0] / record['ms']:.0%}" if rest else ""
                mfu = f"{record['mfu']:.1%}" if record["mfu"] is not None else ""
                values = [f"{record['ms']:.1f}", f"{record['tokens_per_second']:,}", mfu]
                values += [f"{record['program_gb']:.3f}", f"{record['peak_gb']:.1f}", share]
            lines.append("| " + " | ".join(str(x) for x in [*head, *values]) + " |")
        texts.append("\n".join(lines))
    longest = [record for record in records if record["kind"] == "longest"]
    if longest:
        lines = [
            "| attention | longest T that fits, batch 1 | GB it needs | next T tried | GB it needs"
            " | longest T run | step s | peak GB |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for record in longest:
            plans = {int(length): needs for length, needs in record.get("plans", {}).items()}
            limit = record.get("limit_gb", 0)
            fitting = [x for x, gb in plans.items() if not isinstance(gb, str) and gb <= limit]
            best = max(fitting, default=0)
            more = min((x for x in plans if x > best), default=0)
            values = [record["attention"], best, plans.get(best, ""), more, plans.get(more, "")]
            values += [record.get(name, "") for name in ("ran", "seconds", "peak_gb")]
            lines.append("| " + " | ".join(str(x) for x in values) + " |")
        texts.append("\n".join(lines))
    curves = compare_curves(records)
    if curves is not None:
        texts.append(
            f"Loss curves, two seeds: ours and XLA's with one seed are "
            f"{max(curves['curves_apart_by_attentions']):.4f} nats apart, two seeds with one "
            f"attention {min(curves['curves_apart_by_seeds']):.4f}."
        )
    return texts


if __name__ == "__main__":
    if "--job" not in sys.argv:
        machine.require_gpu(apart=True)
    main()
