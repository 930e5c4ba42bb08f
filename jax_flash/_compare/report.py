"""Owns how results are told: tables that a page or an issue takes as they are, and a picture."""

import importlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jax_flash._compare.cells import Cell
from jax_flash._compare.measure import Record
from jax_flash._compare.rivals import OURS

PASSES = {False: "forward", True: "forward + backward"}
# Readable on white and for who sees fewer colours; ours is the first.
COLORS = ("#e8590c", "#1c7ed6", "#868e96", "#9c36b5", "#2f9e44")


def text(records: Sequence[Record], cells: Sequence[Cell], names: Sequence[str]) -> str:
    """Writes tables of time, memory and error, and what follows from them."""
    parts = [_table(f"{PASSES[x]}, ms", _of(records, x), names, times=True) for x in PASSES]
    backward = _of(records, True)
    parts.append(_table("memory beside arrays, forward + backward, MB", backward, names, _memory))
    parts.append(_table("error beside float64, forward + backward", backward, names, _error))
    parts.append("\n".join([*_sums(records), *_reasons(records), *_left_out(records, cells)]))
    return "\n\n".join(part for part in parts if part)


def _of(records: Sequence[Record], backward: bool) -> list[Record]:
    return [record for record in records if record["backward"] == backward]


def _milliseconds(record: Record, name: str) -> str:
    seconds = record["seconds"].get(name)
    if seconds is None:
        return "–"
    return f"{1e3 * seconds:.4g}" if seconds < 1 else f"{1e3 * seconds:.0f}"


def _memory(record: Record, name: str) -> str:
    found = record["memory"].get(name)
    return "–" if found is None else f"{found / 1e6:.4g}"


def _error(record: Record, name: str) -> str:
    found = record["error"].get(name)
    return "–" if found is None else f"{found:.1e}"


def _table(
    title: str,
    records: Sequence[Record],
    names: Sequence[str],
    write: Callable[[Record, str], str] = _milliseconds,
    times: bool = False,
) -> str:
    if not records:
        return ""
    rows = [[title, *names, *["ours is", "backend"] * times]]
    for record in records:
        row = [record["shape"], *(write(record, name) for name in names)]
        if times:
            ratio = faster(record)
            row += ["–" if ratio is None else f"{ratio:.2f} x", record["backend"]]
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [f" {'-' * widths[0]} ", *(f" {'-' * (width - 1)}: " for width in widths[1:])]
    lines = [
        [f" {row[0]:<{widths[0]}} "]
        + [f" {x:>{width}} " for x, width in zip(row[1:], widths[1:], strict=True)]
        for row in rows
    ]
    return "\n".join(f"|{'|'.join(line)}|" for line in [lines[0], aligned, *lines[1:]])


def faster(record: Record) -> float | None:
    """Returns how many times as fast as the fastest other it is."""
    others = [x for name, x in record["seconds"].items() if name != OURS]
    ours = record["seconds"].get(OURS)
    return min(others) / ours if ours and others else None


def _sums(records: Sequence[Record]) -> list[str]:
    lines = []
    for backward, title in PASSES.items():
        found = [(x, faster(x)) for x in _of(records, backward)]
        known = [(ratio, record["shape"]) for record, ratio in found if ratio is not None]
        if known:
            mean = math.exp(sum(math.log(ratio) for ratio, _ in known) / len(known))
            least, where = min(known)
            lines.append(
                f"{title}: {mean:.2f} times as fast as the fastest other, the geometric mean of "
                f"{len(known)}; the least is {least:.2f}, at {where}"
            )
    return lines


def _reasons(records: Sequence[Record]) -> list[str]:
    where: dict[tuple[str, str], list[str]] = {}
    for record in records:
        for name, reason in record["missing"].items():
            where.setdefault((name, reason), []).append(
                f"{record['shape']} {PASSES[record['backward']]}"
            )
    return [
        f"no time of {name} for {shapes[0]}{f' and {len(shapes) - 1} more' * (len(shapes) > 1)}: "
        f"{reason}"
        for (name, reason), shapes in where.items()
    ]


def _left_out(records: Sequence[Record], cells: Sequence[Cell]) -> list[str]:
    missing = len(cells) - len({record["shape"] for record in _of(records, True)})
    more = f"{missing} of {len(cells)} shapes were not measured in this time; --seconds gives more"
    return [more] if missing else []


def draw(records: Sequence[Record], names: Sequence[str], path: Path) -> None:
    """Draws TFLOP/s as bars, a panel for each pass."""
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    plt: Any = importlib.import_module("matplotlib.pyplot")
    shapes = list(dict.fromkeys(record["shape"] for record in records))
    figure, axes = plt.subplots(
        1, 2, figsize=(11, 1.5 + 0.5 * len(shapes)), sharey=True, layout="constrained"
    )
    height = 0.8 / len(names)
    for ax, (backward, title) in zip(axes, PASSES.items(), strict=True):
        found = {record["shape"]: record["tflops"] for record in _of(records, backward)}
        for i, name in enumerate(names):
            places = [row + height * i for row in range(len(shapes))]
            rates = [found.get(shape, {}).get(name, 0.0) for shape in shapes]
            ax.barh(places, rates, height, label=name, color=COLORS[i % len(COLORS)])
        ax.set_title(title, fontsize=11)
        ax.set_xlabel("TFLOP/s")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks([row + 0.4 - height / 2 for row in range(len(shapes))], shapes)
    axes[0].invert_yaxis()
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False
    )
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
