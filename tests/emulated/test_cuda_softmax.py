"""The forward kernel's softmax at the ends of float32's range: its text runs on the host.

One warp, 16 rows, walks blocks of 64 keys as on a GPU (fake_warp.cc). A row that it gives up, with
an lse of +inf, is walked again with a maximum in every block, and then computed by itself; no row
may be wrong without that.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from .. import fake_warp

ROWS, KEYS = 16, 64
LOG2E = np.float32(1.4426950408889634)
DTYPES = ("bfloat16", "float16")

pytestmark = pytest.mark.skipif(fake_warp.COMPILER is None, reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return fake_warp.build(tmp_path_factory.mktemp("warp"))


@dataclasses.dataclass
class Result:
    out: np.ndarray  # [ROWS]
    lse: np.ndarray  # [ROWS]
    rises: int  # blocks after which results were corrected

    @property
    def lost(self) -> np.ndarray:
        """Rows that the kernel computes again: overflow, or a result that is not finite."""
        return (self.lse == np.inf) | ~np.isnan(self.lse) & ~np.isfinite(self.out)


def walk(
    library: ctypes.CDLL,
    scores: np.ndarray,
    dtype: str = "bfloat16",
    *,
    scale_log2: float = 1.0,
    second: bool = False,
    half: bool = False,
    sink: float = np.nan,
) -> Result:
    """Walks scores [ROWS, blocks, KEYS], masked ones -inf, from the first block to the last."""
    scores = np.ascontiguousarray(scores, np.float32)
    values = np.ascontiguousarray(draw_values(scores), np.float32)
    out, lse = np.empty((2, ROWS), np.float32)
    pointer = ctypes.POINTER(ctypes.c_float)
    rises = library.Run(
        scores.ctypes.data_as(pointer),
        values.ctypes.data_as(pointer),
        ctypes.c_int(scores.shape[1]),
        ctypes.c_float(scale_log2),
        ctypes.c_bool(dtype == "bfloat16"),
        ctypes.c_bool(second),
        ctypes.c_bool(half),
        ctypes.c_float(sink),
        out.ctypes.data_as(pointer),
        lse.ctypes.data_as(pointer),
    )
    return Result(out, lse, rises)


def draw_values(scores: np.ndarray) -> np.ndarray:
    return np.random.default_rng(7).choice([-2.0, -1.0, 1.0, 3.0], size=scores.shape[1:])


def check(result: Result, scores: np.ndarray, scale_log2: float = 1.0, sink: float = np.nan):
    """Compares the rows that are not given up with float64."""
    x = np.float32(scores).astype(np.float64) * np.float64(np.float32(scale_log2))
    x = x.reshape(ROWS, -1)
    if not np.isnan(sink):
        x = np.concatenate([x, np.full((ROWS, 1), sink)], axis=1)
    values = np.append(draw_values(scores).ravel(), [0.0] * (not np.isnan(sink)))
    largest = np.maximum(x.max(axis=1), -1e300)
    weights = np.exp2(x - largest[:, None])
    total = weights.sum(axis=1)
    seen = np.isfinite(scores.reshape(ROWS, -1)).any(axis=1)
    out = np.where(seen, weights @ values / np.maximum(total, 1e-300), 0)
    with np.errstate(divide="ignore"):
        lse = np.where(seen, (largest + np.log2(total)) * np.log(2), -np.inf)
    kept = ~result.lost
    np.testing.assert_allclose(result.out[kept], out[kept], atol=3 * 2**-8)
    np.testing.assert_allclose(result.lse[kept], lse[kept], rtol=3e-7, atol=1e-5)


def check_both_walks(library: ctypes.CDLL, scores: np.ndarray, dtype: str) -> Result:
    first = walk(library, scores, dtype)
    check(first, scores)
    check(walk(library, scores, dtype, second=True), scores)
    return first


def normal(blocks: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(ROWS, blocks, KEYS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0, 10.0])
def test_no_row_is_given_up(library: ctypes.CDLL, dtype: str, spread: float):
    scores = normal(6) * spread
    assert not check_both_walks(library, scores, dtype).lost.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [40.0, 200.0, 3000.0])
def test_peaked_rows(library: ctypes.CDLL, dtype: str, spread: float):
    check_both_walks(library, normal(6) * spread, dtype)


def test_normal_rows_take_no_maximum(library: ctypes.CDLL):
    assert walk(library, normal(8) * LOG2E).rises == 0


@pytest.mark.parametrize("bits", [5, 12, 40, 100, 126, 130, 170, 200])
def test_growth_that_bfloat16_holds(library: ctypes.CDLL, bits: float):
    """A jump of one block, and of one row alone, by fewer than 2^206."""
    scores = normal(4)
    scores[:, 2] += bits
    scores[3, 1] += bits
    result = check_both_walks(library, scores, "bfloat16")
    assert not result.lost.any()
    assert (result.rises > 0) == (bits >= 40)  # 2^12 times many weights: none decides


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", [3.0, 7.9, -7.9, 11.0])
def test_slow_growth(library: ctypes.CDLL, dtype: str, step: float):
    """At most 2^8 a block raises no base by itself."""
    scores = normal(18) * 0.3 + step * np.arange(18)[:, None]
    result = check_both_walks(library, scores, dtype)
    assert not result.lost.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [126, 127, 128, 205, 206, 207, 208, 300, 5000])
def test_growth_at_the_end_of_the_range(library: ctypes.CDLL, dtype: str, bits: float):
    scores = normal(5) * 0.1
    scores[:8, 2:] += bits
    scores[4:12, 3:] += bits
    check_both_walks(library, scores, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponent", range(20, 34))
def test_large_scores(library: ctypes.CDLL, exponent: int, dtype: str):
    """Scores that float32 holds to whole numbers, and the rounding of bases among them."""
    rng = np.random.default_rng(exponent)
    for sign in (1.0, -1.0):
        base = sign * 2.0**exponent * rng.uniform(1, 2, size=(ROWS, 1, 1))
        steps = rng.choice([0.0, 3.0, 60.0, 127.0, 150.0, 2.0 ** (exponent - 2)], (ROWS, 4, 1))
        scores = np.float32(base + steps * rng.integers(-1, 2, size=(ROWS, 4, KEYS)))
        check_both_walks(library, scores, dtype)


@pytest.mark.parametrize(
    "scores", [(2.2259973e8, 2.914191e8), (4.9194196e7, 4.9194284e7), (1.0737418e9, 1.0737418e9)]
)
def test_two_large_scores(library: ctypes.CDLL, scores: tuple[float, float]):
    """A second walk whose rounded weights look like a rise; bases that rise by 2^127; one key."""
    rows = np.full((ROWS, 2, KEYS), -np.inf, np.float32)
    rows[:, :, 0] = scores
    for second in (False, True):
        check(walk(library, rows, second=second, scale_log2=LOG2E), rows, LOG2E)


def rows_of(*blocks: dict[int, float]) -> np.ndarray:
    """Rows that are all the same, of the weights of some keys of each block."""
    scores = np.full((ROWS, len(blocks), KEYS), -np.inf)
    for block, weights in enumerate(blocks):
        for key, weight in weights.items():
            scores[:, block, key] = np.log2(weight)
    return scores


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("last", "rises"), [({6: 14.0}, 0), ({6: 20.0}, 1), ({6: 20.0, 7: 20.0}, 0)]
)
def test_weights_that_decide_a_row(
    library: ctypes.CDLL, dtype: str, last: dict[int, float], rises: int
):
    """A weight that is nearly all of a thread's sum may be little of its row's; no pair decides."""
    scores = rows_of(dict.fromkeys(range(KEYS), 1.0), last)
    result = walk(library, scores, dtype)
    check(result, scores)
    assert result.rises == rises


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_that_decides_a_row_beside_others_of_its_thread(library: ctypes.CDLL, dtype: str):
    scores = rows_of({6: 1.0}, {6: 39.1, 14: 14.0, 22: 8.2}, {7: 54.5})
    result = walk(library, scores, dtype)
    check(result, scores)
    assert result.rises == 2


def test_the_largest_weight_is_one_in_the_sum_too(library: ctypes.CDLL):
    """A base in the thousands is rounded; in float16 too a single key's value is the result."""
    scores = rows_of({3: 1.0}, {20: 1.0})
    scores[:, 0, 3] = 0
    scores[:, 1, 20] = np.random.default_rng(3).uniform(3000, 5600, ROWS)
    scale = float(LOG2E)
    result = walk(library, scores, "float16", scale_log2=scale, second=True)
    np.testing.assert_allclose(result.out, draw_values(scores)[1, 20], rtol=5e-7)
    check(result, scores, scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("late", [0.0, 50.0, 250.0])
def test_rows_that_see_their_first_key_late(library: ctypes.CDLL, dtype: str, late: float):
    scores = normal(5) * 2
    for row in range(ROWS):
        scores[row, : row % 6] = -np.inf
    scores[:, 3:] += late
    result = check_both_walks(library, scores, dtype)
    assert (result.lse[5::6] == -np.inf).all()
    assert (result.out[5::6] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sink", [-300.0, 0.0, 5.0, 120.0])
def test_sinks(library: ctypes.CDLL, dtype: str, sink: float):
    scores = normal(3) * 4
    check(walk(library, scores, dtype, sink=sink), scores, sink=sink)


@pytest.mark.parametrize("dtype", DTYPES)
def test_half_of_the_first_block(library: ctypes.CDLL, dtype: str):
    scores = normal(3)
    scores[:, 0, KEYS // 2 :] = -np.inf
    unmasked = np.where(np.isinf(scores), np.nan, scores)  # what is hidden there is not looked at
    found, whole = walk(library, unmasked, dtype, half=True), walk(library, scores, dtype)
    np.testing.assert_array_equal(found.out, whole.out)
    np.testing.assert_array_equal(found.lse, whole.lse)


@pytest.mark.parametrize("change", [lambda x: np.nan, lambda x: np.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("block", [0, 2])
def test_visible_scores_that_are_not_finite(
    library: ctypes.CDLL, change: Callable[[float], float], block: int
):
    """Such a row has a NaN lse, or is given up; its neighbours do not notice."""
    scores = normal(4)
    scores[5, block, 9] = change(0)
    for second in (False, True):
        found = walk(library, scores, second=second)
        assert np.isnan(found.lse[5]) or found.lost[5]
        found.lse[5] = np.inf
        scores_without = np.where(np.isfinite(scores), scores, 0)
        check(found, scores_without)
