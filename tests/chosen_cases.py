"""Calls whose queries read chosen keys, drawn, with the truth: test_chosen_keys.py runs them."""

from __future__ import annotations

import dataclasses
import zlib

import jax
import numpy as np

import jax_flash

from . import numpy_oracle
from .numpy_oracle import DTYPES
from .tolerance import FORWARD_FACTOR, GRADIENT_FACTOR, check

# What stands in indices where nothing is read.
NOTHING = (-1, -7, -(2**31), 2**31 - 1)


@dataclasses.dataclass(frozen=True)
class Case:
    """One `flash_attention`. What nobody reads is NaN or infinite, and so is who reads nothing."""

    name: str
    lead: tuple[int, ...] = (2,)
    T: int = 9
    S: int = 23
    N: int = 4
    K: int = 2
    H: int = 16
    Hv: int = 16
    n: int = 7
    dtype: str = "float32"
    options: dict = dataclasses.field(default_factory=dict)
    terms: dict = dataclasses.field(default_factory=dict)  # dims of ints that are drawn, and below
    sinks: bool = False
    within: bool = False  # values are the first features of the keys

    def draw(self) -> Drawn:
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))

        def normal(*shape):
            return rng.standard_normal(shape).astype(DTYPES[self.dtype])

        lead, sizes = self.lead, {"T": self.T, "S": self.S}
        arrays = {
            "query": normal(*lead, self.T, self.N, self.H),
            "key": normal(*lead, self.S, self.K, self.H),
            "value": normal(*lead, self.S, self.K, self.Hv),
        }
        if self.within:
            arrays["value"] = arrays["key"][..., : self.Hv].copy()
        for name, (dims, below) in self.terms.items():
            shape = (*lead, *(sizes[x] for x in dims))
            arrays[name] = rng.integers(0, below, shape).astype(np.int32)
        if self.sinks:
            arrays["sinks"] = rng.standard_normal(self.N).astype(np.float32)
        indices = draw_indices(rng, (*lead, self.T), self.n, self.S)
        dout, dlse = normal(*lead, self.T, self.N, self.Hv), normal(*lead, self.T, self.N)
        drawn = Drawn(self, arrays, indices, dout, dlse.astype(np.float32))
        seen = drawn.truth().seen.reshape(*lead, self.N, self.T, self.S)
        unread = ~seen.any(axis=(-3, -2))
        arrays["key"][unread], arrays["value"][unread] = np.nan, np.inf
        if self.within:
            arrays["value"][unread] = np.nan
        blind = ~seen.any(axis=(-3, -1))
        arrays["query"][blind], dout[blind] = np.nan, np.nan
        return drawn


def fit(case, backend: str):
    """The case, or for "cuda" the nearest in bfloat16 where its heads are too wide in float32."""
    if backend != "cuda" or case.dtype != "float32" or max(case.H, case.Hv) <= 256:
        return case
    return dataclasses.replace(case, dtype="bfloat16")


def draw_indices(rng, queries: tuple[int, ...], n: int, below: int) -> np.ndarray:
    """Different positions in no order, some of them beyond `below`, and a fifth that are none."""
    found = np.empty((*queries, n), np.int32)
    for at in np.ndindex(*queries):
        found[at] = rng.permutation(max(below, n) + 2)[:n]
    none = rng.random(found.shape) < 0.2
    none[(0,) * (len(queries) - 1) + (-1,)] = True  # a query that reads nothing
    return np.where(none, rng.choice(NOTHING, found.shape), found).astype(np.int32)


def read(indices: np.ndarray, length: int) -> np.ndarray:
    """Which of so many positions are among indices: bool `[..., length]`."""
    return (indices[..., None] == np.arange(length)).any(-2)


@dataclasses.dataclass
class Drawn:
    """The arrays of a case, for the call and for the oracle."""

    case: Case
    arrays: dict[str, np.ndarray]
    indices: np.ndarray
    dout: np.ndarray
    dlse: np.ndarray

    def run(self, backend: str | None) -> tuple[jax.Array, ...]:
        """Computes out and lse."""
        options = self.case.options | {"precision": "highest", "return_lse": True}
        values = {"value": None, "value_dim": self.case.Hv} if self.case.within else {}

        def call(arrays, indices):
            arrays = arrays | values
            return jax_flash.flash_attention(**arrays, indices=indices, **options, backend=backend)

        return jax.jit(call)(self.arrays, self.indices)

    def truth(self, precision: str = "float64") -> numpy_oracle.Result:
        mask = read(self.indices, self.case.S)[..., None, :, :]
        given = self.arrays | self.case.options | {"dout": self.dout, "dlse": self.dlse}
        return numpy_oracle.attention(**given, mask=mask, precision=precision)

    def compare(self, out, lse, *gradients) -> None:
        truth, plain, dtype = self.truth(), self.truth(self.case.dtype), self.case.dtype
        check("out", out, truth.out, plain.out, dtype, FORWARD_FACTOR)
        check("lse", lse, truth.lse, self.truth("float32").lse, "float32", FORWARD_FACTOR)
        for name, got in zip(("dq", "dk", "dv"), gradients, strict=False):
            exact, rough = getattr(truth, name), getattr(plain, name)
            check(name, got, exact, rough, dtype, GRADIENT_FACTOR, truth.summed[name])


CASES = (
    # Latent attention's dims: 512 keys of 1088 numbers, so that 30 queries are a block.
    Case("latent", lead=(), T=40, S=600, N=16, K=1, H=576, Hv=512, n=512, within=True,
         options={"is_causal": True, "causal_align": "bottom_right", "scale": 0.1}),
    Case("lengths, a window, a softcap and sinks", lead=(2, 2), sinks=True,
         options={"is_causal": True, "causal_align": "bottom_right",
                  "local_window_size": (9, 0), "softcap": 2.0},
         terms={"query_seq_lengths": ("", 11), "key_value_seq_lengths": ("", 26)}),
    Case("segments and lengths", Hv=8, n=23,
         terms={"query_segment_ids": ("T", 3), "key_value_segment_ids": ("S", 3),
                "query_seq_lengths": ("", 10), "key_value_seq_lengths": ("", 23)}),
    Case("positions, in bfloat16", T=5, K=4, H=192, Hv=128, dtype="bfloat16",
         options={"local_window_size": (4, 3)},
         terms={"query_positions": ("T", 12), "key_value_positions": ("S", 12)}),
    Case("more than a CTA packs at once", T=2, S=2600, N=2, K=1, H=8, Hv=8, n=2500,
         options={"is_causal": True, "causal_align": "bottom_right"}),
    Case("in float16, of one head", N=1, K=1, dtype="float16", n=1),
)  # fmt: skip
