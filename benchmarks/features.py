"""Measures each feature of attention on a GPU, peer beside peer in one run, at its price.

    python benchmarks/features.py                                  # every case, every peer
    python benchmarks/features.py --peers jax_flash jax_cudnn      # some four minutes
    python benchmarks/features.py --problems A B --cases plain bias_1NTS dropout

Problems and cases are those of shapes.py; times are taken as run.py takes them: all is compiled
before, the peers of a case take turns, round by round, and nothing else runs between them. Forward
and backward is with all gradients, those of a bias and of sinks included. Before it is timed, a
result is compared with float64 attention (exact.py): a wrong one is a failure, with no time.
Writes build/benchmarks/<gpu>/features-<commit>.json and .md, after each problem.
"""

import argparse
import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any

import charts
import exact
import feature_peers
import jax
import jax.numpy as jnp
import machine
import peers
import run
import shapes
from shapes import Case, Pass
from tqdm import tqdm


@dataclasses.dataclass(frozen=True)
class Script:
    """What a script measures: features.py, or another with cases of its own."""

    name: str
    about: str
    features: dict[str, dict[str, Any]]
    cases: Callable[..., list[Case]]
    problems: tuple[str, ...]
    peers: tuple[str, ...]
    asks: Callable[[Case, str], bool] = lambda case, peer: True  # is the peer asked for the case?


def main(script: Script | None = None) -> None:
    """Measures the chosen cases and prints one table."""
    script = script or Script(
        name="features",
        about=__doc__ or "",
        features=shapes.FEATURES,
        cases=shapes.cases,
        problems=tuple(shapes.PROBLEMS),
        peers=tuple(peer.name for peer in feature_peers.all_peers()),
    )
    options = parse(script)
    machine.say_what_is_missing()
    chosen = [peer for peer in feature_peers.all_peers() if peer.name in options.peers]
    ceiling = [run.measure_product()]
    records: list[dict[str, Any]] = []
    text = ""
    flex = threading.Thread(target=compile_flex, args=(script, options, chosen))
    flex.start()
    for problem in options.problems:
        cases = script.cases(problem, options.cases)
        ahead = dict.fromkeys(options.passes[:1], prepare)  # once for all passes
        programs = {of: run.build_all(of, cases, chosen, ahead.get(of)) for of in options.passes}
        flex.join()
        for case in (progress := tqdm(cases)):
            progress.set_description(case.name)
            asked = [peer for peer in chosen if script.asks(case, peer.name)]
            records += measure(case, programs, asked)
        ceiling.append(run.measure_product())
        text = write(script, options, chosen, records, ceiling)  # a later problem may be cut off
    print(text)


def compile_flex(script: Script, options: argparse.Namespace, chosen: list[peers.Peer]) -> None:
    """Compiles FlexAttention for all that it will be asked, if it will be."""
    if not any(peer.name == feature_peers.FLEX for peer in chosen):
        return
    cases = [x for name in options.problems for x in script.cases(name, options.cases)]
    cases = [case for case in cases if script.asks(case, feature_peers.FLEX)]
    feature_peers.compile_flex(cases, options.passes)


def parse(script: Script) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=script.about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    there = [peer.name for peer in feature_peers.all_peers()]
    names = [name for name in script.peers if name in there]
    problems = list(script.problems)
    parser.add_argument("--problems", nargs="+", choices=problems, default=problems)
    parser.add_argument("--cases", nargs="+", choices=script.features, default=None)
    machine.add_peers(parser, names, names)
    parser.add_argument("--passes", nargs="+", choices=shapes.PASSES, default=list(shapes.PASSES))
    parser.add_argument("--commit", default=None, help="name of the results; default: git's")
    machine.add_output(parser)
    options = parser.parse_args()
    if not any(script.cases(problem, options.cases) for problem in options.problems):
        parser.error(f"no such case in {', '.join(options.problems)}")
    return options


def measure(
    case: Case, programs: dict[Pass, dict[Any, Any]], chosen: list[peers.Peer]
) -> list[dict[str, Any]]:
    """Checks and times every pass of a case: a record for each."""
    inputs = drawing(case)()
    truth = exact.truth_of(case, inputs)
    ours = feature_peers.explain(case)

    def check(_: str, results: tuple[Any, ...]) -> dict[str, float]:
        return exact.errors_of_case(case, inputs, truth, results)

    records = []
    for of, built in programs.items():
        found = {peer: built[case, peer.name] for peer in chosen}
        runnable = {peer: one for peer, one in found.items() if not isinstance(one, str)}
        refused = {peer.name: one for peer, one in found.items() if peer not in runnable}
        record = run.measure_cell(case, of, runnable, inputs, check)
        records.append(record | {"no": refused, "ours": ours, "rounding": truth.rounded})
    return records


def prepare(case: Case) -> None:
    """Compiles what a case needs beside the peers' programs; may run on any thread."""
    drawing(case)
    exact.prepare_case(case)
    feature_peers.explain(case)  # our kernels, all at once


@functools.cache
def drawing(case: Case) -> Callable[[], dict[str, jax.Array]]:
    """Compiles `draw` for a case."""
    return jax.jit(functools.partial(draw, case)).lower().compile()


def draw(case: Case) -> dict[str, jax.Array]:
    """Draws the operands of a case."""
    found = {}
    rows = jnp.arange(case.batch)[:, None]
    positions = jnp.arange(case.length)
    for i, (name, (shape, dtype)) in enumerate(case.operands.items()):
        key = jax.random.key(i)
        if name == "mask" and case.mask == "half":
            found[name] = jax.random.bernoulli(key, 0.5, shape)
        elif name == "mask":
            ids = positions // max(case.length // 8, 1)
            found[name] = jnp.broadcast_to(ids[:, None] == ids, shape)
        elif name == "segments":
            assert case.segment is not None
            found[name] = jnp.broadcast_to(positions // case.segment, shape).astype(dtype)
        elif name == "positions":
            found[name] = jnp.broadcast_to(positions, shape).astype(dtype)
        elif name == "lengths":
            found[name] = (case.length // (1 + rows[:, 0] % 2)).astype(dtype)
        elif name == "dropout_key":
            found[name] = jnp.arange(2, dtype=dtype)
        else:
            found[name] = jax.random.normal(key, shape, dtype)
    if case.lengths:  # nothing comes from padding, so that no peer's zeros there matter
        valid = positions < found["lengths"][:, None]
        found["dout"] = jnp.where(valid[..., None, None], found["dout"], 0)
    return found


def write(
    script: Script,
    options: argparse.Namespace,
    chosen: list[peers.Peer],
    records: list[dict[str, Any]],
    ceiling: list[float],
) -> str:
    """Writes the numbers and the tables; returns the first table, and where they are."""
    about, folder = run.describe(options, f"benchmarks/{script.name}.py", ceiling)
    path = folder / f"{script.name}-{about['commit']}.json"
    path.write_text(run.in_lines(about, "cases", records))
    labels = {peer.name: peer.label for peer in chosen}
    table = charts.features(records, labels, "jax_flash", "jax_cudnn")
    notes = charts.not_measured(records, labels)
    text = "\n\n".join([run.introduce(about), table, notes]).rstrip() + "\n"
    path.with_suffix(".md").write_text(text)
    return f"{table}\n\n{path}"


if __name__ == "__main__":
    machine.require_gpu()
    main()
