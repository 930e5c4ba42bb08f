"""The oracle: attention in plain numpy, with its gradients written out by hand.

It shares no line with the package: one batch row and one head at a time, the whole score matrix in
memory, the derivative of each step spelled out. In float64 it is the truth that every backend is
measured against; with every intermediate rounded to a narrower type it is the plain attention whose
error sets the tolerance (see tolerance.py).

Tests of what JAX makes of a call (derivatives of any order, transformations) need attention that
JAX transforms as well: jax_flash.reference, a function of the package that this file judges
(meaning/test_reference.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import ml_dtypes
import numpy as np

DTYPES = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


def nothing() -> np.ndarray:
    return np.zeros(0)


@dataclasses.dataclass
class Result:
    """Outputs and gradients in float64, in the layout of the public call.

    Without cotangents the gradients are empty, and so are those of absent arguments.
    """

    out: np.ndarray  # [*B, T, N, Hv]
    lse: np.ndarray  # [*B, T, N]
    dq: np.ndarray = dataclasses.field(default_factory=nothing)  # [*B, T, N, H]
    dk: np.ndarray = dataclasses.field(default_factory=nothing)  # [*B, S, K, H]
    dv: np.ndarray = dataclasses.field(default_factory=nothing)  # [*B, S, K, Hv]
    dbias: np.ndarray = dataclasses.field(default_factory=nothing)  # the bias's own shape
    dsinks: np.ndarray = dataclasses.field(default_factory=nothing)  # [N]
    dtable: np.ndarray = dataclasses.field(default_factory=nothing)  # the table's own shape
    # By field name: the largest sum of magnitudes behind one value, before terms cancel.
    summed: dict[str, float] = dataclasses.field(default_factory=dict)
    seen: np.ndarray = dataclasses.field(default_factory=nothing)  # bool [rows, N, T, S], by masks


def philox4x32(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Philox4x32-7 of counters [..., 4], as uint32 words [..., 4].

    Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
    """
    c0, c1, c2, c3 = (counter[..., i].astype(np.uint64) for i in range(4))
    k0, k1 = (int(word) for word in key)
    low = np.uint64(0xFFFFFFFF)
    for _ in range(7):
        product0, product1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (product1 >> np.uint64(32)) ^ c1 ^ np.uint64(k0),
            product1 & low,
            (product0 >> np.uint64(32)) ^ c3 ^ np.uint64(k1),
            product0 & low,
        )
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def dropout_keep(
    key: tuple[int, int], rate: float, batch: int, head: int, q_len: int, kv_len: int
) -> np.ndarray:
    """Which probabilities of one head survive dropout: bool [T, S]."""
    row, column = np.meshgrid(np.arange(q_len), np.arange(kv_len), indexing="ij")
    counter = np.stack(
        [
            np.full_like(row, head),
            row // 16 * 4 + row % 4,
            np.full_like(row, batch),
            column // 16 * 4 + column % 8 // 2,
        ],
        axis=-1,
    )
    words = philox4x32(counter, key)  # [T, S, 4]
    second = (column // 16 + row // 16 + row // 4) % 2 == 1
    a, b = (np.where(second, words[..., 2 + i], words[..., i]) for i in range(2))
    words = np.stack([a, b, a * np.uint32(0x93D765DD) + b, b * np.uint32(0xD2511F53) + a], -1)
    which = 2 * (column // 8 % 2) + row // 8 % 2
    word = np.take_along_axis(words, which[..., None], axis=-1)[..., 0]
    draw = word >> (column % 2 * 16).astype(np.uint32) & np.uint32(0x7FFF)
    return draw >= round(rate * 2**15)


def rotated(x: np.ndarray, positions: np.ndarray, base: float) -> np.ndarray:
    """Rotary embedding of [*B, T, N, H] at positions [*B, T], rounded to the type of x."""
    half = x.shape[-1] // 2
    angles = np.asarray(positions)[..., None, None] * base ** (-np.arange(half) / half)
    turned = np.exp(1j * angles) * (x[..., :half] + 1j * x[..., half:].astype(np.float64))
    return np.concatenate([turned.real, turned.imag], axis=-1).astype(x.dtype)


def visible(
    q_len: int,
    kv_len: int,
    *,
    window: tuple[int | None, int | None] = (None, None),
    bottom_right: bool = False,
    query_length: int | None = None,
    key_value_length: int | None = None,
    query_segments: np.ndarray | None = None,
    key_value_segments: np.ndarray | None = None,
    query_positions: np.ndarray | None = None,
    key_value_positions: np.ndarray | None = None,
    mask: np.ndarray | None = None,
) -> np.ndarray:
    """Which keys each query of one head sees: bool [T, S]."""
    query_length = q_len if query_length is None else min(max(query_length, 0), q_len)
    key_value_length = kv_len if key_value_length is None else min(max(key_value_length, 0), kv_len)
    offset = key_value_length - query_length if bottom_right else 0
    left, right = window
    query_at = np.arange(q_len) + offset if query_positions is None else query_positions
    key_at = np.arange(kv_len) if key_value_positions is None else key_value_positions
    seen = np.zeros((q_len, kv_len), bool)
    for i in range(query_length):
        ahead = key_at[:key_value_length].astype(np.int64) - int(query_at[i])
        for_i = np.ones(key_value_length, bool)
        if left is not None:
            for_i &= ahead >= -left
        if right is not None:
            for_i &= ahead <= right
        seen[i, :key_value_length] = for_i
    if query_segments is not None and key_value_segments is not None:
        seen &= query_segments[:, None] == key_value_segments[None, :]
    if mask is not None:
        seen &= mask
    return seen


def _one_head(q, k, v, seen, keep, bias, sink, *, scale, softcap, score, rate, round_, dout, dlse):
    """One head: q [T, H], k [S, H], v [S, Hv], seen and keep [T, S], bias [T, S] or None.

    score: of the scores [T, S] the value and the slope, or None.
    """
    # What is not visible is replaced before any arithmetic, so that NaN there cannot spread.
    k_seen, v_seen = seen.any(0), (seen & keep).any(0)
    q = np.where(seen.any(1)[:, None], q, 0)
    k = np.where(k_seen[:, None], k, 0)
    v = np.where(v_seen[:, None], v, 0)
    scores = round_(round_(q @ k.T) * scale)
    if bias is not None:
        scores = round_(scores + np.where(seen, bias, 0))
    slope = np.ones_like(scores)
    if softcap is not None:
        tanh = np.tanh(scores / softcap)
        scores, slope = round_(softcap * tanh), 1 - tanh * tanh
    if score is not None:
        scores, slope = score(np.where(seen, scores, 0))
        scores, slope = round_(scores), np.where(seen, slope, 0)
    scores = np.where(seen, scores, -np.inf)
    # A logit of -inf hides a key as a mask does.
    hidden = scores == -np.inf
    alive = ~hidden.all(1)
    v = np.where((~hidden & keep).any(0)[:, None], v, 0)
    top = np.where(alive, scores.max(1, initial=-np.inf), 0 if sink is None else sink)
    if sink is not None:
        top = np.maximum(top, sink)
    e = np.exp(scores - top[:, None])
    total = e.sum(1)
    if sink is not None:
        total = total + np.exp(sink - top)
    safe_total = np.where(alive, total, 1)
    p = round_(np.where(alive[:, None], e / safe_total[:, None], 0))
    # The softmax's denominator of a row that sees nothing is its sink's part, else 0.
    lse = np.where(alive, top + np.log(safe_total), -np.inf if sink is None else sink)
    factor = keep / (1 - round(rate * 2**15) / 2**15)
    p_dropped = round_(p * factor)
    out = round_(p_dropped @ v)
    if dout is None:
        return out, lse, None
    dout = np.where(alive[:, None], dout, 0)
    dv = round_(p_dropped.T @ dout)
    dp = round_(round_(dout @ v.T) * factor)
    # Equal to (p * dp).sum(1), but from the rounded output, which is what FlashAttention keeps.
    dtotal = (out * dout).sum(1) - np.where(lse > -np.inf, 0 if dlse is None else dlse, 0)
    dsink, magnitudes = None, {}
    if sink is not None:
        terms = np.exp(sink - lse) * dtotal
        dsink = -terms.sum()
        magnitudes["dsinks"] = np.abs(terms).sum()
        # Roundings are independent: their squares add up.
        magnitudes["dsinks by rounding"] = ((np.exp(sink - lse)[:, None] * out * dout) ** 2).sum()
    apart = p * (np.abs(dp) + np.abs(dtotal)[:, None])
    magnitudes["dq"] = abs(scale) * ((apart * np.abs(slope)) @ np.abs(k)).max(initial=0)
    magnitudes["dk"] = abs(scale) * ((apart * np.abs(slope)).T @ np.abs(q)).max(initial=0)
    magnitudes["dv"] = (p_dropped.T @ np.abs(dout)).max(initial=0)
    dlogits = p * round_(dp - dtotal[:, None])
    dbias = round_(dlogits * slope)
    dscores = round_(dbias * scale)
    return (
        out,
        lse,
        (round_(dscores @ k), round_(dscores.T @ q), dv, dbias, dsink, apart, magnitudes, dlogits),
    )


def attention(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    *,
    scale: float | None = None,
    bias: np.ndarray | None = None,
    mask: np.ndarray | None = None,
    is_causal: bool = False,
    causal_align: str = "top_left",
    local_window_size: int | tuple[int | None, int | None] | None = None,
    query_seq_lengths: np.ndarray | None = None,
    key_value_seq_lengths: np.ndarray | None = None,
    query_segment_ids: np.ndarray | None = None,
    key_value_segment_ids: np.ndarray | None = None,
    query_positions: np.ndarray | None = None,
    key_value_positions: np.ndarray | None = None,
    softcap: float | None = None,
    score: Callable[..., tuple[np.ndarray, ...]] | None = None,
    table: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    dropout_rate: float = 0.0,
    dropout_words: tuple[int, int] | None = None,
    dout: np.ndarray | None = None,
    dlse: np.ndarray | None = None,
    precision: str = "float64",
) -> Result:
    """The public call in numpy; `precision` names the type every intermediate is rounded to.

    Args are those of flash_attention; `dropout_words` are the two words of the dropout key, `dout`
    [*B, T, N, Hv] and `dlse` [*B, T, N] the cotangents (gradients are None without dout). `score`
    is ScoreCase.plain of score_functions.py, which reads `table`.
    """
    work = np.float64 if precision == "float64" else np.float32
    low = DTYPES[precision]

    def round_(x):
        return x.astype(low).astype(work)

    lead = query.shape[:-3]
    rows = int(np.prod(lead))
    q_len, q_heads, head_dim = query.shape[-3:]
    kv_len, kv_heads, value_dim = value.shape[-3:]
    q = query.reshape(rows, q_len, q_heads, head_dim).astype(work)
    k = key.reshape(rows, kv_len, kv_heads, head_dim).astype(work)
    v = value.reshape(rows, kv_len, kv_heads, value_dim).astype(work)
    scale = head_dim**-0.5 if scale is None else scale
    full = (*lead, q_heads, q_len, kv_len)

    def per_head(x, like):
        wide = np.broadcast_to(x.reshape((1,) * (len(full) - x.ndim) + x.shape), full)
        return wide.astype(like).reshape(rows, q_heads, q_len, kv_len)

    bias_rows = None if bias is None else per_head(bias, work)
    mask_rows = None if mask is None else per_head(mask, bool)
    if local_window_size is None:
        window: tuple[int | None, int | None] = (None, None)
    elif isinstance(local_window_size, tuple):
        window = local_window_size
    else:
        window = (local_window_size, local_window_size)
    if is_causal:
        window = (window[0], 0 if window[1] is None else min(window[1], 0))

    def per_row(x, width=()):
        return None if x is None else x.reshape(rows, *width)

    q_lengths, kv_lengths = per_row(query_seq_lengths), per_row(key_value_seq_lengths)
    q_segments = per_row(query_segment_ids, (q_len,))
    kv_segments = per_row(key_value_segment_ids, (kv_len,))
    q_positions = per_row(query_positions, (q_len,))
    kv_positions = per_row(key_value_positions, (kv_len,))
    do = None if dout is None else dout.reshape(rows, q_len, q_heads, value_dim).astype(work)
    dl = None if dlse is None else dlse.reshape(rows, q_len, q_heads).astype(work)

    out = np.zeros((rows, q_len, q_heads, value_dim), work)
    lse = np.zeros((rows, q_len, q_heads), work)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    dbias_full = np.zeros((rows, q_heads, q_len, kv_len), work) if bias is not None else None
    dsinks = np.zeros(q_heads, work) if sinks is not None else None
    apart_full = np.zeros((rows, q_heads, q_len, kv_len)) if bias is not None else None
    dtable = None if table is None else np.zeros(table.size)
    dtable_apart = 0.0 if table is None else np.zeros(table.size)
    place = np.arange(q_len)[:, None], np.arange(kv_len)
    summed: dict[str, dict] = {}
    all_seen = np.zeros((rows, q_heads, q_len, kv_len), bool)
    for b in range(rows):
        for n in range(q_heads):
            g = n // (q_heads // kv_heads)
            seen = visible(
                q_len,
                kv_len,
                window=window,
                bottom_right=causal_align == "bottom_right",
                query_length=None if q_lengths is None else int(q_lengths[b]),
                key_value_length=None if kv_lengths is None else int(kv_lengths[b]),
                query_segments=None if q_segments is None else q_segments[b],
                key_value_segments=None if kv_segments is None else kv_segments[b],
                query_positions=None if q_positions is None else q_positions[b],
                key_value_positions=None if kv_positions is None else kv_positions[b],
                mask=None if mask_rows is None else mask_rows[b, n],
            )
            all_seen[b, n] = seen
            keep = np.ones((q_len, kv_len), bool)
            if dropout_words is not None:
                keep = dropout_keep(dropout_words, dropout_rate, b, n, q_len, kv_len)
            derivatives: list[tuple[np.ndarray, ...]] = []

            def of_scores(x, b=b, n=n, derivatives=derivatives):
                value, slope, *by_table = score(table.astype(work), x, b, n, *place)
                derivatives.append((x, *by_table))
                return value, slope

            out[b, :, n], lse[b, :, n], grads = _one_head(
                q[b, :, n],
                k[b, :, g],
                v[b, :, g],
                seen,
                keep,
                None if bias_rows is None else bias_rows[b, n],
                None if sinks is None else work(sinks[n]),
                scale=scale,
                softcap=softcap,
                score=None if score is None else of_scores,
                rate=dropout_rate,
                round_=round_,
                dout=None if do is None else do[b, :, n],
                dlse=None if dl is None else dl[b, :, n],
            )
            if grads is not None:
                dq[b, :, n] = grads[0]
                dk[b, :, g] += grads[1]
                dv[b, :, g] += grads[2]
                if dbias_full is not None and apart_full is not None:
                    dbias_full[b, n], apart_full[b, n] = grads[3], grads[5]
                if dsinks is not None:
                    dsinks[n] += grads[4]
                if dtable is not None:
                    _, index, by_element = derivatives[0]
                    by_element = np.where(seen, by_element, 0)
                    np.add.at(dtable, index, grads[7] * by_element)
                    np.add.at(dtable_apart, index, grads[5] * np.abs(by_element))
                for field, magnitude in grads[6].items():
                    at = (b, g) if field in ("dk", "dv") else n if "dsinks" in field else (b, n)
                    summed[field] = summed.get(field, {})
                    summed[field][at] = summed[field].get(at, 0.0) + float(magnitude)
    result = Result(
        out.reshape(*lead, q_len, q_heads, value_dim),
        lse.reshape(*lead, q_len, q_heads),
        seen=all_seen,
    )
    if do is None:
        return result
    result.dq, result.dk, result.dv = (
        round_(x).reshape(like.shape) for x, like in ((dq, query), (dk, key), (dv, value))
    )
    if bias is not None and dbias_full is not None and apart_full is not None:
        dbias_full, apart_full = dbias_full.reshape(full), apart_full.reshape(full)
        padded = (1,) * (len(full) - bias.ndim) + bias.shape
        axes = tuple(axis for axis, size in enumerate(full) if padded[axis] != size)
        result.dbias = round_(dbias_full.sum(axes, keepdims=True)).reshape(bias.shape)
        result.summed["dbias"] = float(apart_full.sum(axes).max(initial=0.0))
    if dsinks is not None:
        result.dsinks = dsinks
    if dtable is not None:
        result.dtable = dtable.reshape(table.shape)
        result.summed["dtable"] = float(np.max(dtable_apart))
    for field, magnitudes in summed.items():
        result.summed[field] = max(magnitudes.values())
    return result
