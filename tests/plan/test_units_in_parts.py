"""Which forward passes of 16 bits on Hopper have units in parts along their keys."""

import dataclasses
from typing import Any

import jax
import pytest

from jax_flash import _gpu
from jax_flash._gpu.plan import Kernel
from jax_flash._gpu.sizes import evaluate
from jax_flash._ops import passes
from jax_flash._problem import Shapes, TermShape

from .plain_calls import H200, PLAIN

pytestmark = pytest.mark.quick


def plan_of(sizes: tuple[int, ...], **change: Any) -> _gpu.Plan:
    """Plans a call of a batch, queries, keys, heads, kv heads and a head dim."""
    of_shapes = {x.name for x in dataclasses.fields(Shapes)} & {*change}
    shapes = Shapes(*sizes, sizes[-1])
    shapes = dataclasses.replace(shapes, **{name: change.pop(name) for name in of_shapes})
    problem = dataclasses.replace(PLAIN, **change)
    return _gpu.plan(passes(problem)["forward"], shapes, H200)


CAUSAL: dict[str, Any] = {"window": (None, 0)}
AT_END: dict[str, Any] = {**CAUSAL, "bottom_right": True}
FEW = (1, 256, 4096, 8, 8, 128)


@pytest.mark.parametrize(
    ("sizes", "change", "parts"),
    [
        ((1, 64, 2048, 8, 8, 64), {}, 4), (FEW, {}, 4), (FEW, {"dtype": "float16"}, 4),
        ((1, 64, 8192, 8, 8, 128), {}, 16), ((1, 64, 4096, 8, 8, 128), AT_END, 8),
        ((1, 4096, 4096, 1, 1, 128), {}, 2), ((1, 2048, 2048, 1, 1, 64), CAUSAL, 4),
        ((1, 256, 4096, 4, 4, 64), AT_END, 8), ((1, 64, 8192, 32, 8, 128), {}, 4),
        # Calls that take too little, or gain too little.
        ((1, 512, 512, 4, 4, 128), {}, 0), ((1, 1024, 1024, 4, 4, 64), {}, 0),
        ((2, 100, 1000, 12, 12, 64), {}, 0), ((1, 200, 2000, 16, 16, 128), {}, 0),
        ((1, 128, 1024, 8, 8, 64), {}, 0),
        # Keys of many heads come from memory no faster; keys that no query sees; many units.
        ((8, 64, 8192, 8, 8, 128), {}, 0), ((1, 64, 8192, 8, 8, 128), CAUSAL, 0),
        ((1, 4096, 4096, 2, 2, 128), {}, 0), ((1, 64, 4096, 70, 70, 64), {}, 0),
    ],
)  # fmt: skip
def test_few_units_of_many_keys(sizes: tuple[int, ...], change: dict[str, Any], parts: int):
    plan = plan_of(sizes, **change)
    assert plan.tiling.splits == (parts > 0)
    fields = {x.name: x.value for x in plan.launch.params.fields}
    entries = [x.entry for x in plan.launch.steps if isinstance(x, Kernel)]
    assert ("flash_forward_join" in entries) == ("split_parts" in fields) == (parts > 0)
    if parts:
        assert (plan.tiling.consumers, plan.tiling.dynamic, plan.tiling.block_kv) == (1, False, 128)
        assert entries[-1] == "flash_forward_exact"
        dims = {**dict(plan.dims), "sms": 132}
        assert evaluate(fields["split_parts"], dims) == parts
        assert fields["first_split"] == 0
        assert plan.workspaces["parts"].dtype == "float32"


(KEYS,) = jax.export.symbolic_shape("s")
MASK = TermShape("bool", 1, 1, 256, 4096)
BIAS = TermShape("bfloat16", 1, 8, 256, 4096)


@pytest.mark.parametrize(
    "change",
    [
        {"window": (1024, None)}, {"terms": ("sinks",)}, {"softcap": 30.0}, {"kv_len": KEYS},
        {"terms": ("query_lengths", "key_value_lengths")}, {"terms": ("mask",), "mask": MASK},
        {"terms": ("query_segments", "key_value_segments")}, {"terms": ("bias",), "bias": BIAS},
        {"terms": ("query_positions", "key_value_positions")}, {"head_dim": 192, "value_dim": 192},
        {"head_dim": 60, "value_dim": 60}, {"split": "carried", "dtype": "float16"},
    ],
)  # fmt: skip
def test_what_is_whole(change: dict[str, Any]):
    """Terms, wide heads, and rows that TMA loads from before a head, or cannot load."""
    assert plan_of(FEW).tiling.splits
    assert not plan_of(FEW, **change).tiling.splits
