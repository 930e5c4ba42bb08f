"""A plain call on an H200, which tests of choices change."""

import dataclasses

from jax_flash._gpu import spec
from jax_flash._problem import Problem, Shapes

H200 = spec.GPUS["H200"]
PLAIN = Problem(dtype="bfloat16", scale=0.125)
SHAPES = Shapes(
    batch=2, q_len=4096, kv_len=4096, q_heads=16, kv_heads=16, head_dim=128, value_dim=128
)
DIMS = [1, 8, 36, 64, 72, 96, 127, 128, 160, 192, 255, 256]


def replace_dims(head_dim: int, value_dim: int) -> Shapes:
    return dataclasses.replace(SHAPES, head_dim=head_dim, value_dim=value_dim)
