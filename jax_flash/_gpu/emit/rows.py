"""Owns what a query decides of a function beside its head: kernels compute it once for a row.

Its factor is the last multiplication of the value, which the exponential has for nothing.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from jax_flash._gpu.emit.scalars import Line, words
from jax_flash._gpu.emit.scale import PRODUCT, decided_by

_MOST_HELD = 2  # numbers of a row beside its factor, which kernels keep from block to block
_MOST_COLUMNS = 2  # arrays of which a block's elements are held
_ALONG_KEYS = re.compile(r"element_along\((.+), key, (\d+, \d+)\)")
_COSTLY = re.compile(r"[a-z_]\w*\(| / ")


@dataclasses.dataclass(frozen=True)
class Rows:
    """The lines of a query, what others read of them, its factor if it has one, and the others.

    The value is without the factor.
    """

    lines: tuple[Line, ...] = ()
    held: tuple[Line, ...] = ()
    factor: str = ""
    others: tuple[Line, ...] = ()
    value: str = ""


def part_rows(lines: Sequence[Line], value: str) -> Rows:
    """Parts lines, none of which is of the head alone."""
    kept, value, factor = _take_factor(list(lines), value)
    costly: set[str] = set()
    for line in kept:
        costs_much = _COSTLY.search(line.text) or not costly.isdisjoint(words(line.text))
        if decided_by(kept, line.text) == {"query"} and costs_much:
            costly.add(line.name)
    others = _needed([x for x in kept if x.name not in costly], [value])
    read = words(value, *(x.text for x in others))
    held = [x for x in kept if x.name in costly & read]
    if len(held) > _MOST_HELD:
        held, others = [], _needed(kept, [value])
    rows = _needed(kept, [factor, *(x.name for x in held)])
    return Rows(tuple(rows), tuple(held), factor, tuple(others), value)


def _take_factor(lines: list[Line], value: str) -> tuple[list[Line], str, str]:
    factors: list[str] = []
    while (line := next((x for x in lines if x.name == value), None)) is not None:
        found = PRODUCT.fullmatch(line.text)
        if not found or "score" not in decided_by(lines, value):
            break
        inner = [x for x in found.groups() if "score" in decided_by(lines, x)]
        factor = [x for x in found.groups() if decided_by(lines, x) <= {"query"}]
        if len(inner) != 1 or len(factor) != 1:
            break
        value = inner[0]
        factors += factor
    text = factors[0] if factors else ""
    for factor in factors[1:]:
        text = f"__fmul_rn({factor}, {text})"
    return lines, value, text


def hold_columns(lines: Sequence[Line]) -> tuple[list[Line], list[tuple[str, str, str]]]:
    """Numbers arrays that are read along keys, from rows of the head: their types and arguments."""
    kept, held = [], []
    import os
    if os.environ.get("JF_NOHOLD"):
        return list(lines), []
    for line in lines:
        found = _ALONG_KEYS.fullmatch(line.text)
        if found and len(held) < _MOST_COLUMNS and not decided_by(lines, found[1]):
            text = f"element_along({found[1]}, key, {found[2]}, Nth<{len(held)}>())"
            line = dataclasses.replace(line, text=text)
            held.append((line.kind, found[1], found[2]))
        kept.append(line)
    return kept, held


def _needed(lines: Sequence[Line], results: Sequence[str]) -> list[Line]:
    needed, kept = words(*results), []
    for line in reversed(lines):
        if line.name in needed:
            needed |= words(line.text)
            kept.insert(0, line)
    return kept
