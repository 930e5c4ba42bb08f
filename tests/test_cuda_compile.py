"""Compiles every tuned CUDA kernel for its architecture and reads the compiler's report: no GPU."""

import dataclasses
import resource
from collections.abc import Iterator

import pytest

from jax_flash import _explain, _native, _tiles
from jax_flash._problem import Problem, Shapes

H200 = _tiles.GPUS["H200"]
PLAIN = Problem(dtype="bfloat16", scale=0.125)
SHAPES = Shapes(
    batch=2, q_len=4096, kv_len=4096, q_heads=16, kv_heads=16, head_dim=128, value_dim=128
)

LENGTHS = ("query_lengths", "key_value_lengths")
SEGMENTS = ("query_segments", "key_value_segments")
FEATURES: dict[str, dict] = {
    "float16": {"dtype": "float16"},
    "causal segments": {"terms": SEGMENTS, "window": (None, 0)},
    "lengths": {"terms": LENGTHS},
    "window": {"window": (1024, 0)},
    "softcap": {"softcap": 30.0},
    "sinks": {"terms": ("sinks",)},
    "deterministic": {"deterministic": True},
    "deterministic causal": {"deterministic": True, "window": (None, 0)},
    "deterministic segments": {"deterministic": True, "terms": SEGMENTS, "window": (None, 0)},
    "everything": {
        "window": (1024, 0),
        "bottom_right": True,
        "softcap": 30.0,
        "terms": (*LENGTHS, *SEGMENTS, "sinks"),
    },
}


def configurations() -> Iterator[tuple[str, Problem, Shapes]]:
    for dims in [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)]:
        shapes = dataclasses.replace(SHAPES, head_dim=dims[0], value_dim=dims[1])
        yield f"{dims[0]}/{dims[1]}", PLAIN, shapes
        yield f"{dims[0]}/{dims[1]} causal", dataclasses.replace(PLAIN, window=(None, 0)), shapes
    for name, change in FEATURES.items():
        yield name, dataclasses.replace(PLAIN, **change), SHAPES
    small = dataclasses.replace(SHAPES, head_dim=64, value_dim=64)
    for name in ("causal segments", "softcap", "sinks", "lengths", "window", "everything"):
        yield f"64/64 {name}", dataclasses.replace(PLAIN, **FEATURES[name]), small
    odd = dataclasses.replace(SHAPES, q_len=4095)  # dq does not hold half of its own sum
    for dim in (64, 128, 256):
        shapes = dataclasses.replace(odd, head_dim=dim, value_dim=dim)
        for turns in (False, True):
            problem = dataclasses.replace(PLAIN, window=(None, 0), deterministic=turns)
            yield f"{dim} causal odd{' deterministic' * turns}", problem, shapes
    yield "grouped heads", PLAIN, dataclasses.replace(SHAPES, kv_heads=4)
    for dims in [(100, 100), (33, 7), (127, 120), (255, 255)]:
        shapes = dataclasses.replace(SHAPES, head_dim=dims[0], value_dim=dims[1])
        yield f"{dims[0]}/{dims[1]}", PLAIN, shapes
    everything = dataclasses.replace(PLAIN, **FEATURES["everything"])
    yield "100/36 everything", everything, dataclasses.replace(SHAPES, head_dim=100, value_dim=36)


CONFIGURATIONS = [pytest.param(*rest, id=name) for name, *rest in configurations()]
pytestmark = pytest.mark.skipif(
    _native.available("cuda") is not None, reason=f"{_native.available('cuda')}"
)


@pytest.fixture(scope="module", autouse=True)
def no_disk_cache():
    """Compiles afresh, with assertions on the shared memory that the launch gives."""
    sources = _native.kernel_sources()
    for name, size in [
        ("forward", "sizeof(forward::Shared)"),
        ("backward", "backward::kSharedBytes"),
        ("backward_wide", "backward::kSharedBytes"),
    ]:
        sources[f"check/{name}.cuh"] = (
            f'#include "sm90/{name}.cuh"\n'
            f'static_assert({size} <= kLaunchSharedBytes, "shared_bytes in _tiles.py");\n'
        )
    _native.configure_cuda(None, 0, sources)
    yield
    _native.configure_cuda(_native.cache_folder(), _native.CACHE_BYTES)


@pytest.mark.parametrize(("problem", "shapes"), CONFIGURATIONS)
def test_forward_compiles_without_spills(problem: Problem, shapes: Shapes):
    tiles = _tiles.choose_tiles(problem, shapes, H200)
    check(tiles, tiles.header(problem), seconds=5)


@pytest.mark.parametrize(("problem", "shapes"), CONFIGURATIONS)
def test_backward_compiles_without_spills(problem: Problem, shapes: Shapes):
    tiles = _tiles.choose_backward_tiles(problem, shapes, H200)
    check(tiles, tiles.header(problem, with_dlse=False), seconds=15)


def test_backward_with_lse_gradient_compiles_without_spills():
    tiles = _tiles.choose_backward_tiles(PLAIN, SHAPES, H200)
    check(tiles, tiles.header(PLAIN, with_dlse=True), seconds=15)


def check(tiles: _tiles.Tiles, header: str, seconds: float) -> None:
    header += f"constexpr int kLaunchSharedBytes = {tiles.shared_bytes};\n"
    before = resource.getrusage(resource.RUSAGE_SELF)
    kernel = _native.compile_kernel(tiles.source.replace("sm90", "check"), header, H200.arch)
    after = resource.getrusage(resource.RUSAGE_SELF)
    entries = _explain.read_entries(kernel.log)
    assert set(tiles.entries) <= {entry.name for entry in entries}
    for entry in entries:
        assert entry.spill_bytes == 0, entry
        dynamic = tiles.shared_bytes if entry.name == tiles.entries[0] else 0
        assert entry.shared_bytes + dynamic <= _tiles.SMEM, entry
    assert _explain.read_warnings(kernel.log) == ()
    # Of the processor, not the clock: other work on the machine does not count.
    assert after.ru_utime - before.ru_utime < seconds
