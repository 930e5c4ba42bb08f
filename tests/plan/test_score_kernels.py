"""Which score functions kernels take, as text or as lines of the distance, and what is refused."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jax_flash
from jax_flash import _native, scores

from ..score_texts import TABLE


def refusals(f, dtype=jnp.bfloat16, gpu="H200") -> str:
    q = jax.ShapeDtypeStruct((1, 8, 2, 8), dtype)
    made = jax_flash.explain(q, q, q, score_mod=f, gpu=gpu)
    assert made.forward.backend == "xla"
    return "; ".join(made.forward.refusals["cuda"])


def test_what_has_no_text_runs_on_xla_and_is_named():
    def loops(s, b, h, q, k):
        return lax.while_loop(lambda x: x < 3, lambda x: x + 1, s)

    arrays = [jnp.full(3, float(i)) for i in range(9)]
    assert "nothing for its primitive 'while'" in refusals(loops)
    assert "primitive 'cumsum'" in refusals(lambda s, b, h, q, k: s + jnp.cumsum(arrays[0] * s)[h])
    assert "reads 9 arrays, and kernels take up to 8" in refusals(
        lambda s, b, h, q, k: s + sum(x[h] for x in arrays)
    )
    assert "computes in float16" in refusals(
        lambda s, b, h, q, k: (s.astype(jnp.float16) * 2).astype(jnp.float32)
    )
    wide = jnp.ones((2, 60))
    assert "instructions for each score, and kernels up to 8000" in refusals(
        lambda s, b, h, q, k: (
            s + jnp.sum(functools.reduce(lambda x, _: jnp.tan(x), range(12), wide[h] * s))
        )
    )
    assert "70 elements of an array at once" in refusals(
        lambda s, b, h, q, k: s + jnp.sum(jnp.ones((2, 70))[h])
    )


def test_explain_has_the_text_and_prints_what_matters(uncompiled):
    if _native.available("cuda"):
        pytest.skip(str(_native.available("cuda")))
    q = jax.ShapeDtypeStruct((1, 128, 4, 64), jnp.bfloat16)
    made = jax_flash.explain(q, q, q, score_mod=scores.alibi(TABLE[:, 0]), gpu="H200")
    assert made.backend == "cuda"
    assert "float product, const Query& query, const Key& key)" in made.source
    assert "score_value_and_slope" in made.source
    assert "lines of CUDA: explanation.source" in str(made)
    assert "score_value(" not in str(made)
    assert len(str(made).splitlines()) < 30
    assert jax_flash.explain(q, q, q, gpu="H200").source == ""
    # A distance of positions takes no conversion.
    assert "float(" not in made.forward.kernel.plan.functions


def test_lines_of_the_distance_are_found(uncompiled):
    if _native.available("cuda"):
        pytest.skip(str(_native.available("cuda")))
    slopes = jnp.asarray(TABLE[:, 0])
    buckets = scores.relative_position_buckets(jnp.zeros((4, 16)), max_distance=99)
    reaches = {  # -1: one line for all distances
        scores.alibi(slopes): 0,
        lambda s, b, h, q, k: s + slopes[h] * (k - q): -1,
        lambda s, b, h, q, k: s + slopes[h]: -1,
        lambda s, b, h, q, k: s + slopes[h] * (jnp.float32(k) - jnp.float32(q)): -1,
        lambda s, b, h, q, k: s - jnp.abs(jnp.float32(q) - jnp.float32(k)) / 7: 0,
        lambda s, b, h, q, k: 2.0 + s - jnp.abs((q - k).astype(jnp.float32)) / 7: 0,
        lambda s, b, h, q, k: s + jnp.abs(q - k + 1): 1,
        lambda s, b, h, q, k: jnp.where(k > q, s + slopes[h], s): 1,
        lambda s, b, h, q, k: s - slopes[h] * jnp.minimum(jnp.abs(q - k), 50): 50,
        lambda s, b, h, q, k: jnp.where((q - k < 7) & (k - q <= 9), 2 * s, s - (q - k)): 10,
        lambda s, b, h, q, k: s + jnp.where(q == k, slopes[0], slopes[h]): 1,
        scores.relative_position_table(TABLE): TABLE.shape[1] // 2,
        scores.relative_position_table(jnp.zeros((4, 255))): 127,
        buckets: 99,
    }
    others = (
        lambda s, b, h, q, k: s,
        lambda s, b, h, q, k: s + slopes[h] * k,
        lambda s, b, h, q, k: s + slopes[h] * (jnp.float32(k) + jnp.float32(q)),
        lambda s, b, h, q, k: 2 * s + slopes[h] * (k - q),
        lambda s, b, h, q, k: s + slopes[k % 2] * (k - q),
        lambda s, b, h, q, k: s + jnp.sin(jnp.float32(k - q)),
        lambda s, b, h, q, k: jnp.where(k > q, s, -jnp.inf),
        # Sums that round the score, or may, which a line does not.
        lambda s, b, h, q, k: (s + 12582912.0) - 12582912.0 + 0.1 * (k - q),
        lambda s, b, h, q, k: s + ((0.1 * (k - q) + 1e8) - 1e8),
        lambda s, b, h, q, k: s + 1e8,
        lambda s, b, h, q, k: s + slopes[h] * (k - q) + slopes[b],
        lambda s, b, h, q, k: s + slopes[h] - slopes[b],
        lambda s, b, h, q, k: s - jnp.abs(q - k) / 8 - slopes[b] * (q - k),
        lambda s, b, h, q, k: s + 1e30 * (slopes[h] * (k - q)),
        scores.distance_decay(slopes, slopes),
        scores.relative_position_table(jnp.zeros((4, 257))),  # no key is so far away
    )
    q = jax.ShapeDtypeStruct((1, 128, 4, 64), jnp.bfloat16)
    for f in (*reaches, *others):
        made = jax_flash.explain(q, q, q, score_mod=f, gpu="H200")
        assert made.backend == "cuda"
        assert ("score_line_of_head" in made.source) == (f in reaches)
        assert made.forward.kernel.plan.constants["kScoreReach"] == reaches.get(f, -1)
