"""A Llama of one layer with random parameters: its folder, and its scores, plainly."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CONFIG: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 1,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "rope_theta": 500.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "eos_token_id": 7,
}
SHAPES = {
    "model.layers.0.self_attn.q_proj": (32, 24),
    "model.layers.0.self_attn.k_proj": (16, 24),
    "model.layers.0.self_attn.v_proj": (16, 24),
    "model.layers.0.self_attn.o_proj": (24, 32),
    "model.layers.0.mlp.gate_proj": (40, 24),
    "model.layers.0.mlp.up_proj": (40, 24),
    "model.layers.0.mlp.down_proj": (24, 40),
    "model.layers.0.input_layernorm": (24,),
    "model.layers.0.post_attention_layernorm": (24,),
    "model.norm": (24,),
    "model.embed_tokens": (256, 24),
    "lm_head": (256, 24),
}


def save(folder: Path) -> dict[str, np.ndarray]:
    """Writes a folder as public checkpoints have it, whose tokens are bytes; returns the arrays."""
    rng = np.random.default_rng(0)
    arrays = {
        f"{name}.weight": rng.standard_normal(shape, np.float32) for name, shape in SHAPES.items()
    }
    names = list(arrays)
    for i, part in enumerate((names[:5], names[5:])):
        save_file({x: arrays[x] for x in part}, folder / f"model-{i}.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({x: i for i, x in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return arrays


def scores(arrays: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """Scores [T, vocabulary] of what follows each token, in the dtype of the arrays."""
    x = arrays["model.embed_tokens.weight"][tokens]

    def get(name):
        return arrays[f"model.layers.0.{name}.weight"]

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale

    def heads(x, name):
        return (x @ get(f"self_attn.{name}_proj").T).reshape(len(tokens), -1, 8)

    def turn(x):
        angle = np.arange(len(tokens))[:, None, None] * 500.0 ** (-np.arange(4) / 4)
        a, b, cos, sin = x[..., :4], x[..., 4:], np.cos(angle), np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    normed = norm(x, get("input_layernorm"))
    query, key = turn(heads(normed, "q")), turn(heads(normed, "k")).repeat(2, 1)
    logits = np.einsum("tnh,snh->nts", query, key) / 8**0.5
    weights = np.exp(np.where(np.tri(len(tokens), dtype=bool), logits, -np.inf))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("nts,snh->tnh", weights, heads(normed, "v").repeat(2, 1))
    x = x + out.reshape(len(tokens), -1) @ get("self_attn.o_proj").T
    normed = norm(x, get("post_attention_layernorm"))
    gate, up = (normed @ get(f"mlp.{name}_proj").T for name in ("gate", "up"))
    x = x + (gate / (1 + np.exp(-gate)) * up) @ get("mlp.down_proj").T
    return norm(x, arrays["model.norm.weight"]) @ arrays["lm_head.weight"].T
