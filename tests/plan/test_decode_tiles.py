"""How a Hopper GPU decodes: pure choices, tested without a GPU."""

import dataclasses
import itertools

import pytest

from jax_flash import _gpu
from jax_flash._ops.decode import Decode

from .plain_calls import H200, PLAIN, SHAPES

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("dim", [32, 64, 128, 256])
def test_teams_of_decoding_have_a_stage_each(dim):
    call = Decode(PLAIN, None)
    for batch, length in itertools.product((1, 4, 8), (64, 320, 1024, 3000, 4096, 16384, 1 << 17)):
        shapes = dataclasses.replace(
            SHAPES, batch=batch, q_len=1, kv_len=length, head_dim=dim, value_dim=dim
        )
        tiling = _gpu.plan(call, shapes, H200).tiling
        assert tiling.stages >= tiling.teams
    assert tiling.cluster == 1
    assert tiling.teams == 1


@pytest.mark.parametrize(
    ("batch", "length", "cache", "cluster"),
    [(1, 4096, None, 8), (2, 4096, None, 4), (3, 4096, None, 4), (4, 4096, None, 2),
     (8, 4096, None, 2), (9, 4096, None, 1),
     # Half as many CTAs again: pairs of few positions, and eight bits.
     (4, 1024, None, 3), (5, 1024, None, 2), (4, 8192, "int8", 3), (2, 4096, "int8", 6),
     (2, 1024, "int8", 4), (8, 4096, "int8", 2),
     # One long row, whose parts are equal.
     (1, 1 << 17, None, 8), (1, 1 << 18, None, 1), (1, 1 << 17, "int8", 1), (2, 1 << 15, None, 1)],
)  # fmt: skip
def test_clusters_of_decoding_fit_beside_each_other(batch, length, cache, cluster):
    """Clusters of 4 and 8 lie within a GPC: not in all of the 132 multiprocessors."""
    shapes = dataclasses.replace(SHAPES, batch=batch, q_len=1, kv_len=length, kv_heads=8)
    call = Decode(PLAIN, None, quantized=cache)
    assert _gpu.plan(call, shapes, H200).tiling.cluster == cluster


@pytest.mark.parametrize(
    ("page", "cache", "family"),
    [(1, None, "decode_sm80"), (6, None, "decode_sm80"), (4, None, "decode"), (64, None, "decode"),
     (1, "int8", "decode")],
)  # fmt: skip
def test_positions_that_lie_apart_come_by_cp_async(page, cache, family):
    call = Decode(PLAIN, None, quantized=cache, paged=True)
    for batch in (4, 64):
        shapes = dataclasses.replace(SHAPES, batch=batch, q_len=1, kv_len=1024, page_size=page)
        made = _gpu.plan(call, shapes, H200)
        assert made.family == family


@pytest.mark.parametrize(
    ("page", "tokens", "length", "box"),
    [(None, 1, 8192, 32), (None, 1, 1000, 128), (None, 32, 8192, 64), (128, 1, 8192, 64)],
)
def test_halves_of_a_row_come_one_behind_the_other(page, tokens, length, box):
    """Boxes of few positions where rows are long; a cache of any length has them."""
    call = Decode(PLAIN, None, paged=page is not None)
    for positions in (length, length + 1):
        shapes = dataclasses.replace(
            SHAPES, batch=64, q_len=tokens, kv_len=positions, page_size=page, q_heads=8, kv_heads=8
        )
        assert _gpu.plan(call, shapes, H200).tiling.box_rows == box


@pytest.mark.parametrize(("teams", "prepared"), [(None, 3), (2, 3), (1, 0)])
def test_new_rows_are_prepared_where_a_cta_has_a_warp_for_each(teams, prepared):
    """Keys and values of three tokens are six rows; one team has four warps."""
    shapes = dataclasses.replace(SHAPES, batch=8, q_len=3, kv_len=4096, q_heads=8, kv_heads=8)
    call = Decode(PLAIN, None, appends=True)
    made = _gpu.decode.make(call, shapes, H200, cluster=2, teams=teams)
    assert made.new_tokens == prepared


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("dims", [(128, 128), (192, 128), (400, 128), (576, 128), (128, 200)])
def test_caches_of_eight_bits_run_with_many_rows_as_with_few(dims, paged):
    """Two kv heads of a CTA are a choice where there is room for two stages."""
    call = Decode(PLAIN, None, quantized="int8", paged=paged)
    for batch in (31, 32, 64):
        shapes = dataclasses.replace(
            SHAPES, batch=batch, q_len=1, kv_len=2048, q_heads=32, kv_heads=8,
            head_dim=dims[0], value_dim=dims[1], page_size=64 if paged else None,
        )  # fmt: skip
        tiling = _gpu.plan(call, shapes, H200).tiling
        assert tiling.stages >= (2 if dims[0] <= 400 else 1)
        assert tiling.heads == (2 if batch > 31 and dims == (128, 128) else 1)


@pytest.mark.parametrize(
    ("batch", "count", "places", "cluster"),
    [(0, 2048, False, 1), (1, 2048, True, 1), (8, 2048, True, 8), (8, 2049, True, 1),
     (2, 1024, True, 8), (8, 1023, True, 1), (14, 1500, True, 8), (15, 1500, True, 1),
     (16, 1500, True, 1), (128, 2048, False, 1)],
)  # fmt: skip
def test_chosen_keys_are_read_as_they_are_where_parts_share_rows(batch, count, places, cluster):
    call = Decode(PLAIN, None, value_dim=512, paged=True, packs=True)
    shapes = dataclasses.replace(
        SHAPES, batch=batch, q_len=1, kv_len=count, q_heads=16, kv_heads=1,
        head_dim=576, value_dim=512, page_size=1,
    )  # fmt: skip
    made = _gpu.plan(call, shapes, H200)
    assert made.family == "sm90_latent"
    assert made.tiling.takes_places == places
    assert made.tiling.cluster == cluster
    assert len(made.launch.steps) == (1 if cluster > 1 else 2 if places else 3)
