"""Loss over the share of the cache that is kept: Scissorhands, served by the examples' engine.

Two models are trained: that of `examples/train_gpt.py` on Python files, as there, and a smaller one
on texts of needles: four bytes of as many kinds in noise, each of which follows wherever a letter
asks for its kind. Unseen texts are then served, the half of each as prompt, the rest given token by
token, with a budget for the cache. examples/serve_budget.py does the same by hand.
"""

import dataclasses
import functools
import math
import string
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import paper
from common.paper import Claim, Panel, Part, Record, Settings
from common.train_jobs import training
from flax import nnx
from tqdm import tqdm

import jax_flash

BUDGETS = (1.0, 0.5, 0.2, 0.1)
TEXTS, PAGE = 32, 8
SEEDS = 3  # that draw so many texts of needles each
STEPS = {"text": 450, "needles": 1500}
KINDS = {"text": "Python files", "needles": "needles"}
NOISE = np.frombuffer(string.ascii_lowercase.encode(), np.uint8)
MARKS = np.frombuffer(b"ABCD", np.uint8)  # each asks for the needle of its kind
ASKED_BEFORE, TIMES = 2, 6  # so many needles are asked for in the prompt too, so many times
VALUES = 16  # bytes that the needle of a kind may be: from 128 on, kind by kind
ITEM = 2  # bytes: a mark or noise, then a needle or noise
DENSITIES = (0.05, 0.8)  # least and most of the items are needles, in texts to train with


def cells(settings: Settings) -> list[Record]:
    """Lists the budgets of both models."""
    chosen = [(kind, keep) for kind in KINDS for keep in BUDGETS]
    if settings.quick:
        chosen = [("text", 1.0), ("needles", 0.2)]
    return [
        {"name": f"{KINDS[kind]}, {keep:g} kept", "kind": kind, "keep": keep}
        for kind, keep in chosen
    ]


def config_of(kind: str, settings: Settings) -> Any:
    """Returns sizes and steps of a model: train_gpt.py's own, or small ones."""
    config = training.PRESETS["small"]
    if settings.quick:
        return dataclasses.replace(config, layers=1, width=32, length=128, batch=4, steps=3)
    if kind == "needles":
        sizes = {"layers": 2, "width": 64, "batch": 32, "learning_rate": 4e-3}
        config = dataclasses.replace(config, **sizes)
    return dataclasses.replace(config, steps=STEPS[kind])


@functools.cache
def documents() -> list[bytes]:
    return training.read_documents(Path(sysconfig.get_path("stdlib")))


def needles(rng: np.random.Generator, length: int, *, asked_late: bool) -> np.ndarray:
    """Makes a text of needles, uint8 [length], behind the byte that opens a document.

    A needle of each kind lies in noise; wherever a mark asks for it, it follows. In texts to be
    served the first half is the prompt: each place in it is as likely as another to have a needle,
    but for the last, where those that are asked for often find room. Two are, behind their needles,
    and all are once in the second half.
    """
    count = (length - 1) // ITEM
    text = rng.choice(NOISE, length)
    text[0] = training.START
    found = 128 + VALUES * np.arange(len(MARKS)) + rng.integers(VALUES, size=len(MARKS))
    if asked_late:
        first = -(-(length // 2 - 1) // ITEM)  # that begins in the second half
        prompt = first - 1  # whose pairs lie in the first half with both bytes
        free = [*range(prompt)]

        def take(kinds: Sequence[int], begin: int, end: int) -> list[tuple[int, int]]:
            at = rng.choice([x for x in free if begin <= x < end], len(kinds), replace=False)
            free[:] = [x for x in free if x not in at]
            return list(zip(at.tolist(), kinds, strict=True))

        places = take(range(len(MARKS)), 0, prompt - ASKED_BEFORE * TIMES)
        # The needle that lies last has its choice first: fewer places are behind it.
        for at, kind in sorted(places[:ASKED_BEFORE], reverse=True):
            places += take([kind] * TIMES, at + 1, prompt)
        free = [*range(first, count)]
        places += take(range(len(MARKS)), first, count)
    else:
        chosen = np.flatnonzero(rng.random(count) < rng.uniform(*DENSITIES))
        places = [(at, int(rng.integers(len(MARKS)))) for at in chosen]
    seen: set[int] = set()
    for at, kind in places:
        start = 1 + ITEM * at
        text[start + 1] = found[kind]
        if kind in seen:
            text[start] = MARKS[kind]
        seen.add(kind)
    return text


def rows_of(kind: str, config: Any, seed: int) -> Iterator[np.ndarray]:
    """Draws batches to train with, uint8 [batch, length + 1], without end."""
    if kind == "text":
        held_out = len(documents()) // 10
        packed = training.pack(documents()[held_out:], config.length)
        yield from training.batches(packed, config.batch, seed)
    rng = np.random.default_rng(seed)
    while True:
        yield np.stack(
            [needles(rng, config.length + 1, asked_late=False) for _ in range(config.batch)]
        )


@functools.partial(nnx.jit, donate_argnums=(0, 1))
def needles_step(model: Any, optimizer: nnx.Optimizer, rows: jax.Array) -> jax.Array:
    """Updates a model by the loss of what is asked for: nothing tells what noise comes next."""
    inputs, targets = rows[:, :-1].astype(jnp.int32), rows[:, 1:].astype(jnp.int32)
    weights = jnp.isin(inputs, jnp.asarray(MARKS)).astype(jnp.float32)

    def loss_of(model: Any) -> jax.Array:
        features = model.features(inputs, jnp.ones_like(inputs))
        return training.cross_entropy(features, model.embedding.embedding[...], targets, weights)

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


@functools.cache
def trained(kind: str, settings: Settings) -> Any:
    """Trains a model, writes it as train_gpt.py does, and reads it as the engine does."""
    from serving.model import load_gpt  # in examples/, which train_jobs has found

    config = config_of(kind, settings)
    model = training.GPT(config, jax_flash.flash_attention, nnx.Rngs(settings.seed))
    optimizer = training.make_optimizer(model, config)
    step = training.train_step if kind == "text" else needles_step
    update = nnx.cached_partial(step, model, optimizer)
    feed = rows_of(kind, config, settings.seed)
    for _ in tqdm(range(config.steps), desc=f"training, {KINDS[kind]}", leave=False, disable=None):
        loss = update(jnp.asarray(next(feed)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.msgpack"
        training.save(path, model)
        return load_gpt(path, "float32"), float(loss)


def texts_of(kind: str, settings: Settings) -> list[np.ndarray]:
    """Draws what is served, which no model was trained on: uint8 [texts, length], of each seed."""
    length = config_of(kind, settings).length
    count = 2 if settings.quick else TEXTS
    if kind == "text":
        held_out = documents()[: len(documents()) // 10]
        chosen = [x for x in held_out if len(x) >= length][:count]
        start = bytes([training.START])
        return [np.stack([np.frombuffer(start + x[: length - 1], np.uint8) for x in chosen])]
    rngs = [np.random.default_rng([settings.seed, 1 + i]) for i in range(SEEDS)]
    return [np.stack([needles(rng, length, asked_late=True) for _ in range(count)]) for rng in rngs]


def is_asked(kind: str, texts: np.ndarray) -> np.ndarray:
    """Tells which bytes of the second halves count, bool: all, or those that marks ask for."""
    half = texts.shape[1] // 2
    if kind == "text":
        return np.ones(texts[:, half:].shape, bool)
    return np.isin(texts[:, half - 1 : -1], MARKS)


def serve(model: Any, texts: np.ndarray, keep: float) -> tuple[np.ndarray, list[float]]:
    """Serves texts: the losses of their second halves, and shares of positions in the cache."""
    from serving.engine import Engine, Request

    count, length = texts.shape
    engine = Engine(
        model,
        pages=count * -(-length // PAGE),
        page_size=PAGE,
        requests=count,
        tokens=max(256, count + 1),
        keep=keep,
    )
    losses: list[list[float]] = [[] for _ in texts]

    def hear(own: list[float], event: object) -> None:
        if isinstance(event, Exception):
            raise event
        if isinstance(event, tuple):
            own.append(-event[1])

    for text, own in zip(texts.tolist(), losses, strict=True):
        prompt, rest = text[: length // 2], text[length // 2 :]
        engine.submit(Request(prompt, len(rest), functools.partial(hear, own), given=rest))
    shares: list[float] = []
    while engine.waiting or engine.running:
        engine.step()
        shares += [x.cached / x.done for x in engine.running if x.done > len(x.prompt)]
    return np.asarray(losses), shares


def measure(settings: Settings, cell: Record) -> Record:
    """Serves the texts of all seeds: the loss, and the share of positions in the cache."""
    # One model is enough to show that all runs.
    kind = cell["kind"]
    model, trained_to = trained("needles" if settings.quick else kind, settings)
    drawn = texts_of(kind, settings)
    served = [serve(model, texts, cell["keep"]) for texts in drawn]
    texts, losses = np.concatenate(drawn), np.concatenate([x for x, _ in served])
    shares = [x for _, own in served for x in own]
    asked = is_asked(kind, texts)
    by_text = [float(x[which].mean()) for x, which in zip(losses, asked, strict=True)]
    parts: Record = {}
    if kind == "needles":
        half = texts[:, texts.shape[1] // 2 - 1 : -1]
        for name, marks in (("before", MARKS[:ASKED_BEFORE]), ("first", MARKS[ASKED_BEFORE:])):
            parts[name] = round(float(losses[np.isin(half, marks)].mean()), 4)
        parts["by_seed"] = [
            round(float(x[is_asked(kind, own)].mean()), 4)
            for own, (x, _) in zip(drawn, served, strict=True)
        ]
    return {
        **parts,
        "loss": round(float(losses[asked].mean()), 4),
        "error": round(float(np.std(by_text)) / math.sqrt(len(texts)), 4),
        "cached": round(math.fsum(shares) / len(shares), 4),
        "trained_to": round(trained_to, 4),
    }


def rise(kind: str, keep: float, field: str = "loss") -> Any:
    """Returns how a claim finds the loss of a budget beside that of the whole cache."""

    def here(records: Sequence[Record]) -> str | None:
        whole, part = (paper.find(records, kind=kind, keep=x) for x in (1.0, keep))
        if whole is None or part is None:
            return None
        text = f"{part[field] - whole[field]:+.3f} nats ({part[field]:.3f} beside "
        return f"{text}{whole[field]:.3f}; {part['cached']:.0%} of the positions)"

    return here


def table(records: Sequence[Record]) -> str:
    """Writes the loss by budget, of both models."""
    head = "| texts | kept | positions in the cache | loss, nats per byte | ± of the texts' mean | "
    lines = [head + "asked for often in the prompt | asked for first behind it |"]
    lines += ["|---" + "|---:" * 6 + "|"]
    for x in records:
        row = [KINDS[x["kind"]], f"{x['keep']:g}", f"{x['cached']:.0%}", f"{x['loss']:.3f}"]
        row += [f"{x['error']:.3f}"]
        row += [f"{x[name]:.3f}" if name in x else "" for name in ("before", "first")]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def panels(records: Sequence[Record]) -> list[Panel]:
    """Draws the loss over the positions in the cache, a panel for each model."""

    def points(kind: str, field: str) -> list[tuple[float, float]]:
        return [(x["cached"], x[field]) for x in records if x["kind"] == kind]

    words = "share of positions in the cache", "nats per byte"
    asked = {
        "asked for often in the prompt": points("needles", "before"),
        "asked for first behind it": points("needles", "first"),
        "a guess": [(x, math.log(VALUES)) for x, _ in points("needles", "loss")],
    }
    return [
        Panel(KINDS["text"], *words, {"served with a budget": points("text", "loss")}),
        Panel(KINDS["needles"], *words, asked),
    ]


PART = Part(
    title="A cache with a budget",
    paper="Liu et al., Scissorhands (arXiv:2305.17118)",
    seconds=100,
    claims=(
        Claim(
            "loss with 1/5 of the cache beside all of it, Python files",
            "5 × less with no loss of quality (OPT)",
            "abstract",
            rise("text", 0.2),
        ),
        *(
            Claim(
                f"loss with 1/{round(1 / keep)}, Python files",
                "none",
                "not in the paper",
                rise("text", keep),
            )
            for keep in (0.5, 0.1)
        ),
        *(
            Claim(
                f"loss with 1/{round(1 / keep)}, needles asked for {words}",
                "no number: what mattered will matter" if field == "before" else "none",
                "abstract" if field == "before" else "not in the paper",
                rise("needles", keep, field),
            )
            for field, words in (("before", "often in the prompt"), ("first", "first behind it"))
            for keep in (0.5, 0.2)
        ),
    ),
    differs=(
        "The model is that of `examples/train_gpt.py`, 0.8 M parameters on bytes, for needles one "
        "of 2 layers, in place of OPT, whose weights are not here; 32 unseen texts of 512 bytes, "
        f"the half of each as prompt; of needles so many by each of {SEEDS} seeds. "
        "Pages of 8 positions go, of all layers and heads together; in the paper positions go, of "
        "each layer apart. Needles: four bytes anywhere in the noise of a prompt, each of one of "
        f"16 values, asked for by a letter in the rest, two of them {TIMES} times in the prompt "
        "too; the loss is that of the answers, ln 16 = 2.77 for a guess. The persistence ratio, "
        "downstream tasks and 4-bit caches are not measured."
    ),
    cells=cells,
    measure=measure,
    table=table,
    panels=panels,
)
