"""FlashAttention for JAX: exact attention whose memory grows linearly with sequence length."""

from jax_flash import context_parallel, interop, masks, paged_tpu, reference, scores
from jax_flash._advise import Advice, Finding, advise
from jax_flash._debug import debug_values
from jax_flash._explain import Explanation, explain
from jax_flash._export import EXPORT_CHECKS
from jax_flash._key_weights import key_weights
from jax_flash._latent_rows import pack_latent, unpack_latent
from jax_flash._merge import merge
from jax_flash._version import __version__
from jax_flash.attention import dot_product_attention, flash_attention
from jax_flash.block_masks import BlockMask, block_mask, block_mask_of, stack_block_masks
from jax_flash.decode import Decoded, decode_attention, fill_cache, rotate
from jax_flash.ragged import Attended, ragged_paged_attention

__all__ = [
    "EXPORT_CHECKS",
    "Advice",
    "Attended",
    "BlockMask",
    "Decoded",
    "Explanation",
    "Finding",
    "__version__",
    "advise",
    "block_mask",
    "block_mask_of",
    "context_parallel",
    "debug_values",
    "decode_attention",
    "dot_product_attention",
    "explain",
    "fill_cache",
    "flash_attention",
    "interop",
    "key_weights",
    "masks",
    "merge",
    "pack_latent",
    "paged_tpu",
    "ragged_paged_attention",
    "reference",
    "rotate",
    "scores",
    "stack_block_masks",
    "unpack_latent",
]
