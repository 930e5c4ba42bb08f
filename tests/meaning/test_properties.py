"""Any combination of shapes and features agrees with the truth: hypothesis draws the cases.

HYPOTHESIS_PROFILE=search draws a thousand random ones instead of the fixed few.
"""

from __future__ import annotations

import dataclasses
import math
import os

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

import jax_flash

from ..cases import Arguments, Case
from ..compare import compare
from ..conftest import BACKENDS
from ..score_functions import SCORES

SEED = int(os.environ.get("JAX_FLASH_SEED", 0))  # of the night
EXAMPLES = hypothesis.settings().max_examples
LENGTHS = st.one_of(
    st.integers(1, 20), st.sampled_from([31, 32, 33, 63, 64, 65, 127, 128, 129, 192])
)
WINDOW_SIDES = st.one_of(st.none(), st.integers(0, 40))
POSITIONS = (
    "offset", "permuted", "striped", "left padding", "ties", "extreme", "queries", "keys",
)  # fmt: skip


def axes(rank_choices=("bnts", "nts")):
    """A broadcast shape: each axis kept or 1."""

    def fill(letters):
        return st.tuples(*(st.sampled_from([letter, "1"]) for letter in letters)).map("".join)

    return st.one_of(st.none(), *(fill(letters) for letters in rank_choices))


# All but the one that is NaN for keys after the query: for a call that is causal by index. Lines of
# the distance make scores of hundreds, beside which an error of float32 is chance.
SCORE_FUNCTIONS = sorted(SCORES.keys() - {"gate"})
OF_FLOAT32 = sorted(SCORES.keys() - {"gate", "alibi", "distance"})
BLOCKS = st.tuples(st.sampled_from(["bn", "b1", "1n", "11"]), st.sampled_from([16, 48, 64, 128]))


@st.composite
def cases(draw, functions: bool = True) -> Case:
    """A call with any shapes, and each feature present or absent; functions of scores if asked."""
    kv_heads = draw(st.integers(1, 3))
    batch = draw(st.sampled_from([(), (1,), (2,), (3,), (2, 2)]))
    T, S = draw(LENGTHS), draw(LENGTHS)
    rows = max(1, math.prod(batch))
    lengths = {
        name: draw(st.one_of(st.none(), st.tuples(*[st.integers(0, size)] * rows)))
        for name, size in (("q_lengths", T), ("kv_lengths", S))
    }
    positions = draw(st.sampled_from([None, None, *POSITIONS]))
    dtype = draw(st.sampled_from(["float32", "float32", "bfloat16", "float16"]))
    known = OF_FLOAT32 if dtype == "float32" else SCORE_FUNCTIONS
    score = draw(st.sampled_from([None, None, *known])) if functions else None
    return Case(
        "drawn",
        T=T,
        S=S,
        N=kv_heads * draw(st.integers(1, 3)),
        K=kv_heads,
        H=draw(st.sampled_from([1, 7, 8, 16, 33, 64, 128, 200])),
        Hv=draw(st.sampled_from([None, None, 1, 5, 16, 48])),
        batch=batch,
        dtype=dtype,
        causal=draw(st.booleans()),
        align="top_left" if positions else draw(st.sampled_from(["top_left", "bottom_right"])),
        positions=positions,
        window=draw(st.one_of(st.none(), st.tuples(WINDOW_SIDES, WINDOW_SIDES))),
        bias=draw(axes()),
        bias_hides=draw(st.booleans()),
        mask=draw(axes()),
        mask_density=draw(st.sampled_from([0.1, 0.7, 0.97])),
        segments=draw(st.sampled_from([None, None, "packed", "shuffled"])),
        blocks=draw(st.one_of(st.none(), st.none(), BLOCKS)),
        softcap=None if score else draw(st.sampled_from([None, None, 2.0])),
        score=score,
        sinks=draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.0, 0.3])),
        with_lse=draw(st.booleans()),
        deterministic=draw(st.booleans()),
        **lengths,
    )


@hypothesis.given(case=cases())
@hypothesis.settings(max_examples=-(-EXAMPLES // 2))  # each is compiled
def test_any_case_on_xla(case):
    arguments = case.draw()
    compare(arguments, arguments.run("xla"))


@hypothesis.given(case=cases(functions=False))
@hypothesis.settings(max_examples=2 * EXAMPLES)
def test_any_case_on_cpu(case):
    arguments = case.draw()
    compare(arguments, arguments.run("cpu"))


@pytest.mark.parametrize("seed", range(4))  # side by side: each case has kernels of its own
@pytest.mark.parametrize("backend", [x for x in BACKENDS if x.values == ("cuda",)])
def test_any_case_on_cuda(backend, seed):
    @hypothesis.seed(4 * SEED + seed)
    @hypothesis.settings(derandomize=False, database=None, max_examples=EXAMPLES // 3)
    @hypothesis.given(case=cases())
    def check(case):
        arguments = dataclasses.replace(case, precision="highest").draw()
        compare(arguments, arguments.run(backend))

    check()


@hypothesis.given(case=cases(), data=st.data())
def test_order_of_keys_does_not_matter(case, data):
    """Keys, values, and everything indexed by key permuted together: the same attention."""
    plain = Case(
        "permuted", T=case.T, S=case.S, N=case.N, K=case.K, H=case.H, batch=(2,),
        mask="bnts", bias="1nts", segments="shuffled", sinks=case.sinks, with_lse=True,
        positions="offset", causal=True, window=(30, None),
    )  # fmt: skip
    order = np.array(data.draw(st.permutations(range(case.S))))
    arguments = plain.draw()
    shuffled = dict(arguments.arrays)
    for name, axis in (
        ("key", 1), ("value", 1), ("mask", 3), ("bias", 3), ("key_value_segment_ids", 1),
        ("key_value_positions", 1),
    ):  # fmt: skip
        shuffled[name] = np.take(shuffled[name], order, axis)
    again = Arguments(plain, shuffled, arguments.options, arguments.dout, arguments.dlse)
    first, second = arguments.run("cpu"), again.run("cpu")
    for name in ("out", "lse", "dquery"):
        np.testing.assert_allclose(second[name], first[name], atol=2e-5, rtol=1e-4)
    np.testing.assert_allclose(second["dkey"], first["dkey"][:, order], atol=2e-5, rtol=1e-4)


@hypothesis.given(case=cases(), cut=st.floats(0.0, 1.0))
def test_two_halves_of_the_keys_merge_by_lse(case, cut):
    """softmax over all keys = the halves weighted by exp(lse), empty halves included."""
    T, S = case.T, case.S
    at = round(cut * S)
    q, k, v = (
        np.random.default_rng(0).standard_normal((1, length, 2, 8)).astype(np.float32)
        for length in (T, S, S)
    )
    call = jax.jit(
        lambda q, k, v, mask: jax_flash.flash_attention(
            q, k, v, mask=mask, return_lse=True, backend="cpu"
        )
    )
    mask = np.random.default_rng(1).random((1, 2, T, S)) < 0.6
    whole, whole_lse = map(np.asarray, call(q, k, v, mask))
    halves = [call(q, k[:, s], v[:, s], mask[..., s]) for s in (slice(0, at), slice(at, S))]
    outs, lses = (np.stack([np.asarray(half[i], np.float64) for half in halves]) for i in (0, 1))
    with np.errstate(divide="ignore"):
        merged_lse = np.logaddexp(*lses)
    np.testing.assert_allclose(merged_lse, whole_lse, atol=1e-5)
    weights = np.where(
        np.isneginf(lses), 0, np.exp(lses - np.where(np.isneginf(merged_lse), 0, merged_lse))
    )
    np.testing.assert_allclose((weights[..., None] * outs).sum(0), whole, atol=1e-5)
