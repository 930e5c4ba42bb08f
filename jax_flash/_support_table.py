"""README's table of what each backend's kernels run, made from what the backends declare.

    python -m jax_flash._support_table README.md     # writes it between its two marks

A cell says "yes" where both passes run, else the passes that do.
"""

import dataclasses
import itertools
import sys
from pathlib import Path
from typing import Any

from jax_flash import _backends, _function, _gpu, scores
from jax_flash._call import Call
from jax_flash._float8 import DTYPE
from jax_flash._ops import passes
from jax_flash._ops.decode import MOST_QUERIES, Decode
from jax_flash._ops.float8 import Float8
from jax_flash._ops.ragged import Ragged
from jax_flash._problem import Problem, Shapes
from jax_flash._terms import TERMS

BEGIN = "<!-- python -m jax_flash._support_table README.md -->\n"
END = "<!-- end of the table -->\n"

# Backend and GPU -> the column's head.
_COLUMNS = {
    ("cuda", "H200"): "`cuda`: H100, H200",
    ("cuda", "A100"): "`cuda`: others since Ampere",
    ("cudnn", "H200"): "`cudnn`",
    ("cpu", "H200"): "`cpu`",
    ("xla", "H200"): "`xla`: any platform",
}
_PLAIN = Problem("bfloat16", 1.0)
_SHAPES = Shapes(2, 512, 512, 8, 8, 64, 64)
_ARGUMENTS = {"score": "float32", **dict.fromkeys(("batch", "head", "query", "key"), "int32")}
_ALIBI = scores.alibi(scores.alibi_slopes(_SHAPES.q_heads))
_SCORE, _ = _function.trace("score_mod", _ALIBI, _ARGUMENTS, "float32")
_HALVES = ("bfloat16", "float16")
_DIMS = (1, 8, 33, 64, 128, 256, 512, 1024, 1 << 20)


def _terms(feature: str) -> dict[str, Any]:
    return {"terms": tuple(name for name, term in TERMS.items() if term.feature == feature)}


# What a row shows -> changes to a plain problem, all of which must run.
_PROBLEMS: dict[str, tuple[dict[str, Any], ...]] = {
    "float16, bfloat16": ({"dtype": "float16"}, {"dtype": "bfloat16"}),
    "float32": ({"dtype": "float32"},),
    "float64 (x64 mode)": ({"dtype": "float64"},),
    "causal, with a window or without": ({"window": (None, 0)}, {"window": (7, 0)}),
    "two-sided windows; aligned bottom-right where T ≠ S": (
        {"window": (7, 9), "bottom_right": True},
    ),
    "lengths, packed sequences (segment ids)": (_terms("lengths"), _terms("segment ids")),
    "positions in place of the index": (_terms("positions") | {"window": (7, 9)},),
    "softcap, sinks, with their gradients": ({"softcap": 30.0}, _terms("sinks")),
    "`deterministic=True`": ({"deterministic": True},),
    "boolean mask": (_terms("boolean mask"),),
    "block masks, of functions or layouts": (_terms("block masks"),),
    "chosen keys (`indices`)": (_terms("chosen keys"),),
    "bias, with its gradient in the bias's own shape": (_terms("bias"),),
    "score functions (`score_mod`); gradients of arrays that they read run on `xla`": (
        _terms("score function") | {"score": _SCORE},
    ),
    "dropout, the same pattern everywhere": (_terms("dropout") | {"dropout_rate": 0.1},),
}
# And to the shapes.
_SHAPE_ROWS: dict[str, tuple[dict[str, Any], ...]] = {
    "GQA, MQA; T ≠ S; empty rows": ({"kv_heads": 2}, {"kv_heads": 1, "q_len": 9}),
}


def table() -> str:
    """Returns the table in Markdown."""
    rows = ["| | " + " | ".join(_COLUMNS.values()) + " |", "|---" * (1 + len(_COLUMNS)) + "|"]
    cells = {name: [_cell(b, _changed(x)) for b in _COLUMNS] for name, x in _PROBLEMS.items()}
    float8 = Float8(dataclasses.replace(_PLAIN, dtype=DTYPE), None)
    cells['float8 (e4m3) with scales; `quantize="fp8"`, with gradients'] = [
        _runs(b, float8) for b in _COLUMNS
    ]
    cells["float32 lse (logarithm of the softmax's denominator), with its gradient"] = [
        _cell(b, [(_PLAIN, _SHAPES)], with_dlse=True) for b in _COLUMNS
    ]
    cells["head dim, value dim (may differ)"] = [_dims(column) for column in _COLUMNS]
    for name, changes in _SHAPE_ROWS.items():
        shapes = [(_PLAIN, dataclasses.replace(_SHAPES, **change)) for change in changes]
        cells[name] = [_cell(column, shapes) for column in _COLUMNS]
    cells["`decode_attention`: caches, pages, new keys in place"] = [
        _decodes(column, Decode(_PLAIN, None, rotary_base=1e4, paged=True, appends=True))
        for column in _COLUMNS
    ]
    cells["`ragged_paged_attention`: prefill and decoding in one batch over pages"] = [
        _decodes(column, Ragged(_PLAIN, None, paged=True), MOST_QUERIES) for column in _COLUMNS
    ]
    eight = Decode(_PLAIN, None, paged=True, appends=True)
    for dtype, since in (("int8", ""), ("float8_e4m3fn", " (`cuda` since Ada)")):
        call = dataclasses.replace(eight, quantized=dtype)
        cells[f"caches of {dtype} with scales{since}"] = [
            _decodes(column, call, dtypes=_HALVES, dims=(64, 128, 256)) for column in _COLUMNS
        ]
    packed = Decode(_PLAIN, None, paged=True, value_dim=512, latent_rows=True)
    one_head = {"kv_heads": 1, "value_dim": 512}
    cells["caches of latent attention in rows of 656 bytes (`cuda` on Hopper)"] = [
        _decodes(column, packed, dtypes=("bfloat16",), dims=(576,), **one_head)
        for column in _COLUMNS
    ]
    rows += [f"| {name} | {' | '.join(row)} |" for name, row in cells.items()]
    return "\n".join(rows) + "\n"


def _changed(changes: tuple[dict[str, Any], ...]) -> list[tuple[Problem, Shapes]]:
    return [(dataclasses.replace(_PLAIN, **change), _SHAPES) for change in changes]


def _cell(
    column: tuple[str, str], cases: list[tuple[Problem, Shapes]], *, with_dlse: bool = False
) -> str:
    backend, gpu = column
    running = [
        name
        for name in ("forward", "backward")
        if not any(
            _backends.BACKENDS[backend].decline(
                passes(problem, with_dlse=with_dlse)[name], shapes, _gpu.spec.GPUS[gpu]
            )
            for problem, shapes in cases
        )
    ]
    return "yes" if len(running) == 2 else running[0] if running else "no"


def _runs(column: tuple[str, str], call: Call) -> str:
    backend, gpu = column
    reasons = _backends.BACKENDS[backend].decline(call, _SHAPES, _gpu.spec.GPUS[gpu])
    return "no" if reasons else "yes"


def _decodes(
    column: tuple[str, str],
    call: Decode,
    q_len: int = 1,
    dtypes: tuple[str, ...] = ("float32", *_HALVES),
    dims: tuple[int, ...] = (33, 64, 128, 256),
    **changes: int,
) -> str:
    backend, gpu = column
    declined = False
    for dtype, head_dim in itertools.product(dtypes, dims):
        call = dataclasses.replace(call, problem=dataclasses.replace(_PLAIN, dtype=dtype))
        of_dim = {"q_len": q_len, "head_dim": head_dim, "value_dim": head_dim} | changes
        shapes = dataclasses.replace(_SHAPES, **of_dim)
        gpu_spec = _gpu.spec.GPUS[gpu]
        declined |= bool(_backends.BACKENDS[backend].decline(call, shapes, gpu_spec))
    return "no" if declined else "yes"


def _dims(column: tuple[str, str]) -> str:
    """Says up to which head dim the passes run, both and then one alone."""
    largest: dict[str, int] = {}
    for dim in _DIMS:
        shapes = dataclasses.replace(_SHAPES, head_dim=dim, value_dim=dim)
        largest[_cell(column, [(_PLAIN, shapes)])] = dim
    largest.pop("no", None)
    parts = []
    for running, dim in sorted(largest.items(), key=lambda item: item[1]):
        dims = "any" if dim == _DIMS[-1] else f"up to {dim}"
        parts.append(dims if running == "yes" else f"{running}, {dims}")
    return "; ".join(parts)


def write(readme: Path) -> None:
    """Puts the table between its marks."""
    before, rest = readme.read_text().split(BEGIN)
    _, after = rest.split(END)
    readme.write_text(before + BEGIN + table() + END + after)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
