"""Owns the implementations that are compared: how each is called, and what it cannot run."""

import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

import jax_flash
from jax_flash._compare.cells import Cell

OURS = "jax_flash"


class Loaded(NamedTuple):
    """A program with its inputs.

    Attributes:
      call: queues one run, and returns its results without waiting for them.
      wait: waits until these are there.
      read: their values, `[B, T, N, H]` each: out, then the gradients to query, key and value.
      memory: bytes beside arguments and results, or None where nobody tells.
    """

    call: Callable[[], Any]
    wait: Callable[[Any], Any]
    read: Callable[[Any], list[np.ndarray]]
    memory: int | None


# Inputs are query, key, value and the output's gradient, as JAX arrays.
Program = Callable[[list[jax.Array]], Loaded]
# Compiles a pass, on any thread; NotImplementedError says what the implementation cannot run.
Compile = Callable[[Cell, bool], Program]


def installed() -> dict[str, Compile]:
    """Lists what this machine has, ours first."""
    found = {OURS: _jax(_ours)}
    if jax.default_backend() == "gpu":
        found["jax.nn, cuDNN"] = _jax(_cudnn)
    found["jax.nn, XLA"] = _jax(_xla)
    if jax.default_backend() == "gpu" and importlib.util.find_spec("dew_flash_attn"):
        found["FlashAttention-3"] = _jax(_fa3)
    if importlib.util.find_spec("torch"):
        found["PyTorch"] = _torch
    return found


def _ours(cell: Cell, q: Any, k: Any, v: Any) -> Any:
    return jax_flash.flash_attention(q, k, v, is_causal=cell.causal)


def _cudnn(cell: Cell, q: Any, k: Any, v: Any) -> Any:
    if cell.dtype == "float32":
        raise NotImplementedError("cuDNN has no float32")
    return jax.nn.dot_product_attention(q, k, v, is_causal=cell.causal, implementation="cudnn")


def _xla(cell: Cell, q: Any, k: Any, v: Any) -> Any:
    return jax.nn.dot_product_attention(q, k, v, is_causal=cell.causal, implementation="xla")


def _fa3(cell: Cell, q: Any, k: Any, v: Any) -> Any:
    return importlib.import_module("dew_flash_attn").flash_mha(q, k, v, is_causal=cell.causal)


def _jax(attend: Callable[..., Any]) -> Compile:
    def compile_pass(cell: Cell, backward: bool) -> Program:
        def run(q: Any, k: Any, v: Any, dout: Any) -> tuple[Any, ...]:
            if not backward:
                return (attend(cell, q, k, v),)
            out, pull = jax.vjp(lambda *x: attend(cell, *x), q, k, v)
            return out, *pull(dout)

        arrays = [jax.ShapeDtypeStruct(shape, cell.dtype) for shape in cell.shapes]
        compiled = jax.jit(run, keep_unused=True).lower(*arrays).compile()
        needs = compiled.memory_analysis()
        memory = None if needs is None else needs.temp_size_in_bytes
        if memory is not None and memory > _room():
            raise NotImplementedError(f"would need {memory / 1e9:.0f} GB beside its arrays")
        return lambda inputs: Loaded(
            lambda: compiled(*inputs), jax.block_until_ready, _read_jax, memory
        )

    return compile_pass


def _room() -> float:
    """Returns bytes that a call may take, beyond which a CPU's process would be killed."""
    device = jax.devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    try:
        return 0.8 * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 4e9


def _read_jax(results: tuple[Any, ...]) -> list[np.ndarray]:
    return [np.asarray(x[:1]).astype(np.float64) for x in results]


def _torch(cell: Cell, backward: bool) -> Program:
    """PyTorch's scaled_dot_product_attention by what it chooses itself, in its layout."""
    torch = importlib.import_module("torch")
    on_gpu = jax.default_backend() == "gpu"
    if on_gpu and not torch.cuda.is_available():
        raise NotImplementedError("PyTorch sees no GPU")
    torch.set_num_threads(os.cpu_count() or 1)

    def load(inputs: list[jax.Array]) -> Loaded:
        # Where they lie; the copies are in PyTorch's own layout, [B, N, T, H].
        arrays = (torch.from_dlpack(x) for x in inputs)
        q, k, v, dout = (
            x.transpose(1, 2).clone(memory_format=torch.contiguous_format) for x in arrays
        )
        for x in (q, k, v):
            x.requires_grad_(backward)

        def call() -> tuple[Any, ...]:
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=cell.causal, enable_gqa=cell.heads != cell.kv_heads
            )
            return (out, *torch.autograd.grad(out, (q, k, v), dout)) if backward else (out,)

        def wait(results: Any) -> None:
            if on_gpu:
                torch.cuda.synchronize()

        def read(results: tuple[Any, ...]) -> list[np.ndarray]:
            rows = (x[:1].transpose(1, 2).detach().cpu().double() for x in results)
            return [x.numpy() for x in rows]

        memory = None
        if on_gpu:
            call()  # libraries take workspaces that they keep
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            results = call()
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
            memory = max(0, peak - sum(x.numel() * x.element_size() for x in results))
        return Loaded(call, wait, read, memory)

    return load
