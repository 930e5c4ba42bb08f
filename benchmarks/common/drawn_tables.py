"""Owns how results of cliffs.py are shown: their four ways, and tables of them, the worst first.

Read next: cliffs.py, which measures them; drawn_peers.py for the names of the peers.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from . import shapes
from .drawn_peers import LABELS, OURS
from .shapes import Pass

NEIGHBOUR = "neighbour"  # ours, of the next round sizes
WORST = 20
KINDS = ("program", "single")
WAYS: tuple[tuple[str, Pass], ...] = tuple((kind, of) for kind in KINDS for of in shapes.PASSES)
TITLES = {"forward": "forward", "training": "forward + backward"}


def ratios(record: Mapping[str, Any], way: str) -> tuple[float | None, str | None, float | None]:
    """Returns the best other's time over ours, whose it is, and our neighbour's over ours."""
    ms = record["ms"][way]
    ours = ms.get(OURS)
    if ours is None:
        return None, None, None
    others = {name: x for name, x in ms.items() if name not in (OURS, NEIGHBOUR)}
    best = min(others, key=lambda name: others[name], default=None)
    beside = None if best is None else others[best] / ours
    return beside, best, ms[NEIGHBOUR] / ours if NEIGHBOUR in ms else None


def summary(records: Sequence[Mapping[str, Any]]) -> str:
    """Writes a row for each way."""
    lines = [
        "| way | problems | best other / ours | lowest | below 1 | round sizes / ours | lowest "
        "| spread, % |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for kind, of in WAYS:
        found = [ratios(record, f"{kind} {of}") for record in records]
        beside = [x for x, _, _ in found if x is not None]
        near = [x for _, _, x in found if x is not None]
        cells = [f"{kind}, {TITLES[of]}", str(len(beside))]
        cells += [*mean_and_lowest(beside), str(sum(x < 1 for x in beside))]
        cells += mean_and_lowest(near)
        cells.append(spread(records, f"{kind} {of}"))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def spread(records: Sequence[Mapping[str, Any]], way: str) -> str:
    """Writes how far the median of the turns is above the least: the median, the ninth of ten."""
    found = sorted(x for one in records for x in one.get("spread", {}).get(way, {}).values() if x)
    if not found:
        return ""
    return ", ".join(f"{100 * found[int(part * len(found))]:.1f}" for part in (0.5, 0.9))


def mean_and_lowest(found: Sequence[float]) -> list[str]:
    if not found:
        return ["", ""]
    mean = math.exp(statistics.fmean(map(math.log, found)))
    return [f"{mean:.3f}", f"{min(found):.3f}"]


def worst(records: Sequence[Mapping[str, Any]]) -> str:
    """Writes the two lists of the lowest ratios."""
    beside, near = [], []
    for record in records:
        for kind, of in WAYS:
            ratio, best, neighbour = ratios(record, f"{kind} {of}")
            if ratio is not None:
                beside.append((ratio, record, kind, of, best))
            if neighbour is not None:
                near.append((neighbour, record, kind, of, NEIGHBOUR))
    tables = []
    for title, found in (("best other", beside), ("next round sizes", near)):
        lines = [f"| {title} / ours | | call | way | ours, µs | other, µs | other | ran on |"]
        lines.append("|---:|---|---|---|---:|---:|---|---|")
        for ratio, record, kind, of, other in sorted(found, key=lambda x: x[0])[:WORST]:
            problem, ms = record["problem"], record["ms"][f"{kind} {of}"]
            label = record["neighbour"] if other == NEIGHBOUR else LABELS[other]
            cells = [f"{ratio:.3f}", f"{problem['source']} #{problem['index']}", problem["name"]]
            cells += [f"{kind}, {TITLES[of]}", f"{1e3 * ms[OURS]:.4g}", f"{1e3 * ms[other]:.4g}"]
            cells += [label, record["ran"][of]]
            lines.append("| " + " | ".join(cells) + " |")
        tables += ["\n".join(lines)] if found else []
    return "\n\n".join(tables)


def missing(records: Sequence[Mapping[str, Any]]) -> str:
    """Writes what is wrong, by problem, then what peers could not run, by reason."""
    lines = []
    counted: dict[str, int] = {}
    for record in records:
        problem = record["problem"]
        name = f"{problem['source']} #{problem['index']}, {problem['name']}"
        for peer, error in record["wrong"].items():
            lines.append(f"- Wrong: {peer}: {error} ({name})")
        for peer, why in record["no"].items():
            if peer.startswith((OURS, NEIGHBOUR)):
                lines.append(f"- No result: {peer}: {why} ({name})")
            else:
                text = f"{peer.split(', ')[0]}: {why}"
                counted[text] = counted.get(text, 0) + 1
    lines += [f"- {text} ({count} passes)" for text, count in sorted(counted.items())]
    return "\n".join(lines)


def compiling(records: Sequence[Mapping[str, Any]]) -> str:
    """Writes how long processes compiled, by peer, and what measuring took beside it."""
    counted: dict[str, float] = {}
    for record in records:
        for name, seconds in record["compiling"].items():
            peer = name.split(", ")[0]
            counted[peer] = counted.get(peer, 0.0) + seconds
    most = sorted(counted.items(), key=lambda x: -x[1])
    text = ", ".join(f"{LABELS.get(peer, peer)} {seconds:.0f}" for peer, seconds in most)
    took: dict[str, float] = {}
    for record in records:
        for part, seconds in record.get("took", {}).items():
            took[part] = took.get(part, 0.0) + seconds
    parts = ", ".join(f"{part} {seconds:.0f}" for part, seconds in took.items())
    return f"Seconds of processes that compiled: {text}; of the one that measured: {parts}."
