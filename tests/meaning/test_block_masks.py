"""Block masks: what they are made of, what is found of them, what they read, how they print.

That every backend computes with them what it should is in tests/conformance_cases.py.
"""

from __future__ import annotations

import doctest
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jax_flash
from jax_flash import block_masks, masks, reference

from ..devices import mesh_of
from ..small import close
from .masked_calls import DOCUMENTS, S, T, lattice, qkv


@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("heads", [None, 3])
def test_a_function_is_evaluated_everywhere(batch, heads):
    def mask_mod(b, h, q, k):
        return lattice(b, h, q, k) & (q < 20) | (k >= 33)

    make = functools.partial(
        jax_flash.block_mask, mask_mod, q_len=T, kv_len=S, batch=batch, heads=heads, block=16
    )
    m, traced = make(), jax.jit(make)()
    b, h, q, k = np.indices((batch or 1, heads or 1, T, S))
    want = mask_mod(b, h, q, k)
    want = want if batch else want[0]
    np.testing.assert_array_equal(m.dense(), want)
    np.testing.assert_array_equal(traced.dense(), want)
    assert m.numbers.shape == (*((batch,) if batch else ()), heads or 1, 3, 4)
    assert traced.numbers.shape == m.numbers.shape
    # The last column is full, what is before it in the last row empty.
    assert (np.asarray(m.numbers[..., 3]) == block_masks.FULL).all()
    assert (np.asarray(m.numbers[..., 2, :2]) == block_masks.EMPTY).all()
    assert m.density == pytest.approx(float(jax.jit(lambda m: m.density)(m)))
    assert m.density == pytest.approx(np.mean(np.asarray(m.numbers) != block_masks.EMPTY))


@pytest.mark.quick
def test_bits_are_kept_of_partial_blocks_that_differ():
    causal = jax_flash.block_mask(masks.causal(), q_len=512, kv_len=512, block=64).as_blocks()
    assert causal.bits.shape == (1, 64, 4)  # eight diagonal blocks, all the same
    assert causal.density == (8 * 9 / 2) / 64
    own = jax_flash.block_mask(lattice, q_len=160, kv_len=32, block=32)
    assert own.bits.shape == (5, 32, 2)  # the lattice has a period of 5 blocks of 32
    documents = masks.documents(np.arange(512) // 128)
    whole = jax_flash.block_mask(documents, q_len=512, kv_len=512, block=64).as_blocks()
    assert whole.bits.shape == (0, 64, 4)  # a layout
    np.testing.assert_array_equal(whole.dense()[0], np.kron(np.eye(4), np.ones((128, 128))) > 0)
    layout = jax_flash.block_mask_of(masks.butterfly(8), block=64)
    assert layout.bits.shape == (0, 64, 4)
    dense = np.kron(masks.butterfly(8), np.ones((64, 64), bool))
    np.testing.assert_array_equal(layout.dense(), dense[None])


@pytest.mark.parametrize(("batch", "heads"), [(0, 2), (2, 0)])
def test_equal_chunks_of_nothing(batch: int, heads: int):
    m = jax_flash.block_mask(masks.documents(np.arange(64) // 32), q_len=64, kv_len=64, block=32)
    x = jnp.zeros((batch, 64, heads, 16))
    out, lse = jax_flash.flash_attention(x, x, x, block_mask=m, return_lse=True)
    assert (out.shape, lse.shape) == (x.shape, x.shape[:-1])


@pytest.mark.parametrize(
    "ids",
    [
        np.arange(128) // 48,  # the last one is shorter
        np.array([0] * 32 + [1] * 64 + [2] * 32),
        np.arange(128) // 16,  # within a block
        np.arange(128) // 64 % 1,  # one
        np.array([0] * 32 + [1] * 32 + [0] * 64),
    ],
)
def test_other_documents_are_no_chunks(ids: np.ndarray):
    assert jax_flash.block_mask(masks.documents(ids), q_len=128, kv_len=128, block=32).chunk is None


WINDOWS = {
    "causal": (masks.causal(), (None, 0)),
    "causal behind": (masks.causal(5), (None, 5)),
    "window": (masks.sliding_window(7, 3), (7, 3)),
    "both": (masks.causal() & masks.sliding_window(9), (9, 0)),
    "either": (masks.causal() | masks.sliding_window(9), (None, 9)),
    "not": (~masks.causal(-1), (0, None)),
    "wide": (lambda b, h, q, k: k <= q + 10**6, (None, 10**6)),
    "magnitude": (lambda b, h, q, k: jnp.abs(k - q) < 4, (3, 3)),
    "difference": (lambda b, h, q, k: jnp.logical_and(q - k >= 0, q - k < 5), (4, 0)),
    "array": (lambda b, h, q, k: q > k - jnp.int32(3), (None, 2)),
    "own": (masks.causal() & ~masks.causal(-1), (0, 0)),
    # No windows, or without the query's own index.
    "before": (masks.causal(-3), None),
    "apart": (masks.causal(-5) | (lambda b, h, q, k: k >= q), None),
    "prefix": (masks.prefix_lm(3), None),
    "dilated": (masks.dilated(2, 3), None),
    "strided": (masks.strided(4), None),
    "of heads": (lambda b, h, q, k: q - k <= h, None),
    "by index": (lambda b, h, q, k: q <= 30, None),
    "sum": (lambda b, h, q, k: q + k <= 30, None),
    "half": (lambda b, h, q, k: q >= 2 * k, None),
    "wraps": (lambda b, h, q, k: k <= q + (2**31 - 1), None),
    "unsigned": (lambda b, h, q, k: (q - k).astype(jnp.uint32) <= 5, None),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", WINDOWS)
def test_windows_are_found(name):
    mask_mod, window = WINDOWS[name]
    make = functools.partial(jax_flash.block_mask, mask_mod, q_len=T, kv_len=S, block=16)
    m = make()
    assert m.window == window
    assert jax.jit(make)().window == window
    if window is not None:
        distance = np.arange(S) - np.arange(T)[:, None]
        left, right = (np.inf if side is None else side for side in window)
        np.testing.assert_array_equal(m.dense()[0], (-left <= distance) & (distance <= right))


class Reach:
    """How far back a query sees, which may change; all are equal, as jax's caches compare them."""

    reach = 0

    def __call__(self, b, h, q, k):
        return (k <= q) & (q - k < self.reach)

    def method(self, b, h, q, k):
        return self(b, h, q, k)

    def __eq__(self, other):
        return isinstance(other, Reach)

    def __hash__(self):
        return 0


def test_what_a_function_reads_may_change():
    """Between calls, of one function: as windows, and as blocks."""
    state, array = Reach(), np.zeros((), np.int32)

    def closes_over(b, h, q, k):
        return (k <= q) & (q - k < state.reach)

    def has_default(b, h, q, k, state=state):
        return closes_over(b, h, q, k)

    functions = {
        "closure": closes_over,
        "default": has_default,
        "method": state.method,
        "object": state,
        "partial": functools.partial(lambda s, *at: s(*at), state),
        "mask": masks.Mask(closes_over),
        "masks": masks.causal() & closes_over,
        "number": lambda b, h, q, k: (k <= q) & (q - k < array),
        "array": lambda b, h, q, k: (k <= q) & (q - k < jnp.arange(20)[state.reach]),
        "table": lambda b, h, q, k: (k <= q) & jnp.asarray(np.arange(T) < state.reach)[q - k],
        "constant": lambda b, h, q, k: state.reach > 3,
    }
    apart = np.arange(T)[:, None] - np.arange(T)
    for name, function in functions.items():
        make = functools.partial(jax_flash.block_mask, function, q_len=T, kv_len=T, block=16)
        for state.reach in (3, 7):
            array[...] = state.reach
            near = (apart >= 0) & (apart < state.reach)
            want = np.full_like(near, state.reach > 3) if name == "constant" else near
            m = make()
            traced = jax.eval_shape(lambda make=make: make())  # jax remembers make itself
            assert traced.window == m.window, name
            if name in ("array", "table", "constant"):
                assert m.window is None
            else:
                assert m.window == (state.reach - 1, 0), name
            np.testing.assert_array_equal(m.dense()[0], want, err_msg=name)
            if name in ("method", "table"):
                np.testing.assert_array_equal(jax.jit(lambda make=make: make().dense())()[0], want)


def test_attention_sees_what_a_function_reads_now(host_backend):
    q, k, v = qkv(1, T)
    state = Reach()
    for state.reach in (3, 12):
        m = jax_flash.block_mask(state, q_len=T, kv_len=T, block=16)
        out = jax_flash.flash_attention(q, k, v, block_mask=m, backend=host_backend)
        apart = np.arange(T)[:, None] - np.arange(T)
        near = jnp.asarray((apart >= 0) & (apart < state.reach))
        close(out, reference.attention(q, k, v, mask=near))


def test_masks_that_differ_in_numbers_and_arrays_are_of_one_program(request):
    """Nothing is compiled for the others, and nothing kept."""
    compiled: list[str] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        compiled.extend([event] if "backend_compile" in event else [])

    jax.monitoring.register_event_duration_secs_listener(listen)
    request.addfinalizer(
        functools.partial(jax.monitoring.unregister_event_duration_listener, listen)
    )

    def make(seed: int):
        ids = np.sort(np.random.default_rng(seed).integers(0, 4, 64))
        mask = masks.documents(ids) & masks.dilated(9 + seed, 1 + seed) | masks.causal(-3 * seed)
        m = jax_flash.block_mask(mask, q_len=64, kv_len=64, block=16)
        window = jax_flash.block_mask(masks.sliding_window(seed), q_len=64, kv_len=64, block=16)
        assert window.window == (seed, seed)
        return m.numbers

    client = jax.devices()[0].client
    jax.block_until_ready(make(1))
    assert compiled
    kept = len(client.live_executables())
    compiled.clear()
    for seed in range(2, 8):
        jax.block_until_ready(make(seed))
    assert compiled == []
    assert len(client.live_executables()) == kept


def test_windows_that_are_found_are_what_is_evaluated(monkeypatch):
    """Outside of jit what is found is compared with the evaluated mask, and left if it differs."""
    rng = np.random.default_rng(0)

    def tree(depth: int):
        if depth == 0:
            sign, offset, kind = rng.choice([-1, 1]), int(rng.integers(-6, 7)), rng.integers(4)
            ends = {
                0: lambda b, h, q, k: sign * (k - q) <= offset,
                1: lambda b, h, q, k: q + offset > sign * k,
                2: lambda b, h, q, k: jnp.abs(k - q + offset) < 5,
                3: lambda b, h, q, k: k + 1 >= q - offset,
            }
            return masks.Mask(ends[int(kind)])
        a, b = tree(depth - 1), tree(depth - 1)
        return [a & b, a | b, ~a & b, ~(a | b)][rng.integers(4)]

    def make(mask):
        return jax_flash.block_mask(mask, q_len=T, kv_len=S, block=16)

    trees = [tree(int(rng.integers(3))) for _ in range(60)]
    found = [jax.eval_shape(functools.partial(make, mask)).window for mask in trees]
    windows = [i for i, window in enumerate(found) if window is not None][:8]
    assert len(windows) == 8
    for i in windows:
        assert make(trees[i]).window == found[i]

    monkeypatch.setattr(block_masks, "window_of", lambda *_: (3, 0))  # as if it were wrong
    m = make(masks.causal())
    assert m.window is None
    np.testing.assert_array_equal(m.dense()[0], np.tri(T, S))


@pytest.mark.quick
def test_ranks_are_not_promoted():
    ids = jnp.asarray(DOCUMENTS)

    def step(ids):
        mask = masks.documents(ids) & masks.prefix_lm(jnp.array([3, 7])) & ~masks.causal(-9)
        return jax_flash.block_mask(mask, q_len=T, kv_len=T, batch=2, block=16).dense()

    with jax.numpy_rank_promotion("raise"):
        np.testing.assert_array_equal(step(ids), jax.jit(step)(ids))


def test_functions_may_draw_and_ask_where_they_run():
    """By random keys, old and new; in a member of a vmap; on a device of a shard_map."""
    key = jax.random.key(0)

    def draws(key):
        def at(b, h, q, k):
            return jax.random.bernoulli(jax.random.fold_in(key, q // 16 * 3 + k // 16))

        return jax_flash.block_mask(at, q_len=48, kv_len=48, block=16).numbers[0]

    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(9))
    want = np.where(jax.vmap(jax.random.bernoulli)(keys).reshape(3, 3), -1, -2)
    for one in (key, jax.random.PRNGKey(0)):
        np.testing.assert_array_equal(draws(one), want)
        np.testing.assert_array_equal(jax.jit(draws)(one), want)

    def own(_):
        causal = masks.Mask(lambda b, h, q, k: k + 16 * jax.lax.axis_index("data") <= q)
        return jax_flash.block_mask(causal, q_len=48, kv_len=48, block=16).dense()

    want = np.stack([np.tri(48, 48, -16 * i) for i in range(2)])
    members = jax.vmap(own, axis_name="data")(jnp.arange(2))
    np.testing.assert_array_equal(members[:, 0], want)
    mesh = mesh_of((2, 4))
    placed = jax.shard_map(own, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    np.testing.assert_array_equal(jax.jit(placed)(jnp.arange(2)), want)


@pytest.mark.quick
def test_a_mask_is_never_written_out():
    length = 4096
    make = functools.partial(jax_flash.block_mask, masks.prefix_lm(9), q_len=length, kv_len=length)
    states = jax.jit(lambda: make().numbers).lower().compile()
    row = 128 * length * 4  # int32 of a row of blocks
    assert states.memory_analysis().temp_size_in_bytes < 2 * row + length**2 // 8


@pytest.mark.quick
def test_the_picture():
    m = jax_flash.block_mask(
        masks.causal() & masks.sliding_window(20), q_len=40, kv_len=64, block=16
    )
    assert str(m) == (
        "BlockMask(q_len=40, kv_len=64, block=16, blocks=[1, 3, 4], density=0.5)\n▒···\n▒▒··\n▒▒▒·"
    )
    large = jax_flash.block_mask_of(np.ones((2, 100, 100), bool), block=16)
    assert "one sign for 2 x 2 blocks" in repr(large)
    assert "the first of 2 planes" in repr(large)
    traced = []
    jax.jit(lambda m: traced.append(repr(m)))(m.as_blocks())
    assert traced[0].startswith("BlockMask(q_len=40, kv_len=64, block=16, numbers=")


def test_documented_masks_are_what_their_examples_say():
    for module in (masks, block_masks):
        failed, tried = doctest.testmod(module)
        assert tried > 5
        assert failed == 0


@pytest.mark.quick
def test_masks_combine():
    q, k = np.indices((30, 30))
    ids = np.repeat([0, 1, 2], 10)
    both = masks.documents(ids) & (masks.causal() | (lambda b, h, q, k: k < 3)) & ~masks.causal(-5)
    want = (ids[q] == ids[k]) & ((k <= q) | (k < 3)) & ~(k <= q - 5)
    m = jax_flash.block_mask(both, q_len=30, kv_len=30, block=16)
    np.testing.assert_array_equal(m.dense()[0], want)
    other = (lambda b, h, q, k: q == 0) | masks.strided(7)
    m = jax_flash.block_mask(other, q_len=30, kv_len=30, block=16)
    want = (q == 0) | (k <= q) & ((q - k < 7) | ((q - k) % 7 == 0))
    np.testing.assert_array_equal(m.dense()[0], want)
    assert masks.butterfly(6, 12).shape == (6, 12)
    assert masks.butterfly(6, 12).any(0).all()
    assert masks.butterfly(6, 12).any(1).all()
    assert (masks.butterfly(16, max_stride=4).sum(1) == 3).all()
    assert (masks.butterfly(16, max_stride=16) == masks.butterfly(16)).all()


@pytest.mark.quick
def test_explain_says_what_runs_it():
    q = jax.ShapeDtypeStruct((2, 256, 4, 64), "bfloat16")
    for mask_mod, text in ((masks.prefix_lm(9), "block mask"), (masks.causal(), ", causal")):
        make = functools.partial(jax_flash.block_mask, mask_mod, q_len=256, kv_len=256)
        m = jax.eval_shape(make)
        explanation = jax_flash.explain(q, q, q, block_mask=m, backend="xla")
        assert text in str(explanation)
