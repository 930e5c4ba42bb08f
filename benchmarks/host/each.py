"""Measures what each call of a compiled program takes of the host.

    python benchmarks host each
    python benchmarks host each --heads 32 --length 512

Calls are made one behind the other, and waited for at the end: a time is the larger one of the
host's and the GPU's, µs. Three are measured, of each peer in turns:

- `from Python`: a call of a jitted function of one attention.
- `a launch`: one attention more in a program of many, each of the result of the one before, where
  XLA launches each kernel by itself: the call of its handler until the last launch.
- `in a graph`: the same where XLA records CUDA graphs, as it does by default: the GPU's time alone.
  Where `a launch` is above it, the host is what takes the time.

`backward` is what one forward and backward pass takes more than a forward pass. bfloat16, B 1.
Prints a Markdown table; writes build/benchmarks/<gpu>/host-<commit>.json and .md.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from common import machine, peers, runs
from common.shapes import Cell

PEERS = ("jax_flash", "jax_cudnn", "jax_xla")
FEW, MANY = 4, 20  # attentions of a program: what one more takes is a sixteenth of the difference
MEASURES = ("from Python", "a launch", "in a graph")
SEPARATE = {"xla_gpu_graph_min_graph_size": 1 << 20}  # no program has as many kernels: no graph
PASSES = ("forward", "training")


def main() -> None:
    """Measures the peers in turns, prints the table and writes it."""
    options = parse()
    attends = {name: attend for name, attend in in_jax().items() if name in options.peers}
    cell = Cell(1, options.length, options.heads, options.heads, options.head_dim, True)
    found = measure(cell, attends, options.rounds)
    about, folder = runs.describe(options, "benchmarks host each", [])
    path = folder / f"host-{about['commit']}.json"
    records = [{"peer": name} | one for name, one in found.items()]
    path.write_text(runs.in_lines(about | {"cell": vars(cell)}, "microseconds", records))
    text = "\n".join([f"{runs.introduce(about)}\n", *table(found)]) + "\n"
    path.with_suffix(".md").write_text(text)
    print(f"{text}\n{path}")


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks host each",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    machine.add_peers(parser, [*in_jax()], PEERS)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--commit", default=None, help="name of the results; default: git's")
    machine.add_output(parser)
    return parser.parse_args()


def in_jax() -> dict[str, Callable[..., Any]]:
    """Lists what is called within a jitted function: by name, attention of a Cell, q, k, v."""
    return {peer.name: peer.attend for peer in peers.all_peers() if peer.attend is not None}


def measure(
    cell: Cell, attends: dict[str, Callable[..., Any]], rounds: int
) -> dict[str, dict[str, float]]:
    """Measures µs by peer, then by "<pass>, <measure>"; passes are "forward" and "backward"."""
    shape = (cell.batch, cell.length, cell.heads, cell.head_dim)
    draw = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16))
    inputs = jax.block_until_ready([draw(key) for key in jax.random.split(jax.random.key(0), 3)])
    calls = {}
    for name, attend in attends.items():
        for of in PASSES:
            one = chain(cell, attend, of, 1)
            one(*inputs)  # compiles: calls after it take the fast path
            calls[name, of, "from Python", 1] = _call(one, inputs)
            for measured, compiler in (("a launch", SEPARATE), ("in a graph", {})):
                for count in (FEW, MANY):
                    lowered = chain(cell, attend, of, count).lower(*inputs)
                    program = lowered.compile(compiler_options=compiler if _on_gpu() else None)
                    calls[name, of, measured, count] = _call(program, inputs)
    seconds = runs.time_in_turns(
        {str(key): (call, jax.block_until_ready) for key, call in calls.items()}, rounds
    )
    medians = {key: 1e6 * statistics.median(seconds[str(key)]) for key in calls}
    found = {}
    for name in attends:
        found[name] = {}
        for measured in MEASURES:
            forward, training = (_one_more(medians, name, of, measured) for of in PASSES)
            found[name][f"forward, {measured}"] = round(forward, 1)
            found[name][f"backward, {measured}"] = round(training - forward, 1)
    return found


def chain(cell: Cell, attend: Callable[..., Any], of: str, count: int) -> Any:
    """Jits `count` attentions, of which each takes the result of the one before as its queries."""

    def forward(q: Any, k: Any, v: Any) -> Any:
        for _ in range(count):
            q = attend(cell, q, k, v)
        return q

    def training(q: Any, k: Any, v: Any) -> Any:
        out, backward = jax.vjp(forward, q, k, v)
        return out, *backward(out)

    return jax.jit(forward if of == "forward" else training)


def _call(program: Any, inputs: Sequence[Any]) -> Callable[[], Any]:
    return lambda: program(*inputs)


def _on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def _one_more(medians: dict[Any, float], name: str, of: str, measured: str) -> float:
    """What one attention takes: of a program that has but one, or of a longer one than another."""
    if measured == "from Python":
        return medians[name, of, measured, 1]
    few, many = (medians[name, of, measured, count] for count in (FEW, MANY))
    return (many - few) / (MANY - FEW)


def table(found: dict[str, dict[str, float]]) -> list[str]:
    """Returns the lines of the table of µs, in Markdown."""
    lines = [
        f"| µs | {' | '.join(found)} |",
        f"|---|{'---:|' * len(found)}",
    ]
    for measured in next(iter(found.values())):
        cells = (f"{one[measured]:.1f}" for one in found.values())
        lines.append(f"| {measured} | {' | '.join(cells)} |")
    return lines
