"""The table of conformance cases: what is asked of every backend."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Sequence

from .cases import BOTTOM_RIGHT, Case

C = Case
HALF = "bfloat16"

CASES: tuple[Case, ...] = (
    # Every feature alone, in float32.
    C("plain"),
    C("plain cross", T=48, S=80),
    C("scale", scale=0.3),
    C("negative scale", scale=-0.2),
    C("peaked", spread=12.0),
    C("causal", causal=True),
    C("window", window=(7, 5)),
    C("window int", window=9),
    C("window left only", window=(6, None)),
    C("window right only", window=(None, 6)),
    C("window of one", window=(0, 0)),
    C("window wider than all", window=(500, 500)),
    C("bias", bias="bnts"),
    C("mask", mask="bnts"),
    C("mask sparse", mask="bnts", mask_density=0.03),
    C("mask nothing", mask="bnts", mask_density=0.0),
    C("query lengths", q_lengths=(64, 13)),
    C("key lengths", kv_lengths=(29, 64)),
    C("lengths", q_lengths=(50, 0), kv_lengths=(64, 17)),
    C("lengths zero", q_lengths=(64, 5), kv_lengths=(0, 64)),
    C("segments packed", segments="packed"),
    C("segments shuffled", segments="shuffled"),
    C("segments apart", segments="apart"),
    C("softcap", softcap=2.0, spread=3.0),
    C("sinks", sinks=True),
    C("dropout", dropout=0.25),
    C("lse", with_lse=True),
    C("deterministic", deterministic=True),
    # Head dims and value dims.
    C("head dim 1", H=1),
    C("head dim 3", H=3, Hv=5),
    C("head dim 17", H=17),
    C("head dim 64", H=64, T=96),
    C("head dim 72", H=72),
    C("head dim 80 value 48", H=80, Hv=48),
    C("head dim 96", H=96, causal=True),
    C("head dim 128", H=128),
    C("head dim 192 value 128", H=192, Hv=128, causal=True),
    C("head dim 256", H=256, T=48),
    C("head dim 320", H=320, T=24),
    C("value dim 1", H=16, Hv=1),
    C("value dim larger", H=16, Hv=40),
    # Lengths that fall between blocks.
    C("1 x 1", T=1, S=1),
    C("239 x 1", T=239, S=1, N=1),
    C("799 x 3", T=799, S=3, N=1),
    C("1 x 239", T=1, S=239, N=2, with_lse=True),
    C("113 x 203", T=113, S=203),
    C("1023 x 1024", T=1023, S=1024, N=1, batch=(1,)),
    C("1023 x 1024 causal", T=1023, S=1024, N=1, batch=(1,), causal=True, with_lse=True),
    C("1024 x 1023 bottom right", T=1024, S=1023, N=1, batch=(1,), causal=True, align=BOTTOM_RIGHT),
    C("799 x 3 bottom right", T=799, S=3, N=1, causal=True, align=BOTTOM_RIGHT, with_lse=True),
    C("1 x 239 causal", T=1, S=239, causal=True),
    C("1 x 239 bottom right", T=1, S=239, causal=True, align=BOTTOM_RIGHT),
    C("keys 64 past 128", T=128, S=192, mask="bnts"),
    C("keys 64 past 256", T=65, S=320, bias="bnts", causal=True),
    C("129 x 129 causal", T=129, S=129, causal=True),
    C("127 x 257 bottom right", T=127, S=257, causal=True, align=BOTTOM_RIGHT),
    C("257 x 127 bottom right", T=257, S=127, causal=True, align=BOTTOM_RIGHT, with_lse=True),
    C("257 x 127 top left", T=257, S=127, causal=True),
    # Alignment, windows and lengths together.
    C("causal short query", T=40, S=100, causal=True),
    C("causal long query", T=100, S=40, causal=True),
    C("bottom right short query", T=40, S=100, causal=True, align=BOTTOM_RIGHT),
    C("bottom right long query", T=100, S=40, causal=True, align=BOTTOM_RIGHT),
    C("window top left T > S", T=150, S=40, window=(9, 4)),
    C("window bottom right T > S", T=150, S=40, window=(9, 4), align=BOTTOM_RIGHT, with_lse=True),
    C("window bottom right T < S", T=40, S=333, window=(9, 4), align=BOTTOM_RIGHT),
    C("window right bottom right", T=90, S=33, window=(None, 3), align=BOTTOM_RIGHT),
    C("window left bottom right", T=33, S=90, window=(3, None), align=BOTTOM_RIGHT),
    C("window causal", T=300, S=300, N=1, causal=True, window=(37, 50)),
    C("window causal int", T=70, S=70, causal=True, window=8),
    C("window zero left causal", T=70, S=90, causal=True, window=(0, None), align=BOTTOM_RIGHT),
    C("bottom right lengths", T=70, S=90, causal=True, align=BOTTOM_RIGHT, q_lengths=(70, 9),
      kv_lengths=(31, 90), with_lse=True),
    C("bottom right key lengths", T=70, S=90, causal=True, align=BOTTOM_RIGHT, kv_lengths=(5, 80)),
    C("bottom right query lengths", T=70, S=90, causal=True, align=BOTTOM_RIGHT,
      q_lengths=(5, 66)),
    C("bottom right window lengths", T=150, S=170, window=(20, 11), align=BOTTOM_RIGHT,
      q_lengths=(150, 33), kv_lengths=(44, 170)),
    C("top left window lengths", T=150, S=170, window=(20, 11), q_lengths=(150, 33),
      kv_lengths=(44, 170), with_lse=True),
    C("causal lengths", T=90, S=90, causal=True, q_lengths=(80, 20), kv_lengths=(60, 90)),
    C("decode", T=1, S=300, N=8, K=2, causal=True, align=BOTTOM_RIGHT, kv_lengths=(300, 1),
      q_lengths=(1,)),
    C("chunked prefill", T=32, S=300, causal=True, align=BOTTOM_RIGHT, kv_lengths=(200, 40)),
    C("many rows with nothing", T=400, S=60, N=1, causal=True, align=BOTTOM_RIGHT, sinks=True,
      with_lse=True),
    # Rows that see nothing but a sink.
    C("sinks lengths", sinks=True, q_lengths=(50, 0), kv_lengths=(64, 17), with_lse=True),
    C("sinks no keys", sinks=True, kv_lengths=(0, 64), with_lse=True),
    C("sinks segments apart", sinks=True, segments="apart", with_lse=True),
    C("sinks segments shuffled causal", T=130, S=140, sinks=True, segments="shuffled",
      causal=True, with_lse=True, deterministic=True),
    C("sinks mask sparse", sinks=True, mask="bnts", mask_density=0.03, with_lse=True),
    C("sinks window", T=150, S=40, N=4, K=2, sinks=True, window=(9, 4), with_lse=True),
    C("sinks softcap bottom right", T=257, S=127, sinks=True, softcap=2.0, causal=True,
      align=BOTTOM_RIGHT, with_lse=True, H=128),
    C("sinks lengths deterministic", T=200, S=190, sinks=True, causal=True, align=BOTTOM_RIGHT,
      q_lengths=(200, 90), kv_lengths=(70, 190), with_lse=True, deterministic=True),
    C("sinks lengths wide", T=140, S=70, H=256, sinks=True, causal=True, align=BOTTOM_RIGHT,
      q_lengths=(140, 90), with_lse=True),
    # Grouped and multi-query heads.
    C("gqa", N=8, K=2),
    C("mqa", N=6, K=1),
    C("gqa three", N=6, K=2, T=33, S=70),
    C("gqa causal lengths", N=4, K=2, causal=True, T=130, S=150, align=BOTTOM_RIGHT,
      kv_lengths=(99, 150), q_lengths=(130, 77), with_lse=True),
    C("gqa bias", N=4, K=2, bias="bnts"),
    C("gqa bias one head", N=4, K=2, bias="b1ts"),
    C("gqa mask", N=4, K=2, mask="1nts"),
    C("gqa sinks softcap", N=4, K=2, sinks=True, softcap=3.0, spread=3.0),
    C("gqa dropout", N=4, K=2, dropout=0.4, T=40, S=72),
    C("gqa segments window", N=4, K=1, segments="packed", window=(30, 0)),
    C("gqa value dim", N=4, K=2, H=24, Hv=40, causal=True),
    # Every broadcast shape of the bias, with its gradient; masks beside it.
    C("bias b1ts", bias="b1ts"),
    C("bias 1nts", bias="1nts"),
    C("bias 11ts", bias="11ts"),
    C("bias bn1s", bias="bn1s"),
    C("bias b11s", bias="b11s"),
    C("bias bnt1", bias="bnt1"),
    C("bias 1n11", bias="1n11"),
    C("bias 111s", bias="111s"),
    C("bias b111", bias="b111"),
    C("bias 1111", bias="1111"),
    C("bias nts", bias="nts"),
    C("bias 1ts", bias="1ts"),
    C("bias n1s long", bias="n1s", T=300, S=290, N=1, causal=True),
    C("bias float32 for bfloat16", dtype=HALF, bias="bnts", bias_dtype="float32"),
    C("bias float32 summed for bfloat16", dtype=HALF, bias="1n1s", bias_dtype="float32", T=200),
    C("bias bfloat16 for float32", bias="1nts", bias_dtype=HALF),
    C("bias float16", dtype="float16", bias="bnts"),
    C("bias hides", bias="bnts", bias_hides=True, with_lse=True),
    C("bias hides keys", bias="b11s", bias_hides=True),
    C("bias hides queries", bias="b1t1", bias_hides=True, with_lse=True),
    C("bias causal T > S", bias="bnts", T=100, S=60, causal=True, align=BOTTOM_RIGHT),
    C("bias mask lengths", bias="1nts", mask="b11s", q_lengths=(50, 64), kv_lengths=(64, 20)),
    C("bias fixed", dtype=HALF, bias="1nts", batch=(12,), causal=True, fixed=("bias",)),
    C("bias softcap", bias="bnts", softcap=4.0, spread=3.0),
    C("bias two batch dims", bias="b1ts", batch=(2, 3), T=20, S=24),
    C("mask b11s", mask="b11s"),
    C("mask bnt1", mask="bnt1"),
    C("mask 11ts", mask="11ts"),
    C("mask 1ts", mask="1ts", batch=(2, 2)),
    C("mask 1n11", mask="1n11", mask_density=0.5, N=4),
    C("mask causal bottom right", mask="b1ts", causal=True, align=BOTTOM_RIGHT, T=70, S=40),
    # Block masks.
    C("blocks", T=300, S=290, blocks=("bn", 128)),
    C("blocks of 64 gqa", T=200, S=330, N=4, K=2, causal=True, align=BOTTOM_RIGHT,
      blocks=("1n", 64), with_lse=True),
    C("blocks in turns", T=300, S=400, N=4, K=2, blocks=("1n", 64), deterministic=True),
    C("blocks in turns, causal", T=390, S=400, N=2, K=1, causal=True, blocks=("bn", 128),
      deterministic=True),
    C("layout", T=700, S=1000, N=4, K=2, blocks=("bn", 128), is_layout=True, with_lse=True),
    C("layout of 64", T=300, S=290, blocks=("1n", 64), is_layout=True),
    C("layout window lengths", T=600, S=580, blocks=("11", 128), is_layout=True, window=(300, 90),
      q_lengths=(600, 150), kv_lengths=(570, 580), sinks=True),
    C("layout in turns", T=520, S=500, blocks=("b1", 128), is_layout=True, deterministic=True),
    C("blocks two batch dims", batch=(2, 2), T=40, S=70, blocks=("b1", 16), mask="1n1s"),
    C("blocks with the rest", T=150, S=170, N=4, K=2, H=24, blocks=("11", 48), window=(90, 20),
      bias="1nts", mask="b1ts", q_lengths=(150, 70), kv_lengths=(160, 170), segments="packed",
      softcap=5.0, sinks=True, dropout=0.1, with_lse=True, deterministic=True),
    C("blocks empty rows", T=130, S=64, blocks=("bn", 64), sinks=True, with_lse=True,
      positions="offset", causal=True),
    # Segments with the rest.
    C("segments cross", segments="shuffled", T=90, S=50, with_lse=True),
    C("segments causal", segments="packed", causal=True, T=300, S=300, N=1),
    C("segments window bottom right", segments="packed", window=(40, 3), align=BOTTOM_RIGHT,
      T=50, S=90),
    C("segments lengths", segments="shuffled", q_lengths=(64, 30), kv_lengths=(44, 64)),
    C("segments bias mask", segments="packed", bias="b1ts", mask="1n1s"),
    # Positions in place of the index.
    C("positions offset", positions="offset", causal=True, T=60, S=90, with_lse=True),
    C("positions offset window", positions="offset", window=(20, 9), T=150, S=170),
    C("positions permuted", positions="permuted", causal=True, T=300, S=300, N=1, with_lse=True),
    C("positions permuted window", positions="permuted", window=(40, 3), T=130, S=200),
    C("positions striped", positions="striped", causal=True, T=520, S=520, N=1),
    C("positions striped window", positions="striped", window=(70, None), T=300, S=280),
    C("positions left padding", positions="left padding", causal=True, T=130, S=130,
      with_lse=True),
    C("positions ties", positions="ties", causal=True, T=90, S=70, with_lse=True),
    C("positions ties window", positions="ties", window=(0, 0), T=90, S=300),
    C("positions extreme", positions="extreme", causal=True, T=140, S=90, with_lse=True),
    C("positions extreme window", positions="extreme", window=(50, 2**31 - 3), T=140, S=260,
      with_lse=True),
    C("positions extreme far", positions="extreme", window=(2**32 - 60, 2**32 - 40), T=140, S=140),
    C("positions constant", positions="constant", causal=True, window=(3, 3)),
    C("positions of queries", positions="queries", causal=True, T=40, S=70),
    C("positions of keys", positions="keys", window=(9, 2), T=70, S=40, with_lse=True),
    C("positions nothing seen", positions="left padding", window=(0, 0), T=3, S=70,
      sinks=True, with_lse=True),
    C("positions gqa lengths segments", positions="striped", causal=True, N=4, K=2, T=130, S=150,
      segments="packed", q_lengths=(130, 77), kv_lengths=(99, 150), with_lse=True),
    C("positions bias mask softcap sinks", positions="permuted", window=(60, 4), T=70, S=90,
      bias="b1ts", mask="1n1s", softcap=3.0, sinks=True, with_lse=True),
    C("positions dropout deterministic", positions="offset", causal=True, T=200, S=190,
      dropout=0.2, deterministic=True),
    C("positions two batch dims", positions="offset", causal=True, batch=(2, 3), T=20, S=30),
    C("positions bfloat16", positions="striped", causal=True, dtype=HALF, H=64, T=400, S=400, N=1,
      with_lse=True),
    C("positions float16 wide", positions="offset", window=(100, 0), dtype="float16", H=192,
      Hv=128, T=200, S=230, N=1),
    # Sinks, softcap, lse and dropout with the rest.
    C("sinks lse", sinks=True, with_lse=True),
    C("sinks empty rows", sinks=True, mask="bnts", mask_density=0.05, with_lse=True),
    C("sinks causal", sinks=True, causal=True, window=(11, None)),
    C("sinks bfloat16", sinks=True, dtype=HALF, with_lse=True),
    C("softcap causal lse", softcap=1.5, spread=4.0, causal=True, with_lse=True),
    C("lse empty rows", with_lse=True, mask="bnts", mask_density=0.04),
    C("lse bias softcap", with_lse=True, bias="1n1s", softcap=3.0),
    # Scores of which the tanh is themselves, beside some of which it is -1.
    C("softcap of 1e8", softcap=1e8, bias="11ts", bias_hides=True, with_lse=True),
    C("lse gqa bfloat16", with_lse=True, N=4, K=2, dtype=HALF, causal=True),
    C("dropout heavy", dropout=0.9),
    C("dropout causal window", dropout=0.2, causal=True, window=(33, None), T=100, S=130),
    C("dropout bias", dropout=0.3, bias="1nts"),
    C("dropout lse sinks", dropout=0.3, sinks=True, with_lse=True),
    C("dropout lengths segments", dropout=0.15, segments="packed", kv_lengths=(64, 31)),
    C("dropout two batch dims", dropout=0.5, batch=(2, 2), T=17, S=19, N=3),
    C("dropout bfloat16", dropout=0.25, dtype=HALF, T=130, S=140),
    # Leading dims.
    C("no batch", batch=()),
    C("no batch gqa bias lengths", batch=(), N=4, K=2, bias="nts", kv_lengths=(40,)),
    C("no batch segments sinks", batch=(), segments="packed", sinks=True, with_lse=True),
    C("two batch dims", batch=(2, 3), T=24, S=20),
    C("two batch dims all", batch=(3, 2), T=24, S=40, N=4, K=2, causal=True, align=BOTTOM_RIGHT,
      q_lengths=(24, 20, 3), kv_lengths=(40, 11), segments="shuffled", sinks=True, with_lse=True),
    C("three batch dims", batch=(2, 1, 2), T=12, S=9, mask="bnts"),
    # The half precisions.
    C("bfloat16", dtype=HALF, H=64, T=128, S=128),
    C("bfloat16 causal long", dtype=HALF, T=513, S=513, N=1, H=64, causal=True),
    C("bfloat16 113 x 203", dtype=HALF, T=113, S=203, H=64),
    C("bfloat16 window", dtype=HALF, T=200, S=200, window=(31, 17)),
    C("bfloat16 mask", dtype=HALF, mask="b1ts"),
    C("bfloat16 mask blocks", dtype=HALF, T=200, S=300, H=64, mask="1nts", with_lse=True),
    C("bfloat16 softcap", dtype=HALF, softcap=2.0, spread=3.0),
    C("bfloat16 segments gqa", dtype=HALF, segments="packed", N=4, K=2, causal=True),
    C("bfloat16 lengths bottom right", dtype=HALF, T=70, S=90, causal=True, align=BOTTOM_RIGHT,
      q_lengths=(70, 9), kv_lengths=(31, 90)),
    C("bfloat16 value dim", dtype=HALF, H=192, Hv=128),
    C("bfloat16 head dim 72", dtype=HALF, H=72),
    C("bfloat16 odd head dim", dtype=HALF, H=33, Hv=7, T=50, S=51),
    C("bfloat16 head dim 100 gqa", dtype=HALF, H=100, N=4, K=2, T=150, S=200, causal=True,
      align=BOTTOM_RIGHT, with_lse=True),
    C("bfloat16 head dim 36 heads packed", dtype=HALF, H=36, Hv=20, N=8, K=1, T=9, S=70),
    C("bfloat16 head dim 127 deterministic", dtype=HALF, H=127, T=140, S=140, causal=True,
      sinks=True, deterministic=True),
    C("bfloat16 value dim 1 window", dtype=HALF, H=64, Hv=1, T=200, S=200, window=(31, 17)),
    C("bfloat16 head dim 1 lengths", dtype=HALF, H=1, Hv=255, T=70, S=90, q_lengths=(70, 9),
      kv_lengths=(31, 90)),
    C("bfloat16 peaked", dtype=HALF, spread=12.0),
    C("float16", dtype="float16", H=64, T=128, S=128),
    C("float16 causal", dtype="float16", T=150, S=200, causal=True, align=BOTTOM_RIGHT),
    C("float16 segments gqa", dtype="float16", segments="shuffled", N=4, K=1, with_lse=True),
    C("float16 dropout softcap", dtype="float16", dropout=0.2, softcap=2.0),
    C("float16 head dim 250 segments", dtype="float16", H=250, Hv=130, segments="shuffled", N=4,
      K=2, softcap=3.0, with_lse=True),
    C("float16 odd head dim", dtype="float16", H=5, Hv=19, T=37, S=41, mask="bnts"),
    # A function of the scores, with the rest.
    C("score alibi", score="alibi", N=4, K=2, T=70, S=90),
    C("score distance", score="distance", dtype=HALF, H=64, T=300, S=420, N=3),
    C("score relative segments", score="relative", T=130, S=150, segments="packed", causal=True,
      with_lse=True),
    C("score cap bias mask sinks", score="cap", bias="1nts", mask="b1ts", sinks=True, spread=3.0,
      with_lse=True),
    C("score in a loop", score="sine", T=70, S=90, N=2, dtype=HALF),
    C("score called", score="sines", T=70, S=90, N=2, bias="1nts", with_lse=True),
    C("score gate lengths", score="gate", causal=True, N=4, K=2, T=90, S=90, q_lengths=(80, 20),
      kv_lengths=(60, 90), with_lse=True),
    C("score gate everything", score="gate", T=150, S=170, N=4, K=2, H=24, Hv=40, dtype=HALF,
      scale=-0.2, causal=True, window=(90, None), bias="1n1s", mask="b1ts", batch=(2, 1),
      q_lengths=(150, 70), kv_lengths=(160, 170), segments="packed", sinks=True, dropout=0.1,
      with_lse=True, deterministic=True),
    # Everything at once.
    C("everything", T=150, S=170, N=4, K=2, H=24, Hv=40, scale=0.2, causal=True,
      align=BOTTOM_RIGHT, window=(90, None), bias="1nts", mask="b1ts", q_lengths=(150, 70),
      kv_lengths=(160, 170), segments="packed", softcap=5.0, sinks=True, dropout=0.1,
      with_lse=True, deterministic=True),
    C("everything bfloat16", T=70, S=90, N=4, K=2, H=64, dtype=HALF, causal=True, bias="b11s",
      mask="b1ts", kv_lengths=(80, 55), segments="packed", softcap=5.0, sinks=True, dropout=0.1,
      with_lse=True),
)  # fmt: skip
# Fields whose values are features of their own for `covering`.
VALUED = {
    "align", "batch", "bias", "bias_dtype", "dtype", "mask", "positions", "score", "segments",
    "window",
}  # fmt: skip

BY_NAME = {case.name: case for case in CASES}


def case_id(value: Case | str) -> str:
    """The id of a test of a case, or of a backend beside one."""
    return value if isinstance(value, str) else value.name.replace(" ", "-")


def covering(
    cases: Sequence[Case],
    ignored: Collection[str],
    valued: Collection[str] = (),
    tile: int | None = None,
) -> list[Case]:
    """So many that every feature, and any two that meet in a case, meet in one that is kept.

    A feature is a field that is not at its default, for the fields in `valued` with its value;
    and whether heads are grouped, and T is less or more than S, and either more than a tile.
    """

    def features(case: Case) -> set[tuple]:
        found = {
            (field.name, getattr(case, field.name)) if field.name in valued else (field.name,)
            for field in dataclasses.fields(case)
            if field.name not in {"name", "T", "S", "N", "K", *ignored}
            and getattr(case, field.name) != field.default
        }
        found |= {("grouped heads",)} if case.kv_heads != case.N else set()
        found |= {("cross", case.T < case.S)} if case.T != case.S else set()
        found |= {("tiles",)} if tile is not None and max(case.T, case.S) > tile else set()
        return found | set(itertools.combinations(sorted({name for name, *_ in found}), 2))

    of = {case: features(case) for case in cases}
    missing, kept = set().union(*of.values()), set()
    while missing:
        case = max(cases, key=lambda case: len(of[case] & missing))  # the first of several
        kept.add(case)
        missing -= of[case]
    return [case for case in cases if case in kept]


if len(BY_NAME) != len(CASES):
    raise ValueError("two cases share a name")
