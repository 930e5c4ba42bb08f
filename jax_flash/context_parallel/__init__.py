"""Attention over a sequence that is split over the devices of a mesh axis.

    attention.py    the public call: checks, the choice of a strategy, shard_map around itself
    orders.py       reorder, restore; which tokens stand on which device, and where
    shard.py        one device's operands, as the strategies take them
    ring.py         keys and values travel; a derivative of its own
    all_to_all.py   the sequence whole and the heads split, in between
    all_gather.py   all keys everywhere, or those of the neighbours

docs/context_parallel.md is the guide.
"""

from jax_flash.context_parallel.attention import attention
from jax_flash.context_parallel.orders import reorder, restore

__all__ = ["attention", "reorder", "restore"]
