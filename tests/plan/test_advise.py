"""`advise` names what a call says in a way that costs more, and nothing else."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_flash
from jax_flash import _gpu
from jax_flash.layers.nnx import attention_fn

B, T, N, K, H = 2, 24, 4, 2, 8
INDEX = np.arange(T)
BELOW = INDEX[:, None] >= INDEX
LENGTHS = np.array([T, 9])[:, None] > INDEX  # [B, T]
LEFT = LENGTHS[:, ::-1]
DOCUMENTS = np.array([[*[0] * 10, *[1] * 14], [*[0] * 3, *[5] * 21]])
SAME = DOCUMENTS[:, :, None] == DOCUMENTS[:, None]
NEAR = np.abs(INDEX[:, None] - INDEX) <= 3
RANDOM = np.random.default_rng(0).random((B, T, T)) < 0.5


def draw(*shape: int, dtype: str = "float32") -> jax.Array:
    return jax.random.normal(jax.random.key(len(shape)), shape, dtype)


QKV = (draw(B, T, N, H), draw(B, T, K, H), draw(B, T, K, H))


def kinds(f, *args, **kwargs) -> list[str]:
    return [finding.kind for finding in jax_flash.advise(f, *args, **kwargs).findings]


MASKS = {
    "nothing hidden": (np.ones((B, T, T), bool), "no mask"),
    "causal": (np.broadcast_to(BELOW, (B, T, T)), "is_causal=True"),
    "causal, padded": (
        BELOW & LENGTHS[:, None] & LENGTHS[:, :, None],
        "is_causal=True, query_seq_lengths and key_value_seq_lengths, int32 [*B]",
    ),
    "causal, longer keys": (BELOW[-5:][None], 'is_causal=True, causal_align="bottom_right"'),
    "causal, first queries": (BELOW[:5][None], "is_causal=True"),
    "window": (NEAR[None], "local_window_size=(3, 3)"),
    "window, causal": ((NEAR & BELOW)[None], "is_causal=True, local_window_size=(3, 0)"),
    "padding": (LENGTHS[:, None], "key_value_seq_lengths, int32 [*B]"),
    "padding, all queries": (
        np.broadcast_to(LENGTHS[:, None], (B, T, T)),
        "key_value_seq_lengths, int32 [*B]",
    ),
    "padding, on the left": (LEFT[:, None] & LEFT[:, :, None], "0 for tokens and 1 for padding"),
    "padding, anywhere": (np.broadcast_to(RANDOM[:, :1], (B, T, T)), "a mask [*B, 1, 1, S]"),
    "documents": (SAME, "query_segment_ids and key_value_segment_ids"),
    "documents, causal": (SAME & BELOW, "is_causal=True, query_segment_ids"),
    "none": (RANDOM, ""),
    "none, small": (RANDOM[:, :1], ""),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("given", ["mask", "bias"])
def test_a_mask_is_named_by_what_it_hides(name: str, given: str):
    hidden, instead = MASKS[name]
    mask = jnp.asarray(hidden)[:, None]
    if given == "bias":
        mask = jnp.where(mask, 0.0, -1e9)
    query, key, value = QKV
    if hidden.shape[1] not in (1, T):
        query = query[:, : hidden.shape[1]]

    def attend(query, mask):
        return jax_flash.flash_attention(query, key, value, **{given: mask})

    advice = jax_flash.advise(jax.jit(attend), query, mask)
    kind = name.split(",")[0]
    if kind == "none" or (kind, given) == ("nothing hidden", "bias"):  # a bias of zeros
        assert [x.kind for x in advice.findings] == ["bias"] * (kind == "none" and given == "bias")
    else:
        (finding,) = advice.findings
        assert finding.kind == kind
        assert finding.instead == instead if kind == "causal" else instead in finding.instead
        assert finding.place.startswith(f"{Path(__file__).name}:")
        assert finding.place.endswith(" (attend)")


def test_what_is_suggested_means_the_same():
    """The options that stand in place of the masks, written out."""
    out = {name: jax_flash.flash_attention(*QKV, mask=MASKS[name][0][:, None]) for name in MASKS
           if MASKS[name][0].shape[1] in (1, T)}  # fmt: skip
    lengths, ids = LENGTHS.sum(-1), (~LEFT).astype(np.int32)
    same = {
        "causal, padded": {
            "is_causal": True, "query_seq_lengths": lengths, "key_value_seq_lengths": lengths,
        },
        "window": {"local_window_size": (3, 3)},
        "window, causal": {"is_causal": True, "local_window_size": (3, 0)},
        "padding": {"key_value_seq_lengths": lengths},
        "documents, causal": {
            "is_causal": True, "query_segment_ids": DOCUMENTS, "key_value_segment_ids": DOCUMENTS,
        },
    }  # fmt: skip
    for name, options in same.items():
        found = jax_flash.flash_attention(*QKV, **options)
        np.testing.assert_allclose(found, out[name], rtol=0, atol=1e-5, err_msg=name)
    found = jax_flash.flash_attention(*QKV, query_segment_ids=ids, key_value_segment_ids=ids)
    tokens = LEFT[..., None, None]
    np.testing.assert_allclose(
        found * tokens, out["padding, on the left"] * tokens, rtol=0, atol=1e-5
    )


def turned(x):
    """Rotates by an angle of the position, as rotary embedding does."""
    a, b = jnp.split(x, 2, axis=-1)
    angle = jnp.arange(T)[:, None, None] * 0.1
    return x * jnp.cos(angle) + jnp.concatenate([-b, a], axis=-1) * jnp.sin(angle)


@pytest.mark.parametrize(
    ("repeat", "times"),
    [
        (lambda x: jnp.repeat(x, 2, axis=2), 2),
        (lambda x: turned(jnp.repeat(x, 2, axis=2)), 2),
        (lambda x: jnp.broadcast_to(x[:, :, :, None], (B, T, K, 2, H)).reshape(B, T, N, H), 2),
        (lambda x: jnp.broadcast_to(x[:, :, :1], (B, T, N, H)), 4),
        (lambda x: jnp.repeat(x.swapaxes(1, 2), 2, axis=1).swapaxes(1, 2), 2),
        (lambda x: jnp.tile(x, (1, 1, 2, 1)), 1),  # heads 0, 1, 0, 1: not those of GQA
        (lambda x: jnp.concatenate([x, x + 1], axis=2), 1),
        (lambda x: x * jnp.ones((1, 1, K, 1)), 1),
        (lambda x: x, 1),
    ],
)
def test_repeated_heads(repeat, times: int):
    def attend(query, key, value):
        return jax_flash.flash_attention(query, repeat(key), repeat(value), is_causal=True)

    found = jax_flash.advise(jax.grad(lambda *x: attend(*x).sum()), *QKV).findings
    assert [x.kind for x in found] == ["repeated heads"] * (times > 1)
    assert all(f"repeated {times} times" in x.found for x in found)


def latent(first: int, last: int, **options):
    def attend(query, key):
        return jax_flash.flash_attention(query, key, key[..., first:last], **options)

    return attend


def test_values_that_are_in_the_keys():
    query, key = draw(B, T, N, 12), draw(B, T, 1, 12)
    chosen = np.zeros((B, T, 4), np.int32)
    assert kinds(latent(0, 8, indices=chosen), query, key) == ["values in keys"]
    assert kinds(latent(4, 12, indices=chosen), query, key) == []  # not the first
    assert kinds(latent(0, 8), query, key) == []  # only chosen keys are read faster so

    def decode(query, cache):
        lengths = np.full(B, 5, np.int32)
        return jax_flash.decode_attention(query, cache, cache[..., :8], lengths)

    (finding,) = jax_flash.advise(decode, query[:, :1], key).findings
    assert finding.kind == "values in keys"
    assert "value_dim=8" in finding.instead

    def of_two_heads(query, cache):  # of each head other features
        key, value = cache.reshape(B, T, 2, 6), cache[..., :8].reshape(B, T, 2, 4)
        return jax_flash.decode_attention(query, key, value, np.full(B, 5, np.int32))

    assert kinds(of_two_heads, query[:, :1, :, :6], key) == []

    def with_new(query, cache, new_key, new_value):
        lengths = np.full(B, 5, np.int32)
        new = {"new_key": new_key, "new_value": new_value}
        return jax_flash.decode_attention(query, cache, cache[..., :8], lengths, **new)

    new = key[:, :1]
    assert kinds(with_new, query[:, :1], key, new, -new[..., :8]) == []
    assert kinds(lambda q, k, n: with_new(q, k, n, n[..., :8]), query[:, :1], key, new) == [
        "values in keys"
    ]

    def of_eight_bits(query, cache, key_scale, value_scale):
        lengths, scales = np.full(B, 5, np.int32), {"key_scale": key_scale}
        scales["value_scale"] = value_scale
        return jax_flash.decode_attention(query, cache, cache[..., :8], lengths, **scales)

    cache = key.astype(jnp.float8_e4m3fn)
    assert kinds(of_eight_bits, query[:, :1], cache, jnp.ones(()), 2 * jnp.ones(())) == []


def test_float32_of_16_bits_and_where_it_came_from():
    narrow = [x.astype(jnp.bfloat16) for x in QKV]

    def attend(query, key, value):
        query, key = (x * jnp.float32(2) @ jnp.eye(H) for x in (query, key))
        return jax_flash.flash_attention(query, key, value.astype(jnp.float32))

    (finding,) = jax_flash.advise(attend, *narrow).findings
    assert finding.kind == "float32"
    assert "of bfloat16 that became float32 at test_advise.py:" in finding.found
    assert kinds(attend, *QKV) == []
    assert kinds(jax_flash.flash_attention, *narrow) == []


def test_calls_without_kernels():
    def attend(query, key, value):
        return jax_flash.flash_attention(query, key, value, score_mod=lambda s, b, n, q, k: s + q)

    (finding,) = jax_flash.advise(attend, *QKV).findings
    assert (finding.kind, "score functions" in finding.found) == ("xla", True)
    assert kinds(attend, *QKV, gpu="H100") == []
    wide = jax.ShapeDtypeStruct((1, 2048, 4, 520), "bfloat16")
    (finding,) = jax_flash.advise(jax_flash.flash_attention, wide, wide, wide, gpu="H100").findings
    assert (finding.kind, "512" in finding.found) == ("xla", True)
    few = jax.ShapeDtypeStruct((1, 4, 4, 64), "float32")
    spec = _gpu.spec.GPUS["H100"]
    assert jax_flash.explain(few, few, few, gpu=spec.name).backend == "xla"  # as is best there
    assert kinds(jax_flash.flash_attention, few, few, few, gpu="H100") == []
    assert kinds(functools.partial(attend), *QKV) == ["xla"]


def test_models_of_layers_in_a_loop():
    """A mask that is made outside of the loop is known in it."""

    def model(query, key, value, valid, mask):
        mask = mask & valid[:, None, None, :]

        @jax.checkpoint
        def layer(carry, bias):
            x, kept = carry
            out = jax_flash.flash_attention(x, key, value, mask=kept)
            return (out + jax_flash.flash_attention(x, key, value, bias=bias), kept), None

        return jax.lax.scan(layer, (query, mask), jnp.ones((3, 1, N, T, T)))[0][0]

    def loss(*args):
        return model(*args).sum()

    arrays = (*QKV, jnp.asarray(LENGTHS), jnp.asarray(BELOW)[None, None])
    advice = jax_flash.advise(jax.jit(jax.grad(loss)), *arrays)
    assert (advice.calls, [x.kind for x in advice.findings]) == (2, ["causal"])
    assert "hides padding" in str(advice)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    (finding,) = jax_flash.advise(loss, *shapes).findings
    assert (finding.kind, "by its shape alone" in finding.found) == ("unknown", True)


def test_flax_layers_and_functions_without_calls():
    layer = nnx.MultiHeadAttention(2, 16, attention_fn=attention_fn, decode=False, rngs=nnx.Rngs(0))
    x = draw(B, T, 16)
    mask = nnx.make_causal_mask(jnp.ones((B, T)))
    (finding,) = jax_flash.advise(lambda x: layer(x, mask=mask), x).findings
    assert (finding.kind, finding.place.split(":")[0]) == ("causal", Path(__file__).name)
    advice = jax_flash.advise(lambda x: layer(x, is_causal=True), x)
    assert (advice.calls, str(advice)) == (1, "1 call of jax_flash, nothing to change")
    assert str(jax_flash.advise(jnp.sin, x)).startswith("no call of jax_flash")
    query, key = draw(B, 0, 2, 8), draw(B, T, 2, 8)  # of which nothing is computed
    advice = jax_flash.advise(jax_flash.flash_attention, query, key, key)
    assert str(advice).startswith("no call of jax_flash with queries and keys (")
    with pytest.raises(ValueError, match="gpu must be one of"):
        jax_flash.advise(jnp.sin, x, gpu="H1000")
    with pytest.raises(TypeError, match="f is int; expected a function"):
        jax_flash.advise(3, x)  # type: ignore[arg-type]
