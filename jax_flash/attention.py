"""The public calls: `flash_attention`, and `dot_product_attention` with jax.nn's own signature.

Read next: `_validate/` for what the arguments may be, `_ops/forward.py` for how the call is
differentiated.

A shape in an annotation is the docstring's: a letter is one size wherever it stands, `*B` any
number of leading dims, and what begins with # may be 1 or absent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Generic, Literal, TypedDict, TypeVar, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_flash import _ops, _validate
from jax_flash._keywords import hinted
from jax_flash._ops import float8
from jax_flash._validate.float8 import QArray
from jax_flash.block_masks import BlockMask

Window = int | Sequence[int | None] | np.ndarray
A = TypeVar("A")
# (score, batch, head, query, key) -> score, all scalars
ScoreFunction = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], ArrayLike]


class CommonOptions(TypedDict, Generic[A], total=False):
    """The keywords that both calls and Flax's layers take; A is what may stand for an array."""

    scale: A | None
    local_window_size: Window | None
    query_seq_lengths: A | None
    key_value_seq_lengths: A | None


class LayerOptions(CommonOptions[A], Generic[A], total=False):
    """The keywords of `flash_attention` that Flax's layers take besides Flax's own arguments.

    Its `deterministic` is not here, because Flax means "without dropout" by that word.
    """

    causal_align: Literal["top_left", "bottom_right"]
    query_segment_ids: A | None
    key_value_segment_ids: A | None
    query_positions: A | None
    key_value_positions: A | None
    softcap: float | None
    score_mod: ScoreFunction | None
    sinks: A | None
    block_mask: BlockMask | None
    backend: str | None


class Options(LayerOptions[A], Generic[A], total=False):
    """All keywords of `flash_attention` but value_dim, those of float8 and return_lse."""

    bias: A | None
    mask: A | None
    indices: A | None
    is_causal: bool
    dropout_rate: float
    dropout_key: A | None
    deterministic: bool
    precision: str | jax.lax.Precision | None


class Float8Options(Options[A], Generic[A], total=False):
    """All keywords of `flash_attention` but return_lse and return_amax."""

    value_dim: int | None
    query_scale: A | None
    key_scale: A | None
    value_scale: A | None
    out_dtype: Any
    quantize: Literal["fp8"] | None
    fallback: Literal["16bit"] | None


class DotProductOptions(CommonOptions[ArrayLike], total=False):
    """The keywords of `dot_product_attention` but return_residual."""

    is_causal: bool
    implementation: Literal["xla", "cudnn"] | None


@overload
def flash_attention(
    query: ArrayLike | QArray,
    key: ArrayLike | QArray,
    value: ArrayLike | QArray | None,
    *,
    return_lse: Literal[False] = False,
    return_amax: Literal[False] = False,
    **options: Unpack[Float8Options[ArrayLike]],
) -> jax.Array: ...


@overload
def flash_attention(
    query: ArrayLike | QArray,
    key: ArrayLike | QArray,
    value: ArrayLike | QArray | None,
    *,
    return_lse: Literal[True],
    return_amax: Literal[False] = False,
    **options: Unpack[Float8Options[ArrayLike]],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def flash_attention(
    query: ArrayLike | QArray,
    key: ArrayLike | QArray,
    value: ArrayLike | QArray | None,
    *,
    return_lse: bool,
    return_amax: Literal[False] = False,
    **options: Unpack[Float8Options[ArrayLike]],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


@overload
def flash_attention(
    query: ArrayLike | QArray,
    key: ArrayLike | QArray,
    value: ArrayLike | QArray | None,
    *,
    return_lse: bool = False,
    return_amax: bool,
    **options: Unpack[Float8Options[ArrayLike]],
) -> jax.Array | tuple[jax.Array, ...]: ...


@hinted
def flash_attention(
    query: Annotated[ArrayLike | QArray, "*B T N H"],
    key: Annotated[ArrayLike | QArray, "*B S K H"],
    value: Annotated[ArrayLike | QArray, "*B S K Hv"] | None,
    *,
    scale: Annotated[ArrayLike, ""] | None = None,
    bias: Annotated[ArrayLike, "*#B #N #T #S"] | None = None,
    mask: Annotated[ArrayLike, "*#B #N #T #S"] | None = None,
    block_mask: BlockMask | None = None,
    is_causal: bool = False,
    causal_align: Literal["top_left", "bottom_right"] = "top_left",
    local_window_size: Window | None = None,
    query_seq_lengths: Annotated[ArrayLike, "*B"] | None = None,
    key_value_seq_lengths: Annotated[ArrayLike, "*B"] | None = None,
    query_segment_ids: Annotated[ArrayLike, "*B T"] | None = None,
    key_value_segment_ids: Annotated[ArrayLike, "*B S"] | None = None,
    query_positions: Annotated[ArrayLike, "*B T"] | None = None,
    key_value_positions: Annotated[ArrayLike, "*B S"] | None = None,
    indices: Annotated[ArrayLike, "*B T n"] | None = None,
    value_dim: int | None = None,
    softcap: float | None = None,
    score_mod: ScoreFunction | None = None,
    sinks: Annotated[ArrayLike, "N"] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: ArrayLike | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    precision: str | jax.lax.Precision | None = None,
    backend: str | None = None,
    query_scale: ArrayLike | None = None,
    key_scale: ArrayLike | None = None,
    value_scale: ArrayLike | None = None,
    out_dtype: Any = None,
    quantize: Literal["fp8"] | None = None,
    fallback: Literal["16bit"] | None = None,
    return_amax: bool = False,
) -> (
    Annotated[jax.Array, "*B T N Hv"]
    | tuple[Annotated[jax.Array, "*B T N Hv"], Annotated[jax.Array, "*B T N"]]
    | tuple[jax.Array, ...]
):
    """Computes softmax(softcap(scale * query keyᵀ + bias)) value in memory linear in T and S.

    A query with nothing to attend to, or past its length, gives out 0, lse −inf and zero
    gradients; with a sink its lse is the sink, with gradient 1 to it. NaN or inf in positions that
    a query does not attend to never reaches its result. A NaN that it does attend
    to makes its row NaN, one in value that column at least (on "cpu" if its weight is not 0); inf
    gives what arithmetic with it gives, or NaN.

    Products are of query's dtype, summed in float32, or float64 if query is, in which the softmax
    is. On "cuda" and "xla" weights and their gradients are rounded to query's dtype before they
    meet key and value: in float16 those below 3e-8 become 0, unless the loss is scaled. On "cpu"
    they are not in float16; in bfloat16 they are on AMD's processors with AVX-512 BF16 and Arm's
    with BF16, whose products also take numbers below 1.2e-38 as 0. The gradient of logits is that
    of the output as it was rounded (a peaked softmax's bias: errors to 1e-2 in bfloat16); on "cpu"
    it is not where bias has a gradient.

    It is differentiable in query, key, value, bias and sinks, in forward and reverse mode, to any
    order; where a derivative is itself differentiated in reverse mode, memory grows with T S.
    Under `jax.checkpoint`, a policy that saves the names `flash_out` and `flash_lse` spares the
    backward pass a second forward pass. Under jit, leading dims and heads stay split over the
    devices of a mesh as query's are. Under vmap over query alone, key and value are not copied for
    its members, unless lengths, segment ids, positions or gradients to key and value are each
    member's own.

    Arguments:
      query: `[*B, T, N, H]`, float32, bfloat16, float16, or in x64 mode float64, which the backend
        "xla" computes in float64, or float8_e4m3fn; any number of leading dims. Query, key and
        value of float8_e4m3fn may each be qwix's QArray, with scales of the shapes below.
      key: `[*B, S, K, H]`, in query's dtype; K divides N, and query head n reads head
        n // (N // K).
      value: `[*B, S, K, Hv]`, in query's dtype; None: the values are the first `value_dim` features
        of the keys, as in absorbed latent attention (there K 1, H 576, value_dim 512). Beside
        indices kernels then read both at once; elsewhere it is the same as to give these features.
      scale: of the dot products; None: 1 / sqrt(H). A jax.Array of shape () may be traced, mapped
        and differentiated: query is multiplied by scale * sqrt(H) in float32 and rounded to its
        dtype, once more than with a Python or NumPy number, and the kernel's scale is 1 / sqrt(H).
      bias: added to the scaled dot products; float, broadcasts to `[*B, N, T, S]`. Its gradient
        has its own shape. A float64 one is rounded to float32 unless query is float64. A logit of
        −inf hides a key's value as mask does, not NaN or inf in the key: a bias of −inf is a mask
        where these are finite, unless softcap makes it −softcap.
      mask: bool, broadcasts to `[*B, N, T, S]`; True where a query attends to a key.
      block_mask: what `jax_flash.block_mask` or `block_mask_of` made for this T and S: a mask in
        memory and time that grow with the blocks that see something. Its batch and heads are 1,
        missing, or those of query. It counts by index, as mask does.
      is_causal: hide the keys after a query's own position.
      causal_align: which key stands at a query's own position, for is_causal and
        local_window_size: "top_left" puts query 0 at key 0, "bottom_right" the last query at the
        last key, in each batch row by its lengths where these are given.
      local_window_size: keys visible to the (left, right) of a query's own position, both ends
        included; None on a side: no limit; an int serves both sides. Python or NumPy integers.
      query_seq_lengths, key_value_seq_lengths: int32 `[*B]`, valid positions of each batch row,
        clipped to [0, T] and [0, S]; later positions are padding.
      query_segment_ids, key_value_segment_ids: int32 `[*B, T]` and `[*B, S]`; a query attends to
        keys of equal id, in any order. A jax.Array of int64 ids counts by their low 32 bits.
      query_positions, key_value_positions: int32 `[*B, T]` and `[*B, S]`, where queries and keys
        stand for is_causal and local_window_size, in any order, ties and negative ones included;
        a query sees itself and keys before it as they stand, not as they are stored. Without one
        of the two, these stand at their index (for self-attention give the same array twice).
        Distances do not overflow: a key at 2^31 − 1 is after every query elsewhere, which hides
        it where is_causal. Lengths, segment ids, masks and dropout count by index as ever.
        With causal_align "top_left" only. Without is_causal and a window they mean nothing. In a
        jax.Array of another dtype those beyond int32 count as the nearest that it holds.
      indices: int32 `[*B, T, n]`, the keys that each query reads, by index and in any order, all of
        its heads alike: -1, or what is no index of a key, reads nothing, and each key stands there
        once. A query reads those that lengths, causality, windows, segment ids and positions let
        it see; memory and time grow with n, not S. Not beside bias, mask, block_mask, score_mod,
        dropout, deterministic or float8. Its gradients are "xla"'s.
      value_dim: see value; Hv then. Not in float8, where values have scales of their own.
      softcap: c in c * tanh(logits / c), above 0.
      score_mod: f(score, batch, head, query, key) -> score, any JAX function of scalars, applied
        to each score scale * query keyᵀ + bias in the place of softcap, which it excludes. score
        is float32, or float64 if query is; the rest are int32 indices: batch of the row among the
        leading dims as they are flattened, head of the query's. Masks come after it, so what it
        gives for a hidden pair, NaN too, reaches nothing; −inf hides a key as in bias. Arrays that
        it closes over, traced or not, may be indexed by its arguments, mapped by vmap and
        differentiated; each device has them whole. GPU kernels are compiled with it, of scalar
        arithmetic and comparisons, conversions, select, exp, tanh and their like, and up to 8
        arrays of which it reads elements; the rest "xla" runs, as all of it on a CPU.
        The gradients to the arrays, by the slope in every pair, are "xla"'s on a GPU too,
        whichever backend is named, in linear memory; those to query, key, value and bias are the
        kernels'. Under shard_map a device counts its own batch rows and heads.
        `jax_flash.scores` has common ones.
      sinks: float `[N]`, one more logit for each head that joins the denominator and no value;
        read as float32, or as float64 if query is.
      dropout_rate: probability in [0, 1) of dropping a weight, rounded to a multiple of 2^-15;
        the rest is scaled by 1 / (1 − rate).
      dropout_key: one key, typed or raw. The same key gives the same pattern on every backend and
        sharding. Under shard_map a device counts its own batch rows and heads, so fold in the
        device's index where patterns should differ.
      return_lse: also return the logarithm of the softmax's denominator, sinks included, with a
        gradient.
      deterministic: gradients that are bit-identical from run to run; on "cpu" also with another
        number of threads, for which a batch of few heads computes its scores once more.
      precision: of float32 products; others ignore it: a `jax.lax.Precision` or its name, such as
        "default", "high" and "highest" or "float32"; None: what `jax_default_matmul_precision` says
        when the call is traced. "xla" multiplies as JAX does: on a GPU in TF32 (11 bits) unless it
        is "highest". "cuda" splits each number: into two float16 for "highest", as exact as
        float32's own arithmetic but for gradients of keys with weights below 2^-24, into two
        bfloat16, of 16 bits, for "high"; by default it takes float16 copies, of 11 bits, where
        these hold all rows. "cpu" is as exact as float32 always.
      backend: "cuda", "cudnn", "cpu" or "xla"; None: "cudnn" on sm_100 and sm_103 where it runs the
        problem, else the first of the others that does where the arrays are.
      query_scale, key_scale, value_scale: what float8 query, key and value are multiplied by:
        float32, 0 or above, `[]`, `[*B, heads]`, or `[*B, blocks, heads]` of blocks of 64 or 128
        positions, the last of which may be shorter. None: 1. Float8 arguments have no derivative.
      out_dtype: of out, in float8: bfloat16, float16 or float32; None: bfloat16, or with quantize
        query's.
      quantize: "fp8" computes bfloat16 and float16 in float8. Query and key are turned by a
        Hadamard matrix where H is a power of two, which leaves scores as they are; 128 positions of
        a head share a scale, hidden ones among them. Gradients pass straight through the rounding:
        they are those of 16-bit attention at the rounded values, turned back.
      fallback: "16bit" computes in 16 bits what float8 does not have (bias, mask, dropout, a
        score_mod; H and Hv but multiples of 16 from 64 to 256; GPUs without kernels for it), which
        without it is a NotImplementedError, or on such GPUs backend "xla".
      return_amax: also return, last, the largest finite magnitudes of query, key and value, as
        delayed scaling takes them: float32 `[3]`, without a gradient. In float8 alone.

    Returns:
      out `[*B, T, N, Hv]` in query's dtype, in float8 in out_dtype; with return_lse also lse
      `[*B, T, N]`, float32, or float64 if query is; with return_amax also `[3]`.

    Raises:
      TypeError, ValueError: a wrong argument, with its shape or value and what would be right;
        contents of lengths, ids and positions under `jax_flash.debug_values()` alone.
      NotImplementedError: a named backend that cannot run the problem, with the reason.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from jax_flash import flash_attention
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 128, 8, 64), jnp.bfloat16)
      >>> flash_attention(q, k, v, is_causal=True).shape
      (2, 128, 8, 64)

      Chunked prefill: 32 queries continue rows of which 50 and 20 keys are in a cache.

      >>> positions = jnp.array([[50], [20]]) + jnp.arange(32)
      >>> flash_attention(q[:, :32], k, v, is_causal=True, query_positions=positions).shape
      (2, 32, 8, 64)

      Left padding, of 0 and 28 tokens: these queries see nothing, and no other sees these keys.

      >>> positions = jnp.arange(128) - jnp.array([[0], [28]])
      >>> keys = jnp.where(positions < 0, 2**31 - 1, positions)
      >>> flash_attention(
      ...     q, k, v, is_causal=True, query_positions=positions, key_value_positions=keys
      ... ).shape
      (2, 128, 8, 64)

    Papers: Dao et al., FlashAttention (arXiv:2205.14135); Dao, FlashAttention-2
    (arXiv:2307.08691); Rabe and Staats (arXiv:2112.05682); Shah et al., FlashAttention-3
    (arXiv:2407.08608); DeepSeek-V3.2-Exp (2025), for indices.
    """
    with_lse = _validate.flag("return_lse", return_lse)
    with_amax = _validate.flag("return_amax", return_amax)
    given = _validate.prepare(
        query,
        key,
        value,
        scale=scale,
        bias=bias,
        mask=mask,
        block_mask=block_mask,
        is_causal=is_causal,
        causal_align=causal_align,
        local_window_size=local_window_size,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        query_positions=query_positions,
        key_value_positions=key_value_positions,
        indices=indices,
        value_dim=value_dim,
        softcap=softcap,
        score_mod=score_mod,
        sinks=sinks,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        deterministic=deterministic,
        precision=precision,
        query_scale=query_scale,
        key_scale=key_scale,
        value_scale=value_scale,
        out_dtype=out_dtype,
        quantize=quantize,
        fallback=fallback,
        with_amax=with_amax,
    )
    amax = given.amax
    if given.float8 is None:
        within = given.value_dim
        out, lse = _ops.attend(given.problem, backend, *given.operands, value_dim=within)
    else:
        out, lse, found = float8.attend(
            given.float8, given.problem, backend, *given.operands, with_lse=with_lse
        )
        amax = found if amax is None else amax
    rows = given.rows
    results = [jnp.reshape(out, (*rows, out.shape[-1])).astype(given.out_dtype)]
    results += [jnp.reshape(jnp.swapaxes(lse, -1, -2), rows)] if with_lse else []
    results += [] if amax is None else [amax]
    return tuple(results) if len(results) > 1 else results[0]


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: Literal[False] = False,
    **options: Unpack[DotProductOptions],
) -> jax.Array: ...


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: Literal[True],
    **options: Unpack[DotProductOptions],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: bool,
    **options: Unpack[DotProductOptions],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


@hinted
def dot_product_attention(
    query: Annotated[ArrayLike, "*B T N H"],
    key: Annotated[ArrayLike, "*B S K H"],
    value: Annotated[ArrayLike, "*B S K Hv"],
    bias: Annotated[ArrayLike, "*#B #N #T #S"] | None = None,
    mask: Annotated[ArrayLike, "*#B #N #T #S"] | None = None,
    *,
    scale: Annotated[ArrayLike, ""] | None = None,
    is_causal: bool = False,
    query_seq_lengths: Annotated[ArrayLike, "*B"] | None = None,
    key_value_seq_lengths: Annotated[ArrayLike, "*B"] | None = None,
    local_window_size: Window | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: bool = False,
) -> (
    Annotated[jax.Array, "*B T N Hv"]
    | tuple[Annotated[jax.Array, "*B T N Hv"], Annotated[jax.Array, "*B T N"]]
):
    """Computes `jax.nn.dot_product_attention`, in memory linear in the sequence lengths.

    A drop-in with jax.nn's signature. What differs from jax.nn's:

    - A query with nothing to attend to gives out 0, residual −inf and zero gradients (there: the
      mean of value and a large negative residual, or NaN where a bias of −inf hides all keys).
    - NaN or inf in what is hidden from a query does not reach it (there: NaN, from 0 * NaN).
    - The residual is float32, or float64 if query is, and has a gradient (there: key's dtype,
      without one). The softmax of float64 is computed in float64 (there: in float32).
    - Refused here: query, key and value that are integer or complex; a bias that is not float; a
      scale of more than one number, or NaN; negative, float or traced window sizes; an is_causal
      that is neither True nor False.
    - Taken here as well: value dims other than H; more leading dims; lengths of any integer dtype;
      None on a side of a window; windows of NumPy integers; arrays without heads.
    - A wrong dtype is a TypeError (there: a ValueError). "cudnn" is our CUDA backend: what it
      cannot run, gradients of float32 among it, is a NotImplementedError with the reason.
    - A scale that is a jax.Array costs one more rounding of query: see `flash_attention`.
    - jax.export serialises it with `jax_flash.EXPORT_CHECKS`, and T and S that are symbolic only
      where a kernel runs it, not backend "xla".

    Arguments:
      query: `[B, T, N, H]` or `[T, N, H]`; key and value `[B, S, K, H]` or `[S, K, H]`.
      bias, mask: float and bool, rank 4 or less, broadcasting to `[B, N, T, S]`.
      scale, is_causal, query_seq_lengths, key_value_seq_lengths, local_window_size: as in
        `flash_attention`; the alignment is "top_left".
      implementation: None takes the best backend of ours, "xla" the backend "xla", "cudnn" the
        backend "cuda".
      return_residual: also return the log-sum-exp.

    Returns:
      out in query's dtype and shape, but for value's last dim; with return_residual also the
      residual, `[B, T, N]` or `[T, N]`.

    Raises: as `flash_attention`.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from jax_flash import dot_product_attention
      >>> q = jnp.ones((2, 16, 4, 32))
      >>> dot_product_attention(q, q, q, is_causal=True).shape
      (2, 16, 4, 32)

    Paper: Vaswani et al. (arXiv:1706.03762).
    """
    backends: dict[str | None, str | None] = {None: None, "xla": "xla", "cudnn": "cuda"}
    if not isinstance(implementation, str | None) or implementation not in backends:
        raise ValueError(f"implementation is {implementation!r}; expected None, 'xla' or 'cudnn'")
    with_residual = _validate.flag("return_residual", return_residual)
    query = _validate.array("query", query)
    results = flash_attention(
        _at_least_4d(query),
        _at_least_4d(_validate.array("key", key)),
        _at_least_4d(_validate.array("value", value)),
        scale=scale,
        bias=bias,
        mask=mask,
        is_causal=is_causal,
        local_window_size=local_window_size,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        backend=backends[implementation],
        return_lse=with_residual,
    )
    added = max(0, 4 - query.ndim)
    return jax.tree.map(lambda x: jnp.reshape(x, x.shape[added:]), results)


def _at_least_4d(x: jax.Array) -> jax.Array:
    return jnp.reshape(x, (1,) * (4 - x.ndim) + x.shape)
