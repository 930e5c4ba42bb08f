"""Owns how results are shown: charts in the style of the FlashAttention papers, Markdown tables."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Patch

from .paper import Panel
from .shapes import BLOCK, Cell, Pass

Results = Sequence[tuple[Cell, Mapping[str, float]]]  # TFLOP/s of each peer in each cell
# Readable on white and on black.
LINES = ("#e8590c", "#1c7ed6", "#9c36b5", "#2f9e44", "#0c8599", "#868e96")
TITLES: dict[Pass, str] = {"forward": "Forward", "training": "Forward + backward"}

mpl.use("Agg")


def draw(results: Results, of: Pass, looks: Mapping[str, tuple[str, str]], gpu: str, to: Path):
    """Draws TFLOP/s over T, one panel per mask and head dim; looks: {peer: (label, color)}."""
    head_dims = sorted({cell.head_dim for cell, _ in results})
    masks = sorted({cell.causal for cell, _ in results})
    figure, axes = plt.subplots(
        len(masks),
        len(head_dims),
        figsize=(5.2 * len(head_dims), 3.4 * len(masks)),
        squeeze=False,
        layout="constrained",
    )
    peers = [name for name in looks if any(name in speeds for _, speeds in results)]
    for row, causal in enumerate(masks):
        for column, head_dim in enumerate(head_dims):
            ax = axes[row][column]
            panel = [
                (cell, speeds)
                for cell, speeds in results
                if (cell.head_dim, cell.causal) == (head_dim, causal)
            ]
            _draw_panel(ax, panel, peers, looks)
            ax.set_title(f"head dim {head_dim}, {'causal' if causal else 'not causal'}")
            if column == 0:
                ax.set_ylabel("TFLOP/s")
    handles = [Patch(color=looks[name][1], label=looks[name][0]) for name in peers]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(peers), frameon=False)
    figure.suptitle(f"{TITLES[of]}, bfloat16, {gpu}")
    figure.savefig(to, dpi=120)
    plt.close(figure)


def _draw_panel(ax: Any, panel: Results, peers: Sequence[str], looks: Mapping[str, Any]) -> None:
    width = 0.84 / len(peers)
    for i, name in enumerate(peers):
        for x, (_, speeds) in enumerate(panel):
            if name in speeds:
                left = x - 0.42 + i * width
                bar = ax.bar(left, speeds[name], width, align="edge", color=looks[name][1])
                ax.bar_label(bar, fmt="%.0f", fontsize=6, rotation=90, padding=2)
    ax.set_xticks(range(len(panel)), [_short(cell.length) for cell, _ in panel])
    ax.set_xlabel("sequence length")
    ax.margins(y=0.15)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", alpha=0.3)
    ax.set_axisbelow(True)


def draw_losses(
    curves: Mapping[tuple[str, int], Sequence[float]],
    looks: Mapping[str, tuple[str, str]],
    gpu: str,
    to: Path,
):
    """Draws losses over steps, means of 20, a line for each (attention, seed)."""
    figure, ax = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for (name, seed), losses in curves.items():
        label, color = looks[name]
        window = min(20, len(losses))
        ax.plot(
            np.arange(window, len(losses) + 1),
            np.convolve(losses, np.ones(window) / window, "valid"),
            color=color,
            linestyle=("-", "--", ":")[seed % 3],
            linewidth=1.2,
            label=f"{label}, seed {seed}",
        )
    ax.set(xlabel="step", ylabel="training loss (nats per byte, mean of 20 steps)")
    ax.set_title(f"Training loss, bfloat16, {gpu}")
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", alpha=0.3)
    ax.legend(frameon=False)
    figure.savefig(to, dpi=120)
    plt.close(figure)


def draw_panels(
    panels: Sequence[Panel], title: str, to: Path, color: str = "black", *, opaque: bool = True
):
    """Draws lines, a panel beside the other; `color` is that of text and axes."""
    with plt.rc_context({"text.color": color, "axes.labelcolor": color, "axes.edgecolor": color}):
        size = (4.6 * len(panels), 3.6)
        figure, axes = plt.subplots(
            1, len(panels), figsize=size, squeeze=False, layout="constrained"
        )
        for ax, panel in zip(axes[0], panels, strict=True):
            for (name, points), line in zip(
                panel.lines.items(), itertools.cycle(LINES), strict=False
            ):
                if points:
                    xs, ys = zip(*sorted(points), strict=True)
                    ax.plot(xs, ys, "o-", color=line, markersize=4, label=name)
            ax.set_title(panel.title, fontsize=11)
            ax.set(xlabel=panel.x, ylabel=panel.y)
            if "x" in panel.logarithmic:
                ax.set_xscale("log", base=2)
                ticks = sorted({x for points in panel.lines.values() for x, _ in points})
                ax.set_xticks(ticks, [_short(int(x)) if x >= 1 else f"{x:g}" for x in ticks])
                ax.minorticks_off()
            if "y" in panel.logarithmic:
                ax.set_yscale("log")
            else:
                ax.set_ylim(bottom=0)
            ax.tick_params(colors=color)
            ax.spines[["top", "right"]].set_visible(False)
            ax.grid(axis="y", alpha=0.25, color=color)
            if any(panel.lines.values()):
                ax.legend(frameon=False, fontsize=8, labelcolor=color)
        figure.suptitle(title, fontsize=12)
        figure.savefig(
            to,
            dpi=120,
            transparent=not opaque,
            metadata={"Date": None} if to.suffix == ".svg" else None,
        )
        plt.close(figure)


def table(
    results: Results, of: Pass, looks: Mapping[str, tuple[str, str]], ours: str, against: str
) -> str:
    """Writes a Markdown table of TFLOP/s, with the ratio of one peer to another."""
    peers = [name for name in looks if any(name in speeds for _, speeds in results)]
    with_ratio = ours in peers and against in peers
    head = ["cell", *(looks[name][0] for name in peers)]
    if with_ratio:
        head.append(f"{looks[ours][0]} / {looks[against][0]}")
    lines = [
        f"{TITLES[of]}, TFLOP/s:",
        "",
        "| " + " | ".join(head) + " |",
        "|---" + "|---:" * (len(head) - 1) + "|",
    ]
    ratios = []
    for cell, speeds in results:
        row = [cell.name, *(f"{speeds[name]:.0f}" if name in speeds else "" for name in peers)]
        if with_ratio and ours in speeds and against in speeds:
            ratios.append(speeds[ours] / speeds[against])
            row.append(f"{ratios[-1]:.2f}")
        elif with_ratio:
            row.append("")
        lines.append("| " + " | ".join(row) + " |")
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        lines.append("| geometric mean" + " |" * len(peers) + f" | {mean:.3f} |")
    return "\n".join(lines)


def summary(
    results: Mapping[Pass, Results], looks: Mapping[str, tuple[str, str]], ours: str, against: str
) -> str:
    """Writes a Markdown table of two peers: a row for each head dim and mask.

    TFLOP/s at the longest T, and the geometric mean, over all T, of how many times faster we are.
    """
    longest = max(cell.length for cells in results.values() for cell, _ in cells)
    kinds = sorted({(c.head_dim, c.causal) for cells in results.values() for c, _ in cells})
    head = [f"at T = {longest}"]
    for of in results:
        title = TITLES[of].lower()
        head += [f"{title}: {looks[ours][0]}", looks[against][0], "faster, all T"]
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    for head_dim, causal in kinds:
        row = [f"head dim {head_dim}{', causal' if causal else ''}"]
        for cells in results.values():
            rows = [(c, x) for c, x in cells if (c.head_dim, c.causal) == (head_dim, causal)]
            last = next((x for c, x in rows if c.length == longest), {})
            row += [f"{last[name]:.0f}" if name in last else "" for name in (ours, against)]
            row.append(_mean_ratio([x for _, x in rows], ours, against))
        lines.append("| " + " | ".join(row) + " |")
    row = ["all"]
    for cells in results.values():
        row += ["", "", _mean_ratio([x for _, x in cells], ours, against)]
    return "\n".join([*lines, "| " + " | ".join(row) + " |"])


def compare(results: Results, looks: Mapping[str, tuple[str, str]], a: str, b: str) -> str:
    """Writes a sentence: how one peer's speed relates to another's over the cells of both."""
    ratios = {c.name: x[a] / x[b] for c, x in results if a in x and b in x}
    low, high = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
    return (
        f"{looks[a][0]} beside {looks[b][0]}, {len(ratios)} cells: "
        f"{_mean_ratio([x for _, x in results], a, b)} in the geometric mean, "
        f"{ratios[low]:.2f} ({low}) to {ratios[high]:.2f} ({high})."
    )


def scratch(records: Iterable[Mapping[str, Any]], of: Pass, labels: Mapping[str, str]) -> str:
    """Writes a Markdown table of what a pass needs beside arguments and results, as XLA plans it.

    Rows are the cells without a mask or segments, at their longest T; a causal mask needs the same.
    """
    records = [
        x
        for x in records
        if x["pass"] == of
        and not (x["cell"]["causal"] or x["cell"]["window"] or x["cell"]["segment"])
    ]
    longest = max(x["cell"]["length"] for x in records)
    chosen = [
        x
        for x in records
        if x["cell"]["length"] == longest or x["cell"]["heads"] != x["cell"]["kv_heads"]
    ]
    names = [name for name in labels if any(name in x["scratch_mb"] for x in chosen)]
    lines = [
        f"| {TITLES[of].lower()}, scratch memory in MB | "
        + " | ".join(labels[name] for name in names)
        + " |"
    ]
    lines.append("|---" + "|---:" * len(names) + "|")
    for x in chosen:
        row = [x["cell"]["name"], *(f"{x['scratch_mb'].get(name, '')}" for name in names)]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def blocks(results: Results, name: str) -> str:
    """Writes a Markdown table of a peer's windows and segments beside the same cell without them.

    Both are counted on the blocks that hold a visible pair, whole; empty without such cells.
    """
    speeds = {cell: found[name] for cell, found in results if name in found}
    lines = []
    for cell, speed in speeds.items():
        if cell == cell.plain or cell.plain not in speeds:
            continue
        here, plain = (speeds[c] * c.block_pairs / c.pairs for c in (cell, cell.plain))
        lines.append(
            f"| {cell.name} | {speed:.0f} | {here:.0f} | {plain:.0f} | {here / plain:.0%} |"
        )
    if not lines:
        return ""
    head = f"| cell | TFLOP/s | on blocks of {BLOCK} × {BLOCK} | full attention | share |"
    return "\n".join([head, "|---" + "|---:" * 4 + "|", *lines])


def _mean_ratio(speeds: Sequence[Mapping[str, float]], ours: str, against: str) -> str:
    ratios = [x[ours] / x[against] for x in speeds if ours in x and against in x]
    return f"{math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f} ×" if ratios else ""


def _short(length: int) -> str:
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else str(length)


def features(
    records: Sequence[Mapping[str, Any]], labels: Mapping[str, str], ours: str, against: str
) -> str:
    """Writes a Markdown table of cases: forward / forward + backward, in milliseconds by peer.

    Beside them how many times as fast ours is as the fastest other peer, the time of the same
    attention without the feature, ours in TFLOP/s, counted as plain full or causal attention, and
    how our error relates to another peer's.
    """
    rows: dict[str, dict[str, Mapping[str, Any]]] = {}
    for record in records:
        rows.setdefault(record["cell"]["name"], {})[record["pass"]] = record
    names = [name for name in labels if any(name in record["ms"] for record in records)]
    head = ["case", "ran on", *(labels[name] for name in names)]
    head += ["best other / ours", "ours / plain", "TFLOP/s", f"error / {labels.get(against, '')}"]
    lines = ["| " + " | ".join(head) + " |", "|---|---" + "|---:" * (len(head) - 2) + "|"]
    for name, passes in rows.items():
        plain = _plain_name(next(iter(passes.values()))["cell"])
        without = rows.get(plain, {}) if plain != name else {}
        cells: list[list[str]] = []
        for of, record in passes.items():
            ms = record["ms"]
            others = [ms[peer] for peer in names if peer != ours and peer in ms]
            mine = ms.get(ours)
            base = without[of]["ms"].get(ours) if of in without else None
            errors = [record["error"].get(peer) for peer in (ours, against)]
            cells.append(
                [
                    *(f"{ms[peer]:#.3g}" if peer in ms else "" for peer in names),
                    f"{min(others) / mine:.2f}" if others and mine else "",
                    f"{mine / base:.2f}" if mine and base else "",
                    f"{record['tflops'][ours]:.0f}" if mine else "",
                    _error_ratio(*errors),
                ]
            )
        ran = next(iter(passes.values())).get("ours", {}).get("backend", "")
        both = [" / ".join(pair) if any(pair) else "" for pair in zip(*cells, strict=True)]
        lines.append("| " + " | ".join([name, ran, *both]) + " |")
    title = " / ".join(TITLES[of].lower() for of in dict.fromkeys(x["pass"] for x in records))
    about = "best other / ours and ours / plain are ratios of times; the error is the largest ratio"
    return "\n".join([f"Milliseconds, {title}; {about}:", "", *lines])


def not_measured(records: Iterable[Mapping[str, Any]], labels: Mapping[str, str]) -> str:
    """Writes a list of what has no time and of what our kernels did not run, with the reasons."""
    found: dict[str, dict[str, None]] = {}
    for record in records:
        name = record["cell"]["name"]
        for peer, reason in (record["no"] | record["failed"]).items():
            found.setdefault(f"{labels[peer]}: {reason}", {})[name] = None
        if (of_ours := record["ours"])["backend"] != "cuda" and "cuda" in of_ours["not"]:
            found.setdefault(f"Not on cuda: {of_ours['not']['cuda']}", {})[name] = None
    return "\n".join(f"- {reason} ({', '.join(names)})" for reason, names in found.items())


def _plain_name(cell: Mapping[str, Any]) -> str:
    return f"{cell['problem']} {'causal' if cell['causal'] else 'plain'}"


def _error_ratio(ours: Mapping[str, float] | None, against: Mapping[str, float] | None) -> str:
    """Writes the largest ratio of two errors, over the results that both have."""
    if not ours or not against:
        return ""
    ratios = [ours[n] / against[n] for n in ours if n != "pattern" and against.get(n)]
    return f"{max(ratios):.2f}" if ratios else ""
