"""Which backend runs a pass of a call, and how; each answers with its reasons why not.

"cuda" and "cpu" are the native kernels, each for the platform of its name; "cudnn" is cuDNN's
attention, on GPUs; "xla" is blockwise.py and runs anything anywhere. A call that names no backend
takes "cudnn" where that is faster, else the first of the others that can run it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from jax import lax

from jax_flash import _cudnn, _gpu, _native
from jax_flash._call import Call
from jax_flash._float8 import DTYPE
from jax_flash._problem import Shapes
from jax_flash._terms import shares_rows

Decline = Callable[[Call, Shapes, _gpu.GpuSpec], tuple[str, ...]]
Run = Callable[..., tuple[jax.Array, ...]]


@dataclasses.dataclass(frozen=True)
class Backend:
    """One way to run a call.

    Attributes:
      platforms: of the arrays that it takes; None: any.
      absent: lists why it cannot run at all on a machine with this GPU (None: without one).
      decline: lists why its kernels do not run a pass; README's support table is made from it.
      run: `run(call, *operands)` traces call.results of one device's operands.
    """

    platforms: tuple[str, ...] | None
    absent: Callable[[_gpu.GpuSpec | None], tuple[str, ...]]
    decline: Decline
    run: Run

    def refuse(self, call: Call, shapes: Shapes, gpu: _gpu.GpuSpec | None) -> tuple[str, ...]:
        """Lists all reasons why it does not run a pass on a machine with this GPU."""
        spec = gpu or _gpu.spec.for_lowering()
        return (*self.absent(gpu), *self.decline(call, shapes, spec))


def _absent_cuda(gpu: _gpu.GpuSpec | None) -> tuple[str, ...]:
    missing = _native.available("cuda")
    device = ("no CUDA device is present",) if gpu is None else ()
    return device if missing is None else (*device, missing)


def _absent_cpu(gpu: _gpu.GpuSpec | None) -> tuple[str, ...]:
    missing = _native.available("cpu")
    elsewhere = () if gpu is None else ("the arrays are on platform 'cuda'",)
    return elsewhere if missing is None else (*elsewhere, missing)


def _decline_cpu(call: Call, shapes: Shapes, gpu: _gpu.GpuSpec) -> tuple[str, ...]:
    call, shapes = call.instead(shapes) or (call, shapes)
    if "indices" in call.operands:
        return (f"the CPU kernels have {call.without_indices}",)
    if call.target == "quantise":
        return ("no CPU kernel quantises",)
    if call.problem.dtype == "float64":
        return ("the CPU kernels take float32, bfloat16 and float16, not float64",)
    if call.problem.score is not None:
        return ("the CPU kernels have no score functions",)
    if call.cached and call.cache_dtype == "uint8":
        return ("the CPU kernels have no packed rows of latent attention",)
    return ()


def _decline_cuda(call: Call, shapes: Shapes, gpu: _gpu.GpuSpec) -> tuple[str, ...]:
    call = in_kernels(call, shapes, gpu)
    reasons = _gpu.refuse(call, shapes, gpu)
    other = call.instead(shapes) if reasons else None
    return _gpu.refuse(*other, gpu) if other else reasons


def in_kernels(call: Call, shapes: Shapes, gpu: _gpu.GpuSpec) -> Call:
    """Returns the pass that CUDA kernels run for one: itself, or its fallback where none run it."""
    fallback = call.fallback
    return fallback if fallback is not None and _gpu.refuse(call, shapes, gpu) else call


def _nothing(*_: object) -> tuple[str, ...]:
    return ()


def run_kernels(
    kernel: Run, call: Call, gpu: _gpu.GpuSpec, *operands: jax.Array
) -> tuple[jax.Array, ...]:
    """Computes a pass by `kernel(call, *operands)`, of the calls that a GPU's kernels take."""
    shapes = call.shapes(call.name_operands(operands))
    others = _gpu.refuse(call, shapes, gpu)
    run = call.run_instead if others and call.instead(shapes) else call.run_kernel

    def prepared(call: Call, *operands: jax.Array) -> tuple[jax.Array, ...]:
        shapes = call.shapes(call.name_operands(operands))
        taken = in_kernels(call, shapes, gpu)
        if taken is not call:
            call, operands = call.dequantised(taken, *operands)
        if not _gpu.choose(call, shapes, gpu).rotates(shapes):
            call, operands = call.rotated(*operands)
        return kernel(call, *operands)

    return run(prepared, *operands)


def _run_cuda(call: Call, *operands: jax.Array) -> tuple[jax.Array, ...]:
    try:
        return run_kernels(_call_cuda, call, _gpu.spec.for_lowering(), *operands)
    except _native.CompileError as error:
        reason = refused(call, error)
    warn_once(f"jax_flash runs a call without its CUDA kernels: {reason}")
    return _run_xla(call, *operands)


def refused(call: Call, error: _native.CompileError) -> str:
    """Says what of a user's function the compiler refused, so that "xla" runs the call.

    Raises: the error, if the call has no function; NotImplementedError if it names its backend.
    """
    if call.problem.score is None:
        raise error
    reason = _gpu.emit.refused(call.problem.score, str(error))
    if call.backend is not None:
        raise NotImplementedError(f"backend 'cuda' cannot run this call: {reason}") from error
    return reason


def _call_cuda(call: Call, *operands: jax.Array) -> tuple[jax.Array, ...]:
    shapes = call.shapes(call.name_operands(operands))
    gpu = _gpu.spec.for_lowering()
    if call.backend is None:
        for text in _gpu.choose(call, shapes, gpu).outrun(call, gpu):
            warn_once(f"jax_flash: {text}")
    named = call.name_operands(operands)
    batch = named["q"].shape[:-3]
    for name in filter(shares_rows, named):
        if named[name].shape[: len(batch)] not in (batch, (1,) * len(batch)):
            # The kernels read a term of one batch row, or of every one.
            rest = named[name].shape[len(batch) :]
            named[name] = jnp.broadcast_to(named[name], (*batch, *rest))
    shapes = call.shapes(named)
    asked, wanted, following = shapes, results_of(call, operands), call.next
    was, (call, folded) = call, _gpu.folded(call, shapes, gpu)
    if call.target != was.target:
        named = _gpu.few_queries.operands(call, named)
    elif folded != asked:
        named, shapes = _gpu.folding.fold_operands(call, was.problem, named, folded), folded
    named = _padded(named, _gpu.padded(call, shapes, gpu))
    results = results_of(call, [*named.values()])
    calls = _gpu.calls(call, shapes, gpu)
    plans = _gpu.plans_of_folded(call, shapes, gpu)
    if _gpu.spec.present() is not None:
        _compile(plans, following, asked, gpu)
    if len(calls) == 1:
        outputs = _launch(call, plans[0], results, [*named.values()], call.aliases)
    else:
        copies, scale = _gpu.carrier.copies(call, shapes, named)
        outputs = _launch(calls[0], plans[0], results, [*copies.values(), scale])
        aliases = {len(named) + i: i for i in range(len(results))}
        outputs = _launch(
            calls[1], plans[1], results, [*named.values(), *outputs[: len(results)], scale], aliases
        )
    outputs = [
        x[..., : to.shape[-1]]
        if name.removeprefix("d") in _COLUMNS and x.shape[-1] != to.shape[-1]
        else x
        for name, x, to in zip(call.results, outputs, wanted, strict=False)
    ]
    if folded != asked:
        outputs = [
            _gpu.folding.unfold(call, name, x, to.shape)
            for name, x, to in zip(call.results, outputs, wanted, strict=True)
        ]
    # The gradient of a bias that was broadcast here is summed.
    return tuple(_sum_to(x, to.shape) for x, to in zip(outputs, wanted, strict=True))


def _compile(
    plans: Sequence[_gpu.Plan], following: Call | None, shapes: Shapes, gpu: _gpu.GpuSpec
) -> None:
    """Compiles the programs of plans, and begins those of the next pass, of these sizes.

    It belongs to the compilation of the caller's program, not to its first step. The next pass is
    folded in its own way, and may be XLA's.
    """
    others = ()
    if following and pick(following, shapes, gpu)[0] == "cuda":
        others = _gpu.plans(following, shapes, gpu)
    programs = [program for plan in plans for program in plan.programs]
    ahead = [program for plan in others for program in plan.programs]
    for program, _ in (*programs[1:], *ahead):
        _native.compile_ahead(**program)
    for program, entries in programs:
        for entry in entries:
            _native.load_kernel(**program, entry=entry)


def _launch(
    call: Call,
    plan: _gpu.Plan,
    results: Sequence[jax.ShapeDtypeStruct],
    operands: Sequence[jax.Array],
    aliases: dict[int, int] | None = None,
) -> Sequence[jax.Array]:
    """Calls the kernels of a plan: the results, and after them the scratch arrays."""
    custom_call = jax.ffi.ffi_call(
        plan.target, [*results, *plan.workspaces.values()], input_output_aliases=aliases
    )
    if call.problem.dtype == DTYPE:  # whose kernels read bits; caches have their dtype
        operands = [
            lax.bitcast_convert_type(x, jnp.uint8) if x.dtype == DTYPE else x for x in operands
        ]
    return custom_call(*operands, plan=plan.text)


# Operands, and results by the operand that they belong to, whose columns are a head's.
_COLUMNS = {"q": "head_dim", "k": "head_dim"} | dict.fromkeys(("v", "out", "dout"), "value_dim")


def _padded(named: dict[str, jax.Array], shapes: Shapes) -> dict[str, jax.Array]:
    """Adds columns of zeros to operands by name, up to these sizes."""

    def padded(x: jax.Array, columns: int) -> jax.Array:
        missing = max(columns - x.shape[-1], 0)  # packed rows have bytes, not features
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x

    return {
        name: padded(x, getattr(shapes, _COLUMNS[name])) if name in _COLUMNS else x
        for name, x in named.items()
    }


def _sum_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Sums along the dims that are 1 in a shape."""
    axes = tuple(i for i, (own, to) in enumerate(zip(x.shape, shape, strict=True)) if own != to)
    return jnp.sum(x, axes, dtype=jnp.float32, keepdims=True).astype(x.dtype) if axes else x


def _run_cudnn(call: Call, *operands: jax.Array) -> tuple[jax.Array, ...]:
    return call.run_kernel(_call_cudnn, *operands)


def _call_cudnn(call: Call, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """Runs cuDNN, and ours in its place where NaN may have come from what causality hides."""
    results = _cudnn.attend(call, *operands)
    if call.problem.window == (None, None):
        return results
    shapes = call.shapes(call.name_operands(operands))
    ours = dataclasses.replace(call, backend="cuda")
    kernels = not BACKENDS["cuda"].refuse(ours, shapes, _gpu.spec.for_lowering())
    named = zip(call.results, results, strict=True)
    finite = jnp.all(jnp.stack([jnp.isfinite(x).all() for name, x in named if name != "lse"]))
    other = functools.partial(_call_cuda if kernels else _run_xla, ours, *operands)
    return lax.cond(finite, lambda: results, lambda: tuple(other()))


def _run_cpu(call: Call, *operands: jax.Array) -> tuple[jax.Array, ...]:
    shapes = call.shapes(call.name_operands(operands))
    run = call.run_instead if call.instead(shapes) else call.run_kernel
    return run(_call_cpu, *operands)


def _call_cpu(call: Call, *operands: jax.Array) -> tuple[jax.Array, ...]:
    call, operands = call.rotated(*operands)
    call, operands = call.packed(*operands)
    custom_call = jax.ffi.ffi_call(
        f"jax_flash_cpu_{call.target}",
        results_of(call, operands),
        input_output_aliases=call.aliases,
    )
    return tuple(custom_call(*operands, **call.attributes()))


def results_of(call: Call, operands: Sequence[jax.Array]) -> list[jax.ShapeDtypeStruct]:
    """Returns the results of a call of these operands, as shapes."""
    avals = call.result_avals(call.name_operands([*map(jax.typeof, operands)]))
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]


def _run_xla(call: Call, *operands: jax.Array) -> tuple[jax.Array, ...]:
    return call.blockwise(*operands)


BACKENDS = {
    "cuda": Backend(("cuda",), _absent_cuda, _decline_cuda, _run_cuda),
    "cudnn": Backend(("cuda",), _cudnn.absent, _cudnn.decline, _run_cudnn),
    "cpu": Backend(("cpu",), _absent_cpu, _decline_cpu, _run_cpu),
    "xla": Backend(None, _nothing, _nothing, _run_xla),
}


def pick(
    call: Call, shapes: Shapes, gpu: _gpu.GpuSpec | None
) -> tuple[str, dict[str, tuple[str, ...]]]:
    """Tells which backend runs a pass on a machine with this GPU (None: without one).

    Returns:
      The backend's name, and of all others that would not run it the reasons; of "cuda" also where
      it could, and `_gpu.few_scores` says that "xla" takes less time.

    Raises:
      ValueError: the call names a backend that is not known.
      NotImplementedError: the backend that it names cannot run it, with the reasons.
    """
    _check_name(call.backend)
    answers = {name: backend.refuse(call, shapes, gpu) for name, backend in BACKENDS.items()}
    refusals = {name: reasons for name, reasons in answers.items() if reasons}
    if call.backend in refusals and not call.prepares:
        reasons = "; ".join(refusals[call.backend])
        raise NotImplementedError(f"backend {call.backend!r} cannot run this call: {reasons}")
    if gpu is not None and "cuda" not in refusals and _gpu.few_scores.takes(call, shapes, gpu):
        refusals["cuda"] = (_gpu.few_scores.REASON,)
    if call.backend is not None and call.backend not in refusals:
        return call.backend, refusals
    if gpu is not None and "cudnn" not in refusals and _cudnn.is_faster(shapes, gpu):
        return "cudnn", refusals
    return next(name for name in BACKENDS if name not in (*refusals, "cudnn")), refusals


_anywhere: ContextVar[bool] = ContextVar("_anywhere", default=False)


@contextlib.contextmanager
def traced_for_any() -> Iterator[None]:
    """Has `require` pass what is traced within, of which `pick` is asked for another GPU."""
    token = _anywhere.set(True)
    try:
        yield
    finally:
        _anywhere.reset(token)


def require(call: Call, shapes: Shapes) -> None:
    """Checks a backend's name when the call is traced, and that it can run the call here.

    Raises: as `pick`.
    """
    _check_name(call.backend)
    if call.backend is not None and not _anywhere.get():
        # The arrays' platform is known when the call is lowered; backend "cpu" may be right even
        # where a GPU is present.
        on_gpu = "cuda" in (BACKENDS[call.backend].platforms or ())
        pick(call, shapes, _gpu.spec.present() if on_gpu else None)


def choose(platform: str, call: Call, shapes: Shapes) -> str:
    """Picks the backend when a pass is lowered for a platform.

    Raises: NotImplementedError if the named backend cannot run it there.
    """
    if platform not in ("cpu", "cuda"):
        if call.backend in (None, "xla"):
            return "xla"
        raise NotImplementedError(
            f"backend {call.backend!r} cannot run this call: the arrays are on platform "
            f"{platform!r}, or it is exported for that; expected backend 'xla' there, or None"
        )
    gpu = _gpu.spec.for_lowering() if platform == "cuda" else None
    name, refusals = pick(call, shapes, gpu)
    told = name != "cudnn" and not call.prepares
    if call.backend is None and platform in refusals and told:
        # On a CPU a warning tells that there are no kernels, not what they decline: such calls run
        # as fast there as they can.
        reasons = refusals[platform] if platform == "cuda" else BACKENDS[platform].absent(None)
        if reasons and reasons != (_gpu.few_scores.REASON,):
            kernels = f"{platform.upper()} kernels"
            warn_once(f"jax_flash runs a call without its {kernels}: {'; '.join(reasons)}")
    return name


def _check_name(backend: str | None) -> None:
    if backend is not None and (not isinstance(backend, str) or backend not in BACKENDS):
        raise ValueError(f"backend is {backend!r}; expected None or one of {', '.join(BACKENDS)}")


@functools.cache
def warn_once(message: str) -> None:
    """Warns with a RuntimeWarning, the first time in this process that it has this to say."""
    warnings.warn(message, RuntimeWarning, stacklevel=2)
