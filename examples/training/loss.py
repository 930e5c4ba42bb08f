"""Owns the loss of scores over a vocabulary, of which only some rows exist at a time.

The scores of N positions over V words are N V numbers: 1.6 GB in bfloat16 for 16384 positions of
GPT-2, more than all else that its loss needs. Some positions at a time make their scores, their
loss, and at once the gradients that the scores are needed for; then the scores are gone. Scores are
computed once, where a loss that is recomputed in the backward computes them twice.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

POSITIONS = 8192  # whose scores exist at a time: 0.8 GB in bfloat16 at GPT-2's vocabulary


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def cross_entropy(
    features: jax.Array,
    table: jax.Array,
    targets: jax.Array,
    weights: jax.Array | None = None,
    shards: int = 1,
    positions: int = POSITIONS,
) -> jax.Array:
    """Mean cross entropy, in nats, of the scores `features @ table.T`.

    Args:
      features: [B, T, width], float.
      table: [vocabulary, width], float; rounded to the dtype of `features` first.
      targets: int [B, T].
      weights: float [B, T], how much a position counts, without a gradient; None: all alike.
      shards: how many devices the T positions of a row are split over.
      positions: whose scores exist at a time.

    Returns:
      A float32 number: the sum over positions by the sum of their weights. Its gradient is of
      reverse mode, once.
    """

    def at(total, features, targets, weights):
        return total + (weights * _lacking(features, table, targets)[0]).sum(), None

    total, _ = _in_parts(at, jnp.zeros(()), features, targets, weights, shards, positions)
    return total / _count(targets, weights)


def _forward(features, table, targets, weights, shards, positions):
    def at(sums, features, targets, weights):
        total, d_table = sums
        lacking, logits, lse = _lacking(features, table, targets)
        hit = targets[..., None] == jax.lax.broadcasted_iota(
            jnp.int32, logits.shape, logits.ndim - 1
        )
        slopes = jnp.exp(logits.astype(jnp.float32) - lse[..., None]) - hit
        slopes = (slopes * weights[..., None]).astype(features.dtype)
        axes = tuple(range(targets.ndim))
        d_table += jax.lax.dot_general(
            slopes, features, ((axes, axes), ((), ())), preferred_element_type=jnp.float32
        )
        return (total + (weights * lacking).sum(), d_table), slopes @ table.astype(features.dtype)

    zeros = jnp.zeros(()), jnp.zeros(table.shape, jnp.float32)
    (total, d_table), d_features = _in_parts(
        at, zeros, features, targets, weights, shards, positions
    )
    count = _count(targets, weights)
    kinds = jnp.zeros((), table.dtype)  # a residual is an array
    return total / count, (d_features, d_table, count, kinds)


def _backward(shards, positions, kept, slope):
    d_features, d_table, count, kinds = kept
    slope = slope / count
    features = (d_features * slope).astype(d_features.dtype)
    return features, (d_table * slope).astype(kinds.dtype), None, None


cross_entropy.defvjp(_forward, _backward)


def _count(targets: jax.Array, weights: jax.Array | None) -> Any:
    return math.prod(targets.shape) if weights is None else weights.sum(dtype=jnp.float32)


def _lacking(
    features: jax.Array, table: jax.Array, targets: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Loss of each position, float32; the scores, in the dtype of `features`; their lse."""
    logits = features @ table.astype(features.dtype).T
    lse = jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1)
    right = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return lse - right, logits, lse


def _in_parts(at: Any, sums: Any, features, targets, weights, shards: int, positions: int) -> Any:
    """Sums over some positions after another, and what belongs to each, [B, T, width]; 0 without.

    All devices that rows and their positions are split over have some of those at a time. They are
    cut from where they lie: a scan over an axis of parts has them first, and XLA then keeps that
    order in the whole model, where kernels of attention need another.
    """
    rows, length = targets.shape
    if weights is None:
        weights = jnp.ones(targets.shape, jnp.float32)
    each = length // shards
    parts = tuple(  # [B, shards, T / shards, ...]
        x.reshape(rows, shards, each, *x.shape[2:])
        for x in (features, targets, weights.astype(jnp.float32))
    )
    together = min(each, max(1, positions // (rows * shards)))

    def step(carried: Any, start: Any, count: int) -> Any:
        sums, made = carried
        cut = (jax.lax.dynamic_slice_in_dim(x, start, count, axis=2) for x in parts)
        sums, found = at(sums, *cut)
        if found is not None:
            made = jax.lax.dynamic_update_slice_in_dim(made, found, start, axis=2)
        return sums, made

    carried = sums, jnp.zeros_like(parts[0])
    whole, rest = divmod(each, together)
    if whole == 1:
        carried = step(carried, 0, together)
    else:
        starts = together * jnp.arange(whole)
        carried, _ = jax.lax.scan(
            lambda x, start: (step(x, start, together), None), carried, starts
        )
    if rest:
        carried = step(carried, whole * together, rest)
    sums, made = carried
    return sums, made.reshape(features.shape)
