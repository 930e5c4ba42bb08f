"""Owns one training step: the loss of packed rows, the optimizer. Read next: loss.py."""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from training.loss import cross_entropy
from training.model import GPT, Config
from training.text import START


def loss_fn(model: GPT, rows: jax.Array) -> jax.Array:
    """Mean cross entropy, in nats per byte, over rows [B, T + 1] of packed documents."""
    inputs, targets = rows[:, :-1].astype(jnp.int32), rows[:, 1:].astype(jnp.int32)
    segment_ids = jnp.cumsum(inputs == START, axis=1, dtype=jnp.int32)  # documents stay apart
    positions = None
    if model.split is not None:
        positions = jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape)
        inputs, targets, segment_ids, positions = map(
            model.split.place, (inputs, targets, segment_ids, positions)
        )
    features = model.features(inputs, segment_ids, positions=positions)
    shards = 1 if model.split is None else model.split.mesh.shape["seq"]
    return cross_entropy(features, model.embedding.embedding[...], targets, None, shards)


@functools.partial(nnx.jit, donate_argnums=(0, 1))
def train_step(model: GPT, optimizer: nnx.Optimizer, rows: jax.Array) -> jax.Array:
    """Updates the model on one batch; returns the loss before the update."""
    loss, grads = nnx.value_and_grad(loss_fn)(model, rows)
    optimizer.update(model, grads)
    return loss


evaluate = nnx.jit(loss_fn)


def make_optimizer(model: GPT, config: Config) -> nnx.Optimizer:
    """AdamW with warm-up and cosine decay; matrices are decayed, scales are not."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0,
        config.learning_rate,
        warmup_steps=max(1, config.steps // 20),
        decay_steps=max(2, config.steps),
        end_value=config.learning_rate / 10,
    )
    matrices = functools.partial(jax.tree.map, lambda parameter: parameter.ndim > 1)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=matrices)
    return nnx.Optimizer(model, optax.chain(optax.clip_by_global_norm(1.0), adamw), wrt=nnx.Param)
