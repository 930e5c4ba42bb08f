"""Owns where the scale of the scores goes in a function's text: `product` is the score without it.

A score that is read once is not multiplied by itself. Where it is added to, its scale is a fused
multiplication. Where it is multiplied, the scale and all factors that the head or the query decides
are one, computed once for a row of scores: each product is rounded, as in the function, in another
order. A value that decides a step, as a floor does, is computed as it is written.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from jax_flash._gpu.emit.scalars import Line, words

SCALE = Line("float", "scale", "kAddsToScores ? 1.0f : p.scale")
_SCORE = Line("float", "score", "__fmul_rn(product, scale)")
_LARGEST = 64.0  # of a number that is added: scores are rounded to be seen beside a larger one
PRODUCT = re.compile(r"__fmul_rn\((\S+), (\S+)\)")


def scale_scores(lines: Sequence[Line], results: Sequence[str], sharp: set[str]) -> list[Line]:
    """Writes lines of the score as lines of the product; `sharp`: names that decide a step."""
    uses = [i for i, line in enumerate(lines) if "score" in words(line.text)]
    if len(uses) == 1 and "score" not in results and lines[uses[0]].name not in sharp:
        use = lines[uses[0]]
        if (text := _added(use.text)) is not None:
            return _replaced(lines, {uses[0]: [dataclasses.replace(use, text=text)]})
        if (made := _multiplied(lines, uses[0], results, sharp)) is not None:
            return made
    return [_SCORE, *lines] if uses or "score" in results else list(lines)


def _replaced(lines: Sequence[Line], by: dict[int, list[Line]]) -> list[Line]:
    return [new for i, line in enumerate(lines) for new in by.get(i, [line])]


def _added(text: str) -> str | None:
    """Writes score + x, or a difference, as a fused multiplication."""
    if found := re.fullmatch(r"score ([+-]) (\S+)", text):
        sign, other, product = found[1].replace("+", ""), found[2], "product"
    elif found := re.fullmatch(r"(\S+) ([+-]) score", text):
        sign, other, product = "", found[1], f"{found[2].replace('+', '')}product"
    else:
        return None
    number = re.fullmatch(r"\(?(-?[\d.e+-]+)f\)?", other)
    if other == "score" or (number and abs(float(number[1])) > _LARGEST):
        return None
    return f"fmaf({product}, scale, {sign}{other})"


def _multiplied(
    lines: Sequence[Line], first: int, results: Sequence[str], sharp: set[str]
) -> list[Line] | None:
    """Writes score * x * y ... with one factor of the scale and of what a row decides."""
    chain, factors, name = [], [], "score"
    for i, line in enumerate(lines):
        found = PRODUCT.fullmatch(line.text)
        if i < first or name not in words(line.text):
            continue
        uses = sum(words(x.text).issuperset({name}) for x in lines)
        if not found or found[1] == found[2] or uses > 1 or name in results or line.name in sharp:
            break
        chain.append(i)
        factors.append(found[2] if found[1] == name else found[1])
        name = line.name
    if not chain:
        return None
    of_rows = [x for x in factors if decided_by(lines, x) <= {"query"}]
    of_rows.sort(key=lambda x: len(decided_by(lines, x)))  # the head's first
    text, added = "scale", []
    for n, factor in enumerate(of_rows):
        added.append(Line("float", f"factor{n}", f"__fmul_rn({text}, {factor})", "mul"))
        text = added[-1].name
    inner = "product"
    for n, factor in enumerate(x for x in factors if x not in of_rows):
        added.append(Line("float", f"scaled{n}", f"__fmul_rn({inner}, {factor})", "mul"))
        inner = added[-1].name
    last = dataclasses.replace(lines[chain[-1]], text=f"__fmul_rn({inner}, {text})")
    gone: dict[int, list[Line]] = {i: [] for i in chain[:-1]}
    return _replaced(lines, gone | {chain[-1]: [*added, last]})


def decided_by(lines: Sequence[Line], *texts: str) -> set[str]:
    """Lists which of score, query and key decide texts."""
    of: dict[str, set[str]] = {x: {x} for x in ("score", "query", "key")} | {"product": {"score"}}
    for line in lines:
        of[line.name] = set().union(*(of.get(x, set()) for x in words(line.text)))
    return set().union(*(of.get(x, set()) for x in words(*texts)))
