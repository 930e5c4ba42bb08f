"""Speed and loss of GPT-2 small and medium: FlashAttention, Tables 2 and 4."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from common import paper, train_jobs
from common.paper import Claim, Panel, Part, Record, Settings
from common.train_jobs import Job

from . import _gpt

MODELS = {"gpt2": "GPT-2 small", "gpt2-medium": "GPT-2 medium"}
LENGTHS = (1024, 2048, 4096, 16384)
TOKENS = 16384  # in a step
STEPS = 200  # of a loss curve
CURVES = (("jax_flash", 0), ("xla", 0), ("jax_flash", 1))
COLUMNS = ("ms", "tokens_per_second", "mfu", "program_gb")


def cells(settings: Settings) -> list[Record]:
    """Lists steps by model, length and attention, then loss curves."""
    models = ("gpt2",) if settings.quick else tuple(MODELS)
    lengths = (64,) if settings.quick else LENGTHS
    ways = ("jax_flash", "xla") if settings.quick else tuple(_gpt.WAYS)
    steps = [
        {
            "name": f"{MODELS[model]}, T {length}, {way}",
            "kind": "table",
            "preset": model,
            "length": length,
            "batch": max(1, TOKENS // length),
            "attention": way,
            "remat": "products",
        }
        for model in models
        for length in lengths
        for way in ways
    ]
    curves = [
        {"name": f"loss, {way}, seed {seed}", "kind": "loss", "attention": way, "at": seed}
        for way, seed in (CURVES[:1] if settings.quick else CURVES)
    ]
    return [*steps, *curves]


_AHEAD = _gpt.Ahead(_gpt.build)


def measure(settings: Settings, cell: Record) -> Record:
    """Times the step of a cell, or trains."""
    if cell["kind"] == "loss":
        steps, preset, batch = (4, "quick", 2) if settings.quick else (STEPS, "gpt2", 16)
        seed = settings.seed + cell["at"]
        job = Job("loss", cell["attention"], 0, batch, "products", None, preset, seed=seed)
        return train_jobs.loss_curve(dataclasses.replace(job, steps=steps))
    steps = [x for x in settings.chosen(cells(settings)) if x["kind"] == "table"]
    return _gpt.measure(settings, cell, _AHEAD.take(settings, cell, steps))


def at(records: Sequence[Record], model: str, length: int, way: str) -> Record | None:
    return paper.find(records, kind="table", preset=model, length=length, attention=way)


def faster(model: str, length: int) -> Callable[[Sequence[Record]], str | None]:
    """How many times the tokens a second of XLA's attention, and of cuDNN's."""

    def here(records: Sequence[Record]) -> str | None:
        ours = at(records, model, length, "jax_flash")
        ratios = [
            paper.ratio(ours, at(records, model, length, way), "tokens_per_second")
            for way in ("xla", "cudnn")
        ]
        return ratios[0] and f"{ratios[0]} over XLA's, {ratios[1]} over cuDNN's"

    return here


def slower(records: Sequence[Record]) -> str | None:
    """Time a token at T 4096 beside 1024."""
    short, long = (at(records, "gpt2", length, "jax_flash") for length in (1024, 4096))
    return paper.ratio(short, long, "tokens_per_second")


def curves(records: Sequence[Record]) -> dict[tuple[str, int], Record]:
    return {(x["attention"], x["at"]): x for x in records if x["kind"] == "loss"}


def same_loss(records: Sequence[Record]) -> str | None:
    """How far the losses of ours and XLA's are apart, beside those of two seeds."""
    found = curves(records)
    if len(found) < len(CURVES):
        return None
    ours, xla, other = (np.array(found[x]["losses"]) for x in CURVES)
    half = len(ours) // 2
    apart = [float(np.abs(ours - x)[half:].mean()) for x in (xla, other)]
    unseen = [found[x]["validation"] for x in CURVES]
    return (
        f"{unseen[0]:.3f} and {unseen[1]:.3f} nats a byte on unseen files; curves {apart[0]:.4f} "
        f"nats apart, two seeds {apart[1]:.4f}"
    )


def table(records: Sequence[Record]) -> str:
    """Writes the steps and the losses."""
    head = ["model", "T", "rows", "attention", "ms", "tokens/s", "MFU", "planned GB"]
    lines = [f"| {' | '.join(head)} |", "|---" * 8 + "|"]
    for x in records:
        if x["kind"] == "table":
            row = [MODELS[x["preset"]], x["length"], x["batch"], _gpt.WAYS[x["attention"]]]
            row += _gpt.described(x, COLUMNS)
            lines.append(f"| {' | '.join(map(str, row))} |")
    lines += ["", "| loss of | after | training | unseen |", "|---|---|---|---|"]
    for (way, seed), x in curves(records).items():
        row = [f"{_gpt.WAYS[way]}, seed {seed}", f"{len(x['losses'])} steps"]
        row += [f"{np.mean(x['losses'][-10:]):.3f}", f"{x['validation']:.3f}"]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def panels(records: Sequence[Record]) -> list[Panel]:
    """Draws tokens a second over T, and the losses."""
    found = []
    for model, title in MODELS.items():
        lines = {}
        for way, label in _gpt.WAYS.items():
            points = [
                (x["length"], x["tokens_per_second"])
                for x in records
                if x["kind"] == "table"
                and (x["preset"], x["attention"]) == (model, way)
                and "tokens_per_second" in x
            ]
            if points:
                lines[label] = points
        if lines:
            found.append(Panel(title, "sequence length", "tokens/s", lines, "xy"))
    losses = {
        f"{_gpt.WAYS[way]}, seed {seed}": list(enumerate(x["losses"], 1))
        for (way, seed), x in curves(records).items()
    }
    if losses:
        title = "GPT-2 small on Python's standard library"
        found.append(Panel(title, "steps", "loss, nats a byte", losses))
    return found


PART = Part(
    title="GPT-2 small and medium",
    paper="Dao et al., FlashAttention (arXiv:2205.14135)",
    seconds=240,
    claims=(
        Claim(
            "GPT-2 small, T 1024: speed of training",
            "3.5 × over Hugging Face, 1.7 × over Megatron (8 A100)",
            "Table 2",
            faster("gpt2", 1024),
        ),
        Claim(
            "GPT-2 medium, T 1024: speed of training",
            "3.0 × over Hugging Face, 1.7 × over Megatron (8 A100)",
            "Table 2",
            faster("gpt2-medium", 1024),
        ),
        Claim(
            "GPT-2 small, T 4096: time a token beside T 1024",
            "1.33 × (8 A100)",
            "Table 4",
            slower,
        ),
        Claim(
            "GPT-2 small, T 16384: speed of training",
            "none",
            "not in the paper",
            faster("gpt2", 16384),
        ),
        Claim("loss beside the other attention's", "the same perplexity", "Table 2", same_loss),
    ),
    differs=(
        f"One GPU; {TOKENS} tokens a step, bfloat16, AdamW, no dropout; blocks keep the results of "
        "matrix products. The paper's baselines differ in more than attention; here attention "
        "alone does. Speed is of random bytes without packing, which cuDNN's attention in jax.nn "
        "cannot do. Losses are of Python's standard library, byte by byte, packed documents, a "
        "tenth of the files held out, and not of OpenWebText for days."
    ),
    cells=cells,
    measure=measure,
    table=table,
    panels=panels,
    page="papers_training",
)
