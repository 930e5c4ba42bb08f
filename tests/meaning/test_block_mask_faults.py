"""Wrong block masks, and wrong arguments of what makes them: what is named."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import masks

from .masked_calls import DOCUMENTS, S, T, lattice, qkv


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
            r"mask_mod takes \(q, k\); expected .*batch.*arguments?$",
        ),
        (lambda: make(masks.causal), TypeError, r"; jax_flash.masks.causal\(...\) returns one"),
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
        (
            lambda: jax_flash.stack_block_masks(m(q_len=T, kv_len=S)),  # pyright: ignore
            TypeError,
            "masks is BlockMask; expected a sequence of BlockMasks",
        ),
    ]
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()
