"""Trains an encoder to tell the class of a sequence, and notes its accuracy and speed meanwhile."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import encoder, train_jobs
from common.paper import Record

from . import _gpt


@dataclasses.dataclass(frozen=True)
class Data:
    """Sequences with their classes; [N, 2, T] are pairs, of which both are read alike."""

    words: np.ndarray  # uint8 [N, T] or [N, 2, T]
    lengths: np.ndarray | None  # int32 [N] or [N, 2]; None: all are whole
    labels: np.ndarray  # int32 [N]

    def split(self, unseen: int) -> tuple["Data", "Data"]:
        """Holds so many of the last out."""
        parts = []
        for part in (slice(None, -unseen), slice(-unseen, None)):
            lengths = None if self.lengths is None else self.lengths[part]
            parts.append(Data(self.words[part], lengths, self.labels[part]))
        return parts[0], parts[1]


@dataclasses.dataclass(frozen=True)
class Plan:
    """How long, and in what steps."""

    steps: int
    batch: int
    rate: float = 1e-3  # learning rate, behind a warm-up of a tenth, to 0 by a cosine
    classes: int = 2
    vocabulary: int = 256
    evaluated: int = 8  # times
    picture: bool = False  # words are brightness, positions those of rows and of columns


Attend = Callable[[jax.Array | None], encoder.Attention]  # of the lengths of the rows


def initial(seed: int, sizes: encoder.Sizes, plan: Plan, shape: Sequence[int]) -> dict[str, Any]:
    """Draws the parameters for sequences of a shape [T] or [2, T]."""
    keys = iter(jax.random.split(jax.random.key(seed), 6))
    width, length = sizes.width, shape[-1]
    side = round(length**0.5)
    places = (2, side, width) if plan.picture else (length, width)
    read = 4 * width if len(shape) == 2 else width
    return {
        "words": 0.5
        * jax.random.normal(next(keys), (2 if plan.picture else plan.vocabulary, width)),
        "places": 0.5 * jax.random.normal(next(keys), places),
        "layers": encoder.initial(next(keys), sizes),
        "norm": jnp.ones(width),
        "norm_bias": jnp.zeros(width),
        "read": jax.random.normal(next(keys), (read, width)) * read**-0.5,
        "read_bias": jnp.zeros(width),
        "class": jax.random.normal(next(keys), (width, plan.classes)) * width**-0.5,
        "class_bias": jnp.zeros(plan.classes),
    }


def finer(parameters: Mapping[str, Any], times: int) -> dict[str, Any]:
    """A model for pictures of so many times the side: each place is that of the coarser one."""
    places = jnp.repeat(parameters["places"], times, axis=1)
    return dict(parameters) | {"places": places}


def scores(
    parameters: Mapping[str, Any],
    words: jax.Array,
    lengths: jax.Array | None,
    sizes: encoder.Sizes,
    plan: Plan,
    attend: Attend,
) -> jax.Array:
    """Scores of the classes, float32 [B, classes], of words [B, T] or [B, 2, T]."""
    p = dict(parameters)
    rows, of_rows = words, lengths
    if words.ndim == 3:
        rows = words.reshape(-1, words.shape[-1])
        of_rows = None if lengths is None else lengths.reshape(-1)
    places = p["places"]
    if plan.picture:
        places = (places[0, :, None] + places[1, None]).reshape(-1, sizes.width)
    if plan.picture:
        x = (rows[..., None] / 255 * p["words"][0] + p["words"][1]).astype(sizes.dtype)
    else:
        # A product and not a lookup, whose gradient is summed row by row.
        x = jax.nn.one_hot(rows, plan.vocabulary, dtype=sizes.dtype)
        x @= p["words"].astype(sizes.dtype)
    x = encoder.encode(
        p["layers"],
        x + places.astype(sizes.dtype),
        sizes,
        attend(of_rows),
        keep=train_jobs.keep("products", "attended", "wide"),
    )
    x = encoder.normed(x, p["norm"], p["norm_bias"]).astype(jnp.float32)
    if of_rows is None:
        x = x.mean(axis=1)
    else:
        seen = jnp.arange(x.shape[1]) < of_rows[:, None]
        x = jnp.where(seen[..., None], x, 0).sum(axis=1) / of_rows[:, None]
    if words.ndim == 3:
        first, second = x.reshape(-1, 2, sizes.width).swapaxes(0, 1)
        x = jnp.concatenate([first, second, first * second, first - second], axis=-1)
    return encoder.linear(jax.nn.gelu(encoder.linear(x, p, "read")), p, "class")


def train(
    data: tuple[Data, Data],
    sizes: encoder.Sizes,
    plan: Plan,
    attend: Attend,
    seed: int,
    start: Mapping[str, Any] | None = None,
) -> tuple[Record, dict[str, Any]]:
    """Trains; returns what was measured, and the parameters.

    The record has `curve`, [steps, accuracy on unseen sequences]; `losses`, of every step; `ms`, of
    a step; `program_gb`, that it needs by XLA's plan; `unseen`, how many there are.
    """
    seen, unseen = (jax.tree.map(jnp.asarray, dataclasses.astuple(x)) for x in data)
    schedule = optax.warmup_cosine_decay_schedule(
        0, plan.rate, max(1, plan.steps // 10), plan.steps
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98))
    read = functools.partial(scores, sizes=sizes, plan=plan, attend=attend)

    def step(state: Any, seen: Any, number: jax.Array) -> Any:
        words, lengths, labels = seen
        key = jax.random.fold_in(jax.random.key(seed), number)
        chosen = jax.random.randint(key, (plan.batch,), 0, len(labels))
        of_rows = None if lengths is None else lengths[chosen]

        def loss_of(parameters: Any) -> jax.Array:
            found = read(parameters, words[chosen], of_rows)
            return optax.softmax_cross_entropy_with_integer_labels(found, labels[chosen]).mean()

        loss, grads = jax.value_and_grad(loss_of)(state[0])
        updates, kept = optimizer.update(grads, state[1], state[0])
        return (optax.apply_updates(state[0], updates), kept), loss

    @jax.jit
    def right(parameters: Any, words: Any, lengths: Any, labels: Any) -> jax.Array:
        return (read(parameters, words, lengths).argmax(axis=-1) == labels).sum()

    def accuracy(parameters: Any) -> float:
        count = len(unseen[2]) // plan.batch * plan.batch
        parts = [
            jax.tree.map(lambda x, i=i: x[i : i + plan.batch], unseen)
            for i in range(0, count, plan.batch)
        ]
        return sum(int(right(parameters, *part)) for part in parts) / count

    parameters = initial(seed, sizes, plan, data[0].words.shape[1:]) if start is None else start
    parameters = jax.tree.map(jnp.array, dict(parameters))  # the step takes them over
    state = parameters, optimizer.init(parameters)
    options = _gpt.UNTUNED if _gpt.on_gpu() else None
    lowered = jax.jit(step, donate_argnums=0).lower(state, seen, jnp.int32(0))
    compiled = lowered.compile(options)
    needs: Any = compiled.memory_analysis()
    needs = needs.argument_size_in_bytes + needs.temp_size_in_bytes
    curve, losses, seconds = [], [], []
    times = plan.evaluated
    measured = sorted({plan.steps * i // times for i in range(1, times + 1)} - {0})
    begin, count = time.perf_counter(), 0
    for number in range(1, plan.steps + 1):
        state, loss = compiled(state, seen, jnp.int32(number))
        losses.append(loss)
        count += 1
        if number == 1 or number in measured:
            loss.block_until_ready()
            seconds.append((time.perf_counter() - begin) / count)
            if number in measured:
                curve.append([number, round(accuracy(state[0]), 4)])
            begin, count = time.perf_counter(), 0
    ms = 1e3 * statistics.median(seconds[1:] or seconds)  # the first compiles kernels
    found: Record = {"ms": round(ms, 3), "program_gb": round(needs / 1e9, 3), "curve": curve}
    found |= {"losses": [round(float(x), 4) for x in losses]}
    found |= {"unseen": len(data[1].labels) // plan.batch * plan.batch}
    return found, state[0]
