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

    def define(self, kind: str, name: str, opened: Sequence[str], qualifiers: str) -> str:
        """Writes what a query decides, from what its head does: `kind`, opened by `opened`."""
        made = kind.replace("OfHead", "OfQuery")
        names = ", ".join(x.name for x in self.held)
        lines = [*(opened if self.lines or self.factor else ())]
        lines += [x.explained for x in self.lines]
        varies = "query" in decided_by(self.lines, self.factor)
        members = [f"{x.kind} {x.name};" for x in self.held]
        return (
            f"struct {made}Held {{\n{_indented(members)}}};\nstruct {made} {{\n"
            f"  static constexpr bool kHasFactor = {'true' if self.factor else 'false'};\n"
            f"  static constexpr bool kFactorVaries = {'true' if varies else 'false'};\n"
            f"  float factor;\n  {made}Held held;\n}};\n"
            f"template <class Query>\n{qualifiers} {made} {name}_of_query("
            f"const {kind}& of, const Query& query) {{\n{_indented(lines)}"
            f"  return {{{self.factor or '1.0f'}, {{{names}}}}};\n}}\n"
        )


def structured(lines: Sequence[Line], of: str) -> list[str]:
    """Writes what gives members of a struct their names."""
    names = ", ".join(x.name for x in lines)
    return [f"const auto& [{names}] = {of};"] if lines else []


def _indented(lines: Sequence[str]) -> str:
    return "".join(f"  {line}\n" for line in lines)


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
    whole, factors = value, list[str]()
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
    if not any("query" in decided_by(lines, x) for x in factors):  # the head's: 24 bytes spilled
        return lines, whole, ""
    text = factors[0]
    for factor in factors[1:]:
        text = f"__fmul_rn({factor}, {text})"
    return lines, value, text


def _needed(lines: Sequence[Line], results: Sequence[str]) -> list[Line]:
    needed, kept = words(*results), []
    for line in reversed(lines):
        if line.name in needed:
            needed |= words(line.text)
            kept.insert(0, line)
    return kept
