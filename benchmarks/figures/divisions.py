"""Draws how work is divided: decoding's blocks over thread blocks, a causal ring over devices.

`drawings` lists both with the others. Read next: `canvas`, which owns the SVG.
"""

from collections.abc import Sequence

import jax
import numpy as np

from jax_flash import _explain, _gpu
from jax_flash._ops.decode import Decode
from jax_flash._problem import Shapes
from jax_flash.context_parallel.orders import Layout
from jax_flash.context_parallel.reach import Reach

from .canvas import BLUE, PALE, PARTS, Canvas

# ---- decoding ------------------------------------------------------------------------------------


def line_of_blocks(lengths: Sequence[int], block: int, parts: int) -> list[tuple[int, int, int]]:
    """Lists (row, block of it, part) of all blocks, as decode_schedule.cuh cuts the line."""
    line = [(row, i) for row, n in enumerate(lengths) for i in range(-(-n // block))]
    ends = [len(line) * (part + 1) // parts for part in range(parts)]
    return [(row, i, int(np.searchsorted(ends, at, "right"))) for at, (row, i) in enumerate(line)]


def decode(theme: str) -> Canvas:
    """The blocks of all rows in one line, cut into equal parts."""
    x = jax.ShapeDtypeStruct((5, 1, 32, 128), "bfloat16")
    cache = jax.ShapeDtypeStruct((5, 4096, 16, 128), "bfloat16")
    problem, *_ = _explain._prepare(x, cache, cache)
    gpu = _gpu.spec.named("H200")
    assert gpu is not None
    tile = _gpu.plan(Decode(problem, None), Shapes.of(x, cache, cache, {}), gpu).tiling
    assert tile.cluster == 1  # its rows and heads are too many for clusters
    lengths, parts = (900, 3000, 130, 1700, 520), 8
    found = line_of_blocks(lengths, tile.block_kv, parts)
    cell = 7
    c = Canvas("Decoding: equal parts of one line of all rows' blocks", 780, 326, theme)
    c.text(20, 18, "The caches of five rows, as long as they are", bold=True)
    c.text(
        20, 36, f"blocks of {tile.block_kv} positions; the colour is the part", fill="weak", size=11
    )
    for row, n in enumerate(lengths):
        c.text(20, 62 + 22 * row, f"{n} positions", fill="weak", size=11)
    for row, i, part in found:
        c.rect(110 + cell * i, 50 + 22 * row, cell - 1, 16, PARTS[part])
    for row in range(len(lengths)):
        owners = sorted({part for r, _, part in found if r == row})
        last = max(i for r, i, _ in found if r == row)
        words = "its CTA writes it" if len(owners) == 1 else f"{len(owners)} CTAs, merged by lse"
        c.text(110 + cell * (last + 1) + 10, 62 + 22 * row, words, size=11)
    top = 190
    c.text(20, top, "The same blocks in one line (stream-K)", bold=True)
    for at, (_, _, part) in enumerate(found):
        c.rect(20 + cell * at, top + 12, cell - 1, 24, PARTS[part])
    starts = np.cumsum([0, *(-(-n // tile.block_kv) for n in lengths)])
    for row, at in enumerate(starts[:-1]):
        c.line(20 + cell * at - 0.5, top + 6, 20 + cell * at - 0.5, top + 42, color="text")
        c.text(20 + cell * at + 3, top + 52 + row % 2 * 14, f"row {row}", fill="weak", size=11)
    c.text(
        20,
        top + 94,
        "Each part is one CTA's: as many blocks for each, whatever the lengths",
        bold=True,
    )
    x = 20.0
    for part in range(parts):
        size = sum(p == part for _, _, p in found)
        c.box(x, top + 104, cell * size - 2, 24, PARTS[part], f"{size} blocks")
        x += cell * size + 6
    return c


# ---- a ring --------------------------------------------------------------------------------------


def ring_steps(n: int, order: str) -> list[tuple[str, list[tuple[int, list[list[str]]]]]]:
    """Lists the steps of a causal ring: what arrives, and for each device whose keys and what of
    their halves is computed: "own", "whole" or "none", by halves of queries and keys."""
    size = 2
    reach = Reach(Layout(order, n), size, size, (None, 0), 0)
    up, down = reach.hops()
    arrivals = [("device r's own keys", 0)]
    for hop in range(1, max(up, down) + 1):
        arrivals += [(f"keys of device r − {hop}", hop)] if hop <= up else []
        arrivals += [(f"keys of device r + {hop}", -hop)] if hop <= down else []
    steps = []
    for words, distance in arrivals:
        devices = []
        for rank in range(n):
            source = (rank - distance) % n
            halves = [["none", "none"], ["none", "none"]]
            if distance == 0:
                halves = [["own", "none"], ["whole", "own"]]
            elif chosen := int(reach.choose(rank, source)):
                queries, keys = reach.pieces[chosen - 1]
                for q in range(size)[queries]:
                    for k in range(size)[keys]:
                        halves[q][k] = "whole"
            devices.append((source, halves))
        steps.append((words, devices))
    return steps


def ring(theme: str) -> Canvas:
    """Four devices in order "zigzag": who holds what, and what each step computes."""
    n = 4
    steps = ring_steps(n, "zigzag")
    layout = Layout("zigzag", n)
    c = Canvas(
        "A ring of four devices: what each holds, and computes in each step", 780, 376, theme
    )
    c.text(20, 18, "Eight chunks of a sequence, two on each device (zigzag)", bold=True)
    chunk, owners = 92, {}
    for rank in range(n):
        for first, _ in layout.runs(rank, 2):
            owners[first] = rank
    for i in range(2 * n):
        c.box(20 + chunk * i, 28, chunk - 3, 24, PARTS[owners[i]], f"chunk {i}")
    c.text(20, 84, "Keys and values travel both ways; queries stay", bold=True)
    left, wide, cell = 150, 158, 30
    for rank in range(n):
        x = left + wide * rank
        c.box(x, 96, 116, 24, PARTS[rank], f"device {rank}")
        if rank < n - 1:
            c.arrow(x + 119, 104, x + wide - 3, 104)
            c.arrow(x + wide - 3, 112, x + 119, 112)
    c.text(left + wide * n - 34, 112, "↔ 0", fill="weak")
    for s, (words, devices) in enumerate(steps):
        y = 138 + 54 * s
        c.text(20, y + 22, f"step {s}", bold=True)
        c.text(20, y + 38, words, fill="weak", size=11)
        for rank, (source, halves) in enumerate(devices):
            x = left + wide * rank
            for q in (0, 1):
                for k in (0, 1):
                    fill = {"own": PALE, "whole": BLUE, "none": "none"}[halves[q][k]]
                    c.rect(x + cell * k, y + 22 * q, cell - 2, 20, fill)
            held = [str(first) for first, _ in layout.runs(source, 2)]
            c.text(x + 2 * cell + 8, y + 18, "chunks", fill="weak", size=11)
            c.text(x + 2 * cell + 8, y + 33, " and ".join(held), size=11)
    c.legend(
        20,
        366,
        [
            (PALE, "on the diagonal"),
            (BLUE, "visible as a whole: no mask"),
            ("none", "later keys: not computed"),
        ],
    )
    return c
