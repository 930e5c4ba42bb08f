"""The table of terms: the optional operands of a call, and what each is like.

A term's arithmetic stands once in each backend (reference.py, blockwise.py, cpu/terms-inl.h,
cuda/kernels); all else about it stands here. The order is that in which terms follow q, k and v;
ffi/operands.h has the same list, and `_native.py` compares the two when the module loads.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Term:
    """One optional operand.

    Attributes:
      feature: what a user knows it as.
      dims: after the leading ones, a letter each: T queries, S keys, N query heads, W words.
      broadcasts: any leading dim may be 1; kernels read it so, without a copy.
      differentiable: it has a gradient.
    """

    feature: str
    dims: str
    broadcasts: bool = False
    differentiable: bool = False


TERMS = {
    "bias": Term("bias", "NTS", broadcasts=True, differentiable=True),
    "mask": Term("boolean mask", "NTS", broadcasts=True),
    "query_lengths": Term("lengths", ""),
    "key_value_lengths": Term("lengths", ""),
    "query_segments": Term("segment ids", "T"),
    "key_value_segments": Term("segment ids", "S"),
    "sinks": Term("sinks", "N", broadcasts=True, differentiable=True),
    "dropout_state": Term("dropout", "NW"),
}
BROADCAST = tuple(name for name, term in TERMS.items() if term.broadcasts)
DIFFERENTIABLE = tuple(name for name, term in TERMS.items() if term.differentiable)
