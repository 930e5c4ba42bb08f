"""Owns the comparison of checkouts in one process: `compare.py --export`, `compare.py --exported`.

Two processes that run one kernel differ by up to 15 %. So a process for each checkout exports its
programs, without a GPU, with its kernels' text under its own name. One process on the GPU compiles
all of them and times them in turns. Handlers are those of its own jax_flash, so a checkout whose
module differs is not for this.

As a script it answers with the programs of the jax_flash on its path.
"""

import functools
import importlib
import json
import os
import re
import runpy
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[1]
CASES = "cases.py"
ROUNDS = 5


def export(checkouts: list[str], cases: Path, folder: Path, platform: str) -> None:
    """Exports the cases' programs of each checkout, PATH or NAME=PATH, to a folder.

    Raises:
      SystemExit: a checkout's programs do not lower, or two have one name.
    """
    named = {}
    for checkout in checkouts:
        name, _, path = checkout.rpartition("=")
        path = Path(path).resolve()
        name = name or path.name
        if name in named or not name.isidentifier():
            raise SystemExit(f"name the checkout {path} by a word of its own: WORD={path}")
        if not (path / "jax_flash").is_dir():
            raise SystemExit(f"{path} holds no jax_flash")
        named[name] = path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CASES).write_text(cases.read_text())
    for name, path in named.items():
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join([str(path), str(BENCHMARKS)]),
        }
        command = [sys.executable, __file__, str(folder), name, platform]
        if subprocess.run(command, env=environment, check=False).returncode:
            raise SystemExit(f"the programs of {path} were not exported")
    (folder / "order.json").write_text(json.dumps([*named]))


def answer(folder: Path, name: str, platform: str) -> None:
    """Exports the programs of the jax_flash on the path, as those of `name`."""
    import jax

    import jax_flash
    from jax_flash import EXPORT_CHECKS, _native

    plans = importlib.import_module("jax_flash._gpu.plan")
    text_of = plans.Plan.text.func
    programs = set()

    def own(text: str) -> str:
        return text.replace('#include "', f'#include "{name}/')

    def text(plan: Any) -> str:
        head, header = text_of(plan).split("\nheader\n", 1)
        head = re.sub(r"^program ", f"program {name}/", head, flags=re.MULTILINE)
        header = own(header)
        for source, arch in re.findall(r"^program (\S+) (\S+)$", head, re.MULTILINE):
            programs.add((source, header, arch))
        return f"{head}\nheader\n{header}"

    plans.Plan.text = property(text)
    done = {}
    for case, function, arguments in read_cases(folder, jax_flash):
        exporting = jax.export.export(
            jax.jit(function), platforms=[platform], disabled_checks=EXPORT_CHECKS
        )
        done[case] = f"{name}.{len(done)}.export"
        (folder / done[case]).write_bytes(exporting(*arguments).serialize())
    sources = {f"{name}/{file}": own(x) for file, x in _native.kernel_sources().items()}
    record = {"cases": done, "programs": sorted(programs), "sources": sources}
    (folder / f"{name}.json").write_text(json.dumps(record))
    print(f"{name}: {len(done)} cases, {len(programs)} programs of kernels")


def read_cases(folder: Path, package: Any) -> Iterator[tuple[str, Callable[..., Any], Any]]:
    """Yields what the file's `cases(jax_flash)` does: a name, a function, arrays' structures."""
    yield from runpy.run_path(str(folder / CASES))["cases"](package)


def measure(folder: Path, only: str) -> None:
    """Compiles what was exported, times it in turns, and prints a line for each case."""
    import jax

    import jax_flash
    from jax_flash import _native

    from . import ahead, runs

    order = json.loads((folder / "order.json").read_text())
    records = {name: json.loads((folder / f"{name}.json").read_text()) for name in order}
    sources = {file: x for one in records.values() for file, x in one["sources"].items()}
    asked = [(name, i) for name in order for i in range(len(records[name]["programs"]))]
    with ahead.Processes("cpu", min(ahead.PROCESSES, len(asked))) as processes:
        for _, failure in processes.each(functools.partial(compile_one, folder), asked):
            if failure:
                print(failure, file=sys.stderr)
    _native.configure_cuda(_native.cache_folder(), _native.CACHE_BYTES, sources)
    print(
        f"case, µs of {', '.join(order)}, ratios to the first, largest differences from its results"
    )
    for case, _, structures in read_cases(folder, jax_flash):
        if not re.search(only, case):
            continue
        arguments = [draw(i, one) for i, one in enumerate(structures)]
        calls, results = {}, {}
        for name in order:
            exported = jax.export.deserialize((folder / records[name]["cases"][case]).read_bytes())
            call = functools.partial(jax.jit(exported.call), *arguments)
            results[name] = [*map(float_of, jax.tree.leaves(jax.block_until_ready(call())))]
            calls[name] = (call, jax.block_until_ready)
        seconds = {x: statistics.median(t) for x, t in runs.time_in_turns(calls, ROUNDS).items()}
        first = results[order[0]]
        differ = [
            max(
                (float(abs(a - b).max()) for a, b in zip(first, results[x], strict=True)),
                default=0.0,
            )
            for x in order[1:]
        ]
        print(
            f"{case:36s}",
            " ".join(f"{1e6 * seconds[x]:9.1f}" for x in order),
            " ".join(f"{seconds[order[0]] / seconds[x]:6.3f}" for x in order),
            " ".join(f"{x:.1e}" for x in differ),
            flush=True,
        )


def compile_one(folder: Path, asked: tuple[str, int]) -> str:
    """Compiles a program for the cache on disk; returns why there is none, or ""."""
    from jax_flash import _native

    name, i = asked
    record = json.loads((folder / f"{name}.json").read_text())
    everything = [json.loads(x.read_text()) for x in folder.glob("*.json") if x.stem != "order"]
    sources = {file: x for one in everything for file, x in one["sources"].items()}
    _native.configure_cuda(_native.cache_folder(), _native.CACHE_BYTES, sources)
    try:
        _native.compile_kernel(*record["programs"][i])
    except RuntimeError as error:
        return f"{name}: {error}"
    return ""


def draw(seed: int, structure: Any) -> Any:
    """Draws normal numbers; integers are 0."""
    import jax
    import jax.numpy as jnp

    if not jnp.issubdtype(structure.dtype, jnp.floating):
        return jnp.zeros(structure.shape, structure.dtype)
    return jax.random.normal(jax.random.key(seed), structure.shape).astype(structure.dtype)


def float_of(x: Any) -> Any:
    import numpy as np

    return np.asarray(x, np.float32)


if __name__ == "__main__":
    answer(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
