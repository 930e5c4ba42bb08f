"""What the backward kernels of mma.sync take, and how they are launched.

Read next: `_gpu/backward_launch.py`, for what both families share; cuda/kernels/sm80/backward.cuh.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jax_flash._call import Call
from jax_flash._gpu.backward_launch import Backward
from jax_flash._gpu.fields import Struct
from jax_flash._gpu.plan import Launch
from jax_flash._gpu.shared_fields import halves, split, take
from jax_flash._gpu.sizes import B, N, product
from jax_flash._problem import Problem, Shapes

if TYPE_CHECKING:
    from jax_flash._gpu.sm80.backward import BackwardTiling


def backward_launch(call: Call, shapes: Shapes, tiling: BackwardTiling) -> Launch:
    """Returns what the backward pass launches by a tiling."""
    problem = call.problem
    pass_ = _backward(
        problem,
        shapes,
        tiling,
        with_dlse="dlse" in call.operands,
        with_dbias="dbias" in call.results,
    )
    ahead = (split(2, beside=True),) if tiling.halves else ()
    return Launch(
        _backward_params(pass_),
        pass_.steps(ahead),
        names={},
        checks=pass_.checks(),
        none=product(B, N),
    )


def backward_params(problem: Problem, shapes: Shapes, tiling: BackwardTiling) -> Struct:
    """Returns the parameters of the backward kernels, without the gradient of a bias."""
    return _backward_params(_backward(problem, shapes, tiling))


def _backward_params(pass_: Backward) -> Struct:
    shapes, tiling, fields = pass_.shapes, pass_.tiling, pass_.fields()
    return Struct(
        "Sm80BackwardParams",
        (
            *take(fields, "query_data key_data value_data out_data dout_data lse dlse dquery"),
            *take(fields, "dkey_data dvalue_data dbias"),
            *take(fields, "query_lengths key_value_lengths query_segments key_value_segments"),
            *take(fields, "query_positions key_value_positions bias mask dropout_state"),
            *take(fields, "lse_log2 minus_delta dq_sum next_unit turns"),
            *take(fields, "query_segment_ranges key_segment_ranges"),
            *take(fields, "query_position_ranges key_position_ranges dbias_sum marks"),
            *take(fields, "bias_elements bias_batches bias_heads dbias_ctas"),
            *take(fields, "batch query_len kv_len query_heads kv_heads l2_heads"),
            *take(fields, "window_left window_right scale scale_log2 softcap_inner softcap_bias"),
            *take(fields, "dropout_threshold dropout_scale score_ids captures block_mask"),
            *take(fields, "result_scale first_kv_head launched_kv_heads"),
            *halves(shapes, "query key value dout", present=tiling.halves),
        ),
    )


def _backward(problem: Problem, shapes: Shapes, tiling: BackwardTiling, **with_: bool) -> Backward:
    main = "flash_backward_sm80"
    return Backward(problem, shapes, tiling, main, persistent=False, **with_)
