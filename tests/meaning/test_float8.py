"""float8: arguments with scales, 16-bit ones that are quantised, and what neither can have.

The truth is float64 attention of the values that the call sees, which NumPy quantises by itself.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jax_flash
from jax_flash import flash_attention

from .. import numpy_oracle
from ..devices import mesh_with

BACKENDS = pytest.mark.parametrize("backend", ["cpu", "xla"])
E4M3 = ml_dtypes.float8_e4m3fn


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def with_outliers(seed: int, *shape: int) -> np.ndarray:
    """N(0, 1) + N(0, 100) * Bernoulli(0.001), as in FlashAttention-3's test, in bfloat16."""
    rng = np.random.default_rng(seed)
    large = 10 * rng.standard_normal(shape, np.float32) * (rng.random(shape) < 0.001)
    return (rng.standard_normal(shape, np.float32) + large).astype(ml_dtypes.bfloat16)


def hadamard(dim: int) -> np.ndarray:
    matrix = np.ones((1, 1))
    while len(matrix) < dim:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / 2 ** (len(f"{dim:b}") // 2)


def rounded(x: np.ndarray, block: int = 128) -> np.ndarray:
    """What float8 makes of x, by scales of powers of two for each head of a block: float64."""
    out = np.empty(x.shape)
    for start in range(0, x.shape[1], block):
        part = x[:, start : start + block]
        largest = np.abs(part).max(axis=(1, 3), keepdims=True)
        scale = 2.0 ** np.ceil(np.log2(np.where(largest > 0, largest, 448) / 448))
        out[:, start : start + block] = (part / scale).astype(E4M3).astype(np.float64) * scale
    return out


def seen(query, key, value, turned: bool = True) -> tuple[np.ndarray, ...]:
    """Query, key and value as quantize="fp8" has them, turned back."""
    wide = [np.asarray(x).astype(np.float64) for x in (query, key, value)]
    dim = wide[0].shape[-1]
    matrix = hadamard(dim) if turned and dim & (dim - 1) == 0 else np.eye(dim)
    back = np.linalg.inv(matrix)
    return rounded(wide[0] @ matrix) @ back, rounded(wide[1] @ matrix) @ back, rounded(wide[2])


def truth(query, key, value, **options) -> np.ndarray:
    return numpy_oracle.attention(query, key, value, **options).out


def formula(query, key, value) -> np.ndarray:
    """Plain attention of one batch row and head, in float64."""
    query, key, value = (np.asarray(x).astype(np.float64)[0, :, 0] for x in (query, key, value))
    scores = query @ key.T * query.shape[-1] ** -0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True) @ value)[None, :, None]


def rms(x, y) -> float:
    return float(np.sqrt(np.mean((np.asarray(x).astype(np.float64) - y) ** 2)))


# ---- arguments of float8 -------------------------------------------------------------------------

B, T, S, N, K, H, HV = 2, 150, 200, 4, 2, 64, 80
TERMS = {
    "causal, lengths, sinks": {
        "is_causal": True,
        "causal_align": "bottom_right",
        "query_seq_lengths": np.int32([150, 90]),
        "key_value_seq_lengths": np.int32([120, 200]),
        "sinks": np.float32([0.5, -1, 2, 0]),
    },
    "segments, window, softcap": {
        "query_segment_ids": np.repeat(np.int32([[0, 1], [1, 0]]), 75, axis=1),
        "key_value_segment_ids": np.repeat(np.int32([[0, 1], [1, 1]]), 100, axis=1),
        "local_window_size": (40, 30),
        "softcap": 2.0,
    },
}
SCALES = {
    "none": ((), (), ()),
    "heads, 64, 128": ((B, N), (B, 4, K), (B, 2, K)),
    "128, number, heads": ((B, 2, N), (), (B, K)),
}


@BACKENDS
@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("scales", SCALES)
def test_values_times_scales(backend, terms, scales):
    arrays = [
        normal(i, *shape).astype(E4M3)
        for i, shape in enumerate(((B, T, N, H), (B, S, K, H), (B, S, K, HV)))
    ]
    names = ("query_scale", "key_scale", "value_scale")
    given, wide = {}, []
    for i, (name, x, shape) in enumerate(zip(names, arrays, SCALES[scales], strict=True)):
        scale = np.exp(0.5 * normal(10 + i, *shape)).astype(np.float32)
        given |= {name: scale} if scales != "none" else {}
        scale = scale if scales != "none" else np.float32(1)
        if scale.ndim == 3:
            size = 64 if scale.shape[1] > 2 else 128
            scale = np.repeat(scale, size, axis=1)[:, : x.shape[1], :, None]
        else:
            scale = scale[..., None, :, None] if scale.ndim else scale
        wide.append(x.astype(np.float64) * scale)
    call = jax.jit(
        lambda q, k, v, given: flash_attention(
            q, k, v, out_dtype="float32", backend=backend, **TERMS[terms], **given
        )
    )
    out = call(*arrays, given)
    assert out.dtype == jnp.float32
    exact = truth(*wide, **TERMS[terms])
    np.testing.assert_allclose(out, exact, rtol=0, atol=3e-5 * np.abs(exact).max())
    half = flash_attention(*arrays, backend=backend, **TERMS[terms], **given)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_array_equal(half, out.astype(jnp.bfloat16))


def test_a_traced_scale_and_members_that_share_keys():
    """A scale that is an array joins the query's; scales may be mapped where values are not."""
    query = normal(0, 3, 1, 70, 2, 64).astype(E4M3)
    key = normal(1, 1, 70, 2, 64).astype(E4M3)
    scales = np.float32([0.5, 1, 2])

    def call(q, scale):
        return flash_attention(
            q, key, key, scale=scale, key_scale=scale, out_dtype="float32", backend="cpu"
        )

    out = jax.vmap(call)(query, scales)
    for member, scale in enumerate(scales):
        wide = [x.astype(np.float64) for x in (query[member], scale * key.astype("float64"), key)]
        np.testing.assert_allclose(out[member], truth(*wide, scale=float(scale)), atol=2e-5)


# ---- 16-bit arguments that are quantised ---------------------------------------------------------


@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize("length", [1, 200])
def test_quantised_values_are_those_of_numpy_bit_by_bit(dim, length):
    """Exactly: of a one-hot attention, whose results are the values as they were quantised."""
    query = np.zeros((1, 1, 2, dim), ml_dtypes.bfloat16)
    key, value = (with_outliers(i, 1, length, 2, dim) for i in (1, 2))
    value[:, :, 1] *= ml_dtypes.bfloat16(2.0**-40)
    got = [
        flash_attention(
            *(query, key, value),
            quantize="fp8",
            local_window_size=(0, 0),
            causal_align="bottom_right",
            query_seq_lengths=np.int32([1]),
            key_value_seq_lengths=np.int32([n]),
            out_dtype="float32",
        )[0, 0]
        for n in (1, length)
    ]
    _, _, exact = seen(query, key, value)
    np.testing.assert_array_equal(got, exact[0, [0, length - 1]])


def test_outliers_cost_little():
    """FlashAttention-3's test, for which their paper has 9.1e-3: the mean of three seeds."""
    errors, exacts, unturned = [], [], []
    for seed in range(3):
        arrays = [with_outliers(3 * seed + i, 1, 2048, 1, 128) for i in range(3)]
        plain = formula(*arrays)
        errors.append(rms(flash_attention(*arrays, quantize="fp8"), plain))
        exacts.append(rms(formula(*seen(*arrays)), plain))
        unturned.append(rms(formula(*seen(*arrays, turned=False)), plain))
    assert 6e-3 < np.mean(errors) < 9.1e-3
    assert np.mean(errors) < 0.9 * np.mean(unturned)
    assert np.mean(errors) < 1.15 * np.mean(exacts)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("dim", [128, 80])
def test_gradients_are_those_of_16_bits_at_the_values_that_were_seen(dtype, dim):
    """Straight through: as if query, key and value were what float8 made of them."""
    query, key, value = (
        normal(i, 1, 140, heads, dim).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        for i, heads in enumerate((4, 2, 2))
    )
    dout = normal(4, *query.shape)
    sinks = np.float32([0, 1, 2, 3])
    options = {"is_causal": True, "local_window_size": (60, 0), "softcap": 5.0, "sinks": sinks}

    def loss(query, key, value, sinks):
        out, lse = flash_attention(
            query, key, value, quantize="fp8", return_lse=True, **options | {"sinks": sinks}
        )
        assert out.dtype == query.dtype
        return (out.astype(jnp.float32) * dout).sum() + lse.sum()

    got = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(query, key, value, sinks)
    there = numpy_oracle.attention(
        *seen(query, key, value), dout=dout, dlse=np.ones((1, 140, 4)), **options
    )
    got = [np.asarray(x) for x in got]
    for x, exact in zip(got, (there.dq, there.dk, there.dv, there.dsinks), strict=True):
        assert np.linalg.norm(x.astype(np.float64) - exact) < 0.02 * np.linalg.norm(exact)
    # The gradient at the values as they were given is another.
    given = [x.astype(np.float64) for x in (query, key, value)]
    plain = numpy_oracle.attention(*given, dout=dout, dlse=np.ones((1, 140, 4)), **options)
    assert np.linalg.norm(plain.dq - there.dq) > 0.03 * np.linalg.norm(there.dq)
    # Forward mode has the same derivative.
    moving = [normal(7 + i, *x.shape).astype(x.dtype) for i, x in enumerate((query, key, value))]
    _, moved = jax.jvp(lambda *x: loss(*x, sinks), (query, key, value), tuple(moving))
    pairs = [
        (m.astype(np.float64), g.astype(np.float64)) for m, g in zip(moving, got[:3], strict=True)
    ]
    sizes = sum(np.linalg.norm(m) * np.linalg.norm(g) for m, g in pairs)
    assert abs(moved - sum((m * g).sum() for m, g in pairs)) < 2e-3 * sizes


def test_hidden_values_reach_nothing():
    """NaN in padding leaves the scales of the blocks that it lies in alone."""
    arrays = [normal(i, 1, 150, 2, 64).astype(ml_dtypes.bfloat16) for i in range(3)]
    lengths = np.int32([140])
    options = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths, "quantize": "fp8"}

    def run(*arrays):
        def loss(*arrays):
            out = flash_attention(*arrays, **options)
            return out.astype(jnp.float32).sum(), out

        return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(*arrays)

    clean, dirty = [x.copy() for x in arrays], [x.copy() for x in arrays]
    for zeros, bad, what in zip(clean, dirty, (np.nan, np.inf, np.nan), strict=True):
        zeros[:, 140:], bad[:, 140:] = 0, what
    for got, want in zip(jax.tree.leaves(run(*dirty)), jax.tree.leaves(run(*clean)), strict=True):
        np.testing.assert_array_equal(got, want)


def test_sharded_by_heads_that_share_keys():
    """Eight devices, four kv heads: each has two devices, and scales of its own."""
    mesh = mesh_with(heads=8)
    arrays = [normal(i, 1, 140, heads, 64).astype(E4M3) for i, heads in enumerate((16, 4, 4))]
    scales = [np.exp(normal(5 + i, 1, 2, heads)) for i, heads in enumerate((16, 4, 4))]
    names = ("query_scale", "key_scale", "value_scale")

    def call(arrays, scales):
        return flash_attention(*arrays, **dict(zip(names, scales, strict=True)), is_causal=True)

    split = NamedSharding(mesh, PartitionSpec(None, None, "heads"))
    placed = [jax.device_put(arrays[0], split), *arrays[1:]]
    got = jax.jit(call)(placed, scales)
    assert got.sharding.is_equivalent_to(split, got.ndim)
    np.testing.assert_array_equal(got, jax.jit(call)(arrays, scales))


def test_sharded_and_mapped_calls_that_quantise():
    """Eight devices, four kv heads; and members of a vmap that share keys."""
    mesh = mesh_with(heads=8)
    arrays = [with_outliers(i, 1, 140, heads, 64) for i, heads in enumerate((16, 4, 4))]

    def call(*arrays):
        def loss(*arrays):
            out, amax = flash_attention(*arrays, quantize="fp8", is_causal=True, return_amax=True)
            return out.astype(jnp.float32).sum(), (out, amax)

        return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(*arrays)

    split = NamedSharding(mesh, PartitionSpec(None, None, "heads"))
    placed = [jax.device_put(arrays[0], split), *arrays[1:]]
    sums, (out, amax) = jax.jit(call)(*placed)
    exact, (want, largest) = jax.jit(call)(*arrays)
    assert out.sharding.is_equivalent_to(split, out.ndim)
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(amax, largest)
    for got, there in zip(sums, exact, strict=True):
        got, there = (np.asarray(x).astype(np.float64) for x in (got, there))
        assert np.linalg.norm(got - there) < 0.01 * np.linalg.norm(there)

    queries = np.stack([arrays[0], 2 * arrays[0], with_outliers(5, *arrays[0].shape)])
    mapped = jax.vmap(lambda q: flash_attention(q, *arrays[1:], quantize="fp8"))(queries)
    for query, got in zip(queries, mapped, strict=True):
        np.testing.assert_array_equal(got, flash_attention(query, *arrays[1:], quantize="fp8"))


def test_largest_magnitudes():
    query, key, value = (with_outliers(i, 1, 40, 1, 64) for i in range(3))
    value[0, 3, 0, 5] = np.nan
    out, lse, amax = flash_attention(
        query, key, value, quantize="fp8", return_lse=True, return_amax=True
    )
    assert (out.shape, lse.shape) == ((1, 40, 1, 64), (1, 40, 1))
    finite = [np.nanmax(np.abs(x.astype(np.float32))) for x in (query, key, value)]
    np.testing.assert_array_equal(amax, finite)
    narrow = [x.astype(E4M3) for x in (query, key, query)]
    _, amax = flash_attention(*narrow, key_scale=0.25, return_amax=True)
    finite = [np.abs(x.astype(np.float32)).max() for x in narrow]
    np.testing.assert_array_equal(amax, [finite[0], finite[1] / 4, finite[2]])


# ---- what float8 does not have -------------------------------------------------------------------

X = normal(0, 1, 16, 2, 64).astype(ml_dtypes.bfloat16)
NARROW = X.astype(E4M3)
ABSENT = {
    "no bias": {"bias": np.zeros((16, 16), np.float32)},
    "no boolean mask": {"mask": np.tri(16) > 0},
    "no dropout": {"dropout_rate": 0.5, "dropout_key": jax.random.key(0)},
    "no score function": {"score_mod": lambda score, b, h, q, k: score - abs(q - k)},
}


@pytest.mark.parametrize("reason", ABSENT)
def test_what_it_does_not_have_runs_in_16_bits_if_asked(reason):
    options = ABSENT[reason]
    for x, asked in ((X, {"quantize": "fp8"}), (NARROW, {"key_scale": 2.0})):
        with pytest.raises(NotImplementedError, match=f"{reason};.*fallback='16bit'"):
            flash_attention(x, x, x, **asked, **options)
        got = flash_attention(x, x, x, **asked, **options, fallback="16bit", out_dtype="float32")
        wide = x.astype(ml_dtypes.bfloat16)
        key = wide * ml_dtypes.bfloat16(asked.get("key_scale", 1))
        assert got.dtype == jnp.float32
        np.testing.assert_array_equal(got, flash_attention(wide, key, wide, **options))


def test_other_head_dims():
    for dim in (32, 72, 272):
        x = np.zeros((1, 4, 1, dim), E4M3)
        with pytest.raises(NotImplementedError, match=rf"64 to 256 that 16 divides, not {dim}"):
            flash_attention(x, x, x)


def test_arguments_of_float8_have_no_derivative():
    with pytest.raises(NotImplementedError, match=r"float8_e4m3fn has no derivative.*quantize"):
        jax.grad(lambda x: flash_attention(x, NARROW, NARROW).astype(jnp.float32).sum())(NARROW)


@pytest.mark.usefixtures("uncompiled")
def test_a_gpu_without_kernels():
    """fallback lets kernels of 16 bits run it; without, backend "xla" does, and says why."""
    refused = jax_flash.explain(NARROW, NARROW, NARROW, gpu="A100").forward
    assert refused.backend == "xla"
    assert any("fallback='16bit'" in reason for reason in refused.refusals["cuda"])
    taken = jax_flash.explain(X, X, X, quantize="fp8", fallback="16bit", gpu="A100")
    assert (taken.forward.backend, taken.problem.dtype) == ("cuda", "float8_e4m3fn")
    assert jax_flash.explain(NARROW, NARROW, NARROW).backward.backend == "none"


F32 = X.astype(np.float32)
FAULTS = [
    ((F32,), {"quantize": "fp8"}, TypeError, "quantize is 'fp8' and query has dtype float32"),
    ((NARROW,), {"quantize": "fp8"}, TypeError, "it is quantised already"),
    ((X,), {"quantize": "int8"}, ValueError, "quantize is 'int8'; expected one of 'fp8'"),
    ((X,), {"quantize": "fp8", "fallback": "f32"}, ValueError, "expected one of '16bit'"),
    ((X,), {"key_scale": 2.0}, ValueError, "key_scale is 2.0: query has dtype bfloat16"),
    ((X,), {"out_dtype": "float32"}, ValueError, "out_dtype is 'float32': expected query of"),
    ((X,), {"return_amax": True}, ValueError, "return_amax is True and query has dtype bfl"),
    ((NARROW,), {"out_dtype": "float64"}, TypeError, "out_dtype is float64; expected one of"),
    ((NARROW,), {"key_scale": 2}, TypeError, "key_scale has dtype int32"),
    ((NARROW,), {"key_scale": -2.0}, ValueError, "key_scale is -2.0; expected 0 or above"),
    ((NARROW,), {"query_scale": np.array([[2, -1]], "float32")}, ValueError,
     "query_scale[0, 1] is -1.0; expected 0 or above"),
    ((NARROW,), {"value_scale": np.ones(2, "float32")}, ValueError,
     "value_scale has shape (2,) and value (1, 16, 2, 64); expected (), [*B, heads] = (1, 2)"),
    ((X.astype(ml_dtypes.float8_e5m2),), {}, TypeError, "float64, float8_e4m3fn, for example"),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault[-1][:40])
def test_faults_are_named(fault):
    (x,), options, error, text = fault
    with pytest.raises(error, match=re.escape(text)):
        flash_attention(x, x, x, **options)
