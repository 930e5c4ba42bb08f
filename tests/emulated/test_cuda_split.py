"""float32 in products of 16 bits, on the host: the arithmetic of cuda/kernels/split.cuh.

The emulator adds products without error. Here the tensor cores are at their worst: of 8 products
and the number that they are added to, all bits below the 24 of the largest are cut off. Fasi et
al., "Numerical behavior of NVIDIA tensor cores" (PeerJ Computer Science, 2021).
"""

from __future__ import annotations

import numpy as np
import pytest

from ..numpy_oracle import DTYPES

F32 = np.float32


def split(x: np.ndarray, parts: int) -> list[np.ndarray]:
    """The parts of float32 numbers, as split_pair makes them."""
    made, left = [], x.astype(F32)
    for _ in range(parts):
        made.append(left.astype(DTYPES["bfloat16"]).astype(F32))
        left = left - made[-1]
    return made


def accumulate(start: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """start [M, N] + a [M, 16] b [16, N]."""
    for first in (0, 8):
        columns = slice(first, first + 8)
        terms = a[:, None, columns].astype(np.float64) * b.T[None, :, columns]
        terms = np.concatenate([terms, start[..., None]], axis=-1)
        largest = np.abs(terms).max(axis=-1, keepdims=True)
        unit = np.exp2(np.floor(np.log2(np.maximum(largest, 1e-300))) - 23)
        exact = (np.trunc(terms / unit) * unit).sum(axis=-1)
        # What is left is a float32 again, cut off as well.
        unit = np.exp2(np.floor(np.log2(np.maximum(np.abs(exact), 1e-300))) - 23)
        start = np.trunc(exact / unit) * unit
    return start


def product(a: np.ndarray, b: np.ndarray, parts: int) -> np.ndarray:
    """a [M, K] b [K, N] as multiply_parts adds it up, 16 columns of a at a time."""
    total = np.zeros((a.shape[0], b.shape[1]), F32)
    for first in range(0, a.shape[1], 16):
        columns = slice(first, first + 16)
        left, right = split(a[:, columns], parts), split(b[columns], parts)
        part = np.zeros(total.shape)
        for order in range(parts)[::-1]:
            for i in range(order + 1):
                part = accumulate(part, left[i], right[order - i])
        total += part.astype(F32)
    return total


def halves(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Two float16 of each number of a tile, and what brings them back, as split_tile makes them."""
    largest = np.abs(x).max()
    factor = np.exp2(14 - np.floor(np.log2(largest))) if largest > 0 else 1.0
    x = (x * factor).astype(F32)
    high = x.astype(np.float16).astype(F32)
    return high, ((x - high) * F32(2048)).astype(np.float16).astype(F32), float(1 / factor)


def product_of_halves(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a [M, K] b [K, N] as HalvesSum adds it up, 32 columns of a at a time."""
    total = np.zeros((a.shape[0], b.shape[1]), F32)
    (a, a_low, a_factor), (b, b_low, b_factor) = halves(a), halves(b)
    zero, factor = np.zeros(total.shape), F32(a_factor * b_factor)
    for first in range(0, a.shape[1], 32):
        large, small = zero, zero
        for columns in (slice(first, first + 16), slice(first + 16, first + 32)):
            small = accumulate(small, a[:, columns], b_low[columns])
            small = accumulate(small, a_low[:, columns], b[columns])
            large = accumulate(large, a[:, columns], b[columns])
        total = total + (small * factor / 2048).astype(F32)
        total = total + (large * factor).astype(F32)
    return total


def attention(q, k, v, multiply) -> np.ndarray:
    scores = multiply(q, k.T)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return multiply(weights, v) / weights.sum(axis=-1, keepdims=True)


@pytest.fixture(scope="module")
def operands() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((rows, 64)).astype(F32) for rows in (8, 1024, 1024))
    v += 1  # what is cut off does not cancel
    return q * F32(0.25), k, v


def error(operands: tuple[np.ndarray, ...], multiply) -> float:
    truth = attention(*(x.astype(np.float64) for x in operands), np.matmul)
    return float(np.abs(attention(*operands, multiply) - truth).max())


def test_three_parts_are_as_exact_as_float32(operands):
    assert error(operands, lambda a, b: product(a, b, 3)) < 2 * error(operands, np.matmul)


def test_halves_are_as_exact_as_float32(operands):
    assert error(operands, product_of_halves) < 2 * error(operands, np.matmul)


def test_halves_hold_22_bits_of_a_number_or_51_of_the_largest():
    rng = np.random.default_rng(1)
    x = (rng.standard_normal(1000) * np.exp2(rng.uniform(-60, 60, 1000))).astype(F32)
    high, low, factor = halves(x)
    left = np.abs(x - (high.astype(np.float64) + low / 2048.0) * factor)
    assert (left <= np.maximum(2.0**-22 * np.abs(x), 2.0**-50 * np.abs(x).max())).all()


def test_two_parts_are_much_more_exact_than_tf32(operands):
    def tf32(x):
        bits = x.astype(F32).view(np.uint32)
        return ((bits + 0xFFF + (bits >> 13 & 1)) & np.uint32(0xFFFFE000)).view(F32)

    plain = error(operands, lambda a, b: tf32(a) @ tf32(b))
    assert error(operands, lambda a, b: product(a, b, 2)) < plain / 8


@pytest.mark.parametrize("parts", [2, 3])
def test_parts_hold_the_number(parts: int):
    x = np.random.default_rng(1).standard_normal(1000).astype(F32)
    left = np.abs(x - np.sum(split(x, parts), axis=0, dtype=np.float64))
    assert (left <= (0 if parts == 3 else 2.0**-17) * np.abs(x)).all()
