"""`debug_values`: the contents of arguments are checked when the program runs.

All other checks look at shapes and dtypes when a call is traced. What would be clipped or come out
as NaN is found here, by NumPy on the host.
"""

import contextlib
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, auto_axes

_INT32 = np.iinfo(np.int32)
# Part of what jit and JAX's other caches remember programs by.
_on = jax.make_user_context(
    default_value=os.environ.get("JAX_FLASH_DEBUG_VALUES", "") not in ("", "0")
)


def debug_values(on: bool = True) -> contextlib.AbstractContextManager[Any]:
    """Checks the contents of lengths, ids, positions and page tables while programs run.

    Without it lengths are clipped, rows that have no place in a cache are NaN, and ids lose their
    upper bits, as the calls document. With it each of these is an error that names the argument,
    the row and what would be right:

    - lengths below 0, or beyond T, S or the cache;
    - pages that do not exist, of positions that are read or written;
    - segment ids and positions that int32 does not hold, and ids that only as int32 are equal;
    - scales of float8 arguments below 0.

    Known arrays raise a ValueError where the call is traced. Under jit the host looks at each
    run, by `jax.debug.callback`: the error is a `jax.errors.JaxRuntimeError` that ends in the
    message, and arrives where JAX waits for a result. Programs are slower, and cannot be exported.
    It holds for what is traced under it, on every backend; jit traces anew where it changes. Under
    vmap and shard_map a row is counted in the member's own, or the device's.

    The environment variable JAX_FLASH_DEBUG_VALUES=1 turns it on for a process.

    Arguments:
      on: False turns it off inside.

    Returns: a context manager.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jax_flash
      >>> x = jnp.ones((2, 16, 4, 8))
      >>> with jax_flash.debug_values():
      ...     try:
      ...         jax_flash.flash_attention(x, x, x, key_value_seq_lengths=jnp.array([16, 40]))
      ...     except ValueError as error:
      ...         print(error)
      key_value_seq_lengths[1] is 40; expected 0 to S = 16
    """
    return _on(bool(on))


def is_on() -> bool:
    return _on.value


def check(find: Callable[..., str | None], *arrays: Any) -> None:
    """Raises a ValueError of what `find` says of NumPy arrays, if `debug_values` is on."""
    if not is_on():
        return

    def look(*arrays: Any) -> None:
        message = find(*map(np.asarray, arrays))
        if message is not None:
            raise ValueError(message)

    arrays = tuple(x if hasattr(x, "dtype") else jnp.asarray(x) for x in arrays)
    if all(map(_is_known, arrays)):
        look(*arrays)
        return

    def call_back(*arrays: Any) -> tuple[()]:
        jax.debug.callback(look, *arrays)
        return ()

    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = tuple(name for name, kind in kinds if kind == AxisType.Explicit)
    if explicit and mesh.manual_axes:  # where JAX has no callbacks
        call_back = jax.jit(auto_axes(call_back, axes=explicit, out_sharding=()))
    call_back(*arrays)


def _is_known(x: Any) -> bool:
    return not isinstance(x, jax.core.Tracer) and getattr(x, "is_fully_addressable", True)


def _first(wrong: np.ndarray) -> tuple[tuple[int, ...], str]:
    """Returns the index of the first True, and a word on how many more there are."""
    index = tuple(int(i) for i in np.argwhere(wrong)[0])
    more = int(wrong.sum()) - 1
    return index, f" (and {more} more)" if more else ""


def _at(name: str, index: tuple[int, ...]) -> str:
    return f"{name}[{', '.join(map(str, index))}]" if index else name


def negative(name: str, x: np.ndarray) -> str | None:
    """Says where scales are below 0, if any is."""
    wrong = x < 0
    if not wrong.any():
        return None
    index, more = _first(wrong)
    return f"{_at(name, index)} is {x[index]}{more}; expected 0 or above"


def check_lengths(name: str, lengths: Any, limit: Any, expected: str) -> None:
    """Checks that lengths `[*B]` are from 0 to limit; `expected` says whose it is."""

    def find(lengths: np.ndarray, limit: np.ndarray) -> str | None:
        wrong = (lengths < 0) | (lengths > limit)
        if not wrong.any():
            return None
        index, more = _first(wrong)
        return f"{_at(name, index)} is {lengths[index]}{more}; expected 0 to {expected}{limit}"

    check(find, lengths, min(limit, _INT32.max) if isinstance(limit, int) else limit)


def check_int32(name: str, what: str, x: Any) -> None:
    """Checks that int32 holds integers of another dtype."""

    def find(x: np.ndarray) -> str | None:
        wrong = (x < _INT32.min) | (x > _INT32.max)
        if not wrong.any():
            return None
        index, more = _first(wrong)
        return f"{_at(name, index)} is {x[index]}{more}; expected {what} of int32"

    check(find, x)


def check_pages(page_table: Any, first: Any, stop: Any, pages: int, page_size: int) -> None:
    """Checks that rows have a page for each of their positions from `first` to before `stop`.

    page_table is `[*B, M]`, first and stop `[*B]`; `check_lengths` says of rows beyond all columns.
    """

    def find(table: np.ndarray, first: np.ndarray, stop: np.ndarray) -> str | None:
        columns = np.arange(table.shape[-1]) * page_size
        needed = (columns < stop[..., None]) & (columns + page_size > first[..., None])
        looked_at = (first < stop) & (stop <= columns.size * page_size)
        wrong = needed & looked_at[..., None] & ((table < 0) | (table >= pages))
        if not wrong.any():
            return None
        index, more = _first(wrong)
        start = index[-1] * page_size
        return (
            f"{_at('page_table', index)} is {table[index]}{more}, the page of positions {start} to "
            f"{start + page_size - 1} of a row that needs {first[index[:-1]]} to "
            f"{stop[index[:-1]] - 1}; expected 0 to P - 1 = {pages - 1}"
        )

    check(find, page_table, first, stop)


def check_requests(lengths: Any, starts: Any, rows: Any, tokens: Any) -> None:
    """Checks where the tokens of live requests begin, and that each has a place in its length.

    lengths is `[B]`, starts `[B + 1]`, rows how many are live; `check_lengths` says the rest.
    """

    def find(
        lengths: np.ndarray, starts: np.ndarray, rows: np.ndarray, tokens: np.ndarray
    ) -> str | None:
        if rows < 0 or rows > lengths.size:
            return f"rows is {rows}; expected 0 to B = {lengths.size}"
        starts = starts[: int(rows) + 1].astype(np.int64)
        least = np.concatenate([[0], starts[:-1]])
        wrong = (starts < least) | (starts > tokens)
        if wrong.any():
            index, more = _first(wrong)
            return (
                f"{_at('query_starts', index)} is {starts[index]}{more}; expected "
                f"{least[index]}, where the request before ends, to tokens = {tokens}"
            )
        count = np.diff(starts)
        wrong = lengths[: count.size] < count
        if not wrong.any():
            return None
        index, more = _first(wrong)
        return (
            f"{_at('lengths', index)} is {lengths[index]}{more}; expected at least the request's "
            f"{count[index]} tokens, which are the last of its positions"
        )

    check(find, lengths, starts, rows, tokens)
