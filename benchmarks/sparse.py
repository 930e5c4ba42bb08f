"""Measures attention with block masks: time against density, and the butterfly beside dense.

    python benchmarks/sparse.py                               # T 16384, then 65536
    python benchmarks/sparse.py --layouts butterfly --lengths # the long sequences alone

16 heads, batch 1, bfloat16, blocks of 128, one layout for all heads. Layouts: "random", each row of
blocks with the same number of blocks; "banded", the nearest ones; "butterfly", the flat butterfly,
whose density follows from T, and with as many of its nearest diagonals more or less as reach the
others; "stride-4", the butterfly of that maximum stride, three blocks a row however long. Dense is
the same call without a block mask. Density d is the part of the blocks that are not empty; a time
is beside d x dense. Before all, out and gradients of a random layout are compared with those of the
layout as a boolean mask, at T 1024: a wrong kernel has no time.

On a GPU a program is ten calls, each of which takes as values what the one before made of them, out
or dv, as the layers of a model follow each other; a time is a tenth of it, dense and sparse alike.
One by one, the shortest calls would wait for the host, which takes 60 to 90 us for each. Longer
sequences, and a CPU, have a program for each call.

Writes build/benchmarks/<device>/sparse-<commit>.json and .md; `figures` draws Figure 2 (right) of
FlashAttention (arXiv:2205.14135) from it, whose Table 20 has butterfly beside dense.
"""

import argparse
import functools
import itertools
import math
import statistics
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import machine, runs
from tqdm import tqdm

import jax_flash
from jax_flash import masks

HEADS, BLOCK = 16, 128
DENSITIES = (0.02, 0.05, 0.1, 0.25, 0.5, 1.0)
LAYOUTS = ("random", "banded", "butterfly")
PASSES = ("forward", "training")
LONG = 16384  # beyond it calls take up to 0.2 s: fewer of them
CALLS = 10  # of a program on a GPU, up to that length
MAX_STRIDE = 4  # three blocks a row: at T 65536 as sparse as the paper's, 150 times faster there


def main() -> None:
    """Measures the chosen lengths and prints a table of each."""
    options = parse()
    records = []
    lengths = dict.fromkeys([*options.lengths, *options.long])
    wanted = itertools.product(lengths, options.head_dims, options.passes, (False, True))
    with ThreadPoolExecutor() as pool:  # all is compiled side by side
        made = [pool.submit(runs.measure_product)]
        made += [pool.submit(check, head_dim) for head_dim in options.head_dims]
        made += [pool.submit(program, *one) for one in wanted]
        made += [pool.submit(arrays, *one) for one in itertools.product(lengths, options.head_dims)]
        for one in made:
            one.result()
    ceiling = [runs.measure_product()]
    for length in options.lengths:
        for head_dim in options.head_dims:
            densities = options.densities
            records += measure(length, head_dim, options.layouts, densities, options.passes)
    for length in options.long:
        for head_dim in options.head_dims:
            records += measure(length, head_dim, ("butterfly",), (), options.passes)
    ceiling.append(runs.measure_product())
    about, folder = runs.describe(options, "benchmarks/sparse.py", ceiling)
    path = folder / f"sparse-{about['commit']}"
    path.with_suffix(".json").write_text(runs.in_lines(about, "cells", records))
    text = "\n\n".join([runs.introduce(about), table(records)]) + "\n"
    path.with_suffix(".md").write_text(text)
    print(text)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", nargs="*", type=int, default=[16384])
    parser.add_argument("--long", nargs="*", type=int, default=[65536], help="butterfly and dense")
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--densities", nargs="+", type=float, default=list(DENSITIES))
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument("--commit", default=None, help="name of the results; default: git's")
    machine.add_output(parser)
    return parser.parse_args()


def layout_of(name: str, blocks: int, density: float) -> np.ndarray:
    """Makes a layout, bool [blocks, blocks], with the part `density` of each row's blocks."""
    kept = max(1, round(density * blocks))
    apart = np.abs(np.arange(blocks)[:, None] - np.arange(blocks))
    if name == "random":
        order = np.random.default_rng(0).random((blocks, blocks))
        order[apart == 0] = -1.0  # each row sees something of its own
    elif name == "banded":
        order = apart.astype(float)
    else:  # those of the butterfly first, near ones before far ones
        order = apart + np.where(masks.butterfly(blocks), 0.0, 2.0 * blocks)
    rank = np.argsort(np.argsort(order, axis=1, kind="stable"), axis=1)
    return rank < kept


@functools.cache
def arrays(length: int, head_dim: int) -> tuple[jax.Array, ...]:
    """Draws query, key, value and the gradient of out."""
    shape = (4, 1, length, HEADS, head_dim)
    return tuple(jax.jit(lambda: jax.random.normal(jax.random.key(0), shape, jnp.bfloat16))())


def attend(mask: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax_flash.flash_attention(q, k, v, block_mask=mask)


def step(mask: Any, q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> Any:
    """Computes out and the gradients of query, key and value."""
    out, pull = jax.vjp(functools.partial(attend, mask), q, k, v)
    return (out, *pull(dout))


def calls_of(length: int) -> int:
    """Counts the calls of a program."""
    return CALLS if length <= LONG and jax.default_backend() == "gpu" else 1


@functools.cache
def program(length: int, head_dim: int, of: str, masked: bool) -> Any:
    """Compiles calls of a pass with a block mask, or without, one after the other."""
    like = jax.ShapeDtypeStruct((1, length, HEADS, head_dim), jnp.bfloat16)
    blocks = math.ceil(length / BLOCK)
    layout = jax.ShapeDtypeStruct((blocks, blocks), bool)
    make = functools.partial(jax_flash.block_mask_of, block=BLOCK)
    mask = jax.eval_shape(make, layout) if masked else None
    forward = of == "forward"
    operands = [like] * (3 if forward else 4)

    def several(mask: Any, *operands: jax.Array) -> Any:
        results: Any = ()
        for _ in range(calls_of(length)):
            results = (attend if forward else step)(mask, *operands)
            # Not equal: of those, forward passes too, XLA would make one.
            value = results if forward else results[-1]
            operands = (*operands[:2], value, *operands[3:])
        return results

    return jax.jit(several).lower(mask, *operands).compile()


def check(head_dim: int) -> None:
    """Compares a random layout with the same as a boolean mask: a wrong kernel has no time."""
    q, k, v, dout = arrays(1024, head_dim)
    layout = layout_of("random", 1024 // BLOCK, 0.3)
    m = jax_flash.block_mask_of(layout, block=BLOCK)
    got = jax.jit(step)(m, q, k, v, dout)
    dense = jnp.asarray(np.kron(layout, np.ones((BLOCK, BLOCK), bool)))

    def plain(q, k, v) -> Any:
        return jax_flash.reference.attention(q, k, v, mask=dense)

    @jax.jit
    def plain_step(q, k, v, dout) -> Any:
        out, pull = jax.vjp(plain, q, k, v)
        return (out, *pull(dout.astype(out.dtype)))

    for own, want in zip(got, plain_step(q, k, v, dout), strict=True):
        error = jnp.abs(own.astype(jnp.float32) - want.astype(jnp.float32)).max()
        if not error < 0.03 * jnp.abs(want.astype(jnp.float32)).max():
            raise RuntimeError(f"head dim {head_dim}: an error of {error} beside the plain formula")


def measure(
    length: int,
    head_dim: int,
    layouts: tuple[str, ...],
    densities: tuple[float, ...],
    passes: tuple[str, ...],
) -> list[dict[str, Any]]:
    """Times dense attention and each layout, in turns: a record for each."""
    q, k, v, dout = arrays(length, head_dim)
    blocks = math.ceil(length / BLOCK)
    chosen: dict[str, np.ndarray | None] = {"dense": None}
    for name in layouts:
        for density in densities:
            chosen[f"{name} {density:g}"] = layout_of(name, blocks, density)
    if "butterfly" in layouts:
        chosen["butterfly own"] = np.asarray(masks.butterfly(blocks))
        chosen[f"stride-{MAX_STRIDE} own"] = np.asarray(
            masks.butterfly(blocks, max_stride=MAX_STRIDE)
        )
    # Equal layouts, those of density 1 say, are timed once, by the name of the first.
    firsts: dict[bytes, str] = {}
    same = {
        name: firsts.setdefault(b"" if layout is None else layout.tobytes(), name)
        for name, layout in chosen.items()
    }
    records = []
    for of in passes:
        operands = (q, k, v) if of == "forward" else (q, k, v, dout)
        calls = {}
        for name in tqdm(chosen, desc=f"{length} {head_dim} {of}", disable=None):
            layout = chosen[name]
            m = None if layout is None else jax_flash.block_mask_of(layout, block=BLOCK)
            compiled = program(length, head_dim, of, m is not None)
            call = functools.partial(compiled, m, *operands)
            calls.setdefault(same[name], (call, jax.block_until_ready))
        long = length > LONG
        times = runs.time_in_turns(calls, rounds=3 if long else runs.ROUNDS, least=1 if long else 3)
        seconds = {name: statistics.median(times[same[name]]) / calls_of(length) for name in chosen}
        for name, layout in chosen.items():
            density = 1.0 if layout is None else layout.mean()
            records.append(
                {
                    "length": length,
                    "head_dim": head_dim,
                    "pass": of,
                    "layout": name.split()[0],
                    "density": round(float(density), 5),
                    "milliseconds": round(seconds[name] * 1e3, 4),
                    "of_dense": round(seconds[name] / (density * seconds["dense"]), 3),
                }
            )
    return records


def table(records: list[dict[str, Any]]) -> str:
    """Writes a row for each record."""
    rows = [
        "| T | head dim | pass | layout | density | ms | / (density x dense) |",
        "|---:|---:|---|---|---:|---:|---:|",
    ]
    rows += [
        f"| {x['length']} | {x['head_dim']} | {x['pass']} | {x['layout']} | {x['density']:.3f} | "
        f"{x['milliseconds']:.3f} | {x['of_dense']:.2f} |"
        for x in records
    ]
    return "\n".join(rows)


if __name__ == "__main__":
    machine.require_gpu()
    main()
