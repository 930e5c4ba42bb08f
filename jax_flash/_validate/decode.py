"""From the arguments of `decode_attention` and `fill_cache` to arrays, or an error."""

import dataclasses
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_flash import _debug, _latent_rows
from jax_flash._cache import QUANTIZED
from jax_flash._latent_rows import is_packed
from jax_flash._ops.decode import MOST_QUERIES, Decode
from jax_flash._problem import Problem, order_terms
from jax_flash._terms import FLOATS
from jax_flash._validate.arrays import array, check_head_dim, in_full, is_sure, value_dim_of
from jax_flash._validate.scalars import precision_of, real, scale_of, softcap_of, window_sides
from jax_flash._validate.terms import indices_of, sinks_of

_MOST_INT32 = 2**31 - 1
_LETTERS = (
    "query [*B, T, N, H], key_cache [*B, L, K, H] and value_cache [*B, L, K, Hv], or with a "
    "page_table pages [P, S, K, H] and [P, S, K, Hv]"
)


@dataclasses.dataclass(frozen=True)
class Caches:
    """The arguments that a cache and its page table make up, checked beside each other."""

    key: jax.Array
    value: jax.Array | None
    page_table: jax.Array | None
    scales: dict[str, jax.Array]
    names: tuple[str, str]

    @classmethod
    def of(
        cls,
        key_cache: Any,
        value_cache: Any,
        page_table: Any,
        batch: tuple[int, ...],
        names: tuple[str, str] = ("key_cache", "value_cache"),
        *,
        key_scale: Any = None,
        value_scale: Any = None,
    ):
        key = _cache(names[0], key_cache)
        value = None if value_cache is None else _cache(names[1], value_cache)
        if page_table is not None:
            page_table = integers("page_table", page_table, -1)
            if page_table.shape[:-1] != batch or page_table.ndim != len(batch) + 1:
                raise ValueError(
                    f"page_table has shape {page_table.shape}; expected [*B, pages of a row] with "
                    f"*B = {batch}"
                )
        for name, x in zip(names, (key, value), strict=True):
            if x is None:
                continue
            leading = ("P",) if page_table is not None else batch
            if x.ndim != len(leading) + 3 or (page_table is None and x.shape[:-3] != batch):
                expected = f"[*B, L, K, H], leading dims *B = {batch} of query or key: {_LETTERS}"
                if page_table is not None:
                    expected = "pages [P, S, K, H], P pages of S positions each"
                raise ValueError(f"{name} has shape {x.shape}; expected {expected}")
        if value is not None and (value.shape[:-1] != key.shape[:-1] or value.dtype != key.dtype):
            raise ValueError(
                f"{names[1]} has shape {value.shape} and dtype {value.dtype}, {names[0]} "
                f"{key.shape} and {key.dtype}; expected the same but for the last dim"
            )
        if is_packed(key):
            _check_packed(names, key, value, key_scale)
        paged, scales = page_table is not None, {}
        for name, x, (of, cache) in (
            ("key_scale", key_scale, (names[0], key)),
            ("value_scale", value_scale, (names[1], value)),
        ):
            if (scale := _scale(name, x, of, cache, paged)) is not None:
                scales[name] = scale
        return cls(key, value, page_table, scales, names)

    @property
    def quantized(self) -> str | None:
        """The dtype of a cache of eight bits."""
        return self.key.dtype.name if self.scales else None

    @property
    def latent_rows(self) -> bool:
        """Whether rows of latent attention are packed."""
        return is_packed(self.key)

    @property
    def key_dim(self) -> int:
        """The features of a key."""
        return _latent_rows.DIM if self.latent_rows else self.key.shape[-1]

    def check_query(self, q: jax.Array) -> None:
        """Checks that a query `[*B, T, N, H]` and the keys fit each other."""
        k, name = self.key, self.names[0]
        if self.page_table is not None and not isinstance(k.shape[1], int):
            raise ValueError(
                f"{name} has shape {k.shape}; expected positions of a page (the second dim) that "
                "are known where the call is exported: kernels are compiled for them. How many "
                "pages there are may be symbolic"
            )
        if self.latent_rows and (q.dtype != jnp.bfloat16 or q.shape[-1] != _latent_rows.DIM):
            raise (TypeError if q.dtype != jnp.bfloat16 else ValueError)(
                f"query has dtype {q.dtype} and shape {q.shape}; expected bfloat16 of "
                f"{_latent_rows.DIM} features, as the packed rows of {name} {k.shape} hold"
            )
        if q.dtype.name not in FLOATS:
            raise TypeError(
                f"query has dtype {q.dtype} (shape {q.shape}); expected one of {', '.join(FLOATS)}"
            )
        if not (self.quantized or self.latent_rows) and q.dtype != k.dtype:
            raise TypeError(
                f"query has dtype {q.dtype} and {name} {k.dtype}; expected one dtype, for example "
                f"query.astype('{k.dtype}')"
            )
        if self.key_dim != q.shape[-1]:
            raise ValueError(
                f"{name} has shape {k.shape} and query {q.shape}; expected equal head dims (the "
                f"last), got {k.shape[-1]} and {q.shape[-1]}"
            )
        q_heads, kv_heads = q.shape[-2], k.shape[-2]
        if q_heads % kv_heads or not q_heads if kv_heads else q_heads:
            raise ValueError(
                f"query has {q_heads} heads (shape {q.shape}) and {name} {kv_heads} (shape "
                f"{k.shape}); expected a multiple of {name}'s heads, and 0 only of 0: query "
                f"[..., N, H], {name} [..., K, H]"
            )

    def check_new(
        self, names: tuple[str, str], key: Any, value: Any, lead: tuple[int, ...], dtype: Any = None
    ):
        """Checks keys `[*B, T, K, H]` and values that go into the cache; lead is (*B, T).

        `dtype`: what they have if the cache has eight bits; None: any floating one.
        """
        if (value is None) != (self.value is None):
            given, cache = ("no", "a") if value is None else ("a", "no")
            raise ValueError(
                f"{names[0]} is given with {given} {names[1]} for {cache} {self.names[1]}; "
                f"expected {names[1]} exactly where there is a {self.names[1]}"
            )
        arrays = []
        for name, x, cache in zip(names, (key, value), (self.key, self.value), strict=True):
            if cache is None:
                continue
            x = array(name, x)
            dim = self.key_dim if name == names[0] else cache.shape[-1]
            expected = (*lead, cache.shape[-2], dim)
            if x.shape != expected:
                kept = f"as the cache {cache.shape} has heads and features"
                if self.latent_rows:
                    kept = f"packed as they are written to the cache {cache.shape}"
                raise ValueError(
                    f"{name} has shape {x.shape}; expected {expected}, a key or value for each "
                    f"position, {kept}"
                )
            converts = self.quantized or self.latent_rows
            if not converts and x.dtype != cache.dtype:
                raise TypeError(
                    f"{name} has dtype {x.dtype} and the cache {cache.dtype}; expected one dtype, "
                    f"for example {name}.astype('{cache.dtype}')"
                )
            if converts and x.dtype.name not in ([dtype.name] if dtype else FLOATS):
                expected = f"query's {dtype}" if dtype else f"one of {', '.join(FLOATS)}"
                raise TypeError(
                    f"{name} has dtype {x.dtype}; expected {expected}: it is rounded to the "
                    f"cache's {cache.dtype} as it is written"
                )
            arrays.append(x)
        return arrays

    def new_of(
        self, new_key: Any, new_value: Any, lead: tuple[int, ...], dtype: Any
    ) -> tuple[bool, dict[str, jax.Array]]:
        """Checks new_key and new_value: returns whether there are any, and them by name.

        `dtype`: of the query.
        """
        if new_key is None:
            if new_value is not None:
                raise ValueError("new_value is given without new_key; expected both, or neither")
            return False, {}
        arrays = self.check_new(("new_key", "new_value"), new_key, new_value, lead, dtype)
        return True, dict(zip(("new_k", "new_v"), arrays, strict=False))

    def rotary_base_of(self, base: Any) -> float | None:
        if base is None:
            return None
        base = _rotary_base(base, self.key_dim, "a number above 0, or None")
        if self.value is None:
            raise ValueError(
                f"rotary_base is given without a {self.names[1]}, and would rotate the values too; "
                "expected query and new_key with their positional features rotated, and "
                "rotary_base=None"
            )
        return base

    def value_dim_of(self, value_dim: Any) -> int | None:
        """Checks how many of the keys' features are the values, if there is no value_cache."""
        name, head_dim = self.names[1], self.key_dim
        if self.value is not None:
            if value_dim is not None:
                raise ValueError(
                    f"value_dim is {value_dim!r} beside a {name}; expected None, since the {name} "
                    "has its own last dim"
                )
            return None
        value_dim = value_dim_of(value_dim, name, head_dim)
        if self.latent_rows and value_dim != _latent_rows.VALUE_DIM:
            raise ValueError(
                f"value_dim is {value_dim} and {self.names[0]} has packed rows; expected "
                f"{_latent_rows.VALUE_DIM}, their features of float8"
            )
        return value_dim

    def look(self, lengths: Any, first: Callable[[], Any], stop: Callable[[], Any]) -> None:
        """Has `debug_values` look at `[*B]` lengths, and at the pages of positions of each row.

        Arguments:
          lengths: as they were given.
          first, stop: make `[*B]`, the first position that needs a page, and the end.
        """
        if not _debug.is_on():
            return
        lengths, size = in_full(lengths), self.key.shape[-3]
        if self.page_table is None:
            _debug.check_lengths("lengths", lengths, size, "L = ")
            return
        _debug.check_lengths("lengths", lengths, self.page_table.shape[-1] * size, "M * S = ")
        _debug.check_pages(self.page_table, first(), stop(), *self.key.shape[:2])


def prepare(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    lengths: Any,
    *,
    new_key: Any,
    new_value: Any,
    page_table: Any,
    key_scale: Any,
    value_scale: Any,
    rotary_base: Any,
    value_dim: Any,
    scale: Any,
    local_window_size: Any,
    softcap: Any,
    sinks: Any,
    indices: Any,
    precision: Any,
    backend: str | None,
) -> tuple[Decode, tuple[jax.Array, ...]]:
    """Checks the arguments of `decode_attention`, for the primitive.

    Returns: the call, and its operands.

    Raises: TypeError or ValueError with the argument's name, what it is and what would be right.
    """
    q = array("query", query)
    fits = q.ndim >= 3 and is_sure(lambda: 1 <= q.shape[-3] <= MOST_QUERIES)
    if not fits or q.shape[-1] == 0:
        raise ValueError(
            f"query has shape {q.shape}; expected [*B, T, N, H] with T from 1 to {MOST_QUERIES}, a "
            "symbolic one by constraints of its scope: a longer prompt is flash_attention's, and "
            "fill_cache writes its keys and values"
        )
    *batch, q_len, _, _ = q.shape
    batch = tuple(batch)
    check_head_dim("query", q)
    given, lengths = lengths, row_lengths("lengths", lengths, batch, "query", q.shape)
    caches = Caches.of(
        key_cache, value_cache, page_table, batch, key_scale=key_scale, value_scale=value_scale
    )
    caches.check_query(q)
    appends, new = caches.new_of(new_key, new_value, (*batch, q_len), q.dtype)
    q, problem, terms = problem_of(
        q,
        caches,
        batch,
        q_len,
        scale=scale,
        local_window_size=local_window_size,
        softcap=softcap,
        sinks=sinks,
        indices=indices,
        precision=precision,
    )
    left = problem.window[0]
    reach = _MOST_INT32 if left is None else q_len + left
    if indices is not None:
        reach = q_len if appends else 0
    caches.look(given, lambda: jnp.maximum(lengths - reach, 0), lambda: lengths)
    call = Decode(
        problem,
        backend,
        rotary_base=caches.rotary_base_of(rotary_base),
        value_dim=caches.value_dim_of(value_dim),
        paged=caches.page_table is not None,
        appends=appends,
        quantized=caches.quantized,
        latent_rows=caches.latent_rows,
    )

    operands = {
        "q": q,
        "k": caches.key,
        "v": caches.value,
        "lengths": lengths,
        "page_table": caches.page_table,
        **caches.scales,
        **new,
        **terms,
    }
    return call, tuple(operands[name] for name in call.operands)


def problem_of(
    q: jax.Array,
    caches: Caches,
    batch: tuple[int, ...],
    q_len: int,
    *,
    scale: Any,
    local_window_size: Any,
    softcap: Any,
    sinks: Any,
    indices: Any,
    precision: Any,
) -> tuple[jax.Array, Problem, dict[str, jax.Array]]:
    """Checks what says how to attend to caches.

    Returns: the query, which an array of a scale multiplies, the problem and its terms by name.
    """
    q, static_scale = scale_of(scale, q)
    chosen = indices_of(indices, q.shape[:-2])
    terms = order_terms({"sinks": sinks_of(sinks, batch, q.shape[-2], q.dtype), "indices": chosen})
    columns = 1 if caches.page_table is None else caches.page_table.shape[-1]
    problem = Problem(
        dtype=q.dtype.name,
        scale=static_scale,
        window=window_sides(True, local_window_size, q_len + columns * caches.key.shape[-3]),
        bottom_right=True,
        softcap=softcap_of(softcap),
        precision=precision_of(precision, q.dtype),
        terms=tuple(terms),
    )
    return q, problem, terms


def row_lengths(
    name: str, lengths: Any, batch: tuple[int, ...], of: str, shape: tuple[int, ...]
) -> jax.Array:
    """Checks int32 `[*B]` of any integer type, *B that `of` has; below 0 counts as 0."""
    if lengths is None:
        raise TypeError(f"{name} is None; expected int32 [*B] = {batch}, one for each batch row")
    lengths = integers(name, lengths, 0)
    if lengths.shape != batch:
        hint = ""
        if lengths.ndim == len(batch) + 1:
            hint = f". If {of} is one position [*B, N, H], pass {of}[..., None, :, :]"
        raise ValueError(
            f"{name} has shape {lengths.shape}; expected [*B] = {batch}, one for each batch row of "
            f"{of} {shape}{hint}"
        )
    return lengths


def _cache(name: str, x: Any) -> jax.Array:
    x = array(name, x)
    if x.dtype == jnp.uint8 and not is_packed(x):
        raise ValueError(
            f"{name} has dtype uint8 and shape {x.shape}; expected rows as pack_latent gives them, "
            f"{_latent_rows.BYTES} bytes each"
        )
    if x.dtype.name not in (*FLOATS, *QUANTIZED, "uint8"):
        raise TypeError(
            f"{name} has dtype {x.dtype} (shape {x.shape}); expected one of {', '.join(FLOATS)}, "
            f"with scales {' or '.join(QUANTIZED)}, or uint8 as pack_latent gives it"
        )
    if x.ndim < 3 or x.shape[-1] == 0:
        raise ValueError(f"{name} has shape {x.shape}; expected {_LETTERS}")
    check_head_dim(name, x)
    return x


def _check_packed(names: tuple[str, str], key: jax.Array, value: Any, key_scale: Any) -> None:
    """Checks what stands beside packed rows of latent attention."""
    if value is not None:
        raise ValueError(
            f"{names[1]} is given and {names[0]} has packed rows {key.shape}; expected None: the "
            f"values are the first {_latent_rows.VALUE_DIM} features of these"
        )
    if key.shape[-2] != 1:
        raise ValueError(
            f"{names[0]} has shape {key.shape}; expected one kv head of packed rows, "
            f"[..., 1, {_latent_rows.BYTES}]"
        )
    if key_scale is not None:
        raise ValueError(
            f"key_scale is given and {names[0]} has packed rows, which hold their scales; expected "
            "None"
        )


def _scale(name: str, x: Any, of: str, cache: jax.Array | None, paged: bool) -> jax.Array | None:
    """Checks a scale of a cache of this name: returns `[*B or 1s, K]` or `[P or 1, K]`, or None."""
    if cache is None or cache.dtype.name not in QUANTIZED:
        if x is not None:
            has = "None" if cache is None else f"of {cache.dtype}"
            raise ValueError(
                f"{name} is given and {of} is {has}; expected None, or a {of} of "
                f"{' or '.join(QUANTIZED)}"
            )
        return None
    rows = cache.shape[:1] if paged else cache.shape[:-3]
    whole = (*rows, cache.shape[-2])
    shapes = f"[K] = {whole[-1:]} or {'[P, K]' if paged else '[*B, K]'} = {whole}"
    if x is None:
        raise TypeError(
            f"{of} has dtype {cache.dtype} and {name} is None; expected float32 {shapes}: keys and "
            "values are what is stored times their scales"
        )
    x = array(name, x)
    if x.dtype.name not in FLOATS:
        raise TypeError(f"{name} has dtype {x.dtype} (shape {x.shape}); expected float32")
    if x.shape not in ((), whole[-1:], whole):
        raise ValueError(f"{name} has shape {x.shape}; expected {shapes}, or one number")
    x = x.astype(jnp.float32)
    return x if x.shape == whole else jnp.broadcast_to(x, (*(1,) * len(rows), whole[-1]))


def integers(name: str, x: Any, least: int) -> jax.Array:
    """Converts integers of any type to int32; what is too large for it stays large."""
    x = in_full(x)
    if isinstance(x, jax.Array | np.ndarray) and x.dtype.name in ("uint32", "int64", "uint64"):
        x = x.clip(None if x.dtype.kind == "u" else least, _MOST_INT32)
    x = array(name, x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name} has dtype {x.dtype} (shape {x.shape}); expected int32")
    return jnp.maximum(x.astype(jnp.int32), least)


def prepare_rotation(
    x: Any, rotary_base: Any, positions: Any
) -> tuple[jax.Array, jax.Array, float]:
    """Checks the arguments of `rotate`.

    Returns: x, its positions, int32 of any shape that broadcasts to `[*B, T]`, and the base.

    Raises: TypeError or ValueError with the argument's name, what it is and what would be right.
    """
    x = array("x", x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x has dtype {x.dtype} (shape {x.shape}); expected a floating one")
    if x.ndim < 3:
        raise ValueError(f"x has shape {x.shape}; expected [*B, T, N, H]")
    base = _rotary_base(rotary_base, x.shape[-1], "a number above 0")
    rows = x.shape[:-2]
    if positions is None:
        return x, jnp.arange(rows[-1], dtype=jnp.int32), base
    positions = integers("positions", positions, -_MOST_INT32)
    full = (1,) * (len(rows) - positions.ndim) + positions.shape
    if len(full) != len(rows) or any(
        have not in (1, want) for have, want in zip(full, rows, strict=True)
    ):
        raise ValueError(
            f"positions has shape {positions.shape}; expected [*B, T] = {rows} or a shape that "
            f"broadcasts to it, one for each of x {x.shape}"
        )
    return x, positions, base


def _rotary_base(base: Any, head_dim: int, expected: str) -> float:
    if isinstance(base, bool) or not isinstance(base, numbers.Real):
        raise TypeError(f"rotary_base is {base!r}; expected {expected}")
    base = real("rotary_base", base)
    if base <= 0:
        raise ValueError(f"rotary_base is {base!r}; expected {expected}")
    if head_dim % 2:
        raise ValueError(f"rotary_base is given for head dim {head_dim}; expected an even one")
    return base
