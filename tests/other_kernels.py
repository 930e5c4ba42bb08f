"""Arguments of a case that other kernels compute: those of long calls, or of what is written."""

from __future__ import annotations

import abc
import dataclasses
import importlib
from typing import Any

import jax
import pytest

from jax_flash import _gpu, _native, _simplify
from jax_flash._gpu import short_float32, sm90
from jax_flash._gpu.sm90 import (
    backward,
    backward_ring,
    backward_units,
    forward_keys,
    forward_order,
    forward_parts,
    forward_rows,
)

from .cases import Arguments, Case

# From how many queries and keys on a line's blocks are left out, units begin where documents do,
# wide heads have three warpgroups, gradients load boxes that begin early, sums of dq take turns, or
# CTAs share a unit.
_SHORTEST = (
    (forward_keys, "_FADING_QUERIES"),
    (forward_keys, "_FADING_KEYS"),
    (forward_rows, "_CUT_QUERIES"),
    (forward_rows, "_CUT_ROWS"),
    (forward_rows, "_LONG"),
    (backward_ring, "_RING_SHORTEST"),
    (backward, "_EARLY_SHORTEST"),
    (backward_units, "_UNIT_STEPS"),
    (backward_units, "_WIDE_ENDS"),
    (backward_units, "_FEWER_STEPS"),
    (backward_units, "_SHARED_STEPS"),
    (backward_units, "_SHARED_CAUSAL"),
    (backward_units, "_ONE_ROUND_LONGEST"),
    (importlib.import_module("jax_flash._gpu.sm90.backward_launch"), "_SHARE"),
)


class _AsElsewhere(abc.ABC):
    """Arguments whose call has the kernels of other sizes, by which `value` is chosen."""

    arguments: Arguments
    value: Any

    @property
    def case(self) -> Case:
        return self.arguments.case

    def run(self, backend: str, **options: Any) -> dict[str, Any]:
        chosen: list[Any] = []
        with pytest.MonkeyPatch.context() as patch:
            self._move_limits(patch, chosen)
            jax.clear_caches()
            try:
                got = self.arguments.run(backend, **options)
            finally:
                jax.clear_caches()  # the same call would find these kernels
        if self.value not in chosen:
            raise ValueError(f"{self} had to choose {self.value}, not {chosen}")
        return got

    @abc.abstractmethod
    def _move_limits(self, patch: pytest.MonkeyPatch, chosen: list[Any]) -> None:
        """Changes what sizes are compared with, and appends what is chosen."""


@dataclasses.dataclass
class AsIfLong(_AsElsewhere):
    """Arguments whose few queries and keys have the kernels that many have elsewhere.

    Args:
      field: of a tiling that is chosen then,
      value: and what it has to be.
    """

    arguments: Arguments
    field: str
    value: Any

    def _move_limits(self, patch: pytest.MonkeyPatch, chosen: list[Any]) -> None:
        for module, name in _SHORTEST:
            patch.setattr(module, name, 1)
        patch.setattr(forward_order, "is_one_round", lambda facts: False)
        patch.setattr(forward_rows, "fills_larger_units", lambda facts: True)
        patch.setattr(forward_rows, "is_round", lambda *_: False)
        for name in ("choose_forward", "choose_backward"):
            patch.setattr(sm90, name, _noting(getattr(sm90, name), self.field, chosen))


def _noting(choose: Any, field: str, chosen: list[Any]) -> Any:
    def noted(*call):
        tiling = choose(*call)
        chosen.append(getattr(tiling, field, None))
        return tiling

    return noted


@dataclasses.dataclass
class AsInParts(_AsElsewhere):
    """Arguments of few units whose few keys are in parts, as many keys are.

    Args:
      multiprocessors: that a plan knows, at least two for each unit.
      there: that there are when the call runs; 0: as many.
    """

    arguments: Arguments
    multiprocessors: int
    there: int = 0
    value: bool = True

    def run(self, backend: str, **options: Any) -> dict[str, Any]:
        before = _gpu.spec.present()
        assert before is not None
        _native.pretend_multiprocessors(self.there or self.multiprocessors)
        try:
            return super().run(backend, **options)
        finally:
            _native.pretend_multiprocessors(before.sms or 0)

    def _move_limits(self, patch: pytest.MonkeyPatch, chosen: list[Any]) -> None:
        before = _gpu.spec.present()
        assert before is not None
        gpu = dataclasses.replace(before, sms=self.multiprocessors)
        patch.setattr(_gpu.spec, "present", lambda: gpu)
        patch.setattr(forward_parts, "_GAIN", 0)
        patch.setattr(forward_parts, "_LEAST", 0)
        patch.setattr(sm90, "choose_forward", _noting(sm90.choose_forward, "splits", chosen))


@dataclasses.dataclass
class AsIfManyRows(_AsElsewhere):
    """Arguments in float32 whose few short rows are folded, as those of large batches.

    Args:
      value: rows that are documents of one.
    """

    arguments: Arguments
    value: int

    def _move_limits(self, patch: pytest.MonkeyPatch, chosen: list[Any]) -> None:
        takes = short_float32.takes

        def noted(call, shapes, gpu):
            taken = takes(dataclasses.replace(call, backend=None), shapes, gpu)
            chosen.append(taken and short_float32.folds(call, shapes))
            return taken

        patch.setattr(short_float32, "takes", noted)
        patch.setattr(short_float32, "_SUMMED", 0)
        patch.setattr(short_float32, "_FOLDED", 1)
        patch.setattr(short_float32, "_FEW_LENGTH", 1)


@dataclasses.dataclass
class AsWritten:
    """Arguments of a call that is computed as it is written, or not.

    Args:
      on: it is.
      constant: of kernels, that says it is not; or several of which one does.
    """

    arguments: Arguments
    on: bool
    constant: str

    @property
    def case(self) -> Case:
        return self.arguments.case

    def run(self, backend: str, **options: Any) -> dict[str, Any]:
        found, plan = set(), _gpu.plan

        def planned(*call):
            made = plan(*call)
            found.add(any(made.constants.get(name) for name in self.constant.split()))
            return made

        with pytest.MonkeyPatch.context() as patch, _simplify.as_written(self.on):
            patch.setattr(_gpu, "plan", planned)
            got = self.arguments.run(backend, **options)
        if found != {not self.on}:
            raise ValueError(f"kernels are planned with {self.constant} {found}")
        return got
