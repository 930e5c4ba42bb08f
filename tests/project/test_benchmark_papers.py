"""The papers' tables: every part runs at a small size, keeps what it has, and fills the page."""

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import papers
import pytest
from common import paper
from figures import papers_page

from .conftest import FOLDER


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    names = ["--output", str(folder), "--commit", "abc"]
    monkeypatch.setattr(sys, "argv", ["papers.py", "--quick", *words, *names])
    papers.main()


def read(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / "cpu" / f"papers-{name}-quick-abc.json").read_text())


@pytest.mark.parametrize("name", papers.parts())
def test_a_part_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    run(tmp_path, monkeypatch, "--part", name)
    part, record = papers.parts()[name], read(tmp_path, name)
    settings = paper.Settings(quick=True)
    assert [x["name"] for x in record["cells"]] == [x["name"] for x in part.cells(settings)]
    assert record["command"] == f"python benchmarks/papers.py --quick --part {name}"
    assert (record["failed"], record["seed"], record["quick"]) == ([], 0, True)
    said = capsys.readouterr().out
    assert all(claim.published in said and claim.where in said for claim in part.claims)
    assert (tmp_path / "cpu" / f"papers-{name}-quick-abc.png").stat().st_size > 10_000
    assert all(claim.here([]) is None for claim in part.claims)


def part_of(measure: Callable[..., dict[str, Any]]) -> paper.Part:
    """Makes a part of three cells."""
    return paper.Part(
        title="Three cells",
        paper="A paper",
        seconds=1,
        claims=(paper.Claim("the last", "2 s (A100)", "Table 1", last),),
        differs="Nothing.",
        cells=lambda settings: [{"name": f"cell {i}", "at": i} for i in range(3)],
        measure=measure,
        table=lambda records: f"{len(records)} cells",
        panels=lambda records: [
            paper.Panel("seconds", "cell", "s", {"a": [(x["at"], x["s"]) for x in records]})
        ],
    )


def last(records: Any) -> str | None:
    found = paper.find(records, at=2)
    return None if found is None else f"{found['s']} s"


def test_a_run_that_is_stopped_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def measure(settings: paper.Settings, cell: dict[str, Any]) -> dict[str, Any]:
        if cell["at"] == 2:
            raise KeyboardInterrupt
        return {"s": 1}

    monkeypatch.setattr(papers, "parts", lambda: {"three": part_of(measure)})
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, monkeypatch)
    stopped = read(tmp_path, "three")
    assert [x["at"] for x in stopped["cells"]] == [0, 1]
    # A cell that is missing ahead of others, and a run that is stopped again: those are kept.
    path = tmp_path / "cpu" / "papers-three-quick-abc.json"
    path.write_text(json.dumps(stopped | {"cells": stopped["cells"][1:], "seconds": 50}))
    left = []

    def go_on(settings: paper.Settings, cell: dict[str, Any]) -> dict[str, Any]:
        left.append([x["at"] for x in settings.chosen(part_of(measure).cells(settings))])
        return {"s": 2} if cell["at"] == 0 else measure(settings, cell)

    monkeypatch.setattr(papers, "parts", lambda: {"three": part_of(go_on)})
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, monkeypatch, "--resume")
    assert left == [[0, 2]] * 2
    assert [x["s"] for x in read(tmp_path, "three")["cells"]] == [2, 1]
    monkeypatch.setattr(papers, "parts", lambda: {"three": part_of(lambda *_: {"s": 3})})
    run(tmp_path, monkeypatch, "--resume")
    assert [x["s"] for x in read(tmp_path, "three")["cells"]] == [2, 1, 3]
    assert read(tmp_path, "three")["seconds"] >= 50
    path.write_text(json.dumps(stopped | {"commit": "fed"}))
    run(tmp_path, monkeypatch, "--resume")
    assert [x.get("commit") for x in read(tmp_path, "three")["cells"]] == ["fed", "fed", None]
    assert "Measured at fed: cell 0; cell 1." in path.with_suffix(".md").read_text()
    with pytest.raises(SystemExit, match="is of seed 0, not 1"):
        run(tmp_path, monkeypatch, "--resume", "--seed", "1")


def test_cells_are_chosen_by_words_of_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(papers, "parts", lambda: {"three": part_of(lambda *_: {"s": 1})})
    run(tmp_path, monkeypatch, "--cells", "cell 2", "ll 0")
    (path,) = (tmp_path / "cpu").glob("*.json")
    record = json.loads(path.read_text())
    assert path.stem == "papers-three-quick-cells-abc"
    assert [x["at"] for x in record["cells"]] == [0, 2]
    assert record["chosen"] == ["cell 2", "ll 0"]


def test_a_cell_that_fails_is_told_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def measure(settings: paper.Settings, cell: dict[str, Any]) -> dict[str, Any]:
        if cell["at"] == 1:
            raise ValueError("no such cell")
        return {"s": 3}

    monkeypatch.setattr(papers, "parts", lambda: {"three": part_of(measure)})
    with pytest.raises(SystemExit, match="three, cell 1: ValueError: no such cell"):
        run(tmp_path, monkeypatch)
    record = read(tmp_path, "three")
    assert [x["at"] for x in record["cells"]] == [0, 2]
    assert record["failed"] == ["three, cell 1: ValueError: no such cell"]
    said = (tmp_path / "cpu" / "papers-three-quick-abc.md").read_text()
    assert "| the last | 2 s (A100) | Table 1 | 3 s |" in said


def test_the_page_is_of_the_results():
    """If not: python benchmarks figures."""
    assert {part.page for part in papers.parts().values()} == {x.stem for x in papers_page.PAGES}
    for path in papers_page.PAGES:
        page = path.read_text()
        assert page == papers_page.fill(path.stem, page, papers_page.runs_of())
    for name in papers_page.runs_of():
        for theme in papers_page.THEMES:
            assert (FOLDER.parent / "docs" / "figures" / f"papers-{name}-{theme}.svg").is_file()


def test_the_page_has_the_newest_run_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    part = part_of(lambda settings, cell: {})
    others = {"three": part, "none": dataclasses.replace(part, title="Never run")}
    monkeypatch.setattr(papers, "parts", lambda: others)
    about = {"part": "three", "quick": False, "chosen": [], "seed": 0, "seconds": 2.5, "failed": []}
    about |= {"versions": {"jax": "1.0"}}

    def write(folder: str, date: str, seconds: int, **more: Any) -> None:
        cells = [{"name": f"c{at}", "at": at, "s": seconds} for at in range(3)]
        cells[1]["commit"] = "abc"
        to = tmp_path / folder / f"papers-three-{date}.json"
        to.parent.mkdir(exist_ok=True)
        run = about | {"gpu": folder, "date": date, "cells": cells} | more
        to.write_text(json.dumps(run))

    write("nvidia-h100", "2030-01-01", 4)
    write("nvidia-h200", "2030-01-02", 5)
    write("nvidia-h200", "2030-01-03", 6, quick=True)
    write("nvidia-h200", "2030-01-04", 8, chosen=["c"])
    write("cpu", "2030-01-05", 7)
    runs = papers_page.runs_of(tmp_path)
    page = papers_page.fill("papers", f"{papers_page.BEGIN}old\n{papers_page.END}", runs)
    assert "Not measured yet: Never run." in page
    assert "| the last | 2 s (A100) | Table 1 | 5 s |" in page
    assert "| the last | 2 s (A100) | Table 1 | not measured yet |" in page
    assert "nvidia-h200, 2030-01-02, jax 1.0, seed 0, 2 s" in page
    assert "Measured at another commit: c1." in page
    assert "old" not in page
    papers_page.draw(runs, tmp_path)
    assert "Three cells, nvidia-h200" in (tmp_path / "papers-three-dark.svg").read_text()
