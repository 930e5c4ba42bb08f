"""What a cache with a budget costs: the loss of the GPT that train_gpt.py trained, served so.

    python examples/train_gpt.py       # writes train_gpt.msgpack
    python examples/serve_budget.py

Python files that the model was not trained on are served: half of each text is the prompt, and the
engine is given the other half token by token, as if it had drawn it. Printed is the loss in nats
per byte of these, with the share of the positions that the cache kept, from all to a tenth.
"""

import argparse
import math
import sysconfig
from pathlib import Path

from serving.engine import Engine, Request
from serving.model import CACHE_SCALES, Model, load_gpt
from training import START, read_documents


def read_texts(folder: Path, length: int, count: int) -> list[list[int]]:
    """Beginnings of held-out documents: train_gpt.py holds the first tenth out."""
    documents = read_documents(folder)
    held_out = (x for x in documents[: len(documents) // 10] if len(x) >= length)
    return [[START, *next(held_out)[: length - 1]] for _ in range(count)]


def measure(
    model: Model, texts: list[list[int]], keep: float, page_size: int, dtype: str | None = None
) -> tuple[float, float]:
    """Serves texts from the half of each on: the loss, and the share of positions in the cache."""
    length = len(texts[0])
    pages = len(texts) * -(-length // page_size)
    engine = Engine(
        model,
        pages=pages,
        page_size=page_size,
        requests=len(texts),
        tokens=max(256, len(texts) + 1),
        keep=keep,
        cache_dtype=dtype,
    )
    losses: list[float] = []

    def hear(event: object) -> None:
        if isinstance(event, Exception):
            raise event
        if isinstance(event, tuple):
            losses.append(-event[1])

    for text in texts:
        prompt, rest = text[: length // 2], text[length // 2 :]
        engine.submit(Request(prompt, len(rest), hear, given=rest))
    shares: list[float] = []
    while engine.waiting or engine.running:
        engine.step()
        shares += [x.cached / x.done for x in engine.running if x.done > len(x.prompt)]
    return math.fsum(losses) / len(losses), math.fsum(shares) / len(shares)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default="train_gpt.msgpack")
    parser.add_argument("--text", type=Path, default=sysconfig.get_path("stdlib"))
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--page-size", type=int, default=8)
    parser.add_argument("--cache-dtype", choices=[*CACHE_SCALES])
    parser.add_argument("--keep", type=float, action="append", help="may be given several times")
    args = parser.parse_args()
    model = load_gpt(args.model, "float32")
    texts = read_texts(args.text, model.length, args.texts)
    for keep in args.keep or (1.0, 0.5, 0.2, 0.1):
        loss, share = measure(model, texts, keep, args.page_size, args.cache_dtype)
        print(f"keep {keep:4.2f}   cache {share:4.0%}   loss {loss:.3f} nats per byte", flush=True)


if __name__ == "__main__":
    main()
