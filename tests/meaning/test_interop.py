"""The programs of docs/libraries.md, with the libraries that they are for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash import advise

PAGE = Path(__file__).parents[2] / "docs" / "libraries.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="needs the checkout's docs/")


def program(containing: str) -> dict[str, Any]:
    found = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (text,) = (x for x in found if containing in x)
    defined: dict[str, Any] = {}
    exec(compile(text, PAGE.name, "exec"), defined)
    return defined


def test_tokamax():
    tokamax = pytest.importorskip("tokamax", reason="needs tokamax: .ci/run installs it")
    attend = program("tokamax")["attend"]
    B, T, S, N, K, H = 2, 20, 24, 4, 2, 16
    draws = (jax.random.normal(jax.random.key(i), x) for i, x in enumerate(
        [(B, T, N, H), (B, S, K, H), (B, S, K, H), (1, N, T, S)]))  # fmt: skip
    query, key, value, bias = draws
    mask = jax.random.bernoulli(jax.random.key(4), 0.8, (B, 1, T, S)).at[..., 0].set(True)
    cases: list[dict[str, Any]] = [
        {},
        {"bias": bias, "logits_soft_cap": 5.0},
        {"mask": mask, "is_causal": True, "scale": 0.3},
        {"key_value_seq_lengths": jnp.array([24, 9]), "is_causal": True},
        {"local_window_size": (3, 2)},
        {"local_window_size": (3, 2), "is_causal": True, "mask": mask[:, :, :, :1]},
    ]
    for options in cases:
        ours = attend(query, key, value, **options)
        theirs = tokamax.dot_product_attention(query, key, value, implementation="xla", **options)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5, err_msg=str([*options]))
    found = advise(lambda *x: attend(*x, **cases[3]), query, key, value)
    assert (found.calls, found.findings) == (1, ())  # causality and lengths came as options
    lengths = {"query_seq_lengths": jnp.array([20, 7])}
    ours, theirs = (
        tokamax.dot_product_attention(query, key, value, implementation=which, **lengths)
        for which in (attend.keywords["implementation"], "xla")
    )
    np.testing.assert_allclose(ours[1, :7], theirs[1, :7], rtol=0, atol=1e-5)
    assert not ours[1, 7:].any()

    from tokamax._src.ops.attention.base import Mask

    ranges = Mask(k_start=jnp.array([0, 0, 2] + [1] * 17), is_causal=True)
    out = attend.keywords["implementation"][0](query, key, value, mask=ranges)
    seen = ranges.as_array(T, S)
    exact = tokamax.dot_product_attention(query, key, value, mask=seen, implementation="xla")
    np.testing.assert_allclose(out[:, 3:], exact[:, 3:], rtol=0, atol=1e-5)


def test_equinox():
    equinox = pytest.importorskip("equinox", reason="needs equinox: .ci/run installs it")
    defined = program("equinox")
    layer = equinox.nn.MultiheadAttention(4, 32, qk_size=8, vo_size=16, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (3, 10, 32))
    causal = jnp.tril(jnp.ones((10, 10), bool))
    theirs = jax.vmap(lambda x: layer(x, x, x, mask=causal))(x)
    ours = jax.vmap(lambda x: defined["self_attention"](layer, x))(x)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
    mask = jax.random.bernoulli(jax.random.key(2), 0.7, (4, 10, 10)).at[..., 0].set(True)
    masked = defined["equinox_attention"](layer, x[0], x[1], x[2], mask)
    np.testing.assert_allclose(masked, layer(*x, mask=mask), rtol=0, atol=1e-5)


def test_tunix_llama3():
    pytest.importorskip("tunix.models.llama3", reason="needs tunix, which brings 1 GB")
    from flax import nnx
    from tunix.models.llama3 import model as llama

    sizes = {"num_layers": 2, "vocab_size": 64, "embed_dim": 32, "hidden_dim": 64}
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    config = llama.ModelConfig(
        **sizes, **heads, rope_theta=10_000, norm_eps=1e-5, weight_tying=True
    )
    model = llama.Llama3(config, rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(0), (2, 12), 0, 64)
    valid = np.arange(12) < np.array([[12], [7]])
    mask = np.tri(12, dtype=bool) & valid[:, None]
    given = (tokens, jnp.broadcast_to(jnp.arange(12), (2, 12)), None, jnp.asarray(mask))
    own = llama.Attention.block
    theirs, _ = model(*given)
    try:
        program("tunix")
        ours, _ = model(*given)
    finally:
        llama.Attention.block = own
    np.testing.assert_allclose(ours[valid], theirs[valid], rtol=0, atol=1e-5)
