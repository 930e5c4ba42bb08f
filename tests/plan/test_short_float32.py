"""Short rows of float32 run on Hopper by mma.sync, in one launch, or on float16 copies."""

import dataclasses

import pytest

from jax_flash import _backends, _gpu
from jax_flash._ops import passes
from jax_flash._problem import Problem, Shapes

H200 = _gpu.spec.GPUS["H200"]
XLA, PARTS, COPIES = "xla", "parts", "copies"


def ways(sizes: tuple[int, ...], gpu: _gpu.GpuSpec = H200, **of) -> list[str]:
    """Lists what runs a forward pass, one that gradients follow, and these; fold included."""
    shapes = Shapes(*sizes, sizes[-1])
    found = passes(Problem(dtype="float32", scale=0.1, **of))
    followed = dataclasses.replace(found["forward"], gradients=("q", "k", "v"))
    answers = []
    for call in (found["forward"], followed, found["backward"]):
        if _backends.pick(call, shapes, gpu)[0] == "xla":
            answers.append(XLA)
            continue
        way = {1: PARTS, 2: COPIES}[len(_gpu.calls(call, shapes, gpu))]
        to = _gpu.folded(call, shapes, gpu)
        assert len(_gpu.calls(*to, gpu)) == len(_gpu.calls(call, shapes, gpu))
        rows = shapes.batch // to[1].batch
        answers.append(f"{way} of {rows}" if rows > 1 else way)
    return answers


@pytest.mark.parametrize(
    ("sizes", "forward", "gradients"),
    [
        ((64, 25, 25, 24, 24, 96), "parts of 2", "copies of 4"),
        ((64, 12, 12, 8, 8, 64), "parts of 4", XLA),
        ((63, 12, 12, 8, 8, 64), PARTS, XLA),  # few units: folded ones are fewer
        ((14, 32, 32, 6, 6, 72), PARTS, PARTS),
        ((14, 33, 33, 6, 6, 72), PARTS, PARTS),
        ((14, 65, 65, 6, 6, 72), PARTS, XLA),
        ((5, 67, 67, 12, 12, 56), PARTS, PARTS),
        ((19, 80, 80, 1, 1, 112), PARTS, XLA),  # which copies no heads
        ((10, 40, 40, 8, 8, 88), PARTS, XLA),
        ((23, 32, 32, 6, 6, 72), PARTS, XLA),
        ((30, 60, 60, 8, 8, 40), PARTS, PARTS),  # many blocks, which rows fill
        ((30, 48, 64, 8, 8, 64), PARTS, PARTS),
        ((30, 47, 64, 8, 8, 64), PARTS, COPIES),
        ((31, 60, 60, 8, 8, 40), PARTS, COPIES),
        ((30, 60, 60, 8, 8, 72), PARTS, COPIES),
        ((200, 64, 64, 1, 1, 64), PARTS, COPIES),
        ((162, 14, 15, 16, 16, 56), "parts of 3", "copies of 6"),
        ((64, 25, 12, 24, 24, 96), "parts of 2", XLA),  # keys have too few elements
        ((1, 32, 32, 2, 2, 64), XLA, XLA),  # which sums products
        ((3000, 4, 4, 2, 2, 64), XLA, XLA),
        ((20, 128, 128, 8, 8, 128), PARTS, COPIES),
        ((65, 128, 128, 8, 8, 128), COPIES, COPIES),
        ((20, 128, 129, 8, 8, 128), COPIES, COPIES),
        ((20, 65, 65, 8, 8, 136), COPIES, COPIES),
        ((64, 32, 32, 8, 1, 64), XLA, XLA),  # XLA copies no keys of one head
    ],
)
def test_which(sizes: tuple[int, ...], forward: str, gradients: str):
    assert ways(sizes) == [forward, gradients, gradients]


def test_gradients_beside_causality_are_copied_earlier():
    for sizes in ((226, 23, 23, 4, 4, 176), (113, 22, 22, 4, 4, 200), (110, 20, 20, 4, 4, 176)):
        assert ways(sizes, window=(None, 0))[2].startswith(COPIES)
        assert ways(sizes)[2] == XLA


def test_gradients_of_many_blocks_beside_windows():
    for sizes, window in (((60, 64, 64, 4, 4, 64), (None, 0)), ((100, 64, 64, 2, 2, 64), (10, 10))):
        assert ways(sizes, window=window) == [PARTS] * 3
    assert ways((30, 60, 60, 8, 8, 40), terms=("key_value_lengths",))[2] == COPIES


def test_not_where_it_was_not_timed():
    sizes = (64, 25, 25, 24, 24, 96)
    assert ways(sizes, softcap=2.0)[0] == XLA
    assert ways(sizes, precision="highest") == [XLA] * 3  # has no copies
    assert ways(sizes, _gpu.spec.GPUS["A100"])[0] == XLA
    assert ways((64, 25, 25, 24, 24, 96), window=(None, 0), bottom_right=True)[0] == "parts of 2"
    call = dataclasses.replace(passes(Problem("float32", 0.1))["forward"], backend="cuda")
    assert len(_gpu.calls(call, Shapes(*sizes, 96), H200)) == 2


def test_rows_with_a_window_that_counts_otherwise_are_not_folded():
    assert ways((162, 14, 15, 16, 16, 56), window=(None, 0), bottom_right=True)[0] == XLA
