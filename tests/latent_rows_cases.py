"""Calls over caches of packed rows of latent attention, and what they should give."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

import jax_flash

BYTES = 656


@dataclasses.dataclass
class Packed:
    """A call of `decode_attention`."""

    arrays: dict[str, Any]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    expected: np.ndarray | None = None  # float64 [B, T, N, 512]
    expected_lse: np.ndarray | None = None
    lse_tolerance: float = 2e-3

    def run(self, backend: str | None) -> jax_flash.Decoded:
        return jax_flash.decode_attention(
            value_cache=None, value_dim=512, backend=backend, **self.options, **self.arrays
        )

    def compare(self, got: jax_flash.Decoded) -> None:
        """Compares results with float64: within what weights and results of bfloat16 lose."""
        assert self.expected is not None
        assert self.expected_lse is not None
        out = np.asarray(got.out, np.float64)
        size = np.sqrt(np.mean(self.expected**2, axis=-1, keepdims=True)) + 1e-30
        np.testing.assert_array_less(np.abs(out - self.expected) / size, 0.06)
        np.testing.assert_allclose(got.lse, self.expected_lse, atol=self.lse_tolerance)
        if "new_key" in self.arrays:
            self._compare_cache(np.asarray(got.key_cache))

    def _compare_cache(self, cache: np.ndarray) -> None:
        """New rows, packed, are in their places, and nothing else has changed."""
        expected = np.asarray(self.arrays["key_cache"]).copy()
        new = np.asarray(jax_flash.pack_latent(self.arrays["new_key"]))
        for row, length in enumerate(np.asarray(self.arrays["lengths"])):
            count = new.shape[1]
            for t in range(count):
                at = length - count + t
                if at < 0:
                    continue
                if "page_table" in self.arrays:
                    size = expected.shape[1]
                    page = np.asarray(self.arrays["page_table"])[row, at // size]
                    expected[page, at % size] = new[row, t]
                else:
                    expected[row, at] = new[row, t]
        np.testing.assert_array_equal(cache, expected)


def unpack(packed: np.ndarray) -> np.ndarray:
    """Unpacks `[*B, 656]` to float64 `[*B, 576]`, in NumPy: features are rounded to bfloat16."""
    lead = packed.shape[:-1]
    latent = np.ascontiguousarray(packed[..., :512]).view(jnp.float8_e4m3fn).astype(np.float32)
    scales = np.ascontiguousarray(packed[..., 512:528]).view(np.float32)
    plain = np.ascontiguousarray(packed[..., 528:]).view(jnp.bfloat16)
    groups = latent.reshape(*lead, 4, 128) * scales[..., None]
    rounded = groups.reshape(*lead, 512).astype(jnp.bfloat16)
    return np.concatenate([rounded, plain], axis=-1).astype(np.float64)


def draw(
    lengths: tuple[int, ...],
    heads: int,
    *,
    tokens: int = 1,
    page: int | None = None,
    window: int | None = None,
    chosen: int | None = None,
    appends: bool = False,
    odd_scales: bool = False,
    seed: int = 0,
) -> Packed:
    """Draws a call whose slots that no query sees hold bytes of NaN."""
    rng = np.random.default_rng(seed)
    batch, most = len(lengths), max(*lengths, 1)
    rows = rng.normal(size=(batch, most, 576)).astype(np.float32)
    if odd_scales:
        rows *= np.exp(0.5 * rng.normal(size=(batch, most, 1)))
    packed = np.asarray(jax_flash.pack_latent(jnp.asarray(rows))).copy()
    if odd_scales:
        scales = np.ascontiguousarray(packed[..., 512:528]).view(np.float32)
        scales = scales * rng.uniform(0.6, 1.0, scales.shape).astype(np.float32)
        scales[:, 0, 0], scales[:, 1, 1] = 2.0**-100, 2.0**9  # the kernels take one the slow way
        packed[..., 512:528] = scales.view(np.uint8)
        packed[:, 1, 128:256] = packed[:, 1, 128:256] & 0x80 | 1  # then features are 1 or -1
    known = [max(n - tokens, 0) if appends else n for n in lengths]
    new = np.stack([rng.normal(size=(tokens, 1, 576)).astype(np.float32) for _ in lengths]).astype(
        jnp.bfloat16
    )
    query = rng.normal(size=(batch, tokens, heads, 576)).astype(jnp.bfloat16)
    arrays: dict[str, Any] = {"query": query, "lengths": np.array(lengths, np.int32)}
    keys = unpack(packed)
    if appends:
        own = unpack(np.asarray(jax_flash.pack_latent(jnp.asarray(new))))[:, :, 0]
        for row, length in enumerate(lengths):
            for t in range(max(tokens - length, 0), tokens):
                keys[row, length - tokens + t] = own[row, t]
        arrays["new_key"] = new
    if page is None:
        cache = np.full((batch, most + 7, 1, BYTES), 0xFF, np.uint8)
        for row, n in enumerate(known):
            cache[row, :n, 0] = packed[row, :n]
    else:
        columns = -(-most // page)
        table = rng.permutation(batch * columns + 2)[: batch * columns].reshape(batch, columns)
        cache = np.full((batch * columns + 2, page, 1, BYTES), 0xFF, np.uint8)
        for row, n in enumerate(known):
            at = np.arange(n)
            cache[table[row, at // page], at % page, 0] = packed[row, :n]
            table[row, -(-lengths[row] // page) :] = -1
        arrays["page_table"] = table.astype(np.int32)
    arrays["key_cache"] = cache
    indices = None
    if chosen is not None:
        drawn = [[rng.permutation(max(n, chosen))[:chosen] for _ in range(tokens)] for n in lengths]
        indices = np.where(rng.random((batch, tokens, chosen)) < 0.1, -1, drawn).astype(np.int32)
        arrays["indices"] = indices
    options = {} if window is None else {"local_window_size": (window, 0)}
    out, lse = _expected(query.astype(np.float64), keys, lengths, window, indices)
    # By a scale that is no power of two some feature in 200 is the other neighbour in bfloat16.
    tolerance = 3e-2 if odd_scales else 2e-3
    return Packed({k: jnp.asarray(x) for k, x in arrays.items()}, options, out, lse, tolerance)


def _expected(query, keys, lengths, window, indices) -> tuple[np.ndarray, np.ndarray]:
    batch, tokens, heads, _ = query.shape
    out, lse = np.zeros((batch, tokens, heads, 512)), np.full((batch, tokens, heads), -np.inf)
    for b, length in enumerate(lengths):
        for t in range(tokens):
            position = length - tokens + t
            sees = np.arange(keys.shape[1]) <= position
            if window is not None:
                sees &= np.arange(keys.shape[1]) >= position - window
            if indices is not None:
                sees &= np.isin(np.arange(keys.shape[1]), indices[b, t])
            if not sees.any():
                continue
            rows = keys[b, sees]
            logits = query[b, t] @ rows.T / 24.0
            largest = logits.max(-1, keepdims=True)
            weights = np.exp(logits - largest)
            total = weights.sum(-1, keepdims=True)
            out[b, t] = weights / total @ rows[:, :512]
            lse[b, t] = (largest + np.log(total))[:, 0]
    return out, lse
