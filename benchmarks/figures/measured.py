"""Draws what was measured: charts of the newest set in results/nvidia-h200."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from common import shapes

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "nvidia-h200"
COMMAND = "python benchmarks/run.py"
SCRATCH_COMMAND = (
    "python benchmarks/run.py --passes training --lengths 4096 "
    "--peers jax_flash jax_cudnn jax_xla --no-errors"
)
SPARSE_COMMAND = "python benchmarks/sparse.py"
PASSES = {"forward": "forward", "training": "forward + backward"}
THEMES = {"light": "#24292f", "dark": "#e6edf3"}  # text and axes; nothing is behind them
# Peers with their names and colours, readable on white and on black; the widest line is ours.
LOOKS = {
    "jax_flash": ("jax_flash", "#e8590c", 3.0),
    "torch_cudnn": ("cuDNN (PyTorch)", "#0c8599", 1.6),
    "jax_cudnn": ("cuDNN (jax.nn)", "#1c7ed6", 1.6),
    "torch_flash": ("FlashAttention-2", "#9c36b5", 1.6),
    "jax_xla": ("XLA (jax.nn)", "#868e96", 1.6),
}
LAYOUTS = {"random": "#1c7ed6", "banded": "#9c36b5", "butterfly": "#e8590c"}

mpl.use("Agg")
mpl.rcParams["svg.fonttype"] = "none"  # text stays text
mpl.rcParams["svg.hashsalt"] = "jax_flash"  # the same bytes each time


def newest(folder: Path, command: str = COMMAND) -> dict[str, Any]:
    """Reads the latest results of a command in a folder; run.py's are of all its cells."""
    records = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return max((x for x in records if x.get("command") == command), key=lambda x: x["date"])


def draw_speed(record: Mapping[str, Any], color: str, to: Path) -> None:
    """Draws TFLOP/s over T, causal, head dim 128: a panel for each pass, a line for each peer."""
    with plt.rc_context({"text.color": color, "axes.labelcolor": color, "axes.edgecolor": color}):
        figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
        for ax, (of, title) in zip(axes, PASSES.items(), strict=True):
            ax.set_title(f"{title}, causal, head dim 128", fontsize=11, color=color)
            _lines(ax, speeds(record, of), color)
        axes[0].set_ylabel("TFLOP/s")
        figure.legend(
            *axes[0].get_legend_handles_labels(),
            loc="outside lower center",
            ncols=len(LOOKS),
            frameon=False,
            labelcolor=color,
        )
        figure.savefig(to, transparent=True, metadata={"Date": None})
        plt.close(figure)


def draw_gain(record: Mapping[str, Any], color: str, to: Path) -> None:
    """Draws what a reader gains, beside jax.nn: TFLOP/s over T, and memory at T 4096."""
    peers = ("jax_flash", "jax_cudnn", "jax_xla")
    scratch = newest(RESULTS, SCRATCH_COMMAND)["cells"]
    (memory,) = (x["scratch_mb"] for x in scratch if x["cell"]["name"] == "d128 causal T4096")
    with plt.rc_context({"text.color": color, "axes.labelcolor": color, "axes.edgecolor": color}):
        figure, (ax, bars) = plt.subplots(1, 2, figsize=(9, 2.9), layout="constrained")
        found = {name: x for name, x in speeds(record, "training").items() if name in peers}
        _lines(ax, found, color)
        ax.set_ylabel("TFLOP/s")
        ax.set_title("speed, forward + backward", fontsize=11, color=color)
        for place, name in enumerate(peers):
            label, line, _ = LOOKS[name]
            bars.barh(place, memory[name], color=line)
            text = f" {label}: {memory[name]:,.0f} MB"
            inside = memory[name] > 1e3
            where = 12 if inside else memory[name]
            shown = "white" if inside else color
            bars.text(where, place, text, va="center", color=shown, fontsize=10)
        bars.set_xscale("log")
        bars.set_xlim(10, 2e4)
        bars.set_yticks([])
        bars.invert_yaxis()
        bars.set_xlabel("MB beside arguments and results, T 4096")
        bars.set_title("memory, forward + backward", fontsize=11, color=color)
        bars.tick_params(colors=color)
        bars.spines[["top", "right"]].set_visible(False)
        figure.legend(
            *ax.get_legend_handles_labels(),
            loc="outside lower center",
            ncols=3,
            frameon=False,
            labelcolor=color,
        )
        figure.savefig(to, transparent=True, metadata={"Date": None})
        plt.close(figure)


def draw_sparse(record: Mapping[str, Any], color: str, to: Path) -> None:
    """Draws the time of forward + backward over density at T 16384: a panel for each head dim."""
    cells = [x for x in record["cells"] if x["length"] == 16384 and x["pass"] == "training"]
    with plt.rc_context({"text.color": color, "axes.labelcolor": color, "axes.edgecolor": color}):
        figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
        for ax, head_dim in zip(axes, (64, 128), strict=True):
            found = [x for x in cells if x["head_dim"] == head_dim]
            (dense,) = (x["milliseconds"] for x in found if x["layout"] == "dense")
            ax.set_title(f"{PASSES['training']}, head dim {head_dim}", fontsize=11, color=color)
            ax.axhline(dense, color=color, linewidth=1, linestyle="--", label="no block mask")
            ax.plot([0, 1], [0, dense], color=color, linewidth=1, linestyle=":", label="its share")
            for layout, line in LAYOUTS.items():
                points = sorted(
                    (x["density"], x["milliseconds"]) for x in found if x["layout"] == layout
                )
                ax.plot(*zip(*points, strict=True), "o-", color=line, markersize=4, label=layout)
            ax.set_xlabel("share of blocks that are not empty")
            ax.set_xlim(0, 1.02)
            _plain_axes(ax, color)
        axes[0].set_ylabel("milliseconds, T 16384, 16 heads")
        figure.legend(
            *axes[0].get_legend_handles_labels(),
            loc="outside lower center",
            ncols=5,
            frameon=False,
            labelcolor=color,
        )
        figure.savefig(to, transparent=True, metadata={"Date": None})
        plt.close(figure)


def speeds(record: Mapping[str, Any], of: str) -> dict[str, list[tuple[int, float]]]:
    """Collects (T, TFLOP/s) by peer of the causal cells of head dim 128."""
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in LOOKS}
    cells = {cell.name for cell in shapes.main_cells() if cell.causal and cell.head_dim == 128}
    for x in record["cells"]:
        cell = x["cell"]
        if x["pass"] == of and cell["name"] in cells:
            for name in LOOKS:
                if name in x["tflops"]:
                    found[name].append((cell["length"], x["tflops"][name]))
    return {name: sorted(points) for name, points in found.items() if points}


def _lines(ax: Any, found: Mapping[str, Sequence[tuple[int, float]]], color: str) -> None:
    for name, points in found.items():
        label, line, width = LOOKS[name]
        lengths, rates = zip(*points, strict=True)
        places = [math.log2(length) for length in lengths]
        ax.plot(places, rates, color=line, linewidth=width, marker="o", markersize=4, label=label)
        if name == "jax_flash":
            for x, y in zip(places, rates, strict=True):
                ax.annotate(f"{y:.0f}", (x, y), (0, 6), textcoords="offset points", ha="center")
            ticks = [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths]
            ax.set_xticks(places, ticks)
    ax.set_xlabel("sequence length")
    _plain_axes(ax, color)
    ax.margins(y=0.12)


def _plain_axes(ax: Any, color: str) -> None:
    ax.set_ylim(bottom=0)
    ax.tick_params(colors=color)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", alpha=0.25, color=color)
