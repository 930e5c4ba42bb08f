"""Owns how GPUs decode: what the kernels refuse, how work is shared out, plans.

`choose` is the heuristic, measured on Hopper alone (cuda/decisions.md). Read next:
decode_rows.py, decode_tiling.py, decode_launch.py; cuda/kernels/decode_cta.cuh.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import jax.numpy as jnp

from jax_flash._gpu.buffers import dims_of
from jax_flash._gpu.decode_launch import (
    MOST_ROTATED,
    decode_launch,
    operands_of,
    results_of,
    same_of,
)
from jax_flash._gpu.decode_rows import (
    FEW_ROWS_BY_TMA,
    FEWEST_TOGETHER,
    OTHERS,
    SHORT,
    Asked,
    fits_tma,
    has_tma,
    lie_apart,
    rows_of,
)
from jax_flash._gpu.decode_tiling import TEAM_WARPS, DecodeTiling
from jax_flash._gpu.family import Family
from jax_flash._gpu.plan import Plan
from jax_flash._gpu.sm80 import Sm80
from jax_flash._gpu.spec import GpuSpec
from jax_flash._gpu.traits import is_highest, known
from jax_flash._problem import Problem, Shapes

_MOST_QUERIES = 64  # MOST_QUERIES in _validate/decode.py
_MOST_POSITIONS = 2**30 - 1  # that a row has place for: as much again overflows
_MOST_SPLIT = 256  # features of float32: wider values are more than a warp's registers hold


class _Decode(Family):
    """The kernels of cuda/kernels/decode_cta.cuh; `folder` has how blocks come to them."""

    passes = ("decode",)
    folder: str
    tma: bool  # by it, and the two kernels overlap

    def refuse(self, call: Any, shapes: Shapes, gpu: GpuSpec) -> tuple[str, ...]:
        reasons = []
        if gpu.arch not in self.architectures:
            reasons.append(f"the CUDA kernels run on sm_80 and later; {gpu.name} is {gpu.arch}")
        dtype, dims = call.problem.dtype, (shapes.head_dim, shapes.value_dim)
        if dtype not in ("float32", "bfloat16", "float16"):
            reasons.append(f"the CUDA kernels take float32, bfloat16 and float16, not {dtype}")
        if call.quantized is not None:
            reasons += _refuse_quantized(call, dims, gpu)
        if call.latent_rows:
            reasons.append("the CUDA kernels of decoding have no packed rows of latent attention")
        if self.tma and not fits_tma(call, shapes):
            reasons.append(
                "the CUDA kernels of decoding by TMA take rows of 16-bit elements, or of eight "
                f"bits, of which 16 bytes are a part, not {call.cache_dtype} of {dims[0]} and "
                f"{dims[1]}"
            )
        elif self.tma and lie_apart(call, shapes):
            reasons.append(
                f"the CUDA kernels of decoding by TMA take pages of {FEWEST_TOGETHER} positions "
                f"or a multiple, not {shapes.page_size}"
            )
        elif dtype == "float32" and max(dims) > _MOST_SPLIT:
            reasons.append(
                f"the CUDA kernels of decoding take dims up to {_MOST_SPLIT} in float32, not "
                f"{dims[0]} and {dims[1]}"
            )
        elif dims[0] > 576 or dims[1] > 512 or (dims[1] > 256 and dims[1] % 64):
            reasons.append(
                "the CUDA kernels of decoding take head dims up to 576 and value dims up to 256, "
                f"320, 384, 448 and 512, not {dims[0]} and {dims[1]}"
            )
        if isinstance(shapes.kv_len, int) and shapes.kv_len > _MOST_POSITIONS:
            reasons.append(
                f"the CUDA kernels of decoding take rows of up to {_MOST_POSITIONS} positions, not "
                f"{shapes.kv_len}"
            )
        if not reasons and choose(call, shapes, gpu).stages < 1:
            reasons.append(
                f"a block of keys {dims[0]} and values {dims[1]} wide in {dtype} is more than the "
                f"{gpu.shared_bytes} bytes of shared memory of {gpu.name} hold"
            )
        return tuple(dict.fromkeys(reasons))

    def rotates(self, shapes: Shapes) -> bool:
        # The other half of a pair lies as many pieces of eight features away.
        return shapes.head_dim % 16 == 0 and shapes.head_dim <= MOST_ROTATED

    def plan(
        self, call: Any, shapes: Shapes, gpu: GpuSpec, tiling: DecodeTiling | None = None
    ) -> Plan:
        tiling = tiling or choose(call, shapes, gpu)
        return Plan(
            family=self.name,
            arch=gpu.arch,
            target=f"jax_flash_cuda_{call.target}",
            source=f"{self.folder}/decode.cuh",
            tiling=tiling,
            constants=tiling.constants(call, shapes)
            | {
                "kOverlaps": self.tma and tiling.cluster == 1,
                "kRowSteps": _ROW_STEPS if self.tma else 0,
            },
            operands=operands_of(call, shapes),
            results=results_of(call, shapes),
            same=same_of(call),
            launch=decode_launch(call, shapes, tiling, tma=self.tma),
            dims=dims_of(shapes),
            notes=self.untried(gpu),
        )


class Decode90(_Decode):
    """Blocks come by TMA (cuda/kernels/sm90/decode_load.cuh): 16 bits, dims that 8 divides."""

    name, folder, tma = "decode", "sm90", True
    architectures = ("sm_90a",)
    measured = ("H200",)


class Decode80(_Decode):
    """Blocks come by cp.async (cuda/kernels/sm80/decode_load.cuh), of any dtype and dims."""

    name, folder, tma = "decode_sm80", "sm80", False
    architectures = Sm80.architectures
    measured = ()


def _refuse_quantized(call: Any, dims: tuple[Any, Any], gpu: GpuSpec) -> list[str]:
    """Lists why a cache of eight bits is not read."""
    reasons, cache = [], call.quantized
    if call.problem.dtype == "float32":
        reasons.append(
            f"the CUDA kernels read caches of {cache} for queries of bfloat16 and float16, not "
            "float32"
        )
    if dims[0] % 8 or dims[1] % 8:
        reasons.append(
            f"the CUDA kernels read caches of {cache} of dims that 8 divides, not {dims[0]} and "
            f"{dims[1]}"
        )
    if cache == "float8_e4m3fn" and gpu.arch in ("sm_80", "sm_86", "sm_87"):
        reasons.append(
            f"GPUs before sm_89 cannot convert {cache}, and {gpu.name} is {gpu.arch}; they read "
            "caches of int8"
        )
    return reasons


_MULTIPROCESSORS = 132  # where the GPU is not known
_MOST_IN_CLUSTER = 4096  # positions of a CTA
# One row alone has as many in 16 bits, if so many multiprocessors have a CTA: its parts are equal.
_MOST_OF_ONE_ROW, _ENOUGH = 16384, 0.45
# Half as many CTAs again have eight bits, whose conversions are what fewer of them wait for, and
# pairs of few positions.
_IN_THREES = 0.75  # of the multiprocessors
# Positions of a CTA from which its blocks have 128, not 64: half as many steps, 3 % faster.
_MANY_IN_CLUSTER = 256
# Clusters of 4 and 8 lie within a GPC, which not every multiprocessor is part of in full ones: of
# 32 fours one had to wait for another to end, 42 us instead of 35 with as many pairs.
_IN_LARGE_CLUSTERS = 0.9  # of the multiprocessors
# Positions of a box. A row of 128 features in 16 bits is two boxes, which lie side by side in
# memory and so come one behind the other: 64 rows of 8k take 725 us, by boxes of the 128 of a
# block 745; by 64 and 16 as long, by 8 2 % longer (H100).
_BOX_ROWS = 32
_ROW_STEPS = 1  # blocks, by TMA: between two batch rows warps wait. Others were not timed
_BUSY = 0.95  # of the parts there is room for, where rows are not cut


def choose(call: Any, shapes: Shapes, gpu: GpuSpec) -> DecodeTiling:
    """Chooses the tiling for a call that the family does not refuse.

    In a cluster where one pays; else by the first row of the tables that holds and has room for its
    stages; else of the second table what has most.
    """
    asked = Asked(call.problem, shapes, call, gpu)
    if (tiling := _in_cluster(asked)) is not None:
        return tiling
    for row in FEW_ROWS_BY_TMA:
        if row.holds(asked):
            tiling = make(call, shapes, gpu, **row.sizes)
            if tiling.stages >= row.stages:
                return tiling
    made = []
    for row in OTHERS:
        if row.holds(asked):
            made.append(make(call, shapes, gpu, **row.sizes))
            if made[-1].stages >= row.stages:
                return made[-1]
    return max(made, key=lambda x: x.stages)


def _in_cluster(asked: Asked) -> DecodeTiling | None:
    """Chooses the tiling of CTAs that share a row's keys, if any.

    Stages for what there is: with all of shared memory 1k keys take 2 us more.
    """
    call, shapes, gpu = asked.call, asked.shapes, asked.gpu
    cluster = _cluster(call, shapes, gpu)
    if cluster == 1 or asked.rows > 16 or shapes.value_dim > 256:
        return None
    own = -(-shapes.kv_len // cluster)  # keys of a CTA
    tiling = make(call, shapes, gpu, cluster=cluster)
    if own >= _MANY_IN_CLUSTER:
        wide = make(call, shapes, gpu, cluster=cluster, block_kv=128)
        tiling = wide if wide.stages > wide.teams else tiling
    if tiling.stages < tiling.teams:
        return None
    blocks = max(-(-own // tiling.block_kv), tiling.teams)
    return dataclasses.replace(tiling, stages=min(tiling.stages, blocks))


def _cluster(call: Any, shapes: Shapes, gpu: GpuSpec) -> int:
    """Chooses the CTAs that share a batch row's keys in a cluster, 1 where none do.

    They merge what they found in one launch, which saves 2 us beside two launches: 4 of 42 with two
    CTAs for each of 64. But what a CTA does depends on one row's length, and most multiprocessors
    have to have a CTA.
    """
    sizes = (shapes.batch, shapes.kv_len, shapes.kv_heads)
    if not has_tma(call, shapes, gpu):
        return 1
    if not all(isinstance(size, int) for size in sizes):
        return 1
    units = max(shapes.batch * shapes.kv_heads, 1)
    sms = gpu.sms or _MULTIPROCESSORS
    most = {8: _IN_LARGE_CLUSTERS * sms, 4: _IN_LARGE_CLUSTERS * sms, 2: sms}
    cluster = next((x for x in most if x * units <= most[x]), 1)
    reach = _MOST_IN_CLUSTER
    if shapes.batch == 1 and not call.quantized and cluster * units >= _ENOUGH * sms:
        reach = _MOST_OF_ONE_ROW
    if shapes.kv_len > cluster * reach:
        return 1
    more = cluster + cluster // 2
    gains = cluster == 2 if shapes.kv_len <= SHORT else bool(call.quantized)
    return more if gains and cluster in (2, 4) and more * units <= _IN_THREES * sms else cluster


def make(
    call: Any,
    shapes: Shapes,
    gpu: GpuSpec,
    *,
    heads: int = 1,
    row_tiles: int = 1,
    resident: int = 1,
    block_kv: int | None = None,
    box_rows: int | None = None,
    rounds: int = 1,
    cluster: int = 1,
    stages: int | None = None,
    teams: int | None = None,
) -> DecodeTiling:
    """Makes a tiling with as many stages as there is room for, or none.

    `rounds`: parts that follow each other on a multiprocessor. `stages`: at most.
    """
    if block_kv is None:
        narrow = max(shapes.head_dim, shapes.value_dim) <= 64 and heads * row_tiles < 4
        block_kv = 128 if narrow else 64  # a warp has 64 keys at most, or it spills
        if call.problem.dtype == "float32":
            # As many bytes; a warp has 16 keys at most, or with wide values it spills.
            block_kv = 16 if heads * row_tiles == 4 else block_kv // 2
    size = shapes.page_size if call.paged else None
    shares = max(known(shapes.kv_heads, 1), 1) // heads * -(-rows_of(shapes) // (16 * row_tiles))
    # Where jax.export left T open there is a CTA for each row group of all T.
    least = 1 if isinstance(shapes.q_len, int) else _MOST_QUERIES
    teams = teams or _teams(call, shapes, cluster)
    tiling = DecodeTiling(
        shapes.head_dim,
        shapes.value_dim,
        values_in_keys=call.value_dim is not None,
        heads=heads,
        row_tiles=row_tiles,
        block_kv=block_kv,
        stages=0,
        box_rows=math.gcd(size or 0, box_rows or _box_rows(call, shapes, gpu, block_kv)),
        parts=max(
            least, _parts(shapes.batch, (gpu.sms or _MULTIPROCESSORS) * resident * rounds // shares)
        ),
        shares=shares,
        resident=resident,
        cluster=cluster,
        teams=teams,
        parts_of_number=_parts_of(call.problem),
        cache_bytes=jnp.dtype(call.cache_dtype).itemsize,
        scales_of_pages=shapes.scales_of_pages,
        new_tokens=_new_tokens(call, shapes, cluster, teams),
    )
    # Each CTA takes 1 KB beside its own.
    room = ((gpu.shared_bytes + 1024) // resident) - 1024
    counts = range(1, (stages or room) + 1)
    sized = (dataclasses.replace(tiling, stages=count) for count in counts)
    return [tiling, *itertools.takewhile(lambda x: x.shared_bytes <= room, sized)][-1]


def _box_rows(call: Any, shapes: Shapes, gpu: GpuSpec, block_kv: int) -> int:
    """Chooses the positions that TMA loads at once, where pages allow it.

    Pages of 64 and 128 gain 0 and 1 %, eight bits 0 to 1 %, but new keys of int8 spill 8 bytes; one
    row of 1k takes 1 % longer by small boxes. More query rows were not timed.
    """
    is_plain = not (call.paged or call.quantized) and rows_of(shapes) <= 16
    is_long = known(shapes.kv_len, SHORT + 1) > SHORT
    if not (is_plain and is_long and has_tma(call, shapes, gpu)):
        return block_kv
    return min(block_kv, _BOX_ROWS)


def _parts(batch: Any, most: int) -> int:
    """Counts the parts that all blocks of a batch are cut into.

    Where rows are equally long none is cut in two, if that leaves few multiprocessors idle: what
    two parts of a row found goes through memory, and the second kernel then takes 5 us, not 1.
    """
    if not isinstance(batch, int) or min(batch, most) < 1:
        return most
    even = (x for x in range(most, math.ceil(_BUSY * most) - 1, -1) if batch % x == 0)
    return next(even, most)


def _parts_of(problem: Problem) -> int:
    """Returns how many bfloat16 a float32 is split into; 1 of 16 bits."""
    return 1 if problem.dtype != "float32" else 3 if is_highest(problem) else 2


def _teams(call: Any, shapes: Shapes, cluster: int) -> int:
    """Chooses the teams of warps that take a CTA's blocks in turn.

    A block takes a team half a microsecond, one step after the other, while a CTA of a few dozen
    could load two. Nine warps have 168 registers each: wide values and new keys together spill.
    """
    if cluster == 1 or (call.appends and shapes.value_dim > 128):
        return 1
    return 2


def _new_tokens(call: Any, shapes: Shapes, cluster: int, teams: int) -> int:
    """Counts the tokens whose keys and values are prepared beside queries, a warp for each row."""
    if cluster == 1 or not call.appends or not isinstance(shapes.q_len, int):
        return 0
    kinds = 1 if call.value_dim is not None else 2
    fits = shapes.q_len * kinds <= TEAM_WARPS * teams
    return shapes.q_len if fits else 0
