"""Backward units of grouped heads: how many query heads of a kv head one walks."""

import dataclasses

import pytest

from jax_flash import _gpu
from jax_flash._gpu.sm90.backward_tiling import BackwardTiling
from jax_flash._gpu.sm90.hopper import multiprocessors
from jax_flash._gpu.workspaces import is_spare
from jax_flash._ops import passes
from jax_flash._problem import Problem, Shapes

from .plain_calls import H200, PLAIN, SHAPES, replace_dims

pytestmark = pytest.mark.quick


def tiling_of(problem: Problem, shapes: Shapes) -> BackwardTiling:
    return _gpu.plan(passes(problem)["backward"], shapes, H200).tiling


@pytest.mark.parametrize("window", [(None, None), (None, 0), (1024, 0)])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("heads", [(32, 8), (16, 2), (64, 8), (128, 8), (32, 1), (48, 16), (12, 6)])
@pytest.mark.parametrize(("batch", "length"), [(8, 2048), (2, 8192)])
def test_units_of_grouped_heads_are_many(window, deterministic, heads, batch, length):
    """Four for each multiprocessor, or of one query head; deterministic ones fill their rounds."""
    problem = dataclasses.replace(PLAIN, window=window, deterministic=deterministic)
    shapes = dataclasses.replace(
        SHAPES, batch=batch, q_len=length, kv_len=length, q_heads=heads[0], kv_heads=heads[1]
    )
    tiling = tiling_of(problem, shapes)
    unit_heads, group = tiling.unit_heads or heads[0] // heads[1], heads[0] // heads[1]
    assert group % unit_heads == 0
    assert tiling.unit_heads < group
    units, sms = batch * heads[0] // unit_heads * length // 128, multiprocessors(H200)
    if deterministic and window == (None, None):
        assert unit_heads == 1 or units >= 0.9 * sms * -(-units // sms)
    elif deterministic and window == (None, 0):
        assert unit_heads <= 2
    else:
        assert unit_heads == 1 or units >= 4 * sms
    if tiling.ring_sets:
        assert 2 * tiling.ring_sets * tiling.l2_heads * unit_heads <= batch * heads[0]


@pytest.mark.parametrize(
    ("batch", "length", "group", "dim", "unit_heads"),
    [
        (1, 4096, 8, 256, 4),  # 64 blocks of keys: two rounds of 256 units of 4 heads
        (1, 2630, 3, 208, 1),
        (1, 8192, 8, 256, 0),  # 128 units of all heads are a round
        (8, 4096, 8, 256, 0),
        (3, 4096, 1, 256, 0),
        (1, 4096, 1, 256, 1),  # of which two CTAs share each walk
    ],
)
def test_units_of_wide_heads_fill_the_multiprocessors(batch, length, group, dim, unit_heads):
    assert_wide(None, batch, length, group, dim, unit_heads)


@pytest.mark.parametrize(
    ("batch", "length", "group", "dim", "unit_heads"),
    [
        (2, 4096, 2, 200, 1),  # 128 units of both heads, the longest of which take all the time
        (1, 2048, 8, 256, 1),
        (8, 1024, 4, 192, 2),  # no faster of one
        (8, 4096, 4, 256, 0),  # 512 units of all heads even out
        (1, 6382, 24, 184, 2),  # the last of units of eight would take a fifth of the time
    ],
)
def test_causal_units_of_wide_heads_even_out(batch, length, group, dim, unit_heads):
    """They are half as long as the longest in the mean."""
    assert_wide(0, batch, length, group, dim, unit_heads)


def test_units_of_wide_heads_beside_a_window_are_of_few_heads():
    assert_wide(0, 2, 1904, 24, 176, 1, left=823)


def assert_wide(right, batch, length, group, dim, unit_heads, left=None):
    shapes = dataclasses.replace(
        replace_dims(dim, dim), batch=batch, q_len=length, kv_len=length, q_heads=group, kv_heads=1
    )
    for deterministic in (False, True):
        problem = dataclasses.replace(PLAIN, window=(left, right), deterministic=deterministic)
        tiling = tiling_of(problem, shapes)
        assert tiling.wide
        assert tiling.unit_heads == (0 if deterministic else unit_heads)


@pytest.mark.parametrize(
    ("batch", "length", "heads", "dim", "unit_heads"),
    [
        (24, 27, (24, 2), 64, 6),  # 48 units of all heads, 96 of 6
        (8, 128, (8, 1), 64, 1),
        (66, 27, (24, 2), 64, 0),  # 132 units of all heads
        (14, 204, (20, 2), 72, 0),  # no room for sums of dk and dv
    ],
)
def test_units_of_short_grouped_heads_fill_the_multiprocessors(
    batch, length, heads, dim, unit_heads
):
    shapes = dataclasses.replace(
        replace_dims(dim, dim),
        batch=batch,
        q_len=length,
        kv_len=length,
        q_heads=heads[0],
        kv_heads=heads[1],
    )
    for deterministic in (False, True):
        problem = dataclasses.replace(PLAIN, window=(None, 0), deterministic=deterministic)
        tiling = tiling_of(problem, shapes)
        assert not tiling.wide
        assert tiling.unit_heads == (0 if deterministic else unit_heads)


@pytest.mark.parametrize(
    ("batch", "lengths", "heads", "dim", "unit_heads"),
    [
        (1, (1528, 192), (8, 1), 16, 1),
        (1, (4096, 4096), (16, 2), 32, 1),
        (4, (8192, 512), (16, 2), 32, 1),
        (9, (8192, 512), (16, 2), 32, 0),  # 72 units of all heads
        (1, (150, 130), (2, 1), 16, 0),  # no room for sums of dk and dv
    ],
)
def test_units_of_narrow_grouped_heads_add_beside_a_compact_sum(
    batch, lengths, heads, dim, unit_heads
):
    shapes = Shapes(batch, *lengths, *heads, dim, dim)
    for deterministic in (False, True):
        problem = dataclasses.replace(PLAIN, deterministic=deterministic)
        tiling = tiling_of(problem, shapes)
        assert tiling.unit_heads == (0 if deterministic else unit_heads)
        assert deterministic or tiling.compact
        assert is_spare(problem, shapes, tiling)


@pytest.mark.parametrize(
    ("batch", "length", "heads", "dim", "causal", "wide", "shares"),
    [
        (1, 512, 12, 64, False, True, False),  # 96 units of 64 keys
        (4, 128, 8, 128, True, True, False),
        (4, 512, 12, 64, False, False, False),  # 384 units
        (1, 1024, 6, 64, True, False, True),
        (1, 4096, 1, 128, True, False, True),
        (1, 1024, 12, 128, True, False, False),  # 96 units of 128 keys
        (7, 512, 1, 192, True, True, False),
        (1, 1376, 1, 192, True, True, True),
    ],
)
def test_few_units_are_of_64_keys_or_share_walks(batch, length, heads, dim, causal, wide, shares):
    shapes = Shapes(batch, length, length, heads, heads, dim, dim)
    problem = dataclasses.replace(PLAIN, window=(None, 0 if causal else None))
    tiling = tiling_of(problem, shapes)
    assert (tiling.wide, tiling.shares) == (wide, shares)
    assert tiling.prepare_parts == 4
    assert not (tiling.shares and tiling.pairs)
