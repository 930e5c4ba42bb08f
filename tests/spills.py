"""Asks ptxas which candidates of tilings it spills, and writes jax_flash/_gpu/spills_table.py.

    python -m tests.spills              # -j 8; --candidate SUBSTRING; no GPU

Each candidate is compiled for problems with more and more traits, from none: a set with which it
spills is not grown, so the table has the smallest. Where a schedule does not ask of a candidate,
since another is faster there, nothing is compiled. Some 350 programs of 2 to 4 s of a core.

What was compiled is kept (--answers): a second run goes on where the first one ended, and compiles
what another text of kernels, a plan or an NVRTC made different. JAX_FLASH_NVRTC names another
NVRTC: its answers stand beside those of the first, and a candidate is out where one of them spills.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import hashlib
import json
import re
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

from jax_flash import _explain, _gpu, _native
from jax_flash._gpu import spills, spills_table
from jax_flash._gpu.sm90 import forward_rows
from jax_flash._gpu.spills_table import SPILLED
from jax_flash._ops import passes
from jax_flash._problem import TERMS, BlockMaskShape, Problem, Shapes, TermShape

Traits = frozenset[str]
Table = dict[str, tuple[str, ...]]

H200 = _gpu.spec.GPUS["H200"]
TABLE = Path(spills_table.__file__)
_PLANE = TermShape("bfloat16", batch=1, heads=16, queries=4096, keys=4096)
_BLOCKS = ("block_numbers", "block_bits")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """What a candidate is tried with.

    Attributes:
      which: the pass.
      traits: those that schedules leave to the table.
      problem, shapes: changes of the plain call, without which schedules do not ask of it.
      most: traits of a set; larger ones are taken to fit if their parts do.
    """

    which: str
    traits: str
    problem: dict[str, Any] = dataclasses.field(default_factory=dict)
    shapes: dict[str, Any] = dataclasses.field(default_factory=dict)
    most: int = 99


_NARROW = {"head_dim": 64, "value_dim": 64}
_THREE = Candidate(
    "forward",
    "query_lengths key_value_lengths query_segments sinks mask plane_of_bias softcap left right "
    "float16 blocks_of_128 blocks_of_32",
    shapes=_NARROW,
    most=4,
)
CANDIDATES = {
    forward_rows.TWO_TEAMS: Candidate(
        "forward",
        "left right float16 negative_scale narrow_values blocks_of_128 blocks_of_32 blocks_of_16",
        problem={"whole_blocks": True},
        shapes={**_NARROW, "batch": 8, "q_len": 520, "kv_len": 520},
    ),
    forward_rows.THREE: _THREE,
    forward_rows.THREE_HIDE: dataclasses.replace(
        _THREE,
        traits="query_lengths key_value_lengths query_segments sinks plane_of_bias softcap left "
        "right float16",
    ),
    forward_rows.THREE_DRAIN: _THREE,
    forward_rows.THREE_WIDE: Candidate(
        "forward",
        "query_lengths key_value_lengths query_segments sinks left right float16",
        shapes={"batch": 4, "q_len": 8192, "kv_len": 8192},
    ),
}

# Traits that are more than a term of their name: changes of Problem and of Shapes.
_CHANGES: dict[str, dict[str, Any]] = {
    "query_segments": {"terms": ("query_segments", "key_value_segments")},
    "query_positions": {"terms": ("query_positions", "key_value_positions")},
    "mask": {"terms": ("mask",), "mask": dataclasses.replace(_PLANE, dtype="bool")},
    "bias": {"terms": ("bias",), "bias": dataclasses.replace(_PLANE, queries=1)},
    "plane_of_bias": {"terms": ("bias",), "bias": _PLANE},
    "dropout_state": {"terms": ("dropout_state",), "dropout_rate": 0.1},
    "softcap": {"softcap": 30.0},
    "left": {"window": (1024, None)},
    "right": {"window": (None, 0)},
    "float16": {"dtype": "float16"},
    "negative_scale": {"scale": -0.125},
    "narrow_values": {"value_dim": 16},
}
_CHANGES |= {
    f"blocks_of_{keys}": {"terms": _BLOCKS, "block_mask": BlockMaskShape(1, 16, block)}
    for keys, block in ((128, 128), (32, 64), (16, 16))
}
_ONE_OF = ({"bias", "plane_of_bias"}, {x for x in _CHANGES if x.startswith("blocks")})


def call_with(traits: Collection[str], candidate: Candidate) -> tuple[Problem, Shapes]:
    """A candidate's plain call with these traits."""
    change: dict[str, Any] = {**candidate.problem, **candidate.shapes}
    terms: set[str] = set()
    window: tuple[Any, Any] = (None, None)
    for trait in traits:
        of = dict(_CHANGES.get(trait, {"terms": (trait,)}))
        terms |= {*of.pop("terms", ())}
        left, right = of.pop("window", (None, None))
        window = (window[0] if left is None else left, window[1] if right is None else right)
        change |= of
    change |= {"terms": tuple(x for x in TERMS if x in terms), "window": window}
    shapes = Shapes(2, 4096, 4096, 16, 16, 128, 128)
    problem = Problem(dtype="bfloat16", scale=0.125)
    sizes = {x.name for x in dataclasses.fields(Shapes)} & {*change}
    of_shapes = {name: change.pop(name) for name in sizes}
    problem = dataclasses.replace(problem, **change)
    if "bias" in of_shapes:
        of_shapes["bias"] = dataclasses.replace(of_shapes["bias"], dtype=problem.dtype)
    return problem, dataclasses.replace(shapes, **of_shapes)


class _Trying(dict[str, tuple[str, ...]]):
    """A table in which a candidate never spills."""

    def __init__(self, name: str, table: Table) -> None:
        super().__init__(table, **{name: ()})
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> tuple[str, ...]:
        self.asked.add(name)
        return super().__getitem__(name)


def plan_of(name: str, traits: Collection[str], table: Table = SPILLED) -> _gpu.Plan | None:
    """A candidate's plan for a call with these traits; None where no schedule asks of it."""
    candidate = CANDIDATES[name]
    problem, shapes = call_with(traits, candidate)
    with mock.patch.object(spills, "SPILLED", _Trying(name, table)) as trying:
        plan = _gpu.plan(passes(problem)[candidate.which], shapes, H200)
    return dataclasses.replace(plan, beside="") if name in trying.asked else None


def larger(fitting: Collection[Traits], traits: Collection[str]) -> list[Traits]:
    """Sets of one trait more, all of whose parts fit."""
    grown = {found | {trait} for found in fitting for trait in traits if trait not in found}
    grown = {x for x in grown if not any(len(x & few) > 1 for few in _ONE_OF)}
    fits = {*fitting}
    return sorted((x for x in grown if all(x - {trait} in fits for trait in x)), key=sorted)


class Answers:
    """Bytes that programs spill, by what they are compiled from, kept in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = "\n".join(text for _, text in sorted(_native.kernel_sources().items()))
        self.sources = re.sub(r"\s*//.*", "", lines)  # comments compile to nothing
        self.nvrtc = nvrtc_version()
        self.of: dict[str, dict[str, int]] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            key, nvrtc, bytes_ = json.loads(line)
            self.of.setdefault(key, {})[nvrtc] = bytes_
        self.used: set[str] = set()

    def ask(self, plan: _gpu.Plan) -> int:
        text = json.dumps([plan.program, self.sources])
        key = hashlib.sha256(text.encode()).hexdigest()[:16]
        found = self.of.setdefault(key, {})
        if not any(found.values()) and self.nvrtc not in found:
            report = _explain.compile_plan(plan)
            assert report.error is None, report.error
            found[self.nvrtc] = max(entry.spill_bytes for entry in report.entries)
            with self.path.open("a") as file:
                file.write(json.dumps([key, self.nvrtc, found[self.nvrtc]]) + "\n")
        self.used |= {*found}
        return max(found.values())


def nvrtc_version() -> str:
    path, error = _native._find_nvrtc()
    assert not error, error
    major, minor = ctypes.c_int(), ctypes.c_int()
    ctypes.CDLL(path).nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def spilled(name: str, table: Table, answers: Answers, jobs: int) -> Iterator[Traits]:
    """The smallest sets of traits with which a candidate spills."""
    candidate = CANDIDATES[name]
    found: list[Traits] = [frozenset()]
    with ThreadPoolExecutor(jobs) as pool:
        for size in range(candidate.most + 1):
            plans = [plan_of(name, traits, table) for traits in found]
            bytes_ = list(pool.map(lambda x: 0 if x is None else answers.ask(x), plans))
            fitting = [traits for traits, count in zip(found, bytes_, strict=True) if not count]
            print(f"{name}: {len(found)} sets of {size}, {len(fitting)} fit", flush=True)
            yield from (x for x, count in zip(found, bytes_, strict=True) if count)
            found = larger(fitting, candidate.traits.split())
            if not found:
                return


def text_of(table: Table, versions: Collection[str]) -> str:
    """The module spills_table.py."""
    lines = [
        '"""What ptxas spills: written by `python -m tests.spills`, read by spills.py."""',
        "",
        "# The versions of NVRTC that were asked: what one of them spills is out.",
        f"NVRTC = ({', '.join(map(json.dumps, sorted(versions)))},)",
        "",
        "# Candidate -> sets of traits: it spills for a problem that has all traits of one.",
        "SPILLED: dict[str, tuple[str, ...]] = {",
    ]
    for name, sets in table.items():
        row = [f"    {json.dumps(name)}: (", *(f"        {json.dumps(x)}," for x in sets), "    ),"]
        one = ", ".join(f"{json.dumps(x)}," for x in sets)
        lines += row if len(sets) > 1 else [f"    {json.dumps(name)}: ({one}),"]
    return "\n".join([*lines, "}", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description="Asks ptxas what it spills.")
    parser.add_argument("-j", "--jobs", type=int, default=1)
    parser.add_argument("--candidate", default="", help="those whose name has this")
    parser.add_argument("--answers", type=Path, default=Path("build/spills.jsonl"))
    given = parser.parse_args()
    given.answers.parent.mkdir(parents=True, exist_ok=True)
    _native.configure_cuda(None, 0)  # the answers are kept, no programs
    answers = Answers(given.answers)
    table = {name: SPILLED.get(name, ()) for name in CANDIDATES}
    for name in CANDIDATES:
        if given.candidate in name:
            sets = spilled(name, table, answers, given.jobs)
            table[name] = tuple(" ".join(sorted(x)) for x in sets)
            others = spills_table.NVRTC if given.candidate else ()
            TABLE.write_text(text_of(table, answers.used.union(others)))


if __name__ == "__main__":
    main()
