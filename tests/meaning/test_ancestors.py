"""Trees of speculation: each token is what it would be alone behind its ancestors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash

from ..ragged_cases import run

# A tree of six tokens: 0 has the children 1 and 2; 1 has 3 and 4, and 2 has 5.
PARENTS = (-1, 0, 0, 1, 1, 2)
PAGE, COLUMNS, TOKENS, A = 4, 6, 18, 6
COUNTS, LENGTHS = (6, 1, 8, 2), (15, 9, 10, 6)  # the third has more tokens than A


def paths(parents) -> list[list[int]]:
    """The tokens that each token sees, from the root on."""
    found: list[list[int]] = []
    for token, parent in enumerate(parents):
        found.append([*(found[parent] if parent >= 0 else []), token])
    return found


TREES = [paths(PARENTS), [[0]], [list(range(i + 1)) for i in range(8)], paths((-1, -1))]


def draw(dtype="float32", N=4, K=2, H=16, latent=False, seed=0) -> dict:
    """What no token may see is NaN, in pages and among the tokens; one token of none is ahead."""
    rng = np.random.default_rng(seed)
    starts = np.concatenate([[1], 1 + np.cumsum(COUNTS), [-5]])
    table = rng.permutation(40)[: 5 * COLUMNS].reshape(5, COLUMNS)
    pages = np.full((2, 40, PAGE, K, H), np.nan)
    for b, (count, length) in enumerate(zip(COUNTS, LENGTHS, strict=True)):
        for p in range(length - count):
            pages[:, table[b, p // PAGE], p % PAGE] = rng.standard_normal((2, K, H))
        table[b, -(-length // PAGE) :] = -1
    tokens = np.full((3, TOKENS, N, H), np.nan)
    tokens[:, 1 : starts[4]] = rng.standard_normal((3, starts[4] - 1, N, H))
    ancestors = np.zeros((TOKENS, A), bool)
    for b, tree in enumerate(TREES):
        for t, path in enumerate(tree if COUNTS[b] <= A else []):
            ancestors[starts[b] + t, path[:-1]] = True  # its own is seen anyhow
    arrays = {
        "query": tokens[0],
        "key_pages": pages[0],
        "value_pages": None if latent else pages[1],
        "new_key": tokens[1, :, :K],
        "new_value": None if latent else tokens[2, :, :K],
    }
    arrays = {name: None if x is None else jnp.asarray(x, dtype) for name, x in arrays.items()}
    sizes = {"lengths": [*LENGTHS, 2**31 - 1], "page_table": table, "query_starts": starts}
    arrays |= {name: jnp.asarray(x) for name, x in sizes.items()}
    return arrays | {"rows": jnp.int32(4), "ancestors": jnp.asarray(ancestors)}


def alone(arrays, b, path, **options):
    """The last token of a path, whose tokens come behind what its request had: out and lse."""
    given = {name: x for name, x in arrays.items() if name != "ancestors"}
    first, before = int(arrays["query_starts"][b]), LENGTHS[b] - COUNTS[b]
    rows = jnp.asarray([0] * (8 - len(path)) + [first + t for t in path])
    for name in ("query", "new_key", "new_value"):
        given[name] = None if given[name] is None else given[name][rows]
    given |= {
        "lengths": jnp.array([before + len(path)]),
        "page_table": arrays["page_table"][b : b + 1],
        "query_starts": jnp.array([8 - len(path), 8]),
        "rows": jnp.int32(1),
    }
    got = run(given, **options)
    return np.asarray(got.out[-1], np.float32), np.asarray(got.lse[-1])


CASES = {
    "rotated, sinks and a softcap": (
        draw(N=6, K=2, H=8) | {"sinks": jnp.arange(-2.0, 4.0)},
        {"softcap": 2.0, "scale": 0.7, "rotary_base": 100.0},
        2e-6,
    ),
    "latent, in bfloat16": (draw("bfloat16", K=1, H=40, latent=True), {"value_dim": 32}, 0.04),
}


@pytest.mark.parametrize("name", CASES)
def test_a_token_is_as_alone_behind_its_ancestors(name, backend):
    arrays, options, atol = CASES[name]
    options = options | {"precision": "highest", "backend": backend}
    got = run(arrays, **options)
    of_path = dict.fromkeys((b, *path) for b, tree in enumerate(TREES) for path in tree)
    for b, *path in of_path:
        out, lse = alone(arrays, b, path, **options)
        at = int(arrays["query_starts"][b]) + path[-1]
        np.testing.assert_allclose(got.out[at], out, rtol=0, atol=atol)
        np.testing.assert_allclose(got.lse[at], lse, rtol=0, atol=atol)
    for none in (got.out[:1], got.out[TOKENS:]):
        assert not none.any()
    if "rotary_base" not in options:  # keys and values are in the order of tokens
        plain = run({k: x for k, x in arrays.items() if k != "ancestors"}, **options)
        for x, y in zip(jax.tree.leaves(got[2:]), jax.tree.leaves(plain[2:]), strict=True):
            assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_with_shared_pages_in_eight_bits_and_what_is_there(few_are_shared):
    arrays, options = draw(), {"rotary_base": 10.0, "backend": "cpu"}
    expected = run(arrays, **options)
    shared = arrays["page_table"][0, :2]
    got = run(arrays | {"shared_pages": jnp.append(shared, -1)}, **options)
    np.testing.assert_allclose(got.out, expected.out, rtol=0, atol=2e-6)
    np.testing.assert_allclose(got.lse, expected.lse, rtol=0, atol=2e-6)
    # The pages hold the new tokens already.
    del options["rotary_base"]
    written = run(arrays, **options)
    again = arrays | {"new_key": None, "new_value": None}
    again |= {"key_pages": written.key_pages, "value_pages": written.value_pages}
    np.testing.assert_array_equal(run(again, **options).out, written.out)
    # Scales of pages; one for those of a request, since a token alone may be in another page.
    of_pages = jnp.linspace(0.01, 0.02, 80).reshape(40, 2)
    of_pages = of_pages.at[arrays["page_table"][0, :4]].set(jnp.array([0.015, 0.011]))
    scales = {"key_scale": of_pages, "value_scale": 0.02}
    pages = {
        name: jnp.nan_to_num(arrays[name] / 0.02).astype(jnp.float8_e4m3fn)
        for name in ("key_pages", "value_pages")
    }
    given = arrays | pages | scales
    out = run(given).out
    for t, path in enumerate(TREES[0]):
        np.testing.assert_allclose(out[1 + t], alone(given, 0, path)[0], rtol=0, atol=2e-6)


@pytest.mark.parametrize("at", ["length", "page"])
def test_a_wrong_request_is_nan(at):
    arrays = {name: None if x is None else jnp.nan_to_num(x) for name, x in draw().items()}
    whole = run(arrays, backend="cpu")
    if at == "length":
        arrays["lengths"] = arrays["lengths"].at[0].set(5)
    else:
        arrays["page_table"] = arrays["page_table"].at[0, 3].set(40)
    got = run(arrays, backend="cpu")
    assert np.isnan(got.out[1:7]).all()
    assert np.isnan(got.lse[1:7]).all()
    np.testing.assert_array_equal(got.out[7:], whole.out[7:])


def test_wrong_arguments_are_named():
    arrays = {name: x for name, x in draw().items() if x is not None}
    for error, words, changes in (
        (
            ValueError,
            r"ancestors has shape \(3, 6\) and query",
            {"ancestors": jnp.ones((3, 6), bool)},
        ),
        (
            TypeError,
            "ancestors has dtype int32; expected bool",
            {"ancestors": jnp.ones((18, 6), int)},
        ),
        (ValueError, "ancestors is given beside a local_window_size", {"local_window_size": 3}),
    ):
        with pytest.raises(error, match=words):
            jax_flash.ragged_paged_attention(**arrays | changes)
