"""Builds, checks and times variants of one pass's tiling on the GPU that is present.

Every variant goes through the package: the sources of cuda/kernels, the run-time compiler, the
custom call. Results are compared with float64 attention; times are medians, taken in turns so that
a clock that drifts hits all variants alike. The table comes last.

    python benchmarks/tune.py --head-dim 128 --length 512 1024 --causal \\
        --set block_kv=112 --set "stages=3 query_stages=1" --set dynamic=False
    python benchmarks/tune.py --pass backward --set reads_ahead=False --set l2_heads=2
    python benchmarks/tune.py --family sm80 --set "block_kv=64 row_tiles=1"
    python benchmarks/tune.py --pass backward --deterministic --segment 1024 --set l2_heads=8
    python benchmarks/tune.py --head-dim 64 --terms softcap sinks --set drains=True

With --terms the error is the difference from the result of the tiling as it was chosen.
"""

import argparse
import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import exact, machine, peers, shapes

ROUNDS = 5  # turns of every variant
SECONDS = 0.02  # of one turn
PASSES = ("forward", "backward")


def _lengths(cell: shapes.Cell) -> jax.Array:
    return jnp.where(jnp.arange(cell.batch) % 2 == 0, cell.length, cell.length // 2)


def _by_blocks(cell: shapes.Cell, block: int) -> dict[str, Any]:
    import jax_flash

    def sees(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i // block + j // block) % 2 == 0  # every other block

    return {"block_mask": jax_flash.block_mask(sees, q_len=cell.length, kv_len=cell.length)}


# What --terms adds to a call, by name.
TERMS: dict[str, Callable[[shapes.Cell], dict[str, Any]]] = {
    "softcap": lambda cell: {"softcap": 30.0},
    "sinks": lambda cell: {"sinks": jnp.zeros(cell.heads)},
    "mask": lambda cell: {
        "mask": jax.random.bernoulli(
            jax.random.key(0), 0.5, (cell.batch, 1, cell.length, cell.length)
        )
    },
    "query_lengths": lambda cell: {"query_seq_lengths": _lengths(cell)},
    "key_lengths": lambda cell: {"key_value_seq_lengths": _lengths(cell)},
    "left": lambda cell: {"local_window_size": (cell.length // 2, cell.length)},
    "blocks_64": lambda cell: _by_blocks(cell, 64),
    "blocks_128": lambda cell: _by_blocks(cell, 128),
}


def main() -> None:
    """Times the variants of every cell and prints one table."""
    # Not at the top: compare.py times versions by this module that have no such folder.
    from jax_flash import _gpu

    options = parse()
    plan = _gpu.plan
    rows = []
    for length in options.length:
        own = shapes.MODEL_DIM // options.head_dim
        heads, kv_heads = options.heads or (own, own)
        cell = shapes.Cell(
            max(1, shapes.TOKENS // length),
            length,
            heads,
            kv_heads,
            options.head_dim,
            options.causal,
            segment=options.segment,
        )
        rng = np.random.default_rng(length)
        inputs = tuple(
            jnp.asarray(rng.normal(size=(cell.batch, cell.length, n, cell.head_dim)), jnp.bfloat16)
            for n in (cell.heads, cell.kv_heads, cell.kv_heads, cell.heads)
        )
        q, k, v, dout = (x.astype(options.dtype) for x in inputs)
        inputs = (q, k, v, dout)
        terms: dict[str, Any] = {"deterministic": True} if options.deterministic else {}
        for name in options.terms:
            terms |= TERMS[name](cell)
        calls = {}
        for text in ["", *options.set]:
            changes = dict(read(word) for word in text.split())
            _gpu.plan = functools.partial(plan_changed, plan, options.which, changes)
            try:
                name = text or "as chosen"
                with _gpu.prefer(options.family) if options.family else contextlib.nullcontext():
                    calls[name] = build(options.which, cell, inputs, **terms)
            except ValueError as error:
                rows.append(f"{cell.name:24s} {text:40s} {error}")
        _gpu.plan = plan
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(ROUNDS):
            for name, call in calls.items():
                times[name].append(seconds(call, SECONDS))
        for name, call in calls.items():
            median = statistics.median(times[name])
            if options.terms:
                error = _difference(call(), calls["as chosen"]())
            else:
                error = max(exact.errors(cell, inputs, call()).values())
            rate = operations(options.which, cell) / median / 1e12
            rows.append(
                f"{cell.name:24s} {name:40s} {1e3 * median:8.3f} ms {rate:5.0f} {error:.1e}"
            )
    print("\n".join(["cell, variant, time, TFLOP/s, relative error", *rows]))


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pass", choices=PASSES, default="forward", dest="which")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--length", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--heads", type=int, nargs=2, help="of queries, of keys and values")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--segment", type=int, help="length of packed documents")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--terms", nargs="+", choices=TERMS, default=[], help="more of the call")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--family", help="of kernels: sm80 on a Hopper GPU")
    parser.add_argument("--set", action="append", default=[], help="fields of the pass's tiling")
    return parser.parse_args()


def build(
    which: str,
    cell: shapes.Cell,
    inputs: Sequence[jax.Array],
    *,
    backend: str | None = "cuda",
    **terms: Any,
) -> Callable[[], tuple[jax.Array, ...]]:
    """Compiles one pass for the tiling that is chosen now: a call for out, and dq, dk and dv."""
    # A function of its own per variant: jit would take the first one's compilation.
    q, k, v, dout = inputs
    attend = functools.partial(peers.attend_flash, cell, backend=backend, **terms)
    if which == "forward":
        forward = jax.jit(attend).lower(q, k, v).compile()
        return lambda: (forward(q, k, v),)
    out, pullback = jax.vjp(attend, q, k, v)
    backward = jax.jit(lambda pullback, dout: pullback(dout)).lower(pullback, dout).compile()
    return lambda: (out, *backward(pullback, dout))


def _difference(got: Sequence[jax.Array], expected: Sequence[jax.Array]) -> float:
    """Returns the largest of the results' differences, as norms over those of what is expected."""
    pairs = (
        (x.astype(jnp.float32), y.astype(jnp.float32)) for x, y in zip(got, expected, strict=True)
    )
    return max(float(jnp.linalg.norm(x - y) / jnp.linalg.norm(y)) for x, y in pairs)


def operations(which: str, cell: shapes.Cell) -> float:
    """Counts the floating-point operations of one pass."""
    forward = cell.flops("forward")
    return forward if which == "forward" else cell.flops("training") - forward


def plan_changed(
    plan: Callable[..., Any], which: str, changes: dict[str, Any], *arguments: Any
) -> Any:
    """Plans (call, shapes, gpu), and where it is a call of one pass changes fields of its tiling.

    Raises:
      ValueError: the GPU's shared memory does not hold the result.
    """
    call, _, gpu = arguments
    chosen = plan(*arguments)
    if call.target != which:
        return chosen
    changed = plan(*arguments, dataclasses.replace(chosen.tiling, **changes))
    if changed.shared_bytes > gpu.shared_bytes:
        raise ValueError(f"needs {changed.shared_bytes} of {gpu.shared_bytes} bytes")
    return changed


def read(word: str) -> tuple[str, Any]:
    """Reads "field=value" with the type that the field has."""
    name, value = word.split("=")
    return name, value == "True" if value in ("True", "False") else int(value)


def seconds(call: Callable[[], Any], duration: float) -> float:
    """Returns the time of one call, over as many as fill some seconds."""
    jax.block_until_ready(call())
    start = time.perf_counter()
    jax.block_until_ready(call())
    count = max(3, int(duration / (time.perf_counter() - start)))
    start = time.perf_counter()
    for _ in range(count):
        last = call()  # one at a time: the results of all would fill the device
    jax.block_until_ready(last)
    return (time.perf_counter() - start) / count


if __name__ == "__main__":
    machine.require_gpu()
    main()
