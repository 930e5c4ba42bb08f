"""Programs of 16 bits under each switch that JAX's own tests turn on: traced, run, split."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_flash
from jax_flash import context_parallel, masks, reference, scores
from jax_flash.layers import linen as flash_linen
from jax_flash.layers import nnx as flash_nnx

from .. import small
from ..conftest import needs_module

P = PartitionSpec
B, T, S, N, K, H = 2, 8, 16, 4, 2, 8
DTYPE = jnp.bfloat16
normal = functools.partial(small.normal, dtype=DTYPE)
LENGTHS = {
    "query_seq_lengths": np.array([T, 3], np.int32),
    "key_value_seq_lengths": np.array([S, 9], np.int32),
}
PLACES = {
    "query_positions": np.arange(B * T, dtype=np.int32).reshape(B, T) % 7,
    "key_value_positions": np.arange(B * S, dtype=np.int32).reshape(B, S) % 9,
}
SEGMENTS = {
    "query_segment_ids": PLACES["query_positions"] // 4,
    "key_value_segment_ids": PLACES["key_value_positions"] // 4,
}


def qkv() -> dict[str, jax.Array]:
    shapes = {"query": (B, T, N, H), "key": (B, S, K, H), "value": (B, S, K, H)}
    return {name: normal(i, *shape) for i, (name, shape) in enumerate(shapes.items())}


def total(results) -> jax.Array:
    """The sum of all numbers of a result but infinite ones."""
    wide = [x.astype(jnp.float32) for x in jax.tree.leaves(results)]
    return sum((jnp.sum(jnp.where(jnp.isfinite(x), x, 0.0)) for x in wide), jnp.float32(0))


# ---- programs ------------------------------------------------------------------------------------


def derivatives(call: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a dict of floats: the result of a call, and its derivatives of each kind."""

    def every(moving):
        gradient = jax.grad(lambda moving: total(call(moving)))
        return jax.jvp(call, (moving,), (moving,)), jax.jvp(gradient, (moving,), (moving,))

    return every


def terms(backend):
    def call(moving):
        return jax_flash.flash_attention(
            **moving, **LENGTHS, **SEGMENTS, mask=np.ones((T, S), bool), softcap=3.0,
            is_causal=True, causal_align="bottom_right", local_window_size=(9, None),
            dropout_rate=0.2, dropout_key=jax.random.key(0), return_lse=True, backend=backend,
        )  # fmt: skip

    return derivatives(call), qkv() | {"bias": normal(3, N, T, S), "sinks": normal(4, N)}


def positions(backend):
    """An array as scale, a bias and sinks wider than the query."""

    def call(moving):
        return jax_flash.flash_attention(
            **moving, **PLACES, local_window_size=(4, 3), backend=backend
        )

    wide = {"bias": small.normal(3, B, 1, T, 1), "sinks": small.normal(4, N)}
    return derivatives(call), qkv() | wide | {"scale": jnp.asarray(0.3, DTYPE)}


def members(backend):
    """Queries that share keys and a bias, in float16."""

    def call(moving):
        attend = functools.partial(jax_flash.flash_attention, backend=backend)
        arrays = (moving[name] for name in ("query", "key", "value"))
        return jax.vmap(attend, (0, None, None))(*arrays)

    shared = {name: x.astype(jnp.float16) for name, x in qkv().items()}
    return derivatives(call), shared | {"query": jnp.stack([shared["query"]] * 3)}


def functions(backend):
    """Every function of scores that the package makes, of arrays."""

    def call(moving):
        positive = jnp.abs(moving["rates"]) + 1
        function = scores.compose(
            scores.alibi(moving["rates"]),
            scores.relative_position_table(moving["table"]),
            scores.relative_position_buckets(moving["table"][:, 1:], max_distance=9),
            scores.distance_decay(positive, positive),
            scores.softcap(positive[0]),
            scores.tanh(positive[1]),
        )
        arrays = {name: moving[name] for name in ("query", "key", "value")}
        return jax_flash.flash_attention(**arrays, score_mod=function, **LENGTHS, backend=backend)

    return derivatives(call), qkv() | {"rates": normal(3, N), "table": normal(4, N, 9)}


def blocks(backend):
    """Block masks of arrays, of which one is made outside of the call."""
    ids = jnp.asarray(SEGMENTS["key_value_segment_ids"])
    seen = masks.documents(ids[:, :T], ids) | masks.prefix_lm(ids[:, -1])
    mask = jax_flash.block_mask(seen, q_len=T, kv_len=S, batch=B, block=16)

    def call(moving):
        own = jax_flash.block_mask(masks.dilated(9, 3), q_len=T, kv_len=S, heads=N, block=16)
        attend = functools.partial(jax_flash.flash_attention, **moving, backend=backend)
        return attend(block_mask=mask), attend(block_mask=own)

    return derivatives(call), qkv()


def decoding(backend):
    """Into rows and pages, new keys in place, and from a cache that is filled by a prompt."""
    lengths = np.array([9, 5], np.int32)
    table = np.arange(8, dtype=np.int32).reshape(B, 4)

    def call(arrays):
        new = {name: arrays[name][:, :3] for name in ("query", "key", "value")}
        query, new = new["query"], {"new_key": new["key"], "new_value": new["value"]}
        decode = functools.partial(jax_flash.decode_attention, backend=backend, rotary_base=1e4)
        rows = decode(
            query, arrays["key"], arrays["value"], lengths, **new, sinks=arrays["sinks"],
            softcap=3.0, local_window_size=6, scale=arrays["scale"],
        )  # fmt: skip
        pages = (arrays[name].reshape(-1, 4, K, H) for name in ("key", "value"))
        paged = decode(query, *pages, lengths, **new, page_table=table)
        flat = {name: x.reshape(-1, *x.shape[2:]) for name, x in {"query": query, **new}.items()}
        ragged = jax_flash.ragged_paged_attention(
            key_pages=arrays["key"].reshape(-1, 4, K, H), rows=np.int32(2), lengths=lengths,
            value_pages=arrays["value"].reshape(-1, 4, K, H), page_table=table, rotary_base=1e4,
            query_starts=np.array([0, 3, 5], np.int32), local_window_size=4, backend=backend,
            **flat,
        )  # fmt: skip
        prompt = (arrays[name][:, :T] for name in ("key", "value"))
        filled = jax_flash.fill_cache(
            arrays["key"], arrays["value"], *prompt, lengths, start=np.array([2, 1], np.int32)
        )
        latent = jax_flash.decode_attention(
            query, arrays["key"], None, lengths, value_dim=4, backend=backend
        )
        return rows, paged, ragged, filled, latent

    return call, qkv() | {"sinks": normal(4, N), "scale": jnp.asarray(0.3, DTYPE)}


def plain(backend):
    del backend

    def call(moving):
        common = {"query": moving["query"], "key": moving["key"], "value": moving["value"]}
        return reference.attention(
            **common, **LENGTHS, **SEGMENTS, bias=moving["bias"], sinks=moving["sinks"],
            mask=jnp.ones((T, S), bool), softcap=3.0, is_causal=True, causal_align="bottom_right",
            dropout_rate=0.2, dropout_key=jax.random.key(0), return_lse=True,
        ), reference.attention(
            **common, **PLACES, local_window_size=4, scale=moving["bias"][0, 0, 0],
            score_mod=scores.alibi(moving["sinks"]),
        )  # fmt: skip

    return derivatives(call), qkv() | {"bias": normal(3, N, T, S), "sinks": normal(4, N)}


def of_layers(backend):
    """Linen's: a step of training; NNX's: a padded prompt into a cache, and a step from it."""
    options = {"num_kv_heads": K, "rotary_base": 1e4, "is_causal": True, "use_sinks": True}
    linen = flash_linen.FlashAttention(N, **options, dtype=DTYPE)
    own = flash_nnx.FlashAttention(N, N * H, **options, param_dtype=DTYPE, rngs=nnx.Rngs(0))
    own.init_cache((B,), S, DTYPE)
    graph, state = nnx.split(own)
    flax = nn.MultiHeadDotProductAttention(
        N, attention_fn=functools.partial(flash_linen.attention_fn, backend=backend), dtype=DTYPE
    )

    def call(arrays):
        x = arrays["x"]
        variables = linen.init(jax.random.key(0), x)
        gradient = jax.grad(lambda variables: total(linen.apply(variables, x)))(variables)
        layer = nnx.merge(graph, arrays["state"])
        prompt = layer(x, decode=True, seq_lengths=LENGTHS["query_seq_lengths"])
        step = layer(x[:, :1], decode=True)
        variables = flax.init(jax.random.key(0), x)
        return gradient, prompt, step, flax.apply(variables, x, mask=nn.make_causal_mask(x[..., 0]))

    return call, {"x": normal(0, B, T, N * H), "state": state}


PROGRAMS = {
    f.__name__: f
    for f in (terms, positions, members, functions, blocks, decoding, plain, of_layers)
}
ON_XLA = ("functions", "blocks", "plain", "of_layers")
# All at once: each of them refuses something, or should change nothing but dropout's words.
SWITCHES = {
    "numpy_dtype_promotion": "strict",
    "numpy_rank_promotion": "raise",
    "check_tracer_leaks": True,
    "debug_nans": True,
    "threefry_partitionable": False,
    "enable_custom_prng": True,
}


def turn(values: dict[str, Any]) -> dict[str, Any]:
    """Sets switches for all threads, and returns what they were."""
    before = {name: getattr(jax.config, f"jax_{name}") for name in values}
    for name, value in values.items():
        jax.config.update(f"jax_{name}", value)
    return before


@pytest.fixture(params=[False, True], ids=["x32", "x64"])
def _switched(request):
    before = turn(SWITCHES | {"enable_x64": request.param})
    yield
    turn(before)


@pytest.mark.usefixtures("_switched")
@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, x) for name in PROGRAMS for x in ("xla", "cpu") if x == "xla" or name not in ON_XLA],
)
def test_programs_are_traced(name, backend):
    """No dtype and no rank is promoted, no tracer leaks."""
    function, arrays = PROGRAMS[name](backend)
    jax.jit(function).lower(arrays)


@pytest.mark.usefixtures("_switched")
@needs_module
@pytest.mark.parametrize("name", ["terms", "positions", "members", "functions", "decoding"])
def test_programs_are_lowered_for_gpus(name):
    function, arrays = PROGRAMS[name](None)
    jax.jit(function).trace(arrays).lower(lowering_platforms=("cuda",))


# ---- run -----------------------------------------------------------------------------------------


def step(attend, arrays: dict[str, jax.Array]):
    """Out and gradients of a call with one kv head for all devices, and dropout."""

    def call(arrays):
        key = jax.random.PRNGKey(0)
        return attend(**arrays, is_causal=True, dropout_rate=0.2, dropout_key=key)

    out, pull = jax.vjp(call, arrays)
    return out, pull(jnp.cos(out))


def few_heads() -> dict[str, jax.Array]:
    """Arrays of 32 tokens, so that each of two devices has the 16 that dropout takes together."""
    shapes = {"query": (B, 32, N, H), "key": (B, 32, 1, H), "value": (B, 32, 1, H)}
    arrays = {name: normal(i, *shape) for i, (name, shape) in enumerate(shapes.items())}
    return arrays | {"bias": normal(3, N, 1, 32), "sinks": normal(4, N)}


ATTEND = functools.partial(jax_flash.flash_attention, backend="cpu")
RING = functools.partial(context_parallel.attention, axis_name="seq", strategy="ring")
OF_HEADS = {"query": P(None, None, "heads"), "bias": P("heads"), "sinks": P("heads")}
OF_TOKENS = dict.fromkeys(("query", "key", "value"), P(None, "seq"))
WAYS = {
    "eager": (ATTEND, None, None),
    "jit": (ATTEND, None, None),
    "split heads": (ATTEND, AxisType.Auto, OF_HEADS),
    "split heads, by types": (ATTEND, AxisType.Explicit, OF_HEADS),
    "split tokens": (RING, AxisType.Auto, OF_TOKENS),
}


@functools.cache
def expected():
    with jax.threefry_partitionable(SWITCHES["threefry_partitionable"]):
        return jax.jit(functools.partial(step, ATTEND))(few_heads())


@pytest.mark.parametrize("x64", [False, True], ids=["x32", "x64"])
@pytest.mark.parametrize("way", WAYS)
def test_programs_run(way, x64):
    attend, kind, specs = WAYS[way]
    want, arrays = expected(), few_heads()
    mesh = None
    if specs is not None:
        (axis,) = {name for spec in specs.values() for name in spec if name}
        if len(jax.devices("cpu")) < 2:
            pytest.skip("needs two CPU devices (XLA_FLAGS was set without them)")
        mesh = jax.make_mesh((2,), (axis,), (kind,), devices=jax.devices("cpu")[:2])
        arrays = {
            name: jax.device_put(x, NamedSharding(mesh, specs.get(name, P())))
            for name, x in arrays.items()
        }
    run = functools.partial(step, attend)
    before = turn(SWITCHES | {"enable_x64": x64})
    try:
        with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
            got = (run if way == "eager" else jax.jit(run))(arrays)
    finally:
        turn(before)
    assert jax.tree.map(lambda x: x.dtype, got) == jax.tree.map(lambda x: x.dtype, want)
    # Parts of two devices are rounded before they are added: a unit of bfloat16 in the last place.
    small.close(got, want, rtol=2**-7)
