"""Sizes that follow from dims: as Python evaluates them, as a plan writes them."""

import random

import pytest

from jax_flash._gpu import sizes
from jax_flash._gpu.sizes import Size, evaluate, text_of

DIMS = {"B": 3, "T": 70, "S": 1, "N": 8, "K": 2, "sms": 132}
B, T, S, N, K, SMS = sizes.B, sizes.T, sizes.S, sizes.N, sizes.K, sizes.SMS


@pytest.mark.parametrize(
    ("size", "text", "value"),
    [
        (T + 1, "T 1 +", 71),
        (5 - S, "5 S -", 4),
        (B * N * 1, "B N *", 24),
        (2 * T // K, "2 T * K /", 70),
        (100 // N % K, "100 N / K %", 0),
        (sizes.ceil_div(T, 64), "T 64 ceil", 2),
        (sizes.minimum(SMS, B * N), "sms B N * min", 24),
        (sizes.maximum(T, S), "T S max", 70),
        (sizes.where(sizes.equal(S, 1), 0, T), "S 1 == 0 T ?", 0),
        (sizes.where(sizes.at_most(T, 64), 7, T + 2), "T 64 <= 7 T 2 + ?", 72),
        (sizes.product(B, T, 1), "B T *", 210),
    ],
)
def test_an_expression_is_written_and_evaluated(size, text: str, value: int):
    assert text_of(size) == text
    assert evaluate(size, DIMS) == value


def test_whole_numbers_stay_whole_numbers():
    assert sizes.ceil_div(70, 64) == 2
    assert sizes.minimum(3, 4) + sizes.maximum(3, 4) == 7
    assert sizes.where(sizes.equal(1, 1), 5, T) == 5
    assert sizes.product(2, 3) == 6


def test_what_a_size_is_cannot_decide_a_branch():
    with pytest.raises(TypeError, match="'T 1 ==' is 0 is known when the program runs"):
        bool(sizes.equal(T, 1))


def test_expressions_are_those_of_whole_numbers():
    draw = random.Random(0)
    for _ in range(300):
        size, number = draw.choice([(Size(name), n) for name, n in DIMS.items()])
        for _ in range(draw.randrange(1, 6)):
            other, n = draw.choice([(Size("T"), 70), (Size("S"), 1), (3, 3), (64, 64)])
            operation = draw.choice(
                [
                    lambda a, b: a + b,
                    lambda a, b: a * b,
                    lambda a, b: a // b,
                    lambda a, b: a % b,
                    sizes.ceil_div,
                    sizes.minimum,
                    sizes.maximum,
                    sizes.equal,
                    sizes.at_most,
                ]
            )
            size, number = operation(size, other), operation(number, n)
        assert evaluate(size, DIMS) == number
