"""Wrong input: the right exception, naming the argument, its shape, and what would be right."""

from __future__ import annotations

import dataclasses
import functools
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash

B, T, S, N, K, H = 2, 6, 10, 4, 2, 8


def f32(*shape):
    return jnp.zeros(shape, jnp.float32)


def i32(*shape):
    return jnp.zeros(shape, jnp.int32)


def right_call() -> dict[str, Any]:
    return {"query": f32(B, T, N, H), "key": f32(B, S, K, H), "value": f32(B, S, K, H)}


@dataclasses.dataclass(frozen=True)
class Fault:
    """What to change in a right call, and what the error must be and say."""

    name: str
    change: Callable[[], dict[str, Any]]
    error: type[Exception] | tuple[type[Exception], ...]
    says: tuple[str, ...]  # each must occur in the message


EITHER = (ValueError, TypeError)
F = Fault
FAULTS = (
    F("query rank", lambda: {"query": f32(T, H)}, ValueError, ("query", "(6, 8)")),
    F("key rank", lambda: {"key": f32(S, K, H)}, ValueError, ("key", "(10, 2, 8)")),
    F("value rank", lambda: {"value": f32(1, B, S, K, H)},
      ValueError, ("value", "(1, 2, 10, 2, 8)")),
    F("batch of key", lambda: {"key": f32(3, S, K, H)}, ValueError, ("key", "(3, 10, 2, 8)")),
    F("batch of size 1", lambda: {"key": f32(1, S, K, H), "value": f32(1, S, K, H)}, ValueError,
      ("key", "(1, 10, 2, 8)", "(2, 6, 4, 8)")),
    F("batch of value", lambda: {"value": f32(3, S, K, H)}, ValueError, ("value", "(3, 10, 2, 8)")),
    F("length of value", lambda: {"value": f32(B, 9, K, H)}, ValueError, ("value", "(2, 9, 2, 8)")),
    F("heads of value", lambda: {"value": f32(B, S, 4, H)}, ValueError, ("value", "(2, 10, 4, 8)")),
    F("head dim of key", lambda: {"key": f32(B, S, K, 7)}, ValueError, ("key", "(2, 10, 2, 7)")),
    F("kv heads do not divide", lambda: {"key": f32(B, S, 3, H), "value": f32(B, S, 3, H)},
      ValueError, ("3", "4", "head")),
    F("more kv heads", lambda: {"key": f32(B, S, 8, H), "value": f32(B, S, 8, H)},
      ValueError, ("8", "4", "head")),
    F("head dim zero", lambda: {"query": f32(B, T, N, 0), "key": f32(B, S, K, 0)}, ValueError,
      ("query", "(2, 6, 4, 0)")),
    F("value dim zero", lambda: {"value": f32(B, S, K, 0)}, ValueError, ("value", "(2, 10, 2, 0)")),
    F("integer query", lambda: {"query": i32(B, T, N, H)}, EITHER, ("query", "int32")),
    F("complex query", lambda: {"query": jnp.zeros((B, T, N, H), jnp.complex64)}, EITHER,
      ("query", "complex64")),
    F("float8 key", lambda: {"key": jnp.zeros((B, S, K, H), jnp.float8_e4m3fn)}, EITHER,
      ("key", "float8_e4m3fn")),
    F("mixed dtypes", lambda: {"key": jnp.zeros((B, S, K, H), jnp.bfloat16)}, EITHER,
      ("key", "bfloat16", "float32")),
    F("value dtype", lambda: {"value": jnp.zeros((B, S, K, H), jnp.float16)}, EITHER,
      ("value", "float16", "float32")),
    F("query no array", lambda: {"query": "abc"}, EITHER, ("query",)),
    F("query of foreign bytes", lambda: {"query": np.ones((B, T, N, H), ">f4")}, TypeError,
      ("query", ">f4")),
    F("query none", lambda: {"query": None}, EITHER, ("query",)),
    F("bias shape", lambda: {"bias": f32(B, N, T, S + 1)}, ValueError,
      ("bias", "(2, 4, 6, 11)", "(2, 4, 6, 10)")),
    F("heads before positions",
      lambda: {"query": f32(B, N, T, H), "key": f32(B, K, S, H), "value": f32(B, K, S, H)},
      ValueError, ("(2, 4, 6, 8)", "(2, 2, 10, 8)", "[*B, N, T, H]", "swapaxes(x, -3, -2)")),
    F("heads before positions of queries that are no multiple",
      lambda: {"query": f32(B, N, 300, H), "key": f32(B, N, 77, H), "value": f32(B, N, 77, H)},
      ValueError, ("(2, 4, 300, 8)", "(2, 4, 77, 8)", "[*B, N, T, H]", "swapaxes(x, -3, -2)")),
    F("mask of keys", lambda: {"mask": jnp.ones((B, S), bool)}, ValueError,
      ("mask", "(2, 10)", "mask[..., None, None, :]", "key_value_seq_lengths")),
    F("mask of queries", lambda: {"mask": jnp.ones((B, T), bool)}, ValueError,
      ("mask", "(2, 6)", "mask[..., None, :, None]", "query_seq_lengths")),
    F("mask without heads", lambda: {"mask": jnp.ones((B, T, S), bool)}, ValueError,
      ("mask", "(2, 6, 10)", "mask[..., None, :, :]")),
    F("bias without heads", lambda: {"bias": f32(B, T, S)}, ValueError,
      ("bias", "(2, 6, 10)", "bias[..., None, :, :]")),
    F("bias heads", lambda: {"bias": f32(B, K, T, S)}, ValueError, ("bias", "(2, 2, 6, 10)")),
    F("bias rank", lambda: {"bias": f32(1, 1, 1, T, S)}, ValueError, ("bias", "(1, 1, 1, 6, 10)")),
    F("bias integer", lambda: {"bias": i32(B, N, T, S)}, EITHER, ("bias", "int32")),
    F("bias bool", lambda: {"bias": jnp.ones((B, N, T, S), bool)},
      EITHER, ("bias", "bool", "mask")),
    F("mask shape", lambda: {"mask": jnp.ones((B, N, S, T), bool)}, ValueError,
      ("mask", "(2, 4, 10, 6)", "(2, 4, 6, 10)")),
    F("mask float", lambda: {"mask": f32(B, N, T, S)}, EITHER, ("mask", "float32", "bool")),
    F("mask integer", lambda: {"mask": i32(T, S)}, EITHER, ("mask", "int32", "bool")),
    F("query lengths shape", lambda: {"query_seq_lengths": i32(3)}, ValueError,
      ("query_seq_lengths", "(3,)", "(2,)")),
    F("cumulative query lengths", lambda: {"query_seq_lengths": i32(B + 1)}, ValueError,
      ("query_seq_lengths", "(3,)", "(2,)", "cu_seqlens", "query_segment_ids", "jnp.arange(6)")),
    F("cumulative key lengths", lambda: {"key_value_seq_lengths": np.array([0, 3, 10])}, ValueError,
      ("key_value_seq_lengths", "(3,)", "cu_seqlens", "key_value_segment_ids", "jnp.arange(10)")),
    F("query lengths scalar", lambda: {"query_seq_lengths": i32()}, ValueError,
      ("query_seq_lengths", "()", "(2,)")),
    F("key lengths rank", lambda: {"key_value_seq_lengths": i32(B, 1)}, ValueError,
      ("key_value_seq_lengths", "(2, 1)", "(2,)")),
    F("key lengths float", lambda: {"key_value_seq_lengths": f32(B)}, EITHER,
      ("key_value_seq_lengths", "float32")),
    F("segment ids beyond int32",
      lambda: {"query_segment_ids": np.full((B, T), 2**32 + 1), "key_value_segment_ids": i32(B, S)},
      ValueError, ("query_segment_ids", "4294967297", "int32")),
    F("query segments alone", lambda: {"query_segment_ids": i32(B, T)}, ValueError,
      ("query_segment_ids", "key_value_segment_ids")),
    F("key segments alone", lambda: {"key_value_segment_ids": i32(B, S)}, ValueError,
      ("query_segment_ids", "key_value_segment_ids")),
    F("segments shape",
      lambda: {"query_segment_ids": i32(B, S), "key_value_segment_ids": i32(B, S)},
      ValueError, ("query_segment_ids", "(2, 10)", "(2, 6)")),
    F("key segments shape",
      lambda: {"query_segment_ids": i32(B, T), "key_value_segment_ids": i32(B, T)},
      ValueError, ("key_value_segment_ids", "(2, 6)", "(2, 10)")),
    F("query positions shape", lambda: {"query_positions": i32(B, S), "is_causal": True},
      ValueError, ("query_positions", "(2, 10)", "(2, 6)", "[*B, T]")),
    F("key positions shape", lambda: {"key_value_positions": i32(B, T), "is_causal": True},
      ValueError, ("key_value_positions", "(2, 6)", "(2, 10)", "[*B, S]")),
    F("positions of all rows", lambda: {"query_positions": i32(T), "is_causal": True}, ValueError,
      ("query_positions", "(6,)", "jnp.broadcast_to(query_positions, (2, 6))")),
    F("segments of all rows",
      lambda: {"query_segment_ids": i32(T), "key_value_segment_ids": i32(S)}, ValueError,
      ("query_segment_ids", "(6,)", "jnp.broadcast_to(query_segment_ids, (2, 6))")),
    F("positions of one row", lambda: {"key_value_positions": i32(1, S), "is_causal": True},
      ValueError, ("(1, 10)", "jnp.broadcast_to(key_value_positions, (2, 10))")),
    F("positions float", lambda: {"query_positions": f32(B, T), "is_causal": True}, TypeError,
      ("query_positions", "float32", "int32")),
    F("positions bool", lambda: {"key_value_positions": jnp.ones((B, S), bool)}, TypeError,
      ("key_value_positions", "bool", "int32")),
    F("positions beyond int32", lambda: {"query_positions": np.full((B, T), 2**31)}, ValueError,
      ("query_positions", "2147483648", "int32")),
    F("key positions beyond int32", lambda: {"key_value_positions": [[-(2**31) - 1] * S] * B},
      ValueError, ("key_value_positions", "-2147483649", "int32")),
    F("positions aligned", lambda: {"query_positions": i32(B, T), "is_causal": True,
                                    "causal_align": "bottom_right"},
      ValueError, ("query_positions", "causal_align", "bottom_right", "top_left")),
    F("key positions aligned", lambda: {"key_value_positions": i32(B, S),
                                        "causal_align": "bottom_right"},
      ValueError, ("key_value_positions", "causal_align", "bottom_right")),
    F("segments float",
      lambda: {"query_segment_ids": f32(B, T), "key_value_segment_ids": i32(B, S)},
      EITHER, ("query_segment_ids", "float32")),
    F("segment ids beyond int32 in a list",
      lambda: {"query_segment_ids": [[2**32 + 1] * T] * B, "key_value_segment_ids": i32(B, S)},
      ValueError, ("query_segment_ids", "4294967297", "int32")),
    F("key lengths of unequal rows", lambda: {"key_value_seq_lengths": [[1], [1, 2]]}, EITHER,
      ("key_value_seq_lengths", "list")),
    F("causal array", lambda: {"is_causal": np.array([True, False])}, TypeError, ("is_causal",)),
    F("causal list", lambda: {"is_causal": [[1], [1, 2]]}, TypeError, ("is_causal",)),
    F("scale bytes", lambda: {"scale": b"1"}, TypeError, ("scale",)),
    F("causal key", lambda: {"is_causal": jax.random.key(0)}, TypeError, ("is_causal", "key<fry>")),
    F("causal text", lambda: {"is_causal": "yes"}, TypeError, ("is_causal", "yes")),
    F("return_lse text", lambda: {"return_lse": "no"}, TypeError, ("return_lse", "no")),
    F("deterministic array", lambda: {"deterministic": np.zeros(2)}, TypeError, ("deterministic",)),
    F("window bool", lambda: {"local_window_size": False}, TypeError,
      ("local_window_size", "False")),
    F("negative window", lambda: {"local_window_size": -1},
      ValueError, ("local_window_size", "-1")),
    F("negative left", lambda: {"local_window_size": (-2, 3)}, ValueError,
      ("local_window_size", "-2")),
    F("negative right", lambda: {"local_window_size": (2, -3)}, ValueError,
      ("local_window_size", "-3")),
    F("window of three", lambda: {"local_window_size": (1, 2, 3)}, EITHER, ("local_window_size",)),
    F("window float", lambda: {"local_window_size": (1.5, 2)},
      EITHER, ("local_window_size", "1.5")),
    F("alignment", lambda: {"is_causal": True, "causal_align": "middle"}, ValueError,
      ("causal_align", "middle", "top_left", "bottom_right")),
    F("alignment array", lambda: {"causal_align": np.zeros(2)}, EITHER, ("causal_align",)),
    F("dropout without key", lambda: {"dropout_rate": 0.1}, ValueError,
      ("dropout_rate", "dropout_key")),
    F("dropout of one", lambda: {"dropout_rate": 1.0, "dropout_key": jax.random.key(0)}, ValueError,
      ("dropout_rate", "1.0")),
    F("dropout negative", lambda: {"dropout_rate": -0.1, "dropout_key": jax.random.key(0)},
      ValueError, ("dropout_rate", "-0.1")),
    F("dropout nan", lambda: {"dropout_rate": float("nan"), "dropout_key": jax.random.key(0)},
      ValueError, ("dropout_rate", "nan")),
    F("dropout key shape", lambda: {"dropout_rate": 0.1,
                                    "dropout_key": jax.random.split(jax.random.key(0), 3)},
      EITHER, ("dropout_key", "(3,)")),
    F("dropout key float", lambda: {"dropout_rate": 0.1, "dropout_key": f32(2)}, EITHER,
      ("dropout_key", "float32")),
    F("softcap zero", lambda: {"softcap": 0.0}, ValueError, ("softcap", "0")),
    F("softcap negative", lambda: {"softcap": -5.0}, ValueError, ("softcap", "-5")),
    F("softcap nan", lambda: {"softcap": float("nan")}, ValueError, ("softcap", "nan")),
    F("softcap infinite", lambda: {"softcap": float("inf")}, ValueError, ("softcap", "inf")),
    F("scale nan", lambda: {"scale": float("nan")}, ValueError, ("scale", "nan")),
    F("scale infinite", lambda: {"scale": float("inf")}, ValueError, ("scale", "inf")),
    F("softcap of no float32", lambda: {"softcap": 1e300}, ValueError, ("softcap", "1e+300")),
    F("softcap too small", lambda: {"softcap": 1e-300}, ValueError, ("softcap", "1e-300")),
    F("scale of no float32", lambda: {"scale": 1e39}, ValueError, ("scale", "1e+39")),
    F("scale of no float", lambda: {"scale": 10**400}, ValueError, ("scale",)),
    F("scale text", lambda: {"scale": "0.5"}, TypeError, ("scale", "'0.5'")),
    F("scale of a kind without order", lambda: {"scale": jnp.complex64(1)}, TypeError,
      ("scale", "complex64")),
    F("scale bool", lambda: {"scale": jnp.array(True)}, TypeError, ("scale", "bool")),
    F("scale for each head", lambda: {"scale": np.ones(N)}, EITHER, ("scale", "(4,)")),
    F("window of three in an array", lambda: {"local_window_size": np.array([1, 2, 3])}, TypeError,
      ("local_window_size", "[1, 2, 3]")),
    F("window of floats in an array", lambda: {"local_window_size": np.array([1.5, 2.0])},
      TypeError, ("local_window_size", "1.5")),
    F("scale array", lambda: {"scale": f32(3)}, EITHER, ("scale",)),
    F("sinks length", lambda: {"sinks": f32(K)}, ValueError, ("sinks", "(2,)", "(4,)")),
    F("sinks rank", lambda: {"sinks": f32(B, N)}, ValueError, ("sinks", "(2, 4)", "(4,)")),
    F("sinks integer", lambda: {"sinks": i32(N)}, EITHER, ("sinks", "int32")),
    F("backend array", lambda: {"backend": np.zeros(2)}, ValueError, ("backend", "cpu")),
    F("backend", lambda: {"backend": "tpu"}, ValueError, ("backend", "tpu", "xla", "cpu", "cuda")),
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_fault(fault, jitted):
    arguments = {**right_call(), **fault.change()}
    dynamic = {n: x for n, x in arguments.items() if isinstance(x, jax.Array) and n != "scale"}
    static = {n: x for n, x in arguments.items() if n not in dynamic}

    def call(dynamic):
        return jax_flash.flash_attention(**dynamic, **static)

    with pytest.raises(fault.error) as caught:
        (jax.jit(call) if jitted else call)(dynamic)
    for text in fault.says:
        assert text in str(caught.value), f"{text!r} is not in: {caught.value}"


@pytest.mark.parametrize("length", [6, 512])
def test_heads_in_their_place_are_not_said_to_be_elsewhere(length):
    shapes = (f32(B, length, 8, H), f32(B, length, 3, H), f32(B, length, 3, H))
    with pytest.raises(ValueError, match=r"8 heads .* and key 3 .* multiple of the second$"):
        jax_flash.flash_attention(*shapes)


# Heads and positions of query, and of key, where the order is [*B, N, T, H].
SWAPPED = {"all": (8, 300, 8, 300), "grouped": (8, 300, 2, 300), "one": (8, 300, 1, 300),
           "cross": (8, 300, 8, 100)}  # fmt: skip
# Positions and heads, in our order.
ORDINARY = {"a token": (1, 8, 1, 8), "one kv head": (1, 32, 1, 1), "many": (8, 128, 8, 128),
            "decoding": (1, 128, 1024, 8), "latent": (1, 512, 64, 1), "long": (300, 8, 300, 2),
            "few": (2, 256, 512, 256)}  # fmt: skip


@pytest.mark.parametrize("name", [*SWAPPED, *ORDINARY])
def test_heads_before_positions_are_told_once(name):
    """Where it is no error, and most likely a mistake."""
    first, second, kv_first, kv_second = (SWAPPED | ORDINARY)[name]
    shapes = [(3, first, second, 4)] + 2 * [(3, kv_first, kv_second, 4)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            jax.eval_shape(lambda *x: jax_flash.flash_attention(*x), *arrays)
    messages = [str(w.message) for w in caught]
    assert len(messages) == (name in SWAPPED)
    for text in (str(shapes[0]), str(shapes[1]), "[*B, N, T, H]", "jnp.swapaxes(x, -3, -2)"):
        assert all(text in message for message in messages)


FOREIGN = (
    (jax_flash.flash_attention, "causal", "did you mean is_causal?"),
    (jax_flash.flash_attention, "softmax_scale", "did you mean scale?"),
    (jax_flash.flash_attention, "segment_ids", "query_segment_ids and key_value_segment_ids?"),
    (jax_flash.flash_attention, "window_size", "did you mean local_window_size, with None in"),
    (jax_flash.flash_attention, "soft_caps", "did you mean softcap?"),
    (jax_flash.flash_attention, "return_residual", "did you mean return_lse?"),
    (jax_flash.flash_attention, "enable_gqa", "did you mean key and value of fewer heads"),
    (jax_flash.flash_attention, "key_padding_mask", "did you mean key_value_seq_lengths, or"),
    (jax_flash.dot_product_attention, "key_padding_mask", "did you mean key_value_seq_lengths, or"),
    (jax_flash.flash_attention, "colour", "$"),
    (jax_flash.dot_product_attention, "causal", "did you mean is_causal?"),
    (jax_flash.dot_product_attention, "backend", "did you mean implementation?"),
    (jax_flash.dot_product_attention, "soft_cap", "jax_flash.flash_attention takes softcap"),
    (jax_flash.dot_product_attention, "sinks", "jax_flash.flash_attention takes sinks"),
    (jax_flash.decode_attention, "cache_seqlens", "lengths, which count the new positions too"),
    (jax_flash.decode_attention, "block_table", "did you mean page_table?"),
    (jax_flash.decode_attention, "window", "did you mean local_window_size?"),
    (jax_flash.fill_cache, "page_tables", "did you mean page_table?"),
    (jax_flash.explain, "causal", "did you mean is_causal?"),
    (functools.partial(jax_flash.context_parallel.attention, axis_name="seq"), "causal",
     "did you mean is_causal?"),
)  # fmt: skip


@pytest.mark.parametrize(("function", "keyword", "says"), FOREIGN)
def test_keywords_of_other_libraries_are_told_ours(function, keyword, says):
    query, key, value = right_call().values()
    with pytest.raises(TypeError, match=rf"unexpected keyword argument '{keyword}'(; .*)?{says}"):
        function(query, key, value, **{keyword: None})


def test_arguments_without_a_keyword_are_told_which_have_none():
    query, key, value = right_call().values()
    says = "expected query, key, value, and others by keyword, such as scale, bias, mask"
    with pytest.raises(TypeError, match=rf"flash_attention got 4 arguments .*{says}"):
        jax_flash.flash_attention(query, key, value, f32(T, S))  # pyright: ignore
    with pytest.raises(TypeError, match=r"expected mask_mod, and .* such as q_len, kv_len"):
        jax_flash.block_mask(jax_flash.masks.causal(), T, S)  # pyright: ignore


def test_right_call_passes():
    out = jax_flash.flash_attention(**right_call())
    assert out.shape == (B, T, N, H)


@pytest.mark.parametrize("dtype", ["uint8", "uint32", "int64", "uint64"])
@pytest.mark.parametrize("kind", [np, jnp], ids=["numpy", "jax"])
def test_lengths_of_any_integer_dtype(dtype, kind):
    """The largest number of a dtype is a length beyond the end, not a negative one."""
    arrays = right_call() | {"value": jax.random.normal(jax.random.key(0), (B, S, K, H))}
    with jax.enable_x64(kind is jnp):
        lengths = kind.array([np.iinfo(dtype).max, 3], dtype)
        assert lengths.dtype == dtype
        out = jax_flash.flash_attention(**arrays, key_value_seq_lengths=lengths)
    want = jax_flash.flash_attention(**arrays, key_value_seq_lengths=np.array([S, 3]))
    np.testing.assert_array_equal(out, want)


def test_options_must_be_static():
    """A traced option is an error that names it, not a tracer leak from deep inside."""
    for option in ("softcap", "dropout_rate"):
        extra = {"dropout_key": jax.random.key(0)} if option == "dropout_rate" else {}
        with pytest.raises((TypeError, ValueError), match=option):
            jax.jit(
                lambda x, option=option, extra=extra: jax_flash.flash_attention(
                    **right_call(), **{option: x}, **extra
                )
            )(0.5)


def test_backend_that_cannot_run_says_why():
    try:
        gpu = bool(jax.devices("gpu"))
    except RuntimeError:
        gpu = False
    if gpu:
        pytest.skip("needs a machine without a GPU")
    with pytest.raises(NotImplementedError, match=re.compile("cuda", re.IGNORECASE)):
        jax_flash.flash_attention(**right_call(), backend="cuda")


ZERO_SHAPES = (
    {"T": 0},
    {"S": 0},
    {"B": 0},
    {"N": 0, "K": 0},
    {"T": 0, "S": 0},
    {"B": 0, "T": 0, "S": 0, "N": 0, "K": 0},
)


@pytest.mark.parametrize("sizes", ZERO_SHAPES, ids=str)
def test_zero_sizes(sizes, host_backend):
    b, t, s, n, k, h, hv = (
        sizes.get(name, full)
        for name, full in {"B": 2, "T": 3, "S": 5, "N": 4, "K": 2, "H": 8, "Hv": 6}.items()
    )
    q, k_, v = (jnp.ones(shape) for shape in ((b, t, n, h), (b, s, k, h), (b, s, k, hv)))
    bias, sinks = jnp.ones((1, n, t, s)), jnp.ones((n,))

    def both(q, k, v, bias, sinks):
        return jax_flash.flash_attention(
            q, k, v, bias=bias, sinks=sinks, is_causal=True, return_lse=True, backend=host_backend
        )

    (out, lse), pull = jax.vjp(both, q, k_, v, bias, sinks)
    assert out.shape == (b, t, n, hv)
    assert out.dtype == jnp.float32
    assert lse.shape == (b, t, n)
    assert lse.dtype == jnp.float32
    if s == 0:
        assert (np.asarray(lse) == sinks).all()
        assert (np.asarray(out) == 0).all()
    gradients = pull((jnp.ones_like(out), jnp.ones_like(lse)))
    for gradient, x in zip(gradients, (q, k_, v, bias, sinks), strict=True):
        assert gradient.shape == x.shape
        assert np.isfinite(gradient).all()
        if s == 0 or t == 0:  # a sink alone is the lse of every row
            assert (np.asarray(gradient) == (b * t if x is sinks else 0)).all()
