"""A split sequence in JAX's programs: which collectives, under which transformations and processes.

That results are one device's is in test_context_parallel.py.
"""

from __future__ import annotations

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash
from jax_flash.context_parallel import attention

from ..devices import collectives, mesh_with
from ..processes import run_two_processes, with_devices
from ..small import close, normal
from .split_sequences import SHARDS, SPLIT, B, H, N, T, qkv

# ---- collectives ---------------------------------------------------------------------------------

PERMUTE, GATHER, SCATTER, EXCHANGE = (
    "collective-permute",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
)
COUNTS = {  # of a forward pass, and of it with its backward pass
    # Keys and values, three hops; in the backward pass again, and their gradients, which go home.
    ("ring", "zigzag", None): ({PERMUTE: 6}, {PERMUTE: 6 + 6 + 6}),
    ("ring", "contiguous", (16, 0)): ({PERMUTE: 2}, {PERMUTE: 2 + 2 + 2}),
    ("ring", "contiguous", (17, 16)): ({PERMUTE: 6}, {PERMUTE: 18}),
    ("all_to_all", "striped", None): ({EXCHANGE: 4}, {EXCHANGE: 8}),
    ("all_gather", "zigzag", None): ({GATHER: 2}, {GATHER: 2, SCATTER: 2}),
    ("all_gather", "contiguous", (16, 0)): ({PERMUTE: 2}, {PERMUTE: 4}),
    ("all_gather", "contiguous", (16, 3)): ({PERMUTE: 4}, {PERMUTE: 8}),
}


@pytest.mark.parametrize(("strategy", "order", "window"), COUNTS)
def test_collectives_are_those_of_the_strategy(strategy, order, window):
    mesh = mesh_with(explicit=True, data=2, seq=SHARDS)
    forward, both = COUNTS[strategy, order, window]
    if strategy == "ring":
        both = with_forward_again(forward, both)
    assert compiled_counts(mesh, P("data", "seq"), strategy, order, window) == (forward, both)


def with_forward_again(forward, both):
    """On a CPU XLA drops barriers before jax 0.11: what arrived in the forward pass is kept."""
    again = jax.__version_info__ >= (0, 11)
    return both if again else {PERMUTE: both[PERMUTE] - forward[PERMUTE]}


def test_gradients_travel_in_their_own_dtype():
    """Those of each step go home by themselves: no sum of several does, which is in float32."""
    ring = functools.partial(
        attention, axis_name="seq", strategy="ring", order="zigzag", is_causal=True, backend="cpu"
    )

    def gradients(*qkv):
        return jax.grad(lambda *qkv: jnp.sum(ring(*qkv)), argnums=(0, 1, 2))(*qkv)

    x = normal(0, B, T, N, H, dtype=jnp.bfloat16)
    with jax.set_mesh(mesh_with(seq=SHARDS)):
        text = jax.jit(gradients).lower(x, x, x).as_text()
    sent = collections.Counter(re.findall(r"collective_permute.*-> tensor<.*x(\w+)>", text))
    assert sent == {"bf16": 6 + 6 + 6}


def test_keys_go_on_beside_the_step_that_they_arrived_for():
    """By what a permutation needs, no sooner: XLA's scheduler would begin with all of them."""
    ring = functools.partial(attention, axis_name="seq", strategy="ring", order="zigzag")

    def gradients(q, k, v, dout):
        return jax.vjp(functools.partial(ring, is_causal=True), q, k, v)[1](dout)

    x = jax.ShapeDtypeStruct((B, T, N, H), jnp.float32)
    with jax.set_mesh(mesh_with(seq=SHARDS)):
        jaxpr = jax.make_jaxpr(gradients)(x, x, x, x).jaxpr
    sent: list[int] = []
    count_calls(jaxpr, [0] * 4, sent)
    # Either pass has four calls, of the own keys and of three steps. Keys leave both ways ahead of
    # the first, the farther ones beside the second; gradients of each step behind it.
    keys = [0] * 4 + [1] * 2
    assert sorted(sent) == sorted([*keys, *(4 + x for x in (*keys, 2, 2, 3, 3, 4, 4))])


def count_calls(jaxpr, given, sent):
    """Returns of each result how many calls of kernels it needs; adds to `sent` of what is sent."""
    counts = dict(zip(jaxpr.invars, given, strict=True))
    for eqn in jaxpr.eqns:
        needed = [counts.get(x, 0) for x in eqn.invars if not isinstance(x, Literal)]
        made = [max(needed, default=0)] * len(eqn.outvars)
        name = eqn.primitive.name
        if name == "ppermute":
            sent += made
        elif name in ("flash_forward", "flash_backward", "cond"):
            made = [x + 1 for x in made]
        elif name in ("jit", "pjit", "shard_map"):
            inner = eqn.params["jaxpr"]
            given = [0 if isinstance(x, Literal) else counts.get(x, 0) for x in eqn.invars]
            made = count_calls(getattr(inner, "jaxpr", inner), given, sent)
        counts |= zip(eqn.outvars, made, strict=True)
    return [0 if isinstance(x, Literal) else counts.get(x, 0) for x in jaxpr.outvars]


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_a_ring_leaves_other_axes_alone(explicit):
    mesh = mesh_with(explicit, data=2, seq=2, model=2)
    counts = compiled_counts(mesh, P("data", "seq", "model"), "ring", "zigzag", None)
    assert counts == ({PERMUTE: 2}, with_forward_again({PERMUTE: 2}, {PERMUTE: 6}))


def compiled_counts(mesh, spec, strategy, order, window):
    attend = functools.partial(
        attention, axis_name="seq", strategy=strategy, order=order, is_causal=window is None,
        local_window_size=window, backend="cpu",
    )  # fmt: skip

    def gradients(*qkv):
        return jax.grad(lambda *qkv: jnp.sum(jnp.sin(attend(*qkv))), argnums=(0, 1, 2))(*qkv)

    with jax.set_mesh(mesh):
        x = jax.device_put(normal(0, B, T, N, H), NamedSharding(mesh, spec))
        compiled = [jax.jit(f).lower(x, x, x).compile() for f in (attend, gradients)]
    return tuple(dict(collections.Counter(collectives(x))) for x in compiled)


# ---- transformations -----------------------------------------------------------------------------


def layers(attend, x, remat):
    """Three layers under scan, each recomputed but for its attention, and the gradient of all."""

    def layer(x, _):
        return x + attend(x, jnp.sin(x), x, is_causal=True, backend="cpu"), None

    if remat:
        policy = jax.checkpoint_policies.save_only_these_names("flash_out", "flash_lse")
        layer = jax.checkpoint(layer, policy=policy)
    return jax.grad(lambda x: jnp.sum(jnp.sin(jax.lax.scan(layer, x, length=3)[0])))(x)


@pytest.mark.parametrize("strategy", ["ring", "all_to_all"])
def test_scan_and_remat(strategy):
    """The forward pass runs once: no permutation of it is in what is recomputed."""
    mesh, x = mesh_with(data=2, seq=SHARDS), normal(0, B, T, N, H)
    ours = functools.partial(attention, axis_name="seq", strategy=strategy)
    expected = jax.jit(functools.partial(layers, jax_flash.flash_attention, remat=False))(x)
    counts = []
    for remat in (False, True):
        with jax.set_mesh(mesh):
            placed = jax.device_put(x, NamedSharding(mesh, SPLIT))
            step = jax.jit(functools.partial(layers, ours, remat=remat))
            compiled = step.lower(placed).compile()
            close(compiled(placed), expected)
        counts.append(collectives(compiled).count(PERMUTE))
    assert counts[0] == counts[1] == (18 if strategy == "ring" else 0)


def test_vmap():
    mesh, arrays = mesh_with(seq=SHARDS), qkv()
    keys = jnp.stack([arrays["key"], -arrays["key"]])

    def values(attend):
        def gradient(q, k, v):
            return jax.grad(lambda q: jnp.sum(jnp.sin(attend(q, k, v, is_causal=True))))(q)

        mapped = jax.vmap(gradient, in_axes=(None, 0, None))
        return jax.jit(mapped)(arrays["query"], keys, arrays["value"])

    expected = values(jax_flash.flash_attention)
    with jax.set_mesh(mesh):
        close(values(functools.partial(attention, axis_name="seq", strategy="ring")), expected)


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(check_vma):
    """With sinks and kv heads that all devices share; also where shard_map does not check."""
    mesh, arrays = mesh_with(data=2, seq=SHARDS), qkv() | {"sinks": normal(5, N)}

    def gradients(attend):
        return jax.jit(jax.grad(lambda arrays: jnp.sum(jnp.sin(attend(arrays)))))(arrays)

    def ring(arrays):
        return attention(**arrays, axis_name="seq", strategy="ring", is_causal=True)

    specs = {name: P() if name == "sinks" else P("data", "seq") for name in arrays}
    mapped = jax.shard_map(
        ring, mesh=mesh, in_specs=(specs,), out_specs=P("data", "seq"), check_vma=check_vma
    )
    one = gradients(lambda arrays: jax_flash.flash_attention(**arrays, is_causal=True))
    close(gradients(mapped), one)


def test_outside_of_jit():
    mesh, arrays = mesh_with(data=2, seq=SHARDS), qkv()
    placed = {
        n: jax.device_put(x, NamedSharding(mesh, P("data", "seq"))) for n, x in arrays.items()
    }
    out, lse = attention(**placed, axis_name="seq", is_causal=True, return_lse=True)
    assert out.sharding.is_equivalent_to(placed["query"].sharding, 4)
    close((out, lse), jax_flash.flash_attention(**arrays, is_causal=True, return_lse=True))


# ---- processes -----------------------------------------------------------------------------------


def train_step(attend, weights, x, targets):
    def loss(weights):
        q, k, v = (jnp.einsum("btd,dnh->btnh", x, w) for w in weights)
        out = attend(q, k, v, is_causal=True, backend="cpu")
        return jnp.mean((out - targets) ** 2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return value, jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)


def train_arrays():
    return list(normal(0, 3, H, N, H)), normal(1, B, T, H), normal(2, B, T, N, H)


TWO_PROCESSES = """
import functools, sys
import jax
address, rank = sys.argv[1], int(sys.argv[2])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, 2, rank)
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jax_flash.context_parallel import attention, reorder
from tests.meaning import test_context_parallel_programs as t
assert (jax.process_count(), jax.local_device_count()) == (2, 2)
mesh = jax.make_mesh((4,), ("seq",), (AxisType.Auto,))
weights, *data = t.train_arrays()
attend = functools.partial(attention, axis_name="seq", strategy="ring", order="zigzag")
def place(x, spec):
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda i: x[i])
data = [place(reorder(x, "zigzag", 4, 1), t.SPLIT) for x in data]
with jax.set_mesh(mesh):
    step = jax.jit(functools.partial(t.train_step, attend), out_shardings=NamedSharding(mesh, P()))
    value, weights = step([place(w, P()) for w in weights], *data)
np.savez(f"rank{rank}.npz", *(x.addressable_data(0) for x in (value, *weights)))
"""


def test_two_processes_train_a_step_as_one_does(tmp_path):
    run_two_processes(TWO_PROCESSES, tmp_path, **with_devices(2))
    value, weights = jax.jit(functools.partial(train_step, jax_flash.flash_attention))(
        *train_arrays()
    )
    for rank in range(2):
        with np.load(tmp_path / f"rank{rank}.npz") as results:
            close([results[name] for name in results], [value, *weights])
