"""Owns which forward passes run on the kernels of decoding: those of a few queries of each row.

A block of the forward kernels has 64 queries or more, and one CTA walks all keys of its head.
Decoding has blocks of 16, and multiprocessors share a row's keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jax_flash._call import Call
from jax_flash._gpu.decode import Decode80, Decode90
from jax_flash._gpu.family import preferred
from jax_flash._gpu.sm90.hopper import multiprocessors
from jax_flash._gpu.spec import GpuSpec
from jax_flash._gpu.traits import is_highest
from jax_flash._problem import Shapes

_FAMILIES = Decode90(), Decode80()
# Queries of heads that share keys. H200, us by forward kernels and by decoding: 24 x 2048, 12 heads
# of 64 62 to 44; 8 x 2 queries, 16/4 of 128 24 to 12; 1 x 8, 8192 keys, 8 of 128 74 to 12; of 9 to
# 16 64 x 2 and 256, 8/1 of 128 9 to 6, but 16 x 16 and 1024, 12 of 64 21 to 25: more where CTAs are
# clusters that share a row.
_QUERIES, _MOST_QUERIES = 8, 16
# Many rows of fewer keys are short units: 1000 x 64, 8 of 64 69 to 81 us; 800 x 100, 8 of 64 85 to
# 69. Rows of 16 bytes at a time: 12 x 700, 9/3 of 61 20 to 36, 500 x 300, 4 of 20 49 to 88.
_KEYS, _BYTES = 100, 16
# Rows of kv heads that are one round of forward units, of multiprocessors, where decoding cuts most
# of them in two: 128 x 600, 8/1 of 128 13 to 20 us; 27 x 4, 1024, 4 of 248 40 to 46; 80 x 2000,
# 12/1 of 64 24 to 20.
_ROUND = 0.7
# XLA's products: 8 x 200, 4 heads of 128 (2^19.6 multiplications) 4.4 to 4.9 us, 1 x 1500, 16 of 64
# 6.7 to 5.5; of shared keys 2 x 1024, 4/1 of 64 (2^19) 4.9 to 4.0. They read float32 of few queries
# as fast: 16 x 512, 8 of 64 12 to 16, 512 x 2 and 120, 8/4 of 64 49 to 55; 100 x 1000, 4/2 of 128
# 94 to 62; 64 x 2048, 16 of 64 380 to 321.
_LITTLE, _LITTLE_SHARED, _FLOAT32_KEYS = 1 << 20, 1 << 18, 1000


def decoding(call: Call, shapes: Shapes, gpu: GpuSpec) -> Call | None:
    """Returns the call of decoding whose kernels take less time than those of a pass, if any.

    The rule is Hopper's: nothing was timed elsewhere.
    """
    if gpu.arch not in Decode90.architectures or preferred.get() is not None:
        return None
    sizes = (shapes.batch, shapes.q_len, shapes.kv_len, shapes.q_heads, shapes.kv_heads)
    if not all(isinstance(size, int) for size in sizes) or shapes.empty:
        return None
    # float32 is multiplied as at "high": gradients start from the scores of copies.
    dtype = call.problem.dtype
    if dtype == "float32" and (is_highest(call.problem) or call.next is not None):
        return None
    width = math.gcd(shapes.head_dim, shapes.value_dim) * jnp.dtype(dtype).itemsize
    if shapes.kv_len < _KEYS or width % _BYTES:
        return None
    sms, units = multiprocessors(gpu), shapes.batch * shapes.kv_heads
    if _ROUND * sms < units <= sms:
        return None
    if queries_of_key(shapes) > (_MOST_QUERIES if 2 * units <= sms else _QUERIES):
        return None
    found = call.decoding(shapes)
    runs = found is not None and not all(x.refuse(found, shapes, gpu) for x in _FAMILIES)
    return found if runs else None


def outrun_products(call: Call, shapes: Shapes, gpu: GpuSpec) -> bool:
    """Tells whether a pass is decoded in less time than XLA's products take."""
    if decoding(call, shapes, gpu) is None:
        return False
    if call.problem.dtype == "float32":
        return shapes.kv_len >= _FLOAT32_KEYS
    scores = shapes.batch * shapes.q_heads * shapes.q_len * shapes.kv_len
    little = _LITTLE if shapes.q_heads == shapes.kv_heads else _LITTLE_SHARED
    return scores * max(shapes.head_dim, shapes.value_dim) > little


def queries_of_key(shapes: Shapes) -> int:
    """Counts the queries that share a key."""
    return shapes.q_len * (shapes.q_heads // shapes.kv_heads)


def operands(call: Call, named: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the operands of `decoding` from those of the pass."""
    own = {"lengths": "key_value_lengths"}
    return {name: named[own.get(name, name)] for name in call.operands}
