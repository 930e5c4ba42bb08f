"""attention_fn with options of flash_attention: set by partial, each with its effect, refused."""

import functools
import inspect
from typing import get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import _gpu, attention
from jax_flash.layers import nnx as flash_nnx

from ..conftest import needs_module
from ..small import numpy_normal as normal
from .flax_layers import (
    BATCH,
    FEATURES,
    FLASH,
    HEADS,
    LENGTH,
    STOCK,
    decode_linen,
    decode_nnx,
    random_mask,
    run_layer,
)

pytestmark = pytest.mark.quick


OPTIONS = {
    "scale": 0.3,
    "softcap": 2.0,
    "sinks": normal(6, HEADS),
    "causal_align": "bottom_right",
    "local_window_size": (4, 1),
    "query_seq_lengths": np.array([LENGTH, 8]),
    "key_value_seq_lengths": np.array([7, LENGTH]),
    "query_segment_ids": np.array([[0] * 6 + [1] * 7] * BATCH),
    "key_value_segment_ids": np.array([[0] * 5 + [1] * 8] * BATCH),
    "backend": "xla",
}
# These instead of an alignment.
POSITIONS = {
    "local_window_size": (4, 1),
    "query_positions": np.array([np.arange(LENGTH), LENGTH - np.arange(LENGTH)]),
    "key_value_positions": np.array([np.arange(LENGTH) + 3, LENGTH - np.arange(LENGTH)]),
}
# These instead of a softcap.
FUNCTIONS = {
    "score_mod": lambda score, batch, head, query, key: score * (1 + head),
    "block_mask": jax_flash.block_mask_of(np.arange(HEADS).reshape(-1, 1, 1) % 2 == 0, block=16),
    "backend": "xla",
}


@pytest.mark.parametrize(
    "options", [OPTIONS, POSITIONS, FUNCTIONS], ids=["all", "positions", "functions"]
)
def test_options_of_flash_attention_are_set_by_partial(api, options):
    seen = {}

    def spy(query, key, value, **_):
        seen["out"] = jax_flash.flash_attention(query, key, value, **options)
        return seen["out"]

    x = normal(1, BATCH, LENGTH, FEATURES)
    (ours,) = run_layer(api, functools.partial(FLASH[api], **options), x)
    (expected,) = run_layer(api, spy, x)
    np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize("name", sorted({*OPTIONS, *POSITIONS, *FUNCTIONS} - {"backend"}))
def test_every_option_has_an_effect(api, name):
    query = normal(1, BATCH, LENGTH, HEADS, 8)
    given = next(options for options in (OPTIONS, POSITIONS, FUNCTIONS) if name in options)
    without = dict(given)
    del without[name]
    if name.endswith("segment_ids"):
        without = {k: o for k, o in without.items() if not k.endswith("segment_ids")}
    outs = [FLASH[api](query, query, query, **options) for options in (given, without)]
    assert np.abs(outs[0] - outs[1]).max() > 1e-3


def test_the_backend_is_the_one_that_is_named(api):
    query = normal(1, BATCH, LENGTH, HEADS, 8)
    with pytest.raises(NotImplementedError, match="cuda"):
        FLASH[api](query, query, query, backend="cuda")


def test_options_are_those_of_flash_attention(api):
    everything = inspect.signature(jax_flash.flash_attention).parameters.keys()
    # Flax's own words say dropout_rng, and by deterministic that there is no dropout; float8 and
    # chosen keys are of the call alone.
    refused = {"return_lse", "return_amax"}
    refused |= get_type_hints(attention.Float8Options).keys()
    refused -= get_type_hints(attention.Options).keys()
    refused |= {"dropout_key", "indices"}
    query = normal(1, BATCH, LENGTH, HEADS, 8)
    taken = {*inspect.signature(FLASH[api]).parameters, *OPTIONS, *POSITIONS, *FUNCTIONS}
    assert everything - refused <= taken
    for name in (*refused, "softcaps"):
        with pytest.raises(TypeError, match=f"'{name}'.*softcap"):
            FLASH[api](query, query, query, **{name: None})


@pytest.mark.parametrize("window", [4, (4, 0)])
def test_a_window_is_refused_where_a_cache_hides_the_position(api, window):
    x = normal(1, BATCH, LENGTH, FEATURES)
    attention_fn = functools.partial(FLASH[api], local_window_size=window)
    with pytest.raises(ValueError, match="local_window_size needs the position"):
        (decode_nnx if api == "nnx" else decode_linen)(attention_fn, x)


def test_a_window_in_decoding_with_the_written_length(api):
    query, key, value = (normal(i, BATCH, T, HEADS, 8) for i, T in enumerate((1, LENGTH, LENGTH)))
    written = np.array([9, 4])
    mask = (np.arange(LENGTH) < written[:, None])[:, None, None]
    seen = mask & (np.arange(LENGTH) >= written[:, None, None, None] - 3)
    windowed = FLASH[api](
        query,
        key,
        value,
        mask=mask,
        local_window_size=(2, 0),
        causal_align="bottom_right",
        key_value_seq_lengths=written,
    )
    np.testing.assert_allclose(windowed, FLASH[api](query, key, value, mask=seen), atol=2e-6)
    # The same by where the query stands, and without a word on what is written.
    for options in ({"mask": mask, "local_window_size": (2, 0)}, {"local_window_size": (2, 0)},
                    {"mask": mask, "local_window_size": (2, None), "is_causal": True}):  # fmt: skip
        placed = FLASH[api](query, key, value, query_positions=written[:, None] - 1, **options)
        np.testing.assert_allclose(placed, windowed, atol=2e-6)


@needs_module
@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True, "local_window_size": (127, None), "softcap": 50.0},
        {"key_value_seq_lengths": np.array([LENGTH, 7])},
        {"mask": random_mask(BATCH, 1, LENGTH, LENGTH)},
    ],
    ids=["window", "lengths", "mask"],
)
def test_calls_from_flax_run_in_the_cuda_kernels(api, options, monkeypatch):
    monkeypatch.setattr(_gpu.few_scores, "takes", lambda call, shapes, gpu: False)
    query = jnp.zeros((BATCH, LENGTH, HEADS, 64), jnp.bfloat16)
    traced = jax.jit(lambda query: FLASH[api](query, query, query, **options)).trace(query)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "jax_flash_cuda_forward" in text


def test_partials_run_under_jit_and_grad(api):
    x = normal(1, BATCH, LENGTH, FEATURES)
    attention_fn = functools.partial(FLASH[api], local_window_size=(4, 0), softcap=3.0)

    def loss(x):
        return jnp.sum(run_layer(api, attention_fn, x)[0] ** 2)

    np.testing.assert_allclose(jax.jit(jax.grad(loss))(x), jax.grad(loss)(x), atol=1e-4)


def test_signature_has_all_that_flax_passes(api):
    ours, stock = (set(inspect.signature(fn[api]).parameters) for fn in (FLASH, STOCK))
    assert stock <= ours


def test_input_positions_are_refused():
    query = normal(1, BATCH, LENGTH, HEADS, 8)
    with pytest.raises(ValueError, match="rotary_base"):
        flash_nnx.attention_fn(query, query, query, input_positions=jnp.arange(LENGTH))
