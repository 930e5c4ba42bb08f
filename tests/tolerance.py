"""How far a result may be from the truth: a multiple of plain attention's own rounding error.

The criterion of FlashAttention's own tests: the error against float64 is at most 2 x (forward) or
3 x (gradients) the error of plain attention computed in the same precision, plus a small floor.
"""

from __future__ import annotations

import numpy as np

from .numpy_oracle import DTYPES

FORWARD_FACTOR = 2.0
GRADIENT_FACTOR = 3.0
# Roundings of the largest value that are granted even where plain attention happens to be exact.
FLOOR_ROUNDINGS = {"float32": 16, "bfloat16": 2, "float16": 2}


def epsilon(dtype: str) -> float:
    """The distance from 1 to the next number of the type."""
    return {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}[
        dtype
    ]


def tf32(x: np.ndarray) -> np.ndarray:
    """Rounds float32 to the 11 bits of TF32."""
    bits = x.view(np.uint32)
    return ((bits + 0xFFF + (bits >> 13 & 1)) & np.uint32(0xFFFFE000)).view(np.float32)


def max_error(got: np.ndarray, truth: np.ndarray) -> float:
    """The largest absolute difference; infinities must agree exactly, and NaN is infinitely far."""
    got, truth = np.asarray(got).astype(np.float64), np.asarray(truth).astype(np.float64)
    if got.size == 0:
        return 0.0
    same = got == truth  # also equal infinities
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0.0, np.abs(got - truth))
    return float(np.where(np.isnan(difference), np.inf, difference).max())


def check(
    name: str,
    got,
    truth: np.ndarray,
    plain: np.ndarray,
    dtype: str,
    factor: float,
    summed: float = 0.0,
    rounded: float = 0.0,
) -> None:
    """Raises AssertionError when `got` is further from `truth` than the criterion allows.

    Args:
        name: what is compared, for the message.
        got: the result, of the shape of truth.
        truth: float64.
        plain: the same quantity by plain attention with every step rounded to `dtype`.
        dtype: the precision whose rounding is granted.
        factor: FORWARD_FACTOR or GRADIENT_FACTOR.
        summed: the largest sum of magnitudes behind one value: sums are accumulated in float32,
            and where their terms cancel (a softmax over one key has no gradient) that remains.
        rounded: the root of the sum of squares of terms that were rounded to `dtype`; four
            standard deviations of that sum's error are granted.
    """
    got = np.asarray(got)
    assert got.shape == truth.shape, f"{name}: shape {got.shape}, expected {truth.shape}"
    finite = np.abs(truth[np.isfinite(truth)])
    largest = float(finite.max()) if finite.size else 0.0
    floor = FLOOR_ROUNDINGS[dtype] * epsilon(dtype) * largest + 2 * epsilon("float32") * summed
    floor += 4 * epsilon(dtype) * rounded / 12**0.5
    allowed = factor * max_error(plain, truth) + floor
    error = max_error(got, truth)
    if error > allowed:
        difference = np.abs(np.where(got == truth, 0.0, got.astype(np.float64) - truth))
        difference = np.where(np.isnan(difference), np.inf, difference)
        at = tuple(int(i) for i in np.unravel_index(difference.argmax(), difference.shape))
        raise AssertionError(
            f"{name}: error {error:.3e} at {at} (got {got[at]}, truth {truth[at]:.6g}), allowed "
            f"{allowed:.3e} = {factor:g} x plain {dtype} attention's {max_error(plain, truth):.3e} "
            f"+ {floor:.1e}; {int((difference > allowed).sum())} of {difference.size} beyond it"
        )


__all__ = ["DTYPES", "FORWARD_FACTOR", "GRADIENT_FACTOR", "check", "epsilon", "max_error", "tf32"]
