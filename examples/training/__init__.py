"""What train_gpt.py trains with: its text, model, loss and step, devices and speed."""

from training.devices import Split, make_mesh, shard, spec_of
from training.loss import cross_entropy
from training.model import GPT, KEPT, PRESETS, Config, load, save, xla_attention
from training.speed import (
    count_parameters,
    keys_seen,
    operations_per_token,
    peak_operations,
    utilisation,
)
from training.step import evaluate, loss_fn, make_optimizer, train_step
from training.text import START, batches, bigram_loss, pack, read_documents

__all__ = [
    "GPT",
    "KEPT",
    "PRESETS",
    "START",
    "Config",
    "Split",
    "batches",
    "bigram_loss",
    "count_parameters",
    "cross_entropy",
    "evaluate",
    "keys_seen",
    "load",
    "loss_fn",
    "make_mesh",
    "make_optimizer",
    "operations_per_token",
    "pack",
    "peak_operations",
    "read_documents",
    "save",
    "shard",
    "spec_of",
    "train_step",
    "utilisation",
    "xla_attention",
]
