"""Makes texts and pictures in place of data sets that would have to be downloaded.

Texts have the length of Long Range Arena's (arXiv:2011.04006), and ask for what is spread over
them: whether a film is liked, by the most of what is said of it; whether two texts have a subject
in common. Pictures show one of ten shapes. They are easier than reviews, papers and photographs.
"""

import numpy as np

CLASSES = 10  # of pictures
SUBJECTS = 16

_FILLERS = (
    "the river runs behind the house",
    "they met on a tuesday in spring",
    "the train to the coast was late",
    "someone had left the lamp burning",
    "it rained for most of the week",
    "her brother sells maps and clocks",
    "the hall had nine rows of chairs",
    "a man in grey counted the stairs",
)
_GOOD = ("warm", "funny", "clever", "moving", "bright", "honest")
_BAD = ("dull", "clumsy", "hollow", "tiresome", "false", "shallow")
_THINGS = ("the soup", "the hotel", "his car", "the weather", "the bus ride")


def texts(seed: int, count: int, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Makes texts in which a film is praised more often than blamed, or less often.

    A third of the sentences praise or blame something else, and "not" turns an adjective around.

    Returns:
      bytes uint8 [count, length], 0 behind the end; lengths int32 [count]; labels int32 [count], 1
      where the film is liked.
    """
    rng = np.random.default_rng(seed)
    found = []
    labels = rng.permutation(np.arange(count) % 2)
    for label in labels:
        sentences = max(4, int(rng.integers(length // 2, length) / 36))
        opinions = 2 * int(rng.integers(1, max(2, sentences // 10))) + 1
        opinions = min(opinions, sentences | 1)
        for_it = int(rng.integers(opinions // 2 + 1, opinions + 1))
        liked = np.arange(opinions) < for_it
        said = [_opinion(rng, "the film", bool(x) == bool(label)) for x in liked]
        while len(said) < sentences:
            thing = _THINGS[rng.integers(len(_THINGS))]
            other = rng.random() < 1 / 3
            filler = _FILLERS[rng.integers(len(_FILLERS))]
            said.append(_opinion(rng, thing, rng.random() < 0.5) if other else filler)
        rng.shuffle(said)
        found.append(" . ".join(said).encode())
    if max(map(len, found)) > length:  # the label may be in what would be cut off
        raise ValueError(f"length is {length}; expected 160 or more, for four sentences")
    return *_padded(found, length), labels.astype(np.int32)


def _opinion(rng: np.random.Generator, of: str, good: bool) -> str:
    negated = rng.random() < 0.3
    words = _GOOD if good != negated else _BAD
    return f"{of} was {'not ' if negated else ''}{words[rng.integers(len(words))]}"


def pairs(seed: int, count: int, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Makes pairs of texts, half of which have the subject in common: its words, among others'.

    Words of a subject are spelled with ten letters of its own.

    Returns:
      bytes uint8 [count, 2, length]; lengths int32 [count, 2]; labels int32 [count].
    """
    rng = np.random.default_rng(seed)
    spell = np.random.default_rng(0)  # words are the same for all seeds
    words = []
    for _ in range(SUBJECTS):
        own = spell.choice(np.arange(97, 123, dtype=np.uint8), 10, replace=False)
        words += [bytes(spell.choice(own, 3 + i % 4)) for i in range(40)]
    labels = rng.permutation(np.arange(count) % 2).astype(np.int32)
    first = rng.integers(0, SUBJECTS, count)
    other = (first + rng.integers(1, SUBJECTS, count)) % SUBJECTS
    subjects = np.stack([first, np.where(labels == 1, first, other)], axis=1)
    found = []
    for subject in subjects.reshape(-1):
        size = int(rng.integers(length // 2, length) / 6)
        own = rng.random(size) < 0.4
        drawn = np.where(
            own, 40 * subject + rng.integers(0, 40, size), rng.integers(0, len(words), size)
        )
        found.append(b" ".join([words[i] for i in drawn]))
    data, lengths = _padded(found, length)
    return data.reshape(count, 2, length), lengths.reshape(count, 2), labels


def _padded(found: list[bytes], length: int) -> tuple[np.ndarray, np.ndarray]:
    data = np.frombuffer(b"".join(x[:length].ljust(length, b"\0") for x in found), np.uint8)
    lengths = np.array([min(len(x), length) for x in found], np.int32)
    return data.reshape(len(found), length), lengths


def pictures(seed: int, count: int, size: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Draws one of ten shapes at any place, size, brightness and angle, on noise.

    Returns:
      uint8 [count, size, size]; labels int32 [count]: disc, ring, square, frame, triangle, cross,
      bar, two bars, half disc, chequers.
    """
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, count).astype(np.int32)
    radius = rng.uniform(0.2, 0.35, (count, 1, 1)) * size
    center = rng.uniform(0.35, 0.65, (2, count, 1, 1)) * size
    angle = rng.uniform(0, 2 * np.pi, (count, 1, 1))
    grid = np.arange(size) + 0.5
    y, x = grid[None, :, None] - center[0], grid[None, None, :] - center[1]
    u = (np.cos(angle) * x + np.sin(angle) * y) / radius
    v = (np.cos(angle) * y - np.sin(angle) * x) / radius
    away, wide = np.hypot(u, v), np.maximum(abs(u), abs(v))
    shapes = (
        away < 1,
        (away < 1) & (away > 0.6),
        wide < 0.85,
        (wide < 0.9) & (wide > 0.55),
        (v > -0.6) & (v + 1.7 * abs(u) < 0.9),
        (wide < 1) & (np.minimum(abs(u), abs(v)) < 0.25),
        (abs(u) < 1) & (abs(v) < 0.3),
        (abs(u) < 1) & (abs(abs(v) - 0.55) < 0.25),
        (away < 1) & (v > 0),
        (wide < 1) & (np.sin(4.5 * u) * np.sin(4.5 * v) > 0),
    )
    ink = np.choose(labels[:, None, None], shapes)
    bright = rng.uniform(70, 130, (count, 1, 1))
    noise = rng.normal(80, 22, (count, size, size))
    return np.clip(noise + bright * ink, 0, 255).astype(np.uint8), labels
