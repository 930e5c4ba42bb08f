"""Orders of a split sequence: undone, known by device, and balanced in their work."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jax_flash.context_parallel import reorder, restore
from jax_flash.context_parallel.orders import ORDERS, Layout
from jax_flash.context_parallel.reach import Reach

from ..devices import mesh_with
from .split_sequences import SHARDS, SPLIT


@pytest.mark.parametrize("order", ORDERS)
def test_orders_are_undone_and_say_where_tokens_stand(order):
    x = np.arange(2 * 48 * 3).reshape(2, 48, 3)
    there = reorder(x, order, 4, 1)
    np.testing.assert_array_equal(restore(there, order, 4, -2), x)
    tokens = np.asarray(reorder(np.arange(48), order, 4, 0)).reshape(4, 12)
    for shards, block in ((4, 1), (2, 2), (1, 4)):
        held = tokens.reshape(shards, -1)
        for rank in range(shards):
            layout = Layout(order, shards, block)
            indices = layout.indices(rank, held.shape[1])
            np.testing.assert_array_equal(indices, np.sort(held[rank]))
            for (low, high), run in zip(
                layout.runs(rank, held.shape[1]),
                np.split(np.sort(held[rank]), 2 if order == "zigzag" else 1),
                strict=True,
            ):
                assert (low, high) == (run[0], run[-1])


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_arrays_that_are_split_already_are_reordered(explicit):
    mesh, x = mesh_with(explicit, seq=SHARDS), np.arange(64).reshape(2, 32)
    placed = jax.device_put(x, NamedSharding(mesh, SPLIT))
    there = reorder(placed, "zigzag", SHARDS, 1)
    np.testing.assert_array_equal(there, reorder(x, "zigzag", SHARDS, 1))
    back = jax.jit(lambda x: restore(x, "zigzag", SHARDS, 1))(there)
    np.testing.assert_array_equal(back, x)
    assert jax.typeof(back) == jax.typeof(placed)


def computed(order, shards, length, rank, block=16):
    """Blocks of a causal ring's scores that a device computes, where kernels skip hidden ones."""
    reach = Reach(Layout(order, shards), length, length, (None, 0), 0)
    own = np.asarray(reach.layout.indices(rank, length))
    total = 0
    for source in range(shards):
        chosen = 1 if source == rank else int(reach.choose(rank, source))
        if chosen:
            rows, keys = reach.pieces[chosen - 1]
            theirs = np.asarray(reach.layout.indices(source, length))[keys]
            queries, keys = own[rows].reshape(-1, block), theirs.reshape(-1, block)
            total += np.sum(queries.max(axis=1)[:, None] >= keys.min(axis=1))
    return total


def test_causal_work_is_balanced():
    """No device has more than 1.1 times the mean to do; in order "contiguous" the last has."""
    work = {order: [computed(order, 8, 512, rank) for rank in range(8)] for order in ORDERS}
    for order in ("zigzag", "striped"):
        assert max(work[order]) <= 1.1 * np.mean(work[order])
    assert max(work["contiguous"]) > 1.7 * np.mean(work["contiguous"])
    # What is computed is little more than the half of all blocks that causality leaves.
    assert sum(work["zigzag"]) <= 1.01 * sum(work["contiguous"])
