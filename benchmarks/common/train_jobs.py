"""Owns what one process of train_step.py does: a product, timed steps, the longest step, a curve.

A job prints its result as JSON, or why there is none. One that measures time or memory compiles and
waits for a line of stdin first. Read next: train_step.py, which starts the processes.
"""

import dataclasses
import functools
import json
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import jax
import jax.numpy as jnp
import numpy as np
import optax
import training
from flax import nnx

import jax_flash

from . import runs

WARM_UP = 3  # steps
ROUNDS = 3
STEADY = 0.1  # spread of a round's times beside their median; rounds above are taken again, twice
ROUND_STEPS = 8  # at most, and fewer once they take
ROUND_SECONDS = 0.8
GB = 1e9


@dataclasses.dataclass(frozen=True)
class Job:
    """What one process does: "product", "step", "longest" or "loss"."""

    kind: str
    attention: str = "none"
    length: int = 1024
    batch: int = 1
    remat: str = "none"  # as in Config
    layers: int | None = None  # instead of the preset's
    preset: str = "gpt2"
    scores: str = "parts"  # "whole": all scores at once, by the plain formula
    updates: bool = True  # False: the gradients alone
    seed: int = 0
    steps: int = 0
    run_up_to: int = 0


def work(job: Job) -> None:
    """Does one job in this process and prints what it found as JSON."""
    try:
        if job.kind == "product":
            input()
            device = jax.devices()[0]
            found = {"tflops": runs.measure_product(), "gpu": device.device_kind}
        elif job.kind == "loss":
            found = loss_curve(job)
        elif job.kind == "longest":
            found = longest_step(job)
        else:
            found = time_steps(job)
    except Exception as error:  # a failure is a result of the comparison
        found = {"error": reason(error)}
    print(json.dumps(found))


def reason(error: Exception) -> str:
    if "RESOURCE_EXHAUSTED" in str(error):
        return "out of memory"
    return f"{type(error).__name__}: {error}".split("\n")[0][:200]


# --- One training step --------------------------------------------------------------------------


def attend_cudnn(query: Any, key: Any, value: Any, *, is_causal: bool, **_: Any) -> Any:
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=is_causal, implementation="cudnn"
    )


def attend_xla(query: Any, key: Any, value: Any, *, is_causal: bool, **_: Any) -> Any:
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=is_causal, implementation="xla"
    )


def attend_none(query: Any, key: Any, value: Any, **_: Any) -> Any:
    return query + key + value


def attend_flash(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """Attention of ours; on a GPU its kernels by name, so that it fails instead of falling back."""
    backend = "cuda" if jax.default_backend() == "gpu" else None
    return jax_flash.flash_attention(query, key, value, backend=backend, **options)


ATTENTIONS: dict[str, Callable[..., Any]] = {
    "jax_flash": attend_flash,
    "cudnn": attend_cudnn,
    "xla": attend_xla,
    "none": attend_none,
}
COMPARED = ("jax_flash", "cudnn", "xla")


def keep(remat: str, *names: str) -> Callable[..., Any] | None:
    """Keeps what a block keeps by names, and what cuDNN's forward makes by the primitive's name.

    `names` are of results that the example's block has outside of what it computes again.
    """
    if remat == "none":
        return None
    named = jax.checkpoint_policies.save_only_these_names(*names)

    def kept(primitive: Any, *operands: Any, **parameters: Any) -> Any:
        cudnn = "dot_product_attention_fwd" in primitive.name
        kept = training.KEPT[remat](primitive, *operands, **parameters)
        return cudnn or kept or named(primitive, *operands, **parameters)

    return kept


def config_of(job: Job, length: int) -> training.Config:
    """The sizes that a job asks for."""
    config = training.PRESETS[job.preset]
    layers = config.layers if job.layers is None else job.layers
    return dataclasses.replace(
        config, layers=layers, length=length, batch=job.batch, remat=job.remat
    )


def whole_scores(features: jax.Array, table: jax.Array, targets: jax.Array) -> jax.Array:
    """The loss by the plain formula, with all scores at once."""
    scores = (features @ table.astype(features.dtype).T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(scores, targets).mean()


@dataclasses.dataclass
class Program:
    """A compiled training step."""

    compiled: Any
    state: Any  # shapes and dtypes of parameters and optimizer
    of_model: int  # how many leaves of the state are parameters; they come first
    rows: jax.ShapeDtypeStruct
    needs_gb: float
    operations: float  # in one step
    compile_s: float

    def start(self) -> Any:
        """Draws the parameters on the device; what the optimizer keeps is 0."""
        leaves, tree = jax.tree.flatten(self.state)
        made = [
            jnp.zeros(x.shape, x.dtype)
            if i >= self.of_model
            else jnp.ones(x.shape, x.dtype)
            if x.ndim < 2
            else _draw(jax.random.key(i), x.shape, x.dtype)
            for i, x in enumerate(leaves)
        ]
        return jax.tree.unflatten(tree, made)

    def draw(self) -> jax.Array:
        return jax.random.randint(jax.random.key(0), self.rows.shape, 0, 256, self.rows.dtype)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _draw(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return 0.02 * jax.random.normal(key, shape, dtype)


def build(job: Job, length: int, options: dict[str, Any] | None = None) -> Program:
    """Compiles the training step of a job, with XLA's options."""
    begin = time.perf_counter()
    config = config_of(job, length)
    attention, kept = ATTENTIONS[job.attention], keep(job.remat)

    def make() -> tuple[training.GPT, nnx.Optimizer]:
        model = training.GPT(config, attention, nnx.Rngs(0), kept)
        return model, training.make_optimizer(model, config)

    abstract = nnx.eval_shape(make)
    graph, state = nnx.split(abstract)

    def loss_fn(model: training.GPT, rows: jax.Array) -> jax.Array:
        score = whole_scores if job.scores == "whole" else training.cross_entropy
        table = model.embedding.embedding[...]
        return score(model.features(rows[:, :-1]), table, rows[:, 1:])

    def step(state: Any, rows: jax.Array) -> tuple[Any, jax.Array]:
        model, optimizer = nnx.merge(graph, state)
        loss, grads = nnx.value_and_grad(loss_fn)(model, rows)
        if not job.updates:  # all gradients are read
            return state, loss + 0 * optax.global_norm(grads)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    rows = jax.ShapeDtypeStruct((job.batch, length + 1), jnp.int32)
    compiled = jax.jit(step, donate_argnums=0).lower(state, rows).compile(options)
    needs = compiled.memory_analysis()
    if needs is None:
        raise RuntimeError("XLA does not say how much memory the step needs")
    alone = needs.output_size_in_bytes - needs.alias_size_in_bytes
    total = needs.argument_size_in_bytes + needs.temp_size_in_bytes + alone
    operations = training.operations_per_token(abstract[0]) * job.batch * length
    seconds = time.perf_counter() - begin
    of_model = len(jax.tree.leaves(nnx.state(abstract[0])))
    return Program(compiled, state, of_model, rows, total / GB, operations, seconds)


def peak_gb() -> float:
    """Returns the most memory that was in use in this process."""
    stats = jax.devices()[0].memory_stats() or {}
    return round(stats.get("peak_bytes_in_use", 0) / GB, 2)


def time_steps(job: Job) -> dict[str, Any]:
    """Times the training step of a job, alone in its process, and its memory."""
    program = build(job, job.length)
    input()
    found = time_program(program)
    return {"peak_gb": peak_gb(), "compile_s": round(program.compile_s, 1)} | found


def time_program(program: Program) -> dict[str, Any]:
    """Times a training step, queued as in a training loop."""
    state, batch = program.start(), program.draw()

    def run_steps(count: int) -> float:
        nonlocal state
        begin = time.perf_counter()
        for _ in range(count):
            state, loss = program.compiled(state, batch)
        losses.append(float(loss))
        return (time.perf_counter() - begin) / count

    losses: list[float] = []
    run_steps(1)  # kernels are compiled
    once = run_steps(WARM_UP - 1)
    steps = max(1, min(ROUND_STEPS, round(ROUND_SECONDS / once)))
    taken, spread = 0, 1.0
    while spread > STEADY and taken < 3 * ROUNDS:  # a processor that compiles may hold steps up
        seconds = [run_steps(steps) for _ in range(ROUNDS)]
        taken, median = taken + ROUNDS, statistics.median(seconds)
        spread = (max(seconds) - min(seconds)) / median
    speed = program.operations / median
    peak = training.peak_operations(jax.devices()[0])
    rows, length = program.rows.shape
    return {
        "program_gb": round(program.needs_gb, 6),
        "steps": WARM_UP + taken * steps,
        "ms": round(1e3 * median, 3),
        "spread": round(spread, 4),
        "tokens_per_second": round(rows * (length - 1) / median),
        "model_tflops": round(speed / 1e12, 2),
        "mfu": None if peak is None else round(speed / peak, 4),
        "loss": round(losses[-1], 4),
    }


def longest_step(job: Job) -> dict[str, Any]:
    """Finds the longest sequence whose step fits, by doubling or halving, then half a step more.

    What a step needs is known when it is compiled. The longest that is not above `run_up_to` is
    also run.
    """
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0) / GB
    plans: dict[int, float | str] = {}
    programs: dict[int, Program] = {}

    def fits(length: int) -> bool:
        try:
            program = build(job, length)
        except Exception as error:  # a failure is a result of the comparison
            plans[length] = reason(error)
            return False
        plans[length] = round(program.needs_gb, 2)
        if program.needs_gb > limit:
            return False
        if length <= job.run_up_to:
            programs[length] = program
        return True

    length = job.length
    if fits(length):
        while fits(2 * length):
            length *= 2
    else:
        length //= 2
        while length >= 1024 and not fits(length):
            length //= 2
    fits(3 * length // 2)
    input()
    found: dict[str, Any] = {"limit_gb": round(limit, 2), "plans": plans}
    for length in sorted(programs, reverse=True):
        state, batch = programs[length].start(), programs[length].draw()
        try:
            begin = time.perf_counter()
            state, loss = programs[length].compiled(state, batch)
            loss = float(loss)
        except Exception as error:  # as above
            found |= {"error": f"{length}: {reason(error)}"}
            continue
        found |= {"ran": length, "seconds": round(time.perf_counter() - begin, 3)}
        return found | {"peak_gb": peak_gb(), "loss": round(loss, 4)}
    return found


# --- Loss curves --------------------------------------------------------------------------------


def loss_curve(job: Job) -> dict[str, Any]:
    """Trains a preset of the example on packed text; returns the loss of every step.

    The seed draws both the parameters and the order of the text.
    """
    config = dataclasses.replace(
        training.PRESETS[job.preset], steps=job.steps, batch=job.batch, remat=job.remat
    )
    if jax.default_backend() == "gpu":
        config = dataclasses.replace(config, dtype="bfloat16")
    text = Path(sysconfig.get_path("stdlib"))
    documents = training.read_documents(text)
    held_out = len(documents) // 10
    rows = training.pack(documents[held_out:], config.length)
    unseen = training.pack(documents[:held_out], config.length)
    unseen = unseen[np.linspace(0, len(unseen) - 1, 8 * config.batch).astype(int)]
    attention = {"jax_flash": ATTENTIONS["jax_flash"], "xla": training.xla_attention}
    model = training.GPT(config, attention[job.attention], nnx.Rngs(job.seed))
    optimizer = training.make_optimizer(model, config)
    feed = training.batches(rows, config.batch, job.seed)
    step = nnx.cached_partial(training.train_step, model, optimizer)
    losses = [step(jnp.asarray(next(feed))) for _ in range(job.steps)]
    validation = [
        float(training.evaluate(model, jnp.asarray(part))) for part in np.split(unseen, 8)
    ]
    return {
        "losses": [round(float(loss), 4) for loss in losses],
        "validation": round(statistics.mean(validation), 4),
    }
