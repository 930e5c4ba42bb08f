"""Trains one model with our attention, cuDNN's and XLA's on a GPU, and compares the steps.

    python benchmarks/train_step.py                          # everything, some minutes
    python benchmarks/train_step.py --only steps             # no longest sequence, no loss curves
    python benchmarks/train_step.py --only steps --lengths 4096 --xla-defaults

The model is examples/train_gpt.py's GPT-2 (124M parameters, bfloat16, AdamW), with as many tokens
in every step, without packing: jax.nn's cuDNN attention takes no segment ids. `none` adds query,
key and value in place of attention, so its step is what all the rest takes. Where blocks are
recomputed (remat), the results of the forward kernel are kept, cuDNN's as well as ours.

Every measurement has a process of its own, which alone uses the GPU while it runs: a peak of memory
belongs to one program. The next ones compile meanwhile, which needs no GPU, because nothing is
tuned: matrix products are cuBLAS's. --xla-defaults compiles as XLA does without a word from us, one
after another. Writes build/benchmarks/<gpu>/train-<commit>.json, and beside it a Markdown table and
a chart, after the steps and again after each longer part. Needs the extra `bench`, for Flax.

What a program needs is XLA's plan, to the byte. The peak that was measured is up to 128 MB more:
XLA's allocator hands out a free piece whole if it is no more than that larger than what was asked.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

import jax
import jax.numpy as jnp
import numpy as np
import train_gpt
from common import charts, machine, peers, runs
from flax import nnx
from tqdm import tqdm

import jax_flash

WARM_UP = 3  # steps
ROUNDS = 3
ROUND_STEPS = 8  # at most, and fewer once they take
ROUND_SECONDS = 0.8
CELLS = ((1024, False), (4096, False), (4096, True), (16384, False), (16384, True))
SEARCH_FROM = 65536  # the first length that is tried, of those that may be too long for the memory
AHEAD = 4  # processes that compile for later
JOB_SECONDS = 120  # after which a process is ended
GB = 1e9


@dataclasses.dataclass(frozen=True)
class Job:
    """What one process does: "product", "step", "longest" or "loss"."""

    kind: str
    attention: str = "none"
    length: int = 1024
    batch: int = 1
    remat: bool = False
    layers: int = train_gpt.GPT2.layers
    seed: int = 0
    steps: int = 0
    run_up_to: int = 0


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
            for name in options.attentions
        ]
    if "longest" in options.only:
        longest = [
            Job("longest", name, SEARCH_FROM, 1, True, options.layers, run_up_to=options.longest)
            for name in COMPARED
            if name in options.attentions
        ]
    if "loss" in options.only:
        losses = [
            Job("loss", name, seed=seed, steps=options.loss_steps)
            for seed in (0, 1)
            for name in ("jax_flash", "xla")
        ]

    with tempfile.TemporaryDirectory() as cache:
        flags = "" if options.xla_defaults else NOTHING_TUNED
        ceiling = [measure(Job("product"), cache, flags)]
        ahead = 0 if options.xla_defaults else AHEAD
        records = []
        for record in measure_in_turns(steps, longest, cache, flags, ahead):
            records.append(record)
            if len(steps) <= len(records) < len(steps) + len(longest):
                write(options, records, ceiling)
        ceiling += [measure(Job("product"), cache, flags)]
        write(options, records, ceiling)
        with ThreadPoolExecutor() as pool:  # not timed, so they may share the GPU
            records += pool.map(lambda job: measure(job, cache, flags), losses)
    print(write(options, records, ceiling))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("steps", "longest", "loss")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    lengths = sorted({length for length, _ in CELLS})
    parser.add_argument("--lengths", nargs="+", type=int, choices=lengths, default=lengths)
    names = list(ATTENTIONS)
    parser.add_argument("--attentions", nargs="+", choices=names, default=names)
    parser.add_argument("--longest", type=int, default=262144, help="longest that is also run")
    parser.add_argument("--tokens", type=int, default=32768, help="in one step")
    parser.add_argument("--layers", type=int, default=train_gpt.GPT2.layers)
    parser.add_argument("--loss-steps", type=int, default=400)
    parser.add_argument("--xla-defaults", action="store_true", help="leave XLA's flags alone")
    parser.add_argument("--commit", default=None, help="name of the results; default: git's")
    machine.add_output(parser)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    return parser.parse_args()


# --- The processes ------------------------------------------------------------------------------


# Compiling must not use the GPU while another process measures, so nothing may be tried there. By
# default XLA tries which of Triton's and cuBLAS's products is the fastest.
NOTHING_TUNED = "--xla_gpu_enable_triton_gemm=false --xla_gpu_autotune_level=0"


def start(job: Job, cache: str, flags: str) -> subprocess.Popen[str]:
    """Starts the process of a job, which compiles, and waits for a line before it measures."""
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
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
        process.kill()
        process.communicate()
        return dataclasses.asdict(job) | {"error": f"not done in {JOB_SECONDS} s"}
    if process.returncode != 0:
        last = ([line for line in err.split("\n") if line.strip()] or ["died"])[-1]
        return dataclasses.asdict(job) | {"error": last[:300]}
    return dataclasses.asdict(job) | json.loads(out.strip().split("\n")[-1])


def measure(job: Job, cache: str, flags: str) -> dict[str, Any]:
    """Runs one job."""
    return finish(job, start(job, cache, flags))


def measure_in_turns(
    jobs: list[Job], last: list[Job], cache: str, flags: str, ahead: int
) -> Iterator[dict[str, Any]]:
    """Runs jobs one after another; the next ones, `ahead` of them, compile while one measures.

    The jobs of `last` compile for long: they start with the first and measure after all others.
    """
    waiting = {job: start(job, cache, flags) for job in (last if ahead else [])}
    order = jobs + last
    for i, job in enumerate(tqdm(order)):
        for later in order[i : i + 1 + ahead]:
            if later not in waiting:
                waiting[later] = start(later, cache, flags)
        record = finish(job, waiting[job])
        tqdm.write(json.dumps(record))
        yield record


def work(job: Job) -> None:
    """Does one job in this process and prints what it found as JSON."""
    try:
        if job.kind == "product":
            input()
            device = jax.devices()[0]
            found = {"tflops": runs.measure_product(), "gpu": device.device_kind}
        elif job.kind == "loss":
            found = loss_curve(job)
        elif job.kind == "longest":
            found = longest_step(job)
        else:
            found = time_steps(job)
    except Exception as error:  # a failure is a result of the comparison
        found = {"error": reason(error)}
    print(json.dumps(found))


def reason(error: Exception) -> str:
    if "RESOURCE_EXHAUSTED" in str(error):
        return "out of memory"
    return f"{type(error).__name__}: {error}".split("\n")[0][:200]


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
    return query + key + value


# Named, so that it fails instead of falling back.
attend_flash = functools.partial(jax_flash.flash_attention, backend="cuda")
ATTENTIONS: dict[str, Callable[..., Any]] = {
    "jax_flash": attend_flash,
    "cudnn": attend_cudnn,
    "xla": attend_xla,
    "none": attend_none,
}
COMPARED = ("jax_flash", "cudnn", "xla")


def keep(primitive: Any, *operands: Any, **parameters: Any) -> Any:
    """Keeps the results of our forward kernel by their names, of cuDNN's by the primitive's."""
    cudnn = "dot_product_attention_fwd" in primitive.name
    return cudnn or train_gpt.KEEP(primitive, *operands, **parameters)


@dataclasses.dataclass
class Program:
    """A compiled training step."""

    compiled: Any
    state: Any  # arrays on the host
    rows: jax.ShapeDtypeStruct
    needs_gb: float
    operations: float  # in one step
    compile_s: float

    def start(self) -> Any:
        """Returns the state on the GPU."""
        return jax.tree.map(jnp.asarray, self.state)

    def draw(self) -> jax.Array:
        return jax.random.randint(jax.random.key(0), self.rows.shape, 0, 256, self.rows.dtype)


def build(job: Job, length: int) -> Program:
    """Compiles the training step of a job."""
    begin = time.perf_counter()
    config = dataclasses.replace(
        train_gpt.GPT2, layers=job.layers, length=length, batch=job.batch, remat=job.remat
    )

    def make() -> tuple[train_gpt.GPT, nnx.Optimizer]:
        model = train_gpt.GPT(config, ATTENTIONS[job.attention], nnx.Rngs(0), keep)
        return model, train_gpt.make_optimizer(model, config)

    abstract = nnx.eval_shape(make)
    graph, state = nnx.split(abstract)

    def loss_fn(model: train_gpt.GPT, rows: jax.Array) -> jax.Array:
        return train_gpt.cross_entropy(model, model.features(rows[:, :-1]), rows[:, 1:])

    def step(state: Any, rows: jax.Array) -> tuple[Any, jax.Array]:
        model, optimizer = nnx.merge(graph, state)
        loss, grads = nnx.value_and_grad(loss_fn)(model, rows)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    # Drawn on the host: XLA takes minutes to compile the model's own initialisation as one program.
    rng = np.random.default_rng(0)

    def draw(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        if leaf.ndim > 1:
            return 0.02 * rng.standard_normal(leaf.shape, np.float32)
        return np.ones(leaf.shape, leaf.dtype)

    of_model, of_optimizer = (nnx.state(part) for part in abstract)
    parameters = jax.tree.leaves(jax.tree.map(draw, of_model))
    zeros = jax.tree.leaves(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), of_optimizer))
    initial = jax.tree.unflatten(jax.tree.structure(state), parameters + zeros)

    rows = jax.ShapeDtypeStruct((job.batch, length + 1), jnp.int32)
    compiled = jax.jit(step, donate_argnums=0).lower(state, rows).compile()
    needs = compiled.memory_analysis()
    if needs is None:
        raise RuntimeError("XLA does not say how much memory the step needs")
    alone = needs.output_size_in_bytes - needs.alias_size_in_bytes
    total = needs.argument_size_in_bytes + needs.temp_size_in_bytes + alone
    operations = train_gpt.operations_per_token(abstract[0]) * job.batch * length
    seconds = time.perf_counter() - begin
    return Program(compiled, initial, rows, total / GB, operations, seconds)


def peak_gb() -> float:
    """Returns the most memory that was in use in this process."""
    stats = jax.devices()[0].memory_stats() or {}
    return round(stats.get("peak_bytes_in_use", 0) / GB, 2)


def time_steps(job: Job) -> dict[str, Any]:
    """Times the training step of a job, queued as in a training loop, and its memory."""
    program = build(job, job.length)
    input()
    state, batch = program.start(), program.draw()

    def run_steps(count: int) -> float:
        nonlocal state
        begin = time.perf_counter()
        for _ in range(count):
            state, loss = program.compiled(state, batch)
        losses.append(float(loss))
        return (time.perf_counter() - begin) / count

    losses: list[float] = []
    once = run_steps(WARM_UP)
    steps = max(1, min(ROUND_STEPS, round(ROUND_SECONDS / once)))
    seconds = [run_steps(steps) for _ in range(ROUNDS)]
    median = statistics.median(seconds)
    speed = program.operations / median
    peak = train_gpt.peak_operations(jax.devices()[0])
    return {
        "program_gb": round(program.needs_gb, 6),
        "peak_gb": peak_gb(),
        "compile_s": round(program.compile_s, 1),
        "steps": WARM_UP + ROUNDS * steps,
        "ms": round(1e3 * median, 3),
        "spread": round((max(seconds) - min(seconds)) / median, 4),
        "tokens_per_second": round(job.batch * job.length / median),
        "model_tflops": round(speed / 1e12, 2),
        "mfu": None if peak is None else round(speed / peak, 4),
        "loss": round(losses[-1], 4),
    }


def longest_step(job: Job) -> dict[str, Any]:
    """Finds the longest sequence whose step fits, by doubling or halving, then half a step more.

    What a step needs is known when it is compiled. The longest that is not above `run_up_to` is
    also run.
    """
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0) / GB
    plans: dict[int, float | str] = {}
    programs: dict[int, Program] = {}

    def fits(length: int) -> bool:
        try:
            program = build(job, length)
        except Exception as error:  # a failure is a result of the comparison
            plans[length] = reason(error)
            return False
        plans[length] = round(program.needs_gb, 2)
        if program.needs_gb > limit:
            return False
        if length <= job.run_up_to:
            programs[length] = program
        return True

    length = job.length
    if fits(length):
        while fits(2 * length):
            length *= 2
    else:
        length //= 2
        while length >= 1024 and not fits(length):
            length //= 2
    fits(3 * length // 2)
    input()
    found: dict[str, Any] = {"limit_gb": round(limit, 2), "plans": plans}
    for length in sorted(programs, reverse=True):
        state, batch = programs[length].start(), programs[length].draw()
        try:
            begin = time.perf_counter()
            state, loss = programs[length].compiled(state, batch)
            loss = float(loss)
        except Exception as error:  # as above
            found |= {"error": f"{length}: {reason(error)}"}
            continue
        found |= {"ran": length, "seconds": round(time.perf_counter() - begin, 3)}
        return found | {"peak_gb": peak_gb(), "loss": round(loss, 4)}
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
    step = nnx.cached_partial(train_gpt.train_step, model, optimizer)
    losses = [step(jnp.asarray(next(feed))) for _ in range(job.steps)]
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
    commit = options.commit or runs.first_line("git", "rev-parse", "--short=10", "HEAD")
    folder = options.output / gpu.lower().replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    products = [found.get("tflops") for found in ceiling]
    driver = runs.first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    about = {
        "gpu": gpu,
        "driver": driver,
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": runs.command("benchmarks/train_step.py"),
        "versions": runs.versions(),
        "product_tflops": products,
        "loss_curves": compare_curves(records),
    }
    path = folder / f"train-{commit}.json"
    path.write_text(runs.in_lines(about, "records", records))
    intro = (
        f"{gpu}, driver {driver}, {about['date']}, commit {commit}, `{about['command']}`; "
        f"{runs.PRODUCT}³ bfloat16 product before and after the steps: "
        f"{', '.join(map(str, products))} TFLOP/s."
    )
    text = "\n\n".join([intro, *tables(records)]) + "\n"
    path.with_suffix(".md").write_text(text)
    curves = {
        (x["attention"], x["seed"]): x["losses"]
        for x in records
        if x["kind"] == "loss" and "losses" in x
    }
    if curves:
        charts.draw_losses(curves, looks(), gpu, folder / f"train-{commit}-loss.png")
    return text


def looks() -> dict[str, tuple[str, str]]:
    """Returns label and color of each attention, those of the other benchmarks."""
    names = {"jax_flash": "jax_flash", "cudnn": "jax_cudnn", "xla": "jax_xla"}
    known = {peer.name: (peer.label, peer.color) for peer in peers.all_peers()}
    return {name: known[peer] for name, peer in names.items()}


def tables(records: list[dict[str, Any]]) -> list[str]:
    """Returns the Markdown tables of what was measured."""
    texts = []
    steps = [record for record in records if record["kind"] == "step"]
    steps.sort(key=lambda x: (x["length"], x["remat"], list(ATTENTIONS).index(x["attention"])))
    if steps:
        lines = [
            "| T | batch | remat | attention | step ms | tokens/s | MFU | planned GB | peak GB"
            " | its share |",
            "|---|---|---|---|---|---|---|---|---|---|",
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
                values = [record["error"], "", "", "", "", ""]
            else:
                share = f"{1 - rest[0] / record['ms']:.0%}" if rest else ""
                mfu = f"{record['mfu']:.1%}" if record["mfu"] is not None else ""
                values = [f"{record['ms']:.1f}", f"{record['tokens_per_second']:,}", mfu]
                values += [f"{record['program_gb']:.3f}", f"{record['peak_gb']:.1f}", share]
            lines.append("| " + " | ".join(str(x) for x in [*head, *values]) + " |")
        texts.append("\n".join(lines))
    longest = [record for record in records if record["kind"] == "longest"]
    if longest:
        lines = [
            "| attention | longest T that fits, batch 1 | GB it needs | next T tried | GB it needs"
            " | longest T run | step s | peak GB |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for record in longest:
            plans = {int(length): needs for length, needs in record.get("plans", {}).items()}
            limit = record.get("limit_gb", 0)
            fitting = [x for x, gb in plans.items() if not isinstance(gb, str) and gb <= limit]
            best = max(fitting, default=0)
            more = min((x for x in plans if x > best), default=0)
            values = [record["attention"], best, plans.get(best, ""), more, plans.get(more, "")]
            values += [record.get(name, "") for name in ("ran", "seconds", "peak_gb")]
            lines.append("| " + " | ".join(str(x) for x in values) + " |")
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
    if "--job" not in sys.argv:
        machine.require_gpu(apart=True)
    main()
