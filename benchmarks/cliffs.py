"""Measures calls that nobody named, drawn by a seed, beside the best of the peers: the worst cells.

    python benchmarks/cliffs.py                                # 100 problems of each of three seeds
    python benchmarks/cliffs.py --seeds 5 --problems 100 --seconds 180
    python benchmarks/cliffs.py --seeds 5 --resume FILE.json   # the rest of them
    python benchmarks/cliffs.py --seeds 5 --only 17            # one of them again
    python benchmarks/cliffs.py --set short cross few          # named lists: common/drawn.py
    python benchmarks/cliffs.py --platform cpu --problems 2    # tiny ones, to see it run

A problem has head dim 16 to 256, T and S 1 to 8192, equal or not, any number of rows and heads, and
causality, a window, lengths, documents, a bias, a mask, dropout: problem i of seed s is the same
call, whatever else is drawn. Peers are FlashAttention-3 where `dew_flash_attn` is there, cuDNN, and
XLA's own program: of jax.nn, or the plain formula for what that has no argument for.

Each is measured in four ways, the peers in turns: forward, and forward and backward; "program", 16
attentions of a program (4 where one takes longer than the host does), each of the out of the one
before, with keys and values of its own; and "single", calls of one attention from Python, one
behind the other. Out and gradients are compared with those of XLA's program first: a peer that
computes something else has no time. Where dropout's patterns differ, the noise is compared. A peer
that takes more than 1.5 x the best's time in a rough measurement keeps that one, and so do all
where ours leads by 1.3 x. Ways in which ours is slower are measured again, longer. XLA's program
whose scores alone take twice what kernels need is called singly alone.

Programs are compiled in processes of their own, ahead of the measurement. XLA's products are not
tuned then. Behind all others, problems are measured again with tuned ones where XLA's program takes
less than 1.3 x ours in a way: with --seconds, by a run of its own, `--resume FILE --tune`.

Prints the geometric mean and the lowest of the best other / ours for each way, the 20 worst, and
the 20 worst of our own time at the next round sizes / ours: no less work, so that 1 is no cliff.
Writes build/benchmarks/<device>/cliffs-<commit>.json and .md, every few problems; --resume goes on
with such a file.
"""

import argparse
import faulthandler
import functools
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

# cuDNN's attention in a CUDA graph of XLA ends the process (jax 0.11.2, "local_device_ordinal").
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer=-CUDNN"
)

import jax
import jax.numpy as jnp
import numpy as np
from common import ahead, drawn, drawn_peers, machine, runs, shapes
from common.drawn import Drawn
from common.drawn_programs import Problem, Programs, compile_packed, reason, weight_shape
from common.drawn_tables import KINDS, NEIGHBOUR, TITLES, WAYS, compiling, missing, summary, worst
from common.shapes import Pass

OURS, XLA = drawn_peers.OURS, drawn_peers.XLA
KEPT = 10  # problems after which results are written
WINDOW = 0.004  # seconds of a round
ROUGH = 0.5  # of a window: the first measurement
LEADS = 1.3  # times ours takes the best other in that: it is enough
ROUNDS, MORE_ROUNDS = 3, 6  # the second: of ways in which ours is slower
FAR = 1.5  # times the best other: not measured in turns
TUNERS = 4  # processes that tune XLA's products on the GPU at once
NEAR = 1.3  # times ours takes XLA's program, not tuned: it is measured tuned
# Largest norm of an error, of that of the result, where each peer rounds in its own places.
TOLERANCES = {"bfloat16": 0.04, "float16": 0.01, "float32": 0.01}
LEAST = 1e-3  # norm of an element below which errors are absolute: no gradient where S is 1


def main() -> None:
    """Compiles and measures the problems, batch by batch."""
    options = parse()
    if options.platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    else:
        machine.require_gpu()
    begin = time.perf_counter()
    until = begin + options.seconds if options.seconds else None
    limits = drawn.TINY if options.platform == "cpu" else drawn.GPU
    asked = problems(options, limits)
    kept = json.loads(options.resume.read_text()) if options.resume else {}
    records = {key_of(record): record for record in kept.get("problems", [])}
    ceiling = [*kept.get("product_tflops", []), runs.measure_product()]

    def go_on(some: Sequence[Problem], tuned: bool) -> None:
        packed = functools.partial(compile_packed, names, options.neighbours, tuned)
        count = min(TUNERS, options.processes) if tuned else options.processes
        with ahead.Processes(options.platform, count) as processes:
            found = processes.each(packed, some, until)
            for i, (problem, programs) in enumerate(list(found) if tuned else found):
                if until and time.perf_counter() > until:
                    break
                record = measure_or_say(problem, programs)
                records[key_of(record)] = record
                if i % KEPT == KEPT - 1:
                    write(options, asked, records.values(), ceiling)
                    print(f"{i + 1} problems in {time.perf_counter() - begin:.0f} s", flush=True)

    names = [n for n in drawn_peers.all_peers() if options.peers is None or n in options.peers]
    drawn_peers.register(names)
    if not options.tune:
        go_on([one for one in asked if (one.source, one.index) not in records], tuned=False)
    if options.tune or not options.seconds:
        near = {key for key, record in records.items() if record["untuned"] and is_near(record)}
        go_on([one for one in asked if (one.source, one.index) in near], tuned=True)
    if not records:
        raise SystemExit(f"{options.seconds} s are over before a problem is measured")
    ceiling.append(runs.measure_product())
    print(write(options, asked, records.values(), ceiling))


def key_of(record: Mapping[str, Any]) -> tuple[str, int]:
    return record["problem"]["source"], record["problem"]["index"]


def is_near(record: Mapping[str, Any]) -> bool:
    """Tells whether XLA's program, tuned, could lead or nearly so."""
    ways = [ms for ms in record["ms"].values() if XLA in ms and OURS in ms]
    return any(ms[XLA] < NEAR * ms[OURS] for ms in ways)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--problems", type=int, default=100, help="of each seed")
    parser.add_argument("--set", nargs="+", choices=drawn.SETS, default=[], dest="sets")
    parser.add_argument("--only", type=int, nargs="+", help="indices, of each seed or set")
    parser.add_argument("--seconds", type=float, help="stop when they are spent")
    parser.add_argument("--resume", type=Path, help="a file of results, to go on with")
    parser.add_argument("--tune", action="store_true", help="no others: those that are near, tuned")
    parser.add_argument(
        "--processes", type=int, default=ahead.PROCESSES, help="0: this one compiles"
    )
    parser.add_argument("--no-neighbours", dest="neighbours", action="store_false")
    machine.add_peers(parser, list(drawn_peers.LABELS))
    parser.add_argument("--platform", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--commit", default=None, help="name of the results; default: git's")
    machine.add_output(parser)
    options = parser.parse_args()
    if options.peers is not None and OURS not in options.peers:
        parser.error(f"--peers are beside {OURS}, which is one of them")
    return options


def problems(options: argparse.Namespace, limits: drawn.Limits) -> list[Problem]:
    """Lists what is asked for: of seeds by turns, so that a part has as many of each."""
    if options.sets:
        found = [
            Problem(name, i, call)
            for name in options.sets
            for i, call in enumerate(drawn.named(name, limits))
            if options.only is None or i in options.only
        ]
    else:
        found = [
            Problem(f"seed {seed}", i, drawn.draw(seed, i, limits))
            for i in options.only or range(options.problems)
            for seed in options.seeds
        ]
    if not found:
        raise SystemExit("no such problem")
    return found


# ---- comparing -----------------------------------------------------------------------------------


def errors(
    call: Drawn,
    norms: Mapping[Any, Callable[..., Any]],
    given: Mapping[str, np.ndarray],
    of: Pass,
    results: Any,
    right: Any,
) -> dict[str, float]:
    """Returns the norm of each error over that of what is right."""
    seen = drawn.valid(call, given) | {"bias": np.ones((1, 1), bool)}
    found = {}
    for name, x, y in zip(call.results(of), results, right, strict=True):
        shape = weight_shape(call, name, x.shape)
        valid = seen[name].reshape(shape)
        error, whole = norms[x.shape, call.dtype, shape](x, y, jnp.asarray(valid))
        least = LEAST * math.sqrt(x.size)
        found[name] = float(f"{float(error) / max(float(whole), least):.3g}")
    return found


def is_wrong(call: Drawn, found: Mapping[str, float], drops: bool) -> bool:
    """Tells whether errors are those of another function.

    `drops`: beside attention without dropout, whose weights w are 0 or w / (1 - rate): the error of
    out is sqrt(rate / (1 - rate)) of it where values are independent.
    """
    if any(math.isnan(error) for error in found.values()):
        return True
    if not drops:
        return any(error > TOLERANCES[call.dtype] for error in found.values())
    noise = math.sqrt(call.dropout / (1 - call.dropout))
    if call.scores < 4096:  # too few to tell
        return any(error > 2 for error in found.values())
    by_weights = [found[name] for name in ("out", "v") if name in found]
    return any(not 0.5 < x / noise < 1.6 for x in by_weights) or any(x > 2 for x in found.values())


def check(
    problem: Problem, programs: Programs, given: dict[str, np.ndarray], loaded: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Runs each peer once and compares: errors by peer and pass, and what is wrong with which.

    What is right is XLA's; where that has no room, ours.
    """
    found: dict[str, Any] = {}
    wrong: dict[str, str] = {}
    call = problem.call
    for of in shapes.PASSES:
        results = {}
        for name, ways in list(programs.ready.items()):
            if name == NEIGHBOUR or ("single", of) not in ways:
                continue
            try:
                results[name] = jax.block_until_ready(ways["single", of](loaded))
            except Exception as error:  # as in compiling
                programs.no[f"{name}, {TITLES[of]}"] = reason(error)
                for kind in KINDS:
                    ways.pop((kind, of), None)
        right = results.get(XLA, results.get(OURS))
        if call.dropout and of in programs.undropped:
            without = {n: x for n, x in loaded.items() if n != "dropout_key"}
            right = jax.block_until_ready(programs.undropped[of](without))
        for name, one in results.items():
            error = errors(call, programs.norms, given, of, one, right)
            found.setdefault(name, {})[of] = error
            if is_wrong(call, error, bool(call.dropout)):
                wrong[f"{name}, {TITLES[of]}"] = ", ".join(f"{n} {x:g}" for n, x in error.items())
                for kind in KINDS:
                    programs.ready[name].pop((kind, of))
    return found, wrong


# ---- measuring -----------------------------------------------------------------------------------


def measure_or_say(problem: Problem, programs: Programs) -> dict[str, Any]:
    """Measures a problem; says why where that fails as a whole, for want of memory say."""
    try:
        return measure(problem, programs)
    except Exception as error:
        return about(problem, programs) | {
            "ms": {f"{kind} {of}": {} for kind, of in WAYS},
            "error": {},
            "wrong": {},
            "no": programs.no | {OURS: reason(error)},
        }


def about(problem: Problem, programs: Programs) -> dict[str, Any]:
    call = problem.call
    return {
        "problem": {"source": problem.source, "index": problem.index, "name": call.name},
        "cell": vars(call),
        "neighbour": None if call.neighbour is None else call.neighbour.name,
        "calls": call.calls,
        "compiling": programs.seconds,
        "untuned": programs.untuned,
        "ran": programs.ran,
    }


def measure(problem: Problem, packed: Programs) -> dict[str, Any]:
    """Compares and times the programs of a problem, as `compile_packed` returns them."""
    call, clock = problem.call, [time.perf_counter()]
    programs = packed.loaded()
    clock.append(time.perf_counter())
    given = drawn.arrays(call)
    loaded = {name: jax.device_put(x) for name, x in given.items()}
    clock.append(time.perf_counter())
    error, wrong = check(problem, programs, given, loaded)
    clock.append(time.perf_counter())
    arguments: dict[str, Any] = dict.fromkeys(programs.ready, load(call, loaded))
    if NEIGHBOUR in programs.ready:
        assert call.neighbour is not None
        other = {n: jax.device_put(x) for n, x in drawn.arrays(call.neighbour).items()}
        arguments[NEIGHBOUR] = load(call.neighbour, other)
    ms: dict[str, dict[str, float]] = {}
    for kind, of in WAYS:
        calls = {}
        for name, ways in programs.ready.items():
            if (kind, of) in ways:
                single, several = arguments[name]
                inputs = single if kind == "single" else several
                calls[name] = functools.partial(ways[kind, of], *inputs)
        count = dict.fromkeys(calls, 1 if kind == "single" else call.calls)
        if NEIGHBOUR in calls and kind == "program":
            assert call.neighbour is not None
            count[NEIGHBOUR] = call.neighbour.calls
        seconds, failed = time_in_turns(calls, count)
        programs.no.update({f"{name}, {kind} {TITLES[of]}": why for name, why in failed.items()})
        ms[f"{kind} {of}"] = {name: float(f"{1e3 * x:.4g}") for name, x in seconds.items()}
    clock.append(time.perf_counter())
    parts = [round(b - a, 2) for a, b in itertools.pairwise(clock)]
    took = dict(zip(("loading", "arrays", "comparing", "timing"), parts, strict=True))
    found = {"ms": ms, "error": error, "wrong": wrong, "no": programs.no, "took": took}
    return about(problem, programs) | found


def load(call: Drawn, loaded: dict[str, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Returns the arguments of the two programs: keys and values of each attention are copies."""
    shared = {name: x for name, x in loaded.items() if name not in drawn.VARYING}
    own = {
        name: [x, *(jax.device_put(x, may_alias=False) for _ in range(call.calls - 1))]
        for name, x in loaded.items()
        if name in drawn.VARYING
    }
    return (loaded,), (shared, own)


def time_in_turns(
    calls: Mapping[str, Callable[[], Any]], count: Mapping[str, int]
) -> tuple[dict[str, float], dict[str, str]]:
    """Returns seconds of an attention by name, and why one has none."""
    rough: dict[str, float] = {}
    failed = {}
    for name, call in calls.items():
        try:
            jax.block_until_ready(call())
        except Exception as error:  # out of memory, say
            failed[name] = reason(error)
            continue
        once = runs.queue(call, jax.block_until_ready, 1)
        again = min(max(1, math.ceil(ROUGH * WINDOW / once)), 50)
        rough[name] = runs.queue(call, jax.block_until_ready, again)
    each = {name: x / count[name] for name, x in rough.items()}
    best = min((x for name, x in each.items() if name not in (OURS, NEIGHBOUR)), default=math.inf)
    if best > LEADS * each.get(OURS, math.inf) and NEIGHBOUR not in each:
        return each, failed
    close = [name for name, x in each.items() if name in (OURS, NEIGHBOUR) or x < FAR * best]
    turns: dict[str, list[float]] = {name: [] for name in close}

    def go(rounds: int) -> None:
        for _ in range(rounds):
            for name in close:
                again = max(1, math.ceil(WINDOW / rough[name]))
                taken = runs.queue(calls[name], jax.block_until_ready, again)
                turns[name].append(taken / count[name])
        each.update({name: statistics.median(x) for name, x in turns.items()})

    go(ROUNDS)
    if OURS in turns:
        others = [x for name, x in each.items() if name != OURS]
        if others and min(others) < 1.02 * each[OURS]:
            go(MORE_ROUNDS)
    return each, failed


# ---- results -------------------------------------------------------------------------------------


def write(
    options: argparse.Namespace,
    asked: Sequence[Problem],
    measured: Iterable[dict[str, Any]],
    ceiling: list[float],
) -> str:
    """Writes the numbers and the tables; returns them."""
    records = list(measured)
    head, folder = runs.describe(options, "benchmarks/cliffs.py", ceiling)
    path = folder / f"cliffs-{head['commit']}.json"
    counts = {"asked": len(asked), "measured": len(records)}
    path.write_text(runs.in_lines(head | counts, "problems", records))
    ran = f"{len(records)} of {len(asked)} problems were measured"
    untuned = sum(record["untuned"] for record in records)
    ran += f", {untuned} with XLA's products as cuBLAS chooses, the others tuned."
    parts = [
        f"{runs.introduce(head)} {ran}",
        summary(records),
        worst(records),
        missing(records),
        compiling(records),
    ]
    text = "\n\n".join(part for part in parts if part) + "\n"
    path.with_suffix(".md").write_text(text)
    return f"{text}\n{path}"


if __name__ == "__main__":
    faulthandler.enable()  # a peer may end the process: says what threads did
    main()
