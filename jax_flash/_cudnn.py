"""Backend "cudnn": the attention of cuDNN, by the custom calls that `jax.nn` makes of it.

`jax.nn.dot_product_attention(implementation="cudnn")` rounds its lse to 16 bits, and takes no out
and lse for a backward pass by itself. So the calls are written here; a test compares them with
those of jax.nn. They run where jax_flash's own kernels lack the GPU's fastest products
(`is_faster`), or where they are named. Read next: `_backends.py`.
"""

from __future__ import annotations

import ctypes
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp

from jax_flash import _gpu
from jax_flash._call import Call
from jax_flash._problem import Shapes

TARGETS = {
    "forward": "__cudnn$fmhaSoftmax",
    "backward": "__cudnn$fmhaSoftmaxBackward",
}
# Data-centre Blackwell: mma.sync, of which our kernels there are made, has a quarter of the peak.
_FASTER_ON = ("sm_100", "sm_103")
_FASTER_FROM = 128  # queries and keys: below, a call is bound by memory or by its launch
_OLDEST = 91100  # 9.11, the first for sm_103
_DTYPES = {"bfloat16": "BF16", "float16": "F16"}


def is_faster(shapes: Shapes, gpu: _gpu.GpuSpec) -> bool:
    """Tells whether cuDNN is to run a call that it can run, where no backend is named."""
    lengths = (shapes.q_len, shapes.kv_len)
    return gpu.arch in _FASTER_ON and all(isinstance(x, int) and x >= _FASTER_FROM for x in lengths)


def absent(gpu: _gpu.GpuSpec | None) -> tuple[str, ...]:
    """Lists why cuDNN cannot run at all beside this GPU (None: without one)."""
    if gpu is None:
        return ("no CUDA device is present",)
    if _gpu.spec.present() is None:  # explained or lowered for another machine
        return ()
    found = version()
    if found is None:
        return ("cuDNN is not installed",)
    oldest, had = (f"{x // 10000}.{x // 100 % 100}" for x in (_OLDEST, found))
    return () if found >= _OLDEST else (f"cuDNN {oldest} or later is needed, not {had}",)


@functools.cache
def version() -> int | None:
    """Asks the cuDNN that JAX loads for its version: 92800 for 9.28; None without one."""
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        path = load_nvidia_dynamic_lib("cudnn").abs_path
    except (ImportError, RuntimeError):
        return None
    if path is None:
        return None
    ask = ctypes.CDLL(path).cudnnGetVersion
    ask.restype = ctypes.c_size_t
    return ask()


def decline(call: Call, shapes: Shapes, gpu: _gpu.GpuSpec) -> tuple[str, ...]:
    """Lists why cuDNN does not run a pass with the meaning that jax_flash gives it."""
    if call.target not in TARGETS:
        return (f"cuDNN is asked for flash_attention alone, not for {call.function}",)
    problem = call.problem
    reasons = []
    if problem.dtype not in _DTYPES:
        reasons.append(f"cuDNN is asked for bfloat16 and float16, not {problem.dtype}")
    arguments = [*problem.terms]
    arguments += ["softcap"] if problem.softcap is not None else []
    arguments += ["score_mod"] if problem.score is not None else []
    if arguments:
        reasons.append(
            f"cuDNN is asked for no optional arrays, softcap or functions: {', '.join(arguments)}"
        )
    if problem.deterministic:
        reasons.append("cuDNN's gradients are not the same bits in each run: deterministic")
    if getattr(call, "with_dlse", False):
        reasons.append("cuDNN has no gradient of lse")
    if problem.scale <= 0:
        reasons.append(f"cuDNN is asked for a scale above 0, not {problem.scale:g}")
    reasons += _decline_window(call, shapes)
    reasons += _decline_shapes(shapes, gpu)
    return tuple(reasons)


def _decline_window(call: Call, shapes: Shapes) -> list[str]:
    left, right = call.problem.window
    reasons = []
    if right not in (None, 0) or (right is None and left is not None):
        reasons.append(f"cuDNN has no window {call.problem.window} that is not causal")
    square = shapes.q_len == shapes.kv_len
    if (left, right) != (None, None) and call.problem.bottom_right and not square:
        reasons.append("cuDNN is asked for causality from the top left alone")
    if left is not None and not square:
        reasons.append("cuDNN is asked for windows where there are as many keys as queries")
    return reasons


def _decline_shapes(shapes: Shapes, gpu: _gpu.GpuSpec) -> list[str]:
    sizes = (shapes.batch, shapes.q_len, shapes.kv_len, shapes.q_heads, shapes.kv_heads)
    if not all(isinstance(x, int) for x in sizes):
        return ["cuDNN is asked for sizes that are known, not for symbolic ones"]
    reasons = []
    if min(shapes.q_len, shapes.kv_len) < 2:
        reasons.append("cuDNN is asked for two queries and keys or more")
    if shapes.batch * max(shapes.q_len, shapes.kv_len) * shapes.q_heads * shapes.head_dim >> 31:
        reasons.append("cuDNN is asked for arrays of less than 2^31 elements")
    if shapes.head_dim != shapes.value_dim:
        reasons.append("cuDNN is asked for a value dim that is the head dim")
    most = 256 if gpu.arch == "sm_90a" else 128
    if shapes.head_dim % 8 or shapes.head_dim > most:
        reasons.append(
            f"cuDNN takes head dims that 8 divides, up to {most} on {gpu.name}, "
            f"not {shapes.head_dim}"
        )
    return reasons


def attend(call: Call, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """Traces cuDNN's call of a pass.

    Arguments:
      call: a pass that `decline` has no reason against, with all its results.
      operands: call.operands, with the same leading dims each.

    Returns:
      call.results, as `blockwise.py` has them. NaN or infinity of hidden positions may reach them
      as NaN.
    """
    named = call.name_operands(operands)
    shapes = call.shapes(named)
    leading = named["q"].shape[:-3]
    for name, x in named.items():
        named[name] = x.reshape(shapes.batch, *x.shape[len(leading) :])
    q, k, v = named["q"], named["k"], named["v"]
    # Results are [B, N, T, H] in the order of [B, T, N, H], so that nothing is copied.
    heads_first = [jax.ShapeDtypeStruct((x.shape[0], *(x.shape[i] for i in (2, 1, 3))), x.dtype)
                   for x in (q, k, v)]  # fmt: skip
    lse = jax.ShapeDtypeStruct((shapes.batch, shapes.q_heads, shapes.q_len), jnp.float32)
    workspace = jax.ShapeDtypeStruct((0,), jnp.uint8)
    if call.target == "forward":
        given, made = (q, k, v), (heads_first[0], lse, workspace)
    else:
        given = (q, k, v, named["lse"], named["dout"], named["out"])
        made = (*heads_first, workspace)
    found = jax.ffi.ffi_call(
        TARGETS[call.target],
        made,
        output_layouts=[(0, 2, 1, 3) if len(x.shape) == 4 else None for x in made],
        custom_call_api_version=2,
        legacy_backend_config=config(call, shapes),
    )(*given)
    results = [jnp.swapaxes(x, 1, 2) if x.ndim == 4 else x for x in found[:-1]]
    return tuple(x.reshape(*leading, *x.shape[1:]) for x in results)


def config(call: Call, shapes: Shapes) -> str:
    """Writes what XLA reads of a call: CudnnfMHABackendConfig of its gpu/backend_configs.proto."""
    left, right = call.problem.window
    sizes = (shapes.batch, shapes.q_heads, shapes.q_len, shapes.kv_len)
    config: dict[str, Any] = {
        "algorithm": {
            "algo_id": "0",
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True,
            "workspace_size": "0",
        },
        "fmha_scale": call.problem.scale,
        "intermediate_tensor_shape": {
            "element_type": _DTYPES[call.problem.dtype],
            "dimensions": [str(x) for x in sizes],
            "tuple_shapes": [],
            "layout": {
                "dim_level_types": [],
                "dim_unique": [],
                "dim_ordered": [],
                "minor_to_major": ["3", "2", "1", "0"],
                "tiles": [],
                "element_size_in_bits": "0",
                "memory_space": "0",
                "index_primitive_type": "PRIMITIVE_TYPE_INVALID",
                "pointer_primitive_type": "PRIMITIVE_TYPE_INVALID",
                "dynamic_shape_metadata_prefix_bytes": "0",
            },
            "is_dynamic_dimension": [False] * 4,
        },
        "is_flash_attention": True,
        "mask_type": "CAUSAL" if right == 0 else "NO_MASK",
        "dropout_rate": 0.0,
        "seed": 42,
        "sliding_window_length": 0 if left is None else left + 1,
        "max_seg_per_batch": 1,
        "is_paged_attention": False,
    }
    for name, contracting, batch in _PRODUCTS[call.target]:
        config[f"{name}_dot_dimension_numbers"] = {
            "lhs_contracting_dimensions": [contracting[0]],
            "rhs_contracting_dimensions": [contracting[1]],
            "lhs_batch_dimensions": [*batch[0]],
            "rhs_batch_dimensions": [*batch[1]],
        }
    return json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": config})


# The products of a pass of arrays [B, T, N, H] and scores [B, N, T, S]: which dims of the left and
# of the right operand are summed over, and which are a batch's.
_SCORES, _VALUES = ("02", "02"), ("01", "02")
_PRODUCTS = {
    "forward": (("bmm1", "33", _SCORES), ("bmm2", "31", _VALUES)),
    "backward": (
        ("bmm1_grad_gemm1", "21", _VALUES),
        ("bmm1_grad_gemm2", "31", _VALUES),
        ("bmm2_grad_gemm1", "21", _VALUES),
        ("bmm2_grad_gemm2", "33", _SCORES),
    ),
}
