"""The documents' figures: drawn from today's results and plans."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from figures import canvas, divisions, drawings, measured

from .conftest import FOLDER


def test_figures_are_drawn_from_the_results(tmp_path: Path):
    record = measured.newest(measured.RESULTS)
    found = measured.speeds(record, "training")
    assert [length for length, _ in found["jax_flash"]] == [512, 1024, 2048, 4096, 8192, 16384]
    assert_words_are_kept(measured.draw_speed, record, "speed", "724", tmp_path)
    assert_words_are_kept(measured.draw_gain, record, "gain", "649", tmp_path)


def test_block_masks_are_drawn_from_the_results(tmp_path: Path):
    record = measured.newest(measured.RESULTS, measured.SPARSE_COMMAND)
    assert_words_are_kept(measured.draw_sparse, record, "sparse", "butterfly", tmp_path)


def assert_words_are_kept(draw, record, name: str, word: str, folder: Path) -> None:
    """A chart has the words of the one in docs/figures, one of which is named."""
    for theme, color in measured.THEMES.items():
        drawn = folder / f"{name}-{theme}.svg"
        draw(record, color, drawn)
        kept = FOLDER.parent / "docs" / "figures" / drawn.name
        texts = [re.findall(r">([^<>]+)</text>", x.read_text()) for x in (drawn, kept)]
        assert word in texts[0]
        assert texts[0] == texts[1]


@pytest.mark.parametrize("name", drawings.DRAWINGS)
def test_drawings_are_of_todays_plans(name: str):
    """If not: python benchmarks figures."""
    for theme in canvas.THEMES:
        kept = FOLDER.parent / "docs" / "figures" / f"{name}-{theme}.svg"
        assert drawings.draw(name, theme) == kept.read_text()


@pytest.mark.parametrize("of", ["forward", "backward"])
def test_documented_explanation_is_of_todays_plan(of: str):
    page = (FOLDER.parent / "docs" / "performance.md").read_text()
    shown = re.search(rf"^{of}: (\S+)\n(.*), \.\.\.$", page, re.MULTILINE)
    assert shown is not None
    source, tiling, *_ = str(drawings._plan(of, head_dim=128, is_causal=True)).splitlines()
    assert shown[1] == source
    assert tiling.startswith(shown[2] + ",")


def test_drawn_softmax_is_the_rows():
    scores = np.array(drawings._SCORES)
    base, _, total = drawings.online_softmax(drawings._SCORES, 4)[-1]
    assert base + np.log(total) == pytest.approx(np.log(np.exp(scores).sum()))


@pytest.mark.parametrize("of", ["forward", "backward"])
def test_drawn_products_follow_each_other(of: str):
    tile = drawings._plan(of, head_dim=128, length=drawings.IN_TURNS).tiling
    spans = getattr(drawings, f"{of}_schedule")(tile, 4)
    tensor = sorted((x.begin, x.end) for x in spans if x.lane in drawings.PRODUCTS)
    assert all(one[1] <= two[0] for one, two in itertools.pairwise(tensor))
    # docs/how-it-works.md: never idle.
    assert sum(end - begin for begin, end in tensor) == tensor[-1][1] - tensor[0][0]


def test_drawn_ring_computes_what_causality_leaves():
    steps = divisions.ring_steps(4, "zigzag")
    work = [0.0] * 4
    for _, devices in steps:
        for rank, (_, halves) in enumerate(devices):
            work[rank] += sum({"own": 0.5, "whole": 1, "none": 0}[x] for row in halves for x in row)
    assert work == [8 * 8 / 2 / 4] * 4
