"""Measures the error of installed versions of jax_flash, and of cuDNN, where the softmax is peaked.

    python benchmarks/peaked.py old new --head-dim 64 128 --dtype bfloat16 float16

Folders are those of compare.py, a process for each. q and k are normal, times a scale or plus an
offset; errors are those of the causal forward pass beside float64. Prints cuDNN's root mean square
and largest error, and each folder's over them.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SCALES = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 8.0, 16.0, 32.0)
INPUTS = (*((scale, 0.0) for scale in SCALES), (1.0, 4.0))  # scale, offset
LENGTH, HEADS = 2048, 8


def main() -> None:
    """Measures everything and prints one table, or answers as one of the processes."""
    options = parse()
    if options.answer:
        answer(options)
        return
    processes = [start(folder) for folder in (None, *options.folder)]  # the first: cuDNN
    errors = [read(process) for process in processes]
    print("input, errors of cuDNN (root mean square, largest), each folder's over them")
    for name, peer in errors[0].items():
        ratios = (
            " ".join(f"{mine / its:6.3f}" for mine, its in zip(one[name], peer, strict=True))
            for one in errors[1:]
        )
        print(f"{name:24s} {peer[0]:.2e} {peer[1]:.2e}", *ratios, sep="   ")


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="*", help="of an installed version")
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"])
    parser.add_argument("--answer", choices=("cudnn", "cuda"), help=argparse.SUPPRESS)
    return parser.parse_args()


def start(folder: str | None) -> subprocess.Popen[str]:
    """Starts the process of a version, or of cuDNN."""
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if folder is not None:
        environment["PYTHONPATH"] = str(Path(folder).resolve())
    which = "cudnn" if folder is None else "cuda"
    command = [sys.executable, "-P", __file__, *sys.argv[1:], "--answer", which]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def read(process: subprocess.Popen[str]) -> dict[str, list[float]]:
    """Waits for the answer of a process."""
    text, _ = process.communicate()
    if process.returncode != 0:
        raise SystemExit(f"a process ended with {process.returncode}; its error is above")
    return json.loads(text)


def answer(options: argparse.Namespace) -> None:
    """Prints this process's errors by input, root mean square and largest."""
    import jax
    import jax.numpy as jnp

    if options.answer == "cudnn":
        attend = functools.partial(
            jax.nn.dot_product_attention, is_causal=True, implementation="cudnn"
        )
    else:
        import jax_flash

        attend = functools.partial(
            jax_flash.flash_attention, is_causal=True, backend=options.answer
        )
    attend = jax.jit(attend)

    @jax.jit
    def compare(q: Any, k: Any, v: Any, out: Any) -> jax.Array:
        q, k, v, out = (x.astype(jnp.float64) for x in (q, k, v, out))
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
        seen = jnp.tri(LENGTH, dtype=bool)
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        error = out - jnp.einsum("bnts,bsnh->btnh", weights, v)
        return jnp.stack([jnp.sqrt(jnp.mean(error**2)), jnp.max(jnp.abs(error))])

    found = {}
    for dtype in options.dtype:
        for head_dim in options.head_dim:
            for scale, offset in INPUTS:
                keys = jax.random.split(jax.random.key(head_dim), 3)
                q, k, v = (jax.random.normal(x, (1, LENGTH, HEADS, head_dim)) for x in keys)
                q, k = q * scale + offset, k * scale + offset
                q, k, v = (x.astype(dtype) for x in (q, k, v))
                out = attend(q, k, v)
                with jax.enable_x64(True):
                    errors = compare(q, k, v, out).tolist()
                found[f"{dtype} d{head_dim} x{scale:g} +{offset:g}"] = errors
    print(json.dumps(found))


if __name__ == "__main__":
    if "--answer" not in sys.argv:
        import machine  # not where a version answers: -P leaves this folder out

        machine.require_gpu(apart=True)
    main()
