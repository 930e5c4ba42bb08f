"""How one GPU runs a problem: pure choices, tested without a GPU."""

import dataclasses
import re

import pytest

from jax_flash import _tiles
from jax_flash._problem import TERMS, Problem, Shapes

pytestmark = pytest.mark.quick

H200 = _tiles.GPUS["H200"]
PLAIN = Problem(dtype="bfloat16", scale=0.125)
SHAPES = Shapes(
    batch=2, q_len=4096, kv_len=4096, q_heads=16, kv_heads=16, head_dim=128, value_dim=128
)
DIMS = [1, 8, 36, 64, 72, 96, 127, 128, 160, 192, 255, 256]


def replace_dims(head_dim: int, value_dim: int) -> Shapes:
    return dataclasses.replace(SHAPES, head_dim=head_dim, value_dim=value_dim)


@pytest.mark.parametrize("head_dim", DIMS)
@pytest.mark.parametrize("value_dim", DIMS)
@pytest.mark.parametrize("window", [(None, None), (None, 0), (128, 128)])
def test_forward_tiles_fit_the_gpu(head_dim, value_dim, window):
    problem = dataclasses.replace(PLAIN, window=window)
    tiles = _tiles.choose_tiles(problem, replace_dims(head_dim, value_dim), H200)
    assert (tiles.head_dim, tiles.value_dim) == (head_dim, value_dim)
    assert tiles.tile_kv % 16 == 0
    assert tiles.tile_kv <= 256
    assert tiles.shared_bytes <= _tiles.SMEM
    producer, consumer = tiles.registers
    assert producer % 8 == 0
    assert consumer % 8 == 0
    assert 128 * (producer + tiles.consumers * consumer) <= 65536


@pytest.mark.parametrize("head_dim", DIMS)
@pytest.mark.parametrize("value_dim", DIMS)
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_backward_tiles_fit_the_gpu(head_dim, value_dim, softcap):
    problem = dataclasses.replace(PLAIN, softcap=softcap)
    shapes = replace_dims(head_dim, value_dim)
    tiles = _tiles.choose_backward_tiles(problem, shapes, H200)
    assert (tiles.head_dim, tiles.value_dim) == (head_dim, value_dim)
    assert tiles.shared_bytes <= _tiles.SMEM


@pytest.mark.parametrize("dims", [(64, 64), (64, 128), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_backward_of_whole_tiles_needs_less_than_two_of_dq(dims, deterministic):
    """Half of the float32 sum of dq lies in dq itself: as much as dq is left to find elsewhere."""
    problem = dataclasses.replace(PLAIN, deterministic=deterministic)
    shapes = replace_dims(*dims)

    def workspaces(shapes: Shapes) -> int:
        tiles = _tiles.choose_backward_tiles(problem, shapes, H200)
        return sum(x.size * x.dtype.itemsize for x in tiles.workspaces(problem, shapes))

    dq = shapes.batch * shapes.q_len * shapes.q_heads * shapes.head_dim * 2
    assert dq < workspaces(shapes) < 1.2 * dq
    assert 2 * dq <= workspaces(dataclasses.replace(shapes, q_len=4095)) < 2.2 * dq


@pytest.mark.parametrize("dims", [(60, 64), (64, 60), (33, 7), (250, 128)])
def test_warps_load_rows_that_the_copy_engine_cannot(dims):
    assert _tiles.supports(PLAIN, replace_dims(*dims), H200) is None
    aligned = replace_dims(*(-(-dim // 8) * 8 for dim in dims))
    for choose in (_tiles.choose_tiles, _tiles.choose_backward_tiles):
        assert not choose(PLAIN, replace_dims(*dims), H200).tma_loads
        assert choose(PLAIN, aligned, H200).tma_loads


def test_header_is_constexpr_definitions():
    tiles = _tiles.choose_tiles(PLAIN, SHAPES, H200)
    header = tiles.header(PLAIN)
    for line in header.splitlines():
        assert re.fullmatch(
            r"constexpr (bool k\w+ = (true|false)|int k\w+ = -?\d+|float k\w+ = [\d.e-]+f);", line
        )
    assert "constexpr bool kBFloat16 = true;" in header
    assert "constexpr int kHeadDim = 128;" in header


def test_header_leaves_run_time_values_out():
    """Sizes, scale and window sizes do not recompile: only what exists does."""
    tiles = _tiles.choose_tiles(PLAIN, SHAPES, H200)
    windowed = dataclasses.replace(PLAIN, window=(512, 0), softcap=30.0)
    other = dataclasses.replace(windowed, window=(1024, 7), softcap=50.0, scale=0.5)
    assert tiles.header(windowed) == tiles.header(other)
    assert tiles.header(windowed) != tiles.header(PLAIN)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float32"}, "float32"),
        ({"terms": ("bias",)}, "bias"),
        ({"terms": ("mask",)}, "boolean mask"),
        ({"terms": ("dropout_state",), "dropout_rate": 0.1}, "dropout"),
    ],
)
def test_supports_names_the_feature(change, reason):
    assert reason in str(_tiles.supports(dataclasses.replace(PLAIN, **change), SHAPES, H200))


@pytest.mark.parametrize(("dims", "reason"), [((512, 64), "512"), ((64, 260), "260")])
def test_supports_names_the_head_dim(dims, reason):
    assert reason in str(_tiles.supports(PLAIN, replace_dims(*dims), H200))


def test_supports_names_the_gpu():
    assert "A100" in str(_tiles.supports(PLAIN, SHAPES, _tiles.GPUS["A100"]))


def test_supports_what_the_kernels_have():
    terms = tuple(t for t in TERMS if t not in ("bias", "mask", "dropout_state"))
    everything = dataclasses.replace(
        PLAIN, window=(128, 0), bottom_right=True, softcap=30.0, deterministic=True, terms=terms
    )
    assert _tiles.supports(PLAIN, SHAPES, H200) is None
    assert _tiles.supports(everything, SHAPES, H200) is None


def test_unknown_gpu_name():
    with pytest.raises(ValueError, match="gpu must be one of A100, H100, H200, not 'H300'"):
        _tiles.gpu_named("H300")


@pytest.mark.parametrize(
    ("capability", "arch"), [("8.0", "sm_80"), ("9.0", "sm_90a"), ("10.0", "sm_100")]
)
def test_spec_of_a_device(capability, arch):
    @dataclasses.dataclass
    class Device:
        device_kind: str
        compute_capability: str

    spec = _tiles.gpu_of(Device("NVIDIA X", capability))
    assert (spec.name, spec.arch) == ("NVIDIA X", arch)
