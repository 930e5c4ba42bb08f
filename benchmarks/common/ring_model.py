"""Owns what scaling.py counts of a causal ring: its operations, its bytes, the time of a model.

Read next: scaling.py, which measures the model's rate and bandwidth.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Cell:
    """One call: tokens of a device, query and kv heads, head dim, bytes of a number."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    item: int

    def operations(self, devices: int) -> float:
        """Operations of one device, forward and backward, where all have as much to do."""
        return 3.5 * 2 * self.heads * (devices * self.tokens) ** 2 * self.head_dim / devices

    @property
    def keys(self) -> int:
        """Bytes of one device's keys and values."""
        return 2 * self.tokens * self.kv_heads * self.head_dim * self.item


@dataclasses.dataclass(frozen=True)
class Model:
    """How long a balanced causal ring takes: operations and bytes per second, seconds of a hop."""

    rate: float
    bandwidth: float
    latency: float

    def seconds(self, cell: Cell, devices: int) -> float:
        """Returns the time of a forward and a backward pass.

        A device has as much to do with its own keys as with those of each hop, and keys that travel
        both ways share its bandwidth. In the backward pass, with 2.5 times the operations, the
        gradients of each step travel home, those of the last when nothing is left to do.
        """
        if devices == 1:
            return cell.operations(1) / self.rate
        step, hops = cell.operations(devices) / 3.5 / devices / self.rate, devices - 1
        link = cell.keys / self.bandwidth + self.latency
        forward = step + hops * max(step, link)
        # Gradients go home beside the step after: none beside the first, the last beside nothing.
        backward = 2.5 * step + max(2.5 * step, link) + (hops - 1) * max(2.5 * step, 2 * link)
        return forward + backward + link

    def sent(self, cell: Cell, devices: int) -> float:
        """Bytes that a device sends: keys and values twice, and their gradients."""
        return (devices - 1) * 3 * cell.keys
