"""The numpy attention that judges the others is judged here."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from .. import numpy_oracle
from ..cases import Case
from ..conformance_cases import BY_NAME

pytestmark = pytest.mark.quick

# The known answers of Random123 1.14.0 for philox4x32-7 (kat_vectors): counter, key, words.
PHILOX_ANSWERS = (
    ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
)


@pytest.mark.parametrize(("counter", "key", "words"), PHILOX_ANSWERS)
def test_philox_known_answers(counter, key, words):
    got = numpy_oracle.philox4x32(np.array(counter, np.uint32), key)
    assert tuple(int(word) for word in got) == words


def test_dropout_keeps_the_asked_share():
    keep = numpy_oracle.dropout_keep((1, 2), 0.3, 0, 0, 400, 400)
    # 160,000 draws: the standard deviation of the share is 0.0011.
    assert abs(keep.mean() - 0.7) < 0.005
    other = numpy_oracle.dropout_keep((1, 2), 0.3, 0, 1, 400, 400)
    assert 0.4 < (keep == other).mean() < 0.75  # independent heads agree on 0.58 of the places


def test_visible_by_hand():
    def rows(text):
        return np.array([[c == "x" for c in line] for line in text.split()])

    seen = numpy_oracle.visible(3, 5, window=(None, 0), bottom_right=True)
    np.testing.assert_array_equal(seen, rows("xxx.. xxxx. xxxxx"))
    seen = numpy_oracle.visible(3, 5, window=(None, 0))
    np.testing.assert_array_equal(seen, rows("x.... xx... xxx.."))
    seen = numpy_oracle.visible(4, 2, window=(None, 0), bottom_right=True)
    np.testing.assert_array_equal(seen, rows(".. .. x. xx"))
    seen = numpy_oracle.visible(4, 4, window=(1, 1), key_value_length=3)
    np.testing.assert_array_equal(seen, rows("xx.. xxx. .xx. ..x."))
    seen = numpy_oracle.visible(
        3, 4, window=(None, 0), bottom_right=True, query_length=2, key_value_length=3
    )
    np.testing.assert_array_equal(seen, rows("xx.. xxx. ...."))
    seen = numpy_oracle.visible(3, 4, window=(None, 0), query_positions=np.array([2, -1, 9]))
    np.testing.assert_array_equal(seen, rows("xxx. .... xxxx"))
    least, most = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    ends = {
        "query_positions": np.array([least, 0, most], np.int32),
        "key_value_positions": np.array([most, least, -1], np.int32),
    }
    seen = numpy_oracle.visible(3, 3, window=(2**32 - 2, 2**31 - 1), **ends)
    np.testing.assert_array_equal(seen, rows(".xx xxx x.x"))


def test_attention_by_hand():
    query = np.array([[[1.0]], [[0.0]]])  # T 2, one head of one
    key = np.log(np.array([[[1.0]], [[3.0]]]))
    value = np.array([[[4.0]], [[8.0]]])
    result = numpy_oracle.attention(query, key, value, scale=1.0)
    np.testing.assert_allclose(result.out[:, 0, 0], [(4 + 3 * 8) / 4, 6.0])
    np.testing.assert_allclose(result.lse[:, 0], [np.log(4), np.log(2)])
    result = numpy_oracle.attention(query, key, value, scale=1.0, sinks=np.log(np.array([4.0])))
    np.testing.assert_allclose(result.out[0, 0, 0], (4 + 3 * 8) / 8)


GRADIENT_CASES = (
    "causal",
    "bias n1s long",
    "bias softcap",
    "gqa sinks softcap",
    "sinks empty rows",
    "dropout lse sinks",
    "lse gqa bfloat16",
    "everything",
)


@pytest.mark.parametrize("name", GRADIENT_CASES)
def test_gradients_match_finite_differences(name):
    small = dataclasses.replace(
        BY_NAME[name], T=7, S=9, H=3, Hv=4, q_lengths=(7, 5), kv_lengths=(8, 9), dtype="float32"
    )
    arguments = small.draw()
    arrays = {n: a.astype(np.float64) if a.dtype == np.float32 else a
              for n, a in arguments.arrays.items()}  # fmt: skip
    arguments.arrays = arrays
    result = arguments.truth()

    def loss():
        at = arguments.truth(gradients=False)
        total = (at.out * arguments.dout.astype(np.float64)).sum()
        if arguments.dlse is not None:
            total += np.where(np.isfinite(at.lse), at.lse, 0).ravel() @ arguments.dlse.ravel()
        return total

    gradients = {
        "query": result.dq,
        "key": result.dk,
        "value": result.dv,
        "bias": result.dbias,
        "sinks": result.dsinks,
    }
    rng, step = np.random.default_rng(3), 1e-5
    for argument in arguments.differentiable:
        direction = rng.standard_normal(arrays[argument].shape)
        at = arrays[argument]
        arrays[argument] = at + step * direction
        above = loss()
        arrays[argument] = at - step * direction
        below = loss()
        arrays[argument] = at
        slope = (above - below) / (2 * step)
        expected = (gradients[argument] * direction).sum()
        assert abs(slope - expected) < 1e-6 * max(1.0, abs(expected)), argument


def test_padding_never_reaches_the_truth():
    case = Case("poison", T=6, S=8, H=4, q_lengths=(4,), kv_lengths=(5,), with_lse=True)
    clean, dirty = case.draw(), case.draw()
    for name, start in (("query", 4), ("key", 5), ("value", 5)):
        dirty.arrays[name][:, start:] = np.nan
    expected, got = clean.truth(), dirty.truth()
    for field in ("out", "lse", "dq", "dk", "dv"):
        np.testing.assert_array_equal(getattr(got, field), getattr(expected, field))
