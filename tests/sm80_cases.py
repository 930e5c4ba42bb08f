"""Cases of the kernels of mma.sync: every way through them, by GPUs whose tilings take it."""

from __future__ import annotations

import functools

from .cases import BOTTOM_RIGHT
from .emulated_cases import C

CASES = (
    # Tilings.
    C("head dim 64"),
    C("head dim 72 value 16", H=72, Hv=16, causal=True),
    C("head dim 128", H=128, T=260, S=300, N=4, K=2, causal=True),
    C("head dim 192 value 128", H=192, Hv=128, S=300, T=70, align=BOTTOM_RIGHT, causal=True),
    C("head dim 256", H=256, S=130, T=70, N=1),
    C("head dim 33 value 7", H=33, Hv=7, N=4, K=2),
    C("head dim 100 value 250", H=100, Hv=250, T=70, causal=True),
    C("head dim 1", H=1, Hv=1, T=9),
    C("float16", dtype="float16", H=128, N=4, K=1, causal=True),
    # Which pairs there are.
    C("window", window=(70, 20), T=300, S=300, softcap=5.0),
    C("negative scale", softcap=0.5, scale=-0.3),
    C("lengths", batch=(3,), q_lengths=(150, 0, 77), kv_lengths=(200, 50, 0), sinks=True),
    C("segments", segments="returning", T=97, S=500, N=1, causal=True),
    C("positions", positions="striped", T=200, S=300, causal=True),
    C("positions extreme", positions="extreme", H=128, window=(50, 2**31 - 3), T=140, N=1),
    # Masks, biases, dropout.
    C("mask", mask="bnts", T=130, S=260),
    C("mask of keys", mask="b11s", mask_density=0.4, causal=True),
    C("blocks", T=130, S=260, N=4, K=2, blocks=("1n", 48), causal=True),
    C("bias", bias="bnts", H=128, batch=(2,), T=130),
    C("bias odd float32", bias="1n1s", bias_dtype="float32", batch=(2,), T=70, S=131, softcap=2.0),
    C("everything", dropout=0.2, mask="b1ts", bias="11ts", sinks=True, segments="packed",
      positions="permuted", window=(90, 5), kv_lengths=(180,), N=4, K=2),
)  # fmt: skip
# float32 in parts, and warps that share their rows.
F = functools.partial(C, dtype="float32", T=70, S=90, precision="high")
SPLIT_CASES = (
    F("float32", causal=True),
    F("float32 odd", H=33, Hv=7, precision="highest", dropout=0.2, mask="b1ts", bias="11ts",
      sinks=True, segments="packed", positions="permuted", window=(90, 5), kv_lengths=(80,), N=4,
      K=2),
    F("float32 of 256", H=200, Hv=130, q_lengths=(66,), softcap=3.0, sinks=True, precision="high"),
    C("head dim 512", H=512, T=70, S=100, N=1, causal=True),
    C("head dim 300 value 20", H=300, Hv=20, T=70, S=90, dtype="float16", segments="packed"),
)  # fmt: skip
# Tilings of GPUs with less shared memory.
SMALL_CASES = (
    C("head dim 20 value 500", H=20, Hv=500, T=70, S=50, N=1, dropout=0.2, mask="11ts"),
    F("float32 of 512", H=512, Hv=260, T=40, S=50, N=1, precision="highest", bias="11ts"),
)


# The backward pass: every way through it, on GPUs with the tilings that take it.
GRADIENTS = (
    ("A100", C("head dim 64, sums in dq", T=128, S=140, K=1, causal=True)),
    ("A100", C("head dim 128, lengths", H=128, T=70, batch=(2,), q_lengths=(70, 0), N=2, K=1,
       kv_lengths=(150, 200), window=(90, 10), align=BOTTOM_RIGHT)),
    ("A100", C("head dim 192, everything", H=192, Hv=136, dropout=0.2, mask="b1ts", bias="11ts",
       T=90, S=100, N=1, sinks=True, segments="packed", softcap=3.0)),
    ("A100", C("bias stored", H=128, bias="bnts", S=132, T=90, causal=True, bias_hides=True, K=1)),
    ("A100", C("bias shared", H=128, bias="1nts", batch=(2,), S=132, T=90, window=(50, 9), K=1,
       deterministic=True)),
    ("A100", C("mask and bias of keys", mask="bnts", bias="1n1s", bias_dtype="float32", S=131,
       T=70, batch=(2,), deterministic=True)),
    ("L4", C("head dim 128, segments", H=128, S=300, N=1, segments="returning", softcap=5.0,
       deterministic=True)),
    ("L4", C("head dim 256, positions", H=256, T=130, S=100, N=1, positions="permuted",
       window=(90, 5), deterministic=True)),
    ("A100", C("score gate wide", score="gate", H=160, Hv=136, T=70, S=90, dropout=0.3, causal=True,
        mask="b1ts", bias="11ts", sinks=True, dtype="float16")),
    ("RTX 5090", C("head dim 33 value 7", H=33, Hv=7, T=70, S=90, N=4, K=2, dropout=0.4,
       mask="b1t1", dtype="float16", bias="1n11")),
    # float32 in parts; four warps that share keys.
    ("H100", F("float32 highest, bias stored", bias="bnts", S=92, causal=True, bias_hides=True,
       precision="highest", N=1)),
    ("H100", F("float32 highest, softcap 30", softcap=30.0, spread=4.0, precision="highest", T=17,
       S=33, N=3, K=3, H=7, bias="bnts", bias_dtype="bfloat16", kv_lengths=(19,))),
    ("H100", F("float32 of 128, everything", H=100, Hv=128, dropout=0.2, mask="b1ts", bias="11ts",
       sinks=True, segments="packed", softcap=3.0, N=1)),
    ("L4", F("float32 odd, highest", H=33, Hv=130, precision="highest", positions="permuted",
       window=(60, 5), T=40, S=50, K=1, bias="1n11", blocks=("1n", 16))),
    ("L4", F("float32 score gate", score="gate", H=72, T=40, dropout=0.3, bias="1n1s", N=1,
       causal=True)),
    ("H100", F("float32 of 500, highest", H=500, Hv=260, T=40, S=30, N=1, precision="highest",
       bias="1n1s", deterministic=True)),
    ("H100", C("head dim 512, gqa", H=512, T=70, S=70, N=2, K=1, causal=True)),
    ("A100", C("head dim 511 value 264", H=511, Hv=264, T=70, S=50, N=1, window=(40, 10),
       positions="permuted", deterministic=True)),
    ("L4", C("value dim 512", H=20, Hv=512, T=70, S=50, N=1, score="gate", dropout=0.2,
       bias="11ts", causal=True)),
)  # fmt: skip
