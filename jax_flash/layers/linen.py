"""FlashAttention in Flax Linen: an `attention_fn` for Flax's own layers, and a layer of ours.

The attention is `jax_flash.flash_attention`; `_shared.py` puts Flax's arguments in its terms.
"""

import functools
from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.dtypes import promote_dtype
from flax.linen.linear import default_kernel_init
from flax.typing import Dtype, Initializer
from jax.typing import ArrayLike

from jax_flash import BlockMask, flash_attention
from jax_flash.layers import _decoding, _shared


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
    **options: Unpack[_shared.Options],
) -> jax.Array:
    """linen.dot_product_attention by flash_attention: same arguments, memory linear in length.

    flash_attention's own keywords are taken too, to be set with functools.partial.

    Where it differs from Flax's function:

    - Dropout draws every weight on its own, also with `broadcast_dropout=True`, where Flax repeats
      one [T, S] pattern over batch and heads. The chance to be kept is the same 1 - dropout_rate.
    - A query with nothing to attend to gives zeros; Flax gives the mean of all values.
    - Softmax and accumulation are always float32.
    - The key heads K may be any divisor of N.
    - Weights that are sown follow every option of the call, and cost the memory of [T, S] weights;
      the output is the same as without. A query with nothing to attend to has weights of zero.
    - An einsum or dot_general of the user's is called by Flax's function, which answers that call
      whole and takes none of flash_attention's own keywords but is_causal.

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
      precision: of float32 products, as in flash_attention.
      module: sows the attention weights.
      force_fp32_for_softmax: the weights that are sown are float32.
      einsum_dot_general: for Flax's function.
      qk_attn_weights_einsum: for Flax's function.
      attn_weights_value_einsum: for Flax's function.
      is_causal: query i sees keys 0..i, with no mask in memory; set it with functools.partial.
        Without effect on one query with a mask over several keys, which is a decoding step, unless
        query_positions tell where it stands.
      **options: scale, causal_align, local_window_size, query_seq_lengths, key_value_seq_lengths,
        query_segment_ids, key_value_segment_ids, query_positions, key_value_positions, softcap,
        score_mod, sinks, block_mask and backend, as in flash_attention.

    Returns:
      [*B, T, N, Hv].

    Raises:
      ValueError, TypeError: where flash_attention refuses the arguments; for a window in a decoding
        step of Flax's layers; for an einsum or dot_general together with `options`.

    Examples:
      >>> import functools
      >>> import jax, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> from jax_flash.layers.linen import attention_fn
      >>> windowed = functools.partial(attention_fn, local_window_size=(127, 0), softcap=50.0)
      >>> layer = nn.MultiHeadAttention(num_heads=4, attention_fn=windowed)
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((2, 10, 64)))[0].shape
      (2, 10, 64)
    """
    theirs = (einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum)
    if any(x is not None for x in theirs):
        if options:
            raise ValueError(
                f"attention_fn got {', '.join(options)} and an einsum or dot_general of the "
                "caller's; expected one or the other: Flax's function answers calls with these, "
                "and does not know flash_attention's keywords"
            )
        mask = _shared.boolean(mask)
        if is_causal and not _shared.is_decoding(mask, query, key):
            mask = _with_causal(mask, query, key)
        return nn.dot_product_attention(
            query,
            key,
            value,
            bias=bias,
            mask=mask,
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
    sow = (
        None
        if module is None
        else functools.partial(module.sow, "intermediates", "attention_weights")
    )
    return _shared.flax_attention(
        query,
        key,
        value,
        options,
        sow,
        bias=bias,
        mask=mask,
        is_causal=is_causal,
        dropout_rng=dropout_rng,
        dropout_rate=dropout_rate,
        deterministic=deterministic,
        precision=precision,
        sown_dtype=jnp.float32 if force_fp32_for_softmax else None,
    )


def _with_causal(mask: jax.Array | None, query: jax.Array, key: jax.Array) -> jax.Array:
    """`mask` and query i seeing keys 0..i, as one mask for Flax's function."""
    causal = jnp.tri(query.shape[-3], key.shape[-3], dtype=jnp.bool_)
    if mask is None:
        return causal
    rank = max(mask.ndim, 2)  # the same for both, for jax_numpy_rank_promotion
    return jnp.expand_dims(mask, tuple(range(rank - mask.ndim))) & jnp.expand_dims(
        causal, tuple(range(rank - 2))
    )


class FlashAttention(nn.Module):
    """Attention with grouped-query heads, rotary embedding, a window, packed sequences, a cache.

    Names of parameters and their shapes are those of Flax's multi-head layer (`query`, `key`,
    `value`, `out`, `query_ln`, `key_ln`), so that its checkpoints load.

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
        of `init` has the batch and the length that the cache is made for. Up to 64 positions are
        one call of `decode_attention`, which copies none of the cache, unless there is a bias, mask
        or dropout, or an attention_fn other than flash_attention.
      pages: how many pages the cache has, and positions in each: then rows take them as the
        `page_table` of each call says, in any order, and have no length of their own; None for a
        cache of rows. A row ends, and another begins in its place, by its entry of `cache_index`
        set to 0.
      use_bias: adds a bias in the four projections, as Flax's layers do.
      normalize_qk: norms each head of query and key, before the rotary embedding. True: LayerNorm
        without bias, as in Flax (ViT-22B); or a class such as nn.RMSNorm (Qwen 3, Gemma 3) or a
        functools.partial of one, called with dtype, param_dtype and name.
      dtype: dtype of the computation; None takes that of input and parameters.
      param_dtype: dtype of the parameters.
      kernel_init: initializer of the kernels [features, heads, head_dim] of query, key and value,
        and of the output's [heads, head_dim, features] where out_kernel_init is None.
      out_kernel_init: initializer of the output's kernel; needed where initializers carry
        partitioning, since its axes are others.
      bias_init: initializer of the biases [heads, head_dim], and of the output's [features] where
        out_bias_init is None.
      out_bias_init: initializer of the output's bias.
      attention_fn: flash_attention, or a function with those of its arguments that this layer uses,
        functools.partial(flash_attention, backend="xla") for instance.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from jax_flash.layers.linen import FlashAttention
      >>> layer = FlashAttention(num_heads=4, num_kv_heads=2, is_causal=True)
      >>> x = jnp.ones((2, 10, 64))
      >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
      (2, 10, 64)
      >>> cross, memory = FlashAttention(num_heads=4, normalize_qk=True), jnp.ones((2, 7, 48))
      >>> lengths = jnp.array([7, 3])
      >>> variables = cross.init(jax.random.key(0), x, memory)
      >>> cross.apply(variables, x, memory, memory_seq_lengths=lengths).shape
      (2, 10, 64)
      >>> paged = FlashAttention(num_heads=4, is_causal=True, decode=True, pages=(8, 16))
      >>> variables = paged.init(jax.random.key(0), x)  # 8 pages of 16 positions, for 2 rows
      >>> table = jnp.array([[3, 0, 5], [1, -1, -1]])  # up to 48 positions, and up to 16
      >>> out, state = paged.apply(variables, x, page_table=table, mutable=["cache"])
      >>> state["cache"]["cache_index"].tolist()
      [10, 10]
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
    pages: tuple[int, int] | None = None
    use_bias: bool = True
    normalize_qk: bool | Callable[..., nn.Module] = False
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = default_kernel_init
    out_kernel_init: Initializer | None = None
    bias_init: Initializer = nn.initializers.zeros
    out_bias_init: Initializer | None = None
    attention_fn: Callable[..., jax.Array] = flash_attention

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        memory: jax.Array | None = None,
        *,
        seq_lengths: ArrayLike | None = None,
        segment_ids: ArrayLike | None = None,
        positions: ArrayLike | None = None,
        memory_seq_lengths: ArrayLike | None = None,
        memory_segment_ids: ArrayLike | None = None,
        memory_positions: ArrayLike | None = None,
        bias: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        score_mod: Callable[..., Any] | None = None,
        block_mask: BlockMask | None = None,
        deterministic: bool | None = None,
        page_table: ArrayLike | None = None,
    ) -> jax.Array:
        """Attention of `x` to itself, to `memory`, or to itself and all that is in the cache.

        Args:
          x: [*B, T, features].
          memory: [*B, S, any features], where keys and values come from, Flax's inputs_k; None
            for x, S = T.
          seq_lengths: int [*B], valid positions of x; later ones are padding, and see and are seen
            by none. In decoding a row's cache grows by so many.
          segment_ids: int [*B, T]; a position sees only those with its own id.
          positions: int [*B, T], in any order, by which causality, window and rotary embedding
            count; None for 0 to T - 1, or in decoding for what follows the cache.
          memory_seq_lengths: int [*B], of the memory.
          memory_segment_ids: int [*B, S], of the memory, together with segment_ids.
          memory_positions: int [*B, S], of the memory; None for 0 to S - 1.
          bias: float, added to the scores, broadcastable to [*B, num_heads, T, S].
          mask: bool or numbers (nonzero means True), broadcastable to [*B, num_heads, T, S]; S is
            the cache's length in decoding, with pages that of the pages in a row of the table.
          score_mod: `score_mod(score, batch, head, query, key) -> score`, as in flash_attention, in
            place of softcap. It counts queries and keys by their index in x and memory.
          block_mask: of `jax_flash.block_mask` or `block_mask_of`, for T queries and S keys.
          deterministic: no dropout.
          page_table: int32 [*B, M], in decoding with a cache of pages: position p of a row is in
            slot p % S of page page_table[p // S]. A row needs the pages of what its new
            positions see, not its padding, and other columns may hold anything.

        Returns:
          [*B, T, features]; NaN in rows where decoding ran past the end of the cache or to a
          position without a page.

        Raises:
          TypeError, ValueError: for settings and shapes that do not fit together, and for
            decode=True without is_causal or with a memory, segment ids, positions, a score_mod or
            a block_mask; for a page_table without a cache of pages, or none with one.
        """
        features = x.shape[-1]
        num_kv_heads, head_dim = _shared.head_sizes(
            features, self.num_heads, self.num_kv_heads, self.head_dim, self.rotary_base
        )
        norm = _shared.norm_class(self.normalize_qk, _LayerNorm)
        terms = _shared.rows(
            x,
            memory,
            seq_lengths=seq_lengths,
            segment_ids=segment_ids,
            positions=positions,
            memory_seq_lengths=memory_seq_lengths,
            memory_segment_ids=memory_segment_ids,
            memory_positions=memory_positions,
        )

        project = functools.partial(
            nn.DenseGeneral,
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
        )
        project_in = functools.partial(
            project, kernel_init=self.kernel_init, bias_init=self.bias_init
        )
        source = x if memory is None else memory
        query = project_in((self.num_heads, head_dim), name="query")(x)
        key = project_in((num_kv_heads, head_dim), name="key")(source)
        value = project_in((num_kv_heads, head_dim), name="value")(source)
        if norm is not None:
            norm = functools.partial(norm, dtype=self.dtype, param_dtype=self.param_dtype)
            query, key = norm(name="query_ln")(query), norm(name="key_ln")(key)
        sinks = None
        if self.use_sinks:
            sinks = self.param("sinks", nn.initializers.zeros, (self.num_heads,), self.param_dtype)
        dropout: dict[str, Any] = {}
        if self.dropout_rate != 0.0 and not nn.merge_param(
            "deterministic", self.deterministic, deterministic
        ):
            dropout.update(dropout_rate=self.dropout_rate, dropout_key=self.make_rng("dropout"))

        stored, cache = (), None
        if page_table is not None and not self.decode:
            raise ValueError("page_table is given without decode=True")
        if self.decode:
            _decoding.check_decode(
                self.is_causal,
                memory=memory,
                segment_ids=segment_ids,
                positions=positions,
                score_mod=score_mod,
                block_mask=block_mask,
            )
            is_initialized = self.has_variable("cache", "cached_key")
            shape = _decoding.cache_shape(x.shape[:-2], x.shape[-2], self.pages)
            shape = (*shape, num_kv_heads, head_dim)
            stored = (
                self.variable("cache", "cached_key", jnp.zeros, shape, key.dtype),
                self.variable("cache", "cached_value", jnp.zeros, shape, value.dtype),
                self.variable("cache", "cache_index", jnp.zeros, x.shape[:-2], jnp.int32),
            )
            if is_initialized:
                page_table = _decoding.check_page_table(self.pages, page_table, x.shape[:-2])
                cache = _decoding.Cache(
                    *(variable.value for variable in stored), page_table=page_table
                )
        out, cache = _decoding.attend(
            self.attention_fn,
            query,
            key,
            value,
            cache,
            rotary_base=self.rotary_base,
            is_causal=self.is_causal,
            local_window_size=self.local_window_size,
            softcap=self.softcap,
            sinks=sinks,
            bias=bias,
            mask=mask,
            score_mod=score_mod,
            block_mask=block_mask,
            **terms,
            **dropout,
        )
        if cache is not None:
            arrays = cache.key, cache.value, cache.index
            for variable, array in zip(stored, arrays, strict=True):
                variable.value = array
        out = project(
            features,
            axis=(-2, -1),
            kernel_init=self.out_kernel_init or self.kernel_init,
            bias_init=self.out_bias_init or self.bias_init,
            name="out",
        )(out)
        self._refuse_left_over()
        return out

    def _refuse_left_over(self) -> None:
        """Raises ValueError for parameters that are given and not used, which Linen would drop."""
        leaves = {"kernel", "bias"} if self.use_bias else {"kernel"}
        used: dict[str, set[str] | None] = dict.fromkeys(("query", "key", "value", "out"), leaves)
        if self.normalize_qk:
            used |= dict.fromkeys(("query_ln", "key_ln"))  # a class of the user's has its own
        if self.use_sinks:
            used["sinks"] = None
        # After nn.share_scope the parent's parameters are among these.
        shares = getattr(self.parent, "scope", None) is self.scope
        left = []
        for name, given in self.variables.get("params", {}).items():
            if name not in used:
                left += [] if shares else [name]
            elif (known := used[name]) is not None:
                left += [f"{name}/{leaf}" for leaf in given if leaf not in known]
        if left:
            raise ValueError(
                f"parameters {', '.join(sorted(left))} are given to a FlashAttention with "
                f"use_bias={self.use_bias}, normalize_qk={self.normalize_qk} and "
                f"use_sinks={self.use_sinks}, which has none of these names; expected settings "
                "that use them, or parameters without them"
            )


_LayerNorm = functools.partial(nn.LayerNorm, use_bias=False)
