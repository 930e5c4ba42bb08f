"""Backend "xla": exact attention in linear memory, in JAX alone, on any platform.

The score matrix is cut into tiles and only the tiles that the window can reach are visited, one
`lax.scan` step each; a tile lives for one step. `forward` keeps the running maximum, sum and
weighted values of every query (online softmax), `backward` recomputes the weights from lse. Where
one tile has all scores there is neither a loop nor a sum over tiles, and the softmax is written as
XLA's GPU backend knows it, which makes one kernel of it. Both passes are ordinary differentiable
JAX, which is what higher derivatives of the primitives use.
Read next: `_tiles.py`, for what a tile's scores are; `_seen.py`, for what is visible; `_chosen.py`,
for calls whose queries read chosen keys, which have no tiles.

Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv:1805.02867);
Rabe and Staats (arXiv:2112.05682); Dao, FlashAttention-2 (arXiv:2307.08691).
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from jax_flash import _chosen, _platform
from jax_flash._problem import Problem
from jax_flash._products import product, product_of_pairs
from jax_flash._seen import not_finite
from jax_flash._tiles import Sweep, Tile, add, read, write
from jax_flash._varying import vary_over

_STATE_AXES = (-2, -2, -3)  # of T, in the maximum, the sum and the weighted values
_FLOAT16_KEYS = 1024  # beyond them weights of 1 / S leave float16's normal numbers by far


def forward(problem: Problem, *operands: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes attention.

    Arguments:
      problem: what to compute.
      operands: q `[*B, T, N, H]`, k `[*B, S, K, H]`, v `[*B, S, K, Hv]`, and problem.optional; any
        of *B may be 1 but in q.

    Returns: out `[*B, T, N, Hv]` in the dtype of q, and lse `[*B, N, T]` in problem.sum_dtype.
    """
    if "indices" in problem.terms:
        return _chosen.forward(problem, *operands)
    sweep = Sweep.of(problem, *operands)
    tile = sweep.only_tile
    out, lse = _forward_in_parts(sweep, operands) if tile is None else _forward_at_once(tile)
    return sweep.join_query_heads(out).astype(problem.dtype), sweep.join_rows(lse)


def _forward_at_once(tile: Tile) -> tuple[jax.Array, jax.Array]:
    sweep, problem = tile.sweep, tile.sweep.problem
    logits, seen = tile.logits(tile.scores(), tile.seen(), sweep.captures)
    weights, lse = _softmax(logits, sweep.sinks)
    weights = seen.mark_keys(tile.drop(weights), tile.v)
    # A weight is at most 1 / (1 - rate); times this float16 has it, and smaller ones better.
    larger, dtype = 1.0, problem.dtype
    if problem.dtype == "float16" and logits.shape[-1] > _FLOAT16_KEYS:
        larger, dtype = 2.0 ** math.floor(14 + math.log2(1 - problem.dropout_rate)), None
    out = product(
        problem, "...ktgs,...ksh->...ktgh", larger * weights, seen.clean_keys(tile.v), dtype
    )
    return seen.keep_queries(out / larger), lse


def _softmax(logits: jax.Array, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Computes the softmax of `[*B, K, t, G, s]`, of which -inf has no weight, and its lse.

    XLA makes one kernel of max, sub, exp, sum and div of one array, if nothing but numbers meets
    the maximum and the sum in between: they are bounded, not replaced, where a row sees nothing.
    """
    largest = jnp.max(logits, axis=-1)
    largest = largest if sinks is None else jnp.maximum(largest, sinks)
    shift = lax.stop_gradient(jnp.maximum(largest, jnp.finfo(logits.dtype).min))
    weights = jnp.exp(logits - shift[..., None])
    total = jnp.sum(weights, axis=-1)
    total = total if sinks is None else total + jnp.exp(sinks - shift)
    some = jnp.maximum(total, 0.5)  # the largest of a row counts 1
    return weights / some[..., None], jnp.where(total == 0.0, -jnp.inf, shift + jnp.log(some))


def _forward_in_parts(sweep: Sweep, operands) -> tuple[jax.Array, jax.Array]:
    problem = sweep.problem
    empty_rows = sweep.row_shape  # [*B, K, T, G]
    state = (
        jnp.full(empty_rows, -jnp.inf, problem.sum_dtype),
        jnp.zeros(empty_rows, problem.sum_dtype),
        jnp.zeros((*empty_rows, sweep.v.shape[-1]), problem.sum_dtype),
    )

    def step(state, start):
        tile = sweep.tile(start)
        largest, total, weighted = (
            read(x, tile.rows, axis) for x, axis in zip(state, _STATE_AXES, strict=True)
        )
        logits, seen = tile.logits(tile.scores(), tile.seen(), sweep.captures)
        new_largest = jnp.maximum(largest, lax.stop_gradient(jnp.max(logits, axis=-1)))
        # A row that has seen no key yet has a maximum of -inf; exp(-inf - 0) is the 0 it needs.
        shift = jnp.where(new_largest == -jnp.inf, 0.0, new_largest)
        rescale = jnp.exp(largest - shift)
        weights = jnp.exp(logits - shift[..., None])
        total = rescale * total + jnp.sum(weights, axis=-1)
        weights = seen.mark_keys(tile.drop(weights), tile.v)
        sums = product(problem, "...ktgs,...ksh->...ktgh", weights, seen.clean_keys(tile.v))
        weighted = rescale[..., None] * weighted + seen.keep_queries(sums)
        new = (new_largest, total, weighted)
        return tuple(
            write(x, y, tile.rows, axis) for x, y, axis in zip(state, new, _STATE_AXES, strict=True)
        )

    largest, total, weighted = sweep.carry(step, vary_over(state, operands))

    if sweep.sinks is not None:
        joined = jnp.maximum(largest, lax.stop_gradient(sweep.sinks))
        shift = jnp.where(joined == -jnp.inf, 0.0, joined)
        rescale = jnp.exp(largest - shift)
        total = rescale * total + jnp.exp(sweep.sinks - shift)
        weighted = rescale[..., None] * weighted
        largest = joined
    empty = largest == -jnp.inf
    total = jnp.where(empty, 1.0, total)
    out = weighted / total[..., None]
    return out, jnp.where(empty, -jnp.inf, largest + jnp.log(total))


def backward(
    problem: Problem,
    *operands: jax.Array,
    with_dlse: bool,
    with_dbias: bool,
    captures: tuple[str, ...] = (),
    of_forward: bool = False,
) -> tuple[jax.Array, ...]:
    """Computes the gradients of `forward`.

    Arguments:
      problem: what was computed.
      operands: q, k, v, out, lse, dout `[*B, T, N, Hv]`, with_dlse also dlse `[*B, N, T]`,
        and problem.optional.
      with_dlse: dlse is among the operands; otherwise it is zero.
      with_dbias: also compute the gradient of bias.
      captures: the arrays of problem.score to which gradients are computed as well.
      of_forward: lse is that of these operands, not of more keys. One tile then has the weights as
        the forward pass had them, and XLA computes them once for both.

    Returns:
      dq, dk, dv in the shapes and dtypes of q, k, v; with_dbias also dbias in those of bias; then
      those of `captures`.
      Where a dim is 1 because it is broadcast, the gradient is summed along it.
    """
    q, k, v, out, lse, dout, *rest = operands
    dlse = rest.pop(0) if with_dlse else None
    if "indices" in problem.terms:
        return _chosen.backward(problem, q, k, v, out, lse, dout, dlse, *rest)
    if not _platform.is_gpu():
        # The gradient of a sum is a constant, whose products, summed along a batch dim as those of
        # members that share values, XLA's CPU backend computes wrongly (jaxlib 0.11.2).
        dout = lax.optimization_barrier(dout)
    sweep = Sweep.of(problem, q, k, v, *rest)
    delta, dout_marks = (  # two sums along the same rows, which XLA makes in one go
        sweep.split_query_heads(x[..., None])[..., 0]
        for x in (_row_sum(out, dout, lse.dtype), not_finite(dout))
    )
    at_once = of_forward and sweep.only_tile is not None
    if at_once:  # its weights sum to rowsum(out * dout), and neither is read again
        delta = jnp.zeros_like(delta)
    delta = delta if dlse is None else delta - sweep.split_rows(dlse)
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)  # makes exp(logits - lse) of these rows 0
    lse, dout = sweep.split_rows(lse), sweep.split_query_heads(dout)
    bias = sweep.bias if with_dbias else None
    named = problem.name_terms(rest)
    moving = {name: named[name] for name in captures}
    one = sweep.only_tile is not None

    def rounded(leading: tuple[int, ...]) -> str | None:
        """The dtype of products of these leading dims, where they are a gradient as they are."""
        return problem.dtype if one and leading == sweep.q.shape[:-3] else None

    to_queries = rounded(sweep.q.shape[:-3])
    to_keys, to_values = (rounded(x.shape[:-2]) for x in (sweep.k, sweep.v))

    def of_tile(tile: Tile):
        """Computes a tile's part of dq, dk and dv, dlogits, and the part of the captured arrays."""
        do = read(dout, tile.rows, -3)
        row_lse, row_delta, do_marks = (read(x, tile.rows, -2) for x in (lse, delta, dout_marks))
        seen = tile.seen()

        def logits_of(scores, *moving_now):
            arrays = {**sweep.captures, **dict(zip(moving, moving_now, strict=True))}
            return tile.logits(scores, seen, arrays)

        logits, pull, seen = jax.vjp(logits_of, tile.scores(), *moving.values(), has_aux=True)
        if at_once:
            weights, _ = _softmax(logits, sweep.sinks)
        else:
            weights = jnp.exp(logits - row_lse[..., None])
        dropped = seen.mark_queries(tile.drop(weights), do_marks)
        of_keys, of_queries = "...ktgs,...ktgh->...ksh", "...ktgs,...ksh->...ktgh"
        clean_q, clean_do, clean_k = seen.clean(weights, tile.q, do, tile.k)
        dv = product(problem, of_keys, dropped, clean_do, to_values)
        dweights = tile.drop(product_of_pairs(problem, "...ktgh,...ksh->...ktgs", do, tile.v))
        # What this is differentiated by must not meet NaN of hidden values times 0.
        dweights = seen.keep(dweights, 0.0)
        if at_once:
            row_delta = row_delta + jnp.sum(weights * dweights, axis=-1)
        # A row that met NaN has it in its weights and delta.
        dlogits = seen.keep(weights * (dweights - row_delta[..., None]), 0.0)
        dlogits, *of_captures = pull(dlogits)
        # A logit of -inf has no gradient, whatever its slope.
        dlogits = seen.keep(dlogits, 0.0)
        dscores = problem.scale * dlogits
        dq = product(problem, of_queries, dscores, clean_k, to_queries)
        dk = product(problem, of_keys, dscores, clean_q, to_keys)
        sums = seen.keep_queries(dq), seen.keep_keys(dk), seen.keep_keys(dv)
        return *(x.astype(problem.sum_dtype) for x in sums), dlogits, of_captures

    state = tuple(
        None if x is None else jnp.zeros(x.shape, problem.sum_dtype)
        for x in (sweep.q, sweep.k, sweep.v, bias)
    )
    state = (*state, [jnp.zeros_like(x) for x in moving.values()])

    def step(state, start):
        dq, dk, dv, dbias, dcaptures = state
        tile = sweep.tile(start)
        q_part, k_part, v_part, dlogits, of_captures = of_tile(tile)
        dq = add(dq, q_part, tile.rows, -3)
        dk, dv = (add(x, y, tile.keys, -2) for x, y in ((dk, k_part), (dv, v_part)))
        dbias = None if dbias is None else tile.add_to_bias(dbias, dlogits)
        dcaptures = [x + y for x, y in zip(dcaptures, of_captures, strict=True)]
        return dq, dk, dv, dbias, dcaptures

    state = vary_over(state, operands)
    dq, dk, dv, dbias, dcaptures = step(state, sweep.starts[0]) if one else sweep.carry(step, state)
    gradients = [
        sweep.join_query_heads(dq),
        jnp.moveaxis(dk, -3, -2),
        jnp.moveaxis(dv, -3, -2),
    ]
    gradients = [x.astype(problem.dtype) for x in gradients]
    if dbias is not None:
        own = named["bias"]
        gradients.append(jnp.swapaxes(dbias, -3, -2).reshape(own.shape).astype(own.dtype))
    return (*gradients, *dcaptures)


def _row_sum(out: jax.Array, dout: jax.Array, dtype) -> jax.Array:
    """Computes rowsum(out * dout), `[*B, T, N]`."""
    return jnp.sum(out.astype(dtype) * dout.astype(dtype), axis=-1)


def row_delta(out, lse, dout, dlse, sinks) -> jax.Array:
    """Computes what every weight of a row has in its gradient: rowsum(out * dout) - dlse.

    Arguments:
      out, dout: `[*B, T, N, Hv]`.
      lse: `[*B, N, T]`, in the dtype of sums, as all that follow.
      dlse: `[*B, N, T]` or None, which is zero.
      sinks: `[*B, N]`, any of *B 1, or None.

    Returns: `[*B, N, T]`. Whatever dout holds in a row that sees no key, it is -dlse there
    where lse is the sink, and 0 where it is -inf.
    """
    delta = jnp.swapaxes(_row_sum(out, dout, lse.dtype), -1, -2)
    nothing = -jnp.inf if sinks is None else sinks[..., None]
    # A row may also see keys of no weight beside its sink; it counts in full unless out is 0.
    unseen = (lse == nothing) & jnp.swapaxes(jnp.all(out == 0, axis=-1), -1, -2)
    delta = jnp.where(unseen, 0.0, delta)
    if dlse is not None:
        delta = delta - dlse
    return jnp.where(lse == -jnp.inf, 0.0, delta)
