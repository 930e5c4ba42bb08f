"""The table of terms: the optional operands of a call, and what each is like.

A term's arithmetic stands once in each backend (reference.py, _tiles.py, cpu/terms-inl.h,
cuda/kernels); all else about it stands here. The order is that in which terms follow q, k and v;
ffi/operands.h has the same table, and `_native.py` compares the two when the module loads. Arrays
that a user's function reads follow the terms.
"""

import dataclasses
from typing import Any, Literal

FLOATS = ("float32", "bfloat16", "float16", "float64")


def sum_dtype(dtype: Any) -> str:
    """Names the dtype that numbers of a dtype are summed in, one of FLOATS both."""
    return "float64" if dtype == "float64" else "float32"


@dataclasses.dataclass(frozen=True)
class Term:
    """One optional operand.

    Attributes:
      feature: what a user knows it as.
      dims: after the leading ones, a letter each: T queries, S keys, N query heads, W words; I and
        J blocks of queries and of keys, C partial blocks, D queries and E words of one of these;
        X chosen keys.
      dtype: what backends get. "float": one of FLOATS, as the user gave it; "sum": the problem's
        sum_dtype, from any of FLOATS; "int32": from integers of any kind; "bool", "uint16",
        "uint32".
      ones: those of its dims that may be 1 for all, which kernels read without a copy. B is each
        leading one; without it the batch rows that share the term get copies of it.
      differentiable: it has a gradient.
      native: kernels may get it; else `_chosen.py` computes calls that have it.
    """

    feature: str
    dims: str
    dtype: Literal["float", "sum", "int32", "bool", "uint16", "uint32"]
    ones: str = ""
    differentiable: bool = False
    native: bool = True


TERMS = {
    "bias": Term("bias", "NTS", "float", ones="BNTS", differentiable=True),
    "mask": Term("boolean mask", "NTS", "bool", ones="BNTS"),
    "block_numbers": Term("block masks", "NIJ", "int32", ones="BN"),
    "block_bits": Term("block masks", "CDE", "uint16", ones="B"),
    "query_lengths": Term("lengths", "", "int32"),
    "key_value_lengths": Term("lengths", "", "int32"),
    "query_segments": Term("segment ids", "T", "int32"),
    "key_value_segments": Term("segment ids", "S", "int32"),
    "query_positions": Term("positions", "T", "int32"),
    "key_value_positions": Term("positions", "S", "int32"),
    "sinks": Term("sinks", "N", "sum", ones="B", differentiable=True),
    "dropout_state": Term("dropout", "NW", "uint32"),
    # Batch row and head, as a function of the scores counts them.
    "score_ids": Term("score function", "NU", "int32"),
    # Behind all that native code numbers.
    "indices": Term("chosen keys", "TX", "int32", native=False),
}
BROADCAST = tuple(name for name, term in TERMS.items() if "B" in term.ones)
BROADCAST_HEADS = tuple(name for name, term in TERMS.items() if "N" in term.ones)
DIFFERENTIABLE = tuple(name for name, term in TERMS.items() if term.differentiable)


def capture(index: int) -> str:
    """Names the index-th array that a function of the scores reads: `[*B or 1s, elements]`."""
    return f"{_CAPTURE}{index}"


def is_capture(name: str) -> bool:
    """Tells whether a name is that of a captured array."""
    return name.startswith(_CAPTURE)


_CAPTURE = "capture"


def shares_rows(name: str) -> bool:
    """Tells whether kernels read an operand's one batch row for all."""
    return is_capture(name) or name in BROADCAST


def rows() -> list[str]:
    """Lists what native code knows of each term, as `TermRows` of ffi/operands.cc spells it."""
    known = {name: x for name, x in TERMS.items() if x.native}
    return [f"{name} {x.dtype} [{x.dims}] 1:[{x.ones}]" for name, x in known.items()]
