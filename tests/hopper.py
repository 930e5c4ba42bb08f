"""What the tests on a GPU share: where they run, inputs, the truth, and a spy on the handlers."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash import _gpu, _native, flash_attention

from . import numpy_oracle

_GPU = _gpu.spec.present()
NEEDS_HOPPER = [
    pytest.mark.gpu,
    pytest.mark.skipif(_GPU is None or _GPU.arch != "sm_90a", reason="needs a Hopper GPU"),
]

Arrays = tuple[jax.Array, jax.Array, jax.Array]


def draw(
    seed: int, batch=2, q_len=300, kv_len=300, heads=4, kv_heads=2, dim=128, dtype=jnp.bfloat16
) -> Arrays:
    """Random query, key and value."""
    rng = np.random.default_rng(seed)  # nothing to compile for every new shape
    shapes = [(batch, q_len, heads, dim), *[(batch, kv_len, kv_heads, dim)] * 2]
    q, k, v = (jnp.asarray(rng.standard_normal(s, np.float32).astype(dtype)) for s in shapes)
    return q, k, v


def attend(q, k, v, **options):
    return flash_attention(q, k, v, is_causal=True, backend="cuda", **options)


def exact(q, k, v, **cotangents: np.ndarray) -> numpy_oracle.Result:
    """Causal attention in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    return numpy_oracle.attention(q, k, v, is_causal=True, **cotangents)


def assert_right(out, q, k, v) -> None:
    np.testing.assert_allclose(
        np.asarray(out, np.float64), exact(q, k, v).out, atol=2e-2, rtol=2e-2
    )


def near(got, want, name: str):
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    error = np.abs(got - want).max()
    assert error <= 2e-2 * np.abs(want).max(), f"{name}: {error}"


def stacked(count: int, **sizes):
    return tuple(jnp.stack(x) for x in zip(*(draw(i, **sizes) for i in range(count)), strict=True))


def assert_same_bits(got: Any, want: Any) -> None:
    """Two trees of arrays are equal to the bit."""
    jax.tree.map(np.testing.assert_array_equal, got, want)


def gradients(*arrays: jax.Array, **options) -> tuple[jax.Array, ...]:
    """The gradients of a nonlinear function of `attend`, to the bit the same from run to run."""

    def loss(q, k, v):
        out, lse = attend(q, k, v, deterministic=True, return_lse=True, **options)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))) + jnp.sum(jnp.cos(lse))

    return jax.grad(loss, argnums=(0, 1, 2))(*arrays)


# ---- a spy on a handler ------------------------------------------------------------------------


class _CallFrame(ctypes.Structure):  # the head of XLA_FFI_CallFrame
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("api", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


class _StreamGet(ctypes.Structure):  # XLA_FFI_Stream_Get_Args
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
    )


_HANDLER = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
# XLA_FFI_Api: a size, a pointer, the version (24 bytes), a pointer, four functions, Stream_Get.
_STREAM_GET_AT = 8 + 8 + 24 + 8 + 4 * 8
_CAPTURING = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE
_numbers = itertools.count()
_registered = []  # XLA never forgets a handler


@dataclasses.dataclass
class Spy:
    """The calls of one handler: the stream of each, and whether a graph was being captured."""

    calls: list[tuple[int, bool]] = dataclasses.field(default_factory=list)

    @property
    def captured(self) -> int:
        return sum(capturing for _, capturing in self.calls)

    @property
    def streams(self) -> set[int]:
        return {stream for stream, _ in self.calls}


def spy_on(monkeypatch: pytest.MonkeyPatch, target: str) -> Spy:
    """Programs lowered from here on call Hopper's handler `target` ("forward") through a spy."""
    target = f"jax_flash_cuda_{target}"
    capsule = _native._cuda().targets()["CUDA"][target]
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    handler = _HANDLER(pointer_of(capsule, None))
    driver = ctypes.CDLL("libcuda.so.1")
    spy = Spy()

    def call(address):
        frame = _CallFrame.from_address(address)
        if frame.context:  # else XLA asks for the handler's version
            spy.calls.append(look(frame))
        return handler(address)

    def look(frame: _CallFrame) -> tuple[int, bool]:
        stream = _StreamGet(ctypes.sizeof(_StreamGet), None, frame.context, None)
        stream_get = ctypes.c_void_p.from_address(frame.api + _STREAM_GET_AT).value
        _HANDLER(stream_get)(ctypes.addressof(stream))
        status = ctypes.c_int()
        driver.cuStreamIsCapturing(ctypes.c_void_p(stream.stream), ctypes.byref(status))
        return stream.stream or 0, status.value == _CAPTURING

    entry = _HANDLER(call)
    _registered.append(entry)
    name = f"{target}_spy{next(_numbers)}"
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(entry), platform="CUDA")
    plan = _gpu.plan

    def spied(*args):
        found = plan(*args)
        return dataclasses.replace(found, target=name) if found.target == target else found

    monkeypatch.setattr(_gpu, "plan", spied)
    return spy
