"""What a type checker tells a user of the public calls; test_typing.py runs pyright on it.

Nothing here runs. Where a call is wrong, the comment names what pyright must report.
"""

from typing import Any, assert_type

import jax
import numpy as np

import jax_flash
from jax_flash import dot_product_attention, explain, flash_attention

Pair = tuple[jax.Array, jax.Array]


def results_follow_the_flags(q: jax.Array, flag: bool) -> None:
    assert_type(flash_attention(q, q, q), jax.Array)
    assert_type(flash_attention(q, q, q, is_causal=True, return_lse=False), jax.Array)
    assert_type(flash_attention(q, q, q, softcap=30.0, return_lse=True), Pair)
    assert_type(flash_attention(q, q, q, return_lse=flag), jax.Array | Pair)
    assert_type(dot_product_attention(q, q, q), jax.Array)
    assert_type(dot_product_attention(q, q, q, None, q > 0, return_residual=False), jax.Array)
    assert_type(dot_product_attention(q, q, q, is_causal=True, return_residual=True), Pair)
    assert_type(dot_product_attention(q, q, q, return_residual=flag), jax.Array | Pair)


def arrays_may_be_numpy_and_windows_sequences(q: np.ndarray) -> None:
    flash_attention(q, q, q, scale=np.float32(0.1), mask=q > 0, local_window_size=[128, None])
    flash_attention(q, q, q, local_window_size=np.array([128, 0]), key_value_seq_lengths=q)
    flash_attention(q, q, q, local_window_size=64, dropout_rate=0.1, dropout_key=jax.random.key(0))
    dot_product_attention(q, q, q, q, scale=0.125, local_window_size=(64, 0))


def shapes_do_for_explain(q: jax.ShapeDtypeStruct) -> None:
    assert_type(
        explain(q, q, q, bias=q, sinks=q, return_lse=True, gpu="H200"), jax_flash.Explanation
    )
    assert_type(explain(jax_flash.decode_attention, q, q, q, q, gpu="H200"), jax_flash.Explanation)


def options_may_be_passed_on(q: jax.Array, options: dict[str, Any]) -> None:
    flash_attention(q, q, q, **options)
    dot_product_attention(q, q, q, **options)


def mistakes_are_found(q: jax.Array, shape: jax.ShapeDtypeStruct) -> None:
    print(flash_attention(q, q, q).lse)  # reportAttributeAccessIssue
    flash_attention(q, q, q, causal=True)  # reportCallIssue
    flash_attention(q, q, q, causal_align="bottom")  # reportArgumentType
    flash_attention(q, q, q, return_lse="yes")  # reportArgumentType, reportCallIssue
    flash_attention(shape, q, q)  # reportArgumentType
    flash_attention(q, q, q, bias=shape)  # reportArgumentType
    dot_product_attention(q, q, q, implementation="cuda")  # reportArgumentType
    dot_product_attention(q, q, q, softcap=1.0)  # reportCallIssue
    explain(q, q, q, mask="causal")  # reportArgumentType, reportCallIssue
