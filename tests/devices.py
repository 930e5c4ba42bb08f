"""Meshes of the virtual CPU devices (conftest.py), and the collectives of a program over them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

COLLECTIVE = re.compile(
    r"= .*? (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


def mesh_with(explicit: bool | Sequence[bool] = False, **axes: int) -> Mesh:
    """A mesh of the first CPU devices, by its axes' names and sizes; `explicit`: all, or which."""
    devices = jax.devices("cpu")
    if len(devices) < 8:
        pytest.skip("needs eight CPU devices (XLA_FLAGS was set without them)")
    which = [explicit] * len(axes) if isinstance(explicit, bool) else explicit
    kinds = tuple(AxisType.Explicit if x else AxisType.Auto for x in which)
    count = int(np.prod(list(axes.values())))
    return jax.make_mesh(tuple(axes.values()), tuple(axes), kinds, devices=devices[:count])


def mesh_of(shape: tuple[int, int], explicit: bool | Sequence[bool] = False) -> Mesh:
    """A mesh of axes "data" and "model"."""
    return mesh_with(explicit, data=shape[0], model=shape[1])


def collectives(compiled: jax.stages.Compiled) -> list[str]:
    """The kinds of the collectives of a compiled program, one for each."""
    return COLLECTIVE.findall(compiled.as_text())
