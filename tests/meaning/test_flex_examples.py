"""Functions that users of FlexAttention have, the masks and scores of its examples, as they are
written here, beside attention in float64 with each pair decided by plain Python."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import masks, scores

from .. import numpy_oracle
from ..small import normal

B, T, N, H = 2, 36, 2, 8
WIDTH = 6  # of an image whose rows follow each other
QUERY, KEY, VALUE = (normal(i, B, T, N, H) for i in range(3))
TABLE = normal(4, N, 2 * T - 1)
TURNED = (normal(5, B, T, N, 4), normal(6, B, T, N, 4))  # parts of query and key with positions
PICTURES = ((4, 10), (20, 32))  # tokens of each, the rest is text
OF_PICTURE = np.full(T, -1)
for _i, (_begin, _end) in enumerate(PICTURES):
    OF_PICTURE[_begin:_end] = _i


def neighbourhood(batch, head, query, key, size=3):
    """NATTEN: the square of keys around a query, moved inwards at the edges."""
    half = size // 2
    near = True
    for q, k in ((query // WIDTH, key // WIDTH), (query % WIDTH, key % WIDTH)):
        near &= jnp.abs(jnp.clip(q, half, WIDTH - 1 - half) - k) <= half
    return near


def sees_neighbourhood(b, n, q, k):
    near = []
    for a, c in ((q // WIDTH, k // WIDTH), (q % WIDTH, k % WIDTH)):
        near.append(abs(min(max(a, 1), WIDTH - 2) - c) <= 1)
    return all(near)


def sees_picture(q, k):
    return any(begin <= q < end and begin <= k < end for begin, end in PICTURES)


def transfusion(batch, head, query, key):
    """Text is causal; tokens of a picture see all of it."""
    of = jnp.asarray(OF_PICTURE)
    return (query >= key) | ((of[query] >= 0) & (of[query] == of[key]))


def flamingo(batch, head, query, key):
    """Text sees the last picture before it alone."""
    last = jnp.asarray(np.searchsorted([begin for begin, _ in PICTURES], np.arange(T), "right") - 1)
    of = jnp.asarray(OF_PICTURE)
    return (of[key] == last[query]) & (of[key] >= 0)


def sees_flamingo(b, n, q, k):
    begun = [picture for picture in PICTURES if picture[0] <= q]
    return bool(begun) and begun[-1][0] <= k < begun[-1][1]


ANSWER = np.repeat([0, 1, 2], 12)  # 0 is the question, which both answers see


def in_tiles(place):
    """Row and column of the place-th token where those of a tile of 2 x 3 follow each other."""
    tile, inside = place // 6, place % 6
    return tile // 2 * 2 + inside // 3, tile % 2 * 3 + inside % 3


def tiled_neighbourhood(batch, head, query, key):
    pairs = zip(in_tiles(query), in_tiles(key), strict=True)
    near = [jnp.abs(jnp.clip(q, 1, WIDTH - 2) - k) <= 1 for q, k in pairs]
    return near[0] & near[1]


def sees_tiled_neighbourhood(b, n, q, k):
    pairs = zip(in_tiles(q), in_tiles(k), strict=True)
    return all(abs(min(max(a, 1), WIDTH - 2) - c) <= 1 for a, c in pairs)


def near_frames(batch, head, query, key):
    """Sparse VideoGen: a prompt of 4 tokens, which all see, then frames of 8."""
    return (query < 4) | (key < 4) | (jnp.abs(query - key) < 8)


def one_place(batch, head, query, key):
    apart = jnp.abs((query - 4) % 8 - (key - 4) % 8)
    return (query < 4) | (key < 4) | (apart < 2)


MASKS = {
    "tiled neighbourhood": (tiled_neighbourhood, sees_tiled_neighbourhood),
    "shared question": (
        lambda b, h, q, k: (q >= k)
        & ((jnp.array(ANSWER)[k] == 0) | (jnp.array(ANSWER)[q] == jnp.array(ANSWER)[k])),
        lambda b, n, q, k: q >= k and ANSWER[k] in (0, ANSWER[q])),
    "neighbourhood": (neighbourhood, sees_neighbourhood),
    "axial": (lambda b, h, q, k: (q // WIDTH == k // WIDTH) | (q % WIDTH == k % WIDTH),
              lambda b, n, q, k: q // WIDTH == k // WIDTH or q % WIDTH == k % WIDTH),
    "dilated": (masks.dilated(3, 4) & masks.causal(),
                lambda b, n, q, k: q >= k and (q - k) % 4 == 0 and (q - k) // 4 <= 3),
    "transfusion": (transfusion, lambda b, n, q, k: q >= k or sees_picture(q, k)),
    "flamingo": (flamingo, sees_flamingo),
    "heads of their own windows": (lambda b, h, q, k: (q - k <= 4 * (h + 1)) & (q >= k),
                                   lambda b, n, q, k: 0 <= q - k <= 4 * (n + 1)),
    "first tokens and a window": (
        masks.causal() & (masks.sliding_window(5) | (lambda b, h, q, k: k < 3)),
        lambda b, n, q, k: k <= q and (q - k <= 5 or k < 3)),
    "near frames of a video": (near_frames, lambda b, n, q, k: min(q, k) < 4 or abs(q - k) < 8),
    "one place of all frames": (
        one_place, lambda b, n, q, k: min(q, k) < 4 or abs((q - 4) % 8 - (k - 4) % 8) < 2),
    "prefix or document": (masks.prefix_lm(5) | masks.documents(jnp.arange(T) // 9),
                           lambda b, n, q, k: k <= q or k < 5 or q // 9 == k // 9),
}  # fmt: skip


def pairs(decide, kind):
    return np.array([[[[decide(b, n, q, k) for k in range(T)] for q in range(T)]
                      for n in range(N)] for b in range(B)], kind)  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str):
    mask_mod, decide = MASKS[name]
    mask = jax_flash.block_mask(mask_mod, q_len=T, kv_len=T, heads=N, block=16)
    out = jax.jit(jax_flash.flash_attention)(QUERY, KEY, VALUE, block_mask=mask)
    exact = numpy_oracle.attention(*map(np.float64, (QUERY, KEY, VALUE)), mask=pairs(decide, bool))
    np.testing.assert_allclose(out, exact.out, rtol=0, atol=1e-5)


def turned(score, batch, head, query, key):
    """Latent attention: a product of rotated parts beside that of the latents."""
    return score + jnp.dot(TURNED[0][batch, query, head], TURNED[1][batch, key, head])


def turned_of(b, n, q, k):
    return float(np.dot(TURNED[0][b, q, n], TURNED[1][b, k, n]))


SCORES = {
    "checkerboard": (lambda s, b, h, q, k: jnp.where((q + k) % 2 == 0, s, s * 0.5), None),
    "relative": (lambda s, b, h, q, k: s + (q - k) * 0.1, lambda b, n, q, k: (q - k) * 0.1),
    "alibi": (scores.alibi(np.array([0.5, 0.25])),
              lambda b, n, q, k: -(0.5, 0.25)[n] * abs(q - k)),
    "table": (lambda s, b, h, q, k: s + TABLE[h, q - k + T - 1],
              lambda b, n, q, k: float(TABLE[n, q - k + T - 1])),
    "rotated parts": (turned, turned_of),
}  # fmt: skip


@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str):
    score_mod, added = SCORES[name]
    out = jax.jit(lambda q, k, v: jax_flash.flash_attention(q, k, v, score_mod=score_mod))(
        QUERY, KEY, VALUE
    )
    query, key, value = (np.float64(x) for x in (QUERY, KEY, VALUE))
    if added is None:  # halves every other score: by the query's side of the product
        logits = np.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(H)
        bias = -0.5 * logits * pairs(lambda b, n, q, k: (q + k) % 2, float)
    else:
        bias = pairs(added, float)
    exact = numpy_oracle.attention(query, key, value, bias=bias)
    np.testing.assert_allclose(out, exact.out, rtol=0, atol=2e-5)
