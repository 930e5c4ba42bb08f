"""What the parts on GPTs share: steps compiled ahead, their times, operations as papers count."""

import concurrent.futures
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from common import train_jobs
from common.paper import Record, Settings
from common.train_jobs import Job, Program, training

WAYS = {"jax_flash": "jax_flash", "cudnn": "cuDNN", "xla": "XLA's attention"}
# Nothing is tried on a GPU where another step may be measured meanwhile.
UNTUNED = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
# A plan is what a step needs: given 80 GB, XLA computes again what does not fit. Given 240:
PLANNED = {"xla_gpu_memory_limit_slop_factor": 300}
AHEAD = 8  # steps that are compiled at a time
training.PRESETS["quick"] = training.Config(
    layers=1, width=32, heads=2, kv_heads=2, vocabulary=300, length=128, batch=2
)


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


class Ahead:
    """Makes what cells will need while others are measured."""

    def __init__(self, make: Callable[[Settings, Record], Any]):
        self.make = make
        self.waiting: dict[str, concurrent.futures.Future[Any]] = {}

    def take(self, settings: Settings, cell: Record, cells: Sequence[Record]) -> Any:
        """Returns what belongs to a cell; begins with that of the cells behind it."""
        names = [x["name"] for x in cells]
        behind = cells[names.index(cell["name"]) :]
        for later in (x for x in behind if x["name"] not in self.waiting):
            self.waiting[later["name"]] = self.pool.submit(self.make, settings, later)
        return self.waiting.pop(cell["name"]).result()

    @property
    def pool(self) -> concurrent.futures.ThreadPoolExecutor:
        if not hasattr(self, "_pool"):
            self._pool = concurrent.futures.ThreadPoolExecutor(AHEAD)
        return self._pool


def job_of(settings: Settings, cell: Record) -> Job:
    """The job of a cell, whose fields are those of Job."""
    known = {x.name for x in dataclasses.fields(Job)}
    if settings.quick:
        cell = cell | {"preset": "quick", "batch": 1}
    return Job("step", **{name: x for name, x in cell.items() if name in known - {"kind"}})


def build(settings: Settings, cell: Record) -> Program | str:
    """Compiles the step of a cell; returns why it cannot be, where that is a result."""
    options = UNTUNED | (PLANNED if cell.get("plan_only") else {}) if on_gpu() else None
    job = job_of(settings, cell)
    try:
        return train_jobs.build(job, job.length, options)
    except jax.errors.JaxRuntimeError as error:
        return reason(error)


def reason(error: Exception) -> str:
    """Out of memory is a result; another error is none."""
    if "RESOURCE_EXHAUSTED" not in str(error):
        raise error
    return "out of memory"


def measure(settings: Settings, cell: Record, program: Program | str) -> Record:
    """Times a step, or tells its plan alone; "error" says why there is no time."""
    if isinstance(program, str):
        return {"error": program}
    found: Record = {"program_gb": round(program.needs_gb, 3)}
    found |= {"compile_s": round(program.compile_s, 1)}
    if cell.get("plan_only"):
        return found
    try:
        found |= train_jobs.time_program(program)
    except jax.errors.JaxRuntimeError as error:
        return found | {"error": reason(error)}
    job = job_of(settings, cell)
    config = train_jobs.config_of(job, job.length)
    of_paper = papers_operations(config, program.operations / (job.batch * job.length))
    tflops = of_paper * found["tokens_per_second"] / 1e12
    return found | {"paper_tflops": round(tflops, 2)}


def papers_operations(config: training.Config, per_token: float) -> float:
    """Operations a token as the paper counts them: of attention, pairs that causality hides too."""
    return per_token + 6 * config.layers * config.width * config.length


def described(record: Record | None, fields: Sequence[str]) -> list[str]:
    """What was measured, in columns of a table."""
    if record is None:
        return [""] * len(fields)
    if "error" in record:
        return [record["error"]] + [""] * (len(fields) - 1)
    texts = {
        "ms": "{:.1f}",
        "tokens_per_second": "{:,}",
        "paper_tflops": "{:.0f}",
        "mfu": "{:.1%}",
        "program_gb": "{:.1f}",
    }
    return [
        "" if record.get(field) is None else texts[field].format(record[field]) for field in fields
    ]
