"""NaN and inf in every place that a call's meaning hides."""

from __future__ import annotations

import dataclasses

import numpy as np

from .cases import Arguments, Case

POISONS = (np.nan, np.inf, -np.inf)


def poisoned(arguments: Arguments, poison: float) -> Arguments:
    """The same call with poison in every place that the call's meaning hides."""
    case = arguments.case
    seen = arguments.truth(gradients=False).seen
    rows = seen.shape[0]
    arrays = {name: array.copy() for name, array in arguments.arrays.items()}
    group = case.N // case.kv_heads
    rows_seen = seen.any(-1).swapaxes(1, 2)  # [B, T, N]
    keys_seen = seen.any(-2).reshape(rows, case.kv_heads, group, case.S).any(2).swapaxes(1, 2)
    arrays["query"][~rows_seen] = poison
    arrays["key"][~keys_seen] = poison
    arrays["value"][~keys_seen] = poison
    if "bias" in arrays:
        bias = arrays["bias"]
        kept = seen
        for axis, size in enumerate((1,) * (4 - bias.ndim) + bias.shape):
            if size == 1:
                kept = kept.any(axis, keepdims=True)
        bias[~kept.reshape(bias.shape)] = poison
    dout, dlse = arguments.dout.copy(), arguments.dlse
    dout[~rows_seen] = poison
    if dlse is not None and not case.sinks:  # there lse is a function of the sink
        dlse = dlse.copy()
        dlse[~rows_seen] = poison
    return dataclasses.replace(arguments, arrays=arrays, dout=dout, dlse=dlse)


def for_xla(case: Case) -> bool:
    """Whether XLA may get it: kernels of 16 bits and of some dims are others, XLA's are not."""
    return case.dtype == "float32" or case.name == "bfloat16"
