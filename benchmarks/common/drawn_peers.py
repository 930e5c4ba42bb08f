"""Owns how each implementation computes a problem of drawn.py, and what it lacks."""

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_flash

from .drawn import Drawn, offsets
from .feature_peers import SEED
from .peers import XLA_SCORES
from .shapes import Pass

Given = Mapping[str, Any]  # operands by name
OURS, XLA = "jax_flash", "jax_xla"
LABELS = {
    OURS: "jax_flash",
    "fa3": "FlashAttention-3",
    "jax_cudnn": "jax.nn, cuDNN",
    XLA: "XLA's program",
}


def all_peers() -> dict[str, Callable[[Drawn, Given], Any]]:
    """Lists what this machine has: by name, attention of a problem's operands."""
    found = {OURS: attend_flash, "jax_cudnn": attend_cudnn, XLA: attend_xla}
    if importlib.util.find_spec("dew_flash_attn") is not None:
        found["fa3"] = attend_fa3
    return found


def register(names: Sequence[str]) -> None:
    """Registers the custom calls of some peers, as each does when it is first traced.

    Programs that another process compiled need them.
    """
    call = Drawn(1, 64, 64, 1, 1, 64)
    for name in names:
        with contextlib.suppress(Exception):  # it refuses elsewhere, with its reason
            jax.eval_shape(functools.partial(all_peers()[name], call), structs(call))


def score_of(of: Drawn, given: Given) -> Callable[..., Any]:
    """Returns the function of the scores: of scalars, or of arrays that broadcast."""
    slopes, rows, columns = (given[name] for name in ("slopes", "rows", "columns"))
    return SCORES[of.score](slopes, rows, columns)


def _distance(query: Any, key: Any) -> Any:
    return (query - key).astype(jnp.float32)


# Makers of f(score, batch, head, query, key), from slopes [N], rows [B, T] and columns [B, S].
SCORES: dict[str, Callable[[Any, Any, Any], Callable[..., Any]]] = {
    "sigmoid": lambda slopes, rows, columns: (
        lambda x, b, h, q, k: x * jax.nn.sigmoid(slopes[h] * _distance(q, k))
    ),
    "exp": lambda slopes, rows, columns: (
        lambda x, b, h, q, k: x + jnp.exp(-slopes[h] * jnp.abs(_distance(q, k)))
    ),
    "log": lambda slopes, rows, columns: (
        lambda x, b, h, q, k: x - jnp.log1p(slopes[h] * jnp.abs(_distance(q, k)))
    ),
    "square": lambda slopes, rows, columns: lambda x, b, h, q, k: x - 1e-4 * _distance(q, k) ** 2,
    "quotient": lambda slopes, rows, columns: (
        lambda x, b, h, q, k: x / (1 + slopes[h] * jnp.abs(_distance(q, k)))
    ),
    "tanh": lambda slopes, rows, columns: (
        lambda x, b, h, q, k: x + jnp.tanh(slopes[h] * _distance(q, k) + x)
    ),
    "products": lambda slopes, rows, columns: (
        lambda x, b, h, q, k: x * slopes[h] * rows[b, q] * columns[b, k]
    ),
    "tables": lambda slopes, rows, columns: (
        lambda x, b, h, q, k: x + rows[b, q] * slopes[h] + columns[b, k]
    ),
}


def attend_flash(of: Drawn, given: Given) -> Any:
    """Computes our attention, as a user calls it."""
    return jax_flash.flash_attention(**flash_options(of, given))


def flash_options(of: Drawn, given: Given) -> dict[str, Any]:
    """Returns the arguments of `flash_attention`."""
    lengths = given.get("lengths")
    return {
        "query": given["q"],
        "key": given["k"],
        "value": given["v"],
        "bias": given.get("bias"),
        "mask": given.get("mask"),
        "is_causal": of.causal,
        "causal_align": "bottom_right" if of.bottom_right else "top_left",
        "local_window_size": of.window,
        "query_seq_lengths": lengths if of.lengths == "both" else None,
        "key_value_seq_lengths": lengths,
        "query_segment_ids": given.get("segments"),
        "key_value_segment_ids": given.get("segments"),
        "score_mod": score_of(of, given) if of.score else None,
        "dropout_rate": of.dropout,
        "dropout_key": given.get("dropout_key"),
    }


def structs(call: Drawn) -> dict[str, jax.ShapeDtypeStruct]:
    return {n: jax.ShapeDtypeStruct(s, dtype) for n, (s, dtype) in call.operands.items()}


@functools.cache
def ran_on(call: Drawn) -> dict[Pass, str]:
    """Says which of our backends runs each pass of a call: on a GPU by the file of its kernels."""
    given: dict[str, Any] = structs(call)
    if call.score:  # it reads elements
        given |= {name: jnp.zeros(given[name].shape) for name in ("slopes", "rows", "columns")}
    found = jax_flash.explain(**flash_options(call, given))
    parts: dict[Pass, Any] = {"forward": found.forward, "training": found.backward}
    return {
        of: part.backend if part.kernel is None else part.kernel.plan.source
        for of, part in parts.items()
    }


def attend_xla(of: Drawn, given: Given) -> Any:
    """Computes jax.nn's attention by XLA; the plain formula for what it has no argument for."""
    if of.scores > XLA_SCORES // 4:
        raise NotImplementedError(f"scores of {4 * of.scores >> 30} GB")
    if of.dropout or of.score:
        return _plain(of, given)
    mask = given.get("mask")
    if of.bottom_right:
        mask = jnp.tri(of.q_len, of.kv_len, of.kv_len - of.q_len, dtype=bool)[None, None]
    if of.documents:
        ids = given["segments"]
        mask = (ids[:, :, None] == ids[:, None, :])[:, None]
    return _attend_nn(of, given, given.get("bias"), mask, "xla")


def attend_cudnn(of: Drawn, given: Given) -> Any:
    """Computes cuDNN's attention through jax.nn, or the function below it."""
    for refused in ("bottom_right", "score"):
        if getattr(of, refused):
            raise NotImplementedError(f"no {refused.replace('_', '-')}")
    sizes = (of.q_len, of.kv_len)  # a bias broadcasts over rows and heads alone
    bias, mask = (
        None if x is None else jnp.broadcast_to(x, (*x.shape[:2], *sizes))
        for x in (given.get("bias"), given.get("mask"))
    )
    if not of.dropout and not of.documents:
        return _attend_nn(of, given, bias, mask, "cudnn")
    cudnn = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    kinds = cudnn.MaskType
    if of.lengths or of.window:
        raise NotImplementedError("no lengths and no window beside dropout or documents")
    packed = {}
    if of.documents:
        starts = given["offsets"]
        long = jnp.diff(starts, axis=1)
        packed = {"q_seqlen": long, "kv_seqlen": long, "q_offsets": starts, "kv_offsets": starts}
    return cudnn.dot_product_attention(
        given["q"],
        given["k"],
        given["v"],
        bias,
        mask,
        scale=of.head_dim**-0.5,
        mask_type=kinds.CAUSAL if of.causal else kinds.NO_MASK,
        dropout_rate=of.dropout,
        seed=SEED,
        **packed,
    )


def attend_fa3(of: Drawn, given: Given) -> Any:
    """Computes FlashAttention-3 of Dao-AILab, from `pip install dew-flash-attn-cu13`.

    Documents are sequences of its packed call, and so are the rows of given lengths, each with the
    padding behind it as another sequence: nothing is copied, and what it writes there is not
    compared.
    """
    for refused in ("bias", "mask", "dropout", "score"):
        if getattr(of, refused):
            raise NotImplementedError(f"no {refused}")
    fa3 = importlib.import_module("dew_flash_attn")
    window = (-1, -1) if of.window is None else of.window
    options = {"is_causal": of.causal, "window_size": (window[0], 0) if of.causal else window}
    q, k, v = (given[name] for name in "qkv")
    if not of.documents and not of.lengths:
        return fa3.flash_mha(q, k, v, **options)
    rows = jnp.arange(of.batch, dtype=jnp.int32)[:, None]

    def starts(length: int, inner: Any) -> Any:
        """Returns where sequences begin, of rows of a length that begin as `inner` says."""
        begins = (rows * length + inner).reshape(-1)
        return jnp.concatenate([begins, jnp.full(1, of.batch * length, jnp.int32)])

    if of.documents:
        longest = int(np.diff(offsets(of), axis=1).max())
        of_queries = of_keys = starts(of.q_len, given["offsets"][:, :-1])
        lengths = (longest, longest)
    else:
        valid = jnp.stack([jnp.zeros_like(given["lengths"]), given["lengths"]], axis=1)
        whole = jnp.full_like(valid, of.q_len).at[:, 0].set(0)  # all queries see the valid keys
        of_queries = starts(of.q_len, valid if of.lengths == "both" else whole)
        of_keys = starts(of.kv_len, valid)
        lengths = (of.q_len, of.kv_len)
    flat = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    out = fa3.flash_mha_varlen(
        *flat, of_queries, lengths[0], key_cu_seqlens=of_keys, key_max_seqlen=lengths[1], **options
    )
    return out.reshape(q.shape)


def _attend_nn(of: Drawn, given: Given, bias: Any, mask: Any, implementation: Any) -> Any:
    lengths = given.get("lengths")
    return jax.nn.dot_product_attention(
        given["q"],
        given["k"],
        given["v"],
        bias,
        mask,
        is_causal=of.causal and not of.bottom_right,
        local_window_size=of.window,
        query_seq_lengths=lengths if of.lengths == "both" else None,
        key_value_seq_lengths=lengths,
        implementation=implementation,
    )


def _plain(of: Drawn, given: Given) -> Any:
    """Computes the formula as one writes it: the softmax in float32, products of q's dtype."""
    q, k, v = (given[name] for name in "qkv")
    group = of.heads // of.kv_heads
    q = q.reshape(of.batch, of.q_len, of.kv_heads, group, of.head_dim)
    x = jnp.einsum(
        "btkgh,bskh->bkgts", q, k, precision=_algorithm(of), preferred_element_type=jnp.float32
    )
    x = x.reshape(of.batch, of.heads, of.q_len, of.kv_len) * of.head_dim**-0.5
    b, h, i, j = jnp.ogrid[: of.batch, : of.heads, : of.q_len, : of.kv_len]
    if of.bias:
        x = x + given["bias"]
    if of.score:
        x = score_of(of, given)(x, b, h, i, j)
    seen = jnp.ones((1, 1, 1, 1), bool)
    if of.mask:
        seen = seen & given["mask"]
    if of.causal:
        seen = seen & (j <= i + (of.kv_len - of.q_len if of.bottom_right else 0))
    if of.window is not None:
        seen = seen & (i - j <= of.window[0]) & (j - i <= of.window[1])
    if of.lengths:
        seen = seen & (j < given["lengths"][:, None, None, None])
    if of.documents:
        ids = given["segments"]
        seen = seen & (ids[:, None, :, None] == ids[:, None, None, :])
    weights = jax.nn.softmax(jnp.where(seen, x, -1e30), axis=-1)
    if of.dropout:
        keep = jax.random.bernoulli(given["dropout_key"], 1 - of.dropout, weights.shape)
        weights = jnp.where(keep, weights / (1 - of.dropout), 0)
    weights = weights.astype(v.dtype).reshape(of.batch, of.kv_heads, group, of.q_len, of.kv_len)
    out = jnp.einsum("bkgts,bskh->btkgh", weights, v)
    return out.reshape(of.batch, of.q_len, of.heads, of.head_dim)


def _algorithm(of: Drawn) -> Any:
    """Returns what jax.nn asks of the product, so that its gradient's are tensor cores' too."""
    presets = jax.lax.DotAlgorithmPreset
    known = {"bfloat16": presets.BF16_BF16_F32, "float16": presets.F16_F16_F32}
    return known.get(of.dtype) if jax.default_backend() == "gpu" else None
