"""The model that is served: a step over the tokens of a mixed batch, keys and values in pages.

Blocks of attention and of a small network, an RMSNorm before each, rotary positions, heads that
share keys. `load_gpt` reads what train_gpt.py trained, `load_llama` a folder in the format of
Llama's public checkpoints: config.json beside *.safetensors.
"""

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import serialization

from jax_flash import key_weights, ragged_paged_attention, rotate

# Caches of eight bits: float8_e4m3fn then has keys and values up to 112, int8 up to 15.9.
CACHE_SCALES = {"float8_e4m3fn": 0.25, "int8": 0.125}
FADES = 0.98  # what is left of a weight one token later: after 50 of them 36 %

KvPages = list[tuple[jax.Array, jax.Array]]  # of each block: keys and values [P, S, K, H]


class Block(NamedTuple):
    """The parameters of one block."""

    norm1: jax.Array  # [width]
    query: jax.Array  # [width, N, H]
    key: jax.Array  # [width, K, H]
    value: jax.Array  # [width, K, H]
    out: jax.Array  # [N, H, width]
    norm2: jax.Array  # [width]
    gate: jax.Array | None  # [width, wide]; None: a GELU without gate
    up: jax.Array  # [width, wide]
    down: jax.Array  # [wide, width]


class Weights(NamedTuple):
    """The parameters of a model."""

    embedding: jax.Array  # [vocabulary, width]
    blocks: list[Block]
    norm: jax.Array  # [width]
    output: jax.Array  # [vocabulary, width]


class Batch(NamedTuple):
    """The tokens of a step, one request's behind the other's; the rest as jax_flash has it."""

    tokens: Any  # int [tokens]
    positions: Any  # int [tokens], of the rotary embedding
    lengths: Any  # int [B], positions that a request then has in its pages
    page_table: Any  # int [B, M]
    query_starts: Any  # int [B + 1]
    rows: Any  # int []
    shared_pages: Any = None  # int [M]


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A model: what is known when it is compiled, and its parameters."""

    weights: Weights
    length: int  # positions that a request may have
    rotary_base: float
    epsilon: float  # of the norms
    ends: tuple[int, ...]  # tokens that end a text

    @property
    def vocabulary(self) -> int:
        return self.weights.output.shape[0]

    def make_pages(self, count: int, size: int, dtype: str | None) -> KvPages:
        """Makes room for keys and values, in the dtype of the parameters or in eight bits."""
        block = self.weights.blocks[0]
        shape = (count, size, *block.key.shape[1:])
        kind = dtype or block.key.dtype
        return [(jnp.zeros(shape, kind), jnp.zeros(shape, kind)) for _ in self.weights.blocks]

    def forward(
        self, weights: Weights, pages: KvPages, batch: Batch, weigh: bool
    ) -> tuple[jax.Array, KvPages, jax.Array | None]:
        """Computes a step, under jit: its weights are an argument, and its pages are donated.

        Returns: float32 scores [B, vocabulary] of what follows each request's last token; the pages
        with the new keys and values; and, to `weigh`, what each page weighs, float32 [B, M].
        """
        x = weights.embedding[batch.tokens]
        written, weighed = [], None
        for block, (keys, values) in zip(weights.blocks, pages, strict=True):
            normed = self._norm(x, block.norm1)
            query, key, value = (
                jnp.einsum("td,dnh->tnh", normed, y) for y in (block.query, block.key, block.value)
            )
            query, key = (
                rotate(y[None], self.rotary_base, batch.positions[None])[0] for y in (query, key)
            )
            scale = CACHE_SCALES.get(keys.dtype.name)
            step = ragged_paged_attention(
                query,
                keys,
                values,
                *batch[2:6],
                shared_pages=batch.shared_pages,
                new_key=key,
                new_value=value,
                key_scale=scale,
                value_scale=scale,
            )
            written.append((step.key_pages, step.value_pages))
            if weigh:
                added = weigh_pages(query, step.lse, step.key_pages, scale, batch)
                weighed = added if weighed is None else weighed + added
            x = x + jnp.einsum("tnh,nhd->td", step.out, block.out)
            normed = self._norm(x, block.norm2)
            if block.gate is None:
                wide = jax.nn.gelu(normed @ block.up)
            else:
                wide = jax.nn.silu(normed @ block.gate) * (normed @ block.up)
            x = x + wide @ block.down
        last = jnp.maximum(batch.query_starts[1:] - 1, 0)
        x = self._norm(x[last], weights.norm)
        scores = jnp.einsum("bd,vd->bv", x, weights.output, preferred_element_type=jnp.float32)
        return scores, written, weighed

    def _norm(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + self.epsilon)
        return (wide * scale).astype(x.dtype)


@functools.partial(jax.jit, static_argnames=("forward", "weigh"), donate_argnames="pages")
def run_step(
    forward: Any, weights: Weights, pages: KvPages, batch: Batch, draws: Any, weigh: bool
) -> tuple[jax.Array, jax.Array, KvPages, jax.Array | None]:
    """Computes a step, and draws each request's next token: ids and log-probabilities [B].

    `draws`: temperature, seed, number of the token, and the one that is given or −1, [B] each.
    """
    scores, pages, weighed = forward(weights, pages, batch, weigh)
    temperature, seed, number, given = draws

    def draw(scores, temperature, seed, number):
        key = jax.random.fold_in(jax.random.key(seed), number)
        return jax.random.categorical(key, scores / jnp.maximum(temperature, 1e-6))

    drawn = jax.vmap(draw)(scores, temperature, seed, number)
    token = jnp.where(temperature == 0, jnp.argmax(scores, -1), drawn)
    token = jnp.where(given < 0, token, given)
    logs = jnp.take_along_axis(jax.nn.log_softmax(scores), token[:, None], 1)[:, 0]
    return token, logs, pages, weighed


def weigh_pages(
    query: jax.Array, lse: jax.Array, key_pages: jax.Array, scale: float | None, batch: Batch
) -> jax.Array:
    """Computes the weight that each page of each request gets from its tokens: float32 [B, M].

    That from a token fades by FADES for each token of its request behind it, as if every token had
    had a step of its own: a weight is exp(score - lse), so lse grows.
    """
    (requests, columns), page_size = batch.page_table.shape, key_pages.shape[1]
    keys = key_pages[batch.page_table].reshape(requests, -1, *key_pages.shape[2:])
    keys = keys.astype(query.dtype) if scale is None else scale * keys.astype(query.dtype)
    first, stop = batch.query_starts[:-1], batch.query_starts[1:]
    token = jnp.arange(query.shape[0])
    request = jnp.searchsorted(stop, token, side="right")  # B: of none
    behind = stop[request.clip(max=requests - 1)] - 1 - token
    lse = lse - math.log(FADES) * jnp.maximum(behind, 0)[:, None]
    if query.shape[0] == requests:  # the program of one token each: a batch of requests
        weights = key_weights(
            query[first][:, None],
            keys,
            lse=lse[first][:, None],
            query_seq_lengths=stop - first,
            key_value_seq_lengths=batch.lengths,
        )
    else:  # one row, of which each request is a document
        slot = jnp.arange(columns * page_size)
        index = (batch.lengths - stop)[request.clip(max=requests - 1)] + token
        own = jnp.arange(requests)[:, None]
        owner = jnp.where(slot < batch.lengths[:, None], own, -1)  # -1: of none
        weights = key_weights(
            query[None],
            keys.reshape(1, -1, *keys.shape[2:]),
            lse=lse[None],
            is_causal=True,
            query_segment_ids=request[None],
            key_value_segment_ids=owner.reshape(1, -1),
            query_positions=index[None],
            key_value_positions=jnp.tile(slot, requests)[None],
        )
    return weights.reshape(requests, columns, -1).sum(-1)


def load_gpt(path: Path, dtype: str) -> Model:
    """Reads a model that train_gpt.py saved: it knows bytes, and byte 0 opens every document."""
    tree: Any = serialization.msgpack_restore(path.read_bytes())
    config, parameters = tree["config"], tree["parameters"]
    as_array = functools.partial(jnp.asarray, dtype=dtype)

    def block(x: Any) -> Block:
        attention = {name: as_array(y["kernel"]) for name, y in x["attention"].items()}
        return Block(
            norm1=as_array(x["norm1"]["scale"]),
            **attention,
            norm2=as_array(x["norm2"]["scale"]),
            gate=None,
            up=as_array(x["up"]["kernel"]),
            down=as_array(x["down"]["kernel"]),
        )

    blocks = [block(parameters["blocks"][str(i)]) for i in range(config["layers"])]
    embedding = as_array(parameters["embedding"]["embedding"][:256])
    weights = Weights(embedding, blocks, as_array(parameters["norm"]["scale"]), embedding)
    return Model(weights, config["length"], 10_000.0, 1e-6, (0,))


def load_llama(folder: Path, dtype: str) -> Model:
    """Reads config.json and *.safetensors of a folder, which name arrays as transformers does.

    Raises: ValueError where the model is another than Llama's, or arrays are missing or too many.
    """
    from safetensors.flax import load_file  # a GPT needs no such package

    config = json.loads((folder / "config.json").read_text())
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for name, got, expected in (
        ("hidden_act", config.get("hidden_act", "silu"), "silu"),
        ("attention_bias", config.get("attention_bias", False), False),
        ("mlp_bias", config.get("mlp_bias", False), False),
        ("sliding_window", config.get("sliding_window"), None),
        ("rope_type", rope.get("rope_type", rope.get("type", "default")), "default"),
    ):
        if got != expected:
            raise ValueError(f"{folder}/config.json has {name} {got!r}; expected {expected!r}")
    arrays: dict[str, jax.Array] = {}
    for file in sorted(folder.glob("*.safetensors")):
        arrays |= load_file(file)
    width, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or width // heads
    wide, vocabulary = config["intermediate_size"], config["vocab_size"]

    def take(name: str, *shape: int) -> jax.Array:
        x = arrays.pop(f"{name}.weight", None)
        if x is None or x.shape != shape:
            got = "no" if x is None else f"{x.shape} for"
            raise ValueError(f"{folder} has {got} {name}.weight; expected one of shape {shape}")
        return x.astype(dtype)

    def block(i: int) -> Block:
        at = f"model.layers.{i}"

        def project(name: str, count: int) -> jax.Array:
            x = take(f"{at}.self_attn.{name}_proj", count * head_dim, width)
            return x.T.reshape(width, count, head_dim)

        return Block(
            norm1=take(f"{at}.input_layernorm", width),
            query=project("q", heads),
            key=project("k", kv_heads),
            value=project("v", kv_heads),
            out=take(f"{at}.self_attn.o_proj", width, heads * head_dim).T.reshape(
                heads, head_dim, width
            ),
            norm2=take(f"{at}.post_attention_layernorm", width),
            gate=take(f"{at}.mlp.gate_proj", wide, width).T,
            up=take(f"{at}.mlp.up_proj", wide, width).T,
            down=take(f"{at}.mlp.down_proj", width, wide).T,
        )

    embedding = take("model.embed_tokens", vocabulary, width)
    blocks = [block(i) for i in range(config["num_hidden_layers"])]
    norm = take("model.norm", width)
    tied = config.get("tie_word_embeddings", False)
    output = embedding if tied else take("lm_head", vocabulary, width)
    if rest := [x for x in arrays if not x.endswith("rotary_emb.inv_freq")]:
        raise ValueError(
            f"{folder} has {rest[0]}, and {len(rest)} arrays in all that Llama has not"
        )
    ends = config.get("eos_token_id")
    return Model(
        Weights(embedding, blocks, norm, output),
        config["max_position_embeddings"],
        float(rope.get("rope_theta") or config.get("rope_theta", 10_000.0)),
        config["rms_norm_eps"],
        () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends),
    )
