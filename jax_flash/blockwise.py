"""Backend "xla": exact attention in linear memory, in JAX alone, on any platform.

The score matrix is cut into tiles and only the tiles that the window can reach are visited, one
`lax.scan` step each; a tile lives for one step. `forward` keeps the running maximum, sum and
weighted values of every query (online softmax), `backward` recomputes the weights from lse. Both
are ordinary differentiable JAX, which is what higher derivatives of the primitives use.
Read next: `_tiles.py`, for what a tile's scores are and what is visible.

Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv:1805.02867);
Rabe and Staats (arXiv:2112.05682); Dao, FlashAttention-2 (arXiv:2307.08691).
"""

import jax
import jax.numpy as jnp
from jax import lax

from jax_flash._problem import Problem
from jax_flash._tiles import Sweep, add, product, read, write
from jax_flash._varying import vary_over

_STATE_AXES = (-1, -1, -2)  # of T, in the maximum, the sum and the weighted values


def forward(problem: Problem, *operands: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes attention.

    Arguments:
      problem: what to compute.
      operands: q `[*B, T, N, H]`, k `[*B, S, K, H]`, v `[*B, S, K, Hv]`, and problem.optional; any
        of *B may be 1 but in q.

    Returns: out `[*B, T, N, Hv]` in the dtype of q, and lse `[*B, N, T]` in problem.sum_dtype.
    """
    sweep = Sweep.of(problem, *operands)
    empty_rows = sweep.row_shape  # [*B, K, G, T]
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
        scores, visible = tile.scores()
        logits, visible = tile.logits(scores, visible, sweep.captures)
        new_largest = jnp.maximum(largest, lax.stop_gradient(jnp.max(logits, axis=-1)))
        # A row that has seen no key yet has a maximum of -inf; exp(-inf - 0) is the 0 it needs.
        shift = jnp.where(new_largest == -jnp.inf, 0.0, new_largest)
        rescale = jnp.exp(largest - shift)
        weights = jnp.exp(logits - shift[..., None])
        total = rescale * total + jnp.sum(weights, axis=-1)
        v, v_bad = sweep.guard(tile.v)
        weights = jnp.where(visible, tile.drop(weights) + v_bad[..., None, None, :], 0.0)
        weighted = rescale[..., None] * weighted + product(
            sweep.problem, "...kgts,...ksh->...kgth", weights, v
        )
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
    lse = jnp.where(empty, -jnp.inf, largest + jnp.log(total))
    return sweep.join_query_heads(out).astype(problem.dtype), lse.reshape(sweep.lse_shape)


def backward(
    problem: Problem,
    *operands: jax.Array,
    with_dlse: bool,
    with_dbias: bool,
    captures: tuple[str, ...] = (),
) -> tuple[jax.Array, ...]:
    """Computes the gradients of `forward`.

    Arguments:
      problem: what was computed.
      operands: q, k, v, out, lse, dout `[*B, T, N, Hv]`, with_dlse also dlse `[*B, N, T]`,
        and problem.optional.
      with_dlse: dlse is among the operands; otherwise it is zero.
      with_dbias: also compute the gradient of bias.
      captures: the arrays of problem.score to which gradients are computed as well.

    Returns:
      dq, dk, dv in the shapes and dtypes of q, k, v; with_dbias also dbias in those of bias; then
      those of `captures`.
      Where a dim is 1 because it is broadcast, the gradient is summed along it.
    """
    q, k, v, out, lse, dout, *rest = operands
    dlse = rest.pop(0) if with_dlse else None
    sweep = Sweep.of(problem, q, k, v, *rest)
    delta = row_delta(out, lse, dout, dlse, problem.name_terms(rest).get("sinks"))
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)  # makes exp(logits - lse) of these rows 0
    lse, delta = (x.reshape(sweep.row_shape) for x in (lse, delta))
    dout = sweep.split_query_heads(dout)
    bias = sweep.bias if with_dbias else None
    state = tuple(
        None if x is None else jnp.zeros(x.shape, problem.sum_dtype)
        for x in (sweep.q, sweep.k, sweep.v, bias)
    )
    moving = {name: problem.name_terms(rest)[name] for name in captures}
    state = (*state, [jnp.zeros_like(x) for x in moving.values()])

    def step(state, start):
        dq, dk, dv, dbias, dcaptures = state
        tile = sweep.tile(start)
        (q, _), (k, _), (v, v_bad) = (sweep.guard(x) for x in (tile.q, tile.k, tile.v))
        do, do_bad = sweep.guard(read(dout, tile.rows, -2))
        row_lse, row_delta = (read(x, tile.rows, -1) for x in (lse, delta))

        scores, visible = tile.scores()

        def logits_of(scores, *moving_now):
            arrays = {**sweep.captures, **dict(zip(moving, moving_now, strict=True))}
            return tile.logits(scores, visible, arrays)

        logits, pull, visible = jax.vjp(logits_of, scores, *moving.values(), has_aux=True)
        weights = jnp.exp(logits - row_lse[..., None])
        dropped = jnp.where(visible, tile.drop(weights) + do_bad[..., None], 0.0)
        dv = add(dv, product(sweep.problem, "...kgts,...kgth->...ksh", dropped, do), tile.keys, -2)
        dweights = product(sweep.problem, "...kgth,...ksh->...kgts", do, v)
        dweights = tile.drop(dweights + do_bad[..., None] + v_bad[..., None, None, :])
        # What this is differentiated by must not meet NaN of hidden values times 0.
        dweights = jnp.where(visible, dweights, 0.0)
        # A row that met NaN has it in lse and delta.
        dlogits = jnp.where(visible, weights * (dweights - row_delta[..., None]), 0.0)
        dlogits, *of_captures = pull(dlogits)
        # A logit of -inf has no gradient, whatever its slope.
        dlogits = jnp.where(visible, dlogits, 0.0)
        dcaptures = [x + y for x, y in zip(dcaptures, of_captures, strict=True)]
        if dbias is not None:
            dbias = tile.add_to_bias(dbias, dlogits)
        dlogits = problem.scale * dlogits
        dq = add(dq, product(sweep.problem, "...kgts,...ksh->...kgth", dlogits, k), tile.rows, -2)
        dk = add(dk, product(sweep.problem, "...kgts,...kgth->...ksh", dlogits, q), tile.keys, -2)
        return dq, dk, dv, dbias, dcaptures

    dq, dk, dv, dbias, dcaptures = sweep.carry(step, vary_over(state, operands))
    gradients = [
        sweep.join_query_heads(dq),
        jnp.moveaxis(dk, -3, -2),
        jnp.moveaxis(dv, -3, -2),
    ]
    gradients = [x.astype(problem.dtype) for x in gradients]
    if dbias is not None:
        own = problem.name_terms(rest)["bias"]
        gradients.append(dbias.reshape(own.shape).astype(own.dtype))
    return (*gradients, *dcaptures)


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
    delta = jnp.sum(out.astype(lse.dtype) * dout.astype(lse.dtype), axis=-1)
    delta = jnp.swapaxes(delta, -1, -2)
    nothing = -jnp.inf if sinks is None else sinks[..., None]
    # A row may also see keys of no weight beside its sink; it counts in full unless out is 0.
    unseen = (lse == nothing) & jnp.swapaxes(jnp.all(out == 0, axis=-1), -1, -2)
    delta = jnp.where(unseen, 0.0, delta)
    if dlse is not None:
        delta = delta - dlse
    return jnp.where(lse == -jnp.inf, 0.0, delta)
