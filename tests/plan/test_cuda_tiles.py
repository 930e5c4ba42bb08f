"""How a Hopper GPU runs a problem, and what is refused: pure choices, tested without a GPU."""

import dataclasses
import re

import jax
import pytest

from jax_flash import _gpu
from jax_flash._call import Call
from jax_flash._gpu import spec
from jax_flash._gpu.sizes import evaluate
from jax_flash._gpu.sm90.hopper import early_tiles
from jax_flash._ops import passes
from jax_flash._problem import TERMS, Problem, Shapes, TermShape

from .plain_calls import DIMS, H200, PLAIN, SHAPES, replace_dims

pytestmark = pytest.mark.quick
PASSES = ("forward", "backward")


def call_of(which: str, problem: Problem = PLAIN) -> Call:
    return passes(problem)[which]


def plan(which: str, problem: Problem = PLAIN, shapes: Shapes = SHAPES) -> _gpu.Plan:
    return _gpu.plan(call_of(which, problem), shapes, H200)


def reasons(gpu: _gpu.GpuSpec = H200, shapes: Shapes = SHAPES, **change) -> list[tuple[str, ...]]:
    """Why each pass of a changed plain problem is refused."""
    problem = dataclasses.replace(PLAIN, **change)
    return [_gpu.refuse(call_of(which, problem), shapes, gpu) for which in PASSES]


def assert_tiles_hold_heads(made: _gpu.Plan, *dims: int) -> None:
    """They have no more columns, but for boxes that begin up to seven before a head."""
    assert (made.constants["kHeadDim"], made.constants["kValueDim"]) == dims
    for tile, dim in zip((made.tiling.head_dim, made.tiling.value_dim), dims, strict=True):
        assert dim <= tile <= (-(-(dim + 7) // 8) * 8 if made.tiling.early else dim)


@pytest.mark.parametrize("head_dim", DIMS)
@pytest.mark.parametrize("value_dim", DIMS)
@pytest.mark.parametrize("window", [(None, None), (None, 0), (128, 128)])
def test_forward_tilings_fit_the_gpu(head_dim, value_dim, window):
    problem = dataclasses.replace(PLAIN, window=window)
    made = plan("forward", problem, replace_dims(head_dim, value_dim))
    tiling = made.tiling
    assert_tiles_hold_heads(made, head_dim, value_dim)
    assert tiling.block_kv % 16 == 0
    assert tiling.block_kv <= 256
    assert made.shared_bytes <= H200.shared_bytes
    producer, consumer = tiling.registers
    assert producer % 8 == 0
    assert consumer % 8 == 0
    assert 128 * (producer + tiling.consumers * consumer) <= 65536


@pytest.mark.parametrize("head_dim", range(136, 257, 8))
def test_blocks_of_wide_heads_of_unequal_dims_fit_the_gpu(head_dim):
    for value_dim in range(8, 257, 8):
        for kv_len in (138, 4096):
            shapes = dataclasses.replace(replace_dims(head_dim, value_dim), kv_len=kv_len)
            assert plan("forward", PLAIN, shapes).shared_bytes <= H200.shared_bytes, shapes


def test_queries_are_held_where_registers_are_left():
    shapes = dataclasses.replace(replace_dims(128, 128), q_len=1024, kv_len=1024)
    for scale in (0.125, -0.125):
        problem = dataclasses.replace(PLAIN, window=(None, 0), scale=scale)
        assert plan("forward", problem, shapes).tiling.holds_queries == (scale > 0)


@pytest.mark.parametrize("head_dim", DIMS)
@pytest.mark.parametrize("value_dim", DIMS)
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_backward_tilings_fit_the_gpu(head_dim, value_dim, softcap):
    problem = dataclasses.replace(PLAIN, softcap=softcap)
    made = plan("backward", problem, replace_dims(head_dim, value_dim))
    assert_tiles_hold_heads(made, head_dim, value_dim)
    assert made.shared_bytes <= H200.shared_bytes


def test_short_plain_calls_have_two_teams():
    """Each team has two warpgroups; long calls have three without teams."""
    narrow = dataclasses.replace(replace_dims(64, 64), batch=32, q_len=512, kv_len=512)
    for change, of_problem, consumers, teams in [
        ({}, {}, 2, 2), ({"batch": 4}, {}, 2, 2), ({"q_len": 520}, {}, 2, 2),
        ({}, {"window": (None, 0)}, 2, 2), ({"kv_len": 4096}, {}, 3, 1),
    ]:  # fmt: skip
        shapes = dataclasses.replace(narrow, **change)
        tiling = plan("forward", dataclasses.replace(PLAIN, **of_problem), shapes).tiling
        assert (tiling.consumers, tiling.teams) == (consumers, teams), (change, of_problem)


def test_full_calls_of_1024_keys_have_three_warpgroups_from_a_counter():
    """Head dim 128 in many rounds, by blocks of 80 keys; longer calls need no counter.

    Fewer keys by blocks of 64, where units of 192 rows fill most of a row. Units have all heads of
    a group where that makes them fewer by a twentieth.
    """
    middle = dataclasses.replace(replace_dims(128, 128), batch=16, q_len=1024, kv_len=1024)
    middle = dataclasses.replace(middle, q_heads=16, kv_heads=16)
    causal = {"window": (None, 0)}
    for change, of_problem, expected in [
        ({}, {}, (3, 80, True, 22, 1)), ({"q_len": 1535, "kv_len": 1025}, {}, (3, 80, True, 22, 1)),
        ({"kv_heads": 8}, {}, (3, 80, True, 32, 2)), ({"kv_heads": 4}, {}, (3, 80, True, 16, 4)),
        ({"q_len": 1280, "kv_len": 1280, "kv_heads": 4}, {}, (3, 80, True, 16, 4)),
        ({"q_len": 1344, "kv_len": 1344, "kv_heads": 4}, {}, (3, 80, True, 64, 1)),
        ({"kv_heads": 4}, {"window": (None, 0)}, (3, 80, True, 4, 4)),
        ({"batch": 8, "q_len": 2048, "kv_len": 2048, "kv_heads": 4}, {}, (3, 80, False, 1, 4)),
        ({"q_len": 4096, "kv_len": 4096, "kv_heads": 4}, causal, (3, 80, True, 4, 4)),
        ({"q_len": 8192, "kv_len": 8192, "kv_heads": 4}, causal, (3, 80, True, 4, 4)),
        ({"batch": 32, "q_len": 512, "kv_len": 512, "kv_heads": 4}, {}, (3, 64, True, 16, 4)),
        ({"batch": 4}, {}, (2, 128, False, 1, 1)), ({"kv_len": 1023}, {}, (2, 128, False, 1, 1)),
        ({}, {"window": (None, 0)}, (2, 128, True, 16, 1)),
        ({"batch": 21, "q_len": 768, "kv_len": 704}, {}, (3, 64, True, 44, 1)),
        ({"batch": 21, "q_len": 768, "kv_len": 704, "kv_heads": 8}, {}, (3, 64, True, 64, 1)),
        ({"batch": 32, "q_len": 912, "kv_len": 912, "kv_heads": 2}, {}, (3, 64, True, 8, 8)),
        ({"batch": 25, "q_len": 640, "kv_len": 768}, {}, (2, 128, False, 1, 1)),
        ({"batch": 20, "q_len": 832, "kv_len": 768}, {}, (2, 128, False, 1, 1)),
        ({"q_len": 4096, "kv_len": 4096}, {}, (3, 80, False, 1, 1)),
    ]:  # fmt: skip
        shapes = dataclasses.replace(middle, **change)
        made = plan("forward", dataclasses.replace(PLAIN, **of_problem), shapes).tiling
        found = (made.consumers, made.block_kv, made.dynamic, made.l2_heads, made.packed_heads)
        assert found == expected, (change, of_problem)
        assert made.shared_bytes <= H200.shared_bytes


@pytest.mark.parametrize(
    ("dim", "window", "change", "expected"),
    [
        (64, 0, {}, (2, 2, 64, 4)),
        (64, None, {}, (3, 1, 128, 4)),
        (64, None, {"kv_len": 256}, (2, 2, 64, 1)),
        (64, None, {"batch": 2}, (2, 2, 64, 1)),
        (64, 0, {"kv_len": 2048}, (3, 1, 128, 4)),
        (64, 0, {"kv_heads": 6, "q_heads": 18}, (2, 2, 64, 1)),
        (80, None, {}, (3, 1, 112, 4)),
        (96, 0, {}, (3, 1, 96, 4)),
        (96, 0, {"batch": 2}, (2, 1, 128, 1)),
        (128, 0, {"q_len": 512, "kv_len": 512, "batch": 32}, (3, 1, 80, 4)),
        (128, 0, {"batch": 2}, (2, 1, 128, 1)),
        (128, 0, {"batch": 2, "q_len": 337, "kv_len": 337}, (2, 1, 128, 4)),
        (256, 0, {}, (2, 1, 80, 4)),
        (256, None, {"q_len": 1600, "kv_len": 1600}, (2, 1, 80, 4)),
        (256, None, {"q_len": 4096, "kv_len": 4096}, (2, 1, 80, 1)),
    ],
)
def test_units_have_all_heads_of_a_group(dim, window, change, expected):
    """In many rounds of plain calls, full ones where units are fewer or keys 512 to 1535.

    Those have three warpgroups, but for causal ones up to head dim 64, and heads above 128.
    """
    of_dim = replace_dims(dim, dim)
    shapes = dataclasses.replace(of_dim, batch=16, q_len=1024, kv_len=1024, q_heads=16, kv_heads=4)
    shapes = dataclasses.replace(shapes, **change)
    made = plan("forward", dataclasses.replace(PLAIN, window=(None, window)), shapes)
    tiling = made.tiling
    assert (tiling.consumers, tiling.teams, tiling.block_kv, tiling.packed_heads) == expected
    assert tiling.shared_bytes <= H200.shared_bytes
    for other in ({"softcap": 5.0}, {"window": (70, 0)}, {"terms": ("sinks",)}):
        beside = dataclasses.replace(PLAIN, **other)
        assert plan("forward", beside, shapes).tiling.packed_heads == 1


@pytest.mark.parametrize(
    ("dim", "keys", "expected"),
    [
        (96, 92, (96, 3, 2, False)), (128, 77, (80, 3, 2, False)), (128, 100, (112, 3, 1, True)),
        (144, 90, (96, 2, 1, True)), (128, 300, (80, 3, 1, True)), (256, 512, (64, 2, 1, True)),
    ],
)  # fmt: skip
def test_few_keys_have_blocks_of_their_own(dim, keys, expected):
    """One block of up to 96 keys has no turns, and two buffers of Q up to head dim 128."""
    shapes = dataclasses.replace(replace_dims(dim, dim), batch=32, q_len=1024, kv_len=keys)
    made = plan("forward", PLAIN, shapes).tiling
    assert (made.block_kv, made.stages, made.query_stages, made.ping_pong) == expected
    assert made.shared_bytes <= H200.shared_bytes


@pytest.mark.parametrize(("dim", "heads", "of_one"), [(128, 16, 2), (64, 32, 4)])
def test_heads_of_causal_documents_go_together(dim, heads, of_one):
    """In L2 are keys of a document; of a row without documents as many heads as fit."""
    shapes = Shapes(1, 32768, 32768, 32, 32, dim, dim)
    causal = dataclasses.replace(PLAIN, window=(None, 0))
    documents = dataclasses.replace(causal, terms=("query_segments", "key_value_segments"))
    assert plan("forward", documents, shapes).tiling.l2_heads == heads
    assert plan("forward", causal, shapes).tiling.l2_heads == of_one


@pytest.mark.parametrize(
    ("sizes", "counted"),
    [
        ((8, 128, 16, 64), False),  # 128 units
        ((16, 512, 4, 64), False),  # 256, which two teams of a multiprocessor take at once
        ((16, 512, 5, 64), True),
        ((8, 512, 4, 128), False),  # 128
        ((9, 512, 4, 128), True),
        ((30, 64, 64, 232), True),  # of one length too: 78 us, 94 without a counter (H200)
    ],
)
def test_causal_units_come_from_a_counter_where_they_differ(sizes, counted):
    batch, length, heads, dim = sizes
    shapes = Shapes(batch, length, length, heads, heads, dim, dim)
    made = plan("forward", dataclasses.replace(PLAIN, window=(None, 0)), shapes)
    assert made.tiling.dynamic is counted
    assert ("flash_forward_begin" in made.beside_entries) is counted


@pytest.mark.parametrize("which", PASSES)
def test_tilings_where_multiprocessors_are_not_known(which):
    """As on an H200, which has most of what there is of them."""
    unknown = dataclasses.replace(H200, sms=None)
    for length in (512, 1024, 4096):
        shapes = dataclasses.replace(SHAPES, batch=24, q_len=length, kv_len=length)
        known, other = (_gpu.plan(call_of(which), shapes, gpu).tiling for gpu in (H200, unknown))
        assert known == other


def test_terms_that_hold_registers_leave_two_warpgroups():
    """At head dim 64 three of them, that drain or not, where they do not spill."""
    lengths = {"terms": ("key_value_lengths",)}
    mask = {"terms": ("mask", "key_value_lengths")}
    dropout = {"terms": ("dropout_state",), "dropout_rate": 0.1}  # not timed
    segments = {"terms": ("query_segments", "key_value_segments")}
    left = {"window": (128, None)}
    for change, consumers, drains, to_hide in [
        ({}, 3, False, False), (left, 3, False, False), (lengths, 3, False, True),
        (segments, 3, False, True), (lengths | left, 3, True, False), (mask, 2, False, False),
        (dropout, 2, False, False),
    ]:  # fmt: skip
        problem = dataclasses.replace(PLAIN, **change)
        made = plan("forward", problem, replace_dims(64, 64))
        assert made.tiling.consumers == consumers, change
        assert made.constants["kDrains"] == drains, change
        assert made.constants["kDrainsToHide"] == to_hide, change
        assert not plan("forward", problem).constants["kDrains"], change


@pytest.mark.parametrize("dims", [(64, 64), (64, 128), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_backward_of_whole_blocks_needs_less_than_two_of_dq(dims, deterministic):
    """Half of the float32 sum of dq lies in dq itself: as much as dq is left to find elsewhere.

    In a ring the sums of some heads need less.
    """
    problem = dataclasses.replace(PLAIN, deterministic=deterministic)
    shapes = replace_dims(*dims)

    def workspaces(shapes: Shapes) -> int:
        arrays = plan("backward", problem, shapes).workspaces.values()
        return sum(x.size * x.dtype.itemsize for x in arrays)

    dq = shapes.batch * shapes.q_len * shapes.q_heads * shapes.head_dim * 2
    ring = plan("backward", problem, shapes).tiling.ring_sets > 0
    assert ring == (not deterministic and dims[0] <= 128)
    assert dq / 4 < workspaces(shapes) < 1.2 * dq
    odd = workspaces(dataclasses.replace(shapes, q_len=4095))
    assert odd < 1.2 * dq if ring else 2 * dq <= odd < 2.2 * dq


@pytest.mark.parametrize("deterministic", [False, True])
def test_no_sum_of_dq_where_a_unit_has_all_keys(deterministic):
    """A pair of CTAs has those of wide heads. Units of a part of a group add dk and dv in turns."""
    (keys,) = jax.export.symbolic_shape("keys")
    for dim, change, of_problem, stores in [
        (64, {"kv_len": 128}, {}, True), (64, {"kv_len": 129}, {}, False),
        (64, {"kv_len": keys}, {}, False), (100, {"kv_len": 1}, {"softcap": 3.0}, True),
        (64, {"kv_len": 128, "kv_heads": 1}, {}, not deterministic),
        (64, {"kv_len": 128, "kv_heads": 2, "q_len": 64}, {}, True),
        (256, {"kv_len": 100}, {}, True), (256, {"kv_len": 129}, {}, False),
        (256, {"kv_len": 60}, {"softcap": 3.0}, False), (250, {"kv_len": 60}, {}, False),
    ]:  # fmt: skip
        problem = dataclasses.replace(PLAIN, deterministic=deterministic, **of_problem)
        shapes = dataclasses.replace(replace_dims(dim, dim), **change)
        made = plan("backward", problem, shapes)
        arrays = {*made.workspaces}
        assert made.tiling.stores_dq == stores, (dim, change)
        assert ("dq_sum" in arrays, "dq_marks" in arrays) == (not stores, made.tiling.marks_rows), (
            dim,
            change,
        )
        assert (
            ("turns" in arrays)
            == made.constants["kDeterministic"]
            == (deterministic and not stores)
        ), (dim, change)


@pytest.mark.parametrize("window", [(None, None), (None, 0), (1024, 0)])
@pytest.mark.parametrize("kv_heads", [5, 40])
@pytest.mark.parametrize("dim", [64, 128])
def test_rings_of_long_calls_have_numbers_of_32_bits(window, kv_heads, dim):
    """Bytes of the ring have 32; a set's units x its pieces of 16 queries 31, with a sign."""
    problem = dataclasses.replace(PLAIN, window=window)
    rings = []
    for length in (1 << n for n in range(16, 23)):
        shapes = dataclasses.replace(
            replace_dims(dim, dim), batch=1, q_len=length, kv_len=length, q_heads=40,
            kv_heads=kv_heads,
        )  # fmt: skip
        tiling = plan("backward", problem, shapes).tiling
        rings.append(tiling.ring_sets > 0)
        heads = tiling.l2_heads * (tiling.unit_heads or 40 // kv_heads)
        pieces = heads * length // 16 * (dim // 64)  # of 4 KB
        if tiling.ring_sets:
            assert tiling.ring_sets * pieces * 4096 <= 2**32
            assert tiling.l2_heads * length // 128 * pieces < 2**31
    assert rings[0] == (window[0] is None or kv_heads == 40)  # not of grouped heads in a window
    assert not rings[-1]


@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("dims", [(60, 64), (64, 60), (33, 7), (250, 128)])
def test_warps_load_rows_that_tma_cannot(which, dims):
    odd, aligned = (
        dataclasses.replace(replace_dims(*of), q_heads=7, kv_heads=7)
        for of in (dims, [-(-dim // 8) * 8 for dim in dims])
    )
    assert reasons(shapes=odd) == [(), ()]
    assert not plan(which, shapes=odd).tiling.tma_loads
    assert plan(which, shapes=aligned).tiling.tma_loads


def test_tiles_of_boxes_that_begin_early():
    shapes = dataclasses.replace(replace_dims(100, 36), q_heads=6, kv_heads=6)
    assert early_tiles(PLAIN, shapes) == dataclasses.replace(shapes, head_dim=104, value_dim=40)
    made = plan("forward", shapes=shapes)
    assert (made.tiling.early, made.tiling.tma_loads) == (True, True)
    wide = {"head_dim": 196, "value_dim": 196}
    assert early_tiles(PLAIN, dataclasses.replace(shapes, **wide)).head_dim == 200
    few_heads, wider = {"q_heads": 7, "kv_heads": 7}, {"head_dim": 204, "value_dim": 204}
    for change in ({"kv_heads": 3}, few_heads, {"head_dim": 196}, wider):
        assert early_tiles(PLAIN, dataclasses.replace(shapes, **change)) is None
    assert early_tiles(dataclasses.replace(PLAIN, dtype="float32"), shapes) is None


@pytest.mark.parametrize("which", PASSES)
def test_header_is_constexpr_definitions(which):
    """And behind them the parameters that the kernels take."""
    header, struct = plan(which).header.split('#include "params.cuh"\n')
    assert struct.startswith(f"struct {which.capitalize()}Params {{\n")
    for line in header.splitlines():
        assert re.fullmatch(
            r"constexpr (bool k\w+ = (true|false)|int k\w+ = -?\d+|float k\w+ = [\d.e-]+f);", line
        )
    assert "constexpr bool kBFloat16 = true;" in header
    assert "constexpr int kHeadDim = 128;" in header


@pytest.mark.parametrize("which", PASSES)
def test_header_leaves_run_time_values_out(which):
    """Sizes, scale and window sizes do not recompile: only what exists does."""
    windowed = dataclasses.replace(PLAIN, window=(512, 0), softcap=30.0)
    other = dataclasses.replace(windowed, window=(1024, 7), softcap=50.0, scale=0.5)
    assert plan(which, windowed).header == plan(which, other).header
    assert plan(which, windowed).header != plan(which).header
    drops = dataclasses.replace(PLAIN, terms=("dropout_state",), dropout_rate=0.1)
    more = dataclasses.replace(drops, dropout_rate=0.9)
    assert plan(which, drops).header == plan(which, more).header
    assert plan(which, drops).header != plan(which).header


@pytest.mark.parametrize("which", PASSES)
def test_a_tiling_can_be_given(which):
    chosen = plan(which).tiling
    given = dataclasses.replace(chosen, stages=chosen.stages - 1, l2_heads=3)
    made = _gpu.plan(call_of(which), SHAPES, H200, given)
    assert made.tiling == given
    assert made.constants["kStages"] == chosen.stages - 1
    (l2_heads,) = (x.value for x in made.launch.params.fields if x.name == "l2_heads")
    assert evaluate(l2_heads, made.dims) == 3
    assert made.shared_bytes < plan(which).shared_bytes


@pytest.mark.parametrize("family", [_gpu.sm80, _gpu.sm90], ids=["sm80", "sm90"])
@pytest.mark.parametrize(
    ("batch", "length", "heads", "kv_heads", "rows", "at_once"),
    [
        (4, 4096, 16, 16, True, 4),  # as much as the bias
        (4, 4096, 12, 4, True, 1),
        (16, 1024, 16, 16, False, 2),  # 64 MB
        (8, 256, 16, 16, False, 16),  # likewise, of all; 32 blocks of keys
        (9, 4096, 15, 15, False, 1),
        (3, 4096, 7, 7, True, 2),
        (16, 4096, 8, 8, False, 0),  # one head takes twice as much
        (4, 4096, 16, 1, False, 0),
        (2, 4096, 2, 2, False, 0),  # 64 blocks of keys
        (1, 4096, 16, 16, False, 0),  # nothing is shared
    ],
)
def test_scores_stored_for_a_shared_bias(family, batch, length, heads, kv_heads, rows, at_once):
    bias = TermShape("bfloat16", batch=1, heads=heads, queries=length, keys=length)
    shapes = Shapes(batch, length, length, heads, kv_heads, 64, 64, bias=bias)
    problem = dataclasses.replace(PLAIN, terms=("bias",), window=(None, 0))
    tiling = family.choose_backward(problem, shapes, H200)
    adds = rows and family is _gpu.sm90
    at_once = 0 if adds else at_once
    if family is _gpu.sm90:
        assert tiling.dbias_rows == rows
    assert tiling.dbias_heads == at_once
    assert tiling.stores_dbias == (adds or at_once > 0 or batch == 1)
    assert tiling.clears_dbias == (adds or batch == 1)
    call = passes(problem)["backward"]
    made = family.Sm90() if family is _gpu.sm90 else family.Sm80()
    kept = made.plan(call, shapes, H200, tiling).workspaces.get("dbias_sum")
    kept = 4 * kept.size if kept is not None and tiling.dbias_heads else 0
    assert kept <= max(64 << 20, 2 * heads * length**2)
    assert kept == at_once * batch * heads // kv_heads * length**2 * 2
    for change in ({"dtype": "float32"}, {"queries": 1}, {"heads": 1}):
        other = dataclasses.replace(shapes, bias=dataclasses.replace(bias, **change))
        assert not family.choose_backward(problem, other, H200).stores_dbias


def test_plan_prints_what_was_chosen():
    text = str(plan("forward", shapes=dataclasses.replace(replace_dims(100, 100), q_heads=32)))
    assert text.startswith("sm90/forward.cuh\n")
    assert "block_kv 128" in text
    assert "rows loaded by warps" in text


def test_refusal_names_the_dtype():
    assert all("float64" in only for (only,) in reasons(dtype="float64"))


@pytest.mark.parametrize(("dims", "reason"), [((640, 64), "640"), ((64, 513), "513")])
def test_refusal_names_the_head_dim(dims, reason):
    assert all(reason in only for (only,) in reasons(shapes=replace_dims(*dims)))


def test_refusal_gives_all_reasons():
    for given in reasons(spec.GPUS["A100"], replace_dims(640, 64), dtype="float64"):
        words = ("float64", "640")
        assert len(given) >= len(words)
        for word in words:
            assert word in "; ".join(given)


def test_refuses_nothing_that_the_kernels_have():
    everything = {
        "window": (128, 0), "bottom_right": True, "softcap": 30.0, "deterministic": True,
        "terms": tuple(name for name, term in TERMS.items() if term.native),
    }  # fmt: skip
    assert reasons() == [(), ()]
    assert reasons(**everything) == [(), ()]
