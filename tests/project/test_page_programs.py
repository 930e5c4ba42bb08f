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

from ..devices import mesh_with
from .test_docs import PAGES, ROOT, agree, draw, examples, formula

pytestmark = pytest.mark.skipif(not PAGES, reason="needs the checkout's docs/")


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
