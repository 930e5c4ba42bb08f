"""Fills docs/papers.md and papers_training.md: claims beside what was measured, and charts of it.

Read are the published runs of papers.py, one for each part, the newest; those of `--quick`, of
`--cells` and of CPUs are none.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import papers
from common import charts, paper

from .measured import ROOT, THEMES

PAGES = [ROOT / "docs" / f"{name}.md" for name in ("papers", "papers_training")]
BEGIN, END = "<!-- python benchmarks figures -->\n", "<!-- end of the tables -->\n"


def runs_of(results: Path = ROOT / "benchmarks" / "results") -> dict[str, dict[str, Any]]:
    """Reads the newest published run of each part, by its name."""
    found: dict[str, dict[str, Any]] = {}
    for path in results.glob("nvidia-*/papers-*.json"):
        run = json.loads(path.read_text())
        name = run["part"]
        whole = not run["quick"] and not run["chosen"]
        if whole and run["date"] > found.get(name, {"date": ""})["date"]:
            found[name] = run
    return found


def draw(runs: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
    """Draws a chart of each part that was measured, light and dark."""
    for name, run in runs.items():
        part = papers.parts()[name]
        for theme, color in THEMES.items():
            to = folder / f"papers-{name}-{theme}.svg"
            title = f"{part.title}, {run['gpu']}"
            charts.draw_panels(part.panels(run["cells"]), title, to, color, opaque=False)


def fill(name: str, page: str, runs: Mapping[str, Mapping[str, Any]]) -> str:
    """Puts a section for each part of a page between the marks of its text."""
    parts = {word: part for word, part in papers.parts().items() if part.page == name}
    sections = [section(word, part, runs.get(word)) for word, part in parts.items()]
    tables = "\n".join([_summary(parts, runs), *sections])
    return re.sub(
        f"{re.escape(BEGIN)}.*{re.escape(END)}",
        lambda _: f"{BEGIN}\n{tables}\n{END}",
        page,
        flags=re.DOTALL,
    )


def section(name: str, part: paper.Part, run: Mapping[str, Any] | None) -> str:
    """Writes a part: its claims, of which run, its chart, and what differs."""
    lines = [f"## {part.title}", f"{part.paper}."]
    if run is not None:
        text = f"Here: {run['gpu']}, {run['date'][:10]}, jax {run['versions']['jax']}, seed "
        text += (
            f"{run['seed']}, {run['seconds']:.0f} s, `python benchmarks/papers.py --part {name}`."
        )
        others = [x["name"] for x in run["cells"] if "commit" in x]
        if others:
            text += f" Measured at another commit: {'; '.join(others)}."
        lines.append(text)
    lines.append(paper.claims_table(part, None if run is None else run["cells"]))
    if run is not None:
        dark, light = (f"figures/papers-{name}-{theme}.svg" for theme in ("dark", "light"))
        lines.append(
            f'<picture>\n  <source media="(prefers-color-scheme: dark)" srcset="{dark}">\n'
            f'  <img alt="{part.title}" src="{light}">\n</picture>'
        )
        lines += [f"Failed: {one}" for one in run["failed"]]
    return "\n\n".join([*lines, part.differs]) + "\n"


def _summary(parts: Mapping[str, paper.Part], runs: Mapping[str, Mapping[str, Any]]) -> str:
    """Says which parts have been measured."""
    titles = {name: part.title for name, part in parts.items()}
    missing = [title for name, title in titles.items() if name not in runs]
    if not missing:
        return "All parts have been measured.\n"
    if len(missing) == len(titles):
        return "No part has been measured on a GPU yet.\n"
    return f"Not measured yet: {'; '.join(missing)}.\n"
