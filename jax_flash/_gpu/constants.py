"""The constants of a problem that the kernels of every family are compiled with."""

import functools

from jax_flash._call import Call
from jax_flash._gpu import emit
from jax_flash._gpu.plan import Number
from jax_flash._gpu.traits import (
    adds_to_scores,
    alignment,
    are_small,
    bytes_of_bias,
    is_highest,
    is_one,
    known,
)
from jax_flash._problem import Problem, Shapes

# The kernels compare draws of 15 bits as float16, another way where the threshold would be NaN.
_LARGEST_FLOAT16_RATE = 0x7C00 / 2**15


def problem_constants(problem: Problem, shapes: Shapes) -> dict[str, Number]:
    left, right = problem.window
    positions = "query_positions" in problem.terms
    mask, bias, block = shapes.mask, shapes.bias, shapes.block_mask
    bias_type = None if bias is None else bias.dtype
    lines = problem.lines
    return {
        "kBFloat16": problem.dtype == "bfloat16",
        "kFloat32": problem.dtype == "float32",
        "kHighest": is_highest(problem),
        "kFloat8": False,  # of q, k and v: sm90_float8 says it
        "kCarried": problem.split == "carried",
        "kRest": problem.split == "rest",
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
        "kAddsToScores": adds_to_scores(problem),
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
        "kDropsPart": shapes.drops_part,
        "kDropsMost": problem.dropout_rate > _LARGEST_FLOAT16_RATE,
        "kSoftcap": problem.softcap is not None,
        "kHasScoreFunction": problem.score is not None,
        "kScoreHasSlope": problem.score is not None and emit.has_slope(problem.score),
        "kScoreIsLine": lines is not None,
        "kScoreReach": -1 if lines is None or lines.is_one else lines.reach,
        "kScoreIsLevel": lines is not None and lines.are_level,
        "kHasScoreIds": "score_ids" in problem.terms,
        "kFromPages": False,  # sm90/pages.py
        "kInCommon": False,
        "kPageSize": 1,
    }


def functions(call: Call, shapes: Shapes) -> str:
    """Returns the text of the user's functions that follows the constants of a pass."""
    score = call.problem.score
    if score is None:
        return ""
    define = functools.partial(
        emit.define,
        score,
        rows=shapes.own_captures,
        small=are_small(shapes),
        exact=is_highest(call.problem),
        lengths=(known(shapes.q_len, 0), known(shapes.kv_len, 0)),
    )
    text = define("score_value", scales=True)
    if (lines := call.problem.lines) is not None:
        text += lines.define("score_line_of_head")
    if _has_slope(call):
        text += define("score_value_and_slope", with_slope=True)
    text = emit.with_helpers(text)
    text = f'#include "score_places.cuh"\n{text}'
    return f'#include "ptx.cuh"\n{text}' if "ptx::" in text else text


def refuse_functions(call: Call) -> list[str]:
    """Lists why the kernels of a pass cannot be compiled with the user's functions."""
    score = call.problem.score
    reasons = () if score is None else emit.cannot(score, _has_slope(call))
    return [f"score_mod has no CUDA text: {reason}" for reason in reasons]


def _has_slope(call: Call) -> bool:
    return "dout" in call.operands
