"""Block masks: which keys each query sees, as blocks that are empty, partial or full.

A `BlockMask` goes to `flash_attention(..., block_mask=m)`. Kernels never load its empty blocks,
test no score of its full ones, and read one bit for each score of its partial ones, whose number
is all that its memory grows with. `masks.py` has functions to make them of.

Dao et al., FlashAttention (arXiv:2205.14135), section 3.3: "Block-Sparse FlashAttention".
"""

import dataclasses
import functools
import json
import math
import numbers as abstract
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.typing import ArrayLike

from jax_flash import _simplify
from jax_flash._function import Function, trace
from jax_flash._keywords import hinted
from jax_flash._varying import vary_over
from jax_flash._windows import Window, window_of
from jax_flash.masks import Mask

# What `BlockMask.numbers` has of a block that is not partial; 0 and more number partial ones.
EMPTY, FULL = -2, -1
WORD = 16  # keys of a word of bits: tiles of kernels start at any multiple of it
_MOST_PAIRS = 2**20  # that are evaluated at once where partial blocks are
_FAR = 2**30  # farther apart than any query and key of a window
_ARGUMENTS = {"batch": "int32", "head": "int32", "query": "int32", "key": "int32"}
_PICTURE = 64  # rows and columns of the largest picture

MaskMod = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], Any]


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class BlockMask:
    """Which keys each query sees, by blocks; `block_mask` and `block_mask_of` make it.

    A pytree: it passes through jit, vmap, scan, remat and shard_map, and may be an argument or a
    constant. Blocks count by index, from query 0 and key 0. A head or batch dim of 1, or none,
    means that all share it. For shard_map `dataclasses.replace(m, numbers=spec, bits=spec)` is a
    tree of specs: the batch splits both arrays, the heads `numbers` alone.

    It stores either arrays or a form, `window` or `chunk`, which says the same: a form has no
    leaves, and attention reads no blocks of it. `as_blocks` makes the arrays of a form leaves;
    `stack_block_masks` brings masks of several layers to one.

    Attributes:
      numbers: int32 `[*B, N or 1, ceil(T / block), ceil(S / block)]`: of an empty block -2, of a
        full one -1, else where its bits are. Written out of a form.
      bits: uint16 `[*B, C, block, block / 16]`: of partial blocks, bit i of word w of a query is
        the key 16 w + i of the block. C is their number, 0 of a layout. Written out of a form.
      q_len, kv_len: T and S; None: any of so many blocks.
      block: queries and keys of a block.
      window: how many keys a query sees before and after its own index (None: all), where
        `block_mask` found its function to be such a window, else None; None beside arrays.
      chunk: queries of a chunk, where `block_mask` found T = S to be equal chunks, as documents of
        one length are, of which a query sees all keys of its own and no others; else None; None
        beside arrays.
    """

    numbers: jax.Array
    bits: jax.Array
    q_len: int | None
    kv_len: int | None
    block: int
    window: Window | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        numbers, bits = _stored(self)
        if isinstance(numbers, jax.Array | np.ndarray) or isinstance(bits, jax.Array | np.ndarray):
            self.__dict__.update(window=None, chunk=None)  # of what dataclasses.replace changed

    @property
    def is_form(self) -> bool:
        """Whether it is a window or chunks, and stores no arrays."""
        return self.window is not None or self.chunk is not None

    @property
    def is_layout(self) -> bool:
        """Whether no block is partial."""
        return 0 not in _states_of(self) if self.is_form else self.bits.shape[-3] == 0

    @property
    def density(self) -> Any:
        """The part of the blocks that are not empty, and of dense attention's time: a float.

        Under jit a jax.Array, but for a form.
        """
        if self.is_form:
            return float(np.mean(_states_of(self) != EMPTY))
        density = jnp.mean(self.numbers != EMPTY, dtype=jnp.float32)
        return density if isinstance(density, jax.core.Tracer) else float(density)

    def as_blocks(self) -> "BlockMask":
        """Writes a form out as arrays, which may be changed; masks that have arrays stay.

        Examples:
          >>> import jax, jax_flash
          >>> m = jax_flash.block_mask(jax_flash.masks.causal(), q_len=64, kv_len=64, block=32)
          >>> m.window, len(jax.tree.leaves(m))
          ((None, 0), 0)
          >>> blocks = m.as_blocks()
          >>> blocks.window, len(jax.tree.leaves(blocks))
          (None, 2)
        """
        if not self.is_form:
            return self
        numbers, bits = map(jnp.asarray, _write_out(self))
        return BlockMask(numbers, bits, self.q_len, self.kv_len, self.block)

    def dense(self) -> jax.Array:
        """Writes the mask out: bool `[*B, N or 1, T, S]`, whose memory grows with T x S.

        Examples:
          >>> import jax_flash
          >>> m = jax_flash.block_mask(jax_flash.masks.causal(), q_len=64, kv_len=64, block=32)
          >>> int(m.dense().sum())
          2080
        """
        blocks = self.as_blocks()
        numbers, bits = blocks.numbers, blocks.bits
        rows, columns = (n * self.block for n in numbers.shape[-2:])
        query = jnp.arange(rows if self.q_len is None else self.q_len, dtype=jnp.int32)[:, None]
        key = jnp.arange(columns if self.kv_len is None else self.kv_len, dtype=jnp.int32)[None, :]
        number = numbers[..., query // self.block, key // self.block]
        word = words_at(bits, number, query % self.block, key % self.block // WORD)
        bit = (key % WORD).reshape(*(1 for _ in word.shape[:-1]), -1)
        return jnp.where(number < 0, number == FULL, (word >> bit) & 1 == 1)

    def __repr__(self) -> str:
        text = f"BlockMask(q_len={self.q_len}, kv_len={self.kv_len}, block={self.block}"
        numbers = _states_of(self) if self.is_form else _stored(self)[0]
        if isinstance(numbers, jax.core.Tracer) or not isinstance(numbers, jax.Array | np.ndarray):
            return f"{text}, numbers={numbers!r})"
        shape = list(numbers.shape)
        text += f", blocks={shape}, density={self.density:.3g})"
        return text if 0 in shape else f"{text}\n{_picture(np.asarray(numbers))}"


def _written(place: int, name: str) -> property:
    """Makes a field that a form stores None in, and writes out for who reads it."""

    def read(mask: BlockMask) -> jax.Array:
        own = mask.__dict__[name]
        return jnp.asarray(_write_out(mask)[place]) if own is None else own

    return property(read, lambda mask, value: mask.__dict__.update({name: value}))


for _place, _name in enumerate(("numbers", "bits")):
    setattr(BlockMask, _name, _written(_place, _name))


def _stored(mask: BlockMask) -> tuple[Any, Any]:
    """Returns numbers and bits, None of a form."""
    return mask.__dict__["numbers"], mask.__dict__["bits"]


def _form(q_len: int, kv_len: int, block: int, **form: Any) -> BlockMask:
    none: Any = None
    return BlockMask(none, none, q_len, kv_len, block, **form)


def _sizes(mask: BlockMask) -> tuple[Any, ...]:
    return mask.q_len, mask.kv_len, mask.block, mask.window, mask.chunk


_KEYS = tuple(map(jax.tree_util.GetAttrKey, ("numbers", "bits")))

jax.tree_util.register_pytree_with_keys(
    BlockMask,
    lambda mask: (tuple(zip(_KEYS, _stored(mask), strict=True)), _sizes(mask)),
    lambda sizes, arrays: BlockMask(*arrays, *sizes),
    lambda mask: (_stored(mask), _sizes(mask)),
)
export.register_pytree_node_serialization(
    BlockMask,
    serialized_name="jax_flash.BlockMask",
    serialize_auxdata=lambda sizes: json.dumps(sizes).encode(),
    deserialize_auxdata=lambda text: _hashable(json.loads(bytes(text))),
)


@hinted
def block_mask(
    mask_mod: MaskMod,
    *,
    q_len: int,
    kv_len: int,
    batch: int | None = None,
    heads: int | None = None,
    block: int = 128,
) -> BlockMask:
    """Makes a block mask of a function of indices.

    Made on the device, a row of blocks at a time, in time that grows with q_len x kv_len; make it
    once and use it for all layers and steps. Outside of jit and vmap its memory is 2 KB for each
    partial block of 128 x 128, of equal ones one alone (4 bytes for all others); masks of one size
    whose functions differ in numbers and arrays alone are made by one compiled program. Where it is
    traced, the number of partial blocks is not known and there is room for all of them: batch x
    heads x q_len x kv_len / 8 bytes.

    Arguments:
      mask_mod: `mask_mod(batch, head, query, key) -> bool` of int32 scalars, True where the query
        sees the key; any JAX function, which may close over arrays, traced or not, and is traced
        anew in each call. `jax_flash.masks` has common ones.
      q_len, kv_len: T and S.
      batch: batch rows B, if the mask differs between them; None: mask_mod gets batch 0 for all.
      heads: query heads N, if it differs between those; None: mask_mod gets head 0 for all.
      block: queries and keys of a block, a multiple of 16; 128 and 64 fit the kernels best.

    Returns:
      a BlockMask of numbers `[B, N or 1, ceil(T / block), ceil(S / block)]`, without batch
      `[N or 1, ...]`.

    Raises:
      TypeError, ValueError: a wrong argument, with what would be right.

    Examples:
      >>> import jax, jax_flash
      >>> from jax_flash import masks
      >>> m = jax_flash.block_mask(
      ...     masks.causal() & masks.sliding_window(200), q_len=1024, kv_len=1024
      ... )
      >>> round(m.density, 3)
      0.328
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 1024, 4, 64))
      >>> jax_flash.flash_attention(q, k, v, block_mask=m).shape
      (2, 1024, 4, 64)
    """
    if not callable(mask_mod):
        raise TypeError(
            f"mask_mod is {type(mask_mod).__name__}; expected a function of (batch, head, query, "
            "key); jax_flash.block_mask_of takes a layout of blocks"
        )
    q_len, kv_len = _size("q_len", q_len), _size("kv_len", kv_len)
    for name, size in mask_mod.sizes.items() if isinstance(mask_mod, Mask) else ():
        given = {"q_len": q_len, "kv_len": kv_len, "batch": batch}[name]
        if given != size:
            raise ValueError(
                f"{name} is {given} and mask_mod reads arrays whose {name} is {size}; expected "
                f"{name}={size}"
            )
    rows = 1 if batch is None else _size("batch", batch)
    planes = 1 if heads is None else _size("heads", heads)
    block = _block(block)
    function, captured = trace("mask_mod", mask_mod, _ARGUMENTS, "bool", differentiable=False)
    rewrites = not _simplify.is_as_written()
    window = window_of(function, q_len, kv_len) if rewrites else None
    # Numbers are arrays, too: masks that differ in them alone are made by one program.
    function, constants = function.with_numbers()
    arrays = [lax.stop_gradient(x) for x in captured] + constants
    grid = _Grid(function, q_len, kv_len, block, rows, planes)
    states, is_window = _program(_Grid.states, grid)(_ends(window), *arrays)
    whole = ... if batch is not None else 0
    if isinstance(states, jax.core.Tracer):
        if window is not None:
            return _form(q_len, kv_len, block, window=window)
        numbers, bits = (x[whole] for x in grid.with_all_bits(*arrays))
        return BlockMask(numbers, bits, q_len, kv_len, block)
    states = np.array(states)
    chunk = _chunk_of(states, q_len, kv_len, block) if rewrites else None
    window = window if is_window else None
    if window is not None or chunk is not None:
        return _form(q_len, kv_len, block, window=window, chunk=chunk)
    # To jnp.asarray each number of bits would be a program to compile.
    numbers, bits = (jax.device_put(x[whole]) for x in grid.with_bits(states, arrays))
    return BlockMask(numbers, bits, q_len, kv_len, block)


def block_mask_of(
    layout: ArrayLike, *, block: int = 128, q_len: int | None = None, kv_len: int | None = None
) -> BlockMask:
    """Makes a block mask of which blocks are full, as the FlashAttention paper has them.

    Arguments:
      layout: bool `[*B or 1, N or 1, ceil(T / block), ceil(S / block)]`, True where the block's
        queries see its keys; the dims in front of the last two may be missing. It may be traced.
      block: queries and keys of a block, a multiple of 16.
      q_len, kv_len: T and S; None: any of so many blocks.

    Returns: a BlockMask without partial blocks.

    Raises:
      TypeError, ValueError: a wrong argument, with what would be right.

    Examples:
      >>> import jax_flash
      >>> m = jax_flash.block_mask_of(jax_flash.masks.butterfly(8), q_len=1024, kv_len=1024)
      >>> m
      BlockMask(q_len=1024, kv_len=1024, block=128, blocks=[1, 8, 8], density=0.5)
      ███·█···
      ██·█·█··
      █·██··█·
      ·███···█
      █···███·
      ·█··██·█
      ··█·█·██
      ···█·███
    """
    try:
        layout = jnp.asarray(layout)
    except (TypeError, ValueError) as error:
        raise TypeError(f"layout is {type(layout).__name__}; expected an array of bool") from error
    if layout.dtype != jnp.bool_:
        raise TypeError(f"layout has dtype {layout.dtype} (shape {layout.shape}); expected bool")
    if layout.ndim < 2 or 0 in layout.shape[-2:]:
        raise ValueError(
            f"layout has shape {layout.shape}; expected [*B or 1, N or 1, ceil(T / block), "
            "ceil(S / block)]"
        )
    block = _block(block)
    q_len, kv_len = (
        None if size is None else _size(name, size)
        for name, size in (("q_len", q_len), ("kv_len", kv_len))
    )
    for name, size, count in zip(
        ("q_len", "kv_len"), (q_len, kv_len), layout.shape[-2:], strict=True
    ):
        if size is not None and -(-size // block) != count:
            raise ValueError(
                f"layout has shape {layout.shape}; expected {-(-size // block)} blocks of {block} "
                f"for {name} {size}, not {count}"
            )
    if layout.ndim == 2:
        layout = layout[None]
    numbers = jnp.where(layout, FULL, EMPTY).astype(jnp.int32)
    bits = jnp.zeros((*(1 for _ in layout.shape[:-3]), 0, block, block // WORD), jnp.uint16)
    return BlockMask(numbers, bits, q_len, kv_len, block)


def stack_block_masks(masks: Sequence[BlockMask]) -> BlockMask:
    """Stacks masks of several layers, whatever each was made of, for a scan over the layers.

    One of them, under jit too, is `jax.tree.map(lambda x: x[i], stacked)`, where lax.cond would
    choose between two.

    Arguments:
      masks: of one q_len, kv_len and block; batch and head dims that broadcast.

    Returns:
      a BlockMask whose arrays have one more dim in front, and as many bits as the mask with the
      most; of masks of one form that form, which has no arrays.

    Raises:
      TypeError, ValueError: a wrong argument, with what would be right.

    Examples:
      >>> import jax, jax_flash
      >>> from jax_flash import masks
      >>> m = jax_flash.stack_block_masks(
      ...     [
      ...         jax_flash.block_mask(f, q_len=64, kv_len=64, block=32)
      ...         for f in (masks.causal(), masks.sliding_window(9), masks.prefix_lm(5))
      ...     ]
      ... )
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 64, 4, 16))
      >>> def layer(x, mask):
      ...     return x + jax_flash.flash_attention(x, k, v, block_mask=mask), None
      >>> jax.lax.scan(layer, q, m)[0].shape
      (2, 64, 4, 16)
    """
    masks = list(masks)
    for i, mask in enumerate(masks):
        if not isinstance(mask, BlockMask):
            raise TypeError(f"masks[{i}] is {type(mask).__name__}; expected a BlockMask")
        sizes, first = ((m.q_len, m.kv_len, m.block) for m in (mask, masks[0]))
        if sizes != first:
            raise ValueError(
                f"masks[{i}] has q_len {sizes[0]}, kv_len {sizes[1]} and block {sizes[2]}; "
                f"expected those of masks[0]: {first[0]}, {first[1]} and {first[2]}"
            )
    if not masks:
        raise ValueError("masks is empty; expected one or more")
    if all(m.is_form and (m.window, m.chunk) == (masks[0].window, masks[0].chunk) for m in masks):
        return masks[0]
    numbers, bits = zip(*(_stored(m.as_blocks()) for m in masks), strict=True)
    most = max(x.shape[-3] for x in bits)
    none = np.zeros((), np.uint16)
    bits = [
        lax.pad(
            x, none, [*[(0, 0, 0)] * (x.ndim - 3), (0, most - x.shape[-3], 0), *[(0, 0, 0)] * 2]
        )
        for x in bits
    ]
    numbers, bits = (jnp.stack(jnp.broadcast_arrays(*x)) for x in (numbers, bits))
    return BlockMask(numbers, bits, masks[0].q_len, masks[0].kv_len, masks[0].block)


def words_at(bits: jax.Array, number: jax.Array, row: jax.Array, word: jax.Array) -> jax.Array:
    """Reads words of bits.

    Arguments:
      bits: uint16 `[*B, C, block, words]`, any of *B 1.
      number: int32 `[*B, ..., t, w]`, any of *B 1; below 0: any word.
      row, word: int32, which broadcast to `[t, w]`.

    Returns: int32 of number's shape, its *B those of both.
    """
    *leading, stored, _, _ = bits.shape
    if stored == 0:
        return jnp.zeros(jnp.broadcast_shapes(number.shape, row.shape, word.shape), jnp.int32)
    rank = number.ndim
    own = [
        jnp.arange(size, dtype=jnp.int32).reshape(
            *(size if axis == i else 1 for i in range(len(leading))),
            *(1 for _ in range(rank - len(leading))),
        )
        for axis, size in enumerate(leading)
    ]
    ones = (1,) * (rank - 2)
    row, word = (x.astype(jnp.int32).reshape(*ones, *x.shape) for x in (row, word))
    index = (*own, jnp.maximum(number, 0), row, word)
    # A leading dim that is 1 in bits is 0 in the index of all: broadcast by indexing.
    return bits[index].astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class _Grid:
    """The blocks of a mask that is to be made, and how to evaluate them.

    Arrays are those that the function reads.
    """

    function: Function
    q_len: int
    kv_len: int
    block: int
    batch: int
    heads: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        rows, columns = (-(-size // self.block) for size in (self.q_len, self.kv_len))
        return self.batch, self.heads, rows, columns

    def pairs(self, query_block, first_key, keys: int) -> tuple[jax.Array, jax.Array]:
        """Lists the queries of a block, [block, 1], and `keys` keys, [1, keys]."""
        query = query_block * self.block + jnp.arange(self.block, dtype=jnp.int32)
        key = first_key + jnp.arange(keys, dtype=jnp.int32)
        return query[:, None], key[None, :]

    def there(self, query: jax.Array, key: jax.Array) -> jax.Array:
        return (query < self.q_len) & (key < self.kv_len)

    def seen(self, batch, head, query: jax.Array, key: jax.Array, arrays) -> jax.Array:
        """Evaluates all pairs of queries [block, 1] and keys [1, keys]."""
        query, key = jnp.minimum(query, self.q_len - 1), jnp.minimum(key, self.kv_len - 1)

        def of_pair(query, key):
            scalars = vary_over([batch, head, query, key, *arrays], [batch, *arrays])
            return self.function.program.apply(scalars)[0]

        by_pair = jax.vmap(jax.vmap(of_pair, in_axes=(None, 0)), in_axes=(0, None))
        return jnp.broadcast_to(by_pair(query[:, 0], key[0]), (query.size, key.size))

    def row(self, number, ends, arrays) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Evaluates a row of blocks.

        Returns:
          whether they are empty, full or else 0; whether they are the window of these ends; their
          bits.
        """
        *outer, count = self.shape
        batch, head, query_block = jnp.unravel_index(number, outer)
        query, key = self.pairs(query_block, jnp.int32(0), count * self.block)
        seen, there = self.seen(batch, head, query, key, arrays), self.there(query, key)
        low, high = ends
        near = (key - query >= low) & (key - query <= high)

        def by_block(x):
            return x.reshape(self.block, count, self.block)

        shown = jnp.any(by_block(seen & there), axis=(0, 2))
        whole = jnp.all(by_block(seen | ~there), axis=(0, 2))
        states = jnp.where(whole, FULL, jnp.where(shown, 0, EMPTY)).astype(jnp.int32)
        bits = jnp.moveaxis(_pack(by_block(seen & there)), 1, 0)
        return states, jnp.all((seen == near) | ~there), bits

    def rows(self, function: Callable[[jax.Array], Any]) -> Any:
        """Maps a function over the rows of blocks, one at a time."""
        return lax.map(function, jnp.arange(math.prod(self.shape[:3]), dtype=jnp.int32))

    def states(self, ends, *arrays) -> tuple[jax.Array, jax.Array]:
        """Tells which blocks are empty, full or partial, and whether the mask is the window."""
        states, is_window = self.rows(lambda i: self.row(i, ends, arrays)[:2])
        return states.reshape(self.shape), jnp.all(is_window)

    def with_all_bits(self, *arrays) -> tuple[jax.Array, jax.Array]:
        """Computes numbers and bits with room for all blocks."""
        states, _, bits = self.rows(lambda i: self.row(i, _ends(None), arrays))
        batch, *counts = self.shape
        own = jnp.arange(math.prod(counts), dtype=jnp.int32).reshape(1, *counts)
        states = states.reshape(self.shape)
        numbers = jnp.where(states < 0, states, jnp.broadcast_to(own, self.shape))
        return numbers, bits.reshape(batch, -1, *bits.shape[-2:])

    def some_bits(self, at: jax.Array, *arrays) -> jax.Array:
        """Computes the bits of blocks at [number, 4]."""

        def of_block(at):
            batch, head, query_block, key_block = at
            query, key = self.pairs(query_block, key_block * self.block, self.block)
            seen = self.seen(batch, head, query, key, arrays)
            return _pack(seen & self.there(query, key))

        return jax.vmap(of_block)(at)

    def with_bits(self, states: np.ndarray, arrays) -> tuple[np.ndarray, np.ndarray]:
        """Computes numbers and bits of the partial blocks, those of a batch row that differ."""
        partial = np.argwhere(states == 0).astype(np.int32)
        at_once = min(max(1, _MOST_PAIRS // self.block**2), states.size)
        numbers, kept = states.copy(), [{} for _ in range(self.batch)]
        for first in range(0, len(partial), at_once):
            # As many blocks in each call, whatever their number: one program for all masks.
            some = np.resize(partial[first : first + at_once], (at_once, 4))
            bits = np.asarray(_program(_Grid.some_bits, self)(some, *arrays))
            for at, own in zip(map(tuple, partial[first : first + at_once]), bits, strict=False):
                numbers[at] = kept[at[0]].setdefault(own.tobytes(), len(kept[at[0]]))
        most = max(map(len, kept))  # 0: a layout, which kernels have a walk of their own for
        size = self.block, self.block // WORD
        stored = np.zeros((self.batch, most, *size), np.uint16)
        for row, blocks in enumerate(kept):
            for number, own in enumerate(blocks):
                stored[row, number] = np.frombuffer(own, np.uint16).reshape(size)
        return numbers, stored


@functools.lru_cache(maxsize=16)  # of some 2 MB; JAX would keep thousands
def _program(method: Callable[..., Any], grid: _Grid) -> Callable[..., Any]:
    """Compiles a method of a grid. Grids are equal where their functions compute the same."""
    return jax.jit(functools.partial(method, grid))


def _ends(window: Window | None) -> np.ndarray:
    """Returns the least and the largest distance that a window shows."""
    left, right = window or (None, None)
    return np.array([-_FAR if left is None else -left, _FAR if right is None else right], np.int32)


def _chunk_of(states: np.ndarray, q_len: int, kv_len: int, block: int) -> int | None:
    """Finds the length of equal chunks whose queries see their own keys: all, and no others."""
    count = int(np.sum(states[0, 0, 0] == FULL))  # blocks of the first chunk
    blocks = states.shape[-1]
    if q_len != kv_len or count in (0, blocks) or q_len % (count * block):
        return None
    mask = _form(q_len, kv_len, block, chunk=count * block)
    return mask.chunk if (states == _states_of(mask)).all() else None


def _lengths(form: BlockMask) -> tuple[int, int]:
    """Returns T and S of a form, which has both."""
    if form.q_len is None or form.kv_len is None:
        raise ValueError("a BlockMask of a window or chunks lacks q_len or kv_len; expected both")
    return form.q_len, form.kv_len


def _states_of(form: BlockMask) -> np.ndarray:
    """Writes a form out: which blocks `[1, blocks, blocks]` are empty, full or else 0."""
    lengths = _lengths(form)
    first_query, first_key = (np.arange(0, n, form.block) for n in lengths)
    last_query = np.minimum(first_query + form.block, lengths[0]) - 1
    last_key = np.minimum(first_key + form.block, lengths[1]) - 1
    if form.chunk is not None:
        own = first_query[:, None] // form.chunk == first_key // form.chunk
        return np.where(own, FULL, EMPTY)[None]
    low, high = _ends(form.window)
    least, most = first_key - last_query[:, None], last_key - first_query[:, None]
    shown, whole = (least <= high) & (most >= low), (least >= low) & (most <= high)
    return np.where(whole, FULL, np.where(shown, 0, EMPTY))[None]


def _write_out(form: BlockMask) -> tuple[np.ndarray, np.ndarray]:
    """Writes a form out as numbers and bits."""
    if not form.is_form:
        raise ValueError("a BlockMask lacks numbers or bits; expected both, or a window or a chunk")
    numbers, block = _states_of(form).astype(np.int32), form.block
    q_len, kv_len = _lengths(form)
    low, high = _ends(form.window)
    index = np.arange(block)
    kept: dict[bytes, int] = {}
    for at in map(tuple, np.argwhere(numbers == 0)):
        query, key = at[1] * block + index[:, None], at[2] * block + index
        seen = (key - query >= low) & (key - query <= high)
        seen &= (query < q_len) & (key < kv_len)
        packed = np.packbits(seen, axis=-1, bitorder="little").tobytes()
        numbers[at] = kept.setdefault(packed, len(kept))
    bits = np.frombuffer(b"".join(kept), np.dtype("<u2")).astype(np.uint16)
    return numbers, bits.reshape(-1, block, block // WORD)


def _pack(seen: jax.Array) -> jax.Array:
    """Packs bool `[..., keys]` into uint16 `[..., keys / 16]`."""
    parts = seen.reshape(*seen.shape[:-1], -1, WORD).astype(jnp.uint16)
    bit = lax.broadcasted_iota(jnp.uint16, parts.shape, parts.ndim - 1)
    return jnp.sum(parts << bit, axis=-1, dtype=jnp.uint16)


def _hashable(x: Any) -> Any:
    """Turns lists, as JSON has them, into tuples."""
    return tuple(map(_hashable, x)) if isinstance(x, list) else x


def _size(name: str, x: Any) -> int:
    if isinstance(x, bool) or not isinstance(x, abstract.Integral):
        raise TypeError(f"{name} is {x!r}; expected an int")
    if x < 1:
        raise ValueError(f"{name} is {x}; expected 1 or more")
    return int(x)


def _block(block: Any) -> int:
    block = _size("block", block)
    if block % WORD:
        raise ValueError(f"block is {block}; expected a multiple of {WORD}, such as 128 or 64")
    return block


def _picture(numbers: np.ndarray) -> str:
    """Draws the blocks of the first batch row and head, several as one where there are many."""
    *leading, rows, columns = numbers.shape
    plane = numbers.reshape(-1, rows, columns)[0]
    step = -(-max(rows, columns) // _PICTURE)
    lines = []
    for i in range(0, rows, step):
        line = ""
        for j in range(0, columns, step):
            part = plane[i : i + step, j : j + step]
            line += "█" if (part == FULL).all() else "·" if (part == EMPTY).all() else "▒"
        lines.append(line)
    notes = [f"one sign for {step} x {step} blocks"] if step > 1 else []
    count = int(np.prod(leading))
    notes += [f"the first of {count} planes of blocks"] if count > 1 else []
    return "\n".join([*lines, *(f"({note})" for note in notes)])
