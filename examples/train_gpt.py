"""Train a small GPT on Python's own standard library, byte by byte, through flash attention.

    pip install '.[examples]'
    python examples/train_gpt.py

A few minutes on a laptop. The run is here, and what it trains in the folder training, to be read in
this order: text.py, model.py, network.py, loss.py, step.py, devices.py. It ends with the validation
loss beside that of a bigram model (which knows how often each byte follows each other byte), a
sample of what the model writes, the loss curve as a picture, train_gpt.png in the current folder,
and the trained model, train_gpt.msgpack, with which generate.py writes on.

    python examples/train_gpt.py --attention xla              # the same with jax.nn's attention
    python examples/train_gpt.py --attention fp8 --width 256 --dtype bfloat16
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
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure
from tqdm import tqdm
from training import (
    GPT,
    PRESETS,
    START,
    Split,
    batches,
    bigram_loss,
    count_parameters,
    evaluate,
    keys_seen,
    load,
    make_mesh,
    make_optimizer,
    pack,
    read_documents,
    save,
    shard,
    train_step,
    utilisation,
    xla_attention,
)

from jax_flash import flash_attention

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


# --- The run ------------------------------------------------------------------------------------

ATTENTION = {
    "flash": flash_attention,
    "xla": xla_attention,
    "fp8": functools.partial(flash_attention, quantize="fp8"),  # bfloat16, heads of 64 and more
}


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
    parser.add_argument("--attention", choices=[*ATTENTION], default="flash")
    parser.add_argument("--mesh", default="data=1", help="for instance data=2,model=2,seq=2")
    parser.add_argument("--fsdp", action="store_true", help="split parameters over data and seq")
    parser.add_argument("--text", type=Path, default=sysconfig.get_path("stdlib"))
    parser.add_argument("--plot", type=Path, default="train_gpt.png")
    parser.add_argument("--checkpoint", type=Path, default="train_gpt.msgpack")
    parser.add_argument("--seed", type=int, default=0)
    for name in ("layers", "width", "length", "batch", "steps"):
        parser.add_argument(f"--{name}", type=int, help="instead of the preset's")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="instead of the preset's")
    args = parser.parse_args()
    names = ("layers", "width", "length", "batch", "steps", "dtype")
    chosen = {name: x for name in names if (x := getattr(args, name)) is not None}
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

    attention_fn = ATTENTION[args.attention]
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
