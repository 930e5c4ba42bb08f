"""Owns the implementations that are measured: how each is called, and what it cannot run."""

import dataclasses
import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_flash

from .shapes import ARRAYS, Cell, Pass

Call = Callable[[], Any]  # queues one run, returns its results without waiting for them
XLA_SCORES = 8 << 30  # bytes of [B, N, T, T] in float32 beyond which XLA's attention is not asked


@dataclasses.dataclass(frozen=True)
class Program:
    """One pass of a cell, compiled.

    `load` takes the inputs and returns the call to be timed: of a Cell q, k, v, dout `[B, T, N, H]`
    in NumPy, of a Case its operands by name as JAX arrays.
    """

    load: Callable[[Any], Call]
    scratch_mb: float | None = None  # beside arguments and results, as XLA plans it
    read: Callable[[Any], tuple[Any, ...]] = tuple  # a call's results `[B, T, N, H]`, for JAX


@dataclasses.dataclass(frozen=True)
class Peer:
    """One implementation.

    `compile` may run on any thread and before there are inputs. Raises NotImplementedError with the
    reason for a cell that it cannot run.
    """

    name: str
    label: str
    color: str
    compile: Callable[[Any, Pass], Program]  # of a Cell, or of a Case
    wait: Callable[[Any], Any]  # until the results of a call are there
    attend: Callable[..., Any] | None = None  # of a Cell, q, k, v: attention in JAX


def all_peers() -> list[Peer]:
    """Lists the peers that this machine has."""
    peers = [
        _jax_peer("jax_flash", "jax_flash", "#c0392b", attend_flash),
        _deterministic_peer(),
        _family_peer("sm80", "jax_flash, mma.sync", "#f1948a"),
        _jax_peer("jax_cudnn", "jax.nn, cuDNN", "#4c72b0", _attend_cudnn),
        _jax_peer("jax_xla", "jax.nn, XLA", "#8c8c8c", _attend_xla),
    ]
    others = (
        ("dew_flash_attn", "fa3", "FlashAttention-3", "#937860", _attend_fa3),
        ("flash_attn3_jax", "fa3_128", "flash-attn3-jax", "#c8a27a", _attend_fa3_128),
        ("fa4_jax", "fa4", "FlashAttention-4", "#64b5cd", _attend_fa4),
    )
    peers += [
        _jax_peer(name, label, color, attend)
        for package, name, label, color, attend in others
        if importlib.util.find_spec(package) is not None
    ]
    if importlib.util.find_spec("torch") is not None:
        peers.append(_torch_peer("torch_flash", "PyTorch, FlashAttention-2", "#55a868"))
        peers.append(_torch_peer("torch_cudnn", "PyTorch, cuDNN", "#8172b3"))
    return peers


def _jax_peer(name: str, label: str, color: str, attend: Callable[..., Any]) -> Peer:
    def compile_call(cell: Cell, of: Pass) -> Program:
        heads = (cell.heads, cell.kv_heads, cell.kv_heads, cell.heads)
        dims = (cell.head_dim, cell.head_dim, cell.columns, cell.columns)
        operands = {
            name: jax.ShapeDtypeStruct((cell.batch, cell.length, n, dim), jnp.bfloat16)
            for name, n, dim in zip(ARRAYS, heads, dims, strict=True)
        }
        program = compile_jax(
            lambda given: attend(cell, given["q"], given["k"], given["v"]),
            operands,
            ARRAYS[:3],
            of,
        )
        return dataclasses.replace(
            program, load=lambda inputs: program.load(dict(zip(ARRAYS, inputs, strict=True)))
        )

    return Peer(name, label, color, compile_call, jax.block_until_ready, attend)


def compile_jax(
    attend: Callable[[dict[str, Any]], Any],
    operands: Mapping[str, jax.ShapeDtypeStruct],
    gradients: Sequence[str],
    of: Pass,
) -> Program:
    """Compiles a pass of attention of named operands, "dout" among them.

    Its call returns out, then for training the gradients to the operands that are named.
    """
    names = [name for name in operands if of == "training" or name != "dout"]

    def run(*arrays: Any) -> tuple[Any, ...]:
        given = dict(zip(names, arrays, strict=True))
        if of == "forward":
            return (attend(given),)
        dout = given.pop("dout")
        out, backward = jax.vjp(
            lambda *of: attend(given | dict(zip(gradients, of, strict=True))),
            *(given[name] for name in gradients),
        )
        return out, *backward(dout)

    compiled = jax.jit(run).lower(*(operands[name] for name in names)).compile()

    def load(inputs: Mapping[str, Any]) -> Call:
        arrays = [jnp.asarray(inputs[name]) for name in names]
        return lambda: compiled(*arrays)

    needs = compiled.memory_analysis()
    return Program(load, None if needs is None else round(needs.temp_size_in_bytes / 1e6, 1))


def _deterministic_peer() -> Peer:
    attend = functools.partial(attend_flash, deterministic=True)
    peer = _jax_peer("jax_flash_deterministic", "jax_flash, deterministic", "#e59866", attend)

    def compile_call(cell: Cell, of: Pass) -> Program:
        if of == "forward":
            raise NotImplementedError("the forward is deterministic in every mode")
        return peer.compile(cell, of)

    return dataclasses.replace(peer, compile=compile_call)


def _family_peer(family: str, label: str, color: str) -> Peer:
    """Ours by a family of kernels that is not the first here."""
    peer = _jax_peer(f"jax_flash_{family}", label, color, attend_flash)

    def compile_call(cell: Cell, of: Pass) -> Program:
        from jax_flash import _gpu  # which compare.py's older versions lack

        with _gpu.prefer(family):
            return peer.compile(cell, of)

    return dataclasses.replace(peer, compile=compile_call)


def attend_flash(
    cell: Cell,
    q: Any,
    k: Any,
    v: Any,
    *,
    deterministic: bool = False,
    backend: str | None = None,
    **terms: Any,
) -> Any:
    """Returns our attention of a cell; `terms` are options of flash_attention beside its own."""
    segments = None
    if cell.segment is not None:
        segments = jnp.broadcast_to(cell.ids, (cell.batch, cell.length))
    own: dict[str, Any] = {
        "is_causal": cell.causal,
        "local_window_size": None if cell.window is None else (cell.window, 0),
        "query_segment_ids": segments,
        "key_value_segment_ids": segments,
    }
    return jax_flash.flash_attention(
        q, k, v, deterministic=deterministic, backend=backend, **(own | terms)
    )


def _attend_cudnn(cell: Cell, q: Any, k: Any, v: Any) -> Any:
    if cell.segment is not None:
        raise NotImplementedError("no segment ids")
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        is_causal=cell.causal,
        local_window_size=None if cell.window is None else (cell.window, 0),
        implementation="cudnn",
    )


def _attend_xla(cell: Cell, q: Any, k: Any, v: Any) -> Any:
    if cell.segment is not None:
        raise NotImplementedError("no segment ids")
    scores = 4 * cell.batch * cell.heads * cell.length**2
    if scores > XLA_SCORES:
        raise NotImplementedError(f"scores of {scores >> 30} GB")
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        is_causal=cell.causal,
        local_window_size=None if cell.window is None else (cell.window, 0),
        implementation="xla",
    )


def _attend_fa3(cell: Cell, q: Any, k: Any, v: Any) -> Any:
    """FlashAttention-3 of Dao-AILab as XLA FFI, from `pip install dew-flash-attn-cu13`.

    Causality is aligned to the last key there: the same where T = S. Documents are sequences of its
    packed call.
    """
    fa3 = importlib.import_module("dew_flash_attn")
    if cell.head_dim > 256 or cell.columns != cell.head_dim:
        raise NotImplementedError("head dims up to 256, values of the same")
    options = {
        "is_causal": cell.causal,
        "window_size": (-1, -1) if cell.window is None else (cell.window, 0),
    }
    if cell.segment is None:
        return fa3.flash_mha(q, k, v, **options)
    tokens = cell.batch * cell.length
    rows = cell.length * np.arange(cell.batch, dtype=np.int32)[:, None]
    starts = np.append((rows + cell.starts[:-1]).reshape(-1), np.int32(tokens))
    longest = int(np.diff(cell.starts).max())
    packed = (x.reshape(tokens, *x.shape[2:]) for x in (q, k, v))
    return fa3.flash_mha_varlen(*packed, starts, longest, **options).reshape(q.shape)


def _attend_fa3_128(cell: Cell, q: Any, k: Any, v: Any) -> Any:
    """FlashAttention-3 of an older build, from `pip install flash-attn3-jax`."""
    if cell.head_dim != 128 or cell.segment is not None:
        raise NotImplementedError("head dim 128, and no segment ids here")
    return importlib.import_module("flash_attn3_jax").flash_mha(
        q,
        k,
        v,
        is_causal=cell.causal,
        window_size=(-1, -1) if cell.window is None else (cell.window, 0),
    )


def _attend_fa4(cell: Cell, q: Any, k: Any, v: Any) -> Any:
    """FlashAttention-4 in CuTe DSL, from `pip install 'fa4-jax[cu13]'`."""
    if cell.segment is not None:
        raise NotImplementedError("no segment ids here")
    window = None if cell.window is None else (cell.window, 0)
    return importlib.import_module("fa4_jax").flash_attn(
        q, k, v, causal=cell.causal, window_size=window
    )


def _torch_peer(name: str, label: str, color: str) -> Peer:
    torch = importlib.import_module("torch")
    attention = importlib.import_module("torch.nn.attention")
    kinds = attention.SDPBackend
    kind = kinds.FLASH_ATTENTION if name == "torch_flash" else kinds.CUDNN_ATTENTION

    def compile_call(cell: Cell, of: Pass) -> Program:
        if not torch.cuda.is_available():
            raise NotImplementedError("PyTorch sees no GPU")
        if cell.segment is not None or cell.window is not None:
            raise NotImplementedError("no segment ids and no window")

        def load(inputs: tuple[np.ndarray, ...]) -> Call:
            # [B, N, T, H], dense: PyTorch's own layout.
            q, k, v, dout = (
                torch.from_numpy(x.view(np.int16)).cuda().view(torch.bfloat16).transpose(1, 2)
                for x in inputs
            )
            q, k, v, dout = (x.contiguous() for x in (q, k, v, dout))
            training = of == "training"
            for x in (q, k, v):
                x.requires_grad_(training)

            def run() -> Any:
                with attention.sdpa_kernel(kind):
                    out = torch.nn.functional.scaled_dot_product_attention(
                        q, k, v, is_causal=cell.causal, enable_gqa=cell.heads != cell.kv_heads
                    )
                if training:
                    return out, *torch.autograd.grad(out, (q, k, v), dout)
                return (out,)

            return run

        return Program(load)

    return Peer(name, label, color, compile_call, lambda _: torch.cuda.synchronize())
