"""What both passes know of the GPU."""

from jax_flash._gpu.spec import GpuSpec
from jax_flash._problem import Shapes

# Bytes of what the heads walked together share, that stay in an H200's L2 (60 MB, halved by its two
# partitions). Taken on every GPU: shares of smaller caches were not measured.
L2_SHARE = 32 << 20


def multiprocessors(gpu: GpuSpec) -> int:
    """Counts them; of a GPU that is not known as many as an H200 has."""
    return gpu.sms or 132


def tma_loads_of(shapes: Shapes) -> bool:
    """Tells whether TMA can load the rows: they are multiples of 16 bytes apart."""
    return shapes.head_dim % 8 == 0 and shapes.value_dim % 8 == 0
