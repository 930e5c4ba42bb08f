"""deterministic=True: the same call gives the same bits, however threads are scheduled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ..cases import Case, fit
from ..compare import refuses
from ..conformance_cases import case_id
from ..hopper import NEEDS_HOPPER

REPEATED = (
    Case("plain", T=200, S=330, deterministic=True, with_lse=True),
    Case("gqa causal", T=300, S=300, N=8, K=2, causal=True, deterministic=True),
    Case("bias summed", T=150, S=200, N=4, bias="111s", deterministic=True),
    Case("bias rows causal", T=500, S=500, N=3, H=64, bias="11ts", causal=True, deterministic=True),
    Case("dropout sinks", T=150, S=200, dropout=0.3, sinks=True, deterministic=True),
    Case("bfloat16 mqa", T=300, S=200, N=4, K=1, dtype="bfloat16", deterministic=True),
)


@pytest.mark.parametrize("case", REPEATED, ids=case_id)
def test_bitwise_repeat(case, backend):
    case = fit(case, backend)
    if refuses(case, backend):
        return
    arguments = case.draw()
    first = arguments.run(backend)
    for _ in range(20):
        for name, value in arguments.run(backend).items():
            np.testing.assert_array_equal(value, first[name], err_msg=name)


def large(name: str, **given) -> Case:
    """A case in which many thread blocks add to each query."""
    sizes = {"T": 1000, "S": 1000, "N": 8, "H": 64, "batch": (3,)}
    return Case(name, **(sizes | {"dtype": "bfloat16", "deterministic": True} | given))


LARGE = (
    large("plain", T=2048, S=2048),
    large("causal", T=2048, S=2048, H=128, causal=True),
    large("causal odd", T=2047, S=2047, H=128, causal=True),
    large("gqa causal", H=128, K=2, causal=True, with_lse=True),
    large("gqa causal long", H=128, N=16, K=2, T=2048, S=2048, causal=True),
    large("mqa", K=1, T=777, S=1291, H=96),
    large("segments causal", H=128, T=1501, S=1501, segments="packed", causal=True),
    large("segments documents", H=256, T=1501, S=1501, segments="documents", causal=True),
    large("segments shuffled softcap", segments="shuffled", softcap=5.0),
    large("lengths bottom right", H=128, q_lengths=(1000, 600, 77), kv_lengths=(900, 1000, 333),
          causal=True, align="bottom_right"),
    large("window", H=128, T=1700, S=1333, window=(200, 100), align="bottom_right"),
    large("bias", bias="1nts", bias_dtype="float32"),
    large("bias summed", H=128, bias="11t1", causal=True),
    large("mask", H=128, mask="b1ts"),
    large("mask gqa causal", K=2, mask="bnts", mask_density=0.01, causal=True),
    large("dropout", H=128, dropout=0.3),
    large("dropout gqa causal", K=2, dropout=0.1, causal=True),
    large("dropout 256 segments", H=256, dropout=0.1, segments="packed"),
    large("192 128", H=192, Hv=128, causal=True),
    large("256 gqa", H=256, K=4, T=999, S=999, causal=True),
    large("256 float16", H=256, T=700, S=900, dtype="float16", sinks=True),
)  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=NEEDS_HOPPER, id=case.name.replace(" ", "-")) for case in LARGE],
)
def test_hundred_runs_on_a_gpu(case: Case):
    arguments = case.draw()
    arrays, cotangent = jax.tree.map(jnp.asarray, (arguments.arrays, arguments.cotangent))
    step = jax.jit(arguments.step("cuda"))

    @jax.jit
    def differences(got, want):
        bits = [(jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
                 for x in jax.tree.leaves(tree)) for tree in (got, want)]  # fmt: skip
        return [jnp.sum(a != b) for a, b in zip(*bits, strict=True)]

    first = step(arrays, cotangent)
    counts = [differences(step(arrays, cotangent), first) for _ in range(100)]
    assert not np.any(jax.device_get(counts))
