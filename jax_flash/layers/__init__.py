"""Flax layers on flash_attention: `jax_flash.layers.linen` and `jax_flash.layers.nnx`.

Each has the same two names:

- `attention_fn` goes into Flax's own layer: `MultiHeadAttention(..., attention_fn=attention_fn)`.
- `FlashAttention` is a self-attention layer with grouped-query heads, rotary embedding, a window,
  packed sequences and a key-value cache.

Nothing is imported here: each module loads its half of Flax. `_shared.py` holds what both use.
"""
