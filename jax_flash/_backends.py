"""Which backend runs a problem; each answers yes, or the reason why not.

"cuda" and "cpu" are the native kernels, each for the platform of its name; "xla" is blockwise.py
and runs anything anywhere. A call that names no backend takes the first that can run it.
"""

import functools
import warnings

from jax_flash import _native, _tiles
from jax_flash._problem import Problem, Shapes

NAMES = ("cuda", "cpu", "xla")


def pick(
    problem: Problem, shapes: Shapes, gpu: _tiles.GpuSpec | None, backend: str | None
) -> tuple[str, dict[str, str]]:
    """Tells which backend runs a problem on a machine with this GPU (None: without one).

    Returns: the backend's name, and for those that were asked and refused, the reason.

    Raises:
      ValueError: the name is not known.
      NotImplementedError: the named backend cannot run the problem, with the reason.
    """
    platform = "cpu" if gpu is None else "cuda"
    if backend is not None:
        _check_name(backend)
        reason = _refusal(backend, platform, problem, shapes, gpu)
        if reason is not None:
            raise NotImplementedError(f"backend {backend!r} cannot run this call: {reason}")
        return backend, {}
    reasons: dict[str, str] = {}
    for name in NAMES:
        reason = _refusal(name, platform, problem, shapes, gpu)
        if reason is None:
            return name, reasons
        reasons[name] = reason
    raise AssertionError("backend 'xla' runs everything")


def require(backend: str | None, problem: Problem, shapes: Shapes) -> None:
    """Checks a backend's name when the call is traced, and that it can run the problem here.

    Raises:
      ValueError: the name is not known.
      NotImplementedError: the backend cannot run the problem, with the reason.
    """
    if backend is None:
        return
    _check_name(backend)
    # The arrays' platform is known when the call is lowered; backend "cpu" may be right even
    # where a GPU is present.
    gpu = _tiles.present_gpu() if backend == "cuda" else None
    pick(problem, shapes, gpu, backend)


def _check_name(backend: str) -> None:
    if not isinstance(backend, str) or backend not in NAMES:
        raise ValueError(f"backend is {backend!r}; expected None or one of {', '.join(NAMES)}")


def choose(backend: str | None, platform: str, problem: Problem, shapes: Shapes) -> str:
    """Picks the backend when the call is lowered for a platform.

    Raises: NotImplementedError if the named backend cannot run the problem there.
    """
    if platform not in ("cpu", "cuda"):
        if backend in (None, "xla"):
            return "xla"
        raise NotImplementedError(
            f"backend {backend!r} cannot run this call: the arrays are on platform {platform!r}"
        )
    gpu = None
    if platform == "cuda":
        gpu = _tiles.lowering_gpu()
    name, reasons = pick(problem, shapes, gpu, backend)
    if platform in reasons:
        kernels = f"{platform.upper()} kernels"
        warn_once(f"jax_flash runs a call without its {kernels}: {reasons[platform]}")
    return name


def _refusal(
    backend: str, platform: str, problem: Problem, shapes: Shapes, gpu: _tiles.GpuSpec | None
) -> str | None:
    match backend:
        case "cuda":
            if gpu is None:
                return "no CUDA device is present"
            return _native.available("cuda") or _tiles.supports(problem, shapes, gpu)
        case "cpu":
            if platform != "cpu":
                return f"the arrays are on platform {platform!r}"
            if problem.dtype == "float64":
                return "the CPU kernels take float32, bfloat16 and float16, not float64"
            return _native.available("cpu")
        case _:
            return None


@functools.cache
def warn_once(message: str) -> None:
    """Warns with a RuntimeWarning, the first time in this process that it has this to say."""
    warnings.warn(message, RuntimeWarning, stacklevel=2)
