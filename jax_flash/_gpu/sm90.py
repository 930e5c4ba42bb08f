"""Owns how the kernels for Hopper (wgmma, TMA) run a problem: what they refuse, tilings, plans.

`choose_forward` and `choose_backward` are the heuristics; their tables are measured, and
docs/tuning.md tells how. Read next: cuda/kernels/sm90/forward.cuh, cuda/runtime/families/sm90.cc.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jax_flash._call import Call
from jax_flash._gpu import emit
from jax_flash._gpu.carrier import COPIED
from jax_flash._gpu.constants import (
    bytes_of_bias,
    functions,
    is_highest,
    is_one,
    is_own,
    is_plane,
    is_ragged,
    known,
    problem_constants,
    refuse_functions,
    score_lines,
)
from jax_flash._gpu.family import Family, Number, Plan
from jax_flash._gpu.spec import GpuSpec
from jax_flash._gpu.workspaces import (
    adds_rows,
    backward_arrays,
    blocks,
    boxes,
    dbias_heads,
    dq_row_bytes,
    float32,
    halves_of,
    int32,
    mask_by_query,
)
from jax_flash._problem import Problem, Shapes
from jax_flash._terms import TERMS

# The terms that the kernels compute -> how many 32-bit values of each a thread of the forward's
# consumers keeps through the walk over the keys.
_HELD = {
    "query_lengths": 1,
    "key_value_lengths": 1,
    "query_segments": 1,
    "key_value_segments": 1,
    "query_positions": 2,  # the ends of what a query sees
    "key_value_positions": 1,
    "sinks": 1,
    "mask": 2,  # a word for each of its two queries
    "block_numbers": 2,  # bits are read where they are tested; no other term beside them
    "block_bits": 0,
    "dropout_state": 3,  # and what its draws pass through
    "bias": 32,
    "score_ids": 0,  # read once a unit
}
# Beside them three warpgroups, of 160 registers a thread, have room for a mask alone, and in the
# registers that the weights had before (`drains`) for lengths alone or segments alone; with more
# ptxas spills, and two warpgroups, of 240, are faster.
_HELD_BY_THREE_WARPGROUPS = 2


class Sm90(Family):
    """The kernels of cuda/kernels/sm90."""

    name = "sm90"
    architectures = ("sm_90a",)
    passes = ("forward", "backward")
    measured = ("H200",)

    def refuse(self, call: Call, shapes: Shapes, gpu: GpuSpec) -> tuple[str, ...]:
        problem = call.problem
        reasons = []
        kernels = f"the CUDA {call.target} kernels"
        if gpu.arch not in self.architectures:
            reasons.append(f"the CUDA kernels run on sm_90 (H100, H200); {gpu.name} is {gpu.arch}")
        halves = is_highest(problem)
        if problem.dtype not in ("bfloat16", "float16") and not halves:
            reasons.append(f"{kernels} take bfloat16 and float16, not {problem.dtype}")
        widest = 128 if halves else 256
        wide = [dim for dim in (shapes.head_dim, shapes.value_dim) if dim > widest]
        reasons += [f"{kernels} take head dims up to {widest}, not {dim}" for dim in wide]
        if halves and not _is_bare(problem):
            reasons.append(f"{kernels} take float32 without terms, softcap or function of scores")
        absent = [term for term in problem.terms if term not in _HELD]
        reasons += [f"the CUDA kernels have no {TERMS[term].feature}" for term in absent]
        reasons += refuse_functions(call)
        return tuple(dict.fromkeys(reasons))

    def plan(self, call: Call, shapes: Shapes, gpu: GpuSpec, tiling: Tiling | None = None) -> Plan:
        problem = call.problem
        if "dout" in call.operands:
            tiling = tiling or choose_backward(problem, shapes, gpu)
            constants = tiling.constants(problem, shapes) | {
                "kHasDlse": "dlse" in call.operands,
                "kHasDbias": "dbias" in call.results,
            }
        else:
            tiling = tiling or choose_forward(problem, shapes, gpu)
            constants = tiling.constants(problem, shapes)
        loads = () if tiling.tma_loads else (_LOADED_BY_WARPS,)
        copied = (COPIED,) if problem.split else ()
        return Plan(
            family=self.name,
            arch=gpu.arch,
            target=f"jax_flash_cuda_{call.target}",
            source=tiling.source,
            entries=tiling.entries,
            beside=tiling.beside,
            beside_entries=tiling.beside_entries,
            tiling=tiling,
            constants=constants,
            launch=tiling.launch(),
            workspaces=tiling.workspaces(problem, shapes),
            notes=(*copied, *loads, *self.untried(gpu)),
            functions=functions(call, shapes),
        )


_LOADED_BY_WARPS = "rows loaded by warps: 8 does not divide both dims, as TMA needs"


@dataclasses.dataclass(frozen=True)
class ForwardTiling:
    """How the forward kernel runs a problem: constants compiled into it and its launch."""

    head_dim: int
    value_dim: int
    block_kv: int  # keys of one block, a multiple of 16
    consumers: int  # warpgroups of 64 query rows, besides the producer's
    tma_loads: bool = True  # TMA loads; it cannot where 8 does not divide a dim
    stages: int = 2  # blocks of keys and values in flight
    query_stages: int = 1
    packed_heads: int = 1  # query heads of one kv head that share a block of queries
    dynamic: bool = True  # units from an atomic counter, else in turn
    ping_pong: bool = True  # two warpgroups alternate softmax and matrix products
    drains: bool = False  # a softmax waits for the product with the values before, too
    producer_registers: int = 24  # of a thread, with two consumer warpgroups: 24, 40 or 56
    l2_heads: int = 8  # heads that the schedule walks together, so that their keys stay in L2
    bias_bytes: int = 0  # of an element of a bias that TMA loads beside the keys; 0: it does not
    bias_ahead: int = 2  # blocks between a bias's way to L2 and its load; 0: it has none of its own
    batches_together: bool = False  # the schedule walks a head of all batch rows: they share a bias
    halves: bool = False  # a float32 is two float16, split ahead, in planes of a tile
    teams: int = 1  # in a CTA, of a producer and its consumers, with units of their own
    fades: bool = False  # blocks of keys that a falling line hides are left out

    source = "sm90/forward.cuh"
    entries = ("flash_forward",)
    beside = "sm90/forward_entries.cuh"
    beside_entries = ("flash_forward_exact",)

    @property
    def block_q(self) -> int:
        """Query rows (positions times packed heads) of one block."""
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        return 128 * (self.teams * self.consumers + 1)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA: queries, the stages of keys and values, barriers."""
        head_boxes, value_boxes = boxes(self.head_dim), boxes(self.value_dim)
        queries = self.query_stages * self.consumers * 64 * head_boxes
        keys_values = self.stages * self.block_kv * (head_boxes + value_boxes)
        biases = self.stages * self.block_q * self.block_kv * self.bias_bytes
        tiles = 128 * self.parts * (queries + keys_values) + biases
        return self.teams * tiles + 1024 * max(self.teams, 2)

    @property
    def parts(self) -> int:
        """Planes of a tile."""
        return 2 if self.halves else 1

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a producer's and a consumer's thread; a CTA shares out 64k of them."""
        if self.teams * self.consumers == 4:
            return 32, 112
        if self.consumers == 3:
            return 32, 160
        return self.producer_registers, {24: 240, 40: 232, 56: 224}[self.producer_registers]

    def launch(self) -> dict[str, bool | int]:
        """Returns the numbers that the handler needs (ForwardLaunch in families/sm90.cc)."""
        return {
            "threads": self.threads,
            "shared_bytes": self.shared_bytes,
            "block_q": self.block_q,
            "block_kv": self.block_kv,
            "packed_heads": self.packed_heads,
            "l2_heads": self.l2_heads,
            "dynamic": self.dynamic,
            "tma_loads": self.tma_loads,
            "bias_tiles": self.bias_bytes > 0,
            "halves": self.halves,
        }

    def workspaces(self, problem: Problem, shapes: Shapes) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the scratch arrays that the handler takes as further results."""
        segments = "query_segments" in problem.terms
        positions = "query_positions" in problem.terms
        key_blocks = blocks(shapes.kv_len, self.block_kv)
        query_blocks = blocks(shapes.q_len * self.packed_heads, self.block_q)
        return {
            "unit_counter": int32(1),
            # Smallest and largest id in each block of keys.
            "segment_ranges": int32(shapes.batch, key_blocks, 2 * segments),
            # The walk of each warpgroup.
            "segment_plan": int32(shapes.batch, query_blocks, self.block_q // 64, 4 * segments),
            # Of 16 rows each, those that came out with NaN or infinity.
            "marks": int32(
                shapes.batch,
                shapes.q_heads // self.packed_heads if self.packed_heads > 1 else shapes.q_heads,
                query_blocks,
                self.block_q // 16,
            ),
            # Smallest and largest position in each block of keys, and of each warpgroup.
            "key_position_ranges": int32(shapes.batch, key_blocks, 2 * positions),
            "query_position_ranges": int32(
                shapes.batch, query_blocks, self.block_q // 64, 2 * positions
            ),
            **mask_by_query(shapes, 64, self.block_kv),
            **halves_of(shapes, self.halves),
            # Of 64 rows each, the largest norm.
            "query_norms": int32(
                shapes.batch * shapes.q_heads, blocks(shapes.q_len, 64) * self.fades
            ),
            "key_norms": int32(
                shapes.batch * shapes.kv_heads, blocks(shapes.kv_len, 64) * self.fades
            ),
        }

    def constants(self, problem: Problem, shapes: Shapes) -> dict[str, Number]:
        """Returns the constants that the kernel is compiled with, by name."""
        producer_registers, consumer_registers = self.registers
        return {
            **problem_constants(problem, shapes),
            "kHeadDim": self.head_dim,
            "kValueDim": self.value_dim,
            "kTmaLoads": self.tma_loads,
            "kHalves": self.halves,
            "kParts": self.parts,
            "kBlockKV": self.block_kv,
            "kConsumers": self.consumers,
            "kStages": self.stages,
            "kQueryStages": self.query_stages,
            "kPackedHeads": self.packed_heads,
            "kPreScale": problem.scale <= 0,
            "kBiasAheadInL2": self.bias_ahead if self.bias_bytes else 0,
            "kBatchesTogether": self.batches_together,
            "kDynamic": self.dynamic,
            "kTeams": self.teams,
            "kFades": self.fades,
            "kPingPong": self.ping_pong,
            "kDrains": self.drains,
            "kBiasTiles": self.bias_bytes > 0,
            "kProducerRegisters": producer_registers,
            "kConsumerRegisters": consumer_registers,
        }


@dataclasses.dataclass(frozen=True)
class BackwardTiling:
    """How the backward kernels run a problem: constants compiled into them, launches."""

    head_dim: int
    value_dim: int
    block_q: int  # queries of one block, a step of the walk
    wide: bool  # the kernel for head dims beyond 128: two warpgroups share a block's products
    tma_loads: bool = True  # as for the forward
    stages: int = 2  # blocks of queries and of output gradients in flight
    score_stages: int = 2  # buffers of score gradients
    dq_row_bytes: int = 0  # from row to row of dq, where it holds half of its float32 sum; else 0
    outputs: int = 1  # buffers by which a warpgroup's dv and dk leave, narrow kernel: 1 or 2
    reads_ahead: bool = False  # what a step needs is read in the one before, narrow kernel
    holds_draws: bool = False  # what dropout draws takes of keys alone is found once a unit
    l2_heads: int = 1  # kv heads that the schedule walks together
    stores_dbias: bool = False  # the main kernel stores dS: no other score shares its bias
    clears_dbias: bool = False  # and it may leave blocks out
    dbias_rows: bool = False  # a CTA adds the dS of batch rows that share their bias
    dbias_heads: int = 0  # kv heads whose dS is stored at a time, as batch rows share their bias
    bias_bytes: int = 0  # of an element of a bias that TMA loads beside the queries; 0: it does not
    halves: bool = False  # as for the forward, wide kernel
    ring_sets: int = 0  # sets of l2_heads whose sums of dq have a place at a time; 0: all at once
    ring_lag: int = 0  # sets between the one that is added to and the one that is finished

    entries = ("flash_backward",)
    beside = "sm90/backward_entries.cuh"
    beside_entries = ("flash_backward_prepare", "flash_backward_finish")

    @property
    def block_kv(self) -> int:
        """Keys of one block."""
        return 64 if self.wide else 128

    @property
    def source(self) -> str:
        return "sm90/backward_wide.cuh" if self.wide else "sm90/backward.cuh"

    @property
    def turn_parts(self) -> int:
        """Parts of a query block's sum of dq that take turns of their own, deterministic mode."""
        return 1 if self.wide else 2

    @property
    def threads(self) -> int:
        return 512 if self.wide else 384

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA of the main kernel."""
        head_boxes, value_boxes = boxes(self.head_dim), boxes(self.value_dim)
        both = 128 * (head_boxes + value_boxes)
        rows = -(-2 * self.stages * self.block_q * 4 // 1024) * 1024
        scores = self.parts * self.score_stages * self.block_kv * self.block_q * 2
        sums = 16384 if self.wide else 16384 * max(head_boxes, value_boxes)
        sums *= self.outputs
        biases = self.stages * self.block_q * self.block_kv * self.bias_bytes
        tiles = self.parts * both * (self.block_kv + self.stages * self.block_q) + biases
        ring = 33 * 1024 if self.ring_sets else 0
        return (2048 if self.halves else 1024) + tiles + rows + scores + sums + ring

    @property
    def parts(self) -> int:
        """Planes of a tile."""
        return 2 if self.halves else 1

    @property
    def sum_stages(self) -> int:
        """Pairs of blocks in flight where that gradient is summed: two CTAs share the memory."""
        return 2 if self.tma_loads and max(self.head_dim, self.value_dim) <= 64 else 1

    @property
    def bias_shared_bytes(self) -> int:
        """The same of the kernel that sums the gradient of a bias."""
        both = boxes(self.head_dim) + boxes(self.value_dim)
        return self.sum_stages * 128 * both * (self.block_kv + self.block_q) + 1024

    def launch(self) -> dict[str, bool | int]:
        """Returns the numbers that the handler needs (BackwardLaunch in families/sm90.cc)."""
        return {
            "threads": self.threads,
            "shared_bytes": self.shared_bytes,
            "block_q": self.block_q,
            "block_kv": self.block_kv,
            "turn_parts": self.turn_parts,
            "dq_boxes": boxes(self.head_dim),
            "l2_heads": self.l2_heads,
            "tma_loads": self.tma_loads,
            "dq_row_bytes": self.dq_row_bytes,
            "bias_shared_bytes": self.bias_shared_bytes,
            "stores_dbias": self.stores_dbias,
            "clears_dbias": self.clears_dbias,
            "bias_tiles": self.bias_bytes > 0,
            "halves": self.halves,
            "ring_sets": self.ring_sets,
            "ring_lag": self.ring_lag,
        }

    def workspaces(self, problem: Problem, shapes: Shapes) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the scratch arrays that the handler takes as further results."""
        heads = shapes.batch * shapes.q_heads
        tiles = blocks(shapes.q_len, self.block_q) * (self.block_q // 64)
        rings = self.ring_sets > 0
        ring_heads = min(heads, self.ring_sets * self.l2_heads * _group(shapes)) if rings else None
        arrays = backward_arrays(
            problem,
            shapes,
            block_q=self.block_q,
            block_kv=self.block_kv,
            turn_parts=self.turn_parts,
            dq_row_bytes=self.dq_row_bytes,
            sums_dbias=not self.stores_dbias,
            dbias_heads=self.dbias_heads,
            ctas=_CTAS,
            sum_heads=ring_heads,
        )
        rows = 64 * blocks(shapes.q_len, 64) * self.halves
        arrays |= halves_of(shapes, self.halves, of_dout=True)
        return arrays | {
            "dout_row_factors": float32(heads, rows),
            "ring_counts": int32(shapes.batch * shapes.kv_heads, 2 * rings),
            "dq_marks": int32(heads, tiles, boxes(self.head_dim) * rings),
        }

    def constants(self, problem: Problem, shapes: Shapes) -> dict[str, Number]:
        """Returns the constants that the kernels are compiled with, but for kHasDlse."""
        return {
            **problem_constants(problem, shapes),
            "kHeadDim": self.head_dim,
            "kValueDim": self.value_dim,
            "kTmaLoads": self.tma_loads,
            "kHalves": self.halves,
            "kParts": self.parts,
            "kBlockQ": self.block_q,
            "kBlockKV": self.block_kv,
            "kStages": self.stages,
            "kScoreStages": self.score_stages,
            "kDqRowBytes": self.dq_row_bytes,
            "kRing": self.ring_sets > 0,
            "kOutputs": self.outputs,
            "kReadsAhead": self.reads_ahead,
            "kHoldsDraws": self.holds_draws,
            "kStoresDbias": self.stores_dbias,
            "kDbiasByHeads": self.dbias_heads > 0,
            "kDbiasByRows": self.dbias_rows,
            "kDbiasCleared": self.clears_dbias,
            "kSumStages": self.sum_stages,
            "kBiasTiles": self.bias_bytes > 0,
            "kDeterministic": problem.deterministic,
            "kTurnParts": self.turn_parts,
            "kAddsFour": True,
        }


_CTAS = 264  # that sum a bias's gradient at once: two for each of 132 multiprocessors

Tiling = ForwardTiling | BackwardTiling


def choose_forward(problem: Problem, shapes: Shapes, gpu: GpuSpec) -> ForwardTiling:
    """Chooses the forward kernel's tiling for a problem that the family does not refuse."""
    tiling = _choose_forward(problem, shapes)
    if tiling.tma_loads and _fades(problem, shapes):
        # Heads differ in length: 4 to 10 % over 1, 12 or 32 together, where units of one do not.
        l2_heads = 4 if problem.window[1] is None else tiling.l2_heads
        return dataclasses.replace(tiling, fades=True, l2_heads=l2_heads)
    bytes_ = bytes_of_bias(shapes.bias)
    if not tiling.tma_loads or not is_plane(shapes) or tiling.block_kv * bytes_ % 128 != 0:
        return tiling
    # As many stages as there is room for.
    for stages in range(tiling.stages, 1, -1):
        tiled = dataclasses.replace(tiling, stages=stages, bias_bytes=bytes_)
        if tiled.shared_bytes <= gpu.shared_bytes:
            return tiled
    return tiling


@dataclasses.dataclass(frozen=True)
class _Forward:
    """A forward problem, and what the table of tilings (below) asks of it, each with its reason."""

    problem: Problem
    shapes: Shapes

    @property
    def widest(self) -> int:
        return max(self.shapes.head_dim, self.shapes.value_dim)

    @property
    def dims(self) -> int:
        """Both dims: columns of a block of keys and values."""
        return self.shapes.head_dim + self.shapes.value_dim

    @property
    def halves(self) -> bool:
        return is_highest(self.problem)

    @property
    def is_float16(self) -> bool:
        return self.problem.dtype == "float16"

    @property
    def tma_loads(self) -> bool:
        return self.halves or _tma_loads(self.shapes)  # planes of halves are padded

    @property
    def bytes_of_bias(self) -> int:
        return bytes_of_bias(self.shapes.bias)

    def has(self, *terms: str) -> bool:
        return any(term in self.problem.terms for term in terms)

    @property
    def is_mapped(self) -> bool:
        return self.problem.score is not None

    @property
    def is_capped(self) -> bool:
        return self.problem.softcap is not None

    @property
    def has_left(self) -> bool:
        return self.problem.window[0] is not None

    @property
    def is_plain(self) -> bool:
        """Nothing between scores and weights but causality."""
        return _is_bare(self.problem) and not self.has_left

    @property
    def is_uneven(self) -> bool:
        """Units differ in length."""
        return self.problem.window[1] is not None or self.has("block_numbers")

    # The schedule.

    @property
    def dynamic(self) -> bool:
        if not self.tma_loads:
            return False
        if self.widest <= 64 and not (self.halves or self.is_short):
            return True
        # Units of one length need no counter: without its memset 4% faster at T 512; in long calls
        # the counter evens out multiprocessors of different speed, 3 to 6%, of two
        # teams 2% at T 2048.
        even = self.is_plain and self.problem.window[1] is None
        return not even or known(self.shapes.q_len, 4096) > (1024 if self.is_short else 2048)

    @property
    def is_short(self) -> bool:
        """Units of few blocks: two teams hide each other's ends.

        3 to 13 % at T 512, 2 to 3 % at T 2048.
        """
        lengths = known(self.shapes.q_len, 4096), known(self.shapes.kv_len, 4096)
        # Beside a negative scale 20 bytes of float16 would be spilled.
        fits = self.shapes.value_dim > 16 and self.problem.scale > 0 and not self.problem.split
        return self.is_plain and max(lengths) <= 2048 and fits and self.packed_heads == 1

    @property
    def fills_fours(self) -> bool:
        """Units of four warpgroups' rows are of one length, whole, and keep a GPU busy."""
        q_len = known(self.shapes.q_len, 0)
        units = known(self.shapes.batch, 1) * known(self.shapes.q_heads, 1) * q_len // 256
        return not self.is_uneven and q_len % 256 == 0 and units >= _CTAS // 2

    @property
    def packed_heads(self) -> int:
        # Each head has a mask and a bias of its own; what dropout keeps, a thread draws for two
        # queries that are 8 apart; of float32 in halves 64 queries of a head share a factor.
        own_rows = self.problem.masked or self.is_mapped or self.halves
        own_rows = own_rows or self.has("bias", "dropout_state")
        group = _group(self.shapes)
        few = group in (2, 4, 8, 16, 32, 64) and known(self.shapes.q_len, 4096) < 128
        return group if few and not own_rows else 1

    @property
    def l2_heads(self) -> int:
        # 64 heads even out units of unequal length; more, of short sequences, are 3 % slower.
        if not self.is_uneven:
            return 1
        return max(1, min(_l2_heads(self.shapes, self.problem), 64) // self.packed_heads)

    # Registers of the consumers.

    @property
    def ends_beside_keys(self) -> bool:
        """Wide heads, and what a row keeps beside a block's ids, bits or bias."""
        beside = self.bytes_of_bias > 0 or self.problem.masked or self.has("query_segments")
        placed = self.has("query_positions") and beside
        return self.widest > 64 and (
            placed or (self.bytes_of_bias > 0 and self.has("query_segments"))
        )

    @property
    def is_crowded(self) -> bool:
        """A block's bias waits in registers for its scores: up to 32 of a thread."""
        others = self.problem.masked or self.has("dropout_state") or self.is_mapped
        beside = self.bytes_of_bias > 0 and others
        ragged = self.bytes_of_bias == 4 or is_ragged(self.shapes.bias)
        return ragged or beside or self.ends_beside_keys

    @property
    def has_bias_alone(self) -> bool:
        """One of 16 bits that TMA loads: read where it is added it takes no registers."""
        alone = self.problem.terms == ("bias",) and not (self.is_capped or self.is_mapped)
        plane = is_plane(self.shapes) and self.bytes_of_bias == 2
        return alone and plane and not self.has_left

    @property
    def batches_together(self) -> bool:
        """Batch rows have one bias, whose blocks come from L2 if they follow each other."""
        shared = self.shapes.bias is not None and is_one(self.shapes.bias.batch)
        return shared and self.widest <= 64 and self.has_bias_alone

    @property
    def walk_drains(self) -> bool:
        """Three warpgroups need the registers that the weights had before, for the walk."""
        if self.lists_blocks and self.shapes.block_mask is not None:
            return self.shapes.block_mask.block % 128 != 0  # more loads of bits
        # A softcap, and beside terms a window's left side, take registers in the walk too, a sink
        # after it. A mask's words find some beside the weights.
        walked = {*self.problem.terms} - {"sinks", "score_ids", "mask"}
        return bool(walked) or self.is_capped or (self.has_left and not _is_bare(self.problem))

    @property
    def drains(self) -> bool:
        """The same, for the walk or for a function of scores."""
        score = self.problem.score
        return self.walk_drains or (score is not None and not emit.is_light(score))

    @property
    def is_crammed(self) -> bool:
        """Three warpgroups would spill even so."""
        score, blocks = self.problem.score, self.shapes.block_mask
        held = sum(_HELD[term] for term in self.problem.terms)
        return (
            held > _HELD_BY_THREE_WARPGROUPS
            # A function of scores beside these spills up to 328 bytes; alone, with remainders, 64.
            or (score is not None and (self.walk_drains or emit.has_remainders(score)))
            # 8 bytes beside a softcap; 124 of pieces of 16 keys.
            or (blocks is not None and (self.is_capped or blocks.block % 32 != 0))
            or (self.has("mask") and (self.is_mapped or self.is_capped))  # 16 bytes
        )

    # Block masks.

    @property
    def lists_blocks(self) -> bool:
        """Nothing but a block mask."""
        alone = self.problem.terms == ("block_numbers", "block_bits") and not self.is_mapped
        return alone and self.problem.window == (None, None) and not self.is_capped

    @property
    def is_layout(self) -> bool:
        return _is_layout(self.problem)

    @property
    def is_roomy_layout(self) -> bool:
        """Two teams would spill 14 to 184 bytes with a window, smaller blocks, up to 16 values."""
        block = 0 if self.shapes.block_mask is None else self.shapes.block_mask.block
        whole = self.problem.window == (None, None) and block % 128 == 0
        return self.is_layout and whole and self.shapes.value_dim > 16

    # Registers of the producer.

    @property
    def is_light(self) -> bool:
        """Takes no registers of the producer, and of wide heads' consumers few."""
        terms = ((), () if self.widest > 64 else ("bias",))
        capped = self.problem.terms in terms and not self.is_mapped and not self.has_left
        return self.is_plain or capped

    @property
    def producer_registers(self) -> int:
        if not self.tma_loads:
            # Four warps that load keep addresses, most of them where they load 2 bytes at once or
            # a block mask's words too.
            by_element = self.shapes.head_dim % 2 == 1 and self.shapes.value_dim % 2 == 1
            most = self.widest > 128 or by_element or self.has("block_numbers")
            return 56 if most else 40
        # Lengths and segments take registers of the producer; wide heads, dropout and positions of
        # the consumers, and so do a softcap and the bias of narrow heads.
        if self.is_light and not 256 < self.dims <= 320:
            return 24
        # At head dim 128 consumers take up to 92 bytes more than 224 registers: a softcap, or a
        # bias beside another term; up to 158 one beside float16 queries. Sinks and dropout take
        # none of the producer's, and with 40 consumers spill 8 to 144 bytes.
        crowd = self.bytes_of_bias > 0 and (len(self.problem.terms) > 1 or self.is_float16)
        crowd = crowd or self.is_capped
        tight = 64 < self.widest <= 128 and crowd and not self.has("query_segments")
        if tight and {*self.problem.terms} <= {"sinks", "dropout_state"}:
            return 24
        # Beside segments a mask takes 44 bytes more than 40 registers of the producer.
        wide = self.widest > 128 and not (self.problem.masked and self.has("query_segments"))
        return 40 if wide or tight or self.has("dropout_state", "query_positions") else 56

    @property
    def block_kv(self) -> int:
        if self.widest <= 128:
            addresses = not self.tma_loads and self.has("block_numbers")
            return 64 if self.is_crowded or addresses else 128
        if not self.tma_loads:
            even = self.shapes.head_dim % 2 == 0 and self.shapes.value_dim % 2 == 0
            if self.is_plain and even:
                return 64
            return 32 if self.bytes_of_bias == 4 else 48
        most = 112 if self.dims <= 320 else 96 if self.dims <= 384 else 80
        # Of up to 512 keys blocks of 80 leave a ninth of the last ones' work to nobody: 3 to 5 %.
        if self.is_light and known(self.shapes.kv_len, 4096) > 512:
            return most
        if self.bytes_of_bias == 4:
            return 32
        if self.bytes_of_bias == 2:
            return 64 if is_plane(self.shapes) else 48  # by TMA: no registers
        full = self.ends_beside_keys or (self.is_mapped and self.problem.masked)
        return min(most, 48 if full else 64)


def _row(when: Callable[[_Forward], bool], **tiling: Any) -> tuple[Any, dict[str, Any]]:
    return when, tiling


# The forward's tilings: of the first row that holds. What a row does not name is _Forward's answer
# of that name (_COMMON), two consumers, or ForwardTiling's default.
_COMMON = ("block_kv", "packed_heads", "dynamic", "l2_heads", "producer_registers")
_COMMON += ("tma_loads", "halves", "batches_together")
_FORWARD = (
    # float32 in halves: a tile has two planes.
    _row(
        lambda x: x.halves and x.widest <= 64,
        block_kv=64,
        consumers=3,
        stages=4,
        query_stages=2,
        ping_pong=False,
        producer_registers=24,
    ),
    # A window beside 24: 8 bytes spilled.
    _row(lambda x: x.halves, block_kv=64, producer_registers=40),
    # Four warps load, since TMA cannot.
    _row(lambda x: not x.tma_loads and x.widest <= 128, query_stages=2),
    _row(lambda x: not x.tma_loads),
    # Head dims up to 64.
    _row(
        lambda x: x.widest <= 64 and x.has_bias_alone and x.is_float16,
        block_kv=128,
        consumers=3,
        query_stages=2,
        ping_pong=False,
        drains=True,  # 274 bytes would be spilled; causal 8 are
    ),
    _row(
        lambda x: x.widest <= 64 and x.has_bias_alone,
        block_kv=128,
        consumers=3,
        query_stages=2,
        ping_pong=False,
    ),
    # Four warpgroups that share keys and values: half the loads of two teams, 1 to 2 %.
    _row(
        lambda x: x.widest <= 64 and x.is_short and x.fills_fours,
        block_kv=64,
        consumers=4,
        stages=10,
        query_stages=2,
        ping_pong=False,
    ),
    # A row of blocks of a layout is none of its neighbours': of three warpgroups' 192 rows most
    # units would walk the blocks of two rows of 128.
    _row(
        lambda x: x.widest <= 64 and (x.is_short or x.is_roomy_layout),
        block_kv=64,
        teams=2,
        stages=5,
        query_stages=2,
        ping_pong=False,
    ),
    _row(
        lambda x: x.widest <= 64 and x.is_layout,
        block_kv=128,
        stages=6,
        query_stages=2,
        producer_registers=40,
    ),
    # Heads that share a block are of few rows.
    _row(
        lambda x: x.widest <= 64 and (x.is_crammed or x.packed_heads > 1),
        stages=4,
        query_stages=2,
    ),
    _row(
        lambda x: x.widest <= 64 and x.drains,
        block_kv=128,
        consumers=3,
        stages=4,
        query_stages=2,
        ping_pong=False,
        drains=True,
    ),
    _row(
        lambda x: x.widest <= 64,
        block_kv=128,
        consumers=3,
        stages=4,
        query_stages=2,
        ping_pong=False,
    ),
    # 3 to 11 % by the producer's registers.
    _row(lambda x: x.widest <= 128 and x.is_layout, stages=3, producer_registers=40),
    _row(lambda x: x.widest <= 128, stages=3),
    _row(lambda x: True),
)


def _choose_forward(problem: Problem, shapes: Shapes) -> ForwardTiling:
    """The same, but for how a bias is loaded."""
    asked = _Forward(problem, shapes)
    chosen = next(tiling for holds, tiling in _FORWARD if holds(asked))
    common: dict[str, Any] = {name: getattr(asked, name) for name in _COMMON}
    return ForwardTiling(shapes.head_dim, shapes.value_dim, **{"consumers": 2, **common, **chosen})


def choose_backward(problem: Problem, shapes: Shapes, gpu: GpuSpec) -> BackwardTiling:
    """Chooses the backward kernels' tiling for a problem that the family does not refuse."""
    widest = max(shapes.head_dim, shapes.value_dim)
    tma_loads = _tma_loads(shapes)
    causal = problem.window[1] is not None
    mapped = problem.score is not None
    sloped = problem.score is not None and emit.has_slope(problem.score)
    bare = problem.window[0] is None and not (problem.softcap or mapped)
    bare = bare and {*problem.terms} <= {"dropout_state"}
    # Loads without TMA leave the narrow kernel registers for 240 columns of dk and dv, not for 256.
    wide = widest > 128 or (not tma_loads and min(shapes.head_dim, shapes.value_dim) > 112)
    # Dropout beside another term or a left window takes registers that 128 queries leave to nobody.
    drops = "dropout_state" in problem.terms
    roomy = (
        problem.softcap is None
        and not sloped
        and shapes.bias is None
        and not (drops and (len(problem.terms) > 1 or problem.window[0] is not None))
        and not (problem.masked and "query_segments" in problem.terms)
        and not ({"query_positions", "block_numbers"} & {*problem.terms} and len(problem.terms) > 2)
    )
    block_q = 128 if widest <= 64 and roomy else 64
    hides = problem.window != (None, None) or set(problem.terms) - {"bias", "sinks"}
    stores = not (wide or drops or problem.split)
    own = stores and is_own(problem, shapes)
    by_rows = stores and adds_rows(problem, shapes, 128, _CTAS // 2)
    by_heads = 0
    if stores and not by_rows:
        by_heads = dbias_heads(problem, shapes, 128, _CTAS // 2)
    if is_highest(problem):
        return BackwardTiling(
            shapes.head_dim,
            shapes.value_dim,
            block_q=64,
            wide=True,
            score_stages=1 if widest > 64 else 2,
            l2_heads=_backward_l2_heads(problem, shapes),
            halves=True,
        )
    is_layout = _is_layout(problem)
    # 5 % at T >= 4096 without a mask, 1 to 4 % when causal, 2 to 7 % of the deterministic mode when
    # causal; elsewhere nothing or a loss.
    reads_ahead = bare and shapes.head_dim == shapes.value_dim == 128
    reads_ahead = reads_ahead and (causal or not problem.deterministic)
    # 84 to 172 bytes would be spilled.
    reads_ahead = reads_ahead and not (drops and problem.deterministic and problem.split)
    tiling = BackwardTiling(
        shapes.head_dim,
        shapes.value_dim,
        block_q=block_q,
        wide=wide,
        tma_loads=tma_loads,
        outputs=2 if is_layout and not wide and tma_loads else 1,
        dq_row_bytes=0 if problem.split else dq_row_bytes(shapes, block_q),
        reads_ahead=reads_ahead,
        # 7 %; at head dim 64 +-2 %, and with copies of float32 8 bytes spilled.
        holds_draws=drops and reads_ahead and _group(shapes) == 1,
        l2_heads=_backward_l2_heads(problem, shapes),
        stores_dbias=own or by_rows or by_heads > 0,
        clears_dbias=(own or by_rows) and bool(hides),
        dbias_rows=by_rows,
        dbias_heads=by_heads,
    )
    tiled = dataclasses.replace(tiling, bias_bytes=bytes_of_bias(shapes.bias))
    fits = tiled.shared_bytes <= gpu.shared_bytes
    # Beside positions and lengths wide heads would spill 16 bytes.
    crowded = widest > 64 and "query_positions" in problem.terms
    staged = tma_loads and not wide and not crowded and is_plane(shapes) and fits
    return _with_ring(problem, shapes, gpu, tiled if staged else tiling)


_RING_BYTES = 40 << 20  # of an H200's L2 (60 MB)
_RING_SHORTEST, _RING_LONGEST = 512, 2048  # queries, and keys


def _with_ring(
    problem: Problem, shapes: Shapes, gpu: GpuSpec, tiling: BackwardTiling
) -> BackwardTiling:
    """Returns the tiling with the sum of dq in a ring, where that was measured to be faster.

    What it saves, zeroing the sum ahead and reading it at the end, takes the same time at all
    lengths; what it takes is hidden beside units of 8 us or more.
    """
    sizes = (shapes.batch, shapes.q_heads, shapes.kv_heads, shapes.q_len, shapes.kv_len)
    if not all(isinstance(size, int) for size in sizes) or problem.deterministic or problem.split:
        return tiling
    if tiling.wide or not tiling.tma_loads:
        return tiling
    head_boxes, causal = boxes(shapes.head_dim), problem.window == (None, 0)
    shortest, longest = _RING_SHORTEST, _RING_LONGEST
    if _is_layout(problem) and problem.window == (None, None):
        # Of a thirtieth of the blocks a unit is as long.
        shortest, longest = 32 * shortest, max(sizes)
    elif not _is_bare(problem) or problem.window not in ((None, None), (None, 0)):
        return tiling
    elif causal or head_boxes == 1:
        shortest *= 2
    # Sets of half a round of units, or of a round where their sums take half as much. A sum has two
    # rounds and a half from its first unit until it is clear, or four if units are unequal.
    sms = gpu.sms or _CTAS // 2
    heads = max(1, sms // blocks(shapes.kv_len, tiling.block_kv) // head_boxes)
    lag, sets = (5, 8) if causal else (3, 5)
    rows = blocks(shapes.q_len, tiling.block_q) * tiling.block_q
    fits = sets * heads * _group(shapes) * rows * 256 * head_boxes <= _RING_BYTES
    many = shapes.batch * shapes.kv_heads >= 2 * sets * heads
    if not (fits and many and all(shortest <= length <= longest for length in sizes[3:])):
        return tiling
    return dataclasses.replace(
        tiling, dq_row_bytes=0, outputs=1, l2_heads=heads, ring_sets=sets, ring_lag=lag
    )


def _is_layout(problem: Problem) -> bool:
    """Tells whether there is a layout of whole blocks and no other term."""
    alone = problem.whole_blocks and problem.terms == ("block_numbers", "block_bits")
    return alone and problem.softcap is None and problem.score is None


# Bytes of what the heads walked together share, that stay in an H200's L2 (60 MB, halved by its two
# partitions). Taken on every GPU: shares of smaller caches were not measured.
_L2_SHARE = 32 << 20


def _backward_l2_heads(problem: Problem, shapes: Shapes) -> int:
    """Counts the kv heads that the backward kernel walks together.

    Few heads keep queries, output gradients and float32 sums of dq in L2. Many even out units of
    unequal length (causal) and spread those that wait for each other (deterministic). The factors
    are the fastest of 0.125 to 8 on an H200, 16k tokens, model dim 2048 (docs/tuning.md).
    """
    queries = known(shapes.q_len, 4096)
    uneven = problem.window[1] is not None or "block_numbers" in problem.terms
    widest = max(shapes.head_dim, shapes.value_dim)
    group = _group(shapes)
    # Of one query head: the units of a group walk its heads side by side.
    bytes_ = 4 if is_highest(problem) else 2
    head_bytes = queries * ((bytes_ + 4) * shapes.head_dim + bytes_ * shapes.value_dim)
    fitting = max(1, _L2_SHARE // head_bytes)
    if problem.deterministic:
        steps = queries // (64 if widest > 64 else 128)  # of the longest unit
        level = min(max(steps.bit_length() - 4, 0), 5)  # under 16, 32, 64, 128, 256 steps; more
        if uneven:
            factor = ((1, 2, 2, 3, 4, 8) if widest > 128 else (1, 2, 2, 4, 8, 8))[level]
            heads = fitting * factor // min(group, 2)
        else:
            heads = fitting * (1, 2, 2, 2, 4, 4)[level] // 2
    elif uneven:  # units of a group are as many times longer, and fewer: more of them to even out
        # Of a layout units are of one length mostly.
        heads = max(fitting * min(group, 2) // 2, 0 if _is_layout(problem) else 4 // group)
    else:
        heads = fitting // 4
    heads = max(1, heads)
    return min(heads, known(shapes.batch, heads) * known(shapes.kv_heads, heads))


def _is_bare(problem: Problem) -> bool:
    """Tells whether there is nothing between scores and weights but a window."""
    return not problem.terms and problem.softcap is None and problem.score is None


# From so many queries and keys on the norms of all rows, read ahead, take less than they save.
_FADING_QUERIES, _FADING_KEYS = 1024, 2048


def _fades(problem: Problem, shapes: Shapes) -> bool:
    """Tells whether a function adds lines of the distance that may hide the keys far away.

    There are keys of the queries' own indices, they are visible, and no line grows without end.
    """
    left, right = problem.window
    lines = score_lines(problem, shapes)
    if lines is None or lines.reach > 0 or lines.are_level or not {*problem.terms} <= {"score_ids"}:
        return False
    sees_own = left is None and not problem.bottom_right and shapes.q_len <= shapes.kv_len
    both = lines.bend if right is None else right >= 0
    long = shapes.q_len >= _FADING_QUERIES and shapes.kv_len >= _FADING_KEYS
    return sees_own and both and long and not problem.split


def _l2_heads(shapes: Shapes, problem: Problem) -> int:
    """Counts the query heads whose keys and values fit in L2 together."""
    bytes_per_head = (
        (4 if is_highest(problem) else 2)
        * known(shapes.kv_len, 4096)
        * (shapes.head_dim + shapes.value_dim)
    )
    fitting = max(1, _L2_SHARE // bytes_per_head)
    kv_heads = min(fitting, known(shapes.batch, fitting) * known(shapes.kv_heads, fitting))
    return kv_heads * _group(shapes)


def _group(shapes: Shapes) -> int:
    """Counts the query heads that read one kv head."""
    return known(shapes.q_heads // shapes.kv_heads, 1)


def _tma_loads(shapes: Shapes) -> bool:
    """Tells whether TMA can load the rows: they are multiples of 16 bytes apart."""
    return shapes.head_dim % 8 == 0 and shapes.value_dim % 8 == 0
