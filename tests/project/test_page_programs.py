"""Pages whose programs are compared with another way to compute the same."""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_flash

from .. import numpy_oracle
from ..devices import mesh_with
from .test_docs import PAGES, ROOT, agree, draw, examples, formula

pytestmark = pytest.mark.skipif(not PAGES, reason="needs the checkout's docs/")


PAGE = ROOT / "docs" / "alphafold.md"


def run(page: str, containing: str = "") -> list[dict[str, Any]]:
    """Returns what each example of a page defines, or those that contain some text."""
    found = []
    for example in examples(ROOT / "docs" / f"{page}.md"):
        if containing not in example:
            continue
        found.append(defined := {})
        exec(compile(example, f"{page}.md", "exec"), defined)
    return found


def test_triangle_attention_and_pair_bias():
    triangle, pair = run("alphafold")
    (text,) = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    exec(compile(text, PAGE.name, "exec"), before := {})
    rows, heads = 12, 3
    query, key, value = (draw(rows, rows, heads, 8, seed=seed) for seed in range(3))
    bias = draw(heads, rows, rows, seed=4)
    valid = np.arange(rows) < np.array([[rows], [7]])[np.arange(rows) % 2]
    for name, turn in (("triangle_attention", False), ("ending_node", True)):
        given = [np.swapaxes(x, 0, 1) if turn else x for x in (query, key, value)]
        seen = np.broadcast_to((valid.T if turn else valid)[:, None], (rows, rows, rows))
        exact = formula(*given, seen, bias=bias)
        out = triangle[name](query, key, value, bias, jnp.asarray(valid))
        agree(out, np.swapaxes(exact, 0, 1) if turn else exact)
    own = before["triangle_attention"](query, key, value, bias, jnp.asarray(valid))
    agree(own, triangle["triangle_attention"](query, key, value, bias, jnp.asarray(valid)))
    slope = jax.grad(lambda bias: triangle["triangle_attention"](
        query, key, value, bias, jnp.asarray(valid)).var())(bias)  # fmt: skip
    assert slope.shape == bias.shape

    lengths = np.full(rows, 5)
    each = jnp.broadcast_to(bias, (rows, heads, rows, rows)) + draw(rows, 1, 1, 1, seed=5)
    seen = np.broadcast_to(np.arange(rows) < 5, (rows, rows, rows))
    out = pair["pair_bias_attention"](query, key, value, each, lengths)
    agree(out, formula(query, key, value, seen, bias=each))


def test_eight_devices_compute_what_one_does():
    mesh_with(data=8)  # or there are fewer
    (page,) = run("eight_gpus")
    start = page["init"](jax.random.key(0))
    tokens, targets, positions = page["given"]
    one = dict(page)  # the same program with every sharding left out
    plain = functools.partial(jax_flash.flash_attention, is_causal=True)
    alone = {"attend": plain, "keep": lambda x: x, "gathered": lambda name, x: x}
    for example in examples(ROOT / "docs" / "eight_gpus.md"):
        text = re.search(r"^def model\(.*?(?=^step = )", example, re.MULTILINE | re.DOTALL)
        assert text is not None
        one |= alone
        exec(compile(text[0], "model", "exec"), one)
    losses = []
    for _ in range(2):
        value, start = jax.jit(one["train"])(start, tokens, targets, positions)
        losses.append(float(value))
    np.testing.assert_allclose([page["first"], page["second"]], losses, rtol=1e-5)
    for name, matrix in page["params"].items():
        np.testing.assert_allclose(matrix, start[name], rtol=0, atol=1e-5, err_msg=name)
        split = 4 if name == "embed" else 8
        assert matrix.addressable_shards[0].data.size == matrix.size // split
    arrays = (page["tokens"], page["targets"], page["positions"])
    text = page["step"].lower(page["params"], *arrays).compile().as_text()
    sizes = [
        math.prod(map(int, shape.split(",")))
        for shape in re.findall(r"= \w+\[([\d,]+)\]\S* all-gather\(", text)
    ]
    matrices = max(math.prod(shape) for shape in page["SHAPES"].values())
    assert 0 < max(sizes) <= matrices
    assert "collective-permute(" in text


def test_packed_documents_train_as_they_do_apart():
    (page,) = run("flax", "def train_step")
    model = page["Model"](rngs=nnx.Rngs(0))
    tokens, begin = page["tokens"], page["lengths"][0]
    forward = nnx.jit(lambda model, tokens, **call: model(tokens, **call))
    packed = forward(model, tokens, segment_ids=page["segments"], positions=page["positions"])
    second = slice(begin, begin + page["lengths"][1])
    agree(packed[:, second], np.asarray(forward(model, tokens[:, second])))


def plain_latent_attention(weights, x, width_of, base):
    """The layer of docs/latent.md by its formula, in float64: all keys and values, all scores."""
    latent_dim, plain = width_of
    length = x.shape[1]

    def norm(x, scale):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale

    def turn(x):
        return numpy_oracle.rotated(x, np.arange(length), base)

    latent_query = norm(x @ weights["query_down"], weights["query_norm"])
    query = np.einsum("btl,lnh->btnh", latent_query, weights["query_up"])
    query = np.concatenate([query[..., :plain], turn(query[..., plain:])], axis=-1)
    down = x @ weights["down"]
    latent = norm(down[..., :latent_dim], weights["norm"])
    turned = turn(down[..., None, latent_dim:])
    keys = np.einsum("btl,lnh->btnh", latent, weights["key_up"])
    shared = np.broadcast_to(turned, (*keys.shape[:-1], turned.shape[-1]))
    keys = np.concatenate([keys, shared], axis=-1)
    values = np.einsum("btl,lnv->btnv", latent, weights["value_up"])
    seen = np.tril(np.ones((length, length), bool))
    return np.einsum("btnv,nvw->btw", formula(query, keys, values, seen), weights["out"])


def test_latent_attention_is_its_formula_in_both_forms_with_its_gradient():
    page, *_ = run("latent")
    layer, x = page["layer"], np.asarray(page["x"])
    graph, params = nnx.split(layer)

    def in_float64(params):
        found = {}
        for (name, *_), x in nnx.to_flat_state(params):
            found[name] = np.asarray(x[...], np.float64)
        return found

    def truth(weights):
        return plain_latent_attention(weights, x.astype(np.float64), (32, 16), 1e4)

    # One by one their operations take 4 s more of a core to compile.
    call = nnx.jit(lambda layer, *given, **options: layer(*given, **options))
    decode = nnx.jit(lambda layer, *given, **options: layer.decode(*given, **options))
    fill_cache = jax.jit(jax_flash.fill_cache)

    weights = in_float64(params)
    exact = truth(weights)
    out, _ = call(layer, page["x"])
    np.testing.assert_allclose(out, exact, rtol=0, atol=2e-5 * np.abs(exact).max())

    # A prompt of 30, then a token, then nine, in pages, some of keys that were chosen.
    table = jnp.arange(6)[None].reshape(2, 3)[:, ::-1]
    pages = jnp.full((6, 16, 1, 40), jnp.nan)
    _, stored = call(layer, page["x"][:, :30])
    pages, _ = fill_cache(pages, None, stored, None, jnp.array([30, 30]), page_table=table)
    for first, stop in ((30, 31), (31, 40)):
        new, pages = decode(
            layer, page["x"][:, first:stop], pages, jnp.array([stop, stop]), page_table=table
        )
        np.testing.assert_allclose(
            new, exact[:, first:stop], rtol=0, atol=5e-5 * np.abs(exact).max()
        )
    chosen = jnp.asarray(
        np.random.default_rng(0).permuted(np.tile(np.arange(40), (2, 40, 1)), axis=-1)
    )
    chosen = chosen[..., :12]
    sparse, stored = call(layer, page["x"], indices=chosen)
    rows, _ = fill_cache(jnp.zeros((2, 40, 1, 40)), None, stored[:, :35], None, jnp.array([35, 35]))
    new, _ = decode(layer, page["x"][:, 35:], rows, jnp.array([40, 40]), indices=chosen[:, 35:])
    np.testing.assert_allclose(new, sparse[:, 35:], rtol=0, atol=1e-4)
    assert np.abs(np.asarray(sparse) - exact).max() > 0.1 * np.abs(exact).max()

    # The derivative along a direction of each parameter, by differences.
    weight = np.random.default_rng(1).standard_normal(exact.shape)

    def loss(params):
        return (nnx.merge(graph, params)(page["x"])[0] * jnp.asarray(weight, jnp.float32)).sum()

    gradients = in_float64(jax.jit(jax.grad(loss))(params))
    assert gradients.keys() == weights.keys()
    for name, gradient in gradients.items():
        move = 1e-5 * np.random.default_rng(2).standard_normal(gradient.shape)
        ends = [(truth(weights | {name: weights[name] + s * move}) * weight).sum() for s in (1, -1)]
        slope = (ends[0] - ends[1]) / 2
        size = np.linalg.norm(gradient) * np.linalg.norm(move)
        assert abs((gradient * move).sum() - slope) < 1e-4 * size, name


def test_a_checkpoint_of_eight_bits():
    """Both phases are the formula, of the numbers that the cache holds."""
    (recipe,) = run("float8", "def prefill")
    layer = {
        f"{x}_scale": jnp.float32(scale) for x, scale in zip("qkv", (0.02, 0.03, 0.01), strict=True)
    }
    wide = {}
    for i, (name, heads) in enumerate((("q", 4), ("k", 2), ("v", 2))):
        weight = (draw(32, heads, 64, seed=i) * 20).astype(jnp.float8_e4m3fn)
        layer |= {f"{name}_proj": weight, f"{name}_weight_scale": jnp.float32(0.01)}
        wide[name] = np.asarray(weight).astype(np.float64) * 0.01
    x, lengths = draw(2, 21, 32, seed=3), np.array([20, 13])
    blank = jnp.zeros((2, 24, 2, 64), jnp.float8_e4m3fn)
    out, caches = recipe["prefill"](layer, x[:, :20], (blank, blank), jnp.asarray(lengths))
    last = x[np.arange(2), lengths][:, None]
    step, caches = recipe["decode"](layer, last, caches, jnp.asarray(lengths + 1))

    def rounded(y, name):
        scale = float(layer[f"{name}_scale"])
        y = jnp.asarray(y / scale, jnp.float32).astype(jnp.float8_e4m3fn)
        return np.asarray(y).astype(np.float64) * scale

    for b, length in enumerate(lengths):
        row = np.append(np.asarray(x[b, :length], np.float64), np.asarray(last[b]), axis=0)
        query, key, value = (np.einsum("td,dnh->tnh", row, wide[name]) for name in "qkv")
        at = np.arange(length + 1)
        query, key = (numpy_oracle.rotated(y, at, 500_000.0) for y in (query, key))
        key, value = rounded(key, "k"), rounded(value, "v")
        for own, keys, got in (
            (rounded(query, "q")[:-1], length, out[b, :length]),
            (query[-1:], length + 1, step[b]),
        ):
            exact = numpy_oracle.attention(
                *(own[None], key[None, :keys], value[None, :keys]),
                is_causal=True,
                causal_align="bottom_right",
            ).out[0]
            error = np.linalg.norm(np.asarray(got, np.float64) - exact)
            assert error < 0.01 * np.linalg.norm(exact)
        for name, cache, held in zip("kv", caches, (key, value), strict=True):
            stored = np.asarray(cache[b, : length + 1]).astype(np.float64)
            stored *= float(layer[f"{name}_scale"])
            np.testing.assert_allclose(stored, held, rtol=0.13, atol=1e-4)
