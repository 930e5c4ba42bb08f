"""Parts of papers.py that train: what they count, and in what order they compile."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import profiles
from common.paper import Settings
from paper_parts import _gpt, bert, gpt_large, gpt_small


def test_operations_are_those_of_the_papers_formula():
    """6 per parameter, 12 * layers * width for each token of a row, hidden ones too."""
    job = _gpt.job_of(Settings(quick=True), {"length": 64, "attention": "jax_flash"})
    program = _gpt.train_jobs.build(job, 64)
    config = _gpt.train_jobs.config_of(job, 64)
    width, words = config.width, config.vocabulary
    block = 4 * width**2 + 8 * width**2 + 2 * width  # projections, network, norms
    parameters = words * width + width + config.layers * block
    wanted = 6 * parameters + 12 * config.layers * width * 64
    assert _gpt.papers_operations(config, program.operations / 64) == pytest.approx(wanted)


def test_each_step_is_compiled_once():
    made = []
    cells = gpt_large.cells(Settings())
    ahead = _gpt.Ahead(lambda settings, cell: made.append(cell["name"]) or cell["name"])
    assert [ahead.take(Settings(), x, cells) for x in cells] == [x["name"] for x in cells]
    assert sorted(made) == sorted(x["name"] for x in cells)


@pytest.mark.parametrize("part", [gpt_large, gpt_small, bert])
def test_claims_find_their_cells(part):
    """Each claim is told once all cells have numbers."""
    numbers = {
        "tokens_per_second": 10,
        "paper_tflops": 2.0,
        "mfu": 0.5,
        "program_gb": 1.0,
        "ms": 1.0,
        "sequences_per_second": 3,
        "rows": 1,
        "words": 9,
    }
    losses = {"losses": [2.0] * 20, "validation": 2.0}
    records = [x | numbers | losses for x in part.cells(Settings())]
    assert None not in [claim.here(records) for claim in part.PART.claims]
    assert all(len(panel.lines) >= 3 for panel in part.panels(records))


@pytest.mark.parametrize("part", [gpt_large, gpt_small])
def test_a_step_that_does_not_fit_is_a_row(part):
    found = {"error": "out of memory", "losses": [2.0], "validation": 2.0}
    records = [x | found for x in part.cells(Settings())]
    assert "| out of memory |" in part.table(records)
    assert part.PART.claims[0].here(records) is None


def test_berts_loss_is_the_same_by_each_attention_and_packed():
    """Without dropout: padding changes nothing, nor does another sequence of the same row."""
    sizes = dataclasses.replace(bert.SMALL, layers=1, dropout=0.0)
    parameters = bert.initial(0, sizes, 64, 96)

    @jax.jit
    def both(parameters):
        found = []
        for way in ("xla", "jax_flash", "packed"):
            batch = bert.draw(3, 4, 64, way == "packed", 96)
            attend = bert.attention_of(way, batch, 0.0)
            loss = jax.value_and_grad(bert.loss_of)
            found.append(loss(parameters, batch, jnp.int32(0), sizes, attend))
        return found

    assert len(bert.draw(3, 4, 64, True, 96).words) < 4
    wanted, *others = both(parameters)
    for found in others:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), found, wanted
        )


def test_a_profile_tells_what_kernels_take():
    def event(name, begin, long, pid=1, tid=7):
        return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": begin, "dur": long}

    def called(name, of, pid, tid=0):
        return {"ph": "M", "pid": pid, "tid": tid, "name": name, "args": {"name": of}}

    events = [
        called("process_name", "/device:GPU:0", 1),
        called("process_name", "/host:CPU", 2),
        called("thread_name", "Stream #7(Compute)", 1, 7),
        called("thread_name", "XLA Modules", 1, 8),
        event("nvjet_tst_128x256", 0, 4000),
        event("flash_forward_sm90", 5000, 2000),
        event("loop_add_fusion_3", 7000, 1000),
        event("loop_add_fusion_3", 9000, 1000),
        event("jit_step", 0, 10000, tid=8),
        event("gemm", 0, 9000, pid=2),
    ]
    found = profiles.summary(events, 2)
    assert found["kinds"] == {"matrix products": 2.0, "attention": 1.0, profiles.OTHERS: 1.0}
    assert found["kernels"][0] == ["nvjet_tst_128x256", 2.0, 0]
    assert found["kernels"][2] == ["loop_add_fusion_3", 1.0, 1]
    assert found["span"] == 5.0
    text = "\n".join(gpt_large.profile_table(found))
    assert "| idle | 1.0 | |" in text
    assert "| a step of 5.0 ms" in text
