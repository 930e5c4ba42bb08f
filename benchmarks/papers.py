"""Measures what the papers behind this project claim, each number beside the published one.

    python benchmarks/papers.py                   # all parts; --help says how long each takes
    python benchmarks/papers.py --part io memory  # these alone
    python benchmarks/papers.py --part memory --cells "T 4096" longest  # of its cells those
    python benchmarks/papers.py --quick           # small sizes, on a CPU too: that all runs
    python benchmarks/papers.py --resume          # what a run that was stopped has, and the rest

Writes build/benchmarks/<device>/papers-<part>-<commit>.json after each cell, so that a run that is
stopped keeps what it has, then .md and .png. `python benchmarks figures` fills docs/papers*.md, and
draws its charts, from those in results/.

A part is a file of paper_parts/ with a `PART`, a `Part` of common/paper.py: title, paper, claims,
what differs from the paper, `cells(settings)`, `measure(settings, cell)`, a table and panels of a
chart. A file there whose name has no "_" ahead is a part by that name. paper_parts/memory.py is a
short one to begin from. With `settings.quick` all cells of a part take a few seconds on a CPU.
"""

import argparse
import dataclasses
import gc
import importlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# cuDNN's attention in a CUDA graph of XLA ends the process (jax 0.11.2, "local_device_ordinal").
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer=-CUDNN"
)

import jax
from common import charts, machine, paper, runs
from common.paper import Part, Settings
from tqdm import tqdm

FOLDER = Path(__file__).resolve().parent / "paper_parts"


def parts() -> dict[str, Part]:
    """Reads the parts, by name."""
    names = sorted(x.stem for x in FOLDER.glob("[!_]*.py"))
    return {name: importlib.import_module(f"paper_parts.{name}").PART for name in names}


def main() -> None:
    """Measures the chosen parts, one after the other, and prints their claims."""
    known = parts()
    options = parse(known)
    if not options.quick:
        machine.require_gpu()
    settings = Settings(options.quick, options.seed, tuple(options.cells))
    failed: list[str] = []
    for name in options.part:
        failed += measure(name, known[name], settings, options)
        jax.clear_caches()
        gc.collect()
    if failed:
        raise SystemExit("\n".join(["failed:", *failed]))


def parse(known: Mapping[str, Part]) -> argparse.Namespace:
    """Reads the command line."""
    of_parts = "\n".join(
        f"  {name:14s}{part.seconds:4d} s on an H100: {part.title}" for name, part in known.items()
    )
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\nParts:\n{of_parts}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--part", nargs="+", choices=known, default=list(known), metavar="NAME")
    parser.add_argument(
        "--cells",
        nargs="+",
        default=[],
        metavar="WORD",
        help="cells whose name has one of these words, 'T 8192' for instance; default: all",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes; no figure of a paper")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn")
    parser.add_argument("--resume", action="store_true", help="keep cells that the file has")
    parser.add_argument("--commit", default=None, help="name of the results; default: git's")
    machine.add_output(parser)
    return parser.parse_args()


def measure(name: str, part: Part, settings: Settings, options: argparse.Namespace) -> list[str]:
    """Measures a part, writes what it finds and prints it; returns the cells that failed."""
    about, folder = runs.describe(options, "benchmarks/papers.py", [])
    about |= {"part": name, "quick": settings.quick, "seed": settings.seed}
    about |= {"chosen": list(settings.words)}
    label = f"papers-{name}{'-quick' * settings.quick}{'-cells' * bool(settings.words)}"
    path = folder / f"{label}-{about['commit']}"
    begin = time.perf_counter()
    failed: list[str] = []
    cells = settings.chosen(part.cells(settings))
    found, earlier = before(path.with_suffix(".json"), about) if options.resume else ({}, 0.0)
    settings = dataclasses.replace(settings, there=frozenset(found))
    about |= {"seconds": earlier, "failed": failed}
    records = [found[x["name"]] for x in cells if x["name"] in found]
    for cell in (progress := tqdm(settings.chosen(cells), desc=name, disable=None)):
        progress.set_postfix_str(cell["name"])
        if progress.disable:  # a log shows where a run stands, too
            print(f"{name}, {cell['name']}: from {time.perf_counter() - begin:.0f} s", flush=True)
        try:
            found[cell["name"]] = cell | part.measure(settings, cell)
        except Exception as error:  # the cells and parts that follow are worth as much
            reason = f"{type(error).__name__}: {error}".split("\n")[0][:300]
            failed.append(f"{name}, {cell['name']}: {reason}")
        seconds = earlier + time.perf_counter() - begin
        about |= {"seconds": round(seconds, 1), "failed": failed}
        records = [found[x["name"]] for x in cells if x["name"] in found]
        path.with_suffix(".json").write_text(runs.in_lines(about, "cells", records))
    text = report(part, about, records)
    path.with_suffix(".md").write_text(text)
    charts.draw_panels(
        part.panels(records), f"{part.title}, {about['gpu']}", path.with_suffix(".png")
    )
    print(f"{text}\n{path.with_suffix('.json')}\n", flush=True)
    return failed


def before(path: Path, about: Mapping[str, Any]) -> tuple[dict[str, paper.Record], float]:
    """Reads a stopped run of this GPU, these versions, this seed: cells by name, its seconds.

    A file of another commit, under the name of this one, is gone on with, too: its cells say which.
    """
    if not path.exists():
        return {}, 0.0
    found = json.loads(path.read_text())
    for field in ("gpu", "driver", "versions", "seed"):
        if found[field] != about[field]:
            raise SystemExit(f"--resume: {path} is of {field} {found[field]}, not {about[field]}")
    of = {} if found["commit"] == about["commit"] else {"commit": found["commit"]}
    return {x["name"]: of | x for x in found["cells"]}, found["seconds"]


def report(part: Part, about: Mapping[str, Any], records: list[paper.Record]) -> str:
    """Writes a part's results in Markdown."""
    head = f"{runs.introduce(dict(about))} {json.dumps(about['versions'])}, seed {about['seed']}, "
    head += f"{about['seconds']:.0f} s."
    for commit in dict.fromkeys(x["commit"] for x in records if "commit" in x):
        names = [x["name"] for x in records if x.get("commit") == commit]
        head += f" Measured at {commit}: {'; '.join(names)}."
    if about["quick"]:
        head += " Small sizes: no figure of the paper."
    claims = paper.claims_table(part, records)
    lines = [f"# {part.title}", part.paper, head, claims, part.table(records), part.differs]
    lines += [f"Failed: {one}" for one in about["failed"]]
    return "\n\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
