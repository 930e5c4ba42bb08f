"""Programs of the benchmark of drawn calls: attentions in a chain and a loop, and their times."""

import dataclasses
from typing import Any

import cliffs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import drawn, drawn_peers, drawn_programs, runs, shapes
from common.drawn import Drawn

TINY = Drawn(2, 24, 24, 4, 2, 16, "float32", bias="1NTS", bias_gradient=True)
ATTENDS = {" custom-call(": drawn_peers.attend_flash, " dot(": drawn_peers.attend_xla}


@pytest.mark.parametrize("of", shapes.PASSES)
@pytest.mark.parametrize("word", ATTENDS)
def test_a_program_has_each_attention_whole(
    word: str, of: shapes.Pass, monkeypatch: pytest.MonkeyPatch
):
    """XLA merges none, leaves out none, takes nothing out of the turns; a turn copies little more.

    As it does for an H100, where a turn copies nothing more.
    """
    monkeypatch.setattr(drawn, "CALLS", 3)
    call = TINY
    step = drawn_programs.step_of(call, ATTENDS[word], of)
    single = step.lower(drawn_peers.structs(call)).compile().as_text()
    rest, main = drawn_programs.compile_several(call, step, of).as_text().split("\nENTRY ")
    assert main.count(" while(") == 1
    assert rest.count(word) == 3 * single.count(word) > 0 == main.count(word)
    assert rest.count(" copy(") <= 3 * single.count(" copy(") + 2


def test_each_attention_makes_what_it_reads(monkeypatch: pytest.MonkeyPatch):
    """Not all of them at once, ahead of the turns: here the pattern of dropout."""
    monkeypatch.setattr(drawn, "CALLS", 3)
    call = dataclasses.replace(TINY, bias="", bias_gradient=False, dropout=0.1)
    step = drawn_programs.step_of(call, drawn_peers.attend_xla, "forward")
    single = step.lower(drawn_peers.structs(call)).compile().as_text()
    several = drawn_programs.compile_several(call, step, "forward").as_text()
    assert several.count(" xor(") == 3 * single.count(" xor(") > 0


@pytest.mark.parametrize("of", shapes.PASSES)
def test_attentions_of_a_program_follow_one_another(
    of: shapes.Pass, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(drawn, "CALLS", 2)
    monkeypatch.setattr(drawn, "PROGRAM_SECONDS", 0)  # two turns
    call = TINY
    given = {name: jnp.asarray(x) for name, x in drawn.arrays(call).items()}
    step = drawn_programs.step_of(call, drawn_peers.attend_flash, of)
    several = drawn_programs.compile_several(call, step, of)(given)
    results, out = [], given["q"]
    for _ in range(call.turns(of) * call.calls):
        results.append(step(given | {"q": out, "dout": out}))
        out = results[-1][0]
    seen = [x[0, 0, 0, 0] for x in jax.tree.leaves(results[2:])]
    assert (call.turns(of), several.shape) == (2, (2 * len(call.results(of)),))
    assert len({float(x) for x in seen}) == len(seen)
    np.testing.assert_allclose(several, seen, rtol=1e-4)


def test_a_program_takes_long_beside_the_host():
    short, long = TINY, Drawn(4, 4096, 4096, 16, 16, 128)
    assert short.calls * short.turns("forward") * drawn.LEAST_SECONDS >= drawn.PROGRAM_SECONDS
    assert (short.calls, long.calls, long.turns("training")) == (16, 4, 2)


def test_a_time_is_the_least_of_turns(monkeypatch: pytest.MonkeyPatch):
    """What is far from the best, or far behind ours, has one; what leads has more."""
    now, slow = 0.0, iter([*[1.0] * 9, 3.0, *[1.0] * 99])

    def taking(seconds: float) -> Any:
        def call() -> None:
            nonlocal now
            now += seconds * next(slow)

        return call

    monkeypatch.setattr(runs.time, "perf_counter", lambda: now)

    def turns(**seconds: float) -> dict[str, list[float]]:
        calls = {name: taking(x) for name, x in seconds.items()}
        found, failed = cliffs.time_in_turns(calls, dict.fromkeys(calls, 2))
        assert not failed
        return found

    first = turns(jax_flash=2.0, jax_xla=1.5, fa3=9.0)
    counts = {name: len(x) for name, x in first.items()}
    assert counts == {"jax_flash": 10, "jax_xla": 10, "fa3": 1}
    assert (min(first["jax_flash"]), max(first["jax_flash"])) == (1.0, 3.0)
    ahead_of = turns(jax_flash=1.0, jax_xla=2.0)
    assert {name: len(x) for name, x in ahead_of.items()} == {"jax_flash": 1, "jax_xla": 1}
    with_more = turns(jax_flash=1.0, jax_xla=1.2, neighbour=1.5)
    assert {name: len(x) for name, x in with_more.items()} == dict.fromkeys(with_more, 4)
