"""Memory of attention over the length, and the longest sequence: FlashAttention, Table 21."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from common import paper
from common.paper import Claim, Panel, Part, Record, Settings

import jax_flash

BATCH, HEADS, HEAD_DIM = 16, 8, 64
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
PUBLISHED = {  # MB on an A100, of forward and backward: Table 21
    "jax_flash": (209, 418, 836, 1672, 3344, 6688, 13376),
    "xla": (1184, 4416, 17024),
}
WAYS = {"jax_flash": "flash attention", "xla": "attention as a formula"}
# Products that are planned and not timed need not be tried.
UNTUNED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
# One row of a batch, 8 heads: T doubles until what XLA plans is more than the GPU has.
LONGEST_RUN = 1 << 20  # quadratic time, 15 s here: longer ones are planned alone
PLANNED = 1 << 24  # lengths beyond this are not asked for


def cells(settings: Settings) -> list[Record]:
    """Lists the lengths of the table, then the search for the longest one."""
    lengths = (128, 256) if settings.quick else LENGTHS
    found: list[Record] = [
        {"name": f"{way} T {length}", "kind": "table", "way": way, "length": length}
        for length in lengths
        for way in WAYS
    ]
    return found + [{"name": f"{way}, the longest", "kind": "longest", "way": way} for way in WAYS]


def attend(way: str, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    if way == "xla":
        return jax.nn.dot_product_attention(q, k, v, implementation="xla")
    return jax_flash.flash_attention(q, k, v)


def dtype() -> Any:
    """The paper's; XLA's attention on a CPU has no products of it."""
    return jnp.float16 if jax.default_backend() == "gpu" else jnp.float32


def compile_step(way: str, batch: int, length: int, heads: int) -> Any:
    """Compiles out and the gradients of query, key and value."""

    def step(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> Any:
        out, pull = jax.vjp(functools.partial(attend, way), q, k, v)
        return out, *pull(dout)

    like = jax.ShapeDtypeStruct((batch, length, heads, HEAD_DIM), dtype())
    options = UNTUNED if jax.default_backend() == "gpu" else None
    return jax.jit(step).lower(like, like, like, like).compile(options)


def planned(compiled: Any) -> int:
    """Bytes of a program's arguments, results and what it needs beside them."""
    needs = compiled.memory_analysis()
    return needs.argument_size_in_bytes + needs.output_size_in_bytes + needs.temp_size_in_bytes


def run(compiled: Any, batch: int, length: int, heads: int, seed: int) -> None:
    """Runs a step once, to its end."""
    shape = (batch, length, heads, HEAD_DIM)
    keys = jax.random.split(jax.random.key(seed), 4)
    operands = [jax.random.normal(key, shape, dtype()) for key in keys]
    jax.block_until_ready(compiled(*operands))


def is_memory(error: Exception) -> bool:
    """Whether an error says that there is too little memory."""
    return "RESOURCE_EXHAUSTED" in str(error) or "out of memory" in str(error).lower()


def limit() -> int:
    """Bytes that JAX may take of the GPU; on a CPU, where nothing says, 1 GB."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("bytes_limit", 10**9)


def measure(settings: Settings, cell: Record) -> Record:
    """Plans, and runs what fits."""
    if cell["kind"] == "longest":
        return longest(settings, cell["way"])
    batch, heads = (1, 2) if settings.quick else (BATCH, HEADS)
    return fit(cell["way"], batch, cell["length"], heads, settings, runs=True)


def fit(way: str, batch: int, length: int, heads: int, settings: Settings, *, runs: bool) -> Record:
    """Tells the MB that a step takes as XLA plans it, and whether the GPU has as many."""
    if way == "xla" and 2 * batch * heads * length**2 > limit():
        return {"mb": None, "fits": False}  # the scores alone are more
    found: Record = {"mb": None, "fits": False}
    try:
        compiled = compile_step(way, batch, length, heads)
        found["mb"] = round(planned(compiled) / 1e6, 3)
        if 1e6 * found["mb"] <= limit():
            if runs:
                run(compiled, batch, length, heads, settings.seed)
            found["fits"] = True
    except jax.errors.JaxRuntimeError as error:
        if not is_memory(error):
            raise
    return found


def longest(settings: Settings, way: str) -> Record:
    """Doubles T, one row of 8 heads, while a step fits; runs those of up to LONGEST_RUN."""
    heads, length = (2, 512) if settings.quick else (HEADS, 8192)
    last = 2048 if settings.quick else PLANNED
    found: Record = {"fits_at": None, "ran_at": None, "too_long": None, "limit_mb": limit() / 1e6}
    while length <= last:
        runs = length <= LONGEST_RUN
        step = fit(way, 1, length, heads, settings, runs=runs)
        if not step["fits"]:
            found["too_long"] = length
            break
        found |= {"fits_at": length, "mb": step["mb"]} | ({"ran_at": length} if runs else {})
        length *= 2
    return found


def at(records: Sequence[Record], way: str, length: int) -> Record | None:
    return paper.find(records, kind="table", way=way, length=length)


def less(length: int) -> Any:
    """Returns how a claim finds the memory of the formula beside ours at a length."""

    def here(records: Sequence[Record]) -> str | None:
        formula, ours = at(records, "xla", length), at(records, "jax_flash", length)
        found = paper.ratio(formula, ours, "mb")
        if formula is None or ours is None or found is None:
            return None
        return f"{found} less ({formula['mb']:,.0f} / {ours['mb']:,.0f} MB)"

    return here


def of_longest(records: Sequence[Record]) -> str | None:
    """At T 65536."""
    found = at(records, "jax_flash", LENGTHS[-1])
    return None if found is None or not found["mb"] else f"{found['mb']:,.0f} MB"


def growth(records: Sequence[Record]) -> str | None:
    """From T 1024 to 65536."""
    return paper.ratio(
        at(records, "jax_flash", LENGTHS[-1]), at(records, "jax_flash", LENGTHS[0]), "mb"
    )


def beyond(records: Sequence[Record]) -> str | None:
    """How many times as long a sequence fits."""
    ours, other = (paper.find(records, kind="longest", way=way) for way in WAYS)
    if ours is None or other is None or not ours["fits_at"] or not other["fits_at"]:
        return None
    return (
        f"{ours['fits_at'] / other['fits_at']:.0f} ×: T {ours['fits_at']:,} as XLA plans it "
        f"(run: {ours['ran_at']:,}) beside {other['fits_at']:,}"
    )


def table(records: Sequence[Record]) -> str:
    """Writes MB by length."""
    lengths = dict.fromkeys(x["length"] for x in records if x["kind"] == "table")
    lines = ["| T | flash, MB | the formula by XLA, MB | paper: flash | paper: PyTorch |"]
    lines.append("|---:" * 5 + "|")
    for length in lengths:
        row = [str(length)]
        for way in WAYS:
            found = at(records, way, length)
            mb = "" if found is None or found["mb"] is None else f"{found['mb']:,.0f} "
            row.append(mb + ("" if found is None or found["fits"] else "(does not fit)"))
        for way in WAYS:
            known = dict(zip(LENGTHS, PUBLISHED[way], strict=False))
            row.append(f"{known[length]:,}" if length in known else "")
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def panels(records: Sequence[Record]) -> list[Panel]:
    """Draws MB over T, both here and in the paper."""
    lines: dict[str, Any] = {
        f"{label}, here": [
            (x["length"], x["mb"])
            for x in records
            if x["kind"] == "table" and x["way"] == way and x["mb"]
        ]
        for way, label in WAYS.items()
    }
    lines |= {
        f"{WAYS[way]}, paper (A100)": list(zip(LENGTHS, of, strict=False))
        for way, of in PUBLISHED.items()
    }
    return [Panel("forward + backward", "sequence length", "MB", lines, "xy")]


PART = Part(
    title="Memory and the longest sequence",
    paper="Dao et al., FlashAttention (arXiv:2205.14135)",
    seconds=50,
    claims=(
        Claim(
            "memory beside the formula's, T 4096, forward + backward",
            "20 × less (A100)",
            "Table 21",
            less(4096),
        ),
        Claim(
            "memory at T 65536, 16 rows of 8 heads of 64",
            "13,376 MB (A100)",
            "Table 21",
            of_longest,
        ),
        Claim("memory at T 65536 beside T 1024", "64 × (A100)", "Table 21", growth),
        Claim(
            "longest sequence beside the formula's, 1 row of 8 heads of 64",
            "16 ×: 64k beside 4k, 16 rows (A100)",
            "Table 21",
            beyond,
        ),
    ),
    differs=(
        "float16, no mask and no dropout, as in the table. MB are arguments, results and what XLA "
        "plans beside them; the paper's are what PyTorch's allocator had. Each step that fits was "
        f"run, up to T {LONGEST_RUN:,}."
    ),
    cells=cells,
    measure=measure,
    table=table,
    panels=panels,
)
