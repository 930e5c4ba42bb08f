"""Speed and accuracy on tasks of a long-range arena: FlashAttention, Table 3."""

import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
from common import encoder, paper
from common.paper import Claim, Panel, Part, Record, Settings

import jax_flash

from . import _classify, _gpt, _listops, _made, _pathfinder
from ._classify import Data, Plan

SIZES = encoder.Sizes(layers=4, width=128, heads=2, hidden=256)
QUICK = encoder.Sizes(layers=1, width=16, heads=2, hidden=16, head_dim=8, dtype="float32")
WAYS = {"jax_flash": "jax_flash", "xla": "XLA's attention"}
UNSEEN = 1024
TASKS = {  # what trains in some ten seconds with jax_flash
    "ListOps": Plan(800, 32, classes=10, vocabulary=_listops.WORDS),
    "text": Plan(500, 16),
    "retrieval": Plan(400, 8),
    "image": Plan(1000, 128, classes=_made.CLASSES, picture=True),
    "Pathfinder": Plan(1500, 128, picture=True),
}
LENGTHS = {"ListOps": 2048, "text": 4096, "retrieval": 4096, "image": 1024, "Pathfinder": 1024}
EXAMPLES = {"ListOps": 8192, "text": 4096, "retrieval": 4096, "image": 16384, "Pathfinder": 16384}


def attend(way: str, lengths: jax.Array | None) -> encoder.Attention:
    """Attention of all positions to those within the lengths of the rows."""
    given: Any = {f"{side}_seq_lengths": lengths for side in ("query", "key_value")}

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, key: None) -> jax.Array:
        if way == "xla":
            return jax.nn.dot_product_attention(q, k, v, implementation="xla", **given)
        backend = "cuda" if _gpt.on_gpu() else None
        return jax_flash.flash_attention(q, k, v, backend=backend, **given)

    return attention


@functools.lru_cache(1)  # both attentions of a task read the same
def data_of(task: str, seed: int, quick: bool) -> tuple[Data, Data]:
    """Makes a task's sequences."""
    unseen = 8 if quick else UNSEEN
    count = 16 if quick else EXAMPLES[task] + UNSEEN
    length = 160 if quick else LENGTHS[task]
    lengths = None
    if task == "ListOps":
        words, lengths, labels = _listops.make(seed, count, length // 4, length)
    elif task in ("text", "retrieval"):
        make = _made.texts if task == "text" else _made.pairs
        words, lengths, labels = make(seed, count, length)
    elif task == "image":
        words, labels = _made.pictures(seed, count, 16 if quick else 32)
    else:
        scenes = _pathfinder.make(seed, count, 1 if quick else (os.cpu_count() or 1))
        words, labels = _pathfinder.draw(scenes, 16 if quick else 32), scenes.connected
    words = words if task == "retrieval" else words.reshape(count, -1)
    return Data(words, lengths, labels).split(unseen)


def cells(settings: Settings) -> list[Record]:
    """Lists the tasks, each by both attentions."""
    tasks = ("ListOps", "retrieval") if settings.quick else tuple(TASKS)
    ways = ("jax_flash",) if settings.quick else tuple(WAYS)
    return [
        {"name": f"{task}, {WAYS[way]}", "task": task, "way": way} for task in tasks for way in ways
    ]


def measure(settings: Settings, cell: Record) -> Record:
    """Trains on a task."""
    plan = TASKS[cell["task"]]
    if settings.quick:
        plan = Plan(2, 4, classes=plan.classes, vocabulary=plan.vocabulary, picture=plan.picture)
    data = data_of(cell["task"], settings.seed, settings.quick)
    attention = functools.partial(attend, cell["way"])
    sizes = QUICK if settings.quick else SIZES
    found, _ = _classify.train(data, sizes, plan, attention, settings.seed)
    return found | {"length": data[0].words.shape[-1], "batch": plan.batch}


def both(records: Sequence[Record]) -> dict[str, tuple[Record, Record]]:
    """Records of ours and of XLA's, by task."""
    found = {}
    for task in TASKS:
        pair = [paper.find(records, task=task, way=way) for way in WAYS]
        if pair[0] is not None and pair[1] is not None:
            found[task] = (pair[0], pair[1])
    return found


def speed(records: Sequence[Record]) -> str | None:
    """Geometric mean of the steps' times, XLA's over ours."""
    ratios = [xla["ms"] / ours["ms"] for ours, xla in both(records).values()]
    if len(ratios) < len(TASKS):
        return None
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return f"{mean:.2f} ×, from {min(ratios):.2f} to {max(ratios):.2f}"


def accuracy(records: Sequence[Record]) -> str | None:
    """Mean accuracy of the last models of ours, and of XLA's."""
    last = [(x["curve"][-1][1], y["curve"][-1][1]) for x, y in both(records).values()]
    if len(last) < len(TASKS):
        return None
    ours, xla = (sum(x) / len(x) for x in zip(*last, strict=True))
    most = max(abs(x - y) for x, y in last)
    return f"{ours:.1%} beside {xla:.1%}, at most {most:.1%} apart in a task"


def of_task(task: str) -> Callable[[Sequence[Record]], str | None]:
    """Accuracy of ours on a task."""

    def here(records: Sequence[Record]) -> str | None:
        found = paper.find(records, task=task, way="jax_flash")
        return None if found is None else f"{found['curve'][-1][1]:.1%}"

    return here


def table(records: Sequence[Record]) -> str:
    """Writes speed and accuracy by task."""
    head = ["task", "T", "rows", "attention", "ms", "planned GB", "steps", "accuracy, unseen"]
    lines = [f"| {' | '.join(head)} |", "|---" * 8 + "|"]
    for x in records:
        steps, right = x["curve"][-1]
        row = [x["task"], x["length"], x["batch"], WAYS[x["way"]], f"{x['ms']:.2f}"]
        row += [f"{x['program_gb']:.2f}", steps, f"{right:.1%}"]
        lines.append(f"| {' | '.join(map(str, row))} |")
    return "\n".join(lines)


def panels(records: Sequence[Record]) -> list[Panel]:
    """Draws the accuracy of each task over the steps."""
    found = []
    for task in TASKS:
        lines = {
            WAYS[x["way"]]: [(step, 100 * right) for step, right in x["curve"]]
            for x in records
            if x["task"] == task
        }
        if lines:
            found.append(Panel(task, "steps", "accuracy, %", lines))
    return found


PART = Part(
    title="A long-range arena",
    paper="Dao et al., FlashAttention (arXiv:2205.14135)",
    seconds=370,
    claims=(
        Claim("speed of training, mean of five tasks", "2.4 × (A100)", "Table 3", speed),
        Claim("accuracy beside the other attention's", "59.8 % beside 59.3 %", "Table 3", accuracy),
        Claim("accuracy on ListOps", "37.6 %, its own training", "Table 3", of_task("ListOps")),
    ),
    differs=(
        "ListOps and Pathfinder are made as their authors describe them, by generators of this "
        "project. Text, retrieval and image are made too, and easier than reviews, papers and "
        "photographs: their accuracies are no figures of the arena. A minute of training, not the "
        "arena's hours; one encoder of 4 layers, width 128, 2 heads of 64, in all tasks, since "
        "heads of 8 to 32, as in the arena, leave half of a tile empty. No block-sparse attention, "
        "which is measured at 64k."
    ),
    cells=cells,
    measure=measure,
    table=table,
    panels=panels,
    page="papers_training",
)
