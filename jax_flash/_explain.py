"""Owns `explain`: which backend, kernel and tiles a call would get, and what the compiler says.

Needs no GPU: tiles are chosen for a named one, and NVRTC compiles for it anywhere.
Read next: `_backends.py`, `_tiles.py`.
"""

import dataclasses
import inspect
import re
from typing import Any

import jax
import numpy as np

from jax_flash import _backends, _native, _tiles, _validate
from jax_flash._problem import Problem, Shapes
from jax_flash.attention import flash_attention


@dataclasses.dataclass(frozen=True)
class EntryReport:
    """What ptxas reported of one kernel entry point."""

    name: str
    registers: int
    shared_bytes: int  # static; the tiles say how much is added at launch
    stack_bytes: int
    spill_bytes: int  # stored and loaded


@dataclasses.dataclass(frozen=True)
class KernelReport:
    """One compiled CUDA program."""

    tiles: _tiles.Tiles
    entries: tuple[EntryReport, ...]
    warnings: tuple[str, ...]  # of ptxas: wgmma serialised, setmaxnreg ignored
    seconds: float
    from_disk: bool
    error: str | None = None  # why it was not compiled


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """What a call of `flash_attention` would run; printing it shows all of it.

    Attributes:
      problem, shapes: what is computed.
      gpu: the GPU it was explained for, or None.
      backend: the backend that runs it.
      refusals: why the others do not, by backend.
      kernels: the CUDA programs, by pass: "forward", "backward". Empty unless backend is "cuda"
        and there is something to compute.
    """

    problem: Problem
    shapes: Shapes
    gpu: _tiles.GpuSpec | None
    backend: str
    refusals: dict[str, str]
    kernels: dict[str, KernelReport]

    def __repr__(self) -> str:
        s = self.shapes
        where = f" on {self.gpu.name} ({self.gpu.arch})" if self.gpu is not None else ""
        lines = [
            f"{self.problem.dtype}, batch {s.batch}, query {s.q_len} x {s.q_heads} heads, "
            f"key {s.kv_len} x {s.kv_heads} heads, head dim {s.head_dim}, value dim {s.value_dim}",
            f"  {_describe(self.problem)}",
            f"backend: {self.backend}{where}",
        ]
        if s.empty:
            lines.append("  nothing to compute: an array is empty")
        lines += [f"  not {name}: {reason}" for name, reason in self.refusals.items()]
        for name, kernel in self.kernels.items():
            lines += _describe_kernel(name, kernel)
        return "\n".join(lines)


def explain(
    query: Any,
    key: Any,
    value: Any,
    *,
    gpu: str | None = None,
    **options: Any,
) -> Explanation:
    """Explains what `flash_attention(query, key, value, **options)` would run; runs nothing.

    Args:
      query, key, value: arrays or `jax.ShapeDtypeStruct`, as for `flash_attention`; so are the
        arrays among the options.
      gpu: name of a GPU to explain for, such as "H200"; None takes the one present.
      options: of `flash_attention`.

    Returns: the Explanation; print it.

    Raises:
      TypeError, ValueError, NotImplementedError: as `flash_attention`; ValueError for a GPU of
        unknown name.

    Example:
      >>> import jax, jax_flash
      >>> q = jax.ShapeDtypeStruct((2, 4096, 16, 128), "bfloat16")
      >>> print(jax_flash.explain(q, q, q, is_causal=True, gpu="H200"))  # doctest: +SKIP
    """
    spec = _tiles.present_gpu() if gpu is None else _tiles.gpu_named(gpu)
    problem, operands = _prepare(query, key, value, options)
    shapes = Shapes.of(*operands[:3])
    backend, refusals = _backends.pick(problem, shapes, spec, options.get("backend"))
    kernels = {}
    if backend == "cuda" and spec is not None and not shapes.empty:
        tiles = _tiles.choose_tiles(problem, shapes, spec)
        kernels["forward"] = report(tiles, tiles.header(problem), spec)
        tiles = _tiles.choose_backward_tiles(problem, shapes, spec)
        kernels["backward"] = report(tiles, tiles.header(problem, with_dlse=False), spec)
    return Explanation(problem, shapes, spec, backend, refusals, kernels)


def report(tiles: _tiles.Tiles, header: str, gpu: _tiles.GpuSpec) -> KernelReport:
    """Compiles the program of some tiles, or takes it from the cache, and reads the log."""
    try:
        kernel = _native.compile_kernel(tiles.source, header, gpu.arch)
    except RuntimeError as error:
        return KernelReport(tiles, (), (), 0.0, False, str(error))
    return KernelReport(
        tiles, read_entries(kernel.log), read_warnings(kernel.log), kernel.seconds, kernel.from_disk
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


_ARRAYS = (
    "query", "key", "value", "bias", "mask", "query_seq_lengths", "key_value_seq_lengths",
    "query_segment_ids", "key_value_segment_ids", "sinks", "dropout_key",
)  # fmt: skip


def _prepare(query: Any, key: Any, value: Any, options: dict[str, Any]) -> tuple[Problem, Any]:
    """Validates as `flash_attention` does, on shapes alone."""
    signature = inspect.signature(flash_attention)
    call = signature.bind(query, key, value, **options)
    call.apply_defaults()
    arguments = {k: v for k, v in call.arguments.items() if k not in ("return_lse", "backend")}
    _validate.flag("return_lse", call.arguments["return_lse"])
    arrays = {k: v for k, v in arguments.items() if k in _ARRAYS and hasattr(v, "dtype")}
    arrays = {k: np.asarray(v) if isinstance(v, np.generic) else v for k, v in arrays.items()}
    static = {k: v for k, v in arguments.items() if k not in arrays}
    found: list[Problem] = []

    def prepare(arrays: dict[str, Any]) -> Any:
        problem, operands = _validate.prepare(**static, **arrays)
        found.append(problem)
        return operands

    operands = jax.eval_shape(prepare, arrays)
    return found[0], operands


def _describe(problem: Problem) -> str:
    left, right = problem.window
    parts = [f"scale {problem.scale:.6g}"]
    if right == 0:
        parts.append("causal")
    if left is not None or right not in (None, 0):
        parts.append(f"window ({left}, {right})")
    if problem.bottom_right:
        parts.append("aligned bottom-right")
    if problem.softcap is not None:
        parts.append(f"softcap {problem.softcap:g}")
    if problem.dropout_rate:
        parts.append(f"dropout {problem.dropout_rate:g}")
    if problem.deterministic:
        parts.append("deterministic")
    return ", ".join([*parts, *problem.terms])


def _describe_kernel(name: str, kernel: KernelReport) -> list[str]:
    numbers = dataclasses.asdict(kernel.tiles)
    lines = [f"{name}: {kernel.tiles.source}"]
    lines.append("  " + ", ".join(f"{key} {value}" for key, value in numbers.items()))
    if not kernel.tiles.tma_loads:
        lines.append("  rows loaded by warps: 8 does not divide both dims, as TMA needs")
    if kernel.error is not None:
        return [*lines, f"  not compiled: {kernel.error}"]
    for entry in kernel.entries:
        shared = entry.shared_bytes
        if entry.name == kernel.tiles.entries[0]:
            shared += kernel.tiles.shared_bytes
        spills = f"{entry.spill_bytes} bytes of spills" if entry.spill_bytes else "no spills"
        lines.append(
            f"  {entry.name}: {entry.registers} registers, {shared / 1024:.1f} KB of shared "
            f"memory, {spills}"
        )
    lines += [f"  warning: {warning}" for warning in kernel.warnings]
    origin = "from the disk cache" if kernel.from_disk else "compiled"
    return [*lines, f"  {origin} in {kernel.seconds:.2f} s"]
