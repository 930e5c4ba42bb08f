"""The operands and results of a custom call, as its plan names them: dtypes, dims, what is one."""

from __future__ import annotations

from typing import Any

from jax_flash._call import Call
from jax_flash._float8 import DTYPE
from jax_flash._gpu.fields import name_of
from jax_flash._gpu.plan import Buffer
from jax_flash._philox import WORDS_OF_PART
from jax_flash._problem import Shapes
from jax_flash._terms import TERMS, is_capture

RESULT_SCALE = "result_scale"  # follows the operands of a call that is split: see carrier.py


def operands_of(call: Call, shapes: Shapes) -> tuple[Buffer, ...]:
    """Lists the operands of a pass of flash_attention."""
    rows = [_buffer(call, shapes, name) for name in call.operands]
    if call.problem.split == "rest":  # results of the other call, which become this one's
        rows += results_of(call, shapes)
    if call.problem.split:
        rows.append(Buffer(RESULT_SCALE, ("f32",), ()))
    return tuple(rows)


def results_of(call: Call, shapes: Shapes) -> tuple[Buffer, ...]:
    """Lists its results, scratch arrays aside."""
    return tuple(_buffer(call, shapes, name) for name in call.results)


def same_of(call: Call) -> tuple[tuple[str, str], ...]:
    """Lists the operands and results that are one array."""
    return tuple((name, name) for name in call.results) if call.problem.split == "rest" else ()


def dims_of(shapes: Shapes) -> dict[str, Any]:
    """Returns the dims that plans name, where they are known or symbolic."""
    dims = dict(zip("BTSNK", _sizes(shapes), strict=True))
    for name, term in (("bias", shapes.bias), ("mask", shapes.mask)):
        if term is not None:
            sizes = (term.batch, term.heads, term.queries, term.keys)
            dims |= {f"{name}.{letter}": n for letter, n in zip("BNTS", sizes, strict=True)}
    block = shapes.block_mask
    if block is not None:
        dims |= {"block_numbers.B": block.batch, "block_numbers.N": block.heads}
    return dims


def _sizes(shapes: Shapes) -> tuple[Any, ...]:
    return shapes.batch, shapes.q_len, shapes.kv_len, shapes.q_heads, shapes.kv_heads


def _buffer(call: Call, shapes: Shapes, name: str) -> Buffer:
    of = name.removeprefix("d") if name in call.results else name  # what it is the gradient of
    words = [_leading(of, name), *(_dim(shapes, of, name, letter) for letter in call.dims(of))]
    return Buffer(name, _dtypes(call, shapes, of, name), tuple(words))


def _leading(of: str, name: str) -> str:
    ones = "B" if is_capture(of) or (of in TERMS and "B" in TERMS[of].ones) else ""
    return f"*{_word(of, name, 'B', ones)}"


def _dim(shapes: Shapes, of: str, name: str, letter: str) -> str:
    block = shapes.block_mask
    known = {
        "H": shapes.head_dim,
        "V": shapes.value_dim,
        "W": WORDS_OF_PART if shapes.drops_part else 4,
        "U": 2,  # batch row and head
        "D": 0 if block is None else block.block,
        "E": 0 if block is None else block.block // 16,
    }
    if letter in known:
        return str(known[letter])
    if letter in "IJCAFGLY":
        return f"{of}.{letter}"
    return _word(of, name, letter, TERMS[of].ones if of in TERMS else "")


def _word(of: str, name: str, letter: str, ones: str) -> str:
    if letter not in ones:
        return letter
    return f"{of}.{letter}:{letter}" if name == of else f"{of}.{letter}"


def _dtypes(call: Call, shapes: Shapes, of: str, name: str) -> tuple[str, ...]:
    problem = call.problem
    if is_capture(of):
        return ("f32", "s32", "u32", "pred")
    if of in ("lse", "dlse", "q_scale", "k_scale", "v_scale"):
        return ("f32",)
    if of in TERMS:
        dtype = TERMS[of].dtype
        if dtype == "float":
            return (name_of(shapes.own_bias.dtype),)
        return (name_of("float32" if dtype == "sum" else dtype),)
    if problem.dtype == DTYPE:
        return (name_of(call.result_dtype) if name in call.results else "u8",)
    # With float16 copies results are float32, and so is `out` where the backward pass reads it.
    wide = problem.split == "carried" and (name in call.results or name == "out")
    return (name_of("float32" if wide else problem.dtype),)
