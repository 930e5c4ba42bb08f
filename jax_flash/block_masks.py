"""Block masks: which keys each query sees, as blocks that are empty, partial or full.

A `BlockMask` goes to `flash_attention(..., block_mask=m)`. Kernels never load its empty blocks,
test no score of its full ones, and read one bit for each score of its partial ones, whose number
is all that its memory grows with. `masks.py` has functions to make them of.

The value and its forms are here. Read next: `_block_grid.py` for how a function is evaluated,
`_block_arrays.py` for what is stored.

Dao et al., FlashAttention (arXiv:2205.14135), section 3.3: "Block-Sparse FlashAttention".
"""

import dataclasses
import json
import numbers as abstract
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.typing import ArrayLike

from jax_flash import _simplify
from jax_flash._block_arrays import (
    EMPTY,
    FULL,
    WORD,
    picture,
    states_of,
    window_ends,
    words_at,
    write_out,
)
from jax_flash._block_grid import Grid, program
from jax_flash._function import trace
from jax_flash._keywords import hinted
from jax_flash._windows import Window, window_of
from jax_flash.masks import Mask

_ARGUMENTS = {"batch": "int32", "head": "int32", "query": "int32", "key": "int32"}

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
        return 0 not in states_of(self) if self.is_form else self.bits.shape[-3] == 0

    @property
    def density(self) -> Any:
        """The part of the blocks that are not empty, and of dense attention's time: a float.

        Under jit a jax.Array, but for a form.
        """
        if self.is_form:
            return float(np.mean(states_of(self) != EMPTY))
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
        numbers, bits = map(jnp.asarray, write_out(self))
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
        numbers = states_of(self) if self.is_form else _stored(self)[0]
        if isinstance(numbers, jax.core.Tracer) or not isinstance(numbers, jax.Array | np.ndarray):
            return f"{text}, numbers={numbers!r})"
        shape = list(numbers.shape)
        text += f", blocks={shape}, density={self.density:.3g})"
        return text if 0 in shape else f"{text}\n{picture(np.asarray(numbers))}"


def _written(place: int, name: str) -> property:
    """Makes a field that a form stores None in, and writes out for who reads it."""

    def read(mask: BlockMask) -> jax.Array:
        own = mask.__dict__[name]
        return jnp.asarray(write_out(mask)[place]) if own is None else own

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
    grid = Grid(function, q_len, kv_len, block, rows, planes)
    states, is_window = program(Grid.states, grid)(window_ends(window), *arrays)
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
    if not isinstance(masks, Iterable):
        raise TypeError(f"masks is {type(masks).__name__}; expected a sequence of BlockMasks")
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


def _chunk_of(states: np.ndarray, q_len: int, kv_len: int, block: int) -> int | None:
    """Finds the length of equal chunks whose queries see their own keys: all, and no others."""
    count = int(np.sum(states[0, 0, 0] == FULL))  # blocks of the first chunk
    blocks = states.shape[-1]
    if q_len != kv_len or count in (0, blocks) or q_len % (count * block):
        return None
    mask = _form(q_len, kv_len, block, chunk=count * block)
    return mask.chunk if (states == states_of(mask)).all() else None


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
