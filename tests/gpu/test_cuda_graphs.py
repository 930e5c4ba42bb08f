"""XLA replays a step from a CUDA graph (its command buffer) and may spread work over streams."""

from __future__ import annotations

import functools

import jax
import jax.experimental.compute_on
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_flash
from jax_flash import reference

from ..hopper import NEEDS_HOPPER, assert_right, assert_same_bits, attend, draw, gradients, spy_on

pytestmark = NEEDS_HOPPER

B, T, N, K, H = 2, 200, 4, 2, 64
WIDTH = N * H
LAYERS, STEPS = 2, 40


def attention_of_kernels(q, k, v):
    return attend(q, k, v, deterministic=True)


def plain_attention(q, k, v):
    return reference.attention(q, k, v, is_causal=True)


def weights():
    rng = np.random.default_rng(0)
    shapes = {"qkv": (WIDTH, (N + 2 * K) * H), "out": (WIDTH, WIDTH)}
    return [
        {n: jnp.asarray(rng.standard_normal(s) * s[0] ** -0.5, jnp.float32) for n, s in layer}
        for layer in [shapes.items()] * LAYERS
    ]


def batch(number: int):
    rng = np.random.default_rng(number + 1)
    return jnp.asarray(rng.standard_normal((B, T, WIDTH)), jnp.float32)


def loss(attention, layers, x):
    """How far a small transformer is from predicting the mean of all earlier positions."""
    target = jnp.cumsum(x, axis=1) / jnp.arange(1, T + 1)[:, None]
    h = x.astype(jnp.bfloat16)
    for layer in layers:
        heads = (h @ layer["qkv"].astype(jnp.bfloat16)).reshape(B, T, N + 2 * K, H)
        out = attention(heads[:, :, :N], heads[:, :, N : N + K], heads[:, :, N + K :])
        h = h + out.reshape(B, T, WIDTH) @ layer["out"].astype(jnp.bfloat16)
    return jnp.mean((h.astype(jnp.float32) - target) ** 2)


def training(attention):
    """A function that trains from fresh weights for some steps and returns the losses."""
    optimizer = optax.adam(5e-3)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(layers, state, x):
        value, slope = jax.value_and_grad(functools.partial(loss, attention))(layers, x)
        updates, state = optimizer.update(slope, state)
        return optax.apply_updates(layers, updates), state, value

    def train(steps: int):
        layers = weights()
        state, losses = optimizer.init(layers), []
        for number in range(steps):
            layers, state, value = step(layers, state, batch(number))
            losses.append(float(value))
        return layers, np.array(losses)

    return train


def test_whole_training_step_is_captured_and_replayed(monkeypatch: pytest.MonkeyPatch):
    forward, backward = spy_on(monkeypatch, "forward"), spy_on(monkeypatch, "backward")
    train = training(attention_of_kernels)
    first_layers, first = train(STEPS)
    # Without a graph every step calls each handler once per layer. With one, XLA runs the first
    # execution as it is, then calls the handlers into a stream that captures, and later replays.
    for spy in (forward, backward):
        assert spy.captured > 0
        assert len(spy.calls) < LAYERS * STEPS / 2
    calls = len(forward.calls), len(backward.calls)
    layers, again = train(STEPS)
    more = len(forward.calls) - calls[0] + len(backward.calls) - calls[1]
    assert more < LAYERS * STEPS / 2
    # The replays read their own inputs: the same steps give the same bits, and plain attention
    # the same curve.
    np.testing.assert_array_equal(again, first)
    assert_same_bits(layers, first_layers)
    assert first[-1] < 0.8 * first[0]
    _, plain = training(plain_attention)(STEPS)
    np.testing.assert_allclose(first, plain, rtol=1e-2)


def test_steps_replay_with_new_inputs():
    @jax.jit
    def step(q, k, v):
        for _ in range(4):
            q = attend(q, k, v) + q
        return q

    inputs = [draw(seed) for seed in range(3)]
    first = [np.asarray(step(*arrays)) for arrays in inputs]
    for _ in range(10):
        for arrays, want in zip(inputs, first, strict=True):
            np.testing.assert_array_equal(step(*arrays), want)


def test_gradients_replay_with_new_inputs():
    """The workspaces of the backward are reused from step to step."""
    step = jax.jit(gradients)
    inputs = [draw(seed) for seed in range(3)]
    first = [jax.tree.map(np.asarray, step(*arrays)) for arrays in inputs]
    for _ in range(10):
        for arrays, want in zip(inputs, first, strict=True):
            assert_same_bits(step(*arrays), want)


@pytest.mark.parametrize("dim", [128, 66], ids=["counter", "static"])
def test_rows_that_are_computed_again_replay(dim: int, monkeypatch: pytest.MonkeyPatch):
    """Each call's values are the result of the one before, with nothing between the two.

    NaN that causality hides meets the rows of a partial block as 0 * NaN: a last kernel computes
    these once more, and the next call's kernels, launched meanwhile, have to wait for it.
    """
    spy = spy_on(monkeypatch, "forward")
    first, calls = 150, 6  # the first key with NaN, in the middle of a block

    @jax.jit
    def step(q, k, v):
        outs = []
        for _ in range(calls):
            v = attend(q, k, v)
            outs.append(v)
        return outs

    def rows(outs):  # NaN is not equal to itself
        assert all(jnp.isnan(out[:, first:]).all() for out in outs)
        return [out[:, :first] for out in outs]

    inputs = [draw(seed, kv_heads=4, dim=dim) for seed in range(3)]
    inputs = [(q, k, v.at[:, first:].set(jnp.nan)) for q, k, v in inputs]
    seen = [rows(step(*arrays)) for arrays in inputs]
    for _ in range(10):
        for arrays, want in zip(inputs, seen, strict=True):
            assert_same_bits(rows(step(*arrays)), want)
    assert spy.captured > 0
    for arrays, outs in zip(inputs, seen, strict=True):
        q, k, v = (x[:, :first] for x in arrays)
        for out in outs:
            assert_right(out, q, k, v)
            v = out


@pytest.mark.parametrize("rows", [2, 40], ids=["clusters", "parts"])
def test_steps_of_decoding_replay(rows: int, monkeypatch: pytest.MonkeyPatch):
    """Lengths and caches are read anew by each replay; caches are written in place."""
    arrays = [draw(seed, batch=rows, q_len=1, kv_len=256, dim=64) for seed in range(6)]
    spy = spy_on(monkeypatch, "decode")

    @functools.partial(jax.jit, donate_argnums=0)
    def step(caches, lengths):
        outs, written = [], []
        for (query, _, _), (keys, values) in zip(arrays, caches, strict=True):
            new = jnp.full((rows, 1, *keys.shape[2:]), lengths[0], keys.dtype) / 256
            got = jax_flash.decode_attention(
                query, keys, values, lengths, new_key=new, new_value=new
            )
            outs.append(got.out)
            written.append((got.key_cache, got.value_cache))
        return written, outs

    def run():
        caches, seen = [tuple(jnp.copy(x) for x in kv) for _, *kv in arrays], []
        for number in range(STEPS):
            caches, outs = step(caches, jnp.arange(rows, dtype=jnp.int32) % 7 + 100 + number)
            seen.append(outs)
        return caches, seen

    caches, seen = run()
    assert spy.captured > 0  # at each step, as donated caches move
    assert_same_bits(run(), (caches, seen))
    # The last step again, by what it left: its keys are in the cache.
    lengths = jnp.arange(rows, dtype=jnp.int32) % 7 + 99 + STEPS
    for (query, _, _), kv, out in zip(arrays, caches, seen[-1], strict=True):
        plain = jax_flash.decode_attention(query, *kv, lengths, backend="xla").out
        np.testing.assert_allclose(*(x.astype("float32") for x in (out, plain)), atol=2e-2)


def on_stream(number: int, function):
    module = jax.experimental.compute_on
    wrap = getattr(module, "compute_on2", module.compute_on)  # renamed in jax 0.12
    return wrap(
        function, compute_type=f"gpu_stream:{number}", out_memory_spaces=jax.memory.Space.Device
    )


def test_several_streams(monkeypatch: pytest.MonkeyPatch):
    """Forward and backward passes on three streams at once, of one program and one kernel."""
    inputs = [draw(seed, q_len=500, kv_len=500, batch=1) for seed in range(3)]
    want = [jax.jit(gradients)(*arrays) for arrays in inputs]
    forward, backward = spy_on(monkeypatch, "forward"), spy_on(monkeypatch, "backward")
    everywhere = jax.jit(
        lambda inputs: [on_stream(1 + i, lambda *x: gradients(*x))(*arrays)
                        for i, arrays in enumerate(inputs)],
        compiler_options={"xla_gpu_graph_min_graph_size": 100},  # not as one graph
    )  # fmt: skip
    for _ in range(5):
        assert_same_bits(everywhere(inputs), want)
    # XLA takes them from a pool, not always the same ones.
    assert min(len(forward.streams), len(backward.streams)) >= 3
    assert forward.captured == backward.captured == 0
