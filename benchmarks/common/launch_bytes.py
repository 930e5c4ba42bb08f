"""Counts the bytes that a launch of Hopper's kernels moves, from its plan: no counter is read.

Two counts of a call without causality, masks or terms:

- `arrays`: each kernel reads what it takes and writes what it gives once. That is what HBM moves
  where L2 keeps all that is read again while it is needed.
- `requests`: what CTAs ask of L2: a block of queries has all keys and values pass by, in the
  backward pass a block of keys all queries and gradients, and adds to the sums of dq.
"""

import math
from typing import Any

from jax_flash._gpu.plan import Plan

ITEM = {"float16": 2, "bfloat16": 2}


def forward(plan: Plan, dtype: str) -> dict[str, int]:
    """Counts a forward pass, of either family of kernels."""
    query, key, rows = _sizes(plan, dtype)
    passes = math.ceil(plan.dims["T"] / plan.tiling.block_q)
    heads = plan.dims["N"] // plan.dims["K"]
    once = 2 * query + rows  # query and out, lse
    return {"arrays": once + 2 * key, "requests": once + 2 * key * heads * passes}


def backward(plan: Plan, dtype: str) -> dict[str, int]:
    """Counts a backward pass of Hopper's kernels, of head dims up to 128."""
    tiling = plan.tiling
    counted = plan.source.startswith("sm90/backward") and tiling.head_dim <= 128
    if not counted or tiling.stores_dq or tiling.unit_heads:
        raise NotImplementedError(f"the launch of {plan.source} is not counted")
    query, key, rows = _sizes(plan, dtype)
    passes = math.ceil(plan.dims["S"] / plan.tiling.block_kv)
    prepare = 2 * query + 3 * rows  # out, dout, lse; base and delta
    main = 2 * query + 2 * rows + 4 * key  # query, dout, base, delta; key, value and gradients
    main += query  # dq
    shape = plan.workspaces["dq_sum"].shape
    places = 4 * math.prod(shape)  # that dq's sums have at a time
    sums = 2 * query * 4 // (2 * ITEM[dtype])  # a float32 for each element of query
    again = (passes - 1) * (2 * query + 2 * rows)
    return {
        "arrays": prepare + main + 2 * places,
        # Each block of keys adds to the sums; who finishes them reads, and clears the place.
        "requests": prepare + main + again + passes * sums + 2 * sums,
    }


def _sizes(plan: Plan, dtype: str) -> tuple[int, int, int]:
    """Bytes of an array of queries, of one of keys, and of a float32 for each query row."""
    dims: Any = plan.dims
    queries = dims["B"] * dims["T"] * dims["N"]
    keys = dims["B"] * dims["S"] * dims["K"]
    if plan.tiling.head_dim != plan.tiling.value_dim:
        raise NotImplementedError("values of another dim than keys are not counted")
    size = plan.tiling.head_dim * ITEM[dtype]
    return queries * size, keys * size, 4 * queries
