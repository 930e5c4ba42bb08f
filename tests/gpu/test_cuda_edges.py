"""The CUDA kernels at the edges: shapes between tiles, extreme values, more than a grid or 2^31."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash

from ..cases import BOTTOM_RIGHT, Case
from ..compare import compare, compare_copies
from ..conformance_cases import case_id
from ..hopper import NEEDS_HOPPER, assert_same_bits, attend, draw, gradients, near
from ..numpy_oracle import DTYPES
from ..other_kernels import AsIfLong

pytestmark = NEEDS_HOPPER

HALF = "bfloat16"
C = functools.partial(Case, dtype=HALF)
WHOLE = {  # all that the kernels know, at once
    "scale": 0.1, "causal": True, "align": BOTTOM_RIGHT, "segments": "packed", "softcap": 4.0,
    "sinks": True, "with_lse": True, "N": 6, "K": 2, "T": 333, "S": 391,
    "q_lengths": (333, 150), "kv_lengths": (340, 391),
}  # fmt: skip

SHAPES = (
    # One token, few keys, few queries.
    C("one token", T=1, S=1, H=128, with_lse=True),
    C("one token of 64 heads", T=1, S=2000, N=64, K=1, H=128, with_lse=True),
    C("one token of 16 heads", T=1, S=1999, N=16, K=2, H=256, kv_lengths=(1999, 3)),
    C("one token of odd groups", T=1, S=700, N=21, K=3, H=64, causal=True, align=BOTTOM_RIGHT),
    C("one key", T=2000, S=1, H=128, N=4, K=2, with_lse=True),
    C("few keys", T=1501, S=3, H=128, causal=True, align=BOTTOM_RIGHT, with_lse=True),
    C("few keys top left", T=1501, S=3, H=256, causal=True),
    C("few queries", T=3, S=1501, H=128, causal=True, align=BOTTOM_RIGHT, with_lse=True),
    C("few queries top left", T=3, S=1501, H=64, causal=True, with_lse=True),
    # Beside the boundaries of tiles: 64 queries, 64 to 192 keys.
    *(C(f"{T} x {S} d{H}", T=T, S=S, H=H, N=3, causal=causal, with_lse=True)
      for T, S, H, causal in [(63, 65, 64, True), (65, 63, 128, False), (127, 129, 128, True),
                              (129, 127, 256, True), (191, 193, 64, False), (193, 191, 64, True),
                              (257, 111, 192, True), (385, 113, 256, False)]),
    # Heads in groups: short queries share a tile among heads.
    *(C(f"group {N}:{K} T {T}", T=T, S=150, N=N, K=K, H=64, causal=True, align=BOTTOM_RIGHT,
        with_lse=True, batch=(1,))
      for N, K, T in [(64, 1, 5), (128, 2, 3), (32, 1, 127), (24, 3, 9), (10, 2, 127), (8, 1, 128),
                      (12, 1, 33), (4, 2, 63)]),
    # Many rows of few queries: heads that share keys run as queries of one head.
    C("folded bias", batch=(20,), T=3, S=200, N=40, K=2, H=112, bias="111s", with_lse=True),
    C("folded lengths", batch=(90,), T=6, S=140, N=12, K=3, H=240, q_lengths=(6, 0, 4),
      kv_lengths=(140, 0, 9), softcap=4.0, with_lse=True),
    C("folded float32", batch=(60,), T=3, S=300, N=20, K=2, H=88, mask="b11s", dtype="float32",
      with_lse=True),
    C("folded rows float32", batch=(96,), T=25, S=25, N=8, K=8, H=96, causal=True, dtype="float32",
      with_lse=True),
    C("folded token", batch=(30,), T=1, S=300, N=21, K=3, H=64, mask="1n1s", bias="bn1s"),
    # Dims.
    *(C(f"dims {H} {Hv}", H=H, Hv=Hv, T=140, S=150, N=4, K=2, causal=True, with_lse=True)
      for H, Hv in [(8, 8), (8, 256), (256, 8), (16, 24), (248, 248), (136, 72), (72, 136),
                    (200, 64), (64, 200), (104, 112)]),
    # Copies with columns of zeros beside them.
    C("padded 100 36", H=100, Hv=36, T=1030, S=1050, N=4, K=2, causal=True, with_lse=True,
      bias="1n1s", batch=(1,)),
    *(C(f"boxes begin early {H} {Hv}", H=H, Hv=Hv, T=T, S=S, N=8, batch=(1,), causal=causal,
        dtype=dtype, with_lse=True)
      for H, Hv, T, S, causal, dtype in [(36, 36, 1030, 1050, True, HALF),
                                         (67, 101, 1024, 2050, False, "float16"),
                                         (58, 58, 1100, 1030, True, HALF),
                                         (100, 64, 1030, 1024, False, HALF),
                                         (197, 250, 70, 190, True, HALF)]),
    C("padded 250 129", H=250, Hv=129, T=1030, S=1050, N=1, batch=(1,), deterministic=True),
    C("padded few", H=243, T=32, S=33, N=4, batch=(33,), dtype="float16", causal=True,
      with_lse=True),
    C("padded float32", H=33, T=1030, S=1050, N=1, batch=(1,), dtype="float32"),
    # Whole tiles of queries: dq holds half of its own sum.
    *(C(f"whole tiles {H} {Hv} {T} {turns}", H=H, Hv=Hv, T=T, S=S, deterministic=turns, **more)
      for H, Hv, T, S, more in [
          (64, 64, 256, 300, {"causal": True, "N": 4, "K": 2}),
          (64, 64, 192, 192, {"softcap": 4.0, "batch": (2, 3)}),
          (64, 128, 448, 333, {"causal": True, "align": BOTTOM_RIGHT}),
          (128, 128, 320, 320, {"causal": True, "N": 6, "K": 2}),
          (128, 64, 64, 700, {"q_lengths": (64, 11), "N": 3}),
          (128, 128, 1024, 1024, {"segments": "documents", "causal": True, "with_lse": True}),
          (128, 128, 640, 100, {"window": (5, 0)}),
          (192, 128, 192, 257, {"causal": True, "dtype": "float16"}),
          (256, 256, 512, 512, {"window": (100, 0), "N": 4, "K": 1}),
      ]
      for turns in (False, True)),
    # More sums of dq than have a place at a time.
    C("sums in a ring", T=600, S=520, H=128, N=16, batch=(11,)),
    # Windows wider than the keys, and all else together.
    C("wide window", T=200, S=150, window=(1000, 1000), align=BOTTOM_RIGHT, H=128),
    C("left window", T=300, S=450, window=(70, None), H=128, with_lse=True),
    C("right window", T=300, S=450, window=(None, 70), H=64, with_lse=True),
    C("window past all keys", T=600, S=100, window=(5, 0), H=128, with_lse=True),
    C("window before all keys", T=100, S=600, window=(0, 5), align=BOTTOM_RIGHT, H=256),
    *(C(f"everything {H} {Hv} {window}", H=H, Hv=Hv, window=window, deterministic=turns, **WHOLE)
      for H, Hv in [(64, 64), (128, 128), (192, 128), (256, 256)]
      for window, turns in [((100, None), False), ((1000, 3), True)]),
    C("everything float16", H=128, **WHOLE | {"dtype": "float16"}),
    # Segments: blocks of keys that no query of a tile shares lie before, between and behind others.
    *(C(f"{kind} {H} {causal}", segments=kind, H=H, T=T, S=S, causal=causal, with_lse=True, **more)
      for kind, H, T, S, causal, more in [
          ("returning", 64, 900, 900, True, {}),
          ("returning", 128, 700, 1100, False, {"N": 4, "K": 2, "deterministic": True}),
          ("returning", 256, 600, 600, True, {"window": (250, None)}),
          ("returning", 128, 60, 900, False, {"N": 8, "K": 2, "kv_lengths": (900, 311)}),
          ("documents", 64, 1300, 1300, True, {"q_lengths": (1300, 700)}),
          ("documents", 128, 1300, 1300, True, {"N": 4, "K": 1, "deterministic": True}),
          ("documents", 192, 900, 500, False, {"Hv": 128, "window": (40, 90)}),
          ("documents", 256, 500, 900, True, {"align": BOTTOM_RIGHT, "softcap": 5.0}),
          ("documents", 256, 900, 900, True, {"N": 4, "K": 2, "deterministic": True}),
          ("returning", 192, 700, 500, False,
           {"Hv": 128, "window": (250, None), "deterministic": True}),
          ("documents", 128, 9, 900, False, {"N": 16, "K": 1, "sinks": True}),
      ]),
    # Rows with nothing to see.
    C("nothing", segments="apart", T=300, S=280, H=128, with_lse=True, deterministic=True),
    C("nothing by length", kv_lengths=(0, 0), T=300, S=280, H=256, with_lse=True, causal=True),
    C("no queries by length", q_lengths=(0, 0), T=300, S=280, H=64, with_lse=True, sinks=True),
    C("sinks above all", sinks=True, T=100, S=200, H=128, scale=1e-4, with_lse=True),
    C("many batch rows", batch=(700,), T=2, S=3, N=2, H=64, causal=True, with_lse=True),
    C("negative scale gqa", scale=-0.3, N=6, K=2, T=200, S=300, H=128, causal=True, with_lse=True),
    C("scale zero", scale=0.0, T=150, S=150, H=128, causal=True, with_lse=True),
)  # fmt: skip


@pytest.mark.parametrize("case", SHAPES, ids=case_id)
def test_shape(case: Case):
    arguments = case.draw()
    check = compare_copies if case.dtype == "float32" else compare
    check(arguments, arguments.run("cuda"))


# ---- values ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [HALF, "float16"])
@pytest.mark.parametrize("slope", [0.5, 3.0, 11.0, 17.0, -11.0, 130.0, 2000.0])
def test_scores_that_rise_and_fall_from_block_to_block(dtype: str, slope: float):
    """Blocks of keys whose scores rise by up to 2^2000 over the ones walked before."""
    case = Case(f"slope {slope}", T=70, S=700, H=64, dtype=dtype, scale=math.log(2), with_lse=True)
    arguments = case.draw()
    arguments.arrays["query"][..., 0] = 1.0
    # In float16 and bfloat16 exact: whole multiples of a power of two.
    blocks = 10 - np.arange(700) // 64
    ramp = np.round(blocks * slope * 2) / 2
    for x in ("query", "key"):
        arguments.arrays[x][..., 1:] = arguments.arrays[x][..., 1:] * np.float32(0.1)
    arguments.arrays["key"][..., 0] = ramp[:, None].astype(DTYPES[dtype])
    compare(arguments, arguments.run("cuda"))


OVERFLOWING = (  # logits that differ by several hundred within a row: weights beyond 2^128
    C("full", H=128, T=400, S=900, N=4, K=2),
    C("causal", H=64, T=900, S=900, causal=True, batch=(5,)),
    C("wide", H=256, T=500, S=700, N=3, causal=True),
    C("heads packed", H=128, T=9, S=3000, N=16, K=2),
    C("segments", H=64, T=700, S=700, segments="packed", causal=True),
    C("returning", H=128, T=700, S=700, segments="returning"),
    C("window lengths", H=64, T=600, S=700, window=(300, 20), kv_lengths=(700, 333)),
    C("sinks", H=128, T=300, S=900, sinks=True),
    C("softcap", H=64, T=300, S=900, softcap=800.0),
    C("unaligned", H=100, T=300, S=500, causal=True),
)


@pytest.mark.parametrize("case", OVERFLOWING, ids=case_id)
def test_tiles_with_rows_that_overflow(case: Case):
    arguments = dataclasses.replace(case, spread=150.0, with_lse=True).draw()
    compare(arguments, arguments.run("cuda"))


@pytest.mark.parametrize("size", [4.0, 0.125])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_sums_that_overflow_between_the_threads_of_a_row(dim: int, size: float):
    """Two weights of 2^127 in different threads, then a block that makes the row's base rise."""
    case = Case("quad", T=70, S=384, H=dim, N=1, dtype=HALF, scale=math.log(2), with_lse=True)
    arguments = case.draw()
    for x in ("query", "key"):
        arguments.arrays[x][...] = 0
    arguments.arrays["query"][..., 0] = 1
    arguments.arrays["key"][:, [200, 202, 204], :, 0] = 207
    arguments.arrays["key"][:, 10, :, 0] = 130
    arguments.arrays["value"][...] = np.abs(arguments.arrays["value"]) * np.asarray(
        size, arguments.arrays["value"].dtype
    )
    compare(arguments, arguments.run("cuda"))


def test_float16_at_the_end_of_its_range():
    """Values and gradients near 65504: sums are in float32, and only what exceeds it is inf."""
    case = Case("range", T=150, S=170, H=128, N=4, K=2, dtype="float16", causal=True)
    arguments = case.draw()
    value = arguments.arrays["value"]
    arguments.arrays["value"] = np.sign(value) * np.float16(65504)
    arguments.arrays["query"] = arguments.arrays["query"] * np.float16(40)
    arguments.arrays["key"] = arguments.arrays["key"] * np.float16(40)
    arguments.dout = (arguments.dout * np.float16(1e-4)).astype(np.float16)
    truth, got = arguments.truth(), arguments.run("cuda")
    out = got["out"].astype(np.float64)
    assert np.isfinite(out).all()
    assert np.abs(out - truth.out).max() < 65504 * 2**-9
    assert np.isfinite(got["dvalue"].astype(np.float32)).all()
    for name in ("dquery", "dkey"):
        assert not np.isnan(got[name].astype(np.float32)).any()


@pytest.mark.parametrize("dtype", [HALF, "float16"])
def test_visible_infinities_and_nan_spread_as_defined(dtype: str):
    """An inf that is seen shows in its own rows and columns alone."""
    case = Case("inf", T=150, S=170, H=64, dtype=dtype, causal=True)
    arguments = case.draw()
    arguments.arrays["value"][0, 100, 0, 5] = np.inf
    arguments.arrays["value"][1, 20, 1, 7] = np.nan
    out = np.asarray(arguments.function("cuda")(arguments.arrays)).astype(np.float64)
    assert np.isinf(out[0, 100:, 0, 5]).all()
    assert np.isnan(out[1, 20:, 1, 7]).all()
    out[0, 100:, 0, 5] = out[1, 20:, 1, 7] = 0
    assert np.isfinite(out).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_head_reaches_no_other(poison: float):
    """Tiles have columns of the heads beside theirs, where 8 does not divide a head dim."""
    keys = jax.random.split(jax.random.key(0), 4)
    clean = [jax.random.normal(key, (1, 1100, 4, 36), HALF) for key in keys]

    @jax.jit
    def run(q, k, v, dout):
        attend = functools.partial(jax_flash.flash_attention, is_causal=True, backend="cuda")
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(dout)

    dirty = run(*(x.at[:, 30, 1].set(poison) for x in clean))
    others = np.array([0, 2, 3])
    for name, want, got in zip(("out", "dq", "dk", "dv"), run(*clean), dirty, strict=True):
        near(got[:, :, others], want[:, :, others], name)


def test_hidden_nan_beside_all_rows_of_a_long_sequence():
    """More rows than one turn of the kernel that computes them again: each is as without NaN."""
    T, apart, window = 1 << 17, 64, 3
    draws = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(x, (1, T, 10, 16), jnp.bfloat16) for x in draws)

    @jax.jit
    def run(q, k, v):
        return jax_flash.flash_attention(
            q, k, v, is_causal=True, local_window_size=(window, 0), backend="cuda"
        )

    rows = jnp.arange(T) % apart
    sees = (rows <= window)[:, None, None]
    want, got = run(q, k, v), run(q, k, jnp.where((rows == 0)[:, None, None], jnp.nan, v))
    assert jnp.isnan(jnp.where(sees, got, jnp.nan)).all()
    error = jnp.abs(jnp.where(sees, 0, got - want).astype(jnp.float32)).max()
    assert error <= 2**-7 * jnp.abs(v).max()  # each rounds weights and the result


# ---- sizes -------------------------------------------------------------------------------------


def hashed(*shape: int) -> jax.Array:
    """Reproducible values in [-2, 2) of bfloat16 without memory for temporaries."""
    odd = (2654435761, 2246822519, 3266489917, 668265263)
    word = sum(
        jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(odd[axis])
        for axis in range(4)
    )
    word = (word ^ (word >> 15)) * jnp.uint32(2246822519)
    return (((word >> 16) & 0xFF).astype(jnp.float32) / 64 - 2).astype(jnp.bfloat16)


def windowed(q, k, v, **options):
    return jax_flash.flash_attention(
        q, k, v, is_causal=True, causal_align=BOTTOM_RIGHT, local_window_size=(64, 0),
        return_lse=True, backend="cuda", **options
    )  # fmt: skip


def result_and_gradients(q, k, v, dout):
    (out, lse), pull = jax.vjp(windowed, q, k, v)
    return out, lse, *pull((dout, jnp.ones_like(lse)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("T", "S"), [(200, 1), (385, 79), (191, 81), (700, 1000), (1000, 700)])
@pytest.mark.parametrize(("H", "Hv"), [(128, 128), (72, 72), (96, 88), (128, 16), (64, 120)])
def test_three_warpgroups_at_wide_heads(H: int, Hv: int, T: int, S: int, causal: bool):
    """The forward kernel of long calls, beside the boundaries of its tiles."""
    align = {"align": BOTTOM_RIGHT} if (T + S) % 2 else {}
    case = C("three", H=H, Hv=Hv, T=T, S=S, N=6, K=2, causal=causal, with_lse=True, **align)
    more = {"sinks": True, "kv_lengths": (max(S - 60, 1), S)} if S % 3 == 1 else {}
    arguments = dataclasses.replace(case, **more).draw()
    for _ in range(3):
        compare(arguments, AsIfLong(arguments, "consumers", 3).run("cuda"))


def test_more_than_two_to_the_31_elements():
    """The end of a long sequence is as that of a short one, and nothing beyond it is touched."""
    # One test: its process keeps the 30 GB that a case takes, and two of them with those of the
    # other workers beside them may be more than an H100 of 80 GB has.
    for longer in ("queries", "keys"):
        check_a_long_sequence(longer)


def check_a_long_sequence(longer: str) -> None:
    heads, dim, long, short, tail = 16, 64, 2**21 + 70, 200, 300
    kv_heads = 1 if longer == "queries" else heads
    T, S = (long, long) if longer == "queries" else (short, long)
    make = jax.jit(
        lambda: (hashed(1, T, heads, dim), hashed(1, S, kv_heads, dim),
                 -hashed(1, S, kv_heads, dim), hashed(1, T, heads, dim) * 0.5)
    )  # fmt: skip
    q, k, v, dout = make()
    assert max(x.size for x in (q, k)) > 2**31
    out, lse, dq, dk, dv = jax.jit(result_and_gradients)(q, k, v, dout)
    rows = min(T, tail)
    keys = rows + 64
    want = jax.jit(result_and_gradients)(q[:, -rows:], k[:, -keys:], v[:, -keys:], dout[:, -rows:])
    near(out[:, -rows:], want[0], "out")
    near(lse[:, -rows:], want[1], "lse")
    near(dq[:, -rows:], want[2], "dq")
    for name, got, right in (("dk", dk, want[3]), ("dv", dv, want[4])):
        # The first of these keys are also seen by queries before the tail.
        near(got[:, -rows + 64 :], right[:, -rows + 64 :], name)
        if longer == "keys":
            assert not jnp.any(got[:, : -rows - 64])
        else:
            assert jnp.isfinite(jnp.max(jnp.abs(got)))
    # The same at the other end.
    if longer == "queries":
        want = jax.jit(result_and_gradients)(q[:, :tail], k[:, :tail], v[:, :tail], dout[:, :tail])
        near(out[:, :tail], want[0], "first out")
        near(dq[:, :tail], want[2], "first dq")
        near(dk[:, : tail - 64], want[3][:, : tail - 64], "first dk")


def test_more_batch_rows_and_heads_than_a_grid_has():
    """70,000 pairs of batch row and head, in one call: each like a call of its own."""
    q, k, v = draw(0, batch=8750, heads=8, kv_heads=4, q_len=5, kv_len=5, dim=64)
    got = jax.jit(gradients)(q, k, v), attend(q, k, v)
    rows = slice(8740, None)
    want = jax.jit(gradients)(q[rows], k[rows], v[rows]), attend(q[rows], k[rows], v[rows])
    assert_same_bits(jax.tree.map(lambda x: x[rows], got), want)
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(got))


@pytest.mark.parametrize("empty", ["batch", "queries", "keys", "mapped"])
def test_empty(empty: str):
    sizes = {"batch": {"batch": 0}, "queries": {"q_len": 0}, "keys": {"kv_len": 0}, "mapped": {}}
    arrays = draw(0, **sizes[empty])
    if empty == "mapped":
        arrays = tuple(x[None][:0] for x in arrays)
        slopes = jax.jit(jax.vmap(gradients))(*arrays)
    else:
        out, lse = jax.jit(lambda *x: attend(*x, return_lse=True))(*arrays)
        assert out.shape == arrays[0].shape
        assert not np.any(np.asarray(out, np.float32))
        assert np.isneginf(np.asarray(lse)).all()
        slopes = jax.jit(gradients)(*arrays)
    for x, slope in zip(arrays, slopes, strict=True):
        assert slope.shape == x.shape
        assert not np.any(np.asarray(slope, np.float32))


def test_without_a_kernel_the_reason_is_named():
    q = jnp.zeros((1, 4, 2, 520), HALF)
    with pytest.raises(NotImplementedError, match=r"'cuda' cannot run this call.*512, not 520"):
        attend(q, q, q)
