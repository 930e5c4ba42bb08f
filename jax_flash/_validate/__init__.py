"""From a user's arguments to a Problem and its operands, or an error that says what to change.

Everything here runs at trace time and looks at ranks, shapes, dtypes and Python values, never at
array contents. `prepare` puts together what the other files check: `arrays.py` query, key and
value, and any array; `terms.py` the optional ones; `masks.py` masks, block masks and functions of
scores; `scalars.py` numbers and switches; `float8.py` what is quantised. `decode.py` checks the
calls on a cache. Read next: `_problem.py`.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_flash import _simplify
from jax_flash._float8 import DTYPE
from jax_flash._ops.float8 import Form
from jax_flash._problem import Problem, order_terms
from jax_flash._terms import TERMS, capture
from jax_flash._validate import float8
from jax_flash._validate.arrays import array, check_head_dim, query_key_value, value_within
from jax_flash._validate.masks import blocks_of, check_sizes, mask_of, score_function, whole
from jax_flash._validate.scalars import (
    choice,
    dropout_rate_of,
    flag,
    precision_of,
    real,
    scale_of,
    softcap_of,
    window_sides,
)
from jax_flash._validate.terms import (
    bias_of,
    dropout_state_of,
    ids_of,
    indices_alone,
    indices_of,
    lengths_of,
    positions_of,
    segments_of,
    sinks_of,
)

__all__ = ["Prepared", "array", "check_head_dim", "flag", "prepare", "real"]

_POSITIONS = 2**32  # no two are so far apart
_ALIGNMENTS = ("top_left", "bottom_right")


class Prepared(NamedTuple):
    """A call in the form of the primitives.

    Attributes:
      problem: what to compute.
      operands: (q, k, v, *problem.optional), of which the results may have other rows than query.
      rows: query's shape but for the head dim.
      rewrites: the names of those of `_simplify.py` that were taken.
      float8: how it is computed in float8; None: in query's dtype.
      out_dtype: of the result.
      amax: the largest magnitudes of query, key and value, where they are asked for and `float8`
        does not find them.
      value_dim: v is the first so many features of k, where a kernel makes use of it; else None.
    """

    problem: Problem
    operands: tuple[jax.Array, ...]
    rows: tuple[int, ...]
    rewrites: tuple[str, ...]
    float8: Form | None
    out_dtype: Any
    amax: jax.Array | None
    value_dim: int | None


def prepare(
    query: Any,
    key: Any,
    value: Any,
    *,
    scale: Any,
    bias: Any,
    mask: Any,
    block_mask: Any,
    is_causal: Any,
    causal_align: Any,
    local_window_size: Any,
    query_seq_lengths: Any,
    key_value_seq_lengths: Any,
    query_segment_ids: Any,
    key_value_segment_ids: Any,
    query_positions: Any,
    key_value_positions: Any,
    indices: Any = None,
    value_dim: Any = None,
    softcap: Any,
    score_mod: Any,
    sinks: Any,
    dropout_rate: Any,
    dropout_key: Any,
    deterministic: Any,
    precision: Any,
    query_scale: Any = None,
    key_scale: Any = None,
    value_scale: Any = None,
    out_dtype: Any = None,
    quantize: Any = None,
    fallback: Any = None,
    with_amax: bool = False,
    shards: int | None = None,
) -> Prepared:
    """Checks the arguments of `flash_attention` and brings them to the form of the primitives.

    Where the sequence is split over devices, `shards` says over how many the arguments are already:
    then they are one device's, but for lengths and windows, and the keys of bias and mask, which
    are of the whole sequence.

    Raises: TypeError or ValueError with the argument's name, what it is and what would be right.
    """
    if shards is None:
        value, value_dim = value_within(key, value, value_dim)
    given_scales = query_scale, key_scale, value_scale
    values, scales = float8.without_qarrays((query, key, value), given_scales)
    q, k, v = query_key_value(*values, *([DTYPE] if shards is None else []))
    form = float8.form_of((q, k, v), scales, out_dtype, quantize, fallback)
    out_dtype = q.dtype if form is None else form.out_dtype
    arrays, asked, amax = (q, k, v), form, None
    if with_amax:
        float8.check_amax(form, arrays)
    *batch, q_len, q_heads, _ = q.shape
    batch, kv_len = tuple(batch), k.shape[-3]
    sizes = {"T": q_len, "S": kv_len, "N": q_heads, "W": 4, "U": 2}
    shapes = {
        name: (*batch, *(sizes[d] for d in x.dims))
        for name, x in TERMS.items()
        if set(x.dims) <= set(sizes)
    }
    q_len, kv_len = (shards or 1) * q_len, (shards or 1) * kv_len
    scores = (*shapes["bias"][:-1], kv_len)
    if q.dtype == DTYPE:
        form, q, static_scale = float8.scale_of(scale, form, q)
    else:
        q, static_scale = scale_of(scale, q)

    align = choice("causal_align", causal_align, _ALIGNMENTS)
    rate = dropout_rate_of(dropout_rate, dropout_key)
    query_segments, key_value_segments = segments_of(
        query_segment_ids, key_value_segment_ids, shapes
    )
    positions = positions_of(query_positions, key_value_positions, align, shapes)
    check_sizes(block_mask, q_len, kv_len)
    reach = q_len + kv_len if positions is None else _POSITIONS
    window = window_sides(flag("is_causal", is_causal), local_window_size, reach)
    if positions is None or window == (None, None):  # there positions mean nothing
        positions = None, None
    score, captured = score_function(score_mod, softcap, q_heads, q.dtype)
    has_ids = score is not None and not score.used.isdisjoint(("batch", "head"))
    terms = order_terms(
        {
            "bias": bias_of(bias, scores, q.dtype),
            "mask": mask_of(mask, scores),
            "block_numbers": block_mask,  # for `blocks_of` to replace
            "block_bits": block_mask,
            "query_lengths": lengths_of(
                "query_lengths", "query_seq_lengths", query_seq_lengths, batch, q_len
            ),
            "key_value_lengths": lengths_of(
                "key_value_lengths", "key_value_seq_lengths", key_value_seq_lengths, batch, kv_len
            ),
            "query_segments": query_segments,
            "key_value_segments": key_value_segments,
            "query_positions": positions[0],
            "key_value_positions": positions[1],
            "sinks": sinks_of(sinks, batch, q_heads, q.dtype),
            "dropout_state": dropout_state_of(dropout_key, batch, q_heads) if rate > 0.0 else None,
            "score_ids": jnp.stack(ids_of(batch, q_heads, jnp.int32), axis=-1) if has_ids else None,
            "indices": indices_of(indices, q.shape[:-2]),
        }
    )
    problem = Problem(
        dtype=q.dtype.name,
        scale=static_scale,
        window=window,
        bottom_right=align == "bottom_right",
        softcap=softcap_of(softcap),
        dropout_rate=rate,
        deterministic=flag("deterministic", deterministic),
        precision=precision_of(precision, q.dtype),
        terms=tuple(terms),
        score=score,
        as_written=_simplify.is_as_written(),
    )
    whole_rows = shards is None and form is None  # scales are of positions as they are
    if "indices" in problem.terms:
        indices_alone(
            {
                "bias": bias is not None,
                "mask": mask is not None,
                "block_mask": block_mask is not None,
                "score_mod": score_mod is not None,
                "dropout_rate": rate > 0.0,
                "deterministic": problem.deterministic,
                "float8": form is not None,
            }
        )
    given = _simplify.Arguments(problem, q, k, v, block_mask, q_len, kv_len, whole=whole_rows)
    made, rewrites = _simplify.simplify(given)
    if form is not None and float8.falls_back(form, made.problem, (q, k, v)):
        q, k, v = float8.in_16_bits(form, (q, k, v))
        made = dataclasses.replace(made.changed(dtype=q.dtype.name), query=q, key=k, value=v)
        form = None
    if made.block_mask is not None:
        terms |= blocks_of(made.block_mask, batch, q_heads)
    named = terms | {capture(i): whole(x, len(batch)) for i, x in enumerate(captured)}
    optional = (named[name] for name in made.problem.optional)
    operands = (made.query, made.key, made.value, *optional)
    if asked is not None and with_amax:
        form, amax = float8.amax_of(form, asked.scales, arrays, operands[:3])
    is_within = "indices" in made.problem.terms and made.key is k and made.value is v
    within = value_dim if is_within else None
    return Prepared(made.problem, operands, q.shape[:-1], rewrites, form, out_dtype, amax, within)
