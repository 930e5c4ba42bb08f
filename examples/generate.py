"""Continue several prompts at once with the GPT that train_gpt.py trained.

    python examples/train_gpt.py     # writes train_gpt.msgpack
    python examples/generate.py

The prompts are of different lengths: they go into the cache together, padded to the right, and each
row of it grows from its own length on. Every further byte costs one call of decode_attention in
every layer, which writes the cache in place. At the end the scores that were computed byte by byte
are held against those of one pass over the finished texts, without a cache.

    python examples/generate.py --prompt "def main(" --prompt "import " --count 400
    python examples/generate.py --temperature 0      # the likeliest byte each time
    python examples/generate.py --page-size 16       # the same text from a cache of pages

With pages a row takes no more of the cache than it fills, and not in one piece: a table says which
page has which of its bytes.
"""

import argparse
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm
from training import GPT, START, load

PROMPTS = (
    "def ",
    "import os\nimport sys\n\n\nclass ",
    "    for i in range(",
    "    def __init__(self, name, value):\n        self.",
)


class Generated(NamedTuple):
    """What `generate` returns: B rows of `count` new bytes."""

    tokens: np.ndarray  # int [B, count]
    scores: np.ndarray  # float32 [B, count, 256], from which they were chosen
    seconds: np.ndarray  # [count], the first of them with compiling and the prompts


def pad(texts: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Texts after a START each, padded to the right: int [B, T] and their lengths [B]."""
    rows = [[START, *text] for text in texts]
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = np.zeros((len(rows), lengths.max()), np.int32)
    for row, out in zip(rows, tokens, strict=True):
        out[: len(row)] = row
    return tokens, lengths


def choose(scores: jax.Array, temperature: float, key: jax.Array) -> jax.Array:
    """The next byte of each row from scores [B, 256]: the likeliest, or drawn: int [B]."""
    if temperature == 0.0:
        return jnp.argmax(scores, axis=-1)
    return jax.random.categorical(key, scores / temperature)


def assign_pages(lengths: np.ndarray, page_size: int) -> np.ndarray:
    """Gives each row [B] the pages that it needs, in any order: a table [B, M], -1 for none."""
    needed = -(-lengths // page_size)
    table = np.full((len(lengths), needed.max()), -1, np.int32)
    order = np.random.default_rng(0).permutation(needed.sum())
    table[np.arange(needed.max()) < needed[:, None]] = order
    return table


def generate(
    model: GPT,
    texts: list[bytes],
    count: int,
    temperature: float,
    seed: int = 0,
    page_size: int | None = None,
) -> Generated:
    """Continues every text by `count` bytes, all rows at once, with a cache of rows or of pages."""
    tokens, lengths = pad(texts)
    table = None
    if page_size is None:
        model.init_cache(len(texts), tokens.shape[1] + count)
    else:
        table = jnp.asarray(assign_pages(lengths + count, page_size))
        model.init_cache(len(texts), pages=(int(table.max()) + 1, page_size))
    graph, cache, parameters = nnx.split(model, nnx.Cache, ...)

    def run(cache, parameters, tokens, lengths, table, key):
        """One pass over new bytes; the scores after the last of each row, and what they give."""
        model = nnx.merge(graph, cache, parameters)
        logits = model(tokens, decode=True, lengths=lengths, page_table=table)
        logits = logits[..., :256].astype(jnp.float32)
        last = jnp.full(len(texts), tokens.shape[1]) if lengths is None else lengths
        scores = jnp.take_along_axis(logits, last[:, None, None] - 1, axis=1)[:, 0]
        return nnx.state(model, nnx.Cache), scores, choose(scores, temperature, key)

    step = jax.jit(run, donate_argnums=0)  # the cache is written in place
    keys = jax.random.split(jax.random.key(seed), count)
    chosen, scores, seconds = [], [], []
    new, valid = jnp.asarray(tokens), jnp.asarray(lengths)
    with tqdm(total=count * len(texts), unit="byte", dynamic_ncols=True) as progress:
        for key in keys:
            begin = time.perf_counter()
            cache, row_scores, token = step(cache, parameters, new, valid, table, key)
            chosen.append(np.asarray(token))
            scores.append(np.asarray(row_scores))
            seconds.append(time.perf_counter() - begin)
            new, valid = token[:, None], None
            progress.update(len(texts))
    nnx.update(model, cache)  # what it had was donated
    return Generated(np.stack(chosen, 1), np.stack(scores, 1), np.array(seconds))


def difference(model: GPT, texts: list[bytes], generated: Generated) -> float:
    """How far the scores are at most from those of one pass over the whole texts, without cache."""
    count = generated.tokens.shape[1]
    whole = [text + bytes(row.tolist()) for text, row in zip(texts, generated.tokens, strict=True)]
    tokens, lengths = pad(whole)
    logits = nnx.jit(lambda model, *x: model(x[0], lengths=x[1]))(model, tokens, lengths)
    first = lengths - count - 1  # the byte whose successor was chosen first
    at = (first[:, None] + np.arange(count))[..., None]
    full = np.take_along_axis(np.asarray(logits[..., :256], np.float32), at, axis=1)
    return float(np.abs(full - generated.scores).max())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, default="train_gpt.msgpack")
    parser.add_argument("--prompt", action="append", help="may be given several times")
    parser.add_argument("--count", type=int, default=200, help="bytes to add to each prompt")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest byte")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--page-size", type=int, help="bytes in each page of the cache")
    args = parser.parse_args()
    if not args.checkpoint.exists():
        raise SystemExit(f"{args.checkpoint} is missing: python examples/train_gpt.py writes it")
    if args.count < 1 or args.temperature < 0.0:
        raise SystemExit("--count takes 1 or more, --temperature 0 or more")
    if args.page_size is not None and args.page_size < 1:
        raise SystemExit("--page-size takes 1 or more")
    texts = [prompt.encode() for prompt in args.prompt or PROMPTS]
    model = load(args.checkpoint)
    generated = generate(model, texts, args.count, args.temperature, args.seed, args.page_size)
    for text, row in zip(texts, generated.tokens, strict=True):
        new = bytes(row.tolist()).split(bytes([START]))[0]  # a START would open another document
        print(f"\n--- {text.decode()!r}\n{(text + new).decode(errors='replace')}")
    steps = generated.seconds[2:]  # the first two compile
    if len(steps):
        speed = len(texts) / float(np.median(steps))
        print(f"\nspeed     {speed:,.0f} tokens/s, {len(texts)} rows at once")
    pages = model.blocks[0].attention.pages
    if pages is not None:
        print(f"pages     {pages[0]} of {pages[1]} bytes, in each of {len(model.blocks)} blocks")
    print(f"scores    {difference(model, texts, generated):.1e} from those without a cache")


if __name__ == "__main__":
    main()
