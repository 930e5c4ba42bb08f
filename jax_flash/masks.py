"""Common masks for `jax_flash.block_mask`, and how to combine them.

A `Mask` is a function of (batch, head, query, key), int32 scalars, that tells whether the query
sees the key. `a & b`, `a | b` and `~a` are masks; so is `Mask(f)` of any such function, and b may
be the function itself.

    >>> import jax_flash
    >>> from jax_flash import masks
    >>> local = masks.causal() & (masks.sliding_window(128) | (lambda b, h, q, k: k < 4))
    >>> jax_flash.block_mask(local, q_len=512, kv_len=512, block=64)
    BlockMask(q_len=512, kv_len=512, block=64, blocks=[1, 8, 8], density=0.406)
    ▒·······
    █▒······
    ▒█▒·····
    ▒▒█▒····
    ▒·▒█▒···
    ▒··▒█▒··
    ▒···▒█▒·
    ▒····▒█▒
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike


@dataclasses.dataclass(frozen=True)
class Mask:
    """A function of (batch, head, query, key) that `&`, `|` and `~` combine.

    Attributes:
      function: it.
      sizes: "q_len", "kv_len" and "batch" where it reads arrays that have such a dim; `block_mask`
        takes it for these alone.
    """

    function: Callable[[Any, Any, Any, Any], Any]
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict, compare=False)

    def __call__(self, batch, head, query, key):
        return self.function(batch, head, query, key)

    def __and__(self, other: Callable[..., Any]) -> Mask:
        return Mask(lambda *at: self(*at) & other(*at), _common_sizes(self, other))

    def __or__(self, other: Callable[..., Any]) -> Mask:
        return Mask(lambda *at: self(*at) | other(*at), _common_sizes(self, other))

    def __invert__(self) -> Mask:
        return Mask(lambda *at: ~jnp.asarray(self(*at)), self.sizes)

    __rand__, __ror__ = __and__, __or__


def _common_sizes(*functions: Callable[..., Any]) -> dict[str, int]:
    found: dict[str, int] = {}
    for function in functions:
        if not callable(function):
            raise TypeError(
                f"a mask is combined with {type(function).__name__}; expected a mask, or a "
                "function of (batch, head, query, key)"
            )
        for name, size in function.sizes.items() if isinstance(function, Mask) else ():
            if found.setdefault(name, size) != size:
                raise ValueError(
                    f"masks of {name} {found[name]} and {size} are combined; expected one {name}"
                )
    return found


def _index(name: str, x: Any, least: int | None = None) -> Any:
    """Checks a number of keys or blocks; of a traced one the type alone."""
    if isinstance(x, jax.core.Tracer):
        if x.shape or not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"{name} has shape {x.shape} and dtype {x.dtype}; expected one int")
        return x
    try:
        number = None if isinstance(x, bool) else operator.index(x)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name} is {x!r}; expected an int")
    if least is not None and number < least:
        raise ValueError(f"{name} is {number}; expected {least} or more")
    return number


def _integers(name: str, x: ArrayLike, letters: str) -> jax.Array:
    try:
        x = jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} is {type(x).__name__}; expected int {letters}") from error
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name} has dtype {x.dtype} (shape {x.shape}); expected int {letters}")
    return x


def causal(offset: int = 0) -> Mask:
    """Keys up to a query's own index plus `offset`: S - T aligns the last query and key.

    Vaswani et al. (arXiv:1706.03762). `is_causal=True` alone is the same, and needs no mask.

    Examples:
      >>> from jax_flash import masks
      >>> bool(masks.causal()(0, 0, 5, 5)), bool(masks.causal()(0, 0, 5, 6))
      (True, False)
    """
    offset = _index("offset", offset)
    return Mask(lambda b, h, q, k: k <= q + offset)


def sliding_window(left: int, right: int | None = None) -> Mask:
    """Keys at most `left` before and `right` after a query's own index; None: as `left`.

    Longformer, Beltagy et al. (arXiv:2004.05150); Mistral 7B (arXiv:2310.06825).

    Examples:
      >>> from jax_flash import masks
      >>> window = masks.sliding_window(2, 0)
      >>> [bool(window(0, 0, 5, k)) for k in range(2, 8)]
      [False, True, True, True, False, False]
    """
    left = _index("left", left, 0)
    right = left if right is None else _index("right", right, 0)
    return Mask(lambda b, h, q, k: (k >= q - left) & (k <= q + right))


def prefix_lm(prefix: ArrayLike) -> Mask:
    """A prefix that all queries see, causal behind it; `prefix`: its length, int or int32 `[B]`.

    Raffel et al., T5 (arXiv:1910.10683), section 3.2.1.

    Examples:
      >>> from jax_flash import masks
      >>> mask = masks.prefix_lm(3)
      >>> [bool(mask(0, 0, 0, k)) for k in range(5)]
      [True, True, True, False, False]
    """
    lengths = _integers("prefix", prefix, "or int [B]")
    if lengths.ndim > 1:
        raise ValueError(f"prefix has shape {lengths.shape}; expected () or [B]")
    return Mask(
        lambda b, h, q, k: (k <= q) | (k < (lengths[b] if lengths.ndim else lengths)),
        dict(zip(("batch",), lengths.shape, strict=False)),
    )


def documents(query_ids: ArrayLike, key_value_ids: ArrayLike | None = None) -> Mask:
    """Queries see keys of their own document.

    Krell et al., packing without cross-contamination (arXiv:2107.02027).

    Arguments:
      query_ids: int `[T]`, or `[B, T]` with `batch=B`.
      key_value_ids: int `[S]` or `[B, S]`; None: those of the queries.

    Examples:
      >>> import numpy as np
      >>> from jax_flash import masks
      >>> mask = masks.documents(np.array([0, 0, 1, 1, 1]))
      >>> [bool(mask(0, 0, 3, k)) for k in range(5)]
      [False, False, True, True, True]
    """
    letters = "[length] or [B, length]"
    queries = _integers("query_ids", query_ids, letters)
    keys = queries if key_value_ids is None else _integers("key_value_ids", key_value_ids, letters)

    def of(ids, b, i):
        return ids[b, i] if ids.ndim == 2 else ids[i]

    for name, ids in (("query_ids", queries), ("key_value_ids", keys)):
        if ids.ndim not in (1, 2):
            raise ValueError(f"{name} has shape {ids.shape}; expected {letters}")
    sizes = {"q_len": queries.shape[-1], "kv_len": keys.shape[-1]}
    batches = {ids.shape[0] for ids in (queries, keys) if ids.ndim == 2}
    if len(batches) > 1:
        raise ValueError(
            f"query_ids has shape {queries.shape}, key_value_ids {keys.shape}; expected both [B, "
            "length] of one B"
        )
    if batches:
        sizes["batch"] = batches.pop()
    return Mask(lambda b, h, q, k: of(queries, b, q) == of(keys, b, k), sizes)


def dilated(window: int, dilation: int) -> Mask:
    """Every `dilation`-th key to both sides of a query, `window` of them on each, and its own.

    Longformer's dilated sliding window, Beltagy et al. (arXiv:2004.05150), section 3.1.

    Examples:
      >>> from jax_flash import masks
      >>> mask = masks.dilated(1, 3)
      >>> [k for k in range(10) if mask(0, 0, 5, k)]
      [2, 5, 8]
    """
    window = _index("window", window, 0)
    dilation = _index("dilation", dilation, 1)
    return Mask(lambda b, h, q, k: (abs(q - k) <= window * dilation) & ((q - k) % dilation == 0))


def strided(stride: int) -> Mask:
    """The last `stride` keys, and before them every `stride`-th, counted back from a query.

    Sparse Transformers' strided attention, both heads in one, Child et al. (arXiv:1904.10509).

    Examples:
      >>> from jax_flash import masks
      >>> mask = masks.strided(4)
      >>> [k for k in range(13) if mask(0, 0, 11, k)]
      [3, 7, 8, 9, 10, 11]
    """
    stride = _index("stride", stride, 1)
    return Mask(lambda b, h, q, k: (k <= q) & ((q - k < stride) | ((q - k) % stride == 0)))


def butterfly(
    q_blocks: int, kv_blocks: int | None = None, *, max_stride: int | None = None
) -> np.ndarray:
    """The flat butterfly as a layout: blocks i and j meet if their numbers differ in one bit.

    Each block also meets itself: 1 + log2(n) of n blocks a row, or 1 + log2(max_stride) with a
    maximum stride: then time grows linearly with T. Where there are more blocks of keys than of
    queries or fewer, the square of the larger number is squeezed.

    Dao et al., Pixelated Butterfly (arXiv:2112.00029): the layout of the FlashAttention paper.

    Arguments:
      q_blocks, kv_blocks: ceil(T / block) and ceil(S / block); None: as many of keys.
      max_stride: a power of two; blocks of numbers max_stride / 2 apart meet, none further apart.
        None: of any stride.

    Returns: bool `[q_blocks, kv_blocks]`, for `jax_flash.block_mask_of`.

    Raises: TypeError for what is no int, ValueError if max_stride is not a power of two.

    Examples:
      >>> from jax_flash import masks
      >>> masks.butterfly(4).astype(int)
      array([[1, 1, 1, 0],
             [1, 1, 0, 1],
             [1, 0, 1, 1],
             [0, 1, 1, 1]])
    """
    rows = _index("q_blocks", q_blocks, 0)
    columns = rows if kv_blocks is None else _index("kv_blocks", kv_blocks, 0)
    if max_stride is not None and _index("max_stride", max_stride, 1) & (max_stride - 1):
        raise ValueError(f"max_stride is {max_stride}; expected a power of two, or None")
    size = max(rows, columns)
    i, j = (np.arange(n) * size // max(n, 1) for n in (rows, columns))
    apart = i[:, None] ^ j
    meets = (apart & (apart - 1)) == 0
    return meets if max_stride is None else meets & (apart < max_stride)
