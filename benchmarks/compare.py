"""Compares versions of jax_flash: their times, errors, or machine code.

    pip install --no-deps --target old jax_flash-OLD.whl
    pip install --no-deps --target new jax_flash-NEW.whl
    python benchmarks/compare.py old new --head-dim 64 128 --length 512 16384
    python benchmarks/compare.py --errors old new --head-dim 64 128 --dtype bfloat16 float16
    python benchmarks/compare.py --errors          # of this version's backends
    python benchmarks/compare.py --code main .     # revisions or checkouts; needs no GPU
    python benchmarks/compare.py --code main . --only "128"    # cells whose name matches
    python benchmarks/compare.py --export DIR --cases FILE.py old=../main new=.   # needs no GPU
    python benchmarks/compare.py --exported DIR --only "causal"

A process for each folder; all compile at once, then they take turns, forth and back, so that a
clock that drifts hits all alike. Prints the TFLOP/s of each, its ratio to the first, and those of
run.py's matrix product, which comes after the turns, so that no version runs in its wake.

--errors: beside float64, of the causal forward pass on a GPU where the softmax is peaked: q and k
are normal, times a scale or plus an offset. Prints cuDNN's root mean square and largest error, and
each folder's over them. Without a folder by dtype, scale and backend, beside jax.nn's, forward and
backward, B 1, T 1024, 4 heads of 64: the norm of the error over the norm of the result.

--code: whether the kernels' machine code changed, by cell and entry point (common/machine_code.py).

--export, --exported: one process times programs of checkouts, which were exported without a GPU
(common/exported.py). FILE.py has a function `cases(jax_flash)` that yields names, functions to jit
and their arrays' jax.ShapeDtypeStruct. Short calls: several of them in one function.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The rest where it is used: a process that answers has a version of its own, or none.
from common import shapes

ROUNDS = 6  # turns of every version: as often before the others as after them
SECONDS = 0.25  # of one turn: long beside the time that the clock takes to settle
MASKS = {"full": False, "causal": True}
PASSES = ("forward", "backward", "deterministic")  # the last: the backward, deterministic
# Inputs for the errors of versions: scale and offset of q and k.
SCALES = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 8.0, 16.0, 32.0)
INPUTS = (*((scale, 0.0) for scale in SCALES), (1.0, 4.0))
PEAKED = (1, 2048, 8)  # batch, length, heads
# Inputs for the errors of backends: scores have a deviation of 1 and 16.
CELL = shapes.Cell(1, 1024, 4, 4, 64, causal=True)
DTYPES = ("float32", "bfloat16", "float16")
DEVIATIONS = (1.0, 4.0)


def main() -> None:
    """Prints one table, or answers as one of the processes."""
    options = parse()
    if options.exported:
        from common import exported

        exported.measure(options.exported, options.only)
    elif options.export:
        from common import exported

        exported.export(options.folder, options.cases, options.export, options.platform)
    elif options.answer == "times":
        answer()
    elif options.answer:
        answer_errors(options)
    elif options.code:
        from common import machine_code

        machine_code.compare_versions(options.folder, options.only)
    elif not options.errors:
        compare_times(options)
    elif options.folder:
        compare_errors(options)
    else:
        errors_of_backends()


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="*", help="of an installed version, or what --code takes")
    parser.add_argument("--head-dim", type=int, nargs="+", help="default: 64, 128 and, timed, 256")
    parser.add_argument("--length", type=int, nargs="+", default=[512, 4096, 16384])
    parser.add_argument("--mask", nargs="+", choices=MASKS, default=list(MASKS))
    parser.add_argument("--pass", nargs="+", choices=PASSES, default=["forward"], dest="passes")
    parser.add_argument("--tokens", type=int, default=shapes.TOKENS)
    parser.add_argument("--model-dim", type=int, default=shapes.MODEL_DIM)
    parser.add_argument("--segment", type=int, help="length of packed documents")
    parser.add_argument("--window", type=int, help="keys to the left; causal alone")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of one turn")
    parser.add_argument("--errors", action="store_true", help="instead of times")
    parser.add_argument("--code", action="store_true", help="of two revisions or checkouts")
    parser.add_argument("--export", type=Path, help="exports the programs of checkouts to here")
    parser.add_argument("--exported", type=Path, help="times what --export wrote")
    parser.add_argument("--cases", type=Path, help="of --export: a file with these")
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda", help="of --export")
    parser.add_argument("--only", default="", help="regular expression: cells of --code, cases")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"], help="of errors")
    parser.add_argument("--answer", choices=("times", "cudnn", "cuda"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.exported or options.export:
        if options.export and not (options.cases and options.folder):
            parser.error("name --cases FILE.py and the checkouts")
        return options
    if not options.folder and not options.answer and not options.errors and not options.code:
        parser.error("name the folders of the versions to compare")
    if options.head_dim is None:
        options.head_dim = [64, 128] if options.errors else list(shapes.HEAD_DIMS)
    if options.code:
        if len(options.folder) != 2:
            parser.error("name two versions")
        return options
    for folder in options.folder:
        if not (Path(folder) / "jax_flash").is_dir():
            parser.error(f"{folder} holds no installed jax_flash")
    return options


# ---- times ---------------------------------------------------------------------------------------


def compare_times(options: argparse.Namespace) -> None:
    """Times every cell and prints one table."""
    jobs = [
        (read_cell(options, head_dim, mask, length), of)
        for head_dim in options.head_dim
        for mask in options.mask
        for length in options.length
        for of in options.passes
    ]
    versions = [Version(folder) for folder in options.folder]
    for one in versions:
        for cell, of in jobs:
            one.ask(cell, of, 0.0)  # all compile side by side
    for one in versions:
        for _ in jobs:
            one.answer()
    print("cell, TFLOP/s of each folder, ratios to the first, product")
    for cell, of in jobs:
        speeds: list[list[float]] = [[] for _ in versions]
        for turn in range(ROUNDS):
            order = list(zip(versions, speeds, strict=True))
            for one, found in order if turn % 2 == 0 else order[::-1]:
                found.append(one.measure(cell, of, options.seconds))
        medians = [statistics.median(found) for found in speeds]
        print(
            f"{cell.name:24s} {of:13s}",
            " ".join(f"{median:6.1f}" for median in medians),
            " ".join(f"{median / medians[0]:6.3f}" for median in medians),
            f"{versions[0].measure(None, of, options.seconds):6.0f}",
            flush=True,
        )


def read_cell(options: argparse.Namespace, head_dim: int, mask: str, length: int) -> shapes.Cell:
    heads = options.model_dim // head_dim
    batch = max(1, options.tokens // length)
    return shapes.Cell(
        batch,
        length,
        heads,
        heads,
        head_dim,
        MASKS[mask],
        window=options.window,
        segment=options.segment,
    )


def environment_of(folder: str | None) -> dict[str, str]:
    """Returns the environment of a process with the jax_flash of a folder, if one is named."""
    first = os.environ.get("PYTHONPATH", "") if folder is None else str(Path(folder).resolve())
    here = str(Path(__file__).resolve().parent)
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([first, here] if first else [here]),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }


class Version:
    """A process that measures with the jax_flash of one folder."""

    def __init__(self, folder: str) -> None:
        command = [sys.executable, "-P", __file__, "--answer", "times"]
        self.process = subprocess.Popen(
            command,
            env=environment_of(folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, cell: shapes.Cell | None, of: str, seconds: float) -> None:
        """Sends a question: TFLOP/s of a cell's pass over some seconds; None: the product's."""
        assert self.process.stdin is not None
        question = [None if cell is None else vars(cell), of, seconds]
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()

    def answer(self) -> float:
        """Waits for the answer to the oldest open question."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the process ended with {self.process.wait()}; its error is above")
        return json.loads(line)

    def measure(self, cell: shapes.Cell | None, of: str, seconds: float) -> float:
        self.ask(cell, of, seconds)
        return self.answer()


def answer() -> None:
    """Answers the questions on standard input, a line for each."""
    import jax
    import tune
    from common import runs

    known: dict[tuple[Any, ...], tuple[Any, float]] = {}
    for line in sys.stdin:
        fields, of, seconds = json.loads(line)
        if fields is None:
            print(json.dumps(runs.measure_product()), flush=True)
            continue
        key = (of, *fields.values())
        if key not in known:
            known[key] = build(shapes.Cell(**fields), of)
        call, operations = known[key]
        jax.block_until_ready(call())
        rate = operations / tune.seconds(call, seconds) / 1e12 if seconds else 0.0
        print(json.dumps(rate), flush=True)


def build(cell: shapes.Cell, of: str) -> tuple[Any, float]:
    """Compiles one pass of a cell: a call, and the operations in it."""
    import jax
    import jax.numpy as jnp
    import tune

    shape = (cell.batch, cell.length, cell.heads, cell.head_dim)
    inputs = jax.random.normal(jax.random.key(cell.length), (4, *shape), jnp.bfloat16)
    which = "forward" if of == "forward" else "backward"
    call = tune.build(which, cell, list(inputs), deterministic=of == "deterministic", backend=None)
    return call, tune.operations(which, cell)


# ---- errors of versions --------------------------------------------------------------------------


def compare_errors(options: argparse.Namespace) -> None:
    """Measures cuDNN and every version and prints one table."""
    from common import machine

    machine.require_gpu(apart=True)
    processes = [start(folder) for folder in (None, *options.folder)]  # the first: cuDNN
    errors = [read(process) for process in processes]
    print("input, errors of cuDNN (root mean square, largest), each folder's over them")
    for name, peer in errors[0].items():
        ratios = (
            " ".join(f"{mine / its:6.3f}" for mine, its in zip(one[name], peer, strict=True))
            for one in errors[1:]
        )
        print(f"{name:24s} {peer[0]:.2e} {peer[1]:.2e}", *ratios, sep="   ")


def start(folder: str | None) -> subprocess.Popen[str]:
    """Starts the process of a version, or of cuDNN."""
    which = "cudnn" if folder is None else "cuda"
    command = [sys.executable, "-P", __file__, *sys.argv[1:], "--answer", which]
    return subprocess.Popen(command, env=environment_of(folder), stdout=subprocess.PIPE, text=True)


def read(process: subprocess.Popen[str]) -> dict[str, list[float]]:
    """Waits for the answer of a process."""
    text, _ = process.communicate()
    if process.returncode != 0:
        raise SystemExit(f"a process ended with {process.returncode}; its error is above")
    return json.loads(text)


def answer_errors(options: argparse.Namespace) -> None:
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
        seen = jnp.tri(PEAKED[1], dtype=bool)
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        error = out - jnp.einsum("bnts,bsnh->btnh", weights, v)
        return jnp.stack([jnp.sqrt(jnp.mean(error**2)), jnp.max(jnp.abs(error))])

    found = {}
    for dtype in options.dtype:
        for head_dim in options.head_dim:
            for scale, offset in INPUTS:
                keys = jax.random.split(jax.random.key(head_dim), 3)
                q, k, v = (jax.random.normal(x, (*PEAKED, head_dim)) for x in keys)
                q, k = q * scale + offset, k * scale + offset
                q, k, v = (x.astype(dtype) for x in (q, k, v))
                out = attend(q, k, v)
                with jax.enable_x64(True):
                    errors = compare(q, k, v, out).tolist()
                found[f"{dtype} d{head_dim} x{scale:g} +{offset:g}"] = errors
    print(json.dumps(found))


# ---- errors of backends --------------------------------------------------------------------------


def errors_of_backends() -> None:
    """Prints the table of this machine."""
    from common import exact

    print("| dtype | scale | | " + " | ".join(exact.NAMES) + " |")
    print("|---|---|---|" + "---:|" * len(exact.NAMES))
    for dtype in DTYPES:
        for scale in DEVIATIONS:
            for name, attend in backends().items():
                try:
                    errors = errors_of(attend, dtype, scale)
                except (NotImplementedError, RuntimeError, ValueError) as error:
                    cells = f"{str(error).splitlines()[0][:80]} |" + " |" * (len(exact.NAMES) - 1)
                else:
                    cells = " | ".join(f"{errors[name]:.1e}" for name in exact.NAMES) + " |"
                print(f"| {dtype} | {scale:g} | {name} | {cells}")


def backends() -> dict[str, Callable[..., Any]]:
    """Lists the backends of this machine and jax.nn's implementations."""
    import jax

    import jax_flash

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


def errors_of(attend: Callable[..., Any], dtype: str, scale: float) -> dict[str, float]:
    """Measures the errors of out, dq, dk and dv."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from common import exact

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
