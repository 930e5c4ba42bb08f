"""Owns the compiling of cliffs.py's programs: of many problems, peers and passes, side by side.

XLA tunes its products: it compiles some thirty candidates of each on all cores, and times them on
the GPU. Programs that are tuned in many threads at once run beside each other's candidates, wait
0.1 s for each that another's unloading holds up, and tune what another is tuning. So the first
program of a pass, which tunes, is compiled in few threads, before the rest, which is in many.

Read next: cliffs.py, which measures them; drawn_peers.py for what each peer computes.
"""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import jax
from tqdm import tqdm

from . import drawn, drawn_peers, shapes
from .drawn import Drawn
from .drawn_peers import OURS, XLA, structs
from .drawn_tables import KINDS, NEIGHBOUR, TITLES
from .shapes import Pass

UNDROPPED = "XLA without dropout"
TUNERS, THREADS = 3, 16  # threads that compile what XLA tunes, and the rest
UNTUNED = {"xla_gpu_autotune_level": 0}  # each product as XLA has it by default
FAR_BYTES = 2.0  # times what kernels take: XLA's scores alone, written and read in float32

Compiled = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is measured: a call, and where it comes from."""

    source: str  # "seed 3" or the name of a set
    index: int
    call: Drawn

    @property
    def name(self) -> str:
        return f"{self.source} #{self.index}: {self.call.name}"


@dataclasses.dataclass
class Programs:
    """The programs of a problem, by name and way; or why there are none."""

    ready: dict[str, dict[tuple[str, Pass], Compiled]] = dataclasses.field(default_factory=dict)
    no: dict[str, str] = dataclasses.field(default_factory=dict)
    undropped: dict[Pass, Compiled] = dataclasses.field(default_factory=dict)  # the mean of dropout
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)  # a thread's, of compiling
    untuned: bool = False  # XLA's, which has no program of several attentions then


@dataclasses.dataclass(frozen=True)
class Job:
    """What one thread compiles: a pass of a peer, for a problem or its neighbour."""

    problem: Problem
    name: str
    call: Drawn
    attend: Any
    of: Pass

    @functools.cached_property
    def step(self) -> Any:
        return step_of(self.call, self.attend, self.of)

    @property
    def makes_products(self) -> bool:
        """Whether XLA makes products of it, which it tunes."""
        if self.name in (OURS, NEIGHBOUR):
            return drawn_peers.ran_on(self.call)[self.of] == "xla"
        return self.name == XLA

    def compile(self, kind: str, options: Mapping[str, Any] | None = None) -> Compiled:
        if kind == "single":
            return self.step.lower(structs(self.call)).compile(options)
        return compile_several(self.call, self.step, self.of)


def compile_all(
    batch: Sequence[Problem],
    chosen: Mapping[str, Any],
    neighbours: bool,
    beside: Sequence[Callable[[], Any]] = (),
) -> dict[Problem, Programs]:
    """Compiles all programs of some problems; `beside` is called in a thread too."""
    found = {problem: Programs() for problem in batch}
    jobs = [job for problem in batch for job in jobs_of(problem, chosen, neighbours)]
    for problem, programs in found.items():
        programs.untuned = XLA in chosen and cannot_lead(problem.call, chosen)

    def run(job: Job, kind: str) -> None:
        programs = found[job.problem]
        plain = job.name == UNDROPPED or (job.name == XLA and programs.untuned)
        if f"{job.name}, {TITLES[job.of]}" in programs.no or (plain and kind == "program"):
            return
        begin = time.perf_counter()
        try:
            one = job.compile(kind, UNTUNED if plain else None)
        except Exception as error:  # a peer's failure is a result of the comparison
            programs.no[f"{job.name}, {TITLES[job.of]}"] = reason(error)
            programs.ready.get(job.name, {}).pop(("single", job.of), None)
        else:
            if job.name == UNDROPPED:
                programs.undropped[job.of] = one
            else:
                programs.ready.setdefault(job.name, {})[kind, job.of] = one
        finally:
            programs.seconds[f"{job.name}, {kind} {job.of}"] = round(time.perf_counter() - begin, 1)

    def run_all(some: Sequence[Job], kinds: Sequence[str]) -> None:
        for job, kind in itertools.product(some, kinds):
            run(job, kind)

    clock = [time.perf_counter()]
    ours = dict.fromkeys(job.call for job in jobs if job.name in (OURS, NEIGHBOUR))
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(drawn_peers.ran_on, ours))  # compiles kernels, of both passes at once
        makes_products = list(pool.map(lambda job: job.makes_products, jobs))
    tuned: dict[tuple[Problem, str], list[Job]] = {}  # passes in turn: they have products in common
    others = []
    for job, products in zip(jobs, makes_products, strict=True):
        if products and not (job.name == XLA and found[job.problem].untuned):
            tuned.setdefault((job.problem, job.name), []).append(job)
        else:
            others.append(job)
    clock.append(time.perf_counter())
    with ThreadPoolExecutor(TUNERS) as pool:
        show([pool.submit(run_all, some, ["single"]) for some in tuned.values()], "tuning")
    clock.append(time.perf_counter())
    with ThreadPoolExecutor(THREADS) as pool:
        ahead = [pool.submit(one) for one in beside]
        ahead += [pool.submit(run, job, "program") for some in tuned.values() for job in some]
        ahead += [pool.submit(run_all, [job], KINDS[::-1]) for job in others]
        show(ahead, "compiling")
    clock.append(time.perf_counter())
    parts = ", ".join(f"{b - a:.0f} s" for a, b in itertools.pairwise(clock))
    print(f"kernels, what is tuned, the rest: compiled in {parts}", flush=True)
    return found


def show(ahead: Sequence[Any], what: str) -> None:
    """Waits for all, and raises what one raised."""
    for one in tqdm(as_completed(ahead), desc=what, total=len(ahead), disable=None):
        one.result()


def jobs_of(problem: Problem, chosen: Mapping[str, Any], neighbours: bool) -> list[Job]:
    """Lists what is compiled for a problem."""
    call = problem.call
    asked = [(name, call, attend) for name, attend in chosen.items()]
    if neighbours and (other := call.neighbour) is not None:
        asked.append((NEIGHBOUR, other, drawn_peers.attend_flash))
    if call.dropout:
        plain = dataclasses.replace(call, dropout=0.0)
        asked.append((UNDROPPED, plain, drawn_peers.attend_xla))
    return [Job(problem, *one, of) for one in asked for of in shapes.PASSES]


def cannot_lead(call: Drawn, chosen: Mapping[str, Any]) -> bool:
    """Tells whether XLA's scores alone take long beside what kernels of another peer take.

    It is a guess, so that tuning is spared: cliffs.py measures what is not tuned, and has it tuned
    where it is not far behind.
    """
    kernels = chosen.keys() - {OURS, XLA}
    if not kernels or call.dtype == "float32" or call.score or call.bottom_right:
        return False
    seconds = 8 * call.scores / drawn.RATES[1]
    return seconds > max(FAR_BYTES * call.seconds, drawn.HOST_SECONDS / 4)


def tune(problem: Problem, programs: Programs, attend: Any) -> None:
    """Compiles XLA's programs of a problem again, tuned."""
    programs.untuned = False
    for of in shapes.PASSES:
        job = Job(problem, XLA, problem.call, attend, of)
        for kind in ("single", "program"):
            if ("single", of) in programs.ready.get(XLA, {}):
                programs.ready[XLA][kind, of] = job.compile(kind)


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0][:160]


def step_of(call: Drawn, attend: Any, of: Pass) -> Any:
    """Returns a pass of one attention, jitted: it is traced once for both of its programs."""

    def step(given: dict[str, Any]) -> tuple[Any, ...]:
        if of == "forward":
            return (attend(call, given),)
        out, backward = jax.vjp(
            lambda *some: attend(call, given | dict(zip(call.gradients, some, strict=True))),
            *(given[name] for name in call.gradients),
        )
        return out, *backward(given["dout"])

    return jax.jit(step)


def compile_several(call: Drawn, step: Any, of: Pass) -> Compiled:
    """Compiles as many attentions as a program has, each of what the one before returned.

    Queries and the gradient of out are the out before, which has the shape and stays of the size;
    rows of gradients become as small as no query of a model is. No result is left out, so XLA
    computes them all; keys and values are each attention's own, so XLA does nothing for two at
    once.
    """

    @jax.jit
    def several(given: dict[str, Any], own: dict[str, list[Any]]) -> list[tuple[Any, ...]]:
        found = []
        for i in range(call.calls):
            results = step(given | {name: each[i] for name, each in own.items()})
            found.append(results)
            given = given | {"q": results[0], "dout": results[0]}
        return found

    like = structs(call)
    own = {name: [like.pop(name)] * call.calls for name in drawn.VARYING if name in like}
    return several.lower(like, own).compile()
