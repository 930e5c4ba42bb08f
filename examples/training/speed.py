"""Owns what a step computes, and the share of a GPU's peak that it reaches."""

from typing import Any

import jax
import numpy as np
from flax import nnx

from training.model import GPT
from training.text import START


def operations_per_token(model: GPT, seen: float | None = None) -> float:
    """Floating-point operations of one training step, by token; what remat repeats does not count.

    6 per parameter, and 12 * layers * width for each of the keys that a query sees: `seen` of them
    in the mean; None: of a row that is one document, half of its length.
    """
    config = model.config
    seen = config.length / 2 if seen is None else seen
    return 6 * count_parameters(model) + 12 * config.layers * config.width * seen


def keys_seen(rows: np.ndarray) -> float:
    """How many keys the queries of packed rows [rows, T + 1] see in the mean."""
    at = np.arange(rows.shape[1] - 1)
    starts = np.maximum.accumulate(np.where(rows[:, :-1] == START, at, 0), axis=1)
    return float((at - starts + 1).mean())


def peak_operations(device: Any) -> float | None:
    """What a GPU can do in a second in bfloat16, by its data sheet; None where it is not known."""
    peaks = {"NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA A100": 312e12}
    return next((peaks[name] for name in peaks if device.device_kind.startswith(name)), None)


def utilisation(model: GPT, tokens_per_second: float, seen: float, devices: list) -> float | None:
    """Share of the GPUs' bfloat16 peak that goes into the model; None where it is not known."""
    peak = peak_operations(devices[0])
    if peak is None or model.config.dtype != "bfloat16":
        return None
    return operations_per_token(model, seen) * tokens_per_second / (peak * len(devices))


def count_parameters(model: GPT) -> int:
    """Trained numbers in the model."""
    return sum(parameter.size for parameter in jax.tree.leaves(nnx.state(model, nnx.Param)))
