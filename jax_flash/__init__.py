"""FlashAttention for JAX: exact attention whose memory grows linearly with sequence length."""

from jax_flash import reference
from jax_flash._explain import Explanation, explain
from jax_flash._export import EXPORT_CHECKS
from jax_flash._version import __version__
from jax_flash.attention import dot_product_attention, flash_attention

__all__ = [
    "EXPORT_CHECKS",
    "Explanation",
    "__version__",
    "dot_product_attention",
    "explain",
    "flash_attention",
    "reference",
]
