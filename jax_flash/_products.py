"""Owns the products of backend "xla": dots, or sums of products where a GPU has few to make.

A dot is a kernel of its own, and its operands are copied where heads lie between positions. A sum
of products is an expression that XLA fuses with its neighbours, and reads operands where they lie:
an attention of a handful of positions is one to three kernels forward, where dots are four to
seven.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from jax_flash import _platform
from jax_flash._problem import Problem
from jax_flash._seen import finite

# Multiplications: operands read for each are 16 MB, 4 us of an H100's L2 at most; where a result is
# a sum of a few, a thread has it.
_FEW, _MORE, _TERMS = 1 << 21, 1 << 23, 16
# Times that each element of the largest array is met, in up to 16 times as many: a dot copies it
# first. H200, float32: 32 x 2 queries and 256 keys, 8 heads of 64, 38 to 9 us, with gradients 97 to
# 62; 8 x 4 and 1024, 8/2 heads, met 16 times, 25 to 28, 63 to 84.
_REREAD = 4


def product(
    problem: Problem, subscripts: str, x: jax.Array, y: jax.Array, dtype: str | None = None
) -> jax.Array:
    """Multiplies in the problem's dtype and precision, or a better one, and sums in its sum_dtype.

    Arguments:
      problem: of which these are operands.
      subscripts: of einsum, with leading dims `...`; a dim that out lacks is one of both.
      x, y: arrays; leading dims may be 1 in either.
      dtype: of the result; None: the sum_dtype.
    """
    if _platform.is_gpu() and _is_summed(subscripts, x, y):
        return _sum_of_products(problem, subscripts, x, y).astype(dtype or problem.sum_dtype)
    return dot(problem, subscripts, x, y, dtype)


def dot(
    problem: Problem, subscripts: str, x: jax.Array, y: jax.Array, dtype: str | None = None
) -> jax.Array:
    """Multiplies in the problem's dtype and precision, and sums in its sum_dtype.

    The result is in that, or rounded to `dtype`.

    Leading dims of x `[*B, K, T, ...]` that are 1 in y `[*B, K, ...]`, those of members that share
    it, join T: to XLA's CPU batch dims [1, 2] of one operand and [0, 1] of the other are no product
    of bfloat16.
    """
    leading = range(x.ndim - 4)
    shared = [axis for axis in leading if y.shape[axis] == 1 != x.shape[axis]]
    before_queries = [x.ndim - 3 - len(shared) + i for i in range(len(shared))]
    if shared:
        x, y = jnp.moveaxis(x, shared, before_queries), jnp.squeeze(y, shared)
        queries = x.shape[before_queries[0] : -2]
        x = x.reshape(*x.shape[: before_queries[0]], math.prod(queries), *x.shape[-2:])
    exact = problem.dtype == "float64"
    made = jnp.einsum(
        subscripts,
        x.astype(problem.dtype),
        y.astype(problem.dtype),
        precision=lax.Precision("highest" if exact else problem.precision),
        preferred_element_type=dtype or problem.sum_dtype,
    )
    if not shared:
        return made
    made = made.reshape(*made.shape[:-3], *queries, *made.shape[-2:])
    return jnp.moveaxis(made, before_queries, shared)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def product_of_pairs(problem: Problem, subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Multiplies as `product` along the head dim, where NaN stays with its pair.

    Its derivatives are products along queries and keys, and read finite numbers: a hidden pair has
    no part in them, and to one that is seen NaN comes back through its score.
    """
    return product(problem, subscripts, x, y)


@product_of_pairs.defjvp
def _(problem, subscripts, primals, tangents):
    (x, y), (dx, dy) = primals, tangents
    moved = product(problem, subscripts, dx, finite(y)) + product(
        problem, subscripts, finite(x), dy
    )
    return product_of_pairs(problem, subscripts, x, y), moved


def _letters(subscripts: str) -> tuple[str, str, str]:
    """Splits subscripts into the letters of x, of y and of the result, without the leading dims."""
    operands, out = subscripts.replace("...", "").split("->")
    x, y = operands.split(",")
    return x, y, out


def _is_summed(subscripts: str, x: jax.Array, y: jax.Array) -> bool:
    """Tells whether a GPU sums the products: few, more of few positions for each result, or those
    of elements that are met a few times.
    """
    count = _multiplications(subscripts, x, y)
    if count == math.inf:
        return False
    terms = _terms(subscripts, x)
    most = _MORE if subscripts.endswith("h") and terms <= _TERMS else _FEW
    return count <= max(most, _REREAD * max(x.size, y.size, count // max(terms, 1)))


def _terms(subscripts: str, x: jax.Array) -> int:
    """Counts the products that a result is the sum of."""
    of_x, _, out = _letters(subscripts)
    sizes = zip(of_x, x.shape[-len(of_x) :], strict=True)
    return math.prod(size for letter, size in sizes if letter not in out)


def _multiplications(subscripts: str, x: jax.Array, y: jax.Array) -> float:
    """Counts a product's multiplications; infinitely many where a size is not known."""
    of_x, of_y, _ = _letters(subscripts)
    leading = jnp.broadcast_shapes(x.shape[: -len(of_x)], y.shape[: -len(of_y)])
    inner = dict(zip(of_x + of_y, x.shape[-len(of_x) :] + y.shape[-len(of_y) :], strict=False))
    sizes = (*leading, *inner.values())
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else math.inf


def _sum_of_products(problem: Problem, subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
    of_x, of_y, out = _letters(subscripts)
    terms = "".join(letter for letter in of_x if letter not in out)
    columns = out.endswith("h")  # last, as in memory
    if columns and _terms(subscripts, x) <= _TERMS and _multiplications(subscripts, x, y) > _FEW:
        # Weights that XLA computes for each column again took 39 us for 14 (H200, 188 x 8 x 8).
        x = lax.optimization_barrier(x.astype(problem.dtype))
    order = out.removesuffix("h") + terms + "h" if columns else out + terms

    def spread(x: jax.Array, letters: str) -> jax.Array:
        leading = x.ndim - len(letters)
        own = [leading + letters.index(letter) for letter in order if letter in letters]
        ones = [leading + i for i, letter in enumerate(order) if letter not in letters]
        x = jnp.transpose(x, [*range(leading), *own])
        x = jnp.expand_dims(x, ones)
        return x.astype(problem.dtype).astype(problem.sum_dtype)  # of 16 bits products are exact

    products = spread(x, of_x) * spread(y, of_y)
    if columns:  # else XLA may copy y to where its positions are last
        layout = Layout(tuple(range(products.ndim)))
        products = with_layout_constraint(products, layout)
    return jnp.sum(products, axis=tuple(order.index(x) - len(order) for x in terms))
