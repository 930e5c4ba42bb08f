"""A sequence split over devices: one device's results and gradients, by each strategy and order.

What is compared is restored to the sequence's own order. Which collectives a program has is in
test_context_parallel_programs.py.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash
from jax_flash.context_parallel import attention, reorder, restore
from jax_flash.context_parallel.orders import ORDERS

from .. import numpy_oracle
from ..cases import dropout_words
from ..devices import mesh_with
from ..small import close, normal
from .split_sequences import SHARDS, SPLIT, B, H, K, N, T, qkv

# ---- one device's numbers ------------------------------------------------------------------------

DOCUMENTS = np.cumsum(np.random.default_rng(0).random((B, T)) < 0.1, axis=1, dtype=np.int32)
LENGTHS = {
    "query_seq_lengths": np.array([50, 0], np.int32),
    "key_value_seq_lengths": np.array([33, 64], np.int32),
}
TURNED = np.broadcast_to(np.arange(T, dtype=np.int32) % 40, (B, T))
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True, "deterministic": True},
    "window": {"local_window_size": (20, 7)},
    "near": {"local_window_size": (9, 5), "softcap": 3.0, **LENGTHS},
    "documents": {
        "is_causal": True,
        "query_segment_ids": DOCUMENTS,
        "key_value_segment_ids": DOCUMENTS,
        "sinks": normal(5, N),
        "softcap": 3.0,
    },
    "near documents": {
        "is_causal": True,
        "local_window_size": (16, 0),
        "query_segment_ids": DOCUMENTS,
        "key_value_segment_ids": DOCUMENTS,
        "bias": normal(6, B, N, T, T),
    },
    "lengths": {"is_causal": True, "sinks": normal(5, N), **LENGTHS},
    "last at last": {"is_causal": True, "causal_align": "bottom_right", **LENGTHS},
    "bias": {"is_causal": True, "bias": normal(6, B, N, T, T)},
    "bias of heads": {"bias": normal(6, 1, N, 1, T)},
    "bias of queries": {"bias": normal(6, B, 1, T, 1)},
    "mask": {"mask": np.random.default_rng(1).random((B, 1, T, T)) < 0.3},
    "positions": {
        "is_causal": True,
        "query_positions": TURNED,
        "key_value_positions": TURNED,
    },
    "query positions": {"local_window_size": (10, 3), "query_positions": TURNED},
    "scale": {"scale": jnp.float32(0.3)},
}
SEQUENCE_DIMS = {"query": (1,), "key": (1,), "value": (1,), "bias": (2, 3), "mask": (2, 3)}
SEQUENCE_DIMS |= {
    f"{side}_{what}": (1,)
    for side in ("query", "key_value")
    for what in ("segment_ids", "positions")
}
FLOATS = ("query", "key", "value", "bias", "sinks", "scale")


def along(change, name, x, order):
    """An array's sequences reordered, or restored."""
    for axis in SEQUENCE_DIMS.get(name, ()):
        x = change(x, order, SHARDS, axis) if x.shape[axis] > 1 else x
    return x


def step_of(attend, static):
    """A function of arrays and cotangents: out, lse and the gradients of floats."""

    def step(floats, rest, dout, dlse):
        def loss(floats):
            out, lse = attend(**floats, **rest, **static, return_lse=True)
            seen = jnp.where(jnp.isfinite(lse), lse, 0.0)
            return jnp.sum(out * dout) + jnp.sum(seen * dlse), (out, lse)

        return jax.grad(loss, has_aux=True)(floats)

    return jax.jit(step)


def arrays_of(name):
    arguments = qkv() | OPTIONS[name]
    floats = {n: x for n, x in arguments.items() if n in FLOATS}
    rest = {n: x for n, x in arguments.items() if isinstance(x, np.ndarray) and n not in floats}
    static = {n: x for n, x in arguments.items() if n not in floats and n not in rest}
    return floats, rest, static, (normal(7, B, T, N, H), normal(8, B, T, N))


@functools.cache
def on_one_device(name, backend):
    floats, rest, static, cotangents = arrays_of(name)
    attend = functools.partial(jax_flash.flash_attention, backend=backend)
    return step_of(attend, static)(floats, rest, *cotangents)


def check(name, strategy, order, mesh, axis_name="seq", backend="cpu"):
    floats, rest, static, cotangents = arrays_of(name)
    attend = functools.partial(
        attention, axis_name=axis_name, strategy=strategy, order=order, backend=backend
    )
    with jax.set_mesh(mesh):
        floats, rest = (
            {n: along(reorder, n, x, order) for n, x in xs.items()} for xs in (floats, rest)
        )
        split = NamedSharding(mesh, P(None, axis_name))
        floats |= {n: jax.device_put(floats[n], split) for n in ("query", "key", "value")}
        cotangents = [jax.device_put(reorder(x, order, SHARDS, 1), split) for x in cotangents]
        got, results = step_of(attend, static)(floats, rest, *cotangents)
        assert all(x.sharding.is_equivalent_to(split, x.ndim) for x in results)
    got = {n: along(restore, n, np.asarray(x), order) for n, x in got.items()}
    results = tuple(restore(np.asarray(x), order, SHARDS, 1) for x in results)
    close((got, results), on_one_device(name, backend))


RUNS = [
    ("plain", "ring", "contiguous"),
    ("causal", "ring", "contiguous"),
    ("causal", "ring", "zigzag"),
    ("causal", "ring", "striped"),
    ("causal", "all_to_all", "zigzag"),
    ("window", "ring", "contiguous"),
    ("window", "ring", "zigzag"),
    ("near", "all_gather", "contiguous"),
    ("documents", "ring", "zigzag"),
    ("documents", "all_to_all", "striped"),
    ("near documents", "all_gather", "contiguous"),
    ("near documents", "ring", "contiguous"),
    ("lengths", "ring", "striped"),
    ("last at last", "ring", "zigzag"),
    ("last at last", "all_gather", "striped"),
    ("bias", "ring", "zigzag"),
    ("bias", "all_to_all", "striped"),
    ("bias of heads", "ring", "contiguous"),
    ("bias of heads", "all_to_all", "zigzag"),
    ("bias of queries", "ring", "zigzag"),
    ("mask", "ring", "striped"),
    ("positions", "ring", "striped"),
    ("query positions", "ring", "contiguous"),
    ("scale", "ring", "contiguous"),
]


@pytest.mark.parametrize(("name", "strategy", "order"), RUNS)
def test_results_and_gradients_are_one_devices(name, strategy, order):
    check(name, strategy, order, mesh_with(seq=SHARDS))


@pytest.mark.parametrize(
    ("name", "strategy", "order"),
    [*(("documents", "ring", order) for order in ORDERS), ("bias", "all_gather", "striped")],
)
def test_two_levels(name, strategy, order):
    """All-to-all over the inner axis, and a strategy over the outer one."""
    check(name, strategy, order, mesh_with(outer=2, inner=2), axis_name=("outer", "inner"))


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "all_to_all"])
def test_beside_axes_of_one_device(strategy):
    check("causal", strategy, "contiguous", mesh_with(data=1, seq=SHARDS, model=1))


def test_backend_xla():
    check("causal", "ring", "contiguous", mesh_with(seq=SHARDS), backend="xla")


# On one device the CPU kernels have delta in float32 beside the gradient of a bias, and all else on
# processors without products of bfloat16: there the ring's error is 5.2 times that.
@pytest.mark.parametrize(("ring_backend", "has_bias", "times"), [("xla", 0, 2), ("cpu", 1, 8)])
def test_results_of_half_precision_are_merged_in_float32(ring_backend, has_bias, times):
    """A ring's error is at most a few times that of one device, against float32."""
    arrays = qkv(jnp.bfloat16)
    if has_bias:
        arrays["bias"] = normal(6, N, 1, T, dtype=jnp.bfloat16)
    wide = {name: x.astype(jnp.float32) for name, x in arrays.items()}

    def gradients(attend, arrays):
        def loss(arrays):
            out = attend(**arrays, is_causal=True).astype(jnp.float32)
            return jnp.sum(out * normal(7, B, T, N, H)), out

        return jax.grad(loss, has_aux=True)(arrays)

    attend = functools.partial(jax_flash.flash_attention, backend=ring_backend)
    one = functools.partial(gradients, attend)
    truth, alone = jax.jit(one)(wide), jax.jit(one)(arrays)
    with jax.set_mesh(mesh_with(seq=SHARDS)):
        ring = functools.partial(attention, axis_name="seq", strategy="ring", backend=ring_backend)
        got = jax.jit(functools.partial(gradients, ring))(arrays)

    def error(x, exact):
        return np.abs(np.asarray(x, np.float32) - exact).max()

    for ours, theirs, exact in zip(*map(jax.tree.leaves, (got, alone, truth)), strict=True):
        assert ours.dtype == theirs.dtype
        assert error(ours, exact) <= times * error(theirs, exact)


@pytest.mark.parametrize("inside", [False, True], ids=["jit", "shard_map"])
def test_dropout_has_one_devices_pattern(inside):
    """Tokens may be in another order: the pattern counts their places in the sequence."""
    mesh, order = mesh_with(data=2, seq=2, model=2), "zigzag"
    key, rate, length = jax.random.key(3), 0.4, 16
    zeros = np.zeros((B, length, N, H), np.float32)
    identity = np.broadcast_to(np.eye(length, dtype=np.float32)[:, None], (B, length, N, length))
    attend = functools.partial(
        attention, axis_name="seq", order=order, dropout_rate=rate, dropout_key=key, backend="cpu"
    )
    spec = P(None, "seq")
    if inside:
        attend = jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    with jax.set_mesh(mesh):
        arrays = [reorder(x, order, 2, 1) for x in (zeros, zeros, identity)]
        placed = [jax.device_put(x, NamedSharding(mesh, P("data", "seq", "model"))) for x in arrays]
        out = jax.jit(attend)(*placed)
    kept = restore(np.asarray(out), order, 2, 1).swapaxes(1, 2) > 0
    words = dropout_words(key)
    expected = [
        [numpy_oracle.dropout_keep(words, rate, b, n, length, length) for n in range(N)]
        for b in range(B)
    ]
    np.testing.assert_array_equal(kept, expected)


# ---- what counts tokens of the whole sequence ----------------------------------------------------

LONG = 128  # halves of a device's tokens are whole blocks of 16
FEATURES = ("score", "blocks", "dropout")


@functools.cache
def blocks():
    def sees(batch, head, query, key):
        shown = (query // 16 + 2 * (key // 16) + head) % 3 > 0
        return shown & ((query + 5 * key + batch) % 7 > 1)

    with jax.ensure_compile_time_eval():
        return jax_flash.block_mask(sees, q_len=LONG, kv_len=LONG, batch=B, heads=N, block=16)


def programmed(attend, features):
    """Attention with these features; "table" `[N, 9]` belongs to the function of the scores."""

    def attend_with(*, table, **arguments):
        def score_mod(score, batch, head, query, key):
            at = table[head, jnp.clip(key - query + 4, 0, 8)]
            return score * (1 + 0.5 * jnp.cos(query - 2.0 * key + batch)) + at

        options = {
            "score": {"score_mod": score_mod},
            "blocks": {"block_mask": blocks()},
            "dropout": {"dropout_rate": 0.4, "dropout_key": jax.random.key(3)},
        }
        chosen = [options[name] for name in features]
        return attend(**arguments, **{k: x for each in chosen for k, x in each.items()})

    return attend_with


def programmed_arrays():
    shapes = {"query": N, "key": K, "value": K}
    floats = {n: normal(i, B, LONG, x, H) for i, (n, x) in enumerate(shapes.items())}
    return floats | {"table": normal(6, N, 9)}, [normal(7, B, LONG, N, H), normal(8, B, LONG, N)]


@functools.cache
def programmed_on_one_device(features, backend, window):
    floats, cotangents = programmed_arrays()
    attend = functools.partial(jax_flash.flash_attention, backend=backend, **dict(window))
    return step_of(programmed(attend, features), {})(floats, {}, *cotangents)


CAUSAL, NEAR = (("is_causal", True),), (("local_window_size", (9, 20)),)
TWO = ("outer", "inner")
PROGRAMMED = [
    ("ring", "contiguous", FEATURES[1:], "cpu", NEAR, "seq"),
    ("ring", "zigzag", FEATURES[:1], "xla", CAUSAL, "seq"),
    ("ring", "zigzag", FEATURES[1:], "cpu", CAUSAL, TWO),
    ("ring", "striped", FEATURES[:1], "xla", (), TWO),
    ("all_gather", "contiguous", FEATURES[:2], "xla", NEAR, "seq"),
    ("all_gather", "zigzag", FEATURES[1:], "cpu", CAUSAL, "seq"),
    ("all_to_all", "striped", FEATURES[:1], "xla", CAUSAL, "seq"),
    (None, "striped", FEATURES[1:], "cpu", CAUSAL, "seq"),
]


@pytest.mark.parametrize(
    ("strategy", "order", "features", "backend", "window", "axis_name"), PROGRAMMED
)
def test_tokens_count_in_the_whole_sequence(strategy, order, features, backend, window, axis_name):
    mesh = mesh_with(outer=2, inner=2) if axis_name == TWO else mesh_with(seq=SHARDS)
    floats, cotangents = programmed_arrays()
    attend = functools.partial(
        attention,
        axis_name=axis_name,
        strategy=strategy,
        order=order,
        backend=backend,
        **dict(window),
    )
    with jax.set_mesh(mesh):
        step = step_of(programmed(attend, features), {})
        got, results = step(
            {n: along(reorder, n, x, order) for n, x in floats.items()},
            {},
            *(reorder(x, order, SHARDS, 1) for x in cotangents),
        )
    got = {n: along(restore, n, np.asarray(x), order) for n, x in got.items()}
    results = tuple(restore(np.asarray(x), order, SHARDS, 1) for x in results)
    close((got, results), programmed_on_one_device(features, backend, window))


def test_score_functions_inside_shard_map():
    """An array that all devices share gets one gradient, the sum of theirs."""
    mesh = mesh_with(seq=SHARDS)
    floats, _ = programmed_arrays()

    def local(floats):
        ring = functools.partial(attention, axis_name="seq", strategy="ring", backend="xla")
        return programmed(ring, FEATURES[:1])(**floats)

    specs = {name: P() if name == "table" else SPLIT for name in floats}
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=SPLIT)

    def gradients(attend):
        return jax.jit(jax.grad(lambda floats: jnp.sum(jnp.sin(attend(floats)))))(floats)

    one = functools.partial(jax_flash.flash_attention, backend="xla")
    one = programmed(one, FEATURES[:1])
    close(gradients(mapped), gradients(lambda floats: one(**floats)))
