"""`jax_flash.explain` of functions: decoding, requests over pages, steps with several calls."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import _native, decode_attention, ragged_paged_attention

from ..conftest import needs_module

pytestmark = pytest.mark.quick

GPU = {"gpu": "H200"}


def of(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


integers = functools.partial(of, dtype="int32")
QUERY, CACHE, LENGTHS = of(8, 1, 32, 128), of(8, 4096, 8, 128), integers(8)
NEW = {"new_key": of(8, 1, 8, 128), "new_value": of(8, 1, 8, 128)}
PAGES, TABLE = of(100, 64, 8, 128), integers(8, 64)
LATENT_QUERY, LATENT = of(8, 1, 128, 576), of(8, 4096, 1, 576)
explain = functools.partial(jax_flash.explain, decode_attention)


def explain_ragged(tokens: int, **options: Any) -> jax_flash.Explanation:
    arrays = (of(tokens, 32, 128), PAGES, PAGES, LENGTHS, TABLE, integers(9))
    return jax_flash.explain(ragged_paged_attention, *arrays, **options)


@needs_module
@pytest.mark.parametrize(
    ("arrays", "options", "gpu", "source", "said"),
    [
        ((QUERY, CACHE, CACHE), {}, "H200", "sm90/decode", "batch 8, query 1 x 32 heads, key 4096"),
        ((QUERY, CACHE, CACHE), {}, "A100", "sm80/decode", "tilings were never measured"),
        ((QUERY, CACHE, CACHE), {**NEW, "rotary_base": 1e4}, "H200", "sm90/decode",
         "new keys, rotary base 10000"),
        ((QUERY, PAGES, PAGES), {"page_table": TABLE, "local_window_size": 99}, "H200",
         "sm90/decode", "key 4096 x 8 heads in pages of 64"),
        ((QUERY, *2 * (of(8, 4096, 8, 128, dtype="int8"),)), {"key_scale": 1.0, "value_scale": 1.0},
         "A100", "sm80/decode", "cache of int8"),
        ((QUERY, *2 * (of(8, 4096, 8, 128, dtype="float8_e4m3fn"),)),
         {"key_scale": of(8, 8, dtype="float32"), "value_scale": 1.0}, "H200", "sm90/decode",
         "cache of float8_e4m3fn"),
        ((LATENT_QUERY, LATENT, None), {"value_dim": 512}, "H200", "sm90_latent/decode",
         "values in keys"),
        ((LATENT_QUERY, of(8, 4096, 1, 656, dtype="uint8"), None),
         {"value_dim": 512, "new_key": of(8, 1, 1, 576)}, "H200", "sm90_latent/decode",
         "packed rows"),
        ((LATENT_QUERY, LATENT, None), {"value_dim": 512, "indices": integers(8, 1, 2048)}, "H200",
         "sm90_latent/decode",
         "as decode of batch 8, query 1 x 128 heads, key 2048 x 1 heads in pages of 1,"),
        ((of(8, 1, 32, 104), *2 * (of(8, 4096, 8, 104),)), {"rotary_base": 1e4}, "H200",
         "sm90/decode", "value dim 104, rotated ahead of it"),
    ],
)  # fmt: skip
def test_each_way_to_decode(arrays, options, gpu, source, said, uncompiled):
    explanation = explain(*arrays, LENGTHS, gpu=gpu, **options)
    (made,) = explanation.passes
    assert made.kernel.plan.source == f"{source}.cuh"
    text = str(explanation)
    assert text.startswith("decode of decode_attention\n")
    assert f"backend: cuda on {gpu} (" in text
    assert said in text


@needs_module
def test_the_plan_is_the_one_that_is_lowered(uncompiled):
    """Members that share a cache are rows with a table of one page; rotation is ahead of some."""
    cache = of(2, 64, 8, 104)
    step = jax.vmap(functools.partial(decode_attention, rotary_base=1e4), (0, None, None, 0))
    arrays = (of(3, 2, 1, 32, 104), cache, cache, integers(3, 2))
    (made,) = jax_flash.explain(step, *arrays, gpu="H100").passes
    checks = jax_flash.EXPORT_CHECKS
    exported = jax.export.export(jax.jit(step), platforms=["cuda"], disabled_checks=checks)
    lowered = re.findall(r'plan = "(.*?)"', exported(*arrays).mlir_module())
    (text,) = (x.replace("\\0A", "\n").replace("\\22", '"') for x in lowered)
    assert text == made.kernel.plan.text
    assert made.kernel.plan.constants["kPaged"]
    assert not made.kernel.plan.constants["kRotates"]


def test_without_a_gpu():
    arrays = (QUERY, CACHE, CACHE, LENGTHS)
    assert explain(*arrays, backend="xla").backend == "xla"
    if _native.available("cpu") is None:
        assert explain(*arrays, backend="cpu").backend == "cpu"
    text = str(explain(*arrays, backend="xla", **GPU))
    assert "backend: xla on H200" in text
    packed = explain(LATENT_QUERY, of(8, 4096, 1, 656, dtype="uint8"), None, LENGTHS, value_dim=512)
    assert packed.backend == "xla"
    assert "not cpu: the CPU kernels have no packed rows of latent attention" in str(packed)


@needs_module
def test_what_a_gpu_cannot_read_is_told(uncompiled):
    cache = of(8, 4096, 8, 128, dtype="float8_e4m3fn")
    scales = {"key_scale": 1.0, "value_scale": 1.0}
    explanation = explain(QUERY, cache, cache, LENGTHS, **scales, gpu="A100")
    assert explanation.backend == "xla"
    assert "not cuda: GPUs before sm_89 cannot convert float8_e4m3fn" in str(explanation)
    with pytest.raises(NotImplementedError, match="'cuda' cannot run this call: GPUs before sm_89"):
        explain(QUERY, cache, cache, LENGTHS, **scales, gpu="A100", backend="cuda")


@needs_module
@pytest.mark.parametrize(
    ("tokens", "options", "passes"),
    [
        (8, {}, [("decode", "sm90/decode")]),
        (64, {}, [("decode", "sm90/decode"), ("prefill", "sm90/decode")]),
        (2048, {"backend": "cuda"}, [("decode", "sm90/decode"), ("prefill", "sm90/forward")]),
        (512, {"shared_pages": integers(32)},
         [("decode", "sm90/decode"), ("prefill", "sm90/forward"), ("common", "sm90/forward")]),
        (8, {"shared_pages": integers(32)}, [("common", "sm90/decode"), ("common", "sm90/decode")]),
        (64, {"ancestors": of(64, 8, dtype="bool"), "backend": "cuda"},
         [("decode", "sm90/decode"), ("prefill", "sm90/decode"), ("decode", "sm90/decode"),
          ("forward", "sm90/forward")]),
    ],
)  # fmt: skip
def test_passes_of_a_mixed_batch(tokens, options, passes, uncompiled, few_are_shared):
    found = explain_ragged(tokens, **options, **GPU).passes
    named = [(x.name, x.kernel.plan.source.removesuffix(".cuh")) for x in found]
    assert named == passes


@needs_module
def test_pieces_of_prompts_are_rows_of_decoding(uncompiled):
    text = str(explain_ragged(64, **GPU))
    assert "prefill of ragged_paged_attention\nbfloat16, tokens 64 x 32 heads, key 4096" in text
    assert "  as decode of batch 11, query 16 x 32 heads, key 4096 x 8 heads in pages of 64" in text


def layer(x: jax.Array, key_cache: Any, value_cache: Any, lengths: Any) -> jax.Array:
    for _ in range(2):
        x = jax_flash.decode_attention(x, key_cache, value_cache, lengths).out
    return x


def test_a_function_tells_where_its_calls_stand():
    arrays = (QUERY, CACHE, CACHE, LENGTHS)
    (made,) = jax_flash.explain(jax.jit(layer), *arrays).passes  # both are one line, and alike
    assert made.place.startswith("test_explain_functions.py:")
    assert made.place.endswith(" (layer)")


def test_gradients_are_those_that_a_function_computes():
    q = of(2, 64, 4, 32)

    def loss(q: jax.Array) -> jax.Array:
        return jax_flash.flash_attention(q, q, q, softcap=9.0).sum()

    assert [x.name for x in jax_flash.explain(loss, q).passes] == ["forward"]
    gradient = jax_flash.explain(jax.grad(loss), q)
    assert [x.name for x in gradient.passes] == ["forward", "backward"]
    capped = jax_flash.explain(jax_flash.flash_attention, q, q, q, softcap=np.float32(9))
    assert gradient.problem == capped.problem == jax_flash.explain(q, q, q, softcap=9.0).problem
    tangent = jax_flash.explain(lambda q: jax.jvp(loss, (q,), (q,)), q).passes[-1]
    assert (tangent.name, tangent.backend) == ("tangent", "xla")


def test_what_is_wrong_is_named():
    arrays = (QUERY, CACHE, CACHE, LENGTHS)
    with pytest.raises(ValueError, match="page_table has shape"):
        explain(*arrays, page_table=integers(3, 4))
    with pytest.raises(TypeError, match="did you mean page_table"):
        explain(*arrays, block_table=TABLE)
    with pytest.raises(ValueError, match="gpu must be one of"):
        explain(*arrays, gpu="abacus")
    with pytest.raises(ValueError, match="backend is 'tpu'"):
        explain(*arrays, backend="tpu")
    with pytest.raises(NotImplementedError, match=r"no CUDA device|platform 'cuda'"):
        explain(*arrays, backend="cuda" if jax.default_backend() == "cpu" else "cpu")
    with pytest.raises(AttributeError, match="there is no pass backward; passes has decode"):
        _ = explain(*arrays).backward
    with pytest.raises(ValueError, match="function cos has no call that kernels may run"):
        jax_flash.explain(jnp.cos, QUERY)
    with pytest.raises(ValueError, match="on arrays that are not empty"):
        jax_flash.explain(jax_flash.flash_attention, *3 * (of(0, 4, 2, 64),))
    with pytest.raises(TypeError, match="missing a required argument: 'value'"):
        jax_flash.explain(QUERY, QUERY)  # type: ignore[call-overload]


@needs_module
def test_an_explanation_lets_no_later_call_pass(uncompiled):
    """jit keeps what was traced for another GPU, where a backend's name was not asked about."""
    if jax.default_backend() != "cpu":
        pytest.skip("a GPU runs the call")
    pages = jnp.zeros((4, 16, 2, 8), "bfloat16")
    table, starts, lengths = jnp.zeros((2, 1), int), jnp.arange(3), jnp.ones(2, int)
    arrays = (jnp.ones((2, 4, 8), "bfloat16"), pages, pages, lengths, table, starts)
    call = functools.partial(ragged_paged_attention, backend="cuda")
    assert jax_flash.explain(call, *arrays, **GPU).backend == "cuda"
    with pytest.raises(NotImplementedError, match="no CUDA device"):
        call(*arrays)
