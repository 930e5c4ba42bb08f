"""Owns what a part of papers.py is: a paper's claims, the cells that are measured, its charts."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Record = dict[str, Any]  # of a cell: what it is and what was measured, as JSON has it
Points = Sequence[tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a run measures."""

    quick: bool = False  # small sizes, for a CPU too: it shows that all runs, and no figure
    seed: int = 0
    words: tuple[str, ...] = ()  # cells whose name has one of these; none: all cells
    there: frozenset[str] = frozenset()  # cells that an earlier run has measured

    def chosen(self, cells: Sequence[Record]) -> list[Record]:
        """The cells that are measured."""
        left = (x for x in cells if x["name"] not in self.there)
        return [x for x in left if not self.words or any(w in x["name"] for w in self.words)]


@dataclasses.dataclass(frozen=True)
class Claim:
    """A number that a paper prints, beside which this run's stands.

    `here` takes the records of the part and returns the same number as measured, with its unit;
    None where a cell that it needs is missing.
    """

    text: str  # what is counted or compared
    published: str  # the number, with its unit and its GPU
    where: str  # table or figure
    here: Callable[[Sequence[Record]], str | None]


@dataclasses.dataclass(frozen=True)
class Panel:
    """One panel of a part's chart; `lines`: (x, y) by the name of the line."""

    title: str
    x: str
    y: str
    lines: Mapping[str, Points]
    logarithmic: str = ""  # "x", "y" or "xy"


@dataclasses.dataclass(frozen=True)
class Part:
    """What papers.py knows of a file of paper_parts/.

    `cells` lists what is measured, each a JSON object with a "name"; `measure` takes one of them
    and returns what was found, which the record of the cell is extended by. A result such as "out
    of memory" is part of a record; what `measure` raises is reported as a failure.
    """

    title: str
    paper: str  # authors and number
    seconds: int  # that it takes on an H100, about
    claims: tuple[Claim, ...]
    differs: str  # what is measured otherwise than in the paper or not at all, and why
    cells: Callable[[Settings], Sequence[Record]]
    measure: Callable[[Settings, Record], Record]
    table: Callable[[Sequence[Record]], str]  # in Markdown
    panels: Callable[[Sequence[Record]], Sequence[Panel]]
    page: str = "papers"  # of docs/, whose size has a limit; "papers_training": whole steps


def claims_table(part: Part, records: Sequence[Record] | None) -> str:
    """Writes each claim beside what was measured; None: no run is kept."""
    lines = ["| | the paper | where | here |", "|---|---|---|---|"]
    for claim in part.claims:
        found = None if records is None else claim.here(records)
        row = (claim.text, claim.published, claim.where, found or "not measured yet")
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def find(records: Sequence[Record], **wanted: Any) -> Record | None:
    """Returns the record that has these values, or None."""
    found = (x for x in records if all(x.get(name) == value for name, value in wanted.items()))
    return next(found, None)


def ratio(above: Record | None, below: Record | None, field: str) -> str | None:
    """Writes how many times as much of a field the first record has; None: one is not known."""
    if above is None or below is None or not above.get(field) or not below.get(field):
        return None
    return f"{above[field] / below[field]:.3g} ×"
