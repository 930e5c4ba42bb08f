"""Owns the compiled module `_ext`: loads it, checks that it fits, registers its targets with XLA.

Nothing else imports `_ext`. A module that is missing or does not fit leaves its backends
unavailable, with a reason that says how to repair it; backend "xla" needs none of this.
Read next: cuda/runtime/bindings.cc.
"""

import functools
import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Literal

import jax

from jax_flash._version import __version__

_REPAIR = "Reinstall it: pip install --force-reinstall --no-deps jax_flash (or '.' in a checkout)."


def available(platform: Literal["cpu", "cuda"]) -> str | None:
    """Tells whether native kernels for `platform` are registered: None, or the reason why not."""
    return _load()[1].get(platform)


def kernel_root() -> Path:
    """Returns the folder with `kernels/` and `runtime/params.h`, the text that NVRTC compiles."""
    package = Path(__file__).resolve().parent
    installed = package / "_cuda"
    return installed if installed.is_dir() else package.parent / "cuda"


def misfit(ext: ModuleType, ffi_version: tuple[int, int] | None) -> str | None:
    """Compares a compiled module with the package and jaxlib's FFI version; None if it fits."""
    if ext.version != __version__:
        return (
            f"the compiled module jax_flash._ext is version {ext.version}, but the Python files "
            f"are version {__version__}. {_REPAIR}"
        )
    if ffi_version is not None and (
        ext.ffi_version[0] != ffi_version[0] or ext.ffi_version[1] > ffi_version[1]
    ):
        return (
            f"jax_flash._ext was built for XLA FFI {_dotted(ext.ffi_version)}, but the installed "
            f"jaxlib {jax.lib.__version__} has FFI {_dotted(ffi_version)}. Update jaxlib, or build "
            f"jax_flash again. {_REPAIR}"
        )
    return None


@functools.cache
def _load() -> tuple[ModuleType | None, dict[str, str]]:
    """Imports `_ext` and registers its targets, once; returns it and {platform: why not}."""
    try:
        ext = importlib.import_module("jax_flash._ext")
    except ModuleNotFoundError as error:
        if error.name != "jax_flash._ext":
            raise
        return _unavailable(f"the compiled module jax_flash._ext is missing. {_REPAIR}")
    except ImportError as error:
        return _unavailable(f"the compiled module jax_flash._ext does not load: {error}. {_REPAIR}")
    # An FFI version that jaxlib refuses would surface as "Unable to initialize backend" and take
    # all of JAX down, so it is checked before anything is registered.
    reason = misfit(ext, _installed_ffi_version())
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
