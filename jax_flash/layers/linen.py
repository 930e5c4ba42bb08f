"""FlashAttention in Flax Linen: an `attention_fn` for Flax's own layers, and a layer of ours.

The attention is `jax_flash.flash_attention`; `_shared.py` puts Flax's arguments in its terms.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.dtypes import promote_dtype
from flax.linen.linear import default_kernel_init
from flax.typing import Dtype, Initializer

from jax_flash import flash_attention
from jax_flash.layers import _shared


def attention_fn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Dtype | None = None,
    precision: Any = None,
    module: nn.Module | None = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., jax.Array] | None = None,
    qk_attn_weights_einsum: Callable[..., jax.Array] | None = None,
    attn_weights_value_einsum: Callable[..., jax.Array] | None = None,
    *,
    is_causal: bool = False,
    backend: str | None = None,
) -> jax.Array:
    """linen.dot_product_attention by flash_attention: same arguments, memory linear in length.

    Where it differs from Flax's function:
    - Dropout draws every weight on its own, also with `broadcast_dropout=True`, where Flax repeats
      one [T, S] pattern over batch and heads. The chance to be kept is the same 1 - dropout_rate.
    - A query with nothing to attend to gives zeros; Flax gives the mean of all values.
    - Softmax and accumulation are always float32.
    - The key heads K may be any divisor of N.
    - What needs the [T, S] weights themselves is answered by Flax's function: `module`, given when
      weights are to be sown, and an einsum or dot_general of the user's.

    Args:
      query: [*B, T, N, H].
      key: [*B, S, K, H].
      value: [*B, S, K, Hv].
      bias: float, broadcastable to [*B, N, T, S].
      mask: bool or numbers (nonzero means True), broadcastable to [*B, N, T, S].
      broadcast_dropout: for Flax's function.
      dropout_rng: key for dropout.
      dropout_rate: share of the weights that dropout removes.
      deterministic: no dropout.
      dtype: dtype of the computation; None takes the inputs' common dtype.
      precision: for Flax's function.
      module: sows the attention weights.
      force_fp32_for_softmax: for Flax's function.
      einsum_dot_general: for Flax's function.
      qk_attn_weights_einsum: for Flax's function.
      attn_weights_value_einsum: for Flax's function.
      is_causal: query i sees keys 0..i, with no mask in memory; set it with functools.partial.
        Without effect on one query with a mask over several keys, which is a decoding step.
      backend: as in flash_attention; set it with functools.partial.

    Returns:
      [*B, T, N, Hv].

    Raises:
      ValueError, TypeError: where flash_attention refuses the arguments.

    >>> from flax import linen as nn
    >>> from jax_flash.layers.linen import attention_fn
    >>> layer = nn.MultiHeadAttention(num_heads=4, attention_fn=attention_fn)
    """
    mask, is_causal = _shared.flax_mask(mask, is_causal, query, key)
    theirs = (module, einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum)
    if any(x is not None for x in theirs):
        return nn.dot_product_attention(
            query,
            key,
            value,
            bias=bias,
            mask=_shared.with_causal(mask, query, key) if is_causal else mask,
            broadcast_dropout=broadcast_dropout,
            dropout_rng=dropout_rng,
            dropout_rate=dropout_rate,
            deterministic=deterministic,
            dtype=dtype,
            precision=precision,
            module=module,
            force_fp32_for_softmax=force_fp32_for_softmax,
            einsum_dot_general=einsum_dot_general,
            qk_attn_weights_einsum=qk_attn_weights_einsum,
            attn_weights_value_einsum=attn_weights_value_einsum,
        )
    query, key, value = promote_dtype(query, key, value, dtype=dtype)
    dropout_rate = 0.0 if deterministic else dropout_rate
    return flash_attention(
        query,
        key,
        value,
        bias=bias,
        mask=mask,
        is_causal=is_causal,
        dropout_rate=dropout_rate,
        dropout_key=dropout_rng if dropout_rate else None,
        backend=backend,
    )


class FlashAttention(nn.Module):
    """Self-attention with grouped-query heads, rotary embedding, a window, packed sequences, cache.

    Attributes:
      num_heads: query heads.
      num_kv_heads: key and value heads, a divisor of num_heads; None means num_heads.
      head_dim: size of one head; None means features // num_heads.
      is_causal: a position sees itself and what came before.
      local_window_size: (left, right) positions visible around each one, None for no bound; an int
        means both.
      rotary_base: base of the rotary embedding, 10_000.0 for instance; None for no embedding.
      softcap: bounds the scores to (-softcap, softcap) by tanh.
      use_sinks: learns one score per head that takes part in the softmax and has no value.
      dropout_rate: share of the attention weights that dropout removes; needs an rng "dropout".
      deterministic: no dropout; may be given to the call instead.
      decode: the input continues the sequences in the collection "cache", by any length; the input
        of `init` has the batch and the length that the cache is made for.
      use_bias: adds a bias in the four projections.
      dtype: dtype of the computation; None takes that of input and parameters.
      param_dtype: dtype of the parameters.
      kernel_init: initializer of the four projections.
      attention_fn: flash_attention, or a function with those of its arguments that this layer uses,
        functools.partial(flash_attention, backend="xla") for instance.

    >>> import jax, jax.numpy as jnp
    >>> from jax_flash.layers.linen import FlashAttention
    >>> layer = FlashAttention(num_heads=4, num_kv_heads=2, is_causal=True)
    >>> x = jnp.ones((2, 10, 64))
    >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
    (2, 10, 64)
    """

    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    is_causal: bool = False
    local_window_size: int | tuple[int | None, int | None] | None = None
    rotary_base: float | None = None
    softcap: float | None = None
    use_sinks: bool = False
    dropout_rate: float = 0.0
    deterministic: bool | None = None
    decode: bool = False
    use_bias: bool = False
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = default_kernel_init
    attention_fn: Callable[..., jax.Array] = flash_attention

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        bias: jax.Array | None = None,
        mask: jax.Array | None = None,
        deterministic: bool | None = None,
    ) -> jax.Array:
        """Attention among the positions of `x`, or of `x` to itself and all that is in the cache.

        Args:
          x: [*B, T, features].
          segment_ids: int [*B, T]; a position sees only those with its own id.
          bias: float, added to the scores, broadcastable to [*B, num_heads, T, S].
          mask: bool, broadcastable to [*B, num_heads, T, S]; S is the cache's length in decoding.
          deterministic: no dropout.

        Returns:
          [*B, T, features]; NaN where decoding ran past the end of the cache.

        Raises:
          ValueError: for head counts and sizes that do not fit together, and for decode=True with
            segment_ids or without is_causal.
        """
        features = x.shape[-1]
        num_kv_heads, head_dim = _shared.head_sizes(
            features, self.num_heads, self.num_kv_heads, self.head_dim, self.rotary_base
        )

        project = functools.partial(
            nn.DenseGeneral,
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=self.kernel_init,
        )
        query = project((self.num_heads, head_dim), name="query")(x)
        key = project((num_kv_heads, head_dim), name="key")(x)
        value = project((num_kv_heads, head_dim), name="value")(x)
        sinks = None
        if self.use_sinks:
            sinks = self.param("sinks", nn.initializers.zeros, (self.num_heads,), self.param_dtype)
        dropout: dict[str, Any] = {}
        if self.dropout_rate != 0.0 and not nn.merge_param(
            "deterministic", self.deterministic, deterministic
        ):
            dropout.update(dropout_rate=self.dropout_rate, dropout_key=self.make_rng("dropout"))

        stored, cache = (), None
        if self.decode:
            _shared.check_decode(self.is_causal, segment_ids)
            is_initialized = self.has_variable("cache", "cached_key")
            stored = (
                self.variable("cache", "cached_key", jnp.zeros_like, key),
                self.variable("cache", "cached_value", jnp.zeros_like, value),
                self.variable("cache", "cache_index", jnp.zeros, (), jnp.int32),
            )
            if is_initialized:
                cache = _shared.Cache(*(variable.value for variable in stored))
        out, cache = _shared.self_attention(
            self.attention_fn,
            query,
            key,
            value,
            cache,
            rotary_base=self.rotary_base,
            segment_ids=segment_ids,
            is_causal=self.is_causal,
            local_window_size=self.local_window_size,
            softcap=self.softcap,
            sinks=sinks,
            bias=bias,
            mask=mask,
            **dropout,
        )
        if cache is not None:
            for variable, array in zip(stored, cache, strict=True):
                variable.value = array
        return project(features, axis=(-2, -1), name="out")(out)
