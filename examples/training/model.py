"""Owns the GPT: its sizes, its layers and its file. Read next: network.py, then step.py."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, serialization

from jax_flash import flash_attention
from jax_flash.layers.nnx import FlashAttention
from training.devices import Split
from training.network import network


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the model and of its training."""

    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    width: int = 128
    vocabulary: int = 256
    length: int = 512  # bytes in one training sequence
    batch: int = 8  # sequences in one step
    steps: int = 450
    learning_rate: float = 3e-3
    dtype: str = "float32"  # of the computation; parameters are always float32
    remat: str = "none"  # what blocks recompute in the backward: none, or all but a name of KEPT


GPT2 = Config(
    layers=12,
    heads=12,
    kv_heads=12,
    width=768,
    vocabulary=50304,  # GPT-2's, so that size and speed are GPT-2's; bytes use the first 256
    length=1024,
    batch=32,
    steps=1000,
    learning_rate=6e-4,
    dtype="bfloat16",
)
PRESETS = {
    "small": Config(),
    "gpt2": GPT2,
    "gpt2-medium": dataclasses.replace(GPT2, layers=24, heads=16, kv_heads=16, width=1024),
    "long": dataclasses.replace(GPT2, length=16384, batch=2, remat="products"),
    "1b3": dataclasses.replace(
        GPT2,
        layers=24,
        heads=16,
        kv_heads=16,
        width=2048,
        length=32768,
        batch=1,
        learning_rate=2e-4,
        remat="products",
    ),
    "2b7": dataclasses.replace(
        GPT2,
        layers=32,
        heads=20,
        kv_heads=20,
        width=2560,
        length=8192,
        batch=1,
        learning_rate=1.6e-4,
        remat="products",
    ),
}


def xla_attention(query, key, value, *, is_causal, causal_align="top_left", **options):
    """The same call answered by jax.nn, which needs a [T, S] mask for documents and for a cache."""
    queries, keys = jnp.arange(query.shape[1])[:, None], jnp.arange(key.shape[1])
    if causal_align == "bottom_right":  # decoding: the queries are the newest of the keys
        count = options.get("query_seq_lengths", jnp.full(query.shape[0], query.shape[1]))
        queries = queries + (options["key_value_seq_lengths"] - count)[:, None, None, None]
    mask = keys <= queries if is_causal else jnp.ones((1, 1), bool)
    segments = options.get("query_segment_ids")
    if segments is not None:
        mask = mask & (segments[:, None, :, None] == segments[:, None, None, :])
    return jax.nn.dot_product_attention(query, key, value, mask=mask, implementation="xla")


class Block(nnx.Module):
    """Attention, then a network of two layers; each adds its output to what it was given."""

    def __init__(self, config: Config, attention_fn, rngs: nnx.Rngs, flat: bool, keep):
        self.flat = flat  # multiply matrices [B * T, width]
        self.keep = keep  # what attention keeps, beside a network with a gradient by hand
        settings: dict[str, Any] = {"dtype": config.dtype, "rngs": rngs}
        self.norm1 = nnx.RMSNorm(config.width, **settings)
        self.attention = FlashAttention(
            config.heads,
            config.width,
            num_kv_heads=config.kv_heads,
            is_causal=True,
            rotary_base=10_000.0,
            use_bias=False,
            attention_fn=attention_fn,
            **settings,
        )
        self.norm2 = nnx.RMSNorm(config.width, **settings)
        self.up = nnx.Linear(config.width, 4 * config.width, use_bias=False, **settings)
        self.down = nnx.Linear(4 * config.width, config.width, use_bias=False, **settings)

    def __call__(
        self,
        x: jax.Array,
        segment_ids: jax.Array | None,
        decode: bool,
        lengths: jax.Array | None = None,
        page_table: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        shape = x.shape
        x = x.reshape(-1, x.shape[-1]) if self.flat else x
        at = (segment_ids, decode, lengths, page_table, positions)
        if self.keep is None or decode:
            x = _attend(self.norm1, self.attention, x, shape, *at)
            return (x + self.down(nnx.gelu(self.up(self.norm2(x))))).reshape(shape)
        attend = nnx.remat(_attend, policy=self.keep, static_argnums=(3, 5))
        x = attend(self.norm1, _rounded(self.attention, x.dtype), x, shape, *at)
        up, down = (layer.kernel[...].astype(x.dtype) for layer in (self.up, self.down))
        assert self.norm2.scale is not None
        return network(x, self.norm2.scale[...], up, down).reshape(shape)


def _rounded(module: nnx.Module, dtype: Any) -> Any:
    """A copy whose matrices are rounded, once for what computes with them again and again."""
    graph, state = nnx.split(module)
    return nnx.merge(graph, jax.tree.map(lambda w: w.astype(dtype) if w.ndim > 1 else w, state))


def _attend(
    norm, attention, x, shape, segment_ids, decode, lengths, page_table, positions
) -> jax.Array:
    """Adds what attention makes of rows of `shape`, [B, T, width], to them."""
    added = attention(
        norm(x).reshape(shape),
        segment_ids=segment_ids,
        positions=positions,
        seq_lengths=lengths,
        decode=decode,
        page_table=page_table,
    )
    return x + added.reshape(x.shape)


def keeping(*names: str) -> Any:
    return jax.checkpoint_policies.save_only_these_names(*names)


KERNEL = ("flash_out", "flash_lse")  # where both are kept, the forward kernel runs once
# What is kept of a forward that is computed again, by names. "products": the results of matrix
# products, those of a block's network by network.py, 40 KB a token at width 2048; so norms, rotary
# embedding and gelu alone are computed again. "attention": 8 KB, and three quarters of the products
# are computed again.
KEPT = {
    "products": keeping(*KERNEL, "flash_query", "flash_key", "flash_value"),
    "attention": keeping(*KERNEL),
}


class GPT(nnx.Module):
    """Blocks between one embedding table, which serves at both ends."""

    def __init__(
        self, config: Config, attention_fn, rngs: nnx.Rngs, keep=None, split: Split | None = None
    ):
        self.config = config
        self.split = split  # how rows are split over devices, if they are
        self.keep = keep or KEPT.get(config.remat)  # a policy of jax.checkpoint; None: all
        self.embedding = nnx.Embed(
            config.vocabulary,
            config.width,
            dtype=config.dtype,
            embedding_init=nnx.initializers.normal(0.02),
            rngs=rngs,
        )
        keep = self.keep if config.remat == "products" else None
        # jax 0.12 on a CPU takes 154 ms for a block's network and its gradient in 3D, 74 ms in 2D.
        # Where bytes of several rows are split, XLA gathers whole rows for what is 2D.
        blocks = (
            Block(config, attention_fn, rngs, split is None, keep) for _ in range(config.layers)
        )
        self.blocks = nnx.List(list(blocks))
        self.norm = nnx.RMSNorm(config.width, dtype=config.dtype, rngs=rngs)

    def __call__(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array | None = None,
        decode: bool = False,
        lengths: jax.Array | None = None,
        page_table: jax.Array | None = None,
    ) -> jax.Array:
        """Scores of every byte that may come next: [B, T] -> [B, T, vocabulary].

        `lengths`, int [B]: how many of a row's T bytes are text, the rest padding; `page_table`,
        int [B, M]: where the rows are in a cache of pages, the same in all blocks.
        """
        features = self.features(tokens, segment_ids, decode, lengths, page_table)
        return self.embedding.attend(features)

    def features(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array | None = None,
        decode: bool = False,
        lengths: jax.Array | None = None,
        page_table: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """What the scores are computed from: [B, T] -> [B, T, width]."""
        apply = Block.__call__
        if self.keep is not None and self.config.remat != "products":  # which is within blocks
            apply = nnx.remat(apply, policy=self.keep, static_argnums=3)
        # A product and not a lookup, whose gradient XLA adds up row by row, while a few bytes make
        # most of a text. That took 46 ms of a step of 105 at GPT-2's size on an H200.
        bytes_of_text = jax.nn.one_hot(tokens, 256, dtype=self.config.dtype)
        x = bytes_of_text @ self.embedding.embedding[:256].astype(self.config.dtype)
        for block in self.blocks:
            x = apply(block, x, segment_ids, decode, lengths, page_table, positions)
            x = x if self.split is None else self.split.keep(x)
        return self.norm(x)

    def init_cache(
        self, batch: int, max_length: int | None = None, pages: tuple[int, int] | None = None
    ) -> None:
        """Makes room in every block for keys and values: of `max_length` bytes a row, or of pages.

        `pages`: how many, and bytes in each.
        """
        for block in self.blocks:
            block.attention.init_cache(batch, max_length, pages=pages)


# --- Its file -----------------------------------------------------------------------------------


def save(path: Path, model: GPT) -> None:
    """Writes the model's sizes and parameters to a file, in Flax's own serialisation."""
    parameters = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    tree = {"config": dataclasses.asdict(model.config), "parameters": jax.device_get(parameters)}
    path.write_bytes(serialization.to_bytes(tree))


def load(path: Path, attention_fn=flash_attention) -> GPT:
    """Reads the model that `save` wrote."""
    tree: Any = serialization.msgpack_restore(path.read_bytes())
    model = GPT(Config(**tree["config"]), attention_fn, nnx.Rngs(0))
    template = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    nnx.update(model, serialization.from_state_dict(template, tree["parameters"]))
    return model
