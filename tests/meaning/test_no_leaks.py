"""What some queries see reaches no others: keys of NaN, other documents, the future."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash

from ..cases import BOTTOM_RIGHT, Case, fit, widest_dtype
from ..compare import refuses
from ..conformance_cases import case_id
from ..conftest import with_backends
from ..numpy_oracle import DTYPES
from ..poison import POISONS, for_xla

# Calls in which some queries see a key and others do not.
SHOWING = (
    Case("causal", T=70, S=90, causal=True, with_lse=True),
    Case("causal gqa", T=150, S=170, N=4, K=2, causal=True, align=BOTTOM_RIGHT, sinks=True,
         kv_lengths=(160, 170), with_lse=True),
    Case("window", T=150, S=150, window=(20, 11), softcap=3.0),
    Case("segments", T=90, S=70, segments="shuffled", N=4, K=2, with_lse=True),
    Case("positions", T=150, S=170, positions="permuted", causal=True, with_lse=True),
    Case("positions bfloat16", T=150, S=170, H=64, N=4, K=2, positions="ties", window=(3, 4),
         dtype="bfloat16"),
    Case("packed", T=300, S=300, segments="packed", causal=True),
    Case("lengths", T=70, S=90, q_lengths=(50, 70), kv_lengths=(64, 90)),
    Case("mask", T=60, S=70, mask="bnts", mask_density=0.5, with_lse=True),
    Case("mask bias", T=150, S=170, mask="b1ts", bias="bnts", softcap=3.0, deterministic=True),
    Case("bfloat16", T=150, S=170, H=64, causal=True, dtype="bfloat16", with_lse=True),
    Case("bfloat16 odd head dim", T=70, S=90, H=33, Hv=100, causal=True, dtype="bfloat16"),
    Case("few queries", T=4, S=170, N=4, K=2, causal=True, align=BOTTOM_RIGHT, with_lse=True),
    Case("float16 mask", T=60, S=70, mask="b1ts", mask_density=0.5, dtype="float16"),
)  # fmt: skip

# Calls in which rows of a block see different keys, many of them values that are not finite.
ADDING = (
    Case("causal gqa", T=150, S=170, H=24, N=4, K=2, causal=True, align=BOTTOM_RIGHT),
    Case("bfloat16 segments", T=150, S=170, H=64, segments="shuffled", dtype="bfloat16"),
    Case("bfloat16 mask wide", T=70, S=90, H=256, N=1, mask="b1ts", mask_density=0.2,
         dtype="bfloat16"),
    Case("few queries", T=4, S=170, H=64, N=4, K=2, causal=True, align=BOTTOM_RIGHT,
         window=(40, None)),
    Case("float16 window", T=150, S=150, H=128, N=1, window=(20, 11), dtype="float16"),
)  # fmt: skip


@pytest.mark.parametrize("name", ["key", "value"])
@pytest.mark.parametrize(("backend", "case"), with_backends(SHOWING, xla=for_xla), ids=case_id)
def test_poison_stays_with_those_who_see_it(case, name, backend):
    """One element of one key or value: rows that see it turn NaN, all else stays."""
    case = fit(case, backend)
    if refuses(case, backend):
        return
    clean = case.draw()
    group = case.N // case.kv_heads
    sees = clean.truth(gradients=False).seen[0, :group]  # of head 0 of the keys: [G, T, S]
    key = int(np.abs(sees.mean((0, 1)) - 0.5).argmin())
    assert 0 < sees[..., key].mean() < 1
    rows = np.zeros((2, case.T, case.N), bool)  # that see the key
    rows[0, :, :group] = sees[..., key].T
    keys = np.zeros((2, case.S, case.kv_heads), bool)  # that these rows see
    keys[0, :, 0] = (sees & sees[..., key, None]).any((0, 1))
    heads = rows.any((0, 1))

    before = clean.run(backend)
    for poison in POISONS:
        arrays = {**clean.arrays, name: clean.arrays[name].copy()}
        arrays[name][0, key, 0, 0] = poison
        after = dataclasses.replace(clean, arrays=arrays).run(backend)
        if np.isnan(poison):
            columns = slice(None) if name == "key" else 0
            assert np.isnan(after["out"][rows][:, columns]).all()
            if name == "key" and case.with_lse:
                assert np.isnan(after["lse"][rows]).all()
            assert np.isnan(after["dquery"][rows]).all()
        untouched = {
            "out": ~rows,
            "lse": ~rows if name == "key" else rows | ~rows,
            "dquery": ~rows,
            "dkey": ~keys,
            "dvalue": ~keys,
            "dbias": ~rows.swapaxes(1, 2),
            "dsinks": ~heads,
        }
        # The CUDA kernels compute again, in other steps, what NaN met in a tile.
        limit = 2e-2 if backend == "cuda" else 0.0
        for result in untouched.keys() & before.keys():
            at = untouched[result]
            got, want = (x[result][at].astype(np.float32) for x in (after, before))
            np.testing.assert_allclose(got, want, rtol=limit, atol=limit, err_msg=result)


# An infinity that a row sees makes all of the row NaN on "xla".
@pytest.mark.parametrize(
    ("backend", "case"), with_backends(ADDING, xla=lambda _: False), ids=case_id
)
def test_what_is_not_finite_adds_up_for_those_who_see_it(case, backend):
    """Many values of NaN and both infinities: a row has the sum of those that it sees."""
    case = fit(case, backend)
    if refuses(case, backend):
        return
    arguments = case.draw()
    value = arguments.arrays["value"]
    rng = np.random.default_rng(7)
    drawn = rng.choice([np.nan, np.inf, -np.inf, 0.0], value.shape, p=[0.004, 0.004, 0.004, 0.988])
    drawn[:, case.S // 2] = np.nan  # a whole row of values
    finite = np.where(drawn == 0, value, 0).astype(value.dtype)
    of_finite = dataclasses.replace(arguments, arrays=arguments.arrays | {"value": finite})
    seen = of_finite.truth(gradients=False).seen.astype(np.float64)
    spread = np.repeat(drawn, case.N // case.kv_heads, 2)
    met = [
        np.einsum("bnts,bsnh->btnh", seen, at(spread).astype(np.float64)) > 0
        for at in (np.isnan, np.isposinf, np.isneginf)
    ]
    with np.errstate(invalid="ignore"):
        sums = np.where(met[1], np.inf, 0) + np.where(met[2], -np.inf, 0)
    sums[met[0]] = np.nan
    want = of_finite.truth(gradients=False).out + sums

    dirty = np.where(drawn == 0, value, drawn).astype(value.dtype)
    dirty = dataclasses.replace(arguments, arrays=arguments.arrays | {"value": dirty})
    got = dirty.run(backend)["out"].astype(np.float64)
    assert 0.01 < np.isfinite(want).mean() < 0.99
    np.testing.assert_allclose(got, want, rtol=2e-2, atol=2e-2)


def test_no_leak_between_packed_documents(backend):
    """Changing one document changes nothing, to the bit, in the outputs of the others."""
    lengths = (1, 63, 65, 128, 30, 13)  # 300 tokens, boundaries on and beside multiples of 64
    ids = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)[None]
    rng = np.random.default_rng(0)
    dtype = DTYPES[widest_dtype(backend)]
    q, k, v = (rng.standard_normal((1, 300, 2, 32)).astype(dtype) for _ in range(3))

    @jax.jit
    def step(q, k, v):
        def loss(q, k, v):
            out = jax_flash.flash_attention(
                q, k, v, query_segment_ids=ids, key_value_segment_ids=ids, is_causal=True,
                backend=backend,
            )  # fmt: skip
            return jnp.square(out).sum(), out

        (_, out), gradients = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)
        return (out, *gradients)

    before = step(q, k, v)
    for document in (0, 2, 4):
        inside = ids[0] == document
        changed = []
        for x in (q, k, v):
            y = x.copy()
            y[:, inside] = 1e4 * rng.standard_normal(y[:, inside].shape)
            changed.append(y)
        after = step(*changed)
        for name, a, b in zip(("out", "dq", "dk", "dv"), before, after, strict=True):
            a, b = np.asarray(a), np.asarray(b)
            np.testing.assert_array_equal(a[:, ~inside], b[:, ~inside], err_msg=name)
            # A token alone has weight 1 whatever its query and key: these gradients are 0.
            if inside.sum() > 1 or name in ("out", "dv"):
                unchanged = np.array_equal(a[:, inside], b[:, inside])
                assert not unchanged, f"{name} ignores its document"


DOCUMENTS = np.repeat(np.arange(5, dtype=np.int32), (1, 63, 65, 40, 31))[None]


@functools.cache
def step_over_documents(backend):
    @jax.jit
    def step(query, key, value, dout):
        def out(query, key, value):
            return jax_flash.flash_attention(
                query, key, value, query_segment_ids=DOCUMENTS, key_value_segment_ids=DOCUMENTS,
                is_causal=True, backend=backend,
            )  # fmt: skip

        result, gradients = jax.vjp(out, query, key, value)
        return (result, *gradients(dout))

    return step


@pytest.mark.parametrize("name", ["query", "key", "value", "dout"])
@pytest.mark.parametrize(
    ("backend", "dim"), with_backends([64, 128, 256], xla=lambda dim: dim == 64)
)
def test_poison_stays_in_its_document(name, dim, backend):
    """NaN or inf that some rows see reaches no row of another document, gradients included."""
    step = step_over_documents(backend)
    rng = np.random.default_rng(dim)
    dtype = DTYPES[widest_dtype(backend)]
    clean = {
        "query": rng.standard_normal((1, 200, 4, dim)),
        "key": rng.standard_normal((1, 200, 2, dim)),
        "value": rng.standard_normal((1, 200, 2, dim)),
        "dout": rng.standard_normal((1, 200, 4, dim)),
    }
    clean = {key: array.astype(dtype) for key, array in clean.items()}

    before = [np.asarray(x).astype(np.float64) for x in step(**clean)]
    document = 3
    others = DOCUMENTS[0] != document
    for poison in POISONS:
        dirty = {key: array.copy() for key, array in clean.items()}
        dirty[name][:, np.flatnonzero(~others)[5:9], 1, 3] = poison
        after = [np.asarray(x).astype(np.float64) for x in step(**dirty)]
        for what, a, b in zip(("out", "dq", "dk", "dv"), before, after, strict=True):
            # The CUDA kernels compute such rows again, in other steps.
            np.testing.assert_allclose(
                b[:, others], a[:, others], rtol=2e-2, atol=2e-2, err_msg=f"{poison} in {what}"
            )
        assert not all(np.isfinite(x[:, ~others]).all() for x in after), f"{poison} is lost"


def test_future_keys_change_nothing(backend):
    """Causal: keys after a query's position change nothing, to the bit, in its output."""
    rng = np.random.default_rng(1)
    dtype = DTYPES[widest_dtype(backend)]
    q, k, v = (rng.standard_normal((2, 150, 2, 16)).astype(dtype) for _ in range(3))

    @jax.jit
    def out(q, k, v):
        return jax_flash.flash_attention(q, k, v, is_causal=True, backend=backend)

    before = np.asarray(out(q, k, v))
    for at in (1, 63, 64, 100):
        k2, v2 = k.copy(), v.copy()
        k2[:, at:], v2[:, at:] = 50.0, -1e6
        after = np.asarray(out(q, k2, v2))
        np.testing.assert_array_equal(before[:, :at], after[:, :at])
        assert not np.array_equal(before[:, at:], after[:, at:])
