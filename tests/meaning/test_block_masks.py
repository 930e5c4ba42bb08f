"""Block masks: what they are made of, and what becomes of them under JAX's transformations.

That every backend computes with them what it should is in tests/conformance_cases.py.
"""

from __future__ import annotations

import dataclasses
import doctest
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jax_flash
from jax_flash import block_masks, masks, reference

from ..small import close, normal
from .test_sharding import collectives, mesh_of

P = PartitionSpec
T, S, N, K, H = 40, 50, 4, 2, 8
DOCUMENTS = np.sort(np.random.default_rng(0).integers(0, 4, (2, T)), axis=1)


def lattice(batch, head, query, key):
    return (7 * query + 3 * key + head + 2 * batch) % 5 < 2


def qkv(batch: int = 2, kv_len: int = S):
    shapes = ((batch, T, N, H), (batch, kv_len, K, H), (batch, kv_len, K, H))
    return tuple(normal(seed, *shape) for seed, shape in enumerate(shapes))


def gradients(attention, q, k, v, **options):
    """out, and the gradients of a loss of it."""

    def loss(q, k, v):
        out = attention(q, k, v, **options)
        return jnp.sum(jnp.sin(out)), out

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(q, k, v)


# ---- what they are made of -----------------------------------------------------------------------


@pytest.mark.quick
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
def test_a_window_is_read_in_place_of_the_arrays(host_backend):
    q, k, v = qkv()
    m = jax_flash.block_mask(masks.sliding_window(9, 4), q_len=T, kv_len=S, block=16)
    arrays = m.as_blocks()
    for options in (
        {},
        {"is_causal": True},
        {"local_window_size": (12, 2)},
        {"local_window_size": (3, None)},
        {"key_value_seq_lengths": np.array([50, 7])},
        {"is_causal": True, "causal_align": "bottom_right"},
        {"is_causal": True, "query_positions": 2 * DOCUMENTS},
        {"query_positions": 2 * DOCUMENTS},  # without causality or a window they mean nothing
    ):
        attention = functools.partial(jax_flash.flash_attention, backend=host_backend, **options)
        for one, other, want in zip(
            gradients(attention, q, k, v, block_mask=m),
            gradients(attention, q, k, v, block_mask=arrays),
            gradients(reference.attention, q, k, v, block_mask=m, **options),
            strict=True,
        ):
            close(one, want)
            close(other, want)
    text = str(jax.make_jaxpr(functools.partial(jax_flash.flash_attention, block_mask=m))(q, k, v))
    assert "block_numbers" not in text
    with pytest.raises(ValueError, match="block_mask has q_len 40"):
        jax_flash.flash_attention(q[:, :30], k, v, block_mask=m)


def edited(mask: jax_flash.BlockMask) -> jax_flash.BlockMask:
    """Hides the first row of blocks."""
    return jax.tree.map(lambda x: x.at[..., 0, :].set(-2) if x.dtype == jnp.int32 else x, mask)


def test_arrays_that_are_edited_are_read(host_backend):
    q, k, v = qkv(kv_len=T)
    attend = functools.partial(jax_flash.flash_attention, q, k, v, backend=host_backend)
    documents = masks.documents(np.arange(48) // 16)
    for mask_mod, size in ((masks.causal(), T), (lattice, T), (documents, 48)):
        m = jax_flash.block_mask(mask_mod, q_len=size, kv_len=size, block=16)
        assert len(jax.tree.leaves(m)) == (2 if mask_mod is lattice else 0)
        blocks = m.as_blocks()
        want = np.asarray(m.dense()).copy()
        np.testing.assert_array_equal(blocks.dense(), want)
        want[:, :16] = False
        # A form has no leaves; arrays that are put in its place count.
        replaced = dataclasses.replace(m, numbers=edited(blocks).numbers, bits=blocks.bits)
        for changed in (edited(blocks), jax.jit(edited)(blocks), replaced):
            np.testing.assert_array_equal(changed.dense(), want)
            if size == T:
                close(
                    attend(block_mask=changed), reference.attention(q, k, v, mask=changed.dense())
                )
        np.testing.assert_array_equal(m.numbers, blocks.numbers)
        np.testing.assert_array_equal(m.bits, blocks.bits)
        for part in ({"window": None, "chunk": None}, {"numbers": edited(blocks).numbers}):
            arrays = dataclasses.replace(m, **part)
            assert arrays.window is None
            assert arrays.chunk is None
            np.testing.assert_array_equal(arrays.dense(), want if "numbers" in part else m.dense())
    with pytest.raises(ValueError, match="lacks numbers or bits; expected both, or a window"):
        dataclasses.replace(m, numbers=None, bits=None, window=None, chunk=None).dense()
    with pytest.raises(ValueError, match="lacks q_len or kv_len; expected both"):
        dataclasses.replace(m, numbers=None, bits=None, q_len=None).dense()


LAYERS = {
    "causal": (masks.causal(), {}),
    "window": (masks.sliding_window(9), {}),
    "prefix": (masks.prefix_lm(5), {}),
    "documents": (masks.documents(DOCUMENTS), {"batch": 2}),
    "heads": (lattice, {"heads": N}),
}


def test_masks_of_layers_are_stacked(host_backend):
    """Whatever was found of each: for scan, and to choose one by a traced number."""
    q, k, v = qkv(kv_len=T)
    attend = functools.partial(jax_flash.flash_attention, backend=host_backend)
    layers = [
        jax_flash.block_mask(mask_mod, q_len=T, kv_len=T, block=16, **options)
        for mask_mod, options in LAYERS.values()
    ]
    stacked = jax_flash.stack_block_masks(layers)

    @jax.jit
    def run(q, stacked):
        return jax.lax.scan(lambda x, m: (x + attend(x, k, v, block_mask=m),) * 2, q, stacked)[1]

    @jax.jit
    def one(i, stacked):
        return attend(q, k, v, block_mask=jax.tree.map(lambda x: x[i], stacked))

    x = q
    for i, (m, got) in enumerate(zip(layers, run(q, stacked), strict=True)):
        x = x + reference.attention(x, k, v, mask=m.dense())
        close(got, x)
        close(one(i, stacked), reference.attention(q, k, v, mask=m.dense()))
    same = jax_flash.stack_block_masks([layers[0]] * 3)
    assert same.window == (None, 0)
    with jax.numpy_rank_promotion("raise"):
        traced = jax.jit(lambda: jax_flash.stack_block_masks(layers[1:4]))()
    np.testing.assert_array_equal(traced.numbers, stacked.numbers[1:4, :, :1])
    for wrong, error, message in (
        ([], ValueError, "masks is empty"),
        ([layers[0], masks.causal()], TypeError, r"masks\[1\] is Mask; expected a BlockMask"),
        (
            [layers[0], jax_flash.block_mask(lattice, q_len=T, kv_len=S, block=16)],
            ValueError,
            r"masks\[1\] has q_len 40, kv_len 50 and block 16; expected .*: 40, 40 and 16",
        ),
    ):
        with pytest.raises(error, match=message):
            jax_flash.stack_block_masks(wrong)


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


@pytest.mark.quick
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
def test_wrong_arguments_are_named():
    make = functools.partial(jax_flash.block_mask, q_len=64, kv_len=64)
    cases = [
        (lambda: make(np.ones((64, 64), bool)), TypeError, "mask_mod is ndarray.*block_mask_of"),
        (
            lambda: make(masks.documents(np.zeros((2, 64), int))),
            ValueError,
            "batch is None and mask_mod reads arrays whose batch is 2; expected batch=2",
        ),
        (
            lambda: make(masks.causal() & masks.documents(np.zeros(7, int), np.zeros(64, int))),
            ValueError,
            "expected q_len=7",
        ),
        (lambda: make(~masks.prefix_lm(np.ones(3, int)), batch=2), ValueError, "expected batch=3"),
        (
            lambda: masks.documents(np.zeros(7, int)) | masks.documents(np.zeros(8, int)),
            ValueError,
            "masks of q_len 7 and 8 are combined",
        ),
        (
            lambda: make(lambda q, k: q >= k),
            TypeError,
            r"mask_mod takes \(q, k\); expected .*batch",
        ),
        (lambda: make(lambda b, h, q, k: q + k), TypeError, "mask_mod returns int32.*bool"),
        (lambda: make(lambda b, h, q, k: DOCUMENTS[b, k] > 1), TypeError, "mask_mod gives NumPy"),
        (lambda: make(lambda b, h, q, k: q > k and k > 3), TypeError, "mask_mod asks Python.*, &"),
        (lambda: masks.causal() & np.ones(3, bool), TypeError, "combined with ndarray; expected"),
        (lambda: True | masks.causal(), TypeError, "a mask is combined with bool"),
        (lambda: masks.sliding_window(-1), ValueError, "left is -1; expected 0 or more"),
        (lambda: masks.sliding_window(1, -2), ValueError, "right is -2"),
        (lambda: masks.dilated(2, 0), ValueError, "dilation is 0; expected 1 or more"),
        (lambda: masks.strided(0), ValueError, "stride is 0"),
        (lambda: masks.strided(4.0), TypeError, r"stride is 4\.0; expected an int"),
        (lambda: masks.causal(None), TypeError, "offset is None; expected an int"),
        (lambda: masks.sliding_window(None, 0), TypeError, "left is None; expected an int"),
        (lambda: masks.sliding_window(1, 2.5), TypeError, r"right is 2\.5; expected an int"),
        (lambda: masks.sliding_window(jnp.ones(3)), TypeError, "left is Array.*expected an int"),
        (lambda: masks.dilated("1", 1), TypeError, "window is '1'; expected an int"),
        (lambda: masks.dilated(1, True), TypeError, "dilation is True; expected an int"),
        (
            lambda: jax.jit(lambda x: masks.causal(x)(0, 0, 0, 0))(2.5),
            TypeError,
            r"offset has shape \(\) and dtype float32; expected one int",
        ),
        (lambda: masks.butterfly(2.5), TypeError, r"q_blocks is 2\.5; expected an int"),
        (lambda: masks.butterfly(-1), ValueError, "q_blocks is -1; expected 0 or more"),
        (lambda: masks.butterfly(4, 2.0), TypeError, r"kv_blocks is 2\.0; expected an int"),
        (lambda: masks.butterfly(4, max_stride=2.0), TypeError, r"max_stride is 2\.0; .* an int"),
        (lambda: masks.butterfly(4, max_stride=3), ValueError, "max_stride is 3.*power of two"),
        (lambda: masks.butterfly(4, max_stride=0), ValueError, "max_stride is 0"),
        (lambda: masks.prefix_lm(None), TypeError, "prefix is NoneType; expected int or int "),
        (lambda: masks.prefix_lm(2.5), TypeError, "prefix has dtype float32.*expected int or "),
        (lambda: masks.prefix_lm(np.ones((2, 2), int)), ValueError, r"prefix has shape \(2, 2\)"),
        (lambda: masks.documents("ab"), TypeError, "query_ids is str; expected int "),
        (lambda: masks.documents(np.zeros(3)), TypeError, "query_ids has dtype float32"),
        (lambda: masks.documents(3), ValueError, r"query_ids has shape \(\); expected \[length\]"),
        (
            lambda: masks.documents(np.zeros((2, 3), int), np.zeros((3, 3), int)),
            ValueError,
            r"key_value_ids \(3, 3\); expected both \[B, length\] of one B",
        ),
        (lambda: make(lambda b, h, q, k: jnp.ones(3, bool)), TypeError, "shape \\(\\)"),
        (lambda: make(lattice, block=24), ValueError, "block is 24.*multiple of 16"),
        (lambda: make(lattice, heads=0), ValueError, "heads is 0"),
        (lambda: make(lattice, B=2), TypeError, "unexpected keyword .*'B'; did you mean batch"),
        (lambda: make(lattice, H=2), TypeError, "keyword argument 'H'; did you mean heads"),
        (lambda: make(lattice, head=2), TypeError, "unexpected keyword argument 'head'"),
        (lambda: make(lattice, batch=True), TypeError, "batch is True"),
        (lambda: jax_flash.block_mask_of(np.ones((3, 3))), TypeError, "layout has dtype"),
        (lambda: jax_flash.block_mask_of(np.ones(3, bool)), ValueError, "layout has shape"),
        (
            lambda: jax_flash.block_mask_of(np.ones((3, 3), bool), q_len=500),
            ValueError,
            r"layout has shape \(3, 3\); expected 4 blocks of 128 for q_len 500",
        ),
    ]
    q, k, v = qkv()
    attend = functools.partial(jax_flash.flash_attention, q, k, v)
    m = functools.partial(jax_flash.block_mask, lattice, block=16)
    cases += [
        (lambda: attend(block_mask=lattice), TypeError, "block_mask is function"),
        (lambda: attend(mask=lattice), TypeError, "mask is function; .* bool: .* block_mask="),
        (lambda: attend(mask=masks.causal()), TypeError, "mask is Mask; .* block_mask="),
        (lambda: attend(mask=m(q_len=T, kv_len=S)), TypeError, "mask is BlockMask; .* block_mask="),
        (lambda: attend(block_mask=m(q_len=T, kv_len=T)), ValueError, f"T = {T} and S = {S}"),
        (lambda: attend(block_mask=m(q_len=T - 1, kv_len=S)), ValueError, "q_len 39"),
        (lambda: attend(block_mask=m(q_len=T, kv_len=S, heads=3)), ValueError, "has 3 heads"),
        (lambda: attend(block_mask=m(q_len=T, kv_len=S, batch=3)), ValueError, r"batch \(3,\)"),
    ]
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()


# ---- transformations -----------------------------------------------------------------------------


def test_vmap_over_what_the_mask_closes_over(host_backend):
    """Members have masks of their own, made under vmap and under jit."""
    q, k, v = qkv(kv_len=T)

    def attend(ids, q, k, v):
        m = jax_flash.block_mask(masks.causal() & masks.documents(ids), q_len=T, kv_len=T, block=16)
        return jax_flash.flash_attention(q, k, v, block_mask=m, backend=host_backend)

    ids = jnp.asarray(DOCUMENTS)
    together = jax.jit(jax.vmap(lambda ids, *x: gradients(functools.partial(attend, ids), *x)))
    mask = (DOCUMENTS[:, :, None] == DOCUMENTS[:, None]) & np.tri(T, dtype=bool)
    want = gradients(reference.attention, q, k, v, mask=jnp.asarray(mask)[:, None])
    close(together(ids, q, k, v), want)


def test_vmap_over_the_query_alone(host_backend):
    """Key, value and mask are shared by the members."""
    q, k, v = qkv()
    q = jnp.stack([q, q + 1, q * 2])
    for batch, heads in ((None, None), (2, N)):
        m = jax_flash.block_mask(lattice, q_len=T, kv_len=S, batch=batch, heads=heads, block=32)
        attend = functools.partial(
            jax_flash.flash_attention, key=k, value=v, block_mask=m, backend=host_backend
        )
        want = [reference.attention(one, k, v, block_mask=m) for one in q]
        close(jax.jit(jax.vmap(attend))(q), jnp.stack(want))


def test_scan_and_remat(host_backend):
    """One mask, an argument of the program, for all layers; made once."""
    q, k, v = qkv()
    m = jax_flash.block_mask(lattice, q_len=T, kv_len=S, heads=N, block=16)

    def layers(q, k, v, m, attention, wrap):
        @wrap
        def layer(x, m):
            return x + attention(x, k, v, block_mask=m)

        return jax.lax.scan(lambda x, _: (layer(x, m), None), q, length=2)[0]

    ours = functools.partial(jax_flash.flash_attention, backend=host_backend)
    got = jax.jit(
        lambda q, k, v, m: gradients(
            functools.partial(layers, m=m, attention=ours, wrap=jax.checkpoint), q, k, v
        )
    )(q, k, v, m)
    plain = functools.partial(layers, m=m, attention=reference.attention, wrap=lambda layer: layer)
    close(got, gradients(plain, q, k, v), rtol=1e-4)


def test_an_export_takes_a_mask():
    def attend(q, k, v, mask):
        return jax_flash.flash_attention(q, k, v, block_mask=mask, backend="xla"), mask

    of_function = jax_flash.block_mask(lattice, q_len=T, kv_len=np.int64(S), block=16)
    layout = jax_flash.block_mask_of(np.eye(3, 4, dtype=bool), block=16, q_len=np.int64(T))
    for mask in (of_function, layout):
        made = jax.export.export(jax.jit(attend))(*qkv(), mask)
        out, returned = jax.export.deserialize(made.serialize()).call(*qkv(), mask)
        close(out, attend(*qkv(), mask)[0])
        assert str(returned) == str(mask)


@pytest.mark.parametrize("few", [1, 3])
def test_few_queries_see_what_the_mask_shows(few, host_backend):
    """Kernels have a way of their own for so few rows."""
    q, k, v = qkv()
    mask = jax_flash.block_mask(lattice, q_len=few, kv_len=S, batch=2, heads=N, block=16)
    got = gradients(
        jax_flash.flash_attention, q[:, :few], k, v, block_mask=mask, backend=host_backend
    )
    close(got, gradients(reference.attention, q[:, :few], k, v, mask=mask.dense()))


def test_second_derivatives():
    q, k, v = qkv(1)
    m = jax_flash.block_mask(lattice, q_len=T, kv_len=S, block=16)

    def curvature(attention):
        def along(t):
            return jnp.sum(jnp.sin(attention(q * t, k, v * t, block_mask=m)))

        return jax.jit(jax.grad(jax.grad(along)))(1.0)

    ours = functools.partial(jax_flash.flash_attention, backend="xla")
    np.testing.assert_allclose(curvature(ours), curvature(reference.attention), rtol=1e-4)


def test_chunks_are_sharded_over_batch_and_heads():
    mesh = mesh_of((2, 4))
    m = jax_flash.block_mask(masks.documents(np.arange(64) // 32), q_len=64, kv_len=64, block=16)
    assert m.chunk == 32
    q, k, v = (normal(i, 4, 64, 8, 16) for i in range(3))

    def step(q, k, v):
        return gradients(jax_flash.flash_attention, q, k, v, block_mask=m, backend="cpu")

    placed = jax.device_put((q, k, v), NamedSharding(mesh, P("data", None, "model", None)))
    compiled = jax.jit(step).lower(*placed).compile()
    assert collectives(compiled) == []
    close(compiled(*placed), gradients(reference.attention, q, k, v, mask=m.dense()))


@pytest.mark.filterwarnings("ignore:.*is gathered")
@pytest.mark.parametrize("chunks", [3, 4])
def test_sequences_split_by_type_may_part_chunks(chunks: int):
    mesh, length = mesh_of((4, 2), explicit=True), 32 * chunks
    m = jax_flash.block_mask(
        masks.documents(np.arange(length) // 32), q_len=length, kv_len=length, block=16
    )
    assert m.chunk == 32
    arrays = [normal(i, 2, length, 2, 16) for i in range(3)]
    with jax.set_mesh(mesh):
        placed = jax.device_put(arrays, NamedSharding(mesh, P(None, "data")))
        out = jax.jit(functools.partial(jax_flash.flash_attention, block_mask=m))(*placed)
    close(out, reference.attention(*arrays, mask=m.dense()))


@pytest.mark.parametrize("how", ["jit", "shard_map"])
def test_sharded_over_batch_and_heads(how):
    mesh = mesh_of((2, 4))
    q, k, v = (jnp.concatenate([x, x + 1], axis=-2) for x in qkv(4))
    m = jax_flash.block_mask(lattice, q_len=T, kv_len=S, batch=4, heads=2 * N, block=16)
    heads = P("data", None, "model", None)
    split = dataclasses.replace(m, numbers=P("data", "model"), bits=P("data"))
    specs = (heads, heads, heads, split)

    def step(q, k, v, m):
        return gradients(jax_flash.flash_attention, q, k, v, block_mask=m, backend="cpu")

    if how == "shard_map":
        step = jax.shard_map(
            step, mesh=mesh, in_specs=specs, out_specs=((heads,) * 3, heads), check_vma=False
        )
        form = jax_flash.block_mask(masks.causal(), q_len=T, kv_len=S, block=16)
        of_form = dataclasses.replace(form, numbers=P("data", "model"), bits=P("data"))
        call = functools.partial(jax_flash.flash_attention, backend="cpu")
        mapped = jax.shard_map(
            lambda q, k, v, m: call(q, k, v, block_mask=m),
            mesh=mesh, in_specs=(*specs[:3], of_form), out_specs=heads,
        )  # fmt: skip
        assert jax.eval_shape(mapped, q, k, v, form).shape == q.shape
    want = gradients(reference.attention, q, k, v, block_mask=m)
    placed = jax.tree.map(
        lambda spec, x: jax.device_put(x, NamedSharding(mesh, spec)),
        specs,
        (q, k, v, m),
        is_leaf=lambda x: isinstance(x, P),
    )
    compiled = jax.jit(step).lower(*placed).compile()
    assert collectives(compiled) == []
    close(compiled(*placed), want)


def test_what_is_hidden_reaches_nothing(host_backend):
    """NaN in keys and queries of empty blocks, and in hidden pairs of partial ones."""
    q, k, v = qkv()
    m = jax_flash.block_mask(
        lambda b, h, q, k: (k < 37) & (k != 5) & (q >= 20), q_len=T, kv_len=S, block=16
    )
    got, want = (
        jax.jit(
            lambda k, v: gradients(
                jax_flash.flash_attention, q, k, v, block_mask=m, backend=host_backend
            )
        )(k.at[:, hidden].set(x), v.at[:, hidden].set(x))
        for hidden in [np.r_[5, 37:S]]
        for x in (jnp.nan, 0.0)
    )
    close(got, want)
    assert not np.any(np.asarray(got[1][:, :20]))


@pytest.mark.quick
def test_explain_says_what_runs_it():
    q = jax.ShapeDtypeStruct((2, 256, 4, 64), "bfloat16")
    for mask_mod, text in ((masks.prefix_lm(9), "block mask"), (masks.causal(), ", causal")):
        make = functools.partial(jax_flash.block_mask, mask_mod, q_len=256, kv_len=256)
        m = jax.eval_shape(make)
        explanation = jax_flash.explain(q, q, q, block_mask=m, backend="xla")
        assert text in str(explanation)
