"""The CUDA kernels' own text, run by tests/emulator: needs a C++ compiler and no GPU.

Each path through the kernels once, on small shapes, forward and gradients, beside float64. With
JAX_FLASH_EMULATE=1 every test of backend "cuda" runs so: see CONTRIBUTING.md.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jax_flash import _native

from ..cases import BOTTOM_RIGHT, Case, dropout_words
from ..compare import compare
from ..conformance_cases import case_id
from ..emulated_cases import BACKWARDS, IN_ORDER, C, check_orders
from ..emulator import Emulator
from ..numpy_oracle import DTYPES, dropout_keep
from ..other_kernels import AsIfLong

CASES = (
    # Tilings.
    C("head dim 64"),
    C("head dim 72 value 16", H=72, Hv=16, causal=True),
    C("head dim 128", H=128, T=260, S=300),
    C("queries held", H=128, T=330, S=530, N=4, causal=True, align=BOTTOM_RIGHT),
    C("head dim 192 value 128", H=192, Hv=128, S=600, T=70, align=BOTTOM_RIGHT, causal=True),
    C("head dim 256, one block of keys", H=256, S=60, T=150, K=1, causal=True, align=BOTTOM_RIGHT),
    C("pairs, head dim 256", H=256, S=256, T=200, N=2, K=1, causal=True),
    C("pairs, head dim 160, one pair of blocks", H=160, S=100, T=200, dtype="float16",
      causal=True, align=BOTTOM_RIGHT, deterministic=True),
    C("pairs, an odd number of blocks", H=192, Hv=128, S=9 * 64 - 3, T=70, N=1, causal=True),
    C("turns from diagonals", H=128, T=330, S=330, N=4, causal=True, deterministic=True),
    C("turns from diagonals, grouped", T=410, S=410, N=6, K=3, causal=True, deterministic=True),
    C("pairs in turns from diagonals", H=192, Hv=128, T=300, S=300, causal=True,
      deterministic=True),
    C("who adds last stores dq", H=128, T=192, S=300, N=2, K=1, deterministic=True),
    C("who adds last stores dq, from diagonals", T=384, S=384, N=3, causal=True,
      deterministic=True),
    C("pairs in turns", H=192, Hv=128, S=9 * 64 - 3, T=140, N=2, K=1, causal=True,
      deterministic=True),
    C("pairs in turns, head dim 256", H=256, S=300, T=130, N=1, deterministic=True),
    C("head dim 100 value 36", H=100, Hv=36, causal=True, deterministic=True),
    C("boxes begin early", H=60, N=4, T=200, S=150, causal=True, align=BOTTOM_RIGHT),
    C("boxes begin early, odd", H=67, Hv=33, N=8, T=70, S=90),
    C("head dim 250 value 130", H=250, Hv=130, T=130, S=140, N=1, segments="packed"),
    C("heads packed", N=8, K=2, T=40, q_lengths=(33,), kv_lengths=(180,), causal=True,
      align=BOTTOM_RIGHT),
    C("sums in dq", T=256, H=128, K=1, causal=True),
    C("rows of 16, folded", batch=(136,), T=16, S=16, N=2, K=2, causal=True),
    C("rows of 8, a mask of keys, folded", batch=(136,), T=8, S=9, N=2, K=2, mask="b11s"),
    C("rows of 2, cut, folded", batch=(67,), T=2, S=2, N=33, K=33, H=16, causal=True),
    C("rows by positions, folded", batch=(136,), T=5, S=40, N=2, K=2, causal=True,
      align=BOTTOM_RIGHT),
    C("heads by positions, folded", T=3, S=70, N=12, K=1, H=192, causal=True,
      align=BOTTOM_RIGHT),
    C("few units", N=1, S=300, causal=True, align=BOTTOM_RIGHT, dtype="float16"),
    C("few units of 128 rows", N=1, T=330), C("few units of 192 rows", N=1, T=390, S=390),
    # Which pairs there are.
    C("window", window=(70, 20), T=300, S=300, softcap=5.0),
    C("softcap far", softcap=0.5, scale=-0.3),
    C("softcap near 128", softcap=30.0, H=128, N=1, causal=True, deterministic=True),
    C("window, one block of keys", window=(20, 5), T=400, S=100, N=4, K=2),
    C("lengths, one block of keys", batch=(3,), T=300, S=100, q_lengths=(300, 0, 77),
      kv_lengths=(100, 50, 0), sinks=True),
    C("segments", segments="documents", T=300, S=300, causal=True),
    C("segments 256", H=256, segments="packed", T=100, softcap=3.0, sinks=True),
    C("positions extreme", positions="extreme", H=128, window=(50, 2**31 - 3), T=140, S=260, N=1),
    C("positions deterministic", positions="permuted", window=(90, 5), segments="packed", N=4, K=2,
      kv_lengths=(180,), deterministic=True),
    C("positions 256", H=256, positions="ties", window=(4, 2), batch=(2,), N=1, sinks=True,
      q_lengths=(150, 77), kv_lengths=(200, 50)),
    C("positions, heads packed", positions="queries", N=8, K=2, T=40, q_lengths=(33,), causal=True),
    C("heads packed, many rows", H=128, N=4, K=1, T=150, S=150, causal=True),
    C("few keys 144", H=144, N=1, T=140, S=90),
    C("few keys 224", H=224, N=1, T=140, S=138, dtype="float16"),
    C("few keys 72", H=72, N=1, T=140, S=4),
    C("positions 33", H=33, Hv=7, positions="left padding", causal=True, T=200, S=120, N=4, K=2),
    C("positions mask bias dropout", H=128, positions="striped", window=(200, 9), mask="b1ts",
      bias="11ts", dropout=0.2),
    # Masks, biases, dropout.
    C("mask", mask="bnts", T=260, S=400),
    C("mask of keys", mask="b11s", mask_density=0.4, H=128, causal=True),
    C("mask of queries", mask="1nt1", mask_density=0.5, segments="packed", T=300, S=100),
    C("blocks of 64, 128, causal", H=128, T=200, S=260, N=1, causal=True, blocks=("11", 64),
      kv_lengths=(250,)),
    C("blocks of 48, 256, mask, bias", H=256, N=1, batch=(2,), blocks=("b1", 48), mask="b11s",
      bias="11ts", deterministic=True),
    C("blocks segments dropout", H=128, T=130, N=2, blocks=("bn", 32), segments="packed",
      dropout=0.2),
    C("layout", T=400, S=520, N=2, K=1, blocks=("1n", 128), is_layout=True),
    C("layout 128", H=128, T=520, S=900, N=1, blocks=("11", 128), is_layout=True),
    C("layout 256 window", H=256, T=300, S=520, N=1, blocks=("11", 128), is_layout=True,
      window=(200, 90), kv_lengths=(500,)),
    C("score distance", score="distance", T=200, S=300),
    C("score relative", score="relative", T=200, S=300, N=1, K=1),
    C("score relative 128", score="relative", H=128, N=2, K=1, T=270, S=200, window=(150, 30)),
    C("score factors", score="factors", T=70, S=384, N=1),
    C("score factors, a part of the last block", score="factors", T=150, S=382, N=1, causal=True,
      align=BOTTOM_RIGHT),
    C("score in a loop", score="sine", T=150, S=200, N=1, causal=True),
    C("score called 128", score="sines", H=128, T=140, S=150, N=2, K=1),
    C("score called, bias", score="sines", T=70, S=136, N=1, bias="1nts", batch=(2,)),
    C("bias stored", bias="bnts", H=128, batch=(2,), T=130, S=135, N=2, K=1, softcap=3.0),
    C("bias stored causal", bias="bnts", T=200, S=136, causal=True, bias_hides=True,
      dtype="float16", deterministic=True),
    C("bias stored lengths", bias="bnts", T=150, S=138, q_lengths=(150, 70), kv_lengths=(99, 138),
      sinks=True),
    C("bias shared", bias="1nts", batch=(3,), T=130, S=136, K=1, softcap=3.0),
    C("bias shared window", bias="1nts", batch=(5,), T=140, S=140, window=(70, 20), H=128, K=1,
      deterministic=True, kv_lengths=(140, 0, 70, 100, 131), q_lengths=(140, 9, 80, 0, 110)),
    C("bias shared segments", bias="1nts", batch=(2,), T=200, S=200, segments="returning", K=1,
      dtype="float16"),
    C("bias shared mask", bias="1nts", batch=(2,), T=140, S=264, mask="bnts", mask_density=0.9,
      K=1),
    C("bias shared positions", bias="1nts", batch=(2,), T=200, S=300, positions="striped", N=1,
      causal=True),
    C("bias float32 by TMA", bias="1nts", bias_dtype="float32", batch=(2,), T=100, S=132, N=1),
    C("bias float32", bias="1n1s", bias_dtype="float32", batch=(2,), T=130, S=140),
    C("bias of queries", bias="b1t1", batch=(2,), T=130, S=100, N=2, K=1, deterministic=True),
    C("bias of heads 256", bias="n11", H=256, batch=(2,), T=70, S=90, causal=True),
    C("bias fixed", bias="1nts", batch=(9,), T=64, S=64, causal=True, fixed=("bias",)),
    C("bias shared, mask of keys, a tile", bias="1nts", mask="b11s", batch=(19,), T=64, S=64, N=3,
      K=3, H=32),
    C("bias shared, mask, two teams", bias="1nts", mask="b11s", batch=(2,), T=200, S=264, N=2, K=1,
      H=32),
    C("bias stored, mask, a tile", bias="bnts", mask="bnts", batch=(2,), T=56, S=40, N=4, K=2,
      H=64, Hv=32, mask_density=0.6, dtype="float16"),
    C("bias odd float16", bias="1nts", dtype="float16", T=99, S=131, softcap=2.0, batch=(2,)),
    C("dropout", T=150, S=700, N=2, K=1, dropout=0.1),
    C("dropout causal 128", H=128, T=260, S=500, N=1, K=1, dropout=0.3, causal=True,
      align=BOTTOM_RIGHT),
    C("dropout mask bias 128", H=128, dropout=0.2, mask="b1ts", bias="11ts", sinks=True),
    C("dropout segments 192", H=192, T=70, dropout=0.7, segments="packed", deterministic=True),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_case(case: Case, emulator: Emulator):
    check_orders(case.draw(), emulator.run)


# Kernels of long calls: what a tiling has then, its value, and cases.
LONG = {
    # A CTA adds the bias's gradients of all rows: blocks of keys keep the GPU busy.
    ("dbias_rows", True): (
        C("added", bias="1nts", batch=(3,), T=30, S=132, N=3),
        C("added, hidden", bias="1nts", batch=(2,), T=60, S=136, N=3, window=(20, 70),
          q_lengths=(60, 40), kv_lengths=(70, 136), deterministic=True),
    ),
    # Units of some heads of a group: several add to dk and dv of a block of keys.
    ("unit_heads", 1): (
        C("causal 128", N=4, K=1, H=128, Hv=80, T=260, S=300, causal=True),
        C("lengths", N=4, K=2, batch=(3,), q_lengths=(150, 0, 77), kv_lengths=(200, 50, 0)),
        C("blocks", T=200, S=400, N=2, K=1, blocks=("1n", 128), dropout=0.2),
        C("window, one block of keys", T=300, S=100, N=4, K=2, H=128, window=(70, 0)),
        C("a tile", N=4, K=1, batch=(2,), T=64, S=60, mask="b11s", mask_density=0.7),
        C("wide, lengths", T=150, S=60, N=3, K=1, H=208, kv_lengths=(50,)),
        C("wide, one block of keys", T=150, S=60, N=2, K=1, H=256, causal=True),
    ),
    ("unit_heads", 2): (
        C("deterministic", N=4, K=1, H=128, T=256, S=300, causal=True, deterministic=True),
        C("deterministic segments", N=4, K=1, H=80, segments="returning", T=300, S=300,
          causal=True, deterministic=True, dtype="float16"),
        C("wide, pairs, odd blocks", T=130, S=13 * 64 - 3, N=4, K=1, H=192, batch=(1,)),
    ),
    ("unit_heads", 4): (
        C("deterministic full", N=8, K=1, H=64, T=256, S=300, deterministic=True),
    ),
    # CTAs walk parts of the queries of a block of keys.
    ("shares", True): (
        C("few keys", T=300, S=5, N=1, K=1, H=128, dropout=0.2),
        C("few keys 64, lengths", T=390, S=100, N=1, K=1, q_lengths=(270,), kv_lengths=(70,)),
        C("few keys, bias", T=200, S=60, N=1, K=1, H=128, bias="1nts"),
        C("wide", T=200, S=64, N=1, K=1, H=160, Hv=256),
        C("causal", T=128, S=128, N=1, K=1, H=128, causal=True),
    ),
    # Gradients whose boxes begin before a head.
    ("early", True): (
        C("early", H=36, N=2, T=200, S=170, causal=True, batch=(2,)),
        C("early, two boxes", H=67, Hv=100, N=8, T=130, S=140),
    ),
    # Sums of dq in a ring, whose places are finished, cleared and used again by more sets of heads.
    ("ring_sets", 5): (
        C("ring", T=150, S=130, N=4, K=2, batch=(4,)),
        C("ring 128", H=128, Hv=64, T=90, S=300, N=1, batch=(10,), scale=-0.3, dtype="float16"),
        C("ring layout", T=140, S=260, N=4, K=2, batch=(4,), blocks=("11", 128), is_layout=True),
    ),
    ("ring_sets", 8): (C("ring causal 128", H=128, T=130, S=140, N=4, batch=(4,), causal=True),),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "field", "value"),
    [
        pytest.param(case, *has, id=f"{has[0]} {has[1]}, {case.name}")
        for has, cases in LONG.items()
        for case in cases
    ],
)
def test_gradients_of_long_calls(case: Case, field: str, value: int, emulator: Emulator):
    check_orders(
        case.draw(),
        lambda arguments, seed: emulator.run(AsIfLong(arguments, field, value), seed=seed),
    )


def test_poison_beside_units_of_some_heads(emulator: Emulator):
    """Keys that do not see a query which is not finite have the right dk and dv."""
    arguments = C("past", T=200, S=100, H=128, N=4, K=1, causal=True).draw()
    truth = arguments.truth()
    arguments.arrays["query"][:, 20, 1] = np.nan
    got = emulator.run(AsIfLong(arguments, "unit_heads", 1))
    for name, want in (("dkey", truth.dk), ("dvalue", truth.dv)):
        assert np.isnan(got[name][:, :21].astype(np.float32)).all()
        assert np.abs(got[name][:, 21:].astype(np.float64) - want[:, 21:]).max() < 4e-2


# Blocks of 80, 96 and 112 keys by the width of the values.
THREE_WIDE = (
    C("three", T=200, S=330, N=4, K=2, H=128),
    C("three 96", T=390, S=250, N=3, H=72, Hv=96, causal=True, align=BOTTOM_RIGHT),
    C("three, heads packed", T=200, S=200, N=4, K=1, H=96, causal=True),
    C("three 72 lengths", T=300, S=300, N=2, H=72, causal=True, sinks=True, q_lengths=(290,),
      kv_lengths=(170,)),
    C("three window", T=410, S=410, N=2, K=1, H=112, window=(150, 0), dtype="float16"),
    C("three second walk", T=200, S=400, N=2, H=128, causal=True, spread=150.0),
)  # fmt: skip


@pytest.mark.parametrize("case", THREE_WIDE, ids=lambda case: case.name)
def test_three_warpgroups_at_wide_heads(case: Case, emulator: Emulator):
    """Units of 192 rows, more than there are processors."""
    arguments = case.draw()
    for seed in (IN_ORDER, 2):
        long = AsIfLong(arguments, "consumers", 3)
        compare(arguments, emulator.run(long, seed=seed, gradients=False), gradients=False)


def test_mask_that_hides_whole_blocks(emulator: Emulator):
    arguments = C("blocks", mask="bnts", mask_density=0.9, H=128, T=300, S=500, N=1).draw()
    mask = arguments.arrays["mask"]
    mask[..., :128, 128:384] = False
    mask[..., 128:, :128] = True
    mask[..., 192:256, :] = False
    for seed in (IN_ORDER, BACKWARDS):
        compare(arguments, emulator.run(arguments, seed=seed))
    one = C("one block of keys", mask="bnts", T=400, S=90).draw()
    one.arrays["mask"][..., 128:256, :] = False
    compare(one, emulator.run(one))


def test_ranges_of_positions_are_enough_for_whole_blocks(emulator: Emulator):
    """Blocks that positions hide are skipped, in any order: nothing else hides them here."""
    sources = _native.kernel_sources()
    for test in (
        "score = reach[row].hold(key) ? score : kNegativeInfinity;",
        "seen[i] = seen[i] && seeing[fragment::row(i)].hold(query_at[i % 2]);",
    ):
        assert test in sources["sees_fragments.cuh"]
        sources["sees_fragments.cuh"] = sources["sees_fragments.cuh"].replace(test, "")
    arguments = C("blocks", positions="offset", H=128, T=256, S=640, N=1, window=(2, 0)).draw()
    aligned = dataclasses.replace(
        arguments,
        arrays=arguments.arrays
        | {
            "query_positions": np.repeat(np.array([[4, 2]], np.int32), 128, axis=1),
            "key_value_positions": np.repeat(np.array([[3, 0, 9, 2, 1]], np.int32), 128, axis=1),
        },
    )
    compare(aligned, emulator.run(aligned, sources=sources))
    with pytest.raises(AssertionError, match="beyond it"):
        compare(arguments, emulator.run(arguments, sources=sources))


def test_pattern_of_dropout_is_philox(emulator: Emulator):
    """Equal scores make every probability 1 / S, and an identity as value lays them open."""
    case = C("pattern", T=140, S=190, H=8, Hv=190, dropout=0.3, batch=(2,))
    arguments = case.draw()
    arguments.arrays["query"] *= 0
    arguments.arrays["value"][...] = np.eye(190, dtype=DTYPES[case.dtype])[:, None]
    out = emulator.run(arguments, seed=BACKWARDS)["out"]
    for batch in range(2):
        for head in range(case.N):
            kept = dropout_keep(dropout_words(), case.dropout, batch, head, case.T, case.S)
            np.testing.assert_array_equal(out[batch, :, head].astype(np.float32) > 0, kept)


@pytest.mark.parametrize("score", ["sine", "sines"])
def test_long_functions_of_mma_sync(score: str, emulator: Emulator):
    arguments = C("long", score=score, T=70, S=90, N=1).draw()
    compare(arguments, emulator.run(arguments, gpu="A100"))


@pytest.mark.parametrize("gpu", ["H100", "A100"])
@pytest.mark.parametrize("cap", [30.0, 1e30])
def test_softcap_of_any_size(cap: float, gpu: str, emulator: Emulator):
    """A tanh of scores beside one of -inf is as exact as by themselves, and so is a large cap's."""
    case = C("softcap", softcap=cap, bias="11ts", bias_hides=True, T=70, S=130, N=1)
    arguments = case.draw()
    compare(arguments, emulator.run(arguments, gpu=gpu))
    # One key, so that the lse is a logit, rounded beside a base of 80.
    case = C("softcap", softcap=cap, T=130, S=1, N=1)
    arguments = case.draw()
    got = emulator.run(arguments, gpu=gpu, gradients=False)["lse"]
    np.testing.assert_allclose(got, arguments.truth(gradients=False).lse, rtol=2e-6, atol=2**-17)


@pytest.mark.parametrize("dim", [64, 256])
def test_weights_that_overflow(dim: int, emulator: Emulator):
    """Units that are walked again: logits that differ by several hundred within a row."""
    arguments = C("overflow", H=dim, T=200, S=520, N=1, spread=150.0).draw()
    compare(arguments, emulator.run(arguments, seed=2))


@pytest.mark.parametrize(("dim", "spread"), [(64, 1.0), (128, 8.0)])
def test_lines_of_any_slope(dim: int, spread: float, emulator: Emulator):
    """Bases of rows that a line tells, from a level one to one too steep for that."""
    case = C("slopes", score="distance", H=dim, T=140, S=650, N=6, K=1, spread=spread)
    arguments = case.draw()
    arguments.arrays["table"][:] = [0.125, 0.02, 0.7, -0.3, 8.0, 150.0]
    compare(arguments, emulator.run(arguments, gradients=False), gradients=False)


@pytest.mark.parametrize(("dim", "causal"), [(64, False), (64, True)])
def test_keys_that_a_line_hides_are_left_out(dim: int, causal: bool, emulator: Emulator):
    """Two heads' lines fall from the diagonal on. Results show it by an infinite value alone."""
    case = C("fading", score="fall", H=dim, T=390, S=770, N=2, K=2, causal=causal)
    arguments = case.draw()
    arguments.arrays["table"][:] = [0.01, 1.5] if causal else [0.05, 1.5]
    arguments.arrays["value"][0, 3, 1, 5] = np.inf  # of the second head

    def run(sources: dict[str, str] | None = None) -> dict[str, np.ndarray]:
        fading = AsIfLong(arguments, "fades", True)
        return emulator.run(fading, gradients=False, sources=sources, seed=2)

    compare(arguments, run(), gradients=False)
    sources = _native.kernel_sources()
    reach = "spread * ptx::reciprocal_approx(slope) + 1.0f"
    assert reach in sources["sm90/forward_fading.cuh"]
    sources["sm90/forward_fading.cuh"] = sources["sm90/forward_fading.cuh"].replace(reach, "1.0f")
    with pytest.raises(AssertionError, match="beyond it"):  # blocks that count are left out
        compare(arguments, run(sources), gradients=False)


def test_values_whose_products_are_denormal(emulator: Emulator):
    """Times weights of 2^-80, which GPUs keep and XLA's threads on a CPU do not."""
    arguments = C("small", T=40, S=50, N=1).draw()
    values = arguments.arrays["value"].astype(np.float32) * np.float32(1e-13)
    arguments.arrays["value"] = values.astype(DTYPES["bfloat16"])
    compare(arguments, emulator.run(arguments, gradients=False), gradients=False)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_logits_that_leave_lse_no_bits(dtype: str, emulator: Emulator):
    """The forward pass is right; rows whose lse passes 2^24 in powers of two have no gradient."""
    arguments = C("large", T=40, S=50, N=1, dtype=dtype, scale=1e9).draw()
    got, truth = emulator.run(arguments), arguments.truth()
    assert np.abs(truth.lse).min() > 2**24
    compare(arguments, {name: got[name] for name in ("out", "lse")}, gradients=False)
    for name in ("dquery", "dkey", "dvalue"):
        np.testing.assert_array_equal(got[name].astype(np.float32), 0.0, err_msg=name)
