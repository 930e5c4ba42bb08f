"""qwix's quantised arrays as arguments of flash_attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jax_flash import flash_attention

from .. import numpy_oracle

qwix = pytest.importorskip("qwix")
E4M3 = ml_dtypes.float8_e4m3fn


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def test_arrays_of_qwix():
    """Scales of whole heads, of 64, 128 and 256 positions, and one beside plain float8."""
    draws = [normal(i, 2, 512, heads, 64) for i, heads in enumerate((4, 2, 2))]
    of_heads = {"qtype": jnp.float8_e4m3fn, "channelwise_axes": (0, 2)}
    plain = flash_attention(*(x.astype(E4M3) for x in draws), out_dtype="float32")
    for sizes in ((None, 64, 256), (128, None, None)):
        arrays = [
            qwix.quantize(x, **of_heads, tiled_axes={} if size is None else {1: size})
            for x, size in zip(draws, sizes, strict=True)
        ]
        got = jax.jit(lambda *x: flash_attention(*x, is_causal=True, out_dtype="float32"))(*arrays)
        wide = [np.asarray(qwix.dequantize(x)).astype(np.float64) for x in arrays]
        exact = numpy_oracle.attention(*wide, is_causal=True).out
        np.testing.assert_allclose(got, exact, rtol=0, atol=3e-5 * np.abs(exact).max())
    whole = qwix.quantize(draws[1] * 3, qtype=jnp.float8_e4m3fn)
    query, value = (draws[i].astype(E4M3) for i in (0, 2))
    got = flash_attention(query, whole, value, scale=1 / 24, out_dtype="float32")
    assert 0 < np.abs(got - plain).max() < 0.1

    def refused(text, x, **options):
        with pytest.raises((TypeError, ValueError), match=text):
            flash_attention(draws[0].astype(E4M3), x, value, **options)

    refused("key_scale is given and key is a QArray", whole, key_scale=2.0)
    refused("key is a QArray of int8; expected float8_e4m3fn",
            qwix.quantize(draws[1], qtype=jnp.int8))  # fmt: skip
    refused("the scale of key.* expected 0 or above",
            whole.replace(scale=-np.ones((1,) * 4, np.float32)))  # fmt: skip
    zero_point = jnp.zeros((1,) * 4, E4M3)
    refused("key is a QArray with a zero_point", whole.replace(zero_point=zero_point))
    for tiles in ({1: 32}, {3: 32}):
        refused(
            r"the scale of key has shape .* qvalue \(2, 512, 2, 64\); .*a multiple of 64",
            qwix.quantize(draws[1], **of_heads, tiled_axes=tiles),
        )
