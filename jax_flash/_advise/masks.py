"""Reads what a mask hides: causality, a window, documents, padding, or something of its own."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

LARGE = -1e4  # a bias below hides: in float32 its weight is 0


class Meaning(NamedTuple):
    """What a mask is."""

    kind: str
    found: str
    instead: str


def hidden_by(bias: np.ndarray) -> np.ndarray | None:
    """Returns where a bias hides, if it does nothing else; else None."""
    bias = np.asarray(bias, np.float32)
    hidden = bias <= LARGE
    return hidden if hidden.any() and not bias[~hidden].any() else None


def read(mask: np.ndarray) -> Meaning | None:
    """Reads a boolean mask `[..., T or 1, S or 1]`; None if no option says the same."""
    seen = mask.reshape(-1, *mask.shape[-2:])
    if seen.all():
        return Meaning("nothing hidden", "hides nothing", "no mask")
    queries, keys = (np.logical_or.reduce(seen, axis) for axis in (-1, -2))  # [M, T], [M, S]
    if seen.shape[1] == 1:
        return _padding(np.ones_like(queries), keys)
    if seen.shape[2] == 1:
        return _padding(queries, np.ones_like(keys))
    rest = queries[:, :, None] & keys[:, None, :]
    for band, meaning in _bands(seen):
        if band is not None and (seen == band).all():
            return meaning  # which hides the keys that no query sees
        if (seen == (rest if band is None else rest & band)).all():
            return _with_padding(meaning, queries, keys)
    if seen.shape[1] == seen.shape[2]:
        # The first key that a query sees is where its document begins, causal or not.
        begins = seen.argmax(-1)
        same = begins[:, :, None] == begins[:, None, :]
        below = np.tri(seen.shape[1], dtype=bool)
        for causal in (False, True):
            if (seen == (rest & same & below if causal else rest & same)).all():
                options = ["is_causal=True"] * causal
                options += ["query_segment_ids and key_value_segment_ids, a document's number each"]
                found = f"keeps documents apart{' and is causal' * causal}"
                return Meaning("documents", found, ", ".join(options))
    return None


def _bands(seen: np.ndarray) -> list[tuple[np.ndarray | None, Meaning | None]]:
    """Lists the bands that a mask may be, the simplest first; None: all."""
    length, keys = seen.shape[1:]
    distance = np.arange(keys) - np.arange(length)[:, None]
    bands: list[tuple[np.ndarray | None, Meaning | None]] = [
        (None, None),
        (distance <= 0, Meaning("causal", "is causal", "is_causal=True")),
    ]
    if length != keys:
        aligned = 'is_causal=True, causal_align="bottom_right"'
        bands.append((distance <= keys - length, Meaning("causal", "is causal", aligned)))
    pairs = distance[seen.any(0)]
    for left in (-int(pairs.min()), None):
        for right in (0, int(pairs.max()), None):
            options = ["is_causal=True"] * (right == 0)
            options.append(f"local_window_size=({left}, {right})")
            band = np.ones_like(distance, bool)
            band &= True if left is None else distance >= -left
            band &= True if right is None else distance <= right
            bands.append((band, Meaning("window", "is a window", ", ".join(options))))
    return bands


def _with_padding(meaning: Meaning | None, queries: np.ndarray, keys: np.ndarray) -> Meaning | None:
    padding = _padding(queries, keys)
    if meaning is None:
        if padding is not None:
            return padding
        return Meaning(
            "padding", "hides the same keys from all queries", "a mask [*B, 1, 1, S] of the keys"
        )
    if queries.all() and keys.all():
        return meaning
    instead = padding.instead if padding else "a mask [*B, 1, 1, S] of the keys"
    return Meaning(
        meaning.kind, f"{meaning.found} and hides padding", f"{meaning.instead}, {instead}"
    )


def _padding(queries: np.ndarray, keys: np.ndarray) -> Meaning | None:
    """Reads which tokens of `[M, T]` and `[M, S]` are there at all."""
    options = []
    for name, valid in (("query", queries), ("key_value", keys)):
        if valid.all():
            continue
        if (valid == _first(valid.sum(-1), valid.shape[-1])).all():
            options.append(f"{name}_seq_lengths")
        elif (valid == _first(valid.sum(-1), valid.shape[-1])[:, ::-1]).all():
            ids = "query_segment_ids and key_value_segment_ids, 0 for tokens and 1 for padding"
            return Meaning("padding", "hides padding on the left", ids)
        else:
            return None
    found = "hides padding behind each row's end"
    return Meaning("padding", found, f"{' and '.join(options)}, int32 [*B]") if options else None


def _first(lengths: np.ndarray, size: int) -> np.ndarray:
    return np.arange(size) < lengths[:, None]
