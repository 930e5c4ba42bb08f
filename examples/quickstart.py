"""flash_attention beside the plain formula: `python examples/quickstart.py`."""

import jax
import jax.numpy as jnp

from jax_flash import flash_attention, reference

keys = jax.random.split(jax.random.key(0), 3)
query = jax.random.normal(keys[0], (2, 1000, 8, 64))  # [batch, length, heads, head_dim]
key, value = (jax.random.normal(k, (2, 1000, 2, 64)) for k in keys[1:])  # 4 query heads share one

out = jax.jit(flash_attention, static_argnames="is_causal")(query, key, value, is_causal=True)
exact = reference.attention(query, key, value, is_causal=True)
print(f"output {out.shape}, largest error {jnp.abs(out - exact).max():.1e}")
