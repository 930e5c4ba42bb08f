"""Decoding by equal parts of a batch's blocks beside a fixed number of splits: LeanAttention.

Both are the same kernels with the same blocks; only where keys are cut differs. "stream-K": all
blocks of the batch are cut into as many equal parts as the GPU runs at a time. "fixed": each row is
cut into so many parts. For rows of one length that is stream-K with that many parts a row; rows of
different lengths are split by 2, 4 and 8 in clusters, the kernels' own fixed number.
"""

import contextlib
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import decode
import jax
import jax.numpy as jnp
from common.decode_cells import Arrays, Cell
from common.paper import Claim, Panel, Part, Record, Settings

import jax_flash
from jax_flash import _explain, _gpu
from jax_flash._gpu import decode as tilings
from jax_flash._ops.decode import Decode
from jax_flash._problem import Shapes

CONTEXTS = (1024, 4096, 16384, 65536, 131072, 262144, 524288)
BATCHES = (2, 3, 5, 6, 12)  # rows of BATCH_CONTEXT
BATCH_CONTEXT = 16384
RAGGED = ((8, 65536), (32, 65536), (8, 262144))  # rows, longest; the shortest is 1024
HEADS, KV_HEADS = 32, 8
EVERYWHERE = 8  # splits that a cell has whatever its shape
SECONDS = 0.1  # that a way is timed for
LABELS = {
    "chosen": "as decode_attention chooses",
    "stream": "stream-K",
    "rule": "fixed, FlashDecoding's rule",
    "whole": "whole rows",
    "fixed": f"fixed, {EVERYWHERE}",
    "clusters 2": "fixed, 2 in a cluster",
    "clusters 4": "fixed, 4 in a cluster",
    "clusters 8": "fixed, 8 in a cluster",
}


def cells(settings: Settings) -> list[Record]:
    """Lists contexts of one row, batches of one context, and ragged batches."""
    if settings.quick:
        sizes = [("context", 1, 512), ("batch", 3, 256), ("ragged", 4, 2048)]
    else:
        sizes = [("context", 1, n) for n in CONTEXTS]
        sizes += [("batch", n, BATCH_CONTEXT) for n in BATCHES]
        sizes += [("ragged", *x) for x in RAGGED]
    return [
        {"name": f"{kind}, {rows} x {length}", "kind": kind, "rows": rows, "length": length}
        for kind, rows, length in sizes
    ]


def splits_by_rule(units: int, slots: int, blocks: int) -> int:
    """Chooses splits as FlashDecoding does: the fewest within 85 % of the best use of the GPU.

    Arguments:
      units: pairs of a row and a kv head.
      slots: CTAs that the GPU runs at a time.
      blocks: of a row.
    """
    if units >= 0.8 * slots:
        return 1

    def used(splits: int) -> float:
        waves = units * splits / slots
        return waves / math.ceil(waves)

    counts = range(1, min(blocks, 128) + 1)
    best = max(map(used, counts))
    return next(n for n in counts if used(n) >= 0.85 * best)


@contextlib.contextmanager
def tiled(way: str, rows: int, splits: int) -> Iterator[None]:
    """Has the calls that are lowered inside decode so."""
    own, cluster = tilings.choose, tilings._cluster

    def choose(call: Any, shapes: Any, gpu: Any) -> Any:
        if way.startswith("clusters"):
            tiling = tilings.make(call, shapes, gpu, cluster=int(way.split()[1]), block_kv=128)
            if tiling.stages < tiling.teams:
                raise ValueError(f"{tiling.shared_bytes} bytes of shared memory and more")
            return tiling
        tiling = own(call, shapes, gpu)
        return tiling if way == "stream" else dataclasses.replace(tiling, parts=rows * splits)

    if way != "chosen":
        tilings._cluster = lambda *_: 1
        tilings.choose = choose
    try:
        yield
    finally:
        tilings.choose, tilings._cluster = own, cluster


def tiling_of(cell: Cell, way: str, splits: int = 1) -> Any:
    """Returns the tiling of a way on this GPU, or else on an H100."""
    query = jax.ShapeDtypeStruct((cell.batch, 1, cell.heads, cell.head_dim), cell.dtype)
    rows = (cell.batch, cell.length, cell.kv_heads, cell.head_dim)
    cache = jax.ShapeDtypeStruct(rows, cell.dtype)
    problem, *_ = _explain._prepare(query, cache, cache)
    with tiled(way, cell.batch, splits):
        shapes = Shapes.of(query, cache, cache, {})
        return _gpu.plan(Decode(problem, None), shapes, gpu()).tiling


def gpu() -> Any:
    found = _gpu.spec.present() if jax.default_backend() == "gpu" else None
    return found or _gpu.spec.GPUS["H100"]


def ways_of(cell: Cell, kind: str) -> dict[str, int]:
    """Lists the ways of a cell with their splits of a row; 0: those are no fixed number."""
    found = {"chosen": 0, "stream": 0}
    if kind == "ragged":
        return found | {f"clusters {n}": n for n in (2, 4, 8)}
    stream = tiling_of(cell, "stream")
    slots = (gpu().sms or 132) * stream.resident
    blocks = -(-cell.length // stream.block_kv)
    found["rule"] = splits_by_rule(cell.batch * cell.kv_heads, slots, blocks)
    if kind == "batch":
        return found
    return found | {"whole": 1, "fixed": min(EVERYWHERE, blocks)}


def measure(settings: Settings, cell: Record) -> Record:
    """Times the ways of a cell in turns: microseconds of a call, once its result is right."""
    kv_heads = 2 if settings.quick else KV_HEADS
    shortest = 1024 if cell["kind"] == "ragged" else None
    sizes = (cell["rows"], HEADS // KV_HEADS * kv_heads, kv_heads, cell["length"])
    shape = Cell(cell["name"], *sizes, shortest=shortest)
    arrays = jax.block_until_ready(Arrays.of(shape))
    splits = ways_of(shape, cell["kind"])
    expected = jax.jit(functools.partial(attend, backend="xla"))(arrays)
    on_gpu = jax.default_backend() == "gpu"
    runs: dict[str, Any] = {}
    no: dict[str, str] = {}
    for way, count in splits.items():
        if way != "chosen" and not on_gpu:
            no[way] = "its tilings are those of a GPU"
            continue
        try:
            with tiled(way, shape.batch, count):
                # Functions of their own: jit would take the first one's compilation.
                out = jax.jit(functools.partial(attend, backend=None)).lower(arrays).compile()
                start = decode.repeated(shape, pick, step)
        except (NotImplementedError, ValueError) as error:
            no[way] = str(error).split("\n")[0][:200]
            continue
        error = jnp.abs(out(arrays).astype(jnp.float32) - expected.astype(jnp.float32)).max()
        if not error < 0.02 * jnp.abs(expected.astype(jnp.float32)).max():
            raise RuntimeError(f"{way}: off by {error} beside backend 'xla'")
        runs[way] = start(arrays)
    found: dict[str, list[float]] = {way: [] for way in runs}
    for run in runs.values():
        run()
    least = 0.0 if settings.quick else SECONDS
    while any(len(x) < 3 or sum(x) < least for x in found.values()):
        for way, run in runs.items():
            begin = time.perf_counter()
            run()
            found[way].append(time.perf_counter() - begin)
    calls = decode.calls_of(shape)
    us = {way: round(1e6 * statistics.median(x) / calls, 3) for way, x in found.items()}
    return {"us": us, "splits": splits, "no": no, "bytes": shape.bytes}


def attend(x: Arrays, backend: str | None) -> jax.Array:
    key, value = x.caches
    return jax_flash.decode_attention(x.query, key, value, x.lengths, backend=backend).out


def pick(x: Arrays) -> Any:
    return x.query, x.caches, x.lengths


def step(query: Any, caches: Any, lengths: Any) -> Any:
    """Makes the next query of a call's result."""
    key, value = caches
    return jax_flash.decode_attention(query, key, value, lengths).out


def gains(records: Sequence[Record], beside: str, kind: str = "context") -> dict[str, float]:
    """Lists by cell how many times as fast as another way stream-K is."""
    return {
        x["name"]: x["us"][beside] / x["us"]["stream"]
        for x in records
        if x["kind"] == kind and "stream" in x["us"] and beside in x["us"]
    }


def mean_gain(beside: str, kind: str = "context") -> Any:
    """Returns how a claim finds the mean of the gains and the largest."""

    def here(records: Sequence[Record]) -> str | None:
        found = gains(records, beside, kind)
        if not found:
            return None
        mean = math.exp(statistics.fmean(map(math.log, found.values())))
        name = max(found, key=found.__getitem__)
        return f"{mean:.2f} ×, up to {found[name]:.2f} × ({name.split(', ')[1]})"

    return here


def ragged_gain(records: Sequence[Record]) -> str | None:
    """Compares with the best of the fixed numbers and with each."""
    found = [mean_gain(f"clusters {n}", "ragged")(records) for n in (2, 4, 8)]
    if None in found:
        return None
    return "; ".join(f"beside {n}: {text}" for n, text in zip((2, 4, 8), found, strict=True))


def table(records: Sequence[Record]) -> str:
    """Writes microseconds of each way, with its splits of a row."""
    ways = [way for way in LABELS if any(way in x["us"] for x in records)]
    lines = ["| cell | " + " | ".join(f"{LABELS[x]}, µs" for x in ways) + " | stream-K, TB/s |"]
    lines.append("|---" + "|---:" * (len(ways) + 1) + "|")
    for x in records:
        row = [x["name"]]
        for way in ways:
            text = f"{x['us'][way]:.1f}" if way in x["us"] else ""
            splits = x["splits"].get(way, 0)
            row.append(f"{text} ({splits})" if text and splits else text)
        best = min(x["us"].get("stream", math.inf), x["us"]["chosen"])
        row.append(f"{x['bytes'] / best / 1e6:.2f}")
        lines.append(f"| {' | '.join(row)} |")
    reasons = {f"{LABELS[w]}: {why}" for x in records for w, why in x["no"].items()}
    return "\n".join([*lines, "", *(f"- {x}" for x in sorted(reasons))])


def panels(records: Sequence[Record]) -> list[Panel]:
    """Draws the gain over contexts and over rows, beside each fixed number."""

    def lines(kind: str, axis: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for x in records:
            for way in x["us"] if x["kind"] == kind else ():
                if way not in ("stream", "chosen") and "stream" in x["us"]:
                    gain = next(iter(gains([x], way, kind).values()))
                    found.setdefault(LABELS[way], []).append((x[axis], gain))
        return found

    words = "stream-K, × as fast"
    return [
        Panel("one row", "context", words, lines("context", "length"), "xy"),
        Panel(f"rows of {BATCH_CONTEXT // 1024}k", "rows", words, lines("batch", "rows"), "xy"),
    ]


PART = Part(
    title="Decoding by equal parts",
    paper="Sanovar et al., LeanAttention (arXiv:2405.10480)",
    seconds=60,
    claims=(
        Claim(
            "beside FlashDecoding, mean and largest of contexts, 1k to 512k here",
            "1.73 ×, up to 2.18 × (256k, A100)",
            "abstract",
            mean_gain("rule"),
        ),
        Claim(
            "beside rows that are not split (FlashAttention-2), mean and largest",
            "2.6 ×, up to 8.33 × (512k, A100)",
            "abstract, first version",
            mean_gain("whole"),
        ),
        Claim(
            f"beside {EVERYWHERE} splits whatever the context, mean and largest",
            "none",
            "not in the paper",
            mean_gain("fixed"),
        ),
        Claim(
            f"beside FlashDecoding's rule, {BATCHES[0]} to {BATCHES[-1]} rows of 16k",
            "none",
            "not in the paper",
            mean_gain("rule", "batch"),
        ),
        Claim(
            "ragged batches from 1k on, beside the same splits of each row",
            "none",
            "not in the paper",
            ragged_gain,
        ),
    ),
    differs=(
        "bfloat16, 32 query and 8 kv heads of 128, one GPU. FlashDecoding is its rule for the "
        "number of splits in our kernels, not its own kernels; so only where keys are cut differs, "
        "and a gain by better kernels is not part of it. The paper's models have a kv head for "
        "each query head. Several GPUs are not measured."
    ),
    cells=cells,
    measure=measure,
    table=table,
    panels=panels,
)
