"""One rule for attention over keys in parts: the merge of two results over disjoint keys.

Whatever computes parts apart, such as splits of one long sequence of keys or the devices of a ring,
gets the whole from it, forward and backward. blockwise.py does not use it: there the weighted
values of a row stay unnormalised from tile to tile, which spares every tile a division and a pass
over them.

Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv:1805.02867).
"""

import jax
import jax.numpy as jnp
from jax import lax

Result = tuple[jax.Array, jax.Array]


def merge(one: Result, other: Result) -> Result:
    """Computes attention over all keys from attention over two parts of them.

    It is associative and commutative but for rounding, and a part that is empty (lse −inf) leaves
    the other as it is, to the bit; what its out holds is not read. A sink belongs to one of the
    parts, a row that sees nothing else has it for its lse. Gradients are those of attention over
    the whole if both parts are differentiated through their lse too.

    Arguments:
      one, other: out `[*B, T, N, Hv]` and lse `[*B, T, N]`, as from `flash_attention(...,
        return_lse=True)` over the keys of one part. Lse is float32 or float64.

    Returns: out and lse over both, in the dtype of lse: the last of several merges rounds out.
    """
    (out, lse), (other_out, other_lse) = one, other
    largest = lax.stop_gradient(jnp.maximum(lse, other_lse))
    empty = largest == -jnp.inf
    # exp(-inf - 0) is the 0 that an empty part weighs, and -inf - -inf would be NaN.
    shift = jnp.where(empty, 0.0, largest)
    weight, other_weight = jnp.exp(lse - shift), jnp.exp(other_lse - shift)
    total = jnp.where(empty, 1.0, weight + other_weight)
    merged = _weigh(out, weight / total) + _weigh(other_out, other_weight / total)
    return merged, jnp.where(empty, -jnp.inf, shift + jnp.log(total))


def _weigh(out: jax.Array, weight: jax.Array) -> jax.Array:
    """Multiplies out `[*B, T, N, Hv]` by `[*B, T, N]`; of weight 0 it may hold anything."""
    weight = weight[..., None]
    return weight * jnp.where(weight == 0.0, 0.0, out)
