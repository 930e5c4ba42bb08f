"""The handler of custom calls on GPUs: what it checks, launches and refuses of a plan.

Needs a C++ compiler and no GPU. That kernels get what they index, tests/emulator checks.
"""

from __future__ import annotations

import fcntl
import pickle
import random
import re
from pathlib import Path

import pytest

from jax_flash import _native
from jax_flash._gpu.plan import Plan

from .. import fake_cuda
from ..cases import Case
from ..fake_cuda import Direct, Recording

pytestmark = [
    pytest.mark.skipif(
        _native.available("cuda") is not None, reason=f"{_native.available('cuda')}"
    ),
    pytest.mark.skipif(_native._has_driver(), reason="a true driver is present"),
    pytest.mark.skipif(fake_cuda.COMPILER is None, reason="needs a C++ compiler"),
]

SMS = (20, 50)  # of the two devices of fake_cuda.cc
TARGETS = ("forward", "backward")
GPUS = ("H100", "A100")

NAMED = (
    Case("plain", T=200, S=333, N=4, K=2, H=128, batch=(3,), dtype="bfloat16", with_lse=True),
    Case("bias", T=200, S=136, N=4, K=2, H=64, batch=(3,), dtype="bfloat16", bias="b11s"),
)
EMPTY = [
    Direct(target, gpu=gpu, **{dim: 0})
    for gpu in GPUS
    for target, dims in (("forward", "BTN"), ("backward", "BN"))
    for dim in dims
]
SEQUENCES = "the CUDA kernels take no empty sequences"
SCRATCH = "the workspace {} is missing or not"
REFUSED = {
    Direct("forward", S=0): "the CUDA kernels take no empty keys",
    Direct("forward", S=0, gpu="A100"): "the CUDA kernels take no empty keys",
    Direct("backward", T=0): SEQUENCES,
    Direct("backward", S=0): SEQUENCES,
    Direct("backward", T=0, gpu="A100"): SEQUENCES,
    # Scratch arrays for more queries and keys, or fewer.
    Direct("forward", planned=500): SCRATCH.format("marks"),
    Direct("forward", planned=100): SCRATCH.format("marks"),
    Direct("forward", planned=300, gpu="A100"): SCRATCH.format("key_segment_ranges"),
    Direct("backward", planned=300): SCRATCH.format("lse_log2"),
    Direct("backward", planned=100): SCRATCH.format("lse_log2"),
    Direct("backward", planned=300, gpu="A100"): SCRATCH.format("lse_log2"),
    # Half of the sum of dq cannot lie in dq: tiles of other heads, or no whole ones.
    Direct("backward", T=256, dq_row_bytes=512): "this tiling is for another shape of dq",
    Direct("backward", dq_row_bytes=256): "this tiling is for another shape of dq",
    Direct("backward", dq_row_bytes=256, gpu="A100"): "this tiling is for another shape of dq",
    # Beyond that marks of 16 rows would not have numbers of 32 bits.
    Direct("forward", B=1, T=1, S=2**16, N=2**18, K=1, H=8): "batch x heads x (sequence length",
    # Other operands than the plan has.
    Direct("forward", edits=(("*B S K 64", "*B S K 128"),)): (
        "k has shape [2, 200, 2, 64], expected [*2, S, K, 128]"
    ),
    Direct("forward", edits=(("query_segments s32 *B T", "query_segments s32 *B 7"),)): (
        "query_segments has shape [2, 200], expected [*2, 7]"
    ),
    Direct("forward", edits=(("operand q bf16", "operand q f32"),)): "q is bf16, expected f32",
    Direct("forward", edits=(("operand k", "operand w bf16 7\noperand k"),)): (
        "6 operands, expected 7"
    ),
    # Plans from elsewhere.
    Direct("forward", edits=(("jax_flash plan", "jax_flash plan 0"),)): (
        'this plan is of another version of jax_flash; expected "jax_flash plan 1"'
    ),
    Direct("forward", edits=(("pointer 384 ", "pointer 385 "),)): (
        'this plan is malformed: a parameter lies beside the others in the line "pointer 385 0"'
    ),
    Direct("forward", edits=(("pointer 384 ", "pointer 4096 "),)): "lies beside the others",
    Direct("forward", edits=(("pointer 384 0", "pointer 384 99"),)): "there is no such buffer",
    Direct("forward", edits=(("none B T *", "none B W *"),)): "a name is not known",
    Direct("forward", edits=(("none B T * N *", "none B T"),)): "an expression has not one value",
    Direct("forward", edits=(("none B T *", "none * T *"),)): "an operand is missing",
    Direct("forward", edits=(("check N K %", "check N 0 %"),)): "a size is divided by 0",
    Direct("forward", edits=(("\nheader\n", "\n"),)): "this plan is malformed",
    Direct("forward", edits=(("map 0 0 bf16", "map 0 0 s32"),)): "no tensor map has such elements",
}
MANY_HEADS = [Direct(target, l2_heads=1 << 20, gpu=gpu) for target in TARGETS for gpu in GPUS]
SHORT = {
    (target, gpu): [
        Direct(target, short=i, gpu=gpu)
        for i in range(len(Direct(target, gpu=gpu).plan().workspaces))
    ]
    for target in TARGETS
    for gpu in GPUS
}
GRIDS = {  # 256 tiles, or 128 blocks of keys: (device, multiprocessors pretended) -> blocks
    Direct(target, B=32, device=device, pretended=pretended): min(blocks, most)
    for target, most in zip(TARGETS, (256, 128), strict=True)
    for device, pretended, blocks in [
        (0, 0, SMS[0]), (1, 0, SMS[1]), (1, 100, 100), (0, 500, 500)
    ]
}  # fmt: skip

# Recorded at their sixteenth call, and replayed from there.
REPEATED = [Direct(target, times=20, gpu=gpu) for target in TARGETS for gpu in GPUS]
OF_SEVERAL = Direct("forward", times=20, devices=2, B=3)  # which may wait for each other


def spoiled() -> list[Direct]:
    """Lists calls whose plans have a word or a line too few, or another number.

    Three lines of each kind, which the first word tells, for each pass: one parser reads a kind.
    """
    draw, calls = random.Random(0), []
    for target in TARGETS:
        kinds: dict[str, list[str]] = {}
        for line in Direct(target).plan().text.split("\nheader\n")[0].split("\n"):
            kinds.setdefault(line.split(" ")[0], []).append(line)
        for line in (x for lines in kinds.values() for x in draw.sample(lines, min(len(lines), 3))):
            words = line.split(" ")
            at = draw.randrange(len(words))
            other = draw.choice(("", "-1", "0", "4095", str(2**31), str(2**70), "T", "*", "?", "K"))
            calls.append(Direct(target, edits=((line, " ".join([*words[:at], *words[at + 1 :]])),)))
            words[at] = other
            calls.append(Direct(target, edits=((line, " ".join(words)),)))
            calls.append(Direct(target, edits=((f"{line}\n", ""),)))
    return calls


SPOILED = spoiled()


@pytest.fixture(scope="module")
def recordings(
    tmp_path_factory: pytest.TempPathFactory, shared_folder: Path
) -> dict[Case | Direct, Recording]:
    short = [call for calls in SHORT.values() for call in calls]
    cases = [*NAMED, *EMPTY, *REFUSED, *MANY_HEADS, *GRIDS, *REPEATED, OF_SEVERAL, *short, *SPOILED]
    kept = shared_folder / "recordings"  # once for all workers
    with (shared_folder / "recordings-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            made = fake_cuda.record(cases, tmp_path_factory.mktemp("fake_cuda"))
            kept.write_bytes(pickle.dumps(made))
    return dict(zip(cases, pickle.loads(kept.read_bytes()), strict=True))


@pytest.mark.parametrize("case", NAMED, ids=lambda case: case.name)
def test_results_are_returned_under_their_names(case: Case, recordings):
    """The fake GPU fills each result with its index + 1."""
    assert recordings[case].error == ""
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
    assert "jax_flash: " in recordings[call].error
    assert REFUSED[call] in recordings[call].error
    assert recordings[call].calls[0].launches == []


def test_a_spoiled_plan_is_an_error_or_runs(recordings):
    """The process that ran them all came to its end; most are refused, with a reason of ours."""
    errors = [recordings[call].error for call in SPOILED]
    assert sum(bool(error) for error in errors) > len(errors) // 2
    assert all(not error or "jax_flash: " in error or "CUDA_ERROR" in error for error in errors)


@pytest.mark.parametrize("of", SHORT, ids=str)
def test_workspace_that_is_too_small(of: tuple[str, str], recordings):
    refused = []
    for call in SHORT[of]:
        refused += re.findall(r"the workspace (\w+) is missing or", recordings[call].error)
        assert recordings[call].calls[0].launches == []
    assert refused == [*SHORT[of][0].plan().workspaces]


def read_int(plan: Plan, params: bytes, field: str) -> int:
    offset = next(at for at, name, _ in plan.launch.params.leaves() if name == field)
    return int.from_bytes(params[offset : offset + 4], "little", signed=True)


@pytest.mark.parametrize("call", MANY_HEADS, ids=str)
def test_l2_heads_are_at_most_all_heads(call: Direct, recordings):
    """Lowering for a symbolic batch knows no bound."""
    (made,) = recordings[call].calls
    assert read_int(call.plan(), made.launches[-1].params, "l2_heads") == call.B * call.N


@pytest.mark.parametrize("call", REPEATED, ids=str)
def test_calls_with_the_same_buffers_are_recorded(call: Direct, recordings):
    calls = recordings[call].calls
    assert [x.replayed for x in calls] == [False] * 15 + [True] * 5
    assert calls[0].launches
    assert all(x.launches == calls[0].launches for x in calls)
    assert not any(x.replayed for other in MANY_HEADS for x in recordings[other].calls)


def test_calls_beside_other_gpus_are_not_recorded(recordings):
    calls = recordings[OF_SEVERAL].calls
    assert len(calls) == 20
    assert not any(x.replayed for x in calls)


@pytest.mark.parametrize("call", GRIDS, ids=str)
def test_grid_is_of_the_device_that_runs(call: Direct, recordings):
    (made,) = recordings[call].calls
    (main,) = (x for x in made.launches if x.entry in ("flash_forward", "flash_backward"))
    assert main.grid == [GRIDS[call], 1, 1]


def test_launches_are_those_of_the_plan(recordings):
    """In their order, with their threads, shared memory and leave to overlap."""
    for call in MANY_HEADS:
        (made,) = recordings[call].calls
        steps = call.plan().launch.steps
        assert [x.entry for x in made.launches] == [x.entry for x in steps]
        for launch, step in zip(made.launches, steps, strict=True):
            assert launch.block == [step.threads, 1, 1]
            assert launch.shared == step.shared_bytes
            assert launch.overlaps == step.overlaps
            beside = call.plan().beside if step.beside else call.plan().source
            assert launch.program.endswith(f'#include "{beside}"\n')
