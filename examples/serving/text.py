"""Text to tokens, and back while they come: bytes, or the tokenizer of a public checkpoint."""

import codecs
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class Text(Protocol):
    """What makes tokens of a prompt, and text of tokens one by one."""

    def encode(self, text: str) -> list[int]:
        """Makes tokens of a prompt."""
        ...

    def decoder(self) -> Callable[[int], str]:
        """Makes a function of each new token: the text of those characters that are whole then."""
        ...


class Bytes:
    """Each byte a token, and 0 before the text, as in train_gpt.py."""

    def encode(self, text: str) -> list[int]:
        return [0, *text.encode()]

    def decoder(self) -> Callable[[int], str]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return lambda token: decoder.decode(bytes([token]))


class Words:
    """The tokens of a tokenizer.json."""

    def __init__(self, path: Path):
        self._tokenizer = Tokenizer.from_file(str(path))

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def decoder(self) -> Callable[[int], str]:
        stream = DecodeStream(skip_special_tokens=True)
        return lambda token: stream.step(self._tokenizer, token) or ""


class Writer:
    """The text of one completion while its tokens come, up to the first stop string in it."""

    def __init__(self, decode: Callable[[int], str], stops: Sequence[str]):
        self._decode, self._stops = decode, stops
        self._held = ""  # may be the beginning of a stop string
        self.stopped = False

    def add(self, token: int) -> str:
        """Adds a token; returns the text that is certain by now, and was not before."""
        held = self._held + self._decode(token)
        found = [at for at in map(held.find, self._stops) if at >= 0]
        self.stopped = bool(found)
        begun = (n for x in self._stops for n in range(1, len(x)) if held.endswith(x[:n]))
        certain = min(found) if found else len(held) - max(begun, default=0)
        self._held = "" if found else held[certain:]
        return held[:certain]

    def finish(self) -> str:
        """Returns what was held back, when no token follows."""
        held, self._held = self._held, ""
        return held
