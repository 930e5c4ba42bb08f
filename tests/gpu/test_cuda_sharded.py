"""Several GPUs: kernels on each, partitioned programs with the collectives they need, processes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jax_flash

from ..devices import collectives
from ..hopper import NEEDS_HOPPER, assert_same_bits
from ..processes import run_two_processes

P = PartitionSpec
BACKEND = "cuda"


def devices() -> list[jax.Device]:
    return jax.local_devices()[:2]


pytestmark = [
    *NEEDS_HOPPER,
    pytest.mark.skipif(len(jax.local_devices()) < 2, reason="needs two devices"),
]

B, T, S, N, K, H = 4, 150, 210, 8, 4, 64


def mesh_over(axis: str) -> jax.sharding.Mesh:
    return jax.make_mesh((2,), (axis,), devices=devices(), axis_types=(jax.sharding.AxisType.Auto,))


def normal(seed: int, *shape: int, dtype="bfloat16"):
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(jnp.dtype(dtype))


def arguments(kv_heads: int = K, **operands):
    arrays = {
        "query": normal(0, B, T, N, H),
        "key": normal(1, B, S, kv_heads, H),
        "value": normal(2, B, S, kv_heads, H),
    }
    return arrays | operands


def step(arrays, dout, **options):
    """out, lse and the gradients of query, key and value."""
    moving = {name: arrays[name] for name in ("query", "key", "value")}
    fixed = {name: x for name, x in arrays.items() if name not in moving}

    def call(moving):
        return jax_flash.flash_attention(
            **moving, **fixed, **options, return_lse=True, deterministic=True, backend=BACKEND
        )

    (out, lse), pull = jax.vjp(call, moving)
    return out, lse, pull((dout, jnp.ones_like(lse)))[0]


OPERANDS = {
    "plain": {},
    "lengths": {
        "query_seq_lengths": np.array([150, 7, 64, 0], np.int32),
        "key_value_seq_lengths": np.array([210, 130, 1, 200], np.int32),
    },
    "segments": {
        "query_segment_ids": np.sort(np.random.default_rng(3).integers(0, 3, (B, T))).astype("i4"),
        "key_value_segment_ids": np.sort(np.random.default_rng(4).integers(0, 3, (B, S))).astype(
            "i4"
        ),
    },
}


def sharded_and_single(axis: str, spec: PartitionSpec, arrays, **options):
    """(collectives, results on two devices, results on one) of `step`."""
    mesh = mesh_over(axis)
    dout = normal(5, B, T, N, H)

    def place(name, x):
        if name in ("query", "key", "value", "dout"):
            fits = x.shape[2] % 2 == 0 or spec[2] is None
            return jax.device_put(x, NamedSharding(mesh, spec if fits else P()))
        rows = P(*spec[:1]) if name != "sinks" else P(spec[2])
        return jax.device_put(x, NamedSharding(mesh, rows))

    placed = {name: place(name, x) for name, x in arrays.items()}
    call = functools.partial(step, **options)
    program = jax.jit(call).lower(placed, place("dout", dout)).compile()
    got = program(placed, place("dout", dout))
    single = jax.device_put((arrays, dout), devices()[1])
    return collectives(program), got, jax.jit(call)(*single)


@pytest.mark.parametrize("name", OPERANDS)
@pytest.mark.parametrize(
    ("axis", "spec"), [("data", P("data", None, None, None)), ("model", P(None, None, "model"))]
)
def test_batch_and_heads_need_no_collective(axis, spec, name):
    """Grouped heads, forward and gradients: each device computes the bits of one device alone."""
    arrays = arguments(**OPERANDS[name])
    found, got, want = sharded_and_single(axis, spec, arrays, is_causal=True)
    assert found == []
    assert_same_bits(got, want)
    for x in (got[0], *got[2].values()):
        assert len(x.sharding.device_set) == 2
        assert not x.sharding.is_fully_replicated


def test_one_kv_head_for_both_devices_sums_its_gradients():
    spec = P(None, None, "model")
    found, got, want = sharded_and_single("model", spec, arguments(kv_heads=1), is_causal=True)
    assert set(found) == {"all-reduce"}
    assert_same_bits(got[:2], want[:2])
    assert_same_bits(got[2]["query"], want[2]["query"])
    for name in ("key", "value"):
        a, b = (np.asarray(x[2][name], np.float32) for x in (got, want))
        np.testing.assert_allclose(a, b, atol=2e-2 * np.abs(b).max())


# ---- a training step ---------------------------------------------------------------------------

WIDTH = N * H


def layer(attend, weights, x):
    """A residual attention layer, x [B, T, WIDTH] bfloat16."""
    q, k, v = (
        jnp.einsum("btd,dnh->btnh", x, weights[name].astype(x.dtype)) for name in ("q", "k", "v")
    )
    out = attend(q, k, v, is_causal=True, deterministic=True, backend=BACKEND)
    return x + jnp.einsum("btnh,nhd->btd", out, weights["out"].astype(x.dtype))


def loss(weights, x, attend=jax_flash.flash_attention):
    out = jax.checkpoint(functools.partial(layer, attend))(weights, x)
    return jnp.mean(jnp.square(out.astype(jnp.float32) - 1.0))


def train_step(weights, x, attend=jax_flash.flash_attention):
    value, slope = jax.value_and_grad(loss)(weights, x, attend)
    return value, jax.tree.map(lambda w, g: w - g, weights, slope)


def weights():
    shapes = {"q": (WIDTH, N, H), "k": (WIDTH, K, H), "v": (WIDTH, K, H), "out": (N, H, WIDTH)}
    return {
        name: normal(i, *shape, dtype="float32") * WIDTH**-0.5
        for i, (name, shape) in enumerate(shapes.items())
    }


HEADS = {"q": P(None, "model"), "k": P(None, "model"), "v": P(None, "model"), "out": P("model")}


def close(got, want):
    (value, new), (right, expected) = got, want
    np.testing.assert_allclose(value, right, rtol=1e-3)
    start = weights()
    for name in new:
        change, wanted = (np.asarray(x[name]) - start[name] for x in (new, expected))
        np.testing.assert_allclose(change, wanted, atol=2e-2 * np.abs(wanted).max())


def single_step(length=T):
    x = normal(9, B, length, WIDTH)
    return jax.jit(train_step)(*jax.device_put((weights(), x), devices()[0]))


@pytest.mark.parametrize("axis", ["data", "model"])
def test_training_step_under_jit(axis):
    """Batch over two devices, or heads: sums over devices, and no array is gathered."""
    mesh = mesh_over(axis)
    specs = HEADS if axis == "model" else dict.fromkeys(HEADS, P())
    placed = {n: jax.device_put(w, NamedSharding(mesh, specs[n])) for n, w in weights().items()}
    rows = P("data") if axis == "data" else P()
    x = jax.device_put(normal(9, B, T, WIDTH), NamedSharding(mesh, rows))
    program = jax.jit(train_step).lower(placed, x).compile()
    assert set(collectives(program)) == {"all-reduce"}
    close(program(placed, x), single_step())


def test_training_step_under_shard_map():
    mesh = mesh_over("data")

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P()), check_vma=True
    )
    def run(weights, x):
        # Weights are the same on all devices: their gradients come out summed.
        value, slope = jax.value_and_grad(loss)(weights, x)
        slope = jax.tree.map(lambda g: g / jax.lax.axis_size("data"), slope)
        return jax.lax.pmean(value, "data"), jax.tree.map(lambda w, g: w - g, weights, slope)

    x = jax.device_put(normal(9, B, T, WIDTH), NamedSharding(mesh, P("data")))
    placed = jax.device_put(weights(), NamedSharding(mesh, P()))
    assert set(collectives(run.lower(placed, x).compile())) == {"all-reduce"}
    close(run(placed, x), single_step())


TWO_PROCESSES = """
import functools, os, sys
import jax
address, rank, axis = sys.argv[1], int(sys.argv[2]), os.environ["AXIS"]
jax.distributed.initialize(address, 2, rank, local_device_ids=[rank])
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jax_flash.context_parallel import attention, reorder
from tests.gpu import test_cuda_sharded as t
mesh = jax.make_mesh((2,), (axis,), (AxisType.Auto,))
def place(x, spec):
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda i: x[i])
x, step = t.normal(9, t.B, t.LENGTHS[axis], t.WIDTH), t.train_step
if axis == "seq":
    ring = functools.partial(attention, axis_name=axis, strategy="ring", order="zigzag")
    x, step = reorder(x, "zigzag", 2, 1), functools.partial(step, attend=ring)
x = place(x, P(None, axis) if axis == "seq" else P(axis))
weights = {n: place(w, P()) for n, w in t.weights().items()}
with jax.set_mesh(mesh):
    value, new = jax.jit(step, out_shardings=NamedSharding(mesh, P()))(weights, x)
np.savez(f"rank{rank}.npz", value=value, **{n: w.addressable_data(0) for n, w in new.items()})
"""
LENGTHS = {"data": T, "seq": 512}


@pytest.mark.parametrize("axis", ["data", "seq"])
def test_two_processes(tmp_path, axis):
    """One GPU each, an empty cache of kernels that both fill, one training step together."""
    run_two_processes(TWO_PROCESSES, tmp_path, AXIS=axis)
    results = [np.load(tmp_path / f"rank{rank}.npz") for rank in range(2)]
    for result in results:
        new = {name: result[name] for name in weights()}
        close((result["value"], new), single_step(LENGTHS[axis]))
    assert_same_bits(dict(results[0]), dict(results[1]))
