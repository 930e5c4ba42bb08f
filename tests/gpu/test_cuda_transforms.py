"""The CUDA kernels under JAX's transformations, and arrays in other layouts of XLA."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_flash import reference

from ..cases import BOTTOM_RIGHT
from ..hopper import NEEDS_HOPPER, assert_same_bits, attend, draw, gradients, near, stacked

pytestmark = NEEDS_HOPPER


def test_vmap_is_a_loop():
    q, k, v = stacked(3, q_len=77, kv_len=77)
    lengths = jnp.array([[77, 5], [0, 33], [64, 65]], jnp.int32)

    def step(q, k, v, lengths):
        return attend(q, k, v, key_value_seq_lengths=lengths), gradients(
            q, k, v, key_value_seq_lengths=lengths
        )

    got = jax.jit(jax.vmap(step))(q, k, v, lengths)
    rows = [jax.jit(step)(q[i], k[i], v[i], lengths[i]) for i in range(3)]
    assert_same_bits(got, jax.tree.map(lambda *x: jnp.stack(x), *rows))
    # Each member has its own gradients to keys that are not mapped.
    shared = jax.jit(jax.vmap(step, in_axes=(1, None, None, None)))(
        jnp.moveaxis(q, 0, 1), k[0], v[0], lengths[0]
    )
    rows = [jax.jit(step)(q[i], k[0], v[0], lengths[0]) for i in range(3)]
    assert_same_bits(shared, jax.tree.map(lambda *x: jnp.stack(x), *rows))


@pytest.mark.parametrize("q_len", [1, 77, 256])
@pytest.mark.parametrize("members", [3, 8])
def test_members_of_a_vmap_share_keys(q_len: int, members: int):
    """Forward and backward take the members as heads; key and value get the sum of gradients."""
    q, k, v = stacked(members, q_len=q_len, kv_len=391, heads=4, kv_heads=2)
    k, v = k[0], v[0]
    lengths = jnp.array([391, 5], jnp.int32)

    def step(q, k, v):
        return attend(q, k, v, key_value_seq_lengths=lengths, causal_align=BOTTOM_RIGHT)

    def pulled(function):
        out, pull = jax.vjp(function, q, k, v)
        return out, *pull(jnp.cos(out))

    got = jax.jit(lambda: pulled(jax.vmap(step, in_axes=(0, None, None))))()
    want = jax.jit(lambda: pulled(lambda q, k, v: jnp.stack([step(x, k, v) for x in q])))()
    # Each of the sums that a loop adds up is rounded to 8 bits, and so are they.
    for x, y, roundings in zip(got, want, (2, 2, members + 2, members + 2), strict=True):
        x, y = (np.asarray(z, np.float32) for z in (x, y))
        np.testing.assert_allclose(x, y, rtol=0, atol=roundings * 2**-8 * np.abs(y).max())


@pytest.mark.parametrize("q_len", [77, 300])
def test_scan_over_layers_reads_slices(q_len: int):
    """Residuals of a scan are slices of stacks: an odd length puts lse beside 16-byte bounds."""
    layers = stacked(5, q_len=q_len, kv_len=q_len, batch=1, heads=3, kv_heads=3)

    def layer(x, arrays):
        q, k, v = arrays
        return attend(x + q, k, v, deterministic=True), None

    def scanned(layers):
        return jnp.sum(jax.lax.scan(layer, layers[0][0], layers)[0].astype(jnp.float32) ** 2)

    def unrolled(layers):
        x = layers[0][0]
        for i in range(5):
            x, _ = layer(x, [y[i] for y in layers])
        return jnp.sum(x.astype(jnp.float32) ** 2)

    got, want = (jax.jit(jax.value_and_grad(f))(layers) for f in (scanned, unrolled))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    for a, b in zip(got[1], want[1], strict=True):
        near(a, b, "gradient")


@pytest.mark.parametrize("order", [(0, 2, 1, 3), (1, 2, 3, 0), (3, 2, 1, 0), (2, 0, 1, 3)], ids=str)
def test_arguments_in_other_layouts(order):
    """Transposed arguments and results, which XLA may keep as layouts."""
    arrays = draw(0, q_len=70, kv_len=70)
    back = tuple(np.argsort(order))
    moved = [jnp.asarray(jnp.transpose(x, order)) for x in arrays]

    @jax.jit
    def step(*moved):
        inputs = [jnp.transpose(x, back) for x in moved]
        return [jnp.transpose(x, order) for x in (attend(*inputs), *gradients(*inputs))]

    want = (attend(*arrays), *jax.jit(gradients)(*arrays))
    assert_same_bits([jnp.transpose(x, back) for x in step(*moved)], list(want))


def test_slices_of_one_array():
    """q, k and v out of one product: as heads of it, and stacked in front."""
    whole = jnp.concatenate(draw(0, kv_heads=4), axis=2)  # 12 heads

    def heads(whole):
        return whole[:, :, :4], whole[:, :, 4:8], whole[:, :, 8:]

    want = gradients(*heads(whole))
    summed = jax.jit(lambda x: gradients(*heads(x)))(whole)
    front = jnp.stack(heads(whole))
    assert_same_bits(summed, want)
    assert_same_bits(jax.jit(lambda x: gradients(*x))(front), want)


def test_remat_recomputes_the_same_bits():
    arrays = draw(0, q_len=200, kv_len=200)
    policies = jax.checkpoint_policies

    def slopes(policy):
        call = functools.partial(attend, deterministic=True)
        if policy is not None:
            call = jax.checkpoint(call, policy=policy)
        return jax.jit(
            jax.grad(lambda *x: jnp.sum(jnp.sin(call(*x).astype(jnp.float32))), argnums=(0, 1, 2))
        )(*arrays)

    want = slopes(None)
    assert_same_bits(slopes(policies.nothing_saveable), want)
    assert_same_bits(slopes(policies.save_only_these_names("flash_out", "flash_lse")), want)


def test_jvp_and_second_derivatives():
    arrays = draw(0, q_len=70, kv_len=70, batch=1, dim=64)
    tangents = draw(1, q_len=70, kv_len=70, batch=1, dim=64)
    wide, wide_tangents = (
        jax.tree.map(lambda x: x.astype(jnp.float32), x) for x in (arrays, tangents)
    )

    def plain(q, k, v):
        return reference.attention(q, k, v, is_causal=True)

    def hvp(attention, arrays, tangents):
        slope = jax.grad(
            lambda *x: jnp.sum(jnp.sin(attention(*x).astype(jnp.float32))), argnums=(0, 1, 2)
        )
        return jax.jvp(slope, arrays, tangents)

    for transform in (functools.partial(jax.jvp, attend), functools.partial(hvp, attend)):
        name = "hvp" if transform.func is hvp else "jvp"
        right = functools.partial(transform.func, plain)
        got = jax.tree.leaves(jax.jit(transform)(arrays, tangents))
        want = jax.tree.leaves(jax.jit(right)(wide, wide_tangents))
        for a, b in zip(got, want, strict=True):
            near(a, b, name)


def test_x64_mode_and_donation():
    arrays = draw(0, q_len=100, kv_len=100)
    lengths = np.array([100, 30])
    want = jax.jit(gradients)(*arrays, key_value_seq_lengths=lengths.astype(np.int32))
    with jax.enable_x64(True):
        got = jax.jit(gradients)(*arrays, key_value_seq_lengths=jnp.asarray(lengths))
        assert [x.dtype for x in got] == [jnp.bfloat16] * 3
    assert_same_bits(got, want)
    donated = [x.copy() for x in arrays]
    again = jax.jit(gradients, donate_argnums=(0, 1, 2))(
        *donated, key_value_seq_lengths=jnp.asarray(lengths, jnp.int32)
    )
    assert_same_bits(again, want)
    assert all(x.is_deleted() for x in donated)
