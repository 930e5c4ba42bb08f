"""Owns how implementations are timed and checked, within the time that there is."""

import functools
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_flash
from jax_flash._compare.cells import Cell
from jax_flash._compare.rivals import OURS, Compile, Loaded, Program

Record = dict[str, Any]  # of a cell and a pass; `of_pass` says what is in it

PASSES = (False, True)  # without and with gradients
COMPILING = 0.6  # of the time, at most
ROUNDS = 5
ROUND_SECONDS = 0.02  # of a GPU's round, long beside the 50 us in which the last result is noticed
PAUSE = 0.02  # seconds in which a CPU's threads of the library before go to sleep
WRONG = 0.05  # error from which on a result is no attention
CHUNK = 1024  # queries at a time of the exact one


def run(
    cells: Sequence[Cell], rivals: Mapping[str, Compile], until: float, records: list[Record]
) -> None:
    """Measures cells until a time of `time.monotonic`, and adds to the records.

    A cell whose turn does not come has no record. The first is measured however late it is.
    """
    jobs = [(cell, backward, name) for cell in cells for backward in PASSES for name in rivals]
    late = time.monotonic() + COMPILING * (until - time.monotonic())
    built: dict[tuple[Cell, bool, str], Program | str] = {}

    def build(job: tuple[Cell, bool, str]) -> Program | str | None:
        if job[0] != cells[0] and time.monotonic() > late:
            return None
        return _attempt(lambda: rivals[job[2]](job[0], job[1]))

    workers = min(8, os.cpu_count() or 1)
    with Bar(len(jobs), "compiling") as bar, ThreadPoolExecutor(workers) as pool:
        try:
            for job, found in zip(jobs, pool.map(build, jobs), strict=True):
                bar.step()
                if found is not None:
                    built[job] = found
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    ready = [cell for cell in cells if all((cell, x, n) in built for x in PASSES for n in rivals)]
    with Bar(2 * len(ready), "measuring") as bar:
        for index, cell in enumerate(ready):
            if index and time.monotonic() > until:
                break
            drawn = _attempt(lambda cell=cell: (x := draw(cell), exact(cell, x)))
            inputs, truth = ([], []) if isinstance(drawn, str) else drawn
            for backward in PASSES:
                left = 2 * (len(ready) - index) - backward
                share = max(0.0, until - time.monotonic()) / left
                programs = {
                    name: drawn if isinstance(drawn, str) else built[cell, backward, name]
                    for name in rivals
                }
                records.append(of_pass(cell, backward, programs, inputs, truth, share))
                bar.step()


def of_pass(
    cell: Cell,
    backward: bool,
    programs: Mapping[str, Program | str],
    inputs: list[jax.Array],
    truth: list[np.ndarray],
    seconds: float,
) -> Record:
    """Times one pass of a cell in about so many seconds.

    Returns: seconds, bytes of memory and errors, by implementation; reasons of those without.
    """
    record: Record = {"shape": cell.name, "backward": backward, "backend": _backend(cell, backward)}
    record |= {"seconds": {}, "memory": {}, "error": {}, "missing": {}}
    loaded: dict[str, Loaded] = {}
    for name, program in programs.items():
        found = program if isinstance(program, str) else _attempt(lambda p=program: p(inputs))
        checked = found if isinstance(found, str) else _attempt(lambda f=found: _check(f, truth))
        if isinstance(found, str) or isinstance(checked, str):
            record["missing"][name] = found if isinstance(found, str) else checked
            continue
        record["error"][name] = checked
        if not checked <= WRONG:  # NaN is wrong too
            record["missing"][name] = f"wrong: an error of {checked:.2g}"
            continue
        if found.memory is not None:
            record["memory"][name] = found.memory
        loaded[name] = found
    record["seconds"] = in_turns(loaded, seconds)
    record["tflops"] = {
        name: cell.flops(backward) / found / 1e12 for name, found in record["seconds"].items()
    }
    return record


def in_turns(loaded: Mapping[str, Loaded], seconds: float) -> dict[str, float]:
    """Returns seconds of a call in the fastest round of each, in about so many seconds in all."""
    on_cpu = jax.default_backend() == "cpu"
    end = time.monotonic() + seconds
    repeats = {}
    for name, one in loaded.items():
        once = _round(one, 1)
        repeats[name] = max(1, math.ceil(ROUND_SECONDS / max(once, 1e-6)))
    times: dict[str, list[float]] = {name: [] for name in loaded}
    for turn in range(ROUNDS):
        if turn and time.monotonic() > end:
            break
        for name, one in loaded.items():
            if on_cpu:
                time.sleep(PAUSE)
            times[name].append(_round(one, repeats[name]))
    return {name: min(found) for name, found in times.items()}


def _round(one: Loaded, repeats: int) -> float:
    """Queues calls on an idle device, faster than it runs them; returns seconds of one."""
    start = time.perf_counter()
    results = None
    for _ in range(repeats):
        results = one.call()
    one.wait(results)
    return (time.perf_counter() - start) / repeats


def _check(one: Loaded, truth: list[np.ndarray]) -> float:
    """Runs it once, and returns the largest error of what it gives."""
    results = one.call()
    one.wait(results)
    errors = []
    for got, want in zip(one.read(results), truth, strict=False):
        got = got[0, :, : want.shape[1]]
        norm = np.linalg.norm(want) or 1.0  # gradients of one key's scores are 0
        errors.append(float(np.linalg.norm(got - want) / norm))
    return max(errors, key=lambda x: math.inf if math.isnan(x) else x)


def _attempt(do: Any) -> Any:
    """Returns what it returns, or why there is nothing: a failure is a result here."""
    try:
        return do()
    except NotImplementedError as error:
        return str(error).split("\n")[0][:160]
    except Exception as error:
        text = f"{type(error).__name__}: {error}".split("\n")[0]
        return "out of memory" if "memory" in text.lower() else text[:160]


def _backend(cell: Cell, backward: bool) -> str:
    q, k, v, _ = (jax.ShapeDtypeStruct(shape, cell.dtype) for shape in cell.shapes)
    found = jax_flash.explain(q, k, v, is_causal=cell.causal)
    return found.backward.backend if backward else found.forward.backend


def draw(cell: Cell) -> list[jax.Array]:
    """Draws query, key, value and the output's gradient from a normal distribution."""
    keys = jax.random.split(jax.random.key(0), 4)
    return [
        jax.random.normal(key, shape, cell.dtype)
        for key, shape in zip(keys, cell.shapes, strict=True)
    ]


def exact(cell: Cell, inputs: list[jax.Array]) -> list[np.ndarray]:
    """Computes the first batch row and head of key, and the query heads that read it, in float64.

    Returns: out and the gradient to query `[T, N // K, H]`, those to key and value `[T, 1, H]`.
    """
    group = cell.heads // cell.kv_heads
    heads = (group, 1, 1, group)
    given = [np.asarray(x[0, :, :n], np.float64) for x, n in zip(inputs, heads, strict=True)]
    # A TPU has no float64.
    device = jax.devices()[0] if jax.default_backend() == "gpu" else jax.devices("cpu")[0]
    with jax.enable_x64(True), jax.default_device(device):
        # XLA's search for the fastest products takes longer than these.
        settings = {"xla_gpu_autotune_level": 0} if device.platform == "gpu" else None
        formula = jax.jit(functools.partial(_formula, cell), compiler_options=settings)
        return [np.asarray(x) for x in formula(*given)]


def _formula(cell: Cell, q: Any, k: Any, v: Any, dout: Any) -> tuple[jax.Array, ...]:
    chunk = math.gcd(CHUNK, cell.length)
    chunk = chunk if chunk >= 64 else cell.length

    def attend(q: Any, k: Any, v: Any) -> jax.Array:
        @jax.checkpoint
        def rows(x: Any) -> jax.Array:
            query, at = x
            scores = jnp.einsum("tnh,sh->nts", query, k[:, 0]) / math.sqrt(cell.head_dim)
            if cell.causal:
                scores = jnp.where(jnp.arange(cell.length) <= at[:, None], scores, -jnp.inf)
            return jnp.einsum("nts,sh->tnh", jax.nn.softmax(scores), v[:, 0])

        split = (q.reshape(-1, chunk, *q.shape[1:]), jnp.arange(cell.length).reshape(-1, chunk))
        return jax.lax.map(rows, split).reshape(q.shape)

    out, pull = jax.vjp(attend, q, k, v)
    return out, *pull(dout)


class Bar:
    """A progress bar on stderr, where that is a terminal."""

    WIDTH = 30

    def __init__(self, total: int, what: str):
        self.total, self.what, self.done = total, what, 0
        self.begun = time.monotonic()

    def step(self) -> None:
        self.done += 1
        self._show()

    def _show(self) -> None:
        if sys.stderr.isatty():
            full = self.WIDTH * self.done // max(self.total, 1)
            bar = "#" * full + "." * (self.WIDTH - full)
            seconds = time.monotonic() - self.begun
            count = f"{self.done}/{self.total}"
            sys.stderr.write(f"\r{self.what:10s}[{bar}] {count}, {seconds:.0f} s ")
            sys.stderr.flush()

    def __enter__(self) -> "Bar":
        self._show()
        return self

    def __exit__(self, *_: object) -> None:
        if sys.stderr.isatty():
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


__all__ = ["OURS", "Record", "draw", "exact", "in_turns", "of_pass", "run"]
