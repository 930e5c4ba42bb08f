"""Owns the compiling of cliffs.py's programs: all of a problem, in a process of ahead.py.

XLA tunes its products: it compiles some thirty candidates of each on all cores, and times them on
the GPU. That takes most of the time, and the GPU from who measures. So products are cuBLAS's by its
own choice at first; cliffs.py has those tuned of problems where a tuned one could lead.

Read next: cliffs.py, which measures them; drawn_peers.py for what each peer computes.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import layout, serialize_executable

from . import drawn, drawn_peers, shapes
from .drawn import Drawn
from .drawn_peers import OURS, XLA, structs
from .drawn_tables import KINDS, NEIGHBOUR, TITLES
from .shapes import Pass

UNDROPPED = "XLA without dropout"
FAR_BYTES = 2.0  # times what kernels take: XLA's scores alone, written and read in float32

Compiled = Callable[..., Any]
Compared = tuple[tuple[int, ...], str, tuple[int, ...]]  # shape, dtype, shape of what counts


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

    ready: dict[str, dict[tuple[str, Pass], Any]] = dataclasses.field(default_factory=dict)
    no: dict[str, str] = dataclasses.field(default_factory=dict)
    undropped: dict[Pass, Any] = dataclasses.field(default_factory=dict)  # the mean of dropout
    norms: dict[Compared, Any] = dataclasses.field(default_factory=dict)
    ran: dict[Pass, str] = dataclasses.field(default_factory=dict)  # what of ours runs each pass
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)  # of compiling
    untuned: bool = True  # XLA's products

    def packed(self) -> "Programs":
        """Returns them as bytes, for another process."""
        return self._each(serialize_executable.serialize)

    def loaded(self) -> "Programs":
        """Returns those of another process, ready to be called."""
        load, first = serialize_executable.deserialize_and_load, jax.devices()[:1]
        return self._each(lambda one: load(*one, execution_devices=first))

    def _each(self, change: Callable[[Any], Any]) -> "Programs":
        def all_of(programs: Mapping[Any, Any]) -> dict[Any, Any]:
            return {name: change(one) for name, one in programs.items()}

        return dataclasses.replace(
            self,
            ready={name: all_of(ways) for name, ways in self.ready.items()},
            undropped=all_of(self.undropped),
            norms=all_of(self.norms),
        )


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

    def compile(self, kind: str, options: dict[str, str | bool] | None = None) -> Compiled:
        if kind == "single":
            return self.step.lower(structs(self.call)).compile(options)
        return compile_several(self.call, self.step, self.of, options)


def compile_packed(names: Sequence[str], neighbours: bool, tuned: bool, one: Problem) -> Programs:
    """Compiles, in a process of ahead.py, the programs of a problem by the peers of some names."""
    peers = drawn_peers.all_peers()
    return compile_problem(one, {name: peers[name] for name in names}, neighbours, tuned).packed()


def compile_problem(
    problem: Problem, chosen: Mapping[str, Any], neighbours: bool, tuned: bool = False
) -> Programs:
    """Compiles the programs of a problem; `tuned`: with XLA's products as XLA tunes them."""
    programs = Programs(untuned=not tuned)
    far = XLA in chosen and cannot_lead(problem.call, chosen)

    def run(job: Job, kind: str) -> None:
        title = f"{job.name}, {TITLES[job.of]}"
        if title in programs.no:
            return
        begin = time.perf_counter()
        try:
            tune = tuned and len(kinds_of(job, far)) == len(KINDS)
            one = job.compile(kind, None if tune else untuned(problem.call))
        except Exception as error:  # a peer's failure is a result of the comparison
            programs.no[title] = reason(error)
            programs.ready.get(job.name, {}).pop(("single", job.of), None)
        else:
            if job.name == UNDROPPED:
                programs.undropped[job.of] = one
            else:
                programs.ready.setdefault(job.name, {})[kind, job.of] = one
        finally:
            programs.seconds[f"{job.name}, {kind} {job.of}"] = round(time.perf_counter() - begin, 1)

    for job in jobs_of(problem, chosen, neighbours):
        for kind in kinds_of(job, far):
            run(job, kind)
    programs.norms = {one: norms(*one) for one in compared(problem.call)}
    programs.ran = drawn_peers.ran_on(problem.call)
    return programs


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


def kinds_of(job: Job, far: bool) -> tuple[str, ...]:
    """Names the programs of a job: what is no contest has one."""
    if job.name == NEIGHBOUR:  # the host takes the same for it
        return ("program",)
    return ("single",) if job.name == UNDROPPED or (job.name == XLA and far) else KINDS[::-1]


def untuned(call: Drawn) -> dict[str, Any]:
    """Returns the options by which XLA tunes no product.

    Without its own kernels of products they are cuBLAS's; of float16 jax.nn asks for an algorithm
    that only those have.
    """
    return {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": call.dtype == "float16"}


def cannot_lead(call: Drawn, chosen: Mapping[str, Any]) -> bool:
    """Tells whether XLA's scores alone take long beside what kernels of another peer take.

    It is a guess, by which its program of several attentions is spared.
    """
    kernels = chosen.keys() - {OURS, XLA}
    if not kernels or call.dtype == "float32" or call.score or call.bottom_right:
        return False
    seconds = 8 * call.scores / drawn.RATES[1]
    return seconds > max(FAR_BYTES * call.seconds, drawn.HOST_SECONDS / 4)


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


def compile_several(
    call: Drawn, step: Any, of: Pass, options: dict[str, str | bool] | None = None
) -> Compiled:
    """Compiles a program of some turns of several attentions, each of what the one before returned.

    Queries and the gradient of out are the out before, which has the shape and stays of the size.
    All operands pass a barrier with it, so XLA does nothing for two attentions at once and nothing
    ahead of the turns. All results are carried on, so it leaves out none. Without turns a program
    of 16 attentions took 230 µs of the host and more, however short they were.
    """

    @jax.jit
    def several(given: dict[str, Any]) -> jax.Array:
        def turn(_: Any, before: list[Any]) -> list[Any]:
            found = before[-1:]
            for _ in range(call.calls):
                out = found[-1][0]
                own = jax.lax.optimization_barrier(given | {"q": out, "dout": out})
                found.append(step({name: in_rows(x) for name, x in own.items()}))
            return found[1:]

        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(step, given))
        first = [empty] * (call.calls - 1) + [(given["q"], *empty[1:])]
        last = jax.lax.optimization_barrier(jax.lax.fori_loop(0, call.turns(of), turn, first))
        return jnp.stack([x[(0,) * x.ndim].astype(jnp.float32) for x in jax.tree.leaves(last)])

    return several.lower(structs(call)).compile(options)


def in_rows(x: jax.Array) -> jax.Array:
    """Returns an array whose layout XLA leaves as a user's arguments have it."""
    return layout.with_layout_constraint(x, layout.Layout(tuple(range(x.ndim))))


def compared(call: Drawn) -> set[Compared]:
    """Lists what `norms` is asked for."""
    shapes_of = call.sizes | {"out": call.sizes["q"]}
    if call.bias_gradient:
        shapes_of["bias"] = call.operands["bias"][0]
    return {
        (shapes_of[name], call.dtype, weight_shape(call, name, shapes_of[name]))
        for name in call.results("training")
    }


def weight_shape(call: Drawn, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (1, 1, 1, 1) if name == "bias" else (*shape[:2], 1, 1)


def norms(shape: tuple[int, ...], dtype: str, weights: tuple[int, ...]) -> Compiled:
    """Compiles the norms of an error and of what is right, over the positions that count."""

    def both(x: jax.Array, right: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, right = (jnp.where(valid, x, 0).astype(jnp.float32) for x in (x, right))
        return jnp.linalg.norm((x - right).ravel()), jnp.linalg.norm(right.ravel())

    of = jax.ShapeDtypeStruct(shape, dtype)
    return jax.jit(both).lower(of, of, jax.ShapeDtypeStruct(weights, bool)).compile()
