"""Trains one model with our attention, cuDNN's and XLA's on a GPU, and compares the steps.

    python benchmarks/train_step.py                          # everything, a few minutes
    python benchmarks/train_step.py --only steps             # no longest sequence, no loss curves

The model is examples/train_gpt.py's GPT-2 (124M parameters, bfloat16, AdamW), with as many tokens
in every step, without packing: jax.nn's cuDNN attention takes no segment ids. `none` gives back the
values in place of attention, so its step is what all the rest takes.

Every measurement has a process of its own, which alone uses the GPU while it runs: a peak of memory
belongs to one program. The next ones compile meanwhile, which needs no GPU. Matrix products are
cuBLAS's throughout. Writes results/<gpu>/train-<commit>.json and beside it a Markdown table.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import os
import shlex
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

import jax
import jax.numpy as jnp
import numpy as np
import optax
import run
import train_gpt
from flax import nnx
from tqdm import tqdm

import jax_flash

WARM_UP = 3
STEPS = 12
CELLS = ((1024, False), (4096, False), (4096, True), (16384, False), (16384, True))
SEARCH_FROM = 16384  # the first of the lengths that are tried until memory is out
AHEAD = 5  # processes that compile for later
JOB_SECONDS = 90  # after which a process is ended
GB = 1e9


@dataclasses.dataclass(frozen=True)
class Job:
    """What one process does: "product", "step", "longest" (one step that fits or not) or "loss"."""

    kind: str
    attention: str = "none"
    length: int = 1024
    batch: int = 1
    remat: bool = False
    layers: int = train_gpt.GPT2.layers
    seed: int = 0
    steps: int = STEPS


def main() -> None:
    options = parse()
    if options.job is not None:
        work(Job(**json.loads(options.job)))
        return

    steps, longest, losses = [], [], []
    if "steps" in options.only:
        steps = [
            Job("step", name, length, options.tokens // length, remat, options.layers)
            for length, remat in CELLS
            if length in options.lengths
            for name in ATTENTIONS
        ]
    if "longest" in options.only:
        doublings = (options.longest // SEARCH_FROM).bit_length()
        lengths = [SEARCH_FROM << i for i in range(doublings)]
        longest = [
            [Job("longest", name, length, 1, True, options.layers) for length in lengths]
            for name in COMPARED
        ]
    if "loss" in options.only:
        losses = [
            Job("loss", name, seed=seed, steps=options.loss_steps)
            for seed in (0, 1)
            for name in ("jax_flash", "xla")
        ]

    with tempfile.TemporaryDirectory() as cache:
        ceiling = [measure(Job("product"), cache)]
        records = measure_in_turns(steps, cache)
        ceiling += [measure(Job("product"), cache)]
        write(options, records, ceiling)
        for search in longest:
            records += measure_in_turns(search, cache, until_error=True)
        with ThreadPoolExecutor() as pool:  # not timed, so they may share the GPU
            records += pool.map(lambda job: measure(job, cache), losses)
    print(write(options, records, ceiling))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("steps", "longest", "loss")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    lengths = sorted({length for length, _ in CELLS})
    parser.add_argument("--lengths", nargs="+", type=int, choices=lengths, default=lengths)
    parser.add_argument("--longest", type=int, default=262144, help="where the search ends")
    parser.add_argument("--tokens", type=int, default=32768, help="in one step")
    parser.add_argument("--layers", type=int, default=train_gpt.GPT2.layers)
    parser.add_argument("--loss-steps", type=int, default=400)
    parser.add_argument("--commit", default=None, help="name of the results; default: git's")
    folder = Path(__file__).resolve().parent / "results"
    parser.add_argument("--output", type=Path, default=folder)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    return parser.parse_args()


# --- The processes ------------------------------------------------------------------------------


def start(job: Job, cache: str) -> subprocess.Popen[str]:
    """Starts the process of a job, which compiles, and waits for a line before it measures."""
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        # Compiling must not use the GPU while another process measures, so nothing is tuned there:
        # cuBLAS multiplies, as fast without a search (41.6 and 41.7 ms a step of two layers).
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", "")
        + " --xla_gpu_enable_triton_gemm=false --xla_gpu_autotune_level=0",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95",
    }
    return subprocess.Popen(
        [sys.executable, __file__, "--job", json.dumps(dataclasses.asdict(job))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
    )


def finish(job: Job, process: subprocess.Popen[str]) -> dict[str, Any]:
    """Lets a process measure; returns what it found, or its error."""
    try:
        out, err = process.communicate("go\n", timeout=JOB_SECONDS)
    except subprocess.TimeoutExpired:
        stop(process)
        return dataclasses.asdict(job) | {"error": f"not done in {JOB_SECONDS} s"}
    if process.returncode != 0:
        last = ([line for line in err.split("\n") if line.strip()] or ["died"])[-1]
        return dataclasses.asdict(job) | {"error": last[:300]}
    return dataclasses.asdict(job) | json.loads(out.strip().split("\n")[-1])


def stop(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def measure(job: Job, cache: str) -> dict[str, Any]:
    """Runs one job."""
    return finish(job, start(job, cache))


def measure_in_turns(
    jobs: list[Job], cache: str, *, until_error: bool = False
) -> list[dict[str, Any]]:
    """Runs jobs one after another; the next ones compile while one measures."""
    records = []
    waiting = [start(job, cache) for job in jobs[:AHEAD]]
    for i, job in enumerate(tqdm(jobs)):
        if i + AHEAD < len(jobs):
            waiting.append(start(jobs[i + AHEAD], cache))
        records.append(finish(job, waiting[i]))
        tqdm.write(json.dumps(records[-1]))
        if until_error and "error" in records[-1]:
            for process in waiting[i + 1 :]:
                stop(process)
            break
    return records


def work(job: Job) -> None:
    """Does one job in this process and prints what it found as JSON."""
    try:
        if job.kind == "product":
            input()
            device = jax.devices()[0]
            found = {"tflops": run.measure_product(), "gpu": device.device_kind}
        elif job.kind == "loss":
            found = loss_curve(job)
        else:
            found = train(job)
    except Exception as error:  # a failure is a result of the comparison
        found = {"error": f"{type(error).__name__}: {error}".split("\n")[0][:200]}
        if "RESOURCE_EXHAUSTED" in str(error):
            found = {"error": "out of memory"}
    print(json.dumps(found))


# --- One training step --------------------------------------------------------------------------


def attend_cudnn(query: Any, key: Any, value: Any, *, is_causal: bool, **_: Any) -> Any:
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=is_causal, implementation="cudnn"
    )


def attend_xla(query: Any, key: Any, value: Any, *, is_causal: bool, **_: Any) -> Any:
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=is_causal, implementation="xla"
    )


def attend_none(query: Any, key: Any, value: Any, **_: Any) -> Any:
    return value


# Named, so that it fails instead of falling back.
attend_flash = functools.partial(jax_flash.flash_attention, backend="cuda")
ATTENTIONS: dict[str, Callable[..., Any]] = {
    "jax_flash": attend_flash,
    "cudnn": attend_cudnn,
    "xla": attend_xla,
    "none": attend_none,
}
COMPARED = ("jax_flash", "cudnn", "xla")


def train(job: Job) -> dict[str, Any]:
    """Times the training step of a job, and finds the most memory that was in use."""
    config = dataclasses.replace(
        train_gpt.GPT2, layers=job.layers, length=job.length, batch=job.batch, remat=job.remat
    )

    def make() -> tuple[train_gpt.GPT, nnx.Optimizer]:
        model = train_gpt.GPT(config, ATTENTIONS[job.attention], nnx.Rngs(0))
        return model, train_gpt.make_optimizer(model, config)

    graph, state = nnx.split(nnx.eval_shape(make))

    def loss_fn(model: train_gpt.GPT, rows: jax.Array) -> jax.Array:
        logits = model(rows[:, :-1]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean()

    def step(state: Any, rows: jax.Array) -> tuple[Any, jax.Array]:
        model, optimizer = nnx.merge(graph, state)
        loss, grads = nnx.value_and_grad(loss_fn)(model, rows)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    rows = jax.ShapeDtypeStruct((job.batch, job.length + 1), jnp.int32)
    initial = jax.jit(lambda: nnx.state(make())).lower().compile()
    draw = jax.jit(lambda: jax.random.randint(jax.random.key(0), rows.shape, 0, 256, rows.dtype))
    compiled = jax.jit(step, donate_argnums=0).lower(state, rows).compile()
    needs = compiled.memory_analysis()
    found: dict[str, Any] = {}
    if needs is not None:
        alone = needs.output_size_in_bytes - needs.alias_size_in_bytes
        total = needs.argument_size_in_bytes + needs.temp_size_in_bytes + alone
        found["program_gb"] = round(total / GB, 2)

    input()
    state, batch = initial(), draw()
    loss = jnp.zeros(())
    # One step tells whether a length fits.
    warm_up, steps = (WARM_UP, job.steps) if job.kind == "step" else (0, 1)
    seconds = []
    for _ in range(warm_up + steps):
        begin = time.perf_counter()
        state, loss = compiled(state, batch)
        loss.block_until_ready()
        seconds.append(time.perf_counter() - begin)
    median = statistics.median(seconds[warm_up:])
    operations = train_gpt.operations_per_token(nnx.merge(graph, state)[0])
    stats = jax.devices()[0].memory_stats() or {}
    found |= {
        "peak_gb": round(stats.get("peak_bytes_in_use", 0) / GB, 2),
        "loss": round(float(loss), 4),
    }
    if job.kind == "longest":
        return found
    found |= {
        "ms": round(1e3 * median, 3),
        "spread": round((max(seconds[warm_up:]) - min(seconds[warm_up:])) / median, 4),
        "tokens_per_second": round(job.batch * job.length / median),
        "model_tflops": round(operations * job.batch * job.length / median / 1e12, 2),
    }
    return found


# --- Loss curves --------------------------------------------------------------------------------


def loss_curve(job: Job) -> dict[str, Any]:
    """Trains the example's small model in bfloat16 on packed text; returns the loss of every step.

    The seed draws both the parameters and the order of the text.
    """
    config = dataclasses.replace(train_gpt.Config(), dtype="bfloat16", steps=job.steps)
    text = Path(sysconfig.get_path("stdlib"))
    documents = train_gpt.read_documents(text)
    held_out = len(documents) // 10
    rows = train_gpt.pack(documents[held_out:], config.length)
    unseen = train_gpt.pack(documents[:held_out], config.length)
    unseen = unseen[np.linspace(0, len(unseen) - 1, 8 * config.batch).astype(int)]
    attention = {"jax_flash": attend_flash, "xla": train_gpt.xla_attention}
    model = train_gpt.GPT(config, attention[job.attention], nnx.Rngs(job.seed))
    optimizer = train_gpt.make_optimizer(model, config)
    feed = train_gpt.batches(rows, config.batch, job.seed)
    losses = [
        train_gpt.train_step(model, optimizer, jnp.asarray(next(feed))) for _ in range(job.steps)
    ]
    validation = [
        float(train_gpt.evaluate(model, jnp.asarray(part))) for part in np.split(unseen, 8)
    ]
    return {
        "losses": [round(float(loss), 4) for loss in losses],
        "validation": round(statistics.mean(validation), 4),
    }


def compare_curves(records: list[dict[str, Any]]) -> dict[str, Any] | None:
    """How far two attentions' curves are apart with one seed, and two seeds' with one attention.

    Curves are means over 20 steps; a distance is the mean over the second half of the curve, where
    the order of the text and not the fall of the loss sets the noise.
    """
    curves, validation = {}, {}
    for record in records:
        if record["kind"] == "loss" and "losses" in record:
            key = record["attention"], record["seed"]
            window = min(20, len(record["losses"]))
            curves[key] = np.convolve(record["losses"], np.ones(window) / window, "valid")
            validation[key] = record["validation"]
    if len(curves) < 4:
        return None

    def apart(a: tuple[str, int], b: tuple[str, int]) -> float:
        half = len(curves[a]) // 2
        return float(np.abs(curves[a] - curves[b])[half:].mean())

    pairs = {
        "attentions": [(("jax_flash", seed), ("xla", seed)) for seed in (0, 1)],
        "seeds": [((name, 0), (name, 1)) for name in ("jax_flash", "xla")],
    }
    found: dict[str, Any] = {}
    for name, both in pairs.items():
        found[f"curves_apart_by_{name}"] = [round(apart(a, b), 4) for a, b in both]
        found[f"validation_apart_by_{name}"] = [
            round(abs(validation[a] - validation[b]), 4) for a, b in both
        ]
    found["validation"] = {f"{name} seed {seed}": x for (name, seed), x in validation.items()}
    return found


# --- Results ------------------------------------------------------------------------------------


def write(
    options: argparse.Namespace, records: list[dict[str, Any]], ceiling: list[dict[str, Any]]
) -> str:
    """Writes the numbers and the tables; returns the tables."""
    gpu = ceiling[0].get("gpu", "unknown")
    commit = options.commit or run.first_line("git", "rev-parse", "--short=10", "HEAD")
    folder = options.output / gpu.lower().replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    products = [found.get("tflops") for found in ceiling]
    for record in records:
        if products[0] and "model_tflops" in record:
            record["mfu"] = round(record["model_tflops"] / products[0], 4)
    driver = run.first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    about = {
        "gpu": gpu,
        "driver": driver,
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
        "versions": run.versions(),
        "product_tflops": products,
        "loss_curves": compare_curves(records),
    }
    path = folder / f"train-{commit}.json"
    lines = ",\n  ".join(json.dumps(record) for record in records)
    head = json.dumps(about, indent=1).removesuffix("\n}")
    path.write_text(f'{head},\n "records": [\n  {lines}\n ]\n}}\n')
    intro = (
        f"{gpu}, driver {driver}, {about['date']}, commit {commit}, `{about['command']}`; "
        f"{run.PRODUCT}³ bfloat16 product {products[0]} TFLOP/s before and {products[1]} after."
    )
    text = "\n\n".join([intro, *tables(records)]) + "\n"
    path.with_suffix(".md").write_text(text)
    return text


def tables(records: list[dict[str, Any]]) -> list[str]:
    """Returns the Markdown tables of what was measured."""
    texts = []
    steps = [record for record in records if record["kind"] == "step"]
    steps.sort(key=lambda x: (x["length"], x["remat"], list(ATTENTIONS).index(x["attention"])))
    if steps:
        lines = [
            "| T | batch | remat | attention | step ms | tokens/s | MFU | peak GB | its share |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for record in steps:
            if record["attention"] == "none":
                continue
            cell = (record["length"], record["remat"])
            rest = [
                other["ms"]
                for other in steps
                if other["attention"] == "none"
                and (other["length"], other["remat"]) == cell
                and "ms" in other
            ]
            head = [record["length"], record["batch"], "yes" if record["remat"] else "no"]
            head.append(record["attention"])
            if "error" in record:
                values = [record["error"], "", "", "", ""]
            else:
                share = f"{1 - rest[0] / record['ms']:.0%}" if rest else ""
                mfu = f"{record['mfu']:.1%}" if "mfu" in record else ""
                values = [f"{record['ms']:.1f}", f"{record['tokens_per_second']:,}", mfu]
                values += [f"{record['peak_gb']:.1f}", share]
            lines.append("| " + " | ".join(str(x) for x in [*head, *values]) + " |")
        texts.append("\n".join(lines))
    longest = [record for record in records if record["kind"] == "longest"]
    if longest:
        lines = ["| attention | longest T, batch 1 | peak GB | at 2T |", "|---|---|---|---|"]
        for name in COMPARED:
            mine = [record for record in longest if record["attention"] == name]
            good = [record for record in mine if "error" not in record]
            after = mine[-1].get("error", "not tried") if mine else "not tried"
            values = [good[-1]["length"], f"{good[-1]['peak_gb']:.1f}"] if good else ["", ""]
            lines.append("| " + " | ".join(str(x) for x in [name, *values, after]) + " |")
        texts.append("\n".join(lines))
    curves = compare_curves(records)
    if curves is not None:
        texts.append(
            f"Loss curves, two seeds: ours and XLA's with one seed are "
            f"{max(curves['curves_apart_by_attentions']):.4f} nats apart, two seeds with one "
            f"attention {min(curves['curves_apart_by_seeds']):.4f}."
        )
    return texts


if __name__ == "__main__":
    main()
