"""Steps of BERT-large on 512 tokens with padding and dropout: FlashAttention, Table 1."""

import functools
import importlib
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import encoder, paper, train_jobs
from common.paper import Claim, Panel, Part, Record, Settings
from common.train_jobs import training

import jax_flash

from . import _gpt

LARGE = encoder.Sizes(24, 1024, 16, 4096, dropout=0.1, norm_first=False)
SMALL = encoder.Sizes(2, 32, 2, 64, 16, dropout=0.1, norm_first=False, dtype="float32")
VOCABULARY = 30528  # BERT's 30522, rounded up to 64
ROWS, LENGTH, PREDICTED = 56, 512, 76  # MLPerf's: 448 rows over eight GPUs, 76 words of a row
DROPOUT = 0.1  # of attention's weights
WAYS = {
    "jax_flash": "jax_flash",
    "packed": "jax_flash, without padding",
    "cudnn": "cuDNN",
    "xla": "XLA's attention",
    "none": "no attention",
}


class Batch(NamedTuple):
    """Rows of words; numbers of positions are those of all rows, end to end."""

    words: np.ndarray  # int32 [B, T]
    kinds: np.ndarray  # int32 [B, T]: 0 or 1, first or second sentence
    places: np.ndarray  # int32 [B, T]: a word's index in its own sequence
    sequences: np.ndarray  # int32 [B, T]: which sequence of the row a word is of; 0 for padding
    lengths: np.ndarray  # int32 [B]: words of a row
    masked: np.ndarray  # int32 [sequences, PREDICTED]: which positions are predicted
    targets: np.ndarray  # int32 [sequences, PREDICTED]
    weights: np.ndarray  # float32 [sequences, PREDICTED]: 0 where a sequence has fewer
    first: np.ndarray  # int32 [sequences]: where a sequence begins
    follows: np.ndarray  # int32 [sequences]: 0 or 1, whether the second sentence follows the first


def draw(seed: int, rows: int, length: int, packed: bool, vocabulary: int = VOCABULARY) -> Batch:
    """Draws sequences of 1/16 to all of the length, each in a row of its own, or packed.

    Packed rows have sequences end to end, each whole, in the first row with room: the same words.
    """
    rng = np.random.default_rng(seed)
    sizes = rng.integers(length // 16, length + 1, rows)
    room = [length] * rows
    where = []
    for i, size in enumerate(sizes):
        row = next(r for r, left in enumerate(room) if left >= size) if packed else i
        where.append((row, length - room[row]))
        room[row] -= size
    used = max(row for row, _ in where) + 1
    shape = (used, length)
    words, kinds, places, sequences = (np.zeros(shape, np.int32) for _ in range(4))
    predicted = min(PREDICTED, length // 2)
    masked, targets = (np.zeros((rows, predicted), np.int32) for _ in range(2))
    weights = np.zeros((rows, predicted), np.float32)
    lengths = np.zeros(used, np.int32)
    first = np.zeros(rows, np.int32)
    for i, (size, (row, begin)) in enumerate(zip(sizes, where, strict=True)):
        here = slice(begin, begin + size)
        words[row, here] = rng.integers(1, vocabulary, size)
        places[row, here] = np.arange(size)
        kinds[row, here] = np.arange(size) >= size // 2
        sequences[row, here] = sequences[row].max() + 1
        lengths[row] += size
        count = min(predicted, max(1, math.ceil(0.15 * size)))
        at = rng.choice(size, count, replace=False) + row * length + begin
        masked[i, :count], weights[i, :count] = at, 1
        targets[i, :count] = words.reshape(-1)[at]
        words.reshape(-1)[at] = 0  # as [MASK]
        first[i] = row * length + begin
    follows = rng.integers(0, 2, rows).astype(np.int32)
    return Batch(words, kinds, places, sequences, lengths, masked, targets, weights, first, follows)


def initial(seed: int, sizes: encoder.Sizes, length: int, vocabulary: int) -> dict[str, Any]:
    """Draws the parameters: embeddings, layers, and the heads of words and of sentences."""
    keys = iter(jax.random.split(jax.random.key(seed), 8))
    width = sizes.width

    def matrix(*shape: int) -> jax.Array:
        return 0.02 * jax.random.normal(next(keys), shape)

    return {
        "words": matrix(vocabulary, width),
        "kinds": matrix(2, width),
        "places": matrix(length, width),
        "norm": jnp.ones(width),
        "norm_bias": jnp.zeros(width),
        "layers": encoder.initial(next(keys), sizes),
        "head": matrix(width, width),
        "head_bias": jnp.zeros(width),
        "head_norm": jnp.ones(width),
        "head_norm_bias": jnp.zeros(width),
        "pool": matrix(width, width),
        "pool_bias": jnp.zeros(width),
        "follows": matrix(width, 2),
        "follows_bias": jnp.zeros(2),
    }


def loss_of(
    parameters: Mapping[str, Any],
    batch: Batch,
    seed: jax.Array,
    sizes: encoder.Sizes,
    attend: encoder.Attention,
) -> jax.Array:
    """Loss of masked words, and of whether one sentence follows the other."""
    p = dict(parameters)
    x = p["words"][batch.words] + p["kinds"][batch.kinds] + p["places"][batch.places]
    x = encoder.normed(x.astype(sizes.dtype), p["norm"], p["norm_bias"])
    x = encoder.dropped(x, sizes.dropout, -1 - seed)
    keep = train_jobs.keep("products", "attended", "wide")
    x = encoder.encode(p["layers"], x, sizes, attend, seed, keep).reshape(-1, sizes.width)
    found = jax.nn.gelu(encoder.linear(x[batch.masked], p, "head"))
    found = encoder.normed(found, p["head_norm"], p["head_norm_bias"])
    words: Any = training.cross_entropy(found, p["words"], batch.targets, batch.weights)
    pooled = jnp.tanh(encoder.linear(x[batch.first], p, "pool"))
    scores = encoder.linear(pooled, p, "follows").astype(jnp.float32)
    return words + optax.softmax_cross_entropy_with_integer_labels(scores, batch.follows).mean()


def attention_of(way: str, batch: Batch, rate: float) -> encoder.Attention:
    """Attention to the words of a row, or of a sequence, with dropout of weights."""

    def flash(q: jax.Array, k: jax.Array, v: jax.Array, key: jax.Array) -> jax.Array:
        if way == "packed":
            given = {f"{side}_segment_ids": batch.sequences for side in ("query", "key_value")}
        else:
            given = {f"{side}_seq_lengths": batch.lengths for side in ("query", "key_value")}
        backend = "cuda" if _gpt.on_gpu() else None
        options: Any = given | {"dropout_rate": rate, "backend": backend}
        return jax_flash.flash_attention(q, k, v, dropout_key=key if rate else None, **options)

    def cudnn(q: jax.Array, k: jax.Array, v: jax.Array, key: jax.Array) -> jax.Array:
        # jax.nn has no argument for dropout, but the function below it has.
        module = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
        lengths = {"q_seqlen": batch.lengths, "kv_seqlen": batch.lengths}
        kind, scale = module.MaskType.PADDING, q.shape[-1] ** -0.5
        return module.dot_product_attention(
            q, k, v, scale=scale, mask_type=kind, dropout_rate=rate, **lengths
        )

    def formula(q: jax.Array, k: jax.Array, v: jax.Array, key: jax.Array) -> jax.Array:
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
        seen = jnp.arange(q.shape[1]) < batch.lengths[:, None]
        scores = jnp.where(seen[:, None, None], scores.astype(jnp.float32), -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
        weights = encoder.dropped(weights, rate, jax.random.key_data(key)[-1].astype(jnp.int32))
        return jnp.einsum("bnts,bsnh->btnh", weights, v)

    def none(q: jax.Array, k: jax.Array, v: jax.Array, key: jax.Array) -> jax.Array:
        return q + k + v

    return {"cudnn": cudnn, "xla": formula, "none": none}.get(way, flash)


def cells(settings: Settings) -> list[Record]:
    """Lists the attentions."""
    ways = ("packed", "xla") if settings.quick else tuple(WAYS)
    return [{"name": f"BERT-large, {WAYS[way]}", "way": way} for way in ways]


def measure(settings: Settings, cell: Record) -> Record:
    """Times the steps of a cell, and keeps their losses."""
    sizes = SMALL if settings.quick else LARGE
    rows, length, words = (4, 64, 96) if settings.quick else (ROWS, LENGTH, VOCABULARY)
    given = draw(settings.seed, rows, length, cell["way"] == "packed", words)
    optimizer = optax.lamb(1e-4, weight_decay=0.01)

    def step(state: Any, batch: Batch, seed: jax.Array) -> Any:
        parameters, kept = state
        attend = attention_of(cell["way"], batch, DROPOUT)
        loss, grads = jax.value_and_grad(loss_of)(parameters, batch, seed, sizes, attend)
        updates, kept = optimizer.update(grads, kept, parameters)
        return (optax.apply_updates(parameters, updates), kept), loss

    parameters = jax.jit(functools.partial(initial, settings.seed, sizes, length, words))()
    state = parameters, jax.jit(optimizer.init)(parameters)
    batch = jax.tree.map(jnp.asarray, given)
    begin = time.perf_counter()
    options = _gpt.UNTUNED if _gpt.on_gpu() else None
    lowered = jax.jit(step, donate_argnums=0).lower(state, batch, jnp.int32(0))
    compiled = lowered.compile(options)
    plan: Any = compiled.memory_analysis()
    needs = plan.argument_size_in_bytes + plan.temp_size_in_bytes
    found: Record = {"compile_s": round(time.perf_counter() - begin, 1), "rows": len(given.words)}
    found |= {"program_gb": round(needs / 1e9, 3), "words": int(given.lengths.sum())}
    losses, seconds = [], []
    count = 2 if settings.quick else 8
    for i in range(4):  # the first compiles kernels
        begin = time.perf_counter()
        for j in range(count):
            state, loss = compiled(state, batch, jnp.int32(i * count + j))
            losses.append(loss)
        losses[-1].block_until_ready()
        seconds.append((time.perf_counter() - begin) / count)
    ms = 1e3 * statistics.median(seconds[1:])
    speed = {"ms": round(ms, 3), "sequences_per_second": round(1e3 * rows / ms, 1)}
    return found | speed | {"losses": [round(float(x), 4) for x in losses]}


def at(records: Sequence[Record], way: str) -> Record | None:
    return paper.find(records, way=way)


def faster(way: str) -> Callable[[Sequence[Record]], str | None]:
    """How many times the speed with cuDNN's attention and with XLA's."""

    def here(records: Sequence[Record]) -> str | None:
        ours = at(records, way)
        over = [
            paper.ratio(ours, at(records, other), "sequences_per_second")
            for other in ("cudnn", "xla")
        ]
        return f"{over[0]} over cuDNN's, {over[1]} over XLA's" if all(over) else None

    return here


def share(records: Sequence[Record]) -> str | None:
    """Part of a step's time that goes when a sum takes the place of attention."""
    found = [at(records, way) for way in ("none", "jax_flash", "cudnn", "xla")]
    if not all(x is not None and x.get("ms") for x in found):
        return None
    none, *others = (x["ms"] for x in found if x is not None)
    shares = [f"{1 - none / ms:.0%}" for ms in others]
    return f"{shares[0]} with jax_flash, {shares[1]} with cuDNN's, {shares[2]} with XLA's"


def table(records: Sequence[Record]) -> str:
    """Writes the steps."""
    head = ["attention", "rows", "words", "ms", "sequences/s", "planned GB", "first, last loss"]
    lines = [f"| {' | '.join(head)} |", "|---" * 7 + "|"]
    for x in records:
        row = [WAYS[x["way"]], x["rows"], x["words"], f"{x['ms']:.1f}"]
        row += [x["sequences_per_second"], f"{x['program_gb']:.1f}"]
        row.append(f"{x['losses'][0]:.2f}, {x['losses'][-1]:.2f}")
        lines.append(f"| {' | '.join(map(str, row))} |")
    return "\n".join(lines)


def panels(records: Sequence[Record]) -> list[Panel]:
    """Draws the loss of the steps that were timed, on one batch."""
    lines = {WAYS[x["way"]]: list(enumerate(x["losses"], 1)) for x in records if x["way"] != "none"}
    return [Panel("the steps that were timed, one batch", "steps", "loss, nats", lines)]


PART = Part(
    title="BERT-large, 512 words",
    paper="Dao et al., FlashAttention (arXiv:2205.14135)",
    seconds=105,
    claims=(
        Claim(
            "speed of training beside MLPerf's record of the time",
            "1.15 ×: 17.4 minutes beside 20.0 (8 A100)",
            "Table 1",
            faster("jax_flash"),
        ),
        Claim(
            "the same words packed, without padding, as the paper's code has them",
            "part of the above",
            "Table 1",
            faster("packed"),
        ),
        Claim("attention's share of a step", "none", "not in the paper", share),
    ),
    differs=(
        f"A step on one GPU: {ROWS} rows, an eighth of MLPerf's batch, of random words, "
        f"{LENGTH // 16} to {LENGTH} of them, half padding in the mean; dropout 0.1 of weights and "
        "of sums, 15 % of the words predicted, up to 76 of a row; bfloat16, LAMB, layers keep the "
        "results of matrix products. Not the time to an accuracy of 72 %, which takes Wikipedia "
        "and 20 minutes of eight GPUs. cuDNN's dropout is that of a function below jax.nn, and "
        "has one seed for all layers."
    ),
    cells=cells,
    measure=measure,
    table=table,
    panels=panels,
    page="papers_training",
)
