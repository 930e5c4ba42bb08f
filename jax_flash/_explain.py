"""Owns `explain`: which backend, kernel and tiling a call would get, and what the compiler says.

Needs no GPU: plans are made for a named one, and NVRTC compiles for it anywhere.
Read next: `_backends.py`, `_gpu/`.
"""

import dataclasses
import inspect
import re
from typing import Any, Unpack, get_args, get_type_hints

import jax
import numpy as np
from jax.typing import ArrayLike

from jax_flash import _backends, _gpu, _keywords, _native, _validate
from jax_flash._call import Call
from jax_flash._gpu.plan import Kernel
from jax_flash._ops import passes
from jax_flash._problem import Problem, Shapes
from jax_flash._validate.float8 import QArray
from jax_flash.attention import A, Float8Options, flash_attention
from jax_flash.block_masks import BlockMask

Array = ArrayLike | jax.ShapeDtypeStruct


class ExplainOptions(Float8Options[Array], total=False):
    """The keywords of `flash_attention`, arrays or their shapes."""

    return_lse: bool
    return_amax: bool


@dataclasses.dataclass(frozen=True)
class EntryReport:
    """What ptxas reported of one kernel entry point."""

    name: str
    registers: int
    shared_bytes: int  # static; the plan says how much is added at launch
    stack_bytes: int
    spill_bytes: int  # stored and loaded


@dataclasses.dataclass(frozen=True)
class KernelReport:
    """One compiled CUDA program: all its entry points, of which the call launches some."""

    plan: _gpu.Plan
    entries: tuple[EntryReport, ...]
    warnings: tuple[str, ...]  # of ptxas: wgmma serialised, setmaxnreg ignored
    seconds: float
    from_disk: bool
    error: str | None = None  # why it was not compiled


@dataclasses.dataclass(frozen=True)
class PassReport:
    """What one pass of a call would run.

    Attributes:
      backend: the backend that runs it.
      refusals: of all backends that do not run it here, all reasons.
      kernel: the CUDA program; None unless backend is "cuda" and there is something to compute.
      rest: where `kernel` runs float32 on float16 copies, the program for what they do not hold.
    """

    backend: str
    refusals: dict[str, tuple[str, ...]]
    kernel: KernelReport | None
    rest: KernelReport | None = None


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """What a call of `flash_attention` would run; printing it shows all of it but `source`.

    Attributes:
      problem, shapes: what is computed.
      gpu: the GPU it was explained for, or None.
      rewrites: what was taken for another thing that means the same: "softcap", a score_mod that is
        one; "window", a block_mask that is one; "chunks", those of a block_mask, as batch rows;
        "layout", a block_mask of whole blocks; "lines" of the distance, which score_mod adds.
      forward, backward: the two passes: each one's backend, why not the others, its CUDA program.
        The backend of backward is "none" for arguments of float8, which have no derivative.
    """

    problem: Problem
    shapes: Shapes
    gpu: _gpu.GpuSpec | None
    rewrites: tuple[str, ...]
    forward: PassReport
    backward: PassReport

    @property
    def backend(self) -> str:
        """The backend that runs the forward pass."""
        return self.forward.backend

    @property
    def source(self) -> str:
        """The CUDA that `score_mod` is written as, for each pass that kernels run; else ""."""
        passes = (("forward", self.forward.kernel), ("backward", self.backward.kernel))
        texts = [(name, kernel.plan.functions) for name, kernel in passes if kernel is not None]
        return "\n".join(f"// {name}\n{text}" for name, text in texts if text)

    def __repr__(self) -> str:
        s = self.shapes
        lines = [
            f"{self.problem.dtype}, batch {s.batch}, query {s.q_len} x {s.q_heads} heads, "
            f"key {s.kv_len} x {s.kv_heads} heads, head dim {s.head_dim}, value dim {s.value_dim}",
            f"  {_describe(self.problem)}",
        ]
        lines += [f"  rewritten: {', '.join(self.rewrites)}"] if self.rewrites else []
        choice, other = self._describe_choice(self.forward), self._describe_choice(self.backward)
        lines += choice if choice == other else ["forward", *choice, "backward", *other]
        if s.empty:
            lines.append("  nothing to compute: an array is empty")
        for name, one in (("forward", self.forward), ("backward", self.backward)):
            if one.kernel is not None:
                lines += _describe_kernel(name, one.kernel)
            if one.rest is not None:
                lines += _describe_kernel(f"{name}, what copies do not hold", one.rest)
        return "\n".join(lines)

    def _describe_choice(self, one: PassReport) -> list[str]:
        where = f" on {self.gpu.name} ({self.gpu.arch})" if self.gpu is not None else ""
        lines = [f"backend: {one.backend}{where}"]
        for name, reasons in one.refusals.items():
            lines += [f"  not {name}: {reason}" for reason in reasons]
        return lines


def explain(
    query: Array | QArray,
    key: Array | QArray,
    value: Array | QArray | None,
    *,
    gpu: str | None = None,
    **options: Unpack[ExplainOptions],
) -> Explanation:
    """Explains what `flash_attention(query, key, value, **options)` would run; runs nothing.

    Args:
      query, key, value: arrays or `jax.ShapeDtypeStruct`, as for `flash_attention`; so are the
        arrays among the options.
      gpu: a GPU to explain for: a model, such as "H200" or "RTX 4090", or the name that its driver
        reports; None takes the one present.
      options: of `flash_attention`.

    Returns: the Explanation; print it. The CUDA of a `score_mod` is its `source`.

    Raises:
      TypeError, ValueError, NotImplementedError: as `flash_attention`; ValueError, with the names
        that are known, for a GPU of unknown name.

    Examples:
      >>> import jax, jax_flash
      >>> q = jax.ShapeDtypeStruct((2, 4096, 16, 128), "bfloat16")
      >>> print(jax_flash.explain(q, q, q, is_causal=True, gpu="H200"))  # doctest: +SKIP
    """
    spec = _gpu.spec.present() if gpu is None else _gpu.spec.named(gpu)
    given = _prepare(query, key, value, dict(options))
    problem, rewrites, float8 = given.problem, given.rewrites, given.float8
    q, k, v, *terms = given.operands
    shapes = Shapes.of(q, k, v, problem.name_terms(terms))
    backend = options.get("backend")
    calls = (
        passes(problem, backend, value_dim=given.value_dim)
        if float8 is None
        else float8.passes(problem, backend, shapes.head_dim)
    )
    problem = calls["forward"].problem
    reports = {name: _report(call, shapes, spec) for name, call in calls.items()}
    plans = [report.kernel.plan for report in reports.values() if report.kernel is not None]
    if any(plan.constants.get("kScoreIsLine") for plan in plans):
        rewrites = (*rewrites, "lines")
    reports = {"backward": _UNDIFFERENTIATED, **reports}
    return Explanation(problem, shapes, spec, rewrites, **reports)


_UNDIFFERENTIATED = PassReport(
    "none", dict.fromkeys(_backends.BACKENDS, ("arguments of float8 have no derivative",)), None
)


def _report(call: Call, shapes: Shapes, gpu: _gpu.GpuSpec | None) -> PassReport:
    backend, refusals = _backends.pick(call, shapes, gpu)
    if backend != "cuda" or gpu is None or shapes.empty:
        return PassReport(backend, refusals, None)
    call = _backends.in_kernels(call, shapes, gpu)
    if _gpu.refuse(call, shapes, gpu) and (other := call.instead(shapes)):
        call, shapes = other
    plans = _gpu.plans(call, shapes, gpu)
    try:
        return PassReport(backend, refusals, *map(compile_plan, plans))
    except _native.CompileError as error:
        reason = _backends.refused(call, error)
        return PassReport("xla", {**refusals, "cuda": (reason,)}, None)


def compile_plan(plan: _gpu.Plan) -> KernelReport:
    """Compiles a plan's programs, or takes them from the cache, and reads the logs.

    Raises: CompileError where the compiler refuses a user's function.
    """
    try:
        kernels = [_native.compile_kernel(**program) for program, _ in plan.programs]
    except RuntimeError as error:
        if plan.functions and isinstance(error, _native.CompileError):
            raise
        return KernelReport(plan, (), (), 0.0, False, str(error))
    log = "\n".join(kernel.log for kernel in kernels)
    return KernelReport(
        plan,
        read_entries(log),
        read_warnings(log),
        seconds=max(kernel.seconds for kernel in kernels),
        from_disk=all(kernel.from_disk for kernel in kernels),
    )


_ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\w+)'"
    r".*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads"
    r".*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


def read_entries(log: str) -> tuple[EntryReport, ...]:
    """Reads the resources of every entry point from ptxas's log (`-v`)."""
    entries = []
    for match in _ENTRY.finditer(log):
        shared = re.search(r"(\d+) bytes smem", match["rest"])
        entries.append(
            EntryReport(
                name=match["name"],
                registers=int(match["registers"]),
                shared_bytes=int(shared[1]) if shared else 0,
                stack_bytes=int(match["stack"]),
                spill_bytes=int(match["stores"]) + int(match["loads"]),
            )
        )
    return tuple(entries)


def read_warnings(log: str) -> tuple[str, ...]:
    """Reads the messages that mean a slower kernel than the one written from the log."""
    lines = (line.strip() for line in log.splitlines())
    return tuple(line for line in lines if "Potential Performance Loss" in line)


_NOT_PREPARED = ("return_lse", "return_amax", "backend")
# The arguments that may be arrays; of the options, those that `Float8Options` has as such.
_ARRAYS = {"query", "key", "value"}
_ARRAYS |= {name for name, kind in get_type_hints(Float8Options).items() if A in get_args(kind)}


def _prepare(query: Any, key: Any, value: Any, options: dict[str, Any]) -> _validate.Prepared:
    """Validates as `flash_attention` does, on shapes alone."""
    signature = inspect.signature(flash_attention)
    _keywords.check("explain", options, signature.parameters)
    call = signature.bind(query, key, value, **options)
    call.apply_defaults()
    arguments = {k: v for k, v in call.arguments.items() if k not in _NOT_PREPARED}
    for name in ("return_lse", "return_amax"):
        _validate.flag(name, call.arguments[name])
    arrays = {k: v for k, v in arguments.items() if k in _ARRAYS and hasattr(v, "dtype")}
    arrays |= {k: v for k, v in arguments.items() if isinstance(v, BlockMask)}
    if not isinstance(arrays.get("scale"), jax.ShapeDtypeStruct | jax.Array):
        arrays.pop("scale", None)  # a number
    arrays = {k: np.asarray(v) if isinstance(v, np.generic) else v for k, v in arrays.items()}
    static = {k: v for k, v in arguments.items() if k not in arrays}
    found: list[_validate.Prepared] = []

    def prepare(arrays: dict[str, Any]) -> Any:
        found.append(_validate.prepare(**static, **arrays))
        return found[0].operands

    operands = jax.eval_shape(prepare, arrays)
    return found[0]._replace(operands=operands)


def _describe(problem: Problem) -> str:
    left, right = problem.window
    parts = [f"scale {problem.scale:.6g}"]
    if problem.as_written:
        parts.append("as written")
    if right == 0:
        parts.append("causal")
    if left is not None or right not in (None, 0):
        parts.append(f"window ({left}, {right})")
    if problem.bottom_right:
        parts.append("aligned bottom-right")
    if problem.softcap is not None:
        parts.append(f"softcap {problem.softcap:g}")
    if problem.score is not None:
        parts.append(f"score_mod {problem.score}")
    if problem.dropout_rate:
        parts.append(f"dropout {problem.dropout_rate:g}")
    if problem.deterministic:
        parts.append("deterministic")
    if problem.precision != "default":
        parts.append(f"precision {problem.precision}")
    terms = ("block mask" if x == "block_numbers" else x for x in problem.terms)
    return ", ".join([*parts, *(x for x in terms if x != "block_bits")])


def _describe_kernel(name: str, kernel: KernelReport) -> list[str]:
    lines = f"{name}: {kernel.plan}".splitlines()
    if count := len(kernel.plan.functions.splitlines()):
        lines.append(f"  score_mod is {count} lines of CUDA: explanation.source")
    if kernel.error is not None:
        return [*lines, f"  not compiled: {kernel.error}"]
    steps = [step for step in kernel.plan.launch.steps if isinstance(step, Kernel)]
    launched = {step.entry: step.shared_bytes for step in steps}
    for entry in kernel.entries:
        if entry.name not in launched:
            continue  # of another call
        shared = entry.shared_bytes + launched[entry.name]
        spills = f"{entry.spill_bytes} bytes of spills" if entry.spill_bytes else "no spills"
        lines.append(
            f"  {entry.name}: {entry.registers} registers, {shared / 1024:.1f} KB of shared "
            f"memory, {spills}"
        )
    lines += [f"  warning: {warning}" for warning in kernel.warnings]
    origin = "from the disk cache" if kernel.from_disk else "compiled"
    return [*lines, f"  {origin} in {kernel.seconds:.2f} s"]
