"""Which backend runs a pass of a call; each answers with the reasons why not, none for yes.

"cuda" and "cpu" are the native kernels, each for the platform of its name; "xla" is blockwise.py
and runs anything anywhere. A call that names no backend takes the first that can run it.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

from jax_flash import _gpu, _native
from jax_flash._problem import Shapes

if TYPE_CHECKING:
    from jax_flash._primitives import Forward

Decline = Callable[["Forward", Shapes, _gpu.GpuSpec], tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class Backend:
    """One way to run a call.

    Attributes:
      platforms: of the arrays that it takes; None: any.
      absent: lists why it cannot run at all on a machine with this GPU (None: without one).
      decline: lists why its kernels do not run a pass; README's support table is made from it.
    """

    platforms: tuple[str, ...] | None
    absent: Callable[[_gpu.GpuSpec | None], tuple[str, ...]]
    decline: Decline

    def refuse(self, call: Forward, shapes: Shapes, gpu: _gpu.GpuSpec | None) -> tuple[str, ...]:
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


def _decline_cpu(call: Forward, shapes: Shapes, gpu: _gpu.GpuSpec) -> tuple[str, ...]:
    if call.problem.dtype == "float64":
        return ("the CPU kernels take float32, bfloat16 and float16, not float64",)
    return ()


def _nothing(*_: object) -> tuple[str, ...]:
    return ()


BACKENDS = {
    "cuda": Backend(("cuda",), _absent_cuda, _gpu.refuse),
    "cpu": Backend(("cpu",), _absent_cpu, _decline_cpu),
    "xla": Backend(None, _nothing, _nothing),
}


def pick(
    call: Forward, shapes: Shapes, gpu: _gpu.GpuSpec | None
) -> tuple[str, dict[str, tuple[str, ...]]]:
    """Tells which backend runs a pass on a machine with this GPU (None: without one).

    Returns: the backend's name, and of all others that would not run it the reasons.

    Raises:
      ValueError: the call names a backend that is not known.
      NotImplementedError: the backend that it names cannot run it, with the reasons.
    """
    _check_name(call.backend)
    answers = {name: backend.refuse(call, shapes, gpu) for name, backend in BACKENDS.items()}
    refusals = {name: reasons for name, reasons in answers.items() if reasons}
    if call.backend in refusals:
        reasons = "; ".join(refusals[call.backend])
        raise NotImplementedError(f"backend {call.backend!r} cannot run this call: {reasons}")
    chosen = call.backend or next(name for name in BACKENDS if name not in refusals)
    return chosen, refusals


def require(call: Forward, shapes: Shapes) -> None:
    """Checks a backend's name when the call is traced, and that it can run the call here.

    Raises: as `pick`.
    """
    _check_name(call.backend)
    if call.backend is not None:
        # The arrays' platform is known when the call is lowered; backend "cpu" may be right even
        # where a GPU is present.
        pick(call, shapes, _gpu.spec.present() if call.backend == "cuda" else None)


def choose(platform: str, call: Forward, shapes: Shapes) -> str:
    """Picks the backend when a pass is lowered for a platform.

    Raises: NotImplementedError if the named backend cannot run it there.
    """
    if platform not in ("cpu", "cuda"):
        if call.backend in (None, "xla"):
            return "xla"
        raise NotImplementedError(
            f"backend {call.backend!r} cannot run this call: the arrays are on platform "
            f"{platform!r}"
        )
    gpu = _gpu.spec.for_lowering() if platform == "cuda" else None
    name, refusals = pick(call, shapes, gpu)
    if call.backend is None and platform in refusals:
        kernels = f"{platform.upper()} kernels"
        reasons = "; ".join(refusals[platform])
        warn_once(f"jax_flash runs a call without its {kernels}: {reasons}")
    return name


def _check_name(backend: str | None) -> None:
    if backend is not None and (not isinstance(backend, str) or backend not in BACKENDS):
        raise ValueError(f"backend is {backend!r}; expected None or one of {', '.join(BACKENDS)}")


@functools.cache
def warn_once(message: str) -> None:
    """Warns with a RuntimeWarning, the first time in this process that it has this to say."""
    warnings.warn(message, RuntimeWarning, stacklevel=2)
