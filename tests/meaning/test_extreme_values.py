"""Values at the ends of their range: ids, lengths, windows, scores, biases of -inf and large."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import reference

from ..cases import Case, fit, widest_dtype
from ..compare import compare, refuses
from ..poison import POISONS
from ..small import normal

SENTINELS = np.array([-1, 0, 1, -2, 2**31 - 1, -(2**31)], np.int32)


@pytest.mark.parametrize("sentinel", SENTINELS, ids=str)
def test_no_segment_id_is_special(sentinel, backend):
    """Any int32 is an id: none may match the padding of a kernel's last tile, or match nothing."""
    T, S = 37, 41
    ids = np.array([sentinel, 3], np.int32)
    dtype = widest_dtype(backend)
    arguments = Case("ids", T=T, S=S, segments="packed", with_lse=True, dtype=dtype).draw()
    arguments.arrays["query_segment_ids"] = np.tile(ids[np.arange(T) % 2], (2, 1))
    arguments.arrays["key_value_segment_ids"] = np.tile(ids[np.arange(S) % 2], (2, 1))
    compare(arguments, arguments.run(backend))


EXTREME_LENGTHS = (
    ((2**31 - 1, 41), (41, 41)),
    ((42, 10_000), (41, 41)),
    ((-1, -(2**31)), (0, 0)),
)


@pytest.mark.parametrize(("lengths", "clipped"), EXTREME_LENGTHS, ids=str)
@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
def test_lengths_beyond_the_array_are_clipped(lengths, clipped, align, backend):
    """Lengths are values, seen only at run time: wrong ones read nothing outside of the arrays."""
    arguments = Case("lengths", T=41, S=41, q_lengths=(41,), kv_lengths=(41,), causal=True,
                     align=align, with_lse=True, dtype=widest_dtype(backend)).draw()  # fmt: skip

    def run(lengths):
        given = np.array(lengths, np.int32)
        of = {"query_seq_lengths": given, "key_value_seq_lengths": given}
        return dataclasses.replace(arguments, arrays=arguments.arrays | of).run(backend)

    wild, tame = run(lengths), run(clipped)
    for name, value in tame.items():
        np.testing.assert_array_equal(wild[name], value, err_msg=name)


class Convertible:
    """An array to JAX alone."""

    def __init__(self, values):
        self.values = values

    def __jax_array__(self):
        return jnp.asarray(np.clip(self.values, -1, 2**31 - 1), jnp.int32)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize(
    "kind",
    [Convertible, list, np.asarray, lambda x: [np.int64(y) for y in x]],
    ids=["convertible", "list", "array", "scalars"],
)
def test_lengths_beyond_int32_are_clipped(kind, x64, host_backend):
    q = jnp.ones((3, 4, 1, 8))
    call = functools.partial(jax_flash.flash_attention, return_lse=True, backend=host_backend)
    with jax.enable_x64(x64):
        got = call(q, q, q, key_value_seq_lengths=kind([2**32, 2**40 + 1, -(2**33) + 2]))
    want = call(q, q, q, key_value_seq_lengths=jnp.array([4, 4, 0]))
    np.testing.assert_array_equal(got[1], want[1])


WIDE_WINDOWS = (
    (2**31 - 1, 2**31 - 1),
    (2**31 - 20, 3),
    (3, 2**31 - 20),
    (2**40, 2**40),
    (2**62, 0),
    (0, 2**31),
)


@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
@pytest.mark.parametrize("window", WIDE_WINDOWS, ids=str)
def test_window_arithmetic_does_not_overflow(window, align, backend):
    case = Case("wide", T=130, S=70, N=1, window=window, align=align, with_lse=True,
                dtype=widest_dtype(backend))  # fmt: skip
    compare(case.draw(), case.draw().run(backend))


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bias_of_minus_infinity_is_a_mask(dtype, sinks, backend):
    """Also a value of NaN behind it, and what the cotangents hold in rows that it hides whole."""
    case = Case("minus infinity", T=37, S=210, N=4, K=2, bias="bnts", dtype=dtype, sinks=sinks,
                with_lse=True)  # fmt: skip
    case = fit(case, backend)
    if refuses(case, backend):
        return
    clean = case.draw()
    hidden = np.random.default_rng(0).random(clean.arrays["bias"].shape) < 0.4
    hidden[:, :, :5] = True
    hidden[:, :, :, 100] = True
    hidden[0, 0, :, :150] = True
    by_mask = dataclasses.replace(clean, arrays=clean.arrays | {"mask": ~hidden})
    want = _by_name(by_mask.run(backend))
    bias = np.where(hidden, -np.inf, clean.arrays["bias"]).astype(clean.arrays["bias"].dtype)
    limit = 1e-5 if case.dtype == "float32" else 1e-2
    for poison in (0.0, *POISONS):
        value, dout, dlse = clean.arrays["value"].copy(), clean.dout.copy(), clean.dlse.copy()
        value[:, 100], dout[:, :5] = poison, poison
        if not sinks:
            dlse[:, :5] = poison
        arrays = clean.arrays | {"bias": bias, "value": value}
        got = _by_name(dataclasses.replace(clean, arrays=arrays, dout=dout, dlse=dlse).run(backend))
        assert (got["out"][:, :5] == 0).all()
        alone = clean.arrays["sinks"] if sinks else -np.inf
        assert (got["lse"][:, :5] == alone).all()
        assert (got["dquery"][:, :5] == 0).all()
        assert (got["dbias"][hidden] == 0).all()
        for name, expected in want.items():
            scale = np.abs(expected[np.isfinite(expected)]).max()
            np.testing.assert_allclose(
                got[name], expected, rtol=limit, atol=limit * scale, err_msg=f"{poison} in {name}"
            )


def _by_name(results):
    return {name: x.astype(np.float32) for name, x in results.items()}


@pytest.mark.parametrize("function", ["reference", "xla", "cpu"])
def test_biases_that_are_not_finite_follow_arithmetic(function):
    """A NaN or +inf that a row sees is its own; a value of NaN behind -inf is nobody's."""
    q, k, v = (normal(i, 1, 6, 1, 8) for i in range(3))
    v = v.at[0, 2, 0, 3].set(jnp.nan)
    bias = jnp.zeros((1, 1, 6, 6)).at[..., 2].set(-jnp.inf).at[..., 2, 2].set(0.0)
    bias = bias.at[0, 0, 4, 1].set(jnp.inf).at[0, 0, 5, 1].set(jnp.nan)

    def loss(q, k, bias, wanted):
        if function == "reference":
            out = reference.attention(q, k, v, bias=bias)
        else:
            out = jax_flash.flash_attention(q, k, v, bias=bias, backend=function)
        return jnp.sum(jnp.square(out)[:, wanted]), out

    rows = jnp.array([0, 1, 3])
    gradients, out = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(q, k, bias, rows)
    assert jnp.isfinite(out[0, rows]).all()
    assert jnp.isnan(out[0, 2, 0, 3])
    assert jnp.isnan(out[0, 4:]).all()
    assert jnp.isfinite(gradients[0][0, rows]).all()
    assert jnp.isfinite(gradients[2][0, 0, rows]).all()


def test_bias_of_minus_infinity_has_second_derivatives(host_backend):
    q, k, v = (normal(i, 1, 7, 2, 8) for i in range(3))
    bias = jnp.zeros((1, 2, 7, 7)).at[..., :2, :].set(-jnp.inf).at[..., 5].set(-jnp.inf)
    mask = bias == 0

    def size(q, k, **options):
        def loss(q, k, v):
            out = jax_flash.flash_attention(q, k, v, backend=host_backend, **options)
            return jnp.sum(jnp.sin(out))

        return sum(jnp.sum(jnp.square(x)) for x in jax.grad(loss, (0, 1, 2))(q, k, v))

    got, want = (
        jax.jit(jax.grad(lambda q, k, options=options: size(q, k, **options), (0, 1)))(q, k)
        for options in ({"bias": bias}, {"mask": mask})
    )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


LARGE_BIASES = (-1e4, -1e8, -1e10, -1e30, float(np.finfo(np.float32).min))


def test_large_finite_bias_is_no_mask(backend):
    """A bias used as a mask hides keys beside others; alone in a row it leaves a softmax."""
    arguments = Case("large bias", T=5, S=37, bias="11ts", precision="highest").draw()
    if refuses(arguments.case, backend):
        return
    # Times log2(e) the last one is -inf: on "cuda" it hides.
    for large in LARGE_BIASES[:-1] if backend == "cuda" else LARGE_BIASES:
        bias = np.zeros_like(arguments.arrays["bias"])
        bias[..., 0, :] = large
        bias[..., 1, 3:] = large
        bias[..., 2, :5] = large
        arguments.arrays["bias"] = bias
        got, truth = arguments.run(backend), arguments.truth()
        # In float32 the scores of row 0 vanish beside the bias.
        assert np.abs(truth.out[:, 1:] - got["out"][:, 1:]).max() < 1e-5, large
        if abs(large) > 1e6:
            mean = arguments.arrays["value"].mean(1)
            np.testing.assert_allclose(got["out"][:, 0], mean, rtol=1e-4, atol=1e-5)
            exact = slice(1, None)
        else:
            exact = slice(None)
        # A float32 lse of that size has no room for log(37): row 0 keeps no exact gradient, but
        # no weight is above 1 and nothing is lost elsewhere.
        limit = 40 * max(np.abs(truth.dq).max(), np.abs(truth.dv).max())
        for name, value in got.items():
            assert np.abs(value).max() < limit, f"{name} with {large}"
        np.testing.assert_allclose(
            got["dquery"][:, exact], truth.dq[:, exact], rtol=1e-2, atol=2e-3
        )
        # Where the loss does not look at that row, its bias does no harm at all.
        unseen = dataclasses.replace(arguments, dout=arguments.dout.copy())
        unseen.dout[:, 0] = 0
        got, truth = unseen.run(backend), unseen.truth()
        for name, expected in (("dquery", truth.dq), ("dkey", truth.dk), ("dvalue", truth.dv)):
            np.testing.assert_allclose(got[name], expected, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rows_of_large_numbers_behind_blocks_that_they_do_not_see(dtype, backend):
    """Their maxima come late, and are rounded by more than float32 has of a weight's range."""
    q, k, v = (normal(i, 1, 150, 2, 64).astype(dtype) for i in range(3))
    attend = functools.partial(
        jax_flash.flash_attention, local_window_size=5, return_lse=True, backend=backend
    )
    for large in (-1e10, 1e12, -1e30):
        bias = np.zeros((150, 1), np.float32)
        bias[3::8] = large
        out, lse = (np.asarray(x, np.float32) for x in jax.jit(attend)(q, k, v, bias=bias))
        np.testing.assert_allclose(lse[:, 3::8], large, rtol=1e-6)
        for row in range(3, 150, 8):  # a mean: the scores vanish beside the bias
            mean = v[0, max(row - 5, 0) : row + 6].astype(np.float32).mean(0)
            np.testing.assert_allclose(out[0, row], mean, atol=4 * float(jnp.finfo(dtype).eps))


@pytest.mark.parametrize(("by", "dtype"), [("bias", "float16"), ("score_mod", "bfloat16")])
def test_row_hidden_by_large_numbers_harms_no_gradient(by, dtype, backend):
    """A row without weights that its lse could tell, in 16 bits, beside rows of the same keys."""
    if by == "score_mod" and backend == "cpu":
        return  # has none
    q, k, v, w = (normal(i, 1, 70, 2, 64).astype(dtype) for i in range(4))

    @jax.jit
    def gradients(large, w):
        def score_mod(score, batch, head, query, key):
            return score + jnp.where(query == 0, large[0], 0.0)

        def loss(q, k, v):
            if by == "bias":
                bias = jnp.zeros((70, 70)).at[0].set(large)
                out = jax_flash.flash_attention(q, k, v, bias=bias, backend=backend)
            else:
                out = jax_flash.flash_attention(q, k, v, score_mod=score_mod, backend=backend)
            return jnp.vdot(out, w)

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    unseen = w.at[:, 0].set(0)
    want = gradients(jnp.array([-jnp.inf]), unseen)
    limit = 70 * max(np.abs(np.asarray(x, np.float32)).max() for x in want)
    for large in LARGE_BIASES[1:]:
        got = gradients(jnp.array([large]), unseen)
        for name, x, y in zip("qkv", got, want, strict=True):
            # How far a row's base is from its maximum depends on the rows beside it.
            error = np.abs(np.asarray(x, np.float32) - np.asarray(y, np.float32)).max()
            assert error < 4 * float(jnp.finfo(dtype).eps), f"d{name} with {large}"
        for x in gradients(jnp.array([large]), w):
            assert np.abs(np.asarray(x, np.float32)).max() < limit, large


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_large_scores_stay_finite(dtype, backend):
    """Scores far beyond the range of exp, and in float16 beyond the range of the type itself."""
    # At default precision GPUs round float32 to 11 bits, which large scores show.
    precision = "high" if dtype == "float32" else None
    case = Case(
        "large", T=40, S=60, H=64, dtype=dtype, spread=400.0, with_lse=True, precision=precision
    )
    if refuses(case, backend):
        return
    arguments = case.draw()
    arguments.arrays["key"] = (arguments.arrays["key"].astype(np.float32) * 100).astype(
        arguments.arrays["key"].dtype
    )
    truth, got = arguments.truth(), arguments.run(backend)
    assert np.abs(truth.lse).max() > 1e5
    for name, value in got.items():
        assert not np.isnan(value.astype(np.float32)).any(), name
    # The largest score wins the whole row; where two compete rounding decides between them.
    scale = np.abs(truth.lse)
    assert (np.abs(got["lse"] - truth.lse) <= 1e-5 * scale).all()
    clear = np.abs(got["out"].astype(np.float64) - truth.out).max(-1) < 0.05
    assert clear.mean() > 0.97


@pytest.mark.parametrize("rate", [0.0, 0.9])
def test_equal_weights_of_many_keys_in_float16(rate):
    """A weight of 1e-5 is no normal number there: "xla" multiplies larger ones."""
    q, k = jnp.zeros((1, 1, 1, 8), jnp.float16), jnp.ones((1, 100_000, 1, 8), jnp.float16)
    dropout = {"dropout_rate": rate, "dropout_key": jax.random.key(0)} if rate else {}
    out = jax_flash.flash_attention(q, k, k, backend="xla", **dropout)
    # The number of keys that are kept has a standard deviation of 1 %.
    np.testing.assert_allclose(out, 1.0, atol=0.05 if rate else 2e-3)
