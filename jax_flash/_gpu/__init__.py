"""How a GPU runs a call: GPUs by name (`spec.py`), families of kernels (`family.py`), a file
or a folder each.

Everything is pure: it runs at lowering, knows no arrays and needs no GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from jax_flash import _simplify
from jax_flash._call import Call
from jax_flash._gpu import (
    carrier,
    chosen,
    decode,
    distances,
    emit,
    few_queries,
    few_scores,
    folding,
    short_float32,
    sm80,
    sm90,
    sm90_float8,
    sm90_latent,
    spec,
)
from jax_flash._gpu.family import Family, preferred
from jax_flash._gpu.plan import Plan
from jax_flash._gpu.sm80 import pages as pages_sm80
from jax_flash._gpu.sm90 import pages
from jax_flash._gpu.spec import GpuSpec
from jax_flash._problem import Shapes

__all__ = [
    "Family",
    "GpuSpec",
    "Plan",
    "calls",
    "carrier",
    "choose",
    "emit",
    "families",
    "few_queries",
    "few_scores",
    "folded",
    "folding",
    "padded",
    "plan",
    "plans",
    "prefer",
    "refuse",
    "spec",
]

_FAMILIES: tuple[Family, ...] = (
    sm90.Sm90(),
    pages.Pages(),
    sm90_float8.Sm90Float8(),
    sm90_latent.Sm90Latent(),
    decode.Decode90(),
    sm80.Sm80(),
    pages_sm80.Pages80(),
    decode.Decode80(),
)


def families() -> tuple[Family, ...]:
    """Returns the families in their order: the first that runs a pass is taken."""
    return tuple(sorted(_FAMILIES, key=lambda family: family.name != preferred.get()))


def refuse(call: Call, shapes: Shapes, gpu: GpuSpec) -> tuple[str, ...]:
    """Lists why no family runs a pass on a GPU, all reasons of the one that is nearest to it.

    Empty if one does. Among families as near the last is heard, which runs on most GPUs.
    """
    if "indices" in call.operands:
        return (f"the CUDA kernels have {call.without_indices}",)
    having = [family for family in families() if call.target in family.passes]
    own = [family for family in having if gpu.arch in family.architectures]
    reasons = [family.refuse(call, shapes, gpu) for family in own or having]
    return min(reversed(reasons), key=len)


def choose(call: Call, shapes: Shapes, gpu: GpuSpec) -> Family:
    """Returns the family that runs a pass which `refuse` lets through."""
    having = (family for family in families() if call.target in family.passes)
    return next(family for family in having if not family.refuse(call, shapes, gpu))


def plan(call: Call, shapes: Shapes, gpu: GpuSpec, tiling: Any = None) -> Plan:
    """Makes the plan of a pass which `refuse` lets through, by a tiling (None: the chosen)."""
    problem = _simplify.lines(call.problem, shapes, distances.find) or call.problem
    call = dataclasses.replace(call, problem=problem)
    made = choose(call, shapes, gpu).plan(call, shapes, gpu, tiling)
    return chosen.packs(made) if call.packs else made


def folded(call: Call, shapes: Shapes, gpu: GpuSpec) -> tuple[Call, Shapes]:
    """Returns the call that kernels take for one which `refuse` lets through: of longer rows."""
    decoding = few_queries.decoding(call, shapes, gpu)
    if decoding is not None:
        return decoding, shapes
    first, *_ = calls(call, shapes, gpu)
    family = choose(first, shapes, gpu)
    rows = family.folds(first, shapes, gpu)
    if rows > 1:
        return folding.fold(call, shapes, rows)
    heads = family.folds_heads(first, shapes, gpu)
    return folding.fold_heads(call, shapes) if heads else (call, shapes)


def calls(call: Call, shapes: Shapes, gpu: GpuSpec) -> tuple[Call, ...]:
    """Returns the calls that run a pass which `refuse` lets through, one after the other.

    A float32 pass that carrier.py splits is two calls, any other one.
    """
    split = call.target in ("forward", "backward") and carrier.takes(call.problem)
    if split and not short_float32.takes(call, shapes, gpu):
        carried = carrier.carried(call)
        if not refuse(carried, shapes, gpu):
            return carried, carrier.rest(call)
    return (call,)


def padded(call: Call, shapes: Shapes, gpu: GpuSpec) -> Shapes:
    """Returns the sizes of the arrays that kernels take for a pass which `refuse` lets through.

    Their columns past the call's hold zeros, which add nothing to scores and give columns of
    results that nobody reads.
    """
    first, *_ = calls(call, shapes, gpu)
    return choose(first, shapes, gpu).padded(first, shapes, gpu)


def plans(call: Call, shapes: Shapes, gpu: GpuSpec) -> tuple[Plan, ...]:
    """Makes the plans of a pass, for arrays of the sizes that `folded` and `padded` say."""
    kernels, sizes = folded(call, shapes, gpu)
    notes = []
    if kernels.target != call.target:
        notes.append("a few queries of each row, as decoding takes them")
    elif sizes.q_heads != shapes.q_heads:
        group = shapes.q_heads // sizes.q_heads
        notes.append(f"{group} query heads that share keys are queries of one head")
    elif sizes != shapes:
        rows = shapes.batch // sizes.batch
        notes.append(f"{rows} batch rows of {shapes.q_len} positions are documents of one")
    made = plans_of_folded(kernels, sizes, gpu)
    return tuple(dataclasses.replace(x, notes=(*notes, *x.notes)) for x in made)


def plans_of_folded(call: Call, shapes: Shapes, gpu: GpuSpec) -> tuple[Plan, ...]:
    """Makes the plans of what `folded` returned: rows of folded heads could be folded again."""
    taken, notes = padded(call, shapes, gpu), ()
    if taken != shapes:
        dims = f"{shapes.head_dim}/{shapes.value_dim} to {taken.head_dim}/{taken.value_dim}"
        notes = (f"copies of operands have head dims padded from {dims}",)
    made = (plan(x, taken, gpu) for x in calls(call, shapes, gpu))
    return tuple(dataclasses.replace(x, notes=(*x.notes, *notes)) for x in made)


@contextlib.contextmanager
def prefer(name: str) -> Iterator[None]:
    """Puts a family first, for tests and benchmarks: in calls that are traced and lowered within.

    Other threads keep their order. Raises: ValueError if there is none of this name.
    """
    names = [family.name for family in _FAMILIES]
    if name not in names:
        raise ValueError(f"family must be one of {', '.join(names)}, not {name!r}")
    token = preferred.set(name)
    try:
        yield
    finally:
        preferred.reset(token)
