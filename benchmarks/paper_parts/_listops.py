"""Makes ListOps: nested MIN, MAX, MED and SM of digits, of which the value is asked.

Nangia and Bowman (arXiv:1804.06028), in the lengths of Tay et al., Long Range Arena
(arXiv:2011.04006): 500 to 2000 words, depth 10, 2 to 10 arguments, a quarter of which are nested.
Trees grow level by level, many at a time.
"""

import dataclasses

import numpy as np

DIGITS, OPERATORS, END = 1, 11, 15  # first word of each; 0 is padding
NAMES = ("MIN", "MAX", "MED", "SM")  # SM: the sum modulo 10; MED: the median, rounded down
WORDS = 16
NESTED = 0.25


@dataclasses.dataclass
class _Level:
    """Nodes of one depth, in order; those of a parent are neighbours."""

    tree: np.ndarray
    parent: np.ndarray  # index in the level above
    begins: np.ndarray  # where the neighbours of a node begin
    kind: np.ndarray  # of an operator 0 to 3; -1: a digit
    value: np.ndarray
    size: np.ndarray  # words


def make(
    seed: int, count: int, least: int = 500, most: int = 2000, depth: int = 10, arguments: int = 10
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Makes so many expressions of more than `least` and fewer than `most` words.

    Returns:
      words uint8 [count, most], 0 behind the end; lengths int32 [count]; values int32 [count].
    """
    rng = np.random.default_rng(seed)
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    have = 0
    while have < count:
        levels = _grow(rng, 1024, depth, arguments)
        _evaluate(levels, arguments)
        sizes = levels[0].size
        chosen = np.flatnonzero((sizes > least) & (sizes < most))
        found.append((_write(levels, chosen, most), sizes[chosen], levels[0].value[chosen]))
        have += len(chosen)
    words, lengths, values = (np.concatenate(x)[:count] for x in zip(*found, strict=True))
    return words, lengths.astype(np.int32), values.astype(np.int32)


def _grow(rng: np.random.Generator, trees: int, depth: int, arguments: int) -> list[_Level]:
    """Grows trees whose root is an operator: of a digit no expression is long enough."""
    at = np.arange(trees)
    levels = [_level(rng, at, np.zeros(trees, int), at, np.ones(trees, bool))]
    while len(levels) < depth:
        above = levels[-1]
        parents = np.flatnonzero(above.kind >= 0)
        counts = rng.integers(2, arguments + 1, len(parents))
        begins = np.repeat(np.cumsum(counts) - counts, counts)
        parent = np.repeat(parents, counts)
        nested = (rng.random(len(parent)) < NESTED) & (len(levels) + 1 < depth)
        levels.append(_level(rng, above.tree[parent], parent, begins, nested))
    return levels


def _level(
    rng: np.random.Generator,
    tree: np.ndarray,
    parent: np.ndarray,
    begins: np.ndarray,
    nested: np.ndarray,
) -> _Level:
    kind = np.where(nested, rng.integers(0, len(NAMES), len(nested)), -1)
    value = rng.integers(0, 10, len(nested))
    return _Level(tree, parent, begins, kind, value, np.where(nested, 2, 1))


def _evaluate(levels: list[_Level], arguments: int) -> None:
    """Sets values and sizes, from the deepest level on."""
    for above, below in zip(levels[-2::-1], levels[:0:-1], strict=True):
        nodes = len(above.kind)
        above.size += np.bincount(below.parent, below.size, nodes).astype(int)
        counts = np.bincount(below.parent, minlength=nodes)
        values = np.full((nodes, arguments), 99)
        values[below.parent, np.arange(len(below.parent)) - below.begins] = below.value
        values.sort(axis=1)
        counts = np.maximum(counts, 1)
        rows = np.arange(nodes)
        first, last = values[:, 0], values[rows, counts - 1]
        median = (values[rows, (counts - 1) // 2] + values[rows, counts // 2]) // 2
        total = np.where(values < 99, values, 0).sum(axis=1) % 10
        options = np.stack([first, last, median, total])
        nested = above.kind >= 0
        above.value[nested] = options[above.kind, rows][nested]


def _write(levels: list[_Level], chosen: np.ndarray, most: int) -> np.ndarray:
    """Writes the chosen trees as words."""
    row = np.full(len(levels[0].tree), -1)
    row[chosen] = np.arange(len(chosen))
    words = np.zeros((len(chosen), most), np.uint8)
    place = np.zeros(len(levels[0].tree), int)
    for i, level in enumerate(levels):
        if i:
            ahead = np.cumsum(level.size) - level.size  # words of nodes ahead in the level
            place = place[level.parent] + 1 + ahead - ahead[level.begins]
        here = row[level.tree] >= 0
        nested = here & (level.kind >= 0)
        digits = here & (level.kind < 0)
        words[row[level.tree[digits]], place[digits]] = DIGITS + level.value[digits]
        words[row[level.tree[nested]], place[nested]] = OPERATORS + level.kind[nested]
        words[row[level.tree[nested]], (place + level.size - 1)[nested]] = END
    return words
