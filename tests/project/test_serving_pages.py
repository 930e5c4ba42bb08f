"""The pages of the example's cache, whoever takes, names and releases them in whatever order."""

import collections
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
COUNT, SIZE = 12, 3


@pytest.mark.parametrize("seed", range(3))
def test_a_page_has_one_state_and_what_is_found_is_what_was_named(seed, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from serving.pages import Pages

    pages, rng = Pages(COUNT, SIZE), np.random.default_rng(seed)
    users: list[tuple[list[int], list[int], int]] = []  # pages, tokens, number of the last page
    held: dict[int, list[int]] = {}  # what was written to each page, and the tokens before it
    reused = 0
    for _ in range(2000):
        if users and rng.random() < 0.4:
            pages.release(users.pop(rng.integers(len(users)))[0])
        else:
            tokens = rng.integers(0, 2, rng.integers(1, 16)).tolist()
            found, number = pages.find(tokens)
            assert len(found) * SIZE < len(tokens)
            for i, page in enumerate(found):
                assert held[page] == tokens[: (i + 1) * SIZE]
            reused += len(found)
            needed = -(-len(tokens) // SIZE) - len(found)
            if needed > pages.available:
                pages.release(found)
                continue
            for i in range(len(found), len(found) + needed):
                page = pages.take()
                held[page] = tokens[: (i + 1) * SIZE]
                if len(held[page]) == (i + 1) * SIZE:
                    number = pages.name(page, number, tokens[i * SIZE : (i + 1) * SIZE])
                found.append(page)
            users.append((found, tokens, number))
        count = collections.Counter(page for found, _, _ in users for page in found)
        assert pages.available == COUNT - len(count)
        assert sorted([*pages._free, *pages._kept, *count]) == list(range(COUNT))
    assert reused > 100
    assert len(pages._named) <= COUNT  # what is overwritten is forgotten
