"""Weak scaling of attention over a sequence that is split over devices, forward and backward.

    python benchmarks/scaling.py                              # all GPUs; of two, about 5 minutes
    python benchmarks/scaling.py --tokens 16384 65536 --rounds 4 --ways ring:zigzag \\
        all_to_all:contiguous all_gather:zigzag               # two GPUs, two minutes
    python benchmarks/scaling.py --tokens 16384 --trace DIR   # keeps the profiles in DIR
    python benchmarks/scaling.py --total 1048576 --heads 32:8 --ways ring:zigzag --rounds 1
    python benchmarks/scaling.py --step 1b3                   # a GPT's step, over one GPU and all
    python benchmarks/scaling.py --platform cpu --tokens 64 --heads 4:2 --rounds 2

Causal, one sequence, bfloat16 (float32 on a CPU), head dim 128; tokens are those of one device. A
rate is of one device: 3.5 times 2 N T² H operations, over the devices. `scales` is that rate beside
flash_attention's with the same tokens a device, on all devices at once, each its own: GPUs of one
host differ by 2 to 7 %, and a ring goes as the slowest. Three programs are timed in turns, so that
all meet the same clocks:

    all        the attention itself
    compute    a ring whose keys stay where they are: the same kernels on each device
    link       the same permutations, and no attention

`hidden` is the part of the collectives' time in which the same GPU computes, of a profile of the
whole. The last rows say what these devices, and eight, would do by `Model`: of the measured rate,
and of the bandwidth that the permutations reached, each hop takes the longer of the two.

`--step` times a training step of a preset of examples/train_gpt.py on one device, on all with the
same rows (its losses may differ from one device's by LOSSES_APART), and on all with as many rows
for each. Rows are split over all devices, and so are parameters and the optimizer's state (FSDP).
"""

import argparse
import contextlib
import dataclasses
import functools
import gzip
import importlib
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

import jax
import jax.numpy as jnp
import numpy as np
from common.ring_model import Cell, Model
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jax_flash import context_parallel, flash_attention
from jax_flash.context_parallel import ring
from jax_flash.context_parallel.attention import Order, Strategy

HEAD_DIM = 128
# By default XLA runs collectives in between, keeps one under way, and makes one of two, as of keys
# and values, up to 30 MB.
OVERLAP = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
    "xla_gpu_collective_permute_combine_threshold_bytes": 2**34,
}
# Nothing is tried on a GPU while steps are compiled: another process may measure there.
STEP_OPTIONS = OVERLAP | {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
WARM_UP = 2  # steps
LOSSES_APART = 2e-3  # relative: in bfloat16, and sums over devices have an order of their own
Way = tuple[Strategy, Order]
WAYS: tuple[Way, ...] = (
    ("ring", "zigzag"),
    ("ring", "striped"),
    ("all_to_all", "contiguous"),
    ("all_gather", "zigzag"),
)


def around(devices: int) -> tuple[int, int]:
    """How many hops keys make each way, as reach.Reach.hops has them without a window."""
    return devices // 2, devices - 1 - devices // 2


# ---- programs ------------------------------------------------------------------------------------


def step_of(attend: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Forward and backward: (q, k, v, dout) to out and three gradients."""

    def step(q, k, v, dout):
        out, pull = jax.vjp(functools.partial(attend, is_causal=True), q, k, v)
        return out, pull(dout)

    return step


def link_of(mesh: Mesh) -> Callable[..., Any]:
    """The permutations of a ring, forward and backward, one after another."""
    devices = mesh.size

    def sent_on(tree, way, hops):
        for _ in range(hops):
            tree = ring.send(tree, "seq", devices, way)
        return tree

    def sent_home(tree, way, hops):
        for hop in range(1, hops + 1):
            # One after another: XLA makes one permutation of equal ones of the same arrays.
            tree = jax.lax.optimization_barrier(ring.send(tree, "seq", devices, -way * hop))
        return tree

    @jax.shard_map(mesh=mesh, in_specs=P(None, "seq"), out_specs=P(None, "seq"))
    def link(k, v):
        made = []
        for way, hops in zip((1, -1), around(devices), strict=True):
            if hops:
                tree = (k, v)
                for send in (sent_on, sent_on, sent_home):
                    tree = jax.lax.optimization_barrier(send(tree, way, hops))
                made.append(tree)
        return made

    return lambda q, k, v, dout: link(k, v)


@contextlib.contextmanager
def keys_that_stay() -> Iterator[None]:
    """A ring traced inside computes as ever, and sends nothing."""
    with mock.patch.object(ring, "send", lambda tree, *_: jax.lax.optimization_barrier(tree)):
        yield


def measure(programs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Seconds of each: the median of rounds in which they take turns.

    Each follows a run of its own, so that it meets the clocks that it causes: behind permutations
    alone, which leave a GPU cool, attention on one H100 is up to a tenth faster.
    """
    for run in programs.values():
        jax.block_until_ready(run())
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, run in programs.items():
            jax.block_until_ready(run())
            begin = time.perf_counter()
            jax.block_until_ready(run())
            times[name].append(time.perf_counter() - begin)
    return {name: float(np.median(x)) for name, x in times.items()}


@functools.lru_cache(maxsize=2)  # on one device and on all
def drawn(cell: Cell, devices: int, dtype: Any, place: Sharding) -> list[jax.Array]:
    """Query, key, value and the cotangent of out, drawn where they are used."""
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (cell.heads, cell.kv_heads, cell.kv_heads, cell.heads)
    normal = jax.jit(jax.random.normal, static_argnums=(1, 2), out_shardings=place)
    shapes = [(1, devices * cell.tokens, n, cell.head_dim) for n in heads]
    return [normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def lowered(step: Callable[..., Any], mesh: Mesh | None, cell: Cell, dtype: Any, device: Any):
    """Traces a program; returns a function that compiles it, and returns it with its arrays."""
    place = SingleDeviceSharding(device) if mesh is None else NamedSharding(mesh, P(None, "seq"))
    arrays = drawn(cell, 1 if mesh is None else mesh.size, dtype, place)
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        options = OVERLAP if device.platform == "gpu" else None
        program = jax.jit(step, compiler_options=options).lower(*arrays)
    return lambda: functools.partial(program.compile(), *arrays)


def compiled(programs: dict[Any, Callable[[], Any]]) -> dict[Any, Callable[[], Any]]:
    """Compiles what `lowered` returned, side by side."""
    with ThreadPoolExecutor() as pool:
        return dict(zip(programs, pool.map(lambda x: x(), programs.values()), strict=True))


def hidden(folder: Path) -> float | None:
    """The part of the collectives' time in which the GPU computes too, in a profile of a run."""
    events = []
    for path in folder.rglob("*.trace.json.gz"):
        events += json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return hidden_of(events)


def hidden_of(events: Sequence[dict[str, Any]]) -> float | None:
    """As `hidden`, of a profile's events; None of a run without a GPU's collectives."""
    gpus = {
        event["pid"]
        for event in events
        if event.get("name") == "process_name" and "GPU" in event["args"]["name"]
    }
    total = covered = 0.0
    for gpu in gpus:
        ran = [event for event in events if event.get("ph") == "X" and event["pid"] == gpu]
        spans = sorted((e["ts"], e["ts"] + e["dur"], "nccl" in e["name"]) for e in ran)
        sent = [(begin, end) for begin, end, collective in spans if collective]
        total += sum(end - begin for begin, end in sent)
        reached = 0.0  # up to here computation is counted
        for begin, end, collective in spans:
            if not collective:
                begin = max(begin, reached)
                reached = max(reached, end)
                covered += sum(max(0.0, min(end, b) - max(begin, a)) for a, b in sent)
    return covered / total if total else None


# ---- the run -------------------------------------------------------------------------------------


def run_cell(
    cell: Cell, mesh: Mesh, dtype: Any, ways: Sequence[Way], rounds: int, trace: Path
) -> tuple[list[list[str]], Model | None]:
    """Rows of the table, and the model that a ring gives."""
    device, devices = mesh.devices.flat[0], mesh.size
    lower = functools.partial(lowered, cell=cell, dtype=dtype, device=device)
    apart = step_of(flash_attention)
    made: dict[Any, Any] = {x: lower(apart, None, device=x) for x in mesh.devices.flat}
    made["link"] = lower(link_of(mesh), mesh)
    ways = [way for way in ways if way[0] != "all_to_all" or cell.kv_heads % devices == 0]
    for strategy, order in ways:
        attend = functools.partial(
            context_parallel.attention, axis_name="seq", strategy=strategy, order=order
        )
        made[strategy, order] = lower(step_of(attend), mesh)
        if strategy == "ring":
            with keys_that_stay():
                made["compute", order] = lower(step_of(attend), mesh)
    made = compiled(made)
    alone = measure({"one": lambda: [made[x]() for x in mesh.devices.flat]}, rounds)["one"]
    alone_rate = cell.operations(1) / alone
    name = f"{cell.tokens} | {cell.heads}:{cell.kv_heads}"
    rows = [[name, "one device", us(alone), f"{alone_rate / 1e12:.0f}", "", "", "", ""]]
    model = None
    for strategy, order in ways:
        programs = {"all": made[strategy, order]}
        if strategy == "ring":
            programs |= {"compute": made["compute", order], "link": made["link"]}
        seconds = measure(programs, rounds)
        folder = trace / f"{cell.tokens}-{cell.heads}-{cell.kv_heads}-{strategy}-{order}"
        share = None
        if rounds > 1:  # one round: of what takes long
            with jax.profiler.trace(str(folder)):
                jax.block_until_ready(programs["all"]())
            share = hidden(folder)
        part = "" if share is None else f"{share:.0%}"
        rate = cell.operations(devices) / seconds["all"]
        row = [name, f"{strategy}, {order}", us(seconds["all"]), f"{rate / 1e12:.0f}"]
        row.append(f"{rate / alone_rate:.3f}")
        if strategy == "ring":
            row += [us(seconds["compute"]), us(seconds["link"]), part]
            fitted = Model(
                cell.operations(devices) / seconds["compute"],
                Model(1, 1, 0).sent(cell, devices) / seconds["link"],
                0.0,
            )
            model = model or fitted
        else:
            row += ["", "", part]
        rows.append(row)
    if model is None:
        return rows, None
    for count in sorted({devices, 8}):
        seconds = model.seconds(cell, count)
        rate = cell.operations(count) / seconds
        row = [name, f"model, {count} devices", us(seconds), f"{rate / 1e12:.0f}"]
        rows.append([*row, f"{rate / alone_rate:.3f}", "", "", ""])
    return rows, model


# ---- a training step -----------------------------------------------------------------------------


def training_step(config: Any, mesh: Mesh) -> tuple[Any, Any, Any]:
    """Traces a step of the example's GPT over a mesh; returns what is to be compiled, state, model.

    State and model are shapes alone.
    """
    split = training().Split(mesh) if mesh.size > 1 else None
    attend = flash_attention if split is None else split.attend

    def make():
        model = training().GPT(config, attend, nnx().Rngs(0), split=split)
        return model, training().make_optimizer(model, config)

    abstract = nnx().eval_shape(make)
    graph, state = nnx().split(abstract)

    def placed(path, x):
        names = [part for part in path if hasattr(part, "key")]
        spec = training().spec_of(names, x.shape, mesh, fsdp=mesh.size > 1)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    def step(state, rows):
        model, optimizer = nnx().merge(graph, state)
        loss, grads = nnx().value_and_grad(training().loss_fn)(model, rows)
        optimizer.update(model, grads)
        return nnx().state((model, optimizer)), loss

    state = jax.tree_util.tree_map_with_path(placed, state)
    shape = (config.batch, config.length + 1)
    rows = jax.ShapeDtypeStruct(shape, jnp.uint8, sharding=NamedSharding(mesh, P("data")))
    options = STEP_OPTIONS if mesh.devices.flat[0].platform == "gpu" else None
    out = (jax.tree.map(lambda x: x.sharding, state), NamedSharding(mesh, P()))
    jitted = jax.jit(step, donate_argnums=0, compiler_options=options, out_shardings=out)
    return jitted.lower(state, rows), state, abstract[0]


def initial(state: Any) -> Any:
    """Draws parameters, the same on any mesh; what the optimizer keeps is 0."""

    @functools.partial(jax.jit, static_argnums=(1, 2, 3))
    def draw(key, shape, dtype, sharding):
        x = 0.02 * jax.random.normal(key, shape, dtype)
        return jax.lax.with_sharding_constraint(x, sharding)

    def make(number, path, x):
        of_model = path[0].key == 0
        if of_model and x.ndim > 1:
            return draw(jax.random.key(number), x.shape, x.dtype, x.sharding)
        return jax.device_put(np.full(x.shape, float(of_model), x.dtype), x.sharding)

    leaves, tree = jax.tree_util.tree_flatten_with_path(state)
    return jax.tree.unflatten(tree, [make(i, *leaf) for i, leaf in enumerate(leaves)])


def time_steps(config: Any, mesh: Mesh, built: Any, steps: int) -> tuple[list[str], list[float]]:
    """A row of the table, and the losses, each before its update."""
    program, state, model = built
    rows = np.random.default_rng(0).integers(1, 256, (mesh.size, config.length + 1), np.uint8)
    rows = np.resize(rows, (config.batch, config.length + 1))
    rows[:, 0] = training().START
    seen = training().keys_seen(rows)
    state, rows = initial(state), jax.device_put(rows, NamedSharding(mesh, P("data")))
    losses = []
    for step in range(steps + WARM_UP):
        if step == WARM_UP:
            jax.block_until_ready(losses)
            begin = time.perf_counter()
        state, loss = program(state, rows)
        losses.append(loss)
    losses = [float(loss) for loss in losses]
    seconds = (time.perf_counter() - begin) / steps
    speed = config.batch * config.length / seconds
    share = training().utilisation(model, speed, seen, list(mesh.devices.flat))
    plan = program.memory_analysis()
    needs = plan.argument_size_in_bytes + plan.temp_size_in_bytes
    needs += plan.output_size_in_bytes - plan.alias_size_in_bytes
    row = [str(mesh.size), f"{config.batch} x {config.length}", f"{1e3 * seconds:.1f}"]
    row += [f"{speed / mesh.size:,.0f}", "" if share is None else f"{share:.1%}"]
    return [*row, f"{needs / 1e9:.1f}", f"{losses[0]:.4f}", f"{losses[-1]:.4f}"], losses


def run_steps(args: argparse.Namespace, devices: Sequence[Any]) -> None:
    """Prints the table of a preset's training step."""
    chosen = {name: getattr(args, name) for name in ("layers", "length", "batch", "width")}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    if args.platform == "cpu":
        chosen["dtype"] = "float32"
    config = dataclasses.replace(training().PRESETS[args.step], **chosen)
    more = dataclasses.replace(config, batch=config.batch * len(devices))
    one, all_of_them = (
        Mesh(np.reshape(x, (1, 1, -1)), ("data", "model", "seq"), (AxisType.Auto,) * 3)
        for x in (devices[:1], devices)
    )
    jobs = [(config, one), (config, all_of_them), (more, all_of_them)]
    begin = time.perf_counter()
    traced = [training_step(*job) for job in jobs]
    with ThreadPoolExecutor() as pool:
        compiled = list(pool.map(lambda x: x[0].compile(), traced))
    programs = [(x, *rest) for x, (_, *rest) in zip(compiled, traced, strict=True)]
    print(f"compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    if args.wait:
        input()
    heading("devices", "rows", "ms", "tokens/s a device", "MFU", "planned GB", "loss", "last loss")
    curves = []
    for job, program in zip(jobs, programs, strict=True):
        row, losses = time_steps(*job, program, args.rounds)
        print("| " + " | ".join(row) + " |", flush=True)
        curves.append(losses)
        if len(curves) == 2:
            apart = max(abs(a / b - 1) for a, b in zip(*curves, strict=True))
            print(f"<!-- losses are {apart:.1e} apart, at most {LOSSES_APART:.0e} is right -->")
            if not apart <= LOSSES_APART:
                raise SystemExit("the losses of one device and of all differ")


# Flax is needed for `--step` alone.
def training() -> Any:
    return importlib.import_module("training")


def nnx() -> Any:
    return importlib.import_module("flax.nnx")


# ---- the command ---------------------------------------------------------------------------------


def heading(*names: str) -> None:
    print("| " + " | ".join(names) + " |")
    print("|" + "---|" * len(names), flush=True)


def us(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f}"


def heads_of(text: str) -> tuple[int, int]:
    heads, _, kv_heads = text.partition(":")
    return int(heads), int(kv_heads or heads)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--platform", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--devices", type=int, help="as many as JAX sees; of a CPU 2")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 65536, 262144])
    parser.add_argument("--total", type=int, nargs="+", help="tokens of all devices, not of one")
    parser.add_argument("--heads", type=heads_of, nargs="+", default=[(32, 8), (32, 32)])
    names = [f"{strategy}:{order}" for strategy, order in WAYS]
    parser.add_argument("--ways", nargs="+", choices=names, default=names)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--trace", type=Path, help="keeps a profile of each cell in this folder")
    parser.add_argument("--step", help="times a training step of this preset of train_gpt.py")
    for name in ("layers", "length", "batch", "width"):
        parser.add_argument(f"--{name}", type=int, help="of the step, instead of the preset's")
    parser.add_argument("--wait", action="store_true", help="for a line, once steps are compiled")
    args = parser.parse_args()
    ways = [way for way in WAYS if ":".join(way) in args.ways]
    if args.platform == "cpu":
        args.devices = args.devices or 2
        # Before JAX looks for devices.
        flag = f"--xla_force_host_platform_device_count={args.devices}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
        jax.config.update("jax_platforms", "cpu")
    devices = jax.devices()
    count = args.devices or len(devices)
    if not 2 <= count <= len(devices):
        raise SystemExit(
            f"--devices is {count}, and JAX has {len(devices)} of platform "
            f"{devices[0].platform!r}; expected two or more; --platform cpu splits a CPU"
        )
    devices = devices[:count]
    if args.step is not None:
        print(f"{count} x {devices[0].device_kind}, jax {jax.__version__}, step of {args.step}\n")
        run_steps(args, devices)
        return
    mesh = jax.make_mesh((count,), ("seq",), (AxisType.Auto,), devices=devices)
    dtype = jnp.dtype("float32" if args.platform == "cpu" else "bfloat16")
    print(f"{count} x {devices[0].device_kind}, jax {jax.__version__}, {dtype}\n")
    heading(
        *("tokens a device", "heads", "strategy", "µs", "TFLOP/s a device", "scales"),
        *("compute µs", "link µs", "hidden"),
    )
    every = [total // count for total in args.total] if args.total else args.tokens
    with tempfile.TemporaryDirectory() as scratch:
        trace = args.trace or Path(scratch)
        for tokens, (heads, kv_heads) in itertools.product(every, args.heads):
            cell = Cell(tokens, heads, kv_heads, HEAD_DIM, dtype.itemsize)
            rows, model = run_cell(cell, mesh, dtype, ways, args.rounds, trace)
            for row in rows:
                print("| " + " | ".join(row) + " |", flush=True)
            if model is not None:
                print(f"<!-- {model.rate:.3g} operations/s, {model.bandwidth:.3g} bytes/s -->")


if __name__ == "__main__":
    main()
