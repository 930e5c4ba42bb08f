"""Owns the compiled module `_ext`: loads it, checks that it fits, registers its targets with XLA.

Nothing else imports `_ext`. A module that is missing or does not fit leaves its backends
unavailable, with a reason that says how to repair it; backend "xla" needs none of this.
Read next: ffi/bindings.cc.
"""

import atexit
import contextlib
import ctypes
import dataclasses
import filecmp
import functools
import importlib
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import jax
import jaxlib.version

from jax_flash import _terms
from jax_flash._version import __version__

logger = logging.getLogger(__name__)

_REPAIR = "Reinstall it: pip install --force-reinstall --no-deps jax_flash (or '.' in a checkout)."


def available(platform: Literal["cpu", "cuda"]) -> str | None:
    """Tells whether native kernels for `platform` can run: None, or the reason why not."""
    reason = _load()[1].get(platform)
    if reason is None and platform == "cuda" and _has_driver():
        return _find_nvrtc()[1] or None
    return reason


def targets() -> tuple[str, ...]:
    """Lists the names of the custom calls."""
    ext, _ = _load()
    handlers = {} if ext is None else ext.targets()
    return tuple(name for of_platform in handlers.values() for name in of_platform)


def kernel_root() -> Path:
    """Returns the folder with `kernels/`, which NVRTC compiles."""
    package = Path(__file__).parent
    installed = package / "_cuda"
    return installed if installed.is_dir() else package.parent / "cuda"


def misfit(ext: Any, ffi_version: tuple[int, int] | None, version: str = __version__) -> str | None:
    """Compares a compiled module with the package and jaxlib's FFI version; None if it fits."""
    if ext.version != version:
        return (
            f"the compiled module jax_flash._ext is version {ext.version}, but the Python files "
            f"are version {version}. {_REPAIR}"
        )
    if ext.terms() != _terms.rows():
        return (
            f"the compiled module jax_flash._ext knows the terms {', '.join(ext.terms())}, but the "
            f"Python files {', '.join(_terms.rows())}. {_REPAIR}"
        )
    if ffi_version is not None and (
        ext.ffi_version[0] != ffi_version[0] or ext.ffi_version[1] > ffi_version[1]
    ):
        return (
            f"jax_flash._ext was built for XLA FFI {_dotted(ext.ffi_version)}, but the installed "
            f"jaxlib {jaxlib.version.__version__} has FFI {_dotted(ffi_version)}. "
            f"Update jaxlib, or build jax_flash again. {_REPAIR}"
        )
    return None


def kernel_sources() -> dict[str, str]:
    """Reads the kernels' text, named as `#include` spells it."""
    kernels = kernel_root() / "kernels"
    return {
        path.relative_to(kernels).as_posix(): path.read_text() for path in kernels.glob("**/*.cuh")
    }


@dataclasses.dataclass(frozen=True)
class CompiledKernel:
    """What NVRTC made of one program."""

    cubin: bytes
    log: str  # of NVRTC and ptxas: registers, shared memory, spills, warnings
    seconds: float  # spent in this process; a cached program costs about a millisecond
    from_disk: bool


class CompileError(RuntimeError):
    """NVRTC refused a program; the text holds its log."""


def compile_kernel(source: str, header: str, arch: str) -> CompiledKernel:
    """Compiles a CUDA program, or finds it in the caches; needs NVRTC, but no GPU and no driver.

    Ctrl-C interrupts the wait for it, though not NVRTC, which goes on on a thread of its own.

    Args:
      source: the file that holds the kernel, relative to `kernels/`.
      header: the constexpr definitions in front of it.
      arch: what to compile for, such as "sm_90a".

    Raises:
      CompileError: the program does not compile.
      RuntimeError: NVRTC is missing, for instance.
    """
    _wait(source, header, arch)
    with _telling_compile_errors():
        return CompiledKernel(*_cuda().cuda_compile(source, header, arch))


def compile_ahead(source: str, header: str, arch: str) -> None:
    """Starts what `compile_kernel` does, and returns; who asks for the program later waits for it.

    What fails is told to them.
    """
    _cuda().cuda_start(source, header, arch)


def load_kernel(source: str, header: str, arch: str, entry: str) -> None:
    """Compiles as `compile_kernel` does and loads the entry point into the driver.

    Raises:
      CompileError, RuntimeError: as `compile_kernel`, or there is no driver, or it refuses the
        program.
    """
    _wait(source, header, arch)
    with _telling_compile_errors():
        _cuda().cuda_load(source, header, arch, entry)


_LONG = 3.0  # seconds, from which on a user is told what is going on


def _wait(source: str, header: str, arch: str) -> None:
    """Waits for a program in steps, between which Python sees a Ctrl-C."""
    begun, told = time.monotonic(), False
    while not _cuda().cuda_wait(source, header, arch, 0.1):
        if not told and time.monotonic() - begun > _LONG:
            told = True
            function = ", with a function of scores," if "score_value(" in header else ""
            print(f"jax_flash: {source}{function} is being compiled for {arch}.", file=sys.stderr)


@contextlib.contextmanager
def _telling_compile_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if re.match(r"NVRTC [\d.]+ failed on ", str(error)):  # of jit.cc
            raise CompileError(str(error)) from None
        raise


@atexit.register
def _finish_compiling() -> None:
    """Waits for programs under way: NVRTC would go on in memory that is being torn down."""
    last = getattr(sys, "last_value", None)
    if isinstance(last, KeyboardInterrupt) and not hasattr(sys, "ps1"):
        return  # of a script: Python ends it by the signal, without that
    try:
        while _cuda_is_configured and not _cuda().cuda_wait_for_all(0.1):
            pass
    except KeyboardInterrupt:
        os._exit(128 + signal.SIGINT)


def configure_cuda(
    cache: Path | None, cache_bytes: int, sources: dict[str, str] | None = None
) -> None:
    """Tells the compiled module where NVRTC, the kernels' source and the cache are.

    Args:
      cache: folder for compiled kernels; None keeps none on disk.
      cache_bytes: bound on that folder's size; the least recently used kernels go first.
      sources: text of every file, named as `#include` spells it; None reads the kernels'.

    Raises:
      RuntimeError: the compiled module is missing or has no CUDA half.
    """
    global _cuda_is_configured
    ext, reasons = _load()
    if ext is None or "cuda" in reasons:
        raise RuntimeError(reasons["cuda"])
    nvrtc, error = _find_nvrtc()
    folder = "" if cache is None else str(cache)
    if sources is None:
        sources = kernel_sources()
    ext.cuda_configure(nvrtc, error, sources, folder, cache_bytes)
    _cuda_is_configured = True


def pretend_multiprocessors(count: int) -> None:
    """Lets tests launch as on a GPU of so many multiprocessors; 0: as many as there are."""
    _cuda().cuda_pretend_multiprocessors(count)


# Room for several hundred kernels of 50 to 500 KB.
CACHE_BYTES = 256 << 20

_cuda_is_configured = False


def cache_folder() -> Path | None:
    """Returns where compiled kernels are kept; None: nowhere.

    JAX_FLASH_CACHE_DIR names the folder, "" means nowhere. Without it the folder is `jax_flash` in
    XDG_CACHE_HOME, if that is an absolute path (XDG Base Directory Specification), or in ~/.cache.
    What cannot be a folder's name means nowhere: of a user without a home, or no UTF-8.
    """
    chosen = os.environ.get("JAX_FLASH_CACHE_DIR")
    if chosen == "":
        return None
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    default = (base if base.is_absolute() else Path("~/.cache")) / "jax_flash"
    try:
        folder = Path(chosen or default).expanduser().absolute()
        str(folder).encode()
    except (RuntimeError, OSError, UnicodeEncodeError) as error:
        if chosen is not None:
            logger.warning("JAX_FLASH_CACHE_DIR is ignored, no kernel is kept on disk: %s", error)
        return None
    return folder


def _cuda() -> ModuleType:
    if not _cuda_is_configured:
        configure_cuda(cache_folder(), CACHE_BYTES)
    ext, _ = _load()
    if ext is None:
        raise RuntimeError("jax_flash._ext is not loaded")
    return ext


def _find_nvrtc() -> tuple[str, str]:
    """Finds libnvrtc: returns (its path, ""), or ("", why there is none and what to do)."""
    chosen = os.environ.get("JAX_FLASH_NVRTC")
    if not chosen:
        return _find_installed_nvrtc()
    try:
        chosen.encode()
    except UnicodeEncodeError as error:
        return "", f"JAX_FLASH_NVRTC is no name of a file: {error}."
    return chosen, ""


@functools.cache
def _find_installed_nvrtc() -> tuple[str, str]:
    repair = (
        "jax_flash compiles its CUDA kernels with NVRTC, which jax[cuda12] and jax[cuda13] bring "
        "(alone: pip install nvidia-cuda-nvrtc); JAX_FLASH_NVRTC may name a libnvrtc.so to use."
    )
    try:
        pathfinder = importlib.import_module("cuda.pathfinder")
    except ModuleNotFoundError:
        return "", f"the Python package cuda-pathfinder is not installed. {repair}"
    try:
        return pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path, ""
    except pathfinder.DynamicLibNotFoundError:
        return "", f"libnvrtc was not found. {repair}"


@functools.cache
def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@functools.cache
def _load() -> tuple[ModuleType | None, dict[str, str]]:
    """Imports `_ext` and registers its targets, once; returns it and {platform: why not}."""
    try:
        ext, version = _import()
    except ModuleNotFoundError as error:
        if error.name != "jax_flash._ext":
            raise
        return _unavailable(_missing())
    except ImportError as error:
        return _unavailable(f"the compiled module jax_flash._ext does not load: {error}. {_REPAIR}")
    # An FFI version that jaxlib refuses would surface as "Unable to initialize backend" and take
    # all of JAX down, so it is checked before anything is registered.
    reason = misfit(ext, _installed_ffi_version(), version)
    if reason:
        return _unavailable(reason)
    targets = ext.targets()
    for platform, handlers in targets.items():
        for name, handler in handlers.items():
            jax.ffi.register_ffi_target(name, handler, platform=platform)
    built = {platform.lower() for platform in targets}
    return ext, {
        platform: f"this build of jax_flash has no {platform} kernels"
        for platform in ("cpu", "cuda")
        if platform not in built
    }


def _import() -> tuple[ModuleType, str]:
    """Imports `_ext` from beside these files, or from an installed package of the same ones.

    Python that is started in a checkout takes its source files, which have no module unless one was
    built there, before the installed ones.

    Returns: the module, and the version that it should have: `_version.py` alone may differ.
    """
    try:
        return importlib.import_module("jax_flash._ext"), __version__
    except ModuleNotFoundError as error:
        package = _package()
        installed = _installed_package(package)
        if error.name != "jax_flash._ext" or not installed or _differing(package, installed):
            raise
        importlib.import_module("jax_flash").__path__.append(str(installed))
        ext = importlib.import_module("jax_flash._ext")
        return ext, ext.version


def _differing(package: Path, installed: Path) -> str | None:
    """Finds a Python file of which two packages have not the same text; None: there is none."""
    names = {
        path.relative_to(folder).as_posix()
        for folder in (package, installed)
        for path in folder.glob("**/*.py")
    }
    for name in sorted(names - {"_version.py"}):
        paths = package / name, installed / name
        if not all(path.is_file() for path in paths) or not filecmp.cmp(*paths, shallow=False):
            return name
    return None


def _package() -> Path:
    return Path(__file__).resolve().parent


def _missing() -> str:
    """Says where the compiled module is missing and what to do."""
    package = _package()
    checkout = package.parent
    if not (checkout / "CMakeLists.txt").is_file():
        return f"the compiled module jax_flash._ext is missing from {package}. {_REPAIR}"
    found = (
        "the compiled module jax_flash._ext is missing: "
        f"jax_flash was imported from the source folder {package}, which has none"
    )
    build = f"cmake -S {checkout} -B {checkout / 'build'} && cmake --build {checkout / 'build'}"
    installed = _installed_package(package)
    if installed is None:
        return (
            f"{found}, and no jax_flash is installed. Install it: pip install {checkout}; "
            f"or build the module in place: {build}"
        )
    return (
        f"{found}. The installed package, {installed}, has another {_differing(package, installed)}"
        ". To use that package, run Python in another folder or as python -P (python -P -m pytest),"
        f" without {checkout} in PYTHONPATH; to use the source folder, install it: pip install "
        f"{checkout}; or build the module in place: {build}"
    )


def _installed_package(package: Path) -> Path | None:
    """Finds a jax_flash on Python's path that is another folder and has a compiled module."""
    for entry in sys.path:
        folder = (Path(entry) / "jax_flash").resolve()
        if folder != package and any(
            (folder / f"_ext{suffix}").is_file() for suffix in EXTENSION_SUFFIXES
        ):
            return folder
    return None


def _unavailable(reason: str) -> tuple[None, dict[str, str]]:
    return None, {"cpu": reason, "cuda": reason}


def _installed_ffi_version() -> tuple[int, int] | None:
    """Reads XLA's FFI version from the header that jaxlib ships; None where there is no header."""
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    if not header.is_file():
        return None
    text = header.read_text()
    numbers = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    major, minor = (int(number[1]) if number else 0 for number in numbers)
    return major, minor


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


_load()
# A program from jax.export calls the handlers without lowering anything here, so where a GPU may be
# the compiler is made ready at import. Elsewhere it waits until it is asked for.
if available("cuda") is None and _has_driver():
    _cuda()
