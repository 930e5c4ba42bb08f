"""Owns how each implementation is asked for the features of features.py, and what it lacks."""

import functools
import importlib
import importlib.util
import math
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_flash

from .exact import relative_table
from .peers import XLA_SCORES, Call, Peer, Program, compile_jax
from .score_functions import OPERANDS, UNNAMED
from .shapes import ARRAYS, REACH, Case, Pass

SEED = 7  # of the dropout of peers that take no key
FLEX = "torch_flex"
FLEX_PROCESSES = 12


def all_peers() -> list[Peer]:
    """Lists the peers that this machine has."""
    found = [
        _jax_peer("jax_flash", "jax_flash", "#c0392b", _attend_flash),
        _jax_peer("jax_cudnn", "jax.nn, cuDNN", "#4c72b0", _attend_cudnn),
        _jax_peer("jax_xla", "jax.nn, XLA", "#8c8c8c", _attend_xla),
    ]
    if importlib.util.find_spec("torch") is not None:
        found += [
            _torch_peer("torch_cudnn", "PyTorch, cuDNN", "#8172b3", _sdpa("CUDNN_ATTENTION")),
            _torch_peer(
                "torch_flash", "PyTorch, FlashAttention-2", "#55a868", _sdpa("FLASH_ATTENTION")
            ),
            _torch_peer(
                "torch_efficient",
                "PyTorch, memory-efficient",
                "#937860",
                _sdpa("EFFICIENT_ATTENTION"),
            ),
            _torch_peer(FLEX, "PyTorch, FlexAttention", "#da8bc3", _flex),
        ]
    return found


def structs(case: Case) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the operands of a case as JAX describes them."""
    return {n: jax.ShapeDtypeStruct(s, dtype) for n, (s, dtype) in case.operands.items()}


@functools.cache
def explain(case: Case) -> dict[str, Any]:
    """Returns the backend that runs our attention of a case, and why it is not another."""
    given: dict[str, Any] = dict(structs(case))
    if "table" in given:  # what a function reads is an array there
        given["table"] = relative_table(case.heads)
    if case.score in UNNAMED:
        given |= {name: jnp.zeros(given[name].shape) for name in OPERANDS}
    with jax.default_matmul_precision(case.precision):
        found = jax_flash.explain(**flash_options(case, given))
    reasons = {name: "; ".join(texts) for name, texts in found.forward.refusals.items()}
    return {"backend": found.backend, "not": reasons}


def flash_options(case: Case, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `flash_attention` for a case."""
    names = {
        "q": ("query",),
        "k": ("key",),
        "v": ("value",),
        "bias": ("bias",),
        "mask": ("mask",),
        "sinks": ("sinks",),
        "lengths": ("query_seq_lengths", "key_value_seq_lengths"),
        "segments": ("query_segment_ids", "key_value_segment_ids"),
        "positions": ("query_positions", "key_value_positions"),
        "dropout_key": ("dropout_key",),
    }
    arrays = {to: given[name] for name, all_to in names.items() if name in given for to in all_to}
    visible: dict[str, Any] = {
        "is_causal": case.causal,
        "local_window_size": None if case.window is None else (case.window, 0),
    }
    if case.blocks:
        visible = {"block_mask": block_mask(case)}
        for name in names["segments"]:
            arrays.pop(name, None)
    changes = {
        "softcap": case.softcap if case.score is None else None,
        "score_mod": score_function(case, given),
        "dropout_rate": case.dropout,
    }
    return arrays | visible | changes


@functools.cache
def block_mask(case: Case) -> jax_flash.BlockMask:
    """Makes the block mask of a case's function, as a user does, once for all calls."""
    # While a program is traced, too: arrays of a function made outside would be traced.
    with jax.ensure_compile_time_eval():
        sees = jax_flash.masks.causal()
        if case.window is not None:
            sees = jax_flash.masks.sliding_window(case.window, 0)
        if case.segment is not None:
            sees = jax_flash.masks.documents(np.arange(case.length) // case.segment)
        return jax_flash.block_mask(sees, q_len=case.length, kv_len=case.length)


def score_function(case: Case, given: Mapping[str, Any]) -> Any:
    """Returns the case's function of the scores, which reads some of the arrays given."""
    if case.score in UNNAMED:
        return UNNAMED[case.score](jnp, *(given[name] for name in OPERANDS))
    match case.score:
        case "alibi":
            return jax_flash.scores.alibi(jax_flash.scores.alibi_slopes(case.heads))
        case "table":
            return jax_flash.scores.relative_position_table(relative_table(case.heads))
        case "learned":
            return jax_flash.scores.relative_position_table(given["table"])
        case "softcap":
            return jax_flash.scores.softcap(case.softcap or 1.0)
    return None


def _jax_peer(name: str, label: str, color: str, attend: Callable[..., Any]) -> Peer:
    def compile_call(case: Case, of: Pass) -> Program:
        with jax.default_matmul_precision(case.precision):
            return compile_jax(functools.partial(attend, case), structs(case), case.gradients, of)

    return Peer(name, label, color, compile_call, jax.block_until_ready)


def _attend_flash(case: Case, given: Mapping[str, Any]) -> Any:
    return jax_flash.flash_attention(**flash_options(case, given))


def _attend_xla(case: Case, given: Mapping[str, Any]) -> Any:
    _refuse(case, "softcap", "score", "sinks", "dropout", "segment")
    scores = 4 * case.batch * case.heads * case.length**2
    if scores > XLA_SCORES:
        raise NotImplementedError(f"scores of {scores >> 30} GB")
    return _attend_nn(case, given, given.get("bias"), "xla")


def _attend_cudnn(case: Case, given: Mapping[str, Any]) -> Any:
    _refuse(case, "softcap", "score", "sinks")
    bias = given.get("bias")
    if bias is not None:  # it broadcasts over sequences and heads alone
        bias = jnp.broadcast_to(bias, (*bias.shape[:2], case.length, case.length))
    if not case.dropout and case.segment is None:
        return _attend_nn(case, given, bias, "cudnn")
    # What jax.nn has no argument for, but the function below it does.
    try:
        cudnn = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
        attend, masks = cudnn.dot_product_attention, cudnn.MaskType
    except (ImportError, AttributeError) as error:
        raise NotImplementedError("this jax has no entry to cuDNN with dropout") from error
    packed = {}
    if case.segment is not None:
        documents = case.length // case.segment
        sizes = jnp.full((case.batch, documents), case.segment, jnp.int32)
        starts = jnp.arange(documents + 1, dtype=jnp.int32) * case.segment
        starts = jnp.broadcast_to(starts, (case.batch, documents + 1))
        packed = {"q_seqlen": sizes, "kv_seqlen": sizes, "q_offsets": starts, "kv_offsets": starts}
    return attend(
        given["q"],
        given["k"],
        given["v"],
        scale=1 / math.sqrt(case.head_dim),
        mask_type=masks.CAUSAL if case.causal else masks.NO_MASK,
        dropout_rate=case.dropout,
        seed=SEED,
        **packed,
    )


def _attend_nn(case: Case, given: Mapping[str, Any], bias: Any, implementation: Any) -> Any:
    return jax.nn.dot_product_attention(
        given["q"],
        given["k"],
        given["v"],
        bias,
        given.get("mask"),
        is_causal=case.causal,
        local_window_size=None if case.window is None else (case.window, 0),
        query_seq_lengths=given.get("lengths"),
        key_value_seq_lengths=given.get("lengths"),
        implementation=implementation,
    )


def _refuse(case: Case, *fields: str) -> None:
    """Raises where a case has one of the fields, which the peer takes no argument for."""
    for field in fields:
        if getattr(case, field):
            raise NotImplementedError(f"no {'segment ids' if field == 'segment' else field}")


def _torch_peer(name: str, label: str, color: str, prepare: Callable[..., Any]) -> Peer:
    """Makes a peer of `prepare(case, tensors)`, which returns what computes out `[B, N, T, H]`."""
    torch = importlib.import_module("torch")

    def compile_call(case: Case, of: Pass) -> Program:
        if not torch.cuda.is_available():
            raise NotImplementedError("PyTorch sees no GPU")

        def load(inputs: Mapping[str, Any]) -> Call:
            # Products of float32 in TF32, as jax's, unless the case says otherwise.
            torch.set_float32_matmul_precision(case.precision or "high")
            tensors = {n: torch.from_dlpack(x) for n, x in inputs.items() if n != "dropout_key"}
            for n in ("q", "k", "v", "dout"):  # [B, N, T, H], dense: PyTorch's own layout
                tensors[n] = tensors[n].transpose(1, 2).contiguous()
            needed = [tensors[n] for n in case.gradients] if of == "training" else []
            for x in needed:
                x.requires_grad_()
            attend = prepare(case, tensors)

            def run() -> Any:
                out = attend()
                if needed:
                    return out, *torch.autograd.grad(out, needed, tensors["dout"])
                return (out,)

            return run

        return Program(load, read=read)

    def read(results: tuple[Any, ...]) -> tuple[Any, ...]:
        tensors = [x.detach() for x in results]
        tensors[:4] = [x.transpose(1, 2) for x in tensors[:4]]
        return tuple(jnp.from_dlpack(x.contiguous()) for x in tensors)

    return Peer(name, label, color, compile_call, lambda _: torch.cuda.synchronize())


def compile_flex(cases: Sequence[Case], passes: Sequence[Pass]) -> None:
    """Compiles FlexAttention for cases into PyTorch's caches on disk, side by side.

    In one process programs are compiled one after the other, ten seconds each; from the caches
    they take about one.
    """
    jobs: list[tuple[Case, Pass]] = [(case, of) for case in cases for of in passes]
    workers = min(len(jobs), FLEX_PROCESSES)
    if workers < 2:
        return
    spawn = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    with ProcessPoolExecutor(workers, spawn, initializer=_compile_alone) as pool:
        for job in [pool.submit(_compile_flex, case, of) for case, of in jobs]:
            job.exception()  # a case that cannot run says so where it is measured


def _compile_alone() -> None:
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # else each process starts as many again
    jax.config.update("jax_platforms", "cpu")


def _compile_flex(case: Case, of: Pass) -> None:
    """Runs a case once, on arrays of zeros."""
    torch = importlib.import_module("torch")
    torch.set_float32_matmul_precision(case.precision or "high")
    tensors = {}
    for name, (shape, dtype) in case.operands.items():
        if name in ARRAYS:  # [B, N, T, H]
            shape = (shape[0], shape[2], shape[1], shape[3])
        tensors[name] = torch.zeros(shape, dtype=getattr(torch, dtype), device="cuda")
    needed = [tensors[name] for name in case.gradients] if of == "training" else []
    for x in needed:
        x.requires_grad_()
    out = _flex(case, tensors)()
    if needed:
        torch.autograd.grad(out, needed, tensors["dout"])
    torch.cuda.synchronize()


def _sdpa(kind: str) -> Callable[..., Any]:
    """Returns the `prepare` of one kernel behind PyTorch's scaled_dot_product_attention."""
    torch = importlib.import_module("torch")
    attention = importlib.import_module("torch.nn.attention")

    def prepare(case: Case, tensors: Mapping[str, Any]) -> Callable[[], Any]:
        _refuse(case, "softcap", "score", "sinks", "lengths", "segment", "window")
        scores = (case.batch, case.heads, case.length, case.length)

        def attend() -> Any:
            mask = tensors.get("bias", tensors.get("mask"))
            with attention.sdpa_kernel(getattr(attention.SDPBackend, kind)):
                return torch.nn.functional.scaled_dot_product_attention(
                    tensors["q"],
                    tensors["k"],
                    tensors["v"],
                    attn_mask=None if mask is None else mask.expand(scores),
                    dropout_p=case.dropout,
                    is_causal=case.causal,
                )

        return attend

    return prepare


def _flex(case: Case, tensors: Mapping[str, Any]) -> Callable[[], Any]:
    """Prepares PyTorch's FlexAttention; its blocks of the mask are made before it is timed."""
    torch = importlib.import_module("torch")
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    _refuse(case, "dropout")
    bias, mask, segments, lengths, sinks = (
        tensors.get(name) for name in ("bias", "mask", "segments", "lengths", "sinks")
    )

    slopes = torch.from_numpy(jax_flash.scores.alibi_slopes(case.heads)).to(tensors["q"].device)
    table = tensors.get("table")
    if table is None:
        table = torch.from_numpy(relative_table(case.heads)).to(tensors["q"].device)

    def score(logit: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        if bias is not None:
            at = zip((b, h, q, k), bias.shape, strict=True)
            logit = logit + bias[tuple(i if size > 1 else i * 0 for i, size in at)]
        if case.score == "alibi":
            logit = logit - slopes[h] * (q - k).abs()
        if case.score in UNNAMED:
            arrays = (tensors[name] for name in OPERANDS)
            return UNNAMED[case.score](torch, *arrays)(logit, b, h, q, k)
        if case.score in ("table", "learned"):
            logit = logit + table[h, (k - q).clamp(-REACH, REACH) + REACH]
        if case.softcap is not None:
            logit = case.softcap * torch.tanh(logit / case.softcap)
        return logit

    def sees(b: Any, h: Any, q: Any, k: Any) -> Any:
        seen = q >= k if case.causal else q >= 0
        if case.window is not None:
            seen = seen & (q - k <= case.window)
        if mask is not None:
            seen = seen & mask[b, 0, q, k]
        if segments is not None:
            seen = seen & (segments[b, q] == segments[b, k])
        if lengths is not None:
            seen = seen & (q < lengths[b]) & (k < lengths[b])
        return seen

    blocks = None
    if case.causal or any(x is not None for x in (case.window, mask, segments, lengths)):
        per_row = any(x is not None for x in (mask, segments, lengths))
        rows = case.batch if per_row else None
        blocks = flex.create_block_mask(sees, rows, None, case.length, case.length, device="cuda")
    changes = bias is not None or case.softcap is not None or case.score is not None
    torch._dynamo.reset()  # else the compiler gives up after some cases
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    attend = functools.partial(
        compiled,
        tensors["q"],
        tensors["k"],
        tensors["v"],
        score_mod=score if changes else None,
        block_mask=blocks,
    )
    if sinks is None:
        return attend

    def attend_with_sinks() -> Any:
        out, lse = attend(return_lse=True)
        return out * torch.sigmoid(lse - sinks[:, None])[..., None].to(out.dtype)

    return attend_with_sinks
