"""Owns what runs ahead of decoding where rows read chosen keys: their tables are packed.

A table names a place for each key that was chosen, below 0 for those that the query does not see.
A kernel of its own (cuda/kernels/chosen.cuh) brings the others to the front, and says how many
there are: what any family's kernels of decoding take for a table and a length.
"""

from __future__ import annotations

import dataclasses

from jax_flash._gpu.fields import Field, Scratch
from jax_flash._gpu.plan import Kernel, Plan
from jax_flash._gpu.sizes import B, Size

_THREADS = 256  # kThreads in cuda/kernels/chosen.cuh
_COLUMNS = Size("columns")


def packs(plan: Plan) -> Plan:
    """Makes of a plan of decoding with pages one whose rows are packed first.

    Where its kernels take places that are not read (kTakesPlaces), a row is as long as its table.
    """
    if plan.constants["kTakesPlaces"]:
        return _without_lengths(plan)
    scratch = {
        "page_table": Field("int*", "packed_table", Scratch("s32", (B, _COLUMNS)), "[B, columns]"),
        "lengths": Field("int*", "packed_lengths", Scratch("s32", (B,)), "[B]"),
    }
    params = plan.launch.params
    fields = [
        dataclasses.replace(x, value=scratch[x.name].name) if x.name in scratch else x
        for x in params.fields
    ]
    fields += [
        *scratch.values(),
        Field("const int*", "places", "places", "[B, columns], below 0: nothing is read"),
        Field("int", "chosen", _COLUMNS, "columns"),
    ]
    packing = Kernel("flash_chosen", B, _THREADS, beside=True)
    first, *others = plan.launch.steps
    if plan.constants.get("kFollows"):
        first = dataclasses.replace(first, overlaps=True)
    launch = dataclasses.replace(
        plan.launch,
        params=dataclasses.replace(params, fields=tuple(fields)),
        steps=(packing, first, *others),
    )
    operands = (
        dataclasses.replace(x, name="places") if x.name == "page_table" else x
        for x in plan.operands
    )
    return dataclasses.replace(
        plan,
        operands=tuple(operands),
        launch=launch,
        beside="chosen.cuh",
        dims={**plan.dims, "columns": plan.dims["S"]},
    )


def _without_lengths(plan: Plan) -> Plan:
    """Makes of a plan of decoding with pages one whose parameters have no lengths."""
    params = plan.launch.params
    fields = tuple(
        dataclasses.replace(x, value=None) if x.name == "lengths" else x for x in params.fields
    )
    launch = dataclasses.replace(plan.launch, params=dataclasses.replace(params, fields=fields))
    return dataclasses.replace(plan, launch=launch, dims={**plan.dims, "columns": plan.dims["S"]})
