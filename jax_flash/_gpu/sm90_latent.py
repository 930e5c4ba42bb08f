"""Latent decoding on Hopper: many query rows that share keys of 576 features, 512 of them values.

Its kernels wait for tensor cores, where those of decode.py wait for memory. Operands, parameters
and the line of blocks are those of decode.py. Read next: cuda/kernels/sm90_latent/decode.cuh.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jax_flash import _latent_rows
from jax_flash._gpu.buffers import dims_of
from jax_flash._gpu.constants import problem_constants
from jax_flash._gpu.decode_launch import decode_launch, operands_of, results_of, same_of
from jax_flash._gpu.family import Family
from jax_flash._gpu.fields import Field, Map, Scratch, Struct, name_of
from jax_flash._gpu.plan import Launch, Number, Plan
from jax_flash._gpu.sizes import B, N, T
from jax_flash._gpu.sm90.hopper import multiprocessors
from jax_flash._gpu.spec import GpuSpec
from jax_flash._gpu.traits import known
from jax_flash._problem import Shapes

_DIMS = (576, 512)
_ROWS = 64  # of a product
_FEWEST_ROWS = 16  # 5 to 11 % faster than decode.py's kernels (H100)
_MOST_QUERIES = 64  # of a row
_BUSY = 0.9  # of multiprocessors, that even parts have to leave busy
_ROWS_OF_EVEN_PART = 2
_PARTS_IN_TWO_ROUNDS = 16  # of a row, or a multiple: of loads of the second kernel
_MOST_PARTS = 144  # whose factors the second kernel has place for
# CTAs of a cluster, the positions of one of them, and the multiprocessors that have one: all that
# are part of a GPC with room for another are not (decode.py).
_LARGE_CLUSTER, _MOST_IN_CLUSTER, _IN_LARGE_CLUSTERS = 8, 256, 0.9
# Keys and rows at least, query heads at most: four and eight rows of 2048, 16 heads, are faster.
_LEAST_OF_CLUSTER, _ROWS_OF_CLUSTERS, _HEADS_OF_CLUSTER = 1024, 2, 32
_MOST_POSITIONS = 2**30 - 1  # that a row has place for: as much again overflows


class Sm90Latent(Family):
    """The kernels of cuda/kernels/sm90_latent."""

    name = "sm90_latent"
    architectures = ("sm_90a",)
    passes = ("decode",)
    measured = ("H100",)

    def refuse(self, call: Any, shapes: Shapes, gpu: GpuSpec) -> tuple[str, ...]:
        kernels, dims = "the CUDA kernels of latent decoding", (shapes.head_dim, shapes.value_dim)
        reasons = []
        if gpu.arch not in self.architectures:
            reasons.append(f"{kernels} run on sm_90 (H100, H200); {gpu.name} is {gpu.arch}")
        if call.problem.dtype not in ("bfloat16", "float16"):
            reasons.append(f"{kernels} take bfloat16 and float16, not {call.problem.dtype}")
        if call.quantized is not None:
            reasons.append(f"{kernels} have no caches of {call.quantized}")
        if call.value_dim is None or dims != _DIMS:
            text = "values within keys" if call.value_dim is not None else "values of their own"
            reasons.append(
                f"{kernels} take keys of {_DIMS[0]} features of which {_DIMS[1]} are the values, "
                f"not {dims[0]} and {text} of {dims[1]}"
            )
        if shapes.kv_heads != 1:
            reasons.append(f"{kernels} take one kv head, not {shapes.kv_heads}")
        if call.latent_rows and call.problem.dtype != "bfloat16":
            reasons.append(f"{kernels} take packed rows with queries of bfloat16")
        if (rows := _rows(shapes)) < _FEWEST_ROWS and not call.latent_rows:
            reasons.append(
                f"{kernels} multiply {_ROWS} query rows at a time, and {rows} share a key here"
            )
        if isinstance(shapes.kv_len, int) and shapes.kv_len > _MOST_POSITIONS:
            reasons.append(
                f"{kernels} take rows of up to {_MOST_POSITIONS} positions, not {shapes.kv_len}"
            )
        return tuple(reasons)

    def plan(
        self, call: Any, shapes: Shapes, gpu: GpuSpec, tiling: LatentTiling | None = None
    ) -> Plan:
        tiling = tiling or choose(call, shapes, gpu)
        return Plan(
            family=self.name,
            arch=gpu.arch,
            target=f"jax_flash_cuda_{call.target}",
            source=f"sm90_latent/decode{'_few' if tiling.few_rows else ''}.cuh",
            tiling=tiling,
            constants=tiling.constants(call, shapes),
            operands=operands_of(call, shapes),
            results=results_of(call, shapes),
            same=same_of(call),
            launch=_launch(call, shapes, tiling),
            dims=dims_of(shapes),
            notes=self.untried(gpu),
        )


@dataclasses.dataclass(frozen=True)
class LatentTiling:
    """How the kernels decode: what they are launched with."""

    parts: int  # equal ones, that all blocks of the batch are cut into
    shares: int  # CTAs of a part: groups of query rows
    box_rows: int  # positions that TMA loads at once: in one page for sure
    latent_rows: bool = False  # packed rows, which come through shared memory
    query_rows: int = _ROWS  # that shared memory has place for: 16, 32 or 64
    takes_places: bool = False  # chosen keys come as they are given: see _takes_places
    cluster: int = 1  # CTAs that share a row and merge it: see _cluster

    head_dim, value_dim = _DIMS
    head_rows = _ROWS
    heads = 1
    values_in_keys = True
    merge_threads = 512

    @property
    def few_rows(self) -> bool:
        """Few query rows read packed ones, by mma.sync: kernels of their own."""
        return self.latent_rows and self.query_rows < self.head_rows

    @property
    def block_kv(self) -> int:
        """Positions of a block: with the queries two are what shared memory holds."""
        return 128 if self.few_rows else 64

    @property
    def threads(self) -> int:
        """Those of a CTA."""
        return 288 if self.few_rows else 384

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA: two blocks, queries, what warps tell, barriers."""
        if self.few_rows:
            queries, weights = 2 * self.head_dim + 4, self.block_kv * (2 * self.query_rows + 16)
            told = 2 * 8 * 4 * self.query_rows + 4 * self.block_kv * 2 + 4 * 8 * 4
            rows = 2 * self.block_kv * _latent_rows.BYTES
            return rows + self.query_rows * queries + weights + told + 48 + 16 * 8
        boxes = self.head_dim // 64
        tiles = 128 * (2 * boxes * self.block_kv + (boxes - 1) * self.query_rows + self.head_rows)
        told = (4 * (2 + 4) + 2 * 4) * self.head_rows + 4 * 2 * self.block_kv
        barriers = 8 * (2 * (boxes + 2) + 3) + 16  # and bits of what is not read
        incoming, parked = (4 * 128 * 16, 4 * 24) if self.latent_rows else (0, 4 * 16 + 8)
        return tiles + told + barriers + 16 + incoming + parked

    @property
    def merge_shared_bytes(self) -> int:
        """The second kernel's: what each thread has under way, factors and exponents, sums."""
        of_rows = _MOST_PARTS * (4 * (self.head_rows + 4) + self.head_rows)
        return self.merge_threads * (256 + 32) + of_rows

    def constants(self, call: Any, shapes: Shapes) -> dict[str, Number]:
        """Returns the constants that the kernels are compiled with, by name."""
        # A query is the last of what it sees: the right side of a window hides nothing.
        problem = dataclasses.replace(call.problem, window=(call.problem.window[0], None))
        return {
            **problem_constants(problem, shapes),
            "kQuantized": False,
            "kScalesOfPages": False,
            "kHeadDim": self.head_dim,
            "kValueDim": self.value_dim,
            "kValuesInKeys": self.values_in_keys,
            "kHeads": self.heads,
            "kRowTiles": self.head_rows // 16,
            "kBlockKV": self.block_kv,
            "kCluster": self.cluster,
            "kTeams": 1,
            "kAsksAhead": False,
            "kMergeThreads": self.merge_threads,
            "kSplitsColumns": False,
            "kPaged": call.paged,
            "kPackedRows": self.latent_rows,
            "kFewRows": self.few_rows,
            "kQueryRows": self.query_rows,
            # TMA takes some 60 cycles of a warp for each row of a box that lies by itself. So rows
            # that may lie anywhere come by cp.async, 16 bytes a thread, as packed ones do.
            "kByThreads": self.box_rows == 1 or self.latent_rows,
            "kBoxRows": self.box_rows,
            "kAppends": call.appends,
            "kRotates": False,
            "kOverlaps": self.cluster == 1,
            # The kernel ahead packs what rows read; this one begins before it has ended.
            "kFollows": call.packs and not self.takes_places,
            "kTakesPlaces": self.takes_places,
            "kFullRows": False,
            "kRowSteps": 0,
            "kMostParts": _MOST_PARTS,
        }


def choose(call: Any, shapes: Shapes, gpu: GpuSpec) -> LatentTiling:
    """Chooses the tiling for a call that the family does not refuse."""
    # Where jax.export left T open there is a CTA for each row group of all T.
    least = 1 if isinstance(shapes.q_len, int) else _MOST_QUERIES
    shares = -(-_rows(shapes) // _ROWS)
    most = min(max(multiprocessors(gpu) // shares, 1), _MOST_PARTS)
    size = shapes.page_size if call.paged else None
    parts = max(least, _parts(shapes.batch, most))
    takes_places = _takes_places(call, shapes, parts)
    cluster = _cluster(call, shapes, gpu, shares) if takes_places else 1
    return LatentTiling(
        parts=parts,
        shares=shares,
        box_rows=math.gcd(size or 0, 64),
        latent_rows=call.latent_rows,
        query_rows=_query_rows(shapes) if call.latent_rows else _ROWS,
        takes_places=takes_places,
        cluster=cluster,
    )


def _takes_places(call: Any, shapes: Shapes, parts: int) -> bool:
    """Tells whether chosen keys are read as they are given, those that are hidden among the others.

    Where several parts share a row they are equal by what was chosen for it, and no kernel has to
    bring what is seen to the front: 8 rows of 2048, 16 heads, begin to load 4 us earlier (H100).
    """
    if not call.packs or call.latent_rows or not isinstance(shapes.batch, int):
        return False
    return 0 < 2 * shapes.batch <= parts and parts % shapes.batch == 0


def _cluster(call: Any, shapes: Shapes, gpu: GpuSpec, shares: int) -> int:
    """Chooses the CTAs that share a row of chosen keys in a cluster, 1 where none do.

    All rows are equally long, so no CTA waits for others, and one launch is enough: 8 rows of 2048,
    16 heads, take 19.5 us of a chain where two launches and twice as many CTAs take 22.9; with 16
    rows in clusters of 8 as many CTAs take 3 to 10 % longer, 64 heads 5 %, 512 keys 76 %, and one
    row takes 5 % longer or 17 % less, by the run (H200).
    """
    units, most = shapes.batch * shares, _IN_LARGE_CLUSTERS * multiprocessors(gpu)
    if call.appends or call.problem.dtype != "bfloat16" or not isinstance(shapes.kv_len, int):
        return 1
    if not _LEAST_OF_CLUSTER <= shapes.kv_len <= _LARGE_CLUSTER * _MOST_IN_CLUSTER:
        return 1
    if shapes.batch < _ROWS_OF_CLUSTERS or shapes.q_heads > _HEADS_OF_CLUSTER:
        return 1
    return _LARGE_CLUSTER if units * _LARGE_CLUSTER <= most else 1


def _parts(batch: Any, most: int) -> int:
    """Counts the parts that all blocks of a batch are cut into.

    Where rows are equally long no part ends within one of its rows, or a row is cut into whole
    parts: each cut costs sums that go through memory. With parts of one or two rows that is 11 to
    20 % faster, with parts of four 3 % slower (H100: 128 of 132 multiprocessors have a part).
    One row of 32k positions takes 43 us by 64 parts, which the second kernel reads in two rounds,
    45 by 66.
    """
    if not isinstance(batch, int) or batch < 1:
        return most
    fewest = max(1, math.ceil(_BUSY * most), -(-batch // _ROWS_OF_EVEN_PART))
    even = [x for x in range(most, fewest - 1, -1) if batch % x == 0 or x % batch == 0]
    in_two_rounds = [x for x in even if x % (_PARTS_IN_TWO_ROUNDS * batch) == 0]
    return next(iter(in_two_rounds or even), most)


def _launch(call: Any, shapes: Shapes, tiling: LatentTiling) -> Launch:
    """Returns what decoding launches, with a tensor map of the queries."""
    launch = decode_launch(call, shapes, tiling, tma=True)  # type: ignore[arg-type]
    rows = Map("q", name_of(call.problem.dtype), (B, T * N, 1, tiling.head_dim), tiling.query_rows)
    text = "[B, T * N, 1, H], box (64, 1, rows of a tile, 1)"
    field = Field("TensorMap", "query_rows", rows, text)
    if tiling.cluster > 1:
        left = Field("int*", "left_units", None)
        struct = Struct(launch.params.name, (*launch.params.fields, field, left))
        return dataclasses.replace(launch, params=struct)
    sums = Scratch("f32", (tiling.parts * tiling.shares, 2, tiling.head_rows, 4))
    rows_of_sums = Field("float*", "partial_rows", sums, "[ctas, 2, share rows, 4]: LeftRow")
    units = Scratch("s32", (tiling.parts * tiling.shares, 2, 8))
    left = Field("int*", "left_units", units, "[ctas, 2]: LeftUnit")
    fields = (rows_of_sums if x.name == "partial_rows" else x for x in launch.params.fields)
    struct = Struct(launch.params.name, (*fields, field, left))
    main, merge = launch.steps
    merge = dataclasses.replace(merge, shared_bytes=tiling.merge_shared_bytes)
    return dataclasses.replace(launch, params=struct, steps=(main, merge))


def _query_rows(shapes: Shapes) -> int:
    """Counts the query rows that a CTA has place for."""
    if not isinstance(shapes.q_len, int) or not isinstance(shapes.q_heads, int):
        return _ROWS
    return next((x for x in (16, 32) if x >= _rows(shapes)), _ROWS)


def _rows(shapes: Shapes) -> int:
    """Counts the query rows of a kv head; one where there are no heads."""
    return max(known(shapes.q_len, 1) * known(shapes.q_heads, 1), 1)
