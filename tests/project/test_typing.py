"""What a type checker, an editor and help() tell of the public calls is what the calls do."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import typing
from pathlib import Path
from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import ArrayLike

import jax_flash
from jax_flash import attention, dot_product_attention, flash_attention

PROGRAM = Path(__file__).with_name("user_program.py")
SIZES = {"T": 3, "S": 5, "N": 4, "K": 2, "H": 8, "Hv": 16, "n": 2}


@pytest.mark.skipif(
    importlib.util.find_spec("pyright") is None, reason="needs pyright, of the extra 'lint'"
)
def test_pyright_tells_a_user_what_comes_back_and_what_is_wrong(tmp_path: Path):
    program = tmp_path / PROGRAM.name
    program.write_text(PROGRAM.read_text())
    settings = {"extraPaths": [str(Path(jax_flash.__file__).parents[1])], "pythonVersion": "3.11"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-P", "-m", "pyright", "--outputjson"]
    command += ["--pythonpath", sys.executable]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert process.returncode == 1, process.stdout + process.stderr
    report = json.loads(process.stdout)
    found = {(x["range"]["start"]["line"] + 1, x["rule"]) for x in report["generalDiagnostics"]}
    lines = enumerate(program.read_text().splitlines(), 1)
    expected = {(number, rule) for number, line in lines for rule in re.findall(r"report\w+", line)}
    assert len(expected) == 11
    assert found == expected, process.stdout


@pytest.mark.parametrize(
    ("call", "options", "flag"),
    [
        (flash_attention, attention.Float8Options, "return_lse"),
        (dot_product_attention, attention.DotProductOptions, "return_residual"),
    ],
)
def test_checkers_read_the_keywords_and_types_of_the_signature(call, options, flag):
    """They read the overloads and their options; help() and the call itself read the rest."""
    own = typing.get_type_hints(call)
    keywords = {
        name: kind[ArrayLike] if getattr(kind, "__parameters__", ()) else kind
        for name, kind in typing.get_type_hints(options).items()
    }
    overloads = typing.get_overloads(call)
    assert len(overloads) == (4 if "return_amax" in own else 3)
    for overload in overloads:
        told = typing.get_type_hints(overload) | keywords
        assert told.keys() - {"options"} == own.keys()
        for name in own.keys() - {flag, "return_amax", "return"}:
            assert told[name] == own[name], name


@pytest.mark.parametrize(
    ("call", "batch", "flag"),
    [
        (flash_attention, (2,), "return_lse"),
        (flash_attention, (2, 3), "return_lse"),
        (flash_attention, (), "return_lse"),
        (dot_product_attention, (2,), "return_residual"),
    ],
)
@pytest.mark.parametrize("broadcast", [False, True])
def test_annotated_shapes_are_taken_and_returned(call, batch, flag, broadcast):
    hints = typing.get_type_hints(call, include_extras=True)
    returned = shapes_of(hints.pop("return"), batch, broadcast)
    arguments = {}
    for name, hint in hints.items():
        for shape in shapes_of(hint, batch, broadcast):
            draw = np.random.default_rng(len(arguments)).normal(size=shape)
            if name.endswith(("lengths", "ids", "positions", "indices")):
                arguments[name] = np.ones(shape, "int32")
            else:
                arguments[name] = draw < 2 if name == "mask" else jnp.float32(draw)
    assert {"query", "key", "value", "bias", "mask", "scale"} < arguments.keys()
    alone, out, lse = returned
    if (indices := arguments.pop("indices", None)) is not None:  # not beside bias and mask
        arrays = {name: arguments[name] for name in ("query", "key", "value")}
        assert call(**arrays, indices=indices).shape == alone
    assert call(**arguments).shape == alone
    assert [x.shape for x in call(**arguments, **{flag: True})] == [out, lse]


def shapes_of(hint: Any, batch: tuple[int, ...], broadcast: bool) -> list[tuple[int, ...]]:
    """The shapes that an annotation says, in its order, for sizes of ours."""
    if typing.get_origin(hint) is not Annotated:
        return [x for part in typing.get_args(hint) for x in shapes_of(part, batch, broadcast)]
    shape: list[int] = []
    for dim in hint.__metadata__[0].split():
        sizes = batch if dim.startswith("*") else (SIZES[dim.lstrip("#")],)
        shape += [1] * len(sizes) if broadcast and "#" in dim else sizes
    return [tuple(shape)]
