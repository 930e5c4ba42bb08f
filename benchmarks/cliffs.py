"""Measures calls that nobody named, drawn by a seed, beside the best of the peers: the worst cells.

    python benchmarks/cliffs.py                                # 100 problems of each of three seeds
    python benchmarks/cliffs.py --seeds 5 --problems 100 --seconds 180
    python benchmarks/cliffs.py --seeds 5 --resume FILE.json   # the rest of them
    python benchmarks/cliffs.py --seeds 5 --only 17            # one of them again
    python benchmarks/cliffs.py --seeds 5 --from 50            # the second half
    python benchmarks/cliffs.py --set short cross few          # named lists: common/drawn.py
    python benchmarks/cliffs.py --platform cpu --problems 2    # tiny ones, to see it run

A problem has head dim 16 to 256, T and S 1 to 8192, equal or not, any number of rows and heads, and
causality, a window, lengths, documents, a bias, a mask, dropout: problem i of seed s is the same
call, whatever else is drawn. Peers are FlashAttention-3 where `dew_flash_attn` is there, cuDNN, and
XLA's own program: of jax.nn, or the plain formula for what that has no argument for.

Each is measured in four ways, the peers in turns: forward, and forward and backward; "program", 16
attentions of a program (4 where one takes longer than the host does), each of the out of the one
before, in a loop of a millisecond and more, which hides the host but for some 15 µs a turn, at most
a microsecond an attention; and "single", calls of one attention from Python, one behind the other,
after all programs are compiled and measured, when nothing else runs. Out and gradients are compared
with those of XLA's program first: a peer that computes something else has no time. Where dropout's
patterns differ, the noise is compared.

A time is the least of its turns: what disturbs one, another process, a clock that has just risen,
makes it longer. The spread, of which the table says the median and the ninth of ten, is how far
the median of the turns is above the least. A peer that takes more than 1.5 x the best's time in a
first turn has that one, and so have all where ours leads by 1.3 x. Ways in which ours is slower are
measured again, longer. XLA's program whose scores alone take twice what kernels need is called
singly alone.

Programs are compiled in processes of their own, ahead of the measurement. XLA's products are not
tuned then. Behind all others, problems are measured again with tuned ones where XLA's program takes
less than 1.3 x ours in a way: with --seconds, by a run of its own, `--resume FILE --tune`.

Prints the geometric mean and the lowest of the best other / ours for each way, the 20 worst, and
the 20 worst of our own time at the next round sizes / ours, in programs: no less work, so that 1 is
no cliff.
Writes build/benchmarks/<device>/cliffs-<commit>.json and .md, every few problems; --resume goes on
with such a file.
"""

import argparse
import dataclasses
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
# Loops stay out, too: each turn is a graph, as a user's program is without a loop.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer=-CUDNN,-WHILE"
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
WINDOW = 0.008  # seconds of a turn: long beside the 50 µs and more of its begin and end
ROUGH = 0.5  # of a window: the first turn
SINGLES, SINGLE = 3.0, 0.3  # seconds that are left to calls one by one: once, and a problem
LEADS = 1.3  # times ours takes the best other in that: it is enough
ROUNDS, MORE_ROUNDS = 3, 6  # more turns; the second: of ways in which ours is slower
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
        alone: list[tuple[Problem, Programs]] = []
        with ahead.Processes(options.platform, count) as processes:
            found = processes.each(packed, some, until and until - SINGLES)
            for i, (problem, programs) in enumerate(list(found) if tuned else found):
                left = math.inf if until is None else until - time.perf_counter()
                if left < SINGLES + SINGLE * len(alone):
                    break
                record, loaded = measure_or_say(problem, programs)
                records[key_of(record)] = record
                alone.append((problem, loaded))
                if i % KEPT == KEPT - 1:
                    tell(f"{i + 1} problems in programs")
        for problem, loaded in alone:
            if until and time.perf_counter() > until:
                break
            measure_singly(problem, loaded, records[problem.source, problem.index])
        tell(f"{len(alone)} problems")

    def tell(what: str) -> None:
        write(options, asked, records.values(), ceiling)
        print(f"{what} in {time.perf_counter() - begin:.0f} s", flush=True)

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
    parser.add_argument("--from", type=int, default=0, dest="first", help="index, of each seed")
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
            for i in options.only or range(options.first, options.problems)
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


def measure_or_say(problem: Problem, packed: Programs) -> tuple[dict[str, Any], Programs]:
    """Measures a problem in programs; says why where that fails as a whole, for want of memory say.

    Returns its record, and what is to be called singly, loaded.
    """
    programs, found = packed, {"error": {}, "wrong": {}, "took": {}}
    ms: dict[str, Any] = {f"{kind} {of}": {} for kind, of in WAYS}
    spread = {way: {} for way in ms}
    try:
        programs, found = load_and_check(problem, packed)
        begin = time.perf_counter()
        time_ways("program", problem, programs, ms, spread)
        found["took"]["timing"] = round(time.perf_counter() - begin, 2)
    except Exception as error:
        programs.no[OURS] = reason(error)
        programs = dataclasses.replace(programs, ready={})
    call = problem.call
    record = {
        "problem": {"source": problem.source, "index": problem.index, "name": call.name},
        "cell": vars(call),
        "neighbour": None if call.neighbour is None else call.neighbour.name,
        "calls": {of: [call.turns(of), call.calls] for of in shapes.PASSES},
        "compiling": programs.seconds,
        "untuned": programs.untuned,
        "ran": programs.ran,
        "ms": ms,
        "spread": spread,
        "no": programs.no,
    }
    return record | found, programs


def load_and_check(problem: Problem, packed: Programs) -> tuple[Programs, dict[str, Any]]:
    """Loads the programs of a problem, as `compile_packed` returns them, and compares results."""
    clock = [time.perf_counter()]
    programs = packed.loaded()
    clock.append(time.perf_counter())
    given = drawn.arrays(problem.call)
    loaded = {name: jax.device_put(x) for name, x in given.items()}
    clock.append(time.perf_counter())
    error, wrong = check(problem, programs, given, loaded)
    clock.append(time.perf_counter())
    parts = [round(b - a, 2) for a, b in itertools.pairwise(clock)]
    took = dict(zip(("loading", "arrays", "comparing"), parts, strict=True))
    return programs, {"error": error, "wrong": wrong, "took": took}


def measure_singly(problem: Problem, programs: Programs, record: dict[str, Any]) -> None:
    """Times calls of one attention from Python, and lets the programs go."""
    begin = time.perf_counter()
    try:
        time_ways("single", problem, programs, record["ms"], record["spread"])
    except Exception as error:
        record["no"][f"{OURS}, single"] = reason(error)
    programs.ready.clear()
    record["took"]["singly"] = round(time.perf_counter() - begin, 2)


def time_ways(
    kind: str,
    problem: Problem,
    programs: Programs,
    ms: dict[str, dict[str, float]],
    spread: dict[str, dict[str, float]],
) -> None:
    """Times both passes in one kind of program; fills in times and spreads by way and name."""
    called = dict.fromkeys(programs.ready, problem.call)
    if NEIGHBOUR in called:
        assert problem.call.neighbour is not None
        called[NEIGHBOUR] = problem.call.neighbour
    given = {
        call: {name: jax.device_put(x) for name, x in drawn.arrays(call).items()}
        for call in set(called.values())
    }
    for of in shapes.PASSES:
        calls = {
            name: functools.partial(ways.pop((kind, of)), given[called[name]])
            for name, ways in programs.ready.items()
            if (kind, of) in ways
        }
        count = {
            name: 1 if kind == "single" else called[name].calls * called[name].turns(of)
            for name in calls
        }
        turns, failed = time_in_turns(calls, count)
        programs.no.update({f"{name}, {kind} {TITLES[of]}": why for name, why in failed.items()})
        for name, taken in turns.items():
            least = min(taken)
            ms[f"{kind} {of}"][name] = float(f"{1e3 * least:.4g}")
            spread[f"{kind} {of}"][name] = round(statistics.median(taken) / least - 1, 4)


def time_in_turns(
    calls: Mapping[str, Callable[[], Any]], count: Mapping[str, int]
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Returns seconds of an attention by name, a number for each turn, and why one has none."""
    turns: dict[str, list[float]] = {}
    again: dict[str, int] = {}
    failed = {}
    for name, call in calls.items():
        try:
            jax.block_until_ready(call())
        except Exception as error:  # out of memory, say
            failed[name] = reason(error)
            continue
        once = runs.queue(call, jax.block_until_ready, 1)  # the first that is a graph
        repeats = max(1, math.ceil(ROUGH * WINDOW / once))
        rough = runs.queue(call, jax.block_until_ready, repeats)
        again[name] = max(1, math.ceil(WINDOW / rough))
        turns[name] = [rough / count[name]]

    def least(name: str) -> float:
        return min(turns.get(name, [math.inf]))

    def go(names: Sequence[str], rounds: int) -> None:
        for i in range(rounds):  # forth and back, so that a clock that drifts hits all alike
            for name in names[:: -1 if i % 2 else 1]:
                taken = runs.queue(calls[name], jax.block_until_ready, again[name])
                turns[name].append(taken / count[name])

    others = [name for name in turns if name not in (OURS, NEIGHBOUR)]
    best = min(map(least, others), default=math.inf)
    near = [name for name in others if least(name) < FAR * best and best < LEADS * least(OURS)]
    close = [name for name in (OURS, NEIGHBOUR) if name in turns and (near or NEIGHBOUR in turns)]
    go([*close, *near], ROUNDS)
    if min(map(least, near), default=math.inf) < 1.02 * least(OURS):
        go([*close, *near], MORE_ROUNDS)
    return turns, failed


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
