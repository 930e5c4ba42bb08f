"""Makes Pathfinder: two dots on a picture of dashed curves; does one curve have both at its ends?

Linsley et al. (arXiv:1805.08315), in the kind of Tay et al., Long Range Arena (arXiv:2011.04006):
two curves of 14 dashes and four of 4. Curves turn by bounded angles and keep a distance from each
other and from themselves that is larger than their gaps. Scenes have 32 x 32 units and are drawn
at any resolution, many at a time: Path-X is 128 x 128, Path-256 256 x 256.
"""

import concurrent.futures
import dataclasses
import multiprocessing

import numpy as np

UNITS = 32.0
DASH, GAP = 2.0, 1.0  # lengths
APART = 2.0  # from other curves, and from older dashes of the same one
BORDER = 1.0
TURN = 0.8  # radians from dash to dash, at most
LONG, SHORT = 14, 4  # dashes of a curve
CURVES = (LONG, LONG, SHORT, SHORT, SHORT, SHORT)
DASHES = sum(CURVES)
DOT, THICK = 1.5, 0.5  # radius of a dot, thickness of a dash
DIM = 160  # of 255
TRIES = 12  # of a dash, then of a curve


@dataclasses.dataclass
class Scenes:
    """Dashes float32 [scenes, DASHES, 2 ends, (y, x)], dots [scenes, 2, (y, x)], labels."""

    dashes: np.ndarray
    dots: np.ndarray
    connected: np.ndarray  # int32 [scenes]: 1, both dots are on one curve


def part_of(scenes: Scenes, begin: int, count: int) -> Scenes:
    """So many scenes from one on."""
    these = slice(begin, begin + count)
    return Scenes(scenes.dashes[these], scenes.dots[these], scenes.connected[these])


PIECE = 256  # scenes that one process makes at a time


def make(seed: int, count: int, processes: int = 1) -> Scenes:
    """Makes so many scenes, half with both dots on one curve; the same by any processes."""
    pieces = [(seed, number) for number in range(-(-count // PIECE))]
    if processes > 1:
        spawn = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(processes, spawn) as pool:
            dashes = np.concatenate(list(pool.map(_piece, pieces)))[:count]
    else:
        dashes = np.concatenate([_piece(x) for x in pieces])[:count]
    connected = np.random.default_rng(seed).permutation(np.arange(count) % 2).astype(np.int32)
    return Scenes(dashes, _dots(dashes, connected == 1), connected)


def _piece(seeds: tuple[int, int]) -> np.ndarray:
    """Dashes of PIECE scenes."""
    rng = np.random.default_rng(seeds)
    found: list[np.ndarray] = []
    while sum(map(len, found)) < PIECE:
        found.append(_grow(rng, PIECE))
    return np.concatenate(found)[:PIECE]


def _dots(dashes: np.ndarray, connected: np.ndarray) -> np.ndarray:
    """Puts dots at both ends of the first curve, or at one of it and one of the second.

    The two ends of different curves are as far apart as those of one, or nearly: else the distance
    of the dots would tell the label.
    """
    ends = np.stack(
        [dashes[:, 0, 0], dashes[:, LONG - 1, 1], dashes[:, LONG, 0], dashes[:, 2 * LONG - 1, 1]],
        axis=1,
    )
    own = np.linalg.norm(ends[:, 0] - ends[:, 1], axis=-1)
    pairs = np.array([(0, 2), (0, 3), (1, 2), (1, 3)])
    other = np.linalg.norm(ends[:, pairs[:, 0]] - ends[:, pairs[:, 1]], axis=-1)
    nearest = pairs[np.abs(other - own[:, None]).argmin(axis=1)]
    chosen = np.where(connected[:, None], [[0, 1]], nearest)
    return np.take_along_axis(ends, chosen[..., None], axis=1)


def _grow(rng: np.random.Generator, scenes: int) -> np.ndarray:
    """Grows all curves of some scenes; those in which one finds no room are left out."""
    dashes = np.full((scenes, DASHES, 2, 2), np.inf, np.float32)
    begin = 0
    for length in CURVES:
        failed = np.arange(len(dashes))
        for _ in range(TRIES):
            curves, grown = _curve(rng, dashes[failed, :begin], length)
            dashes[failed[grown], begin : begin + length] = curves[grown]
            failed = failed[~grown]
            if not len(failed):
                break
        dashes = np.delete(dashes, failed, axis=0)
        begin += length
    return dashes


def _points(dashes: np.ndarray) -> np.ndarray:
    """Both ends of each dash and its middle: [..., dashes, 2, 2] -> [..., 3 * dashes, 2]."""
    middle = dashes.mean(axis=-2, keepdims=True)
    points = np.concatenate([dashes, middle], axis=-2)
    return points.reshape(*dashes.shape[:-3], 3 * dashes.shape[-3], 2)


def _curve(
    rng: np.random.Generator, others: np.ndarray, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """One more curve beside the dashes of each scene, and whether it has found room."""
    count = len(others)
    curve = np.full((count, length, 2, 2), np.inf, np.float32)
    there = _points(others)
    angle = rng.uniform(0, 2 * np.pi, count)
    alive = np.ones(count, bool)
    for i in range(length):
        open_ = np.flatnonzero(alive)
        for _ in range(TRIES):
            if i:
                turned = angle[open_] + rng.uniform(-TURN, TURN, len(open_))
            else:
                turned = rng.uniform(0, 2 * np.pi, len(open_))
            way = np.stack([np.sin(turned), np.cos(turned)], axis=-1)
            if i:
                begin = curve[open_, i - 1, 1] + GAP * way
            else:
                begin = rng.uniform(BORDER, UNITS - BORDER, (len(open_), 2))
            dash = np.stack([begin, begin + DASH * way], axis=1).astype(np.float32)
            older = _points(curve[open_, : max(0, i - 1)])
            fits = _fits(dash, there[open_]) & _fits(dash, older)
            chosen = open_[fits]
            curve[chosen, i], angle[chosen] = dash[fits], turned[fits]
            open_ = open_[~fits]
            if not len(open_):
                break
        alive[open_] = False
    return curve, alive


def _fits(dash: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Whether a dash [scenes, 2, 2] lies inside, and far from points [scenes, points, 2]."""
    inside = np.all((dash > BORDER) & (dash < UNITS - BORDER), axis=(1, 2))
    if not points.shape[1]:
        return inside
    own = _points(dash[:, None])
    between = own[:, :, None] - points[:, None]
    nearest = np.square(between).sum(axis=-1).min(axis=(1, 2))
    return inside & (nearest > APART**2)


def draw(scenes: Scenes, size: int, dots: bool = True) -> np.ndarray:
    """Draws scenes: uint8 [scenes, size, size], DIM where a dash is, 255 a dot, edges softened."""
    scale = size / UNITS
    thick = max(THICK * scale, 1.0) / 2
    pictures = np.zeros((len(scenes.dashes), size, size), np.uint8)
    reach = int(np.ceil(DASH * scale / 2 + thick + 1))
    for i in range(DASHES):
        _stroke(pictures, scenes.dashes[:, i] * scale, thick, reach, DIM)
    if dots:
        radius = DOT * scale
        for i in range(2):
            ends = np.repeat(scenes.dots[:, i, None] * scale, 2, axis=1)
            _stroke(pictures, ends, radius, int(np.ceil(radius + 1)), 255)
    return pictures


def _stroke(pictures: np.ndarray, ends: np.ndarray, thick: float, reach: int, bright: int) -> None:
    """Draws a line of each picture between ends [pictures, 2, (y, x)], in pixels."""
    count, size = len(pictures), pictures.shape[1]
    corner = np.floor(ends.mean(axis=1)).astype(int) - reach
    at = corner[:, :, None] + np.arange(2 * reach + 1)  # [pictures, (y, x), window]
    center = at + 0.5
    y = (center[:, 0, :, None] - ends[:, 0, 0, None, None]).astype(np.float32)
    x = (center[:, 1, None, :] - ends[:, 0, 1, None, None]).astype(np.float32)
    along = (ends[:, 1] - ends[:, 0]).astype(np.float32)
    long = np.maximum(np.square(along).sum(axis=1), 1e-9)[:, None, None]
    dy, dx = along[:, 0, None, None], along[:, 1, None, None]
    part = np.clip((y * dy + x * dx) / long, 0, 1)
    away = np.hypot(y - part * dy, x - part * dx)
    ink = (bright * np.clip(thick + 0.5 - away, 0, 1)).astype(np.uint8)
    ink[~(((at >= 0) & (at < size))[:, 0, :, None] & ((at >= 0) & (at < size))[:, 1, None, :])] = 0
    at = np.clip(at, 0, size - 1)
    where = np.arange(count)[:, None, None], at[:, 0, :, None], at[:, 1, None, :]
    np.maximum.at(pictures, where, ink)
