"""Which backend runs a problem; each answers yes, or the reason why not."""

from typing import Literal

Backend = Literal["cuda", "cpu", "xla"]
