"""Calls of float8 for Hopper's kernels, in the emulator and on a GPU, and what is right.

Weights are rounded to float8 there: relative errors of 2^-4 at most, 1/40 in the mean.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import ml_dtypes
import numpy as np

import jax_flash
from jax_flash._ops.quantise import quantise

E4M3 = ml_dtypes.float8_e4m3fn
ROUNDING = 0.03  # of weights, over all results
# Tensor cores keep 14 bits of a score: an H100's lse was up to 1e-2 from that of float32.
LSE = 1.5e-2


@dataclasses.dataclass
class Float8Call:
    """A call with random values and scales, for a process of its own too.

    Args:
      hidden: positions of keys that hold NaN in all batch rows.
      quantize: the arguments are bfloat16.
      traced_scale: an array by which scores are multiplied.
      bad_value: a key of zeros, whose value has a NaN.
      zeros: a block of queries and one of keys have scale 0.
      with_lse: lse is wanted of "cuda" too; else rounded weights are added up below head dim 128.
      options: of flash_attention; what makes a block mask by name.
    """

    q_len: int
    kv_len: int
    head_dim: int
    value_dim: int = 0
    heads: tuple[int, int] = (2, 2)
    batch: int = 1
    hidden: slice | None = None
    quantize: bool = False
    traced_scale: float | None = None
    zeros: bool = False
    with_lse: bool = True
    bad_value: int | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def run(self, backend: str, **_: Any) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(0)
        q_heads, kv_heads = self.heads
        shapes = (
            (self.batch, self.q_len, q_heads, self.head_dim),
            (self.batch, self.kv_len, kv_heads, self.head_dim),
            (self.batch, self.kv_len, kv_heads, self.value_dim or self.head_dim),
        )
        dtype = ml_dtypes.bfloat16 if self.quantize else E4M3
        arrays = [rng.standard_normal(shape, np.float32).astype(dtype) for shape in shapes]
        if self.hidden is not None:
            for x in arrays[1:]:
                x[:, self.hidden] = np.nan
        if self.bad_value is not None:
            arrays[1][:, self.bad_value] = 0
            arrays[2][:, self.bad_value, :, 5] = np.nan
        options = dict(self.options)
        if options.pop("strided", False):
            options["block_mask"] = jax_flash.block_mask(
                lambda b, h, q, k: (q - k) % 600 < 40,
                batch=None,
                heads=None,
                q_len=self.q_len,
                kv_len=self.kv_len,
            )
        scales = {}
        if self.quantize:
            options["quantize"] = "fp8"
        else:
            blocks = (-(-self.q_len // 64), -(-self.kv_len // 128))
            of_shapes = {
                "query_scale": (self.batch, blocks[0], q_heads),
                "key_scale": (self.batch, blocks[1], kv_heads),
                "value_scale": (self.batch, kv_heads),
            }
            for name, shape in of_shapes.items():
                scales[name] = np.exp(0.3 * rng.standard_normal(shape)).astype(np.float32)
            if self.zeros:
                scales["query_scale"][:, 1] = scales["key_scale"][:, 0] = 0
        if self.traced_scale is not None:
            scales["scale"] = np.float32(self.traced_scale)
        with_lse = self.with_lse or backend == "xla"
        call = jax.jit(
            lambda q, k, v, scales: jax_flash.flash_attention(
                q, k, v, backend=backend, return_lse=with_lse, **scales, **options
            )
        )
        with jax.default_matmul_precision("highest"):
            results = call(*arrays, scales)
        names = ("out", "lse") if with_lse else ("out",)
        return dict(zip(names, map(np.asarray, results if with_lse else (results,)), strict=True))


@dataclasses.dataclass
class Quantised:
    """An array that is quantised, of rows of many sizes, with what is not finite, and its bits.

    Args:
      argument: "query", "key" or "value".
      shape: `[B, T, heads, H]`.
      members: a vmap over as many arrays; 0: none.
    """

    argument: str
    shape: tuple[int, int, int, int]
    dtype: str = "bfloat16"
    with_amax: bool = False
    members: int = 0

    def run(self, backend: str, **_: Any) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(0)
        shape = (self.members, *self.shape) if self.members else self.shape
        sizes = np.exp(4 * rng.standard_normal((*shape[:-1], 1)))
        x = (rng.standard_normal(shape) * sizes).astype(np.float32)
        if x.size > 0:
            length = x.shape[-3]
            x[..., 0, 0, 0] = -0.0
            x[..., length // 4, 0, 1] = -np.nan
            x[..., length // 2, -1, 5] = -np.inf
            # Beyond 2^128 where these are added up.
            x[..., length - 1, 0, :] = np.float32(3e38 if self.dtype == "bfloat16" else 6e4)
        with np.errstate(over="ignore"):
            x = x.astype(self.dtype if self.dtype == "float16" else ml_dtypes.bfloat16)

        def call(x):
            return quantise(self.argument, x, backend, with_amax=self.with_amax)

        found = jax.jit(jax.vmap(call) if self.members else call)(x)
        return {name: np.asarray(value).view(np.uint8) for name, value in found.items()}


QUANTISED = {
    "query, 64": Quantised("query", (2, 131, 3, 64), with_amax=True),
    "key, 128": Quantised("key", (1, 257, 2, 128)),
    "query, 256, float16": Quantised("query", (1, 1, 1, 256), "float16", with_amax=True),
    "key, 80, float16": Quantised("key", (1, 128, 2, 80), "float16", with_amax=True),
    "value, 64": Quantised("value", (2, 129, 2, 64), with_amax=True, members=2),
    "value, 128, float16": Quantised("value", (1, 100, 3, 128), "float16"),
    "value, 208": Quantised("value", (1, 255, 1, 208)),
    "value, no rows": Quantised("value", (0, 50, 2, 64), with_amax=True),
}
SEGMENTS = {
    "query_segment_ids": np.repeat(np.int32([[0, 1, 2], [1, 1, 3]]), 50, axis=1),
    "key_value_segment_ids": np.repeat(np.int32([[0, 1, 2, 2], [1, 3, 3, 0]]), 50, axis=1),
}
LENGTHS = {
    "query_seq_lengths": np.int32([150, 100]),
    "key_value_seq_lengths": np.int32([90, 125]),
    "causal_align": "bottom_right",
}
SHUFFLED = np.random.default_rng(1).permutation(200).astype("int32")[None]
CALLS = {
    "causal, grouped, 128": Float8Call(300, 300, 128, heads=(4, 2), options={"is_causal": True}),
    "causal, grouped, 256": Float8Call(200, 300, 256, heads=(2, 1), options={"is_causal": True}),
    "192/128, hidden NaN": Float8Call(
        *(100, 300, 192, 128),
        hidden=slice(290, 300),
        options={"key_value_seq_lengths": np.int32([290])},
    ),
    "T 1, float32": Float8Call(1, 700, 128, options={"out_dtype": "float32"}),
    "lengths, causal, grouped, 64": Float8Call(
        *(300, 300, 64),
        heads=(4, 2),
        batch=2,
        options={
            "query_seq_lengths": np.int32([300, 100]),
            "key_value_seq_lengths": np.int32([290, 125]),
            "is_causal": True,
        },
    ),
    # Few weights decide a row; and none does, so that sums of many are beyond the limit.
    "decisive, 128": Float8Call(130, 600, 128, options={"scale": 0.2}),
    "decisive, 64": Float8Call(130, 900, 64, with_lse=False, options={"scale": 0.5}),
    "equal, 64": Float8Call(130, 600, 64, options={"scale": 1e-4}),
    "quantised, 64": Float8Call(150, 200, 64, quantize=True, with_lse=False),
    "parts, a value of no weight": Float8Call(
        *(5, 1300, 64), heads=(1, 1), with_lse=False, bad_value=1299, options={"scale": 20.0}
    ),
    # Units of the last wave in parts along their keys, the last of them shorter.
    "parts, 128": Float8Call(70, 1300, 128, heads=(1, 1)),
    "parts, decisive": Float8Call(5, 1300, 128, heads=(1, 1), options={"scale": 0.5}),
    "parts, 64": Float8Call(5, 1300, 64, heads=(1, 1), with_lse=False),
    "parts, 256, float32": Float8Call(5, 1300, 256, options={"out_dtype": "float32"}),
    "left window, no parts, 64": Float8Call(
        5, 1300, 64, heads=(1, 1), options={"local_window_size": (300, None)}
    ),
    "window, softcap, 64/80": Float8Call(
        *(150, 200, 64, 80), options={"local_window_size": (50, 20), "softcap": 3.0}
    ),
    "window, sinks, 128, scale below 0": Float8Call(
        *(150, 300, 128),
        options={"local_window_size": 40, "sinks": np.float32([1, -1]), "scale": -0.1},
    ),
    "segments, 96, hidden NaN": Float8Call(
        *(150, 200, 96), batch=2, hidden=slice(120, 130), options=SEGMENTS
    ),
    "lengths, causal, 112, hidden NaN": Float8Call(
        *(150, 200, 112),
        batch=2,
        hidden=slice(126, 200),
        with_lse=False,
        options=LENGTHS | {"is_causal": True},
    ),
    "positions, 128, float16": Float8Call(
        *(200, 200, 128),
        options={
            "is_causal": True,
            "query_positions": SHUFFLED,
            "key_value_positions": SHUFFLED[:, ::-1].copy(),
            "out_dtype": "float16",
        },
    ),
    "an array of scale below 0, 64": Float8Call(
        *(150, 200, 64), traced_scale=-0.2, with_lse=False, options={"is_causal": True}
    ),
    "scales of 0, 64": Float8Call(150, 200, 64, zeros=True, options={"is_causal": True}),
    # Blocks without an element are left out: the others' scales stand at their own numbers.
    "block mask, 128": Float8Call(150, 800, 128, options={"strided": True}),
}


def agree_in_bits(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    """Compares arrays that were quantised, which are the same on each backend."""
    assert got.keys() == want.keys()
    for part, bits in want.items():
        np.testing.assert_array_equal(got[part], bits, err_msg=part)


def agree(got: dict[str, np.ndarray], want: dict[str, np.ndarray], *, lse: float = 3e-3) -> None:
    """Compares to the rounding of weights, and lse to so much; NaN and empty rows are the same."""
    np.testing.assert_array_equal(np.isnan(got["out"]), np.isnan(want["out"]))
    if "lse" in got:
        np.testing.assert_allclose(got["lse"], want["lse"], rtol=0, atol=lse)
    assert got["out"].dtype == want["out"].dtype
    out, exact = (np.nan_to_num(x["out"].astype(np.float64)) for x in (got, want))
    np.testing.assert_array_equal(out[np.isneginf(want["lse"])], 0)
    assert np.linalg.norm(out - exact) < ROUNDING * np.linalg.norm(exact)
