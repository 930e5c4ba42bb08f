"""Draws the documentation's schedules, light and dark, from the plans and rules that kernels have.

`draw` gives one as SVG, those of `divisions` among them. Widths of products are cycles of one of
Hopper's multiprocessors; nothing here was measured. Read next: `divisions`, how work is divided.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import jax_flash
from jax_flash import _explain, _gpu, masks
from jax_flash._ops import passes
from jax_flash._problem import Shapes

from .canvas import BLUE, GREEN, GREY, ORANGE, PALE, PARTS, VIOLET, Canvas
from .divisions import decode, ring

# What one multiprocessor of an H100 does in a cycle.
MULTIPLY_ADDS = 2048  # 16-bit, of its tensor cores
EXPONENTIALS = 16
BYTES = 64  # from L2
_MODEL = (
    f"A model: {MULTIPLY_ADDS} multiply-adds, {EXPONENTIALS} exponentials and {BYTES} bytes "
    "a cycle, all else free."
)


# ---- which blocks --------------------------------------------------------------------------------


def blocks(theme: str) -> Canvas:
    """What `jax_flash.block_mask` finds of four masks."""
    length, cell = 1024, 22
    ids = np.repeat([0, 1, 2], [300, 468, 256])
    shown = {
        "causal": masks.causal(),
        "window of 256": masks.causal() & masks.sliding_window(256),
        "packed documents": masks.causal() & masks.documents(ids, ids),
        "window, and a sink": masks.causal()
        & (masks.sliding_window(256) | masks.Mask(lambda b, h, q, k: k < 64)),
    }
    c = Canvas("Blocks of the score matrix that are computed, tested or left out", 780, 258, theme)
    for i, (name, mask) in enumerate(shown.items()):
        found = str(jax_flash.block_mask(mask, q_len=length, kv_len=length)).splitlines()
        rows = [row for row in found if set(row) <= set("·█▒")]
        x = 22 + 192 * i
        c.text(x + 88, 18, name, anchor="middle", bold=True)
        c.text(x + 88, 36, "blocks of keys →", fill="weak", anchor="middle", size=11)
        for j, row in enumerate(rows):
            for k, sign in enumerate(row):
                fill = {"·": "none", "█": BLUE, "▒": PALE}[sign]
                c.rect(x + cell * k, 46 + cell * j, cell - 2, cell - 2, fill)
    c.parts.append(
        f'<text x="12" y="134" fill="{c.color("weak")}" font-size="11" text-anchor="middle" '
        'transform="rotate(-90 12 134)">← blocks of queries</text>'
    )
    c.legend(
        22,
        248,
        [
            (BLUE, "computed, without a test"),
            (PALE, "computed, each score tested"),
            ("none", "never loaded"),
        ],
    )
    return c


# ---- tiling, online softmax ----------------------------------------------------------------------

_SCORES = (0.4, 1.1, -0.6, 0.2, 1.9, 0.7, -0.3, 1.2, 0.1, 3.1, 2.2, 0.5, -0.8, 1.6, 0.9, 2.7)


def online_softmax(scores: Sequence[float], block: int) -> list[tuple[float, float, float]]:
    """Lists (base, factor on what was summed, sum) after each block of a row's scores."""
    base, total, found = -math.inf, 0.0, []
    for i in range(0, len(scores), block):
        part = scores[i : i + block]
        new = max(base, *part)
        factor = math.exp(base - new)
        total = total * factor + sum(math.exp(s - new) for s in part)
        base = new
        found.append((base, factor, total))
    return found


def tiling(theme: str) -> Canvas:
    """A block of queries walks over the keys; a row's softmax, block by block."""
    tile = _plan("forward", head_dim=128, length=IN_TURNS, is_causal=True).tiling
    c = Canvas(
        "A block of queries on its way over the keys, and the softmax of one row", 780, 322, theme
    )
    n, cell, x0, y0, row = 6, 30, 96, 62, 4
    c.text(x0, 18, "Scores, a tile at a time", bold=True)
    c.text(x0, 36, f"tiles of {tile.block_q} queries by {tile.block_kv} keys", fill="weak", size=11)
    for j in range(n):
        for k in range(n):
            c.rect(x0 + cell * k, y0 + cell * j, cell - 2, cell - 2, "none")
    for k in range(row + 1):
        c.box(x0 + cell * k, y0 + cell * row, cell - 2, cell - 2, PALE if k == row else BLUE)
    c.rect(x0 + cell * 2, y0 + cell * row, cell - 2, cell - 2, ORANGE, stroke="text")
    c.arrow(x0 + cell * (row + 1), y0 + cell * row - 6, x0 + 4, y0 + cell * row - 6, color="text")
    for j in range(n):
        c.box(x0 - 34, y0 + cell * j, 26, cell - 2, VIOLET if j == row else "none")
    for k in range(n):
        c.box(x0 + cell * k, y0 + cell * n + 6, cell - 2, 22, GREEN if k == 2 else "none")
    c.text(x0 - 40, y0 + cell * row + 19, "Q", anchor="end", bold=True)
    c.text(x0 - 40, y0 + cell * n + 22, "K, V", anchor="end", bold=True)
    c.text(x0 - 60, 296, "Q stays in shared memory; K and V pass through", fill="weak", size=11)
    words = f"{tile.stages} buffers each; scores are in registers alone."
    c.text(x0 - 60, 311, words, fill="weak", size=11)

    x1, step, zero, unit = 350, 25, 150, 26
    c.text(x1, 18, "One row: base m, sum l", bold=True)
    c.text(x1, 36, "four blocks of four scores; exact at the end", fill="weak", size=11)
    states = online_softmax(_SCORES, 4)
    for i, s in enumerate(_SCORES):
        x = x1 + step * i + 4 * (i // 4)
        top = zero - unit * max(s, 0)
        c.rect(x, top, step - 6, unit * abs(s), BLUE)
    c.line(x1 - 4, zero, x1 + step * 16 + 10, zero)
    for i, (base, factor, total) in enumerate(states):
        left = x1 + (4 * step + 4) * i
        level = zero - unit * base
        c.line(left - 2, level, left + 4 * step - 4, level, color=ORANGE)
        c.text(
            left + 4 * step - 6, level - 5, f"m = {base:.1f}", anchor="end", fill=ORANGE, size=11
        )
        if i:
            c.text(left, 206, f"l × {factor:.2f}", fill="weak", size=11)
        c.text(left, 222, f"l = {total:.2f}", size=11)
    c.text(
        x1,
        190,
        "before adding a block, what was summed is brought to its base:",
        fill="weak",
        size=11,
    )
    sums = math.log(states[-1][2]) + states[-1][0]
    c.text(x1, 250, f"lse = m + log l = {sums:.3f},  weight of a score s = exp(s − lse)", size=12)
    c.text(x1, 270, "The sum of weights times values is scaled along with l.", fill="weak", size=11)
    return c


# ---- Hopper --------------------------------------------------------------------------------------


def _plan(name: str, head_dim: int, length: int = 16384, **options: Any) -> _gpu.Plan:
    """Plans a pass of bfloat16, 16384 tokens, 16 heads, on an H200."""
    x = jax.ShapeDtypeStruct((16384 // length, length, 16, head_dim), "bfloat16")
    problem, (q, k, v, *terms), *_ = _explain._prepare(x, x, x, **options)
    shapes = Shapes.of(q, k, v, problem.name_terms(terms))
    gpu = _gpu.spec.named("H200")
    assert gpu is not None
    return _gpu.plan(passes(problem)[name], shapes, gpu)


class Span(NamedTuple):
    """Something drawn in a lane, in cycles."""

    lane: str
    begin: float
    end: float
    color: str
    words: str


IN_TURNS = 512  # positions of a call whose warpgroups take turns; three of longer ones do not
PRODUCTS = ("warpgroup 0", "warpgroup 1", "score 0", "score 1")  # lanes of the tensor cores


def forward_schedule(tile: Any, count: int) -> list[Span]:
    """A unit of `count` blocks of keys, and the start of the next, on two warpgroups in turns."""
    assert (tile.consumers, tile.ping_pong, tile.query_stages) == (2, True, 1)
    assert tile.stages <= count
    product = 64 * tile.block_kv * tile.head_dim / MULTIPLY_ADDS
    weighted = 64 * tile.block_kv * tile.value_dim / MULTIPLY_ADDS
    softmax = 64 * tile.block_kv / EXPONENTIALS
    tile_load = 2 * tile.block_kv * tile.head_dim / BYTES
    query = 2 * tile.block_q * tile.head_dim / BYTES
    spans: list[Span] = []
    names = [*map(str, reversed(range(count))), "′"]  # of blocks; ′ is the next unit's first
    free = {"tensor": 0.0, "exp": 0.0, "load": 0.0}
    key_done = [[0.0, 0.0] for _ in names]  # block -> when each warpgroup is done with it
    value_done = [[0.0, 0.0] for _ in names]
    key_full, value_full = [0.0] * len(names), [0.0] * len(names)

    def take(unit: str, lane: str, ready: float, length: float, color: str, words: str) -> float:
        begin = max(ready, free[unit])
        free[unit] = begin + length
        spans.append(Span(lane, begin, begin + length, color, words))
        return begin + length

    def load(i: int) -> None:
        before = max(key_done[i - tile.stages]) if i >= tile.stages else 0.0
        key_full[i] = take("load", "TMA", before, tile_load, GREY, f"K{names[i]}")
        if i in (0, count):
            before = max(key_done[count - 1]) if i else 0.0  # there is one buffer for Q
            key_full[i] = take("load", "TMA", before, query, VIOLET, "Q′" if i else "Q")
        before = max(value_done[i - tile.stages]) if i >= tile.stages else 0.0
        value_full[i] = take("load", "TMA", before, tile_load, GREY, f"V{names[i]}")

    def scores(w: int, i: int) -> float:
        start = max(ready[w], key_full[i], value_full[i - 1] if 0 < i < count else 0.0)
        return take("tensor", f"warpgroup {w}", start, product, BLUE, f"Q·K{names[i]}")

    def output(w: int, i: int) -> float:
        start = max(ready[w], value_full[i])
        return take("tensor", f"warpgroup {w}", start, weighted, GREEN, f"P·V{names[i]}")

    for i in range(tile.stages):
        load(i)
    ready = [0.0, 0.0]  # to issue the next products
    for i in range(count + 1):
        for w in (0, 1):
            if i == count:  # the unit's last output starts at once, the next unit's scores behind
                value_done[i - 1][w] = output(w, i - 1)
            key_done[i][w] = scores(w, i)
            if 0 < i < count:
                value_done[i - 1][w] = output(w, i - 1)
            done = take(
                "exp", f"warpgroup {w} exp", key_done[i][w], softmax, ORANGE, f"P{names[i]}"
            )
            ready[w] = max(done, value_done[i - 1][w] if i else 0.0)
        if i + tile.stages <= count:
            load(i + tile.stages)
    return spans


def _lanes(
    c: Canvas, spans: Sequence[Span], lanes: dict[str, tuple[str, float]], x0: float, scale: float
) -> None:
    for words, y in lanes.values():
        c.text(x0 - 10, y + 17, words, anchor="end", fill="weak", size=11)
    for lane, begin, end, color, words in spans:
        c.box(x0 + begin * scale, lanes[lane][1], (end - begin) * scale - 1, 26, color, words)


def forward(theme: str) -> Canvas:
    """Two warpgroups take turns at the tensor cores."""
    tile = _plan("forward", head_dim=128, length=IN_TURNS).tiling
    spans = forward_schedule(tile, count=4)
    c = Canvas("Hopper's forward kernel: a producer and two warpgroups in turns", 780, 268, theme)
    x0 = 150
    scale = (772 - x0) / max(span.end for span in spans)
    lanes = {
        "TMA": ("one warp, TMA", 48.0),
        "warpgroup 0": ("warpgroup 0: products", 88.0),
        "warpgroup 0 exp": ("exponentials", 116.0),
        "warpgroup 1": ("warpgroup 1: products", 156.0),
        "warpgroup 1 exp": ("exponentials", 184.0),
    }
    c.text(
        x0,
        18,
        "A unit of four blocks of keys, last to first, and the start of the next (′)",
        bold=True,
    )
    words = f"head dim 128: 64 queries a warpgroup, {tile.block_kv} keys a block, "
    words += f"{tile.stages} buffers each of K and V; time →"
    c.text(x0, 36, words, fill="weak", size=11)
    _lanes(c, spans, lanes, x0, scale)
    c.legend(
        x0,
        236,
        [
            (BLUE, "scores"),
            (GREEN, "weights times values"),
            (ORANGE, "weights P"),
            (GREY, "loads"),
        ],
    )
    c.text(x0, 258, _MODEL, fill="weak", size=11)
    return c


def backward_schedule(tile: Any, steps: int) -> list[Span]:
    """Steps of the narrow backward kernel: two warpgroups of 64 keys each."""
    assert not tile.wide
    head = 64 * tile.block_q * tile.head_dim / MULTIPLY_ADDS  # S, dK, half of dQ
    value = 64 * tile.block_q * tile.value_dim / MULTIPLY_ADDS  # dP, dV
    exponentials = 64 * tile.block_q / EXPONENTIALS
    load = 2 * tile.block_q * tile.head_dim / BYTES
    spans: list[Span] = []
    free = {"tensor": 0.0, "exp": 0.0, "load": 0.0}

    def take(unit: str, lane: str, ready: float, length: float, color: str, words: str) -> float:
        begin = max(ready, free[unit])
        free[unit] = begin + length
        spans.append(Span(lane, begin, begin + length, color, words))
        return begin + length

    ready, full = [0.0, 0.0], [0.0] * steps
    query_done, dout_done = [0.0] * steps, [0.0] * steps

    def load_step(m: int) -> None:
        before = query_done[m - tile.stages] if m >= tile.stages else 0.0
        take("load", "TMA", before, load, GREY, f"Q{m}")
        before = dout_done[m - tile.stages] if m >= tile.stages else 0.0
        full[m] = take("load", "TMA", before, load, GREY, f"dO{m}")

    for m in range(min(tile.stages, steps)):
        load_step(m)
    for m in range(steps):
        stored = [0.0, 0.0]
        for w in (0, 1):
            lane = f"score {w}"
            scores = take("tensor", lane, max(ready[w], full[m]), head, BLUE, f"S{m}")
            gradients = take("tensor", lane, 0.0, value, VIOLET, f"dP{m}")
            weights = take("exp", lane + " exp", scores, exponentials, ORANGE, f"P{m}")
            stored[w] = max(gradients, weights)  # dS in shared memory
        for w in (0, 1):
            lane = f"score {w}"
            if m:
                added = take("tensor", lane, stored[w], head, PARTS[4], f"dQ{m - 1}")
                spans.append(Span(lane + " exp", added, added + head, GREY, f"+dQ{m - 1}"))
            take("tensor", lane, stored[w], value, GREEN, f"dV{m}")
            ready[w] = take("tensor", lane, 0.0, head, GREEN, f"dK{m}")
        query_done[m], dout_done[m] = max(ready), max(ready) - head
        if m + tile.stages < steps:
            load_step(m + tile.stages)
    return spans


def backward(theme: str) -> Canvas:
    """A block of keys walks over the queries; the products of a step."""
    tile = _plan("backward", head_dim=128, is_causal=True).tiling
    c = Canvas("The backward walk: a block of keys over the queries that see it", 780, 612, theme)
    width, height, x0, y0, columns, rows = 44, 22, 46, 62, 4, 8
    c.text(x0 - 26, 18, "The walk of one CTA, causal", bold=True)
    c.text(
        x0 - 26, 36, f"{tile.block_kv} keys by {tile.block_q} queries a step", fill="weak", size=11
    )
    own = 1
    for j in range(rows):
        for k in range(columns):
            first, last = j * tile.block_q, (j + 1) * tile.block_q - 1
            if last < k * tile.block_kv:
                fill = "none"
            elif first < (k + 1) * tile.block_kv - 1:
                fill = PALE
            else:
                fill = BLUE
            if k != own and fill != "none":
                fill = "line"
            c.rect(x0 + width * k, y0 + height * j, width - 2, height - 2, fill)
    begin = own * tile.block_kv // tile.block_q
    x = x0 + width * (own + 1) + 5
    c.arrow(x, y0 + height * rows - 4, x, y0 + height * begin + 4, color="text")
    for k in range(columns):
        fill = GREEN if k == own else "none"
        c.box(
            x0 + width * k, y0 + height * rows + 8, width - 2, 22, fill, "K V" if k == own else ""
        )
        c.box(
            x0 + width * k,
            y0 + height * rows + 34,
            width - 2,
            22,
            fill,
            "dK dV" if k == own else "",
        )
    x1 = x0 + width * columns + 90
    for j in range(begin, rows):
        x = x0 + width * columns + 4
        c.arrow(x, y0 + height * j + 10, x + 18, y0 + height * j + 10, color=PARTS[4])
    c.text(x0 + width * columns + 26, y0 + height * 5 + 2, "dQ", fill="text", bold=True)

    c.text(x1, 62, "While a unit lasts", bold=True)
    for i, (fill, words) in enumerate(
        [
            (GREEN, "K, V and the sums dK, dV: stay with the CTA, dK and dV in registers"),
            (BLUE, "blocks computed; lighter: each score tested, on the diagonal"),
            ("line", "blocks of other CTAs, at the same time"),
            (PARTS[4], "dQ: a sum over CTAs, added by reductions in L2"),
        ]
    ):
        c.legend(x1, 90 + 24 * i, [(fill, words)])
    c.text(x1, 196, f"Q and dO pass through {tile.stages} buffers each,", fill="weak", size=11)
    c.text(x1, 211, "from the last query to the diagonal.", fill="weak", size=11)

    spans = backward_schedule(tile, steps=3)
    left, top = 150, 330
    scale = (772 - left) / max(span.end for span in spans)
    lanes = {
        "TMA": ("loads, TMA", top + 44.0),
        "score 0": ("keys 0–63: products", top + 84.0),
        "score 0 exp": ("beside them", top + 112.0),
        "score 1": ("keys 64–127: products", top + 152.0),
        "score 1 exp": ("beside them", top + 180.0),
    }
    c.text(left, top + 14, "Three steps of it on Hopper, head dim 128: two warpgroups", bold=True)
    words = "dQ comes a step late, because it needs the dS of both warpgroups; time →"
    c.text(left, top + 32, words, fill="weak", size=11)
    _lanes(c, spans, lanes, left, scale)
    c.legend(
        left,
        top + 232,
        [(BLUE, "S = K Qᵀ"), (VIOLET, "dP = V dOᵀ"), (ORANGE, "P = exp(S − lse), then dS")],
    )
    c.legend(
        left,
        top + 254,
        [(GREEN, "dV += P dO, dK += dS Q"), (PARTS[4], "dQ = dS K"), (GREY, "loads, sums of dQ")],
    )
    c.text(left, top + 276, _MODEL, fill="weak", size=11)
    return c


DRAWINGS: dict[str, Callable[[str], Canvas]] = {
    x.__name__: x for x in (blocks, tiling, forward, backward, decode, ring)
}


def draw(name: str, theme: str) -> str:
    """Draws one of DRAWINGS in one of THEMES, as SVG."""
    return str(DRAWINGS[name](theme))
