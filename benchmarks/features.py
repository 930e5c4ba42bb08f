"""Measures each feature of attention on a GPU, peer beside peer in one run, at its price.

    python benchmarks/features.py                                  # every case, every peer
    python benchmarks/features.py --peers jax_flash jax_cudnn      # some four minutes
    python benchmarks/features.py --problems A B --cases plain bias_1NTS dropout
    python benchmarks/features.py --functions                      # a user's functions
    python benchmarks/features.py --functions --problems B --cases causal alibi_causal

Problems and cases are those of common/shapes.py; times are taken as run.py takes them: all is
compiled before, the peers of a case take turns, round by round, and nothing else runs between them.
Forward and backward is with all gradients, those of a bias and of sinks included. Before it is
timed, a result is compared with float64 attention (common/exact.py): a wrong one is a failure, with
no time. Writes build/benchmarks/<gpu>/features-<commit>.json and .md, after each problem.

--functions: ALiBi, a table of relative positions (with its gradient too), softcap and some without
a name (common/score_functions.py) as functions of the scores, full and causal; causal, documents of
512 and a window of 1024 as functions of the mask; of the sizes of problems A and B, beside
PyTorch's FlexAttention, attention without a function, and what is built in, where it is. Blocks of
a mask are made before, as FlexAttention's are; FlexAttention is compiled ahead, a process for each
program. Writes functions-<commit>.json and .md.
"""

import argparse
import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from common import charts, exact, feature_peers, machine, peers, runs, shapes
from common.shapes import Case, Pass
from tqdm import tqdm


@dataclasses.dataclass(frozen=True)
class Kind:
    """What is measured: features, or functions."""

    name: str
    features: dict[str, dict[str, Any]]
    cases: Callable[..., list[Case]]
    problems: tuple[str, ...]
    peers: tuple[str, ...]
    asks: Callable[[Case, str], bool] = lambda case, peer: True  # is the peer asked for the case?


def features_kind() -> Kind:
    return Kind(
        name="features",
        features=shapes.FEATURES,
        cases=shapes.cases,
        problems=tuple(shapes.PROBLEMS),
        peers=tuple(peer.name for peer in feature_peers.all_peers()),
    )


def functions_kind() -> Kind:
    def asks(case: Case, peer: str) -> bool:
        """FlexAttention has functions alone: what is built in for us is one of these for it."""
        return peer != feature_peers.FLEX or case.blocks or case.score is not None

    return Kind(
        name="functions",
        features=shapes.FUNCTIONS,
        cases=shapes.function_cases,
        problems=("A", "B"),
        peers=("jax_flash", feature_peers.FLEX),
        asks=asks,
    )


def main() -> None:
    """Measures the chosen cases and prints one table."""
    kind, options = parse()
    machine.say_what_is_missing()
    chosen = [peer for peer in feature_peers.all_peers() if peer.name in options.peers]
    ceiling = [runs.measure_product()]
    records: list[dict[str, Any]] = []
    text = ""
    flex = threading.Thread(target=compile_flex, args=(kind, options, chosen))
    flex.start()
    for problem in options.problems:
        cases = kind.cases(problem, options.cases)
        ahead = dict.fromkeys(options.passes[:1], prepare)  # once for all passes
        programs = {of: runs.build_all(of, cases, chosen, ahead.get(of)) for of in options.passes}
        flex.join()
        for case in (progress := tqdm(cases)):
            progress.set_description(case.name)
            asked = [peer for peer in chosen if kind.asks(case, peer.name)]
            records += measure(case, programs, asked)
        ceiling.append(runs.measure_product())
        text = write(kind, options, chosen, records, ceiling)  # a later problem may be cut off
    print(text)


def compile_flex(kind: Kind, options: argparse.Namespace, chosen: list[peers.Peer]) -> None:
    """Compiles FlexAttention for all that it will be asked, if it will be."""
    if not any(peer.name == feature_peers.FLEX for peer in chosen):
        return
    cases = [x for name in options.problems for x in kind.cases(name, options.cases)]
    cases = [case for case in cases if kind.asks(case, feature_peers.FLEX)]
    feature_peers.compile_flex(cases, options.passes)


def parse() -> tuple[Kind, argparse.Namespace]:
    """Reads the command line, of which the kind decides what else may stand in it."""
    ahead = argparse.ArgumentParser(add_help=False)
    ahead.add_argument("--functions", action="store_true", help="a user's functions instead")
    kind = functions_kind() if ahead.parse_known_args()[0].functions else features_kind()
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[ahead],
    )
    there = [peer.name for peer in feature_peers.all_peers()]
    names = [name for name in kind.peers if name in there]
    problems = list(kind.problems)
    parser.add_argument("--problems", nargs="+", choices=problems, default=problems)
    parser.add_argument("--cases", nargs="+", choices=kind.features, default=None)
    machine.add_peers(parser, names, names)
    parser.add_argument("--passes", nargs="+", choices=shapes.PASSES, default=list(shapes.PASSES))
    parser.add_argument("--commit", default=None, help="name of the results; default: git's")
    machine.add_output(parser)
    options = parser.parse_args()
    if not any(kind.cases(problem, options.cases) for problem in options.problems):
        parser.error(f"no such case in {', '.join(options.problems)}")
    return kind, options


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
        record = runs.measure_cell(case, of, runnable, inputs, check)
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
        elif name == "slopes":
            found[name] = 2.0 ** -jnp.linspace(1, 8, case.heads, dtype=dtype)
        elif name == "dropout_key":
            found[name] = jnp.arange(2, dtype=dtype)
        else:
            found[name] = jax.random.normal(key, shape, dtype)
    if case.lengths:  # nothing comes from padding, so that no peer's zeros there matter
        valid = positions < found["lengths"][:, None]
        found["dout"] = jnp.where(valid[..., None, None], found["dout"], 0)
    return found


def write(
    kind: Kind,
    options: argparse.Namespace,
    chosen: list[peers.Peer],
    records: list[dict[str, Any]],
    ceiling: list[float],
) -> str:
    """Writes the numbers and the tables; returns the first table, and where they are."""
    about, folder = runs.describe(options, "benchmarks/features.py", ceiling)
    path = folder / f"{kind.name}-{about['commit']}.json"
    path.write_text(runs.in_lines(about, "cases", records))
    labels = {peer.name: peer.label for peer in chosen}
    table = charts.features(records, labels, "jax_flash", "jax_cudnn")
    notes = charts.not_measured(records, labels)
    text = "\n\n".join([runs.introduce(about), table, notes]).rstrip() + "\n"
    path.with_suffix(".md").write_text(text)
    return f"{table}\n\n{path}"


if __name__ == "__main__":
    machine.require_gpu()
    main()
