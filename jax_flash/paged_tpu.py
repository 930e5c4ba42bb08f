"""Attention over pages under the name and the arguments of JAX's kernel for TPUs, on any backend.

An engine that calls `jax.experimental.pallas.ops.tpu.ragged_paged_attention` takes this module's
function in its place. Read next: `ragged.py`, which has the call in this library's own terms.
"""

from __future__ import annotations

from typing import Annotated

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_flash._validate import ragged as _validate
from jax_flash.ragged import ragged_paged_attention as _attend

__all__ = ["ragged_paged_attention"]


def ragged_paged_attention(
    q: Annotated[ArrayLike, "tokens N H"],
    kv_pages: Annotated[ArrayLike, "P S 2*K H"],
    kv_lens: Annotated[ArrayLike, "B"],
    page_indices: Annotated[ArrayLike, "B M"],
    cu_q_lens: Annotated[ArrayLike, "B+1"],
    num_seqs: Annotated[ArrayLike, "1"],
    *,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
    backend: str | None = None,
) -> Annotated[jax.Array, "tokens N H"]:
    """Computes attention of a mixed batch to pages whose keys and values are interleaved by heads.

    What it means is what `jax_flash.ragged_paged_attention` does, with its promises about tokens of
    no request (out 0), requests that are not live, and what is wrong (NaN in one request). JAX's
    kernel leaves these open, as it does a length below a request's tokens.

    Pages are read where they lie, and once: a head's keys and values are one row of 2 H features,
    of which the query, padded by zeros, meets the keys alone. Products are twice those of
    `jax_flash.ragged_paged_attention` for that, where decoding waits for memory anyway; prompts
    are faster with keys and values in pages of their own. NaN or inf in a value that a token sees
    reaches all of its features.

    Arguments:
      q: `[tokens, N, H]`, float32, bfloat16 or float16.
      kv_pages: `[P, S, 2 * K, H]`, in q's dtype, float8_e4m3fn or int8: heads 0, 2, … are keys, 1,
        3, … their values.
      kv_lens: int32 `[B]`, positions of each request, its new ones included.
      page_indices: int32 `[B, M]`, the pages of each request.
      cu_q_lens: int32 `[B + 1]`, where the tokens of each request begin, and the last's end.
      num_seqs: int32 `[1]`, how many requests are live.
      sm_scale: of the dot products; 1 as in JAX's, not 1 / sqrt(H).
      sliding_window: positions that a token sees, its own counted; None: all.
      soft_cap: c in c * tanh(logits / c), above 0; None: no cap.
      mask_value: what JAX's kernel has for hidden logits. Here hidden keys have no weight at all,
        and it is not read; one above −1e6, which could give them weight, is refused.
      k_scale, v_scale: that keys and values are multiplied by, or None.
      num_kv_pages_per_block, num_queries_per_block, vmem_limit_bytes: the tiling of JAX's kernel on
        a TPU, not read.
      backend: as in `jax_flash.flash_attention`.

    Returns: out `[tokens, N, H]` in q's dtype.

    Raises:
      TypeError, ValueError: a wrong argument, with its shape or value and what would be right.
      NotImplementedError: a named backend that cannot run the problem, with the reason.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jax_flash import paged_tpu
      >>> out = paged_tpu.ragged_paged_attention(
      ...     jnp.ones((8, 8, 64)),
      ...     jnp.ones((16, 16, 2 * 2, 64)),
      ...     kv_lens=jnp.array([40, 6]),
      ...     page_indices=jnp.array([[3, 0, 7], [5, 0, 0]]),
      ...     cu_q_lens=jnp.array([0, 1, 7]),
      ...     num_seqs=jnp.array([2]),
      ...     sm_scale=64**-0.5,
      ... )
      >>> out.shape
      (8, 8, 64)
    """
    del num_kv_pages_per_block, num_queries_per_block, vmem_limit_bytes
    given = _validate.prepare_interleaved(
        q,
        kv_pages,
        kv_lens,
        page_indices,
        cu_q_lens,
        num_seqs,
        sm_scale=sm_scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        mask_value=mask_value,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    head_dim = given.q.shape[-1]
    out, *_ = _attend(
        jnp.pad(given.q, ((0, 0), (0, 0), (0, head_dim))),
        _in_pairs(given.kv_pages),
        None,
        *given.requests,
        key_scale=given.key_scale,
        value_dim=2 * head_dim,
        scale=given.scale,
        local_window_size=given.window,
        softcap=given.softcap,
        backend=backend,
    )
    out = out[..., head_dim:]
    if given.v_scale is None:
        return out
    return (out.astype(jnp.float32) * given.v_scale).astype(out.dtype)


def _in_pairs(kv_pages: jax.Array) -> jax.Array:
    """Reads `[P, S, 2 * K, H]` as `[P, S, K, 2 * H]`: a head's keys, behind them its values.

    Where types say how heads are split, they have to say it of the result too.
    """
    *pages, heads, head_dim = kv_pages.shape
    sharding = jax.typeof(kv_pages).sharding
    split = sharding if any(axes is not None for axes in sharding.spec) else None
    return jax.lax.reshape(kv_pages, (*pages, heads // 2, 2 * head_dim), out_sharding=split)
