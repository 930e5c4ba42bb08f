"""Measures decoding, one query token against a long cache, beside a plain sum of the same bytes.

    python benchmarks/decode.py                       # the cells of this machine: CPU or GPU
    python benchmarks/decode.py --cells long ragged   # those with these words in their name
    python benchmarks/decode.py --set "heads=2 box_rows=8" --set rounds=4   # other tilings too

Every peer of a cell has the same queries, keys and values, and takes turns with the others, round
by round; a time is the best of the rounds. On a GPU a round is many calls in one compiled loop (or
between two CUDA events). Rates are bytes of the keys and values that the lengths make visible, over
time. Before it is timed, a result is compared with backend "xla"; one that differs has no time.
Peers that cannot run a cell say why. Writes results/<device>/decode.json.

PyTorch's attention is measured where torch is importable: on a GPU through cuDNN and through
FlashAttention-2, on a CPU by the kernel that it chooses.
"""

import argparse
import dataclasses
import importlib
import importlib.util
import json
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import jax_flash
from jax_flash._gpu import decode as tilings

cpu = importlib.import_module("cpu")  # cpu.py beside this file; the folder cpu/ has the name too
Run = Callable[[], Any]  # some calls, to the end
LOOP = 20e-3  # seconds that a round takes on a GPU, about
UNROLL = 48  # calls in one turn of its loop, as many as a model has layers


@dataclasses.dataclass(frozen=True)
class Cell:
    """One problem: `batch` rows of `length` positions, or of lengths from `shortest` to it."""

    name: str
    batch: int
    heads: int
    kv_heads: int
    length: int
    dtype: str = "bfloat16"
    shortest: int | None = None  # log-uniform lengths from this
    page: int | None = None  # positions in a page, pages in any order; None: contiguous
    appends: bool = False  # keys and values are rotated and written in the call
    head_dim: int = 128

    def lengths(self) -> np.ndarray:
        """Draws the rows' lengths."""
        if self.shortest is None:
            return np.full(self.batch, self.length, np.int32)
        low, high = np.log(self.shortest), np.log(self.length)
        return np.exp(np.random.default_rng(0).uniform(low, high, self.batch)).astype(np.int32)

    @property
    def bytes(self) -> int:
        """Of the keys and values that are visible."""
        size = self.kv_heads * self.head_dim * jnp.dtype(self.dtype).itemsize
        return 2 * size * int(self.lengths().sum())


CPU_CELLS = (
    Cell("16k bfloat16", 1, 32, 8, 16384),
    Cell("16k float32", 1, 32, 8, 16384, dtype="float32"),
    Cell("16k bfloat16 pages of 16", 1, 32, 8, 16384, page=16),
    Cell("16k bfloat16 with new keys, rotary", 1, 32, 8, 16384, appends=True),
    Cell("1k bfloat16", 1, 32, 8, 1024),
    Cell("8 rows of 2k bfloat16", 8, 32, 8, 2048),
    Cell("16 rows of 256 to 8k, ragged, bfloat16", 16, 32, 8, 8192, shortest=256),
)
GPU_CELLS = (
    Cell("long 128k", 1, 32, 8, 131072),
    Cell("long 128k float32", 1, 32, 8, 131072, dtype="float32"),
    Cell("long 64k, no groups", 1, 32, 32, 65536),
    Cell("8 rows of 32k", 8, 32, 8, 32768),
    Cell("64 rows of 8k", 64, 32, 8, 8192),
    Cell("128 rows of 2k", 128, 64, 8, 2048),
    Cell("4 rows of 8k", 4, 32, 8, 8192),
    Cell("long 512k", 1, 64, 8, 524288),
    Cell("ragged 64 rows of 1k to 64k", 64, 32, 8, 65536, shortest=1024),
    *(Cell(f"64 rows of 8k, pages of {n}", 64, 32, 8, 8192, page=n) for n in (16, 64, 128)),
    Cell("short 1k", 1, 32, 8, 1024),
    Cell("short 16k", 1, 32, 8, 16384),
    Cell("short 8 rows of 4k", 8, 32, 8, 4096),
    Cell("short 1k with new keys, rotary", 1, 32, 8, 1024, appends=True),
)


@dataclasses.dataclass(frozen=True)
class Arrays:
    """A cell's arrays: those of decode_attention, and the rows' keys and values one by one."""

    query: jax.Array  # [B, 1, N, H]
    caches: tuple[jax.Array, jax.Array]
    lengths: jax.Array
    options: dict[str, Any]  # further ones of decode_attention

    @classmethod
    def of(cls, cell: Cell) -> "Arrays":
        """Draws them on the device."""
        keys = jax.random.split(jax.random.key(0), 4)
        rows, new = (cell.batch, cell.length), (cell.batch, 1, cell.kv_heads, cell.head_dim)
        options: dict[str, Any] = {}
        if cell.page is not None:
            pages = cell.batch * cell.length // cell.page
            order = np.random.default_rng(0).permutation(pages).astype(np.int32)
            options["page_table"] = jnp.asarray(order.reshape(cell.batch, -1))
            rows = (pages, cell.page)
        if cell.appends:
            options |= {name: jnp.ones(new, cell.dtype) for name in ("new_key", "new_value")}
        query = jax.random.normal(keys[0], (cell.batch, 1, cell.heads, cell.head_dim), cell.dtype)
        shape = (*rows, cell.kv_heads, cell.head_dim)
        caches = tuple(jax.random.normal(key, shape, cell.dtype) for key in keys[1:3])
        return cls(query, (caches[0], caches[1]), jnp.asarray(cell.lengths()), options)


# ---- peers ---------------------------------------------------------------------------------------


def tiled(text: str) -> Callable[[Cell, Arrays], Run]:
    """Makes decode_attention's runs with a tiling of its own: "heads=2 rounds=4".

    The words are arguments of `make` in jax_flash/_gpu/decode.py.
    """
    options = {name: int(number) for name, number in (word.split("=") for word in text.split())}

    def make(cell: Cell, arrays: Arrays) -> Run:
        def choose(call: Any, shapes: Any, gpu: Any) -> Any:
            if shapes.kv_heads % options.get("heads", 1):
                raise ValueError(f"{shapes.kv_heads} kv heads")
            tiling = tilings.make(call, shapes, gpu, **options)
            if tiling.stages < 1:
                raise ValueError(f"{tiling.shared_bytes} bytes of shared memory and more")
            return tiling

        chosen, tilings.choose = tilings.choose, choose
        try:
            return ours("cuda")(cell, arrays)
        finally:
            tilings.choose = chosen

    return make


def ours(backend: str) -> Callable[[Cell, Arrays], Run]:
    """Makes decode_attention's runs, once its result is right."""

    def make(cell: Cell, arrays: Arrays) -> Run:
        check(cell, arrays)
        rotary = 1e4 if cell.appends else None

        def step(carry: Any, lengths: Any, options: Any) -> Any:  # its caches are donated
            query, caches = carry
            got = jax_flash.decode_attention(
                query, caches[0], caches[1], lengths, **options, rotary_base=rotary, backend=backend
            )
            return got.out, (got.key_cache, got.value_cache)

        return repeated(step, (arrays.query, arrays.caches), arrays.lengths, arrays.options)

    return make


def jax_nn(implementation: Any) -> Callable[[Cell, Arrays], Run]:
    """Makes jax.nn's runs."""

    def make(cell: Cell, arrays: Arrays) -> Run:
        refuse_layouts(cell)

        def step(query: Any, caches: Any, lengths: Any) -> Any:
            return jax.nn.dot_product_attention(
                query, *caches, key_value_seq_lengths=lengths, implementation=implementation
            )

        return repeated(step, arrays.query, arrays.caches, arrays.lengths)

    return make


def our_forward(cell: Cell, arrays: Arrays) -> Run:
    """Makes flash_attention's runs over the whole cache."""
    refuse_layouts(cell)

    def step(query: Any, caches: Any, lengths: Any) -> Any:
        return jax_flash.flash_attention(query, *caches, key_value_seq_lengths=lengths)

    return repeated(step, arrays.query, arrays.caches, arrays.lengths)


def torch_sdpa(kind: str | None) -> Callable[[Cell, Arrays], Run]:
    """Makes PyTorch's runs."""

    def make(cell: Cell, arrays: Arrays) -> Run:
        refuse_layouts(cell)
        if cell.shortest is not None:
            raise NotImplementedError("no lengths")
        torch = importlib.import_module("torch")
        attention = importlib.import_module("torch.nn.attention")
        device = "cpu" if kind is None else "cuda"
        # [B, N, T, H], dense: PyTorch's own layout.
        dense = (arrays.query, *arrays.caches)
        query, key, value = (
            torch.from_numpy(np.asarray(x, np.float32))
            .to(device, getattr(torch, cell.dtype))
            .transpose(1, 2)
            .contiguous()
            for x in dense
        )
        kinds = list(attention.SDPBackend.__members__.values())
        chosen = kinds if kind is None else attention.SDPBackend.__members__[kind]

        def once() -> Any:
            with torch.no_grad(), attention.sdpa_kernel(chosen):
                return torch.nn.functional.scaled_dot_product_attention(
                    query, key, value, enable_gqa=cell.heads != cell.kv_heads
                )

        if kind is None:
            return once

        def run() -> Any:
            for _ in range(calls):
                once()
            torch.cuda.synchronize()

        calls = 1
        run()
        begin = time.perf_counter()
        run()
        calls = max(1, int(LOOP / (time.perf_counter() - begin)))
        run.calls = calls  # type: ignore[attr-defined]
        return run

    return make


def plain_sum(cell: Cell, arrays: Arrays) -> Run:
    """Makes runs that add up as many bytes as the visible keys and values have."""
    count = cell.bytes // 2 // 4
    if jax.default_backend() == "gpu":
        # As many float32 numbers, from the caches where they lie.
        flat = [jax.lax.bitcast_convert_type(flat_pairs(x), jnp.float32) for x in arrays.caches]
        flat = [x.reshape(-1)[:count] for x in flat]

        def step(total: Any, flat: Any) -> Any:
            # The factor keeps XLA from taking the sum out of the loop.
            return sum(jnp.sum(x * (1 + 0 * total)) for x in flat)

        return repeated(step, jnp.zeros(()), flat)
    halves = [
        np.asarray(x).view(np.uint8).reshape(-1).view(np.float32)[:count] for x in arrays.caches
    ]
    cores = os.cpu_count() or 1
    parts = [part for half in halves for part in np.array_split(half, max(1, cores // 2))]
    pool = ThreadPoolExecutor(cores)

    def run() -> Any:
        with np.errstate(all="ignore"):  # two bfloat16 as one float32 may be anything
            return list(pool.map(np.sum, parts))

    return run


def flat_pairs(x: jax.Array) -> jax.Array:
    """Brings an array to the shape in which float32 has one number for two of 16 bits."""
    return x.reshape(-1, 2) if x.dtype.itemsize == 2 else x.reshape(-1)


def refuse_layouts(cell: Cell) -> None:
    """Raises for what is decode_attention's alone."""
    if cell.page is not None or cell.appends:
        raise NotImplementedError("no pages, nothing appended")


def repeated(step: Callable[..., Any], carry: Any, *fixed: Any) -> Run:
    """Compiles carry = step(carry, *fixed), in a loop on a GPU, which waits for each run."""
    carry = jax.tree.map(jnp.copy, carry)
    if jax.default_backend() != "gpu":
        donated = jax.jit(step, donate_argnums=0).lower(carry, *fixed).compile()

        def run() -> Any:
            nonlocal carry
            carry = jax.block_until_ready(donated(carry, *fixed))

        return run
    once = jax.jit(step, donate_argnums=0).lower(carry, *fixed).compile()
    carry = jax.block_until_ready(once(carry, *fixed))
    begin = time.perf_counter()
    carry = jax.block_until_ready(once(carry, *fixed))
    calls = UNROLL * max(1, int(LOOP / (time.perf_counter() - begin) / UNROLL))

    def several(carry: Any, *fixed: Any) -> Any:
        # Several calls a turn: a turn of the loop alone costs some 15 us, 0.3 a call.
        return jax.lax.fori_loop(0, calls, lambda _, x: step(x, *fixed), carry, unroll=UNROLL)

    # Donated: else the carry is copied once a run, caches and all.
    compiled = jax.jit(several, donate_argnums=0).lower(carry, *fixed).compile()

    def run_loop() -> Any:
        nonlocal carry
        carry = jax.block_until_ready(compiled(carry, *fixed))

    run_loop.calls = calls  # type: ignore[attr-defined]
    return run_loop


def peers() -> dict[str, Callable[[Cell, Arrays], Run]]:
    """Lists what this machine can run, ours first."""
    has_torch = importlib.util.find_spec("torch") is not None
    if jax.default_backend() == "gpu":
        known = {"jax_flash": ours("cuda"), "flash_attention": our_forward}
        known |= {"jax_cudnn": jax_nn("cudnn")}
        kinds = {"torch_cudnn": "CUDNN_ATTENTION", "torch_flash": "FLASH_ATTENTION"}
        known |= {name: torch_sdpa(kind) for name, kind in kinds.items() if has_torch}
    else:
        known = {"jax_flash": ours("cpu"), "jax_xla": jax_nn("xla")}
        known |= {"torch": torch_sdpa(None)} if has_torch else {}
    return known | {"sum": plain_sum}


# ---- the run -------------------------------------------------------------------------------------


def main() -> None:
    """Measures the chosen cells and prints them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = peers()
    parser.add_argument("--cells", nargs="+", default=[""], help="words in the name of a cell")
    parser.add_argument("--peers", nargs="+", choices=known, default=list(known))
    parser.add_argument("--set", action="append", default=[], help="a tiling of ours on a GPU")
    parser.add_argument("--seconds", type=float, default=1.0, help="spent on a peer in a cell")
    options = parser.parse_args()
    chosen = {name: known[name] for name in options.peers}
    chosen |= {text: tiled(text) for text in options.set}
    on_gpu = jax.default_backend() == "gpu"
    cells = [
        cell
        for cell in (GPU_CELLS if on_gpu else CPU_CELLS)
        if any(word in cell.name for word in options.cells)
    ]
    results: dict[str, dict[str, Any]] = {}
    for cell in (progress := tqdm(cells, disable=None)):
        progress.set_description(cell.name)
        results[cell.name] = measure(cell, chosen, options)
    device = jax.devices()[0].device_kind if on_gpu else cpu.processor_name()
    folder = Path(__file__).parent / "results"
    folder /= re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") if on_gpu else "cpu"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ("decode.json" if on_gpu else f"decode-{cpu.processor_slug()}.json")
    record = {"device": device, "jax": jax.__version__, "cells": results}
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(table(results, list(chosen)))
    print(device, path)


def measure(cell: Cell, chosen: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Times one cell: seconds of a call by peer, or why there are none."""
    arrays = Arrays.of(cell)
    times: dict[str, Any] = {"bytes": cell.bytes}
    runs: dict[str, Run] = {}
    for name, make in chosen.items():
        try:
            runs[name] = make(cell, arrays)
            runs[name]()
        except (NotImplementedError, RuntimeError, ValueError) as error:
            times[name] = str(error).splitlines()[0][:200]
            runs.pop(name, None)
    known: dict[str, list[float]] = {name: [] for name in runs}
    while unfinished := [
        name for name, x in known.items() if len(x) < 5 or (sum(x) < options.seconds < 1e9)
    ]:
        for name in unfinished:
            begin = time.perf_counter()
            runs[name]()
            seconds = time.perf_counter() - begin
            known[name].append(seconds)
    for name, x in known.items():
        times[name] = min(x) / getattr(runs[name], "calls", 1)
    return times


def check(cell: Cell, arrays: Arrays) -> None:
    """Raises ValueError where the kernels' result is not that of backend "xla"."""
    rotary = 1e4 if cell.appends else None

    def out(backend: str | None) -> np.ndarray:
        call = jax.jit(
            lambda query, caches, lengths, options: (
                jax_flash.decode_attention(
                    query,
                    caches[0],
                    caches[1],
                    lengths,
                    **options,
                    rotary_base=rotary,
                    precision=None if backend is None else "highest",
                    backend=backend,
                ).out
            )
        )
        return np.asarray(call(arrays.query, arrays.caches, arrays.lengths, arrays.options))

    error = np.abs(out(None).astype(np.float32) - out("xla").astype(np.float32)).max()
    if not error < (2e-2 if cell.dtype != "float32" else 1e-4):
        raise ValueError(f"the result is off by {error}")


def table(results: dict[str, dict[str, Any]], chosen: list[str]) -> str:
    """Writes microseconds and GB/s as Markdown, and ours over the others."""
    lines = ["| cell | " + " | ".join(f"{name}: µs | GB/s" for name in chosen) + " |"]
    lines.append("|---|" + "---:|" * (2 * len(chosen)))
    for name, times in results.items():
        row = [name]
        for peer in chosen:
            seconds = times[peer]
            if isinstance(seconds, str):
                row += ["", ""]
            else:
                row += [f"{seconds * 1e6:.0f}", f"{times['bytes'] / seconds / 1e9:.1f}"]
        lines.append("| " + " | ".join(row) + " |")
    for name, times in results.items():
        refused = [f"{peer}: {times[peer]}" for peer in chosen if isinstance(times[peer], str)]
        lines += [f"{name}: {reason}" for reason in refused]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
