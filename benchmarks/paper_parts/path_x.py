"""Pictures of 16k and 64k pixels, Path-X and Path-256: FlashAttention, Table 6."""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from common import paper
from common.paper import Claim, Panel, Part, Record, Settings

import jax_flash

from . import _classify, _gpt, _pathfinder, arena
from ._classify import Data, Plan

WAYS = {"jax_flash": "jax_flash", "butterfly": "jax_flash, butterfly", "xla": "XLA's attention"}
BLOCK = 128
# Each side begins with the model of the side before, places copied: the paper's own course.
PLANS = {
    (32, "jax_flash"): Plan(3000, 128, picture=True),
    (64, "jax_flash"): Plan(800, 64, 5e-4, evaluated=4, picture=True),
    (128, "jax_flash"): Plan(400, 16, 3e-4, evaluated=4, picture=True),
    (128, "butterfly"): Plan(800, 16, 3e-4, evaluated=4, picture=True),
    (128, "xla"): Plan(8, 1, evaluated=2, picture=True),
    (256, "jax_flash"): Plan(40, 4, 1e-4, evaluated=2, picture=True),
    (256, "butterfly"): Plan(400, 4, 1e-4, evaluated=2, picture=True),
    (256, "xla"): Plan(8, 1, evaluated=2, picture=True),
}
EXAMPLES = {32: 32768, 64: 16384, 128: 8192, 256: 2048}
UNSEEN = {32: 2048, 64: 2048, 128: 1024, 256: 256}
_MODELS: dict[int, Any] = {}  # the last model of each side, trained with jax_flash


def cells(settings: Settings) -> list[Record]:
    """Lists trainings by side and attention."""
    chosen = [(16, "jax_flash"), (32, "butterfly")] if settings.quick else list(PLANS)
    return [
        {"name": f"{side} x {side}, {WAYS[way]}", "side": side, "way": way} for side, way in chosen
    ]


@functools.lru_cache(1)
def data_of(side: int, seed: int, quick: bool) -> tuple[Data, Data]:
    """Draws scenes of a seed at a side; the first ones are held out, the same at any side."""
    seen, unseen = (16, 8) if quick else (EXAMPLES[side], UNSEEN[side])
    scenes = _scenes(seed, quick)
    hidden = _pathfinder.part_of(scenes, 0, unseen)
    shown = _pathfinder.part_of(scenes, 8 if quick else max(UNSEEN.values()), seen)

    def drawn(part: _pathfinder.Scenes) -> Data:
        words = _pathfinder.draw(part, side).reshape(len(part.connected), -1)
        return Data(words, None, part.connected)

    return drawn(shown), drawn(hidden)


@functools.lru_cache(1)
def _scenes(seed: int, quick: bool) -> _pathfinder.Scenes:
    count = 24 if quick else max(EXAMPLES.values()) + max(UNSEEN.values())
    return _pathfinder.make(seed, count, 1 if quick else (os.cpu_count() or 1))


def attend(way: str, tokens: int) -> _classify.Attend:
    """Attention of all pixels to all, or to those of blocks that a butterfly joins."""
    if way != "butterfly":
        return functools.partial(arena.attend, way)
    layout = jax_flash.masks.butterfly(tokens // BLOCK)
    mask = jax_flash.block_mask_of(layout, q_len=tokens, kv_len=tokens, block=BLOCK)
    backend = "cuda" if _gpt.on_gpu() else None

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, key: None) -> jax.Array:
        return jax_flash.flash_attention(q, k, v, block_mask=mask, backend=backend)

    return lambda lengths: attention


def measure(settings: Settings, cell: Record) -> Record:
    """Trains on pictures of a side, from the model of half that side."""
    side, way = cell["side"], cell["way"]
    plan = Plan(2, 4, picture=True, evaluated=1) if settings.quick else PLANS[side, way]
    sizes = arena.QUICK if settings.quick else arena.SIZES
    data = data_of(side, settings.seed, settings.quick)
    if way == "xla":  # timed alone
        data = (
            data[0],
            dataclasses.replace(data[1], words=data[1].words[:8], labels=data[1].labels[:8]),
        )
    start = _MODELS.get(side // 2)
    if start is not None:
        start = _classify.finer(start, 2)
    try:
        found, model = _classify.train(
            data, sizes, plan, attend(way, side * side), settings.seed, start
        )
    except jax.errors.JaxRuntimeError as error:
        return {"error": _gpt.reason(error), "batch": plan.batch}
    if way == "jax_flash":
        _MODELS[side] = jax.tree.map(np.asarray, model)
    return found | {"batch": plan.batch, "continued": start is not None}


def interval(right: float, count: int) -> tuple[float, float]:
    """Where the accuracy lies at 95 %: Wilson's interval of so many answers."""
    z = 1.96
    middle = (right + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(right * (1 - right) / count + z * z / (4 * count**2)) / (1 + z * z / count)
    return middle - half, middle + half


def right(side: int, way: str) -> Callable[[Sequence[Record]], str | None]:
    """Accuracy with its interval, and whether that is above chance."""

    def here(records: Sequence[Record]) -> str | None:
        found = paper.find(records, side=side, way=way)
        if found is None or "curve" not in found:
            return None
        last = found["curve"][-1][1]
        low, high = interval(last, found["unseen"])
        said = "above chance" if low > 0.5 else "not above chance"
        return f"{last:.1%} ({low:.1%} to {high:.1%}), {said}, {found['curve'][-1][0]} steps"

    return here


def sparse(side: int) -> Callable[[Sequence[Record]], str | None]:
    """Time of a dense step beside one of the butterfly."""

    def here(records: Sequence[Record]) -> str | None:
        dense, other = (paper.find(records, side=side, way=w) for w in ("jax_flash", "butterfly"))
        return paper.ratio(dense, other, "ms")

    return here


def memory(records: Sequence[Record]) -> str | None:
    """Planned memory of a step of 64k pixels."""
    found = paper.find(records, side=256, way="jax_flash")
    xla = paper.find(records, side=256, way="xla")
    if found is None or "program_gb" not in found or xla is None:
        return None
    other = xla.get("error") or f"{xla['program_gb']:.1f} GB"
    return f"{found['program_gb']:.1f} GB, {found['batch']} pictures; XLA's, one picture: {other}"


def table(records: Sequence[Record]) -> str:
    """Writes speed, memory and accuracy."""
    head = ["pixels", "rows", "attention", "ms", "steps/s", "planned GB", "steps", "accuracy"]
    lines = [f"| {' | '.join(head)} |", "|---" * 8 + "|"]
    for x in records:
        row = [f"{x['side'] ** 2:,}", x["batch"], WAYS[x["way"]]]
        if "error" in x:
            row += [x["error"], *[""] * 4]
        else:
            row += [f"{x['ms']:.1f}", f"{1e3 / x['ms']:.1f}", f"{x['program_gb']:.1f}"]
            steps, last = x["curve"][-1]
            row += ["", ""] if x["way"] == "xla" else [steps, f"{last:.1%}"]
        lines.append(f"| {' | '.join(map(str, row))} |")
    return "\n".join(lines)


def panels(records: Sequence[Record]) -> list[Panel]:
    """Draws the accuracy of each side over the steps."""
    found = []
    for side in dict.fromkeys(x["side"] for x in records):
        lines = {
            WAYS[x["way"]]: [(step, 100 * part) for step, part in x["curve"]]
            for x in records
            if x["side"] == side and x["way"] != "xla" and "curve" in x
        }
        if lines:
            found.append(Panel(f"{side} x {side}", "steps", "accuracy, %", lines))
    return found


PART = Part(
    title="Path-X and Path-256",
    paper="Dao et al., FlashAttention (arXiv:2205.14135)",
    seconds=370,
    claims=(
        Claim("Path-X, 16k pixels", "61.4 %", "Table 6", right(128, "jax_flash")),
        Claim("Path-X, block-sparse", "56.0 %", "Table 6", right(128, "butterfly")),
        Claim("Path-256, 64k pixels, block-sparse", "63.1 %", "Table 6", right(256, "butterfly")),
        Claim("speed of block-sparse, 16k pixels", "none", "not in the paper", sparse(128)),
        Claim("speed of block-sparse, 64k pixels", "none", "not in the paper", sparse(256)),
        Claim("memory of a step, 64k pixels", "none", "not in the paper", memory),
    ),
    differs=(
        "Three minutes of training where the paper has days: what is shown is that such steps run, "
        "how fast, in what memory, and what accuracy minutes give. Pictures are made by this "
        "project's own generator: the scene of 32 x 32 drawn finer, not with more curves as in the "
        "original. Each side begins with the model of half that side, as in the paper; 4 layers, "
        "width 128, 2 heads of 64. The butterfly joins blocks of 128 pixels whose numbers differ "
        "in one bit. XLA's attention is timed alone, with one picture a step."
    ),
    cells=cells,
    measure=measure,
    table=table,
    panels=panels,
    page="papers_training",
)
