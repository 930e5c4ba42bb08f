"""The constants of a problem that the kernels of every family are compiled with."""

import math
from typing import Any

from jax_flash._gpu.family import Number
from jax_flash._problem import Problem, Shapes, TermShape

# The kernels compare draws of 15 bits as float16, another way where the threshold would be NaN.
_LARGEST_FLOAT16_RATE = 0x7C00 / 2**15


def problem_constants(problem: Problem, shapes: Shapes) -> dict[str, Number]:
    left, right = problem.window
    positions = "query_positions" in problem.terms
    mask, bias, block = shapes.mask, shapes.bias, shapes.block_mask
    bias_type = None if bias is None else bias.dtype
    return {
        "kBFloat16": problem.dtype == "bfloat16",
        "kWindowLeft": left is not None and not positions,
        "kWindowRight": right is not None and not positions,
        "kHasPositions": positions,
        "kReachLeft": left is not None and positions,
        "kReachRight": right is not None and positions,
        "kBottomRight": problem.bottom_right,
        "kHasQueryLengths": "query_lengths" in problem.terms,
        "kHasKeyValueLengths": "key_value_lengths" in problem.terms,
        "kHasSegments": "query_segments" in problem.terms,
        "kHasSinks": "sinks" in problem.terms,
        "kHasBias": bias is not None,
        "kBiasFloat32": bias_type == "float32",
        "kBiasBFloat16": bias_type == "bfloat16",
        "kBiasQueries": bias is not None and not is_one(bias.queries),
        "kBiasKeys": bias is not None and not is_one(bias.keys),
        "kBiasAlignment": 2 if bias is None else alignment(bias.keys, bytes_of_bias(bias)),
        "kHasMask": mask is not None or block is not None,
        "kMaskQueries": block is not None or (mask is not None and not is_one(mask.queries)),
        "kMaskKeys": block is not None or (mask is not None and not is_one(mask.keys)),
        "kHasMaskBytes": mask is not None,
        "kByteQueries": mask is not None and not is_one(mask.queries),
        "kByteKeys": mask is not None and not is_one(mask.keys),
        "kMaskAlignment": 1 if mask is None else alignment(mask.keys, 1),
        "kMaskBlock": 0 if block is None else block.block,
        "kHasDropout": "dropout_state" in problem.terms,
        "kDropsMost": problem.dropout_rate > _LARGEST_FLOAT16_RATE,
        "kSoftcap": problem.softcap is not None,
    }


def known(size: Any, otherwise: int) -> int:
    """Returns a size, or a typical one in its place where jax.export left it symbolic."""
    return size if isinstance(size, int) else otherwise


def bytes_of_bias(bias: TermShape | None) -> int:
    """Returns the bytes of an element, 0 without a bias."""
    return 0 if bias is None else 4 if bias.dtype == "float32" else 2


def is_one(size: Any) -> bool:
    """Tells whether a term does not vary along a dim; a symbolic size may be any."""
    return isinstance(size, int) and size == 1


def alignment(length: Any, size: int) -> int:
    """Returns the bytes, 16 at most, to which all rows of items of `size` bytes are aligned."""
    return math.gcd(length * size, 16) if isinstance(length, int) else size
