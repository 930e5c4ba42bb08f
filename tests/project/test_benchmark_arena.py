"""The tasks that papers.py trains on: their labels are those that another reading finds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common.paper import Settings
from paper_parts import _classify, _listops, _made, _pathfinder, arena, path_x


def value_of(words):
    """Reads an expression from left to right, with a stack."""
    stack = []
    for word in words:
        if word < _listops.OPERATORS:
            stack[-1].append(word - _listops.DIGITS)
        elif word < _listops.END:
            stack.append([_listops.NAMES[word - _listops.OPERATORS]])
        else:
            name, *given = stack.pop()
            of = {"MIN": min, "MAX": max, "SM": lambda x: sum(x) % 10}
            value = of.get(name, lambda x: int(np.median(x)))(given)
            if not stack:
                return value
            stack[-1].append(value)
    raise AssertionError("no end")


def test_listops_has_the_values_of_its_expressions():
    words, lengths, values = _listops.make(1, 300, 50, 400, depth=6, arguments=5)
    assert words.shape == (300, 400)
    assert lengths.min() > 50
    assert lengths.max() < 400
    for row, length, value in zip(words.tolist(), lengths, values, strict=True):
        assert set(row[length:]) <= {0}
        assert value_of(row[:length]) == value
        counts = [row.count(x) for x in range(_listops.OPERATORS, _listops.WORDS)]
        assert sum(counts[:4]) == counts[4]
    assert set(values.tolist()) == set(range(10))
    np.testing.assert_array_equal(_listops.make(1, 300, 50, 400, depth=6, arguments=5)[0], words)


def reached(ink, begin):
    """The pixels that are joined to those near a place."""
    found = np.zeros_like(ink)
    y, x = begin
    found[max(0, y - 2) : y + 3, max(0, x - 2) : x + 3] = True
    found &= ink
    while True:
        wider = found.copy()
        wider[1:] |= found[:-1]
        wider[:-1] |= found[1:]
        wider[:, 1:] |= found[:, :-1]
        wider[:, :-1] |= found[:, 1:]
        wider &= ink
        if (wider == found).all():
            return found
        found = wider


@pytest.fixture(scope="module")
def scenes():
    return _pathfinder.make(2, 256)


def test_pathfinders_label_is_whether_dashes_lead_from_dot_to_dot(scenes):
    """Dashes are made thicker by more than half a gap and less than half of what keeps apart."""
    assert scenes.connected.mean() == 0.5
    scenes = _pathfinder.part_of(scenes, 0, 24)
    size, scale = 160, 160 / _pathfinder.UNITS
    pictures = np.zeros((24, size, size), np.uint8)
    thick = 0.7 * scale
    assert _pathfinder.GAP / 2 < 0.7 < _pathfinder.APART / 2
    for i in range(_pathfinder.DASHES):
        _pathfinder._stroke(pictures, scenes.dashes[:, i] * scale, thick, 12, 255)
    dots = np.floor(scenes.dots * scale).astype(int)
    joined = [reached(p > 127, a)[b[0], b[1]] for p, (a, b) in zip(pictures, dots, strict=True)]
    np.testing.assert_array_equal(joined, scenes.connected == 1)


def test_pathfinders_dots_are_drawn_and_their_distance_does_not_tell(scenes):
    pictures = _pathfinder.draw(scenes, 64)
    at = np.floor(scenes.dots * 2).astype(int)
    assert (pictures[np.arange(256)[:, None], at[..., 0], at[..., 1]] == 255).all()
    plain = _pathfinder.draw(scenes, 64, dots=False)
    assert 0 < plain.max() <= _pathfinder.DIM
    away = np.linalg.norm(scenes.dots[:, 0] - scenes.dots[:, 1], axis=-1)
    right = [((away > x) == scenes.connected).mean() for x in np.linspace(0, 40, 81)]
    assert min(right) > 0.4
    assert max(right) < 0.62


def test_texts_and_pairs_have_their_labels():
    data, lengths, labels = _made.texts(0, 60, 400)
    for row, length, label in zip(data, lengths, labels, strict=True):
        opinions = [x.split()[3:] for x in bytes(row[:length]).decode().split(" . ") if "film" in x]
        liked = [(x[-1] in _made._GOOD) != (x[0] == "not") for x in opinions]
        assert (sum(liked) > len(liked) / 2) == label
        assert not row[length:].any()
    assert labels.mean() == 0.5
    pairs, lengths, labels = _made.pairs(0, 60, 400)
    common = []
    for pair, sizes in zip(pairs, lengths, strict=True):
        texts = [bytes(x[:n]).decode().split()[:-1] for x, n in zip(pair, sizes, strict=True)]
        common.append(len({*texts[0]} & {*texts[1]}))
    assert np.mean(np.array(common)[labels == 1]) > 2 * np.mean(np.array(common)[labels == 0])
    pictures, labels = _made.pictures(0, 200, 16)
    assert pictures.shape == (200, 16, 16)
    assert set(labels.tolist()) == set(range(_made.CLASSES))


def test_padding_changes_no_score_and_both_attentions_agree():
    plan = _classify.Plan(1, 2, classes=3, vocabulary=16)
    parameters = _classify.initial(0, arena.QUICK, plan, (40,))
    words = np.random.default_rng(0).integers(1, 16, (2, 40)).astype(np.uint8)
    lengths = jnp.array([40, 17])

    @functools.partial(jax.jit, static_argnums=1)
    def scores(words, way):
        attend = functools.partial(arena.attend, way)
        return _classify.scores(parameters, words, lengths, arena.QUICK, plan, attend)

    wanted = scores(words, "xla")
    np.testing.assert_allclose(scores(words, "jax_flash"), wanted, rtol=1e-4, atol=1e-5)
    other = words.copy()
    other[1, 17:] = 3
    np.testing.assert_allclose(scores(other, "jax_flash"), wanted, rtol=1e-4, atol=1e-5)


def test_the_interval_of_an_accuracy():
    low, high = path_x.interval(0.5, 100)
    assert (low, high) == (pytest.approx(0.404, abs=1e-3), pytest.approx(0.596, abs=1e-3))
    record = {"side": 128, "way": "jax_flash", "curve": [[9, 0.58]], "unseen": 400}
    assert "above chance, 9 steps" in (path_x.right(128, "jax_flash")([record]) or "")
    assert "not above" in (path_x.right(128, "jax_flash")([record | {"unseen": 100}]) or "")


@pytest.mark.parametrize("part", [arena, path_x])
def test_claims_find_their_cells(part):
    found = {"ms": 2.0, "program_gb": 1.0, "curve": [[5, 0.6]], "unseen": 100, "batch": 3}
    records = [x | found | {"length": 7} for x in part.cells(Settings())]
    assert None not in [claim.here(records) for claim in part.PART.claims]
    assert len(part.panels(records)) >= 4
    assert "60.0%" in part.table(records)
