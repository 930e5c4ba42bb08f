"""What nobody may see reaches nothing: NaN and inf in padding and in hidden keys, segment leaks."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import reference

from ..cases import BOTTOM_RIGHT, Arguments, Case, fit, widest_dtype
from ..conformance_cases import covering
from ..conftest import with_backends
from ..numpy_oracle import DTYPES
from ..small import normal
from .test_conformance import VALUED, compare, refuses

POISONS = (np.nan, np.inf, -np.inf)

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
    Case("bfloat16 segments", T=60, S=70, H=64, segments="shuffled", kv_lengths=(70, 33),
         dtype="bfloat16", with_lse=True),
    Case("bfloat16 positions", T=150, S=300, H=64, positions="striped", causal=True,
         window=(20, None), dtype="bfloat16", with_lse=True),
    Case("bfloat16 segments apart", T=60, S=70, segments="apart", dtype="bfloat16", with_lse=True),
    Case("float16 window", T=190, S=30, window=(9, 2), align=BOTTOM_RIGHT, dtype="float16"),
)  # fmt: skip


def poisoned(arguments: Arguments, poison: float) -> Arguments:
    """The same call with poison in every place that the call's meaning hides."""
    case = arguments.case
    seen = arguments.truth(gradients=False).seen
    rows = seen.shape[0]
    arrays = {name: array.copy() for name, array in arguments.arrays.items()}
    group = case.N // case.kv_heads
    rows_seen = seen.any(-1).swapaxes(1, 2)  # [B, T, N]
    keys_seen = seen.any(-2).reshape(rows, case.kv_heads, group, case.S).any(2).swapaxes(1, 2)
    arrays["query"][~rows_seen] = poison
    arrays["key"][~keys_seen] = poison
    arrays["value"][~keys_seen] = poison
    if "bias" in arrays:
        bias = arrays["bias"]
        kept = seen
        for axis, size in enumerate((1,) * (4 - bias.ndim) + bias.shape):
            if size == 1:
                kept = kept.any(axis, keepdims=True)
        bias[~kept.reshape(bias.shape)] = poison
    dout, dlse = arguments.dout.copy(), arguments.dlse
    dout[~rows_seen] = poison
    if dlse is not None and not case.sinks:  # there lse is a function of the sink
        dlse = dlse.copy()
        dlse[~rows_seen] = poison
    return dataclasses.replace(arguments, arrays=arrays, dout=dout, dlse=dlse)


def names(value: Case | str) -> str:
    return value if isinstance(value, str) else value.name.replace(" ", "-")


def for_xla(case: Case) -> bool:
    """Whether XLA may get it: kernels of 16 bits and of some dims are others, XLA's are not."""
    return case.dtype == "float32" or case.name == "bfloat16"


# It gets so many that every two terms that meet in a case meet in one of these.
COVERING = covering(
    [case for case in HIDING if for_xla(case)], ignored={"H", "mask_density"}, valued=VALUED
)


@pytest.mark.parametrize(
    ("backend", "case"), with_backends(HIDING, xla=COVERING.__contains__), ids=names
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
    Case("float16 mask", T=60, S=70, mask="b1ts", mask_density=0.5, dtype="float16"),
)  # fmt: skip


@pytest.mark.parametrize("name", ["key", "value"])
@pytest.mark.parametrize(("backend", "case"), with_backends(SHOWING, xla=for_xla), ids=names)
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
        # The CUDA kernels compute again, without rounding P and dS, what NaN met in a tile.
        limit = 2e-2 if backend == "cuda" else 0.0
        for result in untouched.keys() & before.keys():
            at = untouched[result]
            got, want = (x[result][at].astype(np.float32) for x in (after, before))
            np.testing.assert_allclose(got, want, rtol=limit, atol=limit, err_msg=result)


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


@pytest.mark.parametrize("keys", [0, 3])
def test_partial_results_merge_with_a_sink(keys, backend):
    """Softmax over two sets of keys, by out and lse of each: also where one set is empty."""
    dtype = widest_dtype(backend)
    q, k, v = (normal(i, 1, 5, 2, 16).astype(dtype) for i in range(3))
    sinks = jnp.array([0.3, -2.0])

    def merged(sinks, k):
        call = functools.partial(
            jax_flash.flash_attention, return_lse=True, backend=backend if keys else None
        )
        out, lse = call(q, k[:, :keys], v[:, :keys], sinks=sinks)
        other, other_lse = jax_flash.flash_attention(
            q, k[:, keys:], v[:, keys:], return_lse=True, backend=backend
        )
        total = jnp.logaddexp(lse, other_lse)
        out = out * jnp.exp(lse - total)[..., None] + other * jnp.exp(other_lse - total)[..., None]
        return jnp.sum(jnp.sin(out)) + jnp.sum(total), out

    def whole(sinks, k):
        out, lse = jax_flash.flash_attention(q, k, v, sinks=sinks, return_lse=True, backend=backend)
        out = out.astype(jnp.float32)
        return jnp.sum(jnp.sin(out)) + jnp.sum(lse), out

    limit = 1e-5 if dtype == "float32" else 3e-2
    got, want = (
        jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))(sinks, k) for f in (merged, whole)
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=limit, atol=limit
        )


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
            # The CUDA kernels compute such rows again, without rounding P and dS.
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
