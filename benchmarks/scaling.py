"""Weak scaling of attention over a sequence that is split over devices, forward and backward.

    python benchmarks/scaling.py                              # two GPUs, about 5 minutes
    python benchmarks/scaling.py --tokens 16384 65536 --rounds 4 --ways ring:zigzag \\
        all_to_all:contiguous all_gather:zigzag               # two GPUs, two minutes
    python benchmarks/scaling.py --tokens 16384 --trace DIR   # keeps the profiles in DIR
    python benchmarks/scaling.py --platform cpu --tokens 64 --heads 4:2 --rounds 2

Causal, one sequence, bfloat16 (float32 on a CPU), head dim 128; tokens are those of one device. A
rate is of one device: 3.5 times 2 N T² H operations, over the devices. `scales` is that rate beside
flash_attention's on one device with the same tokens a device. Three programs are timed in turns, so
that all meet the same clocks:

    all        the attention itself
    compute    a ring whose keys stay where they are: the same kernels on each device
    link       the same permutations, and no attention

`hidden` is the part of the collectives' time in which the same GPU computes, of a profile of the
whole. A GPT step over two GPUs:

    python examples/train_gpt.py --preset long --length 131072 --batch 1 --mesh seq=2 --steps 20

The last table says what eight devices would do, by `Model`: of the measured rate, and of the
bandwidth that the permutations reached, each hop takes the longer of the two. The same model's
figure for the measured number of devices stands beside the measured one.
"""

import argparse
import contextlib
import dataclasses
import functools
import gzip
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_flash import context_parallel, flash_attention
from jax_flash.context_parallel import ring
from jax_flash.context_parallel.attention import Order, Strategy

HEAD_DIM = 128
# By default XLA runs collectives in between. Keys and values travel each by a collective of its
# own, both ways; XLA keeps one under way unless it is told otherwise.
OVERLAP = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
}
Way = tuple[Strategy, Order]
WAYS: tuple[Way, ...] = (
    ("ring", "zigzag"),
    ("ring", "striped"),
    ("all_to_all", "contiguous"),
    ("all_gather", "zigzag"),
)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One call: tokens of a device, query and kv heads, head dim, bytes of a number."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    item: int

    def operations(self, devices: int) -> float:
        """Operations of one device, forward and backward, where all have as much to do."""
        return 3.5 * 2 * self.heads * (devices * self.tokens) ** 2 * self.head_dim / devices

    @property
    def keys(self) -> int:
        """Bytes of one device's keys and values."""
        return 2 * self.tokens * self.kv_heads * self.head_dim * self.item


@dataclasses.dataclass(frozen=True)
class Model:
    """How long a balanced causal ring takes: operations and bytes per second, seconds of a hop."""

    rate: float
    bandwidth: float
    latency: float

    def seconds(self, cell: Cell, devices: int) -> float:
        """Returns the time of a forward and a backward pass.

        A device has as much to do with its own keys as with those of each hop, and keys that travel
        both ways share its bandwidth. In the backward pass, with 2.5 times the operations,
        gradients in float32 travel behind the keys, and at the end home, which nothing hides.
        """
        if devices == 1:
            return cell.operations(1) / self.rate
        step = cell.operations(devices) / 3.5 / devices / self.rate
        gradients = cell.keys * 4 / cell.item
        homes, hops = min(2, devices - 1), devices - 1
        behind = gradients * (hops - homes) / hops
        total = homes * (gradients / self.bandwidth + self.latency)
        for compute, data in ((step, cell.keys), (2.5 * step, cell.keys + behind)):
            total += compute + hops * max(compute, data / self.bandwidth + self.latency)
        return total

    def sent(self, cell: Cell, devices: int) -> float:
        """Bytes that a device sends."""
        gradients = cell.keys * 4 / cell.item
        return (devices - 1) * (2 * cell.keys + gradients)


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

    def around(tree, way, hops, home):
        for hop in range(hops):
            by = -way * hops if home and hop == hops - 1 else way
            tree = ring.send(tree, "seq", devices, by)
        return tree

    @jax.shard_map(mesh=mesh, in_specs=P(None, "seq"), out_specs=P(None, "seq"))
    def link(k, v):
        keys, gradients = (k, v), (k.astype(jnp.float32), v.astype(jnp.float32))
        sent = []
        for way, hops in ((1, devices // 2), (-1, devices - 1 - devices // 2)):  # as Reach.hops
            forward = around(keys, way, hops, home=False)
            again = around(jax.lax.optimization_barrier(keys), way, hops, home=False)
            sent += [forward, again, around(gradients, way, hops, home=True)]
        return sent

    return lambda q, k, v, dout: link(k, v)


@contextlib.contextmanager
def keys_that_stay() -> Iterator[None]:
    """A ring traced inside computes as ever, and sends nothing."""
    with mock.patch.object(ring, "send", lambda tree, *_: jax.lax.optimization_barrier(tree)):
        yield


def measure(programs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Seconds of each: the median of rounds in which they take turns."""
    for run in programs.values():
        jax.block_until_ready(run())
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, run in programs.items():
            begin = time.perf_counter()
            jax.block_until_ready(run())
            times[name].append(time.perf_counter() - begin)
    return {name: float(np.median(x)) for name, x in times.items()}


def compiled(step: Callable[..., Any], mesh: Mesh | None, cell: Cell, dtype: Any, device: Any):
    """A program with its arrays, drawn where they are used."""
    devices = 1 if mesh is None else mesh.size
    place = device if mesh is None else NamedSharding(mesh, P(None, "seq"))
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (cell.heads, cell.kv_heads, cell.kv_heads, cell.heads)
    shapes = [(1, devices * cell.tokens, n, cell.head_dim) for n in heads]
    arrays = [
        jax.device_put(jax.random.normal(key, shape, dtype), place)
        for key, shape in zip(keys, shapes, strict=True)
    ]
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        options = OVERLAP if device.platform == "gpu" else None
        program = jax.jit(step, compiler_options=options).lower(*arrays).compile()
    return functools.partial(program, *arrays)


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
    alone = measure({"one": compiled(step_of(flash_attention), None, cell, dtype, device)}, rounds)[
        "one"
    ]
    alone_rate = cell.operations(1) / alone
    name = f"{cell.tokens} | {cell.heads}:{cell.kv_heads}"
    rows = [[name, "one device", us(alone), f"{alone_rate / 1e12:.0f}", "", "", "", ""]]
    link = compiled(link_of(mesh), mesh, cell, dtype, device)
    model = None
    for strategy, order in ways:
        if strategy == "all_to_all" and cell.kv_heads % devices:
            continue
        attend = functools.partial(
            context_parallel.attention, axis_name="seq", strategy=strategy, order=order
        )
        programs = {"all": compiled(step_of(attend), mesh, cell, dtype, device)}
        if strategy == "ring":
            with keys_that_stay():
                programs["compute"] = compiled(step_of(attend), mesh, cell, dtype, device)
            programs["link"] = link
        seconds = measure(programs, rounds)
        folder = trace / f"{cell.tokens}-{cell.heads}-{cell.kv_heads}-{strategy}-{order}"
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
    predicted, eight = (model.seconds(cell, n) for n in (devices, 8))
    rate = cell.operations(8) / eight
    rows.append([name, f"model, {devices} devices", us(predicted), "", "", "", "", ""])
    rows.append(
        [name, "model, 8 devices", us(eight), f"{rate / 1e12:.0f}", f"{rate / alone_rate:.3f}"]
        + [""] * 3
    )
    return rows, model


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
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 65536, 262144])
    parser.add_argument("--heads", type=heads_of, nargs="+", default=[(32, 8), (32, 32)])
    names = [f"{strategy}:{order}" for strategy, order in WAYS]
    parser.add_argument("--ways", nargs="+", choices=names, default=names)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--trace", type=Path, help="keeps a profile of each cell in this folder")
    args = parser.parse_args()
    ways = [way for way in WAYS if ":".join(way) in args.ways]
    if args.platform == "cpu":
        # Before JAX looks for devices.
        flag = f"--xla_force_host_platform_device_count={args.devices}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
        jax.config.update("jax_platforms", "cpu")
    devices = jax.devices()
    if len(devices) < args.devices:
        raise SystemExit(
            f"--devices is {args.devices}, and JAX has {len(devices)} of platform "
            f"{devices[0].platform!r}; --platform cpu splits a CPU"
        )
    mesh = jax.make_mesh(
        (args.devices,), ("seq",), (AxisType.Auto,), devices=devices[: args.devices]
    )
    dtype = jnp.dtype("float32" if args.platform == "cpu" else "bfloat16")
    print(f"{args.devices} x {devices[0].device_kind}, jax {jax.__version__}, {dtype}\n")
    header = ["tokens a device", "heads", "strategy", "µs", "TFLOP/s a device", "scales"]
    header += ["compute µs", "link µs", "hidden"]
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header))
    with tempfile.TemporaryDirectory() as scratch:
        trace = args.trace or Path(scratch)
        for tokens, (heads, kv_heads) in itertools.product(args.tokens, args.heads):
            cell = Cell(tokens, heads, kv_heads, HEAD_DIM, dtype.itemsize)
            rows, model = run_cell(cell, mesh, dtype, ways, args.rounds, trace)
            for row in rows:
                print("| " + " | ".join(row) + " |", flush=True)
            if model is not None:
                print(f"<!-- {model.rate:.3g} operations/s, {model.bandwidth:.3g} bytes/s -->")


if __name__ == "__main__":
    main()
