"""Owns `explain`: which backend, kernel and tiling a call would get, and what the compiler says.

Needs no GPU: plans are made for a named one, and NVRTC compiles for it anywhere. A function is
traced, and each of its passes that kernels may run is explained.
Read next: `_backends.py`, `_gpu/`.
"""

import dataclasses
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Unpack, get_args, get_type_hints, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_flash import _backends, _gpu, _keywords, _native, _validate
from jax_flash._advise.graph import Graph, Node
from jax_flash._call import Call
from jax_flash._gpu.plan import Kernel
from jax_flash._ops import passes
from jax_flash._ops.decode import Decode
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
      name: "forward" and "backward" of `flash_attention`; "decode", of rows of a cache; of requests
        over pages "prefill", of their tokens, and "common", over the pages that they share.
      call, shapes: what is computed.
      backend: the backend that runs it.
      refusals: of all backends that do not run it here, all reasons.
      kernel: the CUDA program; None unless backend is "cuda" and there is something to compute.
      rest: where `kernel` runs float32 on float16 copies, the program for what they do not hold.
      taken: the call that `kernel` runs, and its sizes, where they are others.
      place: where a function that is explained has it, "file.py:12 (function)".
    """

    name: str
    call: Call
    shapes: Shapes
    backend: str
    refusals: Mapping[str, tuple[str, ...]]
    kernel: KernelReport | None = None
    rest: KernelReport | None = None
    taken: tuple[Call, Shapes] | None = None
    place: str = ""


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """What a call of `flash_attention`, or a function, would run.

    Printing it shows all of it but `source`.

    Attributes:
      gpu: the GPU it was explained for, or None.
      rewrites: what was taken for another thing that means the same: "softcap", a score_mod that is
        one; "window", a block_mask that is one; "chunks", those of a block_mask, as batch rows;
        "layout", a block_mask of whole blocks; "lines" of the distance, which score_mod adds. A
        function's are "lines" alone.
      passes: in their order: each one's name, backend, why not the others, its CUDA program. Those
        of `flash_attention` are forward and backward, whose backend is "none" for arguments of
        float8, which have no derivative; those of a function are what it computes, and what it has
        twice in one line of source is told once.
    """

    gpu: _gpu.GpuSpec | None
    rewrites: tuple[str, ...]
    passes: tuple[PassReport, ...]

    @property
    def problem(self) -> Problem:
        """What the first pass computes."""
        return self.passes[0].call.problem

    @property
    def shapes(self) -> Shapes:
        """The sizes of the first pass."""
        return self.passes[0].shapes

    @property
    def backend(self) -> str:
        """The backend that runs the first pass."""
        return self.passes[0].backend

    @property
    def forward(self) -> PassReport:
        """The pass of that name."""
        return self._named("forward")

    @property
    def backward(self) -> PassReport:
        """The pass of that name."""
        return self._named("backward")

    def _named(self, name: str) -> PassReport:
        found = next((x for x in self.passes if x.name == name), None)
        if found is None:
            names = ", ".join(dict.fromkeys(x.name for x in self.passes))
            raise AttributeError(f"there is no pass {name}; passes has {names}")
        return found

    @property
    def source(self) -> str:
        """The CUDA that `score_mod` is written as, for each pass that kernels run; else ""."""
        kernels = ((x.name, x.kernel) for x in self.passes if x.kernel is not None)
        texts = [(name, kernel.plan.functions) for name, kernel in kernels]
        return "\n".join(f"// {name}\n{text}" for name, text in texts if text)

    def __repr__(self) -> str:
        lines = []
        for head, same in itertools.groupby(self.passes, _describe_pass):
            group = list(same)
            lines += ["", *head] if lines else head
            lines += self._describe_group(group)
        return "\n".join(lines)

    def _describe_group(self, group: list[PassReport]) -> list[str]:
        lines = []
        if self.rewrites and group[0] is self.passes[0]:
            lines.append(f"  rewritten: {', '.join(self.rewrites)}")
        choices = [self._describe_choice(x) for x in group]
        if all(x == choices[0] for x in choices):
            lines += choices[0]
        else:
            for one, choice in zip(group, choices, strict=True):
                lines += [one.name, *choice]
        if group[0].shapes.empty:
            lines.append("  nothing to compute: an array is empty")
        for one in group:
            if one.taken is not None:
                lines.append(f"  as {_describe_taken(one.call, *one.taken)}")
            if one.kernel is not None:
                lines += _describe_kernel(one.name, one.kernel)
            if one.rest is not None:
                lines += _describe_kernel(f"{one.name}, what copies do not hold", one.rest)
        return lines

    def _describe_choice(self, one: PassReport) -> list[str]:
        where = f" on {self.gpu.name} ({self.gpu.arch})" if self.gpu is not None else ""
        lines = [f"backend: {one.backend}{where}"]
        for name, reasons in one.refusals.items():
            lines += [f"  not {name}: {reason}" for reason in reasons]
        return lines


@overload
def explain(
    query: Array | QArray,
    key: Array | QArray,
    value: Array | QArray | None,
    *,
    gpu: str | None = None,
    **options: Unpack[ExplainOptions],
) -> Explanation: ...


@overload
def explain(
    function: Callable[..., Any], /, *arguments: Any, gpu: str | None = None, **options: Any
) -> Explanation: ...


def explain(*arguments: Any, gpu: str | None = None, **options: Any) -> Explanation:
    """Explains what a call would run, of `flash_attention` or of a function; runs nothing.

    `explain(query, key, value, **options)` is of `flash_attention`, forward and backward.
    `explain(function, *arguments, **options)` traces function(*arguments, **options), and is of all
    calls of jax_flash in it: of `decode_attention`, of `ragged_paged_attention`, or of a model's
    step, jitted or not. Gradients are explained where the function computes them.

    Arguments:
      arguments, options: of `flash_attention`, or the function and its own. Arrays, or
        `jax.ShapeDtypeStruct` in place of any.
      gpu: a GPU to explain for: a model, such as "H200" or "RTX 4090", or the name that its driver
        reports; None takes the one present.

    Returns: the Explanation; print it. The CUDA of a `score_mod` is its `source`.

    Raises:
      TypeError, ValueError, NotImplementedError: as the call; ValueError, with the names that are
        known, for a GPU of unknown name, and for a function without a call that kernels may run.

    Examples:
      >>> import jax, jax_flash
      >>> q = jax.ShapeDtypeStruct((2, 4096, 16, 128), "bfloat16")
      >>> print(jax_flash.explain(q, q, q, is_causal=True, gpu="H200"))  # doctest: +SKIP
      >>> query = jax.ShapeDtypeStruct((8, 1, 32, 128), "bfloat16")
      >>> cache = jax.ShapeDtypeStruct((8, 4096, 8, 128), "bfloat16")
      >>> lengths = jax.ShapeDtypeStruct((8,), "int32")
      >>> decode = jax_flash.decode_attention
      >>> jax_flash.explain(decode, query, cache, cache, lengths).passes[0].name
      'decode'
    """
    spec = _gpu.spec.present() if gpu is None else _gpu.spec.named(gpu)
    if arguments and callable(arguments[0]):
        return _of_function(spec, *arguments, **options)
    given = _prepare(*arguments, **options)
    problem, rewrites, float8 = given.problem, given.rewrites, given.float8
    q, k, v, *terms = given.operands
    shapes = Shapes.of(q, k, v, problem.name_terms(terms))
    backend = options.get("backend")
    calls = (
        passes(problem, backend, value_dim=given.value_dim)
        if float8 is None
        else float8.passes(problem, backend, shapes.head_dim)
    )
    reports = [
        report for name, call in calls.items() for report in _reports(name, call, shapes, spec)
    ]
    if "backward" not in calls:
        reasons = dict.fromkeys(_backends.BACKENDS, ("arguments of float8 have no derivative",))
        reports.append(PassReport("backward", calls["forward"], shapes, "none", reasons))
    return _explanation(spec, rewrites, reports)


def _of_function(
    gpu: _gpu.GpuSpec | None, function: Callable[..., Any], /, *arguments: Any, **options: Any
) -> Explanation:
    with _backends.traced_for_any():
        graph = Graph.of(function, arguments, options)
        found = {
            (node.name, call, *_avals(graph, node), node.place): node
            for node in graph.equations("flash_")
            if isinstance(call := node.equation.params.get("call"), Call)
        }
        reports = [x for node in found.values() for x in _of_node(graph, node, gpu)]
    if not reports:
        name = getattr(function, "__name__", type(function).__name__)
        raise ValueError(
            f"function {name} has no call that kernels may run; expected one that calls "
            "flash_attention, decode_attention or ragged_paged_attention, on arrays that are not "
            "empty"
        )
    return _explanation(gpu, (), reports)


def _explanation(
    gpu: _gpu.GpuSpec | None, rewrites: tuple[str, ...], reports: Sequence[PassReport]
) -> Explanation:
    kernels = [report.kernel for report in reports if report.kernel is not None]
    lines = ("lines",) if any(x.plan.constants.get("kScoreIsLine") for x in kernels) else ()
    return Explanation(gpu, (*rewrites, *lines), tuple(reports))


def _avals(graph: Graph, node: Node) -> tuple[jax.ShapeDtypeStruct, ...]:
    avals = (x.aval for x in graph.inputs(node))
    return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals)


def _of_node(graph: Graph, node: Node, gpu: _gpu.GpuSpec | None) -> Iterator[PassReport]:
    call, operands = node.equation.params["call"], _avals(graph, node)
    if node.name == "flash_tangent":
        operands = operands[: len(call.operands)]
        others = (x for x in _backends.BACKENDS if x != "xla")
        reasons = dict.fromkeys(others, ("no kernels compute tangents",))
        shapes = call.shapes(call.name_operands(operands))
        yield PassReport("tangent", call, shapes, "xla", reasons, place=node.place)
        return
    shapes = call.shapes(call.name_operands(operands))
    for report in _reports(call.target, call, shapes, gpu, operands):
        yield dataclasses.replace(report, place=node.place)


def _reports(
    name: str,
    call: Call,
    shapes: Shapes,
    gpu: _gpu.GpuSpec | None,
    operands: Sequence[jax.ShapeDtypeStruct] | None = None,
) -> list[PassReport]:
    """Explains a pass, once for each call of kernels; operands tell more of them than sizes do."""
    backend, refusals = _backends.pick(call, shapes, gpu)
    made = PassReport(name, call, shapes, backend, refusals)
    if backend != "cuda" or gpu is None or shapes.empty:
        return [made]
    reports = []
    for taken, sizes in _kernels(call, shapes, gpu, operands):
        plans = _gpu.plans(taken, sizes, gpu)
        try:
            kernels = [*map(compile_plan, plans)]
        except _native.CompileError as error:
            reason = _backends.refused(call, error)
            return [
                dataclasses.replace(made, backend="xla", refusals=refusals | {"cuda": (reason,)})
            ]
        other = None if (taken, sizes) == (call, shapes) else (taken, sizes)
        rest = kernels[1] if len(kernels) > 1 else None
        reports.append(dataclasses.replace(made, kernel=kernels[0], rest=rest, taken=other))
    return reports


def _kernels(
    call: Call,
    shapes: Shapes,
    gpu: _gpu.GpuSpec,
    operands: Sequence[jax.ShapeDtypeStruct] | None,
) -> list[tuple[Call, Shapes]]:
    """Lists the calls that a GPU's kernels run for a pass, and their sizes."""
    if operands is None:
        call = _backends.in_kernels(call, shapes, gpu)
        other = call.instead(shapes) if _gpu.refuse(call, shapes, gpu) else None
        return [other or (call, shapes)]
    found = []

    def kernel(call: Call, *operands: jax.Array) -> tuple[jax.Array, ...]:
        found.append((call, call.shapes(call.name_operands(operands))))
        return tuple(jnp.zeros(x.shape, x.dtype) for x in _backends.results_of(call, operands))

    jax.eval_shape(functools.partial(_backends.run_kernels, kernel, call, gpu), *operands)
    return found


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


_OF_REQUESTS = ("prefill", "common")
_NOT_PREPARED = ("return_lse", "return_amax", "backend")
# The arguments that may be arrays; of the options, those that `Float8Options` has as such.
_ARRAYS = {"query", "key", "value"}
_ARRAYS |= {name for name, kind in get_type_hints(Float8Options).items() if A in get_args(kind)}


def _prepare(*arguments: Any, **options: Any) -> _validate.Prepared:
    """Validates as `flash_attention` does, on shapes alone."""
    signature = inspect.signature(flash_attention)
    _keywords.check("explain", options, signature.parameters)
    call = signature.bind(*arguments, **options)
    call.apply_defaults()
    given = {k: v for k, v in call.arguments.items() if k not in _NOT_PREPARED}
    for name in ("return_lse", "return_amax"):
        _validate.flag(name, call.arguments[name])
    arrays = {k: v for k, v in given.items() if k in _ARRAYS and hasattr(v, "dtype")}
    arrays |= {k: v for k, v in given.items() if isinstance(v, BlockMask)}
    if not isinstance(arrays.get("scale"), jax.ShapeDtypeStruct | jax.Array):
        arrays.pop("scale", None)  # a number
    arrays = {k: np.asarray(v) if isinstance(v, np.generic) else v for k, v in arrays.items()}
    static = {k: v for k, v in given.items() if k not in arrays}
    found: list[_validate.Prepared] = []

    def prepare(arrays: dict[str, Any]) -> Any:
        found.append(_validate.prepare(**static, **arrays))
        return found[0].operands

    operands = jax.eval_shape(prepare, arrays)
    return found[0]._replace(operands=operands)


def _describe_pass(one: PassReport) -> list[str]:
    """Says what a pass computes, and of a function's where it stands."""
    head, place = [], f", {one.place}" if one.place else ""
    if place or one.call.cached:
        head = [f"{one.name} of {one.call.function}{place}"]
    sizes = f"{one.call.problem.dtype}, {_describe_sizes(one.call, one.shapes)}"
    return [*head, sizes, f"  {_describe(one.call)}"]


def _describe_sizes(call: Call, s: Shapes) -> str:
    queries = f"{s.q_len} x {s.q_heads} heads"
    # Requests over pages lie one behind the other.
    rows = (
        f"tokens {queries}" if call.target in _OF_REQUESTS else f"batch {s.batch}, query {queries}"
    )
    keys = f"key {s.kv_len} x {s.kv_heads} heads"
    if s.page_size is not None:
        keys += f" in pages of {s.page_size}"
    return f"{rows}, {keys}, head dim {s.head_dim}, value dim {s.value_dim}"


def _describe_taken(asked: Call, taken: Call, shapes: Shapes) -> str:
    """Says what kernels compute of a pass that is another call to them."""
    text = f"{taken.target} of {_describe_sizes(taken, shapes)}"
    rotates = getattr(asked, "rotary_base", None) != getattr(taken, "rotary_base", None)
    return f"{text}, rotated ahead of it" if rotates else text


def _describe_cache(call: Call) -> list[str]:
    """Says what a call on a cache has beside its problem."""
    if not call.cached:
        return []
    parts = []
    if call.cache_dtype == "uint8":
        parts.append("packed rows")
    elif call.cache_dtype != call.problem.dtype:
        parts.append(f"cache of {call.cache_dtype}")
    if "v" not in call.operands:
        parts.append("values in keys")
    if "new_k" in call.operands:
        parts.append("new keys")
    if isinstance(call, Decode) and call.rotary_base is not None:
        parts.append(f"rotary base {call.rotary_base:g}")
    return parts


def _describe(call: Call) -> str:
    problem = call.problem
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
    parts += [x for x in terms if x != "block_bits"]
    return ", ".join([*parts, *_describe_cache(call)])


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
