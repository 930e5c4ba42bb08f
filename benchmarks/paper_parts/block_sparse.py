"""Time of block-sparse attention over density and length: FlashAttention, Figure 2, Table 20.

Layouts and the check of their results are those of benchmarks/sparse.py.
"""

import functools
import math
import statistics
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import sparse
from common import paper, runs
from common.paper import Claim, Panel, Part, Record, Settings

import jax_flash
from jax_flash import masks

HEAD_DIM = 64
TOKENS, HEADS = 16384, 16  # of the times over density
DENSITY_LENGTHS = (4096, 16384)
LAYOUTS = ("random", "banded", "butterfly")
DENSITIES = (0.05, 0.1, 0.25, 0.5, 0.75, 1.0)
BATCH, TABLE_HEADS = 16, 8  # of Table 20
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
PUBLISHED = {  # ms on an A100, of forward and backward: Table 20
    "dense": (2.29, 7.64, 30.09, 118.5, 470.5, 1876, 7493),
    "block-sparse": (0.88, 1.71, 3.21, 6.56, 12.60, 24.93, 50.39),
}
MAX_STRIDE = sparse.MAX_STRIDE
CALLS = 10  # of a program on a GPU, where calls are short beside what the host takes for one


def cells(settings: Settings) -> list[Record]:
    """Lists the lengths of the times over density, then those of the table."""
    of_density = (512,) if settings.quick else DENSITY_LENGTHS
    of_table = (256, 512) if settings.quick else LENGTHS
    found: list[Record] = [
        {"name": f"density, T {length}", "kind": "density", "length": length}
        for length in of_density
    ]
    return found + [
        {"name": f"butterfly, T {length}", "kind": "butterfly", "length": length}
        for length in of_table
    ]


def measure(settings: Settings, cell: Record) -> Record:
    """Times dense attention and the layouts of a cell in turns, once a layout's result is right."""
    length = cell["length"]
    check(settings.quick)
    blocks = math.ceil(length / sparse.BLOCK)
    chosen: dict[str, np.ndarray | None] = {"dense": None}
    if cell["kind"] == "density":
        batch, heads = (1, 2) if settings.quick else (TOKENS // length, HEADS)
        names = ("random",) if settings.quick else LAYOUTS
        shares = (0.5, 1.0) if settings.quick else DENSITIES
        chosen |= {f"{n} {d:g}": sparse.layout_of(n, blocks, d) for n in names for d in shares}
    else:
        batch, heads = (1, 2) if settings.quick else (BATCH, TABLE_HEADS)
        chosen["butterfly"] = np.asarray(masks.butterfly(blocks))
        chosen["stride"] = np.asarray(masks.butterfly(blocks, max_stride=MAX_STRIDE))
    return {"ways": times(chosen, batch, length, heads, settings)}


def times(
    chosen: dict[str, np.ndarray | None], batch: int, length: int, heads: int, settings: Settings
) -> list[Record]:
    """Times forward and backward by layout: milliseconds, and the share of blocks not empty."""
    dtype = jnp.float16 if jax.default_backend() == "gpu" else jnp.float32
    shape = (batch, length, heads, HEAD_DIM)
    keys = jax.random.split(jax.random.key(settings.seed), 4)
    operands = [jax.random.normal(x, shape, dtype) for x in keys]
    calls_of = CALLS if jax.default_backend() == "gpu" and length <= sparse.LONG else 1

    def several(mask: Any, q: Any, k: Any, v: Any, dout: Any) -> Any:
        results: Any = ()
        for _ in range(calls_of):
            results = sparse.step(mask, q, k, v, dout)
            v = results[-1]  # else XLA would make one of them
        return results

    # Two programs: a layout is data.
    programs: dict[bool, Any] = {}
    calls: dict[str, Any] = {}
    for name, layout in chosen.items():
        mask = None if layout is None else jax_flash.block_mask_of(layout, block=sparse.BLOCK)
        if (mask is None) not in programs:
            programs[mask is None] = jax.jit(several).lower(mask, *operands).compile()
        call = functools.partial(programs[mask is None], mask, *operands)
        calls[name] = (call, jax.block_until_ready)
    long = length > sparse.LONG
    found = runs.time_in_turns(calls, rounds=3 if long else runs.ROUNDS, least=1)
    return [
        {
            "layout": name.split()[0],
            "density": 1.0 if layout is None else round(float(layout.mean()), 5),
            "ms": round(1e3 * statistics.median(found[name]) / calls_of, 4),
        }
        for name, layout in chosen.items()
    ]


@functools.cache
def check(quick: bool) -> None:
    """Compares a layout with the same as a boolean mask, once a run."""
    length, heads = (384, 2) if quick else (1024, 8)
    keys = jax.random.split(jax.random.key(1), 4)
    operands = [jax.random.normal(x, (1, length, heads, HEAD_DIM), jnp.float32) for x in keys]
    layout = sparse.layout_of("random", length // sparse.BLOCK, 0.3)
    mask = jax_flash.block_mask_of(layout, block=sparse.BLOCK)
    dense = jnp.asarray(np.kron(layout, np.ones((sparse.BLOCK, sparse.BLOCK), bool)))

    def plain(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> Any:
        out, pull = jax.vjp(functools.partial(jax_flash.reference.attention, mask=dense), q, k, v)
        return out, *pull(dout)

    wanted = jax.jit(plain)(*operands)
    dtype = jnp.float16 if jax.default_backend() == "gpu" else jnp.float32
    got = jax.jit(sparse.step)(mask, *(x.astype(dtype) for x in operands))
    for own, want in zip(got, wanted, strict=True):
        error = jnp.abs(own.astype(jnp.float32) - want).max() / jnp.abs(want).max()
        if not error < 0.01:
            raise RuntimeError(f"a block mask is off by {error} beside the same as a mask")


def way(records: Sequence[Record], length: int, layout: str) -> Record | None:
    """Finds a time of the table."""
    found = paper.find(records, kind="butterfly", length=length)
    return None if found is None else paper.find(found["ways"], layout=layout)


def faster(length: int) -> Any:
    """Returns how a claim finds how many times as fast as dense the butterflies are."""

    def here(records: Sequence[Record]) -> str | None:
        dense, *others = (way(records, length, x) for x in ("dense", "stride", "butterfly"))
        found = [paper.ratio(dense, x, "ms") for x in others]
        if dense is None or others[0] is None or None in found:
            return None
        text = f"{found[0]} ({dense['ms']:.4g} / {others[0]['ms']:.3g} ms, three blocks a row)"
        return f"{text}; whole butterfly {found[1]}"

    return here


def growth(records: Sequence[Record]) -> str | None:
    """Compares the longest with the shortest: three blocks a row, and dense."""
    found = [
        paper.ratio(way(records, LENGTHS[-1], x), way(records, LENGTHS[0], x), "ms")
        for x in ("stride", "dense")
    ]
    return None if None in found else f"{found[0]} and {found[1]}"


def line(records: Sequence[Record], length: int) -> tuple[float, float] | None:
    """Fits dense's share of time over density: (what no block takes, error of the line)."""
    found = paper.find(records, kind="density", length=length)
    if found is None:
        return None
    (dense,) = (x["ms"] for x in found["ways"] if x["layout"] == "dense")
    points = [(x["density"], x["ms"] / dense) for x in found["ways"] if x["layout"] != "dense"]
    x, y = np.array(points).T
    slope, start = np.polyfit(x, y, 1)
    return float(start), float(np.abs(slope * x + start - y).max())


def proportion(records: Sequence[Record]) -> str | None:
    """Tells how straight time over density is."""
    found = line(records, DENSITY_LENGTHS[0])
    if found is None:
        return None
    start, error = found
    return f"a line from {start:.0%} of dense at no block; no layout is {error:.0%} of dense off"


def table(records: Sequence[Record]) -> str:
    """Writes times over density, then the table."""
    lines = ["| T | layout | density | ms | / (density x dense) |", "|---:|---|---:|---:|---:|"]
    for x in records:
        if x["kind"] == "density":
            dense = x["ways"][0]["ms"]
            lines += [
                f"| {x['length']} | {y['layout']} | {y['density']:.3f} | {y['ms']:.3f} | "
                f"{y['ms'] / dense / y['density']:.2f} |"
                for y in x["ways"]
            ]
    lines += ["", "| T | dense, ms | butterfly (density) | three blocks a row (density) | "]
    lines[-1] += "paper: flash | paper: block-sparse |"
    lines += ["|---:" * 6 + "|"]
    for x in records:
        if x["kind"] == "butterfly":
            dense, *others = x["ways"]
            row = [str(x["length"]), f"{dense['ms']:.3f}"]
            row += [f"{y['ms']:.3f} ({y['density']:.3f})" for y in others]
            for of in PUBLISHED.values():
                known = dict(zip(LENGTHS, of, strict=True))
                row.append(str(known.get(x["length"], "")))
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def panels(records: Sequence[Record]) -> list[Panel]:
    """Draws time over density at each length, then over length."""
    found = []
    for x in records:
        if x["kind"] == "density":
            lines: dict[str, Any] = {}
            for y in x["ways"]:
                if y["layout"] != "dense":
                    lines.setdefault(y["layout"], []).append((y["density"], y["ms"]))
            title = f"forward + backward, T {x['length']}"
            found.append(Panel(title, "share of blocks that are not empty", "ms", lines))
    labels = {"dense": "dense", "butterfly": "butterfly", "stride": "three blocks a row"}
    by_length: dict[str, Any] = {
        f"{label}, here": [
            (x["length"], y["ms"])
            for x in records
            if x["kind"] == "butterfly"
            for y in x["ways"]
            if y["layout"] == name
        ]
        for name, label in labels.items()
    }
    for name, of in PUBLISHED.items():
        by_length[f"{name}, paper (A100)"] = list(zip(LENGTHS, of, strict=True))
    return [*found, Panel("16 rows of 8 heads", "sequence length", "ms", by_length, "xy")]


PART = Part(
    title="Block-sparse attention",
    paper="Dao et al., FlashAttention (arXiv:2205.14135)",
    seconds=55,
    claims=(
        Claim(
            "time is proportional to the share of blocks, forward + backward, T 4096",
            "a line (A100)",
            "Figure 2, right",
            proportion,
        ),
        Claim(
            "butterfly beside dense, forward + backward, T 4096",
            "9.4 × (30.09 / 3.21 ms, A100)",
            "Table 20",
            faster(4096),
        ),
        Claim(
            "butterfly beside dense, forward + backward, T 65536",
            "149 × (7493 / 50.39 ms, A100)",
            "Table 20",
            faster(65536),
        ),
        Claim(
            "time at T 65536 beside T 1024: butterfly and dense",
            "57 × and 3272 × (A100)",
            "Table 20",
            growth,
        ),
    ),
    differs=(
        "float16, heads of 64, blocks of 128; 16 rows of 8 heads for the table, as there. The "
        "density of the paper's butterfly is not printed: its times grow with T, as those of three "
        f"blocks a row do (a butterfly of stride up to {MAX_STRIDE}); a whole butterfly has more."
    ),
    cells=cells,
    measure=measure,
    table=table,
    panels=panels,
)
