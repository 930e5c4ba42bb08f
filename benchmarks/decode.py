"""Measures decoding, one query token against a long cache, beside a plain sum of the same bytes.

    python benchmarks/decode.py                       # the cells of this machine, 100 s on an H200
    python benchmarks/decode.py --cells long ragged   # those with these words in their name
    python benchmarks/decode.py --set "heads=2 box_rows=8" --set rounds=4   # other tilings too

Every peer of a cell has the same queries, keys and values, and takes turns with the others, round
by round; a time is the best of the rounds. On a GPU a round is many calls in one compiled loop, or
for PyTorch one after the other. Rates are bytes of the keys and values that the lengths make
visible, over time. Before it is timed, a result is compared with backend "xla"; one that differs
has no time. Peers that cannot run a cell say why. Programs are compiled side by side, ahead of all.

Writes build/benchmarks/<device>/decode-<commit>.json and .md, for a CPU cpu/decode-<processor>.*

PyTorch's attention is measured where torch is importable: on a GPU through cuDNN and through
FlashAttention-2, on a CPU by the kernel that it chooses.
"""

import argparse
import dataclasses
import functools
import importlib
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import machine, runs
from common.decode_cells import CPU_CELLS, GPU_CELLS, SHAPES, Arrays, Cell
from tqdm import tqdm

import jax_flash
from jax_flash._gpu import decode as tilings

Run = Callable[[], Any]  # some calls, to the end
LOOP = 20e-3  # seconds that a round takes on a GPU, about
RATE, LATENCY = 4e12, 5e-6  # bytes a second and seconds, of which the number of calls follows
COMPILE_THREADS = 8
UNROLL = 48  # calls in one turn of its loop, as many as a model has layers


Start = Callable[[Arrays], Run]  # of a program that is compiled
Make = Callable[[Cell], Start]

# ---- peers ---------------------------------------------------------------------------------------


def tiled(text: str) -> Make:
    """Makes decode_attention's runs with a tiling of its own: "heads=2 rounds=4".

    The words are arguments of `make` in jax_flash/_gpu/decode.py.
    """
    options = {name: int(number) for name, number in (word.split("=") for word in text.split())}

    def make(cell: Cell) -> Start:
        def choose(call: Any, shapes: Any, gpu: Any) -> Any:
            if shapes.kv_heads % options.get("heads", 1):
                raise ValueError(f"{shapes.kv_heads} kv heads")
            tiling = tilings.make(call, shapes, gpu, **options)
            if tiling.stages < 1:
                raise ValueError(f"{tiling.shared_bytes} bytes of shared memory and more")
            return tiling

        chosen, tilings.choose = tilings.choose, choose
        try:
            return ours("cuda")(cell)
        finally:
            tilings.choose = chosen

    return make


def ours(backend: str) -> Make:
    """Makes decode_attention's runs, once its result is right."""

    def make(cell: Cell) -> Start:
        rotary = 1e4 if cell.appends else None
        decode = functools.partial(jax_flash.decode_attention, rotary_base=rotary)

        def step(carry: Any, lengths: Any, options: Any) -> Any:  # its caches are donated
            query, (key, value) = carry
            got = decode(query, key, value, lengths, **options, backend=backend)
            return got.out, (got.key_cache, got.value_cache)

        def out(x: Arrays, backend: str | None) -> jax.Array:
            precision = None if backend is None else "highest"
            key, value = x.caches
            return decode(
                x.query, key, value, x.lengths, **x.options, backend=backend, precision=precision
            ).out

        like = jax.eval_shape(lambda: Arrays.of(cell))
        outs = [
            jax.jit(functools.partial(out, backend=name)).lower(like).compile()
            for name in (None, "xla")
        ]
        begin = repeated(cell, lambda x: ((x.query, x.caches), x.lengths, x.options), step)

        def start(arrays: Arrays) -> Run:
            found, expected = (np.asarray(one(arrays), np.float32) for one in outs)
            error = np.abs(found - expected).max()
            if not error < (2e-2 if cell.dtype != "float32" else 1e-4):
                raise ValueError(f"the result is off by {error}")
            return begin(arrays)

        return start

    return make


def jax_nn(implementation: Any) -> Make:
    """Makes jax.nn's runs."""

    def make(cell: Cell) -> Start:
        refuse_layouts(cell)

        def step(query: Any, caches: Any, lengths: Any) -> Any:
            return jax.nn.dot_product_attention(
                query, *caches, key_value_seq_lengths=lengths, implementation=implementation
            )

        return repeated(cell, lambda x: (x.query, x.caches, x.lengths), step)

    return make


def our_forward(cell: Cell) -> Start:
    """Makes flash_attention's runs over the whole cache."""
    refuse_layouts(cell)

    def step(query: Any, caches: Any, lengths: Any) -> Any:
        return jax_flash.flash_attention(query, *caches, key_value_seq_lengths=lengths)

    return repeated(cell, lambda x: (x.query, x.caches, x.lengths), step)


def torch_sdpa(kind: str | None) -> Make:
    """Makes PyTorch's runs."""

    def make(cell: Cell) -> Start:
        refuse_layouts(cell)
        if cell.shortest is not None:
            raise NotImplementedError("no lengths")
        return start_torch(cell, kind)

    return make


def start_torch(cell: Cell, kind: str | None) -> Start:
    torch = importlib.import_module("torch")
    attention = importlib.import_module("torch.nn.attention")

    def start(arrays: Arrays) -> Run:
        # [B, N, T, H], dense: PyTorch's own layout.
        query, key, value = (
            torch.from_dlpack(x).transpose(1, 2).contiguous()
            for x in (arrays.query, *arrays.caches)
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

        def run_several() -> Any:
            for _ in range(calls_of(cell)):
                once()
            torch.cuda.synchronize()

        return run_several

    return start


def plain_sum(cell: Cell) -> Start:
    """Makes runs that add up as many bytes as the visible keys and values have."""
    count = cell.bytes // 2 // 4
    if jax.default_backend() == "gpu":

        def step(total: Any, flat: Any) -> Any:
            # The factor keeps XLA from taking the sum out of the loop.
            return sum(jnp.sum(x * (1 + 0 * total)) for x in flat)

        def pick(x: Arrays) -> Any:  # as many float32 numbers, from the caches where they lie
            flat = [jax.lax.bitcast_convert_type(flat_pairs(y), jnp.float32) for y in x.caches]
            return jnp.zeros(()), [y.reshape(-1)[:count] for y in flat]

        return repeated(cell, pick, step)

    def start(arrays: Arrays) -> Run:
        halves = [
            np.asarray(x).view(np.uint8).reshape(-1).view(np.float32)[:count] for x in arrays.caches
        ]
        cores = os.cpu_count() or 1
        parts = [part for half in halves for part in np.array_split(half, max(1, cores // 2))]
        pool = ThreadPoolExecutor(cores)

        def run_sum() -> Any:
            with np.errstate(all="ignore"):  # two bfloat16 as one float32 may be anything
                return list(pool.map(np.sum, parts))

        return run_sum

    return start


def flat_pairs(x: jax.Array) -> jax.Array:
    """Brings an array to the shape in which float32 has one number for two of 16 bits."""
    return x.reshape(-1, 2) if x.dtype.itemsize == 2 else x.reshape(-1)


def refuse_layouts(cell: Cell) -> None:
    """Raises for what is decode_attention's alone."""
    if cell.page is not None or cell.appends:
        raise NotImplementedError("no pages, nothing appended")


def calls_of(cell: Cell) -> int:
    """Counts the calls of a round: several turns of a loop on a GPU."""
    if jax.default_backend() != "gpu":
        return 1
    return UNROLL * max(1, round(LOOP / (cell.bytes / RATE + LATENCY) / UNROLL))


def repeated(cell: Cell, pick: Callable[[Arrays], Any], step: Callable[..., Any]) -> Start:
    """Compiles carry = step(carry, *fixed), in a loop on a GPU, whose end a run waits for.

    `pick` takes the carry and what is fixed from a cell's arrays.
    """
    like = jax.eval_shape(lambda: pick(Arrays.of(cell)))
    calls = calls_of(cell)

    def several(carry: Any, *fixed: Any) -> Any:
        # Several calls a turn: a turn of the loop alone costs some 15 us, 0.3 a call.
        return jax.lax.fori_loop(0, calls, lambda _, x: step(x, *fixed), carry, unroll=UNROLL)

    # Donated: else the carry is copied once a run, caches and all.
    program = jax.jit(step if calls == 1 else several, donate_argnums=0).lower(*like).compile()

    def start(arrays: Arrays) -> Run:
        carry, *fixed = pick(arrays)
        carry = jax.tree.map(jnp.copy, carry)

        def run_program() -> Any:
            nonlocal carry
            carry = jax.block_until_ready(program(carry, *fixed))

        return run_program

    return start


def peers() -> dict[str, Make]:
    """Lists what this machine can run, ours first."""
    has_torch = machine.has_torch()
    if jax.default_backend() == "gpu":
        known: dict[str, Make] = {"jax_flash": ours("cuda"), "flash_attention": our_forward}
        known |= {"jax_cudnn": jax_nn("cudnn")}
        kinds = {"torch_cudnn": "CUDNN_ATTENTION", "torch_flash": "FLASH_ATTENTION"}
        known |= {name: torch_sdpa(kind) for name, kind in kinds.items() if has_torch}
    else:
        known = {"jax_flash": ours("cpu"), "jax_xla": jax_nn("xla")}
        known |= {"torch": torch_sdpa(None)} if has_torch else {}
    return known | {"sum": plain_sum}


OTHERS = ("jax_cudnn", "torch_cudnn", "torch_flash", "jax_xla", "torch")  # of other projects

# ---- the run -------------------------------------------------------------------------------------


def main() -> None:
    """Measures the chosen cells and prints them."""
    options = parse()
    machine.say_what_is_missing()
    on_gpu = jax.default_backend() == "gpu"
    cells = [
        cell
        for cell in (GPU_CELLS if on_gpu else CPU_CELLS)
        if any(word in cell.name for word in options.cells)
    ]
    known = {name: make for name, make in peers().items() if name in options.peers}
    jobs = [(cell, name) for cell in cells for name in known]
    with ThreadPoolExecutor(COMPILE_THREADS) as pool:
        built = pool.map(lambda job: build(job[0], known[job[1]]), jobs)
        found = tqdm(built, desc="compiling", total=len(jobs), disable=None)
        programs = dict(zip(jobs, found, strict=True))
    for text in options.set:  # one after the other: each changes the choice of tilings
        programs |= {(cell, text): build(cell, tiled(text)) for cell in cells}
    chosen = [*known, *options.set]
    records = []
    for cell in (progress := tqdm(cells, disable=None)):
        progress.set_description(cell.name)
        records.append(measure(cell, {name: programs[cell, name] for name in chosen}, options))
    about, folder = runs.describe(options, "benchmarks/decode.py", [])
    if not on_gpu:
        about["processor"] = machine.processor()
    path = folder / f"decode-{about['commit'] if on_gpu else machine.processor_slug()}"
    path.with_suffix(".json").write_text(runs.in_lines(about, "cells", records))
    text = (
        "\n\n".join([runs.introduce(about), *table(records, chosen, "TB/s" if on_gpu else "GB/s")])
        + "\n"
    )
    path.with_suffix(".md").write_text(text)
    print(text)
    print(path)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(peers())
    parser.add_argument("--cells", nargs="+", default=[""], help="words in the name of a cell")
    machine.add_peers(parser, names, names)
    parser.add_argument("--set", action="append", default=[], help="a tiling of ours on a GPU")
    parser.add_argument("--seconds", type=float, default=0.2, help="spent on a peer in a cell")
    parser.add_argument("--commit", default=None, help="name of the results; default: git's")
    machine.add_output(parser)
    return parser.parse_args()


def build(cell: Cell, make: Make) -> Start | str:
    """Compiles a peer's program of a cell, or returns why there is none."""
    try:
        return make(cell)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return str(error).splitlines()[0][:200]


def measure(
    cell: Cell, programs: Mapping[str, Start | str], options: argparse.Namespace
) -> dict[str, Any]:
    """Times one cell: microseconds of a call and TB/s by peer, or why there are none."""
    arrays = jax.block_until_ready(Arrays.of(cell))
    refused: dict[str, str] = {}
    started: dict[str, Run] = {}
    for name, start in programs.items():
        try:
            if isinstance(start, str):
                raise NotImplementedError(start)
            one = start(arrays)
            one()
            started[name] = one
        except (NotImplementedError, RuntimeError, ValueError) as error:
            refused[name] = str(error).splitlines()[0][:200]
    known: dict[str, list[float]] = {name: [] for name in started}
    while unfinished := [
        name for name, x in known.items() if len(x) < 5 or sum(x) < options.seconds
    ]:
        for name in unfinished:
            begin = time.perf_counter()
            started[name]()
            known[name].append(time.perf_counter() - begin)
    seconds = {name: min(x) / calls_of(cell) for name, x in known.items()}
    return {
        "cell": dataclasses.asdict(cell),
        "bytes": cell.bytes,
        "us": {name: round(1e6 * x, 3) for name, x in seconds.items()},
        "tb_s": {name: float(f"{cell.bytes / x / 1e12:.4g}") for name, x in seconds.items()},
        "no": refused,
    }


def table(
    records: Sequence[Mapping[str, Any]], chosen: Sequence[str], unit: str = "TB/s"
) -> list[str]:
    """Writes microseconds and TB/s or GB/s as Markdown, ours over the best of others and a sum."""
    digits_of_rate, factor = {"TB/s": (2, 1), "GB/s": (1, 1000)}[unit]
    heads = [f"{name}: µs ({unit})" for name in chosen] + ["× the best other", "× a sum"]
    lines = ["| cell | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(heads)]
    ratios: dict[str, float] = {}
    for record in records:
        us, name = record["us"], record["cell"]["name"]
        row = [name]
        for peer in chosen:
            digits = 0 if us.get(peer, 0) >= 100 else 1
            rate = factor * record["tb_s"].get(peer, 0)
            found = f"{us.get(peer, 0):.{digits}f} ({rate:.{digits_of_rate}f})"
            row.append(found if peer in us else "")
        for group in (OTHERS, ("sum",)):
            best = min((us[peer] for peer in group if peer in us), default=None)
            both = best is not None and "jax_flash" in us
            row.append(f"{best / us['jax_flash']:.2f}" if both else "")
            if both and group is OTHERS and name in {cell.name for cell in SHAPES}:
                ratios[name] = best / us["jax_flash"]
        lines.append("| " + " | ".join(row) + " |")
    parts = ["\n".join(lines)]
    if ratios:
        mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
        parts.append(
            f"Beside the best of the others, {len(ratios)} shapes of equal lengths: {mean:.3f} × "
            f"in the geometric mean, from {min(ratios.values()):.2f} to {max(ratios.values()):.2f}."
        )
    reasons: dict[str, list[str]] = {}
    for record in records:
        for peer, reason in record["no"].items():
            reasons.setdefault(f"{peer}: {reason}", []).append(record["cell"]["name"])
    parts.append("\n".join(f"- {reason} ({'; '.join(names)})" for reason, names in reasons.items()))
    return [part for part in parts if part]


if __name__ == "__main__":
    main()
