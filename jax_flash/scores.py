"""Functions of scores for `flash_attention(..., score_mod=f)`, and their composition.

Each call returns an f(score, batch, head, query, key) -> score. Arrays that it is given may be
traced, mapped and differentiated; a number is compiled into the kernel.
"""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_flash._function import OfHeads
from jax_flash._terms import sum_dtype
from jax_flash._validate import array, flag, real

ScoreFunction = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]

__all__ = [
    "alibi",
    "alibi_slopes",
    "compose",
    "distance_decay",
    "relative_position_buckets",
    "relative_position_table",
    "softcap",
    "tanh",
]


def alibi(slopes: Annotated[ArrayLike, "N"]) -> ScoreFunction:
    """Makes score - slopes[head] * |query - key|, attention with linear biases.

    Arguments:
      slopes: `[N]`, float, of the query heads; `alibi_slopes` has the paper's.

    Raises: TypeError, ValueError for another shape or dtype.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from jax_flash import flash_attention, scores
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 32, 8, 16))
      >>> score_mod = scores.alibi(scores.alibi_slopes(8))
      >>> flash_attention(q, k, v, is_causal=True, score_mod=score_mod, backend="xla").shape
      (2, 32, 8, 16)

    Paper: Press, Smith, Lewis, Train Short, Test Long (arXiv:2108.12409).
    """
    slopes = _floats("slopes", slopes, "[N]")

    def function(score, batch, head, query, key):
        slope, distance = _like(score, slopes[head], jnp.abs(key - query))
        return score - slope * distance

    return OfHeads(function, len(slopes))


def alibi_slopes(num_heads: int) -> np.ndarray:
    """Computes the slopes of the ALiBi paper, float32 `[num_heads]`.

    They are 2^(-8 i / n) for i from 1 to n where n is a power of two; else those of the largest
    power of two below, then every other one of the next.

    Raises: ValueError if num_heads is less than 1.

    Examples:
      >>> from jax_flash import scores
      >>> scores.alibi_slopes(4).tolist()
      [0.25, 0.0625, 0.015625, 0.00390625]
    """
    if isinstance(num_heads, bool) or not isinstance(num_heads, numbers.Integral):
        raise TypeError(f"num_heads is {num_heads!r}; expected an int")
    num_heads = int(num_heads)
    if num_heads < 1:
        raise ValueError(f"num_heads is {num_heads}; expected 1 or more")
    whole = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * i / whole) for i in range(1, whole + 1)]
    slopes += [2.0 ** (-4 * i / whole) for i in range(1, 2 * (num_heads - whole), 2)]
    return np.array(slopes, np.float32)


def relative_position_table(table: Annotated[ArrayLike, "N D"]) -> ScoreFunction:
    """Makes score + table[head, R + clip(key - query, -R, R)].

    Arguments:
      table: `[N, 2 R + 1]`, float: what is added for keys from R before the query to R after it,
        farther ones as those at R.

    Raises: TypeError, ValueError for another shape or dtype.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from jax_flash import flash_attention, scores
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 32, 4, 16))
      >>> def loss(table):
      ...     score_mod = scores.relative_position_table(table)
      ...     return flash_attention(q, k, v, score_mod=score_mod, backend="xla").sum()
      >>> jax.grad(loss)(jnp.zeros((4, 2 * 16 + 1))).shape
      (4, 33)

    Papers: Shaw, Uszkoreit, Vaswani (arXiv:1803.02155), who clip distances; Raffel et al., T5
    (arXiv:1910.10683), who add scalars to the scores.
    """
    table = _floats("table", table, "[N, 2 R + 1]")
    if table.shape[1] % 2 == 0:
        raise ValueError(f"table has shape {table.shape}; expected [N, 2 R + 1], an odd last dim")
    reach = table.shape[1] // 2

    def function(score, batch, head, query, key):
        (added,) = _like(score, table[head, jnp.clip(key - query, -reach, reach) + reach])
        return score + added

    return OfHeads(function, len(table))


def relative_position_buckets(
    table: Annotated[ArrayLike, "N D"], *, bidirectional: bool = True, max_distance: int = 128
) -> ScoreFunction:
    """Makes score + table[head, bucket(key - query)], T5's relative position bias.

    Half of the buckets on a side are of one distance each, the rest grow with the logarithm of the
    distance up to max_distance, beyond which all share the last one.

    Arguments:
      table: `[N, buckets]`, float, as T5 has it transposed.
      bidirectional: the first half of the buckets is for keys up to the query, the other for those
        after it; else all are for the former and keys after the query have bucket 0.
      max_distance: above the number of buckets of one distance.

    Raises: TypeError, ValueError for another shape or dtype, or distances that do not fit.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from jax_flash import flash_attention, scores
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 32, 4, 16))
      >>> score_mod = scores.relative_position_buckets(jnp.zeros((4, 32)))
      >>> flash_attention(q, k, v, scale=1.0, score_mod=score_mod, backend="xla").shape
      (2, 32, 4, 16)

    Paper: Raffel et al., T5 (arXiv:1910.10683), in t5x's rounding.
    """
    table = _floats("table", table, "[N, buckets]")
    bidirectional = flag("bidirectional", bidirectional)
    count = table.shape[1] // 2 if bidirectional else table.shape[1]
    exact = count // 2
    if isinstance(max_distance, bool) or not isinstance(max_distance, numbers.Integral):
        raise TypeError(f"max_distance is {max_distance!r}; expected an int")
    if exact < 1 or max_distance <= exact:
        raise ValueError(
            f"table has shape {table.shape} and max_distance is {max_distance}; expected [N, "
            f"buckets] with {'4' if bidirectional else '2'} buckets or more, and a larger distance "
            f"than the {exact} buckets of one distance"
        )
    behind = -np.arange(-max_distance, max_distance + 1)  # of a key, from the query
    after = np.where(behind < 0, count, 0) if bidirectional else 0
    behind = np.abs(behind) if bidirectional else np.maximum(behind, 0)
    ratio = np.maximum(behind, 1).astype(np.float32) / exact + np.finfo(np.float32).eps
    far = exact + (np.log(ratio) / np.log(max_distance / exact) * (count - exact)).astype(int)
    buckets = after + np.where(behind < exact, behind, np.minimum(far, count - 1))
    return relative_position_table(table[:, buckets])


def softcap(cap: ArrayLike) -> ScoreFunction:
    """Makes cap * tanh(score / cap), as the argument `softcap` does for a number.

    Arguments:
      cap: above 0; a number, or an array of shape () that may be traced and differentiated.

    Raises: TypeError, ValueError for another shape or dtype, or a number that is not above 0.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from jax_flash import flash_attention, scores
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 32, 4, 16))
      >>> flash_attention(q, k, v, score_mod=scores.softcap(50.0), backend="xla").shape
      (2, 32, 4, 16)

    Paper: Gemma Team, Gemma 2 (arXiv:2408.00118).
    """
    cap = _scalar("cap", cap)

    def function(score, batch, head, query, key):
        (own,) = _like(score, cap)
        return own * jnp.tanh(score / own)

    return function


def tanh(clip: ArrayLike) -> ScoreFunction:
    """Makes clip * tanh(score): logits in (-clip, clip), as pointer networks have them.

    Arguments and errors are those of `softcap`, whose slope at 0 is 1 where this one's is `clip`.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from jax_flash import flash_attention, scores
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 32, 4, 16))
      >>> flash_attention(q, k, v, score_mod=scores.tanh(10.0), backend="xla").shape
      (2, 32, 4, 16)

    Papers: Bello et al. (arXiv:1611.09940); Kool, van Hoof, Welling (arXiv:1803.08475).
    """
    clip = _scalar("clip", clip)

    def function(score, batch, head, query, key):
        (own,) = _like(score, clip)
        return own * jnp.tanh(score)

    return function


def distance_decay(
    rates: Annotated[ArrayLike, "N"], scales: Annotated[ArrayLike, "N"]
) -> ScoreFunction:
    """Makes score - rates[head] * log(1 + scales[head] * |query - key|).

    A weight falls with a power of the distance: KERPLE's logarithmic kernel.

    Arguments:
      rates, scales: `[N]`, float, of the query heads, above 0; the paper learns both.

    Raises: TypeError, ValueError for another shape or dtype.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from jax_flash import flash_attention, scores
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 32, 4, 16))
      >>> score_mod = scores.distance_decay(jnp.full(4, 2.0), jnp.full(4, 0.5))
      >>> flash_attention(q, k, v, is_causal=True, score_mod=score_mod, backend="xla").shape
      (2, 32, 4, 16)

    Paper: Chi et al., KERPLE (arXiv:2205.09921).
    """
    rates, scales = _floats("rates", rates, "[N]"), _floats("scales", scales, "[N]")
    if rates.shape != scales.shape:
        raise ValueError(f"rates has shape {rates.shape}, scales {scales.shape}; expected both [N]")

    def function(score, batch, head, query, key):
        distance = jnp.abs(key - query)
        rate, scale, distance = _like(score, rates[head], scales[head], distance)
        return score - rate * jnp.log1p(scale * distance)

    return OfHeads(function, len(rates))


def compose(*functions: ScoreFunction) -> ScoreFunction:
    """Makes one function of several, each of which gets the score that the one before gave.

    Raises: TypeError for what is no function, ValueError for arrays of different numbers of heads.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from jax_flash import flash_attention, scores
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 32, 4, 16))
      >>> capped = scores.compose(scores.alibi(scores.alibi_slopes(4)), scores.softcap(30.0))
      >>> flash_attention(q, k, v, is_causal=True, score_mod=capped, backend="xla").shape
      (2, 32, 4, 16)
    """

    def function(score, batch, head, query, key):
        return functools.reduce(lambda x, f: f(x, batch, head, query, key), functions, score)

    for f in functions:
        if not callable(f):
            raise TypeError(f"{type(f).__name__} is composed; expected functions of scores")
    heads = {f.heads for f in functions if isinstance(f, OfHeads)}
    if len(heads) > 1:
        raise ValueError(
            f"functions of {' and '.join(map(str, sorted(heads)))} heads are composed; expected "
            "arrays of one N"
        )
    return OfHeads(function, *heads) if heads else function


def _like(score: ArrayLike, *given: Any) -> list[Any]:
    """Brings arrays of one number to the dtype that scores are computed in."""
    dtype = sum_dtype(jnp.result_type(score))
    return [x.astype(dtype) if isinstance(x, jax.Array) else x for x in given]


def _floats(name: str, x: ArrayLike, letters: str) -> jax.Array:
    x = array(name, x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name} has dtype {x.dtype} (shape {x.shape}); expected {letters}, float")
    if x.ndim != letters.count(",") + 1 or 0 in x.shape:
        raise ValueError(f"{name} has shape {x.shape}; expected {letters}")
    return x


def _scalar(name: str, x: ArrayLike) -> jax.Array | float:
    """Checks a number, which is compiled into a kernel, or an array of one, which is not."""
    if isinstance(x, jax.Array):
        if x.shape or not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name} has shape {x.shape} and dtype {x.dtype}; expected one float")
        return x
    value = real(name, x)
    if not value > 0:
        raise ValueError(f"{name} is {value}; expected a finite number above 0")
    return value
