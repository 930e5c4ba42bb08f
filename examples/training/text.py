"""Owns the text: files, packed rows, batches, and the loss of a model that counts pairs."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

START = 0  # the byte that opens every document; Python source has none


def read_documents(folder: Path) -> list[bytes]:
    """Every Python file below `folder`, shuffled the same way on every machine."""
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
    files = sorted(f.relative_to(folder) for f in folder.rglob("*.py"))
    texts = [(folder / f).read_bytes() for f in files if skipped.isdisjoint(f.parts)]
    texts = [text for text in texts if text and START not in text]
    return [texts[i] for i in np.random.default_rng(0).permutation(len(texts))]


def pack(documents: list[bytes], length: int) -> np.ndarray:
    """Documents end to end, each after a START, cut into rows: uint8 [rows, length + 1].

    The first `length` bytes of a row are inputs, the last `length` their targets, one ahead.
    """
    text = np.frombuffer(b"".join(bytes([START]) + document for document in documents), np.uint8)
    starts = np.arange(0, len(text) - length, length)
    return text[starts[:, None] + np.arange(length + 1)]


def batches(rows: np.ndarray, batch: int, seed: int) -> Iterator[np.ndarray]:
    """Random batches [batch, length + 1] without end, every row at most once per pass."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(len(rows))
        for i in range(0, len(order) - batch + 1, batch):
            yield rows[order[i : i + batch]]


def bigram_loss(train: np.ndarray, validation: np.ndarray) -> float:
    """Validation loss of a model that knows how often each byte follows each other byte."""
    pairs = train[:, :-1].astype(np.int64) * 256 + train[:, 1:]
    counts = np.bincount(pairs.ravel(), minlength=256 * 256).reshape(256, 256) + 0.1
    log_probabilities = np.log(counts / counts.sum(axis=1, keepdims=True))
    return -float(log_probabilities[validation[:, :-1], validation[:, 1:]].mean())
