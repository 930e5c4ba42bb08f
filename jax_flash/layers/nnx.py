"""FlashAttention in Flax NNX: an `attention_fn` for nnx.MultiHeadAttention, and a layer of ours.

The attention is `jax_flash.flash_attention`; `_shared.py` puts Flax's arguments in its terms.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from flax.nnx.nn.linear import default_kernel_init
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
    module: nnx.Module | None = None,
    promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
    is_causal: bool = False,
    input_positions: jax.Array | None = None,
    **options: Unpack[_shared.Options],
) -> jax.Array:
    """nnx.dot_product_attention by flash_attention: same arguments, memory linear in length.

    flash_attention's own keywords are taken too, to be set with functools.partial.

    Where it differs from Flax's function:

    - Dropout draws every weight on its own, also with `broadcast_dropout=True`, where Flax repeats
      one [T, S] pattern over batch and heads. The chance to be kept is the same 1 - dropout_rate.
    - A query with nothing to attend to gives zeros; Flax gives the mean of all values.
    - Softmax and accumulation are always float32.
    - Weights that are sown follow every option of the call, and cost the memory of [T, S] weights;
      the output is the same as without. A query with nothing to attend to has weights of zero.

    Args:
      query: [*B, T, N, H].
      key: [*B, S, K, H], K a divisor of N.
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
      promote_dtype: brings query, key and value to one dtype.
      is_causal: query i sees keys 0..i. nnx.MultiHeadAttention passes its own, so ask for it there:
        `layer(x, is_causal=True)`. Without effect on one query with a mask over several keys, which
        is a decoding step, unless query_positions tell where it stands.
      input_positions: refused, since only a rotary embedding has a use for them.
      **options: scale, causal_align, local_window_size, query_seq_lengths, key_value_seq_lengths,
        query_segment_ids, key_value_segment_ids, query_positions, key_value_positions, softcap,
        score_mod, sinks, block_mask and backend, as in flash_attention.

    Returns:
      [*B, T, N, Hv].

    Raises:
      ValueError, TypeError: where flash_attention refuses the arguments; for `input_positions`, and
        for a window in a decoding step of Flax's layers.

    Examples:
      >>> import functools
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax_flash.layers.nnx import attention_fn
      >>> windowed = functools.partial(attention_fn, local_window_size=(127, 0), softcap=50.0)
      >>> rngs = nnx.Rngs(0)
      >>> layer = nnx.MultiHeadAttention(4, 64, attention_fn=windowed, decode=False, rngs=rngs)
      >>> layer(jnp.ones((2, 10, 64))).shape
      (2, 10, 64)
    """
    if input_positions is not None:
        raise ValueError(
            "attention_fn applies no rotary embedding, so input_positions would have no effect; "
            "use jax_flash.layers.nnx.FlashAttention(..., rotary_base=10_000.0)"
        )
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    sow = (
        None
        if module is None
        else functools.partial(module.sow, nnx.Intermediate, "attention_weights")
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
    )


class FlashAttention(nnx.Module):
    """Attention with grouped-query heads, rotary embedding, a window, packed sequences, a cache.

    Names of parameters and their shapes are those of Flax's multi-head layer (`query`, `key`,
    `value`, `out`, `query_ln`, `key_ln`), so that its checkpoints load.

    Args:
      num_heads: query heads.
      in_features: size of the last axis of input and output.
      in_kv_features: size of the last axis of the memory; None means in_features.
      num_kv_heads: key and value heads, a divisor of num_heads; None means num_heads.
      head_dim: size of one head; None means in_features // num_heads.
      is_causal: a position sees itself and what came before.
      local_window_size: (left, right) positions visible around each one, None for no bound; an int
        means both.
      rotary_base: base of the rotary embedding, 10_000.0 for instance; None for no embedding.
      softcap: bounds the scores to (-softcap, softcap) by tanh.
      use_sinks: learns one score per head that takes part in the softmax and has no value.
      dropout_rate: share of the attention weights that dropout removes.
      deterministic: no dropout; set by `eval()`, `train()` and nnx.view of any module above.
      use_bias: adds a bias in the four projections, as Flax's layers do.
      normalize_qk: norms each head of query and key, before the rotary embedding. True: LayerNorm
        without bias, as in Flax (ViT-22B); or a class such as nnx.RMSNorm (Qwen 3, Gemma 3) or a
        functools.partial of one, called with head_dim, dtype, param_dtype and rngs.
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
      rngs: `params`, and `dropout` where dropout_rate is positive.

    Raises:
      ValueError: for head counts and sizes that do not fit together.

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jax_flash.layers.nnx import FlashAttention
      >>> layer = FlashAttention(4, 64, num_kv_heads=2, is_causal=True, rngs=nnx.Rngs(0))
      >>> x = jnp.ones((2, 10, 64))
      >>> layer(x).shape
      (2, 10, 64)
      >>> cross = FlashAttention(
      ...     4, 64, in_kv_features=48, normalize_qk=nnx.RMSNorm, rngs=nnx.Rngs(0)
      ... )
      >>> cross(x, jnp.ones((2, 7, 48)), memory_seq_lengths=jnp.array([7, 3])).shape
      (2, 10, 64)
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        in_kv_features: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        is_causal: bool = False,
        local_window_size: int | tuple[int | None, int | None] | None = None,
        rotary_base: float | None = None,
        softcap: float | None = None,
        use_sinks: bool = False,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        use_bias: bool = True,
        normalize_qk: bool | Callable[..., nnx.Module] = False,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = default_kernel_init,
        out_kernel_init: Initializer | None = None,
        bias_init: Initializer = nnx.initializers.zeros,
        out_bias_init: Initializer | None = None,
        attention_fn: Callable[..., jax.Array] = flash_attention,
        rngs: nnx.Rngs,
    ):
        self.num_heads = num_heads
        self.num_kv_heads, self.head_dim = _shared.head_sizes(
            in_features, num_heads, num_kv_heads, head_dim, rotary_base
        )
        norm = _shared.norm_class(normalize_qk, _LayerNorm)
        self.in_features = in_features
        self.in_kv_features = in_features if in_kv_features is None else in_kv_features
        self.is_causal = is_causal
        self.local_window_size = local_window_size
        self.rotary_base = rotary_base
        self.softcap = softcap
        self.dropout_rate = dropout_rate
        self.deterministic = deterministic
        self.attention_fn = attention_fn
        self.cache_dtype = param_dtype if dtype is None else dtype

        project = functools.partial(
            nnx.LinearGeneral,
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        project_in = functools.partial(project, kernel_init=kernel_init, bias_init=bias_init)
        q_heads, kv_heads = (self.num_heads, self.head_dim), (self.num_kv_heads, self.head_dim)
        self.query = project_in(in_features, q_heads)
        self.key = project_in(self.in_kv_features, kv_heads)
        self.value = project_in(self.in_kv_features, kv_heads)
        self.out = project(
            q_heads,
            in_features,
            axis=(-2, -1),
            kernel_init=out_kernel_init or kernel_init,
            bias_init=out_bias_init or bias_init,
        )
        self.query_ln, self.key_ln = (
            None
            if norm is None
            else norm(self.head_dim, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
            for _ in range(2)
        )
        self.sinks = nnx.Param(jnp.zeros(num_heads, param_dtype)) if use_sinks else None
        self.rngs = rngs.dropout.fork() if dropout_rate != 0.0 else None
        self.pages: tuple[int, int] | None = None
        self.cached_key: Any = nnx.data(None)
        self.cached_value: Any = nnx.data(None)
        self.cache_index: Any = nnx.data(None)

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
        decode: bool = False,
        page_table: ArrayLike | None = None,
    ) -> jax.Array:
        """Attention of `x` to itself, to `memory`, or to itself and all that is in the cache.

        Args:
          x: [*B, T, in_features].
          memory: [*B, S, in_kv_features], where keys and values come from (Flax's inputs_k); None
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
          mask: bool or numbers (nonzero means True), broadcastable to [*B, num_heads, T, S].
          score_mod: `score_mod(score, batch, head, query, key) -> score`, as in flash_attention, in
            place of softcap. It counts queries and keys by their index in x and memory.
          block_mask: of `jax_flash.block_mask` or `block_mask_of`, for T queries and S keys.
          decode: x continues the sequences in the cache, by any T; S is then the cache's length, or
            with pages that of the pages in a row of the table. Up to 64 positions are one call of
            `decode_attention`, which copies none of the cache, unless there is a bias, mask or
            dropout, an attention_fn other than flash_attention or a cache of another dtype.
          page_table: int32 [*B, M], in decoding with a cache of pages: position p of a row is in
            slot p % S of page page_table[p // S]. A row needs the pages of what its new
            positions see, not its padding, and other columns may hold anything.

        Returns:
          [*B, T, in_features]; NaN in rows where decoding ran past the end of the cache or to a
          position without a page.

        Raises:
          ValueError: for shapes that do not fit together, and for decode=True without a cache,
            without is_causal, or with a memory, segment ids, positions, a score_mod or a
            block_mask; for a page_table without a cache of pages, or none with one.
        """
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
        sizes = [("x", x, "in_features", self.in_features)]
        if memory is not None:
            sizes.append(("memory", memory, "in_kv_features", self.in_kv_features))
        elif self.in_kv_features != self.in_features:
            raise ValueError(
                f"memory is None; expected one: the layer has in_kv_features = "
                f"{self.in_kv_features} for it, beside in_features = {self.in_features}"
            )
        for name, given, what, size in sizes:
            if given.shape[-1] != size:
                raise ValueError(
                    f"{name} has shape {given.shape}; expected {what} = {size} features, the last"
                )
        stored, cache = (), None
        if page_table is not None and not decode:
            raise ValueError("page_table is given without decode=True")
        if decode:
            _decoding.check_decode(
                self.is_causal,
                memory=memory,
                segment_ids=segment_ids,
                positions=positions,
                score_mod=score_mod,
                block_mask=block_mask,
            )
            stored = self.cached_key, self.cached_value, self.cache_index
            if stored[0] is None:
                raise ValueError("decode=True needs a cache: call init_cache(batch, max_length)")
            page_table = _decoding.check_page_table(self.pages, page_table, x.shape[:-2])
            cache = _decoding.Cache(*(variable[...] for variable in stored), page_table=page_table)
        dropout: dict[str, Any] = {}
        if self.rngs is not None and not self.deterministic:
            dropout.update(dropout_rate=self.dropout_rate, dropout_key=self.rngs())
        source = x if memory is None else memory
        query, key = self.query(x), self.key(source)
        if self.query_ln is not None and self.key_ln is not None:
            query, key = self.query_ln(query), self.key_ln(key)
        out, cache = _decoding.attend(
            self.attention_fn,
            query,
            key,
            self.value(source),
            cache,
            rotary_base=self.rotary_base,
            is_causal=self.is_causal,
            local_window_size=self.local_window_size,
            softcap=self.softcap,
            sinks=None if self.sinks is None else self.sinks[...],
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
                variable[...] = array
        return self.out(out)

    def init_cache(
        self,
        batch: int | tuple[int, ...],
        max_length: int | None = None,
        dtype: Dtype | None = None,
        *,
        pages: tuple[int, int] | None = None,
    ) -> None:
        """Makes an empty cache for `decode=True` to fill: of so many positions a row, or of pages.

        Pages are handed out by the caller, as the `page_table` of each call says: a row needs as
        many as hold its positions, in any order, and rows may have pages in common where neither
        writes. A row ends, and another begins in its place, by its entry of `cache_index` set to 0.

        Args:
          batch: size of the leading axis, or of all of them.
          max_length: positions that prompt and continuation may have together; None with pages.
          dtype: dtype in which keys and values are kept; None takes that of the computation.
          pages: how many pages, and positions in each, in place of max_length.

        Raises:
          TypeError: a size is no int.
          ValueError: a size is negative, or both or neither of max_length and pages are given.

        Examples:
          >>> import jax.numpy as jnp
          >>> from flax import nnx
          >>> from jax_flash.layers.nnx import FlashAttention
          >>> layer = FlashAttention(4, 64, is_causal=True, rngs=nnx.Rngs(0))
          >>> layer.init_cache(2, pages=(8, 16))
          >>> table = jnp.array([[3, 0, 5], [1, -1, -1]])  # up to 48 positions, and up to 16
          >>> prompts, lengths = jnp.ones((2, 40, 64)), jnp.array([40, 7])
          >>> layer(prompts, seq_lengths=lengths, decode=True, page_table=table).shape
          (2, 40, 64)
          >>> layer(jnp.ones((2, 1, 64)), decode=True, page_table=table).shape
          (2, 1, 64)
        """
        if (max_length is None) == (pages is None):
            raise ValueError(
                f"max_length is {max_length!r} and pages {pages!r}; expected one of them, and None "
                "for the other"
            )
        batch = tuple(batch) if isinstance(batch, Sequence) else (batch,)
        shape = _decoding.cache_shape(batch, max_length, pages)
        dtype = self.cache_dtype if dtype is None else dtype
        shape = (*shape, self.num_kv_heads, self.head_dim)
        self.pages = pages
        self.cached_key = nnx.Cache(jnp.zeros(shape, dtype))
        self.cached_value = nnx.Cache(jnp.zeros(shape, dtype))
        self.cache_index = nnx.Cache(jnp.zeros(batch, jnp.int32))

    def set_view(self, deterministic: bool | None = None) -> None:
        """Sets `deterministic`, for nnx.view."""
        if deterministic is not None:
            self.deterministic = deterministic


_LayerNorm = functools.partial(nnx.LayerNorm, use_bias=False)
