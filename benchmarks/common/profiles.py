"""Owns what a profile tells of a program on a GPU: which kernels took how long."""

import collections
import gzip
import json
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

KINDS = {  # the first that a kernel's name has
    "attention": r"flash|fmha|sdpa|cudnn",
    "matrix products": r"gemm|nvjet|cutlass|cublas|xmma",
    "copies": r"memcpy|memset",
}
OTHERS = "the rest"
LISTED = 12  # kernels that are named


def profiled(run: Callable[[], Any], times: int) -> dict[str, Any]:
    """Profiles so many runs: ms of one by kind of kernel, and the longest kernels by name."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(times):
                jax.block_until_ready(run())
        events = []
        for path in Path(folder).rglob("*.trace.json.gz"):
            events += json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return summary(events, times)


def summary(events: Sequence[dict[str, Any]], times: int) -> dict[str, Any]:
    """Sums the kernels of a GPU's streams, in ms of one of so many runs.

    Returns:
      "kinds": ms by kind; "kernels": [name, ms, launches] of the longest; "span": ms from the first
      kernel's begin to the last one's end, of one run, of which what no kernel took is idle.
    """
    named = [x for x in events if x.get("ph") == "M"]
    gpus = {x["pid"] for x in named if x["name"] == "process_name" and "GPU" in x["args"]["name"]}
    streams = {
        (x["pid"], x["tid"])
        for x in named
        if x["name"] == "thread_name" and "Stream" in x["args"]["name"]
    }
    ran = [
        x
        for x in events
        if x.get("ph") == "X" and x["pid"] in gpus and (x["pid"], x["tid"]) in streams
    ]
    spent: collections.Counter[str] = collections.Counter()
    launches: collections.Counter[str] = collections.Counter()
    for x in ran:
        spent[x["name"]] += x["dur"] / 1e3 / times
        launches[x["name"]] += 1
    kinds: collections.Counter[str] = collections.Counter()
    for name, ms in spent.items():
        kinds[kind_of(name)] += ms
    span = max((x["ts"] + x["dur"] for x in ran), default=0) - min(
        (x["ts"] for x in ran), default=0
    )
    return {
        "kinds": {kind: round(ms, 3) for kind, ms in kinds.most_common()},
        "kernels": [
            [name[:120], round(ms, 3), launches[name] // times]
            for name, ms in spent.most_common(LISTED)
        ],
        "span": round(span / 1e3 / times, 3),
    }


def kind_of(name: str) -> str:
    """The kind of a kernel, by its name."""
    found = (kind for kind, words in KINDS.items() if re.search(words, name, re.IGNORECASE))
    return next(found, OTHERS)
