"""Calls of flash_attention as data; conformance_cases.py has the table that every backend is asked.

A case names shapes and features; `Case.draw` turns it into numpy arrays and keyword arguments, the
same for the package (`run`) and for the plain numpy attention (`truth`).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_flash

from . import numpy_oracle
from .numpy_oracle import DTYPES
from .score_functions import SCORES

BOTTOM_RIGHT = "bottom_right"
DROPOUT_SEED = 7
Window = int | tuple[int | None, int | None]


def widest_dtype(backend: str) -> str:
    """A backend's type of cases that ask for none: float32 on "cuda" has tests of its own."""
    return "bfloat16" if backend == "cuda" else "float32"


def fit(case: Case, backend: str) -> Case:
    """The case, in `widest_dtype` where it asks for float32."""
    if case.dtype != "float32":
        return case
    return dataclasses.replace(case, dtype=widest_dtype(backend))


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of flash_attention.

    `bias` and `mask` name the axes they keep of [b, n, t, s]; a 1 in a place broadcasts it.
    """

    name: str
    T: int = 64
    S: int = 64
    N: int = 2
    K: int | None = None  # kv heads, N unless given
    H: int = 32
    Hv: int | None = None  # value dim, H unless given
    batch: tuple[int, ...] = (2,)
    dtype: str = "float32"
    precision: str | None = None
    scale: float | None = None
    causal: bool = False
    align: str = "top_left"
    window: Window | None = None
    bias: str | None = None
    bias_dtype: str | None = None  # the query's unless given
    bias_hides: bool = False  # a third of the bias is -inf
    mask: str | None = None
    mask_density: float = 0.7
    # A block mask: the axes that it keeps of [b, n], and its block. A third of its blocks each are
    # empty, full, partial.
    blocks: tuple[str, int] | None = None
    is_layout: bool = False  # half of its blocks are empty and full each, as block_mask_of has them
    q_lengths: tuple[int, ...] | None = None  # repeated over the batch
    kv_lengths: tuple[int, ...] | None = None
    # "packed" (sorted), "shuffled", "apart" (no pair is equal), "returning" (97 tokens each, in
    # turn), "documents" (of 5 to 150 tokens)
    segments: str | None = None
    # "offset" (each batch row from another place), "permuted", "striped" (every fourth first),
    # "left padding" (hidden at the end of int32), "ties", "extreme" (both ends of int32),
    # "constant"; "queries" and "keys": these alone, 5 places after or before their index
    positions: str | None = None
    softcap: float | None = None
    score: str | None = None  # of SCORES: a function of each score
    sinks: bool = False
    dropout: float = 0.0
    with_lse: bool = False  # lse is returned and has a cotangent
    deterministic: bool = False
    fixed: tuple[str, ...] = ()  # arguments that get no gradient
    spread: float = 1.0  # standard deviation of query: how peaked the softmax is

    @property
    def kv_heads(self) -> int:
        return self.N if self.K is None else self.K

    @property
    def value_dim(self) -> int:
        return self.H if self.Hv is None else self.Hv

    def features(self) -> set[str]:
        """The names under which a backend may refuse the case."""
        has = {self.dtype}
        has |= {"bias"} if self.bias else set()
        has |= {"mask"} if self.mask else set()
        has |= {"sinks"} if self.sinks else set()
        has |= {"dropout"} if self.dropout else set()
        has |= {"score functions"} if self.score else set()
        return has

    def draw(self, seed: int = 0) -> Arguments:
        """Random arrays for the case, the same for the same name and seed."""
        rng = np.random.default_rng([zlib.crc32(self.name.encode()), seed])
        dtype = DTYPES[self.dtype]

        def normal(*shape, like=dtype, by=1.0):
            return (by * rng.standard_normal(shape)).astype(like)

        lead, rows = self.batch, int(np.prod(self.batch))
        arrays: dict[str, np.ndarray] = {
            "query": normal(*lead, self.T, self.N, self.H, by=self.spread),
            "key": normal(*lead, self.S, self.kv_heads, self.H),
            "value": normal(*lead, self.S, self.kv_heads, self.value_dim),
        }

        def broadcast_shape(letters):
            axes = {"n": self.N, "t": self.T, "s": self.S}
            tail = tuple(1 if letter == "1" else axes[letter] for letter in letters[-3:])
            if len(letters) == 3:  # no batch axes at all
                return tail
            return (lead if letters[0] == "b" else (1,) * len(lead)) + tail

        if self.bias:
            bias = normal(
                *broadcast_shape(self.bias), like=DTYPES[self.bias_dtype or self.dtype], by=2.0
            )
            if self.bias_hides:
                bias = np.where(rng.random(bias.shape) < 1 / 3, -np.inf, bias).astype(bias.dtype)
            arrays["bias"] = bias
        if self.mask:
            arrays["mask"] = rng.random(broadcast_shape(self.mask)) < self.mask_density
        for name, lengths in (
            ("query_seq_lengths", self.q_lengths),
            ("key_value_seq_lengths", self.kv_lengths),
        ):
            if lengths is not None:
                arrays[name] = np.resize(np.array(lengths, np.int32), lead)
        if self.segments:
            q_ids, kv_ids = (rng.integers(0, 3, (rows, n)) for n in (self.T, self.S))
            if self.segments == "packed":
                q_ids, kv_ids = np.sort(q_ids), np.sort(kv_ids)
            if self.segments == "apart":
                kv_ids = kv_ids + 5
            if self.segments == "returning":
                q_ids, kv_ids = (
                    np.tile(np.arange(n) // 97 % 3, (rows, 1)) for n in (self.T, self.S)
                )
            if self.segments == "documents":
                ids = np.repeat(np.arange(1000), rng.integers(5, 150, 1000))
                q_ids, kv_ids = (np.tile(ids[:n], (rows, 1)) for n in (self.T, self.S))
            arrays["query_segment_ids"] = q_ids.astype(np.int32).reshape(*lead, self.T)
            arrays["key_value_segment_ids"] = kv_ids.astype(np.int32).reshape(*lead, self.S)
        if self.positions:
            arrays |= self._draw_positions()
        if self.sinks:
            arrays["sinks"] = normal(self.N, like=np.float32)
        if self.score:
            shape = SCORES[self.score].shape(rows, self.N)
            table = np.asarray(normal(*shape, like=np.float32))
            arrays["table"] = np.abs(table) + 2 if self.score == "cap" else table
        options: dict[str, Any] = {
            "scale": self.scale,
            "is_causal": self.causal,
            "causal_align": self.align,
            "local_window_size": self.window,
            "softcap": self.softcap,
            "dropout_rate": self.dropout,
        }
        dout = normal(*lead, self.T, self.N, self.value_dim)
        dlse = normal(*lead, self.T, self.N, like=np.float32) if self.with_lse else None
        return Arguments(self, arrays, options, dout, dlse)

    @functools.cached_property
    def block_mask(self) -> jax_flash.BlockMask | None:
        """The block mask, from a function of indices."""
        if self.blocks is None:
            return None
        axes, block = self.blocks
        kinds = jnp.asarray(self._kinds())
        if self.is_layout:
            lead = self.batch if axes[0] == "b" else kinds.shape[:1]
            layout = (kinds == 2).reshape(*lead, *kinds.shape[1:])
            return jax_flash.block_mask_of(layout, q_len=self.T, kv_len=self.S, block=block)

        def mask_mod(batch, head, query, key):
            kind = kinds[batch, head, query // block, key // block]
            lattice = (7 * query + 3 * key + head + 2 * batch) % 5 < 2
            return (kind == 2) | ((kind == 1) & lattice)

        @jax.jit  # one program, not one for each operation
        def make():
            return jax_flash.block_mask(
                mask_mod,
                q_len=self.T,
                kv_len=self.S,
                batch=kinds.shape[0] if axes[0] == "b" else None,
                heads=self.N if axes[1] == "n" else None,
                block=block,
            )

        m = make()
        if axes[0] != "b":
            return m
        numbers, bits = (x.reshape(*self.batch, *x.shape[1:]) for x in (m.numbers, m.bits))
        return dataclasses.replace(m, numbers=numbers, bits=bits)

    @property
    def blocks_seen(self) -> np.ndarray | None:
        """What the block mask lets see: bool [*B or 1s, N or 1, T, S]."""
        if self.blocks is None:
            return None
        _, block = self.blocks
        kinds = self._kinds()
        kinds = np.repeat(np.repeat(kinds, block, 2), block, 3)[:, :, : self.T, : self.S]
        batch, head, query, key = np.indices(kinds.shape)
        seen = (kinds == 2) | ((kinds == 1) & ((7 * query + 3 * key + head + 2 * batch) % 5 < 2))
        lead = self.batch if self.blocks[0][0] == "b" else (1,) * len(self.batch)
        return seen.reshape(*lead, *seen.shape[1:])

    def _kinds(self) -> np.ndarray:
        """[B or 1, N or 1, blocks of queries, blocks of keys]: 0 empty, 1 partial, 2 full."""
        assert self.blocks is not None
        axes, block = self.blocks
        rows = int(np.prod(self.batch)) if axes[0] == "b" else 1
        counts = (-(-size // block) for size in (self.T, self.S))
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        shape = (rows, self.N if axes[1] == "n" else 1, *counts)
        return 2 * rng.integers(0, 2, shape) if self.is_layout else rng.integers(0, 3, shape)

    def _draw_positions(self) -> dict[str, np.ndarray]:
        # A generator of their own: all else is drawn as without positions.
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        rows = int(np.prod(self.batch))
        least, most = np.iinfo(np.int32).min, np.iinfo(np.int32).max

        def place(size: int) -> np.ndarray:
            index, row = np.arange(size), np.arange(rows)[:, None]
            match self.positions:
                case "offset":
                    return index + 30 * row - 10
                case "permuted":
                    return rng.permuted(index + 0 * row, axis=1)
                case "striped":
                    return np.argsort(index % 4, kind="stable") + 0 * row
                case "left padding":
                    return index - (20 + 30 * row) % size
                case "ties":
                    return np.sort(rng.integers(-5, 12, (rows, size)), axis=1)
                case "extreme":
                    return np.where(rng.random((rows, size)) < 0.5, least + index, most - index)
                case "constant":
                    return 7 + 0 * (index + row)
                case "queries":
                    return index + 5 + 0 * row
                case "keys":
                    return index - 5 + 0 * row
            raise ValueError(self.positions)

        queries, keys = place(self.T), place(self.S)
        if self.positions == "left padding":
            keys = np.where(keys < 0, most, keys)
        given = {"query_positions": queries, "key_value_positions": keys}
        if self.positions in ("queries", "keys"):
            del given["key_value_positions" if self.positions == "queries" else "query_positions"]
        return {n: x.astype(np.int32).reshape(*self.batch, -1) for n, x in given.items()}


_TRUTHS: dict[tuple, numpy_oracle.Result] = {}  # the last that were computed


@dataclasses.dataclass
class Arguments:
    """The arrays of one call by argument name, its options, and its cotangents."""

    case: Case
    arrays: dict[str, np.ndarray]
    options: dict[str, Any]
    dout: np.ndarray
    dlse: np.ndarray | None

    @property
    def differentiable(self) -> tuple[str, ...]:
        return tuple(
            name
            for name in ("query", "key", "value", "bias", "sinks", "table")
            if name in self.arrays and name not in self.case.fixed
        )

    def truth(self, precision: str = "float64", gradients: bool = True) -> numpy_oracle.Result:
        """The same call by the numpy attention, every intermediate rounded to `precision`.

        Computed once for equal arrays: tests ask again, for other backends and orders.
        """
        digest = hashlib.sha256(repr(self.options).encode())
        for name, array in (*self.arrays.items(), ("dout", self.dout), ("dlse", self.dlse)):
            digest.update(f"{name} {array is not None and (array.dtype, array.shape)}".encode())
            digest.update(b"" if array is None else array.tobytes())
        asked = self.case, digest.digest(), precision, gradients
        if asked not in _TRUTHS:
            while len(_TRUTHS) >= 12:
                del _TRUTHS[next(iter(_TRUTHS))]
            _TRUTHS[asked] = self._compute(precision, gradients)
        return _TRUTHS[asked]

    def _compute(self, precision: str, gradients: bool) -> numpy_oracle.Result:
        arrays, seen = self.arrays, self.case.blocks_seen
        if seen is not None:
            arrays = {**arrays, "mask": seen & arrays.get("mask", True)}
        with np.errstate(over="ignore", invalid="ignore"):
            return numpy_oracle.attention(
                **arrays,
                **self.options,
                score=None if self.case.score is None else SCORES[self.case.score].plain,
                dropout_words=dropout_words() if self.case.dropout else None,
                dout=self.dout if gradients else None,
                dlse=self.dlse if gradients else None,
                precision=precision,
            )

    def function(self, backend: str | None):
        """A function of the arrays that returns out, or (out, lse) when the case asks for lse."""
        case, block_mask = self.case, self.case.block_mask

        def call(arrays):
            options = dict(self.options)
            if block_mask is not None:
                options["block_mask"] = block_mask
            if case.dropout:
                options["dropout_key"] = jax.random.key(DROPOUT_SEED)
            if case.score:
                table = arrays["table"]
                arrays = {name: x for name, x in arrays.items() if name != "table"}
                options["score_mod"] = SCORES[case.score].traced(table)
            return jax_flash.flash_attention(
                **arrays,
                **options,
                return_lse=case.with_lse,
                deterministic=case.deterministic,
                precision=case.precision,
                backend=backend,
            )

        return call

    def step(self, backend: str | None):
        """A function of (arrays, cotangent) that returns the result and the gradients by name."""
        call, moving_names = self.function(backend), self.differentiable

        def step(arrays, cotangent):
            fixed = {n: x for n, x in arrays.items() if n not in moving_names}
            moving = {n: arrays[n] for n in moving_names}
            result, pull = jax.vjp(lambda moving: call({**moving, **fixed}), moving)
            (gradients,) = pull(cotangent)
            return result, gradients

        return step

    @property
    def cotangent(self):
        return self.dout if self.dlse is None else (self.dout, self.dlse)

    def run(self, backend: str | None, *, gradients: bool = True) -> dict[str, Any]:
        """out, lse (if asked for) and the gradient of each differentiable argument, in one jit."""
        # Not jnp.asarray, which jax 0.12 compiles a program for.
        arrays = jax.device_put(self.arrays)
        if gradients:
            cotangent = jax.device_put(self.cotangent)
            result, pulled = _jitted_step(self.case, backend)(arrays, cotangent)
        else:
            result, pulled = _jitted_call(self.case, backend)(arrays), {}
        values = {f"d{name}": gradient for name, gradient in pulled.items()}
        if self.case.with_lse:
            values["out"], values["lse"] = result
        else:
            values["out"] = result
        return {name: np.asarray(x) for name, x in values.items()}


@functools.lru_cache(maxsize=4)  # so that one test may run the same case on several values
def _jitted_step(case: Case, backend: str | None):
    return jax.jit(case.draw().step(backend))


@functools.lru_cache(maxsize=4)
def _jitted_call(case: Case, backend: str | None):
    return jax.jit(case.draw().function(backend))


def dropout_words(key: jax.Array | None = None) -> tuple[int, int]:
    """The Philox key of a dropout key (from that of `Arguments.function` unless given)."""
    key = jax.random.key(DROPOUT_SEED) if key is None else key
    first, second = np.asarray(jax.random.key_data(key))
    return int(first), int(second)
