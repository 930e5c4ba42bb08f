"""What nobody may see reaches nothing: NaN and inf in padding, hidden keys, rows of a sink."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import _platform, _products, _seen, reference

from ..cases import BOTTOM_RIGHT, Case, fit, widest_dtype
from ..compare import compare, refuses
from ..conformance_cases import VALUED, case_id, covering
from ..conftest import with_backends
from ..poison import POISONS, for_xla, poisoned
from ..small import normal

# Calls in which some keys are seen by no query at all, and some queries see no key.
HIDING = (
    Case("lengths", T=70, S=90, q_lengths=(64, 13), kv_lengths=(29, 90), with_lse=True),
    Case("length zero", T=20, S=24, q_lengths=(20, 0), kv_lengths=(0, 24), with_lse=True),
    Case("bottom right lengths", T=70, S=90, causal=True, align=BOTTOM_RIGHT, q_lengths=(70, 9),
         kv_lengths=(31, 80), with_lse=True),
    Case("causal T < S", T=40, S=200, causal=True, with_lse=True),
    Case("bottom right T > S", T=200, S=40, causal=True, align=BOTTOM_RIGHT, with_lse=True),
    Case("window hides first keys", T=30, S=190, window=(9, 2), align=BOTTOM_RIGHT),
    Case("window hides last keys", T=30, S=190, window=(9, 2)),
    Case("window hides queries", T=190, S=30, window=(9, 2)),
    Case("mask", T=60, S=70, mask="1n1s", mask_density=0.5, with_lse=True),
    Case("mask whole", T=60, S=70, mask="b111", mask_density=0.0, with_lse=True),
    Case("mask queries", T=60, S=70, mask="b1t1", mask_density=0.5, with_lse=True),
    Case("one query", T=1, S=70, N=4, K=2, mask="b11s", mask_density=0.5, with_lse=True),
    Case("one query, lengths", T=1, S=170, N=4, K=2, batch=(3,), kv_lengths=(90, 0, 33), sinks=True,
         with_lse=True),
    Case("few queries, window", T=3, S=170, N=4, K=2, causal=True, align=BOTTOM_RIGHT,
         window=(40, None), kv_lengths=(150, 2), with_lse=True),
    Case("one key", T=60, S=1, mask="b1t1", mask_density=0.5, with_lse=True),
    Case("mask elements", T=90, S=80, mask="bnts", mask_density=0.01, with_lse=True),
    Case("segments", T=60, S=70, segments="shuffled", kv_lengths=(70, 33)),
    Case("segments apart", T=60, S=70, segments="apart", with_lse=True),
    Case("positions", T=60, S=300, positions="offset", causal=True, with_lse=True),
    Case("positions striped", T=70, S=300, positions="striped", causal=True, window=(11, None)),
    Case("positions padding", T=300, S=300, N=1, positions="left padding", causal=True,
         with_lse=True),
    Case("positions extreme", T=90, S=70, positions="extreme", window=(3, 2), sinks=True,
         with_lse=True),
    Case("bias", T=60, S=70, bias="bnts", kv_lengths=(70, 33), q_lengths=(20, 60)),
    Case("bias softcap", T=60, S=72, bias="bnts", mask="b1ts", softcap=3.0, q_lengths=(20, 60)),
    Case("bias of rows", T=64, S=72, bias="1nts", kv_lengths=(33, 20), q_lengths=(20, 30)),
    Case("bias softcap sinks", T=60, S=70, bias="1nts", mask="b11s", mask_density=0.4,
         softcap=3.0, sinks=True, with_lse=True),
    Case("sinks lengths", T=70, S=90, q_lengths=(64, 13), kv_lengths=(0, 90), sinks=True,
         with_lse=True),
    Case("sinks segments", T=190, S=170, segments="shuffled", kv_lengths=(3, 33), sinks=True,
         with_lse=True),
    Case("sinks segments apart", T=60, S=70, segments="apart", sinks=True),
    Case("sinks mask", T=90, S=80, mask="bnts", mask_density=0.01, sinks=True, with_lse=True),
    Case("bfloat16 sinks window", T=190, S=30, H=128, window=(9, 2), sinks=True, with_lse=True,
         dtype="bfloat16"),
    Case("bfloat16 sinks segments apart", T=190, S=170, H=64, N=4, K=2, segments="apart",
         sinks=True, with_lse=True, dtype="bfloat16"),
    Case("bfloat16 sinks segments wide", T=190, S=170, H=256, segments="shuffled",
         kv_lengths=(3, 33), sinks=True, with_lse=True, deterministic=True, dtype="bfloat16"),
    Case("dropout", T=60, S=70, dropout=0.3, kv_lengths=(70, 33), q_lengths=(20, 60)),
    Case("gqa", T=60, S=140, N=4, K=2, causal=True, kv_lengths=(80, 33), with_lse=True),
    Case("bfloat16", T=70, S=90, H=64, q_lengths=(64, 13), kv_lengths=(29, 90), dtype="bfloat16",
         with_lse=True),
    Case("bfloat16 mask", T=60, S=70, mask="b11s", mask_density=0.5, dtype="bfloat16"),
    Case("bfloat16 odd head dim", T=70, S=90, H=33, Hv=100, q_lengths=(64, 13), kv_lengths=(29, 90),
         dtype="bfloat16", with_lse=True),
    Case("bfloat16 head dim 250", T=190, S=30, H=250, Hv=36, window=(9, 2), dtype="bfloat16"),
    Case("bfloat16 head dim 60", T=70, S=90, H=60, causal=True, dtype="bfloat16", with_lse=True),
    Case("bfloat16 segments", T=60, S=70, H=64, segments="shuffled", kv_lengths=(70, 33),
         dtype="bfloat16", with_lse=True),
    Case("bfloat16 positions", T=150, S=300, H=64, positions="striped", causal=True,
         window=(20, None), dtype="bfloat16", with_lse=True),
    Case("bfloat16 segments apart", T=60, S=70, segments="apart", dtype="bfloat16", with_lse=True),
    Case("float16 window", T=190, S=30, window=(9, 2), align=BOTTOM_RIGHT, dtype="float16"),
)  # fmt: skip


# It gets so many that every two terms that meet in a case meet in one of these, and those of one
# query or key, where "xla" does otherwise.
COVERING = covering(
    [case for case in HIDING if for_xla(case)], ignored={"H", "mask_density"}, valued=VALUED
) + [case for case in HIDING if 1 in (case.T, case.S)]


@pytest.mark.parametrize(
    ("backend", "case"), with_backends(HIDING, xla=COVERING.__contains__), ids=case_id
)
def test_poison_reaches_no_result(case, backend):
    case = fit(case, backend)
    if refuses(case, backend):
        return
    clean = case.draw()
    for poison in POISONS:
        dirty = poisoned(clean, poison)
        changed = [
            name
            for name, array in clean.arrays.items()
            if not np.array_equal(array, dirty.arrays[name])
        ]
        assert changed, "the case hides nothing"
        got = dirty.run(backend)
        for name, value in got.items():
            bad = np.isnan if name == "lse" else lambda x: ~np.isfinite(x)
            assert not bad(value.astype(np.float32)).any(), f"{poison} in {name}"
        compare(clean, got)


@pytest.mark.parametrize("case", COVERING, ids=case_id)
def test_poison_reaches_no_sum_of_products(case, monkeypatch):
    """Backend "xla" sums products in place of dots where a GPU has few of them."""

    def dot(*_):
        raise AssertionError("a dot")

    monkeypatch.setattr(_products, "_FEW", np.inf)
    monkeypatch.setattr(_products, "dot", dot)
    check_as_on_a_gpu(case, monkeypatch)


@pytest.mark.parametrize("case", COVERING[::2], ids=case_id)
def test_poison_reaches_no_operand_that_kernels_make(case, monkeypatch):
    """Backend "xla" makes operands of many products finite by kernels of their own on a GPU."""
    monkeypatch.setattr(_products, "_FEW", 0)
    monkeypatch.setattr(_seen, "_APART", 0)
    monkeypatch.setattr(_seen, "_ALIGNED", 1)
    check_as_on_a_gpu(case, monkeypatch)


def check_as_on_a_gpu(case, monkeypatch):
    monkeypatch.setattr(_platform, "is_gpu", lambda: True)
    clean = case.draw()
    dirty = poisoned(clean, POISONS[0])
    jax.clear_caches()
    got = dirty.run("xla")
    jax.clear_caches()
    compare(clean, got)


@functools.cache
def second_derivatives(backend):
    lengths = dict.fromkeys(
        ("query_seq_lengths", "key_value_seq_lengths"), np.full(2, 30, np.int32)
    )

    @jax.jit
    def second(*arrays):
        def loss(q, k, v):
            out = jax_flash.flash_attention(q, k, v, softcap=3.0, backend=backend, **lengths)
            return jnp.square(out.astype(jnp.float32)).sum()

        def size(*arrays):
            first = jax.grad(loss, argnums=(0, 1, 2))(*arrays)
            return sum(jnp.square(x[:, :30].astype(jnp.float32)).sum() for x in first)

        return jax.grad(size, argnums=(0, 1, 2))(*arrays)

    return second


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_poison_reaches_no_second_derivative(name, backend):
    clean = fit(Case("second", T=40, S=40), backend).draw()
    second = second_derivatives(backend)
    names = ("query", "key", "value")
    before = second(*(clean.arrays[n] for n in names))
    for poison in POISONS:
        arrays = {n: clean.arrays[n].copy() for n in names}
        arrays[name][:, 30:] = poison
        limit = 2e-2 if backend == "cuda" else 0.0  # there sums of dq have no fixed order
        for a, b in zip(before, second(*arrays.values()), strict=True):
            want, got = (np.asarray(x).astype(np.float32) for x in (a, b))
            scale = np.abs(want).max()
            np.testing.assert_allclose(got / scale, want / scale, rtol=limit, atol=limit)


def test_poison_reaches_no_gradient_of_the_reference():
    q, k, v = normal(0, 3, 1, 9, 2, 8)
    poisoned = k.at[:, 5:].set(jnp.nan)

    def loss(q, k):
        lengths = jnp.array([5])
        return reference.attention(q, k, v, softcap=3.0, key_value_seq_lengths=lengths).sum()

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
    clean, dirty = gradient(q, k), gradient(q, poisoned)
    np.testing.assert_array_equal(clean[0], dirty[0])
    np.testing.assert_array_equal(clean[1], dirty[1])


@pytest.mark.parametrize("poison", POISONS)
def test_a_head_reaches_no_other(backend, poison):
    """Rows of 36 numbers: what loads them in 16 bytes has numbers of the heads beside them."""
    dtype = jnp.float32 if backend == "cpu" else jnp.bfloat16
    q, k, v = (x.astype(dtype) for x in normal(1, 3, 1, 90, 4, 36))
    clean = jax_flash.flash_attention(q, k, v, backend=backend)
    dirty = jax_flash.flash_attention(
        *(x.at[:, 30, 1].set(poison) for x in (q, k, v)), backend=backend
    )
    others = np.array([0, 2, 3])
    want, got = (np.asarray(x[:, :, others]).astype(np.float32) for x in (clean, dirty))
    np.testing.assert_allclose(got, want, rtol=1e-2, atol=1e-2)


def test_hidden_rows_are_exactly_zero(backend):
    case = Case(
        "rows", T=40, S=24, causal=True, align=BOTTOM_RIGHT, q_lengths=(40, 7), with_lse=True,
        dtype=widest_dtype(backend),
    )  # fmt: skip
    arguments = case.draw()
    got = arguments.run(backend)
    empty = ~arguments.truth(gradients=False).seen[:, 0].any(-1)
    assert empty.sum() == 16 + 33
    assert (got["out"][empty] == 0).all()
    assert np.isneginf(got["lse"][empty]).all()
    assert (got["dquery"][empty] == 0).all()


SINK_ALONE = (
    Case("lengths", T=70, S=90, q_lengths=(64, 13), kv_lengths=(0, 60), causal=True,
         align=BOTTOM_RIGHT, sinks=True, with_lse=True),
    Case("segments", T=70, S=90, segments="shuffled", kv_lengths=(1, 2), sinks=True, with_lse=True),
    Case("mask", T=70, S=90, mask="bnts", mask_density=0.01, sinks=True, with_lse=True),
    Case("deterministic", T=70, S=90, H=256, segments="shuffled", kv_lengths=(1, 2), sinks=True,
         with_lse=True, deterministic=True),
)  # fmt: skip


@pytest.mark.parametrize("case", SINK_ALONE, ids=lambda case: case.name)
def test_rows_that_see_a_sink_alone(case, backend):
    """lse is the sink to the bit and has the gradient 1 to it; nothing else is touched."""
    case = fit(case, backend)
    if refuses(case, backend):
        return
    clean = case.draw()
    clean.arrays["sinks"] = np.array([-1.3, 88.1], np.float32)
    alone = ~clean.truth(gradients=False).seen.any(-1).swapaxes(1, 2)  # [B, T, N]
    assert 0.1 < alone.mean() < 1
    only_there = dataclasses.replace(
        clean,
        dout=np.where(alone[..., None], clean.dout, 0).astype(clean.dout.dtype),
        dlse=np.where(alone, clean.dlse, 0).astype(np.float32),
    )
    got = only_there.run(backend)
    assert (got["out"][alone] == 0).all()
    sinks = np.broadcast_to(clean.arrays["sinks"], alone.shape)
    np.testing.assert_array_equal(got["lse"][alone], sinks[alone])
    want = only_there.dlse.astype(np.float64).sum((0, 1))
    np.testing.assert_allclose(got["dsinks"], want, rtol=1e-5, atol=1e-5)
    for name in ("dquery", "dkey", "dvalue"):
        assert (got[name] == 0).all(), name

    before = clean.run(backend)
    for poison in POISONS:  # which reaches the sink by dlse, and nothing else
        dirty = dataclasses.replace(
            clean,
            dout=np.where(alone[..., None], poison, clean.dout).astype(clean.dout.dtype),
            dlse=np.where(alone, poison, clean.dlse).astype(np.float32),
        )
        after = dirty.run(backend)
        assert not np.isfinite(after["dsinks"]).any()
        limit = 2e-2 if backend == "cuda" else 0.0  # there such rows are computed again
        for name in ("out", "lse", "dquery", "dkey", "dvalue"):
            np.testing.assert_allclose(
                after[name].astype(np.float32), before[name].astype(np.float32),
                rtol=limit, atol=limit, err_msg=f"{poison} in {name}",
            )  # fmt: skip
