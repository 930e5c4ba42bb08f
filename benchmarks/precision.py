"""Measures errors by dtype, scale and backend, beside jax.nn's, against float64.

    python benchmarks/precision.py

Causal attention, B 1, T 1024, 4 heads of 64; normal inputs, q and k times a scale. Prints the norm
of the error over the norm of the result, of out and the three gradients, as Markdown.
"""

import functools
from collections.abc import Callable
from typing import Any

import exact
import jax
import jax.numpy as jnp
import numpy as np
from shapes import Cell

import jax_flash

CELL = Cell(1, 1024, 4, 4, 64, causal=True)
DTYPES = ("float32", "bfloat16", "float16")
SCALES = (1.0, 4.0)  # of q and k: scores of a deviation of 1 and 16


def main() -> None:
    """Prints the table of this machine."""
    print("| dtype | scale | | " + " | ".join(exact.NAMES) + " |")
    print("|---|---|---|" + "---:|" * len(exact.NAMES))
    for dtype in DTYPES:
        for scale in SCALES:
            for name, attend in peers().items():
                try:
                    errors = measure(attend, dtype, scale)
                except (NotImplementedError, RuntimeError, ValueError) as error:
                    cells = f"{str(error).splitlines()[0][:80]} |" + " |" * (len(exact.NAMES) - 1)
                else:
                    cells = " | ".join(f"{errors[name]:.1e}" for name in exact.NAMES) + " |"
                print(f"| {dtype} | {scale:g} | {name} | {cells}")


def peers() -> dict[str, Callable[..., Any]]:
    """Lists the backends of this machine and jax.nn's implementations."""
    on_gpu = jax.default_backend() == "gpu"
    ours = {
        name: functools.partial(jax_flash.flash_attention, is_causal=True, backend=name)
        for name in (("cuda", "xla") if on_gpu else ("cpu", "xla"))
    }
    theirs = {
        f"jax.nn, {name}": functools.partial(
            jax.nn.dot_product_attention, is_causal=True, implementation=name
        )
        for name in (("cudnn", "xla") if on_gpu else ("xla",))
    }
    return ours | theirs


def measure(attend: Callable[..., Any], dtype: str, scale: float) -> dict[str, float]:
    """Measures the errors of out, dq, dk and dv."""
    rng = np.random.default_rng(0)
    shape = (CELL.batch, CELL.length, CELL.heads, CELL.head_dim)
    q, k, v, dout = (jnp.asarray(rng.normal(size=shape), dtype) for _ in range(4))
    q, k = q * scale, k * scale

    @jax.jit
    def run(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, pullback = jax.vjp(attend, q, k, v)
        return out, *pullback(dout)

    return exact.errors(CELL, (q, k, v, dout), run(q, k, v, dout))


if __name__ == "__main__":
    main()
