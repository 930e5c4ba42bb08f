"""Prompts for the server of the examples, what an engine makes of them, and what is right."""

from __future__ import annotations

from typing import Any

import numpy as np
from flax import nnx


def continued(model, prompts, ids):
    """What one pass over each whole text, without a cache, finds likeliest after each token."""
    texts = np.zeros((len(prompts), model.config.length), np.int32)
    for text, prompt, new in zip(texts, prompts, ids, strict=True):
        text[: len(prompt) + len(new)] = prompt + new
    scores = np.asarray(nnx.jit(lambda model, texts: model(texts))(model, texts))[..., :256]
    best = scores.argmax(-1)
    return [
        row[len(prompt) - 1 : len(prompt) + len(new) - 1].tolist()
        for row, prompt, new in zip(best, prompts, ids, strict=True)
    ]


def prompts_of(seed, count, longest):
    """Prompts of mixed lengths, half of which begin alike."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(1, 256, 20).tolist()
    drawn = (rng.integers(1, 256, rng.integers(1, longest - 20)).tolist() for _ in range(count))
    return [(shared if i % 2 else []) + x for i, x in enumerate(drawn)]


def finish(engine, asked):
    """Runs requests (prompt, most) to their ends: the tokens of each, and those of each step."""
    from serving.engine import Request

    events: list[list[Any]] = [[] for _ in asked]
    for (prompt, most), heard in zip(asked, events, strict=True):
        engine.submit(Request(prompt, most, heard.append, temperature=0.0))
    compute, counts = engine._compute, []

    def counted(running, size):
        counts.append(sum(x.count for x in running))
        assert counts[-1] <= size
        return compute(running, size)

    engine._compute = counted
    while engine.waiting or engine.running:
        engine.step()
    engine._compute = compute
    assert {heard[-1] for heard in events} <= {"length", "stop"}
    return [[token for token, _ in heard[:-1]] for heard in events], counts
