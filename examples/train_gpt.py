"""Train a small GPT on Python's own standard library, byte by byte, through flash attention.

    pip install '.[examples]'
    python examples/train_gpt.py

A few minutes on a laptop. Read from top to bottom: the text, the model, one training step, several
devices, writing, the checkpoint, and the run. It ends with the validation loss beside that of a
bigram model (which knows how often each byte follows each other byte), a sample of what the model
writes, the loss curve as a picture, train_gpt.png in the current folder, and the trained model,
train_gpt.msgpack, with which generate.py writes on.

    python examples/train_gpt.py --attention xla              # the same with jax.nn's attention
    python examples/train_gpt.py --mesh data=4,model=2        # on eight devices
    python examples/train_gpt.py --mesh data=2,model=2,seq=2  # each row over two of them too
    python examples/train_gpt.py --preset gpt2                # GPT-2 124M in bfloat16, for a GPU
    python examples/train_gpt.py --preset long --steps 100    # the same model, 16384 bytes at once
    python examples/train_gpt.py --preset 1b3 --mesh seq=8 --fsdp  # 1.3B parameters, on eight GPUs
"""

import argparse
import dataclasses
import functools
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx, serialization
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure
from tqdm import tqdm

from jax_flash import context_parallel, flash_attention
from jax_flash.layers.nnx import FlashAttention

START = 0  # the byte that opens every document; Python source has none


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
    remat: bool = False  # recompute in the backward: blocks without their attention, and scores


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
    "long": dataclasses.replace(GPT2, length=16384, batch=2, remat=True),
    "1b3": dataclasses.replace(
        GPT2,
        layers=24,
        heads=16,
        kv_heads=16,
        width=2048,
        length=32768,
        batch=1,
        learning_rate=2e-4,
        remat=True,
    ),
}

# --- The text -----------------------------------------------------------------------------------


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


# --- The model ----------------------------------------------------------------------------------


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

    def __init__(self, config: Config, attention_fn, rngs: nnx.Rngs, flat: bool):
        self.flat = flat  # multiply matrices [B * T, width]
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
        x = x + self.attention(
            self.norm1(x),
            segment_ids=segment_ids,
            positions=positions,
            seq_lengths=lengths,
            decode=decode,
            page_table=page_table,
        )
        wide = self.norm2(x)
        if self.flat:
            wide = wide.reshape(-1, x.shape[-1])
        return x + self.down(nnx.gelu(self.up(wide))).reshape(x.shape)


# The two results of the forward kernel: where both are kept, it runs once and not twice.
KEEP = jax.checkpoint_policies.save_only_these_names("flash_out", "flash_lse")


class GPT(nnx.Module):
    """Blocks between one embedding table, which serves at both ends."""

    def __init__(
        self, config: Config, attention_fn, rngs: nnx.Rngs, keep=KEEP, split: "Split | None" = None
    ):
        self.config = config
        self.split = split  # how rows are split over devices, if they are
        self.keep = keep  # what a block that is recomputed keeps: a policy of jax.checkpoint
        self.embedding = nnx.Embed(
            config.vocabulary,
            config.width,
            dtype=config.dtype,
            embedding_init=nnx.initializers.normal(0.02),
            rngs=rngs,
        )
        # jax 0.12 on a CPU takes 154 ms for a block's network and its gradient in 3D, 74 ms in 2D.
        # Where bytes of several rows are split, XLA gathers whole rows for what is 2D.
        blocks = (Block(config, attention_fn, rngs, split is None) for _ in range(config.layers))
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
        if self.config.remat:
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


# --- One training step --------------------------------------------------------------------------


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
    return cross_entropy(model, features, targets)


def cross_entropy(model: GPT, features: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross entropy of the scores of `features` [B, T, width]; targets: int [B, T]."""

    def at(features, targets):
        logits = model.embedding.attend(features).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets)

    if not model.config.remat:
        return at(features, targets).mean()
    # GPT-2's scores take 0.2 MB a position: those of 8192 at a time, once more in the backward.
    rows, shards = features.shape[0], 1 if model.split is None else model.split.mesh.shape["seq"]
    positions = tuple(  # [T / shards, B, shards, ...]: all devices have some of those at a time
        jnp.moveaxis(x.reshape(rows, shards, -1, *x.shape[2:]), 2, 0) for x in (features, targets)
    )
    together = max(1, 8192 // (rows * shards))
    return jax.lax.map(lambda x: jax.checkpoint(at)(*x), positions, batch_size=together).mean()


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


# --- Several devices ----------------------------------------------------------------------------


def make_mesh(text: str) -> jax.sharding.Mesh:
    """The mesh for "data=2,model=2,seq=2".

    Rows are spread over `data`, heads and widths over `model`, the bytes of each row over `seq`.
    """
    sizes = {"data": 1, "model": 1, "seq": 1}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in sizes or not size.isdecimal():
            raise SystemExit(f"--mesh takes data=N,model=M,seq=L, got {text!r}")
        sizes[name] = int(size)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * 3)


@dataclasses.dataclass(frozen=True)
class Split:
    """Rows whose bytes are split over `seq`, in an order that gives each device as much to do."""

    mesh: jax.sharding.Mesh

    def place(self, x: jax.Array) -> jax.Array:
        """Brings the bytes of rows [B, T], or what belongs to them, to their devices."""
        return self.keep(context_parallel.reorder(x, "zigzag", self.mesh.shape["seq"], axis=1))

    def keep(self, x: jax.Array) -> jax.Array:
        """Keeps [B, T, ...] where `place` brings it: else XLA may move it, and not parameters."""
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P("data", "seq")))

    def attend(self, query, key, value, *, query_segment_ids, **options):
        """Attends across devices; positions, of the rotary embedding, are those of the order."""
        spec, ids = P("data", "seq", "model"), P("data", "seq")

        @jax.shard_map(mesh=self.mesh, in_specs=(spec, spec, spec, ids), out_specs=spec)
        def on_each_device(query, key, value, segment_ids):
            return context_parallel.attention(
                query,
                key,
                value,
                axis_name="seq",
                order="zigzag",
                is_causal=options["is_causal"],
                query_segment_ids=segment_ids,
                key_value_segment_ids=segment_ids,
            )

        return on_each_device(query, key, value, query_segment_ids)


def shard(node: GPT | nnx.Optimizer, mesh: jax.sharding.Mesh, fsdp: bool = False) -> None:
    """Spreads a model, or its optimizer, over the mesh; XLA lets the computation follow."""

    def place(path, array):
        return jax.device_put(array, NamedSharding(mesh, spec_of(path, array.shape, mesh, fsdp)))

    arrays = nnx.to_pure_dict(nnx.state(node))
    nnx.update(node, jax.tree_util.tree_map_with_path(place, arrays))


def spec_of(path: Any, shape: tuple[int, ...], mesh: jax.sharding.Mesh, fsdp: bool) -> P:
    """Where the array of a parameter, or of its optimizer, is split.

    With `fsdp` matrices are split over `data` and `seq` too. XLA gathers them before each use, and
    leaves each device its part of the gradients' sum.
    """
    split_axis = {"query": 1, "key": 1, "value": 1, "out": 0, "up": 1, "down": 0}
    heads = next((split_axis[part.key] for part in path if part.key in split_axis), None)
    spec: list[Any] = [None] * len(shape)
    # What does not divide, two key heads over four devices say, is whole on each of them.
    if heads is not None and mesh.shape["model"] > 1 and shape[heads] % mesh.shape["model"] == 0:
        spec[heads] = "model"
    devices = mesh.shape["data"] * mesh.shape["seq"]
    free = (i for i, size in enumerate(shape) if spec[i] is None and size % devices == 0)
    if fsdp and len(shape) > 1 and (axis := next(free, None)) is not None:
        spec[axis] = ("data", "seq")
    return P(*spec)


# --- Writing ------------------------------------------------------------------------------------


@nnx.jit
def next_byte(model: GPT, tokens: jax.Array, key: jax.Array) -> jax.Array:
    """Draws the byte after `tokens` [B, T], which the cache then holds: [B, 1]."""
    logits = model(tokens, decode=True)[:, -1:, :256].astype(jnp.float32)
    return jax.random.categorical(key, logits / 0.8)  # below 1: likely bytes more often


def generate(model: GPT, prompt: str, count: int) -> str:
    """The prompt and up to `count` bytes that the model adds to it."""
    text = bytes([START]) + prompt.encode()
    model.init_cache(1, len(text) + count)
    tokens = jnp.asarray([list(text)])  # the prompt at once, then byte by byte
    for key in jax.random.split(jax.random.key(0), count):
        tokens = next_byte(model, tokens, key)
        if tokens[0, 0] == START:
            break
        text += bytes([int(tokens[0, 0])])
    return text[1:].decode(errors="replace")


# --- The checkpoint -----------------------------------------------------------------------------


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


# --- The run ------------------------------------------------------------------------------------


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


def plot(
    path: Path, title: str, losses: list[float], validation: dict[int, float], bigram: float
) -> None:
    """Loss as a PNG, over the number of steps that the model had been trained for."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(losses, color="tab:blue", alpha=0.4, label="training, batch by batch")
    axes.plot(
        list(validation), list(validation.values()), "o-", color="tab:blue", label="validation"
    )
    axes.axhline(bigram, color="tab:gray", linestyle="--", label="bigram model")
    axes.set(xlabel="training steps", ylabel="loss (nats per byte)", title=title)
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=PRESETS, default="small")
    parser.add_argument("--attention", choices=["flash", "xla"], default="flash")
    parser.add_argument("--mesh", default="data=1", help="for instance data=2,model=2,seq=2")
    parser.add_argument("--fsdp", action="store_true", help="split parameters over data and seq")
    parser.add_argument("--text", type=Path, default=sysconfig.get_path("stdlib"))
    parser.add_argument("--plot", type=Path, default="train_gpt.png")
    parser.add_argument("--checkpoint", type=Path, default="train_gpt.msgpack")
    parser.add_argument("--seed", type=int, default=0)
    for name in ("layers", "width", "length", "batch", "steps"):
        parser.add_argument(f"--{name}", type=int, help="instead of the preset's")
    args = parser.parse_args()
    chosen = {name: getattr(args, name) for name in ("layers", "width", "length", "batch", "steps")}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    config = dataclasses.replace(PRESETS[args.preset], **chosen)
    mesh = make_mesh(args.mesh)

    documents = read_documents(args.text)
    held_out = len(documents) // 10
    train = pack(documents[held_out:], config.length)
    validation = pack(documents[:held_out], config.length)
    if len(train) < config.batch or len(validation) == 0:
        raise SystemExit(f"{args.text} has too little Python for one batch of {config.batch}")
    validation = validation[np.linspace(0, len(validation) - 1, 8 * config.batch).astype(int)]
    bigram = bigram_loss(train, validation)

    attention_fn = {"flash": flash_attention, "xla": xla_attention}[args.attention]
    split = Split(mesh) if mesh.shape["seq"] > 1 or args.fsdp else None
    if split is not None:
        if args.attention != "flash":
            raise SystemExit("--mesh with seq=L, and --fsdp, are for --attention flash")
        attention_fn = split.attend
    model = GPT(config, attention_fn, nnx.Rngs(args.seed), split=split)
    shard(model, mesh, args.fsdp)
    optimizer = make_optimizer(model, config)
    shard(optimizer, mesh, args.fsdp)
    devices = list(mesh.devices.flat)
    print(f"text      {train.size / 1e6:.1f} MB from {args.text}")
    print(f"model     {count_parameters(model) / 1e6:.2f} M parameters, {args.attention} attention")
    print(f"devices   {len(devices)} x {devices[0].device_kind}, {dict(mesh.shape)}", flush=True)

    put = functools.partial(jax.device_put, device=NamedSharding(mesh, P("data")))
    validation_batches = [put(rows) for rows in np.split(validation, 8)]
    losses: list[jax.Array] = []
    validation_losses: dict[int, float] = {}
    step_times: list[float] = []
    feed = batches(train, config.batch, args.seed)

    def validate(steps: int) -> None:
        scores = [float(evaluate(model, rows)) for rows in validation_batches]
        validation_losses[steps] = sum(scores) / len(scores)

    validate(0)
    measured = {config.steps * i // 8 for i in range(1, 9)}
    finished, begin = 0, 0.0
    # Else Flax walks through model and optimizer in every step: 27 ms of Python for 12 layers.
    update = nnx.cached_partial(train_step, model, optimizer)
    with tqdm(total=config.steps, unit="step", dynamic_ncols=True) as progress:
        for step in range(1, config.steps + 1):
            losses.append(update(put(next(feed))))
            # Waiting for the step before, not for this one, keeps a GPU busy.
            awaited = step if step == 1 or step in measured else step - 1
            for loss in losses[finished:awaited]:
                text = f"loss {float(loss):.3f}"
                end = time.perf_counter()
                if finished > 0:  # the first step compiles
                    step_times.append(end - begin)
                    text += f", {config.batch * config.length / step_times[-1]:,.0f} tokens/s"
                progress.set_postfix_str(text, refresh=False)
                finished, begin = finished + 1, end
            if step in measured:
                validate(step)
                begin = time.perf_counter()
            progress.update()

    if step_times:
        step_time = float(np.median(step_times))
        speed = config.batch * config.length / step_time
        share = utilisation(model, speed, keys_seen(train), devices)
        print(f"step      {step_time * 1e3:.1f} ms, {speed:,.0f} tokens/s", end="")
        print("" if share is None else f", {share:.1%} of the peak", "(compiling not counted)")
    print(f"loss      {validation_losses[config.steps]:.3f} nats per byte on unseen files")
    print(f"bigram    {bigram:.3f}")
    title = f"GPT, {count_parameters(model) / 1e6:.2f} M parameters, {args.attention} attention"
    plot(args.plot, title, [float(loss) for loss in losses], validation_losses, bigram)
    print(f"plot      {args.plot}")
    save(args.checkpoint, model)
    print(f"model     {args.checkpoint}")
    if split is not None:
        model = load(args.checkpoint)  # one device writes
    print(f"sample\n\n{generate(model, 'def ', min(400, config.length))}")


if __name__ == "__main__":
    main()
