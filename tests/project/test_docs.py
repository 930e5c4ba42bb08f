"""The documentation's Python examples run; its recipes are the formulas of the models."""

import ast
import itertools
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash

from .. import numpy_oracle

ROOT = Path(__file__).parents[2]
# test_page_programs.py runs these.
ELSEWHERE = ("alphafold", "eight_gpus")
PAGES = sorted(
    page
    for page in (ROOT / "docs").glob("*.md")
    if "```python" in page.read_text() and page.stem not in ELSEWHERE
)

pytestmark = pytest.mark.skipif(not PAGES, reason="needs the checkout's docs/")


def examples(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    "page",
    [pytest.param(x, marks=[pytest.mark.quick] * (x.stem == "index")) for x in PAGES],
    ids=[page.stem for page in PAGES],
)
def test_the_examples_run(page: Path):
    for example in examples(page):
        exec(compile(example, str(page), "exec"), {})


@pytest.mark.quick
def test_the_reference_has_every_public_name_behind_a_sentence():
    pages = {x.name: x.read_text() for x in (ROOT / "docs").glob("reference*.md")}
    named = re.findall(r"^::: jax_flash\.(.+)$", "\n".join(pages.values()), re.MULTILINE)
    flax = ["layers.linen", "layers.nnx"]
    assert sorted(named) == sorted([*{*jax_flash.__all__} - {"__version__"}, *flax])
    for text in pages.values():
        assert all(
            re.search(r"^[A-Z].*\.\n$", before, re.MULTILINE)
            for before in re.split(r"^:::.*$", text, flags=re.MULTILINE)[:-1]
        )


USER_PAGES = sorted((ROOT / "docs").glob("*.md"))
COMMIT = re.compile(r"\b(?=\w*\d)(?=\w*[a-f])[0-9a-f]{7,10}\b")
# How a word is told where it first stands on a page.
WORDS = {r"\blse\b": "logarithm of", r"\b[Tt]erms?\b": "array"}


@pytest.mark.quick
def test_pages_are_for_users():
    """Short, with code that fits its box, without commits, and with their words told."""
    menu = re.findall(r"(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(menu) == [x.name for x in USER_PAGES]
    for page in [*USER_PAGES, ROOT / "README.md"]:
        text = page.read_text()
        code = re.findall(r"^```.*?^```$", text, re.MULTILINE | re.DOTALL)
        wide = [line for block in code for line in block.splitlines() if len(line) > 80]
        assert wide == [], page.name
        assert COMMIT.findall(text) == [], page.name
        assert page.name.startswith("reference") or len(text.encode()) <= 12 << 10, page.name
        assert not text.startswith("---"), f"{page.name} is in the search"
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
        for word, told in WORDS.items():
            if first := re.search(word, prose):
                assert told in prose[first.start() - 120 : first.end() + 120], (page.name, word)


def _markdown() -> list[tuple[str, list[str]]]:
    """What Markdown is made of: pages without their code, and docstrings."""
    texts = [
        (page.name, re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL))
        for page in sorted(ROOT.glob("docs/*.md"))
    ]
    for source in sorted((ROOT / "jax_flash").rglob("*.py")):
        texts.extend(
            (source.name, ast.get_docstring(node) or "")
            for node in ast.walk(ast.parse(source.read_text()))
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        )
    return [(name, text.splitlines()) for name, text in texts]


@pytest.mark.quick
def test_decisions_are_of_constants_that_there_are():
    """A row of cuda/decisions.md goes with its constant; the page stays short."""
    page = (ROOT / "cuda" / "decisions.md").read_text()
    assert len(page.encode()) <= 20_000
    folders = [ROOT / "jax_flash" / "_gpu", ROOT / "cuda"]
    sources = [x for folder in folders for x in sorted(folder.rglob("*")) if x.is_file()]
    kinds = {".py", ".cuh", ".cc", ".h"}
    known = {
        word for x in sources if x.suffix in kinds for word in re.findall(r"\w+", x.read_text())
    }
    known |= {part for x in sources for part in (x.name, x.stem)}
    rows = re.findall(r"^\| [^|]+ \| ([^|]*`[^|]*) \|", page, re.MULTILINE)
    named = {name for where in rows for name in re.findall(r"`([^`]+)`", where)}
    assert len(rows) > 60
    assert {x for x in named if x.rstrip("*").split("/")[-1] not in known} == set()


@pytest.mark.quick
def test_no_line_of_a_paragraph_begins_with_markup():
    """ "512." where a line begins would be an item of a list, "- " after a sentence no item."""
    wrong, number = [], 0
    for name, lines in _markdown():
        before = ""
        for line in lines:
            item = re.match(r"\s*(?:(\d+)[.)]|[-+*]|>|#+)(\s|$)", line)
            if item and item[1]:
                if int(item[1]) != (1 if not before.strip() else number + 1):
                    wrong.append((name, line))
                number = int(item[1])
            elif item and before.strip() and not re.match(r"\s|[-+*] ", before):
                wrong.append((name, before, line))
            number = 0 if line and not line[0].isspace() and not item else number
            before = line
    assert not wrong


@pytest.mark.quick
def test_no_section_of_a_docstring_begins_beside_its_name():
    """Text after "Returns:" is a heading's where the next line belongs to it."""
    wrong = []
    for name, lines in _markdown():
        for line, after in itertools.pairwise(lines):
            section = re.match(
                r"(\s*)(Arguments|Args|Attributes|Returns|Raises|Examples): +\S", line
            )
            if section and re.match(rf"{section[1]}\s+\S", after):
                wrong.append((name, line))
    assert not wrong


# ---- decoding ------------------------------------------------------------------------------------


def rotated(x: Any, positions: np.ndarray) -> np.ndarray:
    return numpy_oracle.rotated(np.asarray(x, np.float64), positions, base=1e4)


@pytest.fixture(scope="module")
def decoding() -> list[dict[str, Any]]:
    """What the examples of the page on decoding define."""
    run = []
    for example in examples(ROOT / "docs" / "decoding.md"):
        run.append(defined := {})
        exec(compile(example, "decoding.md", "exec"), defined)
    return run


def test_a_prompt_and_a_step_after_it(decoding: list[dict[str, Any]]):
    found, lengths = decoding[0], np.array([100, 7])
    draws = [jax.random.normal(jax.random.key(0), (2, 100, 8, 64))]
    draws.extend(jax.random.normal(jax.random.key(1), (2, 2, 100, 2, 64)))
    news = [found[f"new_{name}"] for name in ("query", "key", "value")]
    for row, length in enumerate(lengths):
        query, key, value = (
            np.concatenate([np.asarray(x[row, :length]), np.asarray(new[row])])[None]
            for x, new in zip(draws, news, strict=True)
        )
        query, key = (rotated(x, np.arange(length + 1)) for x in (query, key))
        exact = formula(query, key, value, np.tri(length + 1) > 0)[0]
        agree(found["prompt"][row, :length], exact[:length])
        agree(found["out"][row], exact[length:])


def test_a_prompt_in_chunks(decoding: list[dict[str, Any]]):
    x, out = decoding[1]["x"], decoding[1]["out"]
    turned = rotated(x, np.arange(64))
    agree(out, formula(turned, turned, x, np.tri(64) > 0))


def test_pages(decoding: list[dict[str, Any]]):
    pages, table = np.asarray(decoding[2]["pages"]), np.asarray(decoding[2]["table"])
    for row, length in enumerate((40, 30)):
        keys = pages[table[row]].reshape(1, 48, 2, 64)[:, :length]
        exact = formula(decoding[2]["query"][row : row + 1], keys, keys, np.ones((1, length), bool))
        agree(decoding[2]["paged"].out[row : row + 1], exact)


# ---- recipes -------------------------------------------------------------------------------------

B, T, N, K, H = 2, 24, 4, 2, 16


@pytest.fixture(scope="module")
def recipes() -> dict[str, Any]:
    defined: dict[str, Any] = {}
    for example in examples(ROOT / "docs" / "recipes.md"):
        exec(compile(example, "recipes.md", "exec"), defined)
    return defined


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


QKV = (draw(B, T, N, H), draw(B, T, K, H, seed=1), draw(B, T, K, H, seed=2))
AGE = np.arange(T)[:, None] - np.arange(T)  # of a key to a query
CAUSAL = AGE >= 0


def formula(query: Any, key: Any, value: Any, seen: Any, **options: Any) -> np.ndarray:
    """Attention in float64; seen `[T, S]` or `[B, T, S]`."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    seen = np.asarray(seen)
    mask = seen[:, None] if seen.ndim == 3 else seen
    return numpy_oracle.attention(query, key, value, mask=mask, **options).out


def agree(out: Any, exact: np.ndarray) -> None:
    np.testing.assert_allclose(np.asarray(out), exact, rtol=0, atol=1e-5)


def test_llama3(recipes: dict[str, Any]):
    agree(recipes["llama3"](*QKV), formula(*QKV, CAUSAL))


def test_mistral(recipes: dict[str, Any]):
    agree(recipes["mistral"](*QKV, sliding_window=5), formula(*QKV, CAUSAL & (AGE < 5)))


@pytest.mark.parametrize("layer", [0, 1])
def test_gemma2(recipes: dict[str, Any], layer: int):
    query, key, value = QKV
    query = 30 * query
    out = recipes["gemma2"](query, key, value, layer, sliding_window=5, query_pre_attn_scalar=9)
    seen = CAUSAL & (AGE < 5) if layer == 0 else CAUSAL
    agree(out, formula(query, key, value, seen, scale=1 / 3, softcap=50.0))


@pytest.mark.parametrize("layer", [4, 5])
def test_gemma3(recipes: dict[str, Any], layer: int):
    out = recipes["gemma3"](*QKV, layer, sliding_window=5)
    agree(out, formula(*QKV, CAUSAL & (AGE < 5) if layer == 4 else CAUSAL, scale=1 / 16))


@pytest.mark.parametrize("layer", [0, 1])
def test_gpt_oss(recipes: dict[str, Any], layer: int):
    sinks = draw(N, seed=3)
    out = recipes["gpt_oss"](*QKV, sinks, layer, sliding_window=5)
    agree(out, formula(*QKV, CAUSAL & (AGE < 5) if layer == 0 else CAUSAL, sinks=np.asarray(sinks)))


def test_t5(recipes: dict[str, Any]):
    table = draw(32, N, seed=4)

    def bucket(distance: int) -> int:  # of the paper's code: 8 exact ones a side, 8 logarithmic
        side, far = (16 if distance > 0 else 0), abs(distance)
        if far < 8:
            return side + far
        return side + min(15, 8 + int(math.log(far / 8) / math.log(128 / 8) * 8))

    buckets = np.array([[bucket(s - t) for s in range(300)] for t in range(300)])
    # The edge of a bucket is a power of 2^(1/2) times 8, whose logarithm may round either way.
    differing = np.asarray(recipes["t5_buckets"](300, 300)) != buckets
    distances = np.abs(np.arange(300)[:, None] - np.arange(300))
    assert np.isin(distances[differing], (16, 32, 64)).all()
    query, key, value = QKV
    key, value = (jnp.repeat(x, N // K, axis=2) for x in (key, value))
    bias = np.asarray(table)[np.asarray(recipes["t5_buckets"](T, T))].transpose(2, 0, 1)
    out = recipes["t5_encoder"](query, key, value, table)
    agree(out, formula(query, key, value, np.ones((T, T), bool), scale=1.0, bias=bias))


def test_bert(recipes: dict[str, Any]):
    lengths = np.array([T, 7])
    valid = np.arange(T) < lengths[:, None]
    exact = formula(*QKV, valid[:, None, :] & valid[:, :, None])
    agree(recipes["bert"](*QKV, lengths), exact)
    dropped = recipes["bert"](*QKV, lengths, dropout_key=jax.random.key(0))
    assert not np.allclose(dropped, exact, atol=1e-3)


def test_vit(recipes: dict[str, Any]):
    agree(recipes["vit"](*QKV), formula(*QKV, np.ones((T, T), bool)))


def test_latent_attention(recipes: dict[str, Any]):
    query, key, value = draw(B, T, N, 24), draw(B, T, N, 24, seed=1), draw(B, T, N, 16, seed=2)
    agree(recipes["latent_attention"](query, key, value), formula(query, key, value, CAUSAL))
    cache, new = draw(B, T, 1, 36, seed=5), draw(B, 1, 1, 36, seed=6)
    lengths = jnp.array([T, 7])
    step = recipes["latent_decoding"](
        draw(B, 1, N, 36), cache, lengths, new, latent=32, head_dim=24
    )
    cache = np.array(cache)
    cache[[0, 1], [T - 1, 6]] = new[:, 0]
    seen = (np.arange(T) < np.asarray(lengths)[:, None])[:, None, :]
    exact = formula(draw(B, 1, N, 36), cache, cache[..., :32], seen, scale=24**-0.5)
    agree(step.out, exact)
    np.testing.assert_array_equal(step.key_cache, cache)
