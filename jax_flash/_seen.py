"""Owns what backend "xla" does about what a query does not see: NaN and infinity there stay there.

A hidden pair has the logit -inf and the weight 0, but 0 times NaN is NaN: in a product along keys
or along queries, what some of them do not see has to be finite. `Seen` says of a tile what hides
the rest, and makes operands so, as cheaply as that allows: each array that it changes is one more
that a GPU writes and reads.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_flash import _platform
from jax_flash._terms import sum_dtype

# Elements that a GPU would read for marks of keys, if each query made them anew: H200, 1 x 2 x 512,
# 20/1 heads of 232 11.4 to 9.9 us by a kernel of theirs, which makes the keys finite too.
_APART = 1 << 21
_ALIGNED = 256  # bytes: parts of so many and a multiple are operands of XLA's dots as they are


class Seen(NamedTuple):
    """Which pairs of a tile are seen, by what hides the others; None hides nothing.

    Where whole queries and whole keys are hidden, a select keeps them out of a product's operands,
    and others out of their results. Where single pairs are, an operand has 0 for what is not
    finite, and the pairs that see it get NaN for a weight.
    """

    queries: jax.Array | None = None  # bool [*B, K, t, G, 1], any of them 1, as of those below
    keys: jax.Array | None = None  # bool [*B, K, 1, 1, s]
    pairs: jax.Array | None = None  # bool [*B, K, t, G, s]

    @property
    def pair(self) -> jax.Array | None:
        """Which pairs are seen: bool, broadcasting to `[*B, K, t, G, s]`."""
        return both(*self)

    def keep(self, scores: jax.Array, other: float) -> jax.Array:
        """Puts a number where a pair is hidden."""
        return _where(self.pair, scores, other)

    def clean_queries(self, x: jax.Array) -> jax.Array:
        """Makes `[*B, K, t, G, H]` fit for a product along queries."""
        return self.keep_queries(x) if self.pairs is None else finite(x)

    def clean_keys(self, x: jax.Array) -> jax.Array:
        """Makes `[*B, K, s, H]` fit for a product along keys."""
        return self.keep_keys(x) if self.pairs is None else finite(x)

    def clean(
        self, weights: jax.Array, q: jax.Array, do: jax.Array, k: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Makes what a backward pass multiplies along queries and keys fit for that.

        A GPU does so by one kernel in place of three: parts of an array are operands of dots as
        they are, where they are aligned.
        """
        made = self.clean_queries(q), self.clean_queries(do), self.clean_keys(k)
        aligned = not any(x.size * x.dtype.itemsize % _ALIGNED for x in made)
        if not (aligned and self._are_apart(weights, q)):
            return made
        together = jnp.concatenate([x.reshape(-1) for x in made])
        parts = jnp.split(jax.lax.optimization_barrier(together), [q.size, q.size + do.size])
        clean_q, clean_do, clean_k = (
            x.reshape(one.shape) for x, one in zip(parts, made, strict=True)
        )
        return clean_q, clean_do, clean_k

    def mark_queries(self, weights: jax.Array, marks: jax.Array) -> jax.Array:
        """Adds to weights `not_finite` `[*B, K, t, G]` of what `clean_queries` made of x."""
        return self._mark(weights, marks[..., None])

    def mark_keys(self, weights: jax.Array, x: jax.Array) -> jax.Array:
        """Adds to weights `not_finite` of the x of which `clean_keys` made another."""
        marks = not_finite(x)
        if self._are_apart(weights, x):
            marks = jax.lax.optimization_barrier(marks)
        return self._mark(weights, marks[..., None, None, :])

    def _are_apart(self, weights: jax.Array, x: jax.Array) -> bool:
        """Tells whether kernels of their own make operands, not the products that read them."""
        sizes = (*weights.shape, x.shape[-1])  # of an export's, some may not be known
        many = not all(isinstance(size, int) for size in sizes) or math.prod(sizes) > _APART
        return self.pairs is not None and _platform.is_gpu() and many

    def _mark(self, weights: jax.Array, marks: jax.Array) -> jax.Array:
        return weights if self.pairs is None else self.keep(weights + marks, 0.0)

    def keep_queries(self, x: jax.Array) -> jax.Array:
        """Makes `[*B, K, t, G, H]` 0 where the whole query is hidden."""
        return _where(self.queries, x, 0)

    def keep_keys(self, x: jax.Array) -> jax.Array:
        """Makes `[*B, K, s, H]` 0 where the whole key is hidden."""
        keys = self.keys
        return x if keys is None else _where(jnp.swapaxes(keys[..., 0, :, :], -1, -2), x, 0)


def both(*seen: jax.Array | None) -> jax.Array | None:
    """Tells where all of some bools hold, None for one that always does."""
    given = [x for x in seen if x is not None]
    return functools.reduce(jnp.logical_and, given) if given else None


def _where(seen: jax.Array | None, x: jax.Array, other: float) -> jax.Array:
    return x if seen is None else jnp.where(seen, x, jnp.asarray(other, x.dtype))


def finite(x: jax.Array) -> jax.Array:
    """Returns x with 0 for NaN and infinity."""
    # Not isfinite, which XLA's Triton products do not take in.
    return jnp.where(jnp.abs(x) < jnp.inf, x, jnp.zeros((), x.dtype))


def not_finite(x: jax.Array) -> jax.Array:
    """Returns `[..., L]` of `[..., L, H]`: NaN where it has NaN or infinity, else 0.

    It is float32 or wider, and has no derivative.
    """
    x = jax.lax.stop_gradient(x)
    return jnp.sum(x.astype(sum_dtype(x.dtype)) * 0, axis=-1)


def split_bad(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Splits `[..., L, H]` into `finite(x)` and `not_finite(x)`.

    A product then cannot spread NaN through a weight of 0, and adding the second to the weights
    brings it back where it is seen.
    """
    return finite(x), not_finite(x)
