"""Flax layers on flash_attention: `jax_flash.layers.linen` and `jax_flash.layers.nnx`.

Each has the same two names:

- `attention_fn` goes into Flax's own layer: `MultiHeadAttention(..., attention_fn=attention_fn)`;
  `functools.partial(attention_fn, softcap=50.0)` sets what flash_attention takes beyond Flax.
- `FlashAttention` is a layer for self- and cross-attention with grouped-query heads, query and key
  norms, rotary embedding, a window, lengths, packed sequences and a key-value cache.

In both, a mask may be bool or numbers as Flax makes them, where nonzero means True. It takes memory
and time of its own; causality, a window, lengths and segment ids do not.

Nothing is imported here: each module loads its half of Flax. `_shared.py` and `_decoding.py` hold
what both use.
"""
