"""Owns how long a function's text is, and so how kernels have it: compiling takes its time by that.

Instructions of one element on Hopper, of NVRTC 12.9. A kernel has the scores of 64 elements a
thread, at two to four places: an instruction that is written out for each takes 0.06 s of a
compiler's time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from jax_flash._gpu.emit.scalars import Line, words

# A long function of scores calls one copy of each of these.
HEAVY = {
    **dict.fromkeys(("sinf", "cosf", "tanf"), 112),  # half of it for arguments beyond 2^17
    "powf": 80,
    "fmodf": 72,
    "atan2f": 48,
    "asinhf": 40,
    "acoshf": 40,
    "erfcf": 40,
    "log1pf": 32,
    "atanhf": 32,
}
# Division of floats has a rare case, which costs a compiler more than its instructions.
_BY_NUMBER, _RECIPROCAL, _DIVISION = 8, 32, 56
_CALL, _LINE = 12, 2
_POWERS = tuple(f"{2**i}u)" for i in range(32))  # of unsigned integers: a line's own
_OTHERS = {
    **dict.fromkeys(("logf", "acosf", "sinhf", "branchless_tanh"), 24),
    "sqrtf": _RECIPROCAL,
    **dict.fromkeys(("expm1f", "cbrtf", "asinf", "atanf", "erff"), 16),
    **dict.fromkeys(("quick_log", "quick_log1p"), 12),
    **dict.fromkeys(("expf", "coshf", "divided"), 8),
    **dict.fromkeys(("quotient", "quick_exp", "exp2_approx", "sqrt_approx"), 2),
}

WRITTEN_OUT = 48  # up to so many for each element: 3 s
WRITTEN_OUT_WITH_SLOPE = 72  # there are fewer places in the backward pass: 2.5 s
LOOPED = 256  # up to so many for four elements at a time, which wait for each other's results
MOST = 8000  # up to so many in a function that is called: 3 s, forward or backward


def count(lines: Iterable[Line], calls_heavy: bool = False) -> int:
    """Estimates the instructions of lines, for which heavy functions are called or written out."""
    return sum(_count(line, calls_heavy) for line in lines)


def count_shared(lines: Iterable[Line]) -> int:
    """Estimates those of an element of a fragment, which share what a query or a key decides.

    A thread has 2 rows and 32 columns of 64 elements.
    """
    of: dict[str, set[str]] = {x: {x} for x in ("score", "query", "key")}
    total = 0.0
    for line in lines:
        of[line.name] = set().union(*(of.get(x, set()) for x in words(line.text)))
        here = of[line.name]
        share = 1 / 32 if here == {"query"} else 1 / 2 if here == {"key"} else 1
        total += share * _count(line, False)
    return round(total)


def _count(line: Line, calls_heavy: bool) -> int:
    total = _LINE
    for of, by in re.findall(r"(\S+) [/%] (\S+)", line.text):
        if by.startswith(_POWERS):
            continue
        total += _BY_NUMBER if by[0].isdigit() else _RECIPROCAL if of == "1.0f" else _DIVISION
    for name in re.findall(r"(\w+)\(", line.text):
        heavy = HEAVY.get(name, 0)
        total += _CALL if heavy and calls_heavy else heavy or _OTHERS.get(name, 0)
    return total
