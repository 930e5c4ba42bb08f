"""Bytes of HBM that attention moves, forward and backward: FlashAttention, Figure 2, Theorem 2.

Bytes of ours are counted from the launch (common/launch_bytes.py), and those of attention as a
formula are what XLA counts of its program. Where ncu is installed and may read counters, the last
cell has them of both, and they take the place of what was counted: the record says which.
"""

import contextlib
import csv
import functools
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tune
from common import launch_bytes, paper, runs
from common.paper import Claim, Panel, Part, Record, Settings

import jax_flash
from jax_flash import _explain, _gpu
from jax_flash._ops import passes
from jax_flash._problem import Shapes

TOKENS, HEADS, HEAD_DIM, DTYPE = 16384, 16, 64, "bfloat16"
LENGTHS = (1024, 4096)
BLOCK_LENGTH = 4096  # of the forward passes over block sizes
WAYS = ("jax_flash", "xla")
SHARED = 227 << 10  # bytes of a multiprocessor's shared memory, M of the formula
# Fields of a tiling by family: blocks of so many queries, of the same keys each.
BLOCKS = {
    "sm80": ("row_warps=4 row_tiles=1", "row_warps=4 row_tiles=2", "row_warps=8 row_tiles=2"),
    "hopper": ("consumers=2 ping_pong=False", "consumers=3 ping_pong=False"),
}
LABELS = {"sm80": "mma.sync kernels", "hopper": "Hopper's kernels"}
METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
COUNTED = "counted from the launch; the formula's: XLA's count of its program"
READ = "counters of ncu; XLA's products untuned"
SECONDS = 150  # that ncu may take: one process compiles all calls and makes each twice
MARK = "sine"  # in the name of the kernel ahead of each call


def cells(settings: Settings) -> list[Record]:
    """Lists the lengths, then the families of kernels whose block sizes are tried."""
    lengths = (256, 512) if settings.quick else LENGTHS
    found: list[Record] = [
        {"name": f"T {length}", "kind": "bytes", "length": length} for length in lengths
    ]
    found += [
        {"name": f"block sizes, {LABELS[family]}", "kind": "blocks", "family": family}
        for family in BLOCKS
    ]
    return [*found, {"name": "counters of ncu", "kind": "counters"}]


def measure(settings: Settings, cell: Record) -> Record:
    """Measures a length, or the block sizes of a family, or reads counters."""
    if cell["kind"] == "counters":
        return measure_counters(settings)
    if cell["kind"] == "blocks":
        return measure_blocks(settings, cell["family"])
    return measure_length(settings, cell["length"])


def dtype() -> Any:
    """Returns that of arrays; XLA's attention on a CPU has no products of 16 bits."""
    return DTYPE if jax.default_backend() == "gpu" else "float32"


def draw(batch: int, length: int, heads: int, seed: int) -> list[jax.Array]:
    """Draws query, key, value and the gradient of out."""
    shape = (batch, length, heads, HEAD_DIM)
    return [jax.random.normal(x, shape, dtype()) for x in jax.random.split(jax.random.key(seed), 4)]


def compile_step(way: str, batch: int, length: int, heads: int) -> Any:
    """Compiles out and the gradients of query, key and value."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        if way == "xla":
            return jax.nn.dot_product_attention(q, k, v, implementation="xla")
        return jax_flash.flash_attention(q, k, v)

    def step(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> Any:
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(dout)

    like = jax.ShapeDtypeStruct((batch, length, heads, HEAD_DIM), dtype())
    return jax.jit(step).lower(like, like, like, like).compile()


def plan(of: str, batch: int, length: int, heads: int, changes: str = "", family: str = "") -> Any:
    """Plans a pass, on this GPU or else on an H100, by a tiling with some fields changed."""
    like = jax.ShapeDtypeStruct((batch, length, heads, HEAD_DIM), DTYPE)
    problem, (q, k, v, *terms), *_ = _explain._prepare(like, like, like)
    shapes = Shapes.of(q, k, v, problem.name_terms(terms))
    on_gpu = jax.default_backend() == "gpu"
    gpu = (_gpu.spec.present() if on_gpu else None) or _gpu.spec.GPUS["H100"]
    with _gpu.prefer(family) if family == "sm80" else contextlib.nullcontext():
        fields = dict(tune.read(word) for word in changes.split())
        return tune.plan_changed(_gpu.plan, of, fields, passes(problem)[of], shapes, gpu)


def measure_length(settings: Settings, length: int) -> Record:
    """Times both ways in turns, once their results agree, and counts their bytes."""
    tokens, heads = (1024, 2) if settings.quick else (TOKENS, HEADS)
    batch = tokens // length
    operands = draw(batch, length, heads, settings.seed)
    programs = {way: compile_step(way, batch, length, heads) for way in WAYS}
    for ours, other in zip(*(x(*operands) for x in programs.values()), strict=True):
        error = jnp.abs(ours.astype(jnp.float32) - other.astype(jnp.float32)).max()
        if not error < 0.02 * jnp.abs(other.astype(jnp.float32)).max() + 0.02:
            raise RuntimeError(f"off by {error} beside XLA's attention")
    calls: dict[str, Any] = {
        way: (functools.partial(x, *operands), jax.block_until_ready) for way, x in programs.items()
    }
    seconds = runs.time_in_turns(calls)
    parts = [
        getattr(launch_bytes, of)(plan(of, batch, length, heads), DTYPE)
        for of in ("forward", "backward")
    ]
    ours = {name: sum(x[name] for x in parts) for name in parts[0]}
    theirs = programs["xla"].cost_analysis()["bytes accessed"]
    found: Record = {
        **{f"{way}_ms": round(1e3 * statistics.median(x), 4) for way, x in seconds.items()},
        "jax_flash_counted_gb": ours["arrays"] / 1e9,
        "jax_flash_requests_gb": ours["requests"] / 1e9,
        "xla_counted_gb": theirs / 1e9,
    }
    counted = {f"{way}_gb": found[f"{way}_counted_gb"] for way in WAYS}
    return found | counted | {"bytes_by": COUNTED}


def calls() -> list[tuple[str, int]]:
    """Lists the calls whose counters are read, in their order."""
    return [(way, length) for length in LENGTHS for way in WAYS]


def measure_counters(settings: Settings) -> Record:
    """Reads the GB of HBM of each call by ncu, or says why that cannot be."""
    if settings.quick:
        return {"no_counters": "small sizes"}
    try:
        return {"gb": read_counters(run_ncu(), len(calls()))}
    except subprocess.TimeoutExpired as error:
        return {"no_counters": f"ncu took more than {error.timeout} s"}
    except (OSError, RuntimeError) as error:
        return {"no_counters": str(error)[:300]}


def run_ncu() -> str:
    """Returns ncu's table of the kernels of all calls."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise OSError("ncu is not installed")
    # Clocks stay as they are: a machine that lends its GPU may not let them be set.
    words = ["--profile-from-start", "off", "--clock-control", "none", "--cache-control", "none"]
    words += ["--print-units", "base"]
    words += ["--metrics", ",".join(METRICS), "--csv", "--page", "raw", "--target-processes", "all"]
    command = [ncu, *words, sys.executable, str(Path(__file__).with_name("_counters.py"))]
    # Two processes share the GPU.
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            text, _ = process.communicate(timeout=SECONDS)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # what ncu started would go on without it
            raise
    if process.returncode:
        raise RuntimeError(f"ncu: {text.strip()[-200:]}")
    return text


def read_counters(text: str, count: int) -> list[float]:
    """Adds the bytes of the kernels of each call in ncu's table, in GB."""
    lines = [x for x in text.splitlines() if x.startswith('"')]
    table = list(csv.DictReader(lines))
    if len(table) < 2 or not {*METRICS, "Kernel Name"} <= table[0].keys():
        raise RuntimeError(f"ncu has no table of {' and '.join(METRICS)}: {text.strip()[-200:]}")
    units, *kernels = table
    if {units[x] for x in METRICS} != {"byte"}:
        raise RuntimeError(f"ncu counts in {units[METRICS[0]]!r}, not in bytes")
    found: list[list[float]] = []
    for x in kernels:
        if MARK in x["Kernel Name"]:
            found.append([])
        elif found:
            found[-1] += [float(x[name].replace(",", "")) / 1e9 for name in METRICS]
    if len(found) != count or not all(found):
        raise RuntimeError(f"ncu has kernels of {sum(map(bool, found))} calls, not of {count}")
    return [math.fsum(x) for x in found]


def measure_blocks(settings: Settings, family: str) -> Record:
    """Times the forward pass by block sizes, in turns; on a CPU their bytes are counted alone."""
    length, heads, batch = BLOCK_LENGTH, HEADS, TOKENS // BLOCK_LENGTH
    found = []
    calls: dict[str, Any] = {}
    on_gpu = jax.default_backend() == "gpu"
    operands = draw(batch, length, heads, settings.seed)[:3] if on_gpu else []
    own = _gpu.plan
    for changes in BLOCKS[family]:
        planned = plan("forward", batch, length, heads, changes, family)
        found.append({"block": planned.tiling.block_q, "changes": changes})
        found[-1]["requests_gb"] = launch_bytes.forward(planned, DTYPE)["requests"] / 1e9
        if not on_gpu:
            continue
        fields = dict(tune.read(word) for word in changes.split())
        _gpu.plan = functools.partial(tune.plan_changed, own, "forward", fields)
        try:
            with _gpu.prefer(family) if family == "sm80" else contextlib.nullcontext():
                # A function of its own: jit would take the first one's compilation.
                attend = functools.partial(jax_flash.flash_attention, backend="cuda")
                compiled = jax.jit(attend).lower(*operands).compile()
        finally:
            _gpu.plan = own
        calls[changes] = (functools.partial(compiled, *operands), jax.block_until_ready)
    outs = [jnp.asarray(call(), jnp.float32) for call, _ in calls.values()]
    if any(not jnp.abs(x - outs[0]).max() < 0.02 for x in outs):
        raise RuntimeError("results of block sizes differ")
    seconds = runs.time_in_turns(calls) if calls else {}
    for one in found:
        if one["changes"] in seconds:
            one["ms"] = round(1e3 * statistics.median(seconds[one["changes"]]), 4)
    return {"length": length, "blocks": found}


def lengths_of(records: Sequence[Record]) -> list[Record]:
    """Records of the lengths, their bytes by counters where these were read."""
    read = paper.find(records, kind="counters") or {}
    found = [x for x in records if x["kind"] == "bytes"]
    if "gb" not in read:
        return found
    gb = dict(zip(calls(), read["gb"], strict=True))
    return [
        x | {f"{way}_gb": gb[way, x["length"]] for way in WAYS} | {"bytes_by": READ} for x in found
    ]


def at(records: Sequence[Record], length: int) -> Record | None:
    return paper.find(lengths_of(records), length=length)


def times(field: str, length: int) -> Any:
    """Returns how a claim finds how many times ours the formula's is."""

    def here(records: Sequence[Record]) -> str | None:
        found = at(records, length)
        if found is None:
            return None
        formula, ours = found[f"xla_{field}"], found[f"jax_flash_{field}"]
        what = "ms" if field == "ms" else f"GB; {found['bytes_by']}"
        return f"{formula / ours:.2g} × ({formula:.3g} / {ours:.3g} {what})"

    return here


def growth(records: Sequence[Record]) -> str | None:
    """Compares the lengths: how many times as many bytes the longer one takes."""
    short, long = (at(records, length) for length in LENGTHS)
    if short is None or long is None:
        return None
    ours, formula = (long[f"{way}_gb"] / short[f"{way}_gb"] for way in WAYS)
    return f"{formula:.2g} × and {ours:.2g} × ({long['bytes_by']})"


def fall(records: Sequence[Record]) -> str | None:
    """Tells the times over block sizes."""
    found = paper.find(records, kind="blocks", family="sm80")
    if found is None or any("ms" not in x for x in found["blocks"]):
        return None
    return "; ".join(f"{x['ms']:.2f} ms at {x['block']}" for x in found["blocks"])


def table(records: Sequence[Record]) -> str:
    """Writes bytes and times by length, then by block size."""
    head = "| T | flash, GB | the formula by XLA, GB | by the formulas of Theorem 2, ratio | "
    lines = [head + "flash asks of L2, GB | flash, ms | the formula, ms |", "|---:" * 7 + "|"]
    for x in lengths_of(records):
        theorem = (x["length"] + HEAD_DIM) * SHARED / 2 / (x["length"] * HEAD_DIM**2)
        lines.append(
            f"| {x['length']} | {x['jax_flash_gb']:.3g} | {x['xla_gb']:.3g} | {theorem:.3g} | "
            f"{x['jax_flash_requests_gb']:.3g} | {x['jax_flash_ms']:.3f} | {x['xla_ms']:.3f} |"
        )
    bytes_by = dict.fromkeys(x["bytes_by"] for x in lengths_of(records))
    lines += ["", f"Bytes: {'; '.join(bytes_by)}.", ""]
    lines += [
        "| kernels | queries of a block | asks of L2, GB | forward, ms |",
        "|---|---:|---:|---:|",
    ]
    for x in records:
        for block in x.get("blocks", ()):
            ms = f"{block['ms']:.3f}" if "ms" in block else ""
            row = (LABELS[x["family"]], str(block["block"]), f"{block['requests_gb']:.3g}", ms)
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def panels(records: Sequence[Record]) -> list[Panel]:
    """Draws bytes over T, and time and bytes over block sizes."""
    lengths = lengths_of(records)
    blocks = [x for x in records if x["kind"] == "blocks"]
    gb = {
        "flash, GB of HBM": [(x["length"], x["jax_flash_gb"]) for x in lengths],
        "the formula by XLA, GB of HBM": [(x["length"], x["xla_gb"]) for x in lengths],
        "flash, GB asked of L2": [(x["length"], x["jax_flash_requests_gb"]) for x in lengths],
    }
    by_block = {
        LABELS[x["family"]]: [(one["block"], one["ms"]) for one in x["blocks"] if "ms" in one]
        for x in blocks
    }
    asked = {
        LABELS[x["family"]]: [(one["block"], one["requests_gb"]) for one in x["blocks"]]
        for x in blocks
    }
    return [
        Panel("forward + backward, 16k tokens", "sequence length", "GB", gb, "xy"),
        Panel("forward, time", "queries of a block", "ms", by_block, "x"),
        Panel("forward, bytes asked of L2", "queries of a block", "GB", asked, "x"),
    ]


PART = Part(
    title="Bytes of HBM",
    paper="Dao et al., FlashAttention (arXiv:2205.14135)",
    seconds=60,
    claims=(
        Claim(
            "bytes of HBM, formula beside flash, forward + backward, T 1024",
            "9.2 × (40.3 / 4.4 GB, A100)",
            "Figure 2, left",
            times("gb", 1024),
        ),
        Claim(
            "time, formula beside flash, forward + backward, T 1024",
            "5.7 × (41.7 / 7.3 ms, A100)",
            "Figure 2, left",
            times("ms", 1024),
        ),
        Claim(
            "bytes at T 4096 beside T 1024, as many tokens: formula and flash",
            "4 × and 4 ×: Θ(T H + T²) and Θ(T² H² / M) a head",
            "Theorem 2",
            growth,
        ),
        Claim(
            "forward time falls with larger blocks, until something else limits it",
            "until blocks of 256 (A100)",
            "Figure 2, middle",
            fall,
        ),
    ),
    differs=(
        "bfloat16, 16 heads of 64, 16k tokens; the paper has 64 rows of 1024, but prints a twelfth "
        "of the operations that they take, so ratios are compared. The formula is jax.nn's "
        "attention by XLA. Blocks are those of queries, which have all keys pass by; in the "
        "paper's loops blocks of keys do."
    ),
    cells=cells,
    measure=measure,
    table=table,
    panels=panels,
)
