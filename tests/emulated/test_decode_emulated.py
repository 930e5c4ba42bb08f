"""The CUDA kernels of decoding, run by tests/emulator: needs a C++ compiler and no GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jax_flash import _native

from ..chosen_cases import CASES as CHOSEN
from ..chosen_cases import Case as Chosen
from ..chosen_cases import fit as fit_chosen
from ..decode_cases import (
    CASES,
    RINGS,
    UNALIGNED,
    Case,
    Tiled,
    check_newest_values,
    compare,
    fit,
)
from ..emulator import Emulator

SHORT = {"dtype": "bfloat16", "H": 64}  # of heads
TILED = (
    # kv heads of a CTA, whose boxes are of 8 positions.
    (Case("two heads", T=5, N=8, K=4, page=16, **SHORT), {"heads": 2, "box_rows": 8}),
    (Case("four heads", N=16, K=4, window=70, **SHORT), {"heads": 4, "block_kv": 32}),
    # Boxes of a part of a block, of a cache whose end is within one.
    (Case("small boxes", N=8, K=4, H=128, window=70, dtype="bfloat16"),
     {"block_kv": 128, "box_rows": 32}),
    (Case("small boxes of a cluster", T=2, N=4, H=128, rotary=100.0, dtype="float16"),
     {"cluster": 2, "block_kv": 128, "box_rows": 32}),
    (Case("two heads of 32 rows", T=8, N=16, K=4, **SHORT), {"heads": 2, "row_tiles": 2}),
    # Query rows that CTAs share the keys of, and more parts than a row has blocks.
    (Case("groups of rows", T=7, N=16, K=2, softcap=3.0, **SHORT), {"rounds": 9}),
    (Case("wide", T=3, H=256, N=8, sinks=True, dtype="float16"), {}),
    # CTAs of a cluster share a row; one more and it would have no block.
    (Case("cluster", T=3, N=8, K=4, **SHORT), {"cluster": 2}),
    (Case("cluster of three", T=2, N=4, K=1, sinks=True, page=16, **SHORT), {"cluster": 3}),
    (Case("cluster rotates", T=5, N=4, page=12, rotary=100.0, dtype="float16"), {"cluster": 2}),
    (Case("rotated ahead", T=3, H=24, rotary=100.0, dtype="bfloat16"), {}),
    (Case("values wider than keys", T=2, H=72, Hv=320, dtype="bfloat16"), {}),
)  # fmt: skip


# Cases whose paths the tiled ones take.
COVERED = {
    "one token", "heads without groups, nothing new", "group of 16", "group of 3, odd dims",
    "64 tokens", "window", "softcap and sinks", "rotary", "pages", "pages of one, nothing new",
}  # fmt: skip
OTHERS = [fit(case, "cuda") for case in CASES if case.name not in COVERED]
RUN = [*TILED, *((case, {}) for case in OTHERS)]


# Where blocks come by cp.async: in every way that a block can lie.
SINCE_AMPERE = (
    Case("rows", T=5, N=8, K=4, **SHORT),
    Case("pages of 5", T=2, N=4, K=2, page=5, rotary=100.0, **SHORT),
    Case("pages, wide", T=3, H=256, N=8, page=16, window=70, dtype="float16"),
    Case("odd ends", T=2, H=72, Hv=40, N=4, K=2, sinks=True, dtype="bfloat16"),
    Case("values wider than keys", T=2, H=72, Hv=320, dtype="bfloat16"),
    *UNALIGNED,
    *(
        x
        for x in CASES
        if x.name in ("group of 3, odd dims", "64 tokens", "latent, several tokens")
    ),
)


@pytest.mark.parametrize(
    ("case", "seed"),
    [(case, (0, 3)[i % 2]) for i, case in enumerate(SINCE_AMPERE)],
    ids=[case.name.replace(" ", "-") for case in SINCE_AMPERE],
)
def test_since_ampere(case: Case, seed: int, emulator: Emulator):
    arguments = case.draw()
    got = emulator.run(Tiled(arguments, {}), seed=seed, gpu="RTX 4090")  # type: ignore[arg-type]
    compare(arguments, got)


def test_since_ampere_four_heads_share_a_block(emulator: Emulator):
    arguments = Case("four heads", N=16, K=4, page=8, **SHORT).draw()
    tiled = Tiled(arguments, {"heads": 4, "block_kv": 32})
    compare(arguments, emulator.run(tiled, gpu="A100"))  # type: ignore[arg-type]


@pytest.mark.parametrize("case", UNALIGNED, ids=[case.name for case in UNALIGNED])
def test_what_others_left_in_shared_memory(case: Case, emulator: Emulator):
    """Each block has a CTA of its own: behind a row's end is what another kernel left.

    The largest float32, which rounds to an infinite bfloat16; as 16 bits the half of it is NaN.
    """
    arguments = case.draw()
    tiled = Tiled(arguments, {"rounds": 20})
    compare(arguments, emulator.run(tiled, garbage=0x7F7FFFFF))  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", ["highest", "default"])
def test_the_largest_values_of_float32(precision: str, emulator: Emulator):
    """They round to an infinite bfloat16; where they are seen they are part of a mean.

    The very largest would be no sum of two parts.
    """
    case = Case("largest", N=4, K=2, H=32, Hv=20, lengths=(70, 9), precision=precision)
    arguments = case.draw()
    for b, n in enumerate(case.lengths):
        for row, head, column, sign in ((-1, 0, 3, 1), (n // 2, 1, 5, -1), (0, 1, 6, 1)):
            value = sign * np.uint32(0x7F7F9000).view(np.float32)
            arguments.values[b][row, head, column] = value
            to = arguments.new["value"][b] if row == -1 else arguments.cache["value"][b]
            to[row, head, column] = value
    got = emulator.run(arguments)
    error = 1e-5 if precision == "highest" else 1e-3
    np.testing.assert_allclose(got.out, arguments.truth()[0], rtol=error, atol=error)


@pytest.mark.parametrize(
    ("case", "tiling"), RUN, ids=[case.name.replace(" ", "-") for case, _ in RUN]
)
def test_case(case: Case, tiling: dict[str, Any], emulator: Emulator):
    arguments = case.draw()
    got = emulator.run(Tiled(arguments, tiling), seed=2)  # type: ignore[arg-type]
    compare(arguments, got)


LATE = 5  # a seed with which a block may be there before the one in front of it


@pytest.mark.parametrize("seed", [2, LATE])
@pytest.mark.parametrize(("case", "tiling"), RINGS, ids=[case.name for case, _ in RINGS])
def test_teams_take_turns(case: Case, tiling: dict[str, int], seed: int, emulator: Emulator):
    arguments = case.draw()
    tiled = Tiled(arguments, tiling)
    compare(arguments, emulator.run(tiled, seed=seed))  # type: ignore[arg-type]


def test_teams_see_the_blocks_of_others_come(emulator: Emulator):
    sources = _native.kernel_sources()
    wait = (
        "    Loader::wait(ptx::shared_address(shared.full) + ring.barrier_offset(), ring.parity());"
    )
    assert sources["decode_cta.cuh"].count(wait) == 1
    sources["decode_cta.cuh"] = sources["decode_cta.cuh"].replace(wait, "")
    case, tiling = RINGS[0]
    tiled = Tiled(case.draw(), tiling)
    with pytest.raises(RuntimeError, match="where 0 of 1 are missing"):
        emulator.run(tiled, seed=LATE, sources=sources)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_values_reach_the_queries_that_see_them_alone(dtype: str, emulator: Emulator):
    like = "cuda" if dtype == "bfloat16" else "xla"
    check_newest_values(lambda arguments: emulator.run(Tiled(arguments, {})), like)  # type: ignore


def test_an_infinite_value_of_float32_gives_infinity(emulator: Emulator):
    arguments = Case("infinite", appends=False, lengths=(200, 1)).draw()
    arguments.cache["value"][0, 10, 0, 3] = np.inf  # in a block that is seen whole
    got = emulator.run(Tiled(arguments, {}))  # type: ignore[arg-type]
    assert np.all(got.out[0, :, :2, 3] == np.inf)
    assert np.isfinite(got.out).sum() == got.out.size - 2


@pytest.mark.parametrize(("case", "gpu"), [(CHOSEN[1], "H100"), (CHOSEN[3], "RTX 4090")])
def test_chosen_keys(case: Chosen, gpu: str, emulator: Emulator):
    """Rows of one query, of pages of one position, for tokens whose keys are not neighbours."""
    drawn = fit_chosen(case, "cuda").draw()
    drawn.compare(*emulator.run(drawn, gpu=gpu, seed=2))  # type: ignore[arg-type]
