"""What the CUDA handlers launch, and with which arguments: needs a C++ compiler and no GPU.

launches.py has what is expected.
"""

from __future__ import annotations

import fcntl
import functools
import math
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_flash import _native

from . import fake_cuda
from .cases import BOTTOM_RIGHT, Case
from .fake_cuda import Direct, Launch, On, Recording
from .launches import (
    WORKSPACES,
    assert_launched_with,
    backward_params,
    bias_bytes,
    bias_map,
    bias_params,
    ceil_div,
    check_clear,
    check_mask_plan,
    common_params,
    mask_params,
    names_of_buffers,
    tensor_map,
    without_bias,
)

pytestmark = [
    pytest.mark.skipif(
        _native.available("cuda") is not None, reason=f"{_native.available('cuda')}"
    ),
    pytest.mark.skipif(_native._has_driver(), reason="a true driver is present"),
    pytest.mark.skipif(fake_cuda.COMPILER is None, reason="needs a C++ compiler"),
]

SMS = (20, 50)  # of the two devices of fake_cuda.cc
C = functools.partial(Case, T=200, S=333, N=4, K=2, H=128, batch=(3,), dtype="bfloat16")
LENGTHS: dict[str, Any] = {"q_lengths": (150, 200, 77), "kv_lengths": (333, 40, 250)}
CASES = (
    C("plain"),
    C("narrow", H=64, K=4, batch=(2, 3), T=130),
    C("narrow float16", H=40, Hv=64, dtype="float16"),
    C("wide", H=256),
    C("value wider", H=72, Hv=192, causal=True),
    C("causal", causal=True, N=8),
    C("more work than multiprocessors", batch=(7,), N=16, K=8, T=500, S=900, H=16, causal=True),
    C("packed heads", N=16, T=9),
    C("window", window=(37, 20), align=BOTTOM_RIGHT, scale=0.3),
    C("lengths", **LENGTHS),
    C("negative scale", scale=-0.3),
    C("softcap and sinks", softcap=5.0, sinks=True, window=(None, 7)),
    C("segments", segments="packed"),
    C("segments and lengths", H=64, segments="documents", causal=True, **LENGTHS),
    C("segments, wide", H=192, Hv=128, segments="packed", deterministic=True, with_lse=True),
    C("packed heads and segments", N=16, T=70, segments="packed", q_lengths=(70, 5, 3)),
    C("positions", positions="offset", causal=True, N=8),
    C(
        "positions and segments",
        positions="permuted",
        window=(37, 20),
        segments="packed",
        H=64,
        deterministic=True,
        q_lengths=(70, 5, 3),
    ),
    C(
        "positions, wide, packed heads",
        positions="striped",
        window=(2**31 + 5, None),
        N=16,
        T=9,
        H=192,
        Hv=128,
    ),
    C("positions without a window", positions="offset"),
    C("gradient of lse", with_lse=True),
    C("dropout", dropout=0.3, N=16, T=9),
    C("dropout, most", dropout=0.99, H=64, causal=True, segments="packed"),
    C("deterministic", deterministic=True),
    C("deterministic, wide", H=256, deterministic=True, causal=True),
    C("ring", H=16, T=1024, S=1100, N=12, K=12, batch=(12,)),
    C("some heads of a group, in a ring", H=64, T=1024, S=1100, N=24, K=8, batch=(12,)),
    C("some heads of a group", H=128, T=800, S=500, N=8, K=2, batch=(1,), causal=True),
    C(
        "some heads of a group, deterministic",
        H=128,
        T=700,
        S=500,
        N=8,
        K=2,
        causal=True,
        deterministic=True,
    ),
    C("ring, causal", H=16, T=1030, S=1100, N=26, K=26, batch=(9,), causal=True),
    C("whole tiles", H=64, T=128, N=6),
    C("whole tiles, wide", H=192, Hv=128, T=192, causal=True, deterministic=True),
    C("rows that TMA cannot load", H=100, Hv=36, causal=True),
    C("mask", mask="b1ts"),
    C("mask of one batch row, causal", mask="1nts", H=64, causal=True, N=16, T=9),
    C("mask of keys", mask="b11s", batch=(2, 3), H=256),
    C("block mask", blocks=("b1", 64), H=64, causal=True),
    C("block mask of heads, mask of keys", blocks=("1n", 48), mask="b11s", S=320),
    C("layout", blocks=("11", 128), is_layout=True, H=64, T=400, S=500),
    C("bias", bias="bnts", scale=-0.3),
    C("bias of each score", bias="bnts", H=64, T=200, S=136),
    C("bias of each score, causal", bias="bnts", H=128, T=200, S=136, causal=True, softcap=5.0),
    C("bias of one batch row", bias="1nts", bias_dtype="float32", H=64, causal=True),
    C("bias that batch rows share", bias="1nts", T=130, S=140),
    C("bias that batch rows share, added", bias="1nts", T=70, S=4200, H=16, N=6, K=3),
    C(
        "bias that batch rows share, added, causal",
        bias="1nts",
        T=70,
        S=4200,
        H=16,
        K=4,
        causal=True,
    ),
    C(
        "bias that batch rows share, two launches",
        bias="1nts",
        batch=(4,),
        T=512,
        S=4608,
        H=16,
        K=4,
    ),
    C("bias of keys, softcap", bias="b11s", softcap=5.0, batch=(2, 3), H=256),
    C("bias of heads and mask", bias="1n11", bias_dtype="float32", mask="b1t1", with_lse=True),
    C("mask of queries and segments", mask="1nt1", segments="packed", S=320, deterministic=True),
    C("function of scores", score="alibi", N=8, K=4, scale=0.3),
    C("function of scores that falls", score="alibi", T=1030, S=2100, H=16, K=4, causal=True),
    C("function of scores, wide", score="cap", H=192, Hv=128, bias="1n1s", causal=True),
    C("odd rows", H=33, Hv=7, segments="packed", q_lengths=(150, 200, 77), deterministic=True),
)
AMPERE = {  # of an A100 -> keys, warps
    "plain": (128, 8),
    "narrow": (128, 4),
    "wide": (64, 8),
    "causal": (128, 8),
    "segments, wide": (64, 8),
    "positions and segments": (128, 4),
    "whole tiles": (128, 4),
    "mask": (128, 8),
    "bias of each score, causal": (128, 8),
    "bias that batch rows share, two launches": (128, 4),
    "bias of heads and mask": (128, 8),
    "odd rows": (128, 4),
}
EMPTY = (
    Direct("forward", B=0),
    Direct("forward", T=0),
    Direct("forward", N=0),
    Direct("forward", B=0, gpu="A100"),
    Direct("forward", T=0, gpu="A100"),
    Direct("backward", B=0),
    Direct("backward", N=0),
    Direct("backward", B=0, gpu="A100"),
)
REFUSED = {
    Direct("forward", S=0): "the CUDA kernels take no empty keys",
    Direct("forward", S=0, gpu="A100"): "the CUDA kernels take no empty keys",
    Direct("forward", planned=300, gpu="A100"): "workspaces for 5 blocks of 64 keys, of which",
    Direct("forward", planned=100, gpu="A100"): "workspaces for 2 blocks of 64 keys, of which",
    Direct("backward", T=0): "the CUDA kernels take no empty sequences",
    Direct("backward", S=0): "the CUDA kernels take no empty sequences",
    Direct("backward", T=0, gpu="A100"): "the CUDA kernels take no empty sequences",
    Direct("backward", planned=300, gpu="A100"): "workspaces for 5 blocks of 64 queries, of which",
    Direct("backward", dq_row_bytes=256, gpu="A100"): "this tiling is for another shape of dq",
    Direct("forward", planned=300): "workspaces for 3 blocks of 128 keys, of which there are 200",
    Direct("forward", planned=100): "workspaces for 1 blocks of 128 keys, of which there are 200",
    Direct("backward", planned=300): "workspaces for 3 blocks of 128 queries, of which there are",
    Direct("backward", planned=100): "workspaces for 1 blocks of 128 queries, of which there are",
    # Half of the sum of dq cannot lie in dq: tiles of other heads, or no whole ones.
    Direct("backward", T=256, dq_row_bytes=512): "this tiling is for another shape of dq",
    Direct("backward", dq_row_bytes=256): "this tiling is for another shape of dq",
    # Beyond that marks of 16 rows would not have numbers of 32 bits.
    Direct("forward", B=1, T=1, S=2**16, N=2**18, K=1, H=8): "batch x heads x (sequence length",
}


MANY_HEADS = [Direct(target, l2_heads=1 << 20) for target in WORKSPACES]
MANY_HEADS += [Direct(target, l2_heads=1 << 20, gpu="A100") for target in WORKSPACES]
SHORT = {
    target: [Direct(target, short=i) for i in range(len(names))]
    for target, names in WORKSPACES.items()
}
GRIDS = {  # 128 tiles, or blocks of keys: (device, multiprocessors pretended) -> blocks
    Direct(target, B=32, device=device, pretended=pretended): blocks
    for target in WORKSPACES
    for device, pretended, blocks in [
        (0, 0, SMS[0]), (1, 0, SMS[1]), (1, 100, 100), (0, 500, 128)
    ]
}  # fmt: skip


ON_A100 = [On("A100", case) for case in CASES if case.name in AMPERE]


@pytest.fixture(scope="module")
def recordings(
    tmp_path_factory: pytest.TempPathFactory, shared_folder: Path
) -> dict[Case | Direct | On, Recording]:
    cases = [
        *CASES,
        *ON_A100,
        *EMPTY,
        *REFUSED,
        *MANY_HEADS,
        *GRIDS,
        *SHORT["forward"],
        *SHORT["backward"],
    ]
    kept = shared_folder / "recordings"  # once for all workers: 11 CPU seconds
    with (shared_folder / "recordings-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            made = fake_cuda.record(cases, tmp_path_factory.mktemp("fake_cuda"))
            kept.write_bytes(pickle.dumps(made))
    recorded = pickle.loads(kept.read_bytes())
    return dict(zip(cases, recorded, strict=True))


by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@by_name
def test_forward(case: Case, recordings: dict[Case | Direct, Recording]):
    assert recordings[case].error == ""
    call, _ = recordings[case].calls
    *before, main, exact = call.launches
    c = main.constants()
    batch = math.prod(case.batch)
    packed, rows = c["kPackedHeads"], 64 * c["kConsumers"]
    query_tiles = ceil_div(case.T * packed, rows)
    key_blocks = ceil_div(case.S, c["kBlockKV"])
    groups = query_tiles * c["kConsumers"]
    boxes = ceil_div(case.H, 64), ceil_div(case.value_dim, 64)

    before = check_mask_plan(case, before, c, 64)
    if c["kHasPositions"]:
        ranges, *before = before
        assert ranges.entry == "position_ranges"
        assert ranges.grid == [ceil_div(batch * (key_blocks + groups), 8), 1, 1]
        assert (ranges.block, ranges.shared) == ([256, 1, 1], 0)
    if c["kHasSegments"]:
        assert [launch.entry for launch in before] == ["segment_ranges", "segment_plan"]
        for launch, warps in zip(before, (key_blocks, groups), strict=True):
            assert launch.grid == [ceil_div(batch * warps, 8), 1, 1]
            assert (launch.block, launch.shared) == ([256, 1, 1], 0)
    elif c["kFades"]:
        (norms,) = before
        assert norms.entry == "row_norms"
        parts = case.N * ceil_div(case.T, 64), case.kv_heads * ceil_div(case.S, 64)
        assert norms.grid == [ceil_div(batch * sum(parts), 8), 1, 1]
        assert (norms.block, norms.shared) == ([256, 1, 1], 0)
    elif c["kDynamic"] and (c["kHasPositions"] or not c["kHasMask"]):  # else mask_plan
        (begin,) = before
        assert begin.entry == "flash_forward_begin"
        assert (begin.grid, begin.block) == ([1, 1, 1], [32, 1, 1])
    else:
        assert before == []
    assert main.entry == "flash_forward"
    assert main.grid == [min(SMS[0], query_tiles * batch * case.N // packed), 1, 1]
    assert main.block == [128 * (c["kTeams"] * c["kConsumers"] + 1), 1, 1]
    tiles = c["kQueryStages"] * rows * boxes[0] + c["kStages"] * c["kBlockKV"] * sum(boxes)
    biases = c["kStages"] * rows * c["kBlockKV"] * bias_bytes(case) * c["kBiasTiles"]
    assert main.shared == c["kTeams"] * (128 * tiles + biases) + 2048
    assert main.overlaps == (c["kDynamic"] and not c["kHasSegments"])
    warps = 4 * groups * batch * case.N // packed
    assert exact.entry == "flash_forward_exact"
    assert exact.grid == [min(SMS[0], warps), 1, 1]
    assert (exact.block, exact.shared, exact.overlaps) == ([384, 1, 1], 0, True)

    expected = common_params(case, c) | {
        "query": tensor_map(case, c, "query", 64 // packed, packed),
        "key": tensor_map(case, c, "key", c["kBlockKV"]),
        "value": tensor_map(case, c, "value", c["kBlockKV"]),
        "bias_map": bias_map(case, c, 64 * c["kConsumers"]),
        "out": "out",
        "lse": "lse",
        "sinks": "sinks" if c["kHasSinks"] else None,
        "sinks_batch_stride": 0,
        "marks": f"int32[{warps}]",
        "unit_counter": "int32[1]",
        "segment_ranges": f"int32[{2 * batch * key_blocks}]" if c["kHasSegments"] else None,
        "segment_plan": f"int32[{4 * batch * groups}]" if c["kHasSegments"] else None,
        "key_position_ranges": f"int32[{2 * batch * key_blocks}]" if c["kHasPositions"] else None,
        "query_position_ranges": f"int32[{2 * batch * groups}]" if c["kHasPositions"] else None,
        "query_blocks": query_tiles,
    }
    for of, length, heads in (("query", case.T, case.N), ("key", case.S, case.kv_heads)):
        norms = f"int32[{batch * heads * ceil_div(length, 64)}]"
        expected[f"{of}_norms"] = norms if c["kFades"] else None
    assert c["kFades"] == (case.name == "function of scores that falls")
    if c["kPreScale"]:
        expected["scale_log2"] = np.float32((case.softcap or 1.0) / math.log(2))
    expected |= mask_params(case, c, 64, by_key=False) | bias_params(case, c)
    arrays = ("query", "key", "value")  # of float32 alone
    expected |= {f"{array}_{of}": None for array in arrays for of in ("halves", "factors")}
    assert_launched_with(call, names_of_buffers(case, recordings[case])[0], expected)
    assert 1 <= main.params["l2_heads"] <= batch * case.N // packed


@by_name
def test_backward(case: Case, recordings: dict[Case | Direct, Recording]):
    assert recordings[case].error == ""
    _, call = recordings[case].calls
    *before, prepare, main, finish = without_bias(call)
    c = main.constants()
    check_clear(case, check_mask_plan(case, before, c, c["kBlockQ"], by_key=True), main, c)
    batch = math.prod(case.batch)
    query_blocks = ceil_div(case.T, c["kBlockQ"])
    key_blocks = ceil_div(case.S, c["kBlockKV"])
    rows = batch * case.N * query_blocks * c["kBlockQ"]
    boxes = ceil_div(case.H, 64), ceil_div(case.value_dim, 64)
    wide = c["kBlockKV"] == 64
    assert wide == main.program.endswith('#include "sm90/backward_wide.cuh"\n')

    small = ([128, 1, 1], 0)
    assert prepare.entry == "flash_backward_prepare"
    assert prepare.grid == [rows // 64, 1, 1]
    assert (prepare.block, prepare.shared) == small
    assert main.entry == "flash_backward"
    parts = case.N // (main.constants()["kUnitHeads"] or case.N // case.kv_heads)
    assert main.grid == [min(SMS[0], batch * parts * key_blocks), 1, 1]
    assert main.block == [512 if wide else 384, 1, 1]
    # Keys and values, queries and output gradients, scores; test_cuda_compile*.py have the rest.
    tiles = 128 * sum(boxes) * (c["kBlockKV"] + c["kStages"] * c["kBlockQ"])
    assert main.shared > tiles + c["kScoreStages"] * c["kBlockKV"] * c["kBlockQ"] * 2
    assert finish.entry == "flash_backward_finish"
    ring, left_heads = check_ring(case, main, c)
    slabs = batch * case.kv_heads * key_blocks * c["kBlockKV"] // 64 * (c["kUnitHeads"] > 0)
    tiles = left_heads * query_blocks * c["kBlockQ"] // 64 * boxes[0]
    assert finish.grid == [tiles + slabs, 1, 1]
    assert (finish.block, finish.shared) == small
    sums = {"key_sums": None, "key_turns": None}
    if slabs:
        sums["key_sums"] = f"float32[{slabs * sum(boxes) * 64 * 64}]"
        sums["key_turns"] = f"int32[{slabs}]" if case.deterministic else None

    expected = (
        backward_params(case, call, c)
        | ring
        | sums
        | {
            "query": tensor_map(case, c, "query", c["kBlockQ"]),
            "key": tensor_map(case, c, "key", c["kBlockKV"]),
            "value": tensor_map(case, c, "value", c["kBlockKV"]),
            "dout": tensor_map(case, c, "dout", c["kBlockQ"]),
            "dkey": tensor_map(case, c, "dkey", 64),
            "dvalue": tensor_map(case, c, "dvalue", 64),
            "bias_map": bias_map(case, c, c["kBlockQ"]),
        }
    )
    arrays = ("query", "key", "value", "dout")  # of float32 alone
    expected |= {f"{array}_{of}": None for array in arrays for of in ("halves", "factors")}
    expected |= {"dout_row_factors": None, "shared_units": 0, "shares": 0}
    assert_launched_with(call, names_of_buffers(case, recordings[case])[1], expected)
    assert 1 <= main.params["l2_heads"] <= batch * parts
    assert (c["kUnitHeads"] > 0) == (parts > case.kv_heads) == case.name.startswith("some heads")
    assert c["kDeterministic"] == case.deterministic
    assert c["kHasDlse"] == case.with_lse


def check_ring(case: Case, main: Launch, c: dict[str, int]) -> tuple[dict[str, Any], int]:
    """Checks the ring of sums of dq: its parameters, heads that the last kernel has to finish."""
    heads = math.prod(case.batch) * case.N
    names = ("ring_counts", "dq_marks", "ring_heads", "ring_sets", "ring_lag")
    assert c["kRing"] == ("ring" in case.name)
    if not c["kRing"]:
        none: dict[str, Any] = dict.fromkeys(("dquery_map", *names[:2]))
        return none | dict.fromkeys(names[2:], 0), heads
    sets, lag = main.params["ring_sets"], main.params["ring_lag"]
    unit_heads = main.constants()["kUnitHeads"] or case.N // case.kv_heads
    set_heads = main.params["l2_heads"] * unit_heads
    assert 1 <= lag < sets <= ceil_div(heads, set_heads) / 2
    blocks = ceil_div(case.T, c["kBlockQ"]) * c["kBlockQ"] // 64 * ceil_div(case.H, 64)
    ring = sets * set_heads
    assert 2 * ring <= heads
    found: dict[str, Any] = {
        "ring_counts": f"int32[{heads // unit_heads * 2}]",
        "dq_marks": f"int32[{heads * blocks}]",
        "dq_sum": f"float32[{ring * blocks * 4096}]",
        "ring_heads": ring,
        "ring_sets": sets,
        "ring_lag": lag,
        "dquery_map": tensor_map(case, c, "query", 16) | {"address": "dquery"},
    }
    return found, heads - (ceil_div(heads, set_heads) - lag) * set_heads


@pytest.mark.parametrize("on", ON_A100, ids=lambda on: on.case.name)
def test_backward_since_ampere(on: On, recordings: dict[Case | Direct | On, Recording]):
    case = on.case
    assert recordings[on].error == ""
    _, call = recordings[on].calls
    *before, prepare, main, finish = without_bias(call)
    c = main.constants()
    assert c["kBlockQ"] == 64
    check_clear(case, check_mask_plan(case, before, c, c["kBlockQ"], by_key=True), main, c)
    assert (c["kBlockKV"], c["kWarps"]) == AMPERE[case.name]
    batch = math.prod(case.batch)
    tiles = batch * case.N * ceil_div(case.T, 64)
    assert (prepare.entry, prepare.grid) == ("flash_backward_prepare", [tiles, 1, 1])
    assert main.entry == "flash_backward_sm80"
    heads = main.params["launched_kv_heads"] or case.kv_heads
    assert main.grid == [batch * heads * ceil_div(case.S, c["kBlockKV"]), 1, 1]
    assert main.block == [32 * c["kWarps"], 1, 1]
    boxes = ceil_div(case.H, 64), ceil_div(case.value_dim, 64)
    # compile_cases.py compares the whole with what the kernel lays over it.
    assert main.shared > 128 * sum(boxes) * (c["kBlockKV"] + c["kStepQueries"])
    assert finish.entry == "flash_backward_finish"
    assert finish.grid == [tiles * boxes[0], 1, 1]
    expected = backward_params(case, call, c)
    arrays = ("query", "key", "value", "dout")  # of float32 alone
    expected |= {f"{array}_{of}": None for array in arrays for of in ("halves", "factors")}
    assert_launched_with(call, names_of_buffers(case, recordings[on])[1], expected)


@by_name
def test_results_are_returned_under_their_names(case: Case, recordings):
    """The fake GPU fills each result with its index + 1."""
    values = recordings[case].values
    expected = {"out": 1, "dquery": 1, "dkey": 2, "dvalue": 3}
    expected |= {"lse": 2} if case.with_lse else {}
    expected |= {"dbias": 4} if case.bias else {}
    for name, byte in expected.items():
        assert set(values[name].tobytes()) == {byte}, name


@pytest.mark.parametrize("call", EMPTY, ids=str)
def test_nothing_is_launched_for_empty_results(call: Direct, recordings):
    assert recordings[call].error == ""
    (made,) = recordings[call].calls
    assert made.launches == []


@pytest.mark.parametrize("call", REFUSED, ids=str)
def test_refused(call: Direct, recordings):
    assert f"jax_flash: {REFUSED[call]}" in recordings[call].error
    assert recordings[call].calls[0].launches == []


@pytest.mark.parametrize("target", SHORT)
def test_workspace_that_is_too_small(target: str, recordings):
    refused = []
    for call in SHORT[target]:
        refused += re.findall(r"the workspace (\w+) is missing or", recordings[call].error)
        assert recordings[call].calls[0].launches == []
    assert sorted(refused) == sorted(WORKSPACES[target])


@pytest.mark.parametrize("call", MANY_HEADS, ids=str)
def test_l2_heads_are_at_most_all_heads(call: Direct, recordings):
    """Lowering for a symbolic batch knows no bound."""
    (made,) = recordings[call].calls
    assert made.launches[-1].params["l2_heads"] == call.B * call.N


@pytest.mark.parametrize("call", GRIDS, ids=str)
def test_grid_is_of_the_device_that_runs(call: Direct, recordings):
    (made,) = recordings[call].calls
    (main,) = (x for x in made.launches if x.entry in ("flash_forward", "flash_backward"))
    assert main.grid == [GRIDS[call], 1, 1]


def test_sinks_of_each_batch_row(recordings):
    (made,) = recordings[MANY_HEADS[0]].calls
    params = made.launches[-1].params
    assert made.operands[made.find(params["sinks"])]["dims"] == [2, 2]
    assert params["sinks_batch_stride"] == 2
