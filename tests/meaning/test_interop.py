"""The programs of docs/libraries.md, with the libraries that they are for."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_flash import advise, interop

from .. import numpy_oracle
from ..small import normal

PAGE = Path(__file__).parents[2] / "docs" / "libraries.md"
pytestmark = [
    pytest.mark.skipif(not PAGE.exists(), reason="needs the checkout's docs/"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of Flax, to pinned packages
]


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


def test_what_is_no_layer_of_equinox_is_refused():
    x = np.ones((4, 32), np.float32)
    with pytest.raises(TypeError, match="layer is int; expected an equinox"):
        interop.equinox_attention(3, x, x, x)


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


@pytest.fixture
def tunix(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports the module of a model, without what the package imports for all others: 1 GB."""
    found = importlib.util.find_spec("tunix")
    if found is None or found.submodule_search_locations is None:
        pytest.skip("needs tunix: .ci/run installs its files")
    (folder,) = found.submodule_search_locations

    def load(model: str) -> Any:
        for name in ("tunix", "tunix.models", f"tunix.models.{model}"):
            package = types.ModuleType(name)
            package.__path__ = [str(Path(folder, *name.split(".")[1:]))]
            monkeypatch.setitem(sys.modules, name, package)
        return importlib.import_module(f"tunix.models.{model}.model")

    return load


def agree_where_valid(model: Any, attention: Any, name: str, length: int = 12) -> None:
    """Logits of rows of 12 and 7 tokens before and after the change of a page's program."""
    tokens = jax.random.randint(jax.random.key(0), (2, length), 0, 64)
    valid = np.arange(length) < np.array([[length], [7]])
    mask = np.tri(length, dtype=bool) & valid[:, None]
    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    given = (tokens, positions, None, jnp.asarray(mask))
    own = attention.block
    theirs, _ = model(*given)
    try:
        program(name)
        assert attention.block is not own
        ours, _ = model(*given)
        assert advise(lambda *x: model(x[0], x[1], None, x[2])[0], *given[:2], given[3]).calls == 1
    finally:
        attention.block = own
    np.testing.assert_allclose(ours[valid], theirs[valid], rtol=0, atol=1e-5)


def test_tunix_llama3(tunix):
    llama = tunix("llama3")
    sizes = {"num_layers": 2, "vocab_size": 64, "embed_dim": 32, "hidden_dim": 64}
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    config = llama.ModelConfig(
        **sizes, **heads, rope_theta=10_000, norm_eps=1e-5, weight_tying=True
    )
    model = llama.Llama3(config, rngs=nnx.Rngs(0))
    agree_where_valid(model, llama.Attention, "models.llama3")


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_tunix_gemma3(tunix, kv_heads: int):
    gemma = tunix("gemma3")
    config = dataclasses.replace(
        gemma.ModelConfig.gemma3_1b_it(),
        num_layers=2, num_embed=64, embed_dim=32, hidden_dim=64,
        num_heads=4, num_kv_heads=kv_heads, head_dim=8, sliding_window_size=4,
    )  # fmt: skip
    model = gemma.Gemma3(config, rngs=nnx.Rngs(0))
    model.layers[1].attn.attn_type = gemma.AttentionType.GLOBAL
    nnx.update(model, jax.tree.map(lambda x: x.astype(jnp.float32), nnx.state(model)))
    agree_where_valid(model, gemma.Attention, "models.gemma3")


def test_hugging_face_llama():
    llama = pytest.importorskip(
        "transformers.models.llama.modeling_flax_llama",
        reason="needs transformers 4: .ci/run installs it",
    )
    config = llama.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    tokens = jax.random.randint(jax.random.key(0), (2, 12), 0, 64)
    valid = np.arange(12) < np.array([[12], [7]])
    own = llama.FlaxLlamaAttention

    def run() -> tuple[Any, ...]:
        model = llama.FlaxLlamaForCausalLM(config, seed=0)
        mask = jnp.asarray(valid, jnp.int32)

        def loss(params):
            logits = model(tokens, mask, params=params).logits
            return jnp.square(logits * valid[..., None]).mean(), logits

        @jax.jit
        def step(params):
            cached = model(
                tokens[:, :3], past_key_values=model.init_cache(2, 8), params=params,
                attention_mask=jnp.ones((2, 8)), position_ids=jnp.zeros((2, 3), jnp.int32),
            )  # fmt: skip
            return *jax.value_and_grad(loss, has_aux=True)(params), cached.logits

        (_, logits), slope, cached = step(model.params)
        weights = slope["model"]["layers"]["0"]["self_attn"]["k_proj"]["kernel"]
        return logits[valid], weights, cached

    theirs = run()
    try:
        program("modeling_flax_llama")
        assert llama.FlaxLlamaAttention is not own
        ours = run()
    finally:
        llama.FlaxLlamaAttention = own
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)
    assert not np.array_equal(ours[0], theirs[0])


def test_maxtext(monkeypatch: pytest.MonkeyPatch):
    """The method's arguments and results, where the package, of 1 GB with what it needs, is not."""

    class AttentionOp:
        def cudnn_jax_flash_attention(self, *_):
            return "the original"

    for name in ("maxtext", "maxtext.layers", "maxtext.layers.attention_op"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(
        sys.modules["maxtext.layers.attention_op"], "AttentionOp", AttentionOp, raising=False
    )
    program("maxtext")
    query, key, value = (normal(i, 2, 20, n, 16) for i, n in enumerate((4, 2, 2)))
    segments = np.repeat([[1, 2, 3, 0], [1, 1, 1, 2]], 5, axis=1).astype(np.int32)
    op = AttentionOp()
    out, lse = op.cudnn_jax_flash_attention(query, key, value, jnp.asarray(segments))
    seen = np.tril(np.ones((20, 20), bool)) & (segments[:, :, None] == segments[:, None])
    arrays = (np.asarray(x, np.float64) for x in (query, key, value))
    exact = numpy_oracle.attention(*arrays, scale=1.0, mask=seen[:, None])
    np.testing.assert_allclose(out, exact.out, rtol=0, atol=1e-5)
    np.testing.assert_allclose(lse, np.swapaxes(exact.lse, 1, 2), rtol=0, atol=1e-5)
    assert op.cudnn_jax_flash_attention(0, 0, 0, 0, "autoregressive") == "the original"
